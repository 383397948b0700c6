"""The checkpoint log: claims race, manifests are written once, nothing is lost by pruning or by bad reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.checkpoints.test_log_takeover import Life, numbers
from tests.runtime.checkpoints.writing import write_snapshot
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.support.powercut import PowerCut

from headgate.codec.json_files import encode_log_entry
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Claim, Manifest, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, Gap, candidates, life_of
from headgate.protocol.checkpoints.restore_selection import KeptAside
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.storage.base import AlreadyExists, Storage, is_probe
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.storage.object_store import ObjectStorage

SUBTASK = SubtaskId(VertexId("window"), 0)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage("test"))


def claimed(storage: FaultyStorage, owner: str = "one") -> tuple[CheckpointLog, Generation]:
    log = CheckpointLog(storage, "p")
    return log, log.claim(owner, 0).next.generation


def manifest(checkpoint: int, generation: int = 1, handle: SnapshotPart | None = None) -> Manifest:
    entries = () if handle is None else (SubtaskEntry(SUBTASK, (handle,)),)
    return Manifest(CheckpointId(checkpoint), Generation(generation), 1, 128, entries, (), {}, False, 0, 0)


def snapshot(storage: FaultyStorage, checkpoint: int, data: bytes = b"state") -> SnapshotPart:
    return write_snapshot(storage, "p", SUBTASK, CheckpointId(checkpoint), Generation(1), [data], 0)


def sequences(storage: FaultyStorage) -> list[int]:
    return [int(path.rsplit("/", 1)[1]) for path in storage.list("p/log")]


def test_drivers_that_claim_at_the_same_time_get_different_generations(storage: FaultyStorage) -> None:
    found: list[int] = []
    barrier = threading.Barrier(8)

    def claim(number: int) -> None:
        barrier.wait()
        found.append(claimed(storage, f"driver {number}")[1])

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8


def test_a_manifest_behind_the_claim_of_a_newer_generation_is_fenced(storage: FaultyStorage) -> None:
    older, _ = claimed(storage, "older")
    claimed(storage, "newer")
    with pytest.raises(FencedError) as fenced:
        older.append(manifest(1))
    assert (fenced.value.mine, fenced.value.newest) == (1, 2)
    assert older.newer_generation() == 2


def test_a_write_that_failed_after_its_effect_is_read_back(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    assert log.append(manifest(1)) is Outcome.WRITTEN
    assert log.append(manifest(2)) is Outcome.WRITTEN
    assert sequences(storage) == [1, 2, 3]


def test_a_write_that_had_no_effect_failed(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    storage.inject(Fault(FaultKind.NO_SPACE, operation="put_if_absent"))
    assert log.append(manifest(1)) is Outcome.FAILED
    assert "put" in log.problem
    assert log.append(manifest(2)) is Outcome.WRITTEN
    assert sequences(storage) == [1, 2]


def test_a_write_that_cannot_be_read_back_is_unknown(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    storage.inject(Fault(FaultKind.IO_ERROR, operation="get"))
    assert log.append(manifest(1)) is Outcome.UNKNOWN


def test_an_own_manifest_that_lands_after_it_was_given_up_is_unknown_and_no_fence(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    storage.put("p/log/0000000002", [encode_log_entry(manifest(1))])
    assert log.append(manifest(2)) is Outcome.UNKNOWN
    storage.put("p/log/0000000002", [b"torn"])
    assert log.append(manifest(2)) is Outcome.UNKNOWN, "it may be the entry of a newer driver"


def test_a_driver_that_loses_every_race_gives_up(storage: FaultyStorage) -> None:
    refused: list[str] = []

    class Lost(MemoryStorage):
        def put_if_absent(self, path: str, parts: Any) -> None:
            refused.append(path)
            raise AlreadyExists(path)

    with pytest.raises(StorageError, match="other drivers claimed it at the same time"):
        CheckpointLog(Lost("lost"), "p").claim("one", 0)
    assert set(refused) == {"p/log/0000000001"}


def test_a_driver_that_was_replaced_does_not_claim_again(storage: FaultyStorage) -> None:
    older, mine = claimed(storage, "older")
    _, newest = claimed(storage, "newer")
    with pytest.raises(FencedError) as fenced:
        older.claim("older", 0, mine)
    assert fenced.value.newest == newest


def test_a_claim_of_its_own_that_it_did_not_hear_of_does_not_stop_a_driver(storage: FaultyStorage) -> None:
    log, mine = claimed(storage)
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    with pytest.raises(StorageError):
        log.claim("one", 0, mine)
    assert log.claim("one", 0, mine).next.generation > mine


def test_the_hint_tells_a_lost_entry_from_none(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    log.append(manifest(1))
    log.append(manifest(2))
    storage.delete("p/log/0000000003")
    assert log.observe().lost() == (3,)


def test_without_a_hint_nothing_is_lost(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    storage.inject(Fault(FaultKind.NO_SPACE, path_part="hint"))
    log.append(manifest(1))
    assert log.observe().lost() == ()


def test_ids_are_remembered_and_the_one_before_is_not_kept(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    for checkpoint in (1, 2, 7):
        log.reserve(CheckpointId(checkpoint))
        if checkpoint == 2:
            assert storage.list("p/ids") == ["p/ids/0000000002"]
    log.reserve(CheckpointId(7))
    assert log.observe().reserved == 7
    assert CheckpointLog(storage, "p").claim("two", 0).first_checkpoint == 8


def test_ids_that_a_crash_left_go_with_the_next_claim(storage: FaultyStorage) -> None:  # R7
    log, _ = claimed(storage)
    log.reserve(CheckpointId(5))
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete", times=2))
    for checkpoint in (6, 7):
        with pytest.raises(StorageError):
            log.reserve(CheckpointId(checkpoint))
    assert CheckpointLog(storage, "p").claim("two", 0).first_checkpoint == 8
    assert storage.list("p/ids") == ["p/ids/0000000007"]


def test_dropping_a_checkpoint_removes_its_files_and_the_entries_before_the_oldest_retained(
    storage: FaultyStorage,
) -> None:
    log, _ = claimed(storage)
    for checkpoint in (1, 2, 3):
        log.append(manifest(checkpoint, handle=snapshot(storage, checkpoint)))
    log.drop(CheckpointId(1), CheckpointId(2))
    assert sequences(storage) == [3, 4]
    assert len([p for p in storage.list("p") if "/chk-" in p]) == 2
    assert log.observe().lost() == ()


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_crash_while_dropping_leaves_no_gap(storage: FaultyStorage, crash_at: int) -> None:
    log, _ = claimed(storage)
    for checkpoint in (1, 2, 3):
        log.append(manifest(checkpoint, handle=snapshot(storage, checkpoint)))
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete", first=crash_at, times=99))
    with pytest.raises(StorageError):
        log.drop(CheckpointId(2), CheckpointId(3))
    storage.heal()
    assert log.observe().lost() == ()
    assert log.files.verify(manifest(3, handle=snapshot(storage, 3))) == []


def test_a_sweep_removes_only_old_files_of_checkpoints_that_are_not_kept(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    storage.put("p/chk-0000000004/window-0.g2", [b"of a later generation"])
    for checkpoint in (1, 2, 3):
        snapshot(storage, checkpoint)
    log.append(manifest(2, handle=snapshot(storage, 2)))
    log = claimed(storage)[0]
    log.files.sweep()
    assert ("sweep_unfinished", "p") in storage.calls
    assert [p.split("/")[1] for p in storage.list("p") if "/chk-" in p] == ["chk-0000000002", "chk-0000000004"]


def test_damaged_and_missing_files_are_named(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    flipped, missing, sound = (snapshot(storage, checkpoint) for checkpoint in (1, 2, 3))
    storage.put(f"p/{flipped.path}", [b"stbte"])
    storage.delete(f"p/{missing.path}")
    entries = tuple(SubtaskEntry(SUBTASK, (handle,)) for handle in (flipped, missing, sound))
    whole = Manifest(CheckpointId(3), Generation(1), 1, 128, entries, (), {}, False, 0, 0)
    assert [damage.path for damage in log.files.verify(whole)] == [f"p/{flipped.path}", f"p/{missing.path}"]


def test_a_damaged_entry_is_observed_as_damage(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    log.append(manifest(1))
    storage.put("p/log/0000000002", [b"headgate-log nonsense"])
    contents = [entry.content for entry in log.observe().entries]
    assert isinstance(contents[0], Claim)
    assert getattr(contents[1], "path", "") == "p/log/0000000002"


def test_a_snapshot_of_another_generation_has_a_file_of_its_own(storage: FaultyStorage) -> None:
    made = [
        write_snapshot(storage, "p", SUBTASK, CheckpointId(1), Generation(number), [f"of {number}".encode()], 0)
        for number in (2, 1)  # the older one wakes up behind the newer one
    ]
    assert [CheckpointLog(storage, "p").files.read(handle) for handle in made] == [b"of 2", b"of 1"]


def test_small_state_travels_in_the_manifest(storage: FaultyStorage) -> None:
    handle = write_snapshot(storage, "p", SUBTASK, CheckpointId(1), Generation(1), [b"ab", b"c"], 3)
    assert (handle.path, handle.inline) == ("", b"abc")
    assert CheckpointLog(storage, "p").files.read(handle) == b"abc"


def between_write_and_look(storage: FaultyStorage, look: int, act: Callable[[], object]) -> None:
    """Have ``act`` run in front of the ``look``-th listing of the log."""
    acts = [act]
    storage._wait = lambda _: acts.pop()()  # type: ignore[assignment,func-returns-value]
    storage.inject(Fault(FaultKind.SLOW, operation="list", path_part="p/log", first=look))


def test_a_manifest_that_the_next_driver_has_seen_is_never_taken_back(storage: FaultyStorage) -> None:
    """It restores from it and commits its output: without it that output would come twice."""
    log, _ = claimed(storage, "older")
    seen: list[int] = []
    between_write_and_look(storage, 1, lambda: seen.append(claimed(storage, "newer")[1]))
    with pytest.raises(FencedError) as fenced:
        log.append(manifest(1))
    assert seen == [fenced.value.newest]
    found = log.observe()
    assert [m.checkpoint for m in candidates(found)] == [1]
    assert found.lost() == ()


def test_drivers_that_start_at_the_same_time_leave_no_gap(storage: FaultyStorage) -> None:
    between_write_and_look(storage, 2, lambda: claimed(storage, "second"))
    claimed(storage, "first")
    assert CheckpointLog(storage, "p").observe().lost() == ()


@pytest.mark.parametrize("retained", [1, 2])
def test_an_entry_at_a_number_that_was_used_and_pruned_is_taken_back(storage: FaultyStorage, retained: int) -> None:
    sleeper, _ = claimed(storage, "sleeper")
    log, newest = claimed(storage, "newer")
    for checkpoint in (1, 2, 3):
        assert log.append(manifest(checkpoint, newest)) is Outcome.WRITTEN
    log.drop(CheckpointId(3 - retained), CheckpointId(4 - retained))
    kept = sequences(storage)
    with pytest.raises(FencedError):
        sleeper.append(manifest(1))
    assert sequences(storage) == kept


# -- a driver that slept through its replacement -----


def log(storage: Storage) -> CheckpointLog:
    return CheckpointLog(storage, "p")


def memory() -> Storage:
    return MemoryStorage("log-fencing")


def manifest_fencing(checkpoint: int, generation: int) -> Manifest:
    return Manifest(CheckpointId(checkpoint), Generation(generation), 1, 128, ())


def replaced_and_pruned(storage: Storage) -> CheckpointLog:
    """Return the log of a driver whose next number was used by its replacement, and pruned."""
    old, new = log(storage), log(storage)
    old.claim("old", 1)
    assert old.append(manifest_fencing(1, 1)) is Outcome.WRITTEN
    new.claim("new", 2)
    for checkpoint in (2, 3):
        assert new.append(manifest_fencing(checkpoint, 2), CheckpointId(checkpoint)) is Outcome.WRITTEN
    new.drop(CheckpointId(1), CheckpointId(2))
    new.drop(CheckpointId(2), CheckpointId(3))
    return old


def test_a_manifest_at_a_pruned_number_is_taken_back() -> None:
    storage = memory()
    old = replaced_and_pruned(storage)
    before = log(storage).observe()
    with pytest.raises(FencedError) as error:
        old.append(manifest_fencing(9, 1))
    assert error.value.newest == 2
    assert log(storage).observe() == before


def test_a_replaced_driver_does_not_claim_again() -> None:
    storage = memory()
    first, second = log(storage), log(storage)
    mine = first.claim("first", 1).next.generation
    second.claim("second", 2)
    with pytest.raises(FencedError):
        first.claim("first", 3, mine)


def test_a_driver_claims_again_after_claims_of_its_own() -> None:
    storage = memory()
    mine = log(storage).claim("first", 1).next.generation
    orphaned = log(storage).claim("first", 2).next.generation
    again = log(storage).claim("first", 3, mine)
    assert again.next.generation > orphaned > mine
    assert all(isinstance(entry.content, Claim) for entry in again.log.entries)


# -- a driver that cannot read what followed its own entries does not take the pipeline back (r56) -----


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(MemoryStorage("unreadable"))


def damage(faulty: FaultyStorage, first: int) -> dict[str, bytes]:
    """Make the entries from ``first`` on unreadable; return what they held."""
    paths = [f"p/log/{sequence:010d}" for sequence in numbers(faulty) if sequence >= first]
    sound = {path: faulty.get(path) for path in paths}
    for path in paths:
        faulty.put(path, [b"torn"])
    return sound


@pytest.mark.parametrize("times", [0, 1, 6])
def test_a_driver_whose_heirs_entries_cannot_be_read_does_not_claim(faulty: FaultyStorage, times: int) -> None:  # R56
    sleeper = Life(faulty, "sleeper")
    sleeper.complete(2)
    heir = Life(faulty, "heir")
    heir.complete(times)
    sound = damage(faulty, 4)
    there = numbers(faulty)
    with pytest.raises(StorageError, match="perhaps another driver runs pipeline 'p'") as found:
        sleeper.log.claim("sleeper", 0, sleeper.generation)
    assert found.value.is_transient, "the next entry of the heir tells"
    with pytest.raises(StorageError):
        sleeper.log.newer_generation()
    assert numbers(faulty) == there
    assert heir.log.newer_generation() is None
    for path, data in sound.items():
        faulty.put(path, [data])
    with pytest.raises(FencedError):
        sleeper.log.claim("sleeper", 0, sleeper.generation)
    heir.complete()


def test_a_driver_whose_heirs_entries_were_lost_does_not_claim(faulty: FaultyStorage) -> None:  # R56
    sleeper = Life(faulty, "sleeper")
    sleeper.complete(2)
    Life(faulty, "heir").complete(1)
    for sequence in (4, 5):
        faulty.delete(f"p/log/{sequence:010d}")
    with pytest.raises(StorageError, match="the entry is missing"):
        sleeper.log.claim("sleeper", 0, sleeper.generation)


def test_a_driver_whose_own_entry_is_damaged_claims_again_and_recovery_judges_it(faulty: FaultyStorage) -> None:
    """Nobody else can have written it (R56)."""
    life = Life(faulty, "one")
    life.complete(2)
    damage(faulty, 3)
    assert life.log.claim("one", 0, life.generation).next.sequence == 4


def test_one_readable_entry_of_the_heir_tells(faulty: FaultyStorage) -> None:  # R40, R56
    sleeper = Life(faulty, "sleeper")
    heir = Life(faulty, "heir")
    heir.complete(2)
    damage(faulty, 4)
    assert sleeper.log.newer_generation() == heir.generation
    with pytest.raises(FencedError):
        sleeper.log.claim("sleeper", 0, sleeper.generation)


def test_an_unreadable_entry_behind_a_claim_of_ones_own_tells_nobody_anything(
    faulty: FaultyStorage,
) -> None:  # R56
    """The answer of a claim got lost, and the heir's entry behind it cannot be read."""
    life = Life(faulty, "one")
    faulty.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    with pytest.raises(StorageError, match="timed out"):
        life.log.claim("one", 0, life.generation)
    Life(faulty, "heir")
    damage(faulty, 3)
    with pytest.raises(StorageError, match="another driver"):
        life.log.claim("one", 0, Generation(life.generation + 1))
    life.log._generation = Generation(life.generation + 1)  # as if it had heard of its claim otherwise
    with pytest.raises(StorageError, match="another driver"):
        life.log.newer_generation()


