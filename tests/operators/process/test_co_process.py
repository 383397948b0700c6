"""Functions of two keyed streams, by row and by batch, against plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness
from tests.state.backends import IN_FILES, Chosen, choose

import headgate as hg
from headgate.errors import UsageError
from headgate.model.graph import MAIN_INPUT, InputName
from headgate.operators import catalog
from headgate.operators.base import OperatorSpec
from headgate.operators.keys import partition
from headgate.operators.process.co_process import RIGHT_INPUT

LEFT = pa.schema([("customer", pa.large_string()), ("amount", pa.int64())])
RIGHT = pa.schema([("n", pa.int64()), ("payer", pa.large_string())])
RESULT = {"key": str, "what": str, "amount": int, "payments": int}
END_MS = 1_000
Row = dict[str, Any]


class Balance(hg.CoProcessFunction):
    """Tells for each record what its key had from both streams, and all of it at the end."""

    schema = RESULT

    def open(self, state: hg.StateHandle) -> None:
        self.amount = state.value("amount", int)
        self.payments = state.value("payments", int)

    def process_left(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        assert context.key == row["customer"]
        context.timers.register_event_time(END_MS)
        self.amount.put(self.amount.get(0) + row["amount"])
        yield self.now("left", context)

    def process_right(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        assert context.key == row["payer"]
        context.timers.register_event_time(END_MS)
        self.payments.put(self.payments.get(0) + 1)
        yield self.now("right", context)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        yield self.now("end", context)

    def now(self, what: str, context: hg.ProcessContext) -> Row:
        return {"key": context.key, "what": what, "amount": self.amount.get(), "payments": self.payments.get()}


class BatchBalance(hg.BatchCoProcessFunction):
    """The same by batch."""

    schema = RESULT

    def open(self, state: hg.BatchStateHandle) -> None:
        self.amount = state.value("amount", int)
        self.payments = state.value("payments", int)

    def process_left(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        context.timers.register_event_time(END_MS)
        sums = batch.select(pl.col("amount").cum_sum().over("customer")).to_series()
        found = self.amount.get().fill_null(0) + sums
        self.amount.put(found)
        return self.now("left", found, self.payments.get(), context)

    def process_right(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        context.timers.register_event_time(END_MS)
        counts = batch.select(pl.int_range(1, pl.len() + 1).over("payer")).to_series()
        found = self.payments.get().fill_null(0) + counts
        self.payments.put(found)
        return self.now("right", self.amount.get(), found, context)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return self.now("end", self.amount.get(), self.payments.get(), context)

    def now(self, what: str, amount: pl.Series, payments: pl.Series, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().select(
            key="customer", what=pl.lit(what), amount=pl.Series(amount), payments=pl.Series(payments)
        )


def spec(function: Any, left: pa.Schema = LEFT, right: pa.Schema = RIGHT) -> OperatorSpec:
    made = catalog.co_process_spec("node", ("customer",), ("payer",), function, left)
    catalog.output_schemas(made, {MAIN_INPUT: left, RIGHT_INPUT: right}, "node")
    return made


class Group:
    """All subtasks of one operator."""

    def __init__(self, function: Any, parallelism: int, states: Any = ()) -> None:
        made = spec(function)
        places = [(index, parallelism) for index in range(parallelism)]
        self.runs = [Harness(made, states, subtask=at, worker=Chosen.worker) for at in places]

    def send(self, name: InputName, batch: pa.RecordBatch) -> None:
        keys = ("customer",) if name == MAIN_INPUT else ("payer",)
        for run, part in zip(self.runs, partition(batch, keys, 128, len(self.runs)), strict=True):
            if part is not None:
                run.operator.process_input(name, part)

    def rows(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for run in self.runs for row in run.out.rows()]


def model(events: list[tuple[InputName, str, int]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return what is told of each key, in its order."""
    amounts: dict[str, int] = {}
    payments: dict[str, int] = {}
    told: dict[str, list[tuple[Any, ...]]] = {}
    for name, key, n in events:
        if name == MAIN_INPUT:
            amounts[key] = amounts.get(key, 0) + n
        else:
            payments[key] = payments.get(key, 0) + 1
        what = "left" if name == MAIN_INPUT else "right"
        told.setdefault(key, []).append((key, what, amounts.get(key), payments.get(key)))
    for key, rows in told.items():
        rows.append((key, "end", amounts.get(key), payments.get(key)))
    return told


