"""A server that goes, comes again, is cut off, keeps silent, or is asked nothing: nothing is lost or there twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import Wire
from tests.store.storing import KEYED, STREAM, database_of, drained, in_a_child, keyed

from headgate.connectors.base import SourceContext
from headgate.connectors.streams.stream_source import StreamSource
from headgate.errors import StorageError
from headgate.store import location
from headgate.store.catalogue import postgresql as databases
from headgate.store.catalogue.postgresql import PostgresDatabase
from headgate.store.store import Store

SOON_S = 300.0
SLOW_S = 0.5
"""So long a commit takes in a test that asks meanwhile what became of it."""
COMMIT = b"COMMIT\0"
"""The whole command, as the client sends it."""


pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(STREAM, KEYED, segments=1)
        yield opened


@pytest.fixture
def wire(postgres: PostgresServer) -> Iterator[Wire]:
    made = Wire(postgres.port)
    yield made
    made.close()


@pytest.fixture
def through(store: Store, wire: Wire, postgres: PostgresServer) -> Iterator[Store]:
    """The same store, over a wire that can be cut."""
    url = store.root.replace(f":{postgres.port}/", f":{wire.port}/")
    catalogue, storage, _ = location.open_shared(url, None)
    with Store(url, catalogue, storage) as opened:
        yield opened


def test_a_verb_goes_on_when_its_connections_were_cut(through: Store, wire: Wire) -> None:
    with through.writer(STREAM, linger=None) as writer:
        for number in range(5):
            writer.append(keyed(("a", number)))
            wire.cut()
            writer.flush()
            wire.cut()
            assert len(drained(through)) == number + 1
    through.seal(STREAM)


@pytest.mark.parametrize("question", [b"FOR UPDATE", b"INSERT INTO parts", b"UPDATE segments"])
def test_a_verb_that_was_cut_off_before_its_commit_is_carried_out_again(
    through: Store, wire: Wire, question: bytes
) -> None:
    with through.writer(STREAM, linger=None) as writer:
        writer.append(keyed(("a", 0), ("a", 1)))
        wire.lose_answer(question)
        writer.flush()
    assert wire.lost_count == 1
    assert drained(through) == [("a", 0), ("a", 1)]
    assert through.fsck() == []


def test_an_append_whose_commit_was_not_answered_is_there_once(through: Store, wire: Wire) -> None:
    with through.writer(STREAM, linger=None) as writer:
        done = writer.append(keyed(("a", 0)))
        wire.lose_answer(COMMIT)
        with pytest.raises(StorageError) as caught:
            writer.flush()
        assert caught.value.is_transient
        assert not done.done()
        writer.flush()
        assert [found.start for found in done.result(0).ranges] == [0]
    assert drained(through) == [("a", 0)]


def test_who_asks_for_what_is_still_being_committed_waits_for_it(through: Store, wire: Wire) -> None:
    with database_of(through).write() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql "
            f"AS 'BEGIN PERFORM pg_sleep({SLOW_S}); RETURN NULL; END'"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON chunks INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION slowly()"
        )
    with through.writer(STREAM, linger=None) as writer:
        writer.append(keyed(("a", 0)))
        wire.lose_answer(COMMIT)
        with pytest.raises(StorageError):
            writer.flush()
        writer.flush()
    assert drained(through) == [("a", 0)]


def test_transactions_whose_commit_was_not_answered_are_there_once(through: Store, wire: Wire) -> None:  # S13
    transaction = through.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    wire.lose_answer(COMMIT)
    with pytest.raises(StorageError):
        transaction.prepare()
    transaction.prepare()
    wire.lose_answer(COMMIT)
    with pytest.raises(StorageError):
        through.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    through.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    assert wire.lost_count == 2
    assert drained(through) == [("a", 1)]


def test_a_server_that_crashes_while_somebody_writes_loses_nothing(store: Store, postgres: PostgresServer) -> None:
    acknowledged: list[int] = []
    is_over = threading.Event()

    def write() -> None:
        with store.writer(STREAM, writer_id="w") as writer:
            while not is_over.is_set():
                number = writer.next_sequence
                writer.append(keyed(("a", number))).result(120)
                acknowledged.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(3):
        before = len(acknowledged)
        while len(acknowledged) < before + 5 and thread.is_alive():
            time.sleep(0.01)  # a pause, not a wait for anything
        postgres.crash()
        postgres.start()
    is_over.set()
    thread.join(120)
    assert not thread.is_alive()
    found = [number for _, number in drained(store)]
    assert found == list(range(1, len(found) + 1))
    assert found == acknowledged
    assert store.fsck() == []


def test_who_stops_in_the_middle_does_not_stop_the_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "STALLED_S", 0.3)
    made: list[str] = []
    with Store.open(store.root) as other:

        def stop_in_the_middle() -> None:
            with database_of(store).write() as connection:
                connection.exec_driver_sql("UPDATE streams SET is_sealed = true")
                made.append(other.create_stream("later", KEYED).name)  # waits until the first one is out
                connection.exec_driver_sql("SELECT 1")

        deadline = time.monotonic() + 300
        while not made:  # a busy machine may keep it from its first statement for so long
            with pytest.raises(StorageError) as caught:
                stop_in_the_middle()
            assert caught.value.is_transient
            assert time.monotonic() < deadline
        assert made == ["later"]
        assert not other.find(STREAM).is_sealed


def test_who_waits_too_long_for_others_may_try_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BUSY_TIMEOUT_S", 0.2)
    with Store.open(store.root) as other, database_of(store).write():
        other._core.catalogue.find_stream(STREAM)  # who reads waits for nobody
        with pytest.raises(StorageError, match="lock timeout") as caught:
            other.seal(STREAM)
        assert caught.value.is_transient
    with Store.open(store.root) as other:
        other.seal(STREAM)


def test_threads_that_append_at_once_get_positions_of_their_own(store: Store) -> None:
    at_once = threading.Barrier(4)

    def write(name: str) -> None:
        with (
            at_once_or_not_at_all(at_once),
            Store.open(store.root) as own,
            own.writer(STREAM, linger=None) as writer,
        ):
            for number in range(20):
                writer.append(keyed((name, number)))
                at_once.wait(120)
                writer.flush()

    threads = [threading.Thread(target=write, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(drained(store)) == sorted((f"t{t}", number) for t in range(4) for number in range(20))
    assert store.fsck() == []


@contextmanager
def at_once_or_not_at_all(barrier: threading.Barrier) -> Iterator[None]:
    """Nobody waits for a thread that has failed."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def test_a_reader_hears_of_news_and_asks_nobody_before(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with Store.open(store.root) as own:
        reader = own.reader(STREAM, 0)
        assert reader.read() is None
        real = PostgresDatabase.read
        monkeypatch.setattr(PostgresDatabase, "read", lambda self: (asked.append(1), real(self))[1])
        for _ in range(100):
            assert reader.read() is None
        assert len(asked) <= 1
        append_in_a_child(store)
        assert soon(reader) == [1]


