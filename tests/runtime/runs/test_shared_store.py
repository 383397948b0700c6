"""Pipelines between streams of a store that machines share: catalogue on PostgreSQL, chunks on a server of objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.runtime.launching import SERVERS, Zygote
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.postgres import PostgresServer, postgres_server
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key

import headgate as hg
from headgate.model.plan import PipelineDefinition
from headgate.store.store import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(scope="session")
def servers(postgres: PostgresServer, objects: ObjectServer) -> Iterator[None]:
    """What workers find in their environment, which is that of the process that they are forked from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVERS, f"{postgres.port},{objects.port}")
        yield


@pytest.fixture
def zygote(servers: None) -> Iterator[Zygote]:
    """One of its own: what another test has started does not know where the servers are."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def store(postgres: PostgresServer, objects: ObjectServer) -> Iterator[Store]:
    with Store.open(postgres.url("runs"), chunks=f"s3://{BUCKET}/runs") as opened:
        opened.create_stream("in", SCHEMA, segments=2, routing_key="key")
        yield opened


def copied(root: Path, store: str) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    source = pipeline.source(hg.StreamSource("in", store=store), name="source")
    source.sink(hg.StreamSink("out", store=store, routing_key="key", segments=2), name="out")
    return definition_of(pipeline)


@pytest.mark.early
def test_each_event_goes_through_once_while_workers_and_servers_are_killed(
    start: Callable[..., Run], store: Store, postgres: PostgresServer, tmp_path: Path
) -> None:
    is_over = threading.Event()
    run = start(copied(tmp_path, store.root))
    with flowing(store, is_over, "in", rounds=10, most=10) as traffic:
        run.wait_checkpoints(2)
        run.kill(0)
        run.wait_restarts(1)
        run.wait_checkpoints(1)
        with traffic.at_work:
            postgres.crash()
            postgres.start()
        run.wait_checkpoints(2)
        is_over.set()
    assert run.result().is_finished
    assert per_key(store) == all_rounds(traffic)
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []
