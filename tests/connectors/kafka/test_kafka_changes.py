"""Changes in Kafka: upserts with tombstones, and Debezium's envelopes, to topics and from them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import applied
from tests.servers.kafka import KafkaBroker
from tests.servers.schema_registry import schema_registry

import headgate as hg
from headgate import testing
from headgate.codec.kafka.record_batch import RECORDS_WITH_HEADERS
from headgate.connectors.base import SourceBatch
from headgate.connectors.kafka.formats import RecordDecoder
from headgate.connectors.kafka.outgoing_records import RecordColumns, Router
from headgate.connectors.kafka.schemas.schema_registry import SchemaRegistry
from headgate.connectors.kafka.schemas.schema_values import SchemaValues
from headgate.connectors.kafka.source import Kafka
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import UsageError

FIELDS = {"id": int, "name": str}
Rows = list[dict[str, Any]]
CHANGES = [
    {"id": 1, "name": "a", "op": "insert"},
    {"id": 2, "name": "b", "op": "insert"},
    {"id": 1, "name": "a", "op": "update_before"},
    {"id": 1, "name": "c", "op": "update_after"},
    {"id": 2, "name": "b", "op": "delete"},
]


def sent(rows: Rows, **options: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of what a sink writes to a topic of one partition, decoded."""
    batch = pa.RecordBatch.from_pylist(rows)
    columns = RecordColumns(**options)
    columns.check(batch.schema)
    found = []
    for one in Router(columns, "t", lambda topic: 1, 0).outgoing(batch, 0):
        assert one.keys is not None
        values = [None if value is None else json.loads(value) for value in one.values.to_pylist()]
        found += list(zip(one.keys.to_pylist(), values, strict=True))
    return found


def test_upserts_are_rows_by_key_and_tombstones() -> None:
    assert sent(CHANGES, change_keys=("id",)) == [
        (b'{"id":1}', {"id": 1, "name": "a"}),
        (b'{"id":2}', {"id": 2, "name": "b"}),
        (b'{"id":1}', {"id": 1, "name": "c"}),
        (b'{"id":2}', None),
    ]
    assert sent(CHANGES[2:3], change_keys=("id",)) == []


def test_a_key_of_one_text_is_itself() -> None:
    assert [key for key, _ in sent(CHANGES[:2], change_keys=("name",))] == [b"a", b"b"]
    both = [key for key, _ in sent(CHANGES[:1], change_keys=("name", "id"))]
    assert both == [b'{"name":"a","id":1}']


def test_envelopes_have_the_row_before_or_after() -> None:
    values = [value for _, value in sent(CHANGES, change_keys=("id",), debezium=True, retractions=True)]
    assert [(v["op"], v["before"], v["after"]) for v in values] == [
        ("c", None, {"id": 1, "name": "a"}),
        ("c", None, {"id": 2, "name": "b"}),
        ("d", {"id": 1, "name": "a"}, None),
        ("c", None, {"id": 1, "name": "c"}),
        ("d", {"id": 2, "name": "b"}, None),
    ]
    upserts = [row for row in CHANGES if row["op"] != "update_before"]
    ops = [value["op"] for _, value in sent(upserts, change_keys=("id",), debezium=True)]
    assert ops == ["c", "c", "u", "d"]


def decoded(records: list[tuple[bytes | None, bytes | None]], **options: Any) -> SourceBatch:
    rows = [{"key": key, "value": value, "offset": 10 + n, "headers": []} for n, (key, value) in enumerate(records)]
    decoder = RecordDecoder(Kafka("kafka:9092", "t", **options).format())
    batch = pa.RecordBatch.from_pylist(rows, schema=RECORDS_WITH_HEADERS)
    found = decoder.decode(("t", 0), "t/0", batch, "kafka")
    assert found.batch.schema.equals(decoder.schema)
    found.batch.validate(full=True)
    return found


def problems(found: SourceBatch) -> list[tuple[str, str]]:
    return [] if found.bad is None else [(one["position"][-2:], one["problem"]) for one in found.bad.to_pylist()]


