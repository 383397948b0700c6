"""The data files of a table of Iceberg: written, described for a manifest, read, and written again when keys change.

Files are left out of a merge by the minima and maxima of their keys, and whole manifests by their partitions. Of the
others first the columns of the key are read; only a file that has one of the changed keys is written again (copy on
write), without the rows that are gone and with those that are new. Rows that delete files delete are left out, so that
they do not come back. Counterparts: ``data_files``, which writes in the workers, and ``iceberg_log``, which commits.
Source: docs/spec/lakes.md.
"""

from __future__ import annotations

import datetime
import importlib.util
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headgate.codec.decodable import decodable
from headgate.connectors.lakes.data_files import DataFile, FileFormat, FileSet, Part, grouped
from headgate.dataclass import dataclass
from headgate.environment import Environment
from headgate.errors import UsageError


class IcebergFiles:
    """Writes data files of a table: see ``FileFormat``."""

    def __init__(self, table: Any, version: int) -> None:
        """``table``: as the library has it."""
        from pyiceberg.table.locations import load_location_provider

        self._table, self.base = table, version
        metadata = self._table.metadata
        self._schema, self._spec = metadata.schema(), metadata.spec()
        self.schema = self._schema.as_arrow()
        self._names = load_location_provider(metadata.location, metadata.properties)
        self._keys: dict[str, Any] = {}

    def parts(self, records: pa.Table) -> Iterable[Part]:
        """See ``FileFormat``. Files have the ids of columns."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow
        from pyiceberg.partitioning import PartitionFieldValue, PartitionKey

        with_ids = schema_to_pyarrow(self._schema, include_field_ids=True)
        records = records.cast(with_ids)
        if not self._spec.fields:
            yield Part("", {}, records)
            return
        keys = {}
        for part in self._spec.fields:
            column = self._schema.find_column_name(part.source_id)
            source = self._schema.find_field(part.source_id).field_type
            keys[part.name] = partition_values(part.transform, source, records.column(column))
        for values, rows in grouped(pa.table(keys)):
            raw = [PartitionFieldValue(part, value) for part, value in zip(self._spec.fields, values, strict=True)]
            key = PartitionKey(raw, self._spec, self._schema)
            path, identity = key.to_path(), repr(values)  # a null and the text 'null' have one path
            self._keys[path] = self._keys[identity] = key
            yield Part(path, {"key": identity}, records.take(rows))

    def create(self, directory: str, name: str) -> tuple[str, Any]:
        path = self._names.new_data_location(name, self._keys[directory] if directory else None)
        return path, self._table.io.new_output(path).create()

    def local_path(self, path: str) -> Path | None:
        return local_path(path)

    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        """See ``FileFormat``."""
        return missing_in(self._table.io, paths)

    def remove(self, path: str) -> None:
        self._table.io.delete(path)

    def data_file(self, path: str, size_bytes: int, part: Part, metadata: pq.FileMetaData) -> DataFile:
        from pyiceberg.conversions import to_bytes
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )

        try:
            found = data_file_statistics_from_parquet_metadata(
                parquet_metadata=metadata,
                stats_columns=compute_statistics_plan(self._schema, self._table.metadata.properties),
                parquet_column_mapping=parquet_path_to_id_mapping(self._schema),
            ).to_serialized_dict()
        except OverflowError as error:
            raise UsageError(
                f"a date or time in a record for {path} is not in the years 1 to 9999, which the library of Iceberg "
                "cannot describe; correct it before"
            ) from error
        types = [one.field_type for one in self._spec.partition_type(self._schema).fields]
        values = self._keys[identity].partition if (identity := part.values.get("key")) is not None else []
        partition = [None if values[at] is None else to_bytes(kind, values[at]) for at, kind in enumerate(types)]
        del found["record_count"]
        stats = FileStats(spec=self._spec.spec_id, partition=partition, **found)
        return DataFile(path, size_bytes, metadata.num_rows, {}, msgspec.json.encode(stats).decode())


class FileStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of a file. Partition values and bounds are as Iceberg writes single values."""

    spec: int
    partition: list[bytes | None]
    column_sizes: dict[int, int]
    value_counts: dict[int, int]
    null_value_counts: dict[int, int]
    nan_value_counts: dict[int, int]
    lower_bounds: dict[int, bytes]
    upper_bounds: dict[int, bytes]
    split_offsets: list[int] | None


def library_file(table: Any, where: str, file: DataFile) -> Any:
    """Return a file as the library has it.

    Raises:
        UsageError: the table has other partitions now.
    """
    from pyiceberg.conversions import from_bytes
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.manifest import DataFileContent
    from pyiceberg.manifest import FileFormat as IcebergFormat
    from pyiceberg.typedef import Record

    stats = msgspec.json.decode(file.stats, type=decodable(FileStats))
    spec = table.specs().get(stats.spec)
    if spec is None or stats.spec != table.metadata.default_spec_id:
        raise UsageError(
            f"{where} was given other partitions while a pipeline wrote to it; its output cannot be "
            "committed: give it the former partitions until this pipeline has stopped"
        )
    types = [part.field_type for part in spec.partition_type(table.schema()).fields]
    values = [
        None if value is None else from_bytes(kind, value) for kind, value in zip(types, stats.partition, strict=True)
    ]
    return IcebergFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=IcebergFormat.PARQUET,
        partition=Record(*values),
        record_count=file.rows,
        file_size_in_bytes=file.size_bytes,
        column_sizes=stats.column_sizes,
        value_counts=stats.value_counts,
        null_value_counts=stats.null_value_counts,
        nan_value_counts=stats.nan_value_counts,
        lower_bounds=stats.lower_bounds,
        upper_bounds=stats.upper_bounds,
        split_offsets=stats.split_offsets,
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        spec_id=stats.spec,
    )


