"""Pipelines with everything in HDFS: its NameNode and its DataNode are killed meanwhile, and started again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.conftest import few
from tests.killing import held_pipeline
from tests.runtime.runs.test_object_stores import WAIT_S, Watching, numbers_at, pipeline
from tests.servers.hdfs import HdfsCluster, hdfs_pair
from tests.servers.postgres import postgres_server
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key

import headgate as hg
from headgate import testing
from headgate.storage.urls import open_storage
from headgate.store.store import Store

pytestmark = pytest.mark.xdist_group("hdfs")


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
