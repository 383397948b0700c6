"""Reads objects of object stores, or files of a distributed file system: whole, in ranges, fetched ahead by threads.

An object is never changed, only replaced. So a position is its name, its version, and a place in it. Counterparts:
``selection``, which finds them; ``line_source`` and ``parquet``, which make records of them. Source:
docs/spec/connectors.md.
"""

from __future__ import annotations

import io
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import xxhash

from headgate.connectors.base import FailStopReader, SourceBatch, SourceContext, SplitPosition, owner_of_split
from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.filesystem import LocalFiles, codec_of
from headgate.connectors.files.line_file import BLOCK_BYTES, HEAD_BYTES, FileOptions, LineFile, RefusedLine
from headgate.connectors.files.lines import Lines
from headgate.connectors.files.selection import ObjectOptions, ObjectSelection, in_order, numbered_files
from headgate.dataclass import dataclass
from headgate.environment import DaemonPool
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.operators.user_functions import bad_records
from headgate.storage.base import NotFound, ReadableStorage, Replaced, StoredFile
from headgate.storage.urls import open_readable, split_object_url

RANGE_BYTES = 4 << 20
"""Fetched by one request; the next range is fetched while one is read."""

ACTIVE_MAX = 8
"""Objects read in turn at a time, by each subtask."""

FIRST_BYTES = 64 << 10
"""So much of the beginning is fetched of an object that is read from a later place on."""

AHEAD_BYTES = BLOCK_BYTES + (128 << 10)
"""So much one step of a reader of lines may read, compressed or not."""

RETRIES_S = (0.5, 1.0, 2.0, 4.0, *(8.0,) * 20)
"""Pauses before a request is repeated that failed in a way that may pass: a few minutes, then the generation fails."""

WAIT_S = 0.004
"""So long ``poll`` waits for an answer."""

LATER_MAX = 1_000
"""Of so many objects that wait for their turn, progress is reported."""

FETCHING_MS = 2
"""So soon a mailbox with nothing else to do asks again while requests are on their way."""

# -- bytes --------------------------------------------------------------------------------------------------------


class Fetcher:
    """Sends requests from a few threads, and repeats for a while those that fail."""

    def __init__(self) -> None:
        self._pool = DaemonPool(ACTIVE_MAX, "headgate-objects")
        self._is_closed = threading.Event()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return what will have the answer of a request."""
        return self.begin(self.retry, function, *arguments)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return what will have the result of a call."""
        future: Future[Any] = Future()
        self._pool.submit(_run, future, function, *arguments)
        return future

    def retry(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer of a request; repeat it for a while if it fails in a way that may pass."""
        for pause_s in RETRIES_S:
            try:
                return function(*arguments)
            except StorageError as error:
                if not error.is_transient or self._is_closed.wait(pause_s):
                    raise
        return function(*arguments)

    def close(self) -> None:
        """Send no more requests."""
        self._is_closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _run(future: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)


def storage_of(url: str) -> tuple[ReadableStorage, str]:
    """Return the storage of a URL, and the path in it."""
    split = split_object_url(url)
    assert split is not None
    return open_readable(split[0]), split[1]


class ObjectBytes:
    """The bytes of one object from a place on, fetched ahead."""

    def __init__(self, file: StoredFile, fetcher: Fetcher, begin: int = 0) -> None:
        self._storage, path = storage_of(file.path)
        self._stored = replace(file, path=path)
        self._fetcher, self._size = fetcher, file.size_bytes
        self._begin = self._next = begin
        self._ranges: dict[int, Future[bytes]] = {}
        # a reader that goes on further back looks at the beginning, too, to know the object again
        self._head = self._get(0, FIRST_BYTES) if begin else None
        self._fetch_ahead()

    def missing(self, size_bytes: int = AHEAD_BYTES) -> list[Future[bytes]]:
        """Return what is on its way of the next so many bytes."""
        last = self._index(min(self._next + size_bytes, self._size) - 1)
        needed = [self._range(index) for index in range(self._index(self._next), last + 1)]
        return [each for each in [*needed, *([self._head] if self._head else [])] if not each.done()]

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return at most so many bytes at ``offset``; wait for them if they are not there yet.

        Raises:
            NotFound, Replaced
            StorageError
        """
        end = min(offset + size_bytes, self._size)
        if offset >= end:
            return b""
        if self._head is not None and end <= FIRST_BYTES:
            return self._head.result()[offset:end]
        # it was dropped, or lies in front of everything: a request of its own
        if offset < self._begin or self._index(offset) < min(self._ranges, default=0):
            found: bytes = self._fetcher.retry(self._storage.get_part, self._stored, offset, end - offset)
            return found
        parts = []
        for index in range(self._index(offset), self._index(end - 1) + 1):
            start = self._begin + index * RANGE_BYTES
            parts.append(self._range(index).result()[max(offset - start, 0) : end - start])
        if end > self._next:
            self._next = end
            self._fetch_ahead()
        return b"".join(parts)

    def _index(self, offset: int) -> int:
        return max(offset - self._begin, 0) // RANGE_BYTES

    def _range(self, index: int) -> Future[bytes]:
        if index not in self._ranges:
            self._ranges[index] = self._get(self._begin + index * RANGE_BYTES, RANGE_BYTES)
        return self._ranges[index]

    def _get(self, offset: int, size_bytes: int) -> Future[bytes]:
        return self._fetcher.call(self._storage.get_part, self._stored, offset, size_bytes)

    def _fetch_ahead(self) -> None:
        """Drop what lies before, but for what readers look back at, and fetch the next range."""
        first = self._index(self._next - 2 * HEAD_BYTES)
        for index in [index for index in self._ranges if index < first]:
            del self._ranges[index]
        for index in (self._index(self._next), self._index(self._next) + 1):
            if self._begin + index * RANGE_BYTES < self._size:
                self._range(index)


class ObjectStream(io.RawIOBase):
    """One object, for readers that seek; each read is a request, made by the thread that reads."""

    def __init__(self, file: StoredFile, fetcher: Fetcher) -> None:
        self._storage, path = storage_of(file.path)
        self._stored, self._fetcher, self._at = replace(file, path=path), fetcher, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        """Return that it seeks."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place, of which nothing is fetched yet."""
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.size_bytes}
        self._at = begins[whence] + offset
        return self._at

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        size = self._stored.size_bytes - self._at if size < 0 else size
        data: bytes = self._fetcher.retry(self._storage.get_part, self._stored, self._at, size)
        self._at += len(data)
        return data


