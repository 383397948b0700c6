"""What is to become of the state of one operator: new rows, rows that stay, or none (WS2, WS3).

Pure decisions over what a checkpoint has and what a pipeline declares. Counterparts: ``draft``, which collects what
somebody wants; ``writing``, which carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from headgate.codec.snapshot import BROADCAST_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX
from headgate.codec.zones import gains_zones
from headgate.errors import UsageError
from headgate.model.state_identity import StateIdentity, declared
from headgate.runtime.stored_state.catalog import StoredState
from headgate.runtime.stored_state.shapes import OF_TIMERS, Kind, Shape
from headgate.runtime.written_state.columns import WRITABLE
from headgate.runtime.written_state.declared import Declared
from headgate.state.descriptors import Section
from headgate.state.ttl import other_form

_DECLARED = (Kind.VALUE, Kind.LIST, Kind.MAP)
_NOT_ROWS = (Kind.FACTS, Kind.ROUNDS, Kind.POSITIONS, Kind.COMMITTABLES, Kind.IN_FLIGHT)
"""What an operator has beside its state; it stays."""


@dataclass(frozen=True, slots=True)
class Becomes:
    """What one state becomes.

    Attributes:
        shape: of the state afterwards.
        given: all of its rows, as somebody gave them; None: nobody did.
        stays: the columns of the rows that are there and stay; None: none do.
    """

    shape: Shape
    given: pa.Table | None = None
    stays: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class StateChange:
    """What the states of one operator become that are in one section of its snapshots.

    Attributes:
        prefix: of the section.
        text: the identity of the operator's state afterwards.
        meta: what belongs to no key, for an operator that has none of it yet.
    """

    operator: str
    prefix: str
    text: str
    states: Mapping[str, Becomes]
    meta: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def section(self) -> str:
        """The section of its parts."""
        return f"{self.prefix}{self.operator}"

    def stored(self, name: str) -> Section:
        """Return the section of one state inside."""
        shape = self.states[name].shape
        return Section(name, shape.schema, shape.keys)


Wanted = Mapping[str, pa.Table]
"""Rows by the state that gets them."""


def changed_states(
    operator: str,
    text: str,
    stored: Sequence[StoredState],
    known: Declared | None,
    wanted: Wanted,
    dropped: Collection[str],
) -> list[StateChange]:
    """Return what becomes of an operator.

    Args:
        operator: its name.
        text: the identity of its state in the checkpoint.
        stored: its states in the checkpoint.
        known: what the pipeline declares of it, if there is one.
        wanted: rows of its states.
        dropped: states of it that are given up.

    Raises:
        UsageError: there is no such state, nobody can write it, or others do not fit it any more.
    """
    found = {prefix: _of(stored, prefix) for prefix in (STATE_PREFIX, LISTS_PREFIX, UNION_PREFIX, BROADCAST_PREFIX)}
    lists = {prefix: states for prefix, states in found.items() if prefix != STATE_PREFIX}
    in_lists = {name for states in lists.values() for name in states}
    keyed = {name for name in (*wanted, *dropped) if name not in in_lists}
    if found[BROADCAST_PREFIX].keys() & {*wanted, *dropped}:
        _refuse_copies(operator, stored)
    changes = [
        _lists_change(operator, prefix, text, states, wanted, dropped)
        for prefix, states in lists.items()
        if states.keys() & {*wanted, *dropped}
    ]
    if keyed:
        rows = {name: table for name, table in wanted.items() if name in keyed}
        gone = [name for name in dropped if name in keyed]
        one = _Keyed(operator, text, found[STATE_PREFIX], known, rows, gone)
        changes.append(one.declared_change() if known is not None and known.states is not None else one.stored_change())
    return changes


def _of(stored: Sequence[StoredState], prefix: str) -> dict[str, StoredState]:
    return {
        state.name.removeprefix(prefix): state
        for state in stored
        if state.pieces[0].prefix == prefix and state.shape.kind not in _NOT_ROWS
    }


def _refuse_copies(operator: str, stored: Sequence[StoredState]) -> None:
    """Refuse to change broadcast state of which each subtask has a copy that lacks what is in flight to it (BC6).

    Raises:
        UsageError
    """
    if any(state.pieces[0].prefix == BROADCAST_PREFIX and state.shape.kind is Kind.FACTS for state in stored):
        raise UsageError(
            f"broadcast state of operator '{operator}' cannot be changed in a checkpoint whose barriers may overtake "
            "records, because each subtask has a copy of its own there; take a savepoint, and change that"
        )


def _lists_change(
    operator: str,
    prefix: str,
    text: str,
    stored: Mapping[str, StoredState],
    wanted: Wanted,
    dropped: Collection[str],
) -> StateChange:
    """Lists of an operator stay declared: one that is dropped is empty."""
    states = {
        name: Becomes(s.shape, wanted.get(name), None if name in {*wanted, *dropped} else s.shape.schema)
        for name, s in stored.items()
    }
    return StateChange(operator, prefix, text, states)


@dataclass(frozen=True, slots=True)
class _Keyed:
    """The keyed state of one operator, and what is wanted of it."""

    operator: str
    text: str
    stored: Mapping[str, StoredState]
    known: Declared | None
    wanted: Wanted
    dropped: Sequence[str]

    def stored_change(self) -> StateChange:
        """Return what becomes of it as far as the checkpoint tells: no pipeline says more."""
        for name in (*self.wanted, *self.dropped):
            if name not in self.stored:
                raise UsageError(self._no_such(name, list(self.stored)))
        for name, state in self.stored.items():
            self._refuse_unwritable(name, state.shape)
        is_declared = {n: s.shape for n, s in self.stored.items() if s.shape.kind in _DECLARED}
        gone = [name for name in self.dropped if name in is_declared and name not in self.wanted]
        text = self._text_without(is_declared, gone) if gone else self.text
        states = {
            name: Becomes(state.shape, self.wanted.get(name), state.shape.schema if self._stays(name) else None)
            for name, state in self.stored.items()
            if name not in gone
        }
        return StateChange(self.operator, STATE_PREFIX, text, states)

    def declared_change(self) -> StateChange:
        """Return what becomes of it for a pipeline that declares it, perhaps otherwise than the checkpoint has it."""
        assert self.known is not None
        assert self.known.states is not None
        shapes = self.known.states
        for name in self.wanted:
            if name not in shapes:
                raise UsageError(self._no_such(name, list(shapes)))
        for name in self.dropped:
            if name not in shapes and name not in self.stored:
                raise UsageError(self._no_such(name, [*shapes, *self.stored]))
        for name, state in self.stored.items():
            is_left = state.rows == 0 and state.shape.kind in OF_TIMERS.values()
            if name not in shapes and name not in self.dropped and not is_left:
                raise UsageError(
                    f"operator '{self.operator}' has the state '{name}', which the pipeline does not declare any more; "
                    f"say drop('{self.operator}', '{name}'), or declare it"
                )
        states = {n: Becomes(shape, self.wanted.get(n), self._stays_as(n, shape)) for n, shape in shapes.items()}
        return StateChange(self.operator, STATE_PREFIX, self.known.node.state_text, states, self.known.meta)

    def _stays(self, name: str) -> bool:
        return name not in self.wanted and name not in self.dropped

    def _stays_as(self, name: str, shape: Shape) -> pa.Schema | None:
        """Return the columns of rows that are there and stay; they must fit what the pipeline declares."""
        if name not in self.stored or not self._stays(name):
            return None
        stored = self.stored[name].shape
        is_same = stored.shown_keys == shape.shown_keys or not stored.keys
        forms = [other_form(shape.schema)] if shape.kind in _DECLARED else []  # TL7
        if is_same and any(gains_zones(stored.schema, one) for one in (shape.schema, *forms)):  # EV12
            return stored.schema
        raise UsageError(
            f"state '{name}' of operator '{self.operator}' has the columns ({_text(stored)}), and the pipeline "
            f"declares ({_text(shape)}); give its rows anew, or say drop('{self.operator}', '{name}')"
        )

    def _refuse_unwritable(self, name: str, shape: Shape) -> None:
        if shape.kind not in WRITABLE or not shape.keys:
            why = "its key cannot be told" if shape.kind in WRITABLE else f"it is of the kind '{shape.kind.value}'"
            raise UsageError(f"state '{name}' of operator '{self.operator}' cannot be written from outside: {why}")

    def _no_such(self, name: str, there: Sequence[str]) -> str:
        if self.known is not None and self.known.states is None and not self.stored:
            return (
                f"state of operator '{self.operator}' cannot be made before it has run: rows can be given of process "
                "functions, of reduce, and of the positions of sources; it begins empty"
            )
        listed = ", ".join(dict.fromkeys(there)) or "none"
        return f"operator '{self.operator}' has no state '{name}'; it has {listed}"

    def _text_without(self, shapes: Mapping[str, Shape], gone: Collection[str]) -> str:
        """Return the identity without states that are dropped; it is only changed where it is understood (WS3)."""
        keys = next((list(zip(s.shown_keys, s.schema.types, strict=False)) for s in shapes.values()), [])
        columns = [(name, str(dtype)) for name, dtype in keys]
        states = {name: _state_text(name, shape) for name, shape in sorted(shapes.items())}
        has_timers = any(state.shape.kind in OF_TIMERS.values() for state in self.stored.values())
        whole = StateIdentity.of_keyed(columns, list(states.values()), has_timers=has_timers)
        rest = self.text[len(whole.text) :]
        if not self.text.startswith(whole.text) or (rest and not rest.startswith("; operator state(")):
            raise UsageError(self._not_understood(gone))
        left = [text for name, text in states.items() if name not in gone]
        kept = StateIdentity.of_keyed(columns, left, has_timers=has_timers)
        return kept.beside(StateIdentity(rest.removeprefix("; "))).text

    def _not_understood(self, gone: Collection[str]) -> str:
        return (
            f"what operator '{self.operator}' has beside '{', '.join(gone)}' cannot be told from the savepoint alone; "
            "give the pipeline that declares its state now: edit_savepoint(..., pipeline=p)"
        )


def _state_text(name: str, shape: Shape) -> str:
    schema = shape.schema
    dtype = str(schema.field("value").type)
    inner = f"{schema.field('map_key').type} -> {dtype}" if shape.kind is Kind.MAP else dtype
    return declared(shape.kind.value, name, inner)


def _text(shape: Shape) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in shape.shown)
