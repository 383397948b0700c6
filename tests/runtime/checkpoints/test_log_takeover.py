"""Who was replaced finds out, and what a replaced driver leaves in the log counts for nothing (R40–R43).

The sleeper is a driver that was stopped at some point while its heir took over, completed checkpoints and pruned.

A driver that is stopped before any single storage operation, while its heir takes over; then it goes on, or dies.

Every operation of every step is such a point (R40–R43).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.errors import FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim, Manifest
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.storage.memory import MemoryStorage

RETAINED = 2


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage("takeover"))


class Life:
    """A driver's generation: claims, completes checkpoints, prunes, as the coordinator orders it."""

    def __init__(self, storage: FaultyStorage, owner: str, mine: Generation | None = None) -> None:
        self.storage, self.owner = storage, owner
        self.log = CheckpointLog(storage, "p")
        claimed = self.log.claim(owner, 0, mine)
        self.generation = claimed.next.generation
        self.first = self.next = claimed.first_checkpoint
        self.retained = [m.checkpoint for m in reversed(recovery.candidates(claimed.log))]

    def complete(self, times: int = 1) -> None:
        for _ in range(times):
            checkpoint, self.next = self.next, CheckpointId(self.next + 1)
            self.log.reserve(checkpoint)
            kept = [*self.retained, checkpoint][-RETAINED:]
            assert self.log.append(self.manifest(checkpoint), kept[0]) is Outcome.WRITTEN
            for dropped in self.retained[: len(self.retained) + 1 - len(kept)]:
                self.log.drop(dropped, CheckpointId(dropped + 1))
            self.retained = kept

    def manifest(self, checkpoint: int) -> Manifest:
        return Manifest(CheckpointId(checkpoint), self.generation, 1, 128, ())


def dying_before_it_looks(storage: FaultyStorage, life: Life, checkpoint: int) -> None:
    """``life`` puts a manifest where its number is free again, and dies before it looks whether anything follows."""
    storage.inject(Fault(FaultKind.IO_ERROR, operation="list", path_part="log", times=99))
    assert life.log.append(life.manifest(checkpoint)) is Outcome.UNKNOWN
    storage.heal()


def numbers(storage: FaultyStorage) -> list[int]:
    return [int(path.rsplit("/", 1)[1]) for path in storage.list("p/log")]


# -- whoever was replaced finds out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 2, 6])
def test_whoever_was_replaced_finds_out_whatever_was_pruned(storage: FaultyStorage, times: int) -> None:  # R40
    sleeper = Life(storage, "sleeper")
    sleeper.complete(2)
    heir = Life(storage, "heir")
    heir.complete(times)
    assert sleeper.log.newer_generation() == heir.generation
    with pytest.raises(FencedError) as found:
        sleeper.log.claim("sleeper", 0, sleeper.generation)
    assert (found.value.mine, found.value.newest) == (sleeper.generation, heir.generation)
    with pytest.raises(FencedError):
        sleeper.log.append(sleeper.manifest(3))
    assert heir.log.newer_generation() is None
    heir.complete(3)


def test_whoever_was_replaced_before_its_first_checkpoint_finds_out(storage: FaultyStorage) -> None:  # R40
    sleeper = Life(storage, "sleeper")
    heir = Life(storage, "heir")
    heir.complete(6)
    assert sleeper.log.newer_generation() == heir.generation
    with pytest.raises(FencedError):
        sleeper.log.claim("sleeper", 0, sleeper.generation)


def test_a_driver_that_claimed_again_unheard_is_not_replaced_by_itself(storage: FaultyStorage) -> None:  # R40
    life = Life(storage, "one")
    life.complete(3)
    storage.inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent"))
    with pytest.raises(Exception, match="timed out"):
        life.log.claim("one", 0, life.generation)
    again = Life(storage, "one", life.generation)
    assert again.generation == life.generation + 2
    again.complete()


