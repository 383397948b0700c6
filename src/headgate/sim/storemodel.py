"""The target of all sinks: transactions open → prepared → committed or aborted, fenced by generation, and a reader.

Models what docs/spec/two-phase-commit.md asks of a target. Outlives every process; a committed record stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from headgate.errors import FencedError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import NO_GENERATION, Life, Owner
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.supervision import lives
from headgate.sim.history import Aborted, Committed, Observer, Prepared, Read, Record, SinkFenced, TransactionId

NO_CHECKPOINT = CheckpointId(0)


class Status(Enum):
    """Life of a transaction."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(slots=True)
class Transaction:
    """One transaction and its records."""

    id: TransactionId
    status: Status = Status.OPEN
    checkpoint: CheckpointId = NO_CHECKPOINT
    records: list[Record] = field(default_factory=list)


class Undecidable(Exception):  # noqa: N818 - the model's answer to an impossible commit (K5)
    """A commit of something aborted or unknown."""


class StoreModel:
    """All transactions of all sinks."""

    def __init__(self, observe: Observer) -> None:
        self._note = observe
        self.transactions: dict[TransactionId, Transaction] = {}
        self.visible: dict[str, list[TransactionId]] = {}
        self.fences: dict[str, Generation] = {}
        self.lives: dict[str, Life] = {}
        self._by_payload: dict[bytes, Transaction] = {}
        self._serial = 0

    def owner(self, sink: str) -> Owner:
        """Return which life of the pipeline writes to ``sink``, as far as somebody told."""
        return Owner(self.lives.get(sink), self.fences.get(sink, NO_GENERATION))

    def own(self, sink: str, life: Life) -> Owner:
        """Let ``life`` write to ``sink``, unless another one does; return which one does then."""
        if lives.may_own(life, self.owner(sink)):
            self.lives[sink] = life
        return self.owner(sink)

    def begin(self, sink: str, subtask_index: int, generation: Generation) -> Transaction:
        """Open a transaction.

        Raises:
            FencedError
        """
        self._refuse_fenced(sink, generation)
        self._serial += 1
        transaction = Transaction(TransactionId(sink, subtask_index, generation, self._serial))
        self.transactions[transaction.id] = transaction
        self._by_payload[payload_of(transaction.id)] = transaction
        return transaction

    def prepare(self, transaction: Transaction, checkpoint: CheckpointId) -> None:
        """Make a transaction durable and immutable; repeating it changes nothing.

        Raises:
            FencedError
        """
        self._refuse_fenced(transaction.id.sink, transaction.id.generation)
        if transaction.status is Status.OPEN:
            transaction.status, transaction.checkpoint = Status.PREPARED, checkpoint
            self._note(Prepared(transaction.id))

    def discard(self, transaction: Transaction) -> None:
        """Abort a transaction that is still open (its writer closes)."""
        if transaction.status is Status.OPEN:
            transaction.status = Status.ABORTED

    def commit(self, sink: str, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Make these visible together; repeating it changes nothing.

        Raises:
            FencedError: a newer generation recovered this sink.
            Undecidable: one of them was aborted or is unknown.
        """
        self._refuse_fenced(sink, permit.generation)
        found = [self._of(c) for c in committables]
        for transaction in found:
            if transaction.status not in (Status.PREPARED, Status.COMMITTED):
                raise Undecidable(f"{transaction.id} is {transaction.status.value}")
        for transaction in found:
            if transaction.status is Status.PREPARED:
                transaction.status = Status.COMMITTED
                self.visible.setdefault(sink, []).append(transaction.id)
                records = tuple(transaction.records)
                self._note(Committed(transaction.id, transaction.checkpoint, permit.generation, records))

    def recover(self, sink: str, generation: Generation, keep: Sequence[Committable]) -> int:
        """Fence older generations and abort what they left, except ``keep``; return how many were aborted.

        Raises:
            FencedError: a newer generation recovered already.
        """
        self._refuse_fenced(sink, generation)
        self.fences[sink] = generation
        self._note(SinkFenced(sink, generation))
        kept = {c.payload for c in keep}
        aborted = 0
        for transaction in self.transactions.values():
            if transaction.id.sink != sink or payload_of(transaction.id) in kept:
                continue
            if transaction.status in (Status.OPEN, Status.PREPARED):
                transaction.status = Status.ABORTED
                self._note(Aborted(transaction.id))
                aborted += 1
        return aborted

    def read(self, sink: str) -> Read:
        """Return what a committed reader sees."""
        rows: list[tuple[TransactionId, int, Record]] = []
        for name in self.visible.get(sink, ()):
            records = self.transactions[name].records
            rows += [(name, len(records), record) for record in records]
        return Read(sink, tuple(rows))

    def undecided(self) -> tuple[str, ...]:
        """Return the transactions that are open or prepared."""
        return tuple(
            f"{t.id} {t.status.value}"
            for t in self.transactions.values()
            if t.status in (Status.OPEN, Status.PREPARED) and t.records
        )

    def _of(self, committable: Committable) -> Transaction:
        transaction = self._by_payload.get(committable.payload)
        if transaction is None:
            raise Undecidable(f"{committable.payload!r} is unknown")
        return transaction

    def _refuse_fenced(self, sink: str, generation: Generation) -> None:
        fence = self.fences.get(sink, Generation(0))
        if generation < fence:
            raise FencedError(f"sink {sink}", generation, fence)


def payload_of(transaction: TransactionId) -> bytes:
    """Return the committable payload that names ``transaction``."""
    return str(transaction).encode()
