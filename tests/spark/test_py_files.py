"""What of a program goes to the executors: its own modules, and what its user names."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from headgate.errors import UsageError
from headgate.spark.py_files import Submission, local_modules, read_py_files, read_settings, send_modules, write_zip


def test_modules_right_beside_the_program_are_found_and_nothing_that_is_installed() -> None:
    loaded = {
        "prices": "/app/prices.py",
        "shop": "/app/shop/__init__.py",
        "shop.deep.taxes": "/app/shop/deep/taxes.py",
        "spaced.one": "/app/spaced/one.py",  # of a package without __init__
        "polars": "/app/.venv/lib/python3.11/site-packages/polars/__init__.py",
        "headgate": "/app/headgate/__init__.py",
        "library": "/app/src/library/__init__.py",  # on the path by another way: it is installed
        "__main__": "/app/main.py",
        "sys": None,
    }
    assert local_modules("/app", loaded) == [Path("/app/prices.py"), Path("/app/shop"), Path("/app/spaced")]
    assert local_modules("/elsewhere", loaded) == []


def test_python_imports_from_what_is_packed(tmp_path: Path) -> None:
    package = tmp_path / "app" / "shop"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__pycache__" / "old.pyc").touch()
    (package / "__init__.py").write_text("from shop.taxes import RATE\n")
    (package / "taxes.py").write_text("RATE = 7\n")
    (tmp_path / "app" / "prices.py").write_text("import shop\nprint(shop.RATE)\n")
    write_zip([tmp_path / "app" / "prices.py", package], tmp_path / "all.zip")
    assert sorted(zipfile.ZipFile(tmp_path / "all.zip").namelist()) == [
        "prices.py",
        "shop/__init__.py",
        "shop/taxes.py",
    ]
    command = [sys.executable, "-c", "import prices"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "all.zip")}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "7\n"


class Context:
    """A SparkContext that is told of files."""

    def __init__(self, master: str, directory: Path) -> None:
        self.master = master
        self._temp_dir = str(directory)
        self.added: list[str] = []

    def addPyFile(self, file: str) -> None:  # noqa: N802 - Spark's name
        self.added.append(file)


@pytest.mark.parametrize(("master", "goes"), [("spark://a:1", True), ("yarn", True), ("local[2]", False)])
def test_modules_go_to_a_cluster_and_named_files_go_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, master: str, goes: bool
) -> None:
    (tmp_path / "prices_of_a_test.py").touch()
    module = ModuleType("prices_of_a_test")
    module.__file__ = str(tmp_path / "prices_of_a_test.py")
    monkeypatch.setitem(sys.modules, "prices_of_a_test", module)
    context = Context(master, tmp_path)
    send_modules(context, Submission(py_files=("/x/more.py",), directory=str(tmp_path)))
    assert context.added[0] == "/x/more.py"
    assert [zipfile.ZipFile(file).namelist() for file in context.added[1:]] == [["prices_of_a_test.py"]] * goes


def test_a_program_without_modules_of_its_own_sends_nothing(tmp_path: Path) -> None:
    context = Context("yarn", tmp_path)
    send_modules(context, Submission(directory=str(tmp_path)))
    assert context.added == []


def test_files_are_named_as_for_spark_submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.zip", "c.egg", "d.whl"):
        (tmp_path / name).touch()
    found = read_py_files(["a.py,b.zip", "c.egg"])
    assert found == tuple(str(tmp_path / name) for name in ("a.py", "b.zip", "c.egg"))
    with pytest.raises(UsageError, match=r"d\.whl, but takes \.py, \.zip and \.egg"):
        read_py_files(["d.whl"])
    with pytest.raises(UsageError, match=r"e\.py, but there is no such file"):
        read_py_files(["e.py"])


def test_settings_are_pairs() -> None:
    assert read_settings(["spark.a=b=c", "spark.d="]) == (("spark.a", "b=c"), ("spark.d", ""))
    for wrong in ("spark.a", "a=b", "spark.master=yarn", "spark.python.daemon.module=x"):
        with pytest.raises(UsageError, match="--conf"):
            read_settings([wrong])


JOB = """
import headgate as hg

class Twice(hg.ProcessFunction):
    schema = {"n": int}

    def process(self, row, context):
        return [{"n": 2 * row["n"]}]

def plus_one(row):
    return {"n": row["n"] + 1}

p = hg.Pipeline("job", parallelism=1, checkpointing=hg.Checkpointing(dir="checkpoints"))
p.source(hg.FromRows([{"n": 1}, {"n": 2}])).map(plus_one).key_by("n").process(Twice()).sink(hg.FileSink("out"))
p.run()
"""


@pytest.mark.spark
def test_a_module_runs_its_pipeline_on_spark_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    command = [sys.executable, "-c", "import job"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = [line for file in (tmp_path / "out").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert sorted(found) == ['{"n":4}', '{"n":6}']
