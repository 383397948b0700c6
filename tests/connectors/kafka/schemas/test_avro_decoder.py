"""Values of Avro with and without a schema registry: ids in values and in headers, schemas that evolve, failures."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from tests.servers.schema_registry import Registry

from headgate.codec.kafka.record_batch import RECORDS_WITH_HEADERS
from headgate.connectors.base import SourceBatch
from headgate.connectors.kafka.formats import RecordDecoder
from headgate.connectors.kafka.schemas.schema_registry import RegistryClient, SchemaRegistry
from headgate.connectors.kafka.source import Kafka
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import StorageError, UsageError


def record(*fields: tuple[str, Any]) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "order",
        "fields": [{"name": n, "type": t} | ({"default": None} if isinstance(t, list) else {}) for n, t in fields],
    }


FIRST = record(("id", "int"), ("item", "string"))
SECOND = record(("id", "long"), ("item", "string"), ("price", ["null", "double"]))


def encoded(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def framed(number: int, schema: Any, value: Any) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + encoded(schema, value)


def batch(*values: bytes | tuple[bytes, bytes] | None) -> pa.RecordBatch:
    """Return records; a pair is a value, and what its header says of its schema."""
    rows = []
    for n, one in enumerate(values):
        value, named = one if isinstance(one, tuple) else (one, None)
        headers = [{"key": "other", "value": b"x"}]
        headers += [] if named is None else [{"key": "__value_schema_id", "value": named}]
        rows.append({"value": value, "key": None, "offset": n, "timestamp": None, "headers": headers})
    return pa.RecordBatch.from_pylist(rows, schema=RECORDS_WITH_HEADERS)


def decoder(**options: Any) -> RecordDecoder:
    return RecordDecoder(Kafka("kafka:9092", "orders", format="avro", **options).format())


def decode(with_: RecordDecoder, *values: Any) -> SourceBatch:
    found = with_.decode(("orders", 0), "orders/0", batch(*values), "kafka")
    found.batch.validate(full=True)
    return found


def problems(found: SourceBatch) -> list[str]:
    return [] if found.bad is None else [f"{one['position'][-1]}: {one['problem']}" for one in found.bad.to_pylist()]


def test_plain_values_have_the_schema_of_the_source() -> None:
    found = decode(
        decoder(schema=json.dumps(FIRST), metadata="offset"), encoded(FIRST, {"id": 1, "item": "a"}), None, b"\x02"
    )
    assert found.batch.to_pylist() == [{"id": 1, "item": "a", "offset": 0}]
    assert problems(found) == ["2: it ends too early"]
    assert decode(decoder(schema=FIRST, tombstones="keep"), None).batch.to_pylist() == [{"id": None, "item": None}]
    assert decode(decoder(schema="long"), b"\x04").batch.to_pylist() == [{"value": 2}]


def test_schemas_evolve_while_values_are_read(registry: Registry) -> None:
    first = registry.register("orders-value", FIRST)
    old = decoder(registry=registry.url)
    assert old.schema.names == ["id", "item"]
    second = registry.register("orders-value", SECOND)
    new = decoder(registry=registry.url, metadata="offset")
    values = [
        framed(first, FIRST, {"id": 1, "item": "a"}),
        framed(second, SECOND, {"id": 2, "item": "b", "price": 1.5}),
    ]
    found = decode(new, *values, *values)
    assert found.batch.to_pylist() == [
        {"id": 1, "item": "a", "price": None, "offset": 0},
        {"id": 2, "item": "b", "price": 1.5, "offset": 1},
        {"id": 1, "item": "a", "price": None, "offset": 2},
        {"id": 2, "item": "b", "price": 1.5, "offset": 3},
    ]
    asked = len(registry.asked)
    assert decode(new, *values).batch.num_rows == 2
    assert len(registry.asked) == asked, "schemas are asked for once"
    found = decode(old, *values)  # a long does not go into an int
    assert found.batch.to_pylist() == [{"id": 1, "item": "a"}]
    why = "its schema, id 2, does not go together with that of the source: long cannot be read as int"
    assert problems(found) == [f"1: {why}"]
    third = registry.register("orders-value", record(("id", "int"), ("item", "string"), ("more", "bytes")))
    value = framed(
        third, record(("id", "int"), ("item", "string"), ("more", "bytes")), {"id": 3, "item": "c", "more": b""}
    )
    assert decode(old, value).batch.to_pylist() == [{"id": 3, "item": "c"}]


def test_headers_may_name_the_schema(registry: Registry) -> None:
    number = registry.register("orders-value", FIRST)
    one = encoded(FIRST, {"id": 1, "item": "a"})
    guid = b"\1" + uuid.UUID(int=number).bytes
    in_header = b"\0" + number.to_bytes(4, "big")
    found = decode(
        decoder(registry=registry.url),
        (one, guid),
        framed(number, FIRST, {"id": 2, "item": "b"}),
        (one, in_header),
        (one, b"?"),
        None,
        (one, b"\1" + uuid.UUID(int=99).bytes),
    )
    assert [row["id"] for row in found.batch.to_pylist()] == [1, 2, 1]
    assert sorted(problems(found)) == [
        "3: header __value_schema_id is damaged",
        f"5: its schema, GUID {uuid.UUID(int=99)}, is not in the registry",
    ]


def test_what_has_no_known_schema_is_a_bad_record(registry: Registry) -> None:
    number = registry.register("orders-value", FIRST)
    union = registry.register("other", '["int","string"]')
    good = framed(number, FIRST, {"id": 1, "item": "a"})
    found = decode(
        decoder(registry=registry.url),
        b"",
        b"\0\0",
        b"{}{}{}",
        good,
        b"\0\0\0\0\x63..",
        b"\0\0\0\0" + bytes([union]),
        good + b"x",
    )
    assert found.batch.num_rows == 1
    apart = "does not go together with that of the source"
    framing = "it does not begin with the id of a schema, a zero byte and four more"
    assert sorted(problems(found)) == [
        f"0: {framing}",
        f"1: {framing}",
        f"2: {framing}",
        "4: its schema, id 99, is not in the registry",
        f"5: its schema, id {union}, {apart}: int cannot be read as record 'order'",
        "6: bytes are left over after the value",
    ]


def test_schemas_may_refer_to_others(registry: Registry) -> None:
    registry.register("item", {"type": "record", "name": "item", "fields": [{"name": "sku", "type": "string"}]})
    number = registry.register(
        "orders-value", record(("item", "item")), references=[{"name": "item", "subject": "item", "version": 1}]
    )
    found = decode(decoder(registry=registry.url), b"\0" + number.to_bytes(4, "big") + b"\x02a")
    assert found.batch.to_pylist() == [{"item": {"sku": "a"}}]


def test_a_registry_that_is_away_is_asked_again(registry: Registry) -> None:
    number = registry.register("orders-value", FIRST)
    registry.failures = 2
    client = RegistryClient(SchemaRegistry(registry.url), SYSTEM_ENVIRONMENT)
    assert client.by_id(number) is not None
    assert len(registry.asked) == 3


def test_a_registry_that_stays_away_is_one_sentence(registry: Registry) -> None:
    registry.failures = 100
    client = RegistryClient(SchemaRegistry(registry.url), SYSTEM_ENVIRONMENT, patience_ms=300)
    with pytest.raises(
        StorageError, match=r"cannot ask the schema registry at .*/schemas/ids/1: it answers with status 503"
    ):
        client.by_id(1)
    registry.end()
    with pytest.raises(StorageError, match=r"/schemas/ids/1: .*Connection refused"):
        client.by_id(1)


def test_a_login_comes_from_the_environment(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.login = "me:secret"
    number = registry.register("orders-value", FIRST)
    with pytest.raises(UsageError, match=r"refuses a client without a login \(status 401\)"):
        RegistryClient(SchemaRegistry(registry.url), SYSTEM_ENVIRONMENT).by_id(number)
    place = SchemaRegistry(registry.url, user="me", secret="env:REGISTRY")
    assert "REGISTRY" not in repr(place)
    with pytest.raises(UsageError, match="set the environment variable REGISTRY on every worker"):
        RegistryClient(place, SYSTEM_ENVIRONMENT).by_id(number)
    monkeypatch.setenv("REGISTRY", "secret")
    assert RegistryClient(place, SYSTEM_ENVIRONMENT).by_id(number) is not None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "format='avro' of a Kafka source needs schema='{...}' or registry='http://...'"),
        ({"schema": "{"}, "the schema of a Kafka source is not a schema of Avro"),
        ({"registry": "localhost:8081"}, "the url of a schema registry must be like 'http://host:8081'"),
        ({"registry": "http://a:b@c"}, "the url of a schema registry must have no password"),
        ({"registry": "http://c", "topics": ["a", "b"]}, "that reads several topics needs schema='{...}'"),
        (
            {"registry": "http://c", "format": "csv", "schema": {"a": int}},
            "registry= of a Kafka source is for the formats 'json', 'avro', 'protobuf', 'debezium-json', ",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        Kafka("kafka:9092", **{"topics": "orders", "format": "avro", **options})
    assert problem in str(caught.value)


def test_a_subject_that_is_not_there_is_refused(registry: Registry) -> None:
    source = Kafka("kafka:9092", "orders", format="avro", registry=registry.url)
    with pytest.raises(
        UsageError, match="has no subject 'orders-value'; register a schema, or give the source schema="
    ):
        source.format()
    registry.register("orders-value", "syntax", schemaType="PROTOBUF")
    with pytest.raises(UsageError, match="is a schema of PROTOBUF, not of Avro"):
        source.format()


def test_an_id_of_a_schema_that_is_not_of_avro_is_a_bad_record(registry: Registry) -> None:
    """It stops nothing: others may have written to the topic."""
    first = registry.register("orders-value", FIRST)
    other = registry.register("orders-value", "{}", schemaType="JSON")
    found = decode(
        decoder(registry=registry.url, schema=json.dumps(FIRST)),
        b"\0\0\0\0" + bytes([other]) + b"{}",
        framed(first, FIRST, {"id": 1, "item": "a"}),
    )
    assert found.batch.to_pylist() == [{"id": 1, "item": "a"}]
    assert problems(found) == [f"0: its schema, id {other}: it is a schema of JSON, not of Avro"]
