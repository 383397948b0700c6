"""Reset of a pipeline: checkpoints and output are deleted, together or not at all (docs/spec/starting-over.md).

Order: find what would go, write the reset order, one entry of the log makes it count, empty the targets one after the
other, remove the order. Up to the entry nothing has happened; from then on every start finishes the reset before
anything else. Holds the pipeline's lock; runs in no driver. ``protocol.checkpoints`` decides which order counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar, cast

from headgate.codec.json_files import Ending
from headgate.connectors.base import KEPT, Holding, Sink
from headgate.connectors.registry import RecordedSink, grouped_by_owner, resettable_of, sink_of, targets_of
from headgate.dataclass import dataclass
from headgate.errors import StorageError, UsageError
from headgate.model.graph import Role
from headgate.model.ids import Generation
from headgate.model.manifest import Manifest
from headgate.model.pipeline_identity import (
    NO_GENERATION,
    Course,
    Mine,
    Owner,
    PipelineIdentity,
    ResetOrder,
    Target,
    TargetKind,
)
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates, has_given_up, life_of
from headgate.protocol.supervision import ownership
from headgate.protocol.supervision.standby import Standby
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart
from headgate.runtime.driver.cleanup import refuse_while_needed
from headgate.runtime.driver.connectors import host_of
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock, read_holder
from headgate.runtime.driver.savepoint_start import is_same_directory
from headgate.runtime.driver.takeover import HeartbeatReader
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.storage.base import Storage
from headgate.storage.urls import is_missing, open_storage

_T = TypeVar("_T")

INPUTS = "inputs"
"""Captured DataFrames, below the pipeline's directory: the next start captures again."""

_RUNNING_COURSES = frozenset({Course.RUNNING, Course.STOPPING, Course.DRAINING})


