"""State of one subtask that goes through a checkpoint as it really is: files of a backend, and parts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from headgate.codec.snapshot import FILES_PREFIX
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.operators.base import KeyedOperator, RestoredState
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state.backend import Ownership
from headgate.state.snapshot import FrozenState, OwnedKeys, StoredFiles, is_description
from headgate.state.worker_backends import portable_rows
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage

NODE = "node"


class Written:
    """What a subtask left in a checkpoint of its state."""

    def __init__(
        self,
        storage: Storage,
        parts: Sequence[SnapshotPart],
        index: int = 0,
        parallelism: int = 1,
        groups: int = 128,
        pipeline: str = "p",
    ) -> None:
        self.storage, self.parts, self.pipeline = storage, tuple(parts), pipeline
        self.index, self.parallelism, self.groups = index, parallelism, groups

    @property
    def files(self) -> list[SnapshotPart]:
        """The files of a database."""
        return [part for part in self.parts if part.section.startswith(FILES_PREFIX) and not is_description(part)]

    @property
    def paths(self) -> set[str]:
        """Where these are."""
        return {part.path for part in self.files}

    @property
    def counted(self) -> dict[str, int]:
        """How many rows the files have, as the manifest says."""
        (told,) = [part for part in self.parts if part.section.startswith(FILES_PREFIX) and is_description(part)]
        return dict((told.rows or {})[NODE])

    def stored(self) -> StoredFiles:
        """Return them as a restore has them."""
        found = [part for part in self.parts if part.section.startswith(FILES_PREFIX)]
        read = partial(read_part, self.storage, self.pipeline)
        return StoredFiles(found, read, f"files of '{NODE}'", self.pipeline)

    def states(self, index: int, parallelism: int) -> list[RestoredState]:
        """Return what the operator of another subtask restores of it (R15)."""
        if parallelism == self.parallelism and index != self.index:
            return []
        owned = key_groups_of_subtask(index, self.groups, parallelism)
        mine = KeyGroups(owned.start, len(owned))
        found: list[RestoredState] = []
        for part in self.parts:
            if part.key_groups is not None and not part.key_groups.overlaps(mine):
                continue
            read = partial(read_part, self.storage, self.pipeline, part)
            if not part.section.startswith(FILES_PREFIX):
                found.append(RestoredState(self.index, self.parallelism, read))
            elif is_description(part):
                stored = self.stored()
                groups = mine if part.key_groups is None else part.key_groups.common(mine)
                readers = portable_rows(stored, None, groups)
                found += [RestoredState(self.index, self.parallelism, one, True, stored) for one in readers]
        return found


class Moved(Written):
    """The same of state that is written now."""

    def __init__(
        self,
        frozen: FrozenState,
        index: int = 0,
        parallelism: int = 1,
        groups: int = 128,
        *,
        checkpoint: int = 1,
        shared: SharedFiles | None = None,
        storage: Storage | None = None,
        pipeline: str = "p",
    ) -> None:
        """``shared``: what it may refer to; the checkpoint is completed at once."""
        to_storage = storage or MemoryStorage("moved")
        owned = key_groups_of_subtask(index, groups, parallelism)
        keys = OwnedKeys(KeyGroups(owned.start, len(owned)), groups)
        to = SnapshotDestination(to_storage, pipeline, Generation(1), 1_000, keys)
        shareable = () if shared is None else shared.shareable()
        number = CheckpointId(checkpoint)
        target = SubtaskTarget(to, SubtaskId(VertexId(NODE), index), number, shareable)
        target.put_state(NODE, frozen)
        super().__init__(to_storage, target.finish(), index, parallelism, groups, pipeline)
        frozen.release()
        if shared is not None:
            shared.wrote(number, [part for part in self.parts if part.section.startswith(FILES_PREFIX)])
            shared.completed(number)


class _Restoring(KeyedOperator):
    def __init__(self, backend: Any, owner: Ownership) -> None:
        self._backend = backend
        self.context = SimpleNamespace(  # type: ignore[assignment]
            node=NODE,
            max_parallelism=owner.max_parallelism,
            parallelism=owner.parallelism,
            subtask_index=owner.subtask_index,
        )
        self.went_on = 0

    def _goes_on_with(self, files: StoredFiles, owner: Ownership) -> bool:
        found = super()._goes_on_with(files, owner)
        self.went_on += found
        return found


def restore(backend: Any, moved: Sequence[Written], index: int = 0, parallelism: int = 1) -> bool:
    """Have ``backend`` restore what subtasks wrote; return whether it went on with files."""
    operator = _Restoring(backend, Ownership(moved[0].groups, parallelism, index))
    operator.restore([state for one in moved for state in one.states(index, parallelism)])
    if hasattr(backend, "end_restore"):
        backend.end_restore()
    return bool(operator.went_on)
