"""A pipeline that starts over deletes nothing that may be somebody else's, however it came there (SO4)."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.runs.test_reset import World, reset
from tests.runtime.runs.test_reset_killed import (
    ALL,
    NOTHING,
    NUMBERS,
    SCHEMA,
    SINKS,
    Template,
    definition,
    half_done,
    log_of,
    produce,
)
from tests.sqlite_sinks import SqliteSink

import headgate as hg
from headgate.api import launch
from headgate.connectors.base import SinkContext
from headgate.connectors.registry import targets_of
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.model.progress import SilentObserver
from headgate.runtime.driver import restart
from headgate.runtime.driver.reset import Reset, ResetPlan
from headgate.runtime.surroundings import Process
from headgate.store.store import Store


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return Template(tmp_path)


def elsewhere(world: World, sinks: str = SINKS) -> Any:
    """The same pipeline with its checkpoints in another directory."""
    made = world.pipeline(sinks=sinks)
    made.override(checkpoint_dir=str(world.root / "elsewhere"))
    return made.definition()


def starting_over(world: World, home: str, program: Any, around: Any = None) -> Any:
    arguments = () if around is None else (around,)
    return Reset.holding_the_lock(str(world.root / home), "p", program, *arguments)


def look(world: World, home: str, program: Any, around: Any = None) -> ResetPlan:
    with starting_over(world, home, program, around) as resetting:
        plan: ResetPlan = resetting.plan()
        return plan


def renamed(world: World) -> Any:
    """The same stream by a pipeline of the same name elsewhere, whose sink has another name."""
    kept = hg.Checkpointing("100ms", dir=str(world.root / "elsewhere"))
    made = hg.Pipeline("p", checkpointing=kept)
    rows = made.source(hg.FromRows([{"number": 1, "text": "x"}]))
    rows.sink(hg.StreamSink("app/out", store=world.store), name="renamed")
    return made.definition()


def test_a_stream_of_another_directory_is_kept_whatever_the_sinks_are_called(template: Template) -> None:  # SO4
    world = template.again()
    plan = look(world, "elsewhere", renamed(world))
    assert [found.holding.what for found in plan.targets] == [""], "it says nothing of others' events"
    with starting_over(world, "elsewhere", renamed(world)) as resetting:
        resetting.carry_out(plan)
    assert world.all() == ALL


@pytest.mark.parametrize("sink", ["files", "stream", "own"])
def test_what_a_sink_wrote_under_a_former_name_goes_too(template: Template, sink: str) -> None:  # SO4
    world = template.again()
    shutil.rmtree(world.root / "home")
    made = hg.Pipeline("p", checkpointing=hg.Checkpointing("100ms", dir=str(world.root / "home")))
    spec = next(node.spec for node in definition(world).graph.nodes if str(node.name) == sink)
    made.source(hg.FromRows([{"number": 1, "text": "x"}])).sink(spec, name="renamed")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"knows its sink '{sink}', which belongs to former .* --fresh"):
        restart.begin_generation(made.definition(), log_of(world), "test", lambda _: None)
    launch.start_over(made.definition(), SilentObserver())
    assert sum(not there for there in world.all()) == 1, "other targets keep what they hold"
    plan = look(world, "home", made.definition())
    assert any(found.holding.what for found in plan.targets) is (sink == "own"), "how much it is, nobody asks that one"
    restart.begin_generation(made.definition(), log_of(world), "test", lambda _: None)


def to_tables(world: World, **paths: str) -> Any:
    """A pipeline whose sinks of a user's own write to these tables."""
    made = hg.Pipeline("p", checkpointing=hg.Checkpointing("100ms", dir=str(world.root / "home")))
    rows = made.source(hg.FromRows([{"number": 1, "text": "x"}]))
    for name, path in paths.items():
        rows.sink(SqliteSink(path), name=name)
    found = made.definition()
    return replace(found, targets=targets_of(found.graph))


