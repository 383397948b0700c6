"""Bugs planted in the helper that publishes, which words that come twice or out of order bring to light (HL21)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product.patching import planted

from headgate.operators.checkpointed.publishing import PublishOnCheckpoint


def a_completion_that_covers_nothing_is_of_what_comes_next() -> AbstractContextManager[None]:
    """Who is told is told for a reason: found by words that come twice."""

    def complete(self: Any, checkpoint_id: int) -> None:
        covered = [checkpoint for checkpoint in self._pending if checkpoint <= checkpoint_id]
        for checkpoint in covered or list(self._pending)[:1]:
            self.publish(self._pending.pop(checkpoint))

    return patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete)


def what_is_told_again_is_of_the_newest_snapshot() -> AbstractContextManager[None]:
    """Ids are not looked at behind the first word about one: found by words that come twice, or late."""

    def complete(self: Any, checkpoint_id: int) -> None:
        is_new = checkpoint_id > getattr(self, "newest_told", 0)
        self.newest_told = max(checkpoint_id, getattr(self, "newest_told", 0))
        for checkpoint in [found for found in self._pending if found <= checkpoint_id or not is_new]:
            self.publish(self._pending.pop(checkpoint))

    return patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete)


SEEDS: dict[str, int] = {
    "a_completion_that_covers_nothing_is_of_what_comes_next": 42,
    "what_is_told_again_is_of_the_newest_snapshot": 10,
}
"""By name of the bug, a seed that found it; others are tried when it does not any more."""

ALL = planted(globals(), __name__)
