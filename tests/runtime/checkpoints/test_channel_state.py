"""Channel state: written in bounded parts, counted, and processed once at any parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.process.broadcast_functions import LIMIT, READING, Unkeyed

import headgate as hg
from headgate.codec.snapshot import BROADCAST_PREFIX, IN_FLIGHT_PREFIX
from headgate.errors import CorruptionError, UsageError
from headgate.model.graph import BROADCAST_INPUT, Partitioner
from headgate.model.ids import (
    ChannelIndex,
    CheckpointId,
    Generation,
    SubtaskId,
    VertexId,
    WorkerIndex,
    key_groups_of_subtask,
)
from headgate.model.manifest import KeyGroups, Manifest, SnapshotPart, SubtaskEntry
from headgate.model.plan import PipelineDefinition, Plan
from headgate.operators.keys import partition
from headgate.runtime.checkpoints import channel_state, restore
from headgate.runtime.checkpoints.channel_state import (
    ChannelState,
    NamedChannel,
    channel_state_misfit,
    edge_names,
    named_channels,
    restored_records,
)
from headgate.runtime.checkpoints.restore import check_compatible, parts_for_worker, read_restored
from headgate.runtime.checkpoints.snapshot_files import verify_part
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.runtime.worker.deployment import edge_schemas
from headgate.state.snapshot import OwnedKeys
from headgate.storage.memory import MemoryStorage

SCHEMA = pa.schema([("k", pa.int64()), ("id", pa.int64())])
MAX = 128


def definition_of(parallelism: int, *, others: bool = False, by: str = "k") -> PipelineDefinition:
    """A pipeline with an edge of every kind; ``others``: with one less, and other columns on another."""
    pipeline = hg.Pipeline("p", parallelism=parallelism)
    rows = pipeline.source(hg.FromRows([{"k": 1, "id": 1}]), name="in")
    spread = rows.rebalance().filter(lambda row: True, name="spread")
    copied = rows.broadcast().filter(lambda row: True, name="copied")
    joined = spread if others else spread.union(copied).filter(lambda row: True, name="joined")
    copied.sink(hg.Discard(), name="copies")
    if others:
        joined = joined.select("k", "id", more="id")
    joined.key_by(by).reduce(lambda total, row: row, name="sum").sink(hg.Discard(), name="out")
    return pipeline.definition()


def ways(definition: PipelineDefinition, subtask: SubtaskId) -> list[NamedChannel]:
    return named_channels(definition.plan, subtask, edge_schemas(definition))


def keys_of(index: int, parallelism: int) -> OwnedKeys:
    owned = key_groups_of_subtask(index, MAX, parallelism)
    return OwnedKeys(KeyGroups(owned.start, len(owned)), MAX)


class Former:
    """A checkpoint of a pipeline that had ``count`` records in flight on each channel."""

    def __init__(self, parallelism: int, count: int = 7) -> None:
        self.storage = MemoryStorage()
        self.recorded: dict[SubtaskId, dict[ChannelIndex, list[pa.RecordBatch]]] = {}
        definition = definition_of(parallelism)
        self._ids = 0
        entries = []
        for subtask in definition.plan.subtasks():
            mine = ways(definition, subtask)
            found = {way.channel.channel: self._records(way, subtask, parallelism, count) for way in mine}
            self.recorded[subtask] = found
            target = self.target(subtask, parallelism)
            if mine:
                frozen = ChannelState(mine, found)
                target.put_state(str(subtask.vertex), frozen, IN_FLIGHT_PREFIX)
            entries.append(SubtaskEntry(subtask, target.finish()))
        self.manifest = Manifest(CheckpointId(1), Generation(1), parallelism, MAX, tuple(entries))

    def target(self, subtask: SubtaskId, parallelism: int, inline: int = 0) -> SubtaskTarget:
        keys = keys_of(subtask.index, parallelism)
        return SubtaskTarget(
            SnapshotDestination(self.storage, "p", Generation(1), inline, keys), subtask, CheckpointId(1)
        )

    def _records(self, way: NamedChannel, subtask: SubtaskId, parallelism: int, count: int) -> list[pa.RecordBatch]:
        """Return batches that may be on this channel: of a shuffle by key only those of the receiver."""
        found = []
        for _ in range(2):
            ids = range(self._ids, self._ids + count * parallelism)
            self._ids = ids.stop
            batch = pa.record_batch([[i % 11 for i in ids], list(ids)], schema=SCHEMA)
            if way.channel.edge.partitioner is Partitioner.HASH:
                part = partition(batch, way.channel.edge.keys, MAX, parallelism)[subtask.index]
                found += [] if part is None else [part]
            else:
                found.append(batch)
        return found

    def rows(self, vertex: str) -> Counter[int]:
        """Return the records that were on their way to ``vertex``, by id."""
        mine = [by.values() for subtask, by in self.recorded.items() if subtask.vertex == vertex]
        return Counter(i for lists in mine for batches in lists for b in batches for i in b.column("id").to_pylist())

    def replayed(self, vertex: str, index: int, parallelism: int) -> list[tuple[ChannelIndex, pa.RecordBatch]]:
        definition = definition_of(parallelism)
        found = definition.plan.vertex(next(v.id for v in definition.plan.vertices if v.id == vertex))
        messages = parts_for_worker(self.manifest, definition.plan, WorkerIndex(index))
        snapshots = read_restored(self.storage, "p", WorkerIndex(index), definition.plan, messages)
        subtask = SubtaskId(found.id, index)
        mine = ways(definition, subtask)
        return list(restored_records(snapshots.in_flight(found), mine, definition.plan, subtask))


def ids(replayed: list[tuple[ChannelIndex, pa.RecordBatch]]) -> list[int]:
    return [i for _, batch in replayed for i in batch.column("id").to_pylist()]


VERTICES = ("spread", "copied", "joined", "sum")


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_every_recorded_row_is_replayed_once_whatever_the_parallelism(before: int, after: int) -> None:
    former = Former(before)
    for vertex in VERTICES:
        found = Counter(i for index in range(after) for i in ids(former.replayed(vertex, index, after)))
        assert found == former.rows(vertex)
        assert found, "there was something in flight"


def test_at_the_same_parallelism_each_channel_gets_its_own_back() -> None:
    former = Former(3)
    for subtask, by_channel in former.recorded.items():
        replayed = former.replayed(str(subtask.vertex), subtask.index, 3)
        for channel, batches in by_channel.items():
            mine = [batch for on, batch in replayed if on == channel]
            assert ids([(channel, b) for b in mine]) == ids([(channel, b) for b in batches])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_records_of_a_key_go_where_the_key_belongs_in_their_order(before: int, after: int) -> None:
    former = Former(before)
    edge = next(e for e in definition_of(after).plan.edges if e.partitioner is Partitioner.HASH)
    order = {
        i: at
        for subtask, by in former.recorded.items()
        if subtask.vertex == "sum"
        for batches in by.values()
        for at, i in enumerate(ids([(ChannelIndex(0), b) for b in batches]))
    }
    sender = {
        i: channel
        for subtask, by in former.recorded.items()
        if subtask.vertex == "sum"
        for channel, batches in by.items()
        for i in ids([(channel, b) for b in batches])
    }
    for index in range(after):
        replayed = former.replayed("sum", index, after)
        for _, batch in replayed:
            assert partition(batch, edge.keys, MAX, after)[index] is batch
        for key in range(11):
            for channel in set(sender.values()):
                of_key = [i for i in ids(replayed) if i % 11 == key and sender[i] == channel]
                assert of_key == sorted(of_key, key=order.__getitem__)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (6, 3), (3, 1)])
def test_going_down_evenly_keeps_what_belongs_together_together(before: int, after: int) -> None:
    former = Former(before)
    for index in range(after):
        whose = {
            subtask.index
            for subtask, by in former.recorded.items()
            if subtask.vertex == "joined"
            and set(ids(former.replayed("joined", index, after)))
            & set(ids([(ChannelIndex(0), b) for batches in by.values() for b in batches]))
        }
        step = before // after
        assert whose == set(range(index * step, (index + 1) * step))


def test_a_worker_is_sent_only_the_key_groups_that_it_may_own() -> None:
    former = Former(4)
    plan = definition_of(2).plan
    for worker in range(2):
        sent = [
            part.key_groups
            for restored in parts_for_worker(former.manifest, plan, WorkerIndex(worker))
            for part in restored.parts
            if part.section == f"{IN_FLIGHT_PREFIX}sum"
        ]
        assert [groups.first for groups in sent if groups is not None] == [worker * 64, worker * 64 + 32]


def recorded(*sizes: int) -> tuple[ChannelState, dict[ChannelIndex, list[pa.RecordBatch]], SubtaskId]:
    """Batches of so many rows, in turn on the channels of a reduce."""
    definition = definition_of(3)
    subtask = SubtaskId(next(v.id for v in definition.plan.vertices if v.id == "sum"), 1)
    by_channel: dict[ChannelIndex, list[pa.RecordBatch]] = {}
    for at, size in enumerate(sizes):
        batch = pa.record_batch([[at] * size, list(range(size))], schema=SCHEMA)
        by_channel.setdefault(ChannelIndex(at % 3), []).append(batch)
    return ChannelState(ways(definition, subtask), by_channel), by_channel, subtask


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_recorded_records_are_written_in_bounded_parts_and_counted(sizes: list[int]) -> None:
    limit = 50 * 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_state, "PART_BYTES", limit)
        frozen, _, subtask = recorded(*sizes)
        target = SubtaskTarget(
            SnapshotDestination(MemoryStorage(), "p", Generation(1), 1 << 20), subtask, CheckpointId(1)
        )
        target.put_state("sum", frozen, IN_FLIGHT_PREFIX)
        first, second = target.finish(), None
        target = SubtaskTarget(
            SnapshotDestination(MemoryStorage(), "p", Generation(1), 1 << 20), subtask, CheckpointId(1)
        )
        target.put_state("sum", frozen, IN_FLIGHT_PREFIX)
        second = target.finish()
    assert first == second, "it can be written again"
    counted = [sum(cast(Mapping[str, Mapping[str, int]], part.rows)["sum"].values()) for part in first]
    assert sum(counted) == sum(sizes)
    assert all(count * 16 <= limit for count in counted)
    frozen.release()
    with pytest.raises(AssertionError, match="released"):
        frozen.rows()


def test_a_part_is_as_large_as_it_may_be_and_a_larger_batch_is_one_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_state, "PART_BYTES", 4 * 16)
    frozen, _, subtask = recorded(1, 1, 1, 3, 2, 2, 9, 1, 4)  # on each channel in turn: 1 3 9, 1 2 1, 1 2 4
    assert frozen.size_bytes == 24 * 16
    target = SubtaskTarget(SnapshotDestination(MemoryStorage(), "p", Generation(1), 1 << 20), subtask, CheckpointId(1))
    target.put_state("sum", frozen, IN_FLIGHT_PREFIX)
    counted = [sum(cast(Mapping[str, Mapping[str, int]], part.rows)["sum"].values()) for part in target.finish()]
    assert counted == [4, 9, 4, 3, 4]


def test_a_part_with_other_rows_is_refused() -> None:
    former = Former(2)
    entry = next(e for e in former.manifest.entries if e.subtask.vertex == "sum")
    part = entry.parts[0]
    verify_part(former.storage, "p", part)
    state, count = next(iter((part.rows or {})["sum"].items()))
    with pytest.raises(CorruptionError, match=f"{count + 1} rows of state '{state}'"):
        verify_part(former.storage, "p", replace(part, rows={"sum": {state: count + 1}}))


def test_a_pipeline_without_the_edge_or_with_another_schema_is_refused() -> None:
    former = Former(2)
    for parallelism in (1, 2, 3):
        assert channel_state_misfit(former.manifest, definition_of(parallelism)) is None
    problem = channel_state_misfit(former.manifest, definition_of(2, others=True))
    assert problem is not None
    assert "holds records on their way from" in problem
    assert "stop it" in problem
    assert "\n" not in problem
    keyed = channel_state_misfit(former.manifest, definition_of(2, by="id"))
    assert keyed is not None
    assert "to 'sum', and in this pipeline there is no such way" in keyed
    with pytest.raises(UsageError, match="there is no such way"):
        check_compatible(former.manifest, definition_of(2, by="id"))
    nothing = Manifest(CheckpointId(1), Generation(1), 2, MAX, ())
    assert channel_state_misfit(nothing, definition_of(2, others=True)) is None


def test_edges_between_the_same_ends_are_kept_apart() -> None:
    pipeline = hg.Pipeline("p", parallelism=2)
    rows = pipeline.source(hg.FromRows([{"k": 1, "id": 1}]), name="in")
    rows.union(rows.rebalance()).filter(lambda row: True, name="twice").sink(hg.Discard(), name="out")
    definition = pipeline.definition()
    names = edge_names(definition.plan, edge_schemas(definition))
    assert [name.copy for name in names] == [0, 1]
    subtask = SubtaskId(definition.plan.edges[0].target, 1)
    mine = ways(definition, subtask)
    batches = {way.channel.channel: [pa.record_batch([[1], [way.channel.channel]], schema=SCHEMA)] for way in mine}
    target = SubtaskTarget(SnapshotDestination(MemoryStorage(), "p", Generation(1), 1 << 20), subtask, CheckpointId(1))
    target.put_state("twice", ChannelState(mine, batches), IN_FLIGHT_PREFIX)
    manifest = Manifest(CheckpointId(1), Generation(1), 2, MAX, (SubtaskEntry(subtask, target.finish()),))
    assert channel_state_misfit(manifest, definition) is None
    messages = parts_for_worker(manifest, definition.plan, WorkerIndex(1))
    found = read_restored(MemoryStorage(), "p", WorkerIndex(1), definition.plan, messages)
    vertex = definition.plan.vertex(subtask.vertex)
    replayed = list(restored_records(found.in_flight(vertex), mine, definition.plan, subtask))
    restored = {channel: ids([(channel, batch)]) for channel, batch in replayed}
    assert restored == {channel: [channel] for channel in range(3)}


# -- what was on its way to a broadcast side when barriers overtook -----


APPLY = VertexId("apply")


def definition_of_flight(parallelism: int) -> Any:
    pipeline = hg.Pipeline("p", parallelism=parallelism)
    rules = pipeline.source(hg.FromRows([{"name": "a", "limit": 1}]), name="rules")
    events = pipeline.source(hg.FromRows([{"key": 1, "name": "a", "value": 1}]), name="events")
    events.rebalance().connect(rules.broadcast()).process(Unkeyed(), name="apply").sink(hg.Discard(), name="out")
    return pipeline.definition()


def batch(is_rule: bool, number: int) -> pa.RecordBatch:
    row = {"name": "a", "limit": number} if is_rule else {"key": 1, "name": "a", "value": number}
    return pa.RecordBatch.from_pylist([row], LIMIT if is_rule else READING)


def recorded_flight(parallelism: int, storage: MemoryStorage) -> Manifest:
    """Return a checkpoint in which subtask i had processed i + 1 of 10 rules, and had 3 events on their way."""
    definition = definition_of_flight(parallelism)
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
    manifest, definition = recorded_flight(before, storage), definition_of_flight(after)
    events = []
    for index in range(after):
        found = replayed(manifest, storage, definition.plan, definition, index)
        former = index if before == after else 0
        rules = [[0, number] for number in range(former + 1, 10)]
        assert found[: len(rules)] == rules, "what the copy lacks that this subtask goes on with comes first"
        assert all(is_event for is_event, _ in found[len(rules) :]), "a rule is replayed twice"
        events += [number for _, number in found[len(rules) :]]
    assert sorted(events) == [10 * former + number for former in range(before) for number in range(3)]


def test_unions_and_the_first_copy_of_broadcast_state_go_to_everybody() -> None:
    sections = {f"{BROADCAST_PREFIX}a": (True, False), "union/a": (True, True), "lists/a": (False, False)}
    for section, expected in sections.items():
        part = SnapshotPart(0, 0, inline=b"", section=section)
        assert tuple(restore.is_for_all_workers(part, writer) for writer in (0, 1)) == expected
