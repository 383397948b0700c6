"""Objects by key with copy-on-write freeze: what the backends that look at keys one by one are made of (ST5)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headgate.state.memory.change_tracking import ChangedKeys, Interval, KeyChanges

_REMOVED = object()
"""In an overlay: the key was removed since the barrier."""


class FrozenCells:
    """The objects of one state at a barrier. ``objects`` does not change until ``is_released``."""

    def __init__(self, objects: dict[Any, Any], changes: KeyChanges) -> None:
        """``changes``: the keys that changed before it."""
        self.objects = objects
        self.changes = changes
        self.is_released = False

    def release(self) -> None:
        """The snapshot is not needed any more: the objects may change again."""
        self.objects, self.changes = {}, KeyChanges()
        self.is_released = True


class MemoryCells:
    """One state: see ``backend.RowCells``."""

    def __init__(self, interval: Interval | None = None) -> None:
        """``interval``: what changes is noted by it (MC2); None: not tracked."""
        self._changes = None if interval is None else ChangedKeys(interval)
        self._changed: dict[Any, None] | None = None
        self._base: dict[Any, Any] = {}
        self._overlay: dict[Any, Any] | None = None
        self._frozen: list[weakref.ref[FrozenCells]] = []

    def get(self, key: Any) -> Any:
        """See ``RowCells``."""
        if self._overlay is not None:
            value = self._overlay.get(key)
            if value is not None:
                return None if value is _REMOVED else value
        return self._base.get(key)

    def writable(self, key: Any) -> Any:
        """See ``RowCells``."""
        if self._changed is not None:
            self._changed[key] = None
        overlay = self._overlay
        if overlay is None:
            return self._base.get(key)
        value = overlay.get(key)
        if value is None:
            value = self._base.get(key)
            if value is not None:
                value = overlay[key] = value.copy()
        return None if value is _REMOVED else value

    def put(self, key: Any, value: Any) -> None:
        """See ``RowCells``."""
        if self._changed is not None:
            self._changed[key] = None
        self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        """Have ``value`` in the place of one that is written in the same way."""
        (self._base if self._overlay is None else self._overlay)[key] = value

    def get_all(self, keys: Iterable[Any]) -> dict[Any, Any]:
        """Return the objects of those of ``keys`` that have one."""
        if self._overlay is None:
            base = self._base
            return {key: found for key in keys if (found := base.get(key)) is not None}
        return {key: found for key in keys if (found := self.get(key)) is not None}

    def put_all(self, objects: Mapping[Any, Any]) -> None:
        """Set the objects of several keys."""
        if self._changed is not None:
            self._changed.update(dict.fromkeys(objects))
        (self._base if self._overlay is None else self._overlay).update(objects)

    def remove(self, key: Any) -> None:
        """See ``RowCells``."""
        if self._changed is not None and self.get(key) is not None:
            self._changed[key] = None
        if self._overlay is None:
            self._base.pop(key, None)
        elif key in self._base:
            self._overlay[key] = _REMOVED
        else:
            self._overlay.pop(key, None)

    def keys(self) -> Iterator[Any]:
        """See ``RowCells``."""
        overlay = self._overlay or {}
        yield from (key for key in self._base if key not in overlay)
        yield from (key for key, value in overlay.items() if value is not _REMOVED)

    def absorb(self) -> None:
        """Once all snapshots are released, or were dropped, put the overlay back.

        All, not only the latest: an older one may share lists and dicts of keys that did not change in between.
        """
        if self._changes is not None:
            self._changed = self._changes.bounded(len(self._base))
        if self._overlay is None:
            return
        self._frozen = [ref for ref in self._frozen if (cells := ref()) is not None and not cells.is_released]
        if not self._frozen:
            self._merge_into(self._base)
            self._overlay = None

    def freeze(self) -> FrozenCells:
        """Put the objects aside. Copies the dict only when a snapshot before is still held (ST5)."""
        self.absorb()
        if self._overlay is not None:
            self._base = dict(self._base)
            self._merge_into(self._base)
        frozen = FrozenCells(self._base, KeyChanges() if self._changes is None else self._changes.freeze())
        self._changed = None if self._changes is None else self._changes.now
        self._overlay = {}
        self._frozen.append(weakref.ref(frozen))
        return frozen

    def track_changes(self) -> None:
        """Everything that there is was restored from a snapshot that the next one may refer to (MC7)."""
        assert self._changes is not None
        self._changes.start()
        self._changed = self._changes.now

    def _merge_into(self, target: dict[Any, Any]) -> None:
        assert self._overlay is not None
        for key, value in self._overlay.items():
            if value is _REMOVED:
                target.pop(key, None)
            else:
                target[key] = value
