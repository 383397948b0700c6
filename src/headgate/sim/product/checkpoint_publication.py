"""A function that publishes on completion, and the outside world that it publishes to.

Drawn from a generator of its own, so that seeds without it stay what they are. It stands in a branch beside the job and
sees what the sources deliver. The outside world takes time, fails before and after its effect, and checks what it
hears.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self

import pyarrow as pa

import headgate as hg
from headgate.sim.machine.tasks import Tasks
from headgate.sim.machine.world import Fault, Faults, Violation
from headgate.sim.product.history import History
from headgate.sim.product.steps import Row

PUBLISHING_RATE = 0.15
"""Of the seeds, so many have it."""

STEP_MS = 4
"""Usual time of one act outside, at most."""


class Messenger(Protocol):
    """Stands between the runtime and a publisher, and need not tell it what is said once and in order."""

    def hear(self, word: tuple[Literal["complete", "aborted"], int], *, is_last: bool) -> Sequence[tuple[str, int]]:
        """Take what the runtime says; return what the publisher is notified of now."""

    def between(self) -> Sequence[tuple[str, int]]:
        """Return what the publisher is notified of directly after a barrier."""


class Outside:
    """What is published, and what functions said that they kept, by checkpoint. Not a part of any process."""

    def __init__(self, seed: int, tasks: Tasks, faults: Faults, history: Callable[[], History]) -> None:
        """Draw; ``is_drawn`` says whether this seed publishes."""
        self._rng = random.Random(f"listeners of seed {seed}")
        self.is_drawn = self._rng.random() < PUBLISHING_RATE
        self._is_spread = self._rng.random() < 0.5
        self._tasks = tasks
        self._faults = faults
        self._history = history
        self.published: dict[int, str] = {}
        """By number of a row: who made it ready."""
        self.kept: dict[int, dict[tuple[str, int], list[int]]] = {}
        """What each subtask of each publisher had seen when a checkpoint was taken."""
        self.disorder: Callable[[], Messenger | None] = lambda: None
        """Makes who stands between the runtime and a publisher."""

    def __deepcopy__(self, memo: object) -> Self:
        """It is one, whichever process has a copy of the function."""
        return self

    def watch(self, source: hg.Stream, index: int) -> None:
        """Add the branch after source ``index``."""
        rows = source.rebalance() if self._is_spread else source
        rows.map(Publisher(self, f"publish{index}"), name=f"publish{index}").sink(hg.Discard(), name=f"seen{index}")

    # -- what the function does outside -----------------------------------------------------------------------------

    def who(self) -> str:
        """Return the process at work: after a failure it is another one."""
        return self._tasks.current.process.name

    def publish(self, items: Sequence[dict[str, Any]]) -> None:
        """Make rows public; each is the work of one worker, with a checkpoint that was completed."""

        def effect() -> None:
            for item in items:
                self._published(item["n"], item["by"])

        self._act(effect)

    def _published(self, row: int, by: str) -> None:
        before = self.published.setdefault(row, by)
        if before != by and not self._history().went_back:
            self._fail(
                f"row {row} was published as {before} made it ready, and again as {by} did: a restart took it back"
            )

    def completed(self, name: str, checkpoint: int, before: int) -> None:
        """A function is notified of a completed checkpoint."""
        if checkpoint not in {written for written, _ in self._history().written}:
            self._fail(f"{name} is told that checkpoint {checkpoint} is completed, and the log has none")
        if checkpoint <= before:
            self._fail(f"{name} is told of checkpoint {checkpoint} behind {before}")

    def is_final(self, checkpoint: int) -> bool:
        """Whether ``checkpoint`` is the last one of all."""
        return any(one.manifest.is_final for (found, _), one in self._history().written.items() if found == checkpoint)

    def aborted(self, name: str, checkpoint: int) -> None:
        """A function is notified of an aborted checkpoint."""
        if checkpoint in self._history().completed:
            self._fail(f"{name} is told that checkpoint {checkpoint} is aborted, and it was completed")

    def _act(self, effect: Callable[[], None]) -> None:
        """A process may die before it and after it; it may fail before it, and after it."""
        self._tasks.park(self._rng.randint(0, STEP_MS))
        if self._faults.strikes(Fault.PUT_FAILS):
            raise OSError("the outside world was not reached")
        effect()
        self._tasks.park(self._rng.randint(0, STEP_MS))
        if self._faults.strikes(Fault.PUT_FAILS_AFTER):
            raise OSError("the outside world did not answer")

    def _fail(self, problem: str) -> None:
        self._history().fail("I11", problem)

    # -- the verdict ------------------------------------------------------------------------------------------------

    def check(self, rows: Sequence[Row], final: int) -> None:
        """Compare with ``rows``, which the completed checkpoint ``final`` says were read.

        Raises:
            Violation: something is not public, or should not be; or a list lost elements, or had them twice.
        """
        read = Counter(row["n"] for row in rows)
        lost = sorted(read.keys() - self.published.keys())
        more = [] if self._history().went_back else sorted(self.published.keys() - read.keys())
        if lost or more:
            raise Violation("I11", f"{len(lost)} rows are not public {lost[:4]}, {len(more)} were not read {more[:4]}")
        seen = Counter(row for rows_seen in self.kept.get(final, {}).values() for row in rows_seen)
        if seen != read:
            less, twice = sorted((read - seen).elements()), sorted((seen - read).elements())
            raise Violation("I11", f"the lists of checkpoint {final} lack {less[:4]} and have {twice[:4]} too often")


class Publisher(hg.PublishOnCheckpoint):
    """Makes every row ready, and keeps its number in a list."""

    item_type = pa.struct({"n": pa.int64(), "by": pa.string()})

    def __init__(self, outside: Outside, name: str) -> None:
        self.outside = outside
        self.name = name

    def restore(self, context: hg.RestoreContext) -> None:
        super().restore(context)
        self.index = context.subtask_index
        self.announced = 0
        self.seen = context.list("seen", int)
        self.messenger = self.outside.disorder()

    def __call__(self, row: Row) -> Row:
        """Make a row ready."""
        self.seen.append(row["n"])
        self.ready({"n": row["n"], "by": self.outside.who()})
        return row

    def publish(self, items: list[Any]) -> None:
        self.outside.publish(items)

    def snapshot(self, context: hg.SnapshotContext) -> None:
        super().snapshot(context)
        self.outside.kept.setdefault(context.checkpoint_id, {})[self.name, self.index] = self.seen.get()
        if self.messenger is not None:
            self._tell(self.messenger.between())

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.outside.completed(self.name, checkpoint_id, self.announced)
        self.announced = checkpoint_id
        self._hear("complete", checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.outside.aborted(self.name, checkpoint_id)
        self._hear("aborted", checkpoint_id)

    def _hear(self, what: Literal["complete", "aborted"], checkpoint: int) -> None:
        if self.messenger is None:
            self._tell([(what, checkpoint)])
        else:
            self._tell(self.messenger.hear((what, checkpoint), is_last=self.outside.is_final(checkpoint)))

    def _tell(self, words: Sequence[tuple[str, int]]) -> None:
        for what, checkpoint in words:
            if what == "complete":
                super().notify_checkpoint_complete(checkpoint)
            else:
                super().notify_checkpoint_aborted(checkpoint)
