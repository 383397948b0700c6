"""What a subtask continues from: snapshots of former subtasks, merged as the runtime does (R15–R17, L36)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.model.ids import SubtaskId
from headgate.model.manifest import Manifest
from headgate.model.plan import Plan, Vertex
from headgate.protocol.checkpoints.recovery import Damage
from headgate.protocol.loops.part import LoopPlace
from headgate.protocol.subtasks.subtask import RoundProgress
from headgate.protocol.watermarks import Origin
from headgate.sim.disk import Disk


@dataclass(frozen=True, slots=True)
class Former:
    """The snapshot of one former subtask of a vertex, at the parallelism of its time."""

    index: int
    parallelism: int
    data: bytes


def place_of(plan: Plan, vertex: Vertex, subtask: SubtaskId) -> LoopPlace | None:
    """Return where ``subtask`` stands in its nest of loops."""
    if vertex.nest is None:
        return None
    inputs = plan.inputs(subtask)
    return LoopPlace(
        inside=frozenset(i.channel for i in inputs if i.edge.nest == vertex.nest and not i.edge.is_feedback),
        outside=frozenset(i.channel for i in inputs if i.edge.nest is None),
        feedback=frozenset(i.channel for i in inputs if i.edge.is_feedback),
        is_leaf=all(edge.nest is None for edge in plan.outputs(vertex.id)),
    )


def restored_rounds(snapshots: Mapping[int, Mapping[str, Any]]) -> RoundProgress:
    """Return how far rounds had come: the least that is over, the first under way, the highest sent (L36)."""
    found = [RoundProgress(*snapshot["rounds"]) for snapshot in snapshots.values() if "rounds" in snapshot]
    if not found:
        return RoundProgress()
    return RoundProgress(min(p.closed for p in found), min(p.started for p in found), max(p.highest for p in found))


def may_move(restored: Manifest, disk: Disk) -> bool:
    """Whether a checkpoint can be restored at another parallelism: no round was ending just then.

    Raises:
        StorageError: a file cannot be read now.
    """
    closed: dict[str, set[int]] = {}
    for entry in restored.entries:
        data = disk.read(entry.handle)
        if not isinstance(data, Damage):
            closed_round = msgspec.msgpack.decode(data).get("rounds", (-1,))[0]
            closed.setdefault(entry.subtask.vertex, set()).add(closed_round)
    return all(len(found) == 1 for found in closed.values())


def newest_times(trackers: Sequence[Mapping[str, int]]) -> dict[Origin, int]:
    """Merge the latest event times of splits; what a former owner kept of one is older (W9)."""
    latest: dict[Origin, int] = {}
    for tracker in trackers:
        for split, max_ms in tracker.items():
            latest[split] = max(max_ms, latest.get(split, max_ms))
    return latest
