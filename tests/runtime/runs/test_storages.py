"""Pipelines with everything in an object store, on a real server that is killed meanwhile."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few
from tests.runtime.launching import Zygote
from tests.runtime.running import Run, definition_of
from tests.runtime.runs.test_results import generator, recounted, same, windowed
from tests.servers.clouds import AzureServer, GoogleServer, cloud_server
from tests.servers.hdfs import HdfsCluster, hdfs_pair
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.postgres import postgres_server
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key
from tests.support.killing import held_pipeline, run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import FileCommitter, committed_files, read_committed
from headgate.errors import CorruptionError, PipelineFailed, StorageError
from headgate.model.progress import SilentObserver
from headgate.runtime.driver import driver as driver_module
from headgate.storage.urls import open_storage
from headgate.store.store import Store
from headgate.testing.source_kit import check_source

WAIT_S = 300.0
_ABORTED = re.compile(r"checkpoint (\d+) was aborted: ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as started:
        yield started


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


def test_workers_that_are_killed_leave_nothing_twice_in_the_object_store(server: ObjectServer) -> None:
    """The zygote is its own: what another test has started does not know where the server is."""
    place = f"s3://{BUCKET}/workers"
    definition = definition_of(pipeline(place, 2, 1_000))
    with closing(Zygote()) as zygote, closing(Run(zygote, definition)) as run:
        for count in (1, 2):
            run.wait_checkpoints(2)
            run.kill(count % 2)
            run.wait_restarts(count)
        assert run.result().is_finished
    assert numbers_at(place) == list(range(1_000))
    assert open_storage(f"{place}/out").list("_staging") == []


@pytest.mark.parametrize("parallelism", few([3, 1], 1))
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


HEAD = """
import sys
import headgate as hg
from headgate import testing

