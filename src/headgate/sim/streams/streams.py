"""Pipelines between streams of the store, read by positions or by a reader group.

A producer appends, the pipeline copies and counts, readers look on. The store is the product's, with its chunks on a
simulated disk. What must hold: the input stream has every event of the producer once, the output streams what one run
without faults would have written, once and in order; what a reader saw stays where it was; nothing is left undecided;
and the check of the store finds nothing.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.streams import decode_position, transaction_of
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import coordinator_host
from headgate.sim.machine.storage import SimStores
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault, Violation
from headgate.sim.product.run import Run
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.product.steps import KEYS
from headgate.sim.product.workloads import Branches, Splits
from headgate.sim.streams.background_traffic import (
    BackgroundTraffic,
    EmptiedStreams,
    Policies,
    Scaler,
    check_cuts,
    found_in,
    left_in,
)
from headgate.storage.urls import open_storage
from headgate.store import location
from headgate.store.reader import SegmentReader
from headgate.store.reader_groups import ReaderGroup
from headgate.store.store import Store
from headgate.store.streams import Retention, StreamCut, StreamDefinition
from headgate.store.writer import StreamWriter

STORE = "sim://store"
INPUT = "in"
SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
OUTPUTS = ("copies", "counts")
SOURCE = "source0"

CUTS_RATE = 0.4
"""Of the seeds with streams, so many have checkpoints that cut the stream at one moment."""

TRUNCATES_RATE = 0.4
"""In so many of them a user truncates the input all the time."""

SLOWLY = 8
"""With such checkpoints events come so many times more slowly, so that some come while a stream is cut."""

Event = tuple[int, int]


class Producer:
    """Appends numbered events until all are there, whatever dies or fails; then it seals the stream."""

    def __init__(self, run: StreamRun, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self._epoch = 0
        self.process: SimProcess | None = None
        self.batches = [_draw_batch(rng, first) for first in range(0, rng.choice((0, 12, 60, 180)), 6)]

    @property
    def events(self) -> list[Event]:
        """Everything that it appends, in order."""
        return [event for batch in self.batches for event in batch]

    def start(self) -> None:
        """Start it, with an epoch above those of its former lives."""
        self._epoch += 1
        process = self.process = SimProcess(self._run.tasks, f"producer{self._epoch}", self._on_gone)
        self._run.tasks.spawn(process, lambda: self._produce(process, self._epoch), "main")

    def strike(self) -> None:
        """Perhaps kill it, or start another one beside it, and come back later."""
        run = self._run
        if run.faults.is_healed or self.process is None:
            return
        if self._rng.random() < 0.1 and run.faults.has(Fault.WORKER_CRASH):
            self.process.kill()
        elif self._rng.random() < 0.05 and run.faults.has(Fault.SECOND_DRIVER):
            self.start()
        run.world.at(self._rng.randint(20, 200), self.strike)

    def _on_gone(self, code: int) -> None:
        if code:
            self._run.world.at(self._rng.randint(1, 100), self.start)

    def _produce(self, process: SimProcess, epoch: int) -> None:
        while True:
            try:
                self._append(Store.shared(STORE), epoch)
                process.end(0)
            except FencedError:
                process.end(0)  # a newer one goes on
            except UsageError as error:  # or has appended everything since this one looked, and sealed the stream
                self._run.world.tell(process.name, str(error))
                if not self._run.stores.direct_catalogue("store").find_stream(INPUT).is_sealed:
                    raise
            except StorageError as error:
                self._run.world.tell(process.name, str(error))
                self._run.tasks.park(self._rng.randint(1, 50))

    def _append(self, store: Store, epoch: int) -> None:
        writer = None
        if not store.describe(INPUT).is_sealed:
            writer = store.writer(INPUT, writer_id="producer", epoch=epoch, linger=None)
        while writer is not None and writer.next_sequence <= len(self.batches):
            number = writer.next_sequence
            rows = [dict(zip(SCHEMA.names, event, strict=True)) for event in self.batches[number - 1]]
            writer.append(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), sequence=number)
            self._flush(writer)
            self._run.tasks.park(self._rng.randint(1, 15) * (SLOWLY if self._run.cuts else 1))
        store.seal(INPUT)

    def _flush(self, writer: StreamWriter) -> None:
        """A writer that could not flush goes on with what it holds; sometimes a new one has to find out."""
        while True:
            try:
                return writer.flush()
            except StorageError as error:
                if not error.is_transient or self._rng.random() < 0.3:
                    raise
                self._run.tasks.park(self._rng.randint(1, 50))


def _draw_batch(rng: random.Random, first: int) -> list[Event]:
    return [(rng.randrange(KEYS), n) for n in range(first, first + 6)]


class Reader:
    """A user who follows a stream from its beginning."""

    def __init__(self, store: Store, stream: str) -> None:
        count = len(store.describe(stream).ends)
        self.stream = stream
        self.events: list[list[Event]] = [[] for _ in range(count)]
        self._readers: list[SegmentReader] = [store.reader(stream, segment) for segment in range(count)]

    def read(self) -> None:
        """Read what is there now."""
        for events, reader in zip(self.events, self._readers, strict=True):
            while (batch := reader.read()) is not None:
                events += zip(*batch.to_pydict().values(), strict=True)


class StreamRun(Run):
    """A run with a pipeline that reads and writes streams."""

    GROUP = ""
    """By which reader group the stream is read; "": by positions."""

    def _draw(self) -> None:
        seed, is_plain, rng = self.seed, self.is_plain, self.world.random
        self.faults.on -= {Fault.DRAIN, Fault.DENIED}  # all input is read; output that is gone is told of by other runs
        self._chance = random.Random(f"stream cuts of seed {seed}")
        settings = self.settings
        settings.fix_input()
        settings.job, settings.inputs, settings.files, settings.on_damaged = Branches(()), [], None, None
        self.cuts = not is_plain and self._chance.random() < CUTS_RATE
        self.stores = SimStores(self._disk)
        self.producer = Producer(self, random.Random(rng.random()))
        self._segments = rng.choice((1, 2, 3))
        self.background = BackgroundTraffic(None if is_plain else seed, self.tasks, lambda: Store.shared(STORE))
        self.emptied = EmptiedStreams(seed, self.tasks, self.definition, self._surroundings, OUTPUTS)
        self.empties = self.emptied.is_drawn and not is_plain
        self.scaler = Scaler(seed, STORE, (INPUT, *OUTPUTS))
        self.scales = self.scaler.is_drawn and not is_plain
        self.policies = Policies(seed, STORE, (INPUT, *OUTPUTS))
        self.has_policies = self.policies.is_drawn and not is_plain
        self.cuts_count = self.truncated_count = 0
        self.truncates = not is_plain and self._chance.random() < TRUNCATES_RATE
        self._onlookers: list[Reader] = []
        self._is_looking = False
        self.bounds += [(location, "OPENERS", {**location.OPENERS, "sim": self.stores.open}), *self.background.bounds]
        if self.truncates:
            self.bounds.append((coordinator_host, "DROPS_BETWEEN_FORGETTING", 1))
        if self.has_policies:
            self.bounds += self.policies.bounds

    def _begin(self) -> None:
        definition = StreamDefinition(INPUT, SCHEMA, self._segments, "k")
        self.stores.direct_catalogue("store").create_stream(definition, 0, if_not_exists=False)
        self.background.begin()
        self.producer.start()
        at, chance = self.world.at, self._chance
        at(20, self.producer.strike)
        if self.cuts:  # looked at more often than what is committed
            at(30, self._repeat, "onlooker", self._look_at_cuts, lambda: chance.randint(20, 120))
        if self.truncates:
            at(40, self._repeat, "janitor", self._truncate, lambda: chance.randint(10, 90))
        if self.scales:
            at(10, self._repeat, "scaler", self.scaler.scale, self.scaler.pause_ms)
        if self.has_policies:
            at(15, self._repeat, "policies", self.policies.scale, self.policies.pause_ms)

    def _list_committed(self) -> None:
        """A user reads on, and another one begins. A reader is one thread's: who is still reading goes on first."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            store = Store.shared(STORE)
            there = {info.name for info in store.list_streams()}
            looked_at = OUTPUTS if self.truncates else (INPUT, *OUTPUTS)
            self._onlookers += [Reader(store, name) for name in looked_at if name in there]
            for reader in self._onlookers:
                reader.read()
        except HeadgateError:
            return
        finally:
            self._is_looking = False

    def _verify(self) -> None:
        while not self.background.is_done:
            self.tasks.park(10)
        self.background.check()
        store = Store.shared(STORE)
        found = {name: self._read(store, name) for name in (INPUT, *OUTPUTS)}
        events = self.producer.events
        expected = {
            INPUT: Counter(events),
            "copies": Counter(event for event in events if event[1] % 3),
            "counts": _numbered(events),
        }
        if self.truncates:
            expected[INPUT] = self._left_of_input(store, expected[INPUT], found[INPUT])
        is_scaled = self.scales or self.has_policies
        for name, wanted in expected.items():
            there = Counter(event for segment in found[name] for event in segment)
            if there != wanted:
                lost, more = sorted((wanted - there).elements()), sorted((there - wanted).elements())
                raise Violation("I1", f"{name} lost {len(lost)} {lost[:4]}, has {len(more)} more {more[:4]}")
            if not (self.cuts and is_scaled):  # then order across segments is not promised
                _check_order(name, found[name])
        for reader in self._onlookers:
            for segment, seen in enumerate(reader.events):
                if found[reader.stream][segment][: len(seen)] != seen:
                    raise Violation("I2", f"a reader of {reader.stream}/{segment} saw what is not there any more")
        self._check_store(store)
        if self.has_policies and not self.scales:
            self.policies.check(store)
        if self.cuts:
            self._try("onlooker", self._look_at_cuts)
        if self.empties:
            self.emptied.check(store)
            self._check_store(store)

    def _build(self, p: hg.Pipeline, listed: Sequence[Splits], trouble: Callable[[], bool]) -> None:
        plain = hg.StreamSource(INPUT, store=STORE, stream_cuts=self.cuts)
        events = p.source(hg.GroupSource(INPUT, self.GROUP, store=STORE) if self.GROUP else plain, name=SOURCE)
        copies = events.filter(pl.col("n") % 3 != 0)
        copies.sink(hg.StreamSink("copies", store=STORE, routing_key="k"), name="copies")
        counts = events.select("k", n=pl.lit(1, pl.Int64)).key_by("k")
        numbered = counts.reduce(lambda so_far, row: {"k": row["k"], "n": so_far["n"] + row["n"]})
        numbered.sink(hg.StreamSink("counts", store=STORE, routing_key="k", segments=2), name="counts")

    def _promised(self, committables: Sequence[Committable]) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for committable in committables:
            found.setdefault(committable.sink, set()).add(transaction_of(committable))
        return {sink: frozenset(names) for sink, names in found.items()}

    def _truncate(self) -> None:
        """Truncate the input as its retention says: only the pipeline keeps it."""
        store = Store.shared(STORE)
        if store.holds(INPUT):  # else the pipeline did not begin yet
            store.set_retention(INPUT, Retention(age="1ms"))
            self.truncated_count += store.events_between(store.retain(INPUT)) < sum(store.describe(INPUT).ends)

    def _look_at_cuts(self) -> None:
        store = Store.shared(STORE)
        self.cuts_count += check_cuts(SOURCE, lambda: store.describe(INPUT))

    def _left_of_input(self, store: Store, events: Counter[Event], found: list[list[Event]]) -> Counter[Event]:
        """Return what must be there of a truncated input: what is there, if it is of the input and nothing else is."""
        there = Counter(event for segment in found for event in segment)
        if there - events or sum(store.describe(INPUT).ends) != events.total():
            raise Violation("I1", f"{INPUT} has {sorted((there - events).elements())[:4]} more, or has lost positions")
        return there

    def _read(self, store: Store, stream: str) -> list[list[Event]]:
        reader = Reader(store, stream)
        reader.read()
        return reader.events

    def _check_store(self, store: Store) -> None:
        waiting = [info.name for info in store.list_transactions() if not info.status.is_terminal]
        problems = [*found_in(store), *left_in(store)]
        if waiting or problems:
            raise Violation("I1", f"left in the store: prepared {waiting[:3]}, problems {problems[:3]}")


