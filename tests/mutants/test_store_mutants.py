"""Mutants of the stream store: each breaks one promise about what is durable, and a named test fails."""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from tests.connectors import test_stream_connectors as connecting
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.store import test_layout as layouts
from tests.store import test_store_acknowledgements as acknowledging
from tests.store import test_store_damage as damaging
from tests.store import test_store_linger as lingering
from tests.store import test_store_reader as reading
from tests.store import test_store_streams as streams
from tests.store import test_store_transactions as deciding
from tests.store import test_store_writer as writing
from tests.store.catalogue import test_store_catalogue as syncing
from tests.store.catalogue import test_store_migration as migrating
from tests.store.storing import KEYED, STREAM, keyed

from headgate.connectors.streams import StreamSink
from headgate.protocol.store import transactions as protocol
from headgate.protocol.store.layouts import KEY_SPACE, Layout, Segment
from headgate.protocol.store.transactions import Status
from headgate.storage.faulty import FaultyStorage
from headgate.storage.memory import MemoryStorage
from headgate.store import limits, schemas
from headgate.store import transactions as store_transactions
from headgate.store.catalogue import database, looking, making_lock, opening, outcomes, positions, sql, versions
from headgate.store.catalogue import streams as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue import transactions as recording
from headgate.store.catalogue.audit import SqlAudit
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.values import PartsFound
from headgate.store.linger import Linger
from headgate.store.open_transaction import Transaction
from headgate.store.reader import SegmentReader
from headgate.store.spilling import Part
from headgate.store.store import Store
from headgate.store.writer import Appended, StreamWriter

Test = Callable[..., object]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


@contextmanager
def what_no_thread_can_write_is_taken_for_written() -> Iterator[None]:
    """S70."""

    def give_back(self: Part) -> None:
        self._is_written = True
        self._is_over.set()

    with patched(Part, "give_back", give_back):
        yield


def test_a_part_that_nobody_wrote_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = what_no_thread_can_write_is_taken_for_written
    assert_caught(mutant, deciding.test_what_no_thread_can_write_is_written_by_the_caller, monkeypatch)


# -- appends ---------------------------------------------------------------------------------------------------------


@contextmanager
def a_repeated_append_is_acknowledged_at_once() -> Iterator[None]:
    """S7 before it was mended: a number that was seen is taken for one that the store has."""

    def at_once(self: StreamWriter, number: int) -> Future[Appended]:
        future: Future[Appended] = Future()
        future.set_result(Appended(is_duplicate=True))
        return future

    with patched(StreamWriter, "_future_of_first", at_once):
        yield


@contextmanager
def a_writer_goes_on_after_what_ended_it() -> Iterator[None]:
    real = StreamWriter._end

    def end(self: StreamWriter, error: Exception) -> None:
        real(self, error)
        self._failure = None

    with patched(StreamWriter, "_end", end):
        yield


@contextmanager
def numbers_below_one_are_taken_for_repeated_ones() -> Iterator[None]:
    with patched(StreamWriter, "_check_number", lambda self, sequence: None):
        yield


@contextmanager
def a_child_keeps_the_buffer_of_its_parent() -> Iterator[None]:
    real = StreamWriter._begin_in_this_process

    def keep(self: StreamWriter) -> None:
        buffered = getattr(self, "_buffer", [])
        real(self)
        self._buffer = buffered

    with patched(StreamWriter, "_begin_in_this_process", keep):
        yield


