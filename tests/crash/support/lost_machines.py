"""A pipeline between streams that machines share, one of which disappears with its disk while the pipeline runs.

``lost_machines.py SCENARIO HOW DIRECTORY`` is a program of ``test_lost_machines``, in a network of its own
(``networks``). On its machine, the hub, are a PostgreSQL server, a server of objects, and what runs workers; another
machine runs workers, too: those of a standalone cluster, or plain processes (``placed``). Checkpoints and chunks are
objects, so no disk of either machine has anything that counts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.launching import SERVERS
from tests.servers.objects import BUCKET, object_server
from tests.servers.postgres import postgres_server
from tests.store.traffic import KEYS, SCHEMA, Traffic, flowing, rows_of

from crash.support.cluster import Cluster
from crash.support.networks import HUB, SKIPPED, Machine, begin_network
from crash.support.processes import PROGRAM, STARTED_S, Child, Life, kill, until
from headgate.store.store import Store

CORES_OF_A_PIPELINE = 2
CONFIGURATION = f"""
spark.driver.host {HUB}
spark.scheduler.minRegisteredResourcesRatio 1.0
spark.scheduler.maxRegisteredResourcesWaitingTime {STARTED_S:.0f}s
"""
"""Spark waits for the executors of both machines, so that workers are on both."""

MACHINE_LOST = "-Dspark.worker.timeout=30"
"""Seconds of silence after which Spark's master counts a machine as lost, and four times as often workers say that they
live; by itself it waits for a minute or two."""

PAUSE_S = 0.3
"""Between two rounds of events: there are to be some at every moment, and not many in all."""

SILENCE_MS = 20_000
"""Busy machines are not to be taken for dead ones."""


class Place:
    """The hub, the other machine, and what runs on both. ``cluster`` None: workers are plain processes."""

    def __init__(self, directory: Path, cluster: Cluster | None, machine: Machine, store: Store, ports: str) -> None:
        self.machine, self.store = machine, store
        self._cluster, self._directory, self._ports = cluster, directory, ports
        self._children: list[Child] = []

    def start(self, *, on: Machine | None = None, cores: int) -> Life:
        """Start the pipeline, or go on with it; the driver is on the hub or on another machine."""
        host = HUB if on is None else on.host
        name = f"driver-{len(self._children)}"
        disk = (self._directory if on is None else on.disk) / name
        disk.mkdir(parents=True)
        configuration = self._directory / f"{name}-conf"
        configuration.mkdir()
        lines = CONFIGURATION.replace(HUB, host) + f"spark.cores.max {cores}\n"
        (configuration / "spark-defaults.conf").write_text(lines)
        around = {
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "SPARK_CONF_DIR": str(configuration),
            "SPARK_LOCAL_IP": host,
            SERVERS: self._ports,
            **own_disk(disk),
        }
        command = [*(() if on is None else on.at), sys.executable, "-u", str(PROGRAM), json.dumps(self._spec(host))]
        child = Child(command, self._directory / name, around)
        self._children.append(child)
        return Life(child, "shared")

    def _spec(self, host: str) -> dict[str, Any]:
        what = {"pipeline": "between_shared_streams", "name": "shared", "heartbeat_timeout_ms": SILENCE_MS}
        where = {"store": self.store.root, "checkpoints": f"s3://{BUCKET}/checkpoints", "root": "/nowhere"}
        if self._cluster is not None:
            return {**what, **where, "master": self._cluster.url}
        hub, other = (HUB, at_hub()), (self.machine.host, self.machine.at)
        return {**what, **where, "host": host, "machines": [hub, other] if self.machine.is_there else [hub]}

    def close(self) -> None:
        for child in self._children:
            child.close()


def at_hub() -> list[str]:
    """The command that starts others on the machine of this program."""
    return ["nsenter", f"--net=/proc/{os.getpid()}/ns/net", "--"]


def own_disk(disk: Path) -> dict[str, str]:
    """What has a process keep all its files on one disk."""
    names = ("TMPDIR", "SPARK_LOCAL_DIRS", "XDG_STATE_HOME", "HEADGATE_LOG_DIR")
    places = {name: disk / name.lower() for name in names}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    return {name: str(place) for name, place in places.items()}


@contextmanager
def place(how: str, directory: Path, cores_of_hub: int, cores_of_machine: int) -> Iterator[Place]:
    begin_network()
    with ExitStack() as opened:
        postgres = opened.enter_context(postgres_server(HUB))
        (directory / "objects").mkdir()
        objects = opened.enter_context(object_server(directory / "objects", HUB))
        store = opened.enter_context(Store.open(postgres.url("lost"), chunks=f"s3://{BUCKET}/lost"))
        store.create_stream("in", SCHEMA, segments=2, routing_key="key")
        machine, cluster = Machine(directory / "machine"), None
        if how == "cluster":
            cluster = Cluster(directory, HUB, [cores_of_hub], MACHINE_LOST)
            opened.callback(cluster.close)
            disk = machine.disk / "worker"
            disk.mkdir()
            cluster.add_worker("machine", machine.host, cores_of_machine, disk, machine.at, **own_disk(disk))
        made = Place(directory, cluster, machine, store, f"{postgres.port},{objects.port}")
        opened.callback(made.close)
        yield made


def machine_of_a_worker(how: str, directory: Path) -> None:
    """The machine of a worker disappears. The worker comes back when others do its work, and changes nothing."""
    with ExitStack() as opened:
        here = opened.enter_context(place(how, directory, CORES_OF_A_PIPELINE, CORES_OF_A_PIPELINE))
        life = here.start(cores=2 * CORES_OF_A_PIPELINE)
        running = life.running()
        flow, is_over = opened.enter_context(traffic(here.store))
        lost = [pid for pid in running["workers"].values() if here.machine.has(pid)]
        assert len(lost) == 1, f"workers are not on both machines: {running}"
        life.checkpoint(2)
        here.machine.vanish()
        kill(lost[0], signal.SIGSTOP)  # else it notices the silence, and ends before anybody takes its place
        life.restart()
        running = life.running(after=running["generation"])
        assert not any(here.machine.has(pid) for pid in running["workers"].values()), running
        life.checkpoint(2)
        assert any(process.pid == lost[0] for process in here.machine.processes()), "the worker did not live so long"
        kill(lost[0], signal.SIGCONT)
        here.machine.come_back()
        until(lambda: all(process.pid != lost[0] for process in here.machine.processes()), "the end of the worker")
        life.checkpoint(2)
        is_over.set()
        assert life.result(STARTED_S)["is_finished"]
        assert_each_event_went_through_once(here.store, flow)


def machine_of_the_driver(how: str, directory: Path) -> None:
    """The machine of the driver, and of a worker, disappears. The same program goes on on the hub; it comes back."""
    with ExitStack() as opened:
        here = opened.enter_context(place(how, directory, 1 + CORES_OF_A_PIPELINE, 1))
        zombie = here.start(on=here.machine, cores=CORES_OF_A_PIPELINE)
        running = zombie.running()
        flow, is_over = opened.enter_context(traffic(here.store))
        assert sum(here.machine.has(pid) for pid in running["workers"].values()) == 1, running
        zombie.checkpoint(2)
        here.machine.vanish()
        heir = here.start(cores=CORES_OF_A_PIPELINE)
        heir.note("continues from checkpoint")
        running = heir.running()
        heir.checkpoint(2)
        assert here.machine.has(zombie.child.pid), "the driver did not live so long"
        here.machine.come_back()
        assert zombie.failed(STARTED_S)["kind"] == "FencedError"
        assert zombie.child.exit_code() == 4
        heir.checkpoint(2)
        is_over.set()
        result = heir.result(STARTED_S)
        assert result["is_finished"]
        assert result["restarts"] == 0  # the one that comes back takes nothing back
        assert_each_event_went_through_once(here.store, flow)


@contextmanager
def traffic(store: Store) -> Iterator[tuple[Traffic, threading.Event]]:
    is_over = threading.Event()
    with flowing(store, is_over, "in", pause_s=PAUSE_S) as flow:
        yield flow, is_over


def assert_each_event_went_through_once(store: Store, flow: Traffic) -> None:
    """Written = read = distinct, in the order of each key, with the state that belongs to each; nothing is left."""
    found: dict[str, list[tuple[object, object]]] = {}
    for row in rows_of(store, "out"):
        found.setdefault(str(row["key"]), []).append((row["value"], row["number"]))
    assert found == {f"k{key}": [(n, n + 1) for n in range(flow.rounds_count)] for key in range(KEYS)}
    assert [t for t in store.list_transactions() if not t.status.is_terminal] == []
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


SCENARIOS = {"worker": machine_of_a_worker, "driver": machine_of_the_driver}


def main() -> None:
    scenario, how, directory = sys.argv[1:]
    try:
        SCENARIOS[scenario](how, Path(directory))
    except pytest.skip.Exception as missing:
        print(missing)
        os._exit(SKIPPED)


if __name__ == "__main__":
    main()
