"""Pipelines with sources that set their own barriers, also in other guarantees and with savepoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.connectors.base import CheckpointMarker, InducedReader, Source, SourceBatch, SourceContext
from headgate.dataclass import dataclass
from headgate.model.config import Guarantee
from headgate.model.manifest import Manifest
from headgate.sim.machine.world import Fault
from headgate.sim.product.run import Run
from headgate.sim.product.source import SCHEMA, Pace, PacedReader, positions_of
from headgate.sim.product.steps import Row
from headgate.sim.product.verdict import Verdict
from headgate.sim.product.workloads import Splits, draw_splits
from headgate.sim.scenarios.guarantees import draw_mode
from headgate.sim.scenarios.savepoints import SavepointRun
from headgate.sim.scenarios.unaligned import OvertakingRun

HOOK = "tapes"
HOOK_TIMEOUT_MS = 150
SPREAD_MS = 4_000
"""Virtual time in which the rows come."""


@dataclass
class Tape:
    """One split: rows in order, as their indexes, and between them markers, as negative checkpoints."""

    rows: Sequence[Row]
    items: list[int] = field(default_factory=list)
    rows_count: int = 0

    @property
    def is_closed(self) -> bool:
        """Whether all rows are there; markers may still follow."""
        return self.rows_count == len(self.rows)

    def rows_before(self, index: int) -> int:
        """Return how many rows are on the tape before ``index``."""
        return sum(item >= 0 for item in self.items[:index])


class Outside:
    """All tapes, and who writes onto them. Not a part of any process."""

    def __init__(self, run: Run, seed: int, induced: Mapping[int, Splits]) -> None:
        """``induced``: the splits of the sources that set their own barriers, by source."""
        self.rng = random.Random(f"markers of seed {seed}")
        self._run = run
        self.tapes = {name: Tape(rows) for splits in induced.values() for name, rows in splits.items()}
        self.returned: dict[int, bytes] = {}
        self.cuts: dict[int, dict[str, int]] = {}
        """Where each split stood when a checkpoint was taken."""
        self.after_marker: dict[int, dict[str, set[int]]] = {}
        """Where a split stands that has just met the marker of a checkpoint."""
        self.faults_count = 0
        self.may_stay = False
        """Whether a checkpoint may be cut where an older one was: at most once, after the last one before a stop."""

    # -- rows -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the rows come."""
        for tape in self.tapes.values():
            self._run.world.at(self.rng.randint(0, 20), self._append, tape)

    def _append(self, tape: Tape) -> None:
        count = min(self.rng.randint(1, 6), len(tape.rows) - tape.rows_count)
        tape.items += range(tape.rows_count, tape.rows_count + count)
        tape.rows_count += count
        if not tape.is_closed:
            pause_ms = max(1, SPREAD_MS * 3 // max(1, len(tape.rows)))
            self._run.world.at(self.rng.randint(1, 2 * pause_ms), self._append, tape)

    # -- markers ----------------------------------------------------------------------------------------------------

    def mark(self, checkpoint: int) -> None:
        """Write a marker onto every tape, more or less."""
        for name, tape in self.tapes.items():
            if self._strikes(0.04):
                continue  # it gets lost
            if self._strikes(0.1):
                self._run.world.at(self.rng.randint(1, 120), self._put, name, tape, checkpoint)
                continue
            self._put(name, tape, checkpoint)
            if self._strikes(0.1):
                self._run.world.at(self.rng.randint(0, 80), self._put, name, tape, checkpoint)
            if self._strikes(0.05):
                self._put(name, tape, max(1, checkpoint - self.rng.randint(1, 5)))

    def _put(self, name: str, tape: Tape, checkpoint: int) -> None:
        tape.items.append(-checkpoint)
        self.after_marker.setdefault(checkpoint, {}).setdefault(name, set()).add(len(tape.items))

    def act(self, effect: Callable[[], None]) -> None:
        """Do something outside: it takes time, may get stuck, and may fail before and after its effect."""
        tasks = self._run.tasks
        tasks.park(self.rng.randint(0, 6))
        if self._strikes(0.03):
            tasks.park(2 * HOOK_TIMEOUT_MS)
        if self._strikes(0.04):
            raise OSError("the tapes were not reached")
        effect()
        tasks.park(self.rng.choice((0, 2, 50)))  # everybody may be done before the hook is
        if self._strikes(0.04):
            raise OSError("the tapes did not answer")
        if self._strikes(0.03):
            process = tasks.current.process
            self._run.world.at(self.rng.randint(0, 4), process.kill)

    def _strikes(self, rate: float) -> bool:
        is_struck = self.rng.random() < rate and not self._run.faults.is_healed
        self.faults_count += is_struck
        return is_struck

    def fail(self, problem: str) -> None:
        """Say what must not be."""
        self._run.history.fail("I12", problem)

    # -- what must hold ---------------------------------------------------------------------------------------------

    def on_manifest(self, manifest: Manifest) -> None:
        """A checkpoint is completed: it is cut after its marker everywhere, and holds what the hook returned."""
        checkpoint = int(manifest.state_of_hook(HOOK).checkpoint or 0)
        found = {state.hook: state.data for state in manifest.hooks}
        if found != {HOOK: self.returned.get(checkpoint, b"?")}:
            self.fail(
                f"checkpoint {checkpoint} holds {found} of hooks, which returned {self.returned.get(checkpoint)!r}"
            )
        cuts = self.cuts.get(checkpoint, {})
        for name, tape in self.tapes.items():
            at = cuts.get(name)
            if at is None or not self._may_be_cut(checkpoint, name, tape, at):
                self.fail(f"checkpoint {checkpoint} is cut at {at} of {name}, which is not behind its marker")

    def _may_be_cut(self, checkpoint: int, name: str, tape: Tape, at: int) -> bool:
        if at in self.after_marker.get(checkpoint, {}).get(name, ()) or tape.rows_before(at) == len(tape.rows):
            return True
        return self.may_stay and any(cuts.get(name) == at for older, cuts in self.cuts.items() if older < checkpoint)


class TapeHook(hg.CoordinatorHook, hg.CheckpointListener):
    """Writes the markers, and looks whether it is called as promised. One for each driver."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._generation = 0
        self._is_ready = False
        self._last = 0

    def open(self, context: hg.HookContext) -> None:
        if context.generation <= self._generation:
            self._outside.fail(f"generation {context.generation} is opened behind {self._generation}")
        self._generation, self._is_ready = context.generation, False

    def trigger(self, checkpoint_id: int) -> bytes:
        outside = self._outside
        if not self._is_ready or checkpoint_id <= self._last:
            outside.fail(f"the hook is triggered for {checkpoint_id} behind {self._last}, ready: {self._is_ready}")
        self._last = checkpoint_id
        data = f"{checkpoint_id} of {self._generation}".encode()
        outside.act(lambda: outside.mark(checkpoint_id))
        outside.returned[checkpoint_id] = data
        return data

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        if data != self._outside.returned.get(checkpoint_id):
            self._outside.fail(f"checkpoint {checkpoint_id} is restored with {data!r}")
        self._outside.act(self._begin)

    def reset(self) -> None:
        self._outside.act(self._begin)

    def _begin(self) -> None:
        self._is_ready = True


class TapeSource(Source):
    """Reads tapes; its readers stand still at markers."""

    def __init__(self, outside: Outside, names: Sequence[str], pace: Pace, now_ms: Callable[[], int]) -> None:
        self._outside, self._names, self._pace, self._now_ms = outside, names, pace, now_ms

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "tapes by name"

    def open(self, context: SourceContext) -> InducedReader:
        return _TapeReader(self._outside, positions_of(self._names, context), self._pace, self._now_ms)


class _TapeReader(PacedReader, hg.CheckpointedFunction):
    """Takes from its tapes in turn. Tells the world outside where it stood when a checkpoint was taken."""

    def __init__(self, outside: Outside, positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        super().__init__(positions, pace, now_ms)
        self._outside = outside
        self._still: set[str] = set()

    def __deepcopy__(self, memo: object) -> _TapeReader:
        return self

    def snapshot(self, context: hg.SnapshotContext) -> None:
        """See ``CheckpointedFunction``: positions have just been taken."""
        self._outside.cuts.setdefault(context.checkpoint_id, {}).update(self._at)

    def poll(self) -> SourceBatch | CheckpointMarker | None:
        names = [name for name in self.splits() if name not in self._still]
        if self.wakeup_ms() or not names:
            return None
        name = self._take_turn(names)
        return self._next(name, self._outside.tapes[name])

    def _next(self, name: str, tape: Tape) -> SourceBatch | CheckpointMarker | None:
        if tape.is_closed and tape.rows_before(self._at[name]) == len(tape.rows):
            self._ended.add(name)
            return SourceBatch(name, pa.RecordBatch.from_pylist([], schema=SCHEMA), None, True)
        ahead = tape.items[self._at[name] : self._at[name] + self._pace.batch_rows]
        if ahead and ahead[0] < 0:
            self._at[name] += 1
            self._still.add(name)
            return CheckpointMarker(name, -ahead[0])
        count = next((i for i, item in enumerate(ahead) if item < 0), len(ahead))
        self._at[name] += count
        if not count:
            return None
        rows = [dict(tape.rows[item]) for item in ahead[:count]]
        return SourceBatch(name, pa.RecordBatch.from_pylist(rows, schema=SCHEMA))

    def read_on(self, splits: Sequence[str]) -> None:
        self._still -= set(splits)


class _Verdict(Verdict):
    """Positions on tapes count markers too."""

    def _rows_read(self, splits: Splits, positions: Mapping[str, bytes]) -> dict[str, int]:
        found = super()._rows_read(splits, positions)
        assert isinstance(self._run, InducedRun)
        tapes = self._run.tapes.tapes
        return {name: tapes[name].rows_before(at) if name in tapes else at for name, at in found.items()}


class InducedRun(Run):
    """A run with hooks and markers."""

    IS_PLAIN = True
    VERDICT = _Verdict
    READS_STATE = False
    induced: frozenset[int]

    def _draw(self) -> None:
        settings = self.settings
        rng = random.Random(f"induced of seed {self.seed}")
        self.faults.on -= {Fault.DRAIN}  # a drained source is cut where it is
        self._safety_ms = SPREAD_MS
        self.faults.budget = 6
        settings.fix_input()
        settings.files = settings.outside = None
        count = len(settings.inputs)
        rows_count = rng.choice((60, 150, 300)) // count
        settings.inputs = [draw_splits(rng, i, rng.choice((1, 2, 3)), rows_count) for i in range(count)]
        induced = frozenset(range(count)) if rng.random() < 0.5 else frozenset({rng.randrange(count)})
        settings.checkpointing = replace(
            settings.checkpointing, tolerable_failures=20, timeout=f"{rng.choice((200, 500))}ms"
        )
        self._put_on_tapes(induced)

    def _put_on_tapes(self, induced: frozenset[int]) -> None:
        """Have these sources read tapes."""
        self.induced = induced
        self.tapes = Outside(self, self.seed, {i: self.settings.inputs[i] for i in sorted(induced)})

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        self.tapes.on_manifest(manifest)
        super()._on_manifest(manifest, files)

    def start(self) -> None:
        if not self.started:
            self.tapes.begin()
        super().start()

    def _build(self, p: hg.Pipeline, listed: Sequence[Splits], trouble: Callable[[], bool]) -> None:
        p.add_hook(HOOK, TapeHook(self.tapes), timeout=f"{HOOK_TIMEOUT_MS}ms")
        super()._build(p, listed, trouble)

    def _source(self, listed: Splits, index: int, trouble: Callable[[], bool]) -> Source:
        if index in self.induced:
            return TapeSource(self.tapes, list(listed), self.settings.pace, self._now_ms)
        return super()._source(listed, index, trouble)


class AtLeastOnceRun(InducedRun):
    """Counts at least once."""

    MODE = Guarantee.AT_LEAST_ONCE

    def _draw(self) -> None:
        super()._draw()
        count = len(self.settings.inputs)
        self.judge = draw_mode(self, self.seed, self.MODE)
        if len(self.settings.inputs) < count:
            self._put_on_tapes(frozenset({0}))
        self.tapes.may_stay = self.MODE is Guarantee.AT_MOST_ONCE


class AtMostOnceRun(AtLeastOnceRun):
    """Counts at most once."""

    MODE = Guarantee.AT_MOST_ONCE


class TapesOvertakenRun(OvertakingRun, InducedRun):
    """Barriers overtake what waits after the marker."""

    def _draw(self) -> None:
        super()._draw()
        self._put_on_tapes(frozenset(range(len(self.settings.inputs))))


class TapesSavedRun(SavepointRun, InducedRun):
    """Savepoints are taken, and the pipeline moves with them."""

    def _draw(self) -> None:
        super()._draw()
        self.has_drains = False  # a drained source is cut where it is, not behind a marker


MODES = (AtLeastOnceRun, AtMostOnceRun, TapesOvertakenRun, TapesSavedRun)


def draw_induced_mode(seed: int, **options: Any) -> InducedRun:
    """Return the run of a seed."""
    return random.Random(f"mixed of seed {seed}").choice(MODES)(seed, **options)
