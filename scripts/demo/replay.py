"""Replays finished log files: merged by time, and spread out so that lines still flow at every kill.

Files of different days are merged, so that event time advances as it would have, had they been written together.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from feeder import Feeder
from recount import lines_of, parse

SECONDS = 25.0
"""After so long a third of the lines is left; the pace slows down, so that some flow whenever a process is killed."""
STEP_S = 0.05
RELEASED_SECONDS = 5.0


def merged(paths: list[Path]) -> list[str]:
    """Return all lines; those of one file keep their order."""
    return [line for _, _, line in heapq.merge(*(_timed(p, i) for i, p in enumerate(paths)), key=lambda t: t[:2])]


def disorder_s(lines: list[str]) -> int:
    """Return by how many seconds a line may be older than one before it."""
    latest, most = 0, 0
    for line in lines:
        parsed = parse(line)
        if parsed is not None:
            latest = max(latest, parsed.second)
            most = max(most, latest - parsed.second)
    return most


class Replay:
    """Feeds lines in a thread."""

    def __init__(self, feeder: Feeder, lines: list[str]) -> None:
        self._feeder, self._lines = feeder, lines
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def release(self) -> None:
        """Every kill has happened: feed the rest quickly."""
        self._released.set()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _run(self) -> None:
        at = 0
        while at < len(self._lines):
            pace = RELEASED_SECONDS if self._released.is_set() else SECONDS
            left = len(self._lines) if self._released.is_set() else len(self._lines) - at
            step = max(1, round(left * STEP_S / pace))
            self._feeder.feed(self._lines[at : at + step])
            at += step
            time.sleep(STEP_S)


def _timed(path: Path, index: int) -> Iterator[tuple[int, int, str]]:
    """Yield lines with the latest time seen so far in their file: ascending, as ``heapq.merge`` needs it."""
    latest = 0
    for line in lines_of(path):
        parsed = parse(line)
        latest = max(latest, parsed.second if parsed is not None else 0)
        yield latest, index, line
