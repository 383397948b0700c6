"""What the checkpoint log records: claims of generations and manifests of completed checkpoints.

One strictly ordered sequence of write-once entries, ``log/<sequence>``, decides everything (docs/spec/
recovery.md): an entry is either a ``Claim`` (a new generation begins) or a ``Manifest`` (a checkpoint is
completed). Because both compete for the same next number by put-if-absent, a driver whose generation was
replaced cannot complete anything any more. Numbers that were pruned look free again, so each entry names the one
that it follows: what nothing follows counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from headgate.model.ids import CheckpointId, Generation, SubtaskId

MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True)
class StateHandle:
    """Where the snapshot of one subtask is: inline bytes, or a file with its size and checksum.

    ``path`` is relative to the pipeline's directory in the checkpoint storage; "" means inline.
    ``checksum`` is xxh3-64 of the whole payload.
    ``rows`` says how many rows each state had at the barrier, by node and state (U7); None in manifests of version 0.1.
    """

    size_bytes: int
    checksum: int
    path: str = ""
    inline: bytes = b""
    rows: dict[str, dict[str, int]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Refuse what no snapshot has; whoever decodes it says so."""
        if self.size_bytes < 0 or self.checksum < 0:
            raise ValueError("a snapshot has a size and a checksum, none of them negative")


@dataclass(frozen=True, slots=True)
class Committable:
    """Output of one sink subtask for one checkpoint, prepared: durable and invisible.

    ``payload`` is opaque to everybody but the sink. Its identity is (pipeline, sink, checkpoint, subtask,
    generation): K8.
    """

    sink: str
    checkpoint: CheckpointId
    subtask_index: int
    generation: Generation
    payload: bytes


@dataclass(frozen=True, slots=True)
class SubtaskEntry:
    """What one subtask contributed to a checkpoint."""

    subtask: SubtaskId
    handle: StateHandle
    committables: tuple[Committable, ...] = ()
    """Everything prepared by this subtask and not yet known to belong to a completed checkpoint."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A generation begins. ``owner`` says who, for messages (host and process)."""

    generation: Generation
    owner: str
    wall_ms: int
    version: int = MANIFEST_VERSION
    follows: int | None = None
    """Sequence of the newest manifest (or of what cannot be read and may be one) when this was written, 0 if there was
    none; what lies between counts for nothing. None: written by version 0.1, and the entry before it is followed."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A completed checkpoint.

    ``is_final``: taken after all input had ended and every operator had finished.
    ``state_texts``: ``Plan.state_texts()`` of the plan that wrote it.
    """

    checkpoint: CheckpointId
    generation: Generation
    parallelism: int
    max_parallelism: int
    entries: tuple[SubtaskEntry, ...]
    carried: tuple[Committable, ...] = ()
    """Committables of earlier completed checkpoints whose commit was not confirmed yet when this was written."""
    state_texts: dict[str, str] = field(default_factory=dict)
    is_final: bool = False
    trigger_wall_ms: int = 0
    duration_ms: int = 0
    version: int = MANIFEST_VERSION
    is_draining: bool = False
    """It began after the sources were told to end, so some may have ended before their input did (E9)."""
    follows: int | None = None
    """Sequence of the manifest that this checkpoint descends from, 0 if none. None: written by version 0.1."""
    log_start: int = 0
    """Sequence of the oldest manifest that is retained with this one: what lies before it counts for nothing."""

    @property
    def committables(self) -> tuple[Committable, ...]:
        """Everything this checkpoint promises to commit, in order of checkpoint, sink and subtask (K2)."""
        found = {*self.carried, *(c for entry in self.entries for c in entry.committables)}
        return tuple(sorted(found, key=lambda c: (c.checkpoint, c.sink, c.subtask_index, c.generation)))

    @property
    def size_bytes(self) -> int:
        """Total size of the snapshots."""
        return sum(entry.handle.size_bytes for entry in self.entries)


LogEntry: TypeAlias = Claim | Manifest