@contextmanager
def changes_of_two_connections_are_compared() -> Iterator[None]:
    with patched(database, "_CHANGES_OF_A_TAIL", 0):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            a_repeated_append_is_acknowledged_at_once,
            acknowledging.test_a_repeated_append_that_is_still_buffered_shares_its_future,
        ),
        (
            a_writer_goes_on_after_what_ended_it,
            acknowledging.test_a_writer_that_was_fenced_acknowledges_nothing_any_more,
        ),
        (
            numbers_below_one_are_taken_for_repeated_ones,
            acknowledging.test_numbers_that_no_store_can_know_are_refused_not_acknowledged,
        ),
        (
            a_child_keeps_the_buffer_of_its_parent,
            acknowledging.test_after_a_fork_the_parent_keeps_what_it_buffered,
        ),
        (
            changes_of_two_connections_are_compared,
            acknowledging.test_a_reader_taken_through_a_fork_sees_what_came_meanwhile,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_false_acknowledgement_is_caught(store: Store, mutant: Mutant, test: Test) -> None:
    assert_caught(mutant, test, store)


def test_an_acknowledgement_of_what_a_failed_flush_did_not_write_is_caught(tmp_path: Path) -> None:
    disk = FaultyStorage(MemoryStorage())
    with Store.open(tmp_path, storage=disk) as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        assert_caught(
            a_repeated_append_is_acknowledged_at_once,
            acknowledging.test_a_repeated_append_is_not_acknowledged_before_the_first_is_durable,
            store,
            disk,
        )


@contextmanager
def nobody_flushes_in_time() -> Iterator[None]:
    with patched(Linger, "arm", lambda self: None), patched(lingering, "PATIENCE_S", 0.2):
        yield


@contextmanager
def a_timed_flush_that_failed_is_not_repeated() -> Iterator[None]:
    real = StreamWriter._flush_in_time

    def once(self: StreamWriter) -> bool:
        real(self)
        return True

    without = patched(StreamWriter, "_finish", _without_arming(StreamWriter._finish))
    with without, patched(StreamWriter, "_flush_in_time", once), patched(lingering, "PATIENCE_S", 0.5):
        yield


def _without_arming(real: Callable[..., None]) -> Callable[..., None]:
    def finish(self: StreamWriter, attempt: Any) -> None:
        linger, self._linger = self._linger, None
        try:
            real(self, attempt)
        finally:
            self._linger = linger

    return finish


@contextmanager
def those_who_wait_are_not_told_what_ended_the_writer() -> Iterator[None]:
    real = StreamWriter._end

    def end(self: StreamWriter, error: Exception) -> None:
        self._attempt, self._buffer = None, []
        real(self, error)

    with patched(StreamWriter, "_end", end), patched(lingering, "PATIENCE_S", 0.5):
        yield


@contextmanager
def the_thread_of_a_closed_writer_stays() -> Iterator[None]:
    with patched(Linger, "close", lambda self, wait=True: None):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            nobody_flushes_in_time,
            lingering.test_an_append_completes_although_nobody_flushes,
        ),
        (
            those_who_wait_are_not_told_what_ended_the_writer,
            lingering.test_what_ends_the_writer_is_told_to_those_who_wait,
        ),
        (
            the_thread_of_a_closed_writer_stays,
            lingering.test_no_thread_stays_behind,
        ),
    ],
)
def test_a_linger_that_does_not_keep_its_word_is_caught(
    store: Store, mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (store, monkeypatch) if test is lingering.test_no_thread_stays_behind else (store,)
    assert_caught(mutant, test, *arguments)


def test_a_timed_flush_that_gives_up_is_caught(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test = lingering.test_a_full_disk_delays_what_waits_and_loses_nothing
    assert_caught(a_timed_flush_that_failed_is_not_repeated, test, tmp_path, caplog)


# -- transactions ----------------------------------------------------------------------------------------------------


@contextmanager
def outcomes_are_counted_over_the_whole_store() -> Iterator[None]:
    """S17 before it was mended."""
    everybody = (t.transactions.c.status != Status.PREPARED.value,)
    with patched(outcomes, "_decided", lambda owner: everybody):
        yield


@contextmanager
def outcomes_of_pipelines_are_counted_like_others() -> Iterator[None]:
    real = outcomes.forget_oldest

    def counted(connection: Any, owner: str) -> None:
        life = connection.execute(sa.select(t.owners).where(t.owners.c.owner == owner)).one_or_none()
        connection.execute(t.owners.delete().where(t.owners.c.owner == owner))
        real(connection, owner)
        if life is not None:
            connection.execute(t.owners.insert().values(owner=life.owner, life=life.life))

    with patched(outcomes, "forget_oldest", counted), patched(sql, "forget_oldest", counted):
        yield


@contextmanager
def a_commit_is_as_old_as_its_prepare() -> Iterator[None]:
    real = recording.set_status

    def keep_the_time(connection: Any, stream: Any, name: str, status: Status, now_ms: int) -> int:
        where = (t.transactions.c.stream_id == stream.stream_id, t.transactions.c.name == name)
        before = connection.scalar(sa.select(t.transactions.c.changed_ms).where(*where))
        number = real(connection, stream, name, status, now_ms)
        connection.execute(t.transactions.update().where(*where).values(changed_ms=before))
        return number

    with patched(recording, "set_status", keep_the_time):
        yield


@contextmanager
def giving_up_removes_files_without_a_verdict() -> Iterator[None]:
    real = Transaction.abort

    def abort(self: Transaction) -> None:
        self._may_be_prepared = False
        real(self)

    with patched(Transaction, "abort", abort):
        yield


@contextmanager
def an_aborted_transaction_may_be_prepared() -> Iterator[None]:
    real = Transaction.abort

    def abort(self: Transaction) -> None:
        real(self)
        self._is_aborted = False

    with patched(Transaction, "abort", abort):
        yield


@contextmanager
def other_content_is_prepared_over_what_was_decided() -> Iterator[None]:
    real = protocol._on_prepare

    def prepare(request: protocol.Request, record: protocol.TransactionRecord | None) -> protocol.Decision:
        decision = real(request, record)
        return protocol.AlreadyDone("as it was") if isinstance(decision, protocol.RefuseContradiction) else decision

    with patched(protocol, "_on_prepare", prepare):
        yield


@contextmanager
def recovery_looks_at_the_present_stream_only() -> Iterator[None]:
    with patched(recording, "_other_streams", lambda connection, present, owner, where: []):
        yield


@contextmanager
def every_name_counts_as_an_epoch() -> Iterator[None]:
    with patched(store_transactions, "_CHUNK", re.compile(r"([^/]*)(/.*)?")):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            an_aborted_transaction_may_be_prepared,
            deciding.test_a_transaction_that_was_aborted_cannot_be_prepared_as_an_empty_one,
        ),
        (
            other_content_is_prepared_over_what_was_decided,
            deciding.test_other_content_under_a_name_that_was_decided_is_denied,
        ),
        (
            every_name_counts_as_an_epoch,
            deciding.test_files_of_strangers_below_a_transactions_directory_stay_and_do_no_harm,
        ),
    ],
)
def test_a_transaction_that_does_not_keep_its_word_is_caught(store: Store, mutant: Mutant, test: Test) -> None:
    assert_caught(mutant, test, store)


