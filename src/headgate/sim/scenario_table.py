"""The scenarios of the simulator, in one table: what ``python -m headgate.sim`` and ``make sim`` can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.dataclass import dataclass
from headgate.sim.product.run import Result, Run, Simulation
from headgate.sim.scenarios import (
    checkpoint_requests,
    event_time,
    functions,
    guarantees,
    induced,
    log_files,
    reset,
    savepoints,
    standby,
    timers,
    unaligned,
    upgrades,
    user_pipelines,
)
from headgate.sim.streams import client_programs, groups, remote_store, shared_transactions, streams


@dataclass(frozen=True)
class Scenario:
    """Pipelines or programs of one kind, run under faults, and judged."""

    name: str
    """The option of the command line that chooses it; "" for the one that runs without an option."""

    about: str
    kinds: tuple[Callable[..., Simulation], ...]
    """What seeds run, by turns."""

    def run_seed(self, seed: int, **options: Any) -> Result:
        """Run a seed; ``is_traced`` keeps its whole story, ``events_max`` limits it."""
        return self.draw(seed, **options).result()

    def draw(self, seed: int, **options: Any) -> Simulation:
        """Return what a seed runs."""
        return self.kinds[seed % len(self.kinds)](seed, **options)


SCENARIOS = (
    Scenario("", "pipelines with every kind of operator, loops and sinks", (Run.packed,)),
    Scenario("streams", "pipelines between streams of the store", (streams.StreamRun,)),
    Scenario("guarantees", "pipelines that count at least or at most once", (guarantees.GuaranteeRun,)),
    Scenario("induced", "pipelines with sources that set their own barriers", (induced.InducedRun,)),
    Scenario("induced-modes", "such sources in other guarantees and beside savepoints", (induced.draw_induced_mode,)),
    Scenario("unaligned", "pipelines with unaligned checkpoints", (unaligned.OvertakingRun,)),
    Scenario("savepoints", "pipelines that are moved with savepoints", (savepoints.SavedAndBegunRun,)),
    Scenario("upgrades", "pipelines that are changed between two starts", (upgrades.draw_upgrade,)),
    Scenario("checkpoint-requests", "pipelines whose users ask for checkpoints", (checkpoint_requests.AskingRun,)),
    Scenario("rocksdb", "pipelines whose state is in RocksDB", timers.ROCKSDB_KINDS),
    Scenario("memory-chunks", "pipelines whose checkpoints refer to chunks of state", timers.CHUNKS_KINDS),
    Scenario("cancellation", "pipelines that do not retain their checkpoints", (checkpoint_requests.CancellingRun,)),
    Scenario("reset", "pipelines that are reset", (reset.ResettingRun,)),
    Scenario("timers", "pipelines whose functions have timers", (timers.TimedRun,)),
    Scenario("ttl", "pipelines whose functions have state that expires", (timers.ExpiringRun,)),
    Scenario("event-time", "pipelines with windows, joins and tables that change", (event_time.EventTimeRun,)),
    Scenario("user-pipelines", "pipelines between sources and sinks that users write", (user_pipelines.CustomRun,)),
    Scenario("log-files", "pipelines that follow files which are rotated", (log_files.FollowedRun,)),
    Scenario("standby", "pipelines with supervisors and standbys", (standby.StandbyRun,)),
    Scenario("listeners", "listeners that are called twice and out of order", (checkpoint_requests.ListeningRun,)),
    Scenario("broadcast", "pipelines with a broadcast side", unaligned.BROADCAST_KINDS),
    Scenario("groups", "readers that share streams as a group", (groups.GroupRun,)),
    Scenario(
        "shared-transactions", "transactions of a stream that two processes share", (shared_transactions.SharingRun,)
    ),
    Scenario("group-pipelines", "pipelines whose subtasks share a stream by a group", (streams.GroupedRun,)),
    Scenario("followers", "programs that follow a stream and wait", (client_programs.FollowRun,)),
    Scenario("remote-store", "programs with a store on an object store or a server", remote_store.REMOTE_KINDS),
    Scenario("functions", "pipelines with triggers, late records, two inputs and calls", (functions.FunctionRun,)),
    Scenario("over", "pipelines with OVER aggregates, and functions over updated sessions", (event_time.OverRun,)),
)


def scenario(name: str) -> Scenario:
    """Return the scenario with this name."""
    return next(one for one in SCENARIOS if one.name == name)
