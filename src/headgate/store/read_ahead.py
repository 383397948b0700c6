"""A reader's way to its chunks where each request travels: the parts that follow are fetched while one is decoded.

Counterparts: ``fetching`` carries it out, ``reader`` says what follows. Source: S82 to S84 of
docs/spec/stream-store.md. Never changes what is read: what was not fetched, or failed before anybody waited for it, is
asked for when its turn comes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headgate.codec.chunk import ALIGNMENT, PART_BYTES_MAX
from headgate.storage.base import Storage
from headgate.store.catalogue.values import StoredPart
from headgate.store.fetching import Fetch, Fetching

RUN_BYTES = 8 << 20
"""Small parts that lie behind each other in a file are asked for at once, up to so many bytes."""

AHEAD_BYTES = 32 << 20
"""One reader has at most so much fetched and not read yet."""

RUNS_MAX = 8
"""One reader asks at most so often at one time."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parts of one segment that lie behind each other in one file. ``end``: the position after their last event."""

    path: str
    offset: int
    size_bytes: int
    end: int


@dataclass(slots=True)
class _Asked:
    """A run that was asked for; ``at``: where in its file the next part begins that nobody has taken."""

    run: Run
    fetch: Fetch
    at: int


def runs_of(parts: Iterable[StoredPart]) -> Iterator[Run]:
    """Join ``parts``, in their order, to runs of at most ``RUN_BYTES``; end where one cannot be (S37)."""
    run: Run | None = None
    for part in parts:
        entry = part.entry
        if not 0 < entry.size_bytes <= PART_BYTES_MAX or entry.offset < 0:
            break
        if run is not None and part.path == run.path:
            gap = entry.offset - run.offset - run.size_bytes
            size_bytes = run.size_bytes + gap + entry.size_bytes
            if 0 <= gap < ALIGNMENT and size_bytes <= RUN_BYTES:
                run = Run(run.path, run.offset, size_bytes, part.end)
                continue
        if run is not None:
            yield run
        run = Run(part.path, entry.offset, entry.size_bytes, part.end)
    if run is not None:
        yield run


class ReadAhead:
    """What ``chunks.read_part`` reads from, for one reader. One thread at a time."""

    def __init__(self, storage: Storage, fetching: Fetching) -> None:
        self._storage = storage
        self._fetching = fetching
        self._asked: deque[_Asked] = deque()
        self._asked_to = 0
        self._is_reading_on = False
        self._process = fetching.process_id
        weakref.finalize(self, _let_go, self._asked).atexit = False

    @property
    def url(self) -> str:
        """The storage's."""
        return self._storage.url

    def ask(self, parts: Iterable[StoredPart], end: int | None) -> None:
        """Have ``parts``, which are read next in this order, fetched as far as there is room (S82).

        ``end``: nothing at this position or behind it will be read.
        """
        if not self._is_reading_on or len(self._asked) >= RUNS_MAX:
            return
        self._notice_fork()
        held_bytes = sum(asked.run.size_bytes for asked in self._asked)
        for run in runs_of(self._new(parts, end)):
            held_bytes += run.size_bytes
            if held_bytes > AHEAD_BYTES or len(self._asked) >= RUNS_MAX:
                return
            fetch = self._fetching.begin(self._storage, run.path, run.offset, run.size_bytes)
            if fetch is None:
                return
            self._asked.append(_Asked(run, fetch, run.offset))
            self._asked_to = run.end

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        """Return bytes that were fetched ahead, or ask for them now. See ``Storage``."""
        self._notice_fork()
        fetched = self._fetched(path, offset, size_bytes)
        self._is_reading_on = True  # whoever reads one part reads the next one too
        return self._storage.get_range(path, offset, size_bytes) if fetched is None else fetched

    def forget(self) -> None:
        """Give up what was asked for, and fetch nothing ahead until the next part has been read."""
        _let_go(self._asked)
        self._asked_to, self._is_reading_on = 0, False

    def _fetched(self, path: str, offset: int, size_bytes: int) -> memoryview | None:
        if not self._asked:
            return None
        asked, end = self._asked[0], offset + size_bytes
        run = asked.run
        if path != run.path or offset < asked.at or end > run.offset + run.size_bytes:
            self.forget()  # it reads something else
            return None
        is_stale = asked.fetch.is_over
        try:
            payload = asked.fetch.wait()
        except Exception:
            self.forget()
            if is_stale:  # it failed before its turn, maybe long ago (S84)
                return None
            raise
        if payload is None:
            self.forget()
            return None
        asked.at = end
        if end == run.offset + run.size_bytes:
            self._asked.popleft().fetch.let_go()
        return memoryview(payload)[offset - run.offset : end - run.offset]

    def _new(self, parts: Iterable[StoredPart], end: int | None) -> Iterator[StoredPart]:
        for part in parts:
            if end is not None and part.start >= end:
                return
            if part.start >= self._asked_to:
                yield part

    def _notice_fork(self) -> None:
        if self._process != self._fetching.process_id:
            self._process = self._fetching.process_id
            self._asked.clear()  # the parent's, and so is their room
            self.forget()


def _let_go(asked: deque[_Asked]) -> None:
    while asked:
        asked.popleft().fetch.let_go()
