"""The sinks in front of what a pipeline that starts over has written to, and whether it may be emptied.

Counterpart: ``starting_over``, which empties it. Source: SO1, SO4 and SO10 of docs/spec/starting-over.md.
Changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headgate.connectors.owned_sinks import KEPT, Holding, ResettableSink
from headgate.connectors.recorded import sink_of, target_of
from headgate.errors import UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Role
from headgate.model.ids import Generation
from headgate.model.life import NO_GENERATION, Life, Mine, Owner
from headgate.model.targets import Target, TargetKind
from headgate.protocol.supervision import lives


class Fronts:
    """The sinks of one pipeline."""

    def __init__(
        self,
        pipeline: str,
        home: str,
        host: str | None,
        program: PipelineDefinition | None,
        leave: Collection[str] = (),
    ) -> None:
        """``home`` is where the checkpoints are, ``host`` as for ``lives.may_empty``; ``program``: None if unknown.

        ``leave``: names of sinks that are left already.
        """
        self._leave = frozenset(leave)
        self._pipeline, self._home, self._host = pipeline, home, host
        self._program = program
        graph = () if program is None else program.graph.nodes
        self._sinks: Mapping[str, object] = {str(node.name): node.spec for node in graph if node.role is Role.SINK}

    def mine(self, known: Sequence[Life]) -> Mine:
        """Return whose output may go, if ``known`` are the lives of the pipeline as far as anybody knows."""
        home, host = self._home, self._host
        return lambda owner: any(lives.may_empty(life, home, host, owner) for life in known or (None,))

    def _sink(self, target: Target) -> ResettableSink | None:
        """Return the program's own sink in front of ``target``, else one made of what is written down."""
        mine = self._sinks.get(target.sink)
        if isinstance(mine, ResettableSink) and target_of(target.sink, mine).place_key == target.place_key:
            return mine
        return sink_of(target)

    def known(self, target: Target, mine: Mine, generation: Generation = NO_GENERATION) -> tuple[ResettableSink, ...]:
        """Return the sinks in front of all places of ``target``, its own first.

        Where a user's sink writes to is written down nowhere. So each sink of the class is asked, which may be that
        sink under its present name, or stand where it was before (LV9). ``generation``: as for ``refuse_others``.

        Raises:
            UsageError: nobody knows one; says what to do.
            StorageError
        """
        sink, others = self._sink(target), self._others_at(target)
        if sink is None and not others:
            raise UsageError(self._nobody_knows(target))
        own = [other for other, owner in others if mine(owner) or _is_begun(owner, generation)]
        first = [] if sink is None else [sink]
        return tuple(first + own or [others[0][0]])

    def _others_at(self, target: Target) -> list[tuple[ResettableSink, Owner]]:
        """Return the program's other sinks of the class of a user's own whose target knows that one, and its owner."""
        if target.kind is not TargetKind.OWN:
            return []
        sinks = [sink for name, sink in self._sinks.items() if name != target.sink]
        same = [sink for sink in sinks if isinstance(sink, ResettableSink) and type(sink).__name__ == target.place]
        known = [(sink, sink.owner(self._pipeline, target.sink)) for sink in same]
        return [(sink, owner) for sink, owner in known if not owner.is_nobody]

    def _nobody_knows(self, target: Target) -> str:
        sink = f"sink '{target.sink}' of pipeline '{self._pipeline}' is of the class {target.place}"
        if self._program is None:
            return f"{sink}, which only its program can empty; run: headgate run PROGRAM --fresh"
        if target.sink in self._sinks:
            return (
                f"{sink}, which does not say how its output is removed; derive it from headgate.TwoPhaseSink or "
                "headgate.LedgerSink, with a method remove_output(self, fence)"
            )
        return (
            f"{sink}, and is not in the program any more; put it back for this start, so that its output can go too, "
            f"or leave it there: {self.how_to_leave(target)}"
        )

    def how_to_leave(self, target: Target) -> str:
        """Return the command that starts over and leaves ``target`` as it is."""
        leaving = " ".join(f"--leave {name}" for name in sorted({*self._leave, target.sink}))
        if self._program is not None:
            return f"headgate run PROGRAM --fresh {leaving}"
        root, _, name = self._home.rpartition("/")
        return f"headgate reset {name} --dir {root} {leaving}"

    def not_ours(self, target: Target, owner: Owner, holding: Holding) -> str:
        """Return why ``target`` is not emptied, which ``owner`` has."""
        sink = f"sink '{target.sink}' of pipeline '{self._pipeline}'"
        if owner.life is None:
            return (
                f"{sink}: version 0.1 wrote to {holding.where} from checkpoints that are not those in {self._home}; "
                f"delete what is there yourself, or leave it and run: {self._how_to_forget(target)}"
            )
        root, _, name = owner.life.home.rpartition("/")
        return (
            f"{sink}: {holding.where} belongs to the pipeline of the same name with its checkpoints in "
            f"{owner.life.home}; to delete what that one wrote, run: headgate reset {name} --dir {root}"
        )

    def _how_to_forget(self, target: Target) -> str:
        others = (other for other, _ in self._others_at(target))
        sink = self._sink(target) or next(others, None)
        return "" if sink is None else sink.how_to_forget(self._pipeline, target.sink)

    def refuse_others(self, target: Target, sink: ResettableSink, generation: Generation, mine: Mine) -> None:
        """Refuse to empty what has become somebody else's since it was looked at (SO4); ``generation`` is to do so.

        Raises:
            UsageError
            CorruptionError, StorageError
        """
        owner = sink.owner(self._pipeline, target.sink)
        if not mine(owner) and not _is_begun(owner, generation):
            holding = sink.holding(self._pipeline, target.sink, mine)
            if not owner.is_forgotten:
                raise UsageError(self.not_ours(target, owner, holding))
            if holding.what or holding.problem:
                kept = holding.problem or f"{holding.where} {KEPT}"
                raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {kept}")


def _is_begun(owner: Owner, generation: Generation) -> bool:
    """Whether an attempt of ``generation`` that was cut short has fenced all others."""
    return owner.life is None and not owner.is_nobody and owner.generation == generation
