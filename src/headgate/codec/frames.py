"""Data frames: the elements of a channel, and their bytes between two workers.

Counterpart: ``runtime.wire.exchange`` moves them; ``runtime.wire.channels`` queues the elements. Layout and rules
Source: docs/spec/channels.md. A frame is a fixed header, and for some kinds a payload: of a batch one Arrow IPC
encapsulated message, of a barrier and a probe a small message of their fields. Never does I/O, and never allocates by a
length it has not checked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import xxhash

from headgate.codec.decodable import decodable
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.model.config import ORDINARY, CheckpointOptions
from headgate.model.ids import CheckpointId
from headgate.protocol.loop_prober import Probe

MAGIC = b"HG"
FRAME_VERSION = 1
PAYLOAD_BYTES_MAX = 256 << 20
"""Largest payload of one frame: bounds what a single length field can make a receiver allocate."""
CONTROL_PAYLOAD_BYTES_MAX = 64 << 10
"""Largest payload of a control frame: a barrier or a probe."""

_FIELDS = struct.Struct("<2sBBIQQqQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size

Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer


@dataclass(frozen=True, slots=True)
class BatchElement:
    """Records. ``size_bytes`` is what they cost in credit: their size as an IPC message."""

    batch: pa.RecordBatch
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """Everything before it on this channel belongs to ``checkpoint`` or an earlier one."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class Cancel:
    """``checkpoint`` will not be taken by the sender: do not wait for its barrier."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Watermark:
    """No record with an event time ≤ ``watermark_ms`` will follow on this channel."""

    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Idle:
    """The sender's event time is idle, or active again."""

    is_idle: bool


@dataclass(frozen=True, slots=True)
class EndOfData:
    """Nothing follows on this channel except barriers and cancel markers of checkpoints."""


Element: TypeAlias = BatchElement | Barrier | Cancel | Watermark | Idle | EndOfData | Probe


class FrameKind(IntEnum):
    """What a frame carries; ``value`` in its header means what the member says."""

    OPEN = 1
    """First frame of a channel. ``value``: fingerprint of the schema."""
    BATCH = 2
    """Records. ``value``: number of rows."""
    BARRIER = 3
    """Payload: the fields of ``Barrier``. ``value``: 0."""
    CANCEL = 4
    """``value``: checkpoint id."""
    WATERMARK = 5
    """``value``: milliseconds."""
    IDLE = 6
    """``value``: 1 idle, 0 active."""
    END = 7
    """``value``: 0."""
    CREDIT = 8
    """From the receiver back to the sender. ``value``: bytes returned."""
    PROBE = 9
    """Within a nest of loops. Payload: the fields of ``Probe``. ``value``: 0."""


class FrameHeader(NamedTuple):
    """A checked header. The channel is (``edge``, the peer, this worker); for CREDIT the other way round."""

    kind: FrameKind
    edge: int
    generation: int
    sequence: int
    value: int
    payload_bytes: int
    checksum: int


def batch_element(batch: pa.RecordBatch) -> BatchElement:
    """Return ``batch`` as an element with its cost. A slice costs only what it shows."""
    return BatchElement(batch, int(pa.ipc.get_record_batch_size(batch)))


