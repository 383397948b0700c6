"""Mutants of what is measured: a number that is nearly right is believed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_node_book as book_tests
from tests.runtime.worker import test_stopwatch as watch_tests
from tests.runtime.worker import test_subtask_runner as runner_tests
from tests.sim.product.patching import around, skipped

from headgate.model.manifest import Manifest
from headgate.model.progress import SubtaskProgress
from headgate.runtime.driver.node_book import NodeBook
from headgate.runtime.worker.chain import Chain
from headgate.runtime.worker.stopwatch import HeldBack, Stopwatch
from headgate.runtime.worker.subtask_runner import SubtaskRunner


def totals_are_those_when_the_snapshot_is_durable() -> AbstractContextManager[None]:
    """They have counted what the next checkpoint counts, too."""

    def run(call: Any, self: SubtaskRunner, effect: Any, text: str) -> None:
        checkpoint = getattr(effect, "checkpoint", None)
        if checkpoint in self._counted:
            self._counted[checkpoint] = self.chain.counted()
        call(self, effect, text)

    return around(SubtaskRunner, "_run", run)


def a_generation_begins_at_zero() -> AbstractContextManager[None]:
    return around(NodeBook, "begin", lambda call, self, before: call(self, {}))


def a_restart_takes_the_work_back() -> AbstractContextManager[None]:
    def begin(call: Any, self: NodeBook, before: Any) -> None:
        self._now = {}
        call(self, before)

    return around(NodeBook, "begin", begin)


def totals_are_those_of_the_last_reports() -> AbstractContextManager[None]:
    def completed(call: Any, self: NodeBook, manifest: Manifest) -> None:
        call(self, manifest)
        self._completed = {}

    return around(NodeBook, "completed", completed)


def an_operator_is_charged_for_those_behind_it() -> AbstractContextManager[None]:
    def switch(self: Stopwatch, to: Any) -> Any:
        now_ns, before = self._clock_ns(), self.running
        if to is not None:
            to.busy_ns -= now_ns
        if before is not None and (to is None or before.node > to.node):
            before.busy_ns += now_ns
        self.running = to
        return before

    return patched(Stopwatch, "switch", switch)


def time_that_is_held_back_counts_when_it_is_over() -> AbstractContextManager[None]:
    return patched(HeldBack, "total_ns", property(lambda self: self._total_ns))


def shares_are_means() -> AbstractContextManager[None]:
    def subtask(call: Any, self: NodeBook, worker: int, node: str) -> SubtaskProgress:
        found: SubtaskProgress = call(self, worker, node)
        shares = [self._shares.get(one, {}).get(node, (0.0, 0.0))[0] for one in self._now]
        object.__setattr__(found, "busy", sum(shares) / max(len(shares), 1))
        return found

    return around(NodeBook, "_subtask", subtask)


def bad_records_are_not_counted() -> AbstractContextManager[None]:
    def counted(call: Any, self: Chain) -> Any:
        return {node: {name: n for name, n in of.items() if name != "bad_records"} for node, of in call(self).items()}

    return around(Chain, "counted", counted)


def the_size_of_state_is_not_known() -> AbstractContextManager[None]:
    return skipped(NodeBook, "completed")


CAUGHT: list[tuple[Mutant, Callable[..., object]]] = [
    (
        totals_are_those_when_the_snapshot_is_durable,
        runner_tests.test_the_totals_of_a_checkpoint_are_those_at_the_barrier,
    ),
    (a_generation_begins_at_zero, book_tests.test_a_generation_counts_on_from_what_its_checkpoint_had_counted),
    (a_restart_takes_the_work_back, book_tests.test_a_restart_takes_totals_back_and_not_the_work),
    (totals_are_those_of_the_last_reports, book_tests.test_totals_are_no_less_than_those_of_the_newest_checkpoint),
    (
        an_operator_is_charged_for_those_behind_it,
        watch_tests.test_an_operator_is_charged_its_own_time_without_that_of_those_behind_it,
    ),
    (
        time_that_is_held_back_counts_when_it_is_over,
        watch_tests.test_time_that_is_held_back_is_counted_while_it_lasts,
    ),
    (
        shares_are_means,
        book_tests.test_shares_are_those_of_the_busiest_subtask_between_its_last_two_reports,
    ),
    (bad_records_are_not_counted, watch_tests.test_what_is_counted_is_what_went_through_and_what_was_bad),
    (the_size_of_state_is_not_known, book_tests.test_the_size_of_the_state_is_that_of_the_last_checkpoint),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_metrics_finds_it(mutant: Mutant, test: Callable[..., object]) -> None:
    test()
    assert_caught(mutant, test)
