"""A table of Delta Lake as source and as sink: what users configure, and how its log is followed.

Counterpart: ``delta_log``.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headgate.connectors.lakes.data_files import FileFormat, delta_type, table_schema
from headgate.connectors.lakes.delta_log import (
    DeltaFiles,
    DeltaLog,
    checked_storage_options,
    delta_errors,
    delta_library,
    in_one_line,
    refuse_merge_partitions,
    refuse_names_of_one,
    table_locations,
)
from headgate.connectors.lakes.table_sink import TableSink, refuse_missing_columns
from headgate.connectors.lakes.table_source import BATCH_ROWS, SPLITS, TableFile, TableHistory, TableSource
from headgate.errors import UsageError
from headgate.model.config import Duration, check_switches
from headgate.model.lineage import Location
from headgate.operators.schemas import canonical_schema, to_canonical
from headgate.storage.urls import absolute_location

OP = "op"

FEATURES = frozenset({"timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck", "variantType"})
"""What a table may ask of its readers. Rows that deletion vectors delete are refused where they occur; the library
names variants in tables without them."""

_MISSING_FILE = "Object at location"
"""How the library begins to say that a file is not there."""

_OPS = {"insert": "insert", "update_preimage": "update_before", "update_postimage": "update_after", "delete": "delete"}


@dataclass(frozen=True, kw_only=True)
class Delta(TableSource):
    """Reads a table of Delta Lake: a version of it, and with ``follow`` what later versions add.

    Needs the package deltalake: ``pip install 'headgate-streams[delta]'``.

    Attributes:
        url: the directory of the table, or its URL in an object store.
        version: the version that is read; None: the newest one when the program starts for the first time.
        after: read what follows this version, and not the rows that are there.
        follow: go on with versions that come later.
        feed: read the change feed of the table, a stream with changes with a column ``op``: first the rows of the
            version as inserts. The table needs the property ``delta.enableChangeDataFeed``.
        key: the columns that identify a row, for ``feed``; none: they are not known.
        skip_changes: skip versions that delete or rewrite rows, instead of stopping there.
        poll_interval: how often the table is asked for a new version.
        splits: how many parts are read side by side. With ``feed`` there is one.
        storage_options: for the object store. Give secrets in the environment.
    """

    url: str | os.PathLike[str] = field(kw_only=False)
    version: int | None = None
    after: int | None = None
    follow: bool = False
    feed: bool = False
    key: str | Sequence[str] = ()
    skip_changes: bool = False
    poll_interval: Duration = "1s"
    splits: int = SPLITS
    storage_options: Mapping[str, str] = field(default_factory=dict)
    newest: int | None = field(default=None, repr=False, compare=False)
    """Set by Headgate: the newest version when the pipeline was built."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        check_switches("Delta: ", follow=self.follow, feed=self.feed, skip_changes=self.skip_changes)
        delta_library()
        object.__setattr__(self, "url", absolute_location(self.url))
        object.__setattr__(self, "key", (self.key,) if isinstance(self.key, str) else tuple(self.key))
        checked_storage_options("Delta", self.storage_options)
        if self.version is not None and self.after is not None:
            raise UsageError("Delta(version=) and Delta(after=) both say where to begin: give one of them")
        if self.feed and self.skip_changes:
            raise UsageError("Delta(feed=True) reads all changes: leave skip_changes= out")
        if self.key and not self.feed:
            raise UsageError("Delta(key=) is for feed=True: leave it out")
        if self.feed:
            object.__setattr__(self, "splits", 1)  # changes of a row stay in order
        self.checked("Delta")

    @property
    def where(self) -> str:
        return f"Delta table {self.url}"

    def locations(self) -> tuple[Location, ...]:
        return table_locations(str(self.url))

    def identity(self) -> str:
        return f"delta:{self.splits}:{'feed' if self.feed else 'files'}"

    def changes(self) -> tuple[tuple[str, ...], bool] | None:
        return (tuple(self.key), True) if self.feed else None

    def schema(self) -> pa.Schema:
        first = self.version if self.version is not None else self.after
        newest = self.log(None)
        object.__setattr__(self, "newest", newest.version)
        if first is not None and first > newest.version:
            raise UsageError(f"{self.where} has no version {first} yet; the newest is {newest.version}")
        table = newest if first is None or self.follow or self.after is not None else self.log(first)
        refuse_features(table)
        found = canonical_schema(table.schema)
        if not self.feed:
            return found
        if table.properties.get("delta.enableChangeDataFeed") != "true":
            raise UsageError(f"{self.where} has no change feed; set its property delta.enableChangeDataFeed to true")
        if OP in found.names:
            raise UsageError(f"{self.where} has a column '{OP}', as a stream with changes has; rename it in the table")
        unknown = [name for name in self.key if name not in found.names]
        if unknown:
            raise UsageError(f"Delta(key=) names column '{unknown[0]}'; the table has {', '.join(found.names)}")
        return found.append(pa.field(OP, pa.large_string()))

    def log(self, version: int | None) -> DeltaLog:
        """Return a version of the table.

        Raises:
            UsageError: there is no such table.
        """
        found = DeltaLog.load(str(self.url), self.storage_options, version)
        if found is None:
            raise UsageError(f"there is no {self.where}; correct the location")
        return found

    def start(self) -> tuple[int, bool]:
        if self.after is not None:
            return self.after, False
        return self._newest if self.version is None else self.version, True

    @property
    def _newest(self) -> int:
        if self.newest is None:
            object.__setattr__(self, "newest", self.log(None).version)
        assert self.newest is not None
        return self.newest

    def end(self) -> int | None:
        if self.follow:
            return None
        return self._newest if self.version is None else self.version

    def history(self, schema: pa.Schema) -> TableHistory:
        return DeltaHistory(self, schema)


