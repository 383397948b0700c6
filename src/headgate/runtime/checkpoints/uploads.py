"""The asynchronous part of snapshots: prepare the sinks' output, write the state, report (rules U1–U7 of
docs/spec/subtask.md).

One ``SnapshotWriter`` per subtask: its writes run one after another in checkpoint order, beside the mailbox, in a
pool that all subtasks of the worker share. A write that fails or is cancelled leaves its sealed output to the next
one (C17). Counterpart: ``runtime.worker.freezing``, which freezes and seals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headgate import fault_points
from headgate.codec.snapshot import FILES_PREFIX
from headgate.connectors.base import SealedTransaction
from headgate.connectors.offers import PiecewiseTransaction
from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError
from headgate.model.ids import CheckpointId, SubtaskId
from headgate.model.manifest import Committable, SnapshotPart
from headgate.model.places import Place
from headgate.model.savepoint import Copied
from headgate.protocol.checkpoints.sharing import SharedFiles
from headgate.protocol.subtasks.subtask import SnapshotFailed, SnapshotWritten
from headgate.runtime.checkpoints.targets import Destination, SubtaskTarget, write_output
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.state.frozen import FrozenState
from headgate.storage.backends import open_storage
from headgate.threads import Pool, ThreadEnded

_T = TypeVar("_T")

RETRY_PAUSES_S = (0.1, 0.3, 0.6)
"""Pauses between tries of one storage write; after them the checkpoint is declined (U4)."""

PAYLOAD_BYTES_MAX = 64 << 10
"""What a sink prepares beyond this size is a file of its own; a manifest holds only the reference to it (SF9)."""


PROBLEM_CHARS_MAX = 1_000
"""Of what storage says about a savepoint."""


class PrepareRefused(Exception):  # noqa: N818 - what the target said
    """A sink's target refuses the output of a checkpoint for good: neither a retry nor a restart can help (K21)."""

    def __init__(self, node: str, checkpoint: CheckpointId, cause: str) -> None:
        super().__init__(node, checkpoint, cause)
        self.node, self.checkpoint, self.cause = node, checkpoint, cause

    def __str__(self) -> str:
        return (
            f"sink '{self.node}' cannot prepare the output of checkpoint {self.checkpoint}: {self.cause}; starting "
            "again cannot help: look at what else writes to the target, or write to another one"
        )


@dataclass(frozen=True, slots=True)
class SavepointPart:
    """Where a snapshot is written for a savepoint (``places.Place`` as text), and with which ``plain`` sections."""

    target: str
    plain: Mapping[str, bytes]


@dataclass(slots=True)
class FrozenSubtask:
    """What the synchronous part leaves behind: references only.

    ``plain`` are sections that are bytes already (source positions, flags); ``lists`` is operator state, by the prefix
    of its section and by node; ``savepoint`` is where it is to be written once more.
    """

    checkpoint: CheckpointId
    states: Mapping[str, FrozenState]
    plain: Mapping[str, bytes]
    sealed: Sequence[tuple[str, SealedTransaction]]
    lists: Mapping[tuple[str, str], FrozenState] = field(default_factory=dict)
    savepoint: SavepointPart | None = None

    def release(self) -> None:
        """Give the frozen states up: they are durable, or nobody will write them (U6). Idempotent."""
        for state in (*self.states.values(), *self.lists.values()):
            state.release()


Report = Callable[[SnapshotWritten | SnapshotFailed, str], None]
"""Called from the pool's threads with the outcome and, for a failure, its text."""


