"""The committers of all sinks: order, one step for each permit, permanent errors, leftovers and forgotten outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.protocol.checkpoints.test_recovery import TORN, claim, log
from tests.runtime.checkpoints.writing import write_snapshot
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.testing.staged import ForgettingSink
from tests.testing.staged import Place as Target

import headgate as hg
from headgate.connectors.base import Committer, SinkContext
from headgate.connectors.files import file_sink
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.files.publish_log import SinkIdentity, decode_files
from headgate.errors import CorruptionError, FencedError, HeadgateError, OutputDenied, StorageError, UsageError, gone
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, LogEntry, Manifest, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitPermit, forgettable_before
from headgate.protocol.checkpoints.recovery import Damage
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.sink_registry import LostOutput
from headgate.runtime.driver import restart
from headgate.runtime.driver.connectors import SinkCommits
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage
from headgate.store.store import Store

PERMIT = CommitPermit(CheckpointId(6), Generation(1))


class RecordedSink(hg.Discard, Committer):
    """Tells what its committer is asked for."""

    def __init__(self, error: HeadgateError | None = None) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.error = error

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
        return self

    def recover(self, keep: Any) -> None:
        if self.error is not None:
            raise self.error

    def commit(self, permit: Any, committables: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(tuple(c.checkpoint for c in committables))

    def close(self) -> None:
        pass


def commits_to(root: Path, *sinks: Any) -> SinkCommits:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    stream = pipeline.source(hg.FromRows([{"id": 1}]))
    for index, sink in enumerate(sinks):
        stream.sink(sink, name=f"out{index}")
    return SinkCommits(pipeline.definition(), Generation(1), lambda part: memoryview(part.inline))


class ListeningCommits(RecordedSink, hg.CheckpointListener):
    """Its own committer."""


class Closing(RecordedSink):
    """Notes that it was closed, or cannot be."""

    def __init__(self, name: str, closed: list[str], error: BaseException | None = None) -> None:
        super().__init__()
        self.name, self.closed, self.closing = name, closed, error

    def close(self) -> None:
        self.closed.append(self.name)
        if self.closing is not None:
            raise self.closing


def test_every_target_is_closed_although_one_cannot_be(tmp_path: Path) -> None:
    closed: list[str] = []
    commits = commits_to(tmp_path, Closing("first", closed, SystemExit(2)), Closing("second", closed))
    with pytest.raises(SystemExit):
        commits.close()
    assert closed == ["first", "second"]


def test_targets_are_closed_when_a_later_one_cannot_be_opened(tmp_path: Path) -> None:
    class Away(RecordedSink):
        def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
            raise StorageError("open", "out", "the server is away")

    closed: list[str] = []
    with pytest.raises(StorageError, match="the server is away"):
        commits_to(tmp_path, Closing("first", closed), Closing("second", closed, OSError("gone")), Away())
    assert closed == ["first", "second"]


def test_a_committer_that_listens_is_refused_unless_it_is_the_sink(tmp_path: Path) -> None:
    class Deaf(RecordedSink):
        def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
            return ListeningCommits()

    with pytest.raises(HeadgateError, match=r"the committer of sink 'out0' is a .*, and would never"):
        commits_to(tmp_path / "deaf", Deaf())
    commits_to(tmp_path / "own", ListeningCommits())


def output(checkpoint: int, sink: int = 0, subtask: int = 0) -> Committable:
    return Committable(f"out{sink}", CheckpointId(checkpoint), subtask, Generation(1), b"x")


def prepared(sink: Any, number: int) -> Committable:
    schema = pa.schema([("id", pa.int64())])
    writer = sink.open(SinkContext("p", "out0", 0, 1, Generation(1), schema))
    writer.write(pa.record_batch([[number]], schema=schema))
    payload = writer.seal(CheckpointId(number)).prepare()
    assert payload is not None
    return Committable("out0", CheckpointId(number), 0, Generation(1), payload)


def test_a_sink_is_given_what_a_permit_covers_at_once_and_oldest_first(tmp_path: Path) -> None:
    # K2
    first, second = RecordedSink(), RecordedSink()
    commits = commits_to(tmp_path, first, second)
    commits.commit(PERMIT, [output(6), output(5, 1), output(5), output(4, 1), output(6, 1)])
    assert (first.calls, second.calls) == ([(5, 6)], [(4, 5, 6)])
    commits.recover(PERMIT, [output(6), output(5)])
    assert first.calls[1:] == [(5, 6)]


def test_output_of_an_aborted_checkpoint_is_shown_together_with_its_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = hg.FileSink(tmp_path / "out", roll_interval=0)
    commits = commits_to(tmp_path, sink)
    seen: list[list[int]] = []
    files = [prepared(sink, 5), prepared(sink, 6)]  # 5 was aborted, so 6 carries its output
    storage = type(sink.open_committer("p", "out0", Generation(1))._storage)  # type: ignore[attr-defined]
    put = storage.put_if_absent

    def watched(self: Any, *args: Any) -> None:
        put(self, *args)
        frame = read_committed(sink.url)
        seen.append(sorted(frame["id"].to_list()) if frame.width else [])

    monkeypatch.setattr(storage, "put_if_absent", watched)
    commits.commit(PERMIT, files)
    assert [numbers for numbers in seen if numbers] == [[5, 6]]


@pytest.mark.parametrize(
    "error", [CorruptionError("f", 0, "a", "b"), UsageError("no"), StorageError("put", "f", "no", is_transient=False)]
)
def test_what_a_repetition_cannot_cure_is_a_denial_that_names_the_sink(tmp_path: Path, error: HeadgateError) -> None:
    # K5
    commits = commits_to(tmp_path, RecordedSink(error))
    with pytest.raises(OutputDenied, match=r"sink 'out0' cannot commit the output of checkpoint 6: .*cannot help"):
        commits.commit(PERMIT, [output(6)])
    with pytest.raises(OutputDenied, match="sink 'out0' cannot be recovered"):
        commits.recover(None, [])


@pytest.mark.parametrize("error", [FencedError("p", 1, 2), StorageError("put", "f", "busy")])
def test_what_may_be_cured_and_what_was_replaced_is_told_as_it_is(tmp_path: Path, error: HeadgateError) -> None:
    commits = commits_to(tmp_path, RecordedSink(error))
    with pytest.raises(type(error)):
        commits.commit(PERMIT, [output(6)])
    with pytest.raises(type(error)):
        commits.recover(None, [])


class DenyingSink(RecordedSink):
    """Has lost the output of some checkpoints; as a target with transactions it commits all or nothing."""

    def __init__(self, gone: set[int], error: HeadgateError) -> None:
        super().__init__(None)
        self.gone, self.denial = gone, error

    def commit(self, permit: Any, committables: Any) -> None:
        if any(c.checkpoint in self.gone for c in committables):
            raise self.denial
        super().commit(permit, committables)


def losing(root: Path, sink: Any, lose: Any) -> SinkCommits:
    found = commits_to(root, sink)
    found._lose = lose
    return found


@pytest.mark.parametrize(
    "error", [gone(CorruptionError("f", 0, "a", "b")), gone(UsageError("neither prepared nor committed"))]
)
def test_what_a_target_denies_is_lost_alone_if_its_user_said_so(tmp_path: Path, error: HeadgateError) -> None:
    sink, lost = DenyingSink({4, 6}, error), []
    commits = losing(tmp_path, sink, lambda committable, why: lost.append((committable.checkpoint, why)))
    commits.commit(PERMIT, [output(6), output(5), output(4), output(3)])
    assert sink.calls == [(3,), (5,)], "what is there is committed, in order"
    assert lost == [(4, str(error)), (6, str(error))]
    with pytest.raises(OutputDenied):
        losing(tmp_path, sink, None).commit(PERMIT, [output(6), output(5)])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StorageError("put", "f", "not allowed", is_transient=False), OutputDenied),
        (StorageError("put", "f", "busy"), StorageError),
        (FencedError("p", 1, 2), FencedError),
        (CorruptionError("a manifest", 0, "a", "b"), OutputDenied),
        (UsageError("a bug of the sink's own"), OutputDenied),
    ],
)
def test_what_a_target_refuses_otherwise_is_not_lost(
    tmp_path: Path, error: HeadgateError, raised: type[HeadgateError]
) -> None:
    lost: list[Any] = []
    with pytest.raises(raised):
        losing(tmp_path, DenyingSink({4}, error), lambda *said: lost.append(said)).commit(PERMIT, [output(4)])
    assert lost == []


def lost_by(root: Path, sink: Any, *promised: Committable) -> list[int]:
    lost: list[int] = []
    losing(root, sink, lambda committable, why: lost.append(committable.checkpoint)).commit(PERMIT, promised)
    return lost


def test_files_that_are_gone_are_lost_and_damage_beside_them_is_not(tmp_path: Path) -> None:
    sink = hg.FileSink(tmp_path / "out", roll_interval=0)
    first, second, third = (prepared(sink, number) for number in (4, 5, 6))
    (file,) = decode_files("second", second.payload)
    (tmp_path / "out" / SinkIdentity("p", "out0").staged(file.name)).unlink()
    assert lost_by(tmp_path, sink, first, second) == [5]
    assert read_committed(sink.url)["id"].to_list() == [4]
    (manifest, *_) = (tmp_path / "out" / "_committed").rglob("*.json")
    manifest.write_bytes(b"damage")
    with pytest.raises(OutputDenied, match="is damaged"):
        lost_by(tmp_path, sink, first, third)


class Expiring(hg.TwoPhaseSink[None]):
    """Says of everything that it is neither prepared nor committed."""

    def begin(self, name: str, schema: pa.Schema) -> None: ...
    def write(self, transaction: None, batch: pa.RecordBatch) -> None: ...
    def prepare(self, transaction: None, name: str, fence: Any) -> None: ...
    def prepared(self, owner: str) -> Any: ...
    def abort(self, name: str, fence: Any) -> None: ...
    def claim(self, fence: Any) -> None: ...

    def commit(self, names: Any, fence: Any) -> None:
        raise UsageError("neither prepared nor committed")


class Broken(hg.LedgerSink):
    """Has a bug."""

    def claim(self, fence: Any) -> None: ...

    def publish(self, outputs: Any, fence: Any) -> None:
        raise UsageError("there is no such table")


def test_what_a_usage_error_says_depends_on_the_kind_of_sink(tmp_path: Path) -> None:
    promised = Committable("out0", CheckpointId(5), 0, Generation(1), b"1\np:out0-0000000005-00000-0000000001\n")
    assert lost_by(tmp_path, Expiring(), promised) == [5]
    with pytest.raises(OutputDenied, match="no such table"):
        lost_by(tmp_path, Broken(), promised)


def test_a_stream_that_is_gone_is_lost_and_whoever_was_replaced_is_told_so(tmp_path: Path) -> None:  # S18
    store = Store.shared(str(tmp_path / "store"))
    store.create_stream("app/out", pa.schema([("id", pa.int64())]), segments=1)
    sink = hg.StreamSink("app/out", store=str(tmp_path / "store"))
    promised = prepared(sink, 5)
    store.delete("app/out", force=True)
    assert lost_by(tmp_path, sink, promised) == [5]
    store.transactions.fence("p/out0", 2)
    with pytest.raises(FencedError):
        lost_by(tmp_path, sink, promised)
    with pytest.raises(FencedError):
        sink.open_committer("p", "out0", Generation(1)).recover(())


def test_a_transaction_that_was_aborted_is_lost(tmp_path: Path) -> None:
    store = Store.shared(str(tmp_path / "store"))
    store.create_stream("app/out", pa.schema([("id", pa.int64())]), segments=1)
    sink = hg.StreamSink("app/out", store=str(tmp_path / "store"))
    promised = prepared(sink, 5)
    store.transactions.abort_all("p/out0")
    assert lost_by(tmp_path, sink, promised) == [5]


def test_a_loss_that_cannot_be_recorded_is_not_passed_over(tmp_path: Path) -> None:
    def lose(committable: Committable, why: str) -> None:
        raise StorageError("put", "lost", "disk full")

    with pytest.raises(StorageError, match="disk full"):
        losing(tmp_path, DenyingSink({4}, gone(UsageError("gone"))), lose).commit(PERMIT, [output(4)])


def test_a_loss_is_recorded_once_and_told_each_time() -> None:
    storage, notes = MemoryStorage(), []
    losses = LostOutput(storage, "p")
    for _ in range(2):
        losses.losing(lambda: 17, notes.append)(output(4), "it expired")
    losses.losing(lambda: 18, notes.append)(output(5, subtask=2), "it expired")
    assert losses.count == 2
    heir = LostOutput(storage, "p")
    heir.look()
    assert heir.count == 2
    first = storage.list("p/lost/")[0]
    assert json.loads(storage.get(first)) == {
        "sink": "out0", "checkpoint": 4, "subtask": 0, "generation": 1, "why": "it expired", "wall_ms": 17
    }  # fmt: skip
    assert len(notes) == 3
    assert notes[0].startswith(
        "LOST: output of checkpoint 4, subtask 0 of sink 'out0', which its target denies: it exp"
    )
    assert first in notes[0]


def test_only_records_of_losses_are_counted() -> None:
    storage = MemoryStorage()
    LostOutput(storage, "p").losing(lambda: 17, lambda _: None)(output(4), "it expired")
    first = storage.list("p/lost/")[0]
    for other in ("notes.txt", ".DS_Store", f"{first.rpartition('/')[2]}~", "copy/of.json"):
        storage.put(f"p/lost/{other}", [b""])
    heir = LostOutput(storage, "p")
    heir.look()
    assert heir.count == 1


def test_output_for_a_sink_that_is_gone_is_refused(tmp_path: Path) -> None:  # SV30
    commits = commits_to(tmp_path, RecordedSink())
    with pytest.raises(
        UsageError, match=r"prepared for sink 'out7' cannot be committed.*allow_unclaimed_state=\['out7'\]"
    ):
        commits.commit(PERMIT, [output(6, 7)])


# -- what only tidies up at a sink does not end a start, and says what it left; everything else still doe -----


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
def test_a_file_sink_that_cannot_tidy_up_is_recovered_and_says_so(
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
def test_a_file_sink_that_cannot_fence_or_abort_is_not_recovered(
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
def test_a_stream_sink_that_cannot_sweep_is_recovered_and_says_so(
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


# -- outcomes of transactions do not pile up at a target, however short the runs are (k25) -----


SCHEMA = pa.schema([("id", pa.int64())])
RUNS = 12


class PlaceForgetting:
    """One pipeline; ``run`` is a life of its driver that completes one checkpoint and ends."""

    def __init__(self, root: Path, sink: Any) -> None:
        pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(interval=None, dir=root))
        pipeline.source(hg.FromRows([{"id": 1}])).sink(sink, name="out")
        self.definition = pipeline.definition()
        self.sink = sink
        self.storage = MemoryStorage()
        self.notes: list[str] = []

    def begin(self) -> tuple[CheckpointLog, NewGeneration]:
        log = CheckpointLog(self.storage, "p")
        found = begin_generation(self.definition, log, "test", self.notes.append)
        assert isinstance(found, NewGeneration)
        return log, found

    def run(self, *, retained: int = 1) -> None:
        log, begun = self.begin()
        here = begun.first_checkpoint
        log.reserve(here)
        output = self.prepared(here, begun.generation)
        manifest = self.manifest(here, begun.generation, output)
        oldest = [*begun.retained, here][-retained:][0]
        log.append(manifest, oldest)
        begun.commits.commit(CommitPermit(here, begun.generation), output)
        log.drop(CheckpointId(oldest - 1), oldest)
        begun.commits.close()

    def prepared(self, checkpoint: CheckpointId, generation: Generation) -> Sequence[Committable]:
        writer = self.sink.open(SinkContext("p", "out", 0, 1, generation, SCHEMA))
        writer.write(pa.record_batch([[checkpoint]], schema=SCHEMA))
        payload = writer.seal(checkpoint).prepare()
        return [Committable("out", checkpoint, 0, generation, payload)] if payload else []

    def manifest(self, checkpoint: CheckpointId, generation: Generation, output: Sequence[Committable]) -> Manifest:
        subtasks, plan = self.definition.plan.subtasks(), self.definition.plan
        parts = [write_snapshot(self.storage, "p", s, checkpoint, generation, [b"state"], 0) for s in subtasks]
        entries = tuple(SubtaskEntry(s, (part,), tuple(output)) for s, part in zip(subtasks, parts, strict=True))
        return Manifest(checkpoint, generation, 1, plan.max_parallelism, entries, state_texts=plan.state_texts())


@pytest.mark.parametrize("retained", [1, 3])
def test_runs_of_one_checkpoint_each_leave_few_outcomes(tmp_path: Path, retained: int) -> None:
    place = PlaceForgetting(tmp_path / "checkpoints", hg.StreamSink("s", store=tmp_path / "store"))
    for _ in range(RUNS):
        place.run(retained=retained)
    with Store.open(tmp_path / "store") as store:
        assert store.describe("s").events_count == RUNS
        assert len(store.list_transactions(owner="p/out")) <= retained + 1
    place.begin()  # and what the retained checkpoints promise is known: nothing is denied
    assert place.notes == []


def test_nothing_is_forgotten_that_a_damaged_checkpoint_may_ask_for(tmp_path: Path) -> None:  # K20
    """Somebody may restore it from a copy."""
    place = PlaceForgetting(tmp_path / "checkpoints", hg.StreamSink("s", store=tmp_path / "store"))
    for _ in range(3):
        place.run(retained=3)
    oldest = next(path for path in place.storage.list("p/log") if b"checkpoint" in place.storage.get(path))
    place.storage.put(oldest, [b"torn"])
    place.begin()
    with Store.open(tmp_path / "store") as store:
        assert len(store.list_transactions(owner="p/out")) == 3


@pytest.mark.parametrize(
    ("entries", "hint", "expected"),
    [
        ({}, 0, None),
        ({1: claim(1)}, 0, None),
        ({1: claim(1), 2: "manifest"}, 0, 7),
        ({1: claim(1), 2: "manifest", 3: TORN}, 0, None),
        ({1: claim(1), 2: "manifest"}, 3, None),
        ({1: claim(1), 3: "manifest"}, 0, None),
    ],
)
def test_what_cannot_be_read_or_is_lost_may_ask_for_anything(  # K20
    entries: dict[int, LogEntry | Damage | str], hint: int, expected: int | None
) -> None:
    manifest = Manifest(CheckpointId(7), Generation(1), 1, 128, ())
    found = {at: manifest if isinstance(entry, str) else entry for at, entry in entries.items()}
    assert forgettable_before(log(found, hint=hint)) == expected


class Outcomes(ForgettingSink):
    """A sink with two phases, which a user wrote."""

    transaction_timeout = None
    error: Exception | None = None

    def forget(self, names: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        super().forget(names)


@pytest.mark.parametrize("retained", [1, 3])
def test_runs_of_one_checkpoint_each_leave_few_outcomes_of_a_users_sink(tmp_path: Path, retained: int) -> None:
    target = Target(limit_ms=None)
    place = PlaceForgetting(tmp_path / "checkpoints", Outcomes(target))
    for _ in range(RUNS):
        place.run(retained=retained)
    assert len(target.shown) == RUNS
    assert len(target.ledger) <= retained + 1
    place.begin()
    assert place.notes == []


def test_a_users_sink_that_cannot_forget_is_told_again_and_fails_nothing(tmp_path: Path) -> None:
    target = Target(limit_ms=None)
    sink = Outcomes(target)
    place = PlaceForgetting(tmp_path / "checkpoints", sink)
    sink.error = TypeError("what is that?")
    for _ in range(3):
        place.run()
    assert [note.partition(":")[0] for note in place.notes] == [
        f"could not let the sinks forget what was decided before checkpoint {n}" for n in (2,)
    ]
    assert len(target.ledger) == 3
    sink.error = None
    place.run()
    assert len(target.ledger) == 2, "that of the retained checkpoint, and what it was run for"


def test_nothing_of_a_users_sink_is_forgotten_while_a_checkpoint_is_damaged(tmp_path: Path) -> None:  # K20
    target = Target(limit_ms=None)
    place = PlaceForgetting(tmp_path / "checkpoints", Outcomes(target))
    for _ in range(3):
        place.run(retained=3)
    oldest = next(path for path in place.storage.list("p/log") if b"checkpoint" in place.storage.get(path))
    place.storage.put(oldest, [b"torn"])
    place.begin()
    assert len(target.ledger) == 3


class Forgetful(hg.Discard, Committer):
    """A sink of a user, whose target fails to forget."""

    can_forget = True

    def __init__(self, error: Exception) -> None:
        self.error = error

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
        return self

    def recover(self, keep: Any) -> None:
        pass

    def commit(self, permit: Any, committables: Any) -> None:
        pass

    def forget(self, before: CheckpointId, promised: Any) -> None:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [StorageError("forget", "db", "busy"), TypeError("what is that?")])
def test_a_target_that_cannot_forget_does_not_end_a_start(tmp_path: Path, error: Exception) -> None:
    place = PlaceForgetting(tmp_path, Forgetful(error))
    for _ in range(2):
        place.run()
    (note,) = place.notes
    assert note == f"could not let the sinks forget what was decided before checkpoint 1: {error}"


def test_a_target_that_knows_a_newer_generation_ends_it(tmp_path: Path) -> None:
    place = PlaceForgetting(tmp_path, Forgetful(FencedError("sink", 2, 3)))
    place.run()
    with pytest.raises(FencedError):
        place.run()
