"""Event time: when a watermark may advance, who is idle, and which splits of sources wait (docs/spec/watermarks.md).

``WatermarkTracker`` lives in ``with_timestamps`` and makes watermarks from the records of each origin (split).
``WatermarkMerger`` lives at the input of each subtask and merges the watermarks of its channels (rules W1 to W15).
``SplitAligner`` lives in each source subtask and says which of its splits are paused; ``GroupAligner`` lives in the
driver and says how far source subtasks may read (rules W20 to W25). Processing time comes in with the events. No
watermark ever goes back. Source: Flink's ``BoundedOutOfOrdernessWatermarks``, ``WatermarksWithIdleness``,
``StatusWatermarkValve``, and its watermark alignment (FLIP-182, FLIP-217).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.ids import ChannelIndex, SubtaskId
from headgate.model.plan import Plan
from headgate.protocol.machine import Machine

WATERMARK_MIN_MS = -(1 << 63)
WATERMARK_MAX_MS = (1 << 63) - 1

SILENT_STEP_MS = 100
"""So often the watermark of a silent origin advances with the clock."""


@dataclass(frozen=True, slots=True)
class ChannelOrigin:
    """Origin of records after a shuffle: an input channel, because the split is not known any more."""

    channel: ChannelIndex

    def __str__(self) -> str:
        """For people."""
        return f"channel-{self.channel}"


SplitOrigin: TypeAlias = str
"""The name of a split of the source at the head of the chain."""

Origin: TypeAlias = SplitOrigin | ChannelOrigin
"""What has an event time of its own."""


@dataclass(frozen=True, slots=True)
class OriginsAssigned:
    """EVENT: ``origins`` are all origins owned now; finished ones are not among them."""

    origins: tuple[Origin, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class OriginFinished:
    """EVENT: ``origin`` will never deliver anything again."""

    origin: Origin
    now_ms: int


@dataclass(frozen=True, slots=True)
class RecordsSeen:
    """EVENT: a batch of ``origin`` arrived; its latest event time is ``max_ms``.

    ``watermark_ms``: what a generator of the user's says of the origin; None: nothing.
    """

    origin: Origin
    max_ms: int
    now_ms: int
    watermark_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OriginsPaused:
    """EVENT: ``origins`` are not read, because they are ahead of others; they do not become idle by that (W6)."""

    origins: frozenset[Origin]
    now_ms: int


@dataclass(frozen=True, slots=True)
class OriginLimited:
    """EVENT: no later record of ``origin`` is as early as ``limit_ms``, its writers say; None: they say nothing."""

    origin: Origin
    limit_ms: int | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """EVENT: it is ``now_ms``."""

    now_ms: int


TrackerEvent: TypeAlias = OriginsAssigned | OriginFinished | RecordsSeen | OriginsPaused | OriginLimited | TimePassed


@dataclass(frozen=True, slots=True)
class EmitWatermark:
    """EFFECT: no record with an event time ≤ ``watermark_ms`` is expected any more."""

    watermark_ms: int


@dataclass(frozen=True, slots=True)
class EmitIdle:
    """EFFECT: this subtask's event time is idle, or active again."""

    is_idle: bool


Effect: TypeAlias = EmitWatermark | EmitIdle


@dataclass(slots=True)
class _Origin:
    """``max_ms`` is None before the first record (W4); ``floor_ms``: what a generator or silence says (W27, W28)."""

    max_ms: int | None
    active_ms: int
    is_idle: bool = False
    limit_ms: int | None = None
    floor_ms: int = WATERMARK_MIN_MS


