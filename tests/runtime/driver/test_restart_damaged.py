"""Checkpoints that workers could not restore count as damaged for the next claim, and the policy decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.driver.test_restart import CALLS, Place, begun
from tests.runtime.driver.test_restart_promised_output import KINDS, Home

from headgate.errors import UsageError
from headgate.model.config import DamagedCheckpoint, FixedDelay, NoRestart, RestartStrategy
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.checkpoints.restore_selection import UnrestorableCheckpoints
from headgate.protocol.supervision.restart_policy import RestartAfter, Restarts
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart
from headgate.runtime.driver.restart import begin_generation
from headgate.runtime.worker.chain import NodeError
from headgate.runtime.worker.worker import failure_of
from headgate.state.snapshot import LocalDamage, UnsoundFiles

SAID = "p/{} is damaged at byte 0: expected files that RocksDB can read, found Corruption: block checksum mismatch"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    return Place(tmp_path)


def found_in(manifest: Manifest, path: str = "") -> UnrestorableCheckpoints:
    """Return what a worker reported that had to restore ``manifest``."""
    path = path or manifest.entries[0].parts[0].path
    made = UnrestorableCheckpoints()
    made.note(manifest, Failure(FailureKind.DAMAGED, SAID.format(path), path=f"p/{path}"))
    return made


def begin(
    place: Place, unsound: UnrestorableCheckpoints, policy: DamagedCheckpoint = DamagedCheckpoint.PREVIOUS
) -> Manifest:
    config = replace(place.definition.config, on_damaged=policy)
    place.log = CheckpointLog(place.storage, "p")
    definition = replace(place.definition, config=config)
    new = begun(begin_generation(definition, place.log, "test", place.notes.append, unsound=unsound))
    assert new.restored is not None
    return new.restored


# R57 R10
def test_what_a_worker_could_not_restore_is_gone_back_behind(place: Place) -> None:
    place.begin()
    place.complete(1, 1)
    newest = place.complete(2, 1)
    file = newest.entries[0].parts[0].path
    CALLS.clear()
    assert begin(place, found_in(newest)).checkpoint == 1
    assert f"p/{file} cannot be used" in place.notes[0]
    assert "block checksum mismatch; using checkpoint 1 instead" in place.notes[0]
    assert CALLS == [("recover", [1]), ("commit 1 as 2", [1])], "what checkpoint 2 promised is aborted"
    (aside,) = place.log.files.aside()
    assert (aside.above, aside.below) == (1, 3)


# R57 R51
def test_a_later_driver_does_not_return_to_what_was_gone_back_behind(place: Place) -> None:
    """Its files verify as sound, but what it promised was aborted, so its sinks would deny it for ever."""
    place.begin()
    place.complete(1, 1)
    begin(place, found_in(place.complete(2, 1)))
    CALLS.clear()
    assert begin(place, UnrestorableCheckpoints()).checkpoint == 1
    assert CALLS == [("recover", [1]), ("commit 1 as 3", [1])]
    assert any(
        "checkpoint 2 cannot be used: a former start went back past it: p/chk-0000000002" in note
        for note in place.notes
    )
    place.complete(3, 3)
    assert begin(place, UnrestorableCheckpoints()).checkpoint == 3


# R57 R51 SF7
def test_who_removes_what_is_aside_does_not_bring_back_what_was_gone_back_behind(place: Place) -> None:
    """The note that says so stays, keeps no files, and goes when no such checkpoint is in the log any more."""
    place.begin()
    place.complete(1, 1)
    begin(place, found_in(place.complete(2, 1)))
    place.log.discard_aside()
    assert place.log.files.aside() == []
    assert begin(place, UnrestorableCheckpoints()).checkpoint == 1
    place.log.discard_aside()
    place.complete(3, 3)
    place.complete(4, 3)
    place.log.drop(CheckpointId(3), CheckpointId(4))
    assert {path[: len("p/chk-0000000000")] for path in place.storage.list("p/chk-")} <= {"p/chk-0000000004"}
    place.log.discard_aside()
    assert place.storage.list("p/aside") == []


# R57
def test_a_note_that_goes_while_it_is_read_is_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removes what is aside while a run starts again."""
    place.begin()
    place.complete(1, 1)
    begin(place, found_in(place.complete(2, 1)))
    files = place.log.files
    notes = {path: place.storage.get(path) for path in place.storage.list("p/aside")}
    get = place.storage.get

    def late(path: str) -> bytes:
        place.storage.delete(path)
        return get(path)

    for read in (files.aside, files.rolled_back_by):
        assert [aside.above for aside in read()] == [1]
        with monkeypatch.context() as patch:
            patch.setattr(place.storage, "get", late)
            assert read() == []
        for path, data in notes.items():
            place.storage.put(path, [data])


# R57 R51
def test_a_checkpoint_whose_entry_was_mended_is_gone_back_to(place: Place) -> None:
    """It was only older than what was restored: nobody went back past it, and nothing of it was aborted."""
    place.begin()
    for checkpoint in (1, 2, 3):
        place.complete(checkpoint, 1)
    path = sorted(place.storage.list("p/log"))[2]
    whole = place.storage.get(path)
    place.storage.put(path, [whole[:-1]])
    assert begin(place, UnrestorableCheckpoints()).checkpoint == 3
    assert [(aside.above, aside.below) for aside in place.log.files.aside()] == [(1, 3)]
    place.storage.put(path, [whole])
    newest = candidates(place.log.observe())[0]
    assert begin(place, found_in(newest)).checkpoint == 2


