"""Completed checkpoints whose bytes are as they were written, and of which workers found that they cannot be restored
(R57 of docs/spec/recovery.md).

Counterparts: ``supervision`` of the driver, which notes what workers report, and ``recovery``, which is given it beside
what was verified. Lives as long as one run: the next one is told by its own workers.
"""

from __future__ import annotations

from headgate.model.failure import Failure
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import Damage


class UnsoundCheckpoints:
    """What workers found so far."""

    def __init__(self) -> None:
        self._found: list[tuple[Manifest, Damage]] = []

    def note(self, restored: Manifest, failure: Failure) -> None:
        """A worker could not restore its part of ``restored``."""
        self._found.append((restored, Damage(failure.path, failure.reason)))

    def of(self, manifest: Manifest) -> list[Damage]:
        """Return what is wrong with ``manifest``: it was found in it, or in a file that it shares (SF15)."""
        return [
            damage
            for restored, damage in self._found
            if restored.checkpoint == manifest.checkpoint or _has(manifest, restored, damage.path)
        ]


def _has(manifest: Manifest, restored: Manifest, path: str) -> bool:
    """Whether the file at ``path``, which was found in ``restored``, is one of ``manifest``, too."""
    if manifest.place != restored.place:
        return False
    return any(path.endswith(f"/{file}") for file in manifest.files & restored.files)
