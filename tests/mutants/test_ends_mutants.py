"""Mutants of what a run does with what nobody expected to be raised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import tests.runtime.test_ends_without_a_word as ends
from tests.mutants.harness import assert_caught, patched

from headgate.protocol.supervision import events
from headgate.protocol.supervision.supervisor import Supervisor
from headgate.runtime.checkpoints import uploads
from headgate.runtime.driver import coordination, hook_calls, supervision
from headgate.runtime.driver.ending import RunEnd
from headgate.runtime.worker import chain, hooks

Context = AbstractContextManager[None]

EXIT = SystemExit("by a client")


def an_end_of_a_claim_is_lost() -> Context:  # CS26
    return patched(supervision, "ThreadEnded", SystemExit)


def an_end_of_a_commit_is_lost() -> Context:  # CS26
    return patched(coordination, "ThreadEnded", SystemExit)


def an_end_of_a_write_is_lost() -> Context:  # CS26
    return patched(uploads, "ThreadEnded", SystemExit)


def an_end_of_a_hook_is_lost() -> Context:  # CS26
    return patched(hook_calls, "ThreadEnded", SystemExit)


LOST = [
    (an_end_of_a_claim_is_lost, "claim"),
    (an_end_of_a_commit_is_lost, "commit"),
    (an_end_of_a_write_is_lost, "prepare"),
]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits for ever need not be waited for long."""
    monkeypatch.setattr(ends, "SECONDS", 1.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("mutant", "method"), LOST)
def test_an_end_that_nobody_hears_of_is_caught(tmp_path: Path, mutant: Callable[[], Context], method: str) -> None:
    assert_caught(mutant, ends.check_sink_method, tmp_path, method, EXIT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_of_a_hook_that_nobody_hears_of_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "HOOK_TIMEOUT", "100ms")
    assert_caught(an_end_of_a_hook_is_lost, ends.check_hook_method, tmp_path, "reset", EXIT)


def a_bug_keeps_the_pipeline() -> Context:  # G26
    held: list[RunEnd] = []  # a lock that is collected is released, too
    return patched(RunEnd, "release_lock", lambda self: held.append(self))


def test_a_pipeline_that_stays_held_is_caught(tmp_path: Path) -> None:
    assert_caught(a_bug_keeps_the_pipeline, ends.check_bug, tmp_path, Supervisor, events.GenerationReady)


def an_end_of_a_listener_is_nobodys() -> Context:  # CS26, HL6
    return patched(hooks, "ThreadEnded", SystemExit)


def an_end_of_a_function_is_nobodys() -> Context:  # CS26
    return patched(chain, "ThreadEnded", SystemExit)


def test_an_end_without_a_name_is_caught(tmp_path: Path) -> None:
    listens = ends.test_whatever_a_listener_raises_is_its_own_and_may_pass
    named = ends.test_whatever_a_function_raises_the_operator_is_named
    assert_caught(an_end_of_a_listener_is_nobodys, listens, tmp_path / "listener", EXIT)
    assert_caught(an_end_of_a_function_is_nobodys, named, tmp_path / "function", EXIT)
