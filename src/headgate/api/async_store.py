"""The stream store, its writers and transactions for asyncio tasks. Never blocks the event loop.

The methods are those of ``store.store.Store``, under the same names. An accepted append is never taken back: a
cancelled task repeats it by its number.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from headgate.api.async_calls import (
    THREADS,
    AsyncContextProxy,
    AsyncProxy,
    CallExecutor,
    ChangePoller,
    Opening,
    awaitable,
    future_result,
)
from headgate.api.async_readers import AsyncReaderGroup, AsyncStreamFollower
from headgate.model.config import Access, Duration
from headgate.store.follower import EARLIEST
from headgate.store.store import TRANSACTION_LEASE, TRANSACTION_OWNER, Store
from headgate.store.streams import StreamCut
from headgate.store.transactions import SharedTransaction, TransactionWriter
from headgate.store.writer import LINGER, Appended, StreamWriter


class AsyncStreamWriter(AsyncContextProxy[StreamWriter]):
    """A ``StreamWriter`` for asyncio tasks. Appends keep the order in which tasks made them, and share flushes.

    As a context manager, the writer closes at the end of the block. If an error or a cancellation ended the block,
    appends that are not durable by then are dropped, and tasks that wait for them get an error.
    """

    def __init__(self, calls: CallExecutor, writer: StreamWriter) -> None:
        """Use ``AsyncStore.writer``."""
        super().__init__(calls, writer, in_turn=True)

    @property
    def next_sequence(self) -> int:
        """The number of the next append. With ``writer_id=``, after a restart: the first that the store lacks."""
        return self._blocking.next_sequence

    async def append(self, batch: pa.RecordBatch, sequence: int | None = None) -> Appended:
        """Append events; return when they are durable, which takes ``linger`` and a flush.

        Cancelled before ``next_sequence`` has moved, nothing is appended; cancelled later, they will be, as if it had
        not been. With a ``writer_id=`` an append that is repeated by its number is not there twice.

        Args:
            batch: events with the stream's schema.
            sequence: see ``StreamWriter.append``.

        Raises:
            HeadgateError: see ``StreamWriter.append``, and what ended the writer before they were durable.
        """
        return await future_result(await self._run(partial(self._blocking.append, batch, sequence)))

    async def submit(self, batch: pa.RecordBatch, sequence: int | None = None) -> asyncio.Task[Appended]:
        """Take events, and return what completes when they are durable; see ``append``."""
        taken = await self._run(partial(self._blocking.append, batch, sequence))
        return asyncio.create_task(future_result(taken))

    async def flush(self) -> None:
        """Make everything that was appended before durable, at once.

        Raises:
            HeadgateError: see ``StreamWriter.flush``.
        """
        async with self._turn:
            pass  # those that were appended before are taken now
        await self._calls.run(self._blocking.flush)

    close = awaitable(StreamWriter.close)


class AsyncTransactionWriter(AsyncContextProxy[TransactionWriter]):
    """A ``TransactionWriter`` for asyncio tasks.

    As a context manager, it closes at the end of the block, unless an error or a cancellation ended the block.
    """

    def __init__(self, calls: CallExecutor, writer: TransactionWriter) -> None:
        """Use ``AsyncSharedTransaction.writer``."""
        super().__init__(calls, writer, in_turn=True)

    @property
    def participant(self) -> str:
        """The name of this participant in the transaction."""
        return self._blocking.participant

    @property
    def next_sequence(self) -> int:
        """The number of the next write: the first that the transaction lacks."""
        return self._blocking.next_sequence

    write = awaitable(TransactionWriter.write)
    flush = awaitable(TransactionWriter.flush)
    ping = awaitable(TransactionWriter.ping)
    close = awaitable(TransactionWriter.close)


class AsyncSharedTransaction(AsyncProxy[SharedTransaction]):
    """A ``SharedTransaction`` for asyncio tasks. It has the same methods, to be awaited."""

    @property
    def id(self) -> str:
        """The id by which other processes find this transaction."""
        return self._blocking.id

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._blocking.stream

    @property
    def lease_ms(self) -> int:
        """The lease in ms: an open transaction is aborted if it is not renewed for this long."""
        return self._blocking.lease_ms

    def writer(self, participant: str = "") -> Opening[AsyncTransactionWriter]:
        """Open a writer; see ``SharedTransaction.writer``."""

        async def opened() -> AsyncTransactionWriter:
            return AsyncTransactionWriter(self._calls, await self._run(partial(self._blocking.writer, participant)))

        return Opening(opened)

    ping = awaitable(SharedTransaction.ping)
    prepare = awaitable(SharedTransaction.prepare)
    commit = awaitable(SharedTransaction.commit)
    abort = awaitable(SharedTransaction.abort)
    status = awaitable(SharedTransaction.status)


class AsyncStore(AsyncProxy[Store]):
    """A ``Store`` for the tasks of one event loop: ``async with hg.AsyncStore.open() as store``.

    It has the methods of ``Store`` with the same arguments and meaning, to be awaited. A few threads make the calls, so
    the event loop never waits for them. A task that is cancelled during a call ends when the call has ended.
    """

    @classmethod
    def open(
        cls,
        root: str | Path | None = None,
        *,
        access: str = Access.OWNER.value,
        chunks: str | Path | None = None,
        threads: int = THREADS,
    ) -> Opening[AsyncStore]:
        """Open the store at ``root``; see ``Store.open``.

        Args:
            root: see ``Store.open``.
            access: see ``Store.open``.
            chunks: see ``Store.open``.
            threads: how many calls can run at the same time.
        """

        async def opened() -> AsyncStore:
            calls = CallExecutor(threads)
            try:
                store = await calls.run(partial(Store.open, root, access=access, chunks=chunks), Store.close)
            except BaseException:
                await calls.close(lambda: None)
                raise
            return cls(calls, store)

        return Opening(opened)

    def __init__(self, calls: CallExecutor, store: Store) -> None:
        """Use ``AsyncStore.open``."""
        super().__init__(calls, store)
        self._bell = ChangePoller(store.changes, calls.loop)

    @property
    def root(self) -> str:
        """The directory or URL of the store."""
        return self._blocking.root

    async def close(self) -> None:
        """Take no more calls, wait for those that were begun, and close the store. Repeating is fine."""
        if not self._calls.is_closed:
            self._bell.close()
            await self._calls.close(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def writer(
        self, name: str, *, writer_id: str = "", epoch: int = 0, linger: Duration = LINGER
    ) -> Opening[AsyncStreamWriter]:
        """Open a writer; see ``Store.writer``. ``linger`` has a default, because tasks wait for their appends."""
        open_it = partial(self._blocking.writer, name, writer_id=writer_id, epoch=epoch, linger=linger)

        async def opened() -> AsyncStreamWriter:
            return AsyncStreamWriter(self._calls, await self._run(open_it))

        return Opening(opened)

    def follow(
        self,
        name: str,
        *,
        start: str | StreamCut | dt.datetime = EARLIEST,
        end: str | StreamCut | None = None,
        key: object = None,
    ) -> Opening[AsyncStreamFollower]:
        """Return a reader of a whole stream; see ``Store.follow``."""
        open_it = partial(self._blocking.follow, name, start=start, end=end, key=key)

        async def opened() -> AsyncStreamFollower:
            return AsyncStreamFollower(self._calls, await self._run(open_it), self._blocking.changes, self._bell)

        return Opening(opened)

    async def reader_group(
        self,
        name: str,
        streams: str | Sequence[str] = (),
        *,
        start: str = EARLIEST,
        cuts: Sequence[StreamCut] = (),
        checkpoints_kept: int = 1,
    ) -> AsyncReaderGroup:
        """Return a reader group; see ``Store.reader_group``."""
        find = self._blocking.reader_group
        group = await self._run(partial(find, name, streams, start=start, cuts=cuts, checkpoints_kept=checkpoints_kept))
        return AsyncReaderGroup(self._calls, group, self._blocking.changes, self._bell)

    async def begin_shared(
        self, stream: str, *, lease: Duration = TRANSACTION_LEASE, owner: str = TRANSACTION_OWNER, epoch: int = 0
    ) -> AsyncSharedTransaction:
        """Begin a transaction; see ``Store.begin_shared``. If the task is cancelled meanwhile, it is aborted."""
        begin = partial(self._blocking.begin_shared, stream, lease=lease, owner=owner, epoch=epoch)
        return AsyncSharedTransaction(self._calls, await self._run(begin, SharedTransaction.abort))

    async def transaction(self, stream: str, id: str) -> AsyncSharedTransaction:
        """Return a transaction that any process began; see ``Store.transaction``."""
        found = await self._run(partial(self._blocking.transaction, stream, id))
        return AsyncSharedTransaction(self._calls, found)

    create_stream = awaitable(Store.create_stream)
    list_streams = awaitable(Store.list_streams)
    describe = awaitable(Store.describe)
    seal = awaitable(Store.seal)
    delete = awaitable(Store.delete)
    update_stream = awaitable(Store.update_stream)
    schemas = awaitable(Store.schemas)

    head = awaitable(Store.head)
    tail = awaitable(Store.tail)
    cut_at = awaitable(Store.cut_at)
    events_between = awaitable(Store.events_between)
    truncate = awaitable(Store.truncate)
    hold = awaitable(Store.hold)
    release = awaitable(Store.release)
    holds = awaitable(Store.holds)
    needed_by = awaitable(Store.needed_by)
    set_retention = awaitable(Store.set_retention)
    retain = awaitable(Store.retain)

    layout = awaitable(Store.layout)
    split = awaitable(Store.split)
    merge = awaitable(Store.merge)
    resize = awaitable(Store.resize)
    set_scaling = awaitable(Store.set_scaling)
    autoscale = awaitable(Store.autoscale)

    reader_groups = awaitable(Store.reader_groups)
    delete_reader_group = awaitable(Store.delete_reader_group)
    list_transactions = awaitable(Store.list_transactions)
    commit_transactions = awaitable(Store.commit_transactions)
    expire_transactions = awaitable(Store.expire_transactions)

    fsck = awaitable(Store.fsck)
    repair = awaitable(Store.repair)

    def _close(self) -> None:
        self._bell.join()
        self._blocking.close()
