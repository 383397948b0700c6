"""Workers that are woken while the pipeline is planned: a session that only remembers what it was asked for."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from headgate.spark import launcher


class Context:
    """What of a SparkContext is needed, and one RDD."""

    def __init__(self, error: Exception | None = None) -> None:
        self.environment: dict[str, str] = {}
        self.pythonExec, self.master = "python-of-spark", "local[2]"
        self.captured: tuple[dict[str, str], str] | None = None
        self.collected = threading.Event()
        self._error = error

    @property
    def sparkContext(self) -> Context:  # noqa: N802
        return self

    def parallelize(self, values: Any, parts: int) -> Context:
        assert parts == len(list(values))
        return self

    def mapPartitions(self, function: Any) -> Context:  # noqa: N802
        return self

    @property
    def _jrdd(self) -> object:
        self.captured = dict(self.environment), self.pythonExec
        return object()

    def collect(self) -> list[Any]:
        self.collected.set()
        if self._error is not None:
            raise self._error
        return []


def test_workers_are_woken_in_the_environment_of_the_pipelines_job() -> None:  # OM10
    context = Context()
    launcher.wake_workers(context, 2)
    assert context.captured == ({launcher.POLARS_THREADS: "1"}, sys.executable)
    assert (context.environment, context.pythonExec) == ({}, "python-of-spark"), "as it was"
    assert context.collected.wait(60)


def test_a_wake_that_fails_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:  # OM10
    heard: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    context = Context(ConnectionError("the JVM is gone"))
    launcher.wake_workers(context, 2)
    assert context.collected.wait(60)
    for thread in [one for one in threading.enumerate() if one.name == "headgate-wake"]:
        thread.join(60)
    assert heard == []
