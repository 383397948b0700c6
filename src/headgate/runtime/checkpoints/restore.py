"""Restore of a checkpoint: whether it fits the pipeline, the parts of each worker, the state of each operator.

Small sections are read at once, the state of an operator part by part when it asks for it. The driver
(``runtime.driver.supervisor_host``) sends the references, ``runtime.worker.deployment`` builds the subtasks. Source:
rules R12 and R15 of docs/spec/recovery.md. At the same parallelism subtask i continues from subtask i; only a
source's chain sees the snapshots of all former subtasks, because a split may have another owner. A subtask
restored as finished goes on if there is more input (T10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from headgate import fault_points
from headgate.codec.decodable import decodable
from headgate.codec.messages import Restored
from headgate.codec.snapshot import (
    BROADCAST_PREFIX,
    FILES_PREFIX,
    FINISHED_PREFIX,
    IN_FLIGHT_PREFIX,
    LISTS_PREFIX,
    POSITIONS_PREFIX,
    ROUNDS_PREFIX,
    STATE_PREFIX,
    UNION_PREFIX,
    decode_positions,
    decode_sections,
)
from headgate.errors import CorruptionError, UsageError, with_remedy
from headgate.model.config import Alignment
from headgate.model.ids import WorkerIndex, key_groups_of_subtask
from headgate.model.lineage import NodeKind
from headgate.model.manifest import BUNDLE, KeyGroups, Manifest, SnapshotPart
from headgate.model.plan import PipelineDefinition, Plan, Vertex
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints import recovery
from headgate.protocol.subtasks.loops import NO_ROUNDS, RoundProgress
from headgate.runtime.checkpoints.channel_state import RestoredPart, channel_state_misfit
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.state.snapshot import StoredFiles
from headgate.state.worker_backends import portable_rows
from headgate.storage.base import NotFound, Storage


def parts_for_worker(manifest: Manifest | None, plan: Plan, worker: WorkerIndex) -> list[Restored]:
    """Return the parts that the subtasks of ``worker`` continue from (R15), of keyed ones those it owns.

    Whatever mode the checkpoint was taken in. Unions go to everybody, and so does the first
    subtask's copy of broadcast state.
    """
    if manifest is None:
        return []
    is_moved = manifest.parallelism != plan.parallelism or not is_exact(manifest)
    sources = {vertex.id for vertex in plan.vertices if vertex.is_source}
    owned = owned_key_groups(plan, worker)
    found: list[Restored] = []
    for entry in manifest.entries:
        # a source's positions go to all workers: a split may be read by another one than before
        if is_moved or entry.subtask.index == worker or entry.subtask.vertex in sources:
            parts = tuple(part for part in entry.parts if part.key_groups is None or part.key_groups.overlaps(owned))
        else:
            parts = tuple(part for part in entry.parts if is_for_all_workers(part, entry.subtask.index))
            if not parts:
                continue
        found.append(Restored(entry.subtask, manifest.parallelism, parts, is_exact=is_exact(manifest)))
    return found


def is_for_all_workers(part: SnapshotPart, writer: int) -> bool:
    """Whether every worker is given a part, whichever subtask is its ``writer``."""
    return part.section.startswith(UNION_PREFIX) or (writer == 0 and part.section.startswith(BROADCAST_PREFIX))


def is_exact(manifest: Manifest) -> bool:
    """Whether nothing that followed a barrier is in it."""
    return manifest.mode.alignment is Alignment.ALIGNED


def owned_key_groups(plan: Plan, worker: WorkerIndex) -> KeyGroups:
    """Return the key groups that the subtasks of ``worker`` own."""
    found = key_groups_of_subtask(int(worker), plan.max_parallelism, plan.parallelism)
    return KeyGroups(found.start, len(found))


Sections: TypeAlias = Mapping[str, memoryview]
Readers: TypeAlias = Mapping[str, Sequence[Callable[[], memoryview]]]
"""What reads each part of a section, in the order in which they were written."""


def _system_temp_dir(node: str) -> None:
    """Where nothing is configured, the system's directory for temporary files is taken."""


class NotRestorable(UsageError):  # noqa: N818 - said of the checkpoint
    """A checkpoint cannot be restored as it is wanted: starting again cannot help."""


