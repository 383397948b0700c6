"""The stream store in the machine room: chunks on a simulated disk, and a catalogue that outlives processes.

The catalogue is the product's own SQL, in memory, one for each store. A verb is atomic, and durable when it took
effect; before it and after it a process may die, others act in between, and its answer may be lost (CT7 of
docs/spec/stream-store.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from headgate.errors import StorageError
from headgate.sim.machine.disk import Disk, SimStorage
from headgate.sim.machine.faults import Fault
from headgate.sim.machine.surroundings import SimThreads
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.store import Store

STEP_MS = 3
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

    def __init__(self, disk: Disk, behind: Catalogue) -> None:
        self._disk = disk
        self._behind = behind

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._behind, verb)
        return found if verb in _AT_ONCE else lambda *args, **kwargs: self._run(verb, lambda: found(*args, **kwargs))

    def _run(self, verb: str, call: Callable[[], Any]) -> Any:
        faults, tasks = self._disk.faults, self._disk.tasks
        tasks.park(faults.delay_ms(STEP_MS))
        fails = faults.strikes(Fault.GET_FAILS if verb in _ASKS else Fault.PUT_FAILS)
        if fails or faults.is_storage_gone(tasks.world.now_ms):
            raise StorageError(verb, self._behind.path, "injected", is_transient=True)
        answer = call()
        if verb not in _ASKS and faults.strikes(Fault.PUT_FAILS_AFTER):
            raise StorageError(verb, self._behind.path, "injected after its effect", is_transient=True)
        tasks.pass_turn()
        return answer


class SimStores:
    """The stores of one run, by name; ``open`` is for ``store.OPENERS``."""

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

    def behind(self, name: str) -> Catalogue:
        """Return the catalogue of a store, as no client sees it: at once, and without faults."""
        if name not in self._catalogues:
            self._catalogues[name] = self._watched(memory_catalogue(f"sim://{name}"))
        return self._catalogues[name]

    def open(self, name: str) -> Store:
        """Return a process's way to the store at ``sim://<name>``."""
        disk = self._disk(name)
        catalogue = cast(Catalogue, SimCatalogue(disk, self.behind(name)))
        here = SimThreads(disk.tasks.current.process, disk.tasks)
        here.wall_shift_ms = self.wall_shift_ms
        return Store(f"sim://{name}", catalogue, SimStorage(disk), new_name=self.new_name, threads=here, clock=here)

    def new_name(self) -> str:
        """Return a name that nothing has."""
        self._names_count += 1
        return f"{self._names_count:032x}"
