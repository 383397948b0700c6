"""The driver's side of loops and of listeners to rounds: reports, messages and callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from tests.runtime.checkpoints.writing import write_snapshot
from tests.runtime.driver.test_restart_replaced import Around, AtOnce, Place

import headgate as hg
from headgate.codec import messages
from headgate.model.config import PipelineConfig
from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.manifest import SubtaskEntry
from headgate.model.plan import PipelineDefinition, make_plan
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.operators.loop_head import LoopHeadSpec
from headgate.protocol import loop_prober
from headgate.protocol.checkpoints import coordinator_events
from headgate.runtime.driver.coordinator_host import CoordinatorHost, LoopHost, Pools, RoundCallbacks

SCHEMA = pa.schema([("id", pa.int64())])
NOW = Generation(3)
WAIT = 120
BALANCED = Partitioner.REBALANCE


def definition(**callbacks: Callable[[int], object] | None) -> PipelineDefinition:
    """source ─► one loop of a single node for each keyword, side by side ─► sink."""
    nodes = [Node(NodeName("source"), Role.SOURCE, (), None)]
    for name, callback in callbacks.items():
        loop = NodeName(name)
        spec = LoopHeadSpec((), SCHEMA, "round" if callback is not None else None, on_round=callback)
        inputs, feedback = (Edge(NodeName("source"), BALANCED),), (Edge(loop, BALANCED),)
        nodes.append(Node(loop, Role.LOOP_HEAD, inputs, spec, feedback=feedback, loops=(loop,)))
    nodes.append(Node(NodeName("out"), Role.SINK, tuple(Edge(NodeName(name), BALANCED) for name in callbacks), None))
    graph = Graph(tuple(nodes))
    return PipelineDefinition(PipelineConfig("p", 1, "memory://"), graph, make_plan(graph, 1, 128), {})


class Driver:
    """What loops need, written down. Timers fire when told."""

    def __init__(self, generation: Generation = NOW, **callbacks: Callable[[int], object] | None) -> None:
        self.sent: list[messages.ToWorker] = []
        self.armed: list[tuple[object, int, Callable[[], None]]] = []
        self.notes: list[str] = []
        self.callbacks = RoundCallbacks(self.notes.append)
        self.looping = LoopHost(definition(**callbacks), generation, self, self, self.callbacks)

    def broadcast(self, message: messages.ToWorker) -> None:
        self.sent.append(message)

    def post(self, call: Callable[[], None]) -> None:
        raise AssertionError("nothing of loops happens in another thread")

    def cancel_timer(self, timer: object) -> None:
        raise AssertionError("loops forget no timer")

    def arm(self, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        self.armed.append((timer, after_ms, fire))

    def ended(self, loop: str, generation: int = NOW) -> None:
        self.looping.on_message(entrance_ended(loop, generation=generation))

    def returned(self, loop: str, number: int, count: int, *, highest: int = -1, generation: int = NOW) -> None:
        event = loop_prober.ProbeReturned(head(loop), number, count, highest)
        self.looping.on_message(messages.ProbeReturned(generation, event))

    def taken(self) -> list[messages.ToWorker]:
        sent, self.sent[:] = list(self.sent), []
        return sent

    def wait(self) -> None:
        """Wait for the callbacks."""
        done = threading.Event()
        self.callbacks.when_done(done.set)
        assert done.wait(WAIT)


def probe(loop: str, number: int, *, is_last: bool = False) -> messages.StartProbe:
    return messages.StartProbe(NOW, loop, loop_prober.Probe(number, is_last_watermark=is_last))


def head(loop: str) -> SubtaskId:
    return SubtaskId(VertexId(loop), 0)


def entrance_ended(loop: str, *, highest: int = -1, generation: int = NOW) -> messages.EntranceEnded:
    return messages.EntranceEnded(generation, loop_prober.EntranceEnded(head(loop), -1, highest))


def test_an_empty_loop_ends_after_the_last_watermark_went_round() -> None:  # L34, L37
    driver = Driver(a=None)
    driver.ended("a")
    driver.returned("a", 1, 0)
    assert driver.taken() == [probe("a", 1)]
    ((_, _, fire),) = driver.armed  # the first count does not decide
    fire()
    driver.returned("a", 2, 0)
    assert driver.taken() == [probe("a", 2), probe("a", 3, is_last=True)]
    driver.returned("a", 3, 0)
    assert driver.taken() == [messages.EndLoop(NOW, "a")]


def test_a_busy_loop_is_asked_again_after_a_pause_and_not_after_the_end_of_the_generation() -> None:
    driver = Driver(a=None)
    driver.ended("a")
    assert driver.taken() == [probe("a", 1)]
    driver.returned("a", 1, 7)
    assert driver.taken() == []
    ((_, after_ms, fire),) = driver.armed
    assert after_ms > 0
    driver.looping.close()
    fire()
    assert driver.taken() == [], "its generation is over"


def test_timers_of_nests_and_generations_do_not_replace_each_other() -> None:
    first, second = Driver(a=None, b=None), Driver(Generation(4), a=None)
    for loop in ("a", "b"):
        first.ended(loop)
        first.returned(loop, 1, 1)
    second.ended("a", 4)
    second.returned("a", 1, 1, generation=4)
    assert len({timer for timer, _, _ in first.armed + second.armed}) == 3


def test_each_nest_ends_by_itself() -> None:
    driver = Driver(a=None, b=None)
    driver.ended("b")
    assert driver.taken() == [probe("b", 1)]
    driver.ended("a")
    assert driver.taken() == [probe("a", 1)]


def test_reports_of_other_generations_of_strangers_and_after_the_end_are_ignored() -> None:
    driver = Driver(a=None)
    driver.ended("a", NOW - 1)
    driver.ended("a", NOW + 1)
    driver.ended("source")
    driver.ended("gone")
    driver.looping.close()
    driver.ended("a")
    assert (driver.taken(), driver.armed) == ([], [])


def test_the_callback_hears_of_every_round_in_order() -> None:  # L35
    heard: list[int] = []
    driver = Driver(a=heard.append)
    driver.looping.on_message(entrance_ended("a", highest=2))
    for number in (1, 2, 3):
        driver.returned("a", number, 1, highest=2)
    driver.wait()
    assert heard == [0, 1, 2]


def test_what_a_callback_raises_becomes_a_note_and_the_next_round_is_called() -> None:
    heard: list[int] = []

    def fail_first(round_: int) -> None:
        heard.append(round_)
        if round_ == 0:
            raise ValueError("no space on the board")

    driver = Driver(a=fail_first)
    driver.looping.on_message(entrance_ended("a", highest=1))
    driver.returned("a", 1, 1, highest=1)
    driver.returned("a", 2, 1, highest=1)
    driver.wait()
    assert heard == [0, 1]
    assert driver.notes == ["on_round of loop 'a' failed in round 0: ValueError: no space on the board"]


def test_callbacks_that_wait_run_after_the_end_of_their_generation_and_before_those_of_the_next() -> None:  # L35
    heard: list[str] = []
    gate = threading.Event()

    def slow(round_: int) -> None:
        assert gate.wait(WAIT)
        heard.append(f"old {round_}")

    driver = Driver(a=slow)
    driver.looping.on_message(entrance_ended("a", highest=1))
    driver.returned("a", 1, 1, highest=1)
    driver.looping.close()
    driver.callbacks.submit(NodeName("a"), lambda round_: heard.append(f"new {round_}"), 0)
    gate.set()
    driver.wait()
    assert heard == ["old 0", "new 0"]


class Listening(hg.CheckpointListener):
    """Hears of rounds and of checkpoints."""

    def __init__(self, heard: list[str], fails: bool = False) -> None:
        self.heard, self.fails = heard, fails

    def __call__(self, round_: int) -> None:
        self.heard.append(f"round {round_}")

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.heard.append(f"completed {checkpoint_id}")
        if self.fails:
            raise ValueError("no space on the board")


def told_by(driver: Driver, heard: list[str]) -> None:
    driver.looping.tell(
        lambda listener: listener.notify_checkpoint_complete(7),
        lambda whose, error: heard.append(f"{whose}: {error}"),
        lambda: heard.append("told"),
    )
    driver.wait()


def test_who_hears_of_rounds_hears_of_checkpoints_in_turn() -> None:
    heard: list[str] = []
    driver = Driver(a=Listening(heard))
    assert driver.looping.is_listening
    driver.looping.on_message(entrance_ended("a", highest=0))
    driver.returned("a", 1, 1, highest=0)
    told_by(driver, heard)
    assert heard == ["round 0", "completed 7", "told"]
    assert not Driver(a=heard.append).looping.is_listening  # type: ignore[arg-type]


def test_one_of_several_who_fails_is_named_and_nothing_is_confirmed() -> None:
    heard: list[str] = []
    told_by(Driver(a=Listening(heard, fails=True), b=Listening(heard)), heard)
    assert heard == ["completed 7", "on_round of loop 'a': no space on the board", "completed 7"]


def test_without_callbacks_there_is_nothing_to_wait_for_and_no_thread() -> None:
    driver = Driver(a=None)
    done: list[threading.Thread] = []
    driver.callbacks.when_done(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_closing_ends_the_thread_of_the_callbacks_behind_them() -> None:
    heard: list[threading.Thread] = []
    callbacks = RoundCallbacks(lambda _: None)
    done = threading.Event()
    callbacks.submit(NodeName("a"), lambda _: heard.append(threading.current_thread()), 0)
    callbacks.when_done(done.set)
    callbacks.close()
    assert done.wait(WAIT)
    heard[0].join(WAIT)
    assert not heard[0].is_alive()


# -- the end of a generation waits for those in the driver who hear of rounds and of checkpoints (hl19) -----


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


def test_the_end_waits_for_who_hears_of_rounds(tmp_path: Path) -> None:  # HL7
    rounds = Rounds()
    around = stopped(tmp_path, rounds)
    assert around.ends == []
    rounds.waiting[0]()
    assert rounds.heard == [1]
    assert around.ends == ["done with 1"]


def test_who_hears_of_rounds_and_fails_fails_the_generation(tmp_path: Path) -> None:
    rounds = Rounds(ValueError("boom"))
    around = stopped(tmp_path, rounds)
    rounds.waiting[0]()
    assert around.ends == ["notify_checkpoint_complete(1) of on_round of loop 'a' failed: ValueError: boom"]
