"""Rows given in the program as a source; sinks that discard or print.

Counterpart: examples, tests and benchmarks. Never durable: ``Print`` shows records before their checkpoint completes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import xxhash

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.connectors.base import (
    Committer,
    EmptyTransaction,
    SealedTransaction,
    Sink,
    SinkContext,
    SinkWriter,
    Source,
    SourceBatch,
    SourceContext,
    SourceReader,
    SplitPosition,
    owner_of_split,
)
from headgate.connectors.encode import check_json, json_lines
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Target, TargetKind
from headgate.model.state_schema import Form
from headgate.operators.schemas import SchemaLike, arrow_schema, canonical_schema, carried, refuse_twice, schema_text
from headgate.protocol.checkpoints.commit import CommitPermit

if TYPE_CHECKING:
    import pandas as pd

BATCH_ROWS = 65_536
_POSITION = struct.Struct("<Q")


class FromRows(Source):
    """A bounded source of rows that are part of the program."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]] | pa.Table | pa.RecordBatch | pl.DataFrame | pd.DataFrame,
        *,
        schema: SchemaLike | None = None,
        splits: int = 1,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        """Configure.

        Args:
            rows: dicts, or an Arrow, Polars or pandas table; the index of a pandas table is left out. A column that a
                dict does not have is null.
            schema: the columns, with the types of their values as Python, Polars or pyarrow types. By default they are
                inferred from all rows.
            splits: into how many pieces of equal size to divide the rows. Subtasks can read pieces in parallel; each
                piece keeps its order.
            batch_rows: the number of records in a batch.

        Raises:
            UsageError: the rows do not form a table, or a number is not positive.
        """
        if splits < 1 or batch_rows < 1:
            raise UsageError(f"FromRows(splits={splits}, batch_rows={batch_rows}): both must be positive")
        self._batch = _one_batch(rows, schema)
        self._splits, self._batch_rows = splits, batch_rows

    def schema(self) -> pa.Schema:
        """Return the rows' schema in canonical types."""
        return self._batch.schema

    def identity(self) -> str:
        """Positions are row numbers: they mean the same only for the same rows."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._batch.schema) as writer:
            writer.write_batch(self._batch)
        digest = xxhash.xxh3_64_hexdigest(memoryview(sink.getvalue()))
        return f"{Form.ROWS.value}: {self._batch.num_rows} in {self._splits} splits, digest {digest}"

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the first ``count`` rows, for a look."""
        rows: list[dict[str, Any]] = self._batch.slice(0, count).to_pylist()
        return rows

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of the splits that this subtask owns."""
        return _RowsReader(self._batch, self._splits, self._batch_rows, context)


class _RowsReader:
    def __init__(self, batch: pa.RecordBatch, splits: int, batch_rows: int, context: SourceContext) -> None:
        self._batch, self._batch_rows = batch, batch_rows
        positions = context.positions or {}
        self._ends: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._ended: set[str] = set()
        for index in range(splits):
            if owner_of_split(index, context.parallelism) == context.subtask_index:
                name = str(index)
                self._ends[name] = batch.num_rows * (index + 1) // splits
                self._next[name] = batch.num_rows * index // splits
                if name in positions:
                    self._next[name] = int(_POSITION.unpack(positions[name])[0])
                    # restored at its end, it is not reported as finished once more
                    if self._next[name] >= self._ends[name]:
                        self._ended.add(name)

    def splits(self) -> Sequence[str]:
        return [name for name in self._ends if name not in self._ended]

    def poll(self) -> SourceBatch | None:
        for name in self.splits():
            start = self._next[name]
            self._next[name] = end = min(start + self._batch_rows, self._ends[name])
            if end == self._ends[name]:
                self._ended.add(name)
            return SourceBatch(name, self._batch.slice(start, end - start), None, name in self._ended)
        return None

    def is_finished(self) -> bool:
        return len(self._ended) == len(self._ends)

    def positions(self) -> dict[str, bytes]:
        return {name: _POSITION.pack(row) for name, row in self._next.items()}

    def progress(self) -> Mapping[str, SplitPosition]:
        return {name: SplitPosition(row, self._ends[name]) for name, row in self._next.items()}

    def wakeup_ms(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


def _one_batch(rows: Any, schema: SchemaLike | None) -> pa.RecordBatch:
    types = None if schema is None else arrow_schema(schema)
    if not isinstance(rows, pa.Table | pa.RecordBatch):
        try:
            if isinstance(rows, pl.DataFrame):
                rows = rows.to_arrow()
            elif _is_pandas(rows):
                rows = pa.Table.from_pandas(rows, preserve_index=False)
            else:
                rows = _table(rows, types)
        except MisfitError as error:
            raise UsageError(f"FromRows: row {error.index} (counted from 0) does not fit: column {error}") from error
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"FromRows got rows that do not make a table: {error}; give schema=") from error
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if not table.num_columns:
        raise UsageError("FromRows got no rows to take column names from; give schema=")
    refuse_twice(table.schema, "FromRows")
    target = canonical_schema(table.schema if types is None else types)
    missing = [name for name in target.names if name not in table.column_names]
    if missing:
        raise UsageError(
            f"FromRows got no column '{missing[0]}', which is in schema=; there is {schema_text(table.schema)}"
        )
    batches = table.combine_chunks().to_batches()
    return carried(batches[0], target, "FromRows") if batches else pa.RecordBatch.from_pylist([], schema=target)


def _table(rows: Iterable[Any], types: pa.Schema | None) -> pa.Table:
    """Return dicts as a table of ``types``, inferred by default: what is inferred of all may not fit each.

    Raises:
        MisfitError: a value does not fit.
    """
    dicts = [dict(row) for row in rows]
    if types is None:
        names = dict.fromkeys(name for row in dicts for name in row)
        if not all(isinstance(name, str) for name in names):
            raise TypeError("names of columns are texts")
        types = pa.table({name: [row.get(name) for row in dicts] for name in names}).schema
    canonical_schema(types)  # refuses types that are not carried
    arrays = [_column([row.get(field.name) for row in dicts], field) for field in types]
    return pa.table(arrays, names=types.names)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    dtype = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    try:
        return exact_array(values, dtype)
    except MisfitError as error:
        raise error.within(field.name) from None


def _is_pandas(rows: object) -> bool:
    """Whether it is a pandas table; asks without importing pandas, which takes long."""
    return type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns")


class _NothingToCommit(Committer):
    """The committer of a sink that never prepares anything."""

    def recover(self, keep: Sequence[Committable]) -> None:
        """Nothing was ever prepared."""

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Nothing was ever prepared."""


