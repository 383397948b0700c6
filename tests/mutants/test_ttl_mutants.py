"""Mutants of time-to-live: what expires too late or too early, comes back, is never dropped, or is written (TL1–TL9).

Those that the simulator finds are used by ``tests.sim.product.test_ttl_runs``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.mutants.harness import assert_caught, patched
from tests.mutants.test_timer_mutants import all_of
from tests.operators.process import test_ttl as tests
from tests.operators.process import test_ttl_histories as histories
from tests.runtime.stored_state import test_ttl_shown as shown
from tests.state import test_expiry_histories as columns
from tests.state.memory import test_memory_expiry as memory

from headgate.operators.process import expiring as row_handles
from headgate.operators.process.keyed_states import MapState
from headgate.operators.process.timed import TimedOperator
from headgate.runtime.stored_state.shapes import Shape
from headgate.state import backend, expiring_rows
from headgate.state.columns import FrozenRows
from headgate.state.descriptors import StateDescriptor
from headgate.state.memory import expiring, rows
from headgate.state.memory.by_column import MemoryColumnBackend
from headgate.state.memory.cells import MemoryCells
from headgate.state.memory.expiring import ExpiringLists, ExpiringMaps, ExpiringValues
from headgate.state.memory.expiring_cells import ExpiringCells
from headgate.state.memory.expiry import Expiries, Sweep
from headgate.state.memory.lists import MemoryLists
from headgate.state.memory.maps import MemoryMaps
from headgate.state.memory.values import MemoryValues
from headgate.state.ttl import EXPIRES_COLUMN, NEVER_MS, TTL, TtlMeta, as_declared

Patch = AbstractContextManager[None]

# -- found by seeds of the simulator ----------------------------------------------------------------------------------


def everything_is_new_again_at_a_restore() -> Patch:
    def forgotten(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        found = as_declared(batch, schema)
        if found.schema.names[-1] != EXPIRES_COLUMN:
            return found
        never = pa.repeat(pa.scalar(NEVER_MS), found.num_rows)
        return pa.RecordBatch.from_arrays([*found.columns[:-1], never], schema=schema)

    return patched(backend, "as_declared", forgotten)


def nobody_remembers_what_time_it_was() -> Patch:
    return patched(TtlMeta, "found_in", staticmethod(lambda sections, path: None))


def reads_renew_nothing() -> Patch:
    return patched(TTL, "is_renewed_by_reads", False)


def reads_always_renew() -> Patch:
    return patched(TTL, "is_renewed_by_reads", True)


def nothing_expires_while_a_pipeline_runs() -> Patch:
    """What has expired goes at a restore only."""
    first: dict[int, int] = {}

    def begin(self: Any) -> None:
        self._backend.time.now_ms = first.setdefault(id(self), self._time.processing_time_ms)

    return patched(TimedOperator, "_begin_call", begin)


def a_restore_drops_a_little_more() -> Patch:
    end_restore = {cls: cls.end_restore for cls in (rows.MemoryRowBackend, MemoryColumnBackend)}

    def later(cls: Any) -> Callable[[Any], None]:
        def end(self: Any) -> None:
            self.time.now_ms += 5
            end_restore[cls](self)
            self.time.now_ms -= 5
            for state in self._expiring:
                state.sweep()

        return end

    def read(self: Any, size: int) -> Any:
        return self._at.read(size)[:size] - 5

    ends = [patched(cls, "end_restore", later(cls)) for cls in end_restore]
    return all_of(*ends, patched(Expiries, "read", read))


def a_map_expires_as_a_whole() -> Patch:
    """One entry that is written renews the others."""
    mark = ExpiringMaps._mark

    def all_marked(self: Any, entries: Any) -> None:
        mark(self, entries)
        every = np.arange(len(self._pairs))
        mark(self, every[self._has(every)])

    def put(self: Any, own_key: Any, stored: Any) -> None:
        entries = expiring_rows.live_entries(self._cells, self._cursor.key, self._time.now_ms) or {}
        kept = {map_key: self._now(pair[0]) for map_key, pair in entries.items()}
        self._cells.put(self._cursor.key, {**kept, own_key: stored})

    return all_of(patched(ExpiringMaps, "_mark", all_marked), patched(row_handles.ExpiringMapState, "_set", put))


# -- found by named tests ---------------------------------------------------------------------------------------------


def columns_live_a_millisecond_more() -> Patch:
    def are_live(self: Any, slots: Any, size: int) -> Any:
        return self._at.read(size).take(slots) >= self.now_ms

    return patched(Expiries, "are_live", are_live)


def values_by_row_live_a_millisecond_more() -> Patch:
    live = expiring_rows.live_value
    return patched(row_handles, "live_value", lambda cells, key, now_ms: live(cells, key, now_ms - 1))


def what_has_expired_is_added_to() -> Patch:
    """Sums begin with what was there before it expired."""
    add = MemoryValues.add

    def added(self: Any, slots: Any, values: Any) -> Any:
        with patched(ExpiringValues, "_has", MemoryValues._has):
            return add(self, slots, values)

    return patched(ExpiringValues, "add", added)


def each_row_asks_what_time_it_is() -> Patch:
    class Asking:
        def __init__(self, time: Any) -> None:
            self._time = time

        @property
        def now_ms(self) -> int:
            return int(self._time.processing_time_ms)

        @now_ms.setter
        def now_ms(self, ms: int) -> None:
            pass

    def begin(self: Any) -> None:
        asking = Asking(self._time)
        self._backend.time = asking
        for state in self._backend._expiring:
            for part in (state, getattr(state, "_expiries", None), getattr(state, "_read_until", None)):
                if part is not None and hasattr(part, "_time"):
                    part._time = asking
        for name in ("value", "list", "map"):
            handle = getattr(self._function, name)
            if hasattr(handle, "_time"):
                handle._time = asking

    return patched(TimedOperator, "_begin_call", begin)


def what_stays_the_same_is_not_written() -> Patch:
    return patched(ExpiringValues, "replace", MemoryValues.replace)


def an_entry_that_is_written_again_stays_in_its_place() -> Patch:
    return patched(row_handles.ExpiringMapState, "_set", MapState._set)


def a_read_revives_what_had_expired() -> Patch:
    def look_at(self: Any, slots: Any) -> None:
        self._read_until.on_read(slots, self._keys_count())
        self._drop_expired(slots)

    return patched(ExpiringLists, "_look_at", look_at)


def what_a_read_renewed_is_not_in_the_snapshot() -> Patch:
    freeze = ExpiringLists.freeze

    def frozen(self: Any) -> FrozenRows:
        with patched(Expiries, "freeze", lambda self, size: np.zeros(size, np.int64)):
            return freeze(self)

    return patched(ExpiringLists, "freeze", frozen)


def rounds_are_for_keys_whose_state_has_expired() -> Patch:
    return patched(ExpiringCells, "keys", MemoryCells.keys)


def rounds_by_batch_are_for_keys_whose_state_has_expired() -> Patch:
    return all_of(
        patched(ExpiringValues, "living", MemoryValues.living),
        patched(ExpiringMaps, "_living_entries", MemoryMaps._living_entries),
    )


def what_has_expired_is_written() -> Patch:
    def all_rows(frozen: FrozenRows, expiries: Any, now_ms: int) -> FrozenRows:
        def found() -> Any:
            slots, columns = frozen.rows()
            return slots, [*columns, pa.array(expiries(None))]

        return FrozenRows(frozen.count, found, frozen.of)

    return patched(expiring, "live_rows", all_rows)


def what_has_expired_is_counted() -> Patch:
    live = expiring.live_rows

    def counted(frozen: FrozenRows, expiries: Any, now_ms: int) -> FrozenRows:
        return FrozenRows(frozen.count, live(frozen, expiries, now_ms).rows, frozen.of)

    return patched(expiring, "live_rows", counted)


def a_snapshot_by_row_is_of_the_time_when_it_is_written() -> Patch:
    living, latest = rows._living, [0]
    begin = TimedOperator._begin_call

    def noted(self: Any) -> None:
        begin(self)
        latest[0] = self._backend.time.now_ms

    late = patched(rows, "_living", lambda descriptor, objects, now_ms: living(descriptor, objects, latest[0]))
    return all_of(patched(TimedOperator, "_begin_call", noted), late)


def what_had_no_ttl_never_gets_one() -> Patch:
    nothing = lambda self: None  # noqa: E731
    return all_of(*(patched(cls, "end_restore", nothing) for cls in (rows.MemoryRowBackend, MemoryColumnBackend)))


def a_ttl_is_part_of_the_identity() -> Patch:
    text = StateDescriptor.text
    return patched(StateDescriptor, "text", lambda self: f"{text(self)} {self.ttl}")


def only_one_form_of_a_section_is_known() -> Patch:
    return patched(backend, "other_form", lambda schema: schema)


def a_restore_drops_nothing() -> Patch:
    return all_of(
        patched(ExpiringMaps, "_drop", lambda self, start, end: None),
        patched(ExpiringLists, "_drop_expired", lambda self, slots: None),
    )


def texts_stay_when_nothing_refers_to_them() -> Patch:
    return patched(ExpiringValues, "sweep", lambda self: self._drop(*self._sweep.turn(self._size)))


def what_was_restored_counts_as_new() -> Patch:
    """As it was once: the first turn behind a restore looks at everything."""
    return patched(Sweep, "turn", lambda self, size, added=0, turn=Sweep.turn: turn(self, size, size + added))


def rows_are_never_swept() -> Patch:
    return patched(ExpiringCells, "sweep", lambda self: None)


def rows_are_swept_all_at_once() -> Patch:
    sweep = ExpiringCells.sweep

    def all_of_them(self: Any) -> None:
        for _ in range(100):
            sweep(self)

    return patched(ExpiringCells, "sweep", all_of_them)


def columns_are_never_swept() -> Patch:
    return patched(MemoryColumnBackend, "_drop_some_that_expired", lambda self: None)


def the_sweep_follows_what_comes() -> Patch:
    """As it was once: at the end it goes on with what has come meanwhile, if anything has."""
    turn = Sweep.turn

    def following(self: Any, size: int, added: int = 0) -> Any:
        start, end = turn(self, size, added)
        self._at = end
        return start, end

    return patched(Sweep, "turn", following)


def columns_are_swept_all_at_once() -> Patch:
    return patched(Sweep, "turn", lambda self, size, added=0: (0, size))


def the_sweep_does_not_care_how_many_came() -> Patch:
    turn = Sweep.turn

    def slow(self: Any, size: int, added: int = 0) -> Any:
        self._size = size
        return turn(self, size)

    return patched(Sweep, "turn", slow)


def rows_are_swept_by_the_same_number() -> Patch:
    sweep = ExpiringCells.sweep

    def slow(self: Any) -> None:
        self._due = 0
        sweep(self)

    return patched(ExpiringCells, "sweep", slow)


def a_queue_has_the_blocks_of_a_list() -> Patch:
    init = MemoryLists.__init__
    return patched(MemoryLists, "__init__", lambda self, dtype, count, **options: init(self, dtype, count))


def the_expiry_is_a_column_as_any_other() -> Patch:
    return patched(Shape, "expires", False)


CLOCK = tests.test_what_was_written_lives_for_its_duration_and_not_a_millisecond_more
SNAPSHOT = tests.test_a_snapshot_has_the_expiry_of_what_lives_and_nothing_else
NAMED: list[tuple[Callable[[], Patch], Callable[..., Any], tuple[Any, ...]]] = [
    (columns_live_a_millisecond_more, CLOCK, ("batch",)),
    (values_by_row_live_a_millisecond_more, CLOCK, ("row",)),
    (each_row_asks_what_time_it_is, tests.test_one_time_holds_for_all_rows_of_a_call, ("row",)),
    (each_row_asks_what_time_it_is, tests.test_one_time_holds_for_all_rows_of_a_call, ("batch",)),
    (columns_live_a_millisecond_more, columns.test_many_rows_at_once_are_one_after_the_other_at_one_time, ("write",)),
    (what_has_expired_is_added_to, columns.test_many_rows_at_once_are_one_after_the_other_at_one_time, ("write",)),
    (
        what_stays_the_same_is_not_written,
        tests.test_writing_counts_also_where_the_value_stays_the_same,
        ("batch",),
    ),
    (reads_always_renew, tests.test_reading_renews_only_if_that_was_declared, ("row",)),
    (reads_renew_nothing, tests.test_reading_renews_only_if_that_was_declared, ("batch",)),
    (a_map_expires_as_a_whole, tests.test_elements_and_entries_expire_each_by_itself, ("row",)),
    (a_map_expires_as_a_whole, tests.test_elements_and_entries_expire_each_by_itself, ("batch",)),
    (
        an_entry_that_is_written_again_stays_in_its_place,
        tests.test_an_entry_that_is_written_again_expires_behind_the_others,
        ("row",),
    ),
    (
        a_read_revives_what_had_expired,
        histories.test_a_history_of_everything_is_that_of_plain_python,
        ("batch", (5, "read_and_write")),
    ),
    (
        what_a_read_renewed_is_not_in_the_snapshot,
        tests.test_each_form_restores_what_the_other_wrote_also_what_was_renewed,
        ("batch",),
    ),
    (rounds_are_for_keys_whose_state_has_expired, tests.test_rounds_are_for_keys_of_which_anything_lives, ("row",)),
    (
        rounds_by_batch_are_for_keys_whose_state_has_expired,
        tests.test_rounds_are_for_keys_of_which_anything_lives,
        ("batch",),
    ),
    (
        nobody_remembers_what_time_it_was,
        tests.test_a_date_that_steps_between_two_starts_brings_nothing_back,
        ("row", -1_000_000, ["7", "[7]", "[(0, 7)]"]),
    ),
    (nobody_remembers_what_time_it_was, tests.test_the_latest_of_the_former_subtasks_says_what_time_it_is, ("batch",)),
    (what_has_expired_is_written, SNAPSHOT, ("batch",)),
    (what_has_expired_is_counted, SNAPSHOT, ("batch",)),
    (a_snapshot_by_row_is_of_the_time_when_it_is_written, SNAPSHOT, ("row",)),
    (
        what_had_no_ttl_never_gets_one,
        tests.test_what_was_written_before_there_was_a_ttl_counts_as_written_at_the_restore,
        ("row",),
    ),
    (
        what_had_no_ttl_never_gets_one,
        tests.test_a_shorter_ttl_counts_from_the_restore_and_a_longer_one_from_the_next_write,
        ("batch",),
    ),
    (a_ttl_is_part_of_the_identity, tests.test_a_ttl_is_no_part_of_the_identity_of_state, ("row",)),
    (
        only_one_form_of_a_section_is_known,
        tests.test_a_ttl_that_goes_leaves_what_lived_at_the_barrier_for_ever,
        ("row",),
    ),
    (the_expiry_is_a_column_as_any_other, shown.test_a_key_that_is_called_as_the_expiry_keeps_its_position, ()),
]


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), NAMED, ids=lambda value: getattr(value, "__name__", str(value)[:20])
)
def test_a_planted_bug_of_ttl_is_caught(
    mutant: Callable[[], Patch], test: Callable[..., Any], arguments: tuple[Any, ...], tmp_path: Any
) -> None:
    arguments = arguments or (tmp_path,)
    with tests.unswept():
        assert_caught(mutant, test, *arguments)


OF_MEMORY: list[tuple[Callable[[], Patch], Callable[..., Any]]] = [
    (a_restore_drops_nothing, memory.test_what_expired_before_a_restore_is_dropped_by_it),
    (
        texts_stay_when_nothing_refers_to_them,
        memory.test_texts_that_expired_take_no_room_although_their_keys_have_other_state,
    ),
    (what_was_restored_counts_as_new, memory.test_what_was_restored_is_not_looked_at_all_at_once_when_records_come),
    (rows_are_never_swept, memory.test_keys_by_row_whose_values_expired_are_forgotten_while_only_another_key_is_used),
    (
        rows_are_swept_all_at_once,
        memory.test_keys_by_row_whose_values_expired_are_forgotten_while_only_another_key_is_used,
    ),
    (columns_are_never_swept, memory.test_columns_whose_values_expired_are_forgotten_while_only_another_key_is_used),
    (the_sweep_does_not_care_how_many_came, memory.test_the_round_keeps_up_with_what_is_added_to_keys),
    (the_sweep_follows_what_comes, memory.test_the_round_keeps_up_with_what_is_added_to_keys),
    (rows_are_swept_by_the_same_number, memory.test_the_round_keeps_up_with_keys_that_are_used_once),
    (rows_are_swept_by_the_same_number, memory.test_the_round_keeps_up_with_what_is_added_to_keys),
]


@pytest.mark.parametrize(("mutant", "test"), OF_MEMORY, ids=lambda value: value.__name__)
def test_a_planted_bug_of_sweeping_is_caught(
    mutant: Callable[[], Patch], test: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.make_small(monkeypatch)
    assert_caught(mutant, test)


def test_sweeping_all_at_once_by_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.make_small(monkeypatch)
    test = memory.test_a_turn_looks_at_a_bounded_number_of_slots
    assert_caught(columns_are_swept_all_at_once, test, monkeypatch)


def test_a_queue_that_is_moved_again_and_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test = memory.test_a_list_that_loses_at_the_beginning_what_it_gains_at_the_end_is_seldom_moved
    assert_caught(a_queue_has_the_blocks_of_a_list, test, 8, monkeypatch)
