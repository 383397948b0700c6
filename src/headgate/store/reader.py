"""A reader of one segment from a position on, and the read-ahead of its chunks.

Counterpart: ``writer`` and committed ``transactions``. Source: S14 and S83 of docs/spec/stream-
store.md. Never returns an event that was not verified, and never skips one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator

import pyarrow as pa

from headgate.codec.chunk import ALIGNMENT, PART_BYTES_MAX
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, TruncatedError
from headgate.protocol.watermarks import WATERMARK_MIN_MS
from headgate.storage.base import Storage
from headgate.store.catalogue.records import StoredPart
from headgate.store.chunks import RangeReader, read_part
from headgate.store.core import Fetch, Prefetcher, StoreCore
from headgate.store.streams import OtherSchemaError, SchemaHistory, StreamInfo, convert_batch

RUN_BYTES = 8 << 20
"""Adjacent small parts of a file are fetched at once, up to so many bytes."""

AHEAD_BYTES = 32 << 20
"""One reader has at most so much fetched and not read yet."""

RUNS_MAX = 8
"""One reader asks at most so often at one time."""


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Adjacent parts of one segment in one file. ``end``: the position after their last event."""

    path: str
    offset: int
    size_bytes: int
    end: int


@dataclass(slots=True)
class _PendingRun:
    """A run that was asked for; ``at``: where in its file the next unread part begins."""

    run: ByteRun
    fetch: Fetch
    at: int


def runs_of(parts: Iterable[StoredPart]) -> Iterator[ByteRun]:
    """Join ``parts``, in their order, to runs of at most ``RUN_BYTES``; end where one cannot be."""
    run: ByteRun | None = None
    for part in parts:
        entry = part.entry
        if not 0 < entry.size_bytes <= PART_BYTES_MAX or entry.offset < 0:
            # a damaged row: `read_part` says so when it is the turn of that part
            break
        if run is not None and part.path == run.path:
            # parts are aligned in their file: what is between two neighbours is fetched along
            gap = entry.offset - run.offset - run.size_bytes
            size_bytes = run.size_bytes + gap + entry.size_bytes
            if 0 <= gap < ALIGNMENT and size_bytes <= RUN_BYTES:
                run = ByteRun(run.path, run.offset, size_bytes, part.end)
                continue
        if run is not None:
            yield run
        run = ByteRun(part.path, entry.offset, entry.size_bytes, part.end)
    if run is not None:
        yield run


class ReadAhead:
    """What ``chunks.read_part`` reads from, for one reader. One thread at a time."""

    def __init__(self, storage: Storage, fetching: Prefetcher) -> None:
        self._storage = storage
        self._fetching = fetching
        self._asked: deque[_PendingRun] = deque()
        self._asked_to = 0
        self._is_sequential = False
        self._process = fetching.process_id
        # a reader that is dropped gives its room back; of the deque, because a finaliser of `self` would keep it alive
        weakref.finalize(self, _release_all, self._asked).atexit = False

    @property
    def url(self) -> str:
        """The storage's."""
        return self._storage.url

    def ask(self, parts: Iterable[StoredPart], end: int | None) -> None:
        """Have ``parts``, which are read next in this order, fetched as far as there is room.

        ``end``: nothing at this position or after it will be read.
        """
        if not self._is_sequential or len(self._asked) >= RUNS_MAX:
            return
        self._notice_fork()
        held_bytes = sum(asked.run.size_bytes for asked in self._asked)
        for run in runs_of(self._new(parts, end)):
            held_bytes += run.size_bytes
            if held_bytes > AHEAD_BYTES or len(self._asked) >= RUNS_MAX:
                return
            fetch = self._fetching.begin(self._storage, run.path, run.offset, run.size_bytes)
            if fetch is None:
                return
            self._asked.append(_PendingRun(run, fetch, run.offset))
            self._asked_to = run.end

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        """Return bytes that were fetched ahead, or ask for them now. See ``Storage``."""
        self._notice_fork()
        fetched = self._fetched(path, offset, size_bytes)
        self._is_sequential = True  # a reader of one part reads the next one, too
        return self._storage.get_range(path, offset, size_bytes) if fetched is None else fetched

    def forget(self) -> None:
        """Give up what was asked for, and fetch nothing ahead until the next part has been read."""
        _release_all(self._asked)
        self._asked_to, self._is_sequential = 0, False

    def _fetched(self, path: str, offset: int, size_bytes: int) -> memoryview | None:
        if not self._asked:
            return None
        asked, end = self._asked[0], offset + size_bytes
        run = asked.run
        # parts are read in the order in which they were asked for: anything else is a jump
        if path != run.path or offset < asked.at or end > run.offset + run.size_bytes:
            self.forget()  # it reads something else
            return None
        is_stale = asked.fetch.is_over
        try:
            payload = asked.fetch.wait()
        except Exception:
            self.forget()
            if is_stale:  # it failed before its turn, maybe long ago
                return None
            raise
        # released when the store was closed: the caller asks the storage, as without a read-ahead
        if payload is None:
            self.forget()
            return None
        asked.at = end
        if end == run.offset + run.size_bytes:
            # gives its room back; the bytes live as long as the view that is returned
            self._asked.popleft().fetch.let_go()
        return memoryview(payload)[offset - run.offset : end - run.offset]

    def _new(self, parts: Iterable[StoredPart], end: int | None) -> Iterator[StoredPart]:
        for part in parts:
            if end is not None and part.start >= end:
                return
            if part.start >= self._asked_to:
                yield part

    def _notice_fork(self) -> None:
        if self._process != self._fetching.process_id:
            self._process = self._fetching.process_id
            self._asked.clear()  # the parent's, and so is their room
            self.forget()


