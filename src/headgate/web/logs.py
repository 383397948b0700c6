"""The logs of a run's workers for browsers: their names, the end of one, and new lines.

Reads files that ``spark.worker_logs`` writes and rotates, and nothing else: a browser names a log, never a path (PG12).
Each reader remembers its place for itself; what it is given at once is bounded (PG14).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FIRST_BYTES = 64 << 10
"""Of what was written before a browser opened the log."""
STEP_BYTES_MAX = 256 << 10
"""Of one file at once. Of a log that grows faster, the end is shown and ``LEFT_OUT`` stands before it."""
LEFT_OUT = "(lines left out: they come faster than they can be shown)\n"

_NAME = re.compile(r"worker-[0-9]{1,6}|spark")


class LogDirectory:
    """The logs of one pipeline. Empty until its run has said where they are."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @property
    def place(self) -> str:
        """The directory; "" while it is unknown, or if there is none."""
        return "" if self._directory is None else str(self._directory)

    def set_directory(self, directory: str) -> None:
        """The run writes its logs to ``directory``."""
        self._directory = Path(directory)

    def names(self) -> list[str]:
        """Return which logs there are on this machine, those of workers first, by number."""
        if self._directory is None:
            return []
        try:
            found = [path.stem for path in self._directory.iterdir() if path.suffix == ".log"]
        except OSError:  # the workers are on other machines
            return []
        return sorted((name for name in found if _NAME.fullmatch(name)), key=_order)

    def reader(self, name: str) -> LogReader | None:
        """Return one at the end of a log, None if there is no such log."""
        return LogReader(Path(self.place) / f"{name}.log") if name in self.names() else None


@dataclass(frozen=True, slots=True)
class _Place:
    inode: int
    offset: int


class LogReader:
    """Reads one log to its end, again and again; follows it when it is rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: _Place | None = None

    def read(self) -> str:
        """Return what is new, in whole lines; at first the last ones that were there. "" if there is nothing."""
        try:
            with self._path.open("rb") as file:
                inode, size_bytes = _inode_and_size(file.fileno())
                before = self._place
                rest = "" if before is None or before.inode == inode else self._rest_of_the_former(before)
                begin, is_cut = self._begin(inode, size_bytes)
                file.seek(begin)
                content = file.read(size_bytes - begin)
        except OSError:  # between two files of a rotation, or never begun
            return ""
        content = content[: content.rfind(b"\n") + 1]
        self._place = _Place(inode, begin + len(content))
        if is_cut:
            content = content[content.find(b"\n") + 1 :]  # it began in the middle of a line
            rest += LEFT_OUT if before is not None else ""
        return rest + content.decode(errors="replace")

    def _begin(self, inode: int, size_bytes: int) -> tuple[int, bool]:
        """Return where to read on in the file that has the log's name now, and whether that leaves something out."""
        place, begin = self._place, 0
        if place is not None and place.inode == inode and place.offset <= size_bytes:
            begin = place.offset
        most = FIRST_BYTES if place is None else STEP_BYTES_MAX
        return (size_bytes - FIRST_BYTES, True) if size_bytes - begin > most else (begin, False)

    def _rest_of_the_former(self, before: _Place) -> str:
        """Return the unread rest of the log before its rotation."""
        try:
            with self._path.with_name(f"{self._path.name}.1").open("rb") as file:
                inode, _ = _inode_and_size(file.fileno())
                if inode != before.inode:
                    return ""
                file.seek(before.offset)
                return file.read(STEP_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""


def _inode_and_size(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size


def _order(name: str) -> tuple[bool, int]:
    _, _, number = name.partition("-")
    return not number, int(number or 0)
