"""Planted bugs of sources and sinks: of files, of users, and of functions that publish.

Each is a patch of the product, a run of the simulator, and a seed that finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import few
from tests.mutants.harness import Mutant, around, patched, skipped
from tests.mutants.seeds import Finder, assert_found, every_kind, found_by, plain

from headgate.connectors import ledger_sink, two_phase_sink
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.files import file_tracker as file_table
from headgate.connectors.files.file_committer import FileCommitter
from headgate.connectors.files.file_writer import FileWriter
from headgate.connectors.files.filesystem import inode_of
from headgate.connectors.files.line_file import LineFile
from headgate.connectors.files.line_source import FileReader
from headgate.connectors.files.publish_log import Ledger
from headgate.operators.checkpoint_listeners import PublishOnCheckpoint
from headgate.runtime.checkpoints.restore import RestoredSnapshots
from headgate.runtime.driver.connectors import SinkCommits


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


def a_published_file_is_not_listed() -> AbstractContextManager[None]:
    return around(Ledger, "add", lambda call, self, checkpoint, files: call(self, checkpoint, files[1:]))


def held_records_are_not_restored() -> AbstractContextManager[None]:
    return skipped(FileWriter, "restore")


def finished_files_have_no_position() -> AbstractContextManager[None]:
    return patched(
        FileReader,
        "positions",
        lambda self: {
            path: file.position().encode() for path, file in self._table.files.items() if not file.is_finished
        },
    )


def names_are_the_same_in_all_subtasks() -> AbstractContextManager[None]:  # K8
    return around(
        two_phase_sink.TwoPhaseSink, "open", lambda call, self, context: call(self, replace(context, subtask_index=0))
    )


def a_ledger_names_all_subtasks_alike() -> AbstractContextManager[None]:
    return around(
        ledger_sink.LedgerSink, "open", lambda call, self, context: call(self, replace(context, subtask_index=0))
    )


def older_generations_are_not_refused() -> AbstractContextManager[None]:  # K14
    return skipped(Fence, "refuse_if_older_than")


def recovery_aborts_what_is_kept() -> AbstractContextManager[None]:
    return around(two_phase_sink._Committer, "recover", lambda call, self, keep: call(self, []))


def the_newest_is_committed_first() -> AbstractContextManager[None]:  # K2
    def in_order(call: Any, permit: Any, committables: Any) -> Any:
        return call(permit, committables)[::-1]

    return around(ledger_sink, "in_order", in_order)


def a_ledger_publishes_the_first_of_several() -> AbstractContextManager[None]:
    return around(
        ledger_sink._Committer, "commit", lambda call, self, permit, committables: call(self, permit, committables[:1])
    )


def renamed_files_are_not_looked_for() -> AbstractContextManager[None]:
    return skipped(file_table, "renamed_to")


def the_inode_is_the_identity() -> AbstractContextManager[None]:
    def is_at(call: Any, self: Any, path: str, *inode: Any) -> bool:
        return inode_of(path, self.system) == self.inode or bool(call(self, path, *inode))

    return around(LineFile, "is_at", is_at)


def positions_count_what_is_in_memory() -> AbstractContextManager[None]:
    return around(LineFile, "position", lambda call, self: replace(call(self), offset=self._known, tail_bytes=0))


def publishing_does_not_wait_for_completion() -> AbstractContextManager[None]:
    def snapshot(call: Any, self: Any, context: Any) -> None:
        call(self, context)
        items = [item for items in self._pending.values() for item in items]
        if items:
            self.publish(items)

    return around(PublishOnCheckpoint, "snapshot", snapshot)


def lists_are_not_restored() -> AbstractContextManager[None]:
    return patched(RestoredSnapshots, "lists", lambda self, node, vertex: [])


def what_is_told_again_is_of_the_newest_snapshot() -> AbstractContextManager[None]:
    """Ids are not looked at behind the first word about one: found by words that come twice, or late."""

    def complete(self: Any, checkpoint_id: int) -> None:
        is_new = checkpoint_id > getattr(self, "newest_told", 0)
        self.newest_told = max(checkpoint_id, getattr(self, "newest_told", 0))
        for checkpoint in [found for found in self._pending if found <= checkpoint_id or not is_new]:
            self.publish(self._pending.pop(checkpoint))

    return patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete)


MUTANTS: list[tuple[Mutant, Finder, int]] = [
    (recovery_commits_nothing, plain, 0),
    (recovery_keeps_nothing, plain, 49),
    (the_first_of_several_committables_is_forgotten, plain, 0),
    (a_published_file_is_not_listed, plain, 49),
    (held_records_are_not_restored, plain, 49),
    (finished_files_have_no_position, plain, 8),
    (names_are_the_same_in_all_subtasks, found_by("user-pipelines"), 8),
    (a_ledger_names_all_subtasks_alike, found_by("user-pipelines"), 8),
    (older_generations_are_not_refused, found_by("user-pipelines"), 36),
    (recovery_aborts_what_is_kept, found_by("user-pipelines"), 13),
    (the_newest_is_committed_first, found_by("user-pipelines"), 25),
    (a_ledger_publishes_the_first_of_several, found_by("user-pipelines"), 8),
    (positions_count_what_is_in_memory, found_by("log-files"), 11),
    (the_inode_is_the_identity, found_by("log-files"), 11),
    (renamed_files_are_not_looked_for, found_by("log-files"), 11),
    (publishing_does_not_wait_for_completion, every_kind, 146),
    (lists_are_not_restored, every_kind, 27),
    (what_is_told_again_is_of_the_newest_snapshot, found_by("listeners"), 12),
]


@pytest.mark.parametrize(("mutant", "run", "seed"), few(MUTANTS, 6), ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_planted_bug_of_connectors_is_found(mutant: Mutant, run: Finder, seed: int) -> None:
    assert_found(mutant, run, seed)
