"""Spark's JVM: its process, what it writes, and why it did not start."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import PipelineFailed, UsageError
from headgate.spark import jvm, session
from headgate.spark.jvm import (
    LOG,
    PY4J_TRACEBACKS,
    START_LOG,
    JvmProcess,
    Launch,
    StderrReader,
    adopt_environment,
    cause_of,
    discard_early,
    forget_dead_jvm,
    is_no_py4j_traceback,
    jvm_settings,
    launch_of,
    log_to,
    reason_line,
    session_options,
    start_early,
    startup_errors,
    take_or_start,
)
from headgate.spark.session import find_context, make_context

TELLS = r"""
printf '\0\0\0\7\0\0\0\6secret' > "$_PYSPARK_DRIVER_CONN_INFO_PATH.tmp"
mv "$_PYSPARK_DRIVER_CONN_INFO_PATH.tmp" "$_PYSPARK_DRIVER_CONN_INFO_PATH"
cat
"""
"""What a JVM does: it says where it can be talked to, and ends when its input closes."""


def home_of_spark(directory: Path, script: str) -> Path:
    """Return a home of Spark whose ``spark-submit`` is this script."""
    submit = directory / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return home_of_spark(tmp_path / "spark", TELLS)


@pytest.fixture
def launch(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """How a JVM is begun in the process as it is then."""
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setattr(jvm, "_ahead", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield lambda **settings: launch_of({"spark.x": "1", **settings}, os.environ)
    discard_early()


def is_running(process: JvmProcess) -> bool:
    return process.process.poll() is None


def close(process: JvmProcess) -> None:
    process.end()
    assert not is_running(process)


def test_what_a_command_left_that_was_killed_at_its_start_is_removed_later(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    old, young = tmp_path / f"{jvm.PLACE}old", tmp_path / f"{jvm.PLACE}young"
    for place, age_s in ((old, jvm.OLD_S + 60), (young, 60)):
        place.mkdir()
        (place / "address").touch()
        os.utime(place, (SYSTEM_CLOCK.wall_ms() / 1000 - age_s,) * 2)
    close(JvmProcess(launch()))
    assert not old.exists()
    assert young.exists(), "its JVM may be starting"


def test_a_jvm_that_was_begun_ahead_is_taken(launch: Callable[..., Launch], tmp_path: Path) -> None:
    start_early(launch())
    (ahead,) = jvm._ahead
    found = take_or_start(launch())
    try:
        assert found is ahead
        assert found.address() == (7, "secret")
        assert not list(tmp_path.glob("headgate-gateway-*")), "the secret does not stay"
        discard_early()
        assert is_running(found), "it has been taken"
        other = take_or_start(launch())
        assert other is not ahead
        close(other)
    finally:
        close(found)


def changed_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")


def changed_mask(_: Path) -> None:
    os.umask(0o077)


def changed_environment(_: Path) -> None:
    os.environ["HADOOP_CONF_DIR"] = "/etc/other"


@pytest.mark.parametrize("change", [changed_directory, changed_mask, changed_environment])
def test_what_a_program_changes_while_it_is_loaded_counts(
    launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    mask = os.umask(0o022)
    try:
        start_early(launch())
        (ahead,) = jvm._ahead
        change(tmp_path)
        found = take_or_start(launch())
        assert found is not ahead
        assert not is_running(ahead)
        close(found)
    finally:
        os.umask(mask)


def test_what_the_commands_own_imports_set_does_not_count(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_early(launch())
    (ahead,) = jvm._ahead
    before = dict(os.environ)
    monkeypatch.setenv("OF_A_LIBRARY", "1")
    adopt_environment(before, os.environ)
    found = take_or_start(launch())
    assert found is ahead
    close(found)


def test_a_jvm_with_other_settings_is_another_one(launch: Callable[..., Launch]) -> None:
    start_early(launch())
    (ahead,) = jvm._ahead
    found = take_or_start(launch(**{"spark.driver.memory": "2g"}))
    assert found is not ahead
    assert "spark.driver.memory=2g" in found.launch.command
    assert not is_running(ahead)
    close(found)


def test_a_jvm_that_died_before_it_was_needed_is_replaced(launch: Callable[..., Launch]) -> None:
    start_early(launch())
    (ahead,) = jvm._ahead
    ahead.process.kill()
    ahead.process.wait()
    found = take_or_start(launch())
    assert found is not ahead
    assert found.address() == (7, "secret")
    close(found)


def test_a_fork_leaves_the_jvm_to_its_parent(launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    start_early(launch())
    (ahead,) = jvm._ahead
    with monkeypatch.context() as patch:
        patch.setattr(jvm.os, "getpid", lambda: -1)
        found = take_or_start(launch())
        assert found is not ahead, "it is not the fork's"
        close(found)
    assert is_running(ahead)
    close(ahead)


def test_a_jvm_can_say_its_address_when_its_process_is_dead_and_swept(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """One that cannot write would never come to read its input, whose end is its own."""
    start_early(launch())
    assert [path.parent for path in tmp_path.rglob("headgate-gateway-*")] == [tmp_path]


def test_a_jvm_that_is_waited_for_ends_with_ctrl_c(
    launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know of Ctrl-C, and could not write its address any more."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    started = JvmProcess(replace(launch(), command=("sleep", "600")))
    monkeypatch.setattr(jvm.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        started.address()
    monkeypatch.undo()
    assert started.process.wait() == -signal.SIGKILL
    assert not list(tmp_path.glob("headgate-gateway-*"))


def test_a_jvm_can_say_its_address_when_ctrl_c_came_while_it_was_begun(
    launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would live on for ever: as above."""

    def begun(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jvm.subprocess, "Popen", begun)
    with pytest.raises(KeyboardInterrupt):
        JvmProcess(launch())
    assert list(tmp_path.glob("headgate-gateway-*"))


