"""Starts the clients of a stream, harms them and what they stand on, and returns the history of it all.

Counterpart: ``clients``. Source: docs/spec/log-histories.md. Only processes of its own are harmed.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked import CONTEXT, stopped
from tests.logs.clients import DATE, ENOUGH, FULL, GROUP, SCHEMA, STREAM, Orders, everything, insistently, run
from tests.logs.history import Operation, Outcome, Recorder, history, lines

from headgate.errors import FencedError, HeadgateError
from headgate.protocol.store.transactions import Status
from headgate.store.store import Store
from headgate.store.transactions import SharedTransaction

CLIENTS = ("append1", "append2", "transact1", "share1", "participate1", "observe1", "member1", "member2")
PATIENCE_S = 240
"""Until everything has ended, on a machine that is slow and busy."""

DATES_MS = (-86_400_000, -3_600_000, 0, 3_600_000, 86_400_000)


class Clients:
    """The processes that use one store, by what they do."""

    def __init__(
        self, root: str, logs: Path, names: Sequence[str], environment: dict[str, str] | None = None, bug: str = ""
    ) -> None:
        self._root, self.logs, self.names, self._bug = root, logs, names, bug
        self._environment = tuple((environment or {}).items())
        self._lives: dict[str, int] = {}
        self.running: dict[str, BaseProcess] = {}
        self._zombies: list[BaseProcess] = []

    def start(self, name: str, kill_at: str = "") -> None:
        """Start the next life of a client."""
        self._lives[name] = life = self._lives.get(name, 0) + 1
        orders = Orders(self._root, str(self.logs), name, life, kill_at, self._environment, self._bug)
        process = CONTEXT.Process(target=run, args=(orders,))
        process.start()
        self.running[name] = process

    def kill(self, name: str) -> None:
        """Kill a client, and start it again."""
        self.running[name].kill()
        self._renew(name)

    def freeze(self, name: str, time_s: float) -> None:
        """Stop a client for a while."""
        with stopped(self.running[name]):
            time.sleep(time_s)  # the time of the fault: not a wait for anything

    def replace(self, name: str) -> None:
        """Stop a client, start its next life, and let it go on beside that."""
        zombie = self.running[name]
        with stopped(zombie):
            self.start(name)
            time.sleep(0.5)  # the time of the fault: not a wait for anything
        self._zombies.append(zombie)

    def of(self, *roles: str) -> list[str]:
        """Return the names of those who do one of these."""
        return [name for name in self.names if name.startswith(roles)]

    def tend(self) -> None:
        """Start again whoever has died at a point where it had to; nobody ends otherwise before it is told to."""
        for name, process in list(self.running.items()):
            if process.exitcode is not None and not (self.logs / ENOUGH).exists():
                assert process.exitcode == -signal.SIGKILL, f"{name} ended with {process.exitcode}"
                self._renew(name)

    def have_done(self, least: int) -> None:
        """Wait until each of them has begun so many operations."""
        until = time.monotonic() + PATIENCE_S
        while any(self._begun(name) < least for name in self.names):
            assert time.monotonic() < until, "somebody does nothing"
            self.tend()
            time.sleep(0.05)

    def have_read(self, name: str) -> None:
        """Wait until the present life of a member has events behind it."""
        until = time.monotonic() + PATIENCE_S
        file = self.logs / f"{name}.{self._lives[name]}.jsonl"
        while not (file.exists() and any("read" in line for line in list(lines(file))[:-1])):
            assert time.monotonic() < until, f"{name} reads nothing"
            self.tend()
            time.sleep(0.05)

    def _begun(self, name: str) -> int:
        return sum("begin" in line for file in self.logs.glob(f"{name}.*.jsonl") for line in lines(file))

    def end(self, names: Sequence[str]) -> None:
        """Wait until these clients have ended, and well."""
        until = time.monotonic() + PATIENCE_S
        for name in names:
            process = self.running[name]
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode == -signal.SIGKILL:  # at a point where it had to
                self._renew(name)
                self.end([name])
            else:
                assert process.exitcode == 0, f"{name} ended with {process.exitcode}"

    def close(self) -> None:
        """End whatever is left."""
        for process in [*self.running.values(), *self._zombies]:
            process.kill()
            process.join()

    def _renew(self, name: str) -> None:
        self.running[name].join()
        self.start(name)


Strike = Callable[[random.Random, Store, Clients], None]


def kills(chance: random.Random, store: Store, clients: Clients) -> None:
    """Kill somebody at any moment."""
    clients.kill(chance.choice(clients.names))


def kills_a_reader(chance: random.Random, store: Store, clients: Clients) -> None:
    """Kill a member of the group that has read events and said that it committed them."""
    name = chance.choice(clients.of("member"))
    clients.have_read(name)
    clients.kill(name)


def kills_in_the_middle(chance: random.Random, store: Store, clients: Clients) -> None:
    """Have the next life of a writer die with a file half written."""
    name = chance.choice(clients.of("append", "transact", "participate"))
    clients.running[name].kill()
    clients.running[name].join()
    clients.start(name, kill_at=f"in-put:{chance.randint(1, 9)}:{clients.logs}/killed-{chance.random()}")


def freezes(chance: random.Random, store: Store, clients: Clients) -> None:
    """Stop somebody, perhaps for longer than its lease."""
    clients.freeze(chance.choice(clients.names), chance.choice((0.2, 0.6, 3)))


def replaces(chance: random.Random, store: Store, clients: Clients) -> None:
    """Have somebody go on beside his next life."""
    clients.replace(chance.choice(clients.of("append", "transact", "participate")))


def scales(chance: random.Random, store: Store, clients: Clients) -> None:
    """Split a segment, or merge two."""
    with suppress(HeadgateError):
        present = [x.segment_id for x in store.layout(STREAM).present]
        store.split(STREAM, chance.choice(present)) if len(present) < 4 else store.merge(STREAM, present[:2])


def sets_the_date(chance: random.Random, store: Store, clients: Clients) -> None:
    """Set the machine's date forward or back."""
    (clients.logs / DATE).write_text(str(chance.choice(DATES_MS)))


