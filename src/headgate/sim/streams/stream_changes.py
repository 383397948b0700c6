"""Streams that are truncated, emptied or scaled while pipelines read them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import headgate as hg
from headgate.connectors.streams import StreamSink, decode_position, owner_of
from headgate.errors import FencedError
from headgate.model.config import Duration
from headgate.model.manifest import Manifest
from headgate.model.pipeline_identity import Owner
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.store import layouts as machine
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.reset import Reset
from headgate.runtime.surroundings import Surroundings
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Bound, Violation
from headgate.sim.product.settings import NAME, ROOT
from headgate.storage.urls import open_storage
from headgate.store import maintenance
from headgate.store.policies import Scaling
from headgate.store.store import Store
from headgate.store.streams import StreamInfo


def check_cuts(source: str, stream: Callable[[], StreamInfo]) -> int:
    """Compare the positions of ``source`` with the cuts of all checkpoints; return how many segments were compared.

    ``stream`` is looked at after them: a segment that was read to its end is at the end of a sealed stream.

    Raises:
        Violation: one differs.
        HeadgateError: they cannot be read now.
    """
    manifests = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())
    return sum(_check(manifest, source, stream) for manifest in manifests)


def _check(manifest: Manifest, source: str, stream: Callable[[], StreamInfo]) -> int:
    told = next((state for state in manifest.hooks if state.hook == source and state.checkpoint is None), None)
    if told is None or not told.data:
        return 0
    cut: dict[str, int] = json.loads(told.data)["cut"]
    rows = hg.read_state(f"{ROOT}/{NAME}", source, id=manifest.checkpoint)
    info = stream()
    for split, position in rows.select("split", "position").iter_rows():
        segment = split.rpartition("/")[2]
        at = decode_position(split, position).position
        is_closed = info.is_sealed or int(segment) not in {present.segment_id for present in info.segments}
        has_ended = is_closed and at == info.ends[int(segment)]
        wanted = cut.get(segment, 0)  # of a segment that came later it has nothing
        if at != wanted and not has_ended:
            raise Violation("SC21", f"checkpoint {manifest.checkpoint} has {split} at {at}, not {wanted}")
    return rows.height


EMPTIED_RATE = 0.5
"""Of the seeds with streams, so many end with a reset."""

KILLS_MAX = 3


class EmptiedStreams:
    """The reset of one run, and what must hold after it."""

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
        self.is_drawn = self._rng.random() < EMPTIED_RATE
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
        """A process that wrote before the reset is informed that it was replaced."""
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


SCALED_RATE = 0.4
"""So many of the seeds with streams have it."""

POLICIES_RATE = 0.3
"""In so many of them streams have policies."""

TIMES_QUICKER = 1_000
COOL_DOWNS: tuple[Duration, ...] = (0, "50ms", "300ms")
SEGMENTS_MAX = 5


class Scaler:
    """Scales ``streams`` of the store at ``root``."""

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"who scales the streams of seed {seed}")
        self._root, self._streams = root, streams
        self.is_drawn = self._rng.random() < SCALED_RATE
        self.scaled_count = 0

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> None:
        """Scale a stream that is there."""
        store = Store.shared(self._root)
        self._scale(store, _any_of(self._rng, store, self._streams))
        self.scaled_count += 1

    def _scale(self, store: Store, name: str) -> None:
        present = [segment.segment_id for segment in store.layout(name).present]
        at = self._rng.randrange(len(present))
        how = self._rng.random()
        if how < 0.15:
            store.resize(name, self._rng.randint(1, SEGMENTS_MAX - 1))
        elif (how < 0.55 or len(present) == 1) and len(present) < SEGMENTS_MAX:
            store.split(name, present[at], self._rng.randint(2, 3))
        else:
            store.merge(name, present[max(0, at - 1) : at + 1] if at else present[:2])


class Policies:
    """Gives each of ``streams`` a policy as soon as it is there, and asks what it says, beside those who write.

    A run lasts seconds, so all that policies go by is a thousand times shorter than usual, and so are pauses.
    """

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"scaling policies of seed {seed}")
        self._root = root
        self.is_drawn = self._rng.random() < POLICIES_RATE
        self._scaling = {name: self._draw() for name in streams}
        self._had: dict[str, int] = {}
        """By stream that has its policy, how many segments it had when it got that."""
        self.scaled_count = 0

    def _draw(self) -> Scaling:
        bounds = self._rng.choice((3, SEGMENTS_MAX))
        target, cool_down = self._rng.choice((10, 50, 400)), self._rng.choice(COOL_DOWNS)
        if self._rng.random() < 0.3:
            return Scaling(bytes_per_second=40 * target, max_segments=bounds, cool_down=cool_down)
        return Scaling(events_per_second=target, max_segments=bounds, cool_down=cool_down)

    @property
    def bounds(self) -> list[Bound]:
        """Time passes more quickly for policies."""
        return [
            (machine, "WINDOWS_MS", tuple(window_ms // TIMES_QUICKER for window_ms in machine.WINDOWS_MS)),
            (maintenance, "MAINTENANCE_INTERVAL_MS", maintenance.MAINTENANCE_INTERVAL_MS // TIMES_QUICKER),
        ]

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> None:
        """Scale a stream that is there as its policy says."""
        store = Store.shared(self._root)
        name = _any_of(self._rng, store, list(self._scaling))
        if name not in self._had:
            self._had[name] = store.set_scaling(name, self._scaling[name]).segments_count
        self.scaled_count += store.autoscale(name)

    def check(self, store: Store) -> None:
        """Look whether policies, if no other process has scaled, kept within their bounds.

        Raises:
            Violation: S79: one did not.
        """
        for name, had in sorted(self._had.items()):
            count, policy = len(store.layout(name).present), self._scaling[name].checked()
            if not min(policy.segments_min, had) <= count <= max(policy.segments_max, had):  # no step leads out
                raise Violation("S79", f"{name} has {count} segments, and its policy says {policy}")


def _any_of(rng: random.Random, store: Store, streams: Sequence[str]) -> str:
    """Return one of ``streams`` that is there already."""
    there = {info.name for info in store.list_streams()}
    return rng.choice([name for name in streams if name in there])


def left_in(store: Store) -> list[str]:
    """Collect what is left of writers that are gone, and return what the check of the store finds."""
    store.collect_orphans()
    return found_in(store)


def found_in(store: Store) -> list[str]:
    """Return what the check of the store finds."""
    return [str(problem) for problem in store.fsck() if not problem.is_harmless]
