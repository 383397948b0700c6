from __future__ import annotations

import pickle  # noqa: TID251 (an error of our own making)
from collections import deque
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness

from headgate.errors import BadRecord, UsageError
from headgate.operators.functions import MapBatchesSpec, RowFunctionSpec, RowVerb, RowWriter
from headgate.operators.user_functions import UserFunctionError, unreadable_rows

SCHEMA = pa.schema([("name", pa.large_string()), ("size", pa.int64()), ("at", pa.timestamp("us"))])
NOON = datetime(2026, 1, 1, 12)
BATCH = pa.record_batch([["a", "b"], [1, None], [NOON, NOON]], schema=SCHEMA)


def test_map_returns_the_changed_rows_in_order() -> None:
    run = Harness(RowFunctionSpec(RowVerb.MAP, lambda row: {**row, "name": row["name"] * 2}))
    run.send(BATCH)
    assert run.out.rows() == [
        {"name": "aa", "size": 1, "at": NOON},
        {"name": "bb", "size": None, "at": NOON},
    ]


def test_map_with_schema_makes_other_columns() -> None:
    spec = RowFunctionSpec(RowVerb.MAP, lambda row: {"n": row["size"] or 0}, {"n": int})
    run = Harness(spec)
    run.send(BATCH)
    assert run.out.rows() == [{"n": 1}, {"n": 0}]
    assert spec.output_schema(SCHEMA, "node") == pa.schema([("n", pa.int64())])


def test_flat_map_emits_every_row_and_none_means_nothing() -> None:
    run = Harness(RowFunctionSpec(RowVerb.FLAT_MAP, lambda row: [row, row] if row["size"] else None))
    run.send(BATCH)
    assert [row["name"] for row in run.out.rows()] == ["a", "a"]


def test_filter_keeps_rows_for_which_the_function_is_true() -> None:
    run = Harness(RowFunctionSpec(RowVerb.FILTER, lambda row: row["size"] is None))
    run.send(BATCH)
    assert [row["name"] for row in run.out.rows()] == ["b"]


def broken(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "size": 1 // (row["size"] or 0)}


@pytest.mark.parametrize("verb", list(RowVerb))
def test_an_exception_names_operator_and_record_and_shows_only_the_users_frames(verb: RowVerb) -> None:
    run = Harness(RowFunctionSpec(verb, lambda row: [broken(row)] if verb is RowVerb.FLAT_MAP else broken(row)))
    with pytest.raises(UserFunctionError) as caught:
        run.send(BATCH)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.node == "node"
    assert "'name': 'b'" in error.record
    assert "ZeroDivisionError" in error.traceback_text
    assert "in broken" in error.traceback_text
    assert 'operators/functions.py", line' not in error.traceback_text


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"n": "x"}, "the function returned str 'x' for field 'n', which is int64"),
        ({}, "the function returned no field 'n'"),
        ({"n": 1, "m": 2}, "the function returned the unknown field 'm'; declare it with schema="),
        ({"m": 2}, "the function returned no field 'n'"),
        (7, "the function returned int instead of a dict"),
        (None, "the function returned None, as a function does without return, instead of a dict"),
    ],
)
def test_a_result_that_does_not_fit_is_a_bad_record(result: object, problem: str) -> None:
    spec = RowFunctionSpec(RowVerb.MAP, lambda row: result if row["size"] else {"n": 5}, {"n": pa.int64()})
    run = Harness(spec, diverts=True)
    run.send(BATCH)
    assert run.out.rows() == [{"n": 5}]
    assert [bad["problem"] for bad in run.out.bad] == [problem]
    with pytest.raises(BadRecord, match="refused a record"):
        Harness(spec).send(BATCH)


@pytest.mark.parametrize("verb", [RowVerb.MAP, RowVerb.FLAT_MAP])
def test_the_record_of_a_bad_result_is_the_one_that_came_in(verb: RowVerb) -> None:
    def function(row: dict[str, Any]) -> Any:
        n = row.pop("n")
        if n == 1:
            raise ValueError("one")
        made = {"n": "text" if n in (0, 3) else n}
        return made if verb is RowVerb.MAP else [{"n": n}] * (n % 3) + [made]

    run = Harness(RowFunctionSpec(verb, function, {"n": pa.int64()}, diverts_exceptions=True), diverts=True)
    run.send(pa.record_batch({"n": [0, 1, 2, 3, 4]}))
    assert sorted(bad["record"] for bad in run.out.bad if "returned" in bad["problem"]) == ["{'n': 0}", "{'n': 3}"]


