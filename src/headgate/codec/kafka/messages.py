"""The requests that sources and sinks need, and their answers: one table each, in versions of brokers 3.6 to 4.x.

Where two versions are listed, the second one is for brokers that lack the first: 3.6 to 3.9 have no transactions whose
epoch changes with every commit (KIP-890), and only brokers with KIP-939 take ``enable_2pc``. Field names are those of
Kafka's own message definitions, in snake case.
"""

from __future__ import annotations

from typing import Annotated, ClassVar
from uuid import UUID

from headgate.codec.kafka.wire import (
    NEVER_FLEXIBLE,
    Answer,
    Bool,
    Bytes,
    Int8,
    Int16,
    Int32,
    Int64,
    Records,
    Request,
    Since,
    String,
    Tag,
    Uuid,
)
from headgate.dataclass import dataclass

NO_UUID = UUID(int=0)

EARLIEST, LATEST = -2, -1
"""Timestamps of ``ListOffsets`` that name an end of the log."""

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
GROUP_COORDINATOR, TRANSACTION_COORDINATOR = 0, 1
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4


# -- versions, cluster, security ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApiVersion:
    """The versions of one request that the broker has."""

    api_key: Int16
    min_version: Int16
    max_version: Int16


@dataclass(frozen=True, slots=True)
class SupportedFeature:
    """The levels of a feature that the broker could run at."""

    name: String
    min_version: Int16
    max_version: Int16


@dataclass(frozen=True, slots=True)
class FinalizedFeature:
    """The levels of a feature that the cluster runs at, such as ``transaction.version``."""

    name: String
    max_version_level: Int16
    min_version_level: Int16


@dataclass(frozen=True, slots=True)
class ApiVersionsAnswer(Answer):
    """What the broker can do."""

    error_code: Int16
    api_keys: tuple[ApiVersion, ...]
    throttle_time_ms: Int32 = 0
    supported_features: Annotated[tuple[SupportedFeature, ...], Tag(0)] = ()
    finalized_features_epoch: Annotated[Int64, Tag(1)] = -1
    finalized_features: Annotated[tuple[FinalizedFeature, ...], Tag(2)] = ()
    zk_migration_ready: Annotated[Bool, Tag(3)] = False


@dataclass(frozen=True, slots=True)
class ApiVersions(Request[ApiVersionsAnswer]):
    """Ask what the broker can do: the first request on every connection."""

    KEY: ClassVar[int] = 18
    VERSIONS: ClassVar[tuple[int, ...]] = (3,)
    ANSWER: ClassVar[type[Answer]] = ApiVersionsAnswer
    HAS_TAGS_IN_ANSWER: ClassVar[bool] = False

    client_software_name: String
    client_software_version: String


@dataclass(frozen=True, slots=True)
class SaslHandshakeAnswer(Answer):
    """Whether the mechanism may be used, and which ones may."""

    error_code: Int16
    mechanisms: tuple[String, ...]


@dataclass(frozen=True, slots=True)
class SaslHandshake(Request[SaslHandshakeAnswer]):
    """Choose a mechanism of authentication."""

    KEY: ClassVar[int] = 17
    VERSIONS: ClassVar[tuple[int, ...]] = (1,)
    ANSWER: ClassVar[type[Answer]] = SaslHandshakeAnswer
    FLEXIBLE: ClassVar[int] = NEVER_FLEXIBLE

    mechanism: String


@dataclass(frozen=True, slots=True)
class SaslAuthenticateAnswer(Answer):
    """The broker's bytes of the mechanism."""

    error_code: Int16
    error_message: String | None
    auth_bytes: Bytes
    session_lifetime_ms: Int64 = 0


@dataclass(frozen=True, slots=True)
class SaslAuthenticate(Request[SaslAuthenticateAnswer]):
    """Send bytes of the mechanism that was chosen."""

    KEY: ClassVar[int] = 36
    VERSIONS: ClassVar[tuple[int, ...]] = (2,)
    ANSWER: ClassVar[type[Answer]] = SaslAuthenticateAnswer

    auth_bytes: Bytes


@dataclass(frozen=True, slots=True)
class MetadataTopic:
    """A topic that is asked for, by id or, with ``NO_UUID``, by name."""

    topic_id: Uuid = NO_UUID
    name: String | None = None


@dataclass(frozen=True, slots=True)
class MetadataBroker:
    """A broker that can be reached."""

    node_id: Int32
    host: String
    port: Int32
    rack: String | None


