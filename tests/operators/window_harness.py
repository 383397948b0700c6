"""All subtasks of one windowed aggregation, with the shuffle between its two operators done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from tests.operators.harness import Harness, encoded
from tests.state.backends import Chosen

from headgate.operators.keys import partition
from headgate.operators.windows.aligned_windows import WindowOperators


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
        if not self._before:
            self._deliver([batch])
            return
        self._before[sender].send(batch)
        self._shuffle(sender)

    def _shuffle(self, sender: int) -> None:
        out = self._before[sender].out
        batches, out.batches = out.batches, []
        self._deliver(batches)

    def _deliver(self, batches: Sequence[pa.RecordBatch]) -> None:
        for one in batches:
            for window, part in zip(
                self.windows, partition(one, self._operators.keys, 128, self.parallelism), strict=True
            ):
                if part is not None:
                    window.send(part)

    def watermark(self, watermark_ms: int) -> None:
        for sender, before in enumerate(self._before):
            before.operator.on_watermark(watermark_ms)
            self._shuffle(sender)
        for one in self.windows:
            one.operator.on_watermark(watermark_ms)

    def flush(self) -> None:
        """Send what the operators before the shuffle hold, as a barrier does."""
        for sender, combine in enumerate(self._before):
            combine.operator.before_barrier()
            self._shuffle(sender)

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
