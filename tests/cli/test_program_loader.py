from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyspark import cloudpickle

from headgate.cli.program_loader import PROGRAM, load_pipeline
from headgate.errors import UsageError
from headgate.operators.catalog import RowFunctionSpec

BEGINNING = "import headgate as hg\n"
SINK = ".source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\n"


@pytest.fixture(autouse=True)
def _restore_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(BEGINNING + text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "pipeline = hg.Pipeline('found')\n",
        "p = hg.Pipeline('found')\nother = hg.Pipeline('other')\n",
        "mine = hg.Pipeline('found')\n",
        "def pipeline():\n    return hg.Pipeline('found')\n",
        "mine = hg.Pipeline('found')\nmine.run()\nraise RuntimeError('never reached')\n",
        "mine = hg.Pipeline('found')\nif __name__ == '__main__':\n    raise RuntimeError('never reached')\n",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\np = hg.Pipeline('found')\n",
    ],
)
def test_the_pipeline_of_a_file_is_found(tmp_path: Path, text: str) -> None:
    assert load_pipeline(program(tmp_path, text)).name == "found"


def test_the_pipeline_of_a_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text(BEGINNING + "p = hg.Pipeline('found')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_pipeline("some_module").name == "found"


def test_the_program_sees_its_own_arguments(tmp_path: Path) -> None:
    text = "import sys\np = hg.Pipeline(sys.argv[1])\n"
    assert load_pipeline(program(tmp_path, text), ["from-arguments"]).name == "from-arguments"


def test_functions_of_the_program_travel_by_value(tmp_path: Path) -> None:
    text = "def double(row):\n    return {'n': helper(row['n'])}\ndef helper(n):\n    return n * 2\n"
    text += "p = hg.Pipeline('p')\np.source(hg.FromRows([{'n': 1}])).map(double).sink(hg.Discard())\n"
    pipeline = load_pipeline(program(tmp_path, text))
    assert PROGRAM not in sys.modules
    spec = pipeline.definition().graph.nodes[1].spec
    assert isinstance(spec, RowFunctionSpec)
    arrived = cloudpickle.loads(cloudpickle.dumps(spec.function))
    assert arrived({"n": 4}) == {"n": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no pipeline"),
        ("a = hg.Pipeline('a')\nb = hg.Pipeline('b')\n", "has several pipelines"),
        ("def pipeline():\n    return 5\n", r"must return a headgate.Pipeline, not 5|has no pipeline"),
        ("import sys\nsys.exit(3)\n", "ended itself while it was loaded"),
        ("1 / 0\n", "cannot be loaded"),
        ("def broken(:\n", "cannot be loaded"),
    ],
)
def test_a_program_without_a_pipeline_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_pipeline(program(tmp_path, text))


def test_a_program_that_fails_shows_its_own_frames_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_pipeline(program(tmp_path, "def f():\n    return 1 / 0\nf()\n"))
    assert "ZeroDivisionError" in str(caught.value)
    assert "load.py" not in str(caught.value)


def test_missing_programs_are_named() -> None:
    with pytest.raises(UsageError, match=r"there is no file nowhere.py"):
        load_pipeline("nowhere.py")
    with pytest.raises(UsageError, match=r"neither a file nor a module nowhere.at_all"):
        load_pipeline("nowhere.at_all")


def test_an_error_of_headgate_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^parallelism must be"):
        load_pipeline(program(tmp_path, "p = hg.Pipeline('p', parallelism=0)\n"))
