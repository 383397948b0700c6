"""Checkpoints that are not retained are removed in one step, after everything that they promise (C71)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.driver.test_restart import CALLS, Place
from tests.runtime.driver.test_restart_damaged import found_in
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.codec.json_files import beat_path
from headgate.environment import ThreadEnded
from headgate.errors import FencedError, OutputDenied, StorageError, UsageError
from headgate.model.config import DamagedCheckpoint
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest, RestoredFrom
from headgate.model.manifest import Place as Elsewhere
from headgate.model.pipeline_identity import Course
from headgate.protocol.checkpoints.recovery import candidates, life_of
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.runtime.driver import restart
from headgate.runtime.driver.cleanup import remove_checkpoints
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.runtime.driver.takeover import HeartbeatReader, Takeover
from headgate.runtime.surroundings import PROCESS
from headgate.storage.memory import MemoryStorage

PREVIOUS = DamagedCheckpoint.PREVIOUS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    return with_checkpoints(Place(tmp_path))


def with_checkpoints(place: Place) -> Place:
    """Two completed checkpoints of generation 1; nobody has committed what they promise."""
    place.begin()
    place.complete(1, 1)
    place.complete(2, 1)
    CALLS.clear()
    return place


def remove(place: Place, owner: str = "test") -> bool:
    return remove_checkpoints(place.definition, place.log, Takeover(owner), place.notes.append, PROCESS)


def restored(place: Place) -> int | None:
    """Start the pipeline again; return the checkpoint that it begins with."""
    found = place.begin()
    assert isinstance(found, NewGeneration)
    return None if found.restored is None else int(found.restored.checkpoint)


def objects(place: Place, part: str) -> list[str]:
    return [path for path in place.storage.list("p") if part in path]


def test_what_was_promised_is_committed_before_anything_is_removed(place: Place) -> None:  # C71
    assert remove(place)
    assert CALLS == [("recover", [2]), ("commit 2 as 2", [2]), ("close", [])]
    assert objects(place, "/chk-") == []
    assert [entry.content.life for entry in place.log.observe().entries] == [5]  # type: ignore[union-attr]
    assert restored(place) is None


@pytest.mark.parametrize(
    "error",
    [
        OutputDenied("out", 2, "it was aborted"),
        StorageError("commit", "out", "away"),
        RuntimeError("what?"),
        SystemExit("by a client that ends its process"),
    ],
)
def test_checkpoints_stay_while_what_they_promise_is_not_committed(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:  # C71
    def fails(*arguments: Any) -> None:
        raise error

    sink = type(place.definition.graph.nodes[-1].spec)
    with monkeypatch.context() as broken:
        broken.setattr(sink, "commit", fails)
        assert not remove(place)
    assert any(note.startswith("the checkpoints are kept: ") for note in place.notes)
    assert restored(place) == 2
    assert CALLS[-1] == ("commit 2 as 3", [2])


class Killed(ThreadEnded):
    """The process dies."""


class Mortal(FaultyStorage):
    """Dies at operation number ``at``, before or behind its effect."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.at = self.count = 0
        self.is_behind = False

    def _before(self, operation: str, path: str, parts: Any = ()) -> bool:
        self.count += 1
        if self.count == self.at and not self.is_behind:
            raise Killed
        return super()._before(operation, path, parts)

    def _after(self, operation: str, path: str, is_late: bool) -> None:
        super()._after(operation, path, is_late)
        if self.count == self.at and self.is_behind:
            raise Killed


