"""What a writer acknowledges is in the store: whatever failed before, is repeated, or happens at the same time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, database_of, drained, in_a_child, keyed, lose_an_answer

from headgate.environment import SystemThreads
from headgate.errors import FencedError, StorageError, UsageError
from headgate.storage.memory import MemoryStorage
from headgate.store import writer as writers
from headgate.store.catalogue.sqlite import FileDatabase
from headgate.store.store import Store
from headgate.store.writer import Appended, StreamWriter


@pytest.fixture
def disk() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


@pytest.fixture
def faulty(tmp_path: Path, disk: FaultyStorage) -> Iterator[Store]:
    with Store.open(tmp_path / "faulty", storage=disk) as opened:
        opened.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        yield opened


def numbered(store: Store, epoch: int = 1) -> StreamWriter:
    return store.writer(STREAM, writer_id="importer", epoch=epoch, linger=None)


def test_a_repeated_append_is_not_acknowledged_before_the_first_is_durable(faulty: Store, disk: FaultyStorage) -> None:
    writer = numbered(faulty)
    first = writer.append(keyed(("a", 1)), sequence=1)
    disk.inject(Fault(FaultKind.NO_SPACE, "put"))
    with pytest.raises(StorageError):
        writer.flush()
    again = writer.append(keyed(("a", 1)), sequence=1)
    assert not again.done()
    assert drained(faulty) == []
    writer.flush()
    assert again.result(0) == first.result(0)
    assert drained(faulty) == [("a", 1)]
    assert writer.append(keyed(("a", 1)), sequence=1).result(0) == Appended(is_duplicate=True)


def test_a_repeated_append_that_is_still_buffered_shares_its_future(store: Store) -> None:
    writer = numbered(store)
    futures = [writer.append(keyed(("a", n)), sequence=n) for n in (1, 2)]
    assert [writer.append(keyed(("a", n)), sequence=n) for n in (1, 2)] == futures
    assert not futures[0].done()
    writer.close()
    assert drained(store) == [("a", 1), ("a", 2)]


def test_a_repeated_append_after_a_lost_answer_waits_until_the_outcome_is_known(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = numbered(store)
    first = writer.append(keyed(("a", 1)), sequence=1)
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    again = writer.append(keyed(("a", 1)), sequence=1)
    assert not again.done()
    writer.append(keyed(("a", 2)), sequence=2)
    writer.flush()
    assert [r.start for r in again.result(0).ranges] == [0]
    assert first.result(0) == again.result(0)
    assert drained(store) == [("a", 1), ("a", 2)]
    assert store.fsck() == []


def test_a_repeated_append_while_another_thread_flushes_waits_for_that_flush(tmp_path: Path) -> None:
    is_writing, may_go_on = threading.Event(), threading.Event()

    def hold(_: float) -> None:
        is_writing.set()
        assert may_go_on.wait(60)

    disk = FaultyStorage(MemoryStorage(), wait=hold)
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = numbered(store)
        first = writer.append(keyed(("a", 1)), sequence=1)
        disk.inject(Fault(FaultKind.SLOW, "put"))
        thread = threading.Thread(target=writer.flush)
        thread.start()
        assert is_writing.wait(60)
        again = writer.append(keyed(("a", 1)), sequence=1)
        assert again is first
        assert not again.done()
        may_go_on.set()
        thread.join(60)
        assert again.result(0) == first.result(0)
        assert drained(store) == [("a", 1)]


def test_some_repeated_appends_may_be_durable_and_others_not(faulty: Store, disk: FaultyStorage) -> None:
    writer = numbered(faulty)
    writer.append(keyed(("a", 1)))
    writer.flush()
    waiting = writer.append(keyed(("a", 2)))
    assert writer.append(keyed(("a", 1)), sequence=1).result(0).is_duplicate
    assert writer.append(keyed(("a", 2)), sequence=2) is waiting
    with pytest.raises(UsageError, match="append 4 came where 3 was expected"):
        writer.append(keyed(("a", 4)), sequence=4)
    writer.append(keyed(("a", 3)), sequence=3)
    writer.flush()
    assert drained(faulty) == [("a", 1), ("a", 2), ("a", 3)]


def test_a_writer_that_was_fenced_acknowledges_nothing_any_more(store: Store) -> None:
    old = numbered(store)
    lost = old.append(keyed(("a", 1)), sequence=1)
    new = numbered(store, epoch=2)
    with pytest.raises(FencedError):
        old.flush()
    later: list[Callable[[], object]] = [
        lambda: lost.result(0),
        lambda: old.append(keyed(("a", 1)), sequence=1),
        lambda: old.append(keyed(("a", 2)), sequence=2),
        old.flush,
        old.close,
    ]
    for verb in later:
        with pytest.raises(FencedError, match="generation 1 was replaced by generation 2"):
            verb()
    assert new.next_sequence == 1
    assert drained(store) == []


def test_what_was_appended_while_a_flush_was_refused_is_refused_too(store: Store) -> None:
    old = numbered(store)
    old.append(keyed(("a", 1)))
    numbered(store, epoch=2)
    real = old._make_durable

    def meanwhile(attempt: Any) -> Any:
        futures.append(old.append(keyed(("a", 2))))
        return real(attempt)

    futures: list[Future[Appended]] = []
    old._make_durable = meanwhile  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        old.flush()
    with pytest.raises(FencedError):
        futures[0].result(0)


def test_a_writer_opened_again_under_its_id_continues_behind_what_is_durable(
    faulty: Store, disk: FaultyStorage
) -> None:
    first = numbered(faulty)
    first.append(keyed(("a", 1)))
    first.flush()
    unsure = first.append(keyed(("a", 2)))
    disk.inject(Fault(FaultKind.IO_ERROR, "put"))
    with pytest.raises(StorageError):
        first.flush()
    second = numbered(faulty)  # the same epoch: the application lost the first object
    assert second.next_sequence == 2
    assert not second.append(keyed(("a", 2)), sequence=2).done()
    second.flush()
    with pytest.raises(UsageError, match="used twice"):
        first.flush()
    with pytest.raises(UsageError, match="used twice"):
        unsure.result(0)
    assert drained(faulty) == [("a", 1), ("a", 2)]


def test_numbers_that_no_store_can_know_are_refused_not_acknowledged(store: Store) -> None:
    with pytest.raises(UsageError, match="numbered from 1, so there is no append 0"):
        numbered(store).append(keyed(("a", 1)), sequence=0)
    with pytest.raises(UsageError, match="writer_id"):
        store.writer(STREAM).append(keyed(("a", 1)), sequence=1)
    assert drained(store) == []


def test_a_closed_writer_takes_nothing_and_may_be_closed_again(store: Store) -> None:
    writer = numbered(store)
    future = writer.append(keyed(("a", 1)))
    writer.close()
    writer.close()
    assert future.done()
    with pytest.raises(UsageError, match="is closed"):
        writer.append(keyed(("a", 2)))


def test_a_close_that_failed_can_be_repeated(faulty: Store, disk: FaultyStorage) -> None:
    writer = faulty.writer(STREAM, linger="1h")
    future = writer.append(keyed(("a", 1)))
    disk.inject(Fault(FaultKind.NO_SPACE, "put"))
    with pytest.raises(StorageError):
        writer.close()
    assert not future.done()
    writer.close()
    assert future.done()
    assert drained(faulty) == [("a", 1)]


def test_a_block_that_ends_with_an_error_says_what_it_did_not_write(store: Store) -> None:
    writer = numbered(store)
    future = writer.append(keyed(("a", 1)))
    with pytest.raises(KeyError), writer:
        raise KeyError
    with pytest.raises(UsageError, match="ended with an error before this append was acknowledged"):
        future.result(0)
    with pytest.raises(UsageError, match="ended with an error"):
        writer.flush()
    assert drained(store) == []


def test_events_that_cannot_be_encoded_end_the_writer_instead_of_vanishing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise pa.ArrowInvalid("offset overflow")

    writer = numbered(store)
    future = writer.append(keyed(("a", 1)))
    with monkeypatch.context() as patch:
        patch.setattr(writers, "encode_batches", broken)
        for _ in range(2):
            with pytest.raises(pa.ArrowInvalid):
                writer.flush()  # never success: the events are in no store
    with pytest.raises(pa.ArrowInvalid):
        future.result(0)
    assert numbered(store).next_sequence == 1


def test_an_error_that_will_not_go_away_ends_the_writer(
    faulty: Store, disk: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str, _: object) -> None:
        raise StorageError("put", path, "Permission denied", is_transient=False)

    writer = numbered(faulty)
    future = writer.append(keyed(("a", 1)))
    monkeypatch.setattr(disk, "put", denied)
    for verb in (writer.flush, writer.close, lambda: future.result(0), lambda: writer.append(keyed(("a", 2)))):
        with pytest.raises(StorageError, match="Permission denied"):
            verb()


def test_a_writer_that_has_ended_writes_nothing_later_of_what_it_refused(
    faulty: Store, disk: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller writes that with another writer, so it would be there twice."""

    def denied(path: str, _: object) -> None:
        raise StorageError("put", path, "Permission denied", is_transient=False)

    writer = faulty.writer(STREAM, linger=None)
    future = writer.append(keyed(("a", 1)))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "put", denied)
        with pytest.raises(StorageError):
            writer.flush()
    with pytest.raises(StorageError):
        future.result(0)
    with pytest.raises(StorageError):
        writer.flush()
    assert drained(faulty) == []


