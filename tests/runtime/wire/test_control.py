"""The control channel delivers messages both ways and notices every way in which a side can vanish."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from headgate.codec.handshake import Purpose
from headgate.codec.messages import Abort, Complete, FromWorker, Ready, Stop, ToWorker, encode_message
from headgate.runtime.wire import control
from headgate.runtime.wire.connection import Connection, ConnectionLost, Listener, connect
from headgate.runtime.wire.control import ControlClient, ControlServer, Loss, WorkerConnection

SECRET = b"s" * 32
WAIT = 120


class Driver:
    """A server whose events are queued, and its clients."""

    def __init__(self, heartbeat_timeout_ms: int = 60_000) -> None:
        self.messages: queue.Queue[tuple[WorkerConnection, FromWorker]] = queue.Queue()
        self.lost: queue.Queue[tuple[WorkerConnection, Loss]] = queue.Queue()
        self.server = ControlServer(
            SECRET,
            lambda worker, message: self.messages.put((worker, message)),
            lambda worker, loss: self.lost.put((worker, loss)),
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            handshake_seconds=WAIT,
        )
        self.clients: list[Worker] = []

    def worker(self, **options: int) -> Worker:
        worker = Worker(self.server.address, **options)
        self.clients.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.clients:
            worker.client.close(flush_seconds=0.0)
        self.server.close()


class Worker:
    def __init__(self, address: tuple[str, int], **options: int) -> None:
        self.orders: queue.Queue[ToWorker] = queue.Queue()
        self.closed: queue.Queue[str] = queue.Queue()
        self.client = ControlClient(*address, SECRET, self.orders.put, self.closed.put, **options)
        self.client.start()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def test_messages_travel_both_ways_in_order(driver: Driver) -> None:
    worker = driver.worker()
    for generation in range(200):
        worker.client.send(Ready(generation))
    received = [driver.messages.get(timeout=WAIT) for _ in range(200)]
    assert [message for _, message in received] == [Ready(generation) for generation in range(200)]
    received[0][0].send(Complete(1, 2))
    received[0][0].send(Abort(1, 3))
    assert [worker.orders.get(timeout=WAIT) for _ in range(2)] == [Complete(1, 2), Abort(1, 3)]


def test_last_words_are_waited_for(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a worker failed is heard, also if its sending thread gets no turn for a while."""
    worker, turn = driver.worker(), threading.Event()
    send = Connection.send_message

    def late(self: Connection, message: bytes) -> None:
        turn.wait(WAIT)
        send(self, message)

    monkeypatch.setattr(Connection, "send_message", late)
    worker.client.send(Ready(7))
    threading.Timer(1.5, turn.set).start()
    worker.client.close()
    assert driver.messages.get(timeout=WAIT)[1] == Ready(7)


