"""Errors of Headgate's that a program does not catch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from headgate.cli import app
from headgate.cli.options import load_pipeline
from headgate.cli.output import report_error
from headgate.errors import UsageError

PROGRAM = """
import headgate as hg
p = hg.Pipeline("p")
{}
"""


def told(directory: Path, line: str, **environment: str) -> str:
    program = directory / "program.py"
    program.write_text(PROGRAM.format(line))
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 1
    return ran.stderr


@pytest.mark.long
def test_an_error_is_a_sentence_and_the_line_of_the_program(tmp_path: Path) -> None:
    said = told(tmp_path, "p.definition()")
    assert said == (
        "Error: the pipeline is empty; begin with .source(...) and end with .sink(...)\n"
        f"  {tmp_path / 'program.py'}, line 4: p.definition()\n"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "environment", "last"),
    [
        ("1 / 0", {}, "ZeroDivisionError: division by zero"),
        ("p.definition()", {"HEADGATE_TRACEBACK": "1"}, "headgate.errors.UsageError: the pipeline is empty"),
        ("import sys; sys.excepthook = lambda *error: print('mine', file=sys.stderr); p.definition()", {}, "mine"),
    ],
)
def test_other_errors_and_other_hooks_are_as_ever(
    tmp_path: Path, line: str, environment: dict[str, str], last: str
) -> None:
    assert told(tmp_path, line, **environment).splitlines()[-1].startswith(last)


def test_a_hook_that_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.tracebacks import install_excepthook

    mine = lambda *error: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", mine)
    install_excepthook()
    assert sys.excepthook is mine


@pytest.fixture
def shell() -> Iterator[Callable[[str], str]]:
    """Runs a cell as a notebook does; returns what it shows of the error."""
    made = InteractiveShell(colors="nocolor")

    def run_cell(code: str) -> str:
        shown: list[str] = []
        made._showtraceback = lambda kind, error, lines: shown.extend(lines)
        made.run_cell(code)
        return "\n".join(shown)

    yield run_cell
    made.history_manager.end_session()


def test_a_notebook_shows_the_sentence_and_the_line_of_the_cell(shell: Callable[[str], str]) -> None:
    shell("import headgate as hg\nrows = hg.Pipeline('p').source(hg.FromRows([{'a': 1}]))")
    assert shell("def build():\n    return rows.select('b')\nbuild()") == (
        'UsageError: operator \'select\': unable to find column "b"; valid columns: ["a"]; the columns are a: int64\n'
        "  cell, line 2: return rows.select('b')"
    )


def test_a_notebook_shows_everything_if_it_is_asked_to(
    shell: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_TRACEBACK", "1")
    assert "output_schema" in shell(
        "import headgate as hg\nhg.Pipeline('p').source(hg.FromRows([{'a': 1}])).select('b')"
    )


def test_the_command_names_the_line_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format("p.source(hg.FromRows([{'a': 1}])).select('b')"))
    with pytest.raises(UsageError) as caught:
        load_pipeline(str(program))
    report_error(caught.value)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"  {program}, line 4: p.source(hg.FromRows([{{'a': 1}}])).select('b')"


def test_an_error_of_the_command_itself_names_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headgate", "run", "nothing.py"])
    with pytest.raises(SystemExit):
        app.main()
    assert capsys.readouterr().err == "Error: there is no file nothing.py\n"
