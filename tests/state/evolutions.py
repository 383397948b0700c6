"""Random pairs of an old and a new type, with what the user says about them and what plain Python makes of a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from headgate.state.descriptors import Evolution

PLAIN = {
    pa.int8(): [pa.int8(), pa.int16(), pa.int64(), pa.float32(), pa.float64()],
    pa.uint8(): [pa.uint8(), pa.uint64(), pa.int16(), pa.float32()],
    pa.uint16(): [pa.int32(), pa.uint32(), pa.float32()],
    pa.int32(): [pa.int32(), pa.int64(), pa.float64()],
    pa.uint32(): [pa.int64(), pa.float64()],
    pa.int64(): [pa.int64()],
    pa.float32(): [pa.float32(), pa.float64()],
    pa.float64(): [pa.float64()],
    pa.large_string(): [pa.large_string()],
    pa.bool_(): [pa.bool_()],
    pa.large_binary(): [pa.large_binary()],
    pa.date32(): [pa.date32()],
    pa.time64("ns"): [pa.time64("ns")],
    pa.duration("us"): [pa.duration("us")],
    pa.timestamp("us"): [pa.timestamp("us")],
    pa.timestamp("us", "UTC"): [pa.timestamp("us", "UTC")],
    pa.decimal128(10, 2): [pa.decimal128(10, 2), pa.decimal128(18, 4), pa.decimal128(38, 2)],
}
OTHERS = {
    pa.large_binary(): st.binary(max_size=3),
    pa.date32(): st.dates(),
    pa.time64("ns"): st.times(),
    pa.duration("us"): st.timedeltas(timedelta(days=-9_999), timedelta(days=9_999)),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
}
NAMES = ["a", "b", "c", "d", "e"]


@dataclass
class Change:
    """One old and one new type. ``then(value)`` is what a value, or None, becomes."""

    old: pa.DataType
    new: pa.DataType
    values: st.SearchStrategy[Any]
    then: Callable[[Any], Any]


@dataclass
class Said:
    """What the user has to say, by path."""

    defaults: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def evolution(self) -> Evolution:
        return Evolution(self.defaults, self.renamed)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Change, Evolution]:
    """Return a change of a type, and the words that it needs."""
    said = Said()
    found = _change(draw, said, "", "", depth=2)
    return found, said.evolution()


def _change(draw: st.DrawFn, said: Said, old: str, new: str, depth: int) -> Change:
    kind = draw(st.sampled_from(["plain", "list", "struct"] if depth else ["plain"]))
    if kind == "plain":
        return _plain(draw)
    if kind == "list":
        inner = _change(draw, said, old, new, depth - 1)
        return Change(
            pa.large_list(inner.old),
            pa.large_list(inner.new),
            st.lists(st.none() | inner.values, max_size=3),
            lambda value: None if value is None else [inner.then(one) for one in value],
        )
    return _struct(draw, said, old, new, depth)


def _plain(draw: st.DrawFn) -> Change:
    old = draw(st.sampled_from(list(PLAIN)))
    new = draw(st.sampled_from(PLAIN[old]))
    becomes = float if pa.types.is_floating(new) else lambda value: value
    return Change(old, new, values_of(old), lambda value: None if value is None else becomes(value))


def _struct(draw: st.DrawFn, said: Said, old: str, new: str, depth: int) -> Change:
    kept, removed, added = [], [], []
    for name in NAMES[: draw(st.integers(1, 3))]:
        fate = draw(st.sampled_from(["kept", "renamed", "removed"]))
        now = f"{name}2" if fate == "renamed" else name
        about = Said() if fate == "removed" else said  # nothing can be said about what is not there any more
        inner = _change(draw, about, _path(old, name), _path(new, now), depth - 1)
        if fate == "removed":
            removed.append((name, inner))
            continue
        kept.append((name, now, inner))
        if fate == "renamed":
            said.renamed[_path(old, name)] = _path(new, now)
    for name in NAMES[3 : draw(st.integers(3, 5))]:
        inner = _plain(draw)
        default = draw(st.none() | inner.values)
        said.defaults[_path(new, name)] = default
        added.append((name, inner.old, default))
    columns = [(now, inner.new) for _, now, inner in kept] + [(name, dtype) for name, dtype, _ in added]
    every = [(name, inner) for name, _, inner in kept] + removed

    def then(value: Any) -> Any:
        if value is None:
            return None
        made = {now: inner.then(value[name]) for name, now, inner in kept}
        return made | {name: default for name, _, default in added}

    return Change(
        pa.struct([(name, inner.old) for name, inner in draw(st.permutations(every))]),
        pa.struct(draw(st.permutations(columns))),
        st.fixed_dictionaries({name: st.none() | inner.values for name, inner in every}),
        then,
    )


def _path(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def values_of(dtype: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_boolean(dtype):
        return st.booleans()
    if pa.types.is_large_string(dtype):
        return st.text(max_size=3)
    if pa.types.is_floating(dtype):
        return st.floats(width=dtype.bit_width, allow_nan=False)
    if dtype in OTHERS:
        return OTHERS[dtype]
    if pa.types.is_decimal(dtype):
        top = 10**dtype.precision - 1
        return st.integers(-top, top).map(lambda number: Decimal(number).scaleb(-dtype.scale))
    top = 1 << (dtype.bit_width - 1)
    return st.integers(-top, top - 1) if pa.types.is_signed_integer(dtype) else st.integers(0, 2 * top - 1)
