"""Bugs planted where a pipeline gives up its checkpoints; seeds of ``sim.kinds.cancelling`` find them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around

from headgate.protocol.checkpoints.recovery import NextClaim
from headgate.runtime.checkpoints.life import LifeObjects
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import claims, removing


class _Nothing:
    def close(self) -> None:
        """Of nothing."""


def what_is_promised_is_not_committed() -> AbstractContextManager[None]:  # C71
    careless = SimpleNamespace(**{**vars(claims), "recovered_sinks": lambda *arguments: _Nothing()})
    return patched(removing, "claims", careless)


def files_go_before_the_log_is_given_up() -> AbstractContextManager[None]:  # C72
    def give_up(call: Any, self: CheckpointLog, *arguments: Any) -> None:
        self.files.restored(())
        self.files.sweep()
        call(self, *arguments)

    return around(CheckpointLog, "give_up", give_up)


def what_was_given_up_is_followed() -> AbstractContextManager[None]:  # C72
    def ending(self: NextClaim) -> NextClaim:
        return NextClaim(self.sequence, self.generation, self.follows, self.sequence)

    return patched(NextClaim, "ending_life", ending)


def the_former_life_goes_on() -> AbstractContextManager[None]:  # LV7
    return patched(LifeObjects, "_path", lambda self, number: f"{self._pipeline}/life")


ALL: dict[Mutant, int] = {
    what_is_promised_is_not_committed: 12,
    files_go_before_the_log_is_given_up: 0,
    what_was_given_up_is_followed: 3,
    the_former_life_goes_on: 7,
}
"""Each with a seed that finds it."""
