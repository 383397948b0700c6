"""Recovery: the probe reports its times once, and the operator behind it sees every record."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow as pa
from bench.headgate_windowed import pipeline
from bench.recovery import PROBED, STEPS, FirstRecord
from bench.running import wrapped

from headgate.operators.base import Operator, OperatorContext


class Seen(Operator):
    """Counts rows."""

    rows = 0

    def process(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows


class SeenSpec:
    """The spec of ``Seen``."""

    def build(self) -> Operator:
        return Seen()


def test_the_first_batch_reports_the_steps_in_order_and_later_ones_nothing() -> None:
    operator = copy.copy(FirstRecord(SeenSpec())).build()
    operator.context = OperatorContext("p", PROBED, 0, 2, 128, lambda: 0)
    batch = pa.RecordBatch.from_pydict({"a": [1, 2]})
    operator.process(batch)
    counters = dict(operator.context.metrics.counters)
    operator.process(batch)
    times = [counters[step] for step in STEPS]
    assert times == sorted(times)
    assert times[0] > 0
    assert operator.context.metrics.counters == counters
    assert operator.rows == 4


def test_the_probe_finds_its_node_in_the_windowed_count(tmp_path: Path) -> None:
    definition = wrapped(pipeline(10, 1_000, 100, str(tmp_path), with_age=False).definition(), PROBED, FirstRecord)
    specs = {str(node.name): node.spec for vertex in definition.plan.vertices for node in vertex.nodes}
    assert isinstance(specs[PROBED], FirstRecord)
    assert sum(isinstance(spec, FirstRecord) for spec in specs.values()) == 1