@dataclass(frozen=True, slots=True)
class _Status:
    """See ``filesystem.Status``. The inode is the object's version."""

    st_ino: int
    st_size: int
    st_mtime_ns: int
    st_dev: int = 0


class _ObjectAsFile(LocalFiles):
    """What ``LineFile`` asks of the file system, answered for one object."""

    def __init__(self, file: StoredFile, data: ObjectBytes) -> None:
        self._data = data
        self._status = _Status(identity_of(file), file.size_bytes, file.modified_ms * 1_000_000)

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        yield 0

    def fstat(self, descriptor: int) -> _Status:
        return self._status

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        return self._data.read(offset, size_bytes)

    def pread_into(self, descriptor: int, space: memoryview, offset: int) -> int:
        data = self._data.read(offset, len(space))
        space[: len(data)] = data
        return len(data)


def identity_of(file: StoredFile) -> int:
    """Return a number that tells the object from another one under its name."""
    version = file.version or f"{file.modified_ms}"
    return xxhash.xxh3_64_intdigest(f"{version} {file.size_bytes}".encode()) or 1


# -- positions ----------------------------------------------------------------------------------------------------

_VERSION = 1
_FIXED = struct.Struct("<B?IQQH")
_KNOWN = struct.Struct("<16sQQ")
_HORIZON = struct.Struct("<BQ")
KNOWN_SPLIT = "objects that were read, subtask "
"""Under this name, and its number, each subtask keeps which objects it has read, and forgets the oldest."""


@dataclass(frozen=True, slots=True)
class ObjectPosition:
    """Where reading of one object continues.

    Attributes:
        file: as it was listed.
        place: the position in it, as its format says.
        number: of a fixed list: when it was first listed; None: not known.
    """

    file: StoredFile
    place: bytes = b""
    is_finished: bool = False
    number: int | None = None

    def encode(self) -> bytes:
        """Return the position as bytes."""
        number = 0 if self.number is None else self.number + 1
        version = self.file.version.encode()
        fixed = _FIXED.pack(
            _VERSION, self.is_finished, number, self.file.size_bytes, self.file.modified_ms, len(version)
        )
        return fixed + version + self.place

    @staticmethod
    def decode(path: str, encoded: bytes) -> ObjectPosition:
        """Return the position that ``encode`` made of the object ``path``.

        Raises:
            CorruptionError: it is not one, or of another version.
        """
        if len(encoded) < _FIXED.size or encoded[0] != _VERSION:
            expected = f"{_FIXED.size} bytes or more, version {_VERSION}"
            raise CorruptionError(f"position of {path}", 0, expected, f"{encoded[:16].hex()} ({len(encoded)} bytes)")
        _, finished, number, size_bytes, modified_ms, length = _FIXED.unpack_from(encoded)
        version = encoded[_FIXED.size : _FIXED.size + length].decode("utf-8", "replace")
        file = StoredFile(path, size_bytes, modified_ms, version)
        return ObjectPosition(file, encoded[_FIXED.size + length :], finished, number - 1 if number else None)


