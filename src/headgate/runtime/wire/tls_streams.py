"""TLS as a byte stream under a connection, and which kind of stream a connection gets.

Used by ``connection`` and ``listener`` only. Python's ``SSLSocket`` is not full duplex (OpenSSL forbids two threads in
one session), so TLS runs here on memory buffers under a lock that is never held while the socket blocks. Rule SE14:
docs/spec/connections.md.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, cast

from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.runtime.wire.byte_streams import PlainStream

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
