from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness, encoded
from tests.state.backends import states

from headgate.errors import BadRecord, UsageError
from headgate.operators.base import RestoredState
from headgate.operators.keys import partition
from headgate.operators.reduction import ReduceSpec
from headgate.operators.user_functions import Counter, UserFunctionError
from headgate.state.ttl import TTL

SCHEMA = pa.schema([("key", pa.large_string()), ("n", pa.int64())])


def add(accumulator: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    accumulator["n"] += record["n"]  # changed in place on purpose: state must not care
    return accumulator


SPEC = ReduceSpec(("key",), add, SCHEMA)


def batch(*rows: tuple[str, int]) -> pa.RecordBatch:
    return pa.record_batch([[r[0] for r in rows], [r[1] for r in rows]], schema=SCHEMA)


def running_sums(rows: list[tuple[str, int]]) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    found = []
    for key, n in rows:
        sums[key] = sums.get(key, 0) + n
        found.append((key, sums[key]))
    return found


def pairs(run: Harness) -> list[tuple[str, int]]:
    return [(row["key"], row["n"]) for row in run.out.rows()]


def test_every_record_emits_the_accumulator_after_it() -> None:
    run = Harness(SPEC)
    run.send(batch(("a", 1), ("b", 5), ("a", 2)))
    run.send(batch(("a", 3)))
    assert pairs(run) == [("a", 1), ("b", 5), ("a", 3), ("a", 6)]


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-9, 9)), min_size=1, max_size=40),
    data=st.data(),
)
def test_freezing_encoding_late_and_restoring_anywhere_change_nothing(
    rows: list[tuple[str, int]], data: st.DataObject
) -> None:
    run, held, found, at = Harness(SPEC), [], [], 0
    while at < len(rows):
        size = data.draw(st.integers(1, 8))
        run.send(batch(*rows[at : at + size]))
        at += size
        match data.draw(st.sampled_from(["go on", "freeze", "write", "forget", "restore"])):
            case "freeze":
                held.append(run.operator.freeze())
            case "write" if held:
                held.pop().encode()
            case "forget":
                held.clear()
            case "restore":
                found += pairs(run)
                run = Harness(SPEC, [encoded(run.operator, run.context)])
    assert found + pairs(run) == running_sums(rows)


def test_a_snapshot_holds_what_was_there_at_its_barrier() -> None:
    run = Harness(SPEC)
    run.send(batch(("a", 1)))
    first = run.operator.freeze()
    run.send(batch(("a", 10), ("b", 1)))
    second = run.operator.freeze()
    run.send(batch(("a", 100)))
    for frozen, expected in ((first, 2), (second, 12)):
        assert frozen is not None
        payload = memoryview(b"".join(bytes(memoryview(b)) for b in frozen.encode()))
        restored = Harness(SPEC, [type(run.snapshot())(0, 1, payload)])
        restored.send(batch(("a", 1)))
        assert pairs(restored) == [("a", expected)]


NESTED = pa.schema(
    [
        ("key", pa.large_string()),
        ("of", pa.struct([("n", pa.int64()), ("all", pa.large_list(pa.int64()))])),
        ("all", pa.large_list(pa.struct([("n", pa.int64())]))),
    ]
)


def nested(*numbers: int) -> pa.RecordBatch:
    rows = [{"key": "a", "of": {"n": n, "all": [n]}, "all": [{"n": n}]} for n in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=NESTED)


