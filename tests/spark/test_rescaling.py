"""A pipeline on local Spark that runs at one parallelism after another, killed in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import Life, kill
from crash.results import assert_clean, assert_standard

pytestmark = pytest.mark.spark

ROWS = 40_000

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def test_a_pipeline_goes_on_with_more_and_with_fewer_slots(spec: Spec, run: Run, tmp_path: Path) -> None:  # R15
    what = spec("standard", rows=ROWS)
    for parallelism in (2, 1):
        life = run({**what, "parallelism": parallelism})
        life.running(workers=parallelism)
        life.checkpoint()
        life.child.send({"stop": what["name"]})
        assert not life.result()["is_finished"]
    last = run({**what, "parallelism": 2})
    last.note("continues from checkpoint")
    kill(last.running()["workers"]["1"])
    assert last.result()["is_finished"]
    assert_standard(tmp_path, ROWS)
    assert_clean(tmp_path)
