"""What a checkpoint is to be: it travels with its trigger, its barriers and every order to take a snapshot.

Source: Flink's ``CheckpointOptions``. Today every checkpoint is an aligned one of the pipeline's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckpointKind(Enum):
    """Whose it is."""

    CHECKPOINT = "checkpoint"
    """The pipeline's: removed when newer ones are retained."""
    SAVEPOINT = "savepoint"
    """The user's: never removed by the pipeline."""


class Alignment(Enum):
    """What a subtask does with the channels that a barrier has come on."""

    ALIGNED = "aligned"
    """It reads nothing more from them until the barrier has come on all."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What a checkpoint is to be. All barriers of one checkpoint carry the same options.

    Attributes:
        target: where its snapshots go, if not below the pipeline's checkpoint directory.
    """

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    alignment: Alignment = Alignment.ALIGNED
    target: str | None = None


ORDINARY = CheckpointOptions()
