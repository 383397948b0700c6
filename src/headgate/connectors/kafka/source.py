"""Topics of Kafka as a source: one split per partition, whose position is the offset of the next record.

A position also has the id of its topic, so that a topic that was deleted and created again is noticed, and the offset
at which a bounded reading ends. A partition that vanishes keeps its position. Subtasks own partitions by a rule, so
that each of them finds new ones for itself. A thread of each subtask fetches and decodes; ``poll`` takes what is there.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import ClassVar, TypeAlias
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.decodable import decodable
from headgate.codec.kafka.messages import EARLIEST as FIRST_OFFSET
from headgate.codec.kafka.messages import LATEST as LAST_OFFSET
from headgate.codec.kafka.messages import READ_UNCOMMITTED
from headgate.codec.kafka.record_batch import NO_EPOCH, checksum
from headgate.connectors.base import FailStopReader, Source, SourceBatch, SourceContext, SplitPosition, owner_of_split
from headgate.connectors.kafka.client import PATIENCE_MS, KafkaClient, Topic, addresses
from headgate.connectors.kafka.connection import NO_SECURITY, KafkaSecurity
from headgate.connectors.kafka.fetcher import Fetched, Fetcher, Partition
from headgate.connectors.kafka.formats import (
    DROP,
    OF_AVRO,
    PLAIN,
    RAW,
    REFUSE,
    Metadata,
    RecordDecoder,
    RecordFormat,
    record_format,
)
from headgate.connectors.kafka.schemas.schema_registry import RegistryClient, SchemaRegistry
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment, ThreadEnded
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.lineage import Location
from headgate.model.state_schema import Form
from headgate.operators.checkpoint_listeners import CheckpointedFunction, CheckpointListener, SnapshotContext
from headgate.operators.schemas import SchemaLike

EARLIEST, LATEST, COMMITTED = "earliest", "latest", "committed"

Offsets: TypeAlias = Mapping[Partition, int] | tuple[tuple[Partition, int], ...]
Place: TypeAlias = str | datetime | Offsets
"""Where reading begins or ends: a word, a moment, or an offset for each (topic, partition)."""

DELIVERIES_AHEAD = 2
"""Decoded batches that wait to be polled: more of them leave the caches."""

CLOSE_PATIENCE_MS = 2_000
"""How long a reader that ends tries to commit to the group what its last checkpoint has."""

FETCH_WAIT_MS = 200
"""How long the thread may take to notice that it is to end, or to commit."""

WAKEUP_MS = 5

LOOK_MS = 10_000
"""How long a program may wait for brokers and the registry while it is built."""

_EPOCH, _MILLISECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)

_POSITION_VERSION = 1


class Position(msgspec.Struct, frozen=True):
    """A position as checkpoints store it.

    Attributes:
        topic: the id of the topic.
        offset: of the next record.
        end: where a bounded reading ends; None: it does not.
        epoch: of the leader that wrote what was read last, by which a log that was cut back is noticed; ``NO_EPOCH``:
            not known.
    """

    topic: str
    offset: int
    end: int | None = None
    epoch: int = NO_EPOCH
    version: int = _POSITION_VERSION

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, split: str, data: bytes) -> Position:
        """Return the position of a split.

        Raises:
            CorruptionError
        """
        try:
            found = msgspec.json.decode(data, type=decodable(cls))
            UUID(found.topic)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise CorruptionError(f"position of split '{split}'", 0, "topic id and offset", str(error)) from error
        if found.version != _POSITION_VERSION:
            problem = f"version {found.version}"
            raise CorruptionError(f"position of split '{split}'", 0, f"version {_POSITION_VERSION}", problem)
        return found


def split_name(partition: Partition) -> str:
    """Return the name of a partition's split."""
    return f"{partition[0]}/{partition[1]}"


def partition_of(split: str) -> Partition:
    """Return the partition of a split."""
    topic, _, number = split.rpartition("/")
    return topic, int(number)


