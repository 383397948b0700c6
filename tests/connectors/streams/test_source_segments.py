"""A source reads a stream that is scaled meanwhile: segments are taken up, each event once, in order."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest

from headgate.connectors.base import CheckpointMarker, HoldContext, SourceContext
from headgate.connectors.streams import StreamSource, StreamSourceReader
from headgate.errors import StorageError, TruncatedError
from headgate.model.ids import Generation
from headgate.operators.checkpoint_listeners import SnapshotContext
from headgate.store.catalogue.records import Reading
from headgate.store.store import Store

SCHEMA = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
NAME = "app/events"
KEYS = "abcdefghijklmnop"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream(NAME, SCHEMA, segments=2, routing_key="key")
    return store


def write(store: Store, value: int) -> None:
    with store.writer(NAME) as writer:
        writer.append(pa.record_batch([list(KEYS), [value] * len(KEYS)], schema=SCHEMA))


class Readers:
    """The subtasks of a source in one generation, and what went through them: per key, in order."""

    def __init__(
        self,
        store: Store,
        source: StreamSource,
        parallelism: int = 2,
        positions: dict[str, bytes] | None = None,
        generation: int = 1,
        life: str = "life",
        takes_checkpoints: bool = True,
    ) -> None:
        self.store = store
        self.subtasks: list[StreamSourceReader] = [
            source.open(
                SourceContext(
                    "p",
                    "source",
                    index,
                    parallelism,
                    positions,
                    Generation(generation),
                    life=life,
                    takes_checkpoints=takes_checkpoints,
                )
            )
            for index in range(parallelism)
        ]
        self.found: dict[str, list[int]] = defaultdict(list)
        self.checkpoint = 0

    def poll(self, index: int) -> int:
        """Read all that is there now; return how many events."""
        count = 0
        for _ in range(1_000):
            polled = self.subtasks[index].poll()
            if polled is None:
                return count
            assert not isinstance(polled, CheckpointMarker)
            for row in polled.batch.to_pylist():
                self.found[row["key"]].append(row["value"])
                count += 1
        raise AssertionError("it never ends")

    def poll_all(self) -> int:
        return sum(self.poll(index) for index in range(len(self.subtasks)))

    def snapshot(self) -> dict[str, bytes]:
        self.checkpoint += 1
        positions: dict[str, bytes] = {}
        for subtask in self.subtasks:
            mine = subtask.positions()
            assert not mine.keys() & positions.keys()
            positions |= mine
            subtask.snapshot(SnapshotContext(self.checkpoint))
        return positions

    def complete(self) -> dict[str, bytes]:
        positions = self.snapshot()
        for subtask in self.subtasks:
            subtask.notify_checkpoint_complete(self.checkpoint)
        return positions

    def expect(self, *values: int) -> None:
        assert dict(self.found) == {key: list(values) for key in KEYS}


def source(store: Store, **options: object) -> StreamSource:
    return StreamSource(NAME, store.root, **options)  # type: ignore[arg-type]


def splits(readers: Readers) -> list[list[str]]:
    return [[split.rpartition("/")[2] for split in subtask.splits()] for subtask in readers.subtasks]


def test_segments_that_follow_are_read_by_who_read_those_before(store: Store) -> None:
    readers = Readers(store, source(store))
    write(store, 0)
    store.split(NAME, 0)
    write(store, 1)
    assert splits(readers) == [["0"], ["1"]]
    readers.poll_all()
    assert splits(readers) == [["2", "3"], ["1"]]
    readers.expect(0, 1)


def test_a_segment_that_follows_those_of_two_subtasks_waits_for_a_checkpoint(store: Store) -> None:
    """What the other one has read may be anywhere in the pipeline before."""
    readers = Readers(store, source(store))
    write(store, 0)
    store.merge(NAME, [0, 1])
    write(store, 1)
    readers.poll_all()
    readers.poll_all()
    readers.expect(0)
    assert splits(readers) == [["2"], []]  # it holds event time back
    readers.complete()
    readers.poll_all()
    readers.expect(0, 1)


def test_a_checkpoint_that_began_before_the_end_of_a_segment_does_not_count(store: Store) -> None:
    readers = Readers(store, source(store))
    write(store, 0)
    store.merge(NAME, [0, 1])
    write(store, 1)
    readers.poll(0)
    readers.snapshot()
    readers.poll(1)
    for subtask in readers.subtasks:
        subtask.notify_checkpoint_complete(1)
    readers.poll_all()
    readers.expect(0)
    readers.snapshot()
    readers.complete()  # 2 was aborted
    readers.poll_all()
    readers.expect(0, 1)


def test_what_cannot_be_told_is_told_with_the_next_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers(store, source(store))
    write(store, 0)
    store.merge(NAME, [0, 1])
    write(store, 1)
    readers.poll_all()

    def fail(*_: object) -> None:
        raise StorageError("write", "catalogue", "busy", is_transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(store._core.catalogue, "pass_segments", fail)
        readers.complete()
    readers.poll_all()
    readers.expect(0)
    readers.complete()
    readers.poll_all()
    readers.expect(0, 1)


def test_without_checkpoints_nobody_waits_for_one(store: Store) -> None:
    readers = Readers(store, source(store), takes_checkpoints=False)
    write(store, 0)
    store.merge(NAME, [0, 1])
    write(store, 1)
    readers.poll_all()
    readers.poll_all()
    readers.expect(0, 1)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_restored_source_goes_on_wherever_it_was(store: Store, parallelism: int) -> None:
    write(store, 0)
    readers = Readers(store, source(store))
    readers.poll(0)
    store.split(NAME, 0)
    store.merge(NAME, [3, 1])
    write(store, 1)
    readers.poll(0)
    saved, found = readers.complete(), readers.found
    store.split(NAME, 4)
    write(store, 2)
    again = Readers(store, source(store), parallelism, saved, generation=2)
    again.found = defaultdict(list, {key: list(values) for key, values in found.items()})
    for _ in range(3):
        again.poll_all()
        again.complete()
    again.expect(0, 1, 2)


def test_what_former_generations_passed_counts_for_nothing(store: Store) -> None:
    """They may have been ahead of the checkpoint that is restored."""
    write(store, 0)
    readers = Readers(store, source(store))
    saved = readers.complete()
    store.merge(NAME, [0, 1])
    write(store, 1)
    readers.poll_all()
    readers.complete()
    again = Readers(store, source(store), 2, saved, generation=2)
    again.poll(0)
    again.poll(0)
    assert splits(again)[0] == ["2"]
    again.poll(1)
    again.complete()
    again.poll_all()
    again.expect(0, 1)


@pytest.mark.parametrize(
    ("start", "holds"), [("earliest", True), ("latest", True), ("earliest", False), ("latest", False)]
)
def test_subtasks_that_begin_while_a_stream_is_scaled_begin_at_one_moment(
    store: Store, start: str, holds: bool
) -> None:
    write(store, 0)
    context = SourceContext("p", "source", 0, 2, None, Generation(1), life="life")
    readers = Readers.__new__(Readers)
    readers.store, readers.found, readers.checkpoint = store, defaultdict(list), 0
    first = source(store, start=start, holds=holds).open(context)
    write(store, 1)
    store.merge(NAME, [0, 1])
    store.split(NAME, 2, 3)
    write(store, 2)
    second = source(store, start=start, holds=holds).open(
        SourceContext("p", "source", 1, 2, None, Generation(1), life="life")
    )
    readers.subtasks = [first, second]
    for number in range(3, 6):
        readers.poll_all()
        readers.complete()
        write(store, number)
    readers.poll_all()
    readers.expect(*(range(6) if start == "earliest" else range(1, 6)))


def test_a_bounded_read_ends_where_its_first_subtask_saw_the_end(store: Store) -> None:
    write(store, 0)
    store.merge(NAME, [0, 1])
    store.split(NAME, 2)
    write(store, 1)
    bounded = source(store, follow=False)
    first = bounded.open(SourceContext("p", "source", 0, 2, None, Generation(1), life="life"))
    write(store, 2)
    store.split(NAME, 3)
    write(store, 3)
    readers = Readers(store, bounded)
    readers.subtasks[0] = first
    saved = readers.complete()
    for generation in (1, 2):
        for _ in range(3):
            readers.poll_all()
            readers.complete()
        readers.expect(0, 1)
        assert all(subtask.is_finished() for subtask in readers.subtasks)
        readers = Readers(store, bounded, 3, saved, generation=generation + 1)
        write(store, 9)


def test_another_life_of_a_pipeline_begins_at_a_moment_of_its_own(store: Store) -> None:
    for life, value in (("first", 0), ("second", 1)):
        write(store, value)
        readers = Readers(store, source(store, follow=False), life=life)
        readers.poll_all()
        readers.expect(*range(value + 1))


def test_a_followed_stream_ends_when_it_is_sealed(store: Store) -> None:
    readers = Readers(store, source(store), 3)
    write(store, 0)
    store.split(NAME, 1)
    write(store, 1)
    readers.poll_all()
    assert not any(subtask.is_finished() for subtask in readers.subtasks)
    store.seal(NAME)
    readers.poll_all()
    assert all(subtask.is_finished() for subtask in readers.subtasks)
    readers.expect(0, 1)


def test_a_scaled_stream_is_the_same_stream(store: Store) -> None:  # a checkpoint stays good
    before = source(store).identity()
    store.resize(NAME, 5)
    assert source(store).identity() == before


def test_holds_know_what_was_read_before_a_stream_was_scaled(store: Store) -> None:
    write(store, 0)
    readers = Readers(store, source(store))
    early = readers.complete()
    readers.poll_all()
    store.split(NAME, 0)
    write(store, 1)
    readers.poll_all()
    late = readers.complete()
    write(store, 2)
    context = HoldContext("p", "source", "life", Generation(1))
    source(store).hold(context, [early, late])
    assert store.events_between(store.holds(NAME)["p/source"]) == 3 * len(KEYS)
    source(store).hold(context, [late])
    assert store.events_between(store.holds(NAME)["p/source"]) == len(KEYS)
    again = Readers(store, source(store), 2, late, generation=2)
    saved = again.complete()
    assert not any(split.endswith("/0") for split in saved)  # what follows it tells that it was read
    source(store).hold(HoldContext("p", "source", "life", Generation(2)), [saved])
    assert store.events_between(store.holds(NAME)["p/source"]) == len(KEYS)


def test_a_segment_that_was_truncated_before_it_was_read_is_missed(store: Store) -> None:
    readers = Readers(store, source(store, holds=False))
    saved = readers.complete()
    store.split(NAME, 0)
    write(store, 0)
    store.truncate(store.tail(NAME))
    with pytest.raises(TruncatedError, match="begins at position"):
        Readers(store, source(store), 2, saved, generation=2).poll_all()


# -- streams that are cut at one moment ------------------------------------------------------------------------------


def marked(store: Store, checkpoint: int) -> None:
    store.pipelines.mark(NAME, owner="p/source", generation=1, checkpoint=checkpoint)


def run_to_marker(readers: Readers, checkpoint: int) -> dict[str, bytes]:
    """Read until every split stands behind its marker; return the positions then."""
    met: dict[int, set[str]] = defaultdict(set)
    for _ in range(500):
        for index, subtask in enumerate(readers.subtasks):
            polled = subtask.poll()
            if isinstance(polled, CheckpointMarker):
                if polled.checkpoint_id == checkpoint:
                    met[index].add(polled.split)
                else:
                    subtask.read_on([polled.split])  # type: ignore[attr-defined]
            elif polled is not None:
                for row in polled.batch.to_pylist():
                    readers.found[row["key"]].append(row["value"])
        if all(set(subtask.splits()) <= met[index] for index, subtask in enumerate(readers.subtasks)):
            break
    else:
        raise AssertionError("a marker is never met")
    positions = {split: data for subtask in readers.subtasks for split, data in subtask.positions().items()}
    for index, subtask in enumerate(readers.subtasks):
        subtask.read_on(sorted(met[index]))  # type: ignore[attr-defined]
    return positions


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_cut_goes_through_a_stream_that_is_scaled(store: Store, parallelism: int) -> None:
    readers = Readers(store, source(store, stream_cuts=True), parallelism)
    write(store, 0)
    marked(store, 1)
    store.merge(NAME, [0, 1])
    write(store, 1)
    store.split(NAME, 2)
    write(store, 2)
    marked(store, 2)
    write(store, 3)
    first = run_to_marker(readers, 1)
    readers.expect(0)
    again = Readers(store, source(store, stream_cuts=True), 2, first, generation=1)
    again.found = defaultdict(list, {key: list(values) for key, values in readers.found.items()})
    second = run_to_marker(readers, 2)
    readers.expect(0, 1, 2)
    assert run_to_marker(again, 2) is not None
    again.expect(0, 1, 2)
    last = Readers(store, source(store), 1, second, generation=2)
    last.poll_all()
    last.expect(3)


def test_what_pipelines_have_passed_is_in_the_catalogue(store: Store) -> None:
    readers = Readers(store, source(store))
    store.merge(NAME, [0, 1])
    readers.poll_all()
    readers.complete()
    assert store.pipelines.passed(store.describe(NAME), Reading("p/source", "life", 1)) == {1}  # 0 is its own


def test_progress_is_the_events_read_of_those_that_were_there_at_the_last_look(store: Store) -> None:
    write(store, 1)
    (reader,) = Readers(store, source(store), parallelism=1).subtasks
    assert {one.position for one in reader.progress().values()} == {0}
    while reader.poll() is not None:
        continue
    seen = reader.progress()
    assert sum(one.position for one in seen.values()) == len(KEYS)
    assert all(one.end == one.position for one in seen.values())
    write(store, 2)
    reader.poll()
    assert sum(one.end or 0 for one in reader.progress().values()) > len(KEYS)


def test_progress_of_a_bounded_reading_goes_to_its_end(store: Store) -> None:
    write(store, 1)
    (reader,) = Readers(store, source(store, follow=False), parallelism=1).subtasks
    write(store, 2)
    assert sum(one.end or 0 for one in reader.progress().values()) == len(KEYS)