def missing_in(files: Any, paths: Sequence[str]) -> list[str]:
    """Return those of ``paths`` that do not exist. ``files``: as the library reaches them."""
    return [path for path in paths if not files.new_input(path).exists()]


def local_path(location: str) -> Path | None:
    """Return where a file is on this machine, by its location as the library reads it; None: elsewhere."""
    path = location.removeprefix("file://").removeprefix("file:")
    return None if "://" in path else Path(path)


_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000


def partition_values(transform: Any, source: Any, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return the partition values of a column.

    The library needs another package for all transforms but identity, so those of time, texts and integers are done
    here.

    Raises:
        UsageError: that package is needed, and is not installed.
    """
    from pyiceberg.exceptions import NotInstalledError

    name, dtype = str(transform), column.type
    if name == "identity":
        return column
    if pa.types.is_timestamp(dtype) and name in ("day", "hour"):
        size_us = _DAY_US if name == "day" else _HOUR_US
        numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy() // size_us
        return pc.if_else(pc.is_null(column), pa.scalar(None, pa.int32()), pa.array(numbers.astype("int32")))
    if pa.types.is_date32(dtype) and name == "day":
        return column.cast(pa.int32())
    if name in ("month", "year") and (pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype)):
        years = pc.subtract(pc.year(column), 1970)
        found = years if name == "year" else pc.add(pc.multiply(years, 12), pc.subtract(pc.month(column), 1))
        return found.cast(pa.int32())
    if name.startswith("truncate") and (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        return pc.utf8_slice_codeunits(column, 0, transform.width)
    if name.startswith("truncate") and pa.types.is_integer(dtype):
        numbers = pc.fill_null(column, 0).to_numpy()
        return pc.if_else(
            pc.is_null(column), pa.scalar(None, dtype), pa.array(numbers - numbers % transform.width, dtype)
        )
    try:
        return transform.pyarrow_transform(source)(column)
    except NotInstalledError as error:
        raise needs_core(name) from error


def refuse_transform(transform: Any, source: pa.DataType, name: str) -> None:
    """Refuse a partition by a column of type ``source`` if its values need a package that is not installed.

    Raises:
        UsageError
    """
    is_ours = not str(transform).startswith("bucket")
    if str(transform).startswith("truncate"):
        is_ours = pa.types.is_integer(source) or pa.types.is_string(source) or pa.types.is_large_string(source)
    if not is_ours and importlib.util.find_spec("pyiceberg_core") is None:
        raise needs_core(f"{transform} of '{name}'")


def needs_core(transform: str) -> UsageError:
    """Return the error that a transform needs another package."""
    return UsageError(
        f"partitions by {transform} need the package pyiceberg-core: pip install 'pyiceberg[pyiceberg-core]'"
    )


def read_rows(table: Any, task: Any, columns: Sequence[str]) -> pa.Table:
    """Return columns of the rows of one file, without those that delete files delete.

    The library finds columns by their ids.

    Args:
        table: as the library has it.
        task: of the library: the file, and its delete files.
        columns: their names in the table.
    """
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    keep_null_lists()
    schema = table.schema().select(*columns)
    return ArrowScan(table.metadata, table.io, schema, AlwaysTrue()).to_table([task]).select(list(columns))


@cache
def keep_null_lists() -> None:
    """Have the library leave lists and maps null that are null in a file. It does so once per process."""
    from pyiceberg.io import pyarrow as library

    class Projection(library.ArrowProjectionVisitor):  # type: ignore[misc]
        """The library's, which forgets nulls: https://github.com/apache/arrow/issues/38809."""

        def list(self, list_type: Any, list_array: pa.Array | None, value_array: pa.Array | None) -> pa.Array | None:
            return _with_nulls(super().list(list_type, list_array, value_array), list_array)

        def map(
            self, map_type: Any, map_array: pa.Array | None, key_result: pa.Array | None, value_result: pa.Array | None
        ) -> pa.Array | None:
            return _with_nulls(super().map(map_type, map_array, key_result, value_result), map_array)

    library.ArrowProjectionVisitor = Projection


def _with_nulls(found: pa.Array | None, given: pa.Array | None) -> pa.Array | None:
    """Return ``found`` with a null where ``given`` has one."""
    if found is None or given is None or found.null_count == given.null_count:
        return found
    whole, mask = pa.concat_arrays([found]), given.is_null()  # a slice has its offsets elsewhere
    if pa.types.is_map(whole.type):
        return pa.MapArray.from_arrays(whole.offsets, whole.keys, whole.items, whole.type, mask=mask)
    return type(whole).from_arrays(whole.offsets, whole.values, type=whole.type, mask=mask)


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
            # what no file has is new; a deleted key that no file has is nothing
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
    # changed rows come after all others: each comes into the place of the row that it replaces
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
