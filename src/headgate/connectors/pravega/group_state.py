"""The state of a reader group, as the Java clients of Pravega keep it: a log of records in the stream ``_RG<group>``.

A record has the whole state, or changes of it. Read is what says where readers and checkpoints are; how readers balance
their segments is skipped. Written is only a state without readers, whose checkpoint is one of Headgate's. The classes
of Pravega 0.13: ``ReaderGroupState``, ``CheckpointState``, ``ReaderGroupConfig``, ``UpdateOrInitSerializer``.

The form of objects is that of ``VersionedSerializer`` and ``RevisionDataOutput``: an object has a version and
revisions, and an older reader skips the revisions that it does not know. Counterpart: ``reader_group`` reads and
appends the records. Source: PV14.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from itertools import dropwhile
from typing import TypeVar
from uuid import UUID

from headgate.connectors.pravega.controller import (
    AUTOMATIC_MS,
    BY_HAND,
    CHECKPOINTS_MAX,
    REFRESH_MS,
    ReaderGroup,
    StreamName,
)
from headgate.dataclass import dataclass
from headgate.errors import ProtocolViolation

_K = TypeVar("_K")
_V = TypeVar("_V")

_SHORT, _INT, _LONG = struct.Struct(">H"), struct.Struct(">i"), struct.Struct(">q")

_FORMAT, _VERSION = 0, 0
"""Of the form itself, and of all objects that are read and written here."""


class JavaInput:
    """Reads fields one after the other.

    Raises:
        ProtocolViolation: of every call: they are cut off.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_at_end(self) -> bool:
        """Whether everything was read."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        """Return one byte."""
        return self._bytes(1)[0]

    def integer(self) -> int:
        """Return 32 bits with a sign."""
        return int(self._take(_INT))

    def long(self) -> int:
        """Return 64 bits with a sign."""
        return int(self._take(_LONG))

    def text(self) -> str:
        """Return a text."""
        return self._bytes(self._take(_SHORT)).decode(errors="surrogateescape")

    def size(self) -> int:
        """Return a number that takes one byte, two or four."""
        first = self.byte()
        if first < 0x80:
            return first
        rest = self._bytes(1 if first < 0xC0 else 3)
        return int.from_bytes(bytes([first & 0x3F]) + rest)

    def buffer(self) -> bytes:
        """Return bytes with their length in front."""
        return self._bytes(self.size())

    def sized(self) -> bytes:
        """Return bytes with 32 bits of length in front."""
        return self._bytes(self.integer())

    def pairs(self, key: Callable[[], _K], value: Callable[[], _V]) -> dict[_K, _V]:
        """Return pairs."""
        return {key(): value() for _ in range(self.size())}

    def elements(self, element: Callable[[], _V]) -> list[_V]:
        """Return elements."""
        return [element() for _ in range(self.size())]

    def longs(self) -> dict[str, int]:
        """Return texts with numbers, as segments have offsets."""
        return self.pairs(self.text, self.long)

    def first_revision(self) -> JavaInput:
        """Return the fields of an object that have been there from the beginning; read past the others.

        Raises:
            ProtocolViolation: a later Pravega has written it in another way.
        """
        version, count = self.byte(), self.byte()
        if version != _VERSION or not count:
            raise ProtocolViolation("reader group of Pravega", f"an object of version {version}")
        found = []
        for _ in range(count):
            self.byte()
            found.append(self.sized())
        return JavaInput(found[0])

    def format(self) -> None:
        """Read what is in front of an object.

        Raises:
            ProtocolViolation: it is none, or a later Pravega has written it.
        """
        if (found := self.byte()) != _FORMAT:
            raise ProtocolViolation("reader group of Pravega", f"an object in format {found}")

    def _take(self, form: struct.Struct) -> int:
        return int(form.unpack(self._bytes(form.size))[0])

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if size < 0 or len(found) != size:
            raise ProtocolViolation("reader group of Pravega", "an object that is cut off")
        self._at += size
        return found


class JavaOutput:
    """Writes fields one after the other. Each call returns the output, for the next one."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def data(self) -> bytes:
        """What was written."""
        return bytes(self._data)

    def byte(self, value: int) -> JavaOutput:
        """Write one byte."""
        self._data.append(value)
        return self

    def integer(self, value: int) -> JavaOutput:
        """Write 32 bits."""
        self._data += _INT.pack(value)
        return self

    def long(self, value: int) -> JavaOutput:
        """Write 64 bits."""
        self._data += _LONG.pack(value)
        return self

    def double(self, value: float) -> JavaOutput:
        """Write a floating-point number."""
        self._data += struct.pack(">d", value)
        return self

    def id(self, value: UUID) -> JavaOutput:
        """Write an id."""
        self._data += value.bytes
        return self

    def text(self, value: str) -> JavaOutput:
        """Write a text."""
        data = value.encode()
        self._data += _SHORT.pack(len(data)) + data
        return self

    def size(self, value: int) -> JavaOutput:
        """Write a number below 2**30."""
        if value < 1 << 7:
            return self.byte(value)
        self._data += (value | 1 << 15).to_bytes(2) if value < 1 << 14 else (value | 3 << 30).to_bytes(4)
        return self

    def buffer(self, value: bytes) -> JavaOutput:
        """Write bytes with their length in front."""
        self.size(len(value))
        self._data += value
        return self

    def sized(self, value: bytes) -> JavaOutput:
        """Write bytes with 32 bits of length in front."""
        self.integer(len(value))
        self._data += value
        return self

    def pairs(self, values: Mapping[_K, _V], key: Callable[[_K], object], value: Callable[[_V], object]) -> JavaOutput:
        """Write pairs; ``key`` and ``value`` write each."""
        self.size(len(values))
        for one, other in values.items():
            key(one)
            value(other)
        return self

    def elements(self, values: Collection[_V], element: Callable[[_V], object]) -> JavaOutput:
        """Write elements; ``element`` writes each."""
        self.size(len(values))
        for one in values:
            element(one)
        return self

    def longs(self, values: Mapping[str, int]) -> JavaOutput:
        """Write texts with numbers."""
        return self.pairs(values, self.text, self.long)