def append_in_a_child(store: Store) -> None:
    def append() -> None:
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))

    in_a_child(append)


def soon(reader: object) -> list[int]:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        batch = reader.read()  # type: ignore[attr-defined]
        if batch is not None:
            return batch.column(1).to_pylist()
        time.sleep(0.001)
    return []


def test_a_reader_that_cannot_hear_looks_for_itself(
    store: Store, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(store.root) as own:
        reader = own.reader(STREAM, 0)
        assert reader.read() is None
        database = database_of(own)
        assert isinstance(database, PostgresDatabase)
        monkeypatch.setattr(database._watch, "_connect", lambda: (_ for _ in ()).throw(OSError()))
        with database_of(store).read() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            )
        for _ in range(50):  # whoever would take the last that it heard for the present has done so by then
            assert reader.read() is None
            time.sleep(0.01)  # a pause, not a wait for anything
        append_in_a_child(store)
        assert soon(reader) == [1]


def test_what_this_process_has_changed_its_readers_see_at_once(store: Store) -> None:
    with Store.open(store.root) as own, store.writer(STREAM, linger=None) as writer:
        reader = own.reader(STREAM, 0)
        for number in range(20):
            assert reader.read() is None
            writer.append(keyed(("a", number)))
            writer.flush()
            batch = reader.read()
            assert batch is not None
            assert batch.column(1).to_pylist() == [number]


def test_a_child_has_connections_and_locks_of_its_own(store: Store) -> None:
    database = database_of(store)
    assert isinstance(database, PostgresDatabase)
    store.changes()
    with database._write_lock:
        append_in_a_child(store)
    store.seal(STREAM)
    assert drained(store) == [("a", 1)]


LOOKS = 1_000
QUIET_S = 300.0


def quiet(look: Callable[[], object], wire: Wire, looks: int = LOOKS) -> None:
    """Look until so many looks ask nothing: what is asked in the background may come late on a busy machine."""
    deadline = time.monotonic() + QUIET_S
    before = -1
    while before != wire.asked_bytes:
        assert time.monotonic() < deadline, "somebody asks again and again"
        before = wire.asked_bytes
        for _ in range(looks):
            assert look() is None


def test_an_idle_reader_asks_the_server_nothing(store: Store, through: Store, wire: Wire) -> None:
    reader = through.reader(STREAM, 0)
    quiet(reader.read, wire)
    append_in_a_child(store)
    assert soon(reader) == [1]
    quiet(reader.read, wire)


def test_an_idle_source_asks_the_server_nothing(through: Store, wire: Wire) -> None:
    context = SourceContext("p", "source", 0, 1, None)
    reader = StreamSource(STREAM, through.root).open(context)
    quiet(reader.poll, wire)


def test_an_idle_reader_of_a_group_asks_the_server_nothing_between_its_signs_of_life(
    through: Store, wire: Wire
) -> None:
    group = through.reader_group("g", STREAM)
    with group.join("r", lease="1 hour", commit_every=None) as reader:
        quiet(reader.read, wire)
        quiet(lambda: reader.read(timeout="300ms"), wire, 1)
        with through.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        assert reader.read(timeout="60s") is not None
