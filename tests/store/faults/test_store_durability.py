"""Durable before visible, and what a writer does while somebody else holds the catalogue."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, database_of, drained, keyed

from headgate.errors import StorageError
from headgate.storage.memory import MemoryStorage
from headgate.store.store import Store


class Watched(FaultyStorage):
    """Notes what is visible when a chunk is about to be written."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage())
        self.store: Store | None = None
        self.visible: list[list[tuple[str, int]]] = []

    def put(self, path: str, parts: Any) -> None:
        if self.store is not None:
            self.visible.append(drained(self.store))
        super().put(path, parts)


def test_a_chunk_is_durable_before_the_catalogue_knows_it_and_an_orphan_is_read_by_nobody(tmp_path: Path) -> None:
    storage = Watched()
    with Store.open(tmp_path, storage=storage) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        storage.store = store
        writer = store.writer(STREAM, linger=None)
        future = writer.append(keyed(("a", 1)))
        storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put"))
        with pytest.raises(StorageError):
            writer.flush()
        assert storage.visible == [[]]
        assert drained(store) == []
        assert not future.done()
        orphans = store.fsck()
        assert [problem.is_harmless for problem in orphans] == [True]
        writer.flush()
        assert drained(store) == [("a", 1)], "once, although its chunk was written twice"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Notes how long connections would wait for a lock, and lets none wait."""
    found: list[float] = []
    real = sqlite3.connect

    def connect(*args: Any, timeout: float = 5.0, **options: Any) -> sqlite3.Connection:
        found.append(timeout)
        return real(*args, timeout=0, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    monkeypatch.setattr(sqlite3.dbapi2, "connect", connect)
    return found


def test_a_writer_waits_a_minute_for_the_lock_of_another_process_and_then_may_try_again(
    tmp_path: Path, waits: list[float]
) -> None:
    with Store.open(tmp_path) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        writer = store.writer(STREAM, linger=None)
        future = writer.append(keyed(("a", 1)))
        with closing(sqlite3.connect(tmp_path / "catalogue.sqlite", isolation_level=None)) as other:
            waits.pop()
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageError, match="locked") as caught:
                writer.flush()
            assert caught.value.is_transient
            assert drained(store) == [], "readers wait for nobody"
            other.execute("ROLLBACK")
        assert set(waits) == {60.0}
        writer.flush()
        assert future.done()
        assert drained(store) == [("a", 1)]


def test_a_catalogue_that_cannot_grow_acknowledges_nothing_and_goes_on_when_it_can(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.create_stream(STREAM, KEYED, segments=1)
        engine = database_of(store)._engine  # type: ignore[attr-defined]
        with database_of(store).read() as connection:
            pages = [connection.exec_driver_sql("PRAGMA page_count").scalar_one()]
        event.listen(engine, "begin", lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages[0]}"))
        writer = store.writer(STREAM, linger=None, writer_id="w")
        futures = []

        def write_on() -> None:
            while True:
                futures.append(writer.append(keyed(("a", writer.next_sequence))))
                writer.flush()

        with pytest.raises(StorageError, match="full") as caught:
            write_on()
        assert caught.value.is_transient
        assert not futures[-1].done()
        acknowledged = len(futures) - 1
        assert drained(store) == [("a", n + 1) for n in range(acknowledged)]
        with pytest.raises(StorageError, match="full"):
            writer.flush()
        pages[0] *= 2
        writer.flush()
        assert futures[-1].done()
        assert drained(store) == [("a", n + 1) for n in range(acknowledged + 1)]
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
