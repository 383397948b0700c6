"""Pipelines with everything in an object store, on a real server that is killed meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.killing import held_pipeline, run_killing
from tests.runtime.launching import Zygote
from tests.runtime.running import Run, definition_of
from tests.servers.objects import BUCKET, ObjectServer, object_server

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.model.progress import SilentObserver
from headgate.storage.urls import open_storage

WAIT_S = 300.0
_ABORTED = re.compile(r"checkpoint (\d+) was aborted: ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as started:
        yield started


@pytest.fixture
def zygote(server: ObjectServer) -> Iterator[Zygote]:
    """One of its own: what another test has started does not know where the server is."""
    made = Zygote()
    yield made
    made.close()


class Watching(SilentObserver):
    """Lets a test wait for what it hears."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.checkpoints = 0
        self.completed: list[int] = []
        self._changed = threading.Condition()

    def on_note(self, text: str) -> None:
        with self._changed:
            self.notes.append(text)
            self._changed.notify_all()

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self.on_note(f"restart: {reason}")

    def on_checkpoint(self, checkpoint: Any, duration_ms: int, size_bytes: int) -> None:
        with self._changed:
            self.checkpoints += 1
            self.completed.append(int(checkpoint))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), self.notes[-5:]

    def wait_outage(self, scheme: str) -> None:
        """Wait until the run says that its storage fails."""
        self.wait(lambda: any(scheme in note for note in self.notes))

    @property
    def aborted(self) -> set[int]:
        """The checkpoints that were aborted."""
        return {int(found[1]) for found in map(_ABORTED.match, self.notes) if found is not None}

    def wait_checkpoints(self, more: int) -> None:
        wanted = self.checkpoints + more
        self.wait(lambda: self.checkpoints >= wanted)


def pipeline(
    place: str, parallelism: int, rows: int, checkpoints: str = "checkpoints", rate: float = 500
) -> hg.Pipeline:
    made = hg.Pipeline(
        "p",
        parallelism=parallelism,
        checkpointing=hg.Checkpointing(interval="100ms", dir=f"{place}/{checkpoints}", tolerable_failures=1_000),
        restart=hg.FixedDelay(delay="50ms", attempts=100),
    )
    numbers = {"n": hg.RowNumber()}
    source = hg.Generator(numbers, rows=rows, rows_per_second=rate, splits=2, time="deterministic", batch_rows=20)
    made.source(source, name="in").sink(hg.FileSink(f"{place}/out", "parquet", roll_interval=0), name="out")
    return made


def numbers_at(place: str) -> list[int]:
    listed = [path for path in open_storage(f"{place}/out").list("") if not path.startswith("_")]
    assert listed == committed_files(f"{place}/out")
    return sorted(read_committed(f"{place}/out")["n"].to_list())


def test_a_pipeline_goes_on_after_its_object_store_was_killed(server: ObjectServer, tmp_path: Path) -> None:
    if not server.keeps:
        pytest.skip("killed, moto would lose its objects; stopped, it keeps each request waiting for half a minute")
    place, watching = f"s3://{BUCKET}/killed", Watching()
    with testing.running(held_pipeline(pipeline(place, 2, 3_000), tmp_path / "gate"), observer=watching) as run:
        watching.wait_checkpoints(3)
        server.fail()
        watching.wait_outage("s3://")
        server.heal()
        (tmp_path / "gate").touch()
        result = run.wait(WAIT_S)
    assert result is not None
    assert result.is_finished
    assert not watching.aborted & set(watching.completed)
    assert numbers_at(place) == list(range(3_000))
    assert open_storage(f"{place}/out").list("_staging") == []