class Discard(Sink):
    """A sink that drops all records; the runtime still counts them."""

    is_transactional = False
    """Nothing is ever visible twice, so going back to an older checkpoint does no harm."""

    def open(self, context: SinkContext) -> SinkWriter:
        """Return a writer that forgets."""
        return _DiscardWriter()

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """Return a committer with nothing to do."""
        return _NothingToCommit()

    def recorded(self, node: str) -> Target:
        """See ``Sink``: a reset has nothing to empty."""
        return Target(node, TargetKind.NOTHING)


class _DiscardWriter(SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        """Forget the records."""

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        return EmptyTransaction()


class Print(Discard):
    """A sink that prints records as JSON lines on the worker's standard output.

    It is at least once, not exactly once: it prints records as they arrive, before their checkpoint completes. After a
    failure it prints the records since the last completed checkpoint again.
    """

    def __init__(self, prefix: str = "") -> None:
        """Configure; each line begins with ``prefix``."""
        self._prefix = prefix

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns that have no JSON text.

        Raises:
            UsageError: there is one.
        """
        check_json(schema)

    def open(self, context: SinkContext) -> SinkWriter:
        """Return a writer to ``sys.stdout``."""
        return _PrintWriter(self._prefix)


class _PrintWriter(_DiscardWriter):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def write(self, batch: pa.RecordBatch) -> None:
        text = json_lines(batch).decode()
        if self._prefix:
            text = self._prefix + text[:-1].replace("\n", "\n" + self._prefix) + "\n"
        shown = getattr(sys.stdout, "original", sys.stdout)  # what users' functions print may go to a log
        shown.write(text)
        shown.flush()
