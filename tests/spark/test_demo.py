"""``make demo`` itself, on a small log: the first thing a newcomer sees must not break unseen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


def test_the_demo_ends_with_nothing_lost_and_nothing_duplicated(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    lines = (
        f"17/06/09 20:{n // 600:02d}:{n // 10 % 60:02d} {'ERROR' if n % 3 else 'INFO'} executor.Executor: line {n}\n"
        for n in range(6_000)
    )
    log.write_text("".join(lines), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(DEMO), "--logs", str(log)], capture_output=True, text=True, timeout=800, cwd=tmp_path
    )
    said = ran.stdout.strip().splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert said[-1] == "0 lost, 0 duplicated"
    assert sum("in a browser while it runs: http://127.0.0.1:" in line for line in said) == 2, "of each driver"
    assert sum("SIGKILL" in line for line in said) == 2, "a worker and the driver were killed"
