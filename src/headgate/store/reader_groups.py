"""A reader group as its users see it: who joins, checkpoints, resets, and what is unread.

Counterpart: ``grouped_store.GroupedStore`` makes it; ``group_reader`` reads. Source: docs/spec/reader-groups.md.
Never keeps the state of the group: each call asks the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headgate.clock import Clock
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.protocol.store.group_shares import GroupSegment
from headgate.protocol.store.group_watch import LOOKS_PER_LEASE, Watch
from headgate.protocol.store.reader_group import CheckpointAsked, CheckpointForgotten, Group, Joined, Member
from headgate.store.catalogue.base import Catalogue, GroupStart
from headgate.store.cuts import StreamCut
from headgate.store.group_reader import GroupReader, Life
from headgate.store.reader import SegmentReader
from headgate.threads import Threads

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
        free: what could be read, and nobody has.
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
    """Readers in any number of processes that share streams: each event goes to one of them."""

    def __init__(
        self,
        catalogue: Catalogue,
        open_segment: Callable[[Group, GroupSegment, int], SegmentReader],
        name: str,
        new_token: Callable[[], str],
        threads: Threads,
        clock: Clock,
    ) -> None:
        """Use ``Store.reader_group``."""
        self.name = name
        self._catalogue = catalogue
        self._open_segment = open_segment
        self._new_token = new_token
        self._threads = threads
        self._clock = clock
        self._watch = Watch()
        self._watching = threads.lock()  # several threads may share the group

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
            reader_id: its name in the group.
            lease: others take it for dead when they have heard nothing of it for so long.
            commit_every: with ``read``, so often, what earlier reads returned counts as processed; None: only with
                ``commit``, ``leave`` and markers.
            busy_at_most: between two calls of the reader so much time may pass, whatever the lease: a thread says
                meanwhile that it lives. None: whoever is busy for longer than the lease calls ``heartbeat``.
            takes_over: whoever is in the group under this name is dead.
            timeout: if the name is in the group, so long it waits whether that one says that it lives; a dead one is
                gone after its lease.

        Raises:
            UsageError: the name is in the group already, or there is no such group any more.
        """
        until_ms = self._clock.monotonic_ms() + duration_ms(timeout, "timeout")
        commit_every_ms = None if commit_every is None else duration_ms(commit_every, "commit_every")
        lease_ms = duration_ms(lease, "lease")
        if not reader_id or lease_ms < 1:
            raise UsageError("a reader of a group needs a name, and a lease that is longer than nothing")
        busy_ms = None if busy_at_most is None else duration_ms(busy_at_most, "busy_at_most")
        life = Life(reader_id, self._new_token(), lease_ms, commit_every_ms, busy_ms)
        if not takes_over:
            self._wait_for_name(reader_id, until_ms)
        found = self._catalogue.change_group(self.name, Joined(reader_id, life.token, lease_ms, takes_over))
        return GroupReader(self._catalogue, self._open_segment, found, life, self._threads, self._clock)

    def _wait_for_name(self, reader_id: str, until_ms: int) -> None:
        """Have whoever has the name taken for dead if it is silent for its lease, so long as there is time (RG23)."""
        pause = self._threads.event()
        while (pause_ms := self.look_for(reader_id)) and (left_ms := until_ms - self._clock.monotonic_ms()) > 0:
            pause.wait(min(pause_ms, left_ms) / 1_000)

    def look_for(self, reader_id: str) -> int:
        """Watch the readers once (RG13); return in how many ms to look again whether a name is free; 0: it is."""
        readers = self._catalogue.find_group(self.name).group.readers
        self._look_at(readers)
        return max(1, readers[reader_id].lease_ms // LOOKS_PER_LEASE) if reader_id in readers else 0

    def _look_at(self, readers: Mapping[str, Member]) -> None:
        """Take for dead whoever was silent for its lease while somebody looked here (RG13)."""
        with self._watching:
            silent_ones = self._watch.look(readers, self._clock.monotonic_ms())
        for silent in silent_ones:
            self._catalogue.change_group(self.name, silent)

    def checkpoint(self, name: str) -> bool:
        """Ask for a checkpoint, and return whether it is complete; asking again tells how far it is (RG8).

        Each reader gets a marker; its next call after that says that it has passed. Whoever asks again and again
        watches as readers do: one that is silent for its lease is taken for dead, and has passed.

        Raises:
            UsageError: three are open already.
        """
        self._look_at(self._catalogue.find_group(self.name).group.readers)
        found = self._catalogue.change_group(self.name, CheckpointAsked(name)).group.checkpoint(name)
        return found is not None and found.is_complete

    def checkpoints(self) -> dict[str, bool]:
        """Return the checkpoints that are open or kept, the oldest first, and whether each is complete."""
        return {x.name: x.is_complete for x in self._catalogue.find_group(self.name).group.checkpoints}

    def forget_checkpoint(self, name: str) -> None:
        """Give up a checkpoint, open or complete, and what it holds. Repeating is fine."""
        self._catalogue.change_group(self.name, CheckpointForgotten(name))

    def reset(self, *, checkpoint: str | None = None, start: str = "earliest", cuts: Sequence[StreamCut] = ()) -> None:
        """Read anew from somewhere on. All readers are fenced at once, and have to join again (RG15).

        Args:
            checkpoint: the name of a completed one that is kept; or
            start: "earliest" or "latest", for streams without
            cuts: where they begin.

        Raises:
            TruncatedError: what it would begin with is gone.
            UsageError: there is no such checkpoint, or a cut is of another stream.
        """
        found = group_start(start, cuts)
        unknown = sorted(found.cuts.keys() - self.streams())
        if unknown:
            raise UsageError(f"reader group '{self.name}' does not read stream '{unknown[0]}'")
        self._catalogue.reset_group(self.name, self._new_token(), found, checkpoint)

    def cut(self, checkpoint: str | None = None) -> dict[str, StreamCut]:
        """Return, by stream, the cut of a completed checkpoint, or of the durable positions (RG10)."""
        streams = self._catalogue.find_group(self.name).group.streams
        found = self._catalogue.group_cuts(self.name, checkpoint)
        return {name: StreamCut(name, streams[name], positions) for name, positions in found.items()}

    def unread_bytes(self) -> int:
        """Return the size of what lies behind the durable positions, as it is stored. It reads the whole catalogue."""
        return sum(self.unread().values())

    def unread(self) -> dict[tuple[str, int], int]:
        """Return the same by (stream, segment), of those where there is anything."""
        return {(segment.stream, segment.segment): x for segment, x in self._catalogue.group_unread(self.name).items()}

    def describe(self) -> GroupInfo:
        """Return how the group is now."""
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
        """Return who is in the group, and what each reads, as (stream, segment)."""
        return dict(self.describe().readers)

    def streams(self) -> list[str]:
        """Return the names of its streams."""
        return sorted(self._catalogue.find_group(self.name).group.streams)


def group_start(start: str, cuts: Sequence[StreamCut]) -> GroupStart:
    """Return where a group begins.

    Raises:
        UsageError: ``start`` is neither "earliest" nor "latest".
    """
    if start not in ("earliest", "latest"):
        raise UsageError(f"start is 'earliest' or 'latest', not {start!r}; give stream cuts as cuts=[...]")
    return GroupStart(start == "latest", {cut.stream: (cut.stream_id, cut.positions) for cut in cuts})
