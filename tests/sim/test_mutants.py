"""Every mutant is caught (X6): a survivor is a missing checker."""

from __future__ import annotations

import pytest

from headgate.protocol.checkpoints.align import Aligner
from headgate.sim.mutants import all_mutants, applied, catch


@pytest.mark.parametrize("name", sorted(all_mutants()))
def test_every_mutant_is_caught(name: str) -> None:
    mutant = all_mutants()[name]
    caught = catch(mutant)
    assert caught is not None, f"{name} ({mutant.rule}: {mutant.description}) survives"


@pytest.mark.parametrize("name", sorted(n for n, m in all_mutants().items() if m.probe is not None))
def test_a_probe_accepts_the_sound_machine(name: str) -> None:
    probe = all_mutants()[name].probe
    assert probe is not None
    probe()


def test_a_mutant_is_gone_after_its_block() -> None:
    before = vars(Aligner)["handle"]
    with applied(all_mutants()["cancel-not-forwarded"]):
        assert vars(Aligner)["handle"] is not before
    assert vars(Aligner)["handle"] is before


def test_there_are_enough_mutants() -> None:
    assert len(all_mutants()) >= 25
    assert sum(m.rule.startswith("L") for m in all_mutants().values()) >= 20
