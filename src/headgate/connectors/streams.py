"""Streams of the embedded store as source and sink.

Source: one split per segment, read from event positions. Sink: one transaction per checkpoint and subtask, named by
its identity (S15, K8), committed by the coordinator in one step for all subtasks (S14).

Counterpart: ``headgate.store.store.Store``. Source: rules SC1 to SC6 of docs/spec/stream-store.md.
Never makes output visible before its checkpoint is completed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import msgspec
import pyarrow as pa

from headgate.connectors.base import (
    KEPT,
    BreakingReader,
    Holding,
    SealedTransaction,
    SinkContext,
    SourceBatch,
    SourceContext,
    owner_of_split,
)
from headgate.connectors.hooks import CoordinatorHook
from headgate.connectors.induced import Polled
from headgate.connectors.stream_cuts import SegmentCuts, StreamCutHook
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Life, Mine, Owner
from headgate.model.manifest import Committable
from headgate.model.state_identity import Form
from headgate.model.targets import Target, TargetKind
from headgate.operators.types import canonical_schema, to_canonical
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.store.open_transaction import Transaction
from headgate.store.reader import SegmentReader
from headgate.store.schemas import schema_difference
from headgate.store.store import Store, store_root
from headgate.store.streams import StreamDefinition, StreamInfo, StreamReset, no_such_stream

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


@dataclass(frozen=True, slots=True)
class StreamSink:
    """Writes to a stream of the store, exactly once.

    Attributes:
        stream: its name.
        store: directory of the store; default as for ``StreamSource``.
        routing_key: column whose equal values stay in order; a stream that exists keeps its own.
        create: create the stream when it is missing, with ``segments`` segments.
    """

    stream: str
    store: str | None = None
    routing_key: str | None = None
    create: bool = True
    segments: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", store_root(self.store))

    def check(self, schema: pa.Schema) -> None:
        """Check that records of ``schema`` fit the stream, or, when it is missing, that it can be made. Writes nothing.

        Raises:
            UsageError: it is missing and not to be created, sealed, or differs; names the columns.
        """
        info = self._find()
        if info is not None:
            self._check_fits(info, schema)
        elif self.create:
            self._wanted(schema).checked()
        else:
            there = [stream.name for stream in self._streams()]
            raise no_such_stream(self.stream, str(self.store), there)

    def make_target(self, schema: pa.Schema) -> None:
        """See ``MakingSink``: create the stream when it is missing (SC7)."""
        if self.create and self._find() is None:
            wanted = self._wanted(schema)
            Store.shared(self.store).create_stream(
                wanted.name,
                wanted.schema,
                segments=wanted.segments_count,
                routing_key=wanted.routing_key,
                if_not_exists=True,
            )
        self.check(schema)

    def open(self, context: SinkContext) -> StreamSinkWriter:
        """Return the writer of one subtask."""
        return StreamSinkWriter(Store.shared(self.store), self.stream, context)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> StreamCommitter:
        """Return the committer of one generation."""
        return StreamCommitter(Store.shared(self.store), self.stream, node, owner_of(pipeline, node), generation)

    def owner(self, pipeline: str, node: str) -> Owner:
        """See ``OwnedSink``. A store that is not there knows nobody, and is not made by being asked (LV2)."""
        return Store.shared(self.store).owner(owner_of(pipeline, node)) if Store.exists(self.store) else Owner()

    def own(self, pipeline: str, node: str, life: Life) -> Owner:
        """See ``OwnedSink``."""
        return Store.shared(self.store).own(owner_of(pipeline, node), life)

    def how_to_forget(self, pipeline: str, node: str) -> str:
        """See ``OwnedSink``."""
        return f"headgate streams forget '{owner_of(pipeline, node)}' --store '{self.store}'"

    def recorded(self, node: str) -> Target:
        """See ``ResettableSink``."""
        return Target(
            node, TargetKind.STREAM, str(self.store), self.stream, self.create, self.segments, self.routing_key
        )

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``ResettableSink``. A store that is not there holds nothing, and is not made by being asked."""
        where = f"stream {self.stream} in {self.store}"
        if not Store.exists(self.store):
            return Holding("", where)
        contents = Store.shared(self.store).contents(self.stream, f"{pipeline}/", mine)
        if contents.is_shared:
            return Holding("", where, problem=f"{where} {_SHARED}")
        if contents.forgotten:
            return Holding("", where, problem=f"{where} {KEPT}")
        return Holding(f"{contents.events_count:,} events" if contents.ours else "", where)

    def start_over(self, pipeline: str, node: str, generation: Generation, life: Life, mine: Mine) -> None:
        """See ``ResettableSink``. A stream that ``make_target`` makes again is deleted: its columns may change."""
        if not Store.exists(self.store):
            return
        store, owner, of = Store.shared(self.store), owner_of(pipeline, node), f"{pipeline}/"
        made = (self.segments, self.routing_key) if self.create else None
        if not store.start_over(StreamReset(self.stream, owner, generation, life, of, mine, made)):
            raise UsageError(f"stream {self.stream} in {self.store} {_SHARED}")

    def _wanted(self, schema: pa.Schema) -> StreamDefinition:
        return StreamDefinition(self.stream, canonical_schema(schema), self.segments, self.routing_key)

    def _find(self) -> StreamInfo | None:
        return next((info for info in self._streams() if info.name == self.stream), None)

    def _streams(self) -> list[StreamInfo]:
        return Store.shared(self.store).list_streams() if Store.exists(self.store) else []

    def _check_fits(self, info: StreamInfo, schema: pa.Schema) -> None:
        if self.routing_key is not None and self.routing_key != info.routing_key:
            raise UsageError(
                f"stream '{self.stream}' has the routing key {info.routing_key!r}, not {self.routing_key!r}; "
                "leave routing_key out or write to another stream"
            )
        if info.is_sealed:
            raise UsageError(f"stream '{self.stream}' is sealed: it takes no more events; write to another stream")
        wanted, found = canonical_schema(info.schema), canonical_schema(schema)
        if set(wanted.names) == set(found.names):
            found = pa.schema([found.field(name) for name in wanted.names])  # columns are matched by name
        difference = schema_difference(wanted, found)
        if difference:
            raise UsageError(
                f"records do not fit stream '{self.stream}' in {self.store}: column {difference}; "
                "select or cast the columns before the sink, or write to another stream; a pipeline that shall start "
                "over with other columns is reset first (headgate reset)"
            )


