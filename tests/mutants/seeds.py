"""Runs of the simulator that find planted bugs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.mutants.harness import Mutant

from headgate.sim import scenario_table

Finder = Callable[[int], object]
"""Runs a seed; returns a violation, or None."""

EVENTS_MAX = 100_000
"""A run that needs more hangs; sound ones need a tenth."""
OTHERS_MAX = 160
"""So many other seeds are tried when the pinned one does not find the bug any more."""


def assert_found(mutant: Mutant, run: Finder, seed: int) -> None:
    """Fail if ``run`` of ``seed``, and of all others, is without a violation though ``mutant`` is planted.

    A change of the product may change what a seed runs. Others are tried then, which takes long:
    ``HEADGATE_SEEDS_FOUND=FILE`` notes which one found the bug, so that it can be pinned.
    """
    for number in (seed, *range(OTHERS_MAX)):
        with mutant():
            found = run(number)
        if found is not None:
            if number != seed:
                _note(f"{mutant.__name__} {number}")  # type: ignore[attr-defined]
            return
    pytest.fail(f"no seed finds {mutant}")


def _note(line: str) -> None:
    file = os.environ.get("HEADGATE_SEEDS_FOUND")
    if file is not None:
        with Path(file).open("a", encoding="utf-8") as notes:
            notes.write(f"{line}\n")


def found_by(scenario: str, **options: object) -> Finder:
    """Return a finder of the seeds of the scenario with this name."""
    options = {"events_max": EVENTS_MAX, **options}
    return lambda seed: scenario_table.scenario(scenario).run_seed(seed, **options).violation


plain = found_by("", is_plain=True, events_max=60_000)
"""Pipelines without what makes runs slow."""
every_kind = found_by("", events_max=60_000)
"""Pipelines with everything that is drawn for them."""
