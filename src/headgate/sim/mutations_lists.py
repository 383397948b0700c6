"""Mutants of a list of splits that grows between two starts, and of subtasks that go on after their end."""

from __future__ import annotations

from typing import Any

from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks import subtask
from headgate.sim import probes
from headgate.sim.chain import Chain
from headgate.sim.mutants import Patch, around, mutant
from headgate.sim.subtaskhost import SubtaskHost


@mutant("finished-source-never-polled", "T10", "a source restored as finished is not read, whatever there is", seed=2)
def _(patch: Patch) -> None:
    def start(call: Any, self: Any) -> Any:
        self._is_over = self._is_over or self._may_resume
        return call()

    around(patch, SubtaskHost, "start", start)


@mutant(
    "resumed-subtask-never-finishes",
    "T10",
    "operators that go on after their end do not finish again",
    probe=probes.resumed_operators_finish,
)
def _(patch: Patch) -> None:
    patch(subtask.Subtask, "_on_resumed", lambda self: [Ignored("it has finished")])


@mutant("position-moves-with-the-list", "N1", "a position belongs to a place in the list, not to a split", seed=22)
def _(patch: Patch) -> None:
    def restore(call: Any, self: Any, states: Any) -> Any:
        ends = [at for state in states for _, at in sorted(state["positions"].items())]
        moved = dict(zip(sorted(self._positions), ends, strict=False))
        return call([state | {"positions": moved} for state in states])

    around(patch, Chain, "restore", restore)
