"""A driver that is stopped before any single storage operation, while its heir takes over; then it goes on, or dies.

Every operation of every step is such a point (R40–R43).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.runtime.checkpoints.test_log_takeover import Life
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.errors import FencedError, StorageError
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.storage.memory import MemoryStorage

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
