"""A stream of the store as sink: its target and owner, its writer and its committer.

One transaction per checkpoint and subtask, named by its identity (K8), committed by the coordinator in one step
for all subtasks (S14). Never makes output visible before its checkpoint is completed. Source:
docs/spec/stream-store.md, docs/spec/starting-over.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from headgate.codec.arrow import unzoned_schema
from headgate.codec.decodable import decodable
from headgate.connectors.base import KEPT, Committer, Holding, SealedTransaction, Sink, SinkContext, SinkWriter
from headgate.connectors.event_progress import EventClock, event_time_of
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.config import check_switches
from headgate.model.ids import CheckpointId, Generation
from headgate.model.lineage import Location
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Mine, Owner, PipelineIdentity, Target, TargetKind
from headgate.operators.schemas import canonical_schema, carried
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.store.transactions import Status
from headgate.store.location import store_root
from headgate.store.store import Store
from headgate.store.streams import (
    Retention,
    RetentionPolicy,
    StreamDefinition,
    StreamInfo,
    StreamReset,
    check_takes,
    difference_by_name,
    newest_matching,
    no_such_stream,
    retention_policy_of,
)
from headgate.store.transactions import Transaction


def owner_of(pipeline: str, node: str) -> str:
    """Return the owner of all transactions of one sink of one pipeline (K8)."""
    return f"{pipeline}/{node}"


def transaction_name(owner: str, checkpoint: CheckpointId, subtask_index: int, generation: Generation) -> str:
    """Return the identity of one subtask's output of one checkpoint (K8)."""
    return f"{owner}/checkpoint-{checkpoint}/subtask-{subtask_index}/generation-{generation}"


_NAME = re.compile(r"(?P<owner>.*)/checkpoint-(?P<checkpoint>[0-9]+)/subtask-[0-9]+/generation-[0-9]+", re.DOTALL)


def checkpoint_of(name: str) -> CheckpointId | None:
    """Return the checkpoint of a ``transaction_name``; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else CheckpointId(int(match["checkpoint"]))


def written_as(schemas: Sequence[pa.Schema], schema: pa.Schema) -> int | None:
    """Return the newest of a stream's schemas that records of ``schema`` fit, by name; None: they fit none."""
    return newest_matching(schemas, lambda known: misfit(known, schema))


def misfit(known: pa.Schema, schema: pa.Schema) -> str:
    """Return by which columns records of ``schema`` do not fit a stream's, or "": zones are no difference."""
    return difference_by_name(*(unzoned_schema(canonical_schema(one)) for one in (known, schema)))


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """What a committable carries."""

    version: int
    stream: str
    name: str
    events_count: int
    event_ms: int | None
    is_awaited: bool
    parallelism: int


_PAYLOAD_VERSION = 2


