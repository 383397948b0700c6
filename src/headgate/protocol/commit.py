"""Two-phase commit: what a sink subtask holds until it is decided, and who may decide.

Counterpart machines: ``Precommit`` lives in each sink subtask (worker), ``CommitQueue`` in the coordinator.
Source: Flink's ``TwoPhaseCommitSinkFunction``; rules K1–K5 of docs/spec/two-phase-commit.md.
Never commits by itself: it says what may be committed, in which order, and on whose proof.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.model.ids import CheckpointId, Generation


@dataclass(frozen=True, slots=True)
class CommitPermit:
    """Proof that ``checkpoint`` is completed; made only from its durable manifest (K1).

    ``generation`` is the life of the pipeline that uses the permit: the target refuses older ones.
    """

    checkpoint: CheckpointId
    generation: Generation
