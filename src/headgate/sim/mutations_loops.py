"""Mutants of the loop log and its replay: what circulates between a barrier and its sentinels."""

from __future__ import annotations

from typing import Any

from headgate.protocol.checkpoints import align
from headgate.protocol.loops import head as loop_head
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks import subtask
from headgate.sim import loopprobes
from headgate.sim.headside import HeadSide, Waiting
from headgate.sim.mutants import Patch, around, mutant
from headgate.sim.outlets import Outlets
from headgate.sim.subtaskhost import SubtaskHost

# -- replay ---------------------------------------------------------------------------------------------------------


@mutant("log-not-replayed", "L17", "a restored log is forgotten", loops=True, seed=1)
def _(patch: Patch) -> None:
    around(patch, HeadSide, "restore", lambda call, self, logs, **options: call({}, **options))


@mutant("log-not-replayed-first", "L17", "a restored log is processed after something new was read", loops=True, seed=1)
def _(patch: Patch) -> None:
    def restore(call: Any, self: Any, logs: Any, **options: Any) -> None:
        call(logs, **options)
        later[self], self._replay = self._replay, []

    def read(call: Any, self: Any, index: int) -> None:
        call(index)
        if self.head in later:
            self.head._replay = later.pop(self.head)

    later: dict[HeadSide, Any] = {}
    around(patch, HeadSide, "restore", restore)
    around(patch, SubtaskHost, "read", read)


@mutant("log-replayed-once-only", "L17", "a checkpoint that is restored again has lost its log", loops=True, seed=2)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, logs: Any, **options: Any) -> None:
        seen = vars(self._host.env.store).setdefault("logs_seen", set())
        key = (self._host.subtask, repr(logs))
        call({} if key in seen else logs, **options)
        seen.add(key)

    around(patch, HeadSide, "restore", change)


@mutant("log-of-another-generation", "L17", "a head replays the last log that anybody wrote", loops=True, seed=15)
def _(patch: Patch) -> None:
    def encoded(call: Any, self: Any, batches: Any) -> Any:
        found = vars(self._host.env.store).setdefault("last_logs", {})
        found[self._host.subtask] = call(batches)
        return found[self._host.subtask]

    def restore(call: Any, self: Any, logs: Any, **options: Any) -> None:
        mine, found = self._host.subtask, vars(self._host.env.store).get("last_logs", {})
        call({index: found.get(mine, log) if index == mine.index else log for index, log in logs.items()}, **options)

    around(patch, HeadSide, "_encoded", encoded)
    around(patch, HeadSide, "restore", restore)


@mutant(
    "log-restored-by-subtask",
    "L19",
    "after rescaling a keyed log goes to former subtask i modulo p",
    loops=True,
    seed=52,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, logs: Any, *, is_moved: bool) -> None:
        if self._is_keyed and is_moved:
            count = self._host.worker.plan.parallelism
            mine = [log for i, log in logs.items() if i % count == self._host.subtask.index]
            groups: dict[str, Any] = {str(g): [] for g in self._groups}
            groups[next(iter(groups))] = [r for log in mine for found in log["groups"].values() for r in found]
            logs = {0: {"groups": groups}}
        call(logs, is_moved=is_moved)

    around(patch, HeadSide, "restore", change)


@mutant("empty-key-groups-skipped", "L20", "key groups without records are left out of the log", loops=True, seed=1)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, batches: Any) -> Any:
        log = call(batches)
        return {"groups": {g: r for g, r in log["groups"].items() if r}} if "groups" in log else log

    around(patch, HeadSide, "_encoded", change)


# -- what is in the log ---------------------------------------------------------------------------------------------


@mutant("record-logged-twice", "L2", "a record is appended once too often", loops=True, seed=1)
def _(patch: Patch) -> None:
    around(patch, HeadSide, "log", lambda call, self, checkpoints: call([c for c in checkpoints for _ in range(2)]))


@mutant("forwarded-without-log", "L2", "what comes back is processed and not logged", loops=True, seed=1)
def _(patch: Patch) -> None:
    around(patch, loop_head.LoopHead, "_on_feedback", lambda call, self, channel: [loop_head.ForwardFeedback()])


