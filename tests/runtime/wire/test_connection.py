"""Connections of one job work, also with slow readers; everything else is refused while they keep working."""

from __future__ import annotations

import queue
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
from tests.servers.processes import Port

from headgate.codec.handshake import Purpose
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.runtime.wire import connection as listeners
from headgate.runtime.wire.connection import Connection, ConnectionLost, Listener, connect

SECRET = b"s" * 32
WAIT = 120


class Server:
    """A listener that keeps what it accepts."""

    def __init__(self, handshake_seconds: float = WAIT) -> None:
        self.accepted: queue.Queue[Connection] = queue.Queue()
        self.opened: list[Connection] = []
        self.listener = Listener(
            SECRET, Purpose.CONTROL, self.accepted.put, name="test", handshake_seconds=handshake_seconds
        )

    def connect(self, secret: bytes = SECRET, purpose: Purpose = Purpose.CONTROL) -> Connection:
        opened = connect("127.0.0.1", self.listener.port, secret, purpose, timeout_seconds=WAIT)
        self.opened.append(opened)
        return opened

    def pair(self) -> tuple[Connection, Connection]:
        one = self.connect()
        other = self.accepted.get(timeout=WAIT)
        self.opened.append(other)
        return one, other

    def close(self) -> None:
        self.listener.close()
        for connection in self.opened:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def impatient() -> Iterator[Server]:
    """One that closes a handshake after a second; on a busy machine that may be one of this job's, too."""
    server = Server(handshake_seconds=1.0)
    yield server
    server.close()


def raw_socket(server: Server) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", server.listener.port), timeout=WAIT)
    stream.settimeout(WAIT)
    return stream


def is_closed_by_peer(stream: socket.socket) -> bool:
    try:
        return stream.recv(1_000) == b""
    except ConnectionError:
        return True


def test_a_listener_is_on_loopback_unless_told_otherwise(server: Server) -> None:
    assert server.listener._socket.getsockname()[0] == server.listener.host == "127.0.0.1"
    told = Listener(SECRET, Purpose.CONTROL, server.accepted.put, name="told", host="127.0.0.2")
    try:
        assert told._socket.getsockname()[0] == told.host == "127.0.0.2"
    finally:
        told.close()


def test_messages_travel_both_ways_in_order(server: Server) -> None:
    one, other = server.pair()
    for index in range(100):
        one.send_message(bytes([index]) * index)
        other.send_message(bytes([index]))
    assert [other.receive_message() for _ in range(100)] == [bytes([i]) * i for i in range(100)]
    assert [one.receive_message() for _ in range(100)] == [bytes([i]) for i in range(100)]


def test_a_large_message_of_many_parts_arrives_whole(server: Server) -> None:
    one, other = server.pair()
    parts = [bytes([i % 251]) * (i * 7) for i in range(2_000)]
    received = bytearray(sum(map(len, parts)))
    thread = threading.Thread(target=one.send, args=(parts,))
    thread.start()
    other.receive_into(memoryview(received))
    thread.join()
    assert received == b"".join(parts)
    assert one.bytes_out == other.bytes_in == len(received)


@pytest.mark.parametrize(
    ("secret", "purpose"), [(b"w" * 32, Purpose.CONTROL), (SECRET, Purpose.DATA)], ids=["secret", "purpose"]
)
def test_who_is_not_of_this_job_is_refused_while_others_work(server: Server, secret: bytes, purpose: Purpose) -> None:
    one, other = server.pair()
    with pytest.raises(ConnectionLost, match="not let in"):
        server.connect(secret, purpose)
    one.send_message(b"still here")
    assert other.receive_message() == b"still here"
    assert server.accepted.empty()


def test_garbage_is_closed_without_an_answer(server: Server) -> None:
    with raw_socket(server) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n" * 10)
        assert is_closed_by_peer(stream)
    server.pair()


def test_a_peer_that_drips_its_handshake_is_closed_at_the_deadline(impatient: Server) -> None:
    with raw_socket(impatient) as stream:
        stream.sendall(b"HGHS")
        assert is_closed_by_peer(stream)


def test_a_flood_of_silent_connections_keeps_nobody_out(impatient: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "STRANGERS_MAX", 4)
    flood = [raw_socket(impatient) for _ in range(20)]
    deadline = time.monotonic() + WAIT
    while True:
        try:
            one, other = impatient.pair()
            break
        except ConnectionLost:  # a second passed in which this process got no turn
            assert time.monotonic() < deadline
    one.send_message(b"in")
    assert other.receive_message() == b"in"
    assert is_closed_by_peer(flood[0])
    for stream in flood:
        stream.close()


def test_an_oversized_length_is_refused_before_anything_is_allocated(server: Server) -> None:
    one, other = server.pair()
    one.send([struct.pack("<IQ", (1 << 32) - 1, 0)])
    with pytest.raises(ProtocolViolation, match="announced 4294967295 bytes"):
        other.receive_message()


def test_a_damaged_message_is_noticed(server: Server) -> None:
    one, other = server.pair()
    one.send([struct.pack("<IQ", 3, 12345)], [b"abc"])
    with pytest.raises(CorruptionError):
        other.receive_message()


def test_a_closed_peer_ends_the_waiting(server: Server) -> None:
    one, other = server.pair()
    other.close()
    with pytest.raises(ConnectionLost, match="closed by the other side"):
        one.receive_message()


