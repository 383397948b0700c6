"""An operator in several subtasks, of which each gets the records of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from tests.operators.harness import Harness
from tests.state.backends import Chosen

from headgate.operators.base import OperatorSpec
from headgate.operators.keys import partition

EACH_PAIR = (1, 1, 2, 2, 3, 3, 5, 5, 1, 3, 1, 5, 2, 5, 3, 2, 1)
"""Each of these numbers of subtasks follows on each."""

assert len(set(pairwise(EACH_PAIR))) == 16


class Subtasks:
    """As many harnesses as ``parallelism`` says; ``states`` are snapshots of any number of former ones."""

    def __init__(
        self,
        spec: OperatorSpec,
        keys: Sequence[str],
        parallelism: int,
        states: Sequence[Any] = (),
        *,
        begun_ms: int = 1_000,
    ) -> None:
        self._keys = keys
        self.harnesses = [
            Harness(spec, states, subtask=(i, parallelism), worker=Chosen.worker, begun_ms=begun_ms)
            for i in range(parallelism)
        ]

    def send(self, batch: pa.RecordBatch) -> None:
        for harness, part in zip(self.harnesses, partition(batch, self._keys, 128, len(self.harnesses)), strict=True):
            if part is not None:
                harness.send(part)

    def watermark(self, watermark_ms: int) -> None:
        for harness in self.harnesses:
            harness.operator.on_watermark(watermark_ms)

    def owner(self, batch: pa.RecordBatch) -> int:
        """Return which of them gets the first row of ``batch``."""
        parts = partition(batch.slice(0, 1), self._keys, 128, len(self.harnesses))
        return next(i for i, part in enumerate(parts) if part is not None)

    def rows(self) -> list[dict[str, Any]]:
        return [row for harness in self.harnesses for row in harness.out.rows()]

    def take(self) -> list[dict[str, Any]]:
        """Return the results since the last call."""
        found = self.rows()
        for harness in self.harnesses:
            harness.out.batches.clear()
        return found

    def snapshot(self) -> list[Any]:
        return [harness.snapshot() for harness in self.harnesses]
