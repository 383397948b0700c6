"""How far event time had come for each key group, where a restore brings those of several subtasks together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.model.ids import key_groups_of_subtask
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS, OperatorContext, RestoredState
from headgate.state.key_hash import hash_columns, key_groups


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
