"""The benchmark of stores that machines share measures what it says, here with a store in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness import Options

from bench import store_shared
from headgate.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(store_shared.STREAM, store_shared.SCHEMA, segments=1)
        yield opened


def test_an_event_has_100_bytes() -> None:
    assert store_shared.events(10).nbytes == 1_000


def test_what_was_written_is_read(store: Store) -> None:
    written = store_shared.write_rate(store, 0.05, 100)
    read = store_shared.read_rate(store)
    assert written["written"] == read["read"] > 0
    assert written["written_per_s"] > 0 < read["read_per_s"]


def test_every_append_is_timed(store: Store) -> None:
    found = store_shared.acknowledgements(store, 0.1, 10_000)
    assert 0 < found["acknowledged_ms_p50"] <= found["acknowledged_ms_p95"] <= found["acknowledged_ms_p99"]
    assert store.describe(store_shared.STREAM).ends[0] == 1_000


def test_every_event_of_the_other_process_is_seen(store: Store) -> None:
    found = store_shared.delays(store, 0.2)
    assert found["delays_count"] == store.describe(store_shared.STREAM).ends[0] > 0
    assert found["seen_since_append_ms_p50"] >= found["seen_ms_p50"]


def test_servers_that_are_there_are_used(tmp_path: Path) -> None:
    settings = {"store": str(tmp_path / "there"), "chunks": str(tmp_path)}
    with pytest.raises(Exception, match="chunks"), store_shared.opened_store(Options(settings=settings)):
        pass
