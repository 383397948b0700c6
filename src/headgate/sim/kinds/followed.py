"""Pipelines that follow files which others write, rotate, replace and remove meanwhile (N18 to N21, N48 to N51, SM81).

Such a source has no end: when nothing fails any more and everything has been read, the user drains the pipeline. By
then each line was delivered once, and nothing was called a bad record but what may have been lost. Everything drawn
here comes from a generator of its own.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import ModuleType

import polars as pl

import headgate as hg
from headgate.codec.snapshot import POSITIONS_PREFIX, decode_positions
from headgate.connectors.encode import decode
from headgate.connectors.files import line_file, rotation
from headgate.connectors.files.file_committer import committed_files
from headgate.connectors.files.line_file import FilePosition
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.sim.kinds.logs import DIRECTORY, Form, Logs
from headgate.sim.machine.disk import Disk, SimStorage
from headgate.sim.machine.faults import Fault
from headgate.sim.machine.files import BusyFiles
from headgate.sim.product.run import EVENTS_MAX, Result, Run, result_of
from headgate.sim.product.settings import CHECKPOINTS, NAME, Settings
from headgate.sim.product.source import SCHEMA
from headgate.sim.product.verdict import Verdict
from headgate.sim.product.workloads import WORKLOADS, Branches, Splits, draw_splits
from headgate.sim.world import Violation
from headgate.storage.urls import open_storage

SAFETY_MS = 5_000
"""Virtual time in which something may go wrong."""

WRITING_MS = 4_000
"""Virtual time in which the lines come."""

PATIENCE_MS = 30_000
"""When all lines are there, the user drains after so much virtual time, whatever was read: far longer than it takes to
find out that a worker is silent, and to start again."""

RESCALE_RATE = 0.5

WITHOUT = (Fault.DRAIN, Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.POWER_CUT)
"""Who removes what was read must be able to rely on it."""

SMALL: tuple[tuple[ModuleType, str, int], ...] = (
    (line_file, "BLOCK_BYTES", 160),  # a few lines
    (line_file, "HEAD_BYTES", 96),
    (rotation, "HEAD_BYTES", 96),
)
"""Bounds that are small here, so that short files reach them."""

LETTERS = "bad-records"


class FollowedLines(hg.JsonLines):
    """``JsonLines`` over files that are written meanwhile."""

    def __init__(self, paths: str | list[str], system: BusyFiles, discovery_ms: int) -> None:
        self.system = system
        super().__init__(
            paths, SCHEMA, follow=True, poll_interval="5ms", discovery_interval=f"{discovery_ms}ms", include_path=False
        )


class FollowedSettings(Settings):
    """The settings of any run, for a pipeline that follows files."""

    logs: Logs
    system: BusyFiles
    form: Form
    discovery_ms: int

    def _source(
        self, listed: Splits, index: int, now_ms: Callable[[], int], trouble: Callable[[], bool]
    ) -> FollowedLines:
        match self.form:
            case Form.DIRECTORY:
                paths: str | list[str] = DIRECTORY
            case Form.GLOB:
                paths = f"{DIRECTORY}/*.log*"
            case Form.NAMED:
                paths = [f"{DIRECTORY}/{name}.log" for name in self.inputs[0]]
        return FollowedLines(paths, self.system, self.discovery_ms)

    def update_files(self) -> None:
        """See ``Settings``."""
        self.logs.while_nobody_runs()


class FollowedRun(Run):
    """The user of one such pipeline."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, is_plain=True, events_max=events_max)
        rng = self._rng = random.Random(f"followed files of seed {seed}")
        values = {each.name: getattr(self.settings, each.name) for each in fields(Settings)}
        settings = self.settings = FollowedSettings(
            **{**values, "files": None, "outside": None, "hidden": set(), "grows": False}
        )
        # no windows: what comes with a file that is found late may be late, too
        jobs = [workload for workload in WORKLOADS if workload.name != "windowed"]
        settings.job = Branches(rng.sample(jobs, rng.choice((1, 1, 2))), is_picky=True)
        settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 4)), rng.choice((60, 160, 300)))]
        settings.checkpointing = replace(settings.checkpointing, interval=f"{rng.choice((20, 40, 80))}ms")
        settings.form, settings.discovery_ms = rng.choice(list(Form)), rng.choice((0, 20, 100))
        settings.system = BusyFiles(self.tasks, self.faults, rng.choice((1, 2, 4)), rng, DIRECTORY)
        self.logs = settings.logs = Logs(self.world, rng, settings.system, settings.form, self.positions)
        self.faults.on -= set(WITHOUT)
        if rng.random() < 0.7:
            self.faults.on |= {rng.choice((Fault.DRIVER_CRASH, Fault.STOP, Fault.CANCEL)), Fault.WORKER_CRASH}
            self.faults.budget += 4
        self._safety_ms = SAFETY_MS
        self._patience_ends_ms: int | None = None
        self._read: tuple[int, dict[str, FilePosition]] = (0, {})

    def run(self) -> Violation | None:
        """See ``Run``."""
        usual = [getattr(module, name) for module, name, _ in SMALL]
        try:
            for module, name, value in SMALL:
                setattr(module, name, value)
            self.logs.begin(self.settings.inputs[0], WRITING_MS)
            return super().run()
        finally:
            for (module, name, _), value in zip(SMALL, usual, strict=True):
                setattr(module, name, value)

    def start(self) -> None:
        """See ``Run``."""
        if self.started and self._rng.random() < RESCALE_RATE:
            self.settings.parallelism = self._rng.choice((1, 2, 3))
        super().start()

    # -- what was read ----------------------------------------------------------------------------------------------

    def positions(self) -> Mapping[str, FilePosition]:
        """Return the positions of the newest completed checkpoint, by path."""
        newest = max(self.history.completed, default=0)
        if newest > self._read[0]:
            manifest = self.history.written[newest, self.history.completed[newest]].manifest
            with contextlib.suppress(KeyError):  # removed already: a newer one is there, and nobody was told
                self._read = newest, _positions(self._disk(CHECKPOINTS), manifest)
        return self._read[1]

    # -- the end ----------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        super()._heal()
        self.logs.heal()
        self.world.at(50, self._look_at_end)

    def _look_at_end(self) -> None:
        """Have the user drain when everything was read, or patience is at its end."""
        if self.is_finished:
            return
        again_ms = 50
        if self.logs.is_done:
            if self._patience_ends_ms is None:
                self._patience_ends_ms = self.world.now_ms + PATIENCE_MS
            is_read = all(self.logs.covers(path) for path in self.logs.paths)
            if is_read or self.world.now_ms >= self._patience_ends_ms:
                again_ms = 2_000
                for one in self.started:
                    if one.driver is not None and one.process.is_alive:
                        self.world.tell("user", f"drains {one.process.name}")
                        self.tasks.spawn(one.process, one.driver.drain, "signal")
        self.world.at(again_ms, self._look_at_end)

    def _verify(self) -> None:
        _Verdict(self.settings, self.history, self.listed_at).check()
        for row in letters():
            if row["position"].rpartition(" line ")[0] not in self.logs.losses:
                raise Violation("N21", f"a bad record that is none: {row}")
        self._is_verified = True


