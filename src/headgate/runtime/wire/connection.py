"""Authenticated connections between processes of one job, over plain TCP or TLS.

``codec.handshake`` decides which peer is let in; ``control`` and ``exchange`` use the connections. A newcomer is a
stranger until its first message shows that it knows the job's secret; a flood of strangers cannot push out a
handshake that has begun, and the accepting thread never waits for a peer. Everything else blocks; ``close`` from any
thread ends the waiting. Source: docs/spec/connections.md. Never hands out a byte that is not
authentic.

Streams are full duplex: one thread may receive while another sends. A peer that falls silent, because a cable was
pulled or a machine lost its power, fails here. Python's ``SSLSocket`` is not full duplex (OpenSSL forbids two
threads in one session), so TLS runs on memory buffers under a lock that is never held while the socket blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import xxhash

from headgate.codec.frames import Buffer
from headgate.codec.handshake import (
    NONCE_BYTES,
    TAG_BYTES,
    ClientHandshake,
    FrameMac,
    Handshake,
    Purpose,
    ServerHandshake,
)
from headgate.codec.messages import MESSAGE_BYTES_MAX
from headgate.environment import Thread
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.tls import Tls

SILENCE_S_MAX = 30
"""Within about this time a connection fails if the other end's system answers nothing any more."""

_PROBES_COUNT = 3
_PARTS_MAX = 512
"""Parts per ``sendmsg``: half of Linux's IOV_MAX."""


class PlainStream(io.RawIOBase):
    """A TCP socket. Owns it."""

    def __init__(self, stream: socket.socket, around: Surroundings = PROCESS) -> None:
        super().__init__()
        self._socket = stream
        self._around = around
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_silence(stream)

    def readable(self) -> bool:
        """For ``io.BufferedReader``."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive what is there, at least one byte; 0 when the other side closed."""
        return self._socket.recv_into(buffer)

    def send_parts(self, parts: Sequence[memoryview]) -> None:
        """Send all parts in order, without joining them."""
        views = list(parts)
        start = 0
        while start < len(views):
            # the system may take a part of it only: go on after the last byte that it took
            sent = self._socket.sendmsg(views[start : start + _PARTS_MAX])
            while start < len(views) and sent >= len(views[start]):
                sent -= len(views[start])
                start += 1
            if sent:
                views[start] = views[start][sent:]

    def set_deadline(self, deadline: float | None) -> None:
        """Let receiving and sending fail after ``deadline`` (monotonic seconds; None: never).

        Raises:
            TimeoutError: it has passed.
        """
        remaining = None if deadline is None else deadline - self._around.monotonic_ns() / 1e9
        if remaining is not None and remaining <= 0:
            raise TimeoutError("the handshake took too long")
        self._socket.settimeout(remaining)

    def interrupt(self) -> None:
        """End every waiting call, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()


def _notice_silence(stream: socket.socket) -> None:
    """Let Linux ask the other end's system whether it is there, and end the connection if it does not answer.

    An idle connection is probed; on a busy one what was sent must be acknowledged in time. Linux also gives up a peer
    that takes nothing for so long although its system answers. A receiver of ours takes what comes at once, because
    credit bounds it, so that is a process that stands still, and the driver has noticed it long before.
    """
    probe_s = SILENCE_S_MAX // (_PROBES_COUNT + 1) or 1
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES_COUNT)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S_MAX * 1000)


_CHUNK_BYTES = 1 << 16


class TlsStream(PlainStream):
    """TLS over a TCP socket. Call ``handshake`` first."""

    def __init__(
        self, stream: socket.socket, context: ssl.SSLContext, server_name: str | None, around: Surroundings = PROCESS
    ) -> None:
        super().__init__(stream, around)
        self._arrived, self._departing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(
            self._arrived, self._departing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = around.lock()  # the session; never held while the socket blocks
        self._send_lock = around.lock()  # order of the encrypted bytes; taken before _lock

    def handshake(self, deadline: float) -> None:
        """Agree on keys before ``deadline``."""
        while True:
            self.set_deadline(deadline)
            try:
                self._session.do_handshake()
                self._flush()
                return
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    raise ConnectionResetError("closed by the other side during the TLS handshake") from None

    def peer_certificate(self) -> bytes:
        """Return the other side's certificate (DER), trusted or not. After ``handshake``."""
        return self._session.getpeercert(binary_form=True) or b""

    def readinto(self, buffer: Any) -> int:
        """Receive what is there, at least one byte; 0 when the other side closed."""
        view = memoryview(buffer).cast("B")
        while True:
            try:
                with self._lock:
                    return cast(int, self._session.read(len(view), view))
            except ssl.SSLWantReadError:
                if self._departing.pending:  # an answer of the protocol itself, such as a key update
                    self._flush()
                if not self._fill():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    def send_parts(self, parts: Sequence[memoryview]) -> None:
        """Send all parts in order."""
        for part in parts:
            # in chunks, so that a large batch does not hold the session for long: a receiving thread needs it, too
            for start in range(0, len(part), _CHUNK_BYTES):
                with self._send_lock:
                    with self._lock:
                        self._session.write(part[start : start + _CHUNK_BYTES])
                        encrypted = self._departing.read()
                    self._socket.sendall(encrypted)

    def _fill(self) -> bool:
        data = self._socket.recv(_CHUNK_BYTES)
        with self._lock:
            if data:
                self._arrived.write(data)
            else:
                self._arrived.write_eof()
        return bool(data)

    def _flush(self) -> None:
        with self._send_lock:
            with self._lock:
                encrypted = self._departing.read()
            if encrypted:
                self._socket.sendall(encrypted)


