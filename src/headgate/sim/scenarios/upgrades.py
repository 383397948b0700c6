"""Pipelines that are changed between two starts: other code, a former program again, another guarantee."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.codec.json_files import decode_log_entry
from headgate.connectors.base import Sink
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, GoBackPast, HeadgateError, LeaveBehind, NameAnotherPlace, NameOperator
from headgate.model.config import Guarantee, StartConfig
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.model.progress import Continuation, RunResult
from headgate.sim.machine.world import Fault
from headgate.sim.product.fault_injection import Ends, Started
from headgate.sim.product.run import Run
from headgate.sim.product.settings import CHECKPOINTS, NAME, ROOT, Exactly
from headgate.sim.product.source import SCHEMA, Pace
from headgate.sim.product.steps import Row
from headgate.sim.product.workloads import WORKLOADS, Branches, Values, draw_splits
from headgate.sim.scenarios.guarantees import LOOPS, RULES, Judge, Noted, Records

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.CANCEL, Fault.DRAIN)
EXTRA, SINK, FRONT = "extra", "extra-out", "front"
CHANGE_RATE = 0.6
FORGETS_RATE = 0.3
"""How often a user forgets something: to allow what is left over, or to name an operator."""
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
        self.count = state.value("count", pa.int64())
        self.born = state.value("born", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count from the first record on."""
        self.count.put(self.count.get(0) + 1)
        self.born.put(self.born.get(self._start))
        yield {"k": row["k"], "n": row["n"], "number": self.count.get(0), "born": self.born.get(0)}


@dataclass(frozen=True)
class Edited(Branches):
    """Branches with surroundings that change. ``now`` says what they are at the next start."""

    now: Callable[[], Version] = lambda: Version(0, True, True)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        return super().columns | {SINK: ("k", "n", "number", "born")}

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
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
    """A run with user edits that the pipeline."""

    IS_PLAIN = True
    SUBJECT = "changing code"

    def _draw(self) -> None:
        chance = self.rng
        self.version = Version(0, chance.random() < 0.5, chance.random() < 0.5)
        self.judge = EditedJudge(has_left=not self.version.has_extra)
        self.refused: Counter[str] = Counter()
        """What was refused, by what users did about it."""
        self.left_count = 0
        """Restores that left state after."""
        settings = self.settings
        branches = [workload for workload in WORKLOADS if workload.name != "windowed"]  # order is lost in front
        settings.job = Edited(tuple(chance.sample(branches, chance.choice((1, 2)))), now=lambda: self.version)
        settings.judge = self.judge
        settings.inputs = [draw_splits(chance, 0, chance.choice((1, 2, 3)), chance.choice((150, 300)))]
        settings.fix_input()
        settings.files = None
        settings.pace = Pace(2, 20, idle_ms=100)
        self._safety_ms = SAFETY_MS
        settings.checkpointing = replace(settings.checkpointing, interval=f"{chance.choice((10, 20, 40))}ms")
        self.faults.on -= set(WITHOUT)
        self.faults.budget = chance.choice((0, 3, 6))
        self._ends = Ends(self, 6, stops=True)

    def start(self) -> None:
        """Start the pipeline, perhaps with other code; what is left over is mostly allowed at once."""
        number = len(self.started)
        self.version = replace(self.version, number=number)
        if self.started and not self.faults.is_healed and self.rng.random() < CHANGE_RATE:
            self._edit()
        super().start()

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        self._ends.perhaps()
        super()._on_manifest(manifest, files)

    def _edit(self) -> None:
        chance, version = self.rng, self.version
        has_extra, has_front = chance.random() < 0.5, chance.random() < 0.5
        is_named = version.is_named if version.has_front and has_front else chance.random() >= FORGETS_RATE
        self.version = replace(version, has_extra=has_extra, has_front=has_front, is_named=is_named)
        self.judge.has_left |= not has_extra
        gone = [EXTRA, SINK] * (not has_extra) + [FRONT] * (not has_front)
        allowed = frozenset(name for name in gone if chance.random() >= FORGETS_RATE)
        self.settings.start = StartConfig(allow_unclaimed_state=allowed)
        self.world.tell("user", f"edits the pipeline: {self.version}, leaves {sorted(allowed)}")

    def _apply_remedy(self, error: HeadgateError) -> None:
        start = self.settings.start
        if isinstance(error.remedy, LeaveBehind):
            self.refused["left"] += 1
            allowed = start.allow_unclaimed_state | {error.remedy.name}
            self.settings.start = replace(start, allow_unclaimed_state=allowed)
        elif isinstance(error.remedy, NameOperator):
            self.refused["named"] += 1
            self.version = replace(self.version, is_named=True)
        super()._apply_remedy(error)

    def _check_disks(self) -> None:
        """Look at what is left; at a sink that the pipeline does not have any more no process tidies up."""
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


