"""How far a sink has come in event time: what its subtasks say with each checkpoint, and what follows for all.

Source: S91 of docs/spec/stream-store.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headgate.connectors.base import SinkContext
from headgate.protocol.watermarks import WATERMARK_MAX_MS, WATERMARK_MIN_MS


class EventProgress(Protocol):
    """What one subtask says with a checkpoint.

    Attributes:
        event_ms: nothing that it writes later is as early; None: its records have no event times.
        is_awaited: its input is neither idle nor ended.
        parallelism: how many subtasks the sink has.
    """

    @property
    def event_ms(self) -> int | None: ...

    @property
    def is_awaited(self) -> bool: ...

    @property
    def parallelism(self) -> int: ...


class EventClock:
    """What a writer hears of event time."""

    def __init__(self, context: SinkContext) -> None:
        self._delay_ms = context.event_delay_ms
        self._watermark_ms = WATERMARK_MIN_MS
        self._is_idle = self._has_ended = False

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``SinkWriter``. The last watermark is no time."""
        self._has_ended = watermark_ms == WATERMARK_MAX_MS
        if not self._has_ended:
            self._watermark_ms = watermark_ms

    def on_idle(self, is_idle: bool) -> None:
        """See ``SinkWriter``."""
        self._is_idle = is_idle

    @property
    def event_ms(self) -> int | None:
        """See ``EventProgress``."""
        return None if self._delay_ms is None else max(self._watermark_ms - self._delay_ms, WATERMARK_MIN_MS)

    @property
    def is_awaited(self) -> bool:
        """See ``EventProgress``."""
        return not (self._is_idle or self._has_ended)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be written."""
        return self._has_ended


def event_time_of(found: Sequence[EventProgress]) -> int | None:
    """Return how far a sink has come with a checkpoint; None: one of its subtasks does not say.

    As at the input of a subtask, what is idle or has ended counts only if all is (W11, W12, W14).
    """
    times = [one.event_ms for one in found if one.event_ms is not None]
    if not found or len(times) < found[0].parallelism:
        return None
    awaited = [one.event_ms for one in found if one.is_awaited and one.event_ms is not None]
    return min(awaited) if awaited else max(times)
