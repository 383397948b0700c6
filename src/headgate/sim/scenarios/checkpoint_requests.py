"""Pipelines with users that ask for checkpoints and wait for them (C60 to C62 of docs/spec/coordinator.md).

Many take no other checkpoints (``interval=None``), and many are not restarted by their driver (``NoRestart``): then
their users start them again. Judged beside everything else: the process that is notified of a checkpoint can rely on
it, that is, it began after the question, it is in the log, and nothing older is restored from then on; everybody is
answered once the run has ended; without an interval no process takes what no process asked for. Drawn from a generator
of its own (SM47).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import headgate as hg
from headgate.model.manifest import Manifest
from headgate.model.progress import CheckpointOutcome
from headgate.sim.machine.faults import Fault
from headgate.sim.product.driver_kills import Ends
from headgate.sim.product.fault_injection import Started
from headgate.sim.product.leaks import ASKING
from headgate.sim.product.run import Run
from headgate.sim.product.source import Pace

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.STOP)
"""Nothing that was promised is taken away, and no process takes a last checkpoint but at the end."""
SAFETY_MS = 2_000


class AskingRun(Run):
    """A run with a user that asks for checkpoints."""

    IS_PLAIN = True

    def _draw(self) -> None:
        chance = self._chance = random.Random(f"asking of seed {self.seed}")
        settings = self.settings
        settings.hidden.clear()
        settings.grows = False
        settings.pace = Pace(4, 20, idle_ms=100)
        self.has_interval = chance.random() < 0.3
        if not self.has_interval:
            settings.checkpointing = replace(settings.checkpointing, interval=None)
        self.restarts = chance.random() < 0.6
        if not self.restarts:
            settings.restart = hg.NoRestart()
        self._safety_ms = SAFETY_MS
        self.faults.on -= set(WITHOUT)
        self.faults.budget = chance.choice((0, 3, 6))
        self._ends = Ends(self, chance, 4)
        on_manifest = self.history.on_manifest

        def watch(manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
            self._on_manifest(manifest)
            on_manifest(manifest, files)

        self.history.on_manifest = watch
        self.asked: list[tuple[Started, Future[CheckpointOutcome]]] = []
        self.told: list[int] = []
        """Checkpoints that users who asked were notified of."""
        self.refused_count = 0
        self._unasked_max = 0
        self.world.at(chance.randint(5, 100), self._ask)

    def _ask(self) -> None:
        """Ask the process that runs the pipeline for a checkpoint, now and then several times at once."""
        if self.is_finished:
            return
        newest = self.started[-1]
        if newest.driver is not None and newest.process.is_alive:
            for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
                self.tasks.spawn(newest.process, lambda: self._order(newest), ASKING)
        self.world.at(self._chance.randint(10, 120), self._ask)

    def _order(self, started: Started) -> None:
        driver = started.driver
        assert driver is not None
        newest = max((checkpoint for checkpoint, _ in self.history.written), default=0)
        live = driver.supervision.live
        begun = None if live is None else live.coordination.pending_checkpoint()
        newest = newest if begun is None else max(newest, begun.checkpoint)
        self._unasked_max += 1
        self.world.tell(started.process.name, "is asked for a checkpoint")
        asked = driver.take_checkpoint()
        self.asked.append((started, asked))
        asked.add_done_callback(lambda done: self._answered(started, newest, done.result()))

    def _answered(self, started: Started, newest: int, outcome: CheckpointOutcome) -> None:
        """A user gets an answer: is it true?"""
        checkpoint, history = outcome.checkpoint, self.history
        self.world.tell(started.process.name, f"answers: {checkpoint or outcome.reason}")
        if checkpoint is None:
            self.refused_count += 1
            if not outcome.reason:
                history.fail("C61", "a request is refused, and nobody says why")
            return
        self.told.append(checkpoint)
        if checkpoint <= newest:
            history.fail("C60", f"{checkpoint} is the answer, and {newest} had begun before anybody asked")
        if checkpoint not in history.completed:
            history.fail("C61", f"{checkpoint} is the answer, and is not completed")

    def _on_manifest(self, manifest: Manifest) -> None:
        """A checkpoint is complete: a user must have asked for it."""
        if self.has_interval or manifest.is_final:
            return
        self._unasked_max -= 1
        if self._unasked_max < 0:
            self.history.fail("C2", f"there is no interval, and nobody asked for checkpoint {manifest.checkpoint}")

    def _run_driver(self, started: Started, *, beats: bool = False, drains: bool = False) -> BaseException | None:
        problem = super()._run_driver(started, beats=beats, drains=drains)
        driver = started.driver
        waiting = [asked for one, asked in self.asked if one is started and not asked.done()]
        if waiting:
            self.history.fail("C62", f"{len(waiting)} wait for {started.process.name}, which has ended")
        if driver is not None and not self.restarts and driver.supervision.machine.restarts_count:
            self.history.fail("R2", f"{started.process.name} restarts what must not be restarted")
        return problem
