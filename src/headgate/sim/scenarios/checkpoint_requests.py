"""Pipelines with users that ask for checkpoints, cancel and give up their checkpoints, or hear of them out of order.

An answer can be relied on: the checkpoint began after the question, is in the log, and nothing older is restored from
then on; every question is answered when the run has ended (C60 to C62 of docs/spec/coordinator.md). When checkpoints
are given up, all output that they promise is visible, none of them is restored, and nothing is produced again (C70 to
C74 of docs/spec/retaining.md).

The runtime tells each completion once, and ids rise; ``Outside`` judges that. ``PublishOnCheckpoint`` must not depend
on it (docs/spec/listeners.md). So in a ``ListeningRun`` everybody publishes, and between the runtime and each publisher
stands a user who keeps words back, repeats them and mixes them up; what is public in the end is judged as ever. All of
it is drawn from a generator of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

import headgate as hg
from headgate.errors import HeadgateError, PutCheckpointsBack
from headgate.model.manifest import Manifest
from headgate.model.progress import CheckpointOutcome, RunResult
from headgate.protocol.checkpoints.recovery import candidates, has_given_up
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.sim.machine.world import Fault, Violation
from headgate.sim.product.checkpoint_publication import Outside
from headgate.sim.product.fault_injection import Ends, Started
from headgate.sim.product.run import Run
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.product.source import Pace
from headgate.sim.product.verdict import ASKING, Verdict
from headgate.sim.product.workloads import Values
from headgate.storage.urls import open_storage

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.STOP)
"""Nothing that was promised is taken away, and no process takes a last checkpoint but at the end."""
SAFETY_MS = 2_000


class AskingRun(Run):
    """A run with a user that asks for checkpoints."""

    IS_PLAIN = True
    SUBJECT = "asking"

    def _draw(self) -> None:
        chance, settings = self.rng, self.settings
        settings.fix_input()
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
        self._ends = Ends(self, 4)
        self.asked: list[tuple[Started, Future[CheckpointOutcome]]] = []
        self.announced: list[int] = []
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
            for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
                self.tasks.spawn(newest.process, lambda: self._order(newest), ASKING)
        self.world.at(self.rng.randint(10, 120), self._ask)

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
        self.announced.append(checkpoint)
        if checkpoint <= newest:
            history.fail("C60", f"{checkpoint} is the answer, and {newest} had begun before anybody asked")
        if checkpoint not in history.completed:
            history.fail("C61", f"{checkpoint} is the answer, and is not completed")

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint is complete: a user must have asked for it."""
        if not self.has_interval and not manifest.is_final:
            self._unasked_max -= 1
            if self._unasked_max < 0:
                self.history.fail("C2", f"there is no interval, and nobody asked for checkpoint {manifest.checkpoint}")
        self._ends.perhaps()
        super()._on_manifest(manifest, files)

    def _run_driver(self, started: Started, *, beats: bool = False, drains: bool = False) -> BaseException | None:
        problem = super()._run_driver(started, beats=beats, drains=drains)
        driver = started.driver
        waiting = [asked for one, asked in self.asked if one is started and not asked.done()]
        if waiting:
            self.history.fail("C62", f"{len(waiting)} wait for {started.process.name}, which has ended")
        if driver is not None and not self.restarts and driver.supervision.machine.restarts_count:
            self.history.fail("R2", f"{started.process.name} restarts what must not be restarted")
        return problem


WITHOUT_WHEN_CANCELLED = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.DRAIN, Fault.CANCEL, Fault.POWER_CUT)
"""No start goes back past damage or drains here: what is visible is then a part of what a whole run makes."""

LOOK_MS = 3
"""How often the user looks at the pipeline."""


class CancellingRun(Run):
    """A run with a user that cancels, with checkpoints that are removed then."""

    IS_PLAIN = True
    SUBJECT = "cancelling"

    def _draw(self) -> None:
        settings = self.settings
        settings.fix_input()
        settings.checkpointing = replace(settings.checkpointing, retain_on_cancel=False)
        settings.roll_interval = 0  # every checkpoint promises something
        self.faults.on -= set(WITHOUT_WHEN_CANCELLED)
        self.asked_count = 0
        self.is_given_up = False
        self._completed_count = 0
        self._patience_ms = self.rng.randint(50, 400)
        self.world.at(LOOK_MS, self._look_at_it)

    def _look_at_it(self) -> None:
        """Have the user cancel just when a checkpoint has completed, or when patience is at its end."""
        if self.faults.is_healed or self.is_finished:
            return
        completed_count, self._completed_count = self._completed_count, len(self.history.completed)
        is_new = self._completed_count > completed_count and self.rng.random() < 0.2
        if is_new or self.world.now_ms > self._patience_ms:
            self._patience_ms = self.world.now_ms + self.rng.randint(50, 400)
            self._cancel(self.started[-1])
        self.world.at(LOOK_MS, self._look_at_it)

    def _cancel(self, started: Started) -> None:
        """Cancel, and perhaps have the driver die over it."""
        if started.driver is None or not started.process.is_alive or not self.history.completed:
            return
        self.asked_count += 1
        self.world.tell("user", f"cancels {started.process.name}")
        self.tasks.spawn(started.process, started.driver.cancel, "signal")
        if self.rng.random() < 0.4:
            self.world.at(self.rng.randint(1, 300), self._kill, started)

    def _kill(self, started: Started) -> None:
        if started.process.is_alive and not self.faults.is_healed:
            started.process.kill()

    def _is_over(self, result: RunResult) -> bool:
        return result.has_removed_checkpoints or super()._is_over(result)

    def _apply_remedy(self, error: HeadgateError) -> None:
        if isinstance(error.remedy, PutCheckpointsBack):  # its sinks remember a life of the pipeline that is over
            self.is_finished = True
        super()._apply_remedy(error)

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
            Part(self).check()
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


Word = tuple[Literal["complete", "aborted"], int]
"""What is said of which checkpoint."""

KEPT_RATE = 0.25
REPEATED_RATE = 0.3


class Disorder:
    """Stands between the runtime and one publisher.

    What was said of the final checkpoint is passed on at once: no later call could make up for it.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kept: list[Word] = []
        self._said: list[Word] = []
        self.repeated = 0
        self.overtaken = 0

    def hear(self, word: Word, *, is_last: bool) -> list[Word]:
        """Take what the runtime says; return what the publisher is notified of now."""
        if not is_last and self._rng.random() < KEPT_RATE:
            self._kept.append(word)
            return []
        self.overtaken += len(self._kept)
        words = [*self._repeated(), word, *self._shuffled(), *self._repeated()]
        self._said += [word, *self._kept]
        self._kept = []
        return words

    def between(self) -> list[Word]:
        """Return what the publisher is notified of again directly after a barrier."""
        return self._repeated()

    def _repeated(self) -> list[Word]:
        if not self._said or self._rng.random() >= REPEATED_RATE:
            return []
        self.repeated += 1
        return [self._rng.choice(self._said)]

    def _shuffled(self) -> list[Word]:
        return self._rng.sample(self._kept, len(self._kept))


class ListeningRun(Run):
    """Everybody publishes, and is informed out of order."""

    SUBJECT = "disorder"

    def _draw(self) -> None:
        self.disorders: list[Disorder] = []
        self.settings.fix_input()  # what is added would not be read
        outside = self.settings.outside
        if outside is None:
            outside = self.settings.outside = Outside(self.seed, self.tasks, self.faults, lambda: self.history)

        def disorder() -> Disorder:
            self.disorders.append(Disorder(self.rng))
            return self.disorders[-1]

        outside.disorder = disorder
