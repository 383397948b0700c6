"""A client of one Kafka cluster: finds leaders and coordinators, and asks again where waiting may help.

Blocking, for one thread at a time. What can be answered by another broker, or later, is asked again until
``patience_ms`` is over; everything else is one error that says what to do. Never decides about transactions: it carries
out what the sink decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TypeVar
from uuid import UUID

from headgate.codec.kafka.messages import (
    BROKER_RESOURCE,
    GROUP_COORDINATOR,
    READ_COMMITTED,
    TOPIC_RESOURCE,
    TRANSACTION_COORDINATOR,
    AddPartitionsToTxn,
    CommitPartition,
    CommitTopic,
    ConfigResource,
    CreateTopics,
    DescribeConfigs,
    DescribeProducers,
    DescribeTransactions,
    EndTxn,
    FindCoordinator,
    InitProducerId,
    ListedTransaction,
    ListGroups,
    ListOffsets,
    ListOffsetsPartition,
    ListOffsetsTopic,
    ListTransactions,
    Metadata,
    MetadataAnswer,
    MetadataTopic,
    NewTopic,
    OffsetCommit,
    OffsetFetch,
    OffsetFetchGroup,
    OffsetFetchTopic,
    ProducersTopic,
    TopicSetting,
    TransactionDescription,
    TransactionTopic,
    TxnOffsetCommit,
)
from headgate.codec.kafka.wire import COORDINATOR_CHANGED, LEADER_CHANGED, RETRIABLE, Answer, ErrorCode, Request
from headgate.connectors.kafka.connection import Connection, KafkaSecurity, refusal, right_to
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import StorageError, UsageError

PATIENCE_MS = 30_000
"""How long a request is repeated while brokers are away or change their roles."""

ANSWER_MS = 30_000
"""How long one broker may take for an answer."""

BACKOFF_MS_MIN, BACKOFF_MS_MAX = 20, 1_000

COORDINATED_IN = {TRANSACTION_COORDINATOR: "__transaction_state", GROUP_COORDINATOR: "__consumer_offsets"}
"""The topic with the partitions of coordinators."""

COORDINATED_MAX = 480
"""So many partitions are looked at where their number is not known; there are 50 unless brokers are configured so."""

TWO_PHASE_SETTING = "transaction.two.phase.commit.enable"

_A = TypeVar("_A", bound=Answer)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is now.

    Attributes:
        id: another one than that of a former topic of the same name.
        leaders: partition → the node that leads it, or -1.
    """

    name: str
    id: UUID
    leaders: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ProducerIds:
    """With what a producer writes its next transaction."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    """How a broker answered the decision about a transaction.

    Attributes:
        code: ``NONE`` if the decision is taken, also if it had been taken before.
        following: with what the next transaction is written, if the decision is taken.
    """

    code: ErrorCode
    following: ProducerIds


class _AskAgainError(Exception):
    """Waiting may help; the message says what was in the way."""


@dataclass(slots=True)
class _Cluster:
    """What is known of the cluster."""

    nodes: dict[int, tuple[str, int]] = field(default_factory=dict)
    coordinators: dict[tuple[int, str], int] = field(default_factory=dict)


class KafkaClient:
    """See the module.

    Attributes:
        name: the brokers that were given, for errors.
        patience_ms: how long a request is repeated.

    Raises of every method:
        UsageError: the configuration, the names or the rights are wrong; the message says what to change.
        StorageError: the cluster did not do it within ``patience_ms``.
    """

    def __init__(
        self,
        brokers: Sequence[str],
        security: KafkaSecurity | None = None,
        *,
        client_id: str = "headgate",
        environment: Environment = SYSTEM_ENVIRONMENT,
        patience_ms: int = PATIENCE_MS,
    ) -> None:
        self._bootstrap = [_address(one) for one in brokers]
        if not self._bootstrap:
            raise UsageError("no Kafka brokers are given; give brokers='host:9092'")
        self.name = ",".join(brokers)
        self._security, self._client_id = security or KafkaSecurity(), client_id
        self._environment, self.patience_ms = environment, patience_ms
        self._cluster = _Cluster()
        self._connections: dict[int, Connection] = {}
        self._any: Connection | None = None

    def close(self) -> None:
        """Close every connection that ``open`` did not return."""
        for connection in self._connections.values():
            connection.close()
        if self._any is not None:
            self._any.close()
        self._connections, self._any = {}, None

    def cluster_id(self) -> str:
        """Return what tells this cluster from others."""
        return self._patiently("learn about the cluster", lambda: self._metadata(()).cluster_id or "")

    # -- topics

    def topics(self, names: Iterable[str] | None) -> dict[str, Topic]:
        """Return those of the topics that exist and may be seen; None: all topics but internal ones."""
        wanted = None if names is None else tuple(MetadataTopic(name=name) for name in names)

        def attempt() -> dict[str, Topic]:
            found = {}
            for one in self._metadata(wanted).topics:
                code = ErrorCode(one.error_code)
                if code in RETRIABLE:
                    raise _AskAgainError(f"topic '{one.name}': {code.name}")
                if code is ErrorCode.TOPIC_AUTHORIZATION_FAILED and names is not None:
                    raise self._refused(f"see topic '{one.name}'", code)
                if code is ErrorCode.INVALID_TOPIC_EXCEPTION:
                    raise self._refused(f"have a topic '{one.name}'", code)
                if code is ErrorCode.NONE and not one.partitions:  # it is being made
                    raise _AskAgainError(f"topic '{one.name}' has no partitions yet")
                if code is ErrorCode.NONE and one.name is not None and (names is not None or not one.is_internal):
                    leaders = {part.partition_index: part.leader_id for part in one.partitions}
                    found[one.name] = Topic(one.name, one.topic_id, leaders)
            return found

        return self._patiently("list topics", attempt)

    def topic(self, name: str) -> Topic:
        """Return a topic that must exist."""
        if (found := self.topics([name]).get(name)) is None:
            raise UsageError(f"Kafka at {self.name} has no topic '{name}'; create it, or name another one")
        return found

    def create_topic(
        self, name: str, partitions: int = -1, replication: int = -1, settings: Mapping[str, str] | None = None
    ) -> Topic:
        """Create a topic, unless it is there; return it once it can be used. -1: as the brokers' defaults say."""
        wanted = tuple(TopicSetting(key, value) for key, value in (settings or {}).items())
        new = NewTopic(name, partitions, replication, configs=wanted)

        def attempt() -> Topic:
            (result,) = self._ask_any(CreateTopics((new,), ANSWER_MS)).topics
            code = ErrorCode(result.error_code)
            if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
                raise self._retry_or_refuse(f"create topic '{name}'", code, result.error_message)
            found = self.topics([name]).get(name)
            if found is None or -1 in found.leaders.values():
                raise _AskAgainError(f"topic '{name}' has no leaders yet")
            return found

        return self._patiently(f"create topic '{name}'", attempt)

    def setting(self, name: str, topic: str | None = None) -> str | None:
        """Return a setting of a topic, or of a broker; None if it has none, or it is secret."""

        def attempt() -> str | None:
            self._known_nodes()
            node = min(self._cluster.nodes)
            kind, resource = (BROKER_RESOURCE, str(node)) if topic is None else (TOPIC_RESOURCE, topic)
            request = DescribeConfigs((ConfigResource(kind, resource, (name,)),))
            (result,) = self._ask(node, request).results
            if result.error_code:
                what = f"read setting {name} of {'a broker' if topic is None else repr(topic)}"
                raise self._retry_or_refuse(what, ErrorCode(result.error_code), result.error_message)
            return next((one.value for one in result.configs if one.name == name), None)

        return self._patiently(f"read setting {name}", attempt)

    def number_setting(self, name: str, default: int, topic: str | None = None) -> int:
        """Return a setting that is a number; ``default`` if the client may not read settings, or there is none."""
        try:
            found = self.setting(name, topic)
        except UsageError:
            return default
        return int(found) if found is not None and found.isdigit() else default

    def feature_level(self, name: str) -> int:
        """Return the level of a feature at which the cluster runs, such as ``transaction.version``; 0: it lacks it."""

        def attempt() -> int:
            features = self._some_connection().capabilities.finalized_features
            return next((one.max_version_level for one in features if one.name == name), 0)

        return self._patiently("learn what the brokers can do", attempt)

    # -- offsets

    def list_offsets(
        self, topic: Topic, timestamps: Mapping[int, int], isolation: int = READ_COMMITTED
    ) -> dict[int, int]:
        """Return the first offset at or after a time for each partition; -1 where there is none.

        Args:
            timestamps: partition → milliseconds, or ``EARLIEST``, ``LATEST``.
        """

        def asked(node: int, wanted: Sequence[int]) -> dict[int, int]:
            partitions = tuple(ListOffsetsPartition(part, -1, timestamps[part]) for part in wanted)
            request = ListOffsets(-1, isolation, (ListOffsetsTopic(topic.name, partitions),))
            found = {}
            for one in self._ask(node, request).topics[0].partitions:
                if code := ErrorCode(one.error_code):
                    what = f"find offsets of partition {one.partition_index} of topic '{topic.name}'"
                    raise self._retry_or_refuse(what, code)
                found[one.partition_index] = one.offset
            return found

        return self._from_leaders(f"find offsets of topic '{topic.name}'", topic, list(timestamps), asked)

    def open_transactions(self, topic: Topic, partitions: Sequence[int]) -> dict[int, dict[int, int]]:
        """Return where transactions that are open in partitions begin: partition → producer id → offset.

        The leader of a partition is asked, not the coordinators of the transactions.
        """

        def asked(node: int, wanted: Sequence[int]) -> dict[int, dict[int, int]]:
            request = DescribeProducers((ProducersTopic(topic.name, tuple(wanted)),))
            found = {}
            for one in self._ask(node, request).topics[0].partitions:
                if code := ErrorCode(one.error_code):
                    what = f"see the producers of partition {one.partition_index} of topic '{topic.name}'"
                    raise self._retry_or_refuse(what, code, one.error_message, f"Read on topic '{topic.name}'")
                found[one.partition_index] = {
                    producer.producer_id: producer.current_txn_start_offset
                    for producer in one.active_producers
                    if producer.current_txn_start_offset >= 0
                }
            return found

        return self._from_leaders(f"see the producers of topic '{topic.name}'", topic, partitions, asked)

    def _from_leaders(
        self, what: str, topic: Topic, partitions: Sequence[int], asked: Callable[[int, Sequence[int]], dict[int, _T]]
    ) -> dict[int, _T]:
        """Return what leaders say of partitions. Each is asked for its own, and again where the leader has changed."""
        found: dict[int, _T] = {}
        known: Topic | None = topic

        def attempt() -> dict[int, _T]:
            nonlocal known
            # what the caller knows of leaders is good for the first try
            now, known = known or self.topic(topic.name), None
            for node, wanted in _by_leader(now, [part for part in partitions if part not in found]).items():
                found.update(asked(node, wanted))
            return found

        return self._patiently(what, attempt)

    def committed_offsets(
        self, group: str, topic: str, partitions: Sequence[int], *, is_stable: bool = True
    ) -> dict[int, tuple[int, str]]:
        """Return what a group has committed: partition → offset and text, where there is something.

        ``is_stable``: wait for the end of transactions that may change it.
        """
        request = OffsetFetch((OffsetFetchGroup(group, (OffsetFetchTopic(topic, tuple(partitions)),)),), is_stable)

        def attempt() -> dict[int, tuple[int, str]]:
            (result,) = self._ask_coordinator(GROUP_COORDINATOR, group, request).groups
            parts = [one for of_topic in result.topics for one in of_topic.partitions]
            for code in map(ErrorCode, [result.error_code, *(one.error_code for one in parts)]):
                if code:
                    what = f"read offsets of group '{group}'"
                    raise self._coordinator_problem(GROUP_COORDINATOR, group, what, code, topic)
            return {p.partition_index: (p.committed_offset, p.metadata or "") for p in parts if p.committed_offset >= 0}

        return self._patiently(f"read offsets of group '{group}'", attempt)

    def committed_by(self, groups: Sequence[str], partition: int) -> dict[tuple[str, str], int]:
        """Return the offsets that groups have committed for a partition, by group and topic, where there is one.

        Transactions that may change it are not waited for.
        """

        def attempt() -> dict[tuple[str, str], int]:
            found = {}
            for node, names in self._coordinators(GROUP_COORDINATOR, groups).items():
                for group in self._ask(node, OffsetFetch(tuple(OffsetFetchGroup(name, None) for name in names))).groups:
                    if code := ErrorCode(group.error_code):
                        raise self._retry_or_refuse(
                            f"read offsets of group '{group.group_id}'",
                            code,
                            right=right_to(GROUP_COORDINATOR, group.group_id),
                        )
                    for topic in group.topics:
                        for one in topic.partitions:
                            if one.partition_index == partition and one.committed_offset >= 0:
                                found[group.group_id, topic.name] = one.committed_offset
            return found

        return self._patiently("read offsets of groups", attempt) if groups else {}

    def list_groups(self, prefix: str) -> list[str]:
        """Return all consumer groups that begin with ``prefix``; the client needs a right to such groups."""

        def listed(node: int) -> Iterable[str]:
            answer = self._ask(node, ListGroups())
            if code := ErrorCode(answer.error_code):
                raise self._retry_or_refuse("list groups", code)
            return [one.group_id for one in answer.groups if one.group_id.startswith(prefix)]

        return sorted(self._patiently("list groups", lambda: self._listed_by_all(GROUP_COORDINATOR, prefix, listed)))

    def commit_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets to a group that has no members, for people and monitoring."""
        parts = tuple(CommitPartition(partition, offset, -1, None) for partition, offset in offsets.items())
        request = OffsetCommit(group, -1, "", None, (CommitTopic(topic, parts),))

        def attempt() -> None:
            for one in self._ask_coordinator(GROUP_COORDINATOR, group, request).topics[0].partitions:
                if code := ErrorCode(one.error_code):
                    what = f"commit to group '{group}'"
                    raise self._coordinator_problem(GROUP_COORDINATOR, group, what, code, topic)

        self._patiently(f"commit to group '{group}'", attempt)

    # -- transactions

    def take_over(self, transactional_id: str, timeout_ms: int, *, has_no_timeout: bool = False) -> ProducerIds:
        """Become the producer of ``transactional_id``: what its transaction held is ABORTED, former ones are fenced.

        ``has_no_timeout``: prepared transactions are never aborted by the broker; it must have KIP-939 enabled.
        """
        request = InitProducerId(transactional_id, timeout_ms, enable_2pc=has_no_timeout)

        def attempt() -> ProducerIds:
            connection = self._coordinator(TRANSACTION_COORDINATOR, transactional_id)
            # older versions have no field for it: the transaction would get a timeout in silence
            if has_no_timeout and connection.version_of(request) < request.VERSIONS[0]:
                raise self._lacks_two_phase_commit()
            answer = self._ask_through(connection, request)
            if code := ErrorCode(answer.error_code):
                what = f"use transactional id '{transactional_id}'"
                if has_no_timeout and code is ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                    beginning = transactional_id.partition(":")[0]
                    both = f"Write and for TwoPhaseCommit on transactional ids that begin with '{beginning}'"
                    raise self._retry_or_refuse(what, code, right=both)
                raise self._coordinator_problem(TRANSACTION_COORDINATOR, transactional_id, what, code)
            return ProducerIds(answer.producer_id, answer.producer_epoch)

        return self._patiently(f"use transactional id '{transactional_id}'", attempt)

    def check_two_phase_commit(self) -> None:
        """Check that brokers keep prepared transactions without a timeout (KIP-939), as far as the client may see it.

        Raises:
            UsageError: they do not.
        """
        request = InitProducerId(None, ANSWER_MS)
        version = self._patiently("learn what the brokers can do", lambda: self._some_connection().version_of(request))
        try:
            is_on = self.setting(TWO_PHASE_SETTING) != "false"
        except UsageError:
            is_on = True  # the client has no right to see settings; the first transaction finds it
        if version < request.VERSIONS[0] or not is_on:
            raise self._lacks_two_phase_commit()

    def check_two_phase_right(self, prefix: str) -> None:
        """Check that the user has the right to it for ids that begin with ``prefix``, by using one of them.

        Raises:
            UsageError: the user may not, or brokers do not keep prepared transactions.
        """
        self.take_over(f"{prefix}:two-phase-commit", ANSWER_MS, has_no_timeout=True)

    def _lacks_two_phase_commit(self) -> UsageError:
        return UsageError(
            f"Kafka at {self.name} does not take part in two-phase commit: set {TWO_PHASE_SETTING} and "
            "unstable.api.versions.enable on the brokers, or let prepared transactions have a timeout"
        )

    def new_producer(self) -> ProducerIds:
        """Return ids for a producer without transactions, each of whose records is written once."""

        def attempt() -> ProducerIds:
            answer = self._ask_any(InitProducerId(None, ANSWER_MS))
            if code := ErrorCode(answer.error_code):
                raise self._retry_or_refuse("write", code, right="Write on the topic")
            return ProducerIds(answer.producer_id, answer.producer_epoch)

        return self._patiently("begin to write", attempt)

    def describe_transaction(self, transactional_id: str) -> TransactionDescription | None:
        """Return the state of a transactional id, or None if its coordinator does not know it. Changes nothing."""

        def attempt() -> TransactionDescription | None:
            request = DescribeTransactions((transactional_id,))
            (one,) = self._ask_coordinator(TRANSACTION_COORDINATOR, transactional_id, request).transaction_states
            code = ErrorCode(one.error_code)
            if code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                return None
            if code:
                what = f"see transactional id '{transactional_id}'"
                raise self._coordinator_problem(TRANSACTION_COORDINATOR, transactional_id, what, code)
            return one

        return self._patiently(f"see transactional id '{transactional_id}'", attempt)

    def list_transactions(self, prefix: str) -> list[ListedTransaction]:
        """Return all transactional ids that begin with ``prefix``; the client needs a right to such ids."""

        def listed(node: int) -> Iterable[ListedTransaction]:
            answer = self._ask(node, ListTransactions())
            if code := ErrorCode(answer.error_code):
                raise self._retry_or_refuse("list transactions", code)
            return [one for one in answer.transaction_states if one.transactional_id.startswith(prefix)]

        def attempt() -> list[ListedTransaction]:
            return self._listed_by_all(TRANSACTION_COORDINATOR, prefix, listed)

        return sorted(self._patiently("list transactions", attempt), key=lambda one: one.transactional_id)

    def wait_for_markers(self, transactional_ids: Sequence[str]) -> None:
        """Wait until transactions that were committed are visible: brokers decide first, and then tell partitions."""
        left = list(transactional_ids)

        def attempt() -> None:
            for node, names in self._coordinators(TRANSACTION_COORDINATOR, left).items():
                for one in self._ask(node, DescribeTransactions(tuple(names))).transaction_states:
                    name, code = one.transactional_id, ErrorCode(one.error_code)
                    if code and code is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                        raise self._retry_or_refuse(f"see transactional id '{name}'", code)
                    # also an id that is not known (any more): there is nothing to wait for
                    if one.transaction_state != "PrepareCommit":
                        left.remove(name)
            if left:
                raise _AskAgainError(f"transaction '{left[0]}' is committed, and its partitions do not have that yet")

        if left:
            self._patiently("make records visible", attempt)

    def end_transaction(self, transactional_id: str, producer: ProducerIds, *, commit: bool) -> EndedTransaction:
        """Decide a transaction, from any process. The broker's answer is returned where it is not to ask again.

        With feature ``transaction.version`` 2 it may be repeated: the same decision about the same transaction gives
        ``NONE`` again.
        """
        request = EndTxn(transactional_id, producer.producer_id, producer.producer_epoch, commit)

        def attempt() -> EndedTransaction:
            answer = self._ask_coordinator(TRANSACTION_COORDINATOR, transactional_id, request)
            code = ErrorCode(answer.error_code)
            if code in RETRIABLE:
                what = f"end the transaction of '{transactional_id}'"
                raise self._coordinator_problem(TRANSACTION_COORDINATOR, transactional_id, what, code)
            return EndedTransaction(code, ProducerIds(answer.producer_id, answer.producer_epoch))

        return self._patiently(f"end the transaction of '{transactional_id}'", attempt)

    def add_partitions(
        self, transactional_id: str, producer: ProducerIds, partitions: Mapping[str, Sequence[int]]
    ) -> None:
        """Make partitions of topics part of the transaction, without writing to them; it begins if none is open."""
        topics = tuple(TransactionTopic(name, tuple(parts)) for name, parts in partitions.items())
        request = AddPartitionsToTxn(transactional_id, producer.producer_id, producer.producer_epoch, topics)
        what = f"use transactional id '{transactional_id}'"

        def attempt() -> None:
            answer = self._ask_coordinator(TRANSACTION_COORDINATOR, transactional_id, request)
            for topic in answer.results_by_topic:
                for one in topic.results_by_partition:
                    if code := ErrorCode(one.partition_error_code):
                        raise self._coordinator_problem(TRANSACTION_COORDINATOR, transactional_id, what, code)

        self._patiently(what, attempt)

    def commit_in_transaction(
        self,
        transactional_id: str,
        producer: ProducerIds,
        group: str,
        topic: str,
        offsets: Mapping[int, tuple[int, str]],
    ) -> None:
        """Commit offsets with texts to a group as part of the open transaction: they count once it is committed."""
        parts = tuple(CommitPartition(part, offset, -1, text) for part, (offset, text) in offsets.items())
        request = TxnOffsetCommit(
            transactional_id,
            group,
            producer.producer_id,
            producer.producer_epoch,
            -1,
            "",
            None,
            (CommitTopic(topic, parts),),
        )

        def attempt() -> None:
            for one in self._ask_coordinator(GROUP_COORDINATOR, group, request).topics[0].partitions:
                if code := ErrorCode(one.error_code):
                    what = f"commit to group '{group}' in a transaction"
                    raise self._coordinator_problem(GROUP_COORDINATOR, group, what, code, topic)

        self._patiently(f"commit to group '{group}' in a transaction", attempt)

    # -- connections

    def open(self, node: int) -> Connection:
        """Return a connection of the caller's own to a node, for requests that wait long or are many."""

        def attempt() -> Connection:
            return self._connect_to(node)

        return self._patiently(f"reach broker {node}", attempt)

    def _connect_to(self, node: int) -> Connection:
        if node not in self._cluster.nodes:
            self._metadata(())
        if node not in self._cluster.nodes:
            raise _AskAgainError(f"broker {node} is not there")
        return self._connect(*self._cluster.nodes[node])

    def _connect(self, host: str, port: int) -> Connection:
        return Connection(
            host,
            port,
            self._security,
            client_id=self._client_id,
            environment=self._environment,
            timeout_ms=min(ANSWER_MS, self.patience_ms),
        )

    def _some_connection(self) -> Connection:
        """Return a connection to any broker: of those that are known, or that were given."""
        if self._any is not None and not self._any.is_closed:
            return self._any
        failures: list[str] = []
        for host, port in [*self._cluster.nodes.values(), *self._bootstrap]:
            try:
                self._any = self._connect(host, port)
                return self._any
            except StorageError as error:
                if not error.is_transient:
                    raise
                failures.append(f"{host}:{port}: {error.cause}")
        raise _AskAgainError(f"{'; '.join(dict.fromkeys(failures))}; check the addresses of the brokers")

    def _known_nodes(self) -> None:
        if not self._cluster.nodes:
            self._metadata(())

    def _metadata(self, topics: tuple[MetadataTopic, ...] | None) -> MetadataAnswer:
        answer = self._ask_any(Metadata(topics))
        if not answer.brokers:  # they have just started; what is asked of each of them would be asked of none
            raise _AskAgainError("no broker of the cluster is known yet")
        self._cluster.nodes = {one.node_id: (one.host, one.port) for one in answer.brokers}
        return answer

    def _ask_any(self, request: Request[_A]) -> _A:
        return self._ask_through(self._some_connection(), request)

    def _ask(self, node: int, request: Request[_A]) -> _A:
        return self._ask_through(self._connection_to(node), request)

    def _connection_to(self, node: int) -> Connection:
        """Return the connection to a node; the one that asks for metadata, if it leads there."""
        if self._any is not None and not self._any.is_closed and self._cluster.nodes.get(node) == self._any.peer:
            return self._any
        connection = self._connections.get(node)
        if connection is None or connection.is_closed:
            connection = self._connections[node] = self._connect_to(node)
        return connection

    def _ask_through(self, connection: Connection, request: Request[_A]) -> _A:
        return connection.ask(request, ANSWER_MS)

    def _coordinator(self, kind: int, key: str) -> Connection:
        if (node := self._cluster.coordinators.get((kind, key))) is None:
            (node,) = self._coordinators(kind, [key])
            self._cluster.coordinators[kind, key] = node
        return self._connection_to(node)

    def _ask_coordinator(self, kind: int, key: str, request: Request[_A]) -> _A:
        return self._ask_through(self._coordinator(kind, key), request)

    def _coordinators(self, kind: int, keys: Sequence[str]) -> dict[int, list[str]]:
        """Return which of ``keys`` each node coordinates now."""
        found: dict[int, list[str]] = {}
        for one in self._ask_any(FindCoordinator(kind, tuple(keys))).coordinators:
            if code := ErrorCode(one.error_code):
                what = f"use {'group' if kind == GROUP_COORDINATOR else 'transactional id'} '{one.key}'"
                raise self._retry_or_refuse(what, code, one.error_message, right_to(kind, one.key))
            self._cluster.nodes[one.node_id] = one.host, one.port
            found.setdefault(one.node_id, []).append(one.key)
        return found

    def _listed_by_all(self, kind: int, prefix: str, listed: Callable[[int], Iterable[_T]]) -> list[_T]:
        """Return what all coordinators list, if none lists less than it has to.

        A broker lists what it has loaded, and does not say so if it has not begun to load: when it has just started, or
        when coordinators move. Therefore each of them is asked for something, before and after.
        """
        topics = self._metadata((MetadataTopic(name=COORDINATED_IN[kind]),)).topics
        # 0: it is not there yet, or the user has no right to see it
        count = max((len(one.partitions) for one in topics), default=0) or COORDINATED_MAX
        asked = probes(prefix, count)
        before = self._loaded(kind, asked)
        found = [one for node in sorted({*self._cluster.nodes, *before}) for one in listed(node)]
        if self._loaded(kind, asked) != before:
            raise _AskAgainError("coordinators move between brokers")
        return found

    def _loaded(self, kind: int, asked: Sequence[str]) -> dict[int, list[str]]:
        """Return which node coordinates which probe; ask again unless each of them answers as coordinator."""
        found = self._coordinators(kind, asked)
        for node, keys in found.items():
            if kind == GROUP_COORDINATOR:
                groups = self._ask(node, OffsetFetch(tuple(OffsetFetchGroup(key, ()) for key in keys))).groups
                codes = [one.error_code for one in groups]
            else:
                codes = [
                    one.error_code for one in self._ask(node, DescribeTransactions(tuple(keys))).transaction_states
                ]
            for key, code in zip(keys, map(ErrorCode, codes), strict=True):
                if code not in (ErrorCode.NONE, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND):
                    what = f"ask for {'groups' if kind == GROUP_COORDINATOR else 'transactions'}"
                    raise self._retry_or_refuse(what, code, right=right_to(kind, key))
        return found

    # -- patience

    def _patiently(self, what: str, attempt: Callable[[], _T]) -> _T:
        """Return what ``attempt`` does, which is repeated while it fails for a time only."""
        deadline_ms = self._environment.monotonic_ms() + self.patience_ms
        pause_ms = BACKOFF_MS_MIN
        while True:
            try:
                return attempt()
            except _AskAgainError as error:
                reason = str(error)
            except StorageError as error:
                if not error.is_transient:
                    raise
                reason = error.cause
                # with a broker its coordinators move to others
                self._cluster.coordinators.clear()
            left_ms = deadline_ms - self._environment.monotonic_ms()
            if left_ms <= 0:
                raise StorageError(what, f"in Kafka at {self.name}", reason) from None
            self._environment.sleep(min(pause_ms, left_ms) / 1000)
            pause_ms = min(2 * pause_ms, BACKOFF_MS_MAX)

    def _coordinator_problem(self, kind: int, key: str, what: str, code: ErrorCode, topic: str = "") -> Exception:
        if code in COORDINATOR_CHANGED:
            self._cluster.coordinators.pop((kind, key), None)
        is_topic = code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return self._retry_or_refuse(what, code, right=f"Read on topic '{topic}'" if is_topic else right_to(kind, key))

    def _retry_or_refuse(self, what: str, code: ErrorCode, message: str | None = None, right: str = "") -> Exception:
        if code in RETRIABLE or code in LEADER_CHANGED:
            return _AskAgainError(code.name)
        return refusal(what, self.name, code, message, right)

    def _refused(self, what: str, code: ErrorCode) -> Exception:
        return refusal(what, self.name, code)


