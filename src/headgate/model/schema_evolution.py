"""How a value of an older program becomes one of this program's: a plan, or why there is none (EV1 to EV7).

Pure: two types and what the user said about them go in, a tree of conversions comes out, the same in the driver, which
reads types in the texts of a manifest, and in the workers, which read them in the bytes. Counterparts:
``protocol.checkpoints.compatibility`` judges all states of an operator with it before anything starts;
``state.descriptors`` converts batches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import field
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType, path_of


@dataclass(frozen=True, slots=True)
class StateRules:
    """What the user said about one state and older checkpoints.

    Attributes:
        renamed_from: the name that it had; "" if it has always had this one.
        renamed: of its fields: old path, new path.
        defaulted: paths of its fields that have a default.
        starts_empty: older checkpoints need not have it.
    """

    renamed_from: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    defaulted: frozenset[str] = frozenset()
    starts_empty: bool = False

    def former_path(self, path: str) -> str | None:
        """Return the path that the field ``path`` had; None if it was not renamed."""
        return next((old for old, new in self.renamed if new == path), None)


@dataclass(frozen=True, slots=True)
class OperatorRules:
    """Rules of the user for the states of one operator.

    Attributes:
        states: by name, those of keys; ``lists``: by name, those that belong to no key.
        forgotten: states of keys that are dropped; ``forgotten_lists``: lists.
        is_built_in: no function of the user's declares the states.
    """

    states: tuple[tuple[str, StateRules], ...] = ()
    lists: tuple[tuple[str, StateRules], ...] = ()
    forgotten: frozenset[str] = frozenset()
    forgotten_lists: frozenset[str] = frozenset()
    is_built_in: bool = False


NO_RULES = StateRules()
NO_OPERATOR_RULES = OperatorRules()


@dataclass(frozen=True, slots=True)
class Kept:
    """It stays as it is."""


@dataclass(frozen=True, slots=True)
class Widened:
    """It is cast to the new type, which holds every value of the old one (EV2)."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Elements:
    """Each element of a list is converted."""

    of: Conversion


@dataclass(frozen=True, slots=True)
class FieldFrom:
    """A field of the new type. ``old``: the field it comes from; None: it was added and has its default."""

    path: str
    old: str | None
    conversion: Conversion = field(default_factory=Kept)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a struct, in the order of the new type. ``removed``: paths of those that are dropped."""

    fields: tuple[FieldFrom, ...]
    removed: tuple[str, ...] = ()


Conversion: TypeAlias = Kept | Widened | Elements | Fields


@dataclass(frozen=True, slots=True)
class Misfit:
    """No conversion. ``why`` continues a sentence after a colon; ``advice`` says what to do, "" for nothing."""

    why: str
    advice: str = ""


def conversion_of(
    old: ValueType, new: ValueType, rules: StateRules = NO_RULES, fixed: Collection[str] = ()
) -> Conversion | Misfit:
    """Return how values of ``old`` become values of ``new``.

    Args:
        rules: what the user said.
        fixed: columns of the key: they never change (EV6).
    """
    return _conversion(old, new, _Place(rules, fixed, "", ""))


def changes_in(conversion: Conversion) -> Iterator[str]:
    """Yield, in words, what becomes different."""
    match conversion:
        case Widened():
            yield f"{conversion.old} becomes {conversion.new}" + (f" in '{conversion.path}'" if conversion.path else "")
        case Elements():
            yield from changes_in(conversion.of)
        case Fields():
            for one in conversion.fields:
                if one.old is None:
                    yield f"'{one.path}' is added"
                elif one.old != one.path.rpartition(".")[2]:
                    yield f"'{one.old}' becomes '{one.path}'"
                yield from changes_in(one.conversion)
            for path in conversion.removed:
                yield f"'{path}' is removed"
        case Kept():
            pass


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a value: its path in the old type and in the new one."""

    rules: StateRules
    fixed: Collection[str]
    old_path: str
    new_path: str

    def inner(self, old: str, new: str) -> _Place:
        return _Place(self.rules, self.fixed, path_of(self.old_path, old), path_of(self.new_path, new))


