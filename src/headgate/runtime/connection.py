"""Authenticated connections between processes of one job: connect, listen, send, receive.

Counterpart: ``codec.handshake`` decides who is let in; ``runtime.control`` and ``runtime.exchange`` use the
connections. Rules N1–N10: docs/spec/connections.md. Everything blocks; ``close`` from any thread ends the waiting.
Never interprets what it carries.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable

import xxhash

from headgate.codec.frames import Buffer
from headgate.codec.handshake import NONCE_BYTES, ClientHandshake, Handshake, Purpose, ServerHandshake
from headgate.codec.messages import MESSAGE_BYTES_MAX
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.runtime.process import PROCESS
from headgate.runtime.stream import PlainStream, Tls, client_stream, server_stream
from headgate.runtime.surroundings import Surroundings, Thread

HANDSHAKE_SECONDS = 5.0
"""Deadline of a whole handshake, however slowly its bytes drip in (N3)."""
PENDING_MAX = 64
"""Connections that may be in their handshake at a time; one more closes the oldest (N5)."""

_BUFFER_BYTES = 1 << 16
_RECORD = struct.Struct("<IQ")


class ConnectionLost(Exception):  # noqa: N818 (an outcome, like store.storage.NotFound)
    """The other side is gone or was never there. Expected in a distributed system: not a HeadgateError."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"connection with {self.peer} is lost: {self.reason}"


class Connection:
    """An authenticated connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, stream: PlainStream, peer: str, around: Surroundings = PROCESS) -> None:
        self.peer = peer
        self.bytes_out = 0
        self.bytes_in = 0
        self._stream = stream
        self._ahead = memoryview(bytearray(_BUFFER_BYTES))
        self._ahead_from = self._ahead_to = 0  # what was received ahead and not taken yet
        self._receive_lock = around.lock()
        self._send_lock = around.lock()
        self._close_lock = around.lock()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called here (not: whether the other side closed)."""
        return self._is_closed

    def send(self, parts: Iterable[Buffer]) -> None:
        """Send the concatenation of ``parts`` without joining them. Blocks while the peer does not read.

        Raises:
            ConnectionLost
        """
        views = [view for part in parts if len(view := memoryview(part).cast("B"))]
        with self._send_lock:
            try:
                self._stream.send_parts(views)
                self.bytes_out += sum(map(len, views))
            except (OSError, ValueError) as error:
                raise ConnectionLost(self.peer, _text(error)) from error

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view``. Bytes are read ahead only into a small buffer.

        Raises:
            ConnectionLost: also when the other side closes in the middle or before.
        """
        view = view.cast("B")
        filled = 0
        with self._receive_lock:
            while filled < len(view):
                try:
                    count = self._receive_some(view[filled:])
                except (OSError, ValueError) as error:
                    raise ConnectionLost(self.peer, _text(error)) from error
                if not count:
                    raise ConnectionLost(self.peer, "it was closed by the other side")
                filled += count
        self.bytes_in += filled

    def _receive_some(self, view: memoryview) -> int:
        """Take what was received ahead; else receive, large parts straight into ``view``."""
        if self._ahead_from == self._ahead_to:
            if len(view) >= _BUFFER_BYTES:
                return self._stream.readinto(view)
            self._ahead_from, self._ahead_to = 0, self._stream.readinto(self._ahead)
        count = min(len(view), self._ahead_to - self._ahead_from)
        view[:count] = self._ahead[self._ahead_from : self._ahead_from + count]
        self._ahead_from += count
        return count

    def send_message(self, payload: bytes) -> None:
        """Send ``payload`` as one record with length and checksum (N7).

        Raises:
            ConnectionLost
        """
        self.send((_RECORD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)), payload))

    def receive_message(self, size_bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
        """Return the next record.

        Raises:
            ConnectionLost
            ProtocolViolation: longer than ``size_bytes_max``; nothing was allocated for it (N8).
            CorruptionError: its checksum does not match.
        """
        head = bytearray(_RECORD.size)
        self.receive_into(memoryview(head))
        size_bytes, checksum = _RECORD.unpack(head)
        if size_bytes > size_bytes_max:
            raise ProtocolViolation(
                "connection", f"{self.peer} announced {size_bytes} bytes; at most {size_bytes_max} are allowed"
            )
        payload = bytearray(size_bytes)
        self.receive_into(memoryview(payload))
        if (found := xxhash.xxh3_64_intdigest(payload)) != checksum:
            raise CorruptionError(f"message from {self.peer}", 0, f"{checksum:016x}", f"{found:016x}")
        return bytes(payload)

    def interrupt(self) -> None:
        """End every waiting ``send`` and ``receive`` here and there; resources stay until ``close``."""
        self._stream.interrupt()

    def close(self) -> None:
        """Close for good. Idempotent, from any thread."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.interrupt()
        with self._send_lock, self._receive_lock:
            self._stream.close()


