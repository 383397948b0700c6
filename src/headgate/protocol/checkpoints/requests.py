"""Who asked for a checkpoint, and what came of it (rules C60–C62 of docs/spec/coordinator.md).

Part of the ``Coordinator``. A request is a number that the interpreter made up. Never begins a checkpoint: it only
knows which of them serves whom.
"""

from __future__ import annotations

from collections.abc import Container

from headgate.model.ids import CheckpointId
from headgate.protocol.checkpoints.coordinator_events import AnswerRequest, Effect


class Requests:
    """Requests that are not answered yet."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._served: dict[CheckpointId, list[int]] = {}

    def ask(self, request: int) -> None:
        """Somebody wants a checkpoint that begins from now on."""
        self._waiting.append(request)

    def begun(self, checkpoint: CheckpointId) -> None:
        """The barriers of a checkpoint start: it serves everybody who waits (C60)."""
        self._served[checkpoint], self._waiting = self._waiting, []

    def not_begun(self, reason: str) -> list[Effect]:
        """A checkpoint could not begin: that answers everybody who waits (C61)."""
        waiting, self._waiting = self._waiting, []
        return [AnswerRequest(request, None, reason) for request in waiting]

    def completed(self, checkpoint: CheckpointId) -> list[Effect]:
        """A completion answers whoever waits for it or for an older one, which it covers (C15, C61)."""
        done = [older for older in self._served if older <= checkpoint]
        return [AnswerRequest(request, checkpoint) for older in done for request in self._served.pop(older)]

    def check(self, under_way: Container[CheckpointId]) -> None:
        """Assert the invariants."""
        for checkpoint in self._served:
            assert checkpoint in under_way, "whoever asked is answered in the end (C61)"

    def failed(self, checkpoint: CheckpointId, reason: str) -> list[Effect]:
        """The checkpoint was given up, and so is the request: who asked decides whether to ask again (C61)."""
        return [AnswerRequest(request, None, reason) for request in self._served.pop(checkpoint, [])]
