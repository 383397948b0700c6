"""Transactions that several processes write: all or nothing, each write once, and a lease while they are open."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import (
    KEYED,
    STREAM,
    Clock,
    database_of,
    drain,
    drained,
    in_a_child,
    keyed,
    lose_an_answer,
)

from headgate.errors import FencedError, StorageError, UsageError
from headgate.protocol.store.transactions import Status
from headgate.storage.local import LocalStorage
from headgate.store import chunks, transactions
from headgate.store.catalogue import tables, transaction_rows
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, Retention
from headgate.store.transactions import SharedTransaction

LEASE_MS = 1_000


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        timed = another(opened, clock)
        timed.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield timed


def another(store: Store, clock: Clock) -> Store:
    return Store(store.root, store._core.catalogue, store._core.storage, clock=clock)


def begin(store: Store, stream: str = STREAM) -> SharedTransaction:
    return store.begin_shared(stream, lease=f"{LEASE_MS}ms")


def write(transaction: SharedTransaction, participant: str, *rows: tuple[str, int]) -> None:
    with transaction.writer(participant) as writer:
        writer.write(keyed(*rows))


def leave_silent(store: Store, clock: Clock, stream: str = STREAM) -> list[str]:
    """Nobody does anything for a lease, and then somebody looks twice."""
    clock.now_ms += LEASE_MS
    assert store.expire_transactions(stream) == []
    clock.now_ms += LEASE_MS // 2
    return store.expire_transactions(stream)


def files(store: Store) -> list[str]:
    return store._core.storage.list("")


def problems(store: Store) -> list[str]:
    return [f"{x.where}: {x.what}" for x in store.fsck()]


def test_a_transaction_that_one_process_begins_is_written_and_committed_by_others(store: Store) -> None:  # TX1
    transaction = begin(store)
    write(transaction, "a", ("x", 1), ("y", 2))
    with Store.open(store.root) as second:
        write(second.transaction(STREAM, transaction.id), "b", ("x", 3))
        assert drained(second) == []
    with Store.open(store.root) as third:
        resumed = third.transaction(STREAM, transaction.id)
        resumed.prepare()
        resumed.commit()
        assert drained(third) == [("x", 1), ("x", 3), ("y", 2)]
    assert problems(store) == []


def test_nobody_sees_an_open_transaction(store: Store) -> None:
    transaction = begin(store)
    write(transaction, "a", ("x", 1))
    transaction.prepare()
    assert drained(store) == []
    info = store.describe(STREAM)
    assert (info.events_count, info.prepared_count) == (0, 1)
    assert problems(store) == []


def test_verdicts_are_repeated_and_their_opposite_is_refused(store: Store) -> None:
    kept, dropped = begin(store), begin(store)
    write(kept, "a", ("x", 1))
    write(dropped, "a", ("x", 2))
    kept.commit()
    kept.commit()
    kept.prepare()
    kept.ping()
    dropped.prepare()
    dropped.prepare()
    dropped.abort()
    dropped.abort()
    with pytest.raises(FencedError, match=rf"^transaction '{kept.id}' of stream '{STREAM}' is committed$"):
        kept.abort()
    for verb in (dropped.commit, dropped.prepare, dropped.ping):
        with pytest.raises(FencedError, match="was aborted, so its events are gone"):
            verb()
    assert drained(store) == [("x", 1)]
    assert problems(store) == []


def test_of_verdicts_that_race_one_wins(store: Store) -> None:
    transaction = begin(store)
    write(transaction, "a", ("x", 1))
    with Store.open(store.root) as other:
        there = other.transaction(STREAM, transaction.id)
        transaction.prepare()
        there.abort()
        with pytest.raises(FencedError, match="was aborted"):
            transaction.commit()
    assert drained(store) == []
    assert len(files(store)) == 0


def test_an_open_transaction_without_events_has_no_bytes(store: Store) -> None:
    assert begin(store).status().size_bytes == 0


def test_an_empty_transaction_is_committed(store: Store) -> None:
    transaction = begin(store)
    transaction.commit()
    assert transaction.status().status is Status.COMMITTED
    assert problems(store) == []


def test_a_flush_whose_answer_was_lost_is_recorded_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX3
    transaction = begin(store)
    writer = transaction.writer("a")
    writer.write(keyed(("x", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    writer.write(keyed(("x", 2)))
    writer.flush()
    transaction.commit()
    assert drain(store)[segment_of(store, "x")] == [("x", 1), ("x", 2)]
    assert problems(store) == []


def test_a_file_that_is_durable_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # TX3
    disk = FaultyStorage(LocalStorage(tmp_path / "chunks"))
    with Store.open(tmp_path / "store", storage=disk) as store:
        store.create_stream(STREAM, KEYED)
        transaction = begin(store)
        assert transaction.stream == STREAM
        writer = transaction.writer()
        writer.write(keyed(("x", 1)))
        with monkeypatch.context() as patch:
            lose_an_answer(store, patch)
            with pytest.raises(StorageError):
                writer.flush()
        disk.inject(Fault(FaultKind.NO_SPACE, "put"))
        writer.close()
        with pytest.raises(UsageError, match="is closed; open another one"):
            writer.write(keyed(("x", 2)))
        transaction.commit()
        assert drained(store) == [("x", 1)]


def test_the_same_when_somebody_committed_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX3
    transaction = begin(store)
    writer = transaction.writer("a")
    writer.write(keyed(("x", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    transaction.commit()
    writer.flush()  # it is in it
    writer.write(keyed(("x", 2)))
    with pytest.raises(FencedError, match="is committed"):
        writer.flush()
    assert drained(store) == [("x", 1)]
    assert problems(store) == []


def segment_of(store: Store, key: str) -> int:
    return next(number for number, rows in enumerate(drain(store)) if key in {k for k, _ in rows})


def test_a_refused_flush_leaves_the_file_of_its_first_try(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # TX3, TX4
    transaction = begin(store)
    old = transaction.writer("a")
    old.write(keyed(("x", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            old.flush()
    heir = transaction.writer("a")
    assert heir.next_sequence == 2
    with pytest.raises(FencedError, match=r"participant 'a' of transaction .* was opened again since"):
        old.flush()
    transaction.commit()
    assert drained(store) == [("x", 1)]
    assert problems(store) == []


def test_a_refused_flush_takes_its_file_away(store: Store) -> None:  # TX3
    transaction = begin(store)
    writer = transaction.writer("a")
    writer.write(keyed(("x", 1)))
    transaction.abort()
    with pytest.raises(FencedError):
        writer.flush()
    assert files(store) == []


def test_a_participant_that_is_started_again_repeats_nothing(store: Store) -> None:  # TX3
    transaction = begin(store)
    first = transaction.writer("a")
    for number in (1, 2, 3):
        first.write(keyed(("x", number)), sequence=number)
        if number < 3:
            first.flush()
    again = transaction.writer("a")  # the third one was lost with the process
    assert again.next_sequence == 3
    for number in (1, 2, 3):
        again.write(keyed(("x", number)), sequence=number)
    again.close()
    transaction.commit()
    assert drained(store) == [("x", 1), ("x", 2), ("x", 3)]


def test_numbers_that_do_not_follow_are_refused(store: Store) -> None:  # TX3
    writer = begin(store).writer("a")
    for number in (0, 2):
        with pytest.raises(UsageError, match=f"write {number} came where 1 was expected"):
            writer.write(keyed(("x", 1)), sequence=number)
    writer.write(keyed(("x", 1)), sequence=1)


def test_writes_without_events_are_counted(store: Store) -> None:  # TX3
    transaction = begin(store)
    writer = transaction.writer("a")
    writer.write(keyed())
    writer.flush()
    assert transaction.writer("a").next_sequence == 2
    transaction.commit()
    assert problems(store) == []


def test_a_full_disk_delays_a_flush_and_loses_nothing(tmp_path: Path) -> None:  # TX3
    disk = FaultyStorage(LocalStorage(tmp_path / "chunks"))
    with Store.open(tmp_path / "store", storage=disk) as store:
        store.create_stream(STREAM, KEYED)
        transaction = begin(store)
        writer = transaction.writer()
        writer.write(keyed(("x", 1)))
        disk.inject(Fault(FaultKind.NO_SPACE, "put"))
        with pytest.raises(StorageError):
            writer.flush()
        disk.heal()
        writer.close()
        writer.close()
        transaction.commit()
        assert drained(store) == [("x", 1)]


def test_a_participant_that_is_opened_elsewhere_is_refused(store: Store) -> None:  # TX4
    transaction = begin(store)
    old = transaction.writer("a")
    old.write(keyed(("x", 1)))
    with Store.open(store.root) as other:
        write(other.transaction(STREAM, transaction.id), "a", ("x", 2))
    for _ in range(2):
        with pytest.raises(FencedError, match="was opened again since, perhaps by another process: only that one"):
            old.flush()
    with pytest.raises(FencedError):
        old.write(keyed(("x", 3)))
    transaction.commit()
    assert drained(store) == [("x", 2)]


def test_nameless_participants_do_not_disturb_one_another(store: Store) -> None:  # TX4
    transaction = begin(store)
    a, b = transaction.writer(), transaction.writer()
    a.write(keyed(("x", 1)))
    b.write(keyed(("x", 2)))
    a.close()
    b.close()
    transaction.commit()
    assert drained(store) == [("x", 1), ("x", 2)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_writer_taken_through_a_fork_is_refused(store: Store) -> None:  # TX4
    writer = begin(store).writer("a")

    def in_child() -> None:
        with pytest.raises(UsageError, match="belongs to the process that opened it"):
            writer.write(keyed(("x", 1)))

    in_a_child(in_child)
    writer.write(keyed(("x", 1)))
    writer.flush()


def test_events_are_in_the_order_in_which_they_were_flushed(store: Store) -> None:
    transaction = begin(store)
    z, a = transaction.writer("z"), transaction.writer("a")
    a.write(keyed(("k", 3)))
    z.write(keyed(("k", 1)))
    z.write(keyed(("k", 2)))
    z.flush()
    a.flush()
    z.write(keyed(("k", 4)))
    z.flush()
    transaction.prepare()
    with Store.open(store.root) as other:
        other.transaction(STREAM, transaction.id).commit()
    assert drain(store)[segment_of(store, "k")] == [("k", n) for n in (1, 2, 3, 4)]


def test_events_of_several_parts_and_flushes_are_in_the_order_of_their_writes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "PART_ROWS_MAX", 2)
    transaction = store.begin_shared(STREAM)
    with transaction.writer() as writer:
        for first in (0, 10):
            writer.write(keyed(*(("a", number) for number in range(first, first + 10))))
            writer.flush()
    transaction.commit()
    assert [row for segment in drain(store) for row in segment] == [("a", number) for number in range(20)]


def test_without_a_routing_key_all_goes_to_one_segment(store: Store) -> None:
    store.create_stream("lines", TEXT_SCHEMA, segments=4)
    transaction = begin(store, "lines")
    for participant in ("a", "b", "c"):
        with transaction.writer(participant) as writer:
            writer.write(pa.record_batch([[participant]], schema=TEXT_SCHEMA))
    transaction.commit()
    assert sorted(map(len, drain(store, "lines"))) == [0, 0, 0, 3]


def test_large_writes_are_flushed_as_they_come(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX3
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 500)
    transaction = begin(store)
    with transaction.writer("a") as writer:
        for number in range(40):
            writer.write(keyed(*(("x", number * 10 + n) for n in range(10))))
        assert transaction.status().events_count > 300
    transaction.commit()
    assert drained(store) == [("x", n) for n in range(400)]
    assert problems(store) == []


def test_files_of_those_who_died_go_with_the_end(store: Store) -> None:
    for end in (SharedTransaction.commit, SharedTransaction.abort):
        transaction = begin(store)
        write(transaction, "a", ("x", 1))
        died = transaction.writer("b")
        died.write(keyed(("x", 2)))
        flush = died._begin_flush()
        assert flush.encoded is not None
        store._core.storage.put(flush.path, flush.encoded.chunk.buffers)
        assert len(problems(store)) == 1
        end(transaction)
        assert problems(store) == []
    assert len(files(store)) == 1


# -- the lease -------------------------------------------------------------------------------------------------------


def test_files_of_a_transaction_that_expired_are_removed(store: Store, clock: Clock) -> None:  # TX8
    """Also those that its writer had no time to record."""
    left = begin(store)
    write(left, "a", ("x", 1))
    died = left.writer("b")
    died.write(keyed(("x", 2)))
    flush = died._begin_flush()
    assert flush.encoded is not None
    store._core.storage.put(flush.path, flush.encoded.chunk.buffers)
    assert len(files(store)) == 2
    assert leave_silent(store, clock) == [left.id]
    assert files(store) == []


def test_a_look_at_a_stream_looks_at_its_leases(store: Store, clock: Clock) -> None:  # TX8
    left = begin(store)
    for _ in range(2):
        clock.now_ms += 60_000
        store.look_after(STREAM)
    with pytest.raises(FencedError, match="was aborted"):
        left.ping()


def test_whoever_uses_the_store_next_aborts_what_nobody_writes(store: Store, clock: Clock) -> None:  # TX8
    def by_beginning(other: Store) -> None:
        begin(other).abort()

    def by_finding(other: Store) -> None:
        other.transaction(STREAM, fresh.id)

    def by_writing(other: Store) -> None:
        with other.writer(STREAM) as writer:
            writer.append(keyed(("w", 0)))

    fresh = begin(store)
    for look in (by_beginning, by_finding, by_writing):
        left = begin(store)
        write(left, "a", ("x", 1))
        for _ in range(2):
            clock.now_ms += LEASE_MS
            fresh.ping()
            look(another(store, clock))
        info = left.status()
        assert (info.status, info.is_expired) == (Status.ABORTED, True), look
    assert fresh.status().status is Status.OPEN
    assert [k for k, _ in drained(store)] == ["w", "w"]
    assert problems(store) == []


def test_a_look_costs_nothing_while_no_lease_is_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX8
    begin(store)
    monkeypatch.setattr(store._core.catalogue, "expire_shared", None)
    assert store.expire_transactions(STREAM) == []


def test_a_look_that_fails_fails_nobody_who_begins(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # TX8
    begin(store)
    clock.now_ms += LEASE_MS

    def fail(*_: object) -> None:
        raise StorageError("write", "catalogue", "no space left")

    monkeypatch.setattr(type(store._core.catalogue), "expire_shared", fail)
    with caplog.at_level(logging.WARNING, "headgate"):
        begin(store)
    assert "leases of stream 'app/events' could not be looked at" in caplog.text


def test_who_comes_late_is_told_in_one_sentence(store: Store, clock: Clock) -> None:
    transaction = begin(store)
    write(transaction, "a", ("x", 1))
    late = transaction.writer("b")
    late.write(keyed(("x", 2)))
    assert leave_silent(store, clock) == [transaction.id]
    said = (
        f"transaction '{transaction.id}' of stream '{STREAM}' was aborted, because no process wrote to it or pinged it "
        "for longer than its lease of 1,000 ms, so its events are gone; begin another one"
    )
    for verb in (late.flush, late.flush, late.ping, late.close, transaction.writer, transaction.ping):
        with pytest.raises(FencedError) as refused:
            verb()
        assert str(refused.value) == said
    for verdict in (transaction.prepare, transaction.commit):
        with pytest.raises(FencedError) as refused:
            verdict()
        assert str(refused.value) == said
    transaction.abort()
    assert files(store) == []
    assert problems(store) == []


def test_signs_of_life_renew_the_lease(store: Store, clock: Clock) -> None:
    transaction = begin(store)
    writer = transaction.writer("a")

    def write_only() -> None:
        writer.write(keyed(("x", 1)))

    for sign in (transaction.ping, writer.ping, writer.flush, write_only, lambda: transaction.writer("b")):
        clock.now_ms += LEASE_MS
        store.expire_transactions(STREAM)
        clock.now_ms += LEASE_MS // 2 - 1
        sign()
        clock.now_ms += LEASE_MS - 1
        assert store.expire_transactions(STREAM) == []
        assert transaction.status().due_ms == clock.wall_ms() + 1
    assert leave_silent(store, clock) == [transaction.id]


def test_a_lease_that_cannot_be_is_refused(store: Store) -> None:
    for lease in ("99ms", "25 hours"):
        with pytest.raises(UsageError, match="the lease of a transaction is 100 ms to 86400000 ms, not"):
            store.begin_shared(STREAM, lease=lease)
    for lease, lease_ms in (("0.1s", 100), ("24 hours", 86_400_000)):
        assert store.begin_shared(STREAM, lease=lease).lease_ms == lease_ms
    assert store.begin_shared(STREAM).lease_ms == 600_000


def test_what_is_prepared_never_expires(store: Store, clock: Clock) -> None:
    transaction = begin(store)
    write(transaction, "a", ("x", 1))
    clock.now_ms += LEASE_MS
    store.expire_transactions(STREAM)
    transaction.prepare()
    clock.date_ms += 10**12
    assert leave_silent(store, clock) == []
    transaction.commit()
    assert drained(store) == [("x", 1)]


# -- what happens meanwhile ------------------------------------------------------------------------------------------


def test_of_a_forgotten_outcome_nobody_says_committed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX11
    monkeypatch.setattr(transaction_rows, "OUTCOMES_RETAINED", 0)
    monkeypatch.setattr("headgate.store.catalogue.transaction_rows.OUTCOME_CLEANUP_INTERVAL", 1)
    for end in (SharedTransaction.commit, SharedTransaction.abort):
        transaction = begin(store)
        writer = transaction.writer("a")
        end(transaction)
        writer.write(keyed(("x", 1)))
        for verb in (
            *(transaction.commit, transaction.abort, transaction.prepare, transaction.ping, transaction.status),
            *(writer.flush, transaction.writer, partial(store.transaction, STREAM, transaction.id)),
        ):
            with pytest.raises(UsageError, match="its outcome is forgotten; whether it was committed, only its events"):
                verb()
    assert rows_of(store, tables.shared_transactions) == rows_of(store, tables.participants) == []


def test_outcomes_of_what_expired_are_forgotten_in_time_too(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # TX11
    monkeypatch.setattr(transaction_rows, "OUTCOMES_RETAINED", 2)
    monkeypatch.setattr("headgate.store.catalogue.transaction_rows.OUTCOME_CLEANUP_INTERVAL", 1)
    for _ in range(5):
        begin(store)
        assert len(leave_silent(store, clock)) == 1
    assert len(store.list_transactions()) == 2


def test_finding_a_transaction_in_a_store_that_may_not_be_written_to_changes_nothing(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = begin(store)
    clock.now_ms += 10 * LEASE_MS
    monkeypatch.setattr(type(store._core.catalogue), "is_untouched", True)
    for _ in range(2):
        clock.now_ms += LEASE_MS
        assert store.transaction(STREAM, left.id).status().status is Status.OPEN
    assert caplog.text == ""


def rows_of(store: Store, table: object) -> list[object]:
    with database_of(store).read() as connection:
        return list(connection.execute(table.select()))  # type: ignore[attr-defined]


def test_an_open_transaction_is_not_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX11
    transaction = begin(store)
    monkeypatch.setattr(transaction_rows, "OUTCOMES_RETAINED", 0)
    monkeypatch.setattr("headgate.store.catalogue.transaction_rows.OUTCOME_CLEANUP_INTERVAL", 1)
    begin(store).abort()
    store.transactions.forget_outcomes([transaction.id], owner="writers", epoch=0)
    write(transaction, "a", ("x", 1))
    transaction.commit()
    assert drained(store) == [("x", 1)]


def test_a_transaction_goes_on_when_its_stream_is_scaled(store: Store) -> None:  # S75
    transaction = begin(store)
    rows = [(f"k{n}", n) for n in range(40)]
    write(transaction, "a", *rows[:10])
    early = transaction.writer("b")
    early.write(keyed(*rows[10:20]))
    store.split(STREAM, 1)
    early.close()
    write(store.transaction(STREAM, transaction.id), "c", *rows[20:30])
    store.merge(STREAM, [0, 3])
    with store.writer(STREAM) as writer:
        writer.append(keyed(("k1", -1), ("k2", -1)))
    write(transaction, "a", *rows[30:])
    transaction.commit()
    found = [row for segment in drain(store) for row in segment]
    assert sorted(found) == sorted([*rows, ("k1", -1), ("k2", -1)])
    assert [n for k, n in found if k == "k1"] == [-1, 1]
    assert problems(store) == []


def test_a_transaction_keeps_the_schema_of_its_beginning(store: Store) -> None:
    transaction = begin(store)
    store.update_stream(STREAM, columns=pa.schema([("more", pa.int64())]))
    newer = pa.record_batch([["x"], [1], [2]], schema=store.find(STREAM).schema)
    writer = store.transaction(STREAM, transaction.id).writer("a")
    with pytest.raises(UsageError, match="began before stream 'app/events' got the columns of these events"):
        writer.write(newer)
    writer.write(keyed(("x", 1)))
    writer.close()
    transaction.commit()
    assert drained(store) == [("x", 1, None)]  # type: ignore[comparison-overlap]
    assert problems(store) == []


def test_a_stream_with_an_open_transaction_is_not_sealed(store: Store) -> None:
    transaction = begin(store)
    with pytest.raises(UsageError, match=r"has 1 open transaction\(s\), first '.*'; commit or abort them"):
        store.seal(STREAM)
    transaction.prepare()
    with pytest.raises(UsageError, match=r"has 1 prepared transaction\(s\)"):
        store.seal(STREAM)
    transaction.commit()
    store.seal(STREAM)
    with pytest.raises(UsageError, match="is sealed"):
        begin(store)


def test_a_deleted_stream_takes_its_transactions_along(store: Store) -> None:
    transaction = begin(store)
    writer = transaction.writer("a")
    writer.write(keyed(("x", 1)))
    writer.flush()
    store.delete(STREAM, force=True)
    store.create_stream(STREAM, KEYED)
    writer.write(keyed(("x", 2)))
    for verb in (writer.flush, transaction.ping, transaction.prepare, transaction.commit, transaction.abort):
        with pytest.raises(UsageError, match="was deleted"):
            verb()
    with pytest.raises(UsageError, match="knows no transaction"):
        transaction.status()
    assert drained(store) == []
    assert files(store) == []
    assert problems(store) == []


def test_truncating_leaves_open_transactions_alone(store: Store, clock: Clock) -> None:
    transaction = begin(store)
    write(transaction, "a", ("x", 1))
    with store.writer(STREAM) as writer:
        writer.append(keyed(("x", 0)))
    store.truncate(store.tail(STREAM))
    store.set_retention(STREAM, Retention(age="1ms"))
    clock.now_ms += 10
    store.retain(STREAM)
    transaction.commit()
    assert drained(store) == [("x", 1)]
    assert problems(store) == []


def test_a_newer_epoch_of_the_owner_fences_all_participants(store: Store) -> None:
    transaction = store.begin_shared(STREAM, owner="nightly", epoch=1)
    writer = transaction.writer("a")
    writer.write(keyed(("x", 1)))
    store.transactions.fence("nightly", 2)
    for verb in (writer.flush, transaction.ping, transaction.prepare, transaction.commit, transaction.abort):
        with pytest.raises(FencedError, match=r"'nightly' .*: generation 1 was replaced by generation 2"):
            verb()
    with pytest.raises(FencedError):
        store.begin_shared(STREAM, owner="nightly", epoch=1)
    assert store.list_transactions(owner="nightly")[0].status is Status.OPEN


def test_recovering_aborts_what_older_epochs_have_open(store: Store) -> None:
    opened, kept = (store.begin_shared(STREAM, owner="nightly", epoch=1) for _ in range(2))
    write(opened, "a", ("x", 1))
    write(kept, "a", ("x", 2))
    kept.prepare()
    assert store.transactions.recover(STREAM, owner="nightly", epoch=2, keep=[kept.id]) == [opened.id]
    assert opened.status().status is Status.ABORTED
    store.commit_transactions([(STREAM, kept.id)], owner="nightly", epoch=2)
    assert drained(store) == [("x", 2)]
    assert problems(store) == []


def test_several_streams_are_committed_in_one_step_when_they_are_prepared(store: Store) -> None:
    store.create_stream("other", KEYED)
    both = [begin(store), begin(store, "other")]
    for number, transaction in enumerate(both):
        write(transaction, "a", ("x", number))
        transaction.prepare()
    store.commit_transactions([(x.stream, x.id) for x in both], owner="writers", epoch=0)
    assert [drained(store), drained(store, "other")] == [[("x", 0)], [("x", 1)]]


def test_an_open_one_is_not_committed_with_others(store: Store) -> None:
    transaction = begin(store)
    with pytest.raises(Exception, match="it was not prepared, and others may be writing to it"):
        store.commit_transactions([(STREAM, transaction.id)], owner="writers", epoch=0)
    store.transactions.abort(STREAM, transaction.id, owner="writers", epoch=0)
    assert transaction.status().status is Status.ABORTED
    assert problems(store) == []


def test_a_transaction_says_what_is_in_it(store: Store, clock: Clock) -> None:
    transaction = begin(store)
    begun_ms = clock.wall_ms()
    with transaction.writer("b") as b:
        b.write(keyed(("x", 1), ("y", 2)))
        b.write(keyed(("x", 3)))
    write(transaction, "a", ("x", 4))
    clock.now_ms += 10
    transaction.ping()
    info = transaction.status()
    assert (info.stream, info.name, info.owner, info.status) == (STREAM, transaction.id, "writers", Status.OPEN)
    assert (info.events_count, info.begun_ms, info.lease_ms) == (4, begun_ms, LEASE_MS)
    assert info.due_ms == clock.wall_ms() + LEASE_MS
    assert info.size_bytes > 100
    assert [(x.name, x.sequence, x.events_count) for x in info.participants] == [("a", 1, 1), ("b", 2, 3)]
    transaction.prepare()
    assert transaction.status().due_ms is None
    transaction.commit()
    again = store.transaction(STREAM, transaction.id).status()
    assert (again.status, again.events_count, again.size_bytes) == (Status.COMMITTED, 4, info.size_bytes)
    assert store.list_transactions(stream=STREAM) == [again]
    assert store.list_transactions(owner="somebody") == []


def test_a_damaged_lease_is_found(store: Store) -> None:
    transaction = begin(store)
    transaction.writer("a")
    with database_of(store).write() as connection:
        connection.execute(tables.shared_transactions.update().values(due_ms=None))
    assert problems(store) == [f"transaction '{transaction.id}': open, and its lease is None"]
    with database_of(store).write() as connection:
        connection.execute(tables.transactions.delete())
    assert problems(store) == [
        "catalogue: 1 rows of shared_transactions belong to no transaction",
        "catalogue: 1 rows of participants belong to no transaction",
    ]


def test_a_closed_writer_takes_nothing(store: Store) -> None:
    transaction = begin(store)
    with transaction.writer("a") as writer:
        writer.write(keyed(("x", 1)))
    with pytest.raises(UsageError, match="is closed; open another one"):
        writer.write(keyed(("x", 2)))

    def fail() -> None:
        with transaction.writer("b") as other:
            other.write(keyed(("x", 3)))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    transaction.commit()
    assert drained(store) == [("x", 1)]
