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

    def bounds(self, owners: Slots, times: Slots, units_per_ms: int) -> tuple[Slots, Slots]:
        """Return, for each row, the first row of its frame and the one after the last.

        Args:
            owners: the key of each row, ascending.
            times: of the rows, ascending for each key. ``ROWS`` does not look at them.
            units_per_ms: in which unit they are.
        """
        rows = np.arange(len(owners))
        is_first = np.diff(owners, prepend=-1) != 0
        starts = np.maximum.accumulate(np.where(is_first, rows, 0))
        if not self.is_range:
            return (starts if self.preceding is None else np.maximum(rows - self.preceding, starts)), rows + 1
        lasts = np.flatnonzero((np.diff(owners, append=-1) != 0) | (np.diff(times, append=0) != 0))
        ends: Slots = lasts[np.searchsorted(lasts, rows)] + 1  # of rows of one time the last
        if self.preceding is not None:
            starts = _first_rows(owners, times, times - self.preceding * units_per_ms)
        return starts, ends


def _first_rows(owners: Slots, times: Slots, wanted: Slots) -> Slots:
    """Return, for each row, the first row of its key that is not before the ``wanted`` time.

    Times become ranks, so that key and time are one number, however far apart they are.
    """
    _, ranks = np.unique(np.concatenate([times, wanted]), return_inverse=True)
    codes = np.concatenate([owners, owners]) * (len(ranks) + 1) + ranks
    found: Slots = np.searchsorted(codes[: len(times)], codes[len(times) :])
    return found
