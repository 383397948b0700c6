"""The pages of a run and of all pipelines, over real sockets: who may look, what may be asked, and the edges."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.clocks import HandClock
from tests.web.shop import NOW_MS, Asked, definition, progress

from headgate.api.pipeline_registry import KnownPipeline, KnownState, PipelineRegistry
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.model.progress import CheckpointOutcome, SubtaskAlignment
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage
from headgate.web import app as responses
from headgate.web import app as serving_module
from headgate.web.app import (
    BODY_BYTES_MAX,
    OVERVIEW_AGE_MS_MAX,
    OVERVIEW_FILES,
    RUN_FILES,
    Overview,
    RunActions,
    is_same_user,
    make_app,
    make_overview_app,
    serve_page,
)
from headgate.web.view_model import LogDirectory, RunView

TOKEN = {"Authorization": "Bearer sesame"}


class Browser:
    """Asks the page at ``address``."""

    address: str

    def connect(self) -> http.client.HTTPConnection:
        place = urlsplit(self.address)
        return http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


class Page(Browser):
    """A page that is served, and a browser's requests."""

    def __init__(self, root: Path, token: str | None = None, host: str = "127.0.0.1") -> None:
        self.story, self.asking, self.logs = RunView(definition(root)), RunActions(), LogDirectory()
        self.story.set_progress(progress(), NOW_MS, 0)
        self._token, self._host = token, host

    @contextmanager
    def served(self) -> Iterator[Page]:
        with serve_page(
            partial(make_app, self.story, self.asking, self.logs), 0, self._host, self._token
        ) as self.address:
            yield self

    def ask(self, wish: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        connection.request("POST", f"/api/ask/{wish}", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Page(tmp_path, "sesame").served() as page:
        yield page


def test_all_files_of_the_page_are_served_and_load_nothing_from_elsewhere(page: Page) -> None:
    for path in RUN_FILES:
        connection = page.connect()
        connection.request("GET", path)
        answer = connection.getresponse()
        content = answer.read().decode()
        assert answer.status == 200
        assert "default-src 'self'" in str(answer.headers["Content-Security-Policy"])
        assert "https://" not in content, path
        assert "http://" not in content.replace("http://www.w3.org/", ""), path


def test_whoever_is_on_this_machine_may_look_and_not_ask(page: Page) -> None:
    status, content = page.get("/api/state")
    shown = json.loads(content)
    assert (status, shown["pipeline"], shown["may_ask"]) == (200, "shop", False)
    assert json.loads(page.get("/api/state", **TOKEN)[1])["may_ask"] is True
    handle = Asked()
    page.asking.begin(handle)  # type: ignore[arg-type]
    for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "sesame "}):
        status, answer = page.ask("stop", **headers)
        assert status == 403
        assert "token" in answer["error"]
    assert handle.calls == []


def test_with_the_token_it_asks_what_a_program_may_ask(page: Page) -> None:
    assert page.ask("stop", **TOKEN) == (409, {"error": "the pipeline has not started yet; ask again when it runs"})
    handle = Asked()
    page.asking.begin(handle)  # type: ignore[arg-type]
    assert page.ask("checkpoint", **TOKEN)[1] == {"answer": "checkpoint 9 is complete"}
    handle.outcome = CheckpointOutcome(CheckpointId(10), savepoint="/elsewhere")
    sent = json.dumps({"path": " /elsewhere "}).encode()
    assert page.ask("savepoint", sent, **TOKEN)[1] == {"answer": "checkpoint 10 is a savepoint at /elsewhere"}
    assert page.ask("savepoint", **TOKEN)[0] == 409
    handle.outcome = CheckpointOutcome(None, "storage is full")
    assert page.ask("checkpoint", **TOKEN) == (409, {"error": "there is none: storage is full"})
    assert page.ask("stop", **TOKEN)[0] == page.ask("drain", **TOKEN)[0] == 200
    assert page.ask("cancel", **TOKEN)[0] == 404
    assert [call for call, _ in handle.calls] == ["checkpoint", "savepoint", "checkpoint", "stop", "drain"]


