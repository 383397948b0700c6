"""The same processor on the same data gives the same results under Structured Streaming and under Headgate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crash.support.processes import environment, quick_jvm

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800), pytest.mark.early]

PROGRAM = Path(__file__).with_name("side_by_side.py")


def test_a_processor_gives_under_headgate_what_it_gives_under_structured_streaming(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="Spark's own stateful processors need protobuf")
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment({**quick_jvm(), "TZ": "UTC", "XDG_STATE_HOME": str(tmp_path / "state")}),
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-5_000:]
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert told["ddl"] == [True, True, True]
    for name in ("rows", "pandas", "kinds"):
        found = told[name]
        assert len(found["spark"]) > (100 if name != "kinds" else 3)
        assert found["headgate"] == found["spark"], name
