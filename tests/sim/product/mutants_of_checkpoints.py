"""Bugs planted in the checkpoint log, claims, uploads, restoring, and commits of the file sink."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product.patching import around, both, planted, skipped

from headgate.connectors.files import commit as file_commit
from headgate.connectors.files.commit import FileCommitter
from headgate.connectors.files.ledger import Ledger
from headgate.connectors.files.writer import FileWriter
from headgate.errors import StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Life
from headgate.operators.timestamps import WithTimestampsOperator
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.retention import FileRetention
from headgate.protocol.loops.part import NO_ROUNDS
from headgate.runtime.checkpoints import log, snapshot_files
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.runtime.checkpoints.targets import SubtaskTarget
from headgate.runtime.checkpoints.uploads import SnapshotWriter
from headgate.runtime.driver import claims, sink_commits
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.sim.machine.disk import SimStorage
from headgate.storage import reading

# -- the log ----------------------------------------------------------------------------------------------------------


def one_bad_read_counts() -> AbstractContextManager[None]:
    return patched(reading, "READS_MAX", 1)


def a_life_is_drawn_at_every_start() -> AbstractContextManager[None]:
    def life(original: Any, self: Any, host: str, wall_ms: int) -> Life:
        found: Life = original(self, host, wall_ms)
        return dataclasses.replace(found, id=f"{wall_ms:032x}")

    return around(CheckpointLog, "life", life)


def the_log_is_overwritten() -> AbstractContextManager[None]:
    def put(original: Any, self: Any, path: str, parts: Any) -> None:
        (self.put if "/log/" in path else lambda *a: original(self, *a))(path, parts)

    return around(SimStorage, "put_if_absent", put)


def a_pruned_number_is_used_again() -> AbstractContextManager[None]:
    return skipped(CheckpointLog, "_replaced_after")


def what_can_be_read_counts_as_durable() -> AbstractContextManager[None]:
    def look_up(original: Any, self: Any, path: str, data: bytes, manifest: Any) -> Any:
        stored = self._storage._disk.objects.get(path)
        if stored is not None and stored.data == data:
            return self._written(manifest)
        return original(self, path, data, manifest)

    return around(CheckpointLog, "_look_up", look_up)


def ids_are_reserved_without_a_look() -> AbstractContextManager[None]:
    def reserve(original: Any, self: Any, checkpoint: Any) -> None:
        with patched(CheckpointLog, "newer_generation", lambda self: None):
            original(self, checkpoint)

    return around(CheckpointLog, "reserve", reserve)


def too_much_is_dropped() -> AbstractContextManager[None]:
    return around(SnapshotFiles, "drop", lambda call, self, checkpoint: call(self, CheckpointId(checkpoint + 1)))


def the_restored_checkpoint_is_swept() -> AbstractContextManager[None]:
    return around(FileRetention, "narrowed", lambda call, self, retained: call(self, ()))


def nothing_is_dropped() -> AbstractContextManager[None]:
    return skipped(SnapshotFiles, "_remove_garbage")


def ids_that_a_crash_left_stay() -> AbstractContextManager[None]:
    def delete(call: Any, storage: Any, path: str) -> None:
        if "/ids/" not in path:
            call(storage, path)

    def claim(call: Any, self: Any, *arguments: Any) -> Any:
        with around(type(self._storage), "delete", delete):
            return call(self, *arguments)

    return around(CheckpointLog, "claim", claim)


def what_a_check_of_the_storage_left_stays() -> AbstractContextManager[None]:
    nothing = lambda path: False  # noqa: E731
    return both(patched(file_commit, "is_probe", nothing), patched(snapshot_files, "is_probe", nothing))


def a_finished_pipeline_keeps_what_it_did_not_drop() -> AbstractContextManager[None]:
    return skipped(claims, "_drop_old")


def a_failed_append_counts() -> AbstractContextManager[None]:
    return around(CheckpointLog, "_look_up", lambda call, self, path, data, manifest: self._written(manifest))


def an_unknown_append_counts_as_failed() -> AbstractContextManager[None]:
    def append(call: Any, self: Any, *arguments: Any) -> Any:
        found = call(self, *arguments)
        return log.Outcome.FAILED if found is log.Outcome.UNKNOWN else found

    return around(CheckpointLog, "append", append)


def damage_is_not_looked_for() -> AbstractContextManager[None]:
    return skipped(SnapshotFiles, "verify", [])


def a_replaced_driver_claims_again() -> AbstractContextManager[None]:
    return skipped(log, "replaced_by")


def a_snapshot_that_was_not_stored_counts() -> AbstractContextManager[None]:
    def write(call: Any, self: Any) -> None:
        with contextlib.suppress(StorageError):
            call(self)

    return around(SubtaskTarget, "_write_file", write)


# -- claims -----------------------------------------------------------------------------------------------------------


def nothing_is_fenced_in_recovery() -> AbstractContextManager[None]:
    return around(SinkCommits, "recover", lambda call, self, permit, keep: permit and self.commit(permit, keep))


def a_stranger_goes_on() -> AbstractContextManager[None]:
    return both(skipped(claims.lives, "objection"), skipped(claims.lives, "may_own", True))


def the_newest_damage_is_skipped_unasked() -> AbstractContextManager[None]:
    previous = recovery.DamagedCheckpoint.PREVIOUS
    return around(recovery, "choose", lambda call, seen, damage, policy: call(seen, damage, previous))


def a_start_without_a_sound_checkpoint_is_fresh() -> AbstractContextManager[None]:
    def choose(call: Any, *arguments: Any) -> Any:
        found = call(*arguments)
        return recovery.StartFresh() if isinstance(found, recovery.Refuse) else found

    return around(recovery, "choose", choose)


# -- uploads ----------------------------------------------------------------------------------------------------------


def a_cancelled_write_forgets_its_output() -> AbstractContextManager[None]:
    def write(call: Any, self: Any, job: Any) -> None:
        if not self._is_cancelled(job.checkpoint):
            call(self, job)

    return around(SnapshotWriter, "_write", write)


def a_failed_write_forgets_what_is_prepared() -> AbstractContextManager[None]:
    def write(call: Any, self: Any, job: Any) -> None:
        try:
            call(self, job)
        except StorageError:
            self._prepared = []
            raise

    return around(SnapshotWriter, "_write", write)


def output_that_cannot_be_prepared_is_forgotten() -> AbstractContextManager[None]:
    def prepare(call: Any, self: Any) -> None:
        try:
            call(self)
        except StorageError:
            self._unprepared.popleft()

    return around(SnapshotWriter, "_prepare_all", prepare)


def only_the_own_output_is_acknowledged() -> AbstractContextManager[None]:
    def prepare(call: Any, self: Any) -> None:
        call(self)
        newest = max((one.checkpoint for one in self._prepared), default=0)
        self._prepared = [one for one in self._prepared if one.checkpoint == newest]

    return around(SnapshotWriter, "_prepare_all", prepare)


# -- restoring --------------------------------------------------------------------------------------------------------


def the_state_of_one_former_subtask_is_dropped() -> AbstractContextManager[None]:
    def states(call: Any, self: Any, *arguments: Any) -> Any:
        found = call(self, *arguments)
        return found[:-1] if len(found) > 1 else found

    return around(RestoredSnapshots, "states", states)


def the_positions_of_one_former_subtask_are_dropped() -> AbstractContextManager[None]:
    def positions(call: Any, self: Any, node: str) -> Any:
        found = call(self, node)
        return dict(list(found.items())[:-1]) if found and len(found) > 1 else found

    return around(RestoredSnapshots, "positions", positions)


def positions_move_with_the_list() -> AbstractContextManager[None]:
    def positions(call: Any, self: Any, node: str) -> Any:
        found = call(self, node)
        return found and dict(zip(sorted(found, reverse=True), (found[k] for k in sorted(found)), strict=True))

    return around(RestoredSnapshots, "positions", positions)


def rounds_begin_again_at_a_restore() -> AbstractContextManager[None]:
    return skipped(RestoredSnapshots, "rounds", NO_ROUNDS)


def everybody_is_restored_as_finished() -> AbstractContextManager[None]:
    return skipped(RestoredSnapshots, "is_finished", True)


def event_time_is_not_restored() -> AbstractContextManager[None]:
    return skipped(WithTimestampsOperator, "restore")


# -- commits ----------------------------------------------------------------------------------------------------------


def a_denial_counts_as_transient() -> AbstractContextManager[None]:
    @contextlib.contextmanager
    def denials(sink: str, checkpoint: int) -> Any:
        try:
            yield
        except Exception as error:
            raise StorageError("commit", sink, "something", is_transient=True) from error

    return patched(sink_commits, "_denials", denials)


def a_published_file_is_not_listed() -> AbstractContextManager[None]:
    return around(Ledger, "add", lambda call, self, checkpoint, files: call(self, checkpoint, files[1:]))


def files_are_listed_before_they_are_published() -> AbstractContextManager[None]:
    def commit(call: Any, self: Any, permit: Any, committables: Sequence[Any]) -> None:
        files = [file for committable in committables for file in self._files(committable)]
        if files:
            self._ledger.add(permit.checkpoint, files)
        for file in files:
            self._publish(file)

    return around(FileCommitter, "commit", commit)


def a_stopped_driver_sweeps_its_heirs_output() -> AbstractContextManager[None]:
    return skipped(FileCommitter, "_is_mine", True)


def recovery_sweeps_nothing() -> AbstractContextManager[None]:
    return around(FileCommitter, "_is_mine", lambda call, self, name: False)


def commits_do_not_ask_who_owns_the_sink() -> AbstractContextManager[None]:
    return skipped(FileCommitter, "_refuse_if_fenced")


def prepared_output_is_not_fenced() -> AbstractContextManager[None]:
    from headgate.connectors.files import writer

    return patched(writer, "refuse_if_fenced", lambda *a: None)


def a_missing_prepared_file_counts_as_published() -> AbstractContextManager[None]:
    return skipped(FileCommitter, "_check_content")


def held_records_are_not_frozen() -> AbstractContextManager[None]:
    return skipped(FileWriter, "freeze")


def held_records_are_not_restored() -> AbstractContextManager[None]:
    return skipped(FileWriter, "restore")


def held_records_are_restored_by_everybody() -> AbstractContextManager[None]:
    def restore(call: Any, self: Any, states: Sequence[Any]) -> None:
        parallelism, own = self._context.parallelism, self._context.subtask_index
        call(self, [dataclasses.replace(s, subtask_index=own) for s in states if parallelism])

    return around(FileWriter, "restore", restore)


def held_records_are_held_for_ever() -> AbstractContextManager[None]:
    return skipped(FileWriter, "finish")


def the_newest_claim_is_overlooked() -> AbstractContextManager[None]:
    return patched(file_commit, "newest_generation", lambda storage, identity: Generation(0))


ALL = planted(globals(), __name__)
