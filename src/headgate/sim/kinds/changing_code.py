"""Pipelines whose code changes between two starts: operators with state come and go, with a sink behind one (SM46).

``front`` stands before all branches and passes records on; ``extra`` is a branch of its own. Both have state. Users
remove them, add them again, forget to name one, and do what refusals say (SV30, SV31). Judged beside everything else:
the other sinks are exact; of ``extra`` no record comes twice, its numbers have no gap, and it starts empty only where
a checkpoint was restored that does not know it. Everything drawn here comes from a generator of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Sink
from headgate.errors import HeadgateError, LeaveBehind, NameOperator
from headgate.model.config import StartConfig
from headgate.model.progress import Continuation
from headgate.sim.machine.faults import Fault
from headgate.sim.product.ends import Ends
from headgate.sim.product.records import Row
from headgate.sim.product.run import EVENTS_MAX, Run
from headgate.sim.product.settings import Exactly
from headgate.sim.product.source import SCHEMA, Pace
from headgate.sim.product.strikes import Started
from headgate.sim.product.workloads import WORKLOADS, Branches, Values, draw_splits

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.CANCEL, Fault.DRAIN)
EXTRA, SINK, FRONT = "extra", "extra-out", "front"
CHANGE_RATE = 0.6
FORGETS_RATE = 0.3
"""How often a user forgets something: to allow what is left behind, or to name an operator."""
SAFETY_MS = 2_500


@dataclass(frozen=True, slots=True)
class Version:
    """What a pipeline has beside its branches, and which start that is. ``is_named``: its front has a name."""

    number: int
    has_extra: bool
    has_front: bool
    is_named: bool = True


class Passing(hg.ProcessFunction):
    """Passes records on, and counts them."""

    schema = {field.name: field.type for field in SCHEMA}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.count = state.value("count", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count."""
        self.count.put(self.count.get(0) + 1)
        yield row


