"""``headgate checkpoints`` and ``headgate savepoints``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.cli.app import app
from headgate.codec.json_files import encode_log_entry
from headgate.errors import CorruptionError, HeadgateError, PipelineFailed, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, Savepoint, SnapshotDelays, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, Gap
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver.pipeline_lock import PipelineLock, RunningPipeline
from headgate.storage.urls import open_storage


def manifest(checkpoint: int, is_final: bool = False) -> Manifest:
    rows = None if checkpoint == 1 else {"window": {"windows": 250_000}, "sum": {"accumulators": 0}}
    entry = SubtaskEntry(SubtaskId(VertexId("window"), 0), (SnapshotPart(1_500, 7, inline=b"x", rows=rows),))
    return Manifest(
        CheckpointId(checkpoint),
        Generation(1),
        1,
        128,
        (entry,),
        state_texts={"window": "window(keys a)", "sink": ""},
        is_final=is_final,
        trigger_wall_ms=1_700_000_000_000,
        duration_ms=42,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    log = CheckpointLog(open_storage(str(tmp_path)), "counts")
    log.claim("test", 1_700_000_000_000)
    log.append(manifest(1))
    log.append(manifest(2, is_final=True))
    return tmp_path


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["checkpoints", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_pipelines_are_listed(root: Path) -> None:
    assert told("list", "--dir", str(root)) == "counts\n"
    assert "There are no checkpoints" in told("list", "--dir", str(root / "counts" / "log"))


def test_completed_checkpoints_are_listed_with_duration_and_size(root: Path) -> None:
    text = told("list", "counts", "--dir", str(root))
    assert "2023-11-14 22:13:20.000" in text
    assert "42 ms" in text
    assert "1.5 kB" in text
    assert text.rstrip().endswith("final")


def test_a_damaged_entry_is_listed_by_name(root: Path) -> None:
    newest = sorted((root / "counts" / "log").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    text = told("list", "counts", "--dir", str(root))
    assert f"counts/log/{newest.name} cannot be used" in text
    assert "final" not in text
    with pytest.raises(CorruptionError, match="the newest checkpoint is not known; name one by its id: there is 1"):
        told("show", "counts", "--dir", str(root))
    assert "checkpoint: 1\n" in told("show", "counts", "1", "--dir", str(root))


def test_what_a_replaced_driver_left_is_listed_as_such_and_is_never_the_newest(root: Path) -> None:  # R41
    storage = open_storage(str(root))
    log = CheckpointLog(storage, "counts")
    heir = log.claim("heir", 0).next.generation
    log.append(replace(manifest(3), generation=heir), CheckpointId(3))
    log.drop(CheckpointId(2), CheckpointId(3))
    storage.put("counts/log/0000000003", [encode_log_entry(replace(manifest(9), follows=2, log_start=2))])
    text = told("list", "counts", "--dir", str(root))
    assert text.count("not counted") == 1
    assert "missing" not in text
    assert "checkpoint: 3\n" in told("show", "counts", "--dir", str(root))
    entries = json.loads(told("list", "counts", "--json", "--dir", str(root)))
    assert [(e["checkpoint"], e["counts"]) for e in entries] == [(9, False), (3, True)]


def test_one_checkpoint_is_shown_with_its_subtasks(root: Path) -> None:
    text = told("show", "counts", "1", "--dir", str(root))
    assert "checkpoint: 1\n" in text
    assert "window[0]" in text
    assert "state of window: window(keys a)" in text
    assert "checkpoint: 2\n" in told("show", "counts", "--dir", str(root))


def test_the_rows_of_each_state_are_shown_per_subtask(root: Path) -> None:
    text = told("show", "counts", "2", "--dir", str(root))
    assert "250,000" in text.split("window[0]")[1].split("\n")[0]
    assert "rows of window/windows: 250,000 (window[0] 250,000)\n" in text
    assert "rows of sum/accumulators: 0 (window[0] 0)\n" in text
    (subtask,) = json.loads(told("show", "counts", "--dir", str(root), "--json"))["subtasks"]
    assert subtask["rows"] == {"window": {"windows": 250_000}, "sum": {"accumulators": 0}}
    assert "1.5 kB  ?  " in told("show", "counts", "1", "--dir", str(root)), "version 0.1 did not record them"


def test_show_prints_delays_and_bytes_in_flight(root: Path) -> None:
    assert "in flight" not in told("show", "counts", "--dir", str(root)), "nobody measured"
    parts = (SnapshotPart(10, 7), SnapshotPart(2_500, 7, inline=b"x", section="in-flight/window", name="way"))
    entry = SubtaskEntry(SubtaskId(VertexId("window"), 0), parts, (), SnapshotDelays(1_200, 34))
    log = CheckpointLog(open_storage(str(root)), "timed")
    log.claim("test", 1_700_000_000_000)
    log.append(replace(manifest(3), entries=(entry,)))
    row = told("show", "timed", "--dir", str(root)).split("window[0]")[2].split("\n")[0]
    assert row.split() == ["1.2", "s", "34", "ms", "2.5", "kB"]
    (subtask,) = json.loads(told("show", "timed", "--dir", str(root), "--json"))["subtasks"]
    assert (subtask["start_delay_ms"], subtask["alignment_ms"], subtask["in_flight_bytes"]) == (1_200, 34, 2_500)


def test_json_is_for_programs(root: Path) -> None:
    entries = json.loads(told("list", "counts", "--dir", str(root), "--json"))
    assert [entry["kind"] for entry in entries] == ["claim", "checkpoint", "checkpoint"]
    assert json.loads(told("show", "counts", "--dir", str(root), "--json"))["subtasks"][0]["size_bytes"] == 1_500


def test_what_is_not_there_is_said(root: Path) -> None:
    with pytest.raises(UsageError, match="the pipelines in this directory are: counts"):
        told("list", "other", "--dir", str(root))
    with pytest.raises(UsageError, match="has no checkpoint 9; there is 1, 2"):
        told("show", "counts", "9", "--dir", str(root))


def test_what_is_kept_aside_is_listed_and_removed(root: Path) -> None:  # R51
    log = CheckpointLog(open_storage(str(root)), "counts")
    damages = (Damage("chk-0000000002/window-0.g1", "torn"),)
    log.files.set_aside(log.observe(), [Gap(CheckpointId(1), CheckpointId(3), (3,), damages)])
    (root / "counts/chk-0000000002").mkdir()
    (root / "counts/chk-0000000002/window-0.g1").write_bytes(b"torn")
    listed = CliRunner().invoke(app, ["checkpoints", "list", "counts", "--dir", str(root)]).output
    assert "kept aside: what came after checkpoint 1 and before 3: chk-0000000002/window-0.g1: torn" in listed
    done = CliRunner().invoke(app, ["checkpoints", "discard", "counts", "--dir", str(root), "--yes"])
    assert "1 files removed" in done.output
    assert not (root / "counts/chk-0000000002").exists()
    again = CliRunner().invoke(app, ["checkpoints", "discard", "counts", "--dir", str(root), "--yes"])
    assert "Nothing is kept aside" in again.output


HOLDER_BEGIN = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # in threads that imports start, too
from headgate.codec.json_files import Ending
from headgate.model.progress import CheckpointOutcome
from headgate.runtime.driver import pipeline_lock
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
with taking_signals():
    lock = PipelineLock.acquire(sys.argv[1], "p", "a child")
print("ready", flush=True)
assert signal.sigwait({signal.SIGUSR2}) == signal.SIGUSR2
(ask,) = pipeline_lock.waiting_requests(sys.argv[1], "p")
"""
"""Begins a process that holds the pipeline "p" and gets one request."""

