"""The driver of one pipeline run: puts its parts together, and is what a handle talks to.

One event thread (``event_loop``) decides everything: ``supervision`` hosts the supervisor and the generation at work,
``workers`` knows who is there, ``replacement_watch`` looks for another driver, ``ending`` holds the outcome.
Counterparts: ``runtime.worker.worker`` on the other end of the control channel, ``spark.session``, which hands out the
user's handle.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from headgate.codec import messages
from headgate.errors import FencedError, HeadgateError, UsageError
from headgate.model import claimants
from headgate.model.config import PipelineConfig
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import Generation, WorkerIndex
from headgate.model.places import Place
from headgate.model.progress import CheckpointOutcome, Observer, PendingCheckpoint, PipelineState, Progress, RunResult
from headgate.model.run_request import RunRequest
from headgate.protocol.supervision import events
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver import asking, heart, replacement_watch
from headgate.runtime.driver.answers import Answer, Answers
from headgate.runtime.driver.coordination import Pools
from headgate.runtime.driver.ending import RunEnd, error_of
from headgate.runtime.driver.event_loop import EventLoop
from headgate.runtime.driver.heart import Heart
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.progress_book import ProgressBook
from headgate.runtime.driver.replacement_watch import ReplacementWatch
from headgate.runtime.driver.succession import succession
from headgate.runtime.driver.supervision import Launcher, Supervision
from headgate.runtime.driver.workers import Workers
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.storage.backends import local_directory, open_storage
from headgate.storage.roots import make_root
from headgate.threads import UntilPool

PROGRESS_PERIOD_MS = 500


class Driver:
    """Runs one pipeline until it has ended, failed or been stopped."""

    def __init__(
        self,
        definition: PipelineDefinition,
        launcher: Launcher,
        observer: Observer,
        fingerprint: str,
        *,
        host: str = "127.0.0.1",
        lock: PipelineLock | None = None,
        beats: bool = False,
        around: Surroundings = PROCESS,
    ) -> None:
        """Make the driver; ``host`` is the address on which workers can reach this process.

        ``lock`` is from ``lock_for`` if the caller holds it already; the driver releases it at its end. ``beats``: it
        gives signs of life, for standbys.
        """
        config = self._config = definition.config
        self._around = around
        lock = lock or lock_for(config, around)
        self._run = lock.nonce
        storage = open_storage(config.checkpoint_root)
        log = self._log = CheckpointLog(storage, config.name)
        self._heart = Heart(storage, config.name, lock.claimant, around) if beats else None
        self._observer = observer
        self.book = ProgressBook("bad-records", around.monotonic_ns, around.wall_ms, definition.plan)
        self._latest = Progress(PipelineState.STARTING)
        self._end = RunEnd(definition, lock, around)
        self._answers = Answers(self._end.result)
        self._loop = EventLoop(lambda: self._end.is_over, self._on_error, self._close, around)
        off = self._off = around.event()
        names = ("storage", "commit", "savepoint")
        self._pools = Pools(*(UntilPool(around.pool(1, f"headgate-{n}", is_daemon=True), off) for n in names))
        on_event: Callable[[events.Event], None] = lambda event: self.supervision.handle(event)  # noqa: E731
        hears = on_event, self._on_report, observer.on_note
        self.workers = Workers(definition, fingerprint, self._loop, *hears, host=host, around=around)
        self.supervision = Supervision(
            definition,
            launcher,
            observer,
            log,
            self._loop,
            self._pools,
            self.workers,
            self.book,
            self._on_finish,
            succession=replace(succession(), claimant=lock.claimant),
            around=around,
            off=off,
        )
        self._watch = ReplacementWatch(log, self._pools.storage, self._loop, self._on_replaced, around)

    # -- what the handle calls --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The pipeline's."""
        return self._config.name

    @property
    def progress(self) -> Progress:
        """The latest numbers."""
        return self._latest

    @property
    def result(self) -> Future[RunResult]:
        """The outcome of the run."""
        return self._end.result

    @property
    def running_generation(self) -> Generation | None:
        """The generation whose coordinator is at work, if any (for tests and the demo)."""
        live = self.supervision.live
        return None if live is None or not live.is_started else live.number

    def worker_pids(self) -> dict[int, int]:
        """Return ``worker → process id`` of the workers registered now (for tests and the demo)."""
        return {int(record.worker): record.pid for record in self.workers.records}

    def start(self) -> None:
        """Begin."""
        self._loop.start()
        self.post(lambda: self.supervision.handle(events.Begin()))
        self._loop.every(PROGRESS_PERIOD_MS, "progress", self._show_progress)
        self._loop.every(replacement_watch.PERIOD_MS, "fence", self._look_for_another)
        if self._heart is not None:
            self._loop.every(heart.LOOK_MS, "heartbeat", self._beat)

    def stop(self) -> None:
        """Take a last checkpoint, commit it, then end. From any thread."""
        self.post(self.supervision.stop)

    def drain(self) -> None:
        """End the sources, process everything in flight, take the final checkpoint, then end. From any thread."""
        self.post(self.supervision.drain)

    def take_checkpoint(self) -> Future[CheckpointOutcome]:
        """Take a checkpoint now. From any thread."""
        return self._asked(self.supervision.ask)

    def take_savepoint(self, url: str) -> Future[CheckpointOutcome]:
        """Take a savepoint now. From any thread; it looks at the place at once.

        Raises:
            UsageError: it cannot be at ``url``.
            StorageError
        """
        place = self._new_place(url)
        return self._asked(lambda answer: self.supervision.ask_for_savepoint(place, answer))

    def end_with_savepoint(self, url: str, *, drain: bool) -> Future[CheckpointOutcome]:
        """Stop or drain, with a savepoint of the last checkpoint. From any thread; it looks at the place at once.

        Raises:
            UsageError: it cannot be at ``url``; the pipeline goes on.
            StorageError
        """
        place = self._new_place(url)
        return self._asked(lambda answer: self.supervision.end_with_savepoint(place, answer, drain=drain))

    def _new_place(self, url: str) -> Place:
        """Look at a place; choose a name for the files of one try there (SV4). Nothing is ordered before (SV11)."""
        local = local_directory(url)
        if local is not None:
            try:
                make_root(local, self._config.security.access, "savepoint directory")
            except OSError as error:
                raise UsageError(f"savepoint directory {local} cannot be created ({error.strerror})") from error
        return SavepointDirectory(url).place(self._around.token(8).hex())

    def _asked(self, ask: Callable[[Answer], None]) -> Future[CheckpointOutcome]:
        """Have ``ask`` run in the event thread; the end of the run answers, too."""
        asked, answer = self._answers.new()
        self.post(lambda: ask(answer))
        return asked

    def answer_asks(self) -> None:
        """Do what others ask for from their processes; returns when they are answered (C63)."""
        taken = asking.taken(self._config.checkpoint_root, self._config.name, self._run)
        if any(request.cancels for _, request in taken):
            self.cancel()  # the end of the run answers all of them
        wants_checkpoint = any(not request.savepoint for _, request in taken)
        checkpoint = self.take_checkpoint() if wants_checkpoint else None  # one is for all
        outcomes = [(ask, self._requested(request) if request.savepoint else checkpoint) for ask, request in taken]
        for told in [_told(ask, outcome) for ask, outcome in outcomes if outcome is not None]:
            told.result()

    def _requested(self, request: RunRequest) -> Future[CheckpointOutcome]:
        try:
            if request.ends:
                return self.end_with_savepoint(request.savepoint, drain=request.drains)
            return self.take_savepoint(request.savepoint)
        except HeadgateError as error:
            refused: Future[CheckpointOutcome] = Future()
            refused.set_result(CheckpointOutcome(None, str(error), is_refused=True))
            return refused

    def cancel(self, *, retain: bool = False) -> None:
        """End without another checkpoint. From any thread. ``retain``: keep those that there are, as a stop does."""
        self.post(lambda: self.supervision.cancel(retain=retain))

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run in the event thread. From any thread."""
        self._loop.post(call)

    def join(self) -> None:
        """Wait until everything of this run is released (after ``result`` is done)."""
        self._loop.join()

    # -- in the event thread ----------------------------------------------------------------------------------------

    def _on_report(self, worker: WorkerIndex, message: messages.FromWorker) -> None:
        if isinstance(message, messages.MetricsReport):
            self.book.add(int(worker), message)
        elif self.supervision.live is not None:
            self.supervision.live.on_report(worker, message)

    def _look_for_another(self) -> None:
        if self.supervision.live is not None:
            self._watch.look()

    def _beat(self) -> None:
        if self._heart is not None and self._log.generation:
            self._heart.beat(self._log.generation, self.supervision.course)

    def _on_replaced(self, newer: Generation) -> None:
        live = self.supervision.live
        if live is not None and newer > live.number:
            live.replaced_by(newer)

    def _show_progress(self) -> None:
        supervision = self.supervision
        live, machine = supervision.live, supervision.machine
        pending: PendingCheckpoint | None = None if live is None else live.coordination.pending_checkpoint()
        generation = machine.generation or supervision.last_generation or Generation(0)
        restarts_count = supervision.restarts_before + machine.restarts_count
        found = self.book.snapshot(supervision.state, generation, restarts_count, pending)
        self._latest = replace(
            found,
            lost_outputs=self._log.losses.count,
            failures=supervision.restarts_before + supervision.failures_count,
            workers=self.workers.progress(self.book.reports()),
        )
        self._observer.on_progress(self._latest)

    def _on_finish(self, effect: events.Finish) -> None:
        self._show_progress()
        if effect.failure is not None:
            self._end.fail(error_of(effect.failure))
        else:  # behind the callbacks of the last rounds, and behind what they had to say
            end = lambda: self.post(lambda: self._succeed(is_final=effect.is_final))  # noqa: E731
            self.supervision.callbacks.when_done(lambda: self._end_behind_hooks(end))

    def _end_behind_hooks(self, end: Callable[[], None]) -> None:
        """End when hooks have heard what they were told last (EI11); one that is stuck is not waited for long."""
        hooks = self.supervision.hooks
        if hooks.is_listening:
            self._loop.arm("hooks", hooks.patience_ms, end)
        hooks.when_done(end)

    def _succeed(self, *, is_final: bool) -> None:
        supervision = self.supervision
        last = self.book.checkpoints[-1].checkpoint if self.book.checkpoints else supervision.begun_from
        how = RunResult(
            is_final,
            is_drained=supervision.is_drained,
            savepoint=supervision.savepoint,
            has_removed_checkpoints=supervision.has_removed_checkpoints,
            is_removal_in_doubt=supervision.is_removal_in_doubt,
            is_cancelled=supervision.is_cancelled and not is_final,
            had_finished=supervision.had_finished,
        )
        self._end.succeed(self._latest, last, how)

    def _on_error(self, error: BaseException) -> None:
        """A bug: nothing here can decide any more (G26)."""
        self._latest = replace(self._latest, state=PipelineState.FAILED)
        self._end.fail(error)
        self.supervision.end_job()

    def _close(self) -> None:
        try:
            self._close_all()
        finally:
            self._end.release_lock()

    def _close_all(self) -> None:
        self._off.set()
        self.workers.close()
        self.supervision.close()
        # Whoever was replaced has nothing to wait for: its heir has fenced what may hang in storage (C38).
        is_waiting = not isinstance(self._end.result.exception(), FencedError)
        for pool in (self._pools.storage, self._pools.commit, self._pools.savepoint):
            pool.shutdown(wait=is_waiting)
        self.supervision.hooks.close()  # EI12: a claim that was under way may have called them until now
        if self._heart is not None:
            course = self.supervision.course
            problem = self._heart.stop(self._log.generation, self.result, course)  # behind the last commit (SB3)
            if problem:
                self._observer.on_note(problem)


def _told(ask: asking.Ask, outcome: Future[CheckpointOutcome]) -> Future[None]:
    """Answer ``ask`` in the thread that decides, as soon as there is an outcome: the process may end soon after."""
    told: Future[None] = Future()

    def tell(done: Future[CheckpointOutcome]) -> None:
        try:
            ask.answer(done.result())
        finally:
            told.set_result(None)

    outcome.add_done_callback(tell)
    return told


def lock_for(config: PipelineConfig, around: Surroundings = PROCESS) -> PipelineLock:
    """Take the lock of a pipeline for the driver that is made next; it says under which name that one claims.

    Raises:
        UsageError: another driver runs this pipeline.
    """
    given, owner = succession(), f"process {around.process_id} on {around.host}"
    claimant = given.claimant or claimants.claimant(owner, around.token(4).hex())  # differs even within one process
    return PipelineLock.acquire(config.checkpoint_root, config.name, owner, given.lock_nonce, claimant=claimant)
