"""Lists of operator state: what is kept, frozen, dealt out and refused."""

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
from headgate.operators.base import RestoredState
from headgate.operators.checkpoint_listeners import FrozenLists, OperatorLists


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