def test_files_removed_without_a_verdict_are_missed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    test = deciding.test_giving_up_after_a_lost_answer_of_prepare_does_not_take_files_from_the_store
    assert_caught(giving_up_removes_files_without_a_verdict, test, store, monkeypatch)


def test_prepared_transactions_left_in_another_stream_are_found(store: Store) -> None:
    assert_caught(
        recovery_looks_at_the_present_stream_only, deciding.test_recovery_aborts_what_was_left_in_other_streams, store
    )


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            outcomes_are_counted_over_the_whole_store,
            deciding.test_a_busy_owner_does_not_make_the_store_forget_a_quiet_one,
        ),
        (
            outcomes_of_pipelines_are_counted_like_others,
            deciding.test_outcomes_of_a_pipeline_stay_until_it_says_that_it_will_not_ask,
        ),
    ],
)
def test_an_outcome_forgotten_too_early_is_missed(
    store: Store, mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "OUTCOMES_RETAINED", 3)
    monkeypatch.setattr(sql, "DECISIONS_BETWEEN_LOOKS", 1)
    test(store)
    store.forget_outcomes([x.name for x in store.list_transactions()], owner="p/sink", epoch=9)
    with Store.open(Path(store.root) / "another") as fresh:
        fresh.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        assert_caught(mutant, test, fresh)


