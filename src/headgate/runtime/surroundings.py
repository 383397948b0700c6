"""What the runtime is given from outside: clocks, threads and what they wait with, sockets, chance, and its own end.

There are two: ``runtime.process`` is the operating system, for Spark's workers, the driver and tests with real
processes; the simulator has a machine room that obeys one seed (``sim.machine``). Storage is opened by URL
(``storage.base.open_storage``), and workers are started by a ``runtime.driver.supervision.Launcher``. Nothing here
decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


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
    """A lock with a bell."""

    def notify_all(self) -> None:
        """Wake everybody who waits."""

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
        """Have ``call`` run. What it raises is lost."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those that were submitted, or forget those that have not begun."""


class Surroundings(Protocol):
    """Everything that the runtime does not do by itself."""

    @property
    def process_id(self) -> int:
        """The id of this process, for people and signals."""

    @property
    def host(self) -> str:
        """What this machine is called, for people and to tell machines apart."""

    @property
    def random(self) -> random.Random:
        """Chance: for jitter, never for secrets."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since some moment that means nothing; never less than before."""

    def monotonic_ms(self) -> int:
        """Return the same in milliseconds."""

    def wall_ms(self) -> int:
        """Return the date, for people: milliseconds since 1970. It may jump."""

    def sleep(self, seconds: float) -> None:
        """Let this thread pause."""

    def token(self, size_bytes: int) -> bytes:
        """Return bytes that nobody can guess."""

    def lock(self) -> Lock:
        """Return a lock; needed where it is held across anything that may block."""

    def event(self) -> Event:
        """Return a flag that is down."""

    def condition(self) -> Condition:
        """Return a condition."""

    def queue(self) -> Queue[Any]:
        """Return an empty queue."""

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> Thread:
        """Return a thread that has not begun."""

    def pool(self, size: int, name: str) -> Pool:
        """Return a pool of at most ``size`` threads."""

    def listen(self, host: str, port: int) -> Any:
        """Return a listening TCP socket (``socket.socket``); ``port`` 0: any.

        Raises:
            OSError
        """

    def connect(self, host: str, port: int, timeout_seconds: float) -> Any:
        """Return a connected TCP socket (``socket.socket``).

        Raises:
            OSError
        """

    def exit(self, code: int) -> None:
        """End this process at once: nothing is flushed, nothing is closed. Does not return."""
