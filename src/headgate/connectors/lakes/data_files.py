"""Writes the data files of a table in the workers, and says what the log of the table needs to know of them.

Records stay in memory up to a limit; then they are written to one open Parquet file per partition. A file is closed
when it is large enough, or at the checkpoint. Readers do not see it before the driver has committed it.

Records have canonical types (``operators.schemas``). A table has fewer types: what fits without loss is widened, and
what has no counterpart is refused with a remedy. Types of the table are Arrow types here. Counterpart: ``table_sink``,
which commits. Source: docs/spec/lakes.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headgate.codec.decodable import decodable
from headgate.connectors.base import SealedTransaction, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import OutputName, owner_of
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable
from headgate.storage.local_files import sync_directory, sync_file

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]

TypeChange = Callable[[pa.DataType], "pa.DataType | None"]


def delta_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type of a column of Delta that holds a canonical type; None: there is none."""
    if pa.types.is_time(dtype):
        return None
    return _plain_type(dtype, delta_type)


def iceberg_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type of a column of Iceberg that holds a canonical type; None: there is none."""
    if dtype in (pa.int8(), pa.int16(), pa.uint8(), pa.uint16()):
        return pa.int32()
    if pa.types.is_time(dtype):
        return pa.time64("us")
    return _plain_type(dtype, iceberg_type)


def _plain_type(dtype: pa.DataType, inner: TypeChange) -> pa.DataType | None:
    if dtype in _UNSIGNED:
        return _UNSIGNED[dtype]
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype):
        return pa.binary()
    if pa.types.is_large_list(dtype):
        element = inner(dtype.value_type)
        return None if element is None else pa.list_(element)
    if pa.types.is_struct(dtype):
        fields = [(field.name, inner(field.type)) for field in dtype]
        if not fields or any(found is None for _, found in fields):
            return None
        return pa.struct([pa.field(name, found) for name, found in fields])
    if pa.types.is_duration(dtype) or pa.types.is_null(dtype):
        return None
    return dtype


def table_schema(schema: pa.Schema, change: TypeChange, sink: str) -> pa.Schema:
    """Return the schema of a table for records of ``schema``.

    Raises:
        UsageError: a column has a type that such tables do not have.
    """
    return pa.schema([pa.field(field.name, _changed(field, change, sink)) for field in schema])


def _changed(field: pa.Field, change: TypeChange, sink: str) -> pa.DataType:
    found = change(field.type)
    if found is None:
        raise UsageError(
            f"{sink} cannot write column '{field.name}' of type {field.type}, which such tables do not have; cast it "
            "to a number or a text before"
        )
    return found


def new_columns(records: pa.Schema, table: pa.Schema, change: TypeChange, sink: str, *, evolve: bool) -> list[pa.Field]:
    """Return the columns that the table does not have yet, in types of the table.

    Raises:
        UsageError: the records do not fit the table, or columns are missing in it and ``evolve`` is not set.
    """
    wanted = table_schema(records, change, sink)
    missing = [field for field in wanted if field.name not in table.names]
    if missing and not evolve:
        names = ", ".join(f"'{field.name}'" for field in missing)
        raise UsageError(
            f"the table of {sink} has no column {names}; give evolve=True to add columns, or leave them out by select"
        )
    for field in table:
        if field.name in wanted.names:
            found = wanted.field(field.name).type
            if not fits(found, field.type):
                raise UsageError(
                    f"column '{field.name}' of {sink} has type {field.type} in the table, and records have "
                    f"{records.field(field.name).type}, which does not always fit: cast it before"
                )
        elif not field.nullable:
            raise UsageError(f"column '{field.name}' of the table of {sink} is never null, and the records have none")
    return missing


def fits(found: pa.DataType, target: pa.DataType) -> bool:
    """Whether every value of ``found`` is one of ``target``."""
    if found.equals(target):
        return True
    if found in _INTEGERS and target in _INTEGERS:
        return _INTEGERS.index(found) <= _INTEGERS.index(target)
    if found == pa.float32() and target == pa.float64():
        return True
    if pa.types.is_decimal(found) and pa.types.is_decimal(target):
        whole = found.precision - found.scale
        return bool(found.scale <= target.scale and whole <= target.precision - target.scale)
    if pa.types.is_timestamp(found) and pa.types.is_timestamp(target):
        return (found.tz is None) == (target.tz is None) and target.unit in ("us", "ns")
    if _is_text(found) and _is_text(target):
        return True
    if _is_binary(found) and _is_binary(target):
        return True
    if _is_list(found) and _is_list(target):
        return fits(found.value_type, target.value_type)
    if _is_list(found) and pa.types.is_map(target):  # a map is a list of its entries in Headgate
        entries = found.value_type
        pair = [field.name for field in entries] if pa.types.is_struct(entries) else []
        return pair == ["key", "value"] and all(
            fits(entries.field(at).type, inner) for at, inner in enumerate((target.key_type, target.item_type))
        )
    if pa.types.is_struct(found) and pa.types.is_struct(target):
        same = [field.name for field in found] == [field.name for field in target]
        return same and all(fits(a.type, b.type) for a, b in zip(found, target, strict=True))
    return False


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype))


def _is_binary(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_binary_view(dtype))


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype))


def as_table(batches: Iterable[pa.RecordBatch], records: pa.Schema, table: pa.Schema) -> pa.Table:
    """Return records in the types of the table: columns that they do not have are null.

    Raises:
        UsageError: a value does not fit.
    """
    found = pa.Table.from_batches(list(batches), schema=records)
    columns = []
    for field in table:
        if field.name not in records.names:
            columns.append(pa.nulls(found.num_rows, field.type))
            continue
        try:
            column = _as_type(found.column(field.name).combine_chunks(), field.type)
        except pa.ArrowInvalid as error:
            raise UsageError(f"a value of column '{field.name}' does not fit the table: {error}") from error
        if column.null_count and not field.nullable:
            raise UsageError(f"column '{field.name}' of the table is never null, and a record has null there")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table)


def _as_type(column: pa.Array | pa.ChunkedArray, target: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_map(target) or pa.types.is_map(column.type):
        return pc.cast(column, target)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return pa.chunked_array([_as_map(chunk, target) for chunk in chunks], target)


def _as_map(column: pa.Array, target: pa.DataType) -> pa.Array:
    entries = column.flatten()
    sizes = pc.fill_null(pc.list_value_length(column), 0)
    ends = pc.cumulative_sum(sizes.cast(pa.int32()))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    keys, items = entries.field("key").cast(target.key_type), entries.field("value").cast(target.item_type)
    mask = column.is_null() if column.null_count else None
    return pa.MapArray.from_arrays(offsets, keys, items, target, mask=mask)


_VERSION = b"1\n"

FILE_BYTES = 128 << 20
"""Bytes after which a data file is closed and another one begun."""

OPEN_FILES_MAX = 64
"""Files that a subtask writes at the same time; of more partitions the largest file is closed."""


class DataFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A data file of a table that is complete.

    Attributes:
        path: as the log of the table names it.
        partition: the value of each partition column, in the form of the log.
        stats: what the log says about its columns, in the form of the log.
    """

    path: str
    size_bytes: int
    rows: int
    partition: dict[str, str | None] = {}
    stats: str = ""


