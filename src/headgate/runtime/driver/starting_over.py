"""Has a pipeline start over: checkpoints and output go, together or not at all (docs/spec/starting-over.md).

Order: look → write the order down → one entry of the log makes it count → empty the targets one after the other →
remove the order. Up to the entry nothing has happened; from then on every start finishes it before anything else.
Decisions are those of ``protocol.checkpoints.starting_over``. Holds the pipeline's lock; runs in no driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from headgate.codec.lock_holder import Ending
from headgate.connectors.base import KEPT, Holding, ResettableSink
from headgate.connectors.recorded import sink_of, target_of, targets_of
from headgate.errors import StorageError, UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Role
from headgate.model.ids import Generation
from headgate.model.life import Life, Mine, Owner
from headgate.model.manifest import Manifest
from headgate.model.targets import ResetOrder, Target, TargetKind
from headgate.protocol.checkpoints import starting_over
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates, has_given_up, life_of
from headgate.protocol.supervision import lives
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import claims, sign_of_life
from headgate.runtime.driver.lives import host_of
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock, read_holder
from headgate.runtime.driver.removing import check_nobody_needs
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.storage.backends import is_missing, local_directory, open_storage
from headgate.storage.base import Storage

_T = TypeVar("_T")

INPUTS = "inputs"
"""Captured DataFrames, below the pipeline's directory: the next start captures anew."""


@dataclass(frozen=True, slots=True)
class Found:
    """A target that will be emptied, and what it holds. ``sink``: None if there is nothing to be emptied."""

    target: Target
    sink: ResettableSink | None
    owner: Owner
    holding: Holding


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes when the pipeline starts over.

    Attributes:
        pipeline, home: its name, and where its checkpoints are.
        checkpoints: the completed ones, newest first.
        inputs: paths of captured DataFrames.
        targets: of all sinks that it has or had.
        log: what was there when this was found.
        is_empty: nothing would be deleted or forgotten: the next start begins at the beginning as it is.
    """

    pipeline: str
    home: str
    checkpoints: tuple[Manifest, ...]
    inputs: tuple[str, ...]
    targets: tuple[Found, ...]
    log: ObservedLog
    is_empty: bool

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the sources whose DataFrame was captured."""
        return tuple(sorted({path.split("/")[2] for path in self.inputs}))


