"""Mutants of how a process starts Spark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.cli import test_run
from tests.mutants.harness import assert_caught, patched
from tests.sim.product.patching import around

from headgate.cli import running
from headgate.cli.run_options import RunOptions
from headgate.spark.jvm_settings import JVM_OPTIONS, QUICK_COMPILER


def the_jvm_optimizes_its_start() -> AbstractContextManager[None]:
    return patched(running, "quick_jvm", nullcontext)


def options_of_the_user_come_first() -> AbstractContextManager[None]:
    @contextmanager
    def quick_jvm() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(JVM_OPTIONS, f"{os.environ.get(JVM_OPTIONS, '')} {QUICK_COMPILER}".strip())
            yield

    return patched(running, "quick_jvm", quick_jvm)


def options_stay_when_a_start_is_refused() -> AbstractContextManager[None]:
    @contextmanager
    def quick_jvm() -> Iterator[None]:
        given = os.environ.get(JVM_OPTIONS, "")
        os.environ[JVM_OPTIONS] = f"{QUICK_COMPILER} {given}"
        yield
        os.environ[JVM_OPTIONS] = given

    return patched(running, "quick_jvm", quick_jvm)


def test_a_jvm_that_optimizes_its_start_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = test_run.test_the_jvm_of_the_command_starts_quickly
    assert_caught(the_jvm_optimizes_its_start, named, monkeypatch, tmp_path)


def test_options_that_the_user_cannot_change_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = test_run.test_options_of_the_user_come_later_and_so_win
    assert_caught(options_of_the_user_come_first, named, monkeypatch, tmp_path)


def test_options_that_stay_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = test_run.test_a_start_that_is_refused_leaves_the_options_as_they_were
    assert_caught(options_stay_when_a_start_is_refused, named, monkeypatch, tmp_path)


def a_keeper_forgets(option: str) -> AbstractContextManager[None]:
    def of_a_driver(call: Any, self: RunOptions) -> list[str]:
        return [word for word in call(self) if not word.startswith(option)]

    return around(RunOptions, "of_a_driver", of_a_driver)


@pytest.mark.parametrize("option", ["--restore", "--go-back-behind", "--allow-unclaimed-state", "--standby"])
def test_a_keeper_that_forgets_what_was_named_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    def mutant() -> AbstractContextManager[None]:
        return a_keeper_forgets(option)

    named = test_run.test_every_driver_of_a_keeper_is_told_what_its_command_names
    assert_caught(mutant, named, monkeypatch, tmp_path, ["--standby"])
