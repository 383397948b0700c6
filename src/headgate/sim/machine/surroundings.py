"""The surroundings of one simulated process: its threads, and TCP between processes.

Connections are in order, with delays, bounded buffers, and ends of all kinds. A ``SimSocket`` has the methods of
``socket.socket`` that ``runtime.wire`` uses, and HTTP's client and server do. What dies with its process is closed by
the simulated system; what is cut off falls silent, until the time is over for which the product bears silence.
Counterparts: ``runtime.surroundings``, ``environment``.
"""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable, Sequence
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any

from headgate.sim.machine.tasks import (
    SimCondition,
    SimEvent,
    SimEventLoop,
    SimLock,
    SimPool,
    SimProcess,
    SimQueue,
    SimReentrantLock,
    SimThread,
    Task,
    Tasks,
)

BUFFER_BYTES = 1 << 18
"""Bytes that one direction holds before a sender must wait."""

HOST = "127.0.0.1"


class Network:
    """All ports of the machine room."""

    def __init__(self, tasks: Tasks, delay_ms_max: int) -> None:
        self.tasks = tasks
        self.delay_ms_max = delay_ms_max
        self.listening: dict[int, SimServer] = {}
        self.open: list[SimSocket] = []
        """Connected ends, for faults."""
        self._ports = 40_000

    def delay_ms(self) -> int:
        """Return the delay of what is sent now."""
        return self.tasks.world.random.randint(0, self.delay_ms_max)

    def of(self, process: SimProcess) -> list[str]:
        """Return what ``process`` has open."""
        ports = [f"port {port}" for port, server in self.listening.items() if server.process is process]
        return ports + [f"a connection to port {end.port}" for end in self.open if end.process is process]

    def listen(self, process: SimProcess, port: int = 0) -> SimServer:
        """Open a port; 0: one that no process has had."""
        self._ports += not port
        server = SimServer(self, process, port or self._ports)
        self.listening[port or self._ports] = server
        process.closers.append(server.close)
        return server

    def connect(self, process: SimProcess, port: int, timeout: float | None) -> SimSocket:
        """Connect to a port.

        Raises:
            OSError: no process listens there, or no answer came in time.
        """
        tasks = self.tasks
        tasks.park(self.delay_ms())
        server = self.listening.get(port)
        if server is None:
            raise ConnectionRefusedError(111, "Connection refused")
        near, far = SimSocket(self, process, port), SimSocket(self, server.process, port)
        near.peer, far.peer = far, near
        self.open += [near, far]
        for end in (near, far):
            end.process.closers.append(end.close)
        server.arrive(far)
        return near


class SimServer:
    """A listening socket."""

    def __init__(self, network: Network, process: SimProcess, port: int) -> None:
        self.process = process
        self._network = network
        self._port = port
        self._arrived: deque[SimSocket] = deque()
        self._waiting: Task | None = None
        self._is_closed = False

    def getsockname(self) -> tuple[str, int]:
        """Host and port."""
        return HOST, self._port

    def arrive(self, socket: SimSocket) -> None:
        """A connection is there."""
        self._arrived.append(socket)
        self._wake()

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        """Wait for the next connection.

        Raises:
            OSError: the socket was closed.
        """
        tasks = self._network.tasks
        while not self._arrived:
            if self._is_closed:
                raise OSError(22, "Invalid argument")
            self._waiting = tasks.current
            tasks.park()
            self._waiting = None
        return self._arrived.popleft(), (HOST, self._port)

    def shutdown(self, how: int) -> None:
        """End the waiting."""
        self.close()

    def settimeout(self, timeout: float | None) -> None:
        """Accept has no deadline here."""

    def close(self) -> None:
        """Close the port; connections that no process has accepted are reset, as the system does."""
        self._is_closed = True
        if self._network.listening.get(self._port) is self:
            del self._network.listening[self._port]
        while self._arrived:
            socket = self._arrived.popleft()
            socket.reset()
            self._network.open.remove(socket)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._network.tasks.wake(self._waiting)


