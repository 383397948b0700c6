"""The head of a loop: replay first, feedback in turns with regular input, and the log of feedback.

Decisions are those of ``protocol.subtasks.subtask`` with its loop machines; here are queues, throttling and the log's
memory (rules L21 of docs/spec/loops.md). The loop log holds feedback between a barrier and its sentinels, until
the checkpoint has it; ``codec.loop_log`` has its bytes. There is one physical sequence of batches: the logs of
overlapping checkpoints share them by reference, in memory within the worker's share, beyond it on disk.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from headgate import fault_points
from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData, Idle, Watermark, batch_element
from headgate.codec.loop_log import LOG_ROWS, Counts, DecodedLog, LogChunk, LogOwner, decode_log, encode_log
from headgate.codec.snapshot import Buffer
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, ProtocolViolation, StorageError, UsageError
from headgate.model.ids import ChannelIndex, CheckpointId, NodeName, key_groups_of_subtask
from headgate.model.progress import LoopProgress
from headgate.operators.base import WATERMARK_MAX_MS, RestoredState
from headgate.operators.loop_head import LoopHeadOperator
from headgate.protocol.loop_prober import Probe, ProbeReceived
from headgate.protocol.subtasks import alignment, loops
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.watermarks import MergerEvent
from headgate.runtime.checkpoints.snapshot_writer import SubtaskSnapshot
from headgate.runtime.wire.channels import FeedbackChannel, WaitingFeedback
from headgate.runtime.wire.spill import Extent, SpillBudget, SpillFile
from headgate.runtime.worker.subtask_parts import SubtaskParts
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.snapshot import FrozenState

CHUNK_ROWS = 65_536
CHUNK_BYTES = 8 << 20
"""A chunk of an encoded log is full at either: what encoding and restoring hold in memory at a time."""
REPLAY_ROWS_MAX = 8_192
"""Rows of one replayed batch."""


def log_owner(keys: tuple[str, ...], max_parallelism: int, parallelism: int, subtask_index: int) -> LogOwner:
    """Return the owner of the log of the head ``subtask_index``. ``keys`` is () for a loop without a key."""
    if not keys:
        return LogOwner(subtask_index, parallelism, 0, (), 0, 0)
    owned = key_groups_of_subtask(subtask_index, max_parallelism, parallelism)
    return LogOwner(subtask_index, parallelism, max_parallelism, keys, owned.start, len(owned))


@dataclass(slots=True, eq=False)
class _Entry:
    """One logged batch: in memory, or at an extent of ``file``; ``references`` logs still need it.

    ``size_bytes`` is what it takes of the share of the log: nothing where the file is that of a feedback channel.
    """

    batch: pa.RecordBatch | None
    extent: Extent | None
    file: SpillFile
    size_bytes: int
    rows: int
    references: int


@dataclass(slots=True, eq=False)
class _PendingLog:
    """The log of one checkpoint while it is open."""

    entries: list[_Entry]
    size_bytes: int = 0


class LoopLog:
    """The logs of all pending checkpoints of one loop head.

    Every method is called in the mailbox thread; only the sealed logs that it returns are encoded elsewhere.

    Args:
        name: of the loop and the head, for messages.
        schema: of the feedback.
        owner: see ``log_owner``.
        budget: of the worker; shared.
    """

    def __init__(self, name: str, schema: pa.Schema, owner: LogOwner, budget: SpillBudget) -> None:
        self._name = name
        self._schema = schema
        self._owner = owner
        self._budget = budget
        self._file = SpillFile(f"the log of {name}", schema, budget)
        self._pending: dict[CheckpointId, _PendingLog] = {}
        self._memory_bytes = 0
        self._spilled_bytes = 0
        # Sealed logs die in upload threads, or in the garbage collector: they only append here (atomic), and the
        # mailbox does the accounting.
        self._returned: deque[list[_Entry]] = deque()

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """Checkpoints with an open log, in the order in which they were opened."""
        return tuple(self._pending)

    @property
    def memory_bytes(self) -> int:
        """Bytes of logged batches in memory, of pending and of sealed logs; a shared batch counts once."""
        self._reclaim()
        return self._memory_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of logged batches on disk, of pending and of sealed logs; a shared batch counts once."""
        self._reclaim()
        return self._spilled_bytes

    def elements(self, checkpoint: CheckpointId) -> int:
        """Return the number of batches in the open log of ``checkpoint``; 0 when it has none."""
        log = self._pending.get(checkpoint)
        return 0 if log is None else len(log.entries)

    def size_bytes(self, checkpoint: CheckpointId) -> int:
        """Return the bytes of batches in the open log of ``checkpoint``; 0 when it has none."""
        log = self._pending.get(checkpoint)
        return 0 if log is None else log.size_bytes

    def open(self, checkpoint: CheckpointId) -> None:
        """Begin the log of ``checkpoint`` (L1), empty."""
        assert checkpoint not in self._pending, f"the log of checkpoint {checkpoint} is open already"
        self._reclaim()
        self._pending[checkpoint] = _PendingLog([])

    def append(self, batch: pa.RecordBatch, checkpoints: Sequence[CheckpointId]) -> None:
        """Append ``batch`` to the open logs of ``checkpoints``, before it is forwarded (L2).

        Raises:
            StorageError: the disk share is used up or the disk full: the generation must fail.
        """
        if not checkpoints or not batch.num_rows:
            return
        self._reclaim()
        logs = [self._pending[checkpoint] for checkpoint in checkpoints]
        # stored once for all logs: overlapping checkpoints share a batch, and the last of them gives it back
        entry = self._store(batch, len(logs))
        for log in logs:
            log.entries.append(entry)
            log.size_bytes += entry.size_bytes

    def append_spilled(self, extent: Extent, file: SpillFile, checkpoint: CheckpointId) -> None:
        """Append a batch that waits in a feedback channel on disk; it is freed there when no log needs it any more."""
        self._pending[checkpoint].entries.append(_Entry(None, extent, file, 0, extent.rows, 1))

    def seal(self, checkpoint: CheckpointId) -> SealedLog:
        """End the log of ``checkpoint`` (L4) and return it; nothing that happens here later shows in it."""
        self._reclaim()
        entries = self._pending.pop(checkpoint).entries
        sealed = SealedLog(self._name, self._schema, self._owner, entries, self._budget)
        # called once: by ``release``, or when the last reference is gone
        sealed.give_back = weakref.finalize(sealed, self._returned.append, entries)
        sealed.give_back.atexit = False
        return sealed

    def drop(self, checkpoint: CheckpointId) -> None:
        """Give up the log of ``checkpoint`` (L5). Without effect when it has none, or it is sealed (T8).

        A sealed log is given up by its ``release``, or by dropping the last reference to it.
        """
        self._reclaim()
        log = self._pending.pop(checkpoint, None)
        if log is not None:
            self._release(log.entries)

    def close(self) -> None:
        """Free memory and files. Idempotent. Spilled parts of sealed logs can no longer be encoded."""
        for checkpoint in self.pending:
            self.drop(checkpoint)
        self._reclaim()
        self._budget.release_memory(self._memory_bytes)
        self._memory_bytes = self._spilled_bytes = 0
        self._returned = deque()  # what sealed logs return from now on was just given back
        self._file.close()

    def _store(self, batch: pa.RecordBatch, references: int) -> _Entry:
        size_bytes = batch_element(batch).size_bytes
        assert references > 0, "what is logged is in a log"
        if self._budget.take_memory(size_bytes):
            self._memory_bytes += size_bytes
            return _Entry(batch, None, self._file, size_bytes, batch.num_rows, references)
        extent = self._file.write(batch)
        self._spilled_bytes += extent.size_bytes
        return _Entry(None, extent, self._file, extent.size_bytes, batch.num_rows, references)

    def _reclaim(self) -> None:
        while self._returned:
            self._release(self._returned.popleft())

    def _release(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.references -= 1
            assert entry.references >= 0, "a log gave a batch back twice"
            if entry.references:
                continue
            if entry.extent is None:
                self._memory_bytes -= entry.size_bytes
                self._budget.release_memory(entry.size_bytes)
            else:
                self._spilled_bytes -= entry.size_bytes
                entry.file.free(entry.extent)


class SealedLog(FrozenState):
    """A finished log. Its batches are given back when it is released, or when nothing refers to it any more."""

    give_back: Callable[[], object]

    def __init__(
        self, name: str, schema: pa.Schema, owner: LogOwner, entries: Sequence[_Entry], budget: SpillBudget
    ) -> None:
        super().__init__()
        self._name = name
        self._schema = schema
        self._owner = owner
        self._entries = entries
        self._budget = budget

    @property
    def elements(self) -> int:
        """Number of batches."""
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of batches, without those that a feedback channel has on disk."""
        return sum(entry.size_bytes for entry in self._entries)

    def _rows(self) -> Mapping[str, int]:
        return {LOG_ROWS: sum(entry.rows for entry in self._entries)}

    def _forget(self) -> None:
        self._entries = ()
        # a finalizer runs once: after this the garbage collector gives nothing back a second time
        self.give_back()

    def _encode(self) -> Sequence[Buffer]:
        """Return the log's bytes. What did not fit into memory is encoded through a file, and a view of that file.

        Raises:
            StorageError: a spilled batch cannot be read, or there is no space to encode it.
            ProtocolViolation: a record is in the log of a head that does not own its key group.
        """
        chunks = self._chunks()
        if any(entry.extent is not None for entry in self._entries):
            chunks = iter(self._through_file(chunks))
        return encode_log(self._owner, self._schema, list(chunks))

    def _chunks(self) -> Iterator[LogChunk]:
        batches: list[pa.RecordBatch] = []
        rows = size_bytes = 0
        for entry in self._entries:
            batches.append(self._batch_of(entry))
            rows += batches[-1].num_rows
            size_bytes += entry.size_bytes if entry.extent is None else entry.extent.size_bytes
            if rows >= CHUNK_ROWS or size_bytes >= CHUNK_BYTES:
                yield self._chunk(batches)
                batches, rows, size_bytes = [], 0, 0
        if batches:
            yield self._chunk(batches)

    def _batch_of(self, entry: _Entry) -> pa.RecordBatch:
        if entry.extent is None:
            return entry.batch
        return entry.file.read(entry.extent)

    def _chunk(self, batches: Sequence[pa.RecordBatch]) -> LogChunk:
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        owner = self._owner
        counts: Counts = np.zeros(0, dtype=np.uint32)
        if owner.keys:
            groups = key_groups(hash_columns(batch, owner.keys), owner.max_parallelism) - owner.first_group
            # checked before it is durable: after a rescale such a record would be replayed by a head that does not own
            # its key
            if groups.min() < 0 or groups.max() >= owner.groups_count:
                raise ProtocolViolation("LoopLog", f"feedback reached head {owner.subtask_index}, not its key's owner")
            batch = batch.take(pa.array(np.argsort(groups, kind="stable")))  # L21: stable
            counts = np.bincount(groups, minlength=owner.groups_count).astype(np.uint32)
        return LogChunk(batch.serialize(), batch.num_rows, counts)

    def _through_file(self, chunks: Iterator[LogChunk]) -> list[LogChunk]:
        """Return ``chunks`` with their messages on disk, so that only one is in memory at a time."""
        written: list[tuple[int, LogChunk]] = []
        end = 0
        try:
            with tempfile.TemporaryFile(dir=self._budget.directory) as file:
                for chunk in chunks:
                    start, end = end, end + file.write(chunk.message)
                    written.append((start, LogChunk(b"", chunk.rows, chunk.group_rows)))
                file.flush()
                # the mapping outlives the file, which has no name: the space is free when the last view of it goes
                view = memoryview(mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ))
        except OSError as error:
            raise StorageError("encode", f"the log of {self._name}", str(error)) from error
        ends = [start for start, _ in written[1:]] + [end]
        return [
            LogChunk(view[start:until], chunk.rows, chunk.group_rows)
            for (start, chunk), until in zip(written, ends, strict=True)
        ]


def replay_logs(
    states: Sequence[RestoredState], schema: pa.Schema, owner: LogOwner, name: str
) -> Iterator[pa.RecordBatch]:
    """Return, in order, what the head ``owner`` replays after a restore, as batches of ≤ 8192 rows.

    The bytes are verified before this returns; batches are decoded one chunk at a time as they are taken. A keyed
    loop replays the records of the key groups that it owns now, from every former log. A loop without a key
    replays the whole logs of the former heads i with i mod parallelism = its index.

    Args:
        states: one per former head, ``SealedLog.encode`` of each.
        schema: of the feedback.
        owner: this head, now.
        name: of the loop, for messages.

    Raises:
        CorruptionError: any byte is wrong or missing; also while iterating.
        UsageError: the loop had other keys, or another number of key groups.
    """
    logs: list[tuple[str, DecodedLog]] = []
    for state in sorted(states, key=lambda state: state.subtask_index):
        path = f"log of {name}, head {state.subtask_index}"
        log = decode_log(state.payload, schema, path)
        _check_owner(log.owner, state, owner, path)
        if owner.keys or state.subtask_index % owner.parallelism == owner.subtask_index:
            logs.append((path, log))
    return _replay(logs, schema, owner)


def _check_owner(found: LogOwner, state: RestoredState, now: LogOwner, path: str) -> None:
    if (found.keys, found.max_parallelism) != (now.keys, now.max_parallelism):
        raise UsageError(
            f"the {path} has the keys {list(found.keys)} in {found.max_parallelism} key groups, the loop now has "
            f"{list(now.keys)} in {now.max_parallelism}: restore with the same, or begin without the checkpoint"
        )
    expected = log_owner(now.keys, now.max_parallelism, state.parallelism, state.subtask_index)
    if found != expected:
        raise CorruptionError(path, 0, f"the log of {expected}", f"that of {found}")


def _replay(logs: Sequence[tuple[str, DecodedLog]], schema: pa.Schema, owner: LogOwner) -> Iterator[pa.RecordBatch]:
    for path, log in logs:
        for chunk in log.chunks:
            start, count = _owned_slice(chunk, log.owner, owner) if owner.keys else (0, chunk.rows)
            if not count:
                continue
            batch = chunk.batch(schema, path)
            for at in range(start, start + count, REPLAY_ROWS_MAX):
                yield batch.slice(at, min(REPLAY_ROWS_MAX, start + count - at))


def _owned_slice(chunk: LogChunk, former: LogOwner, owner: LogOwner) -> tuple[int, int]:
    """Return where the rows of the key groups that ``owner`` owns now begin in ``chunk``, and how many they are."""
    first = min(max(owner.first_group - former.first_group, 0), former.groups_count)
    last = min(max(owner.first_group + owner.groups_count - former.first_group, 0), former.groups_count)
    # rows are sorted by key group, and a head owns neighbouring ones: so what it owns is one slice
    before = int(chunk.group_rows[:first].sum(dtype=np.uint64))
    return before, int(chunk.group_rows[first:last].sum(dtype=np.uint64))


@dataclass(slots=True)
class LoopState:
    """What a loop head has beside an ordinary subtask.

    Attributes:
        operator: the live head operator of the chain.
        log: of what came back.
        replay: the restored log.
        high_water_bytes: queued feedback above which regular input waits.
    """

    operator: LoopHeadOperator
    log: LoopLog
    replay: Iterator[pa.RecordBatch]
    high_water_bytes: int


class LoopHeadRunner(SubtaskRunner):
    """One head subtask in its worker."""

    def __init__(self, parts: SubtaskParts, loop: LoopState) -> None:
        super().__init__(parts)
        self._loop = loop
        regular_count = len(self._origins)
        self._feedback = [channel for channel in self._inputs[regular_count:] if isinstance(channel, FeedbackChannel)]
        assert len(self._feedback) == len(self._inputs) - regular_count, "feedback channels are the last inputs"
        self._first_feedback = regular_count
        self._is_replaying = True
        self._turn = [0] * len(self._feedback)
        self._next_feedback = 0
        self._expected: set[CheckpointId] = set()
        self._last_snapshot = CheckpointId(0)
        self._is_end_out = False
        self._waiting: dict[CheckpointId, SubtaskSnapshot] = {}
        self._released: set[CheckpointId] = set()
        self._came_back = 0
        self._throttled_since_ns = 0
        self._throttled_ns = 0
        self._opened: dict[CheckpointId, int] = {}
        self._trip_ns = 0

    @property
    def queued_bytes(self) -> int:
        """Feedback that waits, in memory and on disk."""
        return sum(channel.size_bytes for channel in self._feedback)

    def progress(self) -> LoopProgress:
        """Return what this head measured."""
        metrics = [channel.metrics for channel in self._feedback]
        return LoopProgress(
            NodeName(str(self.subtask.vertex)),
            queued_batches=sum(m.elements for m in metrics),
            queued_bytes=sum(m.size_bytes for m in metrics),
            queued_bytes_max=sum(m.size_bytes_max for m in metrics),
            spilled_bytes=sum(m.spilled_bytes for m in metrics),
            log_bytes=self._loop.log.memory_bytes + self._loop.log.spilled_bytes,
            held_channels=sum(channel.is_blocked for channel in self._feedback),
            came_back=self._came_back,
            throttled_ms=self._throttled_ns // 1_000_000,
            trip_ms=self._trip_ns // 1_000_000,
            round_=self._machine.rounds.started,
        )

    def expect(self, checkpoint: CheckpointId) -> None:
        """A checkpoint was triggered: its barrier must not wait for throttled input.

        The barrier may have been quicker than the message.
        """
        if checkpoint > self._last_snapshot:
            self._expected.add(checkpoint)
            self._turn = [min(left, 1) for left in self._turn]  # a long queue delays no barrier

    def handle(self, event: machine.Event, text: str = "") -> None:
        if isinstance(event, alignment.AbortReceived):
            # its barrier may never come, and regular input is to be throttled again
            self._expected.discard(event.checkpoint)
        super().handle(event, text)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._loop.log.close()

    # -- input --------------------------------------------------------------------------------------------------

    def _step_input(self) -> bool:
        if self._is_replaying:
            return self._replay_next()  # nothing else is read before
        self._log_what_waits()
        # a turn reads what was there when it began, so neither feedback nor regular input starves the other
        if self._read_feedback():
            return True
        # a turn is over; one regular element, then what has come back by now
        self._turn = [0 if channel.is_blocked else len(channel) for channel in self._feedback]
        if self._expected:
            self._turn = [min(left, 1) for left in self._turn]
        if not self._is_throttled() and super()._step_input():
            return True
        return self._read_feedback()

    def _is_throttled(self) -> bool:
        """Whether regular input waits for the loop to drain."""
        is_throttled = not self._expected and self.queued_bytes > self._loop.high_water_bytes
        now_ns = self._clock_ns()
        if self._throttled_since_ns:
            self._throttled_ns += now_ns - self._throttled_since_ns
        self._throttled_since_ns = now_ns if is_throttled else 0
        return is_throttled

    def _replay_next(self) -> bool:
        fault_points.reach("in-replay")
        batch = next(self._loop.replay, None)
        if batch is None:
            self._is_replaying = False
            return True
        self._forward(batch, self._loop.operator.highest_round(batch))
        return True

    def _read_feedback(self) -> bool:
        """Process the next element of this turn that came back, or batches that were merged; False: there is none."""
        count = len(self._feedback)
        for offset in range(count):
            at = (self._next_feedback + offset) % count
            if not self._turn[at]:
                continue
            channel = self._feedback[at]
            taken_before = channel.taken_total
            element = channel.poll()
            if element is None:  # it is held since the turn began: its share would delay the barrier that it waits for
                self._turn[at] = 0
                continue
            self._turn[at] = max(self._turn[at] - (channel.taken_total - taken_before), 0)
            self._next_feedback = (at + 1) % count
            index = ChannelIndex(self._first_feedback + at)
            if isinstance(element, BatchElement):
                self.meter.work(index, partial(self._on_feedback, index, element.batch))
            else:
                self._on_feedback_control(index, element)
            return True
        return False

    def _log_what_waits(self) -> None:
        """Complete open logs with sentinels in the queue: a long queue delays no checkpoint."""
        if not self._opened:
            return
        for at, channel in enumerate(self._feedback):
            index = ChannelIndex(self._first_feedback + at)
            # oldest first: what waits in front of an older sentinel is in the logs of the newer ones, too, and is still
            # in the queue for them
            for checkpoint in sorted(self._opened.keys() & channel.waiting_sentinels):
                waiting = channel.take_sentinels(checkpoint)
                if waiting is None:
                    break  # the loop has ended: what little waits is read in order
                self._turn[at] = min(self._turn[at], len(channel))
                self._log_waiting(checkpoint, waiting)
                for sentinel in waiting.sentinels:
                    self.handle(alignment.BarrierReceived(index, sentinel.checkpoint, sentinel.options))

    def _log_waiting(self, checkpoint: CheckpointId, waiting: WaitingFeedback) -> None:
        log, operator = self._loop.log, self._loop.operator
        for one in waiting.batches:
            if isinstance(one, BatchElement):
                log.append(operator.returning(one.batch)[0], [checkpoint])
            elif operator.counts_rounds:  # it is logged as it will be processed
                log.append(operator.returning(waiting.file.read(one))[0], [checkpoint])
                waiting.file.free(one)
            else:
                log.append_spilled(one, waiting.file, checkpoint)

    def _on_feedback(self, channel: ChannelIndex, came_back: pa.RecordBatch) -> None:
        batch, round_ = self._loop.operator.returning(came_back)
        if batch.num_rows == 0:
            return
        if self._is_end_out:
            raise UsageError(
                f"loop '{self.subtask.vertex}': {batch.num_rows} records came back after the loop had ended, so they "
                "cannot go round any more; an operator of its body sends them in finish(), where nothing may be fed "
                "back: let it send them because of a record, of the last watermark, or of the end of a round"
            )
        self._resume()
        # logged before it is forwarded (L2): if the log has no room, nothing downstream has seen the batch
        for effect in self._machine.handle(loops.FeedbackReceived(channel)):
            match effect:
                case loops.LogFeedback():
                    self._loop.log.append(batch, effect.checkpoints)
                case loops.ForwardFeedback():
                    self._forward(batch, round_)
                case _:
                    self._run(effect, "")

    def _forward(self, batch: pa.RecordBatch, round_: int) -> None:
        self._came_back += batch.num_rows
        self.handle(loops.FeedbackForwarded(round_))
        self.chain.set_origin("feedback")
        self.chain.head.reenter(batch, self._loop.operator.forward)

    def _on_feedback_control(self, channel: ChannelIndex, element: Element) -> None:
        match element:
            case Barrier():
                self.handle(alignment.BarrierReceived(channel, element.checkpoint, element.options))
            case Cancel():
                self.handle(alignment.CancelReceived(channel, element.checkpoint))
            case EndOfData():
                self.handle(machine.EndReceived(channel))
            case Probe():
                self.handle(ProbeReceived(channel, element))
            case Watermark() | Idle():
                return  # L37: event time does not go round
            case BatchElement():
                raise AssertionError("records are not control")

    def _merge(self, event: MergerEvent) -> None:
        """Event time waits at the head until the loop is empty (L37)."""

    # -- effects ------------------------------------------------------------------------------------------------

    def _run(self, effect: machine.Effect, text: str) -> None:
        match effect:
            case loops.OpenLog():
                fault_points.reach("log-opened")
                self._opened[effect.checkpoint] = self._clock_ns()
                self._loop.log.open(effect.checkpoint)
            case loops.SealLog():
                self._seal(effect.checkpoint)
            case loops.DropLog():
                self._drop(effect.checkpoint)
            case loops.AdvanceToEnd():
                self.chain.advance(WATERMARK_MAX_MS)
            case alignment.TakeSnapshot() | alignment.EmitCancel():
                self._last_snapshot = max(self._last_snapshot, effect.checkpoint)
                self._expected = {c for c in self._expected if c > effect.checkpoint}
                super()._run(effect, text)
            case machine.EmitEnd():
                self._is_end_out = True
                super()._run(effect, text)
            case _:
                super()._run(effect, text)

    def _begin_write(self, frozen: SubtaskSnapshot) -> None:
        """Not before the log is sealed (L4)."""
        assert frozen.checkpoint not in self._waiting, "a snapshot is taken once, and waits for its log once"
        self._waiting[frozen.checkpoint] = frozen

    def _seal(self, checkpoint: CheckpointId) -> None:
        fault_points.reach("log-sealed")
        assert checkpoint in self._waiting, "a log is sealed after its snapshot was taken (L1)"
        self._trip_ns = self._clock_ns() - self._opened.pop(checkpoint)
        frozen = self._waiting[checkpoint]
        node = str(self.chain.vertex.head.name)
        states = {**frozen.states, node: self._loop.log.seal(checkpoint)}
        self._release(replace(frozen, states=states))

    def _drop(self, checkpoint: CheckpointId) -> None:
        """Forget log and state; the writer keeps the sealed output for the next snapshot (L5)."""
        del self._opened[checkpoint]
        self._loop.log.drop(checkpoint)
        self._writer.cancel(checkpoint)
        frozen = self._waiting[checkpoint]
        frozen.release()
        self._release(replace(frozen, states={}, lists={}, savepoint=None))

    def _release(self, frozen: SubtaskSnapshot) -> None:
        """Hand over to the writer, not before what was frozen earlier: output is prepared in its order (K3)."""
        self._waiting[frozen.checkpoint] = frozen
        assert frozen.checkpoint not in self._released, "the log of a checkpoint ends once (L4, L5)"
        self._released.add(frozen.checkpoint)
        for checkpoint in sorted(self._waiting):
            # an older one still waits for its log: what is sealed after it waits, too
            if checkpoint not in self._released:
                return
            self._released.remove(checkpoint)
            self._writer.start(self._waiting.pop(checkpoint))
