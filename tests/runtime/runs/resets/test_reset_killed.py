"""A reset dies at every change of every storage: everything is there, or the next one finishes it (SO)."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few
from tests.runtime.runs.resets.test_reset import World, reset
from tests.storage.faulty import FaultyStorage
from tests.support import sqlite_sinks

import headgate as hg
from headgate.api import launch
from headgate.codec.json_files import Ending, beat_path, encode_beat
from headgate.connectors.base import SinkContext
from headgate.connectors.files import file_sink
from headgate.connectors.registry import targets_of
from headgate.connectors.streams import StreamSink
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, Manifest
from headgate.model.pipeline_identity import Beat, Course, PipelineIdentity, ResetOrder, Target
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import SilentObserver
from headgate.protocol.checkpoints import recovery as deciding
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.sink_registry import SinkRegistry
from headgate.runtime.driver import reset as reset_module
from headgate.runtime.driver import restart
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock
from headgate.runtime.driver.reset import Reset, refuse_if_alive
from headgate.runtime.surroundings import Process
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.store import Store, _shared

SCHEMA = pa.schema({"number": pa.int64(), "text": pa.string()})
NOTHING: list[Counter[int]] = [Counter(), Counter(), Counter()]


class Killed(BaseException):
    """The process dies."""


class Reaper:
    """Kills at change number ``at`` of all storages together: before it, which is behind the one before."""

    def __init__(self) -> None:
        self.at = self.count = 0

    def reach(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Killed

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(*arguments: Any, **options: Any) -> Any:
            self.reach()
            return call(*arguments, **options)

        return reached


class Mortal(FaultyStorage):
    def __init__(self, url: str, reaper: Reaper) -> None:
        super().__init__(open_storage(url))
        self._reaper = reaper

    def _before(self, operation: str, path: str, parts: Any = ()) -> bool:
        if operation not in ("get", "get_range", "list"):  # a death before these is one before the next change
            self._reaper.reach()
        return super()._before(operation, path, parts)


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> Reaper:
    return reaping(monkeypatch)


def reaping(monkeypatch: pytest.MonkeyPatch) -> Reaper:
    """Let one reaper watch everything that a reset changes."""
    made = Reaper()
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    for module in (reset_module, file_sink):
        monkeypatch.setattr(module, "open_storage", lambda url, *_: Mortal(url, made))
    for owner, names in ((SqlCatalogue, ["start_over"]), (sqlite_sinks.SqliteTarget, ["claim", "remove_output"])):
        for name in names:
            monkeypatch.setattr(owner, name, made.around(getattr(owner, name)))
    return made


SINKS = "files stream own"
NUMBERS = Counter(range(30))
ALL: list[Counter[int]] = [NUMBERS, NUMBERS, NUMBERS]


def produce(world: World, program: Any = None) -> None:
    """Do as the pipeline does, without workers: begin a generation, and complete and commit two checkpoints."""
    log, made = log_of(world), program or definition(world)
    found = restart.begin_generation(made, log, "test", lambda _: None)
    assert isinstance(found, restart.NewGeneration)
    sinks = [node for node in made.graph.nodes if hasattr(node.spec, "open_committer")]
    writers = {
        node.name: node.spec.open(SinkContext("p", str(node.name), 0, 1, found.generation, SCHEMA)) for node in sinks
    }
    for number, start in ((1, 0), (2, 15)):
        checkpoint = CheckpointId(found.first_checkpoint + number - 1)
        rows = pa.RecordBatch.from_pylist([{"number": n, "text": "x"} for n in range(start, start + 15)], SCHEMA)
        output = []
        for node in sinks:
            writers[node.name].write(rows)
            payload = writers[node.name].seal(checkpoint).prepare()
            output.append(Committable(str(node.name), checkpoint, 0, found.generation, payload))
        texts = made.plan.state_texts()
        manifest = Manifest(checkpoint, found.generation, 1, made.plan.max_parallelism, (), tuple(output), texts)
        log.append(manifest)
        found.commits.commit(CommitPermit(checkpoint, found.generation), output)
    for closed in (found.commits, *writers.values()):
        closed.close()


class Template:
    """A pipeline that has written something, as often as it is needed."""

    def __init__(self, root: Path) -> None:
        self._kept = root / "kept"
        self.world = World(root / "world")
        self.world.root.mkdir()
        produce(self.world)
        assert self.world.all() == ALL
        shutil.copytree(self.world.root, self._kept)

    def again(self) -> World:
        _shared(self.world.store).close()
        _shared.cache_clear()
        shutil.rmtree(self.world.root)
        shutil.copytree(self._kept, self.world.root)
        return self.world


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return Template(tmp_path)


def log_of(world: World) -> CheckpointLog:
    return CheckpointLog(open_storage(str(world.root / "home")), "p")


def definition(world: World) -> Any:
    return world.pipeline(sinks=SINKS).definition()


def left_by_a_kill(world: World, reaper: Reaper, at: int) -> tuple[bool, str]:
    """Kill a reset before operation ``at``; return whether it came to its end, and what it has left."""
    log, program = log_of(world), definition(world)
    before = candidates(log.observe())
    reaper.count, reaper.at = 0, at
    try:
        reset(world, program)
        is_over = True
    except Killed:
        is_over = False
    reaper.at = 0
    if before == candidates(log.observe()):
        assert world.all() == ALL, "nothing goes before it is decided"
        launch.finish_reset(program, SilentObserver())
        assert world.all() == ALL, "an order counts for nothing before the log says so"
        assert before == candidates(log.observe())
        return is_over, "untouched"
    assert candidates(log.observe()) == (), "all checkpoints go in one step"
    if at % 2 and not is_over:
        reset(world, program)
    else:
        launch.finish_reset(program, SilentObserver())
    assert world.all() == NOTHING
    assert not log.sink_registry.orders()
    life = log.known_identity(log.observe())
    sinks = [node for node in program.graph.nodes if hasattr(node.spec, "owner")]
    assert {node.spec.owner("p", str(node.name)).life for node in sinks} == {life}
    return is_over, "decided"


def all_kills(template: Template, reaper: Reaper) -> list[str]:
    found: list[str] = []
    for at in range(1, 400):
        is_over, what = left_by_a_kill(template.again(), reaper, at)
        found.append(what)
        if is_over:
            return found
    raise AssertionError("it has no end")


def test_a_reset_that_dies_anywhere_leaves_all_or_nothing(template: Template, reaper: Reaper) -> None:  # SO2, SO3
    found = all_kills(template, reaper)
    turn = found.index("decided")
    assert turn > 0
    assert len(found) - turn > 15
    assert found == ["untouched"] * turn + ["decided"] * (len(found) - turn), "one step decides"
    produce(template.world)
    assert template.world.all() == ALL


def half_done(template: Template, monkeypatch: pytest.MonkeyPatch) -> World:
    """A reset that has died behind its first target."""

    def dies(*_: Any) -> None:
        raise Killed

    world = template.again()
    with monkeypatch.context() as deadly:
        deadly.setattr(SqlCatalogue, "start_over", dies)
        with pytest.raises(Killed):
            reset(world, definition(world))
    assert world.all() == [Counter(), *ALL[1:]]
    return world


def test_the_next_start_finishes_what_was_begun(template: Template, monkeypatch: Any) -> None:  # SO3
    world = half_done(template, monkeypatch)
    launch.finish_reset(definition(world), SilentObserver())
    assert world.all() == NOTHING
    produce(world)
    assert world.all() == ALL


def test_a_driver_does_not_write_in_front_of_half_empty_targets(template: Template, monkeypatch: Any) -> None:  # SO3
    world = half_done(template, monkeypatch)
    before = world.all()
    with pytest.raises(UsageError, match="is being reset"):
        restart.begin_generation(definition(world), log_of(world), "test", lambda _: None)
    assert world.all() == before


def test_whoever_claimed_meanwhile_goes_on(template: Template) -> None:  # SO2
    world = template.again()
    with Reset.holding_the_lock(str(world.root / "home"), "p", definition(world)) as resetting:
        plan = resetting.plan()
        restart.begin_generation(definition(world), log_of(world), "test", lambda _: None)
        with pytest.raises(FencedError):
            resetting.carry_out(plan)
    assert world.all() == ALL
    assert len(candidates(log_of(world).observe())) == 2


def test_a_driver_that_wakes_behind_a_reset_writes_nothing(template: Template) -> None:  # SO5
    world = template.again()
    log = log_of(world)
    old = log.known_identity(log.observe())
    generation = Generation(deciding.newest_generation(log.observe()))
    assert old is not None
    reset(world, definition(world))
    for node in definition(world).graph.nodes:
        if not hasattr(node.spec, "owner"):
            continue
        name = str(node.name)
        assert node.spec.own("p", name, old).life != old, "it does not become the owner again"
        if isinstance(node.spec, StreamSink):
            node.spec.make_target(SCHEMA)
        committer = node.spec.open_committer("p", name, generation)
        with pytest.raises(FencedError):
            committer.recover(())
        committer.close()
    assert world.all() == NOTHING


def test_a_reset_that_wakes_late_deletes_nothing_new(template: Template) -> None:
    world = template.again()
    reset(world, definition(world))
    log = log_of(world)
    life, generation = log.known_identity(log.observe()), deciding.newest_generation(log.observe())
    assert life is not None
    produce(world)
    sinks = [node for node in definition(world).graph.nodes if hasattr(node.spec, "start_over")]
    assert len(sinks) == 3
    for node in sinks:
        node.spec.start_over("p", str(node.name), generation, life, lambda owner: True)
        late = PipelineIdentity("of a reset before", life.home, "far", 0)
        with pytest.raises(FencedError):
            node.spec.start_over("p", str(node.name), generation, late, lambda owner: True)
    assert world.all() == ALL


class Beating(Process):
    """Time in which a driver beats, or does not."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def sleep(self, seconds: float) -> None:
        self._beat()


