"""What checkpoints still need of a stream stays, whatever its retention says, and what is gone is never passed over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.streams import StreamSource
from headgate.errors import PipelineFailed, UsageError
from headgate.model.plan import PipelineDefinition
from headgate.runtime.driver import coordinator_host
from headgate.store.policies import Retention
from headgate.store.store import Store

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream("in", SCHEMA, segments=3, routing_key="key")
        yield opened


def copied(root: Path, *, holds: bool = True, parallelism: int = 2) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    source = pipeline.source(StreamSource("in", store=str(root / "store"), holds=holds), name="source")
    source.sink(hg.StreamSink("out", store=str(root / "store"), segments=1), name="out")
    return definition_of(pipeline)


def append(store: Store, first: int, count: int) -> None:
    rows = [{"key": f"k{n % 7}", "value": n} for n in range(first, first + count)]
    with store.writer("in") as writer:
        writer.append(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


@contextmanager
def producing(store: Store, is_over: threading.Event) -> Iterator[list[int]]:
    """Append until it is over, then seal the stream; gives how many events there were."""
    counts = [0]

    def produce() -> None:
        with Store.open(store.root) as own:
            while not is_over.wait(0.005):  # the pace: not a wait for anything
                append(own, counts[0], 20)
                counts[0] += 20
            own.seal("in")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()


def values(store: Store) -> list[int]:
    reader, found = store.reader("out", 0), list[int]()
    while (batch := reader.read()) is not None:
        found += batch.column("value").to_pylist()
    return sorted(found)


def test_a_stream_keeps_what_the_checkpoints_of_a_stopped_pipeline_need(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:
    append(store, 0, 100)
    run = start(copied(tmp_path))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    with pytest.raises(UsageError, match="'p/source' needs the events of segment"):
        store.truncate(store.tail("in"))
    held = store.holds("in")["p/source"]
    store.truncate(held)
    append(store, 100, 100)
    store.seal("in")
    assert start(copied(tmp_path, parallelism=3)).result().is_finished
    assert values(store) == list(range(200))


def test_a_retention_that_keeps_nothing_costs_a_running_pipeline_nothing(
    start: Callable[..., Run], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # S71
    monkeypatch.setattr(coordinator_host, "DROPS_BETWEEN_FORGETTING", 1)
    is_over = threading.Event()
    run = start(copied(tmp_path))
    run.wait_checkpoints(1)
    store.set_retention("in", Retention(age="1ms"))
    with producing(store, is_over) as counts:
        for kill in (0, 1):
            before = sum(store.head("in").positions.values())
            while sum(store.retain("in").positions.values()) == before:
                run.wait_checkpoints(1)
            run.kill(kill)
            run.wait_restarts(kill + 1)
        is_over.set()
    assert run.result().is_finished
    assert values(store) == list(range(counts[0]))
    assert store.describe("in").events_count < counts[0]


def test_a_pipeline_that_needs_what_is_gone_says_so_at_once(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:
    append(store, 0, 100)
    run = start(copied(tmp_path))
    run.wait_checkpoints(2)
    run.driver.stop()
    run.result()
    append(store, 100, 100)
    store.truncate(store.tail("in"), force=True)
    again = start(copied(tmp_path))
    with pytest.raises(PipelineFailed, match=r"segment \d of stream 'in' begins at position \d+ now, and events from"):
        again.result()
    assert again.restarts == []


def test_a_first_start_begins_with_what_is_there(start: Callable[..., Run], store: Store, tmp_path: Path) -> None:
    append(store, 0, 100)
    cut = store.tail("in")
    append(store, 100, 100)
    store.truncate(cut)
    store.seal("in")
    assert start(copied(tmp_path)).result().is_finished
    assert values(store) == list(range(100, 200))


def test_whoever_only_looks_at_a_stream_or_does_without_holds_nothing(
    start: Callable[..., Run], started: list[PipelineDefinition], store: Store, tmp_path: Path
) -> None:
    append(store, 0, 10)
    store.seal("in")
    looked = hg.Pipeline("looked").source(StreamSource("in", store=store.root)).collect()
    assert looked.height == 10
    assert len(started) == 1, "on child processes"
    assert start(copied(tmp_path, holds=False)).result().is_finished
    assert store.holds("in") == {}
