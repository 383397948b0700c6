"""A source that leaves time for faults: it reads slowly, and does not end, until a file tells it to hurry."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
import xxhash

from headgate.connectors.base import Source, SourceBatch, SourceContext, owner_of_split
from headgate.operators.schemas import to_canonical

HURRY = "hurry"
"""Name of the file, in the root directory of a test's pipeline."""

TICK_MS = 10

_POSITION = struct.Struct("<Q")


def hurry(root: Path) -> None:
    """Let every ``Paced`` source of the pipeline at ``root`` go as fast as it can, and end."""
    (root / HURRY).touch()


@dataclass(frozen=True)
class Paced(Source):
    """Records of several splits, in order within each; the last one of each is held back until the hurry.

    Attributes:
        splits: one table each, of one schema.
        rate: records per second and split before the hurry.
        root: where the file ``hurry`` will be; "" never waits.
        batch_rows: after the hurry.
    """

    splits: tuple[pa.RecordBatch, ...]
    rate: float
    root: str
    batch_rows: int = 200

    @classmethod
    def of(cls, frames: Sequence[pl.DataFrame], rate: float, root: Path | str) -> Paced:
        """Make one of frames with the same columns; ``rate`` counts all of them together."""
        batches = tuple(to_canonical(frame.rechunk().to_arrow().combine_chunks().to_batches()[0]) for frame in frames)
        return cls(batches, rate / len(batches), str(root))

    def schema(self) -> pa.Schema:
        return self.splits[0].schema

    def identity(self) -> str:
        digest = xxhash.xxh3_64()
        for split in self.splits:
            digest.update(repr(split.to_pydict()).encode())
        return f"paced, {len(self.splits)} splits, digest {digest.hexdigest()}"

    def open(self, context: SourceContext) -> PacedReader:
        return PacedReader(self, context)


class PacedReader:
    """Reads the splits of one subtask."""

    def __init__(self, source: Paced, context: SourceContext) -> None:
        self._source = source
        positions = context.positions or {}
        self._at = {
            index: _POSITION.unpack(positions[str(index)])[0] if str(index) in positions else 0
            for index in range(len(source.splits))
            if owner_of_split(index, context.parallelism) == context.subtask_index
        }
        self._begun_at = dict(self._at)
        self._ended = {index for index, at in self._at.items() if at >= self._rows(index)}
        self._opened_s = time.monotonic()
        self._looked_s = 0.0
        self._is_hurried = not source.root

    def _rows(self, index: int) -> int:
        return self._source.splits[index].num_rows

    def splits(self) -> Sequence[str]:
        return [str(index) for index in self._at if index not in self._ended]

    def is_finished(self) -> bool:
        return len(self._ended) == len(self._at)

    def positions(self) -> dict[str, bytes]:
        return {str(index): _POSITION.pack(at) for index, at in self._at.items()}

    def wakeup_ms(self) -> int:
        return 0 if self._is_hurried and not self.is_finished() else TICK_MS

    def close(self) -> None:
        """Nothing is open."""

    def poll(self) -> SourceBatch | None:
        self._look()
        for index in sorted(self._at, key=lambda index: self._at[index] - self._begun_at[index]):
            start, end = self._at[index], self._limit(index)
            if index in self._ended or start >= end:
                continue
            self._at[index] = end
            if end >= self._rows(index):
                self._ended.add(index)
            batch = self._source.splits[index].slice(start, end - start)
            return SourceBatch(str(index), batch, None, index in self._ended)
        return None

    def _limit(self, index: int) -> int:
        if self._is_hurried:
            return min(self._at[index] + self._source.batch_rows, self._rows(index))
        allowed = int((time.monotonic() - self._opened_s) * self._source.rate)
        return min(self._begun_at[index] + allowed, self._rows(index) - 1)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._is_hurried and now - self._looked_s > TICK_MS / 1_000:
            self._looked_s = now
            self._is_hurried = (Path(self._source.root) / HURRY).exists()
