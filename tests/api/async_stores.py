"""What the tests of the store for tasks share: calls that are held, and calls that tell in which thread they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.store.storing import KEYED, STREAM

import headgate as hg

PATIENCE_S = 300.0
"""Nothing is measured by it: a test that hangs fails."""


def run(root: Path, test: Callable[[hg.AsyncStore], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run ``test`` with a store that has one stream."""

    async def with_store() -> None:
        async with asyncio.timeout(PATIENCE_S), hg.AsyncStore.open(root / "store", **options) as store:
            await store.create_stream(STREAM, KEYED, segments=2, routing_key="key", if_not_exists=True)
            await test(store)

    asyncio.run(with_store())


class Held:
    """A call that waits, when it is made, until the test lets it go on."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self._has_begun = threading.Event()
        self._may_go_on = threading.Event()
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        self._has_begun.set()
        assert self._may_go_on.wait(PATIENCE_S)
        return self._real(*args, **kwargs)

    async def begun(self) -> None:
        """Wait until it is made."""
        while not self._has_begun.is_set():
            await asyncio.sleep(0.001)

    def let_go(self) -> None:
        self._may_go_on.set()


class Watched:
    """An object whose methods tell in which thread they are called."""

    def __init__(self, real: Any, threads: set[int]) -> None:
        self._real, self._threads = real, threads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found

        def called(*args: Any, **kwargs: Any) -> Any:
            self._threads.add(threading.get_ident())
            return found(*args, **kwargs)

        return called


def inner(store: hg.AsyncStore) -> hg.Store:
    """The store behind it."""
    return store._blocking
