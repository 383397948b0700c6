"""Decides the prepared transactions of a Kafka sink, in the driver: from any process, by what checkpoints keep of them.

Counterpart: ``sink_writer`` prepares them in the workers. What answers mean is in ``transactions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headgate.codec.kafka.messages import ListedTransaction
from headgate.codec.kafka.wire import ErrorCode
from headgate.connectors.base import Committer
from headgate.connectors.fenced_sink import Fence, in_order
from headgate.connectors.kafka.client import KafkaClient, ProducerIds
from headgate.connectors.kafka.connection import refusal
from headgate.connectors.kafka.transactions import (
    UNCERTAIN,
    Outcome,
    Prepared,
    SinkIds,
    TopicOwner,
    abort_hanging,
    end_again,
    ending_again,
    hanging_partitions,
    outcome_in_state,
    outcome_of_commit,
    prepared_in,
    why_not_committed,
)
from headgate.environment import Environment
from headgate.errors import UsageError, gone
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit

RENEWAL_MS = 6 * 3_600_000
"""So often the claim is written again: brokers forget offsets of groups (``offsets.retention.minutes``)."""

FENCED_TIMEOUT_MS = 1_111
"""The transaction timeout of ids that were taken away from their generation: it tells them from all others."""


class KafkaCommitter(Committer):
    """See the module."""

    knows_outcomes = True
    can_forget = True

    def __init__(
        self,
        client: KafkaClient,
        topic: str,
        owner: TopicOwner | None,
        ids: SinkIds,
        fence: Fence,
        timeout: str,
        environment: Environment,
    ) -> None:
        """Use ``KafkaSink.open_committer``.

        Args:
            topic: of the sink.
            owner: None: the sink is at least once now. What it prepared before, when it was not, is still decided.
            timeout: of transactions, for errors; "" if they have none.
        """
        self._client, self._topic, self._owner, self._ids = client, topic, owner, ids
        self._fence, self._timeout = fence, timeout
        self._environment, self._claimed_ms = environment, environment.monotonic_ms()

    def recover(self, keep: Sequence[Committable]) -> None:
        """Claim the topic, then take every id of this sink over, which aborts its transaction, but those of ``keep``.

        Writers look at the claim after they took a new id, so none that is replaced begins with one that is not here.
        """
        if self._owner is not None:
            known = self._owner.fence(self._fence.owner)
            # a claim without the life that is stored would erase the owner
            life = "" if known is None else known.life
            self._fence = Fence(self._fence.owner, self._fence.generation, life)
            self._owner.claim(self._fence)
            self._claimed_ms = self._environment.monotonic_ms()
        kept = {one.transactional_id: one for one in map(prepared_in, keep)}
        producers: dict[int, str] = {}
        topics = self._topics(kept.values())
        # after the claim: an id that is made later belongs to a newer generation, or its writer finds the claim
        for listed in self._known_ids():
            name = listed.transactional_id
            if not self._is_mine(name):
                continue
            what = kept.get(name)
            if what is None:
                # also one that was taken away before: it may still be open in a partition
                producers[listed.producer_id] = name
            now = self._client.describe_transaction(name)
            # brokers have forgotten it, or an earlier recovery took it away
            if now is None or (now.transaction_state == "Empty" and now.transaction_timeout_ms == FENCED_TIMEOUT_MS):
                continue
            if what is not None:
                is_prepared = (now.producer_id, now.producer_epoch) == (what.producer_id, what.producer_epoch)
                if is_prepared or now.transaction_state != "Ongoing":
                    continue  # to be committed, or found committed, and then taken over
                if partitions := ending_again(self._client, what, now):
                    end_again(self._client, what, partitions)
                    continue
            topics |= {one.topic for one in now.topics}
            self._take_away(name)
        abort_hanging(self._client, producers, topics, FENCED_TIMEOUT_MS)

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """See ``Committer``. Kafka cannot show several transactions in one step: oldest checkpoints first.

        When it returns, the partitions know it, too: readers of committed records see everything that no open
        transaction is in front of. So a program that runs after this one misses nothing.
        """
        ordered = in_order(permit, committables)
        if not ordered:
            return
        if self._owner is not None:
            self._owner.refuse_if_replaced(self._fence)
        everything = [(committable, prepared_in(committable)) for committable in ordered]
        for number, (committable, what) in enumerate(everything):
            outcome = self._commit(what)
            if outcome is not Outcome.COMMITTED:
                more = [other for one, other in everything[number + 1 :] if self.denial(one)]
                why = why_not_committed(outcome, what, self._timeout, more)
                raise gone(UsageError(f"output of checkpoint {committable.checkpoint} cannot be committed: {why}"))
        decided = {what.transactional_id: what for _, what in everything}
        self._client.wait_for_markers(sorted(decided))
        for name, partitions in hanging_partitions(self._client, [what for _, what in everything]).items():
            end_again(self._client, decided[name], partitions)
        proofs = self._client.committed_by(sorted(decided), 0)
        former: dict[int, str] = {}
        for committable, what in everything:
            if proofs.get((what.transactional_id, what.topic), -1) < what.use:  # that of the group was left out
                self._client.commit_offsets(what.transactional_id, what.topic, {0: what.use})
            if self._is_mine(what.transactional_id) and committable.generation < self._fence.generation:
                self._take_away(what.transactional_id)
                former[what.producer_id] = what.transactional_id
        if former:  # they may have been used again
            abort_hanging(self._client, former, self._topics(decided.values()), FENCED_TIMEOUT_MS)

    def denial(self, committable: Committable) -> str:
        """See ``Committer``."""
        what = prepared_in(committable)
        now = self._client.describe_transaction(what.transactional_id)
        pair = None if now is None else (now.producer_id, now.producer_epoch)
        is_same = pair == (what.producer_id, what.producer_epoch)
        is_next = pair == (what.producer_id, what.producer_epoch + 1)
        state = None if now is None else now.transaction_state
        outcome = outcome_in_state(state, is_same, is_next, what.use, self._proof(what))
        if outcome in (Outcome.COMMITTED, Outcome.NOT_DECIDED) or ending_again(self._client, what, now):
            return ""
        return why_not_committed(outcome, what, self._timeout)

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        """Keep the claim, and what a retained checkpoint may ask for. Kafka forgets everything else by itself."""
        if self._owner is not None and self._environment.monotonic_ms() - self._claimed_ms >= RENEWAL_MS:
            self._owner.claim(self._fence, is_renewal=True)
            self._claimed_ms = self._environment.monotonic_ms()
        for what in map(prepared_in, promised()):
            generation = self._ids.generation_of(what.transactional_id)
            proof = self._proof(what)
            # the proofs of this generation are renewed by its transactions
            if proof is not None and generation is not None and generation < self._fence.generation:
                self._client.commit_offsets(what.transactional_id, what.topic, {0: proof})

    def close(self) -> None:
        """See ``Committer``."""
        self._client.close()

    def _known_ids(self) -> list[ListedTransaction]:
        try:
            return self._client.list_transactions(self._ids.beginning)
        except UsageError:
            if self._owner is not None:
                raise
            return []  # a sink that is at least once needs no right to transactions, unless it has promised some

    def _topics(self, written: Iterable[Prepared]) -> set[str]:
        return {self._topic, *(name for what in written for name in what.begins)}

    def _is_mine(self, name: str) -> bool:
        """Whether this sink had the id in this or an older generation."""
        generation = self._ids.generation_of(name)
        return generation is not None and generation <= self._fence.generation

    def _take_away(self, name: str) -> None:
        """Abort the open transaction of an id, if there is one, and fence who has it."""
        self._client.take_over(name, FENCED_TIMEOUT_MS)

    def _commit(self, what: Prepared) -> Outcome:
        """Commit a transaction; return whether it is, or why not."""
        producer = ProducerIds(what.producer_id, what.producer_epoch)
        code = self._client.end_transaction(what.transactional_id, producer, commit=True).code
        if code is ErrorCode.NONE:
            return Outcome.COMMITTED
        if code not in UNCERTAIN:
            raise refusal(f"commit transaction '{what.transactional_id}'", self._client.name, code)
        outcome = outcome_of_commit(code, what.use, self._proof(what))
        if outcome is Outcome.COMMITTED:
            return outcome
        if ending_again(self._client, what, self._client.describe_transaction(what.transactional_id)):
            return Outcome.COMMITTED
        return outcome

    def _proof(self, what: Prepared) -> int | None:
        return proof_of(self._client, what.transactional_id, what.topic)


def proof_of(client: KafkaClient, transactional_id: str, topic: str) -> int | None:
    """Return the number of the last transaction of an id that was committed, if Kafka remembers one."""
    found = client.committed_offsets(transactional_id, topic, [0], is_stable=False)
    return found[0][0] if 0 in found else None