def test_times_that_datetime_cannot_hold_are_bad_records() -> None:
    late = pa.record_batch([["a", "b"], [1, 2], pa.array([0, 1 << 62]).view(pa.timestamp("us"))], schema=SCHEMA)
    for verb in RowVerb:
        run = Harness(
            RowFunctionSpec(verb, lambda row, verb=verb: [row] if verb is RowVerb.FLAT_MAP else row), diverts=True
        )
        run.send(late)
        assert [row["name"] for row in run.out.rows()] == ["a"]
        assert run.out.bad[0]["problem"].startswith("its time 'at' is outside the years 1 to 9999")
    days = pa.array([-719_163, -719_162, 2_932_896, 2_932_897], pa.int32()).view(pa.date32())
    unreadable = unreadable_rows(days)
    assert unreadable is not None
    assert unreadable.tolist() == [True, False, False, True]
    assert days.slice(1, 2).to_pylist() == [date.min, date.max]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (pa.array([1_000, 1], pa.duration("ns")), "has a part of a microsecond"),
        (pa.array([1_000, 1], pa.time64("ns")), "has a part of a microsecond"),
        (pa.array([1, 1 << 62], pa.duration("ms")), "is longer than Python's timedelta can hold"),
        (pa.array([[], [0, 1 << 62]], pa.large_list(pa.timestamp("us"))), "has a time or duration"),
        (pa.array([None, [{"d": 1 << 30}]], pa.large_list(pa.struct({"d": pa.date32()}))), "has a time or duration"),
    ],
    ids=lambda one: str(one.type) if isinstance(one, pa.Array) else "",
)
def test_a_time_that_python_cannot_hold_never_becomes_another_one(column: pa.Array, problem: str) -> None:
    batch = pa.record_batch({"t": column})
    run = Harness(RowFunctionSpec(RowVerb.MAP, lambda row: row), diverts=True)
    run.send(batch)
    assert run.out.rows() == batch.slice(0, 1).to_pylist()
    assert [bad["problem"].startswith(f"its time 't' {problem}") for bad in run.out.bad] == [True]
    assert unreadable_rows(column.slice(1)).tolist() == [True]


def test_map_batches_gets_a_frame_or_by_hint_an_arrow_batch() -> None:
    def arrow(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(["size"])

    for function in (lambda frame: frame.select("size"), arrow):
        spec = MapBatchesSpec(function)
        run = Harness(spec)
        run.send(BATCH)
        assert run.out.rows() == [{"size": 1}, {"size": None}]
        assert spec.output_schema(SCHEMA, "node").names == ["size"]


def test_map_batches_that_fails_on_an_empty_batch_asks_for_a_schema() -> None:
    spec = MapBatchesSpec(lambda frame: frame.select(pl.lit(frame["name"][0])))
    with pytest.raises(UsageError, match="failed on an empty batch"):
        spec.output_schema(SCHEMA, "node")


def test_map_batches_that_returns_other_columns_fails_naming_them() -> None:
    run = Harness(MapBatchesSpec(lambda frame: frame.select("size"), {"count": pl.Int64}))
    with pytest.raises(UserFunctionError, match="count: int64"):
        run.send(BATCH)


def test_map_batches_that_returns_a_column_that_contradicts_itself_fails_naming_the_operator() -> None:
    text = pa.LargeStringArray.from_buffers(1, pa.array([0, 1]).buffers()[1], pa.py_buffer(b"\xff"))

    def broken(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"text": text})

    run = Harness(MapBatchesSpec(broken, {"text": str}))
    with pytest.raises(UserFunctionError, match="UTF8"):
        run.send(BATCH)


def test_an_unknown_type_in_schema_is_refused() -> None:
    with pytest.raises(UsageError, match="gives column 'n' the type"):
        RowFunctionSpec(RowVerb.MAP, lambda row: row, {"n": "banana"}).output_schema(SCHEMA, "node")


