"""A pipeline whose output was taken for an orphan before it was prepared (docs/spec/stream-store.md)."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import Connection

import headgate as hg
from headgate import testing
from headgate.store.catalogue import chunk_index

ROWS = 20_000


def test_a_pipeline_whose_output_was_removed_starts_again_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, checkpoints = str(tmp_path / "store"), str(tmp_path / "checkpoints")
    removed: list[str] = []
    original = chunk_index._is_condemned

    def is_condemned(connection: Connection, path: str) -> bool:
        if len(removed) < 2:
            removed.append(path)
            return True
        return original(connection, path)

    with hg.Store.open(store) as opened:
        opened.create_stream("a/out", pa.schema({"n": pa.int64()}), routing_key="n")
        monkeypatch.setattr(chunk_index, "_is_condemned", is_condemned)
        pipeline = hg.Pipeline(
            "p",
            checkpointing=hg.Checkpointing(interval="20ms", dir=checkpoints),
            restart=hg.FixedDelay(delay="10ms", attempts=5),
        )
        numbers = hg.Generator({"n": hg.RowNumber()}, rows=ROWS, rows_per_second=40_000, timestamp=None)
        pipeline.source(numbers).sink(hg.StreamSink("a/out", store=store, routing_key="n"))
        result = testing.run(pipeline, timeout_s=300)
        assert result is not None
        assert result.restarts >= 1
        assert len(removed) == 2
        opened.seal("a/out")
        found = [n for part in opened.follow("a/out") for n in part.batch["n"].to_pylist()]
    assert sorted(found) == list(range(ROWS))
