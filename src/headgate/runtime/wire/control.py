"""The control channel: workers register with the coordinator in the driver and take its orders.

``ControlClient`` in each worker, ``ControlServer`` in the driver; messages: ``codec.messages``. Source:
docs/spec/connections.md. Both ends notice silence, so that a stopped or cut-off process is reported within the
heartbeat time-out. Each end sends through an ``Outbox``, so that a peer that does not read blocks only itself. Never
decides anything about the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.codec.handshake import Purpose
from headgate.codec.messages import (
    FromWorker,
    Heartbeat,
    HeartbeatReply,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode_message,
)
from headgate.dataclass import dataclass
from headgate.environment import Queue, Thread
from headgate.errors import HeadgateError
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.runtime.wire.connection import HANDSHAKE_SECONDS, Connection, ConnectionLost, Listener, connect
from headgate.tls import Tls

MESSAGES_MAX = 4_096
"""Messages that may wait for one peer: minutes of orders for one that merely is slow."""


class Outbox:
    """Sends messages in order. Any thread may ``put``.

    Args:
        connection: where they go; not owned.
        on_lost: called, maybe more than once, with the reason when messages cannot go out.
        name: of the thread.
    """

    def __init__(
        self, connection: Connection, on_lost: Callable[[str], None], *, name: str, around: Surroundings = PROCESS
    ) -> None:
        self._connection = connection
        self._on_lost = on_lost
        self._queue: Queue[bytes | None] = around.queue()
        self._lock = around.lock()
        self._is_closed = False
        self._thread = around.thread(self._loop, name)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Queue ``message``. Never blocks; after a loss or ``close`` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            is_full = self._queue.qsize() >= MESSAGES_MAX
            if not is_full:
                self._queue.put(message)
        if is_full:
            # outside the lock, which the sending thread takes when this cuts the connection
            self._on_lost(f"{MESSAGES_MAX} messages wait for it and it reads none")

    def close(self, flush_seconds: float) -> None:
        """Take no more; wait at most ``flush_seconds`` for what is queued, then cut the connection. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)  # ends the loop after what is queued
        if self._thread.is_current:
            return
        self._thread.join(flush_seconds)
        if self._thread.is_alive():
            self._connection.interrupt()
            self._thread.join()

    def _loop(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                self._connection.send_message(message)
        except ConnectionLost as lost:
            with self._lock:
                self._is_closed = True
            # what is put from now on is dropped instead of filling the queue, which is not read any more
            self._on_lost(lost.reason)


CONNECT_SECONDS = 20.0
"""How long a worker tries to reach the coordinator before it gives up."""
LAST_WORDS_SECONDS = 10.0
"""How long a worker that ends waits until the coordinator's system has taken why: on a busy machine its threads may get
no turn for a second, and "it was closed by the other side" is no help."""
LAST_ORDER_SECONDS = 0.2
"""How long a coordinator that ends waits, for each worker, until the system has taken the last order to it."""
_RETRY_SECONDS = 0.1


class ControlClient:
    """A worker's end. Connects in the constructor; begins to receive with ``start``.

    Args:
        host, port: the coordinator's address.
        secret: of the job.
        on_message: called with each order, in the receive thread.
        on_close: called once when the connection is gone, with the reason; never after ``close``. The worker
            exits at once.
        heartbeat_ms, heartbeat_timeout_ms: period of the signs of life, and the silence that counts as loss.

    Raises:
        ConnectionLost: the coordinator cannot be reached, or does not know this job.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        on_message: Callable[[ToWorker], None],
        on_close: Callable[[str], None],
        *,
        heartbeat_ms: int = 500,
        heartbeat_timeout_ms: int = 5_000,
        connect_seconds: float = CONNECT_SECONDS,
        tls: Tls | None = None,
        around: Surroundings = PROCESS,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._around = around
        self._on_message = on_message
        self._on_close = on_close
        self._heartbeat_seconds = heartbeat_ms / 1_000
        self._timeout_seconds = heartbeat_timeout_ms / 1_000
        self._lock = around.lock()
        self._over = around.event()
        self._connection = _connect_patiently(host, port, secret, connect_seconds, tls, around, is_wanted)
        self._heard_at = _now_s(around)
        self._outbox = Outbox(self._connection, self._lose, name="headgate-control-send", around=around)
        self._threads = [
            around.thread(self._receive_loop, "headgate-control-receive"),
            around.thread(self._heartbeat_loop, "headgate-control-heartbeat"),
        ]

    def start(self) -> None:
        """Begin to receive and to send heartbeats."""
        for thread in self._threads:
            thread.start()

    def send(self, message: FromWorker) -> None:
        """Send ``message`` after the earlier ones; never blocks, drops it when the connection is gone.

        Raises:
            ProtocolViolation: it is too large.
        """
        self._outbox.put(encode_message(message))

    def close(self, *, flush_seconds: float = LAST_WORDS_SECONDS) -> None:
        """Send what is queued (at most ``flush_seconds``), then close. ``on_close`` is not called. Idempotent."""
        with self._lock:
            self._over.set()
        self._outbox.close(flush_seconds)
        self._connection.interrupt()
        for thread in self._threads:
            # close() may be called before start(), or from one of them
            if thread.is_alive() and not thread.is_current:
                thread.join()
        self._connection.close()

    def _receive_loop(self) -> None:
        try:
            while True:
                message = decode_to_worker(self._connection.receive_message())
                self._heard_at = _now_s(self._around)
                if not isinstance(message, HeartbeatReply):
                    self._on_message(message)
        except ConnectionLost as lost:
            self._lose(lost.reason)
        except HeadgateError as error:
            self._lose(str(error))
        except Exception as error:  # whatever it is, the worker must hear of it
            self._lose(f"the control channel failed: {error!r}")

    def _heartbeat_loop(self) -> None:
        beat = encode_message(Heartbeat())
        while not self._over.wait(self._heartbeat_seconds):
            silence = _now_s(self._around) - self._heard_at
            if silence > self._timeout_seconds:
                # a driver that is stopped, or cut off: without orders this worker must end, another generation may run
                self._lose(f"the coordinator was silent for {silence:.1f} s")
                return
            self._outbox.put(beat)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        self._connection.interrupt()
        self._on_close(reason)


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a worker was given up. ``is_silent``: its process may live on, stopped or cut off, and hold its slot."""

    reason: str
    is_silent: bool = False


class WorkerConnection:
    """The driver's end of one worker's control channel; hashable, compared by identity."""

    def __init__(
        self,
        connection: Connection,
        on_lost: Callable[[WorkerConnection, Loss], None],
        around: Surroundings = PROCESS,
    ) -> None:
        self.peer = connection.peer
        self.heard_at = _now_s(around)
        self._around = around
        self._connection = connection
        self._on_lost = on_lost
        self._lock = around.lock()
        self._is_over = False
        self._unsent_reason = ""
        self._outbox = Outbox(connection, self._send_failed, name=f"headgate-control-send-{self.peer}", around=around)

    def send(self, message: ToWorker) -> None:
        """Send ``message`` after the earlier ones; never blocks, drops it when the worker is gone.

        Raises:
            ProtocolViolation: it is too large.
        """
        self._outbox.put(encode_message(message))

    def close(self, *, flush_seconds: float = 1.0) -> None:
        """Send what is queued (at most ``flush_seconds``), then close. ``on_lost`` is not called. Idempotent."""
        with self._lock:
            self._is_over = True
        self._outbox.close(flush_seconds)
        self._connection.interrupt()

    def lose(self, loss: Loss) -> None:
        """Give the worker up: close, and report it unless that was done already."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._connection.interrupt()
        self._on_lost(self, loss)

    def _send_failed(self, reason: str) -> None:
        """Take what has come until now, then lose the worker: it may have said why it left."""
        with self._lock:
            self._unsent_reason = self._unsent_reason or reason
        self._connection.interrupt()  # ends the receive thread after what is queued

    def receive_loop(self, on_message: Callable[[WorkerConnection, FromWorker], None]) -> None:
        """Deliver messages until the connection is gone; then free it. Runs in the listener's thread."""
        try:
            while True:
                message = decode_from_worker(self._connection.receive_message())
                self.heard_at = _now_s(self._around)
                if isinstance(message, Heartbeat):
                    self.send(HeartbeatReply())
                else:
                    on_message(self, message)
        except ConnectionLost as lost:
            self.lose(Loss(self._unsent_reason or lost.reason))
        except HeadgateError as error:
            self.lose(Loss(str(error)))
        except Exception as error:  # one worker's message must not end the coordinator silently
            self.lose(Loss(f"its message could not be processed: {error!r}"))
        finally:
            self._outbox.close(0.0)
            self._connection.close()


class ControlServer:
    """The driver's end: accepts the workers of one job.

    Args:
        secret: of the job.
        on_message: called with each message, in the receive thread of its worker.
        on_lost: called once per worker that is gone without ``close``, with the loss.
        heartbeat_timeout_ms: silence after which a worker counts as lost.
        host: interface to listen on.
    """

    def __init__(
        self,
        secret: bytes,
        on_message: Callable[[WorkerConnection, FromWorker], None],
        on_lost: Callable[[WorkerConnection, Loss], None],
        *,
        heartbeat_timeout_ms: int = 5_000,
        host: str = "127.0.0.1",
        port: int = 0,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        tls: Tls | None = None,
        around: Surroundings = PROCESS,
    ) -> None:
        self._around = around
        self._on_message = on_message
        self._on_lost = on_lost
        self._timeout_seconds = heartbeat_timeout_ms / 1_000
        self._lock = around.lock()
        self._workers: dict[WorkerConnection, Thread] = {}
        self._closed = around.event()
        self._watch = around.thread(self._watch_loop, "headgate-control-watch")
        self._listener = Listener(
            secret,
            Purpose.CONTROL,
            self._on_connection,
            name="headgate-control",
            host=host,
            port=port,
            handshake_seconds=handshake_seconds,
            tls=tls,
            around=around,
        )
        self._watch.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for ``ControlClient``."""
        return self._listener.host, self._listener.port

    def close(self) -> None:
        """Close the port and every connection; nothing is reported any more. Idempotent."""
        self._closed.set()
        self._listener.close()
        with self._lock:
            workers = dict(self._workers)
        for worker in workers:
            worker.close(flush_seconds=LAST_ORDER_SECONDS)
        # joined without the lock, which each of them takes on its way out
        for thread in (*workers.values(), self._watch):
            if not thread.is_current:
                thread.join()

    def _on_connection(self, connection: Connection, thread: Thread) -> None:
        worker = WorkerConnection(connection, self._on_lost, self._around)
        with self._lock:
            self._workers[worker] = thread
            # close() may have made its list before this one was in it
            is_late = self._closed.is_set()
        if is_late:
            worker.close(flush_seconds=0.0)
        try:
            worker.receive_loop(self._on_message)
        finally:
            with self._lock:
                self._workers.pop(worker, None)

    def _watch_loop(self) -> None:
        """Report workers that are silent: stopped, frozen, or cut off without a reset."""
        while not self._closed.wait(self._timeout_seconds / 10):
            now = _now_s(self._around)
            with self._lock:
                # a copy: giving one up changes the table, in its own thread
                workers = list(self._workers)
            for worker in workers:
                # written by the receive thread of the worker, as a whole: at worst it is a moment old
                silence = now - worker.heard_at
                if silence > self._timeout_seconds:
                    worker.lose(Loss(f"it was silent for {silence:.1f} s", is_silent=True))


def _connect_patiently(
    host: str,
    port: int,
    secret: bytes,
    seconds: float,
    tls: Tls | None,
    around: Surroundings,
    is_wanted: Callable[[], bool],
) -> Connection:
    deadline = _now_s(around) + seconds
    while True:
        try:
            return connect(host, port, secret, Purpose.CONTROL, tls=tls, around=around)
        except ConnectionLost:
            if not is_wanted() or _now_s(around) + _RETRY_SECONDS >= deadline:
                raise
        around.sleep(_RETRY_SECONDS)


def _now_s(around: Surroundings) -> float:
    return around.monotonic_ns() / 1e9
