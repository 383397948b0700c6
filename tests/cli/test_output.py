"""What users wrote is shown on a terminal, and does nothing to it."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import re
import socket
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.support.clocks import HandClock
from tests.web.shop import Asked, definition, progress
from typer.testing import CliRunner

from headgate import cli, tracebacks
from headgate.cli.app import app
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.output import (
    TOKEN,
    JsonLinesProgress,
    LiveProgress,
    PageAddress,
    PageObserver,
    PlainProgress,
    QuietObserver,
    Terminal,
    by_busy,
    duration_text,
    nodes_table,
    report_error,
    say,
    size_text,
    summary_text,
    time_text,
    write_lines,
)
from headgate.errors import PipelineFailed, UsageError
from headgate.model.ids import CheckpointId, Generation, NodeName
from headgate.model.progress import (
    CheckpointProgress,
    LogPlace,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
    RunResult,
    SourceProgress,
)
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"


def test_what_is_said_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    say(HOSTILE, err=True)
    assert capsys.readouterr() == (f"{SHOWN}\n", f"{SHOWN}\n")


def test_a_table_shows_what_is_in_it_as_it_is_written() -> None:
    out = io.StringIO()
    table = Table("x[/red]y", ":smile:")
    table.add_row("[bold]not bold[/bold]", HOSTILE)
    table.add_row(Text(HOSTILE), "[/nothing]")
    Terminal(file=out, width=200).print(table)
    for text in ("x[/red]y", ":smile:", "[bold]not bold[/bold]", SHOWN, "[/nothing]"):
        assert text in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_lines_of_data_are_as_they_are_unless_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, expected in ((False, HOSTILE), (True, SHOWN)):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stdout", out)
        write_lines([HOSTILE])
        assert out.getvalue() == f"{expected}\n"


def test_pipelines_in_a_directory_with_an_odd_name_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "x[/red]y"
    CheckpointLog(open_storage(str(directory)), "odd").claim("test", 1_700_000_000_000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "400")
    found = CliRunner().invoke(app, ["pipelines", "--dir", str(directory)])
    assert found.exit_code == 0, found.exception
    assert "x[/red]y" in found.output


@pytest.mark.parametrize("tell", [report_error, lambda error: tracebacks.print_error(type(error), error, None)])
def test_an_error_does_nothing_to_a_terminal(
    tell: Callable[[UsageError], object], capsys: pytest.CaptureFixture[str]
) -> None:
    tell(UsageError(HOSTILE))
    assert SHOWN in capsys.readouterr().err


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


PROGRESS = Progress(
    PipelineState.RUNNING,
    Generation(2),
    restarts=1,
    nodes=(NodeProgress(NodeName("source"), 0, 12_345, 0.0, 6_000.4),),
    watermark_ms=1_700_000_000_123,
    last_checkpoint=CheckpointProgress(CheckpointId(7), 34, 12_300),
    pending_checkpoint=PendingCheckpoint(CheckpointId(8), 2_500, ("window[1]",)),
    late_records=3,
    bad_records=2,
)


def test_the_summary_says_what_needs_attention() -> None:
    assert summary_text(PROGRESS) == (
        "running · 6,000 records/s · watermark 2023-11-14 22:13:20.123 · checkpoint 7 (34 ms, 12.3 kB) · "
        "checkpoint 8 under way for 2.5 s, held by window[1] · 1 restart · 3 late · 2 bad"
    )


def test_the_summary_says_what_waits_in_the_sources() -> None:
    def summary(*sources: SourceProgress) -> str:
        return summary_text(Progress(PipelineState.RUNNING, sources=sources))

    orders, more = (SourceProgress(NodeName(name), lag=lag) for name, lag in (("orders", 1_200), ("more", 34)))
    assert summary(orders, more) == "running · lag 1,234 records · 0 restarts"
    assert summary(replace(orders, lag=0)) == "running · lag 0 records · 0 restarts"
    assert summary(SourceProgress(NodeName("unknown"))) == "running · 0 restarts"
    logs = SourceProgress(NodeName("logs"), "bytes", lag=12_300)
    assert summary(orders, logs) == "running · lag 1,200 records, 12.3 kB · 0 restarts"
    stuck = replace(orders, lag=0, undecided=6_700)
    assert summary(stuck) == "running · lag 0 records, 6,700 in open transactions · 0 restarts"


def test_the_live_view_shows_every_operator_and_the_last_notes() -> None:
    console = Console(file=io.StringIO(), width=200)
    live = LiveProgress("counts", console)
    live.on_progress(PROGRESS)
    live.on_restart("worker 1 was lost", 100)
    with console.capture() as capture:
        console.print(live.render())
    text = capture.get()
    assert "counts  running" in text
    assert "source" in text
    assert "12,345" in text
    assert "restarting in 100 ms: worker 1 was lost" in text


def test_plain_lines_come_at_every_change_of_state_and_seldom_between(capsys: pytest.CaptureFixture[str]) -> None:
    plain = PlainProgress("counts", period_s=1_000)
    plain.on_progress(Progress(PipelineState.STARTING))
    plain.on_progress(PROGRESS)
    plain.on_progress(PROGRESS)
    plain.on_note("restored from checkpoint 6")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        "counts: starting",
        "counts: running",
        "counts: restored from checkpoint 6",
    ]


def test_json_has_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = JsonLinesProgress("counts", HandClock(date_ms=1_700_000_000_123))
    shown.on_progress(PROGRESS)
    shown.on_checkpoint(CheckpointId(7), 34, 12_300)
    shown.on_restart("why", 5)
    progress, checkpoint, restart = map(json.loads, capsys.readouterr().out.splitlines())
    assert progress["state"] == "running"
    assert progress["nodes"][0]["records_out"] == 12_345
    common = {"pipeline": "counts", "time": "2023-11-14T22:13:20.123Z"}
    assert checkpoint == {"event": "checkpoint", "checkpoint": 7, "duration_ms": 34, "size_bytes": 12_300, **common}
    assert restart == {"event": "restart", "reason": "why", "delay_ms": 5, **common}
    assert "subtasks" not in progress["nodes"][0]


def test_json_says_how_a_run_ended(capsys: pytest.CaptureFixture[str]) -> None:
    shown = JsonLinesProgress("counts")
    shown.on_progress(Progress(PipelineState.FAILED, failures=3, restarts=2))
    shown.on_failure(PipelineFailed("worker 1 was lost", "", False))
    shown.on_result(RunResult(True, 1_000, 10))
    shown.on_result(RunResult(False))
    shown.on_result(RunResult(True, is_drained=True))
    shown.on_result(RunResult(False, has_removed_checkpoints=True))
    progress, *ends = map(json.loads, capsys.readouterr().out.splitlines())
    assert (progress["state"], progress["failures"], progress["restarts"]) == ("failed", 3, 2)
    assert [end["outcome"] for end in ends] == ["failed", "finished", "stopped", "drained", "cancelled"]
    assert (ends[0]["event"], ends[0]["error"]) == ("result", "worker 1 was lost")
    assert (ends[1]["records_in"], ends[1]["records_out"]) == (1_000, 10)


def test_the_table_begins_with_what_holds_the_pipeline_back() -> None:
    source = NodeProgress(NodeName("source"), busy=0.07, held_back=0.9, queued_batches=0)
    slow = NodeProgress(NodeName("slow"), busy=0.93, queued_batches=4, queued_bytes=5_000, lag_ms=1_500)
    near = NodeProgress(NodeName("near"), busy=0.07, late_records=3, bad_records=2, state_bytes=1_500)
    assert [node.node for node in by_busy([source, slow, near])] == ["slow", "source", "near"]
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as capture:
        console.print(nodes_table(Progress(PipelineState.RUNNING, nodes=(source, slow, near))))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[1][:3] == ["slow", "93%", "0%"]
    assert lines[1][-4:] == ["5.0", "kB", "1.5", "s"]
    assert lines[2][:3] == ["source", "7%", "90%"]
    assert lines[3][-4:] == ["3", "2", "1.5", "kB"]


def test_on_a_narrow_terminal_no_number_is_cut() -> None:
    busy = NodeProgress(NodeName("window"), 123_456_789, 98_765_432, 123_456.0, 98_765.0, busy=0.93, held_back=0.04)
    full = replace(busy, queued_batches=4, queued_bytes=5_000, lag_ms=1_500, late_records=12_345, state_bytes=123_000)
    for width in (120, 80, 60, 40):
        console = Console(file=io.StringIO(), width=width)
        with console.capture() as capture:
            console.print(nodes_table(Progress(PipelineState.RUNNING, nodes=(full,)), width))
        head, row = capture.get().splitlines()
        assert max(len(head.rstrip()), len(row.rstrip())) <= width
        assert "…" not in head + row
        titles = re.split(r"\s{2,}", head.strip())
        assert len(titles) == len(set(titles)), "each header is another one"
        cells = dict(zip(titles, re.split(r"\s{2,}", row.strip()), strict=True))
        assert cells["out/s"] == "98,765"
        assert cells["out"] == "98,765,432"


def test_columns_without_a_value_are_left_out() -> None:
    table = nodes_table(Progress(PipelineState.RUNNING, nodes=(NodeProgress(NodeName("source")),)))
    assert [column.header for column in table.columns][-2:] == ["in", "out"]


def test_numbers_read_well() -> None:
    assert [duration_text(ms) for ms in (850, 12_340, 245_000, 11_220_000)] == [
        "850 ms",
        "12.3 s",
        "4 min 05 s",
        "3 h 07 min",
    ]
    assert [size_text(size) for size in (0, 999, 12_300, 5_000_000)] == ["0 B", "999 B", "12.3 kB", "5.0 MB"]
    assert time_text(None) == "-"
    assert time_text((1 << 63) - 1) == "end of input"


class Heard(QuietObserver):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.notes: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def shown(heard: Heard, root: Path, port: int = 0) -> PageObserver:
    return PageObserver(heard, definition(root), PageAddress(port))


def state_at(note: str, token: str = "", path: str = "state") -> dict[str, Any]:
    address = re.findall(r"http://[^ ]+", note)[0]
    request = urllib.request.Request(f"{address}api/{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_everything_that_is_heard_is_shown_and_passed_on(heard: Heard, tmp_path: Path) -> None:
    with shown(heard, tmp_path) as page:
        page.on_start(Asked())  # type: ignore[arg-type]
        page.on_note(LogPlace(str(tmp_path / "logs")))
        page.on_checkpoint(CheckpointId(7), 30, 2_048)
        page.on_progress(progress())
        page.on_restart("it failed", 5)
        page.on_result(RunResult(is_finished=True, restarts=1))
        state = state_at(heard.notes[0])
        logs = state_at(heard.notes[0], path="logs")
    assert [note["text"] for note in state["notes"]] == [f"the workers' logs are in {tmp_path / 'logs'}"]
    assert logs == {"place": str(tmp_path / "logs"), "logs": []}
    assert state["restarts"][0]["reason"] == "it failed"
    assert state["checkpoints"][0]["checkpoint"] == 7
    assert state["checkpoints"][0]["longest"] == {"subtask": "latest[1]", "aligned_us": 4_321, "frozen_us": 8}
    assert state["ended"]["outcome"] == "finished"
    assert state["ended"]["text"].startswith("finished after")
    assert heard.calls == [
        "on_note", "on_start", "on_note", "on_checkpoint", "on_progress", "on_restart", "on_result",
    ]  # fmt: skip


def test_a_failure_is_shown(heard: Heard, tmp_path: Path) -> None:
    with shown(heard, tmp_path) as page:
        error = PipelineFailed("shop", "worker 1 was lost")
        page.on_failure(error)
        assert state_at(heard.notes[0])["ended"] == {
            "outcome": "failed",
            "text": str(error),
            "at_ms": page._story.to_json()["ended"]["at_ms"],
        }
    assert heard.calls[-1] == "on_failure"


def test_the_token_is_not_for_workers(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "sesame")
    with shown(heard, tmp_path):
        assert TOKEN not in os.environ
        assert state_at(heard.notes[0], "sesame")["may_ask"] is True
        assert "sesame" not in heard.notes[0]


def test_a_port_that_is_taken_is_said_before_anything_begins(heard: Heard, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="--ui takes another"):
        shown(heard, tmp_path, other.getsockname()[1]).__enter__()
    assert heard.calls == []


def test_who_goes_on_in_anothers_place_runs_without_a_page(heard: Heard, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = PageAddress(other.getsockname()[1])
        with PageObserver(heard, definition(tmp_path), place, must_run=True) as page:
            page.on_progress(progress())
    assert heard.calls == ["on_note", "on_progress"]
    assert "running without a page" in heard.notes[0]


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_is_a_port(port: int) -> None:
    with pytest.raises(UsageError, match="a port is a number"):
        options(port).check()


def test_the_packages_of_the_page_are_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("headgate.cli.output.find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(UsageError, match=re.escape("pip install 'headgate-streams[ui]'")):
        options(4050).check()


def test_a_supervisor_tells_its_drivers_where_the_page_is() -> None:
    assert {"--ui=4050", "--ui-host=127.0.0.1"} <= set(options(4050).of_a_driver())
    assert not any("--ui" in word for word in options(None).of_a_driver())


def options(port: int | None) -> RunOptions:
    page = None if port is None else PageAddress(port)
    return RunOptions(None, None, None, StartPoint(None, None, ()), False, False, False, False, None, page=page)
