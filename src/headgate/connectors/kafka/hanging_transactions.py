"""Hanging transactions: their coordinator has decided them, and they are still open in a partition.

A coordinator writes a marker into each partition of a transaction that it decides. Brokers up to release 4.3.1 leave
out a partition that has no leader at this moment, such as one whose only broker starts again, and take the transaction
for complete (KAFKA-20734). Readers of committed records then wait there for ever, and the next decision of the same
producer counts for the records of both transactions: if it is an abort, committed records are lost. So no id is used
again, and none is taken away, before its transaction is over in all partitions. One that hangs is ended there by
another transaction of the same producer, without records and with the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headgate.codec.kafka.error_codes import ErrorCode
from headgate.codec.kafka.messages import LATEST, TransactionDescription
from headgate.connectors.kafka.client import KafkaClient, ProducerIds, Topic
from headgate.connectors.kafka.transactions import Prepared
from headgate.errors import StorageError, UsageError

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
