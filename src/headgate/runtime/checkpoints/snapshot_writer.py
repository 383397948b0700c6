"""Writes snapshots in the background: prepare the sinks' output, write the state, report (docs/spec/subtask.md).

One ``SnapshotWriter`` per subtask: its writes run one after another in checkpoint order, beside the mailbox, in a
pool that all subtasks of the worker share. A write that fails or is cancelled leaves its sealed output to the next
one (C17). Small parts stay inline, the others share a few files. Nothing counts before the manifest that
refers to it is durable, so a failed write is simply repeated: it writes the same files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeVar

import xxhash

from headgate import fault_points
from headgate.codec.snapshot import (
    FILES_PREFIX,
    STATE_PREFIX,
    Buffer,
    encode_sections,
    file_path,
    output_path,
    section_views,
    snapshot_path,
)
from headgate.codec.snapshot_rows import difference, stored_rows
from headgate.connectors.base import SealedTransaction
from headgate.dataclass import dataclass
from headgate.environment import Pool, ThreadEnded
from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import BUNDLE, Committable, Copied, KeyGroups, Place, Rows, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.protocol.subtasks.subtask import SnapshotFailed, SnapshotWritten
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.state.snapshot import FrozenState, OwnedKeys
from headgate.storage.base import Storage
from headgate.storage.urls import open_storage

FILE_BYTES_MAX = 64 << 20
"""A file that has so many bytes is written, and the next one begun: so much is in memory until then."""


@dataclass(frozen=True, slots=True)
class SnapshotDestination:
    """Where and as whom snapshots are written. ``keys``: what the subtask owns; None if its state is not cut."""

    storage: Storage
    pipeline: str
    generation: Generation
    inline_bytes_max: int
    keys: OwnedKeys | None = None


class SubtaskTarget:
    """Collects the parts of one snapshot."""

    def __init__(
        self,
        to: SnapshotDestination,
        subtask: SubtaskId,
        checkpoint: CheckpointId,
        shareable: Sequence[SnapshotPart] | None = None,
    ) -> None:
        """``shareable``: files that may be shared (SF15); None: everything must be portable, as in a savepoint."""
        self._shareable = shareable
        self._to = to
        self._subtask = subtask
        self._checkpoint = checkpoint
        self._inline_bytes_left = to.inline_bytes_max
        self._parts: list[SnapshotPart] = []
        self._files_count = 0
        self._apart_count = 0
        self._waiting: list[memoryview] = []
        self._waiting_bytes = 0
        self._is_finished = False

    def put_bundle(self, sections: Mapping[str, bytes]) -> None:
        """Write small sections as one part.

        Raises:
            StorageError
        """
        self.put(BUNDLE, encode_sections({name: [data] for name, data in sections.items()}))

    def put_state(self, node: str, state: FrozenState, prefix: str = STATE_PREFIX) -> None:
        """Have ``state`` write itself, to sections of ``node`` that begin with ``prefix``.

        Raises:
            AssertionError: what it wrote is not what was frozen; such a checkpoint must not complete.
            StorageError
        """
        target = _NodeTarget(self, node, self._to.keys, prefix)
        # what is written is counted on its way out and compared with what was frozen: rows that are missing would be
        # missed only after a restore, in silence
        state.write_to(target)
        _refuse_difference(node, dict(state.rows()), target.rows)

    def put(
        self,
        section: str,
        chunks: Iterable[Buffer],
        rows: Rows | None = None,
        key_groups: KeyGroups | None = None,
        name: str = "",
    ) -> SnapshotPart:
        """Write one part and return the reference to it; it holds once ``finish`` was called.

        Raises:
            StorageError
        """
        buffers = [memoryview(chunk).cast("B") for chunk in chunks]
        size_bytes, checksum = _size_and_checksum(buffers)
        part = SnapshotPart(size_bytes, checksum, rows=rows, section=section, key_groups=key_groups, name=name)
        placed = self._placed(part, buffers)
        self._parts.append(placed)
        return placed

    def share(self, part: SnapshotPart) -> None:
        """Refer to a part that may be shared, instead of writing it again (SF6, SF15)."""
        self._parts.append(part)

    def shareable(self, section: str) -> dict[str, SnapshotPart] | None:
        """Return the files of ``section`` that may be shared, by name; None: portable parts are wanted."""
        if self._shareable is None:
            return None
        return {part.name: part for part in self._shareable if part.section == section}

    def put_apart(
        self, section: str, chunks: Iterable[Buffer], key_groups: KeyGroups | None, name: str
    ) -> SnapshotPart:
        """Write a part that is a file, which goes when the last checkpoint goes that refers to it (SF15).

        Raises:
            StorageError
        """
        buffers = [memoryview(chunk).cast("B") for chunk in chunks]
        path = file_path(self._checkpoint, self._subtask, self._to.generation, self._apart_count)
        self._to.storage.put(f"{self._to.pipeline}/{path}", buffers)
        self._apart_count += 1
        size_bytes, checksum = _size_and_checksum(buffers)
        part = SnapshotPart(size_bytes, checksum, path, section=section, key_groups=key_groups, name=name)
        self._parts.append(part)
        return part

    def finish(self) -> tuple[SnapshotPart, ...]:
        """Make everything durable; return all parts.

        Raises:
            StorageError
        """
        self._write_file()
        assert not self._is_finished, "parts are handed over once"
        self._is_finished = True
        return tuple(self._parts)

    def _placed(self, part: SnapshotPart, buffers: Sequence[memoryview]) -> SnapshotPart:
        assert not self._is_finished, "no acknowledgement would name the part"
        if part.size_bytes <= self._inline_bytes_left:
            self._inline_bytes_left -= part.size_bytes
            return replace(part, inline=b"".join(buffers))
        # of the file that is being collected: its number rises only once it is written, so the reference is right
        placed = replace(part, path=self._path(), offset=self._waiting_bytes)
        self._waiting += buffers
        self._waiting_bytes += part.size_bytes
        if self._waiting_bytes >= FILE_BYTES_MAX:
            self._write_file()
        return placed

    def _path(self) -> str:
        return snapshot_path(self._checkpoint, self._subtask, self._to.generation, self._files_count)

    def _write_file(self) -> None:
        if self._waiting:
            # Overwrites what a try before has left under this name. No manifest refers to it before the
            # acknowledgement.
            self._to.storage.put(f"{self._to.pipeline}/{self._path()}", self._waiting)
            self._files_count += 1
            self._waiting, self._waiting_bytes = [], 0


class _NodeTarget:
    """See ``state.snapshot.SnapshotTarget``: the target of one operator's state. ``rows``: what was written so far."""

    def __init__(self, target: SubtaskTarget, node: str, keys: OwnedKeys | None, prefix: str) -> None:
        self._target = target
        self._node = node
        self.keys = keys
        self._section = f"{prefix}{node}"
        self._files = f"{FILES_PREFIX}{node}"
        self.rows: dict[str, int] = {}

    def put(
        self,
        chunks: Iterable[Buffer],
        rows: Mapping[str, int] | None,
        key_groups: KeyGroups | None = None,
        name: str = "",
    ) -> SnapshotPart:
        written = list(chunks)
        if rows is not None:
            _refuse_difference(self._node, rows, stored_rows(section_views(written), f"the snapshot of '{self._node}'"))
        self._count(rows or {})
        of_node = None if rows is None else {self._node: dict(rows)}
        return self._target.put(self._section, written, of_node, key_groups, name)

    def share(self, part: SnapshotPart) -> None:
        self._count((part.rows or {}).get(self._node, {}))
        self._target.share(part)

    @property
    def files(self) -> Mapping[str, SnapshotPart] | None:
        return self._target.shareable(self._files)

    def put_file(self, name: str, chunks: Iterable[Buffer], key_groups: KeyGroups | None = None) -> SnapshotPart:
        return self._target.put_apart(self._files, chunks, key_groups or self._groups, name)

    def describe_files(self, chunks: Iterable[Buffer], rows: Mapping[str, int], name: str) -> SnapshotPart:
        self._count(rows)
        return self._target.put(self._files, chunks, {self._node: dict(rows)}, self._groups, name)

    @property
    def _groups(self) -> KeyGroups | None:
        return None if self.keys is None else self.keys.groups

    def _count(self, rows: Mapping[str, int]) -> None:
        for state, count in rows.items():
            self.rows[state] = self.rows.get(state, 0) + count


