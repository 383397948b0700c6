"""Parquet files as a source; a position is a file, a row group and a row in it.

Counterpart: a captured DataFrame, or any directory of Parquet files. Source: docs/spec/connectors.md. Never holds more
than a few decoded pages of each file it reads.
"""

from __future__ import annotations

import copy
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import xxhash

from headgate.connectors.base import (
    FailStopReader,
    Source,
    SourceBatch,
    SourceContext,
    SourceReader,
    SplitPosition,
    owner_of_split,
)
from headgate.connectors.files.object_reader import Fetcher, ObjectReader, ObjectStream
from headgate.connectors.files.selection import (
    ObjectSelection,
    Paths,
    Replacement,
    numbered_files,
    object_options,
    select_files,
    select_objects,
)
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.config import Duration, check_switches
from headgate.model.lineage import Location
from headgate.model.state_schema import Form
from headgate.operators.schemas import (
    canonical_schema,
    carried,
    encoded_text,
    refuse_twice,
    schema_text,
    with_durations,
)
from headgate.storage.base import NotFound, Replaced, StoredFile

BATCH_ROWS = 65_536

ACTIVE_FILES_MAX = 4
"""Files read in turn at a time: enough to keep event time of several files together, few open files."""

PATTERN_DEFAULT = "**/*.parquet"
_VERSION = 1
_POSITION = struct.Struct("<B?IIQQQ")
_MAGIC_BYTES = 8
"""At the end of a file: the length of its footer, and a magic number."""
_FAILURES = (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError)


