"""What a worker restores: the snapshots of former subtasks, kept apart, and what of them a node gets.

Counterparts: ``runtime.driver.live_generation`` sends the handles, ``runtime.worker.deployment`` builds the subtasks.
Source: rules R15–R17 of docs/spec/recovery.md. At the same parallelism subtask i continues from subtask i; only a
source's chain sees the snapshots of all former subtasks, because a split may have another owner (N1). A subtask
restored as finished goes on if there is more input (T10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headgate import fault_points
from headgate.codec.messages import Restored
from headgate.codec.snapshot import FINISHED_PREFIX, POSITIONS_PREFIX, ROUNDS_PREFIX, STATE_PREFIX, decode_sections
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import WorkerIndex
from headgate.model.manifest import Manifest
from headgate.model.plan import Plan, Vertex
from headgate.operators.base import RestoredState
from headgate.protocol.loops.part import NO_ROUNDS, RoundProgress
from headgate.runtime.checkpoints.snapshots import read_snapshot
from headgate.storage.base import NotFound, Storage


def restored_by(manifest: Manifest | None, plan: Plan, worker: WorkerIndex) -> list[Restored]:
    """Return the snapshots that the subtasks of ``worker`` continue from (R15)."""
    if manifest is None:
        return []
    is_moved = manifest.parallelism != plan.parallelism
    sources = {vertex.id for vertex in plan.vertices if vertex.is_source}
    return [
        Restored(entry.subtask, manifest.parallelism, entry.handle)
        for entry in manifest.entries
        if is_moved or entry.subtask.index == worker or entry.subtask.vertex in sources
    ]


class RestoredSnapshots:
    """The sections of every snapshot that this worker was given, by former subtask."""

    def __init__(self, worker: WorkerIndex, plan: Plan, formers: Mapping[int, Mapping[str, memoryview]], count: int):
        """Use ``read_restored``. ``formers`` by index; ``count`` is the former parallelism (0: nothing to restore)."""
        self._worker = int(worker)
        self._is_moved = count != plan.parallelism
        self._formers = formers
        self._count = count

    def states(self, node: str, vertex: Vertex) -> list[RestoredState]:
        """Return the states of ``node`` for this worker's subtask of ``vertex``, by former subtask."""
        name = f"{STATE_PREFIX}{node}"
        return [
            RestoredState(index, self._count, sections[name])
            for index, sections in self._seen_by(vertex)
            if name in sections
        ]

    def positions(self, node: str) -> dict[str, bytes] | None:
        """Return ``split → position`` of all former subtasks of a source (R16), or None on a first start.

        Raises:
            UsageError: two former readers claimed one split.
        """
        found: dict[str, bytes] | None = None
        for index, sections in sorted(self._formers.items()):
            stored = sections.get(f"{POSITIONS_PREFIX}{node}")
            if stored is None:
                continue
            positions = msgspec.msgpack.decode(stored, type=dict[str, bytes])
            found = {} if found is None else found
            for split, position in positions.items():
                if found.setdefault(split, position) != position:
                    raise UsageError(
                        f"source '{node}' has two positions of split '{split}', the second one from subtask {index}; "
                        "positions() of a reader must hold the splits that it owns and no others"
                    )
        return found

    def is_finished(self, vertex: Vertex) -> bool:
        """Whether every former subtask had finished every node of ``vertex`` (R17)."""
        seen = self._seen_by(vertex, has_own_end=True)
        names = [f"{FINISHED_PREFIX}{node.name}" for node in vertex.nodes]
        return bool(seen) and all(bytes(sections.get(name, b"")) == b"\x01" for _, sections in seen for name in names)

    def is_partly_finished(self, vertex: Vertex) -> bool:
        """Whether some former subtasks of ``vertex`` had finished and it goes on all the same (R17, T10)."""
        name = f"{FINISHED_PREFIX}{vertex.head.name}"
        flags = [bytes(sections.get(name, b"")) == b"\x01" for _, sections in self._seen_by(vertex, has_own_end=True)]
        return any(flags) and not self.is_finished(vertex)

    def rounds(self, vertex: Vertex) -> RoundProgress:
        """Return how far rounds had come in a subtask of ``vertex`` (L36).

        Raises:
            UsageError: former subtasks with different progress cannot be merged into one.
        """
        name = f"{ROUNDS_PREFIX}{vertex.head.name}"
        stored = [sections[name] for _, sections in self._seen_by(vertex) if name in sections]
        found = [msgspec.msgpack.decode(one, type=RoundProgress) for one in stored]
        if not found:
            return NO_ROUNDS
        if len({progress.closed for progress in found}) > 1:
            raise UsageError(
                f"the restored checkpoint was taken while a round of loop '{vertex.nest}' was ending, so it can only "
                f"be restored at parallelism {self._count}; run with that, or go back to another checkpoint"
            )
        started, highest = min(p.started for p in found), max(p.highest for p in found)
        return RoundProgress(found[0].closed, started, highest)

    def _seen_by(self, vertex: Vertex, *, has_own_end: bool = False) -> list[tuple[int, Mapping[str, memoryview]]]:
        """Return the former subtasks that a subtask of ``vertex`` continues, ascending.

        ``has_own_end``: at the same parallelism a subtask has finished or not, whatever the others have.
        """
        is_shared = self._is_moved or (vertex.is_source and not has_own_end)
        return [(i, sections) for i, sections in sorted(self._formers.items()) if is_shared or i == self._worker]


def read_restored(
    storage: Storage, pipeline: str, worker: WorkerIndex, plan: Plan, restored: Sequence[Restored]
) -> RestoredSnapshots:
    """Read and verify every snapshot of ``restored``.

    Raises:
        CorruptionError: one is damaged or gone (the coordinator verified it moments ago).
        StorageError
    """
    formers: dict[int, dict[str, memoryview]] = {}
    for snapshot in restored:
        fault_points.reach("in-restore")
        handle = snapshot.handle
        where = handle.path or f"inlined snapshot of {snapshot.subtask}"
        try:
            data = read_snapshot(storage, pipeline, handle)
        except NotFound as error:
            raise CorruptionError(where, 0, f"a snapshot of {handle.size_bytes} bytes", "no file") from error
        # Sections hold the node's name, so those of the vertices of one former subtask do not clash.
        formers.setdefault(snapshot.subtask.index, {}).update(decode_sections(data, where))
    return RestoredSnapshots(worker, plan, formers, restored[0].parallelism if restored else 0)
