"""A stream of Pravega as source: what users configure, and what events become.

Counterpart: ``reader`` reads its segments in the subtasks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.connectors.base import HoldContext, Source, SourceBatch, SourceContext
from headgate.connectors.files.lines import Lines
from headgate.connectors.kafka.formats import (
    RAW,
    RecordFormat,
    SchemaDecoder,
    record_format,
    refuse_the_rest,
    value_decoder,
)
from headgate.connectors.pravega.controller import (
    NO_SECURITY,
    Controller,
    Cut,
    PravegaSecurity,
    StreamName,
    require_grpc,
)
from headgate.connectors.pravega.reader import PravegaReader, Reading
from headgate.connectors.pravega.reader_group import cut_at, cut_of_group, forget, hold_back, publish
from headgate.connectors.pravega.scaled_stream import Position, segment_of
from headgate.connectors.pravega.segment_store import tail
from headgate.connectors.pravega.time_marks import marks_of
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import UsageError
from headgate.model.config import check_switches
from headgate.model.ids import CheckpointId
from headgate.model.lineage import Location
from headgate.model.state_schema import Form
from headgate.operators.schemas import SchemaLike, canonical_schema
from headgate.operators.user_functions import bad_records

EARLIEST, LATEST = "earliest", "latest"
OF_GROUP, OF_CHECKPOINT = "group:", "checkpoint:"
"""In front of the name of a reader group."""

FORMATS = ("raw", "text", "json", "csv", "avro", "protobuf")

_GROUP = re.compile(r"[A-Za-z0-9._-]+")

_METADATA = {"segment": pa.int64(), "offset": pa.int64()}


class Pravega(Source):
    """Reads a stream of Pravega, each event exactly once.

    ``Pravega("localhost:9090", "shop/orders", format="json", schema={"customer": str, "amount": int})`` reads events of
    JSON. Events with one routing key come in the order in which they were written, also when the stream is scaled.
    Each segment has event time of its own. An event that cannot be decoded is a bad record. Needs the package grpcio:
    ``pip install 'headgate-streams[pravega]'``.
    """

    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT

    def __init__(
        self,
        controller: str,
        stream: str,
        *,
        format: str = RAW,
        schema: SchemaLike | str | type | None = None,
        required: Sequence[str] = (),
        separator: str = ",",
        metadata: Sequence[str] = (),
        start: str | Cut = EARLIEST,
        end: str | Cut | None = None,
        group: str = "",
        noted_time: bool = False,
        security: PravegaSecurity = NO_SECURITY,
    ) -> None:
        """Configure.

        Args:
            controller: ``"host:port"`` of the controller.
            stream: scope and name of the stream, such as ``"shop/orders"``.
            format: what events are: ``"raw"`` (a column ``value`` of bytes), ``"text"`` (a column ``value`` of text),
                ``"json"`` (an object with the fields of ``schema``), ``"csv"`` (one row with the fields of
                ``schema`` in their order, without a header), ``"avro"`` or ``"protobuf"``.
            schema: for JSON and CSV, an Arrow or Polars schema, or a dict from names to Python, Polars or Arrow types.
                Arrow fields that are not nullable are required. For Avro, the schema of the events as JSON text. For
                Protobuf, the message: a generated class.
            required: further fields of JSON that must be present and not null.
            separator: the character between the fields of CSV.
            metadata: columns beside those of the event, of ``"segment"`` and ``"offset"``. Pravega keeps no routing
                keys: an event that needs its key must have it inside.
            start: where the first start begins: ``"earliest"``, ``"latest"`` as it is when the program starts, or a
                stream cut: an offset for each segment, such as ``{0: 1200, 1: 0}``. ``"group:billing"``: where the
                readers of the reader group ``billing`` were closed; ``"checkpoint:billing"``: at its last checkpoint.
            end: where reading ends: ``"latest"`` as it is when the program starts, or a stream cut. None: it ends only
                when the stream is sealed.
            group: a reader group that Headgate creates in the scope of the stream, for this source alone. A stream
                with a retention policy keeps its events, up to the maximum of the policy, until no retained
                checkpoint needs them. Its positions, which Pravega's own client shows, are those of the newest
                checkpoint. A restart does not begin there, but at its checkpoint.
            noted_time: the writers of the stream note event time, as ``PravegaSink`` and ``noteTime`` of Pravega's
                client do. The watermark of a segment is that time, whatever its records say, and none before the first
                time that was noted. Pravega makes it known every ten seconds or so, so it lags by that.
            security: TLS and login, if Pravega demands them.

        Raises:
            UsageError: options contradict each other, or the package is not installed.
        """
        where = "a Pravega source"
        check_switches("Pravega: ", noted_time=noted_time)
        self.controller, self.stream, self.security = controller, StreamName.parse(stream), security
        if format not in FORMATS:
            raise UsageError(f"format={format!r} of {where} is none of {', '.join(map(repr, FORMATS))}")
        if format == "avro" and schema is None:
            raise UsageError(f"format='avro' of {where} needs schema='{{...}}', the schema of the events")
        self.metadata = tuple(metadata)
        for name in self.metadata:
            if name not in _METADATA:
                raise UsageError(f"metadata of {where} has no {name!r}; choose of {', '.join(_METADATA)}")
        self._format = record_format(format, schema, None, required, separator, (), "drop", where=where)
        self.start, self.end = _checked("start", start), None if end is None else _checked("end", end)
        self.decoder()
        if group and _GROUP.fullmatch(group) is None:
            raise UsageError(
                f"group={group!r} of {where} is no name of a reader group; it has letters, digits, '.', '_' and '-'"
            )
        self.group, self.noted_time = group, noted_time
        self._begin: dict[int, int] | str | None = None
        self._until: dict[int, int] | None = None
        require_grpc()

    def __repr__(self) -> str:
        return f"Pravega({self.controller!r}, '{self.stream}')"

    def client(self) -> Controller:
        """Return a client of the controller."""
        return Controller(self.controller, self.security)

    def schema(self) -> pa.Schema:
        """See ``Source``. The stream is looked at, too: once, so that all subtasks begin and end at the same cuts."""
        self.cuts()
        return self.decoder().schema

    def cuts(self) -> tuple[dict[int, int] | str, dict[int, int] | None]:
        """Return the cuts at which reading begins, and ends if it does.

        In place of the first, why a reader group does not say it now: only a first start needs to know.

        Raises:
            UsageError: the stream is missing, or a cut is none of it.
        """
        if self._begin is None:
            client = self.client()
            try:
                if not client.exists(self.stream):
                    raise UsageError(f"Pravega at {self.controller} has no stream '{self.stream}'; create it first")
                if self.noted_time and not client.exists(marks_of(self.stream)):
                    raise UsageError(
                        f"Pravega at {self.controller} keeps no event time for stream '{self.stream}'; leave "
                        "noted_time= out"
                    )
                begin = self._first_cut(client)
                self._until = None if self.end is None else self._cut(client, "end", self.end)
                self._begin = begin
            finally:
                client.close()
        return self._begin, self._until

    def _first_cut(self, client: Controller) -> dict[int, int] | str:
        for prefix in (OF_GROUP, OF_CHECKPOINT):
            if isinstance(self.start, str) and self.start.startswith(prefix):
                group, is_checkpoint = self.start.removeprefix(prefix), prefix == OF_CHECKPOINT
                try:
                    return cut_of_group(client, self.stream, group, self.environment, is_checkpoint=is_checkpoint)
                except UsageError as error:
                    return str(error)
        return self._cut(client, "start", self.start)

    def begin(self) -> dict[int, int]:
        """Return the cut at which a first start begins.

        Raises:
            UsageError: the stream is missing, or it has no such cut, or a reader group does not say one.
        """
        begin, _ = self.cuts()
        if isinstance(begin, str):
            raise UsageError(begin)
        return begin

    def _cut(self, client: Controller, option: str, given: str | tuple[tuple[int, int], ...]) -> dict[int, int]:
        if given == EARLIEST:
            return client.head(self.stream)
        if given == LATEST:
            return tail(client, self.stream, self.environment)
        assert isinstance(given, tuple)
        cut = dict(given)
        if not client.is_valid(self.stream, cut):
            raise UsageError(
                f"{option}={cut} of a Pravega source is no stream cut of '{self.stream}': it needs one offset for each "
                "part of the keys"
            )
        return cut

    def identity(self) -> str:
        """See ``Source``: positions name segments, and a stream that is created again has others."""
        return f"{Form.PRAVEGA.value}{self.stream}"

    def locations(self) -> tuple[Location, ...]:
        """See ``Source``. Without the controller's address, which may change."""
        name = f"pravega:{self.stream}"
        return (Location(name, name),)

    def how_to_end(self) -> str | None:
        """See ``Source``."""
        return "give end='latest'" if self.end is None else None

    @property
    def holds(self) -> bool:
        """See ``Source``: with a reader group."""
        return bool(self.group)

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """See ``Source``: release for the reader group what no checkpoint needs.

        Raises:
            UsageError: the group belongs to another pipeline or program.
        """
        checkpoints = [
            {segment_of(split): Position.decode(split, data) for split, data in positions.items()}
            for positions in needed
        ]
        begin = {} if checkpoints and all(checkpoints) else self.begin()
        with closing(self.client()) as client:
            owner = f"{context.pipeline}/{context.node}"
            hold_back(client, self.stream, self.group, owner, begin, checkpoints)

    @property
    def publishes(self) -> bool:
        """See ``Source``: with a reader group."""
        return bool(self.group)

    def publish(
        self, context: HoldContext, checkpoint: CheckpointId | None, positions: Mapping[str, bytes], *, begins: bool
    ) -> None:
        """See ``Source``: let the reader group be where the checkpoint is.

        Raises:
            UsageError: the group is of another pipeline or program, or programs with Pravega's own client read by it.
        """
        places = {segment_of(split): Position.decode(split, data) for split, data in positions.items()}
        begin = {} if places else self.begin()
        with closing(self.client()) as client:
            cut = cut_at(client, self.stream, places, begin)
            number = int(checkpoint or 0)
            publish(client, self.stream, self.group, context, number, cut, self.environment, begins=begins)

    def without_hook(self) -> Source:
        """See ``Source``: a run that only looks releases nothing."""
        look = copy.copy(self)
        look.group = ""
        return look

    def forget_group(self) -> None:
        """Let the stream not wait any more for the reader group ``group``, when its pipeline is gone.

        Raises:
            UsageError: there is no such group, or Headgate has not made it.
            StorageError: the controller cannot do it now.
        """
        with closing(self.client()) as client:
            forget(client, self.stream, self.group)

    def open(self, context: SourceContext) -> PravegaReader:
        """Return a reader of the segments that belong to this subtask."""
        if context.positions is None:
            self.begin()
        return PravegaReader(self.reading(), context)

    def reading(self) -> Reading:
        """Return what a reader needs to know."""
        found, end = self.cuts()
        begin = {} if isinstance(found, str) else found
        decoder = self.decoder()
        is_given = isinstance(self.end, tuple)
        return Reading(
            self.stream, begin, end, is_given, self.client, decoder.decode, decoder.schema, self.environment,
            self.noted_time,
        )  # fmt: skip

    def decoder(self) -> EventDecoder:
        """Return what makes records of events."""
        return EventDecoder(self._format, self.metadata, self.stream)


