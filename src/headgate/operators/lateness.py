"""Late records: how many came, how late they were, and operators with timers that drop them.

Lateness is counted in buckets, because counters of subtasks, and of runs of a pipeline, are added up.

Watermarks of subtasks may differ at a barrier: where channels become idle and active again, each subtask merges them in
the order in which it heard of it. After a restore with another parallelism a subtask goes on with the lowest of the
watermarks of its keys. What was late for a key stays late, because state that such a row needs may be forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.model.ids import key_groups_of_subtask
from headgate.model.progress import LATE_RECORDS, LATENESS_MS, late_within
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    OperatorContext,
    OperatorMetrics,
    Output,
    RestoredState,
)
from headgate.operators.process.timers import TimedOperator
from headgate.state.backend import TimersMeta
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.key_index import Slots
from headgate.state.values import Mask

_BOUNDS = np.array(LATENESS_MS)


def count_late(
    metrics: OperatorMetrics, late_ms: npt.NDArray[np.int64], records: npt.NDArray[np.int64] | None = None
) -> None:
    """Count late rows.

    Args:
        metrics: the operator's.
        late_ms: for each row, by how much longer the watermark would have had to wait for it.
        records: how many records each row stands for; None: one.
    """
    buckets = np.minimum(np.searchsorted(_BOUNDS, late_ms), len(_BOUNDS) - 1)
    counts = np.bincount(buckets, weights=records, minlength=len(_BOUNDS)).astype(np.int64)
    metrics.add(LATE_RECORDS, int(counts.sum()))
    for bucket in np.flatnonzero(counts):
        metrics.add(late_within(LATENESS_MS[bucket]), int(counts[bucket]))


class FiredGroups:
    """The watermark per key group of one subtask, until its own watermark has passed all of them."""

    def __init__(self) -> None:
        self._first = 0
        self._ms: npt.NDArray[np.int64] | None = None
        self._max_parallelism = 0
        self._restored_ms = self._restored_before_end_ms = np.empty(0, np.int64)
        self._before_end_ms = WATERMARK_MIN_MS

    def restore(self, context: OperatorContext, states: Sequence[tuple[RestoredState, bytes]]) -> int:
        """Take over what ``encode`` wrote in every former subtask; return the watermark to go on with."""
        owned = key_groups_of_subtask(context.subtask_index, context.max_parallelism, context.parallelism)
        found = np.full(context.max_parallelism, WATERMARK_MIN_MS, np.int64)
        before_end = found.copy()
        for state, encoded in states:
            meta = json.loads(encoded)
            former = key_groups_of_subtask(state.subtask_index, context.max_parallelism, state.parallelism)
            found[former.start : former.stop] = meta["watermark_ms"]
            for group, watermark_ms in meta.get("ahead", ()):
                found[group] = watermark_ms
            before_end[former.start : former.stop] = meta.get("before_end_ms", WATERMARK_MIN_MS)
        self._max_parallelism, self._first = context.max_parallelism, owned.start
        self._restored_ms = found[owned.start : owned.stop]
        self._restored_before_end_ms = before_end[owned.start : owned.stop]
        self._before_end_ms = int(self._without_end().min())
        return self._start_at(self._restored_ms)

    def resume(self) -> int:
        """Return the watermark to go on with when more input comes: what the end alone has fired is not late."""
        return max(self._start_at(self._without_end()), self._before_end_ms)

    def _without_end(self) -> npt.NDArray[np.int64]:
        has_ended = self._restored_ms == WATERMARK_MAX_MS
        return np.where(has_ended, self._restored_before_end_ms, self._restored_ms)

    def _start_at(self, found: npt.NDArray[np.int64]) -> int:
        lowest = int(found.min())
        self._ms = found if found.max() > lowest else None
        return lowest

    @property
    def is_any_ahead(self) -> bool:
        """Whether windows of some keys fired further than the subtask's watermark says."""
        return self._ms is not None

    def advance(self, watermark_ms: int) -> None:
        """Forget what the subtask's own watermark covers."""
        if watermark_ms < WATERMARK_MAX_MS:
            self._before_end_ms = watermark_ms
        if self._ms is not None and watermark_ms >= self._ms.max():
            self._ms = None

    def encode(self, watermark_ms: int) -> bytes:
        """Return ``watermark_ms`` of the subtask, and the key groups that are ahead of it."""
        meta: dict[str, Any] = {"watermark_ms": watermark_ms, "before_end_ms": self._before_end_ms}
        if self._ms is not None:
            ahead = np.flatnonzero(self._ms > watermark_ms)
            meta["ahead"] = [[self._first + int(i), int(self._ms[i])] for i in ahead]
        return json.dumps(meta).encode()

    def late(self, batch: pa.RecordBatch, keys: Sequence[str], ends_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which rows belong to windows that fired already. Only while ``is_any_ahead``.

        Args:
            batch: records, or partial results.
            keys: its key columns.
            ends_ms: for each row the end, excluded, of its window.
        """
        assert self._ms is not None
        groups = key_groups(hash_columns(batch, keys), self._max_parallelism)
        late: npt.NDArray[np.bool_] = ends_ms - 1 <= self._ms[groups.astype(np.int64) - self._first]
        return late


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
