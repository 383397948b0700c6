"""A stream of Pravega as sink: one transaction per subtask and checkpoint, committed by the driver by its id.

The wire protocol acknowledges each block of a transaction's events, so that all are durable before the transaction
counts as prepared. Source: the rules PV of docs/spec/connectors.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.decodable import decodable
from headgate.connectors.base import (
    Committer,
    EmptyTransaction,
    Holding,
    SealedTransaction,
    SinkContext,
    SinkWriter,
)
from headgate.connectors.event_progress import EventClock, event_time_of
from headgate.connectors.fenced_sink import Fence, FencedSink, in_order, owner_of, with_stored_life
from headgate.connectors.kafka.outgoing_records import RecordColumns
from headgate.connectors.pravega.controller import (
    NO_SECURITY,
    Controller,
    PravegaSecurity,
    StreamName,
    TransactionState,
    require_grpc,
)
from headgate.connectors.pravega.events import EVENT_BYTES_MAX, HEADER_BYTES, frame, key_places
from headgate.connectors.pravega.segment_store import Access, Appender, Appending, Place, SegmentError, tail
from headgate.connectors.pravega.stream_log import StreamOwner
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError, gone
from headgate.model.config import Duration, duration_ms
from headgate.model.ids import CheckpointId, Generation
from headgate.model.lineage import Location
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Mine
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.watermarks import WATERMARK_MIN_MS

LEASE_MS_MIN, LEASE_MS_MAX = 10_000, 600_000
"""The leases that controllers allow by default (``controller.transaction.lease.count.max``)."""

PINGS = 4
"""So often a lease is renewed before it would end."""

BLOCK_BYTES = 1 << 20

COMMIT_S = 60.0
"""How long a commit may take until the driver tries it again."""

LOOK_S = 0.02
"""Between two looks whether a commit is done."""

_PAYLOAD_VERSION = 2


class Prepared(msgspec.Struct, frozen=True):
    """What a committable carries: a transaction, and how far its subtask has come in event time (S91).

    Attributes:
        id: of the transaction; "": the subtask had no records.
        has_ended: nothing will follow.
    """

    stream: str
    id: str
    events_count: int
    event_ms: int | None
    is_awaited: bool
    has_ended: bool
    parallelism: int
    version: int = _PAYLOAD_VERSION


def prepared_in(committable: Committable) -> Prepared:
    """Return what ``committable`` promises to commit.

    Raises:
        CorruptionError
    """
    where = f"committable of sink '{committable.sink}' for checkpoint {committable.checkpoint}"
    try:
        found = msgspec.json.decode(committable.payload, type=decodable(Prepared))
        if found.id:
            UUID(found.id)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise CorruptionError(where, 0, "a transaction of Pravega", str(error)) from error
    if found.version != _PAYLOAD_VERSION:
        raise CorruptionError(where, 0, f"version {_PAYLOAD_VERSION}", f"{found.version}")
    return found


@dataclass(frozen=True, kw_only=True)
class PravegaSink(FencedSink):
    """Writes records to a stream of Pravega, exactly once.

    Every subtask writes the records of a checkpoint in a transaction of Pravega. When the checkpoint is taken, Pravega
    has acknowledged all of them; when it is completed, the driver commits the transaction, and any later driver can.
    Pravega aborts a transaction that was not committed within ``transaction_timeout`` after its process ended: a
    pipeline that was down for longer stops, and says what was lost. Needs the package grpcio:
    ``pip install 'headgate-streams[pravega]'``.

    Attributes:
        controller: ``"host:port"`` of the controller.
        stream: scope and name of the stream, such as ``"shop/orders"``.
        key: the text column with the routing key. Records of one key stay in order. None, or null: all records of a
            transaction without a key stay in order.
        value: the column with the event, binary or text, as it is. None: the event is the whole record as JSON.
        transaction_timeout: the lease of transactions, at most what the controller allows, 10 minutes by default. It
            must exceed the longest time for which the pipeline may be down.
        create: create the stream, and its scope, with so many segments if it is missing. 0: it must exist.
        security: TLS and login, if Pravega demands them.
    """

    controller: str = field(kw_only=False)
    stream: str = field(kw_only=False)
    key: str | None = None
    value: str | None = None
    transaction_timeout: Duration | None = "10m"
    create: int = 0
    security: PravegaSecurity = NO_SECURITY

    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT
    renews_transactions: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        StreamName.parse(self.stream)
        if self.create < 0:
            raise UsageError(f"PravegaSink(create={self.create}) must be a number of segments, or 0")
        if not self.lease_ms >= LEASE_MS_MIN:
            raise UsageError(f"PravegaSink(transaction_timeout=) must be at least {LEASE_MS_MIN} ms")
        require_grpc()

    @property
    def lease_ms(self) -> int:
        """The lease of transactions."""
        if self.transaction_timeout is None:
            return LEASE_MS_MAX
        return duration_ms(self.transaction_timeout, "PravegaSink(transaction_timeout=)")

    @property
    def name(self) -> StreamName:
        """The stream."""
        return StreamName.parse(self.stream)

    @property
    def columns(self) -> RecordColumns:
        """Which columns become what."""
        return RecordColumns(self.value or "", self.key or "", sink="PravegaSink")

    def client(self) -> Controller:
        """Return a client of the controller."""
        return Controller(self.controller, self.security)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink``: also that the controller is there, has the stream, and allows the lease."""
        self.columns.check(schema)
        if self.key is not None and not pa.types.is_large_string(schema.field(self.key).type):
            raise UsageError(
                f"PravegaSink(key={self.key!r}) names a column of type {schema.field(self.key).type}, and routing keys "
                "of Pravega are text; cast it"
            )
        with self._connected() as client:
            if not self.create:
                self._check_stream(client)

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: create the stream when it is missing."""
        with self._connected() as client:
            self._find_or_create(client)

    def open(self, context: SinkContext) -> SinkWriter:
        """See ``Sink``."""
        return PravegaWriter(self, context)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """See ``Sink``."""
        return PravegaCommitter(self, Fence(owner_of(pipeline, node), int(generation)))

    def locations(self) -> tuple[Location, ...]:
        """See ``Sink``. Without the controller's address, which may change."""
        name = f"pravega:{self.stream}"
        return (Location(name, name),)

    # -- the owner of the stream ------------------------------------------------------------------------------------

    def claim(self, fence: Fence) -> None:
        """See ``FencedSink``."""
        with self._owner() as owner:
            owner.claim(fence)

    def claimed(self, owner: str) -> Fence | None:
        """See ``FencedSink``."""
        with self._owner() as known:
            return known.fence(owner)

    def all_claimed(self) -> Iterable[Fence]:
        """See ``FencedSink``."""
        with self._owner() as owner:
            return owner.fences()

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``Sink``. Events cannot be removed from a stream one by one."""
        where, known = f"stream {self.stream} of Pravega at {self.controller}", self.owner(pipeline, node)
        if known.is_unknown or known.is_forgotten:
            return Holding("", where)
        problem = f"{where} keeps what was written to it; truncate it if that is no longer needed, or leave it as it is"
        return Holding("all its output", where, problem=problem)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Controller]:
        client = self.client()
        try:
            yield client
        finally:
            client.close()

    @contextlib.contextmanager
    def _owner(self) -> Iterator[StreamOwner]:
        with self._connected() as client:
            owner = StreamOwner(client, self.name, self.environment)
            try:
                yield owner
            finally:
                owner.close()

    def _check_stream(self, client: Controller) -> None:
        if not client.exists(self.name):
            raise UsageError(
                f"Pravega at {self.controller} has no stream '{self.stream}'; create it, or give create=4 for one with "
                "4 segments"
            )

    def _find_or_create(self, client: Controller) -> None:
        if self.create and not client.exists(self.name):
            client.create_scope(self.name.scope)
            client.create_stream(self.name, self.create)
        self._check_stream(client)


class _Transaction:
    """An open transaction: its writers of segments."""

    def __init__(self, writer: PravegaWriter, sink: PravegaSink, client: Controller) -> None:
        opened = client.open_transaction(sink.name, sink.lease_ms)
        self.id, self._writer, self._sink = opened.id, writer, sink
        self._ranges = sorted(opened.ranges, key=lambda one: one.low)
        self._lows = np.array([one.low for one in self._ranges])
        self._writing: dict[int, tuple[Appender, Appending]] = {}
        self._own_place = float(key_places([str(opened.id)])[0])
        self.events_count = 0

    def write(self, values: pa.Array, keys: pa.Array | None) -> None:
        """Write events to the segments of their keys."""
        self.events_count += len(values)
        if keys is None:
            places = np.full(len(values), self._own_place)
        else:
            coded = pc.dictionary_encode(keys)
            # the last place is that of events without a key: they stay together
            of_keys = np.append(key_places(coded.dictionary.to_pylist()), self._own_place)
            places = of_keys[pc.fill_null(coded.indices, len(of_keys) - 1).to_numpy(zero_copy_only=False)]
        chosen = np.searchsorted(self._lows, places, side="right") - 1
        for at in np.unique(chosen):
            rows = np.flatnonzero(chosen == at)
            self._append(int(at), values if len(rows) == len(values) else values.take(pa.array(rows)))

    def _append(self, at: int, values: pa.Array) -> None:
        segment = self._ranges[at].segment
        if segment not in self._writing:
            appender = self._writer.appender(segment)
            self._writing[segment] = appender, appender.begin(self._sink.name.transaction_segment(segment, self.id))
        appender, writing = self._writing[segment]
        data, ends = frame(values)
        for begin, end in blocks(ends):
            block = memoryview(data)[ends[begin] : ends[end]]
            appender.append(writing, block, end - begin)

    def flush(self) -> None:
        """Wait until all events are durable."""
        for appender, writing in self._writing.values():
            appender.flush(writing)

    def end(self) -> None:
        """Forget the writers."""
        for appender, writing in self._writing.values():
            appender.end(writing)


def blocks(ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of events that are no longer than a block, or a single event.

    Raises:
        UsageError: an event is longer than Pravega takes.
    """
    longest = int(np.max(np.diff(ends), initial=0))
    if longest > EVENT_BYTES_MAX:
        raise UsageError(
            f"an event of {longest - HEADER_BYTES:,} bytes is too long for Pravega, which takes "
            f"{EVENT_BYTES_MAX - HEADER_BYTES:,}; write smaller ones"
        )
    begin, count = 0, len(ends) - 1
    while begin < count:
        end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + BLOCK_BYTES, side="right")) - 1)
        yield begin, end
        begin = end


