"""A reset dies at every change of every storage: everything is there, or the next one finishes it (SO)."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests import sqlite_sinks
from tests.runtime.runs.test_reset import World, reset
from tests.storage.faulty import FaultyStorage

from headgate.api import launch
from headgate.codec.json_files import beat_path, encode_beat
from headgate.connectors.base import SinkContext
from headgate.connectors.files import file_sink
from headgate.connectors.streams import StreamSink
from headgate.errors import FencedError, UsageError
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, Manifest
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.model.progress import SilentObserver
from headgate.protocol.checkpoints import recovery as deciding
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import reset as reset_module
from headgate.runtime.driver import restart
from headgate.runtime.driver.reset import Reset, refuse_if_alive
from headgate.runtime.surroundings import Process
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.store import _shared

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