class NamedOutput(msgspec.Struct, frozen=True):
    """What one subtask has for one checkpoint.

    Attributes:
        name: identifies the output; no other output ever has this name (``OutputName``).
        base: the version of the table when the subtask began; the output was committed in none up to that.
    """

    name: str
    base: int

    @property
    def parts(self) -> OutputName:
        """The parts of the name."""
        found = OutputName.parse(self.name)
        if found is None:
            raise CorruptionError(f"output '{self.name}'", 0, "the name of an output", self.name)
        return found


class TableOutput(NamedOutput, frozen=True):
    """The files that one subtask wrote for one checkpoint."""

    files: tuple[DataFile, ...]


def encode_output(output: TableOutput) -> bytes:
    """Return the payload of a committable."""
    return _VERSION + msgspec.json.encode(output)


def decode_output(committable: Committable) -> TableOutput:
    """Return what a committable holds.

    Raises:
        CorruptionError: it has another form.
    """
    where = f"committable of sink '{committable.sink}' for checkpoint {committable.checkpoint}"
    payload = committable.payload
    if not payload.startswith(_VERSION):
        raise CorruptionError(where, 0, "version 1", repr(payload[:2]))
    try:
        return msgspec.json.decode(payload[len(_VERSION) :], type=decodable(TableOutput))
    except msgspec.DecodeError as error:
        raise CorruptionError(where, len(_VERSION), "a list of data files", str(error)) from error


