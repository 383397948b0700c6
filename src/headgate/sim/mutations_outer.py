"""Mutants of commits, supervision, recovery and event time, and of the storage and targets around them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from headgate.errors import StorageError
from headgate.model.failure import FailureKind
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim
from headgate.protocol import watermarks
from headgate.protocol.checkpoints import commit, coordinator, recovery
from headgate.protocol.checkpoints.coordinator import IdReserved
from headgate.protocol.supervision import lives, restart, supervisor
from headgate.sim import disk, probes, storemodel
from headgate.sim.chain import Chain
from headgate.sim.claiming import Claiming
from headgate.sim.generation import GenerationHost
from headgate.sim.mutants import Patch, around, mutant

# -- commits --------------------------------------------------------------------------------------------------------


@mutant("commits-out-of-order", "K2", "a newer checkpoint is committed before an older one", seed=170)
def _(patch: Patch) -> None:
    def next_(call: Any, self: Any) -> Any:
        if not self._is_in_flight:
            self._queue.rotate(1)
        return call()

    around(patch, commit.CommitQueue, "_next", next_)

    def completed(call: Any, self: Any, checkpoint: Any, committables: Any) -> Any:
        if committables:
            self._queue.append((checkpoint, committables))
        return self._next()

    around(patch, commit.CommitQueue, "completed", completed)


@mutant("retry-forgets", "K1", "a commit that failed is not tried again", seed=33)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        self._queue.popleft()
        return call()

    around(patch, commit.CommitQueue, "retry", change)


@mutant("denial-retried-in-recovery", "K5", "a target that denies promised output in recovery is asked again", seed=13)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        failure = dataclasses.replace(event.failure, kind=FailureKind.LOST)
        self._has_run = True
        return call(dataclasses.replace(event, failure=failure))

    around(patch, supervisor.Supervisor, "_on_claim_failed", change)


@mutant("denial-retried", "K5", "a target that denies promised output is asked again after a restart", seed=26)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        return [
            coordinator.FailGeneration(dataclasses.replace(effect.failure, kind=FailureKind.LOST))
            if isinstance(effect, coordinator.FailGeneration)
            else effect
            for effect in call(event)
        ]

    around(patch, coordinator.Coordinator, "_on_commit_failed", change)


# -- supervisor -----------------------------------------------------------------------------------------------------


@mutant("used-up-attempt-deployed-again", "G4", "workers of a failed generation serve the next one", seed=190)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, *, is_done: bool) -> Any:
        fenced, registered = self._fenced, set(self._registered)
        effects = call(is_done=is_done)
        self._fenced, self._registered = fenced, registered
        return effects

    around(patch, supervisor.Supervisor, "_end_generation", change)


@mutant(
    "loss-of-deployed-worker-ignored",
    "G4",
    "a retry that registers first hides the loss of the deployed worker",
    seed=7,
)
def _(patch: Patch) -> None:
    around(
        patch,
        supervisor.Supervisor,
        "_is_current",
        lambda call, self, attempt: attempt == self._attempt and attempt > self._fenced,
    )


@mutant("deploys-with-one-worker-missing", "G3", "a generation is deployed before all its workers are there", seed=0)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        count = self._workers_count
        self._workers_count = max(count - 1, 1)
        try:
            return call()
        finally:
            self._workers_count = count

    around(patch, supervisor.Supervisor, "_deploy_if_complete", change)


@mutant("restart-never-gives-up", "C40", "the limit of restarts is ignored", probe=probes.restarts_are_limited)
def _(patch: Patch) -> None:
    around(
        patch,
        restart.RestartPolicy,
        "_limited",
        lambda call, self, attempts, delay_ms: restart.RestartAfter(delay_ms),
    )


# -- recovery -------------------------------------------------------------------------------------------------------


@mutant("claim-reuses-generation", "R7", "a new life takes the number of the last one")
def _(patch: Patch) -> None:
    original = recovery.next_claim

    def change(log: recovery.ObservedLog) -> recovery.NextClaim:
        claim = original(log)
        return dataclasses.replace(claim, generation=Generation(max(claim.generation - 1, 1)))

    patch(recovery, "next_claim", change)


@mutant("id-reused", "R7", "a checkpoint id that was triggered before is used again", probe=probes.ids_are_not_reused)
def _(patch: Patch) -> None:
    original = recovery.first_checkpoint
    unreserved = CheckpointId(0)
    patch(
        recovery,
        "first_checkpoint",
        lambda log, reserved: original(dataclasses.replace(log, reserved=unreserved), unreserved),
    )


@mutant("replaced-driver-claims-again", "C38", "two drivers replace each other for ever", seed=11)
def _(patch: Patch) -> None:
    patch(recovery, "replaced_by", lambda log, mine, owner: None)


@mutant("recovery-chooses-older", "R8", "not the newest checkpoint is restored", seed=1)
def _(patch: Patch) -> None:
    original = recovery.candidates
    patch(recovery, "candidates", lambda log: tuple(reversed(original(log))))


@mutant("one-bad-read-counts", "R50", "a single bad read makes a checkpoint count as damaged", seed=71)
def _(patch: Patch) -> None:
    patch(disk, "READS_MAX", 1)


@mutant("skipped-files-swept", "R51", "the files of a checkpoint that was skipped are swept", seed=177)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, *arguments: Any) -> Any:
        aside, self.aside = self.aside, set()
        try:
            return call(*arguments)
        finally:
            self.aside = aside

    around(patch, disk.Disk, "sweep", change)


@mutant("damage-not-checked", "R10", "a damaged checkpoint is restored", seed=137)
def _(patch: Patch) -> None:
    original = recovery.choose
    patch(recovery, "choose", lambda log, damage, policy: original(log, dict.fromkeys(damage, ()), policy))


@mutant("fresh-when-damaged", "R11", "damage of the only checkpoint starts the pipeline empty", seed=37)
def _(patch: Patch) -> None:
    original = recovery.choose

    def change(log: Any, damage: Any, policy: Any) -> recovery.Choice:
        choice = original(log, damage, policy)
        return recovery.StartFresh() if isinstance(choice, recovery.Refuse) else choice

    patch(recovery, "choose", change)


@mutant("lost-entry-not-noticed", "R9", "a missing newest entry of the log looks like one that never was", seed=37)
def _(patch: Patch) -> None:
    patch(recovery.ObservedLog, "lost", lambda self: ())


# -- lives ----------------------------------------------------------------------------------------------------------


@mutant("stranger-goes-on", "LV2", "a pipeline whose checkpoints were removed writes all output again", seed=13)
def _(patch: Patch) -> None:
    patch(lives, "objection", lambda life, owner, following: None)
    patch(lives, "may_own", lambda life, owner: True)


@mutant("told-before-asked", "LV2", "the target of one sink is told a life before the others are asked", seed=13)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        if self._life is not None and self._env.disk.manifests() == ():
            for sink in self._sinks():
                self._env.store.lives[sink] = self._life
        return call()

    around(patch, Claiming, "_ask", change)


@mutant("life-drawn-again", "LV1", "a life is drawn at every start", seed=13)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, life: Any) -> Any:
        self.life = None
        return call(life)

    around(patch, disk.Disk, "draw_life", change)


# -- event time -----------------------------------------------------------------------------------------------------


@mutant("watermark-maximum", "W10", "the fastest input decides about event time", seed=7)
def _(patch: Patch) -> None:
    patch(watermarks, "min", max)


@mutant("idle-holds-back", "W11", "an idle channel stops event time", probe=probes.idle_does_not_hold_back)
def _(patch: Patch) -> None:
    around(
        patch,
        watermarks.WatermarkMerger,
        "handle",
        lambda call, self, event: [] if isinstance(event, watermarks.IdleReceived) else call(event),
    )


# -- what stands around the machines --------------------------------------------------------------------------------


@mutant("positions-after-next-read", "M8", "the snapshot's source positions are those of the next read", seed=8)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        state = call()
        for split in self.splits:
            state["positions"][split] += 1
        return state

    around(patch, Chain, "freeze", change)


@mutant("fenced-write-accepted", "S18", "the store lets a replaced generation write and prepare", seed=78)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, *arguments: Any) -> Any:
        fences, self.fences = self.fences, {}
        try:
            return call(*arguments)
        finally:
            self.fences = fences

    around(patch, storemodel.StoreModel, "begin", change)
    around(patch, storemodel.StoreModel, "prepare", change)


@mutant("promised-output-aborted", "K6", "recovery aborts what the restored checkpoint promised", seed=26)
def _(patch: Patch) -> None:
    around(
        patch,
        storemodel.StoreModel,
        "recover",
        lambda call, self, sink, generation, keep: call(sink, generation, keep[1:]),
    )


@mutant("log-overwrites", "C38", "an entry of the log is written twice", seed=14)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, sequence: Any, entry: Any) -> Any:
        self.log.pop(sequence, None)
        return call(sequence, entry)

    around(patch, disk.Disk, "put_if_absent", change)


@mutant("pruned-number-reused", "R6", "an append at a number that was used and pruned counts", seed=181)
def _(patch: Patch) -> None:
    patch(disk.Disk, "is_tail", lambda self, sequence: True)


@mutant("unsynced-counts", "O11", "an entry of the log that can be read counts as durable", seed=61)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        with contextlib.suppress(StorageError):
            call()

    around(patch, disk.Disk, "_sync", change)


@mutant(
    "left-entry-counts",
    "R41",
    "what was left in the log is restored",
    probe=probes.what_was_left_is_passed,
)
def _(patch: Patch) -> None:
    patch(recovery.ObservedLog, "counted", lambda self: tuple(reversed(self.entries)))


@mutant(
    "only-claims-tell",
    "R40",
    "a driver whose heir has pruned its claim takes over again",
    probe=probes.a_manifest_tells_who_was_replaced,
)
def _(patch: Patch) -> None:
    def replaced_by(log: Any, mine: Any, owner: Any) -> Any:
        found = [e.content for e in log.entries if isinstance(e.content, Claim)]
        return max((c.generation for c in found if c.generation > mine and c.owner != owner), default=None)

    patch(recovery, "replaced_by", replaced_by)


@mutant("ids-without-a-look", "R42", "a replaced driver reserves an id that its heir uses", seed=5)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        self.handle(IdReserved(checkpoint))

    around(patch, GenerationHost, "_look_after_reserve", change)


@mutant("reports-before-start-dropped", "E1", "a subtask that finishes before the last worker is ready is not heard")
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, message: Any) -> Any:
        return call(message) if self.is_started else None

    around(patch, GenerationHost, "on_message", change)
