"""The logical graph: operators as the user wrote them, before chaining.

Specs are opaque here: the layers above know that a source node carries a ``connectors.base.Source``, an
operator node an ``operators.base.OperatorSpec``, a sink node a ``connectors.base.Sink``, a loop head an
``operators.loop_head.LoopHeadSpec``.

Without its feedback edges a graph has no cycle; every cycle goes through a loop head (docs/spec/loops.md).
"""

from __future__ import annotations

from enum import Enum
from typing import NewType

from headgate.dataclass import dataclass
from headgate.model.ids import NodeName
from headgate.model.schema_evolution import NO_OPERATOR_RULES, OperatorRules


class Role(Enum):
    """What a node does with records."""

    SOURCE = "source"
    OPERATOR = "operator"
    SINK = "sink"
    LOOP_HEAD = "loop-head"
    """Where a loop's records enter: from the regular inputs once, from the feedback edges again and again."""


class Partitioner(Enum):
    """How records of an edge find their downstream subtask."""

    FORWARD = "forward"
    """Subtask i to subtask i."""
    HASH = "hash"
    """By key group of the edge's key columns."""
    REBALANCE = "rebalance"
    """Whole batches in turn to every subtask."""
    BROADCAST = "broadcast"
    """Every record to every subtask."""
    FIRST = "first"
    """Every record to the first subtask: they have one order there."""


OutputTag = NewType("OutputTag", str)
"""Which output of a node an edge takes; each has a schema of its own (``PipelineDefinition.outputs``)."""

MAIN = OutputTag("main")
BAD_RECORDS = OutputTag("bad-records")
"""Rows of ``operators.user_functions.BAD_RECORD_SCHEMA``; only wired when the policy is to divert."""

InputName = NewType("InputName", str)
"""Which input of a node an edge leads to. Edges to the same input carry one schema, as in a union."""

MAIN_INPUT = InputName("main")
BROADCAST_INPUT = InputName("broadcast")
"""The broadcast side of an operator: what comes on it comes to all subtasks alike, so that one copy is enough."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A way into a node: where it comes from, how records are routed, and to which input. ``keys`` only with HASH."""

    upstream: NodeName
    partitioner: Partitioner = Partitioner.FORWARD
    keys: tuple[str, ...] = ()
    tag: OutputTag = MAIN
    input: InputName = MAIN_INPUT


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. ``spec`` is opaque; ``schema_text`` describes its output for manifests and messages."""

    name: NodeName
    role: Role
    inputs: tuple[Edge, ...]
    spec: object
    schema_text: str = ""
    state_text: str = ""
    """Identity of the node's state ("" = stateless): kind, key columns and types, aggregates.

    If the text of a checkpoint differs, a restore converts what it can, and refuses the rest (docs/spec/evolution.md).
    """
    feedback: tuple[Edge, ...] = ()
    """Loop heads only: the edges that bring records back."""
    loops: tuple[NodeName, ...] = ()
    """The loops that this node is in, by the names of their heads, outermost first. A head is in its own loop."""
    state_rules: OperatorRules = NO_OPERATOR_RULES
    """What the user said about its state in older checkpoints."""
    rate_limit: float | None = None
    """Sources only: so many records per second are read, in all subtasks together."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in topological order, feedback edges left aside."""

    nodes: tuple[Node, ...]

    def node(self, name: NodeName) -> Node:
        """Return the node called ``name`` (it must exist)."""
        return next(node for node in self.nodes if node.name == name)
