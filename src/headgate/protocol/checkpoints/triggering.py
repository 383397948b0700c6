"""When a checkpoint begins: what is wanted, and whether it may begin now (rules C2–C6, C26, E5).

Part of the ``Coordinator``. Ids rise, and each is recorded durably before its barriers start. Never looks at what
subtasks answer.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from headgate.model.config import CheckpointConfig
from headgate.model.ids import CheckpointId
from headgate.model.options import CheckpointKind, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import ArmTimer, Effect, PauseTimer, ReserveId, SavepointOrder
from headgate.protocol.checkpoints.pending import Pending, PendingCheckpoints
from headgate.protocol.checkpoints.savepoints import Savepoints
from headgate.protocol.machine import Ignored

LAST_RETRY_MS_MIN = 200
"""Pause before a last checkpoint that failed is tried again: storage may recover."""


class Wanted(Enum):
    """Which checkpoints are wanted."""

    NONE = "not every participant runs, or all is over"
    PERIODIC = "one at every interval, and whenever somebody asks"
    LAST = "one, before a requested stop"
    FINAL = "one, after all input was processed"

    @property
    def is_last(self) -> bool:
        """Whether nothing else is wanted after it; it is not held back by limits and pauses."""
        return self in (Wanted.LAST, Wanted.FINAL)


class Triggering:
    """Begins one checkpoint at a time."""

    def __init__(self, config: CheckpointConfig, first: CheckpointId, savepoints: Savepoints) -> None:
        self._config = config
        self._savepoints = savepoints
        self._next = first
        self._reserving: CheckpointId | None = None
        self._is_due = False
        self._is_paused = False
        self._last_done: CheckpointId | None = None
        self._is_last_done_final = False
        self.wanted = Wanted.NONE

    @property
    def last_done(self) -> CheckpointId | None:
        """The completed checkpoint behind which nothing else was wanted, if there is one."""
        return self._last_done

    @property
    def is_last_done_final(self) -> bool:
        """Whether ``last_done`` was taken after all input had been processed."""
        return self._is_last_done_final

    @property
    def has_last(self) -> bool:
        """Whether the last checkpoint that is wanted is completed."""
        return self._last_done is not None and (self.wanted is not Wanted.FINAL or self._is_last_done_final)

    def request(self) -> None:
        """Somebody wants a checkpoint now: it waits for no pause."""
        self._is_due, self._is_paused = True, False

    def interval_over(self) -> None:
        """A periodic checkpoint is due."""
        self._is_due = True

    def pause_over(self) -> None:
        """Checkpoints may begin again."""
        self._is_paused = False

    def begin(self, pending: PendingCheckpoints) -> list[Effect]:
        """Begin a checkpoint if one is wanted and allowed (C2, C3, C4)."""
        if self._reserving is not None or not self._wants(pending):
            return [Ignored("no checkpoint can begin now")]
        # A stop or a savepoint does not queue behind checkpoints that may hang: it subsumes them when it completes.
        is_forced = self.wanted.is_last or self._savepoints.is_wanted  # SV8
        if not is_forced and len(pending) >= self._config.max_concurrent:
            return [Ignored("as many checkpoints are pending as allowed")]
        # The id is used up even if its reservation fails: whether the record of it was written may be unknown.
        checkpoint, self._next = self._next, CheckpointId(self._next + 1)
        self._is_due = False
        self._reserving = checkpoint
        return [ReserveId(checkpoint)]

    def _wants(self, pending: PendingCheckpoints) -> bool:
        if self.wanted.is_last:
            return not pending.has_last(is_final=self.wanted is Wanted.FINAL) and not self.has_last
        is_due = self._is_due and not self._is_paused
        return self.wanted is Wanted.PERIODIC and (is_due or self._savepoints.is_wanted)

    def reservation_over(self, checkpoint: CheckpointId) -> bool:
        """Take the outcome of a reservation; return whether anybody waits for it."""
        if self._reserving != checkpoint:
            return False
        self._reserving = None
        return True

    def begun(self, checkpoint: CheckpointId, *, is_draining: bool) -> Pending:
        """Return the checkpoint whose barriers start now.

        Final only if everybody had finished *before* that (C26, E3): decided here.
        """
        savepoint = self._savepoints.begun(checkpoint, is_last=self.wanted.is_last)
        options = self._options(savepoint)
        return Pending(self.wanted is Wanted.FINAL, self.wanted.is_last, is_draining, options, savepoint=savepoint)

    def _options(self, savepoint: SavepointOrder | None) -> CheckpointOptions:
        """Return what a checkpoint that begins now is to be (GM2, GM3, UA3)."""
        is_cut = self.wanted.is_last or savepoint is not None  # SV9: a savepoint holds no records in flight
        may_overtake = self._config.alignment_timeout_ms is not None and not is_cut
        options = self._config.mode.options(is_last=self.wanted is Wanted.LAST, may_overtake=may_overtake)
        if savepoint is None:
            return options
        return replace(options, kind=CheckpointKind.SAVEPOINT, target=savepoint.target)  # SV1

    def again(self) -> list[Effect]:
        """A last checkpoint that failed is wanted again, after a pause in which storage may recover (E5)."""
        if self.wanted.is_last:
            return [ArmTimer(PauseTimer(), max(self._config.min_pause_ms, LAST_RETRY_MS_MIN))]
        return []

    def completed(self, checkpoint: CheckpointId, pending: Pending) -> list[Effect]:
        """A checkpoint is completed: the next one waits for the pause."""
        if pending.is_last:
            self._last_done, self._is_last_done_final = checkpoint, pending.is_final
        if self._config.min_pause_ms and self.wanted is Wanted.PERIODIC:
            self._is_paused = True
            return [ArmTimer(PauseTimer(), self._config.min_pause_ms)]
        return []

    def check(self, pending: PendingCheckpoints) -> None:
        """Assert the invariants."""
        assert pending.newest < self._next, "an id is used once, and they rise (C2)"
        assert self._reserving is None or self._reserving not in pending, "barriers follow the record of the id"
