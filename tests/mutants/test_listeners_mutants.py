"""Mutants of listeners, operator state and publishing on completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators.checkpointed import test_lists as list_tests
from tests.operators.checkpointed import test_publishing as publishing_tests
from tests.protocol.checkpoints import test_coordinator_end as end_tests
from tests.runtime.checkpoints import test_restoring as restoring_tests
from tests.runtime.worker import test_hooks as hook_tests

from headgate.operators.checkpointed.lists import FrozenList, OperatorList, OperatorLists
from headgate.operators.checkpointed.publishing import PublishOnCheckpoint
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.worker import hooks
from headgate.runtime.worker.hooks import Hooks

Test = Callable[..., object]


# -- publishing -----------------------------------------------------------------------------------------------------


@contextmanager
def only_the_newest_is_published() -> Iterator[None]:  # HL15, C16
    def complete(self: Any, checkpoint_id: int) -> None:
        items = self._pending.pop(checkpoint_id, [])
        if items:
            self.publish(items)

    with patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete):
        yield


@contextmanager
def everything_pending_is_published() -> Iterator[None]:  # HL15
    def complete(self: Any, checkpoint_id: int) -> None:
        items = [item for found in self._pending.values() for item in found]
        self._pending.clear()
        if items:
            self.publish(items)

    with patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete):
        yield


@contextmanager
def a_snapshot_publishes() -> Iterator[None]:  # HL15
    usual = PublishOnCheckpoint.snapshot

    def snapshot(self: Any, context: Any) -> None:
        usual(self, context)
        self.notify_checkpoint_complete(context.checkpoint_id)

    with patched(PublishOnCheckpoint, "snapshot", snapshot):
        yield


@contextmanager
def what_was_pending_is_forgotten_at_a_restore() -> Iterator[None]:  # HL15
    usual = PublishOnCheckpoint.restore

    def restore(self: Any, context: Any) -> None:
        publish, self.publish = self.publish, lambda items: None
        usual(self, context)
        self.publish = publish

    with patched(PublishOnCheckpoint, "restore", restore):
        yield


@contextmanager
def an_abort_throws_its_items_away() -> Iterator[None]:  # C17
    def aborted(self: Any, checkpoint_id: int) -> None:
        self._pending.pop(checkpoint_id, None)

    with patched(PublishOnCheckpoint, "notify_checkpoint_aborted", aborted):
        yield


@contextmanager
def what_is_pending_is_forgotten_before_it_is_published() -> Iterator[None]:  # HL6
    def complete(self: Any, checkpoint_id: int) -> None:
        covered = [self._pending.pop(c) for c in list(self._pending) if c <= checkpoint_id]
        if covered:
            self.publish([item for items in covered for item in items])

    with patched(PublishOnCheckpoint, "notify_checkpoint_complete", complete):
        yield


@contextmanager
def only_what_is_new_is_kept() -> Iterator[None]:  # HL15
    usual = PublishOnCheckpoint.snapshot

    def snapshot(self: Any, context: Any) -> None:
        usual(self, context)
        newest = self._pending.get(context.checkpoint_id, [])
        self._kept.put({"checkpoint": context.checkpoint_id, "item": item} for item in newest)

    with patched(PublishOnCheckpoint, "snapshot", snapshot):
        yield


# -- operator state -------------------------------------------------------------------------------------------------


def _shares(share: Callable[[Any, list[Any], list[Any]], list[Any]]) -> AbstractContextManager[None]:
    usual = OperatorLists._shares

    def shares(self: Any, *arguments: Any) -> tuple[list[Any], list[Any]]:
        own, everybodys = usual(self, *arguments)
        return share(self, own, everybodys), everybodys

    return patched(OperatorLists, "_shares", shares)


def lists_are_dropped_at_a_rescale() -> AbstractContextManager[None]:  # HL12
    return _shares(lambda self, own, _: own if self.formers_count == self.parallelism else [])


def everybody_gets_all_elements() -> AbstractContextManager[None]:  # HL12
    return _shares(lambda self, own, everybodys: everybodys)


def the_first_subtask_gets_all_elements() -> AbstractContextManager[None]:  # HL12
    return _shares(lambda self, own, everybodys: everybodys if self.subtask_index == 0 else [])


@contextmanager
def lists_are_frozen_by_reference() -> Iterator[None]:  # HL11
    def frozen(self: Any) -> FrozenList:
        return FrozenList(self._descriptor.type, self._values, self._stored)

    with patched(OperatorList, "frozen", frozen):
        yield


@contextmanager
def unions_are_those_of_the_own_former_subtask() -> Iterator[None]:  # HL13
    usual = RestoredSnapshots.lists

    def lists(self: Any, node: str, vertex: Any) -> list[Any]:
        return [part for part in usual(self, node, vertex) if part.subtask_index == self._worker]

    with patched(RestoredSnapshots, "lists", lists):
        yield


@contextmanager
def lists_that_nobody_declares_are_dropped() -> Iterator[None]:  # HL14
    with patched(OperatorLists, "close", lambda self: None):
        yield


@contextmanager
def lists_are_frozen_before_the_function_is_asked() -> Iterator[None]:  # HL11
    usual = Hooks.snapshot

    def snapshot(self: Any, checkpoint: Any) -> Any:
        kept = [(lists, lists.freeze(is_union=False)) for _, lists in self._functions]
        found = usual(self, checkpoint)
        for lists, frozen in kept:
            found.pop((hooks.LISTS_PREFIX, lists.node), None)
            if frozen is not None:
                found[hooks.LISTS_PREFIX, lists.node] = frozen
        return found

    with patched(Hooks, "snapshot", snapshot):
        yield


# -- who is told ----------------------------------------------------------------------------------------------------


@contextmanager
def late_completions_are_told_again() -> Iterator[None]:  # HL5
    def completed(self: Any, checkpoint: Any) -> None:
        for _, listener in self._listeners:
            listener.notify_checkpoint_complete(checkpoint)

    with patched(Hooks, "completed", completed):
        yield


@contextmanager
def writers_are_told_first() -> Iterator[None]:  # HL4
    usual = Hooks.completed

    def completed(self: Any, checkpoint: Any) -> None:
        self._listeners = self._listeners[::-1]
        usual(self, checkpoint)

    with patched(Hooks, "completed", completed):
        yield


@contextmanager
def the_end_does_not_wait_for_listeners() -> Iterator[None]:  # HL7
    with patched(Coordinator, "_on_listener", lambda self, event: []):
        yield


@contextmanager
def a_confirmation_of_any_checkpoint_is_enough() -> Iterator[None]:  # HL7
    usual = Coordinator._on_listener

    def on_listener(self: Any, event: Any) -> Any:
        effects = usual(self, event)
        if getattr(event, "checkpoint", 0):
            self._told.pop(event.worker, None)
        return effects

    with patched(Coordinator, "_on_listener", on_listener):
        yield


MUTANTS: list[tuple[Mutant, Test, tuple[object, ...]]] = [
    (
        only_the_newest_is_published,
        publishing_tests.test_a_late_completion_publishes_what_it_covers_and_nothing_newer,
        (),
    ),
    (
        everything_pending_is_published,
        publishing_tests.test_a_late_completion_publishes_what_it_covers_and_nothing_newer,
        (),
    ),
    (a_snapshot_publishes, publishing_tests.test_a_late_completion_publishes_what_it_covers_and_nothing_newer, ()),
    (
        what_was_pending_is_forgotten_at_a_restore,
        publishing_tests.test_an_aborted_checkpoint_leaves_its_items_to_the_next_one,
        (),
    ),
    (
        an_abort_throws_its_items_away,
        publishing_tests.test_an_aborted_checkpoint_leaves_its_items_to_the_next_one,
        (),
    ),
    (
        what_is_pending_is_forgotten_before_it_is_published,
        publishing_tests.test_what_could_not_be_published_stays_pending,
        (),
    ),
    (only_what_is_new_is_kept, publishing_tests.test_an_aborted_checkpoint_leaves_its_items_to_the_next_one, ()),
    (lists_are_dropped_at_a_rescale, list_tests.test_each_element_goes_to_exactly_one_subtask, ()),
    (everybody_gets_all_elements, list_tests.test_each_element_goes_to_exactly_one_subtask, ()),
    (the_first_subtask_gets_all_elements, list_tests.test_each_element_goes_to_exactly_one_subtask, ()),
    (lists_are_frozen_by_reference, list_tests.test_a_frozen_list_does_not_change_with_the_list, ()),
    (
        unions_are_those_of_the_own_former_subtask,
        restoring_tests.test_the_parts_of_a_union_are_sent_to_every_worker,
        ("union", 2, 2),
    ),
    (
        lists_that_nobody_declares_are_dropped,
        list_tests.test_a_list_of_another_type_or_that_nobody_declares_is_refused,
        (list_tests._of_another_name, "declare any more"),
    ),
    (
        lists_are_frozen_before_the_function_is_asked,
        hook_tests.test_what_snapshot_puts_into_a_list_is_in_this_very_checkpoint,
        (),
    ),
    (late_completions_are_told_again, hook_tests.test_completed_ids_rise_and_nothing_is_told_twice, ()),
    (writers_are_told_first, hook_tests.test_those_who_listen_are_called_in_the_order_of_the_chain, ()),
    (
        the_end_does_not_wait_for_listeners,
        end_tests.test_the_end_waits_until_listeners_have_heard_of_the_last_checkpoint,
        (end_tests.FINISHED,),
    ),
    (
        a_confirmation_of_any_checkpoint_is_enough,
        end_tests.test_the_end_waits_until_listeners_have_heard_of_the_last_checkpoint,
        (end_tests.FINISHED,),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), MUTANTS, ids=lambda x: getattr(x, "__name__", None))
def test_the_mutant_is_caught(mutant: Mutant, test: Test, arguments: tuple[object, ...]) -> None:
    assert_caught(mutant, test, *arguments)
