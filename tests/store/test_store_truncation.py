"""Streams begin where their users say: truncation, stream cuts, holds and retention, with their files."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, Clock, database_of, drain, keyed, lose_an_answer

from headgate.connectors.streams import StreamCommitter, owner_of
from headgate.errors import CorruptionError, FencedError, StorageError, TruncatedError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.local import LocalStorage
from headgate.store import chunks, maintenance
from headgate.store.catalogue import chunk_index, tables, truncation
from headgate.store.catalogue.records import Swept
from headgate.store.store import Store
from headgate.store.streams import Retention, StreamCut, StreamInfo
from headgate.store.writer import Appended, AppendedRange, StreamWriter


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000, date_ms=0)


@pytest.fixture
def disk(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(LocalStorage(tmp_path / "store" / "chunks"))


@pytest.fixture
def store(tmp_path: Path, disk: FaultyStorage, clock: Clock) -> Iterator[Store]:
    with Store.open(tmp_path / "store", storage=disk) as opened:
        made = Store(opened.root, opened._core.catalogue, disk, clock=clock)
        made.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        yield made


def write(store: Store, *pairs: tuple[str, int]) -> None:
    """One flush, which is one chunk."""
    with store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(*pairs))


def cut_of(store: Store, positions: dict[int, int]) -> StreamCut:
    return StreamCut(STREAM, store.describe(STREAM).stream_id, positions)


def files(store: Store) -> list[str]:
    return store._core.storage.list("")


def fill(store: Store, flushes: int = 5) -> None:
    for number in range(flushes):
        write(store, ("a", 2 * number), ("b", 2 * number + 1))  # a and b are in different segments


def test_a_truncated_stream_begins_at_the_cut_and_positions_stay(store: Store) -> None:  # S65
    fill(store)
    before = drain(store)
    assert [len(segment) for segment in before] == [5, 5]
    assert store.truncate(cut_of(store, {0: 2, 1: 3})).positions == {0: 2, 1: 3}
    assert drain(store) == [before[0][2:], before[1][3:]]
    info = store.describe(STREAM)
    assert (info.heads, info.ends, info.events_count) == ((2, 3), (5, 5), 5)
    reader = store.reader(STREAM, 0, 4)
    batch = reader.read()
    assert batch is not None
    assert list(zip(*batch.to_pydict().values(), strict=True)) == before[0][4:]
    fill(store, 1)
    assert store.tail(STREAM).positions == {0: 6, 1: 6}
    assert store.fsck() == []


def test_truncating_again_or_before_the_head_changes_nothing(store: Store) -> None:  # S65
    fill(store)
    cut = cut_of(store, {0: 2, 1: 3})
    store.truncate(cut)
    for again in (cut, cut_of(store, {0: 1, 1: 0})):
        assert store.truncate(again) == store.head(STREAM) == cut


def test_files_go_when_nothing_that_can_be_read_is_in_them(store: Store) -> None:
    fill(store)
    assert len(files(store)) == 5
    store.truncate(cut_of(store, {0: 3}))
    assert len(files(store)) == 5  # each holds an event of the other segment
    store.truncate(cut_of(store, {1: 2}))
    assert len(files(store)) == 3
    store.truncate(store.tail(STREAM))
    assert files(store) == []
    assert store.fsck() == []
    fill(store, 1)
    assert drain(store) == [[("b", 1)], [("a", 0)]] or drain(store) == [[("a", 0)], [("b", 1)]]


@pytest.mark.parametrize("head", range(10, 21))
def test_a_cut_inside_a_chunk_keeps_what_lies_after_it(store: Store, head: int) -> None:  # S65
    for first in (0, 10):
        write(store, *(("a", number) for number in range(first, first + 10)))  # two chunks of ten events
    (segment,) = [index for index, events in enumerate(drain(store)) if events]
    store.truncate(cut_of(store, {segment: head}))
    assert drain(store)[segment] == [("a", number) for number in range(head, 20)]
    assert len(files(store)) == (1 if head < 20 else 0)
    assert store.fsck() == []


def test_a_sweep_that_was_cut_short_goes_on(store: Store, disk: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that cannot be deleted are not forgotten."""
    monkeypatch.setattr(maintenance, "SWEEP_PARTS_MAX", 3)
    fill(store)
    disk.inject(Fault(FaultKind.NO_SPACE, "delete", times=1_000))
    store.truncate(store.tail(STREAM))
    left = files(store)
    assert left
    assert all(problem.is_harmless for problem in store.fsck())
    disk.heal()
    store.truncate(store.tail(STREAM))
    assert files(store) == []
    assert store.fsck() == []


