"""Mutants of timers: lost, fired twice, early, elsewhere, out of order, not deleted; times that go wrong (TM1–TM12).

Those that the simulator finds are used by ``tests.sim.product.test_timer_runs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.mutants.harness import assert_caught, patched
from tests.operators.process import test_timer_edges as edges
from tests.operators.process import test_timer_histories
from tests.operators.process import test_timers as tests
from tests.protocol.checkpoints import test_recovery
from tests.runtime.worker import test_subtask_runner

from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.process import batch_timers, timed, timers
from headgate.operators.process.by_batch import BatchProcessOperator
from headgate.operators.process.by_row import ProcessOperator
from headgate.operators.process.timed import TimedOperator
from headgate.operators.process.timers import OperatorTime, Timers
from headgate.protocol.checkpoints import recovery
from headgate.runtime.worker.chain import Chain
from headgate.state import backend
from headgate.state.ipc import decode_batches
from headgate.state.key_index import TextIndex
from headgate.state.memory import by_column, rows
from headgate.state.memory.column_timers import MemoryColumnTimers
from headgate.state.memory.row_timers import MemoryRowTimers
from headgate.state.timers import TIMERS, TimeKind, TimersMeta

Patch = AbstractContextManager[None]


@contextmanager
def all_of(*patches: Patch) -> Iterator[None]:
    if not patches:
        yield
        return
    with patches[0], all_of(*patches[1:]):
        yield


# -- found by seeds of the simulator ----------------------------------------------------------------------------------


def timers_are_lost_at_a_restore() -> Patch:
    restore = {cls: cls.restore for cls in (rows.MemoryRowBackend, by_column.MemoryColumnBackend)}

    def without(cls: Any) -> Callable[..., None]:
        def restored(self: Any, sections: Mapping[str, memoryview], path: str, owner: Any) -> None:
            restore[cls](self, {name: data for name, data in sections.items() if name != TIMERS}, path, owner)

        return restored

    return all_of(*(patched(cls, "restore", without(cls)) for cls in restore))


def timers_fire_twice() -> Patch:
    call_timer, append = ProcessOperator._call_timer, BatchProcessOperator._emit

    def twice(self: Any, timer: Any, keys: list[Any], results: list[Any]) -> None:
        call_timer(self, timer, keys, results)
        results.extend(results[-len(keys) :])

    def emit(self: Any, result: Any) -> None:
        append(self, result)
        if self._timers._firing is not None:
            append(self, result)

    return all_of(patched(ProcessOperator, "_call_timer", twice), patched(BatchProcessOperator, "_emit", emit))


def timers_fire_before_their_time() -> Patch:
    fire = TimedOperator._fire_event_time

    def early(self: Any, watermark_ms: int, count: int) -> None:
        fire(self, min(watermark_ms + 25, WATERMARK_MAX_MS), count)

    return patched(TimedOperator, "_fire_event_time", early)


def every_subtask_restores_all_timers() -> Patch:
    original = backend.restored_batches

    def restored(sections: Any, section: Any, path: str, owner: Any) -> Any:
        if section.name.startswith(TIMERS):
            return decode_batches(sections[section.name], section.schema, path)
        return original(sections, section, path, owner)

    return patched(backend, "restored_batches", restored)


def deleted_timers_stay() -> Patch:
    nothing = lambda self, *a: None  # noqa: E731
    return all_of(patched(MemoryRowTimers, "delete", nothing), patched(MemoryColumnTimers, "delete", nothing))


def the_latest_timer_fires_first() -> Patch:
    bring = MemoryColumnTimers._bring

    def take(self: Any, until_ms: int, keys_max: int) -> Any:
        due = [time for time in self.cells.keys() if time <= until_ms]  # noqa: SIM118
        if not due:
            return None
        held = self.cells.get(max(due))
        keys = list(held) if type(held) is dict else [held]
        self._forget(max(due), len(keys))
        return max(due), keys

    def brought(self: Any, until_ms: int) -> None:
        bring(self, until_ms)
        self._due = self._due[0][::-1], self._due[1][::-1]

    return all_of(patched(MemoryRowTimers, "take", take), patched(MemoryColumnTimers, "_bring", brought))


def what_a_snapshot_has_is_what_is_left_of_the_due() -> Patch:
    """A snapshot forgets timers that have not come into a run yet."""
    freeze = MemoryColumnTimers.freeze

    def frozen(self: Any) -> Any:
        tail, self._tail = self._tail, self._tail[:-1]
        found = freeze(self)
        self._tail = tail
        return found

    return patched(MemoryColumnTimers, "freeze", frozen)


# -- found by named tests ---------------------------------------------------------------------------------------------


def the_watermark_goes_on_before_timers_fire() -> Patch:
    on_watermark = TimedOperator.on_watermark

    def first(self: Any, watermark_ms: int) -> None:
        output, self.output = self.output, type("Silent", (), {"emit_watermark": lambda *a: None, "emit": None})()
        output.emit_watermark(watermark_ms)
        self.output.emit = output.emit
        try:
            on_watermark(self, watermark_ms)
        finally:
            self.output = output

    return patched(TimedOperator, "on_watermark", first)


def a_time_that_has_passed_fires_at_once() -> Patch:
    begin = Timers.begin

    def no_timer(self: Any, timer: Any) -> None:
        begin(self, timer)
        self._firing = None

    return patched(Timers, "begin", no_timer)


def what_waits_for_the_next_watermark_is_forgotten() -> Patch:
    return all_of(*(patched(c, "_end_firing", lambda self: self._timers._waiting.clear()) for c in OPERATORS))


def processing_time_is_the_date_of_the_moment() -> Patch:
    def go_on_from(self: Any, time_ms: int) -> None:
        return

    return patched(OperatorTime, "go_on_from", go_on_from)


def timers_fire_again_after_the_end() -> Patch:
    found_in = TimersMeta.found_in

    def running(sections: Any, path: str) -> Any:
        found = found_in(sections, path)
        return None if found is None else TimersMeta(found.processing_time_ms, False)

    return patched(TimersMeta, "found_in", staticmethod(running))


def nobody_hears_of_the_last_barrier_before_a_stop() -> Patch:
    return patched(Chain, "set_stopping", lambda self: None)


def a_tick_fires_all_that_is_due() -> Patch:
    def on_tick(self: Any, now_ms: int) -> None:
        while self._fire_some(TimeKind.PROCESSING_TIME, self._time.at_tick(now_ms)):
            pass
        self._end_firing()

    return patched(TimedOperator, "on_tick", on_tick)


def times_between_milliseconds_are_cut() -> Patch:
    milliseconds = batch_timers.BatchTimers._milliseconds

    def cut(self: Any, times: Any, rows_count: int) -> Any:
        is_moments = getattr(getattr(times, "dtype", None), "time_unit", None) == "us"
        return times.dt.epoch("ms") if is_moments else milliseconds(self, times, rows_count)

    return patched(batch_timers.BatchTimers, "_milliseconds", cut)


def the_last_time_of_a_call_counts_for_all_its_keys() -> Patch:
    """What is registered between the timers of a call waits, and fires late."""

    def passed(self: Any, slots: Any) -> Any:
        return np.full(len(slots), self._firing[2][-1])

    return patched(batch_timers.BatchTimers, "_passed_ms", passed)


def keys_of_one_time_come_as_they_were_registered() -> Patch:
    return patched(MemoryRowTimers, "_ordered", lambda self, keys: keys)


def timers_without_a_function_are_dropped() -> Patch:
    return patched(timed, "stored_rows", lambda sections, path: {})


def times_are_rounded_by_adding_to_them() -> Patch:
    milliseconds = batch_timers.BatchTimers._milliseconds

    def rounded(self: Any, times: Any, rows_count: int) -> Any:
        unit = getattr(getattr(times, "dtype", None), "time_unit", None)
        if unit is None:
            return milliseconds(self, times, rows_count)
        ticks = {"ms": 1, "us": 1_000, "ns": 1_000_000}[unit]
        return (times.to_physical() + (ticks - 1)) // ticks

    return patched(batch_timers.BatchTimers, "_milliseconds", rounded)


def a_datetime_is_always_a_moment() -> Patch:
    milliseconds = timers.milliseconds

    def any_moment(node: str, time: Any) -> Any:
        return 0 if time != time else milliseconds(node, time)

    return patched(timers, "milliseconds", any_moment)


def whatever_is_given_as_keys_is_believed() -> Patch:
    return patched(batch_timers, "Keys", object)


def any_time_is_a_date() -> Patch:
    return all_of(*(patched(module, "DATES_MS", range(-(1 << 62), 1 << 62)) for module in (timers, batch_timers)))


def all_keys_are_one_column() -> Patch:
    def merge(self: Any) -> None:
        self._chunks = [pa.concat_arrays(self._chunks)]

    return patched(TextIndex, "_merge", merge)


def whoever_is_given_timers_had_none_of_their_state() -> Patch:
    return patched(recovery, "_adds_timers", lambda before, now: False)


def whoever_is_given_anything_is_given_timers() -> Patch:
    return patched(recovery, "_adds_timers", lambda before, now: "timers)" in now)


OPERATORS = (ProcessOperator, BatchProcessOperator)
ROW = ("row",)
NAMED: list[tuple[Callable[[], Patch], Callable[..., None], tuple[Any, ...]]] = [
    (
        the_watermark_goes_on_before_timers_fire,
        tests.test_timers_fire_when_the_watermark_reaches_them_before_it_goes_on,
        ROW,
    ),
    (
        what_waits_for_the_next_watermark_is_forgotten,
        tests.test_a_timer_registered_for_a_time_that_has_passed_fires_with_the_next_watermark,
        ("batch", 0),
    ),
    (processing_time_is_the_date_of_the_moment, tests.test_processing_time_never_goes_back_over_a_restore, ROW),
    (
        timers_fire_again_after_the_end,
        tests.test_at_the_end_all_timers_of_event_time_fire_and_none_of_processing_time,
        ROW,
    ),
    (times_between_milliseconds_are_cut, tests.test_times_are_moments_too_and_never_early, (tests.MomentsByBatch(),)),
    (
        keys_of_one_time_come_as_they_were_registered,
        tests.test_the_order_is_time_then_hash_of_the_key_however_they_were_registered,
        ROW,
    ),
    (
        timers_without_a_function_are_dropped,
        tests.test_a_function_may_be_given_timers_later_but_not_lose_those_it_has,
        (),
    ),
    (
        nobody_hears_of_the_last_barrier_before_a_stop,
        test_subtask_runner.test_operators_are_told_when_the_last_barrier_before_a_stop_has_passed,
        (),
    ),
    (
        the_last_time_of_a_call_counts_for_all_its_keys,
        test_timer_histories.test_any_history_by_batch_fires_what_plain_python_fires,
        (),
    ),
    (
        times_are_rounded_by_adding_to_them,
        edges.test_a_moment_at_the_edge_of_its_unit_does_not_fire_before_its_time,
        (),
    ),
    (a_datetime_is_always_a_moment, edges.test_what_is_a_datetime_but_no_moment_is_told, ()),
    (whatever_is_given_as_keys_is_believed, edges.test_keys_that_are_none_are_told, ()),
    (
        any_time_is_a_date,
        edges.test_a_time_that_is_no_date_is_told_by_whoever_asks_for_one,
        (edges.DatedByBatch(), 253_402_300_800_000),
    ),
    (
        whoever_is_given_timers_had_none_of_their_state,
        test_recovery.test_a_function_without_state_may_be_given_timers_later,
        (test_recovery.ODD_NAME,),
    ),
    (
        whoever_is_given_anything_is_given_timers,
        test_recovery.test_a_function_without_state_may_be_given_timers_later,
        ("",),
    ),
    (deleted_timers_stay, tests.test_a_deleted_timer_does_not_fire, ("batch",)),
    (
        every_subtask_restores_all_timers,
        tests.test_timers_are_in_the_snapshot_and_fire_once_wherever_their_keys_are,
        ROW,
    ),
]


@pytest.mark.parametrize(("mutant", "test", "given"), NAMED, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_timers_is_found_by_its_test(
    mutant: Callable[[], Patch], test: Callable[..., None], given: tuple[Any, ...]
) -> None:
    test(*given)
    assert_caught(mutant, test, *given)


def test_a_tick_that_fires_all_that_is_due_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test = tests.test_a_tick_fires_a_bounded_number_and_the_next_one_is_at_once
    assert_caught(a_tick_fires_all_that_is_due, test, "row", monkeypatch)


def test_a_time_that_has_passed_and_fires_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug would never come back from a watermark, so the function gives up after some calls."""
    calls = 0
    on_timer = tests.ByRow.on_timer

    def counted(self: Any, timer: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        assert calls < 100, "a watermark that never goes on"
        return on_timer(self, timer, context)

    monkeypatch.setattr(tests.ByRow, "on_timer", counted)
    test = tests.test_a_timer_registered_for_a_time_that_has_passed_fires_with_the_next_watermark
    assert_caught(a_time_that_has_passed_fires_at_once, test, "row", 0)


def test_copying_all_keys_for_each_new_one_is_caught() -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert_caught(
            all_keys_are_one_column, edges.test_a_watermark_does_not_look_at_all_keys_because_one_is_new, patch
        )


def test_a_snapshot_without_the_newest_timers_is_caught() -> None:
    def kept() -> None:
        run = tests.harness("batch")
        tests.register(run, (1, 10))
        again = tests.harness("batch", states=[run.snapshot()])
        again.operator.on_watermark(10)
        assert tests.fired(again) == [(1, 10)]

    kept()
    assert_caught(what_a_snapshot_has_is_what_is_left_of_the_due, kept)
