"""Tasks: threads of simulated processes, run one at a time in the order that the seed decides.

A task is a greenlet. It runs until it *parks*; what wakes it, or its timeout, puts it back into the world's queue.
Between two parks nothing else runs, and a process may die, or be stopped, only there: as long as a task does not
park, it is as if its process could not be interrupted. Primitives therefore park now and then although nothing holds
them up (``Tasks.pass_turn``), so that other interleavings are seen, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import greenlet

from headgate.environment import ThreadEnded
from headgate.sim.world import Violation, World

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
