"""Formats of Kafka's records: what a value becomes, and which columns stand beside it.

Values are decoded a batch at a time by the decoders of lines (``files.line_decoders``); the row of a value stands where
these have the byte at which a line begins. A value that cannot be decoded becomes a bad record that names topic,
partition and offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.arrow import MOMENT
from headgate.codec.exact_values import MisfitError
from headgate.codec.kafka.record_batch import HEADERS_TYPE
from headgate.connectors.base import SourceBatch
from headgate.connectors.files.csv_decoder import CsvOptions, CsvParser, reason, without_nulls
from headgate.connectors.files.line_decoders import (
    Decoded,
    Decoder,
    JsonDecoder,
    Refused,
    TextDecoder,
    isolate,
    joined,
    one_batch,
    valid_text,
)
from headgate.connectors.files.lines import OUTSIDE, QUOTED, CsvForm, Lines, record_ends
from headgate.connectors.kafka.changes import DebeziumDecoder, UpsertKeys, with_op
from headgate.connectors.kafka.schemas.avro import AvroDecoder, AvroKeyDecoder
from headgate.connectors.kafka.schemas.debezium_decoder import DebeziumAvroDecoder
from headgate.connectors.kafka.schemas.frames import without_frames
from headgate.connectors.kafka.schemas.protobuf import ProtobufDecoder, ProtobufMessage, message_of
from headgate.connectors.kafka.schemas.schema_registry import FoundSchema, RegistryClient, SchemaRegistry
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import UsageError
from headgate.operators.schemas import SchemaLike, arrow_schema, canonical_schema
from headgate.operators.user_functions import bad_records

RAW, TEXT, JSON, CSV, AVRO, PROTOBUF = "raw", "text", "json", "csv", "avro", "protobuf"
DEBEZIUM, DEBEZIUM_AVRO = "debezium-json", "debezium-avro"
FORMATS = (RAW, TEXT, JSON, CSV, AVRO, PROTOBUF, DEBEZIUM, DEBEZIUM_AVRO)

ENVELOPES = (DEBEZIUM, DEBEZIUM_AVRO)
"""Formats of changes."""

OF_AVRO = (AVRO, DEBEZIUM_AVRO)

WITH_REGISTRY = (JSON, AVRO, PROTOBUF, DEBEZIUM, DEBEZIUM_AVRO)
"""Formats of values that may begin with the id of a schema."""

DROP, KEEP = "drop", "keep"
TOMBSTONES = (DROP, KEEP)
"""What becomes of records without a value, unless the format is ``RAW``."""

PLAIN = "plain"
KEY_FORMATS = (PLAIN, AVRO)
"""What the keys of upserts are."""

REFUSE, CUT = "refuse", "cut"
FINE_TIMES = (REFUSE, CUT)
"""What becomes of values with a time that has a part of a microsecond."""

VALUE = "value"
METADATA: Mapping[str, pa.DataType] = {
    "key": pa.large_binary(),
    "timestamp": MOMENT,
    "topic": pa.large_string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "headers": HEADERS_TYPE,
}
"""What a record has beside its value."""

METADATA_OF_RAW = ("key", "timestamp", "topic", "partition", "offset")

Metadata: TypeAlias = Sequence[str] | Mapping[str, str]
"""Names of metadata, or the names of their columns → those of the metadata."""

_Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What records become.

    Attributes:
        name: one of ``FORMATS``.
        schema: the fields of a value, for JSON and CSV.
        avro: the reader's schema of Avro; None: not known yet, or not needed.
        protobuf: the message of Protobuf.
        registry: where values of Avro have their schemas; None: all have the reader's. Of JSON and Protobuf: values
            begin as a registry demands it.
        required: fields of JSON that must be there and not null.
        separator: between the fields of CSV.
        metadata: columns beside the value: name of the column, name in ``METADATA``.
        keeps_tombstones: whether a record without a value is a row of nulls.
        upsert: the fields that are the key, of a topic of upserts.
        cuts_times: whether parts of a microsecond are left out of times of Avro and Protobuf.
        has_avro_keys: whether the keys of a topic of upserts are Avro.
    """

    name: str
    schema: pa.Schema | None
    avro: FoundSchema | None
    protobuf: ProtobufMessage | None
    registry: SchemaRegistry | None
    required: tuple[str, ...]
    separator: str
    metadata: tuple[tuple[str, str], ...]
    keeps_tombstones: bool
    upsert: tuple[str, ...] = ()
    cuts_times: bool = False
    has_avro_keys: bool = False

    @property
    def needs_headers(self) -> bool:
        """Whether headers have to be read."""
        return self.registry is not None or any(wanted == "headers" for _, wanted in self.metadata)


