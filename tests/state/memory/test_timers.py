"""Timers in memory: how many there are, and what goes into checkpoints that hold what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.state.backends import rows_in, sections_of
from tests.state.memory.chunk_stories import EVENT, VALUE, Many, Story, Timers, chunks_of, new_bytes, take

import headgate as hg
from headgate.codec.snapshot import STATE_PREFIX
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.state import snapshot
from headgate.state.backend import TimeKind
from headgate.state.descriptors import StateDescriptor, StateKind
from headgate.state.memory import change_tracking, incremental_snapshot, timers
from headgate.state.memory import timers as timers_module
from headgate.state.memory.change_tracking import Interval
from headgate.state.memory.timers import CountedTimers, MemoryColumnTimers, TimerOps, count_timers, latest_changes
from headgate.storage.urls import open_storage

Timer = tuple[int, int]
TIMERS = st.tuples(st.integers(-2, 3), st.integers(0, 15))
"""When, and the slot."""


def changes_of(done: list[tuple[Timer, bool]]) -> TimerOps:
    """``done``: what was done to timers, and whether they are there since."""
    times = np.array([time for (time, _), _ in done], np.int64)
    return times, np.array([slot << 1 | (not is_there) for (_, slot), is_there in done], np.int64)


def timers_of(found: CountedTimers) -> list[Timer]:
    times, changes = found.whole()
    assert not (changes & 1).any()
    return list(zip(times.tolist(), (changes >> 1).tolist(), strict=True))


@given(
    st.sets(TIMERS), st.lists(st.lists(st.lists(st.tuples(TIMERS, st.booleans()), min_size=1), max_size=3), max_size=6)
)
def test_any_history_of_counted_timers_is_that_of_a_set(
    base: set[Timer], history: list[list[list[tuple[Timer, bool]]]]
) -> None:
    there = set(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers, "_MERGE_SHARE", 2)
        found = count_timers(latest_changes([changes_of([(timer, True) for timer in base])]))
        for since in history:
            before, was = found, timers_of(found)
            found = found.after([changes_of(done) for done in since])
            for timer, is_there in (one for done in since for one in done):
                (there.add if is_there else there.discard)(timer)
            assert (found.count, timers_of(found)) == (len(there), sorted(there))
            assert timers_of(before) == was, "what a snapshot refers to stays as it is"


def test_timers_are_counted_from_the_start_after_so_much_that_it_was_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 4)
    interval = Interval()
    held = MemoryColumnTimers(lambda slots: slots.astype(np.uint64), interval)
    counted = []
    for number, (first, count) in enumerate([(0, 10), (10, 20), (30, 1)]):
        interval.number = number
        held.register(np.arange(first, first + count), np.arange(first, first + count))
        counted.append(held.freeze())
        if number != 1:  # that snapshot is never written
            assert counted[-1].count() == first + count
    assert [frozen.count() for frozen in counted] == [10, 30, 31]


def test_the_next_time_is_that_of_the_first_timer_wherever_it_is_held() -> None:
    held = MemoryColumnTimers(lambda slots: slots.astype(np.uint64))
    assert held.next_ms() is None
    held.register(np.array([0, 1]), np.array([5, 3]))
    assert held.next_ms() == 3
    assert [part.tolist() for part in held.take(3, 10)] == [[1], [3]]
    assert held.next_ms() == 5
    held.register(np.array([2]), np.array([4]))
    assert held.next_ms() == 4
    held.register(np.array([3]), np.array([6]))
    assert held.next_ms() == 4
    assert [part.tolist() for part in held.take(6, 10)] == [[2, 0, 3], [4, 5, 6]]
    assert held.next_ms() is None


MANY = 4_500
"""So many that they are written as chunks, where 64 KiB are enough for that."""


@pytest.fixture(autouse=True)
def _little_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_snapshot, "SIZE_BYTES_MIN", 64 << 10)


each_form = pytest.mark.parametrize("form", ["row", "column"])


def paths(manifest: Any) -> set[str]:
    return {part.path for part in chunks_of(manifest)}


def begun(form: str, storage: Any = None) -> tuple[Story, Any]:
    """Return a story with many timers and few values, and its first checkpoint."""
    story = Story(Timers(form), storage)
    story.change("put", range(20))
    story.change("register", [(key, 100 + key) for key in range(MANY)])
    return story, story.checkpoint()


@each_form
def test_a_checkpoint_writes_which_timers_came_and_went(form: str) -> None:
    story, first = begun(form)
    for at in (100, 150, 200):
        story.change("register", [(key, at) for key in range(300, 330)])
        story.change("register", [(key, 100 + key) for key in range(6_000, 6_020)])  # they are there
        story.change("delete", [(key, 100 + key) for key in range(5_000, 5_020)])  # they are there once
        story.change("take", at + 9)
        manifest = story.checkpoint()
        assert paths(first) < paths(manifest)
        assert 0 < new_bytes(manifest) < new_bytes(first) / 10
    assert manifest.entries[0].rows["sum"][EVENT] == len(story.model["timers"])
    assert not any(
        part.rows["sum"][EVENT] for part in manifest.entries[0].parts if part.section.startswith(STATE_PREFIX)
    )
    for parallelism in (1, 3):
        story.check(parallelism)


@each_form
def test_of_all_timers_of_one_time_those_that_changed_are_written(form: str) -> None:
    story = Story(Timers(form))
    story.change("register", [(key, 100) for key in range(MANY)])
    first = story.checkpoint()
    story.change("delete", [(key, 100) for key in range(40, 60)])
    story.change("register", [(key, 100) for key in range(MANY, MANY + 20)])
    timers = story.backend.timers.event_time
    assert len(take(story.backend, timers, 100, 10)) == 10
    story.model["timers"] = dict.fromkeys(held(story))
    assert len(story.model["timers"]) == MANY - 10
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    assert new_bytes(manifest) < new_bytes(first) / 10
    story.check()
    story.check(2)


def held(story: Story) -> list[tuple[int, int]]:
    """Return the timers that the backend has."""
    return [(row["key0"], row["time_ms"]) for row in rows_in(sections_of(story.backend.freeze()))[EVENT]]


@each_form
def test_a_timer_that_came_and_went_between_two_checkpoints_is_not_there(form: str) -> None:
    story, first = begun(form)
    story.change("register", [(key, 50) for key in range(100)])
    story.change("take", 50)
    story.change("register", [(7, 50), (8, 107)])
    story.change("delete", [(8, 107)])
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    story.check()
    story.check(2)


@each_form
def test_timers_of_chunks_fire_in_the_order_in_which_they_would_have(form: str) -> None:
    story = Story(Timers(form))
    story.change("register", [(key, 100 + key % 7) for key in range(MANY)])
    story.checkpoint()
    story.change("register", [(key, 100 + key % 7) for key in range(MANY, MANY + 50)])
    story.change("delete", [(key, 100 + key % 7) for key in range(0, 600, 30)])
    manifest = story.checkpoint()
    assert len(paths(manifest)) == 2
    wanted = fired(story.backend)
    for parallelism in (1, 2):
        found = []
        for worker in range(parallelism):
            backend = story.use.make(story.worker)
            assert story.restore(manifest, backend, worker, parallelism) == (parallelism == 1)
            found.append(fired(backend))
        assert sorted(pair for part in found for pair in part) == sorted(wanted)
        for part in found:
            there = set(part)
            assert part == [pair for pair in wanted if pair in there]


def fired(backend: Any) -> list[tuple[int, int]]:
    timers, found = backend.timers.of(TimeKind.EVENT_TIME), []
    while taken := take(backend, timers, 1_000_000, 4_096):
        found += taken
    return found


@each_form
def test_what_goes_on_with_chunks_shares_those_of_timers(form: str) -> None:
    story, _ = begun(form)
    story.change("take", 130)
    before = story.checkpoint()
    story.restart()
    assert story.continued == 1
    story.change("take", 150)
    story.change("register", [(key, 140) for key in range(10)])
    manifest = story.checkpoint()
    assert paths(before) < paths(manifest)
    story.check()
    story.check(2)
    story.check_no_leak()


@each_form
def test_a_function_that_gets_or_loses_timers_takes_the_rows_of_chunks(form: str) -> None:
    """Whether it may lose them is for the operator to say (TM6)."""
    timed, first = begun(form)
    without = timed.use.many.make(timed.worker)
    assert not timed.restore(first, without)
    assert rows_in(sections_of(without.freeze())) == timed.use.many.wanted(timed.model["values"])
    story = Story(Many(form))
    story.change(range(2_000), 0)
    manifest = story.checkpoint()
    backend = timed.use.make(story.worker)
    assert not story.restore(manifest, backend)
    assert rows_in(sections_of(backend.freeze()))["value"] == story.use.wanted(story.model)["value"]


# TM6
@each_form
def test_a_savepoint_has_timers_as_rows(form: str) -> None:
    story, _ = begun(form)
    story.change("take", 120)
    story.freeze()
    savepoint = story.savepoint()
    assert {part.section for part in savepoint.entries[0].parts} == {f"{STATE_PREFIX}sum"}
    assert story.contents(savepoint) == story.use.wanted(story.model)


@each_form
def test_what_is_not_known_of_timers_is_no_reason_to_write_all_values_anew(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 50)
    story = Story(Timers(form))
    story.change("put", range(2_500))
    story.change("register", [(key, 50) for key in range(30)])
    first = story.checkpoint()
    for at in range(100, 600, 100):
        story.change("put", range(20 if at < 500 else 0), at)
        story.change("register", [(key, at + key) for key in range(90)])
        story.change("take", at + 59 if at < 500 else at + 99)
        manifest = story.checkpoint()
        assert paths(first) < paths(manifest)
        assert new_bytes(manifest) < new_bytes(first) / 20
    assert not story.model["timers"], "all have gone, which no row says"
    story.check()
    story.check(2)
    story.restart()
    assert story.continued == 1
    story.change("register", [(key, 50) for key in range(3)])
    assert paths(first) < paths(story.checkpoint())
    story.check()
    story.restart()
    story.check(2)


def test_what_is_not_known_of_one_state_is_no_reason_to_write_another_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One state has few keys, which come and go; the other one many, which stay."""
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 50)
    busy = StateDescriptor("busy", StateKind.VALUE, pa.int64())
    story = Story(Many("row"))
    story.backend = story.use.make(story.worker, [VALUE, busy])
    story.change(range(2_000), 0)
    first = story.checkpoint()
    cells = story.backend.cells(busy)
    for turn in range(3):
        for key in range(500):
            cells.put(key, turn)
            if key >= 4:
                cells.remove(key)
        story.change(range(20), turn)
        manifest = story.checkpoint()
        assert paths(first) < paths(manifest)
        assert new_bytes(manifest) < new_bytes(first) / 20
        backend = story.use.make(story.worker, [VALUE, busy])
        assert story.restore(manifest, backend)
        found = rows_in(sections_of(backend.freeze()))
        assert found["busy"] == [{"key0": key, "value": turn} for key in range(4)]
        assert found["value"] == story.use.wanted(story.model)["value"]


