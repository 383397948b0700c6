"""Tasks and what they wait with: one step at a time, in the order of the seed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from functools import partial

import pytest
from tests.conftest import few

from headgate.sim.machine.tasks import (
    SimCondition,
    SimEvent,
    SimEventLoop,
    SimLock,
    SimPool,
    SimProcess,
    SimQueue,
    SimThread,
    Tasks,
)
from headgate.sim.machine.world import Violation, World


class Room:
    """A world with one process."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.tasks = Tasks(self.world)
        self.process = SimProcess(self.tasks, "p")
        self.heard: list[object] = []

    def spawn(self, target: Callable[[], None], name: str = "t") -> None:
        self.tasks.spawn(self.process, target, name)

    def run(self, until_ms: int = 10_000) -> list[object]:
        self.world.run(lambda: False, until_ms, 10_000)
        return self.heard


@pytest.mark.parametrize("seed", few(range(20), 5))
def test_a_lock_lets_one_in_at_a_time(seed: int) -> None:
    room = Room(seed)
    lock, inside = SimLock(room.tasks), [0]

    def work() -> None:
        with lock:
            inside[0] += 1
            assert inside[0] == 1
            room.tasks.park(3)
            inside[0] -= 1
            room.heard.append(room.world.now_ms)

    for _ in range(5):
        room.spawn(work)
    assert room.run() == [3, 6, 9, 12, 15]


def test_the_seed_decides_the_order_and_nothing_else_does() -> None:
    def order(seed: int) -> list[object]:
        room = Room(seed)
        for name in "abcdef":
            room.spawn(lambda name=name: room.heard.append(name))  # type: ignore[misc]
        return room.run()

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_an_event_wakes_who_waits_and_a_timeout_is_told() -> None:
    room = Room()
    event = SimEvent(room.tasks)
    room.spawn(lambda: room.heard.append((event.wait(0.02), room.world.now_ms)))  # virtual: not a wait for anything
    room.spawn(lambda: room.heard.append((event.wait(), room.world.now_ms)))
    room.world.at(50, event.set)
    assert room.run() == [(False, 20), (True, 50)]


def test_who_gave_up_waiting_is_not_woken_for_the_old_reason() -> None:
    room = Room()
    first, second = SimEvent(room.tasks), SimEvent(room.tasks)

    def wait() -> None:
        first.wait(0.01)  # virtual: not a wait for anything
        room.heard.append((second.wait(0.1), room.world.now_ms))  # virtual: not a wait for anything

    room.spawn(wait)
    room.world.at(20, first.set)
    assert room.run() == [(False, 110)]


def test_a_condition_is_left_while_waiting() -> None:
    room = Room()
    condition, ready = SimCondition(room.tasks), [False]

    def wait() -> None:
        with condition:
            room.heard.append((condition.wait_for(lambda: ready[0], 1.0), room.world.now_ms))  # not a wait for anything

    def notify() -> None:
        room.tasks.park(30)
        with condition:
            ready[0] = True
            condition.notify_all()

    room.spawn(wait)
    room.spawn(notify)
    assert room.run() == [(True, 30)]


def test_a_queue_keeps_its_order_and_is_empty_in_time() -> None:
    room = Room()
    line: SimQueue[int] = SimQueue(room.tasks)

    def take() -> None:
        for _ in range(3):
            room.heard.append(line.get())
        with pytest.raises(queue.Empty):
            line.get(timeout=0.0004)  # not a wait for anything; never at the same moment: somebody would spin
        room.heard.append(room.world.now_ms)

    room.spawn(take)
    for number in range(3):
        room.world.at(5 + number, line.put, number)
    assert room.run() == [0, 1, 2, 8]


def test_a_pool_runs_no_more_at_a_time_than_it_may() -> None:
    room = Room()
    running, most = [0], [0]

    def call(number: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        room.tasks.park(5)
        running[0] -= 1
        room.heard.append(number)

    def submit() -> None:
        pool = SimPool(room.tasks, room.process, 2, "pool")
        for number in range(5):
            pool.submit(call, number)
        pool.shutdown()
        room.heard.append("shut")

    room.spawn(submit)
    assert sorted(room.run()[:5], key=str) == [0, 1, 2, 3, 4]
    assert room.heard[5] == "shut"
    assert most == [2]


def test_a_thread_that_ends_goes_back_to_nobody_but_the_scheduler() -> None:
    room = Room()

    def parent() -> None:
        child = SimThread(room.tasks, room.process, lambda: room.heard.append("child"), "child")
        child.start()
        room.tasks.park(100)
        room.heard.append(room.world.now_ms)
        assert not child.is_alive()
        child.join()

    room.spawn(parent)
    assert room.run() == ["child", 100]


def test_a_dead_process_makes_no_step_and_a_stopped_one_goes_on_later() -> None:
    room = Room()
    other = SimProcess(room.tasks, "q")

    def tick(process: SimProcess) -> Callable[[], None]:
        def run() -> None:
            for _ in range(4):
                room.tasks.park(10)
                room.heard.append((process.name, room.world.now_ms))

        return run

    room.spawn(tick(room.process))
    room.tasks.spawn(other, tick(other), "t")
    room.world.at(15, room.process.kill)
    room.world.at(15, other.pause)
    room.world.at(95, other.resume)
    heard = room.run()
    assert [one for one in heard if one[0] == "p"] == [("p", 10)]
    assert [one for one in heard if one[0] == "q"] == [("q", 10), ("q", 95), ("q", 105), ("q", 115)]


def test_a_process_that_exits_does_nothing_behind_it() -> None:
    room = Room()
    codes: list[int] = []
    process = SimProcess(room.tasks, "q", codes.append)

    def main() -> None:
        try:
            process.end(75)
        finally:
            room.heard.append("on the way out")

    room.tasks.spawn(process, main, "main")
    assert room.run() == []
    assert codes == [75]


def test_what_a_thread_raises_is_a_finding() -> None:
    room = Room()

    def fail() -> None:
        raise ValueError("oops")

    room.spawn(fail, "broken")
    with pytest.raises(Violation, match="p/broken: ValueError: oops"):
        room.run()


def test_when_a_run_is_over_every_task_ends_and_changes_nothing() -> None:
    room = Room()
    event = SimEvent(room.tasks)

    def wait() -> None:
        try:
            event.wait()
        finally:
            room.tasks.park(1)
            room.heard.append("never")

    room.spawn(wait)
    room.run()
    room.tasks.take_down()
    assert room.heard == []


def test_an_event_loop_runs_coroutines_in_the_order_of_the_seed() -> None:
    async def returning(value: int) -> int:
        await asyncio.sleep(0)  # another turn: not a wait for anything
        return value

    async def raising() -> None:
        raise ValueError

    def ends(seed: int) -> list[object]:
        room = Room(seed)
        loop = SimEventLoop(room.tasks, room.process, "loop")

        def work() -> None:
            for number in range(5):
                loop.submit(partial(returning, number), lambda value, error: room.heard.append(value))
            loop.submit(raising, lambda value, error: room.heard.append(type(error)))

        room.spawn(work)
        return room.run()

    orders = [ends(seed) for seed in range(5)]
    assert all(set(order) == {0, 1, 2, 3, 4, ValueError} for order in orders)
    assert orders == [ends(seed) for seed in range(5)]
    assert len({tuple(map(str, order)) for order in orders}) > 1