def _conversion(old: ValueType, new: ValueType, place: _Place) -> Conversion | Misfit:
    if isinstance(old, StructOf) and isinstance(new, StructOf):
        return _of_structs(old, new, place)
    if old == new:
        return Kept()
    if place.new_path in place.fixed:
        return Misfit(f"the key column '{place.new_path}' cannot change its type", "cast it back before key_by")
    if isinstance(old, ListOf) and isinstance(new, ListOf):
        of = _conversion(old.element, new.element, place)
        return of if isinstance(of, Misfit) else Elements(of)
    is_plain = isinstance(old, Plain) and isinstance(new, Plain)
    if is_plain and (is_widening(str(old), str(new)) or is_wider_decimal(str(old), str(new))):
        return Widened(place.new_path, str(old), str(new))
    where = f" in '{place.new_path}'" if place.new_path else ""
    return Misfit(f"not every {old} can be kept as a {new}{where}")


def _of_structs(old: StructOf, new: StructOf, place: _Place) -> Conversion | Misfit:
    """Return where each field of ``new`` comes from."""
    before, found = dict(old.fields), list[FieldFrom]()
    for name, dtype in new.fields:
        path = path_of(place.new_path, name)
        source = _source(name, path, before, place)
        if isinstance(source, Misfit):
            return source
        if source is None:
            found.append(FieldFrom(path, None))
            continue
        inner = _conversion(before[source], dtype, place.inner(source, name))
        if isinstance(inner, Misfit):
            return inner
        found.append(FieldFrom(path, source, inner))
    used = [one.old for one in found]
    # what nothing comes from is removed
    removed = tuple(path_of(place.old_path, name) for name in before if name not in used)
    is_same = used == list(before) and all(
        one.conversion == Kept() and one.old == name for one, (name, _) in zip(found, new.fields, strict=True)
    )
    return Kept() if is_same else Fields(tuple(found), removed)


def _source(name: str, path: str, before: Collection[str], place: _Place) -> str | Misfit | None:
    """Return the old field that ``path`` comes from; None if it was added and has a default."""
    former = place.rules.former_path(path)
    parent, _, former_name = (former or "").rpartition(".")
    was_renamed = former is not None and parent == place.old_path and former_name in before
    if was_renamed and name in before:
        return Misfit(f"there are both '{former}' and '{path}', and one is said to be the other", "say which it is")
    if name in before:
        return name
    if was_renamed and path not in place.fixed:
        return former_name
    if path in place.fixed:
        return Misfit(f"the key column '{path}' was not there", "key by the columns of before")
    if path in place.rules.defaulted:
        return None
    return Misfit(
        f"'{path}' was added and has no default",
        f"give one with evolution=Evolution(defaults={{'{path}': ...}}), or, if it had another name, "
        f"Evolution(renamed={{'...': '{path}'}})",
    )


_WHOLE = {f"{sign}int{bits}": (sign, bits) for sign in ("", "u") for bits in (8, 16, 32, 64)}
_EXACT_BITS = {"float": 24, "double": 53}
"""Whole numbers of so many bits are exact in these types."""


def is_widening(old: str, new: str) -> bool:
    """Whether every value of ``old`` has an equal one in ``new``, another type of numbers (EV2).

    Dates, times, texts and truth values become nothing else: what they would mean is not theirs to say.
    """
    if (old, new) == ("float", "double"):
        return True
    if old not in _WHOLE:
        return False
    sign, bits = _WHOLE[old]
    if new in _EXACT_BITS:
        return bits <= _EXACT_BITS[new]
    if new not in _WHOLE:
        return False
    new_sign, new_bits = _WHOLE[new]
    return new_bits > bits and (new_sign == sign or sign == "u")


_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")


def is_wider_decimal(old: str, new: str) -> bool:
    """Whether both are decimals, and ``new`` has as many digits at least, both before and after the point (EV2)."""
    before, after = _DECIMAL.fullmatch(old), _DECIMAL.fullmatch(new)
    if before is None or after is None:
        return False
    (old_digits, old_scale), (new_digits, new_scale) = (map(int, found.groups()) for found in (before, after))
    return new_scale >= old_scale and new_digits - new_scale >= old_digits - old_scale
