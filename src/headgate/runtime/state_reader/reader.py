"""The states of a checkpoint, with kinds, columns, rows and bytes, and the rows of one of them as Arrow batches.

Of each state one piece is read, the one in the smallest part, to know its columns. Only the parts that can hold
the wanted columns, keys and key groups are read, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.codec.snapshot import BROADCAST_PREFIX, DATABASE_DESCRIPTION, LISTS_PREFIX, UNION_PREFIX
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UsageError
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.model.state_schema import StateIdentity
from headgate.runtime.checkpoints.snapshot_files import part_location
from headgate.runtime.state_reader.lookup import Piece, StoredCheckpoint, operators_of, pieces_of
from headgate.runtime.state_reader.schema import (
    EXPIRES,
    KEY_GROUP,
    OF_TIMERS,
    SUBTASK,
    TIME,
    WINDOW,
    WINDOW_END,
    WINDOW_START,
    Decoded,
    Kind,
    Shape,
    decode_piece,
    shape_of,
)
from headgate.state.backend import DATES_MS, TIME_COLUMN
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.snapshot import StoredFiles
from headgate.state.ttl import EXPIRES_COLUMN
from headgate.state.worker_backends import portable_rows, schema_in_files
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
        """How many rows it has in all subtasks; None if some were never counted, or may have expired."""
        counts = [piece.rows for piece in self.pieces if piece.rows is not None and not self._may_have_expired(piece)]
        return sum(counts) if len(counts) == len(self.pieces) else None

    def _may_have_expired(self, piece: Piece) -> bool:
        """Whether ``piece`` has rows that count although they had expired."""
        is_described = piece.part.name == DATABASE_DESCRIPTION
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
            operator: that has the state.
            piece: what is read.
            groups: some of its key groups: of a database only the files with these are read. There may be more rows.

        Raises:
            CorruptionError, StorageError
        """
        place = self._checkpoint.place
        where = part_location(f"{place.url.rstrip('/')}/{place.prefix}", piece.part)
        identity = StateIdentity(self._checkpoint.manifest.state_texts.get(operator, ""))
        if piece.files:
            return self._in_files(operator, piece, identity, where, groups or piece.key_groups)
        return decode_piece(piece, self._read(piece), identity, where)

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
        where = part_location(directory, piece.part)
        return StoredFiles(piece.files, partial(self._checkpoint.read, self._storage), where, directory)

    def _in_files(self, operator: str, piece: Piece, identity: StateIdentity, where: str, groups: KeyGroups) -> Decoded:
        """Return the rows of ``piece`` in ``groups``, which are read a range of key groups at a time."""

        def batches() -> Iterator[pa.RecordBatch]:
            for read in portable_rows(self._stored(piece), None, groups):
                yield from decode_piece(piece, read(), identity, where).batches

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
    return _shaped(checkpoint, storage, _named_pieces(checkpoint, storage, operator, is_counted=is_counted))


def _named_pieces(
    checkpoint: StoredCheckpoint, storage: Storage, operator: str | None, *, is_counted: bool
) -> list[tuple[str, str, list[Piece]]]:
    """Return operator, name and pieces of each state."""
    found: dict[tuple[str, str, str], list[Piece]] = {}
    for node, name, piece in pieces_of(checkpoint, storage, operator, is_counted=is_counted):
        found.setdefault((node, name, piece.prefix), []).append(piece)
    taken = {(node, name) for node, name, prefix in found if prefix not in _OF_SUBTASKS}
    return [
        (node, f"{prefix}{name}" if prefix in _OF_SUBTASKS and (node, name) in taken else name, pieces)
        for (node, name, prefix), pieces in sorted(found.items())
    ]


def _shaped(
    checkpoint: StoredCheckpoint, storage: Storage, named: Iterable[tuple[str, str, list[Piece]]]
) -> list[StoredState]:
    """Return states with their shapes, for which part of each is read."""
    reader = PartReader(checkpoint, storage)
    # of the smallest part: all have the same columns, which is checked where rows are read
    return [
        StoredState(node, name, reader.shape(node, min(pieces, key=lambda piece: piece.part.size_bytes)), tuple(pieces))
        for node, name, pieces in named
    ]


