"""Aggregating state by batch: columns instead of a loop, with the same results and the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness
from tests.operators.process.test_row_state import MEAN, Mean, declaring
from tests.state.backends import EACH, Chosen, choose, rows_in

import headgate as hg
from headgate.codec.snapshot import decode_sections
from headgate.errors import UsageError
from headgate.operators.process.connected_process import process_spec
from headgate.operators.specs import state_text

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64())])
SPAN = pa.struct([("first", pa.int64()), ("least", pa.int64()), ("most", pa.int64()), ("last", pa.int64())])
RESULTS = {"key": pa.int64(), "mean": pa.float64(), "span": pa.large_string(), "count": pa.int64()}


class BatchMean(hg.BatchAggregateFunction):
    def partial(self, value: pl.Expr) -> dict[str, pl.Expr]:
        return {"sum": value.sum(), "n": value.len()}

    def merge(self, so_far: dict[str, pl.Expr], more: dict[str, pl.Expr]) -> dict[str, pl.Expr]:
        return {name: so_far[name] + more[name] for name in so_far}

    def result(self, accumulator: dict[str, pl.Expr]) -> pl.Expr:
        return accumulator["sum"] / accumulator["n"]


class Span(hg.AggregateFunction[int, Any, str]):
    """Depends on the order in which values were added."""

    def initial(self) -> Any:
        return dict.fromkeys(("first", "least", "most", "last"))

    def add(self, accumulator: Any, value: int) -> Any:
        some = [value] if accumulator["least"] is None else [value, accumulator["least"], accumulator["most"]]
        first = value if accumulator["first"] is None else accumulator["first"]
        return {"first": first, "least": min(some), "most": max(some), "last": value}

    def result(self, accumulator: Any) -> str:
        return "{first} {least} {most} {last}".format(**accumulator)


class BatchSpan(hg.BatchAggregateFunction):
    def partial(self, value: pl.Expr) -> dict[str, pl.Expr]:
        return {"first": value.first(), "least": value.min(), "most": value.max(), "last": value.last()}

    def merge(self, so_far: dict[str, pl.Expr], more: dict[str, pl.Expr]) -> dict[str, pl.Expr]:
        least = pl.min_horizontal(so_far["least"], more["least"])
        most = pl.max_horizontal(so_far["most"], more["most"])
        return {"last": more["last"], "first": so_far["first"], "least": least, "most": most}

    def result(self, accumulator: dict[str, pl.Expr]) -> pl.Expr:
        return pl.format("{} {} {} {}", *accumulator.values())


class Count(hg.AggregateFunction[int, int, int]):
    def initial(self) -> int:
        return 0

    def add(self, accumulator: int, value: int) -> int:
        return accumulator + 1

    def result(self, accumulator: int) -> int:
        return accumulator


class BatchCount(hg.BatchAggregateFunction):
    """Its accumulator is no struct."""

    def partial(self, value: pl.Expr) -> pl.Expr:
        return value.len()

    def merge(self, so_far: pl.Expr, more: pl.Expr) -> pl.Expr:
        return so_far + more

    def result(self, accumulator: pl.Expr) -> pl.Expr:
        return accumulator


class ByRow(hg.ProcessFunction):
    """Adds to three states; 0 clears, and 9 is nothing. Tells at 8 only, so that both forms tell the same."""

    schema = RESULTS
    ttl: hg.TTL | None = None

    def open(self, state: hg.StateHandle) -> None:
        self.mean = state.aggregating("mean", MEAN, Mean(), ttl=self.ttl)
        self.span = state.aggregating("span", SPAN, Span(), ttl=self.ttl)
        self.count = state.aggregating("count", pa.int64(), Count(), ttl=self.ttl)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        states: list[Any] = [self.mean, self.span, self.count]
        for one in states:
            if row["n"] == 0:
                one.clear()
            elif row["n"] < 8:
                one.add(row["n"])
        if row["n"] == 8:
            mean, span, count = (one.get() for one in states)
            yield {"key": context.key, "mean": mean, "span": span, "count": count}


class ByBatch(hg.BatchProcessFunction):
    """The same, where a batch has rows of one kind only."""

    schema = RESULTS
    ttl: hg.TTL | None = None

    def open(self, state: hg.BatchStateHandle) -> None:
        self.mean = state.aggregating("mean", MEAN, BatchMean(), ttl=self.ttl)
        self.span = state.aggregating("span", SPAN, BatchSpan(), ttl=self.ttl)
        self.count = state.aggregating("count", pa.int64(), BatchCount(), ttl=self.ttl)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        number = batch["n"]
        added = number.set(number > 7, None)
        changed = []
        for one in (self.mean, self.span, self.count):
            one.clear(where=number == 0)
            changed.append(one.add(added, where=number != 0))
            assert one.exists().equals(one.get().is_not_null())
        assert changed[0].equals(changed[2])
        found = {"mean": self.mean.get(), "span": self.span.get(), "count": self.count.get()}
        return batch.with_columns(**found).filter(number == 8).select(list(RESULTS))


def harness(function: Any, states: Any = ()) -> Harness:
    return Harness(process_spec("node", ("key",), function, SCHEMA), states, worker=Chosen.worker)


def sent(run: Harness, *rows: tuple[int, int]) -> list[dict[str, Any]]:
    if rows:
        run.send(pa.RecordBatch.from_pylist([{"key": key, "n": n} for key, n in rows], SCHEMA))
    found = run.out.rows()
    run.out.batches.clear()
    return found


def stored(run: Harness) -> dict[str, list[dict[str, Any]]]:
    found = rows_in(dict(decode_sections(run.snapshot().payload, "test")))
    return {name: sorted(rows, key=lambda row: str(row["key0"])) for name, rows in found.items()}


ADDED = st.lists(st.tuples(st.integers(1, 3), st.sampled_from((*range(1, 8), 9))), max_size=8)
BATCHES = st.lists(st.tuples(ADDED, st.lists(st.integers(1, 3), max_size=2, unique=True)), max_size=4)
ASK = [(key, 8) for key in (1, 2, 3)]


@pytest.mark.parametrize("backend", EACH)
@settings(max_examples=40)
@given(batches=BATCHES, is_swapped=st.booleans())
def test_both_forms_add_up_to_the_same(
    backend: str, batches: list[tuple[list[tuple[int, int]], list[int]]], is_swapped: bool
) -> None:
    """Each goes on, after every batch, with what it or the other form has in its snapshot."""
    with choose(backend):
        row, batch = harness(ByRow()), harness(ByBatch())
        for added, cleared in batches:
            for run in (row, batch):
                sent(run, *added)
                sent(run, *((key, 0) for key in cleared))
            told = sent(row, *ASK)
            assert sent(batch, *ASK) == told
            assert stored(row) == stored(batch)
            first, second = row.snapshot(), batch.snapshot()
            states = (second, first) if is_swapped else (first, second)
            row, batch = harness(ByRow(), [states[0]]), harness(ByBatch(), [states[1]])


def test_both_forms_are_one_state() -> None:
    assert len({state_text(process_spec("node", ("key",), make(), SCHEMA)) for make in (ByRow, ByBatch)}) == 1


class ChangedRows(hg.BatchProcessFunction):
    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.most = state.aggregating("most", pa.int64(), Most())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        found = batch.filter(self.most.add(batch["n"]))
        known = context.lookup(pl.DataFrame({"key": [1]}))
        assert self.most.add(3, keys=known).len() == 1
        return found


class Most(BatchCount):
    def partial(self, value: pl.Expr) -> pl.Expr:
        return value.max()

    def merge(self, so_far: pl.Expr, more: pl.Expr) -> pl.Expr:
        return pl.max_horizontal(so_far, more)


def test_the_last_row_of_each_key_that_changed_is_told() -> None:
    run = harness(ChangedRows())
    assert sent(run, (1, 5), (2, 1), (1, 4)) == [{"key": 2, "n": 1}, {"key": 1, "n": 4}]
    assert sent(run, (1, 5), (2, 2), (1, 4)) == [{"key": 2, "n": 2}]


class Wrong(BatchMean):
    """Wrong in one of its methods."""

    def __init__(self, method: str, made: Callable[..., Any]) -> None:
        setattr(self, method, made)


WRONG = {
    "needs a headgate.BatchAggregateFunction, not": Mean(),
    r"partial must return a dict with the fields \['sum', 'n'\], not \['sum'\]": Wrong(
        "partial", lambda value: {"sum": value.sum()}
    ),
    r"merge must return a dict with the fields \['sum', 'n'\], not Expr": Wrong("merge", lambda a, b: a["sum"]),
    "merge must return expressions, not 1": Wrong("merge", lambda a, b: {"sum": a["sum"], "n": 1}),
    "result must return an expression, not int": Wrong("result", lambda a: 1),
    "result does not work on accumulators: .*no such column": Wrong("result", lambda a: pl.col("no such column")),
    "merge must look at one accumulator of each side only": Wrong(
        "merge", lambda a, b: {"sum": a["sum"].sum() + b["sum"], "n": a["n"]}
    ),
    "merge returns Float64 for 'n', which is Int64; cast it": Wrong(
        "merge", lambda a, b: {"sum": a["sum"], "n": a["n"] / b["n"]}
    ),
    "result must look at one accumulator of each side only": Wrong("result", lambda a: a["sum"].cum_sum()),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_cannot_be_merged_is_told_when_the_pipeline_is_built(said: str) -> None:
    function = declaring(lambda state: state.aggregating("x", MEAN, WRONG[said]), hg.BatchProcessFunction)
    with pytest.raises(UsageError, match=f"operator 'node': aggregating state 'x'.*{said}"):
        process_spec("node", ("key",), function, SCHEMA)


class Nothing(BatchCount):
    def merge(self, so_far: pl.Expr, more: pl.Expr) -> pl.Expr:
        return pl.lit(None)


def test_an_accumulator_is_never_cut() -> None:
    class MeanAsCount(BatchCount):
        def partial(self, value: pl.Expr) -> pl.Expr:
            return value.mean()

    class Counting(hg.BatchProcessFunction):
        def open(self, state: hg.BatchStateHandle) -> None:
            self.count = state.aggregating("count", pa.int64(), MeanAsCount())

        def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
            self.count.add(batch["n"])

    run = harness(Counting())
    sent(run, (1, 4), (1, 6))
    assert stored(run)["count"] == [{"key0": 1, "value": 5}]
    with pytest.raises(Exception, match=r"the result of partial does not fit: .* int64, which cannot hold float 4\.5"):
        sent(run, (1, 4), (1, 5))


def test_null_is_no_accumulator() -> None:
    class Forgetful(hg.BatchProcessFunction):
        def open(self, state: hg.BatchStateHandle) -> None:
            self.count = state.aggregating("count", pa.int64(), Nothing())

        def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
            self.count.add(batch["n"])

    run = harness(Forgetful())
    sent(run, (1, 5))
    with pytest.raises(Exception, match="state 'count' of operator 'node': its function made null"):
        sent(run, (1, 5))
    assert stored(run)["count"] == [{"key0": 1, "value": 1}]


class ExpiringRows(ByRow):
    ttl = hg.TTL("10ms")


class ExpiringBatches(ByBatch):
    ttl = hg.TTL("10ms")


@pytest.mark.parametrize("backend", EACH)
def test_what_expired_is_merged_with_nothing(backend: str) -> None:
    with choose(backend):
        for function in (ExpiringRows(), ExpiringBatches()):
            run = harness(function)
            sent(run, (1, 2), (1, 4))
            run.now_ms += 9
            sent(run, (1, 6))
            assert sent(run, (1, 8)) == [{"key": 1, "mean": 4.0, "span": "2 2 6 6", "count": 3}]
            run.now_ms += 10
            assert sent(run, (1, 8)) == [{"key": 1, "mean": None, "span": None, "count": None}]
            sent(run, (1, 7))
            assert sent(run, (1, 8)) == [{"key": 1, "mean": 7.0, "span": "7 7 7 7", "count": 1}]


class Wider(hg.BatchProcessFunction):
    """A newer program: the accumulator has one more field, and wider ones."""

    schema = {"key": pa.int64(), "mean": pa.float64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        newer = pa.struct([("sum", pa.float64()), ("n", pa.int64()), ("lost", pa.int64())])
        evolution = hg.Evolution(defaults={"lost": 0})
        self.mean = state.aggregating("mean", newer, WiderMean(), evolution=evolution)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        self.mean.add(batch["n"])
        return batch.with_columns(mean=self.mean.get())


class WiderMean(BatchMean):
    def partial(self, value: pl.Expr) -> dict[str, pl.Expr]:
        return {**super().partial(value), "lost": pl.lit(0)}


class OnlyMean(ByRow):
    def open(self, state: hg.StateHandle) -> None:
        self.mean = state.aggregating("mean", pa.struct([("sum", pa.float32()), ("n", pa.int64())]), Mean())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.mean.add(row["n"])
        return iter(())


@pytest.mark.parametrize("backend", EACH)
def test_an_accumulator_evolves(backend: str) -> None:  # EV2
    with choose(backend):
        former = harness(OnlyMean())
        sent(former, (1, 2), (1, 4))
        run = harness(Wider(), [former.snapshot()])
        assert sent(run, (1, 9)) == [{"key": 1, "mean": 5.0}]
