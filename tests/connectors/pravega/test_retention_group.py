"""Reader groups that hold a stream back from truncation while checkpoints need its events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs.test_storages import WAIT_S, Watching
from tests.servers.pravega import SCOPE, PravegaServer, context

import headgate as hg
from headgate import testing
from headgate.connectors.base import HoldContext
from headgate.connectors.pravega.controller import Release, StreamName
from headgate.connectors.pravega.scaled_stream import Position
from headgate.connectors.pravega.source import Pravega
from headgate.errors import UsageError
from headgate.model.ids import Generation

pytestmark = pytest.mark.xdist_group("pravega")
"""They share a server."""

HOLDER = HoldContext("p", "in", "life", Generation(1))
EVENT = 8 + 2
"""Bytes of an event of two characters."""


def group_name() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


def filled(server: PravegaServer, segments: int = 1, count: int = 30) -> str:
    """Return a stream with events, all of one key if it has one segment."""
    stream = server.create_stream(segments)
    events = [f"{number:02}" for number in range(count)]
    server.write(stream, events, events)
    return stream


def source_of(server: PravegaServer, stream: str, group: str, **options: Any) -> Pravega:
    made = Pravega(server.address, stream, format="text", group=group, **options)
    made.schema()
    return made


def at(stream: str, offsets: Mapping[int, Position | int]) -> dict[str, bytes]:
    """Return positions as a checkpoint has them."""
    places = {one: place if isinstance(place, Position) else Position(place) for one, place in offsets.items()}
    return {f"{stream}/{one}": place.encode() for one, place in places.items()}


def check_released(server: PravegaServer, stream: str, name: str, cut: dict[int, int]) -> None:
    """Check that ``cut`` is what the group has released: the controller takes it again, and nothing in front of it."""
    group = server.client.group(SCOPE, name)
    assert group is not None
    where = StreamName.parse(stream)
    for segment, offset in cut.items():
        if offset:
            assert server.client.release(where, group, {**cut, segment: offset - 1}) is Release.GOES_BACK
    assert server.client.release(where, group, cut) is Release.DONE


def test_what_the_oldest_checkpoint_needs_is_not_released(pravega: PravegaServer) -> None:
    """PV10."""
    stream, name = filled(pravega), group_name()
    source = source_of(pravega, stream, name)
    assert source.holds
    source.hold(HOLDER, [])
    check_released(pravega, stream, name, {0: 0})
    for _ in range(2):
        source.hold(HOLDER, [at(stream, {0: 5 * EVENT}), at(stream, {0: 3 * EVENT}), at(stream, {0: 9 * EVENT})])
    check_released(pravega, stream, name, {0: 3 * EVENT})
    source.hold(HOLDER, [{}, at(stream, {0: 9 * EVENT})])
    check_released(pravega, stream, name, {0: 3 * EVENT})


def test_a_late_generation_does_not_move_the_group_back(pravega: PravegaServer) -> None:
    stream, name = filled(pravega), group_name()
    source_of(pravega, stream, name).hold(replace(HOLDER, generation=Generation(2)), [at(stream, {0: 6 * EVENT})])
    source_of(pravega, stream, name).hold(HOLDER, [at(stream, {0: 2 * EVENT})])
    check_released(pravega, stream, name, {0: 6 * EVENT})


def test_a_pipeline_that_starts_over_holds_what_is_left(pravega: PravegaServer) -> None:
    stream, name = filled(pravega), group_name()
    source_of(pravega, stream, name).hold(HOLDER, [at(stream, {0: 6 * EVENT})])
    pravega.truncate(stream, {0: 4 * EVENT})
    source_of(pravega, stream, name).hold(replace(HOLDER, life="next"), [])
    check_released(pravega, stream, name, {0: 4 * EVENT})


def test_a_group_that_was_forgotten_or_whose_stream_was_made_again_holds_again(pravega: PravegaServer) -> None:
    stream, name = filled(pravega), group_name()
    where, source = StreamName.parse(stream), source_of(pravega, stream, name)
    with pytest.raises(UsageError, match=f"has no reader group '{name}'"):
        source.forget_group()
    source.hold(HOLDER, [at(stream, {0: 6 * EVENT})])
    for _ in range(2):
        source.forget_group()
        group = pravega.client.group(SCOPE, name)
        assert group is not None
        assert not pravega.client.is_subscribed(where, group)
    source.hold(HOLDER, [at(stream, {0: 5 * EVENT})])
    check_released(pravega, stream, name, {0: 5 * EVENT})
    pravega.seal(stream)
    pravega.delete(stream)
    pravega.client.create_stream(where, 1)
    pravega.write(stream, ["00", "01"])
    (segment,) = pravega.client.head(where)
    source_of(pravega, stream, name).hold(HOLDER, [at(stream, {segment: EVENT})])
    check_released(pravega, stream, name, {segment: EVENT})


def test_a_group_of_another_is_refused(pravega: PravegaServer) -> None:
    stream, name, foreign = filled(pravega), group_name(), group_name()
    source_of(pravega, stream, name).hold(HOLDER, [])
    for other in (replace(HOLDER, pipeline="q"), replace(HOLDER, node="other")):
        with pytest.raises(UsageError, match=r"belongs to another pipeline, source or program.*give each source"):
            source_of(pravega, stream, name).hold(other, [])
    with pytest.raises(UsageError, match="is for another stream"):
        source_of(pravega, filled(pravega), name).hold(HOLDER, [])
    pravega.client.create_group(StreamName.parse(stream), foreign, uuid.uuid4())
    with pytest.raises(UsageError, match="belongs to another"):
        source_of(pravega, stream, foreign).hold(HOLDER, [])
    with pytest.raises(UsageError, match="was not made by Headgate"):
        source_of(pravega, stream, foreign).forget_group()


def test_a_look_makes_no_group(pravega: PravegaServer) -> None:
    name = group_name()
    look = source_of(pravega, filled(pravega), name).without_hook()
    assert not look.holds
    assert pravega.client.group(SCOPE, name) is None


def test_a_scaled_stream_is_released_segment_by_segment(pravega: PravegaServer) -> None:
    """PV11."""
    stream, name = filled(pravega, 2), group_name()
    begin = {0: 0, 1: 0}
    source = source_of(pravega, stream, name, start=begin)
    pravega.scale(stream, [0], [(0.0, 0.25), (0.25, 0.5)])
    pravega.write(stream, ["xx"] * 20, [f"k{number}" for number in range(20)])
    first, second = (1 << 32) + 2, (1 << 32) + 3
    reader = source.open(context())
    found: dict[str, bytes] = {}
    deadline = time.monotonic() + 600
    while f"{stream}/{second}" not in found:
        assert time.monotonic() < deadline
        reader.poll()
        found = reader.positions()
    reader.close()
    places = {int(split.rpartition("/")[2]): Position.decode(split, data) for split, data in found.items()}
    waiting = {one: place for one, place in places.items() if one != second}
    source.hold(HOLDER, [at(stream, waiting)])
    check_released(pravega, stream, name, {1: places[1].offset, first: places[first].offset, second: 0})
    later = {1: places[1].offset, first: places[first].offset, second: places[second].offset}
    source.hold(HOLDER, [at(stream, waiting), at(stream, later)])
    check_released(pravega, stream, name, later | {second: 0})
    source.hold(HOLDER, [at(stream, later)])
    check_released(pravega, stream, name, later)


@pytest.mark.timeout(1_800)
def test_pravega_truncates_up_to_the_oldest_checkpoint_of_a_pipeline(pravega: PravegaServer, tmp_path: Path) -> None:
    stream, name = pravega.create_stream(2), group_name()
    events = [f"{number}" for number in range(2_000)]
    pravega.write(stream, events, events)
    pipeline_name, found = f"p-{uuid.uuid4().hex}", testing.Collect(tmp_path / "out")
    for _ in range(2):  # the second start releases what the first has read
        watching = Watching()
        pipeline = hg.Pipeline(
            pipeline_name, checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path / "checkpoints")
        )
        source = hg.Pravega(pravega.address, stream, format="text", group=name)
        pipeline.source(source, name="in").sink(found, name="out")
        with testing.running(pipeline, observer=watching, parallelism=2) as run:
            while len(found.rows()) < len(events):
                watching.wait_checkpoints(1)
            watching.wait_checkpoints(2)
            run.stop()
            assert run.wait(WAIT_S) is not None
    assert sorted(int(row["value"]) for row in found.rows()) == list(range(2_000))

    where = StreamName.parse(stream)
    group = pravega.client.group(SCOPE, name)
    assert group is not None
    assert pravega.client.release(where, group, {0: 0, 1: 0}) is Release.GOES_BACK
    pravega.retain(stream, 2)
    pravega.write(stream, ["more"])
    deadline = time.monotonic() + 900
    while not any(pravega.client.head(where).values()):
        assert time.monotonic() < deadline, "nothing is released"
        time.sleep(0.2)
    assert pravega.client.release(where, group, pravega.client.head(where)) is Release.DONE, "not beyond the group"
