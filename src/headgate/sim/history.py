"""What an outside observer of a pipeline can see; the checkers read nothing else (X4).

Storage, the sinks' store and the messages that leave a process report here. No event tells what a machine thinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId
from headgate.model.manifest import Manifest, StateHandle

Record: TypeAlias = tuple[str, int, int, int, int]
"""origin, number (rises within origin and key where order is promised), key, value, event time."""

FeedbackChannel: TypeAlias = tuple[int, int, int]
"""Edge, and the indices of the subtasks that send and receive."""


@dataclass(frozen=True, slots=True)
class TransactionId:
    """A transaction of the sinks' store; ``serial`` is unique in the store."""

    sink: str
    subtask_index: int
    generation: Generation
    serial: int

    def __str__(self) -> str:
        return f"{self.sink}[{self.subtask_index}].g{self.generation}#{self.serial}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transaction became durable and invisible."""

    transaction: TransactionId


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction became visible. ``by`` is the generation whose permit was used."""

    transaction: TransactionId
    checkpoint: CheckpointId
    by: Generation
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """A transaction went away."""

    transaction: TransactionId


@dataclass(frozen=True, slots=True)
class SinkFenced:
    """The store of ``sink`` refuses generations below ``generation`` from now on."""

    sink: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class Read:
    """A committed reader read everything visible, in order: transaction, its size, and the record."""

    sink: str
    rows: tuple[tuple[TransactionId, int, Record], ...]


@dataclass(frozen=True, slots=True)
class SnapshotWrote:
    """A subtask has made its snapshot durable."""

    generation: Generation
    subtask: SubtaskId
    checkpoint: CheckpointId
    handle: StateHandle


@dataclass(frozen=True, slots=True)
class ClaimAppended:
    """A generation was claimed, by the driver of this name."""

    sequence: int
    generation: Generation
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ManifestAppended:
    """A checkpoint was completed."""

    sequence: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Damage:
    """The simulator damaged ``checkpoint`` (its manifest or one of its files)."""

    checkpoint: CheckpointId
    what: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """A generation starts from ``checkpoint`` (None: fresh). ``available`` is what the storage then held sound."""

    generation: Generation
    checkpoint: CheckpointId | None
    contradicts: tuple[CheckpointId, ...]
    available: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class Triggered:
    """Sources were asked for a checkpoint."""

    generation: Generation
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """A subtask sent the barrier (True) or the cancel marker (False) of ``checkpoint`` on."""

    generation: Generation
    subtask: SubtaskId
    checkpoint: CheckpointId
    is_barrier: bool


@dataclass(frozen=True, slots=True)
class WatermarkSent:
    """A subtask advanced its event time."""

    generation: Generation
    subtask: SubtaskId
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The operators of a subtask were finished."""

    generation: Generation
    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class Resumed:
    """A subtask that was restored as finished got more input."""

    generation: Generation
    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class Deployed:
    """The workers of one attempt of one driver were deployed as ``generation``."""

    driver: str
    generation: Generation
    attempt: tuple[int, int]
    parallelism: int


@dataclass(frozen=True, slots=True)
class Level:
    """How much of something bounded is in use."""

    name: str
    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The user asked a driver to end the sources where they are."""


@dataclass(frozen=True, slots=True)
class ListGrows:
    """Later drivers may list splits that the first one does not."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The final checkpoint: how many records of each split had been read, and of those listed how many there are."""

    positions: tuple[tuple[str, int], ...]
    listed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is left when everything is over: open or prepared transactions, files nothing refers to."""

    transactions: tuple[str, ...]
    orphan_files: tuple[str, ...]
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FeedbackSent:
    """An element was sent on a feedback channel: the ``position``-th. ``sentinel``: it is the barrier of this id."""

    generation: Generation
    channel: FeedbackChannel
    position: int
    records: tuple[Record, ...] = ()
    sentinel: CheckpointId | None = None


@dataclass(frozen=True, slots=True)
class FeedbackRead:
    """A loop head took the ``position``-th element from a feedback channel."""

    generation: Generation
    subtask: SubtaskId
    channel: FeedbackChannel
    position: int
    is_records: bool


@dataclass(frozen=True, slots=True)
class LogSealed:
    """A loop head completed a log: edge, sender, position on that channel, and the records."""

    generation: Generation
    subtask: SubtaskId
    checkpoint: CheckpointId
    entries: tuple[tuple[int, int, int, tuple[Record, ...]], ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A loop head processed a part of a restored log."""

    generation: Generation
    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class InputRead:
    """A loop head read something from one of its channels."""

    generation: Generation
    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """The driver told the user that a round is over."""

    generation: Generation
    nest: NodeName
    round_: int


@dataclass(frozen=True, slots=True)
class LoopFoundEmpty:
    """The driver decided that nothing circulates in a nest of loops and nothing will."""

    generation: Generation
    nest: NodeName


HistoryEvent: TypeAlias = (
    Prepared
    | Committed
    | Aborted
    | SinkFenced
    | Read
    | SnapshotWrote
    | ClaimAppended
    | ManifestAppended
    | Damage
    | Chosen
    | Triggered
    | BarrierPassed
    | WatermarkSent
    | Finished
    | Resumed
    | Deployed
    | Level
    | DrainAsked
    | ListGrows
    | Ended
    | Inventory
    | FeedbackSent
    | FeedbackRead
    | LogSealed
    | Replayed
    | InputRead
    | RoundFinished
    | LoopFoundEmpty
)

Observer: TypeAlias = Callable[[HistoryEvent], None]
