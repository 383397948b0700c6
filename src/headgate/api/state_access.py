"""State as rows: read from checkpoints and savepoints, and written into new savepoints, without a run.

Rows written have the columns that ``read_state`` returns. Frames are Polars, pandas, Arrow or Spark tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import polars as pl
import pyarrow as pa

from headgate.api.config import whole
from headgate.api.pipeline import Pipeline
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.progress import Location
from headgate.runtime.savepoint_writer.draft import Base, Draft
from headgate.runtime.savepoint_writer.writer import Written, write_savepoint
from headgate.runtime.state_reader.lookup import POSITIONS, StoredCheckpoint, find_checkpoint
from headgate.runtime.state_reader.reader import Selection, batches_of, catalog_row, selection, state_named, states_of
from headgate.storage.base import Storage
from headgate.storage.urls import absolute_location

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

    The columns are the key columns under their own names, ``map_key`` for maps, and ``value``. For windows,
    they are the columns of their records or partial results. State without a key also has the column
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


Frame: TypeAlias = Any
"""A Polars or pandas frame, an Arrow table, batch or reader of batches, or a (not streaming) Spark DataFrame."""


def arrow_table(rows: Frame, what: str) -> pa.Table:
    """Return ``rows`` as an Arrow table; those of Spark come partition by partition as Arrow batches.

    Raises:
        UsageError: it is no table; ``what`` says what it was given for.
        StorageError: Spark could not compute it.
    """
    if isinstance(rows, pl.LazyFrame):
        rows = rows.collect()
    if isinstance(rows, pl.DataFrame):
        return rows.to_arrow()
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.read_all()
    if hasattr(rows, "sparkSession") and hasattr(rows, "toArrow"):
        return _of_spark(rows, what)
    if type(rows).__module__.startswith("pandas."):
        return pa.Table.from_pandas(rows, preserve_index=False)
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    raise UsageError(f"{what}: a frame is needed, of Polars, pandas, Arrow or Spark, not {type(rows).__name__}")


def _of_spark(rows: Any, what: str) -> pa.Table:
    if rows.isStreaming:
        raise UsageError(f"{what}: a streaming DataFrame has no end; give a bounded one")
    from headgate.spark.dataframes import collected

    return collected(rows)


@dataclass(frozen=True, slots=True)
class WrittenSavepoint:
    """A savepoint that was written from frames.

    Attributes:
        path: the path of the savepoint.
        rows: the number of rows of each state that you passed, by operator and state.
        empty: operators with state that begin without any, because you passed no rows for them.
        from_the_beginning: sources that read from the beginning of their input, because the savepoint has no positions
            for them.
    """

    path: str
    rows: Mapping[tuple[str, str], int]
    empty: tuple[str, ...] = ()
    from_the_beginning: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"savepoint {self.path} is complete"]
        said += [f"state '{s}' of operator '{o}' has {rows:,} rows" for (o, s), rows in self.rows.items()]
        said += [f"operator '{name}' begins empty" for name in self.empty]
        said += [f"source '{name}' begins at the beginning of its input" for name in self.from_the_beginning]
        return "\n".join(said)


class NewSavepoint:
    """A savepoint that is being prepared. Only ``write`` writes it."""

    def __init__(self, draft: Draft, path: str) -> None:
        """Use ``new_savepoint``."""
        self._draft = draft
        self._path = path

    def with_state(self, operator: str, state: str, rows: Frame) -> Self:
        """Make ``rows`` the whole content of one state.

        The elements of a list keep the order of the frame. To set the positions at which a source begins, pass them as
        the state ``"positions"`` of the source, with the columns ``split`` and ``position``, as ``read_state`` returns
        them.

        Args:
            operator: the name of the operator.
            state: the name of the state; for ``reduce`` it is ``"accumulators"``.
            rows: a Polars, pandas, Arrow or Spark frame with the columns that ``read_state`` returns, in any order.

        Raises:
            UsageError: there is no such operator, or ``rows`` is not a frame.
        """
        return self._put(operator, state, rows, must_be_there=False)

    def write(self) -> WrittenSavepoint:
        """Write the savepoint. It exists, complete, only when this call returns.

        Raises:
            UsageError: there is already something at the path, or a state or its rows do not fit. Nothing is left at
                the path then.
            CorruptionError: the checkpoint or savepoint that it starts from is damaged.
            StorageError: reading or writing failed; try again.
        """
        return _said(self._path, write_savepoint(self._draft, self._path, SYSTEM_CLOCK.wall_ms()), self._draft)

    def _put(self, operator: str, state: str, rows: Frame, *, must_be_there: bool) -> Self:
        for what, name in (("operator", operator), ("state", state)):
            if not isinstance(name, str) or not name:
                raise UsageError(f"{what} must be a name, not {name!r}")
        table = arrow_table(rows, f"state '{state}' of operator '{operator}'")
        self._draft.put(operator, state, table, must_be_there=must_be_there)
        return self


class EditedSavepoint(NewSavepoint):
    """A changed copy of a savepoint or checkpoint that is being prepared. The original stays as it is."""

    def replace(self, operator: str, state: str, rows: Frame) -> Self:
        """Replace the whole content of one state with ``rows``; see ``with_state``.

        Raises:
            UsageError: there is no such operator, or ``rows`` is not a frame.
        """
        return self._put(operator, state, rows, must_be_there=True)

    def drop(self, operator: str, state: str | None = None) -> Self:
        """Remove one state of an operator, or, without ``state``, everything that the savepoint has of the operator.

        The positions of a source are its state ``"positions"``. Without them the source reads from the beginning.

        Raises:
            UsageError: there is no such operator.
        """
        self._draft.drop(operator, state)
        return self


def new_savepoint(pipeline: Pipeline, path: Location, *, parallelism: int | None = None) -> NewSavepoint:
    """Prepare a savepoint for a pipeline that has not run yet, with state that you provide as frames.

    ::

        hg.new_savepoint(p, "/backup/bootstrap").with_state("totals", "sum", frame).write()
        p.run(restore="/backup/bootstrap")

    Operators for which you pass no rows begin empty, and sources without positions read from the beginning of their
    input. The result of ``write`` names both.

    Args:
        pipeline: the pipeline that declares the state.
        path: the path of the savepoint: a directory that is empty or does not exist, or a URL.
        parallelism: into how many parts the state is divided; default is the parallelism of the pipeline. The savepoint
            can be restored at any other parallelism.

    Raises:
        UsageError: the pipeline is wrong, or the parallelism is out of range.
    """
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"new_savepoint needs a headgate.Pipeline, not {type(pipeline).__name__}")
    definition = pipeline.definition()
    if parallelism is not None:
        whole(parallelism, definition.plan.max_parallelism, "parallelism")
    draft = Draft(None, definition, SYSTEM_CLOCK.wall_ms(), parallelism)
    return NewSavepoint(draft, _location(path, "path"))


def edit_savepoint(
    source: Location, path: Location, *, id: int | None = None, pipeline: Pipeline | None = None
) -> EditedSavepoint:
    """Prepare a copy of a savepoint or checkpoint in which some of the state is changed.

    ::

        wrong = hg.read_state("/backup/monday", "totals")
        right = wrong.with_columns(value=pl.col("value").clip(0))
        hg.edit_savepoint("/backup/monday", "/backup/mended").replace("totals", "sum", right).write()

    Args:
        source: a savepoint, ``DIRECTORY/PIPELINE`` for the newest checkpoint of a pipeline, or
            ``DIRECTORY/PIPELINE/chk-ID``.
        path: the path of the new savepoint: a directory that is empty or does not exist, or a URL.
        id: the id of a checkpoint of the pipeline that is not the newest one.
        pipeline: a pipeline that declares the new state, if its declaration changes: another key, another type, or a
            new operator. Without it, all states keep their columns.

    Raises:
        UsageError: there is no such checkpoint or savepoint, or the pipeline has another number of key groups.
        CorruptionError: the source is damaged.
        StorageError: the source was removed in the meantime, or cannot be read.
    """
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise UsageError(f"edit_savepoint(pipeline=...) needs a headgate.Pipeline, not {type(pipeline).__name__}")
    found = find_checkpoint(_location(source, "source"), id)
    definition = None if pipeline is None else pipeline.definition()
    draft = Draft(Base(found, found.storage()), definition, SYSTEM_CLOCK.wall_ms())
    return EditedSavepoint(draft, _location(path, "path"))


def _location(path: Location, what: str) -> str:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{what} must be a path or URL, such as '/backup/monday', not {path!r}")
    return absolute_location(path)


def _said(path: str, written: Written, draft: Draft) -> WrittenSavepoint:
    resolved = written.resolved
    rows = {
        (change.operator, name): resolved.rows[section, name].rows.num_rows
        for section, change in resolved.changes.items()
        for name in change.states
        if (section, name) in resolved.rows and (change.operator, name) in draft.given
    }
    rows |= {(source, POSITIONS): sum(map(len, splits.values())) for source, splits in resolved.positions.items()}
    sources = [name for name, one in draft.declared.items() if one.is_source] if draft.base is None else []
    begun = tuple(name for name in dict.fromkeys([*sources, *resolved.positions]) if not resolved.positions.get(name))
    return WrittenSavepoint(path, rows, draft.begins_empty, begun)