def test_an_outcome_aged_by_its_prepare_is_missed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "OUTCOMES_RETAINED", 3)
    monkeypatch.setattr(sql, "DECISIONS_BETWEEN_LOOKS", 1)
    test = deciding.test_what_was_decided_last_is_remembered_however_long_it_was_prepared
    assert_caught(a_commit_is_as_old_as_its_prepare, test, store, monkeypatch)


# -- the sink ----------------------------------------------------------------------------------------------------------


@contextmanager
def a_check_makes_the_stream() -> Iterator[None]:
    real = StreamSink.check

    def check(self: StreamSink, schema: pa.Schema) -> None:
        real(self, schema)
        Store.shared(self.store).create_stream(self.stream, schema, routing_key=self.routing_key, if_not_exists=True)

    with patched(StreamSink, "check", check):
        yield


def test_a_stream_made_before_the_run_is_noticed(store: Store) -> None:
    test = connecting.test_the_stream_is_made_once_and_not_while_it_is_checked
    assert_caught(a_check_makes_the_stream, test, store)


@contextmanager
def a_stream_that_is_there_is_taken_as_it_is() -> Iterator[None]:
    real = StreamSink.make_target

    def make(self: StreamSink, schema: pa.Schema) -> None:
        with patched(StreamSink, "check", lambda self, schema: None):
            real(self, schema)

    with patched(StreamSink, "make_target", make):
        yield


def test_a_stream_that_came_in_between_is_noticed(store: Store) -> None:
    test = connecting.test_a_stream_that_came_between_the_check_and_the_run_must_fit
    assert_caught(a_stream_that_is_there_is_taken_as_it_is, test, store)


@contextmanager
def asking_a_store_makes_it() -> Iterator[None]:
    real = Store.exists

    def exists(root: str | None = None) -> bool:
        Store.open(root).close()
        return real(root)

    with patched(Store, "exists", staticmethod(exists)):
        yield


def test_a_store_made_by_a_question_is_noticed(tmp_path: Path) -> None:
    test = connecting.test_a_check_of_what_is_not_there_writes_nothing_and_says_what_cannot_be
    assert_caught(asking_a_store_makes_it, test, tmp_path)


# -- catalogue and reader --------------------------------------------------------------------------------------------


@contextmanager
def commits_are_synced_now_and_then() -> Iterator[None]:
    """CT1 with ``synchronous=NORMAL``."""
    with patched(database, "SYNCHRONOUS", "NORMAL"):
        yield


