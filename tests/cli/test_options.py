"""Options of commands: one name for one option, restart strategies, and what a supervisor passes on."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pyspark import cloudpickle
from typer.testing import CliRunner

import headgate as hg
from headgate import testing
from headgate.api.pipeline import Pipeline
from headgate.api.stream_copy import PravegaCopy, TopicCopy
from headgate.cli import run, supervisor
from headgate.cli.app import app
from headgate.cli.options import PROGRAM, load_pipeline, restart_strategy, set_log_directory
from headgate.cli.supervisor import Orders
from headgate.errors import UsageError
from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from headgate.model.progress import PipelineHandle
from headgate.nexmark import Nexmark
from headgate.operators.functions import RowFunctionSpec
from headgate.spark.worker_main import log_directory
from headgate.store.server.server import ServerOptions


@pytest.mark.parametrize("is_local", [True, False])
def test_logs_are_where_the_option_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool) -> None:
    monkeypatch.setenv("HEADGATE_LOG_DIR", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    set_log_directory(None)
    assert os.environ["HEADGATE_LOG_DIR"] == "/elsewhere"
    set_log_directory("logs")
    monkeypatch.chdir("/")
    assert log_directory(is_local=is_local) == tmp_path / "logs"


def test_a_file_is_no_directory_of_logs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (str(tmp_path / "file"), ""):
        with pytest.raises(UsageError, match="--log-dir must be a directory"):
            set_log_directory(wrong)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("none", NoRestart()),
        ("fixed-delay", FixedDelay()),
        ("fixed_delay:attempts=3, delay=5s", FixedDelay(3, 5_000)),
        ("failure-rate:failures=4,interval=2m,delay=10ms", FailureRate(4, 120_000, 10)),
        ("exponential-delay", ExponentialDelay()),
        (
            "exponential-delay:initial=1s,maximum=2m,multiplier=3,reset-after=1h,jitter=0.5,attempts=9",
            ExponentialDelay(1_000, 120_000, 3.0, 3_600_000, 0.5, 9),
        ),
    ],
)
def test_a_strategy_is_written_as_in_a_program(text: str, strategy: RestartStrategy) -> None:  # KR2
    assert restart_strategy(text) == strategy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("always", "--restart must begin with one of none, fixed-delay, failure-rate, exponential-delay, not 'always'"),
        ("none:attempts=3", "--restart none takes no values; 'attempts=3' is none of them"),
        ("fixed-delay:times=3", "--restart fixed-delay takes attempts=…, delay=…; 'times=3' is none of them"),
        ("fixed-delay:attempts", "'attempts' is none of them"),
        ("fixed-delay:attempts=many", "attempts must be a whole number, not 'many'"),
        ("fixed-delay:delay=5", "restart delay must look like"),
        ("fixed-delay:attempts=-1", "restart attempts must be an integer of at least 0"),
        ("exponential-delay:jitter=x", "jitter must be a number, not 'x'"),
    ],
)
def test_a_strategy_that_is_none_is_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        restart_strategy(text)
    assert problem in str(caught.value)


def became(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[str], Orders]:
    """Return what the process of this command line would become."""
    found: list[list[str]] = []

    class Gone(Exception):  # noqa: N818
        """A process that has become another one does not come back."""

    def execv(path: str, command: list[str]) -> None:
        assert path == sys.executable
        found.append(command)
        raise Gone

    monkeypatch.setattr(run.os, "execv", execv)
    result = CliRunner().invoke(app, ["run", *arguments])
    assert isinstance(result.exception, Gone), result.output
    return found[0][:-1], Orders.decoded(found[0][-1])


def test_supervised_becomes_a_supervisor_of_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command, orders = became(monkeypatch, "--supervised", "some/program.py", "--", "--its", "own option")
    assert command == [sys.executable, "-P", "-m", supervisor.__name__]
    assert orders == Orders(
        [*run.COMMAND, "run", "--", "some/program.py", "--its", "own option"], ExponentialDelay(), "program"
    )


def test_a_kept_driver_has_all_options_of_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--supervised", "--standby", "--master", "local[3]", "-p", "3", "--dir", "s3://b/c", "--json"]
    _, orders = became(monkeypatch, *given, "--silence", "20s", "--restart", "fixed-delay:attempts=2", "program")
    assert orders.command == [
        *run.COMMAND,
        "run",
        "--master=local[3]",
        "--parallelism=3",
        "--dir=s3://b/c",
        "--silence=20s",
        "--json",
        "--standby",
        "--",
        "program",
    ]
    assert (orders.strategy, orders.is_standby, orders.as_json) == (FixedDelay(2), True, True)


def test_a_supervisor_does_not_load_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise AssertionError('it was loaded')")
    became(monkeypatch, "--supervised", "--quiet", str(program))


def test_a_strategy_without_a_supervisor_is_refused() -> None:
    result = CliRunner().invoke(app, ["run", "--restart", "none", "program.py"])
    assert isinstance(result.exception, UsageError)
    assert "--restart is about --supervised" in str(result.exception)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--silence", "20s"], "--silence is about --standby, which is not given"),
        (["--standby", "--silence", "4s"], "--silence is 4s, but must be 5s at least: a driver gives a sign of life"),
        (["--standby", "--silence", "long"], "--silence must look like '500ms', '1s', '5 minutes' or '1h', not 'long'"),
    ],
)
def test_a_silence_that_a_standby_cannot_wait_for_is_refused(given: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["run", *given, "program.py"])
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


def test_the_help_tells_of_both() -> None:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for words in (
        "--supervised",
        "--standby",
        "--silence",
        "--restart",
        "fixed-delay",
        "3 failed for good",
        "4 the pipeline is running elsewhere",
    ):
        assert words in result.output


ROOT = Path(__file__).parents[2]

COUNTERPARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "run": (Pipeline.run, Pipeline.begin_with, Pipeline, hg.Checkpointing),
    "stop": (PipelineHandle.stop, hg.Checkpointing),
    "cancel": (PipelineHandle.cancel, hg.Checkpointing),
    "reset": (Pipeline.begin_with, hg.Checkpointing),
    "doctor": (Pipeline.run, hg.Checkpointing, hg.StreamSource),
    "streams create": (hg.Store.create_stream, hg.Store.open, hg.Retention, hg.Scaling),
    "streams update": (hg.Store.update_stream,),
    "streams retention": (hg.Retention,),
    "streams scaling": (hg.Scaling,),
    "streams truncate": (hg.Store.truncate,),
    "streams delete": (hg.Store.delete,),
    "streams read": (hg.Store.follow,),
    "streams tail": (hg.Store.follow,),
    "streams copy": (hg.Store.follow, hg.Kafka, Pipeline, TopicCopy, PravegaCopy),
    "streams write": (hg.Store.writer, hg.StreamSink),
    "streams cut": (),
    "streams scale": (hg.Store.split, hg.Store.resize),
    "streams groups create": (hg.Store.reader_group, hg.Store.create_stream),
    "streams groups reset": (hg.ReaderGroup.reset,),
    "streams transactions list": (hg.Store.list_transactions,),
    "state show": (hg.read_state,),
    "state write": (hg.edit_savepoint, hg.read_state),
    "state drop": (hg.edit_savepoint, hg.read_state),
    "store serve": (ServerOptions, hg.Security),
    "nexmark run": (Nexmark, Pipeline, Pipeline.run, hg.Checkpointing),
}
"""What does the same in Python: an option has the name of its keyword, alone or behind that of its class."""

EVERYWHERE = {
    "--json": "how the command prints",
    "--yes": "answers the command's question",
    "--dir": "where checkpoints are: Checkpointing(dir=)",
    "--store": "where streams are: StreamSource(store=)",
    "--help": "of the command line itself",
}
ONLY_HERE = {
    "--sql": "Tables.sql, which is a call",
    "--output": "a sink: FileSink(url)",
    "--kafka-security": "a file for hg.KafkaSecurity(), so that no argument has a secret",
    "--py-files": "Spark's own name; a program has the session's",
    "--conf": "Spark's own name; a program has the session's",
    "--describe": "p.describe(), which is a call",
    "--quiet": "observer=",
    "--supervised": "a program cannot supervise itself",
    "--restart": "of --supervised; restart= of a pipeline takes the same strategies as objects",
    "--standby": "a program cannot stand by for itself",
    "--silence": "of --standby",
    "--log-dir": "$HEADGATE_LOG_DIR",
    "--ui": "a page is served by the command",
    "--ui-host": "of --ui",
    "--port": "of a page or a server",
    "--host": "of a page or a server",
    "--at": "start= of follow, given as a time",
    "--before": "cut=, given as a time",
    "--head": "Store.head, which is a call",
    "--format": "how events are printed",
    "--limit": "limit= of collect",
    "--lines": "of each segment",
    "--follow": "follow= of StreamSource",
    "--to-store": "the store of the target; --store is that of the source",
    "--to": "EditedSavepoint.write, which is a call",
    "--program": "edit_savepoint(pipeline=) takes the object that the program makes",
    "--where": "a frame is filtered",
    "--all": "nothing is left out",
    "--off": "None instead of Retention or Scaling",
    "--columns": "schema= of create_stream, as words",
    "--create": "create= of StreamSink",
    "--merge": "Store.merge, which is a call",
    "--split": "Store.split, which is a call",
    "--quick": "verify_events=False",
    "--remove-orphans": "Store.collect_orphans, which is a call",
    "--repair": "Store.repair, which is a call",
    "--timeout": "a loop asks whether all have passed",
    "--abort-prepared": "Store.transactions.abort_all, which is a call",
    "--master": "master= of a run; the executors that doctor looks at",
    "--cut": "cut=, and start= of follow, given as a cut",
    "--tls": "tls= of Security",
    "--token-file": "the token itself, in Python",
}
"""Options that no keyword does the same as, and why."""

SECOND_NAMES = {
    "dir": ("directory_of", "checkpoint_dir", "checkpoint_directory", "checkpoints_dir", "root_dir", "folder"),
    "parallelism": ("num_workers", "workers_count", "subtasks_count", "concurrency"),
    "restore": ("from_savepoint", "restore_from", "resume_from", "start_from", "from"),
    "force": ("anyway", "overwrite", "ignore_holds"),
    "timeout": ("time_limit", "wait_at_most", "patience", "deadline"),
    "interval": ("period", "frequency"),
    "start": ("begin_at", "since", "starting_position"),
    "end": ("until", "stop_at", "ending_position"),
    "routing_key": ("partition_key", "shard_key"),
    "size_bytes": ("bytes_size", "nbytes", "length_bytes"),
    "duration_ms": ("took_ms", "elapsed_ms", "time_taken_ms"),
    "checkpoint": ("checkpoint_number", "chk"),
    "records_in": ("rows_in", "events_in", "input_records"),
    "records_out": ("rows_out", "events_out", "output_records"),
    "checkpoints_kept": ("checkpoints_max", "keep_checkpoints"),
}
"""By name what would be a second one for the same. In front of what is printed and in Python, too."""

KNOWN_SECOND = {
    "checkpoint_dir": "of headgate.testing and Pipeline.override, where dir alone would not say of what",
}


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def options() -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the long names of each of its options."""
    for name, command in commands():
        for option in command.params:
            long = [one for one in option.opts if one.startswith("--")]
            if long:
                yield name, long


