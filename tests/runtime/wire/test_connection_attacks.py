"""Somebody between two processes of a job, and floods of strangers: over real sockets."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headgate.codec.handshake import NONCE_BYTES, PREAUTH_BYTES_MAX, TAG_BYTES, ClientHandshake, Purpose
from headgate.errors import ProtocolViolation
from headgate.model.config import SecurityConfig
from headgate.runtime.wire import connection as listeners
from headgate.runtime.wire.connection import Connection, ConnectionLost, Listener, connect
from headgate.tls import Tls

SECRET = b"s" * 32
WAIT = 300
BLOCK = 8
"""Bytes of each block that the tests send."""
HANDSHAKE_BYTES = (PREAUTH_BYTES_MAX, 32)
"""What a client sends before it is let in: its first message, its proof."""


class Server:
    """A listener that keeps what it accepts."""

    def __init__(self, tls: Tls | None = None, handshake_seconds: float = WAIT) -> None:
        self.accepted: queue.Queue[Connection] = queue.Queue()
        self.opened: list[Connection] = []
        self.listener = Listener(
            SECRET, Purpose.DATA, self.accepted.put, name="attacked", handshake_seconds=handshake_seconds, tls=tls
        )

    def connect(self, port: int | None = None, timeout_seconds: float = WAIT) -> Connection:
        there = port or self.listener.port
        self.opened.append(connect("127.0.0.1", there, SECRET, Purpose.DATA, timeout_seconds=timeout_seconds))
        return self.opened[-1]

    def accept(self) -> Connection:
        self.opened.append(self.accepted.get(timeout=WAIT))
        return self.opened[-1]

    def stranger(self, first: bytes = b"") -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", self.listener.port), timeout=WAIT)
        stream.sendall(first)
        return stream

    def close(self) -> None:
        self.listener.close()
        for connection in self.opened:
            connection.close()


@contextlib.contextmanager
def serving(tls: Tls | None = None, handshake_seconds: float = WAIT) -> Iterator[Server]:
    server = Server(tls, handshake_seconds)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def man_in_the_middle(port: int, change: Callable[[bytes], bytes]) -> Iterator[int]:
    """Relay connections to ``port``; ``change`` gets all that a client sends behind the handshake, 3 blocks at once."""
    listening = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def relay() -> None:
        with contextlib.suppress(OSError):
            near, _ = listening.accept()
            with near, socket.create_connection(("127.0.0.1", port), timeout=WAIT) as far:
                near.settimeout(WAIT)
                back = threading.Thread(target=pump, args=(far, near))
                back.start()
                for size in HANDSHAKE_BYTES:
                    far.sendall(read_exactly(near, size))
                far.sendall(change(read_exactly(near, 3 * (BLOCK + TAG_BYTES))))
                pump(near, far)
                back.join()

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        yield int(listening.getsockname()[1])
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def read_exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        found = stream.recv(size - len(data))
        if not found:
            raise ConnectionResetError
        data += found
    return data


def blocks_of(data: bytes) -> list[bytes]:
    size = BLOCK + TAG_BYTES
    return [data[start : start + size] for start in range(0, len(data), size)]


def changed(data: bytes) -> bytes:
    return data[:BLOCK] + data[BLOCK : -TAG_BYTES - 1] + bytes([data[-TAG_BYTES - 1] ^ 1]) + data[-TAG_BYTES:]


def repeated(data: bytes) -> bytes:
    first, second, third = blocks_of(data)
    return first + second + second + third


def moved(data: bytes) -> bytes:
    first, second, third = blocks_of(data)
    return first + third + second


def left_out(data: bytes) -> bytes:
    first, _, third = blocks_of(data)
    return first + third


def inserted(data: bytes) -> bytes:
    return blocks_of(data)[0] + b"payments" + bytes(TAG_BYTES) + data


ATTACKS = {"changed": changed, "repeated": repeated, "moved": moved, "left out": left_out, "inserted": inserted}


def read_under_attack(attack: str) -> None:
    """Send three blocks through somebody who does ``attack``; nothing that is not due may be delivered."""
    sent = [f"block {number:02}".encode() for number in range(3)]
    delivered: list[bytes] = []
    with (
        serving() as server,
        man_in_the_middle(server.listener.port, ATTACKS[attack]) as port,
        contextlib.closing(server.connect(port)) as one,
        contextlib.closing(server.accept()) as other,
    ):
        one.send(*[[block] for block in sent])
        one.close()  # a reader that is not stopped by a tag comes to the end at once
        with pytest.raises(ProtocolViolation, match="changed, repeated, moved or inserted"):  # noqa: PT012
            for _ in range(4):
                view = bytearray(BLOCK)
                other.receive_into(memoryview(view))
                delivered.append(bytes(view))
    assert delivered == sent[: len(delivered)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_somebody_in_between_does_ends_the_connection_before_it_is_delivered(attack: str) -> None:
    read_under_attack(attack)


def test_somebody_in_between_who_only_relays_is_not_noticed() -> None:
    with serving() as server, man_in_the_middle(server.listener.port, lambda data: data) as port:
        one = server.connect(port)
        other = server.accept()
        one.send([b"block", b" 00"], [b"block 01"], [b"block 02"])
        view = bytearray(BLOCK)
        for number in range(3):
            other.receive_into(memoryview(view))
            assert view == f"block {number:02}".encode()
        one.close()
        other.close()


@pytest.mark.parametrize("size", [0, 1, 32_767, 32_768, 32_769, 1 << 20])
def test_blocks_of_every_size_in_any_number_of_parts_are_authentic(size: int) -> None:
    with serving() as server:
        one = server.connect()
        other = server.accept()
        data = bytes(range(256)) * (size // 256 + 1)
        one.send([data[: size // 3], data[size // 3 : size]], [b"next"])
        received, rest = bytearray(size), bytearray(4)
        other.receive_into(memoryview(received))
        other.receive_into(memoryview(rest))
        assert (bytes(received), bytes(rest)) == (data[:size], b"next")


def test_somebody_in_between_with_a_certificate_of_its_own_is_refused() -> None:
    on = SecurityConfig(tls=True)
    with serving(Tls(on)) as server, socket.create_server(("127.0.0.1", 0)) as listening:
        problem: queue.Queue[str] = queue.Queue()
        port = int(listening.getsockname()[1])

        def connected() -> None:
            try:
                connect("127.0.0.1", port, SECRET, Purpose.DATA, timeout_seconds=WAIT, tls=Tls(on)).close()
                problem.put("let in")
            except ConnectionLost as lost:
                problem.put(lost.reason)

        client = threading.Thread(target=connected)
        client.start()
        near, _ = listening.accept()
        first = read_exactly(near, PREAUTH_BYTES_MAX)
        with server.stranger(first) as far:  # the real server, over a second TLS session
            context = Tls(on).client("127.0.0.1")
            own = Tls(on).server("127.0.0.1")
            assert context is not None
            assert own is not None
            with context.wrap_socket(far) as upward, own.context.wrap_socket(near, server_side=True) as downward:
                downward.sendall(read_exactly(upward, PREAUTH_BYTES_MAX))
                with contextlib.suppress(OSError):
                    assert downward.recv(1) == b"", "the client gave its proof away"
                assert "does not know this job's secret" in problem.get(timeout=WAIT)
        client.join()


def begun_handshake_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a handshake, let a flood of strangers come, then finish it."""
    monkeypatch.setattr(listeners, "STRANGERS_MAX", 8)
    with serving() as server:
        machine = ClientHandshake(SECRET, Purpose.DATA, b"c" * NONCE_BYTES)
        flood: list[socket.socket] = []
        with server.stranger(machine.start()) as begun:
            answer = read_exactly(begun, machine.wanted_bytes)
            for number in range(200):
                with contextlib.suppress(OSError):
                    flood.append(server.stranger(b"" if number % 2 else b"GET / HTTP/1.1\r\n"))
            one = server.connect()  # and a new one gets in as well
            server.accept()
            assert not one.is_closed
            begun.sendall(machine.receive(answer))
            machine.receive(read_exactly(begun, machine.wanted_bytes))
            assert machine.is_complete
            server.accept()
        for stream in flood:
            stream.close()


