"""Which pipelines write to a topic of Kafka: the fences of their sinks, each as an offset of a consumer group.

A sink has a group of its own for each topic: for the topic's first partition it has the generation as offset, and the
life as text. It is replaced in a transaction whose id is taken over before it is read: of two that claim at the same
time, one is fenced by the brokers and reads again. Brokers delete these offsets with the topic.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.codec.kafka.error_codes import ErrorCode
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.kafka.client import KafkaClient
from headgate.dataclass import dataclass
from headgate.errors import FencedError, StorageError

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
            self.client.wait_for_markers([lock])
            if self.fence(fence.owner, is_stable=False) == fence:
                return
        raise StorageError("claim", f"topic '{self.topic}'", "others claim it all the time")
