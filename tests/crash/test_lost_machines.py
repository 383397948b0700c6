"""Nothing is lost with a machine that is cut off, its disk deleted, while a pipeline runs on it (F7)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.support.networks import run_in_a_network_of_its_own

pytestmark = [pytest.mark.crash, pytest.mark.deep, pytest.mark.timeout(1_800)]  # make lost-machines

PROGRAM = Path(__file__).parent / "support" / "lost_machines.py"
ALL_S = 1_200.0
ON_A_CLUSTER = [
    pytest.mark.spark,
    pytest.mark.skipif(
        "HEADGATE_TEST_CLUSTERS" not in os.environ, reason="starts six JVMs or more: make lost-machines"
    ),
]
on_both = pytest.mark.parametrize("how", ["processes", pytest.param("cluster", marks=ON_A_CLUSTER)])


@on_both
def test_nothing_is_lost_with_the_machine_of_a_worker(how: str, tmp_path: Path) -> None:
    run_in_a_network_of_its_own(PROGRAM, "worker", how, str(tmp_path), log=tmp_path / "log", timeout_s=ALL_S)


@on_both
def test_nothing_is_lost_with_the_machine_of_the_driver(how: str, tmp_path: Path) -> None:
    run_in_a_network_of_its_own(PROGRAM, "driver", how, str(tmp_path), log=tmp_path / "log", timeout_s=ALL_S)