def record_format(
    name: str,
    schema: SchemaLike | str | type | None,
    registry: SchemaRegistry | str | None,
    required: Sequence[str],
    separator: str,
    metadata: Metadata | None,
    tombstones: str,
    upsert: str | Sequence[str] = (),
    where: str = "a Kafka source",
    fine_times: str = REFUSE,
    key_format: str = PLAIN,
) -> RecordFormat:
    """Return the options of a format as one value. ``where``: which source it is, for errors.

    Raises:
        UsageError: they contradict each other.
    """
    if name not in FORMATS:
        raise UsageError(f"format={name!r} of {where} is none of {', '.join(map(repr, FORMATS))}")
    if schema is None and (name in (JSON, CSV, PROTOBUF, DEBEZIUM) or (name in OF_AVRO and registry is None)):
        avro = "schema='{...}' or registry='http://...'"
        others = {AVRO: avro, DEBEZIUM_AVRO: avro, PROTOBUF: "schema=Message, a generated class"}
        need = others.get(name, "schema={'name': type}")
        raise UsageError(f"format={name!r} of {where} needs {need}")
    if schema is not None and name in (RAW, TEXT):
        raise UsageError(f"format={name!r} of {where} takes no schema=; give another format")
    if registry is not None and name not in WITH_REGISTRY:
        raise UsageError(f"registry= of {where} is for the formats {', '.join(map(repr, WITH_REGISTRY))}")
    if fine_times not in FINE_TIMES:
        raise UsageError(f"fine_times={fine_times!r} of {where} is none of {', '.join(map(repr, FINE_TIMES))}")
    if fine_times == CUT and name not in (*OF_AVRO, PROTOBUF):
        raise UsageError(f"fine_times= of {where} is for formats of Avro and Protobuf only")
    if required and name != JSON:
        raise UsageError(f"required= of {where} is for format='json' only")
    if len(separator) != 1 or separator in '"\r\n':
        raise UsageError(f"separator={separator!r} of {where} must be one character, and no quote or line end")
    if tombstones not in TOMBSTONES:
        raise UsageError(f"tombstones={tombstones!r} of {where} is none of {', '.join(map(repr, TOMBSTONES))}")
    keys = (upsert,) if isinstance(upsert, str) and upsert else tuple(upsert)
    if keys and name in (RAW, TEXT, *ENVELOPES):
        raise UsageError(f"upsert= of {where} is for values with fields, not for format={name!r}")
    if tombstones == KEEP and (keys or name in ENVELOPES):
        raise UsageError(f"tombstones='keep' of {where} is not for changes: a record without a value is no row")
    if key_format not in KEY_FORMATS:
        raise UsageError(f"key_format={key_format!r} of {where} is none of {', '.join(map(repr, KEY_FORMATS))}")
    has_avro_keys = key_format == AVRO
    if has_avro_keys and (not keys or name != AVRO or registry is None):
        raise UsageError(f"key_format='avro' of {where} is for format='avro' with upsert= and registry= only")
    found, protobuf, fields = None, None, None
    if name == PROTOBUF:
        protobuf = message_of(schema)
    elif schema is not None and name in OF_AVRO:
        found = FoundSchema(schema if isinstance(schema, str) else json.dumps(schema))
    elif schema is not None:
        fields = arrow_schema(schema)
    not_null = [*required, *(field.name for field in fields or () if not field.nullable)]
    if tombstones == KEEP and not_null:
        raise UsageError(f"tombstones='keep' of {where} makes rows of nulls, but field '{not_null[0]}' is required")
    place = SchemaRegistry(registry) if isinstance(registry, str) else registry
    columns = _columns(name, metadata)
    keeps = tombstones == KEEP
    cuts = fine_times == CUT
    needed = tuple(required)
    return RecordFormat(
        name, fields, found, protobuf, place, needed, separator, columns, keeps, keys, cuts, has_avro_keys
    )


def _columns(name: str, metadata: Metadata | None) -> tuple[tuple[str, str], ...]:
    if metadata is None:
        metadata = METADATA_OF_RAW if name == RAW else ()
    if isinstance(metadata, str):
        metadata = (metadata,)
    pairs = metadata.items() if isinstance(metadata, Mapping) else [(one, one) for one in metadata]
    for _, wanted in pairs:
        if wanted not in METADATA:
            known = ", ".join(METADATA)
            raise UsageError(f"metadata of a Kafka source has no {wanted!r}; choose of {known}")
    return tuple(pairs)


SchemaDecoder: TypeAlias = AvroDecoder | DebeziumAvroDecoder | ProtobufDecoder
"""Those that know where the schema of a value is named; all others decode lines."""