@pytest.mark.parametrize("backend", ["memory", IN_FILES])
@pytest.mark.parametrize("seed", range(6))
def test_both_forms_do_what_plain_python_does_at_any_parallelism(seed: int, backend: str) -> None:
    chance = random.Random(seed)
    keys = [f"k{n}" for n in range(chance.choice([2, 12]))]
    events = [(chance.choice([MAIN_INPUT, RIGHT_INPUT]), chance.choice(keys), n) for n in range(150)]
    told: list[tuple[Any, ...]] = []
    with choose(backend):
        group, at = Group(Balance(), chance.choice([1, 2, 3, 5])), 0
        while at < len(events):
            name = events[at][0]
            size = next((n for n in range(1, 9) if at + n == len(events) or events[at + n][0] != name), 9)
            part = events[at : at + chance.randint(1, size)]
            at += len(part)
            texts, numbers = [key for _, key, _ in part], [n for _, _, n in part]
            columns = [texts, numbers] if name == MAIN_INPUT else [numbers, texts]
            group.send(name, pa.record_batch(columns, schema=LEFT if name == MAIN_INPUT else RIGHT))
            if chance.random() < 0.1:
                told += group.rows()
                states = [run.snapshot() for run in group.runs]
                group = Group(chance.choice([Balance, BatchBalance])(), chance.choice([1, 2, 3, 5]), states)
        for run in group.runs:
            run.operator.on_watermark(END_MS)
        told += group.rows()
    expected = model(events)
    assert {key: [row for row in told if row[0] == key] for key in expected} == expected
    assert len(told) == sum(map(len, expected.values()))


def test_a_left_batch_and_a_right_batch_share_keys_and_context() -> None:
    class Looked(BatchBalance):
        def process_right(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
            keys = context.lookup(batch.select(customer="payer"))
            return self.now("right", self.amount.get(keys=keys), pl.Series([0] * batch.height), context)

    group = Group(Looked(), 1)
    group.send(MAIN_INPUT, pa.record_batch([["a", "b"], [3, 4]], schema=LEFT))
    group.send(RIGHT_INPUT, pa.record_batch([[0, 0], ["b", "a"]], schema=RIGHT))
    assert group.rows()[2:] == [("b", "right", 4, 0), ("a", "right", 3, 0)]


class Named(hg.CoProcessFunction):
    def process(self, row: Row, context: hg.ProcessContext) -> None: ...


@pytest.mark.parametrize(
    ("function", "right", "problem"),
    [
        (Balance(), pa.schema([("payer", pa.int64())]), "'customer' is large_string and 'payer' is int64; cast one"),
        (Balance(), pa.schema([("other", pa.int64())]), "'payer'"),
        (Named(), RIGHT, r"Named\.process would never be called; a function of two streams has process_left"),
        (hg.ProcessFunction(), RIGHT, "a CoProcessFunction or BatchCoProcessFunction is needed .* not ProcessFunction"),
        (Balance, RIGHT, "a CoProcessFunction or BatchCoProcessFunction is needed"),
    ],
)
def test_what_cannot_work_is_refused(function: Any, right: pa.Schema, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        spec(function, right=right)


@pytest.mark.parametrize("schema", [None, {"customer": str, "amount": int}])
def test_results_have_the_columns_of_the_left_stream_or_of_the_schema(schema: Any) -> None:
    class Passed(hg.CoProcessFunction):
        def process_left(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [row]

        def process_right(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [{"customer": row["payer"], "amount": -1}]

    Passed.schema = schema
    run = Harness(spec(Passed()))
    run.operator.process_input(MAIN_INPUT, pa.record_batch([["a"], [3]], schema=LEFT))
    run.operator.process_input(RIGHT_INPUT, pa.record_batch([[0], ["b"]], schema=RIGHT))
    assert run.out.rows() == [{"customer": "a", "amount": 3}, {"customer": "b", "amount": -1}]
