"""Who of a reader group reads which segments: shares of about equal size. Pure decisions.

Counterpart: ``reader_group`` asks after every change of who reads. Source: Pravega's reader groups, RG6
and RG7 of docs/spec/reader-groups.md. Where Pravega's readers take and give by timers of their own, one decision is
taken here for all. Never takes a segment from a reader: it asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import NamedTuple, TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.protocol.store import group_ownership, reading_order
from headgate.protocol.store.group_ownership import Claim, Claimant, Replaced
from headgate.protocol.store.layouts import Lineage
from headgate.protocol.store.reading_order import FirstStart, Progress, View

SEGMENT_WEIGHT_BYTES = 1 << 20
"""What a segment weighs that has nothing unread: sizes below this decide little, so that shares do not flap."""


class GroupSegment(NamedTuple):
    """A segment of one of the streams of a group."""

    stream: str
    segment: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Which reader reads what.

    Attributes:
        owners: segment → its reader; other segments have none.
        leaving: segments that their readers are asked to give up.
    """

    owners: Mapping[GroupSegment, str]
    leaving: frozenset[GroupSegment] = frozenset()

    def of(self, reader: str) -> tuple[GroupSegment, ...]:
        """Return what ``reader`` has, in order."""
        return tuple(sorted(segment for segment, owner in self.owners.items() if owner == reader))

    def without(self, gone: Iterable[GroupSegment]) -> Shares:
        """Return the shares without these segments."""
        left = set(gone)
        owners = {segment: owner for segment, owner in self.owners.items() if segment not in left}
        return Shares(owners, self.leaving - left)


def dealt(
    shares: Shares, free: Collection[GroupSegment], takers: Collection[str], sizes: Mapping[GroupSegment, int]
) -> Shares:
    """Give every free segment to that of ``takers`` who has least to read, the largest first (RG6)."""
    owners = dict(shares.owners)
    loads = {reader: sum(_weight(x, sizes) for x in shares.of(reader)) for reader in takers}
    # the largest first: small ones even out what is left; names decide between equals: one question has one answer
    for segment in sorted(free, key=lambda x: (-_weight(x, sizes), x)):
        if not loads:
            break
        reader = min(loads, key=lambda x: (loads[x], x))
        owners[segment] = reader
        loads[reader] += _weight(segment, sizes)
    return Shares(owners, shares.leaving)


def balanced(shares: Shares, readers: Collection[str], sizes: Mapping[GroupSegment, int]) -> Shares:
    """Ask who has most to read for a segment, if that makes him and who has least more equal (RG7).

    One at a time, and only if it does not turn the two around: so shares come to rest.
    """
    if len(readers) < 2 or shares.leaving:
        return shares
    loads = {reader: sum(_weight(x, sizes) for x in shares.of(reader)) for reader in readers}
    most = min(loads, key=lambda x: (-loads[x], x))
    gap = loads[most] - min(loads.values())
    fitting = [x for x in shares.of(most) if 2 * _weight(x, sizes) <= gap]
    if not fitting:
        return shares
    return Shares(shares.owners, frozenset({min(fitting, key=lambda x: (-_weight(x, sizes), x))}))


def _weight(segment: GroupSegment, sizes: Mapping[GroupSegment, int]) -> int:
    return SEGMENT_WEIGHT_BYTES + sizes.get(segment, 0)


OPEN_CHECKPOINTS_MAX = 3
"""A reader that does not read must not have others collect markers for ever (RG8)."""


