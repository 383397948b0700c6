"""Operator state of an older program: elements become what the list is declared to hold now."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from tests.operators.test_operator_state import restored, snapshot_of

import headgate as hg
from headgate.errors import UsageError
from headgate.model.schema_evolution import StateRules
from headgate.operators.checkpoint_listeners import OperatorLists, lists_rules, lists_text

FORMER = [snapshot_of([1, 2], 0, 2), snapshot_of([3], 1, 2)]
RENAMED = hg.Evolution(renamed_from="kept")


def narrow_snapshot(is_union: bool) -> Any:
    lists = OperatorLists("op", 0, 1)
    declare = lists.declare_union if is_union else lists.declare
    declare("kept", pa.struct([("a", pa.int32())])).append({"a": 5})
    frozen = lists.freeze(is_union=is_union)
    assert frozen is not None
    return type(FORMER[0])(0, 1, memoryview(b"".join(memoryview(part).cast("B") for part in frozen.encode())))


@pytest.mark.parametrize("is_union", [False, True])
def test_elements_of_a_list_are_converted_under_the_name_that_it_had(is_union: bool) -> None:  # EV11
    lists = restored([narrow_snapshot(is_union)], 0, 1)
    declare = lists.declare_union if is_union else lists.declare
    evolution = hg.Evolution({"c": "new"}, {"a": "b"}, renamed_from="kept")
    found = declare("now", pa.struct([("b", pa.int64()), ("c", pa.large_string())]), evolution)
    assert found.get() == [{"b": 5, "c": "new"}]
    lists.close()


def test_lists_of_all_former_subtasks_are_dealt_out_under_the_new_name() -> None:  # EV11
    found = [restored(FORMER, index, 3).declare("now", int, RENAMED).get() for index in range(3)]
    assert sorted(chain.from_iterable(found)) == [1, 2, 3]


def test_a_list_is_left_behind_only_if_it_is_forgotten() -> None:  # EV11
    lists = restored(FORMER, 0, 2)
    with pytest.raises(UsageError, match="holds a list 'kept' of operator 'op', which its function does not declare"):
        lists.close()
    lists = restored(FORMER, 0, 2)
    lists.forget("kept")
    lists.close()
    with pytest.raises(UsageError, match="forget takes the name of a list"):
        lists.forget("")
    with pytest.raises(
        UsageError, match="holds int64 in the restored checkpoint, but is declared as double now: not every"
    ):
        restored(FORMER, 0, 2).declare("kept", float)


class Keeping(hg.CheckpointedFunction):
    def restore(self, context: hg.RestoreContext) -> None:
        self.now = context.list("now", int, evolution=RENAMED)
        self.all = context.union("all", int, evolution=hg.Evolution(starts_empty=True))
        context.forget("gone")


class Contradicting(hg.CheckpointedFunction):
    def restore(self, context: hg.RestoreContext) -> None:
        context.list("now", int, evolution=RENAMED)
        context.list("kept", int)


def test_what_a_function_says_of_its_lists_is_learned_when_the_pipeline_is_built() -> None:  # EV11
    rules = lists_rules("op", Keeping())
    assert dict(rules.lists) == {"now": StateRules("kept"), "all": StateRules(starts_empty=True)}
    assert rules.forgotten_lists == {"gone"}
    assert lists_text("op", Keeping()) == "operator state(union all: int64; list now: int64)"
    with pytest.raises(UsageError, match="'now' is said to be renamed from 'kept', which is declared as well"):
        lists_rules("op", Contradicting())
