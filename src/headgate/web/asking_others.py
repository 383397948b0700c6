"""What a browser may ask of pipelines that other processes of this machine run: what the command line may (PG10)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.api.known import KnownPipeline
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.progress import CheckpointOutcome
from headgate.model.run_request import RunRequest
from headgate.runtime.driver.stopping import RunningPipeline
from headgate.storage.backends import absolute_location
from headgate.web.asking import ANSWER_S, ENDING, savepoint_path, told

LOOK_S = 0.05
"""How often the answer of a pipeline is looked for."""


class AskingOthers:
    """Passes wishes on to pipelines that are shown, and to no others: a browser does not choose directories."""

    def __init__(self, shown: Callable[[], Sequence[KnownPipeline]]) -> None:
        self._shown = shown

    def ask(self, wish: str, body: Mapping[str, Any]) -> str:
        """Do it; return what came of it, in one sentence. Waits for checkpoints, not for the end of the run.

        Args:
            wish: one of ``WISHES``.
            body: ``pipeline`` and ``place``, as they are shown; of a savepoint, ``path``: an empty directory or a URL.

        Raises:
            UsageError: it cannot be done.
        """
        name, place = body.get("pipeline"), body.get("place")
        known = next((one for one in self._shown() if (one.name, one.place) == (name, place)), None)
        if known is None:
            raise UsageError(f"no pipeline {name!r} with its checkpoints in {place!r} is known here")
        path = absolute_location(savepoint_path(body)) if wish == "savepoint" else ""
        running = RunningPipeline.find(known.place, known.name)
        if wish in ENDING:
            running.ask(drain=wish == "drain")
            return f"{known.name}: {ENDING[wish]}"
        return f"{known.name}: {told(_answered(running, RunRequest(path)))}"


def _answered(running: RunningPipeline, request: RunRequest) -> CheckpointOutcome | None:
    """Return what came of ``request``, None if that takes too long for a browser."""
    ask = running.ask_for(request)
    until_ms = SYSTEM_CLOCK.monotonic_ms() + int(ANSWER_S * 1_000)
    try:
        while SYSTEM_CLOCK.monotonic_ms() < until_ms:
            if (outcome := ask.answered()) is not None:
                return outcome
            if running.ended() is not None:
                return ask.answered() or CheckpointOutcome(None, "the pipeline ended")
            time.sleep(LOOK_S)
        return None
    finally:
        ask.remove()
