"""Pipelines that do not retain their checkpoints when they are cancelled (C70–C74 of docs/spec/retaining.md).

A user cancels, again and again, and now and then the driver dies over it. Judged beside everything else: when the
checkpoints are given up, all output that they promise is visible; from then on none of them is restored; and however
often the pipeline is started after that, nothing is produced again, because its sinks remember the life that is over.
Everything drawn here comes from a generator of its own (SM45).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from headgate.errors import HeadgateError, PutCheckpointsBack
from headgate.model.progress import RunResult
from headgate.protocol.checkpoints.recovery import candidates, has_given_up
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.sim.machine.faults import Fault
from headgate.sim.product.fault_injection import Started
from headgate.sim.product.run import Run
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.product.verdict import Verdict
from headgate.sim.product.workloads import Values
from headgate.sim.world import Violation
from headgate.storage.urls import open_storage

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.DRAIN, Fault.CANCEL, Fault.POWER_CUT)
"""No start goes back past damage or drains here: what is visible is then a part of what a whole run makes."""

LOOK_MS = 3
"""How often the user looks at the pipeline."""


class CancellingRun(Run):
    """A run with a user that cancels, with checkpoints that are removed then."""

    IS_PLAIN = True

    def _draw(self) -> None:
        self._chance = random.Random(f"cancelling of seed {self.seed}")
        settings = self.settings
        settings.hidden.clear()
        settings.grows = False
        settings.checkpointing = replace(settings.checkpointing, retain_on_cancel=False)
        settings.roll_interval = 0  # every checkpoint promises something
        self.faults.on -= set(WITHOUT)
        self.asked_count = 0
        self.is_given_up = False
        self._completed_count = 0
        self._patience_ms = self._chance.randint(50, 400)
        self.world.at(LOOK_MS, self._look_at_it)

    def _look_at_it(self) -> None:
        """Have the user cancel just when a checkpoint has completed, or when patience is at its end."""
        if self.faults.is_healed or self.is_finished:
            return
        completed_count, self._completed_count = self._completed_count, len(self.history.completed)
        is_new = self._completed_count > completed_count and self._chance.random() < 0.2
        if is_new or self.world.now_ms > self._patience_ms:
            self._patience_ms = self.world.now_ms + self._chance.randint(50, 400)
            self._cancel(self.started[-1])
        self.world.at(LOOK_MS, self._look_at_it)

    def _cancel(self, started: Started) -> None:
        """Cancel, and perhaps have the driver die over it."""
        if started.driver is None or not started.process.is_alive or not self.history.completed:
            return
        self.asked_count += 1
        self.world.tell("user", f"cancels {started.process.name}")
        self.tasks.spawn(started.process, started.driver.cancel, "signal")
        if self._chance.random() < 0.4:
            self.world.at(self._chance.randint(1, 300), self._kill, started)

    def _kill(self, started: Started) -> None:
        if started.process.is_alive and not self.faults.is_healed:
            started.process.kill()

    def _is_over(self, result: RunResult) -> bool:
        return result.has_removed_checkpoints or super()._is_over(result)

    def _heed(self, error: HeadgateError) -> None:
        if isinstance(error.remedy, PutCheckpointsBack):  # its sinks remember a life of the pipeline that is over
            self.is_finished = True
        super()._heed(error)

    # -- judging ----------------------------------------------------------------------------------------------------

    def _check_disks(self) -> None:
        """Of a pipeline that was given up, the next start that claims removes what is left; none does here."""
        if not self.history.given_up:
            super()._check_disks()

    def _verify(self) -> None:
        log = CheckpointLog(open_storage(ROOT), NAME).observe()
        self.is_given_up = has_given_up(log)
        if self.is_given_up != bool(self.history.given_up):
            raise Violation("LV7", "it was begun anew in front of sinks that remember it")
        if self.is_given_up and candidates(log):
            raise Violation("C72", f"{len(candidates(log))} checkpoints that were given up can be restored")
        if self.is_given_up:
            Part(self.settings, self.history, self.listed_at).check()
            self._is_verified = True
        else:
            super()._verify()


class Part(Verdict):
    """Judges what was committed when the pipeline was given up: all that was promised, and nothing twice."""

    def check(self) -> None:
        """Compare it with what a whole run commits.

        Raises:
            Violation
        """
        whole = [[row for rows in splits.values() for row in rows] for splits in self._settings.inputs]
        expected: dict[str, Counter[Values]] = self._settings.job.expected(whole)
        for sink, columns in self._settings.job.columns.items():
            more = self._committed(sink, columns) - expected[sink]
            if more:
                raise Violation("I1", f"{sink} has what no run makes, or has it twice: {sorted(more)[:4]}")
        hidden = self._history.hidden_until(max(self._history.completed, default=0))
        if hidden:
            raise Violation("I1", f"{hidden[:4]} was promised, and was given up")
