"""Which neighbouring expressions of a plan run as one pass.

Workers run them so (``runtime.worker.deployment``); whoever shows numbers says so (OM15).
"""

from __future__ import annotations

from headgate.model.graph import MAIN, Node
from headgate.model.ids import NodeName
from headgate.model.plan import Plan, Vertex
from headgate.operators.expressions import ExpressionsSpec


def fused_groups(vertex: Vertex, plan: Plan) -> list[list[Node]]:
    """Group neighbouring expression nodes of a chain that can run in one pass (each has one consumer only)."""
    consumers: dict[str, int] = {}
    for node in vertex.nodes[1:]:
        consumers[str(node.inputs[0].upstream)] = consumers.get(str(node.inputs[0].upstream), 0) + 1
    for edge in plan.outputs(vertex.id):
        consumers[str(edge.from_node)] = consumers.get(str(edge.from_node), 0) + 1
    groups: list[list[Node]] = []
    group_of: dict[str, list[Node]] = {}
    for node in vertex.nodes:
        upstream = str(node.inputs[0].upstream) if node is not vertex.head else ""
        group = group_of.get(upstream)
        fits = (
            group is not None
            and consumers.get(upstream) == 1
            and node.inputs[0].tag == MAIN
            and isinstance(node.spec, ExpressionsSpec)
            and isinstance(group[-1].spec, ExpressionsSpec)
        )
        if fits and group is not None:
            group.append(node)
        else:
            group = [node]
            groups.append(group)
        group_of[str(node.name)] = group
    return groups


def runs_with(plan: Plan) -> dict[NodeName, NodeName]:
    """Return, for each operator that runs in one pass with others, the last of them, which has their time."""
    groups = (group for vertex in plan.vertices for group in fused_groups(vertex, plan))
    return {node.name: group[-1].name for group in groups for node in group[:-1]}
