from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness, encoded

from headgate.errors import UsageError
from headgate.operators.base import RestoredState
from headgate.operators.keys import partition
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_process import (
    BatchContext,
    BatchProcessFunction,
    BatchProcessSpec,
    batch_process_spec,
)
from headgate.operators.process.row_process import ProcessContext, ProcessFunction, StateHandle, row_process_spec
from headgate.operators.user_functions import UserFunctionError

SCHEMA = pa.schema([("key", pa.int64()), ("op", pa.large_string()), ("n", pa.int64())])
SEEN = pa.schema([("key", pa.int64()), ("state", pa.large_string())])
EDGE = pa.struct([("to", pa.int64()), ("via", pa.large_string())])
OPS = """value put; value null; value clear; value min; value max; value add; value last; text put; text clear
list append; list clear; list put; edge append; map put; map remove; map clear; edges map put""".replace("\n", "; ")

Row = tuple[int, str, int]


def edges(n: pl.Series) -> pl.Series:
    """Return structs with a null, a number and a text in turn."""
    to = n.to_frame("n").select(
        to=pl.when(pl.col("n") % 3 == 0).then(None).otherwise("n"), via="e" + pl.col("n").cast(str)
    )
    return to.to_struct("edge")


def edge(n: int) -> dict[str, Any]:
    return {"to": None if n % 3 == 0 else n, "via": f"e{n}"}


