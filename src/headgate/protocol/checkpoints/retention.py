"""Which completed checkpoints stay in storage, and how many failures in a row are put up with (rules C22, C31, C35).

Parts of the ``Coordinator``.
"""

from __future__ import annotations

from headgate.model.ids import CheckpointId
from headgate.protocol.checkpoints.coordinator_events import DropCheckpoint, Effect
from headgate.protocol.checkpoints.reasons import AbortReason


class Retention:
    """Completed checkpoints, oldest first."""

    def __init__(self, count_max: int, retained: tuple[CheckpointId, ...]) -> None:
        """``retained``: the sound ones in storage, the restored one included (C35), ascending."""
        self._count_max = max(count_max, 1)  # never the one just completed
        self._retained = list(retained)

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        """Return whether ``checkpoint`` is completed and stays."""
        return checkpoint in self._retained

    @property
    def all(self) -> tuple[CheckpointId, ...]:
        """All of them, ascending."""
        return tuple(self._retained)

    def oldest_with(self, checkpoint: CheckpointId) -> CheckpointId:
        """Return the oldest one that stays once ``checkpoint`` is completed."""
        return [*self._retained, checkpoint][-self._count_max :][0]

    def completed(self, checkpoint: CheckpointId) -> list[Effect]:
        """Keep ``checkpoint``; drop what is too old."""
        self._retained.append(checkpoint)
        dropped = self._retained[: -self._count_max]
        self._retained = self._retained[-self._count_max :]
        return [DropCheckpoint(old) for old in dropped]

    def check(self, last_completed: CheckpointId) -> None:
        """Assert the invariants; before the first completion there may be more, of another configuration."""
        assert last_completed == 0 or len(self._retained) <= self._count_max
        assert last_completed == 0 or self._retained[-1] == last_completed, "the newest one always stays (C31)"


class Tolerance:
    """Counts failures in a row (C22)."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._count = 0

    def completed(self) -> None:
        """A success: failures are counted anew."""
        self._count = 0

    def failed(self, checkpoint: CheckpointId, reason: AbortReason) -> str | None:
        """Count a failure; return the sentence that ends the generation when it was one too many."""
        if not reason.counts_as_failure:
            return None
        self._count += 1
        if self._count <= self._tolerable:
            return None
        many = f" ({self._count} in a row)" if self._count > 1 else ""
        return f"checkpoint {checkpoint} failed{many}: {reason.text}"
