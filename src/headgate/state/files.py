"""Files of a backend as a checkpoint holds them: what a backend may continue, and what any backend can read.

They are those of a database, or chunks of state in memory. Counterparts: ``runtime.checkpoints`` writes the parts
(SF15) and finds them again; ``state.rocksdb.reopening`` and ``state.memory.stored_chunks`` read them. Nobody else looks
into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headgate.codec.snapshot import CHUNK_SUFFIX, FORMER_CHUNK_SUFFIX, PACKED_DESCRIPTION, TIMED_DESCRIPTION
from headgate.errors import CorruptionError
from headgate.model.manifest import SnapshotPart


class LocalDamage(CorruptionError):  # noqa: N818 - it says whose the damage is
    """Files of a database on a local disk contradict themselves: no checkpoint has them (RB23), or has others."""


class UnsoundFiles(CorruptionError):  # noqa: N818 - it says whose the damage is
    """Files in a checkpoint are as they were written, and hold something wrong: who opens them finds out (R57)."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredFiles:
    """The files of one operator's state in one former subtask.

    Attributes:
        parts: the files by their names, and one that says what they are (``is_description``).
        read: returns the bytes of a part, verified.
        where: they are, for messages.
        directory: in which the paths of parts are, for messages.
    """

    parts: Sequence[SnapshotPart]
    read: Callable[[SnapshotPart], memoryview]
    where: str
    directory: str

    @property
    def description(self) -> SnapshotPart:
        """The part that says what the others are.

        Raises:
            CorruptionError: there is none.
        """
        found = [part for part in self.parts if is_description(part)]
        if len(found) != 1:
            raise CorruptionError(self.where, 0, "one description of the files of a state", f"{len(found)}")
        return found[0]

    @property
    def are_chunks(self) -> bool:
        """Whether the files are chunks of state in memory, and no database."""
        return any(part.name.endswith((CHUNK_SUFFIX, FORMER_CHUNK_SUFFIX)) for part in self.parts)

    @property
    def files(self) -> Mapping[str, SnapshotPart]:
        """The files by name."""
        return {part.name: part for part in self.parts if not is_description(part)}

    def path_of(self, part: SnapshotPart) -> str:
        """Return what to call ``part``, for messages."""
        return f"{self.directory}/{part.path}" if part.path else self.where

    @property
    def size_bytes(self) -> int:
        """How large they are together."""
        return sum(part.size_bytes for part in self.parts)


def is_description(part: SnapshotPart) -> bool:
    """Whether a part of the files of a backend says what the others are."""
    return part.name in ("", TIMED_DESCRIPTION, PACKED_DESCRIPTION)