class ParquetFiles(Source):
    """Reads Parquet files that all have the same schema.

    Paths are as for ``TextFiles``. Files by URL, such as ``s3://bucket/directory/``, may be followed.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        pattern: str = PATTERN_DEFAULT,
        batch_rows: int = BATCH_ROWS,
        follow: bool = False,
        discovery_interval: Duration | None = None,
        replaced: Replacement | None = None,
        max_age: Duration | None = None,
    ) -> None:
        """Configure.

        Args:
            paths: files, globs, directories, or URLs of these.
            columns: names of the columns to read. None: all columns.
            pattern: which files below a directory to read, as a glob relative to it.
            batch_rows: the number of records in a batch.
            follow: of URLs: True keeps waiting for more files; the source then never ends.
            discovery_interval: how often followed URLs are checked for new files. None: ``"10s"``.
            replaced: of URLs: ``"read"`` reads what replaced a file under its name, from its start. None: ``"fail"``.
            max_age: of followed URLs: a file that is so much older than the newest one counts as read if it was not
                seen before. None: ``"7d"``.

        Raises:
            UsageError: no path was given, a column twice, a URL with a secret in it, or local files are to be followed.
        """
        check_switches("ParquetFiles: ", follow=follow)
        self._objects = select_objects(paths, pattern)
        """The selection of URLs; None: the paths are local."""
        if self._objects is None and (follow or discovery_interval is not None):
            raise UsageError("local Parquet files cannot be followed; read them with follow=False, or by URL")
        self._object_options = object_options(
            self._objects, follow=follow, discovery_interval=discovery_interval, replaced=replaced, max_age=max_age
        )
        self._selection = None if self._objects is not None else select_files(paths, pattern)
        self._columns = None if columns is None else list(columns)
        twice = [name for name in self._columns or () if (self._columns or []).count(name) > 1]
        if twice:
            raise UsageError(f"ParquetFiles(columns=) names '{twice[0]}' twice; name each column once")
        self._batch_rows = batch_rows
        self._files: tuple[str, ...] | None = None
        self._found_objects: tuple[StoredFile, ...] = ()
        self._schema: pa.Schema | None = None

    def __repr__(self) -> str:
        return f"ParquetFiles({self._objects or self._selection})"

    def schema(self) -> pa.Schema:
        """Find the files and return their schema in canonical types.

        Raises:
            UsageError: there is no file, a file is not Parquet, or the files have different schemas.
        """
        files, schemas = self._with_schemas()
        first = schemas[0]
        for path, other in zip(files[1:], schemas[1:], strict=True):
            if not other.equals(first):
                raise UsageError(
                    f"{path} has columns ({schema_text(other)}), but {files[0]} has ({schema_text(first)}); "
                    "read files of one schema at a time"
                )
        self._schema = first
        return first

    def read_as(self, schema: pa.Schema) -> ParquetFiles:
        """Find the files, to be read in the types of ``schema``: to Parquet a duration is a number."""
        self.schema()
        self._schema = schema
        return self

    def project(self, columns: Sequence[str]) -> tuple[Source, pa.Schema] | None:
        assert self._schema is not None
        kept = pa.schema([field for field in self._schema if field.name in columns])
        if not len(kept):  # records are to be counted
            return None
        projected = copy.copy(self)
        projected._columns, projected._schema = kept.names, kept
        return projected, kept

    def _with_schemas(self) -> tuple[Sequence[str], Sequence[pa.Schema]]:
        """Find the files, at least one, and return them with their schemas."""
        where, opened = self._objects or self._selection, pafs.LocalFileSystem().open_input_file
        if self._objects is not None:
            found = self._found_objects = self._objects.find_at_start(self._object_options)
            self._files = tuple(file.path for file in found)
        else:
            assert self._selection is not None
            self._files = tuple(self._selection.find())
        if not self._files:
            raise UsageError(f"there is no Parquet file at {where}, so its columns are not known; put one there")
        if self._objects is None:
            return self._files, [self._schema_of(path, opened) for path in self._files]
        fetcher = Fetcher()
        try:
            asked = [
                fetcher.begin(self._schema_of, file.path, partial(_opened_object, file, fetcher))
                for file in self._found_objects
            ]
            return self._files, [each.result() for each in asked]
        finally:
            fetcher.close()

    def _schema_of(self, path: str, opened: Callable[[str], pa.NativeFile]) -> pa.Schema:
        try:
            with opened(path) as source, pq.ParquetFile(source) as file:
                given = _with_zones(file)
            refuse_twice(given, path)
            schema = canonical_schema(given)
        except _FAILURES as error:
            raise UsageError(f"{path} cannot be read as Parquet: {error}") from error
        except (NotFound, Replaced) as error:
            raise UsageError(f"{path} was deleted or replaced while it was looked at; start again") from error
        if self._columns is None:
            return schema
        for name in self._columns:
            if name not in schema.names:
                raise UsageError(f"{path} has no column '{name}', only ({schema_text(schema)})")
        return pa.schema([schema.field(name) for name in self._columns])

    def identity(self) -> str:
        """Positions are kept by path or URL: they mean the same whatever else is read."""
        return f"{Form.PARQUET.value}, version 1{'' if self._objects is None else ', by URL'}"

    def locations(self) -> tuple[Location, ...]:
        selection = self._objects or self._selection
        assert selection is not None
        return selection.locations()

    def how_to_end(self) -> str | None:
        return "read the files that are there with follow=False" if self._object_options.follow else None

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of every ``parallelism``-th file of the list that ``schema`` found.

        Files of the list that were read may be gone by now.
        """
        schema = self._schema if self._schema is not None else self.schema()
        assert self._files is not None
        if self._objects is not None:
            return self._open_objects(context, self._objects, schema)
        assert self._selection is not None
        positions = self._selection.carried_over(context.positions or {}, context.relocation, self._files)
        context = replace(context, positions=dict(positions))
        return ParquetReader(context, self._files, schema, self._batch_rows)

    def _open_objects(self, context: SourceContext, selection: ObjectSelection, schema: pa.Schema) -> SourceReader:
        rows, options = self._batch_rows, self._object_options

        def opened(file: StoredFile, place: bytes, fetcher: Fetcher) -> ParquetOfObject:
            return ParquetOfObject(file, place, fetcher, schema, rows)

        found = self._found_objects
        return ObjectReader(context, selection, found, schema, options, selection.find, opened, ACTIVE_FILES_MAX, None)


