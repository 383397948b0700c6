"""Killing what runs a loop, at random, as many times as HEADGATE_TEST_TIMES says (``make crash-loops TIMES=20``)."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

from crash.pacing import hurry
from crash.processes import Life, kill

TIMES = int(os.environ.get("HEADGATE_TEST_TIMES", "3"))
"""Kills of each scenario."""

PAUSE_S = 0.8
"""Up to so long a generation runs undisturbed."""

EVERYBODY = 4
"""Every so many kills hit all workers at once."""


def kill_workers(life: Life, dice: random.Random, times: int, *, workers: int = 2, after: int = 0) -> int:
    """SIGKILL workers ``times`` times; every second time not before a checkpoint. Return the last generation killed."""
    generation = after
    for number in range(times):
        running = life.running(after=generation, workers=workers)
        generation = running["generation"]
        if number % 2:
            life.checkpoint()
        threading.Event().wait(dice.uniform(0.0, PAUSE_S))  # the fault's time, not a wait for anything
        victims = list(running["workers"].values())
        dice.shuffle(victims)
        for pid in victims if number % EVERYBODY == EVERYBODY - 1 else victims[:1]:
            kill(pid)
        life.restart()
    return generation


def kill_and_finish(life: Life, dice: random.Random, spec: dict[str, Any], times: int = TIMES) -> dict[str, Any]:
    """Kill workers ``times`` times while input comes slowly, let it hurry, kill once more, and wait for the end."""
    workers = spec.get("parallelism", 2)
    generation = kill_workers(life, dice, times - 1, workers=workers)
    running = life.running(after=generation, workers=workers)
    hurry(Path(spec["root"]))
    threading.Event().wait(dice.uniform(0.0, 0.3))  # the fault's time: not a wait for anything
    if not life.seen("result"):  # else it has ended within so short a time, which is no failure
        kill(next(iter(running["workers"].values())))
    result = life.result()
    assert result["is_finished"]
    assert result["restarts"] >= times - 1
    print(f"{result['restarts']} kills")
    return result