@dataclass(frozen=True, slots=True)
class FoundTarget:
    """A target that will be emptied, and what it holds. ``sink``: None if there is nothing to be emptied."""

    target: Target
    sink: Sink | None
    owner: Owner
    holding: Holding


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """What a reset deletes.

    Attributes:
        pipeline, home: its name, and where its checkpoints are.
        checkpoints: the completed ones, newest first.
        inputs: paths of captured DataFrames.
        aside: paths of what was set aside.
        targets: of all sinks that it has or had, but for what is left.
        left: targets that stay as they are, because the user said so.
        log: what was there when this was found.
        is_empty: nothing would be deleted or forgotten: the next start begins at the beginning as it is.
    """

    pipeline: str
    home: str
    checkpoints: tuple[Manifest, ...]
    inputs: tuple[str, ...]
    aside: tuple[str, ...]
    targets: tuple[FoundTarget, ...]
    left: tuple[Target, ...]
    log: ObservedLog
    is_empty: bool

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the sources with a captured DataFrame."""
        return tuple(sorted({path.split("/")[2] for path in self.inputs}))

    @property
    def shown(self) -> object:
        """What must not change between a question and its answer."""
        return [(found.target, found.owner, found.holding) for found in self.targets]


class Reset:
    """The reset of one pipeline. Make it with ``holding_the_lock``."""

    def __init__(
        self,
        storage: Storage,
        pipeline: str,
        program: PipelineDefinition | None,
        around: Surroundings = PROCESS,
        leave: Sequence[str] = (),
    ) -> None:
        """``program``: the pipeline as its program makes it; None: only what is written down is known.

        ``leave``: names of sinks with targets that stay as they are.
        """
        self._leave = frozenset(leave)
        self._storage, self._pipeline, self._around = storage, pipeline, around
        self._log = CheckpointLog(storage, pipeline)
        self._sinks = TargetSinks(pipeline, self._log.url, host_of(self._log.url, around.host), program, leave)
        self._program = None if program is None else targets_of(program.graph)

    @classmethod
    @contextmanager
    def holding_the_lock(
        cls,
        root: str,
        pipeline: str,
        program: PipelineDefinition | None,
        around: Surroundings = PROCESS,
        leave: Sequence[str] = (),
    ) -> Iterator[Reset]:
        """Hold the pipeline's lock while the reset is used.

        Raises:
            AlreadyRunning: it runs.
            UsageError: there is no such pipeline.
        """
        if is_missing(f"{root.rstrip('/')}/{pipeline}") and program is None:
            raise UsageError(f"there is no pipeline '{pipeline}' in {root}")
        try:
            lock = PipelineLock.acquire(root, pipeline, f"a reset by process {around.process_id} on {around.host}")
        except AlreadyRunning:
            holder = read_holder(root, pipeline)
            who = "another process" if holder is None else holder.owner
            raise AlreadyRunning(
                f"pipeline '{pipeline}' is run by {who}, and cannot start over meanwhile; stop it first: "
                f"headgate stop {pipeline} --dir {shlex.quote(root)}"
            ) from None
        try:
            storage = open_storage(root)
            # without a lock only heartbeats tell whether a driver runs
            if not lock.nonce:
                refuse_if_alive(storage, pipeline, around)
            yield cls(storage, pipeline, program, around, leave)
        finally:
            lock.release(Ending.CANCELLED, reason="")

    # -- before it counts -------------------------------------------------------------------------------------------

    def plan(self) -> ResetPlan:
        """Return what would go. Changes nothing.

        Raises:
            UsageError: something of it cannot be deleted, or the pipeline's targets are unknown.
            CorruptionError, StorageError
        """
        log = self._retrying(self._log.observe)
        life = self._retrying(lambda: self._log.known_identity(log))
        refuse_while_needed(self._log, log)
        if life is not None:
            self._retrying(lambda: self._refuse_copy(life))
        targets = self._targets(log, life)
        left = tuple(target for target in targets if target.sink in self._leave)
        is_own = self._own_output(log, life)
        found = [one for target in targets if target not in left for one in self._find(target, is_own)]
        found += [one for target in self._unregistered(found, is_own) for one in self._find(target, is_own)]
        self._refuse_to_leave(targets, found, is_own)
        inputs = tuple(self._retrying(lambda: self._storage.list(f"{self._pipeline}/{INPUTS}")))
        aside = tuple(self._retrying(self._log.files.aside_paths))
        is_begun = bool(log.entries) and not has_given_up(log)
        is_held_up = any(needs_reset(one, life, is_own) for one in found)
        is_empty = not (is_begun or inputs or is_held_up or self._decided(log) is not None)
        return ResetPlan(
            self._pipeline, self._log.url, candidates(log), inputs, aside, tuple(found), left, log, is_empty
        )

    def _targets(self, log: ObservedLog, life: PipelineIdentity | None) -> tuple[Target, ...]:
        """Return all that is to be emptied: of the program, of what was written down, of an order half carried out.

        Raises:
            UsageError: without the program they are unknown.
        """
        if self._program is None and life is None and not log.entries:
            raise UsageError(f"there is no pipeline '{self._pipeline}' in {self._storage.url}")
        noted = self._retrying(self._log.sink_registry.targets)
        order = self._decided(log)
        if noted is None and self._program is None and not recovery.is_reset(log):
            raise UsageError(
                f"the targets of pipeline '{self._pipeline}' are not registered: its first start was cut short; its "
                "program knows them: headgate run PROGRAM --fresh"
            )
        # the later one of equal places counts: what the program says now
        known = (*(noted or ()), *(() if order is None else order.targets), *(self._program or ()))
        return tuple({target.place_key: target for target in known}.values())

    def _own_output(self, log: ObservedLog, life: PipelineIdentity | None) -> Mine:
        """Return which owners' output may be deleted; once an order counts, also that of former identities."""
        is_decided = self._decided(log) is not None
        before = self._retrying(lambda: self._log.identities_before(life_of(log))) if is_decided else ()
        return self._sinks.is_own((*(() if life is None else (life,)), *before))

    def _refuse_to_leave(self, targets: Sequence[Target], found: Sequence[FoundTarget], is_own: Mine) -> None:
        """Refuse to leave an unknown sink, or one of several that write to a stream, emptied as a whole.

        Raises:
            UsageError
        """
        known = {target.sink for target in targets} | {other.sink for one in found for other in one.owner.others}
        unknown = sorted(self._leave - known)
        if unknown:
            there = ", ".join(f"'{name}'" for name in sorted(known)) or "none"
            raise UsageError(f"pipeline '{self._pipeline}' has no sink '{unknown[0]}' to leave; its sinks: {there}")
        for one in found:
            left = [other.sink for other in one.owner.others if other.sink in self._leave and is_own(other.owner)]
            if one.target.kind is TargetKind.STREAM and left:
                raise UsageError(
                    f"sink '{left[0]}' of pipeline '{self._pipeline}' cannot be left alone: sink '{one.target.sink}' "
                    f"writes to {one.holding.where}, too, which is emptied of all that the pipeline wrote; leave both"
                )

    def _unregistered(self, found: Sequence[FoundTarget], is_own: Mine) -> list[Target]:
        """Return targets of the pipeline at the same places, written to by unregistered sinks.

        Nothing of a stream: it is emptied of all that the pipeline wrote, whatever the sinks were called.
        """
        known = {_target_key(one.target) for one in found}
        others = (
            replace(one.target, sink=other.sink)
            for one in found
            if one.target.kind is not TargetKind.STREAM
            for other in one.owner.others
            if other.sink not in self._leave and is_own(other.owner)
        )
        return list({_target_key(target): target for target in others if _target_key(target) not in known}.values())

    def _find(self, target: Target, is_own: Mine) -> list[FoundTarget]:
        """Return all places of ``target``. Those that remember the same owner are one, as far as anybody can see."""
        if target.kind is TargetKind.NOTHING:
            return [FoundTarget(target, None, Owner(), Holding("", ""))]
        sinks = self._at(target, lambda: self._sinks.at(target, is_own))
        found = [self._find_at(sink, target, is_own) for sink in sinks]
        # of several with one owner the first stays: the target's own sink
        return list({one.owner: one for one in reversed(found)}.values())[::-1]

    def _find_at(self, sink: Sink, target: Target, is_own: Mine) -> FoundTarget:
        owner = self._at(target, lambda: sink.owner(self._pipeline, target.sink))
        holding = self._at(target, lambda: sink.holding(self._pipeline, target.sink, is_own))
        if not owner.is_forgotten and not is_own(owner):
            raise UsageError(self._sinks.other_owner_text(target, owner, holding))
        problem = holding.problem or (f"{holding.where} {KEPT}" if owner.is_forgotten and holding.what else "")
        if problem:
            raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {problem}")
        return FoundTarget(target, sink, owner, holding)

    def _refuse_copy(self, life: PipelineIdentity) -> None:
        """Refuse if ``life`` began in another directory, and is there still: what its targets hold is that one's."""
        if is_same_directory(life.home, self._log.url) or is_missing(life.home):
            return
        root, _, name = life.home.rpartition("/")
        there = CheckpointLog(open_storage(root), name)
        known = there.known_identity(there.observe())
        if known is not None and known.id == life.id:
            raise UsageError(
                f"the checkpoints in {self._log.url} are a copy of those in {life.home}, and what pipeline "
                f"'{self._pipeline}' has written belongs to both; to delete it, run: headgate reset {name} "
                f"--dir {shlex.quote(root)}"
            )

    # -- the step, and what follows it ------------------------------------------------------------------------------

    def carry_out(self, plan: ResetPlan) -> None:
        """Delete everything in ``plan``: from the entry in the log on, every start finishes it (SO2).

        Raises:
            FencedError: a driver has claimed since ``plan`` was made; nothing was changed.
            UsageError: something else has changed since, or a target has another owner now.
            CorruptionError, StorageError: it is not finished; repeating is safe.
        """
        self._refuse_if_changed(plan)
        token, wall_ms = self._around.token(8).hex(), self._around.wall_ms()
        above = max((found.owner.generation for found in plan.targets), default=Generation(0))
        targets = tuple(dict.fromkeys(found.target for found in plan.targets if found.sink is not None))
        order = ResetOrder(token, targets, (*plan.inputs, *plan.aside))
        # listed before there is a new one: only these are removed below
        older = self._retrying(self._log.sink_registry.orders)
        # the order is durable before an entry names it: a start that finds the entry must find what to do
        self._retrying(lambda: self._log.sink_registry.give(order))
        # the one step: a crash before it leaves everything, after it every start finishes what follows (SO3)
        claimed = self._retrying(lambda: self._log.start_over(token, wall_ms, plan.log, above))
        self._finish(order, claimed.next.life, claimed.next.generation)
        with suppress(StorageError):  # the next start does both, too
            self._retrying(lambda: self._log.sink_registry.withdraw(older))
            self._retrying(self._log.files.sweep)

    def _refuse_if_changed(self, plan: ResetPlan) -> None:
        """Look again: nothing goes that ``plan`` did not show. A later claim is left to the step, which is fenced."""
        newest = recovery.newest_generation(self._retrying(self._log.observe))
        if newest == recovery.newest_generation(plan.log) and self.plan().shown != plan.shown:
            raise UsageError(
                f"what pipeline '{self._pipeline}' would lose has changed since it was shown; nothing was deleted: "
                "plan_reset again, and start over then"
            )

    def finish(self) -> bool:
        """Finish a reset that counts and was interrupted; return whether there was one (SO3).

        Raises:
            UsageError, CorruptionError, StorageError: it is not finished; repeating is safe.
        """
        log = self._retrying(self._log.observe)
        order = self._decided(log)
        if order is None:
            return False
        self._finish(order, life_of(log), recovery.newest_generation(log))
        return True

    def _decided(self, log: ObservedLog) -> ResetOrder | None:
        token = recovery.decided_reset(log)
        return None if token is None else self._retrying(lambda: self._log.sink_registry.order(token))

    @classmethod
    def is_unfinished(cls, root: str, pipeline: str) -> bool:
        """Whether a reset counts and is unfinished: cheap if there never was an order.

        Raises:
            StorageError
        """
        log = CheckpointLog(open_storage(root), pipeline)
        orders = log.sink_registry.orders()
        return bool(orders) and recovery.decided_reset(log.observe()) in orders

    def _finish(self, order: ResetOrder, number: int, generation: Generation) -> None:
        """Do what is left to be done: every step is done once, however often this begins."""
        assert generation > NO_GENERATION, "only a claim in the log makes a reset count"
        # drawn once: each attempt makes the same life the owner, which is how an emptied target is known
        life = self._retrying(lambda: self._log.identity_after_reset(number, self._around.host, self._around.wall_ms()))
        is_own = self._sinks.is_own((life, *self._retrying(lambda: self._log.identities_before(number))))
        # all sinks are found before any target is emptied: a missing one refuses first
        known = [
            (target, self._at(target, lambda target=target: self._sinks.at(target, is_own, generation)))  # type: ignore[misc]
            for target in order.targets
        ]
        for group in grouped_by_owner([(target, sink) for target, sinks in known for sink in sinks]):
            self._at(group[0][0], lambda group=group: self._empty(group, generation, life, is_own))  # type: ignore[misc]
        for path in order.beside:
            self._retrying(lambda path=path: self._remove(path, order))  # type: ignore[misc]
        # last: as long as the order is there, every start comes here again
        self._retrying(lambda: self._log.sink_registry.carried_out(number, order.token))

    def _remove(self, path: str, order: ResetOrder) -> None:
        """Remove what the order names, unless it was carried out by now: then it may be a later life's."""
        if self._decided(self._log.observe()) == order:
            self._storage.delete(path)

    def _empty(
        self, group: tuple[RecordedSink, ...], generation: Generation, life: PipelineIdentity, is_own: Mine
    ) -> None:
        """Empty the targets of one owner, unless they have got another owner since they were looked at (SO4)."""
        for target, sink in group:
            # asked again directly before: since the plan was made another pipeline may have begun to write there
            self._sinks.refuse_other_owner(target, sink, generation, is_own)
        resettable_of(group).start_over(self._pipeline, group[0][0].sink, generation, life, is_own)

    def _at(self, target: Target, call: Callable[[], _T]) -> _T:
        """Return what ``call`` does at ``target``; say what can be done if that stays out of reach."""
        try:
            return self._retrying(call)
        except StorageError as error:
            cause = (
                f"{error.cause}; so sink '{target.sink}' of pipeline '{self._pipeline}' cannot be emptied; try again, "
                f"or, if its target is gone for good, leave it: {self._sinks.leave_command(target)}"
            )
            raise StorageError(error.operation, error.path, cause, error.is_transient) from error

    def _retrying(self, call: Callable[[], _T]) -> _T:
        return restart.retry_transient(call, self._around)