# -- what became of a manifest -----


OTHERS_COPY = "old/aside/0000000000-0000000009/why"


def manifest_outcomes(checkpoint: int) -> Manifest:
    return Manifest(CheckpointId(checkpoint), Generation(1), 1, 128, ())


def claimed_outcomes(storage: Any) -> CheckpointLog:
    log = CheckpointLog(storage, "p")
    log.claim("one", 0)
    return log


def completed(storage: Any) -> list[int]:
    return [m.checkpoint for m in candidates(CheckpointLog(storage, "p").observe())]


def test_an_error_of_the_look_behind_an_append_is_no_answer() -> None:
    """Whether anything follows is not known then, and a driver that was replaced must not go on."""
    storage = FaultyStorage(MemoryStorage())
    log = claimed_outcomes(storage)
    storage.inject(Fault(FaultKind.IO_ERROR, operation="list", path_part="log"))
    assert log.append(manifest_outcomes(1)) is Outcome.UNKNOWN


def test_a_put_of_an_object_store_that_timed_out_may_still_land() -> None:  # C12
    storage = FaultyStorage(ObjectStorage("memory:///"))
    log = claimed_outcomes(storage)
    storage.inject(Fault(FaultKind.TIMEOUT, operation="put_if_absent"))
    assert log.append(manifest_outcomes(1)) is Outcome.UNKNOWN


