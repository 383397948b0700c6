"""Processes and pipelines with a served store: each event once, although answers are lost and the wire is cut."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import WAIT_S, ForkedServer, ServerProcess, serving
from tests.store.storing import KEYED, STREAM, drained, keyed
from typer.testing import CliRunner

import headgate as hg
from headgate import fault_points, testing
from headgate.cli.app import app
from headgate.connectors.base import Source
from headgate.environment import SystemEnvironment
from headgate.errors import StorageError, UsageError
from headgate.store.addresses import TOKEN_FILE_VARIABLE
from headgate.store.client import connection as clients
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


PIPELINE_WAIT_S = 600.0
EVENTS_COUNT = 200


@pytest.fixture
def filled(server: StoreServer) -> Iterator[Store]:
    """A store with something in it, over a wire of its own."""
    with Store.open(server.address.url) as store:
        store.create_stream("in", KEYED, segments=2, routing_key="key")
        store.create_stream("out", KEYED, segments=2, routing_key="key")
        yield store


@pytest.mark.parametrize("kind", ["stream", "group"])
def test_a_pipeline_copies_each_event_once_whatever_is_lost_on_the_way(
    filled: Store, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:  # SS9
    monkeypatch.setattr(clients, "PAUSES_S", (0.001, 0.02))
    url = f"headgate://127.0.0.1:{wire.port}"
    pipeline = hg.Pipeline(
        "copies", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints")
    )
    source: Source = (
        hg.StreamSource("in", store=url) if kind == "stream" else hg.GroupSource("in", "readers", store=url)
    )
    pipeline.source(source, name="source").sink(hg.StreamSink("out", store=url, routing_key="key"), name="out")
    is_over = threading.Event()
    lost = [b"/catalogue/prepare ", b"/catalogue/commit ", b"PUT /chunk/", b"/parts "]
    lost += [b"/catalogue/change_group "] if kind == "group" else []

    def disturb() -> None:
        turn = 0
        while not is_over.wait(0.02):  # a pause, not a wait for anything
            wire.lose_answer(lost[wire.lost_count % len(lost)])  # the next one once this one is lost
            turn += 1
            if turn % 4 == 0:
                wire.cut()

    def write() -> None:
        with filled.writer("in", writer_id="w", linger=None) as writer:
            for number in range(EVENTS_COUNT):
                writer.append(keyed((f"k{number % 7}", number)))
                if number % 10 == 9:
                    writer.flush()
                    time.sleep(0.01)  # a pause, not a wait for anything
        filled.seal("in")

    threads = [threading.Thread(target=work) for work in (disturb, write)]
    for thread in threads:
        thread.start()
    try:
        result = testing.run(pipeline, timeout_s=PIPELINE_WAIT_S)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PIPELINE_WAIT_S)
    assert result is not None
    assert wire.lost_count > 0
    assert drained(filled, "out") == drained(filled, "in")
    assert len(drained(filled, "out")) == EVENTS_COUNT
    assert [problem for problem in filled.fsck() if not problem.is_harmless] == []


class Away:
    """A pipeline whose server is killed at a point of its driver, and then waited for with a patience of an hour."""

    def __init__(self, root: Path, port: int, monkeypatch: pytest.MonkeyPatch, *, retain: bool = True) -> None:
        self.server = ForkedServer(root / "served", port)
        monkeypatch.setattr(clients, "PATIENCE_S", 3_600.0)
        monkeypatch.setattr(fault_points, "reach", self._reach)
        monkeypatch.setattr(SystemEnvironment, "sleep", self._sleep)
        self.kill_at, self._is_waiting = "", threading.Condition()
        self._waiting = set[str]()
        with Store.open(self.server.url) as store:
            store.create_stream("in", KEYED)
            store.create_stream("out", KEYED)
            with store.writer("in", writer_id="w") as writer:
                writer.append(keyed(*((f"k{number}", number) for number in range(EVENTS_COUNT))))
        checkpoints = hg.Checkpointing(interval="20ms", dir=root / "checkpoints", retain_on_cancel=retain)
        self.pipeline = hg.Pipeline("copies", parallelism=1, checkpointing=checkpoints)
        source = self.pipeline.source(hg.StreamSource("in", store=self.server.url), name="source")
        source.sink(hg.StreamSink("out", store=self.server.url), name="out")

    def _reach(self, point: str) -> None:
        if point == self.kill_at:
            self.kill_at = ""
            self.server.kill()

    def _sleep(self, seconds: float) -> None:
        """Of what runs here only clients of a server that is away pause like this."""
        with self._is_waiting:
            self._waiting.add(threading.current_thread().name)
            self._is_waiting.notify_all()
        time.sleep(min(seconds, 0.05))  # a pause, not a wait for anything

    def wait_for(self, *names: str) -> None:
        """Return when threads of these names wait for the server."""

        def are_waiting() -> bool:
            return all(any(found.startswith(name) for found in self._waiting) for name in names)

        with self._is_waiting:
            assert self._is_waiting.wait_for(are_waiting, PIPELINE_WAIT_S)


@pytest.fixture
def away(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Away]]:
    made: list[Away] = []

    def make(**options: bool) -> Away:
        made.append(Away(tmp_path, port, monkeypatch, **options))
        return made[0]

    yield make
    for one in made:
        one.server.kill()


def finished(away: Away) -> None:
    """Run the pipeline to its end; what came before is in its output once."""
    with Store.open(away.server.url) as store:
        store.seal("in")
        assert testing.run(away.pipeline, timeout_s=PIPELINE_WAIT_S).is_finished
        assert drained(store, "out") == drained(store, "in")


@pytest.mark.parametrize(
    ("point", "names"),
    [("in-commit", ("headgate-commit", "headgate-worker")), ("in-recover", ("headgate-storage",))],
)
def test_a_run_that_is_cancelled_waits_for_no_server(
    away: Callable[..., Away], point: str, names: tuple[str, ...]
) -> None:
    """Whoever cancels has seen that it is gone; what was promised the next start commits."""
    run = away()
    run.kill_at = point
    with testing.running(run.pipeline) as handle:
        run.wait_for(*names)
        handle.cancel()
        result = handle.wait(PIPELINE_WAIT_S / 2)
        assert result is not None
        assert result.is_cancelled
    for thread in threading.enumerate():
        if thread.name.startswith(names):
            thread.join(PIPELINE_WAIT_S / 2)
            assert not thread.is_alive(), thread.name
    run.server.start()
    finished(run)


def test_checkpoints_that_are_not_retained_wait_for_the_server(away: Callable[..., Away]) -> None:  # C71
    """It has to commit what they promised before they are removed."""
    run = away(retain=False)
    run.kill_at = "in-commit"
    with testing.running(run.pipeline) as handle:
        run.wait_for("headgate-commit")
        handle.cancel()
        run.wait_for("headgate-storage")
        assert not handle.wait(0)
        run.server.start()
        result = handle.wait(PIPELINE_WAIT_S / 2)
    assert result is not None
    assert result.has_removed_checkpoints
    with Store.open(run.server.url) as store:
        assert set(drained(store, "out")) <= set(drained(store, "in"))
        assert drained(store, "out")
