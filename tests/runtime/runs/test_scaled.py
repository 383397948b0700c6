"""Pipelines between streams that are scaled all the time, with real workers: each event once, keys in order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.store.traffic import KEYS, SCHEMA, Traffic, flowing, rows_of

import headgate as hg
from headgate.model.plan import PipelineDefinition
from headgate.store.store import Store


@pytest.fixture
def segments() -> int:
    return 2


@pytest.fixture
def store(tmp_path: Path, segments: int) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream("in", SCHEMA, segments=segments, routing_key="key")
        yield opened


def windowed(root: Path) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    events = pipeline.source(hg.StreamSource("in", store=str(root / "store")), name="source")
    counts = (
        events.with_timestamps("at", out_of_orderness="0s")
        .key_by("key")
        .window(hg.Tumbling("100ms"))
        .agg(count=pl.len())
    )
    counts.sink(hg.StreamSink("out", store=str(root / "store"), segments=2), name="out")
    return definition_of(pipeline)


def scaled(run: Run, traffic: Traffic, times: int) -> None:
    """Wait until streams were scaled so often, between checkpoints."""
    while traffic.scaled_count < times:
        run.wait_checkpoints(1)


@pytest.mark.parametrize("segments", few([1, 2], 1))
def test_windows_are_right_when_a_stream_is_scaled(start: Callable[..., Run], store: Store, tmp_path: Path) -> None:
    is_over = threading.Event()
    run = start(windowed(tmp_path))
    run.wait_checkpoints(1)  # with one segment, the other subtask has begun without any
    with flowing(store, is_over, "in", rounds=40, most=8) as traffic:
        scaled(run, traffic, 8)
        while not rows_of(store, "out"):  # event time goes on, also with a subtask that has no segment
            run.wait_checkpoints(1)
        is_over.set()
    assert run.result().is_finished
    found: Counter[str] = Counter()
    for row in rows_of(store, "out"):
        found[str(row["key"])] += int(str(row["count"]))
    assert found == {f"k{key}": traffic.rounds_count for key in range(KEYS)}
