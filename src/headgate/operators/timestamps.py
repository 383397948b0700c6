"""``with_timestamps``: event times of a column, watermarks from them, and refusal of absurd times.

A user's ``WatermarkGenerator`` may say what the watermark of each split is.

The decisions are those of ``protocol.watermarks.WatermarkTracker`` (one origin per source split). Watermarks go out
at most every ``PERIOD_MS`` of processing time, which goes by a monotonic clock and is no part of the state.
What counts as absurd does not depend on the clock, so that a replay refuses the same records; only ``max_ahead`` does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.ids import ChannelIndex
from headgate.operators.base import WATERMARK_MAX_MS, LazyRows, Operator, RestoredState, as_batch
from headgate.operators.schemas import require_columns
from headgate.operators.user_functions import bad_records, described_rows, shortened
from headgate.protocol.watermarks import (
    WATERMARK_MIN_MS,
    ChannelOrigin,
    EmitIdle,
    EmitWatermark,
    Origin,
    OriginFinished,
    OriginLimited,
    OriginsAssigned,
    OriginsPaused,
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

    def values(self, batch: pa.RecordBatch | LazyRows) -> npt.NDArray[np.int64]:
        """Return the column in its own unit (nulls: any number)."""
        return self.words(batch.column(self.column))

    def words(self, column: pa.Array) -> npt.NDArray[np.int64]:
        """Return the values of a column of this kind, as ``values`` does."""
        return column_words(column)

    def to_ms(self, value: int) -> int:
        """Return ``value`` in milliseconds since 1970, rounded down."""
        return value * self.ms_per_unit // self.units_per_ms

    def all_to_ms(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return values in milliseconds since 1970, rounded down."""
        return values * self.ms_per_unit if self.units_per_ms == 1 else values // self.units_per_ms


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

_SPLITS, _CHANNELS, _LIMITS, _FLOORS, _GENERATORS = "latest", "channels", "limits", "floors", "generators"


class WatermarkGenerator:
    """Says how far event time has come in a split, from the times of its records: for ``with_timestamps(watermark=)``.

    Derive from it. Each split has a copy of its own of the object that is given, as it was given. After a shuffle, each
    input channel has one.
    """

    def on_batch(self, times: npt.NDArray[np.int64]) -> int | None:
        """Return the watermark after a batch: no later record of the split is expected to have this time or less.

        Called with the times of each batch, in milliseconds since 1970, in the order of the records. How records are
        divided into batches is arbitrary. A watermark that is lower than the last one has no effect. None: it is as it
        was. Until the first watermark, the split holds windows back.
        """
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Return what the generator remembers, as a value that JSON has: it is part of each checkpoint."""
        return None

    def restore(self, state: Any) -> None:
        """Continue with what ``snapshot`` returned, before the first batch. Not called when that was None."""


@dataclass(frozen=True)
class WithTimestampsSpec:
    """Take event times from ``column`` (timestamp, date or integer milliseconds; no column is added).

    Attributes:
        out_of_orderness_ms: how much earlier than the latest record of its split a record may be. None: 0, or what the
            source knows of its splits.
        idle_timeout_ms: a split that delivers nothing for so long does not hold event time back (None: it does).
        time_min_ms, time_max_ms: times outside this range, its end excluded, are bad records.
        max_ahead_ms: times later than the date and so much are bad records, too.
        silent_after_ms: the watermark of a split that delivers nothing for so long advances with the clock.
        generator: says the watermark of each split.
    """

    column: str
    out_of_orderness_ms: int | None = None
    idle_timeout_ms: int | None = None
    time_min_ms: int = TIME_MIN_MS
    time_max_ms: int = TIME_MAX_MS
    max_ahead_ms: int | None = None
    silent_after_ms: int | None = None
    generator: WatermarkGenerator | None = None

    def build(self) -> Operator:
        return WithTimestampsOperator(self)

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return None if wanted is None else wanted | {self.column}

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
        return f"with_timestamps({self.column})"


class _Frozen(FrozenState):
    """The latest times at a barrier: of splits by name, of channels by number, and what is known of splits."""

    def __init__(
        self,
        latest_ms: Mapping[Origin, int],
        limits_ms: Mapping[Origin, int],
        floors_ms: Mapping[Origin, int],
        generators: Mapping[Origin, Any],
    ) -> None:
        super().__init__()
        self._floors = {_name(origin): ms for origin, ms in floors_ms.items()}
        self._generators = {_name(origin): state for origin, state in generators.items()}
        self._limits = {str(origin): ms for origin, ms in limits_ms.items()}
        self._splits = {o: ms for o, ms in latest_ms.items() if not isinstance(o, ChannelOrigin)}
        self._channels = {str(o.channel): ms for o, ms in latest_ms.items() if isinstance(o, ChannelOrigin)}

    def _rows(self) -> Mapping[str, int]:
        return {name: len(part) for name, part in self._parts().items()}

    def _parts(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {
            _SPLITS: self._splits,
            _CHANNELS: self._channels,
            _LIMITS: self._limits,
            _FLOORS: self._floors,
            _GENERATORS: self._generators,
        }
        return found

    def _encode(self) -> Sequence[Buffer]:
        parts = self._parts().items()
        return encode_sections({name: [json.dumps(part, sort_keys=True).encode()] for name, part in parts})

    def _forget(self) -> None:
        self._splits, self._channels, self._limits, self._floors, self._generators = {}, {}, {}, {}, {}


def _name(origin: Origin) -> str:
    """Return the name of an origin in a snapshot: a split's may be any text."""
    return f"channel {origin.channel}" if isinstance(origin, ChannelOrigin) else f"split {origin}"


