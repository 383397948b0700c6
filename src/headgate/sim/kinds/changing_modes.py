"""Pipelines whose guarantee changes between two starts, and what is allowed of what they commit.

Each start may have another mode. What is wrong with the output follows from what was restored: nothing, if a checkpoint
was exact, or was the last one before a stop (GM3, GM32); repeated records behind one of at least once, lost ones behind
one of at most once (GM5, GM31). So the judge notes the mode of every checkpoint that was restored, and a run whose
changes all came behind stops must be exact. Everything drawn here comes from a generator of its own (SM43).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from headgate.model.checkpoint_options import Guarantee
from headgate.model.progress import Continuation, RunResult
from headgate.sim.kinds.modes import LOOPS, RULES, Judge, Noted, Records
from headgate.sim.machine.faults import Fault
from headgate.sim.product.run import EVENTS_MAX, Run
from headgate.sim.product.strikes import Started
from headgate.sim.product.workloads import WORKLOADS, draw_splits

LEAST, MOST = Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
CHANGE_RATE = 0.7
PASSED_ON = frozenset({"mapped", "once", "looped"})
"""Sinks whose records do not count anything."""


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
        """See ``Judge``."""
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
    """A run whose user changes the mode."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, is_plain=True, events_max=events_max)
        self._chance = random.Random(f"changing mode of seed {seed}")
        has_loops = self._chance.random() < 0.2
        self._modes = tuple(mode for mode in Guarantee if not has_loops or mode is not MOST)
        self._lasts: set[int] = set()
        """Checkpoints that a stop ended with."""
        self.modes: set[Guarantee] = set()
        """Of checkpoints that a start with another mode restored."""
        self.judge = EpochsJudge(self._chance.choice(self._modes))
        self._draw(has_loops=has_loops)

    def _draw(self, *, has_loops: bool) -> None:
        workloads = [workload for workload in WORKLOADS if has_loops or workload.name not in LOOPS]
        settings = self.settings
        settings.judge = self.judge
        settings.on_damaged = None  # GM35
        settings.job = Noted(tuple(self._chance.sample(workloads, self._chance.choice((1, 2, 3)))), judge=self.judge)
        settings.inputs = [
            draw_splits(self._chance, 0, self._chance.choice((1, 2, 3)), self._chance.choice((100, 250)))
        ]
        settings.files = None
        settings.hidden.clear()
        settings.grows = False
        self._use_mode()
        self.faults.on = (self.faults.on - {Fault.CANCEL}) | {Fault.STOP}
        self.faults.rates[Fault.STOP] = self._chance.choice((1.0, 2.0))
        self.faults.budget += 6

    def _use_mode(self) -> None:
        self.settings.checkpointing = replace(self.settings.checkpointing, mode=self.judge.mode.value)

    def start(self) -> None:
        """Start the pipeline, perhaps with another mode."""
        if self.started and self._chance.random() < CHANGE_RATE:
            self.judge.mode = self._chance.choice(self._modes)
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