def test_a_put_of_a_directory_that_failed_does_not_land_later(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path))
    log = claimed_outcomes(storage)
    storage.inject(Fault(FaultKind.TIMEOUT, operation="put_if_absent"))
    assert log.append(manifest_outcomes(1)) is Outcome.FAILED


@pytest.mark.parametrize("failing", ["get", "put_if_absent", "list"])
def test_whatever_fails_while_a_write_is_looked_up_it_is_never_said_to_have_failed(failing: str) -> None:  # C12
    storage = FaultyStorage(MemoryStorage())
    log = claimed_outcomes(storage)
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    storage.inject(
        Fault(FaultKind.TIMEOUT, operation=failing, path_part="log", first=2 if failing == "put_if_absent" else 1)
    )
    assert log.append(manifest_outcomes(1)) is Outcome.UNKNOWN
    assert completed(storage) == [1]


def test_a_manifest_that_was_not_synced_survives_a_power_cut_or_is_not_written(
    tmp_path: Path,
) -> None:  # C12
    """That it can be read proves that it exists, not that it is durable: its output must not be committed yet."""
    for failures in (1, 2, 3):
        with PowerCut().watching() as power:
            storage = LocalStorage(tmp_path / str(failures))
            log = claimed_outcomes(storage)
            power.fail_directory_syncs(failures)
            outcome = log.append(manifest_outcomes(1))
            power.fail_directory_syncs(0)
            power.cut()
            assert outcome is (Outcome.WRITTEN if failures == 1 else Outcome.UNKNOWN)
            assert outcome is Outcome.UNKNOWN or completed(storage) == [1]


