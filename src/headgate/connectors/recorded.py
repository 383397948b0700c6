"""What the sinks of a pipeline write to, as it is written down; and a sink in front of what was written down.

Source: SO1 of docs/spec/starting-over.md. Counterpart: ``runtime.checkpoints.records`` keeps it.
"""

from __future__ import annotations

from headgate.connectors.base import ResettableSink
from headgate.connectors.files.sink import FileSink
from headgate.connectors.memory import Discard
from headgate.connectors.streams import StreamSink
from headgate.model.graph import Graph, Role
from headgate.model.targets import Target, TargetKind


def targets_of(graph: Graph) -> tuple[Target, ...]:
    """Return what each sink of ``graph`` writes to."""
    return tuple(target_of(str(node.name), node.spec) for node in graph.nodes if node.role is Role.SINK)


def target_of(node: str, sink: object) -> Target:
    """Return what one sink writes to."""
    if isinstance(sink, Discard):
        return Target(node, TargetKind.NOTHING)
    if isinstance(sink, ResettableSink):
        return sink.recorded(node)
    return Target(node, TargetKind.OWN, type(sink).__name__)


def sink_of(target: Target) -> ResettableSink | None:
    """Return a sink in front of ``target``; None when only a program has one, or there is nothing to empty."""
    match target.kind:
        case TargetKind.FILES:
            return FileSink(target.place)
        case TargetKind.STREAM:
            return StreamSink(target.stream, target.place, target.routing_key, target.create, target.segments)
        case TargetKind.NOTHING | TargetKind.OWN:
            return None
