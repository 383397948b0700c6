"""Appends on their way: what a writer holds until it is durable, and what it says then.

Counterpart: ``writer.StreamWriter``. Source: S7, S10 and S38 of docs/spec/stream-store.md.
Never writes anything itself.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

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
    """A durable append. ``is_duplicate``: its sequence number was there already, nothing was added (S7)."""

    ranges: tuple[AppendedRange, ...] = ()
    is_duplicate: bool = False


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
    starts: dict[int, int] | None = None

    def acknowledge(self) -> None:
        """Complete the futures of what is durable; repeating completes those that are left."""
        assert self.encoded is not None
        assert self.starts is not None
        starts = dict(self.starts)
        for item, counts in zip(self.items, self.encoded.counts.tolist(), strict=True):
            ranges = []
            for segment, count in enumerate(counts):
                if count:
                    ranges.append(AppendedRange(segment, starts[segment], count))
                    starts[segment] += count
            if not item.future.done():
                item.future.set_result(Appended(tuple(ranges)))
