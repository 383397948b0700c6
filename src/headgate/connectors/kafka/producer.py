"""Writes Arrow columns to partitions as one producer: pipelined, in order, each record once.

Brokers know every batch by (producer id, epoch, sequence), so that one whose answer was lost is sent again without
being written twice. Outside of transactions brokers forget a producer whose last record has a timestamp that is older
than ``producer.id.expiration.ms`` (a day), and may then write a batch twice; an open transaction is not forgotten.
Within a transaction the records become visible with it; ``KafkaClient`` ends it. ``flush`` is what prepares a
transaction: when it returns, brokers have acknowledged everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.codec.kafka.messages import Produce, ProduceAnswer, ProducePartition, ProduceTopic
from headgate.codec.kafka.record_batch import Compression
from headgate.codec.kafka.record_encoder import (
    BATCH_BYTES_MAX,
    EncodedBatch,
    ProducerState,
    RecordTooLargeError,
    encode_records,
)
from headgate.codec.kafka.wire import RETRIABLE, ErrorCode
from headgate.connectors.kafka.client import (
    ANSWER_MS,
    BACKOFF_MS_MAX,
    BACKOFF_MS_MIN,
    KafkaClient,
    ProducerIds,
    Topic,
)
from headgate.connectors.kafka.connection import Connection, refusal, wait_any
from headgate.connectors.kafka.fetcher import Partition
from headgate.dataclass import dataclass
from headgate.environment import Environment
from headgate.errors import StorageError, UsageError

IN_FLIGHT_MAX = 5
"""Requests to one leader that are not answered: brokers remember the last five batches of a producer."""

REQUEST_BYTES_MAX = 16 << 20
NAMED_BYTES_MAX = 60
"""Of a record in an error."""
BUFFERED_BYTES_MAX = 16 << 20
"""What waits for acknowledgements before ``write`` waits, too. A barrier waits until all of it is acknowledged."""

_AGAIN = RETRIABLE | {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
"""A topic that was just created may be unknown to its leader."""


@dataclass(slots=True)
class _Queue:
    """The batches of one partition, in order."""

    sequence: int = 0
    waiting: deque[EncodedBatch] = field(default_factory=deque)
    in_flight: deque[EncodedBatch] = field(default_factory=deque)
    failed: list[EncodedBatch] = field(default_factory=list)
    """To be sent again in front of what waits, once nothing is in flight."""
    first_offset: int = -1
    """Of what was written since the transaction began; -1: nothing is acknowledged yet."""
    is_known: bool = False
    """Whether the leader has taken a batch. Until then it would take a later one in place of one that failed."""

    @property
    def may_send(self) -> bool:
        """Whether another batch may follow those in flight."""
        return bool(self.waiting) and not self.failed and (self.is_known or not self.in_flight)


class Producer:
    """Writes to topics, from one thread.

    Raises of every method:
        FencedError: a newer producer took the transactional id over.
        UsageError: a topic is not there, the rights are missing, a record is too large.
        StorageError: brokers did not acknowledge within the patience of ``client``.
    """

    def __init__(
        self,
        client: KafkaClient,
        environment: Environment,
        topics: Mapping[str, Topic],
        producer: ProducerIds,
        transactional_id: str | None = None,
        *,
        compression: Compression = Compression.NONE,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        patience_ms: int = 120_000,
    ) -> None:
        self._client, self._environment, self._patience_ms = client, environment, patience_ms
        self._producer, self._transactional_id = producer, transactional_id
        self._compression, self._batch_bytes_max = compression, batch_bytes_max
        self._leaders = {(name, part): node for name, topic in topics.items() for part, node in topic.leaders.items()}
        self._queues: dict[Partition, _Queue] = {}
        self._connections: dict[int, Connection] = {}
        self._sent: dict[int, deque[tuple[int, list[Partition]]]] = {}
        """Node → when each request was sent that is not answered, and for which partitions."""
        self._buffered_bytes = 0
        self._pause_ms = BACKOFF_MS_MIN
        self._progress_ms = environment.monotonic_ms()
        self._problem = ""

    def begin(self, producer: ProducerIds) -> None:
        """Go on as ``producer``, in its next transaction. Everything must be flushed."""
        assert not self._buffered_bytes, "a transaction begins before the former one is flushed"
        if producer != self._producer:
            self._producer = producer
            self._queues.clear()  # sequences begin at 0 with every epoch

    def add(self, topics: Mapping[str, Topic]) -> None:
        """Write to these topics, too; what is known of a topic stays."""
        for name, topic in topics.items():
            for part, node in topic.leaders.items():
                self._leaders.setdefault((name, part), node)

    def write(
        self,
        partition: Partition,
        value: pa.Array,
        timestamps_ms: npt.NDArray[np.int64],
        key: pa.Array | None = None,
        headers: pa.Array | None = None,
        batch_bytes_max: int = 0,
    ) -> None:
        """Have records written. Waits only while too much is unacknowledged.

        ``batch_bytes_max``: what the topic takes; 0: what the producer was made with.
        """
        if partition not in self._leaders:
            raise UsageError(f"topic '{partition[0]}' has no partition {partition[1]}")
        queue = self._queues.setdefault(partition, _Queue())
        ids = self._producer
        state = ProducerState(ids.producer_id, ids.producer_epoch, queue.sequence, self._transactional_id is not None)
        limit = batch_bytes_max or self._batch_bytes_max
        try:
            # sequences are fixed here: a batch that is sent again has the same, by which brokers know it
            batches = encode_records(
                value,
                timestamps_ms,
                key,
                headers,
                producer=state,
                compression=self._compression,
                batch_bytes_max=limit,
            )
        except RecordTooLargeError as error:
            raise UsageError(
                f"topic '{partition[0]}' takes no record as large as {_beginning(value, key, error.row)}: it has "
                f"{error.size_bytes:,} bytes, and at most {limit:,} are taken; raise max.message.bytes of the topic, "
                "or leave such records out before the sink"
            ) from error
        # nothing was awaited: a pause of the input is no lack of progress
        if not self._buffered_bytes:
            self._progress_ms = self._environment.monotonic_ms()
        for batch in batches:
            queue.waiting.append(batch)
            queue.sequence = (queue.sequence + batch.records_count) % (1 << 31)
            self._buffered_bytes += batch.size_bytes
        self._move(0)
        while self._buffered_bytes > BUFFERED_BYTES_MAX:
            self._move(BACKOFF_MS_MAX)

    def flush(self) -> None:
        """Wait until everything is acknowledged."""
        while self._buffered_bytes:
            self._move(BACKOFF_MS_MAX)
        assert not any(map(_is_busy, self._queues.values())), "a batch waits, and no bytes do"

    def first_offsets(self) -> dict[str, dict[int, int]]:
        """Return the offset of the first record of the transaction by topic and partition, as far as acknowledged."""
        found: dict[str, dict[int, int]] = {}
        for (topic, partition), queue in self._queues.items():
            if queue.first_offset >= 0:
                found.setdefault(topic, {})[partition] = queue.first_offset
        return found

    def close(self) -> None:
        """Close the connections; what is not acknowledged may be written or not."""
        for connection in self._connections.values():
            connection.close()

    def _move(self, timeout_ms: int) -> None:
        """Send what may be sent, and take the answers that have come, waiting for one at most ``timeout_ms``."""
        self._send()
        if not self._take_answers() and timeout_ms:
            if self._environment.monotonic_ms() - self._progress_ms > self._patience_ms:
                what = ", ".join(sorted({name for (name, _), queue in self._queues.items() if _is_busy(queue)}))
                problem = self._problem or "no answer"
                raise StorageError(
                    "write to", f"topic {what}", f"not acknowledged in {self._patience_ms} ms: {problem}"
                )
            waiting = [self._connections[node] for node, sent in self._sent.items() if sent]
            if waiting:
                wait_any(waiting, timeout_ms)
            else:
                self._find_leaders()
        self._send()

    def _send(self) -> None:
        by_node: dict[int, list[Partition]] = {}
        for partition, queue in self._queues.items():
            if queue.failed and not queue.in_flight:
                # all answers are in: the batches go out again in the order of their sequences
                queue.waiting.extendleft(reversed(queue.failed))
                queue.failed.clear()
            if queue.may_send and self._leaders[partition] >= 0:
                by_node.setdefault(self._leaders[partition], []).append(partition)
        for node, partitions in by_node.items():
            while partitions and len(self._sent.setdefault(node, deque())) < IN_FLIGHT_MAX:
                self._send_one(node, partitions)
                partitions = [one for one in partitions if self._queues[one].may_send and self._leaders[one] == node]

    def _send_one(self, node: int, partitions: list[Partition]) -> None:
        """Send one request with the next batch of each partition."""
        taken: list[Partition] = []
        size = 0
        data: dict[str, list[ProducePartition]] = {}
        for partition in partitions:
            batch = self._queues[partition].waiting[0]
            if taken and size + batch.size_bytes > REQUEST_BYTES_MAX:
                break
            size += batch.size_bytes
            taken.append(partition)
            data.setdefault(partition[0], []).append(ProducePartition(partition[1], batch.parts))
        topics = tuple(ProduceTopic(name, tuple(parts)) for name, parts in data.items())
        for partition in taken:
            queue = self._queues[partition]
            queue.in_flight.append(queue.waiting.popleft())
        # noted before it is sent: if sending fails, ``_lost`` finds here what has to be sent again
        self._sent[node].append((self._environment.monotonic_ms(), taken))
        try:
            connection = self._connections.get(node)
            if connection is None or connection.is_closed:
                connection = self._connections[node] = self._client.open(node)
            connection.send(Produce(self._transactional_id, -1, ANSWER_MS, topics))
        except StorageError as error:
            self._lost(node, error)

    def _take_answers(self) -> bool:
        """Return whether an answer had come."""
        has_some = False
        for node in list(self._sent):
            while self._sent.get(node):
                try:
                    answer: ProduceAnswer | None = self._connections[node].receive(0)
                except StorageError as error:
                    self._lost(node, error)
                    break
                if answer is None:
                    # the broker itself gives up after ANSWER_MS
                    if self._environment.monotonic_ms() - self._sent[node][0][0] > 2 * ANSWER_MS:
                        problem = StorageError("write", f"to broker {node} of Kafka", "it does not answer")
                        self._lost(node, problem)
                    break
                has_some = True
                self._sent[node].popleft()
                self._take(answer)
        return has_some

    def _take(self, answer: ProduceAnswer) -> None:
        for of_topic in answer.responses:
            for part in of_topic.partition_responses:
                partition = (of_topic.name, part.index)
                queue = self._queues[partition]
                # a broker answers in the order of requests, and a request has one batch of a partition
                batch = queue.in_flight.popleft()
                code = ErrorCode(part.error_code)
                # batches that follow a failed one are out of order
                follows = code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and bool(queue.failed)
                if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                    self._buffered_bytes -= batch.size_bytes
                    queue.is_known = True
                    if queue.first_offset < 0:
                        queue.first_offset = part.base_offset
                    self._progress_ms, self._pause_ms = self._environment.monotonic_ms(), BACKOFF_MS_MIN
                elif code in _AGAIN or follows:
                    queue.failed.append(batch)
                    self._leaders[partition] = -1
                    self._problem = code.name
                else:
                    raise self._refused(partition, batch, code, part.error_message)

    def _refused(self, partition: Partition, batch: EncodedBatch, code: ErrorCode, message: str | None) -> Exception:
        what = f"write to partition {partition[1]} of topic '{partition[0]}'"
        if code in (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE):
            return UsageError(
                f"cannot {what}: it takes no batch of {batch.size_bytes:,} bytes; raise max.message.bytes of the "
                "topic, or add an ACL for DescribeConfigs on it, so that the sink sees how large batches may be"
            )
        return refusal(what, self._client.name, code, message)

    def _lost(self, node: int, error: StorageError) -> None:
        """Have everything sent again that a leader has not answered."""
        if not error.is_transient:
            raise error
        self._problem = error.cause
        if (connection := self._connections.pop(node, None)) is not None:
            connection.close()
        for partition in {one for _, sent in self._sent.pop(node, ()) for one in sent}:
            queue = self._queues[partition]
            # whether it was written is not known: sent again, it is recognized
            queue.failed.extend(queue.in_flight)
            queue.in_flight.clear()
        for partition, leader in self._leaders.items():
            if leader == node:
                self._leaders[partition] = -1

    def _find_leaders(self) -> None:
        """Ask who leads the partitions without a leader, after a pause that grows."""
        self._environment.sleep(self._pause_ms / 1000)
        self._pause_ms = min(2 * self._pause_ms, BACKOFF_MS_MAX)
        lost = [partition for partition, leader in self._leaders.items() if leader < 0]
        for name, topic in self._client.topics(sorted({name for name, _ in lost})).items():
            for partition in lost:
                if partition[0] == name:
                    self._leaders[partition] = topic.leaders.get(partition[1], -1)


def _beginning(value: pa.Array, key: pa.Array | None, row: int) -> str:
    """Return which record it is, for errors."""
    if key is not None and key[row].is_valid:
        return f"the one with key {_shortened(key[row].as_buffer())}"
    return f"the one that begins with {_shortened(value[row].as_buffer())}"


def _shortened(data: pa.Buffer | None) -> str:
    text = b"" if data is None else data.slice(0, NAMED_BYTES_MAX).to_pybytes()
    return repr(text.decode(errors="replace"))


def _is_busy(queue: _Queue) -> bool:
    return bool(queue.waiting or queue.in_flight or queue.failed)
