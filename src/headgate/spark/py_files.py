"""A program's own modules: where they are, and how they get to the executors of a cluster.

Workers of local Spark find them where the program finds them; on a cluster they are sent. Spark carries functions of
the program itself in its closure, and modules by name only. Never sends what was installed.
"""

from __future__ import annotations

import os
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headgate.dataclass import dataclass
from headgate.errors import UsageError

LEFT_OUT = ("__pycache__", ".git", ".venv")


@dataclass(frozen=True, slots=True)
class Submission:
    """What a start tells Spark beside the pipeline.

    Attributes:
        conf: settings of the session that is made for it.
        py_files: files that Spark adds to the path of the workers: ``.py``, ``.zip``, ``.egg``.
        directory: modules that were imported from here go with them; "": where the program is.
    """

    conf: tuple[tuple[str, str], ...] = ()
    py_files: tuple[str, ...] = ()
    directory: str = ""


def read_settings(given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return ``name=value`` as pairs.

    Raises:
        UsageError: one is no setting of Spark's, or one that the pipeline depends on.
    """
    pairs = []
    for text in given:
        name, is_there, value = text.partition("=")
        if not is_there or not name.startswith("spark."):
            raise UsageError(f"--conf is {text!r}, but must be like spark.executor.memory=2g")
        if name in ("spark.master", "spark.python.daemon.module"):
            other = "--master says that" if name == "spark.master" else "workers start from Headgate's own"
            raise UsageError(f"--conf {name} cannot be given: {other}")
        pairs.append((name, value))
    return tuple(pairs)


def read_py_files(given: Iterable[str]) -> tuple[str, ...]:
    """Return the files as absolute paths; a text may name several, separated by commas, as for ``spark-submit``.

    Raises:
        UsageError: one does not exist, or is nothing that Python can import from.
    """
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if not name.endswith((".py", ".zip", ".egg")):
            raise UsageError(f"--py-files names {name}, but takes .py, .zip and .egg; pack a package into a .zip")
        if not os.path.isfile(name):
            raise UsageError(f"--py-files names {name}, but there is no such file")
    return tuple(os.path.abspath(name) for name in names)


def program_directory() -> str:
    """Return where the program that runs is; the working directory where it has no file, as in a notebook."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(found)) if found else os.getcwd()


def local_modules(directory: str, loaded: Mapping[str, str | None]) -> list[Path]:
    """Return the modules (files) and packages (directories) right in ``directory`` that were imported from there.

    Args:
        directory: absolute.
        loaded: name and file of every module that was imported.
    """
    root = Path(directory)
    found = set()
    for name, file in loaded.items():
        top = name.partition(".")[0]
        if file is None or top in ("headgate", "__main__"):
            continue
        if Path(file) == root / f"{top}.py":
            found.add(root / f"{top}.py")
        elif root / top in Path(file).parents:
            found.add(root / top)
    return sorted(found)


def write_zip(paths: Iterable[Path], target: Path) -> None:
    """Write modules and packages into a zip from which Python can import them."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            for file in _files(path):
                archive.write(file, file.relative_to(path.parent))


def send_modules(context: Any, submission: Submission) -> None:
    """Have the workers of ``context`` find what ``submission`` names, and the modules beside the program.

    Called before the first job. On local Spark only what is named is added: the rest is found where it is.
    """
    for file in submission.py_files:
        context.addPyFile(file)
    if context.master.startswith("local"):
        return
    loaded = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    beside = local_modules(submission.directory or program_directory(), loaded)
    if beside:
        # In a directory that goes with the session: executors fetch the very file, also those that come later.
        archive = Path(context._temp_dir) / f"headgate-modules-{uuid.uuid4().hex}.zip"
        write_zip(beside, archive)
        context.addPyFile(str(archive))


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and not set(LEFT_OUT) & set(file.relative_to(path).parts):
            yield file


def program_place(target: str) -> str:
    """Return the directory in which a program's own modules are: the file's, or the working directory of a module."""
    path = Path(target)
    return str(path.resolve().parent) if target.endswith(".py") or path.is_file() else os.getcwd()


def with_directory(directory: str, path: str) -> str:
    """Return the import path ``path`` with ``directory`` in it; as the first one, if it was not there."""
    if directory in path.split(os.pathsep):
        return path
    return os.pathsep.join(part for part in (directory, path) if part)
