"""``explode`` against Polars, over lists that are empty, null, nested and long."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.harness import Harness

from headgate.errors import UsageError
from headgate.operators.exploded_rows import ExplodeSpec

ITEM = pa.struct([("sku", pa.large_string()), ("tags", pa.large_list(pa.int64()))])
SCHEMA = pa.schema([("id", pa.int64()), ("items", pa.large_list(ITEM))])
LISTS = st.none() | st.lists(
    st.none() | st.fixed_dictionaries({"sku": st.none() | st.text(max_size=2), "tags": st.none() | st.just([1, None])}),
    max_size=4,
)


def exploded(rows: list[dict[str, Any]], spec: ExplodeSpec, start: int = 0) -> list[dict[str, Any]]:
    run = Harness(spec)
    run.send(pa.RecordBatch.from_pylist(rows, SCHEMA).slice(start))
    assert all(batch.schema == spec.output_schema(SCHEMA, "node") for batch in run.out.batches)
    return run.out.rows()


@given(lists=st.lists(LISTS, max_size=8), keep_empty=st.booleans(), start=st.integers(0, 3))
def test_each_element_is_a_row_as_in_polars(lists: list[Any], keep_empty: bool, start: int) -> None:
    rows = [{"id": i, "items": found} for i, found in enumerate(lists)]
    frame = pl.DataFrame(pa.Table.from_pylist(rows, SCHEMA)).slice(start)
    wanted = frame.explode("items", empty_as_null=keep_empty, keep_nulls=keep_empty)
    assert exploded(rows, ExplodeSpec("items", keep_empty), start) == wanted.to_dicts()


def test_positions_count_from_zero_and_are_null_where_nothing_is() -> None:
    rows = [{"id": 1, "items": [None, {"sku": "a", "tags": []}]}, {"id": 2, "items": []}, {"id": 3, "items": None}]
    found = exploded(rows, ExplodeSpec("items", keep_empty=True, position="at"))
    assert [(row["id"], row["at"]) for row in found] == [(1, 0), (1, 1), (2, None), (3, None)]
    assert [row["items"] for row in found] == [None, {"sku": "a", "tags": []}, None, None]
    assert [row["at"] for row in exploded(rows, ExplodeSpec("items", position="at"))] == [0, 1]
    assert exploded(rows[1:], ExplodeSpec("items")) == []


def test_long_lists_are_sent_in_parts() -> None:
    schema = pa.schema([("n", pa.large_list(pa.int64()))])
    run = Harness(ExplodeSpec("n"))
    run.send(pa.record_batch([[list(range(30_000))] * 5 + [[]] + [list(range(150_000))]], schema))
    assert [batch.num_rows for batch in run.out.batches] == [60_000, 60_000, 30_000, 150_000]
    assert pa.Table.from_batches(run.out.batches)["n"].to_pylist() == [*[*range(30_000)] * 5, *range(150_000)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ExplodeSpec("id"), "needs a column of lists or maps, and 'id' is none"),
        (ExplodeSpec("item"), "no column 'item'"),
        (ExplodeSpec("items", position="id"), "there is a column 'id' already"),
    ],
)
def test_what_cannot_be_exploded_is_refused(spec: ExplodeSpec, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        spec.output_schema(SCHEMA, "node")
