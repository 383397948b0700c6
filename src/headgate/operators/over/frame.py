"""Frames: which rows before each row an OVER aggregate is of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headgate.state.key_index import Slots


@dataclass(frozen=True, slots=True)
class Frame:
    """From some rows of the same key up to the current row.

    Attributes:
        is_range: rows are chosen by their times, and all rows of one time have one frame (``RANGE``). Otherwise they
            are counted (``ROWS``).
        preceding: how far the frame reaches back: milliseconds of ``RANGE``, rows of ``ROWS``; None: to the first row.
    """

    is_range: bool
    preceding: int | None

    @property
    def text(self) -> str:
        """Return the frame in words, for the identity of state."""
        if self.preceding is None:
            return f"{'range' if self.is_range else 'rows'} unbounded"
        return f"range {self.preceding} ms" if self.is_range else f"rows {self.preceding}"

    def rows(
        self, owners: Slots, times: Slots, units_per_ms: int, old_count: int = 0
    ) -> tuple[Slots, Slots, Slots, Slots]:
        """Return rows in order, the places of those that are asked about, and where in this order their frames are.

        The last two are the first row of each frame, and the one after its last row.

        Args:
            owners: the key of each row.
            times: of the rows. ``ROWS`` does not look at them: the rows of a key are in order.
            units_per_ms: in which unit they are.
            old_count: the first rows, so many, are not asked about.
        """
        if self.is_range:
            codes, wanted = _codes(owners, times, (self.preceding or 0) * units_per_ms)
        else:
            codes = wanted = owners
        order = np.argsort(codes, kind="stable")
        asked = np.flatnonzero(order >= old_count)
        rows = order[asked]
        ends = np.searchsorted(codes[order], codes[rows], side="right") if self.is_range else asked + 1
        if self.is_range and self.preceding is not None:
            return order, asked, np.searchsorted(codes[order], wanted[rows]), ends
        starts = np.searchsorted(owners[order], owners[rows])
        return order, asked, starts if self.preceding is None else np.maximum(asked - self.preceding, starts), ends


_INT_MAX = (1 << 63) - 1


def _codes(owners: Slots, times: Slots, reach: int) -> tuple[Slots, Slots]:
    """Return a number for each row that is ordered as its key and time, and that of its key ``reach`` earlier."""
    if len(times) == 0:
        return owners, owners
    low = int(times.min())
    span = int(times.max()) - low + reach + 1
    if (int(owners.max()) + 1) * span <= _INT_MAX:
        codes = owners * span + (times - low)
        return codes, codes - reach
    _, ranks = np.unique(np.concatenate([times, times - reach]), return_inverse=True)
    codes = np.concatenate([owners, owners]) * len(ranks) + ranks
    return codes[: len(times)], codes[len(times) :]
