"""How keys and values become bytes, and back."""

from __future__ import annotations

from datetime import UTC, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.rocksdb.row_encoding import (
    decode_columns,
    disk_order,
    encode_columns,
    encoded_keys,
    group_start,
    places,
    places_of,
    runs,
    timed,
    timed_codec,
    value_codec,
)
from headgate.state.rocksdb.tables import tables_of

WORDS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(st.text(max_size=4), WORDS, st.binary(max_size=4), st.booleans()), max_size=20))
def test_keys_come_back_whatever_bytes_they_have(rows: list[tuple[str, int, bytes, bool]]) -> None:
    types = [pa.large_string(), pa.int64(), pa.large_binary(), pa.bool_()]
    columns = [pa.array([row[at] for row in rows], dtype) for at, dtype in enumerate(types)]
    encoded = encode_columns(columns)
    assert len(set(encoded)) == len(set(rows)), "two keys never have the same bytes"
    found, ends = decode_columns([b"\0\1\0\2" + row + b"rest" for row in encoded], types)
    assert [column.to_pylist() for column in found] == [column.to_pylist() for column in columns]
    assert [end - 4 for end in ends] == [len(row) for row in encoded]


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_a_range_of_key_groups_is_a_range_of_rows_and_numbers_are_in_order(numbers: list[int]) -> None:
    keys = KeyColumns(("id",), (pa.int64(),))
    column = pa.array(numbers)
    rows = encoded_keys([column], keys, 1_000).in_table(7)
    groups = key_groups(hash_columns(pa.RecordBatch.from_arrays([column], names=["key0"]), ["key0"]), 1_000)
    for row, group in zip(rows, groups.tolist(), strict=True):
        assert group_start(group) <= row < group_start(group + 1)
        assert list(runs([row])) == [(7, 0, 1)]
    assert encode_columns([pa.array(sorted(numbers))]) == sorted(encode_columns([column]))


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_numbers_are_written_in_the_order_of_their_rows(numbers: list[int]) -> None:
    keys = KeyColumns(("id",), (pa.int64(),))
    order = disk_order([pa.array(numbers)], keys, 1_000)
    assert sorted(order.tolist()) == list(range(len(numbers)))
    rows = encoded_keys([pa.array(numbers).take(pa.array(order))], keys, 1_000).in_table(7)
    assert rows == sorted(rows)


@given(st.lists(st.tuples(st.text(max_size=4), WORDS), min_size=1, max_size=20))
def test_other_keys_are_written_by_key_group(rows: list[tuple[str, int]]) -> None:
    keys = KeyColumns(("name", "id"), (pa.large_string(), pa.int64()))
    columns = [pa.array([name for name, _ in rows], pa.large_string()), pa.array([number for _, number in rows])]
    order = disk_order(columns, keys, 1_000)
    assert sorted(order.tolist()) == list(range(len(rows)))
    groups = encoded_keys(columns, keys, 1_000).groups[order]
    assert (np.diff(groups) >= 0).all()


def test_rows_of_one_table_are_found_together() -> None:
    rows = [bytes([0, group, 0, table, 9]) for group in range(2) for table in (1, 1, 2)]
    assert list(runs(rows)) == [(1, 0, 2), (2, 2, 3), (1, 3, 5), (2, 5, 6)]


def test_elements_are_in_the_order_of_their_places() -> None:
    assert places(70_000) == sorted(places(70_000))
    assert places_of(np.array([0, 69_999])) == [places(70_000)[0], places(70_000)[-1]]


def test_tables_are_numbered_by_the_names_of_states_however_they_are_declared() -> None:
    keys = KeyColumns(("id",), (pa.int64(),))
    declared = [StateDescriptor(name, StateKind.LIST, pa.int64()) for name in ("b", "a", "c")]
    found = {descriptor.name: table.number for descriptor, table in tables_of(keys, declared).items()}
    assert found == {descriptor.name: table.number for descriptor, table in tables_of(keys, declared[::-1]).items()}
    assert sorted(found.values()) == [0, 2, 4], "the heads of a table are between it and the next one"


