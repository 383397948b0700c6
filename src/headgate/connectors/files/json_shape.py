"""JSON read in bulk: objects that are all written alike, without a parser, and maps in JSON for Arrow's reader.

A program writes its records with the same names in the same order. Then what stands between two values is the same in
each record (``{"id": ``, ``, "user": "``, ...): it is compared, and where values end is found, for whole columns
(``text_words``). ``ShapedReader`` gives exactly what a parser would give, or nothing: what is written in any other way
is left to ``line_decoders``.

Maps are objects such as ``{"a": 1}``, which Arrow's reader gets as lists ``[{"key": "a", "value": 1}]``
(``MapLines``). Lists of entries, as Headgate writes maps, are left as they are. Of a key that is there twice, the last
value counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.text_words import MARGIN, Ints, WordText, plain_numbers
from headgate.dataclass import dataclass
from headgate.operators.schemas import MAP_FIELDS, has_map

ROWS_MIN = 64
"""Fewer are parsed as fast."""

FIELDS_MAX = 64
"""Of one object: each takes steps of its own."""

_QUOTE, _BACKSLASH, _SPACE = b'"\\ '

NUMBER_BYTES_MAX = 64
"""The parser refuses numbers that are too large for a double: none is with so many digits and such an exponent."""

_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?"
_SCALAR = rf"^(?:{_NUMBER}|true|false|null)$"
_FIELD = re.compile(rb' *"([^"]*)" *: *("[^"]*"|[^" ,:{}\[\]]+) *([,}])')

FLOAT_DIGITS_MAX = 15
"""Whole numbers with so many digits are floats without being rounded, and so is what a power of ten is."""
_POWERS = 10.0 ** np.arange(8)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a shape: its name, whether its value is a text, and how long that is in the first object."""

    name: str
    is_text: bool
    size: int


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


def _shape_of(line: bytes) -> _Shape | None:
    """Return how ``line`` is written; None: it is no flat object, it is empty, or it has a name twice."""
    fields: list[_Field] = []
    literals: list[bytes] = []
    begin, position, is_open = 0, 1, line.startswith(b"{")
    while is_open and len(fields) < FIELDS_MAX and (found := _FIELD.match(line, position)) is not None:
        is_text = found[2].startswith(b'"')
        literals.append(line[begin : found.start(2) + is_text])
        fields.append(_Field(found[1].decode(), is_text, len(found[2]) - 2 * is_text))
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
        self._passed_over = self._to_pass_over = 0

    def read(self, data: bytes | memoryview | pa.Buffer, starts: Ints, ends: Ints) -> pa.RecordBatch | None:
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

    def _read(self, raw: bytes | memoryview | pa.Buffer, starts: Ints, ends: Ints) -> pa.RecordBatch | None:
        first, last = int(starts[0]), int(ends[-1])
        inside = np.frombuffer(raw, np.uint8)[first:last]
        shape = _shape_of(inside[: int(ends[0]) - first].tobytes())
        if shape is None or np.count_nonzero(inside == _QUOTE) != len(starts) * shape.quotes_count:
            return None
        between = len(inside) - int((ends - starts).sum())
        has_controls = between > 0 or inside.min() < _SPACE  # without line ends the least byte says it, much faster
        if has_controls and np.count_nonzero(inside < _SPACE) != between:
            return None
        if (inside == _BACKSLASH).any():
            return None
        text = WordText(inside)
        values = _located(shape, text, starts + (MARGIN - first), ends + (MARGIN - first))
        columns = None if values is None else self._columns(shape, values)
        return None if columns is None else pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _columns(self, shape: _Shape, values: _Values) -> list[pa.Array] | None:
        """Return the columns of the schema; check the values of the others, too."""
        found: dict[str, pa.Array] = {}
        for number, field in enumerate(shape.fields):
            index = self._schema.get_field_index(field.name)
            if index < 0:
                if not field.is_text and not _are_scalars(values, number):
                    return None
                continue
            wanted = self._schema.field(index).type
            if field.is_text != (pa.types.is_large_string(wanted) or pa.types.is_timestamp(wanted)):
                return None
            column = _texts(values.column(number), wanted) if field.is_text else _scalars(values, number, wanted)
            if column is None:
                return None
            found[field.name] = column
        nulls = {f.name: f.type for f in self._schema if f.name not in found}
        found |= {name: pa.nulls(values.rows_count, dtype) for name, dtype in nulls.items()}
        return [found[name] for name in self._schema.names]


