"""A join with a broadcast table, against a naive one over random rows, changes, batches and restores."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few
from tests.operators.harness import Harness

from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN, MAIN_INPUT
from headgate.operators.base import WATERMARK_MAX_MS, RestoredState
from headgate.operators.joins.broadcast_join import HOWS, BroadcastJoinSpec, TableOrderSpec

LEFT = pa.schema([("id", pa.int64()), ("a", pa.large_string()), ("b", pa.int64()), ("v", pa.int64())])
TABLE = pa.schema([("v", pa.int64()), ("x", pa.large_string()), ("y", pa.int64()), ("name", pa.large_string())])
CHANGES = pa.schema([*TABLE, ("op", pa.large_string())])
Row = dict[str, Any]


def spec(how: str = "inner", *, waits: bool = False, has_changes: bool = False, **other: Any) -> BroadcastJoinSpec:
    table = CHANGES if has_changes else TABLE
    given: dict[str, Any] = {"left_keys": ("a", "b"), "right_keys": ("x", "y"), "suffix": "_right", **other}
    return BroadcastJoinSpec(LEFT, table, how=how, waits=waits, has_changes=has_changes, **given)


class Group:
    """All subtasks of a join; the table comes to each of them through the operator that orders it."""

    def __init__(self, made: BroadcastJoinSpec, parallelism: int, states: Any = ((), ())) -> None:
        self.runs = [Harness(made, subtask=(index, parallelism)) for index in range(parallelism)]
        for run in self.runs:
            run.operator.restore(states[0])
            run.operator.restore_broadcast(states[1])
        order = TableOrderSpec(is_timed=False, by_row=False, keys=made.right_keys, schema=made.right)
        self.order = Harness(order)

    def table(self, rows: list[Row], schema: pa.Schema) -> None:
        self.order.send(pa.RecordBatch.from_pylist(rows, schema=schema))
        self._deliver()

    def end_table(self) -> None:
        self.order.operator.finish()
        self._deliver()

    def _deliver(self) -> None:
        batches, self.order.out.batches = self.order.out.batches, []
        for run in self.runs:
            for batch in batches:
                run.operator.process_input(BROADCAST_INPUT, batch)

    def send(self, rows: list[Row], subtask: int) -> None:
        batch = pa.RecordBatch.from_pylist(rows, schema=LEFT)
        self.runs[subtask % len(self.runs)].operator.process_input(MAIN_INPUT, batch)

    def rows(self) -> list[Row]:
        return [row for run in self.runs for row in run.out.rows()]

    def snapshot(self, *, is_own: bool) -> tuple[list[RestoredState], list[RestoredState]]:
        """Return what waits, and the table."""
        held, tables = [], []
        for index, run in enumerate(self.runs):
            operator = run.operator
            for frozen, found in ((operator.freeze(), held), (operator.freeze_broadcast(is_own=is_own), tables)):
                if frozen is not None:
                    payload = b"".join(bytes(memoryview(buffer)) for buffer in frozen.encode())
                    found.append(RestoredState(index, len(self.runs), memoryview(payload)))
        return held, tables


def naive(left: Row, table: dict[tuple[Any, Any], Row], how: str) -> list[Row]:
    found = table.get((left["a"], left["b"])) if None not in (left["a"], left["b"]) else None
    match how:
        case "semi":
            return [left] if found else []
        case "anti":
            return [] if found else [left]
        case _ if found is None and how == "inner":
            return []
    return [{**left, "v_right": found and found["v"], "name": found and found["name"]}]


@pytest.mark.parametrize("seed", few(range(40), 8))
def test_every_record_sees_the_last_rows_of_the_table(seed: int) -> None:
    chance = random.Random(seed)
    how, has_changes, waits = chance.choice(HOWS), chance.random() < 0.5, chance.random() < 0.4
    texts, numbers = ["p", "q", "", None], [1, 2, None]
    made = spec(how, waits=waits, has_changes=has_changes)
    group = Group(made, chance.choice([1, 2, 3, 5]))
    table: dict[tuple[Any, Any], Row] = {}
    expected: list[Row] = []
    waiting: list[Row] = []
    told: list[Row] = []
    ends_at = chance.randrange(60)
    for step in range(60):
        if step < ends_at and chance.random() < 0.5:
            rows = []
            for _ in range(chance.randint(1, 5)):
                row = {"v": step, "x": chance.choice(texts), "y": chance.choice(numbers), "name": f"n{step}"}
                is_gone, key = has_changes and chance.random() < 0.4, (row["x"], row["y"])
                if has_changes:
                    op = chance.choice(["insert", "update_before", "update_after"])
                    row["op"] = "delete" if is_gone else op
                rows.append(row)
                if None in key or row.get("op") == "update_before":
                    continue
                table.pop(key, None)
                if not is_gone:
                    table[key] = row
            group.table(rows, CHANGES if has_changes else TABLE)
        else:
            rows = [
                {"id": 100 * step + n, "a": chance.choice(texts), "b": chance.choice(numbers), "v": n}
                for n in range(chance.randint(1, 6))
            ]
            group.send(rows, chance.randrange(5))
            if waits and step < ends_at:
                waiting += rows
            else:
                expected += [row for one in rows for row in naive(one, table, how)]
        if step == ends_at:
            group.end_table()
            expected += [row for one in waiting for row in naive(one, table, how)]
            waiting = []
        if chance.random() < 0.1:
            told += group.rows()
            group = Group(made, chance.choice([1, 2, 3, 5]), group.snapshot(is_own=chance.random() < 0.5))
    told += group.rows()
    assert sorted(told, key=lambda row: int(row["id"])) == sorted(expected, key=lambda row: int(row["id"]))
    assert not waiting


@pytest.mark.parametrize(("before", "after"), list(product([1, 2, 3, 5], repeat=2)))
def test_records_that_wait_are_restored_once_in_their_order(before: int, after: int) -> None:
    made = spec("left", waits=True)
    group = Group(made, before)
    for n in range(30):
        group.send([{"id": n, "a": "p", "b": 1, "v": n}], n)
    group.table([{"v": 7, "x": "p", "y": 1, "name": "seven"}], TABLE)
    assert group.rows() == []
    group = Group(made, after, group.snapshot(is_own=False))
    group.table([{"v": 8, "x": "p", "y": 1, "name": "eight"}], TABLE)
    group.end_table()
    assert sorted((row["id"], row["name"]) for row in group.rows()) == [(n, "eight") for n in range(30)]
    for run in group.runs:
        of_former: dict[int, list[int]] = {}
        for row in run.out.rows():
            of_former.setdefault(row["id"] % before, []).append(row["id"])
        assert all(found == sorted(found) for found in of_former.values())
    held, tables = group.snapshot(is_own=False)
    assert not held
    again = Group(made, 2, (held, tables))
    again.send([{"id": 99, "a": "p", "b": 1, "v": 0}], 0)
    assert [row["name"] for row in again.rows()] == ["eight"], "the table is known to be complete"


@pytest.mark.parametrize("first", ["tick", "watermark", "record", "row"])
def test_records_that_waited_where_the_mark_was_in_flight_go_on_with_a_complete_copy(first: str) -> None:
    made = spec("left", waits=True)
    group = Group(made, 2)
    for subtask in range(2):
        group.send([{"id": subtask, "a": "p", "b": 1, "v": 0}], subtask)
    group.table([{"v": 7, "x": "p", "y": 1, "name": "seven"}], TABLE)
    group.order.operator.finish()
    (mark,) = group.order.out.batches
    group.runs[0].operator.process_input(BROADCAST_INPUT, mark)  # a barrier overtakes it on the way to the other one
    assert [row["id"] for row in group.rows()] == [0]
    group = Group(made, 3, group.snapshot(is_own=True))
    assert [run.operator.next_tick_ms() for run in group.runs] == [None, 0, None]
    run = group.runs[1]
    match first:
        case "tick":
            run.advance(1)
        case "watermark":
            run.operator.on_watermark(5)
            assert run.out.log[-1] == ("watermark", 5)
        case "record":
            group.send([{"id": 9, "a": "q", "b": 1, "v": 0}], 1)
        case "row":
            run.operator.process_input(
                BROADCAST_INPUT, pa.RecordBatch.from_pylist([{"x": "p", "y": 1, "name": "later"}], schema=TABLE)
            )
    assert [(row["id"], row["name"]) for row in group.rows() if row["id"] < 9] == [(1, "seven")]
    assert run.operator.next_tick_ms() is None


def test_event_time_waits_behind_records_that_wait() -> None:
    group = Group(spec("left", waits=True), 1)
    (run,) = group.runs
    group.send([{"id": 1, "a": "p", "b": 1, "v": 0}], 0)
    run.operator.on_idle(True)
    run.operator.on_watermark(5)
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert run.out.log == []
    group.end_table()
    assert run.out.log == [("batch", 1), ("watermark", WATERMARK_MAX_MS), ("idle", True)]
    run.operator.on_idle(False)
    assert run.out.log[-1] == ("idle", False)


def test_without_waiting_event_time_passes() -> None:
    (run,) = Group(spec("left"), 1).runs
    run.operator.on_idle(True)
    run.operator.on_watermark(5)
    assert run.out.log == [("idle", True), ("watermark", 5)]


def test_results_have_the_columns_of_both_without_the_key_of_the_table() -> None:
    inputs = {MAIN_INPUT: LEFT, BROADCAST_INPUT: CHANGES}
    for how, names in {
        "inner": ["id", "a", "b", "v", "v_right", "name"],
        "left": ["id", "a", "b", "v", "v_right", "name"],
        "semi": ["id", "a", "b", "v"],
        "anti": ["id", "a", "b", "v"],
    }.items():
        assert spec(how, has_changes=True).output_schemas(inputs, "node")[MAIN].names == names


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"left_keys": ("a", "c")}, "the stream has no column 'c'; it has id: int64"),
        ({"right_keys": ("x", "z")}, "the table has no column 'z'"),
        ({"right_keys": ("y", "y")}, "join keys must have equal types, but 'a' is large_string and 'y' of the table"),
        ({"left_keys": ("a", "b"), "suffix": "", "right_keys": ("x", "y")}, "would have two columns 'v'"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        spec(**options).output_schemas({MAIN_INPUT: LEFT, BROADCAST_INPUT: TABLE}, "node")
