"""What a value of an older program may become, decided from two types: every pair of plain types, fields, names."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from headgate.model.schema_evolution import (
    NO_RULES,
    Elements,
    Fields,
    Kept,
    Misfit,
    StateRules,
    Widened,
    changes_in,
    conversion_of,
)
from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType, inner_paths, read_columns, read_type

INT, LONG, TEXT = Plain("int32"), Plain("int64"), Plain("large_string")

WIDENINGS = {
    "int8": "int16 int32 int64 float double",
    "int16": "int32 int64 float double",
    "int32": "int64 double",
    "int64": "",
    "uint8": "uint16 uint32 uint64 int16 int32 int64 float double",
    "uint16": "uint32 uint64 int32 int64 float double",
    "uint32": "uint64 int64 double",
    "uint64": "",
    "float": "double",
    "double": "",
}
OTHERS = ["bool", "large_string", "large_binary", "date32[day]", "timestamp[us]", "duration[us]", "duration[ms]"]
NUMBERS = {"float": pa.float32(), "double": pa.float64()}


def struct(**fields: ValueType) -> StructOf:
    return StructOf(tuple(fields.items()))


def refused(old: ValueType, new: ValueType, rules: StateRules = NO_RULES, fixed: tuple[str, ...] = ()) -> str:
    found = conversion_of(old, new, rules, fixed)
    assert isinstance(found, Misfit), found
    return found.why


@pytest.mark.parametrize("old", [*WIDENINGS, *OTHERS])
def test_a_number_becomes_a_wider_one_and_nothing_else_becomes_anything(old: str) -> None:  # EV2
    for new in (*WIDENINGS, *OTHERS):
        found = conversion_of(Plain(old), Plain(new))
        if old == new:
            assert found == Kept()
        elif new in WIDENINGS.get(old, "").split():
            assert found == Widened("", old, new)
        else:
            assert found == Misfit(f"not every {old} can be kept as a {new}")


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, wide in WIDENINGS.items() for new in wide.split()])
def test_a_wider_number_holds_every_value(old: str, new: str) -> None:  # EV2
    before, after = (NUMBERS.get(name) or pa.type_for_alias(name) for name in (old, new))
    if old == "float":
        values = [0.1, 3.4e38, 1e-45, float("inf"), -0.0]
    else:
        bits = before.bit_width
        top = 2 ** (bits - 1) - 1 if old.startswith("int") else 2**bits - 1
        values = [0, 1, top, top - 1, -top - 1 if old.startswith("int") else 0]
    array = pa.array(values, before)
    assert array.cast(after).cast(before).equals(array)
    assert array.cast(after).to_pylist() == array.to_pylist()


@pytest.mark.parametrize(
    ("old", "new", "is_wider"),
    [
        ((10, 2), (18, 2), True),
        ((10, 2), (18, 4), True),
        ((10, 2), (12, 4), True),
        ((10, 2), (11, 4), False),
        ((10, 2), (18, 1), False),
        ((10, 2), (9, 2), False),
        ((3, -2), (5, 0), True),
    ],
)
def test_a_decimal_becomes_one_with_more_digits_and_keeps_its_value(  # EV2
    old: tuple[int, int], new: tuple[int, int], is_wider: bool
) -> None:
    before, after = pa.decimal128(*old), pa.decimal128(*new)
    found = conversion_of(Plain(str(before)), Plain(str(after)))
    assert isinstance(found, Widened) == is_wider
    assert isinstance(conversion_of(Plain(str(before)), LONG), Misfit)
    assert isinstance(conversion_of(INT, Plain(str(after))), Misfit)
    if is_wider:
        top = (10 ** old[0] - 1) * Decimal(10) ** -old[1]
        array = pa.array([top, -top, None], before)
        assert array.cast(after).to_pylist() == [top, -top, None]


def test_fields_are_found_by_name_and_widened_wherever_they_are() -> None:  # EV2
    old = struct(a=INT, b=TEXT, inner=ListOf(struct(x=INT, y=TEXT)))
    new = struct(inner=ListOf(struct(x=LONG)), b=TEXT, a=LONG)
    found = conversion_of(old, new)
    assert isinstance(found, Fields)
    assert [(one.path, one.old) for one in found.fields] == [("inner", "inner"), ("b", "b"), ("a", "a")]
    assert isinstance(found.fields[0].conversion, Elements)
    assert list(changes_in(found)) == [
        "int32 becomes int64 in 'inner.x'",
        "'inner.y' is removed",
        "int32 becomes int64 in 'a'",
    ]
    assert refused(struct(a=struct(b=TEXT)), struct(a=struct(b=LONG))) == (
        "not every large_string can be kept as a int64 in 'a.b'"
    )
    assert conversion_of(old, old) == Kept()


def test_an_added_field_needs_a_default() -> None:
    old, new = struct(a=struct(b=INT)), struct(a=struct(b=INT, c=TEXT))
    assert refused(old, new) == "'a.c' was added and has no default"
    found = conversion_of(old, new, StateRules(defaulted=frozenset({"a.c"})))
    assert not isinstance(found, Misfit)
    assert list(changes_in(found)) == ["'a.c' is added"]
    assert conversion_of(new, new, StateRules(defaulted=frozenset({"a.c"}))) == Kept(), "it is there by now"


def test_a_field_is_renamed_by_the_map_only_and_within_its_struct() -> None:
    old, new = struct(a=struct(b=INT), z=INT), struct(a=struct(c=LONG), z=INT)
    found = conversion_of(old, new, StateRules(renamed=(("a.b", "a.c"),)))
    assert not isinstance(found, Misfit)
    assert list(changes_in(found)) == ["'b' becomes 'a.c'", "int32 becomes int64 in 'a.c'"]
    assert refused(old, new) == "'a.c' was added and has no default"
    assert refused(old, new, StateRules(renamed=(("z", "a.c"),))) == "'a.c' was added and has no default"
    outer = conversion_of(old, struct(o=struct(c=INT), z=INT), StateRules(renamed=(("a", "o"), ("a.b", "o.c"))))
    assert not isinstance(outer, Misfit)
    assert conversion_of(new, new, StateRules(renamed=(("a.b", "a.c"),))) == Kept(), "it has that name by now"


def test_two_fields_never_become_one() -> None:
    old = struct(last=TEXT, name=TEXT)
    assert refused(old, struct(name=TEXT), StateRules(renamed=(("last", "name"),))) == (
        "there are both 'last' and 'name', and one is said to be the other"
    )


def test_a_key_never_changes() -> None:  # EV6
    old = struct(key=INT, n=INT)
    assert refused(old, struct(key=LONG, n=INT), fixed=("key",)) == "the key column 'key' cannot change its type"
    renamed = StateRules(renamed=(("key", "id"),), defaulted=frozenset({"id"}))
    assert refused(old, struct(id=INT, n=INT), renamed, fixed=("id",)) == "the key column 'id' was not there"


def test_what_reads_as_no_type_is_none() -> None:  # EV1
    for text in ("", "struct<a>", "struct<a: int64", "int64>", "large_list<int64>", "struct<a: int64,b: int64>", "a b"):
        assert read_type(text) is None, text
    assert read_columns("a: int64>, b: struct<c: int64") is None
    assert read_columns("a: int64, b: struct<c: large_list<item: date32[day]>>") == (
        ("a", LONG),
        ("b", struct(c=ListOf(Plain("date32[day]")))),
    )
    assert dict(inner_paths(struct(a=ListOf(struct(b=LONG))))) == {"a": ListOf(struct(b=LONG)), "a.b": LONG}
