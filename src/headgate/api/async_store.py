"""The stream store, its readers, writers and transactions for asyncio tasks. Never blocks the event loop.

The methods are those of ``store.store.Store``, under the same names. An accepted append is never taken back: a
cancelled task repeats it by its number. What a cancelled read had found is not lost: the next one returns it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import pyarrow as pa

from headgate.api.async_calls import (
    THREADS,
    AsyncContextProxy,
    AsyncProxy,
    CallExecutor,
    ChangePoller,
    Opening,
    Unclosed,
    awaitable,
    future_result,
)
from headgate.model.config import Access, Duration, duration_ms
from headgate.store.follower import EARLIEST, StreamEvents, StreamFollower
from headgate.store.reader import READ_ROWS
from headgate.store.reader_groups import COMMIT_EVERY, LEASE, CheckpointMarker, GroupEvents, GroupReader, ReaderGroup
from headgate.store.store import TRANSACTION_LEASE, TRANSACTION_OWNER, Store
from headgate.store.streams import StreamCut
from headgate.store.transactions import SharedTransaction, TransactionWriter
from headgate.store.writer import LINGER, Appended, StreamWriter

_F = TypeVar("_F")

_Looked: TypeAlias = tuple[int, _F | None, float | None]
"""Which number the store had before, what was found, and in how many seconds to look again, changed or not."""


async def _next(
    look: Callable[[], Awaitable[_Looked[_F]]],
    has_ended: Callable[[], bool],
    bell: ChangePoller,
    timeout: Duration | None,
) -> _F | None:
    """Read until something is found, the input has ended, or ``timeout`` is over; no thread waits meanwhile."""
    now_s = asyncio.get_running_loop().time
    until_s = None if timeout is None else now_s() + duration_ms(timeout, "timeout") / 1_000
    while True:
        seen, found, due_s = await look()
        left_s = None if until_s is None else until_s - now_s()
        if found is not None or has_ended() or (left_s is not None and left_s <= 0):
            return found
        await bell.wait(seen, min((x for x in (left_s, due_s) if x is not None), default=None))


class AsyncStreamFollower(AsyncProxy[StreamFollower], Unclosed):
    """A ``StreamFollower`` for asyncio tasks. ``async for`` waits for new events until a sealed stream is read."""

    def __init__(
        self, calls: CallExecutor, follower: StreamFollower, changes: Callable[[], int], bell: ChangePoller
    ) -> None:
        """Use ``AsyncStore.follow``."""
        super().__init__(calls, follower, in_turn=True)
        self._changes = changes
        self._bell = bell

    @property
    def has_ended(self) -> bool:
        return self._blocking.has_ended

    async def read(self, rows_max: int = READ_ROWS, *, timeout: Duration | None = None) -> StreamEvents | None:
        """Return the next events of one segment, or None if nothing came in time, or nothing can come.

        Args:
            rows_max: so many events at most.
            timeout: so long it waits; None: until something comes.

        Raises:
            HeadgateError: see ``StreamFollower.read``.
        """
        look = partial(self._run, partial(self._look, rows_max), self._take_back)
        return await _next(look, lambda: self.has_ended, self._bell, timeout)

    async def cut(self) -> StreamCut:
        return await self._run(self._blocking.cut)

    async def __aiter__(self) -> AsyncIterator[StreamEvents]:
        while (found := await self.read()) is not None:
            yield found

    def _look(self, rows_max: int) -> _Looked[StreamEvents]:
        # the number first: what comes between the two ends the wait at once
        return self._changes(), self._blocking.read(rows_max), None

    def _take_back(self, looked: _Looked[StreamEvents]) -> None:
        if looked[1] is not None:
            self._blocking.unread(looked[1])


class AsyncGroupReader(AsyncProxy[GroupReader]):
    """A ``GroupReader`` for asyncio tasks.

    The events that ``read`` returns count as processed when ``read`` is called again, or, with ``commit_every=None``,
    when ``commit`` is called. As a context manager, the reader leaves the group at the end of the block, and commits
    before that unless an error or a cancellation ended the block.
    """

    def __init__(
        self, calls: CallExecutor, reader: GroupReader, changes: Callable[[], int], bell: ChangePoller
    ) -> None:
        """Use ``AsyncReaderGroup.join``."""
        super().__init__(calls, reader, in_turn=True)
        self._changes = changes
        self._bell = bell

    @property
    def reader_id(self) -> str:
        """The name of this reader in the group."""
        return self._blocking.reader_id

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """The segments that it reads, as (stream, segment), when it last looked at the group."""
        return self._blocking.segments

    @property
    def has_ended(self) -> bool:
        return self._blocking.has_ended

    async def read(
        self, rows_max: int = READ_ROWS, *, timeout: Duration | None = None
    ) -> GroupEvents | CheckpointMarker | None:
        """Return the next events, or the marker of a checkpoint, or None if nothing came in time, or nothing can come.

        While it waits it says that it lives.

        Args:
            rows_max: so many events at most.
            timeout: so long it waits; None: until something comes.

        Raises:
            FencedError: it is not in the group any more: join again. What it had not committed is read by others.
            HeadgateError: see ``GroupReader.read``.
        """
        look = partial(self._run, partial(self._look, rows_max), self._take_back)
        return await _next(look, lambda: self.has_ended, self._bell, timeout)

    commit = awaitable(GroupReader.commit)
    heartbeat = awaitable(GroupReader.heartbeat)
    leave = awaitable(GroupReader.leave)

    async def __aiter__(self) -> AsyncIterator[GroupEvents | CheckpointMarker]:
        while (found := await self.read()) is not None:
            yield found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave(commits=kind is None)

    def _look(self, rows_max: int) -> _Looked[GroupEvents | CheckpointMarker]:
        # the number first: see AsyncStreamFollower
        seen = self._changes()
        found = self._blocking.read(rows_max)
        return seen, found, self._blocking.due_in_ms / 1_000

    def _take_back(self, looked: _Looked[GroupEvents | CheckpointMarker]) -> None:
        if looked[1] is not None:
            self._blocking.unread(looked[1])


class AsyncReaderGroup(AsyncProxy[ReaderGroup]):
    """A ``ReaderGroup`` for asyncio tasks. It has the same methods, to be awaited."""

    def __init__(self, calls: CallExecutor, group: ReaderGroup, changes: Callable[[], int], bell: ChangePoller) -> None:
        """Use ``AsyncStore.reader_group``."""
        super().__init__(calls, group)
        self._changes = changes
        self._bell = bell

    @property
    def name(self) -> str:
        """The name of the group."""
        return self._blocking.name

    def join(
        self,
        reader_id: str,
        *,
        lease: Duration = LEASE,
        commit_every: Duration | None = COMMIT_EVERY,
        busy_at_most: Duration | None = None,
        takes_over: bool = False,
        timeout: Duration = 0,
    ) -> Opening[AsyncGroupReader]:
        """Join the group; see ``ReaderGroup.join``. A task that is cancelled while it joins does not join the group."""
        join = partial(
            self._blocking.join,
            reader_id,
            lease=lease,
            commit_every=commit_every,
            busy_at_most=busy_at_most,
            takes_over=takes_over,
        )

        async def joined() -> AsyncGroupReader:
            if not takes_over:
                await self._wait_for_name(reader_id, duration_ms(timeout, "timeout"))
            reader = await self._run(join, partial(GroupReader.leave, commits=False))
            return AsyncGroupReader(self._calls, reader, self._changes, self._bell)

        return Opening(joined)

    checkpoint = awaitable(ReaderGroup.checkpoint)
    checkpoints = awaitable(ReaderGroup.checkpoints)
    forget_checkpoint = awaitable(ReaderGroup.forget_checkpoint)
    reset = awaitable(ReaderGroup.reset)
    cut = awaitable(ReaderGroup.cut)
    unread_bytes = awaitable(ReaderGroup.unread_bytes)
    unread = awaitable(ReaderGroup.unread)
    describe = awaitable(ReaderGroup.describe)
    readers = awaitable(ReaderGroup.readers)
    streams = awaitable(ReaderGroup.streams)

    async def _wait_for_name(self, reader_id: str, timeout_ms: int) -> None:
        until_s = self._calls.loop.time() + timeout_ms / 1_000
        while (pause_ms := await self._run(partial(self._blocking.look_for, reader_id))) and (
            left_s := until_s - self._calls.loop.time()
        ) > 0:
            await asyncio.sleep(min(pause_ms / 1_000, left_s))


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

    async def note_time(self, time: dt.datetime) -> None:
        """Note that no event that this writer appends from now on is earlier than ``time``; flush first.

        Raises:
            HeadgateError: see ``StreamWriter.note_time``.
        """
        async with self._turn:
            pass  # those that were appended before are taken now
        await self._calls.run(partial(self._blocking.note_time, time))

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
        # first: its thread looks at the store
        self._bell.join()
        self._blocking.close()
