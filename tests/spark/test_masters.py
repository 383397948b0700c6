"""What the URL of a Spark master says, and which are refused before any JVM starts."""

from __future__ import annotations

import pytest

from headgate.errors import UsageError
from headgate.spark.prerequisites import Master, read_master, same_master


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
