"""The segment store of Pravega over its wire protocol: reading segments from offsets, and acknowledged appends.

The package ``pravega`` has neither: it has no offsets of events, and cannot wait for what a transaction wrote.
Numbers and fields of the commands: ``WireCommandType`` and ``WireCommands`` of Pravega 0.13, whose stores talk to
clients since wire version 5. Stores are reached over TLS or not, with a token that the controller gives. Counterpart:
``controller`` says which store has a segment.
"""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import field
from enum import IntEnum
from typing import TypeAlias

from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import ProtocolViolation, StorageError, UsageError

CONNECT_MS = 10_000

TOKEN_MS = 30_000
"""So long a token is used; the controller makes them for ten minutes, unless it is configured otherwise."""


class Access:
    """Makes connections for one stream. Without a login there are no tokens."""

    def __init__(
        self, client: Controller, stream: StreamName, environment: Environment, *, only_reads: bool = False
    ) -> None:
        """``only_reads``: the user needs no right to write the stream."""
        self.environment, self._only_reads = environment, only_reads
        self._client, self._stream = client, stream
        self._context = client.security.context()
        self._token, self._until_ms = "", 0

    def connect(self, host: str, port: int, name: str) -> socket.socket:
        """Return a connection to a store.

        Raises:
            StorageError: it is not reached, or its certificate is not trusted, which does not pass.
        """
        try:
            plain: socket.socket = self.environment.connect(host, port, CONNECT_MS / 1000)
            if self._context is None:
                return plain
            try:
                return self._context.wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
        except ssl.SSLCertVerificationError as error:
            raise StorageError("reach", name, error.verify_message, is_transient=False) from error
        except OSError as error:
            raise StorageError("reach", name, str(error)) from error

    def token(self) -> str:
        """Return the token of a request.

        Raises:
            StorageError, UsageError: the controller does not give one.
        """
        if not self._client.security.secret:
            return ""
        now_ms = self.environment.monotonic_ms()
        if not self._token or now_ms >= self._until_ms:
            self._token, self._until_ms = self._client.token(self._stream, self._only_reads), now_ms + TOKEN_MS
        return self._token

    def forget_token(self) -> None:
        """A store has refused the token: ask for another one."""
        self._token = ""


WIRE_VERSION, OLDEST_WIRE_VERSION = 16, 5

FRAME_BYTES_MAX = 0x00FF_FFFF
"""The longest command."""

ANSWER_MS = 60_000
"""How long a store may be silent, while something is asked for, before the connection counts as broken."""

PATIENCE_MS = 60_000
"""How long a store may be away."""

PAUSE_S = 0.2
"""Between two attempts to reach it."""

IN_FLIGHT_MAX = 32
"""Blocks that a writer sends ahead of their acknowledgements."""

_EXPIRED = struct.pack(">i", 1)
"""How the refusal of a token ends that was good once."""

_HEAD = struct.Struct(">ii")
_LONG = struct.Struct(">q")
_UTF = struct.Struct(">H")


class Command(IntEnum):
    """The commands that are used."""

    HELLO = -127
    SETUP_APPEND = 1
    APPEND_SETUP = 2
    APPEND_BLOCK = 3
    APPEND_BLOCK_END = 4
    CONDITIONAL_APPEND = 5
    DATA_APPENDED = 7
    CONDITIONAL_CHECK_FAILED = 8
    READ_SEGMENT = 9
    SEGMENT_READ = 10
    GET_STREAM_SEGMENT_INFO = 11
    STREAM_SEGMENT_INFO = 12
    GET_SEGMENT_ATTRIBUTE = 34
    SEGMENT_ATTRIBUTE = 35
    UPDATE_SEGMENT_ATTRIBUTE = 36
    SEGMENT_ATTRIBUTE_UPDATED = 37
    TRUNCATE_SEGMENT = 38
    SEGMENT_TRUNCATED = 39
    WRONG_HOST = 50
    SEGMENT_IS_SEALED = 51
    NO_SUCH_SEGMENT = 53
    INVALID_EVENT_NUMBER = 55
    SEGMENT_IS_TRUNCATED = 56
    AUTH_TOKEN_CHECK_FAILED = 60


