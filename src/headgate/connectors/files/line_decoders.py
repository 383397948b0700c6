"""Decoders of lines as text or JSON: records, and the lines that are none.

Counterparts: ``line_file``, where lines come from; ``line_source``, which makes bad records of refused lines. Source:
docs/spec/connectors.md. Columnar: a block is parsed at once; only when that fails is it halved
until the lines at fault are found. Never hands pyarrow's JSON parser a line that is not "{…}": a lone ``null``
crashes it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headgate.codec.exact_values import MisfitError, shortened_text
from headgate.connectors.files.json_shape import MapLines, ShapedReader
from headgate.connectors.files.lines import Lines, RawLines
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.schemas import canonical_schema, has_map, schema_text, to_canonical

Starts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class Decoder(Protocol):
    """Makes records of lines."""

    schema: pa.Schema

    def decode(self, lines: Lines) -> Decoded:
        """Return the records and the refused lines."""


@dataclass(slots=True)
class Refused:
    """Lines that are not records: what is wrong, where they begin, and their text."""

    problems: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, problem: str, starts: Starts, values: pa.Array) -> None:
        """Refuse all of ``values`` for the same reason."""
        self.problems += [problem] * len(values)
        self.starts += starts.tolist()
        self.texts += [_text(value) for value in values.to_pylist()]

    def extend(self, others: Refused) -> None:
        """Refuse what ``others`` has, too."""
        self.problems += others.problems
        self.starts += others.starts
        self.texts += others.texts


@dataclass(frozen=True, slots=True)
class Decoded:
    """Records in the decoder's schema, the byte each began at, and the lines that are none."""

    batch: pa.RecordBatch
    starts: Starts
    refused: Refused


class TextDecoder:
    """Each line is a record with one column."""

    def __init__(self, column: str) -> None:
        self.schema = pa.schema([pa.field(column, pa.large_string())])

    def decode(self, lines: Lines) -> Decoded:
        """Return the valid lines."""
        refused = Refused()
        values, starts = valid_text(lines, refused)
        return Decoded(pa.RecordBatch.from_arrays([values], schema=self.schema), starts, refused)


def valid_text(lines: Lines, refused: Refused) -> tuple[pa.LargeStringArray, Starts]:
    """Return the lines that are valid UTF-8, and where they begin."""
    if _is_ascii(lines.values):
        return _as_text(lines.values), lines.starts
    good = np.ones(len(lines.values), np.bool_)
    parts: list[pa.LargeStringArray] = []

    def convert(low: int, high: int) -> str | None:
        try:
            parts.append(lines.values.slice(low, high - low).cast(pa.large_string()))
        except pa.ArrowInvalid:
            return "invalid UTF-8"
        return None

    isolate(len(lines.values), convert, lines.values, lines.starts, refused, good)
    if len(parts) == 1 and good.all():
        return parts[0], lines.starts
    return pa.concat_arrays(parts or [pa.array([], pa.large_string())]), lines.starts[good]


def _is_ascii(values: pa.LargeBinaryArray) -> bool:
    """Whether there is nothing but ASCII in ``values``: that is seen at once, where a cast looks at each value."""
    _, offsets, data = values.buffers()
    if len(values) == 0 or data is None:
        return True
    bounds = np.frombuffer(offsets, np.int64)
    begin, end = bounds[values.offset], bounds[values.offset + len(values)]
    return bool(np.frombuffer(data, np.int8)[begin:end].min(initial=0) >= 0)


def _as_text(values: pa.LargeBinaryArray) -> pa.LargeStringArray:
    """Return the same bytes as text, which they are known to be."""
    return pa.Array.from_buffers(
        pa.large_string(), len(values), values.buffers(), null_count=values.null_count, offset=values.offset
    )


def isolate(
    count: int,
    attempt: Callable[[int, int], str | None],
    values: pa.Array,
    starts: Starts,
    refused: Refused,
    good: np.ndarray[Any, np.dtype[np.bool_]],
) -> None:
    """Call ``attempt(low, high)``, halving what it refuses down to single items, in order."""
    ranges = [(0, count)] if count else []
    while ranges:
        low, high = ranges.pop()
        problem = attempt(low, high)
        if problem is None:
            continue
        if high - low == 1:
            good[low] = False
            refused.add(problem, starts[low:high], values.slice(low, 1))
        else:
            middle = (low + high) // 2
            # taken from the end: the lower half comes next, so that results stay in order
            ranges += [(middle, high), (low, middle)]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


_ASCII = bytes(range(128))


