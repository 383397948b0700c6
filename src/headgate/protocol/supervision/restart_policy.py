"""Whether and when to start again after a failure (C40, G8; rules R1–R5 of docs/spec/restart.md).

A policy is a small machine with the failures' times as input. It reads no clock and draws no random numbers: the
interpreter passes the time of the failure and a number between 0 and 1 for the jitter.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from headgate.model.failure import Failure, FailureKind


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start again after ``delay_ms``."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class StayDown:
    """Do not start again."""

    reason: str


Decision: TypeAlias = RestartAfter | StayDown


class RestartPolicy:
    """Decides after each failure of one driver's run (R1)."""

    def __init__(self, strategy: RestartStrategy) -> None:
        self._strategy = strategy
        self._failures_count = 0
        self._recent: deque[int] = deque()
        self._last_failure_ms: int | None = None
        self._exponent = 0

    def on_failure(self, at_ms: int, jitter: float) -> Decision:
        """Decide about a failure at ``at_ms`` (monotonic); ``jitter`` is a random number in [0, 1)."""
        assert 0.0 <= jitter < 1.0, "a jitter is a share of the delay"
        self._failures_count += 1
        strategy = self._strategy
        match strategy:
            case NoRestart():  # R2
                return StayDown("the restart strategy is 'none'")
            case FixedDelay():  # R3
                return self._limited(strategy.attempts, strategy.delay_ms)
            case FailureRate():  # R4
                return self._by_rate(strategy, at_ms)
            case ExponentialDelay():  # R5
                return self._exponential(strategy, at_ms, jitter)
            case _:
                assert_never(strategy)

    def _limited(self, attempts: int | None, delay_ms: int) -> Decision:
        if attempts is not None and self._failures_count > attempts:
            return StayDown(f"it failed {self._failures_count} times, and {attempts} restarts were allowed")
        return RestartAfter(delay_ms)

    def _by_rate(self, strategy: FailureRate, at_ms: int) -> Decision:
        self._recent.append(at_ms)
        while self._recent[0] <= at_ms - strategy.interval_ms:
            self._recent.popleft()
        if len(self._recent) > strategy.failures_max:
            window_s = strategy.interval_ms / 1000
            return StayDown(f"more than {strategy.failures_max} failures within {window_s:g} s")
        return RestartAfter(strategy.delay_ms)

    def _exponential(self, strategy: ExponentialDelay, at_ms: int, jitter: float) -> Decision:
        last, self._last_failure_ms = self._last_failure_ms, at_ms
        if last is not None and at_ms - last >= strategy.reset_after_ms:
            self._exponent = 0
            self._failures_count = 1
        delay = min(strategy.initial_ms * strategy.multiplier**self._exponent, float(strategy.max_ms))
        if 0 < delay < strategy.max_ms:  # otherwise the exponent would only overflow
            self._exponent += 1
        spread = delay * strategy.jitter
        return self._limited(strategy.attempts, round(delay - spread + 2 * spread * jitter))


TAKEOVER_MS = 10_000
"""A standby is to run the pipeline again within so much time (docs/spec/standby.md)."""


def longest_outage_ms(strategy: RestartStrategy) -> int:
    """Return for how long nothing may be committed after one failure, of a worker or of the driver (CS9)."""
    match strategy:
        case NoRestart():
            delay_ms = 0
        case FixedDelay() | FailureRate():
            delay_ms = strategy.delay_ms
        case ExponentialDelay():
            delay_ms = round(max(strategy.initial_ms, strategy.max_ms) * (1 + strategy.jitter))
        case _:
            assert_never(strategy)
    return max(delay_ms, TAKEOVER_MS)


class Restarts:
    """The failures of one run: which of them end it, and after which another generation is begun."""

    def __init__(self, strategy: RestartStrategy) -> None:
        self._policy = RestartPolicy(strategy)
        self._last_user_failure: Failure | None = None
        self._was_damage = False
        self._count = 0

    @property
    def count(self) -> int:
        """How often a generation failed and another was begun."""
        return self._count

    def after(self, failure: Failure, at_ms: int, jitter: float) -> RestartAfter | Failure:
        """Return when to begin the next generation, or what the run fails with."""
        if self._is_deterministic(failure):
            return failure
        is_damage = failure.kind is FailureKind.DAMAGED
        was_damage, self._was_damage = self._was_damage, is_damage
        if is_damage and not was_damage:  # R57: no other generation begins with that checkpoint
            self._count += 1
            return RestartAfter(0)
        decision = self._policy.on_failure(at_ms, jitter)
        if isinstance(decision, StayDown):
            return Failure(failure.kind, f"{failure.reason}; {decision.reason}", failure.detail)
        self._count += 1
        return decision

    def after_claim(self, at_ms: int, jitter: float) -> Decision:
        """Decide about a claim that failed: no generation did."""
        return self._policy.on_failure(at_ms, jitter)

    def _is_deterministic(self, failure: Failure) -> bool:
        """The same failure of user code twice in a row is deterministic (G8, F16)."""
        if failure.kind is not FailureKind.USER_CODE:
            return failure.is_permanent
        before, self._last_user_failure = self._last_user_failure, failure
        return before == failure
