"""Answers that are lost, and servers that go: nothing is lost, nothing is there twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import SPEAKS, WAIT_S, over, serving
from tests.store.storing import KEYED, STREAM, drained, keyed

from headgate.errors import StorageError, UsageError
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.client import connection as clients
from headgate.store.client.connection import Client, Request, UnreachableError
from headgate.store.client.messages import checksum_of, decode, encode
from headgate.store.server import handlers
from headgate.store.server import handlers as settlings
from headgate.store.server.server import StoreServer
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition

APPEND = b"POST /verb/catalogue/append "


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PAUSES_S", (0.001, 0.02))


def test_a_verb_whose_answer_was_lost_is_done_once(wire: Wire) -> None:  # SS9
    with over(wire) as store, store.writer(STREAM, linger=None) as writer:
        done = writer.append(keyed(("a", 0)))
        wire.lose_answer(APPEND, is_given=True)
        writer.flush()  # and nobody notices
        assert [found.start for found in done.result(0).ranges] == [0]
        transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
        transaction.write(keyed(("b", 1)))
        wire.lose_answer(b"/verb/catalogue/prepare ", is_given=True)
        transaction.prepare()
        wire.lose_answer(b"/verb/catalogue/commit ", is_given=True)
        store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
        assert wire.lost_count == 3
        assert drained(store) == [("a", 0), ("b", 1)]
        assert store.fsck() == []


def test_an_error_whose_answer_was_lost_is_told(wire: Wire) -> None:  # SS9, SS18
    with over(wire) as store:
        wire.lose_answer(b"/verb/catalogue/create_stream ")
        with pytest.raises(UsageError, match="exists"):
            store.create_stream(STREAM, KEYED)


def test_what_is_still_under_way_is_waited_for(
    wire: Wire, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:  # SS9
    monkeypatch.setattr(handlers, "SETTLE_S", 0.05)
    carrying = server._answers._carrying
    signature, append = carrying._verbs["catalogue", "append"]
    asked: list[float] = []

    def slowly(**arguments: Any) -> object:
        asked.append(time.monotonic())
        time.sleep(0.3)  # slow work: not a wait for anything
        return append(**arguments)

    monkeypatch.setitem(carrying._verbs, ("catalogue", "append"), (signature, slowly))
    with over(wire) as store, store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(("a", 0)))
        wire.lose_answer(APPEND)
        writer.flush()
        assert len(asked) == 1
        assert drained(store) == [("a", 0)]


def test_an_answer_that_nobody_knows_any_more_is_the_callers_to_look_up(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:  # SS9
    monkeypatch.setattr(settlings, "ANSWER_BYTES_MAX", 0)
    with over(wire) as store, store.writer(STREAM, linger=None) as writer:
        done = writer.append(keyed(("a", 0)))
        wire.lose_answer(APPEND, is_given=True)
        with pytest.raises(StorageError, match="answer was lost") as caught:
            writer.flush()
        assert caught.value.is_transient
        assert not done.done()
        writer.flush()
        assert [found.start for found in done.result(0).ranges] == [0]
        assert drained(store) == [("a", 0)]


def test_a_question_of_which_nothing_arrived_is_asked_again(wire: Wire, server: StoreServer) -> None:  # SS9
    with over(wire) as store, store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(("a", 0)))
        wire.cut()
        writer.flush()
        assert drained(store) == [("a", 0)]


def test_a_question_that_was_given_up_changes_nothing_when_it_arrives(server: StoreServer) -> None:  # SS9
    client = Client(server.address)
    late, settling = client.connect(), client.connect()
    wanted = StreamDefinition("late", KEYED, 1, None)
    body = encode({"wanted": wanted, "now_ms": 1, "if_not_exists": False})
    head = (
        f"POST /verb/catalogue/create_stream HTTP/1.1\r\n{SPEAKS}\r\nHeadgate-Request: a\r\n"
        f"Headgate-Checksum: {checksum_of(body)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    stream = late._http.sock
    stream.sendall(head.encode() + body[:10])
    answer = settling.ask(Request("POST", "/settle", [encode("a")]))
    assert decode(answer.data, clients.RequestOutcome).is_void
    stream.sendall(body[10:])
    assert stream.recv(1_000).startswith(b"HTTP/1.1 410 ")
    late.close()
    settling.close()
    with Store.open(server.address.url) as store:
        assert [info.name for info in store.list_streams()] == [STREAM]


def test_a_chunk_whose_answer_was_lost_is_there_once(wire: Wire) -> None:  # SS9
    with over(wire) as store, store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(("a", 0)))
        wire.lose_answer(b"PUT /chunk/")
        writer.flush()
        assert wire.lost_count == 1
        assert len(store._core.storage.list("")) == 1
        assert drained(store) == [("a", 0)]


def test_writers_and_readers_go_on_when_the_server_is_started_again(tmp_path: Path, port: int) -> None:
    root = tmp_path / "served"
    with serving(root, port) as first:
        store = Store.open(first.address.url)
        store.create_stream(STREAM, KEYED, segments=1)
        writer, reader = store.writer(STREAM, linger=None), store.reader(STREAM, 0)
        assert reader.read() is None
    flushed: list[BaseException | None] = []
    writer.append(keyed(("a", 1)))
    flushing = threading.Thread(target=lambda: flushed.append(caught(writer.flush)))
    flushing.start()
    with serving(root, port):
        flushing.join(WAIT_S)
        assert flushed == [None]
        deadline_s = time.monotonic() + WAIT_S
        while (batch := reader.read()) is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert batch is not None
        writer.close()
        store.close()


def asked_later(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A lost answer is asked for (first event) when another server is there (second event)."""
    asks, is_another = threading.Event(), threading.Event()
    real = clients.Client._settled

    def settled(self: Client, connection: Any, lost: Any) -> clients.RequestOutcome:
        if not is_another.is_set():
            asks.set()
            assert is_another.wait(WAIT_S)
            raise UnreachableError("is away")
        return real(self, connection, lost)

    monkeypatch.setattr(clients.Client, "_settled", settled)
    return asks, is_another


