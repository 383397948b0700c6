"""Mutants of the aligner, the subtask and the coordinator: each patches one method."""

from __future__ import annotations

import dataclasses
from typing import Any

from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import SubtaskEntry
from headgate.protocol.checkpoints import align, commit, completion, coordinator, retention
from headgate.protocol.checkpoints import pending as pending_checkpoints
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks import subtask
from headgate.sim import probes
from headgate.sim.mutants import Patch, around, mutant, without
from headgate.sim.subtaskhost import SubtaskHost

# -- alignment ------------------------------------------------------------------------------------------------------


@mutant("barrier-does-not-block", "A1", "records behind a barrier are processed before the snapshot", seed=12)
def _(patch: Patch) -> None:
    without(patch, align.Aligner, "handle", (align.BlockChannel, align.UnblockChannels))
    patch(align.Aligner, "blocked", property(lambda self: frozenset()))


@mutant("unblock-forgotten", "A2", "channels stay blocked after the snapshot", seed=7)
def _(patch: Patch) -> None:
    without(patch, align.Aligner, "handle", align.UnblockChannels)
    patch(subtask.Subtask, "blocked", property(lambda self: _Anything()))


class _Anything(frozenset[ChannelIndex]):
    """Equal to everything: switches the interpreter's own comparison off."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = frozenset.__hash__


@mutant("second-snapshot", "A3", "a late barrier takes the snapshot again", seed=11)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        if event.checkpoint == self._current and self._phase is align.Phase.FLOWING and event.channel:
            return self._complete()
        return call(event)

    around(patch, align.Aligner, "_on_barrier", change)


@mutant("last-channel-not-waited-for", "A2", "the snapshot is taken one barrier too early", seed=6)
def _(patch: Patch) -> None:
    around(patch, align.Aligner, "_missing", lambda call, self: max(call() - (self._channels_count > 1), 1))


@mutant(
    "cancel-not-forwarded", "A5", "nobody downstream learns of a given-up checkpoint", probe=probes.cancel_is_forwarded
)
def _(patch: Patch) -> None:
    without(patch, align.Aligner, "handle", align.EmitCancel)


@mutant(
    "abort-not-remembered", "A8", "the snapshot of an aborted checkpoint is taken", probe=probes.abort_is_remembered
)
def _(patch: Patch) -> None:
    around(patch, align.Aligner, "_on_abort", lambda call, self, event: [Ignored("forgotten")])


# -- subtask and precommit ------------------------------------------------------------------------------------------


@mutant("pending-dropped-at-abort", "T5", "an abort discards prepared output", seed=1)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        self._precommit._pending.clear()
        return call(event)

    around(patch, subtask.Subtask, "_on_abort", change)


@mutant(
    "pending-dropped-at-acknowledgement", "K3", "output is forgotten before a completed checkpoint covers it", seed=1
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        found = call(checkpoint)
        self._pending.clear()
        return found

    around(patch, commit.Precommit, "covered_by", change)


@mutant("only-the-last-acknowledged", "C16", "an acknowledgement carries only its own checkpoint's output", seed=1)
def _(patch: Patch) -> None:
    around(
        patch,
        commit.Precommit,
        "covered_by",
        lambda call, self, checkpoint: tuple(c for c in call(checkpoint) if c.checkpoint == checkpoint),
    )


@mutant("late-written-output-dropped", "T5", "output prepared by a cancelled write is forgotten", seed=24)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        if event.checkpoint not in self._writing:
            return [Ignored("dropped")]
        return call(event)

    around(patch, subtask.Subtask, "_on_written", change)


@mutant(
    "finish-twice",
    "T8",
    "a restored subtask finishes its operators again",
    probe=probes.restored_operators_do_not_finish_again,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, channels: int, *, is_restored_finished: bool = False, **options: Any) -> Any:
        return call(channels, **options)

    around(patch, subtask.Subtask, "__init__", change)


@mutant("ends-with-the-first-channel", "T6", "the first end of data finishes the subtask")
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        if self._is_finished:
            return [Ignored("finished")]
        return self._finish()

    around(patch, subtask.Subtask, "_on_end", change)


@mutant("acknowledged-before-durable", "T3", "a failed write is acknowledged", seed=6)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        effects = call(event)
        if isinstance(effects[0], subtask.Decline):
            handle = probes.HANDLE
            return [subtask.Acknowledge(event.checkpoint, handle, self._precommit.covered_by(event.checkpoint))]
        return effects

    around(patch, subtask.Subtask, "_on_failed", change)


@mutant("sealed-before-flush", "U8", "sinks are sealed before operators send what belongs before the barrier", seed=193)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        sealed, seal = self._outlets.seal(), self._outlets.seal
        self._outlets.seal = lambda: sealed
        try:
            return call(checkpoint)
        finally:
            self._outlets.seal = seal

    around(patch, SubtaskHost, "_freeze", change)


# -- coordinator ----------------------------------------------------------------------------------------------------


@mutant("commit-before-manifest", "C12", "output is committed before the checkpoint is completed")
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        effects = call()
        early = [
            commit.Commit(
                commit.CommitPermit(e.checkpoint, self.generation), tuple(c for n in e.entries for c in n.committables)
            )
            for e in effects
            if isinstance(e, coordinator.WriteManifest)
        ]
        return [e for e in early if e.committables] + effects

    around(patch, completion.Completion, "_write_next", change)
    around(
        patch,
        coordinator.Coordinator,
        "_on_commit_succeeded",
        lambda call, self, event: call(event) if self._commits._is_in_flight else [Ignored("early")],
    )


@mutant("manifest-before-last-acknowledgement", "C8", "a checkpoint completes without its last subtask")
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        for checkpoint in self.pending.ids:
            pending, missing = self.pending[checkpoint], self.pending.missing(checkpoint)
            if len(missing) == 1 and len(self._participants) > 1:
                donor = next(iter(pending.acks.values()))
                pending.acks[missing[0]] = SubtaskEntry(missing[0], donor.handle)
        return call()

    around(patch, completion.Completion, "_write_next", change)


@mutant(
    "generation-not-checked", "C9", "an older generation's acknowledgement counts", probe=probes.generation_is_checked
)
def _(patch: Patch) -> None:
    around(
        patch,
        completion.Completion,
        "acknowledged",
        lambda call, self, event: call(dataclasses.replace(event, generation=self.generation)),
    )


@mutant("decline-lost", "C8", "a declined checkpoint stays pending", probe=probes.decline_aborts)
def _(patch: Patch) -> None:
    around(patch, completion.Completion, "declined", lambda call, self, event: [Ignored("lost")])


@mutant("carried-omitted", "K7", "a manifest forgets what is completed and not committed yet", seed=124)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        return [dataclasses.replace(e, carried=()) if isinstance(e, coordinator.WriteManifest) else e for e in call()]

    around(patch, completion.Completion, "_write_next", change)


@mutant("only-the-last-committed", "C16", "complete(n) commits only what was sealed for n", seed=6)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, pending: Any) -> Any:
        found = call(pending)
        return tuple(c for c in found if c.checkpoint == self.last_completed)

    around(patch, completion.Completion, "_committables", change)


@mutant("subsumed-not-aborted", "C15", "an older checkpoint stays pending after a newer one completed", seed=189)
def _(patch: Patch) -> None:
    around(patch, pending_checkpoints.PendingCheckpoints, "subsume", lambda call, self, checkpoint: [])


@mutant("final-before-finish", "C26", "the final checkpoint is taken before everybody has finished")
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        if event.generation == self._generation and self._phase is coordinator.Phase.RUNNING:
            self._finished.update(self._participants)
            return self._on_all_finished()
        return call(event)

    around(patch, coordinator.Coordinator, "_on_finish_reported", change)


@mutant("done-before-committed", "C27", "the pipeline ends before its last commit", seed=2)
def _(patch: Patch) -> None:
    patch(commit.CommitQueue, "is_empty", property(lambda self: True))


@mutant("dropped-before-newer-durable", "C31", "the old checkpoint goes before the new one is durable", seed=1)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        effects = call()
        if any(isinstance(e, coordinator.WriteManifest) for e in effects) and self.retention.all:
            files = remembered.get(self.retention.all[-1], ())
            return [coordinator.DeleteHandles(files), *effects] if files else effects
        return effects

    remembered: dict[CheckpointId, tuple[Any, ...]] = {}

    def remember(call: Any, self: Any, checkpoint: Any) -> Any:
        pending = self.pending[checkpoint]
        remembered[checkpoint] = tuple(e.handle for e in pending.acks.values() if e.handle.path)
        return call(checkpoint)

    around(patch, completion.Completion, "_write_next", change)
    around(patch, completion.Completion, "written", remember)


@mutant("unknown-manifest-deleted", "C12", "files go although the manifest may have been written", seed=1)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        acks = self.checkpoints.pending[event.checkpoint].acks
        files = tuple(e.handle for e in acks.values() if e.handle.path)
        is_unknown = isinstance(event, coordinator.ManifestUnknown)
        return [coordinator.DeleteHandles(files), *call(event)] if is_unknown else call(event)

    around(patch, coordinator.Coordinator, "_on_manifest", change)


@mutant(
    "repeated-acknowledgement-deletes", "C10", "the second acknowledgement of a completed checkpoint deletes", seed=74
)
def _(patch: Patch) -> None:
    around(patch, retention.Retention, "__contains__", lambda call, self, checkpoint: False)


@mutant("failures-not-reset", "C22", "a success does not reset the count of failures", probe=probes.success_resets)
def _(patch: Patch) -> None:
    around(patch, retention.Tolerance, "completed", lambda call, self: None)
