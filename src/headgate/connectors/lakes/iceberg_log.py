"""The log of a table of Iceberg: how metadata is read, and how commits are made and found.

The library pyiceberg does the metadata. Facts that this relies on, each with a test: a commit that adds a snapshot
fails if another snapshot came first, unless the library rebases it, which is turned off; a commit of properties alone
conflicts with nothing, so a claim adds a snapshot without files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from headgate.codec.decodable import decodable
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.lakes.data_files import FILE_BYTES, NamedOutput, TableOutput, iceberg_type, new_columns
from headgate.connectors.lakes.iceberg_files import (
    IcebergFiles,
    Rewriter,
    equality_deletes,
    library_file,
    local_path,
    missing_in,
    refuse_transform,
)
from headgate.connectors.lakes.table_sink import FENCE_PREFIX, CommitConflict, LogTable
from headgate.distribution import install_command
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.storage.local_files import sync_directory, sync_file
from headgate.storage.urls import is_secret_name, refuse_secrets

NAMES_KEY = "headgate.outputs"
"""In the summary of a snapshot: the names of the outputs that it shows."""

DONE_PREFIX = "headgate.done."
"""Properties with the highest committed checkpoint of each generation begin so."""

GENERATIONS_MAX = 500
"""So many generations are in such a property; of older ones snapshots alone tell."""

RETRIES = "commit.retry.num-retries"


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


def load_log(
    table: str, catalog: str, properties: Mapping[str, str], file_bytes: int = FILE_BYTES
) -> IcebergLog | None:
    """Return a table as it is now; None: there is none. ``file_bytes``: of files that merges write.

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
    return IcebergLog(found, f"Iceberg table {table} of catalog {catalog}", file_bytes)


