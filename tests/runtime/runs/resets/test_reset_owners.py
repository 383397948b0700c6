"""A pipeline that starts over deletes nothing that may be somebody else's, however it came there (SO4)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.runs.resets.test_reset import World, reset
from tests.runtime.runs.resets.test_reset_killed import (
    ALL,
    NOTHING,
    NUMBERS,
    SCHEMA,
    SINKS,
    Killed,
    Moved,
    Template,
    definition,
    half_done,
    log_of,
    produce,
)
from tests.support.sqlite_sinks import SqliteSink
from typer.testing import CliRunner, Result

import headgate as hg
from headgate.api import launch
from headgate.cli.app import app
from headgate.connectors.base import SinkContext
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.registry import targets_of
from headgate.errors import StorageError, UsageError
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


def gone(*_: Any) -> Any:
    raise StorageError("list", "s3://gone", "no such bucket", is_transient=False)


def leaving(world: World, *sinks: str) -> None:
    home = str(world.root / "home")
    with Reset.holding_the_lock(home, "p", definition(world), leave=sinks) as resetting:
        resetting.carry_out(resetting.plan())


def decided(template: Template, monkeypatch: pytest.MonkeyPatch) -> World:
    """A reset that has died behind its step."""

    def dies(*_: Any) -> None:
        raise Killed

    world = template.again()
    with monkeypatch.context() as deadly:
        deadly.setattr(Reset, "_finish", dies)
        with pytest.raises(Killed):
            reset(world, definition(world))
    assert world.all() == ALL
    return world


def test_a_reset_goes_on_without_a_target_that_is_gone(template: Template, monkeypatch: Any) -> None:
    world = decided(template, monkeypatch)
    with monkeypatch.context() as away:
        for name in ("owner", "holding", "start_over"):
            away.setattr(FileSink, name, gone)
        with pytest.raises(StorageError, match=r"sink 'files' .*: headgate run PROGRAM --fresh --leave files"):
            launch.finish_reset(definition(world), SilentObserver())
        leaving(world, "files")
        assert log_of(world).sink_registry.orders() == ()
        launch.finish_reset(definition(world), SilentObserver())
    assert world.all() == [NUMBERS, Counter(), Counter()]


def test_a_program_leaves_what_only_it_could_empty(template: Template, monkeypatch: Any) -> None:
    """``headgate reset`` knows no sink of a user's own, so it could leave no other one alone."""
    world = decided(template, monkeypatch)
    with monkeypatch.context() as away:
        for name in ("owner", "holding", "start_over"):
            away.setattr(FileSink, name, gone)
        launch.start_over(definition(world), SilentObserver(), ["files"])
    assert world.all() == [NUMBERS, Counter(), Counter()]


def test_the_command_of_a_program_leaves_too(tmp_path: Path, monkeypatch: Any) -> None:
    program, seen = tmp_path / "program.py", []
    program.write_text(
        "import headgate as hg\n"
        "p = hg.Pipeline('p', parallelism=1)\n"
        "p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\n"
    )
    monkeypatch.setattr("headgate.cli.run.check_cluster", lambda *_: None)
    monkeypatch.setattr("headgate.spark.session.check_cluster", lambda *_: None)
    monkeypatch.setattr("headgate.cli.run.exec_supervisor", lambda *_: None)
    for module in ("headgate.cli.run", "headgate.api.launch"):
        monkeypatch.setattr(f"{module}.start_over", lambda *given: seen.append(given[2]))
    monkeypatch.setattr("headgate.spark.session.start_pipeline", gone)

    def told(*options: str) -> Any:
        place = ["--quiet", "--dir", str(tmp_path / "home")]
        return CliRunner().invoke(app, ["run", str(program), *options, *place]).exception

    told("--fresh", "--leave", "a", "--leave", "b", "--supervised")
    told("--fresh", "--leave", "a")
    assert seen == [("a", "b"), ("a",)]
    assert str(told("--leave", "a")) == "--leave is about --fresh, which is not given"


@pytest.mark.parametrize("is_moved", [False, True])
def test_another_machine_or_directory_leaves_too(template: Template, monkeypatch: Any, is_moved: bool) -> None:
    """Behind the step the targets belong to a former life, which only the log tells."""
    world, home = decided(template, monkeypatch), "elsewhere" if is_moved else "home"
    made = world.pipeline(sinks=SINKS)
    if is_moved:
        (world.root / "home").rename(world.root / home)
        made.override(checkpoint_dir=str(world.root / home))
    around = Process() if is_moved else Elsewhere()
    root, program = str(world.root / home), made.definition()
    with Reset.holding_the_lock(root, "p", program, around, leave=["files"]) as resetting:
        resetting.carry_out(resetting.plan())
    assert world.all() == [NUMBERS, Counter(), Counter()]


def test_what_was_left_is_written_to_when_it_has_forgotten(template: Template) -> None:
    world = template.again()
    leaving(world, "files")
    with pytest.raises(UsageError, match="sink 'files' of pipeline 'p' belongs to former checkpoints"):
        restart.begin_generation(definition(world), log_of(world), "test", lambda _: None)
    FileSink(world.files, "parquet").target("p", "files").forget()
    produce(world)
    assert world.all() == [NUMBERS + NUMBERS, NUMBERS, NUMBERS]


