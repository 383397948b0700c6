"""A reader group that belongs to a source of a pipeline: its driver asks for checkpoints, its subtasks read.

Counterparts: ``grouped_store.GroupedStore`` makes both halves; ``connectors.streams.group_source`` uses them;
``protocol.store.group_claims`` decides whose a group is. Source: docs/spec/group-source.md. Never reads an event, and
has no lease: a pipeline notices itself who is dead, and then all of its readers begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headgate.errors import FencedError, StorageError, UsageError
from headgate.protocol.store.group_ownership import Claim, Claimant
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    CheckpointForgotten,
    Group,
    GroupSegment,
    Joined,
    Passed,
)
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import GroupFound, GroupStart
from headgate.store.streams import StreamCut

CHECKPOINTS_KEPT = 16
"""More than a pipeline has at once: a completed one must be there when its cut is asked for."""

_PREFIX = "checkpoint-"


def checkpoint_name(checkpoint: int) -> str:
    """Return what the group calls a checkpoint of the pipeline."""
    return f"{_PREFIX}{checkpoint}"


class PipelineGroup:
    """The driver's half."""

    def __init__(
        self, catalogue: Catalogue, name: str, stream: str, claim: Claim, new_token: Callable[[], str]
    ) -> None:
        """Use ``Store.claimed_group``."""
        self.name = name
        self._catalogue = catalogue
        self._stream = stream
        self._claim = claim
        self._claimant = Claimant(claim.source, claim.life, claim.generation)
        self._new_token = new_token

    def begin(self, start: GroupStart) -> None:
        """Make the group if there is none, and have it begin at ``start``. Fences all readers; repeating is fine.

        Raises:
            FencedError: a newer generation has it.
            TruncatedError: what it would begin with is gone.
            UsageError: it belongs to somebody else, or cannot be.
        """
        self._catalogue.create_group(self.name, [self._stream], start, CHECKPOINTS_KEPT, self._claim)
        self._catalogue.reset_group(self.name, self._new_token(), start, None, self._claim)

    def ask(self, checkpoint: int) -> bool:
        """Ask for a checkpoint, unless a reader has; return whether there is one now: not before all have joined.

        Raises:
            FencedError: a newer generation has the group.
        """
        claim = self._catalogue.find_group(self.name).group.claim
        if claim is not None and claim.generation == self._claim.generation and not claim.is_gathered:
            return False  # GS3: whoever joins later would owe nothing
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
        """Forget the checkpoints ``first`` to ``last``: their cuts are in manifests, or nobody needs them."""
        for name in [x.name for x in self._catalogue.find_group(self.name).group.checkpoints]:
            if first <= int(name.removeprefix(_PREFIX)) <= last:
                self._catalogue.change_group(self.name, CheckpointForgotten(name, self._claimant))


class PipelineGroupReader:
    """A subtask's half: what it is to read, and which markers it has to pass. One thread at a time."""

    def __init__(self, catalogue: Catalogue, name: str, reader: str, token: str, found: GroupFound) -> None:
        """Use ``Store.claimed_reader``."""
        self.reader = reader
        self._catalogue = catalogue
        self._name = name
        self._token = token
        self._changes: int | None = None
        self.group: Group = found.group
        """As it was when this reader looked last."""

    @property
    def is_gathered(self) -> bool:
        """Whether all readers have joined: before that nobody has anything."""
        return self.group.claim is not None and self.group.claim.is_gathered

    @property
    def segments(self) -> tuple[GroupSegment, ...]:
        """What it reads."""
        return self.group.shares.of(self.reader)

    @property
    def owed(self) -> int | None:
        """The checkpoint whose marker is next in its sequence of events."""
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
        """Say where the snapshot for ``checkpoint`` was taken; markers of older ones were passed with it (GS11).

        Asks for it if nobody has: whoever is cut without a marker begins the checkpoint of the group (GS12).

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
    """Call; a group that somebody has deleted is made anew when the next generation begins (GS5).

    Raises:
        StorageError: it was deleted.
    """
    try:
        return call()
    except UsageError as error:
        raise StorageError("read by", f"reader group '{name}'", str(error), is_transient=True) from error
