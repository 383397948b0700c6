"""Streams that are cut at one moment: markers in the store, and readers that stand still there (SC21)."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.storing import database_of

from headgate.connectors.base import CheckpointMarker, HookContext, InducedReader, SourceBatch, SourceContext
from headgate.connectors.streams import StreamCutReader, StreamSource
from headgate.connectors.streams.segments import StreamCutHook
from headgate.connectors.streams.stream_source import LookingSource
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.records import Frontier, Marker
from headgate.store.pipelines import Pipelines
from headgate.store.store import Store
from headgate.testing.source_kit import check_markers

SCHEMA = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
NAME = "app/events"
OWNER = "p/source"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream(NAME, SCHEMA, segments=3, routing_key="key")
    return store


def write(store: Store, *values: int) -> None:
    with store.writer(NAME) as writer:
        writer.append(pa.record_batch([[f"k{v % 7}" for v in values], list(values)], schema=SCHEMA))


def hook_of(store: Store, generation: int = 1) -> StreamCutHook:
    hook = StreamSource(NAME, store.root, stream_cuts=True).coordinator_hook()
    assert isinstance(hook, StreamCutHook)
    hook.open(HookContext("p", "source", generation))
    return hook


def reader_of(
    store: Store, generation: int = 1, positions: dict[str, bytes] | None = None, *, follow: bool = True
) -> StreamCutReader:
    source = StreamSource(NAME, store.root, stream_cuts=True, follow=follow)
    reader = source.open(SourceContext("p", "source", 0, 1, positions, Generation(generation)))
    assert isinstance(reader, StreamCutReader)
    return reader


def read(reader: StreamCutReader, polls_max: int = 100) -> tuple[list[int], dict[str, int]]:
    """Return the values until there is nothing more now, and the markers that were met, by split."""
    values: list[int] = []
    met: dict[str, int] = {}
    for _ in range(polls_max):
        match reader.poll():
            case SourceBatch() as batch:
                assert batch.split not in met, "nothing is read behind a marker"
                values += batch.batch.column("value").to_pylist()
            case CheckpointMarker() as marker:
                assert marker.split not in met
                met[marker.split] = marker.checkpoint_id
            case None:
                break
    return values, met


SPLITS = [f"{NAME}/{segment}" for segment in range(3)]


def test_a_marker_is_one_moment_of_all_segments_and_no_event(store: Store) -> None:
    write(store, *range(10))
    ends = store.describe(NAME).ends
    assert store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=4) == dict(enumerate(ends))
    write(store, *range(10, 20))
    assert store.describe(NAME).events_count == 20
    plain = StreamSource(NAME, store.root).open(SourceContext("q", "source", 0, 1, None))
    found: list[int] = []
    while (batch := plain.poll()) is not None:
        found += batch.batch.column("value").to_pylist()
    assert sorted(found) == list(range(20)), "other readers see nothing of it"
    assert [p for p in store.fsck() if not p.is_harmless] == []


def test_marking_again_returns_what_was_recorded_first(store: Store) -> None:
    write(store, 1, 2, 3)
    first = store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=4)
    write(store, 4, 5, 6)
    assert store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=4) == first
    assert store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=5) != first
    with pytest.raises(UsageError, match="does not exist"):
        store.pipelines.mark("app/none", owner=OWNER, generation=1, checkpoint=4)


def test_a_marker_records_only_segments_that_take_events(store: Store) -> None:
    write(store, *range(20))
    ends = dict(enumerate(store.describe(NAME).ends))
    store.split(NAME, 0)
    assert store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=4) == {1: ends[1], 2: ends[2], 3: 0, 4: 0}
    write(store, *range(20, 40))
    now = dict(enumerate(store.describe(NAME).ends))
    store.merge(NAME, [3, 4])
    assert sorted(store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=5)) == [1, 2, 5]

    def markers(segment: int) -> list[tuple[int, int]]:
        frontier = store.pipelines.frontier(NAME, owner=OWNER, generation=1, segments=[segment])
        assert frontier.ends == {segment: now.get(segment, 0)}
        assert frontier.closed == ({segment} if segment in (0, 3, 4) else set())
        return [(marker.checkpoint, marker.position) for marker in frontier.markers[segment]]

    assert markers(0) == [(4, ends[0]), (5, ends[0])], "it had ended for good"
    assert markers(1) == [(4, ends[1]), (5, now[1])]
    assert markers(3) == [(4, 0), (5, now[3])], "it was closed in between"
    assert markers(5) == [(5, 0)], "it came after the first"
    everything = store.pipelines.frontier(NAME, owner=OWNER, generation=1)
    assert {x: [(m.checkpoint, m.position) for m in found] for x, found in everything.markers.items()} == {
        segment: markers(segment) for segment in range(6)
    }


def test_markers_of_before_that_name_all_segments_are_read(store: Store) -> None:
    write(store, *range(20))
    store.split(NAME, 0)
    stream_id, ends = store.find(NAME).stream_id, store.describe(NAME).ends
    key = {"stream_id": stream_id, "owner": OWNER, "generation": 1, "checkpoint": 4}
    with database_of(store).write() as connection:
        rows = [{**key, "segment_id": segment, "position": end} for segment, end in enumerate(ends)]
        connection.execute(t.markers.insert(), rows)
    assert store.pipelines.mark(NAME, owner=OWNER, generation=1, checkpoint=4) == dict(enumerate(ends))
    found = store.pipelines.frontier(NAME, owner=OWNER, generation=1, segments=[0, 3]).markers
    assert (found[0], found[3]) == ((Marker(4, ends[0]),), (Marker(4, 0),))


def test_a_reader_asks_for_the_segments_that_it_reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    real = Pipelines.frontier

    def frontier(self: Pipelines, name: str, *, owner: str, generation: int, segments: Collection[int]) -> Frontier:
        asked.append(set(segments))
        return real(self, name, owner=owner, generation=generation, segments=segments)

    monkeypatch.setattr(Pipelines, "frontier", frontier)
    hook, reader = hook_of(store), reader_of(store)
    for number in range(4):
        write(store, *range(20))
        store.split(NAME, store.layout(NAME).present[0].segment_id)
        hook.trigger(number + 1)
        read(reader)
        reader.read_on(reader.splits())
        read(reader)
    present = {segment.segment_id for segment in store.layout(NAME).present}
    assert asked[-1] == present
    assert 0 not in present


def test_markers_are_forgotten_by_owner_generation_and_checkpoint(store: Store) -> None:
    for owner, generation, checkpoint in ((OWNER, 1, 4), (OWNER, 1, 5), (OWNER, 2, 6), ("other", 1, 4)):
        store.pipelines.mark(NAME, owner=owner, generation=generation, checkpoint=checkpoint)

    def left(owner: str, generation: int) -> list[int]:
        return [
            m.checkpoint for m in store.pipelines.frontier(NAME, owner=owner, generation=generation).markers.get(0, ())
        ]

    store.pipelines.unmark(owner=OWNER, generation=1, first=0, last=4)
    assert (left(OWNER, 1), left(OWNER, 2), left("other", 1)) == ([5], [6], [4])
    store.pipelines.unmark_others(owner=OWNER, generation=2)
    assert (left(OWNER, 1), left(OWNER, 2), left("other", 1)) == ([], [6], [4])
    store.seal(NAME)
    store.delete(NAME)
    again = store.create_stream(NAME, SCHEMA, segments=1)
    assert again.segments_count == 1
    assert left("other", 1) == []


def test_a_reader_stands_still_at_the_marker_of_every_segment(store: Store) -> None:  # SC21
    hook, reader = hook_of(store), reader_of(store)
    assert isinstance(reader, InducedReader)
    write(store, *range(20))
    told = json.loads(hook.trigger(7))
    assert told == {"stream": NAME, "cut": {str(n): end for n, end in enumerate(store.describe(NAME).ends)}}
    write(store, *range(20, 40))
    values, met = read(reader)
    assert sorted(values) == list(range(20))
    assert met == dict.fromkeys(SPLITS, 7)
    positions = reader.positions()
    reader.read_on(SPLITS)
    assert sorted(read(reader)[0]) == list(range(20, 40))
    again = reader_of(store, 2, positions)
    assert sorted(read(again)[0]) == list(range(20, 40)), "restored exactly behind the marker"


def test_a_marker_that_is_recorded_while_a_reader_reads_is_not_run_over(store: Store) -> None:
    hook, reader = hook_of(store), reader_of(store)
    write(store, *range(20))
    first = reader.poll()
    assert isinstance(first, SourceBatch)
    hook.trigger(7)
    write(store, *range(20, 40))
    values, met = read(reader)
    assert sorted([*first.batch.column("value").to_pylist(), *values]) == list(range(20))
    assert met == dict.fromkeys(SPLITS, 7)


def test_a_quiet_stream_meets_its_marker_at_once(store: Store) -> None:
    hook, reader = hook_of(store), reader_of(store)
    assert read(reader) == ([], {})
    hook.trigger(3)
    assert read(reader) == ([], dict.fromkeys(SPLITS, 3))
    hook.trigger(4)
    assert read(reader) == ([], {}), "it stands still"
    reader.read_on(SPLITS[:1])
    assert read(reader) == ([], {SPLITS[0]: 4})


def test_only_markers_of_the_own_generation_are_met(store: Store) -> None:
    hook_of(store, 1).trigger(7)
    reader = reader_of(store, 2)
    assert read(reader)[1] == {}
    hook = hook_of(store, 2)
    hook.restore(6, None)
    assert store.pipelines.frontier(NAME, owner=OWNER, generation=1).markers == {}
    hook_of(store, 1).trigger(8)  # a driver that was replaced
    hook.trigger(9)
    assert read(reader)[1] == dict.fromkeys(SPLITS, 9)


def test_markers_go_with_the_end_of_their_checkpoint(store: Store) -> None:
    hook = hook_of(store)

    def left() -> set[Marker]:
        found = store.pipelines.frontier(NAME, owner=OWNER, generation=1).markers.values()
        return {marker for markers in found for marker in markers}

    for checkpoint in (3, 4, 5):
        hook.trigger(checkpoint)
    hook.notify_checkpoint_aborted(4)
    assert left() == {Marker(3, 0), Marker(5, 0)}
    hook.notify_checkpoint_complete(3)
    assert left() == {Marker(5, 0)}
    hook.trigger(6)
    hook.notify_checkpoint_complete(6)
    assert left() == set()
    hook.trigger(7)
    hook_of(store, 2).reset()
    assert left() == set()


def test_a_marker_that_is_forgotten_stops_nobody(store: Store) -> None:
    hook, reader = hook_of(store), reader_of(store)
    write(store, *range(10))
    hook.trigger(3)
    hook.notify_checkpoint_aborted(3)
    write(store, *range(10, 20))
    values, met = read(reader)
    assert (sorted(values), met) == (list(range(20)), {})


def test_a_segment_that_is_read_to_its_end_waits_at_no_marker(store: Store) -> None:
    hook = hook_of(store)
    write(store, *range(10))
    reader, bounded = reader_of(store), reader_of(store, follow=False)
    write(store, *range(10, 20))
    hook.trigger(3)
    store.seal(NAME)
    values, met = read(reader)
    assert (sorted(values), met) == (list(range(20)), {}), "it counts as cut"
    assert reader.is_finished()
    values, met = read(bounded)
    assert (sorted(values), met) == (list(range(10)), {}), "its end is in front of the marker"
    assert bounded.is_finished()


def test_a_source_without_stream_cuts_brings_no_hook(store: Store) -> None:
    plain = StreamSource(NAME, store.root)
    assert plain.coordinator_hook() is None
    assert not isinstance(plain.open(SourceContext("p", "source", 0, 1, None)), InducedReader)
    cutting = StreamSource(NAME, store.root, stream_cuts=True)
    assert cutting.without_hook() == LookingSource(NAME, store.root, holds=False)
    assert cutting.identity() == plain.identity(), "a pipeline may change from one to the other"


@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_a_stream_that_is_cut_goes_on_behind_every_marker(store: Store, parallelism: int) -> None:  # EI33, SC21
    write(store, *range(40))
    store.seal(NAME)
    expected = [{"key": f"k{n % 7}", "value": n} for n in range(40)]
    check_markers(StreamSource(NAME, store.root, stream_cuts=True), hook_of(store), parallelism, 20, expected)