def test_a_file_goes_although_one_before_it_is_still_needed(store: Store) -> None:
    write(store, ("a", 1), ("b", 2))
    write(store, ("a", 3))
    (segment,) = [index for index, events in enumerate(drain(store)) if len(events) == 2]
    store.truncate(cut_of(store, {segment: 2}))
    assert len(files(store)) == 1
    assert [len(events) for events in drain(store)] in ([0, 1], [1, 0])
    assert store.fsck() == []


@pytest.mark.parametrize(
    ("limit", "left", "is_done"),
    [(1, 5, False), (3, 3, False), (4, 2, False), (5, 1, False), (6, 0, False), (7, 0, True)],
)
def test_a_sweep_forgets_so_many_parts_and_says_whether_more_are_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: int, left: int, is_done: bool
) -> None:
    fill(store, 3)
    with monkeypatch.context() as patch:
        patch.setattr(store._core.catalogue, "sweep", lambda *_: Swept((), is_done=True))
        store.truncate(store.tail(STREAM))
    found = store._core.catalogue.sweep(store.find(STREAM), limit)
    with database_of(store).read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM parts").scalar_one() == left
    assert found.is_done is is_done
    assert len(found.garbage) == max(0, min(limit, 6) - 3), "files of which nothing is left"


def test_a_sweep_looks_only_at_segments_that_have_something_to_forget(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3, 9):
        fill(store)
        store.resize(STREAM, number)
    looked: list[int] = []
    real = truncation._forget_parts
    monkeypatch.setattr(truncation, "_forget_parts", lambda *args: looked.append(args[2]) or real(*args))
    store.truncate(store.head(STREAM))
    assert looked == []
    store.truncate(store.tail(STREAM))
    assert len(looked) == len(set(looked)) > 5
    looked.clear()
    store.truncate(store.tail(STREAM))
    assert looked == []
    assert store.fsck() == []


def test_a_cut_that_names_what_is_not_there_is_refused(store: Store) -> None:  # S65
    fill(store)
    with pytest.raises(UsageError, match="ends at position 5, so nothing can be cut at 6"):
        store.truncate(cut_of(store, {0: 6}))
    with pytest.raises(UsageError, match="has no segment 7"):
        store.truncate(cut_of(store, {7: 0}))
    assert store.head(STREAM).positions == {0: 0, 1: 0}


def test_a_cut_of_a_former_stream_is_refused(store: Store) -> None:
    fill(store)
    cut = store.tail(STREAM)
    store.delete(STREAM, force=True)
    store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    begin = store.head(STREAM)
    calls = (store.truncate, store.events_between, lambda c: store.hold(c, holder="h"))
    for call in (*calls, lambda c: store.events_between(begin, c)):
        with pytest.raises(UsageError, match="is of a former stream 'app/events'"):
            call(cut)


def test_a_reader_that_is_behind_the_head_is_told_and_skips_nothing(store: Store) -> None:
    fill(store)
    behind, ahead = store.reader(STREAM, 0, 1), store.reader(STREAM, 0, 3)
    store.truncate(cut_of(store, {0: 3}))
    for _ in range(2):
        with pytest.raises(TruncatedError, match="segment 0 of stream 'app/events' begins at position 3 now") as found:
            behind.read()
        assert (found.value.position, found.value.head) == (1, 3)
    assert ahead.read() is not None
    with pytest.raises(TruncatedError):
        store.reader(STREAM, 0, 2)


