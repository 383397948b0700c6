"""The coordinator's hooks in their threads: order, patience, what they may return (EI4, EI5, EI7, EI9)."""

from __future__ import annotations

import pickle  # noqa: TID251 - what Spark does with a definition, in one process
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.environment import is_cancelled
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import HookState, Manifest
from headgate.model.plan import HookSpec
from headgate.runtime.driver.hook_calls import HOOK_BYTES_MAX, HookCalls, newer_generation

WAIT_S = 60


class Noting(hg.CoordinatorHook, hg.CheckpointListener):
    """Notes what it is told, and does what the test wants."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.answer: Any = b"data"
        self.error: BaseException | None = None

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def open(self, context: hg.HookContext) -> None:
        self._note("open", context.pipeline, context.hook, context.generation)

    def trigger(self, checkpoint_id: int) -> Any:
        self._note("trigger", checkpoint_id)
        return self.answer

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self._note("restore", checkpoint_id, data)

    def reset(self) -> None:
        self._note("reset")

    def close(self) -> None:
        self._note("close")

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._note("complete", checkpoint_id)


@pytest.fixture
def hook() -> Iterator[Noting]:
    made = Noting()
    yield made
    made.gate.set()


def calls_of(hook: Noting, timeout_ms: int = 60_000) -> HookCalls:
    return HookCalls((HookSpec("x", hook, timeout_ms),))


def manifest(*states: HookState) -> Manifest:
    return Manifest(CheckpointId(7), Generation(2), 1, 128, (), hooks=states)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Answers:
    """Takes what a hook answers."""

    def __init__(self) -> None:
        self.data: list[Any] = []
        self.errors: list[BaseException] = []

    def trigger(self, calls: HookCalls, checkpoint: int, is_wanted: bool = True) -> None:
        calls.trigger(CheckpointId(checkpoint), "x", lambda: is_wanted, self.data.append, self.errors.append)


def test_every_generation_begins_with_a_restore_or_a_reset(hook: Noting) -> None:  # C37
    calls = calls_of(hook)
    calls.begin("p", Generation(1), None)
    calls.begin("p", Generation(2), None)
    calls.begin("p", Generation(3), manifest(HookState("x", b"at 7"), HookState("y", b"other")))
    calls.begin("p", Generation(4), manifest())
    calls.close()
    assert hook.calls == [
        ("open", "p", "x", 1),
        ("reset",),
        ("open", "p", "x", 2),
        ("reset",),
        ("open", "p", "x", 3),
        ("restore", 7, b"at 7"),
        ("open", "p", "x", 4),
        ("restore", 7, None),
        ("close",),
    ]
    assert hook.threads == {"headgate-hook-x"}


def test_a_hook_answers_from_its_own_thread(hook: Noting) -> None:
    calls, answers = calls_of(hook), Answers()
    answers.trigger(calls, 5)
    wait(lambda: bool(answers.data))
    assert answers.data == [b"data"]
    calls.close()


def test_a_hook_that_is_asked_again_answers_in_the_end(hook: Noting) -> None:
    calls, answers = calls_of(hook), Answers()
    hook.answer = hg.ASK_AGAIN
    wanted = [True]
    calls.trigger(CheckpointId(3), "x", lambda: wanted[0], answers.data.append, answers.errors.append)
    wait(lambda: hook.calls.count(("trigger", 3)) > 2)
    calls.begin("p", Generation(2), None, "life", "home")  # is not held up by it
    hook.answer = b"at last"
    wait(lambda: answers.data == [b"at last"])
    hook.answer = hg.ASK_AGAIN
    calls.trigger(CheckpointId(4), "x", lambda: wanted[0], answers.data.append, answers.errors.append)
    wait(lambda: ("trigger", 4) in hook.calls)
    wanted[0] = False  # given up
    calls.begin("p", Generation(3), None)
    told = len(hook.calls)
    calls.begin("p", Generation(4), None)
    assert hook.calls[told:] == [("open", "p", "x", 4), ("reset",)]
    calls.close()
    assert (answers.data, answers.errors) == ([b"at last"], [])


def test_a_stuck_hook_holds_up_nobody_else(hook: Noting) -> None:
    other = Noting()
    calls, answers = HookCalls((HookSpec("x", hook, 50), HookSpec("y", other, 60_000))), Answers()
    hook.gate.clear()
    answers.trigger(calls, 5)
    assert hook.entered.wait(WAIT_S)
    calls.trigger(CheckpointId(5), "y", lambda: True, answers.data.append, answers.errors.append)
    wait(lambda: answers.data == [b"data"])
    with pytest.raises(StorageError, match=r"cannot call reset\(\) of hook 'x': it did not return within 50 ms"):
        calls.begin("p", Generation(1), None)
    begun = time.monotonic()
    calls.close()
    assert time.monotonic() - begun < WAIT_S, "a stuck hook is not waited for"
    hook.gate.set()
    wait(lambda: ("close",) in hook.calls)
    assert ("reset",) not in hook.calls, "nobody waited for it any more"


def test_a_hook_is_not_called_for_a_checkpoint_that_is_over(hook: Noting) -> None:
    calls, answers = calls_of(hook), Answers()
    answers.trigger(calls, 5, is_wanted=False)
    answers.trigger(calls, 6)
    wait(lambda: bool(answers.data))
    assert hook.calls == [("trigger", 6)]
    calls.close()


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ("text", None, "must return bytes or None, not str"),
        (b"x" * (HOOK_BYTES_MAX + 1), None, "a manifest holds at most 1048576"),
        (None, ValueError("no"), "no"),
        (None, SystemExit(3), "3"),
    ],
)
def test_what_no_manifest_can_hold_and_what_is_raised_is_a_failure(
    hook: Noting, answer: Any, error: BaseException | None, said: str
) -> None:  # EI4, EI5
    calls, answers = calls_of(hook), Answers()
    hook.answer, hook.error = answer, error
    answers.trigger(calls, 5)
    wait(lambda: bool(answers.errors))
    assert said in str(answers.errors[0])
    hook.error = None
    hook.answer = b"x" * HOOK_BYTES_MAX
    answers.trigger(calls, 6)
    wait(lambda: bool(answers.data))
    calls.close()


def test_what_a_hook_raises_when_a_generation_begins_is_said(hook: Noting) -> None:
    calls = calls_of(hook)
    hook.error = ValueError("gone")
    with pytest.raises(StorageError, match=r"cannot call restore\(7\) of hook 'x': ValueError: gone"):
        calls.begin("p", Generation(3), manifest())
    hook.error = UsageError("use another one")
    with pytest.raises(UsageError, match="use another one"):
        calls.begin("p", Generation(3), manifest())
    hook.error = None
    calls.close()


def test_a_hook_may_say_that_its_driver_was_replaced() -> None:
    assert newer_generation(FencedError("the shop", 3, 5)) == 5
    assert newer_generation(FencedError("somebody")) is None
    assert newer_generation(ValueError()) is None


def test_hooks_that_listen_are_told_in_order_before_the_end(hook: Noting) -> None:
    calls, failed = calls_of(hook), list[tuple[str, BaseException]]()
    assert calls.is_listening
    calls.tell(
        lambda listener: listener.notify_checkpoint_complete(5), lambda name, error: failed.append((name, error))
    )
    done = threading.Event()
    calls.when_done(done.set)
    assert done.wait(WAIT_S)
    assert hook.calls == [("complete", 5)]
    hook.error = ValueError("no")
    calls.tell(lambda listener: listener.notify_checkpoint_aborted(6), lambda name, error: failed.append((name, error)))
    calls.tell(
        lambda listener: listener.notify_checkpoint_complete(7), lambda name, error: failed.append((name, error))
    )
    wait(lambda: bool(failed))
    assert failed[0][0] == "hook 'x'"
    hook.error = None
    calls.close()


def test_hooks_hear_that_their_run_is_called_off(hook: Noting) -> None:
    off, heard = threading.Event(), list[bool]()
    calls = HookCalls((HookSpec("x", hook, 60_000),), off=off)
    for _ in range(2):
        done = threading.Event()
        calls.tell(lambda _: heard.append(is_cancelled()), lambda *_: None)
        calls.when_done(done.set)
        assert done.wait(WAIT_S)
        off.set()
    calls.close()
    assert heard == [False, True]


def test_without_a_hook_that_listens_nobody_waits() -> None:
    done: list[int] = []
    HookCalls().when_done(lambda: done.append(1))
    assert done == [1]
    assert not HookCalls().is_listening
    HookCalls().close()


def test_hooks_stay_in_the_driver() -> None:
    spec = HookSpec("x", threading.Lock(), 50)
    assert pickle.loads(pickle.dumps(spec)) == HookSpec("x", None, 50)