def _release_all(asked: deque[_PendingRun]) -> None:
    while asked:
        asked.popleft().fetch.let_go()


READ_ROWS = 65_536
"""Default size of a read when catching up: batch size decides throughput."""

READ_BYTES_MAX = 32 << 20
PARTS_AT_A_TIME = 512
"""Parts that are asked for at once."""


class SegmentReader:
    """Reads one segment in order. One thread at a time."""

    def __init__(self, core: StoreCore, stream: StreamInfo, segment: int, position: int) -> None:
        """Use ``Store.reader``."""
        self._catalogue = core.catalogue
        self._ahead = ReadAhead(core.storage, core.prefetcher) if core.storage.is_afar else None
        self._ranges: RangeReader = core.storage if self._ahead is None else self._ahead
        self.stream = stream
        self._schemas = SchemaHistory(core.catalogue, stream)
        self.segment = segment
        self.position = position
        """Position of the event that the next read begins with."""
        self._parts: deque[StoredPart] = deque()
        self._fetched = position
        self._known_end: int | None = None
        self._batch: pa.RecordBatch | None = None
        self._batch_at = 0
        self._tail_changes = -1
        self._end: int | None = None
        self._is_closed = False
        self.part_chunk = ""
        """File the last event came from, for messages."""
        self.event_ms: int | None = None
        """No event after those that were read is as early as that; None: their writer says nothing (S90)."""
        self._part_event_ms: int | None = None
        self._began_event_ms: int | None = None
        """``event_ms`` when the latest read began."""
        self.visible_ms: int | None = None
        """Since when readers see the last event that was read."""
        self.newest_schema = 0
        """Version of the newest schema in which anything that was read was written."""

    def read(self, rows_max: int = READ_ROWS, end: int | None = None) -> pa.RecordBatch | None:
        """Return the next events, at most ``rows_max`` and none at or after ``end``; None if there are none now.

        Small appends are merged into one batch. At the tail a call costs microseconds.

        Raises:
            CorruptionError: a chunk is damaged; the events before it were returned by earlier calls.
            UsageError: the stream was deleted.
            TruncatedError: the segment begins after the position now.
        """
        self._end, self._began_event_ms = end, self.event_ms
        try:
            batch = self._collect(rows_max if end is None else min(rows_max, end - self.position))
        except BaseException:  # whatever was taken out of the part is not returned: begin there again
            self._rewind()
            raise
        assert batch is None or batch.num_rows <= rows_max, "no more events are returned than were asked for"
        self.position += 0 if batch is None else batch.num_rows
        # within a part nothing is known: its time holds after its last event (S90)
        if not self._unread():
            self.event_ms = self._part_event_ms
        return batch

    def has_ended(self) -> bool:
        """Whether the last ``read`` found the end of a segment that takes no more: closed, or of a sealed stream."""
        return self._is_closed and not self._parts and self._unread() == 0

    @property
    def known_end(self) -> int | None:
        """Where the segment ended when the catalogue was last asked for its parts; None: it was not asked yet."""
        return self._known_end

    def close(self) -> None:
        """Give up what is fetched ahead. Repeating is fine, and so is reading on, which begins to fetch again (S83)."""
        if self._ahead is not None:
            self._ahead.forget()

    def back_to(self, position: int) -> None:
        """Begin with the event at ``position`` again, which the latest ``read`` returned."""
        assert position <= self.position, "only what was read is read again"
        self.position = position
        self._rewind()

    def _rewind(self) -> None:
        self.close()
        self._parts.clear()
        # no number of changes is as low as this one, so the next read asks the catalogue
        self._batch, self._fetched, self._tail_changes = None, self.position, -1
        self._is_closed = False  # events of it are to be read once more: only the next look says that none follow
        self.event_ms = self._part_event_ms = self._began_event_ms

    def _collect(self, limit: int) -> pa.RecordBatch | None:
        """Return the next events, at most ``limit``; ``position`` is moved by the caller."""
        pieces: list[pa.RecordBatch] = []
        rows = size_bytes = 0
        while rows < limit and size_bytes < READ_BYTES_MAX:
            try:
                batch = self._current()
            except (CorruptionError, StorageError, TruncatedError, OtherSchemaError):
                if not pieces:
                    raise
                break  # what was read is good; the next call raises
            if batch is None:
                break
            piece = batch.slice(self._batch_at, limit - rows)
            self._batch_at += piece.num_rows
            pieces.append(piece)
            rows += piece.num_rows
            size_bytes += piece.nbytes
        if not pieces:
            return None
        return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)

    def _unread(self) -> int:
        return 0 if self._batch is None else self._batch.num_rows - self._batch_at

    def _current(self) -> pa.RecordBatch | None:
        """Return the batch that holds the next event, loading the next part when needed."""
        if self._unread():
            return self._batch
        self._batch = None
        if not self._parts and not self._fetch():
            return None
        part = self._parts[0]
        # before this part is read: those after it are on their way meanwhile
        if self._ahead is not None:
            self._ahead.ask(self._parts, self._end)
        try:
            self._batch = self._in_own_schema(
                part, read_part(self._ranges, part, self._schemas.of(part.schema_version))
            )
        except CorruptionError:
            self._check_not_truncated()
            raise
        self._parts.popleft()  # only now: a failed load is tried again
        is_first = self._part_event_ms is None and part.event_ms is not None  # it may begin within the part
        self.event_ms, self._part_event_ms = WATERMARK_MIN_MS if is_first else self._part_event_ms, part.event_ms
        self.part_chunk = part.path
        self.visible_ms = part.visible_ms
        self.newest_schema = max(self.newest_schema, part.schema_version)
        self._batch_at = max(0, self.position - part.start)
        return self._batch

    def _in_own_schema(self, part: StoredPart, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return events in the schema that the reader was opened with (S77).

        Raises:
            OtherSchemaError: they are newer, and do not fit it.
        """
        try:
            return convert_batch(batch, self.stream.schema)
        except OtherSchemaError as error:
            raise OtherSchemaError(
                f"stream '{self.stream.name}' has other columns since it was opened: {error}, in segment "
                f"{self.segment} from position {part.start} on; open it again, or start the pipeline again"
            ) from None

    def _check_not_truncated(self) -> None:
        """Distinguish a file that a truncation removed after the look into the catalogue from a damaged one.

        Raises:
            TruncatedError: the segment begins after what was to be read.
        """
        self._catalogue.parts(self.stream, self.segment, max(self.position, self._parts[0].start), 1)

    def _fetch(self) -> bool:
        """Ask the catalogue for further parts; False at the tail."""
        # before the look: what comes in between makes the next read look again
        changes = self._catalogue.changes()
        if changes == self._tail_changes:
            return False
        found = self._catalogue.parts(self.stream, self.segment, self._fetched, PARTS_AT_A_TIME)
        self._known_end = found.end
        if found.parts:
            self._parts.extend(found.parts)
            self._check_contiguous()
            self._fetched = self._parts[-1].end
            return True
        if self._fetched < found.end:
            raise CorruptionError(
                self._where_in_catalogue(), 0, f"events from position {self._fetched} to {found.end}", "none"
            )
        self._is_closed = found.is_at_end
        if found.event_ms is not None:
            self._part_event_ms = max(found.event_ms, self._part_event_ms or found.event_ms)
        self._tail_changes = changes
        return False

    def _check_contiguous(self) -> None:
        expected = self._fetched
        for number, part in enumerate(self._parts):
            begins_inside = number == 0 and part.start < expected < part.end
            if part.start != expected and not begins_inside:
                # else the next read would go on after the hole; this way it asks again, and raises again
                self._parts.clear()
                wanted = f"events from position {expected}"
                raise CorruptionError(self._where_in_catalogue(), 0, wanted, f"from {part.start}")
            expected = part.end

    def _where_in_catalogue(self) -> str:
        return f"{self._catalogue.path} ({self.stream.name}/{self.segment})"
