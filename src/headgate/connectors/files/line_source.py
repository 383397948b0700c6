"""Text, JSON-lines and CSV files as a source; a position is a file and a byte offset.

Counterpart: ``lines.LineFile`` reads one file, ``decode`` makes records of lines, ``listing`` finds files.
Source: docs/spec/connectors.md. Never writes, and never delivers a line that may still grow.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from headgate.connectors.base import FailStopReader, Source, SourceBatch, SourceContext, SourceReader, SplitPosition
from headgate.connectors.files.csv_decoder import CsvFileDecoder, CsvOptions
from headgate.connectors.files.file_tracker import FileTracker
from headgate.connectors.files.filesystem import CODECS, COMPRESSIONS, INFER, LOCAL, FileSystem
from headgate.connectors.files.line_decoders import (
    Decoded,
    Decoder,
    JsonDecoder,
    TextDecoder,
    TranscodingDecoder,
    checked_encoding,
)
from headgate.connectors.files.line_file import LINE_BYTES_MAX, FileMovedError, FileOptions, LineFile, RefusedLine
from headgate.connectors.files.lines import CsvForm, Lines
from headgate.connectors.files.object_reader import Fetcher, LinesOfObject, ObjectReader
from headgate.connectors.files.selection import (
    COMPRESSED,
    PATTERN_DEFAULT,
    FileSelection,
    ObjectSelection,
    Paths,
    Replacement,
    object_options,
    select_files,
    select_objects,
)
from headgate.errors import UsageError
from headgate.model.config import Duration, check_switches, duration_ms
from headgate.model.lineage import Location
from headgate.model.state_schema import Form
from headgate.operators.schemas import SchemaLike, arrow_schema
from headgate.operators.user_functions import bad_records
from headgate.storage.base import StoredFile

PATH_COLUMN = "path"
BYTE_COLUMN = "byte"

STEPS_MAX = 64
"""Files looked at in one ``poll``, so that many idle files do not hold up the mailbox."""


Compression: TypeAlias = Literal["infer", "none", "gzip", "zstd", "bz2"]


class LineOptions(TypedDict, total=False):
    """The options that all sources of lines have in common, such as ``TextFiles`` and ``JsonLines``.

    Attributes:
        follow: True keeps waiting for more lines and more files; the source then never ends. Default: False.
        pattern: which files below a directory to read, as a glob relative to it. Default: ``"**/*"``.
        encoding: of the files, by Python's name, such as ``"latin-1"`` or ``"cp1252"``; none of several bytes for an
            ASCII character, such as UTF-16. Default: ``"utf-8"``, which is read faster than others.
        include_path: True adds the columns ``path`` and ``byte`` (the offset of the line). Default: False.
        poll_interval: how often followed files are checked for more lines. Default: ``"20ms"``.
        discovery_interval: how often followed directories are checked for new files. Default: ``"1s"``, of URLs
            ``"10s"``.
        line_bytes_max: lines with more bytes, line feed excluded, are bad records. Default: 8 MiB.
        compression: ``"gzip"``, ``"zstd"`` or ``"bz2"``: that of all files; ``"none"``. Default: ``"infer"``, by the
            end of each name: ``.gz``, ``.zst`` or ``.bz2``, or ``.GZ``. Compressed files cannot be
            followed, except by URL.
        replaced: of URLs: ``"read"`` reads what replaced an object under its name, from its start. Default: ``"fail"``.
        max_age: of followed URLs: an object that is so much older than the newest one counts as read if it was not seen
            before. Default: ``"7d"``.
    """

    follow: bool
    pattern: str
    encoding: str
    include_path: bool
    poll_interval: Duration
    discovery_interval: Duration
    line_bytes_max: int
    compression: Compression
    replaced: Replacement
    max_age: Duration


def file_options(
    *,
    follow: bool = False,
    pattern: str = PATTERN_DEFAULT,
    encoding: str = "utf-8",
    include_path: bool = False,
    poll_interval: Duration = "20ms",
    discovery_interval: Duration = "1s",
    line_bytes_max: int = LINE_BYTES_MAX,
    compression: Compression = "infer",
) -> FileOptions:
    """Return ``LineOptions`` as one value, with the defaults.

    Raises:
        UsageError: the encoding or the compression is not one that is read, an interval is not a duration, or a limit
            is not positive.
    """
    check_switches("", follow=follow, include_path=include_path)
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression={compression!r} must be one of {', '.join(COMPRESSIONS)}")
    if not isinstance(line_bytes_max, int) or line_bytes_max < 1:
        raise UsageError(f"line_bytes_max must be a number of bytes of at least 1, but is {line_bytes_max!r}")
    poll_ms = max(duration_ms(poll_interval, "poll_interval"), 1)
    discovery_ms = duration_ms(discovery_interval, "discovery_interval")
    return FileOptions(
        follow,
        pattern,
        include_path,
        poll_ms,
        discovery_ms,
        line_bytes_max,
        compression=compression,
        encoding=checked_encoding(encoding),
    )


class LineSource(Source):
    """Base class of sources of files with lines. What is special of a format is its decoder.

    Paths are made absolute where it is constructed, so that workers find the same files.
    """

    system: FileSystem = LOCAL
    """Where the files are; the simulator has its own."""

    def __init__(self, paths: Paths, options: LineOptions) -> None:
        follow = options.get("follow", False)
        self._objects = select_objects(paths, options.get("pattern", PATTERN_DEFAULT))
        """The selection of URLs; None: the paths are local."""
        self._object_options = object_options(
            self._objects,
            follow=follow,
            discovery_interval=options.get("discovery_interval"),
            replaced=options.get("replaced"),
            max_age=options.get("max_age"),
        )
        of_files: Any = {name: value for name, value in options.items() if name not in ("replaced", "max_age")}
        self._options = file_options(**of_files)
        self._found_objects: tuple[StoredFile, ...] | None = None
        self._files: tuple[str, ...] | None = None
        if self._objects is not None:
            self._options = replace(self._options, follow=False)  # objects do not grow
            return
        self._selection = select_files(paths, self._options.pattern, self.system)
        compressed = [
            each for each in (*self._selection.roots, self._options.pattern) if each.lower().endswith(COMPRESSED)
        ]
        if follow and (compressed or self._options.compression in CODECS.values()):
            where = f"{compressed[0]}: " if compressed else ""
            raise UsageError(f"{where}compressed files cannot be followed; read them with follow=False")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._objects or self._selection})"

    def _decoder(self) -> Decoder:
        found = self._decoder_of_text()
        return TranscodingDecoder(found, self._options.encoding) if self._options.encoding else found

    def _decoder_of_text(self) -> Decoder:
        raise NotImplementedError

    def schema(self) -> pa.Schema:
        """Return the records' schema; find the files.

        Raises:
            UsageError: a path does not exist or cannot be read, or there is nothing to read and none is awaited.
        """
        if self._objects is not None:
            self._found_objects = self._objects.find_at_start(self._object_options, self._reads)
        else:
            self._files = self._found()
        return _with_place(self._decoder().schema, self._options.include_path)

    @property
    def _reads(self) -> tuple[str, ...]:
        return tuple(CODECS) if self._options.compression == INFER else COMPRESSED

    def _found(self) -> tuple[str, ...]:
        reads = self._reads
        files = tuple(self._selection.find(skips_compressed=self._options.follow, reads=reads))
        if not files and not self._options.follow:
            raise UsageError(f"there is no file at {self._selection}; correct the path, or use follow=True to wait")
        return files

    def identity(self) -> str:
        """Positions are kept by absolute path or URL: they mean the same whatever else is read."""
        return f"{Form.LINES.value}, version 1{'' if self._objects is None else ', by URL'}"

    def locations(self) -> tuple[Location, ...]:
        return (self._objects or self._selection).locations()

    def how_to_end(self) -> str | None:
        is_endless = self._options.follow or self._object_options.follow
        return "read the files that are there with follow=False" if is_endless else None

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of the files that this subtask owns.

        A fixed list of files is the one that ``schema`` found in the driver, the same for all subtasks.
        """
        if self._objects is not None:
            return self._open_objects(context, self._objects)
        files = self._files if self._files is not None else self._found()
        return FileReader(context, self._selection, files, self._options, self._decoder())

    def _open_objects(self, context: SourceContext, selection: ObjectSelection) -> SourceReader:
        files = self._found_objects
        if files is None:
            files = selection.find_at_start(self._object_options, self._reads)
        batches, options = LineBatches(context.node, self._options, self._decoder()), self._options

        def opened(file: StoredFile, place: bytes, fetcher: Fetcher) -> LinesOfObject:
            return LinesOfObject(file, place, options, fetcher, batches.of)

        find = partial(selection.find, self._reads)
        return ObjectReader(context, selection, files, batches.schema, self._object_options, find, opened)


