"""Streams as source and sink: positions, ends, transactions by identity, recovery at another parallelism."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - what Spark does with a source, in one process
from pathlib import Path

import pyarrow as pa
import pytest

from headgate.connectors.base import Committer, Sink, SinkContext, SinkWriter, Source, SourceContext, SourceReader
from headgate.connectors.streams import StreamSink, StreamSource, StreamSourceReader
from headgate.errors import CorruptionError, FencedError, HeadgateError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.store.store import Store

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
    for segment in range(store.describe(stream).segments_count):
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


def test_following_ends_when_the_stream_is_sealed_and_says_so_per_split(store: Store) -> None:  # SC2
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


def test_a_subtask_without_segments_is_finished_at_once(store: Store) -> None:
    last: SourceReader = readers(StreamSource(NAME, store.root), 4)[3]
    assert last.is_finished()
    assert (last.poll(), last.positions()) == (None, {})


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
    with pytest.raises(UsageError, match="'earliest' or 'latest'"):
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


def test_the_name_of_a_transaction_is_the_identity_of_its_committable(store: Store) -> None:  # SC3, K8
    sink = StreamSink(NAME, store.root)
    sink.check(SCHEMA)
    writer = sink.open(context(1, 2, 3))
    assert store.list_transactions() == [], "it begins with the first record"
    writer.write(rows(1))
    writer.seal(CheckpointId(4)).prepare()
    (transaction,) = store.list_transactions()
    assert transaction.name == "p/sink/checkpoint-4/subtask-1/generation-3"
    assert [t.name for t in store.list_transactions(owner="p/sink")] == [transaction.name]
    store.fence("p/sink", 3)
    with pytest.raises(FencedError):
        store.fence("p/sink", 2)


def test_output_of_one_subtask_that_was_aborted_keeps_the_whole_commit_invisible(store: Store) -> None:  # SC5
    sink = StreamSink(NAME, store.root)
    sink.check(SCHEMA)
    committer = sink.open_committer("p", "sink", Generation(1))
    good, other = output(sink, 1, 1), output(sink, 1, 2, subtask=1)
    store.abort_transaction(NAME, "p/sink/checkpoint-1/subtask-1/generation-1", owner="p/sink", epoch=1)
    with pytest.raises(HeadgateError):
        committer.commit(permit(1), [good, other])
    assert visible(store) == []
    committer.commit(permit(1), [good])
    assert visible(store) == [1]


def test_an_empty_checkpoint_prepares_nothing(store: Store) -> None:  # SC4
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


def test_the_stream_is_made_once_and_not_while_it_is_checked(store: Store) -> None:  # SC7
    sink = StreamSink("new/out", store.root, routing_key="key")
    for _ in range(2):
        sink.check(SCHEMA)
    assert [info.name for info in store.list_streams()] == [NAME]
    for _ in range(2):
        sink.make_target(SCHEMA)
    info = store.describe("new/out")
    assert (info.segments_count, info.routing_key, info.schema) == (4, "key", SCHEMA)


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


def test_a_check_of_what_is_not_there_writes_nothing_and_says_what_cannot_be(tmp_path: Path) -> None:  # SC7
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


def test_a_stream_that_came_between_the_check_and_the_run_must_fit(store: Store) -> None:  # SC7
    sink = StreamSink("new/out", store.root)
    sink.check(SCHEMA)
    store.create_stream("new/out", pa.schema([("value", pa.float64()), ("key", pa.string())]))
    with pytest.raises(UsageError, match="column 'value' is int64 instead of double"):
        sink.make_target(SCHEMA)


def test_a_stream_that_must_be_there_is_not_made(store: Store) -> None:  # SC7
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
    with pytest.raises(CorruptionError, match="version 1"):
        committer.commit(permit(1), [committable(b"\x94\x63\xa1a\xa1b\x01", 1)])


def test_a_followed_stream_says_how_it_would_end_and_a_sealed_one_ends(store: Store) -> None:  # N40
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
    other = store.begin(NAME, owner="p/sink", epoch=1, name="a name of somebody's own")
    other.prepare()
    store.commit_transactions([(NAME, other.name)], owner="p/sink", epoch=1)
    committer.forget(CheckpointId(3))
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
