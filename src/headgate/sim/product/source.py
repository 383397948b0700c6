"""A bounded source that takes its time, so that faults meet a pipeline in the middle of its work.

Its splits have names, as files have: a list of them may grow between two starts, and positions stay with their split.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.connectors.base import SourceBatch, SourceContext, SourceReader, owner_of_split
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


class PacedSplits:
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
        mine = {
            name: batch
            for index, (name, batch) in enumerate(self._splits.items())
            if owner_of_split(index, context.parallelism) == context.subtask_index
        }
        return _PacedReader(mine, context.positions or {}, self._pace, self._now_ms, self._trouble)


class _PacedReader:
    """Takes from its splits in turn; after each batch it has nothing for a while."""

    def __init__(
        self,
        splits: Mapping[str, pa.RecordBatch],
        positions: Mapping[str, bytes],
        pace: Pace,
        now_ms: Callable[[], int],
        trouble: Callable[[], bool],
    ) -> None:
        self._trouble = trouble
        self._splits = splits
        self._pace = pace
        self._now_ms = now_ms
        self._opened_ms = now_ms()
        self._rests_until_ms = 0
        self._next = {name: POSITION.unpack(positions[name])[0] if name in positions else 0 for name in splits}
        self._ended = {name for name in splits if splits[name].num_rows and self._next[name] >= splits[name].num_rows}
        self._turns = 0

    def splits(self) -> Sequence[str]:
        return [name for name in self._splits if name not in self._ended]

    def poll(self) -> SourceBatch | None:
        open_splits = self.splits()
        if self.wakeup_ms() or not open_splits:
            return None
        if self._trouble():
            raise RuntimeError("trouble of the user's own")
        self._rests_until_ms = self._now_ms() + self._pace.pause_ms
        self._turns += 1
        name = open_splits[self._turns % len(open_splits)]
        batch = self._splits[name]
        if not batch.num_rows and self._now_ms() < self._opened_ms + self._pace.idle_ms:
            return None
        start = self._next[name]
        self._next[name] = end = min(start + self._pace.batch_rows, batch.num_rows)
        if end == batch.num_rows:
            self._ended.add(name)
        return SourceBatch(name, batch.slice(start, end - start), None, name in self._ended)

    def is_finished(self) -> bool:
        return len(self._ended) == len(self._splits)

    def positions(self) -> dict[str, bytes]:
        return {name: POSITION.pack(at) for name, at in self._next.items()}

    def wakeup_ms(self) -> int:
        return max(self._rests_until_ms - self._now_ms(), 0)

    def close(self) -> None:
        """Nothing is open."""
