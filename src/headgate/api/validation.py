"""Checks of a whole pipeline: which guarantee is possible, and which functions may listen to checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from headgate.connectors.base import Sink, transaction_timeout_ms
from headgate.connectors.streams import GroupSource
from headgate.errors import UsageError
from headgate.model.config import CheckpointConfig, DamagedCheckpoint, Guarantee, RestartStrategy
from headgate.model.graph import Graph, Role
from headgate.model.ids import NodeName
from headgate.model.plan import HookSpec
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.process.batch_process import BatchProcessFunction, BatchProcessSpec
from headgate.operators.process.key_process import KeyFunctionSpec
from headgate.operators.process.row_process import ProcessFunction, ProcessSpec
from headgate.operators.specs import is_listening
from headgate.protocol.supervision.restart_policy import longest_outage_ms


def check_overtaking(graph: Graph) -> None:
    """Refuse unaligned checkpoints in a pipeline with loops (UA2).

    Raises:
        UsageError
    """
    for node in graph.nodes:
        if node.role is Role.LOOP_HEAD:
            raise UsageError(
                f"loop '{node.name}': unaligned checkpoints cannot cross a loop, because what goes round is recorded "
                "between barriers that keep their place; leave alignment_timeout out of Checkpointing"
            )


def check_guarantee(graph: Graph, mode: Guarantee, on_damaged: DamagedCheckpoint | None) -> None:
    """Refuse a pipeline for which the guarantee ``mode`` is not possible.

    Raises:
        UsageError
    """
    for node in graph.nodes:
        if isinstance(node.spec, GroupSource) and mode is Guarantee.AT_MOST_ONCE:
            raise UsageError(
                f"source '{node.name}' reads by a reader group, which goes back to where its readers were, and not to "
                "what was processed, as mode='at_most_once' would have to; read with StreamSource"
            )
        if node.role is not Role.LOOP_HEAD:
            continue
        if mode is Guarantee.AT_MOST_ONCE:
            raise UsageError(
                f"loop '{node.name}': what circulates is in the checkpoint and is processed again after a failure, "
                "which mode='at_most_once' excludes; use mode='exactly_once'"
            )
        counts = isinstance(node.spec, LoopHeadSpec) and node.spec.round_column is not None
        if mode is Guarantee.AT_LEAST_ONCE and counts:
            raise UsageError(
                f"loop '{node.name}' counts rounds, which begin when all input has ended; with mode='at_least_once' "
                "input may come once more after that, and belongs to no round; use mode='exactly_once', or a loop "
                "without rounds"
            )
    if mode is Guarantee.AT_MOST_ONCE and on_damaged is DamagedCheckpoint.PREVIOUS:
        raise UsageError(
            "on_damaged_checkpoint='previous' reads again what was read since the earlier checkpoint, which "
            "mode='at_most_once' excludes; leave it out, or use mode='at_least_once'"
        )


def check_retention(graph: Graph, checkpoints: CheckpointConfig, hooks: Iterable[HookSpec] = ()) -> None:
    """Refuse to remove the checkpoints of a pipeline with a checkpoint listener.

    Only the checkpoint holds what a listener has yet to do for it.

    Raises:
        UsageError
    """
    options = {"retain_on_cancel": checkpoints.retain_on_cancel, "retain_on_failure": checkpoints.retain_on_failure}
    given = [name for name, retains in options.items() if not retains]
    listening = [f"operator '{node.name}'" for node in graph.nodes if is_listening(node.spec)]
    listening += [f"hook '{spec.name}'" for spec in hooks if _is_listening(spec.hook)]
    if given and listening:
        raise UsageError(
            f"{listening[0]} acts when checkpoints are completed, and what it has not done yet is in them; "
            f"leave {' and '.join(given)} out of Checkpointing, stop the pipeline, and remove its checkpoints "
            "when it has ended"
        )


def check_transactions(graph: Graph, checkpoints: CheckpointConfig, restart: RestartStrategy) -> None:
    """Refuse a sink if its target may end a transaction before healthy checkpoints have committed it (CS9).

    It is open for an interval, then prepared until the checkpoint is completed, or one that follows it: each failure
    that is tolerated leaves it to the next. Then a worker or the driver may fail, and the next generation commits it.

    Raises:
        UsageError
    """
    outage_ms = longest_outage_ms(restart)
    each_ms = checkpoints.interval_ms + checkpoints.min_pause_ms + checkpoints.timeout_ms
    for node in graph.nodes:
        timeout_ms = transaction_timeout_ms(cast(Sink, node.spec)) if node.role is Role.SINK else None
        is_renewed = node.role is Role.SINK and cast(Sink, node.spec).renews_transactions
        needed_ms = (0 if is_renewed else each_ms * (1 + checkpoints.tolerable_failures)) + outage_ms
        if timeout_ms is None or (checkpoints.interval_ms and timeout_ms > needed_ms):
            continue
        may = f"and a restart after it may take {needed_ms} ms" if checkpoints.interval_ms else "has no interval"
        raise UsageError(
            f"sink '{node.name}' writes to a target that ends transactions after {timeout_ms} ms, and a checkpoint "
            f"{may}: output would be lost; give Checkpointing a shorter interval, timeout and pause, and fewer "
            f"tolerable failures, restart sooner than after {outage_ms} ms if that is more than a standby takes, or "
            "have the target wait for longer"
        )


def check_owners(graph: Graph) -> None:
    """Refuse a sink that does not know the owner of its target.

    Raises:
        UsageError
    """
    for node in graph.nodes:
        if node.role is Role.SINK and is_transactional(node.spec) and not cast(Sink, node.spec).has_owner:
            raise UsageError(
                f"sink '{node.name}': {type(node.spec).__name__} cannot say which pipeline its target belongs to, and "
                "one that starts over would lose or repeat output there; derive it from headgate.TwoPhaseSink or "
                "headgate.LedgerSink, or give it the methods owner, own and how_to_forget of connectors.base.Sink with "
                "has_owner = True; one that writes at once, and may repeat it, says is_transactional = False"
            )


def _is_listening(hook: object) -> bool:
    """Whether the hook has work to do for completed checkpoints, unless it says that it has none."""
    return isinstance(hook, CheckpointListener) and bool(getattr(hook, "is_listening", True))


def policy_for(graph: Graph, mode: Guarantee) -> DamagedCheckpoint:
    """Return the default policy for a damaged checkpoint: output is not repeated unasked."""
    sinks = [node.spec for node in graph.nodes if node.role is Role.SINK]
    matters = mode is Guarantee.AT_MOST_ONCE or any(is_transactional(sink) for sink in sinks)
    return DamagedCheckpoint.FAIL if matters else DamagedCheckpoint.PREVIOUS


def is_transactional(sink: object) -> bool:
    """Return whether a sink shows only the output of completed checkpoints; it does, unless it says otherwise."""
    return bool(getattr(sink, "is_transactional", True))


def check_listener(node: NodeName, spec: object, loops: tuple[NodeName, ...], has_rounds: bool) -> None:
    """Check that ``on_round`` of an operator or loop head would be called, and that no loop contains timers.

    Raises:
        UsageError: it has ``on_round`` and is in no loop, in one that counts no rounds, or in an inner one; or it has
            timers in a loop.
    """
    if loops and isinstance(spec, ProcessSpec | BatchProcessSpec | KeyFunctionSpec) and spec.has_timers:
        has = "a time mode, so it has timers" if isinstance(spec, KeyFunctionSpec) else "on_timer"
        raise UsageError(
            f"operator '{node}' has {has}, but is in loop '{loops[-1]}', which has ended when nothing goes round "
            "any more, so a timer may not send anything into it; use it before the loop or after it"
        )
    if not _listens(spec):
        return
    if not loops:
        raise UsageError(
            f"operator '{node}' has on_round, but is in no loop, so it would never be called; use it in the body of an "
            "iterate, or take on_round out"
        )
    if len(loops) > 1:
        raise UsageError(
            f"operator '{node}' has on_round, but loop '{loops[-1]}' is inside loop '{loops[0]}', and a round "
            "finishes for all only in an outermost loop; move on_round there"
        )
    if not has_rounds:
        raise UsageError(
            f"operator '{node}' has on_round, but loop '{loops[0]}' does not count rounds; give its iterate a "
            "round_column="
        )


def _listens(spec: object) -> bool:
    """Whether ``spec`` is a loop head with ``on_round``, or has a process function that overrides it."""
    if isinstance(spec, LoopHeadSpec):
        return spec.on_round is not None
    if isinstance(spec, ProcessSpec):
        return type(spec.function).on_round is not ProcessFunction.on_round
    return isinstance(spec, BatchProcessSpec) and type(spec.function).on_round is not BatchProcessFunction.on_round