def value_decoder(form: RecordFormat, environment: Environment) -> Decoder | SchemaDecoder | None:
    """Return what decodes values; None: they stay bytes."""
    client = None if form.registry is None else RegistryClient(form.registry, environment)
    match form.name:
        case "text":
            return TextDecoder(VALUE)
        case "json":
            assert form.schema is not None
            return JsonDecoder(form.schema, form.required)
        case "debezium-json":
            assert form.schema is not None
            return DebeziumDecoder(form.schema)
        case "csv":
            assert form.schema is not None
            return CsvDecoder(form.schema, form.separator)
        case "avro":
            assert form.avro is not None
            reader = form.avro.parse("the schema of a Kafka source")
            return AvroDecoder(reader, client, cuts_times=form.cuts_times)
        case "debezium-avro":
            assert form.avro is not None
            return DebeziumAvroDecoder(form.avro, client, cuts_times=form.cuts_times)
        case "protobuf":
            assert form.protobuf is not None
            return ProtobufDecoder(form.protobuf, is_framed=form.registry is not None, cuts_times=form.cuts_times)
    return None


def key_decoder(form: RecordFormat, environment: Environment) -> AvroKeyDecoder | None:
    """Return what decodes keys of Avro, if they are."""
    if not form.has_avro_keys:
        return None
    assert form.avro is not None
    assert form.registry is not None
    fields = form.avro.parse("the schema of a Kafka source").fields
    of_key = [one for name in form.upsert for one in fields if one.name == name]
    return AvroKeyDecoder(of_key, RegistryClient(form.registry, environment), cuts_times=form.cuts_times)


class RecordDecoder:
    """Makes the records of a source of Kafka's records.

    Attributes:
        schema: of the records that it makes.
    """

    def __init__(self, form: RecordFormat, environment: Environment = SYSTEM_ENVIRONMENT) -> None:
        self._form, self._decoder = form, value_decoder(form, environment)
        values = pa.schema([(VALUE, pa.large_binary())]) if self._decoder is None else self._decoder.schema
        if not values.names:
            raise UsageError(f"the schema of a Kafka source with format={form.name!r} has no fields; give at least one")
        keys, has_registry = form.upsert, form.registry is not None
        avro = key_decoder(form, environment)
        self._upsert = UpsertKeys(values, keys, avro, has_registry=has_registry) if keys else None
        if self._upsert is not None:
            values = with_op(values)
        taken = [column for column, _ in form.metadata if column in values.names]
        if taken:
            raise UsageError(
                f"the metadata of a Kafka source and its values both have a column '{taken[0]}'; rename that of the "
                f"metadata: metadata={{'kafka_{taken[0]}': '{dict(form.metadata)[taken[0]]}'}}"
            )
        beside = [pa.field(column, METADATA[wanted]) for column, wanted in form.metadata]
        self.schema = canonical_schema(pa.schema([*values, *beside]))

    def decode(self, partition: tuple[str, int], split: str, records: pa.RecordBatch, node: str) -> SourceBatch:
        """Return the records of one partition in ``schema``, and those that cannot be decoded."""
        if self._decoder is None:
            return SourceBatch(split, self._with_metadata([records.column(VALUE)], partition, records, None))
        values, rows = records.column(VALUE), np.arange(records.num_rows)
        has_tombstones = values.null_count > 0
        if has_tombstones:
            is_there = values.is_valid()
            values, rows = values.drop_null(), rows[is_there.to_numpy(zero_copy_only=False)]
        headers = None if self._form.registry is None else records.column("headers").take(pa.array(rows))
        if isinstance(self._decoder, SchemaDecoder):
            decoded = self._decoder.decode(values, rows, headers)
        elif headers is None:
            decoded = self._decoder.decode(Lines(values, rows))
            refuse_the_rest(values, rows, decoded)
        else:
            values, rows, refused = without_frames(values, rows, headers)
            decoded = self._decoder.decode(Lines(values, rows))
            refuse_the_rest(values, rows, decoded)
            decoded.refused.extend(refused)
        batch, kept = decoded.batch, decoded.starts
        if self._upsert is not None:
            decoded = self._upsert.changes(batch, kept, records, decoded.refused)
            batch, kept = decoded.batch, decoded.starts
        elif has_tombstones and self._form.keeps_tombstones:
            batch, kept = _with_nulls(batch, kept, records.column(VALUE))
        bad = None
        if (refused := decoded.refused).problems:
            offsets = records.column("offset").to_numpy()[refused.starts]
            places = [f"topic {partition[0]} partition {partition[1]} offset {offset}" for offset in offsets]
            texts = records.column(VALUE).take(pa.array(refused.starts)).to_pylist()
            bad = bad_records(
                node, refused.problems, places, [(text or b"").decode(errors="backslashreplace") for text in texts]
            )
        is_whole = len(kept) == records.num_rows and self._form.name not in ENVELOPES
        whole = None if is_whole else pa.array(kept)
        return SourceBatch(split, self._with_metadata(batch.columns, partition, records, whole), bad)

    def _with_metadata(
        self, values: list[pa.Array], partition: tuple[str, int], records: pa.RecordBatch, rows: pa.Array | None
    ) -> pa.RecordBatch:
        """``rows``: which records the values are from; None: from all."""
        count = records.num_rows if rows is None else len(rows)
        columns = list(values)
        for _, wanted in self._form.metadata:
            if wanted in ("topic", "partition"):
                what = partition[0] if wanted == "topic" else partition[1]
                columns.append(pa.repeat(pa.scalar(what, METADATA[wanted]), count))
            else:
                column = records.column(wanted)
                columns.append(column if rows is None else column.take(rows))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def refuse_the_rest(values: pa.Array, rows: _Rows, decoded: Decoded) -> None:
    """Refuse what a decoder of lines leaves out in silence: blank ones."""
    is_short = len(decoded.starts) + len(decoded.refused.starts) < len(rows)
    if is_short or (decoded.starts[1:] <= decoded.starts[:-1]).any():  # an update of Debezium is two records
        is_left = ~np.isin(rows, decoded.starts) & ~np.isin(rows, decoded.refused.starts)
        decoded.refused.add("the value is empty", rows[is_left], values.filter(pa.array(is_left)))


