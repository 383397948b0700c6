"""The transactions of the Kafka sink: their ids, what a checkpoint keeps of one, and how answers decide it.

Pure. An id belongs to one subtask of one generation, which uses it for one transaction after the other: the next one
only after the former is proven to be committed. Each transaction commits, as part of itself, an offset to a consumer
group of its id: how often the id was used. So a group with at least the number of a transaction proves that this one
was committed, also when Kafka has forgotten it or the id has been used again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

import msgspec

from headgate.codec.kafka.error_codes import ErrorCode
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError
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
        found = msgspec.msgpack.decode(committable.payload, type=Prepared)
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
