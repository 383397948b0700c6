"""JSON objects that are all written alike: read by their quotes, without a parser.

A program writes its records with the same names in the same order. Then what stands between two values is the same in
each record (``{"id": ``, ``, "user": "``, ...), and where the values are follows from where the quotes are. That is
found and checked on whole columns. ``read`` gives exactly what a parser would give, or nothing: what is written in any
other way is left to ``line_decoders``.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

ROWS_MIN = 64
"""Fewer are parsed as fast."""

FIELDS_MAX = 64
"""Of one object: each takes steps of its own."""

_QUOTE, _DOT, _ZERO, _NINE, _SPACE = b'".09 '

NUMBER_BYTES_MAX = 64
"""The parser refuses numbers that are too large for a double: none is with so many digits and such an exponent."""

_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?"
_SCALAR = rf"^(?:{_NUMBER}|true|false|null)$"
_FIELD = re.compile(rb' *"([^"]*)" *: *("[^"]*"|[^" ,:{}\[\]]+) *([,}])')


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a shape: its name, and whether its value is a text."""

    name: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """How objects are written.

    Attributes:
        fields: in their order.
        literals: what stands in front of each value, and after the last one. The quotes of a text are part of them.
    """

    fields: tuple[_Field, ...]
    literals: tuple[bytes, ...]

    @property
    def quotes_count(self) -> int:
        """The quotes of one object."""
        return sum(literal.count(b'"') for literal in self.literals)

    def bounds(self) -> tuple[Ints, Ints]:
        """Return by which quote the begin and the end of each literal are found, and how far from it they are.

        The end of the object stands for a quote after the last one.
        """
        anchors, moves, quote = [], [], 0
        for literal in self.literals:
            before = literal.find(b'"') if b'"' in literal else len(literal)
            anchors += [quote, quote]
            moves += [-before, len(literal) - before]
            quote += literal.count(b'"')
        return np.array(anchors), np.array(moves)


def _shape_of(line: bytes) -> _Shape | None:
    """Return how ``line`` is written; None: it is no flat object, it is empty, or it has a name twice."""
    fields: list[_Field] = []
    literals: list[bytes] = []
    begin, position, is_open = 0, 1, line.startswith(b"{")
    while is_open and len(fields) < FIELDS_MAX and (found := _FIELD.match(line, position)) is not None:
        is_text = found[2].startswith(b'"')
        literals.append(line[begin : found.start(2) + is_text])
        fields.append(_Field(found[1].decode(), is_text))
        begin, position, is_open = found.end(2) - is_text, found.end(), found[3] == b","
    if is_open or not fields or line[position:].strip(b" ") or len({one.name for one in fields}) < len(fields):
        return None
    return _Shape(tuple(fields), (*literals, line[begin:]))


