"""What pipelines do with a store: ownership of output, markers of checkpoints, and reader groups of sources.

Counterparts: ``connectors.streams`` uses it; ``protocol.store.group_ownership`` decides which pipeline has a group.
Source: docs/spec/stream-store.md, docs/spec/lives.md, docs/spec/starting-over.md and
docs/spec/group-source.md. Never reads an event. A group of a pipeline has no lease: the pipeline notices itself when a
subtask is dead, and then all of its readers begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.pipeline_identity import Mine, Owner, PipelineIdentity
from headgate.protocol.store.group_ownership import Claim, Claimant
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    CheckpointForgotten,
    Group,
    GroupSegment,
    Joined,
    Passed,
)
from headgate.protocol.store.truncation import Extent
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import Contents, Frontier, GroupFound, GroupStart, Reading
from headgate.store.chunks import delete_quietly
from headgate.store.core import StoreCore
from headgate.store.streams import StreamCut, StreamInfo, StreamReset

CHECKPOINTS_KEPT = 16
"""More than a pipeline has at once: a completed one must be there when its cut is asked for."""

_PREFIX = "checkpoint-"


def checkpoint_name(checkpoint: int) -> str:
    """Return what the group calls a checkpoint of the pipeline."""
    return f"{_PREFIX}{checkpoint}"


class PipelineGroup:
    """The driver's half."""

    def __init__(self, core: StoreCore, name: str, stream: str, claim: Claim) -> None:
        """Use ``Pipelines.group``."""
        self.name = name
        self._core = core
        self._catalogue = core.catalogue
        self._stream = stream
        self._claim = claim
        self._claimant = Claimant(claim.source, claim.life, claim.generation)

    def begin(self, start: GroupStart) -> None:
        """Make the group if there is none, and have it begin at ``start``. Fences all readers; repeating is fine.

        Raises:
            FencedError: a newer generation has it.
            TruncatedError: what it would begin with is gone.
            UsageError: it belongs to another pipeline, or cannot be.
        """
        # one that is there stays as it is; the reset claims it, and fences the readers of former generations
        self._catalogue.create_group(self.name, [self._stream], start, CHECKPOINTS_KEPT, self._claim)
        self._catalogue.reset_group(self.name, self._core.new_name(), start, None, self._claim)

    def ask(self, checkpoint: int) -> bool:
        """Ask for a checkpoint, unless a reader has; return whether there is one now: not before all have joined.

        Raises:
            FencedError: a newer generation has the group.
        """
        claim = self._catalogue.find_group(self.name).group.claim
        if claim is not None and claim.generation == self._claim.generation and not claim.is_gathered:
            return False  # GS3: a reader that joins later would owe nothing
        self._catalogue.change_group(self.name, CheckpointAsked(checkpoint_name(checkpoint), self._claimant))
        return True

    def is_complete(self, checkpoint: int) -> bool:
        """Whether all readers have passed the marker of a checkpoint that was asked for.

        Raises:
            FencedError: a newer generation has the group.
            StorageError: the group does not know it any more. It is never asked for twice: who has passed it already
                would pass it again, somewhere else.
        """
        group = self._catalogue.find_group(self.name).group
        found = group.checkpoint(checkpoint_name(checkpoint))
        if group.claim is not None and group.claim.generation > self._claim.generation:
            raise FencedError(f"reader group '{self.name}'", self._claim.generation, group.claim.generation)
        if found is None:
            cause = "it was given up there"
            raise StorageError(f"complete checkpoint {checkpoint} of", f"reader group '{self.name}'", cause)
        return found.is_complete

    def cut(self, checkpoint: int) -> StreamCut:
        """Return the cut of a completed checkpoint.

        Raises:
            UsageError: the stream was deleted.
        """
        stream_id = self._catalogue.find_group(self.name).group.streams[self._stream]
        positions = self._catalogue.group_cuts(self.name, checkpoint_name(checkpoint)).get(self._stream)
        if positions is None:
            raise UsageError(f"stream '{self._stream}' was deleted while reader group '{self.name}' read it")
        return StreamCut(self._stream, stream_id, positions)

    def forget(self, first: int, last: int) -> None:
        """Forget the checkpoints ``first`` to ``last``: their cuts are in manifests, or not needed."""
        for name in [x.name for x in self._catalogue.find_group(self.name).group.checkpoints]:
            if first <= int(name.removeprefix(_PREFIX)) <= last:
                self._catalogue.change_group(self.name, CheckpointForgotten(name, self._claimant))