class _Verdict(Verdict):
    """All lines were read."""

    def _read_inputs(self, final: Manifest) -> list[list[dict[str, int]]]:
        return [[row for rows in self._settings.inputs[0].values() for row in rows]]


def letters() -> Sequence[Mapping[str, str]]:
    """Return the bad records."""
    storage = open_storage(f"sim://{LETTERS}")
    found: list[Mapping[str, str]] = []
    for file in committed_files(f"sim://{LETTERS}"):
        frame: pl.DataFrame = decode("jsonl", storage.get(file))
        found += frame.to_dicts()
    return found


def _positions(disk: Disk, manifest: Manifest) -> dict[str, FilePosition]:
    files = SnapshotFiles(_AtOnce(disk), NAME)
    found: dict[str, FilePosition] = {}
    for entry in manifest.entries:
        for stored in files.sections(entry, manifest.place).get(f"{POSITIONS_PREFIX}source0", ()):
            decoded = decode_positions(stored)
            found |= {path: FilePosition.decode(path, at) for path, at in decoded.items()}
    return found


class _AtOnce(SimStorage):
    """Reads a disk as nobody else can: no time passes, and nothing fails."""

    def get(self, path: str) -> bytes:
        return self._disk.objects[path].data


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed."""
    return result_of(FollowedRun(seed, is_traced=is_traced, events_max=events_max), seed, is_traced=is_traced)