def test_a_file_that_goes_behind_the_look_of_a_reader_is_no_damage(store: Store) -> None:
    fill(store)
    reader = store.reader(STREAM, 0)
    assert reader.read(rows_max=1) is not None  # it has listed all parts
    store.truncate(store.tail(STREAM))
    with pytest.raises(TruncatedError) as found:
        reader.read()
    assert (found.value.position, found.value.head) == (1, 5)


def test_a_missing_file_of_events_that_are_there_is_damage(store: Store) -> None:
    fill(store)
    store.truncate(cut_of(store, {0: 1, 1: 1}))
    reader = store.reader(STREAM, 0)
    for path in files(store):
        store._core.storage.delete(path)
    with pytest.raises(CorruptionError, match="no such file"):
        reader.read()


def test_what_is_held_is_not_truncated_and_the_error_says_by_whom(store: Store) -> None:
    fill(store)
    store.hold(cut_of(store, {0: 2, 1: 5}), holder="audit")
    with pytest.raises(
        UsageError, match="'audit' needs the events of segment 0 of stream 'app/events' from position 2"
    ):
        store.truncate(store.tail(STREAM))
    assert store.truncate(cut_of(store, {0: 2, 1: 5})).positions == {0: 2, 1: 5}
    assert store.holds(STREAM) == {"audit": cut_of(store, {0: 2, 1: 5})}
    store.hold(cut_of(store, {0: 4, 1: 5}), holder="audit")
    assert store.truncate(cut_of(store, {0: 4})).positions == {0: 4, 1: 5}
    store.release(STREAM, holder="audit")
    store.release(STREAM, holder="audit")
    assert store.truncate(store.tail(STREAM)).positions == {0: 5, 1: 5}


def test_a_hold_that_names_no_segment_holds_everything(store: Store) -> None:
    fill(store)
    store.hold(cut_of(store, {}), holder="audit")
    assert store.events_between(store.holds(STREAM)["audit"]) == 10
    with pytest.raises(UsageError, match="'audit' needs the events of segment 1"):
        store.truncate(cut_of(store, {1: 5}))


def test_what_is_held_goes_when_it_is_said(store: Store) -> None:
    fill(store)
    store.hold(store.head(STREAM), holder="audit")
    assert store.truncate(store.tail(STREAM), force=True).positions == {0: 5, 1: 5}


def test_a_sealed_stream_that_is_still_needed_is_not_deleted(store: Store) -> None:
    fill(store)
    store.hold(cut_of(store, {0: 2, 1: 5}), holder="billing/in")
    store.reader_group("archive", STREAM)
    store.seal(STREAM)
    assert store.needed_by(STREAM) == ["billing/in", "reader group archive"]
    with pytest.raises(UsageError, match="needed by 'billing/in', 'reader group archive'; let them read to its end"):
        store.delete(STREAM)
    store.delete_reader_group("archive")
    assert store.events_between(store.head(STREAM)) == 10, "and nothing has gone"
    store.hold(store.tail(STREAM), holder="billing/in")
    assert store.needed_by(STREAM) == []
    store.delete(STREAM)
    assert [info.name for info in store.list_streams()] == []


def test_what_was_truncated_cannot_be_held(store: Store) -> None:
    fill(store)
    head = store.head(STREAM)
    store.hold(cut_of(store, {0: 2, 1: 2}), holder="audit")
    store.truncate(cut_of(store, {0: 1}))
    with pytest.raises(TruncatedError):
        store.hold(head, holder="audit")
    assert store.holds(STREAM) == {"audit": cut_of(store, {0: 2, 1: 2})}


def test_whoever_was_replaced_does_not_move_what_its_heir_holds(store: Store) -> None:
    fill(store)
    store.hold(cut_of(store, {0: 1, 1: 1}), holder="p/source", life="a", epoch=2)
    with pytest.raises(FencedError, match="'p/source': generation 1 was replaced by generation 2"):
        store.hold(store.tail(STREAM), holder="p/source", life="a", epoch=1)
    assert store.holds(STREAM)["p/source"] == cut_of(store, {0: 1, 1: 1})
    store.hold(store.tail(STREAM), holder="p/source", life="b", epoch=1)
    assert store.holds(STREAM)["p/source"] == store.tail(STREAM)