def _origin(name: str) -> Origin:
    kind, _, rest = name.partition(" ")
    return ChannelOrigin(ChannelIndex(int(rest))) if kind == "channel" else rest


@dataclass(frozen=True, slots=True)
class _Former:
    """What one former subtask knew: the latest time of each origin, and what is known of splits and origins."""

    latest_ms: dict[Origin, int]
    limits_ms: dict[str, int]
    floors_ms: dict[Origin, int]
    generators: dict[Origin, Any]


def _decoded(payload: memoryview, where: str) -> _Former:
    parts = {name: json.loads(bytes(found)) for name, found in decode_sections(payload, where).items()}
    channels = {ChannelOrigin(ChannelIndex(int(index))): ms for index, ms in parts[_CHANNELS].items()}
    floors, generators = ({_origin(n): found for n, found in parts[part].items()} for part in (_FLOORS, _GENERATORS))
    return _Former(channels | parts[_SPLITS], parts[_LIMITS], floors, generators)


class WithTimestampsOperator(Operator):
    """Passes records on and emits watermarks after them."""

    takes_lazy_rows = True

    def __init__(self, spec: WithTimestampsSpec) -> None:
        self._spec = spec
        self._tracker = WatermarkTracker(
            spec.out_of_orderness_ms,
            spec.idle_timeout_ms,
            spec.silent_after_ms,
            is_given=spec.generator is not None,
        )
        self._generators: dict[Origin, WatermarkGenerator] = {}
        self._generator_states: dict[Origin, Any] = {}
        self._time: EventTime | None = None
        self._pending_ms: int | None = None
        self._emitted_at_ms: int | None = None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the latest times of all origins (W9, W17)."""
        latest: dict[Origin, int] = {}
        limits: dict[Origin, int] = {}
        floors: dict[Origin, int] = {}
        lowest_ms: int | None = None
        for state in states:
            former = _decoded(state.payload, f"state of '{self.context.node}'")
            for split, limit_ms in former.limits_ms.items():
                limits[split] = max(limit_ms, limits.get(split, limit_ms))
            for origin, floor_ms in former.floors_ms.items():
                floors[origin] = max(floor_ms, floors.get(origin, floor_ms))
            for origin, max_ms in former.latest_ms.items():
                if origin in former.generators and max_ms >= latest.get(origin, max_ms):
                    self._generator_states[origin] = former.generators[origin]
                latest[origin] = max(max_ms, latest.get(origin, max_ms))  # what a former owner kept is older
                lowest_ms = max_ms if lowest_ms is None else min(max_ms, lowest_ms)
        # A channel that was read on past its barrier is ahead of what another may bring of it after a restore.
        is_same = all(state.parallelism == self.context.parallelism and state.is_exact for state in states)
        if is_same and any(map(_is_channel, latest)):
            self._tracker.restore(latest, None, limits, floors)
        else:  # the channels were others, or there were none: each may carry records of any former origin
            splits = {origin: max_ms for origin, max_ms in latest.items() if not _is_channel(origin)}
            floors = {origin: floor_ms for origin, floor_ms in floors.items() if not _is_channel(origin)}
            states_of = self._generator_states.items()
            self._generator_states = {origin: state for origin, state in states_of if not _is_channel(origin)}
            self._tracker.restore(splits, lowest_ms, limits, floors)

    def process(self, batch: pa.RecordBatch | LazyRows) -> None:
        if self._time is None:
            self._time = event_time(self.context.node, batch.schema, self._spec.column)
        column = batch.column(self._spec.column)
        values = self._time.values(batch)
        low, high = self._time.to_ms(int(values.min())), self._time.to_ms(int(values.max()))
        end_ms = self._end_ms()
        if column.null_count or low < self._spec.time_min_ms or high >= end_ms:
            batch = self._refuse(as_batch(batch), self._time, end_ms)
            if batch.num_rows == 0:
                return
            values = self._time.values(batch)
            high = self._time.to_ms(int(values.max()))
        self.output.emit(batch)
        origin = self.context.origin
        generator = self._spec.generator
        said_ms = None if generator is None else self._ask(generator, origin, self._time.all_to_ms(values))
        self._tell(RecordsSeen(origin, high, self.context.clock_ms(), said_ms))

    def _end_ms(self) -> int:
        """Return the first time that is too late."""
        ahead_ms = self._spec.max_ahead_ms
        if ahead_ms is None:
            return self._spec.time_max_ms
        return min(self.context.wall_ms() + ahead_ms + 1, self._spec.time_max_ms)

    def _ask(self, given: WatermarkGenerator, origin: Origin, times: npt.NDArray[np.int64]) -> int | None:
        """Ask the generator of an origin for its watermark."""
        generator = self._generators.get(origin)
        if generator is None:
            generator = self._generators[origin] = copy.deepcopy(given)
            state = self._generator_states.pop(origin, None)
            if state is not None:
                generator.restore(state)
        found = generator.on_batch(times)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | np.integer):
            raise UsageError(
                f"operator '{self.context.node}': {type(given).__name__}.on_batch must return milliseconds since 1970 "
                f"as an int, or None, but returned {found!r}"
            )
        return min(max(int(found), WATERMARK_MIN_MS), self._spec.time_max_ms)

    def _refuse(self, batch: pa.RecordBatch, time: EventTime, end_ms: int) -> pa.RecordBatch:
        """Divert records without a sensible time; return the others."""
        column = batch.column(self._spec.column)
        values = time.values(batch)
        low = -(-self._spec.time_min_ms * time.units_per_ms // time.ms_per_unit)
        high = -(-end_ms * time.units_per_ms // time.ms_per_unit)
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        is_bad = is_null | (values < low) | (values >= high)
        rows = described_rows(batch.filter(pa.array(is_bad))) if is_bad.any() else []
        if rows:
            most = -(-self._spec.time_max_ms * time.units_per_ms // time.ms_per_unit)
            is_ahead = ((values >= high) & (values < most))[is_bad]
            found = zip(rows, is_ahead.tolist(), strict=True)
            problems = [self._problem(row[self._spec.column], is_ahead=ahead) for row, ahead in found]
            positions = [str(self.context.origin)] * len(rows)
            self.output.divert(bad_records(self.context.node, problems, positions, [shortened(row) for row in rows]))
        return batch.filter(pa.array(np.logical_not(is_bad)))

    def _problem(self, value: object, *, is_ahead: bool) -> str:
        if value is None:
            return f"its time '{self._spec.column}' is null"
        if is_ahead and self._spec.max_ahead_ms is not None:
            seconds = self._spec.max_ahead_ms / 1_000
            return f"its time '{self._spec.column}' is more than {seconds:g} s ahead of the clock: {value}"
        return f"its time '{self._spec.column}' is outside 1970 to 2200 or the range that was configured: {value}"

    def on_splits(self, origins: Sequence[Origin]) -> None:
        """See ``Operator``. Channels are announced, too: some hold event time back as they did before (W17)."""
        if origins and all(map(_is_channel, origins)):
            origins = [origin for origin in origins if self._tracker.remembers(origin)]
            if not origins:
                return
        else:
            states, known = self._generator_states, self._generators
            self._generator_states = {origin: states[origin] for origin in origins if origin in states}
            self._generators = {origin: known[origin] for origin in origins if origin in known}
        self._tell(OriginsAssigned(tuple(origins), self.context.clock_ms()))

    def latest_ms(self, split: str) -> int | None:
        """Return the latest event time of ``split``; None: it has had no record with one."""
        return self._tracker.latest_ms(split)

    def limit(self, split: str, watermark_ms: int | None) -> None:
        """No later record of ``split`` is as early as ``watermark_ms``; None: the source does not know (W26)."""
        if watermark_ms is None and not self._tracker.is_limited(split):
            return
        self._tell(OriginLimited(split, watermark_ms, self.context.clock_ms()))

    def on_pause(self, splits: Collection[str], now_ms: int) -> None:
        """These splits wait for others (W20)."""
        self._tell(OriginsPaused(frozenset(splits), now_ms))

    def on_split_finished(self, origin: Origin) -> None:
        self._generators.pop(origin, None)
        self._generator_states.pop(origin, None)
        self._tell(OriginFinished(origin, self.context.clock_ms()))

    def on_watermark(self, watermark_ms: int) -> None:
        """Drop watermarks from before, about other times; before the last one goes what waits (W15)."""
        if watermark_ms == WATERMARK_MAX_MS:
            self._send_pending(self.context.clock_ms())
            self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """Drop what is said about other times; idleness is decided here."""

    def next_tick_ms(self) -> int | None:
        idle_ms = self._tracker.next_idle_ms
        if self._pending_ms is None or self._emitted_at_ms is None:
            return idle_ms
        due_ms = self._emitted_at_ms + PERIOD_MS
        return due_ms if idle_ms is None else min(due_ms, idle_ms)

    def on_tick(self, now_ms: int) -> None:
        self._tell(TimePassed(now_ms))

    def before_barrier(self) -> None:
        """Send the watermark that waits, so that event time is the same before and after a restore."""
        self._send_pending(self.context.clock_ms())

    def origins(self) -> dict[Origin, tuple[int | None, bool]]:
        """Return the watermark of each origin, None before its first record, and whether it is idle."""
        return self._tracker.origins

    def freeze(self) -> FrozenState:
        states = self._generator_states | {origin: found.snapshot() for origin, found in self._generators.items()}
        generators = {origin: state for origin, state in states.items() if state is not None}
        return _Frozen(self._tracker.snapshot(), self._tracker.limits(), self._tracker.floors(), generators)

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
