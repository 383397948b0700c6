"""The transactions of the Kafka sink: their ids, how answers decide them, those that hang, and who owns a topic.

An id belongs to one subtask of one generation, which uses it for one transaction after the other: the next one only
after the former is proven to be committed. Each transaction commits, as part of itself, an offset to a consumer group
of its id: how often the id was used. So a group with at least the number of a transaction proves that this one was
committed, also when Kafka has forgotten it or the id has been used again.

A transaction hangs if its coordinator has decided it, and it is still open in a partition. A coordinator writes a
marker into each partition of a transaction that it decides. Brokers up to release 4.3.1 leave out a partition that has
no leader at this moment, such as one whose only broker starts again, and take the transaction for complete
(KAFKA-20734). Readers of committed records then wait there for ever, and the next decision of the same producer counts
for the records of both transactions: if it is an abort, committed records are lost. So no id is used again, and none is
taken away, before its transaction is over in all partitions. One that hangs is ended there by another transaction of
the same producer, without records and with the same decision.

Which pipelines write to a topic is in consumer groups, too: a sink has one for each topic. For the topic's first
partition it has the generation as offset, and the life as text. It is replaced in a transaction whose id is taken over
before it is read: of two that claim at the same time, one is fenced by the brokers and reads again. Brokers delete
these offsets with the topic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from headgate.codec.decodable import decodable
from headgate.codec.kafka.messages import LATEST, TransactionDescription
from headgate.codec.kafka.wire import ErrorCode
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.kafka.client import KafkaClient, ProducerIds, Topic
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.manifest import Committable

EPOCH_LAST = 32_766
"""The last epoch of a producer; then brokers give another producer id."""

_ID = re.compile(r"(?P<generation>\d+):(?P<subtask>\d+):(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class SinkIds:
    """The transactional ids of one sink.

    Attributes:
        prefix: what all ids begin with, so that rights can be given for it.
        owner: pipeline and sink (``fenced_sink.owner_of``).
    """

    prefix: str
    owner: str

    @property
    def beginning(self) -> str:
        """What every id of this sink begins with, and no other."""
        return f"{self.prefix}:{self.owner}:"

    def id_of(self, generation: int, subtask: int, number: int) -> str:
        """Return an id of one subtask."""
        return f"{self.beginning}{generation}:{subtask}:{number}"

    def generation_of(self, transactional_id: str) -> Generation | None:
        """Return the generation that an id belongs to; None: it is no id of this sink."""
        if not transactional_id.startswith(self.beginning):
            return None
        match = _ID.fullmatch(transactional_id, len(self.beginning))
        return None if match is None else Generation(int(match["generation"]))


_PAYLOAD_VERSION = 1


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """A prepared transaction, as a checkpoint keeps it.

    Attributes:
        topic: to whose first partition the proof is committed.
        use: how often the id was used, with this transaction.
        begins: topic → partition → offset of the first record of the transaction there.
    """

    version: int
    topic: str
    transactional_id: str
    producer_id: int
    producer_epoch: int
    use: int
    records_count: int
    begins: dict[str, dict[int, int]]

    def encode(self) -> bytes:
        """Return the payload of a committable."""
        return msgspec.msgpack.encode(self)


def prepared(
    topic: str,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    use: int,
    records_count: int,
    begins: dict[str, dict[int, int]],
) -> Prepared:
    """Return a transaction in the present version."""
    return Prepared(_PAYLOAD_VERSION, topic, transactional_id, producer_id, producer_epoch, use, records_count, begins)


def prepared_in(committable: Committable) -> Prepared:
    """Return what a committable promises to commit.

    Raises:
        CorruptionError
    """
    where = f"committable of sink '{committable.sink}' in checkpoint {committable.checkpoint}"
    try:
        found = msgspec.msgpack.decode(committable.payload, type=decodable(Prepared))
    except msgspec.MsgspecError as error:
        raise CorruptionError(where, 0, "a transaction of Kafka", str(error)) from error
    if found.version != _PAYLOAD_VERSION:
        raise CorruptionError(where, 0, f"version {_PAYLOAD_VERSION}", f"{found.version}")
    return found


class Outcome(Enum):
    """What became of a prepared transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "not known any more"
    NOT_DECIDED = "not decided"


UNCERTAIN = frozenset(
    {
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    }
)
"""Answers to a commit with which the transaction may have been committed before, or not."""


def outcome_of_commit(code: ErrorCode, use: int, proof: int | None) -> Outcome:
    """Return what became of a transaction, by the answer to its commit and the proof read after it.

    Args:
        code: ``NONE``, or one of ``UNCERTAIN``.
        use: the number of the transaction.
        proof: the offset that the id's group has; None: it has none.
    """
    if code is ErrorCode.NONE or (proof is not None and proof >= use):
        return Outcome.COMMITTED
    if code is ErrorCode.INVALID_PRODUCER_ID_MAPPING:
        return Outcome.UNKNOWN  # the id expired, or was never used here
    return Outcome.ABORTED


