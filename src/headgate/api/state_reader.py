"""State of completed checkpoints and savepoints as Polars frames and Arrow batches, without the pipeline or Spark.

Counterpart: ``runtime.state_reader``. ``spark.state_source`` and ``cli.state`` show the same to Spark and to people.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.progress import Location
from headgate.runtime.state_reader.lookup import StoredCheckpoint, find_checkpoint
from headgate.runtime.state_reader.reader import Selection, batches_of, catalog_row, selection, state_named, states_of
from headgate.storage.base import Storage

_CATALOG = pl.Schema(
    {
        "operator": pl.String(),
        "state": pl.String(),
        "kind": pl.String(),
        "keys": pl.List(pl.String()),
        "columns": pl.String(),
        "rows": pl.Int64(),
        "size_bytes": pl.Int64(),
        "subtasks": pl.Int64(),
    }
)


def state_catalog(path: Location, *, id: int | None = None) -> pl.DataFrame:
    """List the states in a checkpoint or savepoint, one per row.

    The columns are ``operator``, ``state``, ``kind``, ``keys`` (names of the key columns), ``columns`` (names and
    types), ``rows`` (null if they were not counted), ``size_bytes``, and ``subtasks`` (how many of them have part of
    the state).

    Args:
        path: a savepoint, ``DIRECTORY/PIPELINE`` for the newest checkpoint of a pipeline, or
            ``DIRECTORY/PIPELINE/chk-ID``.
        id: the id of a checkpoint of the pipeline that is not the newest one.

    Raises:
        UsageError: there is no such checkpoint or savepoint.
        CorruptionError: part of it is damaged.
        StorageError: it was removed in the meantime, or cannot be read.
    """
    checkpoint = _found(path, id)
    rows = [catalog_row(state) for state in states_of(checkpoint, checkpoint.storage())]
    return pl.DataFrame(rows, schema=_CATALOG)


def read_state(
    path: Location,
    operator: str,
    state: str | None = None,
    *,
    id: int | None = None,
    columns: Sequence[str] | None = None,
    keys: Iterable[Any] | None = None,
    key_groups: Iterable[int] | None = None,
) -> pl.DataFrame:
    """Return the rows of one state: one row per value, list element, map entry, accumulator or record.

    The columns are the key columns under their own names, ``map_key`` for maps, and ``value``. For ``reduce`` and
    windows, they are the columns of their records or partial results. State without a key also has the column
    ``_subtask``. For keyed state, ``_subtask``, ``_key_group`` and (with a TTL) ``_expires`` are returned only if you
    name them in ``columns``. Rows that had expired at the checkpoint are left out. The page
    docs/how-to/look-at-state.md lists the columns of each kind of state.

    Args:
        path: a savepoint, ``DIRECTORY/PIPELINE`` for the newest checkpoint of a pipeline, or
            ``DIRECTORY/PIPELINE/chk-ID``.
        operator: the name of the operator.
        state: the name of the state; not needed if the operator has only one.
        id: the id of a checkpoint of the pipeline that is not the newest one.
        columns: return only these columns.
        keys: return only the rows of these keys: values, or tuples if the key has several columns. Only the parts of
            snapshots that may contain these keys are read.
        key_groups: return only the rows of these key groups, and read only the parts that may contain them.

    Raises:
        UsageError: there is no such checkpoint, operator, state, column or key.
        CorruptionError: part of the data that is read is damaged.
        StorageError: the checkpoint was removed in the meantime, or cannot be read.
    """
    found = _Reading(path, operator, state, id, columns, keys, key_groups)
    frame = pl.from_arrow(pa.Table.from_batches(found.batches(), found.wanted.schema))
    assert isinstance(frame, pl.DataFrame)
    return frame


def read_state_batches(
    path: Location,
    operator: str,
    state: str | None = None,
    *,
    id: int | None = None,
    columns: Sequence[str] | None = None,
    keys: Iterable[Any] | None = None,
    key_groups: Iterable[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that ``read_state`` returns as Arrow batches, with one part of a snapshot in memory at a time.

    The arguments are checked immediately. Iterating over the batches may still raise CorruptionError and StorageError.
    """
    return _Reading(path, operator, state, id, columns, keys, key_groups).batches()


def _found(path: Location, id: int | None) -> StoredCheckpoint:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path must be a path or URL, such as 'checkpoints/orders', not {path!r}")
    if id is not None and (not isinstance(id, int) or isinstance(id, bool)):
        raise UsageError(f"id must be the number of a checkpoint, not {id!r}")
    return find_checkpoint(os.fspath(path), id)


class _Reading:
    """One state of one checkpoint, and what of it is wanted."""

    def __init__(
        self,
        path: Location,
        operator: str,
        state: str | None,
        id: int | None,
        columns: Sequence[str] | None,
        keys: Iterable[Any] | None,
        groups: Iterable[int] | None,
    ) -> None:
        for what, name in (("operator", operator), ("state", state or "")):
            if not isinstance(name, str):
                raise UsageError(f"{what} must be a name, not {name!r}; state_catalog(path) lists what there is")
        self._checkpoint: StoredCheckpoint = _found(path, id)
        self._storage: Storage = self._checkpoint.storage()
        self._state = state_named(self._checkpoint, self._storage, operator, state)
        key_groups_count = self._checkpoint.manifest.max_parallelism
        self.wanted: Selection = selection(self._state, key_groups_count, columns, keys, groups)

    def batches(self) -> Iterator[pa.RecordBatch]:
        return batches_of(self._checkpoint, self._storage, self._state, self.wanted)
