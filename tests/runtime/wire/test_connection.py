"""Connections of one job work, also with slow readers; everything else is refused while they keep working."""

from __future__ import annotations

import queue
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.servers.processes import Port

from headgate.codec.handshake import NONCE_BYTES, ClientHandshake, Purpose
from headgate.errors import CorruptionError, ProtocolViolation, UsageError
from headgate.model.config import SecurityConfig
from headgate.runtime.wire import connection as listeners
from headgate.runtime.wire.connection import Connection, ConnectionLost, Listener, connect
from headgate.tls import Tls, is_loopback

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


ON, OFF = Tls(SecurityConfig(tls=True)), Tls(SecurityConfig(tls=False))


class TlsServer:
    def __init__(self, tls: Tls = ON, handshake_seconds: float = WAIT) -> None:
        self.tls = tls
        self.accepted: queue.Queue[Connection] = queue.Queue()
        self.listener = Listener(
            SECRET, Purpose.DATA, self.accepted.put, name="tls", handshake_seconds=handshake_seconds, tls=tls
        )

    def connect(self, secret: bytes = SECRET, tls: Tls | None = None) -> Connection:
        return connect("127.0.0.1", self.listener.port, secret, Purpose.DATA, timeout_seconds=WAIT, tls=tls or self.tls)


