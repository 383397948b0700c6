"""What was on its way to a broadcast side when barriers overtook: replayed with the copy that it belongs to (BC6)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.operators.process.broadcast_functions import LIMIT, READING, Unkeyed

import headgate as hg
from headgate.codec.snapshot import BROADCAST_PREFIX, IN_FLIGHT_PREFIX
from headgate.model.graph import BROADCAST_INPUT
from headgate.model.ids import ChannelIndex, CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import Manifest, SnapshotPart, SubtaskEntry
from headgate.model.plan import Plan
from headgate.runtime.checkpoints import restore
from headgate.runtime.checkpoints.channel_state import ChannelState, named_channels, restored_records
from headgate.runtime.checkpoints.restore import parts_for_worker, read_restored
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.runtime.worker.deployment import edge_schemas
from headgate.storage.memory import MemoryStorage

APPLY = VertexId("apply")


def definition_of(parallelism: int) -> Any:
    pipeline = hg.Pipeline("p", parallelism=parallelism)
    rules = pipeline.source(hg.FromRows([{"name": "a", "limit": 1}]), name="rules")
    events = pipeline.source(hg.FromRows([{"key": 1, "name": "a", "value": 1}]), name="events")
    events.rebalance().connect(rules.broadcast()).process(Unkeyed(), name="apply").sink(hg.Discard(), name="out")
    return pipeline.definition()


def batch(is_rule: bool, number: int) -> pa.RecordBatch:
    row = {"name": "a", "limit": number} if is_rule else {"key": 1, "name": "a", "value": number}
    return pa.RecordBatch.from_pylist([row], LIMIT if is_rule else READING)


def recorded(parallelism: int, storage: MemoryStorage) -> Manifest:
    """Return a checkpoint in which subtask i had processed i + 1 of 10 rules, and had 3 events on their way."""
    definition = definition_of(parallelism)
    entries = []
    for subtask in definition.plan.subtasks():
        to = SnapshotDestination(storage, "p", Generation(1), 0, None)
        target = SubtaskTarget(to, subtask, CheckpointId(1))
        if subtask.vertex == APPLY:
            ways = named_channels(definition.plan, subtask, edge_schemas(definition))
            found: dict[ChannelIndex, list[pa.RecordBatch]] = {}
            for way in ways:
                if way.channel.upstream.index == 0:
                    is_rule = way.channel.edge.input == BROADCAST_INPUT
                    numbers = (
                        range(subtask.index + 1, 10) if is_rule else range(10 * subtask.index, 10 * subtask.index + 3)
                    )
                    found[way.channel.channel] = [batch(is_rule, number) for number in numbers]
            target.put_state("apply", ChannelState(ways, found), IN_FLIGHT_PREFIX)
        entries.append(SubtaskEntry(subtask, target.finish()))
    return Manifest(CheckpointId(1), Generation(1), parallelism, 128, tuple(entries))


def replayed(manifest: Manifest, storage: MemoryStorage, plan: Plan, definition: Any, index: int) -> list[list[int]]:
    """Return what a subtask replays, in its order: rules as [0, number], events as [1, number]."""
    messages = parts_for_worker(manifest, plan, WorkerIndex(index))
    snapshots = read_restored(storage, "p", WorkerIndex(index), plan, messages)
    subtask = SubtaskId(APPLY, index)
    ways = named_channels(plan, subtask, edge_schemas(definition))
    inputs = {way.channel.channel: way.channel.edge.input for way in ways}
    found = restored_records(snapshots.in_flight(plan.vertex(APPLY)), ways, plan, subtask)
    return [
        [0, row["limit"]] if inputs[channel] == BROADCAST_INPUT else [1, row["value"]]
        for channel, one in found
        for row in one.to_pylist()
    ]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_what_is_in_flight_to_a_broadcast_side_is_replayed_with_the_copy_it_belongs_to(before: int, after: int) -> None:
    storage = MemoryStorage()
    manifest, definition = recorded(before, storage), definition_of(after)
    events = []
    for index in range(after):
        found = replayed(manifest, storage, definition.plan, definition, index)
        former = index if before == after else 0
        rules = [[0, number] for number in range(former + 1, 10)]
        assert found[: len(rules)] == rules, "what the copy lacks that this subtask goes on with comes first"
        assert all(is_event for is_event, _ in found[len(rules) :]), "a rule is replayed twice"
        events += [number for _, number in found[len(rules) :]]
    assert sorted(events) == [10 * former + number for former in range(before) for number in range(3)]


def test_unions_and_the_first_copy_of_broadcast_state_go_to_everybody() -> None:  # BC5
    sections = {f"{BROADCAST_PREFIX}a": (True, False), "union/a": (True, True), "lists/a": (False, False)}
    for section, expected in sections.items():
        part = SnapshotPart(0, 0, inline=b"", section=section)
        assert tuple(restore.is_for_all_workers(part, writer) for writer in (0, 1)) == expected