def test_envelopes_become_changes() -> None:
    envelopes: list[Any] = [
        {"before": None, "after": {"id": 1, "name": "a"}, "op": "r", "source": {"x": 1}, "ts_ms": 3},
        {"before": {"id": 1, "name": "a"}, "after": {"id": 1, "name": "b"}, "op": "u"},
        {"payload": {"before": None, "after": {"id": 2, "name": "z"}, "op": "c"}, "schema": {}},
        {"before": {"id": 1, "name": "b"}, "after": None, "op": "d"},
        {"before": None, "after": {"id": 2, "name": None}, "op": "u"},
        {"before": None, "after": None, "op": "c"},
        {"before": None, "after": {"id": 2, "name": "y"}, "op": "t"},
    ]
    values = [(b"k", json.dumps(one).encode()) for one in envelopes]
    found = decoded(
        [*values, (b"k", None), (b"k", b"{"), (b"k", b"")], format="debezium-json", schema=FIELDS, metadata=["offset"]
    )
    assert [(r["offset"], r["op"], r["id"], r["name"]) for r in found.batch.to_pylist()] == [
        (10, "insert", 1, "a"),
        (11, "update_before", 1, "a"),
        (11, "update_after", 1, "b"),
        (12, "insert", 2, "z"),
        (13, "delete", 1, "b"),
        (14, "update_after", 2, None),
    ]
    assert sorted(position for position, _ in problems(found)) == ["15", "16", "18", "19"]


def test_a_topic_of_upserts_becomes_changes() -> None:
    records = [
        (b'{"id": 1}', b'{"id": 1, "name": "a"}'),
        (b'{"id": 1}', None),
        (b"x", None),
        (None, None),
        (b'{"id": 3}', b'{"id": 3, "name": "c"}'),
    ]
    found = decoded(records, format="json", schema=FIELDS, upsert="id", metadata=["offset"])
    assert [(r["offset"], r["op"], r["id"], r["name"]) for r in found.batch.to_pylist()] == [
        (10, "update_after", 1, "a"),
        (11, "delete", 1, None),
        (14, "update_after", 3, "c"),
    ]
    assert [position for position, _ in problems(found)] in (["12", "13"], ["13", "12"])
    by_name = decoded([(b"a", None)], format="json", schema=FIELDS, upsert=["name"])
    assert by_name.batch.to_pylist() == [{"id": None, "name": "a", "op": "delete"}]


def avro(schema: Any, value: Any, number: int) -> bytes:
    """Return a value of Avro after the id of its schema."""
    out = io.BytesIO(b"\0" + number.to_bytes(4, "big"))
    out.seek(5)
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def record(**types: Any) -> dict[str, Any]:
    return {"type": "record", "name": "r", "fields": [{"name": name, "type": of} for name, of in types.items()]}


def test_keys_of_avro_say_what_is_deleted() -> None:
    row, key = record(id="long", name=["null", "string"], n="int"), record(name="string", id="int")
    with schema_registry() as registry:
        of_rows, of_keys, alone = (registry.register("x", one) for one in (row, key, "string"))
        deleted = avro(key, {"id": 1, "name": "a"}, of_keys)
        records = [
            (b"any", avro(row, {"id": 1, "name": "a", "n": 7}, of_rows)),
            (deleted, None),
            (deleted[:-1], None),
            (avro(key, {"id": 2, "name": "b"}, 99), None),
            (b"{}", None),
            (avro("string", "c", alone), None),
            (None, None),
        ]
        options = {"format": "avro", "registry": registry.url, "schema": json.dumps(row), "metadata": ["offset"]}
        found = decoded(records, upsert=["id", "name"], key_format="avro", **options)
        assert found.batch.to_pylist() == [
            {"id": 1, "name": "a", "n": 7, "op": "update_after", "offset": 10},
            {"id": 1, "name": "a", "n": None, "op": "delete", "offset": 11},
        ]
        said = dict(problems(found))
        assert said.keys() == {"12", "13", "14", "15", "16"}
        assert said["13"] == "its key: its schema, id 99, is not in the registry"
        assert said["14"] == "its key: it does not begin with the id of a schema, a zero byte and four more"
        only = decoded(records[5:6], upsert="name", key_format="avro", **options)
        assert [(one["op"], one["name"]) for one in only.batch.to_pylist()] == [("delete", "c")]
        nothing = registry.register("x", record(name=["null", "string"]))
        null = decoded(
            [(avro(record(name=["null", "string"]), {"name": None}, nothing), None)],
            upsert="name",
            key_format="avro",
            **options,
        )
        assert problems(null) == [("10", "field 'name' is missing or null")]


