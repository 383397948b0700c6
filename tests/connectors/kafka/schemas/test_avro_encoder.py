"""Values of Avro that the sink writes; fastavro and our own decoder read them."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from tests.servers.schema_registry import schema_registry

from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.codec.avro import decode_values
from headgate.codec.avro_schema import parse_schema
from headgate.connectors.kafka.changes import envelope_schema
from headgate.connectors.kafka.schemas.avro import AvroEncoder, made_schema
from headgate.connectors.kafka.schemas.schema_registry import SchemaRegistry
from headgate.connectors.kafka.schemas.schema_values import SchemaValues
from headgate.connectors.kafka.sink import KafkaSink
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import UsageError

ENTRY = pa.struct([("key", pa.large_string()), ("value", pa.int64())])
COLUMNS = pa.schema(
    [
        ("i", pa.int32()),
        ("small", pa.uint8()),
        ("l", pa.int64()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("b", pa.bool_()),
        ("s", pa.large_string()),
        ("raw", pa.large_binary()),
        ("money", pa.decimal128(38, 4)),
        ("at", MOMENT),
        ("local", LOCAL_TIME),
        ("day", pa.date32()),
        ("time", pa.time64("ns")),
        ("nested", pa.struct([("x", pa.large_list(pa.struct([("at", MOMENT)]))), ("y", pa.large_string())])),
        ("map", pa.large_list(ENTRY)),
        ("nothing", pa.null()),
    ]
)
AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678_901, dt.UTC)
ROW: dict[str, Any] = {
    "i": -1,
    "small": 255,
    "l": 2**63 - 1,
    "f": 0.5,
    "d": 0.1,
    "b": True,
    "s": "é\n",
    "raw": b"\0\xff",
    "money": Decimal("-1234567890123456789012345678901234.5678"),
    "at": AT,
    "local": AT.replace(tzinfo=None),
    "day": dt.date(1969, 12, 31),
    "time": dt.time(23, 59, 59, 999_999),
    "nested": {"x": [{"at": AT}, None, {"at": None}], "y": None},
    "map": [{"key": "a", "value": 1}, {"key": "b", "value": None}],
    "nothing": None,
}
ROWS = [ROW, dict.fromkeys(ROW), {**ROW, "nested": {"x": [], "y": ""}, "map": []}, {**ROW, "nested": {"x": None}}]


def batch(rows: list[dict[str, Any]], columns: pa.Schema = COLUMNS) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=columns)


def read_back(text: str, values: pa.Array, skip: int) -> pa.Array:
    found = decode_values(values, skip, parse_schema(text, "a test"), parse_schema(text, "a test"))
    assert not found.problems
    return found.column


def record(**fields: Any) -> str:
    return json.dumps(
        {"type": "record", "name": "r", "fields": [{"name": name, "type": one} for name, one in fields.items()]}
    )


def test_both_readers_get_the_columns_back() -> None:
    text, head = made_schema(COLUMNS, "my-topic"), b"\0\0\0\0\x07"
    given = batch([dict.fromkeys(ROW), *ROWS]).slice(1)
    values = AvroEncoder(text, COLUMNS).encode(given, head)
    values.validate(full=True)
    own = read_back(text, values, len(head))
    assert own.to_pylist() == given.to_pylist()
    schema = fastavro.parse_schema(json.loads(text))
    assert schema["name"] == "my_topic"
    for value, row in zip(values.to_pylist(), given.to_pylist(), strict=True):
        assert value[: len(head)] == head
        assert fastavro.schemaless_reader(io.BytesIO(value[len(head) :]), schema, None) == row
    assert len(AvroEncoder(text, COLUMNS).encode(given.slice(0, 0), b"")) == 0


def test_a_schema_of_the_user_may_have_maps_enums_and_times_of_another_unit() -> None:
    columns = pa.schema([("m", pa.large_list(ENTRY)), ("e", pa.large_string()), ("at", MOMENT), ("t", pa.time64("ns"))])
    text = record(
        m={"type": "map", "values": ["null", "long"]},
        e={"type": "enum", "name": "e", "symbols": ["A", "B"]},
        at={"type": "long", "logicalType": "timestamp-millis"},
        t={"type": "int", "logicalType": "time-millis"},
    )
    row = {"m": ROW["map"], "e": "B", "at": AT.replace(microsecond=5_000), "t": dt.time(1, 2, 3, 4_000)}
    encoder = AvroEncoder(text, columns)
    values = encoder.encode(batch([row], columns), b"")
    assert read_back(text, values, 0).to_pylist() == [row]
    for wrong, problem in [
        ({"m": [{"key": "a", "value": 1}] * 2}, "column 'm' has a map with a key that is null or there twice"),
        ({"m": None}, "column 'm' has a null"),
        ({"e": "C"}, "does not allow a record"),
        ({"at": AT}, "column 'at' has a time that the schema of KafkaSink cannot hold"),
        ({"t": dt.time(0, 0, 0, 1)}, "column 't' has a time"),
    ]:
        with pytest.raises(UsageError, match=problem):
            encoder.encode(batch([row | wrong], columns), b"")


@pytest.mark.parametrize(
    ("name", "dtype", "problem"),
    [
        ("a", pa.duration("us"), "column 'a' has type duration.us., which Avro cannot hold"),
        ("a", pa.struct([("b", pa.uint64())]), "column 'a.b' has type uint64"),
        ("a b", pa.int64(), "column 'a b' has a name that Avro does not allow; rename it"),
    ],
)
def test_columns_that_avro_does_not_have_are_refused(name: str, dtype: pa.DataType, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        made_schema(pa.schema([(name, dtype)]), "t")


def test_a_text_that_is_no_uuid_is_refused_where_the_schema_wants_one() -> None:
    columns = pa.schema([("id", pa.large_string())])
    encoder = AvroEncoder(record(id=["null", {"type": "string", "logicalType": "uuid"}]), columns)
    good = [{"id": "123e4567-e89b-12d3-a456-426614174000"}, {"id": None}]
    assert len(encoder.encode(batch(good, columns), b"")) == 2
    assert len(encoder.encode(batch(good[1:], columns), b"")) == 1
    with pytest.raises(UsageError, match="column 'id' has a text that is no UUID"):
        encoder.encode(batch([*good, {"id": "123e4567"}], columns), b"")


def test_fields_that_no_column_can_have_get_their_defaults() -> None:
    fields = [
        {"name": "any", "type": ["int", "string"], "default": 7},
        {"name": "next", "type": ["null", "r"], "default": None},
        {"name": "a", "type": "long"},
    ]
    text = json.dumps({"type": "record", "name": "r", "fields": fields})
    columns = pa.schema([("a", pa.int64())])
    (value,) = AvroEncoder(text, columns).encode(batch([{"a": 3}], columns), b"").to_pylist()
    assert fastavro.schemaless_reader(io.BytesIO(value), json.loads(text)) == {"any": 7, "next": None, "a": 3}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"long"', "is of kind long, not a record"),
        ("{", "is not a schema of Avro"),
        (record(b="long"), "has no field for column 'a'; drop it, or add the field"),
        (record(a="long", b="long"), "has a field 'b' without a default"),
        (record(a="int"), "has the type int for column 'a', which is of type int64; cast it"),
        (
            record(a={"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
            r"has the type decimal128\(9, 2\) for column 'a', which is of type int64; cast it",
        ),
        (record(a=["null", "r"]), "for column 'a' type 'r' contains itself, which no column can"),
        (record(a=["long", {"type": "enum", "name": "e", "symbols": ["A"]}]), "a union of several types"),
    ],
)
def test_schemas_that_records_do_not_fit_are_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        AvroEncoder(text, pa.schema([("a", pa.int64())]))


def test_a_schema_is_registered_once_and_values_begin_with_its_id() -> None:
    columns = pa.schema([("a", pa.int64())])
    with schema_registry() as registry:
        registry.register("other", "{}")
        where = SchemaRegistry(registry.url)
        for _ in range(2):  # two subtasks
            values = SchemaValues("orders", "avro", None, where, SYSTEM_ENVIRONMENT)
            for _ in range(2):
                (value,) = values(batch([{"a": 3}], columns)).to_pylist()
                assert value == b"\0\0\0\0\x02" + b"\x02\x06"
        assert registry.asked == ["/subjects/orders-value/versions"] * 2
        registry.refusal = "incompatible"
        with pytest.raises(UsageError, match=r"/subjects/orders-value/versions refuses the schema: .*incompatible"):
            SchemaValues("orders", "avro", None, where, SYSTEM_ENVIRONMENT).begin(columns)
    without = SchemaValues("orders", "avro", None, None, SYSTEM_ENVIRONMENT)
    (value,) = without(batch([{"a": 3}], columns)).to_pylist()
    assert value == b"\x02\x06"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "xml"}, "must be one of 'json', 'debezium-json', 'avro', 'protobuf', 'debezium-avro'"),
        ({"schema": "{}"}, "is for formats of Avro and Protobuf only; that of JSON is made"),
        ({"registry": "http://r", "value": "v"}, "is for whole records: leave value= out, or the registry"),
        ({"format": "debezium-avro", "upsert": True}, "writes rows, and format='debezium-avro' envelopes"),
        ({"format": "avro", "value": "a"}, "leave value= out"),
        ({"format": "avro", "registry": SchemaRegistry("http://r"), "topic_column": "t"}, "leave topic_column= out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        KafkaSink("kafka:9092", "orders", **options)


def test_changes_are_written_as_envelopes_of_debezium() -> None:
    rows = pa.schema([("id", pa.int64()), ("tags", pa.large_list(pa.struct([("x", pa.large_string())])))])
    row = {"id": 1, "tags": [{"x": "a"}, None]}
    given = [{"before": None, "after": row, "op": "c"}, {"before": {**row, "tags": None}, "after": None, "op": "d"}]
    with schema_registry() as registry:
        where = SchemaRegistry(registry.url)
        values = SchemaValues("shop.orders", "debezium-avro", None, where, SYSTEM_ENVIRONMENT)
        written = values(batch(given, envelope_schema(rows))).to_pylist()
        (known,) = registry.schemas()
    assert known["subject"] == "shop.orders-value"
    schema = json.loads(known["schema"])
    assert (schema["namespace"], schema["name"]) == ("shop_orders", "Envelope")
    parsed = fastavro.parse_schema(schema)
    assert [fastavro.schemaless_reader(io.BytesIO(one[5:]), parsed, None) for one in written] == given
    assert {one[:5] for one in written} == {b"\0\0\0\0\x01"}


def test_types_of_debezium_are_written_as_their_schema_says() -> None:
    names = {
        "at": ("long", "io.debezium.time.MicroTimestamp"),
        "day": ("int", "io.debezium.time.Date"),
        "zoned": ("string", "io.debezium.time.ZonedTimestamp"),
        "span": ("long", "io.debezium.time.MicroDuration"),
        "time": ("long", "io.debezium.time.NanoTime"),
    }
    fields = [{"name": name, "type": {"type": kind, "connect.name": of}} for name, (kind, of) in names.items()]
    schema = json.dumps({"type": "record", "name": "r", "fields": fields})
    types = [LOCAL_TIME, pa.date32(), MOMENT, pa.duration("us"), pa.time64("ns")]
    columns = pa.schema(list(zip(names, types, strict=True)))
    row = {
        "at": AT.replace(tzinfo=None),
        "day": ROW["day"],
        "zoned": AT,
        "span": dt.timedelta(0, 1, 2),
        "time": ROW["time"],
    }
    (value,) = AvroEncoder(schema, columns).encode(batch([row], columns), b"").to_pylist()
    found = fastavro.schemaless_reader(io.BytesIO(value), fastavro.parse_schema(json.loads(schema)), None)
    assert (found["zoned"], found["span"], found["day"]) == ("2026-01-02T03:04:05.678901Z", 1_000_002, -1)
    read = decode_values(pa.array([value], pa.large_binary()), 0, *[parse_schema(schema, "here")] * 2)
    assert read.column.to_pylist() == [row]
