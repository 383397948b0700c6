"""Tables of Delta and Iceberg for tests that hold for both: made, changed and read by other programs than Headgate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from lake_program import committer, permit

from headgate.connectors.base import SinkContext, SinkWriter
from headgate.connectors.lakes.delta import DeltaSink
from headgate.connectors.lakes.delta_log import DeltaLog
from headgate.connectors.lakes.iceberg import IcebergSink
from headgate.connectors.lakes.iceberg_files import local_path
from headgate.connectors.lakes.iceberg_log import IcebergLog, opened_catalog
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.testing.sinks.fake_pipeline import SCHEMA

os.environ.setdefault("POLARS_ICEBERG_PLANNER", "pyiceberg")
"""Polars warns that its own planner is not installed."""

MARK = pa.field("mark", pa.large_string())


class Marks:
    """Gives each batch a key of its own, so that the table has a record twice if it is written twice."""

    environment: Any

    def check(self, schema: pa.Schema) -> None:
        super().check(schema.append(MARK))  # type: ignore[misc]

    def make_target(self, schema: pa.Schema) -> None:
        super().make_target(schema.append(MARK))  # type: ignore[misc]

    def open(self, context: SinkContext) -> SinkWriter:
        writer: SinkWriter = super().open(replace(context, schema=context.schema.append(MARK)))  # type: ignore[misc]
        write = writer.write

        def marked(batch: pa.RecordBatch) -> None:
            mark = pa.array([self.environment.token(8).hex()] * batch.num_rows, MARK.type)
            write(batch.append_column(MARK, mark))

        writer.write = marked  # type: ignore[method-assign]
        return writer


class MarkedDelta(Marks, DeltaSink):
    pass


class MarkedIceberg(Marks, IcebergSink):
    pass


class DeltaTables:
    """Tables of Delta below a directory or a bucket."""

    log = DeltaLog
    kind = "delta"

    def __init__(self, root: Path | str) -> None:
        self.root = root

    def options(self, name: str = "t") -> dict[str, Any]:
        return {"url": f"{self.root}/{name}"}

    def sink(self, name: str = "t", *, is_marked: bool = False, **options: Any) -> Any:
        return (MarkedDelta if is_marked else DeltaSink)(**self.options(name), **options)

    def _table(self, name: str) -> Any:
        found = DeltaLog.load(f"{self.root}/{name}", {})
        assert found is not None
        return found.table

    def rows(self, name: str = "t") -> list[dict[str, Any]]:
        found = DeltaLog.load(f"{self.root}/{name}", {})
        return [] if found is None else in_order(found.table.to_pyarrow_table())

    def frame(self, name: str = "t") -> pl.DataFrame:
        return pl.read_delta(f"{self.root}/{name}")

    def version(self, name: str = "t") -> int:
        return int(self._table(name).version())

    def create(self, schema: pa.Schema, name: str = "t", partition_by: Sequence[str] = ()) -> None:
        import deltalake

        deltalake.DeltaTable.create(f"{self.root}/{name}", schema, partition_by=list(partition_by) or None)

    def append(self, rows: pa.Table, name: str = "t") -> None:
        import deltalake

        deltalake.write_deltalake(f"{self.root}/{name}", rows, mode="append")

    def delete(self, where: str, name: str = "t") -> None:
        self._table(name).delete(where)

    def compact(self, name: str = "t") -> None:
        self._table(name).optimize.compact()

    def files(self, name: str = "t") -> set[str]:
        return set(self._table(name).file_uris())

    def lose_uncommitted(self, name: str = "t") -> None:
        live = {uri.rsplit("/", 1)[-1] for uri in self.files(name)}
        for path in Path(self.root, name).glob("*.parquet"):
            if path.name not in live:
                path.unlink()


class IcebergTables:
    """Tables of Iceberg in a catalog."""

    log = IcebergLog
    kind = "iceberg"

    def __init__(self, properties: dict[str, str], catalog: str = "default") -> None:
        self.properties, self.catalog = properties, catalog

    @staticmethod
    def below(root: Path) -> IcebergTables:
        return IcebergTables(
            {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/warehouse"}
        )

    def options(self, name: str = "t") -> dict[str, Any]:
        return {"table": f"shop.{name}", "catalog": self.catalog, "properties": self.properties}

    def sink(self, name: str = "t", *, is_marked: bool = False, **options: Any) -> Any:
        return (MarkedIceberg if is_marked else IcebergSink)(**self.options(name), **options)

    def table(self, name: str = "t") -> Any:
        found = IcebergSink(**self.options(name)).load()
        assert found is not None
        return found.table

    def rows(self, name: str = "t") -> list[dict[str, Any]]:
        found = IcebergSink(**self.options(name)).load()
        return [] if found is None else in_order(found.table.scan().to_arrow())

    def frame(self, name: str = "t") -> pl.DataFrame:
        return pl.scan_iceberg(self.table(name), reader_override="native").collect()

    def version(self, name: str = "t") -> int:
        return len(self.table(name).metadata.snapshots)

    def create(self, schema: pa.Schema, name: str = "t", partition_by: Sequence[str] = ()) -> None:
        catalog = opened_catalog(self.catalog, tuple(sorted(self.properties.items())))
        catalog.create_namespace_if_not_exists("shop")
        table = catalog.create_table(f"shop.{name}", schema)
        with table.update_spec() as spec:
            for column in partition_by:
                spec.add_identity(column)

    def append(self, rows: pa.Table, name: str = "t") -> None:
        self.table(name).append(rows)

    def delete(self, where: str, name: str = "t") -> None:
        self.table(name).delete(where)

    def compact(self, name: str = "t") -> None:
        table = self.table(name)
        table.overwrite(table.scan().to_arrow())

    def files(self, name: str = "t") -> set[str]:
        return {task.file.file_path for task in self.table(name).scan().plan_files()}

    def lose_uncommitted(self, name: str = "t") -> None:
        live = {local_path(path) for path in self.files(name)}
        directory = local_path(self.table(name).location())
        assert directory is not None
        for path in directory.glob("data/*.parquet"):
            if path not in live:
                path.unlink()

    def delete_rows(
        self, path: str, positions: Sequence[int], *, by_key: Sequence[int] = (), has_bounds: bool = True
    ) -> None:
        """Delete rows of a file by their positions, as Spark does, or all rows with an ``id`` that is in ``by_key``."""
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
        from pyiceberg.table.snapshots import Operation
        from pyiceberg.table.update.snapshot import _FastAppendFiles
        from pyiceberg.typedef import Record

        table = self.table()
        (partition,) = {task.file.partition for task in table.scan().plan_files() if task.file.file_path == path}
        if by_key:
            rows = pa.table({"id": pa.array(by_key, pa.int64())})
            ids = {"id": table.schema().find_field("id").field_id}
        else:
            rows = pa.table({"file_path": [path] * len(positions), "pos": pa.array(positions, pa.int64())})
            ids = {"file_path": 2147483546, "pos": 2147483545}
        fields = [
            pa.field(one.name, one.type, nullable=False, metadata={"PARQUET:field_id": str(ids[one.name])})
            for one in rows.schema
        ]
        where = f"{table.location()}/data/deletes-{len(table.metadata.snapshots)}.parquet"
        with table.io.new_output(where).create() as stream:
            pq.write_table(rows.cast(pa.schema(fields)), stream)

        class Writer(ManifestWriterV2):  # type: ignore[misc]
            def content(self) -> Any:
                return ManifestContent.DELETES

            @property
            def _meta(self) -> dict[str, str]:
                return {**super()._meta, "content": "deletes"}

        class Deletes(_FastAppendFiles):  # type: ignore[misc]
            def new_manifest_writer(self, spec: Any) -> Any:
                metadata = self._transaction.table_metadata
                return Writer(spec, metadata.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)

        one = DataFile.from_args(
            content=DataFileContent.EQUALITY_DELETES if by_key else DataFileContent.POSITION_DELETES,
            file_path=where,
            file_format=FileFormat.PARQUET,
            partition=partition or Record(),
            record_count=rows.num_rows,
            file_size_in_bytes=len(table.io.new_input(where)),
            lower_bounds={2147483546: path.encode()} if has_bounds and not by_key else None,
            upper_bounds={2147483546: path.encode()} if has_bounds and not by_key else None,
            equality_ids=list(ids.values()) if by_key else None,
            spec_id=table.spec().spec_id,
        )
        with table.transaction() as transaction, Deletes(Operation.DELETE, transaction, table.io) as deletes:
            deletes.append_data_file(one)


Tables = DeltaTables | IcebergTables


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: repr(next(iter(row.values()))))


def appending(tables: Tables, schema: pa.Schema = SCHEMA, **options: Any) -> Any:
    sink = tables.sink(create=True, **options)
    sink.check(schema)
    sink.make_target(schema)
    return sink


def numbers_sink(tables: Tables, name: str = "t", **options: Any) -> Any:
    sink = tables.sink(name, **({"create": True, "upsert": "number"} | options))
    sink.check(SCHEMA)
    sink.make_target(SCHEMA)
    return sink


def changing(tables: Tables, schema: pa.Schema, upsert: Any = "id", **options: Any) -> Any:
    sink = tables.sink(create=True, upsert=upsert, **options)
    sink = sink.for_changes(sink.keys, retractions=True)
    sink.check(schema)
    sink.make_target(schema)
    return sink


def output(sink: Any, checkpoint: int, *batches: pa.RecordBatch, subtask: int = 0, pipeline: str = "p") -> Committable:
    writer = sink.open(SinkContext(pipeline, "out", subtask, 2, Generation(1), batches[0].schema))
    for batch in batches:
        writer.write(batch)
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    writer.close()
    return Committable("out", CheckpointId(checkpoint), subtask, Generation(1), payload)


def write(sink: Any, checkpoint: int, *batches: pa.RecordBatch) -> None:
    committer(sink).commit(permit(checkpoint), [output(sink, checkpoint, *batches)])


def ops(*changes: tuple[str, int, int | None]) -> pa.RecordBatch:
    schema = pa.schema([("op", pa.large_string()), ("id", pa.int64()), ("n", pa.int64())])
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, change, strict=True)) for change in changes], schema)