def test_a_claim_makes_durable_what_it_has_seen(tmp_path: Path) -> None:
    """The driver that wrote it died before it could sync; the next one restores it and commits its output."""
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path)
        log = claimed_outcomes(storage)
        power.fail_directory_syncs(9)
        assert log.append(manifest_outcomes(1)) is Outcome.UNKNOWN
        power.fail_directory_syncs(0)
        assert [m.checkpoint for m in candidates(CheckpointLog(storage, "p").claim("two", 0).log)] == [1]
        power.cut()
        assert completed(storage) == [1]


class Careless(MemoryStorage):
    """An object store that ignores the condition of a conditional put."""

    def put_if_absent(self, path: str, parts: Any) -> None:
        self.put(path, parts)


def test_a_storage_that_ignores_the_condition_of_a_put_is_refused() -> None:
    storage = Careless("careless")
    for _ in range(2):  # the second start finds nothing that the first one left
        with pytest.raises(UsageError, match="replaces an object that was to be written only if absent"):
            CheckpointLog(storage, "p").identity("host", 0)
        assert storage.list("") == []


def test_a_sound_storage_is_asked_once_and_keeps_nothing_of_it() -> None:
    storage = FaultyStorage(MemoryStorage())
    for _ in range(2):
        CheckpointLog(storage, "p").identity("host", 0)
    assert storage.list("") == ["p/life"]
    assert sum("probe-" in path for _, path in storage.calls) == 3