class Mutator(BatchProcessFunction):
    """Does what ``op`` says with all rows of a batch at once, one kind of operation after the other."""

    schema = SEEN

    def open(self, state: BatchStateHandle) -> None:
        self.value = state.value("value", pa.int64())
        self.text = state.value("text", pa.list_(pa.string()))
        self.list = state.list("list", pa.int32())
        self.edges = state.list("edges", EDGE)
        self.map = state.map("map", pa.string(), pa.int64())
        self.edge_map = state.map("edge map", pa.int64(), EDGE)

    def process(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame:
        n, text = batch["n"], "m" + (batch["n"] % 3).cast(pl.String)
        on = {op: batch["op"] == op for op in OPS.split("; ")}
        changed = pl.Series([False] * batch.height)
        self.value.put(n, on["value put"])
        self.value.put(pl.Series([None] * batch.height, dtype=pl.Int64), on["value null"])
        self.value.clear(on["value clear"])
        for how in ("min", "max", "add", "last"):
            changed |= self.value.update(n, how, on[f"value {how}"])  # type: ignore[arg-type]
        self.text.put(text.reshape((-1, 1)).cast(pl.List(pl.String)), on["text put"])
        self.text.clear(on["text clear"])
        self.list.clear(on["list clear"])
        self.list.append(n.cast(pl.Int32), on["list append"])
        self.list.put(pl.Series([[v] * (v % 3) for v in n], dtype=pl.List(pl.Int32)), on["list put"])
        self.edges.append(edges(n), on["edge append"])
        self.map.clear(on["map clear"])
        self.map.put(text, n, on["map put"])
        self.map.remove(text, on["map remove"])
        self.edge_map.put(n % 3, edges(n), on["edges map put"])
        told = self.all(context)
        return told.filter(changed) if changed.any() else told.head(0)

    def all(self, context: BatchContext) -> pl.DataFrame:
        """Return all state of the rows' keys, read through every way of reading."""
        key = context.keys.frame()["key"]
        lists = self.list.get().to_list()
        assert self.list.counts().to_list() == [len(elements) for elements in lists]
        assert self.value.exists().to_list() == [value is not None for value in self.value.get()]
        edge_lists = grouped(len(key), *self.edges.explode())
        maps = [dict(pairs) for pairs in grouped(len(key), *self.map.items())]
        edge_maps = [dict(pairs) for pairs in grouped(len(key), *self.edge_map.items())]
        assert self.map.get("m1").to_list() == [m.get("m1") for m in maps]
        assert self.map.contains("m2").to_list() == ["m2" in m for m in maps]
        states = zip(self.value.get(), self.text.get().to_list(), lists, edge_lists, maps, edge_maps, strict=True)
        return pl.DataFrame({"key": key, "state": [told(*state) for state in states]})

    def on_round(self, round: int, context: BatchContext) -> pl.DataFrame:
        return self.all(context)


def told(value: Any, text: Any, elements: Any, edge_list: Any, entries: Any, edge_entries: Any) -> str:
    return repr((value, text, elements, edge_list, sorted(entries.items()), sorted(edge_entries.items())))


def grouped(count: int, rows: pl.Series, *columns: pl.Series) -> list[list[Any]]:
    assert rows.is_sorted()
    found: list[list[Any]] = [[] for _ in range(count)]
    for row, *values in zip(rows, *columns, strict=True):
        found[row].append(values[0] if len(values) == 1 else tuple(values))
    return found


class Model:
    """The same with plain Python objects, key by key; ``changes`` are those that ``update`` must tell."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Any]] = {}

    def process(self, rows: list[Row]) -> list[tuple[int, str]]:
        changed: set[tuple[int, str]] = set()
        for op in OPS.split("; "):
            before = {key: state[0] for key, state in self.keys.items()}
            chosen = [(key, n) for key, this, n in rows if this == op]
            for kind in ("list clear", "map clear"):
                chosen = sorted(chosen) if op == kind else chosen
            for key, n in chosen:
                self.apply(self.keys.setdefault(key, [None, None, [], [], {}, {}]), op, n)
            if op in ("value min", "value max", "value add", "value last"):
                changed |= {(key, op) for key, _ in chosen if self.keys[key][0] != before.get(key)}
        return sorted(changed)

    @staticmethod
    def apply(state: list[Any], op: str, n: int) -> None:
        match op:
            case "value put" | "value last":
                state[0] = n
            case "value null" | "value clear":
                state[0] = None
            case "value min" | "value max":
                state[0] = n if state[0] is None else (min if op == "value min" else max)(n, state[0])
            case "value add":
                state[0] = n + (state[0] or 0)
            case "text put" | "text clear":
                state[1] = [f"m{n % 3}"] if op == "text put" else None
            case "list append":
                state[2].append(n)
            case "list clear" | "list put":
                state[2] = [n] * (n % 3) if op == "list put" else []
            case "edge append":
                state[3].append(edge(n))
            case "map put":
                state[4][f"m{n % 3}"] = n
            case "map remove":
                state[4].pop(f"m{n % 3}", None)
            case "map clear":
                state[4].clear()
            case "edges map put":
                state[5][n % 3] = edge(n)

    def all(self) -> list[tuple[int, str]]:
        return sorted((key, told(*state)) for key, state in self.keys.items() if state != [None, None, [], [], {}, {}])


def in_order(rows: list[Row]) -> list[Row]:
    """Sort as the function does things; clearing a list comes before appending to it."""
    order = OPS.replace("list append; list clear", "list clear; list append")
    order = order.replace("map put; map remove; map clear", "map clear; map put; map remove").split("; ")
    return sorted(rows, key=lambda row: order.index(row[1]))


def spec_of(function: BatchProcessFunction, keys: tuple[str, ...] = ("key",)) -> BatchProcessSpec:
    return batch_process_spec("node", keys, function, SCHEMA)


MUTATOR = spec_of(Mutator())


def batch(rows: Iterable[Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.record_batch([list(column) for column in columns], schema=SCHEMA)


def states(run: Harness) -> list[tuple[int, str]]:
    run.out.batches.clear()
    run.operator.on_round(1)
    return sorted((row["key"], row["state"]) for row in run.out.rows())


def restored(frozen: Any) -> list[tuple[int, str]]:
    payload = b"".join(bytes(memoryview(b)) for b in frozen.encode())
    return states(Harness(MUTATOR, [RestoredState(0, 1, memoryview(payload))]))


ROWS = st.lists(st.tuples(st.integers(-2, 4), st.sampled_from(OPS.split("; ")), st.integers(0, 8)), max_size=12)


@pytest.mark.long
@settings(max_examples=50)
@given(batches=st.lists(ROWS, min_size=1, max_size=8), data=st.data())
def test_every_kind_of_state_does_what_plain_objects_do_with_snapshots_anywhere(
    batches: list[list[Row]], data: st.DataObject
) -> None:
    run, model = Harness(MUTATOR), Model()
    held: list[tuple[Any, list[tuple[int, str]]]] = []
    for rows in batches:
        apply(run, model, rows)
        assert states(run) == model.all()
        match data.draw(st.sampled_from(["go on", "freeze", "freeze", "write", "restore"])):
            case "freeze":
                held.append((run.operator.freeze(), copy.deepcopy(model.all())))
            case "write" if held:
                frozen, expected = held.pop(data.draw(st.integers(0, len(held) - 1)))
                assert restored(frozen) == expected
            case "restore":
                run = Harness(MUTATOR, [encoded(run.operator, run.context)])
    for frozen, expected in held:
        assert restored(frozen) == expected


def apply(run: Harness, model: Model, rows: list[Row]) -> None:
    """Send ``rows`` operation by operation, so that the changes that each tells can be compared."""
    for op in dict.fromkeys(row[1] for row in in_order(rows)):
        chosen = [row for row in rows if row[1] == op]
        run.out.batches.clear()
        run.send(batch(chosen))
        changes = model.process(chosen)
        assert sorted(row["key"] for row in run.out.rows()) == [key for key, _ in changes]


@pytest.mark.long
@settings(max_examples=20)
@given(rows=ROWS, before=st.integers(1, 4), after=st.integers(1, 4))
def test_state_of_p_subtasks_restores_into_q(rows: list[Row], before: int, after: int) -> None:  # KG8
    rows = [(key * 7 + i, op, n) for i, (key, op, n) in enumerate(in_order(rows))]
    model = Model()
    model.process(rows)
    old = [Harness(MUTATOR, subtask=(i, before)) for i in range(before)]
    for run, part in zip(old, partition(batch(rows), ["key"], 128, before), strict=True):
        if part is not None:
            run.send(part)
    snapshots = [run.snapshot() for run in old]
    new = [Harness(MUTATOR, snapshots, subtask=(i, after)) for i in range(after)]
    assert sorted(pair for run in new for pair in states(run)) == model.all()


class ByRow(ProcessFunction):
    """Has the states of ``Mutator`` by row."""

    schema = SEEN

    def open(self, state: StateHandle) -> None:
        self.edge_map = state.map("edge map", pa.int64(), EDGE)
        self.map = state.map("map", pa.string(), pa.int64())
        self.edges = state.list("edges", EDGE)
        self.list = state.list("list", pa.int32())
        self.text = state.value("text", pa.list_(pa.string()))
        self.value = state.value("value", pa.int64())

    def on_round(self, round: int, context: ProcessContext) -> list[dict[str, Any]]:
        maps = dict(self.map.items()), dict(self.edge_map.items())
        state = told(self.value.get(), self.text.get(), self.list.get(), self.edges.get(), *maps)
        return [{"key": context.key, "state": state}]


def test_a_function_by_row_restores_the_state_of_one_by_batch_and_back() -> None:
    by_row = row_process_spec("node", ("key",), ByRow(), SCHEMA)
    assert by_row.state_text() == MUTATOR.state_text()
    run = Harness(MUTATOR)
    run.send(batch((key, op, n) for op in OPS.split("; ") if "clear" not in op for key in (1, 2) for n in (1, 2, 3)))
    expected = states(run)
    assert len(expected) == 2
    there = Harness(by_row, [run.snapshot()])
    assert states(there) == expected
    assert states(Harness(MUTATOR, [there.snapshot()])) == expected


class Using(BatchProcessFunction):
    """Calls what its test wants with its states, the batch and the context."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def open(self, state: BatchStateHandle) -> None:
        self.value = state.value("value", pa.int64())
        self.score = state.value("score", pa.float64())
        self.text = state.value("text", pa.string())
        self.time = state.value("time", pa.timestamp("us"))
        self.flag = state.value("flag", pa.bool_())
        self.list = state.list("list", pa.int64())
        self.map = state.map("map", pa.float64(), pa.int64())

    def process(self, batch: pl.DataFrame, context: BatchContext) -> Any:
        return self.call(self, batch, context)


def use(call: Any, rows: Iterable[Row] = ((1, "", 5), (2, "", 3), (1, "", 4)), **options: Any) -> Harness:
    run = Harness(spec_of(Using(call)), **options)
    run.send(batch(rows))
    return run


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda f, b, c: f.value.put(b["op"]),
            "state 'value' of operator 'node': the values must be int64: the value is int64, which cannot hold str",
        ),
        (lambda f, b, c: f.value.put(b["n"].head(2)), "the values must have 3 rows, .* but has 2"),
        (lambda f, b, c: f.value.put(1, b["n"]), "where= must be a Boolean Series of 3 rows"),
        (lambda f, b, c: f.value.get(keys=b), r"keys= takes what context.lookup\(frame\) returns, not DataFrame"),
        (lambda f, b, c: f.value.update(b["n"], "sum"), 'update knows "min", "max", "add" and "last", not \'sum\''),
        (lambda f, b, c: f.text.update(b["op"], "min"), 'update by "min" needs numbers, .* large_string'),
        (lambda f, b, c: f.time.update(b["n"].cast(pl.Datetime), "add"), 'update by "add" needs numbers'),
        (lambda f, b, c: f.list.append(pl.Series([1, None, 2])), "an element cannot be null; leave such rows out"),
        (lambda f, b, c: f.list.put(pl.Series([[1], [None], []])), "an element cannot be null"),
        (lambda f, b, c: f.map.put(pl.Series([1.0, None, 2.0]), 1), "a map key cannot be null"),
        (lambda f, b, c: f.map.get(float("nan")), "a map key cannot be NaN"),
        (lambda f, b, c: f.map.put(1.0, pl.Series([1, None, 2])), "a value cannot be null"),
        (lambda f, b, c: c.lookup(b.select("n")), "lookup needs the key column 'key'"),
        (lambda f, b, c: c.lookup(pl.DataFrame({"key": [1, None]})), "lookup was given a null key"),
        (lambda f, b, c: b.select("n"), r"a batch of 3 results\nthey must have the columns key: int64"),
        (lambda f, b, c: [1], "a result of type list"),
        (lambda f, b, c: 1 // 0, "failed on a batch of 3 records\n(.|\n)*ZeroDivisionError"),
    ],
)
def test_wrong_use_is_told_with_operator_and_state(call: Any, problem: str) -> None:
    with pytest.raises(UserFunctionError, match=problem) as caught:
        use(call)
    assert "operator 'node'" in str(caught.value)


