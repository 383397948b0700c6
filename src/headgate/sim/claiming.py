"""Begins a generation, as ``driver.claims`` does: claim, verify, choose, fence and recover the sinks, redo commits.

Each step takes time and may fail; a crash between any two leaves an orphaned claim. Decisions are those of
``protocol.checkpoints.recovery``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.errors import FencedError, StorageError
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Life, Owner
from headgate.model.manifest import Claim, Manifest
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.commit import Commit, CommitPermit
from headgate.protocol.checkpoints.lineage import Lineage
from headgate.protocol.supervision import lives
from headgate.protocol.supervision import supervisor as machine
from headgate.sim import history
from headgate.sim.faults import Fault
from headgate.sim.generation import commit_all
from headgate.sim.kinds import Kind, spec_of
from headgate.sim.marks import Mark
from headgate.sim.restoring import may_move
from headgate.sim.storemodel import Status, Undecidable, payload_of
from headgate.sim.world import Violation

if TYPE_CHECKING:
    from headgate.sim.driver import Driver

TRIES_MAX = 4
"""Storage errors in a row before a claim counts as failed."""

STEP_MS = 12


@dataclass(frozen=True, slots=True)
class Claimed:
    """A generation that may be deployed."""

    generation: Generation
    next_sequence: int
    first_checkpoint: CheckpointId
    restored: Manifest | None
    retained: tuple[CheckpointId, ...]
    lineage: Lineage


class Claiming:
    """One claim in progress."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._env = driver.env
        self._tries = 0
        if driver.was_denied:
            raise Violation("K5", f"{driver.name} goes on after a target denied what was promised")
        self._first_checkpoint = CheckpointId(1)
        self._life: Life | None = None
        self._owners: dict[str, Owner] = {}
        if self._env.faults.has(Fault.ASK_FAILS):
            self._later(self._draw)
        else:  # at once, so that what other seeds do stays as it was
            self._step(self._observe)

    def _step(self, call: Callable[..., None], *args: object) -> None:
        self._driver.post(self._env.faults.delay_ms(STEP_MS), self._driver.interruptible, self._guarded, call, *args)

    def _guarded(self, call: Callable[..., None], *args: object) -> None:
        """Run one step; try it again after a storage error, a few times."""
        if not self._driver.is_alive:
            return
        self._env.faults.crash_point(self._driver, Fault.DRIVER_CRASH)
        try:
            call(*args)
        except StorageError as error:
            self._tries += 1
            if self._tries > TRIES_MAX:
                self._fail(FailureKind.LOST, str(error))
            else:
                self._driver.post(self._env.rng.randint(20, 200), self._guarded, call, *args)
        except Undecidable as error:  # K5
            self._env.marks.reach(Mark.TARGET_DENIED_IN_RECOVERY)
            self._driver.was_denied = True
            self._fail(FailureKind.DETERMINISTIC, str(error))
        except FencedError as error:
            self._env.marks.reach(Mark.GENERATION_REPLACED)
            self._fail(FailureKind.DETERMINISTIC, str(error))

    def _fail(self, kind: FailureKind, reason: str) -> None:
        now, jitter = self._env.world.now_ms, self._env.rng.random()
        self._driver.feed(machine.ClaimFailed(Failure(kind, reason), now, jitter))

    def _later(self, call: Callable[..., None]) -> None:
        """As ``_step``, with dice of its own."""
        self._driver.post(self._env.faults.owners.randint(0, STEP_MS), self._guarded, call)

    def _draw(self) -> None:
        env = self._env
        drawn = Life(f"drawn at {env.world.now_ms} by {self._driver.name}", "disk", self._driver.name, env.world.now_ms)
        self._life = env.disk.draw_life(drawn)
        self._later(self._ask)

    def _ask(self) -> None:
        """Ask the targets of all sinks before anything is claimed or told (LV2)."""
        if self._env.faults.strikes(Fault.ASK_FAILS):
            raise StorageError("ask", "the sinks", "injected")
        self._owners = {sink: self._env.store.owner(sink) for sink in self._sinks()}
        self._later(self._observe)

    def _tell(self) -> None:
        """Let the targets know this life; the driver may die between any two (LV3)."""
        env = self._env
        assert self._life is not None
        for sink in self._sinks():
            env.faults.crash_point(self._driver, Fault.TELL_CRASH)
            assert lives.may_own(self._life, env.store.own(sink, self._life))

    def _sinks(self) -> list[str]:
        nodes = [inner for node in self._env.plan.vertices for inner in node.nodes]
        return [str(inner.name) for inner in nodes if spec_of(inner).kind is Kind.SINK]

    def _objects(self, following: Generation) -> bool:
        """Whether a target belongs to another life: then nothing is written anywhere."""
        assert self._life is not None
        found = {sink: lives.objection(self._life, owner, following) for sink, owner in self._owners.items()}
        problems = [f"{sink}: {problem.value}" for sink, problem in found.items() if problem is not None]
        if problems:
            self._env.marks.reach(Mark.START_OVER_REFUSED)
            self._driver.stranger = self._life
            self._fail(FailureKind.DETERMINISTIC, problems[0])
        return bool(problems)

    def _observe(self) -> None:
        if self._life is None:
            self._life = self._env.disk.draw_life(Life("the only one", "disk", self._driver.name, 0))
            self._owners = {sink: self._env.store.owner(sink) for sink in self._sinks()}
        log = self._env.disk.observe()
        if self._objects(recovery.next_claim(log).generation):
            return
        mine = self._driver.last_generation
        # X9: a driver that was replaced does not claim again.
        other = None if mine is None else recovery.replaced_by(log, mine, self._driver.name)
        if other is not None:
            self._env.marks.reach(Mark.REPLACED_DRIVER_STOPPED)
            self._fail(FailureKind.DETERMINISTIC, f"generation {other} was started elsewhere")
            return
        self._step(self._put, log, recovery.next_claim(log))

    def _put(self, log: recovery.ObservedLog, claim: recovery.NextClaim) -> None:
        env, disk = self._env, self._env.disk
        if env.faults.is_storage_gone(env.world.now_ms):
            raise StorageError("put", "log", "injected")
        entry = Claim(claim.generation, self._driver.name, env.world.now_ms, follows=claim.follows)
        if not disk.put_if_absent(claim.sequence, entry):
            env.marks.reach(Mark.CLAIM_CONFLICT)
            self._step(self._observe)
            return
        if env.faults.strikes(Fault.CLAIM_UNKNOWN):  # claimed, but nobody knows: the next one skips it
            env.marks.reach(Mark.ORPHANED_CLAIM)
            self._step(self._observe)
            return
        self._driver.look_later(disk.is_tail(claim.sequence), self._guarded, self._look, log, claim)

    def _look(self, log: recovery.ObservedLog, claim: recovery.NextClaim) -> None:
        """Whether anything follows (X8); then the ids, which nobody else reserves any more (R42)."""
        env, disk = self._env, self._env.disk
        if not disk.is_tail(claim.sequence):
            env.marks.reach(Mark.PRUNED_NUMBER)
            disk.take_back(claim.sequence)
            env.marks.reach(Mark.CLAIM_CONFLICT)
            self._step(self._observe)
            return
        self._first_checkpoint = recovery.first_checkpoint(log, disk.reserved)
        disk.write_hint(claim.sequence)
        for entry in recovery.superseded(log, claim):
            env.marks.reach(Mark.CLAIMS_PRUNED)
            disk.remove(entry.sequence)
        self._driver.last_generation = claim.generation
        self._driver.tell(f"claimed generation {claim.generation} at log/{claim.sequence}")
        self._step(self._choose, log, claim)

    def _choose(self, log: recovery.ObservedLog, claim: recovery.NextClaim) -> None:
        env = self._env
        self._tell()
        damage: dict[CheckpointId, list[recovery.Damage]] = {}
        for manifest in recovery.candidates(log):
            damage[manifest.checkpoint] = env.disk.verify(manifest)
            if not damage[manifest.checkpoint]:
                break
        choice = recovery.choose(log, damage, env.options.on_damaged)
        self._driver.tell(f"chooses {type(choice).__name__}")
        newest = env.disk.newer_generation(claim.sequence, claim.generation)
        if newest is not None:  # X11: not damage, the one that replaced this driver has dropped the files
            raise FencedError("the pipeline", claim.generation, newest)
        if log.lost():
            env.marks.reach(Mark.LOST_ENTRY)
        if any(entry.sequence in env.disk.stale for entry in log.entries):
            env.marks.reach(Mark.LEFT_BY_REPLACED)
        restored: Manifest | None = None
        contradicts: tuple[CheckpointId, ...] = ()
        match choice:
            case recovery.Refuse():
                self._driver.was_refused = True
                env.marks.reach(Mark.DAMAGED_REFUSED)
                self._fail(FailureKind.DETERMINISTIC, choice.reason)
                return
            case recovery.Restore():
                restored, contradicts = choice.manifest, choice.contradicts
                if choice.skipped:
                    env.marks.reach(Mark.DAMAGED_NEWEST)
                    env.disk.set_aside(restored.checkpoint, self._first_checkpoint)
            case recovery.NothingLeft():
                restored = choice.manifest
            case recovery.StartFresh():
                if claim.generation > 1:
                    env.marks.reach(Mark.STARTED_FRESH_AGAIN)
        chosen = None if restored is None else restored.checkpoint
        env.note(history.Chosen(claim.generation, chosen, contradicts, env.disk.sound()))
        if restored is not None:
            plan = env.plan
            problem = recovery.incompatibility(restored, plan.state_texts(), plan.max_parallelism)
            assert problem is None, problem
            if restored.parallelism != self._driver.plan.parallelism and not may_move(restored, env.disk):
                self._driver.former_parallelism = restored.parallelism
                self._fail(FailureKind.DETERMINISTIC, "a round was ending: it needs its former parallelism")
                return
        is_finished = isinstance(choice, recovery.NothingLeft)
        self._step(self._recover, log, claim, restored, is_finished)

    def _recover(
        self, log: recovery.ObservedLog, claim: recovery.NextClaim, restored: Manifest | None, is_finished: bool
    ) -> None:
        """Fence older generations at every sink, abort what they left, commit what they promised (K6)."""
        env = self._env
        keep = () if restored is None else restored.committables
        for node in env.plan.vertices:
            for inner in node.nodes:
                if spec_of(inner).kind is not Kind.SINK:
                    continue
                name = str(inner.name)
                env.faults.crash_point(self._driver, Fault.DRIVER_CRASH)
                if env.faults.strikes(Fault.COMMIT_FAILS):
                    raise StorageError("recover", name, "injected")
                aborted = env.store.recover(name, claim.generation, [c for c in keep if c.sink == name])
                if aborted:
                    env.marks.reach(Mark.RECOVERY_ABORTED)
        if restored is not None:
            kept = {c.payload for c in keep}
            if any(t.status is Status.PREPARED and payload_of(t.id) in kept for t in env.store.transactions.values()):
                env.marks.reach(Mark.RECOVERY_COMMITTED)
            permit = CommitPermit(restored.checkpoint, claim.generation)
            commit_all(env, Commit(permit, keep), self._crash_point)
        if is_finished:
            assert restored is not None
            env.marks.reach(Mark.ALREADY_FINISHED)
            env.disk.sweep(recovery.retained(log, restored), restored.checkpoint)
            self._driver.feed(machine.AlreadyFinished(restored.checkpoint))
            return
        retained = recovery.retained(log, restored)
        env.disk.sweep(retained, self._first_checkpoint)
        claimed = Claimed(
            claim.generation,
            claim.sequence + 1,
            self._first_checkpoint,
            restored,
            retained,
            Lineage.observed(log).of(retained),
        )
        self._driver.on_claimed(claimed)

    def _crash_point(self) -> None:
        self._env.faults.crash_point(self._driver, Fault.DRIVER_CRASH)
