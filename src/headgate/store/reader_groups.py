"""A reader group as its users see it: who joins, checkpoints, resets, and what is unread.

Counterpart: ``grouped_store.GroupedStore`` makes it; ``group_reader`` reads. Source: docs/spec/reader-groups.md.
Never keeps the state of the group: each call asks the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.protocol.store.reader_group import (
    LOOKS_PER_LEASE,
    CheckpointAsked,
    CheckpointForgotten,
    Joined,
    Member,
    Watch,
)
from headgate.store.catalogue.records import GroupStart
from headgate.store.core import StoreCore
from headgate.store.group_reader import GroupReader, Membership
from headgate.store.streams import StreamCut

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
        """Wait until the name is free: a reader that is silent for its lease is taken for dead (RG23)."""
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
        """Return the stored size of all events behind the durable positions. This reads the whole catalogue."""
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
