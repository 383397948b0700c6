"""The rate limit of a source: a token bucket for each of its subtasks, on the monotonic clock. Never waits."""

from __future__ import annotations

from collections.abc import Callable

BURST_NS = 100_000_000
"""After a pause, what this time would have allowed is made up for."""


class RateLimit:
    """How many records one subtask may read.

    A batch may be larger than what is allowed: it is read whole, and the next one waits longer.
    """

    def __init__(self, records_per_second: float, subtasks: int, clock_ns: Callable[[], int]) -> None:
        """Make it; until ``divide`` is called, each of ``subtasks`` has an equal part of the rate."""
        self._records_per_second = records_per_second
        self._share = 1 / subtasks
        self._clock_ns = clock_ns
        self._seen_ns = clock_ns()
        self._allowed = 0.0
        """Records that may be read now; below 0: how many were read too early."""

    def divide(self, own_splits: int, all_splits: int) -> None:
        """The source has ``all_splits``, of which this subtask reads ``own_splits``: each gets the same rate.

        A subtask without splits may look for some.
        """
        self._refill()
        self._share = max(own_splits, 1) / max(all_splits, own_splits, 1)

    def take(self, records: int) -> None:
        """So many records were read."""
        self._refill()
        self._allowed -= records

    def wait_ms(self) -> int:
        """Return how long to wait before the next batch; 0: not at all."""
        self._refill()
        if self._allowed >= 0:
            return 0
        return int(-self._allowed / (self._records_per_second * self._share) * 1_000) + 1

    def _refill(self) -> None:
        now_ns = self._clock_ns()
        per_ns = self._records_per_second * self._share / 1e9
        self._allowed = min(self._allowed + (now_ns - self._seen_ns) * per_ns, per_ns * BURST_NS)
        self._seen_ns = now_ns