def lives_on_after_a_kill(root: Path, at: int, *, is_behind: bool) -> tuple[bool, str]:
    """Kill the removal at one operation; return whether it came to an end, and what the next start does."""
    place = Place(root)
    storage = place.storage = Mortal(MemoryStorage())
    with_checkpoints(place)
    before = place.log.known_identity(place.log.observe())
    storage.count, storage.at, storage.is_behind = 0, at, is_behind
    try:
        remove(place)
        is_over = True
    except Killed:
        is_over = False
    storage.at = 0
    committed = [call for call in CALLS if call[0].startswith("commit")]
    newest = restored(place)
    after = place.log.known_identity(place.log.observe())
    assert before is not None
    assert after is not None
    if newest is None:
        assert committed, "what was promised was committed before it was given up"
        assert after.id != before.id, "the sinks are not told that this is the same pipeline"
        assert objects(place, "/chk-") == []
        return is_over, "begins anew"
    assert newest == 2, "an older checkpoint is never restored"
    assert after.id == before.id
    assert len(candidates(place.log.observe())) == 2
    return is_over, "goes on"


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_removal_that_dies_anywhere_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:  # C72
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    found: list[str] = []
    for at in range(1, 200):
        is_over, what = lives_on_after_a_kill(tmp_path, at, is_behind=is_behind)
        found.append(what)
        if is_over:
            break
    assert is_over
    turn = found.index("begins anew")
    assert turn > 5, "most of it comes before"
    assert len(found) - turn > 5
    assert found == ["goes on"] * turn + ["begins anew"] * (len(found) - turn), "one step decides"


@pytest.mark.parametrize("what", ["put_if_absent", "delete", "list", "get"])
@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.TIMEOUT_AFTER_EFFECT])
def test_a_removal_that_fails_half_way_is_finished_by_the_next_start(
    place: Place, what: str, kind: FaultKind
) -> None:  # C72
    place.storage.inject(Fault(kind, what, first=2, times=100))
    is_removed = remove(place)
    place.storage.heal()
    newest = restored(place)
    assert newest in ((None,) if is_removed else (None, 2))
    if newest is None:
        assert objects(place, "/chk-") == []
        assert candidates(place.log.observe()) == ()


def test_an_answer_that_was_lost_is_asked_for_again(place: Place) -> None:  # C72
    """The claim that gives everything up is there, although its driver was told otherwise."""
    place.storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent", "/log/", first=2))
    assert remove(place)
    assert restored(place) is None


def test_what_nobody_can_tell_is_not_told(place: Place) -> None:  # C72
    place.storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent", "/log/", first=2, times=100))
    assert not remove(place)
    assert place.notes[-1].startswith("it is not known whether the checkpoints at memory:/p are given up")
    place.storage.heal()
    assert restored(place) is None


def test_what_nobody_can_tell_is_told_as_a_doubt(place: Place) -> None:  # C72
    place.storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent", "/log/", first=2, times=100))
    doubts: list[str] = []
    notes = place.notes.append
    assert not remove_checkpoints(place.definition, place.log, Takeover("test"), notes, PROCESS, doubt=doubts.append)
    (doubt,) = doubts
    assert doubt.startswith("it is not known whether the checkpoints at memory:/p are given up")
    assert doubt not in place.notes


def test_nothing_of_a_driver_that_took_over_is_removed(place: Place) -> None:  # C38
    mine = place.log
    heir = CheckpointLog(place.storage, "p")
    begin_generation(place.definition, heir, "heir", place.notes.append)
    CALLS.clear()
    assert not remove_checkpoints(place.definition, mine, Takeover("test"), place.notes.append, PROCESS)
    assert CALLS == [], "the sinks are the heir's"
    assert len(candidates(heir.observe())) == 2


