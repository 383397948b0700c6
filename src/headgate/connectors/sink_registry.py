"""The targets of a pipeline's sinks as they are recorded, and sinks made from the record.

Source: SO1, SO6 of docs/spec/starting-over.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, cast

from headgate.connectors.base import Sink
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.streams import StreamSink, StreamsOfOneSink
from headgate.model.graph import Graph, Role
from headgate.model.pipeline_identity import Target, TargetKind
from headgate.store.policies import recorded_retention

RecordedSink: TypeAlias = tuple[Target, Sink]
"""A target, and the sink in front of it."""


def targets_of(graph: Graph) -> tuple[Target, ...]:
    """Return what each sink of ``graph`` writes to."""
    return tuple(cast(Sink, node.spec).recorded(str(node.name)) for node in graph.nodes if node.role is Role.SINK)


def sink_of(target: Target) -> Sink | None:
    """Return a sink in front of ``target``; None when only a program has one, or there is nothing to empty."""
    match target.kind:
        case TargetKind.FILES:
            return FileSink(target.place)
        case TargetKind.STREAM:
            retention = recorded_retention(target.retention_age_ms, target.retention_size_bytes)
            return StreamSink(
                target.stream, target.place, target.routing_key, target.create, target.segments, retention
            )
        case TargetKind.NOTHING | TargetKind.OWN:
            return None


def grouped_by_owner(sinks: Sequence[RecordedSink]) -> list[tuple[RecordedSink, ...]]:
    """Group what has one owner, and so is emptied in one step: streams of one store that one sink has written to.

    Of a step for each of them, the second would find that the new life owns it already (SO6).
    """
    groups: dict[object, tuple[RecordedSink, ...]] = {}
    for number, (target, sink) in enumerate(sinks):
        key = (target.sink, _real(str(sink.store))) if isinstance(sink, StreamSink) else number
        groups[key] = (*groups.get(key, ()), (target, sink))
    return list(groups.values())


def resettable_of(sinks: Sequence[RecordedSink]) -> Sink | StreamsOfOneSink:
    """Return what empties one group of ``grouped_by_owner``."""
    streams = tuple(sink for _, sink in sinks if isinstance(sink, StreamSink))
    return StreamsOfOneSink(streams) if streams else sinks[0][1]


def _real(store: str) -> str:
    """Return a store's only name: its directory may have several."""
    return store if "://" in store else str(Path(store).resolve())