@dataclass(frozen=True, slots=True)
class ParquetPosition:
    """Where reading of one file continues.

    Attributes:
        group, row: the row group being read, and the rows delivered of it.
        size_bytes, footer_digest: fingerprint of the file; 0: not known.
        number: when the file was first listed; None: not known.
    """

    is_finished: bool = False
    group: int = 0
    row: int = 0
    size_bytes: int = 0
    footer_digest: int = 0
    number: int | None = None

    def encode(self) -> bytes:
        """Return the position as fixed-size bytes."""
        number = 0 if self.number is None else self.number + 1
        return _POSITION.pack(
            _VERSION, self.is_finished, number, self.group, self.row, self.size_bytes, self.footer_digest
        )

    @staticmethod
    def decode(path: str, encoded: bytes) -> ParquetPosition:
        """Return the position that ``encode`` made of the file ``path``.

        Raises:
            CorruptionError: it is not one, or of another version.
        """
        if len(encoded) != _POSITION.size or encoded[0] != _VERSION:
            expected = f"{_POSITION.size} bytes, version {_VERSION}"
            raise CorruptionError(f"position of {path}", 0, expected, f"{encoded[:16].hex()} ({len(encoded)} bytes)")
        _, finished, number, group, row, size_bytes, digest = _POSITION.unpack(encoded)
        return ParquetPosition(finished, group, row, size_bytes, digest, number - 1 if number else None)


def fingerprint(file: pa.NativeFile) -> tuple[int, int]:
    """Return size and digest of the footer of an open file.

    The footer says where every column chunk is and how long: other data has another one, but for the rarest case.
    """
    size = file.size()
    end = file.read_at(min(_MAGIC_BYTES, size), max(size - _MAGIC_BYTES, 0))
    length = min(int.from_bytes(end[:4], "little") + _MAGIC_BYTES, size)
    return size, xxhash.xxh3_64_intdigest(file.read_at(length, size - length))


ROWS_PER_VALUE_MIN = 2
"""Text with fewer rows for each of its values is not read as it is encoded."""


