"""What checkpoints record of connectors: sinks made from the record, and positions and committables as text.

Source: docs/spec/starting-over.md. The texts are for people: their functions never unpickle
anything and never fail, and what they do not know is shown as bytes only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from headgate.connectors.base import Sink
from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.parquet import ParquetPosition
from headgate.connectors.lakes.table_changes import CHANGES_MARK
from headgate.connectors.streams import StreamSink, StreamsOfOneSink, decode_position
from headgate.errors import CorruptionError, UsageError
from headgate.model.graph import Graph, Role
from headgate.model.pipeline_identity import Target, TargetKind
from headgate.model.state_schema import Form, StateIdentity
from headgate.store.streams import recorded_retention

_STREAM_START = b"\xff\xff\xff\xff"
"""Every Arrow stream begins so."""


def position_text(identity: StateIdentity, split: str, data: bytes) -> str | None:
    """Return what a position says, or None. ``identity``: of the source that wrote it."""
    form = identity.form
    with contextlib.suppress(CorruptionError, UsageError):  # damaged, or of an earlier version
        if form is Form.LINES:
            return json.dumps(asdict(FilePosition.decode(split, data)))
        if form is Form.PARQUET:
            return json.dumps(asdict(ParquetPosition.decode(split, data)))
        if form is Form.STREAM:
            place = decode_position(split, data)
            position, end = place.position, place.end
            return json.dumps(
                ({"position": position} if place.is_begun else {}) | ({} if end is None else {"end": end})
            )
        if form in (Form.GENERATOR, Form.ROWS) and len(data) == 8:
            return json.dumps({"row": int.from_bytes(data, "little")})
    return readable(data)


def committable_text(payload: bytes) -> str | None:
    """Return what a prepared output says, or None: the files, the transaction, or its name."""
    head, _, rest = payload.partition(b"\n")
    if not rest:
        return readable(payload)
    if rest.startswith(b"{"):  # a checksum, and the list of files
        return readable(rest)
    if head.startswith(CHANGES_MARK):
        return committable_text(rest)
    name, _, records = rest.partition(b"\n")
    if head == b"2":  # the number of pieces follows
        return readable(name)
    return readable(name if head == b"1" and records.startswith(_STREAM_START) else rest if head == b"1" else payload)


def readable(data: bytes) -> str | None:
    """Return ``data`` as text if it is text, or as JSON if it is msgpack of a list or a map; else None."""
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode()
        return text if text.isprintable() or text.strip().startswith(("{", "[")) else None
    with contextlib.suppress(msgspec.DecodeError, TypeError, ValueError):
        found = msgspec.msgpack.decode(data)
        if isinstance(found, list | dict):
            return msgspec.json.encode(found).decode()
    return None


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

    Of a step for each of them, the second would find that the new life owns it already.
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
