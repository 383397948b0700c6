"""Which files a source reads, and which subtask owns each of them.

Counterpart: ``files`` and ``parquet``, which read them. Source: rules N1–N3 of docs/spec/connectors.md.
Never opens a file.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headgate.connectors.files.system import LOCAL, FileSystem
from headgate.errors import UsageError

PATTERN_DEFAULT = "**/*"
"""Below a directory: every file, at any depth."""

_ROTATED = re.compile(r"(?:[._-](?:\d[\d._:T-]*|old|bak|prev))+\Z")
"""What rotation appends to a name: numbers, dates and times, and a few words."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class FileSelection:
    """Files, globs and directories.

    Attributes:
        roots: absolute paths; one that contains ``*``, ``?`` or ``[`` is a glob.
        pattern: glob relative to a directory among the roots. Names that begin with "." or "_" are skipped (N4).
        system: where the files are.
    """

    roots: tuple[str, ...]
    pattern: str = PATTERN_DEFAULT
    system: FileSystem = LOCAL

    def find(self, *, skips_compressed: bool = False) -> list[str]:
        """Return the absolute paths of the files there are now, sorted; a link to another one of them is left out.

        Args:
            skips_compressed: leave compressed files out, as rotation makes them of files that were read.

        Raises:
            UsageError: a path does not exist, cannot be read, or is compressed.
        """
        found: set[str] = set()
        for root in self.roots:
            if glob.has_magic(root):
                found.update(path for path in self.system.matching(root) if self.system.is_file(path))
            elif self.system.is_directory(root):
                found.update(self._below(root))
            elif self.system.is_file(root):
                found.add(root)
            else:
                raise UsageError(f"{root} does not exist; give a file, a directory or a glob that does")
        if skips_compressed:
            found = {path for path in found if not path.endswith(COMPRESSED)}
        for path in found:
            self._check_readable(path)
        return sorted(path for path in found if self.system.link_target(path) not in found)

    def _below(self, root: str) -> Iterable[str]:
        if not self.system.may_list(root):
            raise UsageError(f"directory {root} cannot be listed; allow this user to read it")
        for path in self.system.below(root, self.pattern):
            hidden = any(part[0] in "._" for part in Path(path).relative_to(root).parts)
            if not hidden and self.system.is_file(path):
                yield path

    def _check_readable(self, path: str) -> None:
        if path.endswith(COMPRESSED):
            raise UsageError(f"{path} is compressed, which is not supported yet; uncompress it first")
        if not self.system.may_read(path):
            raise UsageError(f"{path} cannot be read; allow this user to read it")

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


def select_files(paths: Paths, pattern: str = PATTERN_DEFAULT, system: FileSystem = LOCAL) -> FileSelection:
    """Return a selection; relative paths are relative to the working directory of this process (the driver).

    Raises:
        UsageError: no path was given.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given or any(not str(path) for path in given):
        raise UsageError("no input path was given; give a file, a directory or a glob")
    roots = tuple(os.path.abspath(os.path.expanduser(str(path))) for path in given)
    return FileSelection(roots, pattern, system)


def owner_of_file(key: str, parallelism: int) -> int:
    """Return the subtask that owns a file of a directory that grows (N2).

    Depends on the key alone, so that all subtasks agree without talking, whenever each of them sees the file. What
    rotation appends to a name does not count: all files of a series have one owner, whoever renames them.
    Frozen: xxh3-64 of the UTF-8 bytes of the series' name, modulo the parallelism.
    """
    return int(xxhash.xxh3_64_intdigest(os.fsencode(series_of(key)))) % parallelism


def series_of(key: str) -> str:
    """Return the name of the series that a file belongs to: its name without what rotation appends to it (N18).

    ``app.log.1``, ``app.log-20260131``, ``app.log.2026-01-31_10`` and ``app.log.old`` belong to ``app.log``.
    """
    directory, name = os.path.split(key)
    stem = _ROTATED.sub("", name)
    return os.path.join(directory, stem) if any(c.isalpha() for c in stem) else key


def numbered(files: Iterable[str], known: Mapping[str, int | None]) -> dict[str, int]:
    """Number the files of a fixed list in the order in which they were first listed (N1).

    Args:
        files: the list of today.
        known: the files of the restored positions, with their numbers (None: from a position that had none).
    """
    found = {path: number for path, number in known.items() if number is not None}
    new = [*sorted(set(known) - set(found)), *sorted(set(files) - set(known))]
    first = max(found.values(), default=-1) + 1
    return found | {path: first + index for index, path in enumerate(new)}


def _before_magic(root: str) -> str:
    parts = root.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or "/"
