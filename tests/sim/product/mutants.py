"""Bugs planted in what surrounds the machines, with the seeds of the product that find them (SM6).

More of them are in ``mutants_of_checkpoints``, ``mutants_of_files`` and ``mutants_of_workers``. ``python -m
tests.sim.product.mutants [NAME...]`` looks for seeds anew, after workloads or faults have changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product import mutants_of_checkpoints, mutants_of_files, mutants_of_workers
from tests.sim.product.patching import Mutant

from headgate.connectors.files.commit import FileCommitter
from headgate.operators.process.by_row import ProcessOperator
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.checkpoints.targets import SubtaskTarget
from headgate.runtime.checkpoints.uploads import SnapshotWriter
from headgate.runtime.driver import claims
from headgate.runtime.driver.coordination import Coordination
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.runtime.wire.channels import InputChannel
from headgate.runtime.worker.loop_head_runner import LoopHeadRunner
from headgate.runtime.worker.loop_log import LoopLog
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.sim.product.run import run_seed
from headgate.sim.world import Violation

EVENTS_MAX = 60_000
"""A run that needs more hangs; sound ones need a tenth."""


def a_retried_snapshot_is_empty() -> AbstractContextManager[None]:
    """As version 0.1 was: what is encoded is forgotten, and nobody counts the rows."""

    def write(self: Any, job: Any, to: Any, plain: Any, shareable: Any = None) -> Any:
        target = SubtaskTarget(to, self._subtask, job.checkpoint)
        target.put_bundle(plain)
        for node, state in job.states.items():
            target.put(f"state/{node}", state._encode())
            state._forget()
        for (prefix, node), state in job.lists.items():
            target.put_state(node, state, prefix)
        return target.finish()

    return patched(SnapshotWriter, "_write_state", write)


def recovery_commits_nothing() -> AbstractContextManager[None]:
    def recover(self: Any, permit: Any, keep: Sequence[Any]) -> None:
        for name, committer in self._committers.items():
            committer.recover([c for c in keep if c.sink == name])

    return patched(SinkCommits, "recover", recover)


def recovery_keeps_nothing() -> AbstractContextManager[None]:
    recover = FileCommitter.recover
    return patched(FileCommitter, "recover", lambda self, keep: recover(self, []))


def the_first_of_several_committables_is_forgotten() -> AbstractContextManager[None]:
    commit = SinkCommits.commit

    def twice(self: Any, permit: Any, committables: Sequence[Any]) -> None:
        commit(self, permit, committables[1:] if len(committables) > 1 else committables)

    return patched(SinkCommits, "commit", twice)


def a_commit_that_failed_counts_as_done() -> AbstractContextManager[None]:
    def committed(self: Any, effect: Any) -> None:
        from headgate.protocol.checkpoints import coordinator as machine

        with contextlib.suppress(Exception):
            self._begun.commits.commit(effect.permit, effect.committables)
        self._report(machine.CommitSucceeded(effect.permit.checkpoint))

    return patched(Coordination, "_commit", committed)


def the_second_newest_checkpoint_is_restored() -> AbstractContextManager[None]:
    found = claims.recovery.candidates

    def older(log: Any) -> Any:
        all_found = found(log)
        return all_found[1:] or all_found

    return patched(claims.recovery, "candidates", older)


def after_a_rescale_only_the_own_former_subtask_is_read() -> AbstractContextManager[None]:
    def seen(self: Any, vertex: Any, *, has_own_end: bool = False) -> Any:
        return [(i, sections) for i, sections in sorted(self._formers.items()) if i == self._worker]

    return patched(RestoredSnapshots, "_seen_by", seen)


def positions_are_forgotten_at_a_restore() -> AbstractContextManager[None]:
    return patched(RestoredSnapshots, "positions", lambda self, node: None)


def a_batch_slips_in_between_the_positions_and_the_barrier() -> AbstractContextManager[None]:
    take = SubtaskRunner._take_snapshot

    def late(self: Any, checkpoint: Any, **options: Any) -> None:
        take(self, checkpoint, **options)
        if self._reading is not None and not self._reading.source.is_over:
            polled = self._reading.source.reader.poll()
            if polled is not None:
                self._reading.process(polled)

    return patched(SubtaskRunner, "_take_snapshot", late)


def a_channel_set_aside_is_read() -> AbstractContextManager[None]:
    return patched(InputChannel, "block", lambda self: None)


def loops_log_nothing() -> AbstractContextManager[None]:
    return patched(LoopLog, "append", lambda self, batch, checkpoints: None)


def replayed_feedback_is_dropped() -> AbstractContextManager[None]:
    def skip(self: Any) -> bool:
        self._is_replaying = False
        return False

    return patched(LoopHeadRunner, "_replay_next", skip)


def state_of_functions_is_not_restored() -> AbstractContextManager[None]:
    return patched(ProcessOperator, "restore", lambda self, states: None)


HERE: tuple[Mutant, ...] = (
    a_batch_slips_in_between_the_positions_and_the_barrier,
    a_channel_set_aside_is_read,
    a_commit_that_failed_counts_as_done,
    a_retried_snapshot_is_empty,
    after_a_rescale_only_the_own_former_subtask_is_read,
    loops_log_nothing,
    positions_are_forgotten_at_a_restore,
    recovery_commits_nothing,
    recovery_keeps_nothing,
    replayed_feedback_is_dropped,
    state_of_functions_is_not_restored,
    the_first_of_several_committables_is_forgotten,
    the_second_newest_checkpoint_is_restored,
)

SEEDS: dict[str, int] = {
    "a_barrier_goes_out_on_one_channel_only": 14,
    "a_channel_set_aside_is_read": 48,
    "a_channel_that_was_set_aside_stays_so": 6,
    "a_commit_that_failed_counts_as_done": 49,
    "a_denial_counts_as_transient": 49,
    "a_driver_leaves_its_port_open": 44,
    "a_failed_append_counts": 49,
    "a_life_is_drawn_at_every_start": 49,
    "a_missing_prepared_file_counts_as_published": 49,
    "a_published_file_is_not_listed": 49,
    "a_record_is_logged_twice": 48,
    "a_retried_snapshot_is_empty": 150,
    "a_snapshot_that_was_not_stored_counts": 10,
    "a_start_without_a_sound_checkpoint_is_fresh": 120,
    "a_stranger_goes_on": 19,
    "a_worker_leaves_its_connections_open": 56,
    "after_a_rescale_nobody_is_sent_the_state_of_others": 49,
    "after_a_rescale_only_the_own_former_subtask_is_read": 11,
    "any_channel_moves_event_time": 34,
    "everybody_is_restored_as_finished": 19,
    "finished_files_have_no_position": 8,
    "files_are_listed_before_they_are_published": 13,
    "functions_forget_their_state_at_a_round": 4,
    "held_records_are_held_for_ever": 49,
    "held_records_are_not_frozen": 77,
    "held_records_are_not_restored": 49,
    "keyed_state_is_kept_by_everybody": 120,
    "keys_go_anywhere": 49,
    "loops_log_nothing": 48,
    "no_sentinels": 62,
    "positions_of_files_are_those_of_the_block_before": 8,
    "positions_are_forgotten_at_a_restore": 49,
    "positions_move_with_the_list": 6,
    "probes_are_lost": 48,
    "recovery_commits_nothing": 49,
    "recovery_keeps_nothing": 49,
    "replayed_feedback_is_dropped": 22,
    "state_of_functions_is_not_restored": 49,
    "the_first_of_several_committables_is_forgotten": 0,
    "the_last_round_goes_on": 4,
    "the_log_is_overwritten": 36,
    "the_positions_of_one_former_subtask_are_dropped": 77,
    "the_restored_checkpoint_is_swept": 0,
    "the_second_newest_checkpoint_is_restored": 0,
    "the_state_of_a_head_is_written_without_its_log": 48,
    "the_state_of_one_former_subtask_is_dropped": 49,
    "too_much_is_dropped": 0,
    "users_are_told_of_every_other_round": 17,
    "watermarks_overtake_partial_windows": 3,
    "what_comes_back_keeps_its_round": 4,
    "who_finishes_early_is_not_heard": 48,
}
"""By name of the bug, a seed that found it; others are tried when it does not any more."""

ALL: dict[str, Mutant] = {
    mutant.__name__: mutant  # type: ignore[attr-defined]
    for mutant in (*HERE, *mutants_of_checkpoints.ALL, *mutants_of_files.ALL, *mutants_of_workers.ALL)
}

MUTANTS: dict[Mutant, int] = {ALL[name]: seed for name, seed in SEEDS.items()}
"""Those with a seed. ``named`` has a test for each of the others, or says why it does no harm."""


def run_plain(seed: int) -> Violation | None:
    """Run ``seed`` as long as planted bugs need; plain ones are quick."""
    return run_seed(seed, is_plain=True, events_max=EVENTS_MAX).violation
