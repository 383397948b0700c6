"""Pipelines between streams of a served store: each event once, although answers are lost and the wire is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import ServerProcess
from tests.store.storing import KEYED, drained, keyed

import headgate as hg
from headgate import fault_points, testing
from headgate.connectors.base import Source
from headgate.environment import SystemEnvironment
from headgate.store.addresses import TOKEN_FILE_VARIABLE
from headgate.store.client import requests as clients
from headgate.store.server.server import StoreServer
from headgate.store.store import Store

WAIT_S = 240.0
COUNT = 200


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
            for number in range(COUNT):
                writer.append(keyed((f"k{number % 7}", number)))
                if number % 10 == 9:
                    writer.flush()
                    time.sleep(0.01)  # a pause, not a wait for anything
        filled.seal("in")

    threads = [threading.Thread(target=work) for work in (disturb, write)]
    for thread in threads:
        thread.start()
    try:
        result = testing.run(pipeline, timeout_s=WAIT_S)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert result is not None
    assert wire.lost_count > 0
    assert drained(filled, "out") == drained(filled, "in")
    assert len(drained(filled, "out")) == COUNT
    assert [problem for problem in filled.fsck() if not problem.is_harmless] == []


class Away:
    """A pipeline whose server is killed at a point of its driver, and then waited for with a patience of an hour."""

    def __init__(self, root: Path, port: int, monkeypatch: pytest.MonkeyPatch, *, retain: bool = True) -> None:
        self.server = ServerProcess(root / "served", port)
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, self.server.said["token_file"])
        monkeypatch.setattr(clients, "PATIENCE_S", 3_600.0)
        monkeypatch.setattr(fault_points, "reach", self._reach)
        monkeypatch.setattr(SystemEnvironment, "sleep", self._sleep)
        self.kill_at, self._is_waiting = "", threading.Condition()
        self._waiting = set[str]()
        with Store.open(self.server.url) as store:
            store.create_stream("in", KEYED)
            store.create_stream("out", KEYED)
            with store.writer("in", writer_id="w") as writer:
                writer.append(keyed(*((f"k{number}", number) for number in range(COUNT))))
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
            assert self._is_waiting.wait_for(are_waiting, WAIT_S)


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
        assert testing.run(away.pipeline, timeout_s=WAIT_S).is_finished
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
        result = handle.wait(WAIT_S / 2)
        assert result is not None
        assert result.is_cancelled
    for thread in threading.enumerate():
        if thread.name.startswith(names):
            thread.join(WAIT_S / 2)
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
        result = handle.wait(WAIT_S / 2)
    assert result is not None
    assert result.has_removed_checkpoints
    with Store.open(run.server.url) as store:
        assert set(drained(store, "out")) <= set(drained(store, "in"))
        assert drained(store, "out")
