"""Mutants of what the options of checkpoints promise: the pause, how many at once and how many are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.mutants.test_coordinator_mutants import a_checkpoint_completes_without_its_last_subtask
from tests.protocol.checkpoints import test_coordinator as coordinator_tests
from tests.runtime import held_writes
from tests.runtime import test_checkpoint_options as option_tests
from tests.runtime import test_deaths_on_purpose as death_tests
from tests.runtime.conftest import start, zygote  # noqa: F401  # real drivers and workers
from tests.sim.product.patching import around, skipped

from headgate.protocol.checkpoints.coordinator_events import ArmTimer, DropCheckpoint
from headgate.protocol.checkpoints.retention import Retention
from headgate.protocol.checkpoints.triggering import Triggering
from headgate.runtime.driver import adopting, claims

SHORT_S = 2.0
"""What never happens under a mutant is not awaited for long."""

# -- the minimum pause ----------------------------------------------------------------------------------------------


def there_is_no_pause() -> AbstractContextManager[None]:  # C4
    def completed(call: Any, self: Any, checkpoint: Any, pending: Any) -> Any:
        call(self, checkpoint, pending)
        self._is_paused = False
        return []

    return around(Triggering, "completed", completed)


def a_pause_begins_with_the_checkpoint() -> AbstractContextManager[None]:  # C4
    """Checkpoints that take long leave no time for processing."""

    def completed(call: Any, self: Any, checkpoint: Any, pending: Any) -> Any:
        return [replace(e, delay_ms=0) if isinstance(e, ArmTimer) else e for e in call(self, checkpoint, pending)]

    return around(Triggering, "completed", completed)


def a_pause_never_ends() -> AbstractContextManager[None]:  # C4
    return skipped(Triggering, "pause_over")


def a_pause_holds_back_whoever_asks() -> AbstractContextManager[None]:  # C4
    def request(self: Any) -> None:
        self._is_due = True

    return patched(Triggering, "request", request)


# -- how many -------------------------------------------------------------------------------------------------------


def _limited(limit: int) -> AbstractContextManager[None]:
    def begin(call: Any, self: Any, pending: Any) -> Any:
        config, self._config = self._config, replace(self._config, max_concurrent=limit)
        try:
            return call(self, pending)
        finally:
            self._config = config

    return around(Triggering, "begin", begin)


def one_checkpoint_at_a_time() -> AbstractContextManager[None]:  # C3
    return _limited(1)


@contextmanager
def one_checkpoint_at_a_time_with_real_workers() -> Iterator[None]:  # C3
    with one_checkpoint_at_a_time(), patched(held_writes, "WAIT_S", SHORT_S):
        yield


@contextmanager
def nobody_waits_for_the_last_worker() -> Iterator[None]:  # C8
    with a_checkpoint_completes_without_its_last_subtask(), patched(held_writes, "WAIT_S", SHORT_S):
        yield


def any_number_of_checkpoints_at_a_time() -> AbstractContextManager[None]:  # C3
    return _limited(1_000)


@contextmanager
def each_completion_drops_one_checkpoint() -> Iterator[None]:  # C31
    """Right for ever, unless fewer are to be kept than before."""

    def completed(self: Any, checkpoint: Any) -> Any:
        self._retained.append(checkpoint)
        return [DropCheckpoint(self._retained.pop(0))] if len(self._retained) > self._count_max else []

    def oldest_with(self: Any, checkpoint: Any) -> Any:
        kept = [*self._retained, checkpoint]
        return kept[1] if len(kept) > self._count_max else kept[0]

    with (
        patched(Retention, "completed", completed),
        patched(Retention, "oldest_with", oldest_with),
        skipped(Retention, "check"),
    ):
        yield


def what_was_kept_before_the_start_is_not_counted() -> AbstractContextManager[None]:  # C31, C35
    def init(call: Any, self: Any, count_max: int, retained: Any) -> None:
        call(self, count_max, ())

    return around(Retention, "__init__", init)


def a_finished_pipeline_keeps_what_it_has() -> AbstractContextManager[None]:  # C31
    return skipped(claims, "_drop_old")


# -- which one ------------------------------------------------------------------------------------------------------


def the_newest_checkpoint_is_restored_whichever_is_named() -> AbstractContextManager[None]:  # SV25
    def named_log(call: Any, url: str) -> Any:
        found = call(url)
        return found and replace(found, checkpoint=None)

    return around(adopting, "named_log", named_log)


PAUSE = coordinator_tests.test_the_minimum_pause_counts_from_the_completion
LIMIT = coordinator_tests.test_no_more_checkpoints_are_pending_than_allowed
DROPPED = coordinator_tests.test_checkpoints_beyond_the_retained_ones_are_dropped_oldest_first

CAUGHT: list[tuple[Mutant, Callable[..., object]]] = [
    (there_is_no_pause, PAUSE),
    (a_pause_begins_with_the_checkpoint, PAUSE),
    (a_pause_never_ends, PAUSE),
    (
        a_pause_holds_back_whoever_asks,
        coordinator_tests.test_a_requested_checkpoint_waits_neither_for_interval_nor_pause,
    ),
    (one_checkpoint_at_a_time, LIMIT),
    (any_number_of_checkpoints_at_a_time, LIMIT),
    (what_was_kept_before_the_start_is_not_counted, DROPPED),
]

CAUGHT_BY_REAL_WORKERS: list[tuple[Mutant, Callable[..., object]]] = [
    (
        one_checkpoint_at_a_time_with_real_workers,
        option_tests.test_two_checkpoints_are_under_way_at_once_and_no_third,
    ),
    (
        nobody_waits_for_the_last_worker,
        death_tests.test_a_worker_dies_in_its_first_epoch_when_the_others_have_acknowledged,
    ),
    (there_is_no_pause, option_tests.test_a_pause_holds_back_every_periodic_checkpoint_and_no_other),
    (
        each_completion_drops_one_checkpoint,
        option_tests.test_fewer_checkpoints_are_kept_from_the_first_completion_on,
    ),
    (
        a_finished_pipeline_keeps_what_it_has,
        option_tests.test_fewer_checkpoints_are_kept_of_a_pipeline_that_has_finished,
    ),
    (
        the_newest_checkpoint_is_restored_whichever_is_named,
        option_tests.test_an_older_checkpoint_chosen_by_hand_is_gone_back_to_once,
    ),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=lambda value: value.__name__)
def test_a_named_test_of_the_coordinator_finds_it(mutant: Mutant, test: Callable[..., object]) -> None:
    test()
    assert_caught(mutant, test)


@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY_REAL_WORKERS, ids=lambda value: value.__name__)
def test_a_run_with_real_workers_finds_it(
    mutant: Mutant,
    test: Callable[..., object],
    start: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    assert_caught(mutant, test, start, tmp_path)