def checked_encoding(encoding: str) -> str:
    """Return the name of an encoding as ``TranscodingDecoder`` takes it; "" for UTF-8.

    Raises:
        UsageError: it is unknown, or ASCII characters are other bytes in it.
    """
    try:
        name = codecs.lookup(encoding).name
        has_shifts = any(byte < 128 for sign in "日한é" for byte in sign.encode(name, "ignore")[:1])
        if _ASCII.decode(name) == _ASCII.decode("ascii") and not has_shifts:
            return "" if name in ("utf-8", "utf-8-sig", "ascii") else name
    except (LookupError, TypeError, ValueError):
        pass
    raise UsageError(
        f"encoding {encoding!r} is not supported; give Python's name of one in which ASCII stays as it is, such as "
        "'latin-1' or 'cp1252', or convert the files to UTF-8"
    )


class TranscodingDecoder:
    """Makes UTF-8 of lines in another encoding, for another decoder."""

    def __init__(self, inner: Decoder, encoding: str) -> None:
        self.schema = inner.schema
        self._inner, self._encoding = inner, encoding

    def decode(self, lines: Lines) -> Decoded:
        """Return the records of the lines that are in the encoding."""
        refused = Refused()
        good = np.ones(len(lines.values), np.bool_)
        parts: list[pa.LargeStringArray] = [pa.array([], pa.large_string())]

        def convert(low: int, high: int) -> str | None:
            try:
                texts = [value.decode(self._encoding) for value in lines.values.slice(low, high - low).to_pylist()]
            except UnicodeDecodeError:
                return f"invalid {self._encoding}"
            parts.append(pa.array(texts, pa.large_string()))
            return None

        isolate(len(lines.values), convert, lines.values, lines.starts, refused, good)
        values = pa.concat_arrays(parts).cast(pa.large_binary())
        header = lines.header.decode(self._encoding, "backslashreplace").encode()
        found = self._inner.decode(Lines(values, lines.starts[good], lines.first, lines.inner, header))
        for name in ("problems", "starts", "texts"):
            getattr(refused, name).extend(getattr(found.refused, name))
        return Decoded(found.batch, found.starts, refused)


