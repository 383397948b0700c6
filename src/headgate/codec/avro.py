"""Values of Avro as Arrow columns: a decoder that takes a step of all values at once.

Format: the specification of Avro 1.12, "Binary Encoding" and "Schema Resolution". Each value has a position of its own,
and all of them move on together from field to field, so that Python code runs per field and not per value. A value that
cannot be decoded is marked and stands still; all others go on. Never does I/O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.codec import connect_types
from headgate.codec.arrow import MOMENT
from headgate.codec.avro_schema import NUMBERS, AvroField, AvroType, records_of
from headgate.dataclass import dataclass

_Ints: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]

ITEMS_MAX = 1_000_000
"""Items of one array or map that are read: each takes a step of its own."""

LEVELS_MAX = 100
"""How often a type may be within itself in one value."""

_PADDING = bytes(16)
"""After the last value: steps read before they look at where a value ends."""


class UnreadableSchemaError(Exception):
    """Values of one schema cannot be read as another one; the message says why."""


@dataclass(slots=True)
class DecodedValues:
    """Columns of the reader's type, with as many rows as there were values, and what is wrong with some of them."""

    column: pa.Array
    problems: dict[int, str] = field(default_factory=dict)


def decode_values(
    values: pa.Array, skip: int, writer: AvroType, reader: AvroType, *, cuts_times: bool = False
) -> DecodedValues:
    """Decode values of type ``writer`` into a column of type ``reader``.

    Args:
        values: large_binary without nulls.
        skip: so many bytes in front of each value are left out; each has as many.
        cuts_times: leave parts of a microsecond out of times; otherwise such a value is refused.

    Raises:
        UnreadableSchemaError: no value of the one type can be one of the other.
    """
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
    begin = int(offsets[0]) if len(values) else 0
    data = values.buffers()[2]
    raw = (b"" if data is None else data[begin : int(offsets[-1])].to_pybytes()) + _PADDING
    steps = _Steps(raw, offsets[:-1] - begin + skip, offsets[1:] - begin, cuts_times=cuts_times)
    column = steps.decode(writer, reader, np.arange(len(values)))
    assert len(column) == len(values), "each value gives one row, also a bad one"
    steps.fail(np.flatnonzero((steps.position != steps.end) & ~steps.is_bad), "bytes are left over after the value")
    return DecodedValues(column, steps.problems)


