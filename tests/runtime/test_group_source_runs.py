"""Pipelines that read by a reader group, with real workers that are killed or hang (docs/spec/group-source.md)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key

import headgate as hg
from headgate.model.definition import PipelineDefinition
from headgate.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream("in", SCHEMA, segments=3, routing_key="key")
        yield opened


def copied(root: Path, parallelism: int = 2) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    source = pipeline.source(hg.GroupSource("in", "shop", store=str(root / "store")), name="source")
    source.sink(hg.StreamSink("out", store=str(root / "store"), routing_key="key", segments=2), name="out")
    return definition_of(pipeline)


def test_a_worker_that_hangs_and_wakes_loses_and_repeats_nothing(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:  # GS2, GS5
    is_over = threading.Event()
    run = start(copied(tmp_path, 3))
    with flowing(store, is_over, "in", rounds=40, most=6) as traffic:
        run.wait_checkpoints(2)
        zombie = run.freeze(1)
        run.wait_restarts(1)
        run.wait_checkpoints(2)
        os.kill(zombie, signal.SIGCONT)  # it finds that another generation has the group
        run.wait_checkpoints(3)
        run.kill(0)
        run.wait_restarts(2)
        run.wait_checkpoints(2)
        is_over.set()
    assert run.result().is_finished
    assert per_key(store) == all_rounds(traffic)
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []
