"""Simulated disks, and stores on them: slow, failing before and after an effect, forgetful at a power cut.

A ``Disk`` is what is stored; a ``SimStorage`` is the way of one process to it, with the interface of
``storage.base.Storage``. Every operation parks: a process may die before it and after it, others act in between.
A store has its chunks on a disk; its catalogue is the product's own SQL, in memory. A verb is atomic, and durable when
it took effect; its answer may be lost (docs/spec/stream-store.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

from headgate.dataclass import dataclass
from headgate.errors import StorageError
from headgate.sim.machine.surroundings import SimThreads
from headgate.sim.machine.tasks import Tasks
from headgate.sim.machine.world import Fault, Faults
from headgate.storage.base import AlreadyExists, Bytes, NotFound, checked_path, checked_prefix
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.store import Store

SNAPSHOTS = "/chk-"
"""In the path of every file of a snapshot."""

STEP_MS = 4
"""Usual time of one operation, at most."""


@dataclass(slots=True)
class Stored:
    """An object, and whether it survives a power cut."""

    data: bytes
    is_durable: bool = True


Watcher: TypeAlias = Callable[[str, bytes | None], None]
"""Hears of every change: what a path holds now, or None when it is gone. Power cuts and damage are no changes."""


class Disk:
    """Objects by path."""

    def __init__(self, tasks: Tasks, faults: Faults, name: str) -> None:
        self.tasks = tasks
        self.faults = faults
        self.name = name
        self.objects: dict[str, Stored] = {}
        self.watchers: list[Watcher] = []
        self.is_afar = False
        """Whether each request travels: readers of the store fetch ahead."""
        self.names = random.Random(f"names on {name}")
        """Names are random, and decide nothing: they have a stream of their own."""

    def write(self, path: str, stored: Stored) -> None:
        """Have ``path`` hold ``stored``."""
        self.objects[path] = stored
        for watch in self.watchers:
            watch(path, stored.data)

    def remove(self, path: str) -> Stored | None:
        """Forget ``path``; return what it held."""
        found = self.objects.pop(path, None)
        if found is not None:
            for watch in self.watchers:
                watch(path, None)
        return found

    def cut_power(self) -> None:
        """Forget what was never synced."""
        self.objects = {path: stored for path, stored in self.objects.items() if stored.is_durable}

    def forget_past(self, prefix: str) -> None:
        """Remove all that lie below ``prefix`` but for the last one, where that is what the rules leave there."""
        for path in sorted(path for path in self.objects if path.startswith(prefix))[:-1]:
            del self.objects[path]

    def paths(self, prefix: str) -> list[str]:
        """Return the paths below ``prefix``, for checkers: no time passes."""
        return sorted(path for path in self.objects if path.startswith(f"{prefix}/") or not prefix)


class SimStorage:
    """One process's way to a disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def url(self) -> str:
        """``sim://<disk>``."""
        return f"sim://{self._disk.name}"

    @property
    def puts_may_land_late(self) -> bool:
        return self._disk.faults.puts_land_late

    @property
    def is_afar(self) -> bool:
        return self._disk.is_afar

    @property
    def uploads(self) -> None:
        return None

    def draw_name(self, size_bytes: int) -> str:
        """See ``Storage``; no two of one disk are equal."""
        return self._disk.names.randbytes(size_bytes).hex()

    def put(self, path: str, parts: Iterable[Bytes]) -> None:
        data = b"".join(parts)
        self._begin("put", checked_path(path), Fault.PUT_FAILS)
        if SNAPSHOTS in path and self._disk.faults.strikes(Fault.PART_FAILS):
            raise StorageError("put", path, "injected", is_transient=True)
        self._may_land_late("put", path, lambda: self._disk.write(path, Stored(data)))
        self._store(path, data)

    def put_if_absent(self, path: str, parts: Iterable[Bytes]) -> None:
        data = b"".join(parts)
        self._begin("put_if_absent", checked_path(path), Fault.PUT_FAILS)
        if path in self._disk.objects:
            self._sync(path)
            raise AlreadyExists(path)
        self._may_land_late("put_if_absent", path, lambda: self._land_if_absent(path, data))
        self._store(path, data)

    def get(self, path: str) -> bytes:
        self._begin("get", checked_path(path), Fault.GET_FAILS)
        stored = self._disk.objects.get(path)
        if stored is None:
            raise NotFound(path)
        self._sync(path)
        if stored.data and self._disk.faults.strikes(Fault.BAD_READ):
            return bytes([stored.data[0] ^ 1]) + stored.data[1:]
        return stored.data

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        return self.get(path)[offset : offset + size_bytes]

    def make_durable(self, path: str) -> None:
        if path not in self._disk.objects:
            raise NotFound(path)
        self._sync(path)

    def list(self, prefix: str) -> list[str]:
        base = checked_prefix(prefix)
        self._begin("list", base, Fault.GET_FAILS)
        found = self._disk.paths(base)
        for path in found:
            self._sync(path)
        return found

    def delete(self, path: str) -> None:
        self._begin("delete", checked_path(path), Fault.PUT_FAILS)
        self._disk.remove(path)

    def rename_if_absent(self, source: str, target: str) -> None:
        """See ``Storage``. If the sync of its directory fails, a local file has both names, one of them not durable."""
        self._begin("rename", checked_path(source), Fault.PUT_FAILS)
        found, there = self._disk.objects.get(source), self._disk.objects.get(checked_path(target))
        if found is None:
            raise NotFound(source)
        if there is not None and there.data is not found.data:
            raise AlreadyExists(target)
        if not self._disk.faults.puts_land_late and self._disk.faults.strikes(Fault.SYNC_FAILS):
            if there is None:
                self._disk.write(target, Stored(found.data, is_durable=False))
            raise StorageError("sync", target, "injected", is_transient=True)
        self._disk.remove(source)
        self._disk.write(target, Stored(found.data))
        self._after("rename", target)

    def sweep_unfinished(self, prefix: str = "") -> int:
        """See ``Storage.sweep_unfinished``: what is torn stands under its own name."""
        return 0

    def _begin(self, operation: str, path: str, fault: Fault) -> None:
        faults, tasks = self._disk.faults, self._disk.tasks
        tasks.park(faults.delay_ms(STEP_MS))
        if faults.strikes(fault) or faults.is_storage_gone(tasks.world.now_ms):
            raise StorageError(operation, path, "injected", is_transient=True)

    def _may_land_late(self, operation: str, path: str, land: Callable[[], None]) -> None:
        """An object store that answers too late: the caller gets an error, and the effect comes some time after it."""
        faults, tasks = self._disk.faults, self._disk.tasks
        if faults.puts_land_late and faults.strikes(Fault.PUT_LANDS_LATE):
            tasks.world.at(tasks.world.random.randint(0, 400), land)
            raise StorageError(operation, path, "injected time-out", is_transient=True)

    def _land_if_absent(self, path: str, data: bytes) -> None:
        if path not in self._disk.objects:
            self._disk.write(path, Stored(data))

    def _sync(self, path: str) -> None:
        """What is shown is durable."""
        stored = self._disk.objects[path]
        if not stored.is_durable and self._disk.faults.strikes(Fault.SYNC_FAILS):
            raise StorageError("sync", path, "injected", is_transient=True)
        stored.is_durable = True

    def _store(self, path: str, data: bytes) -> None:
        """Local files: written and visible; only if the directory's sync fails they are not durable."""
        stored = Stored(data)
        self._disk.write(path, stored)
        if not self._disk.faults.puts_land_late and self._disk.faults.strikes(Fault.SYNC_FAILS):
            stored.is_durable = False
            raise StorageError("sync", path, "injected", is_transient=True)
        self._after("put", path)

    def _after(self, operation: str, path: str) -> None:
        faults, tasks = self._disk.faults, self._disk.tasks
        if faults.strikes(Fault.PUT_FAILS_AFTER):
            raise StorageError(operation, path, "injected after its effect", is_transient=True)
        tasks.pass_turn()