@dataclass(frozen=True, slots=True)
class Member:
    """A reader of the group.

    Attributes:
        token: of this life of it: another one under its name is another reader.
        beats: how often it has said that it lives.
        lease_ms: after so long without a beat it is taken for dead.
    """

    token: str
    lease_ms: int
    beats: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of the group, complete when every reader has passed its marker.

    Attributes:
        owed_by: the readers that have not passed its marker yet.
        progress: by stream, how far all have read in front of the marker.
    """

    name: str
    owed_by: tuple[str, ...]
    progress: Mapping[str, Progress]

    @property
    def is_complete(self) -> bool:
        """Whether all have passed its marker."""
        return not self.owed_by


@dataclass(frozen=True, slots=True)
class Group:
    """The state of a reader group.

    Attributes:
        streams: name → number of the stream that the group reads.
        kept: so many completed checkpoints stay, the last ones.
        epoch: from 1; one more with every reset.
        reset: what the last reset was called by who asked for it.
        progress: by stream, the durable positions (RG2).
        checkpoints: open and kept ones, in the order in which they were asked for.
        claim: of the pipeline that reads by it; None: it is for programs that join it (GS1).
    """

    streams: Mapping[str, int]
    progress: Mapping[str, Progress]
    kept: int = 1
    epoch: int = 1
    reset: str = ""
    readers: Mapping[str, Member] = field(default_factory=dict)
    shares: Shares = field(default_factory=lambda: Shares({}))
    checkpoints: tuple[Checkpoint, ...] = ()
    claim: Claim | None = None

    @property
    def readable(self) -> frozenset[GroupSegment]:
        """The segments that can be read now."""
        return frozenset(GroupSegment(name, x) for name, found in self.progress.items() for x in found.readable)

    @property
    def free(self) -> frozenset[GroupSegment]:
        """The readable segments without a reader."""
        return self.readable - self.shares.owners.keys()

    def position(self, segment: GroupSegment) -> int:
        """Return the durable position of a segment that was begun."""
        return self.progress[segment.stream].positions[segment.segment]

    def owed(self, reader: str) -> str | None:
        """Return the oldest checkpoint with a marker that a reader still has to pass (RG8)."""
        return next((x.name for x in self.checkpoints if reader in x.owed_by), None)

    def checkpoint(self, name: str) -> Checkpoint | None:
        """Return a checkpoint that is open or kept."""
        return next((x for x in self.checkpoints if x.name == name), None)


# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A reader joins. ``takes_over``: the reader that is in the group under its name is dead.

    One of a pipeline says that it is the ``claimant``, and how many readers are ``expected``.
    """

    reader: str
    token: str
    lease_ms: int
    takes_over: bool = False
    claimant: Claimant | None = None
    expected: int = 0


@dataclass(frozen=True, slots=True)
class Lived:
    """A reader has said ``beats`` times that it lives."""

    reader: str
    token: str
    beats: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What lies before ``positions`` needs not be read again. ``ended``: streams where segments reached their end."""

    reader: str
    token: str
    positions: Mapping[GroupSegment, int]
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Passed:
    """A reader has met the marker of ``checkpoint`` at these positions, and its caller knows that (RG9)."""

    reader: str
    token: str
    checkpoint: str
    positions: Mapping[GroupSegment, int]
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A reader goes, at its durable positions."""

    reader: str
    token: str


@dataclass(frozen=True, slots=True)
class Silent:
    """The lease of a reader has passed without a heartbeat since ``beats``."""

    reader: str
    token: str
    beats: int


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """A checkpoint is requested."""

    name: str
    claimant: Claimant | None = None


@dataclass(frozen=True, slots=True)
class CheckpointForgotten:
    """A checkpoint will not be restored any more."""

    name: str
    claimant: Claimant | None = None


@dataclass(frozen=True, slots=True)
class ResetAsked:
    """A reset is requested: the group reads on from other positions.

    Attributes:
        token: of the caller, so that a request with a lost answer is not carried out again.
        streams: as they are now, name → number.
        begin: by stream where reading begins; or
        checkpoint: the name of one that was completed.
        claim: of the pipeline that reads by the group from now on.
    """

    token: str
    streams: Mapping[str, int]
    begin: Mapping[str, FirstStart] = field(default_factory=dict)
    checkpoint: str | None = None
    claim: Claim | None = None


Event: TypeAlias = (
    Joined | Lived | Committed | Passed | Left | Silent | CheckpointAsked | CheckpointForgotten | ResetAsked
)

# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """The group is so now; it may be as it was."""

    group: Group


@dataclass(frozen=True, slots=True)
class Stale:
    """The caller is not in the group any more: it has to join again."""

    reason: str


@dataclass(frozen=True, slots=True)
class GroupRefused:
    """It cannot be done; ``problem`` says why."""

    problem: str


Answer: TypeAlias = Done | Stale | GroupRefused | Replaced


def views_for(group: Group, event: Event) -> tuple[str, ...]:
    """Return the streams that ``handle`` has to see as they are."""
    match event:
        case Committed(ended=ended) | Passed(ended=ended):
            before = () if group.claim is None else group.claim.ended
            return tuple(sorted({*before, *ended} & group.progress.keys()))
        case ResetAsked():
            return tuple(sorted(event.streams))
        case _:
            return ()


def handle(group: Group, event: Event, views: Mapping[str, View]) -> Answer:
    """Decide about one event. Whatever is repeated changes nothing (RG3).

    Args:
        group: as it is.
        event: what happened.
        views: the streams of ``views_for``.
    """
    answer = _handle(group, event, views)
    if isinstance(answer, Done):
        _check(answer.group)
    return answer


