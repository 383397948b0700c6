"""What every object of this room is: an object of the store, and how its methods are called beside the loop.

Counterpart: ``calls.Calls`` carries them out. Source: AC1, AC3 and AC5 of docs/spec/stream-clients.md.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from headgate.api.aio.calls import Calls

_P = ParamSpec("_P")
_B = TypeVar("_B")
_R = TypeVar("_R")


class Beside(Generic[_B]):
    """An object of the store, for tasks.

    ``in_turn``: it is one whose calls must not overlap; they are carried out in the order in which tasks made them.
    """

    def __init__(self, calls: Calls, blocking: _B, *, in_turn: bool = False) -> None:
        self._calls = calls
        self._blocking = blocking
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if in_turn else nullcontext()

    async def _run(self, call: Callable[[], _R], undo: Callable[[_R], object] | None = None) -> _R:
        async with self._turn:
            return await self._calls.run(call, undo)


class _Block(Protocol):
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_C = TypeVar("_C", bound=_Block)


class BesideBlock(Beside[_C]):
    """One that is a context manager, for tasks too: what the end of the block does is the blocking one's."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run(functools.partial(self._blocking.__exit__, kind, error, trace))


def passed_on(method: Callable[Concatenate[_B, _P], _R]) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]:
    """Return the method of the same name and meaning for tasks (AC9)."""

    @functools.wraps(method)
    async def passing(self: Beside[_B], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await self._run(functools.partial(method, self._blocking, *args, **kwargs))

    return passing


class _Entered(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


_E = TypeVar("_E", bound=_Entered)


class Opening(Generic[_E]):
    """Something that is opened by waiting for it: ``x = await opening``, or ``async with opening as x``."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, _E]]) -> None:
        self._open = open
        self._opened: _E | None = None

    def __await__(self) -> Generator[Any, Any, _E]:
        return self._open().__await__()

    async def __aenter__(self) -> _E:
        self._opened = await self._open()
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)


class Unclosed:
    """Something that need not be closed: a context manager for the sake of ``async with``."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
