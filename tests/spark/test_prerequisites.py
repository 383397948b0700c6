"""What is missing before Spark starts is one sentence, without a JVM."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.errors import PipelineFailed, UsageError
from headgate.spark.prerequisites import (
    REACH_S,
    answers,
    check_prerequisites,
    java_problem,
    own_settings,
    read_master,
    spark_home_problem,
)


def only(*programs: str) -> Callable[[str], str | None]:
    return lambda program: program if program in programs else None


def test_a_java_that_is_there_is_no_problem() -> None:
    assert java_problem({}, only("java")) is None
    assert java_problem({"JAVA_HOME": "/jdk"}, only("/jdk/bin/java")) is None
    assert java_problem({"JAVA_HOME": ""}, only("java")) is None


def test_a_dead_java_home_is_named_even_if_there_is_another_java() -> None:
    assert java_problem({"JAVA_HOME": "/gone"}, only("java")) == (
        "JAVA_HOME is /gone, but there is no /gone/bin/java: correct JAVA_HOME, or unset it"
    )


def test_without_java_it_is_said_how_to_get_it() -> None:
    assert (java_problem({}, only()) or "").startswith("there is no java on the PATH: install Java 17")


def test_a_dead_spark_home_is_named() -> None:
    assert spark_home_problem({}, only()) is None
    assert spark_home_problem({"SPARK_HOME": "/spark"}, only("/spark/bin/spark-submit")) is None
    assert spark_home_problem({"SPARK_HOME": "/gone"}, only()) == (
        "SPARK_HOME is /gone, but there is no /gone/bin/spark-submit: unset SPARK_HOME to use the Spark that came with "
        "PySpark"
    )


def test_settings_of_the_users_own_may_name_a_java_that_is_not_known_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert own_settings({}) == []
    assert own_settings({"SPARK_CONF_DIR": "/c", "SPARK_HOME": "/s"}) == [
        Path("/c/spark-env.sh"),
        Path("/s/conf/spark-env.sh"),
    ]
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("JAVA_HOME", "/gone")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with pytest.raises(UsageError, match="JAVA_HOME is /gone"):
        check_prerequisites(read_master("local"))
    (tmp_path / "spark-env.sh").touch()
    check_prerequisites(read_master("local"))


def test_a_program_that_was_submitted_needs_no_java_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/gone")
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    check_prerequisites(read_master("yarn"))


def test_a_master_that_does_not_answer_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[tuple[str, int], float]] = []

    def nobody(endpoint: tuple[str, int], timeout_s: float) -> bool:
        tried.append((endpoint, timeout_s))
        return False

    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr("headgate.spark.prerequisites.answers", nobody)
    with pytest.raises(PipelineFailed, match=r"cannot be reached: nothing accepts connections at a:1 or \[::2\]:3;"):
        check_prerequisites(read_master("spark://a:1,[::2]:3"))
    assert [endpoint for endpoint, _ in tried] == [("a", 1), ("::2", 3)]
    assert sum(timeout_s for _, timeout_s in tried) <= REACH_S  # all hosts together
    monkeypatch.setattr("headgate.spark.prerequisites.answers", lambda endpoint, _: endpoint[0] != "a")
    check_prerequisites(read_master("spark://a:1,b:2"))  # one of several is enough


def test_who_answers_is_tried_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        assert answers(listener.getsockname(), 5.0)
        place = listener.getsockname()
    assert not answers(place, 5.0)
    assert not answers(("no.such.host.invalid", 1), 5.0)
