"""A table of Iceberg as sink: what users configure, and how its metadata is read and written.

The library pyiceberg does the metadata. Facts that this relies on, each with a test: a commit that adds a snapshot
fails if another snapshot came first, unless the library rebases it, which is turned off; a commit of properties alone
conflicts with nothing, so a claim adds a snapshot without files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headgate.connectors.fenced_sink import Fence
from headgate.connectors.lakes.data_files import DataFile, FileFormat, NamedOutput, Part, TableOutput, grouped
from headgate.connectors.lakes.table_sink import (
    FENCE_PREFIX,
    CommitConflict,
    LogTable,
    TableSink,
    encode_fence,
    refuse_missing_columns,
)
from headgate.connectors.lakes.types import iceberg_type, new_columns, table_schema
from headgate.distribution import install_command
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.lineage import Location
from headgate.storage.fsync import sync_directory, sync_file
from headgate.storage.urls import is_secret_name, refuse_secrets

NAMES_KEY = "headgate.outputs"
"""In the summary of a snapshot: the names of the outputs that it shows."""

DONE_PREFIX = "headgate.done."
"""Properties with the highest committed checkpoint of each generation begin so."""

GENERATIONS_MAX = 500
"""So many generations are in such a property; of older ones snapshots alone tell."""

RETRIES = "commit.retry.num-retries"


@dataclass(frozen=True, kw_only=True)
class IcebergSink(TableSink):
    """Appends records to a table of Iceberg, exactly once.

    Subtasks write Parquet files while records flow. When a checkpoint completes, one snapshot of the table shows its
    records, all at once. Needs the package pyiceberg: ``pip install 'headgate-streams[iceberg]'``.

    Attributes:
        table: the table with its namespace, such as ``"shop.orders"``.
        catalog: the name of the catalog, as in ``.pyiceberg.yaml`` and in ``PYICEBERG_CATALOG__<NAME>__URI``.
        properties: of the catalog, such as ``{"type": "rest", "uri": "http://localhost:8181"}``. Give secrets in
            the environment of the driver and of every worker, or in ``.pyiceberg.yaml`` there.
        create: create the table, and its namespace, if it is missing.
        partition_by: how a table that is created is partitioned: columns, or ``"day(at)"``, ``"bucket(16, id)"``,
            ``"truncate(4, name)"`` and the like.
        evolve: add columns to the table that records have and it does not.
        settings: properties of a table that is created.
        file_bytes: after so many bytes a subtask closes a file and begins another one.
        buffer_bytes: Arrow bytes that a subtask holds in memory before it writes them.
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
            if str(transform).startswith("bucket") and importlib.util.find_spec("pyiceberg_core") is None:
                raise needs_core(f"bucket of '{name}'")

    def load(self) -> IcebergLog | None:
        return load_log(self.table, self.catalog, self.properties)

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
        return IcebergFiles(table)


