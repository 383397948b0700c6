"""Formats of Kafka's records: values as columns, metadata, tombstones, and records that cannot be decoded."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headgate as hg
from headgate.codec.kafka.record_batch import RECORDS_WITH_HEADERS
from headgate.connectors.base import SourceBatch
from headgate.connectors.kafka.formats import RecordDecoder
from headgate.connectors.kafka.source import Kafka
from headgate.errors import UsageError
from headgate.operators.schemas import arrow_schema

START = datetime(2026, 1, 1, tzinfo=UTC)
FIELDS = {"name": str, "size": int}


def records(*values: bytes | None) -> pa.RecordBatch:
    """Return records at offsets 100, 102, 104, …: some are missing, as in compacted topics."""
    rows = [
        {
            "value": v,
            "key": b"k%d" % n,
            "offset": 100 + 2 * n,
            "timestamp": START,
            "headers": [{"key": "h", "value": b"v"}],
        }
        for n, v in enumerate(values)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=RECORDS_WITH_HEADERS)


def decode(*values: bytes | None, **options: Any) -> SourceBatch:
    decoder = RecordDecoder(Kafka("kafka:9092", "orders", **options).format())
    found = decoder.decode(("orders", 3), "orders/3", records(*values), "kafka")
    assert found.batch.schema.equals(decoder.schema)
    found.batch.validate(full=True)
    return found


def rows(found: SourceBatch) -> list[dict[str, Any]]:
    return found.batch.to_pylist()


def problems(found: SourceBatch) -> list[tuple[str, str, str]]:
    """Return what is wrong, where and the text of each bad record."""
    bad = [] if found.bad is None else found.bad.to_pylist()
    assert {one["node"] for one in bad} <= {"kafka"}
    return [(one["position"], one["problem"], one["record"]) for one in bad]


def test_raw_values_are_bytes_and_tombstones_are_nulls() -> None:
    assert rows(decode(b"\xff", None, metadata=())) == [{"value": b"\xff"}, {"value": None}]
    assert rows(decode(b"a")) == [
        {"value": b"a", "key": b"k0", "timestamp": START, "topic": "orders", "partition": 3, "offset": 100}
    ]


def test_json_has_the_fields_of_its_schema() -> None:
    found = decode(b'{"name":"a","size":1}', b' {"size": 2, "more": [1]} ', format="json", schema=FIELDS)
    assert rows(found) == [{"name": "a", "size": 1}, {"name": None, "size": 2}]
    assert problems(found) == []


def test_json_may_have_line_ends_between_its_tokens() -> None:
    found = decode(b'{\r\n "name": "a",\n "size": 1\n}\n', b'{"size":2}', format="json", schema=FIELDS)
    assert rows(found) == [{"name": "a", "size": 1}, {"name": None, "size": 2}]
    found = decode(b'{"name":"a\nb"}', b'{"name":"c\\nd"}', format="json", schema=FIELDS)
    assert rows(found) == [{"name": "c\nd", "size": None}]
    assert len(problems(found)) == 1


@given(
    st.lists(
        st.lists(
            st.sampled_from(
                [b"\n", b"\n", b" ", b"{", b"}", b'"size"', b":", b"1", b",", b'"a', b'"', b'{"size":\n1}']
            ),
            max_size=12,
        ).map(b"".join)
    )
)
@example([b'{"size"\n:1}', b'{"size":2}\n{"size":3}', b'{"size":4\n}', b'{"size":\n5,"name"\n:"a\n"}', b'{"size":\n6}'])
def test_a_line_end_in_json_means_what_a_tab_means(values: list[bytes]) -> None:
    found = decode(*values, format="json", schema=FIELDS, metadata="offset")
    tabs = decode(*[v.replace(b"\n", b"\t") for v in values], format="json", schema=FIELDS, metadata="offset")
    assert found.batch.equals(tabs.batch)
    assert [one[:2] for one in problems(found)] == [one[:2] for one in problems(tabs)]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"", "the value is empty"),
        (b" \n", "the value is empty"),
        (b"null", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"size":"x"}', "field 'size' is int64, which cannot hold \"x\""),
        (b'{"size":1', "not a JSON object"),
        (b'{"size":1}{"size":2}', "several JSON values on one line"),
        (b"\xff{}", "invalid UTF-8"),
        (b'{"name":"a"}', "field 'size' is missing or null"),
    ],
)
def test_a_value_that_is_no_json_of_the_schema_is_a_bad_record(value: bytes, problem: str) -> None:
    good = b'{"name":"g","size":0}'
    found = decode(good, None, value, good, format="json", schema=FIELDS, required=["size"], metadata="offset")
    assert [row["offset"] for row in rows(found)] == [100, 106]
    ((place, why, text),) = problems(found)
    assert place == "topic orders partition 3 offset 104"
    assert problem in why
    assert text == value.decode(errors="backslashreplace")


def test_text_is_utf8() -> None:
    found = decode("é".encode(), b"\xff", b"", format="text", metadata={"at": "timestamp", "where": "partition"})
    assert rows(found) == [{"value": "é", "at": START, "where": 3}, {"value": "", "at": START, "where": 3}]
    assert problems(found) == [("topic orders partition 3 offset 102", "invalid UTF-8", "\\xff")]


def test_csv_has_the_fields_of_its_schema_in_their_order() -> None:
    values = [b"a,1", b'"b, ""c""",2\r\n', b",", b'"",3', b'"two\nlines",4', b"5"]
    found = decode(*values, format="csv", schema=FIELDS)
    assert rows(found) == [
        {"name": "a", "size": 1},
        {"name": 'b, "c"', "size": 2},
        {"name": None, "size": None},
        {"name": "", "size": 3},
        {"name": "two\nlines", "size": 4},
    ]
    ((place, problem, text),) = problems(found)
    assert (place, text) == ("topic orders partition 3 offset 110", "5")
    assert problem == "it has 1 fields, not 2"


