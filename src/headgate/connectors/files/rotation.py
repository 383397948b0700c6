"""Where files went that were renamed: by inode first, by what was read of them in any case (N18, N19).

Counterparts: ``files``, which reads them, and ``lines``, which knows what was read. Never opens a file for its lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from headgate.connectors.files.lines import HEAD_BYTES, LineFile
from headgate.connectors.files.listing import COMPRESSED, series_of
from headgate.connectors.files.system import ABSENT, LOCAL, FileSystem, failing

SCANS_MAX = 16
"""So often is a directory looked through in which files are being renamed."""


def siblings(path: str, system: FileSystem) -> list[tuple[str, int]]:
    """Return the files of the directory of ``path``, by name, with their inodes; none if it is gone.

    Raises:
        StorageError: it cannot be listed (N51).
    """
    with failing("list", os.path.dirname(path)):
        try:
            return system.siblings(path)
        except ABSENT:
            return []


def neighbours(path: str, system: FileSystem) -> list[tuple[str, int]]:
    """Return the other files of the directory of ``path``, with their inodes; compressed ones left out (N4)."""
    found = siblings(path, system)
    return [(other, inode) for other, inode in found if other != path and not other.endswith(COMPRESSED)]


def renamed_to(file: LineFile, is_free: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return where ``file``, which is not at its path any more, is now, or None.

    It has some name at any time, but may get another one between the listing and the look at it, and a listing may
    leave out what is being renamed. So only two listings in a row that are alike say that it is nowhere (N50).
    """
    before = None
    for _ in range(SCANS_MAX):
        others = [(path, inode) for path, inode in neighbours(file.path, file.system) if is_free(path)]
        now = _among(others, file)
        if now is not None or others == before:
            return now
        before = others
    return None


def _among(others: list[tuple[str, int]], file: LineFile) -> str | None:
    """Return which of ``others`` is ``file``.

    Without an inode it is the only file in the directory that has what was read.
    """
    if file.inode:
        return next((path for path, inode in others if inode == file.inode and file.is_at(path, inode)), None)
    found = [path for path, _ in others if file.has_fingerprint and file.is_at(path)]
    return found[0] if len(found) == 1 else None


def was_compressed(file: LineFile) -> bool:
    """Whether ``file``, which is nowhere, may have become a compressed file of its series by rotation (N21).

    One under its own name, such as ``a.json.gz``, somebody made of a file that was read.
    """
    pairs = [os.path.splitext(other) for other, _ in siblings(file.path, file.system)]
    stems = {stem for stem, ending in pairs if ending in COMPRESSED and series_of(stem) == series_of(file.path)}
    return bool(stems.difference([file.path] if file.was_opened else []))


@dataclass(slots=True)
class SeenFile:
    """A file that another subtask owns: a new name does not make it a new file."""

    path: str
    head_bytes: int
    head_digest: int
    system: FileSystem = LOCAL

    def is_at(self, path: str) -> bool:
        """Whether its owner finds this file at ``path``, where its inode is, so far as that is known here."""
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
        with failing("read", path), system.opened(path) as descriptor:
            return system.pread(descriptor, HEAD_BYTES, 0)
    except ABSENT:
        return b""
