"""Reader groups of a store: the part of a store that makes, finds and deletes them.

Counterpart: ``store.Store``, which is all of this too; ``reader_groups.ReaderGroup``. Source:
docs/spec/reader-groups.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.errors import UsageError
from headgate.protocol.store.group_claims import Claim, Claimant
from headgate.protocol.store.group_shares import GroupSegment
from headgate.protocol.store.reader_group import Group
from headgate.store.claimed_groups import ClaimedGroup, ClaimedReader, joined
from headgate.store.cuts import StreamCut
from headgate.store.followed_store import FollowedStore
from headgate.store.reader import SegmentReader
from headgate.store.reader_groups import ReaderGroup, group_start
from headgate.threads import Threads


class GroupedStore(FollowedStore):
    """The part of a store that makes, finds and deletes reader groups."""

    _new_name: Callable[[], str]
    _threads: Threads

    def reader_group(
        self,
        name: str,
        streams: str | Sequence[str] = (),
        *,
        start: str = "earliest",
        cuts: Sequence[StreamCut] = (),
        checkpoints_kept: int = 1,
    ) -> ReaderGroup:  # RG17
        """Return a reader group; create it if it does not exist and ``streams`` are given.

        The events that a group still needs are not truncated, until the group is deleted.

        Args:
            name: the name of the group.
            streams: the streams that it reads; may be left out for an existing group.
            start: where a new group begins, "earliest" or "latest", in the streams that have no cut in ``cuts``.
            cuts: the cuts at which a new group begins in its streams.
            checkpoints_kept: how many completed checkpoints a new group can go back to.

        Raises:
            UsageError: the group does not exist and no stream is given, a stream is missing, or the group reads other
                streams.
            TruncatedError: the events at which it would begin no longer exist.
        """
        wanted = (streams,) if isinstance(streams, str) else tuple(dict.fromkeys(streams))
        begin = group_start(start, cuts)
        unknown = sorted(begin.cuts.keys() - set(wanted))
        if unknown:
            raise UsageError(f"reader group '{name}' does not read stream '{unknown[0]}', of which a cut is given")
        if checkpoints_kept < 1:
            raise UsageError(f"checkpoints_kept is at least 1, not {checkpoints_kept}")
        if wanted:
            self._catalogue.create_group(name, wanted, begin, checkpoints_kept)
        else:
            self._catalogue.find_group(name)
        return ReaderGroup(self._catalogue, self._open_segment, name, self._new_name, self._threads, self._clock)

    def reader_groups(self) -> list[str]:
        """Return the names of the reader groups."""
        return self._catalogue.groups()

    def delete_reader_group(self, name: str) -> bool:
        """Delete a reader group and release the events that it holds; return whether it existed. Its readers fail."""
        return self._catalogue.delete_group(name)

    def claimed_group(self, name: str, stream: str, claim: Claim) -> ClaimedGroup:
        """Return a group that a source of a pipeline reads by, for its driver (docs/spec/group-source.md)."""
        return ClaimedGroup(self._catalogue, name, stream, claim, self._new_name)

    def claimed_reader(self, name: str, reader: str, claimant: Claimant, expected: int) -> ClaimedReader:
        """Join such a group, for one of ``expected`` subtasks.

        Raises:
            FencedError: another generation of the pipeline has it.
        """
        return joined(self._catalogue, name, reader, self._new_name(), claimant, expected)

    def _open_segment(self, group: Group, segment: GroupSegment, position: int) -> SegmentReader:
        stream = self._catalogue.find_stream(segment.stream)
        if stream.stream_id != group.streams[segment.stream]:
            raise UsageError(
                f"stream '{segment.stream}' was deleted and created again; reset the reader group to read it"
            )
        return SegmentReader(self._catalogue, self._storage, stream, segment.segment, position, self._fetching)
