"""Takes the snapshot of one subtask, and keeps it until its barrier is out (U8, ST5, UA8).

Part of the ``SubtaskRunner``; everything happens in the mailbox thread. Counterparts: ``protocol.subtasks.subtask``
says when, ``runtime.checkpoints.uploads`` writes what was frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from headgate import fault_points
from headgate.codec.snapshot import FINISHED_PREFIX, IN_FLIGHT_PREFIX, POSITIONS_PREFIX, ROUNDS_PREFIX, encode_positions
from headgate.model.ids import CheckpointId
from headgate.model.options import CheckpointOptions
from headgate.protocol.subtasks import subtask as machine
from headgate.runtime.checkpoints.in_flight import FrozenInFlight
from headgate.runtime.checkpoints.uploads import FrozenSubtask, SavepointPart
from headgate.runtime.worker.hooks import Hooks
from headgate.runtime.worker.sources import Source
from headgate.runtime.worker.subtask_parts import SubtaskParts


@dataclass(frozen=True, slots=True)
class Durations:
    """Measured: waiting for barriers, and the synchronous part."""

    align_us: int
    freeze_us: int


class Freezing:
    """The snapshot of one subtask, from the first barrier until somebody writes it."""

    def __init__(self, parts: SubtaskParts, subtask: machine.Subtask, source: Source | None, hooks: Hooks) -> None:
        self._hooks = hooks
        self.sinks = dict(parts.sinks)
        self._vertex = str(parts.subtask.vertex)
        self._chain = parts.chain
        self._machine = subtask
        self._source = source
        self._clock_ns = parts.clock_ns
        self._align_started: dict[CheckpointId, int] = {}
        self._frozen: FrozenSubtask | None = None

    def note_barrier(self, checkpoint: CheckpointId) -> None:
        """A barrier of ``checkpoint`` came, or was read."""
        if checkpoint > max(self._align_started, default=CheckpointId(0)):  # an older one may be read later
            self._align_started = {checkpoint: self._clock_ns()}

    def take(self, checkpoint: CheckpointId, options: CheckpointOptions) -> Durations:
        """The synchronous part: flush (U8), then seal what the sinks were given, and take references (ST5)."""
        fault_points.reach("before-snapshot")
        begun_ns = self._clock_ns()
        self._chain.before_barrier()
        flushed_ns = self._clock_ns()
        plain = self._plain(checkpoint, options)
        sealed = [(node, sink.seal(checkpoint)) for node, sink in self.sinks.items()]
        lists = self._hooks.snapshot(checkpoint)  # HL11: it may still change what the chain freezes
        savepoint = None if options.target is None else SavepointPart(options.target, self._copied(plain))
        others = {**lists, **self._chain.freeze_broadcast(is_own=options.alignment.may_overtake)}
        self._frozen = FrozenSubtask(checkpoint, self._chain.freeze(), plain, sealed, others, savepoint)
        if options.is_last:
            self._chain.set_stopping()
        align_us = (begun_ns - self._align_started.pop(checkpoint, begun_ns)) // 1000
        return Durations(align_us, (self._clock_ns() - flushed_ns) // 1000)

    def _plain(self, checkpoint: CheckpointId, options: CheckpointOptions) -> dict[str, bytes]:
        """Return the small sections."""
        vertex = self._chain.vertex
        flag = b"\x01" if self._machine.is_finished else b"\x00"
        plain: dict[str, bytes] = {f"{FINISHED_PREFIX}{node.name}": flag for node in vertex.nodes}
        if vertex.nest is not None:
            plain[f"{ROUNDS_PREFIX}{vertex.head.name}"] = msgspec.msgpack.encode(self._machine.rounds)
        if self._source is not None:
            positions = self._source.positions(checkpoint, is_last=options.is_last)
            plain[f"{POSITIONS_PREFIX}{vertex.head.name}"] = encode_positions(positions)
        return plain

    def _copied(self, plain: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the small sections of a snapshot as a savepoint has them (SV9)."""
        positions = None if self._source is None else self._source.unprocessed_from
        if positions is None:
            return plain
        return {**plain, f"{POSITIONS_PREFIX}{self._chain.vertex.head.name}": encode_positions(positions)}

    def thawed(self) -> FrozenSubtask:
        """Return what was frozen, once."""
        assert self._frozen is not None
        frozen, self._frozen = self._frozen, None
        return frozen

    def thawed_with(self, recorded: FrozenInFlight | None) -> FrozenSubtask:
        """Return what was frozen, with the records in flight that belong to it."""
        frozen = self.thawed()
        if recorded is None:
            return frozen
        return replace(frozen, lists={**frozen.lists, (IN_FLIGHT_PREFIX, self._vertex): recorded})

    def emptied(self) -> FrozenSubtask:
        """Give the state up; return what is left: the sealed output, for the next snapshot (UA10)."""
        frozen = self.thawed()
        frozen.release()  # U6
        return replace(frozen, states={}, lists={})