def test_a_handshake_that_has_begun_survives_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_handshake_survives(monkeypatch)


def test_a_flood_that_never_ends_keeps_nobody_out() -> None:
    """Strangers come all the time, thousands of them, silent or with garbage; the job's own get in at once."""
    over = threading.Event()
    with serving() as server:

        def flood() -> None:
            open_ones: list[socket.socket] = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    open_ones.append(server.stranger(b"" if len(open_ones) % 2 else b"\x16\x03\x01garbage"))
                if len(open_ones) > 300:
                    open_ones.pop(0).close()
            for stream in open_ones:
                stream.close()

        flooding = [threading.Thread(target=flood) for _ in range(2)]
        for thread in flooding:
            thread.start()
        try:
            for number in range(20):
                one = patiently(server)
                other = server.accept()
                one.send_message(b"%d" % number)
                assert other.receive_message() == b"%d" % number
        finally:
            over.set()
            for thread in flooding:
                thread.join()


def patiently(server: Server) -> Connection:
    """Connect as workers do: again and again until a deadline. The system itself may drop some under a flood."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return server.connect(timeout_seconds=5.0)
        except ConnectionLost:
            if time.monotonic() > deadline:
                raise


def test_a_first_message_that_was_recorded_cannot_be_used_again() -> None:
    with serving() as server:
        recorded = ClientHandshake(SECRET, Purpose.DATA, b"r" * NONCE_BYTES).start()
        with server.stranger(recorded) as first:
            assert first.recv(1) == b"H"
            with server.stranger(recorded) as second:
                assert second.recv(1) == b""


def test_the_listener_goes_on_when_there_are_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        real, failures = server.listener._socket, iter([OSError(24, "Too many open files")] * 3)

        class Exhausted:
            def accept(self) -> object:
                for failure in failures:
                    raise failure
                return real.accept()

            def shutdown(self, how: int) -> None:
                real.shutdown(how)

            def close(self) -> None:
                real.close()

        monkeypatch.setattr(server.listener, "_socket", Exhausted())
        patiently(server)  # meets the accept that waits already
        server.accept()
        patiently(server)
        server.accept()
