"""Which columns become which part of a record, and which partition it goes to."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.kafka.record_batch import HEADERS_TYPE
from headgate.connectors.kafka.outgoing_records import RecordColumns, Router, murmur2, partitions_of_keys
from headgate.errors import UsageError

NOW_MS = 1_700_000_000_000

ROWS: dict[str, pa.Array] = {
    "id": pa.array([1, 2, 3, 4]),
    "k": pa.array(["a", None, "b\n", "a"], pa.large_string()),
    "raw": pa.array([b"1", None, b"", b"\n"], pa.large_binary()),
    "h": pa.array([[{"key": "x", "value": b"1"}], None, [], [{"key": "y", "value": None}]], HEADERS_TYPE),
    "at": pa.array([0, None, 5_000_001, 7], pa.timestamp("us", "UTC")),
    "to": pa.array(["other", None, "other", None], pa.large_string()),
    "part": pa.array([1, None, 2, 0], pa.int64()),
}
BATCH = pa.RecordBatch.from_pydict(ROWS)


def sent(columns: RecordColumns, batch: pa.RecordBatch = BATCH, counts: int = 3) -> list[Any]:
    return list(Router(columns, "home", lambda topic: counts, 0).outgoing(batch, NOW_MS))


def test_a_record_is_json_without_the_columns_that_say_how_it_is_written() -> None:
    batch = BATCH.drop_columns(["raw"])
    columns = RecordColumns(headers="h", timestamp="at", topic="to", partition="part")
    columns.check(batch.schema)
    rows = [json.loads(value.as_py()) for one in sent(columns, batch) for value in one.values]
    assert sorted(rows, key=lambda row: int(row["id"])) == [
        {"id": 1, "k": "a"},
        {"id": 2, "k": None},
        {"id": 3, "k": "b\n"},
        {"id": 4, "k": "a"},
    ]


def test_values_are_written_as_they_are_and_null_stays_null() -> None:
    (one,) = sent(RecordColumns(value="raw"))
    assert one.values.to_pylist() == [b"1", None, b"", b"\n"]
    assert one.timestamps_ms.tolist() == [NOW_MS] * 4
    assert one.keys is None
    assert one.headers is None


def test_headers_and_times_go_with_their_record() -> None:
    (one,) = sent(RecordColumns(value="raw", headers="h", timestamp="at"))
    assert one.headers.to_pylist() == ROWS["h"].to_pylist()
    assert one.timestamps_ms.tolist() == [0, NOW_MS, 5_000, 0]


def test_equal_keys_meet_in_one_partition_in_their_order() -> None:
    found = {one.partition: one for one in sent(RecordColumns(value="k", key="k"))}
    expected = partitions_of_keys(pa.array([b"a", b"b\n"]), 3)
    at_a, at_b = found["home", int(expected[0])], found["home", int(expected[1])]
    assert [key for key in at_a.keys.to_pylist() if key == b"a"] == [b"a", b"a"]
    assert b"b\n" in at_b.keys.to_pylist()
    assert sum(len(one.values) for one in found.values()) == 4


def test_records_without_a_key_take_turns_by_batch() -> None:
    router = Router(RecordColumns(value="raw"), "home", lambda topic: 3, 0)
    places = [one.partition for _ in range(4) for one in router.outgoing(BATCH, NOW_MS)]
    assert [place[1] for place in places] == [1, 2, 0, 1]


def test_a_record_names_its_topic_and_partition() -> None:
    columns = RecordColumns(value="raw", topic="to", partition="part")
    found = {one.partition: one.values.to_pylist() for one in sent(columns)}
    turn = [partition for partition, values in found.items() if None in values]
    assert found["other", 1] == [b"1"]
    assert found["other", 2] == [b""]
    assert b"\n" in found["home", 0]
    assert [topic for topic, _ in turn] == ["home"]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (RecordColumns(key="none"), r"KafkaSink\(key='none'\) names a column that records do not have; they have id, "),
        (RecordColumns(key="id"), r"KafkaSink\(key='id'\) names a column of type int64, not binary or text; cast it"),
        (RecordColumns(value="at"), "not binary or text"),
        (RecordColumns(value="raw", headers="k"), "not a list of structs with a key and a value"),
        (RecordColumns(value="raw", timestamp="id"), "not a timestamp"),
        (RecordColumns(value="raw", topic="raw"), "not text"),
        (RecordColumns(value="raw", partition="k"), "not an integer"),
        (RecordColumns(), "column 'raw' has type large_binary, which JSON cannot hold"),
    ],
)
def test_columns_that_cannot_be_written_are_refused(columns: RecordColumns, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        columns.check(BATCH.schema)


@pytest.mark.parametrize("number", [3, -1, (1 << 63) + 1])
def test_a_partition_that_is_not_there_is_refused(number: int) -> None:
    parts = pa.array([0, number, None, 0], pa.uint64() if number > 3 else pa.int64())
    batch = pa.RecordBatch.from_pydict({"part": parts, "raw": ROWS["raw"]})
    problem = rf"KafkaSink\(partition='part'\) has partition {number} for topic 'home', which has the partitions 0 to 2"
    with pytest.raises(UsageError, match=problem):
        sent(RecordColumns(value="raw", partition="part"), batch)


def test_the_time_that_means_no_time_is_refused() -> None:
    batch = pa.RecordBatch.from_pydict({"raw": [b"a", b"b"], "at": pa.array([-1_000, 0], pa.timestamp("us", "UTC"))})
    with pytest.raises(UsageError, match=r"KafkaSink\(timestamp='at'\) has the last millisecond of 1969"):
        sent(RecordColumns(value="raw", timestamp="at"), batch)


def test_a_record_with_nothing_to_write_is_refused() -> None:
    with pytest.raises(UsageError, match="no column for the value"):
        RecordColumns(partition="part").check(pa.schema([("part", pa.int64())]))


OF_JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""From the tests of Kafka (``UtilsTest.testMurmur2``)."""


def plain_murmur2(data: bytes) -> int:
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    found = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for begin in range(0, whole, 4):
        word = int.from_bytes(data[begin : begin + 4], "little") * m & mask
        word = (word ^ word >> 24) * m & mask
        found = found * m & mask ^ word
    if rest := data[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * m & mask
    found = (found ^ found >> 13) * m & mask
    return found ^ found >> 15


def test_hashes_are_those_of_java() -> None:
    found = murmur2(pa.array(list(OF_JAVA), pa.binary())).view("int32").tolist()
    assert found == list(OF_JAVA.values())


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 5), st.integers(1, 100))
def test_plain_python_finds_the_same(keys: list[bytes | None], skipped: int, count: int) -> None:
    column = pa.array(keys, pa.large_binary())[skipped:]
    expected = [plain_murmur2(key or b"") for key in keys[skipped:]]
    assert murmur2(column).tolist() == expected
    assert partitions_of_keys(column, count).tolist() == [(one & 0x7FFFFFFF) % count for one in expected]


def test_texts_are_keys() -> None:
    assert murmur2(pa.array(["foobar"])).view("int32").tolist() == [-790332482]
