"""Short names for the values that the protocol tests are made of."""

from __future__ import annotations

from headgate.model.ids import ChannelIndex, CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Committable, SnapshotPart, SubtaskEntry


def ch(index: int) -> ChannelIndex:
    return ChannelIndex(index)


def cp(checkpoint: int) -> CheckpointId:
    return CheckpointId(checkpoint)


def gen(generation: int) -> Generation:
    return Generation(generation)


def sub(vertex: str, index: int = 0) -> SubtaskId:
    return SubtaskId(VertexId(vertex), index)


def file_part(path: str) -> tuple[SnapshotPart, ...]:
    return (SnapshotPart(size_bytes=10, checksum=1, path=path),)


def inline_part(data: bytes = b"state") -> tuple[SnapshotPart, ...]:
    return (SnapshotPart(size_bytes=len(data), checksum=1, inline=data),)


def entry_of(parts: tuple[SnapshotPart, ...], committables: tuple[Committable, ...] = ()) -> SubtaskEntry:
    return SubtaskEntry(SubtaskId(VertexId("v"), 0), parts, committables)


def committable(checkpoint: int, sink: str = "out", subtask_index: int = 0, payload: bytes = b"p") -> Committable:
    return Committable(sink, cp(checkpoint), subtask_index, gen(1), payload)