def state_named(checkpoint: StoredCheckpoint, storage: Storage, operator: str, name: str | None = None) -> StoredState:
    """Return one state of ``operator``; without a ``name`` the only one that it has. Its rows are not counted.

    Raises:
        UsageError: there is none, or there are several; names those that there are.
        CorruptionError, StorageError
    """
    named = _named_pieces(checkpoint, storage, operator, is_counted=False)
    if not named:
        there = _list(operators_of(checkpoint))
        raise UsageError(
            f"{checkpoint.what} holds nothing of an operator '{operator}'; the operators with state are {there}"
        )
    names = [each for _, each, _ in named]
    if name is not None:
        if name not in names:
            raise UsageError(f"operator '{operator}' has no state '{name}' in {checkpoint.what}; it has {_list(names)}")
        named = [named[names.index(name)]]  # the others may be many, and are not read
    main = main_of(_shaped(checkpoint, storage, named))
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


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a state is wanted. Make it with ``selection``.

    Attributes:
        schema: the columns.
        keys: these keys only, in the stored columns; None: all.
        groups: only keys of these key groups, which are those of ``keys`` if there are any; None: all.
    """

    schema: pa.Schema
    keys: pa.RecordBatch | None = None
    groups: frozenset[int] | None = None

    def may_be_in(self, piece: Piece) -> bool:
        """Whether any wanted key can be in ``piece``."""
        return self.groups is None or bool(self._in(piece))

    def range_in(self, piece: Piece) -> KeyGroups:
        """Return the key groups of ``piece`` from the first wanted one to the last; there are some."""
        if self.groups is None:
            return piece.key_groups
        found = self._in(piece)
        assert found, "asked only of pieces that may have a wanted key"
        return KeyGroups(min(found), max(found) - min(found) + 1)

    def _in(self, piece: Piece) -> list[int]:
        there = piece.key_groups
        return [group for group in self.groups or () if there.first <= group < there.first + there.count]


def selection(
    state: StoredState,
    max_parallelism: int,
    columns: Sequence[str] | None = None,
    keys: Iterable[Any] | None = None,
    groups: Iterable[int] | None = None,
) -> Selection:
    """Return what is wanted of ``state``.

    Args:
        state: what is read.
        max_parallelism: the number of key groups.
        columns: by their names; None: all but those that say where a row was.
        keys: values of the key; tuples if it has several columns.
        groups: key groups.

    Raises:
        UsageError: there is no such column, the state has no key, or a key is of another type.
    """
    for name, several in (("keys", keys), ("key_groups", groups)):
        if several is not None and not _is_list(several):
            raise UsageError(f"{name} must be a list, such as [{several!r}], not {several!r}")
    schema = state.shape.shown if columns is None else _chosen(state, columns)
    if keys is None and groups is None:
        return Selection(schema)
    if not state.shape.keys:
        raise UsageError(f"state '{state.name}' of operator '{state.operator}' has no key to choose rows by")
    chosen = None if groups is None else frozenset(groups)
    # not isinstance(): True and False are ints, and no key groups
    wrong = [group for group in chosen or () if type(group) is not int or not 0 <= group < max_parallelism]
    if wrong:
        asked = ", ".join(sorted(map(repr, wrong)))
        raise UsageError(f"there are the key groups 0 to {max_parallelism - 1}, but {asked} is asked for")
    if keys is None:
        return Selection(schema, None, chosen)
    wanted = _wanted(state, keys)
    of_keys = key_groups(hash_columns(wanted, state.shape.keys), max_parallelism)
    if chosen is not None:
        rows = np.isin(of_keys, np.fromiter(chosen, np.int64))
        wanted, of_keys = wanted.filter(pa.array(rows)), of_keys[rows]
    return Selection(schema, wanted, frozenset(of_keys.tolist()))


def batches_of(
    checkpoint: StoredCheckpoint, storage: Storage, state: StoredState, wanted: Selection
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``state`` that are wanted, subtask by subtask; batches without rows are left out.

    Raises:
        CorruptionError, StorageError
    """
    reader = PartReader(checkpoint, storage)
    max_parallelism = checkpoint.manifest.max_parallelism
    for piece in filter(wanted.may_be_in, state.pieces):
        found = reader.decoded(state.operator, piece, wanted.range_in(piece))
        if not found.shape.schema.equals(state.shape.schema):
            where = f"state '{state.name}' of operator '{state.operator}', {piece.subtask}"
            expected, other = state.shape.schema.names, found.shape.schema.names
            raise CorruptionError(where, 0, f"the columns {expected}, as elsewhere", f"{other}, or other types")
        for batch in found.batches:
            rows = _kept(batch, state.shape, wanted, max_parallelism)
            if rows.num_rows:
                yield _shown(rows, state.shape, wanted.schema, piece, max_parallelism)


