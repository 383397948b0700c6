"""What states a checkpoint has: whose, of what kind, with which columns, rows and bytes (RS4).

Counterparts: ``pieces`` lists where they are, ``reading`` reads one of them. Of each state one piece is read, the one
in the smallest part, to know its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from headgate.codec.snapshot import (
    BROADCAST_PREFIX,
    LISTS_PREFIX,
    PACKED_DESCRIPTION,
    TIMED_DESCRIPTION,
    UNION_PREFIX,
)
from headgate.errors import UsageError
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.model.state_identity import StateIdentity
from headgate.runtime.checkpoints.snapshots import place_of
from headgate.runtime.stored_state.decoding import Decoded, decoded
from headgate.runtime.stored_state.pieces import Piece, operators_of, pieces_of
from headgate.runtime.stored_state.places import StoredCheckpoint
from headgate.runtime.stored_state.shapes import Kind, Shape, shape_of
from headgate.state.choice import portable_rows, schema_in_files
from headgate.state.files import StoredFiles
from headgate.storage.base import Storage

BESIDE = (Kind.FACTS, Kind.ROUNDS)
"""What operators keep beside their state: it is shown when it is asked for by name."""

_OF_SUBTASKS = (LISTS_PREFIX, UNION_PREFIX, BROADCAST_PREFIX)
"""What belongs to no key may be called as something that does."""

_RANKS = {Kind.EVENT_TIME_TIMERS: 1, Kind.PROCESSING_TIME_TIMERS: 1, **dict.fromkeys(BESIDE, 2)}


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one operator."""

    operator: str
    name: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int | None:
        """How many rows it has in all subtasks; None if some were never counted, or may have expired (RB24)."""
        counts = [piece.rows for piece in self.pieces if piece.rows is not None and not self._may_have_expired(piece)]
        return sum(counts) if len(counts) == len(self.pieces) else None

    def _may_have_expired(self, piece: Piece) -> bool:
        """Whether ``piece`` has rows that count although they had expired."""
        is_described = piece.part.name in (TIMED_DESCRIPTION, PACKED_DESCRIPTION)
        return self.shape.expires and is_described and piece.rows != 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all of its pieces."""
        return sum(piece.size_bytes for piece in self.pieces)

    def narrowed(self, pieces: Iterable[Piece]) -> StoredState:
        """Return it with these pieces only."""
        return replace(self, pieces=tuple(pieces))


class PartReader:
    """Reads parts of one checkpoint, and keeps the last one: the states of an operator share parts."""

    def __init__(self, checkpoint: StoredCheckpoint, storage: Storage) -> None:
        self._checkpoint = checkpoint
        self._storage = storage
        self._last: tuple[SnapshotPart, memoryview] | None = None

    def decoded(self, operator: str, piece: Piece, groups: KeyGroups | None = None) -> Decoded:
        """Return the rows of ``piece``.

        Args:
            operator: whose state it is.
            piece: what is read.
            groups: some of its key groups: of a database only the files with these are read. There may be more rows.

        Raises:
            CorruptionError, StorageError
        """
        place = self._checkpoint.place
        where = place_of(f"{place.url.rstrip('/')}/{place.prefix}", piece.part)
        identity = StateIdentity(self._checkpoint.manifest.state_texts.get(operator, ""))
        if piece.files:
            return self._in_files(operator, piece, identity, where, groups or piece.key_groups)
        return decoded(piece, self._read(piece), identity, where)

    def shape(self, operator: str, piece: Piece) -> Shape:
        """Return the shape of the rows of ``piece``; of a database only the description is read.

        Raises:
            CorruptionError, StorageError
        """
        if not piece.files:
            return self.decoded(operator, piece).shape
        stored = self._stored(piece)
        identity = StateIdentity(self._checkpoint.manifest.state_texts.get(operator, ""))
        return shape_of(identity, piece.prefix, piece.path[-1], schema_in_files(stored, piece.path[-1]))

    def _stored(self, piece: Piece) -> StoredFiles:
        place = self._checkpoint.place
        directory = f"{place.url.rstrip('/')}/{place.prefix}"
        where = place_of(directory, piece.part)
        return StoredFiles(piece.files, partial(self._checkpoint.read, self._storage), where, directory)

    def _in_files(self, operator: str, piece: Piece, identity: StateIdentity, where: str, groups: KeyGroups) -> Decoded:
        """Return the rows of ``piece`` in ``groups``, which are read a range of key groups at a time."""

        def batches() -> Iterator[pa.RecordBatch]:
            for read in portable_rows(self._stored(piece), None, groups):
                yield from decoded(piece, read(), identity, where).batches

        return Decoded(self.shape(operator, piece), batches())

    def _read(self, piece: Piece) -> memoryview:
        if piece.committable is not None and piece.committable.stored is None:
            return memoryview(piece.part.inline)  # in the manifest, which has a checksum of its own
        if self._last is None or self._last[0] != piece.part:
            self._last = None  # two parts are never held
            self._last = (piece.part, self._checkpoint.read(self._storage, piece.part))
        return self._last[1]


def states_of(
    checkpoint: StoredCheckpoint, storage: Storage, operator: str | None = None, *, is_counted: bool = True
) -> list[StoredState]:
    """Return the states of a checkpoint, or of one of its operators, by name; see ``pieces_of``.

    Raises:
        CorruptionError, StorageError
    """
    found: dict[tuple[str, str, str], list[Piece]] = {}
    for node, name, piece in pieces_of(checkpoint, storage, operator, is_counted=is_counted):
        found.setdefault((node, piece.prefix, name), []).append(piece)
    reader = PartReader(checkpoint, storage)
    taken = {(node, name) for node, prefix, name in found if prefix not in _OF_SUBTASKS}
    states = []
    for (node, prefix, name), pieces in sorted(found.items(), key=lambda item: (item[0][0], item[0][2], item[0][1])):
        is_clear = prefix not in _OF_SUBTASKS or (node, name) not in taken
        shape = reader.shape(node, min(pieces, key=lambda piece: piece.part.size_bytes))
        states.append(StoredState(node, name if is_clear else f"{prefix}{name}", shape, tuple(pieces)))
    return states


def state_named(checkpoint: StoredCheckpoint, storage: Storage, operator: str, name: str | None = None) -> StoredState:
    """Return one state of ``operator``; without a ``name`` the only one that it has. Its rows are not counted.

    Raises:
        UsageError: there is none, or there are several; names those that there are.
        CorruptionError, StorageError
    """
    states = states_of(checkpoint, storage, operator, is_counted=False)
    if not states:
        there = _list(operators_of(checkpoint))
        raise UsageError(
            f"{checkpoint.what} holds nothing of an operator '{operator}'; the operators with state are {there}"
        )
    names = [state.name for state in states]
    if name is not None:
        found = [state for state in states if state.name == name]
        if not found:
            raise UsageError(f"operator '{operator}' has no state '{name}' in {checkpoint.what}; it has {_list(names)}")
        return found[0]
    main = main_of(states)
    if len(main) > 1:
        raise UsageError(f"operator '{operator}' has several states: {_list(names)}; name one")
    return main[0]


def catalog_row(state: StoredState) -> dict[str, Any]:
    """Return what a state is, as a row of the catalogue."""
    return {
        "operator": state.operator,
        "state": state.name,
        "kind": state.shape.kind.value,
        "keys": list(state.shape.shown_keys),
        "columns": ", ".join(f"{field.name}: {field.type}" for field in state.shape.shown),
        "rows": state.rows,
        "size_bytes": state.size_bytes,
        "subtasks": len({piece.subtask.index for piece in state.pieces}),
    }


def main_of(states: Sequence[StoredState]) -> list[StoredState]:
    """Return what is meant if no state is named: what was declared; without it timers; without these the rest."""
    ranks = [_RANKS.get(state.shape.kind, 0) for state in states]
    return [state for state, rank in zip(states, ranks, strict=True) if rank == min(ranks)]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
