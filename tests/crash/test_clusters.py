"""Kills on a Spark standalone cluster, where Spark itself retries the stage, and streams that are scaled meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key

from crash.support.cluster import Cluster
from crash.support.pipelines import STOPPED_MS
from crash.support.processes import Life, environment, kill, until
from crash.support.results import assert_clean, assert_standard
from headgate.model.failure import ExitCode
from headgate.store.store import Store

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1800)]


# Rules: F4


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


PROGRAM = """
import headgate as hg
import prices_beside
from shop_beside.taxes import taxed

p = hg.Pipeline("shop", parallelism=1, restart=hg.NoRestart())
rows = p.source(hg.FromRows([{"price": 1}, {"price": 2}]))
rows.map(prices_beside.doubled).map(taxed).sink(hg.FileSink("taxed"))
"""


def headgate(directory: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate.cli", *arguments]
    around = environment({"PYSPARK_PYTHON": python, "SPARK_LOCAL_HOSTNAME": "127.0.0.1"})
    return subprocess.run(command, cwd=directory, env=around, capture_output=True, text=True)


@pytest.mark.xdist_group("cluster")
def test_modules_beside_a_program_are_found_by_executors(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "prices_beside.py").write_text("def doubled(row):\n    return {'price': 2 * row['price']}\n")
    (tmp_path / "shop_beside").mkdir()
    (tmp_path / "shop_beside" / "__init__.py").touch()
    (tmp_path / "shop_beside" / "taxes.py").write_text("def taxed(row):\n    return {'price': row['price'] + 1}\n")
    ended = headgate(tmp_path, "run", "program.py", "--master", cluster.url)
    assert ended.returncode == ExitCode.DONE, ended.stderr
    rows = [line for file in sorted((tmp_path / "taxed").glob("*.json*")) for line in file.read_text().splitlines()]
    assert sorted(rows) == ['{"price":3}', '{"price":5}']


@pytest.mark.xdist_group("cluster")
@pytest.mark.deep
def test_executors_without_headgate_say_so_in_a_sentence(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import headgate as hg\n"
        "p = hg.Pipeline('shop', parallelism=1)\n"
        "p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\n"
    )
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    ended = headgate(tmp_path, "run", "program.py", "--master", cluster.url, python=str(bare / "bin" / "python"))
    assert ended.returncode != ExitCode.DONE
    (sentence,) = (line for line in ended.stderr.splitlines() if line.startswith("Error: "))
    assert "the executors' Python has no '" in sentence
    assert "Traceback" not in ended.stderr
    assert headgate(tmp_path, "doctor", "--master", cluster.url).returncode == ExitCode.DONE


MINUTES = float(os.environ.get("HEADGATE_TEST_MINUTES", "0"))
KILLS = 3
"""At least so many, and more as long as ``MINUTES`` are not over."""


@pytest.mark.xdist_group("wide")
def test_a_chain_of_pipelines_keeps_each_event_and_its_order_while_its_streams_are_scaled(
    spec: Callable[..., dict[str, Any]], run_wide: Callable[[dict[str, Any]], Life], tmp_path: Path
) -> None:
    is_over, dice = threading.Event(), random.Random(11)
    with Store.open(tmp_path / "store") as store:
        for name in ("in", "middle"):
            store.create_stream(name, SCHEMA, segments=2, routing_key="key")
        with flowing(store, is_over, "in", "middle", "out", rounds=40) as traffic:
            lives = [run_wide(spec("hop", **{"from": a, "to": b})) for a, b in (("in", "middle"), ("middle", "out"))]
            generations = [0, 0]
            deadline, kills_count = time.monotonic() + 60 * MINUTES, 0
            while kills_count < KILLS or time.monotonic() < deadline:
                which = dice.randrange(2)
                running = lives[which].running(after=generations[which])
                generations[which] = running["generation"]
                before = traffic.scaled_count
                lives[which].checkpoint()
                until(lambda: traffic.scaled_count > before, "a stream to be scaled")  # noqa: B023
                kill(dice.choice(list(running["workers"].values())))
                lives[which].restart()
                kills_count += 1
            is_over.set()
            lives[0].result()
            store.seal("middle")
            lives[1].result()
        assert per_key(store, "middle") == all_rounds(traffic)
        assert per_key(store, "out") == all_rounds(traffic)
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