class SimSocket:
    """One end of a connection."""

    def __init__(self, network: Network, process: SimProcess, port: int) -> None:
        self.process = process
        self.port = port
        self.peer: SimSocket | None = None
        self.is_cut = False
        """Whether nothing arrives here any more although no process closed: a cable was pulled."""
        self._network = network
        self._arrived: deque[bytes] = deque()
        self._arrived_bytes = 0
        self._travelling: deque[bytes | None] = deque()
        self._travelling_bytes = 0
        self._last_arrival_ms = 0
        self._ended = ""
        """Why no more will arrive: "closed" by the other side in order, "reset", or "timed out"."""
        self._is_closed = False
        self._timeout: float | None = None
        self._silence_ms_max: int | None = None
        self._reading: Task | None = None
        self._writing: list[Task] = []
        self._files_count = 0
        self._is_unwanted = False

    # -- what the product calls -----------------------------------------------------------------------------------

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """The only option that changes anything here is how long the other end may be silent."""
        if (level, option) == (IPPROTO_TCP, TCP_USER_TIMEOUT):
            self._silence_ms_max = value

    def settimeout(self, timeout: float | None) -> None:
        """Let sending and receiving fail after ``timeout`` seconds; None: never."""
        self._timeout = timeout

    def recv_into(self, buffer: Any) -> int:
        """Receive at least one byte; 0 when the other side has closed.

        Raises:
            OSError: reset, or too late.
        """
        view = memoryview(buffer).cast("B")
        self._await_data()
        if not self._arrived:
            return 0
        filled = 0
        while self._arrived and filled < len(view):
            chunk = self._arrived.popleft()
            part = chunk[: len(view) - filled]
            view[filled : filled + len(part)] = part
            filled += len(part)
            if len(part) < len(chunk):
                self._arrived.appendleft(chunk[len(part) :])
        self._arrived_bytes -= filled
        self._let_write()
        return filled

    def recv(self, size_bytes: int) -> bytes:
        """Receive at most ``size_bytes``."""
        buffer = bytearray(size_bytes)
        return bytes(buffer[: self.recv_into(buffer)])

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send all parts; waits while the other side does not read.

        Raises:
            OSError: the connection is over, or too late.
        """
        data = b"".join(parts)
        tasks, peer = self._network.tasks, self._other
        tasks.pass_turn()
        deadline = None if self._timeout is None else tasks.world.now_ms + self._timeout * 1000
        while not self._is_over and peer.load_bytes > BUFFER_BYTES:
            if deadline is not None and tasks.world.now_ms >= deadline:
                raise TimeoutError("timed out")
            peer._writing.append(tasks.current)
            tasks.park(None if deadline is None else deadline - tasks.world.now_ms)
            if tasks.current in peer._writing:
                peer._writing.remove(tasks.current)
        if self._is_over:
            raise BrokenPipeError(32, "Broken pipe")
        self._travel(data)
        return len(data)

    def sendall(self, data: bytes) -> None:
        """Send all of ``data``."""
        self.sendmsg([memoryview(data)])

    def shutdown(self, how: int) -> None:
        """End the connection for both sides; the process that waits here goes on."""
        self._finish()

    def makefile(self, mode: str, buffering: int = -1) -> io.BufferedReader | io.BufferedWriter:
        """Return what reads from it, or writes to it; as long as that is open, so is the connection."""
        self._files_count += 1
        return io.BufferedReader(_File(self)) if "r" in mode else io.BufferedWriter(_File(self))

    def file_closed(self) -> None:
        """One of those is closed."""
        self._files_count -= 1
        if self._is_unwanted:
            self.close()

    def close(self) -> None:
        """End the connection and forget it, or when its files are closed."""
        self._is_unwanted = True
        if not self._files_count or not self.process.is_alive:
            self._close()

    def _close(self) -> None:
        self._finish()
        if self in self._network.open:
            self._network.open.remove(self)

    # -- faults ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Break the connection: both sides see an error, soon."""
        for end in (self, self._other):
            self._network.tasks.world.at(self._network.delay_ms(), end._end, "reset")

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more. No process is informed.

        Each end's system finds out as it was asked to.
        """
        for end in (self, self._other):
            end.is_cut = True
            if end._silence_ms_max is not None:
                self._network.tasks.world.at(end._silence_ms_max, end._give_up)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def load_bytes(self) -> int:
        """Bytes on their way here or waiting to be read."""
        return self._arrived_bytes + self._travelling_bytes

    @property
    def _other(self) -> SimSocket:
        assert self.peer is not None
        return self.peer

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._is_broken

    @property
    def _is_broken(self) -> bool:
        return self._ended in ("reset", "timed out")

    def _await_data(self) -> None:
        tasks = self._network.tasks
        tasks.pass_turn()
        deadline = None if self._timeout is None else tasks.world.now_ms + self._timeout * 1000
        while not self._arrived and not self._ended and not self._is_closed:
            if deadline is not None and tasks.world.now_ms >= deadline:
                raise TimeoutError("timed out")
            self._reading = tasks.current
            tasks.park(None if deadline is None else deadline - tasks.world.now_ms)
            self._reading = None
        if self._ended == "timed out":
            raise TimeoutError(110, "Connection timed out")
        if self._is_broken:
            raise ConnectionResetError(104, "Connection reset by peer")

    def _travel(self, data: bytes | None) -> None:
        """Send ``data``, or the end (None). Each arrival delivers what was sent first: delays differ, order stays."""
        peer, world = self._other, self._network.tasks.world
        peer._travelling.append(data)
        peer._travelling_bytes += len(data or b"")
        at_ms = peer._last_arrival_ms = max(world.now_ms + self._network.delay_ms(), peer._last_arrival_ms)
        world.at(at_ms - world.now_ms, peer._arrive)

    def _arrive(self) -> None:
        data = self._travelling.popleft()
        if data is None:
            self._end("closed")
            return
        self._travelling_bytes -= len(data)
        if self.is_cut or self._is_closed:
            return
        self._arrived.append(data)
        self._arrived_bytes += len(data)
        self._wake_reader()

    def _finish(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wake_reader()
        self._let_write()
        self._travel(None)

    def _end(self, how: str) -> None:
        if not self.is_cut:
            self._end_here(how)

    def _give_up(self) -> None:
        self._end_here("timed out")

    def _end_here(self, how: str) -> None:
        self._ended = self._ended or how
        self._wake_reader()
        self._let_write()
        self._other._let_write()

    def _wake_reader(self) -> None:
        if self._reading is not None:
            self._network.tasks.wake(self._reading)

    def _let_write(self) -> None:
        writing, self._writing = self._writing, []
        for task in writing:
            self._network.tasks.wake(task)


class _File(io.RawIOBase):
    """A socket as a file, for what reads lines."""

    def __init__(self, stream: SimSocket) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        """For ``io.BufferedReader``."""
        return True

    def writable(self) -> bool:
        """For ``io.BufferedWriter``."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive."""
        return self._stream.recv_into(buffer)

    def write(self, data: Any) -> int:
        """Send."""
        return self._stream.sendmsg([memoryview(data)])

    def close(self) -> None:
        """Say so."""
        if not self.closed:
            super().close()
            self._stream.file_closed()