class RestoredSnapshots:
    """What this worker was given of the snapshots, by former subtask."""

    def __init__(
        self,
        worker: WorkerIndex,
        plan: Plan,
        formers: Mapping[int, Sections],
        count: int,
        parts: Mapping[int, Readers] | None = None,
        *,
        is_exact: bool = True,
        in_flight: Mapping[str, Sequence[RestoredPart]] | None = None,
        files: Mapping[tuple[int, str], StoredFiles] | None = None,
        directory: Callable[[str], str | None] = _system_temp_dir,
    ) -> None:
        """Use ``read_restored``. ``count`` is the former parallelism (0: nothing to restore).

        Args:
            formers: small sections by former index.
            parts: the other ones, still to be read.
            is_exact: none holds what followed the barrier.
            in_flight: records that were on their way, by the node that they were on their way to.
            files: of databases, by former index and node.
            directory: where those of a node are put while their rows are read; None: the system's for temporary files.
        """
        self._worker = int(worker)
        self._is_moved = count != plan.parallelism or not is_exact
        self._formers = formers
        self._count = count
        self._parts = parts or {}
        self._is_exact = is_exact
        self._in_flight = in_flight or {}
        self._files = files or {}
        self._directory = directory
        self._owned = owned_key_groups(plan, worker)

    def in_flight(self, vertex: Vertex) -> Sequence[RestoredPart]:
        """Return what was on its way to former subtasks of ``vertex``, as far as this worker was given it."""
        return self._in_flight.get(str(vertex.id), ())

    def states(self, node: str, vertex: Vertex) -> list[RestoredState]:
        """Return the parts of ``node``'s state for this worker's subtask of ``vertex``, by former subtask."""
        name = f"{STATE_PREFIX}{node}"
        found: list[RestoredState] = []
        for index, _ in self._seen_by(vertex):
            found += self._parts_of(index, name)
            found += self._rows_of_files(index, node)
        return found

    def lists(self, node: str, vertex: Vertex) -> list[RestoredState]:
        """Return the parts of ``node``'s operator state, by former subtask: its own lists, and everybody's unions."""
        own = [part for index, _ in self._seen_by(vertex) for part in self._parts_of(index, f"{LISTS_PREFIX}{node}")]
        return own + [part for index in sorted(self._parts) for part in self._parts_of(index, f"{UNION_PREFIX}{node}")]

    def broadcast(self, node: str) -> list[RestoredState]:
        """Return the broadcast state of ``node``: what the first former subtask wrote for all, or copies."""
        return [part for index in sorted(self._parts) for part in self._parts_of(index, f"{BROADCAST_PREFIX}{node}")]

    @property
    def is_empty(self) -> bool:
        """Whether the pipeline starts without a checkpoint."""
        return self._count == 0

    def _parts_of(self, index: int, section: str) -> list[RestoredState]:
        readers = self._parts.get(index, {}).get(section, ())
        return [RestoredState(index, self._count, read, self._is_exact) for read in readers]

    def _rows_of_files(self, index: int, node: str) -> list[RestoredState]:
        """Return the rows that a former subtask left in a database: a backend may go on with it instead."""
        stored = self._files.get((index, node))
        if stored is None:
            return []
        owned = stored.description.key_groups
        groups = self._owned if owned is None else owned.common(self._owned)
        readers = portable_rows(stored, self._directory(node), groups)
        return [RestoredState(index, self._count, read, self._is_exact, stored) for read in readers]

    def positions(self, node: str) -> dict[str, bytes] | None:
        """Return ``split → position`` of all former subtasks of a source, or None on a first start.

        Raises:
            UsageError: two former readers claimed one split.
        """
        found: dict[str, bytes] | None = None
        for index, sections in sorted(self._formers.items()):
            stored = sections.get(f"{POSITIONS_PREFIX}{node}")
            if stored is None:
                continue
            positions = decode_positions(stored)
            found = {} if found is None else found
            for split, position in positions.items():
                if found.setdefault(split, position) != position:
                    raise NotRestorable(
                        f"source '{node}' has two positions of split '{split}', the second one from subtask {index}; "
                        "positions() of a reader must hold the splits that it owns and no others"
                    )
        return found

    def is_finished(self, vertex: Vertex) -> bool:
        """Whether every former subtask had finished every node of ``vertex``."""
        seen = self._seen_by(vertex, has_own_end=True)
        names = [f"{FINISHED_PREFIX}{node.name}" for node in vertex.nodes]
        return bool(seen) and all(bytes(sections.get(name, b"")) == b"\x01" for _, sections in seen for name in names)

    def is_partly_finished(self, vertex: Vertex) -> bool:
        """Whether some former subtasks of ``vertex`` had finished and it goes on all the same (T10)."""
        name = f"{FINISHED_PREFIX}{vertex.head.name}"
        flags = [bytes(sections.get(name, b"")) == b"\x01" for _, sections in self._seen_by(vertex, has_own_end=True)]
        return any(flags) and not self.is_finished(vertex)

    def rounds(self, vertex: Vertex) -> RoundProgress:
        """Return how far rounds had come in a subtask of ``vertex`` (L36).

        Raises:
            NotRestorable: former subtasks with different progress cannot be merged into one.
        """
        name = f"{ROUNDS_PREFIX}{vertex.head.name}"
        stored = [sections[name] for _, sections in self._seen_by(vertex) if name in sections]
        found = [msgspec.msgpack.decode(one, type=decodable(RoundProgress)) for one in stored]
        if not found:
            return NO_ROUNDS
        if len({progress.closed for progress in found}) > 1:
            raise NotRestorable(
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
    storage: Storage,
    pipeline: str,
    worker: WorkerIndex,
    plan: Plan,
    restored: Sequence[Restored],
    directory: Callable[[str], str | None] = _system_temp_dir,
) -> RestoredSnapshots:
    """Read the small sections of ``restored``, and find the other parts; all are verified when they are read.

    ``directory``: returns one on a local disk for an operator with a database to be read; None: the system's for
    temporary files.

    Raises:
        CorruptionError: one is damaged or gone (the coordinator verified it moments ago).
        StorageError
    """
    formers: dict[int, dict[str, memoryview]] = {}
    parts: dict[int, dict[str, list[Callable[[], memoryview]]]] = {}
    in_flight: dict[str, list[RestoredPart]] = {}
    files: dict[tuple[int, str], list[SnapshotPart]] = {}
    for snapshot in restored:
        # Sections hold the node's name, so those of the vertices of one former subtask do not clash.
        sections = formers.setdefault(snapshot.subtask.index, {})
        others = parts.setdefault(snapshot.subtask.index, {})
        for part in snapshot.parts:
            read = partial(_read, storage, pipeline, part, f"inlined snapshot of {snapshot.subtask}")
            if part.section == BUNDLE:
                sections.update(decode_sections(read(), part.path or f"inlined snapshot of {snapshot.subtask}"))
            elif part.section.startswith(IN_FLIGHT_PREFIX):
                found = RestoredPart(snapshot.subtask.index, snapshot.parallelism, part.name, read)
                in_flight.setdefault(part.section.removeprefix(IN_FLIGHT_PREFIX), []).append(found)
            elif part.section.startswith(FILES_PREFIX):
                node = part.section.removeprefix(FILES_PREFIX)
                files.setdefault((snapshot.subtask.index, node), []).append(part)
            else:
                others.setdefault(part.section, []).append(read)
    count = restored[0].parallelism if restored else 0
    exact = all(snapshot.is_exact for snapshot in restored)
    stored = {
        (index, node): StoredFiles(
            found, partial(_read, storage, pipeline), f"files of '{node}', subtask {index}", pipeline
        )
        for (index, node), found in files.items()
    }
    return RestoredSnapshots(
        worker, plan, formers, count, parts, is_exact=exact, in_flight=in_flight, files=stored, directory=directory
    )


