"""Authenticated connections between processes of one job: connect, listen, send, receive.

Counterpart: ``codec.handshake`` decides who is let in; ``runtime.control`` and ``runtime.exchange`` use the
connections. Rules N1–N10: docs/spec/connections.md. Everything blocks; ``close`` from any thread ends the waiting.
Never interprets what it carries.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from headgate.codec.frames import Buffer
from headgate.codec.handshake import NONCE_BYTES, ClientHandshake, Handshake, Purpose, ServerHandshake
from headgate.codec.messages import MESSAGE_BYTES_MAX
from headgate.errors import CorruptionError, ProtocolViolation

HANDSHAKE_SECONDS = 5.0
"""Deadline of a whole handshake, however slowly its bytes drip in (N3)."""
PENDING_MAX = 64
"""Connections that may be in their handshake at a time; one more closes the oldest (N5)."""

_BUFFER_BYTES = 1 << 16
_PARTS_MAX = 512
"""Parts per ``sendmsg``: half of Linux's IOV_MAX."""
_RECORD = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS for both roles of a process; the job's secret still authenticates."""

    client: ssl.SSLContext
    server: ssl.SSLContext


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

    def __init__(self, stream: socket.socket, peer: str) -> None:
        self.peer = peer
        self.bytes_out = 0
        self.bytes_in = 0
        self._stream = stream
        reader = stream.makefile("rb", buffering=_BUFFER_BYTES)
        assert isinstance(reader, io.BufferedReader)
        self._reader = reader
        self._send_lock = threading.Lock()
        self._close_lock = threading.Lock()
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
                self.bytes_out += _send_all(self._stream, views)
            except (OSError, ValueError) as error:
                raise ConnectionLost(self.peer, _text(error)) from error

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view``. Bytes are read ahead only into a small buffer.

        Raises:
            ConnectionLost: also when the other side closes in the middle or before.
        """
        filled = 0
        while filled < len(view):
            try:
                count = self._reader.readinto(view[filled:])
            except (OSError, ValueError) as error:
                raise ConnectionLost(self.peer, _text(error)) from error
            if not count:
                raise ConnectionLost(self.peer, "it was closed by the other side")
            filled += count
        self.bytes_in += filled

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
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close for good. Idempotent, from any thread."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.interrupt()
        with self._send_lock:
            self._stream.close()
        self._reader.close()


def connect(
    host: str,
    port: int,
    secret: bytes,
    purpose: Purpose,
    *,
    timeout_seconds: float = HANDSHAKE_SECONDS,
    tls: Tls | None = None,
) -> Connection:
    """Connect and authenticate.

    Raises:
        ConnectionLost: nobody there, too slow, or not a process of this job.
    """
    peer = f"{host}:{port}"
    deadline = time.monotonic() + timeout_seconds
    try:
        stream = socket.create_connection((host, port), timeout=timeout_seconds)
    except OSError as error:
        raise ConnectionLost(peer, _text(error)) from error
    try:
        if tls is not None:
            stream = tls.client.wrap_socket(stream, server_hostname=host)
        machine = ClientHandshake(secret, purpose, secrets.token_bytes(NONCE_BYTES))
        stream.sendall(machine.start())
        _shake_hands(stream, machine, deadline)
        return _established(stream, peer)
    except (OSError, ProtocolViolation, ConnectionLost) as error:
        stream.close()
        raise ConnectionLost(peer, f"not let in: {_text(error)}") from error
    except BaseException:
        stream.close()
        raise


class Listener:
    """Accepts connections of this job on one port; everything else is closed without an answer (N4).

    ``on_connection`` is called in a thread of its own per connection, which it may keep.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        on_connection: Callable[[Connection], None],
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        tls: Tls | None = None,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._on_connection = on_connection
        self._name = name
        self._handshake_seconds = handshake_seconds
        self._tls = tls
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}
        self._is_closed = False
        self.refused_count = 0
        self._socket = socket.create_server((host, port), backlog=128)
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept_loop, name=f"{name}-accept", daemon=True)
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
                socket.create_connection((self.host, self.port), timeout=1.0).close()
            self._thread.join()
        self._socket.close()

    def _accept_loop(self) -> None:
        while not self._is_closed:
            try:
                stream, address = self._socket.accept()
            except OSError:  # closed, or out of descriptors: the loop must survive that
                if not self._is_closed:
                    time.sleep(0.05)
                continue
            if self._is_closed:
                stream.close()
                return
            self._admit(stream)
            peer = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._serve, args=(stream, peer), name=f"{self._name}-{peer}", daemon=True)
            try:
                thread.start()
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

    def _serve(self, stream: socket.socket, peer: str) -> None:
        raw = stream
        try:
            deadline = time.monotonic() + self._handshake_seconds
            stream.settimeout(self._handshake_seconds)
            if self._tls is not None:
                stream = self._tls.server.wrap_socket(stream, server_side=True)
            machine = ServerHandshake(self._secret, self._purpose, secrets.token_bytes(NONCE_BYTES))
            _shake_hands(stream, machine, deadline)
            connection = _established(stream, peer)
        except (OSError, ValueError, ProtocolViolation, ConnectionLost):
            with self._lock:
                self.refused_count += 1
            stream.close()
            return
        finally:
            self._forget(raw)
        if self._is_closed:
            connection.close()
            return
        self._on_connection(connection)


def _shake_hands(stream: socket.socket, machine: Handshake, deadline: float) -> None:
    while not machine.is_complete:
        answer = machine.receive(_receive_exactly(stream, machine.wanted_bytes, deadline))
        if answer:
            stream.sendall(answer)


def _receive_exactly(stream: socket.socket, size_bytes: int, deadline: float) -> bytes:
    """Read exactly ``size_bytes`` before ``deadline``: nothing that follows the handshake is consumed."""
    data = b""
    while len(data) < size_bytes:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the handshake took too long")
        stream.settimeout(remaining)
        chunk = stream.recv(size_bytes - len(data))
        if not chunk:
            raise ConnectionResetError("closed by the other side during the handshake")
        data += chunk
    return data


def _established(stream: socket.socket, peer: str) -> Connection:
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(stream, peer)


def _send_all(stream: socket.socket, views: list[memoryview]) -> int:
    total = sum(len(view) for view in views)
    if isinstance(stream, ssl.SSLSocket):
        stream.sendall(b"".join(views))
        return total
    start = 0
    while start < len(views):
        sent = stream.sendmsg(views[start : start + _PARTS_MAX])
        while start < len(views) and sent >= len(views[start]):
            sent -= len(views[start])
            start += 1
        if sent:
            views[start] = views[start][sent:]
    return total


def _interrupt(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