def iceberg_library() -> Any:
    """Return the library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pyiceberg
    except ImportError:
        raise UsageError(f"Iceberg tables need the package pyiceberg: {install_command('iceberg')}") from None
    return pyiceberg


def check_catalog(what: str, table: str, properties: Mapping[str, str]) -> None:
    """Refuse a table without namespace, and secrets: properties are in the plan of the pipeline.

    Raises:
        UsageError
    """
    if "." not in table or not all(table.split(".")):
        raise UsageError(f"{what}({table!r}) must be a table with its namespace, such as 'shop.orders'")
    for name, value in properties.items():
        if is_secret_name(name):
            raise UsageError(
                f"{what}(properties=) has a secret, '{name}'; leave it out, and give it in the environment of the "
                "driver and of every worker, or in .pyiceberg.yaml there"
            )
        refuse_secrets(value)


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


@functools.lru_cache(maxsize=16)
def opened_catalog(name: str, properties: tuple[tuple[str, str], ...]) -> Any:
    """Return a catalog. One process opens each once."""
    from pyiceberg.catalog import load_catalog

    return load_catalog(name, **dict(properties))


@contextlib.contextmanager
def iceberg_errors(operation: str, where: str) -> Iterator[None]:
    """Say of the errors of the library what was being done: they may pass, unless something is configured wrongly."""
    try:
        yield
    except (HeadgateError, CommitConflict):
        raise
    except Exception as error:  # of the library, of SQLAlchemy, of requests, of pyarrow
        text = str(error).partition("\n")[0] or type(error).__name__
        is_transient = not isinstance(error, ValueError | TypeError | NotImplementedError)
        raise StorageError(operation, where, text, is_transient=is_transient) from error


def load_log(table: str, catalog: str, properties: Mapping[str, str]) -> IcebergLog | None:
    """Return a table as it is now; None: there is none.

    Raises:
        StorageError
    """
    iceberg_library()
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    with iceberg_errors("read", f"Iceberg table {table} of catalog {catalog}"):
        try:
            found = opened_catalog(catalog, tuple(sorted(properties.items()))).load_table(table)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
    return IcebergLog(found, f"Iceberg table {table} of catalog {catalog}")


class IcebergLog(LogTable):
    """A table of Iceberg as it was when it was read: see ``LogTable``."""

    def __init__(self, table: Any, where: str) -> None:
        """Use ``load_log``."""
        self.table, self.where = table, where

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return self.table.schema().as_arrow()

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the table."""
        return dict(self.table.properties)

    @property
    def sequence_number(self) -> int:
        """The number of the last snapshot."""
        return int(self.table.metadata.last_sequence_number)

    def refresh(self) -> None:
        with iceberg_errors("read", self.where):
            self.table.refresh()

    def claim(self, fence: Fence) -> None:
        """See ``LogTable``. The empty snapshot makes commits fail that were computed before."""
        self._commit({FENCE_PREFIX + fence.owner: encode_fence(fence)}, {}, ())

    # -- columns ----------------------------------------------------------------------------------------------------

    def new_columns(self, records: pa.Schema, *, evolve: bool) -> list[pa.Field]:
        self.refuse_features()
        return new_columns(records, self.schema, iceberg_type, "IcebergSink", evolve=evolve)

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        with iceberg_errors("add columns to", self.where), self.table.update_schema() as update:
            update.union_by_name(pa.schema(columns))

    def refuse_features(self) -> None:
        """Refuse a table that is not written to as this sink does it.

        Raises:
            UsageError
        """
        version = self.table.metadata.format_version
        if version != 2:
            raise UsageError(f"{self.where} has format version {version}; IcebergSink writes tables of version 2")
        sources = [part.source_id for part in self.table.spec().fields]
        if len(set(sources)) < len(sources):
            raise UsageError(
                f"{self.where} has two partitions by one column; IcebergSink writes tables with one of them"
            )
        nested = [at for at in sources if at not in {column.field_id for column in self.table.schema().fields}]
        if nested:
            raise UsageError(
                f"{self.where} is partitioned by a column inside a struct; IcebergSink does not write such"
            )

    # -- commits ----------------------------------------------------------------------------------------------------

    def committed(self, outputs: Sequence[NamedOutput], life: str) -> Collection[str]:
        """See ``LogTable``. Snapshots have the names. Where some have expired, the highest checkpoint decides."""
        snapshots = self.table.metadata.snapshots
        names: set[str] = set()
        for snapshot in snapshots:
            names.update(
                (snapshot.summary.additional_properties if snapshot.summary else {}).get(NAMES_KEY, "").split()
            )
        numbers = {snapshot.sequence_number for snapshot in snapshots}
        found = []
        for output in outputs:
            is_cut = any(number not in numbers for number in range(output.base + 1, self.sequence_number + 1))
            highest = self._done(output.parts.owner, life).get(str(output.parts.generation), 0)
            if output.name in names or (is_cut and output.parts.number <= highest):
                found.append(output.name)
        return found

    def _done(self, owner: str, life: str) -> dict[str, int]:
        text = self.properties.get(f"{DONE_PREFIX}{owner}.{life}")
        if text is None:
            return {}
        try:
            return msgspec.json.decode(text, type=dict[str, int])
        except msgspec.DecodeError as error:
            raise UsageError(f"property {DONE_PREFIX}{owner} of {self.where} has another form: {error}") from error

    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        with iceberg_errors("look for files of", self.where):
            return [path for path in paths if not self.table.io.new_input(path).exists()]

    def append(self, outputs: Sequence[TableOutput], life: str) -> None:
        self.refuse_features()
        owner = outputs[0].parts.owner
        done = self._done(owner, life)
        for output in outputs:
            generation = str(output.parts.generation)
            done[generation] = max(done.get(generation, 0), output.parts.number)
        newest = sorted(done, key=int)[-GENERATIONS_MAX:]
        text = msgspec.json.encode({generation: done[generation] for generation in newest}).decode()
        files = [self._data_file(file) for output in outputs for file in output.files]
        self._commit(
            {f"{DONE_PREFIX}{owner}.{life}": text}, {NAMES_KEY: " ".join(output.name for output in outputs)}, files
        )

    def _commit(self, properties: Mapping[str, str], summary: Mapping[str, str], files: Sequence[Any]) -> None:
        """Add a snapshot and set properties in one commit, which fails if another snapshot came first."""
        from pyiceberg.exceptions import CommitFailedException

        merges = self.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        # of this copy of the metadata alone: else the library repeats a commit without a look at the fence
        self.table.metadata.properties[RETRIES] = "0"
        with iceberg_errors("commit to", self.where):
            try:
                with self.table.transaction() as transaction:
                    transaction.set_properties(dict(properties))
                    update = transaction.update_snapshot(snapshot_properties=dict(summary))
                    with update.merge_append() if merges else update.fast_append() as snapshot:
                        for file in files:
                            snapshot.append_data_file(file)
            except CommitFailedException as error:
                raise CommitConflict(str(error)) from error
        self._sync()

    def _sync(self) -> None:
        """Make new metadata durable on a local disk: the library does not."""
        location = local_path(self.table.metadata_location)
        snapshot = self.table.current_snapshot()
        if location is None or snapshot is None:
            return
        with iceberg_errors("read", self.where):
            manifests = [
                manifest.manifest_path
                for manifest in snapshot.manifests(self.table.io)
                if manifest.added_snapshot_id == snapshot.snapshot_id
            ]
        for path in [location, *map(local_path, [snapshot.manifest_list, *manifests])]:
            if path is not None:
                with contextlib.suppress(FileNotFoundError):  # a newer commit has removed it
                    sync_file(path)
        sync_directory(location.parent)

    def _data_file(self, file: DataFile) -> Any:
        """Return a file as the library has it."""
        from pyiceberg.conversions import from_bytes
        from pyiceberg.manifest import DataFile as IcebergFile
        from pyiceberg.manifest import DataFileContent
        from pyiceberg.manifest import FileFormat as IcebergFormat
        from pyiceberg.typedef import Record

        stats = msgspec.json.decode(file.stats, type=_Stats)
        spec = self.table.specs().get(stats.spec)
        if spec is None or stats.spec != self.table.metadata.default_spec_id:
            raise UsageError(
                f"{self.where} was given other partitions while a pipeline wrote to it; its output cannot be "
                "committed: give it the former partitions until this pipeline has stopped"
            )
        types = [part.field_type for part in spec.partition_type(self.table.schema()).fields]
        values = [
            None if value is None else from_bytes(kind, value)
            for kind, value in zip(types, stats.partition, strict=True)
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


class _Stats(msgspec.Struct, frozen=True, kw_only=True):
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


def local_path(location: str) -> Path | None:
    """Return where a file is on this machine, by its location as the library reads it; None: elsewhere."""
    path = location.removeprefix("file://").removeprefix("file:")
    return None if "://" in path else Path(path)


_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000


def partition_values(transform: Any, source: Any, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return the partition values of a column.

    The library needs another package for all transforms but identity, so those of time and texts are done here.

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
    try:
        return transform.pyarrow_transform(source)(column)
    except NotInstalledError as error:
        raise needs_core(name) from error


def needs_core(transform: str) -> UsageError:
    """Return the error that a transform needs another package."""
    return UsageError(
        f"partitions by {transform} need the package pyiceberg-core: pip install 'pyiceberg[pyiceberg-core]'"
    )


class IcebergFiles:
    """Writes data files of a table: see ``FileFormat``."""

    def __init__(self, table: IcebergLog) -> None:
        from pyiceberg.table.locations import load_location_provider

        self._table, self.base = table.table, table.sequence_number
        metadata = self._table.metadata
        self._schema, self._spec = metadata.schema(), metadata.spec()
        self.schema = table.schema
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
        stats = _Stats(spec=self._spec.spec_id, partition=partition, **found)
        return DataFile(path, size_bytes, metadata.num_rows, {}, msgspec.json.encode(stats).decode())
