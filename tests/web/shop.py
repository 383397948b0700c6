"""A pipeline to be shown, and what its run tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

import headgate as hg
from headgate.model.ids import CheckpointId, NodeName
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import (
    CheckpointOutcome,
    EdgeProgress,
    LoopProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
    SourceProgress,
    SplitProgress,
    SubtaskAlignment,
)

NOW_MS = 1_700_000_000_000


def definition(root: Path) -> PipelineDefinition:
    """Orders are counted per shop and written; what comes back is tried once more."""
    pipeline = hg.Pipeline("shop", parallelism=2, checkpointing=hg.Checkpointing(interval="1s", dir=root))
    orders = pipeline.source(hg.FromRows([{"shop": "a", "tries": 0}]), name="orders")

    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        again = loop.filter(pl.col("tries") > 0, name="again").with_columns(tries=pl.col("tries") - 1)
        return again, loop.filter(pl.col("tries") == 0, name="done")

    tried = orders.iterate(body, name="tries")
    tried.key_by("shop").reduce(lambda a, b: a, name="latest").sink(hg.Discard(), name="out")
    return pipeline.definition(2)


def progress(read: float = 1_500.0, **changes: Any) -> Progress:
    """The numbers of a moment."""
    nodes = (
        NodeProgress(NodeName("orders"), 0, 9_000, 0.0, read),
        NodeProgress(NodeName("again"), 900, 300, 90.0, 30.0, runs_with=NodeName("with-columns")),
        NodeProgress(NodeName("with-columns"), 300, 300, 30.0, 30.0, busy=0.05),
        NodeProgress(NodeName("latest"), 9_000, 8_000, read, 1_200.0, (("late", 3),)),
        NodeProgress(NodeName("out"), 8_000, 0, 1_200.0, 0.0),
    )
    given = {
        "state": PipelineState.RUNNING,
        "nodes": nodes,
        "watermark_ms": NOW_MS,
        "pending_checkpoint": PendingCheckpoint(CheckpointId(8), 1_200, ("latest[1]",)),
        "busy": 0.42,
        "uptime_ms": 61_000,
        "edges": (
            EdgeProgress(0, NodeName("orders"), NodeName("tries"), read, 0.25, 0.5, 3, 2_048, 0.75),
            EdgeProgress(1, NodeName("with-columns"), NodeName("tries"), 300.0, 0.05),
            EdgeProgress(2, NodeName("key-by"), NodeName("latest"), 1_200.0, 0.42, 0.0),
        ),
        "sources": (
            SourceProgress(
                NodeName("orders"),
                splits=2_000,
                idle_splits=1,
                lag=12_345,
                unknown_lags=1,
                most_lagging=(
                    SplitProgress("shop/3", 1, 1_000, 13_345, 12_345, 1_000, 150.0, NOW_MS),
                    SplitProgress("shop/4", 0, 70, is_idle=True),
                ),
                waiting_splits=3,
            ),
            SourceProgress(NodeName("logs"), "bytes", 1, 0, 2_048, 0, (SplitProgress("a.log", 0, 10, 2_058, 2_048),)),
        ),
        "loops": (LoopProgress(NodeName("tries"), 4, 2_048, came_back=17),),
    }
    return Progress(**{**given, **changes})


class Asked:
    """A handle that only remembers what it was asked for."""

    def __init__(self, outcome: CheckpointOutcome | None = None) -> None:
        self.outcome = outcome or CheckpointOutcome(CheckpointId(9))
        self.calls: list[tuple[str, object]] = []

    def alignments(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        return {CheckpointId(7): (SubtaskAlignment("latest[1]", 4_321, 8),)}

    def take_checkpoint(self, timeout_s: float | None = None) -> CheckpointOutcome | None:
        self.calls.append(("checkpoint", timeout_s))
        return self.outcome

    def take_savepoint(self, path: str, timeout_s: float | None = None) -> CheckpointOutcome | None:
        self.calls.append(("savepoint", path))
        return self.outcome

    def stop(self, timeout_s: float | None = None, *, drain: bool = False) -> None:
        self.calls.append(("drain" if drain else "stop", timeout_s))
