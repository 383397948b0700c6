"""The start that is measured: each step is noted once, and records pass."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow as pa
import pytest
from bench.first_record import MARKS, PROGRAM, STEPS, Noting, _noted, note


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
