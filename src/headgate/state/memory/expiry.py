"""When the values of slots expire, and who is looked at next: what the columnar states with a TTL are made of.

Counterpart: ``state.memory.expiring``. All in numpy; nothing here looks at one slot at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from headgate.state.columns import FrozenRows, KeyedColumns
from headgate.state.key_index import Slots
from headgate.state.slot_array import Array, Mask, SlotArray
from headgate.state.ttl import TTL, StateTime

SWEEP_ROWS = 4_096
"""So many slots are looked at in a turn, and two more for each that came since: a round ends before they doubled."""

_LONG_AGO_MS = -(1 << 63)


class Expiries:
    """An expiry per slot: from this processing time on there is no value (TL2)."""

    def __init__(self, ttl: TTL, time: StateTime) -> None:
        self._ttl_ms = ttl.duration_ms
        self._is_renewed_by_reads = ttl.is_renewed_by_reads
        self._time = time
        self._at = SlotArray(np.int64, _LONG_AGO_MS)

    @property
    def now_ms(self) -> int:
        """What time it is."""
        return self._time.now_ms

    @property
    def next_ms(self) -> int:
        """The expiry of what is written now."""
        return self._time.now_ms + self._ttl_ms

    def read(self, size: int) -> Array:
        """Return the expiries of all slots."""
        return self._at.read(size)[:size]

    def are_live(self, slots: Slots, size: int) -> Mask:
        """Return which of ``slots`` have not expired, if they have a value."""
        found: Mask = self._at.read(size).take(slots) > self.now_ms
        return found

    def renew(self, slots: Slots, size: int) -> None:
        """What is in ``slots`` was written now."""
        self._at.written(size)[slots] = self.next_ms

    def on_read(self, slots: Slots, size: int) -> bool:
        """Somebody was told of what is in ``slots``, none of which has expired (TL4); return whether that renews it."""
        if self._is_renewed_by_reads and (self._at.read(size).take(slots) != self.next_ms).any():
            self.renew(slots, size)
            return True
        return False

    def restore(self, slots: Slots, column: pa.Array, size: int) -> None:
        """Set the expiries of ``slots``, as a snapshot has them."""
        self._at.written(size)[slots] = column.to_numpy()

    def end_restore(self, size: int) -> Slots:
        """Nothing lives longer than a TTL from now on (TL7); return the slots that would have."""
        longer = np.flatnonzero(self._at.read(size)[:size] > self.next_ms)
        if len(longer):
            self._at.written(size)[longer] = self.next_ms
        return longer

    def freeze(self, size: int) -> Array:
        """Return the expiries as they are now."""
        return self._at.freeze(size)

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        self._at.renumber(old)


class Sweep:
    """Goes round through slots, a bounded number at a turn (TL8)."""

    def __init__(self) -> None:
        self._at = 0
        self._size = 0

    def turn(self, size: int, added: int = 0) -> tuple[int, int]:
        """Return which slots are looked at now, of ``size``: from the first up to and without the second.

        ``added``: to slots that were there before, since the last turn.
        """
        count = SWEEP_ROWS + 2 * (max(size - self._size, 0) + added)
        start = min(self._at, size)
        end = min(start + count, size)
        self._at, self._size = end if end < size else 0, size  # whoever only followed what comes would never come round
        return start, end


def live_rows(frozen: FrozenRows, expiries: Callable[[Slots | None], Array], now_ms: int) -> FrozenRows:
    """Return the rows of ``frozen`` that had not expired, with one more column that says when they do (TL6).

    Those that changed are there although they have expired: whoever reads chunks leaves them out (MC6).

    Args:
        frozen: without expiries.
        expiries: of its rows, in their order, or of those of some places; asked for each time, because nothing is kept
            between two encodings.
        now_ms: what time it was.
    """

    def rows() -> KeyedColumns:
        slots, columns = frozen.rows()
        at = expiries(None)
        living = at > now_ms
        if living.all():
            return slots, [*columns, pa.array(at)]
        return slots[living], [column.filter(pa.array(living)) for column in (*columns, pa.array(at))]

    def of(places: Slots) -> KeyedColumns:
        slots, columns = frozen.of(places)
        return slots, [*columns, pa.array(expiries(places))]

    return FrozenRows(lambda: int(np.count_nonzero(expiries(None) > now_ms)), rows, of, frozen.changes)
