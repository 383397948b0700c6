"""The streams of a simulated pipeline are scaled again and again, while it reads and writes them (SM86, SM88).

Somebody splits, merges and resizes at any moment, as any user can: between an append and its answer, between the parts
of a transaction, before its commit, while subtasks open. Or they have policies, and whoever writes scales them. Each is
drawn from a generator of its own. Counterpart: ``streams``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from headgate.errors import HeadgateError
from headgate.model.config import Duration
from headgate.protocol.store import autoscaling as machine
from headgate.sim.world import Violation
from headgate.store import maintenance
from headgate.store.policies import Scaling
from headgate.store.store import Store

RATE = 0.4
"""So many of the seeds with streams have it."""

POLICIES_RATE = 0.3
"""In so many of them streams have policies."""

TIMES_QUICKER = 1_000
COOL_DOWNS: tuple[Duration, ...] = (0, "50ms", "300ms")
SEGMENTS_MAX = 5


class Scaler:
    """Scales ``streams`` of the store at ``root``."""

    name = "scaler"

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"who scales the streams of seed {seed}")
        self._root, self._streams = root, streams
        self.is_drawn = self._rng.random() < RATE
        self.scaled_count = 0

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> str:
        """Scale a stream that is there; return what could not be done, if anything."""
        try:
            store = Store.shared(self._root)
            self._scale(store, _any_of(self._rng, store, self._streams))
        except HeadgateError as problem:
            return str(problem)
        self.scaled_count += 1
        return ""

    def _scale(self, store: Store, name: str) -> None:
        present = [segment.segment_id for segment in store.layout(name).present]
        at = self._rng.randrange(len(present))
        how = self._rng.random()
        if how < 0.15:
            store.resize(name, self._rng.randint(1, SEGMENTS_MAX - 1))
        elif (how < 0.55 or len(present) == 1) and len(present) < SEGMENTS_MAX:
            store.split(name, present[at], self._rng.randint(2, 3))
        else:
            store.merge(name, present[max(0, at - 1) : at + 1] if at else present[:2])


class Policies:
    """Gives each of ``streams`` a policy as soon as it is there, and asks what it says, beside those who write.

    A run lasts seconds, so all that policies go by is a thousand times shorter than usual, and so are pauses.
    """

    name = "policies"

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"scaling policies of seed {seed}")
        self._root = root
        self.is_drawn = self._rng.random() < POLICIES_RATE
        self._usual = machine.WINDOWS_MS, maintenance.MAINTENANCE_INTERVAL_MS
        self._scaling = {name: self._draw() for name in streams}
        self._had: dict[str, int] = {}
        """By stream that has its policy, how many segments it had when it got that."""
        self.scaled_count = 0

    def _draw(self) -> Scaling:
        bounds = self._rng.choice((3, SEGMENTS_MAX))
        target, cool_down = self._rng.choice((10, 50, 400)), self._rng.choice(COOL_DOWNS)
        if self._rng.random() < 0.3:
            return Scaling(bytes_per_second=40 * target, max_segments=bounds, cool_down=cool_down)
        return Scaling(events_per_second=target, max_segments=bounds, cool_down=cool_down)

    def begin(self) -> None:
        """Let time pass more quickly for policies."""
        a, b, c, d = (window_ms // TIMES_QUICKER for window_ms in self._usual[0])
        machine.WINDOWS_MS = (a, b, c, d)
        maintenance.MAINTENANCE_INTERVAL_MS = self._usual[1] // TIMES_QUICKER

    def end(self) -> None:
        """Let it pass as ever."""
        machine.WINDOWS_MS, maintenance.MAINTENANCE_INTERVAL_MS = self._usual

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> str:
        """Scale a stream that is there as its policy says; return what could not be done, if anything."""
        try:
            store = Store.shared(self._root)
            name = _any_of(self._rng, store, list(self._scaling))
            if name not in self._had:
                self._had[name] = store.set_scaling(name, self._scaling[name]).segments_count
            self.scaled_count += store.autoscale(name)
        except HeadgateError as problem:
            return str(problem)
        return ""

    def check(self, store: Store) -> None:
        """Look whether policies, if nobody else has scaled, kept within their bounds.

        Raises:
            Violation: S79: one did not.
        """
        for name, had in sorted(self._had.items()):
            count, policy = len(store.layout(name).present), self._scaling[name].checked()
            if not min(policy.segments_min, had) <= count <= max(policy.segments_max, had):  # no step leads out
                raise Violation("S79", f"{name} has {count} segments, and its policy says {policy}")


def _any_of(rng: random.Random, store: Store, streams: Sequence[str]) -> str:
    """Return one of ``streams`` that is there already."""
    there = {info.name for info in store.list_streams()}
    return rng.choice([name for name in streams if name in there])
