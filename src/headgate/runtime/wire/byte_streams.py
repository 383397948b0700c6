"""Byte streams under a connection: plain TCP, and TLS over it.

Full duplex: one thread may receive while another sends. A peer that falls silent, because a cable was pulled or a
machine lost its power, fails here (CN15, docs/spec/connections.md). Python's ``SSLSocket`` is not full duplex
(OpenSSL forbids two threads in one session), so TLS runs on memory buffers under a lock that is never held while the
socket blocks (SE14).
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
from collections.abc import Sequence
from typing import Any, cast

from headgate.runtime.surroundings import PROCESS, Surroundings

SILENCE_S_MAX = 30
"""Within about this time a connection fails if the other end's system answers nothing any more (CN15)."""

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
    credit bounds it, so that is a process that stands still, and the driver has noticed it long before (CN13).
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