def written(*revisions: JavaOutput, kind: int | None = None) -> bytes:
    """Return an object. ``kind``: which of the kinds that may stand there it is; None: there is only one."""
    out = JavaOutput().byte(_FORMAT)
    if kind is not None:
        out.byte(kind)
    out.byte(_VERSION).byte(len(revisions))
    for number, fields in enumerate(revisions):
        out.byte(number).sized(fields.data)
    return out.data


_WHOLE, _CHANGES = b"\0\0\0\1", b"\0\0\0\2"
"""How a record begins."""

_SILENT = "_SILENT_"
"""In names of checkpoints that Java takes to look at positions; they are not the last checkpoint of a group."""

_SEGMENT = re.compile(r"(.+)/(\d+)\.#epoch\.(\d+)")
_MARK = re.compile(r"headgate/(.*)/(\d+)/(\d+)")
_NO_RANGE = -1.0


class _Kind(IntEnum):
    """The objects in records."""

    INIT = 0
    COMPACT = 1
    ADD_READER = 2
    REMOVE_READER = 3
    RELEASE_SEGMENT = 4
    ACQUIRE_SEGMENT = 5
    DISTANCE_TO_TAIL = 6
    SEGMENT_COMPLETED = 7
    CHECKPOINT_READER = 8
    CREATE_CHECKPOINT = 9
    CLEAR_CHECKPOINTS_BEFORE = 10
    CHECKPOINT_PUBLISHED = 11
    UPDATING_CONFIG = 12
    REMOVE_OUTSTANDING_CHECKPOINTS = 13


_NO_POSITIONS = (_Kind.DISTANCE_TO_TAIL, _Kind.CHECKPOINT_PUBLISHED, _Kind.UPDATING_CONFIG)


@dataclass(frozen=True, slots=True)
class GroupMark:
    """Which checkpoint of Headgate a state is from. It is the name of its checkpoint.

    Attributes:
        checkpoint: 0: the generation began without one.
    """

    life: str
    generation: int
    checkpoint: int

    def __str__(self) -> str:
        return f"headgate/{self.life}/{self.generation}/{self.checkpoint}"


