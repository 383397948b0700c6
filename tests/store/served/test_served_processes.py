"""``headgate store serve`` as a process: what it says, how it ends, and that it may be killed at any time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.store.served.serving import WAIT_S, ServerProcess, serving
from tests.store.storing import KEYED, STREAM, drained, keyed
from typer.testing import CliRunner

from headgate.cli.main import app
from headgate.store.serving.server import StoreServer
from headgate.store.store import Store

WRITER = """
import sys
import pyarrow as pa
from headgate.errors import StorageError
from headgate.store.serving.server import StoreServer
from headgate.store.store import Store
url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
while True:
    try:
        store = Store.open(url)
        break
    except StorageError as error:
        if not error.is_transient:
            raise
schema = store.find("app/events").schema
writer = store.writer("app/events", writer_id=name, linger=None)
for n in range(writer.next_sequence, count + 1):
    writer.append(pa.record_batch([[name], [n]], schema=schema), n)
    while True:
        try:
            writer.flush()
            break
        except StorageError as error:
            if not error.is_transient:
                raise
    print(n, flush=True)
"""


def test_a_server_ends_when_it_is_told_to(tmp_path: Path) -> None:  # SS14, SS15
    process = ServerProcess(tmp_path / "served")
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


def test_a_server_says_in_json_what_it_does(tmp_path: Path) -> None:  # SS15
    process = ServerProcess(tmp_path / "served")
    try:
        with Store.open(process.url) as store:
            store.create_stream(STREAM, KEYED)
            told = process.line()
        assert told["event"] == "requests"
        assert told["requests"] >= 1
        assert told.keys() >= {"at_ms", "errors", "failures", "refused", "bytes_in", "bytes_out", "connections"}
        process.kill()
        again = process.start()
        assert again["event"] == "serving"
        assert again["url"] == process.url
        assert (again["tls"], again["token"]) == (False, False)
        assert again["store"] == str(tmp_path / "served")
    finally:
        process.kill()


def test_what_is_under_way_when_a_server_ends_is_finished(tmp_path: Path) -> None:  # SS14
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


@pytest.mark.crash
def test_servers_and_clients_that_are_killed_lose_and_repeat_nothing(tmp_path: Path) -> None:  # SS8, SS9, SS10
    process = ServerProcess(tmp_path / "served")
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    count = 60
    clients: dict[str, subprocess.Popen[str]] = {}
    try:
        with Store.open(process.url) as store:
            store.create_stream(STREAM, KEYED, segments=1)
        for name in ("a", "b"):
            clients[name] = start(process.url, name, count)
        kills = 0
        deadline_s = time.monotonic() + 240
        while any(client.poll() is None for client in clients.values()) and time.monotonic() < deadline_s:
            time.sleep(chance.uniform(0.05, 0.4))
            if chance.random() < 0.5 and kills < 4:
                process.kill()
                process.start()
                kills += 1
            elif kills < 4:
                name = chance.choice(list(clients))
                clients[name].send_signal(signal.SIGKILL)
                clients[name].communicate()
                clients[name] = start(process.url, name, count)
                kills += 1
        assert [client.wait(WAIT_S) for client in clients.values()] == [0, 0], f"seed {seed}"
        with Store.open(process.url) as store:
            assert drained(store) == sorted((name, n) for name in clients for n in range(1, count + 1)), f"seed {seed}"
            assert [problem for problem in store.fsck() if not problem.is_harmless] == []
    finally:
        for client in clients.values():
            client.kill()
            client.communicate()
        process.kill()


def start(url: str, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, url, name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)


def test_the_command_line_uses_a_store_by_its_url(server: StoreServer) -> None:  # SS1
    url = server.address.url
    cli = CliRunner()
    listed = cli.invoke(app, ["streams", "list", "--store", url, "--json"])
    assert [json.loads(line)["name"] for line in listed.output.splitlines()] == [STREAM]
    with Store.open(url) as store, store.writer(STREAM) as writer:
        writer.append(keyed(("a", 1)))
    read = cli.invoke(app, ["streams", "read", STREAM, "--store", url])
    assert "a" in read.output
    checked = cli.invoke(app, ["streams", "check", "--store", url])
    assert checked.exit_code == 0, checked.output
