"""``headgate pipelines``, ``ui``, ``stop`` and ``cancel``."""

# Rules: F23

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_checkpoints import HOLDER_BEGIN
from tests.storage.looked import Looked
from tests.support.sqlite_sinks import SqliteSink
from typer.testing import CliRunner

import headgate as hg
from headgate.api.pipeline_registry import announced_page, remember_pipeline
from headgate.cli import app as cli
from headgate.cli import pipelines
from headgate.cli.app import app
from headgate.cli.output import TOKEN
from headgate.cli.pipelines import _outcome
from headgate.codec.json_files import Ending, LockHolder
from headgate.connectors.files.file_sink import FileOwner
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.errors import PipelineFailed, UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.storage.urls import open_storage


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "300")


def started(root: Path, name: str) -> None:
    CheckpointLog(open_storage(str(root)), name).claim("test", 1_700_000_000_000)
    remember_pipeline(name, str(root))


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["pipelines", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_pipelines_are_listed_wherever_they_are(tmp_path: Path) -> None:
    assert told() == "No pipeline is known here; 'headgate run PROGRAM.py' starts one, --dir DIR looks elsewhere.\n"
    assert told("--json") == "[]\n"
    started(tmp_path / "one", "shop")
    started(tmp_path / "two", "bank")
    lock = PipelineLock.acquire(str(tmp_path / "one"), "shop", "process 7 on here")
    PipelineLock.acquire(str(tmp_path / "two"), "bank", "process 8 on here").release(Ending.FAILED, 5, "disk full")
    with announced_page("shop", "http://127.0.0.1:4050/"):
        lines = told().splitlines()
        fields = json.loads(told("--json"))
    assert re.search(rf"^shop +running .*{tmp_path / 'one'} +http://127.0.0.1:4050/", lines[1])
    assert re.search(rf"^bank +failed .*{tmp_path / 'two'}", lines[2])
    assert lines[3] == "bank: disk full"
    assert [(one["name"], one["state"], one["page"]) for one in fields] == [
        ("shop", "running", "http://127.0.0.1:4050/"),
        ("bank", "failed", ""),
    ]
    lock.release()


@pytest.mark.run
def test_the_page_of_all_pipelines_is_served_until_it_is_told_to_end(tmp_path: Path) -> None:
    started(tmp_path / "one", "shop")
    command = [sys.executable, "-m", "headgate.cli", "ui", "--port", "0"]
    environment = {**os.environ, TOKEN: "sesame"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        address = re.findall(r"http://[^ ]+", line)[0]
        with urllib.request.urlopen(f"{address}api/state", timeout=60) as answer:
            assert [one["name"] for one in json.load(answer)["pipelines"]] == ["shop"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0
    assert "sesame" not in line
    assert "Ctrl-C ends it" in line


def test_what_cannot_be_a_port_is_told() -> None:
    result = CliRunner().invoke(app, ["ui", "--port", "70000"])
    assert isinstance(result.exception, UsageError)
    assert "--port is 70000" in str(result.exception)


HOLDER = """
import signal, sys
wanted = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # in threads that imports start, too
from headgate.codec.json_files import Ending
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
with taking_signals():
    lock = PipelineLock.acquire(sys.argv[1], "p", "a child")
print("ready", flush=True)
lock.release(Ending.DRAINED if signal.sigwait(wanted) == signal.SIGUSR1 else Ending.STOPPED, 5, "")
"""


def ended(ending: Ending, checkpoint: int | None = 5, reason: str = "") -> LockHolder:
    return LockHolder("process 1 on here", "here", 1, "n", True, ending, checkpoint, reason)


def kept(ending: Ending, reason: str = "") -> LockHolder:
    return replace(ended(ending, None, reason), supervisor_pid=7)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ([], "p: stopped; started again, it continues from checkpoint 5\n"),
        (["--drain"], "p: drained; everything that was read is processed (final checkpoint 5)\n"),
    ],
)
def test_a_running_pipeline_is_asked_and_waited_for(tmp_path: Path, option: list[str], sentence: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, ["stop", "p", "--dir", str(tmp_path), *option])
        assert child.wait(120) == 0
    assert result.exit_code == 0, result.output
    assert result.stdout == sentence
    assert re.search(r"p: (stopping|draining) a child", result.stderr)


def test_a_pipeline_that_does_not_run_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["headgate", "stop", "p", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    error = f"Error: no pipeline 'p' runs with its checkpoints in {tmp_path}; running there: none\n"
    assert capsys.readouterr().err == error


def test_where_a_pipeline_of_that_name_runs_is_said(tmp_path: Path) -> None:
    place = tmp_path / "check points"
    place.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(place)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        (place / "p" / "log").mkdir()
        remember_pipeline("p", str(place))
        result = CliRunner().invoke(cli.app, ["stop", "p", "--dir", str(tmp_path)])
        assert isinstance(result.exception, UsageError)
        assert f"A pipeline 'p' runs with --dir '{place}'" in str(result.exception)
        assert CliRunner().invoke(cli.app, ["stop", "p", "--dir", str(place)]).exit_code == 0


def test_the_place_that_was_named_is_not_proposed(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "a program")  # which takes no signals
    (tmp_path / "p" / "log").mkdir()
    remember_pipeline("p", str(tmp_path))
    result = CliRunner().invoke(cli.app, ["stop", "p", "--dir", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).endswith("call stop() or stop(drain=True) of its handle there")
    lock.release(Ending.STOPPED, 5, "")


def test_a_lock_that_may_not_be_read_is_not_taken_for_a_pipeline_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, who may read everything."""

    def refused(self: Path, *_: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refused)
    for command in ("stop", "cancel"):
        result = CliRunner().invoke(cli.app, [command, "p", "--dir", str(tmp_path)])
        assert isinstance(result.exception, UsageError)
        assert str(result.exception).startswith("whether pipeline 'p' runs cannot be told, because ")


def test_a_pipeline_with_remote_checkpoints_that_does_not_run_here_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["stop", "p", "--dir", "s3://bucket/checkpoints"])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith("no process of this user and machine runs a pipeline 'p'")


def test_the_help_names_every_option() -> None:
    result = CliRunner().invoke(cli.app, ["stop", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for word in ("--drain", "--dir", "does not continue", "Timers of processing time do not fire"):
        assert word in result.output


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (ended(Ending.FINISHED), "finished; all its input had ended (final checkpoint 5)"),
        (ended(Ending.STOPPED, None), "stopped; started again, it continues"),
        (ended(Ending.REPLACED), "ended, and has been started again"),
    ],
)
def test_an_end_is_one_sentence(how: LockHolder, sentence: str) -> None:
    assert _outcome(how, drain=False) == sentence


@pytest.mark.parametrize(
    ("how", "drain", "sentence"),
    [
        (ended(Ending.STOPPED), True, "stopped before it had drained; started again, it continues from checkpoint 5"),
        (
            ended(Ending.FAILED, None, "operator 'map' failed"),
            False,
            "failed before it had ended: operator 'map' failed",
        ),
        (ended(Ending.NONE), False, "died before it had ended"),
        (kept(Ending.NONE), True, "the driver died before it had drained; if its supervisor starts it again, the next"),
        (kept(Ending.FAILED, "full"), True, r"the driver failed \(full\) before it had drained; if its supervisor"),
        (kept(Ending.FAILED, "full"), False, "failed before it had ended: full"),
    ],
)
def test_another_end_than_was_asked_for_is_a_failure(how: LockHolder, drain: bool, sentence: str) -> None:
    with pytest.raises(PipelineFailed, match=sentence):
        _outcome(how, drain)


HOLDER_CANCEL = (
    HOLDER_BEGIN
    + """\
assert ask.take() == pipeline_lock.ControlRequest(cancels=True)
ask.answer(CheckpointOutcome(None, "the pipeline does not run at the moment"))
ending, _, doubt = sys.argv[2].partition(" ")
lock.release(Ending[ending], 5, "it failed before", is_in_doubt=bool(doubt))
"""
)


def cancelled(root: Path, ending: str) -> str | Exception:
    """Return what the command says of a pipeline that ends so; nothing is left beside its lock."""
    command = [sys.executable, "-c", HOLDER_CANCEL, str(root), ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, ["cancel", "p", "--dir", str(root)])
        assert child.wait(120) == 0
    assert list((root / "p").glob("checkpoint-*")) == []
    return result.exception if isinstance(result.exception, PipelineFailed) else result.stdout


@pytest.mark.parametrize(
    ("ending", "sentence"),
    [
        ("CANCELLED", "p: cancelled, and its checkpoints are removed\n"),
        ("STOPPED", "p: cancelled; started again, it continues from checkpoint 5\n"),
        (
            "STOPPED in doubt",
            "p: cancelled; it is not known whether its checkpoints are removed: the next start begins from nothing, or "
            "continues from checkpoint 5\n",
        ),
    ],
)
def test_a_pipeline_is_cancelled_and_waited_for(tmp_path: Path, ending: str, sentence: str) -> None:  # C70
    assert cancelled(tmp_path, ending) == sentence


def test_a_pipeline_that_failed_instead_is_told(tmp_path: Path) -> None:
    assert "failed before it had ended: it failed before" in str(cancelled(tmp_path, "FAILED"))


def test_list_says_that_checkpoints_were_removed(tmp_path: Path) -> None:  # C70
    log = CheckpointLog(open_storage(str(tmp_path)), "p")
    log.claim("one", 0)
    log.give_up("one", 0, log.generation)
    result = CliRunner().invoke(cli.app, ["checkpoints", "list", "p", "--dir", str(tmp_path)])
    said = "Its checkpoints were removed when it was cancelled or had failed; another start begins from nothing."
    assert " ".join(result.stdout.split()) == said


LIFE = PipelineIdentity("one", "/home/p", "far", 0)


def test_a_list_of_many_sinks_is_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Looked()
    monkeypatch.setattr(pipelines, "open_storage", lambda url: storage)
    for number in range(20):
        FileOwner(storage, SinkIdentity("p", f"out-{number:02}")).own(LIFE)
    FileOwner(storage, SinkIdentity("p", "out-07")).forget()
    storage.put(SinkIdentity("p", "told-nothing").claim(Generation(2)), [b""])
    storage.seen.clear()
    lines = CliRunner().invoke(app, ["sinks", "list", str(tmp_path)]).output.splitlines()
    assert lines[0].startswith("p/out-00 belongs to the checkpoints in /home/p, begun on far at 1970")
    assert lines[7] == "p/out-07 is forgotten"
    assert lines[20:] == ["p/told-nothing was written to without a checkpoint directory"]
    assert len(storage.seen) == 2 + 20, "two listings, and each life once"


PROGRAM = """
import sys
import headgate as hg
from tests.support.sqlite_sinks import SqliteSink
p = hg.Pipeline("p", parallelism=1)
rows = p.source(hg.FromRows([{"number": 1, "text": "a"}]))
rows.sink(SqliteSink(sys.argv[1]), name="out")
rows.sink(hg.Discard(), name="nowhere")
"""


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteSink:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return SqliteSink(str(tmp_path / "t.db"))


def forget(sink: SqliteSink, name: str, *, answer: str = "y") -> str:
    """Run the command; return what it says."""
    command = ["sinks", "forget", name, "program.py", "--", sink.path]
    result = CliRunner().invoke(app, command, input=f"{answer}\n")
    return str(result.exception) if isinstance(result.exception, UsageError) else result.output


def test_the_target_of_a_users_sink_is_made_to_forget(sink: SqliteSink) -> None:
    sink.own("p", "out", LIFE)
    sink.claim(hg.Fence("p:out", 7, sink.claimed("p:out").life))  # type: ignore[union-attr]
    assert "begun on far" in forget(sink, "p/out", answer="n")
    assert sink.owner("p", "out").life == LIFE
    assert "p/out is forgotten" in forget(sink, "p/out")
    found = sink.owner("p", "out")
    assert found == Owner(None, found.generation, is_forgotten=True)
    assert found.generation == 7


def test_nothing_is_forgotten_that_nobody_wrote(sink: SqliteSink) -> None:
    assert "no pipeline has written to program.py as 'p/out'" in forget(sink, "p/out")
    assert sink.claimed("p:out") is None


@pytest.mark.parametrize("name", ["p/nowhere", "q/out"])
def test_a_sink_that_is_not_there_is_named_with_those_that_are(sink: SqliteSink, name: str) -> None:
    assert f"program.py has no sink of its own called '{name}'" in forget(sink, name)
    assert "there is 'p/out'" in forget(sink, name)


def test_a_sink_is_found_by_its_former_name(sink: SqliteSink) -> None:  # which only its target knows
    sink.own("p", "former", LIFE)
    assert "p/former is forgotten" in forget(sink, "p/former")
    assert sink.owner("p", "former").is_forgotten
    assert sink.owner("p", "out").is_unknown
