"""Where operators stand in a picture: sources on the left, each operator behind all that feed it.

Pure. Places go by the rules of the page of a run (``web/page/graph.js``), so that both pictures look alike (ND3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.model.graph import MAIN, Edge, Node, Partitioner
from headgate.model.ids import NodeName

WIDTH, HEIGHT = 190, 54
GAP_X, GAP_Y = 90, 26
MARGIN = 14
LOOP_HEIGHT = 50
"""Room below the operators for what leads back."""


@dataclass(frozen=True, slots=True)
class Place:
    """The upper left corner of an operator."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """What flows from one operator to another; ``how`` is written on it."""

    start: NodeName
    end: NodeName
    how: str
    is_feedback: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is, and how large the whole is."""

    places: dict[NodeName, Place]
    arrows: tuple[Arrow, ...]
    width: float
    height: float


def laid_out(nodes: Sequence[Node]) -> Layout:
    """Return the places of ``nodes``, which come in topological order. What leads back has no say in them."""
    depth: dict[NodeName, int] = {}
    for node in nodes:
        depth[node.name] = max((depth[edge.upstream] + 1 for edge in node.inputs), default=0)
    row = _rows(nodes, depth)
    columns, rows = max(depth.values(), default=0) + 1, max(row.values(), default=0) + 1
    arrows = tuple(arrow for node in nodes for arrow in _arrows(node))
    return Layout(
        {name: Place(MARGIN + depth[name] * (WIDTH + GAP_X), MARGIN + row[name] * (HEIGHT + GAP_Y)) for name in depth},
        arrows,
        2 * MARGIN + columns * WIDTH + (columns - 1) * GAP_X,
        2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP_Y + (LOOP_HEIGHT if any(a.is_feedback for a in arrows) else 0),
    )


def _rows(nodes: Sequence[Node], depth: dict[NodeName, int]) -> dict[NodeName, float]:
    """Return the row of each node: beside those that feed it, as far as there is room; no two share a place."""
    row: dict[NodeName, float] = {}
    for column in range(max(depth.values(), default=0) + 1):
        wishes: dict[NodeName, float] = {}
        for node in nodes:
            if depth[node.name] == column:
                before = [row[edge.upstream] for edge in node.inputs]
                wishes[node.name] = sum(before) / len(before) if before else 0.0
        free = 0.0
        for name in sorted(wishes, key=wishes.__getitem__):
            row[name] = max(free, wishes[name])
            free = row[name] + 1
    return row


def _arrows(node: Node) -> list[Arrow]:
    forward = [Arrow(edge.upstream, node.name, _how(edge)) for edge in node.inputs]
    return forward + [Arrow(edge.upstream, node.name, _how(edge), is_feedback=True) for edge in node.feedback]


def _how(edge: Edge) -> str:
    how = "" if edge.partitioner is Partitioner.FORWARD else edge.partitioner.value
    if edge.partitioner is Partitioner.HASH:
        how = f"by {', '.join(edge.keys)}"
    return how if edge.tag == MAIN else ", ".join(filter(None, (edge.tag, how)))
