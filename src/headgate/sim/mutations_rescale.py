"""Mutants of a restore at another parallelism: each loses or keeps too much of what former subtasks had."""

from __future__ import annotations

from typing import Any

from headgate.sim import restoring, subtaskhost
from headgate.sim.chain import Chain
from headgate.sim.mutants import Patch, around, mutant
from headgate.sim.worker import Worker


@mutant("keyed-state-not-filtered", "KG8", "every new subtask keeps the state of all keys", seed=8)
def _(patch: Patch) -> None:
    patch(Chain, "_owns", lambda self, text: True)


@mutant(
    "positions-of-one-former-dropped", "R16", "the splits of one former subtask are read from their start again", seed=8
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, states: Any) -> Any:
        return call([states[0] | {"positions": {}}, *states[1:]] if len(states) > 1 else states)

    around(patch, Chain, "restore", change)


@mutant("state-of-one-former-dropped", "R15", "one former subtask is forgotten in the restore", seed=22)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, restored: Any, vertex: Any) -> Any:
        found = call(restored, vertex)
        return found[:-1] if len(found) > 1 and not vertex.is_source else found

    around(patch, Worker, "_formers", change)


@mutant("own-former-only", "R15", "at another parallelism, too, subtask i continues from subtask i alone", seed=8)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, restored: Any, vertex: Any) -> Any:
        return [former for former in call(restored, vertex) if former.index == self.index]

    around(patch, Worker, "_formers", change)


@mutant("time-of-a-split-from-the-future", "W9", "a split continues with the latest time of any other", seed=44)
def _(patch: Patch) -> None:
    original = restoring.newest_times

    def change(trackers: Any) -> Any:
        latest = original(trackers)
        return dict.fromkeys(latest, max(latest.values(), default=0))

    patch(subtaskhost, "newest_times", change)
