"""The command line as a whole: errors, exit codes, and looking at what is not there."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from headgate import __version__
from headgate.cli import __main__, output, run, supervisor
from headgate.cli import app as cli
from headgate.cli.__main__ import environment_of, program_of, start_jvm, values_of
from headgate.cli.app import app
from headgate.cli.options import make_importable
from headgate.cli.output import report_error, result_text
from headgate.errors import HeadgateError, PipelineFailed, StorageError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.progress import RunResult
from headgate.spark import jvm
from headgate.spark.jvm import QUICK_COMPILER, Launch, quick_jvm
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.spark.session import jvm_settings as settings_of
from headgate.spark.session import session_options
from headgate.store.store import Store


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["headgate", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"headgate {__version__}\n"


def commands(app: typer.Typer = cli.app, *above: str) -> list[list[str]]:
    """Every command and group that is shown, below ``app`` itself."""
    found = [[*above, command.name or ""] for command in app.registered_commands if not command.hidden]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found += commands(group.typer_instance, *above, group.name or "")
    return [[*above], *found]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_help_that_fits_a_narrow_terminal(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert "… │" not in result.output  # nothing is cut


def test_paragraphs_of_the_help_flow() -> None:
    result = CliRunner().invoke(cli.app, ["run", "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    text = result.output[: result.output.index("Arguments")].splitlines()
    for line, following in itertools.pairwise(text):
        if line.strip() and following.strip() and line[1] != "╭":
            first_word = following.split()[0]
            assert len(line.rstrip()) + 1 + len(first_word) > 78, (line, following)


@pytest.mark.parametrize(
    "command", ["stop", "cancel", "checkpoints list", "checkpoints show", "checkpoints take", "savepoints take"]
)
def test_what_cannot_be_a_pipeline_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in ("", "../x"):
        assert called(monkeypatch, *command.split(), name, *(["/tmp/x"] if command == "savepoints take" else [])) == 2
        assert "a pipeline must be named with 1 to 100 letters, digits, '.', '_' or '-', " in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["run", "stop", "cancel", "doctor", "checkpoints list", "checkpoints take", "savepoints take", "state show"],
)
def test_the_directory_of_checkpoints_is_called_dir_everywhere(command: str) -> None:
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert "--dir" in result.output


def test_wrong_use_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "run", "nowhere.py") == 2
    assert capsys.readouterr().err == "Error: there is no file nowhere.py\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("do that"), 2),
        (StorageError("put", "x", "disk full"), 1),
        (PipelineFailed("operator 'map' failed", "Traceback: line 3"), 1),
    ],
)
def test_errors_have_exit_codes_and_pipelines_bring_their_users_traceback(
    error: HeadgateError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error) == code
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_describe_prints_the_plan_without_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    program = tmp_path / "program.py"
    program.write_text(
        "import headgate as hg\np = hg.Pipeline('shown')\n"
        "p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\np.run()\n",
        encoding="utf-8",
    )
    where = str(tmp_path / "checkpoints")
    assert called(monkeypatch, "run", str(program), "-p", "7", "--dir", where, "--describe") == 0
    assert f"pipeline shown: 1 chains, parallelism 7, checkpoints in {where}" in capsys.readouterr().out


def test_describe_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    with Store.open(tmp_path / "in") as store:
        store.create_stream("lines", pa.schema([("line", pa.large_string())]))
    program = tmp_path / "program.py"
    program.write_text(
        "import headgate as hg\np = hg.Pipeline('shown')\nlines = p.source(hg.StreamSource('lines', store='in'))\n"
        "lines.sink(hg.StreamSink('copies', store='in'), name='a')\n"
        "lines.sink(hg.StreamSink('copies', store='elsewhere'), name='b')\n"
        "lines.sink(hg.FileSink('files'), name='c')\np.run()\n",
        encoding="utf-8",
    )
    assert called(monkeypatch, "run", str(program), "--describe") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "program.py"]
    with Store.open(tmp_path / "in") as store:
        assert [stream.name for stream in store.list_streams()] == ["lines"]


def test_how_a_run_ended_is_said_in_one_sentence() -> None:
    finished = RunResult(True, 1_000, 10, CheckpointId(3), 1, 65_000)
    stopped = RunResult(False, 1_000, 10, CheckpointId(3), 0, 900)
    assert result_text(finished) == "finished after 1 min 05 s: 1,000 records in, 10 out, 1 restart"
    assert result_text(stopped) == (
        "stopped; the same command continues from checkpoint 3 after 900 ms: 1,000 records in, 10 out, 0 restarts"
    )


COMMANDS = {
    "checkpoints list": "There are no checkpoints in",
    "checkpoints list p": "there are no checkpoints at",
    "checkpoints show p": "there are no checkpoints at",
    "checkpoints discard p": "there are no checkpoints at",
    "savepoints list here": "there is no directory",
    "savepoints show here": "there is no directory",
    "sinks list out": "No sink has written to",
    "sinks forget p/out out -y": "no pipeline has written to",
    "stop p": "no pipeline 'p' runs",
    "cancel p": "no pipeline 'p' runs",
    "streams list": "no streams in",
    "streams describe app/log": "there is no stream store at",
    "streams read app/log": "there is no stream store at",
    "streams seal app/log": "there is no stream store at",
    "streams delete app/log -y": "there is no stream store at",
    "streams forget p/out -y": "there is no stream store at",
    "streams check": "there is no stream store at",
    "streams write app/log": "there is no stream store at",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_STORE", raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_looking_at_what_is_not_there_makes_nothing(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, command.split(), input="a line\n")
    said = str(result.exception) if isinstance(result.exception, UsageError) else result.output
    assert COMMANDS[command] in said
    assert os.listdir(tmp_path) == []


def test_streams_are_made_by_who_creates_one(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["streams", "create", "app/log"]).exit_code == 0
    assert CliRunner().invoke(app, ["streams", "write", "app/more", "--create"], input="a\n").exit_code == 0
    assert "app/more" in CliRunner().invoke(app, ["streams", "list", "--json"]).output


PROGRAM = "import headgate as hg\np = hg.Pipeline('p')\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jvm, "temporary_directory", lambda: tmp_path)
    for name in ("HEADGATE_MASTER", "PYSPARK_GATEWAY_PORT", "SPARK_CONF_DIR", "PYSPARK_PYTHON", JVM_OPTIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(__main__, "java_problem", lambda *_: None)
    return str(tmp_path / "program.py")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would be begun."""
    found: list[Launch] = []
    monkeypatch.setattr(__main__, "start_early", found.append)
    return found


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--master", "local[7]", "-p", "3", "--json"], {}),
        (["--conf", "spark.driver.memory=2g", "--conf=spark.x=a=b"], {"spark.driver.memory": "2g", "spark.x": "a=b"}),
    ],
)
def test_the_words_of_a_command_say_which_jvm_it_needs(
    program: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, words: list[str], given: dict[str, str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    start_jvm(["run", *words, program, "--", "--master", "yarn"], os.environ)
    make_importable(str(Path(program).parent))  # what the command does, and what it asks for then
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with quick_jvm():
        needed = jvm.launch_of(settings_of(session_options("its-name", "local[3]") | given), os.environ)
    assert launches == [needed]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--describe"],
        ["run", "--supervised"],
        ["run", "--standby"],
        ["run", "--help"],
        ["run", "--py-files=a.zip"],
        ["run", "--log-dir", "logs"],
        ["run", "--master", "spark://host:7077"],
        ["stop"],
        [],
    ],
)
def test_a_command_that_needs_no_jvm_begins_none(program: str, launches: list[Launch], words: list[str]) -> None:
    start_jvm([*words, program], os.environ)
    assert launches == []


