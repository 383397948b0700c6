"""Has sources read only the columns that the pipeline uses, as far as that is known.

Looks through the operators that are chained to a source: those that say which columns they read
(``operators.catalog.ColumnsSpec``). Every other operator, a function or a sink for example, reads all. Behind an
exchange all columns are kept, because an older program's records may come out of a checkpoint there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from headgate.connectors.base import Source
from headgate.model.graph import BAD_RECORDS, MAIN, Graph, Node, OutputTag, Partitioner
from headgate.model.ids import NodeName
from headgate.operators import catalog
from headgate.operators.schemas import schema_text

Outputs = dict[NodeName, dict[OutputTag, pa.Schema]]


def read_used_columns(graph: Graph, outputs: Outputs) -> tuple[Graph, Outputs]:
    """Return the graph with sources that read what is used, and the schemas that follow from that.

    Not for pipelines that divert bad records: these are diverted whole, and every value is looked at.
    """
    used = _used(graph)
    nodes: list[Node] = []
    found = dict(outputs)
    narrowed: set[NodeName] = set()
    for node in graph.nodes:
        columns = used[node.name]
        if isinstance(node.spec, Source):
            if columns:
                node = _narrow_source(node, found, columns, narrowed)
        elif len(node.inputs) == 1 and node.inputs[0].upstream in narrowed and columns is not None:
            schema = catalog.output_schema(node.spec, found[node.inputs[0].upstream][MAIN], str(node.name))  # type: ignore[arg-type]
            if schema != found[node.name][MAIN]:
                found[node.name] = found[node.name] | {MAIN: schema}
                node = replace(node, schema_text=schema_text(schema))
                narrowed.add(node.name)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), found


def _narrow_source(node: Node, found: Outputs, columns: frozenset[str], narrowed: set[NodeName]) -> Node:
    schema = found[node.name][MAIN]
    assert isinstance(node.spec, Source)
    projected = node.spec.project([name for name in schema.names if name in columns])
    if projected is None:
        return node
    source, schema = projected
    found[node.name] = found[node.name] | {MAIN: schema}
    narrowed.add(node.name)
    return replace(node, spec=source, schema_text=schema_text(schema))


def _used(graph: Graph) -> Mapping[NodeName, frozenset[str] | None]:
    """Return which columns of the main output of each node are used; None: all of them."""
    used: dict[NodeName, frozenset[str] | None] = {node.name: frozenset() for node in graph.nodes}
    for node in reversed(graph.nodes):
        wanted = used[node.name]
        is_chained = len(node.inputs) == 1 and node.inputs[0].partitioner is Partitioner.FORWARD and not node.feedback
        reads: frozenset[str] | None = None
        if is_chained and isinstance(node.spec, catalog.ColumnsSpec):
            reads = node.spec.columns_read(wanted)
        for edge in (*node.inputs, *node.feedback):
            before = used[edge.upstream]
            if edge.tag == BAD_RECORDS:
                continue
            used[edge.upstream] = None if reads is None or before is None or edge.tag != MAIN else before | reads
    return used
