"""Shared parts of an open store: catalogue, chunks, clock, changes, and threads for fetching and spilling.

Counterparts: ``store.Store`` makes one; readers, writers and transactions have it. ``reader.ReadAhead`` says what is
fetched, ``transactions.Transaction`` what is spilled. ``catalogue.postgresql`` and ``client.remote_store`` listen for
changes. Source: S83 of docs/spec/stream-store.md, docs/spec/shared-store.md, docs/spec/served-store.md.

Never holds more fetched bytes than there is room for, and never drops a part whose write failed. Never says that
nothing has changed while its connection is lost.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import pyarrow as pa

from headgate.environment import (
    SIGNAL_S,
    SYSTEM_CLOCK,
    SYSTEM_ENVIRONMENT,
    Clock,
    Environment,
    Lock,
    Pool,
    Thread,
    Threads,
    cancellable_as_here,
)
from headgate.errors import HeadgateError
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue

ASK_EVERY_MS = 60_000
"""Two quartz clocks differ by a few milliseconds after so long."""


class ServerClock:
    """A ``Clock`` with the date of the server. Threads may share it: at worst two of them ask."""

    def __init__(self, ask: Callable[[], int], clock: Clock = SYSTEM_CLOCK) -> None:
        """``ask`` returns the server's date in milliseconds since 1970, or raises ``HeadgateError``."""
        self._ask = ask
        self._clock = clock
        self._asked_ms: int | None = None
        self._known: tuple[int, int] | None = None

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def wall_ms(self) -> int:
        """Return the date.

        Raises:
            StorageError: the server has never been reached, and is not now.
        """
        now_ms = self._clock.monotonic_ms()
        if self._asked_ms is None or now_ms - self._asked_ms >= ASK_EVERY_MS:
            self._learn(now_ms)
            now_ms = self._clock.monotonic_ms()
        assert self._known is not None, "`_learn` raises as long as it has learnt nothing"
        date_ms, then_ms = self._known
        return date_ms + now_ms - then_ms

    def _learn(self, began_ms: int) -> None:
        try:
            date_ms = self._ask()
        except HeadgateError:
            if self._known is None:
                raise
        else:
            # the server looked at its clock somewhere between question and answer; half way is off by the least
            self._known = date_ms, (began_ms + self._clock.monotonic_ms()) // 2
        # also after an error: the last answer is good for longer than that, and asking may take long
        self._asked_ms = began_ms


POLL_MS = 50
"""While nothing can be heard, readers look for themselves, so often."""

PAUSES_S = (0.05, 2.0)
"""Between tries to hear again: the first one, and the longest."""

START_S = 5.0
"""How long the first who asks waits until it hears."""


class ChangeListener(ABC):
    """A thread that listens on a connection of its own, from the first question on."""

    def __init__(self, thread_name: str, first: int = 0, around: Environment = SYSTEM_ENVIRONMENT) -> None:
        """No number is as low as ``first``."""
        self._thread_name = thread_name
        self._around = around
        self._lock = around.lock()
        self._number = first + 1
        self._hears = False
        self._looked_ms = -POLL_MS
        self._tried = around.event()
        self._closing = around.event()
        self._thread: Thread | None = None

    @property
    def number(self) -> int:
        """What ``changes`` would say, as far as known now."""
        return self._number

    def changes(self) -> int:
        """Return a number that rises with every change that was heard of, and now and then while nothing is heard."""
        if self._thread is None and self._start():
            self._tried.wait(START_S)
        if not self._hears:
            with self._lock:
                now_ms = self._around.monotonic_ms()
                if now_ms - self._looked_ms >= POLL_MS:
                    self._looked_ms = now_ms
                    self._number += 1
        return self._number

    def changed(self) -> None:
        """Something has changed, or may have."""
        with self._lock:
            self._number += 1

    def close(self) -> None:
        """End the thread; the next question begins another one."""
        with self._lock:
            # taken out under the lock, joined without it, which the thread takes to note changes
            thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            self._interrupt()
            thread.join()
            self._closing.clear()

    def _start(self) -> bool:
        """Begin the thread; False: the system has none, so readers poll, and the next question tries again."""
        with self._lock:
            if self._thread is None:
                self._tried.clear()
                thread = self._around.thread(self._run, self._thread_name)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            return True

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while not self._closing.is_set():
            if self._listen():
                pause_s = PAUSES_S[0]
            self._set_hearing(False)
            self._closing.wait(pause_s)
            # a server that is away is asked less and less often; readers poll by `changes` meanwhile
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _set_hearing(self, hears: bool) -> None:
        """Readers look once more: what came in between was not heard."""
        self._hears = hears
        self.changed()
        self._tried.set()

    @abstractmethod
    def _listen(self) -> bool:
        """Connect and listen until the connection is lost, or it is interrupted; return whether it was connected.

        Says ``_set_hearing(True)`` when it hears. Raises nothing: the next verb says what is wrong.
        """

    @abstractmethod
    def _interrupt(self) -> None:
        """End ``_listen``, also one that only begins: ``_closing`` is set."""