HOLDER = f"""{HOLDER_BEGIN}request = ask.take()
assert ask.take() is None, "it is taken once"
print(request, flush=True)
if sys.argv[2] == "completes":
    ask.answer(CheckpointOutcome(7, savepoint=request.savepoint))
else:
    ask.answer(CheckpointOutcome(None, "the place is taken", is_refused=sys.argv[2] == "refused"))
if request.ends and sys.argv[2] != "refused":
    lock.release(Ending.DRAINED if request.drains else Ending.STOPPED, 7, "")
sys.stdin.readline()
"""


def said(root: Path, how: str, *command: str) -> tuple[str, str | HeadgateError]:
    """Return what a command asks for, and what it says to a pipeline that does this."""
    started = [sys.executable, "-c", HOLDER, str(root), how]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, [*command, "--dir", str(root)])
        asked = child.communicate("\n", 120)[0]
        assert child.returncode == 0
    assert list((root / "p").glob("checkpoint-*")) == []
    assert result.exception is None or isinstance(result.exception, HeadgateError)
    return asked.strip(), result.exception or result.stdout


def test_a_savepoint_is_taken_on_request_and_waited_for(tmp_path: Path) -> None:
    asked, sentence = said(tmp_path, "completes", "savepoints", "take", "p", "/backup/here")
    assert asked == "ControlRequest(savepoint='/backup/here', ends=False, drains=False, cancels=False)"
    assert sentence == "p: savepoint /backup/here is complete (checkpoint 7)\n"
    _, problem = said(tmp_path, "refused", "savepoints", "take", "p", "/backup/here")
    assert str(problem) == "p: there is no savepoint: the place is taken"