def test_interrupt_from_another_thread_ends_the_waiting(server: Server) -> None:
    one, _ = server.pair()
    outcome: queue.Queue[ConnectionLost] = queue.Queue()

    def wait() -> None:
        try:
            one.receive_message()
        except ConnectionLost as lost:
            outcome.put(lost)

    thread = threading.Thread(target=wait)
    thread.start()
    one.interrupt()
    assert outcome.get(timeout=WAIT).peer == one.peer
    thread.join()


def test_nobody_there_is_reported_with_the_address() -> None:
    with closing(Port()) as silent, pytest.raises(ConnectionLost, match=f"127.0.0.1:{silent.number}"):
        connect("127.0.0.1", silent.number, SECRET, Purpose.DATA)


def test_a_closed_listener_frees_its_port_and_threads(server: Server) -> None:
    with raw_socket(server) as pending:
        server.listener.close()
        assert is_closed_by_peer(pending)
    mine = psutil.Process().net_connections("tcp")
    assert server.listener.port not in {one.laddr.port for one in mine if one.status == psutil.CONN_LISTEN}
    assert not [thread for thread in threading.enumerate() if thread.name == "test-accept"]


class ClosingLock:
    """Closes the listener in the moment in which it takes somebody in."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._lock = listener, listener._lock

    def __enter__(self) -> None:
        if threading.current_thread().name.endswith("-accept"):
            self._listener._is_closed = True
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)  # type: ignore[arg-type]


def test_who_comes_while_a_listener_closes_is_turned_away_at_once(server: Server) -> None:
    listener = server.listener
    listener._lock = ClosingLock(listener)  # type: ignore[assignment]
    stream = raw_socket(server)
    assert is_closed_by_peer(stream)
    assert listener._strangers == {}
    listener._is_closed = False  # for the end of the test
    listener._lock = threading.Lock()


NETWORK = (
    "ip link set lo up && ip addr add 10.9.8.1/32 dev lo && ip addr add 10.9.8.2/32 dev lo && "
    'ip route add default dev lo && exec "$@"'  # what no address takes any more is sent, and lost
)

COMMON = """
import socket, subprocess, sys, time
from headgate.runtime.wire import connection

connection.SILENCE_S_MAX = 2
if "without" in sys.argv:
    connection._notice_silence = lambda stream: stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

def connected():
    with socket.create_server(("10.9.8.2", 0)) as server:
        near = socket.create_connection(server.getsockname(), source_address=("10.9.8.1", 0))
        far, _ = server.accept()
    return connection.PlainStream(near), connection.PlainStream(far), near

def vanish():
    subprocess.run(["ip", "addr", "del", "10.9.8.2/32", "dev", "lo"], check=True)
"""

IDLE = """
near, far, raw = connected()
vanish()
raw.settimeout(60)
try:
    near.readinto(bytearray(1))
except OSError as error:
    print(error.errno)
"""

BUSY = """
near, far, raw = connected()
vanish()
near.send_parts([memoryview(b"nobody acknowledges this")])
raw.settimeout(60)
try:
    near.readinto(bytearray(1))
except OSError as error:
    print(error.errno)
"""

SLOW = """
def lasts():
    near, far, raw = connected()
    raw.setblocking(False)
    sent = received = 0
    buffer = bytearray(1 << 18)
    until = time.monotonic() + 3 * connection.SILENCE_S_MAX
    longest, looked = 0.0, time.monotonic()
    try:
        while time.monotonic() < until:  # the window is closed nearly all the time
            longest, looked = max(longest, time.monotonic() - looked), time.monotonic()
            try:
                while True:
                    sent += raw.send(bytes(1 << 16))
            except BlockingIOError:
                received += far.readinto(buffer)
                time.sleep(0.25)
        raw.setblocking(True)
        raw.shutdown(socket.SHUT_WR)
        while count := far.readinto(buffer):
            received += count
    except OSError:
        if max(longest, time.monotonic() - looked) < connection.SILENCE_S_MAX / 2:
            raise
        return None  # this process got no turn for so long that its reader was silent, not slow
    return sent == received > 0

verdicts = (lasts() for _ in range(10))
print(next((verdict for verdict in verdicts if verdict is not None), "never had its turn"))
"""


def told(case: str, *arguments: str) -> str:
    """Run ``case`` in a network of its own; return what it prints."""
    private = ["unshare", "--net", "sh", "-c", NETWORK, "sh"]
    if shutil.which("ip") is None or subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespace for this user")
    command = [*private, sys.executable, "-c", COMMON + case, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


ETIMEDOUT = "110"


@pytest.mark.parametrize("case", [IDLE, BUSY], ids=["idle", "busy"])
def test_a_connection_with_a_machine_that_vanished_fails(case: str) -> None:
    """Nobody sends a reset when a cable is pulled."""
    assert told(case) == ETIMEDOUT


def test_without_the_options_a_vanished_machine_is_not_noticed() -> None:
    """The limit is needed: with the system's own keep-alive the caller's time limit of a minute comes first."""
    assert told(BUSY.replace("settimeout(60)", "settimeout(5)"), "without") == "None"


def test_a_connection_whose_reader_is_slow_lasts() -> None:
    """What counts is that it takes something now and then, not that it keeps up."""
    assert told(SLOW) == "True"