class ShapedReader:
    """Reads objects that have the shape of the first one."""

    def __init__(self, schema: pa.Schema) -> None:
        """``schema``: the columns to make."""
        self._schema = schema
        self._is_possible = all(map(_is_simple, schema.types))
        self._shape: _Shape | None = None
        self._passed_over = self._to_pass_over = 0

    def read(self, data: bytes | pa.Buffer, starts: Ints, ends: Ints) -> pa.RecordBatch | None:
        """Return the objects at ``data[starts[i]:ends[i]]``, which are valid UTF-8; None: not all are written alike.

        Between two of them may be line ends, or nothing.
        """
        if not self._is_possible or len(starts) < ROWS_MIN:
            return None
        if self._to_pass_over:  # what was not alike is seldom alike soon
            self._to_pass_over -= 1
            return None
        found = self._read(data, starts, ends)
        self._passed_over = 0 if found is not None else min(2 * self._passed_over + 1, 63)
        self._to_pass_over = self._passed_over
        return found

    def _read(self, raw: bytes | pa.Buffer, starts: Ints, ends: Ints) -> pa.RecordBatch | None:
        first, last = int(starts[0]), int(ends[-1])
        inside = np.frombuffer(raw, np.uint8)[first:last]
        between = len(inside) - int((ends - starts).sum())
        text = raw if isinstance(raw, bytes) else raw.to_pybytes()
        if text.find(b"\\", first, last) >= 0 or np.count_nonzero(inside < _SPACE) != between:
            return None
        shape = self._shape
        line = inside[: int(ends[0]) - first].tobytes()
        if shape is None or not line.startswith(shape.literals[0]):
            shape = _shape_of(line)
        quotes = np.flatnonzero(inside == _QUOTE)
        if shape is None or len(quotes) != len(starts) * shape.quotes_count:
            self._shape = None
            return None
        quotes += first
        values = _Values.of(raw, shape, quotes.reshape(len(starts), -1), starts, ends)
        columns = None if values is None else self._columns(shape, values)
        self._shape = None if columns is None else shape
        return None if columns is None else pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _columns(self, shape: _Shape, values: _Values) -> list[pa.Array] | None:
        """Return the columns of the schema; check the values of the others, too."""
        found: dict[str, pa.Array] = {}
        for number, field in enumerate(shape.fields):
            index = self._schema.get_field_index(field.name)
            if index < 0:
                if not field.is_text and not _are_scalars(values.column(number)):
                    return None
                continue
            wanted = self._schema.field(index).type
            if field.is_text != (pa.types.is_large_string(wanted) or pa.types.is_timestamp(wanted)):
                return None
            read = _texts if field.is_text else _scalars
            column = read(values.column(number), wanted)
            if column is None:
                return None
            found[field.name] = column
        nulls = {f.name: f.type for f in self._schema if f.name not in found}
        found |= {name: pa.nulls(values.rows_count, dtype) for name, dtype in nulls.items()}
        return [found[name] for name in self._schema.names]


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of all objects, cut out of their text."""

    pieces: pa.Array
    """Object after object, what stands in front of a value and the value in turn, and what ends the object."""
    pieces_count: int
    """Of one object, with what may stand between it and the next one."""
    rows_count: int

    @classmethod
    def of(cls, raw: bytes | pa.Buffer, shape: _Shape, quotes: Ints, starts: Ints, ends: Ints) -> _Values | None:
        """Find the values by the quotes; None if what stands between them differs."""
        anchors, moves = shape.bounds()
        if anchors[-1] == quotes.shape[1]:
            quotes = np.column_stack([quotes, ends])
        width, rows = len(anchors), len(starts)
        every = np.empty(width * rows + 1, np.int64)
        every[-1] = ends[-1]
        bounds = every[:-1].reshape(rows, width)
        np.take(quotes, anchors, axis=1, out=bounds, mode="clip")
        bounds += moves
        if (bounds[:, 0] != starts).any() or (bounds[:, -1] != ends).any():
            return None
        for number, field in enumerate(shape.fields):  # the quotes of a text follow each other
            if not field.is_text and (bounds[:, 2 * number + 1] >= bounds[:, 2 * number + 2]).any():
                return None
        pieces = pa.Array.from_buffers(
            pa.large_binary(), len(every) - 1, [None, pa.py_buffer(every), pa.py_buffer(raw)]
        )
        literals = pieces.take(pa.array(np.arange(len(pieces), step=2)))
        wanted = pa.py_buffer(b"".join(shape.literals) * rows)
        if not literals.buffers()[2].slice(0, wanted.size).equals(wanted):
            return None
        return cls(pieces, width, rows)

    def column(self, number: int) -> pa.Array:
        """Return a value of each object, as text."""
        indices = np.arange(2 * number + 1, len(self.pieces), self.pieces_count)
        found = self.pieces.take(pa.array(indices))
        return pa.Array.from_buffers(pa.large_string(), len(found), found.buffers())


def _is_simple(dtype: pa.DataType) -> bool:
    is_number = pa.types.is_integer(dtype) or pa.types.is_float64(dtype)
    is_text = pa.types.is_large_string(dtype) or pa.types.is_timestamp(dtype)
    return bool(is_number or pa.types.is_boolean(dtype) or is_text)


def _texts(column: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    """Return texts, or the times in them; None if not all are such, or some have a zone and others have none.

    The parser reads times with a zone and without one for every type, those without one as in UTC.
    """
    if not pa.types.is_timestamp(dtype):
        return column
    for zone in (dtype.tz, None if dtype.tz else "UTC"):
        with suppress(pa.ArrowInvalid):
            return column.cast(pa.timestamp(dtype.unit, zone)).view(dtype)
    return None


def _are_scalars(column: pa.Array) -> bool:
    """Whether each is a number, true, false or null, as JSON writes them. May be False for numbers that are long."""
    offsets = np.frombuffer(column.buffers()[1], np.int64)[: len(column) + 1]
    begins, ends = offsets[:-1], offsets[1:]
    if (ends - begins).max() > NUMBER_BYTES_MAX:
        return False
    return _are_plain_numbers(column, begins, ends) or bool(pc.all(pc.match_substring_regex(column, _SCALAR)).as_py())


def _are_plain_numbers(column: pa.Array, begins: Ints, ends: Ints) -> bool:
    """Whether each is a number without sign and exponent."""
    text = np.frombuffer(column.buffers()[2], np.uint8)[: int(ends[-1])]
    others = np.flatnonzero((text - _ZERO) > _NINE - _ZERO)
    whole_ends = ends
    if len(others):
        if len(others) > len(column) or (text[others] != _DOT).any():
            return False
        row = np.searchsorted(ends, others, side="right") if len(others) < len(column) else np.arange(len(column))
        if (row[1:] == row[:-1]).any() or not ((others > begins[row]) & (others < ends[row] - 1)).all():
            return False
        whole_ends = ends.copy()
        whole_ends[row] = others
    return not ((text[begins] == _ZERO) & (whole_ends - begins > 1)).any()


def _scalars(column: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    """Return numbers or truth values; None if not all are such."""
    if not _are_scalars(column):
        return None
    is_null = pc.equal(column, "null")
    if is_null.true_count:
        column = pc.if_else(is_null, pa.scalar(None, column.type), column)
    is_truth = pc.is_in(column, pa.array(["true", "false"], column.type)) if pa.types.is_boolean(dtype) else None
    if is_truth is not None and not pc.all(pc.or_(is_truth, column.is_null())).as_py():
        return None
    try:
        return column.cast(dtype)
    except pa.ArrowInvalid:
        return None
