"""What a path means that a user gives: the checkpoints of a pipeline, one of them, or a savepoint. Makes nothing.

Counterparts: ``runtime.driver.adopting``, which restores what is named, and ``runtime.stored_state``, which only looks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId
from headgate.model.savepoint import Savepoint
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates, damage_behind
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.storage.backends import is_missing, open_storage
from headgate.storage.base import NotFound

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
    """Refuse to take an older checkpoint for the newest one (RS2, SV20).

    Raises:
        CorruptionError: what cannot be read, or is lost, may have been a newer one.
    """
    manifests = candidates(observed)
    damage = next(iter(damage_behind(observed, manifests[0] if manifests else None)), None)
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
