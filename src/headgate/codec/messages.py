"""Control messages between workers and the coordinator, and their bytes (msgpack).

Counterpart: ``runtime.wire.control`` carries them in length-prefixed, checksummed records (docs/spec/connections.md).
Types and checks say what numbers and texts a peer may send.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from headgate.codec.json_files import MALFORMED
from headgate.errors import ProtocolViolation
from headgate.model.config import ORDINARY, CheckpointOptions
from headgate.model.failure import Failure
from headgate.model.ids import Generation, SubtaskId, WorkerIndex
from headgate.model.manifest import SnapshotPart
from headgate.model.progress import LoopProgress, Sample, SourceProgress
from headgate.plain_text import encodable_values
from headgate.protocol import loop_prober
from headgate.protocol.checkpoints import coordinator_events as checkpoints

NAME_CHARS_MAX = 1_024
TEXT_CHARS_MAX = 65_536
LIST_MAX = 1 << 20
ID_MAX = (1 << 63) - 1
ROUND_MAX = (1 << 30) - 2

Id: TypeAlias = Annotated[int, Meta(ge=0, le=ID_MAX)]
Name: TypeAlias = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]


def check_ids(*numbers: int) -> None:
    """Raise ValueError unless each of ``numbers`` could be an ``Id``."""
    for number in numbers:
        if not 0 <= number <= ID_MAX:
            raise ValueError(f"{number} is not from 0 to {ID_MAX}")


def check_rounds(*rounds: int) -> None:
    """Raise ValueError unless each of ``rounds`` is a round of a loop, or -1: none."""
    for round_ in rounds:
        if not -1 <= round_ <= ROUND_MAX:
            raise ValueError(f"round {round_} is not from -1 to {ROUND_MAX}")


def check_subtask(subtask: SubtaskId) -> None:
    """Raise ValueError when the name is too long or the index is none."""
    check_ids(subtask.index)
    if len(subtask.vertex) > NAME_CHARS_MAX:
        raise ValueError(f"a name of {len(subtask.vertex)} characters; there are at most {NAME_CHARS_MAX}")


MESSAGE_BYTES_MAX = 64 << 20
"""Largest control message: a deployment with the inline snapshots of a few thousand subtasks."""


LocationList: TypeAlias = Annotated[list[tuple[Text, Text]], Meta(max_length=LIST_MAX)]
"""Names and real names of ``model.lineage.Location``."""


class Restored(Struct, frozen=True, array_like=True):
    """What to restore of a snapshot: written by ``subtask`` of ``parallelism`` in the checkpoint's time."""

    subtask: SubtaskId
    parallelism: Id
    parts: tuple[SnapshotPart, ...]
    is_exact: bool = True


class Address(Struct, frozen=True, array_like=True):
    """Where a worker listens for data connections."""

    host: Name
    port: Port


class AlignmentMetrics(Struct, frozen=True):
    """How long one snapshot of one subtask took: waiting for barriers, freezing."""

    vertex: Name
    checkpoint: Id
    align_us: Id
    freeze_us: Id


class Register(Struct, frozen=True, tag="register"):
    """First message of a worker: who it is, and where it listens for data connections."""

    worker: Id
    parallelism: Id
    submission: Id
    task_attempt: Id
    address: Address
    pid: Id
    plan_fingerprint: Name


class Obituary(Struct, frozen=True, tag="obituary"):
    """How another process of this worker's machine ended that had been a worker, as far as this one knows.

    ``how`` is a clause; ``written`` is the end of what it wrote to its output.
    """

    pid: Id
    how: Name
    written: Text = ""


class Ready(Struct, frozen=True, tag="ready", omit_defaults=True):
    """Restored and connected: may be triggered.

    ``is_listening``: the worker has listeners for checkpoints, so ``CompletionReport`` follows each ``Complete``.
    """

    generation: Id
    is_listening: bool = False


class CompletionReport(Struct, frozen=True, tag="completion-report"):
    """The listeners of the worker were called for the completed ``checkpoint``, and returned."""

    generation: Id
    checkpoint: Id


class Acknowledge(Struct, frozen=True, tag="acknowledge"):
    """The snapshot of one subtask is durable (or inline), and its transactions are prepared."""

    event: checkpoints.Acknowledged

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_ids(self.event.generation, self.event.checkpoint)
        check_subtask(self.event.entry.subtask)


class Decline(Struct, frozen=True, tag="decline"):
    """One subtask will not take part; ``text`` is for people."""

    event: checkpoints.Declined
    text: Text = ""

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_ids(self.event.generation, self.event.checkpoint)
        check_subtask(self.event.subtask)