class _FieldSource(LineSource):
    """Base class of sources of lines with fields."""

    _schema: pa.Schema
    _required: tuple[str, ...]

    def project(self, columns: Sequence[str]) -> tuple[Source, pa.Schema] | None:
        """See ``Source``. Required fields are read all the same."""
        kept = [f for f in self._schema if f.name in (*columns, *self._required) or not f.nullable]
        if not kept:  # records are to be counted
            return None
        projected = copy.copy(self)
        projected._schema = pa.schema(kept)
        return projected, _with_place(projected._decoder().schema, self._options.include_path)


class TextFiles(LineSource):
    """Reads text files; each line is a record with one string column.

    ``TextFiles("logs/", follow=True)`` follows a directory that grows. A line that is not in the encoding or is too
    long is a bad record.
    """

    def __init__(self, paths: Paths, *, line_column: str = "line", **options: Unpack[LineOptions]) -> None:
        """Configure.

        Args:
            paths: a file, a glob, a directory, or a list of these.
            line_column: the name of the column that holds the line.
            **options: each by its name, as ``LineOptions`` describes them.

        Raises:
            UsageError: the encoding is not supported, an interval is not a duration, or a limit is not positive.
        """
        super().__init__(paths, options)
        self._column = line_column

    def _decoder_of_text(self) -> Decoder:
        return TextDecoder(self._column)


