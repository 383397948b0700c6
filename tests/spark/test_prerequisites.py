"""What must be there before a JVM is started: master, Java, Spark."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.servers.processes import LOOPBACK, Port

from headgate.errors import PipelineFailed, UsageError
from headgate.spark.prerequisites import (
    REACH_S,
    Master,
    answers,
    check_prerequisites,
    java_problem,
    own_settings,
    read_master,
    same_master,
    spark_home_problem,
)


@pytest.mark.parametrize(
    ("url", "master"),
    [
        ("local", Master("local", slots=1)),
        ("local[3]", Master("local[3]", slots=3)),
        ("local[3, 2]", Master("local[3,2]", slots=3)),
        ("local[*]", Master("local[*]", has_all_processors=True)),
        ("local-cluster[2, 3, 1024]", Master("local-cluster[2,3,1024]", slots=6)),
        ("yarn", Master("yarn")),
        ("spark://a:7077", Master("spark://a:7077", endpoints=(("a", 7077),))),
        ("spark://a:1,[::1]:2", Master("spark://a:1,[::1]:2", endpoints=(("a", 1), ("::1", 2)))),
        ("k8s://https://a", Master("k8s://https://a", endpoints=(("a", 443),))),
        ("k8s://a:6443", Master("k8s://a:6443", endpoints=(("a", 6443),))),
    ],
)
def test_a_master_is_read(url: str, master: Master) -> None:
    assert read_master(url) == master


@pytest.mark.parametrize(
    "url",
    [
        "",
        "foo",
        "local[x]",
        "local[0]",
        "local[2",
        "spark:/a",
        "spark://",
        "spark://a",
        "spark://a:x",
        "k8s://",
        "mesos://a",
    ],
)
def test_what_is_no_master_is_refused_with_those_there_are(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not the URL of a Spark master; give local\[N\], spark://HOST:PORT"):
        read_master(url)


def test_spark_connect_is_not_there_yet() -> None:
    with pytest.raises(UsageError, match="Spark Connect, on which pipelines do not run yet"):
        read_master("sc://a:15002")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("local", "local[1]", True),
        ("local[2, 3]", "local[2,3]", True),
        ("k8s://a:6443", "k8s://https://a:6443", True),
        ("spark://a:1/", "spark://a:1", True),
        ("local[2]", "local[3]", False),
        ("yarn", "local", False),
    ],
)
def test_a_master_is_known_however_it_is_written(one: str, other: str, is_same: bool) -> None:
    assert same_master(one, other) == is_same


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
        assert answers(listener.getsockname(), 60.0)
    with closing(Port()) as silent:
        assert not answers((LOOPBACK, silent.number), 60.0)
    assert not answers(("no.such.host.invalid", 1), 5.0)
