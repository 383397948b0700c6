"""Which files a source reads, and which subtask owns each of them.

Counterpart: ``files`` and ``parquet``, which read them. Source: rules N1–N3 of docs/spec/connectors.md.
Never opens a file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headgate.errors import UsageError

PATTERN_DEFAULT = "**/*"
"""Below a directory: every file, at any depth."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class FileSelection:
    """Files, globs and directories.

    Attributes:
        roots: absolute paths; one that contains ``*``, ``?`` or ``[`` is a glob.
        pattern: glob relative to a directory among the roots. Names that begin with "." or "_" are skipped (N4).
    """

    roots: tuple[str, ...]
    pattern: str = PATTERN_DEFAULT

    def find(self) -> list[str]:
        """Return the absolute paths of the files there are now, sorted.

        Raises:
            UsageError: a path does not exist, cannot be read, or is compressed.
        """
        found: set[str] = set()
        for root in self.roots:
            if glob.has_magic(root):
                found.update(path for path in glob.iglob(root, recursive=True) if os.path.isfile(path))
            elif os.path.isdir(root):
                found.update(self._below(root))
            elif os.path.isfile(root):
                found.add(root)
            else:
                raise UsageError(f"{root} does not exist; give a file, a directory or a glob that does")
        for path in found:
            _check_readable(path)
        return sorted(found)

    def _below(self, root: str) -> Iterable[str]:
        if not os.access(root, os.R_OK | os.X_OK):
            raise UsageError(f"directory {root} cannot be listed; allow this user to read it")
        for path in Path(root).glob(self.pattern):
            hidden = any(part[0] in "._" for part in path.relative_to(root).parts)
            if not hidden and path.is_file():
                yield str(path)

    def key(self, path: str) -> str:
        """Return what ownership of ``path`` is computed from: its name relative to its directory (N2).

        Does not need the file to exist; moving the whole directory keeps the keys.
        """
        for root in self.roots:
            base = _before_magic(root) if glob.has_magic(root) else root
            if path.startswith(base.rstrip("/") + "/"):
                return os.path.relpath(path, base)
        return os.path.basename(path)

    def __str__(self) -> str:
        return ", ".join(self.roots)


def select_files(paths: Paths, pattern: str = PATTERN_DEFAULT) -> FileSelection:
    """Return a selection; relative paths are relative to the working directory of this process (the driver).

    Raises:
        UsageError: no path was given.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given or any(not str(path) for path in given):
        raise UsageError("no input path was given; give a file, a directory or a glob")
    roots = tuple(os.path.abspath(os.path.expanduser(str(path))) for path in given)
    return FileSelection(roots, pattern)


def owner_of_file(key: str, parallelism: int) -> int:
    """Return the subtask that owns a file of a directory that grows (N2).

    Depends on the key alone, so that all subtasks agree without talking, whenever each of them sees the file.
    Frozen: xxh3-64 of the UTF-8 bytes, modulo the parallelism.
    """
    return int(xxhash.xxh3_64_intdigest(os.fsencode(key))) % parallelism


def _before_magic(root: str) -> str:
    parts = root.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or "/"


def _check_readable(path: str) -> None:
    if path.endswith(COMPRESSED):
        raise UsageError(f"{path} is compressed, which is not supported yet; uncompress it first")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path} cannot be read; allow this user to read it")