class WatermarkTracker(Machine):
    """Watermarks of one subtask from the event times of its origins."""

    def __init__(
        self,
        out_of_orderness_ms: int | None,
        idle_timeout_ms: int | None,
        silent_after_ms: int | None = None,
        *,
        is_given: bool = False,
    ) -> None:
        """Make it.

        Args:
            out_of_orderness_ms: None: what is known of a split decides alone, and 0 where nothing is (W26).
            idle_timeout_ms: after so long without records, an origin does not count (W6).
            silent_after_ms: after so long without records, an origin's watermark advances with the clock (W28).
            is_given: whether the watermarks of origins come with the events (W27).
        """
        super().__init__()
        self._silent_after_ms, self._is_given = silent_after_ms, is_given
        self._delay_ms = (out_of_orderness_ms or 0) + 1
        self._guesses = out_of_orderness_ms is not None
        self._idle_timeout_ms = idle_timeout_ms
        self._origins: dict[Origin, _Origin] = {}
        self._restored: dict[Origin, int] = {}
        self._restored_limits: dict[Origin, int] = {}
        self._restored_floors: dict[Origin, int] = {}
        self._now_ms: int | None = None
        self._channels_ms: int | None = None
        self._is_assigned = False
        self._is_idle = False
        self._watermark_ms = WATERMARK_MIN_MS

    @property
    def watermark_ms(self) -> int:
        """The last watermark emitted."""
        return self._watermark_ms

    @property
    def origins(self) -> dict[Origin, tuple[int | None, bool]]:
        """The watermark of each origin, None before its first record, and whether it is idle."""
        found = {name: (o, self._watermark_of(o)) for name, o in self._origins.items()}
        return {name: (None if ms == WATERMARK_MIN_MS else ms, o.is_idle) for name, (o, ms) in found.items()}

    @property
    def next_idle_ms(self) -> int | None:
        """When time alone changes something next: an origin becomes idle, or silence advances; None: never."""
        timeout_ms = self._timeout_ms
        if timeout_ms is None:
            return None
        times = [o.active_ms for o in self._origins.values() if not o.is_idle]
        if not times:
            return None
        due_ms = min(times) + timeout_ms
        if self._silent_after_ms is None or self._now_ms is None:
            return due_ms
        if self._now_ms >= due_ms:
            return self._now_ms + SILENT_STEP_MS
        return min(due_ms, self._now_ms + max(self._silent_after_ms // 4, 1))

    @property
    def _timeout_ms(self) -> int | None:
        return self._idle_timeout_ms if self._silent_after_ms is None else self._silent_after_ms

    def latest_ms(self, origin: Origin) -> int | None:
        """Return the latest event time of ``origin``, if it has delivered."""
        found = self._origins.get(origin)
        return None if found is None else found.max_ms

    def snapshot(self) -> dict[Origin, int]:
        """Return the latest event time per origin, of unknown restored origins too (W9)."""
        seen = {name: o.max_ms for name, o in self._origins.items() if o.max_ms is not None}
        return {**self._restored, **seen}

    def is_limited(self, origin: Origin) -> bool:
        """Whether what wrote ``origin`` says how far it has come."""
        found = self._origins.get(origin)
        return origin in self._restored_limits if found is None else found.limit_ms is not None

    def limits(self) -> dict[Origin, int]:
        """Return what is known of each origin by what wrote it, as ``snapshot`` does."""
        known = {name: o.limit_ms for name, o in self._origins.items() if o.limit_ms is not None}
        return {**self._restored_limits, **known}

    def floors(self) -> dict[Origin, int]:
        """Return what a generator or silence said of each origin, as ``snapshot`` does."""
        known = {name: o.floor_ms for name, o in self._origins.items() if o.floor_ms > WATERMARK_MIN_MS}
        return {**self._restored_floors, **known}

    def restore(
        self,
        latest_ms: Mapping[Origin, int],
        channels_ms: int | None = None,
        limits_ms: Mapping[Origin, int] | None = None,
        floors_ms: Mapping[Origin, int] | None = None,
    ) -> None:
        """Continue from a snapshot. Call before the first event.

        ``channels_ms`` is where channels start that ``latest_ms`` does not name: they were others before (W17).
        """
        self._restored = dict(latest_ms)
        self._restored_floors = dict(floors_ms or {})
        self._restored_limits = dict(limits_ms or {})
        self._channels_ms = channels_ms

    def remembers(self, origin: Origin) -> bool:
        """Whether ``origin`` has delivered before the restore, or may carry what such a one will deliver."""
        return origin in self._restored or (isinstance(origin, ChannelOrigin) and self._channels_ms is not None)

    def handle(self, event: TrackerEvent) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        self._pass_over_standstill(event.now_ms)
        match event:
            case RecordsSeen():
                self._on_records(event)
            case OriginsAssigned():
                self._on_assigned(event)
            case OriginFinished():
                self._origins.pop(event.origin, None)  # W5
                self._restored.pop(event.origin, None)
                self._restored_limits.pop(event.origin, None)
                self._restored_floors.pop(event.origin, None)
                # Another channel may still deliver for the first time: the end of one does not make it idle (W7).
                self._is_assigned = not isinstance(event.origin, ChannelOrigin)
            case OriginsPaused():
                for origin in event.origins & self._origins.keys():
                    self._origins[origin].active_ms = event.now_ms
            case OriginLimited():
                self._on_limit(event)
            case TimePassed():
                pass
            case _:
                assert_never(event)
        self._now_ms = event.now_ms
        self._find_idle(event.now_ms)
        effects = self._advance()
        self._check()
        return effects

    def _pass_over_standstill(self, now_ms: int) -> None:
        """Time in which the subtask was held up, and read nothing, is no silence of its origins (W28)."""
        if self._silent_after_ms is None or self._now_ms is None:
            return
        passed_ms = now_ms - self._now_ms
        if passed_ms > max(self._silent_after_ms // 2, SILENT_STEP_MS):
            for origin in self._origins.values():
                origin.active_ms += passed_ms

    def _on_records(self, event: RecordsSeen) -> None:
        origin = self._origins.get(event.origin) or self._add(event.origin, event.now_ms)
        if origin.max_ms is None or event.max_ms > origin.max_ms:
            origin.max_ms = event.max_ms
        if event.watermark_ms is not None:
            origin.floor_ms = max(origin.floor_ms, event.watermark_ms)
        origin.active_ms, origin.is_idle = event.now_ms, False

    def _on_limit(self, event: OriginLimited) -> None:
        origin = self._origins.get(event.origin) or self._add(event.origin, event.now_ms)
        if event.limit_ms is None:
            origin.limit_ms = None
        else:
            before_ms = WATERMARK_MIN_MS if origin.limit_ms is None else origin.limit_ms
            if event.limit_ms > before_ms:  # as good as a record: time has come forward
                origin.active_ms, origin.is_idle = event.now_ms, False
            origin.limit_ms = max(event.limit_ms, before_ms)

    def _watermark_of(self, origin: _Origin) -> int:
        return origin.floor_ms if self._is_given else max(origin.floor_ms, self._derived(origin))

    def _derived(self, origin: _Origin) -> int:
        latest = WATERMARK_MIN_MS if origin.max_ms is None else origin.max_ms - self._delay_ms
        if origin.limit_ms is None:
            return latest
        return min(origin.limit_ms, latest) if self._guesses else origin.limit_ms  # W26

    def _on_assigned(self, event: OriginsAssigned) -> None:
        self._is_assigned = True
        for name in [name for name in self._origins if name not in event.origins]:
            del self._origins[name]
        for name in event.origins:
            if name not in self._origins:
                self._add(name, event.now_ms)
        self._restored_limits.clear()
        self._restored_floors.clear()
        self._restored.clear()  # the rest has ended or is in the snapshots of other subtasks (W9)

    def _add(self, name: Origin, now_ms: int) -> _Origin:
        start_ms = self._channels_ms if isinstance(name, ChannelOrigin) else None
        limit_ms = self._restored_limits.pop(name, None)
        floor_ms = self._restored_floors.pop(name, WATERMARK_MIN_MS)
        origin = _Origin(self._restored.pop(name, start_ms), now_ms, limit_ms=limit_ms, floor_ms=floor_ms)
        self._origins[name] = origin
        return origin

    def _find_idle(self, now_ms: int) -> None:
        timeout_ms = self._timeout_ms
        if timeout_ms is None:
            return
        for origin in self._origins.values():
            silent_ms = now_ms - origin.active_ms - timeout_ms
            if silent_ms < 0:
                continue
            watermark_ms = self._watermark_of(origin)
            if self._silent_after_ms is None or watermark_ms == WATERMARK_MIN_MS:
                origin.is_idle = True  # W6
            else:  # W28: from where it was when it fell silent
                origin.floor_ms = watermark_ms + silent_ms
                origin.active_ms += silent_ms

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        active = [o for o in self._origins.values() if not o.is_idle]
        is_idle = not active and (self._is_assigned or bool(self._origins) or self._is_idle)
        if not is_idle and self._is_idle:  # W7
            effects.append(EmitIdle(False))
        if active:
            seen = [self._watermark_of(o) for o in active]
            if min(seen) > self._watermark_ms:  # W2, W3, W4, W8
                self._watermark_ms = min(seen)
                effects.append(EmitWatermark(self._watermark_ms))
        if is_idle and not self._is_idle:
            effects.append(EmitIdle(True))
        self._is_idle = is_idle
        return effects

    def _check(self) -> None:
        assert not self._is_idle or all(o.is_idle for o in self._origins.values()), "idle with an active origin (W7)"
        assert not self._restored.keys() & self._origins.keys(), "what an origin takes over is not kept twice (W9)"


@dataclass(frozen=True, slots=True)
class WatermarkReceived:
    """EVENT: a watermark came on ``channel``. A lower one than before is ignored."""

    channel: ChannelIndex
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class IdleReceived:
    """EVENT: the sender on ``channel`` became idle, or active again."""

    channel: ChannelIndex
    is_idle: bool


@dataclass(frozen=True, slots=True)
class InputEnded:
    """EVENT: nothing will ever come on ``channel`` again."""

    channel: ChannelIndex


MergerEvent: TypeAlias = WatermarkReceived | IdleReceived | InputEnded


@dataclass(slots=True)
class _Channel:
    watermark_ms: int = WATERMARK_MIN_MS
    before_end_ms: int = WATERMARK_MIN_MS
    """The watermark, of an ended channel that before the last one."""
    is_idle: bool = False
    is_aligned: bool = True
    """False after it came back from idle with less than the output, until it has caught up (W13)."""


class WatermarkMerger(Machine):
    """Watermark of one subtask from those of its input channels."""

    def __init__(self, channels_count: int) -> None:
        super().__init__()
        assert channels_count > 0, "watermarks come on channels"
        self._channels = [_Channel() for _ in range(channels_count)]
        self._watermark_ms = WATERMARK_MIN_MS
        self._is_idle = False

    @property
    def watermark_ms(self) -> int:
        """The last watermark emitted."""
        return self._watermark_ms

    @property
    def is_idle(self) -> bool:
        """Whether every channel that has not ended is idle, and there is one."""
        return self._is_idle

    def handle(self, event: MergerEvent) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        channel = self._channels[event.channel]
        match event:
            case WatermarkReceived():
                channel.watermark_ms = max(channel.watermark_ms, event.watermark_ms)
                if event.watermark_ms < WATERMARK_MAX_MS:
                    channel.before_end_ms = max(channel.before_end_ms, event.watermark_ms)
            case IdleReceived():
                if event.is_idle is False and channel.is_idle:
                    channel.is_aligned = channel.watermark_ms >= self._watermark_ms
                channel.is_idle = event.is_idle
            case InputEnded():
                channel.watermark_ms, channel.is_idle = WATERMARK_MAX_MS, False  # W14
            case _:
                assert_never(event)
        if channel.watermark_ms >= self._watermark_ms:
            channel.is_aligned = True
        effects = self._advance()
        self._check()
        return effects

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        open_ = [c for c in self._channels if c.watermark_ms < WATERMARK_MAX_MS]
        active = [c for c in open_ if not c.is_idle]
        is_idle = bool(open_) and not active
        if self._is_idle and not is_idle:
            effects.append(EmitIdle(False))
        if active:
            aligned = [c.watermark_ms for c in active if c.is_aligned]
            target = min(aligned, default=WATERMARK_MIN_MS)  # W10, W11
        elif open_:  # what is idle may deliver again, so that the last watermark waits for it (W19)
            target = max(c.before_end_ms for c in self._channels)  # W12
        else:
            target = WATERMARK_MAX_MS
        if target > self._watermark_ms:
            self._watermark_ms = target
            effects.append(EmitWatermark(target))
        if is_idle and not self._is_idle:
            effects.append(EmitIdle(True))
        self._is_idle = is_idle
        return effects

    def _check(self) -> None:
        open_ = [c for c in self._channels if c.watermark_ms < WATERMARK_MAX_MS]
        assert self._is_idle == (bool(open_) and all(c.is_idle for c in open_)), "idle means all that are open (W12)"
        assert all(c.is_aligned for c in self._channels if c.watermark_ms >= self._watermark_ms), "caught up (W13)"


DRIFT_MS_MIN = 10
"""What an adaptive bound is at least: records that are read while they are written need no alignment."""

PERIOD_MS_MIN = 5

STEPS = 4
"""So many steps of the lowest position are remembered for an adaptive bound."""


class SplitAligner:
    """The positions of the splits of one subtask. A position is the latest event time read, else a place in time."""

    def __init__(self, *, has_others: bool, period_ms: int) -> None:
        """Make it.

        Args:
            has_others: the group has other subtasks, so that ``limit_ms`` counts.
            period_ms: least time between two reports.
        """
        self.limit_ms = WATERMARK_MIN_MS if has_others else WATERMARK_MAX_MS
        """Splits beyond it are paused. Before the driver has said it, each split is read once."""
        self._period_ms = period_ms
        self._positions: dict[str, int | None] = {}
        self._exhausted: set[str] = set()
        self._paused: frozenset[str] = frozenset()
        self._reported: tuple[int | None] | None = None if has_others else (None,)
        self._reported_at_ms: int | None = None
        self._had_nothing_at_ms: int | None = None
        self.has_others = has_others

    def assign(self, splits: Iterable[str]) -> None:
        """Take over which splits there are."""
        self._positions = {split: self._positions.get(split) for split in splits}
        self._exhausted &= self._positions.keys()

    def read(self, split: str, position_ms: int | None) -> None:
        """Records of ``split`` were read, which is now at ``position_ms``; None: it is not known yet."""
        self._positions[split] = position_ms
        self._exhausted.discard(split)

    def finish(self, split: str) -> None:
        """``split`` was read to its end."""
        self._positions.pop(split, None)
        self._exhausted.discard(split)

    def found_nothing(self, is_behind: Callable[[str], bool]) -> bool:
        """There was nothing to read in any split that is not paused; return whether to look again at once.

        Only a split that was looked at in vain, and is not known to have more, lets the others go on without it (W22).
        """
        before = self._paused
        self._exhausted |= {s for s in self._positions if s not in before and not is_behind(s)}
        return bool(before - self.paused())

    def paused(self) -> frozenset[str]:
        """Return the splits that are not read now: those ahead of the lowest one, or beyond the limit (W20, W21)."""
        lowest = self._lowest()
        top = self.limit_ms if lowest is None else min(lowest, self.limit_ms)
        ahead = ((split, at) for split, at in self._positions.items() if split not in self._exhausted)
        self._paused = frozenset(split for split, at in ahead if at is not None and at > top)
        return self._paused

    @property
    def is_waiting(self) -> bool:
        """Whether everything that may have records waits for other subtasks."""
        lowest = self._lowest()
        return lowest is not None and lowest > self.limit_ms

    def report(self, now_ms: int, *, is_over: bool) -> tuple[int | None] | None:
        """Return what the driver is to learn now: the lowest position, or None in a tuple; None: nothing (W23).

        A subtask that has had nothing to read lately keeps silent: what is read as it is written needs no messages.
        """
        lowest = None if is_over else self._lowest()
        if lowest is None:
            self._had_nothing_at_ms = now_ms
        found = (lowest,)
        if not self.has_others or found == self._reported or lowest == WATERMARK_MIN_MS:
            return None
        times = (self._reported_at_ms, None if lowest is None else self._had_nothing_at_ms)
        if any(at_ms is not None and now_ms - at_ms < self._period_ms for at_ms in times):
            return None
        self._reported, self._reported_at_ms = found, now_ms
        return found

    def _lowest(self) -> int | None:
        """Return the lowest position of the splits that may have records; None: there is none."""
        counted = [at for split, at in self._positions.items() if split not in self._exhausted]
        return min((WATERMARK_MIN_MS if at is None else at for at in counted), default=None)


@dataclass(slots=True)
class GroupAligner:
    """All source subtasks with event times, which are read side by side.

    Attributes:
        drift_ms: how far a split may be ahead of the lowest one; None: it follows how fast that one advances (W24).
    """

    members: Iterable[SubtaskId]
    drift_ms: int | None
    _lowest: dict[SubtaskId, int | None] = field(init=False)
    _steps: deque[int] = field(init=False, default_factory=lambda: deque(maxlen=STEPS))
    _before_ms: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._lowest = dict.fromkeys(self.members, WATERMARK_MIN_MS)

    def report(self, subtask: SubtaskId, lowest_ms: int | None) -> None:
        """``subtask`` is at ``lowest_ms``, or has nothing to read."""
        self._lowest[subtask] = lowest_ms
        found = self._found()
        if found is not None and found > WATERMARK_MIN_MS:
            if self._before_ms is not None and found > self._before_ms:
                self._steps.append(found - self._before_ms)
            self._before_ms = found

    @property
    def bound_ms(self) -> int:
        """How far a split may be ahead of the lowest one now (W24)."""
        if self.drift_ms is not None:
            return self.drift_ms
        return max(DRIFT_MS_MIN, 2 * max(self._steps, default=0))

    @property
    def drift_in_force_ms(self) -> int | None:
        """The bound, once a subtask has reported a position; None: nothing is held back by it."""
        return None if self._before_ms is None else self.bound_ms

    @property
    def limit_ms(self) -> int:
        """How far may be read: nothing before every subtask has reported once (W21)."""
        found = self._found()
        if found is None:
            return WATERMARK_MAX_MS
        return found if found == WATERMARK_MIN_MS else found + self.bound_ms

    def _found(self) -> int | None:
        return min((at for at in self._lowest.values() if at is not None), default=None)


def alignment_period_ms(plan: Plan) -> int:
    """Return how often sources report and are answered; each report may cause a message to every worker (W23)."""
    return max(PERIOD_MS_MIN, plan.parallelism // 2)


def timed_sources(plan: Plan) -> list[SubtaskId]:
    """Return the source subtasks that are read side by side: those with event times."""
    timed = (vertex.id for vertex in plan.vertices if vertex.is_timed_source)
    return [SubtaskId(vertex, index) for vertex in timed for index in range(plan.parallelism)]
