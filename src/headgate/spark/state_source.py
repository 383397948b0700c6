"""``spark.read.format("headgate-state")``: state of checkpoints and savepoints as a DataFrame.

A PySpark Python data source that yields Arrow batches, one partition for each subtask's snapshot; without an operator
it lists what there is. All tasks, and all
actions on one DataFrame, read the checkpoint that was the newest when ``load`` was called. Counterpart:
``runtime.state_reader``; ``api.state_access`` does the same without Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.runtime.state_reader.lookup import Piece, StoredCheckpoint, find_checkpoint
from headgate.runtime.state_reader.reader import (
    Selection,
    StoredState,
    batches_of,
    catalog_row,
    selection,
    state_named,
    states_of,
)
from headgate.spark.dataframes import batches_for_spark, keys_in, schema_for_spark

_OPTIONS = ("path", "operator", "state", "id", "columns", "keys")

CATALOG = pa.schema(
    [
        ("operator", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("columns", pa.string()),
        ("rows", pa.int64()),
        ("size_bytes", pa.int64()),
        ("subtasks", pa.int64()),
    ]
)
"""The columns where no operator is named."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One state of one checkpoint, the columns of the DataFrame, and the keys that it has; None: all."""

    checkpoint: StoredCheckpoint
    state: StoredState
    columns: tuple[str, ...]
    schema: pa.Schema
    keys: tuple[Any, ...] | None


class StateDataSource(DataSource):  # type: ignore[misc]
    """``format("headgate-state")``.

    Options: ``path`` (also the argument of ``load``), ``operator``, ``state``, ``id`` (of the checkpoint),
    ``columns`` (names, with commas between them), and ``keys`` (a JSON list: only the rows of these keys). Without
    ``operator`` the rows are the states that there are.
    """

    _loaded: _Loaded | pa.RecordBatch | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "headgate-state"

    def schema(self) -> Any:
        """Return the columns as Spark has them; unsigned integers become wider signed ones."""
        return from_arrow_schema(self._load().schema)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return what reads the state in the columns of ``schema``."""
        loaded = self._load()
        return StateReader(loaded, schema) if isinstance(loaded, _Loaded) else CatalogReader(loaded, schema)

    def _load(self) -> _Loaded | pa.RecordBatch:
        """Find the checkpoint, once: the source is pickled with it."""
        if self._loaded is None:
            if wrong := self._wrong():
                raise UsageError(f"format headgate-state: {wrong}; the options are {', '.join(_OPTIONS)}")
            id_ = self.options.get("id")
            checkpoint = find_checkpoint(str(self.options["path"]), None if id_ is None else int(id_))
            self._loaded = self._found(checkpoint) if self.options.get("operator") else _catalog(checkpoint)
        return self._loaded

    def _wrong(self) -> str:
        """Return what is wrong with the options, or nothing."""
        unknown = sorted(name for name in self.options if name.lower() not in _OPTIONS)
        id_ = self.options.get("id")
        if unknown:
            return f"there is no option {unknown[0]}"
        if not self.options.get("path"):
            return "the option path is needed"
        if not self.options.get("operator") and any(map(self.options.get, ("state", "columns", "keys"))):
            return "the option operator is needed to choose a state, columns or keys"
        return "" if id_ is None or id_.isdecimal() else f"id must be the number of a checkpoint, not {id_!r}"

    def _found(self, checkpoint: StoredCheckpoint) -> _Loaded:
        columns = self.options.get("columns")
        state = state_named(checkpoint, checkpoint.storage(), self.options["operator"], self.options.get("state"))
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        keys = _keys(state, self.options.get("keys"))
        wanted = selection(state, checkpoint.manifest.max_parallelism, names, keys).schema
        # what is sent to every task: only the parts of this state, and none of the others
        slim = replace(checkpoint, manifest=replace(checkpoint.manifest, entries=(), carried=(), hooks=()))
        text = {state.operator: checkpoint.manifest.state_texts.get(state.operator, "")}
        slim = replace(slim, manifest=replace(slim.manifest, state_texts=text))
        schema = schema_for_spark(wanted)
        return _Loaded(slim, state, tuple(wanted.names), schema, keys)


def _keys(state: StoredState, text: str | None) -> tuple[Any, ...] | None:
    shape = state.shape
    if text is None or not shape.keys:  # without a key, ``selection`` says so
        return None if text is None else ()
    columns = [
        pa.field(shown, shape.schema.field(name).type) for name, shown in zip(shape.keys, shape.shown_keys, strict=True)
    ]
    return tuple(keys_in(text, columns, f"operator '{state.operator}'"))


def _catalog(checkpoint: StoredCheckpoint) -> pa.RecordBatch:
    rows = [catalog_row(state) for state in states_of(checkpoint, checkpoint.storage())]
    return pa.RecordBatch.from_pylist(rows, CATALOG)


class CatalogReader(DataSourceReader):  # type: ignore[misc]
    """Hands out which states there were when the DataFrame was made."""

    def __init__(self, catalog: pa.RecordBatch, schema: Any) -> None:
        self._catalog = catalog
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition."""
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        return batches_for_spark(self._catalog, to_arrow_schema(self._schema, timezone="UTC"))


class SubtaskPartition(InputPartition):  # type: ignore[misc]
    """What one subtask's snapshot has of the state."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(None)
        self.pieces = tuple(pieces)


class StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads one state. There is no ``pushFilters``: see ``spark.stream_reader.StreamReader``."""

    def __init__(self, loaded: _Loaded, schema: Any) -> None:
        self._loaded = loaded
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return a partition for each subtask that can have what is wanted."""
        wanted = self._wanted()
        pieces = sorted(filter(wanted.may_be_in, self._loaded.state.pieces), key=_subtask)
        return [SubtaskPartition(list(group)) for _, group in itertools.groupby(pieces, key=_subtask)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition; of none if there was nothing to be read."""
        target = to_arrow_schema(self._schema, timezone="UTC")
        if not isinstance(partition, SubtaskPartition):
            return
        loaded = self._loaded
        state = loaded.state.narrowed(partition.pieces)
        for batch in batches_of(loaded.checkpoint, loaded.checkpoint.storage(), state, self._wanted()):
            yield from batches_for_spark(batch, target)

    def _wanted(self) -> Selection:
        loaded = self._loaded
        return selection(loaded.state, loaded.checkpoint.manifest.max_parallelism, loaded.columns, loaded.keys)


def register_state_source(spark: Any) -> None:
    """Register ``spark.read.format("headgate-state")`` in a session.

    Raises:
        UsageError: the argument is not a SparkSession.
    """
    if not hasattr(spark, "dataSource"):
        raise UsageError(f"register_state_source needs the SparkSession that shall read, not {spark!r}")
    spark.dataSource.register(StateDataSource)


def _subtask(piece: Piece) -> int:
    return piece.subtask.index