_IN_COMMIT = {"PrepareCommit", "CompleteCommit"}


def outcome_in_state(
    state: str | None, is_same_producer: bool, is_next_producer: bool, use: int, proof: int | None
) -> Outcome:
    """Return what became of a transaction, by the state of its id, without asking for a commit.

    Args:
        state: of the id, as brokers name it; None: they do not know the id.
        is_same_producer: the id has the producer id and epoch of the transaction.
        is_next_producer: it has those that follow them.
        use, proof: as for ``outcome_of_commit``.
    """
    if proof is not None and proof >= use:
        return Outcome.COMMITTED
    if state is None:
        return Outcome.UNKNOWN
    if state == "Ongoing" and is_same_producer:
        return Outcome.NOT_DECIDED
    if state in _IN_COMMIT and (is_same_producer or is_next_producer):
        return Outcome.COMMITTED
    return Outcome.ABORTED


def why_not_committed(outcome: Outcome, what: Prepared, timeout: str, more: Sequence[Prepared] = ()) -> str:
    """Return what is lost and why, as a clause.

    Args:
        timeout: for people; "" if brokers keep transactions for ever.
        more: further transactions of which the same is true.
    """
    records_count = sum(one.records_count for one in (what, *more))
    count = f"{records_count:,} records for topic '{what.topic}'"
    names = f"'{what.transactional_id}'" + (f" and {len(more):,} more" if more else "")
    if outcome is Outcome.UNKNOWN:
        return (
            f"Kafka does not know any more whether {count} were committed: transactional id {names} expired "
            "(transactional.id.expiration.ms, offsets.retention.minutes), or the brokers are those of another cluster"
        )
    why = "by hand or by another program, or after its timeout, if the sink had one when it was prepared"
    if timeout:
        why = (
            f"most likely because it waited for its commit longer than {timeout}; a longer transaction_timeout of the "
            "sink prevents that"
        )
    return f"{count} are lost: Kafka aborted transaction {names}, {why}"


Partitions = dict[str, list[int]]
"""Topic → partitions."""

ENDED_AGAIN = "ended again"
"""The text of a proof: the id has another epoch than the one that follows its transaction."""


def hanging_partitions(client: KafkaClient, decided: Sequence[Prepared]) -> dict[str, Partitions]:
    """Return where transactions are still open that were committed: by transactional id, without those that are over.

    Usually one request for each leader says that all are over: the last stable offset is greater than their first
    offsets. If it is not, some transaction is open there, and the leader is asked whose. A topic that is gone has none.
    """
    begins: dict[str, dict[int, int]] = {}
    for what in decided:
        for name, offsets in what.begins.items():
            for partition, offset in offsets.items():
                last = begins.setdefault(name, {}).get(partition, -1)
                begins[name][partition] = max(last, offset)
    found: dict[str, Partitions] = {}
    topics = client.topics(sorted(begins)) if begins else {}
    for name, topic in topics.items():
        offsets = {partition: begin for partition, begin in begins[name].items() if partition in topic.leaders}
        stable = client.list_offsets(topic, dict.fromkeys(offsets, LATEST))
        unclear = [partition for partition, begin in offsets.items() if stable[partition] <= begin]
        opened = _opened(client, topic, unclear) if unclear else {}
        for what in decided:
            for partition, begin in what.begins.get(name, {}).items():
                # a later transaction of the same producer begins at a greater offset
                if opened.get(partition, {}).get(what.producer_id, begin + 1) <= begin:
                    found.setdefault(what.transactional_id, {}).setdefault(name, []).append(partition)
    return found


def ending_again(client: KafkaClient, what: Prepared, now: TransactionDescription | None) -> Partitions:
    """Return where ``what`` hangs, if the transaction that is open for its id is one that ends it: see ``end_again``.

    So ``what`` is committed, whatever its proof says. A sink writes nothing with an id that hangs.
    """
    if now is None or now.transaction_state != "Ongoing":
        return {}
    if (now.producer_id, now.producer_epoch) != (what.producer_id, what.producer_epoch + 1):
        return {}
    return hanging_partitions(client, [what]).get(what.transactional_id, {})


def end_again(client: KafkaClient, what: Prepared, partitions: Partitions) -> None:
    """Commit ``what`` in partitions where it hangs.

    Raises:
        StorageError: it hangs still; trying again may help.
    """
    # every decision raises the epoch: with any other one the id was used or taken over since
    name, following = what.transactional_id, ProducerIds(what.producer_id, what.producer_epoch + 1)
    now = client.describe_transaction(name)
    if now is not None and (now.producer_id, now.producer_epoch) == (following.producer_id, following.producer_epoch):
        client.add_partitions(name, following, partitions)
        client.commit_in_transaction(name, following, name, what.topic, {0: (what.use, ENDED_AGAIN)})
        client.end_transaction(name, following, commit=True)
        client.wait_for_markers([name])
    if left := hanging_partitions(client, [what]):
        raise hangs(name, left[name])


def abort_hanging(client: KafkaClient, producers: dict[int, str], topics: Iterable[str], timeout_ms: int) -> None:
    """Abort hanging transactions whose decision was, or must be, to abort.

    Args:
        producers: producer id → transactional id, none of which is open for its coordinator.
        topics: where they may have written.
        timeout_ms: of the ids, which are taken over for this.
    """
    hanging: dict[str, Partitions] = {}
    found = client.topics(sorted(topics)) if producers else {}
    for name, topic in found.items():
        for partition, begun in _opened(client, topic, list(topic.leaders)).items():
            for producer_id in begun.keys() & producers.keys():
                hanging.setdefault(producers[producer_id], {}).setdefault(name, []).append(partition)
    for transactional_id, partitions in hanging.items():
        ids = client.take_over(transactional_id, timeout_ms)
        client.add_partitions(transactional_id, ids, partitions)
        if client.end_transaction(transactional_id, ids, commit=False).code is not ErrorCode.NONE:
            raise hangs(transactional_id, partitions)
        client.take_over(transactional_id, timeout_ms)  # which waits for the markers


def _opened(client: KafkaClient, topic: Topic, partitions: Sequence[int]) -> dict[int, dict[int, int]]:
    try:
        return client.open_transactions(topic, partitions)
    except UsageError:
        return {}  # no right to read the topic: what hangs there cannot be known


def hangs(transactional_id: str, partitions: Partitions) -> StorageError:
    """Return the error for a transaction that hangs still."""
    where = ", ".join(f"{topic} {sorted(parts)}" for topic, parts in sorted(partitions.items()))
    reason = f"it is decided, and still open in {where}; see kafka-transactions.sh find-hanging"
    return StorageError("end", f"transaction '{transactional_id}' of Kafka", reason)


CLAIM_TIMEOUT_MS = 10_000
"""After this time brokers give up a claim whose process died in the middle; readers wait for that."""

CLAIMS_MAX = 20
"""So often another process may come first."""

DECIDED = frozenset({"Empty", "CompleteCommit", "CompleteAbort"})
"""States of a transactional id without an open transaction, as brokers name them."""

_FIRST_PARTITION = 0


@dataclass(frozen=True, slots=True)
class TopicOwner:
    """The fences of the sinks in front of one topic."""

    client: KafkaClient
    prefix: str
    topic: str

    @property
    def beginning(self) -> str:
        """What the groups of this topic begin with, and no others: names of topics have no colon."""
        return f"{self.prefix}:owners:{self.topic}:"

    def fences(self) -> Sequence[Fence]:
        """Return the fences of all sinks.

        Raises:
            StorageError
        """
        groups = self.client.list_groups(self.beginning)
        found = [self.fence(group.removeprefix(self.beginning)) for group in groups]
        return [one for one in found if one is not None]

    def fence(self, owner: str, *, is_stable: bool = True) -> Fence | None:
        """Return the fence of a sink, if there is one. ``is_stable``: wait for a claim that is being made.

        Raises:
            StorageError
        """
        group = self.beginning + owner
        try:
            found = self.client.committed_offsets(group, self.topic, [_FIRST_PARTITION], is_stable=is_stable)
        except StorageError:
            now = self.client.describe_transaction(group)
            if now is None or now.transaction_state not in DECIDED:
                raise
            # no claim is being made: one hangs there until the next one is made
            found = self.client.committed_offsets(group, self.topic, [_FIRST_PARTITION], is_stable=False)
        if _FIRST_PARTITION not in found:
            return None
        return Fence(owner, *found[_FIRST_PARTITION])

    def refuse_if_replaced(self, fence: Fence) -> None:
        """Raise if a newer generation has claimed the topic.

        Raises:
            FencedError
        """
        known = self.fence(fence.owner)
        fence.refuse_if_older_than(None if known is None else known.generation)

    def claim(self, fence: Fence, *, is_renewal: bool = False) -> None:
        """Remember ``fence``, in one step with the comparison. ``is_renewal``: write it also if it is there.

        Raises:
            FencedError: a newer fence is there, or one of another life.
        """
        group = lock = self.beginning + fence.owner
        for _ in range(CLAIMS_MAX):
            # fences every other process that is in the middle of a claim
            producer = self.client.take_over(lock, CLAIM_TIMEOUT_MS)
            # not the stable one: nothing is open in the group now, but what may hang there
            known = self.fence(fence.owner, is_stable=False)
            fence.refuse_if_replaced_by(known)
            if known == fence and not is_renewal:
                return
            offsets = {_FIRST_PARTITION: (fence.generation, fence.life)}
            try:
                self.client.commit_in_transaction(lock, producer, group, self.topic, offsets)
            except FencedError:
                continue
            if self.client.end_transaction(lock, producer, commit=True).code is not ErrorCode.NONE:
                continue
            # decided is not yet visible, and the next look must see it
            self.client.wait_for_markers([lock])
            if self.fence(fence.owner, is_stable=False) == fence:
                return
        raise StorageError("claim", f"topic '{self.topic}'", "others claim it all the time")
