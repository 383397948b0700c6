"""What all parts of one simulated run share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from headgate.model.config import (
    CheckpointConfig,
    DamagedCheckpoint,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)
from headgate.model.ids import CheckpointId, Generation
from headgate.model.plan import Plan
from headgate.sim.disk import Disk
from headgate.sim.faults import Faults
from headgate.sim.history import Level, Observer
from headgate.sim.marks import Marks
from headgate.sim.storemodel import StoreModel
from headgate.sim.workload import Workload
from headgate.sim.world import World


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one run, drawn from its seed."""

    parallelism: int
    checkpoints: CheckpointConfig
    restart: RestartStrategy
    on_damaged: DamagedCheckpoint
    credit_elements: int
    source_pause_ms: int
    stage_attempts: int
    message_delay_ms: int
    heartbeat_timeout_ms: int
    safety_ms: int
    feedback_elements: int = 0
    """Loops: feedback above which the head's regular input waits."""
    actions_per_turn_max: int = 4
    """What a worker does at most before others get their turn."""

    def with_loops(self, rng: random.Random) -> Options:
        """Return settings that suit loops: a checkpoint takes at least one trip round, so it needs time."""
        timeout_ms = self.checkpoints.timeout_ms * rng.choice((3, 6, 10))
        interval_ms = rng.choice((0, 8, 12, 12, 20, 20, 40, 40))
        return replace(
            self,
            checkpoints=replace(self.checkpoints, timeout_ms=timeout_ms, interval_ms=interval_ms),
            feedback_elements=rng.choice((2, 8, 1_000)),
            safety_ms=rng.choice((1_500, 3_000, 5_000)),
            actions_per_turn_max=12,
        )

    @classmethod
    def draw(cls, rng: random.Random) -> Options:
        """Draw the settings of one run."""
        restarts: tuple[RestartStrategy, ...] = (
            FixedDelay(None, rng.choice((0, 20, 200))),
            ExponentialDelay(initial_ms=20, max_ms=500, reset_after_ms=2_000),
            FailureRate(failures_max=2, interval_ms=2_000, delay_ms=50),
            FixedDelay(2, 50),
            NoRestart(),
        )
        return cls(
            parallelism=rng.choice((1, 2, 2, 3)),
            checkpoints=CheckpointConfig(
                interval_ms=rng.choice((0, 20, 40, 80, 80, 160)),
                timeout_ms=rng.choice((300, 800, 2_000)),
                min_pause_ms=rng.choice((0, 0, 0, 30)),
                max_concurrent=rng.choice((1, 1, 2, 3)),
                tolerable_failures=rng.choice((0, 1, 5, 5)),
                retained=rng.choice((1, 2, 2, 3)),
                inline_bytes_max=rng.choice((0, 0, 60, 100_000)),
            ),
            restart=rng.choices(restarts, (4, 3, 1, 1, 1))[0],
            on_damaged=rng.choice((DamagedCheckpoint.PREVIOUS, DamagedCheckpoint.PREVIOUS, DamagedCheckpoint.FAIL)),
            credit_elements=rng.choice((1, 3, 10)),
            source_pause_ms=rng.choice((4, 15, 40)),
            stage_attempts=rng.choice((1, 1, 2, 4)),
            message_delay_ms=rng.choice((1, 5, 20)),
            heartbeat_timeout_ms=rng.choice((100, 300)),
            safety_ms=rng.choice((600, 1_500, 3_000)),
        )


@dataclass(slots=True)
class Env:
    """World, faults, durable things, workload and observers of one run."""

    world: World
    faults: Faults
    marks: Marks
    options: Options
    workload: Workload
    plan: Plan
    disk: Disk
    store: StoreModel
    note: Observer
    logged: set[tuple[Generation, CheckpointId]] = field(default_factory=set)
    """Checkpoints with a loop log that is not empty; for marks and faults only."""
    logged_inside: set[tuple[Generation, CheckpointId]] = field(default_factory=set)
    """The same for logs of inner loops."""

    @property
    def rng(self) -> random.Random:
        """The seed's random numbers."""
        return self.world.random

    def level(self, name: str, used: int, limit: int) -> None:
        """Report how much of something bounded is in use (I10)."""
        if used > limit:
            self.note(Level(name, used, limit))

    def message_delay_ms(self) -> int:
        """Return the delay of one message."""
        return self.faults.delay_ms(self.options.message_delay_ms)
