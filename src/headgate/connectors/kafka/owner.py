"""Which pipeline writes to a topic of Kafka: the fences of its sinks, as an offset of a consumer group.

A group has, for the first partition of the topic, a text with the fences of all sinks that write to it. It is replaced
in a transaction whose id is taken over before the text is read: of two that claim at the same time, one is fenced by
the brokers and reads again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from headgate.codec.kafka.error_codes import ErrorCode
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.kafka.client import KafkaClient
from headgate.errors import CorruptionError, FencedError, StorageError

CLAIM_TIMEOUT_MS = 10_000
"""After this time brokers give up a claim whose process died in the middle; readers wait for that."""

CLAIMS_MAX = 20
"""So often another process may come first."""

_FIRST_PARTITION = 0


class _Remembered(msgspec.Struct, frozen=True, array_like=True):
    """The fence of one sink."""

    generation: int
    life: str


@dataclass(frozen=True, slots=True)
class TopicOwner:
    """The fences of the sinks in front of one topic."""

    client: KafkaClient
    prefix: str
    topic: str

    @property
    def group(self) -> str:
        """The consumer group, the same for all topics."""
        return f"{self.prefix}:owners"

    def fences(self) -> Mapping[str, Fence]:
        """Return the fences by owner. A claim that is being made is waited for.

        Raises:
            StorageError, CorruptionError
        """
        found = self.client.committed_offsets(self.group, self.topic, [_FIRST_PARTITION])
        _, text = found.get(_FIRST_PARTITION, (0, "{}"))
        try:
            known = msgspec.json.decode(text, type=dict[str, _Remembered])
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"offset of group '{self.group}'", 0, "fences of sinks", str(error)) from error
        return {owner: Fence(owner, one.generation, one.life) for owner, one in known.items()}

    def refuse_if_replaced(self, fence: Fence) -> None:
        """Raise if a newer generation has claimed the topic.

        Raises:
            FencedError
        """
        known = self.fences().get(fence.owner)
        fence.refuse_if_older_than(None if known is None else known.generation)

    def claim(self, fence: Fence) -> None:
        """Remember ``fence``, in one step with the comparison.

        Raises:
            FencedError: a newer fence is there, or one of another life.
        """
        lock = f"{self.prefix}:owners:{self.topic}"
        for _ in range(CLAIMS_MAX):
            producer = self.client.take_over(lock, CLAIM_TIMEOUT_MS)
            known = self.fences()
            fence.refuse_if_replaced_by(known.get(fence.owner))
            if known.get(fence.owner) == fence:
                return
            all_now = {**known, fence.owner: fence}
            text = msgspec.json.encode({name: _Remembered(one.generation, one.life) for name, one in all_now.items()})
            offsets = {_FIRST_PARTITION: (fence.generation, text.decode())}
            try:
                self.client.commit_in_transaction(lock, producer, self.group, self.topic, offsets)
            except FencedError:
                continue
            if self.client.end_transaction(lock, producer, commit=True).code is ErrorCode.NONE:
                return
        raise StorageError("claim", f"topic '{self.topic}'", "others claim it all the time")
