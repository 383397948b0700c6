"""Savepoint directories: taken places, failed attempts, copies in other storages, unknown formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.runtime.checkpoints.writing import write_snapshot
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.codec.json_files import decode_savepoint, encode_savepoint
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.config import Guarantee
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, Place, Savepoint, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog
from headgate.runtime.checkpoints import savepoints
from headgate.runtime.checkpoints.savepoints import (
    NamedLog,
    SavepointDirectory,
    named_log,
    refuse_unless_newest_is_known,
    savepoint_at,
    savepoints_below,
)
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.storage.base import NotFound, Storage
from headgate.storage.memory import MemoryStorage, forget_memory_storage
from headgate.storage.urls import open_storage

A, B = "00112233aabbccdd", "ddccbbaa33221100"


@pytest.fixture(params=["directory", "memory", "object store"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place in each kind of storage."""
    yield {
        "directory": str(tmp_path / "there"),
        "memory": "memory://savepoints/there",
        "object store": f"obstore+file://{tmp_path}/there",
    }[request.param]
    forget_memory_storage("savepoints/there")


def written(url: str, token: str = A, drawn: str = "drawn", data: bytes = b"state") -> Savepoint:
    """Write the parts of a savepoint, and return what makes it one."""
    place = SavepointDirectory(url).place(token)
    subtask = SubtaskId(VertexId("sums"), 0)
    part = write_snapshot(open_storage(url), place.prefix, subtask, CheckpointId(7), Generation(3), [data], 0)
    manifest = Manifest(
        CheckpointId(7), Generation(3), 1, 128, (SubtaskEntry(subtask, (part,)),), mode=Guarantee.AT_LEAST_ONCE
    )
    return Savepoint(drawn, "p", 1_000, place.prefix, manifest)


def parts_of(storage: Storage, savepoint: Savepoint) -> list[bytes]:
    files = SnapshotFiles(storage, savepoint.files)
    return [bytes(files.read(part)) for part in savepoint.manifest.parts]


def test_a_place_that_is_taken_is_refused(url: str) -> None:  # SV4
    directory = SavepointDirectory(url)
    directory.write(written(url))
    with pytest.raises(UsageError, match="there is a savepoint at"):
        directory.place(B)
    open_storage(url).delete("savepoint")
    assert directory.place(B) == Place(url, f"files-{B}"), "what a try has left does not matter"
    open_storage(url).put("data/orders", [b"precious"])
    with pytest.raises(UsageError, match="is not empty"):
        directory.place(B)


def test_of_two_tries_at_one_place_one_gets_it(url: str) -> None:  # SV4
    first, second = written(url, A, "one"), written(url, B, "two")
    directory = SavepointDirectory(url)
    directory.write(first)
    directory.write(first)
    with pytest.raises(UsageError, match="another savepoint was written"):
        directory.write(second)
    directory.give_up(Place(url, second.files))
    directory.give_up(Place(url, first.files))
    assert directory.read() == first
    assert parts_of(open_storage(url), first) == [b"state"]
    assert open_storage(url).list(second.files) == []


def test_a_savepoint_that_was_copied_is_the_same(url: str, tmp_path: Path) -> None:  # SV3
    SavepointDirectory(url).write(written(url))
    source, copy = open_storage(url), open_storage(str(tmp_path / "copy"))
    for path in source.list(""):
        copy.put(path, [source.get(path)])
        source.delete(path)
    found = SavepointDirectory(str(tmp_path / "copy")).read()
    assert parts_of(copy, found) == [b"state"]
    assert found.manifest.mode is Guarantee.AT_LEAST_ONCE
    with pytest.raises(NotFound):
        SavepointDirectory(url).read()


def test_what_a_try_left_at_its_own_place_goes_with_the_savepoint(url: str) -> None:  # SV4, SV10: a stop tries again
    savepoint = written(url)
    stale = f"{savepoint.files}/chk-0000000006/sums-0.g3"
    open_storage(url).put(stale, [b"of a checkpoint that was given up"])
    SavepointDirectory(url).write(savepoint)
    assert stale not in open_storage(url).list("")
    assert parts_of(open_storage(url), savepoint) == [b"state"]


