"""Timers of process functions, in both forms: when they fire, in which order, what they may do (rules TM)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import BORN_MS, Harness

import headgate as hg
from headgate.codec.snapshot import decode_sections, encode_sections
from headgate.errors import CorruptionError, UsageError
from headgate.model.manifest import KeyGroups
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS, OperatorSpec, RestoredState
from headgate.operators.process import batch_process, row_process
from headgate.operators.process import timers as timers_module
from headgate.operators.process.connected_process import process_spec
from headgate.operators.user_functions import UserFunctionError
from headgate.state import snapshot
from headgate.state.key_hash import hash_column
from headgate.state.snapshot import OwnedKeys

SCHEMA = pa.schema([("key", pa.int64()), ("do", pa.large_string()), ("at", pa.int64())])
FIRED = {"key": pa.int64(), "kind": pa.large_string(), "at": pa.int64()}


class ByRow(hg.ProcessFunction):
    """Registers and deletes what its records say; a timer registers another one after ``again`` ms."""

    schema = FIRED

    def __init__(self, again: int | None = None) -> None:
        self.again = again

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        getattr(context.timers, row["do"])(row["at"])

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        number = self.count.get(0) + 1
        self.count.put(number)
        if self.again is not None and number < 4:
            kind = "event" if timer.is_event_time else "processing"
            getattr(context.timers, f"register_{kind}_time")(timer.time_ms + self.again)
        yield {"key": context.key, "kind": timer.kind.value, "at": timer.time_ms}


class ByBatch(hg.BatchProcessFunction):
    """The same by batch."""

    schema = FIRED

    def __init__(self, again: int | None = None) -> None:
        self.again = again
        self.calls: list[int] = []

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        for change in batch["do"].unique(maintain_order=True):
            getattr(context.timers, change)(batch["at"], where=batch["do"] == change)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        self.calls.append(len(timers))
        self.count.update(1, "add")
        if self.again is not None:
            kind = "event" if timers.is_event_time else "processing"
            register = getattr(context.timers, f"register_{kind}_time")
            register(timers.times_ms + self.again, where=self.count.get() < 4)
        frame = context.keys.frame()
        assert frame["key"].is_unique().all()
        return frame.with_columns(kind=pl.lit(timers.kind.value), at=timers.times_ms)


FORMS = {"row": ByRow, "batch": ByBatch}
each = pytest.mark.parametrize("form", FORMS)


def spec_of(form: str, again: int | None = None) -> OperatorSpec:
    return process_spec("node", ("key",), FORMS[form](again), SCHEMA)


def harness(form: str, again: int | None = None, states: Any = (), **options: Any) -> Harness:
    return Harness(spec_of(form, again), states, **options)


def send(run: Harness, *rows: tuple[int, str, int]) -> None:
    run.send(pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA))


def register(run: Harness, *timers: tuple[int, int], kind: str = "event") -> None:
    send(run, *((key, f"register_{kind}_time", at) for key, at in timers))


def fired(run: Harness) -> list[tuple[int, int]]:
    """Return key and time of what fired since the last call."""
    found = [(row["key"], row["at"]) for row in run.out.rows()]
    run.out.batches.clear()
    return found


@each
def test_timers_fire_when_the_watermark_reaches_them_before_it_goes_on(form: str) -> None:
    run = harness(form)
    register(run, (1, 10), (2, 11), (3, 12))
    run.operator.on_watermark(9)
    run.operator.on_watermark(11)
    assert fired(run) == [(1, 10), (2, 11)]
    assert run.out.log == [("watermark", 9), ("batch", 2), ("watermark", 11)]
    run.operator.on_watermark(12)
    assert fired(run) == [(3, 12)]


@each
def test_a_key_has_one_timer_of_a_kind_for_one_time(form: str) -> None:
    run = harness(form)
    register(run, (1, 10), (1, 10), (2, 10))
    register(run, (1, 10), (1, 11))
    register(run, (1, 10), kind="processing")
    run.operator.on_watermark(20)
    assert sorted(fired(run)) == [(1, 10), (1, 11), (2, 10)]
    run.operator.on_watermark(30)
    assert fired(run) == []
    assert run.operator.next_tick_ms() is not None, "the one of processing time is another one"


@each
def test_a_deleted_timer_does_not_fire(form: str) -> None:
    run = harness(form)
    register(run, (1, 10), (2, 10), (3, 10), (3, 11))
    send(run, (2, "delete_event_time", 10), (3, "delete_event_time", 11), (4, "delete_event_time", 10))
    register(run, (3, 11))
    send(run, (1, "delete_event_time", 10))
    register(run, (1, 10))
    send(run, (1, "delete_event_time", 10))
    run.operator.on_watermark(20)
    assert fired(run) == [(3, 10), (3, 11)]


@each
def test_the_order_is_time_then_hash_of_the_key_however_they_were_registered(form: str) -> None:
    rng = np.random.default_rng(7)
    timers = [
        (int(key), int(at)) for key, at in zip(rng.integers(0, 500, 3_000), rng.integers(0, 40, 3_000), strict=True)
    ]
    wanted = sorted(set(timers), key=lambda one: (one[1], int(hash_column(pa.array([one[0]]))[0])))
    for order in (timers, timers[::-1]):
        run = harness(form)
        for start in range(0, len(order), 700):
            register(run, *order[start : start + 700])
        run.operator.on_watermark(100)
        found = fired(run)
        assert found == wanted


@each
@pytest.mark.parametrize("steps", [[100], [0, 1, 2, 3, 5, 8, 100], list(range(101))])
def test_what_a_timer_registers_fires_in_its_turn_whatever_the_steps_of_the_watermark(
    form: str, steps: list[int]
) -> None:
    run = harness(form, again=5)
    register(run, (1, 3), (2, 4), (3, 90))
    for watermark_ms in steps:
        run.operator.on_watermark(watermark_ms)
    found = fired(run)
    for key, times in ((1, [3, 8, 13, 18]), (2, [4, 9, 14, 19]), (3, [90, 95, 100])):
        assert [at for one, at in found if one == key] == times
    if form == "row":
        assert [at for _, at in found] == sorted(at for _, at in found)


@each
@pytest.mark.parametrize("again", [0, -5])
def test_a_timer_registered_for_a_time_that_has_passed_fires_with_the_next_watermark(form: str, again: int) -> None:
    run = harness(form, again)
    register(run, (1, 10))
    for watermark_ms, wanted in ((20, 10), (21, 10 + again), (22, 10 + 2 * again)):
        run.operator.on_watermark(watermark_ms)
        assert fired(run) == [(1, wanted)]
    register(run, (2, 5))
    assert fired(run) == []
    run.operator.on_watermark(23)
    assert (2, 5) in fired(run)


@each
def test_timers_of_processing_time_fire_at_ticks_of_a_clock_that_goes_on_from_the_date(form: str) -> None:
    run = harness(form, begun_ms=1_000)
    assert run.operator.next_tick_ms() is None
    now_ms = BORN_MS + 1_000
    register(run, (1, now_ms + 50), (2, now_ms + 70), kind="processing")
    assert run.operator.next_tick_ms() == 1_050
    run.context.wall_ms = lambda: 0  # somebody sets the date
    run.advance(49)
    assert fired(run) == []
    run.advance(1)
    assert fired(run) == [(1, now_ms + 50)]
    run.operator.on_watermark(now_ms + 1_000_000)
    assert fired(run) == [], "event time is another matter"
    run.advance(500)
    assert fired(run) == [(2, now_ms + 70)]
    assert run.operator.next_tick_ms() is None


@each
def test_a_tick_fires_a_bounded_number_and_the_next_one_is_at_once(form: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(row_process, "TIMERS_PER_TURN", 3)
    monkeypatch.setattr(batch_process, "TIMERS_PER_CALL", 3)
    run = harness(form)
    register(run, *((key, BORN_MS) for key in range(8)), kind="processing")
    counts = []
    while (due := run.operator.next_tick_ms()) is not None:
        assert due <= run.now_ms
        run.advance(0)
        counts.append(len(fired(run)))
    assert counts == [3, 3, 2]


@each
def test_no_timer_of_processing_time_fires_behind_the_last_barrier_before_a_stop(form: str) -> None:
    run = harness(form)
    register(run, (1, BORN_MS), kind="processing")
    run.context.is_stopping = True
    assert run.operator.next_tick_ms() is None
    assert harness(form, states=[run.snapshot()]).operator.next_tick_ms() is not None, "but after the restore"


@each
def test_processing_time_never_goes_back_over_a_restore(form: str) -> None:
    run = harness(form, begun_ms=5_000)
    register(run, (1, BORN_MS + 5_100), kind="processing")
    behind = harness(form, states=[run.snapshot()], begun_ms=10)
    assert behind.operator.next_tick_ms() == 110, "100 ms are left, although the date is earlier"
    ahead = harness(form, states=[run.snapshot()], begun_ms=9_000)
    ahead.advance(0)
    assert fired(ahead) == [(1, BORN_MS + 5_100)], "it was due meanwhile"


@each
def test_at_the_end_all_timers_of_event_time_fire_and_none_of_processing_time(form: str) -> None:
    run = harness(form, again=1_000)
    register(run, (1, 10), (1, WATERMARK_MAX_MS))
    register(run, (2, 0), kind="processing")
    run.operator.on_watermark(WATERMARK_MAX_MS)
    run.operator.finish()
    assert fired(run) == [(1, 10), (1, 1_010), (1, 2_010), (1, 3_010), (1, WATERMARK_MAX_MS)]
    assert run.operator.next_tick_ms() is None
    again = harness(form, states=[run.snapshot()])
    assert again.operator.next_tick_ms() is None, "the end was the end"
    again.operator.on_watermark(WATERMARK_MAX_MS)
    again.operator.finish()
    assert fired(again) == []
    more = harness(form, states=[again.snapshot()])
    more.operator.on_resumed()
    more.advance(0)
    assert fired(more) == [(2, 0)], "more input has come, so time goes on"


@each
def test_more_input_after_the_end_may_register_what_fired_there(form: str) -> None:
    run = harness(form)
    register(run, (1, 10), (2, 20))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    run.operator.finish()
    fired(run)
    more = harness(form, states=[run.snapshot()])
    more.operator.on_resumed()
    register(more, (1, 10))
    more.operator.on_watermark(5)
    assert fired(more) == []
    more.operator.on_watermark(WATERMARK_MAX_MS)
    assert fired(more) == [(1, 10)]


@each
def test_where_one_former_subtask_had_ended_and_another_had_not_timers_go_on(form: str) -> None:
    runs = [harness(form, subtask=(index, 2)) for index in range(2)]
    timers = [(key, 10) for key in range(20)]
    for run in runs:
        register(run, *(one for one in timers if owner(one[0], 2) == run.context.subtask_index))
    runs[0].operator.on_watermark(WATERMARK_MAX_MS)
    runs[0].operator.finish()
    first = fired(runs[0])
    both = harness(form, states=[run.snapshot() for run in runs])
    both.operator.on_watermark(WATERMARK_MAX_MS)
    assert sorted(first + fired(both)) == timers


class Cut:
    """A target that keeps the parts of a snapshot, which are cut as small as they can be."""

    keys = OwnedKeys(KeyGroups(0, 128), 128)
    files = None

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def put(self, chunks: Any, rows: Any, key_groups: Any = None, name: str = "") -> None:
        self.parts.append(b"".join(bytes(memoryview(chunk)) for chunk in chunks))


@each
def test_a_snapshot_that_is_cut_by_key_group_has_each_timer_in_one_part(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # TM6
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 64)
    run = harness(form, begun_ms=7_000)
    timers = [(key, 10 + key % 3) for key in range(200)]
    register(run, *timers)
    register(run, (1, BORN_MS + 7_005), kind="processing")
    frozen, target = run.operator.freeze(), Cut()
    assert frozen is not None
    frozen.write_to(target)  # type: ignore[arg-type]
    assert len(target.parts) > 4
    again = harness(form, states=[RestoredState(0, 1, memoryview(part)) for part in target.parts], begun_ms=10)
    assert again.operator.next_tick_ms() == 15
    again.operator.on_watermark(20)
    assert sorted(fired(again)) == sorted(timers)


class Endless(hg.ProcessFunction):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        context.timers.register_event_time(row["at"])

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        context.timers.register_event_time(timer.time_ms + 1)


def test_timers_that_register_each_other_for_ever_are_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers_module, "FIRES_AT_END_MAX", 100)
    run = Harness(process_spec("node", ("key",), Endless(), SCHEMA))
    register(run, (1, 10))
    run.operator.on_watermark(50)
    with pytest.raises(UsageError, match=r"operator 'node'.*would never be over.*context.timers.is_end"):
        run.operator.on_watermark(WATERMARK_MAX_MS)


@each
def test_timers_are_in_the_snapshot_and_fire_once_wherever_their_keys_are(form: str) -> None:  # TM6
    timers = [(key, at) for key in range(60) for at in (5, 10, 20)]
    runs = [harness(form, subtask=(index, 2)) for index in range(2)]
    for run in runs:
        mine = [one for one in timers if owner(one[0], 2) == run.context.subtask_index]
        register(run, *mine)
        run.operator.on_watermark(5)
        assert sorted(fired(run)) == [one for one in mine if one[1] == 5]
    snapshots = [run.snapshot() for run in runs]
    for other in FORMS:
        found = []
        for index in range(3):
            run = harness(other, states=snapshots, subtask=(index, 3))
            run.operator.on_watermark(30)
            mine = fired(run)
            assert all(owner(key, 3) == index for key, _ in mine)
            found += mine
        assert sorted(found) == [one for one in timers if one[1] > 5]


def owner(key: int, parallelism: int) -> int:
    group = int(hash_column(pa.array([key], pa.int64()))[0]) % 128
    return group * parallelism // 128


class Plain(hg.ProcessFunction):
    """As ``ByRow`` was before it had timers."""

    schema = FIRED

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.count.put(row["at"])


def test_a_function_may_be_given_timers_later_but_not_lose_those_it_has() -> None:  # TM6
    plain = process_spec("node", ("key",), Plain(), SCHEMA)
    before = Harness(plain)
    register(before, (1, 10))
    after = harness("row", states=[before.snapshot()])
    assert plain.state_text() == spec_of("row").state_text() == spec_of("batch").state_text()  # type: ignore[attr-defined]
    register(after, (1, 10))
    restored = after.snapshot()
    with pytest.raises(UsageError, match=r"operator 'node': the checkpoint holds timers of it, but.*no on_timer"):
        Harness(plain, [restored])
    after.operator.on_watermark(10)
    Harness(plain, [after.snapshot()])


def test_timers_of_an_unknown_version_are_refused() -> None:  # TM6
    run = harness("row")
    payload = bytes(run.snapshot().payload)
    sections = {name: bytes(data) for name, data in decode_sections(memoryview(payload), "x").items()}
    sections["headgate.timers"] = sections["headgate.timers"].replace(b'"version": 1', b'"version": 2')
    changed = b"".join(bytes(memoryview(b)) for b in encode_sections({n: [d] for n, d in sections.items()}))
    with pytest.raises(CorruptionError, match="timers of version 1"):
        harness("row", states=[RestoredState(0, 1, memoryview(changed))])


class Timeless(hg.ProcessFunction):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        context.timers.register_event_time(row["at"])


class Wrong(ByRow):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        context.timers.register_event_time(1.5)  # type: ignore[arg-type]


class Failing(ByRow):
    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Any:
        raise KeyError("mine")


def test_wrong_use_is_told_with_the_operator() -> None:
    for function, told in ((Timeless(), "has no on_timer"), (Wrong(), "whole milliseconds since 1970.*float 1.5")):
        run = Harness(process_spec("node", ("key",), function, SCHEMA))
        with pytest.raises(UserFunctionError, match=f"(?s)operator 'node'.*{told}"):
            register(run, (1, 10))
    run = Harness(process_spec("node", ("key",), Failing(), SCHEMA))
    register(run, (7, 10))
    with pytest.raises(UserFunctionError, match=r"(?s)the timer of key 7 for event_time 10.*KeyError: 'mine'"):
        run.operator.on_watermark(10)


class Moments(hg.ProcessFunction):
    schema = {"key": pa.int64(), "at": pa.timestamp("us")}

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        moment = datetime(2026, 1, 1, 0, 0, 0, 1)  # between two milliseconds: the later one
        context.timers.register_event_time(moment)
        context.timers.register_event_time(moment.replace(tzinfo=UTC) + timedelta(hours=1))
        assert context.timers.event_time_ms is None

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        assert context.timers.event_time_ms == WATERMARK_MAX_MS
        assert context.timers.is_end
        yield {"key": context.key, "at": timer.time}


class MomentsByBatch(hg.BatchProcessFunction):
    schema = Moments.schema

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        moments = pl.Series([datetime(2026, 1, 1, 0, 0, 0, 1), None])
        context.timers.register_event_time(moments)
        context.timers.register_event_time(moments[0] + timedelta(hours=1), where=pl.Series([True, False]))

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().with_columns(at=timers.times)


@pytest.mark.parametrize("function", [Moments(), MomentsByBatch()])
def test_times_are_moments_too_and_never_early(function: Any) -> None:
    run = Harness(process_spec("node", ("key",), function, SCHEMA))
    register(run, *([(7, 0)] if isinstance(function, Moments) else [(7, 0), (8, 0)]))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    first = datetime(2026, 1, 1, 0, 0, 0, 1_000)
    assert run.out.rows() == [{"key": 7, "at": first}, {"key": 7, "at": first + timedelta(hours=1)}]


def test_a_batch_of_timers_has_each_key_once_and_thousands_of_keys() -> None:
    function = ByBatch()
    run = Harness(process_spec("node", ("key",), function, SCHEMA))
    register(run, *((key, 10 + at) for key in range(5_000) for at in (0, 1)))
    run.operator.on_watermark(20)
    found = fired(run)
    assert len(found) == 10_000
    calls = run.operator.user_object.calls  # type: ignore[attr-defined]
    assert sum(calls) == 10_000
    assert len(calls) < 40
    assert max(calls) > 2_000


class Elsewhere(ByBatch):
    """Timers of other keys than those that fire."""

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        keys = context.keys.frame()
        if len(self.calls) < 3:
            others = context.lookup(keys.with_columns(pl.col("key") + 1))
            context.timers.register_event_time(timers.times_ms, keys=others)
        return super().on_timer(timers, context)


def test_a_timer_of_another_key_for_a_time_that_has_fired_waits_too() -> None:
    run = Harness(process_spec("node", ("key",), Elsewhere(), SCHEMA))
    register(run, (1, 10))
    for watermark_ms, key in ((10, 1), (11, 2), (12, 3)):
        run.operator.on_watermark(watermark_ms)
        assert fired(run) == [(key, 10)]


def test_no_state_has_a_name_of_headgates_own() -> None:  # TM6
    class Named(hg.ProcessFunction):
        def open(self, state: hg.StateHandle) -> None:
            state.value("headgate.timers", pa.int64())

    with pytest.raises(UsageError, match=r"names that begin with 'headgate.' are Headgate's own"):
        process_spec("node", ("key",), Named(), SCHEMA)


NEVER = pl.Series([datetime(2262, 4, 11, 23, 47, 16, 854_775)]).cast(pl.Datetime("ns"))
"""The last moment in nanoseconds, but for some: what people write for never."""


class Never(ByBatch):
    """Registers times at the edges of what can be told."""

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        context.timers.register_event_time(NEVER)
        context.timers.register_event_time(pl.Series([WATERMARK_MAX_MS]).cast(pl.Datetime("us")))
        context.timers.register_event_time(pl.Series([WATERMARK_MIN_MS]).cast(pl.Datetime("us")))
        context.timers.register_event_time(WATERMARK_MAX_MS)


def test_a_moment_at_the_edge_of_its_unit_does_not_fire_before_its_time() -> None:
    run = Harness(process_spec("node", ("key",), Never(), SCHEMA))
    register(run, (1, 0))
    first = WATERMARK_MIN_MS // 1_000 + 1  # between two milliseconds the later one
    run.operator.on_watermark(BORN_MS)
    assert fired(run) == [(1, first)]
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert fired(run) == [(1, 9_223_372_036_855), (1, WATERMARK_MAX_MS // 1_000 + 1), (1, WATERMARK_MAX_MS)]


class NoMoment(ByRow):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        context.timers.register_event_time(pd.NaT)  # type: ignore[arg-type]


def test_what_is_a_datetime_but_no_moment_is_told() -> None:
    run = Harness(process_spec("node", ("key",), NoMoment(), SCHEMA))
    with pytest.raises(UserFunctionError, match=r"(?s)operator 'node'.*whole milliseconds since 1970.*NaT"):
        register(run, (1, 0))


class Dated(ByRow):
    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Any:
        return [{"key": context.key, "kind": str(timer.time), "at": timer.time_ms}]


class DatedByBatch(ByBatch):
    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().with_columns(kind=timers.times.cast(pl.String), at=timers.times_ms)


@pytest.mark.parametrize("function", [Dated(), DatedByBatch()])
@pytest.mark.parametrize("time_ms", [WATERMARK_MAX_MS, WATERMARK_MIN_MS, 253_402_300_800_000, -62_135_596_800_001])
def test_a_time_that_is_no_date_is_told_by_whoever_asks_for_one(function: Any, time_ms: int) -> None:
    run = Harness(process_spec("node", ("key",), function, SCHEMA))
    register(run, (1, time_ms))
    with pytest.raises(UserFunctionError, match=rf"(?s)a timer for {time_ms} ms is beyond.*use .*_ms"):
        run.operator.on_watermark(WATERMARK_MAX_MS)


@pytest.mark.parametrize("function", [Dated(), DatedByBatch()])
@pytest.mark.parametrize("time_ms", [253_402_300_799_999, -62_135_596_800_000])
def test_the_first_and_the_last_date_are_dates(function: Any, time_ms: int) -> None:
    run = Harness(process_spec("node", ("key",), function, SCHEMA))
    register(run, (1, time_ms))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert run.out.rows()[0]["kind"][:10] == ("9999-12-31" if time_ms > 0 else "0001-01-01")


def test_a_watermark_does_not_look_at_all_keys_because_one_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("key", pa.large_string()), *((f.name, f.type) for f in SCHEMA if f.name != "key")])

    class OfText(ByBatch):
        schema = {"key": pa.large_string(), "kind": pa.large_string(), "at": pa.int64()}

    copied = 0
    concat = pa.concat_arrays

    def counted(arrays: Any) -> Any:
        nonlocal copied
        copied += sum(map(len, arrays))
        return concat(arrays)

    run = Harness(process_spec("node", ("key",), OfText(), schema))
    rows = [{"key": f"key {i}", "do": "register_event_time", "at": 1_000} for i in range(10_000)]
    run.send(pa.RecordBatch.from_pylist(rows, schema))
    monkeypatch.setattr(pa, "concat_arrays", counted)
    for at in range(100):
        run.send(pa.RecordBatch.from_pylist([{"key": f"new {at}", "do": "register_event_time", "at": at}], schema))
        run.operator.on_watermark(at)
        assert [row["key"] for row in run.out.rows()] == [f"new {at}"]
        run.out.batches.clear()
    assert copied < 30_000, "each step copied all keys"
    run.operator.on_watermark(1_000)
    assert {row["key"] for row in run.out.rows()} == {f"key {i}" for i in range(10_000)}


class Told(ByBatch):
    """Does with its timers what a test says."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        self.given(batch, context)


def test_a_batch_without_any_time_registers_nothing() -> None:
    none = lambda batch, context: context.timers.register_event_time(pl.Series([None] * batch.height))  # noqa: E731
    run = Harness(process_spec("node", ("key",), Told(none), SCHEMA))
    register(run, (1, 10), (2, 10))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert fired(run) == []


def test_keys_that_are_none_are_told() -> None:
    given = lambda batch, context: context.timers.register_event_time(batch["at"], keys=batch)  # noqa: E731
    run = Harness(process_spec("node", ("key",), Told(given), SCHEMA))
    with pytest.raises(
        UserFunctionError, match=r"operator 'node': keys= must be context\.lookup\(frame\), not a DataF"
    ):
        register(run, (1, 10))


def test_timers_outside_of_a_call_are_told_where_they_can_be_used() -> None:
    run = harness("batch")
    with pytest.raises(UsageError, match=r"in process\(\), on_timer\(\) and on_round\(\)"):
        run.operator._user_context.timers.register_event_time(3)  # type: ignore[attr-defined]
