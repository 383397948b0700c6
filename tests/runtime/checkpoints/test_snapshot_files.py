"""Parts of snapshots: their files, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.checkpoints.frozen_cases import by_row, joined, made

from headgate.codec.snapshot import Buffer, decode_sections, output_path, snapshot_path, stored_file
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import BUNDLE, Committable, KeyGroups, Manifest, Place, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, gaps
from headgate.protocol.checkpoints.retention import StoredFile
from headgate.runtime.checkpoints import snapshot_files, snapshot_writer
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.snapshot_files import read_part, verify_part
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget, write_output
from headgate.state.descriptors import StateKind
from headgate.state.snapshot import FrozenState, SnapshotTarget
from headgate.storage.base import Bytes
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage

SUBTASK = SubtaskId(VertexId("a.g7 b"), 3)


class Reading(MemoryStorage):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__("reading")
        self.sizes: list[int] = []

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        self.sizes.append(size_bytes)
        return super().get_range(path, offset, size_bytes)

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        super().put(path, parts)


def target_of(storage: MemoryStorage, inline_bytes_max: int = 0) -> SubtaskTarget:
    return SubtaskTarget(SnapshotDestination(storage, "p", Generation(2), inline_bytes_max), SUBTASK, CheckpointId(7))


def test_small_parts_stay_inline_and_the_others_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_writer, "FILE_BYTES_MAX", 60)
    storage = Reading()
    target = target_of(storage, inline_bytes_max=25)
    contents = [bytes([65 + number]) * size for number, size in enumerate((10, 40, 15, 20, 20))]
    for number, data in enumerate(contents):
        target.put(f"state/{number}", [data[:3], data[3:]])
    assert storage.list("p") == ["p/chk-0000000007/a.g7_b-3.g2"], "the last file waits for more"
    parts = target.finish()
    assert storage.list("p") == ["p/chk-0000000007/a.g7_b-3.g2", "p/chk-0000000007/a.g7_b-3.g2.1"]
    assert [bytes(read_part(storage, "p", part)) for part in parts] == contents
    first, second = (path.removeprefix("p/") for path in storage.list("p"))
    assert [(part.path, part.offset) for part in parts] == [("", 0), (first, 0), ("", 0), (first, 40), (second, 0)]


def test_a_name_says_which_upload_wrote_a_file() -> None:
    wrote = CheckpointId(12), Generation(34)
    for number in (0, 1, 12):
        for made_up in (
            snapshot_path(wrote[0], SUBTASK, wrote[1], number),
            output_path(wrote[0], SUBTASK, wrote[1], 5),
        ):
            assert stored_file(made_up) == StoredFile(made_up, *wrote)
    for other in ("log/0000000001", "chk-x/a-0.g1", "life", "aside/0000000001-0000000003/why", "chk-0000000001/"):
        assert stored_file(other) is None
    assert stored_file("chk-0000000001/strange") == StoredFile("chk-0000000001/strange", CheckpointId(1), Generation(0))


class Halves(FrozenState):
    """Writes each state in a part of its own; ``lost`` parts are left out."""

    def __init__(self, inner: FrozenState, lost: int = 0) -> None:
        super().__init__()
        self.inner, self.lost = inner, lost

    def _rows(self) -> Mapping[str, int]:
        return {"s": 2 * self.inner.rows()["s"]}

    def _encode(self) -> Sequence[Buffer]:
        raise AssertionError("it is never asked for in one piece")

    def _write(self, target: SnapshotTarget) -> None:
        written = [target.put(self.inner.encode(), self.inner.rows())]
        if not self.lost:
            target.share(written[0])

    def _forget(self) -> None: ...


def test_a_state_in_several_parts_is_counted_as_a_whole() -> None:
    storage = MemoryStorage("several")
    frozen = by_row_state()
    target = target_of(storage)
    target.put_state("node", Halves(frozen))
    first, second = target.finish()
    assert first == second, "what is shared is referred to once more"
    assert SubtaskEntry(SUBTASK, (first, second)).rows == {"node": {"s": 2 * frozen.rows()["s"]}}
    with pytest.raises(AssertionError, match=r"of operator 'node' must have .* rows of state 's', but has"):
        target_of(storage).put_state("node", Halves(frozen, lost=1))


def by_row_state() -> FrozenState:
    live = by_row(StateKind.VALUE)
    for _ in range(4):
        live.change()
    return live.freeze()


def test_a_part_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "READ_BYTES_MAX", 7)
    storage = Reading()
    target = target_of(storage)
    target.put("state/a", [b"before"])
    target.put("state/b", [bytes(range(20))])
    part = target.finish()[1]
    assert bytes(read_part(storage, "p", part)) == bytes(range(20))
    verify_part(storage, "p", part)
    assert storage.sizes == [7, 7, 6] * 2
    for wrong, found in [(replace(part, checksum=1), "checksum"), (replace(part, size_bytes=30), "20 bytes")]:
        for read in (read_part, verify_part):
            with pytest.raises(CorruptionError, match=found) as caught:
                read(storage, "p", wrong)  # type: ignore[operator]
            assert caught.value.path == f"p/{part.path}"


def test_parts_apart_are_files_of_their_own() -> None:  # SF15
    storage = Reading()
    target = target_of(storage, inline_bytes_max=1_000)
    contents = [b"first", b"second", b"third"]
    groups = KeyGroups(3, 4)
    made = [target.put_apart("files/node", [data[:2], data[2:]], groups, f"{n}.sst") for n, data in enumerate(contents)]
    assert target.finish() == tuple(made)
    assert len({part.path for part in made}) == 3
    assert [stored_file(part.path) for part in made] == [
        StoredFile(part.path, CheckpointId(7), Generation(2)) for part in made
    ]
    assert [bytes(read_part(storage, "p", part)) for part in made] == contents
    assert [(part.name, part.key_groups) for part in made] == [(f"{n}.sst", groups) for n in range(3)]


def test_parts_at_another_place_are_read_and_verified_there(tmp_path: Path) -> None:
    there = Place(str(tmp_path / "there"), "files-0")
    storage = open_storage(there.url)
    target = SubtaskTarget(SnapshotDestination(storage, there.prefix, Generation(2), 0), SUBTASK, CheckpointId(7))
    target.put("state/a", [b"whole"])
    (part,) = target.finish()
    entry = SubtaskEntry(SUBTASK, (part,))
    files = CheckpointLog(MemoryStorage("here"), "p").files
    assert files.read(part, there) == b"whole"
    assert files.sections(entry, there) == {"state/a": [b"whole"]}
    whole = Manifest(CheckpointId(7), Generation(2), 1, 128, (entry,), place=there)
    assert files.verify(whole) == []
    storage.put(f"files-0/{part.path}", [b"wrong"])
    (damage,) = files.verify(whole)
    assert damage.path == f"{there.url}/files-0/{part.path}"
    storage.delete(f"files-0/{part.path}")
    assert files.verify(whole) == [Damage(damage.path, "the file is missing")]
    gone = replace(whole, place=Place(str(tmp_path / "gone"), "files-0"))
    assert files.verify(gone) == [Damage(str(tmp_path / "gone"), "the directory is missing")]
    assert not (tmp_path / "gone").exists()


def test_one_part_at_a_time_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.runtime.checkpoints.test_restore import restored_of

    storage = Reading()
    target = target_of(storage)
    for number in range(5):
        target.put("state/sum", [bytes([number]) * 1_000])
    states = restored_of(storage, target.finish())
    assert (len(states), storage.sizes) == (5, []), "nothing is read before somebody asks"
    for number, state in enumerate(states):
        assert bytes(state.payload) == bytes([number]) * 1_000
        assert storage.sizes == [1_000] * (number + 1)


def test_discarding_keeps_what_a_manifest_shares() -> None:  # SF7
    storage = MemoryStorage("shared")
    log = CheckpointLog(storage, "p")
    log.claim("test", 0)

    def complete(number: int, *shared: SnapshotPart) -> SnapshotPart:
        target = SubtaskTarget(SnapshotDestination(storage, "p", Generation(1), 0), SUBTASK, CheckpointId(number))
        own = target.put(BUNDLE, [b"of %d" % number])
        for part in shared:
            target.share(part)
        entries = (SubtaskEntry(SUBTASK, target.finish()),)
        log.append(Manifest(CheckpointId(number), Generation(1), 1, 128, entries))
        return own

    complete(1)
    lost = complete(2)
    newest = complete(3, lost)
    storage.put("p/log/0000000003", [b"torn"])
    heir = CheckpointLog(storage, "p")
    claimed = heir.claim("heir", 0)
    manifests = [e.content for e in claimed.log.counted() if isinstance(e.content, Manifest)]
    heir.files.set_aside(claimed.log, gaps(claimed.log, manifests[0], claimed.first_checkpoint, [Damage("x", "torn")]))
    heir.files.sweep()
    heir.drop(CheckpointId(1), CheckpointId(3))
    assert len([path for path in storage.list("p") if "/chk-" in path]) == 3, "the torn entry may need any of them"
    assert heir.discard_aside() == 1, "what was before it"
    assert heir.files.verify(manifests[0]) == []
    left = [path for path in storage.list("p") if "/chk-" in path]
    assert left == [f"p/{lost.path}", f"p/{newest.path}"]


def test_large_output_is_a_file_until_it_is_committed() -> None:
    storage = MemoryStorage("output")
    log = CheckpointLog(storage, "p")
    log.claim("test", 0)
    to = SnapshotDestination(storage, "p", Generation(1), 100)

    def complete(number: int, *carried: Committable) -> None:
        log.reserve(CheckpointId(number))
        log.append(Manifest(CheckpointId(number), Generation(1), 1, 128, (), carried))

    stored = write_output(to, SUBTASK, CheckpointId(1), 1, b"large")
    committable = Committable("out", CheckpointId(1), 3, Generation(1), b"", stored)
    complete(1, committable)
    complete(2, committable)
    log.drop(CheckpointId(1), CheckpointId(2))
    assert bytes(log.files.read(stored)) == b"large", "it is carried: not committed yet"
    assert log.files.verify(Manifest(CheckpointId(9), Generation(1), 1, 128, (), (committable,))) == []
    complete(3)
    log.drop(CheckpointId(2), CheckpointId(3))
    assert [path for path in storage.list("p") if "/chk-" in path] == []


def test_key_groups_overlap_or_not() -> None:
    one = KeyGroups(4, 4)
    assert [one.overlaps(KeyGroups(*other)) for other in ((0, 4), (0, 5), (7, 1), (8, 9), (0, 99))] == [
        False,
        True,
        True,
        False,
        True,
    ]
    for wrong in ((-1, 2), (3, 0)):
        with pytest.raises(ValueError, match="key groups"):
            KeyGroups(*wrong)


def test_a_bundle_and_a_state_are_told_together() -> None:
    """What looks at a checkpoint from outside sees sections, however they were written."""
    storage = MemoryStorage("sections")
    target = target_of(storage, inline_bytes_max=1_000)
    target.put_bundle({"flag": b"x", "state/old": b"as version 1 wrote it"})
    live: Any = made("reduce")
    frozen = live.freeze()
    target.put_state("node", frozen)
    found = CheckpointLog(storage, "p").files.sections(SubtaskEntry(SUBTASK, target.finish()))
    assert {name: [bytes(part) for part in parts] for name, parts in found.items()} == {
        "flag": [b"x"],
        "state/old": [b"as version 1 wrote it"],
        "state/node": [joined(frozen.encode())],
    }
    assert decode_sections(found["state/node"][0], "test")
