"""Chunks on their way: whole and undamaged or not there, a piece at a time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import SPEAKS, WAIT_S

from headgate.errors import StorageError, UsageError
from headgate.storage.base import AlreadyExists, NotFound
from headgate.storage.local import LocalStorage
from headgate.store.client import connection as clients
from headgate.store.client import remote_store
from headgate.store.client.connection import Client, ConnectionLostError, Request
from headgate.store.client.remote_store import RemoteStorage, open_remote_store
from headgate.store.server import connections
from headgate.store.server.server import StoreServer


@pytest.fixture
def storage(server: StoreServer) -> RemoteStorage:
    found = open_remote_store(server.address.url).storage
    assert isinstance(found, RemoteStorage)
    return found


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "served" / "chunks").rglob("*") if path.is_file())


def test_chunks_come_back(server: StoreServer, storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.url == f"{server.address.url}/chunks"
    monkeypatch.setattr(connections, "PIECE_BYTES", 10)
    for size_bytes in (0, 1, 9, 10, 11, 20, 105):
        data = bytes(range(size_bytes))
        storage.put("1/a b%2F/c.chunk", [data[:3], memoryview(data[3:])])
        assert storage.get("1/a b%2F/c.chunk") == data
        for offset, wanted in ((0, 5), (5, 10), (size_bytes, 5), (size_bytes + 5, 5), (3, 1_000)):
            assert storage.get_range("1/a b%2F/c.chunk", offset, wanted) == data[offset : offset + wanted]
    assert storage.list("") == storage.list("1") == ["1/a b%2F/c.chunk"]
    storage.delete("1/a b%2F/c.chunk")
    storage.delete("1/a b%2F/c.chunk")
    assert storage.list("") == []
    assert storage.sweep_unfinished() == 0
    with pytest.raises(NotFound):
        storage.get("1/a b%2F/c.chunk")
    with pytest.raises(NotFound):
        storage.get_range("1/a b%2F/c.chunk", 0, 1)


def test_what_is_given_whole_is_durable(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a", [b"abc"])
    synced: list[str] = []
    monkeypatch.setattr(LocalStorage, "make_durable", lambda self, path: synced.append(path))
    assert storage.get_range("a", 0, 3) == b"abc"
    assert synced == []
    assert storage.get("a") == b"abc"
    assert synced == ["a"], "a process that was killed may have written it"


def test_what_is_there_is_not_replaced(storage: RemoteStorage) -> None:  # SS9, SS18
    storage.put_if_absent("a", [b"first"])
    with pytest.raises(AlreadyExists):
        storage.put_if_absent("a", [b"second" * 1_000_000])
    assert storage.get("a") == b"first"
    with pytest.raises(AlreadyExists):
        storage.put_if_absent("a", [b"third"])
    storage.rename_if_absent("a", "b")
    assert storage.list("") == ["b"]
    with pytest.raises(UsageError, match="not usable"):
        storage.put("../a", [b""])


def test_a_chunk_whose_answer_was_lost_is_put_once(wire: Wire) -> None:  # SS9
    storage = open_remote_store(f"headgate://127.0.0.1:{wire.port}").storage
    wire.lose_answer(b"PUT /chunk/a ", is_given=True)
    storage.put_if_absent("a", [b"first"])
    assert wire.lost_count == 1
    with pytest.raises(AlreadyExists):
        storage.put_if_absent("a", [b"second"])
    assert storage.get("a") == b"first"


def test_a_chunk_passes_in_pieces(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = LocalStorage.get_range

    def get_range(self: LocalStorage, path: str, offset: int, size_bytes: int) -> bytes:
        sizes.append(size_bytes)
        return real(self, path, offset, size_bytes)

    taken: list[int] = []
    real_arriving = connections.arriving

    def arriving(*arguments: Any) -> Any:
        for piece in real_arriving(*arguments):
            taken.append(len(piece))
            yield piece

    monkeypatch.setattr(LocalStorage, "get_range", get_range)
    monkeypatch.setattr(connections, "arriving", arriving)
    data = os.urandom(3 << 20)
    storage.put("large", [data])
    assert storage.get_range("large", 0, len(data)) == data
    assert sum(taken) >= len(data)
    assert max(taken) <= 1 << 20
    assert max(sizes) <= 1 << 20


def test_a_chunk_that_came_half_or_damaged_is_not_there(
    server: StoreServer, storage: RemoteStorage, tmp_path: Path
) -> None:
    storage.put("a", [b"before"])
    connection = Client(server.address).connect()
    damaged = connection.ask(Request("PUT", "/chunk/a", [b"x" * 100_000], {"Headgate-Checksum": "0" * 16}))
    assert damaged.status == 412
    connection.ask(Request("POST", "/date"))  # the connection goes on
    stream = connection._http.sock
    assert isinstance(stream, socket.socket)
    head = f"PUT /chunk/b HTTP/1.1\r\nHost: localhost\r\n{SPEAKS}\r\nContent-Length: 100000\r\n\r\n"
    stream.sendall(head.encode() + b"x" * 50_000)
    deadline_s = time.monotonic() + WAIT_S
    while len(files(tmp_path)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    connection.close()
    while len(files(tmp_path)) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert files(tmp_path) == ["a"]
    assert storage.list("") == ["a"]
    assert storage.get("a") == b"before"


PUTTING = """
import sys
from headgate.store.client.remote_store import open_remote_store
storage = open_remote_store(sys.argv[1]).storage
print("ready", flush=True)
while True:
    storage.put("killed", [bytes(64 << 20)])
