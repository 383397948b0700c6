"""Declaration of state in ``open``, and the spec of a function with state, by row and by batch.

``open`` runs once in the driver, on a copy of the function, to learn what is declared, and once in each subtask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.model.schema_evolution import OperatorRules
from headgate.model.state_schema import StateIdentity
from headgate.operators.base import Operator, OperatorMetrics, key_columns
from headgate.operators.counters import bind_counters
from headgate.operators.keys import check_keys
from headgate.operators.process.broadcast_state import BroadcastSide
from headgate.operators.process.side_outputs import side_schemas
from headgate.operators.schemas import SchemaLike, as_schema
from headgate.operators.user_functions import UserFunctionError, copied, own_method, user_traceback
from headgate.state.backend import RESERVED_PREFIX
from headgate.state.descriptors import (
    NO_EVOLUTION,
    Evolution,
    StateDescriptor,
    StateKind,
    broadcast_text,
    check_names,
    checked_evolution,
    state_identity,
)
from headgate.state.key_hash import KEY_TYPES, is_key_type
from headgate.state.ttl import TTL

ValueT_co = TypeVar("ValueT_co", covariant=True)
ListT_co = TypeVar("ListT_co", covariant=True)
MapT_co = TypeVar("MapT_co", covariant=True)


class HandleFactory(Protocol[ValueT_co, ListT_co, MapT_co]):
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

    def __init__(self, node: str, maker: HandleFactory[V, L, M], side: BroadcastSide | None = None) -> None:
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
        """Drop what older checkpoints have of state ``name``, which is not declared any more."""
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
        """Declare a broadcast state; return it with its side."""
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
        """The states that are dropped; for Headgate only."""
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
            raise UsageError(f"operator '{self._node}': the ttl of state '{name}' is a TTL('7d'), not {ttl!r}")
        own_key = None if kind is not StateKind.MAP else self._type(name, key_type)
        if own_key is not None and not is_key_type(own_key):
            raise UsageError(
                f"operator '{self._node}': the keys of map state '{name}' cannot be {own_key}; {KEY_TYPES}"
            )
        dtype = self._type(name, type)
        checked_evolution(f"operator '{self._node}': state '{name}'", evolution, dtype)
        descriptor = StateDescriptor(name, kind, dtype, own_key, ttl, evolution)
        self._descriptors.append(descriptor)
        return descriptor

    def _type(self, name: str, given: Any) -> pa.DataType:
        try:
            return as_schema(self._node, {name: given}).field(0).type
        except UsageError as error:
            raise UsageError(f"operator '{self._node}': state '{name}': {error.message}") from None


class StatefulFunction(Protocol):
    """What is common to both forms."""

    schema: SchemaLike | None

    def on_timer(self, timer: Any, context: Any, /) -> Any:
        """Called when timers fire."""

    def close(self) -> None:
        """Called when the subtask ends."""


Function = TypeVar("Function", bound=StatefulFunction)


@dataclass(frozen=True)
class StatefulFunctionSpec(ABC, Generic[Function]):
    """Call a function with state for each key.

    Attributes:
        schema: of the input.
        descriptors: of the states that the function declares.
        forgotten: states of older programs that it drops.
        broadcasts: the broadcast states that it declares.
    """

    form: ClassVar[type[StatefulFunction]]
    """The class that users derive such functions from."""

    keys: tuple[str, ...]
    function: Function
    schema: pa.Schema
    descriptors: tuple[StateDescriptor, ...]
    forgotten: frozenset[str] = frozenset()
    broadcasts: tuple[StateDescriptor, ...] = ()

    @abstractmethod
    def build(self) -> Operator:
        """See ``OperatorSpec``."""

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results.

        Raises:
            UsageError: the key is not in the input, or the function's ``schema`` has an unknown type.
        """
        if self.keys:  # what stands beside a broadcast side need not have any
            check_keys(node, schema, self.keys)
        return schema if self.function.schema is None else as_schema(node, self.function.schema)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return the schemas of the results and of the function's side outputs.

        Raises:
            UsageError: see ``output_schema``; or a wrong declaration of side outputs.
        """
        main = inputs[MAIN_INPUT]
        return {MAIN: self.output_schema(main, node), **side_schemas(node, self.function, main)}

    @property
    def has_timers(self) -> bool:
        """Whether the function has ``on_timer``."""
        return type(self.function).on_timer is not self.form.on_timer

    def state_text(self) -> str:
        keys = key_columns(self.schema, self.keys)
        of_keys = StateIdentity(state_identity(keys, self.descriptors, has_timers=self.has_timers))
        broadcasts = sorted(self.broadcasts, key=lambda one: one.name)
        return of_keys.beside(StateIdentity.of_lists([broadcast_text(one) for one in broadcasts])).text

    def state_rules(self) -> OperatorRules:
        states = tuple((one.name, one.evolution.rules()) for one in self.descriptors)
        broadcasts = tuple((one.name, one.evolution.rules()) for one in self.broadcasts)
        return OperatorRules(states, broadcasts, self.forgotten, self.forgotten)


def learned_states(node: str, function: Any, states: Declarations[Any, Any, Any]) -> tuple[StateDescriptor, ...]:
    """Return what ``function`` declares, learned from a copy of it, which is opened and closed.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` or ``close`` raised.
    """
    own = copied(node, function)
    bind_counters(own, OperatorMetrics())
    found = declare_states(node, own, states)
    closes = own_method(own, "close")  # none if a state is kept under that name
    try:
        if closes is not None:
            closes()
    except Exception as error:
        raise UserFunctionError(node, "close()", user_traceback(error)) from None
    return found


def declare_states(node: str, function: Any, states: Declarations[Any, Any, Any]) -> tuple[StateDescriptor, ...]:
    """Call the function's ``open``; return what it declared."""
    try:
        function.open(states)
    except UsageError:
        raise
    except Exception as error:
        raise UserFunctionError(node, "open()", user_traceback(error)) from None
    return states.close()