def _checked(name: str, place: object) -> str | tuple[tuple[int, int], ...]:
    words = (EARLIEST, LATEST) if name == "start" else (LATEST,)
    if isinstance(place, str):
        prefix, of_group, group = place.partition(":")
        is_of_group = name == "start" and f"{prefix}{of_group}" in (OF_GROUP, OF_CHECKPOINT)
        if place in words or (is_of_group and _GROUP.fullmatch(group) is not None):
            return place
    if (
        isinstance(place, Mapping)
        and place
        and all(isinstance(one, int) and isinstance(at, int) and at >= 0 for one, at in place.items())
    ):
        return tuple(sorted(place.items()))
    choices = " or ".join(map(repr, words))
    groups = ", nor a reader group such as 'group:billing' or 'checkpoint:billing'" if name == "start" else ""
    raise UsageError(
        f"{name}={place!r} of a Pravega source is neither {choices} nor a stream cut such as {{0: 1200, 1: 0}}, which "
        f"has an offset for each segment{groups}"
    )


class EventDecoder:
    """Makes records of events.

    Attributes:
        schema: of the records.
    """

    def __init__(self, form: RecordFormat, metadata: Sequence[str], stream: StreamName) -> None:
        self._stream, self._metadata = stream, metadata
        self._values = value_decoder(form, SYSTEM_ENVIRONMENT)
        schema = pa.schema([("value", pa.large_binary())]) if self._values is None else self._values.schema
        for name in metadata:
            if name in schema.names:
                raise UsageError(f"the metadata of a Pravega source and its events both have a column '{name}'")
        self.schema = canonical_schema(pa.schema([*schema, *((name, _METADATA[name]) for name in metadata)]))

    def decode(self, segment: int, values: pa.Array, offsets: npt.NDArray[np.int64], node: str) -> SourceBatch:
        """Return the records of one segment, and the events that are none."""
        columns, kept, bad = [values], np.arange(len(values)), None
        if self._values is not None:
            if isinstance(self._values, SchemaDecoder):
                decoded = self._values.decode(values, kept, None)
            else:
                decoded = self._values.decode(Lines(values, kept))
                refuse_the_rest(values, kept, decoded)
            columns, kept = decoded.batch.columns, decoded.starts
            if (refused := decoded.refused).problems:
                places = [f"stream {self._stream} segment {segment} offset {offsets[row]}" for row in refused.starts]
                texts = [values[row].as_py().decode(errors="backslashreplace") for row in refused.starts]
                bad = bad_records(node, refused.problems, places, texts)
        beside = {"segment": np.full(len(kept), segment, np.int64), "offset": offsets[kept]}
        columns = [*columns, *(pa.array(beside[name]) for name in self._metadata)]
        split = f"{self._stream}/{segment}"
        return SourceBatch(split, pa.RecordBatch.from_arrays(columns, schema=self.schema), bad)
