"""Back-pressure: the brake takes as long as its rate says, and both kinds of checkpoints are asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from bench.back_pressure import BRAKED, Brake, Taken, pipeline, with_pending

from headgate.model.ids import CheckpointId
from headgate.model.progress import PendingCheckpoint


def test_the_brake_takes_the_time_of_its_rate() -> None:
    slept: list[float] = []
    batch = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})
    assert Brake(30.0, slept.append)(batch) is batch
    assert Brake(None, slept.append)(batch) is batch
    assert Brake(30.0, slept.append)(batch.slice(0, 0)).num_rows == 0
    assert slept == [0.1]


def test_either_kind_of_checkpoint_is_asked_for(tmp_path: Path) -> None:
    for timeout_ms in (None, 0):
        definition = pipeline(str(tmp_path), 1_000.0, 500, timeout_ms).definition()
        assert definition.config.checkpoints.alignment_timeout_ms == timeout_ms
        assert BRAKED in {str(node.name) for vertex in definition.plan.vertices for node in vertex.nodes}


def test_durations_are_noted_in_seconds() -> None:
    taken = Taken()
    taken.on_checkpoint(CheckpointId(1), 1_500, 10)
    assert taken.seconds == [1.5]


def test_a_checkpoint_that_does_not_end_counts_with_its_age() -> None:
    old = PendingCheckpoint(CheckpointId(2), 7_000, ())
    assert with_pending([0.5, 0.7], old) == [0.5, 0.7, 7.0]
    assert with_pending([], old) == [7.0]
    assert with_pending([0.5, 8.0], old) == [0.5, 8.0]
    assert with_pending([0.5], None) == [0.5]


def test_the_brake_is_in_the_thread_of_the_sink(tmp_path: Path) -> None:
    definition = pipeline(str(tmp_path), 1_000.0, 500, None).definition()
    (chain,) = (vertex for vertex in definition.plan.vertices if not vertex.is_source)
    assert [str(node.name) for node in chain.nodes] == [BRAKED, "sink"]