class KnownObjects:
    """Which objects of a followed place one subtask has read.

    An object that is older than the horizon, and is not among them, has been read and was forgotten. The horizon is
    ``max_age_ms`` earlier than the newest object that was listed.
    """

    def __init__(self, max_age_ms: int) -> None:
        self._max_age_ms = max_age_ms
        self._objects: dict[bytes, tuple[int, int]] = {}
        self._horizon_ms = 0

    def add(self, file: StoredFile) -> None:
        """Remember an object that was read."""
        self._objects[_digest(file.path)] = (identity_of(file), file.modified_ms)

    def has(self, file: StoredFile) -> bool | None:
        """Whether the object was read; None: another one under its name was."""
        found = self._objects.get(_digest(file.path))
        if found is None:
            return file.modified_ms < self._horizon_ms
        return True if found[0] == identity_of(file) else None

    def looked(self, newest_ms: int) -> None:
        """Everything that there is was considered; forget what is too old by now."""
        horizon_ms = newest_ms - self._max_age_ms
        if horizon_ms > self._horizon_ms:
            self._horizon_ms = horizon_ms
            self._objects = {key: found for key, found in self._objects.items() if found[1] >= horizon_ms}

    def encode(self) -> bytes:
        """Return them as bytes."""
        objects = [_KNOWN.pack(key, *found) for key, found in self._objects.items()]
        return b"".join([_HORIZON.pack(_VERSION, self._horizon_ms), *objects])

    def restore(self, name: str, encoded: bytes, owns: Callable[[bytes], bool]) -> None:
        """Add what a former subtask had read, so far as it is ours now.

        Raises:
            CorruptionError: it is not what ``encode`` returns, or of another version.
        """
        if len(encoded) < _HORIZON.size or encoded[0] != _VERSION or (len(encoded) - _HORIZON.size) % _KNOWN.size:
            raise CorruptionError(f"position of {name}", 0, f"version {_VERSION}", encoded[:16].hex())
        self._horizon_ms = max(self._horizon_ms, _HORIZON.unpack_from(encoded)[1])
        for key, identity, modified_ms in _KNOWN.iter_unpack(encoded[_HORIZON.size :]):
            if owns(key):
                self._objects[key] = (identity, modified_ms)


def _digest(path: str) -> bytes:
    return xxhash.xxh3_128_digest(path.encode("utf-8", "surrogateescape"))


# -- reading ------------------------------------------------------------------------------------------------------


class OpenObject(Protocol):
    """One object being read."""

    @property
    def is_finished(self) -> bool:
        """Whether everything of it was returned."""

    @property
    def place(self) -> bytes:
        """The position in it."""

    def missing(self) -> list[Future[Any]]:
        """Return what is on its way that ``next`` would wait for."""

    def next(self) -> SourceBatch | None:
        """Return the next records, if a step has completed some.

        Raises:
            NotFound, Replaced
            StorageError, UsageError
        """

    def progress(self) -> SplitPosition | None:
        """Return how far it was read."""


class LinesOfObject:
    """An object with lines."""

    def __init__(
        self,
        file: StoredFile,
        place: bytes,
        options: FileOptions,
        fetcher: Fetcher,
        batch_of: Callable[[str, Lines | RefusedLine], SourceBatch],
    ) -> None:
        position = FilePosition.decode(file.path, place) if place else FilePosition()
        position = replace(position, seen_bytes=file.size_bytes)
        self._batch_of = batch_of
        begin = max(position.offset - HEAD_BYTES, 0) if _is_plain(file.path, options) else 0
        self._data = ObjectBytes(file, fetcher, begin)
        self._file = LineFile(file.path, position, options, _ObjectAsFile(file, self._data))

    @property
    def is_finished(self) -> bool:
        return self._file.is_finished and not self._file.has_lines

    @property
    def place(self) -> bytes:
        return self._file.position().encode()

    def missing(self) -> list[Future[Any]]:
        return [] if self._file.has_lines else list(self._data.missing())

    def next(self) -> SourceBatch | None:
        lines = self._file.step()
        return None if lines is None else self._batch_of(self._file.path, lines)

    def progress(self) -> SplitPosition | None:
        return self._file.progress()


def _is_plain(path: str, options: FileOptions) -> bool:
    return codec_of(path, options.compression) is None