class StreamSinkWriter(SinkWriter):
    """Writes one subtask's records into the open transaction."""

    def __init__(self, store: Store, stream: str, context: SinkContext) -> None:
        """Use ``StreamSink.open``."""
        self._store = store
        self._stream = stream
        self._context = context
        self._owner = owner_of(context.pipeline, context.node)
        schemas = store.schemas(stream)
        version = written_as(schemas, context.schema)
        self._schema = schemas[-1 if version is None else version]
        self._current: Transaction | None = None
        self._event_clock = EventClock(context)

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``SinkWriter``."""
        self._event_clock.on_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """See ``SinkWriter``."""
        self._event_clock.on_idle(is_idle)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records; begins the transaction with the first ones."""
        if batch.num_rows == 0:
            return
        if self._current is None:
            self._current = self._store.transactions.begin(
                self._stream, owner=self._owner, epoch=self._context.generation
            )
        self._current.write(carried(batch, self._schema, f"stream '{self._stream}'"))

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the transaction as the output of ``checkpoint``."""
        transaction, self._current = self._current, None
        if transaction is not None:
            context = self._context
            transaction.seal(transaction_name(self._owner, checkpoint, context.subtask_index, context.generation))
        # with event time as it is now, at the barrier; what follows belongs to the next checkpoint
        return _Sealed(self._stream, transaction, self._payload())

    def _payload(self) -> _Payload:
        """Return a payload without a transaction, with how far this subtask has come (S91)."""
        clock, parallelism = self._event_clock, self._context.parallelism
        return _Payload(_PAYLOAD_VERSION, self._stream, "", 0, clock.event_ms, clock.is_awaited, parallelism)

    def close(self) -> None:
        """Drop the open transaction; prepared ones stay (sinks.md, never abort what is pending)."""
        if self._current is not None:
            self._current.abort()
            self._current = None


class _Sealed(SealedTransaction):
    def __init__(self, stream: str, transaction: Transaction | None, empty: _Payload) -> None:
        self._stream = stream
        self._transaction = transaction
        self._empty = empty

    def prepare(self) -> bytes | None:
        if self._transaction is None:
            return None if self._empty.event_ms is None else msgspec.msgpack.encode(self._empty)
        self._transaction.prepare()
        found = msgspec.structs.replace(
            self._empty, name=self._transaction.name, events_count=self._transaction.events_count
        )
        return msgspec.msgpack.encode(found)


class StreamCommitter(Committer):
    """Decides the transactions of one sink."""

    knows_outcomes = True
    can_forget = True

    def __init__(self, store: Store, stream: str, node: str, owner: str, generation: Generation) -> None:
        """Use ``StreamSink.open_committer``."""
        self._store = store
        self._stream = stream
        self._node = node
        self._owner = owner
        self._generation = generation
        self._left_behind = ""
        self._noted: dict[str, int] = {}

    def recover(self, keep: Sequence[Committable]) -> None:
        """Fence older generations, abort all but ``keep``, remove leftovers.

        Raises:
            FencedError: a newer generation exists.
        """
        names = {transaction_of(c) for c in keep if c.sink == self._node}
        left: list[StorageError] = []
        self._store.transactions.recover(
            self._stream, owner=self._owner, epoch=self._generation, keep=names, leave=left.append
        )
        self._left_behind = str(left[0]) if left else ""

    def left_behind(self) -> str:
        return self._left_behind

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Commit in one catalogue transaction: readers see all of it or nothing (S14)."""
        for committable in committables:
            assert committable.checkpoint <= permit.checkpoint, "only completed checkpoints are committed (K1)"
        ordered = sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index))
        payloads = [_decode_payload(committable) for committable in ordered]
        names = [(payload.stream, payload.name) for payload in payloads if payload.name]
        times: dict[str, int] = {}
        for checkpoint in dict.fromkeys(committable.checkpoint for committable in ordered):
            of_one = [p for p, c in zip(payloads, ordered, strict=True) if c.checkpoint == checkpoint]
            if (event_ms := event_time_of(of_one)) is not None:
                times[of_one[0].stream] = event_ms
        # a checkpoint without output costs no transaction, unless event time has advanced
        if names or times != self._noted:
            self._store.commit_transactions(names, owner=self._owner, epoch=permit.generation, times=times)
            self._noted = times
            for stream in {stream for stream, _ in names}:
                self._store.look_after(stream)

    def denial(self, committable: Committable) -> str:
        name = transaction_of(committable)
        if not name:
            return ""
        found = {x.name: x.status for x in self._store.list_transactions(owner=self._owner, prefix=name)}.get(name)
        if found is None:
            return f"the store found no record of the transaction {name}"
        return f"the transaction {name} was aborted" if found is Status.ABORTED else ""

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        decided = [x.name for x in self._store.list_transactions(owner=self._owner) if x.status.is_terminal]
        checkpoints = {name: checkpoint_of(name) for name in decided}
        names = [name for name, checkpoint in checkpoints.items() if checkpoint is not None and checkpoint < before]
        if names:
            self._store.transactions.forget_outcomes(names, owner=self._owner, epoch=self._generation)

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
        payload = msgspec.msgpack.decode(committable.payload, type=decodable(_Payload))
    except msgspec.MsgspecError as error:
        raise CorruptionError(where, 0, "a stream transaction", str(error)) from error
    if payload.version != _PAYLOAD_VERSION:
        raise CorruptionError(where, 0, f"version {_PAYLOAD_VERSION}", f"{payload.version}")
    return payload


_SHARED = (
    "also holds what others have written, and cannot be emptied for one of them; delete it if it is no longer needed "
    "(headgate streams delete), or give the pipeline another stream or another name"
)