def test_workers_that_are_killed_leave_nothing_twice_in_the_object_store(
    start: Callable[..., Run], server: ObjectServer
) -> None:
    place = f"s3://{BUCKET}/workers"
    run = start(definition_of(pipeline(place, 2, 1_000)))
    for count in (1, 2):
        run.wait_checkpoints(2)
        run.kill(count % 2)
        run.wait_restarts(count)
    assert run.result().is_finished
    assert numbers_at(place) == list(range(1_000))
    assert open_storage(f"{place}/out").list("_staging") == []


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_restart_at_another_parallelism_goes_on_in_the_object_store(
    server: ObjectServer, parallelism: int, tmp_path: Path
) -> None:
    place, watching = f"s3://{BUCKET}/rescaled-{parallelism}", Watching()
    with testing.running(held_pipeline(pipeline(place, 2, 1_000), tmp_path / "never"), observer=watching) as run:
        watching.wait_checkpoints(3)
        run.stop()
        assert run.wait(WAIT_S) is not None
    assert len(numbers_at(place)) < 1_000
    result = run_killing(pipeline(place, parallelism, 1_000), 2)
    assert result.is_finished
    assert numbers_at(place) == list(range(1_000))


def test_a_savepoint_in_the_object_store_is_begun_from_at_another_parallelism(
    server: ObjectServer, tmp_path: Path
) -> None:
    place, watching = f"s3://{BUCKET}/saved", Watching()
    with testing.running(held_pipeline(pipeline(place, 2, 1_000), tmp_path / "never"), observer=watching) as run:
        watching.wait_checkpoints(3)
        run.stop(savepoint=f"{place}/savepoint")
        assert run.wait(WAIT_S) is not None
    assert len(numbers_at(place)) < 1_000
    with pytest.raises(hg.PipelineFailed, match="belongs to"):  # to the pipeline with other checkpoints
        testing.run(pipeline(place, 2, 1_000, checkpoints="others"))
    taken_over = testing.run(pipeline(place, 3, 1_000), restore=f"{place}/savepoint")
    assert taken_over.is_finished
    assert numbers_at(place) == list(range(1_000))


PROGRAM = """
import sys
from headgate import testing
from tests.runtime.runs.test_object_stores import pipeline
assert testing.run(pipeline(sys.argv[1], 2, 1_000)).is_finished
"""


@pytest.mark.run
def test_a_process_killed_around_its_commits_leaves_each_record_once(server: ObjectServer, tmp_path: Path) -> None:
    """Killed after a checkpoint completed, before its uploads are completed, and in a start in front of that."""
    place = f"s3://{BUCKET}/around-commits"

    def started(**environment: str) -> int:
        command = [sys.executable, "-c", PROGRAM, place]
        root = Path(__file__).parents[3]
        return subprocess.run(command, cwd=root, env={**os.environ, **environment}, check=False).returncode

    for point in ("after-manifest:2", "in-publish:2", "in-recover:1"):
        marker = tmp_path / point.partition(":")[0]
        assert started(HEADGATE_KILL_AT=f"{point}:{marker}") == -signal.SIGKILL, point
    assert started() == 0
    assert numbers_at(place) == list(range(1_000))
    storage = open_storage(f"{place}/out")
    assert storage.list("_staging") == []
    assert storage.uploads is None or storage.uploads.list("") == []


def test_an_older_savepoint_is_gone_back_to_and_later_files_are_named(server: ObjectServer, tmp_path: Path) -> None:
    place, watching = f"s3://{BUCKET}/older", Watching()
    with testing.running(held_pipeline(pipeline(place, 2, 1_000), tmp_path / "gate"), observer=watching) as run:
        watching.wait_checkpoints(2)
        saved = run.take_savepoint(f"{place}/savepoint")
        assert saved is not None
        (tmp_path / "gate").touch()
        assert run.wait(WAIT_S) is not None
    before = committed_files(f"{place}/out")
    newest = max(watching.completed)
    assert testing.run(pipeline(place, 3, 1_000), restore=f"{place}/savepoint", go_back_past=newest).is_finished
    storage = open_storage(f"{place}/out")
    for name in before:
        if int(name.split("-")[2]) > saved.checkpoint:
            storage.delete(name)  # as docs/guide/savepoints.md says
    assert numbers_at(place) == list(range(1_000))
    assert storage.uploads is None or storage.uploads.list("") == []