def contradictions(group: Group) -> list[str]:
    """Return what cannot be true of any group: none, if it was made by ``handle``."""
    known, streams = group.readers.keys(), group.streams.keys()
    open_count = sum(not x.is_complete for x in group.checkpoints)
    rules = (
        (
            all(x.keys() == streams for x in (group.progress, *(y.progress for y in group.checkpoints))),
            "it reads others",
        ),
        (set(group.shares.owners.values()) <= known, "a segment belongs to a reader outside the group"),
        (group.shares.owners.keys() <= group.readable, "a reader has a segment that is not readable"),
        (group.shares.leaving <= group.shares.owners.keys(), "a segment without a reader is to be released"),
        (all(set(x.owed_by) <= known for x in group.checkpoints), "who is gone owes a checkpoint"),
        (group.claim is not None or open_count <= OPEN_CHECKPOINTS_MAX, "too many open checkpoints"),  # GS14
    )
    return [problem for holds, problem in rules if not holds]


def settled(group: Group, sizes: Mapping[GroupSegment, int], *, balances: bool = True) -> Group:
    """Assign free segments, and ask readers to release some for balance; ``sizes``: unread bytes (RG6, RG7).

    A reader that owes a checkpoint gets no segment: what it read there would come before its marker (RG9).
    """
    if group.claim is not None and not group.claim.is_gathered:
        return group  # GS3
    takers = [reader for reader in group.readers if group.owed(reader) is None]
    shares = dealt(group.shares, group.free, takers, sizes)
    if balances and group.claim is None:  # GS4
        shares = balanced(shares, group.readers, sizes)
    found = replace(group, shares=shares)
    _check(found)
    return found


def _handle(group: Group, event: Event, views: Mapping[str, View]) -> Answer:
    problem = _objection(group, event)
    if problem is not None:
        return problem if isinstance(problem, Replaced) else GroupRefused(problem.problem)
    match event:
        case Joined():
            return _on_joined(group, event)
        case Silent():
            member = group.readers.get(event.reader)
            # a beat, or another life, since the watcher looked: then it lives
            is_silent = member is not None and (member.token, member.beats) == (event.token, event.beats)
            is_silent = is_silent and group.claim is None  # GS2: a pipeline notices itself who is dead
            return Done(_without(group, event.reader) if is_silent else group)
        case Left():
            is_there = event.reader in group.readers and group.readers[event.reader].token == event.token
            return Done(_without(group, event.reader) if is_there else group)
        case CheckpointAsked():
            return _on_checkpoint(group, event)
        case CheckpointForgotten():
            return Done(replace(group, checkpoints=tuple(x for x in group.checkpoints if x.name != event.name)))
        case ResetAsked():
            return _on_reset(group, event, views)
        case Lived() | Committed() | Passed():
            return _of_reader(group, event, views)
        case _:
            assert_never(event)


def _of_reader(group: Group, event: Lived | Committed | Passed, views: Mapping[str, View]) -> Answer:
    member = group.readers.get(event.reader)
    if member is None or member.token != event.token:  # RG12
        return Stale("it was considered dead, has left, or the group was reset since it joined")
    if isinstance(event, Lived):
        # two threads of a reader beat, and their beats may overtake each other
        beats = max(member.beats, event.beats)
        return Done(replace(group, readers={**group.readers, event.reader: replace(member, beats=beats)}))
    moved = _moved(group, event.reader, event.positions)
    # of one that is not owed, because this is a repeat or it was forgotten, the positions still count
    if isinstance(event, Passed) and any(
        x.name == event.checkpoint and event.reader in x.owed_by for x in group.checkpoints
    ):
        moved = _passed(moved, event.reader, event.checkpoint)
    if moved.claim is not None:
        return Done(_claimed_step(moved, event, views))
    if moved.owed(event.reader) is not None:
        return Done(moved)  # RG9: nothing is finished or given up in between
    return Done(_released(moved, event.reader, {name: views[name] for name in event.ended if name in views}))


def _objection(group: Group, event: Event) -> group_ownership.Objection | None:
    """Return why the owner of the group forbids an event, or None."""
    match event:
        case ResetAsked():
            return group_ownership.objection_to_claim(group.claim, event.claim, group.readers.keys())
        case Joined() | CheckpointAsked() | CheckpointForgotten():
            return group_ownership.objection(group.claim, event.claimant)
        case _:
            return None  # of a reader: its token tells