def test_a_check_of_the_storage_that_a_crash_cut_short_leaves_nothing_behind_the_next_start() -> None:
    storage = FaultyStorage(MemoryStorage())
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete"))
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent", path_part="probe-"))
    with pytest.raises(StorageError):
        CheckpointLog(storage, "p").identity("host", 0)
    assert [path[:8] for path in storage.list("p")] == ["p/probe-"]
    log = CheckpointLog(storage, "p")
    log.identity("host", 0)
    log.claim("one", 0)
    log.files.sweep()
    assert storage.list("p") == ["p/life", "p/log-hint", "p/log/0000000001"]
    assert not is_probe("p/chk-0000000007/probe-0.g1"), "of an operator with that name"


def test_a_check_of_the_storage_that_another_start_disturbs_is_repeated() -> None:
    class Swept(MemoryStorage):
        times = 1

        def put_if_absent(self, path: str, parts: Any) -> None:
            if "second" in str(bytes(parts[0])) and self.times:
                self.times -= 1
                self.delete(path)  # somebody takes it for what a crash left
            super().put_if_absent(path, parts)

    assert CheckpointLog(Swept("swept"), "p").identity("host", 0).host == "host"


def test_files_that_are_not_ours_are_passed_over() -> None:
    storage = FaultyStorage(MemoryStorage())
    log = claimed_outcomes(storage)
    log.reserve(CheckpointId(1))
    log.append(manifest_outcomes(1))
    for directory in ("ids", "log"):
        for name in (".DS_Store", "README", "7", "notes.txt", "0000000003.bak", "old/0000000009", "000000009²"):
            storage.put(f"p/{directory}/{name}", [b"?"])
    found = CheckpointLog(storage, "p").claim("two", 0)
    assert (found.next.sequence, found.next.generation, found.first_checkpoint) == (3, 2, 2)
    assert found.log.lost() == ()