class ReadsOn(Struct, frozen=True, tag="reads-on"):
    """A source that sets its own barrier comes forward; sent while a marker is far away."""

    event: checkpoints.SourceReadsOn

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_ids(self.event.generation, *self.event.uncut)
        check_subtask(self.event.subtask)


class SourcePosition(Struct, frozen=True, tag="source-position"):
    """How far a source subtask has come in event time; None: it has nothing to read."""

    generation: Id
    subtask: SubtaskId
    lowest_ms: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_subtask(self.subtask)


class SourceShare(Struct, frozen=True, tag="source-share"):
    """What a source subtask reads: how many splits that have not ended, and how many parts it has read to their end."""

    generation: Id
    subtask: SubtaskId
    splits: Id
    ended_parts: Id

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_subtask(self.subtask)


class Finished(Struct, frozen=True, tag="finished"):
    """One subtask has processed the end of all its input."""

    event: checkpoints.FinishReported

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_ids(self.event.generation)
        check_subtask(self.event.subtask)


class EntranceEnded(Struct, frozen=True, tag="entrance-ended"):
    """Nothing will enter a nest of loops at this subtask any more."""

    generation: Id
    event: loop_prober.EntranceEnded

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_subtask(self.event.subtask)
        check_rounds(self.event.started_round, self.event.highest_round)


class ProbeReturned(Struct, frozen=True, tag="probe-returned"):
    """A probe has come back to a loop head, or has ended at a leaf."""

    generation: Id
    event: loop_prober.ProbeReturned

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_subtask(self.event.subtask)
        check_ids(self.event.number, self.event.count)
        check_rounds(self.event.highest_round)


class Failed(Struct, frozen=True, tag="failed", omit_defaults=True):
    """The worker cannot go on. Make it with ``failed`` so that long texts are cut.

    ``peer``: because this worker left; it may say itself why (G15).
    """

    generation: Id
    failure: Failure
    peer: Id | None = None


class MetricsReport(Struct, frozen=True, tag="metrics"):
    """What a worker measured, or one of its subtasks: ``is_part``; then the rest is as it was reported last."""

    generation: Id
    samples: Annotated[list[Sample], Meta(max_length=LIST_MAX)] = field(default_factory=list)
    alignments: Annotated[list[AlignmentMetrics], Meta(max_length=LIST_MAX)] = field(default_factory=list)
    loops: Annotated[list[LoopProgress], Meta(max_length=LIST_MAX)] = field(default_factory=list)
    """One for each loop head of this worker."""
    sources: Annotated[list[SourceProgress], Meta(max_length=LIST_MAX)] = field(default_factory=list)
    """One for each source of this worker, of its own splits."""
    is_part: bool = False


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """A sign of life of a worker."""


class Deploy(Struct, frozen=True, tag="deploy"):
    """Answer to the registrations of all workers: a generation begins.

    ``addresses`` by worker index; ``restored`` only what this worker needs;
    ``is_draining``: that checkpoint was taken while draining, so no source reads on (E9); ``first_checkpoint``: no
    checkpoint of this generation is below it;
    ``place``: where the files are (``places.Place`` as text); "": in the pipeline's directory;
    ``life``: which one of the pipeline it is; ``read_before``: of sources that read other places now, those that they
    read when that checkpoint was taken (EV17).
    """

    generation: Id
    addresses: Annotated[list[Address], Meta(max_length=LIST_MAX)]
    restored: Annotated[list[Restored], Meta(max_length=LIST_MAX)]
    credit_bytes: Id
    flush_ms: Id
    inline_bytes_max: Id
    is_draining: bool = False
    first_checkpoint: Id = 0
    place: Text = ""
    life: Text = ""
    read_before: Annotated[dict[Name, LocationList], Meta(max_length=LIST_MAX)] = field(default_factory=dict)


class Announce(Struct, frozen=True, tag="announce"):
    """Sources: ``checkpoint`` has begun. Those that set their own barrier may set it from now on."""

    generation: Id
    checkpoint: Id
    options: CheckpointOptions = ORDINARY


class TriggerCheckpoint(Struct, frozen=True, tag="trigger"):
    """Sources: emit the barrier of ``checkpoint``."""

    generation: Id
    checkpoint: Id
    options: CheckpointOptions = ORDINARY


class ReadTo(Struct, frozen=True, tag="read-to"):
    """Sources with event times: how far they may read."""

    generation: Id
    limit_ms: int


class SourceShares(Struct, frozen=True, tag="source-shares"):
    """What all subtasks of a source read together: their splits, and the part that may be read."""

    generation: Id
    vertex: Name
    splits: Id
    part: Id


class StartProbe(Struct, frozen=True, tag="start-probe"):
    """Heads of the outermost loop ``nest``: send this probe."""

    generation: Id
    nest: Name
    probe: loop_prober.Probe

    def __post_init__(self) -> None:
        """Refuse what is out of bounds."""
        check_ids(self.probe.number)
        check_rounds(self.probe.round_)


