"""Users with programs that read as a group, and write what is read, in the machine room (SM90). Counterpart.

``groups``.

Each program has a place. It dies there at any moment, is stopped for longer than its lease, and is started again,
perhaps beside the one that was stopped. What its calls raise, it heeds as a user would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from headgate.errors import CorruptionError, FencedError, HeadgateError, StorageError, TruncatedError
from headgate.protocol.store.transactions import Status
from headgate.sim.machine.faults import Faults
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.streams.group_judge import GroupJudge
from headgate.sim.world import World
from headgate.store.reader_groups import CheckpointMarker, GroupEvents, GroupReader, ReaderGroup
from headgate.store.store import Store

STORE = "sim://store"
GROUP = "app/readers"
SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
KEYS = 5

PATIENCE_MS = 60_000
"""Virtual time in which a name is free again when nothing fails any more."""


class Around(Protocol):
    """What programs are in: a ``places.ProgramsRun``."""

    world: World
    tasks: Tasks
    faults: Faults

    def fail(self, rule: str, problem: str) -> None:
        """Note what was violated first."""

    def on_work_done(self, process: SimProcess) -> None:
        """A program has done its work, and is about to end."""


class AroundGroup(Around, Protocol):
    """What readers of a group are in: ``groups.GroupRun``."""

    judge: GroupJudge

    def group(self, store: Store) -> ReaderGroup:
        """Return the group, which the process that comes first makes."""

    def is_over(self) -> bool:
        """Whether nothing will ever be left to read."""


class Place:
    """Where one program runs, again and again, until it has done its work."""

    def __init__(self, run: Around, name: str, rng: random.Random) -> None:
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


class Writer(Place):
    """Appends numbered events to a stream, some in transactions, each once and in order; then it seals the stream."""

    def __init__(self, run: Around, stream: str, rng: random.Random) -> None:
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


class Member(Place):
    """Reads as one of the group until nothing is left."""

    def __init__(self, run: AroundGroup, number: int, rng: random.Random) -> None:
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
