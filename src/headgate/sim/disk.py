"""The checkpoint storage of a simulated pipeline: snapshot files, and the write-once log of claims and manifests.

Models ``runtime.checkpoints.log`` operation by operation (same paths, same order of deletion, same hint), with faults
between them. Outlives every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import xxhash

from headgate.errors import StorageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.life import Life
from headgate.model.manifest import Claim, LogEntry, Manifest, StateHandle
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog
from headgate.sim import history
from headgate.sim.faults import Fault, Faults
from headgate.sim.history import Observer
from headgate.sim.world import World
from headgate.storage.reading import READS_MAX

Contents: TypeAlias = tuple[dict[str, bytes], dict[int, LogEntry], dict[int, str], int, CheckpointId, Life | None]
"""Everything that a disk holds."""


class Disk:
    """Files and the log."""

    def __init__(self, world: World, faults: Faults, observe: Observer) -> None:
        self._world = world
        self._faults = faults
        self._note = observe
        self.files: dict[str, bytes] = {}
        self.log: dict[int, LogEntry] = {}
        self.damaged_entries: dict[int, str] = {}
        self.hint = 0
        self.reserved = CheckpointId(0)
        self.life: Life | None = None
        self.on_power_cut: Callable[[], object] = self.cut_power
        self.stale: set[int] = set()
        """Where something was put although something followed already: it means nothing (X8)."""
        self._unsynced: dict[int, bool] = {}
        """Entries whose names are not durable, in order; whether each was the newest when it was put."""
        self.aside: set[CheckpointId] = set()
        """Checkpoints whose files are kept, because a start went back behind them (R51)."""
        self.aside_files: set[str] = set()
        self._bad_once: set[str] = set()

    def set_aside(self, restored: CheckpointId, below: CheckpointId) -> None:
        """Keep the files of the checkpoints between, whatever is swept later (R51)."""
        self.aside.update(CheckpointId(c) for c in range(restored + 1, below))
        self.aside_files.update(path for path in self.files if checkpoint_of(path) in self.aside)

    def take_away(self) -> Contents:
        """Remove everything, as one who wants to start over does; return it."""
        self._settle()
        self.stale = set()
        contents = (self.files, self.log, self.damaged_entries, self.hint, self.reserved, self.life)
        self.bring_back(({}, {}, {}, 0, CheckpointId(0), None))
        return contents

    def bring_back(self, contents: Contents) -> None:
        """Put back what was taken away."""
        self.files, self.log, self.damaged_entries, self.hint, self.reserved, self.life = contents

    def draw_life(self, life: Life) -> Life:
        """Return the life that is there; ``life``, if this is the very first start (LV1)."""
        self.life = self.life or life
        return self.life

    # -- snapshot files -----------------------------------------------------------------------------------------

    def write_snapshot(
        self, subtask: SubtaskId, checkpoint: CheckpointId, generation: Generation, data: bytes, inline_bytes_max: int
    ) -> StateHandle:
        """Make a snapshot durable.

        Raises:
            StorageError: before or after it took effect.
        """
        checksum = xxhash.xxh3_64_intdigest(data)
        if len(data) <= inline_bytes_max:
            handle = StateHandle(len(data), checksum, "", data)
        else:
            path = f"chk-{checkpoint:010d}/{subtask.vertex}-{subtask.index}.g{generation}"
            self._may_fail("put", path, Fault.PUT_FAILS)
            self.files[path] = data
            handle = StateHandle(len(data), checksum, path)
            self._may_fail("put", path, Fault.PUT_FAILS_AFTER)
        self._note(history.SnapshotWrote(generation, subtask, checkpoint, handle))
        return handle

    def read(self, handle: StateHandle) -> bytes | Damage:
        """Return the payload of ``handle``, or what is wrong with it.

        Raises:
            StorageError: it cannot be read now.
        """
        if not handle.path:
            return handle.inline
        self._may_fail("get", handle.path, Fault.GET_FAILS)
        found: bytes | Damage = b""
        for _ in range(READS_MAX):  # R50
            found = self._read_once(handle)
            if isinstance(found, bytes):
                break
        return found

    def _read_once(self, handle: StateHandle) -> bytes | Damage:
        if handle.path not in self._bad_once and self._faults.strikes(Fault.READ_BAD):
            self._bad_once.add(handle.path)  # the next read is good again
            return Damage(handle.path, "the read was bad")
        data = self.files.get(handle.path)
        if data is None:
            return Damage(handle.path, "the file is missing")
        if len(data) != handle.size_bytes or xxhash.xxh3_64_intdigest(data) != handle.checksum:
            return Damage(handle.path, "size or checksum differ")
        return data

    def delete(self, path: str) -> None:
        """Remove a file."""
        self.files.pop(path, None)

    def _may_fail(self, operation: str, path: str, fault: Fault) -> None:
        if self._faults.strikes(fault) or self._faults.is_storage_gone(self._world.now_ms):
            raise StorageError(operation, path, "injected")

    # -- the log ------------------------------------------------------------------------------------------------

    def put_if_absent(self, sequence: int, entry: LogEntry) -> bool:
        """Append ``entry`` at ``sequence`` unless that entry exists; return whether it was written.

        Either way what is there is durable (O11).

        Raises:
            StorageError: it may be there, and may go with the next power cut.
        """
        is_absent = sequence not in self.log
        if is_absent:
            self.log[sequence] = entry
            self._unsynced[sequence] = self.is_tail(sequence)
            if not self.is_tail(sequence):
                self.stale.add(sequence)
        self._sync()
        return is_absent

    def _sync(self) -> None:
        """Make every name in the log durable; only then an observer may rely on an entry."""
        if self._unsynced and self._faults.is_sync_failing(self._world.now_ms):
            if self._faults.strikes(Fault.POWER_CUT):
                self._world.at(self._faults.looks.randint(0, 60), self._lose_power)
            raise StorageError("sync", "log", "injected")
        self._settle()

    def _settle(self) -> None:
        unsynced, self._unsynced = self._unsynced, {}
        for sequence, was_tail in unsynced.items():
            entry = self.log.get(sequence)
            if isinstance(entry, Claim) and was_tail:
                self._note(history.ClaimAppended(sequence, entry.generation, entry.owner))
            elif isinstance(entry, Manifest) and was_tail:
                self._note(history.ManifestAppended(sequence, entry))

    def _lose_power(self) -> None:
        self.on_power_cut()

    def cut_power(self) -> int:
        """Forget what was not synced; return how many entries that were."""
        lost = [sequence for sequence in self._unsynced if self.log.pop(sequence, None) is not None]
        self._unsynced.clear()
        return len(lost)

    def is_tail(self, sequence: int) -> bool:
        """Whether nothing follows ``sequence``. Asked after each append (X8).

        A writer that was stopped for long may have filled a number that was used and pruned meanwhile: then newer
        entries exist, and its own means nothing.
        """
        return max(self.log) == sequence

    def take_back(self, sequence: int) -> None:
        """Remove an entry that was put where something follows already, unless it counts (X8)."""
        if sequence not in {entry.sequence for entry in self._observed().counted()}:
            self.remove(sequence)

    def remove(self, sequence: int) -> None:
        """Remove an entry."""
        self.log.pop(sequence, None)
        self.damaged_entries.pop(sequence, None)

    def newer_generation(self, sequence: int, mine: Generation) -> Generation | None:
        """Return the generation that replaced ``mine``, whose newest entry is at ``sequence``, or None (R40).

        Raises:
            StorageError
        """
        self._may_fail("list", "log", Fault.GET_FAILS)
        found = [e.generation for s, e in self.log.items() if s > sequence and s not in self.damaged_entries]
        return max((generation for generation in found if generation > mine), default=None)

    def write_hint(self, sequence: int) -> None:
        """Note the newest sequence, best effort."""
        if not self._faults.strikes(Fault.HINT_FAILS):
            self.hint = sequence

    def observe(self) -> ObservedLog:
        """Read the whole log.

        Raises:
            StorageError
        """
        self._may_fail("list", "log", Fault.GET_FAILS)
        return self._observed()

    def _observed(self) -> ObservedLog:
        entries = []
        for sequence in sorted(self.log):
            path = f"log/{sequence:010d}"
            problem = self.damaged_entries.get(sequence)
            content = self.log[sequence] if problem is None else Damage(path, problem)
            entries.append(ObservedEntry(sequence, path, content))
        return ObservedLog(tuple(entries), self.reserved, self.hint)

    def reserve(self, checkpoint: CheckpointId) -> None:
        """Record that ``checkpoint`` is in use; whoever does looks at the log afterwards (R42).

        Raises:
            StorageError
        """
        self._may_fail("put", f"ids/{checkpoint:010d}", Fault.RESERVE_FAILS)
        self.reserved = max(self.reserved, checkpoint)

    def verify(self, manifest: Manifest) -> list[Damage]:
        """Return what is wrong with the files of ``manifest``.

        Raises:
            StorageError
        """
        found = (self.read(entry.handle) for entry in manifest.entries)
        return [problem for problem in found if isinstance(problem, Damage)]

    def drop(self, checkpoint: CheckpointId, log_start: int) -> None:
        """Remove the files of everything up to ``checkpoint``, and the log before the oldest retained manifest.

        Not only those of ``checkpoint``: a write whose error came after its effect left a file that nobody knows.
        """
        self.sweep((), CheckpointId(checkpoint + 1))
        for sequence in sorted(self.log):
            if sequence < log_start:
                self.remove(sequence)

    def sweep(self, keep: tuple[CheckpointId, ...], below: CheckpointId) -> None:
        """Remove files of checkpoints below ``below`` that are not kept: leftovers of dead generations."""
        for path in list(self.files):
            checkpoint = checkpoint_of(path)
            if checkpoint < below and checkpoint not in keep and checkpoint not in self.aside:
                self.delete(path)

    # -- the simulator's own view -------------------------------------------------------------------------------

    def manifests(self) -> tuple[Manifest, ...]:
        """Return the manifests that are there, damaged or not, oldest first."""
        return tuple(e for _, e in sorted(self.log.items()) if isinstance(e, Manifest))

    def sound(self) -> tuple[CheckpointId, ...]:
        """Return the completed checkpoints that are whole, oldest first."""
        return tuple(
            m.checkpoint for s, m in sorted(self.log.items()) if isinstance(m, Manifest) and self._is_sound(s, m)
        )

    def _is_sound(self, sequence: int, manifest: Manifest) -> bool:
        if sequence in self.damaged_entries:
            return False
        for entry in manifest.entries:
            handle = entry.handle
            if handle.path:
                data = self.files.get(handle.path)
                if data is None or xxhash.xxh3_64_intdigest(data) != handle.checksum:
                    return False
        return True


def checkpoint_of(path: str) -> CheckpointId:
    """Return the checkpoint whose directory ``path`` is in."""
    return CheckpointId(int(path[4:14]))
