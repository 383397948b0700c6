"""The stream store for tasks of asyncio.

Counterpart: ``store.store.Store``, whose methods these are, under the same names. Source: rules AC1 to AC8 of
docs/spec/stream-clients.md. Never blocks the event loop.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from headgate.api.aio.bell import Bell
from headgate.api.aio.beside import Beside, Opening, passed_on
from headgate.api.aio.calls import THREADS, Calls
from headgate.api.aio.groups import AsyncReaderGroup
from headgate.api.aio.reading import AsyncStreamFollower
from headgate.api.aio.writing import AsyncSharedTransaction, AsyncStreamWriter
from headgate.model.config import Duration
from headgate.model.security import Access
from headgate.store.cuts import StreamCut
from headgate.store.followed_store import EARLIEST
from headgate.store.linger import LINGER
from headgate.store.shared_transaction import SharedTransaction
from headgate.store.store import Store
from headgate.store.transactional_store import LEASE, OWNER


class AsyncStore(Beside[Store]):
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
            calls = Calls(threads)
            try:
                store = await calls.run(partial(Store.open, root, access=access, chunks=chunks), Store.close)
            except BaseException:
                await calls.close(lambda: None)
                raise
            return cls(calls, store)

        return Opening(opened)

    def __init__(self, calls: Calls, store: Store) -> None:
        """Use ``AsyncStore.open``."""
        super().__init__(calls, store)
        self._bell = Bell(store.changes, calls.loop)

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
        self, stream: str, *, lease: Duration = LEASE, owner: str = OWNER, epoch: int = 0
    ) -> AsyncSharedTransaction:
        """Begin a transaction; see ``Store.begin_shared``. If the task is cancelled meanwhile, it is aborted."""
        begin = partial(self._blocking.begin_shared, stream, lease=lease, owner=owner, epoch=epoch)
        return AsyncSharedTransaction(self._calls, await self._run(begin, SharedTransaction.abort))

    async def transaction(self, stream: str, id: str) -> AsyncSharedTransaction:
        """Return a transaction that any process began; see ``Store.transaction``."""
        found = await self._run(partial(self._blocking.transaction, stream, id))
        return AsyncSharedTransaction(self._calls, found)

    create_stream = passed_on(Store.create_stream)
    list_streams = passed_on(Store.list_streams)
    describe = passed_on(Store.describe)
    seal = passed_on(Store.seal)
    delete = passed_on(Store.delete)
    update_stream = passed_on(Store.update_stream)
    schemas = passed_on(Store.schemas)

    head = passed_on(Store.head)
    tail = passed_on(Store.tail)
    cut_at = passed_on(Store.cut_at)
    events_between = passed_on(Store.events_between)
    truncate = passed_on(Store.truncate)
    hold = passed_on(Store.hold)
    release = passed_on(Store.release)
    holds = passed_on(Store.holds)
    needed_by = passed_on(Store.needed_by)
    set_retention = passed_on(Store.set_retention)
    retain = passed_on(Store.retain)

    layout = passed_on(Store.layout)
    split = passed_on(Store.split)
    merge = passed_on(Store.merge)
    resize = passed_on(Store.resize)
    set_scaling = passed_on(Store.set_scaling)
    autoscale = passed_on(Store.autoscale)

    reader_groups = passed_on(Store.reader_groups)
    delete_reader_group = passed_on(Store.delete_reader_group)
    list_transactions = passed_on(Store.list_transactions)
    commit_transactions = passed_on(Store.commit_transactions)
    expire_transactions = passed_on(Store.expire_transactions)

    fsck = passed_on(Store.fsck)
    repair = passed_on(Store.repair)

    def _close(self) -> None:
        self._bell.join()
        self._blocking.close()