def test_a_former_place_of_a_sink_of_ones_own_is_emptied_too(tmp_path: Path) -> None:  # SO4
    """Derived names have moved on by one: ``own`` is another table now, and ``own-2`` is where ``own`` was."""
    world = World(tmp_path)
    produce(world, to_tables(world, own=world.table))
    assert world.in_table() == NUMBERS
    now = to_tables(world, **{"own": str(tmp_path / "other.db"), "own-2": world.table})
    launch.start_over(now, SilentObserver())
    assert world.in_table() == Counter()
    restart.begin_generation(now, log_of(world), "test", lambda _: None)


def test_a_former_place_of_another_directory_is_kept(tmp_path: Path) -> None:  # SO4
    world = World(tmp_path)
    produce(world, to_tables(world, own=world.table))
    now = to_tables(world, **{"own": str(tmp_path / "other.db"), "own-2": world.table})
    around = Elsewhere()
    shutil.rmtree(tmp_path / "home")
    with starting_over(world, "home", now, around) as resetting:
        resetting.carry_out(resetting.plan())
    assert world.in_table() == NUMBERS


def test_a_former_name_that_was_written_down_goes_by_the_present_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    produce(world, to_tables(world, old=world.table))
    launch.start_over(to_tables(world, new=world.table), SilentObserver())
    assert world.in_table() == Counter()


@pytest.mark.parametrize("sink", ["files", "stream"])
def test_what_a_former_name_prepared_goes_too(tmp_path: Path, sink: str) -> None:  # SO4
    """Nobody sees it, but every start is refused because of it."""
    world = World(tmp_path)
    kinds = {"files": hg.FileSink(world.files, "parquet"), "stream": hg.StreamSink("app/out", store=world.store)}
    prepare(world, named(world, "old", kinds[sink]))
    shutil.rmtree(tmp_path / "home")
    now = named(world, "new", kinds[sink])
    with pytest.raises(UsageError, match="knows its sink 'old'"):
        restart.begin_generation(now, log_of(world), "test", lambda _: None)
    launch.start_over(now, SilentObserver())
    restart.begin_generation(now, log_of(world), "test", lambda _: None)


def named(world: World, name: str, sink: Any) -> Any:
    made = hg.Pipeline("p", checkpointing=hg.Checkpointing("100ms", dir=str(world.root / "home")))
    made.source(hg.FromRows([{"number": 1, "text": "x"}])).sink(sink, name=name)
    return made.definition()


def prepare(world: World, program: Any) -> None:
    """Prepare output of a checkpoint that is never completed."""
    begun = restart.begin_generation(program, log_of(world), "test", lambda _: None)
    assert isinstance(begun, restart.NewGeneration)
    (node,) = [node for node in program.graph.nodes if hasattr(node.spec, "open_committer")]
    writer = node.spec.open(SinkContext("p", str(node.name), 0, 1, begun.generation, SCHEMA))
    writer.write(pa.RecordBatch.from_pylist([{"number": 1, "text": "x"}], SCHEMA))
    writer.seal(CheckpointId(1)).prepare()
    for closed in (writer, begun.commits):
        closed.close()


class Elsewhere(Process):
    """Another machine with a directory of the same name."""

    @property
    def host(self) -> str:
        return "another machine"


def test_another_machine_may_have_a_directory_of_the_same_name(template: Template) -> None:  # SO4
    world = template.again()
    look(world, "home", definition(world), Elsewhere())  # with the checkpoints there it is the same pipeline
    shutil.rmtree(world.root / "home")
    with pytest.raises(UsageError, match="belongs to the pipeline of the same name"):
        look(world, "home", definition(world), Elsewhere())
    look(world, "home", definition(world))


def test_a_start_on_another_machine_is_not_told_to_delete(template: Template) -> None:  # SO4
    world = template.again()
    shutil.rmtree(world.root / "home")
    with pytest.raises(UsageError) as refused:
        restart.begin_generation(definition(world), log_of(world), "test", lambda _: None, around=Elsewhere())
    assert "--fresh" not in str(refused.value)
    with pytest.raises(UsageError, match="--fresh"):
        restart.begin_generation(definition(world), log_of(world), "test", lambda _: None)


