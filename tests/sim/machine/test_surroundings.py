"""Connections of the machine room: bytes arrive in order or not at all, and ends are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.conftest import few

from headgate.runtime.wire.connection import SILENCE_S_MAX, PlainStream
from headgate.sim.machine.surroundings import BUFFER_BYTES, Network, SimSocket
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import World


class Pair:
    """Two processes with a connection."""

    def __init__(self, seed: int = 1, delay_ms_max: int = 5) -> None:
        self.world = World(seed)
        self.tasks = Tasks(self.world)
        self.network = Network(self.tasks, delay_ms_max)
        self.near, self.far = SimProcess(self.tasks, "near"), SimProcess(self.tasks, "far")
        self.heard: list[object] = []

    def run(self, client: Callable[[SimSocket], None], server: Callable[[SimSocket], None]) -> list[object]:
        listening = self.network.listen(self.far)

        def connect() -> None:
            client(self.network.connect(self.near, listening.getsockname()[1], 1.0))

        self.tasks.spawn(self.near, connect, "client")
        self.tasks.spawn(self.far, lambda: server(listening.accept()[0]), "server")
        self.world.run(lambda: False, 60_000, 100_000)
        return self.heard

    def read_all(self, socket: SimSocket) -> None:
        data = b""
        while part := socket.recv(64):
            data += part
        self.heard.append(data)


@pytest.mark.parametrize("seed", few(range(20), 5))
def test_bytes_arrive_in_order_and_the_end_behind_them(seed: int) -> None:
    pair = Pair(seed)

    def send(socket: SimSocket) -> None:
        for number in range(50):
            socket.sendmsg([memoryview(b"%02d" % number), memoryview(b",")])
        socket.close()

    assert pair.run(send, pair.read_all) == [b"".join(b"%02d," % n for n in range(50))]


def test_what_dies_is_closed_by_the_system() -> None:
    pair = Pair()
    pair.world.at(100, pair.near.kill)
    assert pair.run(lambda socket: socket.sendall(b"last words"), pair.read_all) == [b"last words"]


def test_a_cut_cable_is_only_noticed_by_silence() -> None:
    pair = Pair()

    def wait(socket: SimSocket) -> None:
        socket.settimeout(2.0)
        with pytest.raises(TimeoutError):
            socket.recv(1)
        pair.heard.append(pair.world.now_ms >= 2_000)

    def send(socket: SimSocket) -> None:
        socket.cut()
        socket.sendall(b"lost")
        socket.close()

    assert pair.run(send, wait) == [True]


def test_whoever_bears_no_silence_is_told_of_a_cut_cable() -> None:
    """As the product sets it."""
    pair = Pair()

    def wait(socket: SimSocket) -> None:
        stream = PlainStream(cast(Any, socket))
        with pytest.raises(TimeoutError):
            stream.readinto(bytearray(1))
        pair.heard.append(pair.world.now_ms >= SILENCE_S_MAX * 1000)

    def cut(socket: SimSocket) -> None:
        pair.tasks.park(100)
        socket.cut()

    assert pair.run(cut, wait) == [True]


def test_a_reset_is_an_error_on_both_sides() -> None:
    pair = Pair()

    def expect(socket: SimSocket) -> None:
        with pytest.raises(ConnectionResetError):
            socket.recv(1)
        with pytest.raises(BrokenPipeError):
            socket.sendall(b"x")
        pair.heard.append("reset")

    pair.world.at(50, lambda: pair.network.open[0].reset())
    assert pair.run(expect, expect) == ["reset", "reset"]


def test_a_sender_waits_while_nobody_reads() -> None:
    pair = Pair(delay_ms_max=0)

    def send(socket: SimSocket) -> None:
        for _ in range(3):
            socket.sendall(bytes(BUFFER_BYTES))
            pair.heard.append(pair.world.now_ms)

    def read_late(socket: SimSocket) -> None:
        pair.tasks.park(500)
        while socket.recv(1 << 16):
            pass

    heard = pair.run(send, read_late)
    assert [time >= 500 for time in heard if isinstance(time, int)] == [False, False, True]


def test_nobody_listens_at_a_closed_port() -> None:
    pair = Pair()
    pair.world.at(0, pair.far.kill)

    def refused() -> None:
        pair.tasks.park(10)
        with pytest.raises(ConnectionRefusedError):
            pair.network.connect(pair.near, port, 1.0)
        pair.heard.append("refused")

    port = pair.network.listen(pair.far).getsockname()[1]
    pair.tasks.spawn(pair.near, refused, "client")
    pair.world.run(lambda: False, 1_000, 1_000)
    assert pair.heard == ["refused"]


def test_a_connection_that_nobody_accepted_is_reset_with_its_port() -> None:
    pair = Pair()
    server = pair.network.listen(pair.far)

    def connect() -> None:
        socket = pair.network.connect(pair.near, server.getsockname()[1], 1.0)
        server.close()
        with pytest.raises(ConnectionResetError):
            socket.recv(1)
        pair.heard.append("reset")

    pair.tasks.spawn(pair.near, connect, "client")
    pair.world.run(lambda: False, 1_000, 1_000)
    assert pair.heard == ["reset"]
    assert not [one for one in pair.network.open if one.process is pair.far]
