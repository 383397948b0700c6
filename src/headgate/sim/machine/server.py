"""A store that a process serves, in the machine room: clients ask over simulated connections.

Client and server are the product's own, from the verb to the bytes (``store.client``, ``store.server``): a greeting,
questions by HTTP, and questions for news. Connections break and fall silent, also between a question and its answer;
the server dies, stops, and ends when it is asked to, and another process of it has forgotten everything. Here is what
stands in front of that: who accepts connections, and what goes wrong, drawn apart from everything else.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, cast

from headgate.sim.machine.storage import Disk, SimCatalogue, SimStorage, SimStores
from headgate.sim.machine.surroundings import HOST, Network, SimServer, SimSocket, SimSurroundings
from headgate.sim.machine.tasks import SimProcess, Task
from headgate.sim.machine.world import Bound, Fault
from headgate.store import core
from headgate.store.addresses import PORT
from headgate.store.catalogue.base import Catalogue
from headgate.store.client import connection, remote_store
from headgate.store.client.connection import ServerFacts
from headgate.store.client.remote_store import open_remote_store
from headgate.store.server import handlers
from headgate.store.server.connections import Connection
from headgate.store.server.handlers import RequestHandlers, ServerMetrics
from headgate.store.server.server import ServerState
from headgate.store.store import Store

URL = f"headgate://{HOST}:{PORT}"

QUICKER: tuple[Bound, ...] = (
    (connection, "OPENING_PATIENCE_S", 0.4),
    (connection, "PAUSES_S", (0.01, 0.1)),
    (connection, "CONNECT_S", 0.3),
    (connection, "SILENCE_S", 1),
    (handlers, "SETTLE_S", 0.05),
    (handlers, "CHECK_S", 0.2),
    (handlers, "LOOK_S", 0.05),
    (core, "PAUSES_S", (0.01, 0.2)),
    (core, "START_S", 0.2),
)
"""A run lasts seconds, so patience is shorter than usual."""

PATIENCES_S = (0.5, 0.5, 25.0)
"""How long clients wait for an answer: some give up what is under way or only comes, others hear by news alone."""

IDLE_TASKS = {remote_store.THREAD, "headgate-fetch"}
"""What is left of a process with a program that has ended."""

SWEEP_MS = 150
LOSS_RATE = 0.04
"""So often the connection of a question breaks, in front of what it asks for or after it."""

BUDGET = 30
"""So often something happens to a server, or to connections."""


class ServedStores(SimStores):
    """The one store of a run, which a server has; ``open`` is for ``location.OPENERS``."""

    def __init__(
        self, seed: int, disk: Callable[[str], Disk], watched: Callable[[Catalogue], Catalogue] = lambda x: x
    ) -> None:
        super().__init__(disk, watched)
        self._seed = seed
        self._rng = random.Random(f"server of seed {seed}")
        self._shared: dict[SimProcess, Store] = {}
        self._clients: dict[Task, SimSocket] = {}
        self._process: SimProcess | None = None
        self._desk: ServerState | None = None
        self._starts_count = 0
        self._left = self._losses_left = BUDGET
        self._patience_s = self._rng.choice(PATIENCES_S)
        self.done: dict[str, int] = {}
        """How often what happened to the server."""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """What clients and the server have instead of the usual values."""
        return (
            *QUICKER,
            (connection, "PATIENCE_S", 1.2 * self._patience_s),
            (connection, "ANSWER_S", self._patience_s),
            (handlers, "NEWS_S", 0.8 * self._patience_s),
        )

    def begin(self) -> None:
        """Start the server, and have things happen to it."""
        disk = self._disk("store")
        self._tasks, self._faults = disk.tasks, disk.faults
        self._network = Network(disk.tasks, self._rng.choice((0, 2, 8)))
        self._start()
        self._tasks.world.at(self._rng.randint(20, 200), self._strike)
        self._tasks.world.at(SWEEP_MS, self._sweep)

    def heal(self) -> None:
        """Nothing happens any more: the server is there."""
        assert self._process is not None
        self._process.resume()

    def cut_power(self) -> None:
        """The server's machine is that of its clients."""
        assert self._process is not None
        self._process.kill()

    def mistake(self) -> str:
        """Return what is wrong with the server that is no fault of the world."""
        failures = 0 if self._desk is None else self._desk.counts.failures
        return f"the server could not answer {failures} questions" if failures else ""

    def asking(self) -> str:
        """See ``SimStores``: the client, if it is one that asks."""
        current = self._tasks.current
        stream = self._clients.get(current)
        return current.process.name if stream is None or stream.peer is None else stream.peer.process.name

    def open(self, name: str) -> Store:
        """Return the way to the server that the threads of one process share (see ``Store.shared``)."""
        process = self._tasks.current.process
        found = self._shared.get(process)
        if found is None:
            around = SimSurroundings(process, self._network)
            around.wall_shift_ms = self.wall_shift_ms
            served = open_remote_store(URL, around)
            found = self._shared[process] = Store(
                f"sim://{name}",
                served.catalogue,
                served.storage,
                new_name=self.new_name,
                threads=around,
                clock=served.clock,
            )
        return found

    # -- the server -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._starts_count += 1
        process = self._process = SimProcess(self._tasks, f"server{self._starts_count}", self._on_gone)
        self._tasks.spawn(process, lambda: self._serve(process), "main")

    def _on_gone(self, code: int) -> None:
        self._clients.clear()
        self._tasks.world.at(self._rng.randint(1, 250), self._start)

    def _serve(self, process: SimProcess) -> None:
        around, disk = SimSurroundings(process, self._network), self._disk("store")
        counting = ServerMetrics(around)
        facts = ServerFacts(around.token(16).hex(), "the only one", URL)
        catalogue = cast(Catalogue, SimCatalogue(disk, self.direct_catalogue("store")))
        replies = RequestHandlers(catalogue, SimStorage(disk), facts.instance, counting, around)
        port = self._network.listen(process, PORT)
        desk = self._desk = _Desk(port, replies, facts, counting, around, self._perhaps_lose)
        with contextlib.suppress(OSError):
            while True:
                stream, address = port.accept()
                around.thread(self._attend, "connection", desk, stream, address).start()

    def _attend(self, desk: ServerState, stream: SimSocket, address: tuple[str, int]) -> None:
        self._clients[self._tasks.current] = stream
        with contextlib.suppress(OSError):
            Connection(cast(Any, stream), address, cast(Any, desk))
        stream.close()

    # -- what goes wrong --------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self._faults.is_healed or not self._left:
            return
        process = self._process
        if process is not None and process.is_alive and not process.is_paused:
            what = self._rng.choice((*("link",) * 5, "crash", "pause", "end"))
            fault = {"link": Fault.LINK_LOSS, "pause": Fault.WORKER_PAUSE}.get(what, Fault.WORKER_CRASH)
            if self._rng.random() < (0.5 if self._faults.has(fault) else 0.1):
                self._left -= 1
                self.done[what] = self.done.get(what, 0) + 1
                self._hit(what, process)
        self._tasks.world.at(self._rng.randint(5, 250), self._strike)

    def _perhaps_lose(self, *, is_done: bool) -> None:
        """Perhaps the client of a question hears nothing any more: it is done, or it comes late."""
        lost = self._losses_left and not self._faults.is_healed and self._rng.random() < LOSS_RATE
        if lost:
            self._losses_left -= 1
            what = "lost" if is_done else "late"
            self.done[what] = self.done.get(what, 0) + 1
            self._clients[self._tasks.current].reset()
            if not is_done:
                self._tasks.park(self._rng.choice((0, 20, 200)))

    def _hit(self, what: str, process: SimProcess) -> None:
        self._tasks.world.tell("world", f"{what} of {process.name}")
        if what == "link" and self._network.open:
            found = self._rng.choice(self._network.open)
            self._rng.choice((found.reset, found.cut))()
        elif what == "crash":
            process.kill()
        elif what == "pause":
            process.pause()
            self._tasks.world.at(self._rng.choice((30, 300, 1_500)), process.resume)
        elif what == "end" and self._desk is not None:
            desk = self._desk
            self._tasks.spawn(process, lambda: self._end(process, desk), "signal")

    def _end(self, process: SimProcess, desk: ServerState) -> None:
        """End it as SIGTERM does."""
        desk.end(self._rng.choice((0.0, 1.0)))
        process.end(0)

    def _sweep(self) -> None:
        """End processes with a program that has ended: what hears of news ends with them."""
        for process in list(self._shared):
            if process.is_alive and not process.is_paused and set(self._tasks.of(process)) <= IDLE_TASKS:
                process.end(0)
            if not process.is_alive:
                del self._shared[process]
        self._tasks.world.at(SWEEP_MS, self._sweep)


class _Desk(ServerState):
    """The desk of a simulated server, on this machine: everybody may ask."""

    def __init__(
        self,
        port: SimServer,
        replies: RequestHandlers,
        facts: ServerFacts,
        counting: ServerMetrics,
        around: SimSurroundings,
        lose: Callable[..., None],
    ) -> None:
        super().__init__(list, replies, facts, counting, around=around)
        self._port = port
        self._lose = lose

    def answer(self, path: str, name: str | None, data: bytes) -> tuple[int, bytes]:
        if not path.startswith(handlers.VERB):
            return super().answer(path, name, data)
        self._lose(is_done=False)
        found = super().answer(path, name, data)
        self._lose(is_done=True)
        return found

    def _stop_listening(self) -> None:
        self._port.close()