def keywords(call: Callable[..., Any]) -> Iterator[str]:
    """Yield what an option for a keyword of ``call`` may be called; of a list, the option gives one at a time."""
    owner = call.__name__.lower() if inspect.isclass(call) else ""
    for name in inspect.signature(call).parameters:
        for one in (name, name.removesuffix("s")):
            yield f"--{one.replace('_', '-')}"
            yield f"--{owner}-{one.replace('_', '-')}"


def test_an_option_of_a_command_has_the_name_of_its_keyword() -> None:
    given = set(EVERYWHERE) | set(ONLY_HERE)
    other = {
        f"{command} {names[0]}"
        for command, names in options()
        if names[0] not in given
        and names[0] not in {one for call in COUNTERPARTS.get(command, ()) for one in keywords(call)}
    }
    assert other == set()


def test_every_exception_is_still_needed() -> None:
    given = {names[0] for _, names in options()}
    assert set(ONLY_HERE) - given == set()
    assert set(COUNTERPARTS) - {command for command, _ in options()} == set()
    assert set(KNOWN_SECOND) - {name for _, name in public_keywords()} == set()


def test_an_option_has_one_long_name() -> None:
    assert [names for _, names in options() if len(names) > 1] == []


def test_one_name_has_one_kind_of_value() -> None:
    """A flag in one command takes no value in another, and none asks for a number where another takes a word."""
    kinds: dict[str, set[str]] = {}
    for _, command in commands():
        for option in command.params:
            for one in option.opts[:1]:
                if one.startswith("--"):
                    kinds.setdefault(one, set()).add("flag" if option.is_flag else "value")
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def public_keywords() -> Iterator[tuple[str, str]]:
    for owner in (hg, testing):
        for name in owner.__all__:
            found = getattr(owner, name)
            calls = [(name, found)] if callable(found) else []
            if inspect.isclass(found):
                calls += [(f"{name}.{n}", f) for n, f in inspect.getmembers(found, inspect.isfunction) if n[0] != "_"]
            for told, call in calls:
                try:
                    yield from ((told, one) for one in inspect.signature(call).parameters)
                except (TypeError, ValueError):
                    continue


