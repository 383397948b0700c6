"""Control connections between workers and a driver, and data channels between subtasks.

TCP semantics: in order and complete, or broken. What was in flight when a connection broke arrives late or never.
Notifications of completion and abort are best effort: they may be lost, doubled or overtake each other (C14).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from headgate.model.failure import Failure
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId
from headgate.model.manifest import Committable, Manifest, StateHandle
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.loops.rounds import Probe
from headgate.protocol.supervision.supervisor import AttemptId
from headgate.sim.faults import Fault
from headgate.sim.history import FeedbackChannel

if TYPE_CHECKING:
    from headgate.sim.driver import Driver
    from headgate.sim.env import Env
    from headgate.sim.worker import Worker

Element: TypeAlias = tuple[str, Any]
"""Kind and value: ``records`` a tuple, ``barrier`` and ``cancel`` an id, ``watermark`` ms, ``idle`` a bool, ``probe``
one of ``protocol.loops.rounds``, ``end`` nothing."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Worker → driver."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker → driver: restored."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Acked:
    """Worker → driver."""

    generation: Generation
    subtask: SubtaskId
    checkpoint: CheckpointId
    handle: StateHandle
    committables: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class Declined:
    """Worker → driver."""

    generation: Generation
    subtask: SubtaskId
    checkpoint: CheckpointId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class FinishedInput:
    """Worker → driver."""

    generation: Generation
    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker → driver: it cannot go on."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Deployment:
    """Driver → worker. ``fabric`` stands for the addresses of the peers."""

    generation: Generation
    restored: Manifest | None
    fabric: Fabric


@dataclass(frozen=True, slots=True)
class Trigger:
    """Driver → worker."""

    generation: Generation
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Complete:
    """Driver → worker, best effort."""

    generation: Generation
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Abort:
    """Driver → worker, best effort."""

    generation: Generation
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Drain:
    """Driver → worker: read nothing more (E7)."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Stop:
    """Driver → worker."""

    is_done: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Driver → worker."""


@dataclass(frozen=True, slots=True)
class EntranceEnded:
    """Worker → driver: nothing will enter the nest of loops any more at this subtask."""

    generation: Generation
    subtask: SubtaskId
    started_round: int
    highest_round: int


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """Worker → driver."""

    generation: Generation
    subtask: SubtaskId
    number: int
    count: int
    highest_round: int


@dataclass(frozen=True, slots=True)
class ProbeOrdered:
    """Driver → worker: the outermost head of ``nest`` sends ``probe``."""

    generation: Generation
    nest: NodeName
    probe: Probe


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """Driver → worker: nothing circulates in ``nest`` and nothing will."""

    generation: Generation
    nest: NodeName


ToDriver: TypeAlias = Registered | Ready | Acked | Declined | FinishedInput | EntranceEnded | ProbeReturned | Failed
ToWorker: TypeAlias = Deployment | Trigger | Complete | Abort | Drain | ProbeOrdered | LoopEnded | Stop | Refused

OfGeneration: TypeAlias = Acked | Declined | FinishedInput | EntranceEnded | ProbeReturned
"""What a worker tells the generation it runs."""

REPEATABLE = (Acked, Declined, FinishedInput, EntranceEnded, ProbeReturned, Trigger, Complete, Abort)
"""Messages that a reconnecting peer might send again."""


class Link:
    """The control connection of one worker."""

    def __init__(self, env: Env, driver: Driver, worker: Worker, attempt: AttemptId) -> None:
        self._env = env
        self.driver = driver
        self.worker = worker
        self.attempt = attempt
        self.is_cut = False
        self.is_closed_at_driver = False
        self._loses_in_flight = False
        self._free_ms = {True: 0, False: 0}

    def to_driver(self, message: ToDriver) -> None:
        """Send ``message`` in order."""
        self._send(message, True)

    def to_worker(self, message: ToWorker) -> None:
        """Send ``message``; notifications may get lost or overtake others."""
        faults = self._env.faults
        if isinstance(message, Complete | Abort):
            if faults.strikes(Fault.NOTIFY_LOST):
                return
            if faults.strikes(Fault.NOTIFY_REORDERED):
                self._env.world.at(self._env.rng.randint(0, 80), self._deliver, message, False)
                return
        self._send(message, False)

    def _send(self, message: ToDriver | ToWorker, is_up: bool) -> None:
        if self.is_cut:
            return
        world, faults = self._env.world, self._env.faults
        at = max(self._free_ms[is_up] + 1, world.now_ms + self._env.message_delay_ms())
        self._free_ms[is_up] = at
        world.at(at - world.now_ms, self._deliver, message, is_up)
        if isinstance(message, REPEATABLE) and faults.strikes(Fault.DUPLICATED):
            world.at(at - world.now_ms + self._env.rng.randint(1, 150), self._deliver, message, is_up)
        if faults.strikes(Fault.LINK_LOSS):
            self.cut("connection lost")

    def _deliver(self, message: Any, is_up: bool) -> None:
        if self.is_cut and self._loses_in_flight:
            return
        if is_up:
            self.driver.post(0, self.driver.on_message, self, message)
        else:
            self.worker.post(0, self.worker.on_message, message)

    def cut(self, why: str, worker_delay_max_ms: int = 20) -> None:
        """Break the connection; both ends learn of it, each in its own time."""
        if self.is_cut:
            return
        self.is_cut = True
        self._loses_in_flight = self._env.rng.random() < 0.5
        world = self._env.world
        up = max(self._free_ms[True] + 1 - world.now_ms, 0) + self._env.rng.randint(0, 20)
        self.driver.post(up, self.driver.on_link_closed, self, why)
        self.worker.post(self._env.rng.randint(0, worker_delay_max_ms), self.worker.on_link_closed)


@dataclass(slots=True)
class Channel:
    """FIFO from one subtask to another; the receiver reads elements once they have arrived."""

    queue: deque[tuple[int, Element]] = field(default_factory=deque)
    last_ms: int = 0
    receiver: Worker | None = None
    name: FeedbackChannel = (0, 0, 0)
    is_feedback: bool = False
    sent_count: int = 0
    taken_count: int = 0

    def push(self, element: Element, now_ms: int, delay_ms: int) -> None:
        """Send ``element``."""
        self.last_ms = max(self.last_ms, now_ms + delay_ms)
        self.queue.append((self.last_ms, element))
        self.sent_count += 1
        if self.receiver is not None:
            self.receiver.wake(self.last_ms)

    def take(self) -> Element:
        """Remove the element at the head."""
        self.taken_count += 1
        return self.queue.popleft()[1]


class Fabric:
    """All data channels of one deployment."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, int, int], Channel] = {}

    def channel(self, edge: int, sender: int, receiver: int) -> Channel:
        """Return the channel of ``edge`` from subtask ``sender`` to subtask ``receiver``."""
        name = (edge, sender, receiver)
        return self.channels.setdefault(name, Channel(name=name))
