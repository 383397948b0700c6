"""The draft of a savepoint: its base, the states that a pipeline declares, and the changes to them.

Collects changes, checks each at once as far as possible, and decides the outcome for every operator. ``writer``
carries it out; users call the API's savepoint builder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import BROADCAST_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import Node, Role
from headgate.model.manifest import Manifest, SnapshotPart
from headgate.model.plan import PipelineDefinition, Vertex
from headgate.model.state_schema import StateIdentity, declared
from headgate.operators.base import key_columns
from headgate.operators.process.declarations import StatefulFunctionSpec
from headgate.operators.reduction import ReduceSpec
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.runtime.checkpoints.snapshot_files import part_location
from headgate.runtime.savepoint_writer.rows import (
    WRITABLE,
    OwnedRows,
    distribute,
    owners_of,
    stored_columns,
    subtask_of,
)
from headgate.runtime.state_reader.lookup import POSITIONS, StoredCheckpoint, operators_of
from headgate.runtime.state_reader.reader import StoredState, states_of
from headgate.runtime.state_reader.schema import OF_TIMERS, Kind, Shape, shape_of
from headgate.state.backend import TIMERS, TimeKind, TimersMeta, timer_section
from headgate.state.descriptors import Section, section_of, type_text
from headgate.state.ttl import TTL_SECTION, TtlMeta, other_form
from headgate.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Declared:
    """What an operator of a pipeline has for state.

    Attributes:
        node: the operator.
        vertex: the chain that it is in.
        states: shapes of its keyed states by name, those of its timers among them; None: unknown before a run.
        meta: sections that belong to no key, of an operator that begins.
    """

    node: Node
    vertex: Vertex
    states: Mapping[str, Shape] | None = None
    meta: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_source(self) -> bool:
        """Whether it reads input."""
        return self.node.role is Role.SOURCE

    @property
    def has_rows(self) -> bool:
        """Whether it keeps anything of records; event time is none of that."""
        return bool(self.node.state_text) and not self.is_source and not isinstance(self.node.spec, WithTimestampsSpec)


def declared_in(definition: PipelineDefinition, now_ms: int) -> dict[str, Declared]:
    """Return what each operator of a pipeline declares. ``now_ms``: processing time of what begins."""
    return {
        str(node.name): _declared(node, vertex, now_ms) for vertex in definition.plan.vertices for node in vertex.nodes
    }


def _declared(node: Node, vertex: Vertex, now_ms: int) -> Declared:
    spec = node.spec
    identity = StateIdentity(node.state_text)
    if not isinstance(spec, StatefulFunctionSpec | ReduceSpec):
        return Declared(node, vertex)
    keys = key_columns(spec.schema, spec.keys)
    descriptors = (spec.descriptor,) if isinstance(spec, ReduceSpec) else spec.descriptors
    sections = [section_of(keys, descriptor) for descriptor in descriptors]
    meta: dict[str, bytes] = {}
    if any(descriptor.ttl is not None for descriptor in descriptors):
        meta[TTL_SECTION] = TtlMeta(now_ms).encode()
    if not isinstance(spec, ReduceSpec) and spec.has_timers:
        sections += [timer_section(keys, kind) for kind in TimeKind]
        meta[TIMERS] = TimersMeta(now_ms, has_ended=False).encode()
    return Declared(node, vertex, _shapes(identity, sections), meta)


def _shapes(identity: StateIdentity, sections: list[Section]) -> dict[str, Shape]:
    return {section.name: shape_of(identity, STATE_PREFIX, section.name, section.schema) for section in sections}


_DECLARED = (Kind.VALUE, Kind.LIST, Kind.MAP)
_NOT_ROWS = (Kind.FACTS, Kind.ROUNDS, Kind.POSITIONS, Kind.COMMITTABLES, Kind.IN_FLIGHT)
"""What an operator has beside its state; it stays."""


@dataclass(frozen=True, slots=True)
class Becomes:
    """What one state becomes.

    Attributes:
        shape: of the state afterwards.
        given: all of its rows, as given by the user; None: not given.
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
        UsageError: there is no such state, it cannot be written, or others do not fit it any more.
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
    """Refuse to change broadcast state of which each subtask has a copy that lacks what is in flight to it.

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
        assert self.known is not None, "only a pipeline declares states"
        assert self.known.states is not None, "its states are known before a run"
        shapes = self.known.states
        for name in self.wanted:
            if name not in shapes:
                raise UsageError(self._no_such(name, list(shapes)))
        for name in self.dropped:
            if name not in shapes and name not in self.stored:
                raise UsageError(self._no_such(name, [*shapes, *self.stored]))
        for name, state in self.stored.items():
            # timers without a row need no declaration: nothing of them can be lost
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
        forms = [other_form(shape.schema)] if shape.kind in _DECLARED else []
        if is_same and any(stored.schema.equals(one) for one in (shape.schema, *forms)):
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
        """Return the identity without states that are dropped; it is only changed where it is understood."""
        keys = next((list(zip(s.shown_keys, s.schema.types, strict=False)) for s in shapes.values()), [])
        columns = [(name, str(dtype)) for name, dtype in keys]
        states = {name: _state_text(name, shape) for name, shape in sorted(shapes.items())}
        has_timers = any(state.shape.kind in OF_TIMERS.values() for state in self.stored.values())
        # Built once more from what is stored, and compared: an identity that is not understood to its last character
        # stays.
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
    dtype = type_text(schema.field("value").type)
    inner = f"{schema.field('map_key').type} -> {dtype}" if shape.kind is Kind.MAP else dtype
    return declared(shape.kind.value, name, inner)


def _text(shape: Shape) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in shape.shown)


_POSITIONS = Shape(
    Kind.POSITIONS,
    pa.schema([("split", pa.large_string()), ("position", pa.large_binary())]),
    names=("split", "position"),
)

Positions = Mapping[int, Mapping[str, bytes]]
"""Positions of a source by subtask and split."""


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint or savepoint that a draft begins with."""

    checkpoint: StoredCheckpoint
    storage: Storage

    @property
    def manifest(self) -> Manifest:
        """What is in it."""
        return self.checkpoint.manifest

    def read(self, part: SnapshotPart) -> memoryview:
        """Return the bytes of a part, verified. Raises as ``StoredCheckpoint.read`` does."""
        return self.checkpoint.read(self.storage, part)

    def where(self, part: SnapshotPart) -> str:
        """Return where a part is, for messages."""
        return part_location(self.checkpoint.place.prefix, part)

    def states(self, operator: str) -> list[StoredState]:
        """Return the states of one operator."""
        return states_of(self.checkpoint, self.storage, operator, is_counted=True)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a savepoint will be.

    Attributes:
        changes: by the section of snapshots that they are in.
        rows: of each state with given rows, by section and state.
        positions: of the sources with other positions than in the base; {}: it begins at its beginning.
        gone: operators that are dropped.
        texts: the identity of every operator's state.
    """

    parallelism: int
    max_parallelism: int
    changes: Mapping[str, StateChange]
    rows: Mapping[tuple[str, str], OwnedRows]
    positions: Mapping[str, Positions]
    gone: frozenset[str]
    texts: Mapping[str, str]


@dataclass
class _Requested:
    """What is wanted of one operator."""

    rows: dict[str, pa.Table] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    is_gone: bool = False


class Draft:
    """A savepoint to be written: a base, or nothing, and a pipeline, or none; not both missing."""

    def __init__(
        self, base: Base | None, definition: PipelineDefinition | None, now_ms: int, parallelism: int | None = None
    ) -> None:
        """``now_ms``: the processing time of operators that begin. ``parallelism``: without a base."""
        self.base = base
        self.definition = definition
        self.declared: Mapping[str, Declared] = {} if definition is None else declared_in(definition, now_ms)
        self._wishes: dict[str, _Requested] = {}
        if base is not None:
            self._parallelism, self._max = base.manifest.parallelism, base.manifest.max_parallelism
            self._refuse_other_key_groups()
        else:
            assert definition is not None, "a draft has a base or a pipeline"
            self._max = definition.plan.max_parallelism
            self._parallelism = parallelism or definition.plan.parallelism

    @property
    def pipeline(self) -> str:
        """Name of the savepoint's pipeline."""
        if self.base is not None:
            return self.base.checkpoint.pipeline
        assert self.definition is not None, "a draft has a base or a pipeline"
        return self.definition.config.name

    @property
    def given(self) -> frozenset[tuple[str, str]]:
        """The states with given rows, by operator and name."""
        return frozenset((operator, name) for operator, wishes in self._wishes.items() for name in wishes.rows)

    @property
    def begins_empty(self) -> tuple[str, ...]:
        """The operators of a new savepoint that have state, and no given rows."""
        named = {operator for operator, _ in self.given}
        stateful = [name for name, one in self.declared.items() if one.has_rows]
        return () if self.base is not None else tuple(name for name in stateful if name not in named)

    def put(self, operator: str, state: str, rows: pa.Table, *, must_be_there: bool) -> None:
        """Have ``rows`` be all rows of a state.

        Args:
            operator: its name.
            state: its name.
            rows: with the columns that reading shows.
            must_be_there: the base has such an operator.

        Raises:
            UsageError: there is no such state, or the rows do not fit it.
        """
        self._refuse_unknown(operator, must_be_there=must_be_there)
        wishes = self._wishes.setdefault(operator, _Requested())
        if state in wishes.rows:
            raise UsageError(f"state '{state}' of operator '{operator}' is given twice")
        wishes.rows[state] = rows

    def drop(self, operator: str, state: str | None) -> None:
        """Give up a state, or an operator with all that is of it.

        Raises:
            UsageError: the base has no such operator.
        """
        self._refuse_unknown(operator, must_be_there=True)
        wishes = self._wishes.setdefault(operator, _Requested())
        wishes.is_gone |= state is None
        wishes.dropped |= set() if state is None else {state}

    def resolved(self) -> Resolved:
        """Return what becomes of every operator.

        Raises:
            UsageError: a wish cannot be fulfilled; names it.
            CorruptionError, StorageError
        """
        texts = dict(self.base.manifest.state_texts) if self.base is not None else self._declared_texts()
        changes: dict[str, StateChange] = {}
        positions: dict[str, Positions] = {}
        for operator, wishes in self._wishes.items():
            if wishes.is_gone:
                texts.pop(operator, None)
            if POSITIONS in {*wishes.rows, *wishes.dropped} and self._is_source(operator):
                positions[operator] = self._positions(operator, wishes.rows.get(POSITIONS))
                texts.setdefault(operator, self._text(operator))
            for change in self._changed(operator, wishes):
                changes[change.section] = change
                texts[operator] = change.text
        changes = {**self._begun(changes), **changes}
        rows = {
            (section, name): self._dealt_out(change, name, becomes)
            for section, change in changes.items()
            for name, becomes in change.states.items()
            if becomes.given is not None
        }
        gone = frozenset(name for name, wishes in self._wishes.items() if wishes.is_gone)
        return Resolved(self._parallelism, self._max, changes, rows, positions, gone, texts)

    def _changed(self, operator: str, wishes: _Requested) -> list[StateChange]:
        is_source = self._is_source(operator)
        rows = {name: table for name, table in wishes.rows.items() if not (is_source and name == POSITIONS)}
        dropped = [name for name in sorted(wishes.dropped) if not (is_source and name == POSITIONS)]
        dropped = [] if wishes.is_gone else dropped
        if not rows and not dropped:
            return []
        # an operator that is dropped and given rows begins as if the base had never had it
        stored = [] if self.base is None or wishes.is_gone else self.base.states(operator)
        return changed_states(operator, self._text(operator), stored, self.declared.get(operator), rows, dropped)

    def _begun(self, changes: Mapping[str, StateChange]) -> dict[str, StateChange]:
        """Return the changes of the operators of a new savepoint without given rows: they begin empty."""
        if self.base is not None:
            return {}
        found = [
            changed_states(name, "", [], known, {state: _no_rows(known.states[state]) for state in known.states}, [])
            for name, known in self.declared.items()
            if known.states
        ]
        return {change.section: change for several in found for change in several if change.section not in changes}

    def _dealt_out(self, change: StateChange, name: str, becomes: Becomes) -> OwnedRows:
        assert becomes.given is not None, "only given rows are distributed"
        shape, what = becomes.shape, f"state '{name}' of operator '{change.operator}'"
        rows = stored_columns(becomes.given, shape, what)
        if shape.keys:
            owners = owners_of(rows, shape, self._max, self._parallelism)
        else:
            owners = subtask_of(becomes.given, self._parallelism, shape.kind)
        return distribute(rows, owners, self._parallelism)

    def _positions(self, operator: str, given: pa.Table | None) -> Positions:
        if given is None:
            return {}
        what = f"state '{POSITIONS}' of operator '{operator}'"
        rows = stored_columns(given, _POSITIONS, what)
        splits, found = rows.column(0).to_pylist(), rows.column(1).to_pylist()
        if len({*splits}) < len(splits):
            twice = next(split for split in splits if splits.count(split) > 1)
            raise UsageError(f"{what}: the rows have the split {twice!r} more than once")
        owners: np.ndarray = subtask_of(given, self._parallelism, _POSITIONS.kind)
        # the first subtask has some even without a row: no positions at all would mean a first start
        positions: dict[int, dict[str, bytes]] = {0: {}}
        for split, position, owner in zip(splits, found, owners.tolist(), strict=True):
            positions.setdefault(owner, {})[split] = position
        return positions

    def _is_source(self, operator: str) -> bool:
        if operator in self.declared:
            return self.declared[operator].is_source
        states = [] if self.base is None else self.base.states(operator)
        return any(state.shape.kind is Kind.POSITIONS for state in states)

    def _text(self, operator: str) -> str:
        stored = {} if self.base is None else self.base.manifest.state_texts
        known = self.declared.get(operator)
        return stored.get(operator, "" if known is None else known.node.state_text)

    def _declared_texts(self) -> dict[str, str]:
        return {name: known.node.state_text for name, known in self.declared.items()}

    def _refuse_unknown(self, operator: str, *, must_be_there: bool) -> None:
        there = list(self.declared)
        if self.base is not None:
            of_base = operators_of(self.base.checkpoint)
            of_base += [name for name in self.base.manifest.state_texts if name not in of_base]
            there = of_base if must_be_there else [*there, *of_base]
        if operator not in there:
            stateless = {name for name, one in self.declared.items() if not one.has_rows and not one.is_source}
            listed = ", ".join(sorted({*there} - stateless)) or "none"
            raise UsageError(f"there is no operator '{operator}' in {self._what()}; the operators are {listed}")

    def _what(self) -> str:
        return f"pipeline '{self.pipeline}'" if self.base is None else self.base.checkpoint.what

    def _refuse_other_key_groups(self) -> None:
        if self.definition is not None and self.definition.plan.max_parallelism != self._max:
            raise UsageError(
                f"{self._what()} has {self._max} key groups, but the pipeline {self.definition.plan.max_parallelism}; "
                f"give it max_parallelism={self._max}"
            )


def _no_rows(shape: Shape) -> pa.Table:
    return shape.shown.empty_table()
