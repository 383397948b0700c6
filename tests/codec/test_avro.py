"""Values of Avro as columns; fastavro is the judge."""

from __future__ import annotations

import io
import json
import random
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import few

from headgate.codec.avro import LEVELS_MAX, DecodedValues, UnreadableSchemaError, decode_values
from headgate.codec.avro_schema import parse_schema
from headgate.errors import UsageError

NESTED = {
    "type": "record",
    "name": "inner",
    "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": ["null", "string"], "default": None}],
}
TYPES: list[tuple[Any, Any]] = [
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", st.integers(-(2**63), 2**63 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=200)),
    ("string", st.text(max_size=100)),
    (["null", "long"], st.one_of(st.none(), st.integers(-5, 2**40))),
    (["string", "null"], st.one_of(st.none(), st.text(max_size=5))),
    ("null", st.none()),
    ({"type": "enum", "name": "e", "symbols": ["A", "B", "C"]}, st.sampled_from("ABC")),
    ({"type": "fixed", "name": "f", "size": 5}, st.binary(min_size=5, max_size=5)),
    ({"type": "array", "items": "long"}, st.lists(st.integers(0, 300), max_size=5)),
    ({"type": "array", "items": ["null", NESTED]}, st.lists(st.sampled_from([None, {"x": 1, "y": "a"}]), max_size=3)),
    (
        {"type": "array", "items": {"type": "array", "items": "string"}},
        st.lists(st.lists(st.text(), max_size=3), max_size=3),
    ),
    ({"type": "map", "values": "int"}, st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3)),
    (NESTED, st.fixed_dictionaries({"x": st.integers(0, 9), "y": st.one_of(st.none(), st.text(max_size=3))})),
    (["null", NESTED], st.one_of(st.none(), st.just({"x": 1, "y": None}))),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "timestamp-millis"}, st.just(datetime(2026, 1, 1, microsecond=5000, tzinfo=UTC))),
    (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(timezones=st.just(UTC), min_value=datetime(1970, 1, 1)),
    ),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes(min_value=datetime(1970, 1, 1))),
    ({"type": "int", "logicalType": "time-millis"}, st.just(time(23, 59, 59, 999000))),
    ({"type": "long", "logicalType": "time-micros"}, st.times()),
    ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, st.decimals(-9999, 9999, places=2)),
    (
        {"type": "fixed", "name": "d", "size": 8, "logicalType": "decimal", "precision": 9, "scale": 2},
        st.decimals(-9999, 9999, places=2),
    ),
]


def record(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "r", "namespace": "a.b", "fields": list(fields)}


def encoded(schema: Any, values: list[Any]) -> list[bytes]:
    parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
    found = []
    for value in values:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, value)
        found.append(out.getvalue())
    return found


def judged(data: bytes, writer: Any, reader: Any) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(data), json.loads(json.dumps(writer)), json.loads(json.dumps(reader)))


def decode(data: list[bytes], writer: Any, reader: Any = None, head: bytes = b"") -> DecodedValues:
    values = pa.array([b"not this one", *(head + one for one in data)], pa.large_binary()).slice(1)
    one = parse_schema(json.dumps(writer), "it", is_partial=reader is not None)
    other = parse_schema(json.dumps(writer if reader is None else reader), "it")
    found = decode_values(values, len(head), one, other)
    found.column.validate(full=True)
    assert found.column.type.equals(other.column)
    return found