@pytest.mark.parametrize(
    "value", [b'"a,1', b'a,"1', b'a,1"""', b"a,1\nb,2", b"a,x", b"a,1.5", b"a,1,2", b"", b"\xff,1", b'a",1']
)
def test_a_value_that_is_no_csv_of_the_schema_is_a_bad_record(value: bytes) -> None:
    found = decode(b"g,0", value, b"g,2", value, b'"g",4', format="csv", schema=FIELDS, metadata="offset")
    assert [(row["offset"], row["size"]) for row in rows(found) if row["name"] == "g"] == [(100, 0), (104, 2), (108, 4)]
    if value != b'a",1':  # a quote within a field is a character
        assert [place[-3:] for place, _, _ in problems(found)] == ["102", "106"]


def test_csv_may_have_another_separator_and_required_fields() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.float32())])
    found = decode(b"1;1e39", b";2", b"3;4.5", format="csv", schema=schema, separator=";")
    assert rows(found) == [{"a": 3, "b": 4.5}]
    assert [problem for _, problem, _ in problems(found)][1] == "field 'a' is missing or null"


def test_csv_has_times() -> None:
    found = decode(
        b"2026-01-01T00:00:00Z,2026-01-02", format="csv", schema={"at": pl.Datetime("us", "UTC"), "day": pl.Date}
    )
    assert rows(found) == [{"at": START, "day": datetime(2026, 1, 2).date()}]


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_tombstones_are_dropped_or_kept(form: str) -> None:
    schema = None if form == "text" else FIELDS
    value = {"text": b"a", "json": b'{"name":"a","size":1}', "csv": b"a,1"}[form]
    found = decode(None, value, None, None, format=form, schema=schema, metadata="offset")
    assert [row["offset"] for row in rows(found)] == [102]
    found = decode(None, value, None, None, format=form, schema=schema, metadata=["offset", "key"], tombstones="keep")
    first = "value" if form == "text" else "name"
    assert [(row["offset"], row["key"], row[first]) for row in rows(found)] == [
        (100, b"k0", None),
        (102, b"k1", "a"),
        (104, b"k2", None),
        (106, b"k3", None),
    ]
    found = decode(None, None, format=form, schema=schema, metadata="offset", tombstones="keep")
    assert [row["offset"] for row in rows(found)] == [100, 102]
    assert rows(decode(None, format=form, schema=schema)) == []
    assert rows(decode(format=form, schema=schema)) == []