def client_stream(
    stream: socket.socket, host: str, context: ssl.SSLContext | None, deadline: float, around: Surroundings = PROCESS
) -> PlainStream:
    """Return the stream of the side that connected to ``host``; with TLS its keys are agreed."""
    if context is None:
        return PlainStream(stream, around)
    return _agreed(TlsStream(stream, context, host, around), deadline)


def server_stream(
    stream: socket.socket, context: ssl.SSLContext | None, deadline: float, around: Surroundings = PROCESS
) -> PlainStream:
    """Return the stream of the side that accepted; with TLS its keys are agreed."""
    if context is None:
        return PlainStream(stream, around)
    return _agreed(TlsStream(stream, context, None, around), deadline)


def _agreed(stream: TlsStream, deadline: float) -> TlsStream:
    stream.handshake(deadline)
    return stream


HANDSHAKE_SECONDS = 5.0
"""Deadline of a whole handshake, however slowly its bytes drip in."""

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
    """An authenticated connection. Any thread may send; one thread at a time may receive.

    What travels are *blocks*: what one argument of ``send`` holds, one ``receive_into`` takes. Its tag follows
    each block, or TLS authenticates instead.
    """

    def __init__(
        self, stream: PlainStream, peer: str, keys: tuple[bytes, bytes] | None, around: Surroundings = PROCESS
    ) -> None:
        """``keys``: of what goes out and of what comes in; None under TLS."""
        self.peer = peer
        self._mac_out = FrameMac(keys[0]) if keys else None
        self._mac_in = FrameMac(keys[1]) if keys else None
        self._tag = bytearray(TAG_BYTES)
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

    def send(self, *blocks: Iterable[Buffer]) -> None:
        """Send blocks, each the concatenation of its parts, without joining them. Blocks while the peer does not read.

        Raises:
            ConnectionLost
        """
        mac = self._mac_out
        with self._send_lock:
            # tagged under the lock: tags are numbered, so blocks must leave in the order in which they are tagged
            views: list[memoryview] = []
            for block in blocks:
                parts = [view for part in block if len(view := memoryview(part).cast("B"))]
                views += parts
                self.bytes_out += sum(map(len, parts))
                if mac is not None:
                    views.append(memoryview(mac.tag(parts)))
            try:
                # ValueError: the stream was closed here meanwhile. What the peer got of a block is cut off with the
                # connection.
                self._stream.send_parts(views)
            except (OSError, ValueError) as error:
                raise ConnectionLost(self.peer, _text(error)) from error

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next block, which has exactly its size.

        Raises:
            ConnectionLost: also when the other side closes in the middle or before.
            ProtocolViolation: it is not what the peer sent, or not what was due; the connection must be closed.
        """
        view = view.cast("B")
        with self._receive_lock:
            self._fill(view)
            if self._mac_in is not None:
                self._fill(memoryview(self._tag))
                self._check_tag(self._mac_in, view)
        self.bytes_in += len(view)

    def _check_tag(self, mac: FrameMac, view: memoryview) -> None:
        if not hmac.compare_digest(self._tag, mac.tag([view])):
            raise ProtocolViolation(
                "connection",
                f"what came from {self.peer} is not what was sent there: it was changed, repeated, moved or inserted "
                "on the way",
            )

    def _fill(self, view: memoryview) -> None:
        """Read ahead only into a small buffer."""
        filled = 0
        while filled < len(view):
            try:
                count = self._receive_some(view[filled:])
            except (OSError, ValueError) as error:
                raise ConnectionLost(self.peer, _text(error)) from error
            if not count:
                raise ConnectionLost(self.peer, "it was closed by the other side")
            filled += count

    def _receive_some(self, view: memoryview) -> int:
        """Take what was received ahead; else receive, large parts straight into ``view``."""
        if self._ahead_from == self._ahead_to:
            if len(view) >= _BUFFER_BYTES:
                return self._stream.readinto(view)
            # 0 at the end of the stream, which is then also what is returned below
            self._ahead_from, self._ahead_to = 0, self._stream.readinto(self._ahead)
        count = min(len(view), self._ahead_to - self._ahead_from)
        view[:count] = self._ahead[self._ahead_from : self._ahead_from + count]
        self._ahead_from += count
        return count

    def send_message(self, payload: bytes) -> None:
        """Send ``payload`` as one record with length and checksum, a block each.

        Raises:
            ConnectionLost
        """
        self.send((_RECORD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)),), (payload,))

    def receive_message(self, size_bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
        """Return the next record.

        Raises:
            ConnectionLost
            ProtocolViolation: longer than ``size_bytes_max``; nothing was allocated for it.
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
        # interrupted calls leave first: a descriptor that is closed under them might by then belong to another file
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
        ConnectionLost: no peer there, too slow, or not a process of this job.
    """
    peer = f"{host}:{port}"
    context = (tls or Tls()).client(host)
    deadline = now_s(around) + timeout_seconds
    try:
        stream = around.connect(host, port, timeout_seconds)
    except OSError as error:
        raise ConnectionLost(peer, _text(error)) from error
    try:
        machine = ClientHandshake(secret, purpose, around.token(NONCE_BYTES), is_tls=context is not None)
        stream.sendall(machine.start())  # in front of TLS: strangers get no further
        secured = client_stream(stream, host, context, deadline, around)
        if isinstance(secured, TlsStream):
            machine.bind(secured.peer_certificate())
        finish_handshake(secured, machine, deadline)
        return Connection(secured, peer, None if context is not None else machine.keys, around)
    except (OSError, ValueError, ProtocolViolation) as error:
        stream.close()
        raise ConnectionLost(peer, f"not let in: {_text(error)}") from error
    except BaseException:
        stream.close()
        raise


def finish_handshake(stream: PlainStream, machine: Handshake, deadline: float) -> None:
    """Run the rest of the handshake before ``deadline``; afterwards there is none."""
    while not machine.is_complete:
        answer = machine.receive(_receive_exactly(stream, machine.wanted_bytes, deadline))
        if answer:
            send_before(stream, answer, deadline)
    stream.set_deadline(None)


def send_before(stream: PlainStream, data: bytes, deadline: float) -> None:
    """Send ``data`` before ``deadline``."""
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


def now_s(around: Surroundings) -> float:
    """Return the seconds of the clock by which deadlines go."""
    return around.monotonic_ns() / 1e9


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


STRANGERS_MAX = 256
"""Connections that have not shown the secret; one more closes the oldest of them."""
HANDSHAKES_MAX = 512
"""Handshakes of those that have shown it; one more is closed, and tries again."""
NONCES_MAX = 1 << 16
"""First messages remembered, so that one recorded on the way cannot be used again."""

_PAUSE_SECONDS = 0.05


class Listener:
    """Accepts connections of this job on one port.

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
        """Listen; without ``tls`` as if the user had configured nothing.

        Raises:
            UsageError: the user's certificate cannot be used.
        """
        self._around = around
        self._secret = secret
        self._purpose = purpose
        self._on_connection = on_connection
        self._name = name
        self._handshake_seconds = handshake_seconds
        self._tls = (tls or Tls()).server(host)
        self._lock = around.lock()
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._handshakes: set[socket.socket] = set()
        self._nonces: dict[bytes, None] = {}  # oldest first
        self._is_closed = False
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
            unfinished = [*self._strangers, *self._handshakes]
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for stream in unfinished:
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
                    self._around.sleep(_PAUSE_SECONDS)  # who has just come can show the secret meanwhile
                    self._close_oldest_stranger()
                continue
            with self._lock:  # close() knows of every stranger that came before
                is_closed = self._is_closed
                if not is_closed:
                    self._strangers[stream] = None
                is_full = len(self._strangers) > STRANGERS_MAX
            if is_closed:
                stream.close()
                return
            if is_full:
                self._close_oldest_stranger()
            self._start(stream, f"{address[0]}:{address[1]}")

    def _start(self, stream: socket.socket, peer: str) -> None:
        # the thread is an argument of itself, and exists only after it was made: hence the list
        served: list[Thread] = []
        served.append(self._around.thread(self._serve, f"{self._name}-{peer}", stream, peer, served))
        try:
            served[0].start()
        except RuntimeError:  # no more threads: refuse this one, keep listening
            self._forget(stream)
            stream.close()

    def _close_oldest_stranger(self) -> None:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]  # at once: what is on its way out takes no place of others
        if oldest is not None:
            _interrupt(oldest)

    def _serve(self, stream: socket.socket, peer: str, thread: list[Thread]) -> None:
        try:
            connection = self._shake_hands(stream, peer)
        except (OSError, ValueError, ConnectionLost, ProtocolViolation):
            stream.close()
            return
        finally:
            self._forget(stream)
        if self._is_closed:
            # close() interrupts handshakes only: a connection that has just become one ends here
            connection.close()
            return
        self._on_connection(connection, thread[0])

    def _shake_hands(self, stream: socket.socket, peer: str) -> Connection:
        deadline = now_s(self._around) + self._handshake_seconds
        tls = self._tls
        machine = ServerHandshake(self._secret, self._purpose, self._around.token(NONCE_BYTES), is_tls=tls is not None)
        if tls is not None:
            machine.bind(tls.certificate)
        answer = machine.receive(self._first_message(stream, machine, deadline))
        # it has shown the secret: from here on no flood of strangers pushes it out
        self._know(stream, machine.client_nonce)
        secured = server_stream(stream, None if tls is None else tls.context, deadline, self._around)
        send_before(secured, answer, deadline)
        finish_handshake(secured, machine, deadline)
        of_client, of_server = machine.keys
        return Connection(secured, peer, None if tls is not None else (of_server, of_client), self._around)

    def _first_message(self, stream: socket.socket, machine: ServerHandshake, deadline: float) -> bytes:
        data = bytearray(machine.wanted_bytes)
        filled = 0
        while filled < len(data):
            remaining = deadline - now_s(self._around)
            if remaining <= 0:
                raise TimeoutError("the handshake took too long")
            stream.settimeout(remaining)
            count = stream.recv_into(memoryview(data)[filled:])
            filled += count
            # refused at its first wrong byte: a stranger holds no place longer than that
            if not count or not machine.can_begin(data[:filled]):
                raise ConnectionResetError("not a process of this job")
        return bytes(data)

    def _know(self, stream: socket.socket, nonce: bytes) -> None:
        """The peer is of this job: from now on it is not closed to make room.

        Raises:
            ProtocolViolation: its message was used before, or there are too many.
        """
        with self._lock:
            if nonce in self._nonces or len(self._handshakes) >= HANDSHAKES_MAX or stream not in self._strangers:
                raise ProtocolViolation("listener", "a first message that came before, or too many handshakes")
            self._nonces[nonce] = None
            if len(self._nonces) > NONCES_MAX:
                del self._nonces[next(iter(self._nonces))]
            del self._strangers[stream]
            self._handshakes.add(stream)

    def _forget(self, stream: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(stream, None)
            self._handshakes.discard(stream)


def _interrupt(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
