"""Carries out the decisions of ``protocol.supervision.supervisor``: claims, jobs, deployments, ends of generations.

Everything but the claim happens in the driver's event thread. ``workers`` has the registered workers, ``restart``
begins a generation, ``spark.launcher`` starts workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeAlias, assert_never

from headgate import fault_points
from headgate.codec import messages
from headgate.dataclass import dataclass
from headgate.display.progress import duration_text
from headgate.environment import Event, ThreadEnded, cancellable
from headgate.errors import FencedError, HeadgateError, OutputDenied, UsageError
from headgate.model.failure import Failure, FailureKind, Refusal
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import Manifest, Place
from headgate.model.pipeline_identity import Course
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import (
    CheckpointOutcome,
    CheckpointProgress,
    Continuation,
    Observer,
    PipelineState,
    RunResult,
)
from headgate.protocol.checkpoints import coordinator_events
from headgate.protocol.checkpoints.checkpoint_requests import ONE_END
from headgate.protocol.checkpoints.coordinator_events import SavepointOrder
from headgate.protocol.checkpoints.restore_selection import UnrestorableCheckpoints
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision import supervisor_events
from headgate.protocol.supervision.supervisor import Supervisor
from headgate.protocol.supervision.supervisor_events import AttemptId
from headgate.protocol.watermarks import GroupAligner, alignment_period_ms, timed_sources
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.restore import former_locations, parts_for_worker
from headgate.runtime.driver.cleanup import remove_checkpoints
from headgate.runtime.driver.coordinator_host import CoordinatorHost, LoopHost, Pools, RoundCallbacks, restored_totals
from headgate.runtime.driver.event_loop import Timers
from headgate.runtime.driver.hook_calls import HookCalls
from headgate.runtime.driver.progress import RunProgress
from headgate.runtime.driver.restart import Finished, NewGeneration, begin_generation
from headgate.runtime.driver.takeover import Takeover
from headgate.runtime.driver.workers import WorkerRecord, Workers
from headgate.runtime.surroundings import Surroundings

ENDED = CheckpointOutcome(None, "the pipeline ended")

Answer: TypeAlias = Callable[[CheckpointOutcome], None]
"""Called once with what came of it."""


class PendingRequests:
    """The requests that wait for an answer: each is answered once, by its outcome or by the end of the run."""

    def __init__(self, end: Future[RunResult]) -> None:
        """``end``: of the run; requests that still wait are answered with it."""
        self._end = end
        self._waiting: set[Future[CheckpointOutcome]] = set()
        end.add_done_callback(lambda _: self._answer_all())

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def new(self) -> tuple[Future[CheckpointOutcome], Answer]:
        """Return a future, and the call that answers it; the first answer counts. From any thread."""
        asked: Future[CheckpointOutcome] = Future()
        self._waiting.add(asked)
        asked.add_done_callback(self._waiting.discard)

        def answer(outcome: CheckpointOutcome) -> None:
            with suppress(InvalidStateError):
                asked.set_result(outcome)

        if self._end.done():  # checked after the entry: the end finds it, or this does
            answer(ENDED)
        return asked, answer

    def _answer_all(self) -> None:
        for asked in list(self._waiting):
            with suppress(InvalidStateError):
                asked.set_result(ENDED)


ALIGNMENT = "alignment"
"""Timer: the limits of sources are due."""


class LiveGeneration:
    """Hosts the coordination and the loops of one generation."""

    def __init__(
        self,
        definition: PipelineDefinition,
        begun: NewGeneration,
        coordination: CoordinatorHost,
        looping: LoopHost,
        note: Callable[[str], None],
        timers: Timers,
        workers: Workers,
    ) -> None:
        """Make it; ``note`` shows the user a sentence."""
        runtime = definition.config.runtime
        self.aligner = (
            GroupAligner(timed_sources(definition.plan), runtime.max_drift_ms) if runtime.aligns_sources else None
        )
        self._shares: dict[VertexId, dict[int, tuple[int, int]]] = {}
        self._told: dict[VertexId, messages.SourceShares] = {}
        self._limit_ms: int | None = None
        self._is_limit_due = False
        self._timers, self._workers = timers, workers
        self._definition = definition
        self._begun = begun
        self.coordination = coordination
        self._looping = looping
        self._note = note

    @property
    def number(self) -> Generation:
        """Of this generation."""
        return self._begun.generation

    @property
    def is_started(self) -> bool:
        """Whether every worker runs."""
        return self.coordination.is_started

    @property
    def is_draining(self) -> bool:
        """Whether its sources end, or will end, by a drain."""
        return self.coordination.machine.is_draining

    def deploy(self, workers: Sequence[WorkerRecord]) -> None:
        """Send each of ``workers``, which are all, its part."""
        restored, config = self._begun.restored, self._definition.config
        # a worker finds the address of its peer at the peer's number
        ordered = sorted(workers, key=lambda record: record.worker)
        addresses = [record.address for record in ordered]
        for record in ordered:
            deployment = messages.Deploy(
                self.number,
                addresses,
                parts_for_worker(restored, self._definition.plan, record.worker),
                config.runtime.credit_bytes,
                config.runtime.flush_ms,
                config.checkpoints.inline_bytes_max,
                restored is not None and (restored.is_draining or restored.is_final),  # what was added is not read
                self._begun.first_checkpoint,
                "" if restored is None or restored.place is None else restored.place.text,
                self._begun.life,
                {} if restored is None else former_locations(restored, self._definition),
            )
            record.connection.send(deployment)

    def start(self, first_delay_ms: int) -> None:
        """Every worker runs: begin to take checkpoints."""
        self.coordination.start(first_delay_ms)

    def stop(self, savepoint: SavepointOrder | None = None) -> None:
        """Take a last checkpoint, then end."""
        self.coordination.handle(coordinator_events.StopRequested(savepoint))

    def drain(self, savepoint: SavepointOrder | None = None) -> None:
        """End the sources (E9)."""
        self.coordination.handle(coordinator_events.DrainRequested(savepoint))

    def replaced_by(self, newer: Generation) -> None:
        """Another driver has begun generation ``newer``."""
        if self.number < newer:
            self.coordination.handle(coordinator_events.GenerationReplaced(newer))

    def on_report(self, worker: WorkerIndex, message: messages.FromWorker) -> None:
        """Take what ``worker`` says about its subtasks. What is of another generation, the machines ignore."""
        match message:
            case messages.Acknowledge():
                fault_points.reach("before-ack")
                self.coordination.handle(message.event)
            case messages.Decline():
                if message.text:
                    self._note(f"{message.event.subtask} declined: {message.text}")
                self.coordination.handle(message.event, message.text)
            case messages.ReadsOn() | messages.Finished():
                self.coordination.handle(message.event)
            case messages.Ready():
                if message.is_listening:
                    self.coordination.handle(coordinator_events.ListenerFound(Generation(message.generation), worker))
            case messages.CompletionReport():
                event = coordinator_events.CompletionReported(
                    Generation(message.generation), worker, CheckpointId(message.checkpoint)
                )
                self.coordination.handle(event)
            case messages.SourcePosition() if message.generation == self.number:
                self._align(message.subtask, message.lowest_ms)
            case messages.SourceShare() if message.generation == self.number:
                self._share(message)
            case messages.EntranceEnded() | messages.ProbeReturned():
                self._looping.on_message(message)
            case _:
                return

    def _align(self, subtask: SubtaskId, lowest_ms: int | None) -> None:
        """A source has come forward: others may, too (W21). Reports that come together are answered once (W23)."""
        if self.aligner is None:
            return
        self.aligner.report(subtask, lowest_ms)
        if not self._is_limit_due and self.aligner.limit_ms != self._limit_ms:
            self._is_limit_due = True
            self._timers.arm(ALIGNMENT, alignment_period_ms(self._definition.plan), self._send_limit)

    def _share(self, message: messages.SourceShare) -> None:
        """A source subtask reads other splits, or has read a part to its end: tell all of them.

        Workers hear of it after every checkpoint that was triggered before, so all subtasks begin a part after the same
        checkpoint.
        """
        vertex = message.subtask.vertex
        shares = self._shares.setdefault(vertex, {})
        shares[message.subtask.index] = (message.splits, message.ended_parts)
        is_whole = len(shares) == self._definition.plan.parallelism
        part = min(ended for _, ended in shares.values()) if is_whole else 0
        told = messages.SourceShares(self.number, str(vertex), sum(splits for splits, _ in shares.values()), part)
        if is_whole and told != self._told.get(vertex):
            self._told[vertex] = told
            self._workers.broadcast(told)

    def _send_limit(self) -> None:
        assert self.aligner is not None, "only reports to it make this due"
        self._is_limit_due = False
        if self.aligner.limit_ms != self._limit_ms:
            self._limit_ms = self.aligner.limit_ms
            self._workers.broadcast(messages.ReadTo(self.number, self._limit_ms))

    def close(self) -> None:
        """The generation is over."""
        self._timers.cancel_timer(ALIGNMENT)
        self.coordination.close()
        self._looping.close()


class Launcher(Protocol):
    """Starts workers: in production a Spark barrier stage."""

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """Start all workers; call ``ended`` once, with None or why it failed, when every one of them is gone."""

    def cancel(self, submission: int) -> None:
        """Have the workers of this submission killed."""


NOT_RUNNING = CheckpointOutcome(None, "the pipeline does not run at the moment")


@dataclass(slots=True)
class _FinalSavepoint:
    """A savepoint of the last checkpoint; ``request``: as the generation at work knows it."""

    place: Place
    answer: Answer
    request: int | None = None


class SupervisorHost:
    """Hosts the supervisor of one run, and the generation at work. See ``coordination.Reports``."""

    def __init__(
        self,
        definition: PipelineDefinition,
        launcher: Launcher,
        observer: Observer,
        log: CheckpointLog,
        timers: Timers,
        pools: Pools,
        workers: Workers,
        run_progress: RunProgress,
        on_finish: Callable[[supervisor_events.Finish], None],
        *,
        takeover: Takeover,
        around: Surroundings,
        off: Event,
    ) -> None:
        """Make it. ``on_finish`` gets the outcome of the run; ``takeover`` has a claimant.

        ``off`` is set when the run is to end at once: what it still does in ``pools`` is called off.
        """
        self._definition = definition
        self.launcher = launcher
        self._observer = observer
        self._log = log
        self._timers = timers
        self._pools = pools
        self._off = off
        self._workers = workers
        self._run_progress = run_progress
        self._on_finish = on_finish
        self._takeover = takeover
        self._around = around
        self.callbacks = RoundCallbacks(self.note, around)
        self.hooks = HookCalls(definition.hooks, around, off)
        checkpoints = definition.config.checkpoints
        self.machine = Supervisor(
            definition.plan.parallelism,
            definition.config.restart,
            retain_on_cancel=checkpoints.retain_on_cancel,
            retain_on_failure=checkpoints.retain_on_failure,
        )
        self.live: LiveGeneration | None = None
        self.state = PipelineState.STARTING
        self.failures_count = 0
        """How often something failed."""
        self.restarts_before = takeover.restarts
        self.is_drained = self.is_cancelled = self.had_finished = False
        self._savepoint: CheckpointOutcome | None = None
        self.has_removed_checkpoints = False
        self.is_removal_in_doubt = False
        self.last_generation: Generation | None = takeover.after
        self._submission: int | None = None
        self._deployed: AttemptId | None = None
        self._failed_ms: int | None = None
        self._restored: Manifest | None = None
        self._unsound = UnrestorableCheckpoints()
        self._is_stop_wanted = False
        self._is_drain_wanted = False
        self._asked: dict[int, Answer] = {}
        self._requests_count = 0
        self._at_the_end: _FinalSavepoint | None = None

    @property
    def course(self) -> Course:
        """What the run is at, as far as its user has a say in it."""
        if self._is_stop_wanted:
            return Course.STOPPING
        is_draining = self._is_drain_wanted or (self.live is not None and self.live.is_draining)
        return Course.DRAINING if is_draining else Course.RUNNING

    @property
    def savepoint(self) -> CheckpointOutcome | None:
        """What came of the savepoint with which the run was to end, once it has ended; None if none was asked for."""
        if self._at_the_end is not None:
            return CheckpointOutcome(None, "the pipeline ended")
        return self._savepoint

    @property
    def begun_from(self) -> CheckpointId | None:
        """The checkpoint that the newest generation began from, or the final one of a finished pipeline; None: none."""
        return None if self._restored is None else self._restored.checkpoint

    # -- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: supervisor_events.Event) -> None:
        """Give the machine an event; carry out its effects."""
        for effect in self.machine.handle(event):
            self._run(effect)

    def stop(self) -> None:
        """Take a last checkpoint, commit it, then end."""
        # kept: a generation that is not running yet stops when it does (_start)
        self._is_stop_wanted = True
        # before it is done: a supervisor must not start again a driver that dies over it (KR13)
        self._takeover.on_course(Course.STOPPING)
        if self.live is not None and self.live.is_started:
            self.state = PipelineState.STOPPING
            self.live.stop(self._ordered_for_the_end())
        elif self.state is not PipelineState.STARTING and self._at_the_end is None:
            self._end_at_once(retain=True)  # between two generations: the last checkpoint stands

    def cancel(self, *, retain: bool) -> None:
        """End without another checkpoint; ``retain``: and keep those that there are, whatever is configured."""
        self.is_cancelled = True
        self._end_at_once(retain=retain)

    def _end_at_once(self, *, retain: bool) -> None:
        self._is_stop_wanted = True
        self._takeover.on_course(Course.STOPPING)
        # what the storage thread waits for, such as a claim that is tried again, is given up
        self._off.set()
        self.handle(supervisor_events.CancelRequested(retain))

    def drain(self) -> None:
        """End the sources now, and in every later generation of this run (E9)."""
        self._is_drain_wanted = True
        self._takeover.on_course(Course.DRAINING)
        if self.live is not None:
            self.live.drain(self._ordered_for_the_end())
        if self.state is PipelineState.RUNNING:
            self.state = PipelineState.DRAINING

    def ask(self, answer: Answer) -> None:
        """Take a checkpoint now; ``answer`` is called once with what came of it (C61)."""
        if self.live is None:
            answer(NOT_RUNNING)
        else:
            self.live.coordination.handle(coordinator_events.CheckpointRequested(self._number(answer)))

    def ask_for_savepoint(self, place: Place, answer: Answer) -> None:
        """Take a savepoint now; ``answer`` is called once with what came of it."""
        if self.live is None:
            answer(NOT_RUNNING)
        else:
            order = SavepointOrder(self._number(lambda outcome: answer(_in_place(place, outcome))), place.text)
            self.live.coordination.handle(coordinator_events.SavepointRequested(order))

    def end_with_savepoint(self, place: Place, answer: Answer, *, drain: bool) -> None:
        """End with a savepoint of the last checkpoint, whatever fails until then (SV10)."""
        if self._at_the_end is not None:
            answer(CheckpointOutcome(None, ONE_END))
            return
        self._at_the_end = _FinalSavepoint(place, answer)
        self.drain() if drain else self.stop()

    def _number(self, answer: Answer) -> int:
        self._requests_count += 1
        self._asked[self._requests_count] = answer
        return self._requests_count

    def _ordered_for_the_end(self) -> SavepointOrder | None:
        """Return the savepoint that the last checkpoint of this generation is to carry, once."""
        asked = self._at_the_end
        if asked is None or asked.request is not None:
            return None
        asked.request = self._number(self._answer_at_the_end)
        return SavepointOrder(asked.request, asked.place.text)

    def _answer_at_the_end(self, outcome: CheckpointOutcome) -> None:
        asked, self._at_the_end = self._at_the_end, None
        assert asked is not None, "only a run that ends with a savepoint orders one for its end"
        self._savepoint = _in_place(asked.place, outcome)
        asked.answer(self._savepoint)

    def job_ended(self, submission: int, failure: Failure | None) -> None:
        """Every task of a submission is gone. From any thread."""
        jitter, now_ms = self._around.random.random(), self._around.monotonic_ms
        self._timers.post(lambda: self.handle(supervisor_events.JobEnded(submission, failure, now_ms(), jitter)))

    def end_job(self) -> None:
        """End the job of a driver that cannot go on."""
        if self._submission is not None:
            self.launcher.cancel(self._submission)

    def close(self) -> None:
        """Give up what is at work; the run has ended."""
        self.callbacks.close()
        if self.live is not None:
            self.live.coordination.close()

    # -- effects ----------------------------------------------------------------------------------------------------

    def _run(self, effect: supervisor_events.Effect) -> None:
        match effect:
            case supervisor_events.ClaimGeneration():
                # after all writes of the former generation: they are in the queue of the same thread
                self._pools.storage.submit(self._claim)
            case supervisor_events.SubmitJob():
                number = self._submission = effect.submission
                address, secret = self._workers.address, self._workers.secret
                self.launcher.submit(number, address, secret, lambda failure: self.job_ended(number, failure))
            case supervisor_events.CancelJob():
                self.launcher.cancel(effect.submission)
            case supervisor_events.Deploy():
                assert self.live is not None, "a generation is claimed before it is deployed"
                assert self.live.number == effect.generation, "only the newest claim is deployed"
                self._deployed = effect.attempt
                self.live.deploy(self._workers.of(effect.attempt))
            case supervisor_events.StartCoordinator():
                self._start()
            case supervisor_events.EndGeneration():
                self._end_generation(effect)
            case supervisor_events.RefuseWorker():
                self._workers.refuse(effect.attempt, effect.worker)
            case supervisor_events.ArmTimer():
                timer = effect.timer
                self._timers.arm(timer, effect.after_ms, lambda: self.handle(self._fired(timer)))
            case supervisor_events.ReportRestart():
                self.state = PipelineState.RESTARTING
                self.failures_count += 1
                self._note_damage(effect.failure)
                self._observer.on_restart(effect.failure.reason, effect.delay_ms)
            case supervisor_events.RemoveCheckpoints():
                # not called off with all else: a cancel orders it, and has set `_off` before
                self._pools.storage.submit(cancellable(None, self._remove))  # C71
            case supervisor_events.Finish():
                self.state = PipelineState.FINISHED if effect.failure is None else PipelineState.FAILED
                self.failures_count += effect.failure is not None
                self._on_finish(effect)
            case Ignored():
                return
            case _:
                assert_never(effect)

    def _fired(self, timer: supervisor_events.Timer) -> supervisor_events.TimerFired:
        return supervisor_events.TimerFired(timer, self._around.monotonic_ms(), self._around.random.random())

    def _claim(self) -> None:
        """Runs in the storage thread."""
        try:
            begun = begin_generation(
                self._definition,
                self._log,
                self._takeover.claimant,
                self.note,
                self.last_generation,
                self._around,
                self.hooks,
                self._unsound,
            )
        except ThreadEnded:
            raise
        except BaseException as error:  # of a user's sink or hook, too
            failure, jitter = claim_failure(error), self._around.random.random()
            self._timers.post(
                lambda: self.handle(supervisor_events.ClaimFailed(failure, self._around.monotonic_ms(), jitter))
            )
        else:
            self._timers.post(lambda: self._claimed(begun))

    def _note_damage(self, failure: Failure) -> None:
        """Have the next claim know the damage that a worker found (R57)."""
        if failure.kind is FailureKind.DAMAGED and self._restored is not None:
            self._unsound.note(self._restored, failure)

    def _remove(self) -> None:
        """Runs in the storage thread."""
        doubts: list[str] = []

        def doubt(text: str) -> None:
            doubts.append(text)
            self.note(text)

        is_removed = remove_checkpoints(
            self._definition, self._log, self._takeover, self.note, self._around, self._unsound, doubt
        )
        self._timers.post(lambda: self._removed(is_removed, is_in_doubt=bool(doubts)))

    def _removed(self, is_removed: bool, *, is_in_doubt: bool) -> None:
        self.has_removed_checkpoints, self.is_removal_in_doubt = is_removed, is_in_doubt
        self.handle(supervisor_events.CheckpointsRemoved())

    def _claimed(self, begun: NewGeneration | Finished) -> None:
        if isinstance(begun, Finished):  # no generation begins: its sinks are recovered, and the final checkpoint stays
            self._restored = begun.manifest
            self._run_progress.begin(begun.manifest.generation, begun.manifest.totals)  # OM1: nothing is added to them
            self._observer.on_note(self._already_finished(begun.manifest))
            self.is_drained, self.had_finished = begun.manifest.is_draining, True
            self.handle(supervisor_events.AlreadyFinished(begun.manifest.checkpoint))
            return
        assert self.live is None, "the former generation ends before the next one is claimed"
        assert begun.generation > (self.last_generation or 0), "every claim is of a later generation"
        self.last_generation = begun.generation
        self._restored = begun.restored
        # at once: if this driver dies now, the next child must know that it follows this claim (KR10)
        self._takeover.on_claim(begun.generation)
        # From now on, not from its start: a quick subtask reports before the last worker is ready.
        definition, timers, workers = self._definition, self._timers, self._workers
        looping = LoopHost(definition, begun.generation, timers, workers, self.callbacks)
        coordination = CoordinatorHost(
            definition, begun, self._log, timers, workers, self, self._pools, self._around, self.hooks, looping
        )
        self.live = LiveGeneration(definition, begun, coordination, looping, self.note, timers, workers)
        self._run_progress.begin(begun.generation, restored_totals(begun.restored))
        if begun.restored is not None:
            before, now = begun.restored.parallelism, definition.plan.parallelism
            self._observer.on_note(Continuation(begun.generation, begun.restored.checkpoint, before, now))
        # a drain outlives the generation in which it was requested
        if self._is_drain_wanted:  # E9
            self.live.drain(self._ordered_for_the_end())
        elif begun.restored is not None and begun.restored.is_draining:
            self.live.drain()
        workers_before = 0 if begun.restored is None else begun.restored.parallelism
        # last: if the workers are there, this deploys at once
        self.handle(supervisor_events.GenerationReady(begun.generation, workers_before))

    def _already_finished(self, final: Manifest) -> str:
        how = (
            "was drained and does not continue"
            if final.is_draining
            else "has already processed all its input; what was added since is not read"
        )
        return (
            f"pipeline '{self._definition.config.name}' {how} (final checkpoint {final.checkpoint}); to run it again, "
            "start over with run(fresh=True) or headgate run PROGRAM --fresh, or give it another name"
        )

    def _start(self) -> None:
        """Every worker runs."""
        live = self.live
        assert live is not None, "workers are ready for a generation that is over"
        assert not live.is_started, "the coordinator of a generation starts once (G10)"
        self.state = PipelineState.DRAINING if live.is_draining else PipelineState.RUNNING
        interval_ms = self._definition.config.checkpoints.interval_ms
        live.start(round(interval_ms * (0.5 + self._around.random.random() / 2)))
        if self._failed_ms is not None:
            took_ms = self._around.monotonic_ms() - self._failed_ms
            self._failed_ms = None
            self._observer.on_note(f"generation {live.number} runs {duration_text(took_ms)} after the failure")
        if self._is_stop_wanted:
            self.stop()

    def _end_generation(self, effect: supervisor_events.EndGeneration) -> None:
        if not effect.is_done:
            self._failed_ms = self._around.monotonic_ms()
        # first: a closed coordinator answers nothing more, so the requests taken below are answered once
        if self.live is not None:
            self.live.close()
            self.live = None
        # requests end with their generation, but for the savepoint of the run's end
        asked, self._asked = self._asked, {}
        if self._at_the_end is not None and self._at_the_end.request is not None and not effect.is_done:
            del asked[self._at_the_end.request]
            self._at_the_end.request = None  # the next generation takes it (SV10)
        for answer in asked.values():  # C62
            answer(CheckpointOutcome(None, "the pipeline ended" if effect.is_done else "the pipeline restarted"))
        if self._deployed is not None:  # workers of Spark's own retry wait for the next generation
            self._workers.stop(self._deployed, is_success=effect.is_done)

    # -- what workers and coordinations report ----------------------------------------------------------------------

    def generation_failed(self, effect: coordinator_events.FailGeneration) -> None:
        generation = self.machine.generation
        if generation is not None:
            now_ms, jitter = self._around.monotonic_ms(), self._around.random.random()
            self.handle(supervisor_events.GenerationFailed(generation, effect.failure, now_ms, jitter))

    def generation_done(self, effect: coordinator_events.ConcludeGeneration) -> None:
        self.state = PipelineState.STOPPING
        if self.live is not None:
            self.is_drained = effect.is_final and self.live.is_draining
            self.handle(supervisor_events.GenerationDone(self.live.number, effect.is_final))

    def checkpoint_completed(self, progress: CheckpointProgress, manifest: Manifest) -> None:
        self._run_progress.completed(progress, manifest)
        self._observer.on_checkpoint(progress.checkpoint, progress.duration_ms, progress.size_bytes)

    def request_answered(self, effect: coordinator_events.AnswerRequest) -> None:
        assert effect.request in self._asked, "a request is answered once (C61)"
        self._asked.pop(effect.request)(CheckpointOutcome(effect.checkpoint, effect.reason))

    def note(self, text: str) -> None:
        """Show the user a sentence. From any thread."""
        self._timers.post(lambda: self._observer.on_note(text))


def _in_place(place: Place, outcome: CheckpointOutcome) -> CheckpointOutcome:
    """Return ``outcome`` with where the savepoint is, if there is one."""
    return outcome if outcome.checkpoint is None else replace(outcome, savepoint=place.url)


def claim_failure(error: BaseException) -> Failure:
    """Return what may be done about a claim that failed with ``error``."""
    match error:
        case UsageError() | OutputDenied():  # K5: in recovery as in the coordinator
            return Refusal(FailureKind.DETERMINISTIC, str(error), remedy=error.remedy)
        case FencedError():
            return Failure(FailureKind.REPLACED, str(error))
        case HeadgateError():
            return Failure(FailureKind.LOST, str(error))
        case _:
            return Failure(FailureKind.DETERMINISTIC, f"{type(error).__name__}: {error}")
