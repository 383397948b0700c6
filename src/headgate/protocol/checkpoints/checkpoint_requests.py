"""Requests for checkpoints (rules C60–C62 of docs/spec/coordinator.md) and savepoints (docs/spec/savepoints.md).

Parts of the ``Coordinator``. A request is a number that the interpreter made up. A savepoint is what the subtasks
wrote of an ordinary checkpoint once more, at a place of the user's. It is complete when that checkpoint is, and all
output before it is visible (SV2). Neither begins a checkpoint or ends one: they know which serves which request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import field

from headgate.dataclass import dataclass
from headgate.model.ids import CheckpointId, SubtaskId
from headgate.model.manifest import Copied, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    AnswerRequest,
    DropSavepoint,
    Effect,
    SavepointOrder,
    WriteSavepoint,
)
from headgate.protocol.machine import Ignored


class Requests:
    """Requests that are not answered yet."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._served: dict[CheckpointId, list[int]] = {}

    def ask(self, request: int) -> None:
        """Record a request for a checkpoint that begins from now on."""
        self._waiting.append(request)

    def begun(self, checkpoint: CheckpointId) -> None:
        """The barriers of a checkpoint start: it serves everybody who waits (C60)."""
        assert checkpoint not in self._served, "a checkpoint begins once (C2)"
        self._served[checkpoint], self._waiting = self._waiting, []

    def not_begun(self, reason: str) -> list[Effect]:
        """A checkpoint could not begin: that answers everybody who waits (C61)."""
        waiting, self._waiting = self._waiting, []
        return [AnswerRequest(request, None, reason) for request in waiting]

    def completed(self, checkpoint: CheckpointId) -> list[Effect]:
        """Answer every request that waits for ``checkpoint`` or for an older one, which it covers (C15, C61)."""
        done = [older for older in self._served if older <= checkpoint]
        return [AnswerRequest(request, checkpoint) for older in done for request in self._served.pop(older)]

    def check(self, under_way: Container[CheckpointId]) -> None:
        """Assert the invariants."""
        for checkpoint in self._served:
            assert checkpoint in under_way, "a request waits only for a pending checkpoint (C61)"

    def failed(self, checkpoint: CheckpointId, reason: str) -> list[Effect]:
        """The checkpoint was given up, and so is the request: who asked decides whether to ask again (C61)."""
        return [AnswerRequest(request, None, reason) for request in self._served.pop(checkpoint, [])]


ONE_END = "the end of the pipeline has a savepoint already"


@dataclass(slots=True)
class _Taken:
    """A savepoint that some checkpoint carries."""

    order: SavepointOrder
    copies: Mapping[SubtaskId, Copied] = field(default_factory=dict)
    is_completed: bool = False
    """Whether its checkpoint is."""
    is_written: bool = False
    """Whether the file that makes it one is being written."""


