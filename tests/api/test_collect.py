"""A result of input without end would fill the disk: it is refused before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.api import pipeline_registry
from headgate.api.collect import SCRATCH, Bound, _Watcher, temporary_directory
from headgate.model.progress import PipelineState, Progress
from headgate.storage import local_files
from headgate.store.store import Store


def generated(root: Path, **options: Any) -> hg.Stream:
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    return pipeline.source(hg.Generator({"n": hg.RowNumber()}, **options), name="numbers")


def followed(root: Path) -> hg.Stream:
    (root / "in").mkdir(exist_ok=True)
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    bounded = pipeline.source(hg.FromRows([{"line": "a"}]))
    return bounded.union(pipeline.source(hg.TextFiles(root / "in", follow=True), name="lines"))


def streamed(root: Path, **options: Any) -> hg.Stream:
    with Store.open(root / "store") as store:
        store.create_stream("s", pa.schema([("n", pa.int64())]), if_not_exists=True)
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    return pipeline.source(hg.StreamSource("s", store=str(root / "store"), **options), name="events")


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: hg.Pipeline, **_: object) -> None:
        raise RuntimeError("it runs")

    monkeypatch.setattr(hg.Pipeline, "start", start)


SPARK = SimpleNamespace(conf=SimpleNamespace(get=lambda name: "false"))
CALLS: list[Callable[[hg.Stream], object]] = [hg.Stream.collect, lambda stream: stream.to_dataframe(SPARK)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("made", "source", "hint"),
    [(generated, "numbers", "rows="), (followed, "lines", "follow=False"), (streamed, "events", "follow=False")],
)
def test_results_of_input_without_end_are_refused(
    tmp_path: Path, call: Callable[[hg.Stream], object], made: Callable[[Path], hg.Stream], source: str, hint: str
) -> None:  # every source of the stream counts, because the run ends with the last of them
    stream = made(tmp_path)
    for _ in range(2):
        with pytest.raises(hg.UsageError, match=f"source '{source}' never ends") as refused:
            call(stream)
        assert hint in str(refused.value)
        assert "give limit= or seconds=" in str(refused.value)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("call", CALLS)
def test_input_with_a_bound_is_collected(tmp_path: Path, call: Callable[[hg.Stream], object]) -> None:
    for stream in (generated(tmp_path, rows=9), streamed(tmp_path, follow=False)):
        with pytest.raises(RuntimeError, match="it runs"):
            call(stream)


def test_a_sealed_stream_is_a_bound(tmp_path: Path) -> None:
    stream = streamed(tmp_path)
    with Store.open(tmp_path / "store") as store:
        store.seal("s")
    with pytest.raises(RuntimeError, match="it runs"):
        stream.collect()


@pytest.mark.parametrize("state", [PipelineState.FINISHED, PipelineState.FAILED])
def test_nobody_waits_for_rows_of_a_run_that_has_ended(tmp_path: Path, state: PipelineState) -> None:
    handle: Any = SimpleNamespace(progress=Progress(state))
    watcher = _Watcher(Bound(limit=3, seconds=None), tmp_path)
    assert not watcher._has_enough(handle)


@pytest.mark.parametrize("times", [1, 3])
def test_others_may_remove_the_directory_of_all_looks_at_any_time(tmp_path: Path, times: int) -> None:
    opening, left = local_files.open_lock, [times]

    def removed_before(path: Path) -> int:
        if left[0]:
            left[0] -= 1
            path.parent.rmdir()  # as ``remove`` of another process, whose look was the last
        return opening(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_files, "open_lock", removed_before)
        mine = temporary_directory(str(tmp_path))
    assert not left[0]
    assert mine.path.is_dir()
    other = temporary_directory(str(tmp_path))
    mine.remove()
    assert other.path.is_dir()
    other.remove()
    assert not (tmp_path / SCRATCH).exists()


def test_another_place_is_mentioned_although_a_record_of_a_third_goes(tmp_path: Path) -> None:
    reading = Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if reading(path, *args, **options).endswith("b/"):
            path.unlink()
        return reading(path, *args, **options)

    for name in "ab":
        (tmp_path / name / "p" / "log").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        for name in ("a/", "b/", "c/"):
            pipeline_registry.remember_pipeline("p", os.path.join(tmp_path, name))
        patch.setattr(Path, "read_text", lambda path, *a, **o: read(path, *a, **o))
        assert pipeline_registry.remember_pipeline("p", os.path.join(tmp_path, "c/")) == [os.path.join(tmp_path, "a/")]