def _claimed_step(group: Group, event: Committed | Passed, views: Mapping[str, View]) -> Group:
    """Release the successors once no reader owes a checkpoint; until then record which streams ended (GS6).

    So a reader gets a segment only when all readers have passed all markers.
    """
    assert group.claim is not None, "only the group of a pipeline waits for checkpoints (GS6)"
    ended = tuple(sorted({*group.claim.ended, *event.ended}))
    if any(not x.is_complete for x in group.checkpoints):
        return replace(group, claim=replace(group.claim, ended=ended))
    return replace(_released(group, event.reader, views), claim=replace(group.claim, ended=()))


def _on_joined(group: Group, event: Joined) -> Answer:
    member = group.readers.get(event.reader)
    if member is not None and member.token == event.token:
        return Done(group)
    if group.claim is not None and (member is not None or group.claim.is_gathered):
        return Stale("a reader of this generation has joined in its place")  # only a reset lets another one in
    if member is not None and not event.takes_over:
        return GroupRefused(
            f"reader '{event.reader}' is in the group already; if its process is gone, join with a timeout that is "
            f"longer than its lease of {member.lease_ms / 1_000:g} s, or with takes_over=True"
        )
    rest = group if member is None else _without(group, event.reader)
    readers = {**rest.readers, event.reader: Member(event.token, event.lease_ms)}
    claim = None if rest.claim is None else rest.claim.joined(event.expected, len(readers))
    return Done(replace(rest, readers=readers, claim=claim))


def _on_checkpoint(group: Group, event: CheckpointAsked) -> Answer:
    # asked for again to see whether it is complete
    if group.checkpoint(event.name) is not None:
        return Done(group)
    if group.claim is not None and not group.claim.is_gathered:
        return GroupRefused("not all readers of the pipeline have joined")  # those that came later would owe nothing
    if group.claim is None and sum(not x.is_complete for x in group.checkpoints) >= OPEN_CHECKPOINTS_MAX:
        return GroupRefused(
            f"{OPEN_CHECKPOINTS_MAX} checkpoints are not complete yet; wait for them, or forget them: a reader that "
            "does not read passes no marker"
        )
    # begun with what is durable now; each reader that passes the marker puts its own positions in
    new = Checkpoint(event.name, tuple(sorted(group.readers)), dict(group.progress))
    return Done(_trimmed(replace(group, checkpoints=(*group.checkpoints, new))))


def _on_reset(group: Group, event: ResetAsked, views: Mapping[str, View]) -> Answer:
    if group.reset == event.token:
        return Done(group)  # RG15: it is made
    is_same = dict(event.streams) == dict(group.streams)
    if event.checkpoint is None:
        progress = {name: reading_order.first(views[name], start) for name, start in event.begin.items()}
    else:
        found = group.checkpoint(event.checkpoint)
        if found is None or not found.is_complete:
            there = ", ".join(f"'{x.name}'" for x in group.checkpoints if x.is_complete) or "none"
            return GroupRefused(f"it has no completed checkpoint '{event.checkpoint}'; those that it keeps: {there}")
        if not is_same:
            return GroupRefused(f"a stream was deleted and made again since checkpoint '{event.checkpoint}'")
        progress = {name: reading_order.next_step(views[name], x) for name, x in found.progress.items()}
    complete = tuple(x for x in group.checkpoints if x.is_complete and is_same)
    if event.claim is not None:
        complete = ()  # GS5: the pipeline's checkpoints hold their cuts, and names may come again
    new = Group(
        dict(event.streams),
        progress,
        group.kept,
        group.epoch + 1,
        event.token,
        checkpoints=complete,
        claim=event.claim,
    )
    return Done(new)


def _moved(group: Group, reader: str, positions: Mapping[GroupSegment, int]) -> Group:
    """Return the group with later durable positions of what ``reader`` has; of others it says nothing any more."""
    own = {segment: position for segment, position in positions.items() if group.shares.owners.get(segment) == reader}
    return replace(group, progress=_with_later(group.progress, own))  # RG1


def _with_later(progress: Mapping[str, Progress], positions: Mapping[GroupSegment, int]) -> Mapping[str, Progress]:
    by_stream: dict[str, dict[int, int]] = {}
    for segment, position in positions.items():
        by_stream.setdefault(segment.stream, {})[segment.segment] = position
    return {**progress, **{stream: progress[stream].moved(found) for stream, found in by_stream.items()}}


def _passed(group: Group, reader: str, checkpoint: str | None = None) -> Group:
    """Record the durable positions of a reader in a checkpoint that it owes, or in all of them (RG9)."""
    assert reader in group.readers, "only a reader of the group has markers to pass"
    at = {segment: group.position(segment) for segment in group.shares.of(reader)}
    checkpoints = tuple(
        replace(_noted(x, reader, at), owed_by=tuple(y for y in x.owed_by if y != reader))
        if checkpoint in (None, x.name)
        else x
        for x in group.checkpoints
    )
    return _trimmed(replace(group, checkpoints=checkpoints))