# -- what a replaced driver leaves counts for nothing ------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3, 6])
def test_the_newest_checkpoint_is_the_newest_in_the_log(storage: FaultyStorage, times: int) -> None:  # R8, R41
    """The sleeper's manifest has a higher id, or the same one, and lies at a number that was pruned."""
    sleeper = Life(storage, "sleeper")
    sleeper.complete(2)
    heir = Life(storage, "heir")
    heir.complete(times)
    kept = numbers(storage)
    if min(kept) <= 4:
        assert times == 1, "nothing is pruned yet where the sleeper writes"
        return
    for checkpoint in (3, 99):
        dying_before_it_looks(storage, sleeper, checkpoint)
        assert numbers(storage) == [4, *kept]
        observed = CheckpointLog(storage, "p").observe()
        assert [m.checkpoint for m in recovery.candidates(observed)] == [*reversed(heir.retained)]
        assert observed.lost() == (), "what was left is no damage"
        storage.delete("p/log/0000000004")


def test_what_a_replaced_driver_left_goes_with_the_next_prune(storage: FaultyStorage) -> None:  # R41
    sleeper = Life(storage, "sleeper")
    heir = Life(storage, "heir")
    heir.complete(4)
    dying_before_it_looks(storage, sleeper, 50)
    third = Life(storage, "third")
    third.complete()
    assert 2 not in numbers(storage)
    assert [m.generation for m in recovery.candidates(third.log.observe())] == [3, 2]


def test_nothing_older_is_restored_instead_of_a_damaged_newest_one(storage: FaultyStorage) -> None:  # R41
    """With one checkpoint retained the stale manifest lies right before the one that counts."""
    sleeper = Life(storage, "sleeper")
    heir = Life(storage, "heir")
    heir.complete(1)
    storage.delete("p/log/0000000002")  # as if one were retained, and the claim pruned
    dying_before_it_looks(storage, sleeper, 50)
    observed = CheckpointLog(storage, "p").observe()
    assert [m.generation for m in recovery.candidates(observed)] == [2]


# -- ids --------------------------------------------------------------------------------------------------------------


def test_two_generations_never_get_the_same_id(storage: FaultyStorage) -> None:  # R7, R42
    """The sleeper reserves an id while its heir claims: either it is refused, or the heir begins above it."""
    sleeper = Life(storage, "sleeper")
    sleeper.complete(2)
    heir = Life(storage, "heir")
    with pytest.raises(FencedError):
        sleeper.log.reserve(sleeper.next)
    heir.log.reserve(heir.next)


@pytest.mark.parametrize("look", [1, 2])
def test_an_id_reserved_while_another_driver_claims_is_seen_or_refused(storage: FaultyStorage, look: int) -> None:
    """R42: the reservation looks at the log after its put, the claim looks at the ids after its put."""
    sleeper = Life(storage, "sleeper")
    reserved: list[int] = []

    def reserve(_: float) -> None:
        storage.heal()
        try:
            sleeper.log.reserve(CheckpointId(1))
            reserved.append(1)
        except FencedError:
            pass

    storage._wait = reserve
    what = ("put_if_absent", "log") if look == 1 else ("list", "p/log")
    storage.inject(Fault(FaultKind.SLOW, operation=what[0], path_part=what[1], first=look))
    heir = Life(storage, "heir")
    assert heir.next not in reserved
    assert heir.next == 2 or not reserved


# -- failed claims -----------------------------------------------------------------------------------------------------


def test_claims_that_led_nowhere_are_pruned(storage: FaultyStorage) -> None:  # R43
    first = Life(storage, "one")
    for _ in range(5):
        first = Life(storage, "one", first.generation)
    assert numbers(storage) == [6]
    assert first.log.observe().lost() == ()
    first.complete(2)
    last = first.generation
    for _ in range(50):
        last = Life(storage, "one", last).generation
    assert numbers(storage) == [6, 7, 8, 58]
    log = CheckpointLog(storage, "p").observe()
    assert log.lost() == ()
    assert [m.checkpoint for m in recovery.candidates(log)] == [2, 1]
    assert last == 56


def test_a_lost_checkpoint_behind_a_pruned_claim_is_still_missed(storage: FaultyStorage) -> None:  # R9, R43
    first = Life(storage, "one")
    first.complete(1)
    for _ in range(3):
        Life(storage, "one", Generation(9))
    storage.delete("p/log/0000000002")
    storage.delete("p/log-hint")
    assert CheckpointLog(storage, "p").observe().lost() == (2,)


