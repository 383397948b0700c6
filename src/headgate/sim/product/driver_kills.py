"""Ends drivers soon after completed checkpoints, so that the next start has something to go on from."""

from __future__ import annotations

import random
from collections.abc import Mapping

from headgate.model.manifest import Manifest
from headgate.sim.machine.faults import Fault
from headgate.sim.product.run import Run

RATE = 0.5

SLOW = frozenset({Fault.WORKER_PAUSE, Fault.DRIVER_PAUSE, Fault.STORAGE_GONE, Fault.SLOW})
"""What keeps a pipeline from getting anywhere is switched off."""


class Ends:
    """Kills drivers of a run, or has their user stop them; not too often."""

    def __init__(self, run: Run, chance: random.Random, count: int, least: int = 1, *, stops: bool = False) -> None:
        """``least``: so many checkpoints must have been completed before. ``stops``: some are stopped instead."""
        self._run = run
        self._chance = chance
        self._left = count
        self._least = least
        self._stops = stops
        run.faults.on -= SLOW
        self._on_manifest = run.history.on_manifest
        run.history.on_manifest = self._on_written

    def _on_written(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint is complete, and enough were before: perhaps the driver ends."""
        if len(self._run.history.standing) >= self._least and self._left and self._chance.random() < RATE:
            self._left -= 1
            self._run.world.at(self._chance.randint(0, 15), self._end)
        self._on_manifest(manifest, files)

    def _end(self) -> None:
        stops = self._stops and self._chance.random() < 0.5
        for one in self._run.started:
            if not one.process.is_alive or self._run.faults.is_healed:
                continue
            if not stops or one.driver is None:
                one.process.kill()
            else:
                self._run.tasks.spawn(one.process, one.driver.stop, "signal")
