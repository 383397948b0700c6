"""Mutants of what notebooks show, and of the fixtures of pytest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.display import test_live as live_tests
from tests.display import test_pictures as pictures
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.testing import test_pytest_plugin as plugin_tests

from headgate.api.records import Records
from headgate.display import html, layout
from headgate.runtime.driver.handle import DriverHandle
from headgate.testing import in_process


def cells_are_html() -> AbstractContextManager[None]:  # ND2
    return patched(html, "escaped", str)


def rows_of_any_stream_behind_rows_are_shown() -> AbstractContextManager[None]:  # ND1
    def rows(self: Any) -> Any:
        return self._pipeline._builder.nodes[0].spec.first(5)

    return patched(Records, "_rows_at_hand", rows)


def operators_of_a_column_share_a_place() -> AbstractContextManager[None]:  # ND3
    return patched(layout, "_rows", lambda nodes, depth: dict.fromkeys(depth, 0.0))


def interrupted_waiting_waits_on() -> AbstractContextManager[None]:  # ND6
    def wait(self: Any, timeout_s: float | None = None) -> Any:
        try:
            return live_tests.handles.wait_for(self.driver.result, timeout_s)
        finally:
            self._release()

    return patched(DriverHandle, "wait", wait)


def restarts_wait_as_configured() -> AbstractContextManager[None]:  # TR9
    def raise_instead(restart: Any) -> Any:
        assert restart.delay_ms < 1_000, "the test would wait for an hour"
        return restart

    return patched(in_process, "_soon", raise_instead)


@pytest.mark.parametrize(
    ("mutant", "test", "fixtures"),
    [
        (cells_are_html, pictures.test_a_stream_shows_its_columns_and_runs_nothing, []),
        (
            rows_of_any_stream_behind_rows_are_shown,
            pictures.test_rows_that_the_program_gave_are_shown_and_computed_ones_are_not,
            [],
        ),
        (
            operators_of_a_column_share_a_place,
            pictures.test_operators_stand_behind_all_that_feed_them_and_nowhere_twice,
            [],
        ),
        (
            interrupted_waiting_waits_on,
            live_tests.test_whoever_is_interrupted_while_waiting_leaves_the_run_alone,
            ["monkeypatch"],
        ),
        (restarts_wait_as_configured, plugin_tests.test_delays_of_restarts_are_short, ["tmp_path"]),
    ],
)
def test_the_mutant_is_caught(
    mutant: Mutant, test: Callable[..., object], fixtures: list[str], request: pytest.FixtureRequest
) -> None:
    assert_caught(mutant, test, *map(request.getfixturevalue, fixtures))