def test_a_key_of_avro_that_lacks_a_field_is_a_bad_record_whatever_the_default_of_the_field_is() -> None:
    row = record(id="long")
    row["fields"][0]["default"] = 0
    with schema_registry() as registry:
        number = registry.register("x", record(other="long"))
        key = avro(record(other="long"), {"other": 7}, number)
        options = {"format": "avro", "registry": registry.url, "schema": json.dumps(row), "metadata": ["offset"]}
        found = decoded([(key, None)], upsert="id", key_format="avro", **options)
    assert found.batch.num_rows == 0
    ((position, problem),) = problems(found)
    assert position == "10"
    assert "has no field 'id'" in problem


def test_a_text_key_with_the_id_of_a_schema_is_a_bad_record() -> None:
    row = record(name="string")
    with schema_registry() as registry:
        number = registry.register("x", "string")
        records = [(avro("string", "c", number), None), (b"d", None)]
        options = {"format": "avro", "registry": registry.url, "schema": json.dumps(row), "metadata": ["offset"]}
        found = decoded(records, upsert="name", **options)
    assert [(one["op"], one["name"]) for one in found.batch.to_pylist()] == [("delete", "d")]
    ((position, problem),) = problems(found)
    assert position == "10"
    assert "its key begins with the id of a schema" in problem


@pytest.mark.parametrize("ops", [["delete", "update_after"], ["update_after", "delete"], ["delete", "delete"]])
def test_deletes_of_which_only_the_key_is_known_fit_every_schema(ops: list[str]) -> None:
    row = record(id="long", name="string")
    rows = [{"id": n, "name": None if op == "delete" else "a", "op": op} for n, op in enumerate(ops)]
    batch = pa.RecordBatch.from_pylist(
        rows, schema=pa.schema([("id", pa.int64()), ("name", pa.large_string()), ("op", pa.large_string())])
    )
    values = SchemaValues("t", "avro", row, None, SYSTEM_ENVIRONMENT)
    (one,) = Router(RecordColumns(change_keys=("id",)), "t", lambda topic: 1, 0, values).outgoing(batch, 0)
    schema = fastavro.parse_schema(row)
    found = [
        None if value is None else fastavro.schemaless_reader(io.BytesIO(value), schema, None)
        for value in one.values.to_pylist()
    ]
    assert found == [None if op == "delete" else {"id": n, "name": "a"} for n, op in enumerate(ops)]


def test_keys_of_changes_are_written_as_avro() -> None:
    with schema_registry() as registry:
        where = SchemaRegistry(registry.url)
        keys = SchemaValues("t", "avro", None, where, SYSTEM_ENVIRONMENT, "key")
        batch = pa.RecordBatch.from_pylist(CHANGES)
        columns = RecordColumns(change_keys=("id",), avro_keys=True)
        columns.check(batch.schema)
        (one,) = Router(columns, "t", lambda topic: 1, 0, None, keys).outgoing(batch, 0)
        (known,) = registry.schemas()
    assert known["subject"] == "t-key"
    schema = fastavro.parse_schema(json.loads(known["schema"]))
    assert one.keys is not None
    found = [fastavro.schemaless_reader(io.BytesIO(key[5:]), schema, None) for key in one.keys.to_pylist()]
    assert found == [{"id": 1}, {"id": 2}, {"id": 1}, {"id": 2}]


def test_changes_without_a_readable_key_are_bad_records() -> None:
    records = [
        (b"a", b'{"name": "a", "id": 1}'),
        (b"b", b'{"id": 2}'),
        (b"\xff", None),
        (b"c", b'{"name": null, "id": 3}'),
        (b"d", None),
    ]
    found = decoded(records, format="json", schema=FIELDS, upsert="name")
    assert [(row["op"], row["name"]) for row in found.batch.to_pylist()] == [("update_after", "a"), ("delete", "d")]
    missing = "field 'name' is missing or null"
    assert sorted(problems(found)) == [("11", missing), ("12", "invalid UTF-8"), ("13", missing)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "debezium-json"}, r"needs schema=\{'name': type\}"),
        ({"format": "debezium-json", "schema": {"op": str}}, "have a field 'op'"),
        (
            {"format": "json", "schema": FIELDS, "upsert": "x"},
            "names 'x', which values do not have; they have id, name",
        ),
        ({"format": "json", "schema": {"id": int, "op": str}, "upsert": "id"}, "have a field 'op'"),
        ({"format": "raw", "upsert": "value"}, "upsert= of a Kafka source is for values with fields"),
        ({"format": "json", "schema": FIELDS, "upsert": "id", "tombstones": "keep"}, "is not for changes"),
        (
            {"format": "json", "schema": FIELDS, "upsert": "id", "key_format": "avro"},
            "is for format='avro' with upsert=",
        ),
        ({"format": "avro", "registry": "http://r", "key_format": "avro"}, "is for format='avro' with upsert="),
        ({"format": "raw", "key_format": "json"}, "key_format='json' of a Kafka source is none of 'plain', 'avro'"),
    ],
)
def test_wrong_options_of_the_source_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Kafka("kafka:9092", "t", **options)


