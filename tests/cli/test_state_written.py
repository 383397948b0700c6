"""``headgate state write`` and ``drop``: savepoints that are others with something changed, from the command line."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from tests.runtime.written_state.test_written_state import ROWS, full, same
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import app as cli
from headgate.errors import UsageError

FEW = pl.DataFrame({"key": [1, 2], "value": [10, 20]})
PROGRAM = """
import headgate as hg
p = hg.Pipeline("p", parallelism=3)
rows = p.source(hg.FromRows([{"key": 1, "other": 1, "value": 1.5}]), name="in")
rows.key_by("key").reduce(lambda one, other: other, name="newest").sink(hg.Discard())
"""


def told(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["state", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("end", ["parquet", "arrow", "jsonl"])
def test_rows_of_a_file_become_a_state(tmp_path: Path, end: str) -> None:  # WS11
    full(tmp_path, tmp_path / "one")
    file = tmp_path / f"rows.{end}"
    {"parquet": FEW.write_parquet, "arrow": FEW.write_ipc, "jsonl": FEW.write_ndjson}[end](file)
    said = told("write", tmp_path / "one", "all", "count", file, "--to", tmp_path / "two")
    assert said.splitlines() == [
        f"savepoint {tmp_path / 'two'} is complete",
        "state 'count' of operator 'all' has 2 rows",
    ]
    assert same(hg.read_state(tmp_path / "two", "all", "count"), FEW)
    assert same(hg.read_state(tmp_path / "two", "all", "ids"), ROWS["ids"])
    with pytest.raises(UsageError, match="there is a savepoint at"):
        told("write", tmp_path / "one", "all", "count", file, "--to", tmp_path / "two")


def test_a_state_and_an_operator_are_dropped(tmp_path: Path) -> None:  # WS11
    full(tmp_path, tmp_path / "one")
    told("drop", tmp_path / "one", "all", "ids", "--to", tmp_path / "two")
    assert set(hg.state_catalog(tmp_path / "two")["state"]) == {"count", "last", "accumulators"}
    told("drop", tmp_path / "two", "all", "--to", tmp_path / "three")
    assert set(hg.state_catalog(tmp_path / "three")["operator"]) == {"newest"}


def test_a_program_declares_what_the_state_shall_be(tmp_path: Path) -> None:  # WS11
    (tmp_path / "program.py").write_text(PROGRAM)
    full(tmp_path, tmp_path / "one")
    rows = pl.DataFrame({"key": [1], "other": [2], "value": [2.5]})
    rows.write_parquet(tmp_path / "rows.parquet")
    arguments = ["newest", "accumulators", tmp_path / "rows.parquet", "--program", tmp_path / "program.py"]
    told("write", tmp_path / "one", *arguments, "--to", tmp_path / "two")
    assert same(hg.read_state(tmp_path / "two", "newest"), rows)


def test_files_that_are_no_rows_are_told(tmp_path: Path) -> None:  # WS11
    full(tmp_path, tmp_path / "one")
    for name, said in (("rows.csv", "is no file of rows with types"), ("rows.parquet", "cannot be read")):
        (tmp_path / name).write_text("nonsense")
        with pytest.raises(UsageError, match=said):
            told("write", tmp_path / "one", "all", "count", tmp_path / name, "--to", tmp_path / "two")
    assert not (tmp_path / "two").exists()