Opener: TypeAlias = Callable[[StoredFile, bytes, Fetcher], OpenObject]
"""Begins to read an object at a place in it; b"": at its start."""


class ObjectReader(FailStopReader):
    """Reads the objects of one subtask, a few of them in turn."""

    def __init__(
        self,
        context: SourceContext,
        selection: ObjectSelection,
        files: Sequence[StoredFile],
        schema: pa.Schema,
        options: ObjectOptions,
        find: Callable[[], list[StoredFile]],
        opener: Opener,
        active_max: int = ACTIVE_MAX,
        later_max: int | None = LATER_MAX,
    ) -> None:
        """Begin where the positions of ``context`` say; ``files``: what there is; ``find`` looks again.

        ``later_max``: of so many objects that wait for their turn progress is reported, in bytes; None: of none.
        """
        self._context, self._schema = context, schema
        self._options, self._find, self._open = options, find, opener
        self._active_max, self._later_max = active_max, later_max or 0
        self._fetcher = Fetcher()
        self._known = KnownObjects(options.max_age_ms)
        self._unread: dict[str, ObjectPosition] = {}
        """Of what is not read to its end: where it was read to when it was last closed."""
        self._finished: dict[str, ObjectPosition] = {}
        """Of a fixed list, what was read to its end."""
        self._later: deque[str] = deque()
        self._active: dict[str, OpenObject] = {}
        self._turns: deque[str] = deque()
        self._reports: deque[SourceBatch] = deque()
        self._paused: frozenset[str] = frozenset()
        self._look: Future[list[StoredFile]] | None = None
        self._look_at_ms = context.clock_ms() + options.discovery_ms
        self._restore(selection.carried_over(context.positions or {}, context.relocation), files)

    # -- what there is ----------------------------------------------------------------------------------------

    def _restore(self, positions: Mapping[str, bytes], files: Sequence[StoredFile]) -> None:
        """Begin where positions say; what they do not know is new."""
        restored = {}
        for path, encoded in positions.items():
            if path.startswith(KNOWN_SPLIT):
                self._known.restore(path, encoded, self._owns_digest)
            else:
                restored[path] = ObjectPosition.decode(path, encoded)
        if self._options.follow:
            mine = {path: position for path, position in restored.items() if self._owns_digest(_digest(path))}
        else:
            numbers = numbered_files(
                [file.path for file in files], {path: position.number for path, position in restored.items()}
            )
            listed = {file.path: file for file in files}
            mine = {
                path: replace(restored[path], number=number)
                if path in restored
                else ObjectPosition(listed[path], number=number)
                for path, number in sorted(numbers.items(), key=lambda item: item[1])
                if owner_of_split(number, self._context.parallelism) == self._context.subtask_index
            }
        for path, position in mine.items():
            if position.is_finished or (path not in restored and self._known.has(position.file)):
                self._finish(position)
            else:
                self._await(position)
        self._consider(files)

    def _owns_digest(self, digest: bytes) -> bool:
        return int.from_bytes(digest[:8], "big") % self._context.parallelism == self._context.subtask_index

    def _consider(self, files: Sequence[StoredFile]) -> None:
        """Compare a listing with what is known.

        Raises:
            UsageError: an object was replaced, and that is not expected.
        """
        for file in in_order(files):
            known = self._unread.get(file.path) or self._finished.get(file.path)
            if known is not None:
                if identity_of(known.file) != identity_of(file):
                    self._replaced(file)
            elif self._options.follow and self._owns_digest(_digest(file.path)):
                is_read = self._known.has(file)
                if is_read is None:
                    self._replaced(file)
                elif not is_read:
                    self._await(ObjectPosition(file))
        if self._options.follow and files:
            self._known.looked(max(file.modified_ms for file in files))

    def _await(self, position: ObjectPosition) -> None:
        self._unread[position.file.path] = position
        self._later.append(position.file.path)

    def _finish(self, position: ObjectPosition) -> None:
        if self._options.follow:
            self._known.add(position.file)
        else:
            self._finished[position.file.path] = replace(position, place=b"", is_finished=True)

    def _replaced(self, file: StoredFile) -> None:
        """Read another object that has the name of one that was read, or refuse it."""
        known = self._unread.get(file.path) or self._finished.pop(file.path, None)
        is_begun = known is None or known.is_finished or bool(known.place) or file.path in self._active
        if is_begun and self._options.replaced == "fail":
            raise UsageError(
                f"{file.path} was replaced after reading it had begun; write new data under new names, put back what "
                'was there, or give replaced="read" to read what replaced it from its start'
            )
        self._forget(file.path)
        self._await(ObjectPosition(file, number=None if known is None else known.number))

    def _forget(self, path: str) -> ObjectPosition | None:
        if self._active.pop(path, None) is not None:
            self._turns.remove(path)
        elif path in self._unread:
            self._later.remove(path)
        return self._unread.pop(path, None)

    def _gone(self, path: str) -> SourceBatch:
        """Report an object that was deleted before all of it was read, and do not expect it any more."""
        active = self._active.get(path)
        progress = active.progress() if active is not None else None
        known = self._forget(path)
        assert known is not None, "what is read is among what is not read to its end"
        self._finish(known)
        how_far = f"{progress.position if progress else 0} {progress.unit if progress else 'bytes'} of it"
        problem = f"it was deleted when {how_far} were read; put it back, or have bad records dropped"
        return self._report(path, problem)

    def _report(self, path: str, problem: str) -> SourceBatch:
        bad = bad_records(self._context.node, [problem], [path], [""])
        return SourceBatch(path, pa.RecordBatch.from_pylist([], schema=self._schema), bad, True)

    def _look_around(self) -> None:
        """Take the result of the last look, or begin another one."""
        if not self._options.follow:
            return
        if self._look is not None and self._look.done():
            found, self._look = self._look.result(), None
            self._look_at_ms = self._context.clock_ms() + self._options.discovery_ms
            self._consider(found)
        # one look at a time: a listing may take longer than the interval
        if self._look is None and self._context.clock_ms() >= self._look_at_ms:
            self._look = self._fetcher.call(self._find)

    # -- reading ----------------------------------------------------------------------------------------------

    def splits(self) -> Sequence[str]:
        """Return the objects that were not read to their ends."""
        return list(self._unread)

    def pause(self, splits: Collection[str]) -> None:
        self._paused = frozenset(splits)

    def is_behind(self, split: str) -> bool:
        """See ``PausableReader``: objects that wait for their turn hold no others up."""
        return split in self._active

    def _has_ended(self) -> bool:
        """Whether all objects of a fixed list were read to their ends."""
        return not self._options.follow and not self._unread and not self._reports

    def _positions(self) -> dict[str, bytes]:
        """Return a position of each object that is to be read, and which were read."""
        found = {path: position.encode() for path, position in {**self._finished, **self._unread}.items()}
        # those that are being read have come further than when they were last closed
        for path, active in self._active.items():
            found[path] = replace(self._unread[path], place=active.place).encode()
        if self._options.follow:
            found[f"{KNOWN_SPLIT}{self._context.subtask_index}"] = self._known.encode()
        return found

    def progress(self) -> Mapping[str, SplitPosition]:
        later = (self._unread[path] for path in islice(self._later, self._later_max))
        found = {each.file.path: SplitPosition(0, each.file.size_bytes, "bytes") for each in later}
        for path, active in self._active.items():
            progress = active.progress()
            if progress is not None:
                found[path] = progress
        return found

    def wakeup_ms(self) -> int:
        """Return when to ask again."""
        return FETCHING_MS if self._unread else min(self._options.discovery_ms, 100)

    def close(self) -> None:
        """Send no more requests."""
        self._active.clear()
        self._fetcher.close()

    def _poll(self) -> SourceBatch | None:
        """Return the next records of one object."""
        self._look_around()
        while self._later and len(self._active) < self._active_max:
            path = self._later.popleft()
            position = self._unread[path]
            self._active[path] = self._open(position.file, position.place, self._fetcher)
            self._turns.append(path)
        waiting: list[Future[Any]] = []
        for _ in range(len(self._turns)):
            path = self._turns[0]
            self._turns.rotate(-1)
            if path in self._paused:
                continue
            missing = self._active[path].missing()
            if missing:
                waiting += missing
                continue
            return self._step(path)
        if waiting:
            wait(waiting, WAIT_S, FIRST_COMPLETED)
        return None

    def _step(self, path: str) -> SourceBatch | None:
        active = self._active[path]
        try:
            batch = None if active.is_finished else active.next()
        except NotFound:
            return self._gone(path)
        except Replaced:
            return self._look_at(path)
        if not active.is_finished:
            return batch
        if batch is not None:
            return batch
        position = self._forget(path)
        assert position is not None
        self._finish(position)
        return SourceBatch(path, pa.RecordBatch.from_pylist([], schema=self._schema), is_split_finished=True)

    def _look_at(self, path: str) -> SourceBatch | None:
        """Find what is there in place of an object that was being read."""
        storage, stored = storage_of(path)
        now = storage.file(stored)
        if now is None:
            return self._gone(path)
        self._replaced(replace(now, path=path))
        return None
