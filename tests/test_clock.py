"""Intervals go by a clock that only goes forward; the date is read in one place (W18)."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headgate.environment import SYSTEM_CLOCK

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("step_s", [3_600, -3_600])
def test_intervals_do_not_follow_a_date_that_is_set(step_s: int) -> None:
    before_ms = time.monotonic_ns() // 1_000_000
    with pytest.MonkeyPatch.context() as patch:
        looks = itertools.count()
        patch.setattr(time, "time_ns", lambda: (1_700_000_000 + step_s * next(looks)) * 1_000_000_000)
        patch.setattr(time, "time", lambda: 1_700_000_000.0 + step_s * next(looks))
        readings = [SYSTEM_CLOCK.monotonic_ms() for _ in range(20)]
        assert SYSTEM_CLOCK.wall_ms() % 3_600_000 == 1_700_000_000_000 % 3_600_000
    after_ms = time.monotonic_ns() // 1_000_000
    assert before_ms <= readings[0]
    assert readings == sorted(readings)
    assert readings[-1] <= after_ms


def test_the_date_is_milliseconds_since_1970() -> None:
    begun_ms = time.time_ns() // 1_000_000
    assert abs(SYSTEM_CLOCK.wall_ms() - begun_ms) < 600_000


@pytest.mark.parametrize(
    "look", ["import time\ntime.time()", "from time import time_ns", "from datetime import datetime\ndatetime.now()"]
)
@pytest.mark.parametrize(
    "place", ["src/headgate/runtime/worker/worker.py", "scripts/demo/feeder.py", "bench/running.py"]
)
def test_the_linter_lets_nobody_else_read_the_date(look: str, place: str) -> None:
    def refused(name: str) -> bool:
        command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", name, "-"]
        return subprocess.run(command, input=look, cwd=ROOT, capture_output=True, text=True).returncode == 1

    assert refused(place)
    assert not refused("src/headgate/environment.py")
