"""Finds the pipeline in a program: a file or a module that makes one.

The program is loaded, not run: what stands below ``if __name__ == "__main__"`` does not happen, and a bare
``p.run()`` ends the loading instead of running.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from headgate.api.foreground import RunRequested, loading_only
from headgate.api.pipeline import Pipeline
from headgate.errors import HeadgateError, UsageError
from headgate.operators.user_functions import user_traceback
from headgate.spark.py_files import program_place, with_directory

PROGRAM = "__headgate_program__"
"""Name of a file's module. It is not registered after loading, so that functions travel to workers by value."""

_NAMES = ("pipeline", "p")


def load_pipeline(target: str, arguments: Sequence[str] = ()) -> Pipeline:
    """Return the pipeline of a program.

    Args:
        target: path of a Python file, or name of a module.
        arguments: what the program finds in ``sys.argv[1:]``.

    Raises:
        UsageError: there is no such program, it fails, or it has no pipeline or several.
    """
    path = Path(target)
    is_file = target.endswith(".py") or path.is_file()
    if is_file and not path.is_file():
        raise UsageError(f"there is no file {target}")
    sys.argv = [target, *arguments]
    make_importable(program_place(target))
    try:
        with loading_only():
            names = _load_file(path) if is_file else vars(_load_module(target))
            return _pipeline_in(names, target)
    except RunRequested as requested:
        return cast(Pipeline, requested.pipeline)
    except (HeadgateError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise UsageError(f"{target} ended itself while it was loaded (exit code {error.code})") from error
    except Exception as error:
        raise UsageError(f"{target} cannot be loaded\n{user_traceback(error)}") from error


def _load_file(path: Path) -> dict[str, Any]:
    module = ModuleType(PROGRAM)
    module.__file__ = str(path)
    sys.modules[PROGRAM] = module  # dataclasses look their module up while they are defined
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
        names = vars(module)
        made = names.get("pipeline")
        if callable(made) and not isinstance(made, Pipeline):
            names["pipeline"] = made()
        return names
    finally:
        sys.modules.pop(PROGRAM, None)


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is neither a file nor a module {name}") from error
        raise


def _pipeline_in(names: dict[str, Any], target: str) -> Pipeline:
    """Return what is called ``pipeline`` or ``p``, the result of ``pipeline()``, or the only pipeline there is."""
    for name in _NAMES:
        value = names.get(name)
        if isinstance(value, Pipeline):
            return value
        if name == "pipeline" and callable(value):
            made = value()
            if not isinstance(made, Pipeline):
                raise UsageError(f"{target}: pipeline() must return a headgate.Pipeline, not {made!r}")
            return made
    found = {id(value): value for value in names.values() if isinstance(value, Pipeline)}
    if len(found) == 1:
        return next(iter(found.values()))
    what = "several pipelines" if found else "no pipeline"
    raise UsageError(f"{target} has {what}; call the one to run 'pipeline', or return it from a function pipeline()")


def importable_from(file: str) -> str:
    """Return what has to be on the path to import from a ``.py``, ``.zip`` or ``.egg``."""
    return os.path.dirname(file) if file.endswith(".py") else file


def make_importable(directory: str) -> None:
    """Let the program, and the workers of local Spark, import what stands there (a directory, or an archive)."""
    if directory not in sys.path:
        sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = with_directory(directory, os.environ.get("PYTHONPATH", ""))
