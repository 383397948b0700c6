"""Decoders of CSV: records of files whose headers may differ, and single rows as Kafka's values have them.

Counterparts: ``line_file``, which finds where records end; ``line_source``, which makes bad records of refused ones.
Columnar as ``line_decoders``: pyarrow parses a block at once, and what it refuses is halved until the rows at fault
are found.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from headgate.codec.exact_values import MisfitError
from headgate.connectors.files.line_decoders import (
    Decoded,
    Refused,
    Starts,
    isolate,
    one_batch,
    valid_text,
    wide_type,
)
from headgate.connectors.files.lines import Lines
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.schemas import DECIMAL_DIGITS_MAX, canonical_schema, schema_text, to_canonical


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """How fields are written.

    Attributes:
        delimiter: between fields.
        quote: around fields that have delimiters, quotes or line ends in them; None: none are.
        null_values: what stands for null, outside of quotes.
        timestamp_formats: as ``strptime`` has them, besides ISO 8601.
        decimal_point: of numbers.
    """

    delimiter: str = ","
    quote: str | None = '"'
    null_values: tuple[str, ...] = ("",)
    timestamp_formats: tuple[str, ...] = ()
    decimal_point: str = "."


class CsvParser:
    """Parses rows of CSV by a schema: the columns of a header that are in it, or all of it without a header."""

    def __init__(self, schema: pa.Schema, options: CsvOptions) -> None:
        """Prepare for ``schema``.

        Raises:
            UsageError: a type cannot be read from CSV.
        """
        self.schema = canonical_schema(schema)
        for one in self.schema:
            if pa.types.is_nested(one.type) or pa.types.is_duration(one.type) or pa.types.is_large_binary(one.type):
                raise UsageError(
                    f"field '{one.name}' has type {one.type}, which CSV cannot express; read it as a string"
                )
        self._wide = pa.schema([pa.field(f.name, wide_type(f.type)) for f in self.schema])
        self._options = options
        self._zoned: set[str] = set()
        """Timestamps without zone in which offsets were found: they are converted to UTC, as JSON's are."""
        self._has_quoted_nulls = False
        """Whether an empty field in quotes was found where no text is expected."""

    def parse(self, text: pa.Buffer, rows: int, header: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the ``rows`` rows in ``text``, whose columns are those of ``header`` or of the schema.

        Raises:
            pa.ArrowInvalid: it has other rows, or a value does not fit.
            MisfitError: a value does not fit.
        """
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        names = list(header if header is not None else self._wide.names)
        found = [name for name in self._wide.names if header is None or name in names]
        toggled: set[str] = set()
        while True:
            try:
                table = self._read(text, names, found)
                break
            except pa.ArrowInvalid as error:
                column = _column_at_fault(error, names)
                is_misfit = _MISFIT.search(str(error)) is not None
                if (
                    is_misfit
                    and (_ZONE.search(str(error)) or self._may_have_zones(column))
                    and column not in toggled
                    and self._wide.field(column).type.tz is None
                ):
                    toggled.add(column)
                    self._zoned ^= {column}
                elif is_misfit and not self._has_quoted_nulls and self._quote in text.to_pybytes():
                    self._has_quoted_nulls = True
                else:
                    raise
        if table.num_rows != rows:
            raise pa.ArrowInvalid("it is not one row of CSV")
        self._refuse_changed(table, text, names)
        columns = [table[f.name].cast(f.type) if f.name in found else pa.nulls(rows, f.type) for f in self._wide]
        table = pa.Table.from_arrays(columns, schema=self._wide).combine_chunks()
        return to_canonical(one_batch(table, self._wide), self.schema)

    @property
    def _quote(self) -> bytes:
        return (self._options.quote or "\n").encode()

    def _read(self, text: pa.Buffer, names: list[str], wanted: list[str]) -> pa.Table:
        if not self._has_quoted_nulls:
            return self._columns(text, names, wanted, quoted_can_be_null=False)
        texts = [name for name in wanted if pa.types.is_large_string(self._wide.field(name).type)]
        others = [name for name in wanted if name not in texts]
        parts = [(texts, False), (others, True)]
        tables = [self._columns(text, names, part, quoted_can_be_null=can) for part, can in parts if part]
        table = tables[0]
        for more in tables[1:]:
            for name in more.column_names:
                table = table.append_column(name, more[name])
        return table

    def _may_have_zones(self, column: str) -> bool:
        """Whether an offset may be what is wrong: with formats of the user's Arrow does not say it."""
        is_time = column in self._wide.names and pa.types.is_timestamp(self._wide.field(column).type)
        return is_time and bool(self._options.timestamp_formats)

    def _refuse_changed(self, table: pa.Table, text: pa.Buffer, names: list[str]) -> None:
        """Refuse what Arrow reads as another value than the text says, without a word.

        Raises:
            MisfitError: an integer in base 16, whose sign would be lost; a number that is too large for a float, or has
                more digits than its decimal; a day or a second that is not in the calendar.
        """
        fields = [self.schema.field(name) for name in table.column_names]
        floats = [f for f in fields if pa.types.is_floating(f.type) and pc.any(pc.is_inf(table[f.name])).as_py()]
        wholes = [f for f in fields if pa.types.is_integer(f.type)]
        wholes = wholes if wholes and _has_base_16(text) else []
        times = [f for f in fields if self._options.timestamp_formats and pa.types.is_timestamp(f.type)]
        decimals = [f for f in fields if pa.types.is_decimal(f.type)]
        for field in decimals:
            try:
                table[field.name].validate(full=True)
            except pa.ArrowInvalid:
                raise _misfit(table[field.name], pa.scalar(True), field) from None
        large = [f for f in decimals if f.type.precision + f.type.scale > DECIMAL_DIGITS_MAX]
        wanted = {f.name: pa.large_string() for f in [*floats, *wholes, *times]} | {f.name: pa.float64() for f in large}
        if not wanted:
            return
        again = self._columns(text, names, list(wanted), quoted_can_be_null=self._has_quoted_nulls, types=wanted)
        for field in floats:
            is_named = pc.match_substring(again[field.name], "inf", ignore_case=True)
            is_changed = pc.and_not(pc.is_inf(table[field.name]), is_named)
            _refuse(is_changed, again[field.name], field)
        for field in wholes:
            _refuse(pc.match_substring(again[field.name], "0x", ignore_case=True), again[field.name], field)
        for field in times:
            _refuse(_is_rolled_over(again[field.name], self._options.timestamp_formats), again[field.name], field)
        for field in large:
            limit = 1.01 * 10.0 ** (field.type.precision - field.type.scale)  # less is found by its precision
            _refuse(pc.greater(pc.abs(again[field.name]), limit), again[field.name], field)

    def _columns(
        self,
        text: pa.Buffer,
        names: list[str],
        wanted: list[str],
        *,
        quoted_can_be_null: bool,
        types: Mapping[str, pa.DataType] | None = None,
    ) -> pa.Table:
        """Read the columns ``wanted``. ``types``: None for those of the schema."""
        options = self._options
        if types is None:
            types = {f.name: pa.timestamp("us", "UTC") if f.name in self._zoned else f.type for f in self._wide}
        if bytes(memoryview(text)[: len(_BOM)]) == _BOM:  # the reader leaves one out, and this one is text
            text = pa.py_buffer(_BOM + text.to_pybytes())
        return pv.read_csv(
            pa.BufferReader(text),
            read_options=pv.ReadOptions(use_threads=False, block_size=len(text) + 64, column_names=names),
            parse_options=pv.ParseOptions(
                delimiter=options.delimiter,
                quote_char=options.quote or False,
                newlines_in_values=options.quote is not None,
                ignore_empty_lines=False,
            ),
            convert_options=pv.ConvertOptions(
                column_types=types,
                include_columns=wanted,
                null_values=list(options.null_values),
                strings_can_be_null=True,
                quoted_strings_can_be_null=quoted_can_be_null,
                timestamp_parsers=[pv.ISO8601, *options.timestamp_formats],
                decimal_point=options.decimal_point,
            ),
        )


class CsvFileDecoder:
    """Each line is a record of CSV with its line end; blank ones are ignored."""

    def __init__(self, schema: pa.Schema, options: CsvOptions, required: Sequence[str], *, has_header: bool) -> None:
        """Prepare for ``schema``; a record is refused if a ``required`` field is missing or null.

        Raises:
            UsageError: a type cannot be read from CSV, or a required field is not in the schema.
        """
        self._parser = CsvParser(schema, options)
        self.schema = self._parser.schema
        if not len(self.schema):
            raise UsageError("schema= of CSV has no columns; give those to read")
        self._options, self._has_header = options, has_header
        self._required = list(dict.fromkeys([*(f.name for f in schema if not f.nullable), *required]))
        missing = [name for name in self._required if name not in self.schema.names]
        if missing:
            raise UsageError(f"required field '{missing[0]}' is not in the schema ({schema_text(self.schema)})")
        self._header = b""
        self._names: list[str] | None = None
        self._problem = ""

    def decode(self, lines: Lines) -> Decoded:
        """Parse the records at once; isolate those at fault when that fails."""
        refused = Refused()
        if self._has_header and lines.header != self._header:
            self._read_header(lines.header)
        values, starts = _without_blank(*valid_text(lines, refused))
        good = np.ones(len(values), np.bool_)
        batches: list[pa.RecordBatch] = []

        def parse(low: int, high: int) -> str | None:
            try:
                batches.append(self._parser.parse(_bytes_of(values.slice(low, high - low)), high - low, self._names))
            except (pa.ArrowInvalid, MisfitError) as error:
                return "one of several" if high - low > 1 else reason(error, self._names or self.schema.names)
            return None

        if self._problem:
            refused.add(self._problem, starts, values)
            good[:] = False
        else:
            isolate(len(values), parse, values, starts, refused, good)
        batch = one_batch(pa.Table.from_batches(batches, self.schema).combine_chunks(), self.schema)
        if not good.all():
            values, starts = values.filter(pa.array(good)), starts[good]
        batch, starts = without_nulls(batch, self._required, values, starts, refused)
        refused.texts = [text.rstrip("\r\n") for text in refused.texts]
        return Decoded(batch, starts, refused)

    def _read_header(self, header: bytes) -> None:
        """Note which columns the records of a file have; a header that does not say it is a reason to refuse them."""
        self._header, self._names = header, None
        text = header.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "backslashreplace").rstrip("\r\n")
        delimiter, quote = self._options.delimiter, self._options.quote
        if quote is None:
            rows = list(csv.reader([text], delimiter=delimiter, quoting=csv.QUOTE_NONE))
        else:
            rows = list(csv.reader([text], delimiter=delimiter, quotechar=quote))
        names = rows[0] if rows else []
        wanted = set(self.schema.names)
        found = [name for name in names if name in wanted]
        twice = next((name for name in found if found.count(name) > 1), None)
        self._problem = ""
        if not found:
            self._problem = (
                f"the header of the file has none of the columns {', '.join(self.schema.names)}: {text[:80]}"
            )
        elif twice is not None:
            self._problem = f"the header of the file has two columns '{twice}'"
        self._names = [name if name in wanted else f"\0{index}" for index, name in enumerate(names)]