def _size_and_checksum(buffers: Sequence[memoryview]) -> tuple[int, int]:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return sum(len(buffer) for buffer in buffers), digest.intdigest()


def write_output(
    to: SnapshotDestination, subtask: SubtaskId, checkpoint: CheckpointId, number: int, payload: bytes
) -> SnapshotPart:
    """Make a large payload durable that was prepared for ``checkpoint``, the ``number``-th of this subtask.

    Raises:
        StorageError
    """
    path = output_path(checkpoint, subtask, to.generation, number)
    to.storage.put(f"{to.pipeline}/{path}", [payload])
    return SnapshotPart(len(payload), xxhash.xxh3_64_intdigest(payload), path)


def _refuse_difference(node: str, expected: Mapping[str, int], found: Mapping[str, int]) -> None:
    problem = difference(expected, found)
    if problem is not None:
        raise AssertionError(f"the snapshot of operator '{node}' must have {problem[0]}, but has {problem[1]}")


_T = TypeVar("_T")

RETRY_PAUSES_S = (0.1, 0.3, 0.6)
"""Pauses between tries of one storage write; after them the checkpoint is declined."""

PAYLOAD_BYTES_MAX = 64 << 10
"""What a sink prepares beyond this size is a file of its own; a manifest holds only the reference to it."""


