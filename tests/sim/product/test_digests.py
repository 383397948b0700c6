"""A seed decides everything: under every hash seed, on every machine, whatever its clocks and its chance say."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import IS_DEEP

from headgate.sim.scenario_table import SCENARIOS

DEEP: dict[str, tuple[int, ...]] = {
    "": (3, 6),
    "streams": (7,),
    "savepoints": (3, 43),  # a fault meets the probe of a place; a drain ends with one
    "log-files": (6,),  # several series of rotated files are looked at
    "upgrades": (0, 1, 3),  # one for each kind of change
    "user-pipelines": (1, 8),
    "cancellation": (7,),  # where a pipeline was begun is reported
}
"""Of a scenario that is not here: seed 1."""
SEEDS = DEEP if IS_DEEP else {**DEEP, "savepoints": (43,), "upgrades": (3,), "user-pipelines": (8,)}
CHOSEN = SCENARIOS if IS_DEEP else SCENARIOS[::4]
"""One in four scenarios: what could draw by chance is shared by all of them."""

PROGRAM = """
import socket, sys
socket.gethostname = lambda: "machine" + sys.argv[1]
from headgate.sim.scenario_table import SCENARIOS
run_seeds = {scenario.name: scenario.run_seed for scenario in SCENARIOS}
for word in sys.argv[2:]:
    name, seed = word.split(":")
    result = run_seeds[name](int(seed))
    print(word, result.digest, result.events_count, result.virtual_ms)
"""


def _begin(hash_seed: str) -> subprocess.Popen[str]:
    words = [f"{scenario.name}:{seed}" for scenario in CHOSEN for seed in SEEDS.get(scenario.name, (1,))]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, hash_seed, *words], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_seed_of_every_scenario_has_one_digest_wherever_it_runs() -> None:
    running = [_begin(hash_seed) for hash_seed in ("0", "4711")]
    first, second = (process.communicate(timeout=600)[0].splitlines() for process in running)
    assert all(process.returncode == 0 for process in running)
    assert first == second