def test_a_server_that_is_another_one_by_now_does_not_know(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # SS9: its memory went with it, so the caller looks it up
    asks, is_another = asked_later(monkeypatch)
    flushed: list[BaseException | None] = []
    with ExitStack() as opened:
        with serving(tmp_path / "served", port):
            wire = Wire(port)
            opened.callback(wire.close)
            store = opened.enter_context(over(wire))
            store.create_stream(STREAM, KEYED, segments=1)
            writer = store.writer(STREAM, linger=None)
            done = writer.append(keyed(("a", 0)))
            wire.lose_answer(APPEND)
            flushing = threading.Thread(target=lambda: flushed.append(caught(writer.flush)))
            flushing.start()
            assert asks.wait(WAIT_S)
        with serving(tmp_path / "served", port):
            is_another.set()
            flushing.join(WAIT_S)
            assert [type(error) for error in flushed] == [StorageError]
            assert "the answer was lost" in str(flushed[0])
            assert not done.done()
            writer.flush()
            assert [found.start for found in done.result(0).ranges] == [0]
            assert drained(store) == [("a", 0)]


@pytest.mark.parametrize("verb", ["seal_stream", "truncate"])
def test_what_can_be_repeated_is_when_another_server_does_not_know(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:  # SS9
    asks, is_another = asked_later(monkeypatch)
    ended: list[BaseException | None] = []
    with ExitStack() as opened:
        with serving(tmp_path / "served", port):
            wire = Wire(port)
            opened.callback(wire.close)
            store = opened.enter_context(over(wire))
            store.create_stream(STREAM, KEYED, segments=1)
            with store.writer(STREAM, linger=None) as writer:
                writer.append(keyed(("a", 0), ("b", 1)))
            cut = store.tail(STREAM)
            wire.lose_answer(f"POST /verb/catalogue/{verb}".encode())
            work = partial(store.seal, STREAM) if verb == "seal_stream" else partial(store.truncate, cut)
            working = threading.Thread(target=lambda: ended.append(caught(work)))
            working.start()
            assert asks.wait(WAIT_S)
        with serving(tmp_path / "served", port):
            is_another.set()
            working.join(WAIT_S)
            assert ended == [None]
            assert wire.lost_count == 1
            assert store.find(STREAM).is_sealed is (verb == "seal_stream")


def caught(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def test_another_store_in_the_place_of_the_first_is_refused(tmp_path: Path, port: int) -> None:
    with serving(tmp_path / "first", port) as first:
        store = Store.open(first.address.url)
        store.create_stream(STREAM, KEYED)
    with serving(tmp_path / "second", port) as second:
        with pytest.raises(StorageError, match="another store") as caught:
            store.find(STREAM)
        assert not caught.value.is_transient
        with Store.open(second.address.url) as other:
            assert other.list_streams() == []
    store.close()


def test_one_process_serves_a_store(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "served"),
        pytest.raises(UsageError, match="another process serves"),
        serving(tmp_path / "served"),
    ):
        raise AssertionError("two servers would not know of each other's questions")


def test_others_may_use_the_directory_meanwhile(server: StoreServer, tmp_path: Path) -> None:
    local = Store._open_directory(str(tmp_path / "served"), None, "owner")
    with local, Store.open(server.address.url) as store:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None
        with local.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        deadline_s = time.monotonic() + WAIT_S
        while (batch := reader.read()) is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert batch is not None
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 2)))
        assert drained(local) == [("a", 1), ("a", 2)]
        assert isinstance(local._core.catalogue, SqlCatalogue)


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "OPENING_PATIENCE_S", 0.0)
    with pytest.raises(StorageError, match=r"headgate://127\.0\.0\.1:1: Connection refused") as caught:
        Store.open("headgate://127.0.0.1:1")
    assert caught.value.is_transient


def test_what_is_no_server_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    page = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    monkeypatch.setattr(clients, "OPENING_PATIENCE_S", 0.0)
    try:
        with pytest.raises((StorageError, UsageError)):
            Store.open(f"http://127.0.0.1:{page.server_address[1]}")
    finally:
        page.shutdown()
        page.server_close()
        thread.join(WAIT_S)
