"""The results of updated sessions in a chain of operators, from the public API."""

from __future__ import annotations

import random
import sqlite3
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
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