@each_form
def test_where_nothing_is_known_of_any_state_chunks_begin_anew(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 1_000)
    story, first = begun(form)
    story.change("take", 100 + MANY)
    story.change("put", range(2_500), 1)
    if form == "column":
        story.backend.values(VALUE).renumber(np.arange(len(story.backend._index)))
    manifest = story.checkpoint()
    assert not paths(first) & paths(manifest)
    story.check()


@each_form
def test_no_more_is_remembered_of_timers_than_half_of_all(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 10)
    story, _ = begun(form)
    timers = story.backend.timers.event_time

    def remembered() -> int | None:
        if form == "row":
            return None if timers._changed is None else len(timers._changed)
        return None if timers._noted._now is None else sum(len(times) for times, _ in timers._noted._now)

    story.change("delete", [(key, 100 + key) for key in range(100)])
    assert remembered() == 100
    story.change("take", 100 + MANY * 3 // 4)
    assert remembered() is None
    story.checkpoint()
    assert remembered() == 0
    story.check()


def test_little_is_done_for_each_batch_that_changes_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What single batches did is kept in few arrays, each row of which is copied as often as they double."""
    story, _ = begun("column")
    timers = story.backend.timers.event_time
    for key in range(3_000):
        timers.register(np.array([key]), np.array([7]))
    assert len(timers._noted._now) < 16
    story.model["timers"] |= {(key, 7): None for key in range(3_000)}
    story.checkpoint()
    story.check()


def test_a_checkpoint_brings_into_order_what_changed_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what has changed since somebody had all timers in order."""
    story, _ = begun("column")
    in_order, looked_at = timers_module._last_of_each, []

    def counting(times: Any, slots: Any) -> Any:
        looked_at[-1] += len(times)
        return in_order(times, slots)

    monkeypatch.setattr(timers_module, "_last_of_each", counting)
    for at in range(8):
        story.change("register", [(key, at) for key in range(100)])
        looked_at.append(0)
        manifest = story.checkpoint()
    assert max(looked_at) < 400
    assert story.contents(manifest) == story.use.wanted(story.model)


@pytest.mark.parametrize("apart", [1, 1 << 40])
def test_timers_of_keys_that_are_numbered_anew_are_all_written(apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most keys have a timer that fires; the others have many, so that what changed is little beside what there is."""
    story = Story(Timers("column"))
    story.change("register", [(key * apart, 100) for key in range(750)])
    story.change("register", [(key * apart, 200 + n + key % 7) for key in range(750, 1_000) for n in range(20)])
    first = story.checkpoint()
    story.change("take", 100)
    monkeypatch.setattr(story.backend, "_renumber_at", 250)
    story.backend.prepare()
    assert len(story.backend._index) == 250, "those that have fired have no number any more"
    story.change("register", [(key * apart, 50) for key in range(10)])
    assert not paths(first) & paths(story.checkpoint())
    story.check()
    story.check(2)


def test_timers_in_chunks_are_cut_by_key_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 12_500)
    story, first = begun("column")
    assert len(chunks_of(first)) > 3
    story.change("take", 150)
    story.checkpoint()
    for parallelism in (1, 2, 5):
        story.check(parallelism)


def test_timers_that_are_not_continued_are_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    story, first = begun("column")
    backend = story.use.make(story.worker)
    assert not story.restore(first, backend, 0, 2)
    assert not story.restore(first, backend, 1, 2)
    story.backend, story.shared = backend, SharedFiles(chunks_of(first))
    assert not paths(first) & paths(story.checkpoint())
    story.check()


def test_timers_in_chunks_are_read_and_written_without_a_pipeline(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    story, _ = begun("column", open_storage(str(root)))
    story.change("take", 300)
    story.change("register", [(7, 50)])
    story.checkpoint()
    found = hg.read_state(root / "p", "sum", EVENT)
    assert sorted(zip(found["id"], found["time_ms"], strict=True)) == sorted(story.model["timers"])
    draft = hg.edit_savepoint(root / "p", tmp_path / "changed")
    draft.replace("sum", EVENT, found.filter(found["id"] < 10))
    draft.write()
    changed = hg.read_state(tmp_path / "changed", "sum", EVENT)
    assert changed["id"].to_list() == [7]
    assert len(hg.read_state(tmp_path / "changed", "sum", "value")) == 20
