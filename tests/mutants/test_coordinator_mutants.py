"""Mutants of the coordinator: when a checkpoint is completed, what is committed, and when a generation is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_commit as commit_tests
from tests.protocol.checkpoints import test_coordinator as coordinator_tests
from tests.protocol.checkpoints import test_coordinator_cost as cost_tests
from tests.protocol.checkpoints import test_coordinator_drain as drain_tests
from tests.protocol.checkpoints import test_coordinator_end as end_tests
from tests.sim.product.patching import around, skipped

from headgate.model.failure import FailureKind
from headgate.model.manifest import SubtaskEntry
from headgate.protocol.checkpoints import coordinator
from headgate.protocol.checkpoints.commit import Commit, CommitPermit, CommitQueue
from headgate.protocol.checkpoints.completion import Completion
from headgate.protocol.checkpoints.coordinator import Coordinator, FailGeneration, WriteManifest
from headgate.protocol.checkpoints.pending import PendingCheckpoints
from headgate.protocol.checkpoints.retention import Retention, Tolerance
from headgate.protocol.machine import Ignored


def _in_manifests(**changes: Any) -> AbstractContextManager[None]:
    """Change fields of every manifest that is ordered."""

    def write_next(call: Any, self: Any) -> Any:
        return [dataclasses.replace(e, **changes) if isinstance(e, WriteManifest) else e for e in call(self)]

    return around(Completion, "_write_next", write_next)


# -- completion -----------------------------------------------------------------------------------------------------


def a_checkpoint_completes_without_its_last_subtask() -> AbstractContextManager[None]:  # C8
    def write_next(call: Any, self: Any) -> Any:
        for checkpoint in self.pending.ids:
            acks, missing = self.pending[checkpoint].acks, self.pending.missing(checkpoint)
            if len(missing) == 1 and acks:
                acks[missing[0]] = SubtaskEntry(missing[0], next(iter(acks.values())).parts)
        return call(self)

    return around(Completion, "_write_next", write_next)


def acknowledgements_of_older_generations_count() -> AbstractContextManager[None]:  # C9
    def acknowledged(call: Any, self: Any, event: Any) -> Any:
        return call(self, dataclasses.replace(event, generation=self.generation))

    return around(Completion, "acknowledged", acknowledged)


def a_declined_checkpoint_stays_pending() -> AbstractContextManager[None]:  # C17
    return skipped(Completion, "declined", [Ignored("lost")])


def what_is_subsumed_stays_pending() -> AbstractContextManager[None]:  # C15
    return skipped(PendingCheckpoints, "subsume", [])


def the_second_acknowledgement_of_a_completed_checkpoint_deletes() -> AbstractContextManager[None]:  # C10
    return skipped(Retention, "__contains__", False)


def a_success_does_not_reset_the_count_of_failures() -> AbstractContextManager[None]:  # C22
    return skipped(Tolerance, "completed")


def the_old_checkpoint_goes_before_the_new_one_is_durable() -> AbstractContextManager[None]:  # C31
    def write_next(call: Any, self: Any) -> Any:
        effects = call(self)
        if any(isinstance(e, WriteManifest) for e in effects) and self.retention.all:
            return [coordinator.DropCheckpoint(self.retention.all[-1]), *effects]
        return effects

    return around(Completion, "_write_next", write_next)


def files_go_although_the_manifest_may_have_been_written() -> AbstractContextManager[None]:  # C12
    def on_manifest(call: Any, self: Any, event: Any) -> Any:
        acks = self.checkpoints.pending[event.checkpoint].acks
        files = tuple(part for e in acks.values() for part in e.parts if part.path)
        is_unknown = isinstance(event, coordinator.ManifestUnknown)
        return [coordinator.DeleteParts(files), *call(self, event)] if is_unknown else call(self, event)

    return around(Coordinator, "_on_manifest", on_manifest)


# -- cost -----------------------------------------------------------------------------------------------------------


def every_event_looks_at_all_acknowledgements() -> AbstractContextManager[None]:  # C64
    def check(call: Any, self: Any, last_completed: Any) -> None:
        call(self, last_completed)
        assert all(p.acks.keys() <= frozenset(self._participants) for p in self._pending.values())

    return around(PendingCheckpoints, "check", check)


def every_acknowledgement_looks_at_what_is_not_committed() -> AbstractContextManager[None]:  # C64
    def write_next(call: Any, self: Any, commits: CommitQueue) -> Any:
        assert commits.unconfirmed is not None
        return call(self, commits)

    return around(PendingCheckpoints, "write_next", write_next)


def whoever_acknowledges_is_believed() -> AbstractContextManager[None]:  # C8
    def acknowledge(self: Any, checkpoint: Any, entry: SubtaskEntry, copied: Any) -> bool:
        self._pending[checkpoint].acks[entry.subtask] = entry
        return True

    return patched(PendingCheckpoints, "acknowledge", acknowledge)


# -- commits --------------------------------------------------------------------------------------------------------


@contextmanager
def output_is_committed_before_the_manifest() -> Iterator[None]:  # C12, K1
    def write_next(call: Any, self: Any) -> Any:
        effects = call(self)
        written = [e for e in effects if isinstance(e, WriteManifest)]
        early = [
            Commit(CommitPermit(e.checkpoint, self.generation), tuple(c for n in e.entries for c in n.committables))
            for e in written
        ]
        return [e for e in early if e.committables] + effects

    def on_succeeded(call: Any, self: Any, event: Any) -> Any:
        return call(self, event) if self._commits._is_in_flight else [Ignored("early")]

    with around(Completion, "_write_next", write_next), around(Coordinator, "_on_commit_succeeded", on_succeeded):
        yield


def a_manifest_forgets_what_is_not_committed_yet() -> AbstractContextManager[None]:  # K7
    return _in_manifests(carried=())


def only_what_was_sealed_for_it_is_committed() -> AbstractContextManager[None]:  # C16
    def committables(call: Any, self: Any, pending: Any) -> Any:
        return tuple(c for c in call(self, pending) if c.checkpoint == self.last_completed)

    return around(Completion, "_committables", committables)


@contextmanager
def newer_checkpoints_are_committed_first() -> Iterator[None]:  # K2
    def next_(call: Any, self: Any) -> Any:
        if not self._is_in_flight:
            self._queue.rotate(1)
        return call(self)

    def completed(call: Any, self: Any, checkpoint: Any, committables: Any) -> Any:
        if committables:
            self._queue.append((checkpoint, committables))
        return self._next()

    with around(CommitQueue, "_next", next_), around(CommitQueue, "completed", completed):
        yield


def a_commit_that_failed_is_not_tried_again() -> AbstractContextManager[None]:  # K1
    def retry(call: Any, self: Any) -> Any:
        self._queue.popleft()
        return call(self)

    return around(CommitQueue, "retry", retry)


def a_denial_is_asked_again_after_a_restart() -> AbstractContextManager[None]:  # K5
    def on_failed(call: Any, self: Any, event: Any) -> Any:
        return [
            FailGeneration(dataclasses.replace(e.failure, kind=FailureKind.LOST))
            if isinstance(e, FailGeneration)
            else e
            for e in call(self, event)
        ]

    return around(Coordinator, "_on_commit_failed", on_failed)


# -- the end --------------------------------------------------------------------------------------------------------


def the_final_checkpoint_does_not_wait_for_everybody() -> AbstractContextManager[None]:  # C26
    def on_finished(call: Any, self: Any, event: Any) -> Any:
        if event.generation == self._generation and self._phase is coordinator.Phase.RUNNING:
            self._finished.update(self._participants)
            return self._on_all_finished()
        return call(self, event)

    return around(Coordinator, "_on_finish_reported", on_finished)


def the_pipeline_ends_before_its_last_commit() -> AbstractContextManager[None]:  # C27
    return patched(CommitQueue, "is_empty", property(lambda self: True))


def a_drain_that_comes_too_early_is_forgotten() -> AbstractContextManager[None]:  # E7
    def on_drain(call: Any, self: Any, savepoint: Any) -> Any:
        return [Ignored("too early")] if self._phase is coordinator.Phase.CREATED else call(self, savepoint)

    return around(Coordinator, "_on_drain", on_drain)


def a_checkpoint_taken_while_draining_does_not_say_so() -> AbstractContextManager[None]:  # E9
    return _in_manifests(is_draining=False)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (
        a_checkpoint_completes_without_its_last_subtask,
        coordinator_tests.test_every_subtask_must_acknowledge_before_the_manifest_is_written,
        (),
    ),
    (
        acknowledgements_of_older_generations_count,
        coordinator_tests.test_messages_of_another_generation_change_nothing,
        (2,),
    ),
    (
        a_declined_checkpoint_stays_pending,
        coordinator_tests.test_a_decline_aborts_at_once_and_deletes_what_was_acknowledged,
        (),
    ),
    (what_is_subsumed_stays_pending, coordinator_tests.test_a_subsumed_checkpoint_never_completes, ()),
    (
        the_second_acknowledgement_of_a_completed_checkpoint_deletes,
        coordinator_tests.test_a_repeated_acknowledgement_of_a_completed_checkpoint_keeps_its_file,
        (),
    ),
    (a_success_does_not_reset_the_count_of_failures, coordinator_tests.test_a_completion_forgets_earlier_failures, ()),
    (
        the_old_checkpoint_goes_before_the_new_one_is_durable,
        coordinator_tests.test_an_older_checkpoint_stays_until_the_newer_one_is_durable,
        (),
    ),
    (
        files_go_although_the_manifest_may_have_been_written,
        coordinator_tests.test_nothing_is_deleted_when_nobody_knows_whether_the_manifest_was_written,
        (),
    ),
    (
        output_is_committed_before_the_manifest,
        end_tests.test_output_is_committed_only_after_the_manifest_is_durable,
        (),
    ),
    (
        a_manifest_forgets_what_is_not_committed_yet,
        end_tests.test_commits_wait_for_the_one_before_and_are_carried_by_later_manifests,
        (),
    ),
    (
        only_what_was_sealed_for_it_is_committed,
        end_tests.test_output_of_an_aborted_checkpoint_is_committed_with_the_next,
        (),
    ),
    (
        every_event_looks_at_all_acknowledgements,
        cost_tests.test_ten_times_the_subtasks_are_ten_times_the_looks,
        (),
    ),
    (
        every_acknowledgement_looks_at_what_is_not_committed,
        cost_tests.test_what_is_not_committed_yet_is_not_looked_through_with_every_acknowledgement,
        (),
    ),
    (whoever_acknowledges_is_believed, cost_tests.test_only_participants_acknowledge_and_once, ()),
    (newer_checkpoints_are_committed_first, commit_tests.test_commits_follow_each_other_in_order, ()),
    (a_commit_that_failed_is_not_tried_again, commit_tests.test_a_failed_commit_is_repeated_before_any_later_one, ()),
    (
        a_denial_is_asked_again_after_a_restart,
        end_tests.test_a_target_that_denies_what_was_prepared_stops_the_pipeline,
        (),
    ),
    (
        the_final_checkpoint_does_not_wait_for_everybody,
        end_tests.test_the_final_checkpoint_is_triggered_at_once_when_all_have_finished,
        (),
    ),
    (the_pipeline_ends_before_its_last_commit, end_tests.test_the_run_ends_when_the_final_checkpoint_is_committed, ()),
    (a_drain_that_comes_too_early_is_forgotten, drain_tests.test_a_drain_before_the_start_is_remembered, ()),
    (
        a_checkpoint_taken_while_draining_does_not_say_so,
        drain_tests.test_a_checkpoint_that_began_while_draining_says_so,
        (),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_machine_finds_it(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    test(*arguments)
    assert_caught(mutant, test, *arguments)
