"""Mutants of the aligner: one for each row of its table that ``test_subtask_mutants`` leaves (A4–A11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_align as align_tests
from tests.protocol.making import ch
from tests.sim.product.patching import around, skipped

from headgate.model.options import ORDINARY
from headgate.protocol.checkpoints.align import (
    Aligner,
    BarrierReceived,
    Decline,
    EmitCancel,
    Phase,
    TakeSnapshot,
    UnblockChannels,
)
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.machine import Ignored


def _silently(effects: list[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, UnblockChannels)]


# -- a newer checkpoint ---------------------------------------------------------------------------------------------


def a_newer_barrier_waits_for_the_older_one() -> AbstractContextManager[None]:  # A4
    def on_barrier(call: Any, self: Any, event: Any) -> Any:
        if self._phase is Phase.ALIGNING and event.checkpoint > self._current:
            return [Ignored("not its turn")]
        return call(self, event)

    return around(Aligner, "_on_barrier", on_barrier)


def a_newer_barrier_completes_the_older_checkpoint() -> AbstractContextManager[None]:  # A4
    def abandon(call: Any, self: Any, reason: AbortReason) -> Any:
        is_overtaken = reason is AbortReason.OVERTAKEN and self._phase is Phase.ALIGNING
        return self._complete() if is_overtaken else call(self, reason)

    return around(Aligner, "_abandon", abandon)


def the_coordinator_is_not_told_of_what_was_overtaken() -> AbstractContextManager[None]:  # A4
    def abandon(call: Any, self: Any, reason: AbortReason) -> Any:
        return [effect for effect in call(self, reason) if not isinstance(effect, Decline)]

    return around(Aligner, "_abandon", abandon)


def _cancelled(change: Callable[[Aligner, list[Any]], list[Any]]) -> AbstractContextManager[None]:
    """Change what the cancel marker of a newer checkpoint orders while another one is aligned."""

    def on_cancel(call: Any, self: Any, event: Any) -> Any:
        is_newer = self._phase is Phase.ALIGNING and event.checkpoint > self._current
        current, effects = self._current, call(self, event)
        return change(current, effects) if is_newer else effects

    return around(Aligner, "_on_cancel", on_cancel)


def a_newer_cancel_marker_says_nothing_of_the_current_checkpoint() -> AbstractContextManager[None]:  # A6
    """Flink's first aligner: the coordinator waits for its timeout, and everybody downstream for a barrier."""
    return _cancelled(lambda current, effects: [e for e in effects if getattr(e, "checkpoint", None) != current])


def a_newer_cancel_marker_gives_up_the_current_checkpoint_only() -> AbstractContextManager[None]:  # A6
    def on_cancel(call: Any, self: Any, event: Any) -> Any:
        if self._phase is Phase.ALIGNING and event.checkpoint > self._current:
            return self._abandon(AbortReason.OVERTAKEN)
        return call(self, event)

    return around(Aligner, "_on_cancel", on_cancel)


def barriers_of_a_newer_cancelled_checkpoint_are_aligned() -> AbstractContextManager[None]:  # A6
    def on_cancel(call: Any, self: Any, event: Any) -> Any:
        current, effects = self._current, call(self, event)
        self._current = current
        return effects

    return around(Aligner, "_on_cancel", on_cancel)


def an_older_cancel_marker_gives_up_the_current_checkpoint() -> AbstractContextManager[None]:  # A5
    def on_cancel(call: Any, self: Any, event: Any) -> Any:
        return call(self, replace(event, checkpoint=max(event.checkpoint, self._current)))

    return around(Aligner, "_on_cancel", on_cancel)


# -- ended channels -------------------------------------------------------------------------------------------------


def an_ended_channel_is_waited_for() -> AbstractContextManager[None]:  # A7
    return patched(Aligner, "_missing", lambda self: self._channels_count - len(self._blocked))


def the_end_of_the_last_missing_channel_completes_nothing() -> AbstractContextManager[None]:  # A7
    """What is aligned waits for ever: no barrier can come any more."""

    def on_end(call: Any, self: Any, event: Any) -> Any:
        self._ended.add(event.channel)
        self._blocked.discard(event.channel)
        return [Ignored("an ended channel counts as aligned")]

    @contextmanager
    def planted() -> Iterator[None]:
        with around(Aligner, "_on_end", on_end), skipped(Aligner, "_check"):
            yield

    return planted()


def any_end_completes() -> AbstractContextManager[None]:  # A7
    def on_end(call: Any, self: Any, event: Any) -> Any:
        effects = call(self, event)
        return self._complete() if self._phase is Phase.ALIGNING else effects

    return around(Aligner, "_on_end", on_end)


def what_comes_on_an_ended_channel_is_taken() -> AbstractContextManager[None]:  # A10
    @contextmanager
    def planted() -> Iterator[None]:
        with skipped(Aligner, "_refuse_ended"), skipped(Aligner, "_check"):
            yield

    return planted()


# -- aborts and violations ------------------------------------------------------------------------------------------


def an_abort_leaves_channels_blocked() -> AbstractContextManager[None]:  # A9
    def on_abort(call: Any, self: Any, event: Any) -> Any:
        if self._phase is Phase.ALIGNING and event.checkpoint == self._current:
            return [EmitCancel(self._current)]
        return call(self, event)

    return around(Aligner, "_on_abort", on_abort)


