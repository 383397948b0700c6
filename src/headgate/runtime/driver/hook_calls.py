"""Calls the coordinator's hooks: each in a thread of its own, so that a stuck one holds up no other.

Counterparts: ``connectors.base.CoordinatorHook``, which users derive from; ``protocol.checkpoints.completion``, which
decides when a hook is called and how long it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from headgate.connectors.base import ASK_AGAIN, CoordinatorHook, HookContext
from headgate.environment import Event, Queue, Thread, ThreadEnded, cancellable
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.model.plan import HookSpec
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.runtime.surroundings import PROCESS, Surroundings

HOOK_BYTES_MAX = 1 << 20
"""What a hook returns is in the manifest itself."""

ASK_AGAIN_S = 0.005
"""How long until a hook is asked again: short beside any interval, and long beside what a look costs."""

CLOSE_MS_MAX = 5_000
"""A hook that is stuck does not keep a run that has ended."""


class HookThread:
    """One hook and its thread, a daemon: a hook that never returns must not keep the process alive."""

    def __init__(self, spec: HookSpec, around: Surroundings, off: Event | None) -> None:
        self.name, self.timeout_ms = spec.name, spec.timeout_ms
        self._hook = cast(CoordinatorHook, spec.hook)
        self._around = around
        self._off = off
        self._calls: Queue[Callable[[CoordinatorHook], None] | None] = around.queue()
        self._thread: Thread | None = None

    @property
    def is_listening(self) -> bool:
        """Whether it hears how checkpoints end."""
        return isinstance(self._hook, CheckpointListener)

    def put(self, call: Callable[[CoordinatorHook], None]) -> None:
        """Have ``call``, which must not raise, run after the earlier ones."""
        self._calls.put(call)
        if self._thread is None:
            self._thread = self._around.thread(cancellable(self._off, self._loop), f"headgate-hook-{self.name}")
            self._thread.start()

    def run(self, what: str, call: Callable[[CoordinatorHook], None]) -> None:
        """Have ``call`` run, and wait for its end; not from the event thread.

        Raises:
            HeadgateError: what it raised, as a StorageError where it is none of ours; or it did not end in time.
        """
        done, problems, is_over = self._around.event(), list[BaseException](), list[bool]()

        def attempt(hook: CoordinatorHook) -> None:
            if is_over:  # its caller has given up: the next generation's call follows
                return
            try:
                call(hook)
            except ThreadEnded:
                raise
            except BaseException as error:
                problems.append(error)
            done.set()

        assert self._thread is None or not self._thread.is_current, "a hook does not wait for itself"
        self.put(attempt)
        if not done.wait(self.timeout_ms / 1000):
            # given up, though it may still run: its thread takes the next call when it returns
            is_over.append(True)
            cause = f"it did not return within {self.timeout_ms} ms"
            raise StorageError(f"call {what} of", f"hook '{self.name}'", cause, is_transient=False)
        for problem in problems:
            if isinstance(problem, HeadgateError):
                raise problem
            raise StorageError(
                f"call {what} of", f"hook '{self.name}'", _said(problem), is_transient=False
            ) from problem

    def close(self) -> None:
        """Close the hook after its waiting calls; wait for it, but not long."""
        if self._thread is None:
            return
        self._calls.put(lambda hook: hook.close())
        self._calls.put(None)
        self._thread.join(min(self.timeout_ms, CLOSE_MS_MAX) / 1000)

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call(self._hook)
            except ThreadEnded:
                raise
            except BaseException:  # of ``close``: no caller is left to report it to
                return


class HookCalls:
    """All hooks of one run."""

    def __init__(
        self, specs: Sequence[HookSpec] = (), around: Surroundings = PROCESS, off: Event | None = None
    ) -> None:
        """``off`` is set when nothing needs them any more."""
        self._threads = {spec.name: HookThread(spec, around, off) for spec in specs}
        self._around = around

    @property
    def timeouts(self) -> dict[str, int]:
        """Of each hook, in milliseconds, by name."""
        return {name: thread.timeout_ms for name, thread in self._threads.items()}

    def begin(
        self, pipeline: str, generation: Generation, restored: Manifest | None, life: str = "", home: str = ""
    ) -> None:
        """Take every hook to what a generation begins with, whatever it did before (C37). Waits; may be repeated.

        ``life`` and ``home`` as in ``HookContext``.

        Raises:
            HeadgateError: one failed, or did not return in time.
        """
        for name, thread in self._threads.items():
            context = HookContext(pipeline, name, int(generation), life, home)

            def begin(hook: CoordinatorHook, context: HookContext = context) -> None:
                # for every generation, also if it is open: it learns the number of the new one
                hook.open(context)
                if restored is None:
                    hook.reset()
                else:
                    state = restored.state_of_hook(context.hook)
                    hook.restore(int(state.checkpoint or restored.checkpoint), state.data)

            thread.run("reset()" if restored is None else f"restore({restored.checkpoint})", begin)

    def trigger(
        self,
        checkpoint: CheckpointId,
        name: str,
        is_wanted: Callable[[], bool],
        answered: Callable[[bytes | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Call a hook for ``checkpoint`` when its turn comes, if that is still wanted; it answers from its thread.

        A hook that answered ``ASK_AGAIN`` is called again after what came meanwhile, such as a new generation.
        """

        def call(hook: CoordinatorHook) -> None:
            if not is_wanted():
                return
            try:
                data = hook.trigger(int(checkpoint))
                if data is ASK_AGAIN:
                    # in the hook's own thread: no other hook waits
                    self._around.sleep(ASK_AGAIN_S)
                    self._threads[name].put(call)
                    return
                data = _checked(name, data)
            except ThreadEnded:
                raise
            except BaseException as error:
                failed(error)
            else:
                answered(data)

        self._threads[name].put(call)

    def tell(self, tell: Callable[[CheckpointListener], None], failed: Callable[[str, BaseException], None]) -> None:
        """Tell hooks that listen how a checkpoint ended."""
        for name, thread in self._threads.items():
            if thread.is_listening:
                thread.put(_teller(f"hook '{name}'", tell, failed))

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` when listening hooks have handled all notifications so far: from a thread, or at once."""
        for thread in self._threads.values():
            if thread.is_listening:
                # wrapped once for each hook: it passes through all their queues, one after the other
                call = _in_thread(thread, call)
        call()

    @property
    def is_listening(self) -> bool:
        """Whether any hook hears how checkpoints end."""
        return any(thread.is_listening for thread in self._threads.values())

    @property
    def patience_ms(self) -> int:
        """How long ``when_done`` may take at most."""
        return min(max(self.timeouts.values(), default=0), CLOSE_MS_MAX)

    def close(self) -> None:
        """The run has ended."""
        for thread in self._threads.values():
            thread.close()


def _in_thread(thread: HookThread, call: Callable[[], None]) -> Callable[[], None]:
    return lambda: thread.put(lambda _: call())


def _teller(
    name: str, tell: Callable[[CheckpointListener], None], failed: Callable[[str, BaseException], None]
) -> Callable[[CoordinatorHook], None]:
    def call(hook: CoordinatorHook) -> None:
        try:
            tell(cast(CheckpointListener, hook))
        except ThreadEnded:
            raise
        except BaseException as error:
            failed(name, error)

    return call


def newer_generation(error: BaseException) -> Generation | None:
    """Return the generation that replaced this one, if that is what a hook says."""
    return Generation(error.newest) if isinstance(error, FencedError) and error.newest else None


def failure_text(subject: str, call: str, error: BaseException) -> str:
    """Return one sentence about a call that failed; ``owner``: such as ``hook 'exchange'``."""
    return f"{call} of {subject} failed: {_said(error)}"


def _checked(name: str, data: object) -> bytes | None:
    if data is not None and not isinstance(data, bytes):
        raise UsageError(f"trigger() of hook '{name}' must return bytes or None, not {type(data).__name__}")
    if data is not None and len(data) > HOOK_BYTES_MAX:
        raise UsageError(
            f"trigger() of hook '{name}' returned {len(data)} bytes, and a manifest holds at most {HOOK_BYTES_MAX}; "
            "keep them outside, and return where they are"
        )
    return data


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"