_SHARED = (
    "also holds what others have written, and cannot be emptied for one of them; delete it if nobody needs it any more "
    "(headgate streams delete), or give the pipeline another stream or another name"
)


def owner_of(pipeline: str, node: str) -> str:
    """Return the owner of all transactions of one sink of one pipeline (K8)."""
    return f"{pipeline}/{node}"


def transaction_name(owner: str, checkpoint: CheckpointId, subtask_index: int, generation: Generation) -> str:
    """Return the identity of one subtask's output of one checkpoint (S15, K8)."""
    return f"{owner}/checkpoint-{checkpoint}/subtask-{subtask_index}/generation-{generation}"


_NAME = re.compile(r"(?P<owner>.*)/checkpoint-(?P<checkpoint>[0-9]+)/subtask-[0-9]+/generation-[0-9]+", re.DOTALL)


def checkpoint_of(name: str) -> CheckpointId | None:
    """Return the checkpoint of a ``transaction_name``; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else CheckpointId(int(match["checkpoint"]))


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """What a committable carries."""

    version: int
    stream: str
    name: str
    events_count: int


_PAYLOAD_VERSION = 1


class StreamSinkWriter:
    """Writes one subtask's records into the open transaction."""

    def __init__(self, store: Store, stream: str, context: SinkContext) -> None:
        """Use ``StreamSink.open``."""
        self._store = store
        self._stream = stream
        self._context = context
        self._owner = owner_of(context.pipeline, context.node)
        self._schema = store.describe(stream).schema
        self._current: Transaction | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records; begins the transaction with the first ones (SC3)."""
        if batch.num_rows == 0:
            return
        if self._current is None:
            self._current = self._store.begin(self._stream, owner=self._owner, epoch=self._context.generation)
        self._current.write(to_canonical(batch, self._schema))

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the transaction as the output of ``checkpoint``."""
        transaction, self._current = self._current, None
        if transaction is not None:
            context = self._context
            transaction.seal(transaction_name(self._owner, checkpoint, context.subtask_index, context.generation))
        return _Sealed(self._stream, transaction)

    def close(self) -> None:
        """Drop the open transaction; prepared ones stay (sinks.md, never abort what is pending)."""
        if self._current is not None:
            self._current.abort()
            self._current = None


