"""Blocking calls of the store for asyncio tasks: a thread pool, proxies of store objects, and a poller for changes.

A call that a task began never outlives the task: a cancelled task waits for its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from headgate.errors import HeadgateError, UsageError

THREADS = 8
"""How many calls of one store run at the same time; the event loop waits for none of them."""

_T = TypeVar("_T")


class CallExecutor:
    """Runs blocking calls for the tasks of one event loop in a thread pool."""

    def __init__(self, threads: int = THREADS) -> None:
        """Bind to the running event loop. Threads start as they are needed."""
        if threads < 1:
            raise UsageError(f"a store needs at least one thread, not {threads}")
        self.loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="headgate-async")
        self._under_way: set[Future[Any]] = set()
        self.is_closed = False

    async def run(self, call: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """Run ``call`` in a thread and return its result.

        If the task is cancelled before the call has begun, the call never runs. If it is cancelled later, the task ends
        when the call has ended; then ``undo`` runs with the result, which no task receives.

        Raises:
            UsageError: the store is closed, or belongs to another event loop.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError("a store is used by the event loop in which it was opened; open another one in this loop")
        asked = self._begin(call)
        try:
            await _wait_for(asked)
        except asyncio.CancelledError:
            # it succeeds only for a call that has not begun: then there is nothing to undo
            if not asked.cancel():
                await self._settle(asked, undo)
            raise
        return asked.result()

    async def close(self, last: Callable[[], object]) -> None:
        """Take no more calls; when those that were begun have ended, carry out ``last``, and end the threads."""
        self.is_closed = True
        was_cancelled = False
        for asked in tuple(self._under_way):
            was_cancelled |= await _wait_uncancelled(asked)
        # past _begin(), which refuses calls by now
        closing = self._pool.submit(last)
        was_cancelled |= await _wait_uncancelled(closing)
        self._pool.shutdown(wait=False)
        if was_cancelled:
            raise asyncio.CancelledError
        closing.result()

    def _begin(self, call: Callable[[], _T]) -> Future[_T]:
        if self.is_closed:
            raise UsageError("the store is closed; open it again")
        return self._submit(call)

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        asked = self._pool.submit(contextvars.copy_context().run, call)
        self._under_way.add(asked)
        asked.add_done_callback(self._under_way.discard)
        return asked

    async def _settle(self, asked: Future[_T], undo: Callable[[_T], object] | None) -> None:
        """Wait for the end of a call after its task was cancelled, and undo it."""
        await _wait_uncancelled(asked)
        if undo is not None and asked.exception() is None:
            found = asked.result()
            # not by _begin(): it is undone also while the store closes
            await _wait_uncancelled(self._submit(lambda: undo(found)))


async def future_result(asked: Future[_T]) -> _T:
    """Return the result of ``asked``, which goes on even if no task waits for it."""
    await _wait_for(asked)
    return asked.result()


async def _wait_for(asked: Future[Any]) -> None:
    """Wait until ``asked`` is done, without ever cancelling it."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        # its task may have been cancelled meanwhile
        if not waiter.done():
            waiter.set_result(None)

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(wake)

    asked.add_done_callback(tell)
    await waiter


async def _wait_uncancelled(asked: Future[Any]) -> bool:
    """Wait until ``asked`` is done, also when the task is cancelled meanwhile; return whether it was."""
    was_cancelled = False
    while not asked.done():
        try:
            await _wait_for(asked)
        except asyncio.CancelledError:
            was_cancelled = True
    return was_cancelled


_P = ParamSpec("_P")
_B = TypeVar("_B")
_R = TypeVar("_R")


class AsyncProxy(Generic[_B]):
    """A store object for asyncio tasks: its calls run in the executor's threads.

    ``in_turn``: calls must not overlap; they run in the order in which tasks made them.
    """

    def __init__(self, calls: CallExecutor, blocking: _B, *, in_turn: bool = False) -> None:
        self._calls = calls
        self._blocking = blocking
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if in_turn else nullcontext()

    async def _run(self, call: Callable[[], _R], undo: Callable[[_R], object] | None = None) -> _R:
        async with self._turn:
            return await self._calls.run(call, undo)


class _Block(Protocol):
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_C = TypeVar("_C", bound=_Block)


class AsyncContextProxy(AsyncProxy[_C]):
    """A proxy of a context manager: the end of an ``async with`` block does what the blocking object does."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run(functools.partial(self._blocking.__exit__, kind, error, trace))


def awaitable(method: Callable[Concatenate[_B, _P], _R]) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]:
    """Return an awaitable method with the same name and meaning."""

    @functools.wraps(method)
    async def passing(self: AsyncProxy[_B], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await self._run(functools.partial(method, self._blocking, *args, **kwargs))

    return passing


class _Entered(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


_E = TypeVar("_E", bound=_Entered)


class Opening(Generic[_E]):
    """An awaitable that opens something: ``x = await opening``, or ``async with opening as x``."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, _E]]) -> None:
        self._open = open
        self._opened: _E | None = None

    def __await__(self) -> Generator[Any, Any, _E]:
        return self._open().__await__()

    async def __aenter__(self) -> _E:
        self._opened = await self._open()
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)


class Unclosed:
    """A context manager without effect, for objects that need no closing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


LOOK_PAUSE_S = 0.01
"""How often it compares one number, which costs microseconds."""

IDLE_S = 1.0
"""How long the thread stays when no task waits any more."""


class ChangePoller:
    """Wakes waiting tasks of one event loop when their store has changed: one thread polls for all of them."""

    def __init__(self, changes: Callable[[], int], loop: asyncio.AbstractEventLoop) -> None:
        """``changes`` gives another number when the store has changed."""
        self._changes = changes
        self._loop = loop
        self._changed = threading.Condition()  # never held across a look
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._thread: threading.Thread | None = None
        self._latest: threading.Thread | None = None
        """The thread, also when it is about to end: ``_thread`` is None then."""
        self._is_closed = False

    async def wait(self, seen: int, timeout_s: float | None) -> None:
        """Return when the store's number is no longer ``seen``, after ``timeout_s``, or spuriously."""
        assert asyncio.get_running_loop() is self._loop, "tasks of one event loop wait here"
        waiter = self._loop.create_future()
        with self._changed:
            if self._is_closed:
                return
            self._waiters[waiter] = seen
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headgate-bell", daemon=True)
                self._latest = self._thread
                self._thread.start()
            self._changed.notify_all()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
        finally:
            with self._changed:
                self._waiters.pop(waiter, None)

    def close(self) -> None:
        """Wake all tasks and stop polling."""
        with self._changed:
            self._is_closed = True
            self._ring(self._waiters)
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread to end. Never call it in the event loop."""
        with self._changed:
            thread = self._latest
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._has_waiters():
            try:
                number: int | None = self._changes()
            except HeadgateError:
                number = None  # the waiting task reads the store itself and gets this error
            with self._changed:
                self._ring(waiter for waiter, seen in self._waiters.items() if seen != number)
                self._changed.wait_for(lambda: self._is_closed, LOOK_PAUSE_S)

    def _has_waiters(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiters or self._is_closed, IDLE_S)
            if self._waiters and not self._is_closed:
                return True
            # under the lock: a task that comes now begins another thread
            self._thread = None
            return False

    def _ring(self, waiters: Iterable[asyncio.Future[None]]) -> None:
        """Wake these tasks. Under the lock."""
        rung = list(waiters)
        for waiter in rung:
            del self._waiters[waiter]
        if rung:
            with suppress(RuntimeError):  # the loop is closed: no task waits
                self._loop.call_soon_threadsafe(_wake, rung)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
