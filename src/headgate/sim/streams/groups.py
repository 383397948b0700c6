"""Readers that share streams as a group, and what must hold of the group.

Readers join, read, commit, pass markers, leave, die, and are stopped for longer than their leases; streams are written,
with transactions, scaled and truncated meanwhile; a user asks for checkpoints, goes back to them, and begins again.
The judge sees each change of the group when it takes effect, and all that readers return. It never asks the group what
to expect. Rules of docs/spec/reader-groups.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeAlias, cast

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, FencedError, StorageError, TruncatedError
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
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Violation
from headgate.sim.streams.background_traffic import left_in
from headgate.sim.streams.client_programs import STORE, Program, ProgramsRun, Writer
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import GroupFound, GroupStart
from headgate.store.reader_groups import CheckpointMarker, GroupEvents, GroupReader, ReaderGroup
from headgate.store.store import Store
from headgate.store.streams import Retention

GROUP = "app/readers"

PATIENCE_MS = 60_000
"""Virtual time in which a name is free again when nothing fails any more."""

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

    def __init__(self, inner: Catalogue, judge: GroupJudge, process: Callable[[], str]) -> None:
        self._catalogue = inner
        self._judge = judge
        self._process = process

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._catalogue, verb)

    def create_group(
        self, name: str, streams: Sequence[str], start: GroupStart, kept: int, claim: Claim | None = None
    ) -> GroupFound:
        found = self._catalogue.create_group(name, streams, start, kept, claim)
        self._judge.on_made()
        return found

    def change_group(self, name: str, event: Event) -> GroupFound:
        before = self._catalogue.find_group(name).group
        found = self._catalogue.change_group(name, event)
        self._judge.on_changed(event, before, found.group, self._process())
        return found

    def reset_group(
        self, name: str, token: str, start: GroupStart, checkpoint: str | None, claim: Claim | None = None
    ) -> GroupFound:
        before = self._catalogue.find_group(name).group
        found = self._catalogue.reset_group(name, token, start, checkpoint, claim)
        self._judge.on_reset(checkpoint, before, found.group)
        return found


RESETS_MAX = 3
LAST = "the last one"
"""The checkpoint that is asked for when nothing fails any more."""


class Member(Program):
    """Reads as one of the group until nothing is left."""

    def __init__(self, run: GroupRun, number: int, rng: random.Random) -> None:
        super().__init__(run, f"reader{number}", rng)
        self._group_run = run
        self._lease_ms = rng.choice((150, 400, 1_000))
        self._commit_every = rng.choice((None, None, "0ms", "20ms", "300ms"))
        self._busy_ms = rng.choice((None, 3 * self._lease_ms))
        self._keeps_name, self._takes_over = rng.random() < 0.6, rng.random() < 0.5
        self._rows_max = rng.choice((1, 3, 20))
        self._waits_ms = rng.choice((0, 30, 400))

    @property
    def lease_ms(self) -> int:
        """Its lease."""
        return self._lease_ms

    def _work(self, process: SimProcess) -> bool:
        run = self._group_run
        if run.is_over():
            return True
        group = run.group(Store.shared(STORE))
        resets_count = run.judge.resets_count if run.faults.is_healed else None
        reader = group.join(
            self.name if self._keeps_name else process.name,
            lease=f"{self._lease_ms}ms",
            commit_every=self._commit_every,
            busy_at_most=None if self._busy_ms is None else f"{self._busy_ms}ms",
            takes_over=self._takes_over and process is self.process,
            timeout=f"{PATIENCE_MS if run.faults.is_healed else self._rng.choice((0, 2 * self._lease_ms))}ms",
        )
        run.world.tell(process.name, f"joins as {reader.reader_id}")
        try:
            self._read(process, reader)
        except FencedError as error:
            if process is self.process and resets_count == run.judge.resets_count:  # and nothing fails any more
                run.judge.fail("RG13", f"{process.name} lives, and is fenced: {error}")
            raise
        return False

    def _read(self, process: SimProcess, reader: GroupReader) -> None:
        """Read until there is nothing left, or it likes to leave."""
        rng = self._rng
        while not (reader.has_ended and self._group_run.is_over()):
            try:
                self._step(process, reader)
            except (StorageError, CorruptionError):
                if rng.random() < 0.2:
                    raise  # and join anew
                self._run.tasks.park(rng.randint(1, 30))
                continue
            self._run.tasks.park(self._rest_ms(reader))
            if not self._run.faults.is_healed and rng.random() < 0.01:
                break
        commits = rng.random() < 0.6
        self._again(lambda: reader.leave(commits=commits))

    def _step(self, process: SimProcess, reader: GroupReader) -> None:
        judge, rng = self._group_run.judge, self._rng
        match reader.read(self._rows_max, timeout=f"{self._waits_ms}ms"):
            case GroupEvents() as found:
                judge.on_returned(process.name, found)
            case CheckpointMarker(checkpoint):
                judge.on_told(process.name, checkpoint)
            case None:
                reader.commit()
        if self._commit_every is None and rng.random() < 0.4:
            reader.commit()

    def _rest_ms(self, reader: GroupReader) -> int:
        """Return how long it is busy with what it has read: now and then for longer than its lease."""
        rng, is_healed = self._rng, self._run.faults.is_healed
        if rng.random() < 0.04:
            if self._busy_ms is not None:
                return rng.randint(1, self._busy_ms if is_healed else 2 * self._busy_ms)
            if not is_healed:
                return rng.randint(1, 2 * self._lease_ms)
        return rng.randint(0, self._lease_ms // 20)

    def _again(self, call: Callable[[], object]) -> None:
        """Do it until the store takes it."""
        while True:
            try:
                call()
                return
            except StorageError:
                self._run.tasks.park(self._rng.randint(1, 40))


class GroupRun(ProgramsRun):
    """The users of one group, and the world's malice."""

    SUBJECT = "reader groups"

    def _draw(self) -> None:
        rng = self._rng
        self.judge = GroupJudge(lambda checkpoint: self._catalogue.group_cuts(GROUP, checkpoint))
        self.streams = ("a", "b")[: rng.choice((1, 1, 2))]
        self._begins = rng.choice(("earliest", "earliest", "latest"))
        self._kept = rng.choice((1, 2, 3))
        self._safety_ms = rng.choice((1_500, 5_000))
        self.writers = [Writer(self, name, random.Random(rng.random())) for name in self.streams]
        self.members = [Member(self, n, random.Random(rng.random())) for n in range(rng.choice((1, 2, 3, 4)))]
        self.truncates = rng.random() < 0.5
        self.asked_count = self.truncated_count = 0
        self._resets_left, self._resetting = rng.choice((0, 1, RESETS_MAX)), 0

    def group(self, store: Store) -> ReaderGroup:
        """Return the group, which the process that comes first makes."""
        return store.reader_group(GROUP, self.streams, start=self._begins, checkpoints_kept=self._kept)

    def is_over(self) -> bool:
        """Whether nothing will ever be left to read."""
        if not self.faults.is_healed or not all(writer.is_done for writer in self.writers):
            return False
        if self._resetting or GROUP not in self._catalogue.groups():
            return False
        return not self._catalogue.find_group(GROUP).group.readable

    def fail(self, rule: str, problem: str) -> None:
        """Note what was violated first."""
        self.judge.fail(rule, problem)

    # -- the world --------------------------------------------------------------------------------------------------

    def _watched(self, inner: Catalogue) -> Catalogue:
        return cast(Catalogue, WatchedCatalogue(inner, self.judge, lambda: self._stores.asking()))

    def _places(self) -> list[Program]:
        return [*self.writers, *self.members]

    def _finding(self) -> Violation | None:
        return self.judge.finding

    def _users(self) -> list[tuple[str, Callable[[], object], int, int]]:
        return [("user", self._look_after, 10, 150), *super()._users()]

    def _heal(self) -> None:
        super()._heal()
        self.tasks.spawn(SimProcess(self.tasks, "user"), self._ask_for_last, "main")

    def _end(self) -> None:
        self._until(lambda: LAST in self.judge.completed, "a checkpoint is not complete")

    # -- other users ------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Ask for a checkpoint, ask how far one is, go back, give one up, truncate, or look at numbers."""
        rng, store = self._rng, Store.shared(STORE)
        group, chance = store.reader_group(GROUP), rng.random()
        if chance < 0.35:
            self.asked_count += 1
            group.checkpoint(f"c{self.asked_count}")
        elif chance < 0.5:
            for name, is_complete in group.checkpoints().items():
                if group.checkpoint(name) and not is_complete:
                    group.cut(name)
        elif chance < 0.6 and self._resets_left:
            self._resets_left -= 1
            self._resetting += 1
            try:
                self._reset(group)
            finally:
                self._resetting -= 1
        elif chance < 0.7:
            names = sorted(group.checkpoints())
            if names:
                group.forget_checkpoint(rng.choice(names))
        elif chance < 0.85 and self.truncates:
            self._truncate(store)
        else:
            self.world.tell("user", f"{group.unread_bytes()} bytes for {group.readers()}, at {group.cut()}")

    def _ask_for_last(self) -> None:
        group: list[ReaderGroup] = []  # one for all tries: who asks watches, too
        while LAST not in self.judge.completed:
            if not group:
                self._try("user", lambda: group.append(self.group(Store.shared(STORE))))
            else:
                self._try("user", lambda: group[0].checkpoint(LAST))
            self.tasks.park(50)

    def _reset(self, group: ReaderGroup) -> None:
        complete = [name for name, is_complete in group.checkpoints().items() if is_complete]
        chance = self._rng.random()
        if complete and chance < 0.6:
            try:
                group.reset(checkpoint=self._rng.choice(complete))
            except TruncatedError as error:
                self.judge.fail("RG17", f"a checkpoint is kept, and what it needs is not: {error}")
        elif chance < 0.8:
            group.reset(cuts=list(group.cut().values()))
        elif not self.truncates:
            group.reset(start=self._rng.choice(("earliest", "latest")))

    def _truncate(self, store: Store) -> None:
        """Truncate as its retention says, which keeps only what is held (RG17)."""
        name = self._rng.choice(self.streams)
        store.set_retention(name, Retention(age="1ms"))
        self.truncated_count += sum(store.retain(name).positions.values()) > 0

    def _verify(self) -> None:
        store = Store.shared(STORE)
        group = store.reader_group(GROUP)
        if group.unread_bytes():
            self.judge.fail("RG20", f"{group.unread_bytes()} bytes are unread when everything is read")
        self.judge.check({name: store.describe(name).ends for name in self.streams})
        problems = left_in(store)
        mended = store.repair()
        store.delete_reader_group(GROUP)
        left = [name for name in self.streams if store.holds(name)]
        if problems or mended or left:
            self.judge.fail("RG24", f"the check finds {problems[:3]}, mends {mended}; the deleted group holds {left}")
