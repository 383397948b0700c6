"""Bugs planted in what surrounds the machines, each with a seed of the product that finds it (SM6).

``python -m tests.sim.product.mutants`` looks for such seeds anew, after the workloads or the faults have changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import patched

from headgate.connectors.files.commit import FileCommitter
from headgate.operators.process.by_row import ProcessOperator
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.checkpoints.uploads import SnapshotWriter
from headgate.runtime.driver import claims
from headgate.runtime.driver.coordination import Coordination
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.runtime.wire.channels import InputChannel
from headgate.runtime.worker.loop_head_runner import LoopHeadRunner
from headgate.runtime.worker.loop_log import LoopLog
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.sim.product.run import run_seed

Mutant = Callable[[], AbstractContextManager[None]]


def a_retried_snapshot_is_empty() -> AbstractContextManager[None]:
    """As version 0.1 was: what is encoded is forgotten, and nobody counts the rows."""
    from headgate.runtime.checkpoints import uploads

    def encoded(job: Any) -> Any:
        sections = {name: [data] for name, data in job.plain.items()}
        for node, state in job.states.items():
            sections[f"state/{node}"] = state.encode()
            state._forget()
        return [memoryview(part) for part in uploads.encode_sections(sections)], {}

    def write(self: Any, job: Any) -> None:
        for node, sealed in job.sealed:
            self._unprepared.append((node, job.checkpoint, sealed))
        if self._is_cancelled(job.checkpoint):
            return
        self._prepare_all()
        handle = self._with_retries(lambda: self._write_state(job, *encoded(job)))
        committables, self._prepared = tuple(self._prepared), []
        self._report(uploads.SnapshotWritten(job.checkpoint, handle, committables), "")

    return patched(SnapshotWriter, "_write", write)


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

    def late(self: Any, checkpoint: Any) -> None:
        take(self, checkpoint)
        if self._source is not None and not self._source.is_over:
            polled = self._source.reader.poll()
            if polled is not None:
                self._process_polled(self._source, polled)

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


MUTANTS: dict[Mutant, int] = {
    a_batch_slips_in_between_the_positions_and_the_barrier: 6,
    a_channel_set_aside_is_read: 56,
    a_commit_that_failed_counts_as_done: 1,
    a_retried_snapshot_is_empty: 50,
    after_a_rescale_only_the_own_former_subtask_is_read: 6,
    loops_log_nothing: 56,
    positions_are_forgotten_at_a_restore: 1,
    recovery_commits_nothing: 1,
    recovery_keeps_nothing: 1,
    replayed_feedback_is_dropped: 56,
    state_of_functions_is_not_restored: 37,
    the_first_of_several_committables_is_forgotten: 0,
    the_second_newest_checkpoint_is_restored: 5,
}
"""Each with the first seed that found it; others are tried when it does not any more."""


def catching_seed(mutant: Mutant, seeds: Iterable[int]) -> int | None:
    """Return the first of ``seeds`` that finds ``mutant``."""
    with mutant():
        for seed in seeds:
            if run_seed(seed).violation is not None:
                return seed
    return None


if __name__ == "__main__":
    for planted in MUTANTS:
        print(f"    {planted.__name__}: {catching_seed(planted, range(300))},", flush=True)
