"""Debezium's envelopes in Avro as its connectors write them with the converter of Confluent, or of Apicurio."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from tests.servers.schema_registry import Registry

from headgate.codec.kafka.record_batch import RECORDS_WITH_HEADERS
from headgate.connectors.base import SourceBatch
from headgate.connectors.kafka.formats import RecordDecoder
from headgate.connectors.kafka.source import Kafka
from headgate.errors import UsageError

TOPIC = "shop.public.orders"
Schema = dict[str, Any]


def connect(base: str, name: str, **more: Any) -> Schema:
    return {"type": base, "connect.version": 1, "connect.name": name, **more}


def decimal(scale: int, precision: int, parameters: Schema | None = None) -> Schema:
    given = {"scale": str(scale), **(parameters or {})}
    kind = {"logicalType": "decimal", "scale": scale, "precision": precision, "connect.parameters": given}
    return connect("bytes", "org.apache.kafka.connect.data.Decimal", **kind)


SCALED = {
    "type": "record",
    "name": "VariableScaleDecimal",
    "namespace": "io.debezium.data",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
    "connect.doc": "Variable scaled decimal",
    "connect.version": 1,
    "connect.name": "io.debezium.data.VariableScaleDecimal",
}


def optional(of: Any) -> Schema:
    return {"type": ["null", of], "default": None}


def envelope(**fields: Any) -> Schema:
    """Return an envelope with rows of these fields, each a type, or a field without its name."""
    made = [
        {"name": name, **(one if isinstance(one, dict) and "default" in one else {"type": one})}
        for name, one in fields.items()
    ]
    row = {"type": "record", "name": "Value", "fields": made, "connect.name": f"{TOPIC}.Value"}
    source = {
        "type": "record",
        "name": "Source",
        "namespace": "io.debezium.connector.postgresql",
        "fields": [
            {"name": "version", "type": "string"},
            {"name": "ts_ms", "type": "long"},
            {"name": "snapshot", "type": [connect("string", "io.debezium.data.Enum"), "null"], "default": "false"},
            {"name": "lsn", **optional("long")},
        ],
    }
    block = {"type": "record", "name": "block", "namespace": "event", "fields": [{"name": "id", "type": "string"}]}
    return {
        "type": "record",
        "name": "Envelope",
        "namespace": TOPIC,
        "fields": [
            {"name": "before", **optional(row)},
            {"name": "after", **optional("Value")},
            {"name": "source", "type": source},
            {"name": "transaction", **optional(block)},
            {"name": "op", "type": "string"},
            {"name": "ts_ms", **optional("long")},
        ],
        "connect.name": f"{TOPIC}.Envelope",
    }


FIRST = envelope(id="long", name=optional("string"))
SOURCE = {"version": "3.2", "ts_ms": 1, "snapshot": "last", "lsn": None}


def change(op: str, before: Any = None, after: Any = None) -> dict[str, Any]:
    return {"before": before, "after": after, "source": SOURCE, "transaction": None, "op": op, "ts_ms": 3}


def encoded(schema: Schema, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def framed(number: int, schema: Schema, *values: Any) -> list[bytes]:
    return [b"\0" + number.to_bytes(4, "big") + encoded(schema, value) for value in values]


def decoder(registry: Registry | None, **options: Any) -> RecordDecoder:
    url = None if registry is None else registry.url
    source = Kafka("kafka:9092", TOPIC, format="debezium-avro", registry=url, metadata=["offset"], **options)
    return RecordDecoder(source.format())


def decode(with_: RecordDecoder, values: list[bytes | None]) -> SourceBatch:
    rows = [{"key": b"k", "value": value, "offset": 10 + n, "headers": []} for n, value in enumerate(values)]
    batch = pa.RecordBatch.from_pylist(rows, schema=RECORDS_WITH_HEADERS)
    found = with_.decode((TOPIC, 0), f"{TOPIC}/0", batch, "kafka")
    assert found.batch.schema.equals(with_.schema)
    found.batch.validate(full=True)
    return found


def changes(found: SourceBatch) -> list[tuple[Any, ...]]:
    return [(row["offset"], row["op"], *list(row.values())[:-2]) for row in found.batch.to_pylist()]


def problems(found: SourceBatch) -> list[str]:
    return [] if found.bad is None else [f"{one['position']}: {one['problem']}" for one in found.bad.to_pylist()]


def test_envelopes_become_changes(registry: Registry) -> None:
    number = registry.register(f"{TOPIC}-value", FIRST)
    a, b = {"id": 1, "name": "a"}, {"id": 1, "name": None}
    values = framed(
        number,
        FIRST,
        change("r", after=a),
        change("u", before=a, after=b),
        change("d", before=b),
        change("u", after=a),  # a table without replica identity full
        change("c", after={"id": 2, "name": "é"}),
    )
    found = decode(decoder(registry), [*values[:3], None, *values[3:]])
    assert changes(found) == [
        (10, "insert", 1, "a"),
        (11, "update_before", 1, "a"),
        (11, "update_after", 1, None),
        (12, "delete", 1, None),
        (14, "update_after", 1, "a"),
        (15, "insert", 2, "é"),
    ]
    assert problems(found) == []


def test_what_is_no_change_is_a_bad_record_with_its_place(registry: Registry) -> None:
    number = registry.register(f"{TOPIC}-value", FIRST)
    row = {"id": 1, "name": "a"}
    truncate, no_row, good = framed(number, FIRST, change("t"), change("c"), change("c", after=row))
    found = decode(decoder(registry), [truncate, no_row, good[:-1], b"\0\0\0\0\x63", b"{}", b"", good])
    assert changes(found) == [(16, "insert", 1, "a")]
    place = f"topic {TOPIC} partition 0 offset"
    no_change = "it is no envelope of Debezium with an op of c, r, u, d and its row"
    no_frame = "it does not begin with the id of a schema, a zero byte and four more"
    assert sorted(problems(found)) == [
        f"{place} 10: {no_change}",
        f"{place} 11: {no_change}",
        f"{place} 12: it ends too early",
        f"{place} 13: its schema, id 99, is not in the registry",
        f"{place} 14: {no_frame}",
        f"{place} 15: {no_frame}",
    ]


def test_a_table_that_is_altered_while_it_is_read_keeps_the_columns_of_the_start(registry: Registry) -> None:
    first = registry.register(f"{TOPIC}-value", FIRST)
    reading = decoder(registry)
    wider = envelope(note="string", id="long", name=optional("string"), more=optional("double"))
    second = registry.register(f"{TOPIC}-value", wider)
    narrower = envelope(id="int")
    third = registry.register(f"{TOPIC}-value", narrower)
    values = [
        *framed(first, FIRST, change("c", after={"id": 1, "name": "a"})),
        *framed(second, wider, change("d", before={"note": "n", "id": 2, "name": "b", "more": 1.5})),
        *framed(third, narrower, change("u", before={"id": 3}, after={"id": 4})),
    ]
    assert changes(decode(reading, values)) == [
        (10, "insert", 1, "a"),
        (11, "delete", 2, "b"),
        (12, "update_before", 3, None),
        (12, "update_after", 4, None),
    ]


def test_the_schema_may_be_that_of_the_row_or_of_the_envelope(registry: Registry) -> None:
    number = registry.register(f"{TOPIC}-value", FIRST)
    values: list[bytes | None] = [*framed(number, FIRST, change("c", after={"id": 1, "name": "a"}))]
    row = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "double"}]}
    assert changes(decode(decoder(registry, schema=json.dumps(row)), values)) == [(10, "insert", 1.0)]
    assert changes(decode(decoder(registry, schema=json.dumps(envelope(name=optional("string")))), values)) == [
        (10, "insert", "a")
    ]


def test_without_a_registry_all_values_have_the_envelope_that_is_given() -> None:
    value = encoded(FIRST, change("c", after={"id": 1, "name": "a"}))
    assert changes(decode(decoder(None, schema=json.dumps(FIRST)), [value])) == [(10, "insert", 1, "a")]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, r"format='debezium-avro' of a Kafka source needs schema='\{...\}' or registry="),
        ({"schema": json.dumps(FIRST["fields"][0]["type"][1])}, "is no envelope of Debezium"),
        ({"schema": '"long"', "registry": "http://r:1"}, "is of kind long, not a record"),
        ({"schema": json.dumps(envelope(op="string"))}, "have a field 'op'"),
        ({"schema": json.dumps(envelope(x=["string", "long"]))}, "a union of several types"),
        (
            {"schema": json.dumps(envelope(x=decimal(127, 64)))},
            "a decimal of 38 digits with 127 of them after the point",
        ),
        ({"schema": json.dumps(envelope(x=decimal(-2, 5)))}, "a decimal of 5 digits with -2 of them after the point"),
        ({"schema": json.dumps(FIRST), "upsert": "id"}, "upsert= of a Kafka source is for values with fields"),
        ({"schema": json.dumps(FIRST), "tombstones": "keep"}, "tombstones='keep' of a Kafka source is not for changes"),
        ({"schema": json.dumps(FIRST), "fine_times": "round"}, "fine_times='round' of a Kafka source is none of"),
    ],
)
def test_what_cannot_be_read_is_said_when_the_source_is_made(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Kafka("kafka:9092", TOPIC, format="debezium-avro", **options)


def test_values_have_the_types_of_the_database(registry: Registry) -> None:
    types: dict[str, tuple[Any, Any, Any]] = {
        "date": (connect("int", "io.debezium.time.Date"), 1, dt.date(1970, 1, 2)),
        "time_ms": (connect("int", "io.debezium.time.Time"), 1_500, dt.time(0, 0, 1, 500_000)),
        "time_us": (connect("long", "io.debezium.time.MicroTime"), 43_200_000_001, dt.time(12, 0, 0, 1)),
        "time_ns": (connect("long", "io.debezium.time.NanoTime"), 1_000, dt.time(0, 0, 0, 1)),
        "at_ms": (connect("long", "io.debezium.time.Timestamp"), 1_000, dt.datetime(1970, 1, 1, 0, 0, 1)),
        "at_us": (
            connect("long", "io.debezium.time.MicroTimestamp"),
            -1,
            dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
        ),
        "at_ns": (connect("long", "io.debezium.time.NanoTimestamp"), 1_000, dt.datetime(1970, 1, 1, 0, 0, 0, 1)),
        "span": (connect("long", "io.debezium.time.MicroDuration"), 5, dt.timedelta(microseconds=5)),
        "zoned": (
            connect("string", "io.debezium.time.ZonedTimestamp"),
            "2025-01-01T09:00:00.5+02:00",
            dt.datetime(2025, 1, 1, 7, 0, 0, 500_000, tzinfo=dt.UTC),
        ),
        "connect_date": (
            connect("int", "org.apache.kafka.connect.data.Date", logicalType="date"),
            1,
            dt.date(1970, 1, 2),
        ),
        "connect_at": (
            connect("long", "org.apache.kafka.connect.data.Timestamp"),
            1,
            dt.datetime(1970, 1, 1, 0, 0, 0, 1_000, tzinfo=dt.UTC),
        ),
        "price": (decimal(2, 10), Decimal("-1.50"), Decimal("-1.50")),
        "unbounded": (decimal(3, 64), Decimal("12.345"), Decimal("12.345")),  # Connect knows no precision
        "tiny": (  # more digits after the point than digits: the converter leaves Avro's own type out
            connect(
                "bytes",
                "org.apache.kafka.connect.data.Decimal",
                **{"connect.parameters": {"scale": "7", "connect.decimal.precision": "3"}},
            ),
            b"\x0c",
            Decimal("0.0000012"),
        ),
        "json": (connect("string", "io.debezium.data.Json"), "{}", "{}"),
        "year": (connect("int", "io.debezium.time.Year"), 2026, 2026),
        "bits": (
            connect("bytes", "io.debezium.data.Bits", **{"connect.parameters": {"length": "9"}}),
            b"\1\0",
            b"\1\0",
        ),
        "small": ({"type": "int", "connect.type": "int16"}, -7, -7),
        "scaled": (SCALED, {"scale": 4, "value": b"\x01\xe2\x40"}, "12.3456"),
        "scaled_too": ("io.debezium.data.VariableScaleDecimal", {"scale": -2, "value": b"\xff"}, "-100"),
    }
    schema = envelope(**{name: optional(kind) for name, (kind, _, _) in types.items()})
    number = registry.register(f"{TOPIC}-value", schema)
    full = {name: written for name, (_, written, _) in types.items()}
    full = {name: dt.date(1970, 1, 2) if name == "connect_date" else one for name, one in full.items()}
    found = decode(
        decoder(registry), framed(number, schema, change("c", after=full), change("c", after=dict.fromkeys(types)))
    )
    assert problems(found) == []
    first, second = found.batch.to_pylist()
    assert {name: first[name] for name in types} == {name: read for name, (_, _, read) in types.items()}
    assert {name: second[name] for name in types} == dict.fromkeys(types)
    kinds = {name: found.batch.schema.field(name).type for name in types}
    assert kinds["zoned"] == kinds["connect_at"] == pa.timestamp("us", "UTC")
    assert kinds["at_ms"] == kinds["at_us"] == kinds["at_ns"] == pa.timestamp("us")
    assert kinds["unbounded"] == pa.decimal128(38, 3)


def read_as(kind: Any, as_: Any, *values: Any, registry: Registry, **options: Any) -> tuple[list[Any], list[str]]:
    """Return what values of a field become when the schema of the source has another type for it, and the problems."""
    schema = envelope(x=kind)
    number = registry.register(f"{TOPIC}-value", schema)
    row = {
        "type": "record",
        "name": "r",
        "fields": [{"name": "x", **(as_ if isinstance(as_, dict) and "default" in as_ else {"type": as_})}],
    }
    found = decode(
        decoder(registry, schema=json.dumps(row), **options),
        framed(number, schema, *(change("c", after={"x": one}) for one in values)),
    )
    return [one["x"] for one in found.batch.to_pylist()], [one.rpartition(": ")[2] for one in problems(found)]


def test_decimals_of_many_scales_are_read_exactly_or_not_at_all(registry: Registry) -> None:
    one, fine, huge = ({"scale": s, "value": v} for s, v in ((1, b"\x0f"), (3, b"\x01"), (0, b"\x7f" * 17)))
    fixed = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    bad = "a decimal that decimal128(10, 2) cannot hold"
    assert read_as(SCALED, fixed, one, fine, huge, registry=registry) == ([Decimal("1.50")], [bad, bad])
    assert read_as(SCALED, optional(fixed), one, registry=registry) == ([Decimal("1.50")], [])
    assert read_as(SCALED, "double", one, fine, registry=registry) == ([1.5, 0.001], [])
    assert read_as(SCALED, "string", one, registry=registry) == ([("1.5")], [])
    plain = {**SCALED, "connect.name": "other"}
    assert read_as(SCALED, plain, one, registry=registry) == ([one], [])
    absurd = {"scale": 2**31 - 1, "value": b"\x01"}
    assert read_as(SCALED, SCALED, absurd, registry=registry) == ([], ["a decimal with a scale that no database has"])


def test_fine_times_make_bad_records_unless_they_are_cut(registry: Registry) -> None:
    nanos = connect("long", "io.debezium.time.NanoTimestamp")
    at = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999)
    assert read_as(nanos, nanos, -1, registry=registry) == ([], ["a time with a part of a microsecond"])
    assert read_as(nanos, nanos, -1, registry=registry, fine_times="cut") == ([at], [])
    zoned = connect("string", "io.debezium.time.ZonedTimestamp")
    texts = ("2025-01-01T09:00:00.1234567Z", "2025-01-01T09:00:00.1234560Z", "infinity")
    moment = dt.datetime(2025, 1, 1, 9, 0, 0, 123_456, tzinfo=dt.UTC)
    found, said = read_as(zoned, zoned, *texts, registry=registry)
    assert found == [moment]
    assert len(said) == 2
    found, said = read_as(zoned, zoned, *texts, registry=registry, fine_times="cut")
    assert found == [moment, moment]
    assert said == ["'infinity' is no time with a zone, or has a part of a microsecond"]
    assert read_as(zoned, "string", *texts, registry=registry) == (list(texts), [])


def test_times_outside_of_a_day_can_be_read_as_numbers(registry: Registry) -> None:
    """MySQL has them, and PostgreSQL's day ends at 24:00."""
    micro = connect("long", "io.debezium.time.MicroTime")
    assert read_as(micro, micro, 86_400_000_000, -1, registry=registry) == ([], ["a time outside of a day"] * 2)
    assert read_as(micro, "long", 86_400_000_000, -1, registry=registry) == ([86_400_000_000, -1], [])


