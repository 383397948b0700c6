"""Pipelines that read by a reader group, with real workers that are killed or hang (docs/spec/group-source.md)."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tests.runtime.launching import SERVERS, Zygote
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.postgres import PostgresServer, postgres_server
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key

import headgate as hg
from headgate.errors import UsageError
from headgate.model.plan import PipelineDefinition
from headgate.store.reader_groups import GroupEvents
from headgate.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream("in", SCHEMA, segments=3, routing_key="key")
        yield opened


def copied(root: Path, parallelism: int = 2) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    source = pipeline.source(hg.GroupSource("in", "shop", store=str(root / "store")), name="source")
    source.sink(hg.StreamSink("out", store=str(root / "store"), routing_key="key", segments=2), name="out")
    return definition_of(pipeline)


def test_a_worker_that_hangs_and_wakes_loses_and_repeats_nothing(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:  # GS2, GS5
    is_over = threading.Event()
    run = start(copied(tmp_path, 3))
    with flowing(store, is_over, "in", rounds=5, most=6, pause_s=0.03) as traffic:
        run.wait_checkpoints(2)
        zombie = run.freeze(1)
        run.wait_restarts(1)
        run.wait_checkpoints(2)
        os.kill(zombie, signal.SIGCONT)  # it finds that another generation has the group
        run.wait_checkpoints(3)
        run.kill(0)
        run.wait_restarts(2)
        run.wait_checkpoints(2)
        is_over.set()
    assert run.result().is_finished
    assert per_key(store) == all_rounds(traffic)
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


class Neighbours:
    """Readers of another group on the same stream, who join and leave, and try to join the pipeline's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.processed: list[dict[str, object]] = []
        self.joined_count = self.refused_count = 0

    def live(self, is_over: threading.Event) -> None:
        """Join, read a while, and leave, until it is over; then read the rest."""
        while not is_over.wait(0.01):  # the pace: not a wait for anything
            self._come_and_go(reads=5)
            self._try_to_join()
        while self._come_and_go(reads=50):
            pass

    def _come_and_go(self, reads: int) -> bool:
        """Two readers share the group for a while; return whether there is more to read."""
        group = self._store.reader_group("neighbours")
        names = [f"{self.joined_count}-{which}" for which in "ab"]
        with group.join(names[0], commit_every="0s") as first, group.join(names[1], commit_every="0s") as second:
            self.joined_count += 1
            for reader in [first, second] * reads:
                found = reader.read(500)
                if isinstance(found, GroupEvents):
                    self.processed += found.batch.to_pylist()
            return not (first.has_ended and second.has_ended)

    def _try_to_join(self) -> None:
        """The pipeline's own group is its own, before it runs, while it runs, and while it starts again."""
        group = self._store.reader_group("shop")
        for attempt in (
            lambda: group.join("intruder"),
            lambda: group.join(next(iter(group.readers()), "intruder"), takes_over=True),
            lambda: group.checkpoint("theirs"),
            lambda: group.reset(),
        ):
            try:
                attempt()
            except UsageError:
                self.refused_count += 1
            else:
                raise AssertionError("somebody else got into the group of a pipeline")


def test_a_pipeline_reads_by_its_group_while_others_join_and_leave_beside_it(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:  # GS1, GS4, GS6, RG7
    is_over = threading.Event()
    run = start(copied(tmp_path, 2))
    run.wait_checkpoints(1)
    store.reader_group("neighbours", "in")
    with Store.open(store.root) as own, ThreadPoolExecutor(1) as pool:
        neighbours = Neighbours(own)
        living = pool.submit(neighbours.live, is_over)
        with flowing(store, is_over, "in", rounds=4, most=8, pause_s=0.03) as traffic:
            run.wait_checkpoints(3)
            run.kill(0)
            run.wait_restarts(1)
            run.wait_checkpoints(2)
            run.driver.stop()
            assert not run.result().is_finished
            run = start(copied(tmp_path, 3))  # dealt anew, at another parallelism
            run.wait_checkpoints(3)
            is_over.set()
        living.result(WAIT_S)
    assert run.result().is_finished
    assert per_key(store) == all_rounds(traffic)
    assert neighbours.refused_count > 0
    found: dict[str, list[object]] = defaultdict(list)
    for row in neighbours.processed:
        found[str(row["key"])].append(row["value"])
    assert found == all_rounds(traffic), "readers that join and leave read each event once, keys in order"
    assert store.reader_group("shop").unread_bytes() == store.reader_group("neighbours").unread_bytes() == 0
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


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
def shared_store(postgres: PostgresServer, objects: ObjectServer) -> Iterator[Store]:
    with Store.open(postgres.url("runs"), chunks=f"s3://{BUCKET}/runs") as opened:
        opened.create_stream("in", SCHEMA, segments=2, routing_key="key")
        yield opened


def copied_in(root: Path, shared_store: str) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    source = pipeline.source(hg.StreamSource("in", store=shared_store), name="source")
    source.sink(hg.StreamSink("out", store=shared_store, routing_key="key", segments=2), name="out")
    return definition_of(pipeline)


@pytest.mark.early
def test_each_event_goes_through_once_while_workers_and_servers_are_killed(
    servers: None, shared_store: Store, postgres: PostgresServer, tmp_path: Path
) -> None:
    """The zygote is its own: what another test has started does not know where the servers are."""
    is_over = threading.Event()
    definition = copied_in(tmp_path, shared_store.root)
    with closing(Zygote()) as zygote, closing(Run(zygote, definition)) as run:
        with flowing(shared_store, is_over, "in", rounds=4, most=6, pause_s=0.03) as traffic:
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
    assert per_key(shared_store) == all_rounds(traffic)
    assert [problem for problem in shared_store.fsck() if not problem.is_harmless] == []
