"""A savepoint that somebody puts together: what it begins with, and what shall be other (WS1, WS2, WS3).

Collects wishes, checks each at once as far as it can be, and decides what becomes of every operator. Counterparts:
``changes``, which decides about one; ``writing``, which carries it all out; ``api.written_state``, which users call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.manifest import Manifest, SnapshotPart
from headgate.runtime.checkpoints.snapshots import place_of
from headgate.runtime.stored_state.catalog import StoredState, states_of
from headgate.runtime.stored_state.pieces import POSITIONS, operators_of
from headgate.runtime.stored_state.places import StoredCheckpoint
from headgate.runtime.stored_state.shapes import Kind, Shape
from headgate.runtime.written_state.changes import Becomes, StateChange, changed_states
from headgate.runtime.written_state.columns import stored_columns, subtask_of
from headgate.runtime.written_state.declared import Declared, declared_in
from headgate.runtime.written_state.rows import OwnedRows, dealt_out, owners_of
from headgate.storage.base import Storage

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
        """Return the bytes of a part, verified (RS8). Raises as ``StoredCheckpoint.read`` does."""
        return self.checkpoint.read(self.storage, part)

    def where(self, part: SnapshotPart) -> str:
        """Return where a part is, for messages."""
        return place_of(self.checkpoint.place.prefix, part)

    def states(self, operator: str) -> list[StoredState]:
        """Return the states of one operator."""
        return states_of(self.checkpoint, self.storage, operator, is_counted=True)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a savepoint will be.

    Attributes:
        changes: by the section of snapshots that they are in.
        rows: of each state that is given anew, by section and state.
        positions: of the sources whose positions are other than in the base; {}: it begins at its beginning.
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
class _Wishes:
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
        self._wishes: dict[str, _Wishes] = {}
        if base is not None:
            self._parallelism, self._max = base.manifest.parallelism, base.manifest.max_parallelism
            self._refuse_other_key_groups()
        else:
            assert definition is not None
            self._max = definition.plan.max_parallelism
            self._parallelism = parallelism or definition.plan.parallelism

    @property
    def pipeline(self) -> str:
        """Whose savepoint it is."""
        if self.base is not None:
            return self.base.checkpoint.pipeline
        assert self.definition is not None
        return self.definition.config.name

    @property
    def given(self) -> frozenset[tuple[str, str]]:
        """The states that somebody gave rows, by operator and name."""
        return frozenset((operator, name) for operator, wishes in self._wishes.items() for name in wishes.rows)

    @property
    def begins_empty(self) -> tuple[str, ...]:
        """The operators of a new savepoint that have state, and that nobody gave any."""
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
        wishes = self._wishes.setdefault(operator, _Wishes())
        if state in wishes.rows:
            raise UsageError(f"state '{state}' of operator '{operator}' is given twice")
        wishes.rows[state] = rows

    def drop(self, operator: str, state: str | None) -> None:
        """Give up a state, or an operator with all that is of it.

        Raises:
            UsageError: the base has no such operator.
        """
        self._refuse_unknown(operator, must_be_there=True)
        wishes = self._wishes.setdefault(operator, _Wishes())
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

    def _changed(self, operator: str, wishes: _Wishes) -> list[StateChange]:
        is_source = self._is_source(operator)
        rows = {name: table for name, table in wishes.rows.items() if not (is_source and name == POSITIONS)}
        dropped = [name for name in sorted(wishes.dropped) if not (is_source and name == POSITIONS)]
        dropped = [] if wishes.is_gone else dropped
        if not rows and not dropped:
            return []
        stored = [] if self.base is None or wishes.is_gone else self.base.states(operator)
        return changed_states(operator, self._text(operator), stored, self.declared.get(operator), rows, dropped)

    def _begun(self, changes: Mapping[str, StateChange]) -> dict[str, StateChange]:
        """Return what becomes of the operators of a new savepoint that nobody gives rows: they begin empty."""
        if self.base is not None:
            return {}
        found = [
            changed_states(name, "", [], known, {state: _no_rows(known.states[state]) for state in known.states}, [])
            for name, known in self.declared.items()
            if known.states
        ]
        return {change.section: change for several in found for change in several if change.section not in changes}

    def _dealt_out(self, change: StateChange, name: str, becomes: Becomes) -> OwnedRows:
        assert becomes.given is not None
        shape, what = becomes.shape, f"state '{name}' of operator '{change.operator}'"
        rows = stored_columns(becomes.given, shape, what)
        if shape.keys:
            owners = owners_of(rows, shape, self._max, self._parallelism)
        else:
            owners = subtask_of(becomes.given, self._parallelism, shape.kind)
        return dealt_out(rows, owners, self._parallelism)

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
