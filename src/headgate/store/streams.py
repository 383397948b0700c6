"""Streams, their cuts, schemas and policies as values: what they may be, their text forms, events in a later schema.

Decided elsewhere: by ``protocol.store.schema_update`` which schemas a stream can have one after the other, by
``protocol.store.truncation`` and ``protocol.store.layouts`` what a policy does. Source: S71, S77 and S79 of
docs/spec/stream-store.md. Counterpart: ``catalogue`` keeps streams; ``store.Store`` gives and takes cuts.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from headgate.codec.json_files import MALFORMED
from headgate.errors import CorruptionError, HeadgateError, UsageError
from headgate.model.config import Duration, duration_ms, size_bytes
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType
from headgate.protocol.store.layouts import SEGMENTS_MAX, ScalingPolicy, Segment, Unit
from headgate.protocol.store.schema_update import Columns, fits_if_small, holds
from headgate.store.routing import check_key_type

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
    """Reset of all streams that one sink of a pipeline has written to (SO5).

    Attributes:
        streams: by name, how the sink would make it again: its segments, routing key and retention. A stream that
            is so is deleted. Any other, and one with None, is there afterwards as it was, without events.
        owner: the name under which the sink writes there; its epochs before ``epoch`` are fenced.
        life: the one that is ``owner`` afterwards.
        of: the common prefix of the names of all owners of the pipeline.
    """

    streams: Mapping[str, tuple[int, str | None, RetentionPolicy | None] | None]
    owner: str
    epoch: int
    life: PipelineIdentity
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
    """Events were routed by a layout that the stream has no more; they are to be routed again."""


class RemovedFileError(HeadgateError):
    """A chunk was removed as one that belongs to nothing before it was recorded; its events are to be written again.

    Not a wrong use: a pipeline that starts again from its last checkpoint writes them.
    """


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
    """A position in every segment of a stream, which divides its events into those before the cut and those after it.

    ``str`` returns text such as ``app/logs#3@0:120,1:96``, which ``parse`` reads in any process.

    Attributes:
        stream: the name of the stream.
        stream_id: the number of the stream. A stream that is created later under the same name has another number.
        positions: maps each segment to the position of the first event after the cut.
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


TEXT_SCHEMA = pa.schema([pa.field("line", pa.large_string())])
"""A stream of text lines."""

_MAGIC = b"HGSCHEM\n"
_TRAILER = struct.Struct("<8sQ")