LEFT = """
import sys
from headgate.spark import jvm
jvm.start_early(jvm.launch_of({}, __import__("os").environ))
print(jvm._ahead[0].process.pid, flush=True)
"""


def test_a_jvm_that_nobody_takes_ends_with_its_process(home: Path, tmp_path: Path) -> None:
    around = {**os.environ, "SPARK_HOME": str(home), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LEFT], env=around, stdout=subprocess.PIPE, check=True, timeout=300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["spark"], "nothing is left"


def test_a_session_of_the_programs_own_ends_the_jvm_that_was_begun_ahead(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_early(launch())
    (ahead,) = jvm._ahead
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace())
    jvm.ensure_jvm({})
    assert not is_running(ahead)
    start_early(launch())
    (ahead,) = jvm._ahead

    class Ended(BaseException):
        """As far as this goes."""

    def check_slots(*_: object) -> None:
        raise Ended

    monkeypatch.setattr(session, "lock_for", lambda _: SimpleNamespace(release=lambda: None))
    monkeypatch.setattr(session, "find_context", lambda *_: SimpleNamespace())
    monkeypatch.setattr(session, "_check_slots", check_slots)
    monkeypatch.setattr(session, "has_finished", lambda _: False)
    plan = SimpleNamespace(config=SimpleNamespace(name="p"), plan=SimpleNamespace(parallelism=1))
    with pytest.raises(Ended):
        session.start_pipeline(plan)  # type: ignore[arg-type]
    assert not is_running(ahead)


UNHAPPY = """WARNING: Using incubator modules: jdk.incubator.vector
Exception in thread "main" org.apache.spark.SparkException: Master must either be yarn or start with spark
\tat org.apache.spark.deploy.SparkSubmit.error(SparkSubmit.scala:1068)
"""
PY4J = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: Could not parse Master URL: 'x'
\tat org.apache.spark.SparkContext.<init>(SparkContext.scala:1)
"""


@pytest.mark.parametrize("words", sorted(PY4J_TRACEBACKS))
def test_of_a_call_that_did_not_end_py4j_prints_no_traceback(words: str) -> None:
    def record(path: str, words: str) -> logging.LogRecord:
        return logging.LogRecord("root", logging.ERROR, path, 1, words, (), None)

    from py4j import java_gateway  # type: ignore[import-untyped]

    assert f'"{words}")' in Path(java_gateway.__file__).read_text(), "py4j says something else by now"
    assert not is_no_py4j_traceback(record(java_gateway.__file__, words))
    assert is_no_py4j_traceback(record(java_gateway.__file__, "something else"))
    assert is_no_py4j_traceback(record(__file__, words)), "of a program's own"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (UNHAPPY, "Master must either be yarn or start with spark"),
        ("Error: VM option 'x'\nError: Could not create the Java Virtual Machine.\n", "Error: VM option 'x'"),
        ("/x/bin/java: not found\n", "/x/bin/java: not found"),
        ("WARNING: Using incubator modules: x\n", ""),
        ("", ""),
    ],
)
def test_the_telling_line_of_a_jvm_is_found(written: str, told: str) -> None:
    assert reason_line(written.splitlines()) == told


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (PY4J, "Could not parse Master URL: 'x'"),
        ("java.lang.OutOfMemoryError: Java heap space", "Java heap space"),
        ("Answer from Java side is empty", "Answer from Java side is empty"),
        ("", ""),
    ],
)
def test_what_java_says_is_read_without_classes_and_frames(text: str, cause: str) -> None:
    assert cause_of(text) == cause


@pytest.fixture
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark as in a process that has not started a JVM."""
    for name in ("_gateway", "_jvm", "_active_spark_context"):
        monkeypatch.setattr(SparkContext, name, None)
    for name in ("HEADGATE_MASTER", "PYSPARK_GATEWAY_PORT", "SPARK_CONF_DIR", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)


