"""Writes records through a sink and commits them, as the runtime does, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headgate.connectors.base import Committer, Sink, SinkContext
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.operators.schemas import to_canonical
from headgate.protocol.checkpoints.commit import CommitPermit

PIPELINE, NODE = "p", "out"


def records(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """The records of a stream with these rows."""
    return to_canonical(pa.RecordBatch.from_pylist(list(rows)))


def written(sink: Sink, batch: pa.RecordBatch, checkpoint: int, generation: int = 1, subtask: int = 0) -> Committable:
    """Write small output of a checkpoint, and prepare it."""
    writer = sink.open(SinkContext(PIPELINE, NODE, subtask, 1, Generation(generation), batch.schema))
    writer.write(batch)
    sealed = writer.seal(CheckpointId(checkpoint))
    assert sealed.pieces_count == 0, "small output has no pieces"
    payload = sealed.prepare()
    writer.close()
    assert payload is not None, "there is something to commit"
    return Committable(NODE, CheckpointId(checkpoint), subtask, Generation(generation), payload)


def recovered(sink: Sink, generation: int = 1, keep: Sequence[Committable] = ()) -> Committer:
    """The committer of a generation that begins."""
    committer = sink.open_committer(PIPELINE, NODE, Generation(generation))
    committer.recover(keep)
    return committer


def commit(committer: Committer, *committables: Committable) -> None:
    """Commit what completed checkpoints have."""
    newest = max(committables, key=lambda one: one.checkpoint)
    committer.commit(CommitPermit(newest.checkpoint, newest.generation), committables)


def write(sink: Sink, *batches: pa.RecordBatch) -> None:
    """Run a whole pipeline: check, create the table, and write a checkpoint for each batch."""
    sink.check(batches[0].schema)
    sink.make_target(batches[0].schema)
    committer = recovered(sink)
    for checkpoint, batch in enumerate(batches, 1):
        one = written(sink, batch, checkpoint)
        for _ in range(2):  # the second time nothing happens
            commit(committer, one)
    committer.close()
