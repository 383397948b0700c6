"""Simulated processes, their threads, and what threads wait for: run one at a time, in the order that the seed decides.

A task is a greenlet: a thread of a simulated process. It runs until it *parks*; what wakes it, or its timeout, puts it
back into the world's queue. Between two parks nothing else runs, and a process may die, or be stopped, only there.
Locks, events and queues park now and then although nothing holds them up (``Tasks.pass_turn``), so that other
interleavings are seen, too.
"""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Callable, Coroutine, MutableSequence
from typing import Any, Generic, TypeVar

import greenlet

from headgate.environment import ThreadEnded
from headgate.sim.machine.world import Violation, World

TURN_RATE = 0.1
"""How often a primitive that would not block lets others go first."""


class ProcessDied(ThreadEnded):
    """Raised in tasks of a process that is dead when the run is taken down; nothing may catch it."""


class SimProcess:
    """One simulated process: what dies, or stops, together.

    ``on_exit`` is called once, with the exit code (negative: killed by that signal).
    """

    def __init__(self, tasks: Tasks, name: str, on_exit: Callable[[int], None] = lambda code: None) -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.pid = tasks.next_pid()
        self.closers: list[Callable[[], None]] = []
        """What the operating system does when the process ends, such as closing its sockets."""
        self._tasks = tasks
        self._on_exit = on_exit
        self._held: list[Callable[[], None]] = []

    def end(self, code: int) -> None:
        """End the process at once. Called by one of its own tasks, this does not return."""
        if self.is_alive:
            self.is_alive = False
            self._tasks.world.tell(self.name, f"ended with code {code}")
            for close in self.closers:
                close()
            self._on_exit(code)
        self._tasks.leave_if_dead()

    def kill(self) -> None:
        """End it as SIGKILL does."""
        self.end(-9)

    def pause(self) -> None:
        """Stop it as SIGSTOP does: its tasks make no step any more; its sockets stay open."""
        if self.is_alive:
            self.is_paused = True
            self._tasks.world.tell(self.name, "paused")

    def resume(self) -> None:
        """Let it go on as SIGCONT does."""
        if self.is_paused and self.is_alive:
            self.is_paused = False
            self._tasks.world.tell(self.name, "resumed")
            held, self._held = self._held, []
            for step in held:
                self._tasks.world.at(0, step)

    def hold(self, step: Callable[[], None]) -> None:
        """Keep a step for the time after the pause."""
        self._held.append(step)


class Task:
    """One thread of a process."""

    def __init__(self, process: SimProcess, name: str, target: Callable[[], None], hub: greenlet.greenlet) -> None:
        self.process = process
        self.name = name
        self.is_done = False
        self.waiting: list[Task] = []
        """Tasks that wait for the end of this one."""
        self.greenlet = greenlet.greenlet(target, hub)  # which goes on when the task ends
        self.parked = 0
        """Number of the park it is in, 0 while it runs: what wakes an earlier one comes too late."""
        self.was_woken = False


class Tasks:
    """All tasks of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._hub = greenlet.getcurrent()
        self._current: Task | None = None
        self._all: list[Task] = []
        self._parks = 0
        self._pids = 100
        self._is_over = False

    def next_pid(self) -> int:
        """Return a process id."""
        self._pids += 1
        return self._pids

    @property
    def current(self) -> Task:
        """The task that makes its step now."""
        self._check()  # what ends with the run may still want to wait
        assert self._current is not None, "only tasks can do this"
        return self._current

    def spawn(self, process: SimProcess, target: Callable[[], None], name: str) -> Task:
        """Start a task; its first step comes later."""
        self._check()
        task = Task(process, name, lambda: self._main(task, target), self._hub)
        self._all.append(task)
        task.parked = self._next_park()
        self.world.at(0, self._resume, task, task.parked, True)
        return task

    def park(self, timeout_ms: float | None = None) -> bool:
        """Let others go on until another task wakes this task (True) or ``timeout_ms`` have passed (False)."""
        self._check()
        task = self.current
        task.parked = self._next_park()
        if timeout_ms is not None:
            self.world.at(max(math.ceil(timeout_ms), 0), self._resume, task, task.parked, False)
        self._hub.switch()
        self._check()
        return task.was_woken

    def of(self, process: SimProcess) -> list[str]:
        """Return the names of the tasks of ``process`` that have not ended, but for the one that asks."""
        return [t.name for t in self._all if t.process is process and not t.is_done and t is not self._current]

    def wake(self, task: Task) -> None:
        """Let a parked task go on; too late is fine."""
        if task.parked:
            self.world.at(0, self._resume, task, task.parked, True)

    def pass_turn(self) -> None:
        """Now and then, let others go first."""
        self._check()
        if self._current is not None and self.world.random.random() < TURN_RATE:
            self.park(0)

    def leave_if_dead(self) -> None:
        """Give up the processor for good if the current task's process is dead."""
        if self._current is not None and not self._current.process.is_alive:
            self._hub.switch()
            raise ProcessDied

    def take_down(self) -> None:
        """End every task that is left: the run is over. What they do on their way out changes nothing any more."""
        self._is_over = True
        for task in self._all:
            if task.greenlet and not task.greenlet.dead:
                task.greenlet.throw(ProcessDied)

    def _next_park(self) -> int:
        self._parks += 1
        return self._parks

    def _check(self) -> None:
        if self._is_over:
            raise ProcessDied

    def _resume(self, task: Task, park: int, was_woken: bool) -> None:
        if task.parked != park or not task.process.is_alive:
            return
        if task.process.is_paused:
            task.process.hold(lambda: self._resume(task, park, was_woken))
            return
        task.parked = 0
        task.was_woken = was_woken
        before, self._current = self._current, task
        assert before is None
        try:
            task.greenlet.switch()
        finally:
            self._current = None

    def _main(self, task: Task, target: Callable[[], None]) -> None:
        try:
            target()
        except ProcessDied:
            return
        except (Violation, AssertionError):
            raise
        except Exception as error:
            raise Violation("thread", f"{task.process.name}/{task.name}: {type(error).__name__}: {error}") from error
        finally:
            task.is_done = True
            if not self._is_over:
                for other in task.waiting:
                    self.wake(other)


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


class SimEventLoop:
    """Runs each coroutine as a task of its own, which waits for a while that the seed decides.

    Coroutines wait for nothing but ``asyncio.sleep(0)``.
    """

    LONGEST_MS = 50

    def __init__(self, tasks: Tasks, process: SimProcess, name: str) -> None:
        self._tasks = tasks
        self._process = process
        self._name = name

    def submit(
        self, call: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        """See ``EventLoop``; what is cancelled ends by itself."""

        def run() -> None:
            steps = call()
            try:
                while True:
                    self._tasks.park(self._tasks.world.random.randrange(self.LONGEST_MS))
                    steps.send(None)
            except StopIteration as end:
                done(end.value, None)
            except Exception as error:
                done(None, error)

        SimThread(self._tasks, self._process, run, self._name).start()
        return lambda: None

    def close(self) -> None:
        """See ``EventLoop``."""


def _leave(waiting: MutableSequence[Task], task: Task) -> None:
    """Take ``task`` off a list on which it no longer waits: no process may wake it for the old reason."""
    if task in waiting:
        waiting.remove(task)
