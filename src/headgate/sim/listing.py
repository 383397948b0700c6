"""What sources list at each start: a list of splits may grow between two starts, as a directory does (N1, X30).

Counterparts: ``connectors.files.listing``; ``run``, which starts drivers. The first splits may come behind later ones
in the list, so that others change their owners. What an end of the input made others sum up may then come in several
parts: ``folded`` adds them up again, and ``may_grow`` says in which graphs that is enough.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from headgate.model.graph import Graph, Node, Role
from headgate.sim.history import Record
from headgate.sim.kinds import Kind, spec_of

GROW_RATE = 0.6
"""Of the graphs whose lists may grow, how many have lists that do."""


class Listing:
    """Which splits there are."""

    def __init__(self, graph: Graph, seed: int) -> None:
        """Hide some splits at first. A draw of its own, so that what other seeds do stays as it was."""
        self._graph = graph
        self._dice = random.Random(f"list of {seed}")
        self._hidden: set[str] = set()
        names = [name for node in graph.nodes for name, _ in spec_of(node).splits]
        if may_grow(graph) and self._dice.random() < GROW_RATE:
            self._hidden = set(self._dice.sample(names, self._dice.randint(1, len(names))))

    @property
    def grows(self) -> bool:
        """Whether there is more to show."""
        return bool(self._hidden)

    def show_more(self) -> None:
        """Some time has passed: there may be more splits."""
        self._hidden -= {name for name in sorted(self._hidden) if self._dice.random() < 0.6}

    def graph(self) -> Graph:
        """Return the graph with the splits that there are."""
        if not self._hidden:
            return self._graph
        nodes = []
        for node in self._graph.nodes:
            spec = spec_of(node)
            shown = tuple((name, records) for name, records in spec.splits if name not in self._hidden)
            nodes.append(replace(node, spec=replace(spec, splits=shown)))
        return Graph(tuple(nodes))


def listed(nodes: Iterable[Node]) -> dict[str, int]:
    """Return the splits that ``nodes`` list, with their lengths."""
    return {name: len(records) for node in nodes for name, records in spec_of(node).splits}


def may_grow(graph: Graph) -> bool:
    """Whether the parts of a sum only go to sinks: else what becomes of them depends on how many there are."""
    if any(node.loops for node in graph.nodes):
        return False
    summing = {node.name for node in graph.nodes if spec_of(node).kind in (Kind.COUNT, Kind.WINDOW)}
    return not any(
        edge.upstream in summing for node in graph.nodes if node.role is not Role.SINK for edge in node.inputs
    )


def is_part(record: Record) -> bool:
    """Whether ``record`` is a sum that may come in several parts."""
    return record[0][0] in "=w"


def folded(records: Mapping[Record, int]) -> Counter[Record]:
    """Return ``records`` with the parts of each sum added up."""
    found: Counter[Record] = Counter()
    sums: Counter[tuple[str, int]] = Counter()
    totals: Counter[tuple[str, int]] = Counter()
    windows: Counter[tuple[str, int, int]] = Counter()
    for record, times in records.items():
        origin, number, key, value, _ = record
        if origin[0] == "=":
            sums[origin, key] += number * times
            totals[origin, key] += value * times
        elif origin[0] == "w":
            windows[origin, number, key] += value * times
        elif times:
            found[record] += times
    found.update((origin, count, key, totals[origin, key], 0) for (origin, key), count in sums.items() if count)
    found.update((origin, start, key, count, 0) for (origin, start, key), count in windows.items() if count)
    return found
