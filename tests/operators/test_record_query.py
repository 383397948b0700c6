"""Text that comes encoded, as dictionaries, gives what it gives without, however odd it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness

from headgate.operators import record_query
from headgate.operators.base import ChosenRows, LazyRows, Part, as_batch, as_lazy, decoded
from headgate.operators.expressions import ExpressionsSpec, filter_spec, fuse, select_spec, with_columns_spec
from headgate.operators.record_query import divide
from headgate.operators.schemas import encoded_text
from headgate.operators.user_functions import UserFunctionError
from headgate.state.heap import Heap, HeapRows

SCHEMA = pa.schema([("url", pa.large_string()), ("kind", pa.large_string()), ("n", pa.int64())])

TEXT = st.one_of(
    st.none(),
    st.sampled_from(["", "/", "//", "a/b/c", "/ü/\U0001f600/", "a--b----c", "ÄÖ", "a/\u0000/b", "x" * 40]),
    st.text(alphabet="/-aÄ\U0001f600\u0000", max_size=12),
)
TYPES = st.sampled_from([pa.string(), pa.large_string(), pa.string_view()])
ROWS = st.lists(st.tuples(TEXT, st.sampled_from([None, "Apple", "GOOGLE", "ß", ""]), st.integers(-9, 9)), max_size=30)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[], [], []]
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def encoded(batch: pa.RecordBatch, text: pa.DataType) -> pa.RecordBatch:
    """Return ``batch`` as a reader leaves it, with values that no row has, and one of them twice."""

    def of(column: pa.Array) -> pa.Array:
        if not pa.types.is_large_string(column.type):
            return column
        found = column.dictionary_encode()
        extra = pa.array(["unused", "unused", "7"], pa.large_string())
        values = pa.concat_arrays([extra, found.dictionary]).cast(text)
        places = pa.array([None if place is None else place + 3 for place in found.indices.to_pylist()], pa.int16())
        return encoded_text(pa.DictionaryArray.from_arrays(places, values))

    return pa.RecordBatch.from_arrays([of(column) for column in batch.columns], names=batch.schema.names)


def split_index(column: str, separator: str, place: int) -> pl.Expr:
    return pl.col(column).str.split(separator).list.get(place, null_on_oob=True)


URL, KIND, N = pl.col("url"), pl.col("kind"), pl.col("n")

SPECS: dict[str, ExpressionsSpec] = {
    "parts": select_spec(N, KIND, *(split_index("url", "/", i).alias(f"dir{i}") for i in (0, 1, 3))),
    "long separator": select_spec(split_index("url", "--", 1).alias("second"), URL),
    "no text": select_spec(N + 1),
    "numbers of text": select_spec(URL.str.len_bytes().alias("size"), (URL.str.len_chars() + N).alias("more")),
    "null": with_columns_spec(URL.is_null().alias("is_null"), URL.fill_null("none").alias("given"), KIND.alias("url")),
    "two columns": select_spec(
        KIND.str.to_lowercase().replace_strict({"apple": "0"}, default=None).fill_null(URL.str.slice(0, 2)).alias("x")
    ),
    "conditions": select_spec(
        pl.when(KIND.str.to_uppercase() == "APPLE").then(URL).otherwise(KIND.str.to_lowercase() + "!").alias("x"), N
    ),
    "a filter": filter_spec(URL.str.contains("/", literal=True), N > 0),
    "several steps": fuse(
        [
            with_columns_spec(KIND.str.to_lowercase().alias("kind"), URL.alias("whole")),
            with_columns_spec((pl.col("kind") + URL.str.slice(0, 1)).alias("both"), pl.lit(3).alias("three")),
            filter_spec(pl.col("both").is_not_null() | (N > 3)),
            select_spec(*map(pl.col, ("both", "whole", "three", "kind")), pl.col("both").str.len_chars().alias("size")),
            filter_spec(pl.col("size") != 3),
        ]
    ),
    "swapped": with_columns_spec(URL.alias("kind"), KIND.alias("url")),
    "a selector": select_spec(pl.col("^.*l$"), pl.col("kind", "n")),
    "a literal": select_spec(pl.lit("x").alias("x")),
    "not a number": select_spec(
        (URL.str.len_bytes() + pl.lit(float("nan"))).is_nan().alias("x"), (URL + "é").alias("y")
    ),
    "a struct": select_spec(pl.struct(URL.str.to_uppercase(), (KIND + "!").alias("loud"), N).alias("x")),
    "names that parts have": select_spec((URL.str.len_chars() + N).alias("value0"), N.alias("value")),
}


@pytest.fixture(autouse=True)
def any_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_query, "ROWS_PER_VALUE_MIN", 0)


def results(spec: ExpressionsSpec, batches: list[pa.RecordBatch | LazyRows]) -> list[pa.RecordBatch]:
    run = Harness(spec)
    for batch in batches:
        run.operator.process(batch)  # type: ignore[arg-type]
    return run.out.batches


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=15)
@given(text=TYPES, first=ROWS, second=ROWS, cut=st.integers(0, 5))
def test_encoded_text_gives_what_plain_text_gives(
    name: str, text: pa.DataType, first: list[tuple[Any, ...]], second: list[tuple[Any, ...]], cut: int
) -> None:
    spec = SPECS[name]
    schema = spec.output_schema(SCHEMA, "node")
    plain = [batch for rows in (first, second) if (batch := batch_of(rows).slice(cut)).num_rows]
    found = results(spec, [as_lazy(encoded(batch_of(rows), text).slice(cut)) for rows in (first, second) if rows[cut:]])
    assert found == results(spec, list(plain))
    assert all(batch.schema.equals(schema) for batch in found)


@settings(max_examples=50)
@given(rows=ROWS, place=st.integers(0, 4), separator=st.sampled_from(["/", "--", "a", "Ä", "\U0001f600"]))
def test_a_part_of_a_text_is_that_of_a_recount(rows: list[tuple[Any, ...]], place: int, separator: str) -> None:
    if not rows:
        return
    spec = select_spec(split_index("url", separator, place).alias("part"), N)
    wanted = []
    for url, _, n in rows:
        parts = [] if url is None else url.split(separator)
        wanted.append({"part": parts[place] if place < len(parts) else None, "n": n})
    for batch in (batch_of(rows), as_lazy(encoded(batch_of(rows), pa.large_string()))):
        assert [row for found in results(spec, [batch]) for row in found.to_pylist()] == wanted


def test_a_value_that_no_row_has_does_not_fail() -> None:
    batch = batch_of([("1", None, 1), ("x", None, 2), ("3", None, 3)])
    number = URL.cast(pl.Int64).alias("number")
    spec = fuse([filter_spec(N != 2), select_spec(number)])
    found = results(spec, [as_lazy(encoded(batch, pa.large_string()))])
    assert [row for one in found for row in one.to_pylist()] == [{"number": 1}, {"number": 3}]
    with pytest.raises(UserFunctionError, match="x"):
        results(select_spec(number), [as_lazy(encoded(batch, pa.large_string()))])


def test_other_columns_may_be_encoded_in_each_batch() -> None:
    spec = select_spec(KIND.str.to_lowercase().alias("kind"), URL.str.to_uppercase().alias("url"), N)
    batch = batch_of([("a", "X", 1), ("b", "X", 2)])
    both = encoded(batch, pa.large_string())
    without_kind = both.set_column(1, "kind", batch.column("kind"))
    found = results(spec, [as_lazy(both), as_lazy(without_kind), as_lazy(both)])
    assert found == results(spec, [batch, batch, batch])


def test_what_needs_one_encoded_column_is_computed_for_its_values() -> None:
    expressions = {
        "whole": split_index("url", "/", 3),
        "part": KIND.str.to_lowercase().fill_null(URL.str.slice(1)),
        "same": URL.str.slice(1) + KIND,
        "itself": URL,
        "other": N + 1,
        "nan": URL.str.len_bytes() + pl.lit(float("nan")),
    }
    found = divide(expressions, ["url", "kind"], ["value0"])
    assert found is not None
    assert {column: len(of) for column, of in found.of_values.items()} == {"url": 2, "kind": 1}
    assert found.whole == {"whole": ("url", "value_0")}
    assert [set(one.meta.root_names()) for one in found.rest] == [
        {"value_1", "value_2"},
        {"value_2", "kind"},
        {"url"},
        {"n"},
        {"url"},
    ]
    assert divide(expressions, ["n2"], []) is None


@pytest.mark.parametrize("depth", [20, 40])
def test_parts_are_taken_out_of_deep_expressions(depth: int) -> None:
    deep = URL.str.to_uppercase() + KIND
    for _ in range(depth):
        deep = deep.str.strip_chars("!")
    assert divide({"x": deep}, ["url", "kind"], []) is not None


def test_a_text_that_stays_encoded_is_decoded_where_it_is_asked_for() -> None:
    batch = batch_of([("a/b", "x", 1), (None, "y", 2), ("c", None, 3)])
    rows = as_lazy(encoded(batch, pa.string()))
    assert rows.schema == SCHEMA
    assert rows.batch() == batch
    assert rows.filter(pa.array([False, True, True])).slice(1, 1).batch() == batch.slice(2)
    assert rows.encoded("n") is None
    column = rows.take(pa.array([2, 0])).encoded("url")
    assert column is not None
    assert decoded(column).to_pylist() == ["c", "a/b"]


ROW = pa.struct([("text", pa.large_string()), ("n", pa.int64())])


class Counted(ChosenRows):
    """Rows of columns that say which of them were made."""

    made: list[str] = []

    def column(self, name: str) -> pa.Array:
        self.made.append(name)
        return super().column(name)


def late() -> LazyRows:
    heap = Heap(ROW)
    heap.append(pa.array([{"text": "a" * 20, "n": 1}, {"text": None, "n": None}, {"text": "c", "n": 3}], ROW))
    columns = {"id": pa.array([7, 8]), "unread": pa.array(["x", "y"])}
    schema = pa.schema(
        [("id", pa.int64()), ("text", pa.large_string()), ("number", pa.int64()), ("other", pa.string())]
    )
    of_batch = ChosenRows(columns, np.array([0, 0, 1, 1]))
    stored = HeapRows(heap, np.array([2, 0, 1, 2]))
    return LazyRows(
        schema, [Part({"id": "id", "other": "unread"}, of_batch), Part({"text": "text", "number": "n"}, stored)]
    )


def test_lazy_rows_are_those_of_their_batch() -> None:
    rows = late()
    batch = as_batch(rows)
    assert rows.num_rows == batch.num_rows == 4
    assert batch.to_pydict() == {
        "id": [7, 7, 8, 8],
        "text": ["c", "a" * 20, None, "c"],
        "number": [3, 1, None, 3],
        "other": ["x", "x", "y", "y"],
    }
    assert as_batch(batch) is batch
    assert rows.select(["number"]).to_pydict() == {"number": [3, 1, None, 3]}


def test_lazy_rows_are_chosen_as_rows_of_a_batch_are() -> None:
    rows, batch = late(), late().batch()
    mask = pa.array([True, None, False, True])
    assert rows.filter(mask).batch() == batch.filter(mask)
    places = pa.array([3, 0, 0])
    assert rows.take(places).batch() == batch.take(places)
    assert rows.slice(1, 9).batch() == batch.slice(1, 9)
    assert rows.take(places).filter(pa.array([False, True, True])).slice(1, 1).batch() == batch.slice(0, 1)


def test_columns_that_are_not_asked_for_are_not_made() -> None:
    columns = {"a": pa.array([1, 2, 3]), "b": pa.array([4, 5, 6])}
    source = Counted(columns, np.arange(3))
    rows = LazyRows(pa.schema([("a", pa.int64()), ("b", pa.int64())]), [Part({"a": "a", "b": "b"}, source)])
    assert rows.column("a").to_pylist() == rows.column("a").to_pylist() == [1, 2, 3]
    assert Counted.made == ["a"]
