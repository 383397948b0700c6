"""Columnar accumulators: one array per accumulator, indexed by slot, with copy-on-write freeze.

Partial results combine with the same operation as single values (``ADD`` of sums, ``MAX`` of maxima), so that the
same table serves before and after the shuffle, and restores from its own snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headgate.state.key_index import Slots

Array: TypeAlias = npt.NDArray[Any]

_SLOTS_MIN = 256


class Kind(Enum):
    """How values combine."""

    ADD = "add"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One accumulator: its kind and the type it computes in (``int64``, ``uint64`` or ``float64``)."""

    kind: Kind
    dtype: str

    @property
    def start(self) -> int | float:
        """The value of a slot that saw nothing. A floating minimum starts at NaN, which fmin ignores."""
        if self.kind is Kind.ADD:
            return 0
        if self.dtype == "float64":
            return float("nan")
        limits = np.iinfo(self.dtype)
        return int(limits.max if self.kind is Kind.MIN else limits.min)


@dataclass(frozen=True, slots=True)
class Values:
    """Input of one accumulator: an array (or one number for every row), and which rows count (None: all)."""

    values: Array | int
    valid: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class FrozenTable:
    """A table as it was: ``rows`` and, per accumulator, values and (minimum, maximum) which slots saw one."""

    rows: Array
    values: tuple[Array, ...]
    seen: tuple[Array | None, ...]


class AggTable:
    """Accumulators of ``rows`` (a count of records) and of each of ``accumulators``, by slot."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self._accumulators = tuple(accumulators)
        self._rows: Array = np.zeros(_SLOTS_MIN, np.int64)
        self._values: list[Array] = [np.full(_SLOTS_MIN, a.start, a.dtype) for a in self._accumulators]
        self._seen: list[Array | None] = [
            None if a.kind is Kind.ADD else np.zeros(_SLOTS_MIN, np.bool_) for a in self._accumulators
        ]
        self._is_frozen = False

    def update(self, size: int, slots: Slots, rows: Array | int, inputs: Sequence[Values]) -> None:
        """Combine one value per row into its slot. ``size`` exceeds every slot; ``rows`` counts records."""
        self._prepare(size)
        np.add.at(self._rows, slots, rows)
        for i, (accumulator, given) in enumerate(zip(self._accumulators, inputs, strict=True)):
            where, values = slots, given.values
            if given.valid is not None:
                where = slots[given.valid]
                values = values if isinstance(values, int) else values[given.valid]
            self._combine(i, accumulator, where, values)

    def _combine(self, i: int, accumulator: Accumulator, slots: Slots, values: Array | int) -> None:
        target = self._values[i]
        if accumulator.kind is Kind.ADD:
            np.add.at(target, slots, values)
            return
        seen = self._seen[i]
        assert seen is not None
        seen[slots] = True
        if accumulator.dtype == "float64":
            (np.fmin if accumulator.kind is Kind.MIN else np.fmax).at(target, slots, values)
        else:
            (np.minimum if accumulator.kind is Kind.MIN else np.maximum).at(target, slots, values)

    def used(self) -> Slots:
        """Return the slots that saw a record, ascending."""
        return np.flatnonzero(self._rows)

    def freeze(self, size: int) -> FrozenTable:
        """Return the first ``size`` slots as they are now: references, copied when the table next changes."""
        self._is_frozen = True
        self._grow(size)
        return FrozenTable(
            self._rows[:size],
            tuple(v[:size] for v in self._values),
            tuple(None if s is None else s[:size] for s in self._seen),
        )

    def take(self, slots: Slots) -> FrozenTable:
        """Return a copy of ``slots``."""
        return FrozenTable(
            self._rows.take(slots),
            tuple(v.take(slots) for v in self._values),
            tuple(None if s is None else s.take(slots) for s in self._seen),
        )

    def clear(self) -> None:
        """Forget everything, keeping the memory."""
        self._prepare(0)
        self._rows[:] = 0
        for accumulator, values, seen in zip(self._accumulators, self._values, self._seen, strict=True):
            values[:] = accumulator.start
            if seen is not None:
                seen[:] = False

    def _prepare(self, size: int) -> None:
        if self._is_frozen:  # ST5: the frozen arrays belong to the snapshot now
            self._rows = self._rows.copy()
            self._values = [v.copy() for v in self._values]
            self._seen = [None if s is None else s.copy() for s in self._seen]
            self._is_frozen = False
        self._grow(size)

    def _grow(self, size: int) -> None:
        if size <= len(self._rows):
            return
        capacity = max(size + size // 4, 2 * len(self._rows))
        self._rows = _grown(self._rows, capacity, 0)
        self._values = [_grown(v, capacity, a.start) for v, a in zip(self._values, self._accumulators, strict=True)]
        self._seen = [None if s is None else _grown(s, capacity, 0) for s in self._seen]


def _grown(array: Array, capacity: int, fill: int | float) -> Array:
    grown = np.full(capacity, fill, array.dtype)
    grown[: len(array)] = array
    return grown
