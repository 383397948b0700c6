"""What a seed draws for one run: the pipeline, its input, its settings."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import field, replace
from typing import Protocol

import headgate as hg
from headgate.dataclass import dataclass
from headgate.model.config import Duration, MemoryState, StartConfig, StateConfig
from headgate.sim.product.checkpoint_publication import Outside
from headgate.sim.product.graphs import draw_graph
from headgate.sim.product.source import FileInputs, Pace
from headgate.sim.product.workloads import WORKLOADS, Branches, Job, Splits, Values, draw_splits

CHECKPOINTS = "checkpoints"
ROOT = f"sim://{CHECKPOINTS}"
NAME = "p"
ROLL_INTERVALS: tuple[Duration, ...] = (0, 0, "100ms", "1m")


class Judge(Protocol):
    """What of a sink's records is allowed."""

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        """Return what is wrong, or None."""


class Exactly:
    """Each record once."""

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        lost, more = sorted(wanted - found), sorted(found - wanted)
        return None if found == wanted else f"lost {len(lost)} {lost[:4]}, has {len(more)} more {more[:4]}"


@dataclass
class Settings:
    """One pipeline and how it is run.

    Attributes:
        job: what it does.
        inputs: by source, then split.
        hidden: splits that no process lists yet.
        grows: whether there were any.
        parallelism: of the next start.
        attempts: of Spark's own, per stage.
        judge: says whether what was committed is right.
        credit_bytes: bytes that may be unread on one channel; None: the usual.
    """

    job: Job
    inputs: list[Splits]
    hidden: set[str]
    grows: bool
    parallelism: int
    attempts: int
    pace: Pace
    checkpointing: hg.Checkpointing
    restart: hg.NoRestart | hg.FixedDelay | hg.ExponentialDelay | hg.FailureRate
    on_damaged: str | None
    roll_interval: Duration
    inline_bytes_max: int
    loop_memory_bytes: int
    max_drift: Duration | None = None
    """Splits of sources wait for none: sources of users' programs take no part."""
    files: FileInputs | None = None
    """Where the input is; None: the sources have it themselves."""
    outside: Outside | None = None
    """What functions publish to; None: nothing is published."""
    judge: Judge = field(default_factory=Exactly)
    credit_bytes: int | None = None
    start: StartConfig = field(default_factory=StartConfig)
    """What every start names."""
    state: StateConfig = field(default_factory=MemoryState)

    def listed(self) -> list[Splits]:
        """Return what sources list now."""
        return self._shown() if self.files is None else self.files.present(self._shown())

    def use_files(self, files: FileInputs) -> None:
        """Have the sources read files; each has one from the beginning."""
        self.files = files
        for splits in self.inputs:
            self.hidden.discard(min(splits))

    def fix_input(self) -> None:
        """Have all input be listed from the beginning."""
        self.hidden.clear()
        self.grows = False

    def update_files(self) -> None:
        """No process runs the pipeline: something may happen to the input."""
        if self.files is not None:
            self.files.update(self._shown(), grows=self.grows)

    def _shown(self) -> list[Splits]:
        return [{name: rows for name, rows in splits.items() if name not in self.hidden} for splits in self.inputs]

    def pack(self) -> None:
        """Have much input come in larger batches, and as slowly: a run of it takes less time."""
        rows_count = sum(len(rows) for splits in self.inputs for rows in splits.values())
        times = 4 if rows_count > 240 else 2 if rows_count > 120 else 1
        self.pace = replace(self.pace, batch_rows=self.pace.batch_rows * times, pause_ms=self.pace.pause_ms * times)


def draw_settings(rng: random.Random, on_round: Callable[[str, int], None]) -> Settings:
    """Return the settings of a run."""
    is_graph = rng.random() < 0.6
    grows = is_graph and rng.random() < 0.2
    sources_count = rng.choice((1, 1, 2)) if is_graph else 1
    splits_count = rng.choice((2, 3, 4)) if grows else rng.choice((1, 2, 3))
    rows_count = rng.choice((1, 40, 120, 240, 400)) // sources_count
    inputs = [draw_splits(rng, i, splits_count, rows_count) for i in range(sources_count)]
    if sources_count == 1 and is_graph and not grows and rng.random() < 0.2:
        inputs.append({"s1-quiet": []})  # delivers nothing, and ends late
    job: Job
    if is_graph:
        job = draw_graph(rng, len(inputs), on_round, grows=grows)
    else:
        job = Branches(tuple(rng.sample(WORKLOADS, rng.choice((1, 1, 2, 3)))))
    names = [name for splits in inputs for name in splits]
    return Settings(
        job,
        inputs,
        hidden=set(rng.sample(names, rng.randint(1, len(names)))) if grows else set(),
        grows=grows,
        parallelism=rng.choice((1, 2, 2, 3)),
        attempts=rng.choice((1, 1, 2)),
        pace=Pace(rng.choice((2, 4, 8)), rng.choice((5, 10, 20)), idle_ms=rng.choice((100, 500))),
        checkpointing=hg.Checkpointing(
            interval=f"{rng.choice((10, 20, 40, 80))}ms",
            dir=ROOT,
            timeout=f"{rng.choice((500, 1_000, 3_000))}ms",
            tolerable_failures=rng.choice((0, 2, 5)),
            retained=rng.choice((1, 2, 3)),
            max_concurrent=rng.choice((1, 1, 2)),
        ),
        restart=rng.choice(
            (
                hg.FixedDelay(delay="20ms"),
                hg.FixedDelay(attempts=2, delay="20ms"),
                hg.ExponentialDelay(initial="10ms", maximum="1s", reset_after="500ms"),
                hg.FailureRate(failures=3, interval="2s", delay="20ms"),
            )
        ),
        on_damaged=rng.choice((None, "previous")),
        roll_interval=rng.choice(ROLL_INTERVALS),
        inline_bytes_max=rng.choice((0, 0, 1_000, 20_000)),
        loop_memory_bytes=rng.choice((64 << 20, 4_000, 400)),
    )
