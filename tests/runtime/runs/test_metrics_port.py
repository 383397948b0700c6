"""The numbers of a whole run, fetched while it runs and gone when it has ended."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.api.test_metrics import Noting, fetched, samples, values
from tests.runtime.running import WAIT_S, pipeline_at

import headgate as hg
from headgate.model.plan import PipelineDefinition


def arrived_at_the_sink(text: str) -> float:
    arrived = samples(text).get("headgate_records_in_total", ())
    return sum(sample.value for sample in arrived if sample.labels["operator"] == "out")


def test_prometheus_sees_a_run_until_it_has_ended(started: list[PipelineDefinition], tmp_path: Path) -> None:
    source = hg.Generator(columns={"n": hg.RowNumber()}, rows_per_second=2_000, batch_rows=20)
    pipeline = pipeline_at(tmp_path)
    pipeline.source(source).rebalance().sink(hg.Discard(), name="out")
    observer = Noting()
    handle = pipeline.start(observer=observer, metrics_port=0)
    (url,) = [note.removeprefix("metrics at ") for note in observer.notes if note.startswith("metrics at ")]
    deadline = time.monotonic() + WAIT_S
    while not (handle.checkpoints() and arrived_at_the_sink(fetched(url)) and handle.metrics()["source"]["idle_ms"]):
        assert handle.wait(0) is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    arrived = values(fetched(url), "headgate_records_in_total", "pipeline", "operator", "subtask")
    assert {labels for labels in arrived if labels[1] == "out"} == {("p", "out", "0"), ("p", "out", "1")}
    result = handle.stop()
    assert result is not None
    assert handle.metrics()["source"]["records_out"] == result.records_in
    with pytest.raises(urllib.error.URLError):
        fetched(url)
