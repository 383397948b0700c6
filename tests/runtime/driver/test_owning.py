"""How a start asks and tells the targets of its sinks, in front of a real log (docs/spec/lives.md)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.errors import StorageError, UsageError
from headgate.model.life import Life, Owner
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.claims import NewGeneration, begin_generation
from headgate.storage.backends import open_storage

STRANGER = Life("stranger", "/stranger", "far", 0)


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


def test_nobody_is_told_and_nothing_claimed_when_one_target_belongs_to_somebody_else(tmp_path: Path) -> None:  # LV2
    mine, taken = hg.FileSink(tmp_path / "mine"), hg.FileSink(tmp_path / "taken")
    taken.own("p", "taken", STRANGER)
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=r"sink 'taken' of pipeline 'p' belongs to .* in /stranger, begun on far"):
        begin(tmp_path / "home", mine=mine, taken=taken)
    assert files_below(tmp_path) - before == {"home/p/life"}


def test_a_life_that_is_told_stays_told_when_the_start_dies_behind_it(tmp_path: Path) -> None:  # LV1, LV3
    class Dies(hg.FileSink):
        def own(self, pipeline: str, node: str, life: Life) -> Owner:
            raise StorageError("own", "it", "the process dies", is_transient=False)

    first = hg.FileSink(tmp_path / "first")
    with pytest.raises(StorageError):
        begin(tmp_path / "home", first=first, second=Dies(tmp_path / "second"))
    begin(tmp_path / "home", first=first, second=hg.FileSink(tmp_path / "second"))


def test_a_life_that_comes_between_the_answer_and_the_telling_stays(tmp_path: Path) -> None:  # LV3
    class AnswersEarly(hg.FileSink):
        def owner(self, pipeline: str, node: str) -> Owner:
            found = super().owner(pipeline, node)
            super().own(pipeline, node, STRANGER)
            return found

    with pytest.raises(UsageError, match="in /stranger"):
        begin(tmp_path / "home", out=AnswersEarly(tmp_path / "out"))
    assert not (tmp_path / "out/_claims").exists(), "it was neither fenced nor swept"


def test_the_first_generation_after_forgetting_exceeds_all_before(tmp_path: Path) -> None:  # LV4
    sink = hg.FileSink(tmp_path / "out")
    for _ in range(3):
        begin(tmp_path / "home", out=sink)
    shutil.rmtree(tmp_path / "home")
    sink.target("p", "out").forget()
    assert begin(tmp_path / "home", out=sink).generation == 4


def test_a_target_that_knows_more_than_the_log_stops_the_pipeline(tmp_path: Path) -> None:  # LV6
    sink = hg.FileSink(tmp_path / "out")
    begin(tmp_path / "home", out=sink)
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    begin(tmp_path / "home", out=sink)
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "copy").rename(tmp_path / "home")
    for _ in range(3):
        with pytest.raises(UsageError, match="end before generation 2: they are an older copy"):
            begin(tmp_path / "home", out=sink)


def test_a_sink_that_remembers_nothing_is_not_asked(tmp_path: Path) -> None:
    assert begin(tmp_path / "home", out=hg.Discard()).generation == 1
