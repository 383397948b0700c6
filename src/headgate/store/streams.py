"""Streams as values: what one is, what it may be, which segments it has, and how it is started over.

Counterpart: ``catalogue`` keeps them. Source: S2, as far as docs/spec/stream-store.md §2 says, and CT6.
Never touches the catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.life import Life, Mine
from headgate.store.routing import check_key_type
from headgate.store.schemas import plain_schema

SEGMENTS_MAX = 4_096
"""Each flush may touch all segments; more would make its catalogue transaction too long."""

KEY_SPACE = 1 << 32
"""Where a key is: the upper half of its hash, from 0 up to, and not including, this number (S2)."""

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
        ends: per segment, the position of the next event to come (= events so far).
        chunks_count, size_bytes: files that hold its events, prepared ones included.
        prepared_count: transactions that wait for a verdict.
    """

    stream_id: int
    name: str
    schema: pa.Schema
    segments_count: int
    layout_epoch: int
    routing_key: str | None
    is_sealed: bool
    created_ms: int
    ends: tuple[int, ...] = ()
    chunks_count: int = 0
    size_bytes: int = 0
    prepared_count: int = 0

    @property
    def events_count(self) -> int:
        """Events that readers may see."""
        return sum(self.ends)


@dataclass(frozen=True, slots=True)
class StreamDefinition:
    """What a caller wants a stream to be."""

    name: str
    schema: pa.Schema
    segments_count: int
    routing_key: str | None

    def checked(self) -> StreamDefinition:
        """Return it with a plain schema.

        Raises:
            UsageError: name, number of segments, schema or routing key cannot be.
        """
        if len(self.name) > _NAME_CHARS_MAX or not _NAME.fullmatch(self.name):
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
        return StreamDefinition(self.name, schema, self.segments_count, self.routing_key)


@dataclass(frozen=True, slots=True)
class StreamReset:
    """What a pipeline that starts over asks of all streams that one of its sinks has written to (SO5).

    Attributes:
        streams: by name, how whoever needs it makes it again: its segments and routing key. A stream that was made so
            is deleted. Any other, and one with None, is there afterwards as it was made, without events.
        owner: in whose name the sink writes there; its epochs before ``epoch`` are fenced.
        life: the one that is ``owner`` afterwards.
        of: what the names of all owners of the pipeline begin with.
        mine: whether what such an owner wrote may be deleted.
    """

    streams: Mapping[str, tuple[int, str | None] | None]
    owner: str
    epoch: int
    life: Life
    of: str
    mine: Mine


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a stream (CT6).

    Attributes:
        segment_id: its number within the stream; never used again.
        key_low, key_high: it takes the keys from ``key_low`` up to, and not including, ``key_high`` of ``KEY_SPACE``.
        created_epoch: the first layout that has it.
        closed_epoch: the first layout that has it no more; None: the present one has it.
    """

    segment_id: int
    key_low: int
    key_high: int
    created_epoch: int = 0
    closed_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments of a stream, those of former layouts included, by number."""

    epoch: int
    segments: tuple[Segment, ...]

    @property
    def present(self) -> tuple[Segment, ...]:
        """The segments that take events, by the keys that they take."""
        segments = [segment for segment in self.segments if segment.closed_epoch is None]
        return tuple(sorted(segments, key=lambda segment: segment.key_low))

    def problems(self) -> list[str]:
        """Return what is not as it must be: every key is in one present segment, no epoch is ahead of the layout."""
        found = []
        expected = 0
        for segment in self.present:
            if segment.key_low != expected or segment.key_high <= segment.key_low:
                found.append(
                    f"segment {segment.segment_id} takes the keys from {segment.key_low} to {segment.key_high} where "
                    f"{expected} was to follow"
                )
            expected = segment.key_high
        if expected != KEY_SPACE:
            found.append(f"its segments take the keys up to {expected}, not {KEY_SPACE}")
        for segment in self.segments:
            closed = self.epoch if segment.closed_epoch is None else segment.closed_epoch
            if not 0 <= segment.created_epoch <= closed <= self.epoch or segment.created_epoch == segment.closed_epoch:
                found.append(f"segment {segment.segment_id} is of layouts that cannot be, up to layout {self.epoch}")
        return found


def first_layout(segments_count: int) -> Layout:
    """Return the layout of a new stream: ranges of equal size, in the order of the segments' numbers (S2)."""
    bounds = [-(-number * KEY_SPACE // segments_count) for number in range(segments_count + 1)]
    return Layout(0, tuple(Segment(n, bounds[n], bounds[n + 1]) for n in range(segments_count)))


def no_such_stream(name: str, where: str, there: Sequence[str]) -> UsageError:
    """Return the error of a stream that the store at ``where`` does not have; ``there`` are some that it has."""
    streams = f"streams there: {', '.join(there[:_NAMES_SHOWN])}" if there else "it has no streams yet"
    return UsageError(
        f"stream '{name}' does not exist in the store at {where} ({streams}); "
        f"create it with: headgate streams create {name}"
    )


def check_open(stream: StreamInfo) -> None:
    """Check that events may be added to a stream that was just looked up.

    Raises:
        UsageError: it is sealed.
    """
    if stream.is_sealed:
        raise UsageError(f"stream '{stream.name}' is sealed: it takes no more events; write to another stream")
