"""Pipelines with everything in stores of Azure's and Google's protocols: killed, restored, and read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.killing import held_pipeline, run_killing
from tests.runtime.runs.test_object_stores import WAIT_S, Watching, numbers_at, pipeline
from tests.servers.clouds import AzureServer, GoogleServer, cloud_server

import headgate as hg
from headgate import testing
from headgate.storage.urls import open_storage
from headgate.testing.source_kit import check_source

AZURE = pytest.param("azure", marks=(pytest.mark.deep, pytest.mark.xdist_group("azure")))


@pytest.fixture(scope="module", params=["google", AZURE])
def server(request: pytest.FixtureRequest) -> Iterator[AzureServer | GoogleServer]:
    with cloud_server(request.param) as started:
        yield started


@pytest.mark.deep
def test_a_savepoint_is_begun_from_at_another_parallelism_and_the_output_is_read(
    server: AzureServer | GoogleServer,
) -> None:
    place, watching = f"{server.url}/a place/saved", Watching()
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
@pytest.mark.deep
@pytest.mark.xdist_group("azure")
def test_a_pipeline_goes_on_after_azurite_was_killed(tmp_path: Path) -> None:
    with cloud_server("azure") as server:
        assert isinstance(server, AzureServer)
        place, watching = f"{server.url}/killed", Watching()
        with testing.running(held_pipeline(pipeline(place, 2, 3_000), tmp_path / "gate"), observer=watching) as run:
            watching.wait_checkpoints(3)
            server.fail()
            watching.wait_outage("az://")
            server.heal()
            (tmp_path / "gate").touch()
            result = run.wait(2 * WAIT_S)
        assert result is not None
        assert result.is_finished
        assert numbers_at(place) == list(range(3_000))
        assert open_storage(f"{place}/out").list("_staging") == []
