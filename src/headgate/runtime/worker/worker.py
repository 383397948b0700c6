"""One worker: the process that a Spark task has become, for one generation of the pipeline.

Life: listen for data → register → deployment → restore → connect → ready → the mailbox loop → stop. Every operator
runs in the mailbox thread; threads of the control and data connections only queue and wake (walk of a record:
ARCHITECTURE.md). The worker never outlives its control connection: it exits at once when that closes (G10).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from headgate.codec import messages
from headgate.dataclass import dataclass
from headgate.environment import ThreadEnded
from headgate.errors import BadRecord, FencedError, HeadgateError, StorageError, TruncatedError
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, WorkerIndex
from headgate.model.manifest import Copied, SnapshotPart, SubtaskEntry
from headgate.model.plan import PipelineDefinition
from headgate.operators.user_functions import HookError, UserFunctionError, user_traceback
from headgate.protocol import loop_prober
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    Declined,
    FinishReported,
    SourceReadsOn,
)
from headgate.protocol.subtasks import alignment, loops
from headgate.protocol.subtasks import subtask as machine
from headgate.runtime.checkpoints.restore import NotRestorable, owned_key_groups
from headgate.runtime.checkpoints.snapshot_writer import PrepareRefused, SnapshotDestination, SnapshotWriter
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.runtime.wire.connection import ConnectionLost
from headgate.runtime.wire.control import ControlClient
from headgate.runtime.wire.exchange import Exchange, ExchangeCallbacks
from headgate.runtime.wire.spill import SpillBudget
from headgate.runtime.worker.chain import NodeError, Stopwatch
from headgate.runtime.worker.deployment import Deployment, edge_schemas
from headgate.runtime.worker.loop_head import LoopHeadRunner
from headgate.runtime.worker.metrics import WorkerMetrics
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.state.snapshot import LocalDamage, OwnedKeys, UnsoundFiles
from headgate.state.worker_backends import WorkerStates, worker_states
from headgate.storage.urls import open_storage
from headgate.store.streams import OtherSchemaError
from headgate.tls import Tls

EXIT_FENCED = 75
"""Exit code of a worker that has lost its coordinator."""

UPLOAD_THREADS = 4
"""Snapshots of different subtasks are written side by side; they mostly wait for the disk."""

WAIT_MS_MAX = 50
"""Longest sleep of an idle mailbox: bounds the delay of anything that forgot to wake it."""

METRICS_PERIOD_MS = 500

PEER_GRACE_MS = 500
"""When a peer leaves, the coordinator usually knows why and stops this worker, too, well within this time."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a worker needs to know before it can register."""

    definition: PipelineDefinition
    worker: WorkerIndex
    submission: int
    task_attempt: int
    """Spark's id of the task attempt: rises with every task that its application starts."""
    driver_host: str
    driver_port: int
    secret: bytes
    bind_host: str
    fingerprint: str
    spill_directory: str | None = None
    """Where loops put what does not fit into memory, and RocksDB its files; None: the system's directory for temporary
    files."""
    deaths: tuple[messages.Obituary, ...] = ()
    """How former workers of this machine ended, as far as is known here."""


class WorkerStopped(Exception):  # noqa: N818 - not an error of ours: it tells Spark that this task must not succeed
    """The worker had to stop, or could not go on; the driver knows why."""