def test_nothing_is_begun_where_it_would_be_in_vain(
    program: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_jvm(["run", program], {**os.environ, "HEADGATE_MASTER": "yarn"})
    start_jvm(["run", program], {**os.environ, "PYSPARK_GATEWAY_PORT": "1"})
    monkeypatch.setattr(__main__, "java_problem", lambda *_: "there is no java")
    start_jvm(["run", program], os.environ)
    assert launches == []


def test_a_program_that_makes_a_session_begins_its_own_jvm(tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text("from pyspark.sql import SparkSession\n")
    assert program_of(["--json", str(made)]) is None
    assert program_of(["--json", "package.module"]) == "."


def test_what_is_for_the_command_alone_is_not_in_the_environment(program: str) -> None:
    around = {"HEADGATE_SUPERVISED": "{}", "HEADGATE_UI_TOKEN": "secret", "A": "b"}
    assert (__main__.SUPERVISED, __main__.TOKEN) == (supervisor.SUPERVISED, output.TOKEN)
    assert set(environment_of(program, around, has_page=True)) & set(around) == {"A"}
    assert set(environment_of(program, around, has_page=False)) & set(around) == {"A", "HEADGATE_UI_TOKEN"}
    assert QUICK_COMPILER in environment_of(program, around, has_page=False)[JVM_OPTIONS]


def test_the_values_of_an_option_are_found_in_both_forms() -> None:
    assert values_of("--conf", ["--conf", "a=1", "x", "--conf=b=2", "--conf"]) == ["a=1", "b=2", ""]


def test_the_command_begins_here(tmp_path: Path) -> None:
    assert run.COMMAND[-1] == "headgate.cli.__main__"
    around = {**os.environ, "PATH": str(tmp_path) + os.pathsep + (os.path.dirname(shutil.which("env") or ""))}
    done = subprocess.run([*run.COMMAND, "--version"], env=around, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("headgate ")


def test_ctrl_c_while_a_command_starts_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "start_jvm", lambda *_: None)
    monkeypatch.setattr(__main__, "app_for", interrupt)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")
