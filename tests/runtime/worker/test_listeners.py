"""Checkpoint listeners and operator state of a subtask: order of calls, and what reaches a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.runtime.worker.test_subtask_runner import Made, Reader, Sink, batch

import headgate as hg
from headgate.codec.snapshot import LISTS_PREFIX, decode_sections
from headgate.codec.snapshot_rows import stored_rows
from headgate.connectors.base import SinkWriter
from headgate.errors import StorageError, UsageError
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId
from headgate.operators.base import RestoredState
from headgate.operators.user_functions import HookError, UserFunctionError
from headgate.protocol.subtasks import alignment
from headgate.protocol.subtasks import subtask as machine
from headgate.runtime.worker.chain import Chain, NodeError
from headgate.runtime.worker.listeners import SubtaskListeners
from headgate.runtime.worker.worker import failure_of

HEARD: list[tuple[str, str, int]] = []


class Heard(hg.CheckpointListener):
    def __init__(self, name: str) -> None:
        self.name = name
        self.fails = False

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        HEARD.append((self.name, "complete", checkpoint_id))
        if self.fails:
            raise ValueError("boom")

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        HEARD.append((self.name, "aborted", checkpoint_id))
        if self.fails:
            raise ValueError("boom")


class Keeping(hg.CheckpointedFunction):
    def __init__(self) -> None:
        self.is_broken = False

    def restore(self, context: hg.RestoreContext) -> None:
        if self.is_broken:
            raise ValueError("boom")
        self.kept = context.list("kept", int)
        self.context = context

    def snapshot(self, context: hg.SnapshotContext) -> None:
        if self.is_broken:
            raise ValueError("boom")
        self.kept.append(context.checkpoint_id)


class WithObjects(Made):
    """A runner of three nodes; ``objects`` are what a user gave to some of them."""

    def __init__(self, objects: dict[str, Any], reader: Reader | None = None, **options: Any) -> None:
        HEARD.clear()
        self.objects = objects
        super().__init__(reader=reader or Reader([batch(1)]), sink=Sink(), **options)
        for link in self.runner.chain.links:
            link.operator.user_object = objects.get(str(link.node.name))
        self.runner._listeners = self.runner._snapshots._listeners = self.hooks = SubtaskListeners(self.runner.chain)
        self.hooks.restore(lambda node: [], is_restored=False)

    def tell(self, *events: Any) -> None:
        for event in events:
            self.runner.handle(event)


def complete(checkpoint: int) -> machine.CompleteReceived:
    return machine.CompleteReceived(CheckpointId(checkpoint))


def abort(checkpoint: int) -> alignment.AbortReceived:
    return alignment.AbortReceived(CheckpointId(checkpoint))


def trigger(checkpoint: int) -> machine.TriggerReceived:
    return machine.TriggerReceived(CheckpointId(checkpoint))


def test_those_who_listen_are_called_in_the_order_of_the_chain() -> None:
    made = WithObjects({"out": Heard("writer"), "holding": Heard("operator"), "a": Heard("reader")})
    assert made.runner.is_listening
    made.tell(trigger(1), complete(1))
    assert HEARD == [("reader", "complete", 1), ("operator", "complete", 1), ("writer", "complete", 1)]


def test_where_nobody_listens_nothing_is_sent() -> None:
    made = WithObjects({"a": object(), "holding": Keeping()})
    assert not made.runner.is_listening
    made.tell(trigger(1), complete(1), trigger(2), abort(2))
    assert HEARD == []


def test_completed_ids_rise_and_nothing_is_told_twice() -> None:
    made = WithObjects({"a": Heard("f")})
    made.tell(trigger(1), trigger(2), trigger(3), complete(2), complete(2), complete(1), abort(3), complete(4))
    assert HEARD == [("f", "complete", 2), ("f", "aborted", 3), ("f", "complete", 4)]


def test_a_snapshot_alone_tells_nobody_anything() -> None:
    made = WithObjects({"a": Heard("f")})
    made.runner.step()
    made.tell(trigger(1))
    made.upload()
    assert HEARD == []


def test_nothing_is_told_about_the_restored_checkpoint() -> None:
    made = WithObjects({"a": Heard("f")}, restored=True)
    made.runner.step()
    assert HEARD == []


def test_an_abort_reaches_who_has_not_seen_the_barrier() -> None:
    made = WithObjects({"a": Heard("f")})
    made.tell(abort(1))
    assert HEARD == [("f", "aborted", 1)]


@pytest.mark.parametrize(
    ("event", "call"),
    [(complete(1), "notify_checkpoint_complete(1)"), (abort(1), "notify_checkpoint_aborted(1)")],
)
def test_what_acts_outside_is_tried_as_often_as_the_strategy_says(event: Any, call: str) -> None:
    listener = Heard("f")
    made = WithObjects({"holding": listener})
    listener.fails = True
    with pytest.raises(NodeError) as raised:
        made.tell(trigger(1), event)
    failure = failure_of(raised.value)
    assert failure.kind is FailureKind.LOST
    assert failure.reason == f"operator 'holding': ValueError: boom; its {call} failed"
    assert failure.detail.endswith("ValueError: boom")


def test_a_snapshot_that_raises_is_a_failure_of_user_code() -> None:  # G8
    function = Keeping()
    made = WithObjects({"holding": function})
    function.is_broken = True
    with pytest.raises(NodeError) as raised:
        made.tell(trigger(5))
    assert failure_of(raised.value).kind is FailureKind.USER_CODE
    assert failure_of(raised.value).reason == (
        "operator 'holding': ValueError: boom; its snapshot() for checkpoint 5 failed"
    )


def test_a_restore_that_raises_is_named() -> None:
    function = Keeping()
    made = WithObjects({"holding": function})
    function.is_broken = True
    with pytest.raises(NodeError) as raised:
        SubtaskListeners(made.runner.chain).restore(lambda node: [], is_restored=True)
    assert isinstance(raised.value.error, HookError)
    assert failure_of(raised.value).kind is FailureKind.LOST
    assert failure_of(raised.value).reason == "operator 'holding': ValueError: boom; its restore() failed"


def kept_in(report: tuple[Any, ...]) -> dict[str, int]:
    return stored_rows(decode_sections(report[2][f"{LISTS_PREFIX}holding"], ""), "")


def test_what_snapshot_puts_into_a_list_is_in_this_very_checkpoint() -> None:
    made = WithObjects({"holding": Keeping()})
    made.tell(trigger(1), trigger(2))
    made.upload()
    assert [kept_in(report) for report in made.reports if report[0] == "acknowledged"] == [{"kept": 1}, {"kept": 2}]


def test_a_finished_subtask_still_listens_and_keeps_its_lists() -> None:
    made = WithObjects({"holding": Keeping(), "out": Heard("writer")}, reader=Reader([]))
    assert made.runner.step()
    assert ("finished",) in made.reports
    made.tell(trigger(1), complete(1), abort(2))
    made.upload()
    assert HEARD == [("writer", "complete", 1), ("writer", "aborted", 2)]
    assert kept_in(made.reports[-1]) == {"kept": 1}


def test_a_function_restores_its_lists() -> None:
    made = WithObjects({"holding": Keeping()})
    made.tell(trigger(1))
    made.upload()
    data = made.reports[-1][2][f"{LISTS_PREFIX}holding"]
    hooks, states = SubtaskListeners(made.runner.chain), {"holding": [RestoredState(0, 1, memoryview(data))]}
    hooks.restore(lambda node: states.get(node, []), is_restored=True)
    function = made.objects["holding"]
    assert function.kept.get() == [1]
    assert (function.context.is_restored, function.context.operator) == (True, "holding")


def test_operator_state_of_one_that_keeps_none_any_more_is_refused() -> None:
    made = WithObjects({"a": Heard("reader")})
    states: dict[str, Sequence[RestoredState]] = {"a": [RestoredState(0, 1, memoryview(b""))]}
    with pytest.raises(UsageError, match="holds operator state of 'a', which keeps none any more"):
        SubtaskListeners(made.runner.chain).restore(lambda node: states.get(node, []), is_restored=True)


def test_a_writer_that_holds_records_back_cannot_keep_lists_too() -> None:
    class Both(hg.CheckpointedFunction, SinkWriter):
        can_hold_back = True

        def write(self, batch: Any) -> None: ...
        def seal(self, checkpoint: Any) -> Any: ...
        def close(self) -> None: ...
        def freeze(self) -> None: ...
        def finish(self) -> None: ...

    with pytest.raises(UsageError, match=r"restore\(\) cannot mean both"):
        WithObjects({"out": Both()})


def opened_by(made: WithObjects, **makers: Any) -> SubtaskListeners:
    """Find who listens once more; ``makers`` are sources and sinks that made what is there."""
    for link in made.runner.chain.links:
        link.operator.opened_by = makers.get(str(link.node.name))
    return SubtaskListeners(made.runner.chain)


def test_a_source_is_told_before_its_reader_and_a_sink_before_its_writer() -> None:
    made = WithObjects({"a": Heard("reader"), "out": Heard("writer")})
    hooks = opened_by(made, a=Heard("source"), out=Heard("sink"))
    hooks.completed(CheckpointId(1))
    assert [name for name, _, _ in HEARD] == ["source", "reader", "sink", "writer"]
    HEARD.clear()
    hooks.aborted(CheckpointId(2))
    assert [(name, call) for name, call, _ in HEARD] == [
        (name, "aborted") for name in ("source", "reader", "sink", "writer")
    ]


def test_a_sink_that_is_its_own_writer_is_told_once() -> None:
    both = Heard("both")
    hooks = opened_by(WithObjects({"out": both}), out=both)
    hooks.completed(CheckpointId(1))
    assert HEARD == [("both", "complete", 1)]


def test_a_sink_keeps_lists_unless_its_writer_does() -> None:
    made, sink = WithObjects({"out": object()}), Keeping()
    hooks = opened_by(made, out=sink)
    hooks.restore(lambda node: [], is_restored=False)
    assert list(hooks.snapshot(CheckpointId(1))) == [(LISTS_PREFIX, "out")]
    with pytest.raises(UsageError, match=r"'out' and what its .* are both headgate.CheckpointedFunctions"):
        opened_by(WithObjects({"out": Keeping()}), out=Keeping())


@pytest.mark.parametrize("node", ["a", "out"])
def test_a_reader_or_writer_with_a_method_that_nobody_would_call_is_refused(node: str) -> None:
    class Deaf:
        def notify_checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    made = WithObjects({})
    for link in made.runner.chain.links:
        if str(link.node.name) == node:
            link.operator.user_object = Deaf()
    with pytest.raises(UsageError, match=rf"operator '{node}': Deaf.notify_checkpoint_aborted would never be called"):
        opened_by(made, **{node: object()})


def test_a_chain_without_user_objects_has_no_hooks() -> None:
    made = Made(reader=Reader([batch(1)]))
    hooks = SubtaskListeners(made.runner.chain)
    assert isinstance(made.runner.chain, Chain)
    assert not hooks.is_listening
    assert hooks.snapshot(CheckpointId(1)) == {}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("{'n': 1}", "on the record {'n': 1}"),
        ("a batch of 3 records", "on a batch of 3 records"),
        ("open()", "in open()"),
    ],
)
def test_a_failure_of_user_code_says_on_what(what: str, said: str) -> None:
    failure = failure_of(UserFunctionError("parse", what, "ValueError: boom"))
    assert failure == Failure(
        FailureKind.USER_CODE, f"operator 'parse': ValueError: boom; its function failed {said}", "ValueError: boom"
    )


def test_storage_that_is_gone_for_a_while_is_no_failure_of_user_code() -> None:
    """Two restarts within one outage are the same failure twice: as one of user code it would be final (G8)."""
    outage = StorageError("get", "p/chk-0000000001/op-0.g1", "503 Slow Down", is_transient=True)
    assert failure_of(outage) == Failure(FailureKind.LOST, str(outage))
    of_a_sink = NodeError("out", outage)
    assert failure_of(of_a_sink) == Failure(FailureKind.LOST, f"operator 'out': {outage}")
    refused = StorageError("get", "p/chk-0000000001/op-0.g1", "403 Forbidden", is_transient=False)
    assert failure_of(refused).kind is FailureKind.USER_CODE
