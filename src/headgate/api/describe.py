"""A plan as text, for people."""

from __future__ import annotations

from headgate.model.definition import PipelineDefinition
from headgate.model.graph import MAIN, Node, Partitioner, Role
from headgate.model.plan import PlanEdge
from headgate.operators.loop_head import LoopHeadSpec


def describe_plan(definition: PipelineDefinition) -> str:
    """Return one block a chain: where its records come from, then its operators with their schemas.

    Of an operator in a loop it names the loop, or the loops, outermost first.
    """
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
    tag = "" if edge.tag == MAIN else f" ({edge.tag})"
    how = edge.partitioner.value
    if edge.partitioner is Partitioner.HASH:
        how += f" on {', '.join(edge.keys)}"
    back = ", comes back" if edge.is_feedback else ""
    return f"{edge.from_node}{tag}, {how}{back}"


def _node(node: Node) -> str:
    return f"{node.name} [{', '.join([node.role.value, *_facts(node)])}] {node.schema_text}"


def _facts(node: Node) -> list[str]:
    facts: list[str] = []
    if isinstance(node.spec, LoopHeadSpec):
        spec = node.spec
        facts += [f"by {', '.join(spec.keys)}"] if spec.keys else []
        facts += [f"rounds in {spec.round_column}"] if spec.round_column else []
        facts += [f"at most {spec.max_rounds}"] if spec.max_rounds else []
    elif node.state_text and node.role is Role.OPERATOR:
        facts.append("keeps state")
    around = [str(loop) for loop in node.loops if loop != node.name]
    return [*facts, f"in {' > '.join(around)}"] if around else facts
