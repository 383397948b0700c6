"""Reader groups: joining, checkpoints, reset, what is unread; and a reader of a group with its heartbeat.

Counterparts: ``protocol.store.reader_group`` decides. Source:
docs/spec/reader-groups.md. The state of a group is in the catalogue only: each call asks for it, and a reader never
reads on before it has looked whether it is still in the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakMethod

import pyarrow as pa

from headgate.environment import Clock, Thread, Threads
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.model.config import Duration, check_switches, duration_ms
from headgate.protocol.store.reader_group import (
    LOOKS_PER_LEASE,
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    Event,
    Group,
    GroupSegment,
    Joined,
    Left,
    Lived,
    Member,
    Passed,
    Watch,
)
from headgate.store.catalogue.records import GroupFound, GroupStart
from headgate.store.core import StoreCore
from headgate.store.reader import READ_ROWS, SegmentReader
from headgate.store.streams import OtherSchemaError, StreamCut


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
                # only when it runs: if no thread can be begun, the next call tries again
                self._thread = thread

    def close(self) -> None:
        """End the thread, for good. Repeating is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        # without the lock, which the thread takes to notice that it is over
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
                    break  # a reader that hangs is not alive; its next call begins this again
                due_in_ms = self._beaten_ms + self.pause_ms - now_ms
                if due_in_ms <= 0:
                    # before the beat: one that fails is repeated a quarter of the lease later, not at once
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

    def unread(self, found: GroupEvents | CheckpointMarker) -> None:
        """Undo the latest ``read`` if its events were not used.

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
        reader = self._segments.get(GroupSegment(found.stream, found.segment))
        if reader is not None:
            reader.back_to(found.position)  # asks the store for nothing, so it cannot fail and leave them as processed

    @property
    def due_in_ms(self) -> int:
        """After how many ms ``read`` has to be called again to report to the group, even without new events."""
        if self._is_commit_due():
            return 0
        due_in_ms = self._heart.due_in_ms
        commit_in_ms = self._committed_ms + (self._life.commit_every_ms or 0) - self._clock.monotonic_ms()
        return min(due_in_ms, commit_in_ms) if commit_in_ms > 0 else due_in_ms

    def _read_now(self, rows_max: int) -> GroupEvents | CheckpointMarker | None:
        # this call says that what was returned is processed: durable first, then a look whether it is still a
        # reader of its segments, and only then new events
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
        # passing a marker makes the positions durable, too
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
        check_switches("leave: ", commits=commits)
        # first: afterwards no beat is under way, which would be that of a reader that has left
        self._heart.close()
        if commits and self._told != _GONE:
            self.commit()
        # before it leaves: a repeat after a lost answer must not commit, as it may be out of the group
        self._told = _GONE
        self._catalogue.change_group(self._name, Left(self._life.reader, self._life.token))
        self._segments.clear()

    def __enter__(self) -> GroupReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.leave(commits=kind is None)

    def _wait(self, until_ms: int) -> None:
        """Wait until the store has changed since this reader saw it last, or something is due."""
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
        """Pass the marker that was returned to the caller, if any (RG9)."""
        if self._told is None or self._told == _GONE:
            return False
        positions, ended = self._positions(), self._ended()
        self._change(Passed(self._life.reader, self._life.token, self._told, positions, ended))
        self._told = None
        return True

    def _is_commit_due(self) -> bool:
        """Whether what was returned is to be made durable now."""
        if self._life.commit_every_ms is None:
            return False
        if self._clock.monotonic_ms() - self._committed_ms >= self._life.commit_every_ms:
            moved = any(x.position > self._group.position(s) for s, x in self._segments.items())
            return moved or bool(self._ended())
        # others wait for these segments, or for what follows them (RG4, RG7): that is not put off
        return bool(self._ended()) or any(x in self._group.shares.leaving for x in self.segments)

    def _next_events(self, rows_max: int) -> GroupEvents | None:
        # what is to be given up is not read any further: the next commit releases it where it is
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
        """Return the next events of a segment, in a schema at least as new as that of each of them."""
        while True:
            reader = self._segments[segment]
            position = reader.position
            try:
                # a stream may get columns between two reads; events are never returned without them
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
        self._changes = None  # if the answer is lost, it has to look before it reads on
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


LEASE = "10s"
COMMIT_EVERY = "1s"


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A reader group at one moment.

    Attributes:
        name: of the group.
        streams: what it reads.
        epoch: from 1; one more with every reset.
        checkpoints_kept: so many completed checkpoints it can go back to.
        readers: who is in it, and what each reads, as (stream, segment).
        free: readable segments that no reader has.
        checkpoints: those that are open or kept, the oldest first, and who has not passed each yet.
    """

    name: str
    streams: tuple[str, ...]
    epoch: int
    checkpoints_kept: int
    readers: Mapping[str, tuple[tuple[str, int], ...]]
    free: tuple[tuple[str, int], ...]
    checkpoints: Mapping[str, tuple[str, ...]]