@dataclass(frozen=True, slots=True)
class StreamSink(Sink):
    """Writes records to a stream of the store, exactly once.

    ``routing_key``, ``segments`` and ``retention`` only apply to a stream that the sink creates. An existing stream
    keeps its own.

    Attributes:
        stream: the name of the stream.
        store: directory of the store; default as for ``StreamSource``.
        routing_key: the column of the routing key. Records with equal values in it stay in order.
        create: whether to create the stream if it does not exist.
        segments: the number of segments, which is also the number of subtasks that can read the stream at once.
        retention: how long events stay in the stream. None: until the stream is truncated or deleted.
            ``Store.set_retention`` and ``headgate streams retention`` change it later.
    """

    stream: str
    store: str | None = None
    routing_key: str | None = None
    create: bool = True
    segments: int = 4
    retention: Retention | None = None

    has_owner = True
    can_be_reset = True

    def __post_init__(self) -> None:
        check_switches("StreamSink: ", create=self.create)
        object.__setattr__(self, "store", store_root(self.store))
        retention_policy_of(self.retention)  # refused before anything runs

    def check(self, schema: pa.Schema) -> None:
        """Check that records of ``schema`` fit the stream, or that a missing stream can be created. Writes nothing.

        Raises:
            UsageError: the stream is missing and ``create`` is False, it is sealed, or its columns differ; the message
                names them.
        """
        info = self._find()
        if info is not None:
            self._check_fits(info, schema)
        elif self.create:
            self._wanted(schema).checked()
        elif Store.exists(self.store):
            Store.shared(self.store).find(self.stream)  # which says what there is
        else:
            raise no_such_stream(self.stream, str(self.store), ())

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: create the stream when it is missing."""
        if self.create and self._find() is None:
            wanted = self._wanted(schema)
            Store.shared(self.store).create_stream(
                wanted.name,
                wanted.schema,
                segments=wanted.segments_count,
                routing_key=wanted.routing_key,
                if_not_exists=True,
                retention=self.retention,
            )
        self.check(schema)

    def open(self, context: SinkContext) -> StreamSinkWriter:
        """Return the writer of one subtask."""
        return StreamSinkWriter(Store.shared(self.store), self.stream, context)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> StreamCommitter:
        """Return the committer of one generation."""
        return StreamCommitter(Store.shared(self.store), self.stream, node, owner_of(pipeline, node), generation)

    def owner(self, pipeline: str, node: str) -> Owner:
        """See ``Sink``. A missing store has no owner, and is not made by the question."""
        if not Store.exists(self.store):
            return Owner()
        return Store.shared(self.store).pipelines.owner(owner_of(pipeline, node), self.stream, f"{pipeline}/")

    def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
        return Store.shared(self.store).pipelines.own(owner_of(pipeline, node), life)

    def how_to_forget(self, pipeline: str, node: str) -> str:
        return f"headgate streams forget '{owner_of(pipeline, node)}' --store '{self.store}'"

    def locations(self) -> tuple[Location, ...]:
        store = str(self.store)
        real = store if "://" in store else os.path.realpath(store)
        return (Location(f"{store}#{self.stream}", f"{real}#{self.stream}"),)

    def recorded(self, node: str) -> Target:
        policy = retention_policy_of(self.retention) or RetentionPolicy()
        return Target(
            node,
            TargetKind.STREAM,
            str(self.store),
            self.stream,
            self.create,
            self.segments,
            self.routing_key,
            policy.age_ms,
            policy.size_bytes,
        )

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``Sink``. A store that is not there holds nothing, and is not made by being asked."""
        where = f"stream {self.stream} in {self.store}"
        if not Store.exists(self.store):
            return Holding("", where)
        contents = Store.shared(self.store).pipelines.contents(self.stream, f"{pipeline}/", mine)
        if contents.is_shared:
            return Holding("", where, problem=f"{where} {_SHARED}")
        if contents.forgotten:
            return Holding("", where, problem=f"{where} {KEPT}")
        return Holding(f"{contents.events_count:,} events" if contents.ours else "", where)

    def start_over(self, pipeline: str, node: str, generation: Generation, life: PipelineIdentity, mine: Mine) -> None:
        StreamsOfOneSink((self,)).start_over(pipeline, node, generation, life, mine)

    def _wanted(self, schema: pa.Schema) -> StreamDefinition:
        return StreamDefinition(self.stream, canonical_schema(schema), self.segments, self.routing_key)

    def _find(self) -> StreamInfo | None:
        """Return the stream, if it is there; others are not looked at, of which there may be many."""
        if not Store.exists(self.store):
            return None
        try:
            return Store.shared(self.store).find(self.stream)
        except UsageError:
            return None

    def _check_fits(self, info: StreamInfo, schema: pa.Schema) -> None:
        check_takes(info, self.routing_key)
        schemas = Store.shared(self.store).schemas(info.name)
        if written_as(schemas, schema) is None:
            difference = misfit(info.schema, schema)
            raise UsageError(
                f"records do not fit stream '{self.stream}' in {self.store}: column {difference}; "
                "select or cast the columns before the sink, or write to another stream; a pipeline that shall start "
                "over with other columns is reset first (headgate reset)"
            )


@dataclass(frozen=True, slots=True)
class StreamsOfOneSink:
    """All streams of one store that a sink has written to: they have one owner, and are emptied in one step.

    Attributes:
        sinks: the sink in front of each of them.
    """

    sinks: tuple[StreamSink, ...]

    def start_over(self, pipeline: str, node: str, generation: Generation, life: PipelineIdentity, mine: Mine) -> None:
        """See ``Sink``. A stream that ``make_target`` makes again is deleted: its columns may change."""
        root = self.sinks[0].store
        if not Store.exists(root):
            return
        made = {
            sink.stream: (sink.segments, sink.routing_key, retention_policy_of(sink.retention)) if sink.create else None
            for sink in self.sinks
        }
        owner, of = owner_of(pipeline, node), f"{pipeline}/"
        shared = Store.shared(root).pipelines.start_over(StreamReset(made, owner, generation, life, of), mine)
        if shared is not None:
            raise UsageError(f"stream {shared} in {root} {_SHARED}")
