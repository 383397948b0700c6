"""Whole runs: sound machines pass, rare branches are reached, and a seed is repeated exactly (X1, X2, X5)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.sim import __main__ as command
from headgate.sim.marks import Mark
from headgate.sim.run import Result, run_seed

COVERING = (
    572,
    206,
    122,
    237,
    277,
    919,
    974,
    1067,
    1470,
    201,
    387,
    782,
    11,
    58,
    588,
    305,
    441,
    293,
    12,
    143,
    80,
    148,
    322,
    131,
)
"""Reach every mark together; ``python -m headgate.sim cover --seeds 1500`` prints such a list."""

SMOKE = tuple(sorted({*range(60), *COVERING}))

COVERING_LOOPS = (62, 42, 461, 23, 67, 358, 144, 205, 409, 27, 37, 234)
"""The same for graphs with loops: ``cover --loops``, which need not reach what the others reach."""

SMOKE_LOOPS = tuple(sorted({*range(20), *COVERING_LOOPS}))


@cache
def result_of(seed: int, *, loops: bool = False) -> Result:
    return run_seed(seed, loops=loops)


def test_sound_machines_pass_every_smoke_seed() -> None:  # X2
    failed = [(seed, str(result_of(seed).violation)) for seed in SMOKE if result_of(seed).violation]
    assert failed == []


def test_sound_machines_pass_every_smoke_seed_with_loops() -> None:  # X2
    results = [result_of(seed, loops=True) for seed in SMOKE_LOOPS]
    assert [(result.seed, str(result.violation)) for result in results if result.violation] == []


def test_every_second_seed_has_loops() -> None:
    assert [run_seed(seed).loops for seed in (0, 1)] == [False, True]


def test_the_smoke_seeds_reach_every_mark() -> None:  # X5, X10
    results = [*map(result_of, SMOKE), *(result_of(seed, loops=True) for seed in SMOKE_LOOPS)]
    reached = Counter(mark for result in results for mark in result.marks)
    assert [mark.name for mark in Mark if not reached[mark]] == []


def test_a_seed_has_one_digest_whatever_the_hash_seed() -> None:  # X1
    seeds = (0, 1, 2, 3)
    program = f"from headgate.sim.run import run_seed; print(*(run_seed(s, loops=s > 1).digest for s in {seeds}))"
    digests = set()
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert digests == {" ".join(result_of(seed, loops=seed > 1).digest for seed in seeds) + "\n"}


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
