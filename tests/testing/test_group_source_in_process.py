"""Pipelines that read by a reader group, in this process: each event once, whatever fails."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.store.traffic import KEYS, SCHEMA, all_rounds, flowing, per_key, rows_of

import headgate as hg
from headgate import testing
from headgate.errors import PipelineFailed, UsageError
from headgate.model.progress import SilentObserver
from headgate.store.store import Store

WAIT_S = 240.0
GROUP = "shop"
OTHERS = [{"key": f"k{n}", "value": -1 - n, "at": dt.datetime(2024, 1, 1)} for n in range(5)]


class Watching(SilentObserver):
    """Keeps what it hears, and calls ``then`` behind so many checkpoints."""

    def __init__(self, count: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.restarts: list[str] = []
        self.checkpoints: list[int] = []
        self.enough = threading.Event()
        self._count, self._then = count, then

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self.restarts.append(reason)

    def on_checkpoint(self, checkpoint: int, duration_ms: int, size_bytes: int) -> None:
        self.checkpoints.append(checkpoint)
        if len(self.checkpoints) == self._count:
            self._then()
        if len(self.checkpoints) >= self._count:
            self.enough.set()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream("in", SCHEMA, segments=3, routing_key="key")
    return store


def made(store: Store, name: str = "p", parallelism: int = 2, *, group: str = GROUP, **options: Any) -> hg.Pipeline:
    checkpointing = {"interval": "20ms", "dir": Path(store.root).parent / "checkpoints", "tolerable_failures": 20}
    return hg.Pipeline(
        name,
        parallelism=parallelism,
        checkpointing=hg.Checkpointing(**{**checkpointing, **options}),  # type: ignore[arg-type]
        restart=hg.FixedDelay(delay="10ms", attempts=20),
    )


def copied(store: Store, name: str = "p", parallelism: int = 2, *, group: str = GROUP, **options: Any) -> hg.Pipeline:
    pipeline = made(store, name, parallelism, **options)
    source = pipeline.source(hg.GroupSource("in", group, store=store.root), name="source")
    source.sink(hg.StreamSink("out", store=store.root, routing_key="key", segments=2), name="out")
    return pipeline


def run(pipeline: hg.Pipeline, **options: Any) -> Any:
    return testing.run(pipeline, timeout_s=WAIT_S, **options)


@pytest.mark.parametrize("mode", few(["exactly_once", "at_least_once"], 1))
def test_each_event_goes_through_once_while_workers_are_lost(store: Store, mode: str) -> None:  # GS5, GS13
    is_over = threading.Event()
    watching = Watching(9, is_over.set)
    with flowing(store, is_over, most=0) as traffic:
        pipeline = copied(store, parallelism=3, mode=mode)
        result = run(pipeline, observer=watching, kill_worker_after_checkpoint=[2, 4, 6])
    assert (result.is_finished, len(watching.restarts)) == (True, 3)
    if mode == "exactly_once":
        assert per_key(store) == all_rounds(traffic)
    assert {key: sorted(set(found)) for key, found in per_key(store).items()} == all_rounds(traffic)
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


def test_keys_stay_in_order_while_the_stream_is_scaled(store: Store) -> None:  # GS6
    is_over = threading.Event()
    with flowing(store, is_over, "in", rounds=8, most=12) as traffic:
        watching = Watching(25, is_over.set)
        assert run(copied(store), observer=watching, kill_worker_after_checkpoint=[8]).is_finished
    assert traffic.scaled_count > 2
    assert per_key(store) == all_rounds(traffic)


def test_windows_are_right_while_the_stream_is_scaled(store: Store) -> None:  # GS7
    is_over = threading.Event()
    pipeline = made(store)
    events = pipeline.source(hg.GroupSource("in", GROUP, store=store.root), name="source")
    counts = (
        events.with_timestamps("at", out_of_orderness="0s")
        .key_by("key")
        .window(hg.Tumbling("100ms"))
        .agg(count=pl.len())
    )
    counts.sink(hg.StreamSink("out", store=store.root, segments=2), name="out")
    with flowing(store, is_over, "in", rounds=20, most=8) as traffic:
        assert run(pipeline, observer=Watching(20, is_over.set), kill_worker_after_checkpoint=[7]).is_finished
    found: Counter[str] = Counter()
    for row in rows_of(store, "out"):
        found[str(row["key"])] += int(str(row["count"]))
    assert found == {f"k{key}": traffic.rounds_count for key in range(KEYS)}, "no record was late"


def test_it_goes_on_from_stops_drains_and_savepoints_at_another_parallelism(
    store: Store, tmp_path: Path
) -> None:  # GS13
    is_over = threading.Event()
    with flowing(store, is_over, most=0) as traffic:
        for parallelism in (1, 3, 4):
            watching = Watching(3)
            with testing.running(copied(store, parallelism=parallelism), observer=watching) as handle:
                assert watching.enough.wait(WAIT_S)
                savepoint = tmp_path / f"savepoint-{parallelism}"
                assert handle.take_savepoint(savepoint, WAIT_S) is not None
                handle.stop()
                result = handle.wait(WAIT_S)
                assert result is not None
                assert not result.is_finished
    assert run(copied(store, parallelism=2)).is_finished
    assert per_key(store) == all_rounds(traffic)
    pipeline = made(store, "again", dir=tmp_path / "elsewhere")
    source = pipeline.source(hg.GroupSource("in", "again", store=store.root), name="source")
    source.sink(hg.StreamSink("again", store=store.root, routing_key="key"), name="out")
    assert run(pipeline, restore=str(savepoint)).is_finished
    rest = per_key(store, "again")
    wanted = all_rounds(traffic)
    assert {key: wanted[key][-len(found) :] for key, found in rest.items()} == rest, "what followed the savepoint"


def test_a_drained_pipeline_has_what_its_readers_had(store: Store) -> None:
    is_over = threading.Event()
    with flowing(store, is_over, most=0) as traffic:
        watching = Watching(3)
        with testing.running(copied(store, parallelism=4), observer=watching) as handle:
            assert watching.enough.wait(WAIT_S)
            handle.stop(drain=True)
            result = handle.wait(WAIT_S)
            assert result is not None
            assert result.is_drained
    found = per_key(store)
    wanted = all_rounds(traffic)
    assert {key: wanted[key][: len(found[key])] for key in found} == found
    read = sum(store.reader_group(GROUP).cut()["in"].positions.values())
    assert read == sum(map(len, found.values())), "the group stands exactly there"


def test_an_older_checkpoint_is_restored_though_the_group_has_forgotten_it(store: Store) -> None:  # GS13
    is_over = threading.Event()
    with flowing(store, is_over, most=0) as traffic:
        watching = Watching(6)
        with testing.running(copied(store, retained=10), observer=watching) as handle:
            assert watching.enough.wait(WAIT_S)
            handle.cancel(retain=True)
            handle.wait(WAIT_S)
        assert store.reader_group(GROUP).checkpoints().keys() <= {f"checkpoint-{watching.checkpoints[-1] + 1}"}
        first, newest = watching.checkpoints[0], watching.checkpoints[-1]
        pipeline = made(store, "again", dir=Path(store.root).parent / "elsewhere")
        source = pipeline.source(hg.GroupSource("in", "again", store=store.root), name="source")
        source.sink(hg.StreamSink("again", store=store.root, routing_key="key"), name="out")
        is_over.set()
    checkpoint = Path(store.root).parent / "checkpoints" / "p" / f"chk-{first}"
    assert first < newest
    assert run(pipeline, restore=str(checkpoint)).is_finished
    rest, wanted = per_key(store, "again"), all_rounds(traffic)
    assert rest
    assert {key: wanted[key][-len(found) :] for key, found in rest.items()} == rest


def test_a_pipeline_that_starts_over_reads_everything_again(store: Store) -> None:  # GS2, GS5
    is_over = threading.Event()
    with flowing(store, is_over, most=0) as traffic:
        first = run(copied(store), observer=Watching(4, is_over.set))
    assert first.is_finished
    before = per_key(store)
    assert before == all_rounds(traffic)
    again = run(copied(store))
    assert (again.is_finished, again.records_in, per_key(store)) == (True, first.records_in, before)
    assert run(copied(store), fresh=True).is_finished
    assert per_key(store) == before


def test_a_group_has_one_pipeline_and_one_source(store: Store, tmp_path: Path) -> None:  # GS1
    store.seal("in")
    assert run(copied(store)).is_finished
    told = "belongs to source 'source' of pipeline 'p' with its checkpoints in"
    with pytest.raises((UsageError, PipelineFailed), match=told):
        run(copied(store, "q"))
    elsewhere = made(store, dir=tmp_path / "elsewhere")
    elsewhere.source(hg.GroupSource("in", GROUP, store=store.root), name="source").sink(hg.Discard())
    with pytest.raises((UsageError, PipelineFailed), match=told):
        run(elsewhere)
    with pytest.raises(UsageError, match=told):
        store.reader_group(GROUP).join("me")
    assert store.delete_reader_group(GROUP)
    assert run(copied(store, "r")).is_finished


def test_a_pipeline_goes_on_when_somebody_deletes_its_group(store: Store) -> None:  # GS5
    is_over = threading.Event()

    def delete() -> None:
        with Store.open(store.root) as other:
            assert other.delete_reader_group(GROUP)
        is_over.set()

    with flowing(store, is_over, most=0) as traffic:
        watching = Watching(4, delete)
        assert run(copied(store), observer=watching).is_finished
    assert per_key(store) == all_rounds(traffic)


def test_sources_of_both_kinds_are_in_one_checkpoint(store: Store) -> None:  # EI32, GS13
    is_over = threading.Event()
    store.create_stream("others", SCHEMA, segments=2, routing_key="key")
    pipeline = made(store, alignment_timeout="50ms")
    by_group = pipeline.source(hg.GroupSource("in", GROUP, store=store.root), name="source")
    by_position = pipeline.source(hg.StreamSource("others", store=store.root), name="others")
    both = by_group.union(by_position).rebalance()
    both.sink(hg.StreamSink("out", store=store.root, routing_key="key"), name="out")
    with store.writer("others") as writer:
        writer.append(pa.RecordBatch.from_pylist(OTHERS, schema=SCHEMA))
    store.seal("others")
    with flowing(store, is_over, most=0) as traffic:
        assert run(pipeline, observer=Watching(6, is_over.set), kill_worker_after_checkpoint=[3]).is_finished
    found = {key: sorted(values) for key, values in per_key(store).items()}
    assert {key: [x for x in values if x >= 0] for key, values in found.items()} == all_rounds(traffic)
    assert sum(x < 0 for values in found.values() for x in values) == 5


def test_what_such_a_source_cannot_do_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="mode='at_most_once'"):
        copied(store, mode="at_most_once").definition()
    with pytest.raises((UsageError, PipelineFailed), match="come forward with checkpoints"):
        run(copied(store, interval=None))


def test_a_source_that_read_by_positions_does_not_go_on_by_a_group(store: Store) -> None:
    store.seal("in")
    pipeline = made(store)
    source = pipeline.source(hg.StreamSource("in", store=store.root), name="source")
    source.sink(hg.StreamSink("out", store=store.root, routing_key="key"), name="out")
    watching = Watching(1)
    assert run(pipeline, observer=watching)
    with pytest.raises((UsageError, PipelineFailed), match="source"):
        run(copied(store))
