"""Has a pipeline start over: checkpoints and output go, together or not at all (docs/spec/starting-over.md).

Order: look → write the order down → one entry of the log makes it count → empty the targets one after the other →
remove the order. Up to the entry nothing has happened; from then on every start finishes it before anything else.
Decisions are those of ``protocol.checkpoints.starting_over``. Holds the pipeline's lock; runs in no driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from headgate.codec.lock_holder import Ending
from headgate.connectors.owned_sinks import KEPT, Holding, ResettableSink
from headgate.connectors.recorded import Front, in_one_step, targets_of, together
from headgate.errors import StorageError, UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import Generation
from headgate.model.life import Life, Mine, Owner
from headgate.model.targets import ResetOrder, Target, TargetKind
from headgate.protocol.checkpoints import starting_over
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates, has_given_up, life_of
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import claims, sign_of_life
from headgate.runtime.driver.fronts import Fronts
from headgate.runtime.driver.lives import host_of
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock, read_holder
from headgate.runtime.driver.removing import check_nobody_needs
from headgate.runtime.driver.reset_plan import Found, Plan, is_in_the_way, refuse_to_part, refuse_unknown
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.storage.backends import is_missing, local_directory, open_storage
from headgate.storage.base import Storage

_T = TypeVar("_T")

INPUTS = "inputs"
"""Captured DataFrames, below the pipeline's directory: the next start captures anew."""