def test_keys_of_another_subtask_cannot_be_looked_up() -> None:
    def call(function: Using, batch: pl.DataFrame, context: BatchContext) -> None:
        context.lookup(pl.DataFrame({"key": list(range(50))}))

    with pytest.raises(UserFunctionError, match=r"keys of other subtasks, where their state is"):
        use(call, [(0, "", 1)], subtask=(0, 2))


def test_keys_that_are_looked_up_reach_the_same_state() -> None:
    def call(function: Using, batch: pl.DataFrame, context: BatchContext) -> None:
        sums = batch.group_by("key").agg(pl.col("n").sum()).sort("key")
        keys = context.lookup(sums)
        assert keys.frame()["key"].to_list() == [1, 2]
        function.value.put(sums["n"], keys=keys)
        function.list.append(sums["n"], keys=keys)
        function.map.put(1.0, 7, keys=keys)
        assert function.value.get().to_list() == [9, 3, 9]
        assert function.list.explode(batch["n"] < 5)[1].to_list() == [3, 9]
        assert function.list.explode(batch["n"] < 5)[0].to_list() == [1, 2]
        assert function.map.items(batch["n"] == 4)[0].to_list() == [2]

    use(call)


def test_update_marks_one_row_of_each_changed_key_which_holds_the_new_value() -> None:
    seen: list[list[bool]] = []

    def call(function: Using, batch: pl.DataFrame, context: BatchContext) -> None:
        seen.append(function.value.update(batch["n"], "min").to_list())
        seen.append(function.value.update(batch["n"], "min").to_list())
        seen.append(function.value.update(batch["n"], "max", batch["n"] > 3).to_list())
        seen.append(function.value.update(pl.Series([None, -2, 0]), "add").to_list())
        seen.append(function.text.update(pl.Series(["a", "b", "c"]), "last").to_list())
        seen.append(function.text.update(pl.Series(["a", "b", "c"]), "last").to_list())
        assert function.value.get().to_list() == [5, 1, 5]

    use(call)
    assert seen == [
        [False, True, True],
        [False, False, False],
        [True, False, False],
        [False, True, False],
        [False, True, True],
        [False, False, False],
    ]


