"""What the identity of an operator's state says about its parts: keys, states, columns (EV1).

A text is cut at what stands between names, so one with such a name in it reads as nothing or as something else. Whoever
asks converts nothing by what it was told here alone (``model.value_types``). Counterparts: ``model.state_identity``,
which writes the texts; ``protocol.checkpoints.evolution``, which compares two of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headgate.model.state_identity import Form, StateIdentity
from headgate.model.value_types import StructOf, ValueType, read_columns, read_type

ACCUMULATORS = "accumulators"
"""The state of ``reduce``."""

_LISTS = "operator state("
_STATE = re.compile(r"(value|list|map|union|broadcast map) (.+?): (.+)", re.DOTALL)
_TIMERS = "timers"


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """One state. ``kind``: value, list, map, union or broadcast map; ``key_type``: of a map's own keys, else None."""

    kind: str
    name: str
    type: ValueType
    key_type: ValueType | None = None


@dataclass(frozen=True, slots=True)
class FunctionParts:
    """The states of a user's function.

    Attributes:
        keys: columns of the key as they are written, "" where no state belongs to keys.
        states: those of keys; ``lists``: those of subtasks.
    """

    keys: str = ""
    states: tuple[DeclaredState, ...] = ()
    lists: tuple[DeclaredState, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordParts:
    """Records that an operator of Headgate's own keeps.

    Attributes:
        head: all that must stay the same.
        section: what the state is called in snapshots.
        keys: names of the key's columns.
        lists: those that the user's function has beside.
    """

    head: str
    section: str
    keys: tuple[str, ...]
    columns: StructOf
    lists: tuple[DeclaredState, ...] = ()


def parts_of(identity: StateIdentity) -> FunctionParts | RecordParts | None:
    """Return the parts of a state; None: it has none that could change, or they are not clear."""
    match identity.form:
        case Form.KEYED:
            return _function_parts(identity.text)
        case Form.REDUCE:
            return _reduce_parts(identity.text)
        case Form.WINDOW_RECORDS:
            return _window_parts(identity.text)
        case Form.OTHER:
            return _function_parts(identity.text)
        case _:
            return None


def _function_parts(text: str) -> FunctionParts | None:
    keyed, lists = ("", _lists(text)) if text.startswith(_LISTS) else _beside(text)
    keys, states = _keyed(keyed) if keyed else ("", ())
    return None if states is None or lists is None else FunctionParts(keys, states, lists)


def _beside(text: str) -> tuple[str, tuple[DeclaredState, ...] | None]:
    """Return what is in front of the lists, and these."""
    own, _, lists = text.partition(f"; {_LISTS}")
    return own, _lists(_LISTS + lists) if lists else ()


def _lists(text: str) -> tuple[DeclaredState, ...] | None:
    return _declared(text.removeprefix(_LISTS).removesuffix(")").split("; "))


def _keyed(text: str) -> tuple[str, tuple[DeclaredState, ...] | None]:
    if not (text.startswith(Form.KEYED.value) and text.endswith(")")):
        return "", None
    keys, *states = text[len(Form.KEYED.value) : -1].split("; ")
    if read_columns(keys) is None:
        return "", None
    return keys, _declared([state for state in states if state != _TIMERS])


def _declared(texts: list[str]) -> tuple[DeclaredState, ...] | None:
    found = [_state(text) for text in texts]
    return None if None in found else tuple(state for state in found if state is not None)


def _state(text: str) -> DeclaredState | None:
    match = _STATE.fullmatch(text)
    if match is None:
        return None
    kind, name, types = match.groups()
    has_keys = kind in ("map", "broadcast map")
    outer, _, inner = types.rpartition(" -> ") if has_keys else ("", "", types)
    key_type, dtype = read_type(outer), read_type(inner)
    if dtype is None or has_keys != (key_type is not None):
        return None
    return DeclaredState(kind, name, dtype, key_type)


def _reduce_parts(text: str) -> RecordParts | None:
    own, lists = _beside(text)
    keys, _, columns = own.removeprefix(Form.REDUCE.value).partition("; columns ")
    found = read_columns(columns.removesuffix(")"))
    names = tuple(keys.split(", "))
    if found is None or lists is None or not {*names} <= {name for name, _ in found}:
        return None
    return RecordParts(f"{Form.REDUCE.value}{keys}", ACCUMULATORS, names, StructOf(found), lists)


def _window_parts(text: str) -> RecordParts | None:
    head, _, rest = text.partition("; keys ")
    keys, *columns = rest.removesuffix(")").split("; ")
    found, kept = read_columns(keys), read_columns(", ".join(columns))
    if found is None or kept is None:
        return None
    return RecordParts(f"{head}; keys {keys}", "records", tuple(name for name, _ in found), StructOf(kept))
