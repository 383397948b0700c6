"""What a pipeline guarantees, and what a checkpoint is to be: it travels with its trigger and its barriers.

Source: Flink's ``CheckpointOptions``; rules GM1–GM3 of docs/spec/guarantees.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckpointKind(Enum):
    """Kind of a checkpoint, by its owner."""

    CHECKPOINT = "checkpoint"
    """The pipeline's: removed when newer ones are retained."""
    SAVEPOINT = "savepoint"
    """The pipeline's, and what is written of it below ``target`` is the user's: never removed by the pipeline (SV1)."""


class Alignment(Enum):
    """What a subtask does with the channels that a barrier has come on."""

    ALIGNED = "aligned"
    """It reads nothing more from them until the barrier has come on all."""
    TRACKED = "tracked"
    """It reads on, so its snapshot may hold records from after the barrier."""
    TIMED = "timed"
    """As ``ALIGNED``, but for a while; then the barrier overtakes what waits in front of it (UA3)."""
    OVERTAKING = "overtaking"
    """As ``TIMED``, and somewhere on its way it did not wait any longer (UA6)."""

    @property
    def may_overtake(self) -> bool:
        """Whether records that are in flight may be in a snapshot."""
        return self in (Alignment.TIMED, Alignment.OVERTAKING)


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of a checkpoint. All its barriers carry the same ones.

    Attributes:
        target: of a savepoint: where its snapshots go, too (``places.Place`` as text).
        is_last: no source sends a record after its barrier (GM3).
    """

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    alignment: Alignment = Alignment.ALIGNED
    target: str | None = None
    is_last: bool = False


ORDINARY = CheckpointOptions()


class Guarantee(Enum):
    """How often the effect of a record is in what a pipeline committed, whatever failed (GM1)."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    """Never less; what overtook a barrier may count again after a failure (GM18)."""
    AT_MOST_ONCE = "at_most_once"
    """Never more; what was on its way when something failed is lost, and nothing is processed again."""

    @property
    def alignment(self) -> Alignment:
        """What its subtasks do with barriers (GM2)."""
        return Alignment.TRACKED if self is Guarantee.AT_LEAST_ONCE else Alignment.ALIGNED

    def options(self, *, is_last: bool, may_overtake: bool = False) -> CheckpointOptions:
        """Return what its checkpoints are to be; ``is_last``: a stop waits for this one (GM3)."""
        if self is Guarantee.EXACTLY_ONCE:  # what is sent after the last barrier is in no snapshot
            return CheckpointOptions(alignment=Alignment.TIMED) if may_overtake else ORDINARY
        return CheckpointOptions(alignment=self.alignment, is_last=is_last)
