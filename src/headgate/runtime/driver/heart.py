"""Writes a driver's signs of life beside the log, and how its run ended (SB1–SB4, SB14 of docs/spec/standby.md).

Nothing about the run depends on it. Counterpart: ``runtime.driver.lookout`` in a standby.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from headgate.codec.heartbeat import beat_path, encode_beat, end_path, generation_of
from headgate.errors import BadRecord, FencedError, OutputDenied, PipelineFailed, StorageError, UsageError
from headgate.model.heartbeat import REASON_CHARS_MAX, Beat, Course
from headgate.model.ids import Generation
from headgate.model.progress import RunResult
from headgate.protocol.supervision.pulse import Pulse
from headgate.runtime.surroundings import Surroundings
from headgate.storage.base import Storage

LOOK_MS = 250
"""How soon a claim or a wish of the user is written."""

END_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses between tries to record the end: a standby would start what was stopped, so this is worth some patience."""


class Heart:
    """Beats for one driver, in a thread of its own (SB1)."""

    def __init__(self, storage: Storage, pipeline: str, owner: str, around: Surroundings) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._owner = owner
        self._around = around
        self._pulse = Pulse(owner)
        self._pool = around.pool(1, "headgate-heartbeat", is_daemon=True)
        self._is_writing = False
        self._tidied = Generation(0)

    def beat(self, generation: Generation, course: Course) -> None:
        """Write a beat if one is due and none is being written."""
        if self._is_writing:
            return
        beat = self._pulse.beat(self._around.monotonic_ms(), generation, course)
        if beat is not None:
            self._is_writing = True
            self._pool.submit(self._write, beat)

    def _write(self, beat: Beat) -> None:
        """Runs in the heart's thread."""
        try:
            with suppress(StorageError):  # SB2: the next one is tried anyway
                self._storage.put(beat_path(self._pipeline, beat.generation), [encode_beat(beat)])
                self._tidy(beat.generation)
        finally:
            self._is_writing = False

    def _tidy(self, generation: Generation) -> None:
        """Remove what older generations left (SB4), once for each generation."""
        if generation == self._tidied:
            return
        prefix = f"{self._pipeline}/heartbeats/"
        for path in self._storage.list(prefix.rstrip("/")):
            whose = generation_of(path.removeprefix(prefix))
            if whose is not None and whose < generation:
                self._storage.delete(path)
        self._tidied = generation

    def stop(self, generation: Generation, result: Future[RunResult], course: Course = Course.RUNNING) -> str:
        """Record how the run ended, if it has claimed anything; return what is wrong with that, or "" (SB3).

        ``course``: what its user had asked of it.
        """
        word = None if not generation else last_word(generation, self._owner, result, course)
        problems: list[str] = []
        if word is not None:
            self._pool.submit(lambda: problems.append(self._record(word)))
        self._pool.shutdown(wait=word is not None)  # who has no word does not wait for storage that may hang
        return problems[0] if problems else ""

    def _record(self, word: Beat) -> str:
        for pause_s in (*END_PAUSES_S, 0.0):
            try:
                self._storage.put(end_path(self._pipeline, word.generation), [encode_beat(word)])
                self._storage.put(beat_path(self._pipeline, word.generation), [encode_beat(word)])  # seen sooner
                self._tidy(word.generation)  # a run may be over before its first beat
            except StorageError as error:
                problem = str(error)
                self._around.sleep(pause_s)
            else:
                return ""
        return f"how this run ended could not be recorded, so a standby may start the pipeline again: {problem}"


def last_word(
    generation: Generation, owner: str, result: Future[RunResult], wanted: Course = Course.RUNNING
) -> Beat | None:
    """Return how a run ended; None when another driver has replaced it: then the end is not its own to tell.

    ``wanted``: what its user had asked of it. A run that failed while it stopped counts as stopped (SB14).
    """
    error = result.exception()
    match error:
        case None:
            return _of_result(generation, owner, result.result())
        case FencedError():
            return None
        case UsageError() | OutputDenied() | BadRecord() | PipelineFailed(is_for_good=True):
            course = Course.FAILED_FOR_GOOD
        case _:
            course = Course.STOPPED if wanted is Course.STOPPING else Course.FAILED
    was_draining = course is Course.FAILED and wanted is Course.DRAINING
    return Beat(generation, owner, 0, course, None, str(error)[:REASON_CHARS_MAX], was_draining)


def _of_result(generation: Generation, owner: str, result: RunResult) -> Beat:
    course = Course.DRAINED if result.is_drained else Course.FINISHED if result.is_finished else Course.STOPPED
    return Beat(generation, owner, 0, course, result.last_checkpoint)