def _read(storage: Storage, pipeline: str, part: SnapshotPart, inlined: str = "an inlined snapshot") -> memoryview:
    fault_points.reach("in-restore")
    try:
        return read_part(storage, pipeline, part)
    except NotFound as error:
        raise CorruptionError(part.path or inlined, 0, f"a part of {part.size_bytes} bytes", "no file") from error


def check_compatible(restored: Manifest, definition: PipelineDefinition) -> None:
    """Refuse to go on if ``restored`` does not fit.

    Raises:
        UsageError
    """
    problem = channel_state_misfit(restored, definition)
    if problem is not None:
        raise UsageError(problem)
    refusal = recovery.incompatibility_with(restored, definition)
    if refusal is not None:
        raise with_remedy(UsageError(refusal.reason), refusal.remedy)
    known = {spec.name for spec in definition.hooks} | definition.forgotten_hooks
    problem = recovery.unclaimed_hook(restored, known)
    if problem is not None:
        raise UsageError(problem)


def former_locations(restored: Manifest, definition: PipelineDefinition) -> dict[str, list[tuple[str, str]]]:
    """Return, by source, what it read when ``restored`` was taken, where that is not what it reads now (EV17)."""
    found = ((name, recovery.matching_of(restored, definition).relocation(name)) for name in definition.lineages)
    return {
        name: [(location.name, location.real) for location in relocation.before]
        for name, relocation in found
        if relocation is not None and definition.lineages[name].kind is NodeKind.SOURCE
    }