def schema_fingerprint(schema: pa.Schema) -> int:
    """Return 63 bits that differ when names, types or nullability of the columns differ."""
    text = "\n".join(f"{field.name}\0{field.type}\0{field.nullable}" for field in schema)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def encode_header(
    kind: FrameKind, edge: int, generation: int, sequence: int, value: int, payload: Sequence[Buffer] = ()
) -> bytes:
    """Return the header of a frame; its payload is the concatenation of ``payload``."""
    checksum, size_bytes = 0, 0
    if payload:
        digest = xxhash.xxh3_64()
        for part in payload:
            digest.update(part)
            size_bytes += len(part)
        checksum = digest.intdigest()
    fields = _FIELDS.pack(MAGIC, FRAME_VERSION, kind, edge, generation, sequence, value, size_bytes, checksum)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(
    raw: bytes | bytearray | memoryview, source: str = "frame", payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> FrameHeader:
    """Check and return the header in the first ``HEADER_BYTES`` of ``raw``. ``source`` names the peer in errors.

    Raises:
        ProtocolViolation: not a frame of this version, unknown kind, or a payload that may not be.
        CorruptionError: the header's check does not match.
    """
    view = memoryview(raw)
    if len(view) < HEADER_BYTES:
        raise CorruptionError(source, 0, f"a header of {HEADER_BYTES} bytes", f"{len(view)} bytes")
    fields = view[: _FIELDS.size]
    magic, version, kind, edge, generation, sequence, value, size, checksum = _FIELDS.unpack(fields)
    # in front of the check, which another version may compute in another way
    if magic != MAGIC or version != FRAME_VERSION:
        found = f"{magic!r} version {version}"
        raise ProtocolViolation("frame", f"{source} sent {found}, not {MAGIC!r} version {FRAME_VERSION}")
    (check,) = _CHECK.unpack(view[_FIELDS.size : HEADER_BYTES])
    if check != (found_check := xxhash.xxh3_64_intdigest(fields)):
        raise CorruptionError(source, 0, f"header check {check:016x}", f"{found_check:016x}")
    if kind not in _KINDS:
        raise ProtocolViolation("frame", f"{source} sent a frame of unknown kind {kind}")
    of_control = CONTROL_PAYLOAD_BYTES_MAX if kind in _ELEMENTS else 0
    limit = payload_bytes_max if kind == FrameKind.BATCH else of_control
    if size > limit or (size == 0 and limit > 0):
        raise ProtocolViolation("frame", f"{source} announced {size} payload bytes for kind {kind}; at most {limit}")
    return FrameHeader(_KINDS[kind], edge, generation, sequence, value, size, checksum)


_KINDS = {int(kind): kind for kind in FrameKind}
_ELEMENTS: dict[FrameKind, type[Barrier] | type[Probe]] = {FrameKind.BARRIER: Barrier, FrameKind.PROBE: Probe}


def check_payload(header: FrameHeader, payload: Buffer, source: str = "frame") -> None:
    """Compare ``payload`` with its checksum.

    Raises:
        CorruptionError: it is not what the sender sent.
    """
    found = xxhash.xxh3_64_intdigest(payload)
    if len(payload) != header.payload_bytes or found != header.checksum:
        expected = f"{header.payload_bytes} bytes with checksum {header.checksum:016x}"
        raise CorruptionError(source, HEADER_BYTES, expected, f"{len(payload)} bytes with {found:016x}")


def control_frame(element: Element) -> tuple[FrameKind, int, list[Buffer]]:
    """Return kind, value and payload of the frame of an element that is not a batch."""
    match element:
        case Barrier():
            return FrameKind.BARRIER, 0, [msgspec.msgpack.encode(element)]
        case Cancel(checkpoint):
            return FrameKind.CANCEL, checkpoint, []
        case Watermark(watermark_ms):
            return FrameKind.WATERMARK, watermark_ms, []
        case Idle(is_idle):
            return FrameKind.IDLE, int(is_idle), []
        case EndOfData():
            return FrameKind.END, 0, []
        case Probe():
            return FrameKind.PROBE, 0, [msgspec.msgpack.encode(element)]
        case BatchElement():
            raise AssertionError("a batch is no control element: use BatchEncoder")


def control_element(header: FrameHeader, payload: Buffer | None = None, source: str = "frame") -> Element:
    """Return the element of a control frame (not OPEN, not BATCH, not CREDIT). The payload's checksum first.

    Raises:
        CorruptionError: the checksum does not match.
        ProtocolViolation: the value, or a field, is not one that its kind can have.
    """
    value = header.value
    match header.kind:
        case FrameKind.BARRIER | FrameKind.PROBE if value == 0 and payload is not None:
            return _element(header, payload, source)
        case FrameKind.CANCEL if value >= 1:
            return Cancel(CheckpointId(value))
        case FrameKind.WATERMARK:
            return Watermark(value)
        case FrameKind.IDLE if value in (0, 1):
            return Idle(value == 1)
        case FrameKind.END if value == 0:
            return EndOfData()
    raise ProtocolViolation("frame", f"{source} sent {header.kind.name} with the impossible value {value}")


def _element(header: FrameHeader, payload: Buffer, source: str) -> Barrier | Probe:
    check_payload(header, payload, source)
    try:
        element = msgspec.msgpack.decode(payload, type=decodable(_ELEMENTS[header.kind]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolViolation("frame", f"{source} sent an unreadable {header.kind.name}: {error}") from error
    number, round_ = (element.checkpoint, -1) if isinstance(element, Barrier) else (element.number, element.round_)
    if number < 1 or round_ < -1:
        raise ProtocolViolation("frame", f"{source} sent the impossible {element}")
    return element


class BatchEncoder:
    """Encodes batches of one schema without copying them. One thread at a time."""

    def __init__(self, schema: pa.Schema) -> None:
        self._parts: list[Buffer] = []
        self._writer = pa.ipc.new_stream(pa.PythonFile(_Collector(self._parts), mode="w"), schema)
        self._schema = schema
        # Arrow writes the schema with the first batch: let that be one that is never sent.
        self._writer.write_batch(pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema))

    def encode(self, batch: pa.RecordBatch) -> list[Buffer]:
        """Return the parts of the IPC message of ``batch``; they refer to the memory of its columns.

        Raises:
            ProtocolViolation: another schema than the edge's, or larger than a frame can be.
        """
        # also what a call that raised has left
        self._parts.clear()
        try:
            self._writer.write_batch(batch)
        except pa.ArrowInvalid as error:
            raise ProtocolViolation(
                "BatchEncoder",
                f"a batch with columns {batch.schema.names} was sent on an edge with "
                f"columns {self._schema.names}: {error}",
            ) from error
        size_bytes = sum(map(len, self._parts))
        if size_bytes > PAYLOAD_BYTES_MAX:
            raise ProtocolViolation(
                "BatchEncoder",
                f"a batch of {batch.num_rows} rows takes {size_bytes} bytes; a frame holds at most "
                f"{PAYLOAD_BYTES_MAX}: let the operator emit smaller batches",
            )
        # a copy: the list itself is what Arrow writes into, and is emptied with the next batch
        return self._parts.copy()


class _Collector:
    """What Arrow believes to be a file: it keeps references to what is written."""

    closed = False

    def __init__(self, parts: list[Buffer]) -> None:
        self._parts = parts

    def write(self, data: Buffer) -> int:
        self._parts.append(data)
        return len(data)

    def flush(self) -> None:
        """Arrow calls it; nothing is held back."""

    def close(self) -> None:
        """Arrow calls it; there is nothing to close."""


def decode_batch(header: FrameHeader, payload: pa.Buffer, schema: pa.Schema, source: str = "frame") -> BatchElement:
    """Return the batch in ``payload`` without copying: it keeps ``payload`` alive. Checksum first.

    Raises:
        CorruptionError: the checksum does not match.
        ProtocolViolation: it does, yet this is not a batch of ``schema``.
    """
    check_payload(header, payload, source)
    try:
        batch = pa.ipc.read_record_batch(payload, schema)
        batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise ProtocolViolation("frame", f"{source} sent an unreadable batch: {error}") from error
    if batch.num_rows != header.value:
        raise ProtocolViolation("frame", f"{source} sent {batch.num_rows} rows where its header says {header.value}")
    return BatchElement(batch, header.payload_bytes)
