from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.clocks import HandClock

from headgate.cli.output import duration_text, size_text, time_text
from headgate.cli.progress import (
    JsonLinesProgress,
    LiveProgress,
    PlainProgress,
    by_busy,
    nodes_table,
    summary_text,
)
from headgate.errors import PipelineFailed
from headgate.model.ids import CheckpointId, Generation, NodeName
from headgate.model.progress import (
    CheckpointProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
    RunResult,
)

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