@pytest.mark.parametrize("body", [b"x", b"[]", b"{" + b" " * BODY_BYTES_MAX + b"}", b"\xff"])
def test_what_is_no_small_object_is_refused(page: Page, body: bytes) -> None:
    page.asking.begin(Asked())  # type: ignore[arg-type]
    assert page.ask("savepoint", body, **TOKEN)[0] == 400


def test_a_name_of_another_site_that_leads_here_is_refused(page: Page) -> None:
    assert page.get("/api/state", Host="evil.example")[0] == 400
    port = urlsplit(page.address).port
    assert page.get("/api/state", Host=f"localhost:{port}")[0] == 200


def test_news_is_sent_as_it_comes(page: Page) -> None:
    connection = page.connect()
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    first = _event(answer)
    page.story.add_note("something happened", NOW_MS)
    second = _event(answer)
    assert second["version"] > first["version"]
    assert second["notes"][0]["text"] == "something happened"


def test_it_ends_with_the_run_though_somebody_looks(tmp_path: Path) -> None:
    page = Page(tmp_path)
    with ExitStack() as opened:
        opened.enter_context(page.served())
        connection = page.connect()
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        _event(answer)
        page.story.set_end("finished", "finished after 3 s", NOW_MS)
        assert _event(answer)["ended"]["outcome"] == "finished"
        opened.close()
    assert not any(thread.name == "headgate-page" for thread in threading.enumerate())
    with pytest.raises(ConnectionError):
        page.get("/api/state")


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    page = Page(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127.0.0.1:{port}: Address already in use; --ui takes another"):
            serve_page(partial(make_app, page.story, page.asking, page.logs), port, "127.0.0.1", None).__enter__()


def test_other_machines_need_the_token_to_look(tmp_path: Path) -> None:
    page = Page(tmp_path, None, "0.0.0.0")
    with pytest.raises(UsageError, match="HEADGATE_UI_TOKEN"):
        serve_page(partial(make_app, page.story, page.asking, page.logs), 0, "0.0.0.0", None).__enter__()
    with Page(tmp_path, "sesame", "0.0.0.0").served() as page:
        assert page.get("/api/state")[0] == page.get("/api/events")[0] == 401
        assert page.get("/")[0] == 200
        assert page.get("/api/state", Host="driver.example", **TOKEN)[0] == 200


def test_the_alignment_of_a_checkpoint_is_told_by_subtask(page: Page) -> None:
    assert page.get("/api/alignment/7")[0] == 404
    page.story.set_alignments({CheckpointId(7): (SubtaskAlignment("w[0]", 10, 1), SubtaskAlignment("w[1]", 4_000, 2))})
    found = json.loads(page.get("/api/alignment/7")[1])
    assert [one["subtask"] for one in found["subtasks"]] == ["w[1]", "w[0]"]
    assert page.get("/api/alignment/x")[0] == 404


def test_logs_are_read_by_their_owner_and_by_whoever_has_the_token(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker-0.log").write_text("seen 17\n")
    page.logs.set_directory(str(tmp_path))
    assert json.loads(page.get("/api/logs")[1]) == {"place": str(tmp_path), "logs": ["worker-0"]}
    assert json.loads(page.get("/api/state")[1])["may_read_logs"] is True
    monkeypatch.setattr(responses, "TABLES", ())  # as if the browser belonged to somebody else
    assert json.loads(page.get("/api/state")[1])["may_read_logs"] is False
    for path in ("/api/logs", "/api/logs/worker-0/events"):
        status, answer = page.get(path)
        assert status == 403
        assert "seen" not in answer.decode()
    assert page.get("/api/logs", **TOKEN)[0] == 200


def test_a_log_is_followed_and_no_other_file_is_read(page: Page, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "worker-0.log"
    log.parent.mkdir()
    log.write_text("seen 17\n")
    (tmp_path / "secret.log").write_text("secret\n")
    (log.parent / "secret.log").write_text("secret\n")
    page.logs.set_directory(str(log.parent))
    for name in ("secret", "worker-1", "..%2Fsecret", "%2e%2e/secret", "worker-0.log"):
        assert page.get(f"/api/logs/{name}/events")[0] == 404, name
    connection = page.connect()
    connection.request("GET", "/api/logs/worker-0/events")
    answer = connection.getresponse()
    assert _event(answer) == {"text": "seen 17\n"}
    with log.open("a") as file:
        file.write("seen 18\n")
    assert _event(answer) == {"text": "seen 18\n"}


def _event(answer: http.client.HTTPResponse) -> dict[str, Any]:
    while True:
        line = answer.readline().decode()
        assert line, "the connection was closed"
        if line.startswith("data: "):
            found: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return found


def test_silent_browsers_take_a_few_descriptors_and_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(serving_module, "HEAD_S", 600.0)  # what ends them is that others come
    with Page(tmp_path).served() as page, ExitStack() as opened:
        followed = page.connect()
        opened.callback(followed.close)
        followed.request("GET", "/api/events")
        answer = followed.getresponse()
        assert answer.read(6) == b"data: "
        place = urlsplit(page.address)
        flood = [
            opened.enter_context(socket.create_connection((str(place.hostname), place.port), 120)) for _ in range(40)
        ]
        for stream in flood[:36]:
            with suppress(ConnectionResetError):
                assert stream.recv(1) == b"", "who came later took its place"
        assert page.get("/")[0] == 200
        assert answer.read(1), "who is answered goes on"


def test_a_browser_that_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "HEAD_S", 0.1)
    with Page(tmp_path).served() as page:
        place = urlsplit(page.address)
        with socket.create_connection((str(place.hostname), place.port), 120) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\n")
            with suppress(ConnectionResetError):
                assert stream.recv(1) == b""


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


class OverviewPage(Browser):
    """The page that is served, and a browser's requests."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, wish: str, **body: str) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        connection.request("POST", f"/api/ask/{wish}", json.dumps(body), TOKEN)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def served(looker: PipelineRegistry, token: str | None = "sesame", host: str = "127.0.0.1") -> Iterator[OverviewPage]:
    with serve_page(partial(make_overview_app, Overview(looker)), 0, host, token, "--port") as address:
        yield OverviewPage(address)


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


def test_news_of_all_pipelines_is_sent_as_it_comes() -> None:
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


TITLES = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
PAGE, BROWSER = ("127.0.0.1", 4050), ("127.0.0.1", 41_006)


def row(local: str, remote: str, state: str = "01", uid: int = 1_000) -> str:
    return (
        f"   1: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  {uid}        0 4711 1 0 100 0 0 10 0"
    )


@pytest.mark.skipif(sys.byteorder != "little", reason="the rows are of such a machine")
def test_the_browsers_end_says_whose_it_is() -> None:
    browser, page = "0100007F:A02E", "0100007F:0FD2"
    table = [TITLES, row(page, browser, uid=7), row(browser, page, uid=1_001)]
    assert responses.owner_in(table, BROWSER, PAGE) == 1_001
    assert responses.owner_in([TITLES, row(browser, page, "06", 0)], BROWSER, PAGE) is None, "closed long ago"
    assert responses.owner_in([TITLES, row(browser, "0100007F:0FD3")], BROWSER, PAGE) is None, "to another port"
    assert responses.owner_in(["nonsense", ""], BROWSER, PAGE) is None
    loopback_6 = "00000000000000000000000001000000"
    assert (
        responses.owner_in([row(f"{loopback_6}:A02E", f"{loopback_6}:0FD2")], ("::1", 41_006), ("::1", 4_050)) == 1_000
    )
    mapped = "0000000000000000FFFF00000100007F"
    assert responses.owner_in([row(f"{mapped}:A02E", f"{mapped}:0FD2")], BROWSER, PAGE) == 1_000


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="there is no such table here")
def test_a_connection_of_this_process_is_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server as listener, socket.create_connection(listener.getsockname()) as browser:
        assert is_same_user(browser.getsockname(), listener.getsockname())
        monkeypatch.setattr(os, "getuid", lambda: 4_711)
        assert not is_same_user(browser.getsockname(), listener.getsockname())
    monkeypatch.setattr(responses, "TABLES", ("/nowhere",))
    assert not is_same_user(BROWSER, PAGE)
