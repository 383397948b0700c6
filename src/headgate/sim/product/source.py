"""A bounded source that takes its time, so that faults meet a pipeline in the middle of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import headgate as hg
from headgate.connectors.base import SourceBatch, SourceContext, SourceReader


class PacedRows(hg.FromRows):
    """Rows that come a few at a time, with ``pause_ms`` between them."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        splits: int,
        batch_rows: int,
        pause_ms: int,
        now_ms: Callable[[], int],
    ) -> None:
        super().__init__(rows, splits=splits, batch_rows=batch_rows)
        self._pause_ms = pause_ms
        self._now_ms = now_ms

    def open(self, context: SourceContext) -> SourceReader:
        """See ``Source``."""
        return _PacedReader(super().open(context), self._pause_ms, self._now_ms)


class _PacedReader:
    """After each batch it has nothing for a while."""

    def __init__(self, inner: SourceReader, pause_ms: int, now_ms: Callable[[], int]) -> None:
        self._inner = inner
        self._pause_ms = pause_ms
        self._now_ms = now_ms
        self._rests_until_ms = 0

    def splits(self) -> Sequence[str]:
        return self._inner.splits()

    def poll(self) -> SourceBatch | None:
        if self.wakeup_ms():
            return None
        self._rests_until_ms = self._now_ms() + self._pause_ms
        return self._inner.poll()

    def is_finished(self) -> bool:
        return self._inner.is_finished()

    def positions(self) -> dict[str, bytes]:
        return self._inner.positions()

    def wakeup_ms(self) -> int:
        return max(self._rests_until_ms - self._now_ms(), 0)

    def close(self) -> None:
        self._inner.close()