class _Steps:
    """The positions of all values. ``rows``: those that a step is about, in ascending order."""

    def __init__(self, raw: bytes, position: _Ints, end: _Ints, *, cuts_times: bool) -> None:
        self._cuts_times = cuts_times
        self._raw, self._data = raw, np.frombuffer(raw, np.uint8)
        self.position, self.end = position.copy(), end
        self.is_bad: _Mask = np.zeros(len(end), np.bool_)
        self.problems: dict[int, str] = {}

    def fail(self, rows: _Ints, problem: str) -> None:
        """Mark values; they stand still at their ends."""
        for row in rows.tolist():
            # the first problem is the reason of those that follow it
            self.problems.setdefault(row, problem)
        self.is_bad[rows] = True
        self.position[rows] = self.end[rows]

    def decode(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        """Return the next value of each row, as the reader has it."""
        writer = writer.resolve()
        if writer.kind == "union":
            return self._union(writer, reader, rows)
        if reader.kind == "union":
            return self.decode(writer, _branch(writer, reader), rows)
        if reader.is_scaled_decimal or (writer.is_scaled_decimal and reader.kind != "record"):
            return self._scaled_decimals(writer, reader, rows)
        if writer.kind in NUMBERS and reader.kind in NUMBERS:
            return self._number(writer, reader, rows)
        is_text = {writer.kind, reader.kind} <= {"bytes", "string"}
        if writer.kind != reader.kind and not is_text:
            raise UnreadableSchemaError(f"{_named(writer)} cannot be read as {_named(reader)}")
        match writer.kind:
            case "null":
                return pa.nulls(len(rows))
            case "boolean":
                return self._boolean(rows)
            case "bytes" | "string":
                _refuse_other_decimals(writer, reader)
                return self._bytes(self._length(rows), reader, rows)
            case "fixed":
                if writer.size != reader.size:
                    raise UnreadableSchemaError(f"{_named(writer)} has {writer.size} bytes, not {reader.size}")
                _refuse_other_decimals(writer, reader)
                return self._bytes(np.full(len(rows), writer.size, np.int64), reader, rows)
            case "enum":
                return self._enum(writer, reader, rows)
            case "record":
                return self._record(writer, reader, rows)
        return self._items(writer, reader, rows)

    def _move(self, rows: _Ints, position: _Ints) -> None:
        is_out = position > self.end[rows]
        if is_out.any():
            self.position[rows] = np.minimum(position, self.end[rows])
            out = rows[is_out]
            self.fail(out[~self.is_bad[out]], "it ends too early")
        else:
            self.position[rows] = position

    def _long(self, rows: _Ints) -> _Ints:
        at = self.position[rows]
        byte = self._data[at]
        at += 1
        value = (byte & 0x7F).astype(np.uint64)
        shift = 7
        more = np.flatnonzero(byte > 0x7F)
        while len(more):
            if shift > 63:
                self.fail(rows[more], "a number of more than ten bytes")
                break
            # beyond the end of a value there is something else, or padding: ``_move`` finds that out
            byte = self._data[np.minimum(at[more], len(self._data) - 1)]
            value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            at[more] += 1
            more = more[byte > 0x7F]
            shift += 7
        self._move(rows, np.where(self.is_bad[rows], self.end[rows], at) if self.problems else at)
        return (value >> np.uint64(1)).astype(np.int64) ^ -(value & np.uint64(1)).astype(np.int64)

    def _length(self, rows: _Ints) -> _Ints:
        size = self._long(rows)
        is_wrong = (size < 0) | (size > self.end[rows] - self.position[rows])
        if is_wrong.any():
            wrong = rows[is_wrong]
            self.fail(wrong[~self.is_bad[wrong]], "a length leads out of the value")
            size[is_wrong] = 0
        return size

    def _number(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        order = list(NUMBERS)
        if order.index(writer.kind) > order.index(reader.kind):
            raise UnreadableSchemaError(f"{_named(writer)} cannot be read as {_named(reader)}")
        if writer.kind in ("int", "long"):
            numbers = self._long(rows)
            if writer.kind == "int":
                is_wide = (numbers > 2**31 - 1) | (numbers < -(2**31))
                if is_wide.any():
                    self.fail(rows[is_wide], "an int of more than 32 bits")
                    numbers[is_wide] = 0
            if writer.scale is not None or reader.scale is not None:
                return self._scaled(numbers, writer, reader, rows)
            return pa.array(numbers).cast(NUMBERS[reader.kind], safe=False)
        size = 4 if writer.kind == "float" else 8
        at = self.position[rows]
        whole = self._data[np.minimum(at[:, None] + np.arange(size), len(self._data) - 1)]
        self._move(rows, at + size)
        found = np.ascontiguousarray(whole).view("<f4" if size == 4 else "<f8").reshape(-1)
        return pa.array(found).cast(NUMBERS[reader.kind])

    def _scaled(self, numbers: _Ints, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        if reader.scale is None:
            return pa.array(numbers).cast(NUMBERS[reader.kind], safe=False)
        if writer.scale is not None and _time_kind(writer) != _time_kind(reader):
            raise UnreadableSchemaError(f"{writer.column} cannot be read as {reader.column}")
        factor, divisor = writer.scale or reader.scale
        if pa.types.is_duration(reader.column) and writer.scale is not None and writer.column != reader.column:
            factor, divisor = (1_000, 1) if reader.column.unit == "ns" else (1, 1_000)
        if factor > 1:
            limit = (2**63 - 1) // factor
            is_wide = (numbers > limit) | (numbers < -limit)
            if is_wide.any():
                self.fail(rows[is_wide], "a time that no column can hold")
                numbers = np.where(is_wide, 0, numbers)
        if divisor > 1 and not self._cuts_times and (rest := numbers % divisor != 0).any():
            self.fail(rows[rest], "a time with a part of a microsecond")
        found = pa.array(numbers * factor // divisor)
        if pa.types.is_date32(reader.column):
            return found.cast(pa.int32(), safe=False).cast(reader.column)
        if pa.types.is_time(reader.column):
            is_out = (numbers < 0) | (numbers * factor >= 86_400 * 10**9)
            if is_out.any():
                self.fail(rows[is_out], "a time outside of a day")
                found = pa.array(np.where(is_out, 0, numbers * factor))
        return found.cast(reader.column)

    def _boolean(self, rows: _Ints) -> pa.Array:
        at = self.position[rows]
        byte = self._data[at]
        is_wrong = (byte > 1) & ~self.is_bad[rows]
        self._move(rows, at + 1)
        if is_wrong.any():
            self.fail(rows[is_wrong], "a boolean that is neither 0 nor 1")
        return pa.array(byte == 1)

    def _bytes(self, size: _Ints, reader: AvroType, rows: _Ints) -> pa.Array:
        begin = self.position[rows]
        is_out = size > self.end[rows] - begin
        if is_out.any():
            out = rows[is_out]
            self.fail(out[~self.is_bad[out]], "it ends too early")
            size = np.where(is_out, 0, size)
            begin = self.position[rows]
        self.position[rows] = begin + size
        column = cut_out(self._raw, begin, size)
        if pa.types.is_decimal(reader.column):
            return self._decimals(column, reader.column, rows)
        if pa.types.is_timestamp(reader.column):
            return self._moments(column, rows)
        if not pa.types.is_large_string(reader.column):
            return column
        try:
            return column.cast(pa.large_string())
        except pa.ArrowInvalid:
            texts: list[str] = []
            for row, value in zip(rows.tolist(), column.to_pylist(), strict=True):
                try:
                    texts.append(value.decode())
                except UnicodeDecodeError:
                    self.fail(np.array([row]), "invalid UTF-8")
                    texts.append("")
            return pa.array(texts, pa.large_string())

    def _moments(self, column: pa.Array, rows: _Ints) -> pa.Array:
        """Return moments of texts, which have a zone."""
        with contextlib.suppress(pa.ArrowInvalid):
            return column.cast(pa.large_string()).cast(MOMENT)
        texts = [one.decode(errors="replace") for one in column.to_pylist()]
        found = connect_types.moments(texts, cuts=self._cuts_times)
        for row, text, moment in zip(rows.tolist(), texts, found, strict=True):
            if moment is None and not self.is_bad[row]:
                self.fail(np.array([row]), f"{text!r} is no time with a zone, or has a part of a microsecond")
        return pa.array([None if one is None else one.as_py() for one in found], MOMENT)

    def _scaled_decimals(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        """Return decimals that have a scale each, as the reader has them."""
        dtype = reader.column
        is_possible = dtype in _DECIMAL_COLUMNS or pa.types.is_decimal(dtype)
        if not is_possible or {"scale", "value"} - {one.name for one in writer.fields}:
            raise UnreadableSchemaError(f"{_named(writer)} cannot be read as {_named(reader)}")
        found = {}
        for one in writer.fields:
            if one.name in ("scale", "value"):
                plain = AvroType("int", pa.int32()) if one.name == "scale" else AvroType("bytes", pa.large_binary())
                found[one.name] = self.decode(one.type, plain, rows).to_pylist()
            else:
                self._skip(one.type, rows)
        texts = pa.array(map(connect_types.scaled_text, found["value"], found["scale"]), pa.large_string())
        absurd = rows[texts.is_null().to_numpy(zero_copy_only=False)]
        self.fail(absurd[~self.is_bad[absurd]], "a decimal with a scale that no database has")
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(dtype)
        made = []
        for row, text in zip(rows.tolist(), texts, strict=True):
            try:
                made.append(text.cast(dtype).as_py())
            except pa.ArrowInvalid:
                made.append(None)
                self.fail(np.array([row]), f"a decimal that {dtype} cannot hold")
        return pa.array(made, dtype)

    def _decimals(self, column: pa.Array, dtype: pa.DataType, rows: _Ints) -> pa.Array:
        """Return numbers of big-endian bytes, of any length."""
        numbers = [int.from_bytes(one, "big", signed=True) for one in column.to_pylist()]
        limit = 10**dtype.precision
        out = np.array([abs(one) >= limit for one in numbers], np.bool_)
        self.fail(rows[out], f"a decimal that {dtype} cannot hold")
        data = b"".join(
            (0 if is_out else one).to_bytes(16, "little", signed=True) for one, is_out in zip(numbers, out, strict=True)
        )
        return pa.Array.from_buffers(dtype, len(numbers), [None, pa.py_buffer(data)])

    def _enum(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        number = self._long(rows)
        is_wrong = (number < 0) | (number >= len(writer.symbols))
        if is_wrong.any():
            wrong = rows[is_wrong]
            self.fail(wrong[~self.is_bad[wrong]], f"a symbol that {_named(writer)} does not have")
            number[is_wrong] = 0
        known = [one if one in reader.symbols else reader.default_symbol for one in writer.symbols]
        found = pa.array(known, pa.large_string()).take(pa.array(number))
        if found.null_count:
            missing = rows[found.is_null().to_numpy(zero_copy_only=False)]
            self.fail(missing[~self.is_bad[missing]], f"a symbol that the reader's {_named(reader)} does not have")
        return found

    def _record(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        written = {one.name for one in writer.fields}
        wanted = {name: one for one in reversed(reader.fields) if one.name not in written for name in one.aliases}
        wanted.update({one.name: one for one in reader.fields})
        columns: dict[str, pa.Array] = {}
        for one in writer.fields:
            target = wanted.get(one.name)
            if target is None:
                self._skip(one.type, rows)
            else:
                columns[target.name] = self.decode(one.type, target.type, rows)
        for one in reader.fields:
            if one.name not in columns:
                if not one.has_default:
                    raise UnreadableSchemaError(f"it has no field '{one.name}', which has no default")
                columns[one.name] = _default_of(one, len(rows))
        arrays = [_as(columns[one.name], one.type.column) for one in reader.fields]
        if not arrays:
            return pa.array([{}] * len(rows), pa.struct([]))
        return pa.StructArray.from_arrays(arrays, fields=list(reader.column))

    def _union(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        number = self._branches(writer, rows)
        known = records_of([reader, *reader.inner])
        has_several = len(records_of(writer.inner)) > 1  # only the name says which of them is meant
        parts: list[pa.Array] = []
        place = np.full(len(rows), -1, np.int64)
        count = 0
        problem = ""
        for index, branch in enumerate(writer.inner):
            mine = np.flatnonzero((number == index) & ~self.is_bad[rows])
            if branch.kind == "null":
                if reader.kind not in ("union", "null") or not _takes_null(reader):
                    self.fail(rows[mine], f"null for {_named(reader)}, which cannot be null")
                continue
            try:
                if has_several and set(records_of([branch])) - set(known):
                    raise UnreadableSchemaError(f"{_named(branch)} cannot be read as {_named(reader)}")
                found = self.decode(branch, reader, rows[mine])
            except UnreadableSchemaError as error:
                problem = problem or str(error)
                self.fail(rows[mine], str(error))
                continue
            parts.append(_as(found, reader.column))
            place[mine] = count + np.arange(len(mine))
            count += len(mine)
        if not parts:
            if problem:
                raise UnreadableSchemaError(problem)
            return pa.nulls(len(rows), reader.column)
        if (place >= 0).all() and len(parts) == 1:
            return parts[0]
        return pa.concat_arrays(parts).take(pa.array(place, mask=place < 0))

    def _branches(self, writer: AvroType, rows: _Ints) -> _Ints:
        """Return which branch of a union the next value of each row is of."""
        number = self._long(rows)
        is_wrong = (number < 0) | (number >= len(writer.inner))
        if is_wrong.any():
            wrong = rows[is_wrong]
            self.fail(wrong[~self.is_bad[wrong]], "a branch of a union that its schema does not have")
        return number

    def _skip(self, writer: AvroType, rows: _Ints, level: int = 0) -> None:
        """Pass over the next value of each row. What it says is not looked at."""
        if not len(rows):
            return
        match writer.kind:
            case "null":
                return
            case "reference" if level == LEVELS_MAX:
                self.fail(rows, f"type {writer.name!r} is more than {LEVELS_MAX} times within itself")
            case "int" | "long" | "enum":
                self._long(rows)
            case "bytes" | "string":
                self._pass(self._length(rows), rows)
            case "union":
                number = self._branches(writer, rows)
                for index, branch in enumerate(writer.inner):
                    self._skip(branch, rows[(number == index) & ~self.is_bad[rows]], level)
            case "record":
                for one in writer.fields:
                    self._skip(one.type, rows, level)
            case "array" | "map":
                for active in self._item_steps(rows):
                    if writer.kind == "map":
                        self._pass(self._length(rows[active]), rows[active])
                    self._skip(writer.inner[0], rows[active], level)
            case "reference":
                self._skip(writer.resolve(), rows, level + 1)
            case _:
                size = {"boolean": 1, "float": 4, "double": 8, "fixed": writer.size}[writer.kind]
                self._pass(np.full(len(rows), size, np.int64), rows)

    def _pass(self, size: _Ints, rows: _Ints) -> None:
        """Go on after so many bytes."""
        self._move(rows, np.where(self.is_bad[rows], self.end[rows], self.position[rows] + size))

    def _items(self, writer: AvroType, reader: AvroType, rows: _Ints) -> pa.Array:
        """Return arrays or maps."""
        found: list[tuple[_Ints, pa.Array]] = []
        counts = np.zeros(len(rows), np.int64)
        inner = writer.inner[0]
        self.decode(inner, reader.inner[0], rows[:0])  # the types must go together, also where all are empty
        for active in self._item_steps(rows):
            own = rows[active]
            if writer.kind == "map":
                key = self._bytes(self._length(own), AvroType("string", pa.large_string()), own)
                value = _as(self.decode(inner, reader.inner[0], own), reader.inner[0].column)
                item: pa.Array = pa.StructArray.from_arrays([key, value], fields=list(reader.column.value_type))
            else:
                item = _as(self.decode(inner, reader.inner[0], own), reader.column.value_type)
            found.append((active, item))
            counts[active] += 1
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts))))
        if not found:
            items = pa.nulls(0, reader.column.value_type)
        else:
            order = np.argsort(np.concatenate([of for of, _ in found]), kind="stable")
            items = pa.concat_arrays([item for _, item in found]).take(pa.array(order))
        return pa.LargeListArray.from_arrays(offsets, items, type=reader.column)

    def _item_steps(self, rows: _Ints) -> Iterator[_Ints]:
        """Yield which of ``rows`` have one more item of an array or map, which the caller takes before it goes on."""
        left = np.zeros(len(rows), np.int64)
        counts = np.zeros(len(rows), np.int64)
        has_more = ~self.is_bad[rows]
        while has_more.any():
            begins = np.flatnonzero(has_more & (left == 0))
            if len(begins):
                left[begins] = self._block(rows[begins])
                has_more[begins] = (left[begins] > 0) & ~self.is_bad[rows[begins]]
            active = np.flatnonzero(has_more)
            if not len(active):
                break
            yield active
            counts[active] += 1
            left[active] -= 1
            has_more[self.is_bad[rows]] = False
            if (counts > ITEMS_MAX).any():
                self.fail(rows[counts > ITEMS_MAX], f"more than {ITEMS_MAX:,} items")
                has_more[self.is_bad[rows]] = False

    def _block(self, rows: _Ints) -> _Ints:
        count = self._long(rows)
        with_size = np.flatnonzero(count < 0)
        if len(with_size):
            self._long(rows[with_size])
            count[with_size] = -count[with_size]
        return count


def cut_out(raw: bytes, begin: _Ints, size: _Ints) -> pa.Array:
    """Return these bytes of ``raw``, which follow each other and do not overlap, as a column of bytes.

    Seen as one column, ``raw`` is what is wanted and what is between it in turn; of that every other value is taken.
    """
    count = len(begin)
    bounds = np.empty(2 * count + 1, np.int64)
    bounds[0:-1:2] = begin
    np.add(begin, size, out=bounds[1::2])
    bounds[-1] = bounds[-2] if count else 0
    everything = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, pa.py_buffer(bounds), pa.py_buffer(raw)])
    return everything.take(pa.array(np.arange(0, 2 * count, 2)))


_DECIMAL_COLUMNS = (pa.large_string(), pa.float64(), pa.float32())
"""What decimals can be read as, besides decimals of one scale."""


def _branch(writer: AvroType, reader: AvroType) -> AvroType:
    """Return the branch of the reader's union that takes the writer's type: one of the same kind, or a wider one."""
    same = [one for one in reader.inner if one.kind == writer.kind and one.column == writer.column]
    kind = [one for one in reader.inner if one.kind == writer.kind]
    order = list(NUMBERS)
    wider = [
        one
        for one in reader.inner
        if (writer.is_scaled_decimal and (one.column in _DECIMAL_COLUMNS or pa.types.is_decimal(one.column)))
        or (one.kind in order and writer.kind in order and order.index(one.kind) > order.index(writer.kind))
        or {one.kind, writer.kind} == {"bytes", "string"}
    ]
    found = [*same, *kind, *wider]
    if not found:
        raise UnreadableSchemaError(f"{_named(writer)} cannot be read as {_named(reader)}")
    return found[0]


def _time_kind(of: AvroType) -> str:
    """Return whether numbers are days, times of a day, durations, or moments and local times, which differ in units."""
    if pa.types.is_duration(of.column):
        return "duration"
    return "date" if pa.types.is_date32(of.column) else "time" if pa.types.is_time(of.column) else "timestamp"


def _refuse_other_decimals(writer: AvroType, reader: AvroType) -> None:
    """Refuse a decimal that is read with another scale, as the specification demands, or as a text.

    Raises:
        UnreadableSchemaError
    """
    if not pa.types.is_decimal(writer.column):
        return
    is_other = pa.types.is_decimal(reader.column) and writer.column.scale != reader.column.scale
    if is_other or pa.types.is_large_string(reader.column):
        raise UnreadableSchemaError(f"{writer.column} cannot be read as {reader.column}")


def _takes_null(reader: AvroType) -> bool:
    return reader.kind == "null" or any(one.kind == "null" for one in reader.inner)


def _named(one: AvroType) -> str:
    if one.kind == "union":
        return f"a union of {', '.join(branch.name or branch.kind for branch in one.inner)}"
    return f"{one.kind} '{one.name}'" if one.name else one.kind


def _as(column: pa.Array, dtype: pa.DataType) -> pa.Array:
    return column if column.type.equals(dtype) else column.cast(dtype)


def _default_of(one: AvroField, count: int) -> pa.Array:
    """Return the default of a field ``count`` times.

    Raises:
        UnreadableSchemaError: it is no value of the field's type.
    """
    try:
        return _repeated(one.default, one.type, count)
    except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError, KeyError) as error:
        problem = f"the default {one.default!r} of field '{one.name}' is no {_named(one.type)}"
        raise UnreadableSchemaError(problem) from error


def _repeated(default: Any, of: AvroType, count: int) -> pa.Array:
    """Return the default of a field, which the schema has as JSON, ``count`` times."""
    if of.kind == "union":
        if default is None:
            return pa.nulls(count, of.column)
        branches: Sequence[AvroType] = [one for one in of.inner if one.kind != "null"]
        return _repeated(default, branches[0], count)
    if of.kind in ("bytes", "fixed"):
        raw = str(default).encode("latin-1")
        if pa.types.is_decimal(of.column):
            number = int.from_bytes(raw, "big", signed=True).to_bytes(16, "little", signed=True)
            return pa.Array.from_buffers(of.column, count, [None, pa.py_buffer(number * count)])
        return pa.repeat(pa.scalar(raw, of.column), count)
    if of.is_scaled_decimal:
        text = connect_types.scaled_text(str(default["value"]).encode("latin-1"), int(default["scale"]))
        return pa.repeat(pa.scalar(text, of.column), count)
    if of.kind == "string" and pa.types.is_timestamp(of.column):
        return pa.repeat(pa.scalar(str(default)).cast(of.column), count)
    if of.scale is not None:
        number = pa.scalar(int(default) * of.scale[0] // of.scale[1], pa.int32() if of.kind == "int" else pa.int64())
        if pa.types.is_time(of.column):
            number = number.cast(pa.int64())
        return pa.repeat(number.cast(of.column), count)
    if of.kind == "record":
        arrays = [_repeated(default.get(f.name, f.default), f.type, count) for f in of.fields]
        return pa.StructArray.from_arrays(arrays, fields=list(of.column))
    if of.kind == "map":
        default = list(default.items())
        keys = [key for key, _ in default]
        values = pa.concat_arrays(
            [_repeated(v, of.inner[0], 1) for _, v in default] or [pa.nulls(0, of.inner[0].column)]
        )
        entries = pa.StructArray.from_arrays(
            [pa.array(keys, pa.large_string()), values], fields=list(of.column.value_type)
        )
        return pa.LargeListArray.from_arrays(pa.array([0, len(keys)], pa.int64()), entries, type=of.column).take(
            pa.array([0] * count, pa.int64())
        )
    if of.kind == "array":
        items = pa.concat_arrays([_repeated(v, of.inner[0], 1) for v in default] or [pa.nulls(0, of.inner[0].column)])
        whole = pa.LargeListArray.from_arrays(pa.array([0, len(items)], pa.int64()), items, type=of.column)
        return whole.take(pa.array([0] * count, pa.int64()))
    return pa.repeat(pa.scalar(default, of.column), count)
