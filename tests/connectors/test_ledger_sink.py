"""A ledger keeps its records in pieces: prepared one by one, published one by one, in one transaction."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

import headgate as hg
from headgate.connectors import ledger_sink
from headgate.connectors.base import SinkContext
from headgate.connectors.ledger_sink import LedgerOutput
from headgate.errors import CorruptionError, OutputDenied
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Committable, Manifest, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.subtasks.subtask import SnapshotFailed, SnapshotWritten
from headgate.runtime.checkpoints import snapshot_writer
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SnapshotWriter, SubtaskSnapshot
from headgate.runtime.driver.connectors import SinkCommits
from headgate.storage.memory import MemoryStorage

SCHEMA = pa.schema([("number", pa.int64())])


class Table(hg.LedgerSink):
    """Shows rows and names in one step. ``seen`` is called with each batch."""

    piece_bytes = 1

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.names: set[str] = set()
        self.seen: Callable[[pa.RecordBatch], None] = lambda batch: None

    def claim(self, fence: hg.Fence) -> None:
        """Nobody else is there."""

    def claimed(self, owner: str) -> hg.Fence | None:
        return None

    def all_claimed(self) -> Sequence[hg.Fence]:
        return ()

    def publish(self, outputs: Sequence[hg.LedgerOutput], fence: hg.Fence) -> None:
        new = [output for output in outputs if output.name not in self.names]
        rows: list[int] = []
        for output in new:
            for batch in output:
                self.seen(batch)
                rows += batch["number"].to_pylist()
        self.rows += rows
        self.names |= {output.name for output in new}


class Worker:
    """A subtask with a ledger; every checkpoint is written at once, to storage that fails where it is told to."""

    def __init__(self, sink: Table) -> None:
        self.storage = FaultyStorage(MemoryStorage("pieces"))
        self.sink = sink
        self.writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
        self.events: list[SnapshotWritten | SnapshotFailed] = []
        self.errors: list[BaseException] = []
        to = SnapshotDestination(self.storage, "p", Generation(1), 1 << 20)
        self.pool = ThreadPoolExecutor(1)
        self.uploads = SnapshotWriter(
            SubtaskId(VertexId("v"), 0), to, self.pool, lambda event, _: self.events.append(event), self.errors.append
        )

    def write(self, *numbers: int) -> None:
        self.writer.write(pa.record_batch([list(numbers)], schema=SCHEMA))

    def checkpoint(self, number: int) -> tuple[Committable, ...] | None:
        """Return what was prepared, None when the checkpoint was declined."""
        sealed = self.writer.seal(CheckpointId(number))
        self.uploads.start(SubtaskSnapshot(CheckpointId(number), {}, {}, [("out", sealed)]))
        self.pool.submit(lambda: None).result(120)
        self.pool.submit(lambda: None).result(120)
        assert self.errors == []
        event = self.events[-1]
        return event.entry.committables if isinstance(event, SnapshotWritten) else None

    def files(self) -> list[str]:
        return [path for operation, path in self.storage.calls if operation == "put"]

    def log(self) -> CheckpointLog:
        return CheckpointLog(self.storage, "p")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = worker_of(monkeypatch)
    yield made
    made.writer.close()
    made.pool.shutdown()


def worker_of(patch: pytest.MonkeyPatch) -> Worker:
    patch.setattr(snapshot_writer, "RETRY_PAUSES_S", (0.0,))
    patch.setattr(ledger_sink, "INLINE_BYTES_MAX", 0)
    return Worker(Table())


@dataclass
class Driver:
    """The committers of a pipeline with this sink."""

    commits: SinkCommits
    read: list[str]

    def commit(self, checkpoint: int, committables: Sequence[Committable]) -> None:
        self.commits.commit(CommitPermit(CheckpointId(checkpoint), Generation(1)), committables)


def driver_of(worker: Worker, root: Path) -> Driver:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    pipeline.source(hg.FromRows([{"number": 1}])).sink(worker.sink, name="out")
    log, found = worker.log(), []

    def read(part: SnapshotPart) -> memoryview:
        found.append(part.path)
        return log.files.read(part)

    return Driver(SinkCommits(pipeline.definition(), Generation(1), read), found)


def test_output_is_prepared_in_pieces_and_published_in_one_step(worker: Worker, tmp_path: Path) -> None:
    for number in range(5):
        worker.write(number)
    prepared = worker.checkpoint(1)
    assert prepared is not None
    (committable,) = prepared
    assert len(committable.pieces) == 5
    assert len(committable.payload) < 100
    assert committable.stored is None
    driver = driver_of(worker, tmp_path)
    driver.commit(1, prepared)
    driver.commit(1, prepared)
    assert worker.sink.rows == [0, 1, 2, 3, 4]
    assert driver.read == [piece.path for piece in committable.pieces], "published output is not read again"


def test_one_piece_is_in_memory_at_a_time(worker: Worker, tmp_path: Path) -> None:
    for number in range(5):
        worker.write(number)
        assert worker.writer._records.open_bytes == 0, "a closed piece is in a file"
    prepared = worker.checkpoint(1)
    assert prepared is not None
    driver = driver_of(worker, tmp_path)
    read_before: list[int] = []
    worker.sink.seen = lambda batch: read_before.append(len(driver.read))
    driver.commit(1, prepared)
    assert read_before == [1, 2, 3, 4, 5]


def test_a_failure_between_two_pieces_goes_on_there(worker: Worker, tmp_path: Path) -> None:
    for number in range(4):
        worker.write(number)
    worker.storage.inject(Fault(FaultKind.NO_SPACE, operation="put", path_part=".o", first=3, times=2))
    assert worker.checkpoint(1) is None
    worker.write(4)
    prepared = worker.checkpoint(2)
    assert prepared is not None
    assert [c.checkpoint for c in prepared] == [1, 2]
    written = {path for path in worker.files() if ".o" in path}
    assert len(written) == 5, "what is durable is not written again"
    driver_of(worker, tmp_path).commit(2, prepared)
    assert worker.sink.rows == [0, 1, 2, 3, 4]


def test_a_checkpoint_that_is_cancelled_between_two_pieces_leaves_them_to_the_next(
    worker: Worker, tmp_path: Path
) -> None:
    for number in range(3):
        worker.write(number)
    worker.uploads.cancel(CheckpointId(1))
    sealed = worker.writer.seal(CheckpointId(1))
    worker.uploads.start(SubtaskSnapshot(CheckpointId(1), {}, {}, [("out", sealed)]))
    prepared = worker.checkpoint(2)
    assert prepared is not None
    assert [(c.checkpoint, len(c.pieces)) for c in prepared] == [(1, 3)]
    driver_of(worker, tmp_path).commit(2, prepared)
    assert worker.sink.rows == [0, 1, 2]


def test_a_failure_while_pieces_are_published_shows_nothing_and_is_made_good(worker: Worker, tmp_path: Path) -> None:
    for number in range(4):
        worker.write(number)
    prepared = worker.checkpoint(1)
    assert prepared is not None
    driver = driver_of(worker, tmp_path)
    times = 99
    worker.storage.inject(Fault(FaultKind.IO_ERROR, operation="get_range", path_part=".o", first=3, times=times))
    with pytest.raises(hg.HeadgateError):
        driver.commit(1, prepared)
    assert worker.sink.rows == []
    worker.storage.heal()
    driver.commit(1, prepared)
    assert worker.sink.rows == [0, 1, 2, 3]


def test_a_piece_that_is_gone_or_not_named_is_a_denial(worker: Worker, tmp_path: Path) -> None:  # K5
    for number in range(3):
        worker.write(number)
    prepared = worker.checkpoint(1)
    assert prepared is not None
    (whole,) = prepared
    driver = driver_of(worker, tmp_path)
    with pytest.raises(OutputDenied, match="expected 3 pieces, found 2"):
        driver.commit(1, [replace(whole, pieces=whole.pieces[:2])])
    worker.storage.delete(f"p/{whole.pieces[1].path}")
    with pytest.raises(OutputDenied, match="prepared output"):
        driver.commit(1, prepared)
    assert worker.sink.rows == []


def test_pieces_stay_until_they_are_committed(worker: Worker) -> None:  # SF4
    for number in range(3):
        worker.write(number)
    log = worker.log()
    log.claim("test", 0)
    prepared = worker.checkpoint(1)
    assert prepared is not None
    subtask = SubtaskId(VertexId("v"), 0)

    def complete(number: int, *carried: Committable) -> Manifest:
        log.reserve(CheckpointId(number))
        manifest = Manifest(CheckpointId(number), Generation(1), 1, 128, (SubtaskEntry(subtask, ()),), carried)
        log.append(manifest)
        return manifest

    complete(1, *prepared)
    manifest = complete(2, *prepared)
    log.drop(CheckpointId(1), CheckpointId(2))
    left = [path for path in worker.storage.list("p") if ".o" in path]
    assert len(left) == 3, "it is carried: not committed yet"
    assert log.files.verify(manifest) == []
    worker.storage.delete(left[1])
    assert len(log.files.verify(manifest)) == 1, "pieces are verified with the checkpoint"
    complete(3)
    log.drop(CheckpointId(2), CheckpointId(3))
    assert [path for path in worker.storage.list("p") if ".o" in path] == []


def test_small_output_is_in_the_manifest_as_ever() -> None:
    sink = Table()
    sink.piece_bytes = 1 << 20
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    writer.write(pa.record_batch([[7, 8]], schema=SCHEMA))
    sealed = writer.seal(CheckpointId(3))
    assert sealed.pieces_count == 0
    payload = sealed.prepare()
    assert payload is not None
    assert payload.startswith(b"1\np:out-0000000003-00000-0000000001\n")
    assert sealed.prepare() == payload
    output = LedgerOutput(Committable("out", CheckpointId(3), 0, Generation(1), payload), nobody)
    assert (output.name, output.checkpoint) == ("p:out-0000000003-00000-0000000001", 3)
    assert [batch.to_pylist() for batch in output] == [[{"number": 7}, {"number": 8}]]


def nobody(piece: Any) -> Any:
    raise AssertionError("nothing is to be read")


EARLIER = (
    "F$!=xZ*_DnFfcGMFfcGMFf=VNFfcGNEif=JFfcGMFfcL-|NsC0fB*mh5C8xG000UA3;+fI1po*D3IG5A009I53;+NC2mlBG000C42mk;81ONa4"
    "0RR916aWAK5C9Ya2ml5E2LKEJ000mG5C8xG000335C8xGAOHXW1ONa4000001^@s6Zgp*9WpV%j2mlNK2ml8F2mk;800001KmY&$00000|NsC0"
    "pa1{>6aWAK000003;-Aa1^@*B2mlNK3;+NC00RU78~^|SC;$Ke00000000003;-Sg5C8-K2mlNK3;+NCPyhe`Bme*a7ytkO0ssI20000000000"
    "000I62ml8F1^@s6000010ssI2000000000000000000000000000000ApigX00000000000RR910ssI20000000000000005C8xG00000D77#B"
    "AP|87009610000000IC2000000000000000|NsC000000"
)
"""What Headgate prepared of the numbers 1 and 2 before there were pieces: name and records in one payload."""


def test_what_earlier_versions_prepared_is_published(tmp_path: Path) -> None:
    payload = base64.b85decode(EARLIER)
    sink = Table()
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    pipeline.source(hg.FromRows([{"number": 1}])).sink(sink, name="out")
    commits = SinkCommits(pipeline.definition(), Generation(3), lambda part: memoryview(payload))
    stored = SnapshotPart(len(payload), 0, "chk-4/x.o1")
    in_a_file = Committable("out", CheckpointId(4), 1, Generation(2), b"", stored)
    inline = Committable("out", CheckpointId(4), 1, Generation(2), payload)
    permit = CommitPermit(CheckpointId(4), Generation(3))
    for old in (in_a_file, inline):
        commits.recover(permit, [old])
    assert sink.rows == [1, 2]
    assert sink.names == {"p:out-0000000004-00001-0000000002"}


def test_a_damaged_piece_is_named() -> None:
    part = SnapshotPart(3, 0, "chk-1/v-0.g1.o1")
    one = Committable(
        "out", CheckpointId(1), 0, Generation(1), b"2\np:out-0000000001-00000-0000000001\n1", None, (part,)
    )
    with pytest.raises(CorruptionError, match=r"output p:out-0000000001.*an Arrow stream"):
        list(LedgerOutput(one, lambda _: memoryview(b"xyz")))
