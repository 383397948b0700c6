"""Takeover between drivers: heartbeats and the end of a run, read by standbys, and how a replaced driver notices.

Heartbeats are written beside the log (docs/spec/standby.md); nothing about the run depends on them, and
``protocol.supervision.standby`` decides about a takeover. ``cli`` sets which run a driver follows, when a supervisor
starts it again or a standby takes over. The claim in the checkpoint log fences the replaced driver; one that writes
learns of it there, an idle one by ``ReplacementWatch`` (C38).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from headgate.codec.json_files import LockHolder, beat_path, decode_beat, encode_beat, end_path, generation_of, mark_of
from headgate.dataclass import dataclass
from headgate.environment import Pool
from headgate.errors import BadRecord, FencedError, OutputDenied, PipelineFailed, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.manifest import Claim, Manifest
from headgate.model.pipeline_identity import REASON_CHARS_MAX, Beat, Course
from headgate.model.progress import RunResult
from headgate.protocol.checkpoints.recovery import ObservedLog, has_given_up
from headgate.protocol.supervision.standby import HeartbeatTimer, Observed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.event_loop import Timers
from headgate.runtime.surroundings import Surroundings
from headgate.storage.base import NotFound, Storage

LOOK_MS = 250
"""How soon a claim or a wish of the user is written."""

END_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses between tries to record the end: a standby would start what was stopped, so this is worth some patience."""


class HeartbeatWriter:
    """Beats for one driver, in a thread of its own (SB1)."""

    def __init__(self, storage: Storage, pipeline: str, owner: str, around: Surroundings) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._owner = owner
        self._around = around
        self._timer = HeartbeatTimer(owner)
        self._pool = around.pool(1, "headgate-heartbeat", is_daemon=True)
        self._is_writing = False
        self._tidied = Generation(0)

    def beat(self, generation: Generation, course: Course) -> None:
        """Write a beat if one is due and none is being written."""
        if self._is_writing:  # a storage that hangs must not pile up beats
            return
        beat = self._timer.beat(self._around.monotonic_ms(), generation, course)
        if beat is not None:
            self._is_writing = True
            self._pool.submit(self._write, beat)

    def _write(self, beat: Beat) -> None:
        """Runs in the heartbeat thread."""
        try:
            with suppress(StorageError):  # the next one is tried anyway
                self._storage.put(beat_path(self._pipeline, beat.generation), [encode_beat(beat)])
                self._tidy(beat.generation)
        finally:
            self._is_writing = False

    def _tidy(self, generation: Generation) -> None:
        """Remove what older generations left, once for each generation."""
        if generation == self._tidied:
            return
        prefix = f"{self._pipeline}/heartbeats/"
        for path in self._storage.list(prefix.rstrip("/")):
            found = generation_of(path.removeprefix(prefix))
            if found is not None and found < generation:
                self._storage.delete(path)
        # noted at the end: after a failure the next beat goes on
        self._tidied = generation

    def stop(self, generation: Generation, result: Future[RunResult], course: Course = Course.RUNNING) -> str:
        """Record how the run ended, if it has claimed anything; return what is wrong with that, or "".

        ``course``: what its user had asked of it.
        """
        word = None if not generation else end_beat(generation, self._owner, result, course)
        problems: list[str] = []
        if word is not None:
            self._pool.submit(lambda: problems.append(self._record(word)))
        self._pool.shutdown(wait=word is not None)  # who has no word does not wait for storage that may hang
        return problems[0] if problems else ""

    def _record(self, word: Beat) -> str:
        # both objects again at each try: writing them is repeatable
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


def end_beat(
    generation: Generation, owner: str, result: Future[RunResult], wanted: Course = Course.RUNNING
) -> Beat | None:
    """Return how a run ended; None when another driver has replaced it: then the end is not its own to tell.

    ``wanted``: what its user had asked of it. A run that failed while it stopped counts as stopped (SB14).
    """
    error = result.exception()
    match error:
        case None:
            return _beat_of_result(generation, owner, result.result())
        case FencedError():
            return None
        case UsageError() | OutputDenied() | BadRecord() | PipelineFailed(is_for_good=True):
            course = Course.FAILED_FOR_GOOD
        case _:
            course = Course.STOPPED if wanted is Course.STOPPING else Course.FAILED
    was_draining = course is Course.FAILED and wanted is Course.DRAINING
    return Beat(generation, owner, 0, course, None, str(error)[:REASON_CHARS_MAX], was_draining)


def _beat_of_result(generation: Generation, owner: str, result: RunResult) -> Beat:
    course = Course.DRAINED if result.is_drained else Course.FINISHED if result.is_finished else Course.STOPPED
    return Beat(generation, owner, 0, course, result.last_checkpoint)


class HeartbeatReader:
    """Looks at one pipeline."""

    def __init__(self, storage: Storage, pipeline: str, claimant: str) -> None:
        """``claimant``: the name of this standby's supervisor in the log, or an unused one."""
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
    """Return the newest generation in the log and its claimant, as far as they can be read; 0: there is none.

    Raises:
        StorageError: there are entries, and none can be read.
    """
    read = [entry.content for entry in log.counted() if isinstance(entry.content, Claim | Manifest)]
    if log.entries and not read:
        raise StorageError("read", log.entries[-1].path, "nothing in the log can be read", is_transient=False)
    newest = max((content.generation for content in read), default=Generation(0))
    claims = [entry.content for entry in log.entries if isinstance(entry.content, Claim)]
    return newest, next((claim.owner for claim in claims if claim.generation == newest), "")