class Kafka(Source):
    """Reads topics of Kafka: the records of committed transactions, and those outside of transactions.

    ``Kafka("localhost:9092", "orders", format="json", schema={"customer": str, "amount": int})`` reads a topic of JSON.
    Each partition has event time of its own. A record that cannot be decoded is a bad record. Needs the package crc32c:
    ``pip install 'headgate-streams[kafka]'``.
    """

    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT

    def __init__(
        self,
        brokers: str,
        topics: str | Sequence[str] = (),
        *,
        pattern: str = "",
        format: str = RAW,
        schema: SchemaLike | str | type | None = None,
        registry: SchemaRegistry | str | None = None,
        required: Sequence[str] = (),
        separator: str = ",",
        metadata: Metadata | None = None,
        tombstones: str = DROP,
        fine_times: str = REFUSE,
        upsert: str | Sequence[str] = (),
        key_format: str = PLAIN,
        start: Place = EARLIEST,
        end: Place | None = None,
        group: str = "",
        security: KafkaSecurity = NO_SECURITY,
        discovery_interval: Duration = "30s",
    ) -> None:
        """Configure.

        Args:
            brokers: ``"host:port"`` of some brokers of the cluster, separated by commas.
            topics: the name of a topic, or names.
            pattern: a regular expression; topics with names that it matches as a whole are read, also those that are
                created later. Give ``topics`` or ``pattern``.
            format: what values are: ``"raw"`` (a column ``value`` of bytes), ``"text"`` (a column ``value`` of text),
                ``"json"`` (an object with the fields of ``schema``), ``"csv"`` (one row with the fields of
                ``schema`` in their order, without a header), ``"avro"``, ``"protobuf"``, or ``"debezium-json"``
                and ``"debezium-avro"`` (changes of rows with the fields of ``schema``, with a column ``op``).
            schema: for JSON and CSV, an Arrow or Polars schema, or a dict from names to Python, Polars or Arrow types.
                Arrow fields that are not nullable are required. For Avro, the reader's schema as JSON text; without
                one, the newest in the registry when the program starts. For ``"debezium-avro"`` it is that of the row
                or of the envelope. For Protobuf, the message: a generated class.
            registry: the URL of the schema registry that has the schemas of values of Avro, or a ``SchemaRegistry``.
                None: all values have the schema ``schema``, and no id. With JSON and Protobuf it says that values have
                ids, and is not asked.
            required: further fields of JSON that must be present and not null.
            separator: the character between the fields of CSV.
            metadata: columns beside those of the value, of ``"key"``, ``"timestamp"``, ``"topic"``, ``"partition"``,
                ``"offset"`` and ``"headers"``; or a dict from names of columns to these. Default: none, and with
                ``"raw"`` all but the headers.
            tombstones: what becomes of records whose value is null: ``"drop"``, or ``"keep"`` for a row in which all
                columns of the value are null. With ``"raw"`` they are always kept.
            fine_times: what becomes of values of Avro and Protobuf with a time that has a part of a microsecond, which
                no column can hold: ``"refuse"`` makes them bad records, ``"cut"`` leaves that part out.
            upsert: the fields that are the key of the records: each record sets the row of its key, and one without a
                value deletes it. There is a column ``op`` with ``"update_after"`` and ``"delete"``; go on with
                ``.records_as_changes(...)``. One field of text or bytes is the key as it is; otherwise the key is a
                JSON object of the fields. A value in which one of the fields is null is a bad record.
            key_format: ``"avro"`` if the keys of ``upsert`` are Avro with ids of the registry, as Kafka Connect writes
                them: a record with the fields, or the only field by itself. ``"plain"``: as ``upsert`` says.
            start: where the first start begins: ``"earliest"``, ``"latest"``, ``"committed"`` (the offsets of
                ``group``, and the earliest where it has none), a datetime with a time zone, or an offset for each
                partition such as ``{("orders", 0): 1200}``. Partitions that are found later are read from their
                beginning.
            end: where reading ends: ``"latest"`` as it is at the first start, a datetime, or an offset for each
                partition, which is waited for if the partition does not go as far yet. None: it never ends.
            group: a consumer group to which offsets are committed after each checkpoint, for monitoring. Reading never
                depends on it after the first start.
            security: TLS and login.
            discovery_interval: how often new partitions and topics are looked for.

        Raises:
            UsageError: options contradict each other, or the package is not installed.
        """
        checksum(b"")
        self.brokers, self.pattern, self.group, self.security = brokers, pattern, group, security
        self.topics = tuple(dict.fromkeys((topics,) if isinstance(topics, str) and topics else tuple(topics)))
        if bool(self.topics) == bool(pattern):
            raise UsageError("a Kafka source needs topics=... or pattern=..., one of them")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"pattern {pattern!r} of a Kafka source is no regular expression: {error}") from error
        self.start, self.end = _checked_place("start", start), None if end is None else _checked_place("end", end)
        if self.start == COMMITTED and not group:
            raise UsageError("start='committed' of a Kafka source needs group='...', whose offsets it begins at")
        self.discovery_ms = duration_ms(discovery_interval, "discovery_interval")
        self._format = record_format(
            format,
            schema,
            registry,
            required,
            separator,
            metadata,
            tombstones,
            upsert,
            fine_times=fine_times,
            key_format=key_format,
        )
        if format not in OF_AVRO or self._format.avro is not None:
            RecordDecoder(self._format)
        elif len(self.topics) != 1:
            raise UsageError(
                "a Kafka source of Avro that reads several topics needs schema='{...}', the reader's schema"
            )
        self.client().close()

    def __repr__(self) -> str:
        return f"Kafka({self.brokers!r}, {', '.join(self.topics) or self.pattern!r})"

    def client(self, patience_ms: int = PATIENCE_MS) -> KafkaClient:
        """Return a client of the cluster."""
        return KafkaClient(
            addresses(self.brokers), self.security, environment=self.environment, patience_ms=patience_ms
        )

    def schema(self) -> pa.Schema:
        """See ``Source``. The topics are looked for, too."""
        client = self.client(LOOK_MS)
        try:
            self.find_topics(client)
        finally:
            client.close()
        return RecordDecoder(self.format()).schema

    def format(self) -> RecordFormat:
        """Return the format, with the newest schema of the topic if none was given: once, in the driver."""
        if self._format.name in OF_AVRO and self._format.avro is None:
            assert self._format.registry is not None
            registry = RegistryClient(self._format.registry, self.environment, LOOK_MS)
            self._format = replace(self._format, avro=registry.latest(f"{self.topics[0]}-value"))
        return self._format

    def identity(self) -> str:
        """See ``Source``: another cluster has other records. Topics are part of positions, by their ids."""
        client = self.client()
        try:
            return f"{Form.KAFKA.value}{client.cluster_id()}"
        finally:
            client.close()

    def locations(self) -> tuple[Location, ...]:
        """See ``Source``. Without brokers, which come and go: positions have the ids of topics, which tell clusters."""
        names = [f"kafka:{name}" for name in (*self.topics, *([self.pattern] if self.pattern else []))]
        return tuple(Location(name, name) for name in names)

    def how_to_end(self) -> str | None:
        """See ``Source``."""
        return "give end='latest'" if self.end is None else None

    def open(self, context: SourceContext) -> KafkaReader:
        """Return a reader of the partitions that belong to this subtask."""
        return KafkaReader(self, context)

    def reads(self, topic: str) -> bool:
        """Whether a topic of this name is to be read."""
        return bool(re.fullmatch(self.pattern, topic)) if self.pattern else topic in self.topics

    def existing_topics(self, client: KafkaClient) -> dict[str, Topic]:
        """Return those of the topics to read that are there now, by name."""
        if self.pattern:
            return {name: one for name, one in client.topics(None).items() if self.reads(name)}
        return client.topics(self.topics)

    def find_topics(self, client: KafkaClient) -> dict[str, Topic]:
        """Return the topics to read, by name.

        Raises:
            UsageError: one of ``topics`` is not there.
        """
        found = self.existing_topics(client)
        if missing := [name for name in self.topics if name not in found]:
            client.topic(missing[0])
        return found


