"""All subtasks of one windowed aggregation, with the shuffle between its two operators done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from tests.operators.harness import Harness, encoded
from tests.state.backends import Chosen

from headgate.operators.aligned_windows import WindowOperators
from headgate.operators.keys import partition


class Shuffled:
    """Operators before (if there is one) and after the shuffle, in ``parallelism`` subtasks."""

    def __init__(
        self, operators: WindowOperators, parallelism: int, states: Sequence[Any] = (), *, begun_ms: int = 1_000
    ) -> None:
        self._operators = operators
        self.parallelism = parallelism
        places = [(i, parallelism) for i in range(parallelism)]
        self._before = [Harness(operators.combine, subtask=at) for at in places] if operators.combine else []
        self.windows = [
            Harness(operators.window, states, subtask=at, worker=Chosen.worker, begun_ms=begun_ms) for at in places
        ]

    def send(self, sender: int, batch: pa.RecordBatch) -> None:
        batches = [batch]
        if self._before:
            combine = self._before[sender]
            combine.send(batch)
            batches, combine.out.batches = combine.out.batches, []
        for one in batches:
            for window, part in zip(
                self.windows, partition(one, self._operators.keys, 128, self.parallelism), strict=True
            ):
                if part is not None:
                    window.send(part)

    def watermark(self, watermark_ms: int) -> None:
        for one in [*self._before, *self.windows]:
            one.operator.on_watermark(watermark_ms)

    def snapshot(self) -> list[Any]:
        return [encoded(one.operator, one.context) for one in self.windows]

    def take(self) -> list[dict[str, Any]]:
        """Return the results since the last call."""
        rows = [row for one in self.windows for row in one.out.rows()]
        for one in self.windows:
            one.out.batches.clear()
        return rows

    def late(self) -> int:
        return sum(one.context.metrics.counters.get("late", 0) for one in self.windows)
