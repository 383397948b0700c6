"""The driver's side of loops in one generation: hosts a ``LoopProber`` per nest and carries out what it decides.

Counterparts: the ``LoopPart`` machines in the workers. All methods are called in the driver's event thread; the
user's callbacks run in a thread of their own, because they may take their time, one after another in all generations.
Rules L27–L37: docs/spec/loops.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from headgate.codec import messages
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import Generation, NodeName, SubtaskId, VertexId
from headgate.model.plan import LoopNest, Plan
from headgate.operators.checkpointed.functions import CheckpointListener
from headgate.operators.loop_head import LoopHeadSpec
from headgate.protocol.loops import rounds
from headgate.protocol.machine import Ignored
from headgate.runtime.driver.coordination import Recipients
from headgate.runtime.driver.event_loop import Timers
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.threads import Queue, Thread, ThreadEnded

CLOSE_S = 0.5
"""After a success the callbacks have returned; after a failure one may still be busy."""


class RoundCallbacks:
    """Calls ``on_round`` of all loops in all generations of a run, one call after another.

    The thread is a daemon: a callback that never returns must not keep the process of a pipeline that has failed.
    """

    def __init__(self, note: Callable[[str], None], around: Surroundings = PROCESS) -> None:
        """``note`` shows the user a sentence; called from the callbacks' thread."""
        self._note = note
        self._around = around
        self._calls: Queue[Callable[[], None] | None] = around.queue()
        self._thread: Thread | None = None

    def submit(self, loop: NodeName, callback: Callable[[int], object], round_: int) -> None:
        """Call ``callback`` when those before it have returned; what it raises becomes a note."""
        self._put(lambda: self._call(loop, callback, round_))

    def tell(
        self,
        name: str,
        listener: CheckpointListener,
        tell: Callable[[CheckpointListener], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        """Tell ``listener`` how a checkpoint ended, behind the callbacks before it (HL19)."""

        def call() -> None:
            try:
                tell(listener)
            except ThreadEnded:
                raise
            except BaseException as error:
                failed(name, error)

        self._put(call)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` when all callbacks so far have returned: in their thread, or at once if there were none."""
        if self._thread is None:
            call()
        else:
            self._put(call)

    def close(self) -> None:
        """End the thread behind the callbacks that wait; waits for it, but not long: they are the user's."""
        self._calls.put(None)
        if self._thread is not None and not self._thread.is_current:
            self._thread.join(CLOSE_S)

    def _put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        if self._thread is None:
            self._thread = self._around.thread(self._loop, "headgate-rounds")
            self._thread.start()

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, loop: NodeName, callback: Callable[[int], object], round_: int) -> None:
        try:
            callback(round_)
        except ThreadEnded:
            raise
        except BaseException as error:  # whatever it is, the run's end waits for this thread
            self._note(f"on_round of loop '{loop}' failed in round {round_}: {type(error).__name__}: {error}")


class Looping:
    """All nests of one generation."""

    def __init__(
        self,
        definition: PipelineDefinition,
        generation: Generation,
        timers: Timers,
        workers: Recipients,
        callbacks: RoundCallbacks,
    ) -> None:
        plan = definition.plan
        self._generation = generation
        self._timers = timers
        self._workers = workers
        self._is_closed = False
        self._nest_of = {vertex.id: vertex.nest for vertex in plan.vertices}
        self._specs = {nest.name: cast(LoopHeadSpec, definition.graph.node(nest.name).spec) for nest in plan.nests()}
        self._probers = {nest.name: _prober(plan, nest, self._specs[nest.name]) for nest in plan.nests()}
        self._callbacks = callbacks

    def on_message(self, message: messages.EntranceEnded | messages.ProbeReturned) -> None:
        """Take a report of a worker of this generation."""
        nest = self._nest_of.get(message.event.subtask.vertex)
        if self._is_closed or nest is None or message.generation != self._generation:
            return
        for effect in self._probers[nest].handle(message.event):
            self._run(nest, effect)

    @property
    def is_listening(self) -> bool:
        """Whether somebody who hears of rounds hears of checkpoints, too."""
        return any(isinstance(spec.on_round, CheckpointListener) for spec in self._specs.values())

    def tell(
        self,
        tell: Callable[[CheckpointListener], None],
        failed: Callable[[str, BaseException], None],
        told: Callable[[], None],
    ) -> None:
        """Tell them how a checkpoint ended, behind the rounds so far; then call ``told``, unless one failed (HL19)."""
        problems: list[BaseException] = []

        def note(whose: str, error: BaseException) -> None:
            problems.append(error)
            failed(whose, error)

        for nest, spec in self._specs.items():
            if isinstance(spec.on_round, CheckpointListener):
                self._callbacks.tell(f"on_round of loop '{nest}'", spec.on_round, tell, note)
        self._callbacks.when_done(lambda: None if problems else told())

    def close(self) -> None:
        """The generation is over. Callbacks that wait still run: the next generation may not finish those rounds."""
        self._is_closed = True

    def _run(self, nest: NodeName, effect: rounds.ProberEffect) -> None:
        match effect:
            case rounds.StartProbe():
                self._start(nest, effect)
            case rounds.EndLoop():
                self._workers.broadcast(messages.EndLoop(self._generation, nest))
            case rounds.RoundFinished():
                callback = self._specs[nest].on_round
                if callback is not None:
                    self._callbacks.submit(nest, callback, effect.round_)
            case Ignored():
                return

    def _start(self, nest: NodeName, effect: rounds.StartProbe) -> None:
        message = messages.StartProbe(self._generation, nest, effect.probe)

        def send() -> None:
            if not self._is_closed:
                self._workers.broadcast(message)

        if effect.after_ms:
            self._timers.arm((self._generation, "probe", nest), effect.after_ms, send)
        else:
            send()


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
