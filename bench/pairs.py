"""Pairs of measurements with and without something, taken in turns: what it costs, and how sure that is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness import median


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rates that were measured one after the other."""

    without: float
    with_: float

    @property
    def overhead(self) -> float:
        """How much slower it is with it, as a share of the rate without; negative when it is faster."""
        return 1 - self.with_ / self.without


@dataclass(frozen=True, slots=True)
class Overhead:
    """Median of the pairs' overheads, the quartiles around it, and the extremes."""

    median: float
    low: float
    high: float
    least: float
    most: float

    @property
    def spread(self) -> float:
        """Distance of the quartiles: a difference that is smaller says nothing."""
        return self.high - self.low

    @staticmethod
    def of(pairs: Sequence[Pair]) -> Overhead:
        """Sum up ``pairs``.

        Raises:
            ValueError: there are none.
        """
        found = sorted(pair.overhead for pair in pairs)
        return Overhead(median(found), quantile(found, 0.25), quantile(found, 0.75), found[0], found[-1])


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of ``ordered`` lies, interpolated between neighbours."""
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def with_first(number: int) -> bool:
    """Whether pair ``number`` begins with the run that has it: every other one does (A B, B A, A B, …).

    A machine that grows slower from run to run then counts against neither.
    """
    return number % 2 == 1