def an_abort_sends_nobody_a_marker() -> AbstractContextManager[None]:  # A9
    return around(Aligner, "_on_abort", lambda call, self, event: _silently(call(self, event)))


def an_abort_is_declined() -> AbstractContextManager[None]:  # A9
    def on_abort(call: Any, self: Any, event: Any) -> Any:
        if self._phase is Phase.ALIGNING and event.checkpoint == self._current:
            return self._abandon(AbortReason.CANCELLED_UPSTREAM)
        return call(self, event)

    return around(Aligner, "_on_abort", on_abort)


def an_older_abort_releases_the_current_checkpoint() -> AbstractContextManager[None]:  # A9
    def on_abort(call: Any, self: Any, event: Any) -> Any:
        return call(self, replace(event, checkpoint=max(event.checkpoint, self._current)))

    return around(Aligner, "_on_abort", on_abort)


def a_second_barrier_on_a_channel_is_ignored() -> AbstractContextManager[None]:  # A10
    def on_barrier(call: Any, self: Any, event: Any) -> Any:
        is_second = event.channel in self._blocked and event.checkpoint == self._current
        return [Ignored("it has come already")] if is_second else call(self, event)

    return around(Aligner, "_on_barrier", on_barrier)


# -- options --------------------------------------------------------------------------------------------------------


def every_checkpoint_is_an_ordinary_one() -> AbstractContextManager[None]:  # A11
    def complete(call: Any, self: Any) -> Any:
        effects = call(self)
        return [replace(e, options=ORDINARY) if isinstance(e, TakeSnapshot) else e for e in effects]

    return around(Aligner, "_complete", complete)


def options_stay_for_the_next_checkpoint() -> AbstractContextManager[None]:  # A11
    def on_barrier(call: Any, self: Any, event: Any) -> Any:
        options = self._options
        effects = call(self, event if options == ORDINARY else replace(event, options=options))
        self._options = options if options != ORDINARY else self._options
        return effects

    return around(Aligner, "_on_barrier", on_barrier)


def the_first_barrier_decides_what_a_checkpoint_is() -> AbstractContextManager[None]:  # A11
    def on_barrier(call: Any, self: Any, event: Any) -> Any:
        is_current = event.checkpoint == self._current
        return call(self, replace(event, options=self._options) if is_current else event)

    return around(Aligner, "_on_barrier", on_barrier)


OVERTAKEN = align_tests.test_newer_barrier_abandons_the_current_checkpoint_and_starts_the_next
NEWER_CANCELLED = align_tests.test_cancel_of_a_newer_checkpoint_abandons_the_current_one_too
ABORTED = align_tests.test_abort_of_the_checkpoint_being_aligned_releases_without_a_decline
OPTIONS = align_tests.test_options_travel_from_the_barrier_to_the_snapshot_and_the_barriers_sent_on

CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (a_newer_barrier_waits_for_the_older_one, OVERTAKEN, ()),
    (a_newer_barrier_completes_the_older_checkpoint, OVERTAKEN, ()),
    (the_coordinator_is_not_told_of_what_was_overtaken, OVERTAKEN, ()),
    (a_newer_cancel_marker_says_nothing_of_the_current_checkpoint, NEWER_CANCELLED, ()),
    (a_newer_cancel_marker_gives_up_the_current_checkpoint_only, NEWER_CANCELLED, ()),
    (barriers_of_a_newer_cancelled_checkpoint_are_aligned, NEWER_CANCELLED, ()),
    (
        an_older_cancel_marker_gives_up_the_current_checkpoint,
        align_tests.test_cancel_of_an_older_checkpoint_is_ignored_while_aligning,
        (),
    ),
    (an_ended_channel_is_waited_for, align_tests.test_channel_that_ends_while_flowing_counts_as_aligned_later, ()),
    (
        the_end_of_the_last_missing_channel_completes_nothing,
        align_tests.test_last_missing_channel_that_ends_completes,
        (),
    ),
    (any_end_completes, align_tests.test_channel_that_ends_while_others_are_missing_does_not_complete, ()),
    (
        what_comes_on_an_ended_channel_is_taken,
        align_tests.test_any_event_on_an_ended_channel_is_a_violation,
        (BarrierReceived(ch(0), align_tests.cp(9)), True),
    ),
    (an_abort_leaves_channels_blocked, ABORTED, ()),
    (an_abort_sends_nobody_a_marker, ABORTED, ()),
    (an_abort_is_declined, ABORTED, ()),
    (
        an_older_abort_releases_the_current_checkpoint,
        align_tests.test_abort_of_an_older_checkpoint_changes_nothing,
        (),
    ),
    (
        a_second_barrier_on_a_channel_is_ignored,
        align_tests.test_second_barrier_on_a_blocked_channel_is_a_violation,
        (),
    ),
    (every_checkpoint_is_an_ordinary_one, OPTIONS, ()),
    (options_stay_for_the_next_checkpoint, OPTIONS, ()),
    (
        the_first_barrier_decides_what_a_checkpoint_is,
        align_tests.test_barriers_of_one_checkpoint_with_other_options_are_a_violation,
        (),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_the_aligner_is_caught(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    test(*arguments)
    assert_caught(mutant, test, *arguments)
