"""A plan as text, for people."""

from __future__ import annotations

from headgate.model.definition import PipelineDefinition
from headgate.model.graph import Node, OutputTag, Partitioner
from headgate.model.plan import PlanEdge


def describe_plan(definition: PipelineDefinition) -> str:
    """Return one block a chain: where its records come from, then its operators with their schemas."""
    config, plan = definition.config, definition.plan
    lines = [
        f"pipeline {config.name}: {len(plan.vertices)} chains, parallelism {config.parallelism}, "
        f"checkpoints in {config.checkpoint_root}"
    ]
    for vertex in plan.vertices:
        lines.append(f"chain {vertex.id}")
        lines += [f"  <- {_edge(edge)}" for edge in plan.edges if edge.target == vertex.id]
        lines += [f"  {_node(node)}" for node in vertex.nodes]
    return "\n".join(lines)


def _edge(edge: PlanEdge) -> str:
    tag = "" if edge.tag is OutputTag.MAIN else f" ({edge.tag.value})"
    how = edge.partitioner.value
    if edge.partitioner is Partitioner.HASH:
        how += f" on {', '.join(edge.keys)}"
    return f"{edge.from_node}{tag}, {how}"


def _node(node: Node) -> str:
    state = ", keeps state" if node.state_text and node.role.value == "operator" else ""
    return f"{node.name} [{node.role.value}{state}] {node.schema_text}"
