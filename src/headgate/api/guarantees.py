"""Which pipelines a guarantee is possible for, and what damage means under it (rules of docs/spec/guarantees.md)."""

from __future__ import annotations

from collections.abc import Iterable

from headgate.connectors.offers import transaction_timeout_ms
from headgate.connectors.owned_sinks import OwnedSink
from headgate.connectors.streams import GroupSource
from headgate.errors import UsageError
from headgate.model.config import CheckpointConfig, DamagedCheckpoint, RestartStrategy
from headgate.model.definition import HookSpec
from headgate.model.graph import Graph, Role
from headgate.model.options import Guarantee
from headgate.operators import catalog
from headgate.operators.checkpointed.functions import CheckpointListener
from headgate.operators.loop_head import LoopHeadSpec
from headgate.protocol.supervision.restart import longest_outage_ms


def check_overtaking(graph: Graph) -> None:
    """Refuse what barriers cannot overtake (UA2).

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
    """Refuse what cannot hold.

    Raises:
        UsageError
    """
    for node in graph.nodes:
        if isinstance(node.spec, GroupSource) and mode is Guarantee.AT_MOST_ONCE:  # GS17
            raise UsageError(
                f"source '{node.name}' reads by a reader group, which goes back to where its readers were, and not to "
                "what was processed, as mode='at_most_once' would have to; read with StreamSource"
            )
        if node.role is not Role.LOOP_HEAD:
            continue
        if mode is Guarantee.AT_MOST_ONCE:  # GM34
            raise UsageError(
                f"loop '{node.name}': what circulates is in the checkpoint and is processed again after a failure, "
                "which mode='at_most_once' excludes; use mode='exactly_once'"
            )
        counts = isinstance(node.spec, LoopHeadSpec) and node.spec.round_column is not None
        if mode is Guarantee.AT_LEAST_ONCE and counts:  # GM21
            raise UsageError(
                f"loop '{node.name}' counts rounds, which begin when all input has ended; with mode='at_least_once' "
                "input may come once more after that, and belongs to no round; use mode='exactly_once', or a loop "
                "without rounds"
            )
    if mode is Guarantee.AT_MOST_ONCE and on_damaged is DamagedCheckpoint.PREVIOUS:  # GM35
        raise UsageError(
            "on_damaged_checkpoint='previous' reads again what was read since the earlier checkpoint, which "
            "mode='at_most_once' excludes; leave it out, or use mode='at_least_once'"
        )


def check_retention(graph: Graph, checkpoints: CheckpointConfig, hooks: Iterable[HookSpec] = ()) -> None:
    """Refuse to remove the checkpoints of a pipeline in which somebody listens to them (C75).

    What a listener has yet to do for a completed checkpoint is nowhere else.

    Raises:
        UsageError
    """
    options = {"retain_on_cancel": checkpoints.retain_on_cancel, "retain_on_failure": checkpoints.retain_on_failure}
    given = [name for name, retains in options.items() if not retains]
    listening = [f"operator '{node.name}'" for node in graph.nodes if catalog.is_listening(node.spec)]
    listening += [f"hook '{spec.name}'" for spec in hooks if _is_listening(spec.hook)]
    if given and listening:
        raise UsageError(
            f"{listening[0]} acts when checkpoints are completed, and what it has not done yet is in them; "
            f"leave {' and '.join(given)} out of Checkpointing, stop the pipeline, and remove its checkpoints "
            "when it has ended"
        )


def check_transactions(graph: Graph, checkpoints: CheckpointConfig, restart: RestartStrategy) -> None:
    """Refuse a sink whose target may end a transaction before checkpoints that go well have committed it (CS9).

    It is open for an interval, then prepared until the checkpoint is completed, or one that follows it: each failure
    that is tolerated leaves it to the next. Then a worker or the driver may fail, and the next generation commits it.

    Raises:
        UsageError
    """
    outage_ms = longest_outage_ms(restart)
    each_ms = checkpoints.interval_ms + checkpoints.min_pause_ms + checkpoints.timeout_ms
    needed_ms = each_ms * (1 + checkpoints.tolerable_failures) + outage_ms
    for node in graph.nodes:
        timeout_ms = transaction_timeout_ms(node.spec) if node.role is Role.SINK else None
        if timeout_ms is None or (checkpoints.interval_ms and timeout_ms > needed_ms):
            continue
        may = f"and a restart behind it may take {needed_ms} ms" if checkpoints.interval_ms else "has no interval"
        raise UsageError(
            f"sink '{node.name}' writes to a target that ends transactions after {timeout_ms} ms, and a checkpoint "
            f"{may}: output would be lost; give Checkpointing a shorter interval, timeout and pause, and fewer "
            f"tolerable failures, restart sooner than after {outage_ms} ms if that is more than a standby takes, or "
            "have the target wait for longer"
        )


def check_owners(graph: Graph) -> None:
    """Refuse a sink that cannot say whose its target is (LV8).

    Raises:
        UsageError
    """
    for node in graph.nodes:
        if node.role is Role.SINK and is_transactional(node.spec) and not isinstance(node.spec, OwnedSink):
            raise UsageError(
                f"sink '{node.name}': {type(node.spec).__name__} cannot say which pipeline its target belongs to, and "
                "one that starts over would lose or repeat output there; derive it from headgate.TwoPhaseSink or "
                "headgate.LedgerSink, or give it the methods owner, own and how_to_forget of "
                "connectors.base.OwnedSink; one that writes at once, and may repeat it, says is_transactional = False"
            )


def _is_listening(hook: object) -> bool:
    """Whether ``restore`` may owe something to a completed checkpoint: unless the hook says that it does not."""
    return isinstance(hook, CheckpointListener) and bool(getattr(hook, "is_listening", True))


def policy_for(graph: Graph, mode: Guarantee) -> DamagedCheckpoint:
    """Return what happens to a damaged checkpoint when nobody said (R52): output is not repeated unasked."""
    sinks = [node.spec for node in graph.nodes if node.role is Role.SINK]
    matters = mode is Guarantee.AT_MOST_ONCE or any(is_transactional(sink) for sink in sinks)
    return DamagedCheckpoint.FAIL if matters else DamagedCheckpoint.PREVIOUS


def is_transactional(sink: object) -> bool:
    """Return whether what a sink shows is that of completed checkpoints; it is, unless it says otherwise."""
    return bool(getattr(sink, "is_transactional", True))
