"""Stored snapshots restore as they were: of ``reduce`` and of each kind of window.

The files are in ``tests/golden/state_1``: two former subtasks of each operator. ``run_cases`` made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness, encoded

from headgate.codec.snapshot import decode_sections
from headgate.model.schema_evolution import NO_OPERATOR_RULES
from headgate.model.state_schema import StateIdentity
from headgate.operators.base import WATERMARK_MAX_MS, OperatorSpec, RestoredState
from headgate.operators.keys import partition
from headgate.operators.reduction import ReduceSpec
from headgate.operators.specs import state_text
from headgate.operators.windows.aligned_windows import WindowOperators, window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate
from headgate.protocol.checkpoints.compatibility import Judged, judged

GOLDEN = Path(__file__).parents[1] / "golden" / "state_1"
SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("part", pa.int64()),
        ("n", pa.int64()),
        ("big", pa.uint64()),
        ("real", pa.float64()),
        ("at", pa.timestamp("us")),
        ("ts", pa.int64()),
    ]
)
KEYS = ("key", "part")
FORMER = 2
ROWS = 60


def row(i: int) -> dict[str, Any]:
    return {
        "key": f"kä-{i % 7}",
        "part": i % 2,
        "n": None if i % 5 == 0 else i - 30,
        "big": 2**64 - 1 - i,
        "real": None if i % 7 == 3 else i / 4,
        "at": None if i % 3 else 1_000_000 * i,
        "ts": 100 * i,
    }


BATCH = pa.RecordBatch.from_pylist([row(i) for i in range(ROWS)], SCHEMA)


def total(accumulator: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "n": (accumulator["n"] or 0) + (record["n"] or 0)}


def windowed(*aggregates: pl.Expr) -> Any:
    return window_operators(WindowedAggregate(KEYS, "ts", tumbling(1_000), aggregates), SCHEMA, "node")


DECOMPOSED = windowed(
    pl.len().alias("rows"),
    pl.col("n").sum(),
    pl.col("big").max(),
    pl.col("real").min(),
    pl.col("real").mean().alias("mean"),
    pl.col("at").max(),
)
KEPT = windowed(pl.col("n").n_unique(), pl.col("big").max(), pl.col("at").median())


@dataclass(frozen=True)
class Case:
    """An operator, and what is sent to it."""

    spec: OperatorSpec
    sent: list[pa.RecordBatch]
    watermarks_ms: tuple[int, ...] = ()
    """How far each former subtask has come; none for an operator without event time."""


def partial_rows() -> list[pa.RecordBatch]:
    combine = Harness(DECOMPOSED.combine)
    combine.send(BATCH)
    combine.operator.before_barrier()
    return combine.out.batches


CASES = {
    "reduce": Case(ReduceSpec(KEYS, total, SCHEMA), [BATCH]),
    "window-merge": Case(DECOMPOSED.window, partial_rows(), (1_999, 2_999)),
    "window-buffer": Case(KEPT.window, [BATCH], (1_999, 2_999)),
}


def runs_of(case: Case, parallelism: int, states: list[RestoredState] | None = None) -> list[Harness]:
    return [Harness(case.spec, states or [], subtask=(i, parallelism)) for i in range(parallelism)]


def send(case: Case, runs: list[Harness]) -> None:
    for sent in case.sent:
        for run, part in zip(runs, partition(sent, list(KEYS), 128, len(runs)), strict=True):
            if part is not None:
                run.send(part)


def run_cases() -> dict[str, bytes]:
    """Return what ``case-subtask`` has written for each case and former subtask."""
    written: dict[str, bytes] = {}
    for name, case in CASES.items():
        runs = runs_of(case, FORMER)
        send(case, runs)
        for run, watermark_ms in zip(runs, case.watermarks_ms or (0,) * FORMER, strict=True):
            if case.watermarks_ms:
                run.operator.on_watermark(watermark_ms)
        for i, run in enumerate(runs):
            written[f"{name}-{i}"] = bytes(encoded(run.operator, run.context).payload)
    return written


def golden(name: str) -> list[RestoredState]:
    files = [GOLDEN / f"{name}-{i}.snapshot" for i in range(FORMER)]
    return [RestoredState(i, FORMER, memoryview(file.read_bytes())) for i, file in enumerate(files)]


def rows_in(payload: bytes | memoryview) -> dict[str, Any]:
    return {
        name: bytes(data) if name == "meta" else pa.ipc.open_stream(pa.py_buffer(data)).read_all()
        for name, data in decode_sections(payload, "here").items()
    }


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_today_is_what_was_written_before(name: str) -> None:
    written = run_cases()
    for i, old in enumerate(golden(name)):
        found, expected = rows_in(written[f"{name}-{i}"]), rows_in(old.payload)
        assert list(found) == list(expected)
        assert found == expected


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_accumulators_of_an_old_snapshot_go_on(parallelism: int) -> None:
    case = CASES["reduce"]
    runs = runs_of(case, parallelism, golden("reduce"))
    send(case, runs)
    found = [r for run in runs for r in run.out.rows()]
    last = {(r["key"], r["part"]): r["n"] for r in found}
    before = dict.fromkeys(last, 0)
    for i in range(ROWS):
        one = row(i)
        before[one["key"], one["part"]] += 2 * (one["n"] or 0)
    assert len(last) == 14
    assert last == before


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("name", ["window-merge", "window-buffer"])
def test_windows_of_an_old_snapshot_fire_once_with_what_they_had(name: str, parallelism: int) -> None:
    case = CASES[name]
    whole = runs_of(case, 1)
    send(case, whole)
    whole[0].operator.on_watermark(WATERMARK_MAX_MS)
    fired_before = runs_of(case, FORMER)
    send(case, fired_before)
    for run, watermark_ms in zip(fired_before, case.watermarks_ms, strict=True):
        run.operator.on_watermark(watermark_ms)
    runs = runs_of(case, parallelism, golden(name))
    send(case, runs)  # what has fired is late, what has not doubles
    late = sum(run.context.metrics.counters.get("late", 0) for run in runs)
    again = runs_of(case, parallelism, golden(name))
    for run in again:
        run.operator.on_watermark(WATERMARK_MAX_MS)

    def results(found: list[Harness]) -> list[str]:
        return sorted(str(r) for run in found for r in run.out.rows())

    assert late == 24
    assert sorted(results(fired_before) + results(again)) == results(whole)


SUMS = (pl.col("n").sum().alias("sum"), pl.col("n").min().alias("min"), pl.col("n").mean().alias("mean"))
MEDIAN = (pl.col("n").median().alias("median"),)


def window_spec(dtype: pa.DataType, aggregates: tuple[pl.Expr, ...]) -> WindowOperators:
    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("n", dtype), ("m", pa.int64())])
    return window_operators(WindowedAggregate(("key",), "ts", tumbling(1_000), aggregates), schema, "counts")


def identity(dtype: pa.DataType, aggregates: tuple[pl.Expr, ...]) -> str:
    return state_text(window_spec(dtype, aggregates).window)


def found(old: str, new: str) -> Judged:
    return judged("counts", "checkpoint 7", old, new, NO_OPERATOR_RULES)


@pytest.mark.parametrize(("narrow", "wide"), [(pa.int32(), pa.int64()), (pa.float32(), pa.float64())])
def test_wider_columns_leave_the_partial_results_of_a_window_as_they_are(
    narrow: pa.DataType, wide: pa.DataType
) -> None:  # EV9
    assert identity(narrow, SUMS) == identity(wide, SUMS)
    refusal = found(identity(pa.int32(), SUMS), identity(pa.float64(), SUMS)).refusal
    assert refusal is not None
    assert "is [window-merge(" in refusal, "a sum of whole numbers is no sum of others"


def test_records_of_open_windows_become_wider_ones() -> None:  # EV9
    old, new = window_spec(pa.int32(), (*MEDIAN, pl.col("m").median())), window_spec(pa.float64(), MEDIAN)
    assert StateIdentity(identity(pa.int32(), MEDIAN)).text.startswith("window-buffer(")
    assert found(state_text(old.window), state_text(new.window)) == Judged(
        changes=(
            "operator 'counts': in state 'records', int32 becomes double in 'n'",
            "operator 'counts': in state 'records', 'm' is removed",
        )
    )
    run = Harness(old.window)
    rows = [{"key": 1, "ts": at * 1_000, "n": at, "m": 0} for at in (10, 20, 60)]
    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("n", pa.int32()), ("m", pa.int64())])
    run.send(pa.RecordBatch.from_pylist(rows, schema=schema))
    later = Harness(new.window, [run.snapshot()])
    wider = schema.set(2, pa.field("n", pa.float64()))
    later.send(pa.RecordBatch.from_pylist([{"key": 1, "ts": 70_000, "n": 80.5, "m": 0}], schema=wider))
    later.operator.on_watermark(5_000)
    assert [row["median"] for row in later.out.rows()] == [40.0]
