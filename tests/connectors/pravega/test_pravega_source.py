"""The source: any restart reads on where it was, and the events of a key stay in order when a stream is scaled."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers.pravega import PravegaServer, context, read_all
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.base import SourceBatch, SourceContext
from headgate.connectors.pravega import reader as reading
from headgate.connectors.pravega.reader import PravegaReader
from headgate.connectors.pravega.segment_store import ask_for_data
from headgate.connectors.pravega.source import Pravega
from headgate.errors import HeadgateError, UsageError
from headgate.testing.source_kit import check_source
from headgate.testing.source_runner import SourceCheckpoint, SourceGeneration

pytestmark = pytest.mark.xdist_group("pravega")
"""They share a server."""

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NEWS_MS", 20)
    monkeypatch.setattr(reading, "SEALED_MS", 20)


class PatientReader(PravegaReader):
    """A reader whose polls wait a little, so that the kit counts few of them."""

    def poll(self) -> SourceBatch | None:
        if (found := super().poll()) is None:
            time.sleep(0.01)  # not a wait for anything
        return found


class PatientSource(Pravega):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.life = uuid.uuid4().hex

    def open(self, context: SourceContext) -> PravegaReader:
        return PatientReader(self.reading(), replace(context, life=self.life))


def keyed(name: str, count: int) -> tuple[list[str], list[str]]:
    """Return events that say their key and their number, and the keys."""
    keys = [f"k{number % 7}" for number in range(count)]
    return [f"{key} {name} {number}" for number, key in enumerate(keys)], keys


def scaled_stream(server: PravegaServer) -> tuple[str, list[str]]:
    """Return a sealed stream in which a segment was split, and a part of it merged with another; and its events."""
    stream, everything = server.create_stream(2), []
    for name, sealed, ranges in (
        ("a", [0], [(0.0, 0.25), (0.25, 0.5)]),
        ("b", [(1 << 32) + 3, 1], [(0.25, 1.0)]),
        ("c", [], []),
    ):
        events, keys = keyed(name, 10)
        server.write(stream, events, keys)
        everything += events
        if sealed:
            server.scale(stream, sealed, ranges)
    server.seal(stream)
    return stream, everything


def check_order(values: list[str]) -> None:
    """Check that the events of each key are in the order in which they were written."""
    by_key: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for value in values:
        key, name, number = value.split()
        by_key[key].append((name, int(number)))
    for found in by_key.values():
        assert found == sorted(found)


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_restart_anywhere_delivers_what_followed(pravega: PravegaServer, is_scaled: bool) -> None:
    """PV1, PV4."""
    if is_scaled:
        stream, events = scaled_stream(pravega)
        found = check_source(lambda: PatientSource(pravega.address, stream, format="text"), parallelisms=(1, 2))
    else:
        stream = pravega.create_stream(3)
        events, keys = keyed("a", 30)
        pravega.write(stream, events, keys)
        found = check_source(
            lambda: PatientSource(pravega.address, stream, format="text", end="latest"), parallelisms=(1, 2)
        )
    assert sorted(row["value"] for row in found) == sorted(events)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_events_of_a_key_stay_in_order_over_splits_and_merges(pravega: PravegaServer, parallelism: int) -> None:
    """PV2, PV3."""
    stream, events = scaled_stream(pravega)
    source = PatientSource(pravega.address, stream, format="text")
    life = SourceGeneration(source, 1, parallelism, SourceCheckpoint())
    rows: list[str] = []
    for poll in range(10_000):
        life.poll(poll % parallelism)
        if len(life.rows) > len(rows):
            rows += [row["value"] for row in life.rows if row["value"] not in rows]  # as they come, of all subtasks
        if poll % 8 == 7:
            life.checkpoint(poll, is_polled=False)
            life.tell_completed(poll)
        if life.is_finished:
            break
    life.close()
    assert sorted(rows) == sorted(events)
    check_order(rows)


def test_what_is_merged_is_not_read_before_a_checkpoint_has_what_it_follows(pravega: PravegaServer) -> None:
    """PV1, PV2."""
    stream = pravega.create_stream(2)
    pravega.write(stream, *keyed("a", 20))
    split = [one for one in pravega.scale(stream, [0], [(0.0, 0.25), (0.25, 0.5)]) if one != 1]
    pravega.write(stream, *keyed("b", 20))
    (merged,) = set(pravega.scale(stream, [split[1], 1], [(0.25, 1.0)])) - {split[0]}
    pravega.write(stream, *keyed("c", 20))
    source = PatientSource(pravega.address, stream, format="text")
    life = SourceGeneration(source, 1, 2, SourceCheckpoint())
    for poll in range(200):
        life.poll(poll % 2)
    begun = life.checkpoint(1, is_polled=False).positions
    assert begun is not None
    assert {f"{stream}/{one}" for one in split} <= begun.keys(), "the same subtask reads on at once"
    assert f"{stream}/{merged}" not in begun, "the other one waits for a checkpoint"
    life.tell_completed(1)
    for poll in range(10_000):
        life.poll(poll % 2)
        if f"{stream}/{merged}" in (life.checkpoint(poll + 2, is_polled=False).positions or {}):
            break
    else:
        pytest.fail("the other subtask does not begin")
    life.close()


def test_a_segment_that_is_sealed_while_its_end_is_awaited_is_read_to_its_end(
    pravega: PravegaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, asked = pravega.create_stream(1), threading.Event()

    def noting(connection: Any, segment: str, offset: int, size: int) -> int:
        number = ask_for_data(connection, segment, offset, size)
        if offset:
            asked.set()
        return number

    monkeypatch.setattr(reading, "ask_for_data", noting)
    pravega.write(stream, ["a"])
    reader = Pravega(pravega.address, stream, format="text").open(context())
    values: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while not reader.is_finished():
        assert time.monotonic() < deadline
        if (found := reader.poll()) is not None:
            values += found.batch.column("value").to_pylist()
        if asked.is_set() and len(values) == 1:
            pravega.scale(stream, [0], [(0.0, 0.5), (0.5, 1.0)])
            pravega.write(stream, ["b", "c"])
            pravega.seal(stream)
            asked.clear()
    reader.close()
    assert sorted(values) == ["a", "b", "c"]


def test_reading_ends_at_a_cut_and_goes_on_behind_it(pravega: PravegaServer) -> None:
    """PV5."""
    stream = pravega.create_stream(1)
    pravega.write(stream, ["a", "b", "c"])
    until = Pravega(pravega.address, stream, format="text", end="latest")
    until.schema()
    pravega.write(stream, ["d", "e"])
    assert read_all(until) == ["a", "b", "c"]
    event = 8 + 1
    assert read_all(Pravega(pravega.address, stream, format="text", end={0: 2 * event})) == ["a", "b"]
    between = Pravega(pravega.address, stream, format="text", start={0: event}, end={0: 4 * event})
    assert read_all(between) == ["b", "c", "d"]
    assert read_all(Pravega(pravega.address, stream, format="text", start={0: 9}, end={0: 9})) == []
    reader = until.open(context())
    while not reader.is_finished():
        reader.poll()
    positions = reader.positions()
    reader.close()
    later = Pravega(pravega.address, stream, format="text", end="latest")
    assert read_all(later, positions) == [], "a restart ends where the first start would have"
    pravega.seal(stream)
    endless = {split: place.replace(b'"after":{}', b'"after":null') for split, place in positions.items()}
    assert read_all(Pravega(pravega.address, stream, format="text"), endless) == ["d", "e"]


def test_a_truncated_position_is_an_error_with_a_remedy(pravega: PravegaServer) -> None:
    """PV6."""
    stream = pravega.create_stream(1)
    pravega.write(stream, ["a", "b", "c"])
    source = Pravega(pravega.address, stream, format="text", end="latest")
    reader = source.open(context())
    positions = reader.positions()
    reader.close()
    pravega.truncate(stream, {0: 18})
    with pytest.raises(UsageError, match=r"begins at offset 18 now.*from offset 0.*start over"):
        read_all(source, positions)
    assert read_all(Pravega(pravega.address, stream, format="text", end="latest")) == ["c"], (
        "a first start begins there"
    )


def test_bad_events_and_places_beside_records(pravega: PravegaServer) -> None:
    stream = pravega.create_stream(1)
    pravega.write(stream, ['{"n": 1}', "nonsense", "", '{"n": 2}'])
    options: dict[str, Any] = {"format": "json", "schema": {"n": int}, "metadata": ["segment", "offset"]}
    source = Pravega(pravega.address, stream, end="latest", **options)
    assert source.schema().names == ["n", "segment", "offset"]
    reader = source.open(context())
    batches = []
    while not reader.is_finished():
        if (found := reader.poll()) is not None:
            batches.append(found)
    reader.close()
    assert [row for one in batches for row in one.batch.to_pylist()] == [
        {"n": 1, "segment": 0, "offset": 0},
        {"n": 2, "segment": 0, "offset": 40},
    ]
    bad = pa.Table.from_batches([one.bad for one in batches if one.bad is not None]).to_pylist()
    assert sorted(row["position"] for row in bad) == [f"stream {stream} segment 0 offset {at}" for at in (16, 32)]


def test_a_big_event_comes_whole(pravega: PravegaServer) -> None:
    stream = pravega.create_stream(1)
    events = ["x" * 2_500_000, "y", "z" * 1_100_000]
    pravega.write(stream, events)
    assert read_all(Pravega(pravega.address, stream, format="text", end="latest")) == events


def test_a_pipeline_reads_on_after_kills_and_at_another_parallelism(pravega: PravegaServer, tmp_path: Path) -> None:
    stream = pravega.create_stream(4)
    events = [f"{number}" for number in range(2_000)]
    pravega.write(stream, events, events)

    pipeline = hg.Pipeline(
        f"p-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path / "checkpoints")
    )
    found = testing.Collect(tmp_path / "out")
    source = hg.Pravega(pravega.address, stream, format="text", end="latest")
    pipeline.source(source, name="in").sink(found, name="out")
    result = run_killing(pipeline, 1, timeout_s=4 * PATIENCE_S, parallelism=2)
    assert result.is_finished
    assert sorted(int(row["value"]) for row in found.rows()) == list(range(2_000))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "debezium-json"}, "format='debezium-json' of a Pravega source"),
        ({"format": "json"}, "needs schema="),
        ({"metadata": ["key"]}, "has no 'key'"),
        ({"start": "sometime"}, "start='sometime' of a Pravega source"),
        ({"end": "earliest"}, "end='earliest' of a Pravega source"),
        ({"end": {0: -1}}, "end={0: -1} of a Pravega source"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed (pip install -e '.[dev]')")
    with pytest.raises(UsageError, match=problem):
        Pravega("127.0.0.1:1", "shop/orders", **options)


def test_what_is_not_there_is_one_sentence(pravega: PravegaServer) -> None:
    stream = pravega.create_stream(2)
    with pytest.raises(UsageError, match="has no stream"):
        Pravega(pravega.address, f"{stream}-x").schema()
    with pytest.raises(UsageError, match="is no stream cut"):
        Pravega(pravega.address, stream, start={0: 0}).schema()
    with pytest.raises(HeadgateError, match=r"Pravega at 127\.0\.0\.1:1"):
        Pravega("127.0.0.1:1", "shop/orders").schema()