class PravegaWriter(SinkWriter):
    """Writes transactions that checkpoints prepare."""

    def __init__(self, sink: PravegaSink, context: SinkContext) -> None:
        """Use ``PravegaSink.open``."""
        self._sink, self._client, self._parallelism = sink, sink.client(), context.parallelism
        self._fence = Fence(owner_of(context.pipeline, context.node), int(context.generation))
        self._event_clock = EventClock(context)
        self._owner = StreamOwner(self._client, sink.name, sink.environment)
        self._access = Access(self._client, sink.name, sink.environment)
        self._appenders: dict[Place, Appender] = {}
        self._places: dict[int, Place] = {}
        self._open: _Transaction | None = None
        self._pinger = _Pinger(sink, self._client)

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``SinkWriter``."""
        self._event_clock.on_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """See ``SinkWriter``."""
        self._event_clock.on_idle(is_idle)

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``."""
        if batch.num_rows == 0:
            return
        columns = self._sink.columns
        values = columns.values_of(batch)
        if values.null_count:
            raise UsageError(
                f"column '{self._sink.value}' is null in a record, and an event of Pravega needs a value; filter such "
                "records out before the sink"
            )
        keys = batch.column(self._sink.key) if self._sink.key else None
        if self._open is None:
            self._open = self._begin()
        with self._telling_timeouts(self._open):
            self._open.write(values, keys)

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """See ``SinkWriter``. It waits for Pravega, because what follows is written over the same connections."""
        clock = self._event_clock
        transaction, events_count = "", 0
        if self._open is not None:
            with self._telling_timeouts(self._open):
                self._open.flush()
            self._open.end()
            transaction, events_count = str(self._open.id), self._open.events_count
            self._open = None
        elif clock.event_ms is None:
            return EmptyTransaction()
        what = Prepared(
            self._sink.stream, transaction, events_count, clock.event_ms, clock.is_awaited, clock.has_ended,
            self._parallelism,
        )  # fmt: skip
        return _Sealed(msgspec.json.encode(what))

    def close(self) -> None:
        """See ``SinkWriter``: abort what is open. What was prepared keeps its lease."""
        self._pinger.close()
        if self._open is not None:
            with contextlib.suppress(HeadgateError):
                self._client.abort(self._sink.name, self._open.id)
                # only after the abort: what is not noted any more is not looked for
                self._owner.decided(self._fence.owner, {}, [str(self._open.id)])
            self._open = None
        for appender in self._appenders.values():
            appender.close()
        self._owner.close()
        self._client.close()

    def appender(self, segment: int) -> Appender:
        """Return what appends to the store that has a segment."""
        if segment not in self._places:
            self._places[segment] = self._client.place(self._sink.name, segment)
        place = self._places[segment]
        if place not in self._appenders:
            self._appenders[place] = Appender(place, self._access)
        return self._appenders[place]

    def _begin(self) -> _Transaction:
        opened = _Transaction(self, self._sink, self._client)
        # noted before its first event; what a crash leaves between these two lines is empty, and ends with its lease
        self._owner.opened(self._fence, str(opened.id))
        self._pinger.keep(opened.id)
        return opened

    @contextlib.contextmanager
    def _telling_timeouts(self, transaction: _Transaction) -> Iterator[None]:
        """Tell a transaction that Pravega aborted, because its lease ended, from one of a replaced writer."""
        try:
            yield
        except SegmentError as error:
            self._owner.refuse_if_replaced(self._fence)
            why = (
                f"transaction {transaction.id} was aborted or is gone ({error}): its lease of {self._sink.lease_ms} ms "
                "ended, or something else aborted it"
            )
            raise StorageError(
                "write to", f"stream '{self._sink.stream}' of Pravega", why, is_transient=False
            ) from error


