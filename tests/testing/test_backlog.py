"""A chain of pipelines over a backlog: nothing is late, without a guess."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.store.reader import READ_ROWS

SCHEMA = pa.schema([("ts", pa.timestamp("ms")), ("key", pa.int64())])
ROWS, STEP, KEYS, SPAN_MS = 300_000, 10_000, 20, 300_000
"""Each segment is read in several batches."""


@pytest.fixture
def store(tmp_path: Path) -> hg.Store:
    """A stream of three segments with a backlog, in the order of its event times."""
    opened = hg.Store.open(tmp_path / "store")
    opened.create_stream("in", SCHEMA, segments=3, routing_key="key")
    with opened.writer("in") as writer:
        for first in range(0, ROWS, STEP):
            number = np.arange(first, first + STEP)
            times = pa.array((number * SPAN_MS // ROWS).astype("datetime64[ms]"))
            writer.append(pa.RecordBatch.from_arrays([times, pa.array(number % KEYS)], schema=SCHEMA))
    return opened


def pipeline(tmp_path: Path, name: str, parallelism: int = 2) -> hg.Pipeline:
    return hg.Pipeline(name, parallelism=parallelism, checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))


def disorder(tmp_path: Path) -> None:
    """Write the backlog into another stream: all records of one subtask, then all of the other one."""
    made = pipeline(tmp_path, "one")
    rows = made.source(hg.StreamSource("in", tmp_path / "store", follow=False))
    rows.with_timestamps("ts").rebalance().sink(hg.StreamSink("out", tmp_path / "store", "key", segments=3))
    assert testing.run(made).records_out == ROWS


def windows(tmp_path: Path, stream: str, column: str, parallelism: int = 2, **times: Any) -> tuple[hg.RunResult, int]:
    """Count records in windows of two seconds; return the result, and the sum of the counts."""
    made = pipeline(tmp_path, "two", parallelism)
    rows = made.source(hg.StreamSource(stream, tmp_path / "store", follow=False)).with_timestamps(column, **times)
    counts = rows.key_by("key").window(hg.Tumbling("2s")).agg(count=pl.len())
    counts.sink(hg.FileSink(tmp_path / "counts", "parquet"))
    result = testing.run(made)
    return result, int(read_committed(str(tmp_path / "counts"))["count"].sum())


def test_nothing_of_a_backlog_is_late_in_the_second_pipeline(store: hg.Store, tmp_path: Path) -> None:  # S90, S91, S92
    disorder(tmp_path)
    result, counted = windows(tmp_path, "out", "ts")
    assert (result.late_records, counted) == (0, ROWS)


def test_a_guess_never_makes_late_what_the_writers_say_is_to_come(store: hg.Store, tmp_path: Path) -> None:  # W26
    disorder(tmp_path)
    result, counted = windows(tmp_path, "out", "ts", out_of_orderness="1s")
    assert (result.late_records, counted) == (0, ROWS)


def test_a_stream_without_event_time_is_read_with_a_guess_and_late_records_are_loud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = hg.Store.open(tmp_path / "store")
    store.create_stream("out", SCHEMA, segments=1)
    early, later = (pa.array(np.full(n, at, "datetime64[ms]")) for n, at in ((100, 0), (READ_ROWS, 20_000)))
    with store.writer("out") as writer:
        for times in (later, early):
            writer.append(pa.RecordBatch.from_arrays([times, pa.array(np.zeros(len(times), int))], schema=SCHEMA))
    with caplog.at_level(logging.WARNING, "headgate"):
        result, counted = windows(tmp_path, "out", "ts", parallelism=1, out_of_orderness="1s")
    assert (result.late_records, counted) == (100, READ_ROWS)
    assert (
        "pipeline 'two': 'window' dropped 100 late records (lateness: p50 20.0 s, p99 20.0 s, max 20.0 s); "
        "out_of_orderness of with_timestamps, 20.0 s longer, would have kept them all"
    ) in caplog.text


@pytest.mark.parametrize("column", ["window_start", "window_end"])
def test_results_of_windows_are_in_time_for_windows_over_them(
    store: hg.Store, tmp_path: Path, column: str
) -> None:  # S91
    made = pipeline(tmp_path, "one")
    rows = made.source(hg.StreamSource("in", tmp_path / "store", follow=False)).with_timestamps("ts")
    counts = rows.key_by("key").window(hg.Tumbling("10s")).agg(n=pl.len())
    counts.sink(hg.StreamSink("out", tmp_path / "store", "key", segments=3))
    assert testing.run(made).late_records == 0
    result, counted = windows(tmp_path, "out", column)
    assert (result.late_records, counted) == (0, KEYS * SPAN_MS // 10_000)


def test_a_table_without_event_time_hides_none_from_the_next_pipeline(store: hg.Store, tmp_path: Path) -> None:  # S91
    made = pipeline(tmp_path, "one")
    rows = made.source(hg.StreamSource("in", tmp_path / "store", follow=False)).with_timestamps("ts")
    names = made.source(hg.FromRows([{"key": key, "name": f"{key}"} for key in range(KEYS)]), name="names")
    named = rows.rebalance().join(names.broadcast(), on="key", how="left", wait=True)
    named.sink(hg.StreamSink("out", tmp_path / "store", "key", segments=3))
    assert testing.run(made).records_out == ROWS
    result, counted = windows(tmp_path, "out", "ts")
    assert (result.late_records, counted) == (0, ROWS)


@pytest.mark.parametrize("notes", [True, False])
def test_a_writer_that_notes_times_may_append_out_of_order(tmp_path: Path, notes: bool) -> None:  # S93
    store = hg.Store.open(tmp_path / "store")
    store.create_stream("out", SCHEMA, segments=1)
    with store.writer("out") as writer:
        if notes:
            writer.note_time(datetime.fromtimestamp(0, UTC))
        for minute in range(3):
            for second in (40, 0):
                at = np.full(READ_ROWS, (minute * 60 + second) * 1_000, "datetime64[ms]")
                writer.append(
                    pa.RecordBatch.from_arrays([pa.array(at), pa.array(np.arange(len(at)) % KEYS)], schema=SCHEMA)
                )
                writer.flush()
            if notes:
                writer.note_time(datetime.fromtimestamp(60 * (minute + 1), UTC))
    result, counted = windows(tmp_path, "out", "ts", parallelism=1)
    assert (result.late_records == 0) is notes
    assert counted == 6 * READ_ROWS - result.late_records
