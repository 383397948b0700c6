"""Everything that can be frozen, alive: each kind of state of each operator, small, with what processing does to it."""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness
from tests.operators.process.broadcast_functions import READING, Unkeyed, limits, send, written
from tests.operators.test_async_map import Subtask, doubled

from headgate.codec.snapshot import Buffer, decode_sections
from headgate.connectors.base import SinkContext
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.file_writer import FileWriter
from headgate.model.config import RocksState
from headgate.model.graph import MAIN, MAIN_INPUT, Partitioner
from headgate.model.ids import ChannelIndex, CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.plan import Plan, PlanEdge
from headgate.operators.async_map import AsyncMapSpec
from headgate.operators.base import Operator, OperatorSpec, RestoredState
from headgate.operators.checkpoint_listeners import OperatorLists
from headgate.operators.functions import paused_gc
from headgate.operators.joins.broadcast_join import BroadcastJoinSpec
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_process import BatchContext, BatchProcessFunction, FiredTimers, batch_process_spec
from headgate.operators.process.connected_process import broadcast_spec
from headgate.operators.process.row_process import ProcessContext, ProcessFunction, StateHandle, row_process_spec
from headgate.operators.process.timers import Timer
from headgate.operators.reduction import ReduceSpec
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.operators.windows.aligned_windows import window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate
from headgate.operators.windows.window_trigger import Trigger, TriggerContext, TriggerResult, trigger_spec
from headgate.runtime.checkpoints.channel_state import ChannelState, RestoredPart, named_channels, restored_records
from headgate.runtime.wire.spill import SpillBudget
from headgate.runtime.worker import loop_head
from headgate.runtime.worker.deployment import SinkHead
from headgate.runtime.worker.loop_head import LoopLog, log_owner, replay_logs
from headgate.state import vectors
from headgate.state.descriptors import StateKind
from headgate.state.memory import column_backend as memory_columns
from headgate.state.memory import column_states as memory_lists
from headgate.state.memory import column_states as memory_maps
from headgate.state.memory import row_backend as memory_rows
from headgate.state.memory import timers as memory_timers
from headgate.state.memory import ttl as ttl_module
from headgate.state.memory.change_tracking import MemoryCells
from headgate.state.rocksdb import ttl as rocks_expiring
from headgate.state.snapshot import FrozenState
from headgate.state.ttl import TTL
from headgate.state.worker_backends import WorkerStates, worker_states

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("ts", pa.int64())])
KEYS = 12
ARROW = b"\xff\xff\xff\xff"
POINT = pl.Struct({"x": pl.Int64, "name": pl.String})
POINTS = pl.List(POINT)


def batch(step: int) -> pa.RecordBatch:
    """Return records of step ``step``: most keys again, one that is new for a while."""
    keys = [(step + i) % (KEYS + step % 5) for i in range(KEYS)]
    numbers = [step * KEYS + i for i in range(KEYS)]
    return pa.record_batch([keys, numbers, [10_000 + n for n in numbers]], schema=SCHEMA)


def joined(parts: Sequence[Buffer]) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in parts)


class Live(Protocol):
    """One owner of state that goes on with its work."""

    def change(self) -> None:
        """Process something: changes what is there, adds and removes."""

    def freeze(self) -> FrozenState: ...

    def contents(self, payload: bytes) -> Any:
        """Return what a new owner has after a restore of ``payload``."""

    def is_holding(self) -> bool:
        """Whether it still keeps two copies of anything because of a snapshot. Ask after a change."""


