"""A text of which many places are looked at together, eight bytes at a time.

``WordText`` compares, finds and cuts out at one place of each of many objects, and ``plain_numbers`` reads digits. All
of it is arithmetic on whole columns. Counterparts: ``json_shape``, which knows where to look, and ``state.key_hash``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""Eight bytes each, the first one in the lowest bits."""

MARGIN = 16
"""So many bytes stand before the text, and after it."""

DIGITS_MAX = 16
"""The longest numbers that ``plain_numbers`` reads; those with a point have at most ``POINT_BYTES_MAX`` bytes."""
POINT_BYTES_MAX = 8

SAMPLE = 64
"""So many places are looked at before all of them are."""

_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)
_DIGITS = np.uint64(0x3030303030303030)
_ABOVE_NINE = np.uint64(0x7676767676767676)
_POINTS = np.uint64((ord(".") ^ ord("0")) * int(_ONES))
_PLACES = np.uint64(0x0001020304050607)
_PAIRS = np.uint64(0x000000FF000000FF)
_HUNDREDS, _UNITS = np.uint64(100 + (1_000_000 << 32)), np.uint64(1 + (10_000 << 32))
_1, _7, _8, _10, _16, _32, _56, _63, _255 = (np.uint64(number) for number in (1, 7, 8, 10, 16, 32, 56, 63, 255))


class WordText:
    """A copy of a text. Its first byte has place ``MARGIN``, so that places in front of it may be looked at, too."""

    def __init__(self, text: Bytes) -> None:
        self.bytes: Bytes = np.empty(MARGIN + len(text) + MARGIN, np.uint8)
        self.bytes[:MARGIN] = 0
        self.bytes[MARGIN : MARGIN + len(text)] = text
        self.bytes[MARGIN + len(text) :] = 0
        self._words: Words = self._at_any_place("<u8", 8)

    def _at_any_place(self, dtype: str, size: int) -> Any:
        """Return an array that has at each place the bytes from there on. To index it copies only what is asked for."""
        return np.ndarray((len(self.bytes) - size + 1,), dtype, self.bytes.data, strides=(1,))

    def words(self, places: Ints) -> Words:
        """Return the eight bytes from each place on: in the text, or at most ``MARGIN - 8`` bytes after it."""
        found: Words = self._words[places]
        return found

    def has(self, wanted: bytes, places: Ints) -> bool:
        """Whether ``wanted``, which is not empty, stands at each of the places, which may be anywhere."""
        if int(places.min()) < 0 or int(places.max()) + len(wanted) > len(self.bytes):
            return False
        texts = self._at_any_place(f"V{len(wanted)}", len(wanted))
        # what is not at all of the places is mostly not at the first ones: others need not be looked at
        first: bytes = texts[places[:SAMPLE]].tobytes()
        if first != wanted * len(places[:SAMPLE]):
            return False
        found: bytes = texts[places].tobytes()
        return found == wanted * len(places)

    def find(self, byte: int, places: Ints, ends: Ints) -> Ints | None:
        """Return where ``byte`` comes next from each place on; None: one of them is not in front of its end."""
        pattern = np.uint64(byte) * _ONES
        found: Ints | None = None
        rows, at = np.empty(0, np.int64), places
        while True:
            marks = _marks(self.words(at) ^ pattern)
            next_at = at + _index_of_first(marks)
            is_open = marks == 0
            if found is None:
                found, open_rows = next_at, np.flatnonzero(is_open)
                rows = open_rows
            else:
                found[rows] = next_at
                open_rows = np.flatnonzero(is_open)
                rows = rows[open_rows]
            if not len(rows):
                return found
            at = at[open_rows] + 8
            if (at >= ends[rows]).any():
                return None

    def cut(self, begins: Ints, ends: Ints) -> pa.Array:
        """Return what stands between each begin and its end, which do not overlap, as a column of ``large_string``."""
        count = len(begins)
        bounds = np.empty(2 * count + 1, np.int64)
        bounds[0:-1:2] = begins
        bounds[1::2] = ends
        bounds[-1] = bounds[-2]
        offsets, data = pa.py_buffer(bounds), pa.py_buffer(self.bytes)
        everything = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, offsets, data])
        found = everything.take(pa.array(np.arange(0, 2 * count, 2)))
        return pa.Array.from_buffers(pa.large_string(), count, found.buffers())


@dataclass(frozen=True, slots=True)
class PlainNumbers:
    """Numbers without sign and exponent: their digits as whole numbers, and how many stand after the point.

    Attributes:
        decimals: None: no number has a point.
        size_max: the bytes of the longest one.
    """

    digits: Ints
    decimals: Ints | None
    size_max: int


def plain_numbers(text: WordText, begins: Ints, ends: Ints, *, may_have_point: bool) -> PlainNumbers | None:
    """Return the numbers between begins and ends, as JSON writes them; None: some are none, are long, or not plain."""
    sizes = ends - begins
    size_max = int(sizes.max())
    if size_max > DIGITS_MAX or int(sizes.min()) < 1:
        return None
    # the last digit is the highest byte; what stands in front of the number becomes zeros
    unused = (np.maximum(8 - sizes, 0) << 3).view(np.uint64)
    word = text.words(ends - 8) ^ _DIGITS
    word >>= unused
    word <<= unused
    decimals: Ints | None = None
    whole_sizes = sizes
    if may_have_point and size_max <= POINT_BYTES_MAX:
        marks = _marks(word ^ _POINTS)
        has_point = marks != 0
        if has_point.any():
            place = _index_of_first(marks)
            decimals = np.where(has_point, 7 - place, 0)
            whole_sizes = sizes - decimals - has_point
            if (has_point & ((decimals < 1) | (whole_sizes < 1))).any():
                return None
            before = ((marks & (~marks + _1)) >> _7) - _1
            word = np.where(has_point, ((word & before) << _8) | (word & ~((before << _8) | _255)), word)
    has_zero = text.bytes.take(begins) == ord("0")
    if not _are_digits(word) or (has_zero & (whole_sizes > 1)).any():
        return None
    digits = _value(word)
    if size_max > 8:
        unused = (np.clip(16 - sizes, 0, 8) << 3).view(np.uint64)
        word = text.words(ends - 16) ^ _DIGITS
        is_long = sizes > 8
        unused[~is_long] = 0
        word >>= unused
        word <<= unused
        word[~is_long] = 0
        if not _are_digits(word):
            return None
        digits += _value(word) * 100_000_000
    return PlainNumbers(digits, decimals, size_max)


def _marks(differences: Words) -> Words:
    """Return a bit in the first byte of each word that is 0, and none if there is no such byte.

    Later bytes may have a bit without being 0.
    """
    found: Words = (differences - _ONES) & ~differences
    found &= _HIGHS
    return found


def _index_of_first(marks: Words) -> Ints:
    """Return the first byte of each word that has a bit; anything from 0 to 7 if there is none."""
    first: Words = (marks & (~marks + _1)) >> _7
    return ((first * _PLACES) >> _56).view(np.int64)


def _are_digits(word: Words) -> bool:
    """Whether all bytes are numbers from 0 to 9."""
    return not (((word + _ABOVE_NINE) | word) & _HIGHS).any()


def _value(word: Words) -> Ints:
    """Return the number that eight digits are, of which the first one is in the lowest byte."""
    pairs = word * _10 + (word >> _8)
    low = (pairs & _PAIRS) * _HUNDREDS
    low += ((pairs >> _16) & _PAIRS) * _UNITS
    return (low >> _32).view(np.int64)
