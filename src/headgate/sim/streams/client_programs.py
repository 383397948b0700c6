"""Programs of users that run in a store, again and again, until they have done their work.

A program dies at any moment, is stopped, and is started again, perhaps beside the one that was stopped; all of them die
with the power. What its calls raise, it heeds as a user would. A run has two phases: faults, then none.

A ``Follower`` follows a whole stream, and waits for what comes. It keeps its cut with what it has returned, as a user
would, and goes on from there when it was killed. The writer now and then goes on only when everybody has read what it
wrote: then nothing else changes in the store, so the process that overlooks it waits for ever. Streams are scaled and
truncated meanwhile. Counterpart: ``store.follower`` (FW1, FW2, FW5–FW7 of docs/spec/stream-clients.md). Other kinds of
runs draw nothing of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from headgate.errors import CorruptionError, HeadgateError, StorageError, TruncatedError
from headgate.protocol.store.transactions import Status
from headgate.sim.machine.storage import Disk, SimStores
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault, Faults, Violation
from headgate.sim.product.run import Simulation
from headgate.sim.streams.background_traffic import Scaler, left_in
from headgate.store import location
from headgate.store.catalogue.base import Catalogue
from headgate.store.follower import WAIT_FOREVER, StreamEvents, StreamFollower
from headgate.store.store import Store
from headgate.store.streams import StreamCut, StreamDefinition

STORE = "sim://store"
SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
KEYS = 5


class Program:
    """Where one program runs, again and again, until it has done its work."""

    def __init__(self, run: ProgramsRun, name: str, rng: random.Random) -> None:
        self.name = name
        self.process: SimProcess | None = None
        self.is_done = False
        self._processes: list[SimProcess] = []
        self._run = run
        self._rng = rng
        self._starts_count = 0

    @property
    def is_over(self) -> bool:
        """Whether all is done, and no process runs there any more."""
        return self.is_done and not any(process.is_alive for process in self._processes)

    def start(self) -> None:
        """Start it, whether a former one lives or not."""
        self._starts_count += 1
        process = self.process = SimProcess(self._run.tasks, f"{self.name}.{self._starts_count}", self._on_gone)
        self._processes.append(process)
        self._run.tasks.spawn(process, lambda: self._work_until_done(process), "main")

    def _on_gone(self, code: int) -> None:
        if code and not self.is_done:
            self._run.world.at(self._rng.randint(1, 300), self._start_again)

    def _start_again(self) -> None:
        if self.process is None or not self.process.is_alive:
            self.start()

    def _work_until_done(self, process: SimProcess) -> None:
        while not self.is_done:
            try:
                self.is_done = self._work(process) or self.is_done
            except TruncatedError as error:
                self._run.fail("RG17", str(error))
            except HeadgateError as error:
                self._run.world.tell(process.name, str(error))
                if self._is_over(process, error):
                    break
                self._run.tasks.park(self._rng.randint(1, 50))
        self._run.on_work_done(process)
        process.end(0)

    def _work(self, process: SimProcess) -> bool:
        """Do what is to be done; return whether all of it is."""
        raise NotImplementedError

    def _is_over(self, process: SimProcess, error: Exception) -> bool:
        """Whether a process gives up: another one runs in its place."""
        return process is not self.process


class Writer(Program):
    """Appends numbered events to a stream, some in transactions, each once and in order; then it seals the stream."""

    def __init__(self, run: ProgramsRun, stream: str, rng: random.Random) -> None:
        super().__init__(run, f"writer-{stream}", rng)
        self.stream = stream
        count = rng.choice((0, 40, 120, 200))
        self.batches = [[(rng.randrange(KEYS), n) for n in range(at, at + 5)] for at in range(0, count, 5)]
        self._pause_ms = rng.choice((10, 40, 150))
        self._by_transaction = {n for n in range(len(self.batches)) if rng.random() < 0.3}

    def _work(self, process: SimProcess) -> bool:
        store, epoch = Store.shared(STORE), self._starts_count
        if store.describe(self.stream).is_sealed:
            return True
        owner = f"writer of {self.stream}"
        done = self._decided(store, owner, epoch)
        writer = store.writer(self.stream, writer_id=owner, epoch=epoch, linger=None)
        appended = 0
        for number, events in enumerate(self.batches):
            rows = [dict(zip(SCHEMA.names, event, strict=True)) for event in events]
            batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
            if number in self._by_transaction:
                if number not in done:
                    self._transact(store, owner, epoch, f"{number}.{epoch}", batch)
                self._on_durable(number)
                continue
            appended += 1
            if appended >= writer.next_sequence:
                writer.append(batch, sequence=appended)
                writer.flush()
                self._run.tasks.park(self._rng.randint(1, self._pause_ms))
            self._on_durable(number)
        store.seal(self.stream)
        return True

    def _on_durable(self, number: int) -> None:
        """All batches up to this one are in the stream."""

    def _decided(self, store: Store, owner: str, epoch: int) -> set[int]:
        """Keep former lives from writing, and commit what they had prepared; return what is committed."""
        store.transactions.fence(owner, epoch)
        found = store.list_transactions(owner=owner)
        prepared = [(self.stream, x.name) for x in found if not x.status.is_terminal]
        if prepared:
            store.commit_transactions(prepared, owner=owner, epoch=epoch)
        return {int(x.name.partition(".")[0]) for x in found if x.status is not Status.ABORTED}

    def _transact(self, store: Store, owner: str, epoch: int, name: str, batch: pa.RecordBatch) -> None:
        transaction = store.transactions.begin(self.stream, owner=owner, epoch=epoch, name=name)
        transaction.write(batch)
        transaction.prepare()
        self._run.tasks.park(self._rng.randint(0, 60))
        store.commit_transactions([(self.stream, name)], owner=owner, epoch=epoch)


EVENTS_MAX = 200_000
"""Of both phases; reaching it is a hang."""

STOPPED_MS_MAX = 2_000


class ProgramsRun(Simulation):
    """The programs of one store, and what goes wrong."""

    SUBJECT = ""
    """In the name of the generator of this kind of runs."""
    LIVENESS_MS = 120_000

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, events_max=events_max)
        self._rng = random.Random(f"{self.SUBJECT} of seed {seed}")
        self.faults = Faults(self._rng)
        self._disk = Disk(self.tasks, self.faults, "store")
        self._stores = self._made_stores(seed)
        self._stopped: list[SimProcess] = []
        self.bounds.append((location, "OPENERS", {**location.OPENERS, "sim": self._stores.open}))
        self.finding: Violation | None = None
        self.streams: tuple[str, ...] = ()
        self._draw()
        self.scaler = Scaler(seed, STORE, self.streams)

    @property
    def _catalogue(self) -> Catalogue:
        """The catalogue, as no client sees it."""
        return self._stores.direct_catalogue("store")

    def _run(self) -> None:
        try:
            self._begin()
            self.world.run(lambda: self._finding() is not None, self._safety_ms, self._events_max)
            self._heal()
            self._until(lambda: all(place.is_over for place in self._places()), "not everything is read")
            self._end()
            self._until_verified("verifier", "the store cannot be verified")
        except AssertionError as error:
            raise Violation("assertion", str(error)) from error
        finally:
            self.tasks.take_down()

    def _draw(self) -> None:
        """Draw what there is in this kind of runs."""
        raise NotImplementedError

    # -- what kinds of runs say ---------------------------------------------------------------------------------------

    def fail(self, rule: str, problem: str) -> None:
        """Note what was violated first."""
        self.finding = self.finding or Violation(rule, problem)

    def _finding(self) -> Violation | None:
        return self.finding

    def on_work_done(self, process: SimProcess) -> None:
        """A program has done its work, and is about to end."""

    def _places(self) -> Sequence[Program]:
        raise NotImplementedError

    def _users(self) -> list[tuple[str, Callable[[], object], int, int]]:
        """Return what others do in the first phase: their names, and the pauses between two times, in ms."""
        return [("scaler", self.scaler.scale, 20, 200)] if self.scaler.is_drawn else []

    def _begin(self) -> None:
        """Have everything that happens in the first phase begin."""
        for name in self.streams:
            definition = StreamDefinition(name, SCHEMA, self._rng.choice((1, 2, 3)), "k")
            self._catalogue.create_stream(definition, 0, if_not_exists=False)
        for place in self._places():
            self.world.at(self._rng.randint(0, 200), place.start)
        self.world.at(20, self._strike)
        for user in self._users():
            self._again_and_again(*user)

    def _end(self) -> None:
        """Wait for what else has to happen when all programs have done their work."""

    def _made_stores(self, seed: int) -> SimStores:
        return SimStores(lambda name: self._disk, self._watched)

    def _watched(self, inner: Catalogue) -> Catalogue:
        return inner

    # -- the world --------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Perhaps a process dies, or stops, or everybody dies with the power."""
        rng, faults = self._rng, self.faults
        if faults.is_healed:
            return
        place = rng.choice(self._places())
        process = place.process
        if faults.has(Fault.POWER_CUT) and rng.random() < 0.02 and faults.spend():
            self._cut_power()
        elif process is not None and process.is_alive and rng.random() < 0.3:
            if faults.has(Fault.WORKER_CRASH) and rng.random() < 0.5 and faults.spend():
                process.kill()
            elif faults.has(Fault.WORKER_PAUSE) and faults.spend():
                process.pause()
                self._stopped.append(process)
                self.world.at(rng.randint(50, STOPPED_MS_MAX), process.resume)
                if rng.random() < 0.5:
                    self.world.at(rng.randint(1, STOPPED_MS_MAX), self._start_beside, place)
        self.world.at(rng.randint(20, 200), self._strike)

    def _start_beside(self, place: Program) -> None:
        """A user takes the one that is stopped for dead, and starts another one."""
        if not self.faults.is_healed and not place.is_done:
            place.start()

    def _cut_power(self) -> None:
        self.world.tell("world", "the power is cut")
        for place in self._places():
            if place.process is not None and place.process.is_alive:
                place.process.kill()
        self._disk.cut_power()

    def _heal(self) -> None:
        self.world.tell("world", "heals")
        self.faults.heal()
        for process in self._stopped:
            process.resume()

    def _again_and_again(self, who: str, call: Callable[[], object], least_ms: int, most_ms: int) -> None:
        """Have processes of their own make ``call``, as long as something may fail."""
        self._repeat("user", lambda: self._try(who, call), lambda: self._rng.randint(least_ms, most_ms))


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
        # what the program keeps when its process is killed:
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
                    raise  # the caller makes a new follower
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