def _checked_place(name: str, place: object) -> Place:
    words = (EARLIEST, LATEST, COMMITTED) if name == "start" else (LATEST,)
    if isinstance(place, Mapping):
        place = tuple(place.items())
    if place in words:
        return place  # type: ignore[return-value]
    if isinstance(place, datetime) and place.tzinfo is not None:
        return place
    if isinstance(place, tuple) and all(_is_offset(one) for one in place):
        return tuple(sorted(place))
    choices = ", ".join(map(repr, words))
    raise UsageError(
        f"{name}={place!r} of a Kafka source is none of {choices}, a datetime with a time zone, or offsets such as "
        "{('topic', 0): 1200}"
    )


def _is_offset(one: object) -> bool:
    match one:
        case ((str(), int()), int(offset)):
            return offset >= 0
    return False


@dataclass(frozen=True, slots=True)
class Delivery:
    """Decoded records of one partition, or None where all were left out, and the offset that follows them.

    ``epoch``: of the leader that wrote the last of them.
    """

    partition: Partition
    batch: SourceBatch | None
    next_offset: int
    epoch: int


_Found: TypeAlias = Delivery | dict[Partition, Position]
"""What the thread found: records, or new partitions."""


class KafkaReader(FailStopReader, CheckpointedFunction, CheckpointListener):
    """Reads the partitions of one subtask."""

    def __init__(self, source: Kafka, context: SourceContext) -> None:
        """Use ``Kafka.open``."""
        self._source, self._context = source, context
        self._client = source.client()
        self._places: dict[Partition, Position] = {}
        self._ready: deque[Delivery] = deque()
        self._paused: frozenset[Partition] = frozenset()
        self._cuts: dict[int, dict[Partition, int]] = {}
        """Checkpoint → offsets, of checkpoints that are not completed."""
        try:
            topics = source.find_topics(self._client)
            self._places = self._first_positions(topics)
            self._refuse_beyond_logs(topics)
            known = {name: topics.get(name) for name, _ in self._places}
        except BaseException:
            self._client.close()
            raise
        self._finished = {part for part, position in self._places.items() if _is_over(position)}
        ids = {name: one or Topic(name, self._id_of(name), {}) for name, one in known.items()}
        # last: from here on the client belongs to the thread
        self._work = _FetchThread(source, self._client, self._finds, ids, self._places, self._finished, context.node)

    def splits(self) -> Sequence[str]:
        """See ``SourceReader``."""
        return [split_name(part) for part in self._places if part not in self._finished]

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: the end is that of a bounded reading, or where the log ended at the latest fetch."""
        ends, undecided = self._work.log_ends, self._work.undecided
        return {
            split_name(part): SplitPosition(one.offset, ends.get(part), undecided=undecided.get(part, 0))
            if one.end is None
            else SplitPosition(one.offset, one.end)
            for part, one in self._places.items()
        }

    def wakeup_ms(self) -> int:
        """See ``SourceReader``."""
        return WAKEUP_MS

    def pause(self, splits: Collection[str]) -> None:
        """See ``PausableReader``. What a paused partition has sent is kept; then it sends no more."""
        self._paused = frozenset(map(partition_of, splits))
        self._work.pause({delivery.partition for delivery in self._ready} & self._paused)

    def is_behind(self, split: str) -> bool:
        """See ``PausableReader``: an answer may be on its way."""
        part = partition_of(split)
        return part in self._places and self._places[part].offset < self._work.log_ends.get(part, 0)

    def snapshot(self, context: SnapshotContext) -> None:
        """See ``CheckpointedFunction``."""
        if self._source.group:
            # kept until the checkpoint is complete: the group is never ahead of what a restart goes back to
            self._cuts[context.checkpoint_id] = {part: one.offset for part, one in self._places.items()}

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """See ``CheckpointListener``: commit for monitoring what the newest completed checkpoint has."""
        done = [number for number in self._cuts if number <= checkpoint_id]
        if done:
            self._work.commit(self._cuts[max(done)])
        # older ones among them were aborted; the newest has what they had, too
        for number in done:
            del self._cuts[number]

    def close(self) -> None:
        """See ``SourceReader``."""
        self._work.close()

    def _poll(self) -> SourceBatch | None:
        while True:
            while (delivery := self._next_ready()) is None:
                found = self._work.take()
                if found is None:
                    return None
                self._take(found)
            # with what is returned, not with what was fetched: a snapshot between two polls has just that
            self._move(delivery.partition, delivery.next_offset, delivery.epoch)
            if (batch := delivery.batch) is None:
                continue  # markers, aborted records and what was left out
            if batch.is_split_finished:
                self._finished.add(delivery.partition)
            return batch

    def _next_ready(self) -> Delivery | None:
        """Take the first delivery of a partition that is not paused."""
        for at, delivery in enumerate(self._ready):
            if delivery.partition not in self._paused:
                del self._ready[at]
                return delivery
        return None

    def _has_ended(self) -> bool:
        is_bounded = self._source.end is not None
        return is_bounded and not self._ready and len(self._finished) == len(self._places)

    def _positions(self) -> dict[str, bytes]:
        return {split_name(part): position.encode() for part, position in self._places.items()}

    def _take(self, found: _Found) -> None:
        """Take over records, or partitions that were found."""
        # here, and not in the fetch thread: positions change in the mailbox thread only
        if isinstance(found, dict):
            self._places |= found
        else:
            self._ready.append(found)
            self._work.pause({delivery.partition for delivery in self._ready} & self._paused)

    def _move(self, part: Partition, offset: int, epoch: int) -> None:
        position = self._places[part]
        assert offset >= position.offset, "a partition is never read backwards"
        self._places[part] = Position(position.topic, offset, position.end, epoch)

    # -- where to begin

    def _owns(self, part: Partition) -> bool:
        index = zlib.crc32(part[0].encode()) + part[1]
        return owner_of_split(index, self._context.parallelism) == self._context.subtask_index

    def _id_of(self, topic: str) -> UUID:
        return next(UUID(one.topic) for (name, _), one in self._places.items() if name == topic)

    def _first_positions(self, topics: Mapping[str, Topic]) -> dict[Partition, Position]:
        restored = self._context.positions
        if restored is None:
            return self._begin(topics, {}, self._source.start)
        everything = {partition_of(split): Position.decode(split, data) for split, data in restored.items()}
        names = sorted({name for name, _ in everything})
        if names and not any(map(self._source.reads, names)):
            raise UsageError(
                f"{self._source!r} reads none of the topics of its checkpoint, which are {', '.join(names)}: positions "
                "mean nothing in other topics; name one of these too, or give the source another name, and it begins "
                "at the beginning"
            )
        kept = {part: one for part, one in everything.items() if self._owns(part) and self._source.reads(part[0])}
        for (name, _), position in kept.items():
            if name in topics and topics[name].id != UUID(position.topic):
                raise UsageError(
                    f"topic '{name}' was deleted and created again since the checkpoint: its positions mean nothing in "
                    "the new topic; start over, or read it in a source of another name"
                )
        kept = self._with_ends(topics, kept)
        if self._source.end is not None and any(one.end is not None for one in everything.values()):
            return kept | self._begin_added(topics, everything)
        return kept | self._begin(topics, kept, EARLIEST)

    def _begin_added(
        self, topics: Mapping[str, Topic], restored: Mapping[Partition, Position]
    ) -> dict[Partition, Position]:
        """Return what the program has added to a bounded reading, whose partitions are those of its first start.

        These are topics that it names now, and partitions for which it gives an end.
        """
        read, end = {name for name, _ in restored}, self._source.end
        told = dict(end) if isinstance(end, tuple) else {}
        added = {}
        for name, topic in topics.items():
            is_new = name in self._source.topics and name not in read
            leaders = {part: node for part, node in topic.leaders.items() if is_new or (name, part) in told}
            added[name] = Topic(name, topic.id, leaders)
        return self._begin(added, restored, EARLIEST)

    def _with_ends(self, topics: Mapping[str, Topic], kept: Mapping[Partition, Position]) -> dict[Partition, Position]:
        """Return restored positions with the ends that the program gives now.

        "latest" and a datetime are found once, so that a restart ends where the first start would have.
        """
        source, found = self._source, dict(kept)
        if source.end is None:
            return {part: Position(one.topic, one.offset, epoch=one.epoch) for part, one in found.items()}
        is_told = isinstance(source.end, tuple)
        for name, topic in topics.items():
            parts = [part for (of, part), one in kept.items() if of == name and (is_told or one.end is None)]
            for part, end in (self._offsets(topic, parts, source.end) if parts else {}).items():
                found[name, part] = Position(topic.id.hex, kept[name, part].offset, end, kept[name, part].epoch)
        return found

    def _refuse_beyond_logs(self, topics: Mapping[str, Topic]) -> None:
        """Refuse positions of a bounded reading after the end of the log, which no fetch would notice.

        Raises:
            UsageError
        """
        for name, topic in topics.items():
            beyond = {
                part: one.offset
                for (of, part), one in self._places.items()
                if of == name and one.end is not None and one.offset > one.end
            }
            if not beyond:
                continue
            ends = self._client.list_offsets(topic, dict.fromkeys(beyond, LAST_OFFSET), READ_UNCOMMITTED)
            for part, offset in beyond.items():
                if offset > ends[part]:
                    raise UsageError(
                        f"offset {offset:,} of partition {part} of topic '{name}' is not in its log, which ends at "
                        f"{ends[part]:,}: the offset is wrong, or the topic lost data; start over, or begin at other "
                        "offsets"
                    )

    def _finds(self, topics: Mapping[str, Topic], known: Mapping[Partition, object]) -> dict[Partition, Position]:
        """Return the partitions of this subtask that are not known yet, with the positions to read them from."""
        return self._begin(topics, known, EARLIEST)

    def _begin(
        self, topics: Mapping[str, Topic], known: Mapping[Partition, object], start: Place
    ) -> dict[Partition, Position]:
        found: dict[Partition, Position] = {}
        for name, topic in sorted(topics.items()):
            own = [part for part in topic.leaders if self._owns((name, part)) and (name, part) not in known]
            if not own:
                continue
            begins = self._offsets(topic, own, start)
            ends = None if self._source.end is None else self._offsets(topic, own, self._source.end)
            for part in own:
                end = None if ends is None else ends[part]
                found[name, part] = Position(topic.id.hex, begins[part], end)
        return found

    def _offsets(self, topic: Topic, parts: Sequence[int], place: Place) -> dict[int, int]:
        """Return the offset of a place in each partition."""
        client = self._client
        if isinstance(place, tuple):
            given = dict(place)
            missing = [part for part in parts if (topic.name, part) not in given]
            if missing:
                raise UsageError(
                    f"the offsets for a Kafka source lack partition {missing[0]} of topic '{topic.name}'; give one for "
                    "each partition"
                )
            return {part: given[topic.name, part] for part in parts}
        if place == COMMITTED:
            first = client.list_offsets(topic, dict.fromkeys(parts, FIRST_OFFSET))
            there = client.committed_offsets(self._source.group, topic.name, parts)
            return {part: there[part][0] if part in there else first[part] for part in parts}
        if isinstance(place, datetime):
            time_ms = -((_EPOCH - place) // _MILLISECOND)  # the first one that is not before it
            if time_ms < 0:  # numbers below zero mean other places to brokers
                return client.list_offsets(topic, dict.fromkeys(parts, FIRST_OFFSET))
            by_time = client.list_offsets(topic, dict.fromkeys(parts, time_ms))
            late = [part for part, offset in by_time.items() if offset < 0]
            return by_time | (client.list_offsets(topic, dict.fromkeys(late, LAST_OFFSET)) if late else {})
        return client.list_offsets(topic, dict.fromkeys(parts, FIRST_OFFSET if place == EARLIEST else LAST_OFFSET))


def _is_over(position: Position) -> bool:
    return position.end is not None and position.offset >= position.end


_Finds: TypeAlias = Callable[[Mapping[str, Topic], Mapping[Partition, object]], dict[Partition, Position]]


class _FetchThread:
    """Fetches, looks for new partitions and commits to the group, beside the mailbox thread."""

    def __init__(
        self,
        source: Kafka,
        client: KafkaClient,
        finds: _Finds,
        topics: Mapping[str, Topic],
        positions: Mapping[Partition, Position],
        finished: set[Partition],
        node: str,
    ) -> None:
        self._source, self._client, self._finds, self._node = source, client, finds, node
        self._decoder = RecordDecoder(source.format(), source.environment)
        self._ends = {part: one.end for part, one in positions.items() if one.end is not None}
        offsets = {part: one.offset for part, one in positions.items()}
        environment = source.environment
        self._environment = environment
        self._fetcher = Fetcher(
            client,
            environment,
            topics,
            offsets,
            {part: one.epoch for part, one in positions.items()},
            with_headers=source.format().needs_headers,
            wait_ms=FETCH_WAIT_MS,
        )
        self.log_ends: dict[Partition, int] = {}
        """Of each partition, where it ended for readers of committed records at the latest fetch."""
        self.undecided: dict[Partition, int] = {}
        """Of each partition, how many offsets followed that end."""
        self._waiting: frozenset[Partition] = frozenset()
        """Partitions that wait for others."""
        self._over = set(finished)
        """Partitions of a bounded reading that were read to their ends."""
        for part in finished:
            self._fetcher.pause(part)
        self._changed = environment.condition()
        self._found: deque[_Found] = deque()
        self._failure: BaseException | None = None
        self._to_commit: dict[Partition, int] = {}
        self._is_closed = False
        self._look_at_ms = environment.monotonic_ms() + source.discovery_ms
        self._thread = environment.thread(self._run, "kafka-fetch")
        self._thread.start()

    def take(self) -> _Found | None:
        """Return what was found next, or None.

        Raises:
            HeadgateError: fetching failed for good.
        """
        with self._changed:
            if self._found:
                self._changed.notify_all()
                return self._found.popleft()
            # after what was decoded before it
            if self._failure is not None:
                raise self._failure
            return None

    def pause(self, partitions: Collection[Partition]) -> None:
        """Ask for nothing more of these, and for all others, until the next call. From the mailbox thread."""
        if partitions != self._waiting:
            with self._changed:
                self._waiting = frozenset(partitions)
                self._changed.notify_all()

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Have offsets committed to the group, soon."""
        with self._changed:
            # replaced, not merged: it names all partitions, and the newest checkpoint counts
            self._to_commit = dict(offsets)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        # after the flag: the thread looks at it when its wait is cut short
        self._fetcher.interrupt()
        self._thread.join(1 + CLOSE_PATIENCE_MS / 1000)  # it may be waiting for a broker; it ends by itself

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._round()
            self._client.patience_ms = CLOSE_PATIENCE_MS
            self._commit()
        except ThreadEnded:
            raise
        except BaseException as error:
            with self._changed:
                self._failure = error
        finally:
            self._fetcher.close()
            self._client.close()

    def _round(self) -> None:
        if not self._wait_for_room():
            return
        self._commit()
        if self._environment.monotonic_ms() >= self._look_at_ms and self._source.end is None:
            self._look_at_ms = self._environment.monotonic_ms() + self._source.discovery_ms
            self._discover()
        # read once: the mailbox thread replaces it, and never changes it
        waiting = self._waiting
        for part in self._fetcher.positions.keys() - self._over:
            (self._fetcher.pause if part in waiting else self._fetcher.resume)(part)
        fetched = self._fetcher.poll(FETCH_WAIT_MS)
        self.log_ends.update({found.partition: found.log_end for found in fetched if found.log_end >= 0})
        self.undecided.update({found.partition: found.undecided for found in fetched if found.log_end >= 0})
        for found in fetched:
            for delivery in self._decoded(found):
                self._put(delivery)
                if not self._wait_for_room():
                    return
        if self._fetcher.is_idle:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting != waiting, FETCH_WAIT_MS / 1000)

    def _wait_for_room(self) -> bool:
        """Wait until more may be decoded; return whether there is any use in it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._found) < DELIVERIES_AHEAD, None)
        return not self._is_closed

    def _decoded(self, found: Fetched) -> Iterator[Delivery]:
        """Decode records up to the end of a bounded reading; what comes after it was asked for too early."""
        part, split = found.partition, split_name(found.partition)
        if part in self._over:
            return
        end, delivered = self._ends.get(part), 0
        for one in found.batches:
            records, offsets = one.records, one.records.column("offset").to_numpy()
            if end is not None and offsets[-1] >= end:
                records = records.slice(0, int(np.searchsorted(offsets, end)))
            if records.num_rows:
                delivered = int(offsets[records.num_rows - 1]) + 1
                yield self._delivery(part, split, records, delivered, one.epoch)
        if end is not None and found.next_offset >= end:
            self._fetcher.pause(part)
            self._over.add(part)
            empty = pa.RecordBatch.from_pylist([], schema=self._decoder.schema)
            yield Delivery(part, SourceBatch(split, empty, is_split_finished=True), end, NO_EPOCH)
        elif found.next_offset > delivered:
            yield Delivery(part, None, found.next_offset, found.next_epoch)  # markers and aborted records

    def _delivery(self, part: Partition, split: str, records: pa.RecordBatch, next_offset: int, epoch: int) -> Delivery:
        batch = self._decoder.decode(part, split, records, self._node)
        if batch.batch.num_rows == 0 and batch.bad is None:
            return Delivery(part, None, next_offset, epoch)
        times = pc.max(records.column("timestamp")).cast(pa.int64()).as_py()
        batch = replace(batch, written_ms=None if times is None else times // 1_000)
        return Delivery(part, batch, next_offset, epoch)

    def _discover(self) -> None:
        try:
            topics = self._source.existing_topics(self._client)
        except UsageError:
            return  # a topic must not be seen now: its partitions keep their positions, as those of one that is gone
        found = self._finds(topics, self._fetcher.positions)
        if found:
            self._fetcher.add(topics, {part: one.offset for part, one in found.items()})
            # in front of the first records of these partitions, which only a later round fetches
            self._put(found)

    def _commit(self) -> None:
        with self._changed:
            offsets, self._to_commit = self._to_commit, {}
        by_topic: dict[str, dict[int, int]] = {}
        for (name, part), offset in offsets.items():
            by_topic.setdefault(name, {})[part] = offset
        for name, parts in by_topic.items():
            try:
                self._client.commit_offsets(self._source.group, name, parts)
            except (StorageError, UsageError):
                return  # it is for people to look at: the next checkpoint commits again

    def _put(self, found: _Found) -> None:
        with self._changed:
            self._found.append(found)