PROBLEM_CHARS_MAX = 1_000
"""Of what storage says about a savepoint."""


class PrepareRefused(Exception):  # noqa: N818 - what the target said
    """A sink's target refuses the output of a checkpoint for good: neither a retry nor a restart can help."""

    def __init__(self, node: str, checkpoint: CheckpointId, cause: str) -> None:
        super().__init__(node, checkpoint, cause)
        self.node, self.checkpoint, self.cause = node, checkpoint, cause

    def __str__(self) -> str:
        return (
            f"sink '{self.node}' cannot prepare the output of checkpoint {self.checkpoint}: {self.cause}; starting "
            "again cannot help before that is mended"
        )


@dataclass(frozen=True, slots=True)
class SavepointPart:
    """Where a snapshot is written for a savepoint (``places.Place`` as text), and with which ``plain`` sections."""

    target: str
    plain: Mapping[str, bytes]


@dataclass(slots=True)
class SubtaskSnapshot:
    """The result of the synchronous part of a snapshot: references only.

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
        """Release the frozen states: they are durable, or given up. Idempotent."""
        for state in (*self.states.values(), *self.lists.values()):
            state.release()


ReportSnapshot = Callable[[SnapshotWritten | SnapshotFailed, str], None]
"""Called from the pool's threads with the outcome and, for a failure, its text."""


