"""A stream of the embedded store as sink: what it writes to, what must fit, and whose it is.

Counterparts: ``transactions``, which writes and commits; ``headgate.store.store.Store``. Source: rules SC3 to SC8 of
docs/spec/stream-store.md, SO1 of docs/spec/starting-over.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa

from headgate.connectors.base import SinkContext
from headgate.connectors.owned_sinks import KEPT, Holding
from headgate.connectors.streams.transactions import StreamCommitter, StreamSinkWriter, misfit, owner_of, written_as
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.model.life import Life, Mine, Owner
from headgate.model.lineage import Location
from headgate.model.targets import Target, TargetKind
from headgate.operators.types import canonical_schema
from headgate.store.retention import Retention, RetentionPolicy, policy_of
from headgate.store.store import Store, store_root
from headgate.store.streams import StreamDefinition, StreamInfo, StreamReset, check_takes, no_such_stream

_SHARED = (
    "also holds what others have written, and cannot be emptied for one of them; delete it if it is no longer needed "
    "(headgate streams delete), or give the pipeline another stream or another name"
)


@dataclass(frozen=True, slots=True)
class StreamSink:
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", store_root(self.store))
        policy_of(self.retention)  # SC8: refused before anything runs

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

    def make_target(self, schema: pa.Schema) -> None:  # SC7
        """See ``MakingSink``: create the stream when it is missing."""
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

    def owner(self, pipeline: str, node: str) -> Owner:  # LV2
        """See ``OwnedSink``. A store that is not there knows nobody, and is not made by being asked."""
        if not Store.exists(self.store):
            return Owner()
        return Store.shared(self.store).owner(owner_of(pipeline, node), self.stream, f"{pipeline}/")

    def own(self, pipeline: str, node: str, life: Life) -> Owner:
        """See ``OwnedSink``."""
        return Store.shared(self.store).own(owner_of(pipeline, node), life)

    def how_to_forget(self, pipeline: str, node: str) -> str:
        """See ``OwnedSink``."""
        return f"headgate streams forget '{owner_of(pipeline, node)}' --store '{self.store}'"

    def locations(self) -> tuple[Location, ...]:
        """See ``LocatedConnector``."""
        store = str(self.store)
        real = store if "://" in store else os.path.realpath(store)
        return (Location(f"{store}#{self.stream}", f"{real}#{self.stream}"),)

    def recorded(self, node: str) -> Target:
        """See ``ResettableSink``."""
        policy = policy_of(self.retention) or RetentionPolicy()
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
        """See ``ResettableSink``."""
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
    """All streams of one store that a sink has written to: they have one owner, and are emptied in one step (SO6).

    Attributes:
        sinks: the sink in front of each of them.
    """

    sinks: tuple[StreamSink, ...]

    def start_over(self, pipeline: str, node: str, generation: Generation, life: Life, mine: Mine) -> None:
        """See ``ResettableSink``. A stream that ``make_target`` makes again is deleted: its columns may change."""
        root = self.sinks[0].store
        if not Store.exists(root):
            return
        made = {
            sink.stream: (sink.segments, sink.routing_key, policy_of(sink.retention)) if sink.create else None
            for sink in self.sinks
        }
        owner, of = owner_of(pipeline, node), f"{pipeline}/"
        shared = Store.shared(root).start_over(StreamReset(made, owner, generation, life, of, mine))
        if shared is not None:
            raise UsageError(f"stream {shared} in {root} {_SHARED}")