def test_a_duration_keeps_its_meaning_in_another_unit(registry: Registry) -> None:
    micro, nano = (connect("long", f"io.debezium.time.{one}Duration") for one in ("Micro", "Nano"))
    part = "a time with a part of a microsecond"
    assert read_as(nano, micro, 5_000, 5_001, registry=registry) == ([dt.timedelta(microseconds=5)], [part])
    assert read_as(micro, nano, 5, registry=registry) == ([dt.timedelta(microseconds=5)], [])


def test_a_field_that_is_not_read_makes_no_bad_record(registry: Registry) -> None:
    schema = envelope(id="long", at=connect("string", "io.debezium.time.ZonedTimestamp"), text="string")
    number = registry.register(f"{TOPIC}-value", schema)
    row = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}
    value = framed(number, schema, change("c", after={"id": 1, "at": "infinity", "text": "x"}))[0]
    found = decode(decoder(registry, schema=json.dumps(row)), [value])
    assert (changes(found), problems(found)) == ([(10, "insert", 1)], [])


def test_defaults_of_the_database_fill_columns_that_older_values_lack(registry: Registry) -> None:
    first = registry.register(f"{TOPIC}-value", FIRST)
    zoned = connect("string", "io.debezium.time.ZonedTimestamp", **{"connect.default": "1970-01-01T00:00:00.000000Z"})
    micros = connect("long", "io.debezium.time.MicroTimestamp", **{"connect.default": 0})
    newer = envelope(
        id="long",
        zoned={"type": [zoned, "null"], "default": "1970-01-01T00:00:00.000000Z"},
        at={"type": micros, "default": 1},
        scaled={"type": SCALED, "default": {"scale": 1, "value": "\x0f"}},
    )
    registry.register(f"{TOPIC}-value", newer)
    found = decode(decoder(registry), framed(first, FIRST, change("c", after={"id": 1, "name": "a"})))
    zero = dt.datetime(1970, 1, 1)
    assert changes(found) == [(10, "insert", 1, zero.replace(tzinfo=dt.UTC), zero + dt.timedelta.resolution, "1.5")]
