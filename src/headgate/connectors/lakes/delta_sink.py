"""A table of Delta Lake as sink: what users configure. Counterpart: ``delta_log``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from headgate.connectors.lakes.data_files import FileFormat
from headgate.connectors.lakes.delta_log import (
    DeltaFiles,
    DeltaLog,
    checked_storage_options,
    delta_library,
    refuse_merge_partitions,
    refuse_names_of_one,
    table_locations,
)
from headgate.connectors.lakes.table_sink import TableSink, refuse_missing_columns
from headgate.connectors.lakes.types import delta_type, table_schema
from headgate.errors import UsageError
from headgate.model.lineage import Location
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
