"""Mutants of the kit for sinks that say nothing about what they leave out (KT3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tests.testing.test_left_out as left_out
from tests.mutants.harness import Mutant, assert_caught, patched

from headgate.testing import sink_kit


@contextmanager
def steps_are_left_out_in_silence() -> Iterator[None]:
    with patched(sink_kit, "_left_out", lambda check, why: []):
        yield


@contextmanager
def what_is_not_compared_is_not_said() -> Iterator[None]:
    with patched(sink_kit, "_not_seen", lambda target: iter(())):
        yield


def test_a_kit_that_leaves_out_in_silence_is_caught(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mutants: list[Mutant] = [steps_are_left_out_in_silence, what_is_not_compared_is_not_said]
    for mutant in mutants:
        assert_caught(mutant, left_out.test_what_the_kit_left_out_is_said, capsys)
