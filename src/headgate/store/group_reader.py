"""A reader of a reader group, and its heartbeat: it reads the segments that the group gives it.

Counterpart: ``reader_groups.ReaderGroup`` makes it; ``protocol.store.reader_group`` decides, and
``protocol.store.group_watch`` counts heartbeats. Source: RG2, RG9, RG13, RG18 to RG22 and RG27 of docs/spec/reader-
groups.md. Never reads on before it has looked whether it is still in the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakMethod

import pyarrow as pa

from headgate.environment import Clock, Thread, Threads
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.protocol.store.reader_group import (
    LOOKS_PER_LEASE,
    Committed,
    Event,
    Group,
    GroupSegment,
    Left,
    Lived,
    Passed,
    Watch,
)
from headgate.store.catalogue.records import GroupFound
from headgate.store.core import StoreCore
from headgate.store.reader import READ_ROWS, SegmentReader
from headgate.store.streams import OtherSchemaError


class GroupHeartbeat:
    """Says when a beat is due. If its caller may be busy, a thread beats meanwhile, and ends when that lasts too long.

    ``record_call`` and ``close`` are the reader's; beats may be counted in both threads.
    """

    def __init__(
        self, beat: Callable[[int], object], lease_ms: int, busy_ms: int | None, threads: Threads, clock: Clock
    ) -> None:
        """``beat`` says for the so-and-so-many-th time that the reader lives. ``busy_ms`` None: there is no thread.

        It is a method of the reader, which the heartbeat does not keep alive.
        """
        self.pause_ms = max(1, lease_ms // LOOKS_PER_LEASE)
        self._beat_of_reader = WeakMethod(beat)
        self._busy_ms = busy_ms
        self._threads = threads
        self._clock = clock
        self._numbers = itertools.count(1)
        self._beaten_ms = self._here_ms = clock.monotonic_ms()
        self._changed = threads.condition()
        self._thread: Thread | None = None
        self._is_closed = False

    @property
    def is_due(self) -> bool:
        """Whether so much of the lease has passed since the last beat that another one is wanted."""
        return self.due_in_ms == 0

    @property
    def due_in_ms(self) -> int:
        """How long it is until a beat is due."""
        return max(0, self._beaten_ms + self.pause_ms - self._clock.monotonic_ms())

    def next_number(self) -> int:
        """Return the number of the next beat: no two are equal."""
        return next(self._numbers)

    def record_beat(self) -> None:
        """Others can hear the last beat."""
        self._beaten_ms = self._clock.monotonic_ms()

    def record_call(self) -> None:
        """The reader was called; from now on its caller may be busy for a while."""
        if self._busy_ms is None:
            return
        with self._changed:
            self._here_ms = self._clock.monotonic_ms()
            if self._thread is None and not self._is_closed:
                thread = self._threads.thread(self._run, "headgate-group-heart")
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread, for good. Repeating is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._wait_until_due():
            try:
                self._beat(self.next_number())
            except StorageError:
                continue  # a quarter of the lease later there is another one
            except HeadgateError:  # the reader is out of the group, or there is no group: its next call says so
                with self._changed:
                    self._is_closed = True

    def _beat(self, number: int) -> None:
        """Have the reader beat; without a reader this was the last one."""
        beat = self._beat_of_reader()
        if beat is not None:
            beat(number)
            return
        with self._changed:
            self._is_closed = True

    def _wait_until_due(self) -> bool:
        """Wait until a beat is due; False when this thread is not needed, or not allowed, any more."""
        with self._changed:
            while not self._is_closed:
                now_ms = self._clock.monotonic_ms()
                busy_left_ms = self._here_ms + (self._busy_ms or 0) - now_ms
                if busy_left_ms <= 0:
                    break  # RG22: a reader that hangs is not alive; its next call begins this again
                due_in_ms = self._beaten_ms + self.pause_ms - now_ms
                if due_in_ms <= 0:
                    self._beaten_ms = now_ms
                    return True
                self._changed.wait_for(lambda: self._is_closed, min(due_in_ms, busy_left_ms) / 1_000)
            self._thread = None
            return False


LOOK_PAUSE_MS = 10
"""A reader that waits looks so often whether the store has changed, which costs it microseconds."""


@dataclass(frozen=True, slots=True)
class GroupEvents:
    """Events of one segment, from ``position`` on, as ``GroupReader.read`` returns them."""

    stream: str
    segment: int
    position: int
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """Marks ``checkpoint`` in a reader's input: all events that the reader has returned so far lie before it.

    The next call of the reader confirms that its caller has received the marker.
    """

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Membership:
    """One life of a reader.

    Attributes:
        commit_every_ms: None: only ``commit``, ``leave`` and markers make positions durable.
        busy_ms: for so long between two calls a thread sends heartbeats; None: there is no thread.
    """

    reader: str
    token: str
    lease_ms: int
    commit_every_ms: int | None
    busy_ms: int | None = None


class GroupReader:  # RG20
    """Reads its share of a group's streams. Use it in one thread at a time.

    The events that ``read`` returns count as processed when ``read`` is called again. With ``commit_every=None``, they
    count as processed when ``commit`` is called, or when a marker has been passed. As a context manager, the reader
    leaves the group at the end of the block, and commits before that unless an error ended the block.
    """

    def __init__(
        self,
        core: StoreCore,
        found: GroupFound,
        life: Membership,
    ) -> None:
        """Use ``ReaderGroup.join``."""
        self._core = core
        self._catalogue = core.catalogue
        self._name = found.name
        self._group = found.group
        self._life = life
        self._clock = core.clock
        self._watch = Watch()
        self._segments: dict[GroupSegment, SegmentReader] = {}
        self._latest: GroupSegment | None = None
        self._returned: GroupEvents | CheckpointMarker | None = None
        self._told: str | None = None
        self._changes: int | None = None
        self._pause = core.threads.event()
        self._heart = GroupHeartbeat(self._beat, life.lease_ms, life.busy_ms, core.threads, core.clock)
        self._watched_ms = self._committed_ms = core.clock.monotonic_ms()
        self._heart.record_call()

    @property
    def reader_id(self) -> str:
        """The name of this reader in the group."""
        return self._life.reader

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """The segments that it reads, as (stream, segment), when it last looked at the group."""
        return self._group.shares.of(self._life.reader)

    @property
    def has_ended(self) -> bool:  # RG5
        """Whether nothing is left: all streams are sealed, and all events lie before durable positions."""
        return not self._group.readable

    def read(self, rows_max: int = READ_ROWS, *, timeout: Duration = 0) -> GroupEvents | CheckpointMarker | None:
        """Return the next events of one segment, or the marker of a checkpoint, or None if there is nothing to read.

        Args:
            rows_max: the maximum number of events.
            timeout: how long to wait for something to read. It does not wait if ``has_ended`` is True.

        Raises:
            FencedError: this reader is no longer in the group: join again. Other readers read what it had not
                committed.
            TruncatedError, CorruptionError, UsageError: see ``SegmentReader.read``.
        """
        until_ms = self._clock.monotonic_ms() + duration_ms(timeout, "timeout")
        found = self._read_now(rows_max)
        while found is None and not self.has_ended and self._clock.monotonic_ms() < until_ms:
            self._wait(until_ms)
            found = self._read_now(rows_max)
        return found

    def unread(self, found: GroupEvents | CheckpointMarker) -> None:  # AC4
        """Undo the latest ``read``, whose events were not used.

        The next ``read`` returns them again, unless the reader has given up the segment in the meantime. No commit
        counts them.

        Raises:
            UsageError: these are not the events that the latest ``read`` returned.
        """
        if found is not self._returned:
            raise UsageError(f"only what the latest read of reader '{self._life.reader}' returned can be taken back")
        self._returned = None
        if isinstance(found, CheckpointMarker):
            self._told = None
            return
        segment = GroupSegment(found.stream, found.segment)
        if segment in self._segments:
            self._segments[segment] = _open_segment(self._core, self._group, segment, found.position)

    @property
    def due_in_ms(self) -> int:
        """After how many ms ``read`` has to be called again to report to the group, even without new events."""
        if self._is_commit_due():
            return 0
        due_in_ms = self._heart.due_in_ms
        commit_in_ms = self._committed_ms + (self._life.commit_every_ms or 0) - self._clock.monotonic_ms()
        return min(due_in_ms, commit_in_ms) if commit_in_ms > 0 else due_in_ms

    def _read_now(self, rows_max: int) -> GroupEvents | CheckpointMarker | None:
        self._pass_marker()
        if self._is_commit_due():
            self.commit()
        self.heartbeat()
        self._told = self._group.owed(self._life.reader)
        self._returned = self._next_events(rows_max) if self._told is None else CheckpointMarker(self._told)
        return self._returned

    def commit(self) -> None:  # RG2
        """Confirm that all returned events have been processed, so that they are not read again.

        Raises:
            FencedError: this reader is no longer in the group. Other readers read what it had not committed.
        """
        self._heart.record_call()
        if not self._pass_marker():
            self._change(Committed(self._life.reader, self._life.token, self._positions(), self._ended()))
        self._committed_ms = self._clock.monotonic_ms()

    def heartbeat(self) -> None:
        """Report that this reader is alive, if that is due, and look at the group. ``read`` does both, too.

        If you work for a long time between two reads, call it several times per lease, or join with ``busy_at_most``.

        Raises:
            FencedError: this reader is no longer in the group.
        """
        self._heart.record_call()
        if self._heart.is_due:
            self._change(self._lived(self._heart.next_number()))
            self._heart.record_beat()
        self._look()
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._watched_ms >= self._heart.pause_ms:
            self._watched_ms = now_ms
            others = {name: x for name, x in self._group.readers.items() if name != self._life.reader}
            for silent in self._watch.look(others, now_ms):
                self._change(silent)

    def leave(self, *, commits: bool = True) -> None:
        """Leave the group and give up all segments. With ``commits``, all returned events count as processed.

        The call can be repeated.

        Raises:
            FencedError: with ``commits``, this reader is no longer in the group.
        """
        self._heart.close()
        if commits and self._told != _GONE:
            self.commit()
        self._told = _GONE
        self._catalogue.change_group(self._name, Left(self._life.reader, self._life.token))
        self._segments.clear()

    def __enter__(self) -> GroupReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.leave(commits=kind is None)

    def _wait(self, until_ms: int) -> None:
        """Wait until the store has changed since this reader saw it last, or something is due (RG21)."""
        until_ms = min(until_ms, self._clock.monotonic_ms() + self._heart.pause_ms)
        while self._changes is not None and (left_ms := until_ms - self._clock.monotonic_ms()) > 0:
            if self._catalogue.changes() != self._changes or self._is_commit_due():
                return
            self._pause.wait(min(left_ms, LOOK_PAUSE_MS) / 1_000)

    def _lived(self, number: int) -> Lived:
        return Lived(self._life.reader, self._life.token, number)

    def _beat(self, number: int) -> None:
        """Say that it lives, in the heart's thread: what has changed the reader sees when it looks."""
        self._catalogue.change_group(self._name, self._lived(number))

    def _pass_marker(self) -> bool:
        """Pass the marker that the caller was told of, if any (RG9)."""
        if self._told is None or self._told == _GONE:
            return False
        positions, ended = self._positions(), self._ended()
        self._change(Passed(self._life.reader, self._life.token, self._told, positions, ended))
        self._told = None
        return True

    def _is_commit_due(self) -> bool:
        """Whether what was returned is to be made durable now (RG19)."""
        if self._life.commit_every_ms is None:
            return False
        if self._clock.monotonic_ms() - self._committed_ms >= self._life.commit_every_ms:
            moved = any(x.position > self._group.position(s) for s, x in self._segments.items())
            return moved or bool(self._ended())
        return bool(self._ended()) or any(x in self._group.shares.leaving for x in self.segments)

    def _next_events(self, rows_max: int) -> GroupEvents | None:
        own = [x for x in self._group.shares.of(self._life.reader) if x not in self._group.shares.leaving]
        later = [x for x in own if self._latest is not None and x > self._latest]  # in turn
        for segment in [*later, *(x for x in own if x not in later)]:
            if segment not in self._segments:
                self._segments[segment] = _open_segment(self._core, self._group, segment, self._group.position(segment))
            position = self._segments[segment].position
            batch = self._read_segment(segment, rows_max)
            if batch is not None:
                self._latest = segment
                return GroupEvents(segment.stream, segment.segment, position, batch)
        return None

    def _read_segment(self, segment: GroupSegment, rows_max: int) -> pa.RecordBatch | None:
        """Return the next events of a segment, in a schema at least as new as that of each of them (RG27)."""
        while True:
            reader = self._segments[segment]
            position = reader.position
            try:
                batch = reader.read(rows_max)
            except OtherSchemaError:
                newer = _open_segment(self._core, self._group, segment, position)
                if newer.stream.schema_version == reader.stream.schema_version:
                    raise
                self._segments[segment] = newer
                continue
            if batch is None or reader.newest_schema <= reader.stream.schema_version:
                return batch
            reader.back_to(position)  # also if it cannot be opened again now
            self._segments[segment] = _open_segment(self._core, self._group, segment, position)

    def _positions(self) -> Mapping[GroupSegment, int]:
        return {segment: x.position for segment, x in self._segments.items()}

    def _ended(self) -> tuple[str, ...]:
        return tuple(sorted({segment.stream for segment, x in self._segments.items() if x.has_ended()}))

    def _change(self, event: Event) -> None:
        self._changes = None  # if the answer is lost, it has to look before it reads on (RG18)
        self._take(self._catalogue.change_group(self._name, event))

    def _look(self) -> None:
        changes = self._catalogue.changes()
        if changes != self._changes:
            self._take(self._catalogue.find_group(self._name))
            self._changes = changes

    def _take(self, found: GroupFound) -> None:
        member = found.group.readers.get(self._life.reader)
        if member is None or member.token != self._life.token:  # RG12
            raise FencedError(
                f"reader '{self._life.reader}' is not in reader group '{self._name}' any more: it was considered dead, "
                "has left, or the group was reset since it joined; join again"
            )
        self._group = found.group
        own = set(found.group.shares.of(self._life.reader))
        self._segments = {
            segment: x
            for segment, x in self._segments.items()
            if segment in own and x.position >= found.group.position(segment)  # else others had it in between
        }


_GONE = ""
"""Instead of a marker: it has left."""


def _open_segment(core: StoreCore, group: Group, segment: GroupSegment, position: int) -> SegmentReader:
    stream = core.catalogue.find_stream(segment.stream)
    if stream.stream_id != group.streams[segment.stream]:
        raise UsageError(f"stream '{segment.stream}' was deleted and created again; reset the reader group to read it")
    return SegmentReader(core, stream, segment.segment, position)
