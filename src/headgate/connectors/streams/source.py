"""A stream of the embedded store as source: one split per segment, read from event positions.

Counterpart: ``headgate.store.reader.SegmentReader``. Source: rules SC1, SC2 and SC20 to SC25 of
docs/spec/stream-store.md. Writes nothing, and makes no store by looking at one (SC7).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import pyarrow as pa

from headgate.connectors.base import BreakingReader, SourceBatch, SourceContext, owner_of_split
from headgate.connectors.hooks import CoordinatorHook
from headgate.connectors.induced import Polled
from headgate.connectors.stream_cuts import SegmentCuts, StreamCutHook
from headgate.errors import CorruptionError, UsageError
from headgate.model.state_identity import Form
from headgate.operators.types import canonical_schema, to_canonical
from headgate.store.reader import SegmentReader
from headgate.store.store import Store, store_root
from headgate.store.streams import StreamInfo, no_such_stream

_POSITION = struct.Struct(">q")
_POSITION_AND_END = struct.Struct(">qq")

WAKEUP_SOON_MS, WAKEUP_LATE_MS = 2, 8
"""A look for news costs some microseconds; half of the pause is the median latency it adds."""
POLLS_SOON = 500
"""Looks without news after which the pause becomes longer: one second of silence."""


@dataclass(frozen=True, slots=True)
class StreamSource:
    """Reads a stream of the store.

    Attributes:
        stream: its name, such as ``app/logs``.
        store: directory of the store; default $HEADGATE_STORE, else ``.headgate/store``. Made absolute at once, since
            workers run elsewhere.
        start: where a first start begins: ``"earliest"`` event or after the ``"latest"`` one.
        follow: wait for new events until the stream is sealed; False: stop at the end seen at the first start.
        stream_cuts: every checkpoint cuts all segments at one moment, which is recorded in the store when the
            checkpoint begins; it completes when the readers have come there. False: each reader is cut where it is.
    """

    stream: str
    store: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    follow: bool = True
    stream_cuts: bool = False

    def __post_init__(self) -> None:
        if self.start not in ("earliest", "latest"):
            raise UsageError(f"start of stream '{self.stream}' must be 'earliest' or 'latest', not {self.start!r}")
        object.__setattr__(self, "store", store_root(self.store))

    def schema(self) -> pa.Schema:
        """Return the stream's schema in canonical types.

        Raises:
            UsageError: there is no such stream.
        """
        return canonical_schema(self._describe().schema)

    def identity(self) -> str:
        """Return what tells this stream from a later one of the same name."""
        info = self._describe()
        return f"{Form.STREAM.value}{info.name} created {info.created_ms} with {info.segments_count} segments"

    def how_to_end(self) -> str | None:
        """See ``EndlessSource``. A sealed stream ends although it is followed."""
        if not self.follow or self._describe().is_sealed:
            return None
        return f"read what is there with follow=False, or seal stream '{self.stream}' first"

    def open(self, context: SourceContext) -> StreamSourceReader:
        """Return a reader of the segments that belong to this subtask."""
        reader = StreamCutReader if self.stream_cuts else StreamSourceReader
        return reader(self, Store.shared(self.store), context)

    def coordinator_hook(self) -> CoordinatorHook | None:
        """See ``HookedSource``."""
        return StreamCutHook(self.stream, str(self.store)) if self.stream_cuts else None

    def without_hook(self) -> StreamSource:
        """See ``HookedSource``."""
        return replace(self, stream_cuts=False)

    def _describe(self) -> StreamInfo:
        """Return the stream; a pipeline that is being built makes no store (SC7)."""
        if not Store.exists(self.store):
            raise no_such_stream(self.stream, str(self.store), ())
        return Store.shared(self.store).describe(self.stream)


class StreamSourceReader(BreakingReader):
    """Reads the segments of one subtask in turn."""

    def __init__(self, source: StreamSource, store: Store, context: SourceContext) -> None:
        """Use ``StreamSource.open``."""
        info = store.describe(source.stream)
        self._schema = canonical_schema(info.schema)
        self._readers: dict[str, SegmentReader] = {}
        self._ends: dict[str, int | None] = {}
        self._finished: set[str] = set()
        self._store = store
        self._turn = 0
        self._idle_changes = -1
        self._empty_polls = 0
        for segment in range(info.segments_count):
            if owner_of_split(segment, context.parallelism) != context.subtask_index:
                continue
            split = f"{info.name}/{segment}"
            stored = (context.positions or {}).get(split)
            if stored is not None:
                position, end = decode_position(split, stored)
            else:
                position = 0 if source.start == "earliest" else info.ends[segment]
                end = None if source.follow else info.ends[segment]
            self._readers[split] = store.reader(info.name, segment, position)
            self._ends[split] = end

    def splits(self) -> Sequence[str]:
        """Return the segments not read to their end."""
        return [split for split in self._readers if split not in self._finished]

    def _poll(self) -> SourceBatch | None:
        """Return the next events of one segment."""
        return cast(SourceBatch | None, self._poll_segments())

    def _poll_segments(self) -> Polled:
        changes = self._store.changes()
        if changes == self._idle_changes:
            self._empty_polls += 1
            return None
        names = self.splits()
        for step in range(len(names)):
            split = names[(self._turn + step) % len(names)]
            found = self._poll_split(split)
            if found is not None:
                self._turn += step + 1
                self._empty_polls = 0
                return found
        self._idle_changes = changes  # taken before looking: what came meanwhile is looked for again
        self._empty_polls += 1
        return None

    def _has_ended(self) -> bool:
        """Whether every segment of this subtask is read to its end."""
        return len(self._finished) == len(self._readers)

    def _positions(self) -> dict[str, bytes]:
        """Return position (and end, when it does not follow) of every segment."""
        found = {}
        for split, reader in self._readers.items():
            end = self._ends[split]
            found[split] = (
                _POSITION.pack(reader.position) if end is None else _POSITION_AND_END.pack(reader.position, end)
            )
        return found

    def wakeup_ms(self) -> int:
        """Return a short pause after recent events, else a longer one."""
        return WAKEUP_SOON_MS if self._empty_polls < POLLS_SOON else WAKEUP_LATE_MS

    def close(self) -> None:
        """The store is shared by the process and stays open."""

    def _poll_split(self, split: str) -> Polled:
        reader, end = self._readers[split], self._ends[split]
        batch = None if end is not None and reader.position >= end else reader.read(end=end)
        if batch is None:
            is_over = reader.is_sealed_and_exhausted() if end is None else reader.position >= end  # SC2
            return self._over(split) if is_over else None
        return SourceBatch(split, to_canonical(batch, self._schema))

    def _over(self, split: str) -> SourceBatch:
        self._finished.add(split)
        return SourceBatch(split, pa.RecordBatch.from_pylist([], schema=self._schema), is_split_finished=True)


class StreamCutReader(StreamSourceReader):
    """Stands still at the markers of its generation, in every segment (SC20–SC23). An ``InducedReader``."""

    def __init__(self, source: StreamSource, store: Store, context: SourceContext) -> None:
        """Use ``StreamSource.open``."""
        super().__init__(source, store, context)
        self._cuts = SegmentCuts(store, source.stream, context)

    def poll(self) -> Polled:  # type: ignore[override]
        """See ``InducedReader``."""
        return super().poll()

    def read_on(self, splits: Sequence[str]) -> None:
        """See ``InducedReader``."""
        self._cuts.read_on(splits)
        self._idle_changes = -1

    def _poll_split(self, split: str) -> Polled:
        if self._cuts.stands_still(split):
            return None
        reader, end = self._readers[split], self._ends[split]
        frontier = self._cuts.look()
        last = frontier.ends[reader.segment] if end is None else end
        if reader.position >= last and (end is not None or frontier.is_sealed):
            return self._over(split)  # SC25: first, or checkpoint after checkpoint would keep it from its end
        met = self._cuts.meet(split, reader.segment, reader.position)
        if met is not None:
            return met
        limit = self._cuts.limit(reader.segment)
        limit = limit if end is None else min(limit, end)
        batch = None if reader.position >= limit else reader.read(end=limit)
        return None if batch is None else SourceBatch(split, to_canonical(batch, self._schema))


def decode_position(split: str, data: bytes) -> tuple[int, int | None]:
    """Return the position of a segment, and its end when it is not followed.

    Raises:
        CorruptionError
    """
    if len(data) == _POSITION.size:
        return int(_POSITION.unpack(data)[0]), None
    if len(data) == _POSITION_AND_END.size:
        position, end = _POSITION_AND_END.unpack(data)
        return int(position), int(end)
    raise CorruptionError(f"position of split '{split}'", 0, "8 or 16 bytes", f"{len(data)}")