def test_only_a_sink_that_there_is_can_be_left(template: Template) -> None:
    with pytest.raises(UsageError, match=r"has no sink 'fils' to leave; its sinks: 'files', 'own', 'stream'"):
        leaving(template.again(), "fils", "files")


def command(moved: Moved, *options: str) -> Result:
    return CliRunner().invoke(app, ["reset", "p", "--dir", str(moved.root / "home"), *options])


def test_the_command_says_what_it_leaves(tmp_path: Path) -> None:
    moved = Moved(tmp_path, ("app/a",))
    result = command(moved, "--leave", "out", "--yes")
    assert result.exit_code == 0, result.output
    store = moved.stores[0]
    assert (
        f"Sink 'out' is left as it is (stream app/a in {store}); no start writes there before it was made to forget "
        f"whose it is: headgate streams forget 'p/out' --store '{store}'\n" in result.output
    )
    assert moved.counts() == {"app/a": 1}
    with Store.open(store) as opened:
        opened.pipelines.forget_owner("p/out")
    moved.produce()
    assert moved.counts() == {"app/a": 2}


def test_json_says_whether_anything_was_reset(tmp_path: Path) -> None:
    moved = Moved(tmp_path, ("app/a",))

    def told(*options: str) -> Any:
        found = json.loads(command(moved, "--json", *options).output)
        return found["is_reset"], found["left"]

    assert told() == (False, [])
    assert told("--leave", "out") == (False, ["out"])
    assert told("--yes") == (True, [])
    assert told("--yes") == (False, []), "there was nothing to do"
    assert moved.counts() == Counter()


def test_json_says_that_a_reset_was_finished(tmp_path: Path, monkeypatch: Any) -> None:
    moved = Moved(tmp_path, ("app/a",))
    with monkeypatch.context() as deadly:
        deadly.setattr(Reset, "_finish", gone)
        with pytest.raises(StorageError):
            moved.reset()
    assert json.loads(command(moved, "--json").output)["is_reset"] is True
    assert moved.counts() == Counter()


def test_a_store_that_was_removed_needs_no_leave(tmp_path: Path) -> None:
    moved = Moved(tmp_path, ("app/a",))
    shutil.rmtree(tmp_path / "store")
    assert command(moved, "--yes").exit_code == 0


def of_sinks(root: Path, **sinks: Any) -> Any:
    """A pipeline with these sinks, and its checkpoints below ``root``."""
    made = hg.Pipeline("p", checkpointing=hg.Checkpointing("100ms", dir=str(root / "home")))
    rows = made.source(hg.FromRows([{"number": 1, "text": "x"}]))
    for name, sink in sinks.items():
        rows.sink(sink, name=name)
    found = made.definition()
    return replace(found, targets=targets_of(found.graph))


def to_stream(root: Path, *names: str) -> Any:
    return of_sinks(root, **{name: hg.StreamSink("app/out", store=str(root / "store")) for name in names})


def reset_leaving(root: Path, *names: str, program: Any = None) -> None:
    with Reset.holding_the_lock(str(root / "home"), "p", program, leave=names) as resetting:
        resetting.carry_out(resetting.plan())


@pytest.mark.parametrize("kept", [("a", "b"), ("b",)])
def test_a_stream_is_left_by_all_of_its_sinks(tmp_path: Path, kept: tuple[str, ...]) -> None:
    """``kept``: what the program has; without ``a`` that is a former name of ``b``, which has written nothing yet."""
    world = World(tmp_path)
    produce(world, to_stream(tmp_path, "a", "b") if "a" in kept else to_stream(tmp_path, "a"))
    if "a" not in kept:
        log_of(world).sink_registry.note(0, to_stream(tmp_path, "b").targets)
    with pytest.raises(UsageError, match=r"'a' .* cannot be left alone: sink 'b' writes to stream .* leave both"):
        reset_leaving(tmp_path, "a")
    before = NUMBERS + NUMBERS if "a" in kept else NUMBERS
    assert world.in_stream() == before
    reset_leaving(tmp_path, "a", "b")
    assert world.in_stream() == before


def test_a_former_name_that_nobody_wrote_down_keeps_its_stream(tmp_path: Path) -> None:
    world = World(tmp_path)
    produce(world, to_stream(tmp_path, "a"))
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(UsageError, match=r"sink 'a' .* cannot be left alone"):
        reset_leaving(tmp_path, "a", program=to_stream(tmp_path, "b"))
    assert world.in_stream() == NUMBERS


def test_a_directory_is_left_by_one_of_its_sinks(tmp_path: Path) -> None:
    world = World(tmp_path)
    produce(world, of_sinks(tmp_path, **{name: FileSink(world.files, "parquet", roll_interval=0) for name in "ab"}))
    assert world.in_files() == NUMBERS + NUMBERS
    reset_leaving(tmp_path, "a")
    assert world.in_files() == NUMBERS
