"""What a browser may ask of the run: the same as a user's program or the command line (PG1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.errors import UsageError
from headgate.model.progress import CheckpointOutcome, PipelineHandle

WISHES = ("checkpoint", "savepoint", "stop", "drain")
ENDING = {"drain": "the sources end, and everything in flight is processed", "stop": "it stops"}
ANSWER_S = 60.0
"""How long a browser is kept waiting for a checkpoint; it may complete later."""


class Asking:
    """Passes wishes on to the run, once it has begun."""

    def __init__(self) -> None:
        self._handle: PipelineHandle | None = None

    def begin(self, handle: PipelineHandle) -> None:
        """The run has begun."""
        self._handle = handle

    def ask(self, wish: str, body: Mapping[str, Any]) -> str:
        """Do it; return what came of it, in one sentence. Waits for checkpoints, not for the end of the run.

        Args:
            wish: one of ``WISHES``.
            body: of a savepoint, ``path``: an empty directory or a URL.

        Raises:
            UsageError: it cannot be done.
        """
        if self._handle is None:
            raise UsageError("the pipeline has not started yet; ask again when it runs")
        if wish == "checkpoint":
            return told(self._handle.take_checkpoint(ANSWER_S))
        if wish == "savepoint":
            return told(self._handle.take_savepoint(savepoint_path(body), ANSWER_S))
        self._handle.stop(0.0, drain=wish == "drain")
        return ENDING[wish]


def savepoint_path(body: Mapping[str, Any]) -> str:
    """Return where a savepoint is to be.

    Raises:
        UsageError: nothing was said.
    """
    path = body.get("path")
    if not isinstance(path, str) or not path.strip():
        raise UsageError("name a place for the savepoint: an empty directory or a URL")
    return path.strip()


def told(outcome: CheckpointOutcome | None) -> str:
    """Return what came of a checkpoint, in one sentence; None: it is still under way.

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
