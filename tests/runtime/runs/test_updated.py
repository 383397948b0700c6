"""A pipeline between streams that get other columns while it runs, with real workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.model.plan import PipelineDefinition
from headgate.store.store import Store

FIRST = pa.schema([("key", pa.large_string()), ("n", pa.int32())])
LAST = pa.schema([("key", pa.large_string()), ("n", pa.int64()), ("note", pa.large_string())])


def copied(root: Path) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    source = pipeline.source(hg.StreamSource("in", store=str(root / "store")), name="source")
    source.sink(hg.StreamSink("out", store=str(root / "store"), routing_key="key", segments=2), name="out")
    return definition_of(pipeline)


def write(store: Store, of: pa.Schema, *rows: tuple[Any, ...]) -> None:
    with store.writer("in") as writer:
        writer.append(pa.RecordBatch.from_pylist([dict(zip(of.names, row, strict=True)) for row in rows], schema=of))


def read(store: Store) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for segment in range(len(store.describe("out").ends)):
        reader = store.reader("out", segment)
        while (batch := reader.read()) is not None:
            found += batch.to_pylist()
    return sorted(found, key=lambda row: int(row["n"]))


def test_a_pipeline_goes_on_through_updates_and_takes_them_up_when_it_is_built_anew(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream("in", FIRST, segments=2, routing_key="key")
        before = copied(tmp_path)
        write(store, FIRST, *((f"k{n}", n) for n in range(4)))
        run = start(before)
        run.wait_checkpoints(2)
        store.update_stream("in", schema=LAST)
        write(store, LAST, ("k4", 4, "left out"))
        run.kill(0)  # what takes its place was built with the columns of before, too
        run.wait_restarts(1)
        store.update_stream("out", schema=LAST)
        write(store, FIRST, ("k5", 5))
        run.wait_checkpoints(3)
        run.driver.stop()
        assert not run.result().is_finished
        write(store, LAST, ("k6", 1 << 40, "new"))
        store.seal("in")
        assert start(copied(tmp_path)).result().is_finished
        assert read(store) == [
            *({"key": f"k{n}", "n": n, "note": None} for n in range(6)),
            {"key": "k6", "n": 1 << 40, "note": "new"},
        ]
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