def _by_leader(topic: Topic, partitions: Sequence[int]) -> dict[int, list[int]]:
    """Return which of the partitions each node leads."""
    found: dict[int, list[int]] = {}
    for partition in partitions:
        if (node := topic.leaders.get(partition, -1)) < 0:
            raise _AskAgainError(f"partition {partition} of topic '{topic.name}' has no leader")
        found.setdefault(node, []).append(partition)
    return found


def probes(prefix: str, partitions: int) -> tuple[str, ...]:
    """Return keys that begin with ``prefix`` and lie in all ``partitions`` of coordinators, up to 14,896 of them.

    The partition is the hash of Java's strings, modulo their number: last characters count 961 times, 31 times and
    once, so these keys have hashes that follow each other, but for one step where they are negative. On one side of it
    are as many as there are partitions.
    """
    digits = [chr(ord("A") + number) for number in range(31)]
    keys = (prefix + "".join(last) for last in itertools.product(digits, repeat=3))
    return tuple(itertools.islice(keys, 2 * partitions - 1))


def addresses(brokers: object) -> list[str]:
    """Return the addresses in the option ``brokers``.

    Raises:
        UsageError: it is no text.
    """
    if not isinstance(brokers, str):
        raise UsageError(f"brokers={brokers!r} must be one text with commas, such as 'kafka-1:9092,kafka-2:9092'")
    return brokers.split(",")


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{text!r} is no address of a Kafka broker; write it as host:port, such as 'kafka-1:9092'")
    return host.strip("[]"), int(port)
