"""Kafka's primitive types and error codes, and messages as dataclasses whose annotations say how fields are written.

A message class is a table: a field's annotation is its wire type (``Int32``, ``String``, ``tuple[Inner, ...]``, with
``| None`` where null is allowed), with ``Since`` if older versions lack it and ``Tag`` if it is a tagged field. The
bytes of one version of it follow from that table, in both directions. Format: Kafka's protocol guide, and KIP-482 for
flexible versions. A reader never allocates by a length that it has not checked.
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Generic, NoReturn, Protocol, TypeAlias, TypeVar
from uuid import UUID

from headgate.dataclass import dataclass
from headgate.errors import ProtocolViolation

Buffer: TypeAlias = bytes | bytearray | memoryview
Parts: TypeAlias = list[Buffer]
"""Bytes in pieces, so that large ones are sent without copying them."""

ANY_VERSION_FLEXIBLE, NEVER_FLEXIBLE = 0, 1 << 15


class Reader:
    """Reads values from the bytes of one message; refuses whatever leads out of them."""

    __slots__ = ("_end", "_position", "_view", "_what")

    def __init__(self, data: Buffer, what: str) -> None:
        self._view = memoryview(data)
        self._what = what
        self._position, self._end = 0, len(self._view)

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return self._end - self._position

    def refuse(self, problem: str) -> NoReturn:
        """Raise ProtocolViolation, which names the message and the place."""
        raise ProtocolViolation("Kafka", f"{self._what} is malformed at byte {self._position}: {problem}")

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes without copying them."""
        if not 0 <= size <= self.left:
            self.refuse(f"a length of {size} with {self.left} bytes left")
        begin = self._position
        self._position += size
        return self._view[begin : self._position]

    def number(self, form: struct.Struct) -> Any:
        """Return the next value of fixed size."""
        return form.unpack(self.take(form.size))[0]

    def unsigned_varint(self) -> int:
        """Return the next variable-length number of at most 32 bits."""
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                self.refuse("a number of more than five bytes")
        return value

    def length(self, form: struct.Struct, is_flexible: bool) -> int | None:
        """Return the length of what follows, or None for null."""
        size = self.unsigned_varint() - 1 if is_flexible else int(self.number(form))
        if size > self.left:
            self.refuse(f"a length of {size} with {self.left} bytes left")
        return None if size < 0 else size


def unsigned_varint(value: int) -> bytes:
    """Return ``value`` in as many bytes of seven bits as it needs."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class WireType(Protocol):
    """How values of one type are written."""

    def write(self, parts: Parts, value: Any, version: int, is_flexible: bool) -> None:
        """Append the bytes of ``value``."""

    def read(self, reader: Reader, version: int, is_flexible: bool) -> Any:
        """Return the next value."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value of fixed size."""

    form: struct.Struct

    def write(self, parts: Parts, value: Any, version: int, is_flexible: bool) -> None:
        parts.append(self.form.pack(value))

    def read(self, reader: Reader, version: int, is_flexible: bool) -> Any:
        return reader.number(self.form)


_INT16, _INT32, _UUID = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">16s")


class UuidType:
    """16 bytes."""

    def write(self, parts: Parts, value: UUID, version: int, is_flexible: bool) -> None:
        parts.append(value.bytes)

    def read(self, reader: Reader, version: int, is_flexible: bool) -> UUID:
        return UUID(bytes=reader.number(_UUID))


@dataclass(frozen=True, slots=True)
class Sized:
    """Bytes with their length. ``form``: how versions that are not flexible write it."""

    form: struct.Struct
    is_text: bool = False
    is_nullable: bool = False

    def write(self, parts: Parts, value: Any, version: int, is_flexible: bool) -> None:
        pieces = [] if value is None else value if isinstance(value, list) else [value]
        pieces = [value.encode()] if self.is_text and value is not None else pieces
        size = -1 if value is None else sum(map(len, pieces))
        parts.append(unsigned_varint(size + 1) if is_flexible else self.form.pack(size))
        parts += pieces

    def read(self, reader: Reader, version: int, is_flexible: bool) -> Any:
        size = reader.length(self.form, is_flexible)
        if size is None:
            return None if self.is_nullable else reader.refuse("null where there must be a value")
        data = reader.take(size)
        if not self.is_text:
            return data
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            reader.refuse("a text that is no UTF-8")