class Numbering(hg.ProcessFunction):
    """Numbers the records of each key, and says in which start it met the key first."""

    schema = {"k": pa.int64(), "n": pa.int64(), "number": pa.int64(), "born": pa.int64()}

    def __init__(self, start: int) -> None:
        self._start = start

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.count = state.value("count", pa.int64())
        self.born = state.value("born", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count from the first record on."""
        self.count.put(self.count.get(0) + 1)
        self.born.put(self.born.get(self._start))
        yield {"k": row["k"], "n": row["n"], "number": self.count.get(0), "born": self.born.get(0)}


@dataclass(frozen=True)
class Edited(Branches):
    """Branches whose surroundings change. ``now`` says what they are at the next start."""

    now: Callable[[], Version] = lambda: Version(0, True, True)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """See ``Job``."""
        return super().columns | {SINK: ("k", "n", "number", "born")}

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        """See ``Job``."""
        version, rows = self.now(), sources[0]
        if version.has_extra:
            numbered = rows.key_by("k").process(Numbering(version.number), name=EXTRA)
            numbered.sink(sink_to(SINK), name=SINK)
        if version.has_front:
            rows = rows.key_by("k").process(Passing(), name=FRONT if version.is_named else None)
        super().build([rows], sink_to)

    def expected(self, inputs: Sequence[Sequence[Row]]) -> dict[str, Counter[Values]]:
        """See ``Job``; the records of ``extra`` are those that it may have."""
        return super().expected(inputs) | {SINK: Counter((row["k"], row["n"]) for row in inputs[0])}


@dataclass
class EditedJudge(Exactly):
    """Judges ``extra`` by what was restored.

    Attributes:
        emptied: starts that restored what does not know it, or nothing.
        has_left: some start had no such operator.
    """

    emptied: set[int] = field(default_factory=set)
    has_left: bool = False

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        """See ``Judge``."""
        if sink != SINK:
            return super().problem(sink, found, wanted, has_failed=has_failed)
        records = Counter({(k, n): 0 for k, n, _, _ in found})
        records.update((k, n) for k, n, _, _ in found.elements())
        if records - wanted or (not self.has_left and records != wanted):
            return super().problem(sink, records, wanted, has_failed=has_failed)
        return self._miscounted(found)

    def _miscounted(self, found: Counter[Values]) -> str | None:
        numbers: dict[tuple[int, int], list[int]] = {}
        for k, _, number, born in found:
            numbers.setdefault((k, born), []).append(number)
        for (k, born), counted in numbers.items():
            if sorted(counted) != list(range(1, len(counted) + 1)):
                return f"numbers key {k} of start {born} with {sorted(counted)}"
        for (k, born), (other, later) in zip(sorted(numbers), sorted(numbers)[1:], strict=False):
            if k == other and not any(born < start <= later for start in self.emptied):
                return f"begins key {k} anew in start {later} behind {born}, and nobody had left it behind"
        return None


class ChangingCodeRun(Run):
    """A run whose user edits the pipeline."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, is_plain=True, events_max=events_max)
        chance = self._chance = random.Random(f"changing code of seed {seed}")
        self.version = Version(0, chance.random() < 0.5, chance.random() < 0.5)
        self.judge = EditedJudge(has_left=not self.version.has_extra)
        self.refused: Counter[str] = Counter()
        """What was refused, by what users did about it."""
        self.left_count = 0
        """Restores that left state behind."""
        settings = self.settings
        branches = [workload for workload in WORKLOADS if workload.name != "windowed"]  # order is lost in front
        settings.job = Edited(tuple(chance.sample(branches, chance.choice((1, 2)))), now=lambda: self.version)
        settings.judge = self.judge
        settings.inputs = [draw_splits(chance, 0, chance.choice((1, 2, 3)), chance.choice((150, 300)))]
        settings.hidden.clear()
        settings.grows, settings.files = False, None
        settings.pace = Pace(2, 20, idle_ms=100)
        self._safety_ms = SAFETY_MS
        settings.checkpointing = replace(settings.checkpointing, interval=f"{chance.choice((10, 20, 40))}ms")
        self.faults.on -= set(WITHOUT)
        self.faults.budget = chance.choice((0, 3, 6))
        self._ends = Ends(self, chance, 6, stops=True)

    def start(self) -> None:
        """Start the pipeline, perhaps with other code; what is left behind is mostly allowed at once."""
        number = len(self.started)
        self.version = replace(self.version, number=number)
        if self.started and not self.faults.is_healed and self._chance.random() < CHANGE_RATE:
            self._edit()
        super().start()

    def _edit(self) -> None:
        chance, version = self._chance, self.version
        has_extra, has_front = chance.random() < 0.5, chance.random() < 0.5
        is_named = version.is_named if version.has_front and has_front else chance.random() >= FORGETS_RATE
        self.version = replace(version, has_extra=has_extra, has_front=has_front, is_named=is_named)
        self.judge.has_left |= not has_extra
        gone = [EXTRA, SINK] * (not has_extra) + [FRONT] * (not has_front)
        allowed = frozenset(name for name in gone if chance.random() >= FORGETS_RATE)
        self.settings.start = StartConfig(allow_unclaimed_state=allowed)
        self.world.tell("user", f"edits the pipeline: {self.version}, leaves {sorted(allowed)}")

    def _heed(self, error: HeadgateError) -> None:
        start = self.settings.start
        if isinstance(error.remedy, LeaveBehind):
            self.refused["left"] += 1
            allowed = start.allow_unclaimed_state | {error.remedy.name}
            self.settings.start = replace(start, allow_unclaimed_state=allowed)
        elif isinstance(error.remedy, NameOperator):
            self.refused["named"] += 1
            self.version = replace(self.version, is_named=True)
        super()._heed(error)

    def _check_disks(self) -> None:
        """Look at what is left; at a sink that the pipeline does not have any more nobody tidies up."""
        untidy = None if self.version.has_extra else self.disks.pop(SINK, None)
        super()._check_disks()
        if untidy is not None:
            self.disks[SINK] = untidy

    def on_restored(self, started: Started, said: Continuation) -> None:
        """Look at what a start may restore."""
        super().on_restored(started, said)
        manifest, definition = self.history.manifest(said.checkpoint), started.spark.definition
        assert manifest is not None
        here, there = definition.plan.state_texts(), manifest.state_texts
        gone = {name for name, text in there.items() if text and name not in here}
        self.left_count += bool(gone)
        if gone - definition.config.start.allow_unclaimed_state:
            self.history.fail("SV30", f"{sorted(gone)} of checkpoint {said.checkpoint} is left behind unasked")
        new = {name for name, text in here.items() if text and name not in there}
        if new & definition.derived_names:
            self.history.fail("SV31", f"{sorted(new)} has no name, and starts empty")
        if EXTRA in new:
            self.judge.emptied.add(int(started.process.name[1:]))