@pytest.mark.parametrize("path", ["aside/README/why", "aside/0000000001-0000000003/notes", OTHERS_COPY])
def test_notes_beside_what_is_kept_aside_count_for_nothing_and_stay(path: str) -> None:  # R51
    storage = FaultyStorage(MemoryStorage())
    log = claimed_outcomes(storage)
    storage.put(f"p/{path}", [b"?"])
    assert log.files.aside() == []
    storage.put("p/chk-0000000001/a-0.g0", [b"left by a crash"])
    log.files.sweep()
    assert storage.list("p/chk-0000000001") == [], "nothing is kept for its sake"
    log.discard_aside()
    assert storage.get(f"p/{path}") == b"?"


def completing(storage: FaultyStorage, *checkpoints: int) -> tuple[CheckpointLog, list[Manifest]]:
    """Return a claimed log with checkpoints, each of which has a file."""
    log, _ = claimed(storage)
    made = [manifest(checkpoint, handle=snapshot(storage, checkpoint)) for checkpoint in checkpoints]
    for one in made:
        assert log.append(one) is Outcome.WRITTEN
    return log, made


def test_nothing_that_was_given_up_is_restored(storage: FaultyStorage) -> None:  # C72, C74
    log, _ = completing(storage, 1, 2)
    log.give_up("one", 0, Generation(1))
    assert candidates(log.observe()) == ()
    with pytest.raises(UsageError, match="its checkpoints were removed; start it again"):
        log.claim("one", 0, Generation(1))
    again = CheckpointLog(storage, "p")
    with pytest.raises(StorageError, match="removed a moment ago"):
        again.claim("two", 0, life=0)
    assert again.claim("two", 0, life=life_of(log.observe())).next.generation == 3


def test_a_reset_claims_over_damage_and_above_other_generations(storage: FaultyStorage) -> None:  # SO2
    log, _ = completing(storage, 1)
    storage.put("p/log/0000000002", [b"torn"])
    seen = log.observe()
    found = CheckpointLog(storage, "p").start_over("token", 0, seen, Generation(7))
    assert (found.next.sequence, found.next.generation) == (3, 8)
    assert candidates(log.observe()) == ()
    with pytest.raises(FencedError):
        CheckpointLog(storage, "p").start_over("another token", 0, seen, Generation(7))