class _Sealed:
    def __init__(self, stream: str, transaction: Transaction | None) -> None:
        self._stream = stream
        self._transaction = transaction

    def prepare(self) -> bytes | None:
        """See ``SealedTransaction.prepare``."""
        if self._transaction is None:
            return None  # K4, SC4
        self._transaction.prepare()
        count = self._transaction.events_count
        return msgspec.msgpack.encode(_Payload(_PAYLOAD_VERSION, self._stream, self._transaction.name, count))


class StreamCommitter:
    """Decides the transactions of one sink."""

    def __init__(self, store: Store, stream: str, node: str, owner: str, generation: Generation) -> None:
        """Use ``StreamSink.open_committer``."""
        self._store = store
        self._stream = stream
        self._node = node
        self._owner = owner
        self._generation = generation
        self._left_behind = ""

    def recover(self, keep: Sequence[Committable]) -> None:
        """Fence older generations, abort all but ``keep``, remove leftovers (S15, K6).

        Raises:
            FencedError: a newer generation exists.
        """
        names = {transaction_of(c) for c in keep if c.sink == self._node}
        left: list[StorageError] = []
        self._store.recover(self._stream, owner=self._owner, epoch=self._generation, keep=names, leave=left.append)
        self._left_behind = str(left[0]) if left else ""

    def left_behind(self) -> str:
        """See ``TidyingCommitter``."""
        return self._left_behind

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Commit in one catalogue transaction: readers see all of it or nothing (S14, SC5)."""
        for committable in committables:
            assert committable.checkpoint <= permit.checkpoint  # K1
        ordered = sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index))  # K2
        payloads = [_decode_payload(committable) for committable in ordered]
        names = [(payload.stream, payload.name) for payload in payloads]
        if names:
            self._store.commit_transactions(names, owner=self._owner, epoch=permit.generation)

    def forget(self, before: CheckpointId) -> None:
        """See ``ForgettingCommitter``."""
        decided = [x.name for x in self._store.list_transactions(owner=self._owner) if x.status.is_terminal]
        checkpoints = {name: checkpoint_of(name) for name in decided}
        names = [name for name, checkpoint in checkpoints.items() if checkpoint is not None and checkpoint < before]
        if names:
            self._store.forget_outcomes(names, owner=self._owner, epoch=self._generation)

    def close(self) -> None:
        """The store is shared by the process and stays open."""


def transaction_of(committable: Committable) -> str:
    """Return the name of the transaction that ``committable`` promises to commit.

    Raises:
        CorruptionError
    """
    return _decode_payload(committable).name


def _decode_payload(committable: Committable) -> _Payload:
    where = f"committable of sink '{committable.sink}' in checkpoint {committable.checkpoint}"
    try:
        payload = msgspec.msgpack.decode(committable.payload, type=_Payload)
    except msgspec.MsgspecError as error:
        raise CorruptionError(where, 0, "a stream transaction", str(error)) from error
    if payload.version != _PAYLOAD_VERSION:
        raise CorruptionError(where, 0, f"version {_PAYLOAD_VERSION}", f"{payload.version}")
    return payload


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
