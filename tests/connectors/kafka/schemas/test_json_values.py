"""Values of JSON with the id of a JSON Schema in front, as the serializers of Confluent write them."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.servers.schema_registry import schema_registry

from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.codec.kafka.record_batch import RECORDS_WITH_HEADERS
from headgate.connectors.base import SourceBatch
from headgate.connectors.kafka.changes import envelope_schema
from headgate.connectors.kafka.formats import RecordDecoder
from headgate.connectors.kafka.schemas.schema_registry import SchemaRegistry
from headgate.connectors.kafka.schemas.schema_values import SchemaValues
from headgate.connectors.kafka.source import Kafka
from headgate.environment import SYSTEM_ENVIRONMENT

FIELDS = {"id": int, "name": str}


def decode(values: list[bytes | None], named: dict[int, bytes] | None = None, **options: Any) -> SourceBatch:
    """Read values; ``named``: which of them have a header that names their schema."""
    options = {"format": "json", "schema": FIELDS, "registry": "http://nobody-asks:1", "metadata": "offset", **options}
    decoder = RecordDecoder(Kafka("kafka:9092", "t", **options).format())
    rows = []
    for number, value in enumerate(values):
        headers = [{"key": "__value_schema_id", "value": (named or {})[number]}] if number in (named or {}) else []
        rows.append({"key": b"k", "value": value, "offset": 10 + number, "headers": headers})
    found = decoder.decode(("t", 0), "t/0", pa.RecordBatch.from_pylist(rows, schema=RECORDS_WITH_HEADERS), "kafka")
    found.batch.validate(full=True)
    return found


def problems(found: SourceBatch) -> dict[str, str]:
    return {} if found.bad is None else {one["position"][-2:]: one["problem"] for one in found.bad.to_pylist()}


def framed(number: int, value: str) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + value.encode()


def test_ids_are_taken_off_and_what_has_none_is_a_bad_record() -> None:
    values = [
        framed(1, '{"id": 1, "name": "a"}'),
        None,
        b'{"id": 2}',
        framed(7_000_000, '{"name": "b", "more": [1], "id": 3}'),  # of a newer schema
        framed(1, ""),
        b"",
        b"\0\0",
        framed(1, "{"),
        framed(0x0A0A0A0A, '{"id": 4}'),  # an id of line ends
    ]
    found = decode(values)
    assert [(row["offset"], row["id"], row["name"]) for row in found.batch.to_pylist()] == [
        (10, 1, "a"),
        (13, 3, "b"),
        (18, 4, None),
    ]
    no_frame = "it does not begin with the id of a schema, a zero byte and four more"
    said = problems(found)
    assert {at: why for at, why in said.items() if at != "17"} == {
        "12": no_frame,
        "14": "the value is empty",
        "15": no_frame,
        "16": no_frame,
    }
    assert said.keys() == {"12", "14", "15", "16", "17"}


def test_a_value_whose_header_names_its_schema_begins_with_itself() -> None:
    found = decode([b'{"id": 1}', framed(1, '{"id": 2}')], {0: b"\0\0\0\0\1"})
    assert [row["id"] for row in found.batch.to_pylist()] == [1, 2]


def test_tombstones_and_upserts_are_those_of_json() -> None:
    kept = decode([framed(1, '{"id": 1}'), None], tombstones="keep")
    assert [(row["offset"], row["id"]) for row in kept.batch.to_pylist()] == [(10, 1), (11, None)]
    upserts = decode([framed(1, '{"id": 1, "name": "k"}'), None], upsert="name")
    assert [(row["op"], row["name"]) for row in upserts.batch.to_pylist()] == [("update_after", "k"), ("delete", "k")]


def test_envelopes_of_debezium_may_have_ids() -> None:
    value = framed(1, '{"before": null, "after": {"id": 1, "name": "a"}, "op": "c"}')
    found = decode([value, b"{}"], format="debezium-json")
    assert [(row["op"], row["id"]) for row in found.batch.to_pylist()] == [("insert", 1)]
    assert problems(found).keys() == {"11"}


COLUMNS = pa.schema(
    [
        ("i", pa.uint64()),
        ("f", pa.float32()),
        ("b", pa.bool_()),
        ("s", pa.large_string()),
        ("money", pa.decimal128(10, 2)),
        ("at", MOMENT),
        ("local", LOCAL_TIME),
        ("day", pa.date32()),
        ("time", pa.time64("ns")),
        ("span", pa.duration("us")),
        ("list", pa.large_list(pa.struct([("x", pa.int8())]))),
        ("nested", pa.struct([("y", pa.large_string())])),
        ("nothing", pa.null()),
    ]
)
AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678_901, dt.UTC)
ROWS: list[dict[str, Any]] = [
    {
        "i": 2**64 - 1,
        "f": 0.5,
        "b": True,
        "s": "\n",
        "money": Decimal("1.50"),
        "at": AT,
        "local": AT.replace(tzinfo=None),
        "day": AT.date(),
        "time": dt.time(1),
        "span": dt.timedelta(1),
        "list": [{"x": 1}, None],
        "nested": {"y": None},
    },
    {},
]


@pytest.mark.parametrize("changes", [False, True])
def test_records_are_what_the_json_schema_that_is_registered_says(changes: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    rows = pa.RecordBatch.from_pylist(ROWS, schema=COLUMNS)
    if changes:
        row = pa.StructArray.from_arrays(rows.columns, fields=list(COLUMNS))
        gone = pa.nulls(2, row.type)
        ops = pa.array(["c", "d"], pa.large_string())
        rows = pa.RecordBatch.from_arrays([gone, row, ops], schema=envelope_schema(COLUMNS))
    with schema_registry() as registry:
        form = "debezium-json" if changes else "json"
        written = SchemaValues("t", form, None, SchemaRegistry(registry.url), SYSTEM_ENVIRONMENT)(rows).to_pylist()
        (known,) = registry.schemas()
    assert (known["subject"], known["schemaType"]) == ("t-value", "JSON")
    assert {one[:5] for one in written} == {b"\0\0\0\0\x01"}
    schema = json.loads(known["schema"])
    jsonschema.Draft7Validator.check_schema(schema)
    for one in written:
        jsonschema.validate(json.loads(one[5:]), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"other": 1}, schema)