def test_a_driver_that_beats_in_an_object_store_is_left_alone() -> None:
    storage, count = MemoryStorage(), iter(range(100))

    def beat(course: Course = Course.RUNNING) -> None:
        data = encode_beat(Beat(Generation(1), "process 1 on far", next(count), course))
        storage.put(beat_path("p", Generation(1)), [data])

    CheckpointLog(storage, "p").claim("process 1 on far", 0)
    refuse_if_alive(storage, "p", Beating(beat))  # there is no heartbeat at all
    beat()
    with pytest.raises(UsageError, match="is run by process 1 on far"):
        refuse_if_alive(storage, "p", Beating(beat))
    refuse_if_alive(storage, "p", Beating(lambda: None))
    refuse_if_alive(storage, "p", Beating(lambda: beat(Course.STOPPED)))


MOVED_SCHEMA = pa.schema({"number": pa.int64()})
ORDERS = list(itertools.permutations(("app/a", "app/b")))


class Moved:
    """A pipeline whose only sink wrote to one stream after the other. Any of ``stores`` is a name of the same."""

    def __init__(self, root: Path, streams: tuple[str, ...], stores: tuple[str, ...] = ("store", "store")) -> None:
        self.root, self.streams = root, streams
        self.stores = [str(root / store) for store in stores]
        (root / "store").mkdir(parents=True)
        for store in stores:
            if store != "store":
                (root / store).symlink_to(root / "store")
        for number in range(len(streams)):
            self.produce(number)
        assert self.counts() == Counter(streams)

    def program(self, number: int = -1) -> PipelineDefinition:
        kept = hg.Checkpointing("100ms", dir=str(self.root / "home"))
        made = hg.Pipeline("p", checkpointing=kept)
        rows = made.source(hg.FromRows([{"number": 1}]))
        rows.sink(hg.StreamSink(self.streams[number], store=self.stores[number]), name="out")
        found = made.definition()
        return replace(found, targets=targets_of(found.graph))

    def produce(self, number: int = -1) -> None:
        """Do as the pipeline does, without workers: begin a generation, complete and commit a checkpoint."""
        made, log = self.program(number), log_of(self)  # type: ignore[arg-type]
        found = restart.begin_generation(made, log, "test", lambda _: None)
        assert isinstance(found, restart.NewGeneration)
        sink: Any = next(node.spec for node in made.graph.nodes if hasattr(node.spec, "open_committer"))
        writer = sink.open(SinkContext("p", "out", 0, 1, found.generation, MOVED_SCHEMA))
        writer.write(pa.RecordBatch.from_pylist([{"number": number}], MOVED_SCHEMA))
        checkpoint = CheckpointId(found.first_checkpoint)
        output = [Committable("out", checkpoint, 0, found.generation, writer.seal(checkpoint).prepare())]
        texts = made.plan.state_texts()
        log.append(Manifest(checkpoint, found.generation, 1, made.plan.max_parallelism, (), tuple(output), texts))
        found.commits.commit(CommitPermit(checkpoint, found.generation), output)
        for closed in (found.commits, writer):
            closed.close()

    def counts(self) -> Counter[str]:
        with Store.open(self.stores[0]) as store:
            return +Counter({info.name: info.events_count for info in store.list_streams()})

    def reset(self) -> None:
        with Reset.holding_the_lock(str(self.root / "home"), "p", self.program()) as resetting:
            resetting.carry_out(resetting.plan())


