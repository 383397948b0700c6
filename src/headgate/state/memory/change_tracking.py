"""Tracking of what changed since a snapshot, and objects by key with copy-on-write freeze.

Time is counted in *intervals*: one ends with each freeze, and the snapshot at its end has its number. So "what
changed since snapshot 7" is what changed in an interval after 7, however many snapshots failed or are still being
written. Each state knows on its own since when it knows what has changed. Counterparts:
``incremental_snapshot``, which says since which snapshot, and the backends, which note each change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from headgate.dataclass import dataclass
from headgate.state.key_index import Slots
from headgate.state.values import Array
from headgate.state.vectors import SlotArray

KEYS_FREE = 4_096
"""So many changed keys may always be remembered; else at most half as many as there are."""


def are_too_many(changed_count: int, keys_count: int) -> bool:
    """Whether so much has changed that a snapshot of all ``keys_count`` keys is hardly more."""
    return changed_count > max(keys_count // 2, KEYS_FREE)


class Interval:
    """In which interval the states of one operator are.

    Attributes:
        number: of the interval. What was restored is of number 0, as if it had been there before everything.
        needed_since: changes in intervals up to this one are not needed. Set by the thread that writes snapshots.
    """

    def __init__(self) -> None:
        self.number = 0
        self.needed_since = 0


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """When each slot had last changed at a barrier.

    Attributes:
        intervals: by slot, -1 if nothing was ever there.
        known_since: only from a snapshot of this number, or of a later one, it is known what has changed since.
    """

    intervals: Array
    known_since: int

    def after(self, interval: int) -> Slots | None:
        """Return the slots that changed after the snapshot of ``interval``; None: unknown."""
        return None if interval < self.known_since else np.flatnonzero(self.intervals > interval)


class ChangedSlots:
    """The interval in which each slot last changed: four bytes for each, written together with the state."""

    def __init__(self, interval: Interval, known_since: int = 0) -> None:
        """``known_since``: see ``SlotChanges``."""
        self._interval = interval
        self._known_since = known_since
        self._in = SlotArray(np.int32, -1)

    def mark(self, slots: Slots, size: int) -> None:
        """``slots`` changed now; ``size`` exceeds every slot."""
        self._in.written(size)[slots] = self._interval.number

    def freeze(self, size: int) -> SlotChanges:
        """Return when each slot last changed."""
        return SlotChanges(self._in.freeze(size), self._known_since)

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 … What was removed before has no slot any more."""
        self._in.renumber(old)
        self._known_since = self._interval.number

    def start_over(self) -> ChangedSlots:
        """Return the changes of slots that were all renumbered: the next snapshot has everything."""
        return ChangedSlots(self._interval, self._interval.number)


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Which keys had changed at a barrier. Immutable.

    Attributes:
        by_interval: the keys that changed in each, as far as they are needed.
        known_since: see ``SlotChanges``.
    """

    by_interval: tuple[tuple[int, dict[Any, None]], ...] = ()
    known_since: int = 0

    def after(self, interval: int) -> dict[Any, None] | None:
        """Return the keys that changed after the snapshot of ``interval``, as they first did; None: unknown."""
        if interval < self.known_since:
            return None
        found: dict[Any, None] = {}
        for number, keys in self.by_interval:
            if number > interval:
                found.update(keys)
        return found


class ChangedKeys:
    """The keys that changed, by interval. Nothing is noted before there is a snapshot to which it would matter.

    Attributes:
        now: those of this interval, to which its owner adds them; None: all.
    """

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._known_since = 0
        self._before: list[tuple[int, dict[Any, None]]] = []
        self._before_count = 0
        self.now: dict[Any, None] | None = None

    def start(self) -> None:
        """What was restored is in a snapshot: note what changes from now on."""
        assert not self._before, "tracking starts with a restore, before the first snapshot"
        self.now = {}

    def bounded(self, keys_count: int) -> dict[Any, None] | None:
        """Return ``now``; give up if so much has changed that a snapshot of all ``keys_count`` keys is hardly more."""
        if self.now is not None and are_too_many(self._before_count + len(self.now), keys_count):
            self._before, self._before_count, self.now = [], 0, None
            self._known_since = self._interval.number
        return self.now

    def freeze(self) -> KeyChanges:
        """Return what changed in this interval and in those before it, as far as they are needed."""
        # in the order of intervals: ``after`` relies on it for the order of keys
        assert not self._before or self._before[-1][0] < self._interval.number, "an interval ends once"
        if self.now is not None:
            self._before.append((self._interval.number, self.now))
        self._before = [found for found in self._before if found[0] > self._interval.needed_since]
        self._before_count = sum(len(keys) for _, keys in self._before)
        self.now = {}
        return KeyChanges(tuple(self._before), self._known_since)


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
        """``interval``: what changes is noted by it; None: not tracked."""
        self._changes = None if interval is None else ChangedKeys(interval)
        self._changed: dict[Any, None] | None = None
        self._base: dict[Any, Any] = {}
        self._overlay: dict[Any, Any] | None = None
        self._frozen: list[weakref.ref[FrozenCells]] = []

    def get(self, key: Any) -> Any:
        if self._overlay is not None:
            value = self._overlay.get(key)
            if value is not None:
                return None if value is _REMOVED else value
        return self._base.get(key)

    def writable(self, key: Any) -> Any:
        if self._changed is not None:
            self._changed[key] = None
        overlay = self._overlay
        if overlay is None:
            # no snapshot holds it: it may be changed in place
            return self._base.get(key)
        value = overlay.get(key)
        if value is None:
            value = self._base.get(key)
            if value is not None:
                value = overlay[key] = value.copy()
        return None if value is _REMOVED else value

    def put(self, key: Any, value: Any) -> None:
        if self._changed is not None:
            self._changed[key] = None
        self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        """Have ``value`` in the place of one that is written in the same way."""
        (self._base if self._overlay is None else self._overlay)[key] = value

    def remove(self, key: Any) -> None:
        if self._changed is not None and self.get(key) is not None:
            self._changed[key] = None
        if self._overlay is None:
            self._base.pop(key, None)
        elif key in self._base:
            # hidden, not removed: a snapshot still reads the base
            self._overlay[key] = _REMOVED
        else:
            self._overlay.pop(key, None)

    def keys(self) -> Iterator[Any]:
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
        """Put the objects aside. Copies the dict only when a snapshot before is still held."""
        self.absorb()
        if self._overlay is not None:
            # a former snapshot still reads the base: it stays as it is, and this one gets a copy with all changes
            self._base = dict(self._base)
            self._merge_into(self._base)
        # before the new overlay: what changes from now on belongs to the next snapshot
        frozen = FrozenCells(self._base, KeyChanges() if self._changes is None else self._changes.freeze())
        self._changed = None if self._changes is None else self._changes.now
        self._overlay = {}
        self._frozen.append(weakref.ref(frozen))
        return frozen

    def track_changes(self) -> None:
        """Everything that there is was restored from a snapshot that the next one may refer to."""
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
