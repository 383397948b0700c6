"""Readers that share streams as a group, in the machine room (SM90, SM91).

Readers join, read, commit, pass markers, leave, die, and are stopped for longer than their leases; streams are written,
with transactions, scaled and truncated meanwhile; a user asks for checkpoints, goes back to them, and begins again.
The store is the product's own. What must hold is judged in ``group_judge``; nothing here is drawn by other kinds of
runs.
"""

from __future__ import annotations

import random
from typing import cast

from headgate.errors import TruncatedError
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.streams.client_programs import ProgramsRun
from headgate.sim.streams.group_judge import GroupJudge, WatchedCatalogue
from headgate.sim.streams.group_readers import GROUP, SCHEMA, STORE, Member, Place, Writer
from headgate.sim.streams.stream_changes import Scaler
from headgate.sim.world import Violation
from headgate.store.catalogue.base import Catalogue
from headgate.store.policies import Retention
from headgate.store.reader_groups import ReaderGroup
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition

RESETS_MAX = 3
LAST = "the last one"
"""The checkpoint that is asked for when nothing fails any more."""


class GroupRun(ProgramsRun):
    """The users of one group, and the world's malice."""

    SUBJECT = "reader groups"

    def _draw(self) -> None:
        rng = self._rng
        self.judge = GroupJudge(lambda checkpoint: self._behind.group_cuts(GROUP, checkpoint))
        self._behind = self._stores.behind("store")
        self.streams = ("a", "b")[: rng.choice((1, 1, 2))]
        self._begins = rng.choice(("earliest", "earliest", "latest"))
        self._kept = rng.choice((1, 2, 3))
        self._safety_ms = rng.choice((1_500, 5_000))
        self.writers = [Writer(self, name, random.Random(rng.random())) for name in self.streams]
        self.members = [Member(self, n, random.Random(rng.random())) for n in range(rng.choice((1, 2, 3, 4)))]
        self.scaler = Scaler(self.seed, STORE, self.streams)
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
        if self._resetting or GROUP not in self._behind.groups():
            return False
        return not self._behind.find_group(GROUP).group.readable

    def fail(self, rule: str, problem: str) -> None:
        """See ``Around``."""
        self.judge.fail(rule, problem)

    # -- the world --------------------------------------------------------------------------------------------------

    def _watched(self, behind: Catalogue) -> Catalogue:
        return cast(Catalogue, WatchedCatalogue(behind, self.judge, lambda: self._stores.asking()))

    def _places(self) -> list[Place]:
        return [*self.writers, *self.members]

    def _finding(self) -> Violation | None:
        return self.judge.finding

    def _begin(self) -> None:
        for name in self.streams:
            definition = StreamDefinition(name, SCHEMA, self._rng.choice((1, 2, 3)), "k")
            self._behind.create_stream(definition, 0, if_not_exists=False)
        for place in self._places():
            self.world.at(self._rng.randint(0, 200), place.start)
        self.world.at(20, self._strike)
        self._again_and_again(self._look_after, 10, 150)
        if self.scaler.is_drawn:
            self._again_and_again(self._scale, 20, 200)

    def _heal(self) -> None:
        super()._heal()
        self.tasks.spawn(SimProcess(self.tasks, "user"), self._ask_for_last, "main")

    def _end(self) -> None:
        self._until(lambda: LAST in self.judge.completed, "a checkpoint is not complete")

    # -- other users ------------------------------------------------------------------------------------------------

    def _scale(self) -> None:
        problem = self.scaler.scale()
        if problem:
            self.world.tell("scaler", problem)

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
                self._try(lambda: group.append(self.group(Store.shared(STORE))))
            else:
                self._try(lambda: group[0].checkpoint(LAST))
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
        store.collect_orphans()  # nobody writes any more
        problems = [problem for problem in store.fsck() if not problem.is_harmless]
        mended = store.repair()
        store.delete_reader_group(GROUP)
        left = [name for name in self.streams if store.holds(name)]
        if problems or mended or left:
            self.judge.fail("RG24", f"the check finds {problems[:3]}, mends {mended}; the deleted group holds {left}")
        self._is_verified = True
