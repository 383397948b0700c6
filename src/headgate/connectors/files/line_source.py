"""Text and JSON-lines files as a source; a position is a file and a byte offset.

Counterpart: ``lines.LineFile`` reads one file, ``decode`` makes records of lines, ``listing`` finds files.
Source: docs/spec/connectors.md. Never writes, and never delivers a line that may still grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypedDict, Unpack

import pyarrow as pa

from headgate.connectors.base import FailStopReader, Source, SourceBatch, SourceContext, SourceReader
from headgate.connectors.files.file_tracker import FileTracker
from headgate.connectors.files.filesystem import LOCAL, FileSystem
from headgate.connectors.files.line_decoders import Decoded, Decoder, JsonDecoder, TextDecoder
from headgate.connectors.files.line_file import (
    LINE_BYTES_MAX,
    FileMovedError,
    FileOptions,
    LineFile,
    Lines,
    OversizeLine,
)
from headgate.connectors.files.selection import PATTERN_DEFAULT, FileSelection, Paths, select_files
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.lineage import Location
from headgate.model.state_schema import Form
from headgate.operators.schemas import SchemaLike, arrow_schema
from headgate.operators.user_functions import bad_records

PATH_COLUMN = "path"
BYTE_COLUMN = "byte"

STEPS_MAX = 64
"""Files looked at in one ``poll``, so that many idle files do not hold up the mailbox."""


class LineOptions(TypedDict, total=False):
    """The options that all sources of lines have in common, such as ``TextFiles`` and ``JsonLines``.

    Attributes:
        follow: True keeps waiting for more lines and more files; the source then never ends. Default: False.
        pattern: which files below a directory to read, as a glob relative to it. Default: ``"**/*"``.
        encoding: ``"utf-8"``, the only encoding that is supported.
        include_path: True adds the columns ``path`` and ``byte`` (the offset of the line). Default: False.
        poll_interval: how often followed files are checked for more lines. Default: ``"20ms"``.
        discovery_interval: how often followed directories are checked for new files. Default: ``"1s"``.
        line_bytes_max: lines with more bytes, line feed excluded, are bad records. Default: 8 MiB.
    """

    follow: bool
    pattern: str
    encoding: str
    include_path: bool
    poll_interval: Duration
    discovery_interval: Duration
    line_bytes_max: int


def file_options(
    *,
    follow: bool = False,
    pattern: str = PATTERN_DEFAULT,
    encoding: str = "utf-8",
    include_path: bool = False,
    poll_interval: Duration = "20ms",
    discovery_interval: Duration = "1s",
    line_bytes_max: int = LINE_BYTES_MAX,
) -> FileOptions:
    """Return ``LineOptions`` as one value, with the defaults.

    Raises:
        UsageError: the encoding is not supported, an interval is not a duration, or a limit is not positive.
    """
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        raise UsageError(f"encoding '{encoding}' is not supported; convert the files to UTF-8")
    if not isinstance(line_bytes_max, int) or line_bytes_max < 1:
        raise UsageError(f"line_bytes_max must be a number of bytes of at least 1, but is {line_bytes_max!r}")
    poll_ms = max(duration_ms(poll_interval, "poll_interval"), 1)
    discovery_ms = duration_ms(discovery_interval, "discovery_interval")
    return FileOptions(follow, pattern, include_path, poll_ms, discovery_ms, line_bytes_max)


class LineSource(Source):
    """Base class of sources of files with lines. What is special of a format is its decoder.

    Paths are made absolute where it is constructed, so that workers find the same files.
    """

    system: FileSystem = LOCAL
    """Where the files are; the simulator has its own."""

    def __init__(self, paths: Paths, options: LineOptions) -> None:
        self._options = file_options(**options)
        self._selection = select_files(paths, self._options.pattern, self.system)
        self._files: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._selection})"

    def _decoder(self) -> Decoder:
        raise NotImplementedError

    def schema(self) -> pa.Schema:
        """Return the records' schema; find the files.

        Raises:
            UsageError: a path does not exist or cannot be read, or there is nothing to read and none is awaited.
        """
        self._files = self._found()
        return _with_place(self._decoder().schema, self._options.include_path)

    def _found(self) -> tuple[str, ...]:
        files = tuple(self._selection.find(skips_compressed=self._options.follow))
        if not files and not self._options.follow:
            raise UsageError(f"there is no file at {self._selection}; correct the path, or use follow=True to wait")
        return files

    def identity(self) -> str:
        """Positions are kept by absolute path: they mean the same whatever else is read."""
        return f"{Form.LINES.value}, version 1"

    def locations(self) -> tuple[Location, ...]:
        """See ``Source``."""
        return self._selection.locations()

    def how_to_end(self) -> str | None:
        """See ``Source``."""
        return "read the files that are there with follow=False" if self._options.follow else None

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of the files that this subtask owns.

        A fixed list of files is the one that ``schema`` found in the driver, the same for all subtasks.
        """
        files = self._files if self._files is not None else self._found()
        return FileReader(context, self._selection, files, self._options, self._decoder())


class TextFiles(LineSource):
    """Reads text files; each line is a record with one string column.

    ``TextFiles("logs/", follow=True)`` follows a directory that grows. A line that is not UTF-8 or is too long is a
    bad record. Compressed files are not supported yet.
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

    def _decoder(self) -> Decoder:
        return TextDecoder(self._column)


class JsonLines(LineSource):
    """Reads files with one JSON object per line.

    Unknown fields are ignored, and missing fields are null. A line is a bad record if it is not an object, has a value
    of the wrong type, or lacks a required field. Timestamps are ISO 8601 text and are converted to UTC.
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

    def _decoder(self) -> Decoder:
        return JsonDecoder(self._schema, self._required)


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
        self._options, self._decoder = options, decoder
        self._schema = _with_place(decoder.schema, options.include_path)
        self._tracker = FileTracker(context, selection, options)
        self._active: deque[LineFile] = deque()
        self._waiting: list[LineFile] = []
        self._ended: set[int] = set()
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

    def _has_ended(self) -> bool:
        """Whether all files of a fixed list were read to their ends."""
        return not self._options.follow and not self._active and not self._waiting

    def _positions(self) -> dict[str, bytes]:
        """Return a position for each file owned, finished ones too."""
        return self._tracker.positions()

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
                return self._batch(file.path, lines)
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

    def _batch(self, path: str, lines: Lines | OversizeLine) -> SourceBatch:
        node = self._context.node
        if isinstance(lines, OversizeLine):
            limit = self._options.line_bytes_max
            problem = f"the line has {lines.size_bytes} bytes, more than {limit}"
            text = lines.head.decode("utf-8", "backslashreplace")
            bad = bad_records(node, [problem], [_place(path, lines.number, lines.start)], [text])
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