def test_a_cut_at_a_date_is_in_front_of_what_came_then(store: Store, clock: Clock) -> None:
    for number in range(4):
        clock.now_ms = 1_000_000 + number * 1_000
        write(store, ("a", number), ("b", number))
    assert store.cut_at(STREAM, date_of(1_000_000)) == store.head(STREAM)
    for date_ms in (1_001_001, 1_002_000):
        assert store.cut_at(STREAM, date_of(date_ms)).positions == {0: 2, 1: 2}
    assert store.cut_at(STREAM, date_of(1_003_001)) == store.tail(STREAM)


def test_a_clock_that_goes_back_does_not_take_events_out_of_order(store: Store, clock: Clock) -> None:
    write(store, ("a", 1))
    clock.now_ms -= 500_000
    write(store, ("a", 2), ("b", 2))
    cut = store.cut_at(STREAM, date_of(1_000_000))
    assert cut == store.head(STREAM)
    assert store.events_between(store.cut_at(STREAM, date_of(1_000_001))) == 0


def date_of(date_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(date_ms / 1_000, dt.UTC)


def test_committed_transactions_have_the_date_of_their_commit(store: Store, clock: Clock) -> None:
    transaction = store.transactions.begin(STREAM, owner="o", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.prepare()
    clock.now_ms += 10_000
    store.commit_transactions([(STREAM, "t")], owner="o", epoch=1)
    assert store.cut_at(STREAM, date_of(1_010_000)) == store.head(STREAM)
    assert store.cut_at(STREAM, date_of(1_010_001)) == store.tail(STREAM)


def test_events_are_counted_between_two_cuts(store: Store) -> None:
    fill(store)
    assert store.events_between(store.head(STREAM)) == 10
    assert store.events_between(cut_of(store, {0: 1, 1: 2}), cut_of(store, {0: 4, 1: 2})) == 3
    store.truncate(cut_of(store, {0: 2}))
    assert store.events_between(cut_of(store, {0: 1, 1: 2}), cut_of(store, {0: 4, 1: 2})) == 2
    assert store.events_between(store.tail(STREAM), store.head(STREAM)) == 0


def test_a_cut_survives_as_text() -> None:
    cut = StreamCut("app/logs-1.x", 3, {1: 7, 0: 12})
    assert str(cut) == "app/logs-1.x#3@0:12,1:7"
    assert StreamCut.parse(str(cut)) == cut
    for text in ("", "app", "app#1", "app#1@", "app#1@0:1,", "app#1@0:1,0:2", "app#x@0:1", "app#1@0:1\n", "app#1@0:-1"):
        with pytest.raises(UsageError, match="is no stream cut; one looks like"):
            StreamCut.parse(text)


def test_old_events_go_by_age_and_what_is_held_stays(store: Store, clock: Clock) -> None:  # S71
    store.set_retention(STREAM, Retention(age="5s"))
    for number in range(10):
        clock.now_ms = 1_000_000 + number * 1_000
        write(store, ("a", number), ("b", number))
    store.hold(cut_of(store, {0: 2, 1: 9}), holder="reader")
    assert store.retain(STREAM).positions == {0: 2, 1: 4}
    store.release(STREAM, holder="reader")
    assert store.retain(STREAM).positions == {0: 4, 1: 4}
    assert store.retain(STREAM).positions == {0: 4, 1: 4}
    clock.now_ms += 60_000
    assert store.retain(STREAM) == store.tail(STREAM)
    assert files(store) == []


def test_the_oldest_go_by_size_and_at_least_the_size_stays(store: Store, clock: Clock) -> None:  # S71
    for number in range(10):
        clock.now_ms += 1_000
        write(store, ("a", number), ("b", number))
    with database_of(store).read() as connection:
        each = int(connection.exec_driver_sql("SELECT sum(size_bytes) FROM parts WHERE start = 0").scalar_one())
    store.set_retention(STREAM, Retention(size=3 * each))
    assert store.retain(STREAM).positions == {0: 7, 1: 7}
    store.set_retention(STREAM, Retention(size=2 * each + 1))
    assert store.retain(STREAM).positions == {0: 7, 1: 7}
    store.set_retention(STREAM, Retention(size=1_000 * each))
    assert store.retain(STREAM).positions == {0: 7, 1: 7}


def test_without_a_policy_nothing_goes(store: Store, clock: Clock) -> None:  # S71
    fill(store)
    clock.now_ms += 1_000_000_000
    assert store.retain(STREAM) == store.head(STREAM)
    store.set_retention(STREAM, Retention(age="1s"))
    store.set_retention(STREAM, None)
    assert store.retain(STREAM).positions == {0: 0, 1: 0}


@pytest.mark.parametrize("retention", [Retention(), Retention(age=0), Retention(size=0), Retention(size="much")])
def test_a_retention_that_cannot_be_is_refused(store: Store, retention: Retention) -> None:  # S71
    with pytest.raises(UsageError, match="Retention"):
        store.set_retention(STREAM, retention)


def grow_old(store: Store, clock: Clock) -> None:
    """Ten events that may go. No writer looks within the next minute."""
    fill(store)
    clock.now_ms += 10_000
    store.set_retention(STREAM, Retention(age="5s"))


def test_files_that_are_gone_are_not_remembered_as_to_be_deleted(store: Store) -> None:
    fill(store)
    store.truncate(store.tail(STREAM))
    assert files(store) == []
    assert store._core.catalogue.sweep(store.find(STREAM), 10) == Swept((), is_done=True)


def test_a_look_that_could_not_forget_all_is_followed_by_another_one_at_once(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "SWEEP_PARTS_MAX", 2)
    grow_old(store, clock)  # five parts in each of two segments
    clock.now_ms += maintenance.MAINTENANCE_INTERVAL_MS
    left = []
    for _ in range(6):
        store.look_after(STREAM)
        left.append(len(files(store)))
    assert left[0] > 0
    assert left[-1] == 0, "no minute has passed"


def behind_the_look(store: Store, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens when a look knows what goes, before it goes."""
    real = store._core.catalogue.retention_cut

    def look(stream: StreamInfo, now_ms: int) -> dict[int, int]:
        found = real(stream, now_ms)
        happens()
        return found

    monkeypatch.setattr(store._core.catalogue, "retention_cut", look)


def test_a_look_that_finds_nothing_moves_nothing(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # S71
    fill(store)
    moves: list[object] = []
    monkeypatch.setattr(store._core.catalogue, "retain", lambda *given: moves.append(given))
    for retention in (None, Retention(age="5s"), Retention(size="1GB")):
        store.set_retention(STREAM, retention)
        store.retain(STREAM)
    clock.now_ms += 60_000
    store.set_retention(STREAM, Retention(age="5s"))
    store.hold(store.head(STREAM), holder="reader")
    store.retain(STREAM)
    assert moves == []


def test_what_is_held_since_the_look_stays(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:  # S71
    grow_old(store, clock)
    behind_the_look(store, monkeypatch, lambda: store.hold(cut_of(store, {0: 2, 1: 3}), holder="reader"))
    assert store.retain(STREAM).positions == {0: 2, 1: 3}
    assert [len(segment) for segment in drain(store)] == [3, 2]


def test_a_truncation_since_the_look_is_not_taken_back(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # S65, S71
    grow_old(store, clock)
    fill(store, 1)
    behind_the_look(store, monkeypatch, lambda: store.truncate(store.tail(STREAM)))
    assert store.retain(STREAM).positions == {0: 6, 1: 6}


def test_nothing_goes_by_a_retention_that_the_stream_has_no_more(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # S71
    for now in (None, Retention(age="1 hour"), Retention(size="1GB")):
        grow_old(store, clock)
        with monkeypatch.context() as patch:
            behind_the_look(store, patch, lambda now=now: store.set_retention(STREAM, now))  # type: ignore[misc]
            assert store.retain(STREAM).positions == {0: 0, 1: 0}
        assert store.retain(STREAM).positions == {0: 0, 1: 0}
        store.set_retention(STREAM, Retention(age="5s"))
        assert store.retain(STREAM) == store.tail(STREAM)
        store.delete(STREAM, force=True)
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")


def test_a_look_at_a_stream_that_was_deleted_takes_nothing_of_its_namesake(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # S71
    grow_old(store, clock)

    def made_anew() -> None:
        store.delete(STREAM, force=True)
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key", retention=Retention(age="5s"))
        writer = store.writer(STREAM, linger=None)
        writer.append(keyed(("a", 1), ("b", 2)))
        writer.flush()

    behind_the_look(store, monkeypatch, made_anew)
    with pytest.raises(UsageError, match="stream 'app/events' was deleted"):
        store.retain(STREAM)
    clock.now_ms += 60_000
    store.look_after(STREAM)
    assert "stream 'app/events' was deleted" in caplog.text
    assert store.describe(STREAM).events_count == 2


def test_two_that_look_at_once_move_a_head_once(store: Store, clock: Clock) -> None:  # S71
    grow_old(store, clock)
    early = clock.now_ms
    fill(store, 2)
    clock.now_ms += 10_000
    catalogue, stream = store._core.catalogue, store._core.catalogue.find_stream(STREAM)
    with Store.open(store.root) as another:
        looks = [catalogue.retention_cut(stream, early), another._core.catalogue.retention_cut(stream, clock.now_ms)]
        assert looks == [{0: 5, 1: 5}, {0: 7, 1: 7}]
        assert another._core.catalogue.retain(stream, looks[1]) == looks[1]
        assert catalogue.retain(stream, looks[0]) == {}, "the one that looked first comes last"
        assert another._core.catalogue.retain(stream, looks[1]) == {}
    assert store.head(STREAM) == store.tail(STREAM)


def unanswered(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[StreamWriter, Future[Appended]]:
    """An append to both segments that took effect, of which its writer does not know."""
    writer = store.writer(STREAM, linger=None)
    future = writer.append(keyed(("a", 1), ("b", 2)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    return writer, future


def test_an_append_that_was_truncated_before_its_answer_came_is_not_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, future = unanswered(store, monkeypatch)
    assert not future.done()
    store.truncate(store.tail(STREAM))
    writer.flush()
    assert future.result().ranges == ()
    assert store.tail(STREAM).positions == {0: 1, 1: 1}
    assert drain(store) == [[], []]


def test_an_append_of_which_one_segment_was_truncated_before_its_answer_came_is_acknowledged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, future = unanswered(store, monkeypatch)
    store.truncate(cut_of(store, {0: 1}))
    writer.flush()
    assert future.result().ranges == (AppendedRange(1, 0, 1),), "of segment 0 nothing is left"
    assert store.tail(STREAM).positions == {0: 1, 1: 1}


def test_an_append_whose_first_part_was_truncated_before_its_answer_came_is_where_it_was_appended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, ("a", 0))
    writer = store.writer(STREAM, linger=None)
    future = writer.append(keyed(*(("a", number) for number in range(1, 5))))
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "PART_ROWS_MAX", 2)
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    store.truncate(cut_of(store, {1: 3}))
    writer.flush()
    assert future.result().ranges == (AppendedRange(1, 1, 4),)
    assert store.tail(STREAM).positions == {0: 0, 1: 5}


def test_the_same_while_its_file_waits_to_be_deleted(
    store: Store, disk: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.writer(STREAM, linger=None)
    writer.append(keyed(("a", 1)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    disk.inject(Fault(FaultKind.NO_SPACE, "delete"))
    store.truncate(store.tail(STREAM))
    disk.heal()
    assert len(files(store)) == 1
    writer.flush()
    assert store.events_between(store.head(STREAM)) == 0


def lost_without_effect(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[StreamWriter, Future[Appended]]:
    """An append whose chunk is durable and that the catalogue did not take."""
    writer = store.writer(STREAM, linger=None)
    future = writer.append(keyed(("a", 1)))

    def fails(*_: object, **__: object) -> None:
        raise StorageError("write", "catalogue", "disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(chunk_index, "insert_chunk", fails)
        with pytest.raises(StorageError):
            writer.flush()
    return writer, future


def test_an_append_is_not_acknowledged_because_its_stream_was_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, future = lost_without_effect(store, monkeypatch)
    store.delete(STREAM, force=True)
    with pytest.raises(UsageError, match="was deleted"):
        writer.flush()
    assert future.exception() is not None


def test_an_append_whose_file_somebody_removed_is_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, future = lost_without_effect(store, monkeypatch)
    assert store.collect_orphans() == 1
    writer.flush()
    assert [each.events_count for each in future.result().ranges] == [1]
    assert store.events_between(store.head(STREAM)) == 1


def test_who_wrote_what_was_truncated_is_remembered(store: Store) -> None:
    old, new = owner_of("p", "old"), owner_of("p", "new")
    transaction = store.transactions.begin(STREAM, owner=old, epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.prepare()
    store.commit_transactions([(STREAM, "t")], owner=old, epoch=1)
    assert [other.sink for other in store.pipelines.owner(new, STREAM, "p/").others] == ["old"]
    store.truncate(store.tail(STREAM))
    assert files(store) == []
    assert [other.sink for other in store.pipelines.owner(new, STREAM, "p/").others] == ["old"]
    write(store, ("b", 1))
    store.truncate(store.tail(STREAM))
    assert store.pipelines.contents(STREAM, "p/", lambda owner: True).others


def test_deleting_a_stream_forgets_what_was_held_of_it(store: Store) -> None:
    fill(store)
    store.hold(store.head(STREAM), holder="audit")
    store.truncate(cut_of(store, {0: 0}))
    store.delete(STREAM, force=True)
    with database_of(store).read() as connection:
        for table in ("holds", "garbage", "former_authors", "parts", "segments"):
            assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one() == 0


def test_writers_and_sinks_look_once_a_minute(store: Store, clock: Clock) -> None:  # S71
    store.set_retention(STREAM, Retention(age="5s"))
    write(store, ("a", 1))  # looks: nothing is old
    clock.now_ms += 10_000
    write(store, ("a", 2))
    assert store.describe(STREAM).events_count == 2
    clock.now_ms += 50_000
    write(store, ("a", 3))
    assert store.describe(STREAM).events_count == 1
    clock.now_ms += 60_000
    transaction = store.transactions.begin(STREAM, owner="p/out", epoch=1, name="t")
    transaction.write(keyed(("a", 4)))
    transaction.prepare()
    committer = StreamCommitter(store, STREAM, "out", "p/out", Generation(1))
    payload = msgspec.msgpack.encode([2, STREAM, "t", 1, None, True, 1])
    promised = Committable("out", CheckpointId(1), 0, Generation(1), payload)
    committer.commit(CommitPermit(CheckpointId(1), Generation(1)), [promised])
    assert store.describe(STREAM).events_count == 1


@pytest.mark.parametrize("step", ["retention_cut", "retain"])
def test_a_look_that_fails_fails_nobody(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:  # S71
    store.set_retention(STREAM, Retention(age="5s"))
    write(store, ("a", 1))
    clock.now_ms += 60_000

    def fails(*_: object, **__: object) -> None:
        raise StorageError("write", "catalogue", "disk I/O error")

    with monkeypatch.context() as patch:
        patch.setitem(tables.IMPLEMENTATIONS, step, fails)
        write(store, ("a", 2))
    assert "old events of stream 'app/events' could not be removed" in caplog.text
    assert store.describe(STREAM).events_count == 2
    clock.now_ms += 60_000
    write(store, ("a", 3))
    assert store.describe(STREAM).events_count == 1