NOT_IN_FORMER = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.POWER_CUT, Fault.CANCEL, Fault.DRAIN)
"""No start goes back past damage here: then it would be refused (SV25), or lose the entry that says where to."""

RETAINED = 3
GOES_BACK_RATE = 0.6
REPEATS_RATE = 0.6
"""How often a start repeats the command of the one before."""


class GoingBackRun(Run):
    """A run with user goes that back."""

    IS_PLAIN = True
    SUBJECT = "going back"

    def _draw(self) -> None:
        settings = self.settings
        settings.fix_input()
        interval = f"{self.rng.choice((10, 20))}ms"
        settings.checkpointing = replace(settings.checkpointing, interval=interval, retained=RETAINED)
        if settings.files is None:
            rows_count = self.rng.choice((150, 300)) // len(settings.inputs)
            settings.inputs = [draw_splits(self.rng, i, 2, rows_count) for i in range(len(settings.inputs))]
        self.faults.on = (self.faults.on - set(NOT_IN_FORMER)) | {Fault.DRIVER_CRASH}
        self._ends = Ends(self, 5, least=2)
        settings.pace = Pace(4, 20, idle_ms=100)
        self._safety_ms = SAFETY_MS
        self.refused_count = self.repeated_count = 0
        self._must_go_on = False
        """Whether the command of the newest start has gone back before."""

    def start(self) -> None:
        """Start the pipeline, perhaps where it was some checkpoints ago."""
        is_alone = not any(one.process.is_alive for one in self.started)
        newest, *others = self._retained() or [0]
        older = [one for one in others if one in self.history.standing]  # of what was left, promises are aborted
        if older and is_alone and not self.faults.is_healed and self.rng.random() < GOES_BACK_RATE:
            self._go_back(self.rng.choice(older), newest)
        elif self.rng.random() >= REPEATS_RATE:
            self.settings.start = StartConfig()
        self._must_go_on = is_alone and self._has_gone_back(newest)
        self.repeated_count += self._must_go_on
        super().start()

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        self._ends.perhaps()
        super()._on_manifest(manifest, files)

    def _has_gone_back(self, newest: int) -> bool:
        """Whether the newest checkpoint descends from what the start names (SV24)."""
        manifest, start = self.history.manifest(newest), self.settings.start
        origin = None if manifest is None else manifest.origin
        return origin is not None and origin.url == start.restore and start.go_back_past != newest

    def _go_back(self, to: int, behind: int) -> None:
        self.world.tell("user", f"goes back past checkpoint {behind} to {to}")
        self.history.may_go_back.add((to, behind))
        says = None if self.rng.random() < 0.2 else CheckpointId(behind)  # some have to be told
        self.settings.start = StartConfig(f"{ROOT}/{NAME}/chk-{to}", says)

    def _retained(self) -> list[int]:
        """Return the checkpoints that a user finds in the log, the newest first."""
        found: list[int] = []
        for path, stored in self._disk(CHECKPOINTS).objects.items():
            if path.startswith(f"{NAME}/log/"):
                try:
                    entry = decode_log_entry(stored.data, path)
                except CorruptionError:
                    continue
                found += [int(entry.checkpoint)] if isinstance(entry, Manifest) else []
        return sorted(found, reverse=True)

    def _apply_remedy(self, error: HeadgateError) -> None:
        remedy, start = error.remedy, self.settings.start
        if self._must_go_on and isinstance(remedy, GoBackPast | NameAnotherPlace):
            self.history.fail("SV24", f"a start that is repeated does not go on: {error}")
        if isinstance(remedy, GoBackPast) and start.restore is not None:
            self.refused_count += 1
            to, behind = int(start.restore.rpartition("-")[2]), remedy.checkpoint
            self.history.may_go_back.add((to, behind))
            self.settings.start = replace(start, go_back_past=CheckpointId(behind))
        elif isinstance(remedy, NameAnotherPlace):
            self.settings.start = StartConfig()
        super()._apply_remedy(error)


LEAST, MOST = Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
GUARANTEE_CHANGE_RATE = 0.7
PASSED_ON = frozenset({"mapped", "once", "looped"})
"""Sinks with records that do not count anything."""


