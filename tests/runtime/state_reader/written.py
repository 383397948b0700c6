"""Checkpoints with chosen state in a directory, written as subtasks write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headgate.codec.snapshot import FINISHED_PREFIX, POSITIONS_PREFIX, STATE_PREFIX
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import Committable, KeyGroups, Manifest, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state.snapshot import FrozenState, OwnedKeys
from headgate.storage.urls import open_storage

MAX = 128


@dataclass(frozen=True)
class Part:
    """What one subtask writes: states by prefix and node."""

    states: Mapping[tuple[str, str], FrozenState] = field(default_factory=dict)
    positions: Mapping[str, bytes] = field(default_factory=dict)
    committables: Sequence[Committable] = ()


class Written:
    """The checkpoints of pipeline ``p`` below ``root``. Parts go to files, but for ``inline_bytes_max`` of each."""

    def __init__(self, root: Path, *, inline_bytes_max: int = 0) -> None:
        self.root = root
        self.path = root / "p"
        self._inline_bytes_max = inline_bytes_max
        self.log = CheckpointLog(open_storage(str(root)), "p")
        self.log.claim("a test", 0)

    def complete(
        self, checkpoint: int, texts: Mapping[str, str], parts: Sequence[Part], *, vertex: str = "node"
    ) -> Manifest:
        """Write and complete a checkpoint; ``parts`` are those of subtasks 0, 1, … of one vertex."""
        entries = [self._entry(checkpoint, SubtaskId(VertexId(vertex), i), p, len(parts)) for i, p in enumerate(parts)]
        manifest = Manifest(
            CheckpointId(checkpoint), self.log.generation, len(parts), MAX, tuple(entries), state_texts=dict(texts)
        )
        assert self.log.append(manifest, CheckpointId(checkpoint)) is Outcome.WRITTEN
        return manifest

    def newest(self) -> Manifest:
        """Return the newest manifest."""
        return candidates(self.log.observe())[0]

    def complete_parts(self) -> Sequence[SnapshotPart]:
        """Return the parts of the newest checkpoint."""
        return self.newest().parts

    def _entry(self, checkpoint: int, subtask: SubtaskId, part: Part, parallelism: int) -> SubtaskEntry:
        owned = key_groups_of_subtask(subtask.index, MAX, parallelism)
        keys = OwnedKeys(KeyGroups(owned.start, len(owned)), MAX)
        to = SnapshotDestination(open_storage(str(self.root)), "p", self.log.generation, self._inline_bytes_max, keys)
        target = SubtaskTarget(to, subtask, CheckpointId(checkpoint))
        node = str(subtask.vertex)
        plain = {f"{FINISHED_PREFIX}{node}": b"\x00"}
        if part.positions:
            plain[f"{POSITIONS_PREFIX}{node}"] = msgspec.msgpack.encode(part.positions)
        target.put_bundle(plain)
        for (prefix, name), state in part.states.items():
            target.put_state(name, state, prefix)
        committables = tuple(replace(c, subtask_index=subtask.index) for c in part.committables)
        return SubtaskEntry(subtask, target.finish(), committables)


def output(payload: bytes, sink: str = "out") -> Committable:
    return Committable(sink, CheckpointId(1), 0, Generation(1), payload)


def state(frozen: FrozenState, node: str = "node", prefix: str = STATE_PREFIX) -> Part:
    return Part({(prefix, node): frozen})


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return everything below ``root``: when it was changed, and its bytes."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }
