"""Which files of a table of Iceberg have changed keys, and how their rows are written again (copy on write).

Files are left out by the minima and maxima of their keys, and whole manifests by their partitions. Of the others first
the columns of the key are read; only a file that has one of the changed keys is written again, without the rows that
are gone and with those that are new. Rows that delete files delete are left out, so that they do not come back.
Counterpart: ``iceberg_log``, which commits it. Source: docs/spec/lakes.md.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.lakes.data_files import DataFile, FileFormat, FileSet
from headgate.connectors.lakes.iceberg_files import read_rows
from headgate.dataclass import dataclass
from headgate.environment import Environment
from headgate.errors import UsageError

LISTED_MAX = 200
"""So many values of a key are looked for one by one in what manifests say of partitions; of more, all between."""

ADD_BYTES = 32 << 20
"""So many Arrow bytes are written to a file at a time."""

ALONE_SHARE = 4
"""A file of a quarter of the wanted size is written again by itself: its minima and maxima stay close. Smaller ones
are put together."""


@dataclass(frozen=True)
class Rewrite:
    """What a merge does to the files of a table.

    Attributes:
        removed: the files, as the library has them, in place of which others are.
        added: the files that were written.
        file_sets: what wrote them.
    """

    removed: list[Any]
    added: list[DataFile]
    file_sets: list[FileSet]

    def abandon(self) -> None:
        """Remove what was written. Only for a commit that is known to have failed."""
        for one in self.file_sets:
            one.abandon()


class Rewriter:
    """Writes the files of one merge."""

    def __init__(self, format: FileFormat, prefix: str, file_bytes: int, environment: Environment) -> None:
        self._format, self._prefix, self._file_bytes, self._environment = format, prefix, file_bytes, environment
        self._small = self._file_set()
        self._all = [self._small]

    def _file_set(self) -> FileSet:
        return FileSet(self._format, self._prefix, self._file_bytes, self._environment)

    def rewrite(self, table: Any, where: str, changes: pa.Table, keys: Sequence[str]) -> Rewrite:
        """Write the files that have changed keys again, and the rows of new keys.

        Args:
            table: as the library has it.
            where: the table, for messages.
            changes: one row for each key, in the types of the table; the last column says which have no row any more.
            keys: the columns of the key.

        Raises:
            UsageError: the table has deletes that the library does not read.
        """
        *names, gone = changes.column_names
        rows = changes.select(names)
        is_gone = np.asarray(changes.column(gone))
        changed = ChangedKeys(changes, keys)
        is_found = np.zeros(changes.num_rows, bool)
        removed = []
        try:
            for task in files_with(table, where, changes, keys):
                at, of = changed.find(read_rows(table, task, keys))
                if len(at):
                    is_found[of] = True
                    whole = read_rows(table, task, table.schema().as_arrow().names)
                    merged = replaced(whole, at, rows.take(pa.array(of)), is_gone[of])
                    self._add(merged, is_alone=task.file.file_size_in_bytes * ALONE_SHARE >= self._file_bytes)
                    removed.append(task.file)
            self._add(rows.filter(pa.array(~is_found & ~is_gone)), is_alone=False)
            added = [file for one in self._all for file in one.close()]
        except BaseException:
            for one in self._all:
                one.abandon()
            raise
        return Rewrite(removed, added, self._all)

    def _add(self, rows: pa.Table, *, is_alone: bool) -> None:
        if not rows.num_rows:
            return
        files = self._file_set() if is_alone else self._small
        if is_alone:
            self._all.append(files)
        count = max(1, rows.num_rows * ADD_BYTES // max(rows.nbytes, 1))
        for start in range(0, rows.num_rows, count):
            files.add(rows.slice(start, count).to_batches(), rows.schema)


class ChangedKeys:
    """Finds rows with changed keys."""

    def __init__(self, changes: pa.Table, keys: Sequence[str]) -> None:
        self._types = [changes.field(key).type for key in keys]
        self._names = [str(at) for at in range(len(keys))]
        self._keys = self._frame(changes.select(list(keys))).with_row_index("of")

    def _frame(self, keys: pa.Table) -> pl.DataFrame:
        columns = zip(self._names, keys.columns, self._types, strict=True)
        return pl.DataFrame([pl.Series(name, column.cast(dtype)) for name, column, dtype in columns])

    def find(self, keys: pa.Table) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the numbers of the rows of ``keys`` that are changed, and of their changes. A null is no key."""
        rows = self._frame(keys).with_row_index("at")
        found = rows.join(self._keys, on=self._names, how="inner").sort("at")
        return found["at"].to_numpy(), found["of"].to_numpy()


def replaced(rows: pa.Table, at: np.ndarray[Any, Any], changes: pa.Table, is_gone: np.ndarray[Any, Any]) -> pa.Table:
    """Return ``rows`` in their order, with ``changes`` in place of the rows ``at``, or without them.

    Columns that changes do not have stay as they are.
    """
    changed = rows.take(pa.array(at))
    for name in changes.column_names:
        number = changed.schema.get_field_index(name)
        field = changed.field(number).with_nullable(True)
        changed = changed.set_column(number, field, changes.column(name).cast(field.type))
    order = np.arange(rows.num_rows)
    order[at] = rows.num_rows + np.arange(len(at))
    order = np.delete(order, at[is_gone])
    loose = pa.schema([field.with_nullable(True) for field in rows.schema])
    both = pa.concat_tables([_in_schema(rows, loose), _in_schema(changed, loose)])
    return both.take(pa.array(order))


def _in_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays(rows.columns, schema=schema)


# -- which files -----------------------------------------------------------------------------------------------------


def files_with(table: Any, where: str, changes: pa.Table, keys: Sequence[str]) -> Iterator[Any]:
    """Yield the files that may have changed keys, as tasks of the library with all deletes that concern them.

    Delete files are never left out by what is said of their rows: a row that one of them deletes must not come back.

    Raises:
        UsageError: the table has deletes that the library does not read.
    """
    from pyiceberg.manifest import ManifestContent
    from pyiceberg.table import FileScanTask, ManifestGroupPlanner

    snapshot = table.current_snapshot()
    if snapshot is None or not changes.num_rows:
        return
    schema = table.schema()
    ranges = [KeyRange.of(schema.find_field(key), changes.column(key)) for key in keys]
    planner = ManifestGroupPlanner(table.metadata, table.io, _row_filter(ranges))
    manifests = snapshot.manifests(table.io)
    data = [one for one in manifests if one.content == ManifestContent.DATA]
    deletes = _delete_index(table, where, [one for one in manifests if one.content == ManifestContent.DELETES])
    for entries in planner.plan_manifest_entries(data):
        for entry in entries:
            file = entry.data_file
            if all(one.may_be_in(file) for one in ranges):
                yield FileScanTask(file, deletes.for_data_file(entry.sequence_number or 0, file, file.partition))


def _delete_index(table: Any, where: str, manifests: Sequence[Any]) -> Any:
    from pyiceberg.manifest import DataFileContent
    from pyiceberg.table.delete_file_index import DeleteFileIndex

    index = DeleteFileIndex()
    for manifest in manifests:
        for entry in manifest.fetch_manifest_entry(table.io):
            if entry.data_file.content != DataFileContent.POSITION_DELETES:
                raise equality_deletes(where)
            index.add_delete_file(entry, entry.data_file.partition)
    return index


def equality_deletes(where: str) -> UsageError:
    """Return the error that a table has deletes that the library does not read."""
    return UsageError(
        f"{where} has equality deletes, which another program wrote and IcebergSink(upsert=) cannot apply; let that "
        "program rewrite the data files, or write to another table"
    )


@dataclass(frozen=True)
class KeyRange:
    """The changed values of one column of the key, in the form that manifests have.

    Attributes:
        field: of the library.
        values: sorted; of dates and times their numbers.
    """

    field: Any
    values: list[Any]

    @staticmethod
    def of(field: Any, column: pa.ChunkedArray) -> KeyRange:
        """Return the range of a column of changes."""
        if pa.types.is_date(column.type):
            column = column.cast(pa.int32())
        elif pa.types.is_timestamp(column.type) or pa.types.is_time(column.type):
            column = column.cast(pa.int64())
        return KeyRange(field, sorted(pc.unique(column).to_pylist()))

    def may_be_in(self, file: Any) -> bool:
        """Whether minimum and maximum of a file allow one of the values."""
        low, high = self._bound(file.lower_bounds), self._bound(file.upper_bounds)
        at = 0 if low is None else bisect_left(self.values, low)
        return at < len(self.values) and (high is None or self.values[at] <= high)

    def _bound(self, bounds: Any) -> Any:
        from pyiceberg.conversions import from_bytes

        found = (bounds or {}).get(self.field.field_id)
        return None if found is None else from_bytes(self.field.field_type, found)

    @property
    def is_dated(self) -> bool:
        """Whether all values are in the years that the library can compute with."""
        name = str(self.field.field_type)
        if not name.startswith(("date", "timestamp")):
            return True
        first, last = datetime.date.min.toordinal() - _EPOCH, datetime.date.max.toordinal() - _EPOCH
        scale = 1 if name == "date" else 86_400_000_000
        return bool(first * scale <= self.values[0] and self.values[-1] < (last + 1) * scale)


_EPOCH = datetime.date(1970, 1, 1).toordinal()


def _row_filter(ranges: Sequence[KeyRange]) -> Any:
    """Return an expression of the library that is true of all rows with changed keys, and of others."""
    from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, In, LessThanOrEqual

    found = AlwaysTrue()
    for one in ranges:
        name = one.field.name
        if str(one.field.field_type) == "boolean" or not one.is_dated:
            continue
        if len(one.values) <= LISTED_MAX:
            found = And(found, In(name, one.values))
        else:
            found = And(found, GreaterThanOrEqual(name, one.values[0]), LessThanOrEqual(name, one.values[-1]))
    return found
