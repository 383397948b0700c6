"""What all parts of an open store share: catalogue, chunks, clock, and threads for fetching and spilling.

Counterparts: ``store.Store`` makes one; readers, writers and transactions have it. ``reader.ReadAhead`` says what is
fetched, ``transactions.Transaction`` what is spilled. Source: S70 and S83 of docs/spec/stream-store.md. Never holds
more fetched bytes than there is room for, and never drops a part whose write failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pyarrow as pa

from headgate.environment import SIGNAL_S, Clock, Lock, Pool, Threads, cancellable_as_here
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue

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
        """Nobody wants them any more: they take no room as soon as they are not under way. Repeating is fine."""
        self._is_unwanted = True
        if self._over.is_set():  # asked behind the line above, as ``run`` does it the other way round
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
            if self.taken_bytes + fetch.size_bytes > self._size_bytes:
                return False
            self._taken[fetch] = fetch.size_bytes
            return True

    def give_back(self, fetch: Fetch) -> None:
        """Take it back. Without the lock: a finaliser may interrupt the thread that holds it."""
        self._taken.pop(fetch, None)

    def release_all(self) -> None:
        """Whoever waits for a fetch that has not begun waits no longer."""
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
        """Whose fetches these are: what was begun in another process never ends."""
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
            with contextlib.suppress(Exception):  # who waits tries again, and is told
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
    """The threads of one store, in each process that uses it: those of a parent do not survive a fork (CT4)."""

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
            self._pools = {process: self._threads.pool(SPILL_THREADS, "headgate-spill")}
        return self._pools[process]
