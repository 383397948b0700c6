"""Mutants of pipelines that run in the process of their test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NoReturn

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.testing import test_run_in_process as run_tests
from tests.testing.test_run_in_process import settings  # noqa: F401 - a fixture

from headgate.testing import worker_threads
from headgate.testing.in_process import InProcessHandle, _ProcessSettings
from headgate.testing.worker_threads import ThreadLauncher, ThreadSurroundings


def generations_share_what_functions_keep() -> AbstractContextManager[None]:  # TR2
    return patched(worker_threads.cloudpickle, "loads", cache(worker_threads.cloudpickle.loads))


def a_worker_that_exits_stays() -> AbstractContextManager[None]:  # TR4
    def end_thread(self: Any, code: int) -> NoReturn:
        raise worker_threads._WorkerExit(code)

    return patched(ThreadSurroundings, "exit", end_thread)


def a_worker_is_gone_before_its_threads() -> AbstractContextManager[None]:  # TR5
    return patched(ThreadSurroundings, "join", lambda self: None)


def every_run_sets_back_what_it_found() -> AbstractContextManager[None]:  # TR5
    kept = _ProcessSettings.kept
    return patched(_ProcessSettings, "kept", lambda self: kept(_ProcessSettings()))


def nobody_is_ever_stuck() -> AbstractContextManager[None]:  # TR6
    return patched(ThreadLauncher, "give_up", lambda self: [])


def a_worker_is_never_lost() -> AbstractContextManager[None]:  # TR7
    return patched(ThreadLauncher, "kill", lambda self: None)


def a_run_that_lost_nobody_passes() -> AbstractContextManager[None]:  # TR7
    return patched(InProcessHandle, "refuse_unharmed", lambda self: None)


def test_every_run_sets_back_what_it_found_is_caught(settings: Callable[[], tuple[float, int]]) -> None:  # noqa: F811
    test = run_tests.test_of_runs_side_by_side_the_last_one_sets_back_what_the_first_one_found
    assert_caught(every_run_sets_back_what_it_found, test, settings, 0)


@pytest.mark.parametrize(
    ("mutant", "test", "fixtures"),
    [
        (
            generations_share_what_functions_keep,
            run_tests.test_what_a_function_keeps_for_itself_is_gone_after_a_restart,
            ["tmp_path"],
        ),
        (
            a_worker_that_exits_stays,
            run_tests.test_the_end_of_a_worker_is_not_the_end_of_the_process,
            ["monkeypatch"],
        ),
        (a_worker_is_gone_before_its_threads, run_tests.test_a_worker_is_gone_when_its_last_thread_is, []),
        (
            nobody_is_ever_stuck,
            run_tests.test_a_function_that_does_not_return_is_named,
            ["tmp_path", "monkeypatch"],
        ),
        (
            a_run_that_lost_nobody_passes,
            run_tests.test_a_run_that_ends_before_its_worker_is_lost_is_refused,
            ["tmp_path"],
        ),
        (a_worker_is_never_lost, run_tests.test_a_lost_worker_is_replaced, ["tmp_path"]),
    ],
)
def test_the_mutant_is_caught(
    mutant: Mutant, test: Callable[..., object], fixtures: list[str], request: pytest.FixtureRequest
) -> None:
    assert_caught(mutant, test, *map(request.getfixturevalue, fixtures))
