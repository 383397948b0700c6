"""Commits of the file sink that are repeated, cut short, or met by somebody who takes files away."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.files.test_file_sink import context, faulty_committer, numbers_in, permit, prepared
from tests.mutants.harness import around
from tests.storage.faulty import Fault, FaultKind

from headgate.connectors.files import file_committer as file_commit
from headgate.connectors.files import publish_log as file_ledger
from headgate.connectors.files.file_committer import FileCommitter, committed_files
from headgate.connectors.files.file_sink import FileSink, PublishedFiles
from headgate.connectors.files.publish_log import Ledger, SinkIdentity
from headgate.errors import CorruptionError, FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.storage.urls import open_storage

GOLDEN = Path(__file__).parents[2] / "golden" / "filesink_1"


def begun(sink: FileSink, generation: int, keep: list[Committable]) -> FileCommitter:
    committer = sink.open_committer("p", "out", Generation(generation))
    assert isinstance(committer, FileCommitter)
    committer.recover(keep)
    return committer


def the_file(sink: FileSink) -> Path:
    (path,) = Path(sink.url).glob("*.jsonl")
    return path


def move(path: Path) -> None:
    path.rename(path.parent.parent / "taken.jsonl")


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"n":9,"s":""}\n')


@pytest.mark.parametrize("consume", [move, Path.unlink, append], ids=["moved", "deleted", "appended to"])
def test_what_the_manifest_lists_is_committed_whatever_a_consumer_did_to_the_file(
    tmp_path: Path, consume: Callable[[Path], object]
) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 1)
    begun(sink, 1, one).commit(permit(1), one)
    consume(the_file(sink))
    found = sorted(Path(sink.url).glob("*.jsonl")), [p.read_bytes() for p in Path(sink.url).glob("*.jsonl")]
    for generation in (2, 3):
        begun(sink, generation, one).commit(permit(1, generation), one)
    assert (sorted(Path(sink.url).glob("*.jsonl")), [p.read_bytes() for p in Path(sink.url).glob("*.jsonl")]) == found


def test_a_check_of_the_storage_that_was_cut_short_is_done_again_and_swept(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    storage = open_storage(sink.url)
    storage.put("_claims/p.out/probe-0011223344556677", [b"first"])  # a driver died in it
    with pytest.MonkeyPatch.context() as patch:
        asked: list[str] = []
        patch.setattr(file_commit, "refuse_unless_exclusive", lambda storage, directory: asked.append(directory))
        begun(sink, 1, [])
    assert asked == ["_claims/p.out"]
    assert storage.list("_claims") == ["_claims/p.out/0000000001"]


@pytest.mark.parametrize("merge_after", [1, 256])
def test_a_committed_file_that_is_prepared_again_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_after: int
) -> None:
    # a put whose answer was lost takes effect late, when a consumer has the file already
    monkeypatch.setattr(file_ledger, "MERGE_AFTER", merge_after)
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 1)
    committer = begun(sink, 1, one)
    committer.commit(permit(1), one)
    move(the_file(sink))
    assert prepared(sink, 1, 1) == one
    committer.commit(permit(1), one)
    assert list(Path(sink.url).glob("*.jsonl")) == []
    assert open_storage(sink.url).list("_staging") == []


@pytest.mark.parametrize("merge_after", [1, 256])
def test_a_commit_that_carries_files_of_an_older_checkpoint_does_not_miss_those_a_consumer_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_after: int
) -> None:
    # K2: checkpoint 1 was committed, its confirmation was lost, so checkpoint 2 commits its output once more
    monkeypatch.setattr(file_ledger, "MERGE_AFTER", merge_after)
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 1)
    begun(sink, 1, one).commit(permit(1), one)
    the_file(sink).unlink()
    both = one + prepared(sink, 2, 2)
    committer = begun(sink, 1, both)
    assert [committer.denial(committable) for committable in both] == ["", ""]
    committer.commit(permit(2), both)
    assert numbers_in(sink.url) == [2]


def test_a_file_taken_before_its_commit_is_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # published, killed before the manifest, taken away, and the commit repeated
    sink = FileSink(tmp_path / "out", roll_interval=0)
    both = prepared(sink, 1, 1) + prepared(sink, 1, 2, where=context(1))
    for first in (1, 2):
        fault = Fault(FaultKind.IO_ERROR, "rename_if_absent" if first == 2 else "put_if_absent", "out", first=2)
        committer, _ = faulty_committer(monkeypatch, sink, fault)
        with pytest.raises(StorageError):
            committer.commit(permit(1), both)
        for path in Path(sink.url).glob("*.jsonl"):
            path.unlink()
        assert committed_files(sink.url) == []
    monkeypatch.undo()
    begun(sink, 2, both).commit(permit(1, 2), both)
    assert open_storage(sink.url).list("_publishing") == []
    begun(sink, 3, both).commit(permit(1, 3), both)


def test_what_was_never_published_is_denied_even_after_other_files_of_its_commit_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an intent that recovery does not keep counts for nothing
    sink = FileSink(tmp_path / "out", roll_interval=0)
    both = prepared(sink, 2, 1) + prepared(sink, 2, 2, where=context(1))
    fault = Fault(FaultKind.IO_ERROR, "rename_if_absent", first=2)
    committer, _ = faulty_committer(monkeypatch, sink, fault)
    with pytest.raises(StorageError):
        committer.commit(permit(2), both)
    monkeypatch.undo()
    begun(sink, 2, [])  # goes back past checkpoint 2, whose output is aborted
    with pytest.raises(CorruptionError, match="neither it nor its staged form"):
        begun(sink, 3, both).commit(permit(2, 3), both)


def half_published(monkeypatch: pytest.MonkeyPatch, sink: FileSink) -> list[Committable]:
    """Return the output of checkpoint 2, of which one file is published and none is listed."""
    both = prepared(sink, 2, 1) + prepared(sink, 2, 2, where=context(1))
    committer, _ = faulty_committer(monkeypatch, sink, Fault(FaultKind.IO_ERROR, "rename_if_absent", first=2))
    with pytest.raises(StorageError):
        committer.commit(permit(2), both)
    monkeypatch.undo()
    assert len({path.name for path in Path(sink.url).glob("*.jsonl")} - set(committed_files(sink.url))) == 1
    return both


def test_what_a_given_up_commit_had_published_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the pipeline goes back past checkpoint 2, whose output comes again
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 7)
    begun(sink, 1, one).commit(permit(1), one)
    half_published(monkeypatch, sink)
    begun(sink, 2, one)
    assert numbers_in(sink.url) == [7]
    assert [path.name for path in Path(sink.url).glob("*.jsonl")] == committed_files(sink.url)
    assert open_storage(sink.url).list("_staging") == open_storage(sink.url).list("_publishing") == []


def test_what_somebody_else_put_under_a_published_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    half_published(monkeypatch, sink)
    the_file(sink).write_bytes(b"somebody else's\n")
    begun(sink, 2, [])
    assert the_file(sink).read_bytes() == b"somebody else's\n"


@pytest.mark.parametrize("operation", ["rename_if_absent", "delete", "list", "get"])
@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.TIMEOUT_AFTER_EFFECT])
@pytest.mark.parametrize("number", range(1, 5))
def test_taking_back_may_be_cut_short_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, kind: FaultKind, number: int
) -> None:
    # whoever keeps the output after all has all of it, or hears that it is gone
    sink = FileSink(tmp_path / "out", roll_interval=0)
    both = half_published(monkeypatch, sink)
    committer, _ = faulty_committer(monkeypatch, sink, Fault(kind, operation, first=number))
    with contextlib.suppress(StorageError):
        committer.recover([])
    monkeypatch.undo()
    try:
        begun(sink, 2, both).commit(permit(2, 2), both)
    except CorruptionError:
        begun(sink, 3, [])
    found = [path.name for path in Path(sink.url).glob("*.jsonl")]
    assert sorted(found) == committed_files(sink.url)
    assert len(found) in (0, 2)


def test_a_lost_file_is_denied_before_anything_of_its_commit_is_published(tmp_path: Path) -> None:
    # K5
    sink = FileSink(tmp_path / "out", roll_interval=0)
    both = prepared(sink, 1, 1) + prepared(sink, 1, 2, where=context(1))
    (first, second) = sorted(Path(sink.url).glob("_staging/*/*"))
    second.unlink()
    with pytest.raises(CorruptionError, match="neither it nor its staged form"):
        begun(sink, 1, both).commit(permit(1), both)
    assert first.exists()
    assert numbers_in(sink.url) == []
    assert list(Path(sink.url).glob("*.jsonl")) == []


def test_another_file_under_the_final_name_stops_the_commit_and_ours_stays(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 1)
    (staged,) = Path(sink.url).glob("_staging/*/*")
    other = Path(sink.url) / staged.name.removesuffix(".tmp")
    other.write_bytes(b"somebody else's\n")
    for generation in (1, 2):
        with pytest.raises(CorruptionError, match="expected checksum"):
            begun(sink, generation, one).commit(permit(1, generation), one)
    assert other.read_bytes() == b"somebody else's\n"
    assert staged.exists()
    assert committed_files(sink.url) == []


def test_a_generation_that_is_replaced_while_it_claims_aborts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the second look, after the claim
    sink = FileSink(tmp_path / "out", roll_interval=0)
    storage = open_storage(sink.url)
    put = type(storage).put_if_absent

    def overtaken(self: object, path: str, parts: object) -> None:
        monkeypatch.setattr(type(storage), "put_if_absent", put)
        begun(sink, 2, [])
        prepared(sink, 7, 1, where=context(generation=2))
        put(self, path, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(type(storage), "put_if_absent", overtaken)
    with pytest.raises(FencedError):
        begun(sink, 1, [])
    assert len(storage.list("_staging")) == 1


def test_a_driver_stopped_in_its_recovery_sweeps_nothing_that_its_heir_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # behind the second look, in front of the sweep
    sink = FileSink(tmp_path / "out", roll_interval=0)
    storage = open_storage(sink.url)
    prepared(sink, 6, 2, where=context(generation=1))
    looks = [FileCommitter._refuse_if_fenced]

    def stopped_behind_it(self: FileCommitter) -> None:
        looks[0](self)
        if storage.list("_claims"):
            monkeypatch.setattr(FileCommitter, "_refuse_if_fenced", looks[0])
            begun(sink, 2, [])
            prepared(sink, 7, 1, where=context(generation=2))

    monkeypatch.setattr(FileCommitter, "_refuse_if_fenced", stopped_behind_it)
    begun(sink, 1, [])
    assert [path for path in storage.list("_staging") if "-0000000007-" in path] == storage.list("_staging")
    assert len(storage.list("_staging")) == 1


def test_a_generation_that_is_replaced_before_it_publishes_leaves_no_intent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the look after the intent
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 1)
    old = begun(sink, 1, [*one])
    intend = file_ledger.Ledger.intend

    def overtaken(self: file_ledger.Ledger, *args: object) -> str:
        begun(sink, 2, [])
        return intend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(file_ledger.Ledger, "intend", overtaken)
    with pytest.raises(FencedError):
        old.commit(permit(1), one)
    assert open_storage(sink.url).list("") == ["_claims/p.out/0000000002"]


def test_stray_files_among_the_sinks_own_are_left_alone(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    for directory in ("_claims", "_committed", "_publishing"):
        stray = Path(sink.url) / directory / "p.out" / ".DS_Store"
        stray.parent.mkdir(parents=True)
        stray.write_bytes(b"?")
    one = prepared(sink, 1, 1)
    begun(sink, 1, one).commit(permit(1), one)
    assert numbers_in(sink.url) == [1]


def test_readers_of_manifests_leave_out_what_was_taken_away(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    committer = begun(sink, 1, [])
    for number in (1, 2):
        committer.commit(permit(number), prepared(sink, number, number))
    sorted(Path(sink.url).glob("*.jsonl"))[0].unlink()
    assert numbers_in(sink.url) == [2]
    assert len(committed_files(sink.url)) == 1


def test_output_of_version_0_1_is_read_and_its_commits_are_continued(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "out", tmp_path / "out")
    sink = FileSink(tmp_path / "out", roll_interval=0)
    assert numbers_in(sink.url) == [1, 2, 3]
    saved = [
        Committable("out", CheckpointId(one["checkpoint"]), 0, Generation(1), base64.b64decode(one["payload"]))
        for one in json.loads((GOLDEN / "committables.json").read_text())
    ]
    begun(sink, 2, saved).commit(permit(5, 2), saved)  # 4 was published and not listed, 5 prepared, 6 not promised
    assert numbers_in(sink.url) == [1, 2, 3, 4, 5]
    assert open_storage(sink.url).list("_staging") == []


def test_manifests_are_merged_in_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ledger, "MERGE_AFTER", 4)
    monkeypatch.setattr(file_ledger, "MANIFEST_FILES_MAX", 10)
    sink = FileSink(tmp_path / "out", roll_interval=0)
    committer = begun(sink, 1, [])
    for checkpoint in range(1, 61):
        committer.commit(permit(checkpoint), prepared(sink, checkpoint, checkpoint))
    storage = open_storage(sink.url)
    sizes = [len(file_ledger.read_manifest(storage, path)) for path in storage.list("_committed")]
    assert sum(sizes) == 60
    assert max(sizes) <= 10
    assert len(sizes) <= 60 // 10 * 2 + 4
    assert numbers_in(sink.url) == list(range(1, 61))


@pytest.mark.parametrize("operation", ["put_if_absent", "delete", "get", "list"])
@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.TIMEOUT_AFTER_EFFECT])
def test_a_merge_that_is_cut_short_anywhere_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, kind: FaultKind
) -> None:
    monkeypatch.setattr(file_ledger, "MERGE_AFTER", 3)
    monkeypatch.setattr(file_ledger, "MANIFEST_FILES_MAX", 5)
    sink = FileSink(tmp_path / "out", roll_interval=0)
    outputs = {checkpoint: prepared(sink, checkpoint, checkpoint) for checkpoint in range(1, 25)}
    faults = [
        Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation, first=n)
        for n in range(2, 200, 17 if operation == "list" else 5)
    ]
    faults += [Fault(kind, operation, "merged-", first=n) for n in (2, 5)]
    committer, faulty = faulty_committer(monkeypatch, sink, *faults)
    failures = 0
    for checkpoint, output in outputs.items():
        for _ in range(20):
            try:
                committer.commit(permit(checkpoint), output)
                break
            except StorageError:
                failures += 1
        else:
            raise AssertionError("the commit never succeeds")
    assert failures > 5
    assert numbers_in(sink.url) == list(range(1, 25))
    assert faulty.list("_publishing") == []


def test_what_a_slow_commit_publishes_while_its_heir_recovers_is_not_left_there(tmp_path: Path) -> None:
    # the heir restored something older, so nobody would ever list the file
    sink = FileSink(tmp_path / "out", roll_interval=0)
    one = prepared(sink, 1, 1)
    zombie = begun(sink, 1, one)

    def publish(publish: Any, zombie: FileCommitter, *file: Any) -> None:
        def take_back(take_back: Any, heir: FileCommitter, files: Any) -> None:
            take_back(heir, files)
            publish(zombie, *file)

        with around(FileCommitter, "_take_back", take_back):
            begun(sink, 2, [])

    with around(FileCommitter, "_publish", publish), pytest.raises(FencedError):
        zombie.commit(permit(1), one)
    assert [path for path in Path(sink.url).rglob("*") if path.suffix == ".jsonl" or path.suffix == ".tmp"] == []


def test_two_that_empty_a_directory_at_once_do_not_stumble(tmp_path: Path) -> None:
    # the next start and the command that is repeated finish the same reset
    sink = FileSink(tmp_path / "out", roll_interval=0)
    for checkpoint in (1, 2):
        output = prepared(sink, checkpoint, checkpoint)
        begun(sink, 1, output).commit(permit(checkpoint), output)
    life = PipelineIdentity("next", "home", "here", 0)
    both = [PublishedFiles(open_storage(sink.url), SinkIdentity("p", "out")) for _ in range(2)]

    def read(read: Any, storage: Any, path: str) -> Any:
        if len(both) > 1:
            both.pop().start_over(Generation(2), life)
        return read(storage, path)

    with around(file_ledger, "read_manifest", read):
        both[0].start_over(Generation(2), life)
    assert committed_files(sink.url) == []
    assert list(Path(sink.url).glob("*.jsonl")) == []


def test_what_a_slow_commit_merges_while_a_directory_is_emptied_goes_too(tmp_path: Path) -> None:
    # the manifests that were listed are gone, and what they listed is in another one
    sink = FileSink(tmp_path / "out", roll_interval=0)
    for checkpoint in (1, 2):
        output = prepared(sink, checkpoint, checkpoint)
        begun(sink, 1, output).commit(permit(checkpoint), output)
    storage, identity = open_storage(sink.url), SinkIdentity("p", "out")
    slow = [Ledger(storage, identity)]

    def read(read: Any, storage: Any, path: str) -> Any:
        if slow:
            slow.pop()._merge()
        return read(storage, path)

    with around(file_ledger, "read_manifest", read):
        PublishedFiles(storage, identity).start_over(Generation(2), PipelineIdentity("next", "home", "here", 0))
    assert committed_files(sink.url) == []
    assert list(Path(sink.url).glob("*.jsonl")) == []