@dataclass(frozen=True, slots=True)
class MetadataPartition:
    """A partition, and which broker leads it (-1: none)."""

    error_code: Int16
    partition_index: Int32
    leader_id: Int32
    leader_epoch: Int32
    replica_nodes: tuple[Int32, ...]
    isr_nodes: tuple[Int32, ...]
    offline_replicas: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic with its id, which a topic of the same name that is created later does not have."""

    error_code: Int16
    name: String | None
    topic_id: Uuid
    is_internal: Bool
    partitions: tuple[MetadataPartition, ...]
    topic_authorized_operations: Int32


@dataclass(frozen=True, slots=True)
class MetadataAnswer(Answer):
    """Brokers and topics of the cluster."""

    throttle_time_ms: Int32
    brokers: tuple[MetadataBroker, ...]
    cluster_id: String | None
    controller_id: Int32
    topics: tuple[TopicMetadata, ...]


@dataclass(frozen=True, slots=True)
class Metadata(Request[MetadataAnswer]):
    """Ask for brokers and topics; ``topics=None`` asks for all topics."""

    KEY: ClassVar[int] = 3
    VERSIONS: ClassVar[tuple[int, ...]] = (12,)
    ANSWER: ClassVar[type[Answer]] = MetadataAnswer

    topics: tuple[MetadataTopic, ...] | None
    allow_auto_topic_creation: Bool = False
    include_topic_authorized_operations: Bool = False


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The broker that coordinates one group or transactional id."""

    key: String
    node_id: Int32
    host: String
    port: Int32
    error_code: Int16
    error_message: String | None


@dataclass(frozen=True, slots=True)
class FindCoordinatorAnswer(Answer):
    """Coordinators, one for each key."""

    throttle_time_ms: Int32
    coordinators: tuple[Coordinator, ...]


@dataclass(frozen=True, slots=True)
class FindCoordinator(Request[FindCoordinatorAnswer]):
    """Ask which broker coordinates groups, or transactional ids."""

    KEY: ClassVar[int] = 10
    VERSIONS: ClassVar[tuple[int, ...]] = (4,)
    ANSWER: ClassVar[type[Answer]] = FindCoordinatorAnswer

    key_type: Int8
    coordinator_keys: tuple[String, ...]