NESTED = pa.struct([("at", pa.timestamp("us")), ("days", pa.large_list(pa.date32())), ("raw", pa.large_binary())])
PRICE = pa.struct([("amount", pa.decimal128(10, 2))])
VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 127]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.float32(), [0.5, float("inf")]),
    (pa.float64(), [-0.0, 1e300]),
    (pa.bool_(), [True, False]),
    (pa.large_string(), ["", "ä\0"]),
    (pa.large_binary(), [b"", b"\xff\0"]),
    (pa.struct([]), [{}]),
    (pa.large_list(pa.large_list(pa.int64())), [[], [None, [1, None]]]),
    (pa.decimal128(10, 2), [Decimal("0.01"), Decimal("-99999999.99"), Decimal("0.00")]),
    (pa.struct([("price", PRICE)]), [{"price": None}, {"price": {"amount": None}}, {"price": {"amount": Decimal(1)}}]),
    (pa.large_list(PRICE), [[], [None], [{"amount": Decimal("1.25")}, None, {"amount": None}]]),
    (pa.struct([("prices", pa.large_list(PRICE))]), [{"prices": None}, {"prices": []}, {"prices": [None]}]),
    (pa.large_list(pa.large_list(pa.decimal128(38, 38))), [[None, [], [None]], [[Decimal("1e-38")]]]),
]


@pytest.mark.parametrize(("dtype", "values"), VALUES, ids=[str(dtype) for dtype, _ in VALUES])
def test_values_come_back(dtype: pa.DataType, values: list[Any]) -> None:
    codec, column = value_codec(dtype), pa.array(values, dtype)
    assert codec.decode(codec.encode(column)).equals(column)
    assert codec.decode(codec.encode(column.slice(1))).equals(column.slice(1))
    assert codec.decode([]).type == dtype


SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates()),
    (pa.time64("ns"), st.times()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.duration("us"), st.timedeltas(timedelta(days=-9_999), timedelta(days=9_999))),
    (pa.decimal128(38, 2), st.decimals(places=2, min_value=-(10**20), max_value=10**20)),
    (pa.large_string(), st.text(max_size=3)),
    (pa.large_binary(), st.binary(max_size=3)),
]


@st.composite
def nested(draw: st.DrawFn, depth: int = 3) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """Return a type and its values; below the outermost level there are nulls."""
    kind = draw(st.sampled_from(["scalar", "list", "struct"])) if depth else "scalar"
    if kind == "list":
        dtype, values = draw(nested(depth - 1))
        return pa.large_list(dtype), st.lists(st.none() | values, max_size=3)
    if kind == "struct":
        fields = {name: draw(nested(depth - 1)) for name in draw(st.sampled_from(["", "a", "ab"]))}
        inner = {name: st.none() | values for name, (_, values) in fields.items()}
        return pa.struct([(name, dtype) for name, (dtype, _) in fields.items()]), st.fixed_dictionaries(inner)
    return draw(st.sampled_from(SCALARS))


@given(st.data())
def test_values_of_any_type_come_back_with_their_nulls(data: st.DataObject) -> None:
    dtype, values = data.draw(nested())
    column = pa.array(data.draw(st.lists(values, max_size=4)), dtype)
    for codec, stored in (
        (value_codec(dtype), column),
        (timed_codec(dtype), timed(column, pa.array(range(len(column)), pa.int64()))),
    ):
        found = codec.decode(codec.encode(stored))
        found.validate(full=True)
        assert found.equals(stored)


@pytest.mark.parametrize("dtype", [pa.timestamp("us"), pa.duration("us"), pa.date32()])
def test_times_come_back_also_those_that_python_does_not_have(dtype: pa.DataType) -> None:
    limit = 2**31 - 1 if dtype == pa.date32() else 2**63 - 1
    column = pa.array([-limit, 0, limit], pa.int32() if dtype == pa.date32() else pa.int64()).view(dtype)
    codec = value_codec(dtype)
    assert codec.decode(codec.encode(column)).equals(column)
    inside = pa.StructArray.from_arrays([column], names=["t"])
    codec = value_codec(inside.type)
    assert codec.decode(codec.encode(inside)).equals(inside)


def test_nested_values_are_stored_by_the_names_of_their_fields() -> None:
    codec = value_codec(NESTED)
    column = pa.array([{"at": None, "days": [None], "raw": b"x"}, {"at": None, "days": None, "raw": None}], NESTED)
    (first, _) = codec.encode(column)
    assert b"days" in first
    assert codec.decode(codec.encode(column)).equals(column)