DIED_REASON = "its driver died before it could carry out the request"

_UNINFORMED_COURSES = frozenset({Course.RUNNING, Course.DRAINING, Course.FAILED})
"""Of such a run a standby does not know that it was to stop."""


def record_stop_of_dead_driver(storage: Storage, pipeline: str, dead: LockHolder, *, drain: bool) -> None:
    """Record the request as the end of the run of ``dead``, unless another driver has claimed since.

    Raises:
        StorageError
    """
    found = HeartbeatReader(storage, pipeline, "").all()
    if not found.knows_beats or not _was_claimed_by(dead, found.owner) or found.course not in _UNINFORMED_COURSES:
        return
    # a standby that takes over drains on in any case (SB10, SB14)
    if drain and (found.course is Course.DRAINING or found.was_draining):
        return
    # a drain is finished by a standby, which takes a failed run over; a stopped one it leaves (SB6, SB14)
    course = Course.FAILED if drain else Course.STOPPED
    word = Beat(found.generation, found.owner, 0, course, None, found.reason or DIED_REASON, was_draining=drain)
    storage.put(end_path(pipeline, found.generation), [encode_beat(word)])


def _was_claimed_by(dead: LockHolder, owner: str) -> bool:
    """Whether ``dead`` has claimed as ``owner``; False if its lock does not say so."""
    return dead.claimant == owner != ""


def _ignore_claim(generation: Generation) -> None:
    """No supervisor wants to know."""


def _ignore_course(course: Course) -> None:
    """No supervisor starts this driver again."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The run that a new driver follows.

    Attributes:
        claimant: name in the claim; "": differs for every driver. One supervisor's drivers share theirs (KR10).
        after: the generation that this driver follows: it does not claim after a newer one of another driver.
            None: it follows any.
        on_claim: called with every generation that this driver claims.
        lock_nonce: the silent run that has the lock to be broken, whether its process is there or not (SB8).
        on_course: called with what the user asks of this driver, as soon as it is known (KR13).
        supervisor_pid: the process that starts this driver again, 0: none. Requests to the driver go to it.
        restarts: how often it has done so (KR2).
    """

    claimant: str = ""
    after: Generation | None = None
    on_claim: Callable[[Generation], None] = _ignore_claim
    lock_nonce: str | None = None
    on_course: Callable[[Course], None] = _ignore_course
    supervisor_pid: int = 0
    restarts: int = 0


_takeover: ContextVar[Takeover] = ContextVar("headgate_takeover", default=Takeover())  # noqa: B039  frozen


def current_takeover() -> Takeover:
    """Return what a driver that is made now goes by."""
    return _takeover.get()


@contextmanager
def taking_over(given: Takeover) -> Iterator[None]:
    """Drivers that are made within this block go by ``given``."""
    token = _takeover.set(given)
    try:
        yield
    finally:
        _takeover.reset(token)


PERIOD_MS = 1_000
"""How soon an idle driver notices that another one has taken over."""

HANGS_MS = 5_000
"""A look that takes longer may be on a connection that is dead, which its client notices after a minute or more."""

LOOKS_MAX = 4
"""Looks at one time: the last one that began, and those that hang."""


class ReplacementWatch:
    """Looks into the log, one look at a time; where one hangs, another one beside it."""

    def __init__(
        self,
        log: CheckpointLog,
        pool: Pool,
        timers: Timers,
        on_replaced: Callable[[Generation], None],
        around: Surroundings,
    ) -> None:
        """``on_replaced`` is called in the event thread with the generation of the other driver.

        A look that hung may be from before a claim of this driver itself: then that is what it has seen.
        """
        self._log = log
        self._pool = pool
        self._timers = timers
        self._on_replaced = on_replaced
        self._around = around
        self._looks_count = 0
        self._begun_ms: dict[int, int] = {}
        """Of each look that has not ended."""

    def look(self) -> None:
        """Look, unless the last look has neither ended nor hangs; its outcome comes later. In the event thread."""
        now_ms, begun_ms = self._around.monotonic_ms(), list(self._begun_ms.values())
        # a look clears its entry in its own thread, so this is what was seen a moment ago
        if not begun_ms:
            self._begin(self._pool, now_ms)
        elif len(begun_ms) < LOOKS_MAX and now_ms - max(begun_ms) >= HANGS_MS:
            beside = self._around.pool(1, "headgate-look", is_daemon=True)
            self._begin(beside, now_ms)
            beside.shutdown(wait=False)  # the thread ends with its look, whenever that returns

    def _begin(self, pool: Pool, now_ms: int) -> None:
        self._looks_count += 1
        self._begun_ms[self._looks_count] = now_ms
        pool.submit(self._look, self._looks_count)

    def _look(self, number: int) -> None:
        """Runs in the storage thread, or in one beside it."""
        newer = None
        try:
            with contextlib.suppress(StorageError):  # looked at again, and at every write
                newer = self._log.newer_generation()
        finally:
            # whatever came of it: else it would count as one that hangs
            del self._begun_ms[number]
        if newer is not None:
            found = newer
            self._timers.post(lambda: self._on_replaced(found))
