"""Reads partitions of Kafka on behalf of one subtask: one request to each leader at a time, the next one ahead.

The request for what follows goes out before records are decoded, so that the broker works meanwhile. Records are
decoded as the caller takes them. One answer per
leader is in memory or in the socket, which bounds what is read ahead: ``BYTES_MAX`` for each leader. While brokers are
away it may block as long as ``KafkaClient`` is patient: a source runs it in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias
from uuid import UUID

from headgate.codec.kafka.messages import (
    READ_COMMITTED,
    Fetch,
    FetchAnswer,
    FetchedPartition,
    FetchPartition,
    FetchTopic,
)
from headgate.codec.kafka.record_batch import NO_EPOCH
from headgate.codec.kafka.record_decoder import DecodedBatch, decode_records, end_of
from headgate.codec.kafka.wire import RETRIABLE, ErrorCode
from headgate.connectors.kafka.client import ANSWER_MS, BACKOFF_MS_MAX, BACKOFF_MS_MIN, KafkaClient, Topic
from headgate.connectors.kafka.connection import Connection, refusal, wait_any
from headgate.dataclass import dataclass
from headgate.environment import Environment
from headgate.errors import StorageError, UsageError

BYTES_MAX = 16 << 20
"""Of one answer."""
PARTITION_BYTES_MAX = 4 << 20
"""Of one partition in an answer; one batch comes whole, however large it is."""
WAIT_MS = 500
"""How long a leader may wait for records before it answers without any."""

Partition: TypeAlias = tuple[str, int]
"""Name of the topic, and number of the partition."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records of one partition, and how far its log goes.

    Attributes:
        batches: records as they are decoded, once: a damaged batch is noticed when its turn comes.
        next_offset: where reading goes on after all of them, also after what was left out.
        next_epoch: of the leader that wrote what is in front of that; ``NO_EPOCH``: nothing came.
        log_end: the last stable offset of read-committed fetches, else the high watermark.
        undecided: offsets from ``log_end`` to the high watermark, which cannot be read until an open transaction ends.
    """

    partition: Partition
    batches: Iterator[DecodedBatch]
    next_offset: int
    next_epoch: int
    log_begin: int
    log_end: int
    undecided: int = 0


class Fetcher:
    """Reads partitions on from their positions, and follows their leaders.

    Attributes:
        positions: partition → offset of the next record that ``poll`` will return. Take it, never change it.
    """

    def __init__(
        self,
        client: KafkaClient,
        environment: Environment,
        topics: Mapping[str, Topic],
        positions: Mapping[Partition, int],
        epochs: Mapping[Partition, int] | None = None,
        *,
        isolation: int = READ_COMMITTED,
        with_headers: bool = False,
        wait_ms: int = WAIT_MS,
    ) -> None:
        """Read on from ``positions``. ``epochs``: of the leaders that wrote the records in front of these."""
        self._client, self._environment = client, environment
        self.positions = dict(positions)
        self._epochs = dict(epochs or {})
        self._ids = {name: topics[name].id for name, _ in positions}
        self._names: dict[UUID, str] = {found: name for name, found in self._ids.items()}
        self._isolation, self._with_headers, self._wait_ms = isolation, with_headers, wait_ms
        self._leaders = {part: topics[part[0]].leaders.get(part[1], -1) for part in positions}
        self._connections: dict[int, Connection] = {}
        self._asked: dict[int, dict[Partition, int]] = {}
        """Node → the partitions that it was asked for, from which offsets."""
        self._asked_ms: dict[int, int] = {}
        self._paused: set[Partition] = set()
        self._look_at_ms, self._pause_ms = 0, BACKOFF_MS_MIN

    def add(self, topics: Mapping[str, Topic], positions: Mapping[Partition, int]) -> None:
        """Read more partitions.

        Raises:
            UsageError: of a topic that is read, and was deleted and created again.
        """
        self._refuse_others(topics)
        for (name, number), offset in positions.items():
            self._ids[name] = topics[name].id
            self._names[topics[name].id] = name
            self._leaders[name, number] = topics[name].leaders.get(number, -1)
            self.positions[name, number] = offset

    def pause(self, partition: Partition) -> None:
        """Do not ask for this partition until it is resumed. What was asked for already still comes."""
        self._paused.add(partition)

    def resume(self, partition: Partition) -> None:
        """Ask for this partition again."""
        self._paused.discard(partition)

    def poll(self, timeout_ms: int) -> list[Fetched]:
        """Return what has come, at least from one leader if something comes within ``timeout_ms``.

        Raises:
            UsageError: a topic is not there any more, or another one has its name; a position is not in the log.
        """
        deadline_ms = self._environment.monotonic_ms() + timeout_ms
        while True:
            self._find_leaders()
            for node in sorted({leader for leader in self._leaders.values() if leader >= 0}):
                self._ask(node)
            for node in list(self._asked):
                if found := self._receive(node):
                    return found
            left_ms = deadline_ms - self._environment.monotonic_ms()
            if -1 in self._leaders.values():
                left_ms = min(left_ms, self._pause_ms)
            if left_ms <= 0 or self.is_idle:
                return []
            if self._asked:
                wait_any([self._connections[node] for node in self._asked], left_ms)
            else:
                self._environment.sleep(left_ms / 1000)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for: no partition is to be read."""
        return not self._asked and not self.positions.keys() - self._paused

    def interrupt(self) -> None:
        """End what ``poll`` waits for, from another thread; then only ``close`` it."""
        # a copy: ``poll`` may open another one meanwhile
        for connection in list(self._connections.values()):
            connection.interrupt()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections, self._asked = {}, {}

    def _find_leaders(self) -> None:
        """Ask for leaders where none is known, with pauses in between."""
        if -1 not in self._leaders.values() or self._environment.monotonic_ms() < self._look_at_ms:
            return
        self._look_at_ms = self._environment.monotonic_ms() + self._pause_ms
        self._pause_ms = min(2 * self._pause_ms, BACKOFF_MS_MAX)
        topics = self._client.topics(sorted(self._ids))
        self._refuse_others(topics)
        for part, leader in self._leaders.items():
            if leader < 0 and part[0] in topics:  # a topic that is not listed keeps its positions
                self._leaders[part] = topics[part[0]].leaders.get(part[1], -1)

    def _refuse_others(self, topics: Mapping[str, Topic]) -> None:
        """Raise if one of ``topics`` only has the name of one that is read."""
        for name, known in self._ids.items():
            if name in topics and topics[name].id != known:
                raise UsageError(
                    f"topic '{name}' was deleted and created again since this pipeline began to read it: its positions "
                    "mean nothing in the new one; start over, or read the new topic under another name of the source"
                )

    def _ask(self, node: int) -> None:
        """Send the next request to a leader, unless one is in flight."""
        wanted = {
            part: offset
            for part, offset in self.positions.items()
            if self._leaders[part] == node and part not in self._paused
        }
        if node in self._asked or not wanted:
            return
        try:
            connection = self._connections.get(node)
            if connection is None or connection.is_closed:
                connection = self._connections[node] = self._client.open(node)
            connection.send(self._request(wanted))
            self._asked[node], self._asked_ms[node] = wanted, self._environment.monotonic_ms()
        except StorageError as error:
            self._lost(node, error)

    def _request(self, wanted: Mapping[Partition, int]) -> Fetch:
        by_topic: dict[str, list[FetchPartition]] = {}
        for (topic, number), offset in wanted.items():
            epoch = self._epochs.get((topic, number), NO_EPOCH)
            wanted_part = FetchPartition(number, -1, offset, epoch, -1, PARTITION_BYTES_MAX)
            by_topic.setdefault(topic, []).append(wanted_part)
        topics = tuple(FetchTopic(self._ids[topic], tuple(parts)) for topic, parts in by_topic.items())
        return Fetch(-1, self._wait_ms, 1, BYTES_MAX, self._isolation, 0, -1, topics)

    def _receive(self, node: int) -> list[Fetched]:
        """Return what a leader sent, after it was asked for what follows."""
        try:
            answer: FetchAnswer | None = self._connections[node].receive(0)
        except StorageError as error:
            self._lost(node, error)
            return []
        if answer is None:
            if self._environment.monotonic_ms() - self._asked_ms[node] > self._wait_ms + ANSWER_MS:
                self._lost(node, StorageError("read", f"from broker {node} of Kafka", "it does not answer"))
            return []
        # from here on the next request may go out, whatever this answer says
        asked = self._asked.pop(node)
        found: list[Fetched] = []
        code = ErrorCode(answer.error_code)
        if code and code not in RETRIABLE:
            raise refusal("read", self._connections[node].address, code)
        for of_topic in answer.responses:
            for part in of_topic.partitions:
                name = (self._names.get(of_topic.topic_id, ""), part.partition_index)
                if name in asked and self._is_sound(name, part, asked[name]):
                    found.append(self._fetched(name, asked[name], part))
                    self._move(name, found[-1].next_offset, found[-1].next_epoch)
        self._ask(node)
        return found

    def _move(self, name: Partition, offset: int, epoch: int) -> None:
        """Move a position; what brought records is asked for last, because a broker fills answers in that order."""
        if offset > self.positions[name]:
            self._epochs[name] = epoch
            del self.positions[name]
            self.positions[name] = offset

    def _is_sound(self, name: Partition, part: FetchedPartition, begin: int) -> bool:
        code = ErrorCode(part.error_code)
        where = f"partition {name[1]} of topic '{name[0]}'"
        if (other := part.diverging_epoch) is not None:
            if other.end_offset < begin:
                raise UsageError(
                    f"{where} lost records that this pipeline has read: all from offset {other.end_offset:,} on, and "
                    f"others may be in their place, because a broker without them became the leader; start over, or "
                    "begin at other offsets"
                )
            self._epochs[name] = other.epoch  # of later epochs nothing is left, by compaction
        if code is ErrorCode.NONE:
            self._pause_ms = BACKOFF_MS_MIN
            return True
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            raise UsageError(
                f"offset {begin:,} of {where} is not in its log any more, or not yet: records that were to be read are "
                "gone, by retention or because the topic lost data; start over, or begin at other offsets"
            )
        gone = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID)
        if code not in RETRIABLE and code not in gone:
            raise refusal(f"read {where}", self._connections[self._leaders[name]].address, code)
        # the position stays: the same records are asked for again once a leader is known
        self._leaders[name] = -1
        return False

    def _fetched(self, name: Partition, begin: int, part: FetchedPartition) -> Fetched:
        is_committed = self._isolation == READ_COMMITTED
        data = part.records or b""
        batches = decode_records(
            data,
            begin,
            f"partition {name[1]} of topic '{name[0]}'",
            (part.aborted_transactions or ()) if is_committed else None,
            with_headers=self._with_headers,
        )
        end = part.last_stable_offset if is_committed else part.high_watermark
        undecided = max(part.high_watermark - end, 0)
        return Fetched(name, batches, *end_of(data, begin), part.log_start_offset, end, undecided)

    def _lost(self, node: int, error: StorageError) -> None:
        if not error.is_transient:
            raise error
        self._asked.pop(node, None)
        if (connection := self._connections.pop(node, None)) is not None:
            connection.close()
        for part, leader in self._leaders.items():
            if leader == node:
                self._leaders[part] = -1