class JsonDecoder:
    """Each line is a JSON object; blank lines are ignored, unknown fields too, missing ones are null."""

    def __init__(self, schema: pa.Schema, required: Sequence[str] = ()) -> None:
        """Prepare for ``schema``; a record is refused if a ``required`` field is missing or null.

        Raises:
            UsageError: a type cannot be read from JSON, or a required field is not in the schema.
        """
        self.schema = canonical_schema(schema)
        with_maps = [field for field in schema if has_map(field.type)]
        self._fields = [field if field in with_maps else self.schema.field(field.name) for field in schema]
        self._map_lines = MapLines(with_maps) if with_maps else None
        self._maps = JsonDecoder(canonical_schema(pa.schema(with_maps))) if with_maps else None
        self._plain = pa.schema([self.schema.field(f.name) for f in schema if f not in with_maps])
        """All but the columns with maps."""
        self._parsed = pa.schema([pa.field(f.name, _parsed_type(f.type, f.name)) for f in self._plain])
        self._cast = pa.schema([pa.field(f.name, wide_type(f.type)) for f in self._plain])
        self._shaped = ShapedReader(self._cast)
        not_null = [f.name for f in schema if not f.nullable]
        self._required = list(dict.fromkeys([*not_null, *required]))
        self._nested = [f for f in schema if _requires_within(f.type)]
        missing = [name for name in self._required if name not in self.schema.names]
        if missing:
            raise UsageError(f"required field '{missing[0]}' is not in the schema ({schema_text(self.schema)})")

    def decode(self, lines: Lines) -> Decoded:
        """Parse the lines at once; isolate those at fault when that fails."""
        refused = Refused()
        # the quickest way first: nearly always all lines are sound, and none is looked at by itself
        if lines.raw is not None and (whole := self._parse_whole(lines.raw)) is not None:
            return Decoded(whole, lines.starts, refused)
        values, starts = valid_text(lines, refused)
        if self._maps is None and (alike := self._read_alike(*_as_buffer(values))) is not None:
            return self._check_required(alike, values, starts, refused)
        values, starts = _objects(values, starts, refused)
        good = np.ones(len(values), np.bool_)
        batches: list[pa.RecordBatch] = []

        def parse(low: int, high: int) -> str | None:
            try:
                batches.append(self._parse_lines(values.slice(low, high - low)))
            except _SeveralValuesError:
                return "several JSON values on one line"
            except (pa.ArrowInvalid, MisfitError) as error:
                return self._problem(values.slice(low, high - low), error)
            return None

        isolate(len(values), parse, values, starts, refused, good)
        batch = pa.Table.from_batches(batches, self.schema).combine_chunks()
        return self._check_required(one_batch(batch, self.schema), values.filter(good), starts[good], refused)

    def _parse_whole(self, raw: RawLines) -> pa.RecordBatch | None:
        """Parse lines as they stand in the file; None if not each of them is one sound record."""
        if self._maps is not None or not (_are_objects(raw) and _is_utf8(raw.data)):
            return None
        batch = self._read_alike(raw.data, raw.starts() - raw.base, raw.ends)
        try:
            batch = self._parse(pa.py_buffer(raw.data), len(raw.ends)) if batch is None else batch
        except (_SeveralValuesError, pa.ArrowInvalid, MisfitError):
            return None
        is_complete = not self._nested and not any(batch.column(name).null_count for name in self._required)
        return batch if is_complete else None

    def _read_alike(self, data: bytes | memoryview | pa.Buffer, starts: Starts, ends: Starts) -> pa.RecordBatch | None:
        """Read objects that are all written alike; None: they are not, or have values that do not fit."""
        batch = self._shaped.read(data, starts, ends)
        try:
            return None if batch is None else to_canonical(batch, self.schema)
        except MisfitError:
            return None

    def _parse_lines(self, values: pa.LargeStringArray) -> pa.RecordBatch:
        batch = self._parse(joined(values), len(values))
        if self._maps is None or self._map_lines is None:
            return batch
        maps = self._maps._parse_lines(self._map_lines.of(values))
        columns = [(maps if name in maps.schema.names else batch).column(name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _parse(self, text: pa.Buffer, rows: int) -> pa.RecordBatch:
        """Parse all columns but those with maps."""
        table = pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 64),
            parse_options=pj.ParseOptions(explicit_schema=self._parsed, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != rows:
            raise _SeveralValuesError
        table = table.select(self._plain.names).cast(self._cast).combine_chunks()
        return to_canonical(one_batch(table, self._cast), self._plain)

    def _problem(self, values: pa.LargeStringArray, error: Exception) -> str:
        """Return what is wrong with one line; which field it is, the field says that cannot be read alone."""
        if len(values) > 1:
            return "one of several"
        if twice := _TWICE.search(str(error)):
            return f"field '{twice[1].replace('/', '.')}' is there twice"
        line = values[0].as_py()
        is_sound = _is_readable(pa.schema([]), values)  # else each field alone cannot be read in this line
        for one in self._fields:
            alone = values if is_sound else _alone(line, one.name)
            if not _is_readable(pa.schema([one]), alone):
                return _misfit(line, one) or _reason(error)
        return _reason(error)

    def _check_required(self, batch: pa.RecordBatch, values: pa.Array, starts: Starts, refused: Refused) -> Decoded:
        for name in self._required:
            column = batch.column(name)
            if column.null_count:
                is_null = column.is_null()
                mask = is_null.to_numpy(zero_copy_only=False)
                refused.add(f"field '{name}' is missing or null", starts[mask], values.filter(is_null))
                keep = pc.invert(is_null)
                batch, values, starts = batch.filter(keep), values.filter(keep), starts[~mask]
        for one in self._nested:
            while (found := next(_missing_within(batch.column(one.name), one.type, one.name), None)) is not None:
                path, mask = found
                refused.add(f"field '{path}' is missing or null", starts[mask], values.filter(pa.array(mask)))
                keep = pa.array(~mask)
                batch, values, starts = batch.filter(keep), values.filter(keep), starts[~mask]
        assert batch.num_rows == len(starts), "each record begins at one place"
        return Decoded(batch, starts, refused)


def _requires_within(dtype: pa.DataType) -> bool:
    """Whether something within values of ``dtype`` may not be null."""
    return any(not inner.nullable or _requires_within(inner.type) for inner in _inner(dtype))


def _inner(dtype: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(dtype):
        return list(dtype)
    return [dtype.value_field] if _is_list(dtype) else []


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def _missing_within(column: pa.Array, dtype: pa.DataType, path: str) -> Iterator[tuple[str, Mask]]:
    """Find what is null within a column although ``dtype`` says that it may not be: its path, and in which rows."""
    for inner in _inner(dtype):
        if _is_list(dtype):
            values, rows, where = column.flatten(), pc.list_parent_indices(column).to_numpy(), f"{path}[]"
        else:
            values, rows, where = pc.struct_field(column, inner.name), np.arange(len(column)), f"{path}.{inner.name}"
        found = list(_missing_within(values, inner.type, where))
        if not inner.nullable:
            is_null = values.is_null().to_numpy(zero_copy_only=False)
            if not _is_list(dtype):
                is_null &= column.is_valid().to_numpy(zero_copy_only=False)
            found.insert(0, (where, is_null))
        for place, mask in found:
            if mask.any():
                in_rows = np.zeros(len(column), np.bool_)
                in_rows[rows[mask]] = True
                yield place, in_rows


class _SeveralValuesError(Exception):
    """Several JSON values on one line."""


def _objects(values: pa.LargeStringArray, starts: Starts, refused: Refused) -> tuple[pa.LargeStringArray, Starts]:
    """Return the lines that have the form ``{…}``, trimmed; skip blank ones, refuse the rest."""
    is_object = _is_object(values)
    if is_object.false_count == 0:
        return values, starts
    values = pc.ascii_trim_whitespace(values)
    is_object = _is_object(values)
    other = pc.and_not(pc.greater(pc.binary_length(values), 0), is_object)
    refused.add("not a JSON object", starts[other.to_numpy(zero_copy_only=False)], values.filter(other))
    return values.filter(is_object), starts[is_object.to_numpy(zero_copy_only=False)]


def _are_objects(raw: RawLines) -> bool:
    """Whether every line begins with "{" and ends with "}": then no JSON value can go on in the next line."""
    data = np.frombuffer(raw.data, np.uint8)
    last = data[raw.ends - 1]
    if (has_return := last == ord("\r")).any():
        last = data[raw.ends - 1 - has_return]
    return bool((last == ord("}")).all() and (data[raw.starts() - raw.base] == ord("{")).all())


def _is_utf8(data: bytes | memoryview) -> bool:
    if np.frombuffer(data, np.int8).min(initial=0) >= 0:  # ASCII
        return True
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _as_buffer(values: pa.LargeStringArray) -> tuple[pa.Buffer, Starts, Starts]:
    """Return the bytes of texts that are not null, and where each begins and ends."""
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    return data or pa.py_buffer(b""), bounds[:-1], bounds[1:]


def _is_object(values: pa.LargeStringArray) -> pa.BooleanArray:
    return pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))


def joined(values: pa.LargeStringArray) -> pa.Buffer:
    """Return the values with a line end between them; line ends within one, as Kafka's may have, are white space."""
    whole = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    return pc.binary_join(whole, pa.scalar("\n", pa.large_string())).cast(pa.large_binary())[0].as_buffer()


def one_batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a table whose columns have one chunk each."""
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=schema)


def _parsed_type(dtype: pa.DataType, name: str) -> pa.DataType:
    """Return the type that pyarrow's JSON reader gets for ``dtype``; a cast does the rest."""
    if pa.types.is_date32(dtype):
        return pa.large_string()
    if pa.types.is_float32(dtype):
        return pa.float64()  # the reader makes infinity of what is too large
    if pa.types.is_large_list(dtype):
        return pa.list_(_parsed_type(dtype.value_type, name))
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, _parsed_type(f.type, name)) for f in dtype])
    if (
        pa.types.is_duration(dtype)
        or pa.types.is_large_binary(dtype)
        or pa.types.is_decimal(dtype)
        or pa.types.is_time(dtype)
    ):
        raise UsageError(f"field '{name}' has type {dtype}, which JSON cannot express; read it as a string or int64")
    return dtype


