"""``with_timestamps``: event times of a column, watermarks from them, and refusal of absurd times.

The decisions are those of ``protocol.watermarks.WatermarkTracker`` (one origin per source split). Watermarks go out
at most every ``PERIOD_MS`` of processing time, which goes by a monotonic clock and is no part of the state.
What counts as absurd never depends on the clock, so that a replay refuses the same records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import UsageError
from headgate.model.ids import ChannelIndex
from headgate.operators.base import WATERMARK_MAX_MS, Operator, RestoredState
from headgate.operators.schemas import require_columns
from headgate.operators.user_functions import bad_records, described_rows, shortened
from headgate.protocol.watermarks import (
    ChannelOrigin,
    EmitIdle,
    EmitWatermark,
    Origin,
    OriginFinished,
    OriginsAssigned,
    RecordsSeen,
    TimePassed,
    TrackerEvent,
    WatermarkTracker,
)
from headgate.state.key_hash import column_words
from headgate.state.snapshot import FrozenState

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class EventTime:
    """How a time column counts: ``ms = value * ms_per_unit // units_per_ms`` (one of them is 1)."""

    column: str
    units_per_ms: int
    ms_per_unit: int

    def values(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the column in its own unit (nulls: any number)."""
        return column_words(batch.column(self.column))

    def to_ms(self, value: int) -> int:
        """Return ``value`` in milliseconds since 1970, rounded down."""
        return value * self.ms_per_unit // self.units_per_ms

    def windows(self, values: npt.NDArray[np.int64], size_ms: int) -> npt.NDArray[np.int64]:
        """Return the number of the tumbling window of ``size_ms`` that each value lies in."""
        if self.ms_per_unit != 1:
            return values * self.ms_per_unit // size_ms
        return values // (size_ms * self.units_per_ms)


def event_time(node: str, schema: pa.Schema, column: str) -> EventTime:
    """Return how ``column`` counts time.

    Raises:
        UsageError: there is no such column, or it is no timestamp, date or integer.
    """
    require_columns(node, schema, [column])
    dtype = schema.field(column).type
    if pa.types.is_timestamp(dtype):
        return EventTime(column, {"s": 1, "ms": 1, "us": 1_000, "ns": 1_000_000}[dtype.unit], 1)
    if pa.types.is_date32(dtype):
        return EventTime(column, 1, _DAY_MS)
    if pa.types.is_integer(dtype):
        return EventTime(column, 1, 1)
    raise UsageError(
        f"operator '{node}': the time column '{column}' must be a timestamp, a date or integer milliseconds "
        f"since 1970, but is {dtype}"
    )


PERIOD_MS = 10
"""Least time between two watermarks: a watermark costs a frame on every channel."""

TIME_MIN_MS = 0
"""1970-01-01."""
TIME_MAX_MS = 7_258_118_400_000
"""2200-01-01: later times are taken for a wrong unit, and one of them would end every window."""

_SPLITS, _CHANNELS = "latest", "channels"


@dataclass(frozen=True)
class WithTimestampsSpec:
    """Take event times from ``column`` (timestamp, date or integer milliseconds; no column is added).

    Attributes:
        out_of_orderness_ms: how much earlier than the latest record of its split a record may be.
        idle_timeout_ms: a split that delivers nothing for so long does not hold event time back (None: it does).
        time_min_ms, time_max_ms: times outside this range, its end excluded, are bad records.
    """

    column: str
    out_of_orderness_ms: int = 0
    idle_timeout_ms: int | None = None
    time_min_ms: int = TIME_MIN_MS
    time_max_ms: int = TIME_MAX_MS

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return WithTimestampsOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``.

        Raises:
            UsageError: no such column, not a time, or an empty range.
        """
        event_time(node, schema, self.column)
        if self.time_min_ms >= self.time_max_ms:
            raise UsageError(f"operator '{node}': time_min_ms must be less than time_max_ms")
        return schema

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        return f"with_timestamps({self.column})"


class _Frozen(FrozenState):
    """The latest times at a barrier in two sections: of splits by name, and of channels by number."""

    def __init__(self, latest_ms: Mapping[Origin, int]) -> None:
        super().__init__()
        self._splits = {o: ms for o, ms in latest_ms.items() if not isinstance(o, ChannelOrigin)}
        self._channels = {str(o.channel): ms for o, ms in latest_ms.items() if isinstance(o, ChannelOrigin)}

    def _rows(self) -> Mapping[str, int]:
        return {_SPLITS: len(self._splits), _CHANNELS: len(self._channels)}

    def _encode(self) -> Sequence[Buffer]:
        found = {_SPLITS: self._splits, _CHANNELS: self._channels}
        return encode_sections({name: [json.dumps(part, sort_keys=True).encode()] for name, part in found.items()})

    def _forget(self) -> None:
        self._splits, self._channels = {}, {}


def _decoded(payload: memoryview, where: str) -> dict[Origin, int]:
    """Return the latest time of each origin."""
    sections = decode_sections(payload, where)
    splits: dict[str, int] = json.loads(bytes(sections[_SPLITS]))
    channels: dict[str, int] = json.loads(bytes(sections[_CHANNELS]))
    found: dict[Origin, int] = {ChannelOrigin(ChannelIndex(int(index))): ms for index, ms in channels.items()}
    return found | splits


class WithTimestampsOperator(Operator):
    """Passes records on and emits watermarks after them."""

    def __init__(self, spec: WithTimestampsSpec) -> None:
        self._spec = spec
        self._tracker = WatermarkTracker(spec.out_of_orderness_ms, spec.idle_timeout_ms)
        self._time: EventTime | None = None
        self._pending_ms: int | None = None
        self._emitted_at_ms: int | None = None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the latest times of all origins (W9, W17)."""
        latest: dict[Origin, int] = {}
        lowest_ms: int | None = None
        for state in states:
            for origin, max_ms in _decoded(state.payload, f"state of '{self.context.node}'").items():
                latest[origin] = max(max_ms, latest.get(origin, max_ms))  # what a former owner kept is older
                lowest_ms = max_ms if lowest_ms is None else min(max_ms, lowest_ms)
        # A channel that was read on past its barrier is ahead of what another may bring of it after a restore.
        is_same = all(state.parallelism == self.context.parallelism and state.is_exact for state in states)
        if is_same and any(map(_is_channel, latest)):
            self._tracker.restore(latest)
        else:  # the channels were others, or there were none: each may carry records of any former origin
            splits = {origin: max_ms for origin, max_ms in latest.items() if not _is_channel(origin)}
            self._tracker.restore(splits, lowest_ms)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        if self._time is None:
            self._time = event_time(self.context.node, batch.schema, self._spec.column)
        column = batch.column(self._spec.column)
        values = self._time.values(batch)
        low, high = self._time.to_ms(int(values.min())), self._time.to_ms(int(values.max()))
        if column.null_count or low < self._spec.time_min_ms or high >= self._spec.time_max_ms:
            batch = self._refuse(batch, self._time)
            if batch.num_rows == 0:
                return
            high = self._time.to_ms(int(self._time.values(batch).max()))
        self.output.emit(batch)
        self._tell(RecordsSeen(self.context.origin, high, self.context.clock_ms()))

    def _refuse(self, batch: pa.RecordBatch, time: EventTime) -> pa.RecordBatch:
        """Divert records without a sensible time; return the others."""
        column = batch.column(self._spec.column)
        values = time.values(batch)
        low = -(-self._spec.time_min_ms * time.units_per_ms // time.ms_per_unit)
        high = -(-self._spec.time_max_ms * time.units_per_ms // time.ms_per_unit)
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        is_bad = is_null | (values < low) | (values >= high)
        rows = described_rows(batch.filter(pa.array(is_bad))) if is_bad.any() else []
        if rows:
            problems = [self._problem(row[self._spec.column]) for row in rows]
            positions = [str(self.context.origin)] * len(rows)
            self.output.divert(bad_records(self.context.node, problems, positions, [shortened(row) for row in rows]))
        return batch.filter(pa.array(np.logical_not(is_bad)))

    def _problem(self, value: object) -> str:
        if value is None:
            return f"its time '{self._spec.column}' is null"
        return f"its time '{self._spec.column}' is outside 1970 to 2200 or the range that was configured: {value}"

    def on_splits(self, origins: Sequence[Origin]) -> None:
        """See ``Operator``. Channels are announced, too: some hold event time back as they did before (W17)."""
        if origins and all(map(_is_channel, origins)):
            origins = [origin for origin in origins if self._tracker.remembers(origin)]
            if not origins:
                return
        self._tell(OriginsAssigned(tuple(origins), self.context.clock_ms()))

    def on_split_finished(self, origin: Origin) -> None:
        """See ``Operator``."""
        self._tell(OriginFinished(origin, self.context.clock_ms()))

    def on_watermark(self, watermark_ms: int) -> None:
        """Drop watermarks from before, about other times; before the last one goes what waits (W15)."""
        if watermark_ms == WATERMARK_MAX_MS:
            self._send_pending(self.context.clock_ms())
            self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """Drop what is said about other times; idleness is decided here."""

    def next_tick_ms(self) -> int | None:
        """See ``Operator``."""
        idle_ms = self._tracker.next_idle_ms
        if self._pending_ms is None or self._emitted_at_ms is None:
            return idle_ms
        due_ms = self._emitted_at_ms + PERIOD_MS
        return due_ms if idle_ms is None else min(due_ms, idle_ms)

    def on_tick(self, now_ms: int) -> None:
        """See ``Operator``."""
        self._tell(TimePassed(now_ms))

    def before_barrier(self) -> None:
        """Send the watermark that waits, so that event time is the same before and after a restore."""
        self._send_pending(self.context.clock_ms())

    def freeze(self) -> FrozenState:
        """See ``Operator``."""
        return _Frozen(self._tracker.snapshot())

    def _tell(self, event: TrackerEvent) -> None:
        for effect in self._tracker.handle(event):
            match effect:
                case EmitWatermark(watermark_ms):
                    self._pending_ms = watermark_ms
                case EmitIdle(is_idle):
                    self._send_pending(event.now_ms)
                    self.output.emit_idle(is_idle)
        if self._emitted_at_ms is None or event.now_ms - self._emitted_at_ms >= PERIOD_MS:
            self._send_pending(event.now_ms)

    def _send_pending(self, now_ms: int) -> None:
        if self._pending_ms is not None:
            self.output.emit_watermark(self._pending_ms)
            self._pending_ms, self._emitted_at_ms = None, now_ms


def _is_channel(origin: Origin) -> bool:
    return isinstance(origin, ChannelOrigin)