def inverse(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "size": 6 // row["size"]}


SIZES = pa.record_batch([["a", "b", "c"], [3, 0, 2], [NOON] * 3], schema=SCHEMA)


@pytest.mark.parametrize(
    ("verb", "function", "sizes"),
    [
        (RowVerb.MAP, inverse, [2, 3]),
        (RowVerb.FLAT_MAP, lambda row: [inverse(row)], [2, 3]),
        (RowVerb.FILTER, inverse, [3, 2]),
    ],
)
def test_an_exception_is_diverted_with_its_traceback_by_choice(verb: RowVerb, function: Any, sizes: list[int]) -> None:
    run = Harness(RowFunctionSpec(verb, function, diverts_exceptions=True), diverts=True)
    run.send(SIZES)
    assert [row["size"] for row in run.out.rows()] == sizes
    (bad,) = run.out.bad
    problem = bad["problem"].splitlines()
    assert problem[0].startswith("the function raised ZeroDivisionError: ")
    assert problem[1] == "Traceback (most recent call last):"
    assert __file__ in bad["problem"]
    assert "headgate/operators/functions.py" not in bad["problem"]  # the user's own frames only
    assert bad["record"].startswith("{'name': 'b', 'size': 0")


def test_a_flat_map_that_raises_half_way_emits_nothing_of_that_record() -> None:
    def half(row: dict[str, Any]) -> Any:
        yield row
        yield inverse(row)

    run = Harness(RowFunctionSpec(RowVerb.FLAT_MAP, half, diverts_exceptions=True), diverts=True)
    run.send(SIZES)
    assert [row["name"] for row in run.out.rows()] == ["a", "a", "c", "c"]
    assert len(run.out.bad) == 1


def test_a_batch_of_failures_only_is_no_output() -> None:
    run = Harness(RowFunctionSpec(RowVerb.MAP, lambda row: {}[row["name"]], diverts_exceptions=True), diverts=True)
    run.send(SIZES)
    assert run.out.rows() == []
    assert len(run.out.bad) == 3


def test_a_row_is_emitted_as_it_was_when_it_was_returned_or_yielded() -> None:
    schema = pa.schema([("n", pa.int64()), ("all", pa.large_list(pa.int64()))])
    batch = pa.RecordBatch.from_pylist([{"n": 1, "all": [1]}, {"n": 10, "all": [10]}], schema)
    one = {"n": 0, "all": list[int]()}

    def again(row: dict[str, Any]) -> dict[str, Any]:
        one["n"] = row["n"]
        one["all"].append(row["n"])
        return one

    def twice(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield row
        row["n"] += 1
        row["all"].append(2)
        yield row

    for verb, function, expected in (
        (RowVerb.MAP, again, [(1, [1]), (10, [1, 10])]),
        (RowVerb.FLAT_MAP, twice, [(1, [1]), (2, [1, 2]), (10, [10]), (11, [10, 2])]),
    ):
        run = Harness(RowFunctionSpec(verb, function))
        run.send(batch)
        assert [(row["n"], row["all"]) for row in run.out.rows()] == expected


@pytest.mark.parametrize(
    ("dtype", "value", "change", "expected"),
    [
        (pa.large_list(pa.int64()), np.array([0, 5]), lambda found: found.put(0, found[0] + 1), [[1, 5], [2, 5]]),
        (pa.large_list(pa.int64()), deque(), lambda found: found.append(7), [[7], [7, 7]]),
        (pa.large_binary(), bytearray(), lambda found: found.append(97), [b"a", b"aa"]),
        (pa.large_list(pa.large_binary()), [bytearray()], lambda found: found[0].append(97), [[b"a"], [b"aa"]]),
    ],
)
def test_values_of_a_row_are_emitted_as_they_were(dtype: pa.DataType, value: Any, change: Any, expected: Any) -> None:
    def again(row: dict[str, Any]) -> dict[str, Any]:
        change(value)
        return {"found": value}

    run = Harness(RowFunctionSpec(RowVerb.MAP, again, pa.schema([("found", dtype)])))
    run.send(SIZES.slice(0, 2))
    assert [row["found"] for row in run.out.rows()] == expected


INT = pa.int64()
NESTED = pa.large_list(pa.struct([("n", pa.int32()), ("t", pa.large_string())]))


def written(dtype: pa.DataType, *values: Any) -> tuple[list[Any], list[str]]:
    batch, refused = RowWriter(pa.schema([("x", dtype), ("y", INT)])).batch([{"x": v, "y": 0} for v in values])
    return batch.column("x").to_pylist(), [one.problem for one in refused]


@pytest.mark.parametrize("value", [1.5, Decimal("1.5"), Fraction(3, 2), np.float64(1.5), np.float32(-0.5)])
@pytest.mark.parametrize("others", [(1, 2), (None, 0, 2), (np.int64(1), 1.0), ()])
def test_a_number_that_is_not_whole_is_refused_for_an_integer_and_its_neighbours_pass(
    value: Any, others: tuple[Any, ...]
) -> None:
    kept, problems = written(INT, *others, value, *others)
    assert kept == [*others, *others]
    assert problems == [f"the function returned {type(value).__name__} {value!r} for field 'x', which is int64"]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (INT, [2.0, None, 3]),
        (INT, [None, None]),
        (INT, [Decimal(2), 0.0, Fraction(4, 2)]),
        (INT, [np.int64(2**62), np.int64(2**62), np.int64(2**62)]),
        (pa.uint64(), [2**64 - 1, 2**64 - 1]),
        (pa.int8(), [-128, 127]),
        (pa.float64(), [1.5, 2, None]),
        (pa.large_list(INT), [[1, None], [], None, [2.0]]),
        (NESTED, [[{"n": 1, "t": "a"}, None, {"n": None, "t": None}], None, []]),
    ],
    ids=str,
)
def test_whole_numbers_and_nulls_pass_whatever_their_type(dtype: pa.DataType, values: list[Any]) -> None:
    assert written(dtype, *values) == (values, [])


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (pa.large_list(INT), [1, 2], [1, 2.5]),
        (pa.large_list(INT), [1], np.array([0.5])),
        (NESTED, [{"n": 1, "t": "a"}], [None, {"n": 1.5, "t": "a"}]),
        (pa.struct([("a", pa.large_list(pa.uint8()))]), {"a": [1]}, {"a": [1.5]}),
    ],
    ids=str,
)
def test_integers_inside_lists_and_structs_are_looked_at_too(dtype: pa.DataType, good: Any, bad: Any) -> None:
    kept, problems = written(dtype, good, bad, good)
    assert kept == [good, good]
    assert len(problems) == 1
