"""Injected OS services: clocks, threads, pauses, secrets and connections.

There are two implementations: the operating system's, below, and the simulator's (decision 0011). Intervals and
time-outs use ``monotonic_ms``. ``wall_ms`` is a date for people or the event time of a new record: never compare or
subtract it, because a time server or an administrator may set it back. A lock that is held across anything that may
block comes from here, so that the simulator, which runs its threads as tasks of one real thread, can replace it.
"""

from __future__ import annotations

import functools
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar


class Clock(Protocol):
    """What tells the time to a part of the runtime. Tests bring their own."""

    def monotonic_ms(self) -> int:
        """Return the milliseconds since some moment that means nothing; never less than before."""

    def monotonic_ns(self) -> int:
        """Return the same in nanoseconds, to measure with."""

    def wall_ms(self) -> int:
        """Return the date: milliseconds since 1970."""


class SystemClock:
    """The clocks of this machine. See ``Clock``."""

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()


SIGNAL_S = 0.2
"""How long an interrupt may go unnoticed."""

_T = TypeVar("_T")


class ThreadEnded(BaseException):
    """Ends the thread in which it is raised, with its worker or process. Never handle it.

    Everything else that a call raises is passed to its waiters, also `SystemExit` and a panic of a native library,
    which are no ``Exception``: otherwise they would wait for ever.
    """


class Lock(Protocol):
    """Mutual exclusion, as a context manager."""

    def __enter__(self) -> Any:
        """Wait until it is free, and take it."""

    def __exit__(self, *error: Any) -> Any:
        """Let the next one in."""


class Event(Protocol):
    """A flag that threads wait for."""

    def is_set(self) -> bool:
        """Whether the flag is up."""

    def set(self) -> None:
        """Raise the flag."""

    def clear(self) -> None:
        """Lower the flag."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds; return whether the flag is up."""


class Condition(Lock, Protocol):
    """A condition variable."""

    def notify_all(self) -> None:
        """Wake all waiting threads."""

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        """Wait until ``predicate`` holds, at most ``timeout`` seconds; return its last value."""


class Queue(Protocol[_T]):
    """An unbounded queue between threads."""

    def qsize(self) -> int:
        """Return how many items wait."""

    def put(self, item: _T) -> None:
        """Append an item."""

    def get(self, *, timeout: float | None = None) -> _T:
        """Take the next item.

        Raises:
            queue.Empty: none came within ``timeout`` seconds.
        """


class Thread(Protocol):
    """A thread that does not keep its process alive."""

    @property
    def is_current(self) -> bool:
        """Whether it is the one that asks."""

    def start(self) -> None:
        """Begin. Once.

        Raises:
            RuntimeError: the system has no more threads.
        """

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""


class Pool(Protocol):
    """Runs calls beside the caller, in the order in which they were submitted."""

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> object:
        """Have ``call`` run. What it raises is lost.

        Raises:
            RuntimeError: the system has no more threads, or no more calls are taken.
        """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those that were submitted, or forget those that have not begun."""


class EventLoop(Protocol):
    """Runs coroutines side by side, in a thread of its own."""

    def submit(
        self, call: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        """Have the coroutine that ``call`` makes run; return what cancels it. From one thread.

        ``done`` is called in the thread of the loop, once, with what the coroutine returned, or with what it raised.
        """

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""


class Threads(Protocol):
    """The threads of one process."""

    @property
    def process_id(self) -> int:
        """The id of this process, for people, for signals, and to notice a fork."""

    def lock(self) -> Lock:
        """Return a lock; needed where it is held across anything that may block."""

    def reentrant_lock(self) -> Lock:
        """Return a lock that its holder may take again."""

    def event(self) -> Event:
        """Return a flag that is down."""

    def condition(self) -> Condition:
        """Return a condition."""

    def queue(self) -> Queue[Any]:
        """Return an empty queue."""

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> Thread:
        """Return a thread that has not begun."""

    def pool(self, size: int, name: str, *, is_daemon: bool = False) -> Pool:
        """Return a pool of at most ``size`` threads; ``is_daemon``: one that hangs does not keep the process alive."""

    def event_loop(self, name: str) -> EventLoop:
        """Return an event loop whose thread has begun."""


_cancelled: ContextVar[Event | None] = ContextVar("headgate.off", default=None)
"""Of the thread that asks; a thread begins with none."""


def is_cancelled() -> bool:
    """Whether this thread's work is cancelled: it does not wait for an unavailable server."""
    off = _cancelled.get()
    return off is not None and off.is_set()


def cancellable(off: Event | None, call: Callable[..., _T]) -> Callable[..., _T]:
    """Return ``call``, cancelled when ``off`` is set; None: never."""

    @functools.wraps(call)
    def called(*arguments: Any) -> _T:
        before = _cancelled.set(off)
        try:
            return call(*arguments)
        finally:
            _cancelled.reset(before)

    return called


def cancellable_as_here(call: Callable[..., _T]) -> Callable[..., _T]:
    """Return ``call`` for another thread, cancelled together with this thread's work."""
    off = _cancelled.get()
    return call if off is None else cancellable(off, call)


