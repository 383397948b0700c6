"""The wheel and the sdist are built, installed into environments that have nothing else, and run the quickstart there.

Needs the package registry, as any installation does, and Java.
"""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.packaging.conftest import ROOT, Installed, ran

import headgate

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800), pytest.mark.xdist_group("packaging")]


def quickstart() -> str:
    """Return the first pipeline of the README, with less to do."""
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(
        r"```python\n(import polars as pl\n\nimport headgate as hg\n\np = .*?)```", text, re.DOTALL
    )[:1]
    assert "rows=100_000" in program
    return str(program).replace("rows=100_000", "rows=1_000")


def test_a_wheel_runs_the_quickstart_where_nothing_else_is_installed(
    built: tuple[Path, Path], installed: Installed, tmp_path: Path
) -> None:
    wheel, _ = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {"headgate/py.typed", "headgate/spark/log4j2-quiet.properties"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"headgate", "headgate_streams"}  # no tests
    assert installed.packages.isdisjoint({"rocksdict", "obstore", "pytest", "mypy"})
    command = installed.python.with_name("headgate")
    assert ran([command, "--version"], tmp_path) == f"headgate {headgate.__version__}\n"
    (tmp_path / "quickstart.py").write_text(quickstart())
    ran([command, "run", "quickstart.py"], tmp_path)
    rows = [
        json.loads(line) for file in (tmp_path / "counts").glob("*.json*") for line in file.read_text().splitlines()
    ]
    assert 0 < sum(row["readings"] for row in rows) < 1_000


def test_the_sdist_has_what_the_wheel_is_made_from_and_no_tests(built: tuple[Path, Path]) -> None:
    """``build`` has made the wheel from it."""
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any("/tests/" in name for name in names)
    for file in (wheel, sdist):
        assert f"-{headgate.__version__}" in file.name