VERB_MS = 3
"""Usual time of one verb, at most."""

_AT_ONCE = ("path", "version", "close", "audit", "is_untouched")
"""What takes no time, and what only a reader at the end does."""
_ASKS = {
    *("find_stream", "describe_stream", "list_streams", "layout", "find_append", "parts", "frontier", "begin"),
    *("transactions", "owner", "chunk_paths", "extents", "cut_at", "holds", "retention_cut"),
    *("look", "layout_and_extents", "passed", "observe"),
    *("find_group", "groups", "group_cuts", "group_unread", "find_shared", "known_chunks"),
}
"""Verbs that change nothing, so that a lost answer means nothing."""


class SimCatalogue:
    """One process's way to a catalogue: every verb of ``base.Catalogue``, slow and failing before and after it."""

    def __init__(self, disk: Disk, inner: Catalogue) -> None:
        self._disk = disk
        self._inner = inner

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._inner, verb)
        return found if verb in _AT_ONCE else lambda *args, **kwargs: self._run(verb, lambda: found(*args, **kwargs))

    def _run(self, verb: str, call: Callable[[], Any]) -> Any:
        faults, tasks = self._disk.faults, self._disk.tasks
        tasks.park(faults.delay_ms(VERB_MS))
        fails = faults.strikes(Fault.GET_FAILS if verb in _ASKS else Fault.PUT_FAILS)
        if fails or faults.is_storage_gone(tasks.world.now_ms):
            raise StorageError(verb, self._inner.path, "injected", is_transient=True)
        answer = call()
        if verb not in _ASKS and faults.strikes(Fault.PUT_FAILS_AFTER):
            raise StorageError(verb, self._inner.path, "injected after its effect", is_transient=True)
        tasks.pass_turn()
        return answer


class SimStores:
    """The stores of one run, by name; ``open`` is for ``location.OPENERS``."""

    def __init__(self, disk: Callable[[str], Disk], watched: Callable[[Catalogue], Catalogue] = lambda x: x) -> None:
        """``watched`` gives what stands in front of a catalogue: a user who hears what takes effect."""
        self._disk = disk
        self._watched = watched
        self._catalogues: dict[str, Catalogue] = {}
        self._names_count = 0
        self.wall_shift_ms = 0
        """By how much a user has set the date for those who open a store from now on."""

    def asking(self) -> str:
        """Return the process that asks for what happens now."""
        return self._disk("store").tasks.current.process.name

    def direct_catalogue(self, name: str) -> Catalogue:
        """Return the catalogue of a store, as no client sees it: at once, and without faults."""
        if name not in self._catalogues:
            self._catalogues[name] = self._watched(memory_catalogue(f"sim://{name}"))
        return self._catalogues[name]

    def open(self, name: str) -> Store:
        """Return a process's way to the store at ``sim://<name>``."""
        disk = self._disk(name)
        catalogue = cast(Catalogue, SimCatalogue(disk, self.direct_catalogue(name)))
        here = SimThreads(disk.tasks.current.process, disk.tasks)
        here.wall_shift_ms = self.wall_shift_ms
        return Store(f"sim://{name}", catalogue, SimStorage(disk), new_name=self.new_name, threads=here, clock=here)

    def new_name(self) -> str:
        """Return a name that nothing has."""
        self._names_count += 1
        return f"{self._names_count:032x}"
