"""Errors of Headgate's that a program does not catch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    from headgate.api.uncaught import speak_plainly

    mine = lambda *error: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", mine)
    speak_plainly()
    assert sys.excepthook is mine
