"""What happens in the store beside a simulated pipeline: other programs, and streams that are truncated or scaled.

Events of ``BackgroundTraffic`` are of many types, and small bounds make them large. Everything that was confirmed is
there, once and in order; what was refused changed nothing. Drawn from a generator of its own, so that seeds without it
stay what they are.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

import headgate as hg
from headgate.connectors.streams import StreamSink, decode_position, owner_of
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.config import Duration
from headgate.model.manifest import Manifest
from headgate.model.pipeline_identity import Owner
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.store import layouts as machine
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.reset import Reset
from headgate.runtime.surroundings import Surroundings
from headgate.sim.machine.tasks import SimProcess, SimThread, Tasks
from headgate.sim.machine.world import Bound, Violation
from headgate.sim.product.settings import NAME, ROOT
from headgate.storage.urls import open_storage
from headgate.store import chunks, maintenance, transactions, writer
from headgate.store.store import Store
from headgate.store.streams import Scaling, StreamInfo
from headgate.store.transactions import Transaction
from headgate.store.writer import StreamWriter


def check_cuts(source: str, stream: Callable[[], StreamInfo]) -> int:
    """Compare the positions of ``source`` with the cuts of all checkpoints; return how many segments were compared.

    ``stream`` is looked at after them: a segment that was read to its end is at the end of a sealed stream.

    Raises:
        Violation: one differs.
        HeadgateError: they cannot be read now.
    """
    manifests = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())
    return sum(_check(manifest, source, stream) for manifest in manifests)


def _check(manifest: Manifest, source: str, stream: Callable[[], StreamInfo]) -> int:
    told = next((state for state in manifest.hooks if state.hook == source and state.checkpoint is None), None)
    if told is None or not told.data:
        return 0
    cut: dict[str, int] = json.loads(told.data)["cut"]
    rows = hg.read_state(f"{ROOT}/{NAME}", source, id=manifest.checkpoint)
    info = stream()
    for split, position in rows.select("split", "position").iter_rows():
        segment = split.rpartition("/")[2]
        at = decode_position(split, position).position
        is_closed = info.is_sealed or int(segment) not in {present.segment_id for present in info.segments}
        has_ended = is_closed and at == info.ends[int(segment)]
        wanted = cut.get(segment, 0)  # of a segment that came later it has nothing
        if at != wanted and not has_ended:
            raise Violation("SC21", f"checkpoint {manifest.checkpoint} has {split} at {at}, not {wanted}")
    return rows.height


EMPTIED_RATE = 0.5
"""Of the seeds with streams, so many end with a reset."""

KILLS_MAX = 3


class EmptiedStreams:
    """The reset of one run, and what must hold after it."""

    def __init__(
        self,
        seed: int,
        tasks: Tasks,
        program: Callable[[], PipelineDefinition],
        around: Callable[[SimProcess], Surroundings],
        outputs: Sequence[str],
    ) -> None:
        """``outputs``: sinks of the pipeline, which are called like their streams."""
        self._rng = random.Random(f"streams that are emptied, of seed {seed}")
        self.is_drawn = self._rng.random() < EMPTIED_RATE
        self._tasks = tasks
        self._program = program
        self._around = around
        self._outputs = outputs
        self.kills_count = 0
        self.is_done = False

    def check(self, store: Store) -> None:
        """Start over, then look. Called in a thread of the simulation, when nothing else runs.

        Raises:
            Violation: something is left, or something else is gone.
        """
        sinks = {str(node.name): node.spec for node in self._program().graph.nodes}
        before = store.list_streams()
        owners = {name: store.pipelines.owner(owner_of(NAME, name)) for name in self._outputs}
        self._start_over()
        found = {info.name: self._outside(info) for info in store.list_streams()}
        left = {info.name: self._outside(info) for info in before if info.name not in self._outputs}
        for (
            info
        ) in before:  # one that was scaled, or has a policy, is not as its sink makes it: it is emptied, and stays
            sink = sinks.get(info.name)
            if isinstance(sink, StreamSink) and (info.segments_count != sink.segments or info.scaling is not None):
                left[info.name] = (0, info.segments_count, (0,) * info.segments_count)
        if found != left:
            raise Violation("SO5", f"after a reset there are {sorted(found.items())}, not {sorted(left.items())}")
        for name, owner in owners.items():
            self._check_fenced(store, name, owner)

    def _outside(self, info: StreamInfo) -> tuple[int, int, tuple[int, ...]]:
        """Return what a user sees of a stream; one that is emptied is another one afterwards."""
        return 0 if info.name in self._outputs else info.stream_id, info.segments_count, info.ends

    def _start_over(self) -> None:
        """Begin until one comes to its end."""
        while not self.is_done:
            process = SimProcess(self._tasks, f"reset{self.kills_count}")
            self._tasks.spawn(process, lambda process=process: self._reset(process), "main")  # type: ignore[misc]
            if self.kills_count < KILLS_MAX and self._rng.random() < 0.7:
                self.kills_count += 1
                self._tasks.world.at(self._rng.randint(1, 60), process.kill)
            while process.is_alive:
                self._tasks.park(5)

    def _reset(self, process: SimProcess) -> None:
        """Do what the command does with the program of the pipeline."""
        with Reset.holding_the_lock(ROOT, NAME, self._program(), self._around(process)) as resetting:
            resetting.finish()
            plan = resetting.plan()
            if not plan.is_empty:
                resetting.carry_out(plan)
            self._require(resetting.plan().is_empty, "a reset that is over has left something to be deleted")
        self.is_done = True
        process.end(0)

    def _check_fenced(self, store: Store, name: str, before: Owner) -> None:
        """A process that wrote before the reset is informed that it was replaced."""
        if before.life is None:
            return
        owner = owner_of(NAME, name)
        now = store.pipelines.owner(owner)
        self._require(now.life is not None and now.life.id != before.life.id, f"{name} is still of the former life")
        try:
            store.transactions.fence(owner, before.generation)
        except FencedError:
            return
        self._require(False, f"a former generation may still write to {name}")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise Violation("SO5", problem)


SCALED_RATE = 0.4
"""So many of the seeds with streams have it."""

POLICIES_RATE = 0.3
"""In so many of them streams have policies."""

TIMES_QUICKER = 1_000
COOL_DOWNS: tuple[Duration, ...] = (0, "50ms", "300ms")
SEGMENTS_MAX = 5


class Scaler:
    """Scales ``streams`` of the store at ``root``."""

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"who scales the streams of seed {seed}")
        self._root, self._streams = root, streams
        self.is_drawn = self._rng.random() < SCALED_RATE
        self.scaled_count = 0

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> None:
        """Scale a stream that is there."""
        store = Store.shared(self._root)
        self._scale(store, _any_of(self._rng, store, self._streams))
        self.scaled_count += 1

    def _scale(self, store: Store, name: str) -> None:
        present = [segment.segment_id for segment in store.layout(name).present]
        at = self._rng.randrange(len(present))
        how = self._rng.random()
        if how < 0.15:
            store.resize(name, self._rng.randint(1, SEGMENTS_MAX - 1))
        elif (how < 0.55 or len(present) == 1) and len(present) < SEGMENTS_MAX:
            store.split(name, present[at], self._rng.randint(2, 3))
        else:
            store.merge(name, present[max(0, at - 1) : at + 1] if at else present[:2])


class Policies:
    """Gives each of ``streams`` a policy as soon as it is there, and asks what it says, beside those who write.

    A run lasts seconds, so all that policies go by is a thousand times shorter than usual, and so are pauses.
    """

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"scaling policies of seed {seed}")
        self._root = root
        self.is_drawn = self._rng.random() < POLICIES_RATE
        self._scaling = {name: self._draw() for name in streams}
        self._had: dict[str, int] = {}
        """By stream that has its policy, how many segments it had when it got that."""
        self.scaled_count = 0

    def _draw(self) -> Scaling:
        bounds = self._rng.choice((3, SEGMENTS_MAX))
        target, cool_down = self._rng.choice((10, 50, 400)), self._rng.choice(COOL_DOWNS)
        if self._rng.random() < 0.3:
            return Scaling(bytes_per_second=40 * target, max_segments=bounds, cool_down=cool_down)
        return Scaling(events_per_second=target, max_segments=bounds, cool_down=cool_down)

    @property
    def bounds(self) -> list[Bound]:
        """Time passes more quickly for policies."""
        return [
            (machine, "WINDOWS_MS", tuple(window_ms // TIMES_QUICKER for window_ms in machine.WINDOWS_MS)),
            (maintenance, "MAINTENANCE_INTERVAL_MS", maintenance.MAINTENANCE_INTERVAL_MS // TIMES_QUICKER),
        ]

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> None:
        """Scale a stream that is there as its policy says."""
        store = Store.shared(self._root)
        name = _any_of(self._rng, store, list(self._scaling))
        if name not in self._had:
            self._had[name] = store.set_scaling(name, self._scaling[name]).segments_count
        self.scaled_count += store.autoscale(name)

    def check(self, store: Store) -> None:
        """Look whether policies, if no other process has scaled, kept within their bounds.

        Raises:
            Violation: S79: one did not.
        """
        for name, had in sorted(self._had.items()):
            count, policy = len(store.layout(name).present), self._scaling[name].checked()
            if not min(policy.segments_min, had) <= count <= max(policy.segments_max, had):  # no step leads out
                raise Violation("S79", f"{name} has {count} segments, and its policy says {policy}")


def _any_of(rng: random.Random, store: Store, streams: Sequence[str]) -> str:
    """Return one of ``streams`` that is there already."""
    there = {info.name for info in store.list_streams()}
    return rng.choice([name for name in streams if name in there])


def left_in(store: Store) -> list[str]:
    """Collect what is left of writers that are gone, and return what the check of the store finds."""
    store.collect_orphans()
    return found_in(store)


def found_in(store: Store) -> list[str]:
    """Return what the check of the store finds."""
    return [str(problem) for problem in store.fsck() if not problem.is_harmless]


RATE = 0.5
"""Of the seeds with streams, so many have a neighbour."""

SHARED_RATE = 0.5
"""How often it has several threads share a writer, and how often it lets a writer linger."""

SOON_MS = 400_000
"""Virtual time in which an append becomes durable: phases in which everything fails are far shorter."""

STREAM, SCRATCH, OWNER = "next-door/events", "next-door/scratch", "next-door"
WRITER = "neighbour"

SMALL: tuple[Bound, ...] = (
    (chunks, "EVENT_BYTES_MAX", 900),
    (writer, "FLUSH_BYTES", 1_500),
    (transactions, "FLUSH_BYTES", 500),
)
"""Bounds that these seeds have instead of the usual ones."""

_DAY, _MOMENT = date(1970, 1, 1), datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)
_KEYS: tuple[tuple[pa.DataType, Callable[[int], Any]], ...] = (
    (pa.string(), lambda n: f"key {n}ß"),
    (pa.binary(), lambda n: bytes([n])),
    (pa.float64(), lambda n: (0.0, -0.0, float("nan"), 1.5)[n % 4]),
    (pa.bool_(), lambda n: n % 2 == 0),
    (pa.int32(), lambda n: -n),
    (pa.uint64(), lambda n: n),
    (pa.date32(), lambda n: _DAY + timedelta(days=n)),
    (pa.timestamp("us"), lambda n: _MOMENT + timedelta(microseconds=n)),
)
"""Types of routing keys, and a value of each."""

_REST = (
    pa.field("n", pa.int64()),
    pa.field("text", pa.string()),
    pa.field("pair", pa.struct([("tags", pa.list_(pa.string())), ("half", pa.float32())])),
)

_T = TypeVar("_T")


class BackgroundTraffic:
    """Does one thing after the other, each again until the store has taken it."""

    def __init__(self, seed: int | None, tasks: Tasks, store: Callable[[], Store]) -> None:
        """Draw; ``is_drawn`` says whether this seed has one. None: it has not."""
        self._rng = random.Random(f"neighbour of seed {seed}")
        self.is_drawn = seed is not None and self._rng.random() < RATE
        self.is_done = not self.is_drawn
        self._tasks = tasks
        self._open = store
        self._dtype, self._key = self._rng.choice(_KEYS)
        self._schema = pa.schema([pa.field("key", self._dtype), *_REST])
        self._shared = random.Random(f"threads of the neighbour of seed {seed}")
        self._next = 0
        self._expected: Counter[int] = Counter()
        """Events that are in the stream, by number."""
        self.bounds = SMALL if self.is_drawn else ()

    def begin(self) -> None:
        """Start."""
        if self.is_drawn:
            process = SimProcess(self._tasks, "neighbour")
            self._tasks.spawn(process, lambda: self._live(process), "main")

    def check(self) -> None:
        """Look at what is there, when all is over.

        Raises:
            Violation: it is not what was confirmed.
        """
        if not self.is_drawn:
            return
        store = self._open()
        found: Counter[int] = Counter()
        self._require(len(store.layout(STREAM).present) == 2, f"{STREAM} has other segments than it was made with")
        for segment in range(store.describe(STREAM).segments_count):
            reader = store.reader(STREAM, segment)
            while (batch := reader.read()) is not None:
                found.update(batch.column("n").to_pylist())
        if found != self._expected:
            lost, more = self._expected - found, found - self._expected
            raise Violation("I1", f"{STREAM} lost {sorted(lost)[:5]}, has {sorted(more)[:5]} more")
        if [info.name for info in store.list_streams("next-door")] != [STREAM]:
            raise Violation("I1", "a stream of the neighbour's is there that was deleted")

    # -- its life ---------------------------------------------------------------------------------------------------

    def _live(self, process: SimProcess) -> None:
        store = self._open()
        self._again(
            lambda: store.create_stream(STREAM, self._schema, segments=2, routing_key="key", if_not_exists=True)
        )
        for _ in range(self._rng.choice((2, 4, 8))):
            self._rng.choice((self._append, self._append_unnumbered, self._transact, self._pass_by, self._err))(store)
            self._tasks.park(self._rng.randint(1, 60))
        if self._shared.random() < SHARED_RATE:
            self._append_together(process, store)
        if self._shared.random() < SHARED_RATE:
            self._append_and_wait(store)
        self.is_done = True
        process.end(0)

    def _append(self, store: Store) -> None:
        """With numbers: the process that repeats one adds nothing."""
        epoch = self._rng.randrange(1_000_000)
        opened = self._again(lambda: store.writer(STREAM, writer_id=f"{WRITER}-{epoch}", epoch=epoch, linger=None))
        with opened:
            for number in range(1, self._rng.randint(2, 5)):
                batch = self._batch(self._rng.choice((1, 6, 30)))
                self._again(partial(opened.append, batch, sequence=number))
                if self._rng.random() < 0.3:
                    self._again(partial(opened.append, batch, sequence=number))
                if self._rng.random() < 0.3:
                    self._again(opened.flush)
                    again = opened.append(batch, sequence=number)
                    self._require(again.result().is_duplicate, "a repeated append was not known")
            self._refuses(lambda: opened.append(self._batch(1, is_there=False), sequence=99))
            self._again(opened.flush)

    def _append_unnumbered(self, store: Store) -> None:
        """Without numbers; what an aborted block had not flushed is not there."""
        opened = self._again(lambda: store.writer(STREAM, linger=None))
        self._again(lambda: opened.append(self._empty()))
        batch = self._batch(5)
        self._again(lambda: opened.append(batch))
        self._again(opened.close)
        self._refuses(lambda: opened.append(self._batch(1, is_there=False)))
        lost = self._again(lambda: store.writer(STREAM, writer_id="aborted", epoch=self._next, linger=None))
        try:
            with lost:
                lost.append(self._batch(1, is_there=False))
                raise RuntimeError("trouble of the neighbour's own")
        except RuntimeError:
            pass

    def _append_together(self, process: SimProcess, store: Store) -> None:
        """Several threads share one writer, and its flushes."""
        name = f"{WRITER}-together" if self._shared.random() < 0.5 else ""
        opened = self._again(lambda: store.writer(STREAM, writer_id=name, epoch=self._next, linger=None))
        threads = [SimThread(self._tasks, process, partial(self._append_some, opened), f"shares{i}") for i in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._again(opened.close)

    def _append_some(self, opened: StreamWriter) -> None:
        for _ in range(self._shared.randint(1, 4)):
            batch = self._batch(self._shared.choice((1, 6, 20)))
            future = self._again(lambda: opened.append(batch))  # noqa: B023 - called at once
            self._again(opened.flush)
            self._require(future.done(), "a flush left an append that came before it")

    def _append_and_wait(self, store: Store) -> None:
        """No process flushes: what is appended becomes durable by itself, within bounds."""
        opened = self._again(lambda: store.writer(STREAM, linger="5ms"))
        for _ in range(self._shared.randint(1, 4)):
            batch = self._batch(self._shared.choice((1, 6)))
            future = self._again(lambda: opened.append(batch))  # noqa: B023 - called at once
            waits_ms = self._shared.choice((0, 20, SOON_MS))
            until_ms = self._tasks.world.now_ms + waits_ms
            while not future.done() and self._tasks.world.now_ms < until_ms:
                self._tasks.park(20)
            if waits_ms == SOON_MS and not future.done():
                raise Violation("I5", "an append does not become durable by itself")
        self._again(opened.close)
        self._require(future.done(), "a writer was closed before its last append was durable")

    def _transact(self, store: Store) -> None:
        """By hand; readers see all of it when it was committed, and nothing when it was aborted."""
        name, is_committed = f"by-hand-{self._next}", self._rng.random() < 0.6
        transaction: Transaction = self._again(
            lambda: store.transactions.begin(STREAM, owner=OWNER, epoch=1, name=name)
        )
        for _ in range(self._rng.choice((0, 1, 5))):
            batch = self._batch(self._rng.choice((1, 20)), is_there=is_committed)
            self._again(partial(transaction.write, batch))
        transaction.write(self._empty())
        if not is_committed and self._rng.random() < 0.3:
            self._again(transaction.abort)
            self._refuses(transaction.prepare)
            return
        self._again(transaction.prepare)
        self._refuses(lambda: transaction.write(self._batch(1, is_there=False)))
        waiting = self._again(lambda: store.list_transactions(owner=OWNER, prefix="by-hand", stream=STREAM))
        self._require(name in {x.name for x in waiting}, "a prepared transaction is not listed")
        if is_committed:
            self._again(lambda: store.commit_transactions([(STREAM, name)], owner=OWNER, epoch=1))
        elif self._rng.random() < 0.5:
            self._again(lambda: store.transactions.abort(STREAM, name, owner=OWNER, epoch=1))
        else:
            self._again(lambda: store.transactions.recover(STREAM, owner=OWNER, epoch=1))
        if self._rng.random() < 0.5:
            self._again(lambda: store.transactions.forget_outcomes([name], owner=OWNER, epoch=1))

    def _pass_by(self, store: Store) -> None:
        """A stream comes, is used, and goes."""
        self._again(lambda: store.create_stream(SCRATCH, self._schema, segments=1, if_not_exists=True))
        opened = self._again(lambda: store.writer(SCRATCH, linger=None))
        opened.append(self._batch(3, is_there=False))
        self._again(opened.flush)
        info = self._again(lambda: store.describe(SCRATCH))
        self._require(info.events_count == 3, f"{SCRATCH} has {info.events_count} events, not 3")
        is_forced = self._rng.random() < 0.5
        if not is_forced:
            self._refuses(lambda: store.delete(SCRATCH))
            self._again(lambda: store.seal(SCRATCH))
            self._refuses(lambda: store.writer(SCRATCH))
        self._gone(lambda: store.delete(SCRATCH, force=is_forced))
        self._refuses(lambda: store.describe(SCRATCH))

    def _err(self, store: Store) -> None:
        """Use it wrongly."""
        opened = self._again(lambda: store.writer(STREAM, linger=None))
        large = pa.RecordBatch.from_pylist([{**self._row(), "text": "ä" * 900}], schema=self._schema)
        self._refuses(lambda: opened.append(large))
        self._refuses(lambda: opened.append(large.select(["n"])))
        self._refuses(lambda: store.describe("next-door/nowhere"))
        self._refuses(lambda: store.create_stream(STREAM, self._schema))
        self._refuses(lambda: store.create_stream(STREAM, pa.schema([("n", pa.int64())]), if_not_exists=True))
        self._refuses(lambda: store.create_stream("next-door/none", pa.schema([])))
        self._refuses(lambda: store.reader(STREAM, 7))
        self._refuses(lambda: store.reader(STREAM, 0, position=1 << 40))
        self._again(opened.close)

    # -- how it does things -----------------------------------------------------------------------------------------

    def _again(self, call: Callable[[], _T]) -> _T:
        """Do it until storage takes it."""
        while True:
            try:
                return call()
            except StorageError as error:
                if not error.is_transient:
                    raise
                self._tasks.park(self._rng.randint(1, 40))

    def _gone(self, delete: Callable[[], None]) -> None:
        """Delete; when the answer to a first try was lost, the second finds nothing."""
        tries = 0
        while True:
            try:
                return delete()
            except StorageError:
                tries += 1
                self._tasks.park(self._rng.randint(1, 40))
            except UsageError:
                self._require(tries > 0, "a stream was gone that nobody had deleted")
                return None

    def _refuses(self, call: Callable[[], object]) -> None:
        try:
            self._again(call)
        except UsageError:
            return
        raise Violation("I1", "the store took what it should have refused")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise Violation("I1", problem)

    def _batch(self, rows_count: int, *, is_there: bool = True) -> pa.RecordBatch:
        """Return new events; ``is_there``: they will be in the stream."""
        rows = [self._row() for _ in range(rows_count)]
        if is_there:
            self._expected.update(row["n"] for row in rows)
        return pa.RecordBatch.from_pylist(rows, schema=self._schema)

    def _row(self) -> dict[str, Any]:
        rng = self._rng
        self._next += 1
        return {
            "key": None if rng.random() < 0.2 else self._key(rng.randrange(6)),
            "n": self._next,
            "text": None if rng.random() < 0.3 else "é" * rng.randrange(40),
            "pair": None if rng.random() < 0.3 else {"tags": ["a"] * rng.randrange(3), "half": 0.5},
        }

    def _empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self._schema)
