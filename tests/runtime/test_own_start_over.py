"""A program with sinks of its own is started, started over and allowed to: with the public API and the command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from examples.sqlite_sink import connect
from pyspark import cloudpickle
from typer.testing import CliRunner

import headgate as hg
from examples import sqlite_sink
from headgate.cli.app import app
from headgate.cli.program_loader import load_pipeline

cloudpickle.register_pickle_by_value(sqlite_sink)  # workers do not import examples

PROGRAM = """
import sys
import headgate as hg
from examples.sqlite_sink import SqliteLedgerSink, SqliteSink
first, path, home = int(sys.argv[1]), sys.argv[2], sys.argv[3]
p = hg.Pipeline("numbers", parallelism=2, checkpointing=hg.Checkpointing(dir=home, interval="50ms"))
rows = p.source(hg.FromRows([{"number": n, "text": "x"} for n in range(first, first + 40)], splits=2))
rows.sink(SqliteSink(path), name="prepared")
rows.sink(SqliteLedgerSink(path), name="published")
"""


def test_a_program_that_starts_over_writes_what_is_new_once_it_may(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # CS20, LV2, LV4: what the former program wrote has the same checkpoints, subtasks and numbers
    program, target = tmp_path / "program.py", str(tmp_path / "numbers.db")
    program.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)

    def run(first: int, home: str = "home") -> Any:
        return load_pipeline(str(program), [str(first), target, str(tmp_path / home)]).run()

    def numbers() -> list[int]:
        with connect(target) as connection:
            return [n for (n,) in connection.execute("select number from numbers order by number")]

    former = sorted([*range(40)] * 2)
    assert run(0).is_finished
    assert numbers() == former
    with pytest.raises(hg.PipelineFailed, match=r"belongs to the pipeline of the same name with its checkpoints in"):
        run(100, "elsewhere")
    shutil.rmtree(tmp_path / "home")
    for sink in ("prepared", "published"):
        for _ in range(2):
            with pytest.raises(hg.PipelineFailed, match=f"sink '{sink}' of pipeline 'numbers' belongs to former"):
                run(100)
        assert numbers() == former
        command = ["sinks", "forget", f"numbers/{sink}", "program.py", "--yes", "--", "0", target, "home"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    assert run(100).is_finished
    assert numbers() == former + sorted([*range(100, 140)] * 2)
    with connect(target) as connection:
        assert connection.execute("select count(*) from waiting").fetchone() == (0,)