EPOCH_MS = 1_700_000_000_000
"""The date at which every run begins."""

COMPUTER = "simulated"


class SimThreads:
    """The threads of one simulated process, and its clocks: ``threads.Threads`` and ``clock.Clock``.

    ``wall_shift_ms`` may be changed at any time: a user set the clock of this machine.
    """

    def __init__(self, process: SimProcess, tasks: Tasks) -> None:
        self._process = process
        self._tasks = tasks
        self.wall_shift_ms = 0

    @property
    def process_id(self) -> int:
        return self._process.pid

    def monotonic_ns(self) -> int:
        """Virtual time; it stands still while a task makes a step."""
        return self._tasks.world.now_ms * 1_000_000

    def monotonic_ms(self) -> int:
        return self._tasks.world.now_ms

    def wall_ms(self) -> int:
        return EPOCH_MS + self._tasks.world.now_ms + self.wall_shift_ms

    def lock(self) -> SimLock:
        return SimLock(self._tasks)

    def reentrant_lock(self) -> SimReentrantLock:
        return SimReentrantLock(self._tasks)

    def event(self) -> SimEvent:
        return SimEvent(self._tasks)

    def condition(self) -> SimCondition:
        return SimCondition(self._tasks)

    def queue(self) -> SimQueue[Any]:
        return SimQueue(self._tasks)

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> SimThread:
        return SimThread(self._tasks, self._process, lambda: target(*arguments), name)

    def pool(self, size: int, name: str, *, is_daemon: bool = False) -> SimPool:
        return SimPool(self._tasks, self._process, size, name)

    def event_loop(self, name: str) -> SimEventLoop:
        return SimEventLoop(self._tasks, self._process, name)


class SimSurroundings(SimThreads):
    """What ``runtime.surroundings.Surroundings`` asks for, from the seed."""

    def __init__(self, process: SimProcess, network: Network) -> None:
        super().__init__(process, network.tasks)
        self._network = network
        self.random = random.Random(network.tasks.world.random.random())

    @property
    def host(self) -> str:
        """See ``Surroundings``; all simulated processes are of one machine."""
        return COMPUTER

    def sleep(self, seconds: float) -> None:
        self._tasks.park(seconds * 1000)

    def token(self, size_bytes: int) -> bytes:
        """See ``Surroundings``; here the seed can guess."""
        return self.random.randbytes(size_bytes)

    def listen(self, host: str, port: int) -> SimServer:
        return self._network.listen(self._process)

    def connect(self, host: str, port: int, timeout_seconds: float) -> SimSocket:
        return self._network.connect(self._process, port, timeout_seconds)

    def exit(self, code: int) -> None:
        self._process.end(code)
