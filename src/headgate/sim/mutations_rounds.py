"""Mutants of probes, rounds and the end of loops, on both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

from headgate.protocol.loops import part as loop_part
from headgate.protocol.loops import rounds
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks import subtask
from headgate.sim import loopprobes, subtaskhost
from headgate.sim.mutants import Patch, around, mutant
from headgate.sim.outlets import Outlets
from headgate.sim.restoring import restored_rounds
from headgate.sim.subtaskhost import SubtaskHost

# -- probes ---------------------------------------------------------------------------------------------------------


@mutant("first-probe-ends", "L34", "the first probe may find the loop empty", probe=loopprobes.first_probe_never_ends)
def _(patch: Patch) -> None:
    class Eager(int):
        def __gt__(self, other: int) -> bool:
            return True

    def change(call: Any, self: Any) -> Any:
        self._probe = dataclasses.replace(self._probe, number=Eager(self._probe.number))
        return call()

    around(patch, rounds.LoopProber, "_on_complete", change)


@mutant("probes-counted-as-data", "L34", "a probe that comes back counts as a batch", loops=True)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        self._count += 1
        return call(event)

    around(patch, loop_part.LoopPart, "_on_returned", change)


@mutant(
    "count-reset-when-the-probe-returns",
    "L34",
    "what came back before the probe did is not counted",
    loops=True,
    seed=22,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        self._count = 0
        return call(event)

    around(patch, loop_part.LoopPart, "_on_returned", change)


@mutant(
    "inner-heads-not-asked", "L34", "the loop is empty when the heads of the outermost loop say so", loops=True, seed=31
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, entrances: Any, outer: Any, inner: Any, leaves: Any, **options: Any) -> None:
        call(entrances, outer, (), leaves, **options)

    around(patch, rounds.LoopProber, "__init__", change)


@mutant("one-head-is-enough", "L34", "the loop is empty when one head says so", loops=True, seed=21)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, **options: Any) -> Any:
        effects = call(**options)
        self._waiting = {min(self._waiting)}
        return effects

    around(patch, rounds.LoopProber, "_next_probe", change)


@mutant("entrances-not-waited-for", "L34", "probes begin when the first entrance has ended", loops=True, seed=14)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        if self._phase is not rounds.Phase.ENTERING:
            return [Ignored("begun")]
        self._entering = {event.subtask}
        self._start_rounds = self._start_rounds or [0]
        return call(event)

    around(patch, rounds.LoopProber, "_on_entrance_ended", change)


@mutant("probe-passed-at-once", "L33", "a probe is passed on when it has come on one input", loops=True, seed=34)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        before = self._numbers
        self._numbers = {channel: max(event.probe.number, number) for channel, number in before.items()}
        self._numbers[event.channel] = event.probe.number - 1
        try:
            if event.probe.number <= self._passed:
                return [Ignored("passed before")]
            return call(event)
        finally:
            self._numbers = before

    around(patch, rounds.ProbeAligner, "handle", change)


@mutant(
    "probe-passes-what-is-held-back",
    "L27",
    "operators keep records back while a probe passes them",
    loops=True,
    seed=108,
)
def _(patch: Patch) -> None:
    def run(call: Any, self: Any, effect: Any) -> None:
        if isinstance(effect, subtask.PassProbe):
            self._outlets.pass_probe(effect.probe)
        else:
            call(effect)

    around(patch, SubtaskHost, "_run_loop", run)


@mutant("probe-not-on-feedback", "L32", "probes do not pass feedback channels", loops=True)
def _(patch: Patch) -> None:
    def push(call: Any, self: Any, channel: Any, element: Any) -> None:
        if element[0] != "probe" or not channel.is_feedback:
            call(channel, element)

    around(patch, Outlets, "_push", push)


# -- the end --------------------------------------------------------------------------------------------------------


@mutant(
    "head-finishes-too-early",
    "L29",
    "a head reports that it has finished before the end is back",
    probe=loopprobes.head_finishes_when_the_end_is_back,
)
def _(patch: Patch) -> None:
    around(patch, subtask.Subtask, "_finish", lambda call, self: [*call(), subtask.ReportFinished()])


@mutant("ends-with-its-input", "L29", "a head ends when its regular input has", loops=True)
def _(patch: Patch) -> None:
    around(patch, subtask.Subtask, "_finish_if_empty", lambda call, self: self._finish())


@mutant("event-time-not-held", "L37", "heads pass watermarks on while records circulate", loops=True, seed=2)
def _(patch: Patch) -> None:
    around(patch, SubtaskHost, "_merge", lambda call, self, effects: self._on_event_time(effects))


@mutant(
    "last-watermark-not-awaited",
    "L37",
    "a loop ends without having seen what the last watermark makes",
    loops=True,
    seed=4,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, **options: Any) -> Any:
        if self._phase is rounds.Phase.FLUSHING:
            self._phase = rounds.Phase.ENDED
            return [rounds.EndLoop()]
        return call(**options)

    around(patch, rounds.LoopProber, "_next_probe", change)


# -- rounds ---------------------------------------------------------------------------------------------------------


@mutant(
    "closed-round-not-in-the-snapshot", "L36", "a restored operator sees the end of a round again", loops=True, seed=63
)
def _(patch: Patch) -> None:
    def change(snapshots: Any) -> Any:
        return dataclasses.replace(restored_rounds(snapshots), closed=-1)

    patch(subtaskhost, "restored_rounds", change)


@mutant("started-round-not-in-the-snapshot", "L36", "rounds begin again at 0 after a restore", loops=True, seed=63)
def _(patch: Patch) -> None:
    def change(snapshots: Any) -> Any:
        return dataclasses.replace(restored_rounds(snapshots), started=-1, closed=-1)

    patch(subtaskhost, "restored_rounds", change)


@mutant("highest-round-not-in-the-snapshot", "L36", "the last rounds never end after a restore", loops=True, seed=172)
def _(patch: Patch) -> None:
    def change(snapshots: Any) -> Any:
        return dataclasses.replace(restored_rounds(snapshots), highest=-1)

    patch(subtaskhost, "restored_rounds", change)


@mutant(
    "rounds-go-on-from-the-highest",
    "L36",
    "after a restore rounds go on where the foremost head was",
    probe=loopprobes.rounds_go_on_from_the_lowest,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, event: Any) -> Any:
        if len(self._entering) == 1:
            self._start_rounds = [max([*self._start_rounds, event.round_])]
            event = dataclasses.replace(event, round_=self._start_rounds[0])
        return call(event)

    around(patch, rounds.LoopProber, "_on_entrance_ended", change)


@mutant(
    "round-closed-before-inner-loops-are-empty",
    "L35",
    "inner loops do not hold up the end of a round",
    loops=True,
    seed=65,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, *arguments: Any, **options: Any) -> None:
        call(*arguments, **options)
        self._has_inner = False

    around(patch, rounds.LoopProber, "__init__", change)


@mutant("last-round-left-out", "L35", "the loop ends before its last round has", loops=True, seed=3)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any) -> Any:
        self._round_max -= 1
        effects = call()
        self._round_max += 1
        return effects

    around(patch, rounds.LoopProber, "_on_complete", change)


@mutant(
    "round-closed-behind-the-probe",
    "L35",
    "the probe goes on before operators hear of a round's end",
    loops=True,
    seed=45,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, probe: Any) -> Any:
        return list(reversed(call(probe)))

    around(patch, rounds.ProbeAligner, "pass_on", change)
