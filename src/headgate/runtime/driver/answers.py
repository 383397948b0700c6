"""Everybody who waits for what they asked the driver for: each is answered once, by what came of it or by the end.

Counterparts: ``driver``, which is asked from any thread, and ``ending``, whose result is the end of the run. Keeps
nothing of whoever is answered: a run may be asked millions of times.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeAlias

from headgate.model.progress import CheckpointOutcome, RunResult

ENDED = CheckpointOutcome(None, "the pipeline ended")

Answer: TypeAlias = Callable[[CheckpointOutcome], None]
"""Called once with what came of it."""


class Answers:
    """Who waits now."""

    def __init__(self, end: Future[RunResult]) -> None:
        """``end``: of the run; whoever waits then is answered with it."""
        self._end = end
        self._waiting: set[Future[CheckpointOutcome]] = set()
        end.add_done_callback(lambda _: self._answer_all())

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def new(self) -> tuple[Future[CheckpointOutcome], Answer]:
        """Return what somebody waits for, and what answers it; the first answer counts. From any thread."""
        asked: Future[CheckpointOutcome] = Future()
        self._waiting.add(asked)
        asked.add_done_callback(self._waiting.discard)

        def answer(outcome: CheckpointOutcome) -> None:
            with suppress(InvalidStateError):
                asked.set_result(outcome)

        if self._end.done():  # looked at behind the entry: the end finds it, or this does
            answer(ENDED)
        return asked, answer

    def _answer_all(self) -> None:
        for asked in list(self._waiting):
            with suppress(InvalidStateError):
                asked.set_result(ENDED)
