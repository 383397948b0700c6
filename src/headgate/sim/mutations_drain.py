"""Mutants of draining: the request, its mark in checkpoints, and the positions it leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

from headgate.protocol.checkpoints import completion, coordinator
from headgate.protocol.machine import Ignored
from headgate.sim import probes
from headgate.sim.chain import Chain
from headgate.sim.mutants import Patch, around, mutant
from headgate.sim.subtaskhost import SubtaskHost


@mutant(
    "drain-lost-before-the-start", "E7", "a drain that comes too early is forgotten", probe=probes.drain_is_remembered
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        return [Ignored("too early")] if self._phase is coordinator.Phase.CREATED else call()

    around(patch, coordinator.Coordinator, "_on_drain", change)


@mutant("drain-not-marked", "E9", "a checkpoint taken while draining does not say so", probe=probes.drain_is_marked)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        return [
            dataclasses.replace(effect, is_draining=False) if isinstance(effect, coordinator.WriteManifest) else effect
            for effect in call()
        ]

    around(patch, completion.Completion, "_write_next", change)


@mutant("drained-position-too-far", "E8", "a drained source says that it has read everything", seed=22)
def _(patch: Patch) -> None:
    def drain(call: Any, self: Any) -> Any:
        self._chain.claims_all = True
        return call()

    def freeze(call: Any, self: Any) -> Any:
        state = call()
        if getattr(self, "claims_all", False):
            state["positions"] = {name: len(self._splits[name]) for name in state["positions"]}
        return state

    around(patch, SubtaskHost, "drain", drain)
    around(patch, Chain, "freeze", freeze)


@mutant("drain-drops-what-is-in-flight", "E7", "records that were read and not yet processed are dropped", seed=22)
def _(patch: Patch) -> None:
    def drain(call: Any, self: Any) -> Any:
        for channel in self._outlets.channels.values():
            channel.queue = type(channel.queue)(e for e in channel.queue if e[1][0] != "records")
        return call()

    around(patch, SubtaskHost, "drain", drain)
