"""Sessions that emit more than once: what their changes make, against a model that takes records one by one."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal
from tests.conftest import IS_DEEP
from tests.operators.harness import Harness, Shuffled, applied
from tests.state.backends import IN_FILES, choose

from headgate.errors import UsageError
from headgate.model.graph import OutputTag
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.windows.aligned_windows import WindowOperators
from headgate.operators.windows.session_windows import session_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import Emission, WindowedAggregate

GAP_MS, LATENESS_MS, EARLY_MS = 100, 300, 1_000
SCHEMA = pa.schema([("key", pa.large_string()), ("at", pa.timestamp("us")), ("v", pa.int64())])
EPOCH = datetime(1970, 1, 1)
DECOMPOSED = (pl.len().alias("n"), pl.col("v").sum().alias("total"), pl.col("v").var().alias("spread"))
KEPT = (*DECOMPOSED, pl.col("v").median().alias("median"), pl.col("v").last().alias("last"))
KEYS = ("key", "window_start")
Rows = list[dict[str, Any]]


def at(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def sent(*rows: tuple[int, int], key: str = "a") -> pa.RecordBatch:
    return batch_of([{"key": key, "at": at(ms), "v": v} for ms, v in rows])


def batch_of(rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def operators_of(emission: Emission, aggregates: tuple[pl.Expr, ...] = DECOMPOSED) -> WindowOperators:
    aggregate = WindowedAggregate(("key",), "at", tumbling(GAP_MS), aggregates, emission)
    return session_operators(aggregate, SCHEMA, "node")


class Model:
    """Sessions as lists of rows: those that are kept, and those that take no records any more."""

    def __init__(self, lateness_ms: int) -> None:
        self._lateness = timedelta(milliseconds=lateness_ms)
        self._kept: list[tuple[str, datetime, datetime, Rows]] = []
        self._gone: list[tuple[str, datetime, datetime, Rows]] = []
        self._horizon = datetime.min
        self.late: Rows = []

    def add(self, row: dict[str, Any]) -> None:
        start, end, rows, others = row["at"], row["at"] + timedelta(milliseconds=GAP_MS), [row], []
        for session in self._kept:
            if session[0] == row["key"] and session[1] < end and start < session[2]:
                start, end, rows = min(start, session[1]), max(end, session[2]), session[3] + rows
            else:
                others.append(session)
        if len(rows) == 1 and self._is_gone(end):
            self.late.append(row)
            return
        self._kept = [*others, (row["key"], start, end, rows)]

    def _is_gone(self, end: datetime) -> bool:
        return self._horizon > datetime.min and end + self._lateness <= self._horizon

    def watermark(self, watermark_ms: int) -> None:
        self._horizon = at(watermark_ms + 1)
        self._gone += [session for session in self._kept if self._is_gone(session[2])]
        self._kept = [session for session in self._kept if not self._is_gone(session[2])]

    def table(self, aggregates: tuple[pl.Expr, ...], *, early: bool) -> pl.DataFrame:
        frames = []
        for key, start, end, rows in [*self._gone, *self._kept]:
            if early or end <= self._horizon:
                bounds = pl.DataFrame({"key": [key], "window_start": [start], "window_end": [end]})
                records = pl.DataFrame(pl.from_arrow(batch_of(sorted(rows, key=lambda row: row["n"]))))
                frames.append(bounds.hstack(records.select(*aggregates)))
        return pl.concat(frames).sort(KEYS) if frames else pl.DataFrame()


EMISSIONS = {
    "late": Emission(LATENESS_MS),
    "early": Emission(0, None, EARLY_MS),
    "both": Emission(LATENESS_MS, OutputTag("late"), EARLY_MS),
    "late-taken-back": Emission(LATENESS_MS, retractions=True),
    "both-taken-back": Emission(LATENESS_MS, OutputTag("late"), EARLY_MS, retractions=True),
}
AGGREGATES = {"decomposed": DECOMPOSED, "kept": KEPT}


CASES = [("memory", emitted, kind) for emitted in EMISSIONS for kind in AGGREGATES]


@pytest.mark.parametrize(("backend", "emitted", "kind"), [*CASES, (IN_FILES, "both-taken-back", "kept")])
def test_changes_make_the_sessions_that_single_records_make(backend: str, emitted: str, kind: str) -> None:
    emission, aggregates = EMISSIONS[emitted], AGGREGATES[kind]
    operators = operators_of(emission, aggregates)
    for seed in range(30 if IS_DEEP else 1):
        with choose(backend):
            check_history(operators, emission, aggregates, random.Random(seed))


def check_history(
    operators: WindowOperators, emission: Emission, aggregates: tuple[pl.Expr, ...], rng: random.Random
) -> None:
    assert (operators.combine is not None) == (aggregates is DECOMPOSED and emission.late is None)
    pipeline, model = Shuffled(operators, 2), Model(emission.lateness_ms)
    found: Rows = []
    side: Rows = []
    late = count = 0

    used: set[int] = set()

    def moment(now_ms: int) -> datetime:
        """A time that no record has: a session may not begin when one began that is forgotten, as both are one key."""
        while (found := now_ms + rng.randrange(-700, 200)) in used:
            pass
        used.add(found)
        return at(found)

    def take() -> None:
        nonlocal late
        for one in pipeline.windows:
            side.extend(row for batch in one.out.tagged.pop(OutputTag("late"), []) for row in batch.to_pylist())
        found.extend(pipeline.take())

    for step in range(12):
        now_ms = 1_000 + 150 * step
        more = [
            {
                "key": rng.choice("ab"),
                "at": moment(now_ms),
                "v": rng.choice([None, 1, 2, 5]),
            }
            for _ in range(rng.choice([1, 2, 8]))
        ]
        pipeline.send(0, batch_of(more))
        for row in more:
            model.add({**row, "n": count})
            count += 1
        take()
        if emission.early_ms:
            for window in pipeline.windows:
                window.advance(EARLY_MS)
            take()
        check(model, found, aggregates, emission, early=emission.early_ms > 0)
        pipeline.watermark(now_ms)
        model.watermark(now_ms)
        take()
        check(model, found, aggregates, emission, early=emission.early_ms > 0)
        if rng.random() < 0.4:
            states = pipeline.snapshot()
            late += pipeline.late()
            pipeline = Shuffled(operators, rng.choice([1, 2, 3, 5]), states)
    pipeline.watermark(WATERMARK_MAX_MS)
    model.watermark(10**9)
    take()
    check(model, found, aggregates, emission, early=False)
    assert late + pipeline.late() == len(model.late)
    if emission.late is not None:
        by_time = [{k: v for k, v in row.items() if k != "n"} for row in model.late]
        assert sorted(side, key=str) == sorted(by_time, key=str)


def check(model: Model, found: Rows, aggregates: tuple[pl.Expr, ...], emission: Emission, *, early: bool) -> None:
    table = applied(found, KEYS, retractions=emission.retractions, strict=True)
    expected = model.table(aggregates, early=early)
    assert len(table) == len(expected)
    if table:
        frame = pl.DataFrame([{k: v for k, v in row.items() if k != "op"} for row in table], schema=expected.schema)
        assert_frame_equal(frame.sort(KEYS), expected, check_dtypes=False)


def changes(harness: Shuffled) -> list[tuple[str, int, int, int | None]]:
    ms = timedelta(milliseconds=1)
    return [
        (row["op"], (row["window_start"] - EPOCH) // ms, (row["window_end"] - EPOCH) // ms, row["n"])
        for row in harness.take()
    ]


def test_a_late_record_that_joins_two_emitted_sessions_deletes_one_of_them() -> None:
    pipeline = Shuffled(operators_of(Emission(LATENESS_MS)), 1)
    pipeline.send(0, sent((0, 1), (150, 1)))
    pipeline.watermark(300)
    assert changes(pipeline) == [("insert", 0, 100, 1), ("insert", 150, 250, 1)]
    pipeline.send(0, sent((80, 1)))
    assert changes(pipeline) == [("delete", 150, 250, None), ("update_after", 0, 250, 3)]
    pipeline.send(0, sent((240, 1)))
    assert changes(pipeline) == [("delete", 0, 250, None)]  # it goes on until 340, which event time has not passed yet
    pipeline.watermark(339)
    assert changes(pipeline) == [("insert", 0, 340, 4)]
    pipeline.watermark(WATERMARK_MAX_MS)
    assert changes(pipeline) == []


def test_retractions_take_back_the_results_that_were_emitted() -> None:
    pipeline = Shuffled(operators_of(Emission(LATENESS_MS, retractions=True)), 1)
    pipeline.send(0, sent((0, 1), (150, 1)))
    pipeline.watermark(300)
    assert changes(pipeline) == [("insert", 0, 100, 1), ("insert", 150, 250, 1)]
    pipeline.send(0, sent((80, 1)))
    joined = [("delete", 150, 250, 1), ("update_before", 0, 100, 1), ("update_after", 0, 250, 3)]
    assert changes(pipeline) == joined
    pipeline.send(0, sent((240, 1)))
    assert changes(pipeline) == [("delete", 0, 250, 3)]
    pipeline.watermark(339)
    assert changes(pipeline) == [("insert", 0, 340, 4)]


def test_early_results_of_a_session_that_goes_on_are_updated() -> None:
    pipeline = Shuffled(operators_of(Emission(LATENESS_MS, None, EARLY_MS, retractions=True)), 1)
    window: Harness = pipeline.windows[0]
    pipeline.send(0, sent((0, 1)))
    pipeline.watermark(100)
    assert changes(pipeline) == [("insert", 0, 100, 1)]
    pipeline.send(0, sent((50, 1)))
    assert changes(pipeline) == []
    window.advance(EARLY_MS)
    assert changes(pipeline) == [("update_before", 0, 100, 1), ("update_after", 0, 150, 2)]


def test_an_earlier_record_gives_a_session_another_row() -> None:
    pipeline = Shuffled(operators_of(Emission(LATENESS_MS)), 1)
    pipeline.send(0, sent((100, 1)))
    pipeline.watermark(300)
    assert changes(pipeline) == [("insert", 100, 200, 1)]
    pipeline.send(0, sent((50, 1)))
    assert changes(pipeline) == [("delete", 100, 200, None), ("insert", 50, 200, 2)]


def test_a_session_is_kept_for_the_lateness_and_no_longer() -> None:
    pipeline = Shuffled(operators_of(Emission(LATENESS_MS)), 1)
    pipeline.send(0, sent((0, 1)))
    pipeline.watermark(398)
    assert changes(pipeline) == [("insert", 0, 100, 1)]
    pipeline.send(0, sent((1, 1)))
    assert changes(pipeline) == [("update_after", 0, 101, 2)]
    pipeline.watermark(400)
    pipeline.send(0, sent((1, 1), (2, 1)))
    assert changes(pipeline) == [("insert", 2, 102, 1)]
    assert pipeline.late() == 1


def test_what_has_not_changed_is_not_emitted_again() -> None:
    pipeline = Shuffled(operators_of(Emission(0, None, EARLY_MS)), 1)
    window: Harness = pipeline.windows[0]
    pipeline.send(0, sent((0, 1)))
    window.advance(EARLY_MS)
    assert changes(pipeline) == [("insert", 0, 100, 1)]
    window.advance(EARLY_MS)
    pipeline.watermark(200)
    assert changes(pipeline) == []


def test_early_results_after_a_restore_are_those_that_are_due() -> None:
    operators = operators_of(Emission(0, None, EARLY_MS))
    first = Shuffled(operators, 1)
    first.send(0, sent((0, 1)))
    first.windows[0].advance(EARLY_MS)
    first.send(0, sent((500, 1)))
    states = first.snapshot()
    second = Shuffled(operators, 2, states)
    for window in second.windows:
        window.advance(EARLY_MS)
    assert changes(second) == [("insert", 500, 600, 1)]


def test_the_column_of_the_changes_is_not_a_result() -> None:
    with pytest.raises(UsageError, match="has a column 'op' of its changes"):
        operators_of(Emission(LATENESS_MS), (pl.len().alias("op"),))
