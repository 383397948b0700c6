"""The page of all pipelines, over real sockets: who may look, and what may be asked of whom."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.clocks import HandClock

from headgate.api.pipeline_registry import KnownPipeline, KnownState, PipelineRegistry
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage
from headgate.web.app import OVERVIEW_AGE_MS_MAX, OVERVIEW_FILES, Overview, make_overview_app, serve_page

TOKEN = {"Authorization": "Bearer sesame"}
RUNNER = """
import signal, sys
wanted = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # in threads that imports start, too
from headgate.codec.json_files import Ending
from headgate.model.ids import CheckpointId
from headgate.model.progress import CheckpointOutcome
from headgate.runtime.driver.pipeline_lock import waiting_requests
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
with taking_signals():
    lock = PipelineLock.acquire(sys.argv[1], "p", "a child")
print("ready", flush=True)
while (number := signal.sigwait(wanted)) == signal.SIGUSR2:
    for ask in waiting_requests(sys.argv[1], "p"):
        request = ask.take()
        ask.answer(CheckpointOutcome(CheckpointId(9), savepoint=request.savepoint or None))
lock.release(Ending.DRAINED if number == signal.SIGUSR1 else Ending.STOPPED, 9, "")
"""


class Found(PipelineRegistry):
    """Sees what the test says, and counts."""

    def __init__(self, found: Sequence[KnownPipeline]) -> None:
        super().__init__()
        self.found, self.looks = list(found), 0

    def look(self) -> list[KnownPipeline]:
        self.looks += 1
        return self.found


class Page:
    """The page that is served, and a browser's requests."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connect(self) -> http.client.HTTPConnection:
        place = urlsplit(self.address)
        return http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def ask(self, wish: str, **body: str) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        connection.request("POST", f"/api/ask/{wish}", json.dumps(body), TOKEN)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def served(looker: PipelineRegistry, token: str | None = "sesame", host: str = "127.0.0.1") -> Iterator[Page]:
    with serve_page(partial(make_overview_app, Overview(looker)), 0, host, token, "--port") as address:
        yield Page(address)


@contextmanager
def running(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Have a child run pipeline ``p``: it answers whoever asks, and stops."""
    with subprocess.Popen([sys.executable, "-c", RUNNER, str(root)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_all_files_load_nothing_from_elsewhere() -> None:
    with served(Found([])) as page:
        for path in OVERVIEW_FILES:
            status, content = page.get(path)
            assert status == 200
            assert b"https://" not in content, path
            assert b"http://" not in content.replace(b"http://www.w3.org/", b""), path


def test_whoever_is_on_this_machine_may_look_and_others_need_the_token() -> None:
    looker = Found([KnownPipeline("p", "/somewhere", KnownState.DIED)])
    with served(looker) as page:
        status, content = page.get("/api/state")
        assert (status, json.loads(content)["may_ask"]) == (200, False)
        assert json.loads(content)["pipelines"][0]["state"] == "died"
        assert page.get("/api/state", Host="evil.example")[0] == 400
        connection = page.connect()
        connection.request("POST", "/api/ask/stop", json.dumps({"pipeline": "p", "place": "/somewhere"}))
        assert connection.getresponse().status == 403
    with served(looker, host="0.0.0.0") as page:
        page.address = page.address.replace("0.0.0.0", "127.0.0.1")
        assert page.get("/api/state")[0] == 401
        assert page.get("/api/state", **TOKEN)[0] == 200


def test_only_what_is_shown_may_be_asked(tmp_path: Path) -> None:
    with served(Found([KnownPipeline("p", str(tmp_path), KnownState.DIED)])) as page:
        for name, place in (("p", "/elsewhere"), ("q", str(tmp_path))):
            status, answer = page.ask("stop", pipeline=name, place=place)
            assert (status, "is known here" in answer["error"]) == (409, True)
        status, answer = page.ask("stop", pipeline="p", place=str(tmp_path))
        assert (status, "no pipeline 'p' runs" in answer["error"]) == (409, True)
        assert page.ask("cancel", pipeline="p", place=str(tmp_path))[0] == 404
        assert page.ask("stop")[0] == 409


def test_a_pipeline_of_another_process_is_asked_for_a_checkpoint_and_to_stop(tmp_path: Path) -> None:
    CheckpointLog(open_storage(str(tmp_path)), "p").claim("test", 1_700_000_000_000)
    it = {"pipeline": "p", "place": str(tmp_path)}
    with running(tmp_path) as child, served(PipelineRegistry([str(tmp_path)])) as page:
        assert page.ask("checkpoint", **it) == (200, {"answer": "p: checkpoint 9 is complete"})
        assert page.ask("savepoint", **it)[0] == 409
        status, answer = page.ask("savepoint", **it, path=str(tmp_path / "kept"))
        assert (status, answer["answer"]) == (200, f"p: checkpoint 9 is a savepoint at {tmp_path / 'kept'}")
        assert page.ask("stop", **it) == (200, {"answer": "p: it stops"})
        assert child.wait(120) == 0
        assert list((tmp_path / "p").glob("checkpoint-*")) == []


def test_news_is_sent_as_it_comes() -> None:
    looker = Found([])
    with served(looker) as page:
        connection = page.connect()
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert _event(answer)["pipelines"] == []
        looker.found = [KnownPipeline("p", "/somewhere", KnownState.RUNNING, page="http://127.0.0.1:4051/")]
        assert _event(answer)["pipelines"][0]["page"] == "http://127.0.0.1:4051/"
        connection.close()


def test_browsers_share_a_look() -> None:
    clock, looker = HandClock(), Found([])
    overview = Overview(looker, clock)
    for _ in range(5):
        assert overview.shown() == []
    assert looker.looks == 1
    clock.advance(OVERVIEW_AGE_MS_MAX)
    overview.shown()
    assert looker.looks == 2


def _event(answer: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    found: dict[str, Any] = json.loads(line[len(b"data: ") :])
    return found
