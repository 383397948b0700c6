"""What became of a request whose answer was lost, and who hears of news: readers ask the server nothing before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import WAIT_S, over
from tests.store.storing import KEYED, STREAM, in_a_child, keyed

from headgate.errors import StorageError
from headgate.store import core
from headgate.store.client import remote_store
from headgate.store.client.connection import RequestOutcome
from headgate.store.fsck import Problem
from headgate.store.reader import SegmentReader
from headgate.store.server import handlers as settlings
from headgate.store.server.handlers import ChangeFeed, CheckJobs, Deduplication, ServerCounts, ServerMetrics, VoidError
from headgate.store.server.server import StoreServer
from headgate.store.store import Store


def test_an_answer_is_kept_for_who_lost_it() -> None:  # SS9
    settling = Deduplication()
    with settling.under_way("a") as outcome:
        outcome.status, outcome.data = 200, b"done"
    assert settling.settle("a", 0) == RequestOutcome(is_over=True, status=200, data=b"done")
    assert settling.settle("a", 0) == RequestOutcome(is_over=True, status=200, data=b"done")
    with pytest.raises(VoidError), settling.under_way("a"):
        raise AssertionError("a question that comes twice is carried out once")


def test_a_question_that_comes_late_is_void() -> None:  # SS9
    settling = Deduplication()
    assert settling.settle("late", 0) == RequestOutcome(is_over=True, is_void=True)
    with pytest.raises(VoidError), settling.under_way("late"):
        raise AssertionError("nobody waits for it any more")
    assert settling.settle("late", 0) == RequestOutcome(is_over=True, is_void=True)


def test_who_asks_for_what_is_under_way_waits_for_it() -> None:  # SS9
    settling = Deduplication()
    found: list[RequestOutcome] = []
    with settling.under_way("slow") as outcome:
        assert settling.settle("slow", 0) == RequestOutcome(is_over=False)
        asking = threading.Thread(target=lambda: found.append(settling.settle("slow", WAIT_S)))
        asking.start()
        outcome.status, outcome.data = 200, b"at last"
    asking.join(WAIT_S)
    assert found == [RequestOutcome(is_over=True, status=200, data=b"at last")]


def test_a_question_that_failed_is_over() -> None:  # SS9
    settling = Deduplication()
    with pytest.raises(OSError, match="gone"), settling.under_way("a"):
        raise OSError("gone")
    assert settling.settle("a", 0) == RequestOutcome(is_over=True)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:  # SS9
    monkeypatch.setattr(settlings, "ANSWERS_MAX", 2)
    monkeypatch.setattr(settlings, "ANSWER_BYTES_MAX", 3)
    settling = Deduplication()
    for name, data in (("a", b"abc"), ("b", b"abc"), ("large", b"abcd")):
        with settling.under_way(name) as outcome:
            outcome.status, outcome.data = 200, data
    assert settling.settle("large", 0) == RequestOutcome(is_over=True), "nobody knows what was answered"
    assert settling.settle("b", 0).data == b"abc"
    assert len(settling._answered) == 2
    assert settling.settle("a", 0) == RequestOutcome(is_over=True), "it was carried out, so it must not be asked again"
    with pytest.raises(VoidError), settling.under_way("a"):
        raise AssertionError("a question that comes twice is carried out once")


def test_of_what_was_carried_out_so_many_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:  # SS9
    monkeypatch.setattr(settlings, "ANSWERS_MAX", 1)
    monkeypatch.setattr(settlings, "CARRIED_OUT_MAX", 2)
    settling = Deduplication()
    for name in "abc":
        with settling.under_way(name) as outcome:
            outcome.status = 200
    found = {name: settling.settle(name, 0) for name in "abc"}
    assert found["c"] == RequestOutcome(is_over=True, status=200)
    assert found["b"] == RequestOutcome(is_over=True)
    assert found["a"].is_void


def test_news_are_heard_by_who_waits() -> None:
    number = [1]
    news = ChangeFeed(lambda: number[0])
    try:
        first = news.wait(-1, WAIT_S)
        heard: list[int] = []
        waiting = threading.Thread(target=lambda: heard.append(news.wait(first, WAIT_S)))
        waiting.start()
        number[0] = 2  # somebody on this machine
        waiting.join(WAIT_S)
        assert heard[0] != first
        news.changed()
        assert news.wait(heard[0], WAIT_S) != heard[0]
    finally:
        news.close()


def test_what_was_changed_here_wakes_who_waits() -> None:
    """The look at the store tells nothing: it is the same each time."""
    waits = threading.Event()

    def look() -> int:
        waits.set()
        return 1

    news = ChangeFeed(look)
    try:
        first = news.wait(-1, WAIT_S)
        waits.clear()
        heard: list[int] = []
        waiting = threading.Thread(target=lambda: heard.append(news.wait(first, WAIT_S)))
        waiting.start()
        assert waits.wait(WAIT_S)
        news.changed()  # not before the one that looks has come to wait
        waiting.join(WAIT_S)
        assert heard == [first + 1]
    finally:
        news.close()


class NobodyWaitsError(Exception):
    pass


class Idle:
    """Threads that the test runs, with a condition at which waiting for ever ends it."""

    def __init__(self) -> None:
        self.run: Callable[[], None] = lambda: None

    def condition(self) -> Idle:
        return self

    def thread(self, run: Callable[[], None], name: str) -> Idle:
        self.run = run
        return self

    def start(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if timeout_s is None and not is_so():
            raise NobodyWaitsError
        return is_so()


def test_a_store_is_not_looked_at_while_nobody_waits() -> None:
    looks: list[int] = []
    threads = Idle()
    ChangeFeed(lambda: looks.append(1) or 1, threads)  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(NobodyWaitsError):
        threads.run()
    assert looks == []


def test_what_came_between_two_questions_for_news_is_heard() -> None:
    number = [1]
    news = ChangeFeed(lambda: number[0])
    try:
        first = news.wait(-1, WAIT_S)
        number[0] = 2  # nobody waits now
        assert news.wait(first, 0) != first
    finally:
        news.close()
    assert news.wait(first, WAIT_S) is not None, "nobody waits for a server that ends"


def test_a_check_is_waited_for_and_another_one_is_begun_for_who_asks_anew() -> None:
    may_end = threading.Event()
    begun: list[bool] = []

    def check(verify: bool) -> list[Problem]:
        begun.append(verify)
        assert may_end.wait(WAIT_S)
        return [Problem("here", "something")]

    checking = CheckJobs(check)
    first = checking.ask(0, 0, verify_events=True)
    assert not first.is_over
    may_end.set()
    found = checking.ask(first.number, WAIT_S, verify_events=True)
    assert (found.is_over, found.problems) == (True, (Problem("here", "something"),))
    assert checking.ask(0, WAIT_S, verify_events=False).number != first.number
    assert begun == [True, False]


def test_findings_are_kept_of_so_many_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlings, "KEPT_MAX", 2)
    checking = CheckJobs(lambda verify: [])
    numbers = [checking.ask(0, WAIT_S, verify_events=True).number for _ in range(4)]
    assert checking.ask(numbers[3], WAIT_S, verify_events=True).number == numbers[3]
    assert checking.ask(numbers[0], WAIT_S, verify_events=True).number > numbers[3], "it is begun again"


def test_a_server_has_counted_nothing_when_it_begins() -> None:
    metrics = ServerMetrics()
    assert metrics.counts == ServerCounts(0, 0, 0, 0, 0, 0, 0)
    metrics.add(requests=1, bytes_in=5)
    metrics.add(requests=1)
    assert metrics.counts == ServerCounts(requests=2, bytes_in=5)


def test_a_check_that_fails_says_so() -> None:
    def check(verify: bool) -> list[Problem]:
        raise StorageError("read", "catalogue", "disk I/O error")

    with pytest.raises(StorageError, match="disk I/O error"):
        CheckJobs(check).ask(0, WAIT_S, verify_events=True)


def test_a_check_that_ends_in_a_mistake_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(verify: bool) -> list[Problem]:
        raise TypeError("a mistake")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(StorageError, match="cannot check the store: the server made a mistake: TypeError"):
        CheckJobs(check).ask(0, WAIT_S, verify_events=True)


def soon(reader: SegmentReader) -> list[int]:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        batch = reader.read()
        if batch is not None:
            found: list[int] = batch.column(1).to_pylist()
            return found
        time.sleep(0.001)
    return []


def test_a_reader_hears_of_news_from_afar(server: StoreServer) -> None:
    with Store.open(server.address.url) as store, Store.open(server.address.url) as other:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None
        before = server.counts.requests
        for _ in range(100):
            assert reader.read() is None
        assert server.counts.requests <= before + 1
        with other.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        assert soon(reader) == [1]


def test_who_hears_of_news_does_not_look(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "POLL_MS", 0)  # who looks does so each time
    with Store.open(server.address.url) as store:
        deadline_s = time.monotonic() + WAIT_S
        while store.changes() != store.changes() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert store.changes() == store.changes()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_waits_for_no_thread_of_its_parent(server: StoreServer) -> None:
    with Store.open(server.address.url) as store:
        store.changes()
        listener = store._core.catalogue._change_listener  # type: ignore[attr-defined]
        with listener._lock:  # as its thread may have it
            in_a_child(lambda: store.create_stream("child", KEYED, segments=1) and store.changes())
        assert store.find("child").segments_count == 1


def test_what_a_process_has_changed_its_readers_see_at_once(server: StoreServer) -> None:
    with Store.open(server.address.url) as store, store.writer(STREAM, linger=None) as writer:
        reader = store.reader(STREAM, 0)
        for number in range(10):
            assert reader.read() is None
            writer.append(keyed(("a", number)))
            writer.flush()
            batch = reader.read()
            assert batch is not None
            assert batch.column(1).to_pylist() == [number]


def test_a_reader_that_hears_nothing_looks_for_itself(
    server: StoreServer, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over(wire) as store, Store.open(server.address.url) as other:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None
        client = store._core.catalogue._client  # type: ignore[attr-defined]
        monkeypatch.setattr(remote_store.ServerChangeListener, "_hear", lambda self, connection: connection.close())
        wire.cut()
        for _ in range(20):  # whoever would take the last that it heard for the present has done so by then
            assert reader.read() is None
            time.sleep(0.01)  # a pause, not a wait for anything
        with other.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        assert soon(reader) == [1]
        assert client.facts().store


def test_what_comes_while_a_reader_asks_is_not_overlooked(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    carrying = server._answers._carrying
    signature, parts = carrying._verbs["catalogue", "parts"]
    with Store.open(server.address.url) as store, Store.open(server.address.url) as other:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None  # and now it hears
        waits = [1]

        def write_behind(**arguments: object) -> object:
            found = parts(**arguments)
            if waits:
                waits.clear()
                with other.writer(STREAM) as writer:
                    writer.append(keyed(("a", 1)))
            return found

        monkeypatch.setitem(carrying._verbs, ("catalogue", "parts"), (signature, write_behind))
        store._core.catalogue._change_listener.changed_here()  # type: ignore[attr-defined]
        assert reader.read() is None
        assert soon(reader) == [1]


def test_who_closes_a_store_waits_for_nobody(server: StoreServer) -> None:
    def hearing() -> int:
        return [thread.name for thread in threading.enumerate()].count(remote_store.THREAD)

    store, before = Store.open(server.address.url), hearing()
    store.changes()
    store.close()
    assert hearing() == before
    assert store.changes() > 0, "and another question begins anew"
    store.close()
