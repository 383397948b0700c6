"""Finds the checkpoint or savepoint that somebody wants to look at, and reads its parts, each verified.

Counterparts: ``runtime.checkpoints.named`` says what a path means, ``pieces`` what is in it. Takes no lock, makes
nothing, and never takes another checkpoint for the one that was meant (RS1–RS3 of docs/spec/reading-state.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable, Manifest, SnapshotPart
from headgate.model.places import Place
from headgate.protocol.checkpoints.promises import settled
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.named import NamedLog, named_log, refuse_unless_newest_is_known, savepoint_at
from headgate.runtime.checkpoints.snapshots import read_part, storage_at
from headgate.storage.backends import absolute_location, local_directory
from headgate.storage.base import NotFound, Storage
from headgate.storage.paths import read_path

_PLACES = (
    "the path of a savepoint, DIRECTORY/PIPELINE for the newest checkpoint of a pipeline, or DIRECTORY/PIPELINE/chk-ID"
)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A completed checkpoint, or the one that a savepoint is of.

    Attributes:
        what: it is, for messages.
        pipeline: whose it is.
        manifest: says what is in it; its ``place`` says where its files are.
        log: where it was found; None for a savepoint. Such files are removed when newer checkpoints are completed.
        life: of a savepoint, as it says.
        is_same_cut: of a savepoint, as it says; a checkpoint is the same cut as itself.
    """

    what: str
    pipeline: str
    manifest: Manifest
    log: NamedLog | None = None
    life: str = ""
    is_same_cut: bool = True

    @property
    def place(self) -> Place:
        """Where its files are."""
        assert self.manifest.place is not None
        return self.manifest.place

    def storage(self) -> Storage:
        """Open the storage of its files.

        Raises:
            CorruptionError: the directory is gone.
            UsageError
        """
        try:
            return storage_at(self.place)
        except NotFound as error:
            raise CorruptionError(error.path, 0, f"the files of {self.what}", "no directory") from error

    def read(self, storage: Storage, part: SnapshotPart) -> memoryview:
        """Return the bytes of ``part``, verified (RS8).

        Raises:
            CorruptionError: it is damaged, or its file is missing.
            StorageError: it was removed, because newer checkpoints were completed meanwhile (RS9), or cannot be read.
        """
        try:
            return read_part(storage, self.place.prefix, part)
        except NotFound as error:
            raise self._missing(part) from error

    def read_start(self, storage: Storage, part: SnapshotPart, size_bytes: int) -> bytes:
        """Return the first bytes of ``part``; nothing is verified. Raises as ``read`` does."""
        if not part.path:
            return part.inline[:size_bytes]
        wanted = min(size_bytes, part.size_bytes)
        path = read_path(f"{self.place.prefix}/{part.path}", "a manifest")
        try:
            return storage.get_range(path, part.offset, wanted)
        except NotFound as error:
            raise self._missing(part) from error

    def standing(self) -> tuple[str, frozenset[Committable]]:
        """Return in which life of its pipeline it was written, "" if nobody knows; and of what it promised that which
        is committed, because a newer checkpoint of its log promises it no more (WS10).

        Raises:
            UsageError, CorruptionError, StorageError
        """
        if self.log is None:
            return self.life, frozenset()
        log = self.log.open()
        observed = log.observe()
        life, newest = log.known_life(observed), next(iter(candidates(observed)), self.manifest)
        return "" if life is None else life.id, settled(self.manifest, newest)

    def _missing(self, part: SnapshotPart) -> CorruptionError | StorageError:
        if self.log is not None and not self._is_retained(self.log):
            return StorageError(
                "read",
                self.what,
                "its files were removed meanwhile, because newer checkpoints were completed; read the newest one, or "
                "take a savepoint, which stays",
            )
        where = f"{self.place.url.rstrip('/')}/{self.place.prefix}/{part.path}"
        return CorruptionError(where, 0, f"a file of {self.what}", "no file")

    def _is_retained(self, log: NamedLog) -> bool:
        return any(m.checkpoint == self.manifest.checkpoint for m in candidates(log.open().observe()))


def find(path: str, checkpoint: int | None = None) -> StoredCheckpoint:
    """Return what is at ``path``: a savepoint, or a checkpoint of a pipeline, the newest unless one is named (RS1).

    Args:
        path: a savepoint, ``DIRECTORY/PIPELINE``, or ``DIRECTORY/PIPELINE/chk-ID``; a directory or URL.
        checkpoint: its id, where ``path`` names none.

    Raises:
        UsageError: there is no such thing.
        CorruptionError: the newest one cannot be told, because the log is damaged (RS2); or it is damaged itself.
        StorageError
    """
    if not path:
        raise UsageError(f"the path is empty; give {_PLACES}")
    url = absolute_location(path)
    savepoint = savepoint_at(url)
    if savepoint is not None:
        if checkpoint not in (None, savepoint.manifest.checkpoint):
            raise UsageError(f"{url} is a savepoint of checkpoint {savepoint.manifest.checkpoint}, not {checkpoint}")
        manifest = replace(savepoint.manifest, place=Place(url, savepoint.files))
        what = f"the savepoint {url} (pipeline '{savepoint.pipeline}', checkpoint {manifest.checkpoint})"
        return StoredCheckpoint(what, savepoint.pipeline, manifest, None, savepoint.life, savepoint.is_same_cut)
    log = named_log(url)
    if log is None:
        raise UsageError(_nothing_at(url))
    if checkpoint is not None:
        if log.checkpoint not in (None, checkpoint):
            raise UsageError(f"{url} names checkpoint {log.checkpoint}, but checkpoint {checkpoint} is asked for")
        log = replace(log, checkpoint=CheckpointId(checkpoint))
    return _in_log(url, log)


def _in_log(url: str, log: NamedLog) -> StoredCheckpoint:
    observed = log.open().observe()
    manifests = candidates(observed)
    if log.checkpoint is None:
        refuse_unless_newest_is_known(observed)
    found = next((m for m in manifests if log.checkpoint in (None, m.checkpoint)), None)
    if found is None and not observed.entries:
        raise UsageError(_nothing_at(url))
    if found is None:
        wanted = "completed checkpoint" if log.checkpoint is None else f"checkpoint {log.checkpoint}"
        there = ", ".join(str(m.checkpoint) for m in reversed(manifests)) or "none"
        raise UsageError(f"pipeline '{log.pipeline}' has no {wanted} in {log.root}; there is {there}")
    what = f"checkpoint {found.checkpoint} of pipeline '{log.pipeline}'"
    manifest = found if found.place is not None else replace(found, place=Place(log.root, log.pipeline))
    return StoredCheckpoint(what, log.pipeline, manifest, log)


def _pipelines_below(url: str) -> list[str]:
    """Return the pipelines whose checkpoints are in the directory at ``url``, which was meant for one of them."""
    local = local_directory(url)
    return [] if local is None else sorted(log.parent.name for log in local.glob("*/log"))


def _nothing_at(url: str) -> str:
    """Return what is said where nothing is, with the pipelines that are near it."""
    others = {"below": _pipelines_below(url), "beside": _pipelines_below(url.rstrip("/").rpartition("/")[0] or "/")}
    found = next((f"; {where} it are the checkpoints of {', '.join(o)}" for where, o in others.items() if o), "")
    return f"there is neither a savepoint nor a checkpoint at {url}; give {_PLACES}{found}"