class StartingOver:
    """One pipeline that starts over. Make it with ``holding_the_lock``."""

    def __init__(
        self,
        storage: Storage,
        pipeline: str,
        program: PipelineDefinition | None,
        around: Surroundings = PROCESS,
        leave: Sequence[str] = (),
    ) -> None:
        """``program``: the pipeline as its program makes it; None: only what is written down is known.

        ``leave``: names of sinks whose targets stay as they are (SO10).
        """
        self._leave = frozenset(leave)
        self._storage, self._pipeline, self._around = storage, pipeline, around
        self._log = CheckpointLog(storage, pipeline)
        self._fronts = Fronts(pipeline, self._log.url, host_of(self._log.url, around.host), program, leave)
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
    ) -> Iterator[StartingOver]:
        """Give it while nobody else runs the pipeline (SO8).

        Raises:
            AlreadyRunning: somebody runs it.
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
                f"headgate stop {pipeline}"
            ) from None
        try:
            storage = open_storage(root)
            if not lock.nonce:
                sign_of_life.refuse_if_alive(storage, pipeline, around)
            yield cls(storage, pipeline, program, around, leave)
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
        left = tuple(target for target in targets if target.sink in self._leave)
        mine = self._mine(log, life)
        found = [one for target in targets if target not in left for one in self._found(target, mine)]
        found += [one for target in self._of_other_names(found, mine) for one in self._found(target, mine)]
        self._refuse_to_leave(targets, found, mine)
        inputs = tuple(self._retrying(lambda: self._storage.list(f"{self._pipeline}/{INPUTS}")))
        aside = tuple(self._retrying(self._log.files.aside_paths))
        is_begun = bool(log.entries) and not has_given_up(log)
        are_in_the_way = any(is_in_the_way(one, life, mine) for one in found)
        is_empty = not (is_begun or inputs or are_in_the_way or self._decided(log) is not None)
        return Plan(self._pipeline, self._log.url, candidates(log), inputs, aside, tuple(found), left, log, is_empty)

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
                f"nobody wrote down what pipeline '{self._pipeline}' writes to: an earlier release began it, or its "
                "first start was cut short; its program knows: headgate run PROGRAM --fresh"
            )
        known = (*(noted or ()), *(() if order is None else order.targets), *(self._program or ()))
        return tuple({target.place_key: target for target in known}.values())

    def _mine(self, log: ObservedLog, life: Life | None) -> Mine:
        """Return whose output may go; while an order is decided, also what its former lives wrote, as it says."""
        is_decided = self._decided(log) is not None
        before = self._retrying(lambda: self._log.lives_before(life_of(log))) if is_decided else ()
        return self._fronts.mine((*(() if life is None else (life,)), *before))

    def _refuse_to_leave(self, targets: Sequence[Target], found: Sequence[Found], mine: Mine) -> None:
        known = {target.sink for target in targets} | {other.sink for one in found for other in one.owner.others}
        refuse_unknown(self._pipeline, self._leave, known)
        refuse_to_part(self._pipeline, self._leave, found, mine)

    def _of_other_names(self, found: Sequence[Found], mine: Mine) -> list[Target]:
        """Return what the pipeline itself wrote to the same places by sinks that nobody has written down (LV9).

        Nothing of a stream: it is emptied of all that the pipeline wrote, whatever the sinks were called.
        """
        known = {_found_at(one.target) for one in found}
        others = (
            replace(one.target, sink=other.sink)
            for one in found
            if one.target.kind is not TargetKind.STREAM
            for other in one.owner.others
            if other.sink not in self._leave and mine(other.owner)
        )
        return list({_found_at(target): target for target in others if _found_at(target) not in known}.values())

    def _found(self, target: Target, mine: Mine) -> list[Found]:
        """Return all places of ``target``. Those that remember the same owner are one, as far as anybody can see."""
        if target.kind is TargetKind.NOTHING:
            return [Found(target, None, Owner(), Holding("", ""))]
        sinks = self._at(target, lambda: self._fronts.known(target, mine))
        found = [self._found_by(sink, target, mine) for sink in sinks]
        return list({one.owner: one for one in reversed(found)}.values())[::-1]

    def _found_by(self, sink: ResettableSink, target: Target, mine: Mine) -> Found:
        owner = self._at(target, lambda: sink.owner(self._pipeline, target.sink))
        holding = self._at(target, lambda: sink.holding(self._pipeline, target.sink, mine))
        if not owner.is_forgotten and not mine(owner):
            raise UsageError(self._fronts.not_ours(target, owner, holding))
        problem = holding.problem or (f"{holding.where} {KEPT}" if owner.is_forgotten and holding.what else "")
        if problem:
            raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {problem}")
        return Found(target, sink, owner, holding)

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
        targets = tuple(dict.fromkeys(found.target for found in plan.targets if found.sink is not None))
        order = ResetOrder(token, targets, (*plan.inputs, *plan.aside))
        older = self._retrying(self._log.records.orders)
        self._retrying(lambda: self._log.records.give(order))
        claimed = self._retrying(lambda: self._log.start_over(token, wall_ms, plan.log, above))
        self._finish(order, claimed.next.life, claimed.next.generation)
        with suppress(StorageError):  # the next start does both, too
            self._retrying(lambda: self._log.records.withdraw(older))
            self._retrying(self._log.files.sweep)

    def _refuse_if_changed(self, plan: Plan) -> None:
        """Look again: nothing goes that ``plan`` did not show. A later claim is left to the step, which is fenced."""
        newest = starting_over.newest_generation(self._retrying(self._log.observe))
        if newest == starting_over.newest_generation(plan.log) and self.look().shown != plan.shown:
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

    @classmethod
    def is_due(cls, root: str, pipeline: str) -> bool:
        """Whether somebody has decided to start over and did not finish it: cheap if nobody ever wanted to.

        Raises:
            StorageError
        """
        log = CheckpointLog(open_storage(root), pipeline)
        orders = log.records.orders()
        return bool(orders) and starting_over.decided(log.observe()) in orders

    def _finish(self, order: ResetOrder, number: int, generation: Generation) -> None:
        """Do what is left to be done: every step is done once, however often this begins (SO6)."""
        life = self._retrying(lambda: self._log.later_life(number, self._around.host, self._around.wall_ms()))
        mine = self._fronts.mine((life, *self._retrying(lambda: self._log.lives_before(number))))
        known = [(target, self._known(target, mine, generation)) for target in order.targets]
        for fronts in together([(target, sink) for target, sinks in known for sink in sinks]):
            self._at(fronts[0][0], lambda fronts=fronts: self._empty(fronts, generation, life, mine))  # type: ignore[misc]
        for path in order.beside:
            self._retrying(lambda path=path: self._remove(path, order))  # type: ignore[misc]
        self._retrying(lambda: self._log.records.carried_out(number, order.token))

    def _known(self, target: Target, mine: Mine, generation: Generation) -> tuple[ResettableSink, ...]:
        return self._at(target, lambda: self._fronts.known(target, mine, generation))

    def _remove(self, path: str, order: ResetOrder) -> None:
        """Remove what the order names, unless it was carried out by now: then it may be a later life's (SO7)."""
        if self._decided(self._log.observe()) == order:
            self._storage.delete(path)

    def _empty(self, fronts: tuple[Front, ...], generation: Generation, life: Life, mine: Mine) -> None:
        """Empty what has one owner, unless it has become somebody else's since it was looked at (SO4)."""
        for target, sink in fronts:
            self._fronts.refuse_others(target, sink, generation, mine)
        in_one_step(fronts).start_over(self._pipeline, fronts[0][0].sink, generation, life, mine)

    def _at(self, target: Target, call: Callable[[], _T]) -> _T:
        """Return what ``call`` does at ``target``; say what can be done if that stays out of reach (SO10)."""
        try:
            return self._retrying(call)
        except StorageError as error:
            cause = (
                f"{error.cause}; so sink '{target.sink}' of pipeline '{self._pipeline}' cannot be emptied; try again, "
                f"or, if its target is gone for good, leave it: {self._fronts.how_to_leave(target)}"
            )
            raise StorageError(error.operation, error.path, cause, error.is_transient) from error

    def _retrying(self, call: Callable[[], _T]) -> _T:
        return claims.retrying(call, self._around)


def _found_at(target: Target) -> tuple[object, ...]:
    """Return what says which sink of which target it is. Where one of a user's own writes to, nobody else knows."""
    return (target.sink, target.kind) if target.kind is TargetKind.OWN else target.place_key


def _is_same(one: str, other: str) -> bool:
    """Whether two homes are one place; a local directory may have several names."""
    here, there = local_directory(one), local_directory(other)
    return one == other or (here is not None and there is not None and here.resolve() == there.resolve())
