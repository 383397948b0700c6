"""A source that begins or ends at a stream cut reads exactly what lies between, scaled or not."""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.storing import Clock, chunks_of

from headgate.connectors.base import SourceContext
from headgate.connectors.streams import StreamSource, StreamSourceReader
from headgate.errors import TruncatedError, UsageError
from headgate.model.ids import Generation
from headgate.storage.local import LocalStorage
from headgate.store.store import Store
from headgate.store.streams import StreamCut

NAME = "app/events"
SCHEMA = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
KEYS = "abcdefgh"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream(NAME, SCHEMA, segments=2, routing_key="key")
    return store


def write(store: Store, *rounds: int) -> None:
    with store.writer(NAME) as writer:
        for number in rounds:
            writer.append(pa.record_batch([list(KEYS), [number] * len(KEYS)], schema=SCHEMA))


def readers(
    source: StreamSource, parallelism: int, positions: dict[str, bytes] | None = None, generation: int = 1
) -> list[StreamSourceReader]:
    return [
        source.open(
            SourceContext(
                *("p", "source", index, parallelism, positions, Generation(generation)),
                life="life",
                takes_checkpoints=False,
            )
        )
        for index in range(parallelism)
    ]


def read(those: list[StreamSourceReader]) -> dict[str, list[int]]:
    """Everything that there is, in turn, by key."""
    found: dict[str, list[int]] = defaultdict(list)
    silent = 0
    while silent < 3:
        silent += 1
        for reader in those:
            batch = reader.poll()
            if batch is not None:
                silent = 0
                for key, value in zip(*batch.batch.to_pydict().values(), strict=True):
                    found[key].append(value)
    return dict(found)


def all_of(*rounds: int) -> dict[str, list[int]]:
    return {key: list(rounds) for key in KEYS} if rounds else {}


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_pipeline_reads_what_lies_between_two_cuts(store: Store, parallelism: int) -> None:
    write(store, 0)
    first = store.tail(NAME)
    write(store, 1)
    store.split(NAME, 0)
    write(store, 2)
    second = store.tail(NAME)
    store.merge(NAME, [3, 1])
    write(store, 3)
    for begin, end, expected in (
        (first, second, all_of(1, 2)),
        (str(first), None, all_of(1, 2, 3)),
        ("earliest", str(second), all_of(0, 1, 2)),
        (store.head(NAME), first, all_of(0)),
        (second, first, {}),
        (second, second, {}),
    ):
        source = StreamSource(NAME, store.root, start=begin, end=end)
        those = readers(source, parallelism)
        assert read(those) == expected
        assert (source.how_to_end() is None) == (end is not None)
        assert all(reader.is_finished() for reader in those) == (end is not None)


def test_a_pipeline_reads_what_came_from_a_date_on(store: Store) -> None:
    write(store, 0)
    store.split(NAME, 1)
    cut = store.cut_at(NAME, dt.datetime(2200, 1, 1, tzinfo=dt.UTC))
    write(store, 1)
    assert read(readers(StreamSource(NAME, store.root, start=cut), 1)) == all_of(1)
    early = store.cut_at(NAME, dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
    assert read(readers(StreamSource(NAME, store.root, start=early, follow=False), 2)) == all_of(0, 1)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_segment_that_was_closed_behind_the_date_is_read_from_the_date_on(store: Store, parallelism: int) -> None:
    clock = Clock(1_000_000, date_ms=0)
    dated = Store(store.root, store._core.catalogue, LocalStorage(chunks_of(store)), clock=clock)
    for number in range(3):
        clock.now_ms += 60_000
        write(dated, number)
    dated.split(NAME, 0)
    write(dated, 3)
    cut = dated.cut_at(NAME, dt.datetime.fromtimestamp((clock.now_ms - 90_000) / 1_000, dt.UTC))
    assert read(readers(StreamSource(NAME, store.root, start=cut), parallelism)) == all_of(1, 2, 3)
    assert read(readers(StreamSource(NAME, store.root, end=cut), parallelism)) == all_of(0)


def test_from_the_latest_event_on_up_to_a_cut_there_is_nothing(store: Store) -> None:
    write(store, 0)
    end = store.tail(NAME)
    write(store, 1)
    source = StreamSource(NAME, store.root, start="latest", end=end)
    those = readers(source, 2)
    assert read(those) == {}
    assert all(reader.is_finished() for reader in those)


def test_what_lies_between_two_cuts_is_read_whatever_was_scaled(store: Store) -> None:
    """Restarted in between at another parallelism, from the positions that a checkpoint would have."""
    chance = random.Random(7)
    cuts, number = [store.tail(NAME)], 0
    for _ in range(8):
        for _ in range(chance.randrange(3)):
            write(store, number)
            number += 1
        cuts.append(store.tail(NAME))
        present = [segment.segment_id for segment in store.layout(NAME).present]
        at = chance.randrange(len(present))
        if chance.random() < 0.5 or len(present) == 1:
            store.split(NAME, present[at])
        else:
            store.merge(NAME, present[at : at + 2] if at + 1 < len(present) else present[at - 1 :])
    for generation in range(1, 13):
        begin, end = sorted(chance.sample(range(len(cuts)), 2))
        source = StreamSource(NAME, store.root, start=cuts[begin], end=cuts[end])
        those = readers(source, chance.randrange(1, 4), generation=2 * generation)
        found: dict[str, list[int]] = defaultdict(list)
        for reader in those:
            batch = reader.poll()
            for row in [] if batch is None else batch.batch.to_pylist():
                found[row["key"]].append(row["value"])
        stored = {split: data for reader in those for split, data in reader.positions().items()}
        for key, values in read(readers(source, chance.randrange(1, 4), stored, 2 * generation + 1)).items():
            found[key] += values
        assert sum(map(len, found.values())) == store.events_between(cuts[begin], cuts[end])
        assert len({tuple(values) for values in found.values()}) <= 1
        assert all(values == list(range(values[0], values[-1] + 1)) for values in found.values())


def test_what_is_gone_behind_the_start_is_missed_with_an_error(store: Store) -> None:
    write(store, 0)
    begin = store.tail(NAME)
    store.split(NAME, 0)
    write(store, 1)
    tail = store.tail(NAME)
    later = {segment: end for segment, end in tail.positions.items() if segment not in begin.positions}
    store.truncate(StreamCut(NAME, tail.stream_id, later))  # of segments that the start does not name
    with pytest.raises(TruncatedError):
        read(readers(StreamSource(NAME, store.root, start=begin), 1))


def test_a_cut_of_another_stream_is_refused_before_anything_runs(store: Store) -> None:
    store.create_stream("other", SCHEMA)
    for given in (store.tail("other"), "noon", 7):
        with pytest.raises(UsageError, match="start of stream 'app/events' must be 'earliest', 'latest' or a Str"):
            StreamSource(NAME, store.root, start=given)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="end of stream 'app/events' must be a StreamCut of it"):
            StreamSource(NAME, store.root, end=given)  # type: ignore[arg-type]
    former = StreamSource(NAME, store.root, start=StreamCut(NAME, 99, {0: 0}))
    with pytest.raises(UsageError, match="of a former stream 'app/events', or of another store"):
        former.schema()
    assert hash(former) == hash(StreamSource(NAME, store.root, start=former.start))
