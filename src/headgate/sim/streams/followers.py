"""Programs that follow a whole stream, and wait for what comes, in the machine room.

Each keeps its cut with what it has returned, as a user would, and goes on from there when it was killed. The writer now
and then goes on only when everybody has read what it wrote: then nothing else changes in the store, so the process that
overlooks it waits for ever. Streams are scaled and truncated meanwhile. Counterpart: ``store.following`` (FW1, FW2,
FW5–FW7 of docs/spec/stream-clients.md). Nothing here is drawn by other kinds of runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from headgate.errors import CorruptionError, StorageError, TruncatedError
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault
from headgate.sim.streams.client_programs import KEYS, STORE, Program, ProgramsRun, Writer
from headgate.sim.streams.stream_changes import left_in
from headgate.store.follower import WAIT_FOREVER, StreamEvents, StreamFollower
from headgate.store.store import Store
from headgate.store.streams import StreamCut

STREAM = "talk"
ASKS_RATE = 0.5
"""After so many of its batches a writer that asks waits for all who follow."""

SOON_MS = 5_000
"""Within so much virtual time the process that waits has heard of something when nothing fails."""

GIVES_BACK_RATE = 0.05
"""So much of what it has read a program gives back, and reads again."""


class AskingWriter(Writer):
    """Appends, and now and then waits until everybody has read all of it."""

    def __init__(self, run: FollowRun, rng: random.Random) -> None:
        super().__init__(run, STREAM, rng)
        self._follow_run = run
        self._asks = rng.random() < 0.8

    def _on_durable(self, number: int) -> None:
        if not self._asks or self._rng.random() >= ASKS_RATE:
            return
        written = {event for batch in self.batches[: number + 1] for event in batch}
        run, since_ms = self._follow_run, self._run.world.now_ms
        while not all(follower.has_heard(written) for follower in run.followers):
            run.tasks.park(5)
            if run.world.now_ms - max(since_ms, run.moved_ms) > SOON_MS and run.faults.is_healed:
                run.fail("FW6", f"somebody does not hear of batch {number}, and nothing else happens")
        run.heard_count += 1


class Follower(Program):
    """Follows the stream to its end, however often it dies over it."""

    def __init__(self, run: FollowRun, number: int, rng: random.Random) -> None:
        super().__init__(run, f"follower{number}", rng)
        self._follow_run = run
        self._key = rng.choice((None, None, None, rng.randrange(KEYS)))
        self._start = rng.choice(("earliest", "earliest", "latest"))
        self._is_bounded = rng.random() < 0.2
        self._rows_max = rng.choice((1, 3, 20, 1_000))
        self._waits = rng.choice(("0ms", "40ms", "2s", WAIT_FOREVER))
        self._returned: StreamEvents | None = None
        """What was given back and has to come again."""
        # what the program keeps, whoever dies:
        self.begin: StreamCut | None = None
        self.end: StreamCut | None = None
        self.cut: StreamCut | None = None
        self.events: list[tuple[int, int]] = []
        self.places: dict[tuple[int, int], tuple[int, int]] = {}
        """By segment and position, where all keys are read."""
        self.lost: set[tuple[int, int]] = set()
        """Places that were truncated before it came there."""

    def has_heard(self, written: set[tuple[int, int]]) -> bool:
        """Whether it has returned everything that is ``written``, as far as it wants to read and can."""
        if self.is_done or self._is_bounded or self._start == "latest" or self._follow_run.truncated_count:
            return True
        wanted = {event for event in written if self._key in (None, event[0])}
        return wanted <= set(self.events)

    def _work(self, process: SimProcess) -> bool:
        try:
            return self._follow(process, Store.shared(STORE))
        except TruncatedError as error:
            self._leave_to_newer(process)
            self._give_up(error)
            return False

    def _follow(self, process: SimProcess, store: Store) -> bool:
        if self._is_bounded and self.end is None:
            self.end = store.tail(STREAM)
        follower = store.follow(STREAM, start=self.cut or self._start, end=self.end, key=self._key)
        if self.begin is None:
            self.begin = self.cut = follower.cut()
        self._returned = None
        while not follower.has_ended:
            try:
                self._step(process, follower)
            except (StorageError, CorruptionError):
                if self._rng.random() < 0.3:
                    raise  # and follow anew
                self._run.tasks.park(self._rng.randint(1, 30))
        return True

    def _step(self, process: SimProcess, follower: StreamFollower) -> None:
        found = follower.read(self._rows_max, timeout=self._waits)
        self._leave_to_newer(process)
        if found is None:
            self._run.tasks.park(self._rng.randint(1, 20))
            return
        if self._returned is not None and not _begins_with(found, self._returned):
            self._run.fail("FW5", f"{self.name} gave back {self._returned.position} and got {found.position} instead")
        self._returned = None
        if self._rng.random() < GIVES_BACK_RATE:
            follower.unread(found)
            self._returned = found
            return
        self._keep(found)
        self.cut = follower.cut()
        self._run.tasks.park(self._rng.randint(0, 20))

    def _leave_to_newer(self, process: SimProcess) -> None:
        """Another one, that was started beside it, keeps what is read."""
        if process is not self.process:
            process.end(0)

    def _keep(self, found: StreamEvents) -> None:
        rows = list(zip(*found.batch.to_pydict().values(), strict=True))
        self.events += rows
        self._follow_run.moved_ms = self._run.world.now_ms
        if self._key is not None:
            return
        for position, row in enumerate(rows, start=found.position):
            place = (found.segment, position)
            if place in self.places:
                self._run.fail("FW1", f"{self.name} returns {place} twice")
            self.places[place] = row

    def _give_up(self, error: TruncatedError) -> None:
        """What was truncated is lost to this program: it goes on after it."""
        assert self.cut is not None
        head = self._follow_run.heads()[error.segment]
        at = self.cut.positions.get(error.segment, 0)
        if head <= at:
            self._run.fail("FW2", f"{self.name} is told that segment {error.segment} is truncated, behind {head}")
        self.lost |= {(error.segment, position) for position in range(at, head)}
        self.cut = replace(self.cut, positions={**self.cut.positions, error.segment: max(at, head)})

    def check(self, ends: Mapping[int, int]) -> None:
        """Look at what it has returned, when all is over."""
        assert self.begin is not None
        for key in range(KEYS):
            numbers = [number for k, number in self.events if k == key]
            if numbers != sorted(set(numbers)):
                self._run.fail("FW1", f"{self.name} returned key {key} in the order {numbers[:10]}")
        if self._key is None:
            last = ends if self.end is None else self.end.positions
            expected = {(n, p) for n, end in last.items() for p in range(self.begin.positions.get(n, 0), end)}
            missing, more = expected - self.places.keys() - self.lost, self.places.keys() - expected
            if missing or more:
                self._run.fail("FW1", f"{self.name} did not return {sorted(missing)[:4]}, and {sorted(more)[:4]}")
        elif not self._is_bounded and self._start == "earliest" and not self.lost:
            wanted = [event for batch in self._follow_run.writer.batches for event in batch if event[0] == self._key]
            if self.events != wanted:
                self._run.fail("FW7", f"{self.name} has {len(self.events)} events of {self._key}, not {len(wanted)}")


class FollowRun(ProgramsRun):
    """A stream, who writes it, and who follows it."""

    SUBJECT = "programs that follow"

    def _draw(self) -> None:
        rng = self._rng
        self._safety_ms = rng.choice((1_000, 4_000))
        self.writer = AskingWriter(self, random.Random(rng.random()))
        self.followers = [Follower(self, n, random.Random(rng.random())) for n in range(rng.choice((1, 2, 3)))]
        self.streams = (STREAM,)
        self.truncates = rng.random() < 0.3
        if rng.random() < 0.3:  # what fails in the middle of a look
            self.faults.on.add(Fault.GET_FAILS)
            self.faults.rates[Fault.GET_FAILS] = 0.15
        self.truncated_count = self.heard_count = 0
        self.moved_ms = 0
        """When a user has read something, or nothing failed any more."""

    def heads(self) -> dict[int, int]:
        """Return where each segment begins, as no client sees it."""
        return {n: extent.head for n, extent in self._catalogue.extents(self._catalogue.find_stream(STREAM)).items()}

    def _places(self) -> list[Program]:
        return [self.writer, *self.followers]

    def _users(self) -> list[tuple[str, Callable[[], object], int, int]]:
        return [*super()._users(), *([("user", self._truncate, 50, 400)] if self.truncates else [])]

    def _heal(self) -> None:
        super()._heal()
        self.moved_ms = self.world.now_ms

    def _truncate(self) -> None:
        """Truncate where some program is, so that others are after it."""
        cut = self._rng.choice(self.followers).cut
        if cut is not None:
            self.truncated_count += 1
            Store.shared(STORE).truncate(cut)

    def _verify(self) -> None:
        store = Store.shared(STORE)
        ends = {n: extent.end for n, extent in self._catalogue.extents(self._catalogue.find_stream(STREAM)).items()}
        for follower in self.followers:
            follower.check(ends)
        if problems := left_in(store):
            self.fail("I1", f"the check finds {problems[:3]}")


def _begins_with(found: StreamEvents, given_back: StreamEvents) -> bool:
    """Whether ``found`` is what was given back, or the beginning of it, or more."""
    rows = min(found.batch.num_rows, given_back.batch.num_rows)
    is_there = (found.segment, found.position) == (given_back.segment, given_back.position)
    return is_there and found.batch.slice(0, rows).equals(given_back.batch.slice(0, rows))
