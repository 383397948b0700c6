"""Which files of a rotated series are no input, and which are, although nobody saw them in time (N49).

``TextFiles("app.log")`` does not select ``app.log.1``. What lies there at the first look was rotated away before and is
none of the input; what comes later had the name ``app.log`` for a while. Which is which follows from looks alone: all
that lies beside a followed file that is still in its place was rotated away before that file was made. Neither dates
nor numbers say it, as clocks are set, times restored, and some number upwards.

Counterpart: ``table``, which owns the files that are input. Source: rule N49 of docs/spec/connectors.md.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import xxhash

from headgate.connectors.files.lines import HEAD_BYTES
from headgate.connectors.files.listing import series_of
from headgate.connectors.files.position import OlderFile
from headgate.connectors.files.rotation import SCANS_MAX, neighbours
from headgate.connectors.files.system import ABSENT, FileSystem, failing, inode_of

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
        """Return those of ``series``, for its position; None: nobody has looked yet."""
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
        """As ``seen_at`` for the file that was listed at ``path``, wherever it was renamed to since (N50)."""
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
    """Return what the file at ``path`` is told by, None if there is none; ``size_bytes``: when it had so many.

    A file that has fewer is told as it is, and one that may not be read without its content.
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