def test_a_copy_of_a_directory_does_not_delete_what_the_original_wrote(template: Template) -> None:  # SO4
    world = template.again()
    shutil.copytree(world.root / "home", world.root / "elsewhere")
    with pytest.raises(UsageError, match="are a copy of those in"):
        look(world, "elsewhere", elsewhere(world))
    assert world.all() == ALL
    shutil.rmtree(world.root / "home")
    with starting_over(world, "elsewhere", elsewhere(world)) as resetting:  # it was moved
        resetting.carry_out(resetting.plan())
    assert world.all() == NOTHING


def test_a_directory_that_was_moved_finishes_what_was_begun(template: Template, monkeypatch: Any) -> None:  # SO3
    world = half_done(template, monkeypatch)
    (world.root / "home").rename(world.root / "elsewhere")
    launch.finish_reset(elsewhere(world), SilentObserver())
    assert world.all() == NOTHING


def test_a_directory_with_two_names_is_one(template: Template) -> None:  # SO4
    world = template.again()
    (world.root / "elsewhere").symlink_to(world.root / "home")
    look(world, "elsewhere", elsewhere(world))


def test_what_was_made_to_forget_keeps_what_it_holds(template: Template) -> None:  # SO4
    world = template.again()
    for sink, is_problem in (("files", True), ("stream", True), ("own", False)):
        made = elsewhere(world, sink)
        (node,) = [node for node in made.graph.nodes if str(node.name) == sink]
        forget_owner(world, sink, node.spec)
        if is_problem:
            with pytest.raises(UsageError, match="so it keeps what it holds; to start over, empty it yourself"):
                launch.start_over(made, SilentObserver())
        else:
            launch.start_over(made, SilentObserver())
    assert world.all() == ALL
    for file in Path(world.files).glob("*.parquet"):
        file.unlink()
    look(world, "elsewhere", elsewhere(world, "files"))


def forget_owner(world: World, sink: str, spec: Any) -> None:
    if sink == "stream":
        with Store.open(world.store) as store:
            store.pipelines.forget_owner("p/stream")
    elif sink == "files":
        spec.target("p", sink).forget()
    else:
        spec.forget_owner("p", sink)


def test_an_order_asks_again_whose_a_target_is(template: Template, monkeypatch: Any) -> None:  # SO4
    world = half_done(template, monkeypatch)
    stranger = PipelineIdentity("stranger", "/elsewhere", "far", 0)
    (node,) = [node for node in definition(world).graph.nodes if str(node.name) == "own"]
    node.spec.forget_owner("p", "own")
    node.spec.own("p", "own", stranger)
    with pytest.raises(UsageError, match="belongs to the pipeline of the same name with its checkpoints in /elsewhere"):
        launch.finish_reset(definition(world), SilentObserver())
    assert world.in_table() == NUMBERS


def test_nothing_goes_that_was_not_shown(template: Template) -> None:  # SO2
    world = template.again()
    with starting_over(world, "home", definition(world)) as resetting:
        plan = resetting.plan()
        next(Path(world.files).glob("*.parquet")).unlink()
        with pytest.raises(UsageError, match="has changed since it was shown"):
            resetting.carry_out(plan)
    assert world.all()[1:] == ALL[1:]
    assert not log_of(world).sink_registry.orders()
    reset(world, definition(world))
    assert world.all() == NOTHING


def test_starting_over_finishes_first_what_was_begun(template: Template, monkeypatch: Any) -> None:  # SO3
    world, seen = half_done(template, monkeypatch), []
    monkeypatch.setattr(Reset, "plan", around_look(lambda: seen.append(world.all())))
    launch.start_over(definition(world), SilentObserver())
    assert seen[0] == NOTHING


def around_look(before: Any) -> Any:
    look = Reset.plan

    def looked(self: Reset) -> ResetPlan:
        before()
        return look(self)

    return looked