def wide_type(dtype: pa.DataType) -> pa.DataType:
    """Return ``dtype`` with the ``float64`` that stand for ``float32`` until it is looked at whether they fit."""
    if pa.types.is_large_list(dtype):
        return pa.large_list(wide_type(dtype.value_type))
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, wide_type(f.type)) for f in dtype])
    return pa.float64() if pa.types.is_float32(dtype) else dtype


def _is_readable(schema: pa.Schema, values: pa.LargeStringArray) -> bool:
    try:
        JsonDecoder(schema)._parse_lines(values)
    except (pa.ArrowInvalid, MisfitError):
        return False
    return True


def _alone(line: str, name: str) -> pa.LargeStringArray:
    """Return the line with one of its fields, or as it is, if it is no JSON."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return pa.array([line], pa.large_string())
    kept = {name: found[name]} if name in found else {}
    return pa.array([json.dumps(kept).replace("Infinity", "1e400")], pa.large_string())


_TWICE = re.compile(r"Column\(/(.*)\) was specified twice")


def _misfit(line: str, named: pa.Field) -> str:
    """Return that a field has a value that does not fit; "" if the line is no JSON at all."""
    try:
        value = json.dumps(json.loads(line)[named.name], ensure_ascii=False)
    except (ValueError, KeyError, RecursionError):
        return ""
    text = shortened_text(value).encode("utf-8", "backslashreplace").decode()
    return f"field '{named.name}' is {named.type}, which cannot hold {text}"


def _reason(error: Exception) -> str:
    text = str(error).removeprefix("JSON parse error: ").split("\n")[0]
    return text.split(" in row ")[0].removesuffix(".")
