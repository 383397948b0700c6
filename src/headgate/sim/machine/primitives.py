"""What threads wait with, as tasks do it. Counterpart: ``threads``."""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Callable, MutableSequence
from typing import Any, Generic, TypeVar

from headgate.sim.machine.tasks import SimProcess, Task, Tasks

_T = TypeVar("_T")


class SimLock:
    """A mutual exclusion that no process can take twice."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._owner: Task | None = None
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> SimLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Wait until it is free, and take it."""
        self._tasks.pass_turn()
        current = self._tasks.current
        assert self._owner is not current, f"{current.name} takes a lock twice"
        while self._owner is not None:
            self._waiting.append(current)
            self._tasks.park()
            _leave(self._waiting, current)
        self._owner = current

    def release(self) -> None:
        """Let the next one in."""
        self._owner = None
        if self._waiting:
            self._tasks.wake(self._waiting.popleft())


class SimReentrantLock(SimLock):
    """A mutual exclusion that its holder may take again."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks)
        self._depth = 0

    def acquire(self) -> None:
        """Wait until it is free or the caller's, and take it."""
        if self._owner is not self._tasks.current:
            super().acquire()
        self._depth += 1

    def release(self) -> None:
        """Let the next one in, when it was released as often as it was taken."""
        self._depth -= 1
        if self._depth == 0:
            super().release()


class SimEvent:
    """A flag that tasks wait for."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """Whether the flag is up."""
        return self._is_set

    def set(self) -> None:
        """Raise the flag."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._tasks.wake(task)

    def clear(self) -> None:
        """Lower the flag."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flag, at most ``timeout`` seconds; return whether it is up."""
        if self._is_set:
            self._tasks.pass_turn()
            return self._is_set
        self._waiting.append(self._tasks.current)
        self._tasks.park(None if timeout is None else timeout * 1000)
        _leave(self._waiting, self._tasks.current)
        return self._is_set


class SimCondition(SimLock):
    """A lock with a bell."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks)
        self._listening: list[Task] = []

    def notify_all(self) -> None:
        """Wake everybody who waits."""
        listening, self._listening = self._listening, []
        for task in listening:
            self._tasks.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until another task notifies; return whether one did in time."""
        self._listening.append(self._tasks.current)
        self.release()
        was_woken = self._tasks.park(None if timeout is None else timeout * 1000)
        _leave(self._listening, self._tasks.current)
        self.acquire()
        return was_woken

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        """Wait until ``predicate`` holds, at most ``timeout`` seconds; return its last value."""
        world = self._tasks.world
        deadline = None if timeout is None else world.now_ms + timeout * 1000
        while not (result := predicate()):
            remaining = None if deadline is None else deadline - world.now_ms
            if remaining is not None and remaining <= 0:
                break
            self.wait(None if remaining is None else remaining / 1000)
        return result


class SimQueue(Generic[_T]):
    """An unbounded queue, as ``queue.SimpleQueue``."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._items: deque[_T] = deque()
        self._waiting: deque[Task] = deque()

    def qsize(self) -> int:
        """Return how many items wait."""
        return len(self._items)

    def put(self, item: _T) -> None:
        """Append an item."""
        self._items.append(item)
        if self._waiting:
            self._tasks.wake(self._waiting.popleft())

    def get(self, timeout: float | None = None) -> _T:
        """Take the next item.

        Raises:
            queue.Empty: none came within ``timeout`` seconds.
        """
        world = self._tasks.world
        deadline = None if timeout is None else world.now_ms + math.ceil(timeout * 1000)
        self._tasks.pass_turn()
        while not self._items:
            if deadline is not None and world.now_ms >= deadline:
                raise queue.Empty
            self._waiting.append(self._tasks.current)
            self._tasks.park(None if deadline is None else deadline - world.now_ms)
            _leave(self._waiting, self._tasks.current)
        return self._items.popleft()


class SimThread:
    """A thread; it begins with ``start``."""

    def __init__(self, tasks: Tasks, process: SimProcess, target: Callable[[], None], name: str) -> None:
        self._tasks = tasks
        self._process = process
        self._target = target
        self._name = name
        self._task: Task | None = None

    @property
    def is_current(self) -> bool:
        """Whether it is the one that asks."""
        return self._task is not None and self._tasks.current is self._task

    def start(self) -> None:
        """Begin."""
        assert self._task is None
        self._task = self._tasks.spawn(self._process, self._target, self._name)

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""
        assert self._task is not None
        if self._task.is_done:
            return
        self._task.waiting.append(self._tasks.current)
        if timeout is not None:
            self._tasks.park(timeout * 1000)
            _leave(self._task.waiting, self._tasks.current)
            return
        while not self._task.is_done:
            self._tasks.park()


class SimPool:
    """Runs calls in at most ``size`` tasks, in the order in which they were submitted."""

    def __init__(self, tasks: Tasks, process: SimProcess, size: int, name: str) -> None:
        self._tasks = tasks
        self._process = process
        self._size = size
        self._name = name
        self._calls: deque[Callable[[], object]] = deque()
        self._running: list[SimThread] = []
        self._is_shut = False

    def submit(self, call: Callable[..., object], *args: Any) -> None:
        """Have ``call`` run.

        Raises:
            RuntimeError: after ``shutdown``.
        """
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._calls.append(lambda: call(*args))
        self._running = [thread for thread in self._running if thread.is_alive()]
        if len(self._running) < self._size:
            thread = SimThread(self._tasks, self._process, self._run, self._name)
            self._running.append(thread)
            thread.start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those that were submitted, or forget those that have not begun."""
        self._is_shut = True
        if cancel_futures:
            self._calls.clear()
        if wait:
            for thread in self._running:
                thread.join()

    def _run(self) -> None:
        while self._calls:
            self._calls.popleft()()


def _leave(waiting: MutableSequence[Task], task: Task) -> None:
    """Take ``task`` off a list on which it no longer waits: no process may wake it for the old reason."""
    if task in waiting:
        waiting.remove(task)
