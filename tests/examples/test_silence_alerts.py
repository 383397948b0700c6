"""The silences of ``examples/silence_alerts.py`` are those of its readings, however these arrive."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

import headgate as hg
from headgate.testing import EOF, PAUSE, Collect, ScriptedSource, run

SILENCE = timedelta(seconds=1)
BEGIN = datetime(2026, 1, 1)
MACHINES = 5
SCHEMA = {"machine": int, "ts": datetime}


def readings(seed: int) -> list[dict[str, Any]]:
    """Return readings up to 200 ms out of order, with gaps of up to three times ``SILENCE`` per machine."""
    random, found = Random(seed), []
    for machine in range(MACHINES):
        at = BEGIN
        for _ in range(40):
            at += timedelta(milliseconds=random.choice([random.randint(1, 900), random.randint(800, 3_000)]))
            found.append({"machine": machine, "ts": at})
    return sorted(found, key=lambda row: row["ts"] + timedelta(milliseconds=random.randint(0, 200)))


def silences(rows: list[dict[str, Any]]) -> set[tuple[int, datetime]]:
    """Return machine and last reading of each silence, by plain Python."""
    found = set()
    for machine in range(MACHINES):
        times = sorted(row["ts"] for row in rows if row["machine"] == machine)
        nexts = [*times[1:], datetime.max]
        found |= {(machine, at) for at, later in zip(times, nexts, strict=True) if later - at >= SILENCE}
    return found


@pytest.fixture
def found_by(example: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., list[tuple[int, datetime]]]:
    """Run the example's function on a source; return machine and last reading of each silence."""
    module = example("silence_alerts")
    assert module.SILENCE == SILENCE

    def found_by(source: Any, parallelism: int = 1) -> list[tuple[int, datetime]]:
        p, sink = hg.Pipeline("silence", parallelism=parallelism), Collect(tmp_path / "out")
        stream = p.source(source).with_timestamps("ts", out_of_orderness="200ms")
        stream.key_by("machine").process(module.Silence(), name="silence").sink(sink)
        run(p)
        return [(row["machine"], row["last_reading"].replace(tzinfo=None)) for row in sink.rows()]

    return found_by


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("batch_rows", [1, 7, 1_000])
def test_silences_do_not_depend_on_batches_splits_and_parallelism(
    batch_rows: int, splits: int, parallelism: int, found_by: Callable[..., list[tuple[int, datetime]]]
) -> None:
    rows = readings(batch_rows + splits)
    source = hg.FromRows(rows, splits=splits, batch_rows=batch_rows)
    assert sorted(found_by(source, parallelism)) == sorted(silences(rows))


@pytest.mark.parametrize("step", [1_000, 20])
def test_silences_of_a_backlog_are_those_of_a_live_run(
    step: int, found_by: Callable[..., list[tuple[int, datetime]]]
) -> None:
    rows = readings(1)
    script = [item for at in range(0, len(rows), step) for item in (rows[at : at + step], PAUSE)]
    source = ScriptedSource([*script, EOF], schema=SCHEMA, pause_ms=12)
    assert sorted(found_by(source)) == sorted(silences(rows))


def test_five_readings_an_hour_apart_are_five_silences(found_by: Callable[..., list[tuple[int, datetime]]]) -> None:
    rows = [{"machine": 0, "ts": datetime(2026, 1, 1, hour)} for hour in range(5)]
    assert len(found_by(hg.FromRows(rows))) == 5