class CancellablePool:
    """A pool that cancels its calls when ``off`` is set (see ``Pool``)."""

    def __init__(self, pool: Pool, off: Event) -> None:
        self._pool, self._off = pool, off

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> object:
        return self._pool.submit(cancellable(self._off, call), *arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


class DaemonThread(threading.Thread):
    """A thread that knows whether it is the one that asks."""

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self


class DaemonPool:
    """Runs calls in at most ``size`` threads, in the order in which they were submitted (see ``Pool``).

    They do not keep their process alive, as those of ``ThreadPoolExecutor`` do: a call may hang in storage that does
    not answer. Shut it down otherwise: a call that runs while Python ends may crash it.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[DaemonThread] = []
        self._is_shut = False
        weakref.finalize(self, self._calls.put, None).atexit = False  # its threads end with it

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> None:
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot submit calls after shutdown")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
                name = f"{self._name}_{len(self._threads)}"
                thread = DaemonThread(target=_run_calls, args=(self._calls, self._idle), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            # only now: without a thread for it the caller does it itself, and another thread must not do it, too
            self._calls.put(functools.partial(call, *arguments))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_shut = True
            while cancel_futures and not self._calls.empty():
                with suppress(queue.Empty):
                    self._calls.get_nowait()
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


def _run_calls(calls: queue.SimpleQueue[Callable[[], object] | None], idle: threading.Semaphore) -> None:
    """Run in a thread of a pool, of which it holds nothing else."""
    while (call := calls.get()) is not None:
        with suppress(BaseException):  # what it raises is lost
            call()
        del call
        idle.release()
    calls.put(None)  # for the other threads


CLOSE_S = 5.0
"""So long the end of an event loop is waited for: a function in it may block its thread."""


class AsyncioLoop:
    """An event loop of asyncio in a daemon thread (see ``EventLoop``)."""

    def __init__(self, name: str) -> None:
        import asyncio  # it takes 50 ms to import, and most programs need none

        self._asyncio = asyncio
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[_Submitted] = deque()
        self._running: set[Any] = set()
        self._thread = DaemonThread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, call: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        submitted = _Submitted(call, done)
        self._waiting.append(submitted)
        if len(self._waiting) == 1:  # else the loop is on its way to them
            self._loop.call_soon_threadsafe(self._begin)
        return functools.partial(self._cancel, submitted)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _cancel(self, submitted: _Submitted) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it what ran
            self._loop.call_soon_threadsafe(submitted.cancel)

    def _begin(self) -> None:
        while self._waiting:
            submitted = self._waiting.popleft()
            task = submitted.task = self._loop.create_task(submitted.run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _run(self) -> None:
        self._asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                self._loop.run_until_complete(self._asyncio.wait(set(self._running), timeout=CLOSE_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


class _Submitted:
    """A coroutine that an event loop was given."""

    def __init__(
        self, call: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._call = call
        self._done = done
        self.task: Any = None

    async def run(self) -> None:
        try:
            found = await self._call()
        except BaseException as error:  # also when it is cancelled: what waits for it must know
            self._done(None, error)
        else:
            self._done(found, None)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class SystemThreads:
    """The threads of this process (see ``Threads``)."""

    @property
    def process_id(self) -> int:
        """Asked each time: a fork has another one."""
        return os.getpid()

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def reentrant_lock(self) -> Lock:
        return threading.RLock()

    def event(self) -> threading.Event:
        return threading.Event()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def queue(self) -> queue.SimpleQueue[Any]:
        return queue.SimpleQueue()

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> DaemonThread:
        return DaemonThread(target=target, args=arguments, name=name, daemon=True)

    def pool(self, size: int, name: str, *, is_daemon: bool = False) -> Pool:
        return DaemonPool(size, name) if is_daemon else ThreadPoolExecutor(size, thread_name_prefix=name)

    def event_loop(self, name: str) -> AsyncioLoop:
        return AsyncioLoop(name)


SYSTEM_THREADS = SystemThreads()


def wait_for(asked: Future[_T], timeout_s: float | None) -> _T | None:
    """Return what comes of ``asked``, or None. A signal that comes just before a wait does not end it: none is long."""
    left_s = timeout_s
    while True:
        some_s = SIGNAL_S if left_s is None else max(0.0, min(SIGNAL_S, left_s))
        if wait([asked], some_s).done:
            return asked.result()
        if left_s is not None:
            left_s -= some_s
            if left_s <= 0:
                return None


class Environment(Clock, Threads, Protocol):
    """The OS services of one process."""

    def sleep(self, seconds: float) -> None:
        """Pause this thread."""

    def token(self, size_bytes: int) -> bytes:
        """Return unpredictable bytes."""

    def connect(self, host: str, port: int, timeout_seconds: float) -> Any:
        """Return a connected TCP socket (``socket.socket``).

        Raises:
            OSError
        """


class SystemEnvironment(SystemClock, SystemThreads):
    """The operating system's services (see ``Environment``)."""

    def sleep(self, seconds: float) -> None:
        """Pause this thread."""
        time.sleep(seconds)

    def token(self, size_bytes: int) -> bytes:
        """From the system's source of secrets."""
        return secrets.token_bytes(size_bytes)

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        return socket.create_connection((host, port), timeout=timeout_seconds)


SYSTEM_ENVIRONMENT = SystemEnvironment()


def close_all(closes: Iterable[Callable[[], object]]) -> None:
    """Make every call, even if others raise; then raise the first error.

    Connectors are users' code: ``SystemExit`` and a panic of a native library are errors like others.
    """
    first: BaseException | None = None
    for close in closes:
        try:
            close()
        except ThreadEnded:
            raise
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