def spark_home(directory: Path, script: str) -> Path:
    """Return a home of Spark whose ``spark-submit`` is this script."""
    submit = directory / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    return directory


@pytest.mark.usefixtures("no_jvm")
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'Exception in thread \"main\" a.B: no room' >&2; exit 1", "session started: no room; 'headgate doctor'"),
        ("kill -9 $$", "session started, and left no word; it may have been killed"),
        ("kill -15 $$", "session started: SIGTERM ended it, as it ends all processes"),
        ("exit 143", "session started: SIGTERM ended it, as it ends all processes"),
    ],
)
def test_a_jvm_that_dies_while_it_starts_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str, told: str
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path, script)))
    monkeypatch.setattr("headgate.spark.prerequisites.java_problem", lambda *_: None)
    with pytest.raises(PipelineFailed, match=told) as raised:
        make_context("p", 1, "local[1]")
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None  # no page of py4j's either
    assert capfd.readouterr().err == ""
    with pytest.raises(PipelineFailed, match=told):  # and nothing of it is in the way of the next try
        make_context("p", 1, "local[1]")


@pytest.mark.usefixtures("no_jvm")
def test_no_java_and_no_master_are_told_before_a_jvm_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr("headgate.spark.session.ensure_jvm", lambda _: pytest.fail("a JVM was started"))
    with pytest.raises(UsageError, match="is not the URL of a Spark master"):
        make_context("p", 1, "nonsense")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"JAVA_HOME is .*; 'headgate doctor' checks the rest"):
        make_context("p", 1, "local")


@pytest.mark.usefixtures("no_jvm")
def test_a_program_of_spark_submit_runs_where_that_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    given: list[dict[str, Any]] = []

    def builder(options: dict[str, str]) -> None:
        given.append(options)
        raise PipelineFailed("enough")

    monkeypatch.setattr("headgate.spark.session.ensure_jvm", builder)
    with pytest.raises(PipelineFailed, match="enough"):
        make_context("p", 2, None)
    assert "spark.master" not in given[0]
    assert session_options("p", "local[2]")["spark.master"] == "local[2]"


@pytest.mark.usefixtures("no_jvm")
def test_what_spark_raises_becomes_one_sentence() -> None:
    said = r"^Spark could not start the session: Could not parse Master URL: 'x'$"
    with pytest.raises(PipelineFailed, match=said), startup_errors():
        raise RuntimeError(PY4J)
    with pytest.raises(UsageError, match="as it is"), startup_errors():
        raise UsageError("as it is")


@pytest.mark.usefixtures("no_jvm")
def test_a_jvm_that_died_is_forgotten_so_that_another_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        gateway = SimpleNamespace(proc=process, shutdown=lambda: None)
        monkeypatch.setattr(SparkContext, "_gateway", gateway)
        monkeypatch.setattr(SparkSession, "_instantiatedSession", "a session")
        forget_dead_jvm()
        assert SparkContext._gateway is gateway  # it lives
        process.kill()
        process.wait()
        with pytest.raises(PipelineFailed, match="it may have been killed"), startup_errors():
            raise RuntimeError("Answer from Java side is empty")
    assert SparkContext._gateway is None
    assert SparkSession._instantiatedSession is None


@pytest.mark.usefixtures("no_jvm")
def test_a_master_that_a_session_would_ignore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(master="local[2]")
    session = SimpleNamespace(sparkContext=context)
    assert find_context(session, None) is find_context(context, None) is context
    assert find_context(session, "local[2]") is context
    with pytest.raises(UsageError, match=r"'yarn' is given, .* which is on 'local\[2\]': leave the master out"):
        find_context(session, "yarn")
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)  # of another thread
    with pytest.raises(UsageError, match="leave the master out"):
        find_context(None, "yarn")


def listening(*written: str, passes_on: bool = False) -> StderrReader:
    """Return a listener to a JVM that has written this and ended."""
    source, sink = os.pipe()
    listener = StderrReader(source)
    if passes_on:
        listener.pass_on()
    with os.fdopen(sink, "w") as jvm:
        print(*written, sep="\n", file=jvm)
    return listener


def test_what_a_jvm_writes_is_kept_and_then_passed_on_without_noise(capsys: pytest.CaptureFixture[str]) -> None:
    noise = "WARNING: Using incubator modules: x"
    early = listening(noise, "early")
    assert early.heard() == [noise, "early"]
    assert capsys.readouterr().err == ""
    early.pass_on()
    assert early.heard() == []
    assert capsys.readouterr().err == "early\n"
    late = listening(noise, "late", passes_on=True)
    assert late.heard() == []
    assert capsys.readouterr().err == "late\n"
    early.hush()
    late.hush()