@mutant("logged-too-late", "L2", "a record is logged when the next one comes back", loops=True, seed=1)
def _(patch: Patch) -> None:
    def log(call: Any, self: Any, checkpoints: Any) -> None:
        waiting[self] = [(self._open[c], self._at_hand) for c in checkpoints]

    def receive(call: Any, self: Any, *arguments: Any) -> None:
        for target, entry in waiting.pop(self, ()):
            target.entries.append(entry)
        call(*arguments)

    waiting: dict[HeadSide, list[tuple[Waiting, Any]]] = {}
    around(patch, HeadSide, "log", log)
    around(patch, HeadSide, "receive", receive)


@mutant("only-the-newest-log", "L12", "a record goes into the log of the newest checkpoint only", loops=True, seed=1)
def _(patch: Patch) -> None:
    around(patch, HeadSide, "log", lambda call, self, checkpoints: call(checkpoints[-1:]))


@mutant("log-not-per-channel", "L11", "a log takes records from channels whose sentinel has come", loops=True, seed=2)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, channel: Any) -> Any:
        call(channel)
        logs = self.pending
        return [loop_head.LogFeedback(logs), loop_head.ForwardFeedback()] if logs else [loop_head.ForwardFeedback()]

    around(patch, loop_head.LoopHead, "_on_feedback", change)


@mutant("one-sentinel-seals-all", "L11", "the sentinel of one channel seals the log of another", loops=True)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, channel: Any, checkpoint: Any) -> Any:
        if checkpoint in self._pending:
            self._pending[checkpoint] = {channel}
        return call(channel, checkpoint)

    around(patch, loop_head.LoopHead, "_on_sentinel", change)


@mutant(
    "log-opened-before-the-barrier", "L1", "a log begins when the first barrier comes, not the last", loops=True, seed=3
)
def _(patch: Patch) -> None:
    def handle(call: Any, self: Any, event: Any) -> None:
        is_barrier = isinstance(event, subtask.BarrierReceived) and event.channel not in self._feedback
        if self.head is not None and is_barrier and event.checkpoint not in self.head._waiting:
            early.setdefault(self.head, {}).setdefault(event.checkpoint, [])
        call(event)

    def receive(call: Any, self: Any, channel: Any, position: Any, records: Any) -> None:
        call(channel, position, records)
        back = tuple((f"{r[0]}@{self._name}", *r[1:]) for r in records)
        for entries in early.get(self, {}).values():
            entries.append((channel, position, back))

    def open_(call: Any, self: Any, checkpoint: Any) -> None:
        call(checkpoint)
        self._open[checkpoint].entries += early.get(self, {}).pop(checkpoint, [])

    early: dict[HeadSide, dict[Any, list[Any]]] = {}
    around(patch, SubtaskHost, "handle", handle)
    around(patch, HeadSide, "receive", receive)
    around(patch, HeadSide, "open", open_)


@mutant("acknowledged-before-the-sentinel", "L4", "the snapshot is written when the barrier has gone out", loops=True)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        call(checkpoint)
        self._pending.pop(checkpoint, None)
        return [loop_head.OpenLog(checkpoint), loop_head.SealLog(checkpoint)]

    around(patch, loop_head.LoopHead, "_on_snapshot", change)


@mutant(
    "skipped-checkpoint-sealed", "L3", "a later sentinel completes the log of a skipped checkpoint", loops=True, seed=11
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, channel: Any, checkpoint: Any) -> Any:
        effects = call(channel, checkpoint)
        dropped = [e.checkpoint for e in effects if isinstance(e, loop_head.DropLog)]
        kept = [e for e in effects if not isinstance(e, loop_head.DropLog | align.Decline)]
        return [loop_head.SealLog(c) for c in dropped] + kept

    around(patch, loop_head.LoopHead, "_on_sentinel", change)


# -- early sentinels ------------------------------------------------------------------------------------------------


@mutant(
    "behind-an-early-sentinel",
    "L6",
    "what is behind an early sentinel overtakes the barrier",
    loops=True,
    seed=107,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, channel: Any, checkpoint: Any) -> Any:
        effects = call(channel, checkpoint)
        self._held.pop(channel, None)
        kept = [e for e in effects if not isinstance(e, align.BlockChannel)]
        return kept or [Ignored("not held")]

    around(patch, loop_head.LoopHead, "_on_sentinel", change)