class JsonLines(_FieldSource):
    """Reads files with one JSON object per line.

    Unknown fields are ignored, and missing fields are null. A line is a bad record if it is not an object, has a value
    of the wrong type, or lacks a required field. Timestamps are ISO 8601 text and are converted to UTC.
    A field that the pipeline does not use is not read, so its type is not checked, unless bad records are diverted.
    """

    def __init__(
        self,
        paths: Paths,
        schema: SchemaLike,
        *,
        required: Sequence[str] = (),
        **options: Unpack[LineOptions],
    ) -> None:
        """Configure.

        Args:
            paths: a file, a glob, a directory, or a list of these.
            schema: an Arrow or Polars schema, or a dict from names to Python, Polars or Arrow types. Arrow fields that
                are not nullable are required.
            required: names of further fields that must be present and not null.
            **options: each by its name, as ``LineOptions`` describes them.

        Raises:
            UsageError: a type is unknown, the encoding is not supported, an interval is not a duration, or a limit is
                not positive.
        """
        super().__init__(paths, options)
        self._schema = arrow_schema(schema)
        self._required = tuple(required)

    def _decoder_of_text(self) -> Decoder:
        return JsonDecoder(self._schema, self._required)


class CsvFiles(_FieldSource):
    """Reads files of CSV; each record has the columns of a schema.

    The first record of each file names its columns: their order may differ from file to file, unknown ones are ignored,
    and missing ones are null. Without headers, the columns are those of the schema in their order. A record may have
    line ends within quotes. A record is a bad record if it has too few or too many fields, has a value of the wrong
    type, or lacks a required one. Timestamps are ISO 8601 text; with an offset they are converted to UTC.
    With headers, a column that the pipeline does not use is not read, so its values are not checked, unless bad records
    are diverted.
    """

    def __init__(
        self,
        paths: Paths,
        schema: SchemaLike,
        *,
        header: bool = True,
        delimiter: str = ",",
        quote: str | None = '"',
        null_values: Sequence[str] = ("",),
        timestamp_formats: Sequence[str] = (),
        decimal_point: str = ".",
        required: Sequence[str] = (),
        **options: Unpack[LineOptions],
    ) -> None:
        """Configure.

        Args:
            paths: a file, a glob, a directory, or a list of these.
            schema: an Arrow or Polars schema, or a dict from names to Python, Polars or Arrow types. Arrow fields that
                are not nullable are required.
            header: whether each file begins with a record that names its columns.
            delimiter: the character between fields, such as ``";"`` or ``"\\t"``.
            quote: the character around fields that have delimiters, line ends or quotes in them, which are doubled
                there; None: quotes are text.
            null_values: what stands for null outside of quotes. By default an empty field is null, and ``""`` in quotes
                is an empty text.
            timestamp_formats: formats of times besides ISO 8601, as ``strptime`` has them.
            decimal_point: of numbers.
            required: names of further fields that must be present and not null.
            **options: each by its name, as ``LineOptions`` describes them.

        Raises:
            UsageError: a type is unknown or no type of CSV, a character is not a single one of ASCII, the encoding is
                not supported, an interval is not a duration, or a limit is not positive.
        """
        super().__init__(paths, options)
        check_switches("CsvFiles: ", header=header)
        for name, given in (("delimiter", delimiter), ("quote", quote), ("decimal_point", decimal_point)):
            is_character = isinstance(given, str) and len(given) == 1 and given.isascii() and given not in "\r\n"
            if not is_character and not (name == "quote" and given is None):
                raise UsageError(f"CsvFiles({name}={given!r}) must be one character of ASCII, and no line end")
        if delimiter in (quote, decimal_point) or quote == decimal_point:
            raise UsageError("CsvFiles: delimiter, quote and decimal_point must differ")
        if isinstance(null_values, str) or isinstance(timestamp_formats, str):
            raise UsageError("CsvFiles: null_values and timestamp_formats are lists of texts")
        named = next((form for form in timestamp_formats if "%Z" in form), None)
        if named is not None:
            raise UsageError(
                f"CsvFiles(timestamp_formats=) has {named!r}, and names of zones are not read: leave %Z out, or read "
                "offsets with %z"
            )
        self._schema, self._required = arrow_schema(schema), tuple(required)
        self._csv = CsvOptions(delimiter, quote, tuple(null_values), tuple(timestamp_formats), decimal_point)
        form = CsvForm(ord(delimiter), None if quote is None else ord(quote), header)
        self._options = replace(self._options, csv=form)
        self._decoder()

    def identity(self) -> str:
        """Positions are those of records, which other lines may be within."""
        return f"{super().identity()}, CSV"

    def project(self, columns: Sequence[str]) -> tuple[Source, pa.Schema] | None:
        """See ``Source``. Required fields are read all the same; without headers all are, for their places."""
        form = self._options.csv
        return super().project(columns) if form is not None and form.has_header else None

    def _decoder_of_text(self) -> Decoder:
        form = self._options.csv
        assert form is not None
        return CsvFileDecoder(self._schema, self._csv, self._required, has_header=form.has_header)