class Savepoints:
    """All that were asked for and are not answered yet."""

    def __init__(self) -> None:
        self._waiting: deque[SavepointOrder] = deque()
        self._end: SavepointOrder | None = None
        self._taken: dict[CheckpointId, _Taken] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether a checkpoint is to begin now for the sake of one (SV8)."""
        return bool(self._waiting) and all(taken.order is self._end for taken in self._taken.values())

    @property
    def is_idle(self) -> bool:
        """Whether everybody who asked is answered."""
        return self._end is None and not self._taken and not self._waiting

    def ask(self, order: SavepointOrder) -> None:
        """Record a request for a savepoint of a checkpoint that begins from now on."""
        self._waiting.append(order)

    def end_with(self, order: SavepointOrder | None) -> list[Effect]:
        """The last checkpoint is to carry ``order`` (SV10)."""
        if order is None:
            return []
        if self._end is not None:
            return [AnswerRequest(order.request, None, ONE_END)]
        self._end = order
        return []

    def refuse(self, reason: str) -> list[Effect]:
        """No checkpoint but the last one begins any more, or none could: that answers everybody who waits."""
        waiting, self._waiting = self._waiting, deque()
        return [AnswerRequest(order.request, None, reason) for order in waiting]

    # -- its checkpoint ---------------------------------------------------------------------------------------------

    def begun(self, checkpoint: CheckpointId, *, is_last: bool) -> SavepointOrder | None:
        """The barriers of ``checkpoint`` start: return what it carries."""
        order = self._end if is_last else self._waiting.popleft() if self.is_wanted else None
        if order is not None:
            assert checkpoint not in self._taken, "a checkpoint carries one savepoint (SV8)"
            self._taken[checkpoint] = _Taken(order)
        return order

    def failed(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        """Handle a ``checkpoint`` that was given up: the savepoint of an end waits for the next last one (SV10).

        One that timed out is not tried again: the next attempt may time out, too, and the run has to end.
        """
        taken = self._taken.get(checkpoint)
        if taken is None:
            return []
        # its order stays in _end, and the next last checkpoint takes it from there
        if taken.order is self._end and reason is not AbortReason.EXPIRED:
            del self._taken[checkpoint]
            return []
        return self._answer(checkpoint, reason.text)

    def completed(self, checkpoint: CheckpointId, copies: Mapping[SubtaskId, Copied], *, is_end: bool) -> None:
        """``checkpoint`` is completed. ``is_end``: nothing else is wanted after it."""
        taken = self._taken.get(checkpoint)
        if taken is None:
            return
        if taken.order is self._end and not is_end:  # the final one will be the end
            del self._taken[checkpoint]
            return
        taken.copies, taken.is_completed = copies, True

    # -- what makes it one ------------------------------------------------------------------------------------------

    def advance(self, commits: CommitQueue) -> list[Effect]:
        """Write what is complete: its checkpoint is, and all output up to it is committed (SV2)."""
        effects: list[Effect] = []
        # a copy: an answer takes a savepoint out
        for checkpoint, taken in list(self._taken.items()):
            if not taken.is_completed or taken.is_written or not commits.has_confirmed(checkpoint):
                continue
            problems = sorted({f"{s}: {c.problem}" for s, c in taken.copies.items() if c.problem})
            if problems:  # SV7
                effects += self._answer(checkpoint, problems[0])
                continue
            # asked for once: this is called again after every commit
            taken.is_written = True
            entries = tuple(SubtaskEntry(subtask, copied.parts) for subtask, copied in sorted(taken.copies.items()))
            is_end = taken.order is self._end
            effects.append(WriteSavepoint(checkpoint, taken.order.target, entries, is_end))
        return effects

    def written(self, checkpoint: CheckpointId) -> list[Effect]:
        """There is a savepoint."""
        taken = self._taken.get(checkpoint)
        if taken is None or not taken.is_written:
            return [Ignored("no request waits for this savepoint")]
        self._forget(checkpoint)
        return [AnswerRequest(taken.order.request, checkpoint)]

    def not_written(self, checkpoint: CheckpointId, reason: str) -> list[Effect]:
        """There is none (SV7)."""
        if checkpoint not in self._taken:
            return [Ignored("no request waits for this savepoint")]
        return self._answer(checkpoint, reason)

    def check(self, under_way: Container[CheckpointId]) -> None:
        """Assert the invariants."""
        for checkpoint, taken in self._taken.items():
            assert taken.is_completed or checkpoint in under_way, "a checkpoint that is over carries nothing (SV8)"
            assert taken.is_completed or not taken.is_written, "what is not completed is no savepoint (SV2)"

    def _answer(self, checkpoint: CheckpointId, reason: str) -> list[Effect]:
        return _given_up(self._forget(checkpoint), reason)

    def _forget(self, checkpoint: CheckpointId) -> SavepointOrder:
        order = self._taken.pop(checkpoint).order
        if order is self._end:
            self._end = None
        return order


def _given_up(order: SavepointOrder, reason: str) -> list[Effect]:
    return [AnswerRequest(order.request, None, reason), DropSavepoint(order.target)]