@pytest.mark.parametrize("streams", ORDERS)
def test_all_that_a_moved_sink_wrote_goes(tmp_path: Path, streams: tuple[str, ...]) -> None:
    moved = Moved(tmp_path, streams)
    moved.reset()
    assert moved.counts() == Counter()
    moved.produce()
    assert moved.counts() == Counter(streams[-1:])


@pytest.mark.parametrize("stores", [("store", "link"), ("link", "store")])
def test_a_store_with_two_names_is_one(tmp_path: Path, stores: tuple[str, ...]) -> None:
    moved = Moved(tmp_path, ("app/a", "app/b"), stores)
    moved.reset()
    assert moved.counts() == Counter()


@pytest.mark.parametrize("order", few(range(len(ORDERS)), 1))
def test_a_reset_of_a_moved_sink_dies_anywhere(  # SO2
    tmp_path: Path, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = ORDERS[order]
    reaper, found = reaping(monkeypatch), []
    for at in itertools.count(1):
        moved = Moved(tmp_path / str(at), streams)
        is_over = reset_killed(moved, reaper, at)
        is_decided = not candidates(log_of(moved).observe())  # type: ignore[arg-type]
        launch.finish_reset(moved.program(), SilentObserver())
        assert moved.counts() == (Counter() if is_decided else Counter(streams))
        found.append(is_decided)
        if is_over:
            break
    assert found == sorted(found), "one step decides"
    assert not found[0]
    moved.produce()
    assert moved.counts() == Counter(streams[-1:])


def reset_killed(moved: Moved, reaper: Reaper, at: int) -> bool:
    reaper.count, reaper.at = 0, at
    try:
        moved.reset()
    except Killed:
        return False
    finally:
        reaper.at = 0
    return True


def test_what_is_emptied_in_one_step(tmp_path: Path) -> None:
    from headgate.connectors.registry import grouped_by_owner, sink_of
    from headgate.model.pipeline_identity import TargetKind

    def stream(sink: str, store: str, name: str) -> Target:
        return Target(sink, TargetKind.STREAM, str(tmp_path / store), name, segments=1)

    files = [Target("out", TargetKind.FILES, str(tmp_path / name)) for name in ("x", "y")]
    targets = [
        stream("out", "s", "a"),
        *files,
        stream("out", "t", "a"),
        stream("in", "s", "b"),
        stream("out", "s", "b"),
    ]
    groups = grouped_by_owner([(target, found) for target in targets if (found := sink_of(target)) is not None])
    sizes = {(group[0][0].place_key): len(group) for group in groups}
    assert sorted(sizes.values()) == [1, 1, 1, 1, 2]
    assert sizes[targets[0].place_key] == 2


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
