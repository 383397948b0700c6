"""Joins whose results change, against a nested loop over what is there: any order, batches and parallelisms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Harness
from tests.state.backends import EACH, IN_FILES, Chosen, choose

from headgate.model.graph import InputName
from headgate.operators.changes import DELETE, INSERT, OP, OP_FIELD, UPDATE_AFTER, UPDATE_BEFORE
from headgate.operators.joins.changing_join import ChangingJoinSpec
from headgate.operators.joins.join_plan import (
    HOWS,
    LEFT_INPUT,
    NULL_KEYS,
    RIGHT_INPUT,
    Changing,
    Input,
    JoinInputSpec,
    JoinPlan,
    JoinSide,
)
from headgate.operators.keys import partition

FIELDS = {
    LEFT_INPUT: [("k", pa.int64()), ("l", pa.large_list(pa.int64()))],
    RIGHT_INPUT: [("id", pa.int64()), ("l", pa.large_string()), ("r", pa.float64())],
}
KEYS = {LEFT_INPUT: ("k",), RIGHT_INPUT: ("id",)}
INPUTS: list[Input] = ["records", "retractions", "upserts"]
Row = tuple[Any, ...]


def plan(how: str, left: Input, right: Input) -> JoinPlan:
    sides = [
        JoinSide(pa.schema([*FIELDS[name], *([OP_FIELD] if kind != "records" else [])]), KEYS[name], None)
        for name, kind in ((LEFT_INPUT, left), (RIGHT_INPUT, right))
    ]
    return JoinPlan(sides[0], sides[1], how, Changing(None, left, right), "_right")


class Cluster:
    """The operators of a join, at any parallelism, and the table that their results make."""

    def __init__(self, joined: JoinPlan) -> None:
        self.plan, self.spec = joined, ChangingJoinSpec(joined)
        self.before = {name: Harness(JoinInputSpec(joined, name)) for name in KEYS}
        self.table: Counter[Row] = Counter()
        self.subtasks = self._started(1)

    def _started(self, parallelism: int, states: Any = ()) -> list[Harness]:
        return [Harness(self.spec, states, subtask=(i, parallelism), worker=Chosen.worker) for i in range(parallelism)]

    def send(self, side: InputName, rows: list[tuple[str, Row]]) -> None:
        schema = self.plan.side(side).schema
        values = [[*row, *([op] if OP in schema.names else [])] for op, row in rows]
        columns = [pa.array([row[i] for row in values], field.type) for i, field in enumerate(schema)]
        before = self.before[side]
        before.send(pa.RecordBatch.from_arrays(columns, schema=schema))
        for batch in before.out.tagged.pop(NULL_KEYS, []):
            self._apply(batch.to_pylist())
        for batch in before.out.batches:
            for subtask, part in zip(self.subtasks, partition(batch, KEYS[side], 128, len(self.subtasks)), strict=True):
                if part is not None:
                    subtask.operator.process_input(side, part)
                self._apply(subtask.out.rows())
                subtask.out.batches.clear()
        before.out.batches.clear()

    def _apply(self, changes: list[dict[str, Any]]) -> None:
        for change in changes:
            assert list(change) == self.plan.output.names
            op, row = change.pop(OP), tuple(map(str, change.values()))
            self.table[row] += 1 if op == INSERT else -1
            assert self.table[row] >= 0, f"{change} takes back what was not there"

    def rescale(self, parallelism: int) -> None:
        states = [subtask.snapshot() for subtask in self.subtasks]
        for subtask in self.subtasks:
            subtask.operator.close()
        self.subtasks = self._started(parallelism, states)


def expected(how: str, lefts: list[Row], rights: list[Row]) -> Counter[Row]:
    """A nested loop."""
    found: list[Row] = []
    for left in lefts:
        partners = [right for right in rights if right[0] == left[0] is not None]
        if (how == "semi" and partners) or (how == "anti" and not partners):
            found.append(left)
        elif how not in ("semi", "anti"):
            found += [(*left, *right[1:]) for right in partners]
            if how in ("left", "full") and not partners:
                found.append((*left, None, None))
    if how in ("right", "full"):
        alone = [right for right in rights if not any(right[0] == left[0] is not None for left in lefts)]
        found += [(right[0], None, *right[1:]) for right in alone]
    return Counter(tuple(map(str, row)) for row in found)


class Table:
    """The rows of one side, and changes of it as each kind of input has them."""

    def __init__(self, kind: Input) -> None:
        self.kind, self.rows = kind, list[Row]()

    def changes(self, row: Row, choice: int) -> list[tuple[str, Row]]:
        if self.kind == "records":
            self.rows.append(row)
            return [(INSERT, row)]
        if self.kind == "upserts":
            row = (row[0] if row[0] is not None else 0, *row[1:])
            old = [one for one in self.rows if one[0] == row[0]]
            self.rows = [one for one in self.rows if one[0] != row[0]]
            if choice % 3 == 0:
                return [(DELETE, row)]  # even if there was none
            self.rows.append(row)
            return [(UPDATE_AFTER if old else INSERT, row)]
        if not self.rows or choice % 3 == 0:
            self.rows.append(row)
            return [(INSERT, row)]
        old_row = self.rows.pop(choice % len(self.rows))
        if choice % 3 == 1:
            return [(DELETE, old_row)]
        self.rows.append(row)
        return [(UPDATE_BEFORE, old_row), (UPDATE_AFTER, row)]


ROW = {
    LEFT_INPUT: st.tuples(st.sampled_from([1, 1, 2, None]), st.sampled_from([None, [1], [1, 2]])),
    RIGHT_INPUT: st.tuples(
        st.sampled_from([1, 1, 2, None]), st.sampled_from(["x", None]), st.sampled_from([1.0, float("nan")])
    ),
}
STEP = st.one_of(
    *(st.tuples(st.just(name), st.lists(st.tuples(row, st.integers(0, 50)), max_size=5)) for name, row in ROW.items()),
    st.tuples(st.just("rescale"), st.sampled_from([1, 2, 3, 5])),
)


def check(how: str, kinds: tuple[Input, Input], steps: list[tuple[str, Any]]) -> None:
    cluster = Cluster(plan(how, *kinds))
    tables = {LEFT_INPUT: Table(kinds[0]), RIGHT_INPUT: Table(kinds[1])}
    for what, value in steps:
        if what == "rescale":
            cluster.rescale(value)
        else:
            side = InputName(what)
            cluster.send(side, [change for one in value for change in tables[side].changes(*one)])
        assert +cluster.table == expected(how, tables[LEFT_INPUT].rows, tables[RIGHT_INPUT].rows)


@pytest.mark.parametrize("backend", EACH)
@given(
    how=st.sampled_from(HOWS),
    kinds=st.tuples(st.sampled_from(INPUTS), st.sampled_from(INPUTS)),
    steps=st.lists(STEP, max_size=12),
)
@settings(max_examples=200)
def test_the_changes_make_a_nested_loop_over_what_is_there(
    backend: str, how: str, kinds: tuple[Input, Input], steps: list[tuple[str, Any]]
) -> None:
    with choose(backend):
        check(how, kinds, steps)


@given(how=st.sampled_from(HOWS), steps=st.lists(STEP, max_size=10))
@settings(max_examples=20)
def test_and_from_files_of_a_database(how: str, steps: list[tuple[str, Any]]) -> None:
    with choose(IN_FILES):
        check(how, ("retractions", "records"), steps)


def test_a_row_that_is_not_there_cannot_go() -> None:
    cluster = Cluster(plan("left", "retractions", "records"))
    cluster.send(RIGHT_INPUT, [(INSERT, (1, "x", 1.0))])
    cluster.send(LEFT_INPUT, [(DELETE, (1, [1])), (INSERT, (1, [1])), (DELETE, (1, [1])), (DELETE, (1, [1]))])
    assert not +cluster.table
    cluster.send(LEFT_INPUT, [(INSERT, (1, [1]))])
    assert len(+cluster.table) == 1
