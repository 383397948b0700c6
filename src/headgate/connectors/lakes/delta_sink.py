"""A table of Delta Lake as sink: what users configure. Counterpart: ``delta_log``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from headgate.connectors.base import Committer, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import Fence, owner_of
from headgate.connectors.lakes.data_files import FileFormat
from headgate.connectors.lakes.delta_log import (
    DeltaFiles,
    DeltaLog,
    checked_storage_options,
    delta_library,
    is_text,
    refuse_merge_partitions,
    table_locations,
)
from headgate.connectors.lakes.table_sink import TableSink, refuse_missing_columns
from headgate.connectors.lakes.table_upserts import ChangeWriter, MergeCommitter
from headgate.connectors.lakes.types import delta_type, table_schema
from headgate.connectors.sql.records import check_change_keys, check_upsert_columns, upsert_columns
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.model.lineage import Location
from headgate.operators.changes import OP
from headgate.storage.urls import absolute_location


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
    upsert: str | Sequence[str] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict)
    takes_changes: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        delta_library()
        object.__setattr__(self, "url", absolute_location(self.url))
        checked_storage_options("DeltaSink", self.storage_options)
        object.__setattr__(self, "upsert", upsert_columns("DeltaSink", self.upsert))
        self.check_options()

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key; none: records are appended."""
        assert isinstance(self.upsert, tuple)
        return self.upsert

    def for_changes(self, keys: tuple[str, ...] | None, *, retractions: bool) -> DeltaSink:
        """See ``Sink``: without ``upsert`` the changes are appended as they are."""
        if keys is None or not self.keys:
            return self
        check_change_keys("DeltaSink", self.keys, keys)
        return replace(self, takes_changes=True)

    def check(self, schema: pa.Schema) -> None:
        check_upsert_columns("DeltaSink", self.keys, schema)
        super().check(self._rows(schema))
        table = self.load() if self.keys else None
        if table is not None:
            table.refuse_merges()
        elif self.keys:
            refuse_merge_partitions(self.where, self.columns_of(self._rows(schema)), self.partition_by)

    def make_target(self, schema: pa.Schema) -> None:
        super().make_target(self._rows(schema))
        if self.keys:
            self._delta().refuse_merges()

    def _rows(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns of the table that records of ``schema`` fill."""
        return pa.schema([one for one in schema if one.name != OP or not self.takes_changes])

    def open(self, context: SinkContext) -> SinkWriter:
        if not self.keys:
            return super().open(context)
        table = self._delta()
        columns = table.schema
        filled = [key for key in self.keys if key in table.partition_columns and is_text(columns.field(key).type)]
        return ChangeWriter(
            context,
            columns,
            table.version,
            self.keys,
            filled=filled,
            has_op=self.takes_changes,
            piece_bytes=self.buffer_bytes,
        )

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        if not self.keys:
            return super().open_committer(pipeline, node, generation)
        fence = Fence(owner_of(pipeline, node), int(generation))
        return MergeCommitter(self, fence, self.keys, has_op=self.takes_changes)

    def _delta(self) -> DeltaLog:
        table = self.found()
        assert isinstance(table, DeltaLog)
        return table

    @property
    def where(self) -> str:
        return f"Delta table {self.url}"

    def locations(self) -> tuple[Location, ...]:
        return table_locations(str(self.url))

    @property
    def shared_target(self) -> object:
        return self.url

    def columns_of(self, records: pa.Schema) -> pa.Schema:
        return table_schema(records, delta_type, "DeltaSink")

    def check_partitions(self, columns: pa.Schema) -> None:
        refuse_missing_columns("DeltaSink", "partition_by", self.partition_by, columns)
        for name in self.partition_by:
            if not can_be_partition(columns.field(name).type):
                raise UsageError(
                    f"DeltaSink(partition_by=) names column '{name}' of type {columns.field(name).type}; partitions "
                    "are by texts, integers, decimals, dates, times and booleans"
                )

    def load(self) -> DeltaLog | None:
        return DeltaLog.load(str(self.url), self.storage_options)

    def create_table(self) -> None:
        DeltaLog.create(str(self.url), self.created_columns(), self.partition_by, self.settings, self.storage_options)

    def file_format(self) -> FileFormat:
        return DeltaFiles(self._delta())


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
