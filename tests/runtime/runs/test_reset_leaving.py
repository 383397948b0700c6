"""A target that is gone for good keeps a reset from its end, until its sink is left."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs.test_reset import World
from tests.runtime.runs.test_reset_killed import (
    ALL,
    NUMBERS,
    SINKS,
    Killed,
    Template,
    definition,
    log_of,
    produce,
    reset,
)
from tests.runtime.runs.test_reset_moved import Moved
from tests.runtime.runs.test_reset_other_owners import Elsewhere
from typer.testing import CliRunner, Result

import headgate as hg
from headgate.api import launch
from headgate.cli.app import app
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.registry import targets_of
from headgate.errors import StorageError, UsageError
from headgate.model.progress import SilentObserver
from headgate.runtime.driver import restart
from headgate.runtime.driver.reset import Reset
from headgate.runtime.surroundings import Process
from headgate.store.store import Store


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return Template(tmp_path)


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