def _chosen(state: StoredState, columns: Sequence[str]) -> pa.Schema:
    every = state.shape.all
    if not _is_list(columns) or not columns:
        raise UsageError(f"columns must be a list of names, such as {every.names[:2]}, not {columns!r}")
    for name in columns:
        if name not in every.names:
            raise UsageError(
                f"state '{state.name}' of operator '{state.operator}' has no column '{name}'; it has "
                f"{', '.join(every.names)}"
            )
    return pa.schema([every.field(name) for name in dict.fromkeys(columns)])


def _wanted(state: StoredState, keys: Iterable[Any]) -> pa.RecordBatch:
    """Return the requested keys as rows of the key's columns."""
    fields = [state.shape.schema.field(name) for name in state.shape.keys]
    rows = [key if len(fields) > 1 else (key,) for key in keys]
    described = ", ".join(f"{n}: {f.type}" for n, f in zip(state.shape.shown_keys, fields, strict=True))
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != len(fields) or any(value is None for value in row):
            given = row if len(fields) > 1 else row[0]
            raise UsageError(f"a key of operator '{state.operator}' is ({described}), not {given!r}")
    try:
        columns = [exact_array([row[i] for row in rows], field.type) for i, field in enumerate(fields)]
    except MisfitError as error:
        raise UsageError(f"a key of operator '{state.operator}' is ({described}): {error}") from None
    return pa.RecordBatch.from_arrays(columns, names=list(state.shape.keys))


def _is_list(several: object) -> bool:
    return isinstance(several, Iterable) and not isinstance(several, str | bytes)


def _kept(batch: pa.RecordBatch, shape: Shape, wanted: Selection, max_parallelism: int) -> pa.RecordBatch:
    """Return the rows that are wanted, in their order."""
    if wanted.keys is not None:
        rows = _is_among(batch, wanted.keys, shape.keys)
    elif wanted.groups is not None:
        groups = key_groups(hash_columns(batch, shape.keys), max_parallelism)
        rows = np.isin(groups, np.fromiter(wanted.groups, np.int64))
    else:
        return batch
    return batch if rows.all() else batch.filter(pa.array(rows))


def _is_among(batch: pa.RecordBatch, keys: pa.RecordBatch, names: Sequence[str]) -> Mask:
    """Return which rows have one of ``keys``."""
    # by position: a key column may have any name, also that of the row number
    by_position = [f"key{i}" for i in range(len(names))]
    there, wanted = (
        pl.DataFrame({new: pl.from_arrow(rows.column(name)) for new, name in zip(by_position, names, strict=True)})
        for rows in (batch, keys)
    )
    found = there.with_row_index("row").join(wanted, on=by_position, how="semi")["row"].to_numpy()
    rows: Mask = np.zeros(batch.num_rows, np.bool_)
    rows[found] = True
    return rows


def _shown(
    batch: pa.RecordBatch, shape: Shape, schema: pa.Schema, piece: Piece, max_parallelism: int
) -> pa.RecordBatch:
    """Return the columns of ``schema``; only what is asked for is computed."""
    arrays = [_column(batch, shape, name, piece, max_parallelism) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _dates(times_ms: pa.Array) -> pa.Array:
    """Return milliseconds since 1970 as dates, null where there is none."""
    is_date = pc.and_(pc.greater_equal(times_ms, DATES_MS[0]), pc.less_equal(times_ms, DATES_MS[-1]))
    dates = pc.if_else(is_date, times_ms, pa.scalar(None, pa.int64()))
    return pc.multiply(dates, 1_000).view(pa.timestamp("us"))


def _column(batch: pa.RecordBatch, shape: Shape, name: str, piece: Piece, max_parallelism: int) -> pa.Array:
    if name in shape.names:
        return batch.column(shape.names.index(name))
    if name in (WINDOW_START, WINDOW_END):
        number = batch.column(WINDOW) if name == WINDOW_START else pc.add(batch.column(WINDOW), 1)
        return pc.multiply(number, shape.window_ms * 1_000).view(pa.timestamp("us"))
    if name == TIME and shape.kind in OF_TIMERS.values():
        return _dates(batch.column(TIME_COLUMN))
    if name == EXPIRES and shape.expires:
        return _dates(batch.column(EXPIRES_COLUMN))
    if name == SUBTASK:
        return pa.repeat(pa.scalar(piece.subtask.index, pa.int32()), batch.num_rows)
    assert name == KEY_GROUP, f"selection() accepted the unknown column {name}"
    return pa.array(key_groups(hash_columns(batch, shape.keys), max_parallelism).astype(np.int32))
