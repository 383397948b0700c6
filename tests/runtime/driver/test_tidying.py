"""What only tidies up at a sink does not end a start, and says what it left; everything else still does (K24)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors.files import file_sink
from headgate.errors import StorageError
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage
from headgate.store.store import Store

FOR_EVER = 10_000


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))


class Place:
    """One pipeline with one sink, and drivers that begin generations of it."""

    def __init__(self, root: Path, sink: Any) -> None:
        pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval=None, dir=root / "checkpoints"))
        pipeline.source(hg.FromRows([{"id": 1}])).sink(sink, name="out")
        self.definition = pipeline.definition()
        self.log = MemoryStorage()
        self.notes: list[str] = []

    def begin(self) -> None:
        self.notes.clear()
        begun = begin_generation(self.definition, CheckpointLog(self.log, "p"), "test", self.notes.append)
        assert isinstance(begun, NewGeneration)
        begun.commits.close()


def files(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Place, FaultyStorage]:
    """A file sink whose former generation left a claim, a probe, an unfinished write and a prepared file."""
    sink = hg.FileSink(root / "out")
    faulty = FaultyStorage(open_storage(sink.url))
    monkeypatch.setattr(file_sink, "open_storage", lambda url, access: faulty)
    place = Place(root, sink)
    place.begin()
    faulty.put("_claims/p.out/probe-0011223344556677", [b"first"])
    faulty.put("_staging/p.out/part-p.out-0000000001-00000-0000000001-00000.jsonl.tmp", [b"prepared"])
    return place, faulty


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.IO_ERROR, "delete", "_claims/p.out/0", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "delete", "_claims/p.out/probe", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "sweep_unfinished", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "sweep_unfinished", "_owners", times=FOR_EVER),
    ],
    ids=lambda fault: f"{fault.operation}-{fault.path_part}",
)
def test_a_file_sink_that_cannot_tidy_up_is_recovered_and_says_so(  # K24
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    place, faulty = files(tmp_path, monkeypatch)
    faulty.inject(fault)
    place.begin()
    (note,) = [note for note in place.notes if "could not remove what is left at sink 'out'" in note]
    assert "the next start tries again" in note
    assert faulty.list("_staging") == [], "what was prepared and not promised is aborted, all the same"
    faulty.heal()
    place.begin()
    assert not [note for note in place.notes if "could not remove" in note]
    assert faulty.list("_claims") == ["_claims/p.out/0000000003"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.IO_ERROR, "put_if_absent", "_claims", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "list", "_claims", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "list", "_publishing", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "list", "_staging", times=FOR_EVER),
        Fault(FaultKind.IO_ERROR, "delete", "_staging/p.out/part", times=FOR_EVER),
    ],
    ids=lambda fault: f"{fault.operation}-{fault.path_part}",
)
def test_a_file_sink_that_cannot_fence_or_abort_is_not_recovered(  # K6, K24
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    place, faulty = files(tmp_path, monkeypatch)
    faulty.inject(fault)
    with pytest.raises(StorageError):
        place.begin()


def stream(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Place, FaultyStorage, Callable[[], int]]:
    """A stream sink whose former generation left a chunk that no transaction refers to."""
    faulty = FaultyStorage(MemoryStorage())
    store = Store.open(root / "store", storage=faulty)
    monkeypatch.setattr(Store, "shared", staticmethod(lambda root=None: store))
    place = Place(root, hg.StreamSink("s", store=root / "store"))
    place.begin()
    transaction = store.transactions.begin("s", owner="p/out", epoch=1, name="left")
    transaction.write(pa.record_batch({"id": [1]}))
    transaction._write_chunk(transaction._buffer)
    return place, faulty, lambda: len(faulty.list(""))


@pytest.mark.parametrize("operation", ["list", "sweep_unfinished"])
def test_a_stream_sink_that_cannot_sweep_is_recovered_and_says_so(  # K24
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    place, faulty, count = stream(tmp_path, monkeypatch)
    assert count() == 1
    faulty.inject(Fault(FaultKind.IO_ERROR, operation, times=FOR_EVER))
    place.begin()
    assert [note for note in place.notes if "could not remove what is left at sink 'out'" in note]
    faulty.heal()
    assert count() == 1
    place.begin()
    assert not [note for note in place.notes if "could not remove" in note]
    assert count() == 0
