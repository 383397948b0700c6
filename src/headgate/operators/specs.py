"""What specs of operators may say besides ``OperatorSpec``, and what is asked of each when a pipeline is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import pyarrow as pa

from headgate.model.graph import MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.model.schema_evolution import NO_OPERATOR_RULES, OperatorRules
from headgate.model.state_schema import StateIdentity
from headgate.operators.base import OperatorSpec
from headgate.operators.checkpoint_listeners import CheckpointListener, lists_rules, lists_text


class SchemaSpec(OperatorSpec, Protocol):
    """A spec with one input and one output."""

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results for input of ``schema``."""


@runtime_checkable
class NamedSchemasSpec(Protocol):
    """A spec with several inputs or outputs, each with a name and a schema of its own."""

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return the schema of every output, the main one among them, for these inputs.

        Raises:
            UsageError: an input is missing, unknown, or does not fit.
        """


@runtime_checkable
class ColumnsSpec(Protocol):
    """The spec of an operator that says which columns it reads."""

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        """Return which columns of the input are used if ``wanted`` are of the output; None: all of them."""


@runtime_checkable
class PartitionedSpec(Protocol):
    """The spec of an operator that says by which columns its results lie in their subtasks."""

    def keys_after(self, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the columns of the main output by which a hash edge would send each record to the subtask it is in.

        ``keys``: those of the input, if it has only one; None: nothing is known of it, or of the results.
        """


@runtime_checkable
class StatefulSpec(Protocol):
    """The spec of an operator with state."""

    def state_text(self) -> str:
        """Return the identity of the state: kind, keys and types, aggregates."""


@runtime_checkable
class EvolvingSpec(Protocol):
    """A spec with rules for state that an older program wrote."""

    def state_rules(self) -> OperatorRules:
        """Return what was said of each state."""


def output_schemas(
    spec: OperatorSpec, inputs: Mapping[InputName, pa.Schema], node: str
) -> Mapping[OutputTag, pa.Schema]:
    """Return the schema of every output of operator ``node`` when its inputs have these schemas (canonical).

    Raises:
        UsageError: naming the operator, what is wrong, and the columns there are.
    """
    if isinstance(spec, NamedSchemasSpec):
        return spec.output_schemas(inputs, node)
    return {MAIN: cast(SchemaSpec, spec).output_schema(inputs[MAIN_INPUT], node)}


def output_schema(spec: OperatorSpec, schema: pa.Schema, node: str) -> pa.Schema:
    """Return the schema of the main output of operator ``node``; its only input has ``schema`` (canonical).

    Raises:
        UsageError: naming the operator, what is wrong, and the columns there are.
    """
    return output_schemas(spec, {MAIN_INPUT: schema}, node)[MAIN]


def state_text(spec: OperatorSpec, node: str = "") -> str:
    """Return the identity of the state of operator ``node`` for ``model.graph.Node.state_text`` ("" when stateless).

    Raises:
        UsageError: its function declares wrong operator state.
    """
    own = StateIdentity(spec.state_text() if isinstance(spec, StatefulSpec) else "")
    return own.beside(StateIdentity(lists_text(node, function_in(spec)))).text


def state_rules(spec: OperatorSpec, node: str = "") -> OperatorRules:
    """Return what the user said about state of operator ``node`` that an older program wrote (docs/spec/evolution.md).

    Raises:
        UsageError: its function declares wrong operator state.
    """
    own = spec.state_rules() if isinstance(spec, EvolvingSpec) else NO_OPERATOR_RULES
    function = function_in(spec)
    lists = lists_rules(node, function)
    return replace(
        own,
        lists=own.lists + lists.lists,
        forgotten_lists=own.forgotten_lists | lists.forgotten_lists,
        is_built_in=function is None,
    )


def function_in(spec: object) -> object:
    """Return the user's function of an operator, or None."""
    return getattr(spec, "function", None)


def is_listening(spec: object) -> bool:
    """Whether an operator, source or sink has checkpoint listeners, as far as its spec shows."""
    called = (function_in(spec), getattr(spec, "on_round", None))
    if any(isinstance(found, CheckpointListener) for found in called):
        return True
    return bool(getattr(spec, "is_listening", isinstance(spec, CheckpointListener)))  # a source or sink says so