def plain(value: Any) -> Any:
    """Return a value as Arrow's ``to_pylist`` has it: maps are lists of entries."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@given(st.data())
def test_values_are_those_that_fastavro_reads(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(range(len(TYPES))), max_size=4, unique=True))
    kinds = [
        k
        for k in kinds
        if not (TYPES[k][0] is NESTED and any(TYPES[o][0] is not NESTED and "inner" in str(TYPES[o]) for o in kinds))
    ]
    schema = record(*({"name": f"c{n}", "type": TYPES[k][0]} for n, k in enumerate(kinds)))
    if str(schema).count("'inner'") > 1:
        return
    strategy = st.fixed_dictionaries({f"c{n}": TYPES[k][1] for n, k in enumerate(kinds)})
    rows = data.draw(st.lists(strategy, max_size=6))
    found = decode(encoded(schema, rows), schema, head=data.draw(st.sampled_from([b"", b"\0\0\0\0\1"])))
    assert found.problems == {}
    got = found.column.to_pylist()
    for row, other in zip(rows, got, strict=True):
        for name, value in row.items():
            expected = (
                [{"key": k, "value": v} for k, v in value.items()]
                if "map" in str(schema["fields"][int(name[1:])]["type"])
                else plain(value)
            )
            assert other[name] == expected


OLD = record(
    {"name": "id", "type": "int"},
    {"name": "gone", "type": {"type": "array", "items": "string"}},
    {"name": "name", "type": "string"},
)
NEW = record(
    {"name": "label", "type": ["null", "string"], "aliases": ["name"], "default": None},
    {"name": "id", "type": "long"},
    {"name": "added", "type": {"type": "array", "items": "int"}, "default": [1, 2]},
    {"name": "more", "type": {"type": "map", "values": "string"}, "default": {"a": "b"}},
    {"name": "deep", "type": NESTED, "default": {"x": 5, "y": None}},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}, "default": 1},
    {
        "name": "price",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 1},
        "default": "\u0001",
    },
    {"name": "kind", "type": {"type": "enum", "name": "k", "symbols": ["X", "Y"]}, "default": "Y"},
)


def test_a_reader_has_its_own_fields_with_defaults() -> None:
    data = encoded(OLD, [{"id": 1, "gone": ["a"], "name": "x"}, {"id": 2, "gone": [], "name": "y"}])
    found = decode(data, OLD, NEW)
    assert found.problems == {}
    rest = {
        "added": [1, 2],
        "more": [{"key": "a", "value": "b"}],
        "deep": {"x": 5, "y": None},
        "day": date(1970, 1, 2),
        "price": Decimal("0.1"),
        "kind": "Y",
    }
    assert found.column.to_pylist() == [{"label": "x", "id": 1, **rest}, {"label": "y", "id": 2, **rest}]
    expected = judged(data[0], OLD, NEW)
    assert (expected["added"], expected["deep"], expected["kind"]) == ([1, 2], rest["deep"], "Y")


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("int", "long"),
        ("int", "double"),
        ("long", "float"),
        ("float", "double"),
        ("int", ["null", "long"]),
        (["null", "int"], ["null", "long"]),
        (["int", "null"], "long"),
        ("string", "bytes"),
        ("string", ["bytes", "null"]),
        ({"type": "array", "items": "int"}, {"type": "array", "items": ["null", "double"]}),
    ],
)
def test_types_are_promoted(writer: Any, reader: Any) -> None:
    value = {"a": "text" if writer == "string" else [7] if isinstance(writer, dict) else 7}
    one, other = record({"name": "a", "type": writer}), record({"name": "a", "type": reader})
    (data,) = encoded(one, [value])
    found = decode([data], one, other)
    assert found.column.to_pylist() == [judged(data, one, other)]


@pytest.mark.parametrize(
    ("writer", "reader", "problem"),
    [
        ("long", "int", "long cannot be read as int"),
        ("string", "int", "string cannot be read as int"),
        ({"type": "array", "items": "string"}, {"type": "array", "items": "int"}, "string cannot be read as int"),
        ("string", ["null", "int"], "string cannot be read as a union of null, int"),
    ],
)
def test_types_that_do_not_go_together_are_refused(writer: Any, reader: Any, problem: str) -> None:
    with pytest.raises(UnreadableSchemaError, match=problem):
        decode([b"\x02\x02"], record({"name": "a", "type": writer}), record({"name": "a", "type": reader}))


def test_a_field_without_a_default_must_be_there() -> None:
    with pytest.raises(UnreadableSchemaError, match="it has no field 'b', which has no default"):
        decode([b"\x02"], record({"name": "a", "type": "int"}), record({"name": "b", "type": "int"}))


def test_a_null_or_a_symbol_that_the_reader_does_not_have_is_a_problem_of_its_value() -> None:
    one, other = record({"name": "a", "type": ["null", "int"]}), record({"name": "a", "type": "int"})
    found = decode(encoded(one, [{"a": 1}, {"a": None}, {"a": 3}]), one, other)
    assert found.problems == {1: "null for int, which cannot be null"}
    assert [found.column[n]["a"].as_py() for n in (0, 2)] == [1, 3]
    one, other = (
        record({"name": "a", "type": {"type": "enum", "name": "e", "symbols": s}}) for s in (["A", "B"], ["B"])
    )
    found = decode(encoded(one, [{"a": "A"}, {"a": "B"}]), one, other)
    assert found.problems == {0: "a symbol that the reader's enum 'e' does not have"}


SCHEMA = record(
    {"name": "s", "type": "string"},
    {"name": "n", "type": ["null", "long"]},
    {"name": "l", "type": {"type": "array", "items": NESTED}},
    {"name": "b", "type": "boolean"},
    {"name": "d", "type": "double"},
    {"name": "m", "type": {"type": "map", "values": "bytes"}},
)
ROW = {"s": "some", "n": 5, "l": [{"x": 1, "y": "z"}], "b": True, "d": 1.5, "m": {"k": b"v"}}


@pytest.mark.parametrize("seed", few(range(20), 5))
def test_damaged_values_leave_the_others_alone(seed: int) -> None:
    rnd = random.Random(seed)
    data, expected = [], []
    for number in range(60):
        (good,) = encoded(SCHEMA, [{**ROW, "n": number}])
        match rnd.randrange(4):
            case 0:
                raw = bytearray(good)
                raw[rnd.randrange(len(raw))] ^= 1 << rnd.randrange(8)
                good = bytes(raw)
            case 1:
                good = good[: rnd.randrange(len(good))] if rnd.randrange(2) else good + b"\0"
            case 2:
                good = rnd.randbytes(rnd.randrange(30))
        data.append(good)
        try:
            stream = io.BytesIO(good)
            value = fastavro.schemaless_reader(stream, json.loads(json.dumps(SCHEMA)), None)
            expected.append(value if stream.tell() == len(good) else None)
        except Exception:  # fastavro raises anything
            expected.append(None)
    found = decode(data, SCHEMA)
    for row, (value, judge) in enumerate(zip(found.column.to_pylist(), expected, strict=True)):
        if row in found.problems:
            assert judge is None or judge["b"] not in (True, False) or data[row] not in encoded(SCHEMA, [judge])
        else:
            assert judge is not None
            assert value["s"] == judge["s"]
            assert value["n"] == judge["n"]
            assert value["l"] == judge["l"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("{", "it is not a schema of Avro"),
        (
            '{"type":"record","name":"r","fields":[{"name":"a","type":"r"}]}',
            "type 'r' contains itself, which no column can",
        ),
        ('["int","string"]', "a union of several types \\(int32, large_string\\), which no column can hold"),
        (
            '["null", {"type":"record","name":"A","fields":[]}, {"type":"record","name":"B","fields":[]}]',
            "a union of several records \\(A, B\\), which no column can tell apart",
        ),
        ('{"type":"x"}', "type 'x' is not defined"),
        ('{"type":"record","fields":[]}', "a type 'record' has no name"),
        ('{"type":"record","name":"r"}', "type 'r' lacks or misuses 'fields'"),
        ('{"type":"bytes","logicalType":"decimal","precision":50}', "a decimal of 50 digits; columns have 38 at most"),
    ],
)
def test_a_schema_that_no_columns_can_have_is_refused(schema: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_schema(schema, "it")


NODE = {
    "type": "record",
    "name": "node",
    "fields": [
        {"name": "label", "type": ["null", "string", "long"]},
        {"name": "next", "type": ["null", "node"]},
        {"name": "below", "type": {"type": "array", "items": "node"}},
    ],
}
ODD = record(
    {"name": "id", "type": "int"},
    {"name": "any", "type": ["int", "string", {"type": "map", "values": ["null", "double", "string"]}]},
    {"name": "tree", "type": NODE},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2}},
    {"name": "name", "type": "string"},
)
SOUND = record({"name": "name", "type": "string"}, {"name": "id", "type": "int"})
LEAF = {"label": None, "next": None, "below": []}
ODD_ROW = {"id": 1, "any": 1, "tree": LEAF, "price": Decimal(1), "name": "n"}


def node(random_: random.Random, level: int) -> dict[str, Any]:
    label = random_.choice([None, "a" * level, 1 << level])
    after = node(random_, level + 1) if random_.random() < 0.6 and level < 9 else None
    return {"label": label, "next": after, "below": [LEAF] * random_.choice([0, 0, 1, 3])}


def test_types_that_no_column_can_have_are_passed_over_where_they_are_not_read() -> None:
    draw = random.Random(5)
    rows = [
        {
            "id": n,
            "any": draw.choice([n, "text" * (n % 5), {"a": None, "b": 1.5, "c": "d"}, {}]),
            "tree": node(draw, 0),
            "price": Decimal(n),
            "name": f"n{n}",
        }
        for n in range(50)
    ]
    data = encoded(ODD, rows)
    found = decode(data, ODD, SOUND)
    assert found.problems == {}
    assert found.column.to_pylist() == [judged(one, ODD, SOUND) for one in data]
    found = decode([data[0], data[1][:-3], data[2] + b"x"], ODD, SOUND)
    assert sorted(found.problems) == [1, 2]


def test_a_branch_of_a_union_is_read_if_it_is_of_the_type_of_the_reader() -> None:
    reader = record({"name": "any", "type": "string"})
    found = decode(encoded(ODD, [{**ODD_ROW, "any": "text"}, {**ODD_ROW, "any": 1}]), ODD, reader)
    assert found.column.to_pylist()[0] == {"any": "text"}
    assert found.problems == {1: "int cannot be read as string"}


@pytest.mark.parametrize("is_nullable", [False, True])
def test_of_a_union_of_records_the_one_with_the_name_of_the_reader_is_read(is_nullable: bool) -> None:
    def event(name: str) -> dict[str, Any]:
        return {"type": "record", "name": name, "fields": [{"name": "id", "type": "long"}]}

    writer = ["null", event("Created"), event("Deleted")]
    values = [("Created", {"id": 1}), ("Deleted", {"id": 2}), ("Created", {"id": 3})]
    found = decode(encoded(writer, values), writer, ["null", event("Created")] if is_nullable else event("Created"))
    assert [found.column.to_pylist()[at] for at in (0, 2)] == [{"id": 1}, {"id": 3}]
    wanted = "a union of null, Created" if is_nullable else "record 'Created'"
    assert found.problems == {1: f"record 'Deleted' cannot be read as {wanted}"}


def test_a_type_that_is_within_itself_without_end_is_a_problem_of_its_value() -> None:
    deep: dict[str, Any] = LEAF
    for _ in range(LEVELS_MAX + 1):
        deep = {**LEAF, "next": deep}
    found = decode(encoded(ODD, [ODD_ROW, {**ODD_ROW, "tree": deep}, {**ODD_ROW, "tree": deep["next"]}]), ODD, SOUND)
    assert found.problems == {1: f"type 'a.b.node' is more than {LEVELS_MAX} times within itself"}
    assert found.column.to_pylist()[2] == {"name": "n", "id": 1}


def test_a_default_that_is_no_value_of_its_type_is_refused_when_it_is_needed() -> None:
    reader = record({"name": "id", "type": "int"}, {"name": "more", "type": "long", "default": "x"})
    writer = record({"name": "id", "type": "int"})
    with pytest.raises(UnreadableSchemaError, match="the default 'x' of field 'more' is no long"):
        decode(encoded(writer, [{"id": 1}]), writer, reader)


def test_named_types_are_known_after_they_are_defined() -> None:
    schema = record({"name": "a", "type": NESTED}, {"name": "b", "type": "inner"}, {"name": "c", "type": "a.b.inner"})
    row = {"a": {"x": 1, "y": None}, "b": {"x": 2, "y": "q"}, "c": {"x": 3, "y": None}}
    assert decode(encoded(schema, [row]), schema).column.to_pylist() == [row]


def logical(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meaning, **more}


def of_x(kind: Any, name: str = "x", **more: Any) -> dict[str, Any]:
    return record({"name": name, "type": kind, **more})


MILLIS, MICROS = logical("long", "timestamp-millis"), logical("long", "timestamp-micros")
LOCAL_MILLIS, LOCAL_MICROS = logical("long", "local-timestamp-millis"), logical("long", "local-timestamp-micros")


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize(
    ("writer", "reader"), [(MICROS, LOCAL_MILLIS), (LOCAL_MILLIS, MICROS), (MILLIS, LOCAL_MICROS), (MILLIS, MICROS)]
)
def test_times_are_in_the_unit_that_they_were_written_in(writer: Any, reader: Any, nullable: bool) -> None:
    at = datetime(2024, 1, 2, 3, 4, 5, 678_000)
    data = encoded(
        of_x("long"),
        [{"x": int(at.replace(tzinfo=UTC).timestamp() * (1_000_000 if "micros" in str(writer) else 1_000))}],
    )
    if nullable:
        data, writer, reader = [b"\2" + data[0]], ["null", writer], ["null", reader]
    found = decode(data, of_x(writer), of_x(reader)).column.to_pylist()[0]["x"]
    assert found.replace(tzinfo=None) == at


@pytest.mark.parametrize(
    ("writer", "reader", "problem"),
    [
        (logical("int", "date"), MILLIS, r"date32\[day\] cannot be read as timestamp"),
        (MICROS, logical("long", "time-micros"), "timestamp.* cannot be read as time64"),
        (
            logical("bytes", "decimal", precision=5, scale=2),
            logical("bytes", "decimal", precision=7, scale=4),
            r"decimal128\(5, 2\) cannot be read as decimal128\(7, 4\)",
        ),
        (
            logical("fixed", "decimal", precision=5, scale=2, name="f", size=4),
            logical("fixed", "decimal", precision=5, scale=1, name="f", size=4),
            r"decimal128\(5, 2\) cannot be read as decimal128\(5, 1\)",
        ),
        (logical("bytes", "decimal", precision=5, scale=2), "string", "cannot be read as large_string"),
    ],
)
def test_a_number_is_not_read_with_another_meaning(writer: Any, reader: Any, problem: str) -> None:
    with pytest.raises(UnreadableSchemaError, match=problem):
        decode([b"\0"], of_x(writer), of_x(reader))


def test_decimals_may_have_more_digits_and_bytes_than_they_need() -> None:
    narrow, wide = (logical("bytes", "decimal", precision=digits, scale=2) for digits in (5, 38))
    value = {"x": Decimal("-1.23")}
    assert decode(encoded(of_x(narrow), [value]), of_x(narrow), of_x(wide)).column.to_pylist() == [value]
    long = logical("fixed", "decimal", precision=38, scale=2, name="f", size=20)
    found = decode(encoded(of_x(long), [value]), of_x(long))
    assert (found.column.to_pylist(), found.problems) == ([value], {})
    found = decode(
        encoded(of_x(narrow), [value, {"x": Decimal("999.99")}]), of_x(narrow), of_x({**narrow, "precision": 4})
    )
    assert list(found.problems) == [1]


def test_a_time_that_overflows_is_a_problem_of_its_value() -> None:
    data = encoded(of_x("long"), [{"x": -(2**63)}, {"x": 2**62}, {"x": -1}])
    assert list(decode(data, of_x("long"), of_x(MILLIS)).problems) == [0, 1]


def test_a_name_comes_before_an_alias() -> None:
    both = record({"name": "b", "type": "int", "aliases": ["a"]}, {"name": "a", "type": "int", "default": 0})
    assert decode(encoded(both, [{"a": 1, "b": 2}]), both).column.to_pylist() == [{"b": 2, "a": 1}]
    older = record({"name": "a", "type": "int"})
    only = record({"name": "b", "type": "int", "aliases": ["a"]})
    assert decode(encoded(older, [{"a": 1}]), older, only).column.to_pylist() == [{"b": 1}]
