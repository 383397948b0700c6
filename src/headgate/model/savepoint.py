"""What a savepoint says about itself, and what subtasks say about their parts of it (docs/spec/savepoints.md)."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.model.manifest import Manifest, SnapshotPart

SAVEPOINT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Copied:
    """What a subtask wrote to a savepoint: all parts of its snapshot, or why it could not."""

    parts: tuple[SnapshotPart, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """The state of a pipeline at one of its completed checkpoints, owned by the user.

    Attributes:
        id: random.
        pipeline: whose state it is.
        taken_ms: when it was complete, in milliseconds since 1970.
        files: the directory beside it in which the files of ``manifest`` are.
        manifest: of that checkpoint, but with the parts in ``files``, and without output: that is committed (SV2).
        life: of the pipeline whose state it is; "" if nobody knows, as in a savepoint made of nothing.
        is_same_cut: whether a start from it processes the same records as a start from its checkpoint. Not so at most
            once while the pipeline went on: its positions are in front of what is held, those of the checkpoint are not
            (SV9).
    """

    id: str
    pipeline: str
    taken_ms: int
    files: str
    manifest: Manifest
    life: str = ""
    is_same_cut: bool = False
