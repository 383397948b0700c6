"""Finds a seed that a planted bug does not survive.

Each bug has a seed that found it once. A change of the product may change what that seed runs; others are tried then,
which takes long. ``HEADGATE_SEEDS_FOUND=FILE`` notes which seed found which bug instead, so that it can be pinned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.mutants.harness import Mutant


def assert_found(mutant: Mutant, run: Callable[[int], object], pinned: Iterable[int], others: Iterable[int]) -> None:
    """Fail if ``run`` of all seeds is without a violation (None) though ``mutant`` is planted."""
    pinned = tuple(pinned)
    for seed in (*pinned, *others):
        with mutant():
            found = run(seed)
        if found is not None:
            if seed not in pinned:
                _note(mutant, seed)
            return
    pytest.fail(f"no seed finds {mutant}")


def _note(mutant: Mutant, seed: int) -> None:
    file = os.environ.get("HEADGATE_SEEDS_FOUND")
    if file is not None:
        with Path(file).open("a", encoding="utf-8") as notes:
            notes.write(f"{mutant.__name__} {seed}\n")  # type: ignore[attr-defined]