class FileReader(FailStopReader):
    """Reads the files of one subtask in turn, a block each."""

    def __init__(
        self,
        context: SourceContext,
        selection: FileSelection,
        files: Sequence[str],
        options: FileOptions,
        decoder: Decoder,
    ) -> None:
        self._context = context
        self._options, self._batches = options, LineBatches(context.node, options, decoder)
        self._schema = self._batches.schema
        self._tracker = FileTracker(context, selection, options)
        self._active: deque[LineFile] = deque()
        self._waiting: list[LineFile] = []
        self._ended: set[int] = set()
        self._paused: frozenset[str] = frozenset()
        self._check_at_ms = self._discover_at_ms = context.clock_ms()
        positions = selection.carried_over(context.positions or {}, context.relocation, files)
        for file in self._tracker.open(files, positions):
            if file.is_finished and not options.follow and file.has_grown():
                file.reopen()
            if file.is_finished:
                self._ended.add(id(file))
            else:
                self._active.append(file)

    def splits(self) -> Sequence[str]:
        """Return the files that may deliver more; one that was rotated away and read to its end is not expected to."""
        return [
            path
            for path, file in self._tracker.files.items()
            if id(file) not in self._ended and not (file.is_at_end and self._tracker.is_rotated(path))
        ]

    def pause(self, splits: Collection[str]) -> None:
        self._paused = frozenset(splits)

    def is_behind(self, split: str) -> bool:
        """See ``PausableReader``: a step of a file may bring it forward without a whole line."""
        file = self._tracker.files.get(split)
        return file is not None and id(file) not in self._ended and not file.is_at_end

    def _has_ended(self) -> bool:
        """Whether all files of a fixed list were read to their ends."""
        return not self._options.follow and not self._active and not self._waiting

    def _positions(self) -> dict[str, bytes]:
        """Return a position for each file owned, finished ones too."""
        return self._tracker.positions()

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: bytes, with the size that a file had when it was last read."""
        return {path: file.progress() for path, file in self._tracker.files.items() if id(file) not in self._ended}

    def wakeup_ms(self) -> int:
        """Return 0 while there is something to read."""
        return 0 if self._active else self._options.poll_ms

    def close(self) -> None:
        """Forget the files; none is open."""
        self._active.clear()
        self._waiting.clear()

    def _poll(self) -> SourceBatch | None:
        """Return the lines of one block of one file."""
        if self._tracker.losses:
            return self._lost(self._tracker.losses.pop())
        self._look_around()
        for _ in range(min(STEPS_MAX, len(self._active))):
            file = self._active.popleft()
            if file.path in self._paused and not file.has_lines:  # one block in memory at a time
                self._active.append(file)
                continue
            if self._tracker.files.get(file.path) is not file:  # another file has its name now
                continue
            if file.is_finished:  # its last lines were returned by an earlier poll
                self._ended.add(id(file))
                return SourceBatch(file.path, _empty(self._schema), is_split_finished=True)
            try:
                lines = file.step()
            except FileMovedError as moved:
                self._relocate(file, moved)
                if self._tracker.losses:
                    return self._lost(self._tracker.losses.pop())
                continue
            if file.is_at_end and not file.is_finished:
                self._waiting.append(file)
            elif file.has_lines:  # one block in memory at a time
                self._active.appendleft(file)
            else:
                self._active.append(file)
            if lines is not None:
                return self._batches.of(file.path, lines)
        return None

    def _relocate(self, file: LineFile, moved: FileMovedError) -> None:
        """Go on with a file that was renamed, or end with one that is gone; look for new ones at once."""
        known = {id(each) for each in self._tracker.files.values()}
        if not self._tracker.relocate(file, moved):
            self._waiting.append(file)
            return
        self._active.append(file)
        self._active.extend(each for each in self._tracker.files.values() if id(each) not in known)
        self._discover_at_ms = self._context.clock_ms()

    def _lost(self, file: LineFile) -> SourceBatch:
        problem = "it was replaced between two looks; lines that were appended to it last may not have been read"
        bad = bad_records(self._context.node, [problem], [_place(file.path, file.lines + 1, file.offset)], [""])
        return SourceBatch(file.path, _empty(self._schema), bad)

    def _look_around(self) -> None:
        if not self._options.follow:
            return
        now_ms = self._context.clock_ms()
        if now_ms >= self._check_at_ms:
            self._check_at_ms = now_ms + self._options.poll_ms
            self._active.extend(self._waiting)
            self._waiting.clear()
        if now_ms >= self._discover_at_ms:
            self._discover_at_ms = now_ms + self._options.discovery_ms
            self._active.extend(self._tracker.discover())


class LineBatches:
    """Makes batches of the lines of one subtask's files."""

    def __init__(self, node: str, options: FileOptions, decoder: Decoder) -> None:
        self._node, self._options, self._decoder = node, options, decoder
        self.schema = self._schema = _with_place(decoder.schema, options.include_path)

    def of(self, path: str, lines: Lines | RefusedLine) -> SourceBatch:
        """Return the records of some lines, and those that are none."""
        node = self._node
        if isinstance(lines, RefusedLine):
            text = lines.head.decode("utf-8", "backslashreplace")
            bad = bad_records(node, [lines.problem], [_place(path, lines.number, lines.start)], [text])
            return SourceBatch(path, _empty(self._schema), bad)
        decoded = self._decoder.decode(lines)
        refused = decoded.refused
        bad = None
        if refused.problems:
            places = [_place(path, lines.number_at(start), start) for start in refused.starts]
            bad = bad_records(node, refused.problems, places, refused.texts)
        return SourceBatch(path, self._placed(path, decoded), bad)

    def _placed(self, path: str, decoded: Decoded) -> pa.RecordBatch:
        if not self._options.include_path:
            return decoded.batch
        place = [_repeated(path, decoded.batch.num_rows), pa.array(decoded.starts)]
        return pa.RecordBatch.from_arrays([*decoded.batch.columns, *place], schema=self._schema)


def _with_place(schema: pa.Schema, include_path: bool) -> pa.Schema:
    if not include_path:
        return schema
    taken = {PATH_COLUMN, BYTE_COLUMN} & set(schema.names)
    if taken:
        raise UsageError(f"include_path adds a column '{min(taken)}', but the records have one; rename theirs")
    place = [pa.field(PATH_COLUMN, pa.large_string()), pa.field(BYTE_COLUMN, pa.int64())]
    return pa.schema([*schema, *place])


def _place(path: str, line: int, start: int) -> str:
    return f"{path} line {line} (byte {start})"


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.large_string()), count)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
