"""What a process function declares: its state in ``open``, and its side outputs in ``side_outputs``.

``open`` runs once in the driver, on a copy of the function, to learn what is declared, and once in each subtask. What
a call emits to a side output (``emit_to`` of every context) is sent on after it, so that nothing downstream runs in the
middle of a user's function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import BAD_RECORDS, MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.model.schema_evolution import OperatorRules
from headgate.model.state_schema import StateIdentity
from headgate.operators.base import Operator, OperatorMetrics, key_columns
from headgate.operators.functions import Refused, RowWriter, divert_refused, fitting_and_refused
from headgate.operators.keys import check_keys
from headgate.operators.process.broadcast_state import BroadcastSide
from headgate.operators.schemas import SchemaLike, as_schema, columns_of_frame, schema_text
from headgate.operators.user_functions import (
    UserFunctionError,
    bind_counters,
    copied,
    own_method,
    shortened,
    user_traceback,
)
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
        return self.declared

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
    def declared(self) -> tuple[StateDescriptor, ...]:
        """All states but the broadcast ones, so far. For Headgate only."""
        return tuple(one for one in self._descriptors if one not in self._broadcasts)

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


def open_as_planned(
    node: str, function: Any, states: Declarations[Any, Any, Any], planned: tuple[StateDescriptor, ...]
) -> None:
    """Call the function's ``open`` in a worker.

    Raises:
        UsageError: it declares other states than where the pipeline was built, whose names and types are in the plan.
    """
    try:
        found = declare_states(node, function, states)
    except UserFunctionError:
        found = states.declared
        if not set(found) - set(planned):  # a state that is not in the plan has no place, and asking for it fails
            raise
    if found != planned:
        here, there = (", ".join(f"'{one.name}'" for one in some) or "none" for some in (found, planned))
        raise UsageError(
            f"operator '{node}': open() declared the states {here} in a worker, and {there} where the pipeline was "
            "built, or others of these names; have it declare the same ones everywhere"
        )


SideOutputsLike: TypeAlias = Mapping[str, SchemaLike | None]
"""What a function declares: names and schemas; None: the schema of its input."""

EMIT_ROWS = 65_536
"""Larger results are sent on in parts of so many rows."""


def side_schemas(node: str, function: object, schema: pa.Schema) -> dict[OutputTag, pa.Schema]:
    """Return the side outputs that ``function`` declares, canonical; ``schema``: of its input.

    Raises:
        UsageError: a wrong declaration.
    """
    declared: Any = getattr(function, "side_outputs", None) or {}
    kind = type(function).__name__
    if not isinstance(declared, Mapping) or isinstance(declared, pl.Schema):
        raise UsageError(
            f"operator '{node}': {kind}.side_outputs must be a dict from names to schemas, such as "
            f"{{'late': {{'id': int}}}}, not {shortened(declared)}"
        )
    found: dict[OutputTag, pa.Schema] = {}
    for name, given in declared.items():
        if name in (MAIN, BAD_RECORDS):
            raise UsageError(f"operator '{node}': no side output of {kind} can be named '{name}', which is reserved")
        try:
            found[OutputTag(name)] = schema if given is None else as_schema(node, given)
        except UsageError as error:
            raise UsageError(f"{error.message} (side output '{name}' of {kind})") from None
    return found


class SideOutputs(ABC):
    """What calls of one function in one subtask have emitted to its side outputs and was not sent on yet."""

    def __init__(self, node: str, schemas: Mapping[OutputTag, pa.Schema]) -> None:
        self._node = node
        self._schemas = schemas

    def add(self, name: str, records: Any) -> None:
        """Take records for the side output ``name``.

        Raises:
            UsageError: it is not declared, or these are no records.
        """
        schema = self._schemas.get(OutputTag(name)) if isinstance(name, str) else None
        if schema is None:
            names = ", ".join(f"'{name}'" for name in self._schemas) or "none"
            raise UsageError(
                f"operator '{self._node}' has no side output {name!r}; its class declares in side_outputs: {names}"
            )
        self._take(OutputTag(name), schema, records)

    @abstractmethod
    def _take(self, tag: OutputTag, schema: pa.Schema, records: Any) -> None:
        """Keep the records."""

    @abstractmethod
    def send(self, operator: Operator) -> None:
        """Send all that was taken."""


class RowSideOutputs(SideOutputs):
    """Of a function by row."""

    def __init__(self, node: str, schemas: Mapping[OutputTag, pa.Schema]) -> None:
        super().__init__(node, schemas)
        self._rows: dict[OutputTag, list[Any]] = {}
        self._writers = {tag: RowWriter(schema, "side_outputs") for tag, schema in schemas.items()}

    def _take(self, tag: OutputTag, schema: pa.Schema, records: Any) -> None:
        if not isinstance(records, dict):
            raise UsageError(f"emit_to takes one record, a dict, not {type(records).__name__}; call it for each record")
        self._rows.setdefault(tag, []).append(self._writers[tag].taken(records))

    def send(self, operator: Operator) -> None:
        if not self._rows:
            return
        taken, self._rows = self._rows, {}
        for tag, rows in taken.items():
            batch, refused = self._writers[tag].batch(rows)
            divert_refused(operator, _of(tag, refused))
            operator.output.emit_to(tag, batch)


class BatchSideOutputs(SideOutputs):
    """Of a function by batch."""

    def __init__(self, node: str, schemas: Mapping[OutputTag, pa.Schema]) -> None:
        super().__init__(node, schemas)
        self._batches: list[tuple[OutputTag, pa.RecordBatch, list[Refused]]] = []

    def _take(self, tag: OutputTag, schema: pa.Schema, records: Any) -> None:
        if not isinstance(records, pl.DataFrame):
            raise UsageError(f"emit_to takes a DataFrame here, not {type(records).__name__}")
        try:
            self._batches.append((tag, *fitting_and_refused(columns_of_frame(records, schema), schema)))
        except (pa.ArrowException, pl.exceptions.PolarsError, KeyError, ValueError) as error:
            raise UsageError(
                f"records for side output '{tag}' must have the columns {schema_text(schema)}: {error}"
            ) from None

    def send(self, operator: Operator) -> None:
        taken, self._batches = self._batches, []
        for tag, batch, refused in taken:
            divert_refused(operator, _of(tag, refused))
            emit_in_parts(operator, tag, batch)


def _of(tag: OutputTag, refused: list[Refused]) -> list[Refused]:
    return [Refused(f"side output '{tag}': {one.problem}", one.record) for one in refused]


def emit_in_parts(operator: Operator, tag: OutputTag, batch: pa.RecordBatch) -> None:
    """Send a batch of any size to one output of ``operator``."""
    for start in range(0, batch.num_rows, EMIT_ROWS):
        part = batch.slice(start, EMIT_ROWS)
        if tag == MAIN:
            operator.output.emit(part)
        else:
            operator.output.emit_to(tag, part)
