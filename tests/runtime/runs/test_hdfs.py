"""Pipelines with everything in HDFS: its NameNode and its DataNode are killed meanwhile, and started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.runtime.runs.test_object_stores import WAIT_S, Watching, numbers_at, pipeline
from tests.servers.hdfs import HdfsCluster, hdfs_cluster

from headgate import testing
from headgate.storage.urls import open_storage

pytestmark = pytest.mark.xdist_group("hdfs")


@pytest.fixture(scope="module")
def cluster() -> Iterator[HdfsCluster]:
    with hdfs_cluster() as started:
        yield started


@pytest.mark.parametrize("server", ["name_node", "data_node"])
def test_a_pipeline_goes_on_after_a_server_of_hdfs_was_killed(cluster: HdfsCluster, server: str) -> None:
    place, watching = f"{cluster.url}/killed {server}", Watching()
    with testing.running(pipeline(place, 2, 5_000), observer=watching) as run:
        watching.wait_checkpoints(2)
        cluster.kill(server)
        watching.wait(lambda: any("hdfs://" in note for note in watching.notes))
        cluster.start(server)
        watching.wait_checkpoints(1)
        result = run.wait(WAIT_S)
    assert result is not None
    assert result.is_finished
    assert numbers_at(place) == list(range(5_000))
    assert open_storage(f"{place}/out").list("_staging") == []


@pytest.mark.deep
def test_a_savepoint_in_hdfs_is_begun_from_at_another_parallelism(cluster: HdfsCluster) -> None:
    place, watching = f"{cluster.url}/saved", Watching()
    with testing.running(pipeline(place, 2, 8_000), observer=watching) as run:
        watching.wait_checkpoints(1)
        run.stop(savepoint=f"{place}/savepoint")
        assert run.wait(WAIT_S) is not None
    before = numbers_at(place)
    assert 0 < len(before) < 8_000
    result = testing.run(pipeline(place, 3, 8_000), restore=f"{place}/savepoint")
    assert result.is_finished
    assert numbers_at(place) == list(range(8_000))
