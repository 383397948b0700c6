"""Files that are removed as orphans while somebody writes them: nothing that was acknowledged is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.store.storing import STREAM, chunks_of, drained, keyed, lose_an_answer

from headgate.errors import StorageError
from headgate.store import transactions
from headgate.store.store import Store
from headgate.store.streams import RemovedFileError


def removing_before(store: Store, verb: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Another process removes orphans while this one, with its file written, is stopped in front of ``verb``.

    Returns how many files were removed each time; only the first call of the verb is stopped.
    """
    removed: list[int] = []
    real: Callable[..., Any] = getattr(store._core.catalogue, verb)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if not removed:
            with Store.open(store.root) as another:
                removed.append(another.collect_orphans())
        return real(*args, **kwargs)

    monkeypatch.setattr(store._core.catalogue, verb, stopped)
    return removed


def test_a_writer_writes_again_what_was_removed_before_it_was_recorded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = removing_before(store, "append", monkeypatch)
    with store.writer(STREAM, writer_id="w", linger=None) as writer:
        future = writer.append(keyed(("a", 1)))
        writer.flush()
        writer.append(keyed(("a", 2)))
    assert removed == [1]
    assert [found.start for found in future.result().ranges] == [0]
    assert drained(store) == [("a", 1), ("a", 2)]
    assert store.fsck() == []


def test_a_participant_writes_again_what_was_removed_before_it_was_recorded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = removing_before(store, "write_shared", monkeypatch)
    transaction = store.begin_shared(STREAM)
    with transaction.writer() as writer:
        writer.write(keyed(("a", 1)))
    transaction.commit()
    assert removed == [1]
    assert drained(store) == [("a", 1)]
    assert store.fsck() == []


def test_a_transaction_of_which_a_file_was_removed_is_not_prepared(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open transaction of one process has no record, however long it writes: it spilled what looks like orphans."""
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 1)
    transaction = store.transactions.begin(STREAM, owner="o", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.write(keyed(("a", 2)))  # waits for the first part
    assert store.collect_orphans() >= 1
    for _ in range(2):  # repeating does not help, and does no harm
        with pytest.raises(RemovedFileError, match="was removed as an orphan before its events were recorded"):
            transaction.prepare()
    transaction.abort()
    assert store.list_transactions(owner="o", prefix="t")[0].status.is_terminal
    with store.writer(STREAM) as writer:
        writer.append(keyed(("b", 1)))
    assert drained(store) == [("b", 1)]


def test_what_is_prepared_or_visible_is_never_removed(store: Store) -> None:
    transaction = store.transactions.begin(STREAM, owner="o", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.prepare()
    shared = store.begin_shared(STREAM)
    with shared.writer() as writer:
        writer.write(keyed(("a", 2)))
    assert store.collect_orphans() == 0
    transaction.prepare()  # its answer was lost
    store.commit_transactions([(STREAM, "t")], owner="o", epoch=1)
    shared.commit()
    assert store.collect_orphans() == 0
    assert drained(store) == [("a", 1), ("a", 2)]


def test_what_is_recorded_while_orphans_are_looked_for_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded when the known files were read already, and its file was listed before."""
    append, chunk_paths = store._core.catalogue.append, store._core.catalogue.chunk_paths
    answers: list[dict[int, int]] = []
    removed: list[int] = []

    def stopped(*args: Any) -> dict[int, int]:
        def known() -> set[str]:
            found = chunk_paths()
            answers.append(append(*args))
            return found

        monkeypatch.setattr(store._core.catalogue, "chunk_paths", known)
        removed.append(store.collect_orphans())
        return answers[0]

    monkeypatch.setattr(store._core.catalogue, "append", stopped)
    with store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(("a", 1)))
    assert removed == [0]
    assert drained(store) == [("a", 1)]


def test_an_append_whose_file_was_removed_is_not_taken_for_one_that_was_truncated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.writer(STREAM) as before:
        before.append(keyed(("a", 1)))
    writer = store.writer(STREAM, linger=None)
    future = writer.append(keyed(("a", 2)))

    def fails(*_: object) -> None:
        raise StorageError("write", "catalogue", "disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(store._core.catalogue, "append", fails)
        with pytest.raises(StorageError):
            writer.flush()
    store.truncate(store.tail(STREAM))
    assert store.collect_orphans() == 1
    writer.flush()
    assert [found.events_count for found in future.result().ranges] == [1]
    assert store.events_between(store.head(STREAM)) == 1


def test_an_append_that_was_recorded_before_its_answer_was_lost_is_not_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.writer(STREAM, linger=None)
    writer.append(keyed(("a", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    assert store.collect_orphans() == 0
    writer.flush()
    assert drained(store) == [("a", 1)]


def test_a_file_that_cannot_be_removed_is_said_and_tried_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = chunks_of(store) / "1" / "appended" / "left.chunk"
    orphan.parent.mkdir(parents=True, exist_ok=True)
    orphan.write_bytes(b"left by a crash")

    def fails(path: str) -> None:
        raise StorageError("delete", path, "permission denied", is_transient=False)

    with monkeypatch.context() as patch:
        patch.setattr(store._core.storage, "delete", fails)
        with pytest.raises(StorageError, match=r"cannot delete .*left\.chunk"):
            store.collect_orphans()
    assert [problem.is_harmless for problem in store.fsck()] == [True], "it is still said"
    assert store.collect_orphans() == 1
    assert store.fsck() == []
    assert store.collect_orphans() == 0