def test_a_manifest_at_the_number_of_a_pruned_claim_counts_for_nothing(storage: FaultyStorage) -> None:  # R41, R43
    """Its number looks free; the generation behind it has chosen what to restore already."""
    sleeper = Life(storage, "sleeper")
    sleeper.complete(1)
    heir = Life(storage, "heir")
    heir = Life(storage, "heir", heir.generation)
    assert numbers(storage) == [1, 2, 4]
    dying_before_it_looks(storage, sleeper, 2)
    assert numbers(storage) == [1, 2, 3, 4]
    observed = CheckpointLog(storage, "p").observe()
    assert [m.checkpoint for m in recovery.candidates(observed)] == [1]
    heir.complete()
    assert [m.checkpoint for m in recovery.candidates(heir.log.observe())] == [heir.next - 1, 1]
    with pytest.raises(FencedError):
        Life(storage, "sleeper", sleeper.generation)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_crash_while_claims_are_pruned_leaves_no_gap(storage: FaultyStorage, failing: int) -> None:  # R43
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete", times=99))
    for _ in range(4):
        Life(storage, "one")
    storage.heal()
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete", first=failing, times=99))
    Life(storage, "one")
    storage.heal()
    assert CheckpointLog(storage, "p").observe().lost() == ()
    assert all(isinstance(e.content, Claim) for e in CheckpointLog(storage, "p").observe().entries)


def test_a_claim_that_could_not_be_pruned_goes_with_a_later_one(storage: FaultyStorage) -> None:  # R43
    """Checkpoints were completed behind it meanwhile: it is not among the newest claims any more."""
    one = Life(storage, "one")
    one.complete()
    storage.inject(Fault(FaultKind.IO_ERROR, operation="delete", path_part="log", times=99))
    one = Life(storage, "one", one.generation)
    one = Life(storage, "one", one.generation)
    storage.heal()
    one.complete()
    assert numbers(storage) == [1, 2, 3, 4, 5]
    one = Life(storage, "one", one.generation)
    assert numbers(storage) == [1, 2, 4, 5, 6], "those that led to a checkpoint go with it"
    log = one.log.observe()
    assert log.lost() == ()
    assert [m.checkpoint for m in recovery.candidates(log)] == [2, 1]
    storage.put("p/log/0000000005", [b"damaged"])
    assert CheckpointLog(storage, "p").observe().lost() == (), "a manifest that cannot be read follows its claim"


@pytest.mark.parametrize("bad_reads", [1, 2, 99])
def test_a_hint_that_was_read_wrongly_loses_no_entry(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch, bad_reads: int
) -> None:
    """A flipped bit makes another number of it: one that tells of an entry that never was."""
    Life(storage, "first").complete(3)
    get, left = storage.get, [bad_reads]

    def flipped(path: str) -> bytes:
        data = get(path)
        if path == "p/log-hint" and left[0]:
            left[0] -= 1
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    monkeypatch.setattr(storage, "get", flipped)
    assert CheckpointLog(storage, "p").observe().lost() == ()
    Life(storage, "second")
    assert CheckpointLog(storage, "p").observe().lost() == ()


def test_a_hint_that_cannot_be_read_now_is_not_an_absent_one(storage: FaultyStorage) -> None:
    Life(storage, "first").complete(1)
    storage.inject(Fault(FaultKind.IO_ERROR, "get", "log-hint"))
    with pytest.raises(StorageError):
        CheckpointLog(storage, "p").observe()


Step = Callable[[Life], object]

OPERATIONS_MAX = 60
"""More than any step needs: reaching it would mean that a step does not end."""


class Died(Exception):  # noqa: N818 - what happens to it, not what goes wrong
    """The sleeper does not come back."""


def claims_again(life: Life) -> object:
    return Life(life.storage, life.owner, life.generation)


def starts_anew(life: Life) -> object:
    return Life(life.storage, "another")


def appends(life: Life) -> object:
    return life.log.append(life.manifest(life.next), life.retained[-1])


def reserves(life: Life) -> object:
    life.log.reserve(life.next)
    return life.next


def drops(life: Life) -> object:
    life.log.drop(life.retained[0], life.retained[1])
    return None


def looks(life: Life) -> object:
    return life.log.newer_generation()


STEPS: list[Step] = [claims_again, starts_anew, appends, reserves, drops, looks]


