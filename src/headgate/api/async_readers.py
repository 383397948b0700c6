"""Readers for asyncio tasks: of a whole stream, and of a reader group.

What a cancelled read had found is not lost: the next one returns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from headgate.api.async_calls import AsyncProxy, CallExecutor, ChangePoller, Opening, Unclosed, awaitable
from headgate.model.config import Duration, duration_ms
from headgate.store.follower import StreamEvents, StreamFollower
from headgate.store.reader import READ_ROWS
from headgate.store.reader_groups import COMMIT_EVERY, LEASE, CheckpointMarker, GroupEvents, GroupReader, ReaderGroup
from headgate.store.streams import StreamCut

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
        """See ``StreamFollower``."""
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
        """See ``StreamFollower``."""
        return await self._run(self._blocking.cut)

    async def __aiter__(self) -> AsyncIterator[StreamEvents]:
        while (found := await self.read()) is not None:
            yield found

    def _look(self, rows_max: int) -> _Looked[StreamEvents]:
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
        """See ``GroupReader``."""
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
