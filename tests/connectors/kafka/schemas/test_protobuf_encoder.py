"""Values of Protobuf that a sink writes; the messages of protobuf's own library are the judge."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.servers.kafka import KafkaBroker
from tests.servers.schema_registry import Registry, schema_registry

import headgate as hg
from headgate import testing
from headgate.connectors.kafka.schemas import protobuf
from headgate.connectors.kafka.schemas.protobuf import message_of
from headgate.connectors.kafka.schemas.schema_values import SchemaValues
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import UsageError
from headgate.operators.schemas import to_canonical

pytest.importorskip("ptars", reason="ptars is not installed (pip install -e '.[protobuf]')")

KINDS = (
    "INT32",
    "INT64",
    "UINT32",
    "UINT64",
    "SINT32",
    "SINT64",
    "FIXED32",
    "SFIXED64",
    "FLOAT",
    "DOUBLE",
    "BOOL",
    "STRING",
    "BYTES",
)


def generated() -> Any:
    """Return the class of a message with every kind of field, as protoc would generate it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2
    from google.protobuf import wrappers_pb2 as wrappers

    kinds = descriptor_pb2.FieldDescriptorProto
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="shop", syntax="proto3")
    color = base.enum_type.add(name="Color")
    for number, name in enumerate(("RED", "BLUE")):
        color.value.add(name=name, number=number)
    inner = descriptor_pb2.FileDescriptorProto(
        name="item.proto", package="shop", syntax="proto3", dependency=["base.proto"]
    )
    item = inner.message_type.add(name="Item")
    item.field.add(name="sku", number=1, type=kinds.TYPE_STRING, label=1)
    item.field.add(name="color", number=2, type=kinds.TYPE_ENUM, type_name=".shop.Color", label=1)
    item.oneof_decl.add(name="which")
    for name, number in (("a", 3), ("b", 4)):
        item.field.add(name=name, number=number, type=kinds.TYPE_INT64, label=1, oneof_index=0)
    well_known = (timestamp_pb2, duration_pb2, wrappers)
    needs = ["base.proto", "item.proto", *(one.DESCRIPTOR.name for one in well_known)]
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3", dependency=needs)
    file.message_type.add(name="Other")
    message = file.message_type.add(name="Order")
    for number, kind in enumerate(KINDS, 1):
        message.field.add(name=kind.lower(), number=number, type=getattr(kinds, f"TYPE_{kind}"), label=1)
    message.oneof_decl.add(name="_optional")
    optional = {"proto3_optional": True, "oneof_index": 0}
    message.field.add(name="optional", number=20, type=kinds.TYPE_INT32, label=1, **optional)
    for number, (name, of, label) in enumerate(
        (
            ("item", ".shop.Item", 1),
            ("items", ".shop.Item", 3),
            ("at", ".google.protobuf.Timestamp", 1),
            ("took", ".google.protobuf.Duration", 1),
            ("wrapped", ".google.protobuf.Int64Value", 1),
            ("prices", ".shop.Order.PricesEntry", 3),
            ("next", ".shop.Order", 1),
        ),
        21,
    ):
        message.field.add(name=name, number=number, type=kinds.TYPE_MESSAGE, type_name=of, label=label)
    message.field.add(name="tags", number=30, type=kinds.TYPE_STRING, label=3)
    message.field.add(name="colors", number=31, type=kinds.TYPE_ENUM, type_name=".shop.Color", label=3)
    entry = message.nested_type.add(name="PricesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, type_name=".shop.Item", label=1)
    pool = descriptor_pool.DescriptorPool()
    for one in well_known:
        pool.AddSerializedFile(one.DESCRIPTOR.serialized_pb)
    for one in (base, inner, file):
        pool.Add(one)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


Order: Any = generated()


def legacy() -> Any:
    """Return the class of a message of the former syntax, with a field that must be set."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="legacy.proto", package="shop", syntax="proto2")
    message = file.message_type.add(name="Legacy")
    message.field.add(name="id", number=1, type=kinds.TYPE_INT64, label=2)
    message.field.add(name="name", number=2, type=kinds.TYPE_STRING, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Legacy"))


def values(rows: list[dict[str, Any]], schema: dict[str, pa.DataType], message: Any = Order, **options: Any) -> Any:
    """Return what a sink makes of rows, as it travels to a worker."""
    made = SchemaValues("orders", "protobuf", message_of(message), options.get("registry"), SYSTEM_ENVIRONMENT)
    made = cloudpickle.loads(cloudpickle.dumps(made))
    batch = to_canonical(pa.RecordBatch.from_pylist(rows, schema=pa.schema(list(schema.items()))))
    return made(batch)


def read(rows: list[dict[str, Any]], schema: dict[str, pa.DataType], message: Any = Order) -> list[Any]:
    return [message.FromString(one) for one in values(rows, schema, message).to_pylist()]


ITEM = pa.struct([("sku", pa.string()), ("color", pa.string()), ("a", pa.int64()), ("b", pa.int64())])
PLAIN = {
    "int32": pa.int16(),
    "int64": pa.int64(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "sint32": pa.int32(),
    "sint64": pa.uint32(),
    "fixed32": pa.uint8(),
    "sfixed64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float32(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "optional": pa.int32(),
    "wrapped": pa.int64(),
}


def test_every_kind_of_field_is_written() -> None:
    top = {"int64": -(1 << 63), "uint64": (1 << 64) - 1, "sint64": 7, "uint32": (1 << 32) - 1, "sfixed64": -1}
    rest = {"float": 1.5, "double": -2.5, "bool": True, "string": "\u00e9", "bytes": b"\0\xff", "optional": 0}
    rows = [
        {**top, **rest, "int32": -3, "sint32": -4, "fixed32": 5, "wrapped": 0},
        {**dict.fromkeys(PLAIN, 0), "bool": False, "string": "", "bytes": b"", "optional": None, "wrapped": None},
    ]
    first, second = read(rows, PLAIN)
    for name, value in rows[0].items():
        found = getattr(first, name)
        assert (found.value if name == "wrapped" else found) == value, name
    assert first.HasField("optional")
    assert second == Order()


def test_messages_lists_maps_and_times_are_written() -> None:
    at = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    apple = {"sku": "apple", "color": "BLUE", "a": None, "b": 0}
    plain = {"sku": "", "color": "RED", "a": None, "b": None}
    rows = [
        {"item": apple, "items": [plain, apple], "at": at, "took": dt.timedelta(microseconds=-1), "tags": ["", "b"]},
        {"item": None, "items": [], "at": None, "took": None, "tags": [], "colors": [], "prices": []},
        {"item": plain, "items": [apple], "at": at, "took": dt.timedelta(1), "tags": ["c"]},
    ]
    for row in rows:
        row.setdefault("colors", ["BLUE", "RED"])
        row.setdefault("prices", [{"key": "x", "value": apple}, {"key": "", "value": plain}])
    prices = pa.list_(pa.struct([("key", pa.string()), ("value", ITEM)]))
    schema = {"item": ITEM, "items": pa.list_(ITEM), "at": pa.timestamp("us", "UTC"), "took": pa.duration("ns")}
    schema |= {"tags": pa.list_(pa.string()), "colors": pa.list_(pa.string()), "prices": prices}
    first, second, third = read(rows, schema)
    assert (first.item.sku, first.item.color, first.item.WhichOneof("which"), first.item.b) == ("apple", 1, "b", 0)
    assert [one.sku for one in first.items] == ["", "apple"]
    assert first.at.ToMicroseconds() == -1
    assert first.took.ToMicroseconds() == -1
    assert (list(first.tags), list(first.colors)) == (["", "b"], [1, 0])
    assert {key: one.sku for key, one in first.prices.items()} == {"x": "apple", "": ""}
    assert second == Order()
    assert third.HasField("item")
    assert third.item.WhichOneof("which") is None
    assert [one.sku for one in third.items] == ["apple"]


def test_all_times_of_protobuf_are_written_exactly() -> None:
    ends = [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)]
    found = read([{"at": at} for at in ends], {"at": pa.timestamp("us", "UTC")})
    assert [one.at.ToDatetime(dt.UTC) for one in found] == ends


def test_numbers_of_an_enum_without_a_name_are_written_as_the_source_gives_them() -> None:
    found = read([{"colors": ["7", "BLUE", "-1", "0"]}], {"colors": pa.list_(pa.string())})
    assert list(found[0].colors) == [7, 1, -1, 0]


def test_fields_without_a_column_are_not_set() -> None:
    assert read([{"int64": 7}], {"int64": pa.int64()}) == [Order(int64=7)]
    (found,) = read([{"item": {"b": 3}}], {"item": pa.struct([("b", pa.int64())])})
    assert (found.item.sku, found.item.b) == ("", 3)
    assert values([], {"int64": pa.int64()}).to_pylist() == []


def test_many_records_are_encoded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "CHUNK_BYTES", 100)
    rows = [{"string": f"s{n}" * n, "item": None if n % 3 else {"b": n}, "tags": ["t"] * (n % 4)} for n in range(200)]
    schema = {"string": pa.string(), "item": pa.struct([("b", pa.int64())]), "tags": pa.list_(pa.string())}
    for row, found in zip(rows, read(rows, schema), strict=True):
        assert (found.string, list(found.tags)) == (row["string"], row["tags"])
        assert found.HasField("item") == (row["item"] is not None)


@pytest.mark.parametrize(
    ("name", "dtype", "problem"),
    [
        ("nothing", pa.int64(), "message shop.Order has no field for column 'nothing'; drop it, or add the field"),
        ("int32", pa.int64(), "field 'int32' of type int32, and the column is of type int64; cast it"),
        ("uint64", pa.int8(), "field 'uint64' of type uint64, and the column is of type int8"),
        ("float", pa.float64(), "field 'float' of type float"),
        ("string", pa.binary(), "field 'string' of type large_string"),
        ("at", pa.timestamp("us"), "field 'at' of type timestamp"),
        ("tags", pa.string(), "field 'tags' of type large_list"),
        ("colors", pa.list_(pa.int32()), "field 'colors' of type large_string, and the column is of type int32"),
        ("tags", pa.list_(pa.int8()), "field 'tags' of type large_string"),
        ("prices", pa.list_(pa.string()), "field 'prices' of type map"),
        ("item", pa.struct([("no", pa.int8())]), "no field for column 'item.no'"),
        ("items", pa.list_(pa.struct([("sku", pa.int8())])), "field 'items.sku' of type large_string"),
    ],
)
def test_columns_that_do_not_fit_are_refused(name: str, dtype: pa.DataType, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        values([], {name: dtype})


APPLE: dict[str, Any] = {"sku": "apple", "color": "RED", "a": None, "b": None}
PRICES = pa.list_(pa.struct([("key", pa.string()), ("value", ITEM)]))


@pytest.mark.parametrize(
    ("name", "dtype", "value", "problem"),
    [
        (
            "int64",
            pa.int64(),
            None,
            r"column 'int64' has a null, and the field of message shop.Order has none; fill it",
        ),
        ("tags", pa.list_(pa.string()), None, "column 'tags' has a null"),
        ("tags", pa.list_(pa.string()), ["a", None], "column 'tags' has a null"),
        ("item", ITEM, {**APPLE, "sku": None}, "column 'item.sku' has a null"),
        ("items", pa.list_(ITEM), [None], "column 'items' has a null"),
        ("item", ITEM, {**APPLE, "color": "PINK"}, "column 'item.color' has 'PINK', which is none of RED, BLUE"),
        ("colors", pa.list_(pa.string()), ["RED", ""], "column 'colors' has '', which is none of RED, BLUE"),
        (
            "item",
            ITEM,
            {**APPLE, "a": 1, "b": 0},
            "values for several of the columns a, b, of which message shop.Order",
        ),
        ("prices", PRICES, [{"key": None, "value": APPLE}], "column 'prices.key' has a null"),
        ("prices", PRICES, [{"key": "a", "value": None}], "column 'prices.value' has a null"),
        ("prices", PRICES, [None], "column 'prices' has a map with an entry that is null"),
        (
            "prices",
            PRICES,
            2 * [{"key": "a", "value": APPLE}],
            "column 'prices' has a map with a key that is there twice",
        ),
        (
            "at",
            pa.timestamp("us", "UTC"),
            253_402_300_800_000_000,
            "column 'at' has a time outside of the years 1 to 9999, which Protobuf cannot hold",
        ),
        ("colors", pa.list_(pa.string()), ["2147483648"], "column 'colors' has '2147483648', which is none of RED"),
        ("colors", pa.list_(pa.string()), ["01"], "column 'colors' has '01', which is none of RED, BLUE"),
    ],
)
def test_values_that_would_be_changed_are_refused(name: str, dtype: pa.DataType, value: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        values([{name: value}], {name: dtype})


def test_fields_that_must_be_set_are() -> None:
    schema = {"id": pa.int64(), "name": pa.string()}
    assert read([{"id": 1, "name": None}], schema, legacy())[0].HasField("id")
    with pytest.raises(UsageError, match=r"message shop.Legacy requires field 'id', and records have no such column"):
        values([], {"name": pa.string()}, legacy())
    with pytest.raises(UsageError, match="column 'id' has a null"):
        values([{"id": None}], schema, legacy())


def test_what_is_no_message_is_refused_by_the_sink() -> None:
    for schema in (None, "syntax = 'proto3';", int):
        with pytest.raises(
            UsageError, match="format='protobuf' of KafkaSink needs schema=Message, a class that protoc"
        ):
            hg.KafkaSink("kafka:9092", "orders", format="protobuf", schema=schema)
    with pytest.raises(UsageError, match=r"KafkaSink\(format='protobuf'\) writes whole records: leave value= out"):
        hg.KafkaSink("kafka:9092", "orders", format="protobuf", schema=Order, value="a")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with schema_registry() as running:
        yield running


def test_a_registry_gets_the_files_of_the_message(registry: Registry) -> None:
    """Each by its name, and what it needs before; those that come with Protobuf are known everywhere."""
    where = hg.SchemaRegistry(registry.url)
    (value,) = values([{"int64": 7}], {"int64": pa.int64()}, registry=where).to_pylist()
    known = registry.schemas()
    assert [one["subject"] for one in known] == ["base.proto", "item.proto", "orders-value"]
    assert {one["schemaType"] for one in known} == {"PROTOBUF"}
    base, item = ({"name": name, "subject": name, "version": 1} for name in ("base.proto", "item.proto"))
    assert [one.get("references", []) for one in known] == [[], [base], [base, item]]
    assert base64.b64decode(known[-1]["schema"]) == Order.DESCRIPTOR.file.serialized_pb
    assert value[:7] == b"\0" + known[-1]["id"].to_bytes(4, "big") + b"\2\2"  # the second message of its file
    assert Order.FromString(value[7:]) == Order(int64=7)
    values([{"int64": 8}], {"int64": pa.int64()}, registry=where)
    assert registry.schemas() == known


@pytest.mark.xdist_group("kafka")
def test_what_a_pipeline_writes_as_protobuf_another_one_reads(
    kafka: KafkaBroker, topic: str, tmp_path: Path, registry: Registry
) -> None:
    rows = [
        {"int64": n, "string": f"s{n}", "wrapped": n if n % 2 else None, "tags": ["t"] * (n % 3)} for n in range(99)
    ]
    writing = hg.Pipeline("writing")
    sink = hg.KafkaSink(kafka.address, topic, format="protobuf", schema=Order, key="string", registry=registry.url)
    writing.source(hg.FromRows(rows)).sink(sink)
    testing.run(writing)
    reading = hg.Pipeline("reading")
    source = hg.Kafka(kafka.address, topic, format="protobuf", schema=Order, end="latest", registry=registry.url)
    reading.source(source).select(*rows[0]).sink(hg.FileSink(tmp_path / "out"))
    testing.run(reading)
    found = [json.loads(line) for file in (tmp_path / "out").glob("*.jsonl") for line in file.open()]
    assert sorted(found, key=lambda row: row["int64"]) == rows


def recursive() -> Any:
    """Return the class of a message within itself, with a message of Protobuf's that is so too."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

    kinds = descriptor_pb2.FieldDescriptorProto
    structs = descriptor_pb2.FileDescriptorProto()
    struct_pb2.DESCRIPTOR.CopyToProto(structs)
    file = descriptor_pb2.FileDescriptorProto(name="tree.proto", package="shop", dependency=[structs.name])
    tree = file.message_type.add(name="Tree")
    tree.field.add(name="v", number=1, type=kinds.TYPE_INT64, label=1)
    tree.field.add(name="left", number=2, type=kinds.TYPE_MESSAGE, type_name=".shop.Tree", label=1)
    tree.field.add(name="any", number=3, type=kinds.TYPE_MESSAGE, type_name=".google.protobuf.Struct", label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(structs)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Tree"))


def test_a_message_within_itself_is_refused_and_not_left_out() -> None:
    tree = recursive()
    assert [one.v for one in read([{"v": 1}], {"v": pa.int64()}, tree)] == [1]
    for name, dtype in (("left", pa.binary()), ("any", pa.struct([("fields", pa.list_(pa.int64()))]))):
        with pytest.raises(
            UsageError, match=f"field '{name}' of message shop.Tree is of a message that contains itself"
        ):
            read([{"v": 1, name: None}], {"v": pa.int64(), name: dtype}, tree)
