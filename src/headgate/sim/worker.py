"""A simulated worker: one Spark task that hosts subtask i of every vertex and runs them from one mailbox.

Lives through: start, register, deployment, restore, ready, work, stop. It leaves at once when its control connection
closes, but it may learn of that late: until then it is a zombie whose messages, uploads and writes go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.errors import CorruptionError, FencedError, StorageError
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import Generation
from headgate.model.manifest import Manifest
from headgate.model.plan import Vertex
from headgate.protocol.checkpoints.recovery import Damage
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.supervision.supervisor import AttemptId
from headgate.sim import network
from headgate.sim.faults import Fault
from headgate.sim.marks import Mark
from headgate.sim.network import Link, ToDriver, ToWorker
from headgate.sim.restoring import Former
from headgate.sim.subtaskhost import SubtaskHost
from headgate.sim.world import Process

if TYPE_CHECKING:
    from headgate.sim.driver import Driver
    from headgate.sim.env import Env


class Worker(Process):
    """One worker of one attempt of a Spark job."""

    def __init__(self, env: Env, driver: Driver, attempt: AttemptId, index: int) -> None:
        super().__init__(env.world, f"{driver.name}.{attempt.submission}.{attempt.attempt}/w{index}")
        self.env = env
        self.index = index
        self.attempt = attempt
        self.plan = driver.plan
        self.generation = Generation(0)
        self._driver = driver
        self._link: Link | None = None
        self._hosts: list[SubtaskHost] = []
        self._wake_ms: int | None = None
        self._wake_token = 0
        self._is_stuck = False

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and register, unless the process hangs before it can."""
        if self.env.faults.strikes(Fault.NO_RETRY_NOTICE):
            self.tell("hangs before registering")
            return
        self._link = Link(self.env, self._driver, self, self.attempt)
        self._driver.on_connected(self._link)
        self.send(network.Registered())

    def send(self, message: ToDriver) -> None:
        """Send a message to the driver."""
        if self._link is not None:
            self._link.to_driver(message)

    def on_message(self, message: ToWorker) -> None:
        """Handle a message of the driver; a zombie may meet the fence when it writes what the message set free."""
        try:
            self._handle(message)
        except FencedError as error:
            self.leave(str(error))

    def _handle(self, message: ToWorker) -> None:
        match message:
            case network.Deployment():
                self.generation = message.generation
                self.post(self.env.faults.delay_ms(10), self._restore, message)
            case network.Stop():
                self.leave("told to stop", is_success=message.is_done)
            case network.Refused():
                self.env.marks.reach(Mark.WORKER_REFUSED)
                self.leave("refused")
            case network.Trigger() if message.generation == self.generation:
                for host in self._hosts:
                    if host.is_source:
                        host.handle(machine.TriggerReceived(message.checkpoint))
                    if host.head is not None:
                        host.head.expect(message.checkpoint)
                        self.wake(self.world.now_ms)
            case network.Complete() if message.generation == self.generation:
                for host in self._hosts:
                    host.handle(machine.CompleteReceived(message.checkpoint))
            case network.Abort() if message.generation == self.generation:
                for host in self._hosts:
                    host.handle(machine.AbortReceived(message.checkpoint))
                    if host.head is not None:
                        host.head.is_past(message.checkpoint)
            case network.ProbeOrdered() if message.generation == self.generation:
                for host in self._hosts:
                    if host.vertex.head.name == message.nest:
                        host.handle(machine.ProbeOrdered(message.probe))
            case network.LoopEnded() if message.generation == self.generation:
                for host in self._hosts:
                    if host.head is not None and host.vertex.nest == message.nest:
                        host.handle(machine.LoopEnded())
            case network.Drain() if message.generation == self.generation:
                for host in self._hosts:
                    host.drain()
                self.wake(self.world.now_ms)
            case _:
                self.tell("ignores a message of another generation")

    def _restore(self, deployment: network.Deployment) -> None:
        self.env.faults.crash_point(self, Fault.WORKER_CRASH)
        hosts = []
        for vertex in self.plan.vertices:
            try:
                formers = self._formers(deployment.restored, vertex)
            except (StorageError, CorruptionError) as error:
                self.fail(Failure(FailureKind.LOST, str(error)))
                return
            is_draining = deployment.restored is not None and deployment.restored.is_draining
            hosts.append(SubtaskHost(self, vertex, deployment.fabric, formers, is_draining=is_draining))
        self._hosts = hosts
        self.send(network.Ready(self.generation))
        for host in hosts:
            host.start()
        self.wake(self.world.now_ms)

    def _formers(self, restored: Manifest | None, vertex: Vertex) -> list[Former]:
        """Read what the subtask of ``vertex`` continues from (R15), as ``runtime.checkpoints.restoring`` does.

        Raises:
            StorageError: a file cannot be read now.
            CorruptionError: one is damaged.
        """
        found: list[Former] = []
        entries = () if restored is None else restored.entries
        for entry in entries:
            assert restored is not None
            is_moved = restored.parallelism != self.plan.parallelism
            is_needed = is_moved or vertex.is_source or entry.subtask.index == self.index
            if entry.subtask.vertex != vertex.id or not is_needed:
                continue
            data = self.env.disk.read(entry.handle)
            if isinstance(data, Damage):
                raise CorruptionError(data.path, 0, "a whole snapshot", data.problem)
            found.append(Former(entry.subtask.index, restored.parallelism, data))
        return found

    def fail(self, failure: Failure) -> None:
        """Report that this worker cannot go on, and leave."""
        if not self._hosts:
            self.env.marks.reach(Mark.FAILED_EARLY)
        self.send(network.Failed(failure))
        self.leave(failure.reason)

    def leave(self, why: str, *, is_success: bool = False) -> None:
        """End this process in an orderly way."""
        for host in self._hosts:
            host.close()
        self.is_alive = False
        self.tell(f"left: {why}")
        self._gone(why, is_success)

    def on_death(self) -> None:
        """The kernel closes the connection; Spark notices the dead process."""
        if any(host.head is not None and host.head.is_replaying for host in self._hosts):
            self.env.marks.reach(Mark.REPLAY_CRASHED)
        self._gone("process died", False)

    def _gone(self, why: str, is_success: bool) -> None:
        if self._link is not None:
            self._link.cut(why)
        self.world.at(self.env.rng.randint(0, 10), self._driver.spark.on_task_ended, self, is_success)

    def on_link_closed(self) -> None:
        """The control connection is gone: whoever replaces this worker must not meet it."""
        self.leave("control connection closed")

    # -- the mailbox --------------------------------------------------------------------------------------------

    def wake(self, at_ms: int) -> None:
        """Take a turn at ``at_ms`` or earlier."""
        if self._wake_ms is None or at_ms < self._wake_ms:
            self._wake_ms = max(at_ms, self.world.now_ms)
            self._wake_token += 1
            self.post(self._wake_ms - self.world.now_ms, self._turn, self._wake_token)

    def _turn(self, token: int) -> None:
        if token != self._wake_token:
            return
        self._wake_ms = None
        faults = self.env.faults
        if faults.strikes(Fault.WORKER_PAUSE):
            self._begin_pause()
            self.wake(self.world.now_ms)
            return
        faults.crash_point(self, Fault.WORKER_CRASH)
        for _ in range(self.env.rng.randint(1, self.env.options.actions_per_turn_max)):
            actions, next_ms = self._actions()
            if not actions:
                if next_ms is not None:
                    self.wake(next_ms)
                return
            if not self._act(*self.env.rng.choice(actions)):
                return
        self.wake(self.world.now_ms + self.env.rng.randint(0, 2))

    def _act(self, host: SubtaskHost, index: int) -> bool:
        """Let ``host`` do one thing; return whether this worker still lives."""
        if self.env.faults.strikes(Fault.USER_FAILURE):
            detail = f"row {self.env.rng.randint(0, 1)}"
            self.fail(Failure(FailureKind.USER_CODE, "the user's function raised", detail))
            return False
        if self.env.faults.strikes(Fault.PEER_LOSS):
            self.fail(Failure(FailureKind.LOST, "the connection to another worker broke"))
            return False
        try:
            if host.head is not None and host.head.is_replaying:
                host.head.replay_next()
            elif index < 0:
                host.poll()
            else:
                host.read(index)
        except FencedError as error:
            self.leave(str(error))
            return False
        return True

    def _actions(self) -> tuple[list[tuple[SubtaskHost, int]], int | None]:
        """Return what can be done now, and when to look again if there is nothing."""
        now = self.world.now_ms
        actions: list[tuple[SubtaskHost, int]] = []
        times: list[int] = []
        for host in self._hosts:
            if host.is_stalled:
                times.append(now + 5)
                continue
            if host.has_source_input:
                if host.next_poll_ms <= now:
                    actions.append((host, -1))
                else:
                    times.append(host.next_poll_ms)
            if host.head is not None and host.head.is_replaying:
                actions.append((host, -1))
                continue
            for index, channel in enumerate(host.inputs):
                if channel.queue and index not in host.blocked and not host.is_held_back(index):
                    if channel.queue[0][0] <= now:
                        actions.append((host, index))
                    else:
                        times.append(channel.queue[0][0])
        return actions, min(times, default=None)

    def _begin_pause(self) -> None:
        self.pause()
        self.world.at(self.env.rng.choice((20, 100, 400, 1_500, 4_000)), self.resume)
        if self._link is not None:
            link = self._link
            link.driver.post(self.env.options.heartbeat_timeout_ms, link.driver.check_silence, link)