def test_what_is_appended_to_a_truncated_stream_is_there(store: Store) -> None:
    """No file of it is looked for before it is written: it would be taken for one that was truncated, too."""
    for number in (1, 2):
        with store.writer(STREAM, linger=None) as writer:
            future = writer.append(keyed(("a", number)))
        assert future.result(0).ranges
        assert drained(store) == [("a", number)]
        store.truncate(store.tail(STREAM))


def test_an_outcome_that_was_unknown_is_looked_up_even_when_the_disk_fails_for_good(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = numbered(store)
    future = writer.append(keyed(("a", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()

    def denied(path: str, _: object) -> None:
        raise StorageError("put", path, "Permission denied", is_transient=False)

    monkeypatch.setattr(store._core.storage, "put", denied)
    writer.flush()  # writes nothing: it is there
    assert future.done()
    assert drained(store) == [("a", 1)]


def test_a_full_buffer_that_cannot_be_written_takes_nothing_more(
    faulty: Store, disk: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "FLUSH_BYTES", 1)
    writer = faulty.writer(STREAM, linger=None)
    disk.inject(Fault(FaultKind.NO_SPACE, "put", times=3))
    taken = [writer.append(keyed(("a", n))) for n in (1, 2)]  # each fills a buffer; flushing fails, but they were taken
    with pytest.raises(StorageError):
        writer.append(keyed(("a", 3)))  # not taken, so the caller may repeat it
    writer.append(keyed(("a", 3)))
    writer.flush()
    assert all(future.done() for future in taken)
    assert drained(faulty) == [("a", 1), ("a", 2), ("a", 3)]


def test_a_full_buffer_takes_no_numbered_append_either_but_acknowledges_repeated_ones(
    faulty: Store, disk: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "FLUSH_BYTES", 1)
    writer = numbered(faulty)
    disk.inject(Fault(FaultKind.NO_SPACE, "put", times=3))
    first, second = (writer.append(keyed(("a", n)), sequence=n) for n in (1, 2))
    assert writer.append(keyed(("a", 2)), sequence=2) is second
    with pytest.raises(StorageError):
        writer.append(keyed(("a", 3)), sequence=3)
    assert writer.next_sequence == 3
    writer.append(keyed(("a", 3)), sequence=3)
    writer.flush()
    assert first.done()
    assert second.done()
    assert drained(faulty) == [("a", 1), ("a", 2), ("a", 3)]


def test_a_future_cannot_be_cancelled_so_that_others_of_its_flush_are_told(store: Store) -> None:
    writer = numbered(store)
    futures = [writer.append(keyed(("a", n))) for n in (1, 2)]
    assert not futures[0].cancel()
    writer.flush()
    assert all(future.done() for future in futures)


def test_a_callback_may_append_and_flush(store: Store) -> None:
    writer = numbered(store)

    def go_on(_: Future[Appended]) -> None:
        writer.append(keyed(("b", 2)))
        writer.flush()

    first, second = writer.append(keyed(("a", 1))), writer.append(keyed(("c", 3)))
    first.add_done_callback(go_on)
    writer.flush()
    assert second.done()
    assert drained(store) == [("a", 1), ("b", 2), ("c", 3)]
    assert store.fsck() == []


def test_a_flush_that_failed_in_a_callback_is_finished_before_what_the_callback_appended_next(
    faulty: Store, disk: FaultyStorage
) -> None:
    writer = faulty.writer(STREAM, linger=None)
    appended: list[Future[Appended]] = []

    def go_on(_: Future[Appended]) -> None:
        disk.inject(Fault(FaultKind.NO_SPACE, "put"))
        appended.append(writer.append(keyed(("b", 2))))
        with contextlib.suppress(StorageError):
            writer.flush()
        appended.append(writer.append(keyed(("c", 3))))

    disk.inject(Fault(FaultKind.NO_SPACE, "put"))
    writer.append(keyed(("a", 1))).add_done_callback(go_on)
    with pytest.raises(StorageError):
        writer.flush()
    writer.flush()
    assert [future.done() for future in appended] == [True, True]
    assert drained(faulty) == [("a", 1), ("b", 2), ("c", 3)]


class Processes(SystemThreads):
    """Threads that are said to be those of another process."""

    process_id = 1


@pytest.mark.parametrize("sees_it_first", ["append", "flush", "close"])
def test_a_writer_taken_into_another_process_leaves_what_was_buffered_to_the_first(
    store: Store, sees_it_first: str
) -> None:
    processes = Processes()
    shared = Store(store.root, store._core.catalogue, store._core.storage, threads=processes)
    writer = shared.writer(STREAM, linger=None)
    writer.append(keyed(("parent", 1)))
    processes.process_id = 2
    if sees_it_first == "append":
        writer.append(keyed(("child", 1)))
        writer.flush()
    else:
        getattr(writer, sees_it_first)()
    assert drained(store) == ([("child", 1)] if sees_it_first == "append" else [])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_after_a_fork_the_parent_keeps_what_it_buffered(store: Store) -> None:
    writer = store.writer(STREAM, linger="1h")
    future = writer.append(keyed(("parent", 1)))

    def child() -> None:
        writer.flush()  # of the child: nothing
        writer.append(keyed(("child", 1)))
        writer.close()

    in_a_child(child)
    assert drained(store) == [("child", 1)]
    assert not future.done()
    writer.close()
    assert drained(store) == [("child", 1), ("parent", 1)]
    assert store.fsck() == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_locks_that_a_thread_of_the_parent_holds_do_not_stop_the_child(store: Store) -> None:
    writer = store.writer(STREAM, linger="1ms")
    writer.append(keyed(("a", 0))).result(60)  # a thread lives, too
    database = database_of(store)
    assert isinstance(database, FileDatabase)
    with writer._buffer_lock, writer._flush_lock, database._write_lock, database._tail_lock:
        in_a_child(lambda: [store.changes(), writer.append(keyed(("a", 1))).result(60)])
    assert drained(store) == [("a", 0), ("a", 1)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_reader_taken_through_a_fork_sees_what_came_meanwhile(store: Store) -> None:
    store.create_stream("one", KEYED, segments=1)
    reader = store.reader("one", 0)
    assert reader.read() is None  # at the tail, which it remembers
    read_end, write_end = os.pipe()

    def child() -> None:
        os.read(read_end, 1)
        batch = reader.read()
        assert batch is not None
        assert batch.num_rows == 1

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    with store.writer("one") as writer:
        writer.append(keyed(("a", 1)))
    os.write(write_end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(read_end)
    os.close(write_end)
