"""What the next manifest of a generation says about those before it (rules R41 and R43 of docs/spec/recovery.md).

A value of the driver: which manifests are retained, and where in the log they are. Counterpart:
``recovery.ObservedLog.counted``, which follows what is said here. Never reads the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import ObservedLog


@dataclass(frozen=True, slots=True)
class Lineage:
    """The retained manifests, oldest first: checkpoint and sequence of each. The next one descends from the last."""

    kept: tuple[tuple[CheckpointId, int], ...] = ()
    life: int = 0
    """What the claim of the generation says."""

    @classmethod
    def observed(cls, log: ObservedLog, life: int = 0) -> Lineage:
        """Return every manifest that counts in ``log``."""
        found = ((e.content.checkpoint, e.sequence) for e in log.counted() if isinstance(e.content, Manifest))
        return cls(tuple(reversed(tuple(found))), life)

    def of(self, checkpoints: Iterable[CheckpointId]) -> Lineage:
        """Return only ``checkpoints``: the others are not gone back to (C35)."""
        wanted = set(checkpoints)
        return replace(self, kept=tuple((checkpoint, at) for checkpoint, at in self.kept if checkpoint in wanted))

    def start(self, oldest: CheckpointId, sequence: int) -> int:
        """Return where the log starts if ``oldest`` is the oldest that is kept; ``sequence`` if none is."""
        return min((at for checkpoint, at in self.kept if checkpoint >= oldest), default=sequence)

    def placed(self, manifest: Manifest, sequence: int, oldest: CheckpointId) -> Manifest:
        """Return ``manifest`` as it is written at ``sequence``, when ``oldest`` is the oldest that is kept with it."""
        follows = self.kept[-1][1] if self.kept else 0
        return replace(manifest, follows=follows, log_start=self.start(oldest, sequence), life=self.life)

    def completed(self, checkpoint: CheckpointId, sequence: int) -> Lineage:
        """Return this with one more."""
        return replace(self, kept=(*self.kept, (checkpoint, sequence)))

    def dropped(self, oldest: CheckpointId) -> Lineage:
        """Return this without those before ``oldest``."""
        return replace(self, kept=tuple((checkpoint, at) for checkpoint, at in self.kept if checkpoint >= oldest))
