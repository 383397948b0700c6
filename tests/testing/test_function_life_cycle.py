"""``open`` and ``close`` of function objects: once in each subtask, also when it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.testing import Collect, run

ROWS = [{"k": number % 4, "n": number} for number in range(40)]
RECORDS = {"k": pa.int64(), "n": pa.int64()}


class Client:
    """Writes down what is called. Calls for record ``fails_at`` raise until one that failed was closed."""

    def __init__(self, path: Path, fails_at: int | None = None) -> None:
        self.path, self.fails_at, self.is_open, self.has_failed = path, fails_at, False, False

    def note(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{what}\n")

    def made(self) -> None:
        self.is_open = True
        self.note("open")

    def close(self) -> None:
        assert self.is_open, "closed twice, or never opened"
        self.is_open = False
        self.note("close failed" if self.has_failed else "close")

    def seen(self, number: int) -> None:
        assert self.is_open
        if number == self.fails_at and "failed" not in self.path.read_text():
            self.has_failed = True
            raise ConnectionError("the service is away")


class Row(Client):
    def open(self) -> None:
        self.made()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.seen(row["n"])
        return row


class Rows(Row):
    def __call__(self, row: dict[str, Any]) -> Any:
        return [super().__call__(row)]


class Batch(Row):
    def __call__(self, batch: Any) -> Any:
        for number in batch["n"]:
            self.seen(number)
        return batch


class Both(Row):
    def __call__(self, total: dict[str, Any], row: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().__call__(row)


class Window(Row):
    def __call__(self, key: Any, rows: pl.DataFrame) -> Any:  # type: ignore[override]
        for number in rows["n"]:
            self.seen(number)
        return {"n": rows["n"].sum()}


class Process(Client, hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.made()

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        self.seen(row["n"])
        return [row]


class BatchProcess(Client, hg.BatchProcessFunction):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.made()

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        for number in batch["n"]:
            self.seen(number)
        return batch


class CoProcess(Client, hg.CoProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.made()

    def process_left(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        self.seen(row["n"])
        return [row]

    def process_right(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        return None


Verb = Callable[[hg.Stream, Any], hg.Stream]
SUM = {"n": pa.int64()}
VERBS: dict[str, tuple[type[Client], Verb]] = {
    "map": (Row, lambda stream, function: stream.map(function)),
    "flat_map": (Rows, lambda stream, function: stream.flat_map(function)),
    "filter": (Row, lambda stream, function: stream.filter(function)),
    "map_batches": (Batch, lambda stream, function: stream.map_batches(function, schema=RECORDS)),
    "reduce": (Both, lambda stream, function: stream.key_by("k").reduce(function)),
    "apply": (Window, lambda stream, function: stream.key_by("k").window(hg.Count(5)).apply(function, SUM)),
    "process": (Process, lambda stream, function: stream.key_by("k").process(function)),
    "process batches": (BatchProcess, lambda stream, function: stream.key_by("k").process(function)),
    "process two": (
        CoProcess,
        lambda stream, function: stream.key_by("k").connect(stream.key_by("k")).process(function),
    ),
}
AT_BUILD = ("process", "process batches", "process two")


@pytest.mark.parametrize("fails_at", [None, 22])
@pytest.mark.parametrize("verb", VERBS)
def test_each_subtask_opens_and_closes_its_own_copy(verb: str, fails_at: int | None, tmp_path: Path) -> None:
    kind, build = VERBS[verb]
    path = tmp_path / "calls"
    path.touch()
    pipeline = hg.Pipeline("p", parallelism=2, restart=hg.FixedDelay(delay=0))
    stream = pipeline.source(hg.FromRows(ROWS, schema=RECORDS, batch_rows=8))
    build(stream, kind(path, fails_at)).sink(Collect(tmp_path / "out"))
    calls = Counter(path.read_text().split())
    assert calls == ({"open": 1, "close": 1} if verb in AT_BUILD else {}), "when the pipeline is built"
    run(pipeline)
    calls.update(path.read_text().split()[calls.total() :])
    lives = 1 if fails_at is None else 2
    at_build = 1 if verb in AT_BUILD else 0
    assert calls["open"] == calls["close"]
    unopened = 2 * lives + at_build - calls["open"]
    assert unopened == 0 or (lives == 2 and unopened == 1), "a subtask that starts after the failure opens nothing"
    assert calls["failed"] == lives - 1


class Candle(hg.ProcessFunction):
    """Has a state called as the method, as prices of a day are."""

    schema: Any = {"k": pa.int64(), "close": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.close = state.value("close", pa.int64())  # type: ignore[method-assign, assignment]

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        self.close.put(row["n"])  # type: ignore[attr-defined]
        yield {"k": row["k"], "close": self.close.get()}  # type: ignore[attr-defined]


class Prices:
    """Has values that are called as the methods."""

    def __init__(self) -> None:
        self.open, self.close = 1, 2

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"k": row["k"], "close": row["close"] + self.close}


def test_values_called_open_and_close_are_no_methods(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p")
    stream = pipeline.source(hg.FromRows(ROWS, schema=RECORDS)).key_by("k").process(Candle())
    sink = Collect(tmp_path)
    stream.map(Prices()).sink(sink)
    run(pipeline)
    assert sorted(row["close"] for row in sink.rows()) == [number + 2 for number in range(40)]


class Unreachable:
    def open(self) -> None:
        raise ConnectionError("nothing listens at port 1")

    def __call__(self, row: Any) -> Any:
        return row

    def close(self) -> None:
        raise AssertionError("it was never open")


def test_an_open_that_raises_fails_the_pipeline_in_a_sentence(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", restart=hg.NoRestart())
    pipeline.source(hg.FromRows(ROWS)).map(Unreachable(), name="ask").sink(Collect(tmp_path))
    with pytest.raises(hg.PipelineFailed, match=r"(?s)operator 'ask'.*open\(\).*nothing listens at port 1"):
        run(pipeline)
