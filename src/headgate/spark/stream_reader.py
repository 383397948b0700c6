"""Reads a stream of the store into Spark: once, between two cuts, or in micro-batches.

Counterparts: ``spark.stream_format``, which makes it; ``protocol.store.micro_batches``, which decides. Source:
docs/spec/spark-streams.md. Arrow batches all the way; what is read is never more than what the cuts say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from headgate.dataclass import dataclass
from headgate.errors import TruncatedError, UsageError
from headgate.operators.schemas import canonical_schema
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.micro_batches import (
    Piece,
    cut_up,
    distribute,
    first_missing,
    in_order,
    pieces_between,
    taken,
)
from headgate.protocol.store.truncation import Extent
from headgate.spark.dataframes import batches_for_spark, keys_in, schema_for_spark
from headgate.spark.stream_options import EARLIEST, LATEST, PLACE_COLUMNS, Options, StreamLocation
from headgate.store.routing import places_of
from headgate.store.streams import StreamCut, StreamInfo

PARTITION_BYTES = 512 << 20
"""What one task reads, at most about: that takes a second or two, and beginning and ending a task 100 ms and more."""

TASK_BYTES_MIN = 4 << 20
"""Less is not worth a task, as to Spark that reads files."""

Offset = dict[str, str]
"""``{"cut": text}``: as JSON in the checkpoint of a streaming query."""


@dataclass(frozen=True, slots=True)
class StreamSelection:
    """A stream and the columns that are read of it.

    Attributes:
        place: where it is.
        stream_id: its number: a stream of the same name that is created later has another one.
        version: of the schema that it had when it was loaded, in which all events are read (S77).
        schema: the columns, in types that Spark takes.
        keys: the routing keys of the events that are read; None: all.
    """

    place: StreamLocation
    stream_id: int
    version: int
    schema: pa.Schema
    keys: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, options: Options) -> StreamSelection:
        """Find the stream.

        Raises:
            UsageError: there is none, no such column, or no such key.
        """
        place = StreamLocation(options.root, options.stream)
        info = place.find()
        whole = canonical_schema(info.schema)
        if options.is_on("place"):
            taken_names = sorted(set(PLACE_COLUMNS) & set(whole.names))
            if taken_names:
                raise UsageError(
                    f"stream '{info.name}' has a column {taken_names[0]} of its own: read it without place=true"
                )
            for name, dtype in zip(PLACE_COLUMNS, (pa.int32(), pa.int64()), strict=True):
                whole = whole.append(pa.field(name, dtype))
        return cls(
            place,
            info.stream_id,
            info.schema_version,
            schema_for_spark(_narrowed(whole, options.text("columns"), info.name)),
            _keys(info, options.text("keys")),
        )

    def find(self) -> StreamInfo:
        """Return the stream.

        Raises:
            UsageError: it is not there any more.
        """
        info = self.place.find()
        if info.stream_id != self.stream_id:
            raise UsageError(f"stream '{info.name}' was deleted and created again since it was loaded: load it again")
        return self.place.store.find(info.name, schema_version=self.version)

    def look(self, begin: StreamCut) -> tuple[StreamInfo, Layout, dict[int, Extent]]:
        """Return the stream as it is now.

        Raises:
            TruncatedError: events after ``begin`` are gone.
            UsageError: ``begin`` is a cut of another stream: it comes from a checkpoint of before.
        """
        info = self.find()
        begin.check(info)
        layout, extents = self.place.store.pipelines.layout_and_extents(info)
        gone = first_missing(extents, begin.positions)
        if gone is not None:
            raise TruncatedError(info.name, gone, begin.positions.get(gone, 0), extents[gone].head)
        return info, layout, extents

    def rows_in(self, size_bytes: int) -> int:
        """Return about how many events have so many bytes, at least one: by the mean size of those that are there."""
        info = self.place.store.describe(self.find().name)
        return max(1, size_bytes * info.events_count // info.size_bytes) if info.size_bytes else 1

    def read(self, partition: InputPartition, schema: Any) -> Iterator[pa.RecordBatch]:
        """Yield the events of one partition; of none if there was nothing to be read."""
        target = to_arrow_schema(schema, timezone="UTC")
        if isinstance(partition, PiecesPartition):
            info = self.find()
            shows_place = bool(set(PLACE_COLUMNS) & (set(target.names) - set(info.schema.names)))
            for piece in partition.pieces:
                for first, batch in _events(self.place, info, piece):
                    shown = _with_place(batch, piece.segment, first) if shows_place else batch
                    if self.keys is not None:
                        column = batch.column(info.routing_key)
                        shown = shown.filter(pc.is_in(column, pa.array(self.keys, column.type)))
                    yield from batches_for_spark(shown, target)


def _narrowed(schema: pa.Schema, columns: str | None, stream: str) -> pa.Schema:
    names = schema.names if columns is None else [name.strip() for name in columns.split(",")]
    unknown = [name for name in names if name not in schema.names]
    if unknown:
        raise UsageError(f"stream '{stream}' has no column {unknown[0]!r}; it has {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in names])


def _keys(info: StreamInfo, text: str | None) -> tuple[Any, ...] | None:
    if text is None:
        return None
    if info.routing_key is None:
        raise UsageError(f"stream '{info.name}' has no routing key to choose events by; filter the DataFrame instead")
    return tuple(keys_in(text, [info.schema.field(info.routing_key)], f"stream '{info.name}'"))


class PiecesPartition(InputPartition):  # type: ignore[misc]
    """What one task reads, in this order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(None)
        self.pieces = tuple(pieces)


