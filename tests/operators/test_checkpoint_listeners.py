"""Publishing on completion, and lists of operator state, those of older programs, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate as hg
from headgate.codec.snapshot import decode_sections
from headgate.codec.snapshot_rows import stored_rows
from headgate.errors import CorruptionError, UsageError
from headgate.model.schema_evolution import StateRules
from headgate.operators.base import RestoredState
from headgate.operators.checkpoint_listeners import (
    FrozenLists,
    OperatorLists,
    RestoreContext,
    SnapshotContext,
    lists_rules,
    lists_text,
)


class Publisher(hg.PublishOnCheckpoint):
    item_type = int

    def __init__(self) -> None:
        self.published: list[int] = []

    def publish(self, items: list[int]) -> None:
        assert items, "nobody is bothered for nothing"
        self.published += items


class Life:
    """One generation of a publisher, restored from ``frozen`` of a completed checkpoint."""

    def __init__(self, frozen: bytes | None) -> None:
        self.function = Publisher()
        self.lists = OperatorLists("op")
        if frozen:
            self.lists.take([RestoredState(0, 1, memoryview(frozen))])
        self.function.restore(RestoreContext(self.lists, is_restored=frozen is not None))
        self.lists.close()

    def snapshot(self, checkpoint: int) -> bytes:
        self.function.snapshot(SnapshotContext(checkpoint))
        frozen = self.lists.freeze(is_union=False)
        return b"" if frozen is None else b"".join(memoryview(part).cast("B") for part in frozen.encode())


def lives_of_a_publisher(draw: Any) -> None:
    """Any order of records, snapshots, completions that are told or not, aborts, and failures."""
    life, checkpoint = Life(None), 0
    completed, restorable = -1, b""
    """How many records the newest completed checkpoint covers, and its state; records are numbered."""
    count = told = 0
    under_way: dict[int, tuple[int, bytes]] = {}
    published: set[int] = set()
    for step in draw(
        st.lists(st.sampled_from(["record", "snapshot", "complete", "silent", "abort", "fail"]), max_size=40)
    ):
        match step:
            case "record":
                life.function.ready(count)
                count += 1
            case "snapshot":
                checkpoint += 1
                under_way[checkpoint] = (count, life.snapshot(checkpoint))
            case "complete" | "silent" if under_way:
                ended = draw(st.sampled_from(sorted(under_way)))
                completed, restorable = under_way[ended]
                under_way = {c: found for c, found in under_way.items() if c > ended}
                if step == "complete":
                    life.function.notify_checkpoint_complete(ended)
                    told = completed
            case "abort" if under_way:
                ended = draw(st.sampled_from(sorted(under_way)))
                del under_way[ended]
                life.function.notify_checkpoint_aborted(ended)
            case "fail":
                published |= set(life.function.published)
                life, under_way = Life(restorable), {}
                count = told = max(completed, 0)
            case _:
                continue
        published |= set(life.function.published)
        assert published <= set(range(max(completed, 0))), "what a restart may take back is not public"
        assert published >= set(range(told)), "what is told is public"


@given(st.data())
def test_what_is_published_is_what_completed_checkpoints_cover(data: st.DataObject) -> None:  # C16
    lives_of_a_publisher(data.draw)


def test_a_late_completion_publishes_what_it_covers_and_nothing_newer() -> None:  # C16
    life = Life(None)
    for checkpoint in (1, 2, 3):
        life.function.ready(checkpoint * 10)
        life.snapshot(checkpoint)
    life.function.notify_checkpoint_complete(2)
    assert life.function.published == [10, 20]
    life.function.notify_checkpoint_complete(2)
    assert life.function.published == [10, 20]
    life.function.notify_checkpoint_complete(3)
    assert life.function.published == [10, 20, 30]


def test_an_aborted_checkpoint_leaves_its_items_to_the_next_one() -> None:  # C17
    life = Life(None)
    life.function.ready(1)
    life.snapshot(1)
    life.function.notify_checkpoint_aborted(1)
    restored = Life(life.snapshot(2))
    assert restored.function.published == [1]
    assert Life(restored.snapshot(3)).function.published == [], "what a restore has published is not kept"


def test_what_could_not_be_published_stays_pending() -> None:
    life = Life(None)
    life.function.ready(1)
    life.snapshot(1)

    def fail(items: list[Any]) -> None:
        raise OSError("gone")

    works, life.function.publish = life.function.publish, fail  # type: ignore[method-assign]
    try:
        life.function.notify_checkpoint_complete(1)
    except OSError:
        life.function.publish = works  # type: ignore[method-assign]
    assert Life(life.snapshot(2)).function.published == [1]


def bytes_of(frozen: FrozenLists | None) -> memoryview:
    assert frozen is not None
    return memoryview(b"".join(memoryview(part).cast("B") for part in frozen.encode()))


def snapshot_of(values: Sequence[int], index: int, parallelism: int, *, is_union: bool = False) -> RestoredState:
    """Return what the subtask ``index`` left that had ``values`` in its list."""
    lists = OperatorLists("op", index, parallelism)
    declare = lists.declare_union if is_union else lists.declare
    declare("kept", int).put(values)
    return RestoredState(index, parallelism, bytes_of(lists.freeze(is_union=is_union)))


def restored(states: Sequence[RestoredState], index: int, parallelism: int) -> OperatorLists:
    lists = OperatorLists("op", index, parallelism)
    lists.take(states)
    return lists


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 5))
def test_each_element_goes_to_exactly_one_subtask(formers: list[list[int]], parallelism: int) -> None:
    states = [snapshot_of(values, index, len(formers)) for index, values in enumerate(formers)]
    found = [restored(states, index, parallelism).declare("kept", int).get() for index in range(parallelism)]
    if parallelism == len(formers):
        assert found == formers
    else:
        assert sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(formers))
        assert max(map(len, found)) - min(map(len, found)) <= 1, "dealt out in turn"


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 5))
def test_everybody_sees_a_union_and_keeps_only_its_share(formers: list[list[int]], parallelism: int) -> None:
    states = [snapshot_of(values, index, len(formers), is_union=True) for index, values in enumerate(formers)]
    unions = [restored(states, index, parallelism).declare_union("kept", int) for index in range(parallelism)]
    assert all(union.restored == list(chain.from_iterable(formers)) for union in unions)
    assert sorted(chain.from_iterable(union.get() for union in unions)) == sorted(chain.from_iterable(formers))


def test_a_frozen_list_does_not_change_with_the_list() -> None:
    lists = OperatorLists("op")
    kept = lists.declare("kept", pa.list_(pa.int64()))
    value = [1]
    kept.append(value)
    frozen = lists.freeze(is_union=False)
    value.append(2)
    kept.get()[0].append(3)
    kept.append([4])
    again = restored([RestoredState(0, 1, bytes_of(frozen))], 0, 1)
    assert again.declare("kept", pa.list_(pa.int64())).get() == [[1]]
    assert kept.get() == [[1], [4]]


def test_rows_are_told_from_what_was_frozen_and_found_in_the_bytes() -> None:
    lists = OperatorLists("op")
    lists.declare("a", str).put(["x", "y", "ä"])
    lists.declare("b", pa.struct({"n": pa.int64()})).put([{"n": 1}])
    lists.declare_union("c", float).put([0.5])
    lists.declare("empty", int)
    frozen = lists.freeze(is_union=False)
    assert frozen is not None
    assert frozen.rows() == {"a": 3, "b": 1}
    assert stored_rows(decode_sections(bytes_of(frozen), ""), "") == {"a": 3, "b": 1}
    assert lists.text() == (
        "operator state(list a: large_string; list b: struct<n: int64>; union c: double; list empty: int64)"
    )


def test_lists_without_elements_are_not_written() -> None:
    lists = OperatorLists("op")
    lists.declare("kept", int)
    assert lists.freeze(is_union=False) is None
    assert lists.freeze(is_union=True) is None


def _of_another_type(lists: OperatorLists) -> None:
    lists.declare("kept", str)


def _of_another_name(lists: OperatorLists) -> None:
    lists.declare("other", int)
    lists.close()


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (_of_another_type, "holds int64 in the restored checkpoint, but is declared as large_string now"),
        (_of_another_name, "holds a list 'kept' of operator 'op', which its function does not declare any more"),
    ],
)
def test_a_list_of_another_type_or_that_nobody_declares_is_refused(
    declare: Callable[[OperatorLists], None], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        declare(restored([snapshot_of([1], 0, 1)], 0, 1))


@pytest.mark.parametrize("value", ["text", None, 1.5, 1 << 70])
def test_an_element_that_does_not_fit_is_refused_and_nothing_changes(value: Any) -> None:
    kept = OperatorLists("op").declare("kept", int)
    kept.put([1])
    with pytest.raises(UsageError, match="list 'kept' of operator 'op' holds int64, but was given"):
        kept.put([2, value])
    with pytest.raises(UsageError):
        kept.append(value)
    assert kept.get() == [1]
    assert len(kept) == 1


def test_declarations_are_checked() -> None:
    lists = OperatorLists("op")
    lists.declare("kept", int)
    with pytest.raises(UsageError, match="two lists are named 'kept'"):
        lists.declare_union("kept", int)
    with pytest.raises(UsageError, match="must be text"):
        lists.declare("", int)
    with pytest.raises(UsageError, match="operator 'op': list 'odd'"):
        lists.declare("odd", object())
    lists.close()
    with pytest.raises(UsageError, match="must be declared in restore"):
        lists.declare("late", int)


def test_damaged_bytes_are_no_list() -> None:
    state = snapshot_of([1, 2], 0, 1)
    broken = bytearray(state.payload)
    broken[-9] ^= 1
    with pytest.raises(CorruptionError):
        restored([RestoredState(0, 1, memoryview(broken))], 0, 1)


def test_a_released_state_is_not_written_again() -> None:
    lists = OperatorLists("op")
    lists.declare("kept", int).append(1)
    frozen = lists.freeze(is_union=False)
    assert frozen is not None
    frozen.release()
    with pytest.raises(AssertionError, match="was released"):
        frozen.encode()


def test_every_subtask_has_a_copy_of_a_function_that_listens() -> None:
    from headgate.operators.checkpoint_listeners import own_copy_of

    class Listening(hg.CheckpointListener):
        pass

    listening, plain = Listening(), object()
    assert own_copy_of("op", listening) is not listening
    assert own_copy_of("op", plain) is plain


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