"""
RUN = "assert testing.run(pipeline(sys.argv[1], 2, 1_000)).is_finished"
PROGRAM = HEAD + inspect.getsource(pipeline) + RUN
"""It imports the product only: that is most of what a start costs."""


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


@pytest.mark.xdist_group("hdfs")
@pytest.mark.parametrize("server", few(["name_node", "data_node"], 1))
def test_a_pipeline_goes_on_after_a_server_of_hdfs_was_killed(hdfs: HdfsCluster, server: str, tmp_path: Path) -> None:
    place, watching = f"{hdfs.url}/killed {server}", Watching()
    with testing.running(held_pipeline(pipeline(place, 2, 5_000), tmp_path / "gate"), observer=watching) as run:
        watching.wait_checkpoints(2)
        hdfs.kill(server)
        watching.wait(lambda: any("hdfs://" in note for note in watching.notes))
        hdfs.start(server)
        watching.wait_checkpoints(1)
        (tmp_path / "gate").touch()
        result = run.wait(WAIT_S)
    assert result is not None
    assert result.is_finished
    assert numbers_at(place) == list(range(5_000))
    assert open_storage(f"{place}/out").list("_staging") == []


@pytest.mark.xdist_group("hdfs")
@pytest.mark.deep
def test_a_pipeline_goes_on_with_the_other_name_node_of_a_pair(tmp_path: Path) -> None:
    with hdfs_pair() as pair:
        place, watching = f"{pair.url}/failover", Watching()
        with testing.running(held_pipeline(pipeline(place, 2, 10_000), tmp_path / "gate"), observer=watching) as run:
            for active, other in ((1, 2), (2, 1)):
                watching.wait_checkpoints(2)
                watching.notes.clear()
                pair.kill(f"name_node_{active}")
                watching.wait_outage("hdfs://")
                pair.activate(other)
                pair.start(f"name_node_{active}")
            watching.wait_checkpoints(2)
            (tmp_path / "gate").touch()
            result = run.wait(WAIT_S)
        assert result is not None
        assert result.is_finished
        assert numbers_at(place) == list(range(10_000))
        assert open_storage(f"{place}/out").list("_staging") == []


@pytest.mark.xdist_group("hdfs")
@pytest.mark.deep
def test_a_savepoint_in_hdfs_is_begun_from_at_another_parallelism(hdfs: HdfsCluster, tmp_path: Path) -> None:
    place, watching = f"{hdfs.url}/saved", Watching()
    with testing.running(held_pipeline(pipeline(place, 2, 8_000), tmp_path / "never"), observer=watching) as run:
        watching.wait_checkpoints(1)
        run.stop(savepoint=f"{place}/savepoint")
        assert run.wait(WAIT_S) is not None
    before = numbers_at(place)
    assert 0 < len(before) < 8_000
    result = testing.run(pipeline(place, 3, 8_000), restore=f"{place}/savepoint")
    assert result.is_finished
    assert numbers_at(place) == list(range(8_000))


@pytest.mark.xdist_group("hdfs")
@pytest.mark.deep
@pytest.mark.parametrize("server", ["name_node", "data_node"])
def test_events_of_a_store_in_hdfs_go_through_once_while_a_server_is_killed(
    hdfs: HdfsCluster, tmp_path: Path, server: str
) -> None:
    with postgres_server() as postgres:
        url, watching, is_over = postgres.url(server), Watching(), threading.Event()
        with Store.open(url, chunks=f"{hdfs.url}/store {server}") as store:
            store.create_stream("in", SCHEMA, segments=2, routing_key="key")
            checkpointing = hg.Checkpointing(interval="200ms", dir=tmp_path, tolerable_failures=1_000)
            made = hg.Pipeline("p", parallelism=2, checkpointing=checkpointing)
            source = made.source(hg.StreamSource("in", store=url), name="source")
            source.sink(hg.StreamSink("out", store=url, routing_key="key", segments=2), name="out")
            with (
                flowing(store, is_over, "in", rounds=20, most=2, pause_s=0.1) as traffic,
                testing.running(made, observer=watching) as run,
            ):
                watching.wait_checkpoints(2)
                with traffic.at_work:  # an append that meets the outage may be there or not
                    hdfs.kill(server)
                    hdfs.start(server)
                    while not hdfs.is_writable():  # the NameNode is in safe mode first
                        continue
                watching.wait_checkpoints(2)
                is_over.set()
                result = run.wait(WAIT_S)
            assert result is not None
            assert result.is_finished
            assert per_key(store) == all_rounds(traffic)
            assert [problem for problem in store.fsck() if not problem.is_harmless] == []


AZURE = pytest.param("azure", marks=(pytest.mark.deep, pytest.mark.xdist_group("azure")))


@pytest.fixture(scope="module", params=["google", AZURE])
def cloud(request: pytest.FixtureRequest) -> Iterator[AzureServer | GoogleServer]:
    with cloud_server(request.param) as started:
        yield started


@pytest.mark.deep
def test_a_savepoint_is_begun_from_at_another_parallelism_and_the_output_is_read(
    cloud: AzureServer | GoogleServer,
) -> None:
    place, watching = f"{cloud.url}/a place/saved", Watching()
    with testing.running(pipeline(place, 2, 1_000, rate=10), observer=watching) as run:
        watching.wait_checkpoints(2)
        run.stop(savepoint=f"{place}/savepoint")
        assert run.wait(WAIT_S) is not None
    assert len(numbers_at(place)) < 1_000
    taken_over = run_killing(pipeline(place, 3, 1_000), 2, restore=f"{place}/savepoint")
    assert taken_over.is_finished
    assert numbers_at(place) == list(range(1_000))
    assert open_storage(f"{place}/out").list("_staging") == []

    rows = check_source(hg.ParquetFiles(f"{place}/out/"), parallelisms=(1, 2))
    assert sorted(row["n"] for row in rows) == list(range(1_000))


@pytest.mark.deep
@pytest.mark.xdist_group("azure")
def test_a_pipeline_goes_on_after_azurite_was_killed(tmp_path: Path) -> None:
    with cloud_server("azure") as cloud:
        assert isinstance(cloud, AzureServer)
        place, watching = f"{cloud.url}/killed", Watching()
        with testing.running(held_pipeline(pipeline(place, 2, 3_000), tmp_path / "gate"), observer=watching) as run:
            watching.wait_checkpoints(3)
            cloud.fail()
            watching.wait_outage("az://")
            cloud.heal()
            (tmp_path / "gate").touch()
            result = run.wait(2 * WAIT_S)
        assert result is not None
        assert result.is_finished
        assert numbers_at(place) == list(range(3_000))
        assert open_storage(f"{place}/out").list("_staging") == []


Start = Any
SOURCE = generator(2_500, 2_500, batch=50)


@pytest.fixture
def driver_storage(monkeypatch: pytest.MonkeyPatch) -> list[FaultyStorage]:
    """Put a faulty storage between the driver and its checkpoints; it is in the list once the driver was made."""
    made: list[FaultyStorage] = []
    open_storage = driver_module.open_storage

    def faulty(url: str) -> FaultyStorage:
        made.append(FaultyStorage(open_storage(url)))
        return made[-1]

    monkeypatch.setattr(driver_module, "open_storage", faulty)
    return made


def finish(run: Any, root: Path) -> Any:
    result = run.result()
    assert result.is_finished
    same(read_committed(str(root / "out")), recounted(SOURCE))
    return result


def test_a_checkpoint_that_fails_at_any_step_costs_only_itself(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:
    """Its state cannot be written, its manifest cannot, its id cannot be reserved."""
    full = Fault(FaultKind.NO_SPACE, operation="put", path_part="chk-0000000003", times=1_000)
    definition = definition_of(windowed(tmp_path, SOURCE, tolerable_failures=5), inline_bytes_max=0)
    run = start(definition, faults=[full])

    def aborted() -> int:
        return sum("was aborted" in note for note in run.notes)

    run.wait(lambda: any("checkpoint 3 was aborted" in note for note in run.notes), "a checkpoint without its state")
    run.wait_checkpoints(1)
    assert any("declined" in note and "No space left" in note for note in run.notes)
    driver_storage[0].inject(Fault(FaultKind.NO_SPACE, operation="put_if_absent", path_part="/log/"))
    run.wait(lambda: aborted() == 2, "a checkpoint without its manifest")
    run.wait_checkpoints(1)
    driver_storage[0].inject(Fault(FaultKind.IO_ERROR, operation="put_if_absent", path_part="/ids/", times=3))
    run.wait(lambda: sum("cannot begin checkpoint" in note for note in run.notes) == 3, "three failures")
    assert finish(run, tmp_path).restarts == 0
    assert 3 not in run.checkpoints
    assert aborted() == 2
    assert sum("cannot begin checkpoint" in note for note in run.notes) == 3


def test_more_failures_than_are_tolerable_restart_the_pipeline(start: Start, tmp_path: Path) -> None:
    full = Fault(FaultKind.NO_SPACE, operation="put", path_part="chk-0000000003", times=1_000)
    run = start(definition_of(windowed(tmp_path, SOURCE), inline_bytes_max=0), faults=[full])
    run.wait_restarts(1)
    assert finish(run, tmp_path).restarts == 1
    assert run.restarts[0].startswith("checkpoint 3 failed: a subtask could not write its snapshot: ")
    assert "No space left" in run.restarts[0]


def test_a_manifest_of_which_nobody_knows_restarts_the_pipeline(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:
    run = start(definition_of(windowed(tmp_path, SOURCE)))
    run.wait_checkpoints(2)
    driver_storage[0].inject(Fault(FaultKind.IO_ERROR, operation="get", path_part="/log/"))
    driver_storage[0].inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent", path_part="/log/"))
    assert finish(run, tmp_path).restarts <= 1


def test_slow_storage_costs_time_and_nothing_else(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:  # F8
    def slow() -> Fault:
        return Fault(FaultKind.SLOW, times=1_000_000, delay_ms=3)

    run = start(definition_of(windowed(tmp_path, SOURCE), inline_bytes_max=0), faults=[slow()])
    driver_storage[0].inject(slow())
    run.wait_checkpoints(1)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert finish(run, tmp_path).restarts == 1
    assert not any("was aborted" in note for note in run.notes)


def failing_commits(monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], Exception | None]) -> None:
    commit, calls = FileCommitter.commit, []

    def sometimes(self: FileCommitter, *args: Any) -> None:
        calls.append(1)
        error = fail(len(calls))
        if error is not None:
            raise error
        commit(self, *args)

    monkeypatch.setattr(FileCommitter, "commit", sometimes)


def test_commits_that_fail_for_a_while_are_repeated_until_they_succeed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_commits(monkeypatch, lambda call: StorageError("commit", "out", "busy") if call % 2 else None)
    run = start(definition_of(windowed(tmp_path, SOURCE)))
    run.wait(lambda: any("busy" in note for note in run.notes), "a commit that fails")
    assert finish(run, tmp_path).restarts == 0
    assert any("busy" in note for note in run.notes)


def test_output_that_can_never_be_committed_stops_the_pipeline(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = CorruptionError("out/part-1", 0, "a prepared file", "nothing")
    failing_commits(monkeypatch, lambda call: lost)  # the first one: on a slow machine there may be no second
    run = start(definition_of(windowed(tmp_path, SOURCE)))
    run.wait(run.driver.result.done, "the end, while there is input")
    with pytest.raises(PipelineFailed, match=r"cannot commit checkpoint \d+: sink 'out': out/part-1 is damaged"):
        run.result()
    assert run.restarts == []


def test_output_that_is_denied_in_recovery_stops_the_pipeline_for_good(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # K5: the first generation cannot commit, and what it promised is gone when the second one wants to
    commit = FileCommitter.commit

    def not_in_the_first(self: FileCommitter, *args: Any) -> None:
        if self._generation == 1:
            raise StorageError("commit", "out", "busy")
        commit(self, *args)

    monkeypatch.setattr(FileCommitter, "commit", not_in_the_first)
    definition = definition_of(windowed(tmp_path, SOURCE))
    run = start(definition)
    staged = lambda: list(tmp_path.glob("out/_staging/*/*"))  # noqa: E731
    run.wait(lambda: len(run.checkpoints) >= 2 and bool(staged()), "promised output")
    run.wait_checkpoints(1)
    for path in staged():
        path.unlink(missing_ok=True)
    run.kill(0)
    with pytest.raises(PipelineFailed, match=r"neither it nor its staged form; starting again cannot help"):
        run.result()
    assert len(run.restarts) == 1  # of the worker that was killed; none of the recovery that was denied
    assert run.driver.running_generation is None


def test_a_target_that_cannot_say_whose_it_is_stops_the_pipeline_for_good(start: Start, tmp_path: Path) -> None:
    # K5: it is damaged while a generation runs; the next one would be refused again and again
    definition = definition_of(windowed(tmp_path, SOURCE))
    run = start(definition)
    run.wait_checkpoints(1)
    for path in tmp_path.glob("out/_owners/*/*"):
        path.write_bytes(b"noise")
    run.kill(0)
    for restarts in (1, 0):  # of the worker that was killed; a first start
        with pytest.raises(
            PipelineFailed, match=r"cannot name the owner of its target: .* not in a format .*; starting"
        ) as end:
            run.result()
        assert end.value.is_for_good  # else a supervisor would start it again and again
        assert len(run.restarts) == restarts
        run = start(definition) if restarts else run


@pytest.mark.parametrize("retained", few([3, 1], 1))
def test_exactly_the_retained_checkpoints_are_left_and_the_log_is_pruned(
    start: Start, tmp_path: Path, retained: int
) -> None:
    run = start(definition_of(windowed(tmp_path, SOURCE, retained=retained), inline_bytes_max=0))
    run.wait_checkpoints(retained + 2)
    finish(run, tmp_path)
    directory = tmp_path / "checkpoints" / "p"
    newest = [f"chk-{checkpoint:010d}" for checkpoint in run.checkpoints[-retained:]]
    assert sorted(path.name for path in directory.glob("chk-*") if any(path.iterdir())) == newest
    assert len(list((directory / "log").iterdir())) == retained
    assert len(list((directory / "ids").iterdir())) == 1
