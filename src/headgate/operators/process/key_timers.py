"""Timers of one kind of time as PySpark's stateful processors use them (rules SX9 to SX12 of docs/spec/processors.md).

Counterparts: ``operators.process.by_key``, which has them fire; ``state.timers``, which holds them. Other than
``operators.process.timers``, they can be listed by key, and what fires at the end of input is what was there then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headgate.operators.process.cursor import Cursor, NoKey
from headgate.operators.process.timers import milliseconds
from headgate.state.timers import RowTimers


class KeyTimers:
    """The timers of the current key. A key has at most one for one time, in milliseconds since 1970."""

    def __init__(self, node: str, cursor: Cursor, held: RowTimers | None) -> None:
        """``held``: what the backend holds; None: the function has no notion of time."""
        self._node = node
        self._cursor = cursor
        self._held = held
        self._by_key: dict[Any, set[int]] | None = None
        self._firing_ms: int | None = None
        self._until_ms = 0
        self._waiting: dict[tuple[Any, int], None] = {}

    def register(self, time: Any) -> None:
        """Add a timer. What is due already, and what is new while the last ones fire, counts from the next turn on.

        The timer that fires is gone when its call is over, so registering it again does nothing (SX10).
        """
        key, time_ms = self._key(), milliseconds(self._node, time)
        if self._firing_ms is None or time_ms > self._until_ms:
            self._add(key, time_ms)
        elif time_ms != self._firing_ms:
            self._waiting[key, time_ms] = None

    def delete(self, time: Any) -> None:
        """Remove a timer; nothing happens if there is none."""
        key, time_ms = self._key(), milliseconds(self._node, time)
        self._waiting.pop((key, time_ms), None)
        self._checked().delete(key, time_ms)
        if self._by_key is not None:
            self._forget(key, time_ms)

    def times(self) -> list[int]:
        """Return the times of the key's timers, the earliest first, that of the one that fires among them."""
        key = self._key()
        found = self._index().get(key, set()) | {time_ms for other, time_ms in self._waiting if other == key}
        return sorted(found if self._firing_ms is None else found | {self._firing_ms})

    def begin(self, firing_ms: int, until_ms: int) -> None:
        """A timer fires for the current key; what is registered for times up to ``until_ms`` waits for ``end``."""
        self._firing_ms, self._until_ms = firing_ms, until_ms
        if self._by_key is not None:
            self._forget(self._cursor.key, firing_ms)

    def end(self) -> None:
        """Nothing more fires for now."""
        self._firing_ms = None
        waiting, self._waiting = self._waiting, {}
        for key, time_ms in waiting:
            self._add(key, time_ms)

    def restored(self) -> None:
        """The backend holds other timers than before."""
        self._by_key = None

    def _add(self, key: Any, time_ms: int) -> None:
        self._checked().register(key, time_ms)
        if self._by_key is not None:
            self._by_key.setdefault(key, set()).add(time_ms)

    def _forget(self, key: Any, time_ms: int) -> None:
        assert self._by_key is not None
        times = self._by_key.get(key)
        if times is not None:
            times.discard(time_ms)
            if not times:
                del self._by_key[key]

    def _index(self) -> dict[Any, set[int]]:
        """The times of every key: made when they are listed first, since few functions ever do."""
        if self._by_key is None:
            self._by_key = {}
            for time_ms, key in self._all():
                self._by_key.setdefault(key, set()).add(time_ms)
        return self._by_key

    def _all(self) -> Iterator[tuple[int, Any]]:
        return self._checked().all()

    def _key(self) -> Any:
        key = self._cursor.key
        if isinstance(key, NoKey):
            hash(key)  # says what is wrong
        return key

    def _checked(self) -> RowTimers:
        assert self._held is not None, "there are no timers without a notion of time"
        return self._held