def without_nulls(
    batch: pa.RecordBatch, required: Sequence[str], values: pa.Array, starts: Starts, refused: Refused
) -> tuple[pa.RecordBatch, Starts]:
    """Refuse records in which a ``required`` field is null."""
    for name in required:
        if batch.column(name).null_count:
            is_null = batch.column(name).is_null()
            mask = is_null.to_numpy(zero_copy_only=False)
            refused.add(f"field '{name}' is missing or null", starts[mask], values.filter(is_null))
            keep = pc.invert(is_null)
            batch, values, starts = batch.filter(keep), values.filter(keep), starts[~mask]
    return batch, starts


def _without_blank(values: pa.LargeStringArray, starts: Starts) -> tuple[pa.LargeStringArray, Starts]:
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    short = np.flatnonzero(lengths <= 2)
    if not len(short):
        return values, starts
    blank = [at for at in short.tolist() if not values[at].as_py().strip("\r\n")]
    keep = np.ones(len(values), np.bool_)
    keep[blank] = False
    return values.filter(pa.array(keep)), starts[keep]


def _bytes_of(values: pa.LargeStringArray) -> pa.Buffer:
    """Return the values, which follow each other in memory, as one text."""
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    return values.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


_BOM = b"\xef\xbb\xbf"


def _has_base_16(text: pa.Buffer) -> bool:
    data = np.frombuffer(text, np.uint8)  # to look for b"0x" takes longer where there are many zeros
    return bool(((data[:-1] == ord("0")) & ((data[1:] | 0x20) == ord("x"))).any())


