"""Operators with state per key: a backend of their context's factory holds it (ST16, ST17 of docs/spec/state.md).

Freezing, encoding, restoring and choosing the keys that a subtask owns are the backend's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from headgate.codec.snapshot import decode_sections
from headgate.operators.base import Operator, OperatorContext, RestoredState
from headgate.state.backend import ContinuingBackend, Ownership, StateBackend
from headgate.state.descriptors import KeyColumns
from headgate.state.files import StoredFiles
from headgate.state.frozen import FrozenState


class KeyedOperator(Operator):
    """Asks for its backend in ``open``."""

    _backend: StateBackend

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the state of the keys that this subtask owns (ST4)."""
        for _ in self._restore_backend(states):
            pass

    def _restore_backend(
        self, states: Sequence[RestoredState]
    ) -> Iterator[tuple[RestoredState, Mapping[str, memoryview]]]:
        """Restore the backend part by part; yield each with its sections, which are not kept (SF10).

        Files come first: who goes on with a database has nothing in it yet (RB24).
        """
        owner = owner_of(self.context)
        continued: set[int] = set()
        for state in sorted(states, key=lambda state: state.files is None):
            if state.files is not None and id(state.files) not in continued and self._goes_on_with(state.files, owner):
                continued.add(id(state.files))
            if id(state.files) in continued:
                continue
            path = f"state of '{self.context.node}', subtask {state.subtask_index}"
            sections = decode_sections(state.payload, path)
            self._backend.restore(sections, path, owner)
            yield state, sections

    def _goes_on_with(self, files: StoredFiles, owner: Ownership) -> bool:
        return isinstance(self._backend, ContinuingBackend) and self._backend.go_on_with(files, owner)

    def freeze(self) -> FrozenState | None:
        """See ``Operator``."""
        return self._backend.freeze()


def owner_of(context: OperatorContext) -> Ownership:
    """Return which keys the subtask of this operator owns."""
    return Ownership(context.max_parallelism, context.parallelism, context.subtask_index)


def key_columns(schema: pa.Schema, keys: tuple[str, ...]) -> KeyColumns:
    """Return the columns ``keys`` of ``schema``, with their types; without any one that no record ever has.

    Only a function with a broadcast side may have no key (BC9): nothing of it is in the backend.
    """
    if not keys:
        return KeyColumns(("",), (pa.bool_(),))
    return KeyColumns(keys, tuple(schema.field(key).type for key in keys))
