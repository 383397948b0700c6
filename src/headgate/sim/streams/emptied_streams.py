"""A pipeline between streams starts over at the end of its run, by the product's own reset (SM83).

The one who resets is killed at any moment and begins again; when one of them is done, the streams that the pipeline
wrote are gone, those of others are as they were, and no former generation writes there. Drawn from a generator of its
own, so that the runs themselves stay what they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headgate.connectors.streams import StreamSink, owner_of
from headgate.errors import FencedError
from headgate.model.pipeline_identity import Owner
from headgate.model.plan import PipelineDefinition
from headgate.runtime.driver.reset import Reset
from headgate.runtime.surroundings import Surroundings
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.product.settings import NAME, ROOT
from headgate.sim.world import Violation
from headgate.store.store import Store
from headgate.store.streams import StreamInfo

RATE = 0.5
"""Of the seeds with streams, so many end with a reset."""

KILLS_MAX = 3


class EmptiedStreams:
    """The reset of one run, and what must hold behind it."""

    def __init__(
        self,
        seed: int,
        tasks: Tasks,
        program: Callable[[], PipelineDefinition],
        around: Callable[[SimProcess], Surroundings],
        outputs: Sequence[str],
    ) -> None:
        """``outputs``: sinks of the pipeline, which are called like their streams."""
        self._rng = random.Random(f"streams that are emptied, of seed {seed}")
        self.is_drawn = self._rng.random() < RATE
        self._tasks = tasks
        self._program = program
        self._around = around
        self._outputs = outputs
        self.kills_count = 0
        self.is_done = False

    def check(self, store: Store) -> None:
        """Start over, then look. Called in a thread of the simulation, when nothing else runs.

        Raises:
            Violation: something is left, or something else is gone.
        """
        sinks = {str(node.name): node.spec for node in self._program().graph.nodes}
        before = store.list_streams()
        owners = {name: store.pipelines.owner(owner_of(NAME, name)) for name in self._outputs}
        self._start_over()
        found = {info.name: self._outside(info) for info in store.list_streams()}
        left = {info.name: self._outside(info) for info in before if info.name not in self._outputs}
        for (
            info
        ) in before:  # one that was scaled, or has a policy, is not as its sink makes it: it is emptied, and stays
            sink = sinks.get(info.name)
            if isinstance(sink, StreamSink) and (info.segments_count != sink.segments or info.scaling is not None):
                left[info.name] = (0, info.segments_count, (0,) * info.segments_count)
        if found != left:
            raise Violation("SO5", f"after a reset there are {sorted(found.items())}, not {sorted(left.items())}")
        for name, owner in owners.items():
            self._check_fenced(store, name, owner)

    def _outside(self, info: StreamInfo) -> tuple[int, int, tuple[int, ...]]:
        """Return what a user sees of a stream; one that is emptied is another one afterwards."""
        return 0 if info.name in self._outputs else info.stream_id, info.segments_count, info.ends

    def _start_over(self) -> None:
        """Begin until one comes to its end."""
        while not self.is_done:
            process = SimProcess(self._tasks, f"reset{self.kills_count}")
            self._tasks.spawn(process, lambda process=process: self._reset(process), "main")  # type: ignore[misc]
            if self.kills_count < KILLS_MAX and self._rng.random() < 0.7:
                self.kills_count += 1
                self._tasks.world.at(self._rng.randint(1, 60), process.kill)
            while process.is_alive:
                self._tasks.park(5)

    def _reset(self, process: SimProcess) -> None:
        """Do what the command does with the program of the pipeline."""
        with Reset.holding_the_lock(ROOT, NAME, self._program(), self._around(process)) as resetting:
            resetting.finish()
            plan = resetting.plan()
            if not plan.is_empty:
                resetting.carry_out(plan)
            self._require(resetting.plan().is_empty, "a reset that is over has left something to be deleted")
        self.is_done = True
        process.end(0)

    def _check_fenced(self, store: Store, name: str, before: Owner) -> None:
        """Whoever wrote before the reset is told that it was replaced."""
        if before.life is None:
            return
        owner = owner_of(NAME, name)
        now = store.pipelines.owner(owner)
        self._require(now.life is not None and now.life.id != before.life.id, f"{name} is still of the former life")
        try:
            store.transactions.fence(owner, before.generation)
        except FencedError:
            return
        self._require(False, f"a former generation may still write to {name}")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise Violation("SO5", problem)
