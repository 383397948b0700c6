"""A table of Iceberg as source and as sink: what users configure, and how its snapshots are followed.

Counterpart: ``iceberg_log``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headgate.connectors.lakes.data_files import FileFormat, iceberg_type, table_schema
from headgate.connectors.lakes.iceberg_files import IcebergFiles, keep_null_lists, refuse_transform
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
from headgate.connectors.lakes.table_source import SPLITS, TableFile, TableHistory, TableSource
from headgate.errors import UsageError
from headgate.model.config import Duration, check_switches
from headgate.model.lineage import Location
from headgate.operators.schemas import canonical_schema


@dataclass(frozen=True, kw_only=True)
class Iceberg(TableSource):
    """Reads a table of Iceberg: a snapshot of it, and with ``follow`` what later snapshots add.

    Needs the package pyiceberg: ``pip install 'headgate-streams[iceberg]'``.

    Attributes:
        table: the table with its namespace, such as ``"shop.orders"``.
        catalog: the name of the catalog, as in ``.pyiceberg.yaml`` and in ``PYICEBERG_CATALOG__<NAME>__URI``.
        properties: of the catalog. Give secrets in the environment or in ``.pyiceberg.yaml``.
        snapshot: the id of the snapshot that is read; None: the newest one when the program starts for the first time.
        after: read what follows this snapshot, and not the rows that are there.
        follow: go on with snapshots that come later.
        skip_changes: skip snapshots that delete or rewrite rows, instead of stopping there.
        poll_interval: how often the table is asked for a new snapshot.
        splits: how many parts are read side by side.
        newest: set by Headgate, as ``column_ids`` is; not for users.
    """

    versions_rise = False

    table: str = field(kw_only=False)
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict)
    snapshot: int | None = None
    after: int | None = None
    follow: bool = False
    skip_changes: bool = False
    poll_interval: Duration = "1s"
    splits: int = SPLITS
    newest: int | None = field(default=None, repr=False, compare=False)
    """Set by Headgate: the newest snapshot when the pipeline was built."""
    column_ids: Mapping[str, int] | None = field(default=None, repr=False, compare=False)
    """Set by Headgate: the ids of the columns then. A column may get another name later, and another one its name."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        check_switches("Iceberg: ", follow=self.follow, skip_changes=self.skip_changes)
        iceberg_library()
        check_catalog("Iceberg", self.table, self.properties)
        if self.snapshot is not None and self.after is not None:
            raise UsageError("Iceberg(snapshot=) and Iceberg(after=) both say where to begin: give one of them")
        self.checked("Iceberg")

    @property
    def where(self) -> str:
        return f"Iceberg table {self.table} of catalog {self.catalog}"

    def locations(self) -> tuple[Location, ...]:
        name = f"iceberg:{self.catalog}:{self.table}"
        return (Location(name, name),)

    def identity(self) -> str:
        return f"iceberg:{self.splits}"

    def log(self) -> IcebergLog:
        """Return the table.

        Raises:
            UsageError: there is none.
        """
        found = load_log(self.table, self.catalog, self.properties)
        if found is None:
            raise UsageError(f"there is no {self.where}; correct the name")
        return found

    def schema(self) -> pa.Schema:
        table = self.log().table
        first = self.snapshot if self.snapshot is not None else self.after
        if first is not None and table.metadata.snapshot_by_id(first) is None:
            raise UsageError(f"{self.where} has no snapshot {first}; it may have expired")
        current = table.current_snapshot()
        object.__setattr__(self, "newest", NO_SNAPSHOT if current is None else current.snapshot_id)
        object.__setattr__(self, "column_ids", {one.name: one.field_id for one in table.schema().fields})
        return canonical_schema(table.schema().as_arrow())

    def start(self) -> tuple[int, bool]:
        if self.after is not None:
            return self.after, False
        return self._newest if self.snapshot is None else self.snapshot, True

    @property
    def _newest(self) -> int:
        if self.newest is None:
            self.schema()
        assert self.newest is not None
        return self.newest

    def end(self) -> int | None:
        if self.follow:
            return None
        return self._newest if self.snapshot is None else self.snapshot

    def history(self, schema: pa.Schema) -> TableHistory:
        return IcebergHistory(self, schema)


