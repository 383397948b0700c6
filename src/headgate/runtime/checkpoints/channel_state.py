"""Channel state of unaligned checkpoints: bytes of records that barriers overtook, and their owners after a restore.

docs/spec/unaligned.md. ``runtime.worker.unaligned`` records and replays them, ``snapshot_writer``
and ``restore`` write and read the parts. Never decides what is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import msgspec
import pyarrow as pa

from headgate.codec.decodable import decodable
from headgate.codec.frames import schema_fingerprint
from headgate.codec.snapshot import IN_FLIGHT_PREFIX, Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError
from headgate.model.graph import BROADCAST_INPUT, Partitioner
from headgate.model.ids import ChannelIndex, SubtaskId, key_groups_of_subtask
from headgate.model.manifest import Manifest
from headgate.model.plan import InputChannel, PipelineDefinition, Plan, PlanEdge
from headgate.operators.keys import partition
from headgate.state.snapshot import FrozenState, SnapshotTarget, decode_stream, encode_batches

PART_BYTES = 8 << 20
"""About the size of a part, so that one at a time is encoded, and read again."""

Replay: TypeAlias = Iterator[tuple[ChannelIndex, pa.RecordBatch]]
"""Restored records and the channel that they count as coming from, in the order in which they are processed."""


class EdgeName(msgspec.Struct, frozen=True):
    """What tells an edge from others, in another version of the pipeline, too."""

    from_node: str
    tag: str
    target: str
    input: str
    partitioner: str
    keys: tuple[str, ...]
    fingerprint: int
    """Of the schema of its records."""
    copy: int = 0
    """How many edges before it lead from this output to this input, too, otherwise partitioned."""

    def encode(self) -> str:
        """Return it as text, for the name of a part."""
        return msgspec.json.encode(self).decode()


def edge_names(plan: Plan, schemas: Sequence[pa.Schema]) -> list[EdgeName]:
    """Return the names of the edges of ``plan``; ``schemas`` are those of their records."""
    names: list[EdgeName] = []
    for edge, schema in zip(plan.edges, schemas, strict=True):
        found = EdgeName(
            str(edge.from_node),
            edge.tag,
            str(edge.target),
            edge.input,
            edge.partitioner.value,
            edge.keys,
            schema_fingerprint(schema),
        )
        ends = (found.from_node, found.tag, found.target, found.input)
        copies = sum((name.from_node, name.tag, name.target, name.input) == ends for name in names)
        names.append(msgspec.structs.replace(found, copy=copies))
    return names


@dataclass(frozen=True, slots=True)
class NamedChannel:
    """One input channel of a subtask, the name of its edge, and the schema of what comes on it."""

    channel: InputChannel
    name: EdgeName
    schema: pa.Schema


def named_channels(plan: Plan, subtask: SubtaskId, schemas: Sequence[pa.Schema]) -> list[NamedChannel]:
    """Return the input channels of ``subtask``; ``schemas`` are those of the records on each edge."""
    names = edge_names(plan, schemas)
    return [NamedChannel(found, names[found.edge.index], schemas[found.edge.index]) for found in plan.inputs(subtask)]


def is_broadcast(name: str) -> bool:
    """Whether a part, named by its edge, was on its way to a broadcast side: every subtask had the same."""
    return msgspec.json.decode(name, type=decodable(EdgeName)).input == BROADCAST_INPUT


class ChannelState(FrozenState):
    """What was recorded for one snapshot, by channel."""

    def __init__(self, ways: Sequence[NamedChannel], recorded: Mapping[ChannelIndex, Sequence[pa.RecordBatch]]) -> None:
        super().__init__()
        self._recorded = [(way, list(recorded[way.channel.channel])) for way in ways if way.channel.channel in recorded]
        assert len(self._recorded) == len(recorded), "what was recorded came on an input channel of the subtask"

    @property
    def size_bytes(self) -> int:
        """What the records take in memory."""
        return sum(batch.nbytes for _, batches in self._recorded for batch in batches)

    def _rows(self) -> Mapping[str, int]:
        return {_section(way): sum(batch.num_rows for batch in batches) for way, batches in self._recorded}

    def _encode(self) -> Sequence[Buffer]:
        return _encoded(self._recorded)

    def _write(self, target: SnapshotTarget) -> None:
        """Write parts of one edge each."""
        for part in _parts(self._recorded):
            edge = part[0][0].channel.edge
            keys = target.keys if edge.partitioner is Partitioner.HASH else None
            rows = {_section(way): sum(batch.num_rows for batch in batches) for way, batches in part}
            target.put(_encoded(part), rows, None if keys is None else keys.groups, part[0][0].name.encode())

    def _forget(self) -> None:
        self._recorded = []


_Recorded: TypeAlias = list[tuple[NamedChannel, list[pa.RecordBatch]]]


def _section(way: NamedChannel) -> str:
    name = way.name
    return f"{name.from_node}/{name.tag}/{name.input}/{name.copy}/{way.channel.upstream.index}"


def _encoded(recorded: _Recorded) -> Sequence[Buffer]:
    return encode_sections({_section(way): encode_batches(way.schema, batches) for way, batches in recorded})


def _parts(recorded: _Recorded) -> Iterator[_Recorded]:
    """Cut what was recorded into pieces of one edge and bounded size; the order of each channel stays."""
    part: _Recorded = []
    size_bytes = 0
    for way, batches in recorded:
        if part and part[0][0].channel.edge != way.channel.edge:
            yield part
            part, size_bytes = [], 0
        for batch in batches:
            # never inside a batch, and a large one has a part of its own
            if part and size_bytes + batch.nbytes > PART_BYTES:
                yield part
                part, size_bytes = [], 0
            if not part or part[-1][0] is not way:
                part.append((way, []))
            part[-1][1].append(batch)
            size_bytes += batch.nbytes
    if part:
        yield part


# -- restore --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoredPart:
    """A part that ``subtask_index`` of ``parallelism`` had in flight."""

    subtask_index: int
    parallelism: int
    name: str
    read: Callable[[], memoryview]


def restored_records(
    parts: Iterable[RestoredPart], ways: Sequence[NamedChannel], plan: Plan, subtask: SubtaskId
) -> Replay:
    """Return what ``subtask`` processes before anything else, by channel; parts are read one at a time.

    Records to a broadcast side come first, of the same former subtask as the restored copy of its state.

    Raises (while it is read):
        CorruptionError, StorageError
    """
    by_name = {way.name.encode(): [w for w in ways if w.channel.edge == way.channel.edge] for way in ways}
    # stable: within either kind the parts stay in the order in which they were written, and so do records of a channel
    for part in sorted(parts, key=lambda part: not is_broadcast(part.name)):
        channels = by_name[part.name]
        edge, schema = channels[0].channel.edge, channels[0].schema
        heirs = _Reassignment(part.parallelism, plan)
        is_keyed = edge.partitioner is Partitioner.HASH
        if is_broadcast(part.name):
            is_mine = part.subtask_index == heirs.copied_from(subtask.index)
        else:
            is_mine = is_keyed or heirs.of(part.subtask_index) == subtask.index
        if not is_mine:
            continue
        where = f"records in flight to '{subtask.vertex}'"
        for section, data in decode_sections(part.read(), where).items():
            sender = heirs.of(int(section.rpartition("/")[2]))
            on = next((w.channel.channel for w in channels if w.channel.upstream.index == sender), None)
            channel = channels[0].channel.channel if on is None else on
            for batch in _batches(data, schema, where):
                # at the same parallelism the rows were routed to this very subtask
                mine = _owned_rows(batch, edge, plan, subtask) if is_keyed and heirs.are_others else batch
                if mine is not None:
                    yield channel, mine


def _batches(data: memoryview, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    found, batches = decode_stream(data, where)
    if not found.equals(schema):
        raise CorruptionError(where, 0, f"columns {schema.names}", f"columns {found.names} or other types")
    return iter(batches)


def _owned_rows(batch: pa.RecordBatch, edge: PlanEdge, plan: Plan, subtask: SubtaskId) -> pa.RecordBatch | None:
    return partition(batch, edge.keys, plan.max_parallelism, plan.parallelism)[subtask.index]


class _Reassignment:
    """Maps a former subtask to its successor: the owner of its first key group."""

    def __init__(self, former_parallelism: int, plan: Plan) -> None:
        self._former = former_parallelism
        self._plan = plan
        self.are_others = former_parallelism != plan.parallelism

    def copied_from(self, index: int) -> int:
        """Return which former subtask's copy of broadcast state the subtask ``index`` restores."""
        return 0 if self.are_others else index

    def of(self, index: int) -> int:
        if not self.are_others:
            return index
        assert 0 <= index < self._former, "a snapshot names subtasks of its own parallelism"
        plan = self._plan
        first = key_groups_of_subtask(index, plan.max_parallelism, self._former).start
        return first * plan.parallelism // plan.max_parallelism


def channel_state_misfit(manifest: Manifest, definition: PipelineDefinition) -> str | None:
    """Return why records in flight do not fit a pipeline, as one sentence, or None."""
    names = {p.name for e in manifest.entries for p in e.parts if p.section.startswith(IN_FLIGHT_PREFIX)}
    plan = definition.plan
    schemas = [cast(pa.Schema, definition.schema(edge.from_node, edge.tag)) for edge in plan.edges]
    in_loops = {edge.index for edge in plan.edges if plan.vertex(edge.target).nest is not None}  # UA2
    there = {name.encode() for index, name in enumerate(edge_names(plan, schemas)) if index not in in_loops}
    for name in sorted(names - there):
        found = msgspec.json.decode(name, type=decodable(EdgeName))
        return (
            f"checkpoint {manifest.checkpoint} holds records on their way from '{found.from_node}' to "
            f"'{found.target}', and in this pipeline there is no such way, or its columns or keys are others; start "
            "the former version once more and stop it, which processes them, or run under another pipeline name"
        )
    return None
