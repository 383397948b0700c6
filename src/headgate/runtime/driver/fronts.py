"""The sinks in front of what a pipeline that starts over has written to, and whether it may be emptied.

Counterpart: ``starting_over``, which empties it. Source: SO1, SO4 and SO10 of docs/spec/starting-over.md.
Changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headgate.connectors.base import KEPT, Holding, ResettableSink
from headgate.connectors.recorded import sink_of, target_of
from headgate.errors import UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Role
from headgate.model.ids import Generation
from headgate.model.life import Life, Mine, Owner
from headgate.model.targets import Target
from headgate.protocol.supervision import lives


class Fronts:
    """The sinks of one pipeline."""

    def __init__(self, pipeline: str, home: str, host: str | None, program: PipelineDefinition | None) -> None:
        """``home`` is where the checkpoints are, ``host`` as for ``lives.may_empty``; ``program``: None if unknown."""
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

    def known(self, target: Target) -> ResettableSink:
        """Return the sink in front of ``target``.

        Raises:
            UsageError: nobody knows it; says what to do.
        """
        sink = self._sink(target)
        if sink is None:
            raise UsageError(self._nobody_knows(target))
        return sink

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
        root, _, name = self._home.rpartition("/")
        return f"headgate reset {name} --dir {root} --leave {target.sink}"

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
        sink = self._sink(target)
        return "" if sink is None else sink.how_to_forget(self._pipeline, target.sink)

    def refuse_others(self, target: Target, sink: ResettableSink, generation: Generation, mine: Mine) -> None:
        """Refuse to empty what has become somebody else's since it was looked at (SO4); ``generation`` is to do so.

        Raises:
            UsageError
            CorruptionError, StorageError
        """
        owner = sink.owner(self._pipeline, target.sink)
        is_begun = owner.life is None and owner.generation == generation  # fenced by an attempt that was cut short
        if not mine(owner) and not is_begun:
            holding = sink.holding(self._pipeline, target.sink, mine)
            if not owner.is_forgotten:
                raise UsageError(self.not_ours(target, owner, holding))
            if holding.what or holding.problem:
                kept = holding.problem or f"{holding.where} {KEPT}"
                raise UsageError(f"sink '{target.sink}' of pipeline '{self._pipeline}': {kept}")