def test_a_driver_that_takes_over_behind_the_commits_keeps_everything(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovered = restart.recover_sinks

    def and_meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(restart, "recover_sinks", recovered)
        commits = recovered(*arguments)
        begin_generation(place.definition, CheckpointLog(place.storage, "p"), "heir", place.notes.append)
        return commits

    monkeypatch.setattr(restart, "recover_sinks", and_meanwhile)
    assert not remove(place)
    assert "generation 3" in place.notes[-1], "it says who took over"
    assert len(candidates(place.log.observe())) == 2
    assert len(objects(place, "/chk-")) == 2


def test_a_run_that_never_claimed_removes_nothing(place: Place) -> None:  # C70
    """Its claim was refused when it was cancelled: what is there belongs to whoever runs the pipeline, or to nobody."""
    running = place.log
    log = CheckpointLog(place.storage, "p")
    assert not remove_checkpoints(place.definition, log, Takeover("late"), place.notes.append, PROCESS)
    assert place.notes == ["the checkpoints are kept: this run never got as far as to claim them"]
    assert CALLS == []
    assert running.newer_generation() is None, "whoever runs it is not replaced"
    assert restored(place) == 2


@pytest.mark.parametrize("what", ["list", "delete"])
def test_a_sweep_that_fails_oddly_ends_the_removal_all_the_same(
    place: Place, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:  # C72
    """Else the run would wait for it for ever."""

    def odd(*arguments: Any) -> None:
        raise PermissionError("what is that?")

    give_up = CheckpointLog.give_up

    def given_up(*arguments: Any) -> None:
        give_up(*arguments)
        monkeypatch.setattr(place.storage, what, odd)

    monkeypatch.setattr(CheckpointLog, "give_up", given_up)
    assert remove(place)
    assert "could not remove old checkpoint files: PermissionError: what is that?" in place.notes
    monkeypatch.undo()
    assert restored(place) is None


def test_what_somebody_begins_behind_a_lost_answer_does_not_count_as_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # C72
    """The claim that gives up was there, the answer lost; then another start began anew."""
    place.storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent", "/log/", first=2, times=1))
    give_up = CheckpointLog.give_up

    def again(self: CheckpointLog, *arguments: Any) -> None:
        try:
            give_up(self, *arguments)
        except StorageError:
            monkeypatch.setattr(CheckpointLog, "give_up", give_up)
            begin_generation(place.definition, CheckpointLog(place.storage, "p"), "other", place.notes.append)
            raise

    monkeypatch.setattr(CheckpointLog, "give_up", again)
    assert remove(place)
    assert not any(note.startswith("the checkpoints are kept") for note in place.notes)
    assert place.notes[-1].startswith("the checkpoints at memory:/p were removed")
    assert candidates(place.log.observe()) == ()


def test_who_begins_anew_before_the_look_behind_a_removal_does_not_bring_anything_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # C72
    """The claim that gives up is there, and somebody follows it before its driver has looked."""
    look = CheckpointLog._replaced_after
    looks: list[int] = []

    def and_meanwhile(self: CheckpointLog, sequence: int) -> Any:
        looks.append(sequence)
        if len(looks) == 2:  # the first one is behind the claim that settles
            begin_generation(place.definition, CheckpointLog(place.storage, "p"), "other", place.notes.append)
        return look(self, sequence)

    monkeypatch.setattr(CheckpointLog, "_replaced_after", and_meanwhile)
    assert remove(place)
    begun = place.log.known_identity(place.log.observe())
    assert restored(place) is None
    assert place.log.known_identity(place.log.observe()) == begun


def test_a_zombie_completes_nothing_behind_a_removal(place: Place) -> None:  # C72
    zombie = CheckpointLog(place.storage, "p")
    begin_generation(place.definition, zombie, "zombie", place.notes.append, around=PROCESS)
    place.begin()
    assert remove(place)
    plan = place.definition.plan
    late = Manifest(CheckpointId(3), Generation(2), 1, plan.max_parallelism, (), (), plan.state_texts())
    with pytest.raises(FencedError):
        zombie.append(late)
    assert candidates(place.log.observe()) == ()
    assert restored(place) is None


def test_ids_and_generations_go_on_above_what_was_removed(place: Place) -> None:  # R7, C72
    place.log.reserve(CheckpointId(3))
    assert remove(place)
    found = place.begin()
    assert isinstance(found, NewGeneration)
    assert found.first_checkpoint == 4
    assert found.generation == 4


def test_a_removal_begins_another_life_of_which_all_later_entries_tell(place: Place) -> None:  # LV7
    assert remove(place)
    first = place.log.known_identity(place.log.observe())
    assert first is None, "nobody has begun it yet"
    place.begin()
    begun = place.log.known_identity(place.log.observe())
    place.complete(4, 4)
    place.complete(5, 4)
    place.log.drop(CheckpointId(4), CheckpointId(5))
    observed = place.log.observe()
    assert [type(entry.content) for entry in observed.entries] == [Manifest], "the claims are pruned"
    assert life_of(observed) == 5
    place.begin()
    assert place.log.known_identity(place.log.observe()) == begun


def test_a_start_that_saw_the_former_life_does_not_begin_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # LV7
    """Between its look at the sinks and its claim the pipeline is cancelled: it would produce everything again."""
    late = CheckpointLog(place.storage, "p")
    check = restart.SinkOwnership.check

    def and_meanwhile(*arguments: Any) -> None:
        check(*arguments)
        monkeypatch.setattr(restart.SinkOwnership, "check", check)
        assert remove(place)

    monkeypatch.setattr(restart.SinkOwnership, "check", and_meanwhile)
    with pytest.raises(StorageError, match="its checkpoints were removed a moment ago; start it again"):
        begin_generation(place.definition, late, "late", place.notes.append)


def test_a_driver_of_a_run_that_was_cancelled_does_not_begin_anew(place: Place) -> None:  # C74, KR10
    """Its supervisor starts it again, because the one before died when it had given everything up."""
    assert remove(place, "supervisor")
    for after in (Generation(1), Generation(2)):
        with pytest.raises(UsageError, match="has ended, and its checkpoints were removed; start it again"):
            begin_generation(place.definition, CheckpointLog(place.storage, "p"), "supervisor", print, after)
    assert restored(place) is None


def test_a_supervisor_hears_of_the_claim_of_a_removal(place: Place) -> None:  # C74, KR10
    """Also when its driver was cancelled before that had claimed anything: it follows the one before it."""
    claimed: list[Generation] = []
    log = CheckpointLog(place.storage, "p")
    begin_generation(place.definition, CheckpointLog(place.storage, "p"), "another", place.notes.append)
    takeover = Takeover("supervisor", Generation(1), claimed.append)
    assert not remove_checkpoints(place.definition, log, takeover, place.notes.append, PROCESS)
    assert "generation 2" in place.notes[-1], "somebody else claimed behind what it follows"
    assert claimed == []
    takeover = Takeover("supervisor", Generation(2), claimed.append)
    assert remove_checkpoints(place.definition, log, takeover, place.notes.append, PROCESS)
    assert claimed == [3]


@pytest.mark.parametrize("beats", [False, True])
def test_a_standby_takes_a_removal_for_the_wish_of_the_user(place: Place, beats: bool) -> None:  # SB6, C74
    if beats:
        place.storage.put(beat_path("p", Generation(2)), [b"a sign of life"])
    remove(place)
    assert HeartbeatReader(place.storage, "p", "").all().course is Course.STOPPED
    begin_generation(place.definition, CheckpointLog(place.storage, "p"), "another", place.notes.append)
    assert HeartbeatReader(place.storage, "p", "").all().course is not Course.STOPPED


def test_a_pipeline_that_has_finished_keeps_saying_so(place: Place) -> None:  # R13
    place.complete(3, 1, is_final=True)
    assert not remove(place)
    assert "the checkpoints are kept: the pipeline has finished" in place.notes[-1]
    assert [int(manifest.checkpoint) for manifest in candidates(place.log.observe())] == [3, 2, 1]


def test_damage_is_left_to_the_user(place: Place) -> None:  # R51
    place.damage(place.complete(3, 1))
    assert not remove(place)
    assert place.notes[-1].startswith("the checkpoints are kept: ")
    assert len(objects(place, "/chk-")) == 3


def test_damage_that_only_workers_found_is_left_to_the_user(place: Place) -> None:  # R57
    newest = place.complete(3, 1)
    definition = replace(place.definition, config=replace(place.definition.config, on_damaged=PREVIOUS))
    takeover, note = Takeover("test"), place.notes.append
    assert not remove_checkpoints(definition, place.log, takeover, note, PROCESS, found_in(newest))
    assert place.notes[-1].startswith("the checkpoints are kept: ")
    assert "block checksum mismatch" in place.notes[-1]
    assert CALLS == [], "no sink is touched"


def test_what_was_set_aside_stays(place: Place) -> None:  # R51, SF7
    place.storage.put("p/aside/0000000001-0000000002/why", [b"damaged"])
    assert remove(place)
    assert len(objects(place, "/chk-0000000001")) == 1
    assert len(objects(place, "/aside/")) == 1
    assert len(objects(place, "/chk-0000000002")) == 0


def test_without_a_completed_checkpoint_nothing_was_promised(tmp_path: Path) -> None:  # C71
    place = Place(tmp_path)
    place.begin()
    assert not remove(place)
    assert place.notes == []
    assert restored(place) is None
    assert life_of(place.log.observe()) == 0


def test_a_removal_that_is_repeated_changes_nothing(place: Place) -> None:  # C72
    assert remove(place)
    assert not remove(place)
    assert restored(place) is None
    place.complete(4, 5)
    assert remove(place)
    assert restored(place) is None


def test_what_another_pipeline_was_restored_from_stays(place: Place) -> None:
    plan = place.definition.plan
    adopted = Manifest(CheckpointId(1), Generation(1), 1, plan.max_parallelism, (), (), plan.state_texts())
    other = CheckpointLog(place.storage, "q")
    other.claim("other", 0)
    other.append(replace(adopted, place=Elsewhere(place.storage.url, "p")))
    assert not remove(place)
    assert "q was restored from them, and has no checkpoint of its own yet" in place.notes[-1]
    assert restored(place) == 2
    assert other.append(replace(adopted, checkpoint=CheckpointId(2))) is Outcome.WRITTEN
    assert remove(place)


def test_what_another_pipeline_may_have_been_restored_from_stays(place: Place) -> None:
    """Its entry that says so is damaged, and may come back from a copy."""
    plan = place.definition.plan
    other = CheckpointLog(place.storage, "q")
    other.claim("other", 0)
    adopted = Manifest(CheckpointId(1), Generation(1), 1, plan.max_parallelism, (), (), plan.state_texts())
    other.append(replace(adopted, place=Elsewhere(place.storage.url, "p")))
    path = "q/log/0000000002"
    sound = bytes(place.storage.get(path))
    place.storage.put(path, [b"garbage"])
    assert not remove(place)
    assert f"{path} cannot be read" in place.notes[-1]
    assert restored(place) == 2
    place.storage.put(path, [sound])
    other.append(replace(adopted, checkpoint=CheckpointId(2)))
    assert remove(place)


def test_what_another_pipeline_was_restored_from_by_another_path_stays(place: Place) -> None:
    """Its machine has the same storage under another name: who the pipeline is tells, not where."""
    life = place.log.known_identity(place.log.observe())
    assert life is not None
    plan = place.definition.plan
    adopted = Manifest(CheckpointId(1), Generation(1), 1, plan.max_parallelism, (), (), plan.state_texts())
    other = CheckpointLog(place.storage, "q")
    other.claim("other", 0)
    there = Elsewhere("file:///mnt/of/another/machine", "p")
    origin = RestoredFrom(life.id, CheckpointId(2), "file:///mnt/of/another/machine/p")
    other.append(replace(adopted, place=there, origin=origin))
    assert not remove(place)
    assert "q was restored from them, and has no checkpoint of its own yet" in place.notes[-1]
    assert restored(place) == 2
    other.append(replace(adopted, checkpoint=CheckpointId(2), origin=origin))
    assert remove(place), "it has one of its own"
