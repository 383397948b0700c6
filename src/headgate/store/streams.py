"""Streams and stream cuts as values: what they are, what they may be, and their text forms.

Counterpart: ``catalogue`` keeps streams; ``store.Store`` gives and takes cuts. Source: docs/spec/stream-store.md §2
and S66; Pravega's StreamCut. Never touches the catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from headgate.errors import HeadgateError, UsageError
from headgate.model.pipeline_identity import Life
from headgate.protocol.store.layouts import SEGMENTS_MAX, ScalingPolicy, Segment
from headgate.store.policies import RetentionPolicy
from headgate.store.routing import check_key_type
from headgate.store.schemas import plain_schema

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_NAME_CHARS_MAX = 200
_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream as it was at one moment.

    Attributes:
        name: ``scope/stream``; the scope is optional.
        segments_count: segments of its present layout.
        layout_epoch: number of that layout, from 0 (CT6).
        segments: those of its present layout, by the keys that they take.
        ends: per segment, closed ones too, the position of the next event to come (= events ever written to it).
        heads: per segment, the position of the first event that is still there (S65).
        retention: what is truncated by itself; None: nothing.
        schema_version: number of its present schema, from 0 (S76).
        scaling: how it is scaled by itself (S79); None: by hand only.
        chunks_count, size_bytes: files that hold its events, prepared ones included.
        prepared_count: transactions that wait for a verdict.
        lease_due_ms: when the lease of an open transaction is over, the first of them (TX8); None: there is none.
    """

    stream_id: int
    name: str
    schema: pa.Schema
    segments_count: int
    layout_epoch: int
    routing_key: str | None
    is_sealed: bool
    created_ms: int
    retention: RetentionPolicy | None = None
    schema_version: int = 0
    scaling: ScalingPolicy | None = None
    segments: tuple[Segment, ...] = ()
    heads: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    chunks_count: int = 0
    size_bytes: int = 0
    prepared_count: int = 0
    lease_due_ms: int | None = None

    @property
    def events_count(self) -> int:
        """Events that readers may see."""
        return sum(self.ends) - sum(self.heads)


@dataclass(frozen=True, slots=True)
class StreamDefinition:
    """What a caller wants a stream to be."""

    name: str
    schema: pa.Schema
    segments_count: int
    routing_key: str | None
    retention: RetentionPolicy | None = None
    scaling: ScalingPolicy | None = None

    def checked(self) -> StreamDefinition:
        """Return it with a plain schema.

        Raises:
            UsageError: name, number of segments, schema or routing key cannot be.
        """
        if not is_usable_name(self.name):
            raise UsageError(
                f"stream name {self.name!r} is not usable; use letters, digits, '_', '-' and '.', "
                "with '/' between scope and stream, such as app/logs"
            )
        if not 1 <= self.segments_count <= SEGMENTS_MAX:
            raise UsageError(f"a stream has 1 to {SEGMENTS_MAX} segments, not {self.segments_count}")
        schema = plain_schema(self.schema)
        if self.routing_key is not None:
            if self.routing_key not in schema.names:
                raise UsageError(
                    f"routing key '{self.routing_key}' is not a column of stream '{self.name}'; "
                    f"its columns are {', '.join(schema.names)}"
                )
            check_key_type(schema.field(self.routing_key).type, self.routing_key)
        return replace(self, schema=schema)


@dataclass(frozen=True, slots=True)
class StreamReset:
    """What a pipeline that starts over asks of all streams that one of its sinks has written to (SO5).

    Attributes:
        streams: by name, how the sink would make it again: its segments, routing key and retention. A stream that
            is so is deleted. Any other, and one with None, is there afterwards as it was, without events.
        owner: in whose name the sink writes there; its epochs before ``epoch`` are fenced.
        life: the one that is ``owner`` afterwards.
        of: what the names of all owners of the pipeline begin with.
    """

    streams: Mapping[str, tuple[int, str | None, RetentionPolicy | None] | None]
    owner: str
    epoch: int
    life: Life
    of: str


