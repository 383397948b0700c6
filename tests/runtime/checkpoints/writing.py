"""Snapshots as one bundle, the way that version 1 wrote them: what tests of the log and of claims need of one."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.codec.snapshot import Buffer
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import BUNDLE, Rows, SnapshotPart, SubtaskEntry
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage


def write_snapshot(
    storage: Storage,
    pipeline: str,
    subtask: SubtaskId,
    checkpoint: CheckpointId,
    generation: Generation,
    parts: Sequence[Buffer],
    inline_bytes_max: int,
    rows: Rows | None = None,
) -> SnapshotPart:
    """Make the snapshot of one subtask durable and return its only part."""
    target = SubtaskTarget(SnapshotDestination(storage, pipeline, generation, inline_bytes_max), subtask, checkpoint)
    target.put(BUNDLE, parts, rows)
    (part,) = target.finish()
    return part


def inlined_sections(entry: SubtaskEntry) -> dict[str, memoryview]:
    """Return the sections of a snapshot that has no files, each in one part."""
    found = SnapshotFiles(MemoryStorage("nothing"), "p").sections(entry)
    return {name: part for name, (part,) in found.items()}
