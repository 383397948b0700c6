"""Whole runs: sound machines pass, rare branches are reached, and a seed is repeated exactly (X1, X2, X5)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from headgate.protocol.coordinator import Coordinator
from headgate.sim import __main__ as command
from headgate.sim.marks import Mark
from headgate.sim.run import Result, run_seed

COVERING = (1549, 1017, 1045, 185, 985, 263, 40)
"""Reach every mark together; ``python -m headgate.sim cover --seeds 1500`` prints such a list."""

SMOKE = tuple(sorted({*range(60), *COVERING}))


@cache
def result_of(seed: int) -> Result:
    return run_seed(seed)


def test_sound_machines_pass_every_smoke_seed() -> None:  # X2
    failed = [(seed, str(result_of(seed).violation)) for seed in SMOKE if result_of(seed).violation]
    assert failed == []


def test_the_smoke_seeds_reach_every_mark() -> None:  # X5, X10
    reached = Counter(mark for seed in SMOKE for mark in result_of(seed).marks)
    assert [mark.name for mark in Mark if not reached[mark]] == []


def test_a_seed_has_one_digest_whatever_the_hash_seed() -> None:  # X1
    seeds = SMOKE[:4]
    program = f"from headgate.sim.run import run_seed; print(*(run_seed(s).digest for s in {seeds}))"
    digests = set()
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert digests == {" ".join(result_of(seed).digest for seed in seeds) + "\n"}


def test_different_seeds_tell_different_stories() -> None:
    assert len({result_of(seed).digest for seed in SMOKE}) == len(SMOKE)


def test_the_command_line_succeeds_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "3", "--from", "5"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("3 seeds, 0 violations, ")


def test_a_violation_prints_the_seed_the_command_and_the_story(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Coordinator, event: object) -> None:
        raise AssertionError("broken on purpose")

    monkeypatch.setattr(Coordinator, "_on_started", broken)
    assert command.main(["--seeds", "5"]) == 1
    out = capsys.readouterr().out
    assert "violates machine: driver" in out
    assert "AssertionError: broken on purpose" in out
    assert "python -m headgate.sim --seed " in out
    assert "claimed generation" in out, "the tail of the story"


def test_a_trace_is_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "5", "--trace"]) == 0
    assert "supervisor Begin" in capsys.readouterr().out.splitlines()[0]