def test_nan_never_counts_in_a_minimum_and_times_and_flags_have_extremes() -> None:
    nan = float("nan")

    def call(function: Using, batch: pl.DataFrame, context: BatchContext) -> None:
        assert function.score.update(pl.Series([nan, nan, 2.0]), "min").to_list() == [False, False, True]
        assert function.score.get().to_list() == [2.0, None, 2.0]
        assert function.score.update(pl.Series([nan, float("inf"), nan]), "min").to_list() == [False, True, False]
        times = batch["n"].cast(pl.Datetime("us"))
        assert function.time.update(times, "max").to_list() == [True, True, False]
        assert function.time.get().to_list() == [times[0], times[1], times[0]]
        assert function.flag.update(pl.Series([True, True, False]), "min").to_list() == [False, True, True]

    use(call)


def test_rounds_without_state_or_without_interest_call_nothing() -> None:
    class Failing(Using):
        def on_round(self, round: int, context: BatchContext) -> None:
            raise KeyError(round)

    run = Harness(spec_of(Failing(lambda f, b, c: f.value.put(b["n"]))))
    run.operator.on_round(1)
    use(lambda f, b, c: f.value.put(b["n"])).operator.on_round(1)
    run.send(batch([(1, "", 5)]))
    with pytest.raises(UserFunctionError, match="failed on 1 keys at the end of round 2"):
        run.operator.on_round(2)


def test_state_outside_a_call_says_what_to_do() -> None:
    class Early(BatchProcessFunction):
        def open(self, state: BatchStateHandle) -> None:
            state.value("value", int).get()

    with pytest.raises(UsageError, match=r"there is none in open\(\)"):
        spec_of(Early())


def test_large_results_are_sent_on_in_parts() -> None:
    run = use(lambda f, b, c: pl.DataFrame({"key": range(150_000), "op": "", "n": 0}))
    assert [part.num_rows for part in run.out.batches] == [65_536, 65_536, 18_928]


def test_two_subtasks_share_neither_function_nor_state() -> None:
    def call(function: Using, batch: pl.DataFrame, context: BatchContext) -> None:
        assert function.value.get().null_count() == batch.height
        function.value.put(batch["n"])

    spec = spec_of(Using(call))
    for _ in range(2):
        Harness(spec).send(batch([(1, "", 1)]))
    assert not hasattr(spec.function, "value")