def _numbered(events: Sequence[Event]) -> Counter[Event]:
    per_key = Counter(k for k, _ in events)
    return Counter((k, number) for k, count in per_key.items() for number in range(1, count + 1))


def _check_order(stream: str, segments: Sequence[Sequence[Event]]) -> None:
    """Events of one key are where they belong, in the order in which they were appended.

    Where a stream was scaled, what follows is in segments of higher numbers.
    """
    events = [event for segment in segments for event in segment]
    for key in {k for k, _ in events}:
        numbers = [n for k, n in events if k == key]
        if numbers != sorted(numbers):
            raise Violation("I6", f"{stream} has key {key} in the order {numbers[:10]}")


DELETES_RATE = 0.03
"""So often a user who looks deletes the group."""


class GroupedRun(StreamRun):
    """A run with a source that reads by a reader group."""

    GROUP = "shared"

    def _draw(self) -> None:
        super()._draw()
        self.cuts = False
        self._meddling = random.Random(f"who meddles with the group of seed {self.seed}")
        self.refused_count = self.deleted_count = self.compared_count = 0
        self.world.at(30, self._repeat, "meddler", self._meddle, lambda: self._meddling.randint(10, 150))

    def _meddle(self) -> None:
        store = Store.shared(STORE)
        if not self.faults.is_healed and self._meddling.random() < DELETES_RATE:
            self.deleted_count += store.delete_reader_group(self.GROUP)
        group = store.reader_group(self.GROUP)
        try:
            self._meddling.choice(CALLS)(group)
            self.history.fail("GS1", "somebody else used the group of the pipeline")
        except UsageError:
            self.refused_count += 1
        self._compare()

    def _verify(self) -> None:
        super()._verify()
        self._compare()

    def _compare(self) -> None:
        """Compare the cuts in all checkpoints with the positions of their sources (GS13)."""
        for manifest in candidates(CheckpointLog(open_storage(ROOT), NAME).observe()):
            source_hook = next((state for state in manifest.hooks if state.hook == SOURCE), None)
            if source_hook is None or source_hook.data is None:
                raise Violation("GS13", f"checkpoint {manifest.checkpoint} has no cut of the group")
            cut = StreamCut.parse(json.loads(source_hook.data)["cut"])
            rows = hg.read_state(f"{ROOT}/{NAME}", SOURCE, id=manifest.checkpoint)
            for split, data in rows.select("split", "position").iter_rows():
                at, segment = decode_position(split, data).position, int(split.rpartition("/")[2])
                if cut.positions.get(segment, 0) != at:
                    text = f"checkpoint {manifest.checkpoint} has {split} at {at}, and its group at {cut}"
                    raise Violation("GS13", text)
                self.compared_count += 1


CALLS: tuple[Callable[[ReaderGroup], object], ...] = (
    lambda group: group.join("meddler"),
    lambda group: group.checkpoint("meddled"),
    lambda group: group.forget_checkpoint("checkpoint-1"),
    lambda group: group.reset(start="latest"),
)
