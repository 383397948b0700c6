"""The same connections over TLS: both directions at once, and strangers refused (N14)."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.codec.handshake import Purpose
from headgate.runtime.connection import Connection, ConnectionLost, Listener, connect
from headgate.runtime.stream import Tls

SECRET = b"s" * 32
WAIT = 20


@pytest.fixture
def contexts(certificate: Path) -> Tls:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    return Tls(ssl.create_default_context(cafile=str(certificate)), server)


class Server:
    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self.accepted: queue.Queue[Connection] = queue.Queue()
        self.listener = Listener(SECRET, Purpose.DATA, self.accepted.put, name="tls", handshake_seconds=1.0, tls=tls)

    def connect(self, secret: bytes = SECRET, tls: Tls | None = None) -> Connection:
        return connect("127.0.0.1", self.listener.port, secret, Purpose.DATA, timeout_seconds=WAIT, tls=tls or self.tls)


@pytest.fixture
def server(contexts: Tls) -> Iterator[Server]:
    server = Server(contexts)
    yield server
    server.listener.close()


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


def test_a_server_without_a_trusted_certificate_is_refused(server: Server) -> None:
    distrustful = Tls(ssl.create_default_context(), server.tls.server)
    with pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"):
        server.connect(tls=distrustful)


def test_a_client_without_tls_is_refused(server: Server) -> None:
    with pytest.raises(ConnectionLost, match="not let in"):
        connect("127.0.0.1", server.listener.port, SECRET, Purpose.DATA, timeout_seconds=WAIT)


def test_a_peer_that_drips_its_tls_handshake_is_closed_at_the_deadline(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.listener.port), timeout=WAIT) as stream:
        stream.sendall(b"\x16\x03\x01")
        assert stream.recv(100) == b""
