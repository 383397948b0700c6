"""Carries out the decisions of one generation's checkpoint coordinator and loop probers.

Messages to workers, writes to the checkpoint log, commits, timers. All methods are called in the driver's event
thread, except what runs in its storage, commit and savepoint threads, which report back as events. The user's
``on_round`` callbacks run in a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, assert_never, cast

from headgate import fault_points
from headgate.codec import messages
from headgate.dataclass import dataclass
from headgate.environment import Pool, Queue, Thread, ThreadEnded
from headgate.errors import GO_ON_WITHOUT_IT, FencedError, HeadgateError, OutputDenied, StorageError, UsageError
from headgate.model.config import CheckpointOptions, Guarantee
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import Committable, Manifest, Place, Savepoint, Totals
from headgate.model.plan import LoopNest, PipelineDefinition, Plan
from headgate.model.progress import CheckpointProgress, PendingCheckpoint
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.operators.loop_head import LoopHeadSpec
from headgate.protocol import loop_prober
from headgate.protocol.checkpoints import coordinator as machine
from headgate.protocol.checkpoints import coordinator_events
from headgate.protocol.checkpoints.commit import Commit, forgettable_before, promised_output
from headgate.protocol.checkpoints.recovery import ObservedLog
from headgate.protocol.machine import Ignored
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver.connectors import SourceRetention
from headgate.runtime.driver.event_loop import Timers
from headgate.runtime.driver.hook_calls import HookCalls, failure_text, newer_generation
from headgate.runtime.driver.restart import NewGeneration
from headgate.runtime.surroundings import PROCESS, Surroundings

DROPS_BETWEEN_FORGETTING = 16
"""It reads the log, so it is not done with every checkpoint; targets remember the outcomes of so many more. Each start
does it, too: a run may have fewer drops."""


IN_DRIVER = WorkerIndex(-1)
"""Confirms for listeners in the driver: no worker has this number."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads beside the event thread, one each: what they do, they do in order."""

    storage: Pool
    commit: Pool
    savepoint: Pool
    """Storage of the user's, which may be slow."""


class Recipients(Protocol):
    """The workers, as receivers of decisions."""

    def broadcast(self, message: messages.ToWorker) -> None:
        """Send to every worker of the generation, best effort."""


class RoundListeners(Protocol):
    """Objects given to ``on_round=`` that listen to checkpoints in the driver."""

    @property
    def is_listening(self) -> bool:
        """Whether there is one."""

    def tell(
        self,
        tell: Callable[[CheckpointListener], None],
        failed: Callable[[str, BaseException], None],
        on_done: Callable[[], None],
    ) -> None:
        """Have ``tell`` called with each, in another thread; then ``on_done``, or ``failed`` for what raised."""


class CoordinatorReports(Protocol):
    """What a coordination tells the driver."""

    def generation_failed(self, effect: coordinator_events.FailGeneration) -> None:
        """The coordinator gave up."""

    def generation_done(self, effect: coordinator_events.ConcludeGeneration) -> None:
        """Everything is committed."""

    def checkpoint_completed(self, progress: CheckpointProgress, manifest: Manifest) -> None:
        """Show a completed checkpoint."""

    def request_answered(self, effect: coordinator_events.AnswerRequest) -> None:
        """A requested checkpoint was completed or given up."""

    def note(self, text: str) -> None:
        """A sentence for the user."""


