"""Reading a source by hand, as a worker would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.connectors.base import Source, SourceContext, SourceReader
from headgate.environment import SYSTEM_CLOCK


def context(
    subtask_index: int = 0,
    parallelism: int = 1,
    positions: dict[str, bytes] | None = None,
    clock_ms: Callable[[], int] = SYSTEM_CLOCK.monotonic_ms,
) -> SourceContext:
    return SourceContext("pipeline", "source", subtask_index, parallelism, positions, clock_ms=clock_ms)


def read_all(
    reader: SourceReader, polls_max: int = 100_000, until: Callable[[], bool] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Poll until the reader has finished, or until ``until``; return the records and the bad records."""
    rows: list[dict[str, Any]] = []
    bad: list[dict[str, Any]] = []
    for _ in range(polls_max):
        if reader.is_finished() or (until is not None and until()):
            return rows, bad
        batch = reader.poll()
        if batch is not None:
            rows += batch.batch.to_pylist()
            bad += batch.bad.to_pylist() if batch.bad is not None else []
    raise AssertionError(f"not finished after {polls_max} polls")


def read_over_subtasks(source: Source, parallelism: int) -> list[dict[str, Any]]:
    """Read everything with ``parallelism`` readers."""
    source.schema()
    rows: list[dict[str, Any]] = []
    for index in range(parallelism):
        rows += read_all(source.open(context(index, parallelism)))[0]
    return rows