# -- topics and their settings -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """The brokers that are to have one partition."""

    partition_index: Int32
    broker_ids: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class TopicSetting:
    """A setting of a topic to create."""

    name: String
    value: String | None


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create; -1: as the broker's defaults say."""

    name: String
    num_partitions: Int32 = -1
    replication_factor: Int16 = -1
    assignments: tuple[ReplicaAssignment, ...] = ()
    configs: tuple[TopicSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class CreatedSetting:
    """A setting that a new topic has."""

    name: String
    value: String | None
    read_only: Bool
    config_source: Int8
    is_sensitive: Bool


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """How the creation of one topic went."""

    name: String
    topic_id: Uuid
    error_code: Int16
    error_message: String | None
    num_partitions: Int32 = -1
    replication_factor: Int16 = -1
    configs: tuple[CreatedSetting, ...] | None = None
    topic_config_error_code: Annotated[Int16, Tag(0)] = 0


@dataclass(frozen=True, slots=True)
class CreateTopicsAnswer(Answer):
    """How the creation of topics went."""

    throttle_time_ms: Int32
    topics: tuple[CreatedTopic, ...]


@dataclass(frozen=True, slots=True)
class CreateTopics(Request[CreateTopicsAnswer]):
    """Create topics."""

    KEY: ClassVar[int] = 19
    VERSIONS: ClassVar[tuple[int, ...]] = (7,)
    ANSWER: ClassVar[type[Answer]] = CreateTopicsAnswer

    topics: tuple[NewTopic, ...]
    timeout_ms: Int32
    validate_only: Bool = False


@dataclass(frozen=True, slots=True)
class ConfigResource:
    """Settings that are asked for; ``configuration_keys=None``: all of them."""

    resource_type: Int8
    resource_name: String
    configuration_keys: tuple[String, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConfigSynonym:
    """Another setting that the value may come from."""

    name: String
    value: String | None
    source: Int8


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a setting; None if it is secret."""

    name: String
    value: String | None
    read_only: Bool
    config_source: Int8
    is_sensitive: Bool
    synonyms: tuple[ConfigSynonym, ...]
    config_type: Int8
    documentation: String | None


@dataclass(frozen=True, slots=True)
class DescribedConfig:
    """The settings of one broker or topic."""

    error_code: Int16
    error_message: String | None
    resource_type: Int8
    resource_name: String
    configs: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class DescribeConfigsAnswer(Answer):
    """Settings of brokers and topics."""

    throttle_time_ms: Int32
    results: tuple[DescribedConfig, ...]


@dataclass(frozen=True, slots=True)
class DescribeConfigs(Request[DescribeConfigsAnswer]):
    """Ask for settings, such as ``transaction.max.timeout.ms`` of a broker."""

    KEY: ClassVar[int] = 32
    VERSIONS: ClassVar[tuple[int, ...]] = (4,)
    ANSWER: ClassVar[type[Answer]] = DescribeConfigsAnswer

    resources: tuple[ConfigResource, ...]
    include_synonyms: Bool = False
    include_documentation: Bool = False


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListOffsetsPartition:
    """A partition, and the time whose first offset is wanted (or ``EARLIEST``, ``LATEST``)."""

    partition_index: Int32
    current_leader_epoch: Int32
    timestamp: Int64


@dataclass(frozen=True, slots=True)
class ListOffsetsTopic:
    """Partitions of one topic."""

    name: String
    partitions: tuple[ListOffsetsPartition, ...]


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """The first offset at or after the time; -1: there is none."""

    partition_index: Int32
    error_code: Int16
    timestamp: Int64
    offset: Int64
    leader_epoch: Int32


@dataclass(frozen=True, slots=True)
class ListedTopic:
    """Offsets of one topic."""

    name: String
    partitions: tuple[ListedOffset, ...]


@dataclass(frozen=True, slots=True)
class ListOffsetsAnswer(Answer):
    """Offsets by time."""

    throttle_time_ms: Int32
    topics: tuple[ListedTopic, ...]


@dataclass(frozen=True, slots=True)
class ListOffsets(Request[ListOffsetsAnswer]):
    """Ask for offsets by time. Read-committed, the latest one is the last stable offset."""

    KEY: ClassVar[int] = 2
    VERSIONS: ClassVar[tuple[int, ...]] = (7,)
    ANSWER: ClassVar[type[Answer]] = ListOffsetsAnswer

    replica_id: Int32
    isolation_level: Int8
    topics: tuple[ListOffsetsTopic, ...]


@dataclass(frozen=True, slots=True)
class FetchPartition:
    """From which offset of a partition how much is wanted."""

    partition: Int32
    current_leader_epoch: Int32
    fetch_offset: Int64
    last_fetched_epoch: Int32
    log_start_offset: Int64
    partition_max_bytes: Int32


@dataclass(frozen=True, slots=True)
class FetchTopic:
    """Partitions of one topic."""

    topic_id: Uuid
    partitions: tuple[FetchPartition, ...]


@dataclass(frozen=True, slots=True)
class ForgottenTopic:
    """Partitions that leave a session of fetches."""

    topic_id: Uuid
    partitions: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class DivergingEpoch:
    """Where the log of the leader differs from what was fetched."""

    epoch: Int32
    end_offset: Int64


@dataclass(frozen=True, slots=True)
class CurrentLeader:
    """Which broker leads the partition now."""

    leader_id: Int32
    leader_epoch: Int32


@dataclass(frozen=True, slots=True)
class SnapshotId:
    """Only for the log of metadata."""

    end_offset: Int64
    epoch: Int32


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """Batches of this producer from this offset to its next marker are to be left out."""

    producer_id: Int64
    first_offset: Int64


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """Records of one partition, and how far its log goes."""

    partition_index: Int32
    error_code: Int16
    high_watermark: Int64
    last_stable_offset: Int64
    log_start_offset: Int64
    aborted_transactions: tuple[AbortedTransaction, ...] | None
    preferred_read_replica: Int32
    records: Bytes | None
    diverging_epoch: Annotated[DivergingEpoch | None, Tag(0)] = None
    current_leader: Annotated[CurrentLeader | None, Tag(1)] = None
    snapshot_id: Annotated[SnapshotId | None, Tag(2)] = None


@dataclass(frozen=True, slots=True)
class FetchedTopic:
    """Records of one topic."""

    topic_id: Uuid
    partitions: tuple[FetchedPartition, ...]


@dataclass(frozen=True, slots=True)
class FetchAnswer(Answer):
    """Records."""

    throttle_time_ms: Int32
    error_code: Int16
    session_id: Int32
    responses: tuple[FetchedTopic, ...]


@dataclass(frozen=True, slots=True)
class Fetch(Request[FetchAnswer]):
    """Ask a leader for records, and wait for some (``max_wait_ms``) where there are too few (``min_bytes``)."""

    KEY: ClassVar[int] = 1
    VERSIONS: ClassVar[tuple[int, ...]] = (13,)
    ANSWER: ClassVar[type[Answer]] = FetchAnswer

    replica_id: Int32
    max_wait_ms: Int32
    min_bytes: Int32
    max_bytes: Int32
    isolation_level: Int8
    session_id: Int32
    session_epoch: Int32
    topics: tuple[FetchTopic, ...]
    forgotten_topics_data: tuple[ForgottenTopic, ...] = ()
    rack_id: String = ""
    cluster_id: Annotated[String | None, Tag(0)] = None


# -- offsets of consumer groups ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommitPartition:
    """The offset to remember for a partition, with any text."""

    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Int32
    committed_metadata: String | None


@dataclass(frozen=True, slots=True)
class CommitTopic:
    """Offsets of one topic."""

    name: String
    partitions: tuple[CommitPartition, ...]


@dataclass(frozen=True, slots=True)
class CommittedPartition:
    """How the commit of one offset went."""

    partition_index: Int32
    error_code: Int16


@dataclass(frozen=True, slots=True)
class CommittedTopic:
    """How the commits of one topic went."""

    name: String
    partitions: tuple[CommittedPartition, ...]


@dataclass(frozen=True, slots=True)
class OffsetCommitAnswer(Answer):
    """How commits went."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


@dataclass(frozen=True, slots=True)
class OffsetCommit(Request[OffsetCommitAnswer]):
    """Commit offsets to a group. Without members of the group: generation -1 and no member id."""

    KEY: ClassVar[int] = 8
    VERSIONS: ClassVar[tuple[int, ...]] = (8,)
    ANSWER: ClassVar[type[Answer]] = OffsetCommitAnswer

    group_id: String
    generation_id: Int32
    member_id: String
    group_instance_id: String | None
    topics: tuple[CommitTopic, ...]


@dataclass(frozen=True, slots=True)
class OffsetFetchTopic:
    """Partitions of one topic."""

    name: String
    partition_indexes: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class OffsetFetchGroup:
    """A group, and of which topics its offsets are wanted; None: of all."""

    group_id: String
    topics: tuple[OffsetFetchTopic, ...] | None


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """The committed offset of a partition; -1: there is none."""

    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Int32
    metadata: String | None
    error_code: Int16


@dataclass(frozen=True, slots=True)
class GroupOffsetTopic:
    """Committed offsets of one topic."""

    name: String
    partitions: tuple[GroupOffset, ...]


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Committed offsets of one group."""

    group_id: String
    topics: tuple[GroupOffsetTopic, ...]
    error_code: Int16


@dataclass(frozen=True, slots=True)
class OffsetFetchAnswer(Answer):
    """Committed offsets."""

    throttle_time_ms: Int32
    groups: tuple[GroupOffsets, ...]


@dataclass(frozen=True, slots=True)
class OffsetFetch(Request[OffsetFetchAnswer]):
    """Ask for committed offsets. ``require_stable``: not while a transaction may change them."""

    KEY: ClassVar[int] = 9
    VERSIONS: ClassVar[tuple[int, ...]] = (8,)
    ANSWER: ClassVar[type[Answer]] = OffsetFetchAnswer

    groups: tuple[OffsetFetchGroup, ...]
    require_stable: Bool = False


# -- transactions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InitProducerIdAnswer(Answer):
    """The producer id and epoch to write with."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64
    producer_epoch: Int16
    ongoing_txn_producer_id: Annotated[Int64, Since(6)] = -1
    ongoing_txn_producer_epoch: Annotated[Int16, Since(6)] = -1


@dataclass(frozen=True, slots=True)
class InitProducerId(Request[InitProducerIdAnswer]):
    """Take a transactional id over: what its transaction held is ABORTED, and former producers are fenced."""

    KEY: ClassVar[int] = 22
    VERSIONS: ClassVar[tuple[int, ...]] = (6, 4)
    ANSWER: ClassVar[type[Answer]] = InitProducerIdAnswer

    transactional_id: String | None
    transaction_timeout_ms: Int32
    producer_id: Int64 = -1
    producer_epoch: Int16 = -1
    enable_2pc: Annotated[Bool, Since(6)] = False
    keep_prepared_txn: Annotated[Bool, Since(6)] = False


@dataclass(frozen=True, slots=True)
class TransactionTopic:
    """Partitions of one topic."""

    name: String
    partitions: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class AddedPartition:
    """Whether the partition is part of the transaction."""

    partition_index: Int32
    partition_error_code: Int16


@dataclass(frozen=True, slots=True)
class AddedTopic:
    """Partitions of one topic."""

    name: String
    results_by_partition: tuple[AddedPartition, ...]


@dataclass(frozen=True, slots=True)
class AddPartitionsToTxnAnswer(Answer):
    """Which partitions are part of the transaction."""

    throttle_time_ms: Int32
    results_by_topic: tuple[AddedTopic, ...]


@dataclass(frozen=True, slots=True)
class AddPartitionsToTxn(Request[AddPartitionsToTxnAnswer]):
    """Make partitions part of the transaction without writing to them; version 12 of ``Produce`` does it by itself."""

    KEY: ClassVar[int] = 24
    VERSIONS: ClassVar[tuple[int, ...]] = (3,)
    ANSWER: ClassVar[type[Answer]] = AddPartitionsToTxnAnswer

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[TransactionTopic, ...]


@dataclass(frozen=True, slots=True)
class TxnOffsetCommitAnswer(Answer):
    """How commits went, which count when the transaction is committed."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


@dataclass(frozen=True, slots=True)
class TxnOffsetCommit(Request[TxnOffsetCommitAnswer]):
    """Commit offsets to a group as part of the transaction."""

    KEY: ClassVar[int] = 28
    VERSIONS: ClassVar[tuple[int, ...]] = (5, 3)
    ANSWER: ClassVar[type[Answer]] = TxnOffsetCommitAnswer

    transactional_id: String
    group_id: String
    producer_id: Int64
    producer_epoch: Int16
    generation_id: Int32
    member_id: String
    group_instance_id: String | None
    topics: tuple[CommitTopic, ...]


@dataclass(frozen=True, slots=True)
class ProducePartition:
    """Record batches for one partition."""

    index: Int32
    records: Records | None


@dataclass(frozen=True, slots=True)
class ProduceTopic:
    """Record batches for one topic."""

    name: String
    partition_data: tuple[ProducePartition, ...]


@dataclass(frozen=True, slots=True)
class RecordProblem:
    """Which record the broker refused, and why."""

    batch_index: Int32
    batch_index_error_message: String | None


@dataclass(frozen=True, slots=True)
class ProducedPartition:
    """How the writing to one partition went."""

    index: Int32
    error_code: Int16
    base_offset: Int64
    log_append_time_ms: Int64
    log_start_offset: Int64
    record_errors: tuple[RecordProblem, ...]
    error_message: String | None
    current_leader: Annotated[CurrentLeader | None, Tag(0), Since(10)] = None


@dataclass(frozen=True, slots=True)
class ProducedTopic:
    """How the writing to one topic went."""

    name: String
    partition_responses: tuple[ProducedPartition, ...]


@dataclass(frozen=True, slots=True)
class NodeEndpoint:
    """How to reach a new leader."""

    node_id: Int32
    host: String
    port: Int32
    rack: String | None


@dataclass(frozen=True, slots=True)
class ProduceAnswer(Answer):
    """How the writing went."""

    responses: tuple[ProducedTopic, ...]
    throttle_time_ms: Int32
    node_endpoints: Annotated[tuple[NodeEndpoint, ...], Tag(0), Since(10)] = ()


@dataclass(frozen=True, slots=True)
class Produce(Request[ProduceAnswer]):
    """Write record batches. Version 12 makes the partitions part of the transaction."""

    KEY: ClassVar[int] = 0
    VERSIONS: ClassVar[tuple[int, ...]] = (12, 9)
    ANSWER: ClassVar[type[Answer]] = ProduceAnswer

    transactional_id: String | None
    acks: Int16
    timeout_ms: Int32
    topic_data: tuple[ProduceTopic, ...]


@dataclass(frozen=True, slots=True)
class EndTxnAnswer(Answer):
    """Whether the decision is taken, and from version 5 on what to write the next transaction with."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Annotated[Int64, Since(5)] = -1
    producer_epoch: Annotated[Int16, Since(5)] = -1


@dataclass(frozen=True, slots=True)
class EndTxn(Request[EndTxnAnswer]):
    """Commit or abort the transaction. Version 5 gives it a new epoch, so that it can be repeated."""

    KEY: ClassVar[int] = 26
    VERSIONS: ClassVar[tuple[int, ...]] = (5, 3)
    ANSWER: ClassVar[type[Answer]] = EndTxnAnswer

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    committed: Bool


@dataclass(frozen=True, slots=True)
class TransactionPartitions:
    """Partitions of one topic that take part."""

    topic: String
    partitions: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The state of a transactional id."""

    error_code: Int16
    transactional_id: String
    transaction_state: String
    transaction_timeout_ms: Int32
    transaction_start_time_ms: Int64
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[TransactionPartitions, ...]


@dataclass(frozen=True, slots=True)
class DescribeTransactionsAnswer(Answer):
    """States of transactional ids."""

    throttle_time_ms: Int32
    transaction_states: tuple[TransactionDescription, ...]


@dataclass(frozen=True, slots=True)
class DescribeTransactions(Request[DescribeTransactionsAnswer]):
    """Ask their coordinator for the states of transactional ids. It changes nothing."""

    KEY: ClassVar[int] = 65
    VERSIONS: ClassVar[tuple[int, ...]] = (0,)
    ANSWER: ClassVar[type[Answer]] = DescribeTransactionsAnswer

    transactional_ids: tuple[String, ...]


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """A transactional id with its state."""

    transactional_id: String
    producer_id: Int64
    transaction_state: String


@dataclass(frozen=True, slots=True)
class ListTransactionsAnswer(Answer):
    """Transactional ids of one broker."""

    throttle_time_ms: Int32
    error_code: Int16
    unknown_state_filters: tuple[String, ...]
    transaction_states: tuple[ListedTransaction, ...]


@dataclass(frozen=True, slots=True)
class ListTransactions(Request[ListTransactionsAnswer]):
    """Ask a broker for the transactional ids that it coordinates; filters that are empty let everything pass."""

    KEY: ClassVar[int] = 66
    VERSIONS: ClassVar[tuple[int, ...]] = (0,)
    ANSWER: ClassVar[type[Answer]] = ListTransactionsAnswer

    state_filters: tuple[String, ...] = ()
    producer_id_filters: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A consumer group with its state."""

    group_id: String
    protocol_type: String
    group_state: String


@dataclass(frozen=True, slots=True)
class ListGroupsAnswer(Answer):
    """The consumer groups of one broker."""

    throttle_time_ms: Int32
    error_code: Int16
    groups: tuple[ListedGroup, ...]


@dataclass(frozen=True, slots=True)
class ListGroups(Request[ListGroupsAnswer]):
    """Ask a broker for the consumer groups that it coordinates; a filter that is empty lets everything pass."""

    KEY: ClassVar[int] = 16
    VERSIONS: ClassVar[tuple[int, ...]] = (4,)
    ANSWER: ClassVar[type[Answer]] = ListGroupsAnswer

    states_filter: tuple[String, ...] = ()


@dataclass(frozen=True, slots=True)
class ProducersTopic:
    """Partitions of one topic."""

    name: String
    partition_indexes: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    """A producer that the leader of a partition remembers; -1: it has no open transaction there."""

    producer_id: Int64
    producer_epoch: Int32
    last_sequence: Int32
    last_timestamp: Int64
    coordinator_epoch: Int32
    current_txn_start_offset: Int64


@dataclass(frozen=True, slots=True)
class PartitionProducers:
    """Producers of one partition."""

    partition_index: Int32
    error_code: Int16
    error_message: String | None
    active_producers: tuple[ActiveProducer, ...]


@dataclass(frozen=True, slots=True)
class TopicProducers:
    """Producers of one topic."""

    name: String
    partitions: tuple[PartitionProducers, ...]


@dataclass(frozen=True, slots=True)
class DescribeProducersAnswer(Answer):
    """Producers by partition."""

    throttle_time_ms: Int32
    topics: tuple[TopicProducers, ...]


@dataclass(frozen=True, slots=True)
class DescribeProducers(Request[DescribeProducersAnswer]):
    """Ask leaders for the producers of partitions, and where their open transactions begin."""

    KEY: ClassVar[int] = 61
    VERSIONS: ClassVar[tuple[int, ...]] = (0,)
    ANSWER: ClassVar[type[Answer]] = DescribeProducersAnswer

    topics: tuple[ProducersTopic, ...]