class Java:
    """What ``log_to`` uses of a JVM."""

    def __init__(self, log: str | None) -> None:
        self.log = log
        self.read_anew = 0
        system = SimpleNamespace(getProperty=lambda _: self.log, setProperty=self.set)
        configurator = SimpleNamespace(reconfigure=self.reconfigure)
        log4j = SimpleNamespace(core=SimpleNamespace(config=SimpleNamespace(Configurator=configurator)))
        self.java = SimpleNamespace(lang=SimpleNamespace(System=system))
        self.org = SimpleNamespace(apache=SimpleNamespace(logging=SimpleNamespace(log4j=log4j)))

    def set(self, name: str, value: str) -> None:
        assert name == LOG
        self.log = value

    def reconfigure(self) -> None:
        self.read_anew += 1


@pytest.fixture
def java(no_jvm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Java:
    """A JVM that has written a warning while it started."""
    (tmp_path / START_LOG).write_text("WARN of the start\n")
    found = Java(str(tmp_path / START_LOG))
    monkeypatch.setattr(SparkContext, "_jvm", found)
    return found


def test_warnings_of_the_start_go_to_the_log_of_the_pipeline(java: Java, tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text("of another day\n")
    log_to(log)
    assert log.read_text() == "of another day\nWARN of the start\n"
    assert (java.log, java.read_anew) == (str(log), 1)
    log_to(log)
    assert (log.read_text().count("start"), java.read_anew) == (1, 1)


def test_a_second_pipeline_has_a_log_of_its_own(java: Java, tmp_path: Path) -> None:
    log_to(tmp_path / "spark.log")
    log_to(tmp_path / "other.log")
    assert java.log == str(tmp_path / "other.log")
    assert not (tmp_path / "other.log").exists(), "what the first one was told is not told again"


def test_a_jvm_that_others_have_told_where_to_log_is_left_alone(java: Java, tmp_path: Path) -> None:
    log_to(None)
    java.log = None
    log_to(tmp_path / "spark.log")
    assert (java.log, java.read_anew) == (None, 0)


def test_a_jvm_is_told_nothing_of_its_pipeline() -> None:
    one, other = session_options("one", "local[2]"), session_options("other", "local[*]")
    assert one != other
    assert jvm_settings(one) == jvm_settings(other)
    assert jvm_settings(session_options("one", "yarn"))["spark.app.name"] == "headgate-one"


STARTED = """
import sys
from headgate.spark.jvm import temporary_directory
path = temporary_directory()
(path / "blockmgr-1").mkdir()
(path / "blockmgr-1" / "block").write_text("x")
assert temporary_directory() == path
print(path, flush=True)
sys.stdin.read()
"""


def begun(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a directory, until its input closes."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", STARTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def ended(child: subprocess.Popen[str], number: int = 0) -> None:
    if number:
        child.send_signal(number)
    child.communicate(timeout=120)


def test_nobody_removes_the_directory_of_a_living_process(tmp_path: Path) -> None:
    first, mine = begun(tmp_path)
    second, other = begun(tmp_path)
    assert mine != other
    assert (mine / "blockmgr-1" / "block").exists()
    for child in (first, second):
        ended(child)
        assert child.returncode == 0
    assert list(tmp_path.iterdir()) == [], "whoever ends well leaves nothing"


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path: Path) -> None:
    killed, left = begun(tmp_path)
    frozen, kept = begun(tmp_path)
    ended(killed, signal.SIGKILL)
    frozen.send_signal(signal.SIGSTOP)
    assert (left / "blockmgr-1").exists()
    third, _ = begun(tmp_path)
    assert not left.exists()
    assert kept.exists(), "a process that stands still is not dead"
    frozen.send_signal(signal.SIGCONT)
    for child in (third, frozen):
        ended(child)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_the_directory_to_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "_own", [])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr(jvm.atexit, "register", lambda *call: registered.append(call))
    path = jvm.temporary_directory()
    assert path is not None
    ((remove, _, own),) = registered
    remove(os.getpid() + 1, own)  # type: ignore[operator]
    assert path.is_dir()
    remove(os.getpid(), own)  # type: ignore[operator]
    assert not path.exists()


def test_without_a_directory_spark_does_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "_own", [])
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    assert jvm.temporary_directory() is None
    assert jvm.temporary_file_options(None) == ({}, "")


def test_headgate_may_be_installed_in_a_directory_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark takes options of a JVM apart at spaces, and log4j decodes the URL."""
    monkeypatch.setattr(jvm, "__file__", "/opt/a b%/headgate/spark/jvm.py")
    url = "file:///opt/a%20b%25/headgate/spark/log4j2-quiet.properties"
    found = jvm.log_options(None, is_local=False)
    assert found == [f"-Dlog4j2.configurationFile={url}", f"-Dlog4j.configurationFile={url}"]