def add_within(accumulator: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    accumulator["of"]["n"] += record["of"]["n"]
    accumulator["of"]["all"] += record["of"]["all"]
    accumulator["all"][0]["n"] += record["all"][0]["n"]
    return accumulator


def test_a_function_may_change_structs_and_lists_of_its_accumulator_in_place() -> None:
    run = Harness(ReduceSpec(("key",), add_within, NESTED))
    run.send(nested(1, 2))
    frozen = run.operator.freeze()
    run.send(nested(3))
    expected = [(1, [1]), (3, [1, 2]), (6, [1, 2, 3])]
    assert [(row["of"]["n"], row["of"]["all"]) for row in run.out.rows()] == expected
    assert [row["all"] for row in run.out.rows()] == [[{"n": n}] for n, _ in expected]
    assert frozen is not None
    payload = memoryview(b"".join(bytes(memoryview(b)) for b in frozen.encode()))
    restored = Harness(ReduceSpec(("key",), add_within, NESTED), [RestoredState(0, 1, payload)])
    restored.send(nested(10))
    assert [(row["of"]["n"], row["of"]["all"]) for row in restored.out.rows()] == [(13, [1, 2, 10])]


def test_a_restore_at_another_parallelism_moves_every_key_to_its_owner() -> None:
    keys = [f"key-{i}" for i in range(40)]
    old = [Harness(SPEC, subtask=(i, 2)) for i in range(2)]
    for run, part in zip(old, partition(batch(*((k, 1) for k in keys)), ["key"], 128, 2), strict=True):
        assert part is not None
        run.send(part)
    states = [run.snapshot() for run in old]
    new = [Harness(SPEC, states, subtask=(i, 3)) for i in range(3)]
    for run, part in zip(new, partition(batch(*((k, 1) for k in keys)), ["key"], 128, 3), strict=True):
        assert part is not None
        run.send(part)
        frozen = run.operator.freeze()
        assert frozen is not None
        assert frozen.rows() == {"accumulators": part.num_rows}
    assert sorted(p for run in new for p in pairs(run)) == sorted((k, 2) for k in keys)


def test_a_function_that_raises_names_operator_and_record() -> None:
    run = Harness(ReduceSpec(("key",), lambda acc, row: 1 // 0, SCHEMA))
    with pytest.raises(UserFunctionError, match="ZeroDivisionError") as caught:
        run.send(batch(("a", 1), ("a", 2)))
    assert "operator 'node'" in str(caught.value)
    assert "'n': 2" in caught.value.record


@pytest.mark.parametrize("is_snapshot_open", [False, True])
@pytest.mark.parametrize(
    ("nonsense", "problem"),
    [
        (lambda acc: {"key": acc["key"]}, "the function returned no field 'n'"),
        (lambda acc: {**acc, "m": 1}, "the function returned the unknown field 'm'; declare it with schema="),
        (lambda acc: None, "the function returned None, as a function does without return, instead of a dict"),
        (lambda acc: {**acc, "n": "x"}, "the function returned str 'x' for field 'n', which is int64"),
        (lambda acc: {**acc, "key": "z"}, "the function changed the key columns ['key']"),
    ],
)
def test_a_result_that_does_not_fit_is_a_bad_record_and_leaves_the_accumulator(
    nonsense: Any, problem: str, is_snapshot_open: bool
) -> None:
    def function(acc: dict[str, Any], row: dict[str, Any]) -> Any:
        return nonsense(acc) if row["n"] == 100 else add(acc, row)

    run = Harness(ReduceSpec(("key",), function, SCHEMA), diverts=True)
    run.send(batch(("a", 1)))
    frozen = run.operator.freeze() if is_snapshot_open else None
    run.send(batch(("b", 5), ("a", 2), ("a", 100), ("a", 3), ("b", 100), ("b", 1)))
    assert pairs(run) == [("a", 1), ("b", 5), ("a", 3), ("a", 6), ("b", 6)]
    assert [bad["problem"] for bad in run.out.bad] == [problem] * 2
    assert [bad["record"] for bad in run.out.bad] == ["{'key': 'a', 'n': 100}", "{'key': 'b', 'n': 100}"]
    assert (frozen is not None) == is_snapshot_open
    with pytest.raises(BadRecord, match="refused a record"):
        Harness(ReduceSpec(("key",), function, SCHEMA)).send(batch(("a", 1), ("a", 100)))


def test_composite_keys_and_an_unknown_key() -> None:
    run = Harness(ReduceSpec(("key", "n"), lambda acc, row: acc, SCHEMA))
    run.send(batch(("a", 1), ("a", 2), ("a", 1)))
    assert pairs(run) == [("a", 1), ("a", 2), ("a", 1)]
    with pytest.raises(UsageError, match="no column 'x'"):
        ReduceSpec(("x",), add, SCHEMA).output_schema(SCHEMA, "sums")


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [
        (pa.int64(), float(2**60), 2**60),
        (pa.int64(), Fraction(4, 1), 4),
        (pa.int64(), Decimal("4.00"), 4),
        (pa.float64(), 3, 3.0),
        (pa.float32(), 0.1, float(np.float32(0.1))),
        (pa.large_binary(), bytearray(b"x"), b"x"),
        (pa.decimal128(9, 3), Decimal(7), Decimal("7.000")),
        (pa.decimal128(9, 3), np.int64(7), Decimal("7.000")),
        (pa.date32(), np.datetime64("2026-02"), date(2026, 2, 1)),
        (pa.timestamp("us"), datetime(2026, 2, 1, 5, tzinfo=timezone(timedelta(hours=5))), datetime(2026, 2, 1)),
        (pa.timestamp("us", "UTC"), datetime(2026, 2, 1), datetime(2026, 2, 1, tzinfo=ZoneInfo("UTC"))),
        (
            pa.timestamp("us", "UTC"),
            np.datetime64("2026-02-01T00:00", "s"),
            datetime(2026, 2, 1, tzinfo=ZoneInfo("UTC")),
        ),
        (pa.timestamp("us"), np.datetime64("NaT"), None),
        (pa.duration("us"), np.timedelta64(3, "h"), timedelta(hours=3)),
        (pa.large_list(pa.int64()), range(2), [0, 1]),
        (pa.large_list(pa.float64()), (1, None), [1.0, None]),
        (pa.struct({"a": pa.int64(), "b": pa.float64()}), {"b": 1}, {"a": None, "b": 1.0}),
    ],
)
def test_a_function_gets_what_was_emitted_whether_or_not_there_was_a_restore(
    dtype: pa.DataType, given: object, kept: object
) -> None:
    schema = pa.schema([("key", pa.int64()), ("value", dtype), ("seen", pa.large_string())])

    def function(accumulator: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        value = accumulator["value"]
        return {"key": 1, "value": given if row["seen"] else value, "seen": f"{type(value).__name__} {value!r}"}

    spec = ReduceSpec(("key",), function, schema)
    rows = pa.RecordBatch.from_pylist([{"key": 1}, {"key": 1, "seen": "given"}, {"key": 1}], schema=schema)
    run = Harness(spec)
    run.send(rows)
    run.send(rows.slice(2))
    restored = Harness(spec, [encoded(run.operator, run.context)])
    restored.send(rows.slice(2))
    assert [row["seen"] for row in [*run.out.rows()[2:], *restored.out.rows()]] == [
        f"{type(kept).__name__} {kept!r}"
    ] * 3


class Counting:
    """Counts its calls; one of its results does not fit."""

    def __init__(self) -> None:
        self.calls = Counter("calls")

    def __call__(self, accumulator: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        self.calls.add()
        return {**accumulator, "n": "x"} if row["n"] == 100 else add(accumulator, row)


def test_a_counter_counts_each_record_once_beside_a_bad_one() -> None:
    run = Harness(ReduceSpec(("key",), Counting(), SCHEMA), diverts=True)
    run.send(batch(("a", 1), ("a", 2), ("a", 100), ("a", 3)))
    assert pairs(run) == [("a", 1), ("a", 3), ("a", 6)]
    assert run.context.metrics.counters["calls"] == 3


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_key_without_a_record_for_as_long_as_its_ttl_begins_again(backend: str, is_restored: bool) -> None:
    spec = replace(SPEC, ttl=TTL("10s"))
    with states(backend) as worker:
        run = Harness(spec, worker=worker)
        run.send(batch(("a", 1), ("b", 1)))
        run.now_ms += 6_000
        run.send(batch(("a", 2)))
        run.now_ms += 4_000
        if is_restored:
            run = Harness(spec, [encoded(run.operator, run.context)], begun_ms=run.now_ms, worker=worker)
        run.send(batch(("a", 3), ("b", 10), ("b", 5)))
        assert pairs(run)[-3:] == [("a", 6), ("b", 10), ("b", 15)]
        run.now_ms += 10_000
        run.send(batch(("a", 1)))
        assert pairs(run)[-1:] == [("a", 1)]
        assert run.operator.freeze().rows() == {"accumulators": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize(("update", "total"), [("write", 1), ("read_and_write", 2)])
def test_a_refused_record_reads_the_total_and_does_not_write_it(update: Any, total: int) -> None:
    def function(accumulator: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        return {} if row["n"] == 100 else add(accumulator, row)

    run = Harness(ReduceSpec(("key",), function, SCHEMA, ttl=TTL("10s", update)), diverts=True)
    for n, after_ms in ((1, 0), (100, 6_000), (1, 6_000)):
        run.now_ms += after_ms
        run.send(batch(("a", n)))
    assert pairs(run) == [("a", 1), ("a", total)]


def test_a_ttl_may_be_given_to_totals_that_are_there() -> None:
    run = Harness(SPEC)
    run.send(batch(("a", 1)))
    assert replace(SPEC, ttl=TTL("1h")).state_text() == SPEC.state_text()
    limited = Harness(replace(SPEC, ttl=TTL("1h")), [encoded(run.operator, run.context)])
    limited.send(batch(("a", 1)))
    limited.now_ms += 3_600_000
    limited.send(batch(("a", 1)))
    assert pairs(limited) == [("a", 2), ("a", 1)]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_records_with_nothing_but_a_key_and_nulls_are_totals_too(backend: str) -> None:
    with states(backend) as worker:
        only = Harness(ReduceSpec(("key", "n"), lambda acc, row: acc, SCHEMA), worker=worker)
        only.send(batch(("a", 1), ("a", 1)))
        again = Harness(
            ReduceSpec(("key", "n"), lambda acc, row: acc, SCHEMA),
            [encoded(only.operator, only.context)],
            worker=worker,
        )
        again.send(batch(("a", 1)))
        assert pairs(again) == [("a", 1)]
        spec = ReduceSpec(("key",), lambda acc, row: {**acc, "of": row["of"] or acc["of"]}, NESTED)
        first = Harness(spec, worker=worker)
        first.send(pa.RecordBatch.from_pylist([{"key": "a"}], schema=NESTED))
        second = Harness(spec, [encoded(first.operator, first.context)], worker=worker)
        second.send(
            pa.RecordBatch.from_pylist([{"key": "a"}, {"key": "a", "of": {"n": 1, "all": None}}], schema=NESTED)
        )
        assert [row["of"] for row in second.out.rows()] == [None, {"n": 1, "all": None}]
        assert [row["all"] for row in second.out.rows()] == [None, None]