def test_last_words_are_heard_though_nothing_can_be_sent_any_more(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends finds out first that the worker is gone, and the one that receives has its turn."""
    worker, turn = driver.worker(heartbeat_ms=60_000), threading.Event()
    decode = control.decode_from_worker

    def late(payload: bytes) -> FromWorker:
        assert turn.wait(WAIT)
        return decode(payload)

    monkeypatch.setattr(control, "decode_from_worker", late)
    worker.client.send(Ready(7))
    worker.client.send(Ready(8))
    worker.client.close()
    deadline = time.monotonic() + WAIT
    while not driver.server._workers:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    (connection,) = driver.server._workers
    while not connection._outbox._is_closed:
        assert time.monotonic() < deadline, "something can still be sent"
        connection.send(Complete(1, 2))
        time.sleep(0.005)
    connection._outbox._thread.join(WAIT)
    assert driver.lost.empty()
    turn.set()
    assert [driver.messages.get(timeout=WAIT)[1] for _ in range(2)] == [Ready(7), Ready(8)]
    assert driver.lost.get(timeout=WAIT)[0] is connection


def heard_again(side: object, name: str, times: int) -> None:
    """Wait until something was heard of the other side ``times`` times."""
    deadline, last = time.monotonic() + WAIT, getattr(side, name)
    while times:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.005)
        if (heard := getattr(side, name)) != last:
            times, last = times - 1, heard


def test_heartbeats_keep_quiet_connections_alive_and_are_not_delivered() -> None:
    driver = Driver(heartbeat_timeout_ms=60_000)
    worker = driver.worker(heartbeat_ms=20, heartbeat_timeout_ms=60_000)
    worker.client.send(Ready(1))
    connection, _ = driver.messages.get(timeout=WAIT)
    heard_again(connection, "heard_at", 5)
    heard_again(worker.client, "_heard_at", 5)
    assert (driver.lost.empty(), worker.closed.empty()) == (True, True)
    assert (worker.orders.empty(), driver.messages.empty()) == (True, True)
    driver.close()


def test_a_silent_worker_is_lost_within_the_time_out() -> None:
    driver = Driver(heartbeat_timeout_ms=200)
    worker = driver.worker(heartbeat_ms=60_000, heartbeat_timeout_ms=60_000)
    _, loss = driver.lost.get(timeout=WAIT)
    assert loss.is_silent
    assert "silent" in loss.reason
    assert worker.closed.get(timeout=WAIT)
    driver.close()


def test_a_silent_coordinator_is_noticed_by_the_worker() -> None:
    held: queue.Queue[Connection] = queue.Queue()
    listener = Listener(SECRET, Purpose.CONTROL, held.put, name="mute")
    worker = Worker((listener.host, listener.port), heartbeat_ms=20, heartbeat_timeout_ms=200)
    assert "silent" in worker.closed.get(timeout=WAIT)
    worker.client.close()
    listener.close()
    held.get(timeout=WAIT).close()


def test_a_worker_that_leaves_is_lost_once_and_the_others_stay(driver: Driver) -> None:
    leaving, staying = driver.worker(), driver.worker()
    leaving.client.send(Ready(1))
    connection, _ = driver.messages.get(timeout=WAIT)
    leaving.client.close()
    assert driver.lost.get(timeout=WAIT)[0] is connection
    staying.client.send(Ready(2))
    assert driver.messages.get(timeout=WAIT)[1] == Ready(2)
    assert driver.lost.empty()
    assert leaving.closed.empty()


def test_the_driver_s_end_closes_every_worker_after_its_last_order(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LAST_ORDER_SECONDS", WAIT)  # a busy machine may give the sending thread no turn
    worker = driver.worker()
    worker.client.send(Ready(1))
    connection, _ = driver.messages.get(timeout=WAIT)
    connection.send(Stop("done", True))
    driver.server.close()
    assert worker.orders.get(timeout=WAIT) == Stop("done", True)
    assert worker.closed.get(timeout=WAIT)
    assert driver.lost.empty()


@pytest.mark.parametrize("raw", [b"garbage", b"", encode_message(Stop("not yours"))])
def test_a_malformed_message_loses_its_sender_only(driver: Driver, raw: bytes) -> None:
    good = driver.worker()
    bad = connect(*driver.server.address, SECRET, Purpose.CONTROL, timeout_seconds=WAIT)
    bad.send_message(raw)
    assert "malformed" in driver.lost.get(timeout=WAIT)[1].reason
    good.client.send(Ready(1))
    assert driver.messages.get(timeout=WAIT)[1] == Ready(1)
    bad.close()


def test_a_failing_callback_is_reported_as_a_lost_worker() -> None:
    lost: queue.Queue[Loss] = queue.Queue()

    def fail(worker: WorkerConnection, message: FromWorker) -> None:
        raise ValueError("bug")

    server = ControlServer(SECRET, fail, lambda worker, loss: lost.put(loss))
    worker = Worker(server.address)
    worker.client.send(Ready(1))
    assert lost.get(timeout=WAIT) == Loss("its message could not be processed: ValueError('bug')")
    worker.client.close()
    server.close()


def test_a_worker_that_stopped_reading_never_blocks_the_coordinator(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MESSAGES_MAX", 10)
    stopped = connect(*driver.server.address, SECRET, Purpose.CONTROL, timeout_seconds=WAIT)
    stopped.send_message(encode_message(Ready(1)))
    connection, _ = driver.messages.get(timeout=WAIT)
    order = Stop("x" * 60_000)
    sent = 0
    while driver.lost.empty() and sent < 100_000:
        connection.send(order)
        sent += 1
    assert "reads none" in driver.lost.get(timeout=WAIT)[1].reason
    stopped.close()


def test_a_wrong_secret_is_told_at_once(driver: Driver) -> None:
    with pytest.raises(ConnectionLost, match="not let in"):
        ControlClient(*driver.server.address, b"w" * 32, lambda message: None, lambda reason: None, connect_seconds=0.0)


def test_who_leaves_looks_for_its_driver_no_longer(driver: Driver) -> None:
    address = driver.server.address
    driver.server.close()
    asked = iter([True, False])  # and nobody asks a third time
    with pytest.raises(ConnectionLost):
        ControlClient(
            *address,
            SECRET,
            lambda message: None,
            lambda reason: None,
            connect_seconds=1e9,
            is_wanted=lambda: next(asked),
        )


def test_a_flipped_bit_in_a_message_loses_its_sender_only(driver: Driver) -> None:
    good = driver.worker()
    bad = connect(*driver.server.address, SECRET, Purpose.CONTROL, timeout_seconds=WAIT)
    bad.send([b"\x03\x00\x00\x00" + b"\x01" * 8], [b"abc"])
    assert "damaged" in driver.lost.get(timeout=WAIT)[1].reason
    good.client.send(Ready(1))
    assert driver.messages.get(timeout=WAIT)[1] == Ready(1)
    bad.close()
