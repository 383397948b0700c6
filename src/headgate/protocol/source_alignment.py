"""Which splits of sources wait, so that all are read side by side (rules W20 to W25 of docs/spec/watermarks.md).

``SplitAligner`` lives in each source subtask and says which of its splits are paused. ``GroupAligner`` lives in the
driver and says how far source subtasks may read. Source: Flink's watermark alignment (FLIP-182, FLIP-217).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import field

from headgate.dataclass import dataclass
from headgate.model.ids import SubtaskId
from headgate.model.plan import Plan
from headgate.protocol.watermarks import WATERMARK_MAX_MS, WATERMARK_MIN_MS

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