class StartingOver:
    """One pipeline that starts over. Make it with ``holding_the_lock``."""

    def __init__(
        self, storage: Storage, pipeline: str, program: PipelineDefinition | None, around: Surroundings = PROCESS
    ) -> None:
        """``program``: the pipeline as its program makes it; None: only what is written down is known."""
        self._storage, self._pipeline, self._around = storage, pipeline, around
        self._log = CheckpointLog(storage, pipeline)
        self._host = host_of(self._log.url, around.host)
        graph = () if program is None else program.graph.nodes
        self._program = None if program is None else targets_of(program.graph)
        self._sinks: Mapping[str, object] = {str(node.name): node.spec for node in graph if node.role is Role.SINK}

    @classmethod
    @contextmanager
    def holding_the_lock(
        cls, root: str, pipeline: str, program: PipelineDefinition | None, around: Surroundings = PROCESS
    ) -> Iterator[StartingOver]:
        """Give it while nobody else runs the pipeline (SO8).

        Raises:
            UsageError: somebody runs it, or there is no such pipeline.
        """
        if is_missing(f"{root.rstrip('/')}/{pipeline}") and program is None:
            raise UsageError(f"there is no pipeline '{pipeline}' in {root}")
        try:
            lock = PipelineLock.acquire(root, pipeline, f"a reset by process {around.process_id} on {around.host}")
        except AlreadyRunning:
            holder = read_holder(root, pipeline)
            who = "another process" if holder is None else holder.owner
            raise UsageError(
                f"pipeline '{pipeline}' is run by {who}, and cannot start over meanwhile; stop it first: "
                f"headgate stop {pipeline}"
            ) from None
        try:
            storage = open_storage(root)
            if not lock.nonce:
                sign_of_life.refuse_if_alive(storage, pipeline, around)
            yield cls(storage, pipeline, program, around)
        finally:
            lock.release(Ending.CANCELLED, reason="")

    # -- before it counts -------------------------------------------------------------------------------------------

    def look(self) -> Plan:
        """Return what would go. Changes nothing.

        Raises:
            UsageError: something of it cannot be deleted, or nobody knows what the pipeline has written.
            CorruptionError, StorageError
        """
        log = self._retrying(self._log.observe)
        life = self._retrying(lambda: self._log.known_life(log))
        check_nobody_needs(self._log, log)
        if life is not None:
            self._retrying(lambda: self._refuse_a_copy(life))
        targets = self._targets(log, life)
        found = tuple(self._found(target, life) for target in targets)
        found += tuple(self._found(target, life) for target in self._of_other_names(found, life))
        inputs = tuple(self._retrying(lambda: self._storage.list(f"{self._pipeline}/{INPUTS}")))
        is_begun = bool(log.entries) and not has_given_up(log)
        is_in_the_way = any(one.holding.what or not _is_free_for(life, one.owner) for one in found)
        is_empty = not (is_begun or inputs or is_in_the_way or self._decided(log) is not None)
        return Plan(self._pipeline, self._log.url, candidates(log), inputs, found, log, is_empty)

    def _targets(self, log: ObservedLog, life: Life | None) -> tuple[Target, ...]:
        """Return all that is to be emptied: of the program, of what was written down, of an order half carried out.

        Raises:
            UsageError: without the program nobody knows (SO1).
        """
        if self._program is None and life is None and not log.entries:
            raise UsageError(f"there is no pipeline '{self._pipeline}' in {self._storage.url}")
        noted = self._retrying(self._log.records.targets)
        order = self._decided(log)
        if noted is None and self._program is None and not starting_over.has_started_over(log):
            raise UsageError(
                f"pipeline '{self._pipeline}' was begun by an earlier release, which did not write down what it writes "
                "to; its program knows: headgate run PROGRAM --fresh"
            )
        known = (*(noted or ()), *(() if order is None else order.targets), *(self._program or ()))
        return tuple({target.place_key: target for target in known}.values())

    def _of_other_names(self, found: Sequence[Found], life: Life | None) -> list[Target]:
        """Return what the pipeline itself wrote to the same places by sinks that nobody has written down (LV9).

        Nothing of a stream: it is emptied of all that the pipeline wrote, whatever the sinks were called.
        """
        mine = self._mine(() if life is None else (life,))
        known = {_found_at(one.target) for one in found}
        others = (
            replace(one.target, sink=other.sink)
            for one in found
            if one.target.kind is not TargetKind.STREAM
            for other in one.owner.others
            if mine(other.owner)
        )
        return list({_found_at(target): target for target in others if _found_at(target) not in known}.values())

    def _found(self, target: Target, life: Life | None) -> Found:
        if target.kind is TargetKind.NOTHING:
            return Found(target, None, Owner(), Holding("", ""))
        sink = self._sink(target)
        if sink is None:
            raise UsageError(self._nobody_knows(target))
        owner = self._retrying(lambda: sink.owner(self._pipeline, target.sink))
        mine = self._mine(() if life is None else (life,))
        holding = self._retrying(lambda: sink.holding(self._pipeline, target.sink, mine))
        if not owner.is_forgotten and not mine(owner):
            raise UsageError(self._not_ours(target, owner, holding))
        problem = holding.problem or (f"{holding.where} {KEPT}" if owner.is_forgotten and holding.what else "")
        if problem:
            raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {problem}")
        return Found(target, sink, owner, holding)

    def _mine(self, known: Sequence[Life]) -> Mine:
        """Return whose output may go, if ``known`` are the lives of the pipeline as far as anybody knows."""
        home, host = self._log.url, self._host
        return lambda owner: any(lives.may_empty(life, home, host, owner) for life in known or (None,))

    def _refuse_a_copy(self, life: Life) -> None:
        """Refuse if ``life`` began in another directory, and is there still: what its targets hold is that one's."""
        if _is_same(life.home, self._log.url) or is_missing(life.home):
            return
        root, _, name = life.home.rpartition("/")
        there = CheckpointLog(open_storage(root), name)
        known = there.known_life(there.observe())
        if known is not None and known.id == life.id:
            raise UsageError(
                f"the checkpoints in {self._log.url} are a copy of those in {life.home}, and what pipeline "
                f"'{self._pipeline}' has written belongs to both; to delete it, run: headgate reset {name} --dir {root}"
            )

    def _sink(self, target: Target) -> ResettableSink | None:
        """Return the program's own sink in front of ``target``, else one made of what is written down."""
        mine = self._sinks.get(target.sink)
        if isinstance(mine, ResettableSink) and target_of(target.sink, mine).place_key == target.place_key:
            return mine
        return sink_of(target)

    def _nobody_knows(self, target: Target) -> str:
        sink = f"sink '{target.sink}' of pipeline '{self._pipeline}' is of the class {target.place}"
        if self._program is None:
            return f"{sink}, which only its program can empty; run: headgate run PROGRAM --fresh"
        if target.sink in self._sinks:
            return (
                f"{sink}, which does not say how its output is removed; derive it from headgate.TwoPhaseSink or "
                "headgate.LedgerSink, with a method remove_output(self, fence)"
            )
        return f"{sink}, and is not in the program any more; put it back for this start, so that its output can go too"

    def _not_ours(self, target: Target, owner: Owner, holding: Holding) -> str:
        sink = f"sink '{target.sink}' of pipeline '{self._pipeline}'"
        if owner.life is None:
            return (
                f"{sink}: version 0.1 wrote to {holding.where} from checkpoints that are not those in {self._log.url}; "
                f"delete what is there yourself, or leave it and run: {self._how_to_forget(target)}"
            )
        root, _, name = owner.life.home.rpartition("/")
        return (
            f"{sink}: {holding.where} belongs to the pipeline of the same name with its checkpoints in "
            f"{owner.life.home}; to delete what that one wrote, run: headgate reset {name} --dir {root}"
        )

    def _how_to_forget(self, target: Target) -> str:
        sink = self._sink(target)
        return "" if sink is None else sink.how_to_forget(self._pipeline, target.sink)

    # -- the step, and what follows it ------------------------------------------------------------------------------

    def carry_out(self, plan: Plan) -> None:
        """Delete everything in ``plan``: from the entry in the log on, whoever starts the pipeline finishes it (SO2).

        Raises:
            FencedError: a driver has claimed since ``plan`` was made; nothing was changed.
            UsageError: something else has changed since, or somebody else has a target now.
             CorruptionError, StorageError: it is not finished; repeating is safe.
        """
        self._refuse_if_changed(plan)
        token, wall_ms = self._around.token(8).hex(), self._around.wall_ms()
        above = max((found.owner.generation for found in plan.targets), default=Generation(0))
        order = ResetOrder(token, tuple(found.target for found in plan.targets if found.sink is not None))
        self._retrying(lambda: self._log.records.give(order))
        claimant = starting_over.claimant(token)
        claimed = self._retrying(lambda: self._log.start_over(claimant, wall_ms, plan.log, above))
        self._finish(order, claimed.next.life, claimed.next.generation)
        with suppress(StorageError):  # the next start sweeps, too
            self._retrying(self._log.files.sweep)

    def _refuse_if_changed(self, plan: Plan) -> None:
        """Look again: nothing goes that ``plan`` did not show. A later claim is left to the step, which is fenced."""
        newest = starting_over.newest_generation(self._retrying(self._log.observe))
        if newest == starting_over.newest_generation(plan.log) and _shown(self.look()) != _shown(plan):
            raise UsageError(
                f"what pipeline '{self._pipeline}' would lose has changed since it was shown; nothing was deleted: "
                "look again, and start over then"
            )

    def finish(self) -> bool:
        """Finish what somebody decided and did not live to finish; return whether there was anything (SO3).

        Raises:
            UsageError, CorruptionError, StorageError: it is not finished; repeating is safe.
        """
        log = self._retrying(self._log.observe)
        order = self._decided(log)
        if order is None:
            return False
        self._finish(order, life_of(log), starting_over.newest_generation(log))
        return True

    def _decided(self, log: ObservedLog) -> ResetOrder | None:
        token = starting_over.decided(log)
        return None if token is None else self._retrying(lambda: self._log.records.order(token))

    def _finish(self, order: ResetOrder, number: int, generation: Generation) -> None:
        """Do what is left to be done: every step is done once, however often this begins (SO6)."""
        life = self._retrying(lambda: self._log.later_life(number, self._around.host, self._around.wall_ms()))
        mine = self._mine((life, *self._retrying(lambda: self._log.lives_before(number))))
        for target in order.targets:
            sink = self._sink(target)
            if sink is None:
                raise UsageError(self._nobody_knows(target))
            self._retrying(lambda sink=sink, target=target: self._empty(sink, target, generation, life, mine))  # type: ignore[misc]
        for path in self._retrying(lambda: self._storage.list(f"{self._pipeline}/{INPUTS}")):
            self._retrying(lambda path=path: self._storage.delete(path))  # type: ignore[misc]
        self._retrying(self._log.discard_aside)
        self._retrying(lambda: self._log.records.carried_out(number))

    def _empty(self, sink: ResettableSink, target: Target, generation: Generation, life: Life, mine: Mine) -> None:
        """Empty one target, unless it has become somebody else's since it was looked at (SO4)."""
        owner = sink.owner(self._pipeline, target.sink)
        is_begun = owner.life is None and owner.generation == generation  # fenced by an attempt that was cut short
        if not mine(owner) and not is_begun:
            holding = sink.holding(self._pipeline, target.sink, mine)
            if not owner.is_forgotten:
                raise UsageError(self._not_ours(target, owner, holding))
            if holding.what or holding.problem:
                kept = holding.problem or f"{holding.where} {KEPT}"
                raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {kept}")
        sink.start_over(self._pipeline, target.sink, generation, life, mine)

    def _retrying(self, call: Callable[[], _T]) -> _T:
        return claims.retrying(call, self._around)


def _found_at(target: Target) -> tuple[object, ...]:
    """Return what says which sink of which target it is. Where one of a user's own writes to, nobody else knows."""
    return (target.sink, target.kind) if target.kind is TargetKind.OWN else target.place_key


def _is_free_for(life: Life | None, owner: Owner) -> bool:
    """Whether a target lets the pipeline begin as it is."""
    return owner.is_forgotten or owner.is_nobody or (owner.life is not None and owner.life == life)


def _shown(plan: Plan) -> object:
    """Return what must not change between a question and its answer."""
    return [(found.target, found.owner, found.holding) for found in plan.targets]


def _is_same(one: str, other: str) -> bool:
    """Whether two homes are one place; a local directory may have several names."""
    here, there = local_directory(one), local_directory(other)
    return one == other or (here is not None and there is not None and here.resolve() == there.resolve())
