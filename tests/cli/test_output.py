"""What users wrote is shown on a terminal, and does nothing to it."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from headgate import cli, tracebacks
from headgate.cli.app import app
from headgate.cli.output import Terminal, report_error, say, write_lines
from headgate.errors import UsageError
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"


# SE22
def test_what_is_said_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    say(HOSTILE, err=True)
    assert capsys.readouterr() == (f"{SHOWN}\n", f"{SHOWN}\n")


# SE22
def test_a_table_shows_what_is_in_it_as_it_is_written() -> None:
    out = io.StringIO()
    table = Table("x[/red]y", ":smile:")
    table.add_row("[bold]not bold[/bold]", HOSTILE)
    table.add_row(Text(HOSTILE), "[/nothing]")
    Terminal(file=out, width=200).print(table)
    for text in ("x[/red]y", ":smile:", "[bold]not bold[/bold]", SHOWN, "[/nothing]"):
        assert text in out.getvalue()
    assert "\x1b" not in out.getvalue()


# SE22
def test_lines_of_data_are_as_they_are_unless_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, expected in ((False, HOSTILE), (True, SHOWN)):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stdout", out)
        write_lines([HOSTILE])
        assert out.getvalue() == f"{expected}\n"


# SE22
def test_pipelines_in_a_directory_with_an_odd_name_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "x[/red]y"
    CheckpointLog(open_storage(str(directory)), "odd").claim("test", 1_700_000_000_000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "400")
    found = CliRunner().invoke(app, ["pipelines", "--dir", str(directory)])
    assert found.exit_code == 0, found.exception
    assert "x[/red]y" in found.output


# SE22
@pytest.mark.parametrize("tell", [report_error, lambda error: tracebacks.print_error(type(error), error, None)])
def test_an_error_does_nothing_to_a_terminal(
    tell: Callable[[UsageError], object], capsys: pytest.CaptureFixture[str]
) -> None:
    tell(UsageError(HOSTILE))
    assert SHOWN in capsys.readouterr().err


# SE22
def test_commands_say_everything_through_one_place() -> None:
    """But JSON, which has escapes of its own."""
    for path in sorted(Path(cli.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            is_elsewhere = call.startswith(
                ("typer.echo(", "typer.secho(", "print(", "Console(", "sys.stdout.writelines(")
            )
            is_plain = "json.dumps(" in call or "printable(" in call or "__version__" in call
            assert not is_elsewhere or is_plain, f"{path.name}: {call}"
