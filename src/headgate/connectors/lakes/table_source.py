"""Sources of tables with a log: a version of the table, and then the files that later versions add.

A table is read in a fixed number of splits. Each takes its share of the files of a version, in an order that the log
gives, so a position is (version, file, row). Counterparts: ``delta`` and ``iceberg`` read the logs.
Source: docs/spec/lakes.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from headgate.codec.decodable import decodable
from headgate.codec.exact_values import MisfitError
from headgate.connectors.base import FailStopReader, Source, SourceBatch, SourceContext, owner_of_split
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.operators.schemas import to_canonical

SPLITS = 16
"""Splits of a table, so that many subtasks can read it at the same time."""

BATCH_ROWS = 16_384

VERSIONS_MAX = 8
"""Versions with their files that a reader remembers: its splits are at different ones."""

SUCCESSORS_MAX = 1_024
"""Versions of which a reader remembers the next one."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a version.

    Attributes:
        path: for errors.
        data: what ``TableHistory.read`` needs of it.
    """

    path: str
    data: Any


class TableHistory(Protocol):
    """The versions of a table, as a reader follows them."""

    def snapshot(self, version: int) -> Sequence[TableFile]:
        """Return the files of a version, always in the same order.

        Raises:
            UsageError: the version does not exist any more, or is not read.
        """

    def next(self, version: int) -> int | None:
        """Return the version after ``version``; None: there is none yet.

        Raises:
            UsageError: it does not exist any more.
        """

    def added(self, version: int) -> Sequence[TableFile]:
        """Return the files that a version added, always in the same order.

        Raises:
            UsageError: it has other changes, which are not read.
        """

    def read(self, file: TableFile, row: int) -> Iterator[pa.RecordBatch]:
        """Yield the records of a file from ``row`` on, in types of the table."""


class _Position(msgspec.Struct, frozen=True):
    """Where a split is: ``version`` was read up to ``row`` of file number ``file`` of the split.

    Attributes:
        is_snapshot: all files of the version are read, not only those that it added.
    """

    version: int
    is_snapshot: bool = False
    file: int = 0
    row: int = 0


class TableSource(Source):
    """Base class of sources of tables. ``checked`` is called by their constructors.

    Attributes:
        versions_rise: a later version has a higher number.
    """

    versions_rise = True
    follow: bool
    poll_interval: Duration
    splits: int

    def checked(self, what: str) -> None:
        """Check the options that all have.

        Raises:
            UsageError
        """
        if self.splits < 1:
            raise UsageError(f"{what}(splits={self.splits}) must be at least 1")
        if duration_ms(self.poll_interval, f"{what}(poll_interval=)") < 1:
            raise UsageError(f"{what}(poll_interval=) must be positive")

    def how_to_end(self) -> str | None:
        return "leave follow=True out" if self.follow else None

    @property
    @abstractmethod
    def where(self) -> str:
        """The table, for messages."""

    @abstractmethod
    def start(self) -> tuple[int, bool]:
        """Return the first version, and whether it is read: else only what follows it."""

    @abstractmethod
    def end(self) -> int | None:
        """Return the version where reading ends, unless it ends with the first; None: it follows the table."""

    @abstractmethod
    def history(self, schema: pa.Schema) -> TableHistory:
        """Return the versions. ``schema``: of the records."""

    def open(self, context: SourceContext) -> TableReader:
        schema = self.schema() if context.schema is None else context.schema
        return TableReader(self, context, schema)


READ = 1 << 40
"""In place of the number of a file: all of the version is read."""


@dataclass(slots=True)
class _Split:
    """One split being read."""

    name: str
    number: int
    position: _Position
    files: Sequence[TableFile] | None = None
    batches: Iterator[pa.RecordBatch] | None = None
    is_finished: bool = False


class TableReader(FailStopReader):
    """Reads the splits of one subtask, one batch of each in turn."""

    def __init__(self, source: TableSource, context: SourceContext, schema: pa.Schema) -> None:
        self._source, self._schema, self._clock_ms = source, schema, context.clock_ms
        self._history = source.history(schema)
        version, is_read = source.start()
        known = {name: _decoded(name, data) for name, data in (context.positions or {}).items()}
        start = _Position(version, is_read, 0 if is_read else READ)
        self._splits = [
            _Split(name, number, known.get(name, start))
            for number, name in enumerate(f"part-{number:03d}" for number in range(source.splits))
            if owner_of_split(number, context.parallelism) == context.subtask_index
        ]
        self._end = source.end()
        self._turns = deque(self._splits)
        self._versions: dict[tuple[int, bool], Sequence[TableFile]] = {}
        self._next: dict[int, int] = {}
        self._interval_ms = duration_ms(source.poll_interval, "poll_interval")
        self._newest: tuple[int, int] | None = None
        """A version that had none after it, and when the table was asked."""

    def splits(self) -> Sequence[str]:
        return [split.name for split in self._splits if not split.is_finished]

    def _has_ended(self) -> bool:
        return all(split.is_finished for split in self._splits)

    def _positions(self) -> dict[str, bytes]:
        return {split.name: msgspec.json.encode(split.position) for split in self._splits}

    def wakeup_ms(self) -> int:
        return min(100, self._interval_ms)

    def close(self) -> None:
        self._turns.clear()

    def _poll(self) -> SourceBatch | None:
        """Return the next records of the split that is the first to have some."""
        for _ in range(len(self._turns)):
            split = self._turns.popleft()
            self._turns.append(split)
            found = None if split.is_finished else self._read(split)
            if found is not None:
                return found
        return None

    def _read(self, split: _Split) -> SourceBatch | None:
        """Return the next records of a split, or its end; None: there are none now."""
        while True:
            position = split.position
            if split.files is None:
                split.files = () if position.file == READ else self._files_of(split)
            if position.file < len(split.files):
                batch = self._next_batch(split, split.files[position.file])
                if batch is not None:
                    return SourceBatch(split.name, batch)
                continue
            split.position = _Position(position.version, position.is_snapshot, READ)
            if self._is_end(position):
                split.is_finished = True
                return SourceBatch(split.name, pa.RecordBatch.from_pylist([], schema=self._schema), None, True)
            after = self._after(position.version)
            if after is None:
                return None
            split.position, split.files = _Position(after), None

    def _is_end(self, position: _Position) -> bool:
        """Whether a bounded source ends where a split is, which has read all of the version there."""
        if self._end is None:
            return False
        is_past = self._source.versions_rise and position.version > self._end
        return position.is_snapshot or position.version == self._end or is_past

    def _next_batch(self, split: _Split, file: TableFile) -> pa.RecordBatch | None:
        """Return the next records of a file; None: it has ended."""
        position = split.position
        if split.batches is None:
            split.batches = self._history.read(file, position.row)
        try:
            batch = next(split.batches, None)
        except FileNotFoundError as error:
            raise UsageError(
                f"{file.path} of version {position.version} of {self._source.where} is gone: a vacuum removed it "
                "before it was read; keep files for longer than the pipeline may be down. To go on without it, give "
                "the source another name and start at a version that is there"
            ) from error
        except OSError as error:
            raise StorageError("read", file.path, str(error), is_transient=True) from error
        if batch is None:
            split.batches = None
            split.position = _Position(position.version, position.is_snapshot, position.file + 1)
            return None
        rows = position.row + batch.num_rows
        split.position = _Position(position.version, position.is_snapshot, position.file, rows)
        try:
            return to_canonical(batch, self._schema)
        except MisfitError as error:
            raise UsageError(
                f"{file.path} of {self._source.where}: column {error}; if the table was given another type for it "
                "while the pipeline ran, start the pipeline again"
            ) from error

    def _files_of(self, split: _Split) -> Sequence[TableFile]:
        """Return the split's share of the version at its position."""
        version, is_snapshot = split.position.version, split.position.is_snapshot
        key = (version, is_snapshot)
        if key not in self._versions:
            self._versions[key] = self._history.snapshot(version) if is_snapshot else self._history.added(version)
            while len(self._versions) > VERSIONS_MAX:
                del self._versions[next(iter(self._versions))]
        files, count = self._versions[key], self._source.splits
        # by the version, too: else versions with one file would all go to the first split
        return [file for number, file in enumerate(files) if (number + version) % count == split.number]

    def _after(self, version: int) -> int | None:
        """Return the next version. For one after the newest the table is asked once an interval.

        This limits only splits at the newest version: one that lags would wait for ever if their questions counted.
        """
        if version not in self._next:
            now_ms = self._clock_ms()
            if self._newest is not None and self._newest[0] == version and now_ms - self._newest[1] < self._interval_ms:
                return None
            found = self._history.next(version)
            if found is None:
                self._newest = version, now_ms
                return None
            self._next[version] = found
            while len(self._next) > SUCCESSORS_MAX:
                del self._next[next(iter(self._next))]
        return self._next[version]


def _decoded(split: str, data: bytes) -> _Position:
    try:
        return msgspec.json.decode(data, type=decodable(_Position))
    except msgspec.DecodeError as error:
        found = repr(bytes(data[:40]))
        raise CorruptionError(f"position of {split}", 0, "a version, a file and a row", found) from error
