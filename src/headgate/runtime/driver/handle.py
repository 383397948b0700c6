"""A started pipeline in its user's hands, whoever starts its workers.

Decides nothing. ``runtime.driver.driver`` is asked; ``spark.session`` and ``testing.in_process`` hand it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

from headgate.display.live import LiveDisplay, Shown, in_notebook
from headgate.display.progress import end_text, progress_html
from headgate.model.progress import CheckpointOutcome, CheckpointProgress, Location, Progress, RunResult
from headgate.runtime.driver.driver import Driver
from headgate.storage.backends import absolute_location

SIGNAL_S = 0.2
"""How long an interrupt may go unnoticed (ND6)."""

_T = TypeVar("_T")


class DriverHandle:
    """A started pipeline (``model.progress.PipelineHandle``)."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._live = LiveDisplay(self._shown, lambda timeout_s: not wait([driver.result], timeout_s).not_done)

    def __repr__(self) -> str:
        return f"PipelineHandle({self.driver.name!r}, {self.progress.state.value})"

    def _repr_html_(self) -> str:
        return self._shown()["text/html"]

    def _ipython_display_(self) -> None:
        """Show the run for as long as it goes on: notebooks call this for what a cell returns (ND4)."""
        if not in_notebook():
            raise NotImplementedError("only what a notebook shows can change")
        self._live.show()

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
            result = _in_time(self.driver.result, timeout_s)
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
        return _in_time(self.driver.take_checkpoint(), timeout_s)

    def take_savepoint(self, path: Location, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Write a savepoint at ``path`` and wait for what comes of it; ``savepoint`` of that is set if there is one.

        None when ``timeout_s`` passed before.

        Raises:
            UsageError: it cannot be there.
        """
        return _in_time(self.driver.take_savepoint(absolute_location(path)), timeout_s)

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

    def metrics(self) -> dict[str, dict[str, int | float]]:
        """Return ``node → metric → number`` of the latest snapshot: what ``NodeProgress`` has, but for what is None."""
        return {str(node.node): node.numbers() for node in self.driver.progress.nodes}

    def _release(self) -> None:
        """Give up what the run needed; it has ended. May be called again."""
        self.driver.join()
        self._live.close()

    def _shown(self) -> Shown:
        result = self.driver.result
        end = (result.exception() or result.result()) if result.done() else None
        html = progress_html(self.driver.name, self.progress, None if end is None else end_text(end))
        return {"text/html": html, "text/plain": repr(self)}


def _in_time(asked: Future[_T], timeout_s: float | None) -> _T | None:
    """Return what comes of ``asked``, or None. A signal that comes just before a wait does not end it: none is long."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = SIGNAL_S if deadline_s is None else min(SIGNAL_S, deadline_s - time.monotonic())
        if wait([asked], max(0.0, left_s)).done:
            return asked.result()
        if left_s <= 0:
            return None