class SegmentError(Exception):
    """A segment cannot do what it was asked for: it is gone, sealed or truncated.

    Attributes:
        kind: which of them.
        head: where it begins, if it is truncated.
    """

    def __init__(self, kind: Command, segment: str, head: int = 0) -> None:
        super().__init__(f"{segment}: {kind.name.lower().replace('_', ' ')}")
        self.kind, self.segment, self.head = kind, segment, head


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a store says of a segment: where it begins and ends, and whether it can grow."""

    start: int
    end: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class SegmentData:
    """Bytes of a segment from ``offset``. ``is_end``: nothing will ever follow them."""

    request: int
    offset: int
    data: bytes
    is_end: bool


Place: TypeAlias = tuple[str, int]
"""Host and port of a store."""


class Connection:
    """A connection to one store. Answers come in any order.

    Raises:
        StorageError: of every call: the connection failed, and is closed.
    """

    def __init__(self, place: Place, access: Access) -> None:
        self.place, self.access = place, access
        self.name = f"Pravega's segment store at {place[0]}:{place[1]}"
        self._in = bytearray()
        self._numbers = itertools.count(1)
        self._socket = access.connect(*place, self.name)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(ANSWER_MS / 1000)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.send(Command.HELLO, struct.pack(">ii", WIRE_VERSION, OLDEST_WIRE_VERSION))
        kind, answer = self.expect()
        if kind != Command.HELLO:
            raise self.failed(f"it answers {kind} to the first command")
        low = struct.unpack_from(">ii", answer)[1]
        if low > WIRE_VERSION:
            raise self.failed(f"it needs wire version {low}, and this client has {WIRE_VERSION}")

    def next_number(self) -> int:
        """Return a number for a request."""
        return next(self._numbers)

    def send(self, command: int, *parts: bytes | memoryview) -> None:
        """Send a command."""
        size = sum(map(len, parts))
        try:
            self._socket.sendall(b"".join((_HEAD.pack(command, size), *parts)))
        except OSError as error:
            raise self.failed(str(error)) from error

    def receive(self, timeout_ms: int) -> tuple[int, bytes] | None:
        """Return the next command that comes within ``timeout_ms``, or None."""
        while (found := self._taken()) is None:
            try:
                if not self._has_decrypted() and not self._poll.poll(timeout_ms):
                    return None
                data = self._received()
            except (OSError, ValueError) as error:
                raise self.failed(str(error)) from error
            if data is None:
                continue
            if not data:
                raise self.failed("it has closed the connection")
            self._in += data
        return found

    def expect(self) -> tuple[int, bytes]:
        """Return the next command."""
        found = self.receive(ANSWER_MS)
        if found is None:
            raise self.failed(f"no answer within {ANSWER_MS} ms")
        return found

    def ask(self, command: Command, make: Callable[[int], bytes]) -> tuple[int, bytes]:
        """Send a request and return its answer. Nothing else may be in flight. ``make``: number → fields."""
        self.send(command, make(self.next_number()))
        return self.expect()

    def token(self) -> bytes:
        """Return the token as commands have it; empty without a login."""
        return utf(self.access.token())

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _received(self) -> bytes | None:
        """Return what has come; None: nothing but what TLS has to say, which would be waited beyond otherwise."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return self._socket.recv(1 << 20)
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1 << 20)
        except ssl.SSLWantReadError:
            return None
        finally:
            self._socket.settimeout(ANSWER_MS / 1000)

    def _has_decrypted(self) -> bool:
        """Whether TLS has taken more from the network than it has given out."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _taken(self) -> tuple[int, bytes] | None:
        if len(self._in) < _HEAD.size:
            return None
        kind, size = _HEAD.unpack_from(self._in)
        if not 0 <= size <= FRAME_BYTES_MAX:
            raise self.failed(f"a command of {size} bytes")
        end = _HEAD.size + size
        if len(self._in) < end:
            return None
        found = bytes(memoryview(self._in)[_HEAD.size : end])
        del self._in[:end]
        return kind, found

    @property
    def is_closed(self) -> bool:
        """Whether it failed or was closed."""
        return int(self._socket.fileno()) < 0

    def failed(self, why: str) -> StorageError:
        """Close it, and return the error that says why."""
        self._socket.close()
        return StorageError("talk to", self.name, why)


def utf(text: str) -> bytes:
    """Return a text as commands have it."""
    data = text.encode()
    return _UTF.pack(len(data)) + data


class Fields:
    """Reads the fields of a command one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def long(self) -> int:
        """Return 64 bits with a sign."""
        return int(self._take(_LONG)[0])

    def flag(self) -> bool:
        """Return one byte."""
        return bool(self._take(struct.Struct(">?"))[0])

    def text(self) -> str:
        """Return a text."""
        size = self._take(_UTF)[0]
        return self._bytes(size).decode(errors="replace")

    def data(self) -> bytes:
        """Return bytes with their length in front."""
        return self._bytes(self._take(struct.Struct(">i"))[0])

    def id(self) -> uuid.UUID:
        """Return an id."""
        return uuid.UUID(bytes=self._bytes(16))

    def _take(self, form: struct.Struct) -> tuple[int, ...]:
        try:
            found = form.unpack_from(self._data, self._at)
        except struct.error as error:
            raise ProtocolViolation("segment store of Pravega", "a command that is cut off") from error
        self._at += form.size
        return found

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if size < 0 or len(found) != size:
            raise ProtocolViolation("segment store of Pravega", "a command that is cut off")
        self._at += size
        return found


