"""Blocking calls of the store, carried out in a few threads beside an event loop.

Counterpart: everything in this room calls the store through ``Calls``. Source: rules AC1 to AC4 of
docs/spec/stream-clients.md. Never leaves a call behind that somebody began: whoever is cancelled waits for its end.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from headgate.errors import UsageError

THREADS = 8
"""So many calls of one store run at the same time; others wait for their turn, and the loop for none of them."""

_T = TypeVar("_T")


class Calls:
    """Carries out blocking calls for the tasks of one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        """Made by a task of the loop. It begins threads as they are needed."""
        if threads < 1:
            raise UsageError(f"a store needs at least one thread, not {threads}")
        self.loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="headgate-async")
        self._under_way: set[Future[Any]] = set()
        self.is_closed = False

    async def run(self, call: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """Carry out ``call`` in a thread and return what it returns.

        Cancelled before it has begun, it is never carried out. Cancelled later, the task ends when the call has ended
        (AC2): then ``undo`` is carried out with what it returned, since nobody gets that (AC3).

        Raises:
            UsageError: the store is closed, or belongs to another event loop.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError("a store is used by the event loop in which it was opened; open another one in this loop")
        asked = self._begin(call)
        try:
            await _ended(asked)
        except asyncio.CancelledError:
            if not asked.cancel():
                await self._settle(asked, undo)
            raise
        return asked.result()

    async def close(self, last: Callable[[], object]) -> None:
        """Take no more calls; when those that were begun have ended, carry out ``last``, and end the threads."""
        self.is_closed = True
        was_cancelled = False
        for asked in tuple(self._under_way):
            was_cancelled |= await _ended_whatever_comes(asked)
        closing = self._pool.submit(last)
        was_cancelled |= await _ended_whatever_comes(closing)
        self._pool.shutdown(wait=False)
        if was_cancelled:
            raise asyncio.CancelledError
        closing.result()

    def _begin(self, call: Callable[[], _T]) -> Future[_T]:
        if self.is_closed:
            raise UsageError("the store is closed; open it again")
        return self._submit(call)

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        asked = self._pool.submit(contextvars.copy_context().run, call)
        self._under_way.add(asked)
        asked.add_done_callback(self._under_way.discard)
        return asked

    async def _settle(self, asked: Future[_T], undo: Callable[[_T], object] | None) -> None:
        """Wait for the end of a call whose task was cancelled, and take back what it did."""
        await _ended_whatever_comes(asked)
        if undo is not None and asked.exception() is None:
            found = asked.result()
            await _ended_whatever_comes(self._submit(lambda: undo(found)))


async def outcome(asked: Future[_T]) -> _T:
    """Return what comes of ``asked``, which goes on whether or not anybody waits for it."""
    await _ended(asked)
    return asked.result()


async def _ended(asked: Future[Any]) -> None:
    """Wait until ``asked`` is done, without ever cancelling it."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(wake)

    asked.add_done_callback(tell)
    await waiter


async def _ended_whatever_comes(asked: Future[Any]) -> bool:
    """Wait until ``asked`` is done, also when the task is cancelled meanwhile; return whether it was."""
    was_cancelled = False
    while not asked.done():
        try:
            await _ended(asked)
        except asyncio.CancelledError:
            was_cancelled = True
    return was_cancelled