def _refuse(is_changed: pa.ChunkedArray, column: pa.ChunkedArray, field: pa.Field) -> None:
    if pc.any(is_changed).as_py():
        raise _misfit(column, is_changed, field)


def _misfit(column: pa.ChunkedArray, is_changed: pa.ChunkedArray | pa.Scalar, field: pa.Field) -> MisfitError:
    index = pc.index(is_changed, True).as_py() if isinstance(is_changed, pa.ChunkedArray) else 0
    return MisfitError(index, field.name, column[index].as_py(), field.type)


def _is_rolled_over(column: pa.ChunkedArray, forms: Sequence[str]) -> pa.ChunkedArray:
    """Return which texts have the form of a time, but a 31 February or a second 60, which would become another day.

    A text is compared with the time that it became, written in its form.
    """
    texts = pc.fill_null(column, "")
    has_form = is_same = pa.chunked_array([pa.repeat(False, len(column))])
    for form in forms:
        if "%s" in form:  # seconds since 1970: all of them are in the calendar
            continue
        local, form = (texts, form) if "%z" not in form else (_without_zone(texts), form.replace("%z", "").rstrip())
        found = pc.strptime(local, form, "s", error_is_null=True)
        written = pc.strftime(found, form)
        has_form = pc.or_(has_form, found.is_valid())
        is_same = pc.or_(is_same, pc.fill_null(pc.equal(_plain(local), _plain(written)), False))
    return pc.and_not(has_form, is_same)


