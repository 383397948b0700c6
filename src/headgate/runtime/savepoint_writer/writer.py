"""Writes a draft as a savepoint: every part, then the file that makes it one.

The parts of a base are read with their checksums and written again, so that the savepoint is whole (SV1); those of
changed operators are made new, a subtask at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeAlias

import pyarrow as pa

from headgate import fault_points
from headgate.codec.snapshot import (
    FILES_PREFIX,
    FINISHED_PREFIX,
    IN_FLIGHT_PREFIX,
    OF_ROWS,
    POSITIONS_PREFIX,
    ROUNDS_PREFIX,
    STATE_PREFIX,
    decode_sections,
    encode_positions,
)
from headgate.codec.snapshot_rows import ARROW_START, stored_rows
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import CheckpointConfig
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import (
    BUNDLE,
    Committable,
    KeyGroups,
    Manifest,
    Place,
    Savepoint,
    SnapshotPart,
    SubtaskEntry,
)
from headgate.protocol.checkpoints.commit import left_by_giving_up
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget, write_output
from headgate.runtime.savepoint_writer.draft import Base, Draft, Resolved, StateChange
from headgate.runtime.savepoint_writer.rows import SubtaskState
from headgate.state.snapshot import OwnedKeys, StoredFiles, decode_batches
from headgate.state.ttl import as_declared
from headgate.state.worker_backends import portable_rows
from headgate.storage.base import Storage
from headgate.storage.urls import open_storage

Sections: TypeAlias = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class Former:
    """What one subtask had.

    Attributes:
        small: sections of its bundle that are no states.
        others: what reads states that stay, but are written otherwise: those in files of RocksDB are written as rows,
            so that any backend restores them.
        changed: the parts of the sections that change.
    """

    small: dict[str, bytes] = field(default_factory=dict)
    others: list[tuple[str, Callable[[], memoryview]]] = field(default_factory=list)
    changed: dict[str, list[Sections]] = field(default_factory=dict)


def former_of(base: Base, entry: SubtaskEntry, changed: Collection[str]) -> Former:
    """Return what a subtask had, of which the sections ``changed`` change.

    Raises:
        UsageError: an operator that changes has state in another form.
        CorruptionError, StorageError
    """
    former = Former()
    for part in entry.parts:
        _refuse_other_forms(part.section, changed)
        if part.section != BUNDLE and part.section not in changed:
            continue
        where, data = base.where(part), base.read(part)
        sections = decode_sections(data, where) if part.section == BUNDLE else {part.section: data}
        for section, inner in sections.items():
            if section in changed:
                former.changed.setdefault(section, []).append(decode_sections(inner, where))
            else:
                former.small[section] = bytes(inner)
    for node in dict.fromkeys(node_of(p.section) for p in entry.parts if p.section.startswith(FILES_PREFIX)):
        _take_files(former, base, entry, node, changed)
    return former


def _take_files(former: Former, base: Base, entry: SubtaskEntry, node: str, changed: Collection[str]) -> None:
    """Take the rows of an operator with state in files of RocksDB."""
    parts = [part for part in entry.parts if part.section == f"{FILES_PREFIX}{node}"]
    manifest, where = base.manifest, f"{FILES_PREFIX}{node} of {entry.subtask}"
    owned = key_groups_of_subtask(entry.subtask.index, manifest.max_parallelism, manifest.parallelism)
    section = f"{STATE_PREFIX}{node}"
    stored = StoredFiles(parts, base.read, where, base.checkpoint.place.prefix)
    for read in portable_rows(stored, None, KeyGroups(owned.start, len(owned))):
        if section in changed:
            former.changed.setdefault(section, []).append(decode_sections(read(), where))
        else:
            former.others.append((section, read))


def _refuse_other_forms(section: str, changed: Collection[str]) -> None:
    """State of an operator that changes must be in the sections that are taken apart: no other form of it may stay."""
    is_known = section == BUNDLE or section.startswith(
        (*OF_ROWS, POSITIONS_PREFIX, ROUNDS_PREFIX, FINISHED_PREFIX, FILES_PREFIX)
    )
    if not is_known and node_of(section) in {node_of(one) for one in changed}:
        raise UsageError(
            f"the state of operator '{node_of(section)}' is stored there in its backend's own form; take a savepoint "
            "of the pipeline, and change that"
        )


def vertices_of(base: Base) -> dict[str, VertexId]:
    """Return the chain that each operator of a checkpoint was in.

    Raises:
        CorruptionError, StorageError
    """
    found: dict[str, VertexId] = {}
    for entry in base.manifest.entries:
        # the subtasks of a chain have the same sections: the first one says what all have
        if entry.subtask.index != 0:
            continue
        for part in entry.parts:
            sections = decode_sections(base.read(part), base.where(part)) if part.section == BUNDLE else [part.section]
            found |= {node_of(section): entry.subtask.vertex for section in sections}
    return found


def node_of(section: str) -> str:
    """Return the operator that a section of a snapshot is of."""
    return section.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Written:
    """A savepoint that was written.

    Attributes:
        savepoint: what it says about itself.
        resolved: what was decided about each operator.
    """

    savepoint: Savepoint
    resolved: Resolved


def write_savepoint(draft: Draft, url: str, now_ms: int) -> Written:
    """Write ``draft`` to ``url``, where nothing is yet; ``now_ms``: the date.

    Raises:
        UsageError: something is there, or a wish of the draft cannot be fulfilled.
        CorruptionError: the base is damaged.
        StorageError: there is no savepoint then, and what was written of it does no harm (SV4).
    """
    storage = open_storage(url)
    directory = SavepointDirectory(url)
    place = directory.place(storage.draw_name(8))
    resolved = draft.resolved()
    life, settled, is_same_cut = "", frozenset[Committable](), False
    if draft.base is not None:
        (life, settled), is_same_cut = draft.base.checkpoint.standing(), draft.base.checkpoint.is_same_cut
    try:
        manifest = _Writer(draft, resolved, storage, place, settled).manifest(now_ms)
        drawn = storage.draw_name(16)
        savepoint = Savepoint(drawn, draft.pipeline, now_ms, place.prefix, manifest, life, is_same_cut)
        # everything it refers to is durable: the file that makes it a savepoint comes last (SV2)
        fault_points.reach("before-savepoint")
        directory.write(savepoint)
    except BaseException:
        with contextlib.suppress(Exception):
            # files without a savepoint only take space: what cannot be removed must not hide the reason
            directory.give_up(place)
        raise
    return Written(savepoint, resolved)


class _Writer:
    """Writes the parts of one savepoint."""

    def __init__(
        self, draft: Draft, resolved: Resolved, storage: Storage, place: Place, settled: Collection[Committable]
    ) -> None:
        """``settled``: what the base promised and was committed since."""
        self._draft = draft
        self._settled = settled
        self._resolved = resolved
        self._storage = storage
        self._place = place
        base = draft.base
        self._checkpoint = CheckpointId(1) if base is None else base.manifest.checkpoint
        self._generation = Generation(1) if base is None else base.manifest.generation
        self._outputs_count = 0

    def manifest(self, now_ms: int) -> Manifest:
        """Write all parts; return what refers to them."""
        base, resolved = self._draft.base, self._resolved
        entries = tuple(self._entries())
        if base is None:
            return Manifest(
                self._checkpoint,
                self._generation,
                resolved.parallelism,
                resolved.max_parallelism,
                entries,
                state_texts=dict(resolved.texts),
                trigger_wall_ms=now_ms,
                lineages={} if self._draft.definition is None else self._draft.definition.lineages,
            )
        former = base.manifest
        starts_fresh = {*resolved.gone, *resolved.positions}  # its former lineage no longer counts (EV13)
        return replace(
            former,
            lineages={name: lineage for name, lineage in former.lineages.items() if name not in starts_fresh},
            entries=entries,
            carried=self._copied_outputs(base, former.carried),
            left=(*former.left, *left_by_giving_up(former, self._given_up(former.committables))),
            state_texts=dict(resolved.texts),
            is_final=former.is_final and not resolved.positions and not resolved.gone,
            origin=None,
            follows=None,
            log_start=0,
            place=None,
        )

    def _entries(self) -> list[SubtaskEntry]:
        """Write every subtask: those of the base, and those of chains that it does not have."""
        base = self._draft.base
        of_base = {} if base is None else vertices_of(base)
        changes: dict[VertexId, list[StateChange]] = {}
        for change in self._resolved.changes.values():
            changes.setdefault(self._vertex(of_base, change.operator), []).append(change)
        positions = {self._vertex(of_base, operator) for operator in self._resolved.positions}
        former = () if base is None else base.manifest.entries
        found = [self._rewritten(base, entry, changes.get(entry.subtask.vertex, ())) for entry in former if base]
        # chains that the base lacks: the others were written above, with their changes
        begun = {**changes, **dict.fromkeys(positions, ())}.keys() - {entry.subtask.vertex for entry in former}
        for vertex in self._begun_vertices(begun):
            for index in range(self._resolved.parallelism):
                found.append(self._begun(SubtaskId(vertex, index), changes.get(vertex, ())))
        return found

    def _vertex(self, of_base: Mapping[str, VertexId], operator: str) -> VertexId:
        return of_base[operator] if operator in of_base else self._draft.declared[operator].vertex.id

    def _begun_vertices(self, needed: Collection[VertexId]) -> list[VertexId]:
        """Return the chains that begin: of a new savepoint all, as ever, else those with given rows."""
        definition = self._draft.definition
        every = [] if definition is None else [vertex.id for vertex in definition.plan.vertices]
        return every if self._draft.base is None else [vertex for vertex in every if vertex in needed]

    def _begun(self, subtask: SubtaskId, changes: Sequence[StateChange]) -> SubtaskEntry:
        """Write the snapshot of a subtask that has not run."""
        assert self._draft.definition is not None, "a draft without a base has a pipeline"
        names = [str(node.name) for node in self._draft.definition.plan.vertex(subtask.vertex).nodes]
        if self._draft.base is not None:
            names = [change.operator for change in changes]
        target = self._target(subtask)
        small = {f"{FINISHED_PREFIX}{name}": b"\x00" for name in names}
        target.put_bundle(self._positioned(small, subtask))
        self._put_changed(target, subtask, changes, {})
        return SubtaskEntry(subtask, target.finish())

    def _rewritten(self, base: Base, entry: SubtaskEntry, changes: Sequence[StateChange]) -> SubtaskEntry:
        """Write the snapshot of a subtask again, with what is changed in it."""
        subtask, target = entry.subtask, self._target(entry.subtask)
        changed = {change.section for change in changes}
        former = former_of(base, entry, changed)
        small = {section: data for section, data in former.small.items() if not self._is_gone(section)}
        target.put_bundle(self._positioned(small, subtask))
        for section, read in former.others:
            if not self._is_gone(section):
                data, where = read(), f"{section} of {subtask}"
                target.put(section, [data], {node_of(section): stored_rows(decode_sections(data, where), where)})
        for part in entry.parts:
            is_taken = part.section in (BUNDLE, *changed) or part.section.startswith(FILES_PREFIX)
            if not is_taken and not self._is_gone(part.section):
                target.put(part.section, [base.read(part)], part.rows, part.key_groups, part.name)
        known = {section: parts for section, parts in former.changed.items() if not self._is_gone(section)}
        self._put_changed(target, subtask, changes, known)
        return replace(entry, parts=target.finish(), committables=self._copied_outputs(base, entry.committables))

    def _put_changed(
        self,
        target: SubtaskTarget,
        subtask: SubtaskId,
        changes: Sequence[StateChange],
        former: Mapping[str, Sequence[Sections]],
    ) -> None:
        for change in changes:
            state = self._state(change, subtask, former.get(change.section, ()))
            frozen = state.frozen(has_keys=change.prefix == STATE_PREFIX)
            target.put_state(change.operator, frozen, change.prefix)

    def _state(self, change: StateChange, subtask: SubtaskId, former: Sequence[Sections]) -> SubtaskState:
        """Return what one subtask has of a changed operator."""
        found = []
        for name, becomes in change.states.items():
            batches: list[pa.RecordBatch] = []
            if becomes.given is not None:
                batches = self._resolved.rows[change.section, name].of(subtask.index)
            elif becomes.stays is not None:
                stored = [sections[name] for sections in former if name in sections]
                where = f"state '{name}' of {subtask}"
                kept = [batch for data in stored for batch in decode_batches(data, becomes.stays, where)]
                batches = [as_declared(batch, becomes.shape.schema) for batch in kept]
            found.append((change.stored(name), batches))
        meta = dict(change.meta)
        for sections in former:
            # what belongs to no key stays as it was, and wins over what a beginning operator would get
            meta |= {name: bytes(data) for name, data in sections.items() if data[:4] != ARROW_START}
        return SubtaskState(found, meta)

    def _positioned(self, small: Mapping[str, bytes], subtask: SubtaskId) -> dict[str, bytes]:
        """Return small sections with the positions that were given; without any a source begins at its beginning."""
        found = dict(small)
        for operator, positions in self._resolved.positions.items():
            section = f"{POSITIONS_PREFIX}{operator}"
            found.pop(section, None)
            if subtask.vertex == operator and subtask.index in positions:
                found[section] = encode_positions(positions[subtask.index])
        return found

    def _is_gone(self, section: str) -> bool:
        """Whether it goes with its operator; what was on its way to one, or whether it had ended, is of its chain."""
        is_of_chain = section.startswith((IN_FLIGHT_PREFIX, FINISHED_PREFIX))
        return not is_of_chain and node_of(section) in self._resolved.gone

    def _copied_outputs(self, base: Base, outputs: Iterable[Committable]) -> tuple[Committable, ...]:
        """Return those that are promised still: not of operators that go, nor committed since (WS10)."""
        promised = (c for c in outputs if c.sink not in self._resolved.gone and c not in self._settled)
        return tuple(self._copied(base, committable) for committable in promised)

    def _given_up(self, outputs: Iterable[Committable]) -> list[Committable]:
        """Return what goes with its operator, and was never committed (SV30, WS10)."""
        return [c for c in outputs if c.sink in self._resolved.gone and c not in self._settled]

    def _copied(self, base: Base, output: Committable) -> Committable:
        """Return prepared output with its files copied: a restore under the same name commits it (WS10)."""
        subtask = SubtaskId(VertexId(output.sink), output.subtask_index)
        stored = None if output.stored is None else self._copied_output(base, subtask, output.stored)
        return replace(
            output, stored=stored, pieces=tuple(self._copied_output(base, subtask, p) for p in output.pieces)
        )

    def _copied_output(self, base: Base, subtask: SubtaskId, part: SnapshotPart) -> SnapshotPart:
        self._outputs_count += 1
        payload = bytes(base.read(part))
        return write_output(self._destination(subtask), subtask, self._checkpoint, self._outputs_count, payload)

    def _target(self, subtask: SubtaskId) -> SubtaskTarget:
        return SubtaskTarget(self._destination(subtask), subtask, self._checkpoint)

    def _destination(self, subtask: SubtaskId) -> SnapshotDestination:
        limits = CheckpointConfig() if self._draft.definition is None else self._draft.definition.config.checkpoints
        resolved = self._resolved
        owned = key_groups_of_subtask(
            subtask.index % resolved.parallelism, resolved.max_parallelism, resolved.parallelism
        )
        keys = OwnedKeys(KeyGroups(owned.start, len(owned)), resolved.max_parallelism)
        return SnapshotDestination(self._storage, self._place.prefix, self._generation, limits.inline_bytes_max, keys)
