"""The scenarios of the simulator, in one table: what ``python -m headgate.sim`` and ``make sim`` can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headgate.sim.product.run import Result, run_seed
from headgate.sim.scenarios import (
    broadcast,
    cancellation,
    checkpoint_requests,
    guarantees,
    induced,
    induced_modes,
    listeners,
    log_files,
    memory_chunks,
    reset,
    rocksdb,
    savepoints,
    standby,
    timers,
    ttl,
    unaligned,
    upgrades,
    user_pipelines,
)
from headgate.sim.streams import followers, group_pipelines, groups, remote_store, shared_transactions, streams


class RunSeed(Protocol):
    """Runs one seed of a scenario."""

    def __call__(self, seed: int, *, is_traced: bool = ...) -> Result:
        """Return what became of it; ``is_traced`` keeps the whole story."""


@dataclass(frozen=True)
class Scenario:
    """Pipelines or programs of one kind, run under faults, and judged."""

    name: str
    """The option of the command line that chooses it; "" for the one that runs without an option."""

    about: str
    run_seed: RunSeed


SCENARIOS = (
    Scenario("", "pipelines with every kind of operator, loops and sinks", run_seed),
    Scenario("streams", "pipelines between streams of the store", streams.run_seed),
    Scenario("guarantees", "pipelines that count at least or at most once", guarantees.run_seed),
    Scenario("induced", "pipelines with sources that set their own barriers", induced.run_seed),
    Scenario("induced-modes", "such sources in other guarantees and beside savepoints", induced_modes.run_seed),
    Scenario("unaligned", "pipelines with unaligned checkpoints", unaligned.run_seed),
    Scenario("savepoints", "pipelines that are moved with savepoints", savepoints.run_seed),
    Scenario("upgrades", "pipelines that are changed between two starts", upgrades.run_seed),
    Scenario("checkpoint-requests", "pipelines whose users ask for checkpoints", checkpoint_requests.run_seed),
    Scenario("rocksdb", "pipelines whose state is in RocksDB", rocksdb.run_seed),
    Scenario("memory-chunks", "pipelines whose checkpoints refer to chunks of state", memory_chunks.run_seed),
    Scenario("cancellation", "pipelines that do not retain their checkpoints", cancellation.run_seed),
    Scenario("reset", "pipelines that are reset", reset.run_seed),
    Scenario("timers", "pipelines whose functions have timers", timers.run_seed),
    Scenario("ttl", "pipelines whose functions have state that expires", ttl.run_seed),
    Scenario("user-pipelines", "pipelines between sources and sinks that users write", user_pipelines.run_seed),
    Scenario("log-files", "pipelines that follow files which are rotated", log_files.run_seed),
    Scenario("standby", "pipelines with supervisors and standbys", standby.run_seed),
    Scenario("listeners", "listeners that are called twice and out of order", listeners.run_seed),
    Scenario("broadcast", "pipelines with a broadcast side", broadcast.run_seed),
    Scenario("groups", "readers that share streams as a group", groups.run_seed),
    Scenario("shared-transactions", "transactions of a stream that two processes share", shared_transactions.run_seed),
    Scenario("group-pipelines", "pipelines whose subtasks share a stream by a group", group_pipelines.run_seed),
    Scenario("followers", "programs that follow a stream and wait", followers.run_seed),
    Scenario("remote-store", "programs with a store on an object store or a server", remote_store.run_seed),
)
