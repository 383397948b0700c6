"""Transactions: all or nothing, prepared for ever, decided once, fenced."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, chunks_of, database_of, drain, drained, in_a_child, keyed, lose_an_answer
from tests.support.clocks import HandClock

from headgate.environment import SystemThreads
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import OtherSink, Owner, PipelineIdentity
from headgate.protocol.store.transactions import Status
from headgate.protocol.watermarks import WATERMARK_MIN_MS
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.store import chunks, transactions
from headgate.store.catalogue import chunk_index, tables, transaction_rows
from headgate.store.catalogue.records import Contents
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, StreamReset
from headgate.store.transactions import Transaction


def prepared(store: Store, name: str, *pairs: tuple[str, int], epoch: int = 1, owner: str = "p/sink") -> Transaction:
    transaction = store.transactions.begin(STREAM, owner=owner, epoch=epoch, name=name)
    if pairs:
        transaction.write(keyed(*pairs))
    transaction.prepare()
    return transaction


def commit(store: Store, *names: str, epoch: int = 1, owner: str = "p/sink") -> None:
    store.commit_transactions([(STREAM, name) for name in names], owner=owner, epoch=epoch)


def statuses(store: Store) -> dict[str, str]:
    return {info.name: info.status.value for info in store.list_transactions()}


def test_events_are_invisible_until_commit(store: Store) -> None:
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    transaction.write(keyed(("a", 1), ("b", 2)))
    assert statuses(store) == {}  # an open transaction leaves no trace
    transaction.prepare()
    assert statuses(store) == {"t": "prepared"}
    assert store.describe(STREAM).prepared_count == 1
    assert drained(store) == []
    commit(store, "t")
    assert drained(store) == [("a", 1), ("b", 2)]
    assert statuses(store) == {"t": "committed"}
    assert store.fsck() == []


def test_prepared_transactions_survive_a_restart_and_any_time(store: Store) -> None:  # S12
    prepared(store, "t", ("a", 1))
    with Store.open(store.root) as again:
        (info,) = again.list_transactions(owner="p/sink")
        assert (info.stream, info.status, info.events_count) == (STREAM, Status.PREPARED, 1)
        commit(again, "t", epoch=5)
        assert drained(again) == [("a", 1)]


def test_prepared_is_immutable(store: Store) -> None:  # S12
    transaction = prepared(store, "t", ("a", 1))
    with pytest.raises(UsageError, match="takes no more events"):
        transaction.write(keyed(("b", 2)))


def test_several_transactions_commit_in_one_step_with_contiguous_positions(store: Store) -> None:  # S14
    names = [f"t{i}" for i in range(4)]
    for i, name in enumerate(names):
        prepared(store, name, *((f"k{k}", i * 10 + k) for k in range(6)))
    with store.writer(STREAM) as writer:
        writer.append(keyed(("x", 0)))
    before = store.describe(STREAM).ends
    readers = [store.reader(STREAM, s, before[s]) for s in range(3)]
    assert [reader.read() for reader in readers] == [None] * 3
    commit(store, *names)
    for segment, reader in enumerate(readers):
        batch = reader.read()
        assert batch is not None
        assert reader.position == store.describe(STREAM).ends[segment]
        assert batch.column(1).to_pylist() == sorted(batch.column(1).to_pylist())  # in the order committed


def test_one_bad_transaction_keeps_all_of_a_commit_invisible(store: Store) -> None:  # S14
    prepared(store, "good", ("a", 1))
    with pytest.raises(CorruptionError, match="no record of it"):
        commit(store, "good", "unknown")
    assert drained(store) == []
    assert statuses(store) == {"good": "prepared"}


def test_verbs_are_idempotent_and_their_opposite_fails_loudly(store: Store) -> None:
    prepared(store, "yes", ("a", 1))
    prepared(store, "no", ("b", 2))
    commit(store, "yes")
    commit(store, "yes")
    store.transactions.abort(STREAM, "no", owner="p/sink", epoch=1)
    store.transactions.abort(STREAM, "no", owner="p/sink", epoch=1)
    with pytest.raises(CorruptionError, match="committed: it was committed and readers may have seen it"):
        store.transactions.abort(STREAM, "yes", owner="p/sink", epoch=1)
    with pytest.raises(CorruptionError, match="aborted: it was aborted, so its events are gone"):
        commit(store, "no")
    assert drained(store) == [("a", 1)]
    assert store.fsck() == []


def test_an_aborted_name_cannot_be_prepared_later(store: Store) -> None:
    late = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    late.write(keyed(("a", 1)))
    store.transactions.abort(STREAM, "t", owner="p/sink", epoch=1)
    with pytest.raises(CorruptionError, match="aborted: it cannot be prepared"):
        late.prepare()
    with pytest.raises(UsageError, match="aborted already"):
        store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")


def test_another_owner_cannot_commit(store: Store) -> None:
    prepared(store, "t", ("a", 1))
    with pytest.raises(CorruptionError, match="belongs to 'p/sink'"):
        commit(store, "t", owner="q/sink")


def test_an_empty_transaction_commits_and_is_remembered(store: Store) -> None:
    prepared(store, "t")
    commit(store, "t")
    commit(store, "t")
    assert statuses(store) == {"t": "committed"}
    assert drained(store) == []
    assert store.fsck() == []


def test_a_fenced_epoch_can_do_nothing_any_more(store: Store) -> None:  # S18
    prepared(store, "old", ("a", 1), epoch=1)
    open_one = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="open")
    open_one.write(keyed(("b", 2)))
    store.transactions.fence("p/sink", 2)
    store.transactions.fence("p/sink", 2)
    with pytest.raises(FencedError, match="generation 1 was replaced by generation 2"):
        open_one.prepare()
    with pytest.raises(FencedError):
        store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="new")
    with pytest.raises(FencedError):
        commit(store, "old", epoch=1)
    with pytest.raises(FencedError):
        store.transactions.abort(STREAM, "old", owner="p/sink", epoch=1)
    with pytest.raises(FencedError):
        store.transactions.fence("p/sink", 1)
    assert drained(store) == []
    prepared(store, "other", ("c", 3), owner="q/sink", epoch=1)  # fences are per owner
    commit(store, "old", epoch=2)
    assert drained(store) == [("a", 1)]


def test_a_verb_of_a_newer_epoch_fences_the_older_ones(store: Store) -> None:  # S18
    prepared(store, "t1", epoch=1)
    prepared(store, "t7", epoch=7)
    with pytest.raises(FencedError):
        commit(store, "t1", epoch=6)


def test_recover_keeps_what_it_is_told_aborts_the_rest_and_sweeps_leftovers(store: Store) -> None:
    prepared(store, "keep", ("a", 1))
    prepared(store, "drop", ("b", 2))
    prepared(store, "foreign", ("c", 3), owner="q/sink")
    crashed = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="crashed")
    crashed.write(keyed(("d", 4)))
    crashed._write_chunk(crashed._buffer)  # spilled, then its process died
    assert [p.is_harmless for p in store.fsck()] == [True]
    assert store.transactions.recover(STREAM, owner="p/sink", epoch=2, keep={"keep"}) == ["drop"]
    assert statuses(store) == {"keep": "prepared", "drop": "aborted", "foreign": "prepared"}
    assert store.fsck() == []  # no file of the crashed one is left
    commit(store, "keep", epoch=2)
    assert drained(store) == [("a", 1)]
    with pytest.raises(FencedError):
        store.transactions.recover(STREAM, owner="p/sink", epoch=1)


def test_files_that_are_not_ours_are_passed_over_and_kept(store: Store) -> None:
    crashed = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="crashed")
    crashed.write(keyed(("d", 4)))
    crashed._write_chunk(crashed._buffer)
    directory = transactions.owner_directory(crashed.stream.stream_id, "p/sink")
    store._core.storage.put(f"{directory}/README", [b"?"])
    store._core.storage.put(f"{directory}/old/1", [b"?"])
    assert store.transactions.recover(STREAM, owner="p/sink", epoch=2) == []
    assert store._core.storage.list(directory) == [f"{directory}/README", f"{directory}/old/1"]


def test_sweeping_spares_open_transactions_of_the_living_epoch(store: Store) -> None:
    alive = store.transactions.begin(STREAM, owner="p/sink", epoch=2, name="alive")
    alive.write(keyed(("a", 1)))
    alive._write_chunk(alive._buffer)
    alive._buffer = []
    store.transactions.recover(STREAM, owner="p/sink", epoch=2)
    alive.prepare()
    commit(store, "alive", epoch=2)
    assert drained(store) == [("a", 1)]


def test_an_open_transaction_that_is_aborted_leaves_no_file(store: Store) -> None:
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction._write_chunk(transaction._buffer)
    transaction.abort()
    assert statuses(store) == {}
    assert store.fsck() == []


def test_a_large_transaction_is_spilled_and_still_commits_in_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 4_000)
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1)
    for n in range(50):
        transaction.write(keyed(*((f"k{k}", n) for k in range(20))))
    assert store.describe(STREAM).chunks_count == 0
    transaction.seal("t")
    transaction.prepare()
    assert store.describe(STREAM).chunks_count >= 5
    commit(store, "t")
    for segment in drain(store):
        for key in {k for k, _ in segment}:
            assert [v for k, v in segment if k == key] == list(range(50))


def test_without_routing_key_a_transaction_stays_together_in_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 100)
    store.create_stream("lines", TEXT_SCHEMA, segments=3)
    for name in ("t1", ""):
        transaction = store.transactions.begin("lines", owner="p", epoch=1, name=name)
        for n in range(20):
            transaction.write(pa.record_batch([[f"{name}{n:02}"]], schema=TEXT_SCHEMA))
        transaction.seal(name or "t2")
        transaction.prepare()
        store.commit_transactions([("lines", name or "t2")], owner="p", epoch=1)
    for name in ("t1", ""):
        wanted = [f"{name}{n:02}" for n in range(20)]
        homes = [[v for (v,) in s if v in wanted] for s in drain(store, "lines")]  # type: ignore[misc]
        assert [home for home in homes if home] == [wanted]


def test_prepare_repeated_after_its_answer_was_lost_changes_nothing(store: Store) -> None:
    transaction = prepared(store, "t", ("a", 1))
    transaction.prepare()
    commit(store, "t")
    assert drained(store) == [("a", 1)]
    assert store.fsck() == []


@pytest.mark.parametrize("is_spilled", [False, True])
def test_prepare_can_be_repeated_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_spilled: bool
) -> None:
    storage = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=storage) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
        storage.inject(Fault(FaultKind.NO_SPACE, "put", times=2))
        if is_spilled:
            monkeypatch.setattr(transactions, "FLUSH_BYTES", 1)
        transaction.write(keyed(("a", 1)))
        monkeypatch.undo()
        if is_spilled:
            assert transaction._part is not None
            assert not transaction._part.is_written()
        transaction.write(keyed(("a", 2)))
        with pytest.raises(StorageError):
            transaction.prepare()
        assert statuses(store) == {}
        if not is_spilled:
            with pytest.raises(StorageError):
                transaction.prepare()
        transaction.prepare()
        commit(store, "t")
        assert drained(store) == [("a", 1), ("a", 2)]


class NoThreads(SystemThreads):
    """A system that has no threads left, for as long as it is told."""

    def __init__(self) -> None:
        self.is_short = True

    def pool(self, size: int, name: str) -> Any:
        if self.is_short:
            raise RuntimeError("can't start new thread")
        return super().pool(size, name)


def test_what_no_thread_can_write_is_written_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 1)
    threads = NoThreads()
    store = Store("memory", memory_catalogue("memory"), MemoryStorage(), threads=threads)
    store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    for n in range(4):
        threads.is_short = n < 2
        transaction.write(keyed(("a", n)))
    transaction.prepare()
    commit(store, "t")
    assert drained(store) == [("a", n) for n in range(4)]


@pytest.fixture
def three_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_rows, "OUTCOMES_RETAINED", 3)
    monkeypatch.setattr(transaction_rows, "OUTCOME_CLEANUP_INTERVAL", 1)


@pytest.mark.usefixtures("three_retained")
def test_old_outcomes_are_forgotten_and_then_unknown(store: Store) -> None:
    prepared(store, "waits", ("w", 0))
    for n in range(6):
        prepared(store, f"t{n}", ("a", n))
        commit(store, f"t{n}")
    assert statuses(store) == {"waits": "prepared", "t3": "committed", "t4": "committed", "t5": "committed"}
    with pytest.raises(CorruptionError, match="no record"):
        commit(store, "t0")
    commit(store, "waits")
    assert len(drained(store)) == 7


@pytest.mark.usefixtures("three_retained")
def test_a_busy_owner_does_not_make_the_store_forget_a_quiet_one(store: Store) -> None:
    prepared(store, "quiet", ("q", 0), owner="quiet/sink")
    commit(store, "quiet", owner="quiet/sink")
    for n in range(9):
        prepared(store, f"t{n}", ("a", n))
        commit(store, f"t{n}")
    commit(store, "quiet", owner="quiet/sink")  # it may ask at any time: its checkpoint is its newest one
    assert len(store.list_transactions(owner="p/sink")) == 3


@pytest.mark.usefixtures("three_retained")
def test_what_was_decided_last_is_remembered_however_long_it_was_prepared(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(1_000))
    monkeypatch.setattr(store._core.clock, "wall_ms", lambda: next(now))
    prepared(store, "waits", ("w", 0))
    for n in range(6):
        prepared(store, f"t{n}", ("a", n))
        commit(store, f"t{n}")
    for _ in range(2):  # the answer to the first was lost
        commit(store, "waits")


@pytest.mark.usefixtures("three_retained")
def test_aborted_names_are_bounded_as_well(store: Store) -> None:
    for n in range(9):
        store.transactions.abort(STREAM, f"t{n}", owner="p/sink", epoch=1)
    assert len(store.list_transactions()) == 3


@pytest.mark.usefixtures("three_retained")
def test_outcomes_of_a_pipeline_stay_until_it_says_that_it_will_not_ask(store: Store) -> None:
    store.pipelines.own("p/sink", LIFE)
    for n in range(6):
        prepared(store, f"t{n}", ("a", n))
        commit(store, f"t{n}")
    prepared(store, "waits", ("w", 0))
    commit(store, "t0")
    store.transactions.forget_outcomes(["t0", "t1", "waits", "unknown"], owner="p/sink", epoch=1)
    assert sorted(statuses(store)) == ["t2", "t3", "t4", "t5", "waits"]
    store.transactions.forget_outcomes(["t2"], owner="other", epoch=1)
    assert "t2" in statuses(store)
    store.transactions.fence("p/sink", 2)
    with pytest.raises(FencedError):
        store.transactions.forget_outcomes(["t2"], owner="p/sink", epoch=1)
    assert store.fsck() == []


def test_a_transaction_that_was_aborted_cannot_be_prepared_as_an_empty_one(store: Store) -> None:
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.abort()
    with pytest.raises(UsageError, match="was aborted"):
        transaction.prepare()
    assert statuses(store) == {}


def test_giving_up_after_a_lost_answer_of_prepare_does_not_take_files_from_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # S13
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            transaction.prepare()
    transaction.abort()
    assert statuses(store) == {"t": "aborted"}
    with pytest.raises(CorruptionError, match="aborted"):
        commit(store, "t")
    assert store.fsck() == []
    kept = prepared(store, "kept", ("b", 2))
    commit(store, "kept")
    with pytest.raises(CorruptionError, match="committed"):
        kept.abort()
    assert drained(store) == [("b", 2)]


def test_a_write_that_raised_took_nothing_so_that_it_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 1)
    storage = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=storage) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
        storage.inject(Fault(FaultKind.NO_SPACE, "put", times=2))
        transaction.write(keyed(("a", 1)))  # is written beside, in vain
        with pytest.raises(StorageError):
            transaction.write(keyed(("a", 2)))
        transaction.write(keyed(("a", 2)))
        transaction.prepare()
        commit(store, "t")
        assert drained(store) == [("a", 1), ("a", 2)]


def test_a_part_that_was_written_again_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=storage) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
        storage.inject(Fault(FaultKind.NO_SPACE, "put"))
        with monkeypatch.context() as patch:
            patch.setattr(transactions, "FLUSH_BYTES", 1)
            transaction.write(keyed(("a", 1)))  # is written beside, in vain; ``prepare`` writes it again
        with monkeypatch.context() as patch:
            lose_an_answer(store, patch)
            with pytest.raises(StorageError):
                transaction.prepare()
        transaction.prepare()
        commit(store, "t")
        assert drained(store) == [("a", 1)]


def test_a_transaction_is_written_in_parts_of_a_size_that_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, storage = keyed(("a", 1)), MemoryStorage()
    store = Store("memory", memory_catalogue("memory"), storage, threads=NoThreads())
    store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    two = 2 * batch.nbytes
    for flush_bytes, wanted in ((two, [0, 0, 0, 1, 1, 2, 2]), (two + 1, [0, 0, 0, 0, 0, 1, 1])):
        monkeypatch.setattr(transactions, "FLUSH_BYTES", flush_bytes)
        transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1)
        before, found = len(storage.list("")), []
        for _ in wanted:  # without threads a full part is written when the next one is full
            transaction.write(batch)
            found.append(len(storage.list("")) - before)
        assert found == wanted
        assert transaction.events_count == len(wanted)
        transaction.abort()


def test_a_commit_of_less_than_was_prepared_is_an_error(store: Store) -> None:
    prepared(store, "t", ("a", 1), ("b", 2))
    with database_of(store).write() as connection:
        connection.execute(tables.prepared_parts.delete())
    with pytest.raises(CorruptionError, match="2 prepared events, found 0"):
        commit(store, "t")
    assert statuses(store) == {"t": "prepared"}


def test_other_content_under_a_name_that_was_decided_is_denied(store: Store) -> None:  # S13
    """As another life of a pipeline would come with it: never a reason to try again."""
    prepared(store, "t", ("a", 1))
    commit(store, "t")
    other = store.transactions.begin(STREAM, owner="p/sink", epoch=1)
    other.write(keyed(("b", 2)))
    other.seal("t")
    for _ in range(2):
        with pytest.raises(CorruptionError, match="committed: it cannot be prepared with other content"):
            other.prepare()
    assert drained(store) == [("a", 1)]


def test_recovery_aborts_what_was_left_in_other_streams(store: Store) -> None:
    store.create_stream("former", KEYED, segments=1)
    for name in ("keep", "drop"):
        transaction = store.transactions.begin("former", owner="p/sink", epoch=1, name=name)
        transaction.write(keyed((name, 1)))
        transaction.prepare()
    spilled = store.transactions.begin("former", owner="p/sink", epoch=1, name="spilled")
    spilled.write(keyed(("x", 1)))
    spilled._write_chunk(spilled._buffer)
    with pytest.raises(UsageError, match="prepared transaction"):
        store.seal("former")
    assert store.transactions.recover(STREAM, owner="p/sink", epoch=2, keep={"keep"}) == ["drop"]
    store.commit_transactions([("former", "keep")], owner="p/sink", epoch=2)
    store.seal("former")
    assert drained(store, "former") == [("keep", 1)]
    assert store.fsck() == []


def test_files_of_strangers_below_a_transactions_directory_stay_and_do_no_harm(store: Store) -> None:
    prepared(store, "t", ("a", 1))
    stream_id = store.describe(STREAM).stream_id
    base = chunks_of(store) / transactions.owner_directory(stream_id, "p/sink")
    strays = [base / "README", base / "7", base / "x" / "1.chunk", base / "1" / "notes.txt"]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_text("not ours")
    assert store.transactions.recover(STREAM, owner="p/sink", epoch=9) == ["t"]
    assert all(stray.exists() for stray in strays)
    assert all(problem.is_harmless for problem in store.fsck())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_large_transactions_are_written_in_a_child_as_well(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 1)
    prepared(store, "parent", ("a", 1), ("b", 2))  # its threads live in this process
    in_a_child(lambda: prepared(store, "child", ("c", 3), ("d", 4)))
    commit(store, "parent", "child")
    assert len(drained(store)) == 4


LIFE, OTHER = PipelineIdentity("a", "/a", "h", 1), PipelineIdentity("b", "/b", "h", 2)


def test_an_owner_is_one_life_until_it_is_forgotten(store: Store) -> None:  # LV3, LV4, S18
    assert store.pipelines.owner("p/sink") == Owner()
    assert store.pipelines.own("p/sink", LIFE) == store.pipelines.own("p/sink", LIFE) == Owner(LIFE)
    prepared(store, "t", ("a", 1), epoch=7)
    assert store.pipelines.own("p/sink", OTHER) == Owner(LIFE, Generation(7))
    assert store.pipelines.forget_owner("p/sink") == Owner(LIFE, Generation(7))
    assert store.pipelines.owner("p/sink") == Owner(None, Generation(7), is_forgotten=True)
    assert store.pipelines.own("p/sink", OTHER) == Owner(OTHER, Generation(7))
    assert store.pipelines.own("q/sink", LIFE) == Owner(LIFE)


def test_a_stream_knows_who_else_of_a_pipeline_has_written_to_it(store: Store) -> None:
    store.create_stream("elsewhere", store.describe(STREAM).schema)
    for owner, stream in (("p/out", STREAM), ("p/nowhere", "elsewhere"), ("p2/out", STREAM), ("p/kept", STREAM)):
        store.pipelines.own(owner, LIFE)
        transaction = store.transactions.begin(stream, owner=owner, epoch=3, name=owner)
        transaction.write(keyed(("a", 1)))
        transaction.prepare()
        store.commit_transactions([(stream, owner)], owner=owner, epoch=3)
    store.pipelines.forget_owner("p/kept")
    others = (OtherSink("kept", Owner(None, Generation(3), True)), OtherSink("out", Owner(LIFE, Generation(3))))
    assert store.pipelines.owner("p/renamed", STREAM, "p/") == Owner(others=others)
    assert store.pipelines.owner("p/out", STREAM, "p/") == Owner(LIFE, Generation(3), others=others[:1])
    assert store.pipelines.owner("p/renamed", "no-such-stream", "p/") == Owner()
    store.delete(STREAM, force=True)
    assert store.pipelines.owner("p/renamed", STREAM, "p/") == Owner()


def test_an_underscore_in_the_name_of_a_pipeline_stands_for_itself(store: Store) -> None:
    for owner in ("a_b/out", "axb/out"):
        prepared(store, owner, ("a", 1), owner=owner)
        commit(store, owner, owner=owner)
    assert [other.sink for other in store.pipelines.owner("a_b/new", STREAM, "a_b/").others] == ["out"]


def is_life(owner: Owner) -> bool:
    return owner.life == LIFE


def test_a_stream_tells_what_its_pipeline_and_others_have_written(store: Store) -> None:
    def contents(stream: str = STREAM) -> Contents:
        return store.pipelines.contents(stream, "p/", is_life)

    store.create_stream("elsewhere", KEYED)
    with store.writer("elsewhere") as writer:
        writer.append(keyed(("a", 1)))
    assert (contents("no-such-stream"), contents()) == (Contents(), Contents())
    assert contents("elsewhere") == Contents(1, others=True)
    store.pipelines.own("p/sink", LIFE)
    prepared(store, "t", ("a", 1))
    assert contents() == Contents(), "what is prepared is aborted in any case"
    commit(store, "t")
    assert contents() == Contents(1, ours=True)
    store.pipelines.own("p/old", OTHER)
    prepared(store, "u", ("b", 2), owner="p/old")
    assert contents() == Contents(1, ours=True, others=True)
    store.transactions.abort_all("p/old")
    store.pipelines.forget_owner("p/sink")
    assert contents() == Contents(1, others=True, forgotten=True)
    store.truncate(store.tail(STREAM))
    assert contents() == Contents(0, others=True, forgotten=True)


def test_a_reset_takes_a_stream_from_its_former_life_unless_others_wrote_to_it(store: Store) -> None:  # SO5
    store.pipelines.own("p/sink", LIFE)
    for name in ("t", "u"):
        prepared(store, name, ("a", 1))
    commit(store, "t")
    prepared(store, "other", ("b", 2), owner="q/sink")
    reset = StreamReset({STREAM: (3, "key", None), "no-such-stream": None}, "p/sink", 5, OTHER, "p/")
    assert store.pipelines.start_over(reset, is_life) == STREAM
    assert store.pipelines.owner("p/sink") == Owner(LIFE, Generation(1))
    assert statuses(store) == {"t": "committed", "u": "prepared", "other": "prepared"}
    store.transactions.abort_all("q/sink")
    assert store.pipelines.start_over(reset, is_life) is None
    assert store.pipelines.owner("p/sink") == Owner(OTHER, Generation(5))
    assert store.list_streams() == [], "the sink makes it again"
    assert LocalStorage(chunks_of(store)).list("") == []
    store.create_stream(STREAM, KEYED, segments=3, routing_key="key")
    prepared(store, "t", ("c", 3), epoch=5)
    commit(store, "t", epoch=5)
    assert store.pipelines.start_over(reset, is_life) is None
    assert drained(store) == [("c", 3)], "it was done before"


def test_a_reset_leaves_a_stream_to_others_and_aborts_what_it_has_prepared_there(store: Store) -> None:  # SO5
    prepared(store, "other", ("b", 2), owner="q/sink")
    commit(store, "other", owner="q/sink")
    prepared(store, "t", ("a", 1))
    reset = StreamReset({STREAM: (3, "key", None)}, "p/sink", 5, OTHER, "p/")
    assert store.pipelines.start_over(reset, is_life) is None
    assert (drained(store), statuses(store)["t"]) == ([("b", 2)], "aborted")


def test_forgetting_an_owner_removes_nothing_and_keeps_its_fence(store: Store) -> None:  # LV4, S18
    prepared(store, "t", ("a", 1), epoch=7)
    prepared(store, "u", ("b", 2), epoch=7)
    commit(store, "u", epoch=7)
    store.pipelines.forget_owner("p/sink")
    assert statuses(store) == {"t": "prepared", "u": "committed"}
    with pytest.raises(FencedError):
        prepared(store, "v", ("c", 3), epoch=6)
    commit(store, "t", epoch=7)
    assert sorted(drained(store)) == [("a", 1), ("b", 2)]
    assert store.fsck() == []


def test_what_an_owner_prepared_is_aborted_when_somebody_asks_for_it(store: Store) -> None:
    prepared(store, "t", ("a", 1), epoch=7)
    prepared(store, "u", ("b", 2), epoch=7)
    commit(store, "u", epoch=7)
    assert store.transactions.abort_all("p/sink") == 1
    assert statuses(store) == {"t": "aborted", "u": "committed"}
    assert store.transactions.abort_all("p/sink") == 0


def test_list_by_owner_and_prefix(store: Store) -> None:
    for name in ("a/1", "a/2", "b_1", "bx1"):
        prepared(store, name)
    prepared(store, "a/3", owner="q")
    assert [i.name for i in store.list_transactions(owner="p/sink", prefix="a/")] == ["a/1", "a/2"]
    assert [i.name for i in store.list_transactions(prefix="b_")] == ["b_1"]
    assert store.list_transactions(stream="none") == []


def test_files_of_an_owner_lie_below_its_directory(store: Store) -> None:
    prepared(store, "t", ("a", 1), epoch=4)
    (path,) = LocalStorage(chunks_of(store)).list("")
    stream_id = store.describe(STREAM).stream_id
    assert path.startswith(transactions.owner_directory(stream_id, "p/sink") + "/4/")


def test_unusable_owners_and_names_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="owner"):
        store.transactions.begin(STREAM, owner="", epoch=1)
    nameless = store.transactions.begin(STREAM, owner="p", epoch=1)
    with pytest.raises(UsageError, match="name"):
        nameless.prepare()


def test_events_of_several_parts_and_chunks_are_committed_in_the_order_in_which_they_were_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "PART_ROWS_MAX", 2)
    monkeypatch.setattr(transactions, "FLUSH_BYTES", 1)  # each write is a chunk
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    for first in (0, 10):
        transaction.write(keyed(*(("a", number) for number in range(first, first + 10))))
    transaction.prepare()
    commit(store, "t")
    assert [row for segment in drain(store) for row in segment] == [("a", number) for number in range(20)]


def note(store: Store, owner: str, event_ms: int, name: str = "", *pairs: tuple[str, int]) -> None:
    """Commit with the event time that ``owner`` has come to."""
    if name:
        prepared(store, name, *pairs, owner=owner)
    names = [(STREAM, name)] if name else []
    store.commit_transactions(names, owner=owner, epoch=1, times={STREAM: event_ms})


def event_time(store: Store, segment: int = 0, rows_max: int = 1_000) -> int | None:
    """Read a segment from its beginning; return the event time that the reader has come to."""
    reader = store.reader(STREAM, segment)
    while reader.read(rows_max) is not None:
        pass
    return reader.event_ms


@pytest.mark.parametrize("times", [{}, {STREAM: 70}], ids=["no event time", "event time"])
def test_output_to_a_stream_that_was_deleted_is_lost_unless_its_owner_was_replaced(
    store: Store, times: dict[str, int]
) -> None:
    """Else a pipeline that may lose output could not go on."""
    prepared(store, "t", ("a", 1))
    store.delete(STREAM, force=True)
    with pytest.raises(UsageError, match="does not exist") as lost:
        store.commit_transactions([(STREAM, "t")], owner="p/sink", epoch=1, times=times)
    assert lost.value.is_output_gone
    store.transactions.fence("p/sink", 2)
    with pytest.raises(FencedError):
        store.commit_transactions([(STREAM, "t")], owner="p/sink", epoch=1, times=times)


def test_event_time_holds_after_all_that_was_committed_with_it(store: Store) -> None:  # S90, S92
    assert event_time(store) is None
    for name in ("one", "two"):
        prepared(store, name, *[("a", number) for number in range(3)])
    store.commit_transactions([(STREAM, "one"), (STREAM, "two")], owner="p/sink", epoch=1, times={STREAM: 70})
    segment = next(at for at in range(store.describe(STREAM).segments_count) if store.reader(STREAM, at).read())
    reader, found = store.reader(STREAM, segment), []
    while reader.read(2) is not None:
        found.append(reader.event_ms)
    assert found == [WATERMARK_MIN_MS, chunk_index.EVENT_MS_MIN, 70]
    assert event_time(store, (segment + 1) % 2) == 70, "a segment without events has come as far"
    within = store.reader(STREAM, segment, 4)
    within.read(1)
    assert within.event_ms == WATERMARK_MIN_MS, "it began within a part"
    assert store.fsck() == []


def test_a_stream_comes_as_far_as_the_last_of_its_owners_and_never_back(store: Store) -> None:  # S90
    note(store, "p/sink", 100, "t", ("a", 1))
    note(store, "q/sink", 50)
    assert event_time(store) == 100, "it never goes back"
    note(store, "p/sink", 300)
    assert event_time(store) == 100, "the other one is at 50"
    note(store, "q/sink", 200)
    assert event_time(store) == 200
    note(store, "q/sink", 200)
    assert event_time(store) == 200, "said again"
    with pytest.raises(FencedError):
        store.commit_transactions([], owner="p/sink", epoch=0, times={STREAM: 900})
    assert event_time(store) == 200


def test_who_is_silent_for_long_holds_event_time_back_no_longer(store: Store) -> None:  # S90
    clock = HandClock()
    timed = Store(store.root, store._core.catalogue, store._core.storage, clock=clock)
    note(timed, "q/sink", 50)
    clock.advance(chunk_index.SILENT_MS)
    note(timed, "p/sink", 300)
    assert event_time(store) == 50
    clock.advance(1)
    note(timed, "p/sink", 300)
    assert event_time(store) == 300


def test_what_says_nothing_about_event_time_has_none(store: Store) -> None:  # S92
    note(store, "p/sink", 100, "t", ("a", 1))
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 2)))
    segment = next(at for at in range(store.describe(STREAM).segments_count) if store.reader(STREAM, at).read())
    reader = store.reader(STREAM, segment)
    reader.read(1)
    assert reader.event_ms == 100
    reader.read(1)
    assert reader.event_ms is None


def test_event_time_goes_on_when_a_stream_is_scaled(store: Store) -> None:  # S90
    note(store, "p/sink", 100, "t", ("a", 1))
    store.split(STREAM, 0)
    note(store, "p/sink", 90)
    segments = [segment.segment_id for segment in store.layout(STREAM).present]
    assert [event_time(store, segment) for segment in segments] == [100] * len(segments)


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_a_writer_notes_time_that_holds_after_what_it_appended(store: Store) -> None:  # S93
    with store.writer(STREAM) as writer:
        writer.note_time(at(10))
        for _ in range(2):
            writer.append(keyed(*[("a", number) for number in range(3)]))
            writer.flush()
        writer.note_time(at(70).replace(tzinfo=None))
        count = store.describe(STREAM).segments_count
        segment = next(number for number in range(count) if store.reader(STREAM, number).read())
        reader, found = store.reader(STREAM, segment), []
        while reader.read(2) is not None:
            found.append(reader.event_ms)
        assert found == [WATERMARK_MIN_MS, 10_000, 70_000]
        assert event_time(store, (segment + 1) % 2) == 70_000, "a segment without events has come as far"
        writer.append(keyed(("a", 3)))
        writer.flush()
        assert event_time(store, segment) == 70_000
        with pytest.raises(UsageError, match="note_time takes a datetime, not int"):
            writer.note_time(80)  # type: ignore[arg-type]
    assert store.fsck() == []


def test_a_writer_notes_time_when_its_stream_was_scaled_meanwhile(store: Store) -> None:  # S93
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 1)))
        writer.flush()
        store.split(STREAM, 0)
        store.merge(STREAM, [1, 2])
        writer.note_time(at(70))
        segments = [segment.segment_id for segment in store.layout(STREAM).present]
        assert [event_time(store, segment) for segment in segments] == [70_000] * len(segments)


def test_a_time_that_is_noted_after_one_event_holds_behind_it(store: Store) -> None:  # S93
    store.create_stream("single", KEYED, segments=1)
    with store.writer("single") as writer:
        writer.append(keyed(("a", 1)))
        writer.note_time(at(70))
        with store.writer("single") as other:
            other.append(keyed(("a", 2)))
        reader = store.reader("single", 0)
        reader.read(1)
        assert reader.event_ms == 70_000


@pytest.mark.parametrize("end", ["seal", "delete"])
def test_no_time_is_noted_where_nothing_can_be_appended(store: Store, end: str) -> None:  # S93
    writer = store.writer(STREAM)
    store.seal(STREAM)
    if end == "delete":
        store.delete(STREAM)
    with pytest.raises(UsageError, match=r"is sealed|was deleted"):
        writer.note_time(at(10))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_writer_taken_through_a_fork_leaves_the_time_of_its_parent(store: Store) -> None:  # S93
    parent = store.writer(STREAM)
    parent.note_time(at(10))

    def child() -> None:
        parent.note_time(at(60))
        parent.close()

    in_a_child(child)
    in_a_child(parent.close)
    with store.writer(STREAM) as other:
        other.note_time(at(50))
        assert event_time(store) == 10_000, "the parent may still append what is later than that only"
    parent.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_time_that_was_noted_after_a_fork_holds_until_the_child_closes_its_writer(store: Store) -> None:  # S93
    parent = store.writer(STREAM)
    parent.note_time(at(10))

    def child() -> None:
        parent.note_time(at(20))
        parent.close()

    in_a_child(child)
    parent.note_time(at(50))
    assert event_time(store) == 50_000
    parent.close()


def test_a_writer_holds_event_time_back_until_it_is_closed(store: Store) -> None:  # S93
    slow = store.writer(STREAM, writer_id="slow", epoch=1)
    slow.note_time(at(10))
    with store.writer(STREAM) as writer:
        writer.note_time(at(50))
        assert event_time(store) == 10_000
        newer = store.writer(STREAM, writer_id="slow", epoch=2)
        with pytest.raises(FencedError):
            slow.note_time(at(900))
        newer.note_time(at(20))
        assert event_time(store) == 20_000
        newer.close()
        writer.note_time(at(60))
        assert event_time(store) == 60_000
    with pytest.raises(UsageError, match="is closed"):
        writer.note_time(at(90))