def test_wrong_uses_of_the_sink_are_refused() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        hg.KafkaSink("kafka:9092", "t", upsert=True, format="debezium-json")
    with pytest.raises(UsageError, match="leave key= and value= out"):
        hg.KafkaSink("kafka:9092", "t", upsert=True, key="id")
    for options in ({"upsert": True}, {"registry": "http://r"}):
        with pytest.raises(UsageError, match="is for changes, and needs registry="):
            hg.KafkaSink("kafka:9092", "t", key_format="avro", **options)
    upserts = hg.KafkaSink("kafka:9092", "t", upsert=True)
    plain = hg.Pipeline("p").source(hg.FromRows(CHANGES))
    with pytest.raises(UsageError, match="writes streams with changes, and these are plain records"):
        plain.sink(upserts)
    changes = plain.records_as_changes("id", retractions=True)
    with pytest.raises(UsageError, match="needs the keys of the changes"):
        changes.select("name", "op").sink(upserts)


@pytest.mark.xdist_group("kafka")
def test_running_aggregates_go_through_topics(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    rows = [{"k": f"k{i % 7}", "n": i} for i in range(500)]
    writing = hg.Pipeline("writing", parallelism=2)
    totals = writing.source(hg.FromRows(rows)).key_by("k").agg(total=pl.col("n").sum(), rows=pl.len())
    totals.sink(hg.KafkaSink(kafka.address, topic, upsert=True, create=2, settings={"cleanup.policy": "compact"}))
    with schema_registry() as registry:
        fields = {"schema": {"k": str, "total": int, "rows": int}}
        with_ids = {"format": "debezium-json", "registry": registry.url}
        envelopes: dict[str, Any] = {"format": "debezium-avro", "registry": registry.url}
        totals.sink(hg.KafkaSink(kafka.address, f"{topic}-json", format="debezium-json", create=2))
        totals.sink(hg.KafkaSink(kafka.address, f"{topic}-ids", create=2, **with_ids))
        upserts: dict[str, Any] = {"format": "avro", "registry": registry.url, "key_format": "avro"}
        totals.sink(hg.KafkaSink(kafka.address, f"{topic}-avro", key_format="avro", create=2, **envelopes))
        totals.sink(hg.KafkaSink(kafka.address, f"{topic}-upserts", upsert=True, create=2, **upserts))
        testing.run(writing)
        check_totals(kafka, tmp_path / "0", rows, topic, format="json", upsert="k", **fields)
        check_totals(kafka, tmp_path / "1", rows, f"{topic}-json", format="debezium-json", **fields)
        check_totals(kafka, tmp_path / "2", rows, f"{topic}-ids", **with_ids, **fields)
        check_totals(kafka, tmp_path / "3", rows, f"{topic}-avro", **envelopes)
        check_totals(kafka, tmp_path / "4", rows, f"{topic}-upserts", upsert="k", **upserts)


def check_totals(kafka: KafkaBroker, directory: Path, rows: Rows, topic: str, **options: Any) -> None:
    """Check that the changes in a topic end with the totals of ``rows``."""
    reading = hg.Pipeline(f"reading-{directory.name}")
    out = testing.Collect(directory)
    reading.source(hg.Kafka(kafka.address, topic, end="latest", **options)).records_as_changes("k").sink(out)
    testing.run(reading)
    frame = pl.DataFrame(rows).group_by("k").agg(total=pl.col("n").sum(), rows=pl.len()).sort("k")
    assert applied(out.rows(), ["k"], retractions=False) == frame.to_dicts()
