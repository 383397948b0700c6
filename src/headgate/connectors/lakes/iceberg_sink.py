"""A table of Iceberg as sink: what users configure. Counterpart: ``iceberg_log``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headgate.connectors.lakes.data_files import FileFormat
from headgate.connectors.lakes.iceberg_files import IcebergFiles, refuse_transform
from headgate.connectors.lakes.iceberg_log import (
    IcebergLog,
    check_catalog,
    iceberg_errors,
    iceberg_library,
    load_log,
    opened_catalog,
    refuse_float_partition,
)
from headgate.connectors.lakes.table_sink import TableSink, refuse_missing_columns
from headgate.connectors.lakes.types import iceberg_type, table_schema
from headgate.errors import UsageError
from headgate.model.lineage import Location


@dataclass(frozen=True, kw_only=True)
class IcebergSink(TableSink):
    """Appends records to a table of Iceberg, or keeps the newest row of each key in it, exactly once.

    To append, subtasks write Parquet files while records flow. With ``upsert`` the records wait in the checkpoint, and
    the driver writes the data files again that have a changed key. Either way, when a checkpoint completes, one
    snapshot of the table shows its records, all at once. Needs the package pyiceberg:
    ``pip install 'headgate-streams[iceberg]'``.

    Attributes:
        table: the table with its namespace, such as ``"shop.orders"``.
        catalog: the name of the catalog, as in ``.pyiceberg.yaml`` and in ``PYICEBERG_CATALOG__<NAME>__URI``.
        properties: of the catalog, such as ``{"type": "rest", "uri": "http://localhost:8181"}``. Give secrets in
            the environment of the driver and of every worker, or in ``.pyiceberg.yaml`` there.
        upsert: the columns of the key: a record replaces the row of its key. Needed for streams with changes to keep
            the table that they describe; its key must be theirs. (): records are appended.
        create: create the table, and its namespace, if it is missing.
        partition_by: how a table that is created is partitioned: columns, or ``"day(at)"``, ``"bucket(16, id)"``,
            ``"truncate(4, name)"`` and the like.
        evolve: add columns to the table that records have and it does not.
        settings: properties of a table that is created.
        file_bytes: after so many bytes a subtask closes a file and begins another one.
        buffer_bytes: Arrow bytes that a subtask holds in memory before it writes them.
        takes_changes: whether the stream has changes that are merged; set by Headgate.
    """

    table: str = field(kw_only=False)
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        iceberg_library()
        check_catalog("IcebergSink", self.table, self.properties)
        self.check_options()
        for part in self.partition_by:
            _transform_of(part)

    @property
    def where(self) -> str:
        return f"Iceberg table {self.table} of catalog {self.catalog}"

    def locations(self) -> tuple[Location, ...]:
        name = f"iceberg:{self.catalog}:{self.table}"
        return (Location(name, name),)

    @property
    def shared_target(self) -> object:
        return (self.catalog, self.table)

    def columns_of(self, records: pa.Schema) -> pa.Schema:
        return table_schema(records, iceberg_type, "IcebergSink")

    def check_partitions(self, columns: pa.Schema) -> None:
        refuse_missing_columns("IcebergSink", "partition_by", [_transform_of(p)[1] for p in self.partition_by], columns)
        for transform, name in map(_transform_of, self.partition_by):
            refuse_transform(transform, columns.field(name).type, name)
            if self.keys:
                refuse_float_partition(self.where, name, str(columns.field(name).type))

    def load(self) -> IcebergLog | None:
        return load_log(self.table, self.catalog, self.properties, self.file_bytes)

    def create_table(self) -> None:
        from pyiceberg.exceptions import TableAlreadyExistsError

        columns = self.created_columns()
        with iceberg_errors("create", self.where):
            found = opened_catalog(self.catalog, tuple(sorted(self.properties.items())))
            found.create_namespace_if_not_exists(self.table.rpartition(".")[0])
            try:
                with found.create_table_transaction(self.table, columns, properties=dict(self.settings)) as creation:
                    if self.partition_by:
                        with creation.update_spec() as spec:
                            for part in self.partition_by:
                                spec.add_field(_transform_of(part)[1], _transform_of(part)[0])
            except TableAlreadyExistsError:
                return

    def file_format(self) -> FileFormat:
        table = self.found()
        assert isinstance(table, IcebergLog)
        return IcebergFiles(table.table, table.version)


_TRANSFORM = re.compile(r"(?P<name>[a-z]+)\(\s*(?:(?P<width>\d+)\s*,\s*)?(?P<column>[^(),]+?)\s*\)")
_PLAIN = ("identity", "year", "month", "day", "hour")


def _transform_of(text: str) -> tuple[Any, str]:
    """Return the transform and the column of a partition.

    Raises:
        UsageError: there is no such transform.
    """
    from pyiceberg.transforms import IdentityTransform, parse_transform

    match = _TRANSFORM.fullmatch(text)
    if match is None:
        return IdentityTransform(), text
    name, width = match["name"], match["width"]
    if (name in _PLAIN and width is None) or (name in ("bucket", "truncate") and width is not None):
        return parse_transform(name if width is None else f"{name}[{width}]"), match["column"]
    raise UsageError(
        f"IcebergSink(partition_by={text!r}) has no such transform; use a column, or year(c), month(c), day(c), "
        "hour(c), bucket(16, c), truncate(4, c)"
    )
