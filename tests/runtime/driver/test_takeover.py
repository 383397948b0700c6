"""Takeover: an idle driver notices its replacement, and a new driver waits for workers of lost machines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate import testing
from headgate.codec.json_files import beat_path, decode_beat, encode_beat, end_path, generation_of
from headgate.errors import FencedError, PipelineFailed, StorageError
from headgate.model.failure import Failure
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.model.pipeline_identity import Course
from headgate.model.progress import PipelineHandle, RunResult
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.supervision.standby import (
    Effect,
    HeartbeatTimer,
    LookAtAll,
    LookAtBeat,
    Looked,
    LookFailed,
    Pause,
    PauseOver,
    Standby,
    StandDown,
    TakeOver,
    TakeoverLost,
)
from headgate.protocol.supervision.supervisor_events import Begin, RegisterTimer, TimerFired
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.runtime.driver.takeover import (
    HANGS_MS,
    LOOKS_MAX,
    HeartbeatReader,
    ReplacementWatch,
    end_beat,
    newest_run,
)
from headgate.storage.base import Bytes, NotFound
from headgate.storage.memory import MemoryStorage
from headgate.testing.in_process import InProcessHandle, ThreadLauncher


class Looks:
    """A log that answers as told, and a storage thread that runs when it is let."""

    def __init__(self, *answers: Generation | StorageError | None) -> None:
        self._answers = list(answers)
        self.waiting: list[Callable[[], object]] = []
        self.replaced: list[Generation] = []
        self.now_ms = 0
        self.pools = 0
        self.watch = ReplacementWatch(self, self, self, self.replaced.append, self)  # type: ignore[arg-type]

    def monotonic_ms(self) -> int:
        return self.now_ms

    def pool(self, size: int, name: str, *, is_daemon: bool) -> Looks:
        assert is_daemon, "a look that hangs does not keep the process alive"
        self.pools += 1
        return self

    def shutdown(self, *, wait: bool) -> None:
        assert not wait

    def newer_generation(self) -> Generation | None:
        answer = self._answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> None:
        self.waiting.append(lambda: call(*arguments))

    def post(self, call: Callable[[], None]) -> None:
        call()

    def look(self) -> None:
        self.watch.look()
        while self.waiting:
            self.waiting.pop(0)()


def test_an_idle_driver_hears_of_the_one_that_replaced_it() -> None:  # C38
    looked = Looks(None, Generation(5))
    looked.look()
    assert looked.replaced == []
    looked.look()
    assert looked.replaced == [5]


def test_storage_that_does_not_answer_replaces_nobody_and_is_asked_again() -> None:
    looked = Looks(StorageError("list", "p/log", "gone for a while", is_transient=True), Generation(5))
    looked.look()
    assert looked.replaced == []
    looked.look()
    assert looked.replaced == [5]


def test_there_is_one_look_at_a_time() -> None:
    looked = Looks(None)
    looked.watch.look()
    looked.watch.look()
    assert len(looked.waiting) == 1


def test_a_look_that_hangs_is_not_waited_for() -> None:  # C38
    """On a connection that is dead a request may take minutes; one on another connection does not."""
    looked = Looks(Generation(5))
    looked.watch.look()
    looked.now_ms += HANGS_MS - 1
    looked.watch.look()
    assert len(looked.waiting) == 1
    looked.now_ms += 1
    looked.watch.look()
    _, beside = looked.waiting
    beside()
    assert looked.replaced == [5]
    assert looked.pools == 1


def test_only_so_many_looks_hang() -> None:  # C38
    looked = Looks(*[None] * (LOOKS_MAX + 1))
    for _ in range(3 * LOOKS_MAX):
        looked.watch.look()
        looked.now_ms += HANGS_MS
    assert len(looked.waiting) == LOOKS_MAX
    looked.waiting.pop(0)()
    looked.watch.look()
    assert len(looked.waiting) == LOOKS_MAX


# -- a driver that goes on in another one's place is there while spark does not know yet that a machine i -----


WAIT_S = 300.0


def pipeline(directory: Path, parallelism: int = 1) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(interval="1h", dir=directory)
    made = hg.Pipeline("p", parallelism=parallelism, checkpointing=checkpointing)
    made.source(hg.Generator({"n": hg.RowNumber()}, rows=1_000_000, rows_per_second=100)).sink(hg.Discard())
    return made


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def checkpointed(handle: PipelineHandle) -> None:
    """Wait until the pipeline runs, and for a checkpoint of it."""

    def is_taken() -> bool:
        outcome = handle.take_checkpoint(WAIT_S)
        return outcome is not None and outcome.checkpoint is not None

    until(is_taken, "a checkpoint")


def given_up(handle: PipelineHandle) -> None:
    """Let the time in which workers must register be over, once the driver knows what it goes on from."""
    assert isinstance(handle, InProcessHandle)
    supervision = handle.driver.supervision
    until(lambda: supervision.machine.generation is not None, "a claim")
    supervision._timers.post(lambda: supervision.handle(TimerFired(RegisterTimer(1), 0, 0.5)))


@pytest.fixture
def on_a_lost_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, the workers of each first job never come."""
    submit, cancel = ThreadLauncher.submit, ThreadLauncher.cancel

    def lose() -> None:
        waiting: list[Callable[[Failure | None], None]] = []

        def lost(self: ThreadLauncher, number: int, address: object, secret: object, ended: Callable) -> None:  # type: ignore[type-arg]
            if number > 1:
                submit(self, number, address, secret, ended)  # type: ignore[arg-type]
            else:
                waiting.append(ended)

        def cancelled(self: ThreadLauncher, number: int) -> None:
            while waiting:
                waiting.pop()("cancelled")
            cancel(self, number)

        monkeypatch.setattr(ThreadLauncher, "submit", lost)
        monkeypatch.setattr(ThreadLauncher, "cancel", cancelled)

    return lose


