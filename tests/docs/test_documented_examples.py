"""The examples of the pages: each builds its pipeline or works as printed; that of the README runs on Spark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyiceberg.catalog
import pytest
from pyiceberg.utils.config import Config
from tests.conftest import IS_DEEP
from tests.docs.documentation import PREAMBLE, ROOT, example_with, examples, guide_pages

import headgate as hg
from headgate.api.foreground import RunRequested, loading_only
from headgate.operators.base import LazyRows, OperatorContext, as_batch

pytest_plugins = ["pytester"]

PAGES = ["README.md", *guide_pages()]
OTHERS = (
    *("docs/how-to/through-spark.md", "docs/how-to/kafka.md", "docs/how-to/pravega.md"),
    "docs/how-to/postgresql.md",
)
"""Tested with a session of Spark, and with a server."""
EXAMPLES = [
    (page, number, code)
    for page in PAGES
    for number, code in enumerate(examples(page), 1)
    if "register_streams(spark)" not in code and page not in OTHERS
]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the inputs that the examples read."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "app.log").write_text("ERROR disk full\nINFO started\n")
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "1.jsonl").write_text('{"id": 1, "item": "tea", "at": "2024-01-01T00:00:00"}\n')
    (tmp_path / "new-orders").mkdir()
    (tmp_path / "trips").mkdir()
    (tmp_path / "trips" / "1.csv").write_text("id;note;at;fare\n1;;2024-01-01;2.50\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    catalog = {"TYPE": "sql", "URI": f"sqlite:///{tmp_path}/catalog.db", "WAREHOUSE": f"file://{tmp_path}/warehouse"}
    for name, value in catalog.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PRODUCTION__{name}", value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it looks once in each process
    return tmp_path


@pytest.mark.parametrize(
    ("page", "number", "code"), EXAMPLES, ids=lambda x: x if isinstance(x, str) and "/" in x else ""
)
def test_every_example_builds_its_pipeline(page: str, number: int, code: str, directory: Path) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(PREAMBLE, names)
    try:
        with loading_only():
            exec(compile(code, f"{page} example {number}", "exec", dont_inherit=True), names)
    except RunRequested as requested:  # the example calls run(): its pipeline is complete
        names["p"] = requested.pipeline
    if "hg.Pipeline(" not in code:  # the preamble, and what uses the store alone: it has been run
        return
    pipeline = names["p"]
    assert isinstance(pipeline, hg.Pipeline)
    definition = pipeline.definition()
    assert len(definition.plan.vertices) >= 1


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/how-to/testing.md"])
def test_what_a_newcomer_copies_needs_no_file_that_is_not_there(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for code in examples(page):
        names: dict[str, Any] = {"__name__": "example"}
        exec(PREAMBLE, names)
        try:
            with loading_only():
                exec(compile(code, page, "exec", dont_inherit=True), names)
        except RunRequested as requested:
            names["p"] = requested.pipeline
        assert isinstance(names["p"], hg.Pipeline)


@pytest.mark.long
@pytest.mark.usefixtures("some_interruptions")
def test_the_sink_of_the_guide_passes_the_conformance_kit(directory: Path) -> None:
    code = example_with("class Numbers")
    assert code[code.index("class Numbers") : code.index("\n\n\np = ")].count("\n") <= 40
    names: dict[str, Any] = {"__name__": "example"}
    exec(PREAMBLE, names)
    exec(compile(code, "the sink of the guide", "exec", dont_inherit=True), names)
    kit = names["check_sink"]
    rescales, rows = (((1, 2), (2, 1)), (0, 7)) if IS_DEEP else (((1, 2),), (2,))
    names["check_sink"] = lambda fresh: kit(fresh, rescales=rescales, rows=rows)
    (directory / "targets").mkdir()
    names["test_numbers"](directory / "targets")


@pytest.mark.long
def test_the_source_of_the_guide_passes_the_conformance_kit(directory: Path) -> None:
    code = example_with("class OrdersReader")
    needed, _, _ = code[code.index("class Orders(Source):") :].partition("    def progress(self):  # may be left out")
    assert len([line for line in needed.splitlines() if line.strip()]) <= 30
    names: dict[str, Any] = {"__name__": "example"}
    exec(PREAMBLE, names)
    exec(compile(code, "the source of the guide", "exec", dont_inherit=True), names)
    calls: list[Any] = []
    kit = names["check_source"]
    names["check_source"] = lambda source: calls.append(source) or kit(source)
    names["test_orders"](directory)
    assert len(calls) == 1, "the page calls the kit"


def test_the_test_of_the_guide_passes(directory: Path) -> None:
    code = example_with("def test_totals")
    names: dict[str, Any] = {"__name__": "example"}
    exec(PREAMBLE, names)
    exec(compile(code, "the test of the guide", "exec", dont_inherit=True), names)
    names["test_totals"](directory)


@pytest.mark.run
def test_the_tests_of_the_guide_pass_with_the_fixtures_of_the_package(pytester: pytest.Pytester) -> None:
    code = example_with("def test_totals")
    pytester.makepyfile(f"{PREAMBLE}\n{code}")
    (pytester.path / "orders").mkdir()
    (pytester.path / "orders" / "1.jsonl").write_text('{"item": "tea", "sold": 1}\n')
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", "-q")
    result.assert_outcomes(passed=4)


def test_the_first_page_has_the_lines_that_the_examples_need() -> None:
    assert examples("docs/index.md") == [PREAMBLE]


def test_the_readme_has_one_example_of_about_fifteen_lines() -> None:
    (example,) = examples("README.md")
    assert 10 <= len([line for line in example.splitlines() if line.strip()]) <= 20


@pytest.mark.spark
def test_the_example_of_the_readme_runs_as_it_is(directory: Path) -> None:
    (example,) = examples("README.md")
    program = directory / "quickstart.py"
    program.write_text(example)
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert "is_finished=True, records_in=100000" in run.stdout
    rows = [json.loads(line) for file in (directory / "counts").glob("*.jsonl") for line in file.open()]
    assert len(rows) == 10
    assert {row["sensor"] for row in rows} == {"a", "b"}
    assert sum(row["readings"] for row in rows) == 49_882


def test_the_operator_of_the_contributors_page_works_as_it_is_printed() -> None:
    (block,) = re.findall(
        r"^   ```python\n(.*?)^   ```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {"__name__": "limit_length"}
    exec(compile(textwrap.dedent(block), "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    spec = names["LimitLengthSpec"]("text", 3)
    schema = pa.schema({"text": pa.large_string()})
    assert spec.output_schema(schema, "short") == schema
    with pytest.raises(hg.UsageError, match="short"):
        spec.output_schema(pa.schema({"other": pa.large_string()}), "short")
    out = Kept()
    operator = spec.build()
    operator.open(OperatorContext("p", "short", 0, 1, 128, lambda: 0, origin="split-0"), out)
    operator.process(pa.RecordBatch.from_pylist([{"text": "abc"}, {"text": "abcd"}, {"text": None}], schema=schema))
    assert out.rows == [{"text": "abc"}, {"text": None}]
    (bad,) = out.bad
    assert (bad["node"], bad["problem"], bad["position"]) == ("short", "its text is too long", "split-0")


class Kept:
    """An ``Output`` that keeps records."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.bad: list[dict[str, Any]] = []

    def emit(self, batch: pa.RecordBatch | LazyRows) -> None:
        self.rows += as_batch(batch).to_pylist()

    def emit_to(self, tag: str, batch: pa.RecordBatch) -> None:
        raise AssertionError(f"no output '{tag}' here")

    def emit_watermark(self, watermark_ms: int) -> None:
        raise AssertionError("no event time here")

    def emit_idle(self, is_idle: bool) -> None:
        raise AssertionError("no event time here")

    def divert(self, bad: pa.RecordBatch) -> None:
        self.bad += bad.to_pylist()