class CoordinatorHost:
    """The coordinator of one generation, for real."""

    def __init__(
        self,
        definition: PipelineDefinition,
        begun: NewGeneration,
        log: CheckpointLog,
        timers: Timers,
        workers: Recipients,
        reports: CoordinatorReports,
        pools: Pools,
        around: Surroundings = PROCESS,
        hooks: HookCalls | None = None,
        rounds: RoundListeners | None = None,
    ) -> None:
        """``rounds``: the ``on_round=`` objects of the driver."""
        self._around = around
        self._hooks = HookCalls() if hooks is None else hooks
        self._rounds = rounds if rounds is not None and rounds.is_listening else None
        self.generation: Generation = begun.generation
        self._definition = definition
        self._begun = begun
        self._log = log
        self._timers = timers
        self._workers = workers
        self._reports = reports
        self._pools = pools
        self._triggered: dict[CheckpointId, tuple[int, int]] = {}
        self._with_savepoints: dict[CheckpointId, Manifest | None] = {}
        """What is completed of the checkpoints that carry savepoints."""
        self._is_closed = False
        self._drops_count = 0
        self._sources = SourceRetention(definition, log, begun.generation)
        self._newest: CheckpointId | None = None
        """The newest checkpoint that was completed."""
        self._is_published = True
        """Whether sources could publish the last one that they were to publish."""
        self.is_started = False
        """Whether every participant runs; what they report before is remembered."""
        plan = definition.plan
        self.machine = machine.Coordinator(
            begun.generation,
            plan.subtasks(),
            definition.config.checkpoints,
            begun.first_checkpoint,
            begun.retained,
            self._hooks.timeouts,
            {vertex.id: plan.downstream(vertex.id) for vertex in plan.vertices if vertex.is_source},
        )
        if self._rounds is not None:
            # nothing is completed yet, so there is no effect to carry out
            self.machine.handle(coordinator_events.ListenerFound(self.generation, IN_DRIVER))

    def start(self, first_delay_ms: int) -> None:
        """Every participant runs: begin to take checkpoints."""
        self.is_started = True
        self.handle(coordinator_events.Started(first_delay_ms))

    def handle(self, event: coordinator_events.Event, cause: str = "") -> None:
        """Give the machine an event; carry out its effects. Ignores everything after ``close``.

        ``cause``: what the machine does not need to know of the event, but the reader of an error.
        """
        if self._is_closed:
            return
        for effect in self.machine.handle(event):
            if cause and isinstance(effect, coordinator_events.FailGeneration):
                effect = replace(effect, failure=replace(effect.failure, reason=f"{effect.failure.reason}: {cause}"))
            self._run(effect)

    def close(self) -> None:
        """The generation is over: results of writes under way no longer matter."""
        self._is_closed = True
        # in the thread of the commits: one that is under way uses the same committers
        self._pools.commit.submit(self._begun.commits.close)

    def pending_checkpoint(self) -> PendingCheckpoint | None:
        """Return how far the oldest checkpoint under way has come."""
        if not self.machine.pending:
            return None
        checkpoint = self.machine.pending[0]
        triggered = self._triggered.get(checkpoint)
        age_ms = 0 if triggered is None else self._around.monotonic_ms() - triggered[0]
        missing = [f"hook {name}" for name in self.machine.awaited_hooks(checkpoint)]
        return PendingCheckpoint(checkpoint, age_ms, (*missing, *(str(s) for s in self.machine.missing(checkpoint))))

    def _run(self, effect: coordinator_events.Effect) -> None:
        match effect:
            case Ignored():  # first: nearly every acknowledgement
                return
            case coordinator_events.ArmTimer():
                timer = effect.timer
                # with the generation: what is left of the last one neither replaces a timer of this one nor fires
                self._timers.arm((self.generation, timer), effect.after_ms, lambda: self._fire(timer))
            case coordinator_events.CancelTimer():
                self._timers.cancel_timer((self.generation, effect.timer))
            case coordinator_events.ReserveId():
                # durable before any barrier: after a crash no other checkpoint gets the same id (R7)
                self._pools.storage.submit(self._reserve, effect.checkpoint)
            case coordinator_events.AnnounceCheckpoint():
                self._has_begun(effect.checkpoint, effect.options)
                self._workers.broadcast(messages.Announce(self.generation, effect.checkpoint, effect.options))
            case coordinator_events.CallHook():
                self._call_hook(effect)
            case coordinator_events.TriggerSources():
                # begun already if hooks were asked first: then the time of the announcement stays
                self._has_begun(effect.checkpoint, effect.options)
                fault_points.reach("before-trigger")
                self._workers.broadcast(messages.TriggerCheckpoint(self.generation, effect.checkpoint, effect.options))
            case coordinator_events.DrainSources():
                self._workers.broadcast(messages.Drain(self.generation))
            case coordinator_events.WriteManifest():
                # both are taken here: the machine goes on while the storage thread writes
                oldest_retained = self.machine.checkpoints.retention.oldest_with(effect.checkpoint)
                assert oldest_retained <= effect.checkpoint, "the checkpoint just completed is retained (C31)"
                self._pools.storage.submit(self._write_manifest, self._manifest(effect), oldest_retained)
            case coordinator_events.NotifyComplete():
                # best effort (C14): after a crash the next generation's recovery has the same effect
                self._workers.broadcast(messages.Complete(self.generation, effect.checkpoint))
                self._tell("notify_checkpoint_complete", effect.checkpoint)
            case coordinator_events.NotifyAbort():
                # as if it had never begun: its prepared output is promised by the next one (C17)
                self._triggered.pop(effect.checkpoint, None)
                self._with_savepoints.pop(effect.checkpoint, None)
                self._reports.note(f"checkpoint {effect.checkpoint} was aborted: {effect.reason.text}")
                self._workers.broadcast(messages.Abort(self.generation, effect.checkpoint))
                self._tell("notify_checkpoint_aborted", effect.checkpoint)
            case coordinator_events.DeleteParts():
                self._pools.storage.submit(self._quietly, lambda: self._log.files.delete(effect.parts))
            case coordinator_events.DropCheckpoint():
                # ordered only when the newer manifest is durable (C31)
                self._pools.storage.submit(self._quietly, lambda: self._drop(effect.checkpoint))
            case coordinator_events.WriteSavepoint():
                manifest = self._with_savepoints.pop(effect.checkpoint)
                assert manifest is not None, "a savepoint is written after the manifest of its checkpoint"
                self._pools.savepoint.submit(self._write_savepoint, effect, manifest)
            case coordinator_events.DropSavepoint():
                self._pools.savepoint.submit(
                    self._quietly, lambda: _remove_savepoint_attempt(Place.parse(effect.target))
                )
            case Commit():
                assert effect.permit.generation == self.generation, "a permit is of one generation (K14)"
                # one thread: the commits of two checkpoints keep their order (K2)
                self._pools.commit.submit(self._commit, effect)
            case coordinator_events.FailGeneration():
                self._reports.generation_failed(effect)
            case coordinator_events.ConcludeGeneration():
                if self.machine.retained:
                    self._pools.storage.submit(self._quietly, self._log.files.sweep)
                self._reports.generation_done(effect)
            case coordinator_events.AnswerRequest():
                self._reports.request_answered(effect)
            case _:
                assert_never(effect)

    def _fire(self, timer: coordinator_events.Timer) -> None:
        if isinstance(timer, coordinator_events.HookTimer) and not self._is_closed:
            self._reports.note(f"hook '{timer.hook}' did not answer for checkpoint {timer.checkpoint} in time")
        self.handle(coordinator_events.TimerFired(timer))

    def _has_begun(self, checkpoint: CheckpointId, options: CheckpointOptions) -> None:
        if options.target is not None:
            self._with_savepoints[checkpoint] = None
        self._triggered.setdefault(checkpoint, (self._around.monotonic_ms(), self._around.wall_ms()))

    def _manifest(self, effect: coordinator_events.WriteManifest) -> Manifest:
        plan = self._definition.plan
        begun_ms, wall_ms = self._triggered.get(effect.checkpoint, (self._around.monotonic_ms(), 0))
        return Manifest(
            effect.checkpoint,
            self.generation,
            plan.parallelism,
            plan.max_parallelism,
            tuple(entry.without_totals() for entry in effect.entries),
            effect.carried,
            plan.state_texts(),
            effect.is_final,
            wall_ms,
            self._around.monotonic_ms() - begun_ms,
            is_draining=effect.is_draining,
            mode=self._definition.config.checkpoints.mode,
            hooks=effect.hooks,
            origin=self._begun.origin,
            left=self._begun.left,
            totals=sum_totals(
                restored_totals(self._begun.restored), *(entry.totals for entry in effect.entries)
            ),  # OM1
            lineages=self._definition.lineages,
        )

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _call_hook(self, effect: coordinator_events.CallHook) -> None:
        """What it answers, it says from its own thread; an answer that comes too late changes nothing."""
        checkpoint, hook = effect.checkpoint, effect.hook

        def failed(error: BaseException) -> None:
            newer = newer_generation(error)  # an external system may know of another driver first (C38)
            if newer is not None:
                self._report(coordinator_events.GenerationReplaced(newer))
                return
            self._note(failure_text(f"hook '{hook}'", f"trigger({checkpoint})", error))
            self._report(coordinator_events.HookFailed(checkpoint, hook))

        self._hooks.trigger(
            checkpoint,
            hook,
            # asked in the hook's thread, when its turn comes
            lambda: checkpoint in self._triggered and not self._is_closed,
            lambda data: self._report(coordinator_events.HookAnswered(checkpoint, hook, data)),
            failed,
        )

    def _tell(self, call: str, checkpoint: CheckpointId) -> None:
        """Notify the listeners in the driver."""

        def tell(listener: CheckpointListener) -> None:
            getattr(listener, call)(int(checkpoint))

        def failed(listener: str, error: BaseException) -> None:
            sentence = failure_text(listener, f"{call}({checkpoint})", error)
            self._timers.post(lambda: self._listener_failed(sentence))

        self._hooks.tell(tell, failed)
        if self._rounds is not None:
            event = coordinator_events.CompletionReported(self.generation, IN_DRIVER, checkpoint)
            self._rounds.tell(tell, failed, lambda: self._report(event))

    def _listener_failed(self, sentence: str) -> None:
        """As any listener's: the checkpoint stays what it is, and the generation starts again."""
        if self._is_closed:
            self._reports.note(sentence)
        else:
            self._reports.generation_failed(coordinator_events.FailGeneration(Failure(FailureKind.LOST, sentence)))

    # -- in the storage thread ------------------------------------------------------------------------------------

    def _reserve(self, checkpoint: CheckpointId) -> None:
        try:
            self._log.reserve(checkpoint)
        except FencedError as error:
            self._report(coordinator_events.GenerationReplaced(Generation(error.newest)))
            return
        except ThreadEnded:
            raise
        except BaseException as error:
            # whatever it was, no barrier has been sent: it counts as a failed checkpoint (C23)
            self._note(f"cannot begin checkpoint {checkpoint}: {error}")
            self._report(coordinator_events.ReserveFailed(checkpoint), str(error))
            return
        self._report(coordinator_events.IdReserved(checkpoint))

    def _write_manifest(self, manifest: Manifest, oldest_retained: CheckpointId) -> None:
        fault_points.reach("before-manifest")
        try:
            # the moment of completion: once this entry is in the log, a restart restores the checkpoint, and the output
            # that it names is promised
            outcome = self._append(manifest, oldest_retained)
        except FencedError as error:
            self._report(coordinator_events.GenerationReplaced(Generation(error.newest)))
            return
        fault_points.reach("after-manifest")
        match outcome:
            case Outcome.WRITTEN:
                self._timers.post(lambda: self._completed(manifest))
            case Outcome.FAILED:  # certainly absent for ever, so its files may go
                self._note(f"cannot write the manifest of checkpoint {manifest.checkpoint}: {self._log.problem}")
                self._report(coordinator_events.ManifestFailed(manifest.checkpoint), self._log.problem)
            case Outcome.UNKNOWN:  # it may be there: nothing is deleted, and the next claim sees
                why = f": {self._log.problem}" if self._log.problem else ""
                self._note(f"it is not known whether the manifest of checkpoint {manifest.checkpoint} was written{why}")
                self._report(coordinator_events.ManifestUnknown(manifest.checkpoint))

    def _append(self, manifest: Manifest, oldest_retained: CheckpointId) -> Outcome:
        try:
            return self._log.append(manifest, oldest_retained)
        except (FencedError, ThreadEnded):
            raise
        except BaseException as error:  # whatever it was, the write may have taken effect (C12)
            self._note(f"cannot write the manifest of checkpoint {manifest.checkpoint}: {error}")
            return Outcome.UNKNOWN

    def _completed(self, manifest: Manifest) -> None:
        """Hand over from the storage thread: the manifest is durable, so that its output may be committed (C12)."""
        assert manifest.generation == self.generation, "a manifest of another generation was written"
        # Also if the generation has failed meanwhile. The next claim is made in the storage thread, too, so it is
        # reported after this: no numbers of the next generation are overwritten here.
        self._triggered.pop(manifest.checkpoint, None)
        if manifest.checkpoint in self._with_savepoints:
            self._with_savepoints[manifest.checkpoint] = manifest
        self._reports.checkpoint_completed(
            CheckpointProgress(
                manifest.checkpoint,
                manifest.duration_ms,
                manifest.size_bytes,
                manifest.trigger_wall_ms,
                self.generation,
                manifest.is_final,
            ),
            manifest,
        )
        # here the machine drops what is too old, gives up older ones under way, notifies, then commits
        self.handle(coordinator_events.ManifestWritten(manifest.checkpoint))
        assert self._newest is None or manifest.checkpoint > self._newest, (
            "checkpoints complete in ascending order (C15)"
        )
        self._newest = manifest.checkpoint
        if self._sources.publishes:
            self._pools.savepoint.submit(self._publish, manifest)

    def _quietly(self, call: Callable[[], None]) -> None:
        """Removing what is not needed may fail; it is tried again when the next generation sweeps."""
        try:
            call()
        except ThreadEnded:
            raise
        except BaseException as error:
            self._note(f"could not remove old checkpoint files: {error}")

    # -- in the thread of savepoints --------------------------------------------------------------------------------

    def _publish(self, manifest: Manifest) -> None:
        """Let sources publish what a checkpoint has read. What they publish to may not answer: commits do not wait.

        Also for the last one, when the generation is over by then: a later generation is not overtaken.
        """
        if manifest.checkpoint != self._newest:  # a newer one is in the queue, and says more
            return
        try:
            self._sources.publish(manifest)
            self._is_published = True
        except FencedError as error:
            self._report(coordinator_events.GenerationReplaced(Generation(error.newest)))
        except UsageError as error:
            failure = Failure(FailureKind.DETERMINISTIC, str(error))
            self._timers.post(lambda: self._publishing_failed(failure))
        except ThreadEnded:
            raise
        except BaseException as error:
            if self._is_published:  # said once, not with every checkpoint as long as it is out of reach
                self._note(f"what checkpoint {manifest.checkpoint} has read was not published: {error}")
            self._is_published = False

    def _publishing_failed(self, failure: Failure) -> None:
        if self._is_closed:
            self._reports.note(failure.reason)
        else:
            self._reports.generation_failed(coordinator_events.FailGeneration(failure))

    def _write_savepoint(self, effect: coordinator_events.WriteSavepoint, manifest: Manifest) -> None:
        # its request was answered when the generation ended, or goes to the next generation (SV10)
        if self._is_closed:
            return
        place = Place.parse(effect.target)
        whole = replace(manifest, entries=effect.entries, carried=(), origin=None, follows=None, log_start=0)  # SV2
        drawn, name = self._around.token(16).hex(), self._definition.config.name
        try:
            fault_points.reach("before-savepoint")
            is_same_cut = effect.is_end or manifest.mode is not Guarantee.AT_MOST_ONCE  # SV9
            life, now_ms = self._log.life_id, self._around.wall_ms()
            savepoint = Savepoint(drawn, name, now_ms, place.prefix, whole, life, is_same_cut)
            SavepointDirectory(place.url).write(savepoint)
            fault_points.reach("after-savepoint")
        except ThreadEnded:
            raise
        except BaseException as error:
            said = str(error) if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"
            self._report(coordinator_events.SavepointFailed(effect.checkpoint, said))
            return
        self._report(coordinator_events.SavepointWritten(effect.checkpoint))

    def _drop(self, checkpoint: CheckpointId) -> None:
        self._log.drop(checkpoint, CheckpointId(checkpoint + 1))
        self._drops_count += 1
        if self._drops_count % DROPS_BETWEEN_FORGETTING != 0:
            return
        observed = self._log.observe()
        # in the other thread: sources and targets may be slow, and manifests must not wait for them
        self._pools.commit.submit(self._tell_sources, observed)
        before = forgettable_before(observed)
        if before is not None:
            self._pools.commit.submit(self._quietly, lambda: self._forget(before, promised_output(observed)))

    # -- in the commit thread -------------------------------------------------------------------------------------

    def _tell_sources(self, observed: ObservedLog) -> None:
        """Let sources release input; what fails now is repeated after further checkpoints."""
        if self._is_closed:
            return
        try:
            self._sources.update(observed)
        except ThreadEnded:
            raise
        except BaseException as error:
            self._note(f"the sources were not notified of what checkpoints still need: {error}")

    def _forget(self, before: CheckpointId, promised: Sequence[Committable]) -> None:
        if not self._is_closed:
            self._begun.commits.forget(before, promised)

    def _commit(self, effect: Commit) -> None:
        checkpoint = effect.permit.checkpoint
        # the manifest promises it: the next generation commits it in recovery
        if self._is_closed:
            return
        try:
            self._begun.commits.commit(effect.permit, effect.committables)
        except FencedError as error:
            self._report(coordinator_events.GenerationReplaced(Generation(error.newest)))
        # what may pass is committed again later; the rest fails the generation for good (K5)
        except StorageError as error:
            self._note(f"commit of checkpoint {checkpoint} failed: {error}")
            self._report(coordinator_events.CommitFailed(checkpoint, str(error), error.is_transient))
        except OutputDenied as error:
            lose = f"; {GO_ON_WITHOUT_IT}" if error.is_output_gone else ""
            self._report(
                coordinator_events.CommitFailed(
                    checkpoint, f"sink '{error.sink}': {error.cause}{lose}", is_transient=False
                )
            )
        except HeadgateError as error:
            self._report(coordinator_events.CommitFailed(checkpoint, str(error), is_transient=False))
        except ThreadEnded:
            raise
        except BaseException as error:
            self._report(
                coordinator_events.CommitFailed(checkpoint, f"{type(error).__name__}: {error}", is_transient=False)
            )
        else:
            # a crash here repeats the commit, which then changes nothing (K1, K7)
            fault_points.reach("after-commit")
            self._report(coordinator_events.CommitSucceeded(checkpoint))

    def _report(self, event: coordinator_events.Event, cause: str = "") -> None:
        self._timers.post(lambda: self.handle(event, cause))

    def _note(self, text: str) -> None:
        self._timers.post(lambda: self._reports.note(text))


