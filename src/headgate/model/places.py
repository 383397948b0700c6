"""Where files of checkpoints are, and what a pipeline was restored from by name (docs/spec/savepoints.md)."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.model.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Place:
    """Files below the directory ``prefix`` of the storage at ``url``."""

    url: str
    prefix: str

    @property
    def text(self) -> str:
        """As one word, for messages between processes."""
        return f"{self.prefix}@{self.url}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return what ``text`` made of it; a prefix has no '@'."""
        prefix, _, url = text.partition("@")
        return cls(url, prefix)


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """What was restored by name. Every later checkpoint of the pipeline says so, too (SV24).

    Attributes:
        source: the id of the savepoint, or the life of the pipeline whose checkpoint it was.
        checkpoint: its id there.
        url: as it was named.
        life: of the pipeline whose state it is; "" if that is not known.
        adopted: the id that it got in the log of the pipeline that restored it (SV21); None until then.
    """

    source: str
    checkpoint: CheckpointId
    url: str
    life: str = ""
    adopted: CheckpointId | None = None