def connect(
    host: str,
    port: int,
    secret: bytes,
    purpose: Purpose,
    *,
    timeout_seconds: float = HANDSHAKE_SECONDS,
    tls: Tls | None = None,
    around: Surroundings = PROCESS,
) -> Connection:
    """Connect and authenticate.

    Raises:
        ConnectionLost: nobody there, too slow, or not a process of this job.
    """
    peer = f"{host}:{port}"
    deadline = _now_s(around) + timeout_seconds
    try:
        stream = around.connect(host, port, timeout_seconds)
    except OSError as error:
        raise ConnectionLost(peer, _text(error)) from error
    try:
        secured = client_stream(stream, host, tls, deadline, around)
        machine = ClientHandshake(secret, purpose, around.token(NONCE_BYTES))
        _send(secured, machine.start(), deadline)
        return _established(secured, machine, peer, deadline, around)
    except (OSError, ValueError, ProtocolViolation) as error:
        stream.close()
        raise ConnectionLost(peer, f"not let in: {_text(error)}") from error
    except BaseException:
        stream.close()
        raise


class Listener:
    """Accepts connections of this job on one port; everything else is closed without an answer (N4).

    ``on_connection`` is called with each connection and with its thread, in which it runs and which it may keep.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        on_connection: Callable[[Connection, Thread], None],
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        tls: Tls | None = None,
        around: Surroundings = PROCESS,
    ) -> None:
        self._around = around
        self._secret = secret
        self._purpose = purpose
        self._on_connection = on_connection
        self._name = name
        self._handshake_seconds = handshake_seconds
        self._tls = tls
        self._lock = around.lock()
        self._pending: dict[socket.socket, None] = {}
        self._is_closed = False
        self.refused_count = 0
        self._socket = around.listen(host, port)
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._thread = around.thread(self._accept_loop, f"{name}-accept")
        self._thread.start()

    def close(self) -> None:
        """Stop listening, drop unfinished handshakes. Established connections are not touched. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pending = list(self._pending)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for stream in pending:
            _interrupt(stream)
        self._thread.join(0.2)
        if self._thread.is_alive():  # systems where shutdown does not end an accept: a connection does
            with contextlib.suppress(OSError):
                self._around.connect(self.host, self.port, 1.0).close()
            self._thread.join()
        self._socket.close()

    def _accept_loop(self) -> None:
        while not self._is_closed:
            try:
                stream, address = self._socket.accept()
            except OSError:  # closed, or out of descriptors: the loop must survive that
                if not self._is_closed:
                    self._around.sleep(0.05)
                continue
            if self._is_closed:
                stream.close()
                return
            self._admit(stream)
            peer = f"{address[0]}:{address[1]}"
            served: list[Thread] = []
            served.append(self._around.thread(self._serve, f"{self._name}-{peer}", stream, peer, served))
            try:
                served[0].start()
            except RuntimeError:  # no more threads: refuse this one, keep listening
                self._forget(stream)
                stream.close()

    def _admit(self, stream: socket.socket) -> None:
        """Count ``stream`` as unauthenticated; the oldest of too many goes (N5)."""
        with self._lock:
            self._pending[stream] = None
            if len(self._pending) > PENDING_MAX:
                _interrupt(next(iter(self._pending)))

    def _forget(self, stream: socket.socket) -> None:
        with self._lock:
            self._pending.pop(stream, None)

    def _serve(self, stream: socket.socket, peer: str, thread: list[Thread]) -> None:
        try:
            deadline = _now_s(self._around) + self._handshake_seconds
            stream.settimeout(self._handshake_seconds)
            secured = server_stream(stream, self._tls, deadline, self._around)
            machine = ServerHandshake(self._secret, self._purpose, self._around.token(NONCE_BYTES))
            connection = _established(secured, machine, peer, deadline, self._around)
        except (OSError, ValueError, ProtocolViolation):
            with self._lock:
                self.refused_count += 1
            stream.close()
            return
        finally:
            self._forget(stream)
        if self._is_closed:
            connection.close()
            return
        self._on_connection(connection, thread[0])


def _established(
    stream: PlainStream, machine: Handshake, peer: str, deadline: float, around: Surroundings
) -> Connection:
    """Run the handshake, then return the connection without any deadline."""
    while not machine.is_complete:
        answer = machine.receive(_receive_exactly(stream, machine.wanted_bytes, deadline))
        if answer:
            _send(stream, answer, deadline)
    stream.set_deadline(None)
    return Connection(stream, peer, around)


def _send(stream: PlainStream, data: bytes, deadline: float) -> None:
    stream.set_deadline(deadline)
    stream.send_parts([memoryview(data)])


def _receive_exactly(stream: PlainStream, size_bytes: int, deadline: float) -> bytes:
    """Read exactly ``size_bytes`` before ``deadline``: nothing that follows the handshake is consumed."""
    data = bytearray(size_bytes)
    filled = 0
    while filled < size_bytes:
        stream.set_deadline(deadline)
        count = stream.readinto(memoryview(data)[filled:])
        if not count:
            raise ConnectionResetError("closed by the other side during the handshake")
        filled += count
    return bytes(data)


def _interrupt(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _now_s(around: Surroundings) -> float:
    return around.monotonic_ns() / 1e9


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