FETCH_THREADS = 8
"""Requests under way at one time: where each takes long, it is their number that decides."""

FETCH_BYTES_MAX = 128 << 20
"""All readers of a store in one process have so much fetched and not read yet, at most."""

SPILL_THREADS = 2

WriteBatches = Callable[[Sequence[pa.RecordBatch]], None]


class StoreCore:
    """What all parts of one open store share."""

    def __init__(
        self, catalogue: Catalogue, storage: Storage, clock: Clock, threads: Threads, new_name: Callable[[], str]
    ) -> None:
        """``new_name`` gives names that nothing has."""
        self.catalogue = catalogue
        self.storage = storage
        self.clock = clock
        self.threads = threads
        self.new_name = new_name
        self.prefetcher = Prefetcher(threads)
        self.spills = SpillPool(threads)


class Fetch:
    """Some bytes of one object, on their way."""

    def __init__(
        self, storage: Storage, path: str, offset: int, size_bytes: int, room: FetchBudget, threads: Threads
    ) -> None:
        self.path, self.offset, self.size_bytes = path, offset, size_bytes
        self._storage = storage
        self._room = room
        self._over = threads.event()
        self._is_unwanted = False
        self._payload: bytes | None = None
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` will not wait."""
        return self._over.is_set()

    def run(self) -> None:
        """Fetch them, unless they were released."""
        try:
            if not self._is_unwanted:
                self._payload = self._storage.get_range(self.path, self.offset, self.size_bytes)
        except Exception as error:
            self._error = error
        finally:
            self._over.set()
            # released while it was under way: then its room is given back here
            if self._is_unwanted:
                self.let_go()

    def wait(self) -> bytes | None:
        """Return the bytes, or None if they were not fetched, and no error says why.

        Raises:
            Exception: what the storage raised.
        """
        while not self._over.wait(SIGNAL_S):
            pass
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would keep this frame, and its callers' frames their reader, until a collection
        return self._payload

    def let_go(self) -> None:
        """Release the fetched bytes: they take no room once the fetch is not under way. Repeating is fine."""
        self._is_unwanted = True
        if self._over.is_set():  # checked after the line above, as ``run`` does it the other way round
            self._payload = None
            self._room.give_back(self)


class FetchBudget:
    """How many bytes may be on their way or wait to be read. Safe from several threads, and from finalisers."""

    def __init__(self, size_bytes: int, lock: Lock) -> None:
        self._size_bytes = size_bytes
        self._lock = lock
        self._taken: dict[Fetch, int] = {}

    @property
    def taken_bytes(self) -> int:
        """What is taken now."""
        return sum(list(self._taken.values()))

    def take(self, fetch: Fetch) -> bool:
        """Take as much room as ``fetch`` needs; False: there is not so much."""
        with self._lock:
            assert fetch not in self._taken, "a fetch takes its room once"
            if self.taken_bytes + fetch.size_bytes > self._size_bytes:
                return False
            self._taken[fetch] = fetch.size_bytes
            return True

    def give_back(self, fetch: Fetch) -> None:
        """Take it back. Without the lock: a finaliser may interrupt the thread that holds it."""
        self._taken.pop(fetch, None)

    def release_all(self) -> None:
        """End every wait for a fetch that has not begun."""
        for fetch in list(self._taken):
            fetch.let_go()


class Prefetcher:
    """The threads and the room of one store, in each process that uses it: those of a parent do not survive a fork."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._here: dict[int, tuple[Pool, FetchBudget]] = {}
        """By process. Neither has anything yet when it is made, so it does not matter who of several threads does."""
        self._is_closed = False

    @property
    def process_id(self) -> int:
        """The process of these fetches: one that was begun in another process never ends."""
        return self._threads.process_id

    @property
    def taken_bytes(self) -> int:
        """What is on its way in this process, or was not read yet."""
        here = self._here.get(self.process_id)
        return 0 if here is None else here[1].taken_bytes

    def begin(self, storage: Storage, path: str, offset: int, size_bytes: int) -> Fetch | None:
        """Have bytes fetched; None: there is no room, or no thread, so the reader asks for them itself."""
        if self._is_closed:
            return None
        here = self._here.get(self.process_id)
        if here is None:
            made = (
                self._threads.pool(FETCH_THREADS, "headgate-fetch"),
                FetchBudget(FETCH_BYTES_MAX, self._threads.lock()),
            )
            here = self._here.setdefault(self.process_id, made)
        pool, room = here
        fetch = Fetch(storage, path, offset, size_bytes, room, self._threads)
        if not room.take(fetch):
            return None
        try:
            pool.submit(cancellable_as_here(fetch.run))
        except RuntimeError:
            # no thread is left, or the pool was shut: the reader fetches for itself
            room.give_back(fetch)
            return None
        return fetch

    def close(self) -> None:
        """Begin nothing more, and end what has not begun. Repeating is fine."""
        self._is_closed = True
        here = self._here.pop(self.process_id, None)
        if here is not None:
            pool, room = here
            room.release_all()
            pool.shutdown(wait=False)


class Spill:
    """Batches that are being written."""

    def __init__(self, batches: Sequence[pa.RecordBatch], write: WriteBatches, threads: Threads) -> None:
        self.batches = batches
        self._write = write
        self._is_over = threads.event()
        self._is_written = False

    def run(self) -> None:
        """Write them."""
        try:
            with contextlib.suppress(Exception):  # a waiting caller tries again, and gets the error
                self._write(self.batches)
                self._is_written = True
        finally:
            self._is_over.set()

    def is_written(self) -> bool:
        """Wait until the write is over; return whether it did what it should."""
        self._is_over.wait()
        return self._is_written

    def give_back(self) -> None:
        """It will not be written beside anybody."""
        self._is_over.set()


class SpillPool:
    """The threads of one store, in each process that uses it: those of a parent do not survive a fork."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._pools: dict[int, Pool] = {}

    def begin(self, batches: Sequence[pa.RecordBatch], write: WriteBatches) -> Spill:
        """Have ``batches`` written."""
        part = Spill(batches, write, self._threads)
        try:
            self._pool().submit(cancellable_as_here(part.run))
        except RuntimeError:  # no more threads: the writer that waits for it writes it
            part.give_back()
        return part

    def _pool(self) -> Pool:
        process = self._threads.process_id
        if process not in self._pools:
            # those of a parent are forgotten: their threads do not exist in this process
            self._pools = {process: self._threads.pool(SPILL_THREADS, "headgate-spill")}
        return self._pools[process]
