"""Who may use a served store, and who is sent away."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.metadata
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import SPEAKS, TOKEN, WAIT_S, serving
from tests.store.storing import KEYED, STREAM, drained, keyed

from headgate.environment import SystemEnvironment
from headgate.errors import StorageError, UsageError
from headgate.model.config import SecurityConfig
from headgate.store import addresses
from headgate.store.addresses import ServerAddress
from headgate.store.client import connection as asking
from headgate.store.client import connection as clients
from headgate.store.client.connection import (
    Client,
    ConnectionLostError,
    Request,
    ServerFacts,
    UnreachableError,
    read_tokens,
)
from headgate.store.client.messages import PROTOCOL_VERSION
from headgate.store.server import connections
from headgate.store.server import server as desks
from headgate.store.server import server as servers
from headgate.store.server.handlers import ServerMetrics
from headgate.store.server.server import ServerOptions, ServerState, StoreServer, own_token_file
from headgate.store.store import Store


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(addresses.TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(addresses.TOKEN_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(clients, "OPENING_PATIENCE_S", 0.0)


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """A server that wants a token."""
    with serving(tmp_path / "guarded", tokens=lambda: [TOKEN.encode()]) as made:
        yield made


def test_a_server_that_others_can_reach_wants_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store._open_directory(str(tmp_path), None, "owner") as own:
        with (
            pytest.raises(UsageError, match=r"0\.0\.0\.0 can be reached from other machines: give it a token"),
            own.serve(ServerOptions("0.0.0.0", 0)),
        ):
            raise AssertionError("everybody could write")
        with own.serve(ServerOptions("127.0.0.1", 0)) as server:
            assert server.tls is None
        monkeypatch.setattr(servers, "is_loopback", lambda host: False)
        monkeypatch.setattr("headgate.tls.is_loopback", lambda host: False)
        with own.serve(ServerOptions("127.0.0.1", 0, lambda: [TOKEN.encode()])) as server:
            assert server.tls is not None, "others on the way would hear"


def test_a_token_that_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    for text, problem in (("short\n", "too short"), ("\n\n", "no token"), ("", "no token")):
        file.write_text(text)
        with pytest.raises(UsageError, match=problem) as caught:
            read_tokens(str(file))
        assert "short\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_tokens(str(tmp_path / "missing"))
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="cannot be read: it is no text"):
        read_tokens(str(file))
    file.write_text(f"{TOKEN}\n  another one that is long enough\n")
    assert read_tokens(str(file)) == [TOKEN.encode(), b"another one that is long enough"]
    monkeypatch.setenv(addresses.TOKEN_FILE_VARIABLE, str(file))
    assert len(read_tokens()) == 2
    monkeypatch.delenv(addresses.TOKEN_FILE_VARIABLE)
    assert read_tokens() == []
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    assert read_tokens() == [TOKEN.encode()]


def test_a_store_has_one_token_of_its_own(tmp_path: Path) -> None:
    file = own_token_file(tmp_path)
    (token,) = read_tokens(str(file))
    assert read_tokens(str(own_token_file(tmp_path))) == [token]
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        own_token_file(tmp_path / "missing")


def test_a_wrong_token_is_refused_in_one_sentence(
    guarded: StoreServer, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="it wants a token, and none is given here"):
        Store.open(guarded.address.url)
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, "another token of sufficient length")
    with pytest.raises(UsageError, match="it does not know the token") as caught:
        Store.open(guarded.address.url)
    assert "another token" not in str(caught.value)
    with pytest.raises(UsageError, match="it does not know the token"):
        Store.open(server.address.url)  # it wants none: it may be anybody's
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    with Store.open(guarded.address.url) as store:
        assert store.list_streams() == []
    assert guarded.counts.refused == 2


def test_a_token_that_was_taken_out_is_right_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "TOKENS_LOOK_S", 0.0)
    file, mine = tmp_path / "server", tmp_path / "client"
    file.write_text(TOKEN)
    mine.write_text(TOKEN)
    monkeypatch.setenv(addresses.TOKEN_FILE_VARIABLE, str(mine))
    newer = "a newer token of more than sixteen"
    with (
        serving(tmp_path / "s", tokens=lambda: read_tokens(str(file))) as server,
        Store.open(server.address.url) as store,
    ):
        file.write_text(f"{newer}\n{TOKEN}")
        store.list_streams()
        file.write_text("x")  # not right: the former ones stay
        store.list_streams()
        file.write_text(newer)
        store._core.catalogue._client.patience_s = 0.0  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match="token"):
            store.list_streams()
        with pytest.raises(StorageError, match="it does not know the token") as caught:
            store.list_streams()
        assert not caught.value.is_transient
        mine.write_text(newer)
        assert store.list_streams() == []


class Recorder(Wire):
    """Keeps what passes."""

    def __init__(self, target: int) -> None:
        self.passed = b""
        super().__init__(target)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        self._record(client, server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        self._record(server, client)

    def _record(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end may go at any time
            while data := source.recv(65_536):
                self.passed += data
                target.sendall(data)


def test_the_token_of_a_store_never_travels(guarded: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    recorder = Recorder(guarded.address.port)
    with Store.open(f"headgate://127.0.0.1:{recorder.port}") as store:
        store.create_stream(STREAM, KEYED)
    assert b"create_stream" in recorder.passed
    assert TOKEN.encode() not in recorder.passed
    first = recorder.passed[recorder.passed.index(b"POST /hello") : recorder.passed.index(b"POST /verb")]
    with closing(socket.create_connection(("127.0.0.1", guarded.address.port), WAIT_S)) as stream:
        stream.sendall(first.partition(b"HTTP/1.1 200")[0])
        assert stream.recv(4_096).startswith(b"HTTP/1.1 200")
        stream.sendall(first[first.index(b"POST /prove") :].partition(b"HTTP/1.1 200")[0])
        assert stream.recv(4_096).startswith(b"HTTP/1.1 403"), "what was recorded is of no use"
    recorder.close()


def test_a_store_is_served_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    encrypted = SecurityConfig(tls=True)
    with serving(tmp_path / "s", tokens=lambda: [TOKEN.encode()], security=encrypted) as server:
        assert server.address.url.startswith("https://127.0.0.1:")
        recorder = Recorder(server.address.port)
        url = f"https://127.0.0.1:{recorder.port}"
        with Store.open(url) as store:
            store.create_stream(STREAM, KEYED, segments=1)
            with store.writer(STREAM) as writer:
                writer.append(keyed(("secret", 1)))
            assert drained(store) == [("secret", 1)]
        assert b"secret" not in recorder.passed
        recorder.close()
        with pytest.raises(UsageError, match="it takes encrypted connections only: open it as headgate://HOST:PORT"):
            Store.open(f"headgate://127.0.0.1:{server.address.port}")  # nobody falls back


def test_a_certificate_of_somebody_in_between_is_not_taken_for_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody in between ends TLS with a certificate of his own, and passes on what both say."""
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    encrypted = SecurityConfig(tls=True)
    with serving(tmp_path / "s", tokens=lambda: [TOKEN.encode()], security=encrypted) as server:
        between = socket.create_server(("127.0.0.1", 0))
        context = servers.Tls(SecurityConfig(tls=True)).server("127.0.0.1")
        assert context is not None
        passed: list[bytes] = []

        def stand_between() -> None:
            stream, _ = between.accept()
            with closing(context.context.wrap_socket(stream, server_side=True)) as client:
                other = servers.Tls(SecurityConfig(tls=True)).client("127.0.0.1")
                assert other is not None
                raw = socket.create_connection(("127.0.0.1", server.address.port))
                with closing(other.wrap_socket(raw, server_hostname="localhost")) as onward:
                    asked = b""
                    while len(asked.partition(b"\r\n\r\n")[2]) < 71:
                        asked += client.recv(65_536)
                    onward.sendall(asked)
                    client.sendall(onward.recv(65_536))
                    passed.append(client.recv(65_536))

        thread = threading.Thread(target=stand_between)
        thread.start()
        with pytest.raises(UsageError, match="does not know the token"):
            Store.open(f"https://127.0.0.1:{between.getsockname()[1]}")
        thread.join(WAIT_S)
        between.close()
        assert b"prove" not in b"".join(passed), "the client proves nothing to him"