class ReaderGroup:
    """A group of readers, in any number of processes, that share streams: each event goes to one of the readers."""

    def __init__(self, core: StoreCore, name: str) -> None:
        """Use ``Store.reader_group``."""
        self.name = name
        self._core = core
        self._catalogue = core.catalogue
        self._clock = core.clock
        self._watch = Watch()
        self._watching = core.threads.lock()  # several threads may share the group

    def join(
        self,
        reader_id: str,
        *,
        lease: Duration = LEASE,
        commit_every: Duration | None = COMMIT_EVERY,
        busy_at_most: Duration | None = None,
        takes_over: bool = False,
        timeout: Duration = 0,
    ) -> GroupReader:
        """Return a new reader of the group.

        Args:
            reader_id: the name of the reader in the group.
            lease: if the reader does not report for this long, the other readers consider it dead.
            commit_every: how often ``read`` commits the events of earlier reads as processed. None: only ``commit``,
                ``leave`` and markers do.
            busy_at_most: how much time may pass between two calls of the reader, whatever the lease is. Meanwhile a
                thread reports that the reader is alive. None: call ``heartbeat`` if you are busy for longer than the
                lease.
            takes_over: states that a reader of this name that is still in the group is dead.
            timeout: if a reader of this name is in the group, how long to wait for it to disappear. A dead reader
                disappears after its lease.

        Raises:
            UsageError: a reader of this name is in the group, or the group no longer exists.
        """
        check_switches("join: ", takes_over=takes_over)
        until_ms = self._clock.monotonic_ms() + duration_ms(timeout, "timeout")
        commit_every_ms = None if commit_every is None else duration_ms(commit_every, "commit_every")
        lease_ms = duration_ms(lease, "lease")
        if not reader_id or lease_ms < 1:
            raise UsageError("a reader of a group needs a name, and a lease that is longer than nothing")
        busy_ms = None if busy_at_most is None else duration_ms(busy_at_most, "busy_at_most")
        life = Membership(reader_id, self._core.new_name(), lease_ms, commit_every_ms, busy_ms)
        if not takes_over:
            self._wait_for_name(reader_id, until_ms)
        found = self._catalogue.change_group(self.name, Joined(reader_id, life.token, lease_ms, takes_over))
        return GroupReader(self._core, found, life)

    def _wait_for_name(self, reader_id: str, until_ms: int) -> None:
        """Wait until the name is free: a reader that is silent for its lease is taken for dead."""
        pause = self._core.threads.event()
        while (pause_ms := self.look_for(reader_id)) and (left_ms := until_ms - self._clock.monotonic_ms()) > 0:
            pause.wait(min(pause_ms, left_ms) / 1_000)

    def look_for(self, reader_id: str) -> int:  # RG13
        """Watch the readers once. Return after how many ms to check again whether a name is free; 0: it is."""
        readers = self._catalogue.find_group(self.name).group.readers
        self._look_at(readers)
        return max(1, readers[reader_id].lease_ms // LOOKS_PER_LEASE) if reader_id in readers else 0

    def _look_at(self, readers: Mapping[str, Member]) -> None:
        """Take readers for dead that were silent for their lease while this group was watched (RG13)."""
        with self._watching:
            # only the look is under the lock: the catalogue may take long
            silent_ones = self._watch.look(readers, self._clock.monotonic_ms())
        for silent in silent_ones:
            self._catalogue.change_group(self.name, silent)

    def checkpoint(self, name: str) -> bool:  # RG8
        """Request a checkpoint, and return whether it is complete. Call it again to see whether it has completed.

        Each reader receives a marker, and confirms it with its next call. While you call this repeatedly, it also
        watches the readers: a reader that is silent for its lease counts as dead, and as having passed the marker.

        Raises:
            UsageError: three checkpoints are already open.
        """
        self._look_at(self._catalogue.find_group(self.name).group.readers)
        found = self._catalogue.change_group(self.name, CheckpointAsked(name)).group.checkpoint(name)
        return found is not None and found.is_complete

    def checkpoints(self) -> dict[str, bool]:
        """Return the open and the kept checkpoints, oldest first, and whether each is complete."""
        return {x.name: x.is_complete for x in self._catalogue.find_group(self.name).group.checkpoints}

    def forget_checkpoint(self, name: str) -> None:
        """Forget an open or complete checkpoint, and release the events that it holds. The call can be repeated."""
        self._catalogue.change_group(self.name, CheckpointForgotten(name))

    def reset(
        self, *, checkpoint: str | None = None, start: str = "earliest", cuts: Sequence[StreamCut] = ()
    ) -> None:  # RG15
        """Make the group continue from another place. All readers are fenced at once and have to join again.

        Pass either ``checkpoint``, or ``start`` and ``cuts``.

        Args:
            checkpoint: the name of a completed checkpoint that is kept.
            start: "earliest" or "latest", for the streams that have no cut in ``cuts``.
            cuts: the cuts at which streams begin.

        Raises:
            TruncatedError: the events at the new place no longer exist.
            UsageError: there is no such checkpoint, or a cut is of another stream.
        """
        found = group_start(start, cuts)
        unknown = sorted(found.cuts.keys() - self.streams())
        if unknown:
            raise UsageError(f"reader group '{self.name}' does not read stream '{unknown[0]}'")
        self._catalogue.reset_group(self.name, self._core.new_name(), found, checkpoint)

    def cut(self, checkpoint: str | None = None) -> dict[str, StreamCut]:  # RG10
        """Return, by stream, the cut of a completed checkpoint, or of the durable positions.

        A stream that was deleted has none.
        """
        streams = self._catalogue.find_group(self.name).group.streams
        found = self._catalogue.group_cuts(self.name, checkpoint)
        return {name: StreamCut(name, streams[name], positions) for name, positions in found.items()}

    def unread_bytes(self) -> int:
        """Return the stored size of all events after the durable positions. This reads the whole catalogue."""
        return sum(self.unread().values())

    def unread(self) -> dict[tuple[str, int], int]:
        """Return the stored size of unread events by (stream, segment), for all segments that have any.

        A stream that was deleted has none.
        """
        return {(segment.stream, segment.segment): x for segment, x in self._catalogue.group_unread(self.name).items()}

    def describe(self) -> GroupInfo:
        """Return the current state of the group."""
        group = self._catalogue.find_group(self.name).group
        return GroupInfo(
            self.name,
            tuple(sorted(group.streams)),
            group.epoch,
            group.kept,
            {name: tuple((x.stream, x.segment) for x in group.shares.of(name)) for name in sorted(group.readers)},
            tuple(sorted((x.stream, x.segment) for x in group.free)),
            {x.name: x.owed_by for x in group.checkpoints},
        )

    def readers(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return the readers in the group, and the segments that each reads, as (stream, segment)."""
        return dict(self.describe().readers)

    def streams(self) -> list[str]:
        """Return the names of the streams that the group reads."""
        return sorted(self._catalogue.find_group(self.name).group.streams)


def group_start(start: str, cuts: Sequence[StreamCut]) -> GroupStart:
    """Return where a group begins.

    Raises:
        UsageError: ``start`` is neither "earliest" nor "latest".
    """
    if start not in ("earliest", "latest"):
        raise UsageError(f"start is 'earliest' or 'latest', not {start!r}; give stream cuts as cuts=[...]")
    return GroupStart(start == "latest", {cut.stream: (cut.stream_id, cut.positions) for cut in cuts})