def _target_key(target: Target) -> tuple[object, ...]:
    """Return a key for the sink and its target. The place of a user's own sink class is unknown."""
    return (target.sink, target.kind) if target.kind is TargetKind.OWN else target.place_key


def needs_reset(found: FoundTarget, life: PipelineIdentity | None, is_own: Mine) -> bool:
    """Whether a target keeps the pipeline from beginning as it is, or would hold what a former run wrote.

    In a stream a former name of the sink may have left invisible prepared output.
    """
    others = [other.owner for other in found.owner.others if found.target.kind is TargetKind.STREAM]
    has_former = any(is_own(owner) and not _is_free_for(life, owner) for owner in others)
    return bool(found.holding.what) or has_former or not _is_free_for(life, found.owner)


def _is_free_for(life: PipelineIdentity | None, owner: Owner) -> bool:
    return owner.is_forgotten or owner.is_unknown or (owner.life is not None and owner.life == life)


class TargetSinks:
    """The sinks that can empty the targets of one pipeline: those of its program, or made of what is registered."""

    def __init__(
        self,
        pipeline: str,
        home: str,
        host: str | None,
        program: PipelineDefinition | None,
        leave: Collection[str] = (),
    ) -> None:
        """``home`` is where the checkpoints are, ``host`` as for ``may_delete_output``; ``program``: None if unknown.

        ``leave``: names of sinks that are left already.
        """
        self._leave = frozenset(leave)
        self._pipeline, self._home, self._host = pipeline, home, host
        self._program = program
        graph = () if program is None else program.graph.nodes
        sinks = {str(node.name): cast(Sink, node.spec) for node in graph if node.role is Role.SINK}
        self._by_name: Mapping[str, Sink] = sinks

    def is_own(self, known: Sequence[PipelineIdentity]) -> Mine:
        """Return which owners' output may be deleted, given the ``known`` identities of the pipeline."""
        home, host = self._home, self._host
        return lambda owner: any(ownership.may_delete_output(life, home, host, owner) for life in known or (None,))

    def _sink(self, target: Target) -> Sink | None:
        """Return the program's own sink in front of ``target``, else one made of what is written down."""
        is_own = self._by_name.get(target.sink)
        if is_own is not None and is_own.can_be_reset and is_own.recorded(target.sink).place_key == target.place_key:
            return is_own
        return sink_of(target)

    def at(self, target: Target, is_own: Mine, generation: Generation = NO_GENERATION) -> tuple[Sink, ...]:
        """Return the sinks in front of all places of ``target``, its own first.

        Where a user's sink writes to is written down nowhere. So each sink of the class is asked, which may be that
        sink under its present name, or stand where it was before. ``generation``: as for ``refuse_other_owner``.

        Raises:
            UsageError: no sink is known; says what to do.
            StorageError
        """
        sink, others = self._sink(target), self._others_of_class(target)
        if sink is None and not others:
            raise UsageError(self._unknown_sink_text(target))
        own = [other for other, owner in others if is_own(owner) or _is_fenced_by(owner, generation)]
        first = [] if sink is None else [sink]
        return tuple(first + own or [others[0][0]])

    def _others_of_class(self, target: Target) -> list[tuple[Sink, Owner]]:
        """Return the program's other sinks of the same user class with an owner of ``target``, and that owner."""
        if target.kind is not TargetKind.OWN:
            return []
        sinks = [sink for name, sink in self._by_name.items() if name != target.sink]
        same = [sink for sink in sinks if sink.can_be_reset and type(sink).__name__ == target.place]
        known = [(sink, sink.owner(self._pipeline, target.sink)) for sink in same]
        return [(sink, owner) for sink, owner in known if not owner.is_unknown]

    def _unknown_sink_text(self, target: Target) -> str:
        sink = f"sink '{target.sink}' of pipeline '{self._pipeline}' is of the class {target.place}"
        if self._program is None:
            return f"{sink}, which only its program can empty; run: headgate run PROGRAM --fresh"
        if target.sink in self._by_name:
            return (
                f"{sink}, which does not say how its output is removed; derive it from headgate.TwoPhaseSink or "
                "headgate.LedgerSink, with a method remove_output(self, fence)"
            )
        return (
            f"{sink}, and is not in the program any more; put it back for this start, so that its output can go too, "
            f"or leave it there: {self.leave_command(target)}"
        )

    def leave_command(self, target: Target) -> str:
        """Return the command that starts over and leaves ``target`` as it is."""
        leaving = " ".join(f"--leave {name}" for name in sorted({*self._leave, target.sink}))
        if self._program is not None:
            return f"headgate run PROGRAM --fresh {leaving}"
        root, _, name = self._home.rpartition("/")
        return f"headgate reset {name} --dir {shlex.quote(root)} {leaving}"

    def other_owner_text(self, target: Target, owner: Owner, holding: Holding) -> str:
        """Return why ``target`` is not emptied, which ``owner`` has."""
        sink = f"sink '{target.sink}' of pipeline '{self._pipeline}'"
        if owner.life is None:
            return (
                f"{sink}: {holding.where} was written to from checkpoints that are not those in {self._home}; "
                f"delete what is there yourself, or leave it and run: {self._how_to_forget(target)}"
            )
        root, _, name = owner.life.home.rpartition("/")
        return (
            f"{sink}: {holding.where} belongs to the pipeline of the same name with its checkpoints in "
            f"{owner.life.home}; to delete what that one wrote, run: headgate reset {name} --dir {shlex.quote(root)}"
        )

    def _how_to_forget(self, target: Target) -> str:
        others = (other for other, _ in self._others_of_class(target))
        sink = self._sink(target) or next(others, None)
        return "" if sink is None else sink.how_to_forget(self._pipeline, target.sink)

    def refuse_other_owner(self, target: Target, sink: Sink, generation: Generation, is_own: Mine) -> None:
        """Refuse to empty a target that has got another owner since it was looked at (SO4) for reset ``generation``.

        Raises:
            UsageError
            CorruptionError, StorageError
        """
        owner = sink.owner(self._pipeline, target.sink)
        if not is_own(owner) and not _is_fenced_by(owner, generation):
            holding = sink.holding(self._pipeline, target.sink, is_own)
            if not owner.is_forgotten:
                raise UsageError(self.other_owner_text(target, owner, holding))
            if holding.what or holding.problem:
                kept = holding.problem or f"{holding.where} {KEPT}"
                raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {kept}")


def _is_fenced_by(owner: Owner, generation: Generation) -> bool:
    """Whether an attempt of ``generation`` that was cut short has fenced all others."""
    return owner.life is None and not owner.is_unknown and owner.generation == generation


def refuse_if_alive(storage: Storage, pipeline: str, around: Surroundings) -> None:
    """Wait for a heartbeat of a run without a recorded end.

    Raises:
        AlreadyRunning: there was one.
        StorageError
    """
    heartbeats = HeartbeatReader(storage, pipeline, "")
    first = heartbeats.all()
    if not first.generation or not first.knows_beats or first.course not in _RUNNING_COURSES:
        return
    for _ in range(Standby.SILENCE_MS // Standby.LOOK_MS):
        around.sleep(Standby.LOOK_MS / 1000)
        seen = heartbeats.beat(first.generation)
        if seen.course not in _RUNNING_COURSES:
            return
        if seen.mark != first.mark:
            raise AlreadyRunning(
                f"pipeline '{pipeline}' is run by {seen.owner or 'another process'}, and cannot start over meanwhile; "
                "stop it first"
            )