def _noted(checkpoint: Checkpoint, reader: str, positions: Mapping[GroupSegment, int]) -> Checkpoint:
    """Record, if ``reader`` owes the checkpoint, where it was in these segments in front of the marker."""
    if reader not in checkpoint.owed_by:
        return checkpoint
    return replace(checkpoint, progress=_with_later(checkpoint.progress, positions))


def _released(group: Group, reader: str, views: Mapping[str, View]) -> Group:
    """Take from ``reader`` what it was asked for and what is finished; release what follows (RG4, RG7)."""
    progress = {**group.progress, **{n: reading_order.next_step(v, group.progress[n]) for n, v in views.items()}}
    seen = replace(group, progress=progress)
    asked = [x for x in seen.shares.of(reader) if x in seen.shares.leaving]
    ended = sorted(seen.shares.owners.keys() - seen.readable)
    checkpoints = group.checkpoints
    heirs = {} if group.claim is None else _heirs(group, seen, reader, views)
    for segment in ended:  # another reader's too: it has nothing left to read there, whatever it still owes
        owner, position = seen.shares.owners[segment], group.position(segment)
        checkpoints = tuple(_noted(x, owner, {segment: position}) for x in checkpoints)
    shares = seen.shares.without([*asked, *ended])
    return replace(seen, shares=replace(shares, owners={**shares.owners, **heirs}), checkpoints=checkpoints)


def _heirs(group: Group, seen: Group, reader: str, views: Mapping[str, View]) -> Mapping[GroupSegment, str]:
    """Return who reads what is released: who read the last segment before it, which holds its event time (GS7)."""
    found = {}
    for segment in sorted(seen.readable - group.readable):
        layout = views[segment.stream].layout
        lineage, left = Lineage(layout), [segment.segment]
        owners: list[str] = []
        while left and not owners:  # segments without events had no reader
            left = [y for x in left for y in lineage.predecessors(layout.segments[x])]
            before = (GroupSegment(segment.stream, number) for number in left)
            owners = [group.shares.owners[x] for x in before if x in group.shares.owners]
        found[segment] = owners[0] if owners else reader
    return found


def _without(group: Group, reader: str) -> Group:
    """Return the group without a reader; it has passed what it owed, at its durable positions (RG14)."""
    # else a checkpoint would wait for it for ever
    rest = _passed(group, reader)
    readers = {name: member for name, member in rest.readers.items() if name != reader}
    return replace(rest, readers=readers, shares=rest.shares.without(rest.shares.of(reader)))


def _trimmed(group: Group) -> Group:
    """Forget completed checkpoints but the last ones (RG11)."""
    complete = [x.name for x in group.checkpoints if x.is_complete]
    old = set(complete[: max(0, len(complete) - group.kept)])
    return replace(group, checkpoints=tuple(x for x in group.checkpoints if x.name not in old))


def _check(group: Group) -> None:
    found = contradictions(group)
    assert not found, found[0]


LOOKS_PER_LEASE = 4
"""A watcher that was stopped itself has seen nothing meanwhile: between two looks, a quarter of a lease counts."""


@dataclass(slots=True)
class _Heard:
    token: str
    beats: int
    silence_ms: int = 0


@dataclass(slots=True)
class Watch:
    """What one process has heard of the readers of a group."""

    _heard: dict[str, _Heard] = field(default_factory=dict)
    _looked_ms: int = 0

    def look(self, readers: Mapping[str, Member], now_ms: int) -> list[Silent]:
        """Return who has been silent for its lease, by name.

        Args:
            readers: as they are now.
            now_ms: a clock that only goes forward.
        """
        passed_ms, self._looked_ms = max(0, now_ms - self._looked_ms), now_ms
        self._heard = {name: heard for name, heard in self._heard.items() if name in readers}
        return [
            Silent(name, readers[name].token, readers[name].beats)
            for name in sorted(readers)
            if self._silence_ms(name, readers[name], passed_ms) >= readers[name].lease_ms
        ]

    def _silence_ms(self, name: str, member: Member, passed_ms: int) -> int:
        heard = self._heard.get(name)
        if heard is None or (heard.token, heard.beats) != (member.token, member.beats):
            self._heard[name] = _Heard(member.token, member.beats)
            return 0
        heard.silence_ms += min(passed_ms, member.lease_ms // LOOKS_PER_LEASE)
        return heard.silence_ms