class _Sealed(SealedTransaction):
    """A transaction whose events are durable."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def prepare(self) -> bytes:
        """See ``SealedTransaction``."""
        return self._payload


class _Pinger:
    """Keeps transactions open until they are decided."""

    def __init__(self, sink: PravegaSink, client: Controller) -> None:
        self._sink, self._client = sink, client
        self._changed = sink.environment.condition()
        self._kept: set[UUID] = set()
        self._is_closed = False
        self._thread = sink.environment.thread(self._run, "pravega-ping")

    def keep(self, transaction: UUID) -> None:
        """Keep a transaction open."""
        with self._changed:
            self._kept.add(transaction)
            if not self._thread.is_alive():
                self._thread.start()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(1)  # it may be waiting for the controller; it ends by itself

    def _run(self) -> None:
        pause_s = self._sink.lease_ms / 1000 / PINGS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, pause_s)
                if self._is_closed:
                    return
                # a copy: the mailbox adds to it while the controller is asked
                kept = set(self._kept)
            for transaction in kept:
                try:
                    is_open = self._client.ping(self._sink.name, transaction, self._sink.lease_ms)
                except (StorageError, UsageError, ValueError):
                    continue  # the next round tries again; ValueError: the channel was closed
                if not is_open:
                    with self._changed:
                        self._kept.discard(transaction)


class PravegaCommitter(Committer):
    """Decides the transactions of one sink, in the driver."""

    knows_outcomes = True
    can_forget = True

    def __init__(self, sink: PravegaSink, fence: Fence) -> None:
        """Use ``PravegaSink.open_committer``."""
        self._sink, self._fence, self._client = sink, fence, sink.client()
        self._owner = StreamOwner(self._client, sink.name, sink.environment)
        self._noted_ms: int | None = None

    def recover(self, keep: Sequence[Committable]) -> None:
        """Claim the stream, then abort every transaction of this and older generations, but those of ``keep``.

        Writers look at the claim after they noted a transaction, so none that is replaced goes on with one that is not
        known here.
        """
        # a fence without the life that is stored would erase the owner
        self._fence = with_stored_life(self._sink, self._fence)
        self._owner.claim(self._fence)
        kept = {prepared_in(one).id for one in keep}
        known = self._owner.known(self._fence.owner)
        left = [one for one, at in known.opened.items() if one not in kept and at <= self._fence.generation]
        for one in left:
            self._client.abort(self._sink.name, UUID(one))
        for one in left:
            self._wait_until(UUID(one), lambda state: state is not TransactionState.OPEN)
        # last: cut short before, the next recovery finds and aborts them again
        self._owner.decided(self._fence.owner, {}, left)

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """See ``Committer``. Pravega cannot show several transactions in one step: oldest checkpoints first."""
        ordered = in_order(permit, committables)
        if not ordered:
            return
        self._owner.refuse_if_replaced(self._fence)
        known = self._owner.known(self._fence.owner)
        for checkpoint in dict.fromkeys(one.checkpoint for one in ordered):
            wanted = {
                what.id: one
                for one in ordered
                if one.checkpoint == checkpoint and (what := prepared_in(one)).id and what.id not in known.committed
            }
            for one in wanted:
                self._client.commit(self._sink.name, UUID(one))
            # all were asked for before the first is waited for, because Pravega takes a while for each
            for one, committable in wanted.items():
                state = self._wait_until(
                    UUID(one), lambda state: state not in (TransactionState.OPEN, TransactionState.COMMITTING)
                )
                if state is not TransactionState.COMMITTED:
                    why = self._why_not(state, prepared_in(committable))
                    raise gone(UsageError(f"output of checkpoint {checkpoint} cannot be committed: {why}"))
            # after each checkpoint: Pravega forgets what it committed, and a repeated commit must not ask it again
            self._owner.decided(self._fence.owner, dict.fromkeys(wanted, int(checkpoint)))
        newest = ordered[-1].checkpoint
        self._note_time([prepared_in(one) for one in ordered if one.checkpoint == newest])

    def _note_time(self, prepared: Sequence[Prepared]) -> None:
        """Note how far the sink has come with what is in the stream by now (PV12). May be repeated."""
        event_ms, stream = event_time_of(prepared), self._sink.name
        if event_ms is None or event_ms == WATERMARK_MIN_MS:
            return
        writer = f"headgate-{sha256(self._fence.owner.encode()).hexdigest()[:16]}"
        if event_ms != self._noted_ms:
            cut = tail(self._client, stream, self._sink.environment)
            self._client.note_time(stream, writer, cut, event_ms + 1)
            self._noted_ms = event_ms
        if all(one.has_ended for one in prepared):
            self._client.forget_time(stream, writer)

    def denial(self, committable: Committable) -> str:
        """See ``Committer``."""
        what = prepared_in(committable)
        if not what.id or what.id in self._owner.known(self._fence.owner).committed:
            return ""
        state = self._client.state(self._sink.name, UUID(what.id))
        good = (TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.COMMITTED)
        return "" if state in good else self._why_not(state, what)

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        """See ``Committer``."""
        self._owner.forget(self._fence.owner, int(before), (prepared_in(one).id for one in promised()))

    def close(self) -> None:
        """See ``Committer``."""
        self._owner.close()
        self._client.close()

    def _wait_until(self, transaction: UUID, is_so: Callable[[TransactionState], bool]) -> TransactionState:
        environment = self._sink.environment
        deadline_ms = environment.monotonic_ms() + COMMIT_S * 1000
        while not is_so(state := self._client.state(self._sink.name, transaction)):
            if environment.monotonic_ms() >= deadline_ms:
                name = state.name.lower()
                raise StorageError(
                    "decide", f"transaction {transaction} of Pravega", f"it has been {name} for {COMMIT_S} s"
                )
            environment.sleep(LOOK_S)
        return state

    def _why_not(self, state: TransactionState, what: Prepared) -> str:
        count = f"{what.events_count:,} events for stream '{what.stream}'"
        if state is TransactionState.UNKNOWN:
            return (
                f"Pravega does not know any more whether {count} were committed: it has forgotten transaction "
                f"{what.id}, or is another cluster"
            )
        return (
            f"{count} are lost: Pravega aborted transaction {what.id}, most likely because it waited for its commit "
            f"longer than its lease of {self._sink.lease_ms} ms; keep outages shorter, or give the sink a longer "
            "transaction_timeout, and the controller a longer controller.transaction.lease.count.max"
        )
