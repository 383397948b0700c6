"""Programs of users that run in a store, again and again, until they have done their work.

A program dies at any moment, is stopped, and is started again, perhaps beside the one that was stopped; all of them die
with the power. What its calls raise, it heeds as a user would. A run has two phases: faults, then none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pyarrow as pa

from headgate.errors import HeadgateError, TruncatedError
from headgate.protocol.store.transactions import Status
from headgate.sim.machine.storage import Disk, SimStores
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault, Faults, Violation
from headgate.sim.product.run import Simulation
from headgate.sim.streams.stream_changes import Scaler
from headgate.store import store as stores
from headgate.store.catalogue.base import Catalogue
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition

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
        self.bounds.append((stores, "OPENERS", {**stores.OPENERS, "sim": self._stores.open}))
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
