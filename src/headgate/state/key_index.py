"""Index from keys to dense slots (0, 1, 2 …), vectorised, growing.

Accumulators are then plain arrays indexed by slot. Integers (and everything of fixed width) go through a
direct-address table while their range is small, else through open addressing; strings through the numbers that
Polars gives them; several columns through an index of pairs. Slots are given in an order that depends only on the keys
seen, so that equal input gives equal state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.key_hash import Words, column_words, is_text, mix

Slots: TypeAlias = npt.NDArray[np.int64]
_Table: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_DIRECT_FREE = 4_096
_DIRECT_PER_KEY = 128
_DIRECT_MAX = 1 << 22
"""A direct-address table may take this many entries: bounded per key ever seen, and in total (32 MB)."""

_OPEN_MIN = 1_024

_NARROW_MAX = 1 << 31
"""A table of so many entries holds numbers of 32 bits: half the memory, and more of it in the processor's caches."""

_WORD_BYTES = 40
"""What a key of one word takes: the word, in an array that doubles, and its place in a table that is a quarter full."""

_TEXT_BYTES = 256
"""What a text of usual length takes, on the safe side: its entry in the table of Polars, and its place in the index."""


class KeyIndex(Protocol):
    """Keys in one or more columns, without nulls."""

    def __len__(self) -> int:
        """Return the number of slots given so far."""

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        """Return the slot of each row's key; unknown keys get new slots."""

    def columns(self, slots: Slots) -> list[pa.Array]:
        """Return the key columns of ``slots``. Any thread may read slots that were given before it began."""


@dataclass(frozen=True, slots=True)
class FrozenKeys:
    """The keys that an index had at some moment, to be read in any thread: the key of a slot never changes."""

    index: KeyIndex
    size: int

    def columns(self, slots: Slots | None = None) -> list[pa.Array]:
        """Return the key columns of ``slots``; None: of all."""
        return self.index.columns(np.arange(self.size) if slots is None else slots)


def frozen_keys(index: KeyIndex) -> FrozenKeys:
    """Return the keys that ``index`` has now."""
    return FrozenKeys(index, len(index))


def make_key_index(types: Sequence[pa.DataType]) -> KeyIndex:
    """Return an empty index of keys of these column types."""
    single: list[KeyIndex] = [TextIndex(t) if is_text(t) else FixedIndex(t) for t in types]
    index = single[0]
    for other in single[1:]:
        index = PairIndex(index, other)
    return index


def renumbered(index: KeyIndex, types: Sequence[pa.DataType], kept: Slots) -> tuple[KeyIndex, Slots]:
    """Return an index of the keys that ``kept`` slots have, and these slots in the order of the new ones.

    It is another order: a new index gives slots in the order of its tables, not of the rows.
    """
    made, order = make_key_index(types), np.empty_like(kept)
    order[made.slots(index.columns(kept))] = kept
    return made, order


def _table(entries: int) -> _Table:
    """Return a table without a slot."""
    if entries <= _NARROW_MAX:
        return np.full(entries, -1, np.int32)
    return np.full(entries, -1, np.int64)


def key_bytes(types: Sequence[pa.DataType]) -> int:
    """Return about how much memory a key of these column types takes in an index, when it holds most for its size."""
    return sum(_TEXT_BYTES if is_text(t) else _WORD_BYTES for t in types) + _WORD_BYTES * (len(types) - 1)