class Holder:
    """An operator."""

    def __init__(self, spec: OperatorSpec, worker: WorkerStates | None = None) -> None:
        self.spec = spec
        self.run = Harness(spec, worker=worker)
        self._step = 0

    @property
    def operator(self) -> Operator:
        return self.run.operator

    def change(self) -> None:
        self._step += 1
        self.run.send(batch(self._step), origin=f"split-{self._step % 3}")
        self.run.out.batches.clear()

    def freeze(self) -> FrozenState:
        self.operator.before_barrier()
        frozen = self.operator.freeze()
        assert frozen is not None
        return frozen

    def contents(self, payload: bytes) -> dict[str, Any]:
        restored = Harness(self.spec, [RestoredState(0, 1, memoryview(payload))])
        sections = decode_sections(restored.snapshot().payload, "test")
        return {name: rows_of(data) for name, data in sections.items()}

    def is_holding(self) -> bool:
        found = getattr(getattr(self.operator, "_backend", None), "_cells", {})
        cells = [found] if isinstance(found, MemoryCells) else list(found.values())
        timers = getattr(getattr(self.operator, "_backend", None), "_timers", {}).values()
        cells += [one.cells for one in timers if hasattr(one, "cells")]
        return any(one._overlay is not None for one in cells)


def rows_of(data: memoryview) -> Any:
    """Return a section for comparison: elements of a list stay in order, keys do not matter."""
    if data[:4] != ARROW:
        return bytes(data)
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    outer = [name for name in table.column_names if name != "value"]
    return sorted(table.to_pylist(), key=lambda row: [row[name] for name in outer])


class OnDisk(Holder):
    """An operator whose state is in RocksDB; its snapshots are restored in memory."""

    def __init__(self, spec: OperatorSpec) -> None:
        self._directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        worker = worker_states(RocksState(32 << 20, self._directory.name), None)
        weakref.finalize(self, worker.close)
        super().__init__(spec, worker)

    def freeze(self) -> FrozenState:
        """A state that is frozen needs its worker's directory, whoever else has forgotten the worker."""
        frozen = super().freeze()
        frozen.worker = self  # type: ignore[attr-defined]
        return frozen

    def change(self) -> None:
        super().change()
        if self._step > 4:
            self.operator.on_watermark(10_000 + (self._step - 4) * KEYS)

    def is_holding(self) -> bool:
        return any(Path(self._directory.name).rglob("checkpoint-*"))


class Windows(Holder):
    """A window operator: what combines locally stands in front of it."""

    def __init__(self, *aggregates: pl.Expr) -> None:
        aggregate = WindowedAggregate(("key",), "ts", tumbling(20), aggregates)
        found = window_operators(aggregate, SCHEMA, "node")
        super().__init__(found.window)
        self._combine = None if found.combine is None else Harness(found.combine)

    def change(self) -> None:
        if self._combine is None:
            super().change()
        else:
            self._step += 1
            self._combine.send(batch(self._step))
            self._combine.operator.before_barrier()
            for part in self._combine.out.batches:
                self.run.send(part)
            self._combine.out.batches.clear()
        if self._step > 6:
            self.operator.on_watermark(10_000 + (self._step - 6) * KEYS)


class Timed(Holder):
    """A process function with timers."""

    def change(self) -> None:
        super().change()
        if self._step > 4:
            self.operator.on_watermark(10_000 + (self._step - 4) * KEYS)


class Expiring(Holder):
    """A process function whose state expires: time goes on while it is changed."""

    def change(self) -> None:
        self.run.now_ms += 3
        super().change()


