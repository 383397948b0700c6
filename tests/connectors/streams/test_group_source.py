"""A source that reads by a reader group: its readers, and its hook in the driver (docs/spec/group-source.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from headgate.connectors.base import (
    ASK_AGAIN,
    CheckpointMarker,
    HoldContext,
    HookContext,
    InducedReader,
    SourceBatch,
    SourceContext,
)
from headgate.connectors.streams import GroupSource, StreamSource
from headgate.connectors.streams.group_source import GroupCheckpointHook, GroupSourceReader
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.operators.checkpoint_listeners import SnapshotContext
from headgate.store.catalogue.group_rows import decode_group, encode_group
from headgate.store.store import Store
from headgate.store.streams import StreamCut
from headgate.testing.source_kit import check_source

SCHEMA = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
NAME, GROUP = "app/events", "shop"
PLACEHOLDER = f"{NAME}/not dealt out yet"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream(NAME, SCHEMA, segments=3, routing_key="key")
    return store


def write(store: Store, *values: int) -> None:
    with store.writer(NAME) as writer:
        writer.append(pa.record_batch([[f"k{v % 7}" for v in values], list(values)], schema=SCHEMA))


class Job:
    """What a pipeline does with the source, in one generation."""

    def __init__(
        self,
        store: Store,
        subtasks: int = 2,
        generation: int = 1,
        *,
        pipeline: str = "p",
        life: str = "life",
        home: str = "home",
        start: StreamCut | str = "earliest",
        group: str = GROUP,
    ) -> None:
        self.source = GroupSource(NAME, group, store.root, start)
        hook = self.source.coordinator_hook()
        assert isinstance(hook, GroupCheckpointHook)
        self.hook, self._subtasks, self._generation = hook, subtasks, generation
        self._pipeline, self._life = pipeline, life
        self.hook.open(HookContext(pipeline, "source", generation, life, home))
        self.readers: list[GroupSourceReader] = []
        self.data: dict[int, bytes] = {}

    def opened(self, index: int, positions: dict[str, bytes] | None = None) -> GroupSourceReader:
        generation = Generation(self._generation)
        context = SourceContext(self._pipeline, "source", index, self._subtasks, positions, generation, life=self._life)
        return self.source.open(context)

    def begin(self, former: Job | None = None, checkpoint: int = 0) -> Job:
        """Restore ``checkpoint`` of another generation, or begin anew; then all subtasks open."""
        if former is None:
            self.hook.reset()
        else:
            self.hook.restore(checkpoint, former.data[checkpoint])
        self.readers = [self.opened(index) for index in range(self._subtasks)]
        return self

    def read(self, *subtasks: int) -> list[int]:
        """Return the values that these subtasks read, until there are none or a marker comes; default: all do."""
        found: list[int] = []
        for reader in [self.readers[x] for x in subtasks] or self.readers:
            while isinstance(polled := reader.poll(), SourceBatch):
                found += polled.batch.column("value").to_pylist()
            if isinstance(polled, CheckpointMarker):
                reader.read_on([])
                self.met = polled
        return sorted(found)

    def to_marker(self, reader: GroupSourceReader, checkpoint: int) -> list[int]:
        """Read until every split stands behind the marker; return what was read."""
        found: list[int] = []
        still: set[str] = set()
        while not set(reader.splits()) <= still:
            polled = reader.poll()
            if isinstance(polled, SourceBatch):
                assert polled.split not in still, "nothing is read behind a marker"
                found += polled.batch.column("value").to_pylist()
            elif isinstance(polled, CheckpointMarker):
                assert (polled.checkpoint_id, polled.split in still) == (checkpoint, False)
                still.add(polled.split)
            else:
                raise AssertionError(f"no marker in {set(reader.splits()) - still}")
        return found

    def cut(self, reader: GroupSourceReader, checkpoint: int) -> dict[str, bytes]:
        """Take the snapshot of a subtask, and have it read on."""
        positions = reader.positions()
        reader.snapshot(SnapshotContext(checkpoint))
        reader.read_on(list(reader.splits()))
        return positions

    def checkpoint(self, checkpoint: int) -> list[int]:
        """Take a checkpoint of all; return what was read up to the markers."""
        assert self.hook.trigger(checkpoint) is ASK_AGAIN
        found: list[int] = []
        for reader in self.readers:
            found += self.to_marker(reader, checkpoint)
            self.cut(reader, checkpoint)
        self.answer(checkpoint)
        self.completed(checkpoint)
        return sorted(found)

    def answer(self, checkpoint: int) -> StreamCut:
        data = self.hook.trigger(checkpoint)
        assert isinstance(data, bytes)
        self.data[checkpoint] = data
        return StreamCut.parse(json.loads(data)["cut"])

    def completed(self, checkpoint: int) -> None:
        for listener in (self.hook, *self.readers):
            listener.notify_checkpoint_complete(checkpoint)


# -- who reads what ---------------------------------------------------------------------------------------------------


def test_all_segments_are_dealt_out_when_all_subtasks_have_come(store: Store) -> None:  # GS3, GS4
    write(store, *range(70))
    job = Job(store, 2)
    job.hook.reset()
    first = job.opened(0)
    assert isinstance(first, InducedReader)
    assert first.poll() is None
    assert (list(first.splits()), first.positions(), first.is_finished()) == ([PLACEHOLDER], {}, False)
    assert job.hook.trigger(1) is ASK_AGAIN, "who joins later would not owe it"
    assert store.reader_group(GROUP).checkpoints() == {}
    job.readers = [first, job.opened(1)]
    assert job.read() == list(range(70))
    assert sorted([*job.readers[0].splits(), *job.readers[1].splits()]) == [f"{NAME}/{n}" for n in range(3)]


def test_segments_are_dealt_out_by_what_is_unread(store: Store) -> None:  # GS4
    with store.writer(NAME) as writer:
        for value in range(3):
            writer.append(pa.record_batch([["k0"], [value]], schema=SCHEMA))
    busy = max(range(3), key=lambda n: store.describe(NAME).ends[n])
    blob = pa.record_batch([["k0"] * 400_000, list(range(400_000))], schema=SCHEMA)
    with store.writer(NAME) as writer:
        writer.append(blob)
    job = Job(store, 2).begin()
    job.read()
    assert sorted(len(reader.splits()) for reader in job.readers) == [1, 2]
    alone = next(reader for reader in job.readers if len(reader.splits()) == 1)
    assert list(alone.splits()) == [f"{NAME}/{busy}"]


def test_a_generation_is_dealt_anew_at_another_parallelism(store: Store) -> None:  # GS5, GS13
    write(store, *range(30))
    job = Job(store, 2).begin()
    assert job.checkpoint(1) == []
    assert job.read() == list(range(30))
    assert job.checkpoint(2) == []
    write(store, *range(30, 40))
    assert job.read() == list(range(30, 40))
    later = Job(store, 3, 2).begin(job, 2)
    assert later.read() == list(range(30, 40)), "behind the checkpoint, each event once"
    with pytest.raises(FencedError, match="another generation"):
        job.readers[0].poll()
    earlier = Job(store, 1, 3).begin(job, 1)
    assert earlier.read() == list(range(40)), "the group has forgotten that checkpoint long ago"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_each_reader_is_cut_where_it_meets_the_marker(store: Store) -> None:  # GS13
    write(store, *range(30))
    job = Job(store, 2).begin()
    before = job.read(0)
    assert job.hook.trigger(1) is ASK_AGAIN
    assert job.hook.trigger(1) is ASK_AGAIN, "asked again"
    positions: dict[str, bytes] = {}
    for reader in job.readers:
        assert job.to_marker(reader, 1) == []
        assert reader.poll() is None, "it stands still"
        assert job.hook.trigger(1) is ASK_AGAIN
        positions |= job.cut(reader, 1)
    cut = job.answer(1)
    assert cut.positions == {
        int(split.rpartition("/")[2]): int.from_bytes(at, "big") for split, at in positions.items()
    }
    assert store.events_between(cut) == 30 - len(before)
    assert job.read(1) == sorted(set(range(30)) - set(before))
    job.completed(1)
    assert store.reader_group(GROUP).checkpoints() == {}, "its cut is in the manifest"
    assert store.reader_group(GROUP).cut()[NAME].positions == cut.positions
    assert Job(store, 2, 2).begin(job, 1).read() == sorted(set(range(30)) - set(before))


def test_a_subtask_without_segments_is_cut_with_the_others(store: Store) -> None:
    job = Job(store, 4).begin()
    job.read()
    idle = next(reader for reader in job.readers if not reader.splits())
    assert not idle.is_finished(), "not before the stream is sealed"
    assert idle.positions() == {}
    idle.snapshot(SnapshotContext(1))  # cut at the announcement, before the hook was called
    write(store, *range(9))
    assert store.reader_group(GROUP).checkpoints() == {"checkpoint-1": False}, "it began the checkpoint of the group"
    assert job.hook.trigger(1) is ASK_AGAIN
    others = [reader for reader in job.readers if reader is not idle]
    for reader in others:
        assert job.to_marker(reader, 1) == []
        job.cut(reader, 1)
    assert job.answer(1).positions == {0: 0, 1: 0, 2: 0}


def test_a_source_that_is_not_read_on_is_cut_where_it_is(store: Store) -> None:  # EI26
    write(store, *range(30))
    job = Job(store, 2).begin()
    before = job.read()
    for reader in job.readers:  # drained, say: nobody polls it any more
        job.cut(reader, 5)
    assert sum(job.answer(5).positions.values()) == len(before) == 30


def test_a_checkpoint_that_was_given_up_keeps_nobody_waiting(store: Store) -> None:  # GS14
    write(store, *range(30))
    job = Job(store, 2).begin()
    for checkpoint in range(1, 6):  # more than three of a group that programs read by may be open
        assert job.hook.trigger(checkpoint) is ASK_AGAIN
    first, second = job.readers
    job.to_marker(first, 1)
    for listener in (job.hook, first):
        listener.notify_checkpoint_aborted(1)
    first.read_on(list(first.splits()))  # no snapshot was taken
    for checkpoint in (2, 3, 4):
        job.hook.notify_checkpoint_aborted(checkpoint)
    found = [*job.to_marker(first, 5), *job.to_marker(second, 5)]
    positions = {**job.cut(first, 5), **job.cut(second, 5)}
    assert (
        sum(job.answer(5).positions.values()) == len(found) == sum(int.from_bytes(x, "big") for x in positions.values())
    )


def test_a_marker_of_a_checkpoint_that_is_over_is_passed(store: Store) -> None:  # GS14
    job = Job(store, 2).begin()
    first, second = job.readers
    for reader in job.readers:
        assert reader.poll() is None
    assert job.hook.trigger(1) is ASK_AGAIN
    for reader in job.readers:
        job.to_marker(reader, 1)
        reader.read_on(list(reader.splits()))  # given up here; the hook has not heard of it yet
    assert store.reader_group(GROUP).checkpoints() == {"checkpoint-1": True}
    write(store, *range(20))
    assert job.hook.trigger(2) is ASK_AGAIN
    job.hook.notify_checkpoint_aborted(1)
    for reader in (first, second):
        job.to_marker(reader, 2)
        job.cut(reader, 2)
    assert job.answer(2).positions == {0: 0, 1: 0, 2: 0}


def test_a_checkpoint_of_the_group_is_never_asked_for_twice(store: Store) -> None:  # GS14
    job = Job(store, 2).begin()
    job.read()
    assert job.hook.trigger(1) is ASK_AGAIN
    job.cut(job.readers[0], 1)
    store.pipelines.group(GROUP, NAME, job.hook._claim).forget(1, 1)  # somebody tampers with it
    write(store, *range(10))
    job.read()
    with pytest.raises(StorageError, match="given up"):
        job.hook.trigger(1)


def test_snapshots_alone_move_the_group(store: Store) -> None:
    write(store, *range(30))
    job = Job(store, 2).begin()
    assert job.read() == list(range(30))
    group = store.reader_group(GROUP)
    assert sum(group.cut()[NAME].positions.values()) == 0
    assert group.unread_bytes() > 0
    job.checkpoint(1)
    assert group.unread_bytes() == 0


# -- streams that are scaled, and that end -----------------------------------------------------------------------------


def test_a_segment_that_was_read_to_its_end_holds_event_time_until_its_heirs_are_there(store: Store) -> None:  # GS7
    write(store, *range(30))
    job = Job(store, 2).begin()
    job.read()
    owner = next(reader for reader in job.readers if f"{NAME}/0" in reader.splits())
    store.split(NAME, 0)
    write(store, *range(30, 60))
    assert set(job.read()) < set(range(30, 60)), "what follows waits"
    assert f"{NAME}/0" in owner.splits()
    assert job.checkpoint(1) == []
    polled = owner.poll()
    assert isinstance(polled, SourceBatch)
    assert (polled.split, polled.is_split_finished) == (f"{NAME}/0", True)
    assert {f"{NAME}/3", f"{NAME}/4"} < set(owner.splits()), "its heirs are known before it is gone"


def test_what_follows_waits_for_a_completed_checkpoint(store: Store) -> None:
    write(store, *range(30))
    job = Job(store, 2).begin()
    seen = job.read()
    store.merge(NAME, [0, 1])
    write(store, *range(30, 60))
    seen += job.read()
    assert job.hook.trigger(1) is ASK_AGAIN
    for reader in job.readers:
        job.to_marker(reader, 1)
        job.cut(reader, 1)
    cut = job.answer(1)
    assert job.read() == [], "what others have read of its keys may still be on its way"
    job.completed(1)
    seen += job.read()
    assert sorted(seen) == list(range(60))
    assert cut.positions.keys() == {0, 1, 2}
    later = Job(store, 2, 2).begin(job, 1)
    assert len(later.read()) == store.events_between(cut)


def test_everything_is_read_whatever_is_scaled(store: Store) -> None:  # GS6, GS7
    job = Job(store, 2).begin()
    seen: list[int] = []
    for step in range(12):
        write(store, *range(10 * step, 10 * step + 10))
        present = [x.segment_id for x in store.layout(NAME).present]
        if step % 3 == 0:
            store.split(NAME, present[step % len(present)])
        elif step % 3 == 1:
            store.merge(NAME, present[:2])
        seen += [*job.read(), *job.checkpoint(step + 1)]
    for checkpoint in range(13, 40):
        seen += [*job.read(), *job.checkpoint(checkpoint)]
    assert sorted(seen) == list(range(120))
    store.seal(NAME)
    assert job.read() == job.read() == []
    assert all(reader.is_finished() for reader in job.readers)


def test_a_subtask_ends_with_its_sealed_segments_and_is_in_the_final_checkpoint(store: Store) -> None:
    write(store, *range(30))
    job = Job(store, 4).begin()
    store.seal(NAME)
    assert job.read() == list(range(30))
    assert all(reader.is_finished() for reader in job.readers)
    assert all(not reader.splits() for reader in job.readers)
    for reader in job.readers:
        job.cut(reader, 1)
    assert sum(job.answer(1).positions.values()) == 30
    job.completed(1)
    again = Job(store, 2, 2).begin(job, 1)
    assert again.read() == []
    assert all(reader.is_finished() for reader in again.readers)


# -- whose the group is ------------------------------------------------------------------------------------------------


def test_programs_neither_join_nor_move_the_group_of_a_pipeline(store: Store) -> None:  # GS1
    job = Job(store, 1).begin()
    group = store.reader_group(GROUP)
    calls: list[Callable[[], object]] = [
        lambda: group.join("me"),
        lambda: group.checkpoint("c"),
        lambda: group.forget_checkpoint("checkpoint-1"),
        group.reset,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="belongs to source 'source' of pipeline 'p' with its checkpoints in home"):
            call()
    assert job.read() == []
    assert group.readers() == {"p/source/0": tuple((NAME, n) for n in range(3))}


def test_two_pipelines_do_not_share_a_group(store: Store) -> None:  # GS1, GS2
    Job(store, 1).begin()
    for other in (Job(store, 1, pipeline="q"), Job(store, 1, 9, life="other", home="elsewhere")):
        with pytest.raises(UsageError, match="give this source a group of its own"):
            other.begin()
    store.reader_group("programs", NAME)
    with pytest.raises(UsageError, match="does not belong to a pipeline"):
        Job(store, 1, group="programs").begin()


def test_an_older_generation_is_fenced_and_says_by_which(store: Store) -> None:  # GS2
    old = Job(store, 1).begin()
    Job(store, 1, 4).begin()
    calls: list[Callable[[], object]] = [
        lambda: old.hook.trigger(1),
        old.hook.reset,
        lambda: old.opened(0),
    ]
    for call in calls:
        with pytest.raises(FencedError) as caught:
            call()
        assert caught.value.newest == 4
    with pytest.raises(FencedError):
        old.readers[0].snapshot(SnapshotContext(1))


def test_a_pipeline_that_starts_over_has_its_group_anew(store: Store) -> None:  # GS2, GS5
    write(store, *range(30))
    job = Job(store, 2).begin()
    job.read()
    job.checkpoint(1)
    anew = Job(store, 2, 1, life="next").begin()
    assert anew.read() == list(range(30))


def test_a_group_that_was_deleted_is_made_anew_at_the_cut(store: Store) -> None:  # GS5, GS13
    write(store, *range(30))
    job = Job(store, 2).begin()
    job.read()
    job.checkpoint(1)
    assert store.delete_reader_group(GROUP)
    with pytest.raises(StorageError, match="there is no reader group") as caught:
        job.readers[0].poll()
    assert caught.value.is_transient
    write(store, *range(30, 40))
    assert Job(store, 2, 2).begin(job, 1).read() == list(range(30, 40))


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_where_a_first_start_begins(store: Store) -> None:  # GS5
    write(store, *range(30))
    cut = store.tail(NAME)
    write(store, *range(30, 40))
    assert Job(store, 2, start=cut, group="a").begin().read() == list(range(30, 40))
    assert Job(store, 2, start=str(cut), group="b").begin().read() == list(range(30, 40))
    latest = Job(store, 2, start="latest", group="c").begin()
    write(store, 40)
    assert latest.read() == [40]
    with pytest.raises(UsageError, match="must be 'earliest', 'latest' or a StreamCut"):
        GroupSource(NAME, "d", store.root, "yesterday")
    with pytest.raises(UsageError, match="not usable"):
        GroupSource(NAME, "no good\n", store.root)


def test_a_checkpoint_without_a_cut_of_the_group_is_refused(store: Store) -> None:
    job = Job(store, 1)
    with pytest.raises(UsageError, match="holds no cut of one"):
        job.hook.restore(7, None)
    assert job.source.identity() != StreamSource(NAME, store.root).identity()


def test_what_the_manifest_holds_is_checked(store: Store, tmp_path: Path) -> None:
    write(store, *range(10))
    job = Job(store, 1).begin()
    job.read()
    job.checkpoint(1)
    for data in (b"", b"{}", b'{"format": 2}', b'{"format": 1, "cut": "x"}'):
        with pytest.raises(CorruptionError, match="reader group of source 'source'"):
            Job(store, 1, 2).hook.restore(1, data)
    found = json.loads(job.data[1])
    found["cut"] = found["cut"].replace(NAME, "app/others")
    with pytest.raises(UsageError, match="is of another one"):
        Job(store, 1, 2).hook.restore(1, json.dumps(found).encode())
    later = Job(store, 1, 2)
    later.hook.restore(1, job.data[1])
    with pytest.raises(UsageError, match="edit neither"):
        later.opened(0, {f"{NAME}/0": (999).to_bytes(8, "big")}).poll()


def test_a_source_by_a_group_needs_periodic_checkpoints(store: Store) -> None:
    job = Job(store, 1)
    job.hook.reset()
    context = SourceContext("p", "source", 0, 1, None, Generation(1), life="life", takes_checkpoints=False)
    with pytest.raises(UsageError, match="come forward with checkpoints"):
        job.source.open(context)


def test_it_holds_what_its_checkpoints_need(store: Store) -> None:
    write(store, *range(30))
    job = Job(store, 2).begin()
    job.read()
    job.checkpoint(1)
    job.source.hold(HoldContext("p", "source", "life", Generation(1)), [{f"{NAME}/{n}": b"\0" * 8 for n in range(3)}])
    with pytest.raises(UsageError, match="'p/source' needs the events"):
        store.truncate(store.tail(NAME))
    job.source.hold(HoldContext("p", "source", "life", Generation(1)), [job_positions(job)])
    store.truncate(store.tail(NAME))
    assert Job(store, 2, 2).begin(job, 1).read() == []


def job_positions(job: Job) -> dict[str, bytes]:
    return {split: at for reader in job.readers for split, at in reader.positions().items()}


def test_whoever_only_looks_leaves_the_group_alone(store: Store) -> None:  # GS1
    source = GroupSource(NAME, GROUP, store.root)
    looking = source.without_hook()
    assert isinstance(looking, StreamSource)
    assert (looking.stream, looking.holds, looking.stream_cuts) == (NAME, False, False)
    assert store.reader_groups() == []
    store.seal(NAME)
    assert source.how_to_end() is None


def test_the_kit_says_that_it_cannot_check_such_a_source(store: Store) -> None:
    write(store, *range(5))
    store.seal(NAME)
    with pytest.raises((UsageError, StorageError)):
        check_source(GroupSource(NAME, GROUP, store.root))


def test_the_state_of_a_claimed_group_survives_as_bytes(store: Store) -> None:
    Job(store, 2).begin()
    group = store._core.catalogue.find_group(GROUP).group
    data = encode_group(group)
    assert decode_group(data, GROUP) == group
    for bad in (data.replace(b'"format":1', b'"format":2'), data.replace(b'"claim"', b'"other"')):
        with pytest.raises(CorruptionError, match="reader group 'shop'"):
            decode_group(bad, GROUP)
    with pytest.raises(CorruptionError, match="reader group 'shop'"):
        decode_group(data.replace(b'"life":"life"', b'"life":7'), GROUP)
