"""How the columns of a stream may change (S76, S77)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType
from headgate.protocol.store.schema_update import (
    Columns,
    Incompatible,
    Unchanged,
    Updated,
    fits_if_small,
    holds,
    update,
)


def columns(**types: str | ValueType) -> Columns:
    return tuple((name, Plain(dtype) if isinstance(dtype, str) else dtype) for name, dtype in types.items())


BEFORE = columns(key="int32", value="float")


def test_columns_are_added_and_numbers_widened_in_one_step() -> None:  # S76
    wanted = columns(key="int64", value="double", more="large_string")
    assert update(BEFORE, wanted, "key") == Updated(("more",), ("key", "value"))


def test_the_same_columns_again_are_no_update() -> None:  # S76: an answer may be lost
    assert update(BEFORE, BEFORE, "key") == Unchanged()


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (columns(key="int32"), "column 'value' (float) would be removed"),
        (columns(key="int16", value="float"), "column 'key' would change from int32 to int16: not every int32"),
        (columns(key="int32", value="large_string"), "column 'value' would change from float to large_string"),
        (columns(key="double", value="float"), "it is the routing key, and equal keys would go to other segments"),
        (columns(value="float", key="int32"), "column 'key' (int32) would be at another place"),
        (columns(new="int8", key="int32", value="float"), "column 'key' (int32) would be at another place"),
    ],
)
def test_anything_else_is_refused_with_column_and_both_types(wanted: Columns, problem: str) -> None:  # S76
    answer = update(BEFORE, wanted, "key")
    assert isinstance(answer, Incompatible)
    assert problem in answer.problem


def test_a_column_that_is_no_routing_key_may_become_a_float() -> None:  # S76
    assert update(BEFORE, columns(key="double", value="float"), None) == Updated((), ("key",))


def test_local_times_become_moments_and_are_still_read_as_local_times() -> None:  # S76, S77
    local, moment = Plain("timestamp[us]"), Plain("timestamp[us, tz=UTC]")
    assert update(columns(at=local), columns(at=moment), "at") == Updated((), ("at",))
    assert isinstance(update(columns(at=moment), columns(at=local), None), Incompatible)
    assert fits_if_small(moment, local)
    assert not fits_if_small(local, moment)
    assert not holds(Plain("timestamp[ms]"), moment)


def test_what_is_within_a_value_is_added_and_widened_too() -> None:  # S76
    old = StructOf((("a", Plain("int8")), ("b", ListOf(Plain("float")))))
    new = StructOf((("a", Plain("int16")), ("b", ListOf(Plain("double"))), ("c", Plain("bool"))))
    assert holds(old, new)
    assert not holds(new, old)
    assert not holds(ListOf(old), ListOf(Plain("int8")))


def test_a_number_never_becomes_one_that_does_not_hold_it() -> None:  # S76
    for old, new in (
        ("int64", "int32"),
        ("int64", "double"),
        ("double", "float"),
        ("uint8", "int8"),
        ("int8", "uint8"),
    ):
        assert not holds(Plain(old), Plain(new))


TYPES = st.sampled_from(
    [Plain(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [Plain(text) for text in ("float", "double", "string", "large_string", "bool", "timestamp[us]")]
)


@given(TYPES, TYPES, TYPES)
def test_steps_can_be_made_at_once_and_never_back(a: ValueType, b: ValueType, c: ValueType) -> None:  # S76, S77
    """Chunks of any former schema are read in any later one, whatever came in between."""
    assert holds(a, a)
    if holds(a, b) and holds(b, c):
        assert holds(a, c)
    if holds(a, b) and holds(b, a):
        assert a == b
    if fits_if_small(a, b):
        assert {str(a), str(b)} == {"string", "large_string"} or all("int" in str(one) for one in (a, b))


@pytest.mark.parametrize(("small", "large"), [("string", "large_string"), ("binary", "large_binary")])
def test_texts_and_bytes_may_become_large_ones(small: str, large: str) -> None:  # S76, S77
    assert holds(Plain(small), Plain(large))
    assert not holds(Plain(large), Plain(small))
    assert fits_if_small(Plain(large), Plain(small))


def test_a_list_and_what_is_none_hold_nothing_of_each_other() -> None:  # S76
    numbers = ListOf(Plain("int32"))
    assert not holds(numbers, Plain("int32"))
    assert not holds(Plain("int32"), numbers)
