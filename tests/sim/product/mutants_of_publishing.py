"""Bugs planted in listeners, in operator state, and in publishing on completion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product.patching import around, planted

from headgate.operators.checkpointed.lists import OperatorLists
from headgate.operators.checkpointed.publishing import PublishOnCheckpoint
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.driver import claims
from headgate.runtime.worker.hooks import Hooks


def publishing_does_not_wait_for_completion() -> AbstractContextManager[None]:
    def snapshot(call: Any, self: Any, context: Any) -> None:
        call(self, context)
        items = [item for items in self._pending.values() for item in items]
        if items:
            self.publish(items)

    return around(PublishOnCheckpoint, "snapshot", snapshot)


def only_the_newest_checkpoint_is_published() -> AbstractContextManager[None]:
    def complete(self: Any, checkpoint_id: int) -> None:
        items = self._pending.pop(checkpoint_id, [])
        if items:
            self.publish(items)

    return patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete)


def a_restore_forgets_what_is_pending() -> AbstractContextManager[None]:
    def restore(call: Any, self: Any, context: Any) -> None:
        publish, self.publish = self.publish, lambda items: None
        call(self, context)
        self.publish = publish

    return around(PublishOnCheckpoint, "restore", restore)


def what_an_aborted_checkpoint_had_is_forgotten() -> AbstractContextManager[None]:
    return around(Hooks, "aborted", _forgetting)


def _forgetting(call: Any, self: Any, checkpoint: Any) -> None:
    call(self, checkpoint)
    for _, listener in self._listeners:
        listener._pending.pop(int(checkpoint), None)


def pending_items_are_not_kept() -> AbstractContextManager[None]:
    def snapshot(call: Any, self: Any, context: Any) -> None:
        call(self, context)
        self._kept.clear()

    return around(PublishOnCheckpoint, "snapshot", snapshot)


def _sharing(share: Callable[[Any, list[Any], list[Any]], list[Any]]) -> AbstractContextManager[None]:
    def shares(call: Any, self: Any, *arguments: Any) -> tuple[list[Any], list[Any]]:
        own, everybodys = call(self, *arguments)
        return share(self, own, everybodys), everybodys

    return around(OperatorLists, "_shares", shares)


def a_rescale_drops_lists() -> AbstractContextManager[None]:
    return _sharing(lambda self, own, _: own if self.formers_count == self.parallelism else [])


def every_subtask_gets_whole_lists() -> AbstractContextManager[None]:
    return _sharing(lambda self, own, everybodys: everybodys)


def lists_are_not_restored() -> AbstractContextManager[None]:
    return patched(RestoredSnapshots, "lists", lambda self, node, vertex: [])


def lists_are_frozen_before_they_are_brought_up_to_date() -> AbstractContextManager[None]:
    def snapshot(call: Any, self: Any, checkpoint: Any) -> Any:
        before = {("lists/", lists.node): lists.freeze(is_union=False) for _, lists in self._functions}
        call(self, checkpoint)
        return {key: state for key, state in before.items() if state is not None}

    return around(Hooks, "snapshot", snapshot)


def a_finished_pipeline_tells_nobody_again() -> AbstractContextManager[None]:
    return patched(claims, "is_listening", lambda definition: False)


SEEDS: dict[str, int] = {
    "a_finished_pipeline_tells_nobody_again": 86,
    "a_rescale_drops_lists": 77,
    "a_restore_forgets_what_is_pending": 77,
    "every_subtask_gets_whole_lists": 27,
    "lists_are_frozen_before_they_are_brought_up_to_date": 77,
    "lists_are_not_restored": 27,
    "only_the_newest_checkpoint_is_published": 213,
    "pending_items_are_not_kept": 146,
    "publishing_does_not_wait_for_completion": 146,
    "what_an_aborted_checkpoint_had_is_forgotten": 22,
}
"""By name of the bug, a seed that found it; others are tried when it does not any more."""

ALL = planted(globals(), __name__)