@dataclass(frozen=True, slots=True)
class _Values:
    """Where the values of all objects begin and end, by field."""

    text: WordText
    begins: list[Ints]
    ends: list[Ints]

    @property
    def rows_count(self) -> int:
        """The number of objects."""
        return len(self.begins[0])

    def column(self, number: int) -> pa.Array:
        """Return a value of each object, as text."""
        return self.text.cut(self.begins[number], self.ends[number])


def _located(shape: _Shape, text: WordText, starts: Ints, ends: Ints) -> _Values | None:
    """Find the values; None if what stands between them differs.

    There are as many quotes as between the values of all objects: so a text has none, and ends at the next one. Values
    that are as long as in the first object need not be looked through, and the last one of the others neither: it ends
    where what follows it begins, as seen from the end.
    """
    fields, literals = shape.fields, shape.literals
    begins, stops = [starts] * len(fields), [ends] * len(fields)
    stop = ends - len(literals[-1])
    if not text.has(literals[-1], stop):
        return None
    last = len(fields) - 1
    while last >= 0:
        begin = stop - fields[last].size
        front = begin - len(literals[last])
        if not text.has(literals[last], front):
            break
        begins[last], stops[last] = begin, stop
        stop, last = front, last - 1
    if last < 0:
        return _Values(text, begins, stops) if (stop == starts).all() else None
    if not text.has(literals[0], starts):
        return None
    begin = starts + len(literals[0])
    for number, field in enumerate(fields[:last]):
        begins[number], follows = begin, literals[number + 1]
        end: Ints | None = begin + field.size
        if not field.is_text or not text.has(follows, begin + field.size):
            end = text.find(follows[0], begin, ends)
            if end is None or not text.has(follows, end):
                return None
        assert end is not None
        stops[number] = end
        begin = end + len(follows)
    begins[last], stops[last] = begin, stop
    return None if (begin > stop).any() else _Values(text, begins, stops)


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


def _are_scalars(values: _Values, number: int) -> bool:
    """Whether each is a number, true, false or null, as JSON writes them. May be False for numbers that are long."""
    begins, ends = values.begins[number], values.ends[number]
    if plain_numbers(values.text, begins, ends, may_have_point=True) is not None:
        return True
    if (ends - begins).max() > NUMBER_BYTES_MAX:
        return False
    return bool(pc.all(pc.match_substring_regex(values.column(number), _SCALAR)).as_py())


def _scalars(values: _Values, number: int, dtype: pa.DataType) -> pa.Array | None:
    """Return numbers or truth values; None if not all are such."""
    if not pa.types.is_boolean(dtype):
        is_float = pa.types.is_floating(dtype)
        begins, ends = values.begins[number], values.ends[number]
        plain = plain_numbers(values.text, begins, ends, may_have_point=is_float)
        if plain is not None and not is_float:
            return _cast(pa.array(plain.digits), dtype)
        if plain is not None and plain.size_max <= FLOAT_DIGITS_MAX:
            floats = plain.digits.astype(np.float64)
            return pa.array(floats if plain.decimals is None else floats / _POWERS.take(plain.decimals))
    return _other_scalars(values, number, dtype)


