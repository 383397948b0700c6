"""``headgate run`` on a cluster: a program's own modules go along, and executors that lack something say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from crash.cluster import Cluster
from crash.processes import environment
from headgate.model.failure import ExitCode

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800), pytest.mark.xdist_group("cluster")]

PROGRAM = """
import headgate as hg
import prices_beside
from shop_beside.taxes import taxed

p = hg.Pipeline("shop", parallelism=1, restart=hg.NoRestart())
rows = p.source(hg.FromRows([{"price": 1}, {"price": 2}]))
rows.map(prices_beside.doubled).map(taxed).sink(hg.FileSink("taxed"))
"""


def headgate(directory: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate.cli.app", *arguments]
    around = environment({"PYSPARK_PYTHON": python, "SPARK_LOCAL_HOSTNAME": "127.0.0.1"})
    return subprocess.run(command, cwd=directory, env=around, capture_output=True, text=True)


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