@dataclass(slots=True)
class GroupState:
    """Where the readers of a group are. Segments have their full names; an offset of -1 is the end of a segment.

    Attributes:
        assigned: reader → segment → offset, as of its last checkpoint.
        unassigned: segments that no reader has now.
        future: segments that are to be read later → the numbers of those that have to be read before.
        checkpoints: names of checkpoints, in their order.
        waiting: checkpoint → readers that have not come to it.
        positions: checkpoint → segment → offset.
        last: positions of the last checkpoint that all readers have come to; empty: there is none.
    """

    assigned: dict[str, dict[str, int]] = field(default_factory=dict)
    unassigned: dict[str, int] = field(default_factory=dict)
    future: dict[str, set[int]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    waiting: dict[str, list[str]] = field(default_factory=dict)
    positions: dict[str, dict[str, int]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)


def numbers_in(stream: StreamName, positions: Mapping[str, int]) -> dict[int, int]:
    """Return the offsets of the segments of one stream, by the numbers of these."""
    found = {}
    for name, offset in positions.items():
        whole, number = _parsed(name)
        if whole == str(stream):
            found[number] = offset
    return found


def state_after(records: Sequence[bytes]) -> GroupState | None:
    """Return the state after the records of a log; None: it has none yet.

    Raises:
        ProtocolViolation: there is something else in the log, or a later Pravega has written it.
    """
    state: GroupState | None = None
    for record in dropwhile(lambda one: one[:4] != _WHOLE, records):
        if record[:4] == _WHOLE:
            state = _changed(state, record[4:])
        elif record[:4] == _CHANGES:
            fields = JavaInput(record[4:])
            while not fields.is_at_end:
                state = _changed(state, fields.sized())
        else:
            raise ProtocolViolation("reader group of Pravega", f"a record of kind {record[:4].hex()}")
    return state


def newest_mark(records: Sequence[bytes]) -> GroupMark | None:
    """Return which checkpoint of Headgate was written last, whatever others have written after it."""
    for record in reversed(records):
        if record[:4] == _WHOLE and b"headgate/" in record and (state := state_after([record])) is not None:
            for name in state.checkpoints:
                if (found := _MARK.fullmatch(name)) is not None:
                    return GroupMark(found[1], int(found[2]), int(found[3]))
    return None


def record_of(stream: StreamName, group: ReaderGroup, mark: GroupMark, cut: Mapping[int, int]) -> bytes:
    """Return the record of a state without readers, whose last checkpoint is ``mark``, at ``cut``."""
    positions = {stream.segment(segment): offset for segment, offset in cut.items()}
    name = str(mark)
    first, ranges, last = JavaOutput(), JavaOutput(), JavaOutput()
    first.buffer(_config(stream, group)).buffer(_checkpoints(name, positions))
    first.longs({})  # unread bytes of each reader
    first.size(0)  # segments for later
    first.size(0)  # those of readers
    first.longs(positions).longs({})  # those of no reader; where reading ends
    ranges.longs(positions)  # the positions read last
    ranges.pairs(positions, ranges.text, lambda _: ranges.double(_NO_RANGE).double(_NO_RANGE))
    last.byte(False)  # the configuration is not being changed
    return _WHOLE + written(first, ranges, last, kind=_Kind.COMPACT)


def _checkpoints(name: str, positions: Mapping[str, int]) -> bytes:
    first, published = JavaOutput(), JavaOutput()
    first.elements([name], first.text)
    first.size(0)  # readers that have not come to it
    first.pairs({name: positions}, first.text, first.longs)
    first.longs(positions)
    published.byte(True)
    return written(first, published)


def _config(stream: StreamName, group: ReaderGroup) -> bytes:
    """Return the configuration of ``Controller.create_group``; the first two revisions repeat each other."""
    first, second, third = JavaOutput(), JavaOutput(), JavaOutput()
    for out in (first, second):
        out.long(AUTOMATIC_MS).long(REFRESH_MS)
        for _ in ("start", "end"):
            out.pairs({str(stream): b""}, out.text, out.buffer)
    second.integer(CHECKPOINTS_MAX)
    third.size(BY_HAND if group.releases_by_hand else 0).long(group.generation).id(group.id)
    return written(first, second, third)


def _parsed(segment: str) -> tuple[str, int]:
    """Return the stream and the number of a segment."""
    found = _SEGMENT.fullmatch(segment)
    if found is None:
        raise ProtocolViolation("reader group of Pravega", f"a segment named '{segment}'")
    return found[1], int(found[3]) << 32 | int(found[2])


# -- what records change


def _changed(state: GroupState | None, data: bytes) -> GroupState:
    """Return what a state becomes. It may be changed itself."""
    fields = JavaInput(data)
    fields.format()
    kind = fields.byte()
    if kind in _NO_POSITIONS and state is not None:
        return state
    fields = fields.first_revision()
    if kind == _Kind.INIT:
        fields.buffer()
        return GroupState(unassigned=fields.longs())
    if kind == _Kind.COMPACT:
        return _compact(fields)
    if state is None or kind not in _CHANGE:
        raise ProtocolViolation("reader group of Pravega", f"a change of kind {kind}")
    try:
        _CHANGE[_Kind(kind)](state, fields)
    except (LookupError, ValueError) as error:
        raise ProtocolViolation("reader group of Pravega", f"a change of kind {kind} that does not fit") from error
    return state


def _compact(fields: JavaInput) -> GroupState:
    fields.buffer()
    checkpoints = JavaInput(fields.buffer())
    checkpoints.format()
    checkpoints = checkpoints.first_revision()
    text = checkpoints.text
    state = GroupState(
        checkpoints=checkpoints.elements(text),
        waiting=checkpoints.pairs(text, lambda: checkpoints.elements(text)),
        positions=checkpoints.pairs(text, checkpoints.longs),
        last=checkpoints.longs(),
    )
    fields.longs()
    state.future = fields.pairs(fields.text, lambda: set(fields.elements(fields.long)))
    state.assigned = fields.pairs(fields.text, fields.longs)
    state.unassigned = fields.longs()
    return state


def _add_reader(state: GroupState, fields: JavaInput) -> None:
    state.assigned.setdefault(fields.text(), {})


def _remove_reader(state: GroupState, fields: JavaInput) -> None:
    reader, owned = fields.text(), fields.longs()
    final = {segment: owned.get(segment, at) for segment, at in state.assigned.pop(reader, {}).items()}
    state.unassigned |= final
    for checkpoint in [one for one, readers in state.waiting.items() if reader in readers]:
        _reached(state, checkpoint, reader, final)


def _release(state: GroupState, fields: JavaInput) -> None:
    reader, segment, offset = fields.text(), fields.text(), fields.long()
    del state.assigned[reader][segment]
    state.unassigned[segment] = offset


def _acquire(state: GroupState, fields: JavaInput) -> None:
    reader, segment = fields.text(), fields.text()
    state.assigned[reader][segment] = state.unassigned.pop(segment)


def _complete(state: GroupState, fields: JavaInput) -> None:
    reader, segment = fields.text(), fields.text()
    del state.assigned[reader][segment]
    for successor, before in fields.pairs(fields.text, lambda: fields.elements(fields.long)).items():
        state.future.setdefault(successor, set(before))
    _, number = _parsed(segment)
    for waits_for in state.future.values():
        waits_for.discard(number)
    for successor in [one for one, waits_for in state.future.items() if not waits_for]:
        del state.future[successor]
        state.unassigned[successor] = 0


def _checkpoint_reader(state: GroupState, fields: JavaInput) -> None:
    checkpoint, reader, positions = fields.text(), fields.text(), fields.longs()
    _reached(state, checkpoint, reader, positions)
    if _SILENT not in checkpoint:
        own = state.assigned[reader]
        own |= {segment: positions[segment] for segment in own if segment in positions}


def _create_checkpoint(state: GroupState, fields: JavaInput) -> None:
    checkpoint = fields.text()
    if checkpoint not in state.positions:
        if state.assigned:
            state.waiting[checkpoint] = list(state.assigned)
        state.positions[checkpoint] = dict(state.unassigned)
        state.checkpoints.append(checkpoint)


def _clear_checkpoints(state: GroupState, fields: JavaInput) -> None:
    first = fields.text()
    if first in state.positions:
        kept = list(dropwhile(lambda one: one != first, state.checkpoints))
        _forget(state, state.checkpoints[: len(state.checkpoints) - len(kept)])
        state.checkpoints = kept


def _remove_outstanding(state: GroupState, fields: JavaInput) -> None:
    _forget(state, [one for one in state.checkpoints if one in state.waiting and _SILENT not in one])


def _forget(state: GroupState, checkpoints: Iterable[str]) -> None:
    for one in checkpoints:
        state.waiting.pop(one, None)
        state.positions.pop(one, None)


def _reached(state: GroupState, checkpoint: str, reader: str, positions: Mapping[str, int]) -> None:
    readers = state.waiting.get(checkpoint)
    if readers is None:
        return
    readers.remove(reader)
    state.positions[checkpoint] |= positions
    if not readers:
        del state.waiting[checkpoint]
        if _SILENT not in checkpoint:
            state.last = state.positions[checkpoint]


_CHANGE: Mapping[_Kind, Callable[[GroupState, JavaInput], None]] = {
    _Kind.ADD_READER: _add_reader,
    _Kind.REMOVE_READER: _remove_reader,
    _Kind.RELEASE_SEGMENT: _release,
    _Kind.ACQUIRE_SEGMENT: _acquire,
    _Kind.SEGMENT_COMPLETED: _complete,
    _Kind.CHECKPOINT_READER: _checkpoint_reader,
    _Kind.CREATE_CHECKPOINT: _create_checkpoint,
    _Kind.CLEAR_CHECKPOINTS_BEFORE: _clear_checkpoints,
    _Kind.REMOVE_OUTSTANDING_CHECKPOINTS: _remove_outstanding,
}
