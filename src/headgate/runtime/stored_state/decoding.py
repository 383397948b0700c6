"""Rows of a piece as Arrow batches: state, logs of loops, positions, prepared output, and whatever is only bytes.

Nothing is unpickled (RS10): what is no Arrow stream and no JSON stays bytes. Counterparts: ``pieces`` says where a
piece is, ``reading`` chooses columns and rows. Every byte was verified before it comes here (RS8).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.loop_log import LogHeader, decode_log
from headgate.codec.snapshot import POSITIONS_PREFIX, ROUNDS_PREFIX, decode_positions, decode_sections
from headgate.connectors.readable import committable_text, position_text
from headgate.errors import CorruptionError
from headgate.model.state_identity import StateIdentity
from headgate.plain_text import encodable
from headgate.protocol.loops.part import RoundProgress
from headgate.runtime.stored_state.pieces import COMMITTABLES, LOG_SECTIONS, Piece
from headgate.runtime.stored_state.shapes import SUBTASK, Kind, Shape, shape_of

_ARROW_START = b"\xff\xff\xff\xff"
FROM_SUBTASK = "_from_subtask"
"""Column of records in flight: the subtask that had sent them."""

_POSITIONS = pa.schema([("split", pa.large_string()), ("position", pa.large_binary()), ("text", pa.large_string())])
_ROUNDS = pa.schema([(name, pa.int64()) for name in ("closed", "started", "highest")])
_FACTS = pa.schema([("name", pa.large_string()), ("value", pa.large_string())])
_BYTES = pa.schema([("data", pa.large_binary())])
_COMMITTABLES = pa.schema(
    [
        ("checkpoint", pa.int64()),
        ("generation", pa.int64()),
        ("text", pa.large_string()),
        ("payload", pa.large_binary()),
    ]
)
_RECORDED_IN_FLIGHT = pa.field(FROM_SUBTASK, pa.int32())


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows of a piece, as they are stored."""

    shape: Shape
    batches: Iterator[pa.RecordBatch]


def decoded(piece: Piece, data: memoryview, identity: StateIdentity, where: str) -> Decoded:
    """Return the rows of ``piece``, which is in ``data``, the verified bytes of its part.

    Args:
        piece: what is wanted of the part.
        data: of the part.
        text: what the manifest says of its operator.
        where: the bytes came from, for messages.

    Raises:
        CorruptionError: bytes with the right checksum are not what they should be; also while iterating.
    """
    for name in piece.path:
        sections = decode_sections(data, where)
        if name not in sections:
            raise CorruptionError(where, 0, f"a section '{name}'", ", ".join(sections) or "nothing")
        data = sections[name]
    if piece.prefix == COMMITTABLES:
        return _plain(Kind.COMMITTABLES, _COMMITTABLES, [_output_row(piece, bytes(data))])
    if piece.prefix == POSITIONS_PREFIX:
        return _plain(Kind.POSITIONS, _POSITIONS, _position_rows(data, identity, where))
    if piece.prefix == ROUNDS_PREFIX:
        return _plain(Kind.ROUNDS, _ROUNDS, [asdict(_unpacked(data, RoundProgress, where))])
    if data[: len(_ARROW_START)] == _ARROW_START:
        return _arrow(piece, data, identity, where)
    return _log(data, where) or _facts(data) or _plain(Kind.BYTES, _BYTES, [{"data": bytes(data)}])


def _arrow(piece: Piece, data: memoryview, identity: StateIdentity, where: str) -> Decoded:
    try:
        schema, batches = read_stream(data)
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(where, 0, "an Arrow stream", str(error)) from error
    name = piece.path[-1] if piece.path else ""
    shape = shape_of(identity, piece.prefix, name, schema)
    if shape.kind is not Kind.IN_FLIGHT or FROM_SUBTASK in schema.names:
        return Decoded(shape, iter(batches))
    columns = (pa.repeat(pa.scalar(piece.sender, pa.int32()), batch.num_rows) for batch in batches)
    sent = [b.append_column(_RECORDED_IN_FLIGHT, column) for b, column in zip(batches, columns, strict=True)]
    schema = schema.append(_RECORDED_IN_FLIGHT)
    return Decoded(shape_of(identity, piece.prefix, name, schema), iter(sent))


def _log(data: memoryview, where: str) -> Decoded | None:
    """Return the records of a loop's log, None if it is none (L19). It says itself what its key is."""
    try:
        sections = decode_sections(data, where)
    except CorruptionError:  # the checksum of the part was right: it is something else
        return None
    if sections.keys() != LOG_SECTIONS:
        return None
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(sections["schema"]))
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(where, 0, "the columns of a loop's log", str(error)) from error
    keys = _unpacked(sections["header"], LogHeader, where).owner.keys
    log = decode_log(data, schema, where)
    batches = (chunk.batch(schema, where) for chunk in log.chunks)
    return Decoded(Shape(Kind.LOOP_LOG, schema, keys, tuple(schema.names)), batches)


def _facts(data: memoryview) -> Decoded | None:
    """Return the entries of a JSON object, None if it is none: event times, watermarks."""
    try:
        found = json.loads(bytes(data))
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    rows = [{"name": name, "value": json.dumps(value)} for name, value in found.items()]
    return _plain(Kind.FACTS, _FACTS, rows)


def _position_rows(data: memoryview, identity: StateIdentity, where: str) -> list[Mapping[str, Any]]:
    try:
        found = decode_positions(data)
    except msgspec.DecodeError as error:
        raise CorruptionError(where, 0, "the fields of this version", str(error)) from error
    return [
        {"split": encodable(split), "position": position, "text": position_text(identity, split, position)}
        for split, position in found.items()
    ]


def _output_row(piece: Piece, payload: bytes) -> Mapping[str, Any]:
    committable = piece.committable
    assert committable is not None
    return {
        "checkpoint": committable.checkpoint,
        "generation": committable.generation,
        "text": committable_text(payload),
        "payload": payload,
    }


def _unpacked(data: memoryview, type_: Any, where: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=type_)
    except msgspec.DecodeError as error:
        raise CorruptionError(where, 0, "the fields of this version", str(error)) from error


def _plain(kind: Kind, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> Decoded:
    assert SUBTASK not in schema.names
    return Decoded(Shape(kind, schema, (), tuple(schema.names)), iter([pa.RecordBatch.from_pylist(rows, schema)]))
