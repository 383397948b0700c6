"""Canonical types: one form for each meaning, whatever form a source has it in."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pytest

from headgate.codec.exact_values import MisfitError
from headgate.errors import UsageError
from headgate.model.state_schema import read_type
from headgate.operators.schemas import as_schema, batch_of, canonical_type, frame_of, schema_of_frame, to_canonical
from headgate.state.rocksdb.row_encoding import value_codec

MAP = pa.map_(pa.string(), pa.int32())
ENTRIES = pa.large_list(pa.struct({"key": pa.large_string(), "value": pa.int32()}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (pa.decimal128(12, 2), pa.decimal128(12, 2)),
        (pa.decimal256(38, 3), pa.decimal128(38, 3)),
        (pa.time32("s"), pa.time64("ns")),
        (pa.time64("us"), pa.time64("ns")),
        (MAP, ENTRIES),
        (pa.struct({"m": pa.list_(MAP)}), pa.struct({"m": pa.large_list(ENTRIES)})),
        (pa.list_(pa.int64(), 2), pa.large_list(pa.int64())),
        (pa.date64(), pa.date32()),
        (pa.binary(2), pa.large_binary()),
        (pa.uuid(), pa.large_binary()),
        (
            pa.map_(pa.uuid(), pa.binary(2)),
            pa.large_list(pa.struct({"key": pa.large_binary(), "value": pa.large_binary()})),
        ),
        (pa.duration("s"), pa.duration("ms")),
        (pa.timestamp("ns"), pa.timestamp("us")),
        (pa.timestamp("s", "America/New_York"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us", "+05:30"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.timestamp("ms", "Asia/Kolkata")), pa.large_list(pa.timestamp("us", "UTC"))),
    ],
)
def test_a_type_has_one_form_which_polars_gives_back(given: pa.DataType, expected: pa.DataType) -> None:
    assert canonical_type(given) == expected
    assert canonical_type(expected) == expected
    schema = pa.schema({"c": expected})
    assert schema_of_frame(pl.DataFrame(schema.empty_table())) == schema


@pytest.mark.parametrize("dtype", [pa.decimal256(39, 2), pa.month_day_nano_interval(), pa.list_(pa.null())])
def test_what_has_no_canonical_form_is_refused(dtype: pa.DataType) -> None:
    with pytest.raises(UsageError, match=r"column 'c' has type .*which Headgate does not carry"):
        canonical_type(dtype, "column 'c'")


def test_maps_become_lists_of_their_entries() -> None:
    maps = pa.array([[("a", 1)], None, [("b", 2), ("c", None)], []], MAP)
    nested = pa.array([{"m": [[("a", 1)], None]}, None, {"m": None}, {"m": []}], pa.struct({"m": pa.list_(MAP)}))
    batch = pa.record_batch({"maps": maps, "nested": nested})
    one, two, three = {"key": "a", "value": 1}, {"key": "b", "value": 2}, {"key": "c", "value": None}
    expected = [
        {"maps": [one], "nested": {"m": [[one], None]}},
        {"maps": None, "nested": None},
        {"maps": [two, three], "nested": {"m": None}},
        {"maps": [], "nested": {"m": []}},
    ]
    found = to_canonical(batch)
    assert found.to_pylist() == expected
    assert to_canonical(batch.slice(1, 2)).to_pylist() == expected[1:3]
    assert batch_of(frame_of(found), found.schema).equals(found)


def test_lists_of_entries_become_the_maps_of_a_stream() -> None:
    made = pa.schema({"maps": MAP, "nested": pa.struct({"m": pa.list_(MAP)}), "deep": pa.map_(pa.string(), MAP)})
    rows = [
        {"maps": [("a", 1)], "nested": {"m": [[("a", 1)], None]}, "deep": [("x", [("b", None)])]},
        {"maps": None, "nested": None, "deep": None},
        {"maps": [("b", 2), ("c", None)], "nested": {"m": None}, "deep": []},
        {"maps": [], "nested": {"m": []}, "deep": [("z", None), ("y", [])]},
    ]
    batch = pa.RecordBatch.from_pylist(rows, made)
    inside = to_canonical(batch)
    found = to_canonical(inside, made)
    found.validate(full=True)
    assert found.to_pylist() == rows
    assert to_canonical(inside.slice(1, 2), made).to_pylist() == rows[1:3]
    assert to_canonical(batch, made) is batch
    nothing = pa.array([[{"key": None, "value": 1}]], ENTRIES)
    with pytest.raises(MisfitError, match=r"'maps' is map<.*, which cannot hold list .*'key': None"):
        to_canonical(pa.record_batch({"maps": nothing}), pa.schema({"maps": MAP}))


def test_decimals_and_times_are_bytes_in_rocksdb_and_come_back() -> None:
    nested = pa.struct({"d": pa.decimal128(8, 3), "t": pa.large_list(pa.time64("ns"))})
    for dtype, values in (
        (pa.decimal128(20, 2), [Decimal("1.50"), Decimal("-0.05"), Decimal("999999999999999999.99")]),
        (pa.time64("ns"), [dt.time(1, 2, 3, 4), dt.time(0)]),
        (nested, [{"d": Decimal("0.125"), "t": [dt.time(4), None]}, {"d": None, "t": None}]),
    ):
        column, codec = pa.array(values, dtype), value_codec(dtype)
        assert codec.decode(codec.encode(column)).equals(column)


@pytest.mark.parametrize("dtype", [pa.decimal128(12, 2), pa.decimal128(5, -2), pa.time64("ns"), ENTRIES])
def test_the_text_of_a_type_is_read_as_it(dtype: pa.DataType) -> None:
    assert str(read_type(str(dtype))) == str(dtype)


def test_a_schema_with_two_columns_or_fields_of_one_name_is_refused() -> None:
    twice = [pa.field("a", pa.int64()), pa.field("b", pa.int64()), pa.field("a", pa.string())]
    with pytest.raises(UsageError, match="operator 'map': a schema has two columns 'a'; rename one of them"):
        as_schema("map", pa.schema(twice))
    with pytest.raises(UsageError, match=r"column 'x' has type struct<.*>, with two fields of one name"):
        as_schema("map", pa.schema([("x", pa.list_(pa.struct(twice)))]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "has no name"),
        ("a\0b", "has a zero byte in its name"),
        ("*", r"has the name '\*', which is a pattern in pl.col\(...\)"),
        ("^a.*$", r"has the name .*, which is a pattern in pl\.col\(...\)"),
    ],
)
def test_a_column_whose_name_polars_cannot_carry_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"operator 'map': column 2 of 2 {said}; rename it"):
        as_schema("map", pa.schema([("n", pa.int64()), (name, pa.int64())]))


def test_bytes_of_one_size_and_uuids_are_carried_as_bytes() -> None:
    ids = [uuid.UUID(int=number).bytes for number in (7, 2**127)] + [None]
    days = [dt.date(1969, 12, 31), None, dt.date(2024, 2, 29)]
    codes = pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array([b"ab", b"cd"], pa.binary(2)))
    columns = {"id": pa.array(ids, pa.uuid()), "day": pa.array(days, pa.date64()), "code": codes}
    found = to_canonical(pa.RecordBatch.from_pydict(columns))
    assert found.to_pydict() == {"id": ids, "day": days, "code": [b"cd", None, b"ab"]}
