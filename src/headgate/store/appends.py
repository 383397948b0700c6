"""Appends on their way: what a writer holds until it is durable, and what it says then.

Counterpart: ``writer.StreamWriter``. Source: S7, S10 and S38 of docs/spec/stream-store.md.
Never writes anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from headgate.store.chunks import BatchChunk


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """Where events of one append are: ``events_count`` of ``segment`` from ``start`` on."""

    segment: int
    start: int
    events_count: int


@dataclass(frozen=True, slots=True)
class Appended:
    """A durable append.

    Attributes:
        ranges: where its events are; empty where they were truncated before anybody could tell (S68).
        is_duplicate: its sequence number was there already, nothing was added (S7).
    """

    ranges: tuple[AppendedRange, ...] = ()
    is_duplicate: bool = False


Starts: TypeAlias = Mapping[int, int]
"""Segment → position of the first event of a flush."""

TRUNCATED: Starts = {}
"""A flush took effect, and what it had added is gone by now."""


@dataclass(slots=True)
class PendingAppend:
    """An append that waits to be durable."""

    batch: pa.RecordBatch
    future: Future[Appended]
    sequence: int


@dataclass(slots=True)
class FlushAttempt:
    """One flush; kept until its outcome is known and told, so that a retry cannot append twice.

    Attributes:
        encoded: None until it was encoded.
        is_uncertain: it was tried before, so it may have taken effect.
        starts: once it is durable: segment → position of its first event.
    """

    path: str
    items: list[PendingAppend]
    turn: int
    encoded: BatchChunk | None = None
    is_uncertain: bool = False
    starts: Starts | None = None

    def begin_again(self, path: str) -> None:
        """It certainly did not take effect: let it be another one, of the same events in the same order."""
        self.path, self.encoded, self.is_uncertain = path, None, False

    def acknowledge(self) -> None:
        """Complete the futures of what is durable; repeating completes those that are left."""
        assert self.encoded is not None
        assert self.starts is not None
        starts = dict(self.starts)
        for item, counts in zip(self.items, self.encoded.counts.tolist(), strict=True):
            ranges = []
            for segment, count in zip(self.encoded.segments, counts, strict=True):
                if count and starts:
                    ranges.append(AppendedRange(segment, starts[segment], count))
                    starts[segment] += count
            if not item.future.done():
                item.future.set_result(Appended(tuple(ranges)))
