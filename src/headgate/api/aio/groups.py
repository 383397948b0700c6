"""Reader groups for tasks.

Counterpart: ``store.reader_groups.ReaderGroup``. Source: AC3 of docs/spec/stream-clients.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from headgate.api.aio.bell import Bell
from headgate.api.aio.beside import Beside, Opening, passed_on
from headgate.api.aio.calls import Calls
from headgate.api.aio.reading import AsyncGroupReader
from headgate.model.config import Duration, duration_ms
from headgate.store.group_reader import GroupReader
from headgate.store.reader_groups import COMMIT_EVERY, LEASE, ReaderGroup


class AsyncReaderGroup(Beside[ReaderGroup]):
    """A ``ReaderGroup`` for asyncio tasks. It has the same methods, to be awaited."""

    def __init__(self, calls: Calls, group: ReaderGroup, changes: Callable[[], int], bell: Bell) -> None:
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

    checkpoint = passed_on(ReaderGroup.checkpoint)
    checkpoints = passed_on(ReaderGroup.checkpoints)
    forget_checkpoint = passed_on(ReaderGroup.forget_checkpoint)
    reset = passed_on(ReaderGroup.reset)
    cut = passed_on(ReaderGroup.cut)
    unread_bytes = passed_on(ReaderGroup.unread_bytes)
    unread = passed_on(ReaderGroup.unread)
    describe = passed_on(ReaderGroup.describe)
    readers = passed_on(ReaderGroup.readers)
    streams = passed_on(ReaderGroup.streams)

    async def _wait_for_name(self, reader_id: str, timeout_ms: int) -> None:
        until_s = self._calls.loop.time() + timeout_ms / 1_000
        while (pause_ms := await self._run(partial(self._blocking.look_for, reader_id))) and (
            left_s := until_s - self._calls.loop.time()
        ) > 0:
            await asyncio.sleep(min(pause_ms / 1_000, left_s))
