"""Mutants of what is measured: a number that is nearly right is believed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api import test_prometheus as port_tests
from tests.api import test_running as running_tests
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime import test_totals as totals_tests
from tests.runtime.driver import test_edge_book as edges_tests
from tests.runtime.driver import test_node_book as book_tests
from tests.runtime.worker import test_chain as chain_tests
from tests.runtime.worker import test_edges as edge_tests
from tests.runtime.worker import test_stopwatch as watch_tests
from tests.runtime.worker import test_subtask_runner as runner_tests
from tests.sim.product.patching import around, skipped
from tests.spark import test_own_jvm as jvm_tests

from headgate.api import running
from headgate.api.pipeline import METRICS_HOST
from headgate.api.prometheus import MetricsPort
from headgate.model.manifest import Manifest
from headgate.model.progress import SubtaskProgress
from headgate.runtime.driver.claims import Finished
from headgate.runtime.driver.edge_book import EdgeBook
from headgate.runtime.driver.node_book import NodeBook
from headgate.runtime.driver.supervision import Supervision
from headgate.runtime.worker.chain import Chain, Link
from headgate.runtime.worker.input_meter import EdgeInput
from headgate.runtime.worker.stopwatch import HeldBack, Stopwatch
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.spark import own_jvm


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


def what_has_finished_had_counted_nothing() -> AbstractContextManager[None]:
    def claimed(call: Any, self: Supervision, begun: Any) -> None:
        if isinstance(begun, Finished):
            begun = replace(begun, manifest=replace(begun.manifest, totals={}))
        call(self, begun)

    return around(Supervision, "_claimed", claimed)


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


def all_edges_hold_back_whoever_is_held_back() -> AbstractContextManager[None]:
    def note(self: SubtaskRunner, is_held_back: bool) -> None:
        self.held_back.note(is_held_back)
        for outlet in self.outlets:
            outlet.held_back.note(is_held_back)

    return patched(SubtaskRunner, "_note_held_back", note)


def an_edge_is_noted_when_it_begins_and_not_when_it_ends() -> AbstractContextManager[None]:
    def note(call: Any, self: SubtaskRunner, is_held_back: bool) -> None:
        if is_held_back:
            call(self, is_held_back)
        self.held_back.note(is_held_back)

    return around(SubtaskRunner, "_note_held_back", note)


def an_edge_is_as_full_as_its_channels_are_on_average() -> AbstractContextManager[None]:
    return patched(EdgeInput, "fill", property(lambda self: sum(c.fill for c in self.channels) / len(self.channels)))


def edges_are_told_by_whoever_reported_last() -> AbstractContextManager[None]:
    def add(call: Any, self: EdgeBook, worker: int, samples: Any) -> None:
        call(self, worker, samples)
        self._lately = {worker: self._lately.get(worker, {})}

    return around(EdgeBook, "add", add)


def edges_of_a_former_generation_are_told() -> AbstractContextManager[None]:
    return skipped(EdgeBook, "begin")


def the_last_of_one_pass_is_given_what_the_first_is_given() -> AbstractContextManager[None]:
    def measured(call: Any, self: Link) -> Any:
        *before, last = call(self)
        return [*before, replace(last, records_in=self.totals.records_in)]

    return around(Link, "measured", measured)


def the_port_stays_open_after_a_start_that_failed() -> AbstractContextManager[None]:
    def closed(call: Any, self: MetricsPort) -> None:
        if self._registry._collector_to_names:  # it watches somebody
            call(self)

    return around(MetricsPort, "close", closed)


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
    (all_edges_hold_back_whoever_is_held_back, edge_tests.test_an_edge_says_whether_it_is_the_one_without_room),
    (
        an_edge_is_noted_when_it_begins_and_not_when_it_ends,
        edge_tests.test_an_edge_says_whether_it_is_the_one_without_room,
    ),
    (an_edge_is_as_full_as_its_channels_are_on_average, edge_tests.test_an_edge_is_as_full_as_its_fullest_channel),
    (edges_are_told_by_whoever_reported_last, edges_tests.test_edges_are_added_up_over_their_subtasks),
    (edges_of_a_former_generation_are_told, edges_tests.test_a_restart_begins_with_nothing),
    (
        the_last_of_one_pass_is_given_what_the_first_is_given,
        chain_tests.test_a_pass_is_measured_operator_by_operator,
    ),
    (the_size_of_state_is_not_known, book_tests.test_the_size_of_the_state_is_that_of_the_last_checkpoint),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_metrics_finds_it(mutant: Mutant, test: Callable[..., object]) -> None:
    test()
    assert_caught(mutant, test)


def the_second_of_two_sigterms_is_a_second_wish() -> AbstractContextManager[None]:
    return patched(running, "SAME_WISH_MS", 0)


def test_a_wish_that_is_told_twice_is_told_from_two_wishes() -> None:
    def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            running_tests.test_sigterm_twice_in_one_moment_is_once(patch)

    test()
    assert_caught(the_second_of_two_sigterms_is_a_second_wish, test)


def test_a_fork_that_removes_the_directory_of_its_parent_is_found(tmp_path: Path) -> None:
    def mutant() -> AbstractContextManager[None]:
        return patched(own_jvm, "_remove", lambda process, own: own.remove())

    def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            jvm_tests.test_a_fork_leaves_the_directory_to_its_parent(tmp_path, patch)

    test()
    assert_caught(mutant, test)


def test_a_finished_pipeline_that_reports_nothing_is_found(tmp_path: Path) -> None:
    test = totals_tests.test_a_finished_pipeline_that_is_started_again_reports_what_it_had_counted
    assert_caught(what_has_finished_had_counted_nothing, test, tmp_path)


def test_a_port_that_stays_open_is_found() -> None:
    def test() -> None:
        port = MetricsPort(0, METRICS_HOST)
        try:
            port_tests.test_a_start_that_fails_gives_its_port_up(port)
        finally:
            port.watch("p", lambda: port_tests.PROGRESS)
            port.close()

    test()
    assert_caught(the_port_stays_open_after_a_start_that_failed, test)