_REFUSALS = (
    Command.SEGMENT_IS_SEALED,
    Command.NO_SUCH_SEGMENT,
    Command.SEGMENT_IS_TRUNCATED,
    Command.WRONG_HOST,
)


def refusal(kind: int, data: bytes) -> tuple[int, SegmentError] | None:
    """Return the number of the request that a segment refuses, and why; None: the command is no refusal."""
    if kind not in _REFUSALS:
        return None
    fields = Fields(data)
    number, segment = fields.long(), fields.text()
    head = fields.long() if kind == Command.SEGMENT_IS_TRUNCATED else 0
    return number, SegmentError(Command(kind), segment, head)


def segment_info(connection: Connection, segment: str) -> SegmentInfo:
    """Return what a store says of a segment.

    Raises:
        SegmentError: it is not there.
        StorageError
    """
    kind, data = connection.ask(
        Command.GET_STREAM_SEGMENT_INFO, lambda number: _LONG.pack(number) + utf(segment) + connection.token()
    )
    if (refused := refusal(kind, data)) is not None:
        raise refused[1]
    if kind != Command.STREAM_SEGMENT_INFO:
        raise unexpected(connection, kind, data)
    fields = Fields(data)
    fields.long()
    fields.text()
    exists, is_sealed, is_deleted = fields.flag(), fields.flag(), fields.flag()
    fields.long()
    end, start = fields.long(), fields.long()
    if not exists or is_deleted:
        raise SegmentError(Command.NO_SUCH_SEGMENT, segment)
    return SegmentInfo(start, end, is_sealed)


def tail(client: Controller, stream: StreamName, environment: Environment) -> dict[int, int]:
    """Return where a stream ends now.

    Raises:
        UsageError: it was sealed.
    """
    segments = [one.segment for one in client.current(stream)]
    if not segments:
        raise UsageError(
            f"stream '{stream}' of Pravega is sealed, and its end needs no 'latest'; leave end= out: reading ends there"
        )
    found: dict[int, int] = {}
    connections: dict[Place, Connection] = {}
    access = Access(client, stream, environment, only_reads=True)
    try:
        for segment in segments:
            place = client.place(stream, segment)
            if place not in connections:
                connections[place] = Connection(place, access)
            found[segment] = segment_info(connections[place], stream.segment(segment)).end
    except SegmentError as error:
        raise StorageError("look at", f"stream '{stream}'", f"it is being scaled or deleted: {error}") from error
    finally:
        for connection in connections.values():
            connection.close()
    return found


