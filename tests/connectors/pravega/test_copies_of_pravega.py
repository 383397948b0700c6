"""Copies between a stream of Pravega and one of the store: exact, and the same command again goes on.

Pravega's own client writes, and reads what was copied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers.pravega import SCOPE, PravegaServer, read_all

import headgate as hg
from headgate import testing
from headgate.api.stream_copy import PRAVEGA_COLUMNS, PravegaCopy
from headgate.connectors.pravega.controller import StreamName
from headgate.connectors.pravega.scaled_stream import Position
from headgate.errors import UsageError
from headgate.store.store import Store

PATIENCE_S = 300
ORDERS = pa.schema([("item", pa.string()), ("amount", pa.int64())])


class Place:
    """A store, checkpoints and a server of Pravega."""

    def __init__(self, server: PravegaServer, directory: Path) -> None:
        self.server, self.store, self._checkpoints = server, str(directory / "store"), directory / "checkpoints"

    def copy(self, direction: Any, pravega: str, stream: str, **options: Any) -> Any:
        kills = options.pop("kill", None)
        made = PravegaCopy(direction, pravega, stream, self.server.address, self.store, **options)
        with testing.running(
            made.pipeline(), checkpoint_dir=self._checkpoints, kill_worker_after_checkpoint=kills, parallelism=2
        ) as handle:
            made.stop_at(made.end(), handle, str(self._checkpoints))
            result = handle.wait(PATIENCE_S)
        assert result is not None
        made.release()
        return result

    def append(self, stream: str, rows: list[dict[str, Any]]) -> None:
        with Store.open(self.store) as store, store.writer(stream) as writer:
            writer.append(pa.RecordBatch.from_pylist(rows, schema=store.find(stream).schema))

    def create(self, stream: str, schema: pa.Schema, key: str | None = None, segments: int = 2) -> None:
        with Store.open(self.store) as store:
            store.create_stream(stream, schema, segments=segments, routing_key=key)

    def events(self, stream: str) -> list[dict[str, Any]]:
        with Store.open(self.store) as store:
            return [row for one in store.follow(stream, end="latest") for row in one.batch.to_pylist()]

    def values(self, pravega: str) -> list[str]:
        source = hg.Pravega(self.server.address, pravega, format="text", end="latest")
        source.schema()
        return read_all(source)


@pytest.fixture
def place(pravega: PravegaServer, tmp_path: Path) -> Place:
    return Place(pravega, tmp_path)


def orders(first: int, last: int) -> list[dict[str, Any]]:
    return [{"item": f"item-{number % 5}", "amount": number} for number in range(first, last)]


def per_item(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["item"], []).append(row["amount"])
    return found


def test_a_stream_goes_to_pravega_and_back_with_its_keys_in_order(place: Place) -> None:
    place.create("orders", ORDERS, "item")
    place.append("orders", orders(0, 60))
    target = f"{SCOPE}/copied-{id(place)}"
    place.copy("from-stream", target, "orders", segments=3, kill=1)
    assert place.copy("from-stream", target, "orders").records_in == 60
    place.append("orders", orders(60, 100))
    assert place.copy("from-stream", target, "orders").records_in == 100
    assert per_item([json.loads(value) for value in place.values(target)]) == per_item(orders(0, 100))
    name = StreamName.parse(target)
    assert len(place.server.client.current(name)) == 3

    place.create("back", ORDERS, "item", segments=3)
    place.copy("to-stream", target, "back", kill=1)
    assert per_item(place.events("back")) == per_item(orders(0, 100))
    place.append("orders", orders(100, 120))
    place.copy("from-stream", target, "orders")
    place.copy("to-stream", target, "back")
    assert per_item(place.events("back")) == per_item(orders(0, 120))


def test_a_missing_stream_is_created_for_events_as_they_are(place: Place) -> None:
    pravega = place.server.create_stream(2)
    keys = [f"k{number % 3}" for number in range(30)]
    place.server.write(pravega, [f"{key}:{number}" for number, key in enumerate(keys)], keys)
    place.copy("to-stream", pravega, "raw")
    with Store.open(place.store) as store:
        found = store.find("raw")
        assert (found.segments_count, found.routing_key, found.schema) == (1, None, PRAVEGA_COLUMNS)
    values = [row["value"].decode() for row in place.events("raw")]
    for key in sorted(set(keys)):  # keys that Pravega kept in order stay in order
        mine = [value for value in values if value.startswith(key)]
        assert mine == [f"{key}:{number}" for number, one in enumerate(keys) if one == key]


def test_events_with_keys_beside_them_go_to_pravega_as_they_are(place: Place) -> None:
    place.create("keyed", pa.schema([("key", pa.string()), ("value", pa.binary())]), "key")
    place.append("keyed", [{"key": "é", "value": b"1"}, {"key": "é", "value": b""}, {"key": "é", "value": b"3"}])
    target = place.server.create_stream(4)
    place.copy("from-stream", target, "keyed")
    assert place.values(target) == ["1", "", "3"]
    with pytest.raises(UsageError, match="Pravega does not keep the keys of events"):
        place.copy("to-stream", target, "keyed")


def test_a_stream_that_was_scaled_is_copied_to_its_end(place: Place) -> None:
    pravega = place.server.create_stream(1)
    place.server.write(pravega, ["1", "2"], ["a", "b"])
    place.server.scale(pravega, [0], [(0.0, 0.5), (0.5, 1.0)])
    place.copy("to-stream", pravega, "scaled", kill=1)  # nothing is in the segments that are its end now
    assert sorted(row["value"] for row in place.events("scaled")) == [b"1", b"2"]
    place.server.write(pravega, ["3", "4"], ["a", "b"])
    place.copy("to-stream", pravega, "scaled")
    assert sorted(row["value"] for row in place.events("scaled")) == [b"1", b"2", b"3", b"4"]


def test_the_end_is_not_reached_before_what_it_follows_was_read(place: Place) -> None:
    pravega = place.server.create_stream(1)
    later = place.server.scale(pravega, [0], [(0.0, 0.5), (0.5, 1.0)])
    copy = PravegaCopy("to-stream", pravega, "s", place.server.address, place.store)
    end = copy.end()
    assert end == dict.fromkeys(later, 0)
    begun, ended = Position(0).encode(), Position(0, {one: [0] for one in later}).encode()
    assert not copy.is_past_elsewhere(end, {f"{pravega}/0": begun})
    assert not copy.is_past_elsewhere(end, {f"{pravega}/0": ended, f"{pravega}/{later[0]}": begun})
    assert copy.is_past_elsewhere(end, {f"{pravega}/{one}": begun for one in later})
    assert copy.is_past_elsewhere({0: 8}, {f"{pravega}/{later[0]}": begun})  # restored without what was read to its end


def test_a_sealed_stream_is_copied_to_its_end_and_the_copy_has_finished(place: Place) -> None:
    pravega = place.server.create_stream(2)
    place.server.write(pravega, ["1", "2"], ["a", "b"])
    place.server.seal(pravega)
    for _ in range(2):
        assert place.copy("to-stream", pravega, "sealed").is_finished
    assert sorted(row["value"] for row in place.events("sealed")) == [b"1", b"2"]


def test_what_cannot_be_copied_is_refused_before_it_begins(place: Place) -> None:
    with pytest.raises(UsageError, match="there is no stream store at"):
        place.copy("from-stream", f"{SCOPE}/x", "nothing")
    place.create("numbers", pa.schema([("n", pa.float64())]))
    with pytest.raises(UsageError, match="has no stream 'tests/x'; create it, or give create=4"):
        place.copy("from-stream", f"{SCOPE}/x", "numbers")
    with pytest.raises(UsageError, match="has no stream 'tests/x'; create it first"):
        place.copy("to-stream", f"{SCOPE}/x", "numbers")
    with pytest.raises(UsageError, match="a stream of Pravega is named 'scope/stream'"):
        place.copy("to-stream", "x", "numbers")
    place.append("numbers", [{"n": float("nan")}])
    with pytest.raises(hg.PipelineFailed, match="NaN or infinite"):
        place.copy("from-stream", f"{SCOPE}/x", "numbers", segments=1)