def fills_the_disk(chance: random.Random, store: Store, clients: Clients) -> None:
    """No chunk can be written for a while."""
    (clients.logs / FULL).touch()
    try:
        time.sleep(0.5)  # the time of the fault: not a wait for anything
    finally:
        (clients.logs / FULL).unlink()


def takes_a_checkpoint(chance: random.Random, store: Store, clients: Clients) -> None:
    """Ask the group for a checkpoint: its members meet markers between their events."""
    with suppress(HeadgateError):
        store.reader_group(GROUP).checkpoint(f"c{chance.randrange(1_000)}")


STRIKES: tuple[Strike, ...] = (
    kills,
    kills,
    kills_in_the_middle,
    freezes,
    replaces,
    scales,
    scales,
    sets_the_date,
    fills_the_disk,
    takes_a_checkpoint,
)


def lived_through(
    store: Store,
    logs: Path,
    chance: random.Random,
    strikes: Sequence[Strike],
    *,
    names: Sequence[str] = CLIENTS,
    environment: dict[str, str] | None = None,
    least: int = 5,
    bug: str = "",
) -> list[Operation]:
    """Have clients use the stream of a store while each of ``strikes`` strikes once; return their history.

    Each of them does at least so much. ``bug`` is one of ``tests.logs.bugs``, planted in all of them.
    """
    logs.mkdir()
    store.create_stream(STREAM, SCHEMA, segments=2, routing_key="key")
    store.reader_group(GROUP, STREAM)
    clients = Clients(store.root, logs, names, environment, bug)
    try:
        for name in names:
            clients.start(name)
        for strike in strikes:
            time.sleep(chance.random())  # the pace: not a wait for anything
            clients.tend()
            strike(chance, store, clients)
        clients.have_done(least)
        return _ended(store, logs, clients, chance)
    finally:
        clients.close()


def _ended(store: Store, logs: Path, clients: Clients, chance: random.Random) -> list[Operation]:
    """Come to the end, decide what is open, and read everything."""
    (logs / ENOUGH).touch()
    members = clients.of("member")
    others = [name for name in clients.names if name not in members]
    clients.end(others)
    for name in others:
        clients.start(name)  # the last life says what became of those before
    clients.end(others)
    last = Recorder(logs, "last", 0)
    outcomes = _decided(store, last, chance)
    insistently(lambda: store.seal(STREAM))
    clients.end(members)
    everything(store, last)
    return history(logs, outcomes)


def _decided(store: Store, recorder: Recorder, chance: random.Random) -> dict[str, Outcome]:
    """Decide what several processes have left open or prepared; return how all of these ended."""
    for left in store.list_transactions(stream=STREAM):
        if left.status.is_terminal:
            continue
        with suppress(FencedError):  # its lease ended just now
            _decide(store.transaction(STREAM, left.name), recorder, does_commit=chance.random() < 0.5)
    found = store.list_transactions(stream=STREAM)
    return {x.name: Outcome.OK if x.status is Status.COMMITTED else Outcome.FAILED for x in found}


def _decide(transaction: SharedTransaction, recorder: Recorder, *, does_commit: bool) -> None:
    if not does_commit:
        insistently(transaction.abort)
        return
    recorder.of_transaction(transaction.id, "asked")
    insistently(transaction.commit)
    recorder.of_transaction(transaction.id, "committed")
