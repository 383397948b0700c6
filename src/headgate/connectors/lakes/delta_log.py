"""The log of a table of Delta Lake: how it is read, how commits are made and found, and how files are written.

The library deltalake does the log. Facts that this relies on, each with a test: a commit fails if table properties or
the transaction of one of its applications have changed since the table was read; it does not refuse a later repetition;
it syncs nothing to a local disk; a merge that changes no row is no commit.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

from headgate.connectors.fenced_sink import Fence
from headgate.connectors.lakes.data_files import (
    DataFile,
    NamedOutput,
    Part,
    TableOutput,
    delta_type,
    grouped,
    new_columns,
)
from headgate.connectors.lakes.delta_statistics import delta_stats
from headgate.connectors.lakes.table_sink import FENCE_PREFIX, CommitConflict, LogTable, TableSink
from headgate.distribution import install_command
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.lineage import Location
from headgate.storage.local_files import sync_directory, sync_file
from headgate.storage.urls import is_secret_name, local_directory

RETENTION = "delta.setTransactionRetentionDuration"
"""With this property readers of the log drop the transactions of applications, by which commits are found."""

NAMES_KEY = "headgate"
"""In the commit info: the names of the outputs that the commit shows."""


def delta_library() -> Any:
    """Return the library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import deltalake
    except ImportError:
        raise UsageError(f"Delta tables need the package deltalake: {install_command('delta')}") from None
    return deltalake


def checked_storage_options(what: str, options: Mapping[str, str]) -> None:
    """Refuse options with secrets: they are in the plan of the pipeline.

    Raises:
        UsageError
    """
    secret = next((name for name in options if is_secret_name(name)), None)
    if secret is not None:
        raise UsageError(
            f"{what}(storage_options=) has a secret, '{secret}'; leave it out, and give it in the environment of the "
            "driver and of every worker"
        )


def table_locations(url: str) -> tuple[Location, ...]:
    """Return the one place of a table."""
    return (Location(url, url if "://" in url else os.path.realpath(url)),)


def is_text(dtype: pa.DataType) -> bool:
    """Whether a column of a table is one of texts."""
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype))


def refuse_names_of_one(names: Sequence[str]) -> None:
    """Refuse names that are one to Delta, which tells no capital letters from small ones.

    Raises:
        UsageError
    """
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(name.lower(), name)
        if other != name:
            raise UsageError(
                f"DeltaSink cannot write both '{other}' and '{name}': to tables of Delta these are one name; rename one"
            )


def refuse_merge_partitions(where: str, columns: pa.Schema, partition_by: Sequence[str]) -> None:
    """Refuse partitions whose values a merge of deltalake writes wrongly: it writes the decimal -2.20 as -2.-20.

    Raises:
        UsageError
    """
    for name in partition_by:
        if pa.types.is_decimal(columns.field(name).type):
            raise UsageError(
                f"{where} is partitioned by '{name}', a decimal, which DeltaSink(upsert=) does not do; choose another "
                "column, such as a text or an integer"
            )


@contextlib.contextmanager
def delta_errors(operation: str, where: str) -> Iterator[None]:
    """Say of the errors of the library what was being done: they may pass."""
    try:
        yield
    except (HeadgateError, CommitConflict):
        raise
    except Exception as error:  # the library raises OSError, DeltaError, ValueError and Exception
        raise StorageError(operation, where, in_one_line(error), is_transient=True) from error


def in_one_line(error: Exception) -> str:
    """Return the text of an error of the library, which comes in colours and with a cause a line."""
    return " ".join(_COLOUR.sub("", str(error)).replace("↳", " ").split())