def refuse_features(table: DeltaLog) -> None:
    """Refuse a table that asks its readers for more than reading its files.

    Raises:
        UsageError
    """
    unknown = sorted(set(table.table.protocol().reader_features or ()) - FEATURES)
    if table.properties.get("delta.columnMapping.mode", "none") != "none":
        unknown.append("columnMapping")
    if unknown:
        raise UsageError(f"{table.where} needs the feature {unknown[0]} of its readers, which Delta does not have")


@dataclass(frozen=True, slots=True)
class _Data:
    """A data file: values of partition columns, or the version of a change feed."""

    partition: Mapping[str, str | None]
    feed: int | None = None


class DeltaHistory:
    """See ``TableHistory``."""

    def __init__(self, source: Delta, schema: pa.Schema) -> None:
        self._source, self._schema = source, schema
        table = source.log(None)
        self._files, self._newest = table.filesystem(), table.version
        self._types = {column.name: column.type for column in table.schema}

    def snapshot(self, version: int) -> Sequence[TableFile]:
        table = self._source.log(version)
        refuse_features(table)
        with delta_errors("read", table.where):
            if pa.table(table.table.deletion_vectors()).num_rows:
                raise UsageError(
                    f"version {version} of {table.where} has rows that deletion vectors delete, which are not read "
                    "yet; rewrite its files before, by REORG TABLE ... APPLY (PURGE)"
                )
            found = pa.table(table.table.get_add_actions(flatten=True)).to_pylist()
        names = table.partition_columns
        files = []
        for one in found:
            values = {name: _text(one[f"partition.{name}"]) for name in names}
            files.append(TableFile(unquote(one["path"]), _Data(values)))
        return sorted(files, key=lambda file: file.path)

    def next(self, version: int) -> int | None:
        if version + 1 > self._newest:
            self._newest = self._source.log(None).version
        if version + 1 > self._newest:
            return None
        return version + 1

    def added(self, version: int) -> Sequence[TableFile]:
        if self._source.feed:
            return [TableFile(f"change feed of version {version}", _Data({}, version))]
        actions = self._actions(version)
        removed = [action["remove"] for action in actions if "remove" in action and action["remove"].get("dataChange")]
        added = [action["add"] for action in actions if "add" in action and action["add"].get("dataChange")]
        changed = removed or [one for one in added if one.get("deletionVector")]
        if changed and not self._source.skip_changes:
            raise UsageError(
                f"version {version} of {self._source.where} deletes or rewrites rows, and only new files are followed; "
                "give skip_changes=True to skip such versions, or feed=True to read its change feed"
            )
        if changed:
            return ()
        files = [TableFile(unquote(one["path"]), _Data(one.get("partitionValues") or {})) for one in added]
        return sorted(files, key=lambda file: file.path)

    def _actions(self, version: int) -> list[dict[str, Any]]:
        with delta_errors(f"read version {version} of", self._source.where):
            try:
                with self._files.open_input_stream(f"_delta_log/{version:020d}.json") as stream:
                    entry = stream.read()
            except FileNotFoundError as error:
                raise UsageError(
                    f"version {version} of {self._source.where} is not in its log any more, and was not read: raise "
                    "delta.logRetentionDuration above the longest time for which the pipeline may be down. To go on, "
                    "give the source another name, which reads the whole table"
                ) from error
        return [json.loads(line) for line in entry.splitlines() if line.strip()]

    def read(self, file: TableFile, row: int) -> Iterator[pa.RecordBatch]:
        """See ``TableHistory``. The change feed of a version is one batch, since its order may differ each time."""
        data: _Data = file.data
        if data.feed is not None:
            if row == 0:
                yield from self._feed(data.feed)
            return
        constants = {name: _typed(text, self._types[name]) for name, text in data.partition.items()}
        names = [name for name in self._schema.names if name not in constants]
        with self._files.open_input_file(file.path) as opened:
            parquet = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            before = 0
            there = [name for name in names if name in parquet.schema_arrow.names]
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                # row groups in front of the position are not read at all
                if before + rows > row:
                    at = before
                    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=there, use_threads=False):
                        rest = batch.slice(max(row - at, 0))
                        at += batch.num_rows
                        if rest.num_rows:
                            yield self._complete(rest, constants)
                before += rows

    def _complete(self, batch: pa.RecordBatch, constants: Mapping[str, pa.Scalar]) -> pa.RecordBatch:
        """Return a batch with the columns that files do not have."""
        columns = []
        for column in self._schema:
            if column.name in batch.schema.names:
                columns.append(batch.column(column.name))
            elif column.name in constants:
                columns.append(pa.repeat(constants[column.name], batch.num_rows))
            elif column.name == OP and self._source.feed:
                columns.append(pa.repeat(pa.scalar("insert", pa.large_string()), batch.num_rows))
            else:
                columns.append(pa.nulls(batch.num_rows, column.type))
        return pa.RecordBatch.from_arrays(columns, names=self._schema.names)

    def _feed(self, version: int) -> Iterator[pa.RecordBatch]:
        where = self._source.where
        with delta_errors(f"read the changes of version {version} of", where):
            table = self._source.log(None).table
            try:
                found = pa.table(table.load_cdf(version, version))
            except (delta_library().exceptions.DeltaError, pa.ArrowInvalid) as error:
                if _may_pass(error):
                    raise
                raise UsageError(
                    f"the changes of version {version} of {where} cannot be read: {in_one_line(error)}; to go on "
                    "without them, give the source another name, which reads the whole table"
                ) from error
        if not found.num_rows:
            return
        kinds = found.column("_change_type").combine_chunks().cast(pa.string())
        ops = pa.array([_OPS[kind] for kind in _OPS], pa.large_string()).take(pc.index_in(kinds, pa.array(list(_OPS))))
        goes = pc.is_in(kinds, pa.array(["delete", "update_preimage"]))
        rows = found.select([name for name in self._schema.names if name != OP]).combine_chunks()
        plain = pa.schema([column for column in self._schema if column.name != OP])
        whole = pa.Table.from_batches([to_canonical(batch, plain) for batch in rows.to_batches()], plain)
        changes = whole.append_column(OP, ops)
        in_order = pa.concat_tables([changes.filter(goes), changes.filter(pc.invert(goes))])  # a row goes, then comes
        yield from in_order.select(self._schema.names).combine_chunks().to_batches()