def test_an_heir_whose_first_workers_are_on_a_lost_machine_tries_again(
    tmp_path: Path, on_a_lost_machine: Callable[[], None]
) -> None:  # G12, F7
    check_an_heir_tries_again(tmp_path, on_a_lost_machine)


def check_an_heir_tries_again(root: Path, on_a_lost_machine: Callable[[], None]) -> None:
    with testing.running(pipeline(root)) as handle:
        checkpointed(handle)
    on_a_lost_machine()
    with testing.running(pipeline(root)) as handle:
        given_up(handle)
        checkpointed(handle)
        assert isinstance(handle, InProcessHandle)
        assert handle.driver.supervision.machine.restarts_count == 1


@pytest.mark.parametrize("before", [None, 1])
def test_who_never_had_so_many_workers_hears_at_once_that_there_are_too_few(
    tmp_path: Path, on_a_lost_machine: Callable[[], None], before: int | None
) -> None:  # G12
    if before is not None:
        with testing.running(pipeline(tmp_path, before)) as handle:
            checkpointed(handle)
    on_a_lost_machine()
    with testing.running(pipeline(tmp_path, 2)) as handle:
        given_up(handle)
        with pytest.raises(PipelineFailed, match="0 of 2 workers registered"):
            handle.wait(WAIT_S)


TICK_MS = 250
CHAOS_MS, HEALED_MS = 60_000, 100_000
HEALTHY_MS = 12_000
"""A driver that had no trouble for so long is certainly not silent, however fast the standby's clock goes."""

TAKEOVER_MS_MAX = 10_000
ENDS = (Course.STOPPED, Course.FAILED_FOR_GOOD, Course.FINISHED, Course.DRAINED)


class Reached(MemoryStorage):
    """One process's way to the storage that all share; it may be cut."""

    def __init__(self, shared: MemoryStorage) -> None:
        super().__init__()
        self._objects, self._lock = shared._objects, shared._lock
        self.is_cut = False

    def _checked(self) -> None:
        if self.is_cut:
            raise StorageError("reach", "p", "no route")

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        self._checked()
        super().put(path, parts)

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        self._checked()
        super().put_if_absent(path, parts)

    def get(self, path: str) -> bytes:
        self._checked()
        return super().get(path)

    def list(self, prefix: str) -> list[str]:
        self._checked()
        return super().list(prefix)

    def delete(self, path: str) -> None:
        self._checked()
        super().delete(path)