def _with_nulls(batch: pa.RecordBatch, kept: _Rows, values: pa.Array) -> tuple[pa.RecordBatch, _Rows]:
    """Return ``batch`` with a row of nulls where ``values`` has a null."""
    nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
    rows = np.sort(np.concatenate([kept, nulls]))
    where = np.searchsorted(kept, rows)
    is_null = np.isin(rows, nulls)
    indices = pa.array(np.where(is_null, 0, where), mask=is_null)
    columns = [pa.nulls(len(rows), c.type) if len(kept) == 0 else c.take(indices) for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema), rows


class CsvDecoder:
    """Each value is one row of CSV without a header. An empty field is null, ``""`` an empty text."""

    def __init__(self, schema: pa.Schema, separator: str) -> None:
        """Prepare for ``schema``, whose columns are the fields in their order.

        Raises:
            UsageError: a type cannot be read from CSV.
        """
        self._parser = CsvParser(schema, CsvOptions(separator))
        self._form = CsvForm(ord(separator), ord('"'), has_header=False)
        self.schema = self._parser.schema
        self._required = [f.name for f in schema if not f.nullable]

    def decode(self, lines: Lines) -> Decoded:
        """Parse the values at once; isolate those at fault when that fails."""
        refused = Refused()
        values, rows = valid_text(lines, refused)
        values = pc.utf8_rtrim(values, "\r\n")
        goes_on = pc.or_(pc.match_substring(values, "\n"), pc.match_substring(values, "\r"))
        is_odd = pc.equal(pc.bit_wise_and(pc.count_substring(values, '"'), 1), 1)
        alone = pc.or_(pc.or_(goes_on, is_odd), pc.equal(pc.binary_length(values), 0))  # never together with others
        has_some = pc.any(alone).as_py()
        good = np.ones(len(values), np.bool_)
        batches: list[pa.RecordBatch] = []

        def parse(low: int, high: int) -> str | None:
            if has_some and high - low > 1 and pc.any(alone.slice(low, high - low)).as_py():
                return "one of several"
            if high - low == 1 and not values[low].as_py():
                return "the value is empty"
            if high - low == 1 and is_odd[low].as_py() and self._is_open(values[low].as_py()):
                return "a quote is not closed"
            try:
                batches.append(self._parser.parse(joined(values.slice(low, high - low)), high - low))
            except (pa.ArrowInvalid, MisfitError) as error:
                return reason(error, self.schema.names)
            return None

        isolate(len(values), parse, values, rows, refused, good)
        batch = one_batch(pa.Table.from_batches(batches, self.schema).combine_chunks(), self.schema)
        values, rows = values.filter(pa.array(good)), rows[good]
        batch, rows = without_nulls(batch, self._required, values, rows, refused)
        return Decoded(batch, rows, refused)

    def _is_open(self, value: str) -> bool:
        return record_ends(value.encode(), np.empty(0, np.int64), self._form, b"", OUTSIDE)[1] == QUOTED
