"""What a standby sees of a pipeline: its log, its heartbeats, how its newest run ended (docs/spec/standby.md).

Only reads. Counterpart: ``runtime.driver.heart``; ``protocol.supervision.standby`` decides.
"""

from __future__ import annotations

from headgate.codec.heartbeat import beat_path, decode_beat, end_path, generation_of, mark_of
from headgate.errors import StorageError
from headgate.model.heartbeat import Course
from headgate.model.ids import Generation
from headgate.model.manifest import Claim, Manifest
from headgate.protocol.checkpoints.recovery import ObservedLog, has_given_up
from headgate.protocol.supervision.standby import Observed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.base import NotFound, Storage


class Lookout:
    """Looks at one pipeline."""

    def __init__(self, storage: Storage, pipeline: str, claimant: str) -> None:
        """``claimant``: the name of this standby's keeper in the log, or one that nobody has."""
        self._storage = storage
        self._pipeline = pipeline
        self._claimant = claimant
        self._log = CheckpointLog(storage, pipeline)

    def beat(self, generation: Generation) -> Observed:
        """Return what the beat of ``generation`` says.

        Raises:
            StorageError
        """
        data = self._get(beat_path(self._pipeline, generation))
        if data is None:
            return Observed(generation)
        beat = decode_beat(data)
        if beat is None:
            return Observed(generation, mark_of(data))
        return Observed(generation, mark_of(data), beat.course, beat.owner)

    def all(self) -> Observed:
        """Return what everything says.

        Raises:
            StorageError
        """
        log = self._log.observe()
        generation, owner = newest_run(log)
        prefix = f"{self._pipeline}/heartbeats"
        knows_beats = any(generation_of(path.removeprefix(f"{prefix}/")) for path in self._storage.list(prefix))
        if not knows_beats:  # SB11: then the log is all that tells of life
            mark = str(max((entry.sequence for entry in log.entries), default=0))
            course = Course.STOPPED if has_given_up(log) else Course.RUNNING
            return Observed(generation, mark, course, owner, self._is_ours(owner), knows_beats=False)
        found = self.beat(generation)
        owner = owner or found.owner  # its claim may have been pruned
        ended = self._get(end_path(self._pipeline, generation))
        word = None if ended is None else decode_beat(ended)
        course = found.course if word is None else word.course
        if word is None and has_given_up(log):  # C74: its driver died before it said so
            course = Course.STOPPED
        reason, was_draining = ("", False) if word is None else (word.reason, word.was_draining)
        return Observed(generation, found.mark, course, owner, self._is_ours(owner), True, reason, was_draining)

    def _is_ours(self, owner: str) -> bool:
        return bool(owner) and owner == self._claimant

    def _get(self, path: str) -> bytes | None:
        try:
            return self._storage.get(path)
        except NotFound:
            return None


def newest_run(log: ObservedLog) -> tuple[Generation, str]:
    """Return the newest generation in the log and who claimed it, as far as that can be read; 0: there is none.

    Raises:
        StorageError: there are entries, and none can be read.
    """
    read = [entry.content for entry in log.counted() if isinstance(entry.content, Claim | Manifest)]
    if log.entries and not read:
        raise StorageError("read", log.entries[-1].path, "nothing in the log can be read", is_transient=False)
    newest = max((content.generation for content in read), default=Generation(0))
    claims = [entry.content for entry in log.entries if isinstance(entry.content, Claim)]
    return newest, next((claim.owner for claim in claims if claim.generation == newest), "")