class OtherSchemaError(UsageError):
    """Events have values that do not fit an older schema of their stream (S77)."""


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` without metadata and with every field nullable.

    Raises:
        UsageError: it has no columns, a column twice, or a dictionary in a column.
    """
    names = schema.names
    if not names:
        raise UsageError("a stream needs at least one column")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"a stream's columns need distinct names, but {', '.join(twice)} occurs twice")
    for field in schema:
        encoded = _dictionary_in(field.type)
        if encoded is not None:
            where = "" if encoded == field.type else f" within {field.type}"
            raise UsageError(
                f"column '{field.name}' is dictionary-encoded{where}, which streams do not store; "
                f"cast it to {encoded.value_type}"
            )
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _dictionary_in(dtype: pa.DataType) -> pa.DictionaryType | None:
    """Return a dictionary that ``dtype`` is, or has within: its values would be in no part of a chunk."""
    if pa.types.is_dictionary(dtype):
        return dtype
    if isinstance(dtype, pa.BaseExtensionType):
        return _dictionary_in(dtype.storage_type)
    inner = (_dictionary_in(dtype.field(number).type) for number in range(dtype.num_fields))
    return next((found for found in inner if found is not None), None)


def schema_difference(expected: pa.Schema, found: pa.Schema) -> str:
    """Return the differing columns in one clause, or "" when there is none (order matters, nullability not)."""
    wanted = {field.name: field.type for field in expected}
    there = {field.name: field.type for field in found}
    problems = [f"'{name}' ({dtype}) is missing" for name, dtype in wanted.items() if name not in there]
    problems += [f"'{name}' ({dtype}) is unknown to it" for name, dtype in there.items() if name not in wanted]
    problems += [
        f"'{name}' is {there[name]} instead of {dtype}"
        for name, dtype in wanted.items()
        if name in there and there[name] != dtype
    ]
    if not problems and expected.names != found.names:
        problems.append(f"the order must be {', '.join(expected.names)}")
    return "; ".join(problems)


def difference_by_name(expected: pa.Schema, found: pa.Schema) -> str:
    """Return what ``schema_difference`` does, where columns are matched by name: their order does not matter."""
    if set(expected.names) == set(found.names):
        found = pa.schema([found.field(name) for name in expected.names])
    return schema_difference(expected, found)


def check_same_schema(stream: str, expected: pa.Schema, found: pa.Schema) -> None:
    """Check that events of schema ``found`` fit the stream.

    Raises:
        UsageError: they do not; the message names the columns.
    """
    if expected.equals(found):
        return
    difference = schema_difference(expected, found)
    if difference:
        raise UsageError(f"events do not fit stream '{stream}': column {difference}")


def merged_schema(present: pa.Schema, columns: pa.Schema) -> pa.Schema:
    """Return ``present`` with ``columns``: they replace its columns of the same name, others are appended."""
    given = {field.name: field for field in columns}
    kept = [given.get(field.name, field) for field in present]
    return pa.schema([*kept, *(field for field in columns if field.name not in present.names)])


def check_added_may_be_null(stream: str, present: pa.Schema, wanted: pa.Schema) -> None:
    """Check that columns which a stream does not have yet may be null, as they are in what is there (S76).

    Raises:
        UsageError: one must not.
    """
    for field in wanted:
        if field.name not in present.names and not field.nullable:
            raise UsageError(
                f"stream '{stream}' cannot be updated: column '{field.name}' ({field.type}) would be added and must "
                "not be null, but the events that are there have none; let it be nullable"
            )


def encode_schema(schema: pa.Schema) -> bytes:
    """Return the bytes for the catalogue: those of Arrow, followed by their checksum."""
    data = bytes(schema.serialize())
    return data + _TRAILER.pack(_MAGIC, xxhash.xxh3_64_intdigest(data))


def decode_schema(path: str, data: bytes) -> pa.Schema:
    """Return the schema of ``encode_schema``.

    Raises:
        CorruptionError
    """
    try:
        return _decoded(data)
    except (pa.ArrowException, struct.error, OSError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise CorruptionError(path, 0, "an Arrow schema", str(error)) from error


@functools.lru_cache(maxsize=256)
def _decoded(data: bytes) -> pa.Schema:
    data, (magic, checksum) = data[: -_TRAILER.size], _TRAILER.unpack(data[-_TRAILER.size :])
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(data) != checksum:
        raise ValueError("bytes of another checksum")
    return pa.ipc.read_schema(pa.py_buffer(data))


class SchemaSource(Protocol):
    """Where schemas are kept: ``catalogue.base.Catalogue``."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    def schemas(self, stream: StreamInfo) -> tuple[pa.Schema, ...]:
        """Return the schemas that a stream has had, by version; the last one is that of now."""


class SchemaHistory:
    """The schemas of one stream. It asks for them when it meets one that it does not know; there are only ever more."""

    def __init__(self, catalogue: SchemaSource, stream: StreamInfo) -> None:
        self._catalogue = catalogue
        self._stream = stream
        self._known: tuple[pa.Schema, ...] = ()

    def of(self, version: int) -> pa.Schema:
        """Return the schema of a version.

        Raises:
            CorruptionError: there is none.
        """
        if version == self._stream.schema_version:
            return self._stream.schema
        if version >= len(self._known):
            self._known = self._catalogue.schemas(self._stream)
        if not 0 <= version < len(self._known):
            where = f"{self._catalogue.path} ({self._stream.name})"
            raise CorruptionError(where, 0, f"schema {version} of the stream", f"{len(self._known)} schemas")
        return self._known[version]

    def fitting(self, schema: pa.Schema) -> int | None:
        """Return the newest version that has these columns; None: the stream has never had them."""
        found = newest_matching(self._known, lambda known: schema_difference(known, schema))
        if found is None:
            self._known = self._catalogue.schemas(self._stream)
            found = newest_matching(self._known, lambda known: schema_difference(known, schema))
        return found


def newest_matching(schemas: Sequence[pa.Schema], difference: Callable[[pa.Schema], str]) -> int | None:
    """Return the newest version from which there is no ``difference``; None if there is none."""
    return next((version for version in reversed(range(len(schemas))) if not difference(schemas[version])), None)


def convert_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return events in ``schema``, another one of their stream: nulls in columns that they do not have (S77).

    Columns that ``schema`` does not have are left out. No copy of columns that stay as they are.

    Raises:
        OtherSchemaError: ``schema`` is an older one, and a value of a widened column does not fit it.
    """
    if batch.schema.equals(schema):
        return batch
    columns = [_column(batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def columns_of(schema: pa.Schema) -> Columns:
    """Return the columns of a schema without Arrow."""
    return tuple((field.name, _type_of(field.type)) for field in schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    at = batch.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(at)
    if column.type.equals(field.type):
        return column
    old, new = _type_of(column.type), _type_of(field.type)
    try:
        if holds(old, new) or fits_if_small(old, new):
            return column.cast(field.type)
    except pa.ArrowInvalid:
        pass
    raise OtherSchemaError(f"column '{field.name}' has become {old}, and there is what does not fit {new}")


def _type_of(dtype: pa.DataType) -> ValueType:
    if pa.types.is_large_list(dtype):
        return ListOf(_type_of(dtype.value_type))
    if pa.types.is_struct(dtype):
        return StructOf(tuple((field.name, _type_of(field.type)) for field in dtype))
    return Plain(str(dtype))


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Retention policy of a stream, checked; see ``Retention``. At least one of both is given.

    Attributes:
        age_ms: events that became visible longer ago.
        size_bytes: the oldest events, as long as those after them have so many bytes.
    """

    age_ms: int | None = None
    size_bytes: int | None = None

    def __str__(self) -> str:
        parts = [] if self.age_ms is None else [str(dt.timedelta(milliseconds=self.age_ms))]
        parts += [] if self.size_bytes is None else [f"{self.size_bytes:,} bytes"]
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the events of a stream stay.

    Events that are older than ``age`` are removed. While the stream is larger than ``size``, its oldest events are
    removed. Events that a pipeline or another holder holds (``Store.hold``) are never removed.

    Attributes:
        age: a duration such as ``"7 days"``. None: no limit.
        size: a stored size such as ``"10GB"``. None: no limit.
    """

    age: Duration | None = None
    size: str | int | None = None

    def checked(self) -> RetentionPolicy:
        """Return it in milliseconds and bytes.

        Raises:
            UsageError: neither is given, or one is not a duration or not a size.
        """
        if self.age is None and self.size is None:
            raise UsageError("Retention needs age=, size= or both, such as Retention(age='7 days', size='10GB')")
        age_ms = None if self.age is None else duration_ms(self.age, "Retention(age=)")
        most = None if self.size is None else size_bytes(self.size, "Retention(size=)")
        if age_ms == 0 or most == 0:
            raise UsageError("Retention(age=) and Retention(size=) must be more than 0")
        return RetentionPolicy(age_ms, most)


def retention_policy_of(retention: object) -> RetentionPolicy | None:
    """Return what a user gave as ``retention=``, checked; None: nothing goes by itself.

    Raises:
        UsageError: it is no ``Retention``, or one that cannot be.
    """
    if retention is None:
        return None
    if not isinstance(retention, Retention):
        raise UsageError(f"retention must be a Retention, such as Retention(age='7 days'), not {retention!r}")
    return retention.checked()


def recorded_retention(age_ms: int | None, size_bytes: int | None) -> Retention | None:
    """Return what a user would give for a policy that has been written down; with neither, none."""
    if age_ms is None and size_bytes is None:
        return None
    return Retention(None if age_ms is None else f"{age_ms}ms", size_bytes)


def encode_retention(policy: RetentionPolicy | None) -> str | None:
    """Return the policy as the catalogue has it."""
    return None if policy is None else json.dumps({"age_ms": policy.age_ms, "size_bytes": policy.size_bytes})


def decode_retention(where: str, text: str | None) -> RetentionPolicy | None:
    """Return the policy that ``encode_retention`` made ``text`` of.

    Raises:
        CorruptionError: it is none.
    """
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
        return RetentionPolicy(_positive_or_none(found["age_ms"]), _positive_or_none(found["size_bytes"]))
    except (*MALFORMED, TypeError, KeyError) as error:
        raise CorruptionError(where, 0, "a retention policy", text) from error


def _positive_or_none(value: object) -> int | None:
    if value is None or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(value)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Adjusts the number of segments of a stream automatically to the rate at which it is written.

    Give one of the two targets. A segment is split if its rate is far above the target, or above it for ten minutes.
    Neighbouring segments are merged if their rates together are below half of the target for twenty minutes.

    Attributes:
        events_per_second: the target rate of one segment, in events per second.
        bytes_per_second: the target rate of one segment in stored bytes, such as ``"1MB"``.
        min_segments, max_segments: the smallest and the largest number of segments.
        cool_down: the minimum time between two steps; steps by hand count, too.
    """

    events_per_second: int | None = None
    bytes_per_second: str | int | None = None
    min_segments: int = 1
    max_segments: int = 64
    cool_down: Duration = "10 minutes"

    def checked(self) -> ScalingPolicy:
        """Return it in numbers.

        Raises:
            UsageError: it has no target, two targets or an invalid one, or its bounds are impossible.
        """
        events, data = self.events_per_second, self.bytes_per_second
        if (events is None) == (data is None):
            raise UsageError("Scaling needs events_per_second= or bytes_per_second=, one of both")
        if data is not None:
            unit, target = Unit.BYTES, size_bytes(data, "Scaling(bytes_per_second=)")
        else:
            unit, target = Unit.EVENTS, events if isinstance(events, int) else 0
        if target < 1:
            raise UsageError(f"Scaling({unit}_per_second=) must be a whole number of at least 1")
        if not 1 <= self.min_segments <= self.max_segments <= SEGMENTS_MAX:
            raise UsageError(
                f"Scaling(min_segments={self.min_segments}, max_segments={self.max_segments}) cannot be: a stream has "
                f"1 to {SEGMENTS_MAX} segments, and the first number is not above the second"
            )
        cool_down_ms = duration_ms(self.cool_down, "Scaling(cool_down=)")
        return ScalingPolicy(unit, target, self.min_segments, self.max_segments, cool_down_ms)


def scaling_policy_of(scaling: object) -> ScalingPolicy | None:
    """Return what a user gave as ``scaling=``, checked; None: the stream is scaled by hand only.

    Raises:
        UsageError: it is no ``Scaling``, or one that cannot be.
    """
    if scaling is None:
        return None
    if not isinstance(scaling, Scaling):
        raise UsageError(f"scaling must be a Scaling, such as Scaling(events_per_second=1_000), not {scaling!r}")
    return scaling.checked()


def encode_scaling(policy: ScalingPolicy | None) -> str | None:
    """Return the policy as the catalogue has it."""
    if policy is None:
        return None
    numbers = [policy.target, policy.segments_min, policy.segments_max, policy.cool_down_ms]
    return json.dumps({"unit": policy.unit.value, "numbers": numbers})


def decode_scaling(where: str, text: str | None) -> ScalingPolicy | None:
    """Return the policy that ``encode_scaling`` made ``text`` of.

    Raises:
        CorruptionError: it is none.
    """
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
        target, least, most, cool_down_ms = (int(number) for number in found["numbers"])
        if target < 1 or not 1 <= least <= most:
            raise ValueError(text)
        return ScalingPolicy(Unit(found["unit"]), target, least, most, cool_down_ms)
    except (*MALFORMED, TypeError, KeyError) as error:
        raise CorruptionError(where, 0, "a scaling policy", text) from error
