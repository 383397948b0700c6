"""A topic of Kafka as sink: what users configure, and which pipeline the topic belongs to.

Counterparts: ``sink_writer`` writes and prepares in the workers, ``committer`` decides in the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import pyarrow as pa

from headgate.codec.kafka.record_batch import Compression, checksum
from headgate.connectors.base import Committer, Holding, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import Fence, FencedSink, owner_of
from headgate.connectors.kafka.client import KafkaClient, addresses
from headgate.connectors.kafka.committer import KafkaCommitter
from headgate.connectors.kafka.connection import NO_SECURITY, KafkaSecurity
from headgate.connectors.kafka.formats import DEBEZIUM, ENVELOPES, KEY_FORMATS
from headgate.connectors.kafka.outgoing_records import RecordColumns, Router
from headgate.connectors.kafka.schemas.protobuf import ProtobufMessage, message_of
from headgate.connectors.kafka.schemas.schema_registry import SchemaRegistry
from headgate.connectors.kafka.schemas.schema_values import SCHEMA_FORMATS, SchemaValues
from headgate.connectors.kafka.sink_writer import IdPool, KafkaWriter, PlainKafkaWriter, Topics, WriterSettings
from headgate.connectors.kafka.transactions import SinkIds, TopicOwner
from headgate.display.progress import duration_text
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import UsageError
from headgate.model.config import Duration, check_switches, duration_ms
from headgate.model.ids import Generation
from headgate.model.lineage import Location
from headgate.model.pipeline_identity import Mine

EXACTLY_ONCE, AT_LEAST_ONCE = "exactly-once", "at-least-once"

KafkaGuarantee: TypeAlias = Literal["exactly-once", "at-least-once"]
KafkaCompression: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]

TRANSACTION_VERSION = 2
"""The level of the feature ``transaction.version`` that makes a commit repeatable."""

TIMEOUT_MS_MAX = 3 * 24 * 3_600_000
"""As long as brokers keep a transaction, unless ``transaction_timeout`` says more."""

BROKER_TIMEOUT_MS = 900_000
"""The longest timeout that brokers allow by default (``transaction.max.timeout.ms``)."""


@dataclass(frozen=True, kw_only=True)
class KafkaSink(FencedSink):
    """Writes records to a topic of Kafka, exactly once or at least once.

    Exactly once: readers with ``isolation.level=read_committed`` see the records of completed checkpoints only, each
    once. Every subtask writes the records of a checkpoint in a transaction of Kafka. When the checkpoint is taken,
    brokers have acknowledged all of them; when it is completed, the driver commits the transaction, and any later
    driver can. Brokers abort a transaction that was not committed within ``transaction_timeout``: a pipeline that was
    down for longer stops, and says what was lost. Brokers of release 4.0 or newer are needed, at level 2 of the feature
    ``transaction.version``. Needs the package crc32c: ``pip install 'headgate-streams[kafka]'``.

    Attributes:
        brokers: ``"host:port"`` of some brokers of the cluster, separated by commas.
        topic: the topic.
        key: the column with the key, binary or text; None: records have no key. Records of one key go to one partition,
            the one that Kafka's own clients choose.
        value: the column with the value, binary or text, as it is. Null is written as null, which deletes the key in a
            compacted topic. None: the value is the whole record in ``format``.
        upsert: write a stream with changes to a topic that has the newest row of each key. The key of a record is that
            of the changes (one text or binary column as it is, otherwise a JSON object of the key columns), the value
            is the row without ``op``, and null for a delete. Have the topic compacted.
        format: of whole records: ``"json"``; ``"debezium-json"`` for a stream with changes, each as an envelope of
            Debezium with ``before``, ``after`` and ``op``; ``"avro"`` and ``"debezium-avro"``, which need the package
            fastavro: ``pip install 'headgate-streams[avro]'``; or ``"protobuf"``, which needs the package ptars:
            ``pip install 'headgate-streams[protobuf]'``.
        schema: of Avro; None: it is made from the columns, each of which may be null. Of ``"debezium-avro"`` it is that
            of the envelope. For Protobuf, the message: a generated class, which has a field for each column.
        registry: the schema registry, which gets the schema as ``<topic>-value``; values begin with its id. For JSON it
            is a JSON Schema that is made from the columns. The files that a message needs are registered by their
            names. None: values have no id.
        key_format: ``"avro"`` writes the keys of changes as records of Avro, with a schema that is registered as
            ``<topic>-key``, as Debezium does; ``"plain"`` as ``upsert`` says.
        headers: the column with headers, a list of structs with ``key`` and ``value``.
        timestamp: the column with the timestamp; None: the time of writing.
        partition: the column with the number of the partition; where it is null, the key decides.
        topic_column: the column with the name of the topic, for records that go elsewhere; where it is null, it is
            ``topic``, which is always needed. These topics must exist.
        guarantee: ``"exactly-once"``, or ``"at-least-once"``: records are visible when they are written, and after a
            failure those since the last checkpoint are written again.
        compression: ``"none"``, ``"gzip"``, ``"snappy"``, ``"lz4"`` or ``"zstd"``.
        transaction_timeout: after this time brokers abort a transaction. It must exceed the longest time for which the
            pipeline may be down. None: as long as brokers allow (``transaction.max.timeout.ms``), at most 3 days.
        two_phase: brokers keep prepared transactions until they are decided, however long the pipeline is down
            (KIP-939, not stable in Kafka 4.3). Brokers need ``transaction.two.phase.commit.enable`` and
            ``unstable.api.versions.enable``. An abandoned pipeline then stops readers of committed records for good.
        create: create the topic with so many partitions if it is missing. 0: it must exist.
        replication: of a topic that is created; -1: as brokers say.
        settings: of a topic that is created, such as ``{"cleanup.policy": "compact"}``.
        security: TLS and login.
        prefix: transactional ids and consumer groups of the sink begin with it. Give rights for it.
        change_keys: the keys of the changes; set by Headgate.
        retractions: whether the changes have retractions; set by Headgate.
    """

    brokers: str = field(kw_only=False)
    topic: str = field(kw_only=False)
    key: str | None = None
    value: str | None = None
    format: Literal["json", "avro", "protobuf", "debezium-json", "debezium-avro"] = "json"
    upsert: bool = False
    schema: Mapping[str, Any] | str | type | ProtobufMessage | None = None
    registry: SchemaRegistry | str | None = None
    key_format: Literal["plain", "avro"] = "plain"
    headers: str | None = None
    timestamp: str | None = None
    partition: str | None = None
    topic_column: str | None = None
    guarantee: KafkaGuarantee = "exactly-once"
    compression: KafkaCompression = "none"
    transaction_timeout: Duration | None = None
    two_phase: bool = False
    create: int = 0
    replication: int = -1
    settings: Mapping[str, str] = field(default_factory=dict)
    security: KafkaSecurity = NO_SECURITY
    prefix: str = "headgate"
    change_keys: tuple[str, ...] = field(default=(), repr=False)
    retractions: bool = field(default=False, repr=False)

    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: one has no such value, or the package is not installed.
        """
        checksum(b"")
        check_switches("KafkaSink: ", upsert=self.upsert, two_phase=self.two_phase)
        if self.guarantee not in (EXACTLY_ONCE, AT_LEAST_ONCE):
            raise UsageError(f"KafkaSink(guarantee={self.guarantee!r}) must be {EXACTLY_ONCE!r} or {AT_LEAST_ONCE!r}")
        names = [codec.name.lower() for codec in Compression]
        if self.compression not in names:
            raise UsageError(f"KafkaSink(compression={self.compression!r}) must be one of {', '.join(names)}")
        if self.format not in (known := ("json", DEBEZIUM, *SCHEMA_FORMATS)):
            raise UsageError(f"KafkaSink(format={self.format!r}) must be one of {', '.join(map(repr, known))}")
        if self.takes_changes and (self.key is not None or self.value is not None):
            raise UsageError("KafkaSink for changes makes keys and values itself: leave key= and value= out")
        if self.key_format not in KEY_FORMATS:
            raise UsageError(f"KafkaSink(key_format={self.key_format!r}) must be 'plain' or 'avro'")
        if self.key_format == "avro" and (self.registry is None or not self.takes_changes):
            raise UsageError("KafkaSink(key_format='avro') is for changes, and needs registry='http://...'")
        if self.upsert and self.format in ENVELOPES:
            raise UsageError(
                f"KafkaSink(upsert=True) writes rows, and format={self.format!r} envelopes: give one of them"
            )
        has_schema = self.format in SCHEMA_FORMATS
        if has_schema and self.value is not None:
            raise UsageError(f"KafkaSink(format={self.format!r}) writes whole records: leave value= out")
        if self.registry is not None and self.value is not None:
            raise UsageError("KafkaSink(registry=) is for whole records: leave value= out, or the registry")
        if not has_schema and self.schema is not None:
            raise UsageError("KafkaSink(schema=) is for formats of Avro and Protobuf only; that of JSON is made")
        if self.format == "protobuf" and not isinstance(self.schema, ProtobufMessage):
            object.__setattr__(self, "schema", message_of(self.schema, "KafkaSink"))
        if self.registry is not None and self.topic_column is not None:
            raise UsageError("KafkaSink(registry=) is for one topic: leave topic_column= out")
        if isinstance(self.registry, str):
            object.__setattr__(self, "registry", SchemaRegistry(self.registry))
        if not self.topic:
            raise UsageError("KafkaSink(topic='') names no topic")
        if self.create < 0:
            raise UsageError(f"KafkaSink(create={self.create}) must be a number of partitions, or 0")
        if not self.is_transactional and self.transaction_timeout is not None:
            raise UsageError("KafkaSink(guarantee='at-least-once') has no transactions: leave transaction_timeout out")
        if self.two_phase and not self.is_transactional:
            raise UsageError("KafkaSink(guarantee='at-least-once') has no transactions: leave two_phase out")
        if self.two_phase and self.transaction_timeout is not None:
            raise UsageError(
                "KafkaSink(two_phase=True) has transactions without a timeout: leave transaction_timeout out"
            )
        if self.transaction_timeout is not None:
            duration_ms(self.transaction_timeout, "KafkaSink(transaction_timeout=)")
        self.client().close()

    @property
    def takes_changes(self) -> bool:
        """Whether it writes streams with changes, and nothing else."""
        return self.upsert or self.format in ENVELOPES

    def for_changes(self, keys: tuple[str, ...] | None, *, retractions: bool) -> KafkaSink:
        """See ``Sink``."""
        if not self.takes_changes:
            return self
        what = "upsert=True" if self.upsert else f"format={self.format!r}"
        if keys is None:
            raise UsageError(
                f"KafkaSink({what}) writes streams with changes, and these are plain records; call "
                ".records_as_changes('id') before, or leave it out"
            )
        if not keys:
            raise UsageError(
                f"KafkaSink({what}) needs the keys of the changes, and these are not known any more; keep the columns "
                "of the key in select, or give top a rank"
            )
        return replace(self, change_keys=keys, retractions=retractions)

    @property
    def is_transactional(self) -> bool:  # type: ignore[override]
        """See ``Sink``."""
        return self.guarantee == EXACTLY_ONCE

    @property
    def has_owner(self) -> bool:  # type: ignore[override]
        """See ``Sink``."""
        return self.is_transactional

    def client(self) -> KafkaClient:
        """Return a client of the cluster."""
        return KafkaClient(addresses(self.brokers), self.security, environment=self.environment)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink``: also that brokers are there, have the topic, and allow the transactions."""
        self._columns.check(schema, is_json=self.format not in SCHEMA_FORMATS)
        if (values := self._values()) is not None:
            values.check(self._columns.values_schema(schema))
        if (keys := self._keys()) is not None:
            keys.check(self._keys_schema(schema))
        with self._connected() as client:
            if not self.create:
                client.topic(self.topic)
            if self.is_transactional:
                self._check_transactions(client)

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: create the topic when it is missing."""
        with self._connected() as client:
            self._find_or_create(client)
            if self.is_transactional:
                self._check_transactions(client)
            if self.two_phase:
                client.check_two_phase_right(self.prefix)
        if (values := self._values()) is not None:
            values.begin(self._columns.values_schema(schema))
        if (keys := self._keys()) is not None:
            keys.begin(self._keys_schema(schema))

    def open(self, context: SinkContext) -> SinkWriter:
        """See ``Sink``."""
        topics = Topics(self.client())
        try:
            topics.partitions_count(self.topic)
            router = Router(
                self._columns,
                self.topic,
                topics.partitions_count,
                context.subtask_index,
                self._values(),
                self._keys(),
            )
            settings = WriterSettings(self.client, self.environment, topics, Compression[self.compression.upper()])
            if not self.is_transactional:
                return PlainKafkaWriter(settings, router)
            fence = Fence(owner_of(context.pipeline, context.node), int(context.generation))
            pool = IdPool(
                settings,
                self.topic,
                SinkIds(self.prefix, fence.owner),
                fence,
                context.subtask_index,
                None if self.two_phase else self._timeout_ms(),
                self._owner,
            )
            return KafkaWriter(settings, router, pool, self.topic, fence)
        except BaseException:
            topics.close()
            raise

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """See ``Sink``."""
        client, owner = self.client(), owner_of(pipeline, node)
        fence, ids = Fence(owner, int(generation)), SinkIds(self.prefix, owner)
        topic_owner = self._owner(client) if self.is_transactional else None
        timeout = "" if self.two_phase else duration_text(self._timeout_ms())
        return KafkaCommitter(client, self.topic, topic_owner, ids, fence, timeout, self.environment)

    def locations(self) -> tuple[Location, ...]:
        """See ``Sink``. Without brokers, which come and go: another cluster does not know the prepared transactions."""
        name = f"kafka:{self.topic}"
        return (Location(name, name),)

    # -- the owner of the topic -------------------------------------------------------------------------------------

    def claim(self, fence: Fence) -> None:
        """See ``FencedSink``."""
        with self._connected() as client:
            self._find_or_create(client)
            self._owner(client).claim(fence)

    def claimed(self, owner: str) -> Fence | None:
        """See ``FencedSink``. A topic that is missing has no owner."""
        with self._connected() as client:
            return self._owner(client).fence(owner) if self.topic in client.topics([self.topic]) else None

    def all_claimed(self) -> Iterable[Fence]:
        """See ``FencedSink``."""
        with self._connected() as client:
            if self.topic not in client.topics([self.topic]):
                return []
            return self._owner(client).fences()

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``Sink``. Records cannot be removed from a topic one by one."""
        where, known = f"topic {self.topic} in Kafka at {self.brokers}", self.owner(pipeline, node)
        if known.is_unknown or known.is_forgotten:
            return Holding("", where)
        problem = (
            f"{where} keeps what was written to it; delete the topic if it is no longer needed, or leave it as it is"
        )
        return Holding("all its output", where, problem=problem)

    def _find_or_create(self, client: KafkaClient) -> None:
        if self.create and self.topic not in client.topics([self.topic]):
            client.create_topic(self.topic, self.create, self.replication, self.settings)
        client.topic(self.topic)

    def _owner(self, client: KafkaClient) -> TopicOwner:
        return TopicOwner(client, self.prefix, self.topic)

    # -- what the brokers allow -------------------------------------------------------------------------------------

    def _values(self) -> SchemaValues | None:
        registry = None if isinstance(self.registry, str) else self.registry
        if self.format not in SCHEMA_FORMATS and registry is None:
            return None
        return SchemaValues(self.topic, self.format, self.schema, registry, self.environment)

    def _keys(self) -> SchemaValues | None:
        if self.key_format != "avro":
            return None
        assert isinstance(self.registry, SchemaRegistry), "keys of Avro need one"
        return SchemaValues(self.topic, "avro", None, self.registry, self.environment, "key")

    def _keys_schema(self, schema: pa.Schema) -> pa.Schema:
        return pa.schema([schema.field(name) for name in self.change_keys])

    @property
    def _columns(self) -> RecordColumns:
        return RecordColumns(
            self.value or "",
            self.key or "",
            self.headers or "",
            self.timestamp or "",
            self.topic_column or "",
            self.partition or "",
            self.change_keys,
            self.format in ENVELOPES,
            self.retractions,
            self.key_format == "avro",
        )

    @contextlib.contextmanager
    def _connected(self) -> Iterator[KafkaClient]:
        client = self.client()
        try:
            yield client
        finally:
            client.close()

    def _timeout_ms(self) -> int:
        if self.transaction_timeout is None:
            return BROKER_TIMEOUT_MS
        return duration_ms(self.transaction_timeout, "KafkaSink(transaction_timeout=)")

    def _check_transactions(self, client: KafkaClient) -> None:
        """Check that brokers can do what commits need, and settle the timeout."""
        level = client.feature_level("transaction.version")
        if level < TRANSACTION_VERSION:
            raise UsageError(
                f"Kafka at {self.brokers} runs at level {level} of transaction.version, and commits of KafkaSink need "
                f"level {TRANSACTION_VERSION}: run kafka-features.sh upgrade --feature transaction.version="
                f"{TRANSACTION_VERSION} with brokers of release 4.0 or newer, or give guarantee='at-least-once'"
            )
        if self.two_phase:
            client.check_two_phase_commit()
            return
        allowed_ms = client.number_setting("transaction.max.timeout.ms", BROKER_TIMEOUT_MS)
        if self.transaction_timeout is None:
            object.__setattr__(self, "transaction_timeout", f"{min(allowed_ms, TIMEOUT_MS_MAX)}ms")
        elif self._timeout_ms() > allowed_ms:
            raise UsageError(
                f"KafkaSink(transaction_timeout={self.transaction_timeout!r}) is longer than Kafka at {self.brokers} "
                f"allows, which is {allowed_ms} ms: raise transaction.max.timeout.ms there, or give a shorter one"
            )