@pytest.mark.parametrize(
    "test",
    [syncing.test_every_connection_syncs_every_commit, syncing.test_a_commit_that_cannot_be_synced_is_not_acknowledged],
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_commit_that_is_not_synced_is_caught(tmp_path: Path, test: Test) -> None:
    assert_caught(commits_are_synced_now_and_then, test, tmp_path)


@contextmanager
def opening_always_takes_the_lock() -> Iterator[None]:
    with patched(sql, "open_database", opening.open_to_write), patched(making_lock, "LOCK_TIMEOUT_S", 0.05):
        yield


def test_opening_that_waits_for_strangers_is_caught(tmp_path: Path) -> None:
    test = syncing.test_a_lock_that_somebody_holds_does_not_keep_a_store_from_opening
    assert_caught(opening_always_takes_the_lock, test, tmp_path, fcntl.LOCK_SH)


@contextmanager
def bounds_are_rounded_down() -> Iterator[None]:
    def rounded(count: int) -> Layout:
        bounds = [number * KEY_SPACE // count for number in range(count + 1)]
        return Layout(0, tuple(Segment(n, bounds[n], bounds[n + 1]) for n in range(count)))

    with patched(layouts, "first_layout", rounded):
        yield


def test_a_layout_beside_the_routing_is_noticed() -> None:
    test = layouts.test_the_first_layout_says_where_events_are_routed_to.hypothesis.inner_test  # type: ignore[attr-defined]
    key = -2_910_164_972_964_443_333  # its place is 2³² // 3: the last one of the first of three segments
    assert_caught(bounds_are_rounded_down, test, 3, [key])


@contextmanager
def a_check_passes_over_layouts() -> Iterator[None]:
    with patched(SqlAudit, "_layout", lambda self, stream: []):
        yield


def test_a_layout_that_nobody_checks_is_noticed(store: Store) -> None:
    assert_caught(a_check_passes_over_layouts, layouts.test_a_damaged_layout_is_found, store, {"key_low": 0})


@contextmanager
def a_raised_store_keeps_its_columns() -> Iterator[None]:
    """Then an older release goes on in it, and makes streams whose segments have no keys."""
    real = Connection.exec_driver_sql

    def skip(self: Connection, statement: str, *args: Any, **kwargs: Any) -> Any:
        return real(self, "SELECT 1" if "RENAME COLUMN" in statement else statement, *args, **kwargs)

    with patched(Connection, "exec_driver_sql", skip):
        yield


def older(tmp_path: Path) -> Path:
    return Path(shutil.copytree(migrating.GOLDEN / "store_2", tmp_path / "older"))


def test_an_older_release_that_goes_on_in_a_raised_store_is_noticed(tmp_path: Path) -> None:
    test = migrating.test_an_older_release_that_has_a_raised_store_open_fails_instead_of_misreading_it
    assert_caught(a_raised_store_keeps_its_columns, test, older(tmp_path))


@contextmanager
def a_store_is_raised_in_two_transactions() -> Iterator[None]:
    real = versions._from_2

    def raised(connection: Connection) -> None:
        connection.exec_driver_sql("ALTER TABLE streams ADD COLUMN layout_epoch INTEGER DEFAULT '0' NOT NULL")
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.exec_driver_sql("ALTER TABLE streams DROP COLUMN layout_epoch")
        real(connection)

    with patched(versions, "_RAISES", {**versions._RAISES, 2: raised}):
        yield


def test_a_store_raised_by_halves_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = migrating.test_raising_that_fails_half_way_changes_nothing_and_is_repeated
    assert_caught(a_store_is_raised_in_two_transactions, test, older(tmp_path), monkeypatch)


@contextmanager
def a_commit_is_one_transaction_for_each_name() -> Iterator[None]:
    real = SqlCatalogue.commit

    def commit(self: SqlCatalogue, names: Any, owner: str, epoch: int, now_ms: int) -> None:
        for name in names:
            real(self, [name], owner, epoch, now_ms)

    with patched(SqlCatalogue, "commit", commit):
        yield


def test_a_commit_by_halves_is_noticed(store: Store) -> None:
    assert_caught(
        a_commit_is_one_transaction_for_each_name,
        deciding.test_one_bad_transaction_keeps_all_of_a_commit_invisible,
        store,
    )


@contextmanager
def a_reader_goes_on_where_it_was_interrupted() -> Iterator[None]:
    with patched(SegmentReader, "_rewind", lambda self: None):
        yield


@contextmanager
def the_last_event_that_is_left_is_the_end() -> Iterator[None]:
    """S35."""
    real = SqlCatalogue.parts

    def parts(self: SqlCatalogue, *given: Any) -> PartsFound:
        return replace(real(self, *given), end=0)

    with patched(SqlCatalogue, "parts", parts):
        yield


@contextmanager
def ten() -> Iterator[Store]:
    """What the tests of readers begin with."""
    with tempfile.TemporaryDirectory() as root, Store.open(root) as store:
        store.create_stream(reading.ONE, KEYED, segments=1)
        with store.writer(reading.ONE) as writer:
            for n in range(10):
                writer.append(keyed(*(("k", n * 3 + i) for i in range(3))))
                writer.flush()
        yield store


def test_events_skipped_after_an_interruption_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ten() as store:
        test = reading.test_a_read_that_was_interrupted_is_repeated_from_where_it_began
        assert_caught(a_reader_goes_on_where_it_was_interrupted, test, store, monkeypatch)


def test_events_that_were_lost_at_the_end_are_missed() -> None:
    with ten() as store:
        test = reading.test_what_the_catalogue_has_lost_at_the_end_of_a_segment_is_an_error
        assert_caught(the_last_event_that_is_left_is_the_end, test, store, 100)


@contextmanager
def files_are_listed_behind_what_is_known() -> Iterator[None]:
    """S40."""

    def collect(self: Any) -> int:
        known = self._catalogue.chunk_paths()
        orphans = [path for path in self._storage.list("") if path not in known]
        for path in orphans:
            self._storage.delete(path)
        return len(orphans)

    with patched(Store, "collect_orphans", collect):
        yield


@contextmanager
def dictionaries_are_looked_for_at_the_top_only() -> Iterator[None]:
    """LY2."""
    with patched(schemas, "_dictionary_in", lambda dtype: dtype if pa.types.is_dictionary(dtype) else None):
        yield


@contextmanager
def maps_have_no_size() -> Iterator[None]:
    """S37."""
    with (
        patched(limits, "_stored", lambda column: column),
        patched(limits, "_width", lambda column: column.type.bit_width // 8),
    ):
        yield


def test_an_orphan_that_is_none_is_missed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    test = damaging.test_what_is_written_while_orphans_are_looked_for_stays
    assert_caught(files_are_listed_behind_what_is_known, test, store, monkeypatch)


def test_columns_that_nobody_could_read_are_noticed(store: Store) -> None:
    schema = pa.schema([("a", pa.list_(pa.dictionary(pa.int8(), pa.string())))])
    test = streams.test_definitions_that_cannot_be_are_refused
    assert_caught(dictionaries_are_looked_for_at_the_top_only, test, store, schema, 1, None, "dictionary")


def test_events_whose_size_nobody_can_tell_are_noticed(store: Store) -> None:
    assert_caught(maps_have_no_size, writing.test_large_batches_of_maps_and_views_are_appended, store)


@contextmanager
def whatever_segments_are_left_are_the_layout() -> Iterator[None]:
    """CT14."""
    with patched(sql_streams, "_check_layout", lambda stream, problems: None):
        yield


@contextmanager
def tables_that_are_gone_were_never_there() -> Iterator[None]:
    """CT14."""
    with patched(looking, "_PAGES_WITHOUT_TABLES", 1_000_000):
        yield


@contextmanager
def any_row_is_sound() -> Iterator[None]:
    """CT14."""
    with patched(positions, "is_sound", lambda row: True):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, damaging.Events]:
    return damaging.made(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("mutant", "test", "more"),
    [
        (
            whatever_segments_are_left_are_the_layout,
            damaging.test_a_segment_that_is_lost_is_an_error_for_whoever_reads_or_writes_the_stream,
            (2,),
        ),
        (
            tables_that_are_gone_were_never_there,
            damaging.test_tables_that_are_gone_are_an_error_and_not_made_anew,
            ("tables",),
        ),
        (any_row_is_sound, damaging.test_columns_that_hold_what_they_never_hold_are_damage, ("NULL", "size_bytes")),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_damaged_catalogue_that_is_read_on_is_noticed(
    whole: tuple[Path, damaging.Events], mutant: Mutant, test: Test, more: tuple[object, ...], tmp_path: Path
) -> None:
    assert_caught(mutant, test, whole, *more, tmp_path)
