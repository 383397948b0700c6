"""Counters of the user's functions: exact totals of the pipeline, whoever counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.killing import run_killing

import headgate as hg
from headgate.model.progress import Progress, SilentObserver
from headgate.testing import Collect, run

RECORDS = {"k": pa.int64(), "n": pa.int64()}


class Counts:
    """Counts records, and the even ones among them."""

    even: hg.Counter

    def __init__(self) -> None:
        self.seen = hg.Counter("seen")

    def count(self, numbers: Any) -> None:
        for number in numbers:
            self.seen.add()
            if number % 2 == 0:
                self.even.add()


class Row(Counts):
    def open(self) -> None:
        self.even = hg.Counter("even")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.count([row["n"]])
        return row


class Batch(Counts):
    """Without ``open``: it is called once while the pipeline is built, which does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.even = hg.Counter("even")

    def __call__(self, batch: pl.DataFrame) -> pl.DataFrame:
        self.seen.add(batch.height)
        self.even.add(batch.filter(pl.col("n") % 2 == 0).height)
        return batch


class Process(Counts, hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.even = hg.Counter("even")

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        self.count([row["n"]])
        return [row]


class BatchProcess(Counts, hg.BatchProcessFunction):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.even = hg.Counter("even")

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        self.count(batch["n"])
        return batch


VERBS: dict[str, Callable[[hg.Stream], hg.Stream]] = {
    "map": lambda stream: stream.map(Row(), name="counts"),
    "map_batches": lambda stream: stream.map_batches(Batch(), name="counts"),
    "process": lambda stream: stream.key_by("k").process(Process(), name="counts"),
    "process batches": lambda stream: stream.key_by("k").process(BatchProcess(), name="counts"),
}


class Seen(SilentObserver):
    last: Progress

    def on_progress(self, progress: Progress) -> None:
        self.last = progress


@pytest.mark.parametrize("verb", VERBS)
def test_counts_are_exact_when_a_worker_is_killed(verb: str, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    source = hg.Generator({"k": hg.Uniform(0, 9), "n": hg.RowNumber()}, rows=4_000, rows_per_second=8_000)
    VERBS[verb](pipeline.source(source).select("k", "n")).sink(Collect(tmp_path))
    seen = Seen()
    assert run_killing(pipeline, 2, observer=seen).restarts == 1
    (node,) = (node for node in seen.last.nodes if node.node == "counts")
    assert dict(node.counters) == {"seen": 4_000, "even": 2_000}


@pytest.mark.parametrize("name", ["", "Rejected", "1st", "two words", "records_in", "late", "busy", 7])
def test_a_name_that_cannot_be_shown_or_is_taken_is_refused(name: Any) -> None:
    with pytest.raises(hg.UsageError, match="a counter"):
        hg.Counter(name)


@pytest.mark.parametrize("amount", [-1, 1.5, True, "1"])
def test_a_counter_only_counts_up(amount: Any) -> None:
    with pytest.raises(hg.UsageError, match="counter 'seen' adds a whole number from 0 on"):
        hg.Counter("seen").add(amount)


LONELY = hg.Counter("lonely")


def count_it(row: dict[str, Any]) -> dict[str, Any]:
    LONELY.add()
    return row


def test_a_counter_of_no_function_says_where_it_belongs(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", restart=hg.NoRestart())
    stream = pipeline.source(hg.FromRows([{"n": 1}]))
    stream.map(count_it).sink(Collect(tmp_path))
    with pytest.raises(hg.PipelineFailed, match="counter 'lonely' belongs to no operator; make it an attribute"):
        run(pipeline)
