"""Benchmarks of the stream store: each runs with tiny settings, measures what it says, and knows its targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.coordinator import Run, acknowledgements, definition_of, machine_alone, run
from bench.harness import Options
from bench.peers import measure
from bench.peers.install import environment_python
from tests.bench.test_state_benches import positive, tiny

from bench import (
    store_acknowledgements,
    store_copy,
    store_dataframe,
    store_groups,
    store_history,
    store_kafka,
    store_latency,
    store_rates,
    store_segments,
    store_shared,
    stream_events,
)
from headgate.codec.json_files import decode_log_entry
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.store.store import Store


def test_events_have_100_bytes() -> None:
    batch = stream_events.events(1_000)
    assert batch.schema == stream_events.SCHEMA
    assert sum(len(value) for value in batch.column("payload").to_pylist()) == 1_000 * stream_events.PAYLOAD_BYTES
    assert stream_events.PAYLOAD_BYTES + 8 == stream_events.EVENT_BYTES == 100


def test_rates_are_of_events_that_are_there() -> None:
    positive(store_rates.run(tiny(events=1, turns=1)), "written_per_s", "read_per_s")
    with stream_events.local_store() as store:
        stream_events.write_rate(store, 1)
        assert store.describe(stream_events.STREAM).events_count == stream_events.BATCH_ROWS


@pytest.mark.long
def test_a_copy_has_every_event() -> None:
    positive(store_copy.run(tiny(events=1, turns=1, in_process=2)), "records_per_s", "records_per_cpu_s", "events")


def test_more_segments_are_compared_with_one() -> None:
    result = store_segments.run(tiny(events=1, turns=2))
    positive(result, "written_per_s_1", "written_per_s_100")
    assert "fall" in result.figures


def test_every_append_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_acknowledgements, "WARM_S", 0.0)
    result = store_acknowledgements.run(tiny(seconds=0.1, rate=10_000))
    positive(result, "p50_ms", "p95_ms", "appends")


@pytest.mark.run
def test_events_are_read_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    result = store_latency.run(tiny(seconds=0.2))
    positive(result, "p99_ms", "events")


def test_a_history_is_one_that_the_store_takes(tmp_path: Path) -> None:
    store_history.make_history(tmp_path / "store", 40, 400)
    with Store.open(tmp_path / "store") as store:
        problems = store.fsck(verify_events=False)
        assert {problem.what for problem in problems} == {"is missing"}
        info = store.describe(stream_events.STREAM)
        assert (info.chunks_count, len(info.ends), info.events_count) == (400, 40, 400)
        assert len(store.layout(stream_events.STREAM).present) in (4, 5)
    result = store_history.run(tiny(segments=40, chunks=400, turns=3))
    positive(result, *result.targets)


def test_groups_are_measured_with_open_segments_and_behind_closed_ones() -> None:
    result = store_groups.run(tiny(open=10, closed=40, turns=1))
    positive(result, *result.targets)
    assert len(result.targets) == 2 * len(store_groups.JUDGED)
    assert {"file_open_10_commit_ms", "memory_history_cut_ms"} <= result.figures.keys()


def test_without_a_peer_its_targets_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "KAFKA_ENVIRONMENT", Path("nowhere"))
    assert not environment_python(Path("nowhere")).exists()
    result = store_kafka.run(tiny(events=1, turns=1))
    assert result.verdict("ratio_written") == "skipped"
    positive_figures = {name: value for name, value in result.figures.items() if value > 0}
    assert positive_figures.keys() == {"written_per_s", "read_per_s", "written_1mb_per_s"}


@pytest.mark.spark
@pytest.mark.deep
def test_a_stream_is_read_beside_json_and_parquet() -> None:
    positive(store_dataframe.run(tiny(rows=1_000, turns=1, cores=1)), "against_json", "against_parquet")


def test_every_checkpoint_is_completed_and_its_manifest_is_in_the_log() -> None:
    definition = definition_of(50)
    subtasks = definition.plan.subtasks()
    assert len(subtasks) == 50
    run_ = Run(definition)
    for number in (1, 2, 3, 4):
        run_.checkpoint(CheckpointId(number), acknowledgements(subtasks, CheckpointId(number)))
    storage = run_._storage
    entries = [decode_log_entry(storage.get(path), path) for path in storage.list("coordinator/log")]
    manifests = [entry for entry in entries if isinstance(entry, Manifest)]
    assert [manifest.checkpoint for manifest in manifests] == [3, 4], "the others are not kept any more"
    assert all(len(manifest.entries) == 50 for manifest in manifests)
    assert len(manifests[-1].committables) == 5, "one subtask in ten is a sink"
    machine_alone(subtasks, acknowledgements(subtasks, CheckpointId(9)))


def test_the_largest_number_is_judged() -> None:
    result = run(Options(settings={"subtasks": "20,10", "checkpoints": "1"}))
    assert list(result.targets) == ["cpu_ms_20_subtasks", "growth_per_subtask"]
    assert set(result.figures["by_subtasks"]) == {"10", "20"}
    assert result.figures["cpu_ms_20_subtasks"] > 0


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