class Scene:
    """A sleeper with two checkpoints; before operation ``point`` of its step the heir completes ``times`` more."""

    def __init__(self, times: int, point: int, *, dies: bool) -> None:
        self.storage = FaultyStorage(MemoryStorage())
        self.sleeper = Life(self.storage, "sleeper")
        self.sleeper.complete(2)
        self.heir: Life | None = None
        self.seen: tuple[int, ...] = ()
        self._times, self._dies = times, dies
        self.storage._wait = self._sleep
        self.storage.inject(Fault(FaultKind.SLOW, first=point))

    def _sleep(self, _: float) -> None:
        self.storage.heal()
        self.heir = Life(self.storage, "heir")
        self.seen = tuple(self.heir.retained)
        self.heir.complete(self._times)
        if self._dies:
            self.storage._wait = self._die
            self.storage.inject(Fault(FaultKind.SLOW, first=2))  # behind the effect of the one that was delayed

    def _die(self, _: float) -> None:
        raise Died

    def run(self, step: Step) -> object:
        """Return what the step returned, or the error that ended it."""
        try:
            return step(self.sleeper)
        except (FencedError, StorageError, Died) as error:
            return error
        finally:
            self.storage.heal()


def points(step: Step, times: int, *, dies: bool) -> list[tuple[Scene, object]]:
    """Run ``step`` once for each of its operations, until it has none left."""
    found = []
    for point in range(1, OPERATIONS_MAX):
        scene = Scene(times, point, dies=dies)
        result = scene.run(step)
        if scene.heir is None:
            return found
        found.append((scene, result))
    raise AssertionError("the step does not end")


def judge(scene: Scene, step: Step, result: object) -> None:
    heir, sleeper = scene.heir, scene.sleeper
    assert heir is not None
    log = CheckpointLog(scene.storage, "p").observe()
    assert log.lost() == (), "nothing is damaged"
    found = [(m.generation, m.checkpoint) for m in candidates(log)]
    assert [g for g, _ in found] == sorted((g for g, _ in found), reverse=True)
    assert len({c for _, c in found}) == len(found)
    if isinstance(result, Outcome):
        assert result is not Outcome.FAILED
        assert result is not Outcome.WRITTEN or sleeper.next in scene.seen, "what is said to be written counts"
    if step is reserves and not isinstance(result, Exception):
        assert heir.first > sleeper.next, "no id is used twice"
    if isinstance(result, Life):
        assert step is starts_anew or result.generation < heir.generation, "who was replaced does not come back"
        older, newer = sorted((heir, result), key=lambda life: life.generation)
        assert newer.generation > older.generation, "no number is used twice"
        assert older.log.newer_generation() == newer.generation, "the other one finds out"
        newer.complete(2)
        return
    assert sleeper.log.newer_generation() == heir.generation
    with pytest.raises(FencedError):
        Life(scene.storage, "sleeper", sleeper.generation)
    heir.complete(3)
    third = Life(scene.storage, "third")
    assert third.retained == heir.retained
    third.complete(3)
    kept = CheckpointLog(scene.storage, "p").observe()
    assert [m.generation for m in candidates(kept)] == [third.generation] * 2
    assert len([e for e in kept.entries if isinstance(e.content, Manifest)]) == 2, "and what was left is gone"


@pytest.mark.parametrize("times", [0, 1, 2, 6])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_driver_that_slept_before_any_operation_changes_nothing(step: Step, times: int) -> None:  # R40
    cases = points(step, times, dies=False)
    assert cases
    for scene, result in cases:
        judge(scene, step, result)


@pytest.mark.parametrize("times", [0, 1, 2, 6])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_driver_that_dies_behind_any_operation_leaves_nothing_that_counts(step: Step, times: int) -> None:
    for scene, result in points(step, times, dies=True):
        if isinstance(result, Died) and step is starts_anew:
            third = Life(scene.storage, "third")
            third.complete(3)
        else:
            judge(scene, step, result)


def test_what_is_appended_while_the_log_is_read_is_not_lost() -> None:  # R9, R40
    """The hint is read first: it knows nothing that the listing behind it does not show."""
    for point in range(1, OPERATIONS_MAX):
        storage = FaultyStorage(MemoryStorage())
        life = Life(storage, "one")
        life.complete(3)
        storage._wait = lambda _, storage=storage, life=life: (storage.heal(), life.complete(1))  # type: ignore[misc]
        storage.inject(Fault(FaultKind.SLOW, first=point))
        assert CheckpointLog(storage, "p").observe().lost() == ()
        if life.next == 4:
            assert point > 4, "the hint, the listing, and each entry"
            return
    raise AssertionError("the log is read without end")