@dataclass(frozen=True, slots=True)
class Array:
    """Any number of values of one type."""

    element: WireType
    is_nullable: bool = False

    def write(self, parts: Parts, value: Sequence[Any] | None, version: int, is_flexible: bool) -> None:
        count = -1 if value is None else len(value)
        parts.append(unsigned_varint(count + 1) if is_flexible else _INT32.pack(count))
        for one in value or ():
            self.element.write(parts, one, version, is_flexible)

    def read(self, reader: Reader, version: int, is_flexible: bool) -> Any:
        # every element has at least one byte, so that the bytes that are left bound their number, too
        count = reader.length(_INT32, is_flexible)
        if count is None:
            return None if self.is_nullable else reader.refuse("null where there must be a list")
        return tuple([self.element.read(reader, version, is_flexible) for _ in range(count)])


Bool = Annotated[bool, Fixed(struct.Struct(">?"))]
Int8 = Annotated[int, Fixed(struct.Struct(">b"))]
Int16 = Annotated[int, Fixed(_INT16)]
Int32 = Annotated[int, Fixed(_INT32)]
Int64 = Annotated[int, Fixed(struct.Struct(">q"))]
Uuid = Annotated[UUID, UuidType()]
String = Annotated[str, Sized(_INT16, is_text=True)]
Bytes = Annotated[Buffer, Sized(_INT32)]
Records = Annotated[Buffer | Parts, Sized(_INT32)]
"""Record batches: to send, in pieces."""


@dataclass(frozen=True, slots=True)
class Since:
    """The first version that has the field. Older ones are read as the field's default."""

    version: int


@dataclass(frozen=True, slots=True)
class Tag:
    """The field is a tagged one (KIP-482), which is left out where it has its default."""

    number: int


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    wire: WireType
    since: int
    tag: int | None
    default: Any


@dataclass(frozen=True, slots=True)
class Nested:
    """A dataclass inside a message."""

    table: type[Any]

    def write(self, parts: Parts, value: Any, version: int, is_flexible: bool) -> None:
        tagged: list[tuple[int, Parts]] = []
        for field in _fields(self.table):
            one = getattr(value, field.name)
            if field.since > version:
                continue
            if field.tag is None:
                field.wire.write(parts, one, version, is_flexible)
            elif one != field.default:
                own: Parts = []
                field.wire.write(own, one, version, is_flexible)
                tagged.append((field.tag, own))
        if is_flexible:
            parts.append(unsigned_varint(len(tagged)))
            for tag, own in sorted(tagged, key=lambda one: one[0]):
                parts += [unsigned_varint(tag), unsigned_varint(sum(map(len, own))), *own]

    def read(self, reader: Reader, version: int, is_flexible: bool) -> Any:
        values: dict[str, Any] = {}
        tagged: dict[int, _Field] = {}
        for field in _fields(self.table):
            if field.tag is None and field.since <= version:
                values[field.name] = field.wire.read(reader, version, is_flexible)
                continue
            # a version without the field is read as its default, and so is a tagged field that does not come
            values[field.name] = field.default
            if field.tag is not None and field.since <= version:
                tagged[field.tag] = field
        if is_flexible:
            for tag, data, what in read_tags(reader):
                if (known := tagged.get(tag)) is not None:
                    own = Reader(data, what)
                    values[known.name] = known.wire.read(own, version, is_flexible)
                    if own.left:
                        own.refuse(f"{own.left} bytes too many in tagged field {tag}")
        return self.table(**values)


def read_tags(reader: Reader) -> Iterable[tuple[int, memoryview, str]]:
    """Yield number and bytes of each tagged field that is next, and what to call it in errors."""
    for _ in range(reader.unsigned_varint()):
        tag = reader.unsigned_varint()
        yield tag, reader.take(reader.unsigned_varint()), f"tagged field {tag}"


_TABLES: dict[type[Any], tuple[_Field, ...]] = {}


def _fields(table: type[Any]) -> tuple[_Field, ...]:
    """Return the fields of a message class, as its annotations say."""
    if (known := _TABLES.get(table)) is not None:
        return known
    hints = typing.get_type_hints(table, include_extras=True)
    found = []
    for field in fields(table):
        base, marks = _unwrapped(hints[field.name])
        since = next((mark.version for mark in marks if isinstance(mark, Since)), 0)
        tag = next((mark.number for mark in marks if isinstance(mark, Tag)), None)
        default = None if field.default is MISSING else field.default
        found.append(_Field(field.name, _wire_type(base, marks), since, tag, default))
    _TABLES[table] = tuple(found)
    return _TABLES[table]


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def _wire_type(hint: Any, marks: tuple[Any, ...] = (), *, is_nullable: bool = False) -> WireType:
    for mark in marks:
        if isinstance(mark, Sized):
            return Sized(mark.form, mark.is_text, is_nullable)
        if isinstance(mark, Fixed | UuidType):
            return mark
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        one = next(part for part in typing.get_args(hint) if part is not type(None))
        return _wire_type(*_unwrapped(one), is_nullable=True)
    if typing.get_origin(hint) is tuple:
        return Array(_wire_type(*_unwrapped(typing.get_args(hint)[0])), is_nullable)
    return Nested(hint)


