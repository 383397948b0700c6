"""The same connections over TLS: when it is on, with which certificate, both directions at once."""

from __future__ import annotations

import queue
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.codec.handshake import NONCE_BYTES, ClientHandshake, Purpose
from headgate.errors import UsageError
from headgate.model.config import SecurityConfig
from headgate.runtime.wire.connection import Connection, ConnectionLost, Listener, connect
from headgate.tls import Tls, is_loopback

SECRET = b"s" * 32
WAIT = 120
ON, OFF = Tls(SecurityConfig(tls=True)), Tls(SecurityConfig(tls=False))


class Server:
    def __init__(self, tls: Tls = ON, handshake_seconds: float = WAIT) -> None:
        self.tls = tls
        self.accepted: queue.Queue[Connection] = queue.Queue()
        self.listener = Listener(
            SECRET, Purpose.DATA, self.accepted.put, name="tls", handshake_seconds=handshake_seconds, tls=tls
        )

    def connect(self, secret: bytes = SECRET, tls: Tls | None = None) -> Connection:
        return connect("127.0.0.1", self.listener.port, secret, Purpose.DATA, timeout_seconds=WAIT, tls=tls or self.tls)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.listener.close()


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


def test_records_cannot_be_read_on_the_way(server: Server) -> None:
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            near, _ = between.accept()
            with near, socket.create_connection(("127.0.0.1", server.listener.port)) as far:

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
        other = server.accepted.get(timeout=WAIT)
        one.send_message(b"the salary of everybody" * 10)
        assert other.receive_message() == b"the salary of everybody" * 10
        one.close()
        other.close()
        thread.join()
    assert len(seen) > 230
    assert b"salary" not in seen


def test_both_sides_send_and_receive_at_the_same_time(server: Server) -> None:
    one = server.connect()
    other = server.accepted.get(timeout=WAIT)
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


def test_tls_does_not_replace_the_secret(server: Server) -> None:
    with pytest.raises(ConnectionLost, match="not let in"):
        server.connect(b"w" * 32)


@pytest.mark.parametrize(("of_server", "of_client"), [(ON, OFF), (OFF, ON)], ids=["server", "client"])
def test_nobody_falls_back_to_a_connection_without_tls(of_server: Tls, of_client: Tls) -> None:
    server = Server(of_server)
    with pytest.raises(ConnectionLost, match="not let in"):
        server.connect(tls=of_client)
    assert server.accepted.empty()
    server.listener.close()


def test_the_users_own_certificate_is_used_and_checked(certificate: Path) -> None:
    config = SecurityConfig(
        tls=True, certificate_file=str(certificate), key_file=str(certificate), ca_file=str(certificate)
    )
    server = Server(Tls(config))
    one = server.connect()
    other = server.accepted.get(timeout=WAIT)
    one.send_message(b"in")
    assert other.receive_message() == b"in"
    one.close()
    other.close()
    stranger = Server(ON)
    with pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.connect(tls=server.tls)
    server.listener.close()
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
    server = Server(handshake_seconds=1.0)
    first = ClientHandshake(SECRET, Purpose.DATA, b"c" * NONCE_BYTES, is_tls=True).start()
    with socket.create_connection(("127.0.0.1", server.listener.port), timeout=WAIT) as stream:
        stream.sendall(first + b"\x16\x03\x01")
        assert stream.recv(100) == b""
    server.listener.close()


def test_a_stranger_gets_no_tls_handshake(server: Server) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stream = socket.create_connection(("127.0.0.1", server.listener.port), timeout=WAIT)
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
