"""The end of a generation waits for those in the driver who hear of rounds and of checkpoints (HL19)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tests.runtime.checkpoints.writing import write_snapshot
from tests.runtime.driver.test_claims_replaced import Around, AtOnce, Place

from headgate.model.ids import CheckpointId
from headgate.model.manifest import SubtaskEntry
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.protocol.checkpoints import coordinator_events
from headgate.runtime.driver.coordinator_host import CoordinatorHost, Pools


class Ending(Around):
    """Notes the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[str] = []

    def generation_done(self, effect: coordinator_events.ConcludeGeneration) -> None:
        self.ends.append(f"done with {effect.checkpoint}")

    def generation_failed(self, effect: coordinator_events.FailGeneration) -> None:
        self.ends.append(effect.failure.reason)


class Rounds(CheckpointListener):
    """Stands for those who listen; they take their time, and perhaps fail."""

    is_listening = True

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.waiting: list[Callable[[], None]] = []
        self.heard: list[int] = []

    def tell(
        self,
        tell: Callable[[CheckpointListener], None],
        failed: Callable[[str, BaseException], None],
        told: Callable[[], None],
    ) -> None:
        def call() -> None:
            tell(self)
            if self.error is None:
                told()
            else:
                failed("on_round of loop 'a'", self.error)

        self.waiting.append(call)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.heard.append(checkpoint_id)


def stopped(root: Path, rounds: Rounds) -> Ending:
    """Take the last checkpoint of a stop."""
    place, around = Place(root), Ending()
    log, begun = place.begin("first")
    parts, at_once = cast(Any, around), cast(Any, AtOnce())
    pools = Pools(at_once, at_once, at_once)
    coordination = CoordinatorHost(place.definition, begun, log, parts, parts, parts, pools, parts, rounds=rounds)
    coordination.start(1)
    coordination.handle(coordinator_events.StopRequested())
    one = CheckpointId(1)
    for subtask in place.definition.plan.subtasks():
        handle = write_snapshot(place.storage, "p", subtask, one, begun.generation, [b"state"], 0)
        coordination.handle(coordinator_events.Acknowledged(begun.generation, one, SubtaskEntry(subtask, (handle,))))
    return around


def test_the_end_waits_for_who_hears_of_rounds(tmp_path: Path) -> None:  # HL19, HL7
    rounds = Rounds()
    around = stopped(tmp_path, rounds)
    assert around.ends == []
    rounds.waiting[0]()
    assert rounds.heard == [1]
    assert around.ends == ["done with 1"]


def test_who_hears_of_rounds_and_fails_fails_the_generation(tmp_path: Path) -> None:  # HL19, HL6
    rounds = Rounds(ValueError("boom"))
    around = stopped(tmp_path, rounds)
    rounds.waiting[0]()
    assert around.ends == ["notify_checkpoint_complete(1) of on_round of loop 'a' failed: ValueError: boom"]
