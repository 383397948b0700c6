"""Columns of stored states, and the rows of a piece as Arrow batches.

The identity of an operator's state says which columns are the key, and what they are called for people. Nothing is
unpickled: what is no Arrow stream and no JSON stays bytes. Every byte was verified before it comes here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

import msgspec
import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.decodable import decodable
from headgate.codec.loop_log import LogHeader, decode_log
from headgate.codec.snapshot import (
    BROADCAST_PREFIX,
    IN_FLIGHT_PREFIX,
    LISTS_PREFIX,
    POSITIONS_PREFIX,
    ROUNDS_PREFIX,
    STATE_PREFIX,
    UNION_PREFIX,
    decode_positions,
    decode_sections,
)
from headgate.connectors.registry import committable_text, position_text
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError
from headgate.model.state_schema import Form, StateIdentity
from headgate.plain_text import encodable
from headgate.protocol.subtasks.loops import RoundProgress
from headgate.runtime.state_reader.lookup import COMMITTABLES, LOG_SECTIONS, Piece
from headgate.state.backend import TIME_COLUMN, TIMERS, TimeKind
from headgate.state.descriptors import StateKind
from headgate.state.ttl import has_expiry

SUBTASK, KEY_GROUP = "_subtask", "_key_group"
"""Columns that any state can be asked for: which subtask had the row, and the key group of its key."""

EXPIRES = "_expires"
"""Column that a state with a TTL can be asked for: until when a row lives."""

WINDOW, ROWS, PARTIAL = "__window", "__rows", "__partial_"
"""How windows store the number of a window, how many records a row stands for, and each accumulator."""

WINDOW_START, WINDOW_END = "window_start", "window_end"
MAP_KEY = "map_key"
TIME = "time"
"""Of a timer, beside the milliseconds that are stored; null where there is no such date."""


class Kind(Enum):
    """What a state is."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"
    EVENT_TIME_TIMERS = "event-time timers"
    PROCESSING_TIME_TIMERS = "processing-time timers"
    WINDOW_RESULTS = "window results"
    WINDOW_RECORDS = "window records"
    OPERATOR_LIST = "operator list"
    OPERATOR_UNION = "operator union"
    BROADCAST = "broadcast map"
    RECORDS = "held records"
    LOOP_LOG = "loop log"
    IN_FLIGHT = "in flight"
    POSITIONS = "positions"
    COMMITTABLES = "committables"
    ROUNDS = "rounds"
    FACTS = "facts"
    BYTES = "bytes"


OF_TIMERS = {
    f"{TIMERS}.{TimeKind.EVENT_TIME.value}": Kind.EVENT_TIME_TIMERS,
    f"{TIMERS}.{TimeKind.PROCESSING_TIME.value}": Kind.PROCESSING_TIME_TIMERS,
}
"""The states that are timers, by the names of their sections."""

_OF_SUBTASKS = {
    LISTS_PREFIX: Kind.OPERATOR_LIST,
    UNION_PREFIX: Kind.OPERATOR_UNION,
    BROADCAST_PREFIX: Kind.BROADCAST,
    IN_FLIGHT_PREFIX: Kind.IN_FLIGHT,
}
"""What belongs to no key, by the prefix of its section."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a state is stored, and shown.

    Attributes:
        kind: what it is.
        schema: as it is stored.
        keys: the stored columns that decide which subtask has a row; () if it has no key.
        names: of the stored columns, for people.
        window_ms: the length of its windows, where the number of a window is stored.
    """

    kind: Kind
    schema: pa.Schema
    keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    window_ms: int = 0

    @property
    def shown_keys(self) -> tuple[str, ...]:
        """The key columns by the names that people see."""
        return tuple(self.names[self.schema.get_field_index(key)] for key in self.keys)

    @property
    def expires(self) -> bool:
        """Whether its rows expire: the last stored column says when."""
        return self.kind in (Kind.VALUE, Kind.LIST, Kind.MAP) and has_expiry(self.schema)

    @property
    def shown(self) -> pa.Schema:
        """Return the columns that people see unless they choose others."""
        fields: list[pa.Field] = []
        stored = self.schema.remove(len(self.schema) - 1) if self.expires else self.schema
        for field, name in zip(stored, self.names, strict=False):
            if self.window_ms and field.name == WINDOW:
                fields += [pa.field(end, pa.timestamp("us")) for end in (WINDOW_START, WINDOW_END)]
            else:
                fields.append(field.with_name(name))
        if self.kind in OF_TIMERS.values():
            fields.append(pa.field(TIME, pa.timestamp("us")))
        if not self.keys and SUBTASK not in self.names:
            fields.append(pa.field(SUBTASK, pa.int32()))
        return pa.schema(fields)

    @property
    def all(self) -> pa.Schema:
        """Return all columns that can be asked for."""
        more = [pa.field(SUBTASK, pa.int32()), *([pa.field(KEY_GROUP, pa.int32())] if self.keys else [])]
        more += [pa.field(EXPIRES, pa.timestamp("us"))] if self.expires else []
        return pa.schema([*self.shown, *(field for field in more if field.name not in self.shown.names)])


