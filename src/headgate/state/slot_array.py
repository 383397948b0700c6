"""Growable numpy arrays by slot with copy-on-write freeze, and what vectorised state does with slots.

Used by the columnar states (``state.columns`` and those above it). A frozen array belongs to its snapshot: whoever
writes next, copies first (ST5).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headgate.state.key_index import Slots

Array: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]

_SLOTS_MIN = 256


class SlotArray:
    """One number per slot; slots that were never written hold ``fill``."""

    def __init__(self, dtype: npt.DTypeLike, fill: int = 0) -> None:
        self._fill = fill
        self._data: Array = np.full(_SLOTS_MIN, fill, dtype)
        self._is_frozen = False

    def read(self, size: int) -> Array:
        """Return the array, which has at least ``size`` slots, for reading."""
        if size > len(self._data):
            self._grow(size)
        return self._data

    def written(self, size: int) -> Array:
        """Return the array, which has at least ``size`` slots, for changing it; copies it if it is frozen."""
        if size > len(self._data):
            self._grow(size)
        elif self._is_frozen:
            self._data = self._data.copy()
            self._is_frozen = False
        return self._data

    def fresh(self, size: int) -> Array:
        """Return the array for writing slots that were never written: no frozen reader looks at those."""
        return self.read(size)

    def move(self, old: Slots, new: Slots, size: int) -> None:
        """Copy numbers from slots ``old`` to ``new``, which were never written and are below ``size``."""
        data = self.fresh(size)
        data[new] = data[old]

    def freeze(self, size: int) -> Array:
        """Return the first ``size`` slots as they are now."""
        self.read(size)
        self._is_frozen = True
        return self._data[:size]

    def frozen(self, size: int) -> SlotArray:
        """Return ``freeze(size)`` as a slot array, to be read only."""
        found = SlotArray.__new__(SlotArray)
        found._fill, found._data, found._is_frozen = self._fill, self.freeze(size), True
        return found

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        data = self.read(int(old.max()) + 1 if len(old) else 0)
        kept = np.full(max(_SLOTS_MIN, len(old)), self._fill, data.dtype)
        kept[: len(old)] = data[old]
        self._data, self._is_frozen = kept, False

    def _grow(self, size: int) -> None:
        grown = np.full(max(size + size // 4, 2 * len(self._data)), self._fill, self._data.dtype)
        grown[: len(self._data)] = self._data
        self._data, self._is_frozen = grown, False


class LastRows:
    """Finds the last row of each slot in a batch, in any number of slots."""

    def __init__(self) -> None:
        self._scratch = SlotArray(np.int32, -1)

    def mask(self, slots: Slots, size: int) -> Mask:
        """Return True for the last row of each slot; ``size`` exceeds every slot."""
        scratch = self._scratch.written(size)
        rows = np.arange(len(slots), dtype=np.int32)
        np.maximum.at(scratch, slots, rows)
        is_last: Mask = scratch[slots] == rows
        scratch[slots] = -1
        return is_last


def ranges(starts: Slots, counts: Slots) -> tuple[Slots, Slots]:
    """Return, for ``counts[i]`` positions from ``starts[i]`` on, each one's i and the position itself."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.repeat(starts - before, counts) + np.arange(len(rows))
