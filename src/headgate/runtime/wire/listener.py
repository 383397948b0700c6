"""Accepts the connections of one job; everybody else is closed without an answer.

Counterpart: ``connection.connect``. A newcomer is a stranger until its first message shows that it knows the job's
secret; strangers make room for each other and for nobody else, so that a flood of them cannot push out a handshake that
has begun. Rules CN3–CN5 and SE10–SE12: docs/spec/connections.md. The accepting thread never waits for a peer.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from headgate.codec.handshake import NONCE_BYTES, Purpose, ServerHandshake
from headgate.errors import ProtocolViolation
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.runtime.wire.connection import (
    HANDSHAKE_SECONDS,
    Connection,
    ConnectionLost,
    finish_handshake,
    now_s,
    send_before,
)
from headgate.runtime.wire.tls_streams import server_stream
from headgate.threads import Thread
from headgate.tls import Tls

STRANGERS_MAX = 256
"""Connections that have not shown the secret; one more closes the oldest of them (CN5)."""
HANDSHAKES_MAX = 512
"""Handshakes of those that have shown it; one more is closed, and tries again (SE12)."""
NONCES_MAX = 1 << 16
"""First messages remembered, so that one recorded on the way cannot be used again (SE11)."""

_PAUSE_SECONDS = 0.05


class Listener:
    """Accepts connections of this job on one port (CN4).

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
            with self._lock:  # whoever closes knows of every stranger that came before
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
                del self._strangers[oldest]  # at once: what is on its way out takes nobody's place
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
            connection.close()
            return
        self._on_connection(connection, thread[0])

    def _shake_hands(self, stream: socket.socket, peer: str) -> Connection:
        deadline = now_s(self._around) + self._handshake_seconds
        tls = self._tls
        machine = ServerHandshake(self._secret, self._purpose, self._around.token(NONCE_BYTES), is_tls=tls is not None)
        if tls is not None:
            machine.bind(tls.certificate)
        answer = machine.receive(self._first_message(stream, machine, deadline))  # SE10
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
            if not count or not machine.can_begin(data[:filled]):
                raise ConnectionResetError("not a process of this job")
        return bytes(data)

    def _know(self, stream: socket.socket, nonce: bytes) -> None:
        """The peer is of this job: from now on it makes room for nobody.

        Raises:
            ProtocolViolation: its message was used before (SE11), or there are too many.
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