"""


@pytest.mark.crash
def test_a_client_that_is_killed_while_it_puts_leaves_nothing(
    server: StoreServer, storage: RemoteStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStorage.put

    def slowly(self: LocalStorage, path: str, parts: Any) -> None:
        def slow() -> Any:
            for part in parts:
                time.sleep(0.05)  # slow work: not a wait for anything
                yield part

        real(self, path, slow())

    monkeypatch.setattr(server._answers._storage, "put", slowly.__get__(server._answers._storage))
    process = subprocess.Popen([sys.executable, "-c", PUTTING, server.address.url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    deadline_s = time.monotonic() + WAIT_S
    while not files(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while files(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert files(tmp_path) == []
    assert storage.list("") == []


def test_a_question_that_is_too_large_is_refused_before_it_is_read(
    server: StoreServer, storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_BYTES_MAX", 1_000)
    monkeypatch.setattr(connections, "CHUNK_BYTES_MAX", 1_000)
    connection = Client(server.address).connect()
    for method, path in (("POST", "/verb/catalogue/look"), ("PUT", "/chunk/a")):
        stream = connection._http.sock
        stream.sendall(f"{method} {path} HTTP/1.1\r\n{SPEAKS}\r\nContent-Length: 1001\r\n\r\n".encode())
        assert stream.recv(1_000).startswith(b"HTTP/1.1 413 ")
        connection.close()
        connection = Client(server.address).connect()
    connection.close()
    storage.put("a", [b"x" * 1_000])
    monkeypatch.setattr(remote_store, "CHUNK_BYTES_MAX", 1_000)
    with pytest.raises(StorageError, match="append smaller batches") as caught:
        storage.put("a", [b"x" * 1_001])
    assert not caught.value.is_transient


def test_a_connection_that_the_server_has_ended_is_not_used_again(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server.address)
    client.ask(Request("POST", "/date"))
    with monkeypatch.context() as patch:
        patch.setattr(connections, "BODY_BYTES_MAX", 1_000)
        with pytest.raises(StorageError, match="the server takes 1,000"):
            client.ask(Request("POST", "/verb/catalogue/look", [b"x" * 1_001]))
    assert client.ask(Request("POST", "/date"))  # by one that was greeted
    client.close()


def test_a_connection_that_was_closed_does_not_open_itself(server: StoreServer) -> None:
    connection = Client(server.address).connect()
    connection.close()
    with pytest.raises(ConnectionLostError):
        connection.ask(Request("POST", "/date"))  # nobody would be greeted


def test_a_disk_that_is_full_is_told(
    server: StoreServer, storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:  # SS18
    def full(path: str, parts: Any) -> None:
        raise StorageError("put", f"/srv/{path}", "No space left on device")

    monkeypatch.setattr(server._answers._storage, "put", full)
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        storage.put("a", [b"x" * (3 << 20)])
    assert caught.value.is_transient
    assert storage.list("") == []


def test_a_chunk_that_is_shorter_by_now_is_noticed(
    server: StoreServer, storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a", [b"abc" * 1_000_000])
    real = connections.Range.pieces
    cut = [1]

    def pieces(self: connections.Range) -> Any:
        found = list(real(self))
        return found[:-1] if cut and not cut.clear() else found

    monkeypatch.setattr(connections.Range, "pieces", pieces)
    assert storage.get("a") == b"abc" * 1_000_000
    assert cut == []
