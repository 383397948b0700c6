"""Objects by key with a database behind them: what is used stays in memory, what changed is written back (RB4).

The counterpart of ``state.memory.cells`` for the backends that look at keys one by one. Two generations of a dict make
the cache: what is used moves to the young one, and the old one is given up when the young one is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

_NONE = object()
"""In the cache: the database has nothing for this key."""


class Stored(Protocol):
    """The objects of one state in the database."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        """Return the objects of those of ``keys`` that have one; they become the cache's."""

    def size(self, stored: Any) -> int:
        """Return how many rows an object is."""


class RocksCells:
    """One state: see ``backend.RowCells``.

    Attributes:
        rows_count: how many rows there are in all, as far as changes were taken (``take_changes``).
        young_rows: about how many rows the young generation holds; what is known to be absent counts as one.
    """

    def __init__(self, stored: Stored, all_keys: Callable[[], Iterable[Any]]) -> None:
        self._stored = stored
        self._all_keys = all_keys
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._changed: dict[Any, Any] = {}
        self.rows_count = 0
        self.young_rows = 0

    @property
    def changed_count(self) -> int:
        """How many keys differ from the database, perhaps."""
        return len(self._changed)

    def get(self, key: Any) -> Any:
        """See ``RowCells``."""
        found = self._young.get(key)
        if found is None:
            self.fetch((key,))
            found = self._young[key]
        return None if found is _NONE else found

    def get_all(self, keys: Iterable[Any]) -> dict[Any, Any]:
        """Return the objects of those of ``keys`` that have one."""
        wanted = list(keys)
        self.fetch(wanted)
        young = self._young
        return {key: found for key in wanted if (found := young[key]) is not _NONE}

    def writable(self, key: Any) -> Any:
        """See ``RowCells``."""
        found = self.get(key)
        if found is not None and key not in self._changed:
            self._changed[key] = found.copy()
        return found

    def put(self, key: Any, value: Any) -> None:
        """See ``RowCells``."""
        if key not in self._changed:
            self._changed[key] = self.get(key)
        self._young[key] = value

    def remove(self, key: Any) -> None:
        """See ``RowCells``."""
        if self.get(key) is not None:
            self.put(key, _NONE)

    def keys(self) -> Iterable[Any]:
        """See ``RowCells``."""
        return self._all_keys()

    def fetch(self, keys: Iterable[Any]) -> None:
        """Have ``keys`` in the young generation: those that are not in the cache are read together."""
        young, old, size = self._young, self._old, self._stored.size
        missing: dict[Any, None] = {}
        for key in keys:
            if key in young:
                continue
            found = old.pop(key, None)
            if found is None:
                missing[key] = None
                continue
            young[key] = found
            self.young_rows += 1 if found is _NONE else size(found)
        if missing:
            loaded = self._stored.load(list(missing))
            young.update({key: loaded.get(key, _NONE) for key in missing})
            self.young_rows += len(missing) - len(loaded) + sum(map(size, loaded.values()))

    def take_changes(self) -> list[tuple[Any, Any, Any]]:
        """Return what differs from the database: key, object there, object now (None: nothing). It is written now."""
        young, size = self._young, self._stored.size
        found = []
        for key, before in self._changed.items():
            now = young[key]
            now = None if now is _NONE else now
            found.append((key, before, now))
            had, has = (0 if one is None else size(one) for one in (before, now))
            self.rows_count += has - had
            self.young_rows += max(1, has) - max(1, had)
        self._changed = {}
        return found

    def age(self) -> None:
        """Give up what was not used since the last time. Called when there is no change to be taken."""
        assert not self._changed, "a change would be lost"
        self._old, self._young, self.young_rows = self._young, {}, 0
