"""What must hold of a simulated reader group, whatever happens to its readers (SM91).

It hears of each change of the group at the moment at which it takes effect, and of all that readers return. So it knows
of each life of a reader what it returned and has not made durable; of each checkpoint, what lies in front of its
markers; and of the group, what is read. It never asks the group what to expect. Rules of docs/spec/reader-groups.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headgate.protocol.store.group_ownership import Claim
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    Event,
    Group,
    Joined,
    Passed,
)
from headgate.sim.world import Violation
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import GroupFound, GroupStart
from headgate.store.reader_groups import GroupEvents

Row: TypeAlias = tuple[int, int]
Place: TypeAlias = tuple[str, int, int]
"""Stream, segment, position."""

Cuts: TypeAlias = Mapping[str, Mapping[int, int]]


@dataclass(slots=True)
class _Life:
    """A life of a reader that is in the group, and what it returned since it last said that all is processed."""

    reader: str
    pending: dict[Place, Row] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """A checkpoint that is not complete: who owes it, and what lies in front of its markers so far."""

    owed: set[str]
    front: set[Place]


class GroupJudge:
    """Judges one group."""

    def __init__(self, cuts: Callable[[str | None], Cuts]) -> None:
        """``cuts``: of a completed checkpoint, or of the durable positions, as the store has them now."""
        self._cuts = cuts
        self.finding: Violation | None = None
        self.begin: Cuts | None = None
        """Where the group has begun, since it was made or last reset; None: there is none yet."""
        self.read: dict[Place, Row] = {}
        """What is processed for good since then."""
        self.completed: dict[str, Cuts] = {}
        self.in_vain_count = self.resets_count = self.dead_count = 0
        self._newest: dict[tuple[str, int], int] = {}
        self._lives: dict[str, _Life] = {}
        self._of: dict[str, str] = {}
        self._open: dict[str, _Open] = {}
        self._given_up: dict[str, set[str]] = {}
        """Who owed what was given up: they may hear of that a while later."""

    def fail(self, rule: str, problem: str) -> None:
        """Note what was violated first."""
        self.finding = self.finding or Violation(rule, problem)

    # -- what the group is told -------------------------------------------------------------------------------------

    def on_made(self) -> None:
        """A user made the group, or found it."""
        if self.begin is None:
            self.begin = self._cuts(None)

    def on_changed(self, event: Event, before: Group, after: Group, process: str) -> None:
        """A change took effect that ``process`` asked for."""
        match event:
            case Joined():
                self._lives.setdefault(event.token, _Life(event.reader))
                self._of[process] = event.token
            case Committed() | Passed():
                self._process(event.token)
                if isinstance(event, Passed) and event.checkpoint in self._open:
                    self._open[event.checkpoint].owed.discard(event.token)
            case CheckpointAsked():
                if before.checkpoint(event.name) is None:
                    self._open[event.name] = _Open(set(self._lives), set(self.read))
            case CheckpointForgotten():
                if event.name in self._open:
                    self._given_up[event.name] = self._open.pop(event.name).owed
            case _:
                pass
        self._bury(after)
        self._complete(after)

    def on_reset(self, checkpoint: str | None, before: Group, after: Group) -> None:
        """A reset took effect, or had before."""
        if before.epoch == after.epoch:
            return
        self.resets_count += 1
        self.begin = self._cuts(None)
        if checkpoint is not None and _places(self.begin) != _places(self.completed[checkpoint]):
            self.fail("RG15", f"{checkpoint} is at {self.completed[checkpoint]}, and a reset to it at {self.begin}")
        self.read, self._newest, self._open = {}, {}, {}
        self._bury(after)

    # -- what readers return ----------------------------------------------------------------------------------------

    def on_returned(self, process: str, found: GroupEvents) -> None:
        """A reader returned events; one that is out of the group may return what others have."""
        life = self._lives.get(self._of[process])
        rows = list(zip(*found.batch.to_pydict().values(), strict=True))
        places = [(found.stream, found.segment, found.position + number) for number in range(len(rows))]
        if life is None:
            return
        for place, row in zip(places, rows, strict=True):
            if place in self.read:
                self.fail("RG2", f"{life.reader} returns {place}, which is processed")
            if any(place in other.pending for other in self._lives.values()):
                self.fail("RG1", f"{life.reader} returns {place}, which a reader that lives has returned")
            life.pending[place] = row

    def on_told(self, process: str, checkpoint: str) -> None:
        """A reader returned the marker of a checkpoint."""
        token, found = self._of[process], self._open.get(checkpoint)
        owed = self._given_up.get(checkpoint, set()) if found is None else found.owed
        if token in self._lives and token not in owed:
            self.fail("RG8", f"{self._lives[token].reader} has a marker of {checkpoint}, which it does not owe")

    def check(self, ends: Mapping[str, Sequence[int]]) -> None:
        """Look whether everything was processed once, when all streams have ended."""
        assert self.begin is not None
        wanted = self._between({name: dict(enumerate(numbers)) for name, numbers in ends.items()})
        if wanted != set(self.read):
            lost, more = sorted(wanted - set(self.read)), sorted(set(self.read) - wanted)
            self.fail("RG20", f"{len(lost)} events were never processed {lost[:4]}, and {more[:4]} are none")
        if self._open or self._lives:
            self.fail("RG8", f"not complete: {sorted(self._open)}; still there: {len(self._lives)} readers")

    # -- what follows -----------------------------------------------------------------------------------------------

    def _process(self, token: str) -> None:
        """All that a reader returned is processed from now on, in front of what it owes."""
        life = self._lives.get(token)
        if life is None:
            self.fail("RG12", "a reader that is not in the group says that it has processed something")
            return
        for place, (key, number) in life.pending.items():
            if place in self.read:
                self.fail("RG2", f"{place} is processed twice")
            if self._newest.get((place[0], key), -1) >= number:
                self.fail("RG4", f"{place} comes behind a later event of key {key}")
            self._newest[place[0], key] = number
        self.read |= life.pending
        for found in self._open.values():
            if token in found.owed:
                found.front |= life.pending.keys()
        life.pending = {}

    def _bury(self, after: Group) -> None:
        """Who is not in the group any more owes nothing, and what it had not made durable was returned in vain."""
        there = {member.token for member in after.readers.values()}
        for token in self._lives.keys() - there:
            self.in_vain_count += len(self._lives[token].pending)
            self.dead_count += 1
            del self._lives[token]
            for found in self._open.values():
                found.owed.discard(token)
        if there != self._lives.keys():
            self.fail("RG12", f"{sorted(after.readers)} are in the group, and not all of them have joined")

    def _complete(self, after: Group) -> None:
        for name, found in list(self._open.items()):
            kept = after.checkpoint(name)
            if kept is not None and kept.is_complete == bool(found.owed):
                self.fail("RG8", f"{name} is {'' if kept.is_complete else 'not '}complete, and owed by {found.owed}")
            if found.owed:
                continue
            del self._open[name]
            if kept is not None:
                self.completed[name] = self._cuts(name)
                differing = self._between(self.completed[name]) ^ found.front
                if differing:
                    self.fail("RG9", f"in front of {name}, or behind it, and not its markers: {sorted(differing)[:4]}")

    def _between(self, cuts: Cuts) -> set[Place]:
        """Return what lies between where the group has begun and ``cuts``."""
        return _places(cuts) - _places(self.begin or {})


def _places(cuts: Cuts) -> set[Place]:
    return {(name, segment, n) for name, cut in cuts.items() for segment, end in cut.items() for n in range(end)}


class WatchedCatalogue:
    """A catalogue that reports changes of groups to a judge; ``process`` says who asks now."""

    def __init__(self, behind: Catalogue, judge: GroupJudge, process: Callable[[], str]) -> None:
        self._behind = behind
        self._judge = judge
        self._process = process

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._behind, verb)

    def create_group(
        self, name: str, streams: Sequence[str], start: GroupStart, kept: int, claim: Claim | None = None
    ) -> GroupFound:
        """See ``Catalogue``."""
        found = self._behind.create_group(name, streams, start, kept, claim)
        self._judge.on_made()
        return found

    def change_group(self, name: str, event: Event) -> GroupFound:
        """See ``Catalogue``."""
        before = self._behind.find_group(name).group
        found = self._behind.change_group(name, event)
        self._judge.on_changed(event, before, found.group, self._process())
        return found

    def reset_group(
        self, name: str, token: str, start: GroupStart, checkpoint: str | None, claim: Claim | None = None
    ) -> GroupFound:
        """See ``Catalogue``."""
        before = self._behind.find_group(name).group
        found = self._behind.reset_group(name, token, start, checkpoint, claim)
        self._judge.on_reset(checkpoint, before, found.group)
        return found
