"""A JVM that does not come up is one sentence: what it wrote last, without its frames. None of these is a real one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from headgate.errors import PipelineFailed, UsageError
from headgate.spark.jvm import (
    StderrReader,
    cause_of,
    forget_dead_jvm,
    is_no_py4j_traceback,
    log_to,
    reason_line,
    startup_errors,
)
from headgate.spark.jvm_settings import LOG, START_LOG, jvm_settings, session_options
from headgate.spark.session import find_session, make_session

UNHAPPY = """WARNING: Using incubator modules: jdk.incubator.vector
Exception in thread "main" org.apache.spark.SparkException: Master must either be yarn or start with spark
\tat org.apache.spark.deploy.SparkSubmit.error(SparkSubmit.scala:1068)
"""
PY4J = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: Could not parse Master URL: 'x'
\tat org.apache.spark.SparkContext.<init>(SparkContext.scala:1)
"""


def test_of_a_jvm_that_ended_py4j_prints_no_traceback() -> None:
    def record(path: str, words: str) -> logging.LogRecord:
        return logging.LogRecord("root", logging.ERROR, path, 1, words, (), None)

    from py4j import java_gateway  # type: ignore[import-untyped]

    words = "Exception while sending command."
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
    ],
)
def test_a_jvm_that_dies_while_it_starts_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str, told: str
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path, script)))
    monkeypatch.setattr("headgate.spark.prerequisites.java_problem", lambda *_: None)
    with pytest.raises(PipelineFailed, match=told) as raised:
        make_session("p", 1, "local[1]")
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None  # no page of py4j's either
    assert capfd.readouterr().err == ""
    with pytest.raises(PipelineFailed, match=told):  # and nothing of it is in the way of the next try
        make_session("p", 1, "local[1]")


@pytest.mark.usefixtures("no_jvm")
def test_no_java_and_no_master_are_told_before_a_jvm_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr("headgate.spark.session.ensure_jvm", lambda _: pytest.fail("a JVM was started"))
    with pytest.raises(UsageError, match="is not the URL of a Spark master"):
        make_session("p", 1, "nonsense")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"JAVA_HOME is .*; 'headgate doctor' checks the rest"):
        make_session("p", 1, "local")


@pytest.mark.usefixtures("no_jvm")
def test_a_program_of_spark_submit_runs_where_that_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    given: list[dict[str, Any]] = []

    def builder(options: dict[str, str]) -> None:
        given.append(options)
        raise PipelineFailed("enough")

    monkeypatch.setattr("headgate.spark.session.ensure_jvm", builder)
    with pytest.raises(PipelineFailed, match="enough"):
        make_session("p", 2, None)
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
    assert find_session(session, None) is session
    assert find_session(session, "local[2]") is session
    with pytest.raises(UsageError, match=r"'yarn' is given, .* which is on 'local\[2\]': leave the master out"):
        find_session(session, "yarn")
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)  # a session of another thread
    with pytest.raises(UsageError, match="leave the master out"):
        find_session(None, "yarn")


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


def test_warnings_of_the_start_go_to_the_log_of_the_pipeline(java: Java, tmp_path: Path) -> None:  # OM13
    log = tmp_path / "spark.log"
    log.write_text("of another day\n")
    log_to(log)
    assert log.read_text() == "of another day\nWARN of the start\n"
    assert (java.log, java.read_anew) == (str(log), 1)
    log_to(log)
    assert (log.read_text().count("start"), java.read_anew) == (1, 1)


def test_a_second_pipeline_has_a_log_of_its_own(java: Java, tmp_path: Path) -> None:  # OM13
    log_to(tmp_path / "spark.log")
    log_to(tmp_path / "other.log")
    assert java.log == str(tmp_path / "other.log")
    assert not (tmp_path / "other.log").exists(), "what the first one was told is not told again"


def test_a_jvm_that_others_have_told_where_to_log_is_left_alone(java: Java, tmp_path: Path) -> None:  # OM13
    log_to(None)
    java.log = None
    log_to(tmp_path / "spark.log")
    assert (java.log, java.read_anew) == (None, 0)


def test_a_jvm_is_told_nothing_of_its_pipeline() -> None:  # OM10
    one, other = session_options("one", "local[2]"), session_options("other", "local[*]")
    assert one != other
    assert jvm_settings(one) == jvm_settings(other)
    assert jvm_settings(session_options("one", "yarn"))["spark.app.name"] == "headgate-one"