def printed_keys() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "src" / "headgate" / "cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                yield from ((path.name, str(key)) for key in keys if re.fullmatch(r"[a-z_]+", str(key)))


def test_nothing_has_a_second_name() -> None:
    second = {one: name for name, others in SECOND_NAMES.items() for one in others if one not in KNOWN_SECOND}
    used = {*public_keywords(), *printed_keys(), *((c, names[0][2:].replace("-", "_")) for c, names in options())}
    assert len(used) > 400
    assert sorted(f"{where}: {name} is called {second[name]}" for where, name in used if name in second) == []


BEGINNING = "import headgate as hg\n"
SINK = ".source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\n"


@pytest.fixture(autouse=True)
def _restore_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(BEGINNING + text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "pipeline = hg.Pipeline('found')\n",
        "p = hg.Pipeline('found')\nother = hg.Pipeline('other')\n",
        "mine = hg.Pipeline('found')\n",
        "def pipeline():\n    return hg.Pipeline('found')\n",
        "mine = hg.Pipeline('found')\nmine.run()\nraise RuntimeError('never reached')\n",
        "mine = hg.Pipeline('found')\nif __name__ == '__main__':\n    raise RuntimeError('never reached')\n",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\np = hg.Pipeline('found')\n",
    ],
)
def test_the_pipeline_of_a_file_is_found(tmp_path: Path, text: str) -> None:
    assert load_pipeline(program(tmp_path, text)).name == "found"