class TextEncoding:
    """Which text columns are read as they are encoded in the files of one reader: those that had few values so far.

    In a column of many values, some are not encoded in the file. To number these takes longer than to read them.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._names = [field.name for field in schema if pa.types.is_large_string(field.type)]

    def names(self, group: pq.RowGroupMetaData) -> tuple[str, ...]:
        """Return the names of those in a row group."""
        columns = [group.column(at) for at in range(group.num_columns)]
        encoded = {one.path_in_schema for one in columns if one.has_dictionary_page}
        return tuple(name for name in self._names if name in encoded)

    def fits(self, batch: pa.RecordBatch, names: Sequence[str], rows: int) -> bool:
        """Whether each column ``names`` of a batch has few values for ``rows``; those that have more are left out."""
        found = [name for name in names if len(batch.column(name).dictionary) * ROWS_PER_VALUE_MIN > rows]
        self._names = [name for name in self._names if name not in found]
        return not found


class _File:
    """One file being read."""

    def __init__(
        self,
        path: str,
        position: ParquetPosition,
        opened: Callable[[str], pa.NativeFile],
        *,
        is_afar: bool = False,
    ) -> None:
        """``is_afar``: each read takes long, so that a row group is read at once."""
        self.path = path
        self._open, self._is_afar = opened, is_afar
        self.encoding: TextEncoding | None = None
        """How text is read, from the next row group on; None: without its encoding."""
        self.group, self.row, self.is_finished = position.group, position.row, position.is_finished
        self._restored = position
        self._known = (position.size_bytes, position.footer_digest)
        self._batches: Iterator[tuple[int, int, pa.RecordBatch]] | None = None
        self._rows_before: list[int] = []
        """Of each row group, how many rows lie in front of it, and the number of all; empty before it was opened."""

    def progress(self) -> SplitPosition | None:
        """Return how many rows were delivered; None before it was opened."""
        if not self._rows_before:
            return None
        return SplitPosition(self._rows_before[self.group] + self.row, self._rows_before[-1])

    def position(self) -> bytes:
        size_bytes, digest = self._known
        number = self._restored.number
        return ParquetPosition(self.is_finished, self.group, self.row, size_bytes, digest, number).encode()

    def check(self) -> None:
        """Refuse a file that is not the one that was read; one that was read and removed is none of ours.

        Raises:
            UsageError: the file was changed or replaced.
            StorageError: it cannot be read.
        """
        try:
            with self._open(self.path) as opened:
                self._compare(opened)
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise StorageError("read", self.path, str(error)) from error

    def _compare(self, opened: pa.NativeFile) -> None:
        found = fingerprint(opened)
        # size 0: nothing was read of it yet, so whatever is there is the file
        if self._known[0] and found != self._known:
            raise UsageError(
                f"{self.path} was changed or replaced after reading it had begun: it had {self._known[0]} bytes and "
                f"has {found[0]}, or another footer; add new data as new files, put the file back, or run the pipeline "
                "under a new name"
            )
        self._known = found

    def next(self, schema: pa.Schema, batch_rows: int) -> pa.RecordBatch | None:
        """Return the next records, or None at the end."""
        if self._batches is None:
            self._batches = self._read(schema, batch_rows)
        try:
            found = next(self._batches, None)
        except _FAILURES as error:
            raise StorageError("read", self.path, str(error)) from error
        if found is None:
            self.is_finished = True
            return None
        assert found[:2] > (self.group, self.row), "rows of a file are never read twice"
        self.group, self.row, batch = found
        return batch

    def _read(self, schema: pa.Schema, batch_rows: int) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Yield (group, row after the batch, batch) from the position on, of the very file that was compared."""
        first_group, skip = self.group, self.row
        with self._open(self.path) as opened:
            self._compare(opened)
            file = self._opened(opened)
            names, metadata = schema.names, file.metadata
            exact = _with_nanoseconds(file, opened, names)
            rows = [metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._rows_before = [0, *accumulate(rows)]
            files: dict[tuple[str, ...], pq.ParquetFile] = {(): file}
            for group in range(first_group, file.num_row_groups):
                row, is_read = skip if group == first_group else 0, False
                while not is_read:
                    is_read, end = True, 0
                    encoding = self.encoding
                    encoded = () if encoding is None else encoding.names(metadata.row_group(group))
                    if encoded not in files:
                        files[encoded] = self._opened(opened, encoded, metadata)
                    finer = None if exact is None else exact.iter_batches(batch_rows, [group], names, use_threads=False)
                    for batch in files[encoded].iter_batches(batch_rows, [group], names, use_threads=False):
                        end += batch.num_rows
                        if encoding is not None and not encoding.fits(batch, encoded, end):
                            is_read = False  # the group is read again, without what was left out
                            break
                        batch.validate(full=True)
                        if finer is not None:
                            _refuse_cut(batch, next(finer), self.path)
                        rest = end - row
                        if rest > 0:
                            row = end
                            there = with_durations(batch.slice(max(batch.num_rows - rest, 0)), schema)
                            yield group, row, _carried(there, schema, encoded, self.path)

    def _opened(
        self, opened: pa.NativeFile, encoded: Sequence[str] = (), metadata: pq.FileMetaData | None = None
    ) -> pq.ParquetFile:
        return pq.ParquetFile(
            opened,
            metadata=metadata,
            read_dictionary=list(encoded),
            coerce_int96_timestamp_unit="us",  # nanoseconds end in the year 2262
            pre_buffer=self._is_afar,
        )


def _carried(batch: pa.RecordBatch, schema: pa.Schema, encoded: Sequence[str], path: str) -> pa.RecordBatch:
    """Return ``batch`` in the types of ``schema``, columns ``encoded`` as dictionaries of these.

    Raises:
        UsageError: a value would become another one.
    """
    if not encoded:
        return carried(batch, schema, path)
    others = pa.schema([field for field in schema if field.name not in encoded])
    columns = dict(zip(others.names, carried(batch.select(others.names), others, path).columns, strict=True))
    columns |= {name: encoded_text(batch.column(name)) for name in encoded}
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], names=schema.names)


