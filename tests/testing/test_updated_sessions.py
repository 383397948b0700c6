"""The results of updated sessions in a chain of operators, from the public API."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.changes_model import applied

import headgate as hg
from headgate import testing
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

SCHEMA = {"user": pa.string(), "ts": pa.timestamp("us")}
START, GAP = datetime(2026, 1, 1), timedelta(seconds=10)
COUNTRIES = {"a": "de", "b": "fr", "c": "de"}


def clicks() -> list[dict[str, Any]]:
    """Clicks at distinct times in no order, so that later ones join sessions."""
    rng = random.Random(7)
    seconds = rng.sample(range(600), 160)
    return [{"user": rng.choice("abc"), "ts": START + timedelta(seconds=second)} for second in seconds]


def sessions_of(rows: list[dict[str, Any]]) -> list[tuple[str, datetime, datetime, int]]:
    found: list[tuple[str, datetime, datetime, int]] = []
    for row in sorted(rows, key=lambda row: (row["user"], row["ts"])):
        user, start, end, n = found[-1] if found else ("", START, START, 0)
        if user == row["user"] and row["ts"] < end:
            found[-1] = (user, start, row["ts"] + GAP, n + 1)
        else:
            found.append((row["user"], row["ts"], row["ts"] + GAP, 1))
    return found


def test_a_chain_over_updated_sessions_has_the_tables_of_all_records(tmp_path: Path) -> None:
    rows = clicks()
    parts = [rows[first : first + 40] for first in range(0, len(rows), 40)]
    script = [parts[0], PAUSE, parts[1], PAUSE, FailOnce(tmp_path / "failed"), parts[2], PAUSE, parts[3], EOF]
    pipeline = hg.Pipeline(
        "p",
        parallelism=2,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
    )
    stream = pipeline.source(ScriptedSource(script, schema=SCHEMA, pause_ms=30)).with_timestamps("ts")
    visits = (
        stream.key_by("user")
        .window(hg.Session("10s"), allowed_lateness="1h", early="20ms", retractions=True)
        .agg(n=pl.len())
    )
    users = pipeline.source(hg.FromRows([{"user": u, "country": c} for u, c in COUNTRIES.items()]), name="users")
    by_country = visits.join(users, on="user", ttl=None).key_by("country")
    by_size = hg.sql("SELECT n, COUNT(*) AS sessions FROM visits GROUP BY n", visits=visits)
    changes, countries, sizes = (Collect(tmp_path / name) for name in ("visits", "countries", "sizes"))
    visits.sink(changes)
    visits.sink(hg.SqlSink(f"sqlite:///{tmp_path / 'db'}", "visits", upsert=("user", "window_start"), create=True))
    by_country.agg(clicks=pl.col("n").sum(), longest=pl.col("n").max()).sink(countries)
    by_size.sink(sizes)
    assert testing.run(pipeline, checkpoint_dir=tmp_path / "checkpoints", timeout_s=240).is_finished

    expected = sessions_of(rows)
    table = applied(changes.rows(), ["user", "window_start"], retractions=True, strict=True)
    assert [(r["user"], r["window_start"], r["window_end"], r["n"]) for r in table] == expected
    with sqlite3.connect(tmp_path / "db") as database:
        stored = database.execute("SELECT user, n FROM visits ORDER BY user, window_start").fetchall()
    assert stored == [(user, n) for user, _, _, n in expected]
    frame = pl.DataFrame(expected, schema=["user", "start", "end", "n"], orient="row").with_columns(
        country=pl.col("user").replace(COUNTRIES)
    )
    of_country = frame.group_by("country").agg(clicks=pl.col("n").sum(), longest=pl.col("n").max()).sort("country")
    assert applied(countries.rows(), ["country"], retractions=False) == of_country.to_dicts()
    of_size = frame.group_by("n").agg(sessions=pl.len()).sort("n")
    assert applied(sizes.rows(), ["n"], retractions=False) == of_size.to_dicts()


def total(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "ts": max(so_far["ts"], row["ts"])}


def busy(key: str, rows: pl.DataFrame) -> dict[str, Any] | None:
    """Only sessions of several clicks have a result."""
    return {"n": rows.height} if rows.height > 1 else None


def seconds_of(key: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Every other click is a result."""
    return rows.sort("ts").select(second=pl.col("ts").dt.second().cast(pl.Int64)).gather_every(2)


