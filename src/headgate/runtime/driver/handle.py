"""A started pipeline in its user's hands, whoever starts its workers.

Decides nothing. ``runtime.driver.driver`` is asked; ``spark.session`` and ``testing.in_process`` hand it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from headgate.call_errors import checked_calls
from headgate.display.runs import ShownRun
from headgate.model.ids import CheckpointId
from headgate.model.progress import (
    CheckpointOutcome,
    CheckpointProgress,
    Location,
    Progress,
    RunResult,
    SubtaskAlignment,
)
from headgate.runtime.driver.driver import Driver
from headgate.storage.backends import absolute_location
from headgate.threads import wait_for

_T = TypeVar("_T")


class DriverHandle(ShownRun):
    """A started pipeline (``model.progress.PipelineHandle``)."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        super().__init__(driver.name, driver.result)

    @property
    def progress(self) -> Progress:
        """The latest snapshot."""
        return self.driver.progress

    def wait(self, timeout_s: float | None = None) -> RunResult | None:
        """Wait until the pipeline ended; None when ``timeout_s`` passed before.

        Whoever is interrupted while waiting (Ctrl-C, a notebook's cell) waits no longer, and the run goes on (ND6).

        Raises:
            PipelineFailed: the restart strategy gave up.
            FencedError: another driver of the same pipeline took over.
        """
        try:
            result = wait_for(self.driver.result, timeout_s)
        except BaseException:
            if self.driver.result.done():
                self._release()
            raise
        if result is not None:
            self._release()
        return result

    def stop(
        self, timeout_s: float | None = None, *, drain: bool = False, savepoint: Location | None = None
    ) -> RunResult | None:
        """Take a last checkpoint, then stop; a later run of the same pipeline continues from it.

        With ``drain`` the sources end as if their input had ended: windows fire, everything in flight is processed,
        and the last checkpoint is final. A drained pipeline has finished: it does not continue. ``savepoint``: a place
        at which a savepoint of the last checkpoint is written; ``RunResult.savepoint`` says what came of it.

        Raises:
            UsageError: the savepoint cannot be there; the pipeline goes on.
            PipelineFailed, FencedError: see ``wait``.
        """
        if savepoint is not None:
            asked = self.driver.end_with_savepoint(absolute_location(savepoint), drain=drain)
            result = self.wait(timeout_s)
            return None if result is None else replace(result, savepoint=asked.result())
        if drain:
            self.driver.drain()
        else:
            self.driver.stop()
        return self.wait(timeout_s)

    def take_checkpoint(self, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Take a checkpoint now, whatever interval and pause say. None: ``timeout_s`` passed; it may still complete."""
        return wait_for(self.driver.take_checkpoint(), timeout_s)

    def take_savepoint(self, path: Location, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Write a savepoint at ``path``; return what came of it, with ``savepoint``, or None: ``timeout_s`` passed.

        Raises:
            UsageError: it cannot be there.
        """
        return wait_for(self.driver.take_savepoint(absolute_location(path)), timeout_s)

    def answer_requests(self) -> None:
        """Take a checkpoint for whoever asks from another process, and tell them what came of it."""
        self.driver.answer_asks()

    def cancel(self, *, retain: bool = False) -> None:
        """Stop at once, without a last checkpoint; a later run continues from the latest completed one.

        With ``Checkpointing(retain_on_cancel=False)`` the checkpoints are removed, unless ``retain`` is given.
        """
        self.driver.cancel(retain=retain)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Make ``call`` once, as soon as the run has ended, however; before ``wait`` returns."""
        self.driver.result.add_done_callback(lambda _: call())

    def checkpoints(self) -> tuple[CheckpointProgress, ...]:
        """Return the completed checkpoints of this run, oldest first (bounded)."""
        return tuple(self.driver.book.checkpoints)

    def alignments(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        """Return how long the latest checkpoints held up each subtask, by checkpoint (bounded).

        Workers report twice a second, so the newest may be missing or not whole yet.
        """
        return self.driver.book.aligned.latest()

    def metrics(self) -> dict[str, dict[str, int | float]]:
        """Return ``node → metric → number`` of the latest snapshot: what ``NodeProgress`` has, but for what is None."""
        return {str(node.node): node.numbers() for node in self.driver.progress.nodes}

    def _release(self) -> None:
        """Give up what the run needed; it has ended. May be called again."""
        self.driver.join()
        self.close_display()


checked_calls(DriverHandle, "PipelineHandle")
