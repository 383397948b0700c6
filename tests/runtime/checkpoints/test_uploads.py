"""The asynchronous part of snapshots: order, retries, and what a cancelled or failed write leaves to the next."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.protocol.subtasks.subtask import SnapshotFailed, SnapshotWritten
from headgate.runtime.checkpoints import snapshot_writer
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SnapshotWriter, SubtaskSnapshot
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage


class Sealed:
    """A transaction whose ``prepare`` first raises the given errors."""

    def __init__(self, payload: bytes | None, *errors: Exception, gate: threading.Event | None = None) -> None:
        self._payload, self._errors, self._gate = payload, list(errors), gate
        self.entered = threading.Event()

    def prepare(self) -> bytes | None:
        self.entered.set()
        if self._gate is not None:
            assert self._gate.wait(120)
        if self._errors:
            raise self._errors.pop(0)
        return self._payload


class Uploads:
    """A writer with one pool thread; ``events`` are what it reported."""

    def __init__(self) -> None:
        self.storage = FaultyStorage(MemoryStorage())
        self.events: list[SnapshotWritten | SnapshotFailed] = []
        self.texts: list[str] = []
        self.errors: list[BaseException] = []
        self._pool = ThreadPoolExecutor(1)
        to = SnapshotDestination(self.storage, "p", Generation(2), 0)
        self.writer = SnapshotWriter(SubtaskId(VertexId("v"), 1), to, self._pool, self._report, self.errors.append)

    def _report(self, event: SnapshotWritten | SnapshotFailed, text: str) -> None:
        self.events.append(event)
        self.texts.append(text)

    def start(self, checkpoint: int, sealed: Sealed | None = None) -> None:
        transactions = [] if sealed is None else [("out", sealed)]
        self.writer.start(SubtaskSnapshot(CheckpointId(checkpoint), {}, {"flag": b"x"}, transactions))

    def finish(self) -> list[tuple[int, list[int] | None]]:
        """Return ``(checkpoint, checkpoints of its committables; None for a failure)``."""
        self._pool.shutdown()
        return [
            (e.checkpoint, [c.checkpoint for c in e.entry.committables] if isinstance(e, SnapshotWritten) else None)
            for e in self.events
        ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr(snapshot_writer, "RETRY_PAUSES_S", (0.0, 0.0))
    return Uploads()


def test_snapshots_are_written_in_order_and_carry_their_own_output(made: Uploads) -> None:  # U1
    for checkpoint in (1, 2, 3):
        made.start(checkpoint, Sealed(b"rows" if checkpoint != 2 else None))
    assert made.finish() == [(1, [1]), (2, []), (3, [3])]
    assert made.errors == []


def test_transient_faults_are_retried(made: Uploads) -> None:  # U4
    made.storage.inject(Fault(FaultKind.NO_SPACE, operation="put"))
    made.start(1, Sealed(b"rows", StorageError("prepare", "x", "busy"), StorageError("prepare", "x", "busy")))
    assert made.finish() == [(1, [1])]


def test_a_fault_that_waiting_cannot_mend_is_reported_at_once(made: Uploads) -> None:
    made.start(1, Sealed(b"rows", StorageError("prepare", "x", "denied", is_transient=False)))
    made.start(2)
    assert made.finish() == [(1, None), (2, [1])]
    assert "denied" in made.texts[0]


def test_a_state_that_cannot_be_written_leaves_prepared_output_to_the_next_snapshot(made: Uploads) -> None:  # U2
    made.storage.inject(Fault(FaultKind.NO_SPACE, operation="put", path_part="chk-0000000001", times=9))
    made.start(1, Sealed(b"rows"))
    made.start(2, Sealed(b"more"))
    assert made.finish() == [(1, None), (2, [1, 2])]


def test_a_cancelled_write_reports_nothing_and_leaves_its_output_to_the_next_one(made: Uploads) -> None:  # U3
    gate = threading.Event()
    first = Sealed(b"a", gate=gate)
    made.start(1, first)
    assert first.entered.wait(120)
    made.start(2, Sealed(b"b"))
    made.start(3, Sealed(b"c"))
    made.writer.cancel(CheckpointId(1))
    made.writer.cancel(CheckpointId(2))
    gate.set()
    assert made.finish() == [(3, [1, 2, 3])]
    assert [path for operation, path in made.storage.calls if operation == "put"] == ["p/chk-0000000003/v-1.g2"]


def test_cancelled_ids_are_forgotten(made: Uploads) -> None:
    for checkpoint in range(1, 50):
        made.writer.cancel(CheckpointId(checkpoint))
    made.start(50)
    assert made.finish() == [(50, [])]
    assert made.writer._cancelled == set()


def test_what_no_checkpoint_can_survive_is_handed_on(made: Uploads) -> None:  # U5
    bug = ValueError("a bug")
    made.start(1, Sealed(b"x", bug))
    assert made.finish() == []
    assert made.errors == [bug]


@pytest.mark.parametrize(
    "said", [CorruptionError("transaction 't'", 0, "one to prepare", "committed"), UsageError("the stream is sealed")]
)
def test_output_that_the_target_refuses_is_never_left_to_the_next_snapshot(
    made: Uploads, said: Exception
) -> None:  # K21
    made.start(1, Sealed(b"1", said))
    assert made.finish() == []
    (error,) = made.errors
    assert isinstance(error, snapshot_writer.PrepareRefused)
    assert str(error).startswith(f"sink 'out' cannot prepare the output of checkpoint 1: {said}; starting again cannot")


def test_closing_gives_up_waiting_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_writer, "RETRY_PAUSES_S", (1_000.0,))
    made = Uploads()
    sealed = Sealed(b"x", StorageError("prepare", "x", "busy"))
    made.start(1, sealed)
    assert sealed.entered.wait(120)
    made.writer.close()
    assert made.finish() == [(1, None)]