def test_another_version_is_refused_in_one_sentence(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(server.address.url) as store:
        monkeypatch.setattr(asking, "PROTOCOL_VERSION", 99)
        with pytest.raises(
            StorageError, match=f"speaks version {PROTOCOL_VERSION} .* speaks version 99; use"
        ) as caught:
            store.find(STREAM)  # also in the middle
        assert not caught.value.is_transient
        with pytest.raises(UsageError, match=f"speaks version {PROTOCOL_VERSION} .* speaks version 99"):
            Store.open(server.address.url)


def raw(server: StoreServer, sent: bytes) -> bytes:
    """What a server says to somebody who just sends this."""
    with closing(socket.create_connection(("127.0.0.1", server.address.port), WAIT_S)) as stream:
        stream.sendall(sent)
        stream.shutdown(socket.SHUT_WR)
        found = b""
        while data := stream.recv(65_536):
            found += data
        return found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (
            b"POST /verb/catalogue/list_streams HTTP/1.1\r\n" + SPEAKS.encode() + b"\r\nContent-Length: 0\r\n\r\n",
            b"401",
        ),
        (b"GET /chunk/a HTTP/1.1\r\n" + SPEAKS.encode() + b"\r\n\r\n", b"401"),
        (b"PUT /chunk/a HTTP/1.1\r\n" + SPEAKS.encode() + b"\r\nContent-Length: 1\r\n\r\nx", b"401"),
        (b"POST /prove HTTP/1.1\r\n" + SPEAKS.encode() + b"\r\nContent-Length: 0\r\n\r\n", b"412"),
        (b"POST /hello HTTP/1.1\r\n" + SPEAKS.encode() + b"\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5_000, b"413"),
        (b"POST /hello HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"409"),
        (b"GET / HTTP/1.1\r\n\r\n", b"409"),
        (b"\x16\x03\x01 TLS where there is none\r\n\r\n", b"Bad request"),
        (b"GET /" + b"x" * 5_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST /hello HTTP/1.1\r\n" + SPEAKS.encode() + b"\r\n" + (b"a: " + b"b" * 1_000 + b"\r\n") * 5, b"431"),
        (b"POST /hello HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"", b""),
    ],
    ids=range(12),
)
def test_who_is_not_known_is_told_nothing(guarded: StoreServer, sent: bytes, status: bytes) -> None:
    found = raw(guarded, sent)
    assert status in found.partition(b"\r\n")[0] if status else found == b""
    assert b"guarded" not in found


def test_a_client_of_another_version_is_told_both_releases(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_version(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", no_version)  # code that was sent and not installed
    asking.release.cache_clear()
    found = raw(server, b"POST /hello HTTP/1.1\r\nHeadgate-Protocol: 0\r\nHeadgate-Release: 9.9\r\n\r\n")
    asking.release.cache_clear()
    assert b"the server is Headgate of unknown release and speaks version" in found
    assert b"this is Headgate 9.9 and speaks version 0;" in found


def test_a_stranger_that_takes_too_long_is_closed(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "HANDSHAKE_TIMEOUT_S", 0.3)
    with closing(socket.create_connection(("127.0.0.1", server.address.port), WAIT_S)) as stream:
        deadline_s = time.monotonic() + WAIT_S
        stream.setblocking(False)
        is_open = True
        while is_open and time.monotonic() < deadline_s:
            try:
                stream.send(b"P")  # drips
                is_open = stream.recv(10) != b""
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                is_open = False
        assert not is_open
    monkeypatch.setattr(desks, "HANDSHAKE_TIMEOUT_S", WAIT_S)  # who greets may be as slow as the machine
    with Store.open(server.address.url) as store:
        assert store.find(STREAM)


def test_a_known_client_that_says_nothing_is_closed(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.Connection, "timeout", 2 * WAIT_S)
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    before = server.counts.connections
    with closing(Client(server.address).connect()) as connection:
        deadline_s = time.monotonic() + WAIT_S
        while server.counts.connections > before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert server.counts.connections == before
        with pytest.raises(ConnectionLostError):
            connection.ask(Request("POST", "/date"))
        assert not connection.is_open


def test_a_connection_on_which_an_answer_may_be_left_is_closed(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: object) -> None:
        raise KeyboardInterrupt

    with closing(Client(server.address).connect()) as connection:
        monkeypatch.setattr(http.client.HTTPConnection, "getresponse", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.ask(Request("POST", "/date"))
        assert not connection.is_open


@pytest.mark.parametrize("length", ["Content-Type: x", "Transfer-Encoding: chunked\r\nContent-Length: 0"])
def test_a_question_says_how_long_it_is(server: StoreServer, length: str) -> None:
    with closing(Client(server.address).connect()) as connection:
        stream = connection._http.sock
        stream.sendall(f"POST /date HTTP/1.1\r\n{SPEAKS}\r\n{length}\r\n\r\n".encode())
        found = stream.recv(4_096)
    assert found.startswith(b"HTTP/1.1 411 ")
    assert b"\r\nConnection: close\r\n" in found, "what follows may be the rest of the question"


class Unlimited(SystemEnvironment):
    """Its sockets wait for ever, until they are told how long; and the last one is kept."""

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        self.stream = super().connect(host, port, timeout_seconds)
        self.stream.settimeout(None)
        return self.stream


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "CONNECT_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        around = Unlimited()
        client = Client(ServerAddress("headgate://here", "127.0.0.1", silent.getsockname()[1], False), around)
        with pytest.raises(UnreachableError, match="it does not answer"):
            client.connect()
        assert around.stream.fileno() < 0, "it is closed"
    with pytest.raises(UnreachableError, match="Connection refused"):
        client.connect()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot be asked")
def test_a_client_notices_that_the_machine_of_its_server_is_gone(server: StoreServer) -> None:
    around = Unlimited()
    with closing(Client(server.address, around).connect()):
        assert around.stream.gettimeout() == asking.ANSWER_S
        assert around.stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_NODELAY")
        found = [around.stream.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    idle_s, pause_s, count, timeout_ms, no_delay = found
    assert idle_s + pause_s * count == timeout_ms / 1_000 == asking.SILENCE_S
    assert no_delay


class Guest:
    """A connection that the server may end."""

    def __init__(self, *, is_busy: bool = False) -> None:
        self.is_busy, self.is_over = is_busy, False

    def interrupt(self) -> None:
        self.is_over = True


class Waiting(SystemEnvironment):
    """Time passes only in pauses, and each is as long as the test says."""

    def __init__(self) -> None:
        self.now_ms, self.pause_ms = 50_000, 1_000
        self.on_pause: Callable[[], None] = lambda: None

    def monotonic_ms(self) -> int:
        return self.now_ms

    def sleep(self, seconds: float) -> None:
        self.on_pause()
        self.now_ms += self.pause_ms


def state(around: Waiting, tokens: Callable[[], list[bytes]] = list, close: Callable[[], None] = list) -> ServerState:
    return ServerState(
        tokens,
        SimpleNamespace(close=close),
        ServerFacts("i", "s", "r"),
        ServerMetrics(),
        around=around,  # type: ignore[arg-type]
    )


def test_strangers_are_closed_when_their_time_is_over_or_the_oldest_makes_room() -> None:
    around = Waiting()
    desk, first, second = state(around), Guest(), Guest()
    for guest in (first, second):
        desk.came(guest)  # type: ignore[arg-type]
        around.now_ms += 1
    desk.close_unauthenticated(oldest=False)
    assert not first.is_over
    desk.close_unauthenticated(oldest=True)
    assert (first.is_over, second.is_over) == (True, False)
    desk.went(first)  # type: ignore[arg-type]
    around.now_ms += int(connections.HANDSHAKE_TIMEOUT_S * 1_000) - 1
    desk.close_unauthenticated(oldest=False)
    assert not second.is_over
    around.now_ms += 1
    desk.close_unauthenticated(oldest=False)
    assert second.is_over
    assert desk.counts.connections == 1


def test_the_tokens_are_looked_at_once_a_second() -> None:
    around, looks = Waiting(), list[int]()
    desk = state(around, lambda: looks.append(around.now_ms) or [TOKEN.encode()])  # type: ignore[func-returns-value]
    for _ in range(5):
        assert desk.tokens() == [TOKEN.encode()]
        around.now_ms += 500
    assert looks == [50_000, 51_000, 52_000]


def test_a_server_that_ends_waits_so_long_for_questions_under_way() -> None:
    around, steps = Waiting(), list[object]()
    desk = state(around, close=lambda: steps.append(desk.is_closing))
    idle, busy = Guest(), Guest(is_busy=True)
    for guest in (idle, busy):
        desk.came(guest)  # type: ignore[arg-type]
        desk.greeted(guest)  # type: ignore[arg-type]

    def leave() -> None:
        steps.append((idle.is_over, busy.is_over))
        for guest in (idle, busy):
            if guest.is_over:
                desk.went(guest)  # type: ignore[arg-type]

    around.on_pause = leave
    desk.end(grace_s=2)
    assert steps == [True, (True, False), (True, False), (True, True)]


def test_where_no_more_connections_can_be_taken_the_oldest_stranger_makes_room(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "HANDSHAKE_TIMEOUT_S", 2 * WAIT_S)
    monkeypatch.setattr(connections.Connection, "timeout", 2 * WAIT_S)
    came = threading.Event()
    monkeypatch.setattr(server, "came", lambda connection: (StoreServer.came(server, connection), came.set()))
    with closing(socket.create_connection(("127.0.0.1", server.address.port), WAIT_S)) as stranger:
        assert came.wait(WAIT_S)
        real, left = socketserver.ThreadingTCPServer.get_request, [1]

        def get_request(self: socketserver.ThreadingTCPServer) -> object:
            if left and not left.clear():
                raise OSError(errno.EMFILE, "Too many open files")
            return real(self)

        monkeypatch.setattr(socketserver.ThreadingTCPServer, "get_request", get_request)
        with Store.open(server.address.url) as store:
            assert store.find(STREAM)
        assert stranger.recv(10) == b""


def test_a_mistake_in_a_connection_is_counted(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(connection: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(server, "came", mistaken)
    socket.create_connection(("127.0.0.1", server.address.port), WAIT_S).close()
    deadline_s = time.monotonic() + WAIT_S
    while not server.counts.failures and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert server.counts.failures == 1


def test_who_asks_whether_there_is_a_store_keeps_no_connection(server: StoreServer) -> None:
    before, deadline_s = server.counts.connections, time.monotonic() + WAIT_S
    assert Store.exists(server.address.url)
    while server.counts.connections > before and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert server.counts.connections == before


def test_a_flood_of_strangers_keeps_no_client_out(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "STRANGERS_MAX", 3)
    monkeypatch.setattr(desks, "HANDSHAKE_TIMEOUT_S", 2 * WAIT_S)  # who is closed has made room
    monkeypatch.setattr(connections.Connection, "timeout", 2 * WAIT_S)
    came = threading.Semaphore(0)
    monkeypatch.setattr(server, "came", lambda connection: (StoreServer.came(server, connection), came.release()))
    with Store.open(server.address.url) as store:
        store.changes()
        while came.acquire(blocking=False):
            pass
        flood = []
        for _ in range(10):  # each has its place before the next one comes, so it is known who is the oldest
            flood.append(socket.create_connection(("127.0.0.1", server.address.port), WAIT_S))
            assert came.acquire(timeout=WAIT_S)
        assert store.find(STREAM)
        with Store.open(server.address.url) as another:
            assert another.find(STREAM)
        for stream in flood[:5]:
            assert stream.recv(10) == b"", "the oldest made room"
        for stream in flood:
            stream.close()


@pytest.mark.parametrize(
    ("host", "is_page"), [("evil.example.com", True), ("localhost:80", False), ("[::1]", False), ("127.0.0.1:1", False)]
)
def test_a_page_of_another_site_is_refused(server: StoreServer, host: str, is_page: bool) -> None:
    head = f"POST /hello HTTP/1.1\r\nHost: {host}\r\n{SPEAKS}\r\n"
    sent = f"{head}Headgate-Checksum: {asking.checksum_of(b'x' * 71)}\r\nContent-Length: 71\r\n\r\n"
    found = raw(server, sent.encode() + b"x" * 71)
    assert b"403" in found.partition(b"\r\n")[0], "and the first message is none"
    assert (b"its own name" in found) is is_page


def test_who_is_known_is_not_asked_again(guarded: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    client = Client(ServerAddress(guarded.address.url, "127.0.0.1", guarded.address.port, is_tls=False))
    connection = client.connect()
    for _ in range(3):
        assert connection.ask(Request("POST", "/date")).status == 200
    connection.close()


def test_a_question_with_a_long_head_is_refused_though_its_client_is_known(
    guarded: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    client = Client(ServerAddress(guarded.address.url, "127.0.0.1", guarded.address.port, is_tls=False))
    with closing(client.connect()) as connection:
        assert connection.ask(Request("POST", "/date", headers={"A": "x" * 5_000})).status == 200
        assert connection.ask(Request("POST", "/date", headers={"A": "x" * 17_000})).status == 431


def test_a_client_on_the_servers_machine_may_do_without_encryption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server listens on all addresses, and is called by the machine's own name."""
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    with ExitStack() as opened:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("headgate.tls.is_loopback", lambda host: False)
            server = opened.enter_context(serving(tmp_path, tokens=lambda: [TOKEN.encode()]))
        assert server.tls is not None
        for url in (
            f"headgate://localhost:{server.server_address[1]}",
            f"https://127.0.0.1:{server.server_address[1]}",
        ):
            with Store.open(url) as store:
                assert store.list_streams() == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs sockets for addresses of both kinds")
def test_a_client_on_the_machine_of_a_server_on_all_addresses_may_do_without_encryption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, TOKEN)
    with (
        Store._open_directory(str(tmp_path), None, "owner") as own,
        own.serve(ServerOptions("::", 0, lambda: [TOKEN.encode()])) as server,
    ):
        assert server.tls is not None
        with Store.open(f"headgate://127.0.0.1:{server.server_address[1]}") as store:
            assert store.list_streams() == []


def test_small_answers_are_sent_at_once(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def greeted(connection: connections.Connection) -> None:
        found.append(connection.request.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(server, "greeted", greeted)
    Client(server.address).connect().close()
    assert found == [1]


def test_a_server_on_all_addresses_says_the_name_of_its_machine(tmp_path: Path) -> None:
    options = ServerOptions("127.0.0.1", 0, lambda: [TOKEN.encode()])
    with serving(tmp_path, tokens=options.tokens) as server:
        server._options = replace(options, host="0.0.0.0", machine="store.example")
        assert server.address.host == "store.example"


def test_a_port_that_is_taken_is_named(server: StoreServer, tmp_path: Path) -> None:
    def watching() -> int:
        return [thread.name for thread in threading.enumerate()].count("headgate-store-news")

    before = watching()
    with (
        pytest.raises(UsageError, match=r"cannot be served on 127\.0\.0\.1:.*Address already in use"),
        serving(tmp_path / "other", server.address.port),
    ):
        raise AssertionError("somebody has it")
    assert watching() == before, "nothing is left of the other server"
    assert connections.HANDSHAKE_TIMEOUT_S == 10.0