class SnapshotWriter:
    """Writes the snapshots of one subtask, in order."""

    def __init__(
        self,
        subtask: SubtaskId,
        destination: SnapshotDestination,
        pool: Pool,
        report: ReportSnapshot,
        on_error: Callable[[BaseException], None],
        around: Surroundings = PROCESS,
        restored: Sequence[SnapshotPart] = (),
    ) -> None:
        """Make the writer.

        Args:
            subtask: that it writes snapshots of.
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
        self._jobs: deque[SubtaskSnapshot] = deque()
        self._is_running = False
        self._cancelled: set[CheckpointId] = set()
        self._unprepared: deque[tuple[str, CheckpointId, SealedTransaction]] = deque()
        self._prepared: list[Committable] = []
        self._pieces: list[SnapshotPart] = []
        """Those of the first of ``_unprepared`` that are durable."""
        self._outputs_count = 0
        self._stop = around.event()

    def start(self, frozen: SubtaskSnapshot) -> None:
        """Queue the write of ``frozen``."""
        with self._lock:
            assert not self._jobs or self._jobs[-1].checkpoint < frozen.checkpoint, "output is prepared in order (K3)"
            self._jobs.append(frozen)
            if self._is_running:
                # one job at a time, although the pool has several threads: the one that runs takes the next from the
                # queue
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
                # storage that fails costs this checkpoint; what else goes wrong, a refusal or a bug, ends the
                # generation
                self._report(SnapshotFailed(job.checkpoint), str(error))
            except ThreadEnded:
                raise
            except BaseException as error:
                self._on_error(error)
            finally:
                job.release()  # if it was given up
            with self._lock:  # ids rise: what was cancelled up to here is never asked for again
                self._cancelled = {c for c in self._cancelled if c > job.checkpoint}

    def _write(self, job: SubtaskSnapshot) -> None:
        # before the first look at a cancel: output of a checkpoint that is given up is prepared with the next one (C17)
        for node, sealed in job.sealed:
            self._unprepared.append((node, job.checkpoint, sealed))
        if self._is_cancelled(job.checkpoint):
            return
        self._prepare_all()
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
        job.release()  # before anybody hears of it, so that the next barrier finds the state in one piece
        fault_points.reach("after-snapshot-before-ack")
        # handed over when nothing can fail any more: until here the next snapshot would carry them
        committables, self._prepared = tuple(self._prepared), []
        entry = SubtaskEntry(self._subtask, parts, committables)
        self._report(SnapshotWritten(job.checkpoint, entry, copied), "")

    def _prepare_all(self) -> None:
        while self._unprepared:
            # stays the first until it is prepared: after a failure the next snapshot goes on with it, in the same order
            node, checkpoint, sealed = self._unprepared[0]
            try:
                self._store_pieces(checkpoint, sealed)
                payload = self._with_retries(sealed.prepare)
            except (CorruptionError, UsageError) as error:  # the target knows this output, and it is another
                raise PrepareRefused(node, checkpoint, str(error)) from error
            self._unprepared.popleft()
            pieces, self._pieces = tuple(self._pieces), []
            if payload is not None:
                index = self._subtask.index
                self._prepared.append(Committable(node, checkpoint, index, self._to.generation, payload, pieces=pieces))

    def _store_pieces(self, checkpoint: CheckpointId, sealed: SealedTransaction) -> None:
        """Make the pieces durable, each once; what fails goes on with the next snapshot."""
        while len(self._pieces) < sealed.pieces_count:
            self._pieces.append(self._stored(checkpoint, sealed.piece(len(self._pieces))))

    def _store_outputs(self) -> None:
        """Put large payloads into files, each once; what fails is tried again by the next snapshot."""
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

    def _copied(self, job: SubtaskSnapshot, to: SavepointPart) -> Copied:
        """Write the snapshot of ``job`` for a savepoint, too (SV1); what is wrong there is wrong there alone (SV7)."""
        try:
            place = Place.parse(to.target)
            there = replace(self._to, storage=open_storage(place.url), pipeline=place.prefix)
            return Copied(self._with_retries(lambda: self._write_state(job, there, to.plain)))
        except HeadgateError as error:
            return Copied(problem=str(error)[:PROBLEM_CHARS_MAX])

    def _write_state(
        self,
        job: SubtaskSnapshot,
        to: SnapshotDestination,
        plain: Mapping[str, bytes],
        shareable: Sequence[SnapshotPart] | None = None,
    ) -> tuple[SnapshotPart, ...]:
        """Write the snapshot of ``job``. Changes nothing of it, so it can be repeated.

        ``shareable``: files that it may refer to; None: nothing of it may be elsewhere, or in files of a backend (SV3).

        Raises:
            AssertionError: what was written is not what was frozen; such a checkpoint must not complete.
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
                # the pause ends at once when the worker closes, and the try with it
                if not error.is_transient or self._stop.wait(pause_s):
                    raise
        return call()

    def _is_cancelled(self, checkpoint: CheckpointId) -> bool:
        with self._lock:
            return checkpoint in self._cancelled


def _of_files(parts: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    return [part for part in parts if part.section.startswith(FILES_PREFIX)]
