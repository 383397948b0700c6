"""Pipelines that copy a stream of the store into a stream of another system, or back.

``topic_copy`` has those of Kafka, ``pravega_copy`` those of Pravega. A copy follows its input and is stopped when a
completed checkpoint has all that was there at its start, so that a later run goes on from there: one whose input ends
has finished for good.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from headgate.api.pipeline import Pipeline
from headgate.api.state_access import read_state
from headgate.codec.arrow import MOMENT
from headgate.connectors.kafka.formats import VALUE
from headgate.connectors.kafka.outgoing_records import RecordColumns
from headgate.connectors.streams.segments import first_needed, places_of
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError, UsageError
from headgate.model.progress import PipelineHandle
from headgate.store.store import Store
from headgate.store.streams import StreamInfo

LOOK_S = 0.1
"""Between two looks for a new checkpoint."""

SOURCE = "source"
"""The node that reads."""

Direction: TypeAlias = Literal["to-stream", "from-stream"]


class StreamCopy(ABC):
    """A copy between a stream of the store and one of another system.

    Attributes:
        direction: whether the stream of the store is written or read.
        stream, store: the stream, as for ``StreamSource``.
        name: of the pipeline; "": made from what is copied.
        other: the stream of the other system, in words.
    """

    direction: Direction
    stream: str
    store: str
    name: str

    @property
    @abstractmethod
    def other(self) -> str: ...

    @property
    @abstractmethod
    def pipeline_name(self) -> str:
        """The name, under which the copy has its checkpoints."""

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return the pipeline.

        Raises:
            UsageError: one of the two streams is missing, or records of the one cannot be records of the other.
        """

    @abstractmethod
    def end_elsewhere(self) -> Mapping[int, int] | None:
        """Return where the stream of the other system ends now; None: it ends for good, so the copy ends with it."""

    @abstractmethod
    def is_past_elsewhere(self, end: Mapping[int, int], positions: Mapping[str, bytes]) -> bool:
        """Whether everything in front of ``end`` in the stream of the other system is copied at ``positions``."""

    def named(self, what: str) -> str:
        """Return the name of the pipeline that copies ``what`` of the other system."""
        words = re.sub(r"[^A-Za-z0-9_-]+", "-", f"copy-{what}-{self.direction}")[:60]
        identity = "\0".join((self.direction, what, self.stream, self.store))
        return self.name or f"{words}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    def find_stream(self) -> StreamInfo | None:
        """Return the stream of the store, if it is there.

        Raises:
            UsageError: it is to be read, and there is no such store.
        """
        if not Store.exists(self.store):
            if self.direction == "from-stream":
                raise UsageError(f"there is no stream store at {self.store}; --store names another one")
            return None
        store = Store.shared(self.store)
        known = {one.name for one in store.list_streams()}
        return store.find(self.stream) if self.stream in known else None

    def find_input(self) -> StreamInfo:
        """Return the stream of the store that is read.

        Raises:
            UsageError: it is not there.
        """
        found = self.find_stream()
        return Store.shared(self.store).find(self.stream) if found is None else found  # which says what there is

    def end(self) -> Mapping[int, int] | None:
        """Return where the input ends now: partition or segment → position. None: the copy ends by itself."""
        if self.direction == "to-stream":
            return self.end_elsewhere()
        return dict(Store.shared(self.store).tail(self.stream).positions)

    def is_past(self, end: Mapping[int, int], checkpoints: str, checkpoint: int) -> bool:
        """Whether everything in front of ``end`` is copied by a completed checkpoint below ``checkpoints``."""
        where = f"{checkpoints.rstrip('/')}/{self.pipeline_name}"
        rows = read_state(where, SOURCE, "positions", id=checkpoint, columns=["split", "position"]).iter_rows()
        positions = dict(rows)
        if self.direction == "to-stream":
            return self.is_past_elsewhere(end, positions)
        store = Store.shared(self.store)
        layout, extents = store.pipelines.layout_and_extents(store.find(self.stream))
        reached = first_needed(layout, extents, places_of(self.stream, positions))
        return all(reached.get(number, 0) >= position for number, position in end.items())

    def stop_at(self, end: Mapping[int, int] | None, handle: PipelineHandle, checkpoints: str) -> bool:
        """Stop a run when it has copied everything in front of ``end``. Return whether it has, when it has ended."""
        seen, is_past = None, False
        with suppress(HeadgateError):  # the run itself says how it ended
            while handle.wait(LOOK_S) is None:
                done = handle.progress.last_checkpoint
                if end is not None and done is not None and done.checkpoint != seen and not is_past:
                    seen = done.checkpoint
                    with suppress(HeadgateError):  # it may have been removed meanwhile: a newer one is there then
                        is_past = self.is_past(end, checkpoints, seen)
                    if is_past:
                        handle.stop()
        return is_past

    def release(self) -> None:
        """Let the stream go that was read: until the copy is run again, it needs nothing of it."""
        if self.direction == "from-stream":
            store, holder = Store.shared(self.store), f"{self.pipeline_name}/{SOURCE}"
            if holder in store.holds(self.stream):
                store.release(self.stream, holder=holder)


@dataclass(frozen=True, slots=True)
class AsJson:
    """Records of a stream as records of another system: JSON, and the routing key as text."""

    stream: str
    key: str | None
    timestamp: str | None = None

    def schema(self) -> pa.Schema:
        """Return what is made."""
        key = [] if self.key is None else [("key", pa.large_string())]
        time = [] if self.timestamp is None else [("timestamp", MOMENT)]
        return pa.schema([(VALUE, pa.large_binary()), *key, *time])

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if _has_odd_number(column):
                raise UsageError(
                    f"column '{field.name}' of stream '{self.stream}' has a number that is NaN or infinite, which JSON "
                    "cannot hold; copy a stream without it"
                )
        columns = [RecordColumns().values_of(batch)]
        if self.key is not None:
            columns.append(batch.column(self.key).cast(pa.large_string()))
        if self.timestamp is not None:
            column = batch.column(self.timestamp)
            columns.append(column.cast(MOMENT) if column.type.tz else column.cast(pa.int64()).cast(MOMENT))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema())


def _has_odd_number(column: pa.Array) -> bool:
    if pa.types.is_floating(column.type):
        return not pc.all(pc.is_finite(column), min_count=0).as_py()
    if pa.types.is_struct(column.type) or pa.types.is_large_list(column.type):
        inner = column.flatten()
        return any(map(_has_odd_number, inner if isinstance(inner, list) else [inner]))
    return False
