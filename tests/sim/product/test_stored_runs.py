"""Somebody reads the state of checkpoints when a seed is over: it is what it must be, and bugs of reading show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.mutants.harness import Mutant, patched
from tests.sim.product.finding import assert_found

from headgate.runtime.stored_state import pieces, places, reading
from headgate.runtime.stored_state.reading import Selection
from headgate.sim.kinds.savepoints import SavepointRun
from headgate.sim.product import stored
from headgate.sim.product.run import Run
from headgate.sim.world import Violation

SMOKE = (2, 3, 5, 8, 9)


@pytest.fixture(autouse=True)
def _everybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "RATE", 1.0)


def read_states(seed: int, kind: type[Run] = Run) -> tuple[Violation | None, stored.StoredStates]:
    run = kind(seed)
    violation = run.run()
    return violation, run.stored


def test_somebody_reads_the_state_of_seeds() -> None:  # SM72
    found = [read_states(seed) for seed in SMOKE] + [read_states(seed, SavepointRun) for seed in range(1, 3)]
    assert [str(violation) for violation, _ in found if violation] == []
    assert sum(reader.states_count for _, reader in found) > 50
    assert sum(reader.rows_count for _, reader in found) > 500
    assert sum(reader.compared_count for _, reader in found) > 1


@contextmanager
def keys_are_not_looked_at() -> Iterator[None]:
    """RS7: whoever asks for some keys is shown others."""
    with patched(reading, "_is_among", lambda batch, keys, names: np.ones(batch.num_rows, np.bool_)):
        yield


@contextmanager
def parts_are_left_out() -> Iterator[None]:
    """RS7: a part is skipped although it has some of the key groups."""
    real = Selection.may_be_in

    def may_be_in(self: Selection, piece: Any) -> bool:
        return real(self, piece) and (self.groups is None or piece.key_groups.first == 0)

    with patched(Selection, "may_be_in", may_be_in):
        yield


@contextmanager
def an_older_checkpoint_is_the_newest() -> Iterator[None]:
    """RS1."""
    real = places.candidates
    with patched(places, "candidates", lambda observed: list(reversed(real(observed)))):
        yield


@contextmanager
def only_what_one_subtask_had_is_read() -> Iterator[None]:
    """RS4."""
    real = pieces._of_part

    def of_part(checkpoint: Any, storage: Any, entry: Any, part: Any, operator: Any) -> Any:
        yield from real(checkpoint, storage, entry, part, operator) if entry.subtask.index == 0 else ()

    with patched(pieces, "_of_part", of_part):
        yield


MUTANTS: dict[Mutant, int] = {
    keys_are_not_looked_at: 0,
    parts_are_left_out: 0,
    an_older_checkpoint_is_the_newest: 8,
    only_what_one_subtask_had_is_read: 0,
}


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_reading_state_is_found(mutant: Mutant, seed: int) -> None:  # SM72
    assert_found(mutant, lambda seed: read_states(seed)[0], (seed,), range(40))