@dataclass
class Node:
    """A process with a clock of its own."""

    name: str
    storage: Reached
    rate: float
    offset_ms: int
    is_frozen: bool = False
    is_over: bool = False
    troubled_ms: int = 0

    def clock(self, now_ms: int) -> int:
        return self.offset_ms + int(now_ms * self.rate)


@dataclass
class Active(Node):
    """A driver that has claimed."""

    log: CheckpointLog = field(init=False)
    course: Course = Course.RUNNING
    stops_at_ms: int | None = None

    def begin(self, log: CheckpointLog) -> Active:
        self.log = log
        self.pulse = HeartbeatTimer(self.name)
        return self


@dataclass
class Waiting(Node):
    """A standby process."""

    due_ms: int = 0
    taking: TakeOver | None = None

    def begin(self) -> Waiting:
        self.machine = Standby()
        self.lookout = HeartbeatReader(self.storage, "p", "")
        self.effects: list[Effect] = self.machine.handle(Begin())
        return self


class World:
    """All processes of one history."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.shared = MemoryStorage()
        self.now_ms = 0
        self.checkpoint = 0
        self.nodes: list[Node] = []
        self.takeovers: list[int] = []
        self.knew_beats = False
        self.decided_ms: dict[Generation, int] = {}
        self.ended_ms: dict[Generation, int] = {}
        self.names = 0
        first = self._node(Active)
        log = CheckpointLog(first.storage, "p")
        log.claim(first.name, 0)
        self.nodes.append(first.begin(log))
        self.nodes += [self._node(Waiting).begin() for _ in range(self.dice.randint(1, 3))]

    def _node(self, kind: type, storage: Reached | None = None):  # type: ignore[no-untyped-def]
        self.names += 1
        rate, offset = self.dice.uniform(0.8, 1.25), self.dice.randrange(-(10**9), 10**9)
        return kind(f"process {self.names}", storage or Reached(self.shared), rate, offset, troubled_ms=self.now_ms)

    # -- a step -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self.now_ms < CHAOS_MS + HEALED_MS:
            self.now_ms += TICK_MS
            if self.now_ms < CHAOS_MS:
                self._trouble()
            elif self.now_ms - TICK_MS < CHAOS_MS:
                self._heal()
            for node in list(self.nodes):
                if node.storage.is_cut or node.is_frozen:
                    node.troubled_ms = self.now_ms
                if node.is_frozen or node.is_over:
                    continue
                if isinstance(node, Active):
                    self._drive(node)
                else:
                    self._stand_by(node)
            self._check()
        self._check_end()

    def _trouble(self) -> None:
        node = self.dice.choice(self.nodes)
        roll = self.dice.random()
        if roll < 0.02 and isinstance(node, Active) and not node.is_over:
            node.is_over = True  # SIGKILL
        elif roll < 0.05:
            node.storage.is_cut = not node.storage.is_cut
        elif roll < 0.07:
            node.is_frozen = not node.is_frozen
        elif roll < 0.08:
            for each in self.nodes:
                each.storage.is_cut = True
        elif roll < 0.10:
            for each in self.nodes:
                each.storage.is_cut = False
        elif roll < 0.102 and isinstance(node, Active) and not node.is_over and not node.is_frozen:
            node.course, node.stops_at_ms = Course.STOPPING, self.now_ms + self.dice.randrange(0, 3_000)
        elif roll < 0.105 and isinstance(node, Active) and not node.is_over and not node.is_frozen:
            self._end(node, PipelineFailed("a worker was lost", is_for_good=self.dice.random() < 0.2))

    def _heal(self) -> None:
        self.knew_beats = bool(self.shared.list("p/heartbeats"))
        for node in self.nodes:
            node.storage.is_cut = node.is_frozen = False

    # -- drivers ------------------------------------------------------------------------------------------------------

    def _drive(self, node: Active) -> None:
        try:
            if node.log.newer_generation() is not None:
                node.is_over = True
                self.nodes.append(self._node(Waiting).begin())  # its supervisor starts it as a standby again
                return
            if self.dice.random() < 0.2:
                self._complete(node)
            beat = node.pulse.beat(node.clock(self.now_ms), node.log.generation, node.course)
            if beat is not None:
                node.storage.put(beat_path("p", beat.generation), [encode_beat(beat)])
                for path in node.storage.list("p/heartbeats"):
                    whose = generation_of(path.removeprefix("p/heartbeats/"))
                    if whose is not None and whose < beat.generation:
                        node.storage.delete(path)
        except FencedError:
            node.is_over = True
            self.nodes.append(self._node(Waiting).begin())
            return
        except StorageError:
            pass
        if node.stops_at_ms is not None and self.now_ms >= node.stops_at_ms:
            self._end(node, None)

    def _complete(self, node: Active) -> None:
        """Complete a checkpoint; a driver that was replaced cannot."""
        self.checkpoint += 1
        newest, _ = newest_run(CheckpointLog(self.shared, "p").observe())
        made = Manifest(CheckpointId(self.checkpoint), node.log.generation, 1, 1, ())
        oldest = CheckpointId(max(self.checkpoint - 1, 1))
        if node.log.append(made, oldest) is Outcome.WRITTEN:
            assert node.log.generation == newest, "a zombie won"
            node.log.drop(CheckpointId(oldest - 1), oldest)

    def _end(self, node: Active, error: Exception | None) -> None:
        future: Future[RunResult] = Future()
        if error is None:
            future.set_result(RunResult(False))
        else:
            future.set_exception(error)
        word = end_beat(node.log.generation, node.name, future)
        assert word is not None
        try:
            node.storage.put(end_path("p", word.generation), [encode_beat(word)])
        except StorageError:
            return  # tried again
        node.is_over = True

    # -- standbys -----------------------------------------------------------------------------------------------------

    def _stand_by(self, node: Waiting) -> None:
        """Carry out what is due; a takeover takes a while between its decision and its claim."""
        if node.taking is not None:
            if self.now_ms >= node.due_ms:
                self._claim(node, node.taking)
            return
        if not node.effects and self.now_ms >= node.due_ms:
            node.effects = node.machine.handle(PauseOver())
        while node.effects:
            effect = node.effects.pop(0)
            match effect:
                case LookAtAll() | LookAtBeat():
                    node.effects += self._look(node, effect)
                case Pause():
                    node.due_ms = self.now_ms + int(effect.after_ms / node.rate)
                case TakeOver():
                    self._check_silence(effect)
                    node.taking, node.due_ms = effect, self.now_ms + self.dice.randrange(0, 3_000)
                case StandDown():
                    node.is_over = True

    def _look(self, node: Waiting, effect: LookAtAll | LookAtBeat) -> list[Effect]:
        at_ms = node.clock(self.now_ms)
        try:
            is_all = isinstance(effect, LookAtAll)
            found = node.lookout.all() if isinstance(effect, LookAtAll) else node.lookout.beat(effect.generation)
        except StorageError as error:
            return node.machine.handle(LookFailed(str(error)))
        return node.machine.handle(Looked(at_ms, at_ms + int(self.dice.randrange(0, 200)), found, is_all))

    def _claim(self, node: Waiting, effect: TakeOver) -> None:
        node.taking = None
        log = CheckpointLog(node.storage, "p")
        before, _ = newest_run(CheckpointLog(self.shared, "p").observe())
        ended = self._ended(before)
        try:
            log.claim(node.name, 0, effect.after)
        except FencedError:
            node.effects = node.machine.handle(TakeoverLost())
            return
        except StorageError:
            node.is_over = True  # it fails, and its supervisor starts it again
            self.nodes.append(self._node(Waiting).begin())
            return
        assert before == effect.after, "a standby replaced the heir of what it had seen (SB8)"
        assert ended not in ENDS or self._ended_since(effect), f"a standby started what had {ended} (SB6)"
        node.is_over = True
        self.takeovers.append(self.now_ms)
        self.nodes.append(self._node(Active, node.storage).begin(log))

    def _ended_since(self, effect: TakeOver) -> bool:
        """Whether the run ended between the decision to replace it and the claim: nobody can know that."""
        return self.decided_ms.get(effect.after, 0) < self.ended_ms.get(effect.after, 0)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _ended(self, generation: Generation) -> Course | None:
        try:
            word = decode_beat(self.shared.get(end_path("p", generation)))
        except NotFound:
            return None
        return None if word is None else word.course

    def _check_silence(self, effect: TakeOver) -> None:
        self.decided_ms[effect.after] = self.now_ms
        for node in self.nodes:
            if isinstance(node, Active) and not node.is_over and node.log.generation == effect.after:
                healthy_ms = self.now_ms - node.troubled_ms
                assert healthy_ms < HEALTHY_MS, f"a driver that was healthy for {healthy_ms} ms is replaced"

    def _check(self) -> None:
        newest, _ = newest_run(CheckpointLog(self.shared, "p").observe())
        if self._ended(newest) is not None:
            self.ended_ms.setdefault(newest, self.now_ms)
        generations = [m.generation for m in reversed(candidates(CheckpointLog(self.shared, "p").observe()))]
        assert generations == sorted(generations)
        names = self.shared.list("p/heartbeats")
        zombies = sum(isinstance(node, Active) for node in self.nodes)
        assert len(names) <= 2 * zombies, "heartbeats pile up"

    def _check_end(self) -> None:
        """Long after the last fault: one driver runs, unless it was stopped or failed for good."""
        newest, _ = newest_run(CheckpointLog(self.shared, "p").observe())
        running = [n for n in self.nodes if isinstance(n, Active) and not n.is_over]
        waiting = [n for n in self.nodes if isinstance(n, Waiting) and not n.is_over]
        names = self.shared.list("p/heartbeats")
        beat = decode_beat(self.shared.get(beat_path("p", newest))) if beat_path("p", newest) in names else None
        was_stopped = self._ended(newest) in ENDS or (beat is not None and beat.course is Course.STOPPING)
        if was_stopped or not (running or waiting):
            assert running == [], "somebody runs what was stopped"
        else:
            assert [n.log.generation for n in running] == [newest], "nobody runs it, or two do"
        if not self.knew_beats:  # whoever died before its very first beat is waited for longer (SB11)
            return
        late = [at_ms for at_ms in self.takeovers if at_ms > CHAOS_MS + TAKEOVER_MS_MAX + 5_000]
        assert late == [], "a takeover long after everything was well"


def live(seed: int) -> World:
    world = World(seed)
    world.run()
    return world


@pytest.mark.long
@settings(max_examples=25)
@given(st.integers(0, 1 << 32))
def test_in_any_history_one_driver_runs_and_no_zombie_wins(seed: int) -> None:  # SB6–SB8
    live(seed)


def test_a_dead_driver_is_followed_within_the_time() -> None:  # SB7, SB8
    for seed in range(5):
        world = World(seed)
        world._trouble = lambda: None  # type: ignore[method-assign]
        dead_ms = 10_000 + 250 * seed
        while world.now_ms < 30_000:
            world.now_ms += TICK_MS
            for node in list(world.nodes):
                if isinstance(node, Active) and not node.is_over:
                    node.is_over = node.is_over or (node is world.nodes[0] and world.now_ms >= dead_ms)
                    world._drive(node) if not node.is_over else None
                elif isinstance(node, Waiting) and not node.is_over:
                    world._stand_by(node)
        assert len(world.takeovers) == 1
        assert world.takeovers[0] - dead_ms <= TAKEOVER_MS_MAX
