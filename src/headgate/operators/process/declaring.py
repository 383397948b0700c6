"""How a user's ``open`` declares state, common to both forms of process functions (ST1).

``open`` runs once in the driver, on a copy of the function, to learn what is declared, and once in each subtask.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.process.broadcast_side import BroadcastSide
from headgate.operators.schemas import as_schema
from headgate.state.descriptors import StateDescriptor, StateKind
from headgate.state.evolution import NO_EVOLUTION, Evolution, check_names, checked
from headgate.state.key_hash import is_key_type
from headgate.state.timers import RESERVED_PREFIX
from headgate.state.ttl import TTL

ValueT_co = TypeVar("ValueT_co", covariant=True)
ListT_co = TypeVar("ListT_co", covariant=True)
MapT_co = TypeVar("MapT_co", covariant=True)


class StateMaker(Protocol[ValueT_co, ListT_co, MapT_co]):
    """Makes the objects through which a user's function reaches its state."""

    def value(self, descriptor: StateDescriptor) -> ValueT_co:
        """Return the handle of a value state."""

    def list(self, descriptor: StateDescriptor) -> ListT_co:
        """Return the handle of a list state."""

    def map(self, descriptor: StateDescriptor) -> MapT_co:
        """Return the handle of a map state."""


V = TypeVar("V")
L = TypeVar("L")
M = TypeVar("M")


class Declarations(Generic[V, L, M]):
    """Given to ``open``: declares value, list and map states, each by a name that is unique in its operator.

    Types are Arrow, Polars or Python types, as in a schema; structs and lists too. With ``ttl=TTL("7d")`` a value, each
    element of a list and each entry of a map lives for a while of processing time, and is then not there any more.
    ``evolution=Evolution(...)`` says what becomes of state that an older version of the program wrote.
    """

    def __init__(self, node: str, maker: StateMaker[V, L, M], side: BroadcastSide | None = None) -> None:
        """For Headgate only. ``side``: of a function that has a broadcast side."""
        self._side = side
        self._broadcasts: list[StateDescriptor] = []
        self._node = node
        self._descriptors: list[StateDescriptor] = []
        self._forgotten: set[str] = set()
        self._is_closed = False
        self._maker = maker

    def value(self, name: str, type: Any, *, ttl: TTL | None = None, evolution: Evolution = NO_EVOLUTION) -> V:
        """Declare one value per key; ``ttl`` says how long it lives."""
        return self._maker.value(self._declared(name, StateKind.VALUE, type, ttl, evolution))

    def list(self, name: str, type: Any, *, ttl: TTL | None = None, evolution: Evolution = NO_EVOLUTION) -> L:
        """Declare a list of elements per key; ``ttl`` says how long each element lives."""
        return self._maker.list(self._declared(name, StateKind.LIST, type, ttl, evolution))

    def map(
        self, name: str, key_type: Any, type: Any, *, ttl: TTL | None = None, evolution: Evolution = NO_EVOLUTION
    ) -> M:
        """Declare a map per key, from ``key_type`` (as for keys: numbers, booleans, times, text) to ``type``.

        ``ttl`` says how long each entry lives.
        """
        return self._maker.map(self._declared(name, StateKind.MAP, type, ttl, evolution, key_type))

    def forget(self, name: str) -> None:
        """Leave behind what older checkpoints have of state ``name``, which is not declared any more."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"operator '{self._node}': forget takes the name of a state, not {name!r}")
        self._forgotten.add(name)

    def close(self) -> tuple[StateDescriptor, ...]:
        """End the declarations; for Headgate only.

        Raises:
            UsageError: a name that is said to be an old one, or to be forgotten, is declared.
        """
        self._is_closed = True
        evolutions = {descriptor.name: descriptor.evolution for descriptor in self._descriptors}
        check_names(f"operator '{self._node}'", evolutions, self._forgotten)
        return tuple(one for one in self._descriptors if one not in self._broadcasts)

    @property
    def broadcasts(self) -> tuple[StateDescriptor, ...]:
        """The broadcast states; ``close`` returns the others. For Headgate only."""
        return tuple(self._broadcasts)

    def _declared_broadcast(
        self, name: str, key_type: Any, type: Any, evolution: Any
    ) -> tuple[StateDescriptor, BroadcastSide]:
        """Declare a broadcast state, and return who has it."""
        if self._side is None:
            raise UsageError(
                f"operator '{self._node}': broadcast state '{name}' needs a broadcast side; derive the function from "
                "headgate.BroadcastProcessFunction or headgate.BatchBroadcastProcessFunction, and give it to "
                "stream.connect(rules.broadcast()).process"
            )
        descriptor = self._declared(name, StateKind.MAP, type, None, evolution, key_type)
        self._broadcasts.append(descriptor)
        return descriptor, self._side

    @property
    def forgotten(self) -> frozenset[str]:
        """What is left behind; for Headgate only."""
        return frozenset(self._forgotten)

    def _declared(
        self, name: str, kind: StateKind, type: Any, ttl: Any, evolution: Any, key_type: Any = None
    ) -> StateDescriptor:
        if self._is_closed:
            raise UsageError(f"operator '{self._node}': state '{name}' must be declared in open()")
        if not isinstance(name, str) or not name:
            raise UsageError(f"operator '{self._node}': a state's name must be text, not {name!r}")
        if name.startswith(RESERVED_PREFIX):
            raise UsageError(
                f"operator '{self._node}': no state can be named '{name}', because names that begin with "
                f"'{RESERVED_PREFIX}' are Headgate's own; give it another name"
            )
        if any(descriptor.name == name for descriptor in self._descriptors):
            raise UsageError(f"operator '{self._node}': two states are named '{name}'; give each a name of its own")
        if ttl is not None and not isinstance(ttl, TTL):
            raise UsageError(f"operator '{self._node}': the ttl of state '{name}' is a TTL('7d'), not {ttl!r}")  # TL1
        own_key = None if kind is not StateKind.MAP else self._type(name, key_type)
        if own_key is not None and not is_key_type(own_key):
            raise UsageError(
                f"operator '{self._node}': the keys of map state '{name}' cannot be {own_key}; use numbers, booleans, "
                "times, strings or binaries"
            )
        dtype = self._type(name, type)
        checked(f"operator '{self._node}': state '{name}'", evolution, dtype)
        descriptor = StateDescriptor(name, kind, dtype, own_key, ttl, evolution)
        self._descriptors.append(descriptor)
        return descriptor

    def _type(self, name: str, given: Any) -> pa.DataType:
        try:
            return as_schema(self._node, {name: given}).field(0).type
        except UsageError as error:
            raise UsageError(f"operator '{self._node}': state '{name}': {error.message}") from None