@mutant(
    "hold-outlives-the-abort",
    "L6",
    "a channel stays held for a checkpoint that was aborted",
    probe=loopprobes.hold_ends_with_the_abort,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        held, self._held = self._held, {}
        effects = call(checkpoint)
        self._held = held
        return effects

    around(patch, loop_head.LoopHead, "_on_released", change)


@mutant("hold-is-for-ever", "L6", "a held channel is not read any more", loops=True, seed=130)
def _(patch: Patch) -> None:
    around(patch, loop_head.LoopHead, "_release", lambda call, self, channels: [])


# -- aborts ---------------------------------------------------------------------------------------------------------


@mutant("log-lost-on-abort", "L5", "an abort empties the logs of other checkpoints", loops=True, seed=2)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        for waiting in self._open.values():
            waiting.entries.clear()
        return call(checkpoint)

    around(patch, HeadSide, "drop", change)


@mutant(
    "abort-discards-feedback",
    "L5",
    "what was to be logged for an aborted checkpoint is not processed",
    loops=True,
    seed=2,
)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, checkpoint: Any) -> Any:
        host = self._host
        for index in host._feedback:
            queue = host.inputs[index].queue
            kept = [(at, ("records", ()) if element[0] == "records" else element) for at, element in queue]
            queue.clear()
            queue.extend(kept)
        return call(checkpoint)

    around(patch, HeadSide, "drop", change)


@mutant(
    "output-of-a-dropped-log-lost", "L5", "output sealed for an aborted checkpoint is forgotten", loops=True, seed=60
)
def _(patch: Patch) -> None:
    around(patch, HeadSide, "drop", lambda call, self, checkpoint: call(checkpoint) and [])


@mutant("log-not-released", "L5", "an aborted checkpoint keeps its log for ever", probe=loopprobes.abort_drops_the_log)
def _(patch: Patch) -> None:
    around(patch, loop_head.LoopHead, "_on_released", lambda call, self, checkpoint: [Ignored("kept")])


# -- tails ----------------------------------------------------------------------------------------------------------


@mutant(
    "sentinel-before-the-snapshot", "L8", "a tail sends the sentinel when the first barrier comes", loops=True, seed=3
)
def _(patch: Patch) -> None:
    def handle(call: Any, self: Any, event: Any) -> None:
        if isinstance(event, subtask.BarrierReceived) and event.channel not in self._feedback:
            self._outlets.early_sentinel(event.checkpoint)
        call(event)

    def early_sentinel(self: Any, checkpoint: Any) -> None:
        for channel in self.channels.values():
            key = (*channel.name, id(channel))
            if channel.is_feedback and sent.get(key, 0) < checkpoint:
                sent[key] = checkpoint
                self._push(channel, ("barrier", checkpoint))

    def push(call: Any, self: Any, channel: Any, element: Any) -> None:
        key = (*channel.name, id(channel))
        if element[0] == "barrier" and channel.is_feedback:
            if (key, element[1]) in done:
                return
            done.add((key, element[1]))
        call(channel, element)

    sent: dict[Any, int] = {}
    done: set[Any] = set()
    around(patch, Outlets, "_push", push)
    patch(Outlets, "early_sentinel", early_sentinel)
    around(patch, SubtaskHost, "handle", handle)


@mutant("acknowledged-before-sending", "L8", "a tail sends the sentinel after it has acknowledged", loops=True, seed=2)
def _(patch: Patch) -> None:
    def broadcast(call: Any, self: Any, element: Any) -> None:
        for channel in self.channels.values():
            if element[0] == "barrier" and channel.is_feedback:
                self._env.world.at(30, later, self, channel, element)
            else:
                self._push(channel, element)

    def later(self: Any, channel: Any, element: Any) -> None:
        if newest.get(id(channel), 0) < element[1]:
            newest[id(channel)] = element[1]
            self._push(channel, element)

    newest: dict[int, int] = {}

    around(patch, Outlets, "broadcast", broadcast)


@mutant("no-sentinel", "L8", "tails send no sentinels: no checkpoint completes", loops=True)
def _(patch: Patch) -> None:
    def push(call: Any, self: Any, channel: Any, element: Any) -> None:
        if element[0] != "barrier" or not channel.is_feedback:
            call(channel, element)

    around(patch, Outlets, "_push", push)


@mutant("feedback-has-credits", "L22", "sending on a feedback channel waits when it is full", loops=True, seed=5)
def _(patch: Patch) -> None:
    def change(call: Any, self: Any, *arguments: Any) -> None:
        call(*arguments)
        self._bounded = list(self.channels.values())

    around(patch, Outlets, "__init__", change)
