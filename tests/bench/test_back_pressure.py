"""Back-pressure: the brake takes as long as its rate says, and both kinds of checkpoints are asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from bench.back_pressure import BRAKED, Brake, Taken, pipeline

from headgate.model.ids import CheckpointId


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