@pytest.mark.parametrize(
    ("option", "drains", "sentence"),
    [
        ([], False, "p: stopped; started again, it continues from checkpoint 7\n"),
        (["--drain"], True, "p: drained; everything that was read is processed (final checkpoint 7)\n"),
    ],
)
def test_a_pipeline_is_stopped_with_a_savepoint(
    tmp_path: Path, option: list[str], drains: bool, sentence: str
) -> None:  # SV10
    command = ["stop", "p", "--savepoint", "/backup/here", *option]
    asked, found = said(tmp_path, "completes", *command)
    assert asked == f"ControlRequest(savepoint='/backup/here', ends=True, drains={drains}, cancels=False)"
    assert found == f"{sentence}p: savepoint /backup/here is complete\n"
    _, problem = said(tmp_path, "fails", *command)
    assert isinstance(problem, PipelineFailed)
    assert str(problem) == "p: there is no savepoint: the place is taken", "and the pipeline has stopped"
    _, problem = said(tmp_path, "refused", *command)
    assert isinstance(problem, UsageError)
    assert str(problem) == "p goes on, because the savepoint cannot be there: the place is taken"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    SavepointDirectory(str(tmp_path / "here")).write(
        Savepoint("drawn", "counts", 1_700_000_000_000, "files-00", manifest(2))
    )
    return tmp_path / "here"


def run(*command: str) -> str:
    result = CliRunner().invoke(cli.app, list(command))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_savepoint_says_what_it_holds(place: Path) -> None:
    shown = run("savepoints", "show", str(place))
    assert shown.startswith("savepoint of pipeline counts, complete since 2023-11-14 22:13:20.000 UTC\n")
    for line in (
        "checkpoint: 2",
        "parallelism: 1",
        "key groups: 128",
        "mode: exactly_once",
        "rows of window/windows: 250,000",
    ):
        assert line in shown
    assert "state of window: window(keys a)" in shown
    fields = json.loads(run("savepoints", "show", str(place), "--json"))
    assert (fields["pipeline"], fields["checkpoint"], fields["subtasks"][0]["subtask"]) == ("counts", 2, "window[0]")


def test_savepoints_below_a_path_are_listed(place: Path) -> None:
    (place.parent / "torn").mkdir()
    (place.parent / "torn" / "savepoint").write_bytes(b"headgate-savepoint 1 00\n{}")
    (found, torn) = json.loads(run("savepoints", "list", str(place.parent), "--json"))
    assert (found["path"], found["pipeline"], found["id"]) == ("here", "counts", "drawn")
    assert "is damaged" in torn["problem"]
    assert "counts" in run("savepoints", "list", str(place.parent))
    (place.parent / "empty").mkdir()
    assert "There are no savepoints" in run("savepoints", "list", str(place.parent / "empty"))


def test_where_there_is_none_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no savepoint at"):
        run("savepoints", "show", str(tmp_path))
    with pytest.raises(UsageError, match="there is no directory"):
        run("savepoints", "show", str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists(), "looking makes nothing"


HOLDER_TAKE = f"""{HOLDER_BEGIN}if sys.argv[2] == "ends":
    lock.release(Ending.STOPPED, 5, "")
else:
    ask.answer(CheckpointOutcome(7) if sys.argv[2] == "completes" else CheckpointOutcome(None, "it expired"))
    sys.stdin.readline()
"""


def taken(root: Path, how: str) -> str | Exception:
    """Return what the command says to a pipeline that does this; the lock's directory is clean afterwards."""
    command = [sys.executable, "-c", HOLDER_TAKE, str(root), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, ["checkpoints", "take", "p", "--dir", str(root)])
        child.communicate("\n", 120)
        assert child.returncode == 0
    assert list((root / "p").glob("checkpoint-*")) == []
    return result.exception if isinstance(result.exception, PipelineFailed) else result.stdout


def test_a_checkpoint_is_taken_on_request_and_waited_for(tmp_path: Path) -> None:
    assert taken(tmp_path, "completes") == "p: checkpoint 7 is completed\n"


@pytest.mark.parametrize(("how", "reason"), [("fails", "it expired"), ("ends", "the pipeline ended")])
def test_the_reason_why_there_is_none_is_told(tmp_path: Path, how: str, reason: str) -> None:  # C61
    assert str(taken(tmp_path, how)) == f"p: there is no new checkpoint: {reason}"


def test_a_process_that_cannot_answer_is_not_signalled(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "a program")
    try:
        with pytest.raises(UsageError, match="a program that started it with start"):
            RunningPipeline.find(str(tmp_path), "p")
    finally:
        lock.release()
