"""What the subtasks of a checkpoint had, as far as it is taken apart to be written again.

Everything is read with its checksums (WS8). Counterpart: ``writing``, which puts it together; other parts it copies as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from headgate.codec.snapshot import (
    FILES_PREFIX,
    FINISHED_PREFIX,
    OF_ROWS,
    POSITIONS_PREFIX,
    ROUNDS_PREFIX,
    STATE_PREFIX,
    decode_sections,
)
from headgate.errors import UsageError
from headgate.model.ids import VertexId
from headgate.model.key_groups import key_groups_of_subtask
from headgate.model.manifest import BUNDLE, KeyGroups, SubtaskEntry
from headgate.runtime.written_state.draft import Base
from headgate.state.choice import portable_rows
from headgate.state.files import StoredFiles

Sections: TypeAlias = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class Former:
    """What one subtask had.

    Attributes:
        small: sections of its bundle that are no states.
        others: what reads states that stay, but in parts of their own: in version 1 they are in the bundle (SF2), and
            those in files of RocksDB are written as rows, so that any backend restores them (RB22).
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
            elif section.startswith(OF_ROWS):
                former.others.append((section, _returning(inner)))
            else:
                former.small[section] = bytes(inner)
    for node in dict.fromkeys(node_of(p.section) for p in entry.parts if p.section.startswith(FILES_PREFIX)):
        _take_files(former, base, entry, node, changed)
    return former


def _take_files(former: Former, base: Base, entry: SubtaskEntry, node: str, changed: Collection[str]) -> None:
    """Take the rows of an operator whose state is in files of RocksDB (RB22)."""
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


def _returning(data: memoryview) -> Callable[[], memoryview]:
    return lambda: data


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
        if entry.subtask.index != 0:
            continue
        for part in entry.parts:
            sections = decode_sections(base.read(part), base.where(part)) if part.section == BUNDLE else [part.section]
            found |= {node_of(section): entry.subtask.vertex for section in sections}
    return found


def node_of(section: str) -> str:
    """Return the operator that a section of a snapshot is of."""
    return section.partition("/")[2]
