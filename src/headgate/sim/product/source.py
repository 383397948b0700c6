"""A bounded source that takes its time, so that faults meet a pipeline in the middle of its work.

Its splits have names, as files have: a list of them may grow between two starts, and positions stay with their split.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, owner_of_split
from headgate.sim.product.records import Row

SCHEMA = pa.schema([(name, pa.int64()) for name in ("k", "n", "v", "t", "left")])
POSITION = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast records come.

    Attributes:
        batch_rows: records at a time.
        pause_ms: from each batch to the next one.
        idle_ms: an empty split ends only when its reader is so old.
    """

    batch_rows: int
    pause_ms: int
    idle_ms: int = 0


def positions_of(names: Sequence[str], context: SourceContext) -> dict[str, int]:
    """Return where to go on in each of these splits that is this subtask's."""
    found = context.positions or {}
    mine = [name for i, name in enumerate(names) if owner_of_split(i, context.parallelism) == context.subtask_index]
    return {name: POSITION.unpack(found[name])[0] if name in found else 0 for name in mine}


class PacedReader:
    """Takes from its splits in turn; after each batch it has nothing for a while. How it reads is its subclasses'."""

    def __init__(self, positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        self._at, self._pace, self._now_ms = positions, pace, now_ms
        self._ended: set[str] = set()
        self._turns = 0
        self._rests_until_ms = 0

    def splits(self) -> Sequence[str]:
        """See ``SourceReader``."""
        return [name for name in self._at if name not in self._ended]

    def _take_turn(self, names: Sequence[str]) -> str:
        """Return which of these splits is next, and rest afterwards."""
        self._rests_until_ms = self._now_ms() + self._pace.pause_ms
        self._turns += 1
        return names[self._turns % len(names)]

    def is_finished(self) -> bool:
        """See ``SourceReader``."""
        return len(self._ended) == len(self._at)

    def positions(self) -> dict[str, bytes]:
        """See ``SourceReader``."""
        return {name: POSITION.pack(at) for name, at in self._at.items()}

    def wakeup_ms(self) -> int:
        """See ``SourceReader``."""
        return max(self._rests_until_ms - self._now_ms(), 0)

    def close(self) -> None:
        """See ``SourceReader``: nothing is open."""


class PacedSplits(Source):
    """Rows by split. What the driver lists is what is read, as with files (N1)."""

    def __init__(
        self,
        splits: Mapping[str, Sequence[Row]],
        pace: Pace,
        now_ms: Callable[[], int],
        trouble: Callable[[], bool] = lambda: False,
    ) -> None:
        """Configure; where there is ``trouble``, reading raises."""
        self._splits = {
            name: pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=SCHEMA)
            for name, rows in splits.items()
        }
        self._pace = pace
        self._now_ms = now_ms
        self._trouble = trouble

    def schema(self) -> pa.Schema:
        """See ``Source``."""
        return SCHEMA

    def identity(self) -> str:
        """See ``Source``: positions are kept by name."""
        return "splits by name"

    def open(self, context: SourceContext) -> SourceReader:
        """See ``Source``."""
        return _SplitsReader(
            self._splits, positions_of(list(self._splits), context), self._pace, self._now_ms, self._trouble
        )


class _SplitsReader(PacedReader):
    """Reads rows; an empty split ends late."""

    def __init__(
        self,
        splits: Mapping[str, pa.RecordBatch],
        positions: dict[str, int],
        pace: Pace,
        now_ms: Callable[[], int],
        trouble: Callable[[], bool],
    ) -> None:
        super().__init__(positions, pace, now_ms)
        self._trouble = trouble
        self._splits = splits
        self._opened_ms = now_ms()
        self._ended = {name for name, at in positions.items() if splits[name].num_rows and at >= splits[name].num_rows}

    def poll(self) -> SourceBatch | None:
        open_splits = self.splits()
        if self.wakeup_ms() or not open_splits:
            return None
        if self._trouble():
            raise RuntimeError("trouble of the user's own")
        name = self._take_turn(open_splits)
        batch = self._splits[name]
        if not batch.num_rows and self._now_ms() < self._opened_ms + self._pace.idle_ms:
            return None
        start = self._at[name]
        self._at[name] = end = min(start + self._pace.batch_rows, batch.num_rows)
        if end == batch.num_rows:
            self._ended.add(name)
        return SourceBatch(name, batch.slice(start, end - start), None, name in self._ended)