def test_functions_of_updated_sessions_have_the_tables_of_all_records(tmp_path: Path) -> None:
    rows = clicks()
    parts = [rows[first : first + 40] for first in range(0, len(rows), 40)]
    script = [parts[0], PAUSE, parts[1], PAUSE, FailOnce(tmp_path / "failed"), parts[2], PAUSE, parts[3], EOF]
    pipeline = hg.Pipeline(
        "p", parallelism=2, restart=hg.FixedDelay(delay="10ms"), checkpointing=hg.Checkpointing(interval="20ms")
    )
    stream = pipeline.source(ScriptedSource(script, schema=SCHEMA, pause_ms=30)).with_timestamps("ts")
    sinks = {}
    for retractions in (False, True):
        updated = stream.key_by("user").window(
            hg.Session("10s"), allowed_lateness="1h", early="20ms", retractions=retractions
        )
        made = {"reduced": updated.reduce(total), "busy": updated.apply(busy, {"n": pa.int64()})}
        if retractions:
            made["seconds"] = updated.apply(seconds_of, {"second": pa.int64()})
            made["counted"] = made["seconds"].key_by("second").agg(n=pl.len())
        for name, results in made.items():
            sinks[name, retractions] = Collect(tmp_path / f"{name}-{retractions}")
            results.sink(sinks[name, retractions])
    assert testing.run(pipeline, checkpoint_dir=tmp_path / "checkpoints", timeout_s=240).is_finished

    expected = sessions_of(rows)
    for retractions in (False, True):
        found = {
            name: applied(
                sinks[name, retractions].rows(),
                ["user", "window_start"],
                retractions=retractions,
                strict=retractions or name == "reduced",
            )
            for name in ("reduced", "busy")
        }
        assert [(r["user"], r["window_start"], r["window_end"], r["ts"]) for r in found["reduced"]] == [
            (user, start, end, end - GAP) for user, start, end, _ in expected
        ]
        assert [(r["user"], r["window_start"], r["n"]) for r in found["busy"]] == [
            (user, start, n) for user, start, _, n in expected if n > 1
        ]
    wanted: list[int] = []
    for user, start, end, _ in expected:
        clicked = sorted(row["ts"] for row in rows if row["user"] == user and start <= row["ts"] < end)
        wanted += [ts.second for ts in clicked[::2]]
    bag: Counter[tuple[Any, ...]] = Counter()
    for row in sinks["seconds", True].rows():
        assert row["op"] in ("insert", "delete")
        bag[row["user"], row["window_start"], row["second"]] += 1 if row["op"] == "insert" else -1
    assert sorted(second for (*_, second), n in bag.items() for _ in range(n)) == sorted(wanted)
    assert applied(sinks["counted", True].rows(), ["second"], retractions=False) == [
        {"second": second, "n": n} for second, n in sorted(Counter(wanted).items())
    ]


def test_several_rows_of_a_session_need_retractions(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", restart=hg.NoRestart())
    clicked = [{"user": "a", "ts": START}]
    stream = pipeline.source(ScriptedSource([clicked, EOF], schema=SCHEMA)).with_timestamps("ts").key_by("user")
    updated = stream.window(hg.Session("10s"), allowed_lateness="1h")
    updated.apply(lambda key, rows: [{"n": 1}, {"n": 2}], {"n": pa.int64()}).sink(Collect(tmp_path / "out"))
    with pytest.raises(hg.PipelineFailed, match=r"returned 2 rows for a window of key 'a'.*retractions=True"):
        testing.run(pipeline, checkpoint_dir=tmp_path / "checkpoints", timeout_s=300)
