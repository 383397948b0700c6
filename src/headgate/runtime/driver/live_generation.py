"""One generation in the driver, from its claim to its end: its coordinator, its loops, and the start of its workers.

Counterpart: the subtasks in the workers. Begun and ended by ``runtime.driver.supervision``; everything happens in the
event thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate import fault_points
from headgate.codec import messages
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import CheckpointId, Generation, WorkerIndex
from headgate.protocol.checkpoints import coordinator
from headgate.protocol.checkpoints.coordinator import SavepointOrder
from headgate.runtime.checkpoints.restoring import restored_by
from headgate.runtime.driver.claims import NewGeneration
from headgate.runtime.driver.coordination import Coordination
from headgate.runtime.driver.fitting import read_before
from headgate.runtime.driver.looping import Looping
from headgate.runtime.driver.workers import WorkerRecord


class LiveGeneration:
    """Hosts the coordination and the loops of one generation."""

    def __init__(
        self,
        definition: PipelineDefinition,
        begun: NewGeneration,
        coordination: Coordination,
        looping: Looping,
        note: Callable[[str], None],
    ) -> None:
        """Make it; ``note`` shows the user a sentence."""
        self._definition = definition
        self._begun = begun
        self.coordination = coordination
        self._looping = looping
        self._note = note

    @property
    def number(self) -> Generation:
        """Of this generation."""
        return self._begun.generation

    @property
    def is_started(self) -> bool:
        """Whether every worker runs."""
        return self.coordination.is_started

    @property
    def is_draining(self) -> bool:
        """Whether its sources are, or will be, told to end."""
        return self.coordination.machine.is_draining

    def deploy(self, workers: Sequence[WorkerRecord]) -> None:
        """Send each of ``workers``, which are all, its part."""
        restored, config = self._begun.restored, self._definition.config
        ordered = sorted(workers, key=lambda record: record.worker)
        addresses = [record.address for record in ordered]
        for record in ordered:
            deployment = messages.Deploy(
                self.number,
                addresses,
                restored_by(restored, self._definition.plan, record.worker),
                config.runtime.credit_bytes,
                config.runtime.flush_ms,
                config.checkpoints.inline_bytes_max,
                restored is not None and (restored.is_draining or restored.is_final),  # HL8: what was added is not read
                self._begun.first_checkpoint,
                "" if restored is None or restored.place is None else restored.place.text,
                self._begun.life,
                {} if restored is None else read_before(restored, self._definition),
            )
            record.connection.send(deployment)

    def start(self, first_delay_ms: int) -> None:
        """Every worker runs: begin to take checkpoints."""
        self.coordination.start(first_delay_ms)

    def stop(self, savepoint: SavepointOrder | None = None) -> None:
        """Take a last checkpoint, then end."""
        self.coordination.handle(coordinator.StopRequested(savepoint))

    def drain(self, savepoint: SavepointOrder | None = None) -> None:
        """End the sources (E9)."""
        self.coordination.handle(coordinator.DrainRequested(savepoint))

    def replaced_by(self, newer: Generation) -> None:
        """Another driver has begun generation ``newer``."""
        if self.number < newer:
            self.coordination.handle(coordinator.GenerationReplaced(newer))

    def on_report(self, worker: WorkerIndex, message: messages.FromWorker) -> None:
        """Take what ``worker`` says about its subtasks. What is of another generation, the machines ignore."""
        match message:
            case messages.Acknowledge():
                fault_points.reach("before-ack")
                self.coordination.handle(message.event)
            case messages.Decline():
                if message.text:
                    self._note(f"{message.event.subtask} declined: {message.text}")
                self.coordination.handle(message.event)
            case messages.ReadsOn() | messages.Finished():
                self.coordination.handle(message.event)
            case messages.Ready():
                if message.is_listening:
                    self.coordination.handle(coordinator.ListenerFound(Generation(message.generation), worker))
            case messages.Told():
                told = coordinator.CompletionTold(
                    Generation(message.generation), worker, CheckpointId(message.checkpoint)
                )
                self.coordination.handle(told)
            case messages.EntranceEnded() | messages.ProbeReturned():
                self._looping.on_message(message)
            case _:
                return

    def close(self) -> None:
        """The generation is over."""
        self.coordination.close()
        self._looping.close()
