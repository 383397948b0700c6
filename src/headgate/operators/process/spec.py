"""What both forms of process functions are to the catalogue: keys, a function, and what it declared (ST1).

Counterparts: ``by_row`` and ``by_batch``, which call the function; ``declaring``, through which it declares its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.evolution import OperatorRules
from headgate.model.state_identity import StateIdentity
from headgate.operators.base import Operator
from headgate.operators.key_check import check_keys
from headgate.operators.keyed import key_columns
from headgate.operators.process.declaring import Declarations
from headgate.operators.schemas import SchemaLike, as_schema
from headgate.operators.user_function import UserFunctionError, user_traceback
from headgate.state.descriptors import StateDescriptor, broadcast_text, state_identity


class StatefulFunction(Protocol):
    """What is common to both forms."""

    schema: SchemaLike | None

    def on_timer(self, timer: Any, context: Any, /) -> Any:
        """Called when timers fire."""


Function = TypeVar("Function", bound=StatefulFunction)


@dataclass(frozen=True)
class StatefulFunctionSpec(ABC, Generic[Function]):
    """Call a function with state for each key.

    Attributes:
        schema: of the input.
        descriptors: of the states that the function declares.
        forgotten: states of older programs that it leaves behind.
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

    @property
    def has_timers(self) -> bool:
        """Whether the function wants to be told of timers."""
        return type(self.function).on_timer is not self.form.on_timer

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        keys = key_columns(self.schema, self.keys)
        of_keys = StateIdentity(state_identity(keys, self.descriptors, has_timers=self.has_timers))
        broadcasts = sorted(self.broadcasts, key=lambda one: one.name)
        return of_keys.beside(StateIdentity.of_lists([broadcast_text(one) for one in broadcasts])).text

    def state_rules(self) -> OperatorRules:
        """See ``catalog.state_rules``."""
        states = tuple((one.name, one.evolution.rules()) for one in self.descriptors)
        broadcasts = tuple((one.name, one.evolution.rules()) for one in self.broadcasts)
        return OperatorRules(states, broadcasts, self.forgotten, self.forgotten)


def opened(node: str, function: Any, states: Declarations[Any, Any, Any]) -> tuple[StateDescriptor, ...]:
    """Call the function's ``open``; return what it declared."""
    try:
        function.open(states)
    except UsageError:
        raise
    except Exception as error:
        raise UserFunctionError(node, "open()", user_traceback(error)) from None
    return states.close()