def _may_pass(error: Exception) -> bool:
    """Whether reading changes failed because of the store, which has all files: the library says so in words alone."""
    said = str(error)
    is_of_store = "object store" in said.lower() or "HTTP error" in said
    return is_of_store and not (_MISSING_FILE in said and " not found" in said)


def _text(value: Any) -> str | None:
    """Return a partition value as the log has it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=None).isoformat(" ")
    return str(value)


def _typed(text: str | None, dtype: pa.DataType) -> pa.Scalar:
    """Return a partition value of the log in the type of its column. An empty text is null."""
    if text is None or text == "":
        return pa.scalar(None, dtype)
    values = pa.array([text])
    if pa.types.is_timestamp(dtype):
        local = pa.array([text.removesuffix("Z")]).cast(pa.timestamp("us"))
        return (local if dtype.tz is None else pc.assume_timezone(local, "UTC"))[0].cast(dtype)
    return values.cast(dtype)[0]


@dataclass(frozen=True, kw_only=True)
class DeltaSink(TableSink):
    """Appends records to a table of Delta Lake, or keeps the newest row of each key in it, exactly once.

    To append, subtasks write Parquet files while records flow. With ``upsert`` the records wait in the checkpoint, and
    the driver merges them. Either way, when a checkpoint completes, one commit of the table shows its records, all at
    once. Needs the package deltalake: ``pip install 'headgate-streams[delta]'``.

    Attributes:
        url: the directory of the table, or its URL in an object store, such as ``s3://bucket/table``.
        upsert: the columns of the key: a record replaces the row of its key. Needed for streams with changes to keep
            the table that they describe; its key must be theirs. (): records are appended.
        create: create the table if it is missing.
        partition_by: the partition columns of a table that is created.
        evolve: add columns to the table that records have and it does not.
        settings: properties of a table that is created, such as ``{"delta.enableChangeDataFeed": "true"}``.
        file_bytes: after so many bytes a subtask closes a file and begins another one; not with ``upsert``.
        buffer_bytes: Arrow bytes that a subtask holds in memory before it writes them.
        storage_options: for the object store, such as ``{"aws_region": "eu-central-1"}``. Give secrets in the
            environment of the driver and of every worker.
        takes_changes: whether the stream has changes that are merged; set by Headgate.
    """

    url: str | os.PathLike[str] = field(kw_only=False)
    storage_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        delta_library()
        object.__setattr__(self, "url", absolute_location(self.url))
        checked_storage_options("DeltaSink", self.storage_options)
        self.check_options()

    @property
    def where(self) -> str:
        return f"Delta table {self.url}"

    def locations(self) -> tuple[Location, ...]:
        return table_locations(str(self.url))

    @property
    def shared_target(self) -> object:
        return self.url

    def columns_of(self, records: pa.Schema) -> pa.Schema:
        refuse_names_of_one(records.names)
        return table_schema(records, delta_type, "DeltaSink")

    def check_partitions(self, columns: pa.Schema) -> None:
        refuse_missing_columns("DeltaSink", "partition_by", self.partition_by, columns)
        for name in self.partition_by:
            if not can_be_partition(columns.field(name).type):
                raise UsageError(
                    f"DeltaSink(partition_by=) names column '{name}' of type {columns.field(name).type}; partitions "
                    "are by texts, integers, decimals, dates, times and booleans"
                )
        if self.keys:
            refuse_merge_partitions(self.where, columns, self.partition_by)

    def load(self) -> DeltaLog | None:
        return DeltaLog.load(str(self.url), self.storage_options)

    def create_table(self) -> None:
        DeltaLog.create(str(self.url), self.created_columns(), self.partition_by, self.settings, self.storage_options)

    def file_format(self) -> FileFormat:
        table = self.found()
        assert isinstance(table, DeltaLog)
        return DeltaFiles(table)


def can_be_partition(dtype: pa.DataType) -> bool:
    """Whether the values of a type can be partition values."""
    return bool(
        pa.types.is_string(dtype)
        or pa.types.is_integer(dtype)
        or pa.types.is_decimal(dtype)
        or pa.types.is_date(dtype)
        or pa.types.is_timestamp(dtype)
        or pa.types.is_boolean(dtype)
    )