def shape_of(identity: StateIdentity, prefix: str, name: str, schema: pa.Schema) -> Shape:
    """Return the shape of an Arrow section ``name`` of a state.

    Args:
        identity: of the operator's state.
        prefix: of the part: state, lists, union, broadcast or in-flight.
        name: of the section.
        schema: of the section.
    """
    names = tuple(schema.names)
    if prefix != STATE_PREFIX:
        return Shape(_OF_SUBTASKS[prefix], schema, (), names)
    form = identity.form
    if form is Form.KEYED:
        return _declared(identity, name, schema)
    if form is Form.WINDOW_RECORDS:  # these have their keys among their own columns
        keys = identity.keys_among({field.name: str(field.type) for field in schema})
        return Shape(Kind.WINDOW_RECORDS, schema, keys, names)
    if form is Form.WINDOW_RESULTS and WINDOW in names:
        return _merged(identity, schema)
    return Shape(Kind.RECORDS, schema, (), names)


def _declared(identity: StateIdentity, name: str, schema: pa.Schema) -> Shape:
    """Return the shape of a state that a process function declared, or of its timers: keys by position."""
    stored = tuple(n for i, n in enumerate(schema.names) if n == f"key{i}" and n not in (MAP_KEY, "value"))
    named = identity.key_names([str(schema.field(key).type) for key in stored])
    rest = tuple(schema.names[len(stored) :])
    kind = OF_TIMERS.get(name) if rest == (TIME_COLUMN,) else None  # a user may have taken the name
    taken = (*rest, *([TIME] if kind is not None else [EXPIRES] if has_expiry(schema) else []))
    keys = _apart(stored, named, taken) if named else stored
    if kind is not None:
        return Shape(kind, schema, stored, (*keys, *rest))
    is_list = identity.declares(StateKind.LIST.value, name)
    kind = Kind.MAP if MAP_KEY in rest else Kind.LIST if is_list else Kind.VALUE
    return Shape(kind, schema, stored, (*keys, *rest))


def _apart(stored: Sequence[str], named: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the key's columns; one that is called as another column is keeps its position for a name."""
    taken = {*others, SUBTASK, KEY_GROUP}
    return tuple(position if name in taken else name for position, name in zip(stored, named, strict=True))


def _merged(identity: StateIdentity, schema: pa.Schema) -> Shape:
    """Return the shape of what windows have merged: the key, the window, and accumulators."""
    keys = tuple(schema.names[: schema.get_field_index(WINDOW)])
    shown = [name.removeprefix("__") if name in (ROWS,) or name.startswith(PARTIAL) else name for name in schema.names]
    of_windows = {WINDOW_START, WINDOW_END, "window"}
    is_clear = len({*shown}) == len(shown) and not of_windows & {*shown}
    names = tuple(shown) if is_clear else tuple(schema.names)
    return Shape(Kind.WINDOW_RESULTS, schema, keys, names, identity.window_ms if is_clear else 0)


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


def decode_piece(piece: Piece, data: memoryview, identity: StateIdentity, where: str) -> Decoded:
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
    # nothing says what such a section is, so the most particular form is tried first
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
    """Return the records of a loop's log, None if it is none. It says itself what its key is."""
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
    assert committable is not None, "prepared output has its committable"
    return {
        "checkpoint": committable.checkpoint,
        "generation": committable.generation,
        "text": committable_text(payload),
        "payload": payload,
    }


def _unpacked(data: memoryview, type_: Any, where: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=decodable(type_))
    except msgspec.DecodeError as error:
        raise CorruptionError(where, 0, "the fields of this version", str(error)) from error


def _plain(kind: Kind, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> Decoded:
    assert SUBTASK not in schema.names, "the subtask is added when rows are shown"
    return Decoded(Shape(kind, schema, (), tuple(schema.names)), iter([pa.RecordBatch.from_pylist(rows, schema)]))
