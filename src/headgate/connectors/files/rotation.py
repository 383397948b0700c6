"""Where files went that were renamed: by inode first, by what was read of them in any case (N18, N19).

Counterparts: ``files``, which reads them, and ``lines``, which knows what was read. Never opens a file for its lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from headgate.connectors.files.lines import HEAD_BYTES, LineFile
from headgate.connectors.files.listing import COMPRESSED, FileSelection, series_of
from headgate.connectors.files.system import LOCAL, FileSystem


def inode_of(path: str, system: FileSystem = LOCAL) -> int | None:
    """Return the inode of the file at ``path``, or None if there is none."""
    try:
        return system.stat(path).st_ino
    except OSError:
        return None


def neighbours(path: str, system: FileSystem) -> list[tuple[str, int]]:
    """Return the other files of the directory of ``path``, with their inodes; compressed ones left out (N4)."""
    try:
        found = system.siblings(path)
    except OSError:
        return []
    return [(other, inode) for other, inode in found if other != path and not other.endswith(COMPRESSED)]


def renamed_to(file: LineFile, is_free: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return where ``file``, which is not at its path any more, is now, or None.

    A position of version 0.1 has no inode: then it is the only file in the directory that has what was read.
    """
    others = [(path, inode) for path, inode in neighbours(file.path, file.system) if is_free(path)]
    if file.inode:
        found = [path for path, inode in others if inode == file.inode and file.is_at(path)]
    else:
        found = [path for path, _ in others if file.has_fingerprint and file.is_at(path)]
    return found[0] if len(found) == 1 or (found and file.inode) else None


def missed(selection: FileSelection, path: str, moved_to: str) -> list[str]:
    """Return files of the series of ``path`` that were rotated away after ``moved_to`` was, oldest first.

    They were called ``path`` for a while in which nobody looked, so they belong to the input whatever is selected.
    """
    series = series_of(selection.key(path))
    found = []
    for other, _ in neighbours(path, selection.system):
        if other != moved_to and series_of(selection.key(other)) == series:
            found.append((selection.system.stat(other).st_mtime_ns, other))
    last_ns = selection.system.stat(moved_to).st_mtime_ns
    return [other for written_ns, other in sorted(found) if written_ns >= last_ns]


@dataclass(slots=True)
class SeenFile:
    """A file that another subtask owns: a new name does not make it a new file.

    ``is_unread``: its owner has read nothing of it, so to its owner the inode alone tells it (``renamed_to``).
    """

    path: str
    head_bytes: int
    head_digest: int
    system: FileSystem = LOCAL
    is_unread: bool = False

    def is_at(self, path: str) -> bool:
        """Whether its owner finds this file at ``path``, where its inode is, so far as that is known here."""
        if self.is_unread:
            return os.path.dirname(path) == os.path.dirname(self.path)
        head = _head(path, self.system)[: self.head_bytes]
        return self.head_bytes > 0 and xxhash.xxh3_64_intdigest(head) == self.head_digest


@dataclass(slots=True)
class Others:
    """The files of other subtasks, by inode (N20)."""

    files: dict[int, SeenFile] = field(default_factory=dict)
    system: FileSystem = LOCAL

    def note(self, path: str, inode: int) -> None:
        """Remember a file of another subtask under its name of today."""
        known = self.files.get(inode)
        if known is None or known.path != path or known.head_bytes < HEAD_BYTES:
            head = _head(path, self.system)
            self.files[inode] = SeenFile(path, len(head), xxhash.xxh3_64_intdigest(head), self.system)

    def has(self, path: str, inode: int) -> bool:
        """Whether the file at ``path`` is one of theirs that was renamed."""
        known = self.files.get(inode)
        return known is not None and known.path != path and known.is_at(path)


def _head(path: str, system: FileSystem) -> bytes:
    try:
        with system.opened(path) as descriptor:
            return system.pread(descriptor, HEAD_BYTES, 0)
    except OSError:
        return b""
