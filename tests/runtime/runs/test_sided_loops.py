"""Functions with a broadcast side in the bodies of loops, with the real driver and workers in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.conftest import few
from tests.runtime.runs.test_broadcast import RULE, apart, expected_rules, finished, folded

import headgate as hg
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

TRIP = {"key": int, "n": int, "left": int, "trips": int, "rules": str}
EVENTS = [
    [{"key": n % 7, "n": n, "left": n % 4 + 1, "trips": 0, "rules": ""} for n in range(part * 40, part * 40 + 40)]
    for part in range(3)
]
CHANGES = [[{"rule": n % 3, "value": n} for n in range(part * 40, part * 40 + 40)] for part in range(3)]
TOLD = -1

Row = dict[str, Any]


class Around(hg.BroadcastProcessFunction):
    """Counts trips; every subtask tells what it made of all rules when it hears of the last one."""

    schema = TRIP

    def open(self, state: hg.StateHandle) -> None:
        self.trips = state.map("trips", int, int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        number = self.trips.get(row["n"], 0) + 1
        self.trips.put(row["n"], number)
        yield {**row, "left": row["left"] - 1, "trips": number}

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> Iterator[Row]:
        self.rules.put(row["rule"], folded(self.rules.get(row["rule"], 0), row["value"]))
        told = json.dumps(self.rules.items())
        yield {"key": context.subtask_index, "n": TOLD - row["value"], "left": 0, "trips": TOLD, "rules": told}


class AroundByBatch(hg.BatchBroadcastProcessFunction):
    """The same by batch."""

    schema = TRIP

    def open(self, state: hg.BatchStateHandle) -> None:
        self.trips = state.map("trips", int, int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        numbers = self.trips.get(batch["n"]).fill_null(0) + 1
        self.trips.put(batch["n"], numbers)
        return batch.with_columns(left=pl.col("left") - 1, trips=numbers)

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> pl.DataFrame:
        found = []
        for rule, value in batch.select("rule", "value").rows():
            one = pl.Series([rule])
            self.rules.put(one, folded(self.rules.get(one)[0] or 0, value))
            told = json.dumps([list(row) for row in self.rules.frame().rows()])
            found.append({"key": context.subtask_index, "n": TOLD - value, "left": 0, "trips": TOLD, "rules": told})
        return pl.DataFrame(found, schema={name: pl.String if name == "rules" else pl.Int64 for name in TRIP})


def looping(
    sink: Collect, body: Any, rules: list[Any] | None = None, pause_ms: int = 20, **options: Any
) -> hg.Pipeline:
    """Return a pipeline whose events go through a loop; ``body`` gets it, and the rules, if there are any."""
    options.setdefault("restart", hg.FixedDelay(delay="10ms"))
    options.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    pipeline = hg.Pipeline("p", **{"parallelism": 2, **options})
    events = pipeline.source(ScriptedSource(apart(EVENTS), schema=TRIP, pause_ms=pause_ms), name="events")
    side = None
    if rules is not None:
        side = pipeline.source(ScriptedSource(rules, schema=RULE, pause_ms=20), name="rules").broadcast()
    events.iterate(lambda loop: body(loop, side), name="loop").sink(sink)
    return pipeline


def left(stream: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    """Return what goes round again, and what has ended."""
    return stream.filter(pl.col("left") > 0).rebalance(), stream.filter(pl.col("left") <= 0)


def check_events(rows: list[Row]) -> None:
    """Every event went round as often as it says."""
    trips = {row["n"]: row["trips"] for row in rows if row["n"] >= 0}
    assert Counter(row["n"] for row in rows if row["n"] >= 0) == Counter(range(120))
    assert trips == {n: n % 4 + 1 for n in range(120)}


@pytest.mark.parametrize("function", few([Around(), AroundByBatch()], 1))
def test_a_function_in_a_loop_has_rules_from_outside(tmp_path: Path, function: Any) -> None:
    def body(loop: hg.Stream, rules: Any) -> Any:
        return left(loop.key_by("key").connect(rules).process(function, name="apply"))

    sink = Collect(tmp_path / "out")
    changes = [CHANGES[0], PAUSE, CHANGES[1], PAUSE, FailOnce(tmp_path / "failed"), PAUSE, CHANGES[2], EOF]
    finished(looping(sink, body, changes, parallelism=3), kill_worker_after_checkpoint=1)
    rows = sink.rows()
    check_events(rows)
    told = Counter((row["n"], row["key"]) for row in rows if row["n"] < 0)
    assert told == Counter((TOLD - n, subtask) for n in range(120) for subtask in range(3)), "each rule once in each"
    last = {row["rules"] for row in rows if row["n"] == TOLD - 119}
    assert last == {expected_rules(*CHANGES)}


@pytest.mark.parametrize("function", few([AroundByBatch(), Around()], 1))
def test_a_loop_tells_itself_through_a_broadcast_side(tmp_path: Path, function: Any) -> None:
    """Every record of each trip is told to all subtasks, which must make the same of them in whatever order."""

    def body(loop: hg.Stream, _: Any) -> Any:
        told = loop.select(rule=pl.col("key") % 3, value=pl.col("n") * 10 + pl.col("left"))
        return left(loop.key_by("key").connect(told.broadcast()).process(function, name="apply"))

    sink = Collect(tmp_path / "out")
    finished(looping(sink, body, pause_ms=400, parallelism=3), kill_worker_after_checkpoint=(2, 4))
    rows = sink.rows()
    check_events(rows)
    values = [n * 10 + trip for n in range(120) for trip in range(1, n % 4 + 2)]
    told = Counter((row["n"], row["key"]) for row in rows if row["n"] < 0)
    assert told == Counter((TOLD - value, subtask) for value in values for subtask in range(3))
    alike = {(row["n"], row["rules"]) for row in rows if row["n"] < 0}
    assert len(alike) == len(values), "all subtasks made the same of all that they were told before"


class Rounds(hg.BroadcastProcessFunction):
    """Ends each round with one record of each key, which says what is known of the rules."""

    schema = TRIP | {"round": int}

    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.value("seen", int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        self.seen.put(self.seen.get(0) + 1)

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        self.rules.put(row["rule"], self.rules.get(row["rule"], 0) + row["value"])

    def on_round(self, round: int, context: hg.ProcessContext) -> Iterator[Row]:
        seen, rules = self.seen.get(0), json.dumps(sorted(self.rules.items()))
        yield {"key": context.key, "n": seen, "left": 0, "trips": 0, "rules": rules, "round": round}


# L35, L36
def test_rounds_end_for_functions_with_a_broadcast_side(tmp_path: Path) -> None:
    """Behind the first round all input has ended; each round tells the next one how many keys it had."""

    def body(loop: hg.Stream, rules: Any) -> Any:
        told = loop.connect(rules).process(Rounds(), name="rounds")
        return told, told

    sink = Collect(tmp_path / "out")
    options = {"checkpointing": hg.Checkpointing(interval="20ms"), "restart": hg.FixedDelay(delay="10ms")}
    pipeline = hg.Pipeline("p", parallelism=2, **options)
    events = pipeline.source(ScriptedSource(apart(EVENTS), schema=TRIP, pause_ms=20), name="events").key_by("key")
    rules = pipeline.source(
        ScriptedSource([CHANGES[0], PAUSE, CHANGES[1], EOF], schema=RULE, pause_ms=20), name="rules"
    )
    side = rules.broadcast()
    events.iterate(lambda loop: body(loop, side), name="loop", max_rounds=3).sink(sink)
    finished(pipeline, kill_worker_after_checkpoint=2)
    rows = sorted(sink.rows(), key=lambda row: (row["round"], row["key"]))
    assert [(row["round"], row["key"]) for row in rows] == [(number, key) for number in range(3) for key in range(7)]
    counts = Counter(row["key"] for part in EVENTS for row in part)
    assert [row["n"] for row in rows] == [counts[row["key"]] + row["round"] for row in rows]
    totals = Counter[int]()
    for change in (change for part in CHANGES[:2] for change in part):
        totals[change["rule"]] += change["value"]
    assert {row["rules"] for row in rows} == {json.dumps([list(item) for item in sorted(totals.items())])}


def test_nested_loops_have_broadcast_sides(tmp_path: Path) -> None:
    """The inner one is told by the outer one, the outer one from outside."""

    def spin(inner: hg.Stream, side: hg.Stream) -> Any:
        spun = inner.connect(side).process(Passing("left"), name="spin")
        return left(spun)

    def body(loop: hg.Stream, rules: Any) -> Any:
        told = loop.select(rule=pl.col("key") % 3, value=pl.col("n"))
        spun = loop.with_columns(left=pl.col("n") % 3 + 1).iterate(lambda inner: spin(inner, told.broadcast()))
        stepped = spun.connect(rules).process(Passing("trips"), name="step")
        again = stepped.filter(pl.col("trips") > -2).rebalance()
        return again, stepped.filter(pl.col("trips") <= -2)

    sink = Collect(tmp_path / "out")
    finished(looping(sink, body, [CHANGES[0], EOF]), kill_worker_after_checkpoint=1)
    assert Counter(row["n"] for row in sink.rows()) == Counter(range(120))


class Passing(hg.BroadcastProcessFunction):
    """Takes one from a column."""

    schema = None

    def __init__(self, column: str) -> None:
        self.column = column

    def open(self, state: hg.StateHandle) -> None:
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        yield {**row, self.column: row[self.column] - 1}

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        self.rules.put(row["rule"], row["value"])