def _other_scalars(values: _Values, number: int, dtype: pa.DataType) -> pa.Array | None:
    """Return the same, also of those with a sign or an exponent, and of null."""
    if not _are_scalars(values, number):
        return None
    column = values.column(number)
    is_null = pc.equal(column, "null")
    if is_null.true_count:
        column = pc.if_else(is_null, pa.scalar(None, column.type), column)
    is_truth = pc.is_in(column, pa.array(["true", "false"], column.type)) if pa.types.is_boolean(dtype) else None
    if is_truth is not None and not pc.all(pc.or_(is_truth, column.is_null())).as_py():
        return None
    return _cast(column, dtype)


def _cast(column: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    try:
        return column.cast(dtype)
    except pa.ArrowInvalid:
        return None


Rewrite: TypeAlias = Callable[[bytes], bytes]

_NO_TEXT = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false")
"""Keys that are written without quotes where a map's keys are no texts."""

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class MapLines:
    """Makes lines of JSON that have only some columns, with the maps in them as lists."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        """Prepare for ``fields``, each of a type with a map in it."""
        wanted = [
            (f"field{at}", msgspec.Raw, msgspec.field(name=field.name, default=msgspec.Raw(b"null")))
            for at, field in enumerate(fields)
        ]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Line", wanted))
        self._columns = [
            (f"field{at}", msgspec.json.encode(field.name) + b":", _rewrite(field.type))
            for at, field in enumerate(fields)
        ]

    def of(self, values: pa.LargeStringArray) -> pa.LargeStringArray:
        """Return a line for each object in ``values``; one that is no JSON stays as it is."""
        return pa.array(
            [self._line(value) for value in values.cast(pa.large_binary()).to_pylist()], pa.large_binary()
        ).cast(pa.large_string())

    def _line(self, value: bytes) -> bytes:
        try:
            found = self._decoder.decode(value)
            parts = [name + rewrite(bytes(getattr(found, place))) for place, name, rewrite in self._columns]
        except (msgspec.DecodeError, RecursionError):
            return value
        return b"{" + b",".join(parts) + b"}"


def _rewrite(dtype: pa.DataType) -> Rewrite:
    """Return what rewrites a value of ``dtype``. A value of another kind is left to the reader, which refuses it."""
    if pa.types.is_map(dtype):
        key_of, item = _key(dtype.key_type), _rewrite(dtype.item_type)
        entries = _rewrite(pa.list_(pa.struct(list(zip(MAP_FIELDS, (dtype.key_type, dtype.item_type), strict=True)))))
        key, value = (msgspec.json.encode(name) + b":" for name in MAP_FIELDS)

        def of_map(text: bytes) -> bytes:
            if not text.startswith(b"{"):
                return entries(text)
            members = _members.decode(text).items()
            found = [key + key_of(name) + b"," + value + item(bytes(inner)) for name, inner in members]
            return b"[" + b",".join(b"{" + one + b"}" for one in found) + b"]"

        return of_map
    if pa.types.is_struct(dtype) and has_map(dtype):
        inner = {field.name: (msgspec.json.encode(field.name) + b":", _rewrite(field.type)) for field in dtype}

        def of_struct(text: bytes) -> bytes:
            if not text.startswith(b"{"):
                return text
            members = _members.decode(text)
            found = [
                name + rewrite(bytes(members[field])) for field, (name, rewrite) in inner.items() if field in members
            ]
            return b"{" + b",".join(found) + b"}"

        return of_struct
    if has_map(dtype):
        element = _rewrite(dtype.value_type)

        def of_list(text: bytes) -> bytes:
            if not text.startswith(b"["):
                return text
            return b"[" + b",".join(element(bytes(inner)) for inner in _elements.decode(text)) + b"]"

        return of_list
    return lambda text: text


def _key(dtype: pa.DataType) -> Callable[[str], bytes]:
    """Return what writes a key: names in JSON are texts, whatever the keys are."""
    if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype):
        return lambda name: text if _NO_TEXT.fullmatch(text := name.encode()) else msgspec.json.encode(name)
    return msgspec.json.encode