@pytest.fixture
def tls_server() -> Iterator[TlsServer]:
    tls_server = TlsServer()
    yield tls_server
    tls_server.listener.close()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
        ("10.0.0.7", False),
        ("node7.example", False),
        ("localhost.example", False),
    ],
)
def test_tls_is_on_for_every_address_but_loopback_unless_somebody_says_otherwise(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
    default = Tls(SecurityConfig())
    assert (default.server(host) is None, default.client(host) is None) == (is_local, is_local)
    assert ON.server(host) is not None
    assert OFF.server(host) is OFF.client(host) is None


def test_a_listener_for_other_machines_speaks_tls_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is loopback, but counts as one that is not: nothing of the tests leaves this machine."""
    monkeypatch.setattr("headgate.tls.is_loopback", lambda host: False)
    accepted: queue.Queue[Connection] = queue.Queue()
    listener = Listener(SECRET, Purpose.DATA, accepted.put, name="tls", handshake_seconds=WAIT)
    try:
        one = connect("127.0.0.1", listener.port, SECRET, Purpose.DATA, timeout_seconds=WAIT)
        other = accepted.get(timeout=WAIT)
        assert type(one._stream).__name__ == type(other._stream).__name__ == "TlsStream"
        one.send_message(b"hidden")
        assert other.receive_message() == b"hidden"
        one.close()
        other.close()
    finally:
        listener.close()


def test_records_cannot_be_read_on_the_way(tls_server: TlsServer) -> None:
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            near, _ = between.accept()
            with near, socket.create_connection(("127.0.0.1", tls_server.listener.port)) as far:

                def back() -> None:
                    while data := far.recv(1 << 16):
                        near.sendall(data)

                thread = threading.Thread(target=back)
                thread.start()
                while data := near.recv(1 << 16):
                    seen.extend(data)
                    far.sendall(data)
                far.shutdown(socket.SHUT_WR)
                thread.join()

        thread = threading.Thread(target=relay)
        thread.start()
        one = connect("127.0.0.1", int(between.getsockname()[1]), SECRET, Purpose.DATA, timeout_seconds=WAIT, tls=ON)
        other = tls_server.accepted.get(timeout=WAIT)
        one.send_message(b"the salary of everybody" * 10)
        assert other.receive_message() == b"the salary of everybody" * 10
        one.close()
        other.close()
        thread.join()
    assert len(seen) > 230
    assert b"salary" not in seen


def test_both_sides_send_and_receive_at_the_same_time(tls_server: TlsServer) -> None:
    one = tls_server.connect()
    other = tls_server.accepted.get(timeout=WAIT)
    payloads = [bytes([index]) * 300_000 for index in range(60)]
    received: dict[str, list[bytes]] = {"one": [], "other": []}

    def send(connection: Connection) -> None:
        for payload in payloads:
            connection.send_message(payload)

    def receive(name: str, connection: Connection) -> None:
        for _ in payloads:
            received[name].append(connection.receive_message())

    threads = [
        threading.Thread(target=send, args=(one,)),
        threading.Thread(target=send, args=(other,)),
        threading.Thread(target=receive, args=("one", one)),
        threading.Thread(target=receive, args=("other", other)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == {"one": payloads, "other": payloads}
    one.close()
    with pytest.raises(ConnectionLost):
        other.receive_message()
    other.close()


def test_tls_does_not_replace_the_secret(tls_server: TlsServer) -> None:
    with pytest.raises(ConnectionLost, match="not let in"):
        tls_server.connect(b"w" * 32)


@pytest.mark.parametrize(("of_server", "of_client"), [(ON, OFF), (OFF, ON)], ids=["server", "client"])
def test_nobody_falls_back_to_a_connection_without_tls(of_server: Tls, of_client: Tls) -> None:
    tls_server = TlsServer(of_server)
    with pytest.raises(ConnectionLost, match="not let in"):
        tls_server.connect(tls=of_client)
    assert tls_server.accepted.empty()
    tls_server.listener.close()


def test_the_users_own_certificate_is_used_and_checked(certificate: Path) -> None:
    config = SecurityConfig(
        tls=True, certificate_file=str(certificate), key_file=str(certificate), ca_file=str(certificate)
    )
    tls_server = TlsServer(Tls(config))
    one = tls_server.connect()
    other = tls_server.accepted.get(timeout=WAIT)
    one.send_message(b"in")
    assert other.receive_message() == b"in"
    one.close()
    other.close()
    stranger = TlsServer(ON)
    with pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.connect(tls=tls_server.tls)
    tls_server.listener.close()
    stranger.listener.close()


@pytest.mark.parametrize("what", ["certificate_file", "ca_file"])
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, what: str) -> None:
    bad = tmp_path / "bad.pem"
    for content in (None, "nothing"):
        if content is not None:
            bad.write_text(content)
        config = SecurityConfig(tls=True, **{what: str(bad)}, key_file=str(bad))
        with pytest.raises(UsageError, match=f"security {what} {bad} cannot be used: "):
            Tls(config).server("x") if what == "certificate_file" else Tls(config).client("x")


def test_a_peer_that_drips_its_tls_handshake_is_closed_at_the_deadline() -> None:
    tls_server = TlsServer(handshake_seconds=1.0)
    first = ClientHandshake(SECRET, Purpose.DATA, b"c" * NONCE_BYTES, is_tls=True).start()
    with socket.create_connection(("127.0.0.1", tls_server.listener.port), timeout=WAIT) as stream:
        stream.sendall(first + b"\x16\x03\x01")
        assert stream.recv(100) == b""
    tls_server.listener.close()


def test_a_stranger_gets_no_tls_handshake(tls_server: TlsServer) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stream = socket.create_connection(("127.0.0.1", tls_server.listener.port), timeout=WAIT)
    with stream, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(stream)


ELSEWHERE = """
import queue
from headgate.codec.handshake import Purpose
from headgate.runtime.wire.connection import connect
from headgate.runtime.wire.connection import Listener

accepted = queue.Queue()
listener = Listener(b"s" * 32, Purpose.DATA, lambda connection, _: accepted.put(connection), name="x", host="10.9.8.7")
one = connect("10.9.8.7", listener.port, b"s" * 32, Purpose.DATA)
other = accepted.get(timeout=20)
one.send_message(b"hidden")
print(type(one._stream).__name__, other.receive_message().decode())
"""


def test_an_address_of_a_network_is_encrypted_in_a_network_of_its_own() -> None:
    """In a network namespace, which nobody else can reach."""
    private = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip addr add 10.9.8.7/32 dev lo && exec "$@"', "sh"]
    if shutil.which("ip") is None or subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespace for this user")
    told = subprocess.run([*private, sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["TlsStream", "hidden"]