@dataclass
class EpochsJudge(Judge):
    """Judges what was committed by the checkpoints that were restored. ``mode`` is that of the next start.

    Attributes:
        restored: modes of checkpoints that were restored and may show an anomaly.
        unheard: where starts of other modes than at most once count what they give; they may do so twice.
    """

    restored: set[Guarantee] = field(default_factory=set)
    unheard: Counter[int] = field(default_factory=Counter)

    def given_in(self, mode: Guarantee) -> Counter[int]:
        return self.given if mode is MOST else self.unheard

    def problem(self, sink: str, found: Records, wanted: Records, *, has_failed: bool) -> str | None:
        """Return what is wrong with a sink, or None."""
        if twice := self._given_twice():
            return twice
        if found == wanted:
            return None
        self.lost += (wanted - found).total()
        self.repeated += (found - wanted).total()
        if not self.restored:
            lost, more = sorted(wanted - found)[:4], sorted(found - wanted)[:4]
            return f"lost {lost}, has {more} more, and nothing was restored that allows it"
        if len(self.restored) == 1:
            return RULES[next(iter(self.restored))][sink](found, wanted)
        made_up = found.keys() - wanted.keys() if sink in PASSED_ON else ()
        return f"made up {sorted(made_up)[:4]}" if made_up else None


class ChangingModeRun(Run):
    """A run with user changes that the mode."""

    IS_PLAIN = True
    SUBJECT = "changing mode"

    def _draw(self) -> None:
        has_loops = self.rng.random() < 0.2
        self._modes = tuple(mode for mode in Guarantee if not has_loops or mode is not MOST)
        self._lasts: set[int] = set()
        """Checkpoints that a stop ended with."""
        self.modes: set[Guarantee] = set()
        """Of checkpoints that a start with another mode restored."""
        self.judge = EpochsJudge(self.rng.choice(self._modes))
        self._draw_settings(has_loops=has_loops)

    def _draw_settings(self, *, has_loops: bool) -> None:
        workloads = [workload for workload in WORKLOADS if has_loops or workload.name not in LOOPS]
        settings = self.settings
        settings.judge = self.judge
        settings.on_damaged = None  # GM35
        settings.job = Noted(tuple(self.rng.sample(workloads, self.rng.choice((1, 2, 3)))), judge=self.judge)
        settings.inputs = [draw_splits(self.rng, 0, self.rng.choice((1, 2, 3)), self.rng.choice((100, 250)))]
        settings.files = None
        settings.fix_input()
        self._use_mode()
        self.faults.on = (self.faults.on - {Fault.CANCEL}) | {Fault.STOP}
        self.faults.rates[Fault.STOP] = self.rng.choice((1.0, 2.0))
        self.faults.budget += 6

    def _use_mode(self) -> None:
        self.settings.checkpointing = replace(self.settings.checkpointing, mode=self.judge.mode.value)

    def start(self) -> None:
        """Start the pipeline, perhaps with another mode."""
        if self.started and self.rng.random() < GUARANTEE_CHANGE_RATE:
            self.judge.mode = self.rng.choice(self._modes)
            self._use_mode()
            self.world.tell("user", f"wants {self.judge.mode.value}")
        super().start()

    def on_restored(self, started: Started, said: Continuation) -> None:
        """Note what the checkpoint allows that a generation continues from."""
        super().on_restored(started, said)
        manifest = self.history.manifest(said.checkpoint)
        if manifest is None:
            return
        assert started.driver is not None
        if started.spark.definition.config.checkpoints.mode is not manifest.mode:
            self.modes.add(manifest.mode)
        is_exact = manifest.mode is Guarantee.EXACTLY_ONCE or manifest.is_final
        if not is_exact and (said.checkpoint not in self._lasts or self._circles):
            self.judge.restored.add(manifest.mode)

    @property
    def _circles(self) -> bool:
        """Whether records circulate in loops, which do not stop for a stop (GM3)."""
        return not LOOPS.isdisjoint(self.settings.job.columns)

    def _is_over(self, result: RunResult) -> bool:
        newest = 0 if result.last_checkpoint is None else result.last_checkpoint
        manifest = self.history.manifest(newest)
        if manifest is not None and manifest.generation == self.history.newest_generation():
            self._lasts.add(newest)
        return super()._is_over(result)


UPGRADES = (ChangingModeRun, GoingBackRun, ChangingCodeRun)


def draw_upgrade(seed: int, **options: Any) -> Run:
    """Return the run of a seed."""
    return random.Random(f"change of seed {seed}").choice(UPGRADES)(seed, **options)
