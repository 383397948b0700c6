"""Savepoint directories, and the checkpoint or savepoint that a path of the user means (docs/spec/savepoints.md).

::

    <path>/savepoint              describes it; put if absent, when everything else is there (SV2)
    <path>/files-<random>/...     the parts, as in a pipeline's directory; nothing refers to anything outside (SV3)

``snapshot_writer`` writes the parts, ``protocol.checkpoints.checkpoint_requests`` decides when a savepoint counts.
Never removes anything but files of an attempt that was given up.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from headgate.codec.json_files import decode_savepoint, encode_savepoint
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Place, Savepoint
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates, damage_after
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.base import AlreadyExists, NotFound, Storage, read_with_retries, refuse_unless_exclusive
from headgate.storage.urls import is_missing, open_storage

NAME = "savepoint"

PUT_TRIES_MAX = 3
"""A put that failed may have taken effect: it is repeated, and finds itself."""

_ATTEMPT_FILE = re.compile(r"files-[0-9a-f]{16}/.+")


class SavepointDirectory:
    """One place, with a savepoint or without."""

    def __init__(self, url: str) -> None:
        """Open it.

        Raises:
            UsageError: nothing can be kept there.
        """
        self._storage: Storage = open_storage(url)
        self.url = url

    def place(self, token: str) -> Place:
        """Return where the files of a new try go (SV4). ``token``: 16 hexadecimal digits, drawn at random.

        Raises:
            UsageError: something else is there.
            StorageError
        """
        paths = self._storage.list("")
        if NAME in paths:
            raise UsageError(f"there is a savepoint at {self.url} already; choose another place")
        others = [path for path in paths if not _ATTEMPT_FILE.fullmatch(path)]
        if others:
            raise UsageError(f"{self.url} is not empty (it has {others[0]}); a savepoint needs a place of its own")
        place = Place(self.url, f"files-{token}")
        # before anything is written: where a put does not say who was first, no savepoint can be made sure
        refuse_unless_exclusive(self._storage, place.prefix)
        return place

    def write(self, savepoint: Savepoint) -> None:
        """Make it a savepoint: everything that ``savepoint`` refers to is there. May be repeated.

        Raises:
            UsageError: another savepoint is there.
            StorageError: perhaps it is written.
        """
        data = encode_savepoint(savepoint)
        for tries_left in reversed(range(PUT_TRIES_MAX)):
            try:
                self._storage.put_if_absent(NAME, [data])
                break
            except AlreadyExists:
                # the same bytes are ours: an earlier try took effect, and its answer was lost
                if self._storage.get(NAME) != data:
                    raise UsageError(f"another savepoint was written at {self.url} meanwhile") from None
                break
            except StorageError as error:
                if not tries_left or not error.is_transient:
                    raise
        with contextlib.suppress(StorageError):  # what other tries of the same stop have left
            self._remove(savepoint.files, {f"{savepoint.files}/{part.path}" for part in savepoint.manifest.parts})

    def give_up(self, place: Place) -> None:
        """Remove what a try has written, unless it became a savepoint.

        Raises:
            StorageError
        """
        with contextlib.suppress(NotFound):
            # a try that was given up may have taken effect: then its files belong to the savepoint
            if self.read().files == place.prefix:
                return
        self._remove(place.prefix, ())

    def read(self) -> Savepoint:
        """Return what the savepoint here is.

        Raises:
            NotFound: there is none.
            CorruptionError, StorageError
        """
        path = f"{self._storage.url.rstrip('/')}/{NAME}"
        return read_with_retries(lambda: decode_savepoint(self._storage.get(NAME), path))

    def _remove(self, prefix: str, needed: Iterable[str]) -> None:
        kept = set(needed)
        for path in self._storage.list(prefix):
            if path not in kept:
                self._storage.delete(path)


def savepoints_below(url: str) -> list[str]:
    """Return the paths below ``url`` at which there are savepoints, itself ('') included; sorted.

    Raises:
        UsageError, StorageError
    """
    return sorted(
        path.removesuffix(NAME).rstrip("/") for path in open_storage(url).list("") if f"/{path}".endswith(f"/{NAME}")
    )


_CHECKPOINT = re.compile(r"chk-(\d+)")


@dataclass(frozen=True, slots=True)
class NamedLog:
    """The checkpoints of ``pipeline`` in the directory at ``root``; ``checkpoint``: which one is named, if any is."""

    root: str
    pipeline: str
    checkpoint: CheckpointId | None = None

    def open(self) -> CheckpointLog:
        """Return its log.

        Raises:
            UsageError
        """
        return CheckpointLog(open_storage(self.root), self.pipeline)


def named_log(url: str) -> NamedLog | None:
    """Return what ``DIRECTORY/PIPELINE`` or ``DIRECTORY/PIPELINE/chk-ID`` names; None if it cannot be that."""
    home, _, last = url.rstrip("/").rpartition("/")
    match = _CHECKPOINT.fullmatch(last)
    root, _, pipeline = (home if match else url.rstrip("/")).rpartition("/")
    if not root or not pipeline or root.endswith(":/") or is_missing(f"{root}/{pipeline}"):
        return None
    return NamedLog(root, pipeline, None if match is None else CheckpointId(int(match.group(1))))


def refuse_unless_newest_is_known(observed: ObservedLog) -> None:
    """Refuse to take an older checkpoint for the newest one (SV20).

    Raises:
        CorruptionError: what cannot be read, or is lost, may have been a newer one.
    """
    manifests = candidates(observed)
    damage = next(iter(damage_after(observed, manifests[0] if manifests else None)), None)
    if damage is not None:
        others = ", ".join(str(manifest.checkpoint) for manifest in reversed(manifests)) or "none"
        hint = f"so the newest checkpoint is not known; name one by its id: there is {others}"
        raise CorruptionError(damage.path, 0, "a log entry", f"something else ({damage.problem}), {hint}")


def savepoint_at(url: str) -> Savepoint | None:
    """Return the savepoint at ``url``, None if there is none.

    Raises:
        UsageError, CorruptionError, StorageError
    """
    if is_missing(url):
        return None
    try:
        return SavepointDirectory(url).read()
    except NotFound:
        return None