def _events(place: StreamLocation, info: StreamInfo, piece: Piece) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the events of a piece, each batch with the position of its first one."""
    reader = place.store.reader(info.name, piece.segment, piece.begin, schema_version=info.schema_version)
    while reader.position < piece.end:
        first = reader.position
        batch = reader.read(end=piece.end)
        if batch is None:
            raise UsageError(
                f"segment {piece.segment} of stream '{info.name}' ends at {first} and was to be read to {piece.end}: "
                "the store is older than the cut, or another one"
            )
        assert reader.position == first + batch.num_rows <= piece.end, (
            "each event is a row, and none is beyond the piece"
        )
        yield first, batch


def _with_place(batch: pa.RecordBatch, segment: int, first: int) -> pa.RecordBatch:
    numbers = np.full(batch.num_rows, segment, dtype=np.int32), np.arange(first, first + batch.num_rows)
    for name, values in zip(PLACE_COLUMNS, numbers, strict=True):
        batch = batch.append_column(name, pa.array(values))
    return batch


# -- once ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CutRange:
    """What ``spark.read`` reads: the same for all tasks, and all actions on one DataFrame."""

    selected: StreamSelection
    begin: StreamCut
    end: StreamCut

    @classmethod
    def of(cls, options: Options) -> CutRange:
        """Find the stream, and the cuts as they are now."""
        selected = StreamSelection.of(options)
        begin, end = options.text("start") or EARLIEST, options.text("end") or LATEST
        return cls(selected, selected.place.cut(begin, "start"), selected.place.cut(end, "end"))


class StreamReader(DataSourceReader):  # type: ignore[misc]
    """Reads the events between two cuts.

    There is no ``pushFilters``: Spark plans every use of one DataFrame with the filters of the one it planned first.
    """

    def __init__(self, span: CutRange, schema: Any, rows_per_partition: int | None, at_once: int) -> None:
        """``rows_per_partition``: at most, of one segment; None: by their size, for ``at_once`` tasks at one time."""
        self._span = span
        self._schema = schema
        self._rows_max = rows_per_partition
        self._at_once = at_once

    def partitions(self) -> Sequence[InputPartition]:
        """Return what each task reads, of segments that can have what is wanted."""
        info, layout, extents = self._span.selected.look(self._span.begin)
        pieces = pieces_between(extents, self._span.begin.positions, self._span.end.positions)
        if self._span.selected.keys is not None:
            wanted = _segments_with(info, layout, self._span.selected.keys)
            pieces = [piece for piece in pieces if piece.segment in wanted]
        if self._rows_max is not None:
            return [PiecesPartition([one]) for one in cut_up(pieces, self._rows_max)]
        rows_max, rows_min = (self._span.selected.rows_in(size) for size in (PARTITION_BYTES, TASK_BYTES_MIN))
        return [PiecesPartition(some) for some in distribute(pieces, rows_max, rows_min, self._at_once)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of one partition."""
        return self._span.selected.read(partition, self._schema)


