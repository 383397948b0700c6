"""Benchmarks of state: each runs with tiny settings, measures what it says, and knows its targets."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from bench.expressions import SIZES, batch_of, operator_for, query_for
from bench.harness import Options, Result
from bench.peers import keyed_update as peer
from bench.row_functions import VERBS, added, doubled, pipeline
from bench.stateful import DRAWS, SCATTER, SCHEMA, ByBatch, ByRow, Nowhere, batches_of, drawn, every_key, opened

from bench import increments, keyed_update, state_access, state_reading, state_restore, state_timers
from headgate.codec.snapshot import decode_sections
from headgate.model.config import MemoryState, RocksState


def tiny(**settings: float) -> Options:
    return Options(quick=True, settings={name: str(value) for name, value in settings.items()})


def positive(result: Result, *names: str) -> None:
    for name in names:
        assert math.isfinite(result.figures[name])
        assert result.figures[name] > 0
    assert result.targets.keys() <= result.figures.keys()


def totals_of(operator: object) -> dict[int, int]:
    payload = b"".join(bytes(memoryview(part)) for part in operator.freeze().encode())  # type: ignore[attr-defined]
    table = pa.ipc.open_stream(pa.py_buffer(decode_sections(payload, "state")["total"])).read_all()
    return dict(zip(table["key0"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_both_functions_add_up_what_every_key_got() -> None:
    batches = [*every_key(100, 64), *batches_of("uniform", 1_000, 1, 5)]
    wanted: Counter[int] = Counter()
    for batch in batches:
        for row in batch.to_pylist():
            wanted[row["key"]] += row["value"]
    for function in (ByRow(), ByBatch()):
        with opened(function, MemoryState()) as operator:
            for batch in batches:
                operator.process(batch)
            assert totals_of(operator) == wanted


@pytest.mark.parametrize("keys", [1_000, 50_000_000])
def test_keys_are_drawn_from_all_of_them_and_hot_ones_are_hot(keys: int) -> None:
    random = np.random.default_rng(1)
    for draw in DRAWS:
        found = drawn(draw, keys, 100_000, random)
        assert found.min() >= 0
        assert found.max() < keys
    hot = Counter(drawn("zipf", keys, 100_000, random).tolist())
    first, second = (hot[SCATTER * rank % keys] for rank in (1, 2))
    assert 1.4 < first / second < 2.1, "the number of records falls with the rank"
    assert max(Counter(drawn("uniform", keys, 100_000, random).tolist()).values()) < first / 10


def test_gets_and_puts_are_measured_on_either_backend() -> None:
    result = state_access.run(tiny(seconds=0.01, keys=500, rocksdb_keys=500, memory_mb=32, batch_rows=500))
    positive(result, *state_access.TARGETS)


def test_timers_are_registered_and_fire_once() -> None:
    result = state_timers.run(tiny(timers=3_000, row_timers=500, rocksdb_timers=500, memory_mb=32, batch_rows=1_000))
    positive(result, "memory_batches_per_s", "memory_rows_per_s", "rocksdb_batches_per_s")


def test_timers_that_do_not_fire_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_timers, "SPAN_MS", 0)
    monkeypatch.setattr(state_timers, "batches_of", lambda timers, rows: batches_of("uniform", 10, 5, 1))
    with pytest.raises(RuntimeError, match="of 5 timers fired"):
        state_timers.measure(state_timers.TimersByBatch(), MemoryState(), 5, 5, 2)


def test_checkpoints_of_changes_are_measured_on_either_backend() -> None:
    result = increments.run(
        tiny(keys=3_000, checkpoints=2, memory_mb=32, value_bytes=600, large_keys=3_000, large_bytes=600)
    )
    positive(result, "memory_bytes_share", "rocksdb_bytes_share", "memory_time_share", "rocksdb_time_share")
    assert result.figures["rocksdb_bytes_share"] < 0.2
    assert result.figures["memory_full_mb"] == pytest.approx(1.8, rel=0.1)


def test_restores_are_measured_on_either_backend_and_from_the_local_disk() -> None:
    result = state_restore.run(tiny(size_mb=2, times=1, memory_mb=32))
    positive(result, "memory_restore_s", "rocksdb_restore_s", "rocksdb_local_s")
    assert result.figures["rocksdb_mb"] == pytest.approx(2, rel=0.2)


def test_local_recovery_reads_files_from_the_local_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = state_restore.read_part
    monkeypatch.setattr(state_restore, "read_part", lambda *given: read.append(given[2].size_bytes) or original(*given))
    values = increments.Values(1_000)
    state_restore.measure(RocksState(32 << 20, None), values, 2, 1)
    assert len([size for size in read if size > 1_000_000]) == 1, "only the restore from the storage reads the files"


@pytest.mark.parametrize("draw", DRAWS)
def test_every_key_comes_once_before_keys_are_drawn(draw: keyed_update.Draw) -> None:
    keys, rows = 1_000, 50_000
    numbers = pl.DataFrame({"n": np.arange(keys + rows)})
    found = numbers.select(keyed_update.key_of(draw, keys))["key"]
    assert sorted(found[:keys]) == list(range(keys))
    assert found.dtype == pl.Int64
    counts = found[keys:].value_counts(sort=True)["count"]
    assert (counts[0] > 10 * counts[50]) == (draw == "zipf")


def test_the_function_counts_and_says_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[pa.RecordBatch] = []
    monkeypatch.setattr(Nowhere, "emit", lambda self, batch: emitted.append(batch))
    with opened(keyed_update.CountAndLast(), MemoryState()) as operator:
        for keys, values in (([1, 2, 1], [5, 6, 7]), ([2, 3], [8, 9])):
            operator.process(pa.record_batch([keys, values], schema=SCHEMA))
    rows = [sorted((row["key"], row["count"], row["last"]) for row in batch.to_pylist()) for batch in emitted]
    assert rows == [[(1, 2, 7), (2, 1, 6)], [(2, 2, 8), (3, 1, 9)]]


def test_the_pipeline_has_the_function_and_its_budget(tmp_path: Path) -> None:
    definition = keyed_update.pipeline("zipf", 100, str(tmp_path), tiny(memory_mb=64)).definition()
    assert "counted" in [str(node.name) for node in definition.graph.nodes]
    assert definition.config.state == RocksState(32_000_000, str(tmp_path / "local"))


def test_steadiness_is_the_last_third_against_the_first() -> None:
    assert keyed_update.steadiness([100, 100, 100, 90, 90, 90, 50, 50, 50]) == 0.5
    assert keyed_update.steadiness([100]) == 1


def test_ratios_are_to_the_peers_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_update, "measure_headgate", lambda *given: {"per_s": 900.0, "steady": 1.0})
    best = {"events_per_s_best": 300.0}
    monkeypatch.setattr(keyed_update, "peer_rates", lambda *given: {"zipf": best, "uniform": best})
    result = keyed_update.run(tiny())
    assert result.figures["ratio_zipf"] == 3
    assert result.met
    one = keyed_update.run(Options(settings={"draw": "uniform"}))
    assert "ratio_zipf" not in one.figures
    assert one.met
    alone = keyed_update.run(tiny(peer=0))
    assert alone.verdict("ratio_zipf") == "skipped"


@pytest.mark.spark
@pytest.mark.deep
def test_the_peer_updates_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    peer.main(["--keys", "1000", "--seconds", "0.1", "--memory-mb", "64", "--batch-rows", "500"])
    assert '"events_per_s_best"' in capsys.readouterr().out


@pytest.mark.spark
@pytest.mark.deep
def test_state_and_parquet_are_read_in_turns() -> None:
    positive(state_reading.run(tiny(keys=1_000, turns=1, cores=1)), "ratio", "state_s", "parquet_s")


@pytest.mark.spark
def test_headgate_is_filled_and_measured() -> None:
    found = keyed_update.measure_headgate("zipf", 1_000, tiny(minutes=0.01, slice_s=1, memory_mb=64))
    assert found["per_s"] > 0
    assert len(found["slices"]) == keyed_update.SLICES_MIN


@pytest.mark.parametrize("rows", SIZES)
def test_operator_and_query_give_the_same_rows(rows: int) -> None:
    batch = batch_of(rows)
    ours, theirs = operator_for()(batch), query_for()(batch)
    assert ours is not None
    assert theirs is not None
    assert ours.to_pylist() == theirs.to_pylist()
    assert 0 < ours.num_rows < rows


def test_the_functions_compute_and_leave_their_arguments_alone() -> None:
    row, accumulator = {"key": 1, "value": 3}, {"key": 1, "value": 4}
    assert doubled(row) == {"key": 1, "value": 6}
    assert added(accumulator, row) == {"key": 1, "value": 7}
    assert (row, accumulator) == ({"key": 1, "value": 3}, {"key": 1, "value": 4})


@pytest.mark.parametrize("verb", VERBS)
def test_the_measured_node_is_in_the_pipeline(verb: str, tmp_path: Path) -> None:
    definition = pipeline(verb, 2, 10, str(tmp_path)).definition()
    assert verb in [str(node.name) for node in definition.graph.nodes]
    assert definition.config.parallelism == 2
