"""Streams that are scaled while others write to them: no event is lost, moved or out of order (S72 to S75)."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import pytest
from tests.store.storing import KEYED, STREAM, database_of, drain, drained, in_a_child, keyed, lose_an_answer

from headgate.errors import StorageError, UsageError
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.store.layouts import KEY_SPACE, Layout, Plan
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.records import Reading
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.routing import hash_text
from headgate.store.store import Store
from headgate.store.streams import OtherLayoutError, StreamReset

KEYS = "abcdefghijklmnop"


def by_key(store: Store) -> dict[str, list[int]]:
    """Values in the order in which they are read: segments by number, since what follows has a higher one."""
    found: dict[str, list[int]] = defaultdict(list)
    for segment in drain(store):
        for key, value in segment:
            found[key].append(value)
    return dict(found)


def values(first: int, count: int = 1) -> Any:
    return keyed(*[(key, value) for value in range(first, first + count) for key in KEYS])


def in_order(store: Store, *expected: int) -> None:
    assert by_key(store) == {key: list(expected) for key in KEYS}
    assert store.fsck() == []


def write(store: Store, first: int) -> None:
    with store.writer(STREAM) as writer:
        writer.append(values(first))


def prepared(store: Store, name: str, first: int, epoch: int = 1) -> None:
    transaction = store.transactions.begin(STREAM, owner="p", epoch=epoch, name=name)
    transaction.write(values(first))
    transaction.prepare()


def commit(store: Store, *names: str) -> None:
    store.commit_transactions([(STREAM, name) for name in names], owner="p", epoch=1)


def test_events_of_a_scaled_stream_stay_in_order(store: Store) -> None:  # S72
    write(store, 0)
    layout = store.split(STREAM, 0, 3)
    assert [segment.segment_id for segment in layout.present] == [3, 4, 5, 1, 2]
    write(store, 1)
    store.merge(STREAM, [5, 1])
    write(store, 2)
    store.resize(STREAM, 2)
    write(store, 3)
    in_order(store, 0, 1, 2, 3)
    info = store.describe(STREAM)
    assert (info.segments_count, info.layout_epoch, len(info.ends)) == (2, 3, 9)
    assert info.events_count == 4 * len(KEYS)


def test_events_go_where_their_keys_are(store: Store) -> None:  # S72, S2
    store.split(STREAM, 1, 5)
    write(store, 0)
    layout = store.layout(STREAM)
    for segment, rows in enumerate(drain(store)):
        low, high = layout.segments[segment].keys
        for key, _ in rows:
            assert low <= hash_text(key) >> 32 < high


def test_a_closed_segment_has_an_end(store: Store) -> None:
    write(store, 0)
    reader = store.reader(STREAM, 0)
    assert reader.read() is not None
    assert (reader.read(), reader.has_ended()) == (None, False)
    store.split(STREAM, 0)
    assert (reader.read(), reader.has_ended()) == (None, True)
    other = store.reader(STREAM, 1)
    while other.read() is not None:
        pass
    assert not other.has_ended()


@pytest.mark.parametrize("linger", [None, "1ms"])
def test_a_writer_goes_on_when_its_stream_is_scaled(store: Store, linger: str | None) -> None:
    with store.writer(STREAM, writer_id="w", linger=linger) as writer:
        futures: list[Future[Any]] = []
        for value in range(6):
            futures.append(writer.append(values(value)))
            if value % 2:
                store.split(STREAM, store.layout(STREAM).present[0].segment_id)
            else:
                writer.flush()
    starts = {where.segment: where.start for where in futures[5].result().ranges}
    assert all(store.layout(STREAM).segments[segment].closed_epoch is None for segment in starts)
    in_order(store, *range(6))
    assert store.writer(STREAM, writer_id="w").next_sequence == 7
    assert (
        len(list(store._core.storage.list(""))) == store.describe(STREAM).chunks_count
    )  # what was routed anew is gone


def test_an_append_whose_answer_was_lost_before_a_scaling_is_not_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.writer(STREAM, linger=None)
    future = writer.append(values(0))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    store.split(STREAM, 0)
    writer.append(values(1))
    writer.flush()
    assert {where.segment for where in future.result(0).ranges} <= {0, 1, 2}
    in_order(store, 0, 1)


def test_an_append_that_failed_before_a_scaling_is_routed_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk is there, the catalogue never heard of it."""
    writer = store.writer(STREAM, linger=None)
    writer.append(values(0))

    def fail(*_: object) -> None:
        raise StorageError("append", "catalogue", "busy", is_transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(store._core.catalogue, "append", fail)
        with pytest.raises(StorageError):
            writer.flush()
    store.resize(STREAM, 5)
    writer.flush()
    in_order(store, 0)


def test_a_writer_that_cannot_look_at_the_new_layout_tries_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled, and then the catalogue cannot be read for a moment."""
    writer = store.writer(STREAM, linger=None)
    writer.append(values(0))
    store.resize(STREAM, 5)

    def fail(*_: object) -> None:
        raise StorageError("read", "catalogue", "busy", is_transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(store._core.catalogue, "find_stream", fail)
        with pytest.raises(StorageError):
            writer.flush()
    writer.flush()
    in_order(store, 0)


def test_a_writer_whose_stream_was_deleted_and_made_anew_is_told(store: Store) -> None:
    writer = store.writer(STREAM, linger=None)
    writer.append(values(0))
    store.delete(STREAM, force=True)
    store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    with pytest.raises(UsageError, match="was deleted"):
        writer.flush()
    assert drained(store) == []


def test_writers_of_other_processes_go_on_too(store: Store) -> None:
    """Each of two processes writes while the other one scales."""
    write(store, 0)
    writer = store.writer(STREAM, linger=None)

    def scale() -> None:
        with Store.open(store.root) as opened:
            opened.split(STREAM, 2)
            write(opened, 1)

    in_a_child(scale)
    writer.append(values(2))
    writer.flush()
    in_order(store, 0, 1, 2)


def test_a_transaction_that_was_prepared_before_a_split_comes_behind_what_was_written_meanwhile(
    store: Store,
) -> None:  # S75
    write(store, 0)
    prepared(store, "t", 2)
    store.split(STREAM, 0, 3)
    store.merge(STREAM, [1, 2])
    write(store, 1)
    before = [segment.keys for segment in store.layout(STREAM).present]
    commit(store, "t")
    assert [segment.keys for segment in store.layout(STREAM).present] == before
    write(store, 3)
    in_order(store, 0, 1, 2, 3)


def test_a_transaction_that_began_before_a_split_and_is_prepared_behind_it_is_committed(store: Store) -> None:  # S75
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(values(0))
    store.split(STREAM, 1)
    transaction.write(values(1))
    transaction.prepare()
    commit(store, "t")
    in_order(store, 0, 1)


def test_what_was_prepared_before_a_merge_needs_no_other_segments(store: Store) -> None:  # S75
    write(store, 0)
    prepared(store, "t", 2)
    layout = store.merge(STREAM, [0, 1, 2])
    write(store, 1)
    commit(store, "t")
    assert store.layout(STREAM) == layout
    in_order(store, 0, 1, 2)


def test_transactions_of_several_layouts_are_committed_in_one_step(store: Store) -> None:  # S75, S14
    write(store, 0)
    before = store.layout(STREAM).epoch
    for number in range(3):
        prepared(store, f"t{number}", number + 2)
        prepared(store, f"u{number}", number + 5)
        store.split(STREAM, store.layout(STREAM).present[0].segment_id)
    write(store, 1)
    ranges = [segment.keys for segment in store.layout(STREAM).present]
    commit(store, *(f"t{number}" for number in range(3)), *(f"u{number}" for number in range(3)))
    assert [segment.keys for segment in store.layout(STREAM).present] == ranges
    in_order(store, *range(8))
    assert store.layout(STREAM).epoch == before + 3 + 2  # what was cut finer since fits into the old ranges


def test_what_one_layout_prepared_is_reopened_once(store: Store) -> None:  # S75
    for number in range(4):
        prepared(store, f"t{number}", number)
    store.split(STREAM, 0)
    commit(store, *(f"t{number}" for number in range(4)))
    assert store.layout(STREAM).epoch == 3
    in_order(store, 0, 1, 2, 3)


def test_a_commit_whose_answer_was_lost_changes_no_layout_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # S75, S13
    prepared(store, "t", 0)
    store.split(STREAM, 0)
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            commit(store, "t")
    layout = store.layout(STREAM)
    commit(store, "t")
    assert store.layout(STREAM) == layout
    in_order(store, 0)


def test_a_commit_that_fails_leaves_no_layout_behind(store: Store) -> None:  # S75, S14
    prepared(store, "t", 0)
    layout = store.split(STREAM, 0)
    with pytest.raises(Exception, match="no record"):
        commit(store, "t", "unknown")
    assert store.layout(STREAM) == layout


def test_a_reader_of_closed_segments_sees_what_is_committed_late(store: Store) -> None:  # S75
    """Who was told that a segment ended has missed nothing: late events are in segments that follow it."""
    prepared(store, "t", 0)
    store.split(STREAM, 0)
    reader = store.reader(STREAM, 0)
    assert (reader.read(), reader.has_ended()) == (None, True)
    commit(store, "t")
    assert (reader.read(), store.describe(STREAM).ends[0]) == (None, 0)


def test_scaling_again_whose_answer_was_lost_changes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # S72
    plan = Plan(0, (0,), ((0, 5), (5, -(-KEY_SPACE // 3))))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            store._core.catalogue.scale_stream(STREAM, plan, 0)
    layout = store.layout(STREAM)
    assert store._core.catalogue.scale_stream(STREAM, plan, 0) == layout
    assert layout.epoch == 1


def test_of_two_that_scale_at_once_one_is_told(store: Store) -> None:  # S72
    plan = Plan(0, (0,), ((0, 5), (5, -(-KEY_SPACE // 3))))
    store.split(STREAM, 1)
    with pytest.raises(OtherLayoutError, match="scaled by another process meanwhile"):
        store._core.catalogue.scale_stream(STREAM, plan, 0)


def test_who_scales_what_was_scaled_in_between_plans_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """S72."""
    real = store._core.catalogue.layout

    def layout(name: str) -> Layout:
        found = real(name)
        if found.epoch == 0:
            plan = Plan(0, (1, 2), (found.segments[1].keys, found.segments[2].keys))
            store._core.catalogue.scale_stream(STREAM, plan, 0)
        return found

    monkeypatch.setattr(store._core.catalogue, "layout", layout)
    assert [segment.segment_id for segment in store.split(STREAM, 0).present] == [5, 6, 3, 4]
    assert store.fsck() == []


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        (lambda store: store.split(STREAM, 9), "segment 9 takes no events; those that do are 0, 1, 2"),
        (lambda store: store.merge(STREAM, [0, 2]), "are no neighbours"),
        (lambda store: store.resize(STREAM, 3), "has 3 segments of equal ranges already"),
        (lambda store: store.resize(STREAM, 5_000), "has 1 to 4096 segments, not 5000"),
        (lambda store: store.split("nowhere", 0), "stream 'nowhere' does not exist"),
    ],
)
def test_what_cannot_be_scaled_says_why(store: Store, what: Any, problem: str) -> None:  # S72
    with pytest.raises(UsageError, match=problem):
        what(store)
    assert store.layout(STREAM).epoch == 0


def test_a_sealed_stream_is_not_scaled(store: Store) -> None:  # S72
    store.seal(STREAM)
    with pytest.raises(UsageError, match="is sealed"):
        store.split(STREAM, 0)


def test_a_stream_without_routing_key_is_scaled(store: Store) -> None:  # S72
    store.create_stream("plain", KEYED, segments=1)
    with store.writer("plain") as writer:
        for value in range(4):
            writer.append(values(value))
            writer.flush()
            store.split("plain", store.layout("plain").present[-1].segment_id)
        for value in range(4, 20):
            writer.append(values(value))
            writer.flush()
    assert store.describe("plain").events_count == 20 * len(KEYS)
    last = store.describe("plain")
    taken = {x.segment_id for x in last.segments if last.ends[x.segment_id]}
    assert len(taken) == last.segments_count == 5  # each flush goes to the next one
    assert store.fsck() == []


def test_cuts_holds_and_truncation_know_closed_segments(store: Store) -> None:  # S65
    write(store, 0)
    cut = store.tail(STREAM)
    store.split(STREAM, 0)
    write(store, 1)
    assert store.events_between(cut) == len(KEYS)
    store.hold(cut, holder="h")
    store.truncate(cut)
    in_order(store, 1)
    with pytest.raises(UsageError, match="'h' needs the events"):
        store.truncate(store.tail(STREAM))
    store.release(STREAM, holder="h")
    store.truncate(store.tail(STREAM))
    assert drained(store) == []
    assert store.fsck() == []


def test_dates_do_not_go_back_in_new_segments(store: Store) -> None:
    write(store, 0)
    with database_of(store).write() as connection:
        connection.execute(t.segments.update().values(latest_ms=1 << 50))
    store.split(STREAM, 0)
    write(store, 1)
    with database_of(store).read() as connection:
        dates = set(connection.scalars(t.parts.select().with_only_columns(t.parts.c.visible_ms)))
    assert max(dates) == 1 << 50


def test_a_stream_of_many_layouts_is_quick_to_append_to(store: Store) -> None:  # S72
    """Closed segments cost an append nothing: it looks at those that take events."""
    for _ in range(30):
        store.split(STREAM, store.layout(STREAM).present[0].segment_id)
        store.merge(STREAM, [x.segment_id for x in store.layout(STREAM).present[:2]])
    assert isinstance(store._core.catalogue, SqlCatalogue)
    with database_of(store).read() as connection:
        query = "SELECT segment_id FROM segments WHERE stream_id = 1 AND closed_epoch IS NULL"
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all()
        assert "present_segments" in str(plan)
    write(store, 0)
    in_order(store, 0)


def test_what_was_passed_belongs_to_one_generation(store: Store) -> None:
    stream = store.describe(STREAM)
    first, second = Reading("p/s", "life", 1), Reading("p/s", "life", 2)
    store.pipelines.pass_segments(stream, first, [0, 1])
    store.pipelines.pass_segments(stream, first, [1, 2])
    assert (store.pipelines.passed(stream, first), store.pipelines.passed(stream, second)) == ({0, 1, 2}, set())
    assert store.pipelines.passed(stream, Reading("p/s", "another", 1)) == set()
    store.pipelines.pass_segments(stream, second, [0])
    assert (store.pipelines.passed(stream, first), store.pipelines.passed(stream, second)) == (set(), {0})
    store.pipelines.pass_segments(stream, first, [1])  # a zombie is heard by nobody
    assert store.pipelines.passed(stream, second) == {0}
    store.delete(STREAM, force=True)
    store.create_stream(STREAM, KEYED)
    assert store.pipelines.passed(store.describe(STREAM), second) == set()


def test_a_damaged_step_between_layouts_is_found(store: Store) -> None:  # CT6
    store.split(STREAM, 0)
    with database_of(store).write() as connection:
        connection.execute(t.segments.update().where(t.segments.c.segment_id == 0).values(key_high=7))
    assert any("layout 1 do not take exactly" in problem.what for problem in store.fsck())


def test_a_stream_that_was_scaled_by_hand_stays_so_when_its_pipeline_starts_over(store: Store) -> None:  # SO5
    """What is not as the sink would make it is emptied, and has as many segments as before."""
    store.pipelines.own("p/sink", PipelineIdentity("a", "/a", "h", 1))
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t")
    transaction.write(values(0))
    transaction.prepare()
    store.split(STREAM, 0)
    store.commit_transactions([(STREAM, "t")], owner="p/sink", epoch=1)
    streams = {STREAM: (3, "key", None)}
    reset = StreamReset(streams, "p/sink", 5, PipelineIdentity("b", "/b", "h", 1), "p/")
    assert store.pipelines.start_over(reset, lambda owner: True) is None
    info = store.describe(STREAM)
    assert (info.segments_count, info.layout_epoch, info.events_count) == (4, 0, 0)
    assert store.fsck() == []


def test_what_came_behind_a_cut_is_not_counted_before_it(store: Store) -> None:  # S72
    begin = store.head(STREAM)
    write(store, 0)
    end = store.tail(STREAM)
    store.split(STREAM, 0)
    write(store, 1)
    assert store.events_between(begin, end) == len(KEYS)
    assert store.events_between(end) == len(KEYS)
    assert store.events_between(begin) == 2 * len(KEYS)
