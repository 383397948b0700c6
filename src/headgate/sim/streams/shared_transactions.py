"""Transactions that two processes share, which die, beside a pipeline between streams.

Round after round two processes write into one transaction of a stream of their own; one of them begins it, and
prepares, commits, aborts or leaves it when both are done. Both are killed and stopped at any moment, and come again
while their former life may still be there. A blackboard, which never fails, tells them the id of a round's transaction
and who is done with it; if the lease is over before that, they begin the round again. Meanwhile a user scales the
stream and sets the date. What must hold: of each round that was to be committed each event is there once, of every
other none; the process that looks sees a round as a whole or not at all; the events of a participant are in its order;
nothing is left undecided. Counterpart: ``streams``. Drawn from a generator of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from functools import partial

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import FencedError, StorageError
from headgate.protocol.store.transactions import Status
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Bound, Violation
from headgate.sim.streams.background_traffic import Scaler
from headgate.sim.streams.streams import STORE, Event, StreamRun
from headgate.store import transactions
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition
from headgate.store.transactions import SharedTransaction, TransactionWriter

STREAM = "shared/events"
SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
NAMES = ("left", "right")
COORDINATOR = NAMES[0]
OWNER = "sharers"
ENDINGS = ("commit", "commit", "prepare", "abort", "leave")
"""What becomes of a round: ``prepare`` is committed, too, later; ``leave`` is up to its lease."""

LEASES_MS = (300, 1_000, 20_000)
SMALL: Bound = (transactions, "FLUSH_BYTES", 300)
"""A bound that is small here, so that what is written reaches it."""

KEYS = 5
KILLS_MAX = 12
DATES_MS = (0, 0, 90_000, -90_000)
"""By how much the date is set, some time."""


@dataclass(slots=True)
class Round:
    """What two processes write in one transaction.

    Attributes:
        batches: what each writes, in this order.
        id: of the transaction that is written now.
        done: who has flushed everything into that.
        prepared: the id of a transaction that was prepared: nothing but a verdict ends it.
        is_over: no process has anything to do any more.
        had: transactions that there were of it.
    """

    number: int
    ending: str
    lease_ms: int
    batches: dict[str, list[list[Event]]]
    id: str = ""
    done: set[str] = field(default_factory=set)
    prepared: str = ""
    is_over: bool = False
    had: int = 0

    @property
    def events(self) -> list[Event]:
        """All that is to be there if it is committed."""
        return [event for batches in self.batches.values() for batch in batches for event in batch]

    @property
    def is_committed(self) -> bool:
        """Whether its events are to be there at the end."""
        return self.ending in ("commit", "prepare")


class SharingRun(StreamRun):
    """A run of streams with two processes that share transactions."""

    IS_PLAIN = True
    SUBJECT = "shared transactions"

    def _draw(self) -> None:
        super()._draw()
        rng = self.rng
        count = rng.randint(2, 6)
        self.rounds = [_draw_round(rng, number) for number in range(count)]
        self.lives = dict.fromkeys(NAMES, 0)
        self.kills_count = self.expired_count = self.looked_count = self.fenced_count = 0
        self._processes: dict[str, SimProcess] = {}
        self._scaler = Scaler(self.seed, STORE, (STREAM,))
        self.bounds.append(SMALL)

    def _begin(self) -> None:
        definition = StreamDefinition(STREAM, SCHEMA, 2, "k")
        self.stores.direct_catalogue("store").create_stream(definition, 0, if_not_exists=False)
        at, rng = self.world.at, self.rng
        for who in NAMES:
            at(0, self._start, who)
        at(30, self._strike)
        at(50, self._repeat, "onlooker of rounds", self._look_at_rounds, lambda: rng.randint(20, 200))
        at(40, self._repeat, "janitor", self._expire, lambda: rng.randint(20, 400))
        at(rng.randint(0, 1_000), self._set_date)
        if self._scaler.is_drawn:
            at(15, self._repeat, "scaler", self._scaler.scale, self._scaler.pause_ms)
        super()._begin()

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        self.lives[name] += 1
        life = self.lives[name]
        process = self._processes[name] = SimProcess(self.tasks, f"{name}{life}", partial(self._on_gone, name, life))
        self.tasks.spawn(process, lambda: self._live(process, name, life), "main")

    def _on_gone(self, name: str, life: int, code: int) -> None:
        if code and life == self.lives[name]:
            self.world.at(self.rng.choice((5, 150, 1_500)), self._start, name)

    def _strike(self) -> None:
        """Kill one, stop one for a while, or start another life beside it; come back later."""
        if self.kills_count >= KILLS_MAX or self.faults.is_healed:
            return
        if self.rng.random() < 0.4:
            for name in NAMES:
                self._stop(name, 1_500)
        else:
            self._strike_one(self.rng.choice(NAMES), self.rng.random())
        self.world.at(self.rng.randint(5, 250), self._strike)

    def _strike_one(self, name: str, how: float) -> None:
        if how < 0.5 and self._processes[name].is_alive:
            self.kills_count += 1
            self._processes[name].kill()
        elif how >= 0.5:
            self._stop(name, self.rng.choice((50, 1_500)))
            if how > 0.7:
                self._start(name)

    def _stop(self, name: str, for_ms: int) -> None:
        process = self._processes[name]
        if process.is_alive and not process.is_paused:
            self.kills_count += 1
            process.pause()
            self.world.at(for_ms, process.resume)

    def _expire(self) -> None:
        """Look at leases, beside those who use the stream."""
        Store.shared(STORE).expire_transactions(STREAM)

    def _set_date(self) -> None:
        self.stores.wall_shift_ms = self.rng.choice(DATES_MS)

    # -- the two processes -------------------------------------------------------------------------------------------

    def _live(self, process: SimProcess, name: str, life: int) -> None:
        while True:
            round_ = next((one for one in self.rounds if not one.is_over), None)
            if round_ is None or self.lives[name] != life:
                process.end(0)
                return
            id_ = round_.id
            try:
                self._work(Store.shared(STORE), round_, name)
            except StorageError as error:
                self.world.tell(process.name, str(error))
                self.tasks.park(self.rng.randint(1, 40))
            except FencedError as error:
                self.fenced_count += 1
                self.world.tell(process.name, str(error))
                self._on_fenced(round_, id_)

    def _work(self, store: Store, round_: Round, name: str) -> None:
        """Do what is next in a round."""
        if not round_.id:
            if name == COORDINATOR:
                begun = store.begin_shared(STREAM, lease=f"{round_.lease_ms}ms", owner=OWNER)
                if not round_.id and not round_.is_over:  # else another life was quicker; this one is left
                    round_.id, round_.done, round_.had = begun.id, set(), round_.had + 1
            else:
                self.tasks.park(10)
            return
        id_ = round_.id
        transaction = store.transaction(STREAM, id_)
        if name not in round_.done:
            self._write(transaction, round_, name)
            if round_.id == id_:
                round_.done.add(name)
        elif name == COORDINATOR and len(round_.done) == len(NAMES):
            self._decide(transaction, round_, id_)
        else:
            transaction.ping()
            self.tasks.park(self.rng.randint(5, 60))

    def _write(self, transaction: SharedTransaction, round_: Round, name: str) -> None:
        """Write all from the beginning: what is there already is dropped."""
        writer = transaction.writer(name)
        for number, batch in enumerate(round_.batches[name], start=1):
            rows = [dict(zip(SCHEMA.names, event, strict=True)) for event in batch]
            writer.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), sequence=number)
            if self.rng.random() < 0.5:
                self._flush(writer)
            self.tasks.park(self.rng.randint(0, 30))
        self._flush(writer)

    def _flush(self, writer: TransactionWriter) -> None:
        """A writer that could not flush goes on with what it holds; sometimes a new one has to find out."""
        while True:
            try:
                return writer.flush()
            except StorageError:
                if self.rng.random() < 0.3:
                    raise
                self.tasks.park(self.rng.randint(1, 40))

    def _decide(self, transaction: SharedTransaction, round_: Round, id_: str) -> None:
        if round_.ending == "prepare":
            transaction.prepare()
            round_.prepared = id_
            self.tasks.park(self.rng.choice((0, 100, 2 * round_.lease_ms)))
        if round_.is_committed:
            transaction.commit()
        elif round_.ending == "abort":
            transaction.abort()
        if round_.id == id_:
            round_.is_over = True

    def _on_fenced(self, round_: Round, id_: str) -> None:
        """Another program has this participant, or the transaction has ended: if it should not have.

        It is begun again.
        """
        status = self._status_of(id_)
        if round_.id != id_ or status in (Status.OPEN, Status.PREPARED):
            self.tasks.park(self.rng.randint(1, 20))
        elif status is Status.COMMITTED or not round_.is_committed:
            round_.is_over = True
        else:
            self.expired_count += 1
            if round_.prepared == id_:
                self.history.fail("S12", f"{id_} was prepared, and aborted")
            round_.id, round_.done = "", set()

    def _status_of(self, id_: str) -> Status:
        """Return what became of a transaction, as no client sees it."""
        (found,) = self.stores.direct_catalogue("store").transactions(OWNER, id_, STREAM)
        return found.status

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _look_at_rounds(self) -> None:
        """Look at the stream as it is at one moment: of each round all is there, or nothing."""
        there = Counter(self._events(Store.shared(STORE)))
        for round_ in self.rounds:
            count = sum(there[event] for event in round_.events)
            if count not in (0, len(round_.events)):
                text = f"{count} of {len(round_.events)} events of round {round_.number} are there"
                raise Violation("S14", text)
        self.looked_count += 1

    def _verify(self) -> None:
        while not all(one.is_over for one in self.rounds) or any(x.is_alive for x in self._processes.values()):
            self.tasks.park(50)
        store = Store.shared(STORE)
        while [x for x in store.list_transactions(owner=OWNER) if x.status is Status.OPEN]:
            self.tasks.park(max(LEASES_MS))  # of those that nobody ends, the leases end
            store.expire_transactions(STREAM)
        self._check_rounds(store)
        super()._verify()

    def _check_rounds(self, store: Store) -> None:
        events = self._events(store)
        there = Counter(events)
        wanted = Counter(event for one in self.rounds if one.is_committed for event in one.events)
        if there != wanted:
            lost, more = sorted((wanted - there).elements()), sorted((there - wanted).elements())
            raise Violation("I1", f"{STREAM} lost {len(lost)} {lost[:4]}, has {len(more)} more {more[:4]}")
        for key in range(KEYS):
            for name in range(len(NAMES)):
                numbers = [n for k, n in events if k == key and n // 1_000 % 10 == name]
                if numbers != sorted(numbers):
                    raise Violation("I6", f"{STREAM} has key {key} of {NAMES[name]} in the order {numbers[:10]}")

    def _events(self, store: Store) -> list[Event]:
        """Return what there is at this moment, one segment after the other."""
        catalogue = self.stores.direct_catalogue("store")
        found: list[Event] = []
        for segment, extent in sorted(catalogue.extents(catalogue.find_stream(STREAM)).items()):
            events: list[Event] = []
            reader = store.reader(STREAM, segment)
            while (batch := reader.read()) is not None:
                events += zip(*batch.to_pydict().values(), strict=True)
            found += events[: extent.end]
        return found


def _draw_round(rng: random.Random, number: int) -> Round:
    batches: dict[str, list[list[Event]]] = {}
    for at, name in enumerate(NAMES):
        first = number * 10_000 + at * 1_000  # numbers say who wrote them, and in which order
        sizes: Sequence[int] = [rng.choice((0, 1, 6, 20)) for _ in range(rng.randint(0, 5))]
        batches[name] = [
            [(rng.randrange(KEYS), first + before * 100 + n) for n in range(size)] for before, size in enumerate(sizes)
        ]
    return Round(number, rng.choice(ENDINGS), rng.choice(LEASES_MS), batches)
