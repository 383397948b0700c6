"""How a start asks the targets of its sinks for ownership, with a real log (docs/spec/lives.md)."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.test_fenced_sink import ClaimsOnly, ForgetsLives
from tests.storage.looked import Looked
from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink

import headgate as hg
from headgate.connectors.files import file_sink
from headgate.connectors.registry import targets_of
from headgate.errors import StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.connectors import SinkOwnership
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.storage.urls import open_storage

STRANGER = PipelineIdentity("stranger", "/stranger", "far", 0)
KINDS = (hg.FileSink, SqliteSink, SqliteLedgerSink)

each = pytest.mark.parametrize("kind", KINDS)


def begin(home: Path, **sinks: Any) -> NewGeneration:
    """Begin a generation of a pipeline with these sinks."""
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=home))
    source = pipeline.source(hg.FromRows([{"n": 1}]))
    for name, sink in sinks.items():
        source.sink(sink, name=name)
    log = CheckpointLog(open_storage(str(home)), "p")
    found = begin_generation(pipeline.definition(), log, "test", lambda text: None)
    assert isinstance(found, NewGeneration)
    return found


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@each
def test_nobody_is_told_and_nothing_claimed_when_one_target_belongs_to_somebody_else(
    tmp_path: Path, kind: Any
) -> None:  # LV2
    mine, taken = kind(str(tmp_path / "mine")), kind(str(tmp_path / "taken"))
    taken.own("p", "taken", STRANGER)
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=r"sink 'taken' of pipeline 'p' belongs to .* in /stranger, begun on far"):
        begin(tmp_path / "home", mine=mine, taken=taken)
    assert files_below(tmp_path) - before - {"mine"} == {"home/p/life"}  # a database is made by looking into it
    assert mine.owner("p", "mine") == Owner()


@each
def test_a_life_that_is_told_stays_told_when_the_start_dies_behind_it(tmp_path: Path, kind: Any) -> None:  # LV3
    class Dies(kind):
        def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
            raise StorageError("own", "it", "the process dies", is_transient=False)

    first = kind(str(tmp_path / "first"))
    with pytest.raises(UsageError, match="the process dies"):
        begin(tmp_path / "home", first=first, second=Dies(str(tmp_path / "second")))
    begin(tmp_path / "home", first=first, second=kind(str(tmp_path / "second")))


@each
def test_a_life_that_comes_between_the_answer_and_the_telling_stays(tmp_path: Path, kind: Any) -> None:  # LV3
    class AnswersEarly(kind):
        def owner(self, pipeline: str, node: str) -> Owner:
            found = super().owner(pipeline, node)
            super().own(pipeline, node, STRANGER)
            return found

    with pytest.raises(UsageError, match="in /stranger"):
        begin(tmp_path / "home", out=AnswersEarly(str(tmp_path / "out")))
    assert kind(str(tmp_path / "out")).owner("p", "out") == Owner(STRANGER), "it was neither fenced nor swept"


@each
def test_the_first_generation_after_forgetting_exceeds_all_before(tmp_path: Path, kind: Any) -> None:  # LV4
    sink = kind(str(tmp_path / "out"))
    for _ in range(3):
        begin(tmp_path / "home", out=sink)
    shutil.rmtree(tmp_path / "home")
    if isinstance(sink, hg.FileSink):
        sink.target("p", "out").forget()
    else:
        sink.forget_owner("p", "out")
    assert begin(tmp_path / "home", out=sink).generation == 4


@each
def test_a_target_that_knows_more_than_the_log_stops_the_pipeline(tmp_path: Path, kind: Any) -> None:  # LV6
    sink = kind(str(tmp_path / "out"))
    begin(tmp_path / "home", out=sink)
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    begin(tmp_path / "home", out=sink)
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "copy").rename(tmp_path / "home")
    for _ in range(3):
        with pytest.raises(UsageError, match="end before generation 2: they are an older copy"):
            begin(tmp_path / "home", out=sink)


def test_whoever_goes_on_for_another_process_writes_down_its_targets(tmp_path: Path) -> None:
    def go_on(mine: Generation | None, *sinks: str) -> set[str]:
        """Begin as the child of a supervisor or a standby does: with a program that may have been changed."""
        pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "home"))
        source = pipeline.source(hg.FromRows([{"n": 1}]))
        for name in sinks:
            source.sink(hg.FileSink(str(tmp_path / name)), name=name)
        definition = pipeline.definition()
        definition = replace(definition, targets=targets_of(definition.graph))
        log = CheckpointLog(open_storage(str(tmp_path / "home")), "p")
        begun = begin_generation(definition, log, "test", lambda text: None, mine)
        assert isinstance(begun, NewGeneration)
        begun.commits.close()
        found = log.sink_registry.targets()
        assert found is not None
        return {target.sink for target in found}

    assert go_on(None, "first") == {"first"}
    assert go_on(Generation(1), "first", "second") == {"first", "second"}
    assert go_on(Generation(2), "second") == {"first", "second"}


@each
def test_a_former_name_of_a_sink_belongs_to_its_life(tmp_path: Path, kind: Any) -> None:
    sink = kind(str(tmp_path / "out"))
    begin(tmp_path / "home", out=sink)
    assert begin(tmp_path / "home", renamed=sink).generation == 2
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=r"target of sink 'third' of pipeline 'p' knows its sink 'out', which belongs"):
        begin(tmp_path / "elsewhere", third=sink)
    assert files_below(tmp_path) - before == {"elsewhere/p/life"}
    assert sink.owner("p", "third").is_unknown
    assert begin(tmp_path / "home", third=sink, out=sink).generation == 3
    assert [other.sink for other in sink.owner("p", "out").others] == ["renamed", "third"]


@each
def test_an_older_copy_is_told_by_a_former_name_too(tmp_path: Path, kind: Any) -> None:  # LV6
    sink = kind(str(tmp_path / "out"))
    begin(tmp_path / "home", out=sink)
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    begin(tmp_path / "home", out=sink)
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "copy").rename(tmp_path / "home")
    with pytest.raises(UsageError, match=r"its sink 'out', which was written to by generation 2, .* an older copy"):
        begin(tmp_path / "home", renamed=sink)


@each
def test_what_was_made_to_forget_and_other_pipelines_stand_in_nobodys_way(tmp_path: Path, kind: Any) -> None:
    sink = kind(str(tmp_path / "out"))
    for owner in (("p", "out"), ("p2", "out"), ("pp", "third")):
        sink.own(*owner, STRANGER)
    if isinstance(sink, hg.FileSink):
        sink.target("p", "out").forget()
    else:
        sink.forget_owner("p", "out")
    assert begin(tmp_path / "home", renamed=sink, again=sink).generation == 1
    assert begin(tmp_path / "home", renamed=sink, again=sink).generation == 2


def test_a_directory_of_many_sinks_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # LV11
    storages = {name: Looked() for name in ("one", "two")}
    monkeypatch.setattr(file_sink, "open_storage", lambda url, access: storages[Path(url).name])
    for name in storages:
        (tmp_path / name).mkdir()
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=tmp_path / "home"))
    source = pipeline.source(hg.FromRows([{"n": 1}]))
    sinks = {f"out-{number}": hg.FileSink(tmp_path / ("two" if number == 3 else "one")) for number in range(8)}
    for name, sink in sinks.items():
        source.sink(sink, name=name)
        sink.own("p", name, PipelineIdentity(name, "/home", "far", 1))
    sinks["out-4"].target("p", "out-4").forget()
    sinks["out-5"].open_committer("p", "out-5", Generation(7)).recover([])
    source.sink(new := hg.FileSink(tmp_path / "one"), name="a-new-one")
    sinks["one"], sinks["a-new-one"] = sinks["out-0"], new
    source.sink(sinks["one"], name="one")
    storages["one"].seen.clear()
    found = SinkOwnership(pipeline.definition(), STRANGER, "/home", "far").ask()
    assert len(storages["one"].seen) == 2 + 7, "two listings, and each life once"
    assert found == {name: sink.owner("p", name) for name, sink in sinks.items()}


def test_a_sink_that_remembers_nothing_is_not_asked(tmp_path: Path) -> None:
    assert begin(tmp_path / "home", out=hg.Discard()).generation == 1


@pytest.mark.parametrize(("kind", "said"), [(ClaimsOnly, "give it a method claimed"), (ForgetsLives, "fence.life")])
def test_a_sink_of_before_is_told_what_to_add_and_nothing_is_written(tmp_path: Path, kind: Any, said: str) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=said):
            begin(tmp_path / "home", out=kind(str(tmp_path / "out")))
    with sqlite3.connect(tmp_path / "out") as target:
        known = target.execute("select generation from owners").fetchall() if kind is ForgetsLives else []
    assert known in ([], [(0,)]), "it was never fenced for a generation"
