"""Bugs planted in subtask runners, loop heads and their logs, routing, and what the driver does around machines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product.patching import around, both, planted, skipped

from headgate.codec import messages
from headgate.codec.frames import Barrier
from headgate.model.graph import Partitioner
from headgate.operators.loop_head import LoopHeadOperator
from headgate.operators.process import by_row
from headgate.operators.windows.combine import WindowCombineOperator
from headgate.protocol import watermarks
from headgate.protocol.watermarks import WatermarkReceived
from headgate.runtime.driver import live_generation
from headgate.runtime.driver.live_generation import LiveGeneration
from headgate.runtime.driver.looping import RoundCallbacks
from headgate.runtime.driver.replacement_watch import ReplacementWatch
from headgate.runtime.driver.workers import Workers
from headgate.runtime.wire.channels import InputChannel
from headgate.runtime.wire.exchange import Exchange
from headgate.runtime.wire.feedback import FeedbackChannel
from headgate.runtime.worker import loop_log, outlets
from headgate.runtime.worker.chain import Chain
from headgate.runtime.worker.loop_head_runner import LoopHeadRunner
from headgate.runtime.worker.loop_log import LoopLog
from headgate.runtime.worker.outlets import EdgeOutlet
from headgate.runtime.worker.subtask_runner import SubtaskRunner

# -- subtasks ---------------------------------------------------------------------------------------------------------


def sinks_are_sealed_before_operators_flush() -> AbstractContextManager[None]:
    def take(call: Any, self: Any, checkpoint: Any, **options: Any) -> None:
        sealed = {node: sink.seal(checkpoint) for node, sink in self._freezing.sinks.items()}

        class Sealed:
            def __init__(self, node: str) -> None:
                self._node = node

            def seal(self, checkpoint: Any) -> Any:
                return sealed[self._node]

        kept, self._freezing.sinks = self._freezing.sinks, {node: Sealed(node) for node in sealed}
        try:
            call(self, checkpoint, **options)
        finally:
            self._freezing.sinks = kept

    return around(SubtaskRunner, "_take_snapshot", take)


def operators_keep_back_what_belongs_before_the_barrier() -> AbstractContextManager[None]:
    return skipped(Chain, "before_barrier")


def partial_windows_are_forgotten_at_the_end() -> AbstractContextManager[None]:
    return skipped(WindowCombineOperator, "finish")


def a_channel_that_was_set_aside_stays_so() -> AbstractContextManager[None]:
    return skipped(InputChannel, "unblock")


def a_finished_source_is_never_asked_again() -> AbstractContextManager[None]:
    def start(call: Any, self: Any) -> None:
        if self._reading is not None and self._may_resume:
            self._reading.source.is_over = True
        call(self)

    return around(SubtaskRunner, "start", start)


def a_drain_drops_what_was_read() -> AbstractContextManager[None]:
    def drain(call: Any, self: Any) -> None:
        if self._reading is not None and not self._reading.source.is_over:
            self._reading.source.reader.poll()
        call(self)

    return around(SubtaskRunner, "drain", drain)


def a_drain_is_not_heard() -> AbstractContextManager[None]:
    return skipped(SubtaskRunner, "drain")


def any_channel_moves_event_time() -> AbstractContextManager[None]:
    def merge(call: Any, self: Any, event: Any) -> None:
        if isinstance(event, WatermarkReceived):
            self.chain.advance(event.watermark_ms)
        call(self, event)

    return around(SubtaskRunner, "_merge", merge)


def the_end_of_one_channel_ends_an_idle_one() -> AbstractContextManager[None]:
    def advance(self: Any) -> list[Any]:
        effects: list[Any] = []
        active = [c for c in self._channels if not c.is_idle]
        if active and self._is_idle:
            effects.append(watermarks.EmitIdle(False))
        target = min((c.watermark_ms for c in active if c.is_aligned), default=watermarks.WATERMARK_MIN_MS)
        if not active:
            target = max(c.watermark_ms for c in self._channels)
        if target > self._watermark_ms:
            self._watermark_ms = target
            effects.append(watermarks.EmitWatermark(target))
        if not active and not self._is_idle:
            effects.append(watermarks.EmitIdle(True))
        self._is_idle = not active
        return effects

    return patched(watermarks.WatermarkMerger, "_advance", advance)


def keys_go_anywhere() -> AbstractContextManager[None]:
    def send(call: Any, self: Any, batch: Any) -> None:
        if self.edge.partitioner is Partitioner.HASH:
            self._channels[self._next].send(outlets.batch_element(batch))
            self._next = (self._next + 1) % len(self._channels)
        else:
            call(self, batch)

    return around(EdgeOutlet, "send", send)


def a_barrier_goes_out_on_one_channel_only() -> AbstractContextManager[None]:
    def send(call: Any, self: Any, element: Any) -> None:
        if isinstance(element, Barrier):
            self._channels[0].send(element)
        else:
            call(self, element)

    return around(EdgeOutlet, "send_element", send)


def the_barrier_follows_one_more_batch() -> AbstractContextManager[None]:
    def emit(call: Any, self: Any, checkpoint: Any) -> None:
        if self._reading is None:
            frozen, self._freezing._frozen = self._freezing._frozen, None
            self.step()
            self._freezing._frozen = self._freezing._frozen or frozen
        call(self, checkpoint)

    return around(SubtaskRunner, "_emit_barrier", emit)


def keyed_state_is_kept_by_everybody() -> AbstractContextManager[None]:
    from headgate.state import backend

    return patched(backend, "owned_rows", lambda batch, *a: batch)


def functions_forget_their_state_at_a_round() -> AbstractContextManager[None]:
    return skipped(by_row.ProcessOperator, "on_round")


def watermarks_overtake_partial_windows() -> AbstractContextManager[None]:
    return patched(
        WindowCombineOperator, "on_watermark", lambda self, watermark_ms: self.output.emit_watermark(watermark_ms)
    )


# -- loops ------------------------------------------------------------------------------------------------------------


def a_record_is_logged_twice() -> AbstractContextManager[None]:
    return around(LoopLog, "append", lambda call, self, batch, pending: call(self, batch, [*pending, *pending]))


def only_the_newest_log_is_written() -> AbstractContextManager[None]:
    return around(LoopLog, "append", lambda call, self, batch, pending: call(self, batch, pending[-1:]))


def an_abort_empties_the_other_logs() -> AbstractContextManager[None]:
    def drop(call: Any, self: Any, checkpoint: Any) -> None:
        call(self, checkpoint)
        for pending in self._pending.values():
            pending.entries.clear()

    return around(LoopLog, "drop", drop)


def an_old_log_is_never_released() -> AbstractContextManager[None]:
    return skipped(LoopLog, "_release")


def the_state_of_a_head_is_written_without_its_log() -> AbstractContextManager[None]:
    def seal(call: Any, self: Any, checkpoint: Any) -> None:
        self._opened.pop(checkpoint, None)
        self._loop.log.drop(checkpoint)
        self._release(self._waiting[checkpoint])

    return around(LoopHeadRunner, "_seal", seal)


def output_of_a_dropped_log_is_lost() -> AbstractContextManager[None]:
    def drop(call: Any, self: Any, checkpoint: Any) -> None:
        self._waiting[checkpoint] = replace(self._waiting[checkpoint], sealed=())
        call(self, checkpoint)

    return around(LoopHeadRunner, "_drop", drop)


def new_input_overtakes_the_replay() -> AbstractContextManager[None]:
    def step(call: Any, self: Any) -> bool:
        if self._is_replaying and SubtaskRunner._step_input(self):
            return True
        return bool(call(self))

    return around(LoopHeadRunner, "_step_input", step)


def heads_pass_event_time_on() -> AbstractContextManager[None]:
    return patched(LoopHeadRunner, "_merge", SubtaskRunner._merge)


def a_head_replays_its_own_former_log_only() -> AbstractContextManager[None]:
    def replay(call: Any, logs: Sequence[Any], schema: Any, owner: Any) -> Any:
        return call(
            [(path, log) for path, log in logs if log.owner.subtask_index == owner.subtask_index], schema, owner
        )

    return around(loop_log, "_replay", replay)


def what_comes_back_keeps_its_round() -> AbstractContextManager[None]:
    return patched(LoopHeadOperator, "returning", lambda self, batch: (batch, self.highest_round(batch)))


def the_last_round_goes_on() -> AbstractContextManager[None]:
    def returning(call: Any, self: Any, batch: Any) -> Any:
        spec, self._spec = self._spec, replace(self._spec, max_rounds=None)
        try:
            return call(self, batch)
        finally:
            self._spec = spec

    return around(LoopHeadOperator, "returning", returning)


def probes_overtake_what_operators_keep_back() -> AbstractContextManager[None]:
    def pass_probe(call: Any, self: Any, probe: Any) -> None:
        for outlet in self._outlets:
            if outlet.edge.nest is not None:
                outlet.send_element(probe)

    return around(SubtaskRunner, "_pass_probe", pass_probe)


def probes_are_lost() -> AbstractContextManager[None]:
    return skipped(SubtaskRunner, "_pass_probe")


def a_sentinel_goes_out_before_the_snapshot() -> AbstractContextManager[None]:
    def take(call: Any, self: Any, checkpoint: Any, **options: Any) -> None:
        for outlet in self._outlets:
            if outlet.edge.is_feedback:
                outlet.send_element(Barrier(checkpoint))
        call(self, checkpoint, **options)

    def send(call: Any, self: Any, element: Any) -> None:
        sent = self.__dict__.setdefault("sent", set())
        if not (self.edge.is_feedback and isinstance(element, Barrier)):
            call(self, element)
        elif element.checkpoint not in sent:
            sent.add(element.checkpoint)
            call(self, element)

    return both(around(SubtaskRunner, "_take_snapshot", take), around(EdgeOutlet, "send_element", send))


def no_sentinels() -> AbstractContextManager[None]:
    def send(call: Any, self: Any, element: Any) -> None:
        if not (self.edge.is_feedback and isinstance(element, Barrier)):
            call(self, element)

    return around(EdgeOutlet, "send_element", send)


def what_came_back_is_never_given_back() -> AbstractContextManager[None]:
    return both(skipped(FeedbackChannel, "close"), skipped(LoopLog, "close"))


def a_worker_leaves_its_connections_open() -> AbstractContextManager[None]:
    return skipped(Exchange, "close")


def a_driver_leaves_its_port_open() -> AbstractContextManager[None]:
    return skipped(Workers, "close")


# -- the driver -------------------------------------------------------------------------------------------------------


def users_are_told_of_every_other_round() -> AbstractContextManager[None]:
    def submit(call: Any, self: Any, loop: Any, callback: Any, round_: int) -> None:
        if round_ % 2 == 0:
            call(self, loop, callback, round_)

    return around(RoundCallbacks, "submit", submit)


def who_finishes_early_is_not_heard() -> AbstractContextManager[None]:
    def report(call: Any, self: Any, message: Any) -> None:
        if self.is_started or not isinstance(message, messages.Finished):
            call(self, message)

    return around(LiveGeneration, "on_report", report)


def after_a_rescale_nobody_is_sent_the_state_of_others() -> AbstractContextManager[None]:
    def restored(call: Any, manifest: Any, plan: Any, worker: Any) -> Any:
        return [one for one in call(manifest, plan, worker) if one.index == int(worker)]

    return around(live_generation, "restored_by", restored)


def nobody_watches_for_a_newer_driver() -> AbstractContextManager[None]:
    return skipped(ReplacementWatch, "look")


def a_drained_pipeline_reads_on_after_a_restart() -> AbstractContextManager[None]:
    def deploy(call: Any, self: Any, *arguments: Any) -> None:
        begun = self._begun
        if begun.restored is not None:
            self._begun = replace(begun, restored=replace(begun.restored, is_draining=False))
        call(self, *arguments)
        self._begun = begun

    return around(LiveGeneration, "deploy", deploy)


ALL = planted(globals(), __name__)
