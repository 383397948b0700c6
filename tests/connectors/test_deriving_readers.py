"""What a reader of a user gets from ``SourceReader``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, owner_of_split
from headgate.testing import check_source

SCHEMA = pa.schema([("n", pa.int64())])
COUNT = 7


@dataclass(frozen=True)
class Numbers(Source):
    """So many splits, each with some numbers."""

    splits_count: int

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "numbers"

    def open(self, context: SourceContext) -> NumbersReader:
        mine = [s for s in range(self.splits_count) if owner_of_split(s, context.parallelism) == context.subtask_index]
        return NumbersReader({str(s): int((context.positions or {}).get(str(s), b"0")) for s in mine})


class NumbersReader(SourceReader):
    def __init__(self, following: dict[str, int]) -> None:
        self._following = following

    def splits(self) -> Sequence[str]:
        return [split for split, following in self._following.items() if following < COUNT]

    def poll(self) -> SourceBatch | None:
        for split in self.splits()[:1]:
            self._following[split] += 1
            batch = pa.record_batch([[self._following[split]]], SCHEMA)
            return SourceBatch(split, batch, is_split_finished=self._following[split] == COUNT)
        return None

    def positions(self) -> dict[str, bytes]:
        return {split: b"%d" % following for split, following in self._following.items()}


def test_a_reader_that_derives_has_ended_without_splits() -> None:
    assert len(check_source(Numbers(3))) == 3 * COUNT
    reader = Numbers(1).open(SourceContext("p", "numbers", 0, 1, None))
    while not reader.is_finished():
        assert reader.poll() is not None
    assert (reader.splits(), reader.poll(), reader.wakeup_ms()) == ([], None, 100)
    reader.close()
    assert Numbers(0).open(SourceContext("p", "numbers", 0, 1, None)).is_finished()
