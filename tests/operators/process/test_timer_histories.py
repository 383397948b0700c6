"""Any history of records, watermarks, ticks and restores fires what a few lines of plain Python fire, in both forms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import BORN_MS, Harness
from tests.state.backends import DATABASES, EACH, Chosen, choose

import headgate as hg
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.keys import partition
from headgate.operators.process import batch_process
from headgate.operators.process.connected_process import process_spec
from headgate.state.rocksdb import timers as rocks_timers

SCHEMA = pa.schema([("key", pa.int64()), ("at", pa.int64()), ("is_event", pa.bool_()), ("deletes", pa.bool_())])
FIRED = {"key": pa.int64(), "at": pa.int64(), "is_event": pa.bool_()}
LAST_MS = 60
"""No timer registers another one behind it, so that the end comes."""


def next_of(key: int, at: int) -> tuple[int | None, int | None]:
    """Return what a timer registers, and what it deletes: later times, its own, and earlier ones."""
    what = (key * 7 + at) % 6
    registered = {0: at + 3, 1: at + 1, 2: at, 3: at - 2}.get(what)
    deleted = {1: at + 4, 4: at + 2, 2: at - 1}.get(what)
    return (None if at > LAST_MS else registered), deleted


class ByRow(hg.ProcessFunction):
    schema = FIRED

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.change(context, row["is_event"], row["at"], row["deletes"])

    def change(self, context: hg.ProcessContext, is_event: bool, at: int, deletes: bool) -> None:
        kind = "event_time" if is_event else "processing_time"
        offset = 0 if is_event else BORN_MS
        getattr(context.timers, f"{'delete' if deletes else 'register'}_{kind}")(at + offset)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> list[dict[str, Any]]:
        at = timer.time_ms - (0 if timer.is_event_time else BORN_MS)
        registered, deleted = next_of(context.key, at)
        for other, deletes in ((registered, False), (deleted, True)):
            if other is not None:
                self.change(context, timer.is_event_time, other, deletes)
        return [{"key": context.key, "at": at, "is_event": timer.is_event_time}]


class ByBatch(hg.BatchProcessFunction):
    schema = FIRED

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        for row in range(len(batch)):  # one after the other: the order of rows counts
            chosen = pl.Series([index == row for index in range(len(batch))])
            is_event, deletes = batch["is_event"][row], batch["deletes"][row]
            self.change(context, is_event, batch["at"], deletes, chosen)

    def change(self, context: hg.BatchContext, is_event: bool, at: pl.Series, deletes: bool, where: pl.Series) -> None:
        kind = "event_time" if is_event else "processing_time"
        offset = 0 if is_event else BORN_MS
        getattr(context.timers, f"{'delete' if deletes else 'register'}_{kind}")(at + offset, where=where)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        at = timers.times_ms - (0 if timers.is_event_time else BORN_MS)
        keys = context.keys.frame()
        found = [next_of(*pair) for pair in zip(keys["key"], at, strict=True)]
        for index, deletes in ((0, False), (1, True)):
            others = pl.Series([pair[index] for pair in found], dtype=pl.Int64)
            self.change(context, timers.is_event_time, others, deletes, others.is_not_null())
        return keys.with_columns(at=at, is_event=pl.lit(timers.is_event_time))


class Model:
    """The timers of one kind of one key."""

    def __init__(self) -> None:
        self.pending: set[int] = set()

    def change(self, at: int, deletes: bool) -> None:
        (self.pending.discard if deletes else self.pending.add)(at)

    def fire(self, key: int, until: int) -> list[int]:
        fired: list[int] = []
        waiting: list[tuple[int, bool]] = []
        while self.pending and (at := min(self.pending)) <= until:
            self.pending.remove(at)
            fired.append(at)
            registered, deleted = next_of(key, at)
            for other, deletes in ((registered, False), (deleted, True)):
                if other is not None and other <= at:
                    waiting.append((other, deletes))
                elif other is not None:
                    self.change(other, deletes)
        for other, deletes in waiting:
            self.change(other, deletes)
        return fired


@pytest.fixture(autouse=True, params=EACH)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rocks_timers, "FRONT_MAX", 4)
        yield


in_memory = pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
on_rocksdb = pytest.mark.parametrize("_on_each_backend", DATABASES, indirect=True)


records = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 50), st.booleans(), st.sampled_from([False, False, True])), max_size=8
)
steps = [
    st.tuples(st.just("records"), records),
    st.tuples(st.just("watermark"), st.integers(1, 15)),
    st.tuples(st.just("restore"), st.integers(1, 3)),
]
ticks = st.tuples(st.just("tick"), st.integers(1, 15))
"""By batch a tick calls the function once, so by row alone it fires all that a model would."""


def fired_by(runs: list[Harness]) -> dict[tuple[int, bool], list[int]]:
    found: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for run in runs:
        for row in run.out.rows():
            found[row["key"], row["is_event"]].append(row["at"])
        run.out.batches.clear()
    return dict(found)


@in_memory
@given(history=st.lists(st.one_of(*steps, ticks), max_size=14))
@settings(max_examples=60)
def test_any_history_by_row_fires_what_plain_python_fires(history: list[tuple[str, Any]]) -> None:
    check(ByRow(), history)


@in_memory
@given(history=st.lists(st.one_of(*steps), max_size=14))
@settings(max_examples=60)
def test_any_history_by_batch_fires_what_plain_python_fires(history: list[tuple[str, Any]]) -> None:
    check(ByBatch(), history)


@on_rocksdb
@given(history=st.lists(st.one_of(*steps, ticks), max_size=14))
@settings(max_examples=10)
def test_any_history_by_row_on_rocksdb_fires_what_plain_python_fires(history: list[tuple[str, Any]]) -> None:
    check(ByRow(), history)


@on_rocksdb
@given(history=st.lists(st.one_of(*steps), max_size=14))
@settings(max_examples=10)
def test_any_history_by_batch_on_rocksdb_fires_what_plain_python_fires(history: list[tuple[str, Any]]) -> None:
    check(ByBatch(), history)


def check(function: Any, history: list[tuple[str, Any]]) -> None:
    spec = process_spec("node", ("key",), function, SCHEMA)
    runs = [Harness(spec, begun_ms=0, worker=Chosen.worker)]
    models: dict[tuple[int, bool], Model] = defaultdict(Model)
    watermark = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_process, "TIMERS_PER_CALL", 3)
        for what, given_ in [*history, ("watermark", WATERMARK_MAX_MS)]:
            wanted: dict[tuple[int, bool], list[int]] = {}
            if what == "records":
                rows = [dict(zip(SCHEMA.names, row, strict=True)) for row in given_]
                batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
                for run, part in zip(runs, partition(batch, ["key"], 128, len(runs)), strict=True):
                    if part is not None and part.num_rows:
                        run.send(part)
                for key, at, is_event, deletes in given_:
                    models[key, is_event].change(at, deletes)
            elif what == "restore":
                now_ms, states = runs[0].now_ms, [run.snapshot() for run in runs]
                begun: dict[str, Any] = {"begun_ms": now_ms, "worker": Chosen.worker}
                runs = [Harness(spec, states, subtask=(i, given_), **begun) for i in range(given_)]
            elif what == "watermark":
                watermark = min(watermark + given_, WATERMARK_MAX_MS)
                for run in runs:
                    run.operator.on_watermark(watermark)
                wanted = {(k, e): m.fire(k, watermark) for (k, e), m in models.items() if e}
            else:
                for run in runs:
                    run.advance(given_)
                wanted = {(k, e): m.fire(k, runs[0].now_ms) for (k, e), m in models.items() if not e}
            assert fired_by(runs) == {which: times for which, times in wanted.items() if times}