class DeltaLog(LogTable):
    """A table of Delta as it was when it was read: see ``LogTable``."""

    def __init__(self, url: str, table: Any, storage_options: Mapping[str, str]) -> None:
        """Use ``load``."""
        self.url, self.table, self.storage_options = url, table, storage_options

    @staticmethod
    def load(url: str, storage_options: Mapping[str, str], version: int | None = None) -> DeltaLog | None:
        """Return the table at ``url``; None: there is none.

        Raises:
            StorageError
        """
        library = delta_library()
        local = local_directory(url)
        if local is not None and not (local / "_delta_log").is_dir():
            return None
        options = storage_settings(url, storage_options)
        with delta_errors("read", f"Delta table {url}"):
            try:
                table = library.DeltaTable(str(local or url), version=version, storage_options=options)
            except library.exceptions.TableNotFoundError:
                return None
        return DeltaLog(url, table, storage_options)

    @staticmethod
    def create(
        url: str,
        schema: pa.Schema,
        partition_by: Sequence[str],
        settings: Mapping[str, str],
        storage_options: Mapping[str, str],
    ) -> None:
        """Create a table, unless there is one.

        Raises:
            StorageError
        """
        library = delta_library()
        local = local_directory(url)
        options = storage_settings(url, storage_options)
        with delta_errors("create", f"Delta table {url}"):
            library.DeltaTable.create(
                str(local or url),
                schema,
                mode="ignore",
                partition_by=list(partition_by),
                configuration=dict(settings) or None,
                storage_options=options,
            )
        if local is not None:
            sync_log(local, 0)

    @property
    def where(self) -> str:
        """The table, for messages."""
        return f"Delta table {self.url}"

    @property
    def version(self) -> int:
        """The version that was read."""
        return int(self.table.version())

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table, partition columns among them."""
        return pa.schema(self.table.schema().to_arrow())

    @property
    def partition_columns(self) -> list[str]:
        """The columns by which the table is partitioned."""
        return list(self.table.metadata().partition_columns)

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the table."""
        return dict(self.table.metadata().configuration)

    def refresh(self) -> None:
        with delta_errors("read", self.where):
            self.table.update_incremental()

    def claim(self, fence: Fence) -> None:
        properties = {FENCE_PREFIX + fence.owner: self.fence_text(fence)}
        with self._committing():
            self.table.alter.set_table_properties(properties, raise_if_not_exists=False)
        self._sync()

    # -- columns ----------------------------------------------------------------------------------------------------

    def new_columns(self, records: pa.Schema, *, evolve: bool) -> list[pa.Field]:
        self.refuse_features()
        missing = new_columns(records, self.schema, delta_type, "DeltaSink", evolve=evolve)
        refuse_names_of_one([*self.schema.names, *(column.name for column in missing)])
        return missing

    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        fields = delta_library().Schema.from_arrow(pa.schema(columns)).fields
        try:
            with self._committing():
                self.table.alter.add_columns(fields)
        except CommitConflict as error:
            raise StorageError("add columns to", self.where, str(error), is_transient=True) from error
        self._sync()

    def refuse_features(self) -> None:
        """Refuse a table that asks its writers for more than appending files.

        Raises:
            UsageError
        """
        properties = self.properties
        if RETENTION in properties:
            raise UsageError(
                f"{self.where} has the property {RETENTION}, by which it forgets what DeltaSink has committed; remove "
                "the property"
            )
        unsupported = [name for name in properties if name.startswith(("delta.constraints.", "delta.universalFormat"))]
        if properties.get("delta.columnMapping.mode", "none") != "none":
            unsupported.append("delta.columnMapping.mode")
        if properties.get("delta.enableRowTracking", "false") == "true":
            unsupported.append("delta.enableRowTracking")
        for column in self.table.schema().fields:
            unsupported += [
                f"{name} of column '{column.name}'"
                for name in column.metadata
                if name.startswith(("delta.invariants", "delta.generationExpression", "delta.identity"))
            ]
        if unsupported:
            raise UsageError(
                f"{self.where} has {unsupported[0]}, which DeltaSink does not keep; write to another table"
            )

    # -- commits ----------------------------------------------------------------------------------------------------

    def committed(self, outputs: Sequence[NamedOutput], lives: Sequence[str]) -> Collection[str]:
        """See ``LogTable``. Checkpoints above the highest one of their generation cannot be there: no look is needed.

        No two lives share a generation. Of those below, the names in the log decide; in a log that was cleaned up, the
        highest one does: a generation commits in order.
        """
        names = {_application(output, life) for output in outputs for life in lives}
        highest = {name: self._highest_of(name) for name in names}
        maybe = [o for o in outputs if any(o.parts.number <= highest[_application(o, life)] for life in lives)]
        if not maybe:
            return ()
        wanted = self.version - min(output.base for output in maybe)
        infos = self._infos(wanted)
        # the log was cleaned up, and its names with it
        if len(infos) < wanted:
            return {output.name for output in maybe}
        return {name for info in infos for name in _names_in(info)}.intersection(output.name for output in maybe)

    def _highest_of(self, application: str) -> int:
        """Return the highest checkpoint of an application, 0 without one: the library may read the log for it."""
        with delta_errors("read the transactions of", self.where):
            return int(self.table.transaction_version(application) or 0)

    def _infos(self, count: int) -> list[dict[str, Any]]:
        with delta_errors("read the history of", self.where):
            return list(self.table.history(limit=max(count, 1)))

    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        local = local_directory(self.url)
        if local is not None:
            return [path for path in paths if not (local / path).is_file()]
        with delta_errors("look for files of", self.where):
            return missing_in(self.filesystem(), paths)

    def append(self, outputs: Sequence[TableOutput], life: str) -> None:
        library = delta_library()
        self.refuse_features()
        now_ms = TableSink.environment.wall_ms()
        actions = [
            library.transaction.AddAction(file.path, file.size_bytes, file.partition, now_ms, True, file.stats)
            for output in outputs
            for file in output.files
        ]
        properties = library.CommitProperties(**self._proof(outputs, life))
        with self._committing():
            self.table.create_write_transaction(actions, "append", self.table.schema(), commit_properties=properties)
        self._sync()

    def _proof(self, outputs: Sequence[NamedOutput], life: str) -> dict[str, Any]:
        """Return the properties of a commit by which it is found."""
        highest: dict[str, int] = {}
        for output in outputs:
            name = _application(output, life)
            known = highest[name] if name in highest else self._highest_of(name)
            highest[name] = max(known, output.parts.number)
        # without a date, by which they could expire
        transactions = [delta_library().Transaction(name, number, None) for name, number in sorted(highest.items())]
        return {
            "custom_metadata": {NAMES_KEY: json.dumps([output.name for output in outputs])},
            "app_transactions": transactions,
        }

    def merge(self, outputs: Sequence[NamedOutput], life: str, changes: pa.Table, keys: Sequence[str]) -> None:
        """See ``LogTable``. If no row changes the library commits nothing: an empty commit is the proof then."""
        library = delta_library()
        self.refuse_features()
        self.refuse_merges()
        *names, gone = changes.column_names
        changes = self.in_columns(changes.select(names)).append_column(gone, changes.column(gone))
        # without repetitions by the library: whatever came first, the rows to replace are looked for again
        properties = library.CommitProperties(**self._proof(outputs, life), max_commit_retries=0)
        values = {_quoted(name): f"source.{_quoted(name)}" for name in names}
        before = self.version
        with self._committing():
            if changes.num_rows:
                self._merger(changes, keys, properties).when_matched_delete(
                    f"source.{_quoted(gone)}"
                ).when_matched_update(values).when_not_matched_insert(values, f"NOT source.{_quoted(gone)}").execute()
            if self.version == before:
                self.table.create_write_transaction([], "append", self.table.schema(), commit_properties=properties)
        self._sync(before)

    def _merger(self, changes: pa.Table, keys: Sequence[str], properties: Any) -> Any:
        return self.table.merge(
            changes,
            " AND ".join(f"target.{_quoted(key)} = source.{_quoted(key)}" for key in keys),
            source_alias="source",
            target_alias="target",
            # files without these keys, by minima and maxima, are not read; those of long decimals are rounded
            streamed_exec=any(_is_long_decimal(changes.field(key).type) for key in keys),
            writer_properties=delta_library().WriterProperties(compression="ZSTD"),
            commit_properties=properties,
        )

    def keys_without_empty_text(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``LogTable``: an empty text is null as value of a partition."""
        partitions, columns = self.partition_columns, self.schema
        return [key for key in keys if key in partitions and is_text(columns.field(key).type)]

    def refuse_torn_files(self) -> None:
        """Look in a local table for a file that a merge wrote, and a power cut left shorter than the log says.

        Raises:
            UsageError: there is one; the commit that added it did not count yet.
        """
        local = local_directory(self.url)
        if local is None:
            return
        with delta_errors("list the files of", self.where):
            files = pa.table(self.table.get_add_actions(flatten=True)).select(["path", "size_bytes"]).to_pylist()
        for file in files:
            path = local / unquote(file["path"])
            found = path.stat().st_size if path.is_file() else 0
            if "://" not in file["path"] and found != file["size_bytes"]:
                raise UsageError(
                    f"{self.where} has a damaged file: {file['path']} has {found} bytes, and the log says "
                    f"{file['size_bytes']}; if a power cut came during a merge, remove what its _delta_log has from "
                    "the version on that added the file, and start again"
                )

    def refuse_merges(self) -> None:
        """Refuse a table whose rows DeltaSink does not replace.

        Raises:
            UsageError
        """
        for name in ("delta.appendOnly", "delta.enableDeletionVectors"):
            if self.properties.get(name, "false") == "true":
                raise UsageError(
                    f"{self.where} has the property {name}, with which DeltaSink(upsert=) cannot replace rows; write "
                    "to another table"
                )
        refuse_merge_partitions(self.where, self.schema, self.partition_columns)

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        """Say of a commit that failed, however, that one has to look."""
        try:
            yield
        except delta_library().exceptions.CommitFailedError as error:
            raise CommitConflict(str(error)) from error
        except Exception as error:
            raise StorageError("commit to", self.where, in_one_line(error), is_transient=True) from error

    def _sync(self, merged_after: int | None = None) -> None:
        """Make the log of a local table durable: the library does not. Then read what was committed.

        ``merged_after``: a later version has files that the library wrote; they become durable, too.
        """
        local = local_directory(self.url)
        before = self.version if merged_after is None else merged_after
        self.refresh()
        if local is not None:
            # all of them: another writer may have committed in between
            for version in range(before, self.version + 1):
                if merged_after is not None:
                    sync_files(local, version)
                sync_log(local, version)

    def filesystem(self) -> pa.fs.FileSystem:
        """Return the files of the table, by the library."""
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        options = storage_settings(self.url, self.storage_options)
        return PyFileSystem(DeltaStorageHandler(str(local_directory(self.url) or self.url), options))


def missing_in(files: pa.fs.FileSystem, paths: Sequence[str]) -> list[str]:
    """Return those of ``paths`` that are no files."""
    return [path for path, info in zip(paths, files.get_file_info(list(paths)), strict=True) if not info.is_file]


def storage_settings(url: str, options: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options for the object store: commits to S3 are by conditional puts."""
    if url.startswith(("s3://", "s3a://")):
        return {"aws_conditional_put": "etag", **options}
    return dict(options) or None


def sync_log(table: Path, version: int) -> None:
    """Make one entry of the log of a local table durable."""
    log = table / "_delta_log"
    with contextlib.suppress(FileNotFoundError):  # cleaned up
        sync_file(log / f"{version:020d}.json")
    sync_directory(log)


def sync_files(table: Path, version: int) -> None:
    """Make the data files durable that one entry of the log of a local table adds."""
    try:
        entry = (table / "_delta_log" / f"{version:020d}.json").read_text()
    except FileNotFoundError:  # cleaned up
        return
    actions = [json.loads(line) for line in entry.splitlines()]
    paths = [table / unquote(one[kind]["path"]) for one in actions for kind in ("add", "cdc") if kind in one]
    for path in paths:
        sync_file(path)
    for directory in sorted({path.parent for path in paths}):
        sync_directory(directory)


def _is_long_decimal(dtype: pa.DataType) -> bool:
    """Whether the library rounds minima and maxima of the type: it has them as floating numbers in the log."""
    return bool(pa.types.is_decimal(dtype) and dtype.precision > EXACT_DIGITS)


EXACT_DIGITS = 15
"""Each decimal of so many digits is another floating number."""


def _quoted(name: str) -> str:
    """Return the name of a column for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _application(output: NamedOutput, life: str) -> str:
    """Return the application id of a generation of a sink."""
    parts = output.parts
    return f"headgate:{parts.owner}:{life}:{parts.generation}"


def _names_in(info: Mapping[str, Any]) -> list[str]:
    text = info.get(NAMES_KEY)
    try:
        found = json.loads(text) if isinstance(text, str) else []
    except ValueError:
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NULL = "__HIVE_DEFAULT_PARTITION__"
NAME_MAX = 240


class DeltaFiles:
    """Writes data files of a table: see ``FileFormat``."""

    def __init__(self, table: DeltaLog) -> None:
        self._table, self.base, self.schema = table, table.version, table.schema
        self._partition_by = table.partition_columns
        self._columns = [name for name in self.schema.names if name not in self._partition_by]
        self._local = local_directory(table.url)
        self._files = None if self._local is not None else table.filesystem()
        if not self._columns:
            raise UsageError(f"{table.where} has no columns but those of its partitions; add one")

    def parts(self, records: pa.Table) -> Iterable[Part]:
        """See ``FileFormat``. Partition columns are not in the files."""
        if not self._partition_by:
            yield Part("", {}, records)
            return
        inside = records.select(self._columns)
        for found, rows in grouped(records.select(self._partition_by)):
            values = {name: partition_text(value) for name, value in zip(self._partition_by, found, strict=True)}
            yield Part(partition_directory(values), values, inside.take(rows))

    def create(self, directory: str, name: str) -> tuple[str, Any]:
        path = f"{directory}/{name}" if directory else name
        if self._local is not None:
            (self._local / directory).mkdir(parents=True, exist_ok=True)
            return path, pa.OSFile(str(self._local / path), "wb")
        assert self._files is not None
        return path, self._files.open_output_stream(path)

    def local_path(self, path: str) -> Path | None:
        return None if self._local is None else self._local / path

    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        """See ``FileFormat``."""
        return [] if self._files is None else missing_in(self._files, paths)

    def remove(self, path: str) -> None:
        if self._local is not None:
            (self._local / path).unlink(missing_ok=True)
        elif self._files is not None:
            self._files.delete_file(path)

    def data_file(self, path: str, size_bytes: int, part: Part, metadata: pq.FileMetaData) -> DataFile:
        return DataFile(path, size_bytes, metadata.num_rows, part.values, delta_stats(metadata, part.records.schema))


def partition_directory(values: Mapping[str, str | None]) -> str:
    """Return the directory of a partition, as other writers name it: some readers take the values from there.

    Raises:
        UsageError: a value is too long for the name of a directory.
    """
    found = [
        f"{quote(name, safe='')}={_NULL if text is None else quote(text, safe='')}" for name, text in values.items()
    ]
    for name in found:
        if len(name) > NAME_MAX:
            raise UsageError(f"a partition value is too long for the name of a directory: {name[:60]}…")
    return "/".join(found)


def partition_text(value: Any) -> str | None:
    """Return a partition value as the log has it. An empty text is null there."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        plain = (value.astimezone(datetime.UTC) if value.tzinfo else value).replace(tzinfo=None)
        return plain.isoformat(" ", "microseconds")
    return str(value)