def is_usable_name(name: str) -> bool:
    """Return whether streams and reader groups can be called so."""
    return len(name) <= _NAME_CHARS_MAX and _NAME.fullmatch(name) is not None


def no_such_stream(name: str, where: str, there: Sequence[str]) -> UsageError:
    """Return the error of a stream that the store at ``where`` does not have; ``there`` are some that it has."""
    streams = f"streams there: {', '.join(there[:_NAMES_SHOWN])}" if there else "it has no streams yet"
    return UsageError(
        f"stream '{name}' does not exist in the store at {where} ({streams}); "
        f"create it with: headgate streams create {name}"
    )


class OtherLayoutError(UsageError):
    """Events were routed by a layout that the stream has no more; they are to be routed again (S73)."""


class RemovedFileError(HeadgateError):
    """A chunk was removed as one that belongs to nothing before it was recorded; its events are to be written again.

    Not a wrong use: a pipeline that starts again from its last checkpoint writes them.
    """


class OtherSchemaError(UsageError):
    """Events have values that do not fit an older schema of their stream (S77)."""


def check_open(stream: StreamInfo) -> None:
    """Check that events may be added to a stream that was just looked up.

    Raises:
        UsageError: it is sealed.
    """
    if stream.is_sealed:
        raise UsageError(f"stream '{stream.name}' is sealed: it takes no more events; write to another stream")


def check_takes(stream: StreamInfo, routing_key: str | None) -> None:
    """Check that events with this routing key, or any, may be written to a stream.

    Raises:
        UsageError: it has another one, or is sealed.
    """
    if routing_key is not None and routing_key != stream.routing_key:
        raise UsageError(
            f"stream '{stream.name}' has the routing key {stream.routing_key!r}, not {routing_key!r}; "
            "leave routing_key out or write to another stream"
        )
    check_open(stream)


_TEXT = re.compile(
    r"(?P<stream>[^#@]+)#(?P<id>[0-9]{1,18})@(?P<positions>[0-9]{1,9}:[0-9]{1,18}(,[0-9]{1,9}:[0-9]{1,18})*)"
)


@dataclass(frozen=True, slots=True)
class StreamCut:
    """A position in every segment of a stream, which divides its events into those before the cut and those behind it.

    ``str`` returns text such as ``app/logs#3@0:120,1:96``, which ``parse`` reads in any process.

    Attributes:
        stream: the name of the stream.
        stream_id: the number of the stream. A stream that is created later under the same name has another number.
        positions: maps each segment to the position of the first event behind the cut.
    """

    stream: str
    stream_id: int
    positions: Mapping[int, int]

    def __str__(self) -> str:
        pairs = ",".join(f"{segment}:{position}" for segment, position in sorted(self.positions.items()))
        return f"{self.stream}#{self.stream_id}@{pairs}"

    @classmethod
    def parse(cls, text: str) -> StreamCut:
        """Return the cut that ``text`` represents.

        Raises:
            UsageError: ``text`` is not a cut.
        """
        match = _TEXT.fullmatch(text)
        pairs = [pair.partition(":") for pair in match["positions"].split(",")] if match else []
        positions = {int(segment): int(position) for segment, _, position in pairs}
        if match is None or len(positions) != len(pairs):
            raise UsageError(f"{text!r} is no stream cut; one looks like app/logs#3@0:120,1:96")
        return cls(match["stream"], int(match["id"]), positions)

    def check(self, stream: StreamInfo) -> None:
        """Check that this is a cut of ``stream``.

        Raises:
            UsageError: it is a cut of another stream.
        """
        if self.stream != stream.name:
            raise UsageError(f"the cut {self} is of another stream than '{stream.name}'")
        if self.stream_id != stream.stream_id:
            raise UsageError(
                f"the cut {self} is of a former stream '{stream.name}', or of another store: the one that is there now "
                f"has number {stream.stream_id}"
            )
