"""Mutants of the coordinator's hooks, of sources that set their own barrier, and of markers in streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.connectors import test_stream_cuts as stream_tests
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_coordinator_hooks as hook_tests
from tests.protocol.checkpoints import test_recovery as recovery_tests
from tests.protocol.subtasks import test_induced as cut_tests
from tests.runtime.driver import test_hook_calls as call_tests
from tests.runtime.worker import test_induced_runner as runner_tests

from headgate.connectors.stream_cuts import SegmentCuts, StreamCutHook
from headgate.model.ids import CheckpointId
from headgate.model.options import ORDINARY
from headgate.protocol.checkpoints import completion, pending, recovery
from headgate.protocol.checkpoints.completion import Completion
from headgate.protocol.subtasks.induced import InducedCut, ReadOn
from headgate.protocol.subtasks.subtask import Subtask
from headgate.runtime.driver.hook_calls import HookCalls, HookThread
from headgate.runtime.worker.ahead_reader import AheadReader
from headgate.runtime.worker.sources import Source
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.store.catalogue import markers
from headgate.store.catalogue import tables as t
from headgate.store.store import Store

Test = Callable[..., object]


def changed(owner: object, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    original = getattr(owner, name)
    return patched(owner, name, lambda *a, **options: change(original, *a, **options))


# -- hooks ------------------------------------------------------------------------------------------------------------


@contextmanager
def sources_are_triggered_beside_the_hooks() -> Iterator[None]:  # EI1
    def reserved(call: Any, self: Any, checkpoint: Any, **options: Any) -> Any:
        effects = call(self, checkpoint, **options)
        return [*effects, completion.TriggerSources(checkpoint, self.pending[checkpoint].options)]

    with changed(Completion, "reserved", reserved):
        yield


@contextmanager
def the_options_are_those_of_the_last_answer() -> Iterator[None]:  # EI1
    def answered(call: Any, self: Any, event: Any) -> Any:
        return [
            replace(e, options=self.triggering._options(None)) if isinstance(e, completion.TriggerSources) else e
            for e in call(self, event)
        ]

    with changed(Completion, "hook_answered", answered):
        yield


@contextmanager
def one_answer_is_enough() -> Iterator[None]:  # EI1, EI4
    def answered(call: Any, self: Any, event: Any) -> Any:
        if event.checkpoint in self.pending.ids:
            self.pending[event.checkpoint].awaited[:] = [event.hook]
        return call(self, event)

    with changed(Completion, "hook_answered", answered):
        yield


@contextmanager
def a_hook_that_failed_does_not_count() -> Iterator[None]:  # EI5
    def failed(call: Any, self: Any, checkpoint: Any, hook: Any, reason: Any) -> Any:
        return call(self, checkpoint, hook, pending.AbortReason.OVERTAKEN)

    with changed(Completion, "hook_failed", failed):
        yield


@contextmanager
def a_full_checkpoint_waits_for_another_acknowledgement() -> Iterator[None]:  # EI7
    def answered(call: Any, self: Any, event: Any) -> Any:
        effects = call(self, event)
        return [e for e in effects if not isinstance(e, pending.WriteManifest)]

    with changed(Completion, "hook_answered", answered):
        yield


@contextmanager
def data_of_a_hook_that_is_gone_is_dropped() -> Iterator[None]:  # EI9
    with patched(recovery, "unclaimed_hook", lambda manifest, known: None):
        yield


@contextmanager
def a_restart_without_a_checkpoint_tells_no_hook() -> Iterator[None]:  # EI8, C37
    def begin(call: Any, self: Any, pipeline: Any, generation: Any, restored: Any) -> None:
        if restored is not None:
            call(self, pipeline, generation, restored)

    with changed(HookCalls, "begin", begin):
        yield


@contextmanager
def what_nobody_waits_for_is_called_all_the_same() -> Iterator[None]:  # EI6
    def trigger(call: Any, self: Any, checkpoint: Any, name: Any, is_wanted: Any, *others: Any) -> None:
        call(self, checkpoint, name, lambda: True, *others)

    with changed(HookCalls, "trigger", trigger):
        yield


@contextmanager
def all_hooks_share_a_thread() -> Iterator[None]:  # EI2
    shared: list[Any] = []

    def put(call: Any, self: Any, what: Any) -> None:
        shared.append(self)
        call(shared[0], lambda _, own=self._hook: what(own))

    with changed(HookThread, "put", put):
        yield


# -- sources ----------------------------------------------------------------------------------------------------------


@contextmanager
def a_marker_without_an_announcement_cuts() -> Iterator[None]:  # EI22
    def met(call: Any, self: Any, split: Any, checkpoint: Any) -> Any:
        return [*call(self, split, checkpoint), *self.announced(checkpoint, ORDINARY)]

    with changed(InducedCut, "met", met):
        yield


@contextmanager
def markers_of_former_generations_are_waited_at() -> Iterator[None]:  # EI23
    with changed(InducedCut, "__init__", lambda call, self, first: call(self, CheckpointId(0))):
        yield


@contextmanager
def a_lost_marker_is_waited_for() -> Iterator[None]:  # EI24
    def settled(call: Any, self: Any) -> Any:
        if any(c > n for c in self._held.values() for n in self._announced):
            return []
        return call(self)

    with changed(InducedCut, "_settled", settled):
        yield


@contextmanager
def an_abort_leaves_the_splits_where_they_are() -> Iterator[None]:  # EI27
    def aborted(call: Any, self: Any, checkpoint: Any) -> Any:
        return [e for e in call(self, checkpoint) if not isinstance(e, ReadOn)]

    with changed(InducedCut, "aborted", aborted):
        yield


@contextmanager
def splits_that_ended_are_waited_for() -> Iterator[None]:  # EI25
    def splits(call: Any, self: Any, names: Any, **options: Any) -> Any:
        return call(self, tuple(dict.fromkeys((*self._open, *names))), **options)

    with changed(InducedCut, "splits", splits):
        yield


@contextmanager
def behind_the_last_barrier_markers_are_waited_for() -> Iterator[None]:  # EI26
    with patched(InducedCut, "stop", lambda self: None):
        yield


@contextmanager
def a_drained_source_waits_for_its_marker() -> Iterator[None]:  # EI26
    def now(self: Any) -> Any:
        return runner_tests.machine.SplitsSeen(tuple(self.markers.splits()))

    with patched(Source, "splits_now", now):
        yield


@contextmanager
def readers_may_go_on_behind_a_marker() -> Iterator[None]:  # EI21
    with patched(Subtask, "held_splits", property(lambda self: ())):
        yield


@contextmanager
def a_full_reader_waits_for_its_marker() -> Iterator[None]:  # EI30
    def now(call: Any, self: Any) -> Any:
        return replace(call(self), is_read=True)

    with changed(Source, "splits_now", now):
        yield


@contextmanager
def markers_wait_with_the_records_they_follow() -> Iterator[None]:  # EI30
    def read_on(call: Any, self: Any) -> None:
        call(self)

    with changed(AheadReader, "_read_on", read_on):
        yield


@contextmanager
def an_announcement_is_forgotten() -> Iterator[None]:  # EI20
    with patched(SubtaskRunner, "announce", lambda self, checkpoint, options: None):
        yield


# -- streams ----------------------------------------------------------------------------------------------------------


@contextmanager
def a_second_mark_moves_the_first() -> Iterator[None]:  # S61
    def mark(call: Any, connection: Any, stream: Any, owner: str, generation: int, checkpoint: int) -> Any:
        markers.unmark(connection, owner, generation, checkpoint, checkpoint)
        return call(connection, stream, owner, generation, checkpoint)

    with changed(markers, "mark", mark):
        yield


@contextmanager
def readers_read_beyond_the_frontier() -> Iterator[None]:  # S62, SC22
    looked: list[Any] = []

    def look(call: Any, self: Any, segment: int) -> Any:
        if not looked:
            looked.append(call(self, segment))
        return replace(looked[0], ends={segment: 1 << 40})

    def limit(call: Any, self: Any, segment: int) -> int:
        return 1 << 40

    with changed(SegmentCuts, "look", look), changed(SegmentCuts, "limit", limit):
        yield


def a_marker_records_what_it_was_closed_before() -> AbstractContextManager[None]:  # S85
    return patched(t, "present", lambda stream_id: (t.segments.c.stream_id == stream_id,))


def closed_segments_have_no_marker() -> AbstractContextManager[None]:  # S85
    def frontier(call: Any, connection: Any, *of: Any) -> Any:
        found = call(connection, *of)
        rows = set(connection.execute(sa.select(t.markers.c.segment_id, t.markers.c.checkpoint)).tuples())
        own = {x: tuple(m for m in all_of if (x, m.checkpoint) in rows) for x, all_of in found.markers.items()}
        return replace(found, markers=own)

    return changed(markers, "frontier", frontier)


def readers_ask_for_all_segments_that_they_ever_had() -> AbstractContextManager[None]:  # S85
    return patched(SegmentCuts, "leave", lambda self, segment: None)


@contextmanager
def readers_do_not_stand_still() -> Iterator[None]:  # SC21
    with patched(SegmentCuts, "stands_still", lambda self, split: False):
        yield


@contextmanager
def markers_of_any_generation_are_met() -> Iterator[None]:  # SC23
    def frontier(call: Any, self: Any, name: str, *, owner: str, generation: int, segments: Any = None) -> Any:
        found = [call(self, name, owner=owner, generation=g, segments=segments) for g in (1, generation)]
        return found[0] if found[0].markers else found[1]

    with changed(Store, "frontier", frontier):
        yield


@contextmanager
def markers_of_aborted_checkpoints_stay() -> Iterator[None]:  # SC24
    with patched(StreamCutHook, "notify_checkpoint_aborted", lambda self, checkpoint_id: None):
        yield


@contextmanager
def a_new_generation_keeps_old_markers() -> Iterator[None]:  # SC24
    with patched(Store, "unmark_others", lambda self, **options: None):
        yield


HOOKS: list[tuple[Mutant, Test]] = [
    (
        sources_are_triggered_beside_the_hooks,
        hook_tests.test_hooks_are_called_behind_the_announcement_and_before_any_source_is_triggered,
    ),
    (
        the_options_are_those_of_the_last_answer,
        hook_tests.test_what_a_checkpoint_is_to_be_does_not_change_while_its_hooks_are_awaited,
    ),
    (
        one_answer_is_enough,
        hook_tests.test_hooks_are_called_behind_the_announcement_and_before_any_source_is_triggered,
    ),
    (
        a_hook_that_failed_does_not_count,
        hook_tests.test_a_hook_that_fails_or_is_late_aborts_the_checkpoint_and_that_counts,
    ),
    (
        a_full_checkpoint_waits_for_another_acknowledgement,
        hook_tests.test_a_checkpoint_that_everybody_acknowledged_completes_with_the_last_answer,
    ),
    (data_of_a_hook_that_is_gone_is_dropped, recovery_tests.test_data_of_a_hook_that_is_gone_is_named),
    (
        a_marker_without_an_announcement_cuts,
        cut_tests.test_a_marker_that_comes_before_its_checkpoint_was_heard_of_waits,
    ),
    (markers_of_former_generations_are_waited_at, cut_tests.test_a_marker_of_a_checkpoint_that_is_over_is_read_past),
    (a_lost_marker_is_waited_for, cut_tests.test_a_checkpoint_whose_marker_was_passed_is_given_up),
    (an_abort_leaves_the_splits_where_they_are, cut_tests.test_a_marker_of_a_checkpoint_that_is_over_is_read_past),
    (splits_that_ended_are_waited_for, cut_tests.test_a_split_that_has_ended_counts_as_cut),
    (
        behind_the_last_barrier_markers_are_waited_for,
        cut_tests.test_behind_the_last_barrier_before_a_stop_a_retry_is_cut_at_once,
    ),
    (a_drained_source_waits_for_its_marker, runner_tests.test_an_end_counts_as_cut_and_so_does_a_drain),
    (readers_may_go_on_behind_a_marker, runner_tests.test_records_behind_a_marker_are_refused),
    (an_announcement_is_forgotten, runner_tests.test_the_barrier_goes_out_between_the_right_records),
]


@pytest.mark.parametrize(("mutant", "test"), HOOKS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_hooks_and_markers_is_found(mutant: Mutant, test: Test) -> None:
    assert_caught(mutant, test)


CALLS: list[tuple[Mutant, Test]] = [
    (a_restart_without_a_checkpoint_tells_no_hook, call_tests.test_every_generation_begins_with_a_restore_or_a_reset),
    (what_nobody_waits_for_is_called_all_the_same, call_tests.test_a_hook_is_not_called_for_a_checkpoint_that_is_over),
]


@pytest.mark.parametrize(("mutant", "test"), CALLS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_a_hooks_thread_is_found(mutant: Mutant, test: Test) -> None:
    hook = call_tests.Noting()
    assert_caught(mutant, test, hook)


def test_hooks_that_share_a_thread_are_found(monkeypatch: pytest.MonkeyPatch) -> None:  # EI2
    monkeypatch.setattr(call_tests, "WAIT_S", 1)
    hook = call_tests.Noting()
    try:
        assert_caught(all_hooks_share_a_thread, call_tests.test_a_stuck_hook_holds_up_nobody_else, hook)
    finally:
        hook.gate.set()


AT_MOST_ONCE: list[tuple[Mutant, Test]] = [
    (a_full_reader_waits_for_its_marker, runner_tests.test_a_source_that_holds_enough_is_cut_where_it_is),
    (markers_wait_with_the_records_they_follow, runner_tests.test_at_most_once_a_marker_counts_when_it_is_read),
]


@pytest.mark.parametrize(("mutant", "test"), AT_MOST_ONCE, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_reading_ahead_is_found(mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, test, monkeypatch)


def stream_asking(store: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stream_tests.test_a_reader_asks_for_the_segments_that_it_reads(store, patch)


STREAMS: list[tuple[Mutant, Test]] = [
    (a_second_mark_moves_the_first, stream_tests.test_marking_again_returns_what_was_recorded_first),
    (
        readers_read_beyond_the_frontier,
        stream_tests.test_a_marker_that_is_recorded_while_a_reader_reads_is_not_run_over,
    ),
    (
        a_marker_records_what_it_was_closed_before,
        stream_tests.test_a_marker_records_only_segments_that_take_events,
    ),
    (closed_segments_have_no_marker, stream_tests.test_a_marker_records_only_segments_that_take_events),
    (readers_ask_for_all_segments_that_they_ever_had, stream_asking),
    (readers_do_not_stand_still, stream_tests.test_a_reader_stands_still_at_the_marker_of_every_segment),
    (markers_of_any_generation_are_met, stream_tests.test_only_markers_of_the_own_generation_are_met),
    (markers_of_aborted_checkpoints_stay, stream_tests.test_markers_go_with_the_end_of_their_checkpoint),
    (a_new_generation_keeps_old_markers, stream_tests.test_markers_go_with_the_end_of_their_checkpoint),
]


@pytest.mark.parametrize(("mutant", "test"), STREAMS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_markers_in_streams_is_found(mutant: Mutant, test: Test, tmp_path: Path) -> None:
    store = Store.shared(tmp_path / "store")
    store.create_stream(stream_tests.NAME, stream_tests.SCHEMA, segments=3, routing_key="key")
    assert_caught(mutant, test, store)