def test_a_put_that_failed_and_took_effect_is_found(monkeypatch: pytest.MonkeyPatch) -> None:  # SV2
    storage = FaultyStorage(MemoryStorage())
    monkeypatch.setattr(savepoints, "open_storage", lambda url: storage)
    savepoint = Savepoint("drawn", "p", 0, f"files-{A}", Manifest(CheckpointId(1), Generation(1), 1, 128, ()))
    directory = SavepointDirectory("memory://x")
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent"))
    directory.write(savepoint)
    assert directory.read() == savepoint
    storage.delete("savepoint")
    for times, tries in ((2, 3), (9, 3)):
        storage.calls.clear()
        storage.inject(Fault(FaultKind.TIMEOUT, "put_if_absent", times=times))
        with nullcontext() if times < tries else pytest.raises(StorageError):
            directory.write(savepoint)
        assert [operation for operation, _ in storage.calls].count("put_if_absent") == tries
        storage.heal()
        storage.delete("savepoint")

    def denied(path: str, parts: object) -> None:
        tried.append(path)
        raise StorageError("put", path, "denied", is_transient=False)

    tried: list[str] = []
    monkeypatch.setattr(storage, "put_if_absent", denied)
    with pytest.raises(StorageError, match="denied"):
        directory.write(savepoint)
    assert len(tried) == 1, "what waiting cannot mend is not tried again"


def test_savepoints_below_a_path_are_found(tmp_path: Path) -> None:
    for name in ("a", "deeper/b"):
        SavepointDirectory(str(tmp_path / name)).write(written(str(tmp_path / name)))
    assert savepoints_below(str(tmp_path)) == ["a", "deeper/b"]
    assert savepoints_below(str(tmp_path / "a")) == [""]


def test_a_newer_savepoint_is_refused_by_name() -> None:
    savepoint = Savepoint("drawn", "p", 0, f"files-{A}", Manifest(CheckpointId(1), Generation(1), 1, 128, ()))
    data = encode_savepoint(savepoint)
    assert decode_savepoint(data, "x") == savepoint
    with pytest.raises(CorruptionError, match="expected format version 1, found 2"):
        decode_savepoint(data.replace(b"headgate-savepoint 1", b"headgate-savepoint 2"), "x")
    for damaged in (data[:-1], data.replace(b'"p"', b'"q"'), b"", b"else"):
        with pytest.raises(CorruptionError):
            decode_savepoint(damaged, "x")


def test_a_path_names_a_pipeline_or_one_of_its_checkpoints(tmp_path: Path) -> None:
    root = str(tmp_path)
    for name in ("p", "p_"):
        (tmp_path / name).mkdir()
    assert named_log(f"{root}/p_") == NamedLog(root, "p_")
    for end in ("", "/"):
        assert named_log(f"{root}/p{end}") == NamedLog(root, "p")
        assert named_log(f"{root}/p/chk-17{end}") == NamedLog(root, "p", CheckpointId(17))
    assert named_log("memory://named/p") == NamedLog("memory://named", "p")
    for nothing in (
        f"{root}/q",
        f"{root}/q/chk-1",
        f"{root}/p/chk-1_",
        "p",
        "/p",
        "memory://p",
        "chk-1",
        "memory://p/chk-1",
    ):
        assert named_log(nothing) is None, nothing
    assert NamedLog(root, "p").open().url.endswith("/p")


def test_an_older_checkpoint_is_not_taken_for_the_newest_one() -> None:  # SV20
    def observed(*contents: int | Damage) -> ObservedLog:
        entries = [
            ObservedEntry(at, f"p/log/{at}", one)
            if isinstance(one, Damage)
            else ObservedEntry(at, f"p/log/{at}", Manifest(CheckpointId(one), Generation(1), 1, 128, ()))
            for at, one in enumerate(contents, 1)
        ]
        return ObservedLog(tuple(entries), CheckpointId(9))

    torn = Damage("p/log/torn", "torn")
    refuse_unless_newest_is_known(observed(torn, 1, 2))
    refuse_unless_newest_is_known(observed())
    for found, there in ((observed(1, 2, torn), "there is 1, 2"), (observed(torn), "there is none")):
        with pytest.raises(CorruptionError, match=f"the newest checkpoint is not known; .*{there}$") as caught:
            refuse_unless_newest_is_known(found)
        assert caught.value.path == "p/log/torn"


def test_a_place_without_a_savepoint_has_none_and_is_not_made(tmp_path: Path) -> None:
    url = str(tmp_path / "there")
    assert savepoint_at(url) is None
    assert not (tmp_path / "there").exists()
    savepoint = written(url)
    assert savepoint_at(url) is None
    SavepointDirectory(url).write(savepoint)
    assert savepoint_at(url) == savepoint