@dataclass(frozen=True, slots=True)
class Part:
    """The records of one partition. ``directory``: below the table; "" for none."""

    directory: str
    values: dict[str, str | None]
    records: pa.Table


def grouped(keys: pa.Table) -> Iterator[tuple[tuple[Any, ...], pa.Array]]:
    """Yield each combination of the values in ``keys``, with the numbers of its rows."""
    names = [str(place) for place in range(keys.num_columns)]
    numbered = keys.rename_columns(names).append_column("row", pa.array(range(keys.num_rows), pa.int64()))
    groups = numbered.group_by(names, use_threads=False).aggregate([("row", "list")])
    values = groups.select(names).to_pylist()
    rows = groups.column("row_list").combine_chunks()
    for number, found in enumerate(values):
        yield tuple(found.values()), rows[number].values


class FileFormat(Protocol):
    """What differs between tables: where files go, partitions and statistics. Lives in a worker."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""

    @property
    def base(self) -> int:
        """The version of the table when it was opened."""

    def parts(self, records: pa.Table) -> Iterable[Part]:
        """Divide records into partitions, in the columns that files have."""

    def create(self, directory: str, name: str) -> tuple[str, Any]:
        """Return the path of a new file, and a stream that writes it."""

    def local_path(self, path: str) -> Path | None:
        """Return where a file is on this machine; None: in an object store."""

    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        """Return those of ``paths`` that do not exist.

        Raises:
            OSError
        """

    def remove(self, path: str) -> None:
        """Remove a file that is not committed."""

    def data_file(self, path: str, size_bytes: int, part: Part, metadata: pq.FileMetaData) -> DataFile:
        """Return what the log needs to know of a file."""


@dataclass(slots=True)
class _OpenFile:
    path: str
    part: Part
    stream: Any
    writer: pq.ParquetWriter
    metadata: list[pq.FileMetaData] = dataclasses.field(default_factory=list)


class FileSet:
    """The files of one transaction."""

    def __init__(self, format: FileFormat, prefix: str, file_bytes: int, environment: Environment) -> None:
        self._format, self._prefix, self._file_bytes, self._environment = format, prefix, file_bytes, environment
        self._open: dict[str, _OpenFile] = {}
        self._complete: list[DataFile] = []

    def add(self, batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> None:
        """Write records. A file that is large enough is closed."""
        records = as_table(batches, schema, self._format.schema)
        for part in self._format.parts(records):
            key = repr(part.values)
            file = self._open.get(key) or self._opened(key, part)
            file.writer.write_table(part.records)
            if file.stream.tell() >= self._file_bytes:
                self._close(key)

    def _opened(self, key: str, part: Part) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._close(max(self._open, key=lambda one: int(self._open[one].stream.tell())))
        name = f"{self._prefix}-{self._environment.token(8).hex()}.parquet"
        path, stream = self._format.create(part.directory, name)
        metadata: list[pq.FileMetaData] = []
        writer = pq.ParquetWriter(
            stream, part.records.schema, compression="zstd", metadata_collector=metadata, store_schema=False
        )
        small = Part(part.directory, part.values, part.records.slice(0, 0))
        self._open[key] = _OpenFile(path, small, stream, writer, metadata)
        return self._open[key]

    def _close(self, key: str) -> None:
        file = self._open[key]
        file.writer.close()
        size_bytes = int(file.stream.tell())
        file.stream.close()
        del self._open[key]
        self._complete.append(self._format.data_file(file.path, size_bytes, file.part, file.metadata[0]))

    def close(self) -> tuple[DataFile, ...]:
        """Complete all files, make them durable, and return them.

        Raises:
            OSError: also when a store shows no file after it has said that it is complete. A server that was killed
                while it completed an upload may say so of the repeated request.
        """
        for key in list(self._open):
            self._close(key)
        places = {file.path: self._format.local_path(file.path) for file in self._complete}
        paths = [place for place in places.values() if place is not None]
        for path in paths:
            sync_file(path)
        for directory in sorted({path.parent for path in paths}):
            sync_directory(directory)
        missing = self._format.missing_files([path for path, place in places.items() if place is None])
        if missing:
            raise OSError(f"{missing[0]} is not there after it was written")
        return tuple(self._complete)

    def abandon(self) -> None:
        """Remove the files, as far as that is possible: vacuum removes others."""
        paths = [file.path for file in self._complete]
        for file in self._open.values():
            paths.append(file.path)
            for close in (file.writer.close, file.stream.close):
                _ignoring_errors(close)
        self._open.clear()
        self._complete.clear()
        for path in paths:
            _ignoring_errors(lambda path=path: self._format.remove(path))


def _ignoring_errors(call: Any) -> None:
    try:
        call()
    except Exception:  # of any kind, as libraries raise
        return


class TableWriter(SinkWriter):
    """Writes the records of one subtask."""

    def __init__(
        self,
        format: FileFormat,
        context: SinkContext,
        buffer_bytes: int,
        file_bytes: int,
        environment: Environment = SYSTEM_ENVIRONMENT,
    ) -> None:
        self._format, self._context = format, context
        self._buffer_bytes, self._file_bytes, self._environment = buffer_bytes, file_bytes, environment
        self._batches: list[pa.RecordBatch] = []
        self._size_bytes = 0
        self._files: FileSet | None = None
        self._sealed: list[_Sealed] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``.

        Raises:
            StorageError: a file cannot be written.
        """
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self._size_bytes += batch.nbytes
        if self._size_bytes >= self._buffer_bytes:
            if self._files is None:
                self._files = self._file_set()
            # a file that failed has taken records with it: no other try has them
            with _failing(self._context.node, is_transient=False):
                self._files.add(self._batches, self._context.schema)
            self._batches, self._size_bytes = [], 0

    def seal(self, checkpoint: CheckpointId) -> _Sealed:
        context = self._context
        owner = owner_of(context.pipeline, context.node)
        name = str(OutputName(owner, int(checkpoint), context.subtask_index, int(context.generation)))
        sealed = _Sealed(self, name, self._files, self._batches)
        self._batches, self._size_bytes, self._files = [], 0, None
        self._sealed = [one for one in self._sealed if not one.is_over]
        self._sealed.append(sealed)
        return sealed

    def close(self) -> None:
        """What is not prepared is abandoned."""
        if self._files is not None:
            self._files.abandon()
        for sealed in self._sealed:
            sealed.close()

    def output(self, name: str, files: FileSet | None, batches: list[pa.RecordBatch]) -> bytes:
        """Complete the files of a transaction; return the payload. What is all in memory may be written again.

        Raises:
            StorageError: a file cannot be written.
        """
        found = self._file_set() if files is None else files
        with _failing(self._context.node, is_transient=files is None):
            try:
                if batches:
                    found.add(batches, self._context.schema)
                complete = found.close()
            except BaseException:
                found.abandon()
                raise
        return encode_output(TableOutput(name, self._format.base, complete))

    def _file_set(self) -> FileSet:
        context = self._context
        prefix = f"part-{context.subtask_index:05d}-{int(context.generation):010d}"
        return FileSet(self._format, prefix, self._file_bytes, self._environment)


