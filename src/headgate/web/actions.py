"""What a browser may do with a run: checkpoints, savepoints, stop, drain; as the command line does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.api.pipeline_registry import KnownPipeline
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.progress import CheckpointOutcome, ControlRequest, PipelineHandle
from headgate.runtime.driver.remote_control import RunningPipeline
from headgate.storage.urls import absolute_location

ACTIONS = ("checkpoint", "savepoint", "stop", "drain")
ENDING_TEXT = {"drain": "the sources end, and everything in flight is processed", "stop": "it stops"}
ANSWER_S = 60.0
"""How long a browser is kept waiting for a checkpoint; it may complete later."""
LOOK_S = 0.05
"""How often the answer of another process is looked for."""


class RunActions:
    """The actions on the run of this process, once it has begun."""

    def __init__(self) -> None:
        self._handle: PipelineHandle | None = None

    def begin(self, handle: PipelineHandle) -> None:
        """The run has begun."""
        self._handle = handle

    def ask(self, action: str, body: Mapping[str, Any]) -> str:
        """Run an action; return its outcome in one sentence. Waits for checkpoints, not for the end of the run.

        Args:
            action: one of ``ACTIONS``.
            body: of a savepoint, ``path``: an empty directory or a URL.

        Raises:
            UsageError: it cannot be done.
        """
        if self._handle is None:
            raise UsageError("the pipeline has not started yet; ask again when it runs")
        if action == "checkpoint":
            return outcome_text(self._handle.take_checkpoint(ANSWER_S))
        if action == "savepoint":
            return outcome_text(self._handle.take_savepoint(savepoint_path(body), ANSWER_S))
        self._handle.stop(0.0, drain=action == "drain")
        return ENDING_TEXT[action]


def savepoint_path(body: Mapping[str, Any]) -> str:
    """Return the path of a savepoint.

    Raises:
        UsageError: there is none.
    """
    path = body.get("path")
    if not isinstance(path, str) or not path.strip():
        raise UsageError("name a place for the savepoint: an empty directory or a URL")
    return path.strip()


def outcome_text(outcome: CheckpointOutcome | None) -> str:
    """Return the outcome of a checkpoint in one sentence; None: it is still under way.

    Raises:
        UsageError: there is none.
    """
    if outcome is None:
        return f"it takes longer than {ANSWER_S:.0f} s; look among the checkpoints"
    if outcome.checkpoint is None:
        raise UsageError(f"there is none: {outcome.reason}")
    if outcome.savepoint is not None:
        return f"checkpoint {outcome.checkpoint} is a savepoint at {outcome.savepoint}"
    return f"checkpoint {outcome.checkpoint} is complete"


class PipelineActions:
    """The actions on pipelines of other processes. A browser can name only those that are shown, not any directory."""

    def __init__(self, shown: Callable[[], Sequence[KnownPipeline]]) -> None:
        self._shown = shown

    def ask(self, action: str, body: Mapping[str, Any]) -> str:
        """Run an action; return its outcome in one sentence. Waits for checkpoints, not for the end of the run.

        Args:
            action: one of ``ACTIONS``.
            body: ``pipeline`` and ``place``, as they are shown; of a savepoint, ``path``: an empty directory or a URL.

        Raises:
            UsageError: it cannot be done.
        """
        name, place = body.get("pipeline"), body.get("place")
        known = next((one for one in self._shown() if (one.name, one.place) == (name, place)), None)
        if known is None:
            raise UsageError(f"no pipeline {name!r} with its checkpoints in {place!r} is known here")
        path = absolute_location(savepoint_path(body)) if action == "savepoint" else ""
        running = RunningPipeline.find(known.place, known.name)
        if action in ENDING_TEXT:
            running.ask(drain=action == "drain")
            return f"{known.name}: {ENDING_TEXT[action]}"
        return f"{known.name}: {outcome_text(_answered(running, ControlRequest(path)))}"


def _answered(running: RunningPipeline, request: ControlRequest) -> CheckpointOutcome | None:
    """Return the outcome of ``request``, None if that takes too long for a browser."""
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
