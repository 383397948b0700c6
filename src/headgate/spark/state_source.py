"""``spark.read.format("headgate-state")``: state of checkpoints and savepoints as a DataFrame.

A PySpark Python data source that yields Arrow batches, one partition for each subtask's snapshot; without an operator
it lists what there is. All tasks, and all
actions on one DataFrame, read the checkpoint that was the newest when ``load`` was called (RS13). Counterpart:
``runtime.stored_state``; ``api.stored_state`` does the same without Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, In, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from headgate.errors import UsageError
from headgate.runtime.stored_state.catalog import StoredState, catalog_row, state_named, states_of
from headgate.runtime.stored_state.pieces import Piece
from headgate.runtime.stored_state.places import StoredCheckpoint, find
from headgate.runtime.stored_state.reading import Selection, batches_of, selection
from headgate.spark.columns import batches_for_spark, is_plain, schema_for_spark

KEYS_MAX = 10_000
"""Filters that stand for more keys choose no parts."""

_OPTIONS = ("path", "operator", "state", "id", "columns")

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
    """One state of one checkpoint, and the columns of the DataFrame."""

    checkpoint: StoredCheckpoint
    state: StoredState
    columns: tuple[str, ...]
    schema: pa.Schema


class StateDataSource(DataSource):  # type: ignore[misc]
    """``format("headgate-state")``.

    Options: ``path`` (also the argument of ``load``), ``operator``, ``state``, ``id`` (of the checkpoint), and
    ``columns`` (names, with commas between them). Without ``operator`` the rows are the states that there are.
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
            checkpoint = find(str(self.options["path"]), None if id_ is None else int(id_))
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
        if not self.options.get("operator") and (self.options.get("state") or self.options.get("columns")):
            return "the option operator is needed to choose a state or columns"
        return "" if id_ is None or id_.isdecimal() else f"id must be the number of a checkpoint, not {id_!r}"

    def _found(self, checkpoint: StoredCheckpoint) -> _Loaded:
        columns = self.options.get("columns")
        state = state_named(checkpoint, checkpoint.storage(), self.options["operator"], self.options.get("state"))
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        wanted = selection(state, checkpoint.manifest.max_parallelism, names).schema
        # what is sent to every task: only the parts of this state, and none of the others
        slim = replace(checkpoint, manifest=replace(checkpoint.manifest, entries=(), carried=(), hooks=()))
        text = {state.operator: checkpoint.manifest.state_texts.get(state.operator, "")}
        slim = replace(slim, manifest=replace(slim.manifest, state_texts=text))
        schema = schema_for_spark(wanted)
        return _Loaded(slim, state, tuple(wanted.names), schema)


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
    """Reads one state; filters on its key choose which parts of snapshots are read."""

    def __init__(self, loaded: _Loaded, schema: Any) -> None:
        self._loaded = loaded
        self._schema = schema
        self._keys: list[Any] | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - PySpark's name
        """Take the keys that ``filters`` allow; Spark applies all filters itself, too."""
        shape = self._loaded.state.shape
        if all(is_plain(shape.schema.field(key).type) for key in shape.keys):
            self._keys = keys_of(filters, shape.shown_keys)
        try:
            self._wanted()
        except UsageError:  # a number that no key can be
            self._keys = None
        return filters

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
        return selection(loaded.state, loaded.checkpoint.manifest.max_parallelism, loaded.columns, self._keys)


def register_state_source(spark: Any) -> None:
    """Register ``spark.read.format("headgate-state")`` in a session, and let it push filters to Python sources.

    Raises:
        UsageError: the argument is not a SparkSession.
    """
    if not hasattr(spark, "dataSource"):
        raise UsageError(f"register_state_source needs the SparkSession that shall read, not {spark!r}")
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(StateDataSource)


def keys_of(filters: Iterable[Filter], names: Sequence[str]) -> list[Any] | None:
    """Return the keys that ``filters`` allow, None if they do not tell: every column of the key must be given."""
    allowed: dict[str, set[Any]] = {}
    for one in filters:
        if isinstance(one, EqualTo | In) and len(one.attribute) == 1 and one.attribute[0] in names:
            values = {one.value} if isinstance(one, EqualTo) else {value for value in one.value if value is not None}
            name = one.attribute[0]
            allowed[name] = allowed[name] & values if name in allowed else values
    if not names or any(name not in allowed for name in names):
        return None
    found = list(itertools.islice(itertools.product(*(allowed[name] for name in names)), KEYS_MAX + 1))
    if len(found) > KEYS_MAX:
        return None
    return found if len(names) > 1 else [key[0] for key in found]


def _subtask(piece: Piece) -> int:
    return piece.subtask.index
