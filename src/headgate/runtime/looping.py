"""The driver's side of loops in one generation: hosts a ``LoopProber`` per nest and carries out what it decides.

Counterparts: the ``LoopPart`` machines in the workers. All methods are called in the driver's event thread; the
user's callback runs in a thread of its own, because it may take its time. Rules L27–L37: docs/spec/loops.md.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, cast

from headgate.codec import messages
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import Generation, NodeName, SubtaskId, VertexId
from headgate.model.plan import LoopNest, Plan
from headgate.operators.loophead import LoopHeadSpec
from headgate.protocol import rounds
from headgate.protocol.machine import Ignored


class Surroundings(Protocol):
    """What loops need from the driver."""

    def broadcast(self, message: messages.ToWorker) -> None:
        """Send to every worker of the generation."""

    def arm(self, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        """Call ``fire`` in the event thread after ``after_ms``."""

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run in the event thread. From any thread."""

    def note(self, text: str) -> None:
        """A sentence for the user."""


class Looping:
    """All nests of one generation."""

    def __init__(self, definition: PipelineDefinition, generation: Generation, surroundings: Surroundings) -> None:
        plan = definition.plan
        self._generation = generation
        self._around = surroundings
        self._is_closed = False
        self._nest_of = {vertex.id: vertex.nest for vertex in plan.vertices}
        self._specs = {nest.name: cast(LoopHeadSpec, definition.graph.node(nest.name).spec) for nest in plan.nests()}
        self._probers = {nest.name: _prober(plan, nest, self._specs[nest.name]) for nest in plan.nests()}
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="headgate-rounds") if self._specs else None

    def on_message(self, message: messages.EntranceEnded | messages.ProbeReturned) -> None:
        """Take a report of a worker of this generation."""
        nest = self._nest_of.get(VertexId(message.vertex))
        if self._is_closed or nest is None or message.generation != self._generation:
            return
        subtask = SubtaskId(VertexId(message.vertex), message.index)
        event: rounds.ProberEvent
        if isinstance(message, messages.EntranceEnded):
            event = rounds.EntranceEnded(subtask, message.started_round, message.highest_round)
        else:
            event = rounds.ProbeReturned(subtask, message.number, message.count, message.highest_round)
        for effect in self._probers[nest].handle(event):
            self._run(nest, effect)

    def close(self) -> None:
        """The generation is over."""
        self._is_closed = True
        if self._callbacks is not None:
            self._callbacks.shutdown(wait=False)

    def _run(self, nest: NodeName, effect: rounds.ProberEffect) -> None:
        match effect:
            case rounds.StartProbe():
                self._start(nest, effect)
            case rounds.EndLoop():
                self._around.broadcast(messages.EndLoop(self._generation, str(nest)))
            case rounds.RoundFinished():
                callback = self._specs[nest].on_round
                if callback is not None and self._callbacks is not None:
                    self._callbacks.submit(self._call_back, nest, callback, effect.round_)
            case Ignored():
                return

    def _start(self, nest: NodeName, effect: rounds.StartProbe) -> None:
        probe = effect.probe
        message = messages.StartProbe(
            self._generation, str(nest), probe.number, probe.round_, probe.is_closing, probe.is_last_watermark
        )

        def send() -> None:
            if not self._is_closed:
                self._around.broadcast(message)

        if effect.after_ms:
            self._around.arm((self._generation, "probe", nest), effect.after_ms, send)
        else:
            send()

    def _call_back(self, nest: NodeName, callback: Callable[[int], object], round_: int) -> None:
        try:
            callback(round_)
        except Exception as error:
            text = f"on_round of loop '{nest}' failed in round {round_}: {type(error).__name__}: {error}"
            self._around.post(lambda: self._around.note(text))


def _prober(plan: Plan, nest: LoopNest, spec: LoopHeadSpec) -> rounds.LoopProber:
    def subtasks(vertices: tuple[VertexId, ...]) -> list[SubtaskId]:
        return [SubtaskId(vertex, index) for vertex in vertices for index in range(plan.parallelism)]

    return rounds.LoopProber(
        subtasks(nest.entrances),
        subtasks(nest.heads[:1]),
        subtasks(nest.heads[1:]),
        subtasks(nest.leaves),
        has_rounds=spec.round_column is not None,
    )
