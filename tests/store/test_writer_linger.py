"""Appends become durable by themselves, soon, sharing a flush; no thread stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, drained, keyed

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import FencedError, StorageError, UsageError
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage
from headgate.store import writer as writer_module
from headgate.store.store import Store
from headgate.store.writer import StreamWriter

PATIENCE_S = 120


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.005)


def lingering() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headgate-linger"}


def hurry(writer: StreamWriter) -> None:
    """What waits has waited long enough."""
    assert writer._linger is not None
    with writer._linger._changed:
        assert writer._linger._due_ms is not None
        writer._linger._due_ms = SYSTEM_CLOCK.monotonic_ms()
        writer._linger._changed.notify_all()


def test_an_append_completes_although_nobody_flushes(store: Store) -> None:
    writer = store.writer(STREAM)
    for n in range(3):
        assert writer.append(keyed(("a", n))).result(PATIENCE_S).ranges
    assert drained(store) == [("a", 0), ("a", 1), ("a", 2)]
    writer.close()


def test_what_is_appended_within_the_linger_shares_one_flush(store: Store) -> None:
    writer = store.writer(STREAM, linger="1h")
    futures = [writer.append(keyed(("a", n))) for n in range(50)]
    assert not any(future.done() for future in futures)
    hurry(writer)
    for future in futures:
        future.result(PATIENCE_S)
    assert store.describe(STREAM).chunks_count == 1
    writer.close()


def test_threads_that_wait_for_their_appends_share_flushes(store: Store) -> None:
    writer = store.writer(STREAM, linger="1h")
    all_wait = threading.Barrier(8, lambda: hurry(writer))

    def work(thread: int) -> None:
        for n in range(5):
            future = writer.append(keyed((f"t{thread}", n)))
            all_wait.wait(PATIENCE_S)
            future.result(PATIENCE_S)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert drained(store) == sorted((f"t{i}", n) for i in range(8) for n in range(5))
    assert store.describe(STREAM).chunks_count == 5


def test_a_full_disk_delays_what_waits_and_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = store.writer(STREAM)
        disk.inject(Fault(FaultKind.NO_SPACE, "put", times=3))
        future = writer.append(keyed(("a", 1)))
        assert future.result(PATIENCE_S).ranges
        assert len([call for call in disk.calls if call[0] == "put"]) == 4
        assert drained(store) == [("a", 1)]
        assert len([r for r in caplog.records if "not durable yet" in r.message]) == 1
        writer.close()


def test_a_flush_that_failed_in_the_foreground_is_repeated_in_time(tmp_path: Path) -> None:
    disk = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = store.writer(STREAM, linger="1h")
        disk.inject(Fault(FaultKind.NO_SPACE, "put"))
        future = writer.append(keyed(("a", 1)))
        with pytest.raises(StorageError):
            writer.flush()
        hurry(writer)
        assert future.result(PATIENCE_S).ranges
        writer.close()


def test_what_ends_the_writer_is_told_to_those_who_wait(store: Store) -> None:
    before = lingering()
    old = store.writer(STREAM, writer_id="importer", epoch=1, linger="20ms")
    store.writer(STREAM, writer_id="importer", epoch=2)
    with pytest.raises(FencedError):
        old.append(keyed(("a", 1))).result(PATIENCE_S)
    with pytest.raises(FencedError):
        old.append(keyed(("a", 1)), sequence=1)
    wait_for(lambda: lingering() <= before)


def test_no_thread_stays_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lingering()
    writers = [store.writer(STREAM) for _ in range(3)]
    assert lingering() <= before  # nothing waits yet
    for writer in writers:
        writer.append(keyed(("a", 1))).result(PATIENCE_S)
        writer.close()
        writer.close()
    assert lingering() <= before
    left = store.writer(STREAM)
    left.append(keyed(("a", 1)))
    with pytest.raises(KeyError), left:
        raise KeyError
    assert lingering() <= before
    monkeypatch.setattr(writer_module, "IDLE_S", 0.01)
    idle = store.writer(STREAM)
    for _ in range(2):  # and comes back when it is needed
        idle.append(keyed(("a", 1))).result(PATIENCE_S)
        wait_for(lambda: lingering() <= before)
    idle.close()


def test_a_linger_is_a_duration(store: Store) -> None:
    with pytest.raises(UsageError, match="linger"):
        store.writer(STREAM, linger="soon")
    with pytest.raises(UsageError, match="linger"):
        store.writer(STREAM, linger=-1)
    writer = store.writer(STREAM, linger=0)
    assert writer.append(keyed(("a", 1))).result(PATIENCE_S).ranges
    writer.close()
