"""Pipelines that write through sinks of users into a database outside, and read from a source of a user's own.

The connectors are what the guide tells users to write, and no more. Judged beside everything else: each record is in
the database once; nothing is visible that no completed checkpoint promises, and nothing after what a later one
promised; a replaced generation changes nothing; and when the pipeline has ended nothing is prepared or open
(docs/spec/connectors.md).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import pyarrow as pa

import headgate as hg
from headgate.connectors import ledger_sink
from headgate.connectors.base import Sink, Source, SourceBatch, SourceContext, SourceReader
from headgate.connectors.fenced_sink import Fence, OutputName, owner_of
from headgate.errors import BringOutputBack, HeadgateError
from headgate.model.manifest import Committable, Manifest
from headgate.protocol.supervision import restart_policy
from headgate.runtime.checkpoints import snapshot_writer
from headgate.sim.machine.database import LATE_MS, Database, Feed, Session, Unreachable
from headgate.sim.machine.world import Fault, Violation
from headgate.sim.product.fault_injection import Kills
from headgate.sim.product.history import files_of
from headgate.sim.product.run import Run
from headgate.sim.product.settings import NAME
from headgate.sim.product.source import SCHEMA, Pace, PacedReader, positions_of
from headgate.sim.product.steps import Row
from headgate.sim.product.verdict import Order, Verdict
from headgate.sim.product.workloads import Splits, Values, draw_splits


class PreparingSink(hg.TwoPhaseSink[Session]):
    """Prepares its transactions in the database."""

    transient_errors = (Unreachable,)

    def __init__(self, database: Database, *, at_once: bool) -> None:
        """``at_once``: what is committed together becomes visible in one step, else in order."""
        self._database = database
        self.transaction_timeout = None if database.keeps_ms is None else f"{database.keeps_ms}ms"
        self._at_once = at_once

    def begin(self, name: str, schema: pa.Schema) -> Session:
        return self._database.begin(name)

    def write(self, transaction: Session, batch: pa.RecordBatch) -> None:
        self._database.write(transaction, batch.to_pylist())

    def prepare(self, transaction: Session, name: str, fence: hg.Fence) -> None:
        self._database.prepare(transaction, fence)

    def claim(self, fence: hg.Fence) -> None:
        self._database.claim(fence)

    def claimed(self, owner: str) -> hg.Fence | None:
        return self._database.claimed(owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        return self._database.all_claimed()

    def prepared(self, owner: str) -> Iterable[str]:
        """See ``TwoPhaseSink``: ours, and that of others."""
        return self._database.names()

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        for together in [names] if self._at_once else [[name] for name in names]:
            self._database.commit(together, fence)

    def abort(self, name: str, fence: hg.Fence) -> None:
        self._database.abort(name, fence)

    def committed(self, owner: str) -> Iterable[str]:
        """See ``TwoPhaseSink``: ours, and that of others."""
        return self._database.committed()

    def forget(self, names: Sequence[str]) -> None:
        self._database.forget_committed(names)

    def close(self, transaction: Session) -> None:
        self._database.close(transaction)


class PublishingSink(hg.LedgerSink):
    """Publishes what a checkpoint has kept, with its name."""

    transient_errors = (Unreachable,)

    def __init__(self, database: Database, piece_bytes: int | None = None) -> None:
        """``piece_bytes``: of what goes in pieces; None: the usual."""
        self._database = database
        if piece_bytes is not None:
            self.piece_bytes = piece_bytes

    def claim(self, fence: hg.Fence) -> None:
        self._database.claim(fence)

    def claimed(self, owner: str) -> hg.Fence | None:
        return self._database.claimed(owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        return self._database.all_claimed()

    def publish(self, outputs: Sequence[hg.LedgerOutput], fence: hg.Fence) -> None:
        """See ``LedgerSink``: each output in a transaction of its own, which its name allows."""
        self._database.claim(fence)
        done = self._database.published([output.name for output in outputs])
        for output in outputs:
            if output.name not in done:
                rows = [row for batch in output for row in batch.to_pylist()]
                self._database.publish(output.name, rows, fence)

    def forget(self, owner: str, before: int) -> None:
        mine = f"{owner}-"
        self._database.forget(lambda name: name.startswith(mine) and hg.output_checkpoint(name) < before)


class FeedSource(Source):
    """Reads the feed. What the driver lists is what is read."""

    def __init__(
        self, feed: Feed[Row], names: Sequence[str], pace: Pace, now_ms: Callable[[], int], *, acknowledges: bool
    ) -> None:
        """``acknowledges``: tell the feed what will never be asked for again."""
        self._feed, self._names, self._pace, self._now_ms = feed, names, pace, now_ms
        self._acknowledges = acknowledges

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "parts of the feed by name"

    def open(self, context: SourceContext) -> SourceReader:
        positions = positions_of(self._names, context)
        kind = _AcknowledgingReader if self._acknowledges else _FeedReader
        return kind(self._feed, positions, self._pace, self._now_ms)


class _FeedReader(PacedReader):
    """Reads its parts of the feed."""

    def __init__(self, feed: Feed[Row], positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        super().__init__(positions, pace, now_ms)
        self._feed = feed

    def poll(self) -> SourceBatch | None:
        names = self.splits()
        if self.wakeup_ms() or not names:
            return None
        name = self._take_turn(names)
        rows, is_end = self._feed.read(name, self._at[name], self._pace.batch_rows)
        if not rows and not is_end:
            return None
        self._at[name] += len(rows)
        if is_end:
            self._ended.add(name)
        return SourceBatch(name, pa.RecordBatch.from_pylist([dict(row) for row in rows], SCHEMA), None, is_end)


class _AcknowledgingReader(_FeedReader, hg.CheckpointedFunction, hg.CheckpointListener):
    """Has the feed forget what completed checkpoints have after them."""

    def __init__(self, feed: Feed[Row], positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        super().__init__(feed, positions, pace, now_ms)
        self._snapshots: dict[int, dict[str, int]] = {}

    def __deepcopy__(self, memo: object) -> _AcknowledgingReader:
        return self

    def snapshot(self, context: hg.SnapshotContext) -> None:
        """See ``CheckpointedFunction``: positions have just been taken."""
        self._snapshots[context.checkpoint_id] = dict(self._at)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """See ``CheckpointListener``; what fails is done with the next one."""
        covered = [one for one in self._snapshots if one <= checkpoint_id]
        positions = [self._snapshots.pop(one) for one in covered]
        for name, at in (positions[-1] if positions else {}).items():
            try:
                self._feed.forget(name, at)
            except OSError:
                continue


SAFETY_MS = 3_000
"""Virtual time in which something may go wrong; the records come in its first half."""

GOES_BACK_RATE = 0.2
"""Of the runs, so many may restore a checkpoint before damaged ones."""

DEATH_RATE = 0.15
"""How often a process dies soon after output that was prepared, or promised."""

STORED_BYTES = 400
"""In some runs what a sink prepares beyond this size is a file of its own."""

PIECES_RATE = 0.4
"""Of the runs, so many have ledgers that go in pieces of ``PIECE_BYTES``."""

PIECE_BYTES = 200

KEEPS_RATE = 0.25
KEEPS_MS = 650
"""In so many runs the database ends what is prepared for so long (CS9), and checkpoints that go well take less."""

_GIVES_UP = re.compile(rf"PipelineFailed: (cannot commit checkpoint \d+: )?{Unreachable.__name__}:")
"""What a driver says that does not try again what may pass; one that has tried says what it wanted to do (CS5)."""


class Kind(Enum):
    """What a sink writes through."""

    TWO_PHASES = "two phases"
    LEDGER = "ledger"
    FILES = "files"


class _Verdict(Verdict):
    """Reads the database, too."""

    def _committed(self, sink: str, columns: tuple[str, ...]) -> Counter[Values]:
        run = self._run
        assert isinstance(run, CustomRun)
        if not run.is_own(sink):
            return super()._committed(sink, columns)
        found: Counter[Values] = Counter()
        order = Order(sink)
        for rows in run.rows_of(sink):
            values = [tuple(row[column] for column in columns) for row in rows]
            found.update(values)
            if sink in self._settings.job.rising:
                order.follow(values)
        return found


class CustomRun(Run):
    """The user of one such pipeline."""

    IS_PLAIN = True
    SUBJECT = "custom"
    RESCALE_RATE = 0.5
    VERDICT = _Verdict
    READS_STATE = False

    def _draw(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.faults.on |= {Fault.PUT_FAILS, Fault.PUT_FAILS_AFTER, Fault.PUT_LANDS_LATE}
        self._draw_deaths(0.7, (Fault.DRIVER_CRASH, Fault.DRIVER_PAUSE, Fault.STOP), 4)
        self._draw_settings()
        self._kills = Kills(self, rng.choice((0, 3, 6)), DEATH_RATE, 12, drivers_rate=0.6)
        self._safety_ms = SAFETY_MS
        self._promises: dict[str, int] = {}
        """Names that manifests promise, with their checkpoints."""
        self._newest: Counter[str] = Counter()
        """The newest checkpoint of which something is visible, by sink."""
        self._latest: Counter[str] = Counter()
        """The newest generation that did anything in the database, by owner."""
        self._rolled_back: dict[str, tuple[Row, ...]] = {}
        self.expired_count = 0
        """What had been promised, and was not kept for long enough."""
        self._draw_damage(random.Random(f"custom damage of seed {self.seed}"))
        self._draw_limits(random.Random(f"custom limits of seed {self.seed}"))
        self.world.at(rng.randint(50, 800), self._restart_database)
        self.bounds.append((restart_policy, "TAKEOVER_MS", 0))  # no standby is here
        if self.stores_output:
            self.bounds.append((snapshot_writer, "PAYLOAD_BYTES_MAX", STORED_BYTES))
        if self.piece_bytes is not None:
            self.bounds.append((ledger_sink, "INLINE_BYTES_MAX", 0))

    def _draw_settings(self) -> None:
        rng, settings = self.rng, self.settings
        settings.files = settings.outside = None
        self.kinds: dict[str, Kind] = {}
        self._acknowledges = rng.random() < 0.4
        if self._acknowledges:  # a finished pipeline runs again, for those who may not have heard of it
            settings.fix_input()
            self.faults.on -= {Fault.DAMAGE}  # nobody goes back past what was acknowledged
        self._at_once, self.stores_output = rng.random() < 0.6, rng.random() < 0.3
        settings.checkpointing = replace(settings.checkpointing, tolerable_failures=rng.choice((5, 20)))
        if not settings.grows:
            count, rows_count = len(settings.inputs), rng.choice((1, 100, 200, 300))
            settings.inputs = [draw_splits(rng, i, rng.choice((1, 2, 3)), rows_count // count) for i in range(count)]
        self.database = Database(self.tasks, self.faults, rng, self._on_visible, self._on_change, rng.choice((0, 2, 4)))
        parts = {name: rows for splits in settings.inputs for name, rows in splits.items()}
        self._feed = Feed(self.tasks, self.faults, rng, parts)

    def _draw_damage(self, rng: random.Random) -> None:
        """Have some runs go back past damaged checkpoints: what they promised stays, and is made again (K18)."""
        settings = self.settings
        if not self._acknowledges and rng.random() < GOES_BACK_RATE:
            self.faults.on |= {Fault.DAMAGE, Fault.DRIVER_CRASH}
            self.faults.on -= {Fault.AWAY}
            self.faults.rates[Fault.DAMAGE] = 1.0
            self._kills.drivers_rate, self._kills.left = 1, 6
            self.faults.budget += 4
            settings.on_damaged = "previous"
            settings.checkpointing = replace(settings.checkpointing, retained=3)

    def _draw_limits(self, rng: random.Random) -> None:
        """Have some ledgers go in pieces, and some databases end what is prepared for too long."""
        settings = self.settings
        self.piece_bytes = PIECE_BYTES if rng.random() < PIECES_RATE else None
        if rng.random() < KEEPS_RATE:
            self.database.keeps_ms = KEEPS_MS
            settings.checkpointing = replace(settings.checkpointing, timeout="500ms", tolerable_failures=0)
            settings.restart = hg.FixedDelay(delay="20ms")

    def start(self) -> None:
        if not self.started:
            self._feed.begin(SAFETY_MS // 2)
        super().start()

    def kind_of(self, sink: str) -> Kind:
        """Return what a sink writes through; some run beside sinks of files."""
        if sink not in self.kinds:
            kinds = [Kind.TWO_PHASES, Kind.LEDGER] * 2 + [Kind.FILES] * (bool(self.kinds) and not self.stores_output)
            self.kinds[sink] = self.rng.choice(kinds)
        return self.kinds[sink]

    def _sink_to(self, name: str) -> Sink:
        match self.kind_of(name):
            case Kind.TWO_PHASES:
                return PreparingSink(self.database, at_once=self._at_once)
            case Kind.LEDGER:
                return PublishingSink(self.database, self.piece_bytes)
            case Kind.FILES:
                return super()._sink_to(name)

    def _source(self, listed: Splits, index: int, trouble: Callable[[], bool]) -> FeedSource:
        return FeedSource(self._feed, list(listed), self.settings.pace, self._now_ms, acknowledges=self._acknowledges)

    # -- what happens outside ---------------------------------------------------------------------------------------

    def _restart_database(self) -> None:
        if self.faults.is_healed or self.is_finished:
            return
        self.world.tell("world", "the database starts anew")
        self.database.restart()
        self.world.at(self.rng.randint(300, 3_000), self._restart_database)

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint is complete: perhaps a process dies, or rolls back by hand what it promises."""
        promised = [(self._name(c), int(c.checkpoint)) for c in manifest.committables if self.is_own(c.sink)]
        self._promises.update(promised)
        waiting = [name for name, _ in promised if name in self.database.prepared]
        if waiting and not self._rolled_back and self.faults.strikes(Fault.DENIED):
            name = self.rng.choice(waiting)
            self.world.tell("world", f"{name} is rolled back by hand")
            self._rolled_back[name] = self.database.prepared.pop(name)
        elif promised:
            self._kills.perhaps()

    def _judge(self, words: str) -> None:
        if _GIVES_UP.match(words):
            self.history.fail("CS5", f"what may pass stops the pipeline for good: {words}")
        super()._judge(words)

    def _apply_remedy(self, error: HeadgateError) -> None:
        if isinstance(error.remedy, BringOutputBack):
            expired = {name: rows for name, rows in self.database.expired.items() if name in self._promises}
            self.expired_count += len(expired)
            self.database.prepared |= self._rolled_back | expired
            self._rolled_back.clear()
            self.database.expired.clear()
        super()._apply_remedy(error)

    # -- what is visible --------------------------------------------------------------------------------------------

    def is_own(self, sink: str) -> bool:
        """Whether a sink is a user's own."""
        return self.kind_of(sink) is not Kind.FILES

    def _name(self, committable: Committable) -> str:
        """Return under which name the output of a user's sink becomes visible."""
        if self.kind_of(committable.sink) is Kind.TWO_PHASES:
            return committable.payload.removeprefix(b"1\n").decode()
        where = owner_of(NAME, committable.sink)
        return str(OutputName(where, committable.checkpoint, committable.subtask_index, committable.generation))

    def _promised(self, committables: Sequence[Committable]) -> dict[str, frozenset[str]]:
        found = files_of([c for c in committables if not self.is_own(c.sink)])
        own: dict[str, set[str]] = {}
        for committable in committables:
            if self.is_own(committable.sink):
                own.setdefault(committable.sink, set()).add(self._name(committable))
        return found | {sink: frozenset(names) for sink, names in own.items()}

    def _on_change(self, fence: Fence, what: str) -> None:
        """The database let a generation do something."""
        if fence.generation < self._latest[fence.owner]:
            self.history.fail("I8", f"generation {fence.generation} of {fence.owner} was replaced, and may {what}")
        self._latest[fence.owner] = fence.generation
        if what == "prepare":
            self._kills.perhaps()

    def _on_visible(self, owner: str, names: Sequence[str], generation: int) -> None:
        """Something became visible, in one step."""
        sink, history = owner.partition(":")[2], self.history
        self._on_change(Fence(owner, generation), f"commit {names}")
        for name in names:
            checkpoint = self._promises.get(name)
            if checkpoint is None:
                history.fail("I1", f"{sink} commits {name}, which no completed checkpoint promises")
            elif checkpoint < self._newest[sink]:
                history.fail("I1", f"{sink} commits {name} of {checkpoint} behind {self._newest[sink]}")
            self._newest[sink] = max(self._newest[sink], checkpoint or 0)
        if self._at_once and self.kind_of(sink) is Kind.TWO_PHASES:
            history.on_read(sink, [one.name for one in self.database.visible[owner]])

    def _list_committed(self) -> None:
        """Who reads the database sees what the watcher saw."""

    def _verify(self) -> None:
        self.tasks.park(LATE_MS)
        super()._verify()
        left = [*self.database.prepared, *(session.name for session in self.database.sessions)]
        if left:
            raise Violation("I6", f"prepared or open in the database: {sorted(left)[:4]}")

    def rows_of(self, sink: str) -> list[tuple[Row, ...]]:
        """Return what became visible of a sink, in order, but for what was made again after damage."""
        found = self.database.visible.get(owner_of(NAME, sink), [])
        return [one.rows for one in found if not self._is_taken_back(one.name)]

    def _is_taken_back(self, name: str) -> bool:
        parsed = OutputName.parse(name)
        assert parsed is not None, name
        return self.history.is_taken_back(self._promises[name], parsed.generation)