class Answer:
    """Base class of the messages that a broker answers with."""


_A = TypeVar("_A", bound=Answer)


class Request(Generic[_A]):
    """Base class of the messages that a client sends; ``_A`` is the class of the answer.

    Attributes:
        KEY: the number of the request.
        VERSIONS: the versions that the table describes and that are used, the preferred one first.
        ANSWER: the class of the answer.
        FLEXIBLE: the first version with compact lengths and tagged fields.
        HAS_TAGS_IN_ANSWER: whether the header of flexible answers has tagged fields, as all but one have.
    """

    KEY: ClassVar[int]
    VERSIONS: ClassVar[tuple[int, ...]]
    ANSWER: ClassVar[type[Answer]]
    FLEXIBLE: ClassVar[int] = ANY_VERSION_FLEXIBLE
    HAS_TAGS_IN_ANSWER: ClassVar[bool] = True


def encode_request(request: Request[Any], version: int, correlation_id: int, client_id: str) -> Parts:
    """Return a request with its length and header, in pieces."""
    is_flexible = version >= request.FLEXIBLE
    name = client_id.encode()
    # the client's name has a plain length in the headers of flexible versions, too
    header = struct.pack(">hhih", request.KEY, version, correlation_id, len(name)) + name
    parts: Parts = [header + b"\0" if is_flexible else header]
    Nested(type(request)).write(parts, request, version, is_flexible)
    return [_INT32.pack(sum(map(len, parts))), *parts]


def correlation_id_of(data: Buffer) -> int:
    """Return the number of the request that an answer (without its length) belongs to.

    Raises:
        ProtocolViolation: there are no four bytes.
    """
    return int(Reader(data, "an answer").number(_INT32))


def decode_answer(request: Request[_A], version: int, data: Buffer) -> _A:
    """Return the answer in ``data``, which is everything after the length.

    Raises:
        ProtocolViolation: it is no answer to ``request``.
    """
    reader = Reader(data, f"the answer to {type(request).__name__} of version {version}")
    # the number of the request, which the connection has compared
    reader.number(_INT32)
    is_flexible = version >= request.FLEXIBLE
    if is_flexible and request.HAS_TAGS_IN_ANSWER:
        for _ in read_tags(reader):
            pass
    answer: _A = Nested(request.ANSWER).read(reader, version, is_flexible)
    if reader.left:
        reader.refuse(f"{reader.left} bytes too many")
    return answer


class ErrorCode(IntEnum):
    """What a broker answers in place of success. Source: Kafka's protocol guide, "Error Codes"."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    NOT_ENOUGH_SPACE = 61
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    OFFSET_NOT_AVAILABLE = 78
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    TRANSACTION_ABORTABLE = 120

    @classmethod
    def _missing_(cls, value: object) -> ErrorCode | None:
        """Take a code of a later release for what it is: an error that is not known here."""
        return cls.UNKNOWN_SERVER_ERROR if isinstance(value, int) else None


_E = ErrorCode

LEADER_CHANGED = frozenset(
    {
        _E.LEADER_NOT_AVAILABLE,
        _E.NOT_LEADER_OR_FOLLOWER,
        _E.REPLICA_NOT_AVAILABLE,
        _E.FENCED_LEADER_EPOCH,
        _E.UNKNOWN_LEADER_EPOCH,
        _E.KAFKA_STORAGE_ERROR,
        _E.LISTENER_NOT_FOUND,
    }
)
"""Another broker leads the partition now, or will soon: ask for metadata."""

COORDINATOR_CHANGED = frozenset({_E.COORDINATOR_NOT_AVAILABLE, _E.NOT_COORDINATOR})
"""Another broker coordinates the group or transactional id now, or will soon: ask for it."""

RETRIABLE = (
    LEADER_CHANGED
    | COORDINATOR_CHANGED
    | {
        _E.REQUEST_TIMED_OUT,
        _E.BROKER_NOT_AVAILABLE,
        _E.NETWORK_EXCEPTION,
        _E.COORDINATOR_LOAD_IN_PROGRESS,
        _E.NOT_ENOUGH_REPLICAS,
        _E.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        _E.NOT_CONTROLLER,
        _E.CONCURRENT_TRANSACTIONS,
        _E.OFFSET_NOT_AVAILABLE,
        _E.UNSTABLE_OFFSET_COMMIT,
        _E.THROTTLING_QUOTA_EXCEEDED,
        _E.FETCH_SESSION_ID_NOT_FOUND,
        _E.INVALID_FETCH_SESSION_EPOCH,
        _E.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)
"""The same request may succeed later."""
