"""Lasting harm to what is stored, and what a user with a backup does about it when an error says so.

Harm strikes while no process runs the pipeline, but for prepared output that vanishes under a running one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from headgate.codec.json_files import decode_hint, decode_log_entry
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.errors import BringOutputBack, CorruptionError, PutCheckpointsBack, Remedy, RestoreFiles
from headgate.model.manifest import Manifest
from headgate.sim.machine.disk import Disk, Stored
from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.product.history import History
from headgate.sim.product.settings import NAME


class Harm:
    """Does harm, and makes it good again."""

    def __init__(self, faults: Faults, rng: random.Random, disk: Callable[[str], Disk]) -> None:
        self._faults = faults
        self._rng = rng
        self._disk = disk
        self._backup: dict[tuple[str, str], Stored] = {}
        """What was harmed, by disk and path."""
        self._away: dict[str, Stored] | None = None

    def strike(self, history: History) -> None:
        """Perhaps harm the checkpoints; some are completed, and no process runs the pipeline."""
        if self._backup or self._away is not None:
            return
        if self._faults.strikes(Fault.AWAY):
            disk = self._disk("checkpoints")
            disk.tasks.world.tell("world", "the checkpoints are taken away")
            self._away, disk.objects = disk.objects, {}
        elif self._faults.strikes(Fault.DAMAGE):
            self._damage(history)

    def on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes: perhaps something that it promises is gone."""
        prepared = [(sink, name) for sink, names in sorted(files.items()) for name in sorted(names)]
        if prepared and not self._backup and self._faults.strikes(Fault.DENIED):
            sink, name = self._rng.choice(prepared)
            self._take(sink, SinkIdentity(NAME, sink).staged(name))

    def heed(self, remedy: Remedy | None) -> None:
        """Put back what is missing or damaged, if an error says so."""
        if isinstance(remedy, PutCheckpointsBack) and self._away is not None:
            self._disk("checkpoints").objects, self._away = self._away, None
        if isinstance(remedy, BringOutputBack | RestoreFiles):
            self.mend()

    def mend(self) -> None:
        """Put back what is missing or damaged, also what no process has needed since: a later checkpoint was there."""
        for (disk, path), stored in self._backup.items():
            self._disk(disk).objects[path] = stored
        self._backup.clear()

    def _damage(self, history: History) -> None:
        """Damage the newest completed checkpoint: its entry of the log, or a snapshot."""
        objects = self._disk("checkpoints").objects
        newest = history.standing[-1]
        entries = {path: _manifest(path, stored.data) for path, stored in objects.items() if "/log/" in path}
        found = [path for path, manifest in entries.items() if manifest is not None and manifest.checkpoint == newest]
        snapshots = [path for path in objects if f"/chk-{newest:010d}/" in path]
        path = self._rng.choice(sorted(found + snapshots))
        how = self._rng.choice(("flipped", "torn", "gone"))
        is_followed = any(path < other and manifest is not None for other, manifest in entries.items())
        if path in found and how == "gone" and (is_followed or not self._is_hinted(path)):
            how = "torn"  # nobody could tell that there was an entry, or that it was not pruned
        history.damaged.add(newest)
        self._disk("checkpoints").tasks.world.tell("world", f"{path} is {how}")
        data = objects[path].data
        self._take("checkpoints", path)
        if how == "flipped":
            at = self._rng.randrange(len(data))
            objects[path] = Stored(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif how == "torn":
            objects[path] = Stored(data[: self._rng.randrange(len(data))])

    def _is_hinted(self, path: str) -> bool:
        """Whether the note beside the log tells of this entry."""
        stored = self._disk("checkpoints").objects.get(f"{NAME}/log-hint")
        return stored is not None and decode_hint(stored.data, "log-hint") >= int(path.rsplit("/", 1)[1])

    def _take(self, disk: str, path: str) -> None:
        found = self._disk(disk).objects.pop(path, None)
        if found is not None:
            self._backup[disk, path] = found


def _manifest(path: str, data: bytes) -> Manifest | None:
    try:
        entry = decode_log_entry(data, path)
    except CorruptionError:
        return None
    return entry if isinstance(entry, Manifest) else None