@given(st.lists(st.one_of(st.none(), st.sampled_from([b"x", b"", b'{"size":1', b'{"size":2}', b'{"size":3}\n', b'"']))))
def test_each_record_becomes_one_row_or_one_bad_record(values: list[bytes | None]) -> None:
    for form in ("json", "csv"):
        schema = {"size": int} if form == "json" else {"size": str}
        found = decode(*values, format=form, schema=schema, metadata="offset", tombstones="keep")
        offsets = [row["offset"] for row in rows(found)]
        bad = [int(place.rpartition(" ")[2]) for place, _, _ in problems(found)]
        assert sorted(offsets + bad) == [100 + 2 * n for n in range(len(values))]
        assert offsets == sorted(offsets)


def test_headers_are_a_column_where_they_are_wanted() -> None:
    assert rows(decode(b"a", format="text", metadata="headers")) == [
        {"value": "a", "headers": [{"key": "h", "value": b"v"}]}
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"format": "xml"},
            "format='xml' of a Kafka source is none of 'raw', 'text', 'json', 'csv', 'avro', 'protobuf'",
        ),
        ({"format": "json"}, "format='json' of a Kafka source needs schema="),
        ({"schema": FIELDS}, "format='raw' of a Kafka source takes no schema=; give another format"),
        (
            {"format": "csv", "schema": FIELDS, "required": ["a"]},
            "required= of a Kafka source is for format='json' only",
        ),
        ({"format": "json", "schema": FIELDS, "required": ["a"]}, "required field 'a' is not in the schema"),
        ({"separator": '"'}, "must be one character, and no quote or line end"),
        ({"tombstones": "null"}, "tombstones='null' of a Kafka source is none of 'drop', 'keep'"),
        (
            {"format": "json", "schema": FIELDS, "required": ["size"], "tombstones": "keep"},
            "makes rows of nulls, but field 'size' is required",
        ),
        ({"metadata": ["time"]}, "metadata of a Kafka source has no 'time'; choose of key, timestamp, topic"),
        (
            {"format": "json", "schema": {"key": str}, "metadata": ["key"]},
            "both have a column 'key'; rename that of the metadata: metadata={'kafka_key': 'key'}",
        ),
        ({"format": "csv", "schema": {"a": pl.List(pl.Int64)}}, "which CSV cannot express"),
        (
            {"format": "json", "schema": {}},
            "the schema of a Kafka source with format='json' has no fields; give at least",
        ),
        ({"format": "avro", "schema": '{"type": "record", "name": "r", "fields": []}'}, "format='avro' has no fields"),
        ({"discovery_interval": "soon"}, "discovery_interval"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        Kafka("kafka:9092", "orders", **options)
    assert problem in str(caught.value)


def test_the_source_is_public() -> None:
    assert hg.Kafka is Kafka
    assert repr(Kafka("kafka:9092", ["a", "b"])) == "Kafka('kafka:9092', 'a, b')"
    assert arrow_schema(FIELDS).names == ["name", "size"]


def test_without_the_package_for_checksums_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.codec.kafka.record_batch.crc32c", None)
    with pytest.raises(UsageError, match=r"Kafka needs the package crc32c: pip install 'headgate-streams\[kafka\]'"):
        Kafka("kafka:9092", "orders")
