"""Measuring: CPU seconds of process trees, percentiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench.machine import CpuMeter, machine, percentile, spread

TICKS_S = 0.05
"""The kernel counts user and system time, of parent and child, in ticks of 10 ms each."""
BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\n"


def test_cpu_seconds_include_children_that_are_alive() -> None:
    meter = CpuMeter()
    with subprocess.Popen(
        [sys.executable, "-c", BURN + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"burnt\n"
        assert 0.3 - TICKS_S <= meter.cpu_seconds() < 5
        assert child.stdin is not None
        child.stdin.write(b"\n")


def test_cpu_seconds_include_children_that_ended() -> None:
    meter = CpuMeter()
    subprocess.run([sys.executable, "-c", BURN], check=True, capture_output=True)
    assert 0.3 - TICKS_S <= meter.cpu_seconds() < 5
    assert meter.seconds() > 0


@pytest.mark.parametrize(
    ("share", "expected"), [(0, 1), (0.01, 1), (0.07, 7), (0.5, 50), (0.99, 99), (0.991, 100), (1, 100)]
)
def test_percentile_is_the_smallest_value_not_exceeded_by_that_share(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


def test_percentiles_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match=r"between 0 and 1, found 99"):
        percentile([1.0], 99)


def test_spread_is_relative_to_the_middle() -> None:
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([0.0, 0.0]) == 0.0


def test_machine_names_what_a_reader_needs_to_compare() -> None:
    here = machine()
    assert {"cores", "cpu", "memory_gib", "python", "packages", "load_1min"} <= here.keys()
    assert here["cpu"]