class EndLoop(Struct, frozen=True, tag="end-loop"):
    """Heads of ``nest`` and of the loops inside: nothing circulates, send the end of data."""

    generation: Id
    nest: Name


class Complete(Struct, frozen=True, tag="complete"):
    """``checkpoint`` is completed."""

    generation: Id
    checkpoint: Id


class Abort(Struct, frozen=True, tag="abort"):
    """``checkpoint`` will never be completed."""

    generation: Id
    checkpoint: Id


class Drain(Struct, frozen=True, tag="drain"):
    """Sources: read nothing more and end (E7)."""

    generation: Id


class Stop(Struct, frozen=True, tag="stop"):
    """Leave, with success when the pipeline has ended."""

    reason: Text
    is_success: bool = False


class Refused(Struct, frozen=True, tag="refused"):
    """The registration is not accepted: leave."""

    reason: Text


class HeartbeatReply(Struct, frozen=True, tag="heartbeat-reply"):
    """The coordinator lives."""


class DataHello(Struct, frozen=True, tag="data-hello"):
    """First message on a data connection: who connected, in which generation."""

    worker: Id
    generation: Id


class DataWelcome(Struct, frozen=True, tag="data-welcome"):
    """Frames may flow."""


class DataRefused(Struct, frozen=True, tag="data-refused"):
    """The connection belongs to another generation than ``generation``, or to no worker of it."""

    generation: Id
    reason: Text


FromWorker: TypeAlias = (
    Register
    | Obituary
    | Ready
    | CompletionReport
    | Acknowledge
    | Decline
    | ReadsOn
    | SourcePosition
    | SourceShare
    | Finished
    | EntranceEnded
    | ProbeReturned
    | Failed
    | MetricsReport
    | Heartbeat
)
ToWorker: TypeAlias = (
    Deploy
    | Announce
    | TriggerCheckpoint
    | Complete
    | Abort
    | Drain
    | ReadTo
    | SourceShares
    | StartProbe
    | EndLoop
    | Stop
    | Refused
    | HeartbeatReply
)
DataGreeting: TypeAlias = DataHello | DataWelcome | DataRefused
Message: TypeAlias = FromWorker | ToWorker | DataGreeting

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_greeting: msgspec.msgpack.Decoder[DataGreeting] = msgspec.msgpack.Decoder(DataGreeting)

_M = TypeVar("_M")


def encode_message(message: Message) -> bytes:
    """Return the bytes of ``message``.

    Raises:
        ProtocolViolation: larger than ``MESSAGE_BYTES_MAX``, or a number beyond 64 bits.
    """
    try:
        raw = _encoded(message)
    except (OverflowError, msgspec.MsgspecError) as error:
        raise ProtocolViolation("messages", f"cannot encode {type(message).__name__}: {error}") from error
    if len(raw) > MESSAGE_BYTES_MAX:
        name = type(message).__name__
        raise ProtocolViolation(
            "messages", f"{name} takes {len(raw)} bytes; a control message holds at most {MESSAGE_BYTES_MAX}"
        )
    return raw


def _encoded(message: Message) -> bytes:
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # a text of a user's: the message must arrive all the same
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        return _encoder.encode(encodable_values(plain))


def decode_from_worker(raw: bytes | bytearray | memoryview) -> FromWorker:
    """Return the message that a worker sent.

    Raises:
        ProtocolViolation: malformed, unknown, or out of bounds.
    """
    return _decode(_from_worker, raw)


def decode_to_worker(raw: bytes | bytearray | memoryview) -> ToWorker:
    """Return the message that the coordinator sent.

    Raises:
        ProtocolViolation: malformed, unknown, or out of bounds.
    """
    return _decode(_to_worker, raw)


def decode_greeting(raw: bytes | bytearray | memoryview) -> DataGreeting:
    """Return a greeting of a data connection.

    Raises:
        ProtocolViolation: malformed, unknown, or out of bounds.
    """
    return _decode(_greeting, raw)


def _decode(decoder: msgspec.msgpack.Decoder[_M], raw: bytes | bytearray | memoryview) -> _M:
    try:
        return decoder.decode(raw)  # structs only
    except MALFORMED as error:
        raise ProtocolViolation("messages", f"a malformed message of {len(raw)} bytes: {error}") from error


def failed(generation: Generation, failure: Failure, peer: WorkerIndex | None = None) -> Failed:
    """Return a ``Failed`` with texts cut to their bounds (of a traceback the end stays)."""
    reason, detail = failure.reason[:TEXT_CHARS_MAX], failure.detail[-TEXT_CHARS_MAX:]
    return Failed(generation, replace(failure, reason=reason, detail=detail), peer)
