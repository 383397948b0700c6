"""Commit latency: what counts as keeping up, which interval is the shortest, and what the reader sees."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bench.commit_latency import STREAM, CommittedReader, Seen, judged, latencies_ms, pipeline, shortest
from bench.first_record import MARKS, PROGRAM, STEPS, Noting, _noted, note
from bench.on_demand import Window

from bench import commit_latency
from headgate.store.store import Store

GOOD = Seen(Window(1_000.0, 500.0, 40, 39, 12.0), np.linspace(1.0, 300.0, 1_000))
RATE = 1_000.0
WAIT_S = 60.0


def test_keeping_up_is_checkpoints_rate_and_latency() -> None:
    assert GOOD.keeps_up(RATE)
    assert not replace(GOOD, window=replace(GOOD.window, completed=37)).keeps_up(RATE)
    assert not replace(GOOD, window=replace(GOOD.window, events_per_s=970.0)).keeps_up(RATE)
    assert not replace(GOOD, latencies_ms=GOOD.latencies_ms * 3).keeps_up(RATE)
    assert not replace(GOOD, latencies_ms=np.zeros(0)).keeps_up(RATE), "nothing became visible"


def test_the_shortest_interval_has_no_longer_one_that_fails() -> None:
    bad = replace(GOOD, window=replace(GOOD.window, completed=0))
    assert shortest({250: GOOD, 100: GOOD, 50: bad, 20: GOOD}, RATE) == 100
    assert shortest({250: GOOD, 20: GOOD}, RATE) == 20
    assert shortest({250: bad, 20: GOOD}, RATE) is None


def test_the_longest_interval_is_judged() -> None:
    result = judged({250: GOOD, 20: replace(GOOD, latencies_ms=GOOD.latencies_ms * 10)}, RATE)
    assert list(result.targets) == ["visible_ms_p99_250ms"]
    assert result.met
    assert result.figures["visible_ms_p99_250ms"] == pytest.approx(297.0, abs=0.1)
    assert result.figures["shortest_interval_ms"] == 250
    assert not judged({250: replace(GOOD, latencies_ms=GOOD.latencies_ms * 3)}, RATE).met


def test_latency_is_counted_from_the_records_own_time() -> None:
    times = pa.array([1_000_000, 1_500_000], pa.timestamp("us"))
    batch = pa.RecordBatch.from_arrays([times], names=["ts"])
    assert list(latencies_ms(batch, 1_600_000)) == [600.0, 100.0]


def test_the_reader_sees_what_is_committed_and_only_that(tmp_path: Path) -> None:
    schema = pa.schema([("ts", pa.timestamp("us"))])
    rows = pa.RecordBatch.from_pydict({"ts": [0, 0, 0]}, schema=schema)
    root = str(tmp_path / "store")
    with Store.open(root) as store:
        store.create_stream(STREAM, schema, segments=2)
        transaction = store.transactions.begin(STREAM, owner="o", epoch=1)
        transaction.write(rows)
        transaction.seal("t")
        transaction.prepare()
        with CommittedReader(Path(root)) as reader, store.writer(STREAM) as writer:
            writer.append(rows.slice(0, 1))
            writer.flush()
            assert len(_taken(reader, 1)) == 1, "what is prepared is not visible"
            store.commit_transactions([(STREAM, "t")], owner="o", epoch=1)
            assert len(_taken(reader, 3)) == 3


def test_what_is_taken_while_the_reader_reads_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, batches = CommittedReader(tmp_path), [None, object()]

    def in_between(batch: Any, now_us: int) -> Any:
        assert len(reader.take()) == 0  # the other thread takes before this one adds
        return np.ones(1)

    monkeypatch.setattr(commit_latency, "latencies_ms", in_between)
    reader._read(SimpleNamespace(read=batches.pop))  # type: ignore[arg-type]
    assert len(reader.take()) == 1


def _taken(reader: CommittedReader, count: int) -> list[float]:
    found: list[float] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records became visible"
        found += list(reader.take())
        time.sleep(0.001)
    return found


def test_the_pipeline_writes_to_the_store_and_takes_no_checkpoint_by_itself(tmp_path: Path) -> None:
    definition = pipeline(tmp_path, RATE).definition()
    assert definition.config.checkpoints.interval_ms == 0
    assert len(definition.plan.edges) == 1, "a shuffle"


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    return tmp_path / "marks"


def test_each_step_is_noted_when_it_is_reached_first(marks: Path) -> None:
    assert _noted(marks) == {}
    for step in (*STEPS, *STEPS):
        note(step)
    times = _noted(marks)
    assert list(times) == list(STEPS)
    assert list(times.values()) == sorted(times.values())


def test_records_pass_and_the_first_of_them_are_noted(marks: Path) -> None:
    arrived = copy.copy(Noting())
    assert list(_noted(marks)) == ["worker"]
    batch = pa.RecordBatch.from_pydict({"n": [1]})
    assert arrived(batch) is batch
    first = _noted(marks)
    assert arrived(batch) is batch
    assert _noted(marks) == first
    assert list(first) == ["worker", "first_record"]
    assert "pyspark" not in PROGRAM, "such a program is taken to make its own session"