def ask_for_data(connection: Connection, segment: str, offset: int, size: int) -> int:
    """Ask for bytes of a segment; return the number of the request. At the end of a segment a store waits for more."""
    number = connection.next_number()
    connection.send(
        Command.READ_SEGMENT, utf(segment), struct.pack(">qi", offset, size), connection.token(), _LONG.pack(number)
    )
    return number


def data_in(connection: Connection, kind: int, data: bytes) -> SegmentData | tuple[int, SegmentError]:
    """Return the bytes that an answer has, or why there are none, with the number of the request.

    Raises:
        StorageError: it is another answer.
    """
    if (refused := refusal(kind, data)) is not None:
        return refused
    if kind != Command.SEGMENT_READ:
        raise unexpected(connection, kind, data)
    fields = Fields(data)
    fields.text()
    offset = fields.long()
    fields.flag()
    is_end = fields.flag()
    content = fields.data()
    return SegmentData(fields.long(), offset, content, is_end)


def read(connection: Connection, segment: str, offset: int, end: int) -> bytes:
    """Return what a segment has between two offsets, which must be there. Nothing else may be in flight.

    Raises:
        SegmentError, StorageError
    """
    found = bytearray()
    while offset + len(found) < end:
        ask_for_data(connection, segment, offset + len(found), min(end - offset - len(found), 1 << 20))
        answer = data_in(connection, *connection.expect())
        if not isinstance(answer, SegmentData):
            raise answer[1]
        found += answer.data
    return bytes(found)


def append_if_at(connection: Connection, segment: str, offset: int, event: bytes) -> bool:
    """Append one event if the segment ends at ``offset``. Return whether it did. Nothing else may be in flight.

    Raises:
        SegmentError, StorageError
    """
    writer = _new_writer()
    kind, data = connection.ask(
        Command.SETUP_APPEND, lambda number: _LONG.pack(number) + writer.bytes + utf(segment) + connection.token()
    )
    if (refused := refusal(kind, data)) is not None:
        raise refused[1]
    framed = _HEAD.pack(0, len(event)) + event
    kind, data = connection.ask(
        Command.CONDITIONAL_APPEND,
        lambda number: writer.bytes + struct.pack(">qq", 1, offset) + framed + _LONG.pack(number),
    )
    if (refused := refusal(kind, data)) is not None:
        raise refused[1]
    if kind not in (Command.DATA_APPENDED, Command.CONDITIONAL_CHECK_FAILED):
        raise unexpected(connection, kind, data)
    return kind == Command.DATA_APPENDED


def _new_writer() -> uuid.UUID:
    return uuid.UUID(bytes=SYSTEM_ENVIRONMENT.token(16))


@dataclass(slots=True)
class Appending:
    """One writer of one segment: the store remembers the number of its last event, so that sending again is harmless.

    Attributes:
        sent: blocks that are not acknowledged: number of the last event, of events, and the bytes.
    """

    segment: str
    writer: uuid.UUID = field(default_factory=_new_writer)
    last_number: int = 0
    sent: deque[tuple[int, int, memoryview]] = field(default_factory=deque)