class _failing:  # noqa: N801 - a context manager
    """Says of errors of the file system or the store that a file could not be written."""

    def __init__(self, node: str, *, is_transient: bool) -> None:
        self._node, self._is_transient = node, is_transient

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise StorageError(
                "write a data file of", f"sink '{self._node}'", str(error), is_transient=self._is_transient
            ) from error


class _Sealed(SealedTransaction):
    """The records of one checkpoint and subtask: see ``SealedTransaction``."""

    def __init__(self, writer: TableWriter, name: str, files: FileSet | None, batches: list[pa.RecordBatch]) -> None:
        self._writer, self._name, self._files, self._batches = writer, name, files, batches
        self._payload: bytes | None = None
        self._failure: StorageError | None = None
        self.is_over = files is None and not batches
        """Whether it was prepared, or there is nothing to prepare."""

    def prepare(self) -> bytes | None:
        """See ``SealedTransaction``. Records that were in files that failed are gone: no later try is without them."""
        if self._failure is not None:
            raise self._failure
        if not self.is_over:
            try:
                self._payload = self._writer.output(self._name, self._files, self._batches)
            except StorageError as error:
                self._failure = None if error.is_transient else error
                raise
            self.is_over = True
            self._files, self._batches = None, []
        return self._payload

    def close(self) -> None:
        """Abandon it if it is not prepared."""
        if self._files is not None:
            self._files.abandon()
        self.is_over, self._files, self._batches = True, None, []