def test_the_pipeline_of_a_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text(BEGINNING + "p = hg.Pipeline('found')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_pipeline("some_module").name == "found"


def test_the_program_sees_its_own_arguments(tmp_path: Path) -> None:
    text = "import sys\np = hg.Pipeline(sys.argv[1])\n"
    assert load_pipeline(program(tmp_path, text), ["from-arguments"]).name == "from-arguments"


def test_functions_of_the_program_travel_by_value(tmp_path: Path) -> None:
    text = "def double(row):\n    return {'n': helper(row['n'])}\ndef helper(n):\n    return n * 2\n"
    text += "p = hg.Pipeline('p')\np.source(hg.FromRows([{'n': 1}])).map(double).sink(hg.Discard())\n"
    pipeline = load_pipeline(program(tmp_path, text))
    assert PROGRAM not in sys.modules
    spec = pipeline.definition().graph.nodes[1].spec
    assert isinstance(spec, RowFunctionSpec)
    arrived = cloudpickle.loads(cloudpickle.dumps(spec.function))
    assert arrived({"n": 4}) == {"n": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no pipeline"),
        ("a = hg.Pipeline('a')\nb = hg.Pipeline('b')\n", "has several pipelines"),
        ("def pipeline():\n    return 5\n", r"must return a headgate.Pipeline, not 5|has no pipeline"),
        ("import sys\nsys.exit(3)\n", "ended itself while it was loaded"),
        ("1 / 0\n", "cannot be loaded"),
        ("def broken(:\n", "cannot be loaded"),
    ],
)
def test_a_program_without_a_pipeline_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_pipeline(program(tmp_path, text))


def test_a_program_that_fails_shows_its_own_frames_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_pipeline(program(tmp_path, "def f():\n    return 1 / 0\nf()\n"))
    assert "ZeroDivisionError" in str(caught.value)
    assert "load.py" not in str(caught.value)


def test_missing_programs_are_named() -> None:
    with pytest.raises(UsageError, match=r"there is no file nowhere.py"):
        load_pipeline("nowhere.py")
    with pytest.raises(UsageError, match=r"neither a file nor a module nowhere.at_all"):
        load_pipeline("nowhere.at_all")


def test_an_error_of_headgate_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^parallelism must be"):
        load_pipeline(program(tmp_path, "p = hg.Pipeline('p', parallelism=0)\n"))