class SnapshotWriter:
    """Writes the snapshots of one subtask, in order (U1)."""

    def __init__(
        self,
        subtask: SubtaskId,
        destination: Destination,
        pool: Pool,
        report: Report,
        on_error: Callable[[BaseException], None],
        around: Surroundings = PROCESS,
        restored: Sequence[SnapshotPart] = (),
    ) -> None:
        """Make the writer.

        Args:
            subtask: whose snapshots it writes.
            destination: where they go.
            pool: runs the writes.
            report: hears of outcomes.
            on_error: gets what no checkpoint can survive (fenced, or a bug).
            around: of this process.
            restored: parts of the checkpoint that is continued, as far as they are in this pipeline's directory.
        """
        self._shared = SharedFiles(_of_files(restored))
        self._subtask = subtask
        self._to = destination
        self._pool = pool
        self._report = report
        self._on_error = on_error
        self._lock = around.lock()
        self._jobs: deque[FrozenSubtask] = deque()
        self._is_running = False
        self._cancelled: set[CheckpointId] = set()
        self._unprepared: deque[tuple[str, CheckpointId, SealedTransaction]] = deque()
        self._prepared: list[Committable] = []
        self._pieces: list[SnapshotPart] = []
        """Those of the first of ``_unprepared`` that are durable (SF13)."""
        self._outputs_count = 0
        self._stop = around.event()

    def start(self, frozen: FrozenSubtask) -> None:
        """Queue the write of ``frozen``."""
        with self._lock:
            self._jobs.append(frozen)
            if self._is_running:
                return
            self._is_running = True
        self._pool.submit(self._run)

    def cancel(self, checkpoint: CheckpointId) -> None:
        """Stop the write of ``checkpoint`` at its next step; its sealed output stays for the next one."""
        with self._lock:
            self._cancelled.add(checkpoint)

    def completed(self, checkpoint: CheckpointId) -> None:
        """``checkpoint`` is completed: its files may be shared (SF15)."""
        with self._lock:
            self._shared.completed(checkpoint)

    def close(self) -> None:
        """Give up waiting for retries."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            try:
                self._write(job)
            except StorageError as error:
                self._report(SnapshotFailed(job.checkpoint), str(error))
            except ThreadEnded:
                raise
            except BaseException as error:
                self._on_error(error)  # U5, CS26
            finally:
                job.release()  # U6: if it was given up
            with self._lock:  # ids rise: what was cancelled up to here is never asked for again
                self._cancelled = {c for c in self._cancelled if c > job.checkpoint}

    def _write(self, job: FrozenSubtask) -> None:
        for node, sealed in job.sealed:
            self._unprepared.append((node, job.checkpoint, sealed))  # U3
        if self._is_cancelled(job.checkpoint):
            return
        self._prepare_all()  # U2
        fault_points.reach("after-prepare")
        if self._is_cancelled(job.checkpoint):
            return
        self._store_outputs()
        with self._lock:
            shareable = self._shared.shareable()
        parts = self._with_retries(lambda: self._write_state(job, self._to, job.plain, shareable))
        with self._lock:  # before anybody can hear that it is completed
            self._shared.wrote(job.checkpoint, _of_files(parts))
        copied = None if job.savepoint is None else self._copied(job, job.savepoint)
        job.release()  # U6: before anybody hears of it, so that the next barrier finds the state in one piece
        fault_points.reach("after-snapshot-before-ack")
        committables, self._prepared = tuple(self._prepared), []
        self._report(SnapshotWritten(job.checkpoint, parts, committables, copied), "")

    def _prepare_all(self) -> None:
        while self._unprepared:
            node, checkpoint, sealed = self._unprepared[0]
            try:
                if isinstance(sealed, PiecewiseTransaction):
                    self._store_pieces(checkpoint, sealed)
                payload = self._with_retries(sealed.prepare)
            except (CorruptionError, UsageError) as error:  # K21: the target knows this output, and it is another
                raise PrepareRefused(node, checkpoint, str(error)) from error
            self._unprepared.popleft()
            pieces, self._pieces = tuple(self._pieces), []
            if payload is not None:
                index = self._subtask.index
                self._prepared.append(Committable(node, checkpoint, index, self._to.generation, payload, pieces=pieces))

    def _store_pieces(self, checkpoint: CheckpointId, sealed: PiecewiseTransaction) -> None:
        """Make the pieces durable, each once; what fails goes on with the next snapshot (SF13)."""
        while len(self._pieces) < sealed.pieces_count:
            self._pieces.append(self._stored(checkpoint, sealed.piece(len(self._pieces))))

    def _store_outputs(self) -> None:
        """Put large payloads into files, each once (SF9); what fails is tried again by the next snapshot."""
        for at, committable in enumerate(self._prepared):
            if committable.stored is None and len(committable.payload) > PAYLOAD_BYTES_MAX:
                stored = self._stored(committable.checkpoint, committable.payload)
                self._prepared[at] = replace(committable, payload=b"", stored=stored)

    def _stored(self, checkpoint: CheckpointId, output: bytes) -> SnapshotPart:
        """Return a file of its own, which holds ``output``."""
        number = self._outputs_count + 1
        stored = self._with_retries(lambda: write_output(self._to, self._subtask, checkpoint, number, output))
        self._outputs_count = number
        return stored

    def _copied(self, job: FrozenSubtask, to: SavepointPart) -> Copied:
        """Write the snapshot of ``job`` for a savepoint, too (SV1); what is wrong there is wrong there alone (SV7)."""
        try:
            place = Place.parse(to.target)
            there = replace(self._to, storage=open_storage(place.url), pipeline=place.prefix)
            return Copied(self._with_retries(lambda: self._write_state(job, there, to.plain)))
        except HeadgateError as error:
            return Copied(problem=str(error)[:PROBLEM_CHARS_MAX])

    def _write_state(
        self,
        job: FrozenSubtask,
        to: Destination,
        plain: Mapping[str, bytes],
        shareable: Sequence[SnapshotPart] | None = None,
    ) -> tuple[SnapshotPart, ...]:
        """Write the snapshot of ``job``. Changes nothing of it, so it can be repeated (U6).

        ``shareable``: files that it may refer to; None: nothing of it may be elsewhere, or in files of a backend (SV3).

        Raises:
            AssertionError: what was written is not what was frozen; such a checkpoint must not complete (U7).
        """
        target = SubtaskTarget(to, self._subtask, job.checkpoint, shareable)
        target.put_bundle(plain)
        for node, state in job.states.items():
            target.put_state(node, state)
        for (prefix, node), state in job.lists.items():
            target.put_state(node, state, prefix)
        return target.finish()

    def _with_retries(self, call: Callable[[], _T]) -> _T:
        for pause_s in RETRY_PAUSES_S:
            try:
                return call()
            except StorageError as error:
                if not error.is_transient or self._stop.wait(pause_s):
                    raise
        return call()

    def _is_cancelled(self, checkpoint: CheckpointId) -> bool:
        with self._lock:
            return checkpoint in self._cancelled


def _of_files(parts: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    return [part for part in parts if part.section.startswith(FILES_PREFIX)]
