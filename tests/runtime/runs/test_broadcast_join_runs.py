"""Joins with a broadcast table in pipelines (docs/spec/broadcast-join.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.conftest import few
from tests.killing import run_killing
from tests.runtime.running import taken

import headgate as hg
from headgate import testing
from headgate.errors import UsageError
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

Row = dict[str, Any]
EVENT = {"id": int, "key": int}
TABLE = {"key": int, "name": str}
EVENTS = [{"id": n, "key": n % 7} for n in range(140)]
ROWS = [{"key": n % 5, "name": f"{n % 5}-{n}"} for n in range(50)]
LAST = {row["key"]: row["name"] for row in ROWS}


def joined(directory: Path, events: list[Any], rows: list[Any], *, options: Any = None, **join: Any) -> hg.Pipeline:
    made: dict[str, Any] = {"parallelism": 2, "restart": hg.FixedDelay(delay="10ms"), **(options or {})}
    made.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    pipeline = hg.Pipeline("p", **made)
    table = pipeline.source(ScriptedSource(rows, schema=TABLE, pause_ms=20), name="rows")
    stream = pipeline.source(ScriptedSource(events, schema=EVENT, pause_ms=20), name="events")
    stream.join(table.broadcast(), on="key", **join).sink(Collect(directory / "out"))
    return pipeline


def check(directory: Path) -> None:
    found = sorted((row["id"], row["name"]) for row in Collect(directory / "out").rows())
    assert found == [(row["id"], LAST[row["key"]]) for row in EVENTS if row["key"] in LAST]


def test_a_lost_worker_changes_nothing_while_records_wait(tmp_path: Path) -> None:
    rows = [ROWS[:20], PAUSE, PAUSE, PAUSE, FailOnce(tmp_path / "failed"), PAUSE, ROWS[20:], PAUSE, EOF]
    events = [EVENTS[:50], PAUSE, EVENTS[50:], EOF]
    run_killing(joined(tmp_path, events, rows, wait=True), 2)
    check(tmp_path)


@pytest.mark.parametrize("timeout", [None, 0])
@pytest.mark.parametrize(("before", "after"), few([(3, 2), (1, 5), (5, 1)], 1))
def test_what_waits_and_the_table_are_restored_at_another_parallelism(
    tmp_path: Path, before: int, after: int, timeout: Any
) -> None:
    checkpointing = hg.Checkpointing(interval=None, dir=tmp_path / "chk", alignment_timeout=timeout)
    options = {"checkpointing": checkpointing, "parallelism": before}
    with testing.running(
        joined(tmp_path, [EVENTS[:50], PAUSE], [ROWS[:20], PAUSE], options=options, wait=True)
    ) as handle:
        taken(handle, lambda: {str(node.node): node.records_in for node in handle.progress.nodes}.get("join", 0) >= 50)
        taken(handle)
    assert not Collect(tmp_path / "out").rows()
    script = [EVENTS[:50], PAUSE, EVENTS[50:], EOF], [ROWS[:20], PAUSE, ROWS[20:], EOF]
    options = {"checkpointing": checkpointing, "parallelism": after}
    testing.run(joined(tmp_path, *script, options=options, wait=True), timeout_s=300)
    check(tmp_path)


def source() -> tuple[hg.Pipeline, hg.Stream, hg.Stream]:
    pipeline = hg.Pipeline("p")
    events = pipeline.source(hg.FromRows([{**row, "ms": row["id"]} for row in EVENTS]), name="events")
    return pipeline, events, pipeline.source(hg.FromRows(ROWS), name="rows")


def test_records_wait_for_a_table_that_ends_and_keep_their_event_time(tmp_path: Path) -> None:
    pipeline, events, rows = source()
    both = events.with_timestamps("ms").join(rows.broadcast(), on="key", how="left", name="with-names")
    both.sink(Collect(tmp_path / "out"))
    testing.run(pipeline, parallelism=2, timeout_s=300)
    found = sorted((row["id"], row["name"]) for row in Collect(tmp_path / "out").rows())
    assert found == [(row["id"], LAST.get(row["key"])) for row in EVENTS]
    assert "<- with-names-table, broadcast" in pipeline.describe()
    both.key_by("key").window(hg.Tumbling("70ms"))


def test_a_table_with_changes_loses_the_rows_that_are_deleted(tmp_path: Path) -> None:
    pipeline, events, rows = source()
    gone = rows.map(
        lambda row: {**row, "op": "delete" if row["name"] == "3-48" else "insert"}, {**TABLE, "op": str}
    ).records_as_changes("key")
    events.join(gone.broadcast(), on="key", how="semi").sink(Collect(tmp_path / "out"))
    testing.run(pipeline, timeout_s=300)
    assert {row["key"] for row in Collect(tmp_path / "out").rows()} == {0, 1, 2, 4}


def test_a_table_that_never_ends_is_seen_as_it_is(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p")
    rate = hg.Generator({"key": hg.Uniform(0, 5)}, rows_per_second=10)
    table = pipeline.source(rate, name="table")
    events = pipeline.source(hg.FromRows(EVENTS), name="events")
    events.join(table.broadcast(), on="key", how="anti")
    with pytest.raises(UsageError, match=r"with wait=True records wait .* but its source 'table' never ends"):
        events.join(table.broadcast(), on="key", wait=True)


def test_what_cannot_be_joined_is_refused() -> None:
    _, events, rows = source()
    changes = rows.map(lambda row: row, {**TABLE, "op": str}).records_as_changes("name")
    for call, problem in (
        (lambda: events.join(rows.broadcast(), on="key", how="right"), "must be one of inner, left, semi, anti"),
        (lambda: events.join(rows.broadcast(), on="key", wait=1), "wait= must be True, False or None, not 1"),
        (lambda: events.broadcast().join(rows.broadcast(), on="key"), "both sides of the join are broadcast"),
        (lambda: events.join(changes.broadcast(), on="key"), "the table has changes of rows by 'name', so join it by"),
        (lambda: changes.join(rows.broadcast(), on="key"), "has changes"),
        (lambda: events.join(rows.broadcast(), on="name"), "the stream has no column 'name'"),
    ):
        with pytest.raises(UsageError, match=problem):
            call()


def test_a_table_joins_records_in_a_loop(tmp_path: Path) -> None:
    pipeline, events, rows = source()

    def body(loop: hg.Stream) -> Any:
        found = loop.join(rows.broadcast(), on="key", name="named")
        again = found.filter(lambda row: row["id"] >= 100)
        return again.select(pl.lit(0).cast(pl.Int64).alias("id"), "key", "ms"), found

    with pytest.raises(UsageError, match="but 'select' is in a loop"):
        events.iterate(lambda loop: (loop, loop.join(loop.select("key").broadcast(), on="key", wait=True)))
    events.iterate(body, name="loop").sink(Collect(tmp_path / "out"))
    testing.run(pipeline, parallelism=2, timeout_s=300)
    ids = [row["id"] for row in EVENTS if row["key"] in LAST]
    again = [0 for one in ids if one >= 100]
    assert sorted(row["id"] for row in Collect(tmp_path / "out").rows()) == sorted(ids + again)