class IcebergLog(LogTable):
    """A table of Iceberg as it was when it was read: see ``LogTable``."""

    def __init__(self, table: Any, where: str, file_bytes: int) -> None:
        """Use ``load_log``."""
        self.table, self._where, self._file_bytes = table, where, file_bytes

    @property
    def where(self) -> str:
        return self._where

    @property
    def version(self) -> int:
        """See ``LogTable``: the number of the last snapshot."""
        return int(self.table.metadata.last_sequence_number)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return self.table.schema().as_arrow()

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the table."""
        return dict(self.table.properties)

    def refresh(self) -> None:
        with iceberg_errors("read", self.where):
            self.table.refresh()

    def claim(self, fence: Fence) -> None:
        """See ``LogTable``. The empty snapshot makes commits fail that were computed before."""
        self._commit({FENCE_PREFIX + fence.owner: self.fence_text(fence)}, {})

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
        columns = self.schema
        for part in self.table.spec().fields:
            name = self.table.schema().find_column_name(part.source_id)
            refuse_transform(part.transform, columns.field(name).type, name)

    def refuse_merges(self) -> None:
        """See ``LogTable``: the library cannot name the partition of a NaN, and reads no equality deletes."""
        for part in self.table.spec().fields:
            refuse_float_partition(self.where, part.name, str(self.table.schema().find_type(part.source_id)))
        snapshot = self.table.current_snapshot()
        summary = None if snapshot is None else snapshot.summary
        if summary is not None and summary.additional_properties.get("total-equality-deletes", "0") != "0":
            raise equality_deletes(self.where)

    # -- commits ----------------------------------------------------------------------------------------------------

    def committed(self, outputs: Sequence[NamedOutput], lives: Sequence[str]) -> Collection[str]:
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
            is_cut = any(number not in numbers for number in range(output.base + 1, self.version + 1))
            generation = str(output.parts.generation)
            highest = max((self._done(output.parts.owner, life).get(generation, 0) for life in lives), default=0)
            if output.name in names or (is_cut and output.parts.number <= highest):
                found.append(output.name)
        return found

    def _done(self, owner: str, life: str) -> dict[str, int]:
        text = self.properties.get(f"{DONE_PREFIX}{owner}.{life}")
        if text is None:
            return {}
        try:
            return msgspec.json.decode(text, type=decodable(dict[str, int]))
        except msgspec.DecodeError as error:
            raise UsageError(f"property {DONE_PREFIX}{owner} of {self.where} has another form: {error}") from error

    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        with iceberg_errors("look for files of", self.where):
            return missing_in(self.table.io, paths)

    def append(self, outputs: Sequence[TableOutput], life: str) -> None:
        self.refuse_features()
        files = [library_file(self.table, self.where, file) for output in outputs for file in output.files]
        self._commit(*self._proof(outputs, life), files)

    def merge(self, outputs: Sequence[NamedOutput], life: str, changes: pa.Table, keys: Sequence[str]) -> None:
        """See ``LogTable``. If no row changes a snapshot without files is the proof."""
        self.refuse_features()
        self.refuse_merges()
        *names, gone = changes.column_names
        changes = self.in_columns(changes.select(names)).append_column(gone, changes.column(gone))
        prefix = f"merged-{int(outputs[-1].parts.generation):010d}"
        files = IcebergFiles(self.table, self.version)
        with iceberg_errors("write files of", self.where):
            rewriter = Rewriter(files, prefix, self._file_bytes, SYSTEM_ENVIRONMENT)
            rewrite = rewriter.rewrite(self.table, self.where, changes, keys)
        added = [library_file(self.table, self.where, file) for file in rewrite.added]
        try:
            self._commit(*self._proof(outputs, life), added, rewrite.removed)
        except CommitConflict:
            # after any other error the commit may have happened, and then the table has these files
            rewrite.abandon()
            raise

    def _proof(self, outputs: Sequence[NamedOutput], life: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the properties of the table, and the summary of the snapshot, by which a commit is found."""
        owner = outputs[0].parts.owner
        done = self._done(owner, life)
        for output in outputs:
            generation = str(output.parts.generation)
            done[generation] = max(done.get(generation, 0), output.parts.number)
        newest = sorted(done, key=int)[-GENERATIONS_MAX:]
        text = msgspec.json.encode({generation: done[generation] for generation in newest}).decode()
        return {f"{DONE_PREFIX}{owner}.{life}": text}, {NAMES_KEY: " ".join(output.name for output in outputs)}

    def _commit(
        self,
        properties: Mapping[str, str],
        summary: Mapping[str, str],
        added: Sequence[Any] = (),
        removed: Sequence[Any] = (),
    ) -> None:
        """Add a snapshot and set properties in one commit, which fails if another snapshot came first."""
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.table.snapshots import Operation

        merges = self.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        # of this copy of the metadata alone: else the library repeats a commit without a look at the fence
        self.table.metadata.properties[RETRIES] = "0"
        with iceberg_errors("commit to", self.where):
            try:
                with self.table.transaction() as transaction:
                    transaction.set_properties(dict(properties))
                    update = transaction.update_snapshot(snapshot_properties=dict(summary))
                    if removed:
                        snapshot = overwrite_files()(
                            Operation.OVERWRITE, transaction, self.table.io, snapshot_properties=dict(summary)
                        )
                    else:
                        snapshot = update.merge_append() if merges else update.fast_append()
                    with snapshot:
                        for file in added:
                            snapshot.append_data_file(file)
                        for file in removed:
                            snapshot.delete_data_file(file)
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


@functools.cache
def overwrite_files() -> Any:
    """Return the library's class of snapshots that remove files and add others, which also tidies up manifests.

    The library's own merges no manifests, and keeps for ever those in which all files are removed.
    """
    from pyiceberg.table.update.snapshot import _MergeAppendFiles, _OverwriteFiles

    class Overwrite(_OverwriteFiles, _MergeAppendFiles):  # type: ignore[misc]
        def _process_manifests(self, manifests: list[Any]) -> list[Any]:
            return super()._process_manifests(  # type: ignore[no-any-return]
                [
                    one
                    for one in manifests
                    if one.has_added_files() or one.has_existing_files() or one.added_snapshot_id == self.snapshot_id
                ]
            )

    return Overwrite


def refuse_float_partition(where: str, name: str, dtype: str) -> None:
    """Refuse a partition of floating numbers for merges: the library cannot find the files of NaN.

    Raises:
        UsageError
    """
    if dtype in ("float", "double"):
        raise UsageError(
            f"{where} is partitioned by '{name}', a floating number, which IcebergSink(upsert=) does not do; choose "
            "another column, such as a text or an integer"
        )
