"""Sets of nodes of a graph that all reach each other, and a short cycle in one.

Counterpart: ``cycles``. Source: R. Tarjan, Depth-first search and linear graph algorithms, 1972; without recursion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

Node = tuple[str, int]
Edges = dict[Node, dict[Node, str]]
"""node → node behind it → why."""

STARTS_MAX = 50
"""From so many nodes a cycle is looked for: any short one will do to show."""


class _Search:
    """One depth-first search over all nodes."""

    def __init__(self, edges: Edges) -> None:
        self.found: list[set[Node]] = []
        self._edges = edges
        self._number: dict[Node, int] = {}
        self._lowest: dict[Node, int] = {}
        self._waiting: dict[Node, None] = {}
        for root in list(edges):
            if root not in self._number:
                self._from(root)

    def _from(self, root: Node) -> None:
        path = [self._enter(root)]
        while path:
            node, following = path[-1]
            other = next(following, None)
            if other is None:
                path.pop()
                if path:
                    self._lower(path[-1][0], self._lowest[node])
                self._leave(node)
            elif other not in self._number:
                path.append(self._enter(other))
            elif other in self._waiting:
                self._lower(node, self._number[other])

    def _enter(self, node: Node) -> tuple[Node, Iterator[Node]]:
        self._number[node] = self._lowest[node] = len(self._number)
        self._waiting[node] = None
        return node, iter(self._edges.get(node, {}))

    def _lower(self, node: Node, number: int) -> None:
        self._lowest[node] = min(self._lowest[node], number)

    def _leave(self, node: Node) -> None:
        if self._lowest[node] != self._number[node]:
            return
        component: set[Node] = set()
        while node not in component:
            component.add(self._waiting.popitem()[0])
        if len(component) > 1:
            self.found.append(component)


def components(edges: Edges) -> list[set[Node]]:
    """Return the sets of several nodes that all reach each other."""
    return _Search(edges).found


def short_cycle(edges: Edges, component: set[Node], starts: Sequence[Node]) -> list[Node]:
    """Return the nodes of a short cycle within a component, one of ``starts`` at both ends."""
    return min((_around(edges, component, start) for start in starts[:STARTS_MAX]), key=len)


def _around(edges: Edges, component: set[Node], start: Node) -> list[Node]:
    came: dict[Node, Node] = {}
    queue = deque([start])
    while start not in came:
        node = queue.popleft()
        for other in edges.get(node, {}):
            if other in component and other not in came:
                came[other] = node
                queue.append(other)
    path = [start, came[start]]
    while path[-1] != start:
        path.append(came[path[-1]])
    return path[::-1]
