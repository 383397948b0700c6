"""What became of a manifest: never FAILED if it may be there, never WRITTEN if it may go (C12, X8, X10, O11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.powercut import PowerCut

from headgate.errors import StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.storage.base import is_probe
from headgate.storage.faulty import Fault, FaultKind, FaultyStorage
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.storage.object_store import ObjectStorage

OTHERS_COPY = "old/aside/0000000000-0000000009/why"


def manifest(checkpoint: int) -> Manifest:
    return Manifest(CheckpointId(checkpoint), Generation(1), 1, 128, ())


def claimed(storage: Any) -> CheckpointLog:
    log = CheckpointLog(storage, "p")
    log.claim("one", 0)
    return log


def completed(storage: Any) -> list[int]:
    return [m.checkpoint for m in candidates(CheckpointLog(storage, "p").observe())]


def test_an_error_of_the_look_behind_an_append_is_no_answer() -> None:  # X8
    """Whether anything follows is not known then, and a driver that was replaced must not go on."""
    storage = FaultyStorage(MemoryStorage())
    log = claimed(storage)
    storage.inject(Fault(FaultKind.IO_ERROR, operation="list", path_part="log"))
    assert log.append(manifest(1)) is Outcome.UNKNOWN


def test_a_put_of_an_object_store_that_timed_out_may_still_land() -> None:  # X10, C12
    storage = FaultyStorage(ObjectStorage("memory:///"))
    log = claimed(storage)
    storage.inject(Fault(FaultKind.TIMEOUT, operation="put_if_absent"))
    assert log.append(manifest(1)) is Outcome.UNKNOWN


def test_a_put_of_a_directory_that_failed_does_not_land_later(tmp_path: Path) -> None:  # X10
    storage = FaultyStorage(LocalStorage(tmp_path))
    log = claimed(storage)
    storage.inject(Fault(FaultKind.TIMEOUT, operation="put_if_absent"))
    assert log.append(manifest(1)) is Outcome.FAILED


@pytest.mark.parametrize("failing", ["get", "put_if_absent", "list"])
def test_whatever_fails_while_a_write_is_looked_up_it_is_never_said_to_have_failed(failing: str) -> None:  # C12
    storage = FaultyStorage(MemoryStorage())
    log = claimed(storage)
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    storage.inject(
        Fault(FaultKind.TIMEOUT, operation=failing, path_part="log", first=2 if failing == "put_if_absent" else 1)
    )
    assert log.append(manifest(1)) is Outcome.UNKNOWN
    assert completed(storage) == [1]


def test_a_manifest_that_was_not_synced_survives_a_power_cut_or_is_not_written(
    tmp_path: Path,
) -> None:  # O11, C12
    """That it can be read proves that it exists, not that it is durable: its output must not be committed yet."""
    for failures in (1, 2, 3):
        with PowerCut().watching() as power:
            storage = LocalStorage(tmp_path / str(failures))
            log = claimed(storage)
            power.fail_directory_syncs(failures)
            outcome = log.append(manifest(1))
            power.fail_directory_syncs(0)
            power.cut()
            assert outcome is (Outcome.WRITTEN if failures == 1 else Outcome.UNKNOWN)
            assert outcome is Outcome.UNKNOWN or completed(storage) == [1]


def test_a_claim_makes_durable_what_it_has_seen(tmp_path: Path) -> None:  # O11
    """The driver that wrote it died before it could sync; the next one restores it and commits its output."""
    with PowerCut().watching() as power:
        storage = LocalStorage(tmp_path)
        log = claimed(storage)
        power.fail_directory_syncs(9)
        assert log.append(manifest(1)) is Outcome.UNKNOWN
        power.fail_directory_syncs(0)
        assert [m.checkpoint for m in candidates(CheckpointLog(storage, "p").claim("two", 0).log)] == [1]
        power.cut()
        assert completed(storage) == [1]


class Careless(MemoryStorage):
    """An object store that ignores the condition of a conditional put."""

    def put_if_absent(self, path: str, parts: Any) -> None:
        self.put(path, parts)


def test_a_storage_that_ignores_the_condition_of_a_put_is_refused() -> None:  # O12
    storage = Careless("careless")
    for _ in range(2):  # the second start finds nothing that the first one left
        with pytest.raises(UsageError, match="replaces an object that was to be written only if absent"):
            CheckpointLog(storage, "p").life("host", 0)
        assert storage.list("") == []


def test_a_sound_storage_is_asked_once_and_keeps_nothing_of_it() -> None:  # O12
    storage = FaultyStorage(MemoryStorage())
    for _ in range(2):
        CheckpointLog(storage, "p").life("host", 0)
    assert storage.list("") == ["p/life"]
    assert sum("probe-" in path for _, path in storage.calls) == 3


def test_a_check_of_the_storage_that_a_crash_cut_short_leaves_nothing_behind_the_next_start() -> None:  # O12
    storage = FaultyStorage(MemoryStorage())
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete"))
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent", path_part="probe-"))
    with pytest.raises(StorageError):
        CheckpointLog(storage, "p").life("host", 0)
    assert [path[:8] for path in storage.list("p")] == ["p/probe-"]
    log = CheckpointLog(storage, "p")
    log.life("host", 0)
    log.claim("one", 0)
    log.files.sweep()
    assert storage.list("p") == ["p/life", "p/log-hint", "p/log/0000000001"]
    assert not is_probe("p/chk-0000000007/probe-0.g1"), "of an operator with that name"


def test_a_check_of_the_storage_that_another_start_disturbs_is_repeated() -> None:  # O12
    class Swept(MemoryStorage):
        times = 1

        def put_if_absent(self, path: str, parts: Any) -> None:
            if "second" in str(bytes(parts[0])) and self.times:
                self.times -= 1
                self.delete(path)  # somebody takes it for what a crash left
            super().put_if_absent(path, parts)

    assert CheckpointLog(Swept("swept"), "p").life("host", 0).host == "host"


def test_files_that_are_not_ours_are_passed_over() -> None:  # O25
    storage = FaultyStorage(MemoryStorage())
    log = claimed(storage)
    log.reserve(CheckpointId(1))
    log.append(manifest(1))
    for directory in ("ids", "log"):
        for name in (".DS_Store", "README", "7", "notes.txt", "0000000003.bak", "old/0000000009", "000000009²"):
            storage.put(f"p/{directory}/{name}", [b"?"])
    found = CheckpointLog(storage, "p").claim("two", 0)
    assert (found.next.sequence, found.next.generation, found.first_checkpoint) == (3, 2, 2)
    assert found.log.lost() == ()


@pytest.mark.parametrize("path", ["aside/README/why", "aside/0000000001-0000000003/notes", OTHERS_COPY])
def test_notes_beside_what_is_kept_aside_count_for_nothing_and_stay(path: str) -> None:  # O25, R51
    storage = FaultyStorage(MemoryStorage())
    log = claimed(storage)
    storage.put(f"p/{path}", [b"?"])
    assert log.files.aside() == []
    storage.put("p/chk-0000000001/a-0.g0", [b"left by a crash"])
    log.files.sweep()
    assert storage.list("p/chk-0000000001") == [], "nothing is kept for its sake"
    log.discard_aside()
    assert storage.get(f"p/{path}") == b"?"