def test_a_log_knows_those_beside_it(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    for name in ("q", "o"):
        CheckpointLog(storage, name).claim("one", 0)
    storage.put("of/others/log/1", [b""])
    storage.put("without", [b""])
    assert [other.url for other in log.beside()] == [f"{storage.url}/o", f"{storage.url}/q"]


def test_an_identity_says_where_and_when_it_was_drawn(storage: FaultyStorage) -> None:
    log, _ = claimed(storage)
    found = log.identity("here", 5)
    assert (found.home, found.host, found.begun_ms) == (log.url, "here", 5)
    assert CheckpointLog(storage, "p").identity("there", 9) == found, "it is drawn once"
    assert log.life_id == found.id


def test_an_identity_is_another_one_since_everything_was_given_up(storage: FaultyStorage) -> None:  # LV7
    log, _ = claimed(storage)
    assert (log.generation, log.life_id) == (1, "")
    assert log.known_identity(log.observe()) is None
    first = log.identity("here", 5)
    assert log.known_identity(log.observe()) == first
    log.give_up("one", 0, log.generation)
    number = life_of(log.observe())
    second = log.identity_after_reset(number, "here", 7)
    assert (second.home, second.host, second.begun_ms) == (log.url, "here", 7)
    assert log.identity_after_reset(number, "there", 9) == second != first
    assert log.life_id == second.id
    assert log.known_identity(log.observe()) == second
    assert log.identities_before(number) == [first]
    assert log.generation == 2


def test_what_a_start_passes_over_is_not_retained(storage: FaultyStorage) -> None:  # C35
    _, made = completing(storage, 1, 2)
    log, _ = claimed(storage, "two")
    log.restored([CheckpointId(1)])
    log.files.sweep()
    assert log.files.verify(made[0]) == []
    assert log.files.verify(made[1]) != []
    log.append(manifest(3, generation=2))
    assert [one.checkpoint for one in candidates(log.observe())] == [3, 1], "2 is not gone back to"


def test_files_that_an_upload_under_way_may_share_stay(storage: FaultyStorage) -> None:  # SF6
    log, made = completing(storage, 1)
    for checkpoint in (2, 3):  # both begin before either completes
        log.reserve(CheckpointId(checkpoint))
    log.append(manifest(2))
    log.drop(CheckpointId(1), CheckpointId(2))
    assert log.files.verify(made[0]) == [], "the upload of 3 may refer to it"
    log.append(manifest(3))
    log.drop(CheckpointId(2), CheckpointId(3))
    assert log.files.verify(made[0]) != []


def test_files_of_a_snapshot_that_was_given_up_go_unless_others_need_them(storage: FaultyStorage) -> None:  # SF5
    log, made = completing(storage, 1)
    mine = snapshot(storage, 2)
    log.files.delete([mine, *made[0].parts])
    assert log.files.verify(made[0]) == []
    assert log.files.verify(manifest(2, handle=mine)) != []


def test_what_is_aside_is_told_kept_and_discarded(storage: FaultyStorage) -> None:  # R51, R57, SF7
    log, made = completing(storage, 1, 2, 3)
    gap = Gap(CheckpointId(1), CheckpointId(3), (3,), (Damage("x", "torn"), Damage("y", "gone")))
    log.files.set_aside(log.observe(), [gap], restored=CheckpointId(1))
    told = [KeptAside(CheckpointId(1), CheckpointId(3), "x: torn\ny: gone")]
    assert log.files.aside() == told == log.files.rolled_back_by()
    assert [path.rsplit("/", 1)[1] for path in log.files.aside_paths()] == ["log-0000000003", "skipped", "why"]
    assert log.files.discard_aside(lambda: [made[1]]) == 1, "of checkpoint 1: 2 is needed, 3 is no part of it"
    assert [log.files.verify(one) == [] for one in made] == [False, True, True]
    assert log.files.aside() == []
    assert log.files.rolled_back_by() == told, "as long as the log has checkpoint 2"
    assert log.files.discard_aside(lambda: [made[2]]) == 0
    assert log.files.rolled_back_by() == []
