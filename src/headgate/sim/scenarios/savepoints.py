"""Pipelines with user takes that savepoints, moves house with them, and begins another pipeline at one.

Three things are judged beside everything else. When there is a savepoint, all output in front of it is visible, and
everything it refers to is there (SV2, SV3). A pipeline that was stopped with one goes on from it in another checkpoint
directory, in front of the same sinks, which had to be made to forget: exactly once, however often it is started with
the same command (SV24). And the process that begins at any savepoint with empty sinks produces what the first
pipeline had not committed at that moment, once (SV1). In some runs users drain with one, too: then it is of the final
checkpoint, and the process that begins at it finds nothing left to do (SV10, E9). Everything drawn here comes from
generators of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import field, replace
from enum import Enum

from headgate.codec.json_files import decode_savepoint
from headgate.connectors.files.file_committer import committed_files
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.publish_log import OWNERS
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError
from headgate.model.config import StartConfig
from headgate.model.manifest import Manifest, Savepoint
from headgate.model.progress import CheckpointOutcome
from headgate.sim.machine.storage import Disk, Stored
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault, Violation
from headgate.sim.product.fault_injection import Started
from headgate.sim.product.history import sealed_by
from headgate.sim.product.run import EVENTS_MAX, Result, Run
from headgate.sim.product.settings import CHECKPOINTS, NAME
from headgate.sim.product.verdict import Verdict, frames_of
from headgate.sim.product.workloads import Values

PLACES = "savepoint"
"""The disks of savepoints are called so, and numbered."""

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.DRAIN)
"""No start goes back past damage here: what is visible is then judged by what was completed."""

DRAINS_RATE = 0.3
"""In so many runs users drain with savepoints; no process stops them without one there."""


class Ends(Enum):
    """What a savepoint is the end of."""

    NOTHING = ""
    STOP = "to stop with "
    DRAIN = "to drain with "


@dataclass(slots=True)
class Kept:
    """A savepoint, and what the pipeline had committed in front of it."""

    manifest: Manifest
    objects: dict[str, Stored]
    rows: Mapping[str, Counter[Values]]


@dataclass(slots=True)
class Taken:
    """A savepoint that is there, and everything at its place."""

    url: str
    savepoint: Savepoint
    objects: dict[str, bytes] = field(default_factory=dict)


class SavepointRun(Run):
    """A run in which savepoints are taken."""

    IS_PLAIN = True
    SUBJECT = "savepoints"

    def _draw(self) -> None:
        super()._draw()
        self._count = 0
        self._moves_to: Taken | None = None
        self._forgets = False
        self.taken: list[Taken] = []
        self.moves_count = 0
        self.drained: list[Taken] = []
        """Those that a drain ended with."""
        self._drains = random.Random(f"drains of seed {self.seed}")
        self.has_drains = self._drains.random() < DRAINS_RATE
        self._stopped: set[SimProcess] = set()
        """Drivers that were asked to stop with a savepoint, which wins over a drain (E10)."""
        self.kept: Kept | None = None
        self.settings.fix_input()
        self.faults.on -= {*WITHOUT, *([Fault.STOP] if self.has_drains else [])}
        self.world.at(self.rng.randint(5, 100), self._ask)

    def _disk(self, name: str) -> Disk:
        if name.startswith(PLACES) and name not in self.disks:
            disk = self.disks[name] = Disk(self.tasks, self.faults, name)
            disk.watchers.append(lambda path, data: self._on_place(disk, path, data))
        return super()._disk(name)

    # -- taking them ------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the process that runs the pipeline for a savepoint, now and then for one to end with."""
        if self.faults.is_healed or self.is_finished:
            return
        newest, again_ms = self.started[-1], self.rng.randint(2, 20)
        if newest.driver is not None and newest.process.is_alive and newest.driver.running_generation is not None:
            self._count, again_ms = self._count + 1, self.rng.randint(20, 400)
            url, ends = f"sim://{PLACES}{self._count}", self._draw_end()
            self.world.tell("user", f"wants a savepoint {ends.value}at {url}")
            self.tasks.spawn(newest.process, lambda: self._order(newest, url, ends), "savepoint")
        self.world.at(again_ms, self._ask)

    def _draw_end(self) -> Ends:
        if self.rng.random() >= 0.4:
            return Ends.NOTHING
        return Ends.DRAIN if self.has_drains and self._drains.random() < 0.5 else Ends.STOP

    def _check_disks(self) -> None:
        for name, disk in self.disks.items():
            if name in self.settings.job.columns:  # whoever was made to forget remembers that
                disk.forget_past(f"{OWNERS}/")
        super()._check_disks()

    def _order(self, started: Started, url: str, ends: Ends) -> None:
        driver = started.driver
        assert driver is not None
        if ends is Ends.STOP:
            self._stopped.add(started.process)
        try:
            if ends is Ends.NOTHING:
                asked = driver.take_savepoint(url)
            else:
                asked = driver.end_with_savepoint(url, drain=ends is Ends.DRAIN)
        except HeadgateError as problem:
            self.world.tell(started.process.name, str(problem))
            return
        asked.add_done_callback(lambda done: self._answered(started, url, ends, done))

    def _answered(self, started: Started, url: str, ends: Ends, done: Future[CheckpointOutcome]) -> None:
        outcome = done.result()
        self.world.tell(started.process.name, f"savepoint at {url}: {outcome.savepoint or outcome.reason}")
        if outcome.savepoint is None:
            return
        disk = self.disks[url.removeprefix("sim://")]
        objects = {path: stored.data for path, stored in disk.objects.items()}
        if "savepoint" not in objects:
            self.history.fail("SV2", f"{url} is said to be a savepoint")
            return
        taken = Taken(url, decode_savepoint(objects["savepoint"], url), objects)
        self.taken.append(taken)
        if ends is not Ends.NOTHING:
            self._moves_to = taken
        if ends is Ends.DRAIN:
            self._drained(started, taken)

    def _drained(self, started: Started, taken: Taken) -> None:
        """A drain has ended with a savepoint: everything is after it, unless a user wanted to stop."""
        self.drained.append(taken)
        if not taken.savepoint.manifest.is_final and started.process not in self._stopped:
            self.history.fail("SV10", f"the pipeline was drained, and {taken.url} is not of its final checkpoint")

    def _on_place(self, disk: Disk, path: str, data: bytes | None) -> None:
        """Something of a savepoint changed: when it becomes one, it is whole, and what is in front of it visible."""
        if path != "savepoint" or data is None:
            return
        savepoint = decode_savepoint(data, path)
        if savepoint.manifest.committables:
            self.history.fail("SV2", f"the savepoint on {disk.name} promises output")
        missing = {f"{savepoint.files}/{part.path}" for part in savepoint.manifest.parts if part.path} - set(
            disk.objects
        )
        if missing:
            self.history.fail("SV3", f"the savepoint on {disk.name} lacks {sorted(missing)[:3]}")
        hidden = self.history.hidden_until(savepoint.manifest.checkpoint)
        if hidden:
            self.history.fail("SV2", f"{hidden[:3]} in front of the savepoint on {disk.name} cannot be seen")

    # -- moving house -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the pipeline; if it was stopped with a savepoint and no process ran it since.

        Perhaps somewhere else.
        """
        moves_to, self._moves_to = self._moves_to, None
        if (
            moves_to is not None
            and not any(one.process.is_alive for one in self.started)
            and self._is_the_end(moves_to)
        ):
            self.world.tell("user", f"moves the pipeline with {moves_to.url}")
            self.moves_count += 1
            self.disks[CHECKPOINTS].objects = {}
            self.settings.start = StartConfig(moves_to.url)
            self._forgets = True
        super().start()

    def _is_the_end(self, taken: Taken) -> bool:
        manifest = taken.savepoint.manifest
        return (self.history.newest_generation(), self.history.standing[-1:]) == (
            manifest.generation,
            [manifest.checkpoint],
        )

    def _drive(self, started: Started) -> None:
        if self._forgets:
            try:
                for sink in self.settings.job.columns:
                    FileSink(f"sim://{sink}").target(NAME, sink).forget()
                self._forgets = False
            except HeadgateError as problem:
                self.world.tell(started.process.name, str(problem))
                started.process.end(1)
        super()._drive(started)

    # -- judging ----------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        for taken in self.taken:
            now = {path: stored.data for path, stored in self.disks[taken.url.removeprefix("sim://")].objects.items()}
            if now != taken.objects:
                raise Violation("SV5", f"{taken.url} was changed")
        if self.taken:
            chosen = self.rng.choice(self.taken)
            checkpoint = chosen.savepoint.manifest.checkpoint
            rows = {sink: _rows_until(sink, columns, checkpoint) for sink, columns in self.settings.job.columns.items()}
            self.kept = Kept(chosen.savepoint.manifest, self.disks[chosen.url.removeprefix("sim://")].objects, rows)
            if self.stored.is_drawn:
                self.stored.look(chosen.url, chosen.savepoint.manifest)
        super()._verify()


class Both(Verdict):
    """Counts what was committed before, too."""

    def _committed(self, sink: str, columns: tuple[str, ...]) -> Counter[Values]:
        found = super()._committed(sink, columns)
        assert isinstance(self._run, BeginningRun)
        kept = self._run.kept
        if found and kept.manifest.is_final:
            raise Violation("E9", f"{sink} has {found.total()} records of a pipeline that began at the end of another")
        return found + kept.rows[sink]


class BeginningRun(Run):
    """A run that begins at a savepoint of another one, with empty sinks. It adds up to what that one had to make."""

    IS_PLAIN = True
    SUBJECT = "beginning"
    VERDICT = Both
    READS_STATE = False

    def __init__(self, seed: int, kept: Kept, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        self.kept = kept
        super().__init__(seed, is_traced=is_traced, events_max=events_max)

    def _draw(self) -> None:
        settings = self.settings
        settings.fix_input()
        settings.parallelism = self.rng.choice((1, 2, 3))
        settings.start = StartConfig(f"sim://{PLACES}")
        self.faults.on -= set(WITHOUT)
        disk = self.disks[PLACES] = Disk(self.tasks, self.faults, PLACES)
        disk.objects = dict(self.kept.objects)


def _rows_until(sink: str, columns: tuple[str, ...], checkpoint: int) -> Counter[Values]:
    """Return what a sink has of checkpoints up to this one."""
    files = [file for file in committed_files(f"sim://{sink}") if sealed_by(file) <= checkpoint]
    return Counter(row for frame in frames_of(sink, files) for row in frame.select(columns).rows())


class SavedAndBegunRun(SavepointRun):
    """A run in which savepoints are taken, and then one that begins at one of them."""

    def result(self) -> Result:
        """See ``Simulation``: of both."""
        found = super().result()
        if found.violation is not None or self.kept is None:
            return found
        again = BeginningRun(self.seed, self.kept, is_traced=self._is_traced, events_max=self._events_max).result()
        return replace(
            again,
            digest=found.digest + again.digest,
            events_count=found.events_count + again.events_count,
            virtual_ms=found.virtual_ms + again.virtual_ms,
            story=found.story + again.story,
        )