class _WordsBySlot:
    """Words to which others are appended; none ever changes, so any thread may read those that are there."""

    def __init__(self) -> None:
        self._words: Words = np.empty(256, np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def take(self, slots: Slots) -> Words:
        """Return the words of ``slots``."""
        return self._words.take(slots)

    def all(self) -> Words:
        """Return the words of all slots that there are now."""
        return self._words[: self._size]

    def append(self, words: Words) -> Slots:
        """Add words; return their slots."""
        start, end = self._size, self._size + len(words)
        if end > len(self._words):
            grown = np.empty(max(end, 2 * len(self._words)), np.int64)
            grown[:start] = self._words[:start]
            self._words = grown
        self._words[start:end] = words
        self._size = end
        return np.arange(start, end)


class WordIndex:
    """Index of 64-bit words: a direct-address table while the range is small, else open addressing."""

    def __init__(self) -> None:
        self._words = _WordsBySlot()
        self._base = 0
        self._is_direct = True
        self._table: _Table = _table(0)

    def __len__(self) -> int:
        return len(self._words)

    def words(self, slots: Slots) -> Words:
        """Return the words of ``slots``."""
        return self._words.take(slots)

    def prefix(self) -> Words:
        """Return the words of all slots: entries are only appended, so this view never changes."""
        return self._words.all()

    def slots(self, words: Words) -> Slots:
        """Return the slot of each word; unknown words get new ones."""
        if len(words) == 0:
            return np.empty(0, np.int64)
        if self._is_direct and self._cover(int(words.min()), int(words.max()), len(words)):
            return self._direct_slots(words)
        if self._is_direct:
            self._is_direct = False
            self._table = _table(0)
        return self._open_slots(words)

    def _cover(self, low: int, high: int, more: int) -> bool:
        """Make the direct table include ``low`` to ``high`` if it may be so large."""
        width = len(self._table)
        if width and self._base <= low and high < self._base + width:
            return True
        if width:
            low, high = min(low, self._base), max(high, self._base + width - 1)
        wanted = high - low + 1
        if wanted > min(_DIRECT_FREE + _DIRECT_PER_KEY * (len(self._words) + more), _DIRECT_MAX):
            return False
        slack = min(wanted // 4, low + (1 << 63)) if width and low < self._base else 0
        base = low - slack
        table = _table(wanted + slack + (wanted // 4 if width else 0))
        if width:
            table[self._base - base : self._base - base + width] = self._table
        self._base, self._table = base, table
        return True

    def _direct_slots(self, words: Words) -> Slots:
        entries = words - self._base if self._base else words
        slots: Slots = self._table.take(entries).astype(np.int64)
        if slots.min() < 0:
            missing = np.flatnonzero(slots < 0)
            entries = entries[missing]
            self._table[entries] = np.arange(len(missing))
            first = missing[self._table[entries] == np.arange(len(missing))]
            self._table[words[first] - self._base] = self._words.append(words[first])
            slots[missing] = self._table[entries]
        return slots

    def _open_slots(self, words: Words) -> Slots:
        if 2 * (len(self._words) + len(words)) > len(self._table):
            self._rehash(2 * (len(self._words) + len(words)))
        return self._probe(words, None)

    def _rehash(self, entries_min: int) -> None:
        entries = max(_OPEN_MIN, 1 << (entries_min - 1).bit_length())
        self._table = _table(entries)
        self._probe(self._words.all(), np.arange(len(self._words)))

    def _probe(self, words: Words, known: Slots | None) -> Slots:
        """Look ``words`` up, inserting unknown ones (as slots ``known`` when the table is being rebuilt)."""
        mask = len(self._table) - 1
        places = (mix(words) & np.uint64(mask)).view(np.int64)
        found = np.empty(len(words), np.int64)
        rows: Slots | None = None
        while True:
            slots = self._table.take(places)
            if len(slots) and slots.min() < 0:
                self._claim(words, places, np.flatnonzero(slots < 0), known)
                slots = self._table.take(places)
            slots = slots.astype(np.int64)
            if rows is None:
                found[:] = slots
            else:
                found[rows] = slots
            open_rows = np.flatnonzero(self._words.take(slots) != words)
            if len(open_rows) == 0:
                return found
            rows = open_rows if rows is None else rows[open_rows]
            words = words[open_rows]
            known = None if known is None else known[open_rows]
            places = (places[open_rows] + 1) & mask

    def _claim(self, words: Words, places: Slots, empty: Slots, known: Slots | None) -> None:
        """Give each empty place to one of the words that want it."""
        wanted = places[empty]
        self._table[wanted] = np.arange(len(empty))
        # of several words that want a place one gets it: so slots are not in the order of the rows
        winners = empty[self._table[wanted] == np.arange(len(empty))]
        slots = self._words.append(words[winners]) if known is None else known[winners]
        self._table[places[winners]] = slots


class FixedIndex:
    """Keys in one column of fixed width."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._index = WordIndex()

    def __len__(self) -> int:
        return len(self._index)

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        return self._index.slots(column_words(columns[0]))

    def columns(self, slots: Slots) -> list[pa.Array]:
        return [words_to_array(self._index.words(slots), self._dtype)]


class TextIndex:
    """Keys in one column of strings or binaries: Polars numbers the texts, and the numbers are indexed."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._numbered = pl.Categorical(pl.Categories.random("headgate"))
        self._held = pl.Series([], dtype=self._numbered)
        """Polars forgets the numbers when no column has them any more."""
        self._index = WordIndex()

    def __len__(self) -> int:
        return len(self._index)

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        texts = pl.Series(columns[0])
        if texts.dtype == pl.Binary:
            texts = texts.bin.encode("hex")
        numbers = texts.cast(self._numbered).to_physical().to_numpy()
        return self._index.slots(numbers.astype(np.int64))

    def columns(self, slots: Slots) -> list[pa.Array]:
        return [_texts(self._index.words(slots), self._held, self._dtype)]


def _texts(numbers: Words, held: pl.Series, dtype: pa.DataType) -> pa.Array:
    """Return the texts with these numbers in the categories of ``held``."""
    texts = pl.Series(numbers.astype(np.uint32)).cat.to(held.dtype).cast(pl.String)
    if pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype):
        texts = texts.str.decode("hex")
    return texts.to_arrow().cast(dtype)


class PairIndex:
    """Keys in several columns: pairs (slot in the columns before, slot in the last column).

    The first pair of each slot in the columns before has a place in a table by that slot, and only the others are
    hashed: there are few where the last column depends on those before, as a day does on a number.
    """

    def __init__(self, left: KeyIndex, right: KeyIndex) -> None:
        self._left, self._right = left, right
        self._pairs = _WordsBySlot()
        self._firsts: Slots = np.empty(0, np.int64)
        self._others, self._slots_of_others = WordIndex(), _WordsBySlot()

    def __len__(self) -> int:
        return len(self._pairs)

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        left = self._left.slots(columns[:-1])
        pairs = (left << 32) | self._right.slots(columns[-1:])
        slots = self._slots_of_firsts(left, pairs)
        others = np.flatnonzero(self._pairs.take(slots) != pairs)
        if len(others):
            numbers = self._others.slots(pairs[others])
            more = self._others.prefix()[len(self._slots_of_others) :]
            self._slots_of_others.append(self._pairs.append(more))
            slots[others] = self._slots_of_others.take(numbers)
        return slots

    def _slots_of_firsts(self, left: Slots, pairs: Words) -> Slots:
        """Return the slot of the first pair with each ``left``; ``pairs`` become that where there is none."""
        if len(self._left) > len(self._firsts):
            more = np.full(len(self._left) + len(self._left) // 2 - len(self._firsts), -1)
            self._firsts = np.concatenate([self._firsts, more])
        slots: Slots = self._firsts.take(left)
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            wanted, rows = left[missing], np.arange(len(missing))
            self._firsts[wanted] = rows
            first = missing[self._firsts[wanted] == rows]
            self._firsts[left[first]] = self._pairs.append(pairs[first])
            slots[missing] = self._firsts[wanted]
        return slots

    def columns(self, slots: Slots) -> list[pa.Array]:
        pairs = self._pairs.take(slots)
        return [*self._left.columns(pairs >> 32), *self._right.columns(pairs & 0xFFFF_FFFF)]


def words_to_array(words: Words, dtype: pa.DataType) -> pa.Array:
    """Return the column of ``dtype`` that has these words (``key_hash.column_words``)."""
    if pa.types.is_boolean(dtype):
        return pa.array(words != 0)
    if pa.types.is_floating(dtype):
        return pa.array(words.view(np.float64).astype(dtype.to_pandas_dtype(), copy=False))
    if pa.types.is_date32(dtype):
        return pa.array(words.astype(np.int32)).view(dtype)
    if pa.types.is_timestamp(dtype) or pa.types.is_duration(dtype):
        return pa.array(words).view(dtype)
    if pa.types.is_uint64(dtype):
        return pa.array(words.view(np.uint64))
    return pa.array(words.astype(dtype.to_pandas_dtype(), copy=False))