class ParquetReader(FailStopReader):
    """Reads the files of one subtask, a few of them in turn."""

    def __init__(
        self,
        context: SourceContext,
        files: Sequence[str],
        schema: pa.Schema,
        batch_rows: int,
    ) -> None:
        self._schema, self._batch_rows = schema, batch_rows
        known = {path: ParquetPosition.decode(path, found) for path, found in (context.positions or {}).items()}
        numbers = numbered_files(files, {path: position.number for path, position in known.items()})
        opened = pafs.LocalFileSystem().open_input_file
        self._files = [
            _File(path, replace(known.get(path, ParquetPosition()), number=number), opened)
            for path, number in sorted(numbers.items())
            if owner_of_split(number, context.parallelism) == context.subtask_index
        ]
        for file in self._files:
            # a file that was read and then changed would lose its new rows in silence
            if file.is_finished:
                file.check()
        self._later = deque(file for file in self._files if not file.is_finished)
        self._active: deque[_File] = deque()
        self._paused: frozenset[str] = frozenset()

    def keep_text_encoded(self) -> None:
        encoding = TextEncoding(self._schema)
        for file in self._files:
            file.encoding = encoding

    def pause(self, splits: Collection[str]) -> None:
        self._paused = frozenset(splits)

    def is_behind(self, split: str) -> bool:
        """See ``PausableReader``: files that wait for their turn hold no others up."""
        return False

    def splits(self) -> Sequence[str]:
        """Return the files not yet read to their ends."""
        return [file.path for file in (*self._active, *self._later)]

    def _has_ended(self) -> bool:
        """Whether all files were read to their ends."""
        return not self._active and not self._later

    def _positions(self) -> dict[str, bytes]:
        """Return a position for each file owned, finished ones too."""
        return {file.path: file.position() for file in self._files}

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: of files that were opened, in rows."""
        return {file.path: found for file in self._active if (found := file.progress()) is not None}

    def wakeup_ms(self) -> int:
        """There is always something to read."""
        return 0

    def close(self) -> None:
        """Close the files."""
        self._active.clear()
        self._later.clear()

    def _poll(self) -> SourceBatch | None:
        """Return the next records of one file."""
        while self._later and len(self._active) < ACTIVE_FILES_MAX:
            self._active.append(self._later.popleft())
        file = next((file for file in self._active if file.path not in self._paused), None)
        if file is None:
            return None
        self._active.remove(file)
        batch = file.next(self._schema, self._batch_rows)
        if batch is None:
            return SourceBatch(file.path, pa.RecordBatch.from_pylist([], schema=self._schema), None, True)
        self._active.append(file)
        return SourceBatch(file.path, batch)


class ParquetOfObject:
    """A Parquet file by URL. The batch after the one returned is read meanwhile (see ``OpenObject``)."""

    def __init__(self, file: StoredFile, place: bytes, fetcher: Fetcher, schema: pa.Schema, batch_rows: int) -> None:
        position = ParquetPosition.decode(file.path, place) if place else ParquetPosition()
        self._file = _File(file.path, position, partial(_opened_object, file, fetcher), is_afar=True)
        self._schema, self._batch_rows, self._fetcher = schema, batch_rows, fetcher
        self.place, self._progress = position.encode(), self._file.progress()
        self.is_finished = False
        self._next = fetcher.begin(self._step)

    def _step(self) -> tuple[pa.RecordBatch | None, bytes, SplitPosition | None]:
        batch = self._file.next(self._schema, self._batch_rows)
        return batch, self._file.position(), self._file.progress()

    def missing(self) -> list[Future[Any]]:
        return [] if self._next.done() else [self._next]

    def next(self) -> SourceBatch | None:
        batch, self.place, self._progress = self._next.result()
        if batch is None:
            self.is_finished = True
            return None
        self._next = self._fetcher.begin(self._step)
        return SourceBatch(self._file.path, batch)

    def progress(self) -> SplitPosition | None:
        return self._progress


def _opened_object(file: StoredFile, fetcher: Fetcher, path: str) -> pa.NativeFile:
    return pa.PythonFile(ObjectStream(file, fetcher), mode="r")


def _with_nanoseconds(file: pq.ParquetFile, opened: pa.NativeFile, names: Sequence[str]) -> pq.ParquetFile | None:
    """Return a reader of the same file with INT96 in nanoseconds; None: no column of ``names`` may have any.

    Spark has microseconds, and writes them as INT96.
    """
    columns = [file.schema.column(at) for at in range(len(file.schema))]
    is_read = any(one.physical_type == "INT96" and one.path.split(".")[0] in names for one in columns)
    return pq.ParquetFile(opened) if is_read and _SPARK not in (file.metadata.metadata or {}) else None


_SPARK = b"org.apache.spark.version"
_RANGE_US = (2**63 - 1) // 1_000
"""So far from 1970 may times in nanoseconds be."""


def _refuse_cut(batch: pa.RecordBatch, finer: pa.RecordBatch, path: str) -> None:
    """Refuse times that are finer than a microsecond: as INT96 they would be cut.

    Raises:
        UsageError: a column has one.
    """
    for name in batch.schema.names:
        for coarse, exact in zip(_moments(batch.column(name)), _moments(finer.column(name)), strict=True):
            if exact.type.unit != "ns" or coarse.type.unit != "us":
                continue
            number, nanos = coarse.cast(pa.int64()), exact.cast(pa.int64())
            is_cut = pc.not_equal(pc.multiply(number, 1_000), nanos)  # wraps where nanoseconds do
            if pc.any(pc.and_(is_cut, pc.less(pc.abs(number), _RANGE_US))).as_py():
                raise UsageError(
                    f"{path}: column '{name}' has a time with a part of a microsecond, which columns do not have; "
                    "round or cast the column before"
                )


def _moments(column: pa.Array) -> Iterator[pa.Array]:
    """Yield the timestamps in a column."""
    if pa.types.is_timestamp(column.type):
        yield column
    elif pa.types.is_map(column.type):
        yield from _moments(column.keys)
        yield from _moments(column.items)
    elif pa.types.is_struct(column.type):
        for at in range(column.type.num_fields):
            yield from _moments(column.field(at))
    elif column.type.num_fields:
        yield from _moments(column.values)


def _with_zones(file: pq.ParquetFile) -> pa.Schema:
    """Return the columns of a file, with those moments that Arrow does not tell from local times.

    Spark writes its ``TIMESTAMP`` as INT96, which are always in UTC, unless it is configured otherwise.
    """
    physical = iter([file.schema.column(at).physical_type for at in range(len(file.schema))])
    return pa.schema([field.with_type(_zoned(field.type, physical)) for field in file.schema_arrow])


def _zoned(dtype: pa.DataType, physical: Iterator[str]) -> pa.DataType:
    """Return a type with its leaves stored as ``physical`` says, in their order."""
    if pa.types.is_struct(dtype):
        return pa.struct([field.with_type(_zoned(field.type, physical)) for field in dtype])
    if pa.types.is_map(dtype):
        return pa.map_(_zoned(dtype.key_type, physical), _zoned(dtype.item_type, physical))
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        return pa.list_(_zoned(dtype.value_type, physical))
    return pa.timestamp("us", tz="UTC") if next(physical) == "INT96" else dtype
