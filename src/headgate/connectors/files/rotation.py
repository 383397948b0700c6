"""Files that are rotated: where a renamed file is now, and which files of its series are input.

A renamed file is found by its inode first, and by what was read of it in any case.

``TextFiles("app.log")`` does not select ``app.log.1``. What lies there at the first look was rotated away before and
is no input; what comes later had the name ``app.log`` for a while. Which is which follows from looks alone: all that
lies beside a followed file that is still in its place was rotated away before that file was made. Neither dates nor
numbers say it, as clocks are set, times restored, and some number upwards.

Counterpart: ``file_tracker``, which keeps the files that are input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import field

import xxhash

from headgate.connectors.files.file_position import OlderFile
from headgate.connectors.files.filesystem import ABSENT, LOCAL, FileSystem, failing, inode_of
from headgate.connectors.files.line_file import HEAD_BYTES, LineFile
from headgate.connectors.files.selection import COMPRESSED, series_of
from headgate.dataclass import dataclass

SCANS_MAX = 16
"""So often is a directory looked through in which files are being renamed."""


def siblings(path: str, system: FileSystem) -> list[tuple[str, int]]:
    """Return the files of the directory of ``path``, by name, with their inodes; none if it is gone.

    Raises:
        StorageError: it cannot be listed.
    """
    with failing("list", os.path.dirname(path)):
        try:
            return system.siblings(path)
        except ABSENT:
            return []


def neighbours(path: str, system: FileSystem) -> list[tuple[str, int]]:
    """Return the other files of the directory of ``path``, with their inodes; compressed ones left out."""
    found = siblings(path, system)
    return [(other, inode) for other, inode in found if other != path and not other.lower().endswith(COMPRESSED)]


def renamed_to(file: LineFile, is_free: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return where ``file``, which is not at its path any more, is now, or None.

    It has some name at any time, but may get another one between the listing and the look at it, and a listing may
    leave out what is being renamed. So only two listings in a row that are alike say that it is nowhere.
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

    One under its own name, such as ``a.json.gz``, was not made by rotation.
    """
    pairs = [os.path.splitext(other) for other, _ in siblings(file.path, file.system)]
    stems = {stem for stem, ending in pairs if ending.lower() in COMPRESSED and series_of(stem) == series_of(file.path)}
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
class ForeignFiles:
    """The files of other subtasks, by inode."""

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


Found = list[tuple[str, int]]
"""Files by path, with their inodes."""


class OlderFiles:
    """The files of each series that are no input, by inode. A series is named by the path of its unrotated file."""

    def __init__(self, system: FileSystem) -> None:
        self._system = system
        self._older: dict[str, dict[int, OlderFile]] = {}

    def __bool__(self) -> bool:
        """Whether there is any series of which something is not selected."""
        return bool(self._older)

    def __contains__(self, series: str) -> bool:
        return series in self._older

    def of(self, series: str) -> tuple[OlderFile, ...] | None:
        """Return those of ``series``, for its position; None: not looked at yet."""
        known = self._older.get(series)
        return None if known is None else tuple(known[inode] for inode in sorted(known))

    def restore(self, series: str, older: Iterable[OlderFile]) -> None:
        """Take over what a position says."""
        self._older.setdefault(series, {}).update({each.inode: each for each in older})

    def beside(self, series: Collection[str], listed: Collection[str]) -> dict[str, Found]:
        """Return the files of each of ``series`` that are not ``listed``; each directory is looked at once."""
        found: dict[str, Found] = {each: [] for each in sorted(series)}
        selected = set(listed)
        for directory in sorted({os.path.dirname(each) for each in series}):
            for path, inode in neighbours(os.path.join(directory, ""), self._system):
                name = series_of(path)
                is_wanted = name in found and path != name and path not in selected
                if is_wanted and self._system.link_target(path) is None:
                    found[name].append((path, inode))
        return found

    def prune(self, series: str, found: Found) -> None:
        """Forget what is not there any more."""
        if series in self._older:
            there = {inode for _, inode in found}
            self._older[series] = {inode: each for inode, each in self._older[series].items() if inode in there}

    def are(self, series: str, found: Found) -> None:
        """Note that what of ``series`` was ``found`` is no input."""
        known = self._older.setdefault(series, {})
        noted = [known.get(inode) or self._seen(path, inode) for path, inode in found]
        known.update({each.inode: each for each in noted if each is not None})

    def are_written_before(self, series: str, found: Found, path: str) -> None:
        """As ``are`` for those that were last written to before ``path`` was: if no position says more."""
        limit_ns = _written_ns(path, self._system)
        times = [(file, _written_ns(file[0], self._system)) for file in found]
        self.are(series, [file for file, at_ns in times if limit_ns is not None and (at_ns or 0) < limit_ns])

    def missed(self, series: str, found: Found) -> Found:
        """Return what was ``found`` and is not among the older files."""
        known = self._older.get(series, {})
        return [(path, inode) for path, inode in found if inode not in known or not self._is(known[inode], path)]

    def _is(self, older: OlderFile, path: str) -> bool:
        now = self._seen(path, older.inode, older.size_bytes)
        return now is None or not older.head_digest or now == older

    def _seen(self, path: str, inode: int, size_bytes: int | None = None) -> OlderFile | None:
        """As ``seen_at`` for the file that was listed at ``path``, wherever it was renamed to since."""
        was_missing = False
        for _ in range(SCANS_MAX):
            seen = seen_at(path, self._system, size_bytes)
            if seen is not None and seen.inode == inode:
                return seen
            now = next((other for other, its in neighbours(path, self._system) if its == inode), None)
            if now is None and was_missing:
                return None
            was_missing, path = now is None, now or path
        return None


def seen_at(path: str, system: FileSystem, size_bytes: int | None = None) -> OlderFile | None:
    """Return what identifies the file at ``path``, None if there is none; ``size_bytes``: when it had so many.

    A file that has fewer is identified as it is, and one that may not be read without its content.
    """
    with failing("look at", path):
        try:
            with system.opened(path) as descriptor:
                status = system.fstat(descriptor)
                known = min(size_bytes or status.st_size, status.st_size)
                head = system.pread(descriptor, min(known, HEAD_BYTES), 0)
        except ABSENT:
            return None
        except PermissionError:
            inode = inode_of(path, system)
            return None if inode is None else OlderFile(inode, 0, 0)
    return OlderFile(status.st_ino, known, xxhash.xxh3_64_intdigest(head))


def _written_ns(path: str, system: FileSystem) -> int | None:
    with failing("look at", path):
        try:
            return system.stat(path).st_mtime_ns
        except ABSENT:
            return None
