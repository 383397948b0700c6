"""What time it is to a process function, and when its timers fire: what both forms have in common.

Rules: docs/spec/timers.md and ttl.md. Counterparts: ``operators.process.by_row`` and ``by_batch``, which call the
user's function; a backend of ``state`` holds the timers, and knows when state expires. Reads the date once, when it is
opened, and never again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from headgate.codec.state_rows import stored_rows
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS, OperatorContext, Output, RestoredState
from headgate.operators.keyed import KeyedOperator
from headgate.operators.process.timers import OperatorTime
from headgate.state.backend import ColumnBackend, RowBackend
from headgate.state.frozen import FrozenState
from headgate.state.timers import TIMERS, TimeKind, TimersMeta
from headgate.state.ttl import TtlMeta

FIRES_AT_END_MAX = 1_000_000
"""Timers that may fire at the end of the input for each that there was: more register each other for ever (TM9)."""


class TimedOperator(KeyedOperator):
    """Fires timers of event time before a watermark goes on, and those of processing time at ticks."""

    _backend: RowBackend | ColumnBackend

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``."""
        super().open(context, output)
        self._time = OperatorTime(context.clock_ms, context.wall_ms)

    @abstractmethod
    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        """Fire some of the timers that are due, the first ones; return how many: none only if none is due."""

    @abstractmethod
    def _end_firing(self) -> None:
        """All that fires now has fired (TM4)."""

    def _begin_call(self) -> None:
        """A call of the user's function begins: one processing time holds for all state that it sees (TL2)."""
        self._backend.time.now_ms = self._time.processing_time_ms

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Processing time goes on from the latest of the former subtasks (TM8, TL5)."""
        self._begin_call()
        node, found = self.context.node, []
        for _, sections in self._restore_backend(states):
            of_ttl = TtlMeta.found_in(sections, f"state of '{node}'")
            if of_ttl is not None:
                self._time.go_on_from(of_ttl.processing_time_ms)
            meta = TimersMeta.found_in(sections, f"state of '{node}'")
            if meta is None:
                continue
            rows = stored_rows({name: data for name, data in sections.items() if name.startswith(f"{TIMERS}.")}, node)
            if self._backend.timers is None and any(rows.values()):
                raise UsageError(
                    f"operator '{node}': the checkpoint holds timers of it, but its function has no on_timer that they "
                    "could call; give it one, or begin again without this checkpoint"
                )
            found.append(meta)
        if found:
            self._time.go_on_from(max(meta.processing_time_ms for meta in found))
            self._time.has_ended = all(meta.has_ended for meta in found)
        self._begin_call()
        self._backend.end_restore()

    def on_watermark(self, watermark_ms: int) -> None:
        """Fire the timers that event time has reached, then pass the watermark on (TM3)."""
        self._time.event_time_ms = watermark_ms
        if self._backend.timers is not None and not self._time.has_ended:
            self._fire_event_time(watermark_ms, len(self._backend.timers.event_time))
        self.output.emit_watermark(watermark_ms)

    def _fire_event_time(self, watermark_ms: int, timers_count: int) -> None:
        fired = 0
        while count := self._fire_some(TimeKind.EVENT_TIME, watermark_ms):
            fired += count
            if watermark_ms == WATERMARK_MAX_MS and fired > FIRES_AT_END_MAX * (timers_count + 1):
                raise UsageError(
                    f"operator '{self.context.node}': all input has ended, but on_timer registers a timer whenever one "
                    "fires, so it would never be over; register none when context.timers.is_end"
                )
        self._end_firing()

    def next_tick_ms(self) -> int | None:
        """See ``Operator``."""
        timers = self._backend.timers
        if timers is None or self._time.has_ended or self.context.is_stopping:
            return None
        due_ms = timers.processing_time.next_ms()
        return None if due_ms is None else self._time.tick_of(due_ms)

    def on_tick(self, now_ms: int) -> None:
        """Fire some timers of processing time; if more are due, the next tick is at once (TM7)."""
        self._fire_some(TimeKind.PROCESSING_TIME, self._time.at_tick(now_ms))
        self._end_firing()

    def finish(self) -> None:
        """No timer fires any more, unless more input comes (TM9)."""
        self._time.has_ended = True

    def on_resumed(self) -> None:
        """See ``Operator``."""
        self._time.has_ended = False

    def freeze(self) -> FrozenState | None:
        """See ``Operator``."""
        self._begin_call()
        if self._backend.timers is not None:
            self._backend.timers.meta = TimersMeta(self._time.processing_time_ms, self._time.has_ended)
        return super().freeze()