NO_SNAPSHOT = 0
"""In place of the id of a snapshot: the table was empty."""


class IcebergHistory:
    """See ``TableHistory``. Versions are ids of snapshots."""

    def __init__(self, source: Iceberg, schema: pa.Schema) -> None:
        self._source, self._schema, self._table = source, schema, source.log().table
        self._ids = source.column_ids or {one.name: one.field_id for one in self._table.schema().fields}
        keep_null_lists()

    def _ancestors(self) -> list[Any]:
        """Return the snapshots of the table, the newest first, as far as they have not expired."""
        found = []
        snapshot = self._table.current_snapshot()
        while snapshot is not None:
            found.append(snapshot)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.metadata.snapshot_by_id(parent)
        return found

    def _gone(self, version: int) -> UsageError:
        return UsageError(
            f"snapshot {version} of {self._source.where} has expired, or the table was rolled back, and what "
            "follows it cannot be told: keep snapshots for longer than the pipeline may be down. To go on, give the "
            "source another name, which reads the whole table"
        )

    def snapshot(self, version: int) -> Sequence[TableFile]:
        """See ``TableHistory``. Rows that delete files delete are left out."""
        if version == NO_SNAPSHOT:
            return ()
        if self._table.metadata.snapshot_by_id(version) is None:
            raise self._gone(version)
        with iceberg_errors("read", self._source.where):
            tasks = list(self._table.scan(snapshot_id=version).plan_files())
        return sorted((TableFile(task.file.file_path, task) for task in tasks), key=lambda file: file.path)

    def next(self, version: int) -> int | None:
        with iceberg_errors("read", self._source.where):
            self._table.refresh()
        line = self._ancestors()
        if not line and version == NO_SNAPSHOT:
            return None
        if line and line[0].snapshot_id == version:
            return None
        for snapshot in line:
            if (snapshot.parent_snapshot_id or NO_SNAPSHOT) == version:
                return int(snapshot.snapshot_id)
        raise self._gone(version)

    def added(self, version: int) -> Sequence[TableFile]:
        """See ``TableHistory``. Compaction changes no rows."""
        from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
        from pyiceberg.table import FileScanTask
        from pyiceberg.table.snapshots import Operation

        snapshot = self._table.metadata.snapshot_by_id(version)
        if snapshot is None:
            raise self._gone(version)
        operation = None if snapshot.summary is None else snapshot.summary.operation
        if operation == Operation.REPLACE:
            return ()
        if operation != Operation.APPEND:
            if self._source.skip_changes:
                return ()
            raise UsageError(
                f"snapshot {version} of {self._source.where} deletes or rewrites rows, and only new files are "
                "followed; give skip_changes=True to skip such snapshots"
            )
        with iceberg_errors("read", self._source.where):
            files = [
                entry.data_file
                for manifest in snapshot.manifests(self._table.io)
                if manifest.added_snapshot_id == version and manifest.content == ManifestContent.DATA
                for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True)
                if entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id in (None, version)
            ]
        return sorted((TableFile(one.file_path, FileScanTask(one)) for one in files), key=lambda file: file.path)

    def read(self, file: TableFile, row: int) -> Iterator[pa.RecordBatch]:
        """See ``TableHistory``. The library finds columns by their ids, and leaves deleted rows out."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        ids = {one.field_id: one.name for one in self._table.schema().fields}
        names = {name: ids[self._ids[name]] for name in self._schema.names if self._ids.get(name) in ids}
        columns_now = self._table.schema()
        if names:  # else rows are all that is read
            columns_now = columns_now.select(*names.values())
        scan = ArrowScan(self._table.metadata, self._table.io, columns_now, AlwaysTrue())
        before = 0
        for batch in scan.to_record_batches([file.data]):
            rest = batch.slice(max(row - before, 0))
            before += batch.num_rows
            if rest.num_rows:
                columns = [
                    rest.column(names[column.name]) if column.name in names else pa.nulls(rest.num_rows, column.type)
                    for column in self._schema
                ]
                yield pa.RecordBatch.from_arrays(columns, names=self._schema.names)


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