class PipelineGroupReader:
    """A subtask's half: what it is to read, and which markers it has to pass. One thread at a time."""

    def __init__(self, catalogue: Catalogue, name: str, reader: str, token: str, found: GroupFound) -> None:
        """Use ``Pipelines.join_group``."""
        self.reader = reader
        self._catalogue = catalogue
        self._name = name
        self._token = token
        self._changes: int | None = None
        self.group: Group = found.group
        """As it was when this reader looked last."""

    @property
    def is_gathered(self) -> bool:
        """Whether all readers have joined: before that no reader has a segment."""
        return self.group.claim is not None and self.group.claim.is_gathered

    @property
    def segments(self) -> tuple[GroupSegment, ...]:
        """What it reads."""
        return self.group.shares.of(self.reader)

    @property
    def owed(self) -> int | None:
        """The checkpoint with the next marker in its sequence of events."""
        name = self.group.owed(self.reader)
        return None if name is None else int(name.removeprefix(_PREFIX))

    def look(self) -> None:
        """See how the group is now, unless nothing has changed.

        Raises:
            FencedError: it is not in the group any more: another generation of the pipeline has begun.
        """
        changes = self._catalogue.changes()
        if changes != self._changes:
            self._take(_while_there(self._name, lambda: self._catalogue.find_group(self._name)))
            self._changes = changes  # taken before looking

    def passed(
        self, checkpoint: int, positions: Mapping[GroupSegment, int], ended: tuple[str, ...], claimant: Claimant
    ) -> None:
        """Say where the snapshot for ``checkpoint`` was taken; markers of older ones were passed with it.

        Asks for it if no reader has: one that is cut without a marker begins the checkpoint of the group.

        Raises:
            FencedError
        """
        self._look_anew()
        name = checkpoint_name(checkpoint)
        if self.group.checkpoint(name) is None:
            self._take(self._catalogue.change_group(self._name, CheckpointAsked(name, claimant)))
        owed = [x.name for x in self.group.checkpoints if self.reader in x.owed_by]
        for each in [x for x in owed if int(x.removeprefix(_PREFIX)) <= checkpoint]:
            event = Passed(self.reader, self._token, each, positions, ended)
            self._changes = None  # if the answer is lost, it has to look before it reads on
            self._take(self._catalogue.change_group(self._name, event))

    def _look_anew(self) -> None:
        self._changes = None
        self.look()

    def _take(self, found: GroupFound) -> None:
        member = found.group.readers.get(self.reader)
        if member is None or member.token != self._token:
            raise FencedError(
                f"reader '{self.reader}' is not in reader group '{self._name}' any more: another generation of the "
                "pipeline has begun"
            )
        self.group = found.group


def join_pipeline_group(
    catalogue: Catalogue, name: str, reader: str, token: str, claimant: Claimant, expected: int
) -> PipelineGroupReader:
    """Return a new reader; ``expected``: how many there will be.

    Raises:
        FencedError: another generation has the group.
        StorageError: the group was deleted meanwhile.
    """
    found = _while_there(
        name, lambda: catalogue.change_group(name, Joined(reader, token, 0, False, claimant, expected))
    )
    return PipelineGroupReader(catalogue, name, reader, token, found)


def _while_there(name: str, call: Callable[[], GroupFound]) -> GroupFound:
    """Call; a group that was deleted is made again when the next generation begins (GS5).

    Raises:
        StorageError: it was deleted.
    """
    try:
        return call()
    except UsageError as error:
        raise StorageError("read by", f"reader group '{name}'", str(error), is_transient=True) from error


