"""Values of Protobuf; the messages of protobuf's own library are the judge."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from headgate.codec.kafka.record_batch import RECORDS_WITH_HEADERS
from headgate.connectors.base import SourceBatch
from headgate.connectors.kafka.formats import RecordDecoder
from headgate.connectors.kafka.source import Kafka
from headgate.errors import UsageError

pytest.importorskip("ptars", reason="ptars is not installed (pip install -e '.[protobuf]')")

HEAD = b"\0\0\0\0\x07"


def generated() -> Any:
    """Return the class of a message as protoc would generate it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    inner = descriptor_pb2.FileDescriptorProto(name="item.proto", package="shop", syntax="proto3")
    inner.message_type.add(name="Item").field.add(name="sku", number=1, type=kinds.TYPE_STRING, label=1)
    file = descriptor_pb2.FileDescriptorProto(
        name="order.proto", package="shop", syntax="proto3", dependency=["item.proto"]
    )
    message = file.message_type.add(name="Order")
    message.field.add(name="id", number=1, type=kinds.TYPE_INT64, label=1)
    message.field.add(name="name", number=2, type=kinds.TYPE_STRING, label=1)
    message.field.add(name="tags", number=3, type=kinds.TYPE_STRING, label=3)
    message.field.add(name="item", number=4, type=kinds.TYPE_MESSAGE, type_name=".shop.Item", label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(inner)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


Order: Any = generated()


def second_generated() -> Any:
    """Return a class that is deep in its file: message 1 of message 2, after an entry of a map."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="deep.proto", package="shop", syntax="proto3")
    file.message_type.add(name="A")
    file.message_type.add(name="B")
    outer = file.message_type.add(name="C")
    entry = outer.nested_type.add(name="MEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_STRING, label=1)
    outer.field.add(name="m", number=1, type=kinds.TYPE_MESSAGE, type_name=".shop.C.MEntry", label=3)
    outer.nested_type.add(name="D")
    outer.nested_type.add(name="E").field.add(name="id", number=1, type=kinds.TYPE_INT64, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.C.E"))


def order(number: int) -> bytes:
    made = Order(id=number, name=f"n{number}", tags=["a"] * number)
    made.item.sku = "s"
    return bytes(made.SerializeToString())


def row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "tags": ["a"] * number, "item": {"sku": "s"}}


def decode(*values: bytes | tuple[bytes, bytes] | None, **options: Any) -> SourceBatch:
    """A pair is a value, and what its header says of its schema."""
    rows = []
    for n, one in enumerate(values):
        value, named = one if isinstance(one, tuple) else (one, None)
        headers = [] if named is None else [{"key": "__value_schema_id", "value": named}]
        rows.append({"value": value, "key": None, "offset": n, "timestamp": None, "headers": headers})
    source = Kafka("kafka:9092", "orders", format="protobuf", **{"schema": Order, **options})
    decoder = RecordDecoder(cloudpickle.loads(cloudpickle.dumps(source)).format())  # as it travels to a worker
    records = pa.RecordBatch.from_pylist(rows, schema=RECORDS_WITH_HEADERS)
    found = decoder.decode(("orders", 0), "orders/0", records, "kafka")
    found.batch.validate(full=True)
    return found


def problems(found: SourceBatch) -> list[str]:
    return [] if found.bad is None else [f"{one['position'][-1]}: {one['problem']}" for one in found.bad.to_pylist()]


def test_values_have_the_fields_of_the_message() -> None:
    found = decode(order(1), None, order(2), metadata="offset")
    assert found.batch.to_pylist() == [{**row(1), "offset": 0}, {**row(2), "offset": 2}]
    assert decode(order(0), None, tombstones="keep").batch.to_pylist()[1] == dict.fromkeys(row(0))


def test_damaged_values_leave_the_others_alone() -> None:
    found = decode(order(1), b"\xff", b"\x12\x02\xff\xfe", order(2), order(3)[:-1])
    assert found.batch.to_pylist() == [row(1), row(2)]
    assert [problem[:1] for problem in problems(found)] == ["1", "2", "4"]


def test_with_a_registry_values_begin_with_ids() -> None:
    values = [HEAD + b"\0" + order(1), HEAD + b"\2\0" + order(2), order(3), HEAD, b"", (order(4), HEAD)]
    found = decode(*values, registry="http://registry:8081")
    assert found.batch.to_pylist() == [row(1), row(2), row(4)]
    assert [problem[:1] for problem in problems(found)] == ["2", "3", "4"]


def test_another_message_of_the_schema_is_a_bad_record() -> None:
    guid = b"\1" + bytes(16)
    values: list[Any] = [HEAD + b"\2\2" + order(1), HEAD + b"\4\0\0" + order(2), HEAD + b"\2", HEAD + b"\0"]
    values += [(order(3), HEAD + b"\0"), (order(4), HEAD + b"\2\2"), (order(5), guid + b"\2\0"), (order(6), guid)]
    values += [(order(7), guid + b"\2")]
    found = decode(*values, registry="http://registry:8081")
    assert [one["id"] for one in found.batch.to_pylist()] == [0, 3, 5, 6]
    other = "it is not shop.Order, but another message of its schema"
    assert problems(found) == [f"{n}: {other}" for n in (0, 1, 2, 5, 8)]


def test_clients_count_inner_messages_in_two_ways() -> None:
    deep = second_generated()
    value = deep(id=7).SerializeToString()
    heads = [b"\4\4\4", b"\4\4\2", b"\4\4\0", b"\2\4", b"\0"]
    found = decode(*(HEAD + head + value for head in heads), registry="http://registry:8081", schema=deep)
    assert found.batch.to_pylist() == [{"id": 7}, {"id": 7}]
    assert [problem[:1] for problem in problems(found)] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [(None, "needs schema=Message, a generated class"), ({"a": int}, "a class that protoc generated, not {'a'")],
)
def test_what_is_no_message_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Kafka("kafka:9092", "orders", format="protobuf", schema=schema)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ptars", None)
    with pytest.raises(UsageError, match=r"needs the package ptars: pip install 'headgate-streams\[protobuf\]'"):
        Kafka("kafka:9092", "orders", format="protobuf", schema=Order)


def odd() -> Any:
    """Return classes: of an odd message, of one with a group, and of one with the first in it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    durations = descriptor_pb2.FileDescriptorProto()
    duration_pb2.DESCRIPTOR.CopyToProto(durations)
    file = descriptor_pb2.FileDescriptorProto(name="odd.proto", package="shop", dependency=[durations.name])
    message = file.message_type.add(name="Odd")
    message.oneof_decl.add(name="choice")
    entry = message.nested_type.add(name="MEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_INT64, label=1)
    message.field.add(name="a", number=1, type=kinds.TYPE_INT64, label=1, oneof_index=0)
    message.field.add(name="b", number=2, type=kinds.TYPE_STRING, label=1, oneof_index=0)
    message.field.add(name="m", number=3, type=kinds.TYPE_MESSAGE, type_name=".shop.Odd.MEntry", label=3)
    message.field.add(name="d", number=4, type=kinds.TYPE_MESSAGE, type_name=".google.protobuf.Duration", label=1)
    message.field.add(name="inner", number=5, type=kinds.TYPE_MESSAGE, type_name=".shop.Odd", label=1)
    grouped = file.message_type.add(name="Grouped")
    grouped.nested_type.add(name="G").field.add(name="x", number=1, type=kinds.TYPE_INT64, label=1)
    grouped.field.add(name="g", number=1, type=kinds.TYPE_GROUP, type_name=".shop.Grouped.G", label=1)
    outer = file.message_type.add(name="Outer")
    outer.field.add(name="odds", number=1, type=kinds.TYPE_MESSAGE, type_name=".shop.Odd", label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(durations)
    pool.Add(file)
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{n}")) for n in ("Odd", "Grouped", "Outer")
    ]


def test_what_would_become_another_value_is_a_bad_record() -> None:
    kind, _, around = odd()
    values = [
        kind(a=1, m={"k": 1, "l": 1}, d={"seconds": 9_223_372_036}),
        kind(a=1).SerializeToString() + kind(b="x").SerializeToString(),
        kind(m={"k": 1}).SerializeToString() * 2,
        kind(d={"seconds": 315_576_000_000}),
        kind(b="x", m={"": 0}, d={"seconds": -1, "nanos": -1}),
    ]
    values = [one if isinstance(one, bytes) else one.SerializeToString() for one in values]
    found = decode(*values, schema=kind)
    assert [(one["a"], one["b"], len(one["m"])) for one in found.batch.to_pylist()] == [(1, None, 2), (None, "x", 1)]
    assert problems(found) == [
        "1: it has several of the fields a, b, of which it may have one",
        "2: field 'm' has a key that is there twice",
        "3: field 'd' has a duration that no column can hold",
    ]
    nested = [b"\x0a" + bytes([len(one)]) + one for one in values]
    found = decode(*nested, nested[0] + nested[2] + nested[4], schema=around)
    assert found.batch.num_rows == 2
    assert problems(found)[-1] == "5: field 'odds.m' has a key that is there twice"


def timed() -> Any:
    """Return the class of a message with times and an enum."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="timed.proto", package="shop", syntax="proto3", dependency=[timestamp_pb2.DESCRIPTOR.name]
    )
    color = file.enum_type.add(name="Color")
    for number, name in enumerate(("RED", "BLUE")):
        color.value.add(name=name, number=number)
    message = file.message_type.add(name="Timed")
    message.field.add(name="at", number=1, type=kinds.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp", label=1)
    message.field.add(name="all", number=2, type=kinds.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp", label=3)
    message.field.add(name="colors", number=3, type=kinds.TYPE_ENUM, type_name=".shop.Color", label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Timed"))


def test_all_times_of_protobuf_are_read_exactly_or_refused() -> None:
    kind = timed()
    first, last = (-62_135_596_800, 0), (253_402_300_799, 999_999_000)
    near, odd, over = (1, 1_000), (0, 1_001), (1 << 62, 0)
    values = [
        kind(at={"seconds": at[0], "nanos": at[1]}, all=[{"seconds": s, "nanos": n} for s, n in rest])
        for at, *rest in [(near,), (first, last), (last, near, first), (odd,), (near, odd), (over,), (near, last, odd)]
    ]
    found = decode(*(one.SerializeToString() for one in values), schema=kind)
    numbers = found.batch.set_column(0, "at", found.batch.column("at").cast(pa.int64()))
    exact = {at: at[0] * 1_000_000 + at[1] // 1_000 for at in (first, last, near)}
    assert numbers.column("at").to_pylist() == [exact[near], exact[first], exact[last]]
    listed = found.batch.column("all").flatten().cast(pa.int64()).to_pylist()
    assert listed == [exact[last], exact[near], exact[first]]
    part = "has a time with a part of a microsecond, which no column can hold"
    assert problems(found) == [
        f"3: field 'at' {part}",
        f"4: field 'all' {part}",
        "5: field 'at' has a time that no column can hold",
        f"6: field 'all' {part}",
    ]


def test_parts_of_a_microsecond_are_cut_when_that_is_asked_for() -> None:
    """Down to the microsecond before, also before 1970."""
    kind = timed()
    times = [(1, 1_999), (-1, 999), (-62_135_596_800, 1_001), (253_402_300_799, 999_999_999), (1 << 62, 0)]
    values = [kind(at={"seconds": s, "nanos": n}, all=[{"seconds": s, "nanos": n}]) for s, n in times]
    found = decode(*(one.SerializeToString() for one in values), schema=kind, fine_times="cut")
    at = [s * 1_000_000 + n // 1_000 for s, n in times[:-1]]
    assert found.batch.column("at").cast(pa.int64()).to_pylist() == at
    assert found.batch.column("all").flatten().cast(pa.int64()).to_pylist() == at
    assert problems(found) == ["4: field 'at' has a time that no column can hold"]


def test_a_number_that_an_enum_does_not_have_is_a_text() -> None:
    kind = timed()
    found = decode(kind(colors=[0, 7, 1, -1]).SerializeToString(), schema=kind)
    assert found.batch.column("colors").to_pylist() == [["RED", "7", "BLUE", "-1"]]


def test_groups_that_the_message_does_not_have_are_passed_over() -> None:
    """Also within each other, empty, before and after the fields that it has."""
    begin, end, inner, inner_end = b"\xa3\x06", b"\xa4\x06", b"\xab\x06", b"\xac\x06"
    text, number = b"\x0a\x01x", b"\x11" + bytes(8)
    values = [
        begin + text + inner + number + inner_end + end + order(1),
        order(2) + begin + end + begin + text + end,
        order(3) + begin + text,
        order(4) + end,
    ]
    found = decode(*values)
    assert found.batch.to_pylist() == [row(1), row(2)]
    assert [problem[:1] for problem in problems(found)] == ["2", "3"]


def test_a_group_of_the_message_is_refused() -> None:
    wanted = (
        r"message shop.Grouped has a group, field 'g', which a Kafka source does not know; give it a message without"
    )
    with pytest.raises(UsageError, match=wanted):
        decode(schema=odd()[1])
