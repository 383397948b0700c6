"""Streams as source and sink: positions, ends, transactions by identity, recovery at another parallelism."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - what Spark does with a source, in one process
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

import headgate as hg
from headgate import testing
from headgate.codec.json_files import decode_targets, encode_targets
from headgate.connectors.base import (
    Committer,
    HoldContext,
    Sink,
    SinkContext,
    SinkWriter,
    Source,
    SourceContext,
    SourceReader,
)
from headgate.connectors.registry import sink_of
from headgate.connectors.streams import StreamSink, StreamSource, StreamSourceReader
from headgate.errors import CorruptionError, FencedError, HeadgateError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.runtime.driver.reset import Reset
from headgate.store.store import Store
from headgate.store.streams import Retention, StreamCut, StreamInfo, retention_policy_of

SCHEMA = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
NAME = "app/events"


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch([[f"k{v % 7}" for v in values], list(values)], schema=SCHEMA)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream(NAME, SCHEMA, segments=3, routing_key="key")
    return store


def write(store: Store, *values: int, stream: str = NAME) -> None:
    with store.writer(stream) as writer:
        writer.append(rows(*values))


def visible(store: Store, stream: str = NAME) -> list[int]:
    found: list[int] = []
    for segment in range(len(store.describe(stream).ends)):
        reader = store.reader(stream, segment)
        while (batch := reader.read()) is not None:
            found += batch.column("value").to_pylist()
    return sorted(found)


def readers(
    source: StreamSource, parallelism: int, positions: dict[str, bytes] | None = None
) -> list[StreamSourceReader]:
    return [source.open(SourceContext("p", "source", i, parallelism, positions)) for i in range(parallelism)]


def poll_all(reader: StreamSourceReader, polls_max: int = 1_000) -> list[int]:
    found: list[int] = []
    for _ in range(polls_max):
        batch = reader.poll()
        if batch is None:
            return found
        assert batch.batch.schema == SCHEMA
        found += batch.batch.column("value").to_pylist()
    return found


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_each_event_is_read_by_exactly_one_subtask(store: Store, parallelism: int) -> None:
    write(store, *range(50))
    found = [poll_all(reader) for reader in readers(StreamSource(NAME, store.root), parallelism)]
    assert sorted(v for part in found for v in part) == list(range(50))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 5)])
def test_a_restored_source_continues_behind_its_positions_at_any_parallelism(
    store: Store, before: int, after: int
) -> None:
    write(store, *range(30))
    source = StreamSource(NAME, store.root)
    first = readers(source, before)
    found = [v for reader in first for v in poll_all(reader, polls_max=1)]
    positions = {split: p for reader in first for split, p in reader.positions().items()}
    write(store, *range(30, 60))
    lost = [v for reader in first for v in poll_all(reader)]  # read after the snapshot: asked for again
    again = [v for reader in readers(source, after, positions) for v in poll_all(reader)]
    assert sorted(again) == sorted(lost)
    assert sorted(found + again) == list(range(60))


def test_following_ends_when_the_stream_is_sealed_and_says_so_per_split(store: Store) -> None:
    write(store, *range(10))
    (reader,) = readers(StreamSource(NAME, store.root), 1)
    assert list(reader.splits()) == [f"{NAME}/{i}" for i in range(3)]
    assert sorted(poll_all(reader)) == list(range(10))
    assert not reader.is_finished()
    write(store, 10)
    store.seal(NAME)
    finished, found = set(), []
    while (batch := reader.poll()) is not None:
        found += batch.batch.column("value").to_pylist()
        if batch.is_split_finished:
            finished.add(batch.split)
    assert (found, finished) == ([10], {f"{NAME}/{i}" for i in range(3)})
    assert reader.is_finished()
    assert list(reader.splits()) == []
    assert set(reader.positions()) == finished


def test_without_following_the_end_is_the_one_of_the_first_start_also_after_a_restart(store: Store) -> None:
    write(store, *range(20))
    source = StreamSource(NAME, store.root, follow=False)
    (reader,) = readers(source, 1)
    begin = reader.poll()
    assert begin is not None
    positions = reader.positions()
    write(store, *range(20, 40))
    for each in (reader, readers(source, 1, positions)[0]):
        found = begin.batch.column("value").to_pylist() + poll_all(each)
        assert sorted(found) == list(range(20))
        assert each.is_finished()


def test_starting_at_the_latest_event_skips_those_before(store: Store) -> None:
    write(store, *range(10))
    (reader,) = readers(StreamSource(NAME, store.root, start="latest"), 1)
    assert poll_all(reader) == []
    write(store, 10, 11)
    assert sorted(poll_all(reader)) == [10, 11]


def test_a_subtask_without_segments_is_finished_when_none_can_come(store: Store) -> None:
    last: SourceReader = readers(StreamSource(NAME, store.root, follow=False), 4)[3]
    assert last.is_finished()
    following: SourceReader = readers(StreamSource(NAME, store.root), 4)[3]
    for reader in (last, following):
        assert (reader.poll(), reader.positions(), reader.splits()) == (None, {}, [])
    assert not following.is_finished()
    store.seal(NAME)
    following.poll()
    assert following.is_finished()


def test_polling_without_news_is_cheap_and_slows_down(store: Store) -> None:
    (reader,) = readers(StreamSource(NAME, store.root), 1)
    soon = reader.wakeup_ms()
    for _ in range(1_000):
        assert reader.poll() is None
    assert reader.wakeup_ms() > soon
    write(store, 1)
    assert reader.poll() is not None
    assert reader.wakeup_ms() == soon


def test_identity_tells_a_stream_from_its_namesake(store: Store) -> None:
    source = StreamSource(NAME, store.root)
    before = source.identity()
    assert source.identity() == before
    store.delete(NAME, force=True)
    store.create_stream(NAME, SCHEMA, segments=4, routing_key="key")
    assert source.identity() != before


def test_a_source_is_absolute_and_travels(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    source: Source = StreamSource(NAME, "store")
    assert pickle.loads(pickle.dumps(source)) == source == StreamSource(NAME, store.root)
    assert copy.copy(StreamSink(NAME, "store")).store == store.root
    assert source.schema() == SCHEMA
    with pytest.raises(UsageError, match="'earliest', 'latest' or a StreamCut"):
        StreamSource(NAME, start="middle")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not exist"):
        StreamSource("nope", store.root).schema()


def test_damaged_positions_are_refused(store: Store) -> None:
    with pytest.raises(CorruptionError, match="8 or 16 bytes"):
        readers(StreamSource(NAME, store.root), 1, {f"{NAME}/0": b"123"})


def context(subtask: int = 0, parallelism: int = 1, generation: int = 1) -> SinkContext:
    return SinkContext("p", "sink", subtask, parallelism, Generation(generation), SCHEMA)


def committable(payload: bytes | None, checkpoint: int, subtask: int = 0, generation: int = 1) -> Committable:
    assert payload is not None
    return Committable("sink", CheckpointId(checkpoint), subtask, Generation(generation), payload)


def permit(checkpoint: int, generation: int = 1) -> CommitPermit:
    return CommitPermit(CheckpointId(checkpoint), Generation(generation))


def output(sink: Sink, checkpoint: int, *values: int, subtask: int = 0, generation: int = 1) -> Committable:
    writer: SinkWriter = sink.open(context(subtask, 2, generation))
    writer.write(rows(*values))
    return committable(writer.seal(CheckpointId(checkpoint)).prepare(), checkpoint, subtask, generation)


def test_output_is_visible_after_commit_only_and_committing_again_changes_nothing(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    sink.check(SCHEMA)
    committer: Committer = sink.open_committer("p", "sink", Generation(1))
    committer.recover([])
    parts = [output(sink, 1, 1, 2), output(sink, 1, 3, subtask=1)]
    assert visible(store) == []
    for _ in range(2):
        committer.commit(permit(1), parts)
        assert visible(store) == [1, 2, 3]
    committer.commit(permit(2), [])
    committer.close()


def test_the_name_of_a_transaction_is_the_identity_of_its_committable(store: Store) -> None:  # K8
    sink = StreamSink(NAME, store.root)
    sink.check(SCHEMA)
    writer = sink.open(context(1, 2, 3))
    assert store.list_transactions() == [], "it begins with the first record"
    writer.write(rows(1))
    writer.seal(CheckpointId(4)).prepare()
    (transaction,) = store.list_transactions()
    assert transaction.name == "p/sink/checkpoint-4/subtask-1/generation-3"
    assert [t.name for t in store.list_transactions(owner="p/sink")] == [transaction.name]
    store.transactions.fence("p/sink", 3)
    with pytest.raises(FencedError):
        store.transactions.fence("p/sink", 2)


def test_output_of_one_subtask_that_was_aborted_keeps_the_whole_commit_invisible(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    sink.check(SCHEMA)
    committer = sink.open_committer("p", "sink", Generation(1))
    good, other = output(sink, 1, 1), output(sink, 1, 2, subtask=1)
    store.transactions.abort(NAME, "p/sink/checkpoint-1/subtask-1/generation-1", owner="p/sink", epoch=1)
    with pytest.raises(HeadgateError):
        committer.commit(permit(1), [good, other])
    assert visible(store) == []
    committer.commit(permit(1), [good])
    assert visible(store) == [1]


def test_an_empty_checkpoint_prepares_nothing(store: Store) -> None:
    writer = StreamSink(NAME, store.root).open(context())
    assert writer.seal(CheckpointId(1)).prepare() is None  # K4
    writer.write(rows())
    assert writer.seal(CheckpointId(2)).prepare() is None
    assert store.list_transactions() == []


def test_a_sealed_transaction_is_not_touched_by_what_follows(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    writer = sink.open(context())
    writer.write(rows(1))
    first = writer.seal(CheckpointId(1))
    writer.write(rows(2))
    second = writer.seal(CheckpointId(2))
    writer.write(rows(3))
    writer.close()
    late = committable(second.prepare(), 2)  # uploads may finish in any order
    early = committable(first.prepare(), 1)
    committer = sink.open_committer("p", "sink", Generation(1))
    committer.commit(permit(1), [early])
    assert visible(store) == [1]
    committer.commit(permit(2), [late])
    assert visible(store) == [1, 2]
    assert store.fsck() == []


def test_recovery_commits_what_the_checkpoint_keeps_and_aborts_the_rest(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    kept = [output(sink, 4, 1), output(sink, 4, 2, subtask=1)]
    dropped = output(sink, 5, 3)
    foreign = Committable("other", CheckpointId(4), 0, Generation(1), b"not ours")
    committer = sink.open_committer("p", "sink", Generation(2))
    committer.recover([*kept, foreign])
    committer.commit(permit(4, 2), kept)
    assert visible(store) == [1, 2]
    with pytest.raises(CorruptionError, match="aborted"):
        committer.commit(permit(5, 2), [dropped])  # K5: never only logged
    again = output(sink, 5, 3, generation=2)
    committer.commit(permit(5, 2), [again])
    assert visible(store) == [1, 2, 3]


def test_an_older_generation_can_neither_prepare_nor_commit_nor_recover(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    zombie = sink.open(context())
    zombie.write(rows(1))
    sealed = zombie.seal(CheckpointId(1))
    kept = output(sink, 1, 2, subtask=1)
    old = sink.open_committer("p", "sink", Generation(1))
    sink.open_committer("p", "sink", Generation(2)).recover([kept])
    with pytest.raises(FencedError):
        sealed.prepare()
    with pytest.raises(FencedError):
        zombie.write(rows(9))
    with pytest.raises(FencedError):
        old.commit(permit(1), [kept])
    with pytest.raises(FencedError):
        old.recover([])
    assert visible(store) == []


def test_two_sinks_of_one_pipeline_do_not_meddle(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    kept = output(sink, 1, 1)
    sink.open_committer("p", "other", Generation(9)).recover([])
    sink.open_committer("q", "sink", Generation(9)).recover([])
    sink.open_committer("p", "sink", Generation(1)).commit(permit(1), [kept])
    assert visible(store) == [1]  # K8


def test_the_stream_is_made_once_and_not_while_it_is_checked(store: Store) -> None:
    sink = StreamSink("new/out", store.root, routing_key="key")
    for _ in range(2):
        sink.check(SCHEMA)
    assert [info.name for info in store.list_streams()] == [NAME]
    for _ in range(2):
        sink.make_target(SCHEMA)
    info = store.describe("new/out")
    assert (info.segments_count, info.routing_key, info.schema) == (4, "key", SCHEMA)


def test_a_sink_looks_at_its_own_stream_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*_: object) -> list[StreamInfo]:
        raise AssertionError("there may be ten thousand")

    monkeypatch.setattr(Store, "list_streams", listed)
    sink = StreamSink("new/out", store.root, routing_key="key")
    for _ in range(2):
        sink.check(SCHEMA)
        sink.make_target(SCHEMA)
    with pytest.raises(UsageError, match=f"'new/none' does not exist .*streams there: {NAME}, new/out"):
        StreamSink("new/none", store.root, create=False).check(SCHEMA)


WEEK = Retention(age="7 days", size="10GB")


def test_a_stream_that_a_sink_makes_has_the_retention_of_the_sink(store: Store) -> None:
    StreamSink("new/out", store.root, retention=WEEK).make_target(SCHEMA)
    assert store.describe("new/out").retention == WEEK.checked()
    StreamSink("new/other", store.root).make_target(SCHEMA)
    assert store.describe("new/other").retention is None


@pytest.mark.parametrize("own", [None, Retention(age="1 hour")])
def test_a_stream_that_is_there_keeps_its_own_retention(store: Store, own: Retention | None) -> None:
    store.set_retention(NAME, own)
    sink = StreamSink(NAME, store.root, retention=WEEK)
    sink.check(SCHEMA)
    sink.make_target(SCHEMA)
    assert store.describe(NAME).retention == (None if own is None else own.checked())


@pytest.mark.parametrize("wrong", [Retention(), Retention(age=0), Retention(size="much"), "7 days", 7])
def test_a_sink_whose_retention_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="Retention"):
        StreamSink("out", retention=wrong)


def test_a_sink_with_a_retention_travels(store: Store) -> None:
    sink = StreamSink(NAME, store.root, retention=WEEK)
    assert pickle.loads(pickle.dumps(sink)) == sink
    assert len({sink, copy.copy(sink)}) == 1


@pytest.mark.parametrize("retention", [WEEK, Retention(age="90s"), Retention(size=1), None])
def test_what_is_written_down_of_a_sink_makes_the_same_stream(store: Store, retention: Retention | None) -> None:
    target = StreamSink("new/out", store.root, "key", segments=2, retention=retention).recorded("out")
    (read,) = decode_targets(encode_targets((target,)), "targets")
    again = sink_of(read)
    assert isinstance(again, StreamSink)
    assert again.recorded("out") == target
    again.make_target(SCHEMA)
    info = store.describe("new/out")
    assert (info.segments_count, info.routing_key, info.retention) == (2, "key", retention_policy_of(retention))


def test_what_an_older_release_wrote_down_says_nothing_of_a_retention() -> None:
    body = b'[{"sink":"out","kind":"stream","place":"/s","stream":"a","create":true,"segments":4,"routing_key":"key"}]'
    (read,) = decode_targets(b"headgate-targets 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body), "targets")
    assert sink_of(read) == StreamSink("a", "/s", "key")


def started_over(sink: StreamSink, schema: pa.Schema) -> StreamInfo:
    """The stream of ``sink``, which begins once more and writes ``schema``."""
    sink.start_over("p", "sink", Generation(9), PipelineIdentity("b", "/b", "h", 1), lambda owner: True)
    sink.make_target(schema)
    return Store.shared(sink.store).describe(sink.stream)


def test_a_stream_that_is_emptied_has_its_retention_again(store: Store) -> None:  # SO5
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    sink = StreamSink("new/out", store.root, retention=WEEK)
    sink.make_target(SCHEMA)
    sink.open_committer("p", "sink", Generation(1)).commit(permit(1), [output(sink, 1, 1, 2)])
    found = started_over(sink, wider)
    assert (found.schema, found.events_count, found.retention) == (wider, 0, WEEK.checked()), "made as it was"


@pytest.mark.parametrize("own", [Retention(age="1 hour"), None])
@pytest.mark.parametrize("retention", [None, WEEK])
def test_a_stream_with_another_retention_than_its_sinks_keeps_it_when_it_is_emptied(
    store: Store, retention: Retention | None, own: Retention | None
) -> None:  # SO5
    sink = StreamSink("new/out", store.root, retention=retention)
    sink.make_target(SCHEMA)
    store.set_retention("new/out", own)
    sink.open_committer("p", "sink", Generation(1)).commit(permit(1), [output(sink, 1, 1, 2)])
    found = started_over(sink, SCHEMA)
    assert (found.events_count, found.retention) == (0, retention_policy_of(own))


def test_a_pipeline_whose_sink_gets_a_retention_goes_on_and_starts_over(store: Store, tmp_path: Path) -> None:
    def run(retention: Retention | None, **begins: Any) -> int:
        pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing("50ms", dir=str(tmp_path / "home")))
        numbers = pipeline.source(hg.FromRows([{"key": "a", "value": n} for n in range(5)]))
        numbers.sink(hg.StreamSink("new/out", store=store.root, retention=retention))
        return testing.run(pipeline, **begins).records_in

    assert [run(None), run(WEEK)] == [5, 5], "all its runs together"
    assert visible(store, "new/out") == list(range(5)), "the second one had nothing to do"
    assert store.describe("new/out").retention is None, "it was there"
    store.set_retention("new/out", WEEK)
    assert run(WEEK, fresh=True) == 5
    with Reset.holding_the_lock(str(tmp_path / "home"), "p", None) as resetting:  # as headgate reset does
        resetting.carry_out(resetting.plan())
    assert "new/out" not in {info.name for info in store.list_streams()}, "its columns may be others"
    assert run(WEEK) == 5
    assert visible(store, "new/out") == list(range(5))
    assert store.describe("new/out").retention == WEEK.checked()


def test_check_names_what_differs(store: Store) -> None:
    sink = StreamSink(NAME, store.root)
    sink.check(pa.schema([SCHEMA.field("value"), SCHEMA.field("key")]))  # order does not matter
    with pytest.raises(UsageError, match="column 'value' is double instead of int64"):
        sink.check(pa.schema([("key", pa.string()), ("value", pa.float64())]))
    with pytest.raises(UsageError, match=r"'value' \(int64\) is missing; 'count' \(int64\) is unknown"):
        sink.check(pa.schema([("key", pa.string()), ("count", pa.int64())]))
    with pytest.raises(UsageError, match="routing key 'key', not 'value'"):
        StreamSink(NAME, store.root, routing_key="value").check(SCHEMA)
    with pytest.raises(UsageError, match="does not exist"):
        StreamSink("nope", store.root, create=False).check(SCHEMA)
    store.seal(NAME)
    with pytest.raises(UsageError, match="sealed"):
        sink.check(SCHEMA)


def test_a_check_of_what_is_not_there_writes_nothing_and_says_what_cannot_be(tmp_path: Path) -> None:
    where = tmp_path / "no-store"
    StreamSink("new/out", str(where)).check(SCHEMA)
    with pytest.raises(UsageError, match="not usable"):
        StreamSink("new//out", str(where)).check(SCHEMA)
    with pytest.raises(UsageError, match="1 to 4096 segments"):
        StreamSink("out", str(where), segments=0).check(SCHEMA)
    with pytest.raises(UsageError, match="routing key 'nope' is not a column"):
        StreamSink("out", str(where), routing_key="nope").check(SCHEMA)
    with pytest.raises(UsageError, match="does not exist in the store at"):
        StreamSink("out", str(where), create=False).check(SCHEMA)
    source = StreamSource("out", str(where))
    for ask in (source.schema, source.identity, source.how_to_end):
        with pytest.raises(UsageError, match="does not exist in the store at"):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_came_between_the_check_and_the_run_must_fit(store: Store) -> None:
    sink = StreamSink("new/out", store.root)
    sink.check(SCHEMA)
    store.create_stream("new/out", pa.schema([("value", pa.float64()), ("key", pa.string())]))
    with pytest.raises(UsageError, match="column 'value' is int64 instead of double"):
        sink.make_target(SCHEMA)


def test_a_stream_that_must_be_there_is_not_made(store: Store) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        StreamSink("nope", store.root, create=False).make_target(SCHEMA)


def test_records_are_written_in_the_streams_columns(store: Store) -> None:
    store.create_stream("narrow", pa.schema([("value", pa.int32()), ("key", pa.string())]), segments=1)
    source = StreamSource("narrow", store.root)
    assert source.schema() == pa.schema([("value", pa.int32()), ("key", pa.large_string())])
    sink = StreamSink("narrow", store.root)
    incoming = pa.record_batch([["a"], pa.array([7], pa.int32())], names=["key", "value"])
    sink.check(incoming.schema)
    writer = sink.open(context())
    writer.write(incoming)
    part = committable(writer.seal(CheckpointId(1)).prepare(), 1)
    sink.open_committer("p", "sink", Generation(1)).commit(permit(1), [part])
    batch = readers(source, 1)[0].poll()
    assert batch is not None
    assert batch.batch.schema == source.schema()
    assert batch.batch.to_pylist() == [{"value": 7, "key": "a"}]


def test_a_damaged_committable_is_refused(store: Store) -> None:
    committer = StreamSink(NAME, store.root).open_committer("p", "sink", Generation(1))
    with pytest.raises(CorruptionError, match="stream transaction"):
        committer.commit(permit(1), [committable(b"\xc1", 1)])
    with pytest.raises(CorruptionError, match="version 2"):
        committer.commit(permit(1), [committable(b"\x97\x63\xa1a\xa1b\x01\xc0\xc3\x01", 1)])


def test_a_followed_stream_says_how_it_would_end_and_a_sealed_one_ends(store: Store) -> None:
    assert StreamSource(NAME, store.root, follow=False).how_to_end() is None
    followed = StreamSource(NAME, store.root, follow=True)
    assert followed.how_to_end() == f"read what is there with follow=False, or seal stream '{NAME}' first"
    store.seal(NAME)
    assert followed.how_to_end() is None


def test_outcomes_are_forgotten_below_a_checkpoint_and_nothing_else_of_the_owner(store: Store) -> None:  # K20
    sink = StreamSink(NAME, store.root)
    committer = sink.open_committer("p", "sink", Generation(1))
    for checkpoint in (1, 2, 3):
        committer.commit(permit(checkpoint), [output(sink, checkpoint, checkpoint)])
    waiting = output(sink, 1, 9, subtask=1)
    other = store.transactions.begin(NAME, owner="p/sink", epoch=1, name="a name of somebody's own")
    other.prepare()
    store.commit_transactions([(NAME, other.name)], owner="p/sink", epoch=1)
    committer.forget(CheckpointId(3), list)
    left = [transaction.name for transaction in store.list_transactions(owner="p/sink")]
    waits = "p/sink/checkpoint-1/subtask-1/generation-1"
    assert sorted(left) == [other.name, waits, "p/sink/checkpoint-3/subtask-0/generation-1"]
    committer.commit(permit(1), [waiting])
    assert visible(store) == [1, 2, 3, 9]


def test_a_writer_that_is_closed_leaves_nothing_of_its_open_transaction(store: Store) -> None:
    writer = StreamSink(NAME, store.root).open(context())
    writer.write(rows(1))
    writer.close()
    writer.close()
    assert store.list_transactions() == []
    assert visible(store) == []
    assert store.fsck() == []


def test_a_source_holds_the_oldest_position_of_each_segment(store: Store) -> None:
    write(store, *range(100))
    source = StreamSource(NAME, str(store.root))
    ends = store.describe(NAME).ends

    def positions(*at: int | None) -> dict[str, bytes]:
        return {f"{NAME}/{n}": position.to_bytes(8, "big") for n, position in enumerate(at) if position is not None}

    context = HoldContext("p", "source", "life", Generation(2))
    source.hold(context, [])
    assert store.holds(NAME)["p/source"] == store.head(NAME)
    source.hold(
        HoldContext("p", "source", "life", Generation(2)), [positions(9, 8, 7), positions(*ends), positions(5, 10, 6)]
    )
    assert store.holds(NAME)["p/source"].positions == {0: 5, 1: 8, 2: 6}
    source.hold(
        HoldContext("p", "source", "life", Generation(2)), [positions(9, 8, 7), positions(9, None, 7)]
    )  # one began before the segment
    assert store.holds(NAME)["p/source"].positions == {0: 9, 1: 0, 2: 7}
    store.truncate(StreamCut(NAME, store.describe(NAME).stream_id, {0: 8}))
    source.hold(context, [positions(2, 3, 4)])  # what is gone cannot be held
    assert store.holds(NAME)["p/source"].positions == {0: 8, 1: 3, 2: 4}
    with pytest.raises(FencedError, match="'p/source': generation 1 was replaced by generation 2"):
        source.hold(HoldContext("p", "source", "life", Generation(1)), [])
    source.hold(HoldContext("p", "source", "another", Generation(1)), [])  # its checkpoints were removed
    assert store.holds(NAME)["p/source"] == store.head(NAME)
