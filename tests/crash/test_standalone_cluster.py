"""The same kills on a Spark standalone cluster: Spark itself retries the stage, executors can die (F1, F2, F3)."""

# Rules: F4

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.cluster import Cluster
from crash.pipelines import STOPPED_MS
from crash.processes import Life, kill
from crash.results import assert_clean, assert_standard

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]
Told = Callable[[Life], None]


@pytest.mark.xdist_group("cluster")
def test_workers_executors_and_the_driver_die_on_a_cluster_and_every_record_counts_once(
    cluster: Cluster, spec: Spec, launch: Launch, tmp_path: Path, told: Told
) -> None:
    what = spec("standard", rows=80_000, master=cluster.url, heartbeat_timeout_ms=STOPPED_MS)
    life = launch(what)
    running = life.running()
    assert len(cluster.executors()) == 2
    life.checkpoint(2)

    kill(running["workers"]["0"])
    life.restart()
    running = life.running(after=running["generation"])
    life.checkpoint()

    executors = cluster.executors()
    kill(executors[0].pid)
    life.restart()
    running = life.running(after=running["generation"])
    life.checkpoint()

    os.kill(running["workers"]["1"], signal.SIGSTOP)
    life.restart()
    kill(running["workers"]["1"], signal.SIGCONT)
    running = life.running(after=running["generation"])
    life.checkpoint()

    kill(cluster.executors()[0].pid)  # executor and driver at once
    life.child.kill()
    told(life)
    life.child.assert_gone()
    cluster.assert_idle()

    life = launch(what)
    life.note("continues from checkpoint")
    result = life.result()
    assert result["is_finished"]
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    cluster.assert_idle()
    assert_standard(tmp_path, 80_000)
    assert_clean(tmp_path)
