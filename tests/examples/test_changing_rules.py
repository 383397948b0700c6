"""The example of rules that change, in this process: what is passed on exceeds the limit that it names."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed


def test_limits_change_while_readings_flow(
    example: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = example("changing_rules")
    deadline = time.monotonic() + 300
    with testing.running(module.p, parallelism=2, checkpoint_dir=tmp_path / "checkpoints") as handle:
        while not (found := _exceeded()).height or found["limit"].n_unique() < 2:
            assert handle.progress.state is not hg.PipelineState.FAILED
            assert time.monotonic() < deadline, "no two limits were ever exceeded"
            time.sleep(0.02)
        handle.stop()
    found = _exceeded()
    assert (found["value"] > found["limit"]).all()
    assert found["limit"].is_between(30, 50).all()
    assert found.select("sensor", "number").is_unique().all()
    limits = hg.read_state(tmp_path / "checkpoints" / "changing-rules", "check", "limits")
    assert set(limits["map_key"]) <= {"heat", "wind"}


def _exceeded() -> pl.DataFrame:
    try:
        found = read_committed("out/exceeded")
    except FileNotFoundError:
        return pl.DataFrame()
    return found if found.width else pl.DataFrame()