# R57 R14
def test_what_a_worker_could_not_restore_refuses_the_start_if_configured_so(place: Place) -> None:
    place.begin()
    place.complete(1, 1)
    newest = place.complete(2, 1)
    CALLS.clear()
    with pytest.raises(UsageError, match=newest.entries[0].parts[0].path + ".*going back to checkpoint 1"):
        begin(place, found_in(newest), DamagedCheckpoint.FAIL)
    assert CALLS == [], "no sink is touched"


def begin_at_home(home: Home, unsound: UnrestorableCheckpoints, policy: DamagedCheckpoint) -> Manifest:
    definition = replace(home.definition, config=replace(home.definition.config, on_damaged=policy))
    log = CheckpointLog(home.storage, "p")
    new = begun(begin_generation(definition, log, "test", home.notes.append, unsound=unsound))
    new.commits.close()
    assert new.restored is not None
    return new.restored


# R57 SV25 SV26
def test_damage_of_an_adopted_checkpoint_does_not_restore_what_was_left_for_it(tmp_path: Path) -> None:
    """What the checkpoints that were left still promised was aborted, whichever of them seems sound."""
    home = Home(tmp_path, KINDS["ledger"](tmp_path))
    for _ in range(5):
        home.run(retained=9)
    begun = home.begin(home.chk(3), 5)
    begun.commits.close()
    adopted = begun.restored
    assert adopted is not None
    assert adopted.checkpoint == 6
    with pytest.raises(UsageError, match=r"checkpoint 5: the pipeline left it; .*going back to checkpoint 2 would"):
        begin_at_home(home, found_in(adopted), DamagedCheckpoint.FAIL)
    assert begin_at_home(home, found_in(adopted), DamagedCheckpoint.PREVIOUS).checkpoint == 2
    assert any(
        "checkpoint 4 cannot be used: the pipeline left it; using checkpoint 2 instead" in note for note in home.notes
    )


# R57 SV26
def test_without_a_checkpoint_that_was_not_left_nothing_starts(tmp_path: Path) -> None:
    home = Home(tmp_path, KINDS["ledger"](tmp_path))
    for _ in range(2):
        home.run(retained=9)
    begun = home.begin(home.chk(1), 2)
    begun.commits.close()
    assert begun.restored is not None
    with pytest.raises(UsageError, match=r"checkpoint 2: the pipeline left it; .*no sound checkpoint is left"):
        begin_at_home(home, found_in(begun.restored), DamagedCheckpoint.PREVIOUS)


# R57 SF15
def test_a_file_that_checkpoints_share_is_damage_of_all_of_them(place: Place) -> None:
    place.begin()
    place.complete(1, 1)
    second = place.complete(2, 1)
    shared = second.entries[0].parts
    third = replace(second, checkpoint=CheckpointId(3))
    own = replace(shared[0], path="chk-0000000003/own")
    third = replace(third, entries=(replace(third.entries[0], parts=(own, *shared)),))
    by_file, by_checkpoint = found_in(third, shared[0].path), found_in(third, own.path)
    assert by_file.of(third)
    assert by_file.of(second)
    assert by_checkpoint.of(third)
    assert not by_checkpoint.of(second), "its own files may be sound"
    assert begin(place, by_file).checkpoint == 1


# R57
def test_damage_of_a_checkpoint_is_another_failure_than_that_of_a_disk() -> None:
    unsound = UnsoundFiles("p/chk-0000000002/x.f1", 0, "files that RocksDB can read", "Corruption")
    failure = failure_of(NodeError("sum", unsound))
    assert failure == Failure(FailureKind.DAMAGED, f"operator 'sum': {unsound}", path="p/chk-0000000002/x.f1")
    local = failure_of(LocalDamage("/disk/000008.sst", 5, "a block", "another"))
    assert local.kind is FailureKind.LOST, "as a machine that fails"


DAMAGED = Failure(FailureKind.DAMAGED, "x", path="p/y")


# R57
def test_damage_is_no_failure_that_a_restart_strategy_counts() -> None:
    restarts = Restarts(NoRestart())
    assert restarts.after(DAMAGED, 0, 0.5) == RestartAfter(0)
    assert restarts.count == 1


# R57
def test_damage_again_and_again_counts_because_a_worker_may_see_it_everywhere() -> None:
    restarts = Restarts(FixedDelay(attempts=2, delay_ms=70))
    found = [restarts.after(replace(DAMAGED, path=f"p/{number}"), number, 0.5) for number in range(4)]
    assert found[:3] == [RestartAfter(0), RestartAfter(70), RestartAfter(70)]
    assert restarts.count == 3
    assert isinstance(found[3], Failure)
    assert found[3].reason == "x; it failed 3 times, and 2 restarts were allowed"
    assert isinstance(restarts_after_damage(NoRestart()).after(DAMAGED, 1, 0.5), Failure)


# R57
def test_damage_after_another_failure_is_the_first_again() -> None:
    restarts = restarts_after_damage(FixedDelay(delay_ms=70))
    assert restarts.after(Failure(FailureKind.LOST, "gone"), 1, 0.5) == RestartAfter(70)
    assert restarts.after(DAMAGED, 2, 0.5) == RestartAfter(0)
    assert restarts.after(DAMAGED, 3, 0.5) == RestartAfter(70)


def restarts_after_damage(strategy: RestartStrategy) -> Restarts:
    made = Restarts(strategy)
    assert made.after(DAMAGED, 0, 0.5) == RestartAfter(0)
    return made