class PeerLost(Exception):  # noqa: N818 - an event of the mailbox
    """The data connection with another worker is gone."""

    def __init__(self, peer: WorkerIndex, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"the data connection with worker {self.peer} was lost: {self.reason}"


class Worker:
    """Runs the subtasks of one worker until a stop message."""

    def __init__(self, task: WorkerTask, around: Surroundings = PROCESS) -> None:
        self._around = around
        self._process_id = around.process_id
        self._task = task
        self._tls = Tls(task.definition.config.security)
        limits = task.definition.config.runtime
        directory = None if task.spill_directory is None else Path(task.spill_directory)
        self.loop_budget = SpillBudget(limits.loop_memory_bytes, limits.loop_disk_bytes_max, directory)
        """What the loops of this worker use together; nothing before it runs, and nothing afterwards."""
        self._states: WorkerStates | None = None
        self._is_state_left = False
        self._mail: deque[messages.ToWorker | tuple[SubtaskRunner, machine.Event, str] | BaseException] = deque()
        self._wake = around.event()
        self._generation = Generation(0)
        self._runners: list[SubtaskRunner] = []
        self._by_subtask: dict[SubtaskId, SubtaskRunner] = {}
        self._pool = around.pool(UPLOAD_THREADS, "headgate-upload")
        self._stopping: messages.Stop | None = None
        self._is_listening = False
        self._metrics = WorkerMetrics(around.monotonic_ns)
        self._peer_lost: tuple[int, PeerLost] | None = None
        self._overtakes = task.definition.config.checkpoints.alignment_timeout_ms is not None
        self._has_arrivals = False
        self._exchange: Exchange | None = None
        self._is_leaving = False
        self._watch: Stopwatch | None = None

    @property
    def is_deployed(self) -> bool:
        """Whether it serves a generation, or has served one. From any thread."""
        return self._generation != Generation(0)

    @property
    def running_operator(self) -> str:
        """Which operator runs in the mailbox thread now, for logs; "": none."""
        # read from another thread while the mailbox switches it: one reference, old or new, both were true a moment ago
        running = None if self._watch is None else self._watch.running
        return "" if running is None else running.node

    def run(self) -> None:
        """Serve one generation; return when the pipeline has ended well.

        Raises:
            WorkerStopped: anything else. The coordinator knows the reason.
        """
        sys.setswitchinterval(0.001)  # connection threads must not wait 5 ms for a busy mailbox
        pa.set_cpu_count(1)  # as many workers as cores share the machine
        task = self._task
        callbacks = ExchangeCallbacks(
            lambda _: self._wake.set(),
            lambda _: self._wake.set(),
            self._on_peer_lost,
            self._post,
            self._on_arrival if self._overtakes else None,
        )
        # listens from here: its address goes to the driver with Register, before any generation exists
        exchange = self._exchange = Exchange(
            task.worker,
            task.definition.plan,
            edge_schemas(task.definition),
            task.secret,
            callbacks,
            budget=self.loop_budget,
            host=task.bind_host,
            tls=self._tls,
            around=self._around,
        )
        try:
            control = self._control = self._connect_to_driver()
        except ConnectionLost as lost:
            self._close(exchange)
            raise WorkerStopped(str(lost)) from None
        control.start()
        try:
            self._register(control, exchange)
            self._serve(control, exchange)
        except WorkerStopped:
            raise
        except BaseException as error:
            self._end_if_forked()
            # kept for _close(), which runs in the finally below
            self._is_state_left = keeps_local_files(error)
            if not self._is_leaving:
                control.send(self._last_words(error))
            raise WorkerStopped(str(error)) from None
        finally:
            control.close()  # first: peers that notice our end must not be heard before our own reason
            self._close(exchange)
        if self._stopping is None or not self._stopping.is_success:
            raise WorkerStopped(self._stopping.reason if self._stopping else "stopped")

    def leave(self) -> None:
        """End soon and in silence, as if killed. For a worker that is not a process. From any thread."""
        self._is_leaving = True
        self._mail.append(messages.Refused("it was asked to leave"))
        self._wake.set()
        if self._exchange is not None:  # the mailbox may wait for another worker there
            self._exchange.close()

    def _end_if_forked(self) -> None:
        """End a child that a user's function forked and that came back here: it must not act as this worker.

        It has the connections and the locked files of this worker, but none of its threads: it would be taken for
        the worker, and would never end.
        """
        if self._around.process_id != self._process_id:
            # by neither ``sys.stderr`` nor the surroundings: a thread that is not here may have had the lock of the
            # one, and the others end a thread where workers are threads
            os.write(
                2,
                b"headgate: a function forked this process and did not end the child; it was ended here. Leave a "
                b"forked child with os._exit(), or use subprocess or multiprocessing\n",
            )
            os._exit(1)

    def _last_words(self, error: BaseException) -> messages.Failed:
        """Say why this worker cannot go on; a peer that left may have said why itself (G15)."""
        peer = error.peer if isinstance(error, PeerLost) else None
        return messages.failed(self._generation, failure_of(error), peer)

    # -- beginning ----------------------------------------------------------------------------------------------

    def _connect_to_driver(self) -> ControlClient:
        task, config = self._task, self._task.definition.config.runtime
        return ControlClient(
            task.driver_host,
            task.driver_port,
            task.secret,
            self._post,
            self._on_control_closed,
            heartbeat_ms=config.heartbeat_ms,
            heartbeat_timeout_ms=config.heartbeat_timeout_ms,
            tls=self._tls,
            around=self._around,
            is_wanted=lambda: not self._is_leaving,
        )

    def _register(self, control: ControlClient, exchange: Exchange) -> None:
        task = self._task
        control.send(
            messages.Register(
                int(task.worker),
                task.definition.plan.parallelism,
                task.submission,
                task.task_attempt,
                exchange.address,
                self._around.process_id,
                task.fingerprint,
            )
        )
        for death in task.deaths:
            control.send(death)

    def _serve(self, control: ControlClient, exchange: Exchange) -> None:
        deploy = self._await_deployment()
        if deploy is None:
            return
        assert not self.is_deployed, "a worker serves one generation"
        self._generation = Generation(deploy.generation)
        # A restart begins here in every worker: connect with all others, open and restore, then say so. The driver
        # triggers nothing before every worker is ready.
        self._deploy(deploy, exchange)
        control.send(messages.Ready(deploy.generation, self._is_listening))
        for runner in self._runners:
            runner.start()
        self._loop()

    def _await_deployment(self) -> messages.Deploy | None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._mail:
                message = self._mail.popleft()
                # anything else is of no concern to a worker that has no generation yet
                if isinstance(message, messages.Deploy):
                    return message
                if isinstance(message, messages.Stop):
                    self._stopping = message
                    return None
                if isinstance(message, messages.Refused):
                    raise WorkerStopped(message.reason)

    def _deploy(self, deploy: messages.Deploy, exchange: Exchange) -> None:
        definition = self._task.definition
        storage = open_storage(definition.config.checkpoint_root)
        keys = OwnedKeys(owned_key_groups(definition.plan, self._task.worker), definition.plan.max_parallelism)
        to = SnapshotDestination(storage, definition.config.name, self._generation, deploy.inline_bytes_max, keys)
        task = self._task
        # A savepoint elsewhere is the user's: the next snapshots must not refer to its files, so none counts as
        # shareable.
        restored = [] if deploy.place else [part for former in deploy.restored for part in former.parts]
        # before the subtasks are built: they are given their channels, which exist only from here on
        exchange.start(self._generation, deploy.addresses, deploy.credit_bytes)
        config = definition.config
        self._states = worker_states(config.state, self._task.spill_directory, config.operator_states)
        deployment = Deployment(
            definition,
            self._task.worker,
            deploy,
            storage,
            exchange,
            lambda s: self._snapshot_writer(s, to, restored),
            self,
            self.loop_budget,
            self._around,
            self._is_interrupted,
            self._states,
            task.spill_directory,
            self._around,
            self._wake.set,
        )
        self._watch = deployment.watch
        self._runners = deployment.runners()
        self._by_subtask = {runner.subtask: runner for runner in self._runners}
        self._is_listening = any(runner.is_listening for runner in self._runners)

    def _snapshot_writer(
        self, subtask: SubtaskId, to: SnapshotDestination, restored: Sequence[SnapshotPart]
    ) -> SnapshotWriter:
        def report(event: machine.SnapshotWritten | machine.SnapshotFailed, text: str) -> None:
            # in an upload thread: it only queues (append is atomic), the machine hears of it in the mailbox
            self._mail.append((self._by_subtask[subtask], event, text))
            self._wake.set()

        return SnapshotWriter(subtask, to, self._pool, report, self._post, self._around, restored)

    # -- the mailbox loop ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        runners, wake, metrics = self._runners, self._wake, self._metrics
        metrics.start()
        while self._stopping is None:
            self._end_if_forked()
            wake.clear()  # before looking: whatever comes later sets it again
            did = bool(self._mail)
            while self._mail:
                self._on_mail(self._mail.popleft())
            if self._has_arrivals:
                self._has_arrivals = False  # before looking: whatever comes later sets it again
                for runner in runners:
                    runner.note_arrivals()
            for runner in runners:  # downstream first: drain before producing more
                if runner.step():
                    did = True
            now = self._around.monotonic_ms()
            for runner in runners:
                runner.tick(now)
            if not did:
                self._sleep(now)
            if metrics.is_due(now, METRICS_PERIOD_MS):
                self._report_metrics()
            if self._peer_lost is not None:
                self._give_up_without(*self._peer_lost)

    def _give_up_without(self, since_ms: int, lost: PeerLost) -> None:
        """Raise ``lost`` after the grace, unless the coordinator has said why the peer left."""
        # the mail is looked at, too: the driver's stop may have come while the subtasks ran
        if self._stopping is None and not self._mail and self._around.monotonic_ms() - since_ms > PEER_GRACE_MS:
            raise lost

    def _sleep(self, now: int) -> None:
        wait_ms = WAIT_MS_MAX
        for runner in self._runners:
            due_ms = runner.wakeup_ms(now)
            if due_ms is not None:
                wait_ms = min(wait_ms, due_ms)
        begun = self._around.monotonic_ns()
        self._wake.wait(wait_ms / 1000)
        self._metrics.slept(self._around.monotonic_ns() - begun)

    def _report_metrics(self) -> None:
        assert self._exchange is not None, "run() makes the exchange before the mailbox loop"
        busy = self._metrics.busy_fraction()
        for runner in self._runners:
            runner.chain.set_busy(busy > 0.9)
        self._control.send(self._metrics.message(self._generation, busy, self._runners, self._exchange.metrics))

    def _on_mail(self, mail: messages.ToWorker | tuple[SubtaskRunner, machine.Event, str] | BaseException) -> None:
        match mail:
            case PeerLost():
                # the first one: further losses usually follow from it, and the grace counts from the first
                self._peer_lost = self._peer_lost or (self._around.monotonic_ms(), mail)
            case BaseException():
                raise mail
            case (runner, event, text):
                # of the snapshot writer: written, or failed
                runner.handle(event, text)
            case messages.Announce() if mail.generation == self._generation:
                for runner in self._runners:
                    runner.announce(CheckpointId(mail.checkpoint), mail.options)
                    if isinstance(runner, LoopHeadRunner):  # a barrier may come before the others are triggered
                        runner.expect(CheckpointId(mail.checkpoint))
            case messages.TriggerCheckpoint() if mail.generation == self._generation:
                # Sources cut here, and their barriers bring the checkpoint to all others; a loop head must only not
                # throttle the input on which its barrier comes.
                for runner in self._runners:
                    runner.note_trigger(CheckpointId(mail.checkpoint))
                    if runner.is_source:
                        runner.trigger(CheckpointId(mail.checkpoint), mail.options)
                    elif isinstance(runner, LoopHeadRunner):
                        runner.expect(CheckpointId(mail.checkpoint))
            case messages.StartProbe() if mail.generation == self._generation:
                for runner in self._runners:
                    if runner.subtask.vertex == mail.nest:
                        runner.handle(loops.ProbeOrdered(mail.probe))
            case messages.EndLoop() if mail.generation == self._generation:
                for runner in self._runners:
                    if isinstance(runner, LoopHeadRunner) and runner.chain.vertex.nest == mail.nest:
                        runner.handle(machine.LoopEnded())
            case messages.Complete() if mail.generation == self._generation:
                # The manifest is durable. No sink commits here: the driver does that, with the committables of the
                # manifest.
                for runner in self._runners:
                    runner.handle(machine.CompleteReceived(CheckpointId(mail.checkpoint)))
                if self._is_listening:  # HL7
                    self._control.send(messages.CompletionReport(mail.generation, mail.checkpoint))
            case messages.Abort() if mail.generation == self._generation:
                # to all, not only the sources: the barrier may be anywhere, and this is quicker than a cancel marker
                for runner in self._runners:
                    runner.handle(alignment.AbortReceived(CheckpointId(mail.checkpoint)))
            case messages.Drain() if mail.generation == self._generation:
                for runner in self._runners:
                    if runner.is_source:
                        runner.drain()
            case messages.ReadTo() if mail.generation == self._generation:
                for runner in self._runners:
                    runner.read_to(mail.limit_ms)
            case messages.SourceShares() if mail.generation == self._generation:
                for runner in self._runners:
                    if str(runner.subtask.vertex) == mail.vertex:
                        runner.share(mail.splits, mail.part)
            case messages.Stop():
                self._stopping = mail
            case messages.Refused():
                raise WorkerStopped(mail.reason)
            case _:
                return  # of another generation, or a sign of life

    # -- what subtasks report (``subtask_runner.Reports``) ---------------------------------------------------------

    def acknowledge(self, checkpoint: CheckpointId, entry: SubtaskEntry, copied: Copied | None = None) -> None:
        """Send an acknowledgement."""
        self._control.send(messages.Acknowledge(Acknowledged(self._generation, checkpoint, entry, copied)))

    def decline(self, subtask: SubtaskId, checkpoint: CheckpointId, reason: AbortReason, text: str) -> None:
        """Send a decline."""
        declined = Declined(self._generation, subtask, checkpoint, reason)
        self._control.send(messages.Decline(declined, text))

    def reads_on(self, subtask: SubtaskId, uncut: tuple[CheckpointId, ...]) -> None:
        """Report that a source comes forward."""
        self._control.send(messages.ReadsOn(SourceReadsOn(self._generation, subtask, uncut)))

    def source_position(self, subtask: SubtaskId, lowest_ms: int | None) -> None:
        """Report how far a source has come."""
        self._control.send(messages.SourcePosition(self._generation, subtask, lowest_ms))

    def source_share(self, subtask: SubtaskId, splits: int, ended_parts: int) -> None:
        """Report what a source reads."""
        self._control.send(messages.SourceShare(self._generation, subtask, splits, ended_parts))

    def finished(self, subtask: SubtaskId) -> None:
        """Report that a subtask has processed all input, with its totals in front.

        Its own alone: at the end of a pipeline all subtasks finish, and each report of all of them has hundreds.
        """
        runner = self._by_subtask[subtask]
        if self._metrics.has_reported and runner.source_progress() is None and not isinstance(runner, LoopHeadRunner):
            self._control.send(self._metrics.part(self._generation, runner))
        else:
            self._report_metrics()
        self._control.send(messages.Finished(FinishReported(self._generation, subtask)))

    def entrance_ended(self, subtask: SubtaskId, effect: loops.ReportEntranceEnded) -> None:
        """Report that nothing enters a nest of loops here any more."""
        event = loop_prober.EntranceEnded(subtask, effect.started_round, effect.highest_round)
        self._control.send(messages.EntranceEnded(self._generation, event))

    def probe_returned(self, subtask: SubtaskId, effect: loops.ReportProbe) -> None:
        """Report what came back with a probe."""
        event = loop_prober.ProbeReturned(subtask, effect.number, effect.count, effect.highest_round)
        self._control.send(messages.ProbeReturned(self._generation, event))

    def snapshot_taken(self, subtask: SubtaskId, checkpoint: CheckpointId, align_us: int, freeze_us: int) -> None:
        """Note how long a snapshot held up processing."""
        self._metrics.snapshot_taken(subtask, checkpoint, align_us, freeze_us)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _post(self, mail: messages.ToWorker | BaseException) -> None:
        """Queue a message or an error for the mailbox. Called from any thread."""
        if isinstance(mail, messages.Stop) and not mail.is_success:
            self._around.exit(EXIT_FENCED)  # the mailbox may be blocked in a send; a fenced worker has nothing to save
        self._mail.append(mail)
        self._wake.set()

    def _is_interrupted(self) -> bool:
        """Whether a barrier or a message came, or a subtask has aligned for long enough (UA4)."""
        if self._has_arrivals or self._mail:
            return True
        # asked after each element, so the cheap flags come first
        deadlines = [runner.deadline_ms for runner in self._runners if runner.deadline_ms is not None]
        return bool(deadlines) and min(deadlines) <= self._around.monotonic_ms()

    def _on_arrival(self) -> None:
        """A barrier or a cancel marker came into some queue (UA4). Called from any thread."""
        self._has_arrivals = True
        self._wake.set()

    def _on_control_closed(self, reason: str) -> None:
        self._around.exit(EXIT_FENCED)

    def _on_peer_lost(self, peer: WorkerIndex, reason: str) -> None:
        """The other worker died, or the connection broke or was misused: this generation cannot go on."""
        self._post(PeerLost(peer, reason))

    def _close(self, exchange: Exchange) -> None:
        for runner in self._runners:
            # runners before the state that they use; one that cannot close must not keep the others open
            try:
                runner.close()
            except ThreadEnded:
                raise
            except BaseException as error:
                print(f"headgate: closing {runner.subtask} failed: {error!r}", file=sys.stderr)
        if self._states is not None:
            self._states.close(is_left=self._is_state_left)
        # not waited for: an upload may hang in the storage, and what it still writes no manifest refers to
        self._pool.shutdown(wait=False, cancel_futures=True)
        exchange.close()


def keeps_local_files(error: BaseException) -> bool:
    """Return whether a worker that ends because of ``error`` may leave files of its state to the next one.

    Not if its disk is what failed: the next one is to find room there, and nothing that is damaged.
    """
    found = error.error if isinstance(error, NodeError) else error
    return not isinstance(found, LocalDamage) and (not isinstance(found, StorageError) or found.is_transient)


def failure_of(error: BaseException) -> Failure:
    """Return why a worker cannot go on, for the driver's decision and the user's message."""
    node = ""
    if isinstance(error, NodeError):
        node, error = error.node, error.error
    match error:
        case PeerLost() | ConnectionLost() | FencedError():  # fenced: the driver learns from the log whether it is, too
            return Failure(FailureKind.LOST, str(error))
        case HookError():
            kind = FailureKind.LOST if error.may_pass else FailureKind.USER_CODE
            return Failure(kind, error.reason, error.traceback_text)
        case UserFunctionError():
            return Failure(FailureKind.USER_CODE, error.reason, error.traceback_text)
        case PrepareRefused() | BadRecord() | TruncatedError() | OtherSchemaError() | NotRestorable():
            return Failure(FailureKind.DETERMINISTIC, str(error))
    where = f"operator '{node}': " if node else ""
    if isinstance(error, UnsoundFiles):  # R57
        return Failure(FailureKind.DAMAGED, f"{where}{error}", path=error.path)
    if isinstance(error, LocalDamage):  # as a machine that fails; the checkpoints have what is needed
        return Failure(FailureKind.LOST, f"{where}{error}")
    if isinstance(error, StorageError) and error.is_transient:
        return Failure(FailureKind.LOST, f"{where}{error}")
    if isinstance(error, HeadgateError):
        return Failure(FailureKind.USER_CODE, f"{where}{error}")
    return Failure(FailureKind.USER_CODE, f"{where}{type(error).__name__}: {error}", user_traceback(error))