class Appender:
    """Appends to segments of one store over one connection, which is made again when it failed."""

    def __init__(self, place: Place, access: Access) -> None:
        self._place, self._access, self._environment = place, access, access.environment
        self._connection: Connection | None = None
        self._writing: dict[uuid.UUID, Appending] = {}

    def begin(self, segment: str) -> Appending:
        """Begin to append to a segment.

        Raises:
            SegmentError: it is not there, or sealed.
            StorageError
        """
        one = Appending(segment)
        self._writing[one.writer] = one
        try:
            if self._connection is None:
                self._connect()
            else:
                self._set_up(self._connection, one)
        except StorageError:
            self._connect()
        except SegmentError:
            self._writing.pop(one.writer, None)
            raise
        return one

    def append(self, one: Appending, block: memoryview, events_count: int) -> None:
        """Append a block of whole events. Waits only if the store has not acknowledged many blocks.

        Raises:
            SegmentError, StorageError
        """
        assert events_count > 0, "a block has whole events"
        one.last_number += events_count
        # noted before it is sent: ``_connect`` sends from here what was not acknowledged
        one.sent.append((one.last_number, events_count, block))
        if self._connection is None:
            self._connect()
            return
        try:
            self._send(self._connection, one, *one.sent[-1])
            while len(one.sent) > IN_FLIGHT_MAX:
                self._hear(self._connection)
        except StorageError:
            self._connect()

    def flush(self, one: Appending) -> None:
        """Wait until the store has acknowledged everything.

        Raises:
            SegmentError, StorageError
        """
        while one.sent:
            try:
                if self._connection is None:
                    self._connect()
                else:
                    self._hear(self._connection)
            except StorageError:
                self._connect()

    def end(self, one: Appending) -> None:
        """Forget a writer."""
        assert not one.sent, "a writer is forgotten before its events are durable"
        self._writing.pop(one.writer, None)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        """Connect, and send again what is not acknowledged.

        Raises:
            StorageError: the store is away for too long.
        """
        deadline_ms = self._environment.monotonic_ms() + PATIENCE_MS
        while True:
            self.close()
            try:
                connection = Connection(self._place, self._access)
                for one in self._writing.values():
                    self._set_up(connection, one)
                for one in self._writing.values():
                    for block in one.sent:
                        self._send(connection, one, *block)
                self._connection = connection
                return
            except StorageError as error:
                if not error.is_transient or self._environment.monotonic_ms() >= deadline_ms:
                    raise
                self._environment.sleep(PAUSE_S)

    def _set_up(self, connection: Connection, one: Appending) -> None:
        number = connection.next_number()
        connection.send(
            Command.SETUP_APPEND, _LONG.pack(number), one.writer.bytes, utf(one.segment), connection.token()
        )
        while True:
            kind, data = connection.expect()
            if kind == Command.APPEND_SETUP:
                break
            self._handle(connection, kind, data)
        found = Fields(data)
        found.long()
        found.text()
        found.id()
        # the store says what it has: of some blocks only the acknowledgement was lost, and they are not sent again
        self._drop(one, found.long())

    def _send(self, connection: Connection, one: Appending, last: int, events_count: int, block: memoryview) -> None:
        number = connection.next_number()
        connection.send(Command.APPEND_BLOCK, one.writer.bytes, block)
        end = struct.pack(">iiiqq", len(block), 0, events_count, last, number)
        connection.send(Command.APPEND_BLOCK_END, one.writer.bytes, end)

    def _hear(self, connection: Connection) -> None:
        self._handle(connection, *connection.expect())

    def _handle(self, connection: Connection, kind: int, data: bytes) -> None:
        if (refused := refusal(kind, data)) is not None:
            if refused[1].kind is Command.WRONG_HOST:
                raise StorageError("write to", connection.name, str(refused[1]))
            raise refused[1]
        if kind != Command.DATA_APPENDED:
            raise unexpected(connection, kind, data)
        fields = Fields(data)
        one = self._writing.get(fields.id())
        if one is not None:
            self._drop(one, fields.long())

    def _drop(self, one: Appending, last: int) -> None:
        while one.sent and one.sent[0][0] <= last:
            one.sent.popleft()


def unexpected(connection: Connection, kind: int, data: bytes) -> StorageError:
    """Return the error that says what a store has answered instead."""
    if kind == Command.AUTH_TOKEN_CHECK_FAILED:
        return _refused_token(connection, data)
    text = "".join(sign for sign in data.decode(errors="ignore") if sign.isprintable())
    return StorageError("talk to", connection.name, f"answer {kind}: {text[:300]}")


def _refused_token(connection: Connection, data: bytes) -> StorageError:
    """Forget a token; another one is made for the next connection, unless the user lacks a right."""
    connection.access.forget_token()
    connection.close()
    is_expired = data.endswith(_EXPIRED)
    why = "the token has expired" if is_expired else "the user may not read and write this stream, or has no login"
    return StorageError("talk to", connection.name, why, is_transient=is_expired)
