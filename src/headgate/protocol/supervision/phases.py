"""What the supervisor waits for, and what may follow (drawn in docs/spec/supervision.md)."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What the supervisor waits for."""

    CREATED = "Begin"
    PREPARING = "the claim of the generation, and all workers of one attempt"
    DEPLOYING = "every worker to be ready"
    RUNNING = "the coordinator, or a failure"
    BACKOFF = "the restart delay"
    ENDING = "the Spark job to end"
    REMOVING = "the checkpoints to be removed"
    ENDED = "nothing"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.PREPARING, Phase.ENDING}),
    Phase.PREPARING: frozenset({Phase.DEPLOYING, Phase.BACKOFF, Phase.ENDING}),
    Phase.DEPLOYING: frozenset({Phase.RUNNING, Phase.BACKOFF, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.BACKOFF, Phase.ENDING}),
    Phase.BACKOFF: frozenset({Phase.PREPARING, Phase.BACKOFF, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.REMOVING, Phase.ENDED}),
    Phase.REMOVING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
