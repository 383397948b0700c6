"""Orders and resets that are out of date: they delete nothing, stand in nobody's way, and go (SO2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs.test_reset_moved import Moved

from headgate.api import launch
from headgate.codec.json_files import Ending
from headgate.errors import FencedError, StorageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import ResetOrder
from headgate.model.progress import SilentObserver
from headgate.protocol.checkpoints import recovery as deciding
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.sink_registry import SinkRegistry
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock
from headgate.runtime.driver.reset import Reset
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage

OLD, NEW = "p/inputs/rows/part-0", "p/aside/0000000001-0000000005/why"
A, B = "a" * 16, "b" * 16


def begun(storage: Storage) -> CheckpointLog:
    """A pipeline that has claimed once."""
    log = CheckpointLog(storage, "p")
    log.identity("here", 0)
    log.claim("a driver", 0)
    return log


class Sleeper(Reset):
    """A reset that sleeps between its step and what follows."""

    meanwhile: Callable[[], None]

    def _finish(self, *arguments: Any) -> None:
        self.meanwhile()
        super()._finish(*arguments)


def sleeping(storage: Storage, meanwhile: Callable[[], None]) -> None:
    sleeper = Sleeper(storage, "p", None)
    sleeper.meanwhile = meanwhile
    sleeper.carry_out(sleeper.plan())


def ordered(storage: Storage, token: str) -> None:
    """Somebody orders and decides, and dies."""
    log = CheckpointLog(storage, "p")
    log.sink_registry.give(ResetOrder(token, log.sink_registry.targets() or ()))
    log.start_over(token, 0, log.observe(), Generation(0))


def test_a_reset_that_wakes_behind_a_later_life_leaves_what_is_its_own() -> None:
    storage = MemoryStorage()
    begun(storage).sink_registry.note(0, ())
    storage.put(OLD, [b"of the first life"])
    files = "p/chk-0000000003/v-0.g2"

    def later() -> None:
        assert Reset(storage, "p", None).finish()
        assert storage.list(OLD) == []
        CheckpointLog(storage, "p").claim("a later driver", 0)
        for path in (OLD, NEW, files):
            storage.put(path, [b"of the second life"])

    sleeping(storage, later)
    assert [path for path in (OLD, NEW, files) if path not in storage.list("p")] == []


def test_a_reset_that_wakes_behind_a_later_order_leaves_it() -> None:
    storage = MemoryStorage()
    begun(storage).sink_registry.note(0, ())

    def later() -> None:
        assert Reset(storage, "p", None).finish()
        CheckpointLog(storage, "p").claim("a later driver", 0)
        ordered(storage, B)

    sleeping(storage, later)
    log = CheckpointLog(storage, "p")
    assert deciding.decided_reset(log.observe()) == B
    assert log.sink_registry.orders() == (B,)
    assert Reset(storage, "p", None).finish()


def test_a_start_that_captures_behind_a_finished_reset_keeps_its_capture() -> None:
    storage = MemoryStorage()
    begun(storage).sink_registry.note(0, ())
    storage.put(OLD, [b"captured once"])

    def later() -> None:
        assert Reset(storage, "p", None).finish()
        storage.put(OLD, [b"captured anew"])  # the start claims afterwards

    sleeping(storage, later)
    assert storage.get(OLD) == b"captured anew"


def test_what_comes_behind_the_order_is_not_removed() -> None:
    storage = MemoryStorage()
    begun(storage).sink_registry.note(0, ())
    for path in (OLD, NEW):
        storage.put(path, [b"of the first life"])
    sleeping(storage, lambda: storage.put("p/inputs/rows/part-1", [b"of a start that claims next"]))
    assert storage.list("p/inputs") == ["p/inputs/rows/part-1"]
    assert storage.list("p/aside") == []


@pytest.fixture
def moved(tmp_path: Path) -> Moved:
    return Moved(tmp_path, ("app/a",))


def records(moved: Moved) -> SinkRegistry:
    return SinkRegistry(open_storage(str(moved.root / "home")), "p")


def test_an_order_that_never_counted_stands_in_nobodys_way(moved: Moved) -> None:  # SO2
    records(moved).give(ResetOrder(A, ()))
    lock = PipelineLock.acquire(str(moved.root / "home"), "p", "a driver")
    launch.finish_reset(moved.program(), SilentObserver())
    lock.release(Ending.CANCELLED, reason="")
    assert records(moved).orders() == (A,)


def test_a_start_removes_orders_that_never_counted(moved: Moved) -> None:  # SO2
    records(moved).give(ResetOrder(A, ()))
    moved.produce()
    assert records(moved).orders() == ()


def test_a_reset_removes_orders_that_never_counted(moved: Moved) -> None:  # SO2
    records(moved).give(ResetOrder(A, ()))
    moved.reset()
    assert records(moved).orders() == ()


def test_an_order_that_a_start_removed_cannot_count_any_more(moved: Moved, monkeypatch: Any) -> None:  # SO2
    """The start sees an order, and then the order is decided or the start claims: one of the two fails."""
    real = CheckpointLog.claim

    def claim(log: Any, *arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointLog, "claim", real)
            ordered(open_storage(str(moved.root / "home")), B)
        return real(log, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointLog, "claim", claim)
        patch.setattr("headgate.runtime.driver.restart.RETRY_PAUSES_S", ())
        with pytest.raises(StorageError, match="removed a moment ago"):
            moved.produce()
    assert records(moved).orders() == (B,)

    with Reset.holding_the_lock(str(moved.root / "home"), "p", moved.program()) as resetting:
        resetting.finish()
        plan = resetting.plan()
        moved.produce()
        with pytest.raises(FencedError):
            resetting.carry_out(plan)
    moved.produce()
    assert records(moved).orders() == ()
    assert moved.counts() == {"app/a": 2}


def test_a_takeover_waits_for_a_reset_that_is_under_way(moved: Moved) -> None:  # SO3
    """What a standby takes for somebody who was quicker."""
    ordered(open_storage(str(moved.root / "home")), B)
    lock = PipelineLock.acquire(str(moved.root / "home"), "p", "a reset")
    with pytest.raises(AlreadyRunning, match="is run by a reset"):
        launch.finish_reset(moved.program(), SilentObserver())
    lock.release(Ending.CANCELLED, reason="")
    launch.finish_reset(moved.program(), SilentObserver())
    assert records(moved).orders() == ()