class TimersByRow(ProcessFunction):
    def process(self, row: dict[str, Any], context: ProcessContext) -> None:
        context.timers.register_event_time(row["ts"] // 7 * 7)
        context.timers.register_event_time(row["ts"])
        context.timers.register_processing_time(row["n"])
        context.timers.delete_event_time(row["ts"] - KEYS)

    def on_timer(self, timer: Timer, context: ProcessContext) -> None:
        context.timers.register_processing_time(timer.time_ms)


class Triggers(Trigger):
    def open(self, state: StateHandle) -> None:
        self.counts = state.map("counts", pa.int64(), pa.int64())

    def on_element(self, row: dict[str, Any], context: TriggerContext) -> TriggerResult:
        self.counts.put(row["n"] % 5, self.counts.get(row["n"] % 5, 0) + 1)
        if row["n"] % 7 == 0:
            self.counts.clear()
        context.timers.register_event_time(row["ts"])
        context.timers.register_processing_time(row["n"])
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        self.counts.put(0, time_ms)
        return TriggerResult.FIRE


class TimersByBatch(BatchProcessFunction):
    def open(self, state: BatchStateHandle) -> None:
        self.state = state.value("s", pa.int64())

    def process(self, batch: pl.DataFrame, context: BatchContext) -> None:
        self.state.put(batch["n"])
        context.timers.register_event_time(batch["ts"] // 7 * 7)
        context.timers.register_event_time(batch["ts"])
        context.timers.register_processing_time(batch["n"])
        context.timers.delete_event_time(batch["ts"] - KEYS)

    def on_timer(self, timers: FiredTimers, context: BatchContext) -> None:
        context.timers.register_processing_time(timers.times_ms)


class ByRow(ProcessFunction):
    def __init__(self, kind: StateKind, ttl: TTL | None = None) -> None:
        self.kind = kind
        self.ttl = ttl

    def open(self, state: StateHandle) -> None:
        if self.kind is StateKind.MAP:
            self.state: Any = state.map("s", pa.int64(), pa.large_string(), ttl=self.ttl)
        else:
            self.state = getattr(state, self.kind.value)("s", pa.int64(), ttl=self.ttl)

    def process(self, row: dict[str, Any], context: ProcessContext) -> None:
        n = row["n"]
        if n % 3 == 0:
            assert self.state.exists in (True, False)  # it may be renewed
        if n % 7 == 0:
            self.state.clear()
        elif self.kind is StateKind.VALUE:
            self.state.put(n)
        elif self.kind is StateKind.LIST:
            self.state.append(n)
        else:
            self.state.remove((n + 1) % 5)
            self.state.put(n % 5, f"{n}")


class ByBatch(BatchProcessFunction):
    def __init__(self, kind: StateKind, dtype: Any, ttl: TTL | None = None) -> None:
        self.kind = kind
        self.dtype = dtype
        self.ttl = ttl

    def open(self, state: BatchStateHandle) -> None:
        if self.kind is StateKind.MAP:
            self.state: Any = state.map("s", pa.large_string(), self.dtype, ttl=self.ttl)
        else:
            self.state = getattr(state, self.kind.value)("s", self.dtype, ttl=self.ttl)

    def process(self, batch: pl.DataFrame, context: BatchContext) -> None:
        n = batch["n"]
        values = n if self.dtype == pl.Int64 else n.cast(pl.String)
        if self.dtype == POINT:
            values = pl.DataFrame({"x": n, "name": n.cast(pl.String)}).to_struct()
        elif self.dtype == POINTS:
            points = pl.struct(x=pl.col("n"), name=pl.col("n").cast(pl.String))
            values = batch.select(pl.concat_list(points, points)).to_series()
        self.state.clear(where=n % 7 == 0)
        if self.ttl is not None and self.kind is not StateKind.MAP:
            assert len(self.state.get()) == len(batch)  # some are renewed
        if self.kind is StateKind.MAP:
            self.state.remove(((n + 1) % 5).cast(pl.String))
            self.state.put((n % 5).cast(pl.String), values)
        elif self.kind is StateKind.LIST:
            self.state.append(values)
        else:
            self.state.put(values)


class Log:
    """A loop head's log: records that came back for one checkpoint after the other. It is frozen by sealing it."""

    def __init__(self, keys: tuple[str, ...], memory_bytes: int) -> None:
        budget = SpillBudget(memory_bytes, 1 << 30, Path(tempfile.gettempdir()))
        self.owner = log_owner(keys, 16, 1, 0)
        self.log = LoopLog("loop", SCHEMA, self.owner, budget)
        self._step = 0
        self._checkpoint = CheckpointId(1)
        self.log.open(self._checkpoint)

    def change(self) -> None:
        self._step += 1
        self.log.append(batch(self._step), self.log.pending)

    def freeze(self) -> FrozenState:
        sealed = self.log.seal(self._checkpoint)
        self._checkpoint = CheckpointId(self._checkpoint + 1)
        self.log.open(self._checkpoint)
        return sealed

    def contents(self, payload: bytes) -> list[Any]:
        state = RestoredState(0, 1, memoryview(payload))
        found = [row for part in replay_logs([state], SCHEMA, self.owner, "loop") for row in part.to_pylist()]
        return sorted(found, key=lambda row: row["key"]) if self.owner.keys else found

    def is_holding(self) -> bool:
        """What is not in the open log is still held."""
        held = self.log.memory_bytes + self.log.spilled_bytes
        return held != self.log.size_bytes(self._checkpoint)


class Held:
    """What a file sink holds back; now and then it writes it, and begins anew."""

    def __init__(self) -> None:
        self._now_ms = 0
        self._step = 0
        self._writer = self._open()
        self.operator = SinkHead(self._writer)
        self.change()

    def _open(self) -> FileWriter:
        context = SinkContext("p", "out", 0, 1, Generation(1), SCHEMA, lambda: self._now_ms)
        writer = FileSink("memory://held", roll_interval="1h").open(context)
        assert isinstance(writer, FileWriter)
        return writer

    def change(self) -> None:
        self._step += 1
        if self._step % 3 == 0:
            self._now_ms += 3_600_000
            self._writer.seal(CheckpointId(self._step))
        self.operator.process(batch(self._step))

    def freeze(self) -> FrozenState:
        self._writer.seal(CheckpointId(self._step))
        frozen = self.operator.freeze()
        assert frozen is not None
        return frozen

    def contents(self, payload: bytes) -> list[Any]:
        writer = self._open()
        SinkHead(writer).restore([RestoredState(0, 1, memoryview(payload))])
        return [row for part in writer._restored for row in part.to_pylist()]

    def is_holding(self) -> bool:
        return False


class Lists:
    """Operator state: two lists of a function that has no key."""

    def __init__(self) -> None:
        self._lists = OperatorLists("node")
        self._numbers = self._lists.declare("numbers", pa.int64())
        self._texts = self._lists.declare("texts", pa.string())
        self._lists.close()
        self._step = 0
        self.change()

    def change(self) -> None:
        self._step += 1
        self._numbers.append(self._step)
        self._texts.put([f"{n}ß" for n in range(self._step % 4)])

    def freeze(self) -> FrozenState:
        frozen = self._lists.freeze(is_union=False)
        assert frozen is not None
        return frozen

    def contents(self, payload: bytes) -> list[Any]:
        lists = OperatorLists("node")
        lists.take([RestoredState(0, 1, memoryview(payload))])
        return [lists.declare("numbers", pa.int64()).get(), lists.declare("texts", pa.string()).get()]

    def is_holding(self) -> bool:
        return False


class Broadcast:
    """The maps of a broadcast side, which grow, change and are emptied."""

    def __init__(self) -> None:
        self.run = Harness(broadcast_spec("node", (), Unkeyed(), READING))
        self._step = 0
        self.change()

    def change(self) -> None:
        self._step += 1
        send(self.run, limits(*[(f"{n}ß", self._step % 3 + n % 2) for n in range(self._step % 5, 9)]))

    def freeze(self) -> FrozenState:
        frozen = self.run.operator.freeze_broadcast(is_own=self._step % 2 == 1)
        assert frozen is not None
        return frozen

    def contents(self, payload: bytes) -> list[Any]:
        restored = Harness(broadcast_spec("node", (), Unkeyed(), READING))
        restored.operator.restore_broadcast([RestoredState(0, 1, memoryview(payload))])
        state = written(restored)
        assert state is not None
        return [(name, rows_of(data)) for name, data in decode_sections(state.payload, "test").items()]

    def is_holding(self) -> bool:
        return False


class Waiting:
    """Records that wait in an operator: for answers, or for the rest of a table."""

    def __init__(self, make: Callable[[list[RestoredState]], Operator]) -> None:
        self._make = make
        self.operator = make([])
        self._step = 0
        self.change()

    def change(self) -> None:
        self._step += 1
        self.operator.process_input(MAIN_INPUT, batch(self._step))

    def freeze(self) -> FrozenState:
        frozen = self.operator.freeze()
        assert isinstance(frozen, FrozenState)
        return frozen

    def contents(self, payload: bytes) -> list[Any]:
        restored = self._make([RestoredState(0, 1, memoryview(payload))]).freeze()
        assert restored is not None
        sections = decode_sections(joined(restored.encode()), "test")
        return [(name, rows_of(data)) for name, data in sections.items()]

    def is_holding(self) -> bool:
        return False


def asking(states: list[RestoredState]) -> Operator:
    """Return an operator of which nothing answers the calls."""
    return Subtask(AsyncMapSpec(doubled, SCHEMA, limit=10_000), states).operator


def joining(states: list[RestoredState]) -> Operator:
    """Return a join of which the table is not complete."""
    keys: Any = {"left_keys": ("key",), "right_keys": ("key",), "suffix": "_right"}
    spec = BroadcastJoinSpec(SCHEMA, SCHEMA, how="semi", waits=True, has_changes=False, **keys)
    return Harness(spec, states).operator


class Recorded:
    """Records on their way to one subtask, on two channels of an edge."""

    def __init__(self) -> None:
        edge = PlanEdge(0, VertexId("u"), NodeName("u"), MAIN, VertexId("v"), Partitioner.REBALANCE, ())
        self._plan = Plan((), (edge,), 2, 16)
        self._ways = named_channels(self._plan, SubtaskId(VertexId("v"), 1), [SCHEMA])
        self._recorded: dict[ChannelIndex, list[pa.RecordBatch]] = {}
        self._step = 0
        self.change()

    def change(self) -> None:
        self._step += 1
        self._recorded.setdefault(ChannelIndex(self._step % 2), []).append(batch(self._step))

    def freeze(self) -> FrozenState:
        return ChannelState(self._ways, self._recorded)

    def contents(self, payload: bytes) -> list[Any]:
        part = RestoredPart(1, 2, self._ways[0].name.encode(), lambda: memoryview(payload))
        found = restored_records([part], self._ways, self._plan, SubtaskId(VertexId("v"), 1))
        return [(channel, row) for channel, restored in found for row in restored.to_pylist()]

    def is_holding(self) -> bool:
        return False


def add(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**total, "n": total["n"] + row["n"]}


def by_row(kind: StateKind) -> Holder:
    return Holder(row_process_spec("node", ("key",), ByRow(kind), SCHEMA))


def by_batch(kind: StateKind, dtype: Any) -> Holder:
    return Holder(batch_process_spec("node", ("key",), ByBatch(kind, dtype), SCHEMA))


def expiring(kind: StateKind, update: Any, *, is_by_row: bool) -> Holder:
    ttl = TTL("10ms", update)
    if is_by_row:
        return Expiring(row_process_spec("node", ("key",), ByRow(kind, ttl), SCHEMA))
    return Expiring(batch_process_spec("node", ("key",), ByBatch(kind, pl.String, ttl), SCHEMA))


DTYPES = {"numbers": pl.Int64, "texts": pl.String, "structs": POINT, "lists-of-structs": POINTS}
CASES: dict[str, Callable[[], Live]] = {
    "reduce": lambda: Holder(ReduceSpec(("key",), add, SCHEMA)),
    **{f"by-row-{kind.value}": lambda kind=kind: by_row(kind) for kind in StateKind},  # type: ignore[misc]
    **{
        f"by-batch-{kind.value}-{name}": lambda kind=kind, dtype=dtype: by_batch(kind, dtype)  # type: ignore[misc]
        for kind in StateKind
        for name, dtype in DTYPES.items()
    },
    **{
        f"{form}-{kind.value}-with-ttl-on-{update}": lambda kind=kind, update=update, form=form: expiring(  # type: ignore[misc]
            kind, update, is_by_row=form == "by-row"
        )
        for form, update in (("by-row", "write"), ("by-row", "read_and_write"), ("by-batch", "read_and_write"))
        for kind in StateKind
    },
    **{
        f"rocksdb-{name}": lambda make=make: OnDisk(make().spec)  # type: ignore[misc]
        for name, make in {
            "by-row-list": lambda: by_row(StateKind.LIST),
            "by-row-map": lambda: by_row(StateKind.MAP),
            "by-batch-value": lambda: by_batch(StateKind.VALUE, POINT),
            "by-batch-map": lambda: by_batch(StateKind.MAP, pl.String),
            "timers-by-batch": lambda: Holder(batch_process_spec("node", ("key",), TimersByBatch(), SCHEMA)),
            "by-row-list-with-ttl": lambda: expiring(StateKind.LIST, "read_and_write", is_by_row=True),
            "by-batch-map-with-ttl": lambda: expiring(StateKind.MAP, "read_and_write", is_by_row=False),
            "reduce": lambda: Holder(ReduceSpec(("key",), add, SCHEMA)),
        }.items()
    },
    "timers-by-row": lambda: Timed(row_process_spec("node", ("key",), TimersByRow(), SCHEMA)),
    "timers-by-batch": lambda: Timed(batch_process_spec("node", ("key",), TimersByBatch(), SCHEMA)),
    "trigger": lambda: Timed(trigger_spec("node", ("key",), Triggers(), SCHEMA, SCHEMA)),
    "rocksdb-trigger": lambda: OnDisk(trigger_spec("node", ("key",), Triggers(), SCHEMA, SCHEMA)),
    "with-timestamps": lambda: Holder(WithTimestampsSpec("ts")),
    "window-merge": lambda: Windows(pl.col("n").sum(), pl.col("n").max().alias("most")),
    "window-buffer": lambda: Windows(pl.col("n").n_unique()),
    "held-by-a-file-sink": Held,
    "operator-lists": Lists,
    "broadcast": Broadcast,
    "async-map": lambda: Waiting(asking),
    "broadcast-join": lambda: Waiting(joining),
    "in-flight": Recorded,
    "loop-log": lambda: Log(("key",), 1 << 30),
    "loop-log-on-disk": lambda: Log(("key",), 0),
    "loop-log-without-key": lambda: Log((), 1 << 30),
}


@contextmanager
def small() -> Iterator[None]:
    """Make parts, pools and heaps so small that little state fills several and leaves garbage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_rows, "_ENCODE_KEYS", 4)
        patch.setattr(memory_columns, "_ENCODE_ROWS", 4)
        patch.setattr(memory_columns, "_RENUMBER_MIN", 4)
        patch.setattr(memory_timers, "_TAIL_ROWS", 16)
        patch.setattr(memory_timers, "_RUNS_MERGED", 2)
        patch.setattr(memory_timers, "_DUE_ROWS", 8)
        patch.setattr(memory_lists, "_POOL_FREE", 4)
        patch.setattr(memory_maps, "_DEAD_FREE", 4)
        patch.setattr(vectors, "_HEAP_FREE", 4)
        patch.setattr(ttl_module, "SWEEP_KEYS", 2)
        patch.setattr(ttl_module, "SWEEP_ROWS", 2)
        patch.setattr(rocks_expiring, "SWEEP_ROWS", 2)
        patch.setattr(loop_head, "CHUNK_ROWS", 16)
        yield


def made(name: str) -> Live:
    """Return the case ``name`` with some state in it."""
    live = CASES[name]()
    for _ in range(4):
        live.change()
    return live


class At:
    """Does something when the code of Headgate is about to run its line number ``number`` (of those it runs)."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self._number, self._action = number, action
        self.lines = 0

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        with paused_gc():  # the lines of what a collection ends would count, too
            sys.settrace(self._enter)
            try:
                return call()
            finally:
                sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename  # within spill.py a lock is held, so that nobody else would run there
        return self._line if "/headgate/" in name and not name.endswith("spill.py") else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._number:
                self._action()
        return self._line


def lines_of(call: Callable[[], Any], most: int = 60) -> list[int]:
    """Return at which of its lines to disturb ``call``: all, or ``most`` of them spread evenly."""
    counter = At(0, lambda: None)
    counter.run(call)
    step = max(1, counter.lines // most)
    return list(range(1, counter.lines + 1, step))
