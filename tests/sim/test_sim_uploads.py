"""Writes of one subtask: in order, output first, and nothing sealed is ever forgotten (X7)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.protocol.subtasks.subtask import Event, SnapshotFailed, SnapshotWritten
from headgate.sim.disk import Disk
from headgate.sim.faults import Fault, Faults
from headgate.sim.marks import Marks
from headgate.sim.storemodel import StoreModel, Transaction
from headgate.sim.subtaskhost import SubtaskHost
from headgate.sim.uploads import Job, Uploads
from headgate.sim.world import Process, World


class Bench:
    """An ``Uploads`` whose host only remembers what it is told."""

    def __init__(self) -> None:
        self.world = World(3)
        self.faults = Faults(random.Random(3))
        self.store = StoreModel(lambda _: None)
        self.events: list[Event] = []
        worker: Any = Process(self.world, "w")
        checkpoints = SimpleNamespace(inline_bytes_max=0)
        disk = Disk(self.world, self.faults, lambda _: None)
        worker.env = SimpleNamespace(
            faults=self.faults,
            store=self.store,
            marks=Marks(),
            disk=disk,
            options=SimpleNamespace(checkpoints=checkpoints),
        )
        worker.generation = Generation(1)
        host = SimpleNamespace(worker=worker, subtask=SubtaskId(VertexId("v"), 0), handle=self.events.append)
        self.uploads = Uploads(cast(SubtaskHost, host))

    def start(self, checkpoint: int) -> Transaction:
        transaction = self.store.begin("out", 0, Generation(1))
        self.uploads.start(Job(CheckpointId(checkpoint), b"state", [transaction]))
        return transaction

    def run(self) -> list[tuple[str, int, list[int]]]:
        self.world.run(lambda: False, 10_000, 1_000)
        return [
            (type(e).__name__, e.checkpoint, [c.checkpoint for c in getattr(e, "committables", ())])
            for e in self.events
            if isinstance(e, SnapshotWritten | SnapshotFailed)
        ]


def test_writes_end_in_checkpoint_order() -> None:
    bench = Bench()
    bench.start(1)
    bench.start(2)
    assert bench.run() == [("SnapshotWritten", 1, [1]), ("SnapshotWritten", 2, [2])]


def test_a_cancelled_write_leaves_its_output_to_the_next() -> None:  # X7
    bench = Bench()
    bench.start(1)
    bench.start(2)
    bench.uploads.cancel(CheckpointId(1))
    assert bench.run() == [("SnapshotWritten", 2, [1, 2])]


def test_a_failed_write_leaves_what_it_had_prepared_to_the_next() -> None:
    bench = Bench()
    bench.start(1)
    bench.faults.rates[Fault.PUT_FAILS] = 1.0
    assert bench.run() == [("SnapshotFailed", 1, [])]
    bench.faults.rates.clear()
    bench.events.clear()
    bench.start(2)
    assert bench.run() == [("SnapshotWritten", 2, [1, 2])]


def test_a_prepare_that_failed_after_its_effect_is_repeated() -> None:
    bench = Bench()
    transaction = bench.start(1)
    bench.faults.rates[Fault.PREPARE_FAILS_AFTER] = 1.0
    assert bench.run() == [("SnapshotFailed", 1, [])]
    assert transaction.status.value == "prepared"
    bench.faults.rates.clear()
    bench.events.clear()
    bench.start(2)
    assert bench.run() == [("SnapshotWritten", 2, [1, 2])]
