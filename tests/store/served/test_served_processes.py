"""``headgate store serve`` as a process: what it says, how it ends, and that it may be killed at any time."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from tests.store.served.serving import WAIT_S, ServerProcess, serving
from tests.store.storing import KEYED, STREAM, drained, keyed
from typer.testing import CliRunner

from headgate.cli.app import app
from headgate.errors import StorageError, UsageError
from headgate.store.addresses import TOKEN_FILE_VARIABLE
from headgate.store.client import requests as clients
from headgate.store.server.server import StoreServer
from headgate.store.store import Store


def test_a_server_ends_when_it_is_told_to(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ServerProcess(tmp_path / "served", port)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, process.said["token_file"])
    try:
        with Store.open(process.url) as store:
            store.create_stream(STREAM, KEYED)
            store.changes()  # and somebody waits for news
            code, said = process.end()
        assert code == 0
        assert [one["event"] for one in said][-1] == "stopped"
        assert said[-1]["requests"] >= 2
        assert said[-1]["failures"] == 0
    finally:
        process.kill()


def test_a_server_says_in_json_what_it_does(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ServerProcess(tmp_path / "served", port)
    token_file = Path(process.said["token_file"])
    assert token_file == tmp_path / "served" / "token"
    assert token_file.stat().st_mode & 0o777 == 0o600
    token = token_file.read_text()
    monkeypatch.setattr(clients, "OPENING_PATIENCE_S", 0.0)
    with pytest.raises(UsageError, match="it wants a token, and none is given here"):
        Store.open(process.url)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token_file))
    try:
        with Store.open(process.url) as store:
            store.create_stream(STREAM, KEYED)
            told = process.line()
        assert told["event"] == "requests"
        assert told["requests"] >= 1
        assert told.keys() >= {"at_ms", "errors", "failures", "refused", "bytes_in", "bytes_out", "connections"}
        process.kill()
        monkeypatch.delenv(TOKEN_FILE_VARIABLE)
        again = process.start()
        assert again["event"] == "serving"
        assert again["url"] == process.url
        assert (again["tls"], again["token_file"]) == (False, str(token_file))
        assert token_file.read_text() == token
        assert again["store"] == str(tmp_path / "served")
    finally:
        process.kill()


def test_what_is_under_way_when_a_server_ends_is_finished(tmp_path: Path) -> None:
    began, may_end = threading.Event(), threading.Event()
    found: list[object] = []
    with serving(tmp_path / "served") as server, Store.open(server.address.url) as store:
        carrying = server._answers._carrying
        signature, create = carrying._verbs["catalogue", "create_stream"]

        def slowly(**arguments: object) -> object:
            began.set()
            assert may_end.wait(WAIT_S)
            return create(**arguments)

        carrying._verbs["catalogue", "create_stream"] = signature, slowly
        asking = threading.Thread(target=lambda: found.append(store.create_stream(STREAM, KEYED).name))
        asking.start()
        assert began.wait(WAIT_S)
        ending = threading.Thread(target=server.end)
        ending.start()
        while not server.is_closing:
            time.sleep(0.001)
        may_end.set()
        asking.join(WAIT_S)
        ending.join(WAIT_S)
        assert found == [STREAM]


T = TypeVar("T")
COUNT = 60
KILLS = 12


def forked(work: Callable[[], object]) -> int:
    """Do ``work`` in a process of its own, which needs no imports; return its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def start_server(root: Path, port: int) -> int:
    """Start a server; return its process when it listens."""
    reading, writing = os.pipe()

    def serve() -> None:
        with serving(root, port):
            os.write(writing, b"listens\n")
            signal.pause()

    child = forked(serve)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert told.readline() == "listens\n"
        return child


def write(url: str, name: str) -> None:
    """Append ``COUNT`` numbers, each once, whatever goes away meanwhile."""
    store = patiently(lambda: Store.open(url))
    writer = patiently(lambda: store.writer(STREAM, writer_id=name, linger=None))
    for number in range(writer.next_sequence, COUNT + 1):
        writer.append(keyed((name, number)), number)
        patiently(writer.flush)


def patiently(work: Callable[[], T]) -> T:
    while True:
        try:
            return work()
        except StorageError as error:
            if not error.is_transient:
                raise


@pytest.mark.crash
def test_servers_and_clients_that_are_killed_lose_and_repeat_nothing(tmp_path: Path, port: int) -> None:  # SS9
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    root = tmp_path / "served"
    with Store._open_directory(str(root), None, "owner") as own:
        own.create_stream(STREAM, KEYED, segments=1)
    server = start_server(root, port)
    url = f"headgate://127.0.0.1:{port}"
    clients = {name: forked(partial(write, url, name)) for name in ("a", "b")}
    try:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.02, 0.3))  # a pause, not a wait for anything
            name = chance.choice(["server", *clients])
            victim = server if name == "server" else clients[name]
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            if name == "server":
                server = start_server(root, port)
            else:
                clients[name] = forked(partial(write, url, name))
        codes = [os.waitstatus_to_exitcode(os.waitpid(clients.pop(name), 0)[1]) for name in ("a", "b")]
        assert codes == [0, 0], f"seed {seed}"
    finally:
        for child in (server, *clients.values()):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    with Store._open_directory(str(root), None, "owner") as own:
        expected = sorted((name, number) for name in ("a", "b") for number in range(1, COUNT + 1))
        assert drained(own) == expected, f"seed {seed}"
        assert [problem for problem in own.fsck() if not problem.is_harmless] == [], f"seed {seed}"


def test_the_command_line_uses_a_store_by_its_url(server: StoreServer) -> None:
    url = server.address.url
    cli = CliRunner()
    listed = cli.invoke(app, ["streams", "list", "--store", url, "--json"])
    assert [json.loads(line)["stream"] for line in listed.output.splitlines()] == [STREAM]
    with Store.open(url) as store, store.writer(STREAM) as writer:
        writer.append(keyed(("a", 1)))
    read = cli.invoke(app, ["streams", "read", STREAM, "--store", url])
    assert "a" in read.output
    checked = cli.invoke(app, ["streams", "check", "--store", url])
    assert checked.exit_code == 0, checked.output
