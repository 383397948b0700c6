"""The committers of all sinks: order, one step for each permit, and what cannot be cured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors.base import Committer, SinkContext
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.files.publish_log import SinkIdentity, decode_files
from headgate.errors import CorruptionError, FencedError, HeadgateError, OutputDenied, StorageError, UsageError, gone
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.runtime.checkpoints.sink_registry import LostOutput
from headgate.runtime.driver.sink_commits import SinkCommits
from headgate.storage.memory import MemoryStorage
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


def test_every_target_is_closed_although_one_cannot_be(tmp_path: Path) -> None:  # N73
    closed: list[str] = []

    class Closing(RecordedSink):
        def __init__(self, name: str, error: BaseException | None) -> None:
            super().__init__()
            self.name, self.closing = name, error

        def close(self) -> None:
            closed.append(self.name)
            if self.closing is not None:
                raise self.closing

    commits = commits_to(tmp_path, Closing("first", SystemExit(2)), Closing("second", None))
    with pytest.raises(SystemExit):
        commits.close()
    assert closed == ["first", "second"]


def test_a_committer_that_listens_is_refused_unless_it_is_the_sink(tmp_path: Path) -> None:  # HL20
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
    # K2, K19
    first, second = RecordedSink(), RecordedSink()
    commits = commits_to(tmp_path, first, second)
    commits.commit(PERMIT, [output(6), output(5, 1), output(5), output(4, 1), output(6, 1)])
    assert (first.calls, second.calls) == ([(5, 6)], [(4, 5, 6)])
    commits.recover(PERMIT, [output(6), output(5)])
    assert first.calls[1:] == [(5, 6)]


def test_output_of_an_aborted_checkpoint_is_shown_together_with_its_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # K19, D4
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
def test_what_a_target_denies_is_lost_alone_if_its_user_said_so(tmp_path: Path, error: HeadgateError) -> None:  # K26
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
) -> None:  # K26
    lost: list[Any] = []
    with pytest.raises(raised):
        losing(tmp_path, DenyingSink({4}, error), lambda *said: lost.append(said)).commit(PERMIT, [output(4)])
    assert lost == []


def lost_by(root: Path, sink: Any, *promised: Committable) -> list[int]:
    lost: list[int] = []
    losing(root, sink, lambda committable, why: lost.append(committable.checkpoint)).commit(PERMIT, promised)
    return lost


def test_files_that_are_gone_are_lost_and_damage_beside_them_is_not(tmp_path: Path) -> None:  # K26
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


def test_what_a_usage_error_says_depends_on_the_kind_of_sink(tmp_path: Path) -> None:  # K26
    promised = Committable("out0", CheckpointId(5), 0, Generation(1), b"1\np:out0-0000000005-00000-0000000001\n")
    assert lost_by(tmp_path, Expiring(), promised) == [5]
    with pytest.raises(OutputDenied, match="no such table"):
        lost_by(tmp_path, Broken(), promised)


def test_a_stream_that_is_gone_is_lost_and_whoever_was_replaced_is_told_so(tmp_path: Path) -> None:  # K26, S18
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


def test_a_transaction_that_was_aborted_is_lost(tmp_path: Path) -> None:  # K26
    store = Store.shared(str(tmp_path / "store"))
    store.create_stream("app/out", pa.schema([("id", pa.int64())]), segments=1)
    sink = hg.StreamSink("app/out", store=str(tmp_path / "store"))
    promised = prepared(sink, 5)
    store.transactions.abort_all("p/out0")
    assert lost_by(tmp_path, sink, promised) == [5]


def test_a_loss_that_cannot_be_recorded_is_not_passed_over(tmp_path: Path) -> None:  # K26
    def lose(committable: Committable, why: str) -> None:
        raise StorageError("put", "lost", "disk full")

    with pytest.raises(StorageError, match="disk full"):
        losing(tmp_path, DenyingSink({4}, gone(UsageError("gone"))), lose).commit(PERMIT, [output(4)])


def test_a_loss_is_recorded_once_and_told_each_time() -> None:  # K26
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


def test_only_records_of_losses_are_counted() -> None:  # K26
    storage = MemoryStorage()
    LostOutput(storage, "p").losing(lambda: 17, lambda _: None)(output(4), "it expired")
    first = storage.list("p/lost/")[0]
    for other in ("notes.txt", ".DS_Store", f"{first.rpartition('/')[2]}~", "copy/of.json"):
        storage.put(f"p/lost/{other}", [b""])
    heir = LostOutput(storage, "p")
    heir.look()
    assert heir.count == 1


def test_output_for_a_sink_that_is_gone_is_refused(tmp_path: Path) -> None:
    commits = commits_to(tmp_path, RecordedSink())
    with pytest.raises(
        UsageError, match=r"prepared for sink 'out7' cannot be committed.*allow_unclaimed_state=\['out7'\]"
    ):
        commits.commit(PERMIT, [output(6, 7)])
