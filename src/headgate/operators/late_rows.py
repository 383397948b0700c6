"""Operators with timers that drop late rows: for ``over``, ``joins``, ``top_rows`` and windows with triggers.

Watermarks of subtasks may differ at a barrier: where channels become idle and active again, each subtask merges them in
the order in which it heard of it. After a restore with another parallelism a subtask goes on with the lowest of the
watermarks of its keys. What was late for a key stays late, because state that such a row needs may be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from headgate.operators.base import OperatorContext, Output, RestoredState
from headgate.operators.process.timers import TimedOperator
from headgate.operators.windows.fired_groups import FiredGroups
from headgate.operators.windows.lateness import count_late
from headgate.state.arrays import Mask
from headgate.state.backend import TimersMeta
from headgate.state.key_index import Slots


class InTimeOperator(TimedOperator):
    """Knows which rows are late, over a restore too."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._passed = FiredGroups()
        self._former: list[tuple[RestoredState, bytes]] = []

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. What was late before is late again, whichever subtask had its key."""
        super().restore(states)
        former, self._former = self._former, []
        if former:
            self._watermark_ms = self._passed.restore(self.context, former)

    def _restore_backend(
        self, states: Sequence[RestoredState]
    ) -> Iterator[tuple[RestoredState, Mapping[str, memoryview]]]:
        for state, sections in super()._restore_backend(states):
            meta = TimersMeta.found_in(sections, f"state of '{self.context.node}'")
            if meta is not None and meta.fired:
                self._former.append((state, meta.fired.encode()))
            yield state, sections

    def _timers_meta(self) -> TimersMeta:
        return replace(super()._timers_meta(), fired=self._passed.encode(self._watermark_ms).decode())

    def _advance(self, watermark_ms: int) -> None:
        """Have rows up to ``watermark_ms``, which is not that of the end, late from now on."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        self._passed.advance(self._watermark_ms)

    def _late(
        self, batch: pa.RecordBatch, keys: Sequence[str], last_ms: Slots, records: Slots | None = None
    ) -> Mask | None:
        """Count the rows of ``batch`` that are late, and return which these are; None: none is.

        Args:
            batch: the rows.
            keys: their key columns.
            last_ms: for each row, up to which watermark it must have come.
            records: how many records each row stands for; None: one.
        """
        late: Mask = last_ms <= self._watermark_ms
        if self._passed.is_any_ahead:
            late |= self._passed.late(batch, keys, last_ms + 1)
        if not late.any():
            return None
        late_ms = np.maximum(self._watermark_ms + 1 - last_ms[late], 1)
        count_late(self.context.metrics, late_ms, None if records is None else records[late])
        return late
