"""The driver's side of loops in one generation, as ``runtime.driver.looping`` does it: a ``LoopProber`` per nest.

Counterpart: the ``LoopPart`` machines in the workers. Answers may come twice; questions do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.model.ids import NodeName, SubtaskId, VertexId
from headgate.model.plan import LoopNest, Plan
from headgate.protocol.loops import rounds
from headgate.protocol.machine import Ignored
from headgate.sim import history, network
from headgate.sim.faults import Fault
from headgate.sim.kinds import spec_of
from headgate.sim.marks import Mark

if TYPE_CHECKING:
    from headgate.sim.generation import GenerationHost


class LoopTraffic:
    """All nests of one generation."""

    def __init__(self, host: GenerationHost, plan: Plan) -> None:
        self._host = host
        self._nest_of = {vertex.id: vertex.nest for vertex in plan.vertices}
        self._probers = {nest.name: _prober(plan, nest) for nest in plan.nests()}

    @property
    def is_draining(self) -> bool:
        """Whether a nest gets nothing any more from outside and has not ended."""
        busy = (rounds.Phase.PROBING, rounds.Phase.FLUSHING)
        return any(prober.phase in busy for prober in self._probers.values())

    @property
    def has_ended_one(self) -> bool:
        """Whether a nest was found empty."""
        return any(prober.phase is rounds.Phase.ENDED for prober in self._probers.values())

    def on_message(self, message: network.EntranceEnded | network.ProbeReturned) -> None:
        """Take a report of a worker."""
        if message.generation != self._host.generation or self._host.is_over:
            return
        nest = self._nest_of[message.subtask.vertex]
        assert nest is not None
        event: rounds.ProberEvent
        if isinstance(message, network.EntranceEnded):
            event = rounds.EntranceEnded(message.subtask, message.started_round, message.highest_round)
        else:
            event = rounds.ProbeReturned(message.subtask, message.number, message.count, message.highest_round)
        was_flushing = self._probers[nest].phase is rounds.Phase.FLUSHING
        effects = self._probers[nest].handle(event)
        if was_flushing and self._probers[nest].phase is rounds.Phase.PROBING:
            self._host.env.marks.reach(Mark.AGAIN_AFTER_WATERMARK)
        self._host.driver.tell(f"prober {nest} {event} → {effects}")
        for effect in effects:
            self._host.env.faults.crash_point(self._host.driver, Fault.DRIVER_CRASH)
            self._run(nest, effect)

    def _run(self, nest: NodeName, effect: rounds.ProberEffect) -> None:
        host = self._host
        match effect:
            case rounds.StartProbe():
                message = network.ProbeOrdered(host.generation, nest, effect.probe)
                host.driver.post(effect.after_ms, host.send_all, message)
            case rounds.RoundFinished():
                host.env.note(history.RoundFinished(host.generation, nest, effect.round_))
            case rounds.EndLoop():
                host.env.note(history.LoopFoundEmpty(host.generation, nest))
                host.send_all(network.LoopEnded(host.generation, nest))
            case Ignored():
                pass


def _prober(plan: Plan, nest: LoopNest) -> rounds.LoopProber:
    def subtasks(vertices: tuple[VertexId, ...]) -> list[SubtaskId]:
        return [SubtaskId(vertex, index) for vertex in vertices for index in range(plan.parallelism)]

    has_rounds = spec_of(plan.vertex(VertexId(str(nest.name))).head).has_rounds
    return rounds.LoopProber(
        subtasks(nest.entrances),
        subtasks(nest.heads[:1]),
        subtasks(nest.heads[1:]),
        subtasks(nest.leaves),
        has_rounds=has_rounds,
    )