def _segments_with(info: StreamInfo, layout: Layout, keys: tuple[Any, ...]) -> set[int]:
    """Return the segments that can have events with these routing keys, in every layout (SP3)."""
    places = places_of(pa.array(keys, info.schema.field(info.routing_key).type)).tolist()
    return {x.segment_id for x in layout.segments if any(x.key_low <= place < x.key_high for place in places)}


# -- in micro-batches --------------------------------------------------------------------------------------------------


class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads on from cut to cut: each event once, and those of a key in order (SP4, SP5)."""

    def __init__(
        self, selected: StreamSelection, schema: Any, start: str, rows_max: int | None, holder: str | None
    ) -> None:
        """``holder``: of the events that have not been processed; None: they are not held."""
        self._selected = selected
        self._schema = schema
        self._start = start
        self._rows_max = rows_max
        self._holder = holder
        self._last: StreamCut | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - PySpark's name
        """Return where a new query begins."""
        cut = self._selected.place.cut(self._start, "start")
        # before Spark records the offset: from then on these events may be asked for
        self._hold(cut)
        return {"cut": str(cut)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - PySpark's name
        """Return how many events a micro-batch takes at most."""
        return ReadAllAvailable() if self._rows_max is None else ReadMaxRows(self._rows_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - PySpark's name
        """Take what is there now for all there is."""
        # kept: what comes later is for the next start of the query
        self._last = self._tail()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - PySpark's name
        """Return how far the next micro-batch goes."""
        begin = _cut_of(start)
        _, layout, extents = self._selected.look(begin)
        end = self._last or self._tail()
        unread = pieces_between(extents, begin.positions, end.positions)
        if isinstance(limit, ReadMaxRows):
            unread = taken(layout, unread, limit.max_rows)
        if not unread:  # the same offset, so Spark begins no micro-batch
            return start
        # segments that are new are at their heads, those that were begun at their positions, those that are read at the
        # ends of their pieces
        reached = {number: extent.head for number, extent in extents.items() if number in end.positions}
        reached |= dict(begin.positions) | {piece.segment: piece.end for piece in unread}
        return {"cut": str(StreamCut(begin.stream, begin.stream_id, reached))}

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - PySpark's name
        """Return where the stream ends, for people."""
        return {"cut": str(self._tail())}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return a partition for each set of segments with keys in common, which is read in order."""
        begin = _cut_of(start)
        _, layout, extents = self._selected.look(begin)
        pieces = pieces_between(extents, begin.positions, _cut_of(end).positions)
        return [PiecesPartition(group) for group in in_order(layout, pieces)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of one partition."""
        return self._selected.read(partition, self._schema)

    def commit(self, end: Offset) -> None:
        """Everything before ``end`` has been processed."""
        self._hold(_cut_of(end))

    def _hold(self, cut: StreamCut) -> None:
        if self._holder is not None:
            self._selected.place.store.hold(cut, holder=self._holder)

    def _tail(self) -> StreamCut:
        return self._selected.place.store.tail(self._selected.find().name)


def _cut_of(offset: Mapping[str, str]) -> StreamCut:
    return StreamCut.parse(offset["cut"])