class Pipelines:
    """What pipelines do with a store: ``Store.pipelines``."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def mark(self, stream: str, *, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
        """Record where every segment ends now, as a marker for a checkpoint of ``owner``.

        Return where the segments end that take events; the others have ended for good. Only readers of the owner
        see the marker. It takes no position in the stream.

        Raises:
            UsageError: there is no such stream.
        """
        return self._core.catalogue.mark(stream, owner, generation, checkpoint)

    def frontier(
        self, stream: str, *, owner: str, generation: int, segments: Collection[int] | None = None
    ) -> Frontier:
        """Return how far a reader that looks for markers of ``owner`` may read, and the markers before that.

        ``segments``: those that it reads; None: all that the stream ever had.
        """
        return self._core.catalogue.frontier(stream, owner, generation, None if segments is None else sorted(segments))

    def unmark(self, *, owner: str, generation: int, first: int, last: int) -> None:
        """Forget the markers of checkpoints ``first`` to ``last`` of one generation of ``owner``."""
        self._core.catalogue.unmark(owner, generation, first, last)

    def unmark_others(self, *, owner: str, generation: int) -> None:
        """Forget the markers of all generations of ``owner`` but this one."""
        self._core.catalogue.unmark_others(owner, generation)

    def pass_segments(self, stream: StreamInfo, reader: Reading, segments: Collection[int]) -> None:
        """Record that a pipeline has processed everything in these closed segments."""
        self._core.catalogue.pass_segments(stream, reader, segments)

    def passed(self, stream: StreamInfo, reader: Reading) -> set[int]:
        """Return the segments that a pipeline has passed."""
        return self._core.catalogue.passed(stream, reader)

    def look(self, stream: StreamInfo) -> tuple[int, bool]:
        """Return the number of a stream's present layout, and whether the stream is sealed. Takes some µs."""
        return self._core.catalogue.look(stream)

    def layout_and_extents(self, stream: StreamInfo) -> tuple[Layout, dict[int, Extent]]:
        """Return the segments of a stream, with the head and the end of each, as of one moment."""
        return self._core.catalogue.layout_and_extents(stream)

    def owner(self, owner: str, stream: str = "", of: str = "") -> Owner:
        """Return the life of a pipeline that this store has recorded for ``owner`` (docs/spec/lives.md).

        ``others``: the other owners whose names begin with ``of`` and that have written to ``stream``.
        """
        return self._core.catalogue.owner(owner, stream, of)

    def own(self, owner: str, life: PipelineIdentity) -> Owner:
        """Record ``life`` for ``owner``, unless another life is recorded. Return the life that is recorded now."""
        return self._core.catalogue.own(owner, life)

    def forget_owner(self, owner: str) -> Owner:
        """Forget the life of ``owner``, so that the next life can claim it. Return the former life. Removes nothing.

        Prepared transactions stay until the next life aborts them, and older epochs stay fenced.
        """
        return self._core.catalogue.forget_owner(owner)

    def contents(self, stream: str, of: str, mine: Mine) -> Contents:
        """Return how many events ``stream`` has, and whether they are by owners that count as ``mine``, or by others.

        Own owners have names that begin with ``of``. A missing stream is empty.
        """
        return self._core.catalogue.contents(stream, of, mine)

    def start_over(self, reset: StreamReset, mine: Mine) -> str | None:
        """Fence the owner, empty its streams and record another life as the owner, in one step.

        A stream to which the pipeline has written nothing stays as it is, unless it is empty.

        Returns:
            None if it is done. Otherwise a stream that others have written to as well; nothing has changed then.

        Raises:
            FencedError: a newer epoch exists.
        """
        shared = self._core.catalogue.start_over(reset, mine, self._core.clock.wall_ms())
        if shared is not None:
            return shared
        paths = self._core.storage.list("")
        known = {str(info.stream_id) for info in self._core.catalogue.list_streams("")}  # after the list of files
        # of streams that are gone, whatever deleted them: no row names these files, and numbers are not used again
        delete_quietly(self._core.storage, [path for path in paths if path.partition("/")[0] not in known])
        return None

    def group(self, name: str, stream: str, claim: Claim) -> PipelineGroup:
        """Return a group that a source of a pipeline reads by, for its driver (docs/spec/group-source.md)."""
        return PipelineGroup(self._core, name, stream, claim)

    def join_group(self, name: str, reader: str, claimant: Claimant, expected: int) -> PipelineGroupReader:
        """Join such a group, for one of ``expected`` subtasks.

        Raises:
            FencedError: another generation of the pipeline has it.
        """
        return join_pipeline_group(self._core.catalogue, name, reader, self._core.new_name(), claimant, expected)
