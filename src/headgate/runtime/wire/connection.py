"""Authenticated connections between processes of one job: connect, send, receive.

Counterparts: ``codec.handshake`` decides who is let in, ``runtime.wire.listener`` accepts; ``runtime.wire.control`` and
``runtime.wire.exchange`` use the connections. Rules CN1–CN10 and SE13: docs/spec/connections.md. Everything blocks;
``close`` from any thread ends the waiting. Never interprets what it carries, and never hands out a byte that is not
authentic.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable

import xxhash

from headgate.codec.frame_mac import TAG_BYTES, FrameMac
from headgate.codec.frames import Buffer
from headgate.codec.handshake import NONCE_BYTES, ClientHandshake, Handshake, Purpose
from headgate.codec.messages import MESSAGE_BYTES_MAX
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.runtime.wire.byte_streams import PlainStream
from headgate.runtime.wire.tls_streams import TlsStream, client_stream
from headgate.tls import Tls

HANDSHAKE_SECONDS = 5.0
"""Deadline of a whole handshake, however slowly its bytes drip in (CN3)."""

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

    What travels are *blocks*: what one argument of ``send`` holds, one ``receive_into`` takes. Behind each block stands
    its tag (SE13), or TLS authenticates instead.
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
            views: list[memoryview] = []
            for block in blocks:
                parts = [view for part in block if len(view := memoryview(part).cast("B"))]
                views += parts
                self.bytes_out += sum(map(len, parts))
                if mac is not None:
                    views.append(memoryview(mac.tag(parts)))
            try:
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
            self._ahead_from, self._ahead_to = 0, self._stream.readinto(self._ahead)
        count = min(len(view), self._ahead_to - self._ahead_from)
        view[:count] = self._ahead[self._ahead_from : self._ahead_from + count]
        self._ahead_from += count
        return count

    def send_message(self, payload: bytes) -> None:
        """Send ``payload`` as one record with length and checksum (CN7), a block each.

        Raises:
            ConnectionLost
        """
        self.send((_RECORD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)),), (payload,))

    def receive_message(self, size_bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
        """Return the next record.

        Raises:
            ConnectionLost
            ProtocolViolation: longer than ``size_bytes_max``; nothing was allocated for it (CN8).
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
    context = (tls or Tls()).client(host)
    deadline = now_s(around) + timeout_seconds
    try:
        stream = around.connect(host, port, timeout_seconds)
    except OSError as error:
        raise ConnectionLost(peer, _text(error)) from error
    try:
        machine = ClientHandshake(secret, purpose, around.token(NONCE_BYTES), is_tls=context is not None)
        stream.sendall(machine.start())  # in front of TLS: strangers get no further (SE10)
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