def _without_zone(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.replace_substring_regex(texts, r"\s*(?:Z|[+-]\d\d(?::?\d\d)?)$", "")


def _plain(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts of times without what their form leaves open: zeros in front, white space, and case."""
    texts = pc.replace_substring_regex(pc.utf8_lower(texts), r"(^|\D)0+(\d)", r"\1\2")
    return pc.replace_substring_regex(texts, r"\s+", "")


_FAULT = re.compile(r"In CSV column #(\d+): (?:Row #\d+: )?(?:CSV conversion error to .*?: )?")
_MISFIT = re.compile("CSV conversion error|Empty string cannot be converted")
_ZONE = re.compile("expected (a|no) zone offset")
_WIDTH = re.compile(r"Expected (\d+) columns?, got (\d+)")


def _column_at_fault(error: Exception, names: Sequence[str]) -> str:
    found = _FAULT.match(str(error))
    return names[int(found[1])] if found and int(found[1]) < len(names) else ""


def reason(error: Exception, names: Sequence[str]) -> str:
    """Return why one row of CSV with the columns ``names`` is refused."""
    text = str(error).split("\n")[0]
    width, column = _WIDTH.search(text), _column_at_fault(error, names)
    if width:
        return f"it has {width[2]} fields, not {width[1]}"
    if column:
        return f"field '{column}': {_FAULT.sub('', text).split('. If these')[0]}"
    return text.removeprefix("CSV parse error: ").removeprefix("Row #1: ")