def restored_totals(restored: Manifest | None) -> Totals:
    """Return what had been counted when the checkpoint was taken that a generation continues from."""
    return {} if restored is None else restored.totals


def sum_totals(*counted: Totals) -> Totals:
    """Return the sums; what was never counted is left out."""
    sums: Totals = {}
    for totals in counted:
        for node, counts in totals.items():
            of_node = sums.setdefault(node, {})
            for name, count in counts.items():
                if count:
                    of_node[name] = of_node.get(name, 0) + count
    return {node: of_node for node, of_node in sorted(sums.items()) if of_node}


def _remove_savepoint_attempt(place: Place) -> None:
    SavepointDirectory(place.url).give_up(place)


CLOSE_S = 0.5
"""After a success the callbacks have returned; after a failure one may still be busy."""


class RoundCallbacks:
    """Calls ``on_round`` of all loops in all generations of a run, one call after another.

    The thread is a daemon: a callback that never returns must not keep the process of a pipeline that has failed.
    """

    def __init__(self, note: Callable[[str], None], around: Surroundings = PROCESS) -> None:
        """``note`` shows the user a sentence; called from the callbacks' thread."""
        self._note = note
        self._around = around
        self._calls: Queue[Callable[[], None] | None] = around.queue()
        self._thread: Thread | None = None

    def submit(self, loop: NodeName, callback: Callable[[int], object], round_: int) -> None:
        """Call ``callback`` when those before it have returned; what it raises becomes a note."""
        self._put(lambda: self._call(loop, callback, round_))

    def tell(
        self,
        name: str,
        listener: CheckpointListener,
        tell: Callable[[CheckpointListener], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        """Notify ``listener`` of the end of a checkpoint, after the earlier callbacks."""

        def call() -> None:
            try:
                tell(listener)
            except ThreadEnded:
                raise
            except BaseException as error:
                failed(name, error)

        self._put(call)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` when all callbacks so far have returned: in their thread, or at once if there were none."""
        if self._thread is None:
            call()
        else:
            self._put(call)

    def close(self) -> None:
        """End the thread after the waiting callbacks; wait for it, but not long: they are the user's."""
        self._calls.put(None)
        if self._thread is not None and not self._thread.is_current:
            self._thread.join(CLOSE_S)

    def _put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        # made with the first call: most pipelines have no such callbacks
        if self._thread is None:
            self._thread = self._around.thread(self._loop, "headgate-rounds")
            self._thread.start()

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, loop: NodeName, callback: Callable[[int], object], round_: int) -> None:
        try:
            callback(round_)
        except ThreadEnded:
            raise
        except BaseException as error:  # whatever it is, the run's end waits for this thread
            self._note(f"on_round of loop '{loop}' failed in round {round_}: {type(error).__name__}: {error}")


class LoopHost:
    """All nests of one generation."""

    def __init__(
        self,
        definition: PipelineDefinition,
        generation: Generation,
        timers: Timers,
        workers: Recipients,
        callbacks: RoundCallbacks,
    ) -> None:
        plan = definition.plan
        self._generation = generation
        self._timers = timers
        self._workers = workers
        self._is_closed = False
        self._nest_of = {vertex.id: vertex.nest for vertex in plan.vertices}
        self._specs = {nest.name: cast(LoopHeadSpec, definition.graph.node(nest.name).spec) for nest in plan.nests()}
        self._probers = {nest.name: _prober(plan, nest, self._specs[nest.name]) for nest in plan.nests()}
        self._callbacks = callbacks

    def on_message(self, message: messages.EntranceEnded | messages.ProbeReturned) -> None:
        """Take a report of a worker of this generation."""
        nest = self._nest_of.get(message.event.subtask.vertex)
        if self._is_closed or nest is None or message.generation != self._generation:
            return
        for effect in self._probers[nest].handle(message.event):
            self._run(nest, effect)

    @property
    def is_listening(self) -> bool:
        """Whether any ``on_round=`` object listens to checkpoints."""
        return any(isinstance(spec.on_round, CheckpointListener) for spec in self._specs.values())

    def tell(
        self,
        tell: Callable[[CheckpointListener], None],
        failed: Callable[[str, BaseException], None],
        on_done: Callable[[], None],
    ) -> None:
        """Notify them of the end of a checkpoint, after the rounds so far; then ``on_done`` if none failed."""
        problems: list[BaseException] = []

        def note(listener: str, error: BaseException) -> None:
            problems.append(error)
            failed(listener, error)

        for nest, spec in self._specs.items():
            if isinstance(spec.on_round, CheckpointListener):
                self._callbacks.tell(f"on_round of loop '{nest}'", spec.on_round, tell, note)
        self._callbacks.when_done(lambda: None if problems else on_done())

    def close(self) -> None:
        """The generation is over. Callbacks that wait still run: the next generation may not finish those rounds."""
        self._is_closed = True

    def _run(self, nest: NodeName, effect: loop_prober.ProberEffect) -> None:
        match effect:
            case loop_prober.StartProbe():
                self._start(nest, effect)
            case loop_prober.EndLoop():
                self._workers.broadcast(messages.EndLoop(self._generation, nest))
            case loop_prober.RoundFinished():
                callback = self._specs[nest].on_round
                if callback is not None:
                    self._callbacks.submit(nest, callback, effect.round_)
            case Ignored():
                return

    def _start(self, nest: NodeName, effect: loop_prober.StartProbe) -> None:
        message = messages.StartProbe(self._generation, nest, effect.probe)

        def send() -> None:
            # the timer outlives the generation
            if not self._is_closed:
                self._workers.broadcast(message)

        if effect.after_ms:
            self._timers.arm((self._generation, "probe", nest), effect.after_ms, send)
        else:
            send()


def _prober(plan: Plan, nest: LoopNest, spec: LoopHeadSpec) -> loop_prober.LoopProber:
    def subtasks(vertices: tuple[VertexId, ...]) -> list[SubtaskId]:
        return [SubtaskId(vertex, index) for vertex in vertices for index in range(plan.parallelism)]

    return loop_prober.LoopProber(
        subtasks(nest.entrances),
        subtasks(nest.heads[:1]),
        subtasks(nest.heads[1:]),
        subtasks(nest.leaves),
        has_rounds=spec.round_column is not None,
    )
