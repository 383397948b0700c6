"""Pipelines that follow files which are written to, rotated and removed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from posixpath import basename

import xxhash

import headgate as hg
from headgate.codec.snapshot import POSITIONS_PREFIX, decode_positions
from headgate.connectors.files import line_file, rotation
from headgate.connectors.files.file_committer import committed_files
from headgate.connectors.files.file_position import FilePosition
from headgate.dataclass import dataclass
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.sim.machine.files import BusyFiles, SimFile
from headgate.sim.machine.storage import Disk, SimStorage
from headgate.sim.machine.world import Bound, Fault, Violation, World
from headgate.sim.product.run import Run
from headgate.sim.product.settings import CHECKPOINTS, NAME
from headgate.sim.product.source import SCHEMA
from headgate.sim.product.steps import KEYS, Row
from headgate.sim.product.verdict import Verdict, frames_of
from headgate.sim.product.workloads import WORKLOADS, Branches, Splits, draw_splits

DIRECTORY = "/logs"
STRANGE = 1_000_000
"""Numbers of rows that belong to no input begin here."""


class Form(Enum):
    """What is followed."""

    DIRECTORY = "the directory"
    GLOB = "all files of each series"
    NAMED = "the files by their names"


@dataclass(eq=False)
class Series:
    """One log.

    Attributes:
        path: of the file that is written to, when it is there.
        rows: all that will ever be in it.
        written: how many of them are, or have been begun.
        rest: what is missing of the last line.
        file: what the writer has open; None: it makes a new one with the next line.
        has_dates: rotated files get the date, and keep it; else a number, which rises.
        is_held: something is being done to its files; no process writes or renames.
        is_copy: its file took the place of another one; a user has to have seen it before it is renamed.
        rotations: how often it was rotated.
    """

    path: str
    rows: Sequence[Row]
    has_dates: bool
    written: int = 0
    rest: bytes = b""
    file: SimFile | None = None
    is_held: bool = False
    is_copy: bool = False
    rotations: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all lines are there."""
        return self.written == len(self.rows) and not self.rest and not self.is_held


class Logs:
    """The owner of all logs."""

    def __init__(
        self,
        world: World,
        rng: random.Random,
        files: BusyFiles,
        form: Form,
        known: Callable[[], Mapping[str, FilePosition]],
    ) -> None:
        """``known`` returns the positions of the newest completed checkpoint, by path."""
        self._world = world
        self._rng = rng
        self._files = files
        self.form = form
        self._known = known
        files.on_listed = self._perhaps_rotate
        self._series: list[Series] = []
        self._late: list[SimFile] = []
        """Files that have been renamed, and will still get a line."""
        self._is_healed = False
        self.losses: set[str] = set()
        """All names of files that were removed: their pipelines may report that something may be missing."""
        self.done: dict[str, int] = {}
        """How often the owner did something of interest."""

    @property
    def is_done(self) -> bool:
        """Whether all lines of all logs are there."""
        return not self._late and all(series.is_done for series in self._series)

    def begin(self, rows: Mapping[str, Sequence[Row]], spread_ms: int) -> None:
        """Begin to write; logs that are followed by their names are there at once, others come some time."""
        for name, own in rows.items():
            series = Series(f"{DIRECTORY}/{name}.log", own, self._rng.random() < 0.5)
            pause_ms = max(1, spread_ms * 3 // max(1, len(own)))
            if self.form is Form.NAMED:
                self._files.append(series.path, b"")
                series.file = self._files.at(series.path)
            self._series.append(series)
            self._world.at(self._rng.randint(0, spread_ms // 2), self._go_on, series, pause_ms)

    def heal(self) -> None:
        """Everything forbidden has ended."""
        self._is_healed = True

    def covers(self, path: str) -> bool:
        """Whether the newest completed checkpoint has read all of a file."""
        file = self._files.at(path)
        return file is not None and any(
            at.offset == len(file.data) and _is_of(at, file.data) for at in self._known().values()
        )

    @property
    def paths(self) -> list[str]:
        """The files that are there."""
        return self._files.paths

    def while_nobody_runs(self) -> None:
        """Between two starts: rename to another series what positions know, remove what was read, and rotate."""
        for path in self._rotated():
            if self._rng.random() < 0.5 and self._are_known(path):
                self._rename_to_another_series(path)
            elif self._rng.random() < 0.2 and self.covers(path) and self._are_known(path):
                self._remove(path)
        for series in self._series:
            if self._rng.random() < 0.3:
                self._rotate(series)

    # -- writing ----------------------------------------------------------------------------------------------------

    def _go_on(self, series: Series, pause_ms: int) -> None:
        """Write some lines; perhaps do something else to the files."""
        if not series.is_held:
            self._write(series)
            self._housekeep(series)
        if not series.is_done:
            self._world.at(self._rng.randint(1, 2 * pause_ms), self._go_on, series, pause_ms)

    def _write(self, series: Series) -> None:
        rng = self._rng
        end = min(series.written + rng.randint(1, 5), len(series.rows))
        data = series.rest + lines_of(series.rows[series.written : end])
        series.written = end
        cut = rng.randrange(len(data)) if data and rng.random() < 0.2 else len(data)
        series.rest = data[cut:]
        if series.file is None:
            self._files.append(series.path, data[:cut])
            series.file = self._files.at(series.path)
        else:
            self._files.write(series.file, data[:cut])

    def _housekeep(self, series: Series) -> None:
        draw = self._rng.random()
        if draw < 0.12:
            self._rotate(series)
        elif draw < 0.18:
            self._copy(series)
        elif draw < 0.26:
            for path in self._rotated():
                if self.covers(path) and self._are_known(path):
                    self._remove(path)
        elif draw < 0.30 and not self._is_healed:
            self._truncate(series)

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    # -- rotating ---------------------------------------------------------------------------------------------------

    def _rotate(self, series: Series) -> None:
        """Rename the file, and those before it; what is made next has its name."""
        file = series.file
        if file is None or series.is_held or not self._may_rotate(series, file):
            return
        self._count("rotated")
        series.rotations += 1
        series.is_held = True
        if series.rest:
            self._late.append(file)
            self._world.at(self._rng.choice((0, 5, 60)), self._write_late, file, series.rest)
            series.rest = b""
        if series.has_dates:
            steps = [(series.path, f"{series.path}-202601{series.rotations:02d}")]
        else:
            numbered = [f"{series.path}.{n}" for n in range(1, len(self._files.paths) + 2)]
            last = next(n for n, path in enumerate(numbered) if self._files.at(path) is None)
            names = [series.path, *numbered[: last + 1]]
            steps = list(zip(names[-2::-1], names[:0:-1], strict=True))
        self._rename_next(series, steps)

    def _may_rotate(self, series: Series, file: SimFile) -> bool:
        """Whether everybody would know the file by another name, or could tell what it is."""
        if self._is_known(file):
            series.is_copy = False
        if series.is_copy or any(series.path in late.names for late in self._late):
            return False  # files behind one another are told by when they were written to last
        return self.form is not Form.NAMED or any(map(self._is_known, self._of(series)))

    def _of(self, series: Series) -> list[SimFile]:
        """Return the files of a log that are there."""
        found = (self._files.at(path) for path in self._files.paths)
        return [file for file in found if file is not None and series.path in file.names]

    def _rename_next(self, series: Series, steps: list[tuple[str, str]]) -> None:
        """Rename one file after the other; readers look on."""
        if steps:
            self._files.rename(*steps[0])
            self._world.at(self._rng.choice((0, 0, 1)), self._rename_next, series, steps[1:])
            return
        series.file = None
        if self._rng.random() < 0.3:  # it is not the last time for long
            self._world.at(self._rng.randint(1, 8), self._rotate_again, series)
        if self.form is Form.NAMED:  # a start needs it to be there
            self._world.at(self._rng.choice((0, 10, 60)), self._make_anew, series)
        elif self._rng.random() < 0.5:  # whoever rotates makes the new file
            self._make_anew(series)
        else:
            series.is_held = False

    def _perhaps_rotate(self) -> None:
        """A user has listed the files, and will open some: perhaps they are renamed before."""
        if self._series and self._rng.random() < 0.15:
            self._world.at(self._rng.randint(0, 3), self._rotate_again, self._rng.choice(self._series))

    def _rotate_again(self, series: Series) -> None:
        if not series.is_held and not series.is_done:
            self._write(series)
            self._rotate(series)

    def _make_anew(self, series: Series) -> None:
        self._files.append(series.path, b"")
        series.file, series.is_held = self._files.at(series.path), False

    def _write_late(self, file: SimFile, rest: bytes) -> None:
        self._files.write(file, rest)
        self._late.remove(file)

    def _rename_to_another_series(self, path: str) -> None:
        self._count("renamed to another series")
        self._files.rename(path, f"{DIRECTORY}/kept{self.done['renamed to another series']}x.log")

    # -- removing, replacing, and truncating ------------------------------------------------------------------------

    def _rotated(self) -> list[str]:
        """Return files that no process writes to or renames any more."""
        in_use = [one.file for one in self._series if one.file is not None] + self._late
        is_held = any(one.is_held for one in self._series)
        return [path for path in self._files.paths if not is_held and self._files.at(path) not in in_use]

    def _is_known(self, file: SimFile | None) -> bool:
        """Whether the newest completed checkpoint has a position in a file."""
        return file is not None and any(_is_in(at, file) for at in self._known().values())

    def _are_known(self, path: str) -> bool:
        """Whether a file is known and all of its log, so that no process needs it to tell what came after it."""
        file = self._files.at(path)
        beside = [one for log in self._series if file and log.path in file.names for one in self._of(log)]
        return all(map(self._is_known, [file, *beside]))

    def _remove(self, path: str) -> None:
        file = self._files.at(path)
        assert file is not None
        self._count("removed")
        self.losses |= file.names
        self._files.remove(path)

    def _copy(self, series: Series) -> None:
        """Put a longer copy of a file in its place, as ``rsync`` does."""
        file = series.file
        if file is None or file in self._late or self._files.at(series.path) is not file:
            return
        if series.rest or not self._is_known(file):
            return
        self._count("copied")
        end = min(series.written + 1, len(series.rows))
        data = file.data + lines_of(series.rows[series.written : end])
        series.written = end
        series.file = self._files.replace(series.path, data)
        series.is_copy = True

    def _truncate(self, series: Series) -> None:
        """Copy a file elsewhere, and truncate it: refused, until its owner puts it back."""
        file = series.file
        if file is None or series.is_held:
            return
        # behind a copy that nobody has seen, what is truncated could as well be a new file
        offset = max((at.offset for at in self._known().values() if _is_in(at, file)), default=0)
        if not offset:
            return  # nobody could tell
        self._count("truncated")
        strange = [_strange(self._rng, n) for n in range(self._rng.randint(0, len(file.data) // 30))]
        kept = file.data[: self._rng.randrange(offset)]
        whole, series.is_held = file.data, True
        self._files.overwrite(file, self._rng.choice((b"", kept, lines_of(strange))))
        self._world.at(self._rng.randint(20, 400), self._put_back, series, file, whole)

    def _put_back(self, series: Series, file: SimFile, whole: bytes) -> None:
        self._world.tell("user", f"puts {basename(series.path)} back")
        self._files.overwrite(file, whole)
        series.is_held = False


def lines_of(rows: Sequence[Row]) -> bytes:
    """Return rows as lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _strange(rng: random.Random, number: int) -> Row:
    return {"k": rng.randrange(KEYS), "n": STRANGE + number, "v": 0, "t": 0, "left": 0}


def _is_in(at: FilePosition, file: SimFile) -> bool:
    """Whether a position is one in this very file."""
    return at.inode == file.st_ino and _is_of(at, file.data)


def _is_of(at: FilePosition, data: bytes) -> bool:
    """Whether a position is one in a file with these bytes."""
    if at.offset > len(data) or at.head_bytes > len(data):
        return False
    return not at.offset or xxhash.xxh3_64_intdigest(data[: at.head_bytes]) == at.head_digest


SAFETY_MS = 5_000
"""Virtual time in which something may go wrong."""

WRITING_MS = 4_000
"""Virtual time in which the lines come."""

PATIENCE_MS = 30_000
"""When all lines are there, the user drains after so much virtual time, whatever was read: far longer than it takes to
find out that a worker is silent, and to start again."""

WITHOUT = (Fault.DRAIN, Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.POWER_CUT)
"""Who removes what was read must be able to rely on it."""

SMALL: tuple[Bound, ...] = (
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


class _Verdict(Verdict):
    """All lines were read."""

    def _read_inputs(self, final: Manifest) -> list[list[dict[str, int]]]:
        return [[row for rows in self._settings.inputs[0].values() for row in rows]]


class FollowedRun(Run):
    """The user of one such pipeline."""

    IS_PLAIN = True
    SUBJECT = "followed files"
    RESCALE_RATE = 0.5
    VERDICT = _Verdict
    READS_STATE = False

    def _draw(self) -> None:
        rng, settings = self.rng, self.settings
        settings.fix_input()
        settings.files = settings.outside = None
        # no windows: what comes with a file that is found late may be late, too
        jobs = [workload for workload in WORKLOADS if workload.name != "windowed"]
        settings.job = Branches(rng.sample(jobs, rng.choice((1, 1, 2))), is_picky=True)
        settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 4)), rng.choice((60, 160, 300)))]
        settings.checkpointing = replace(settings.checkpointing, interval=f"{rng.choice((20, 40, 80))}ms")
        self.form, self._discovery_ms = rng.choice(list(Form)), rng.choice((0, 20, 100))
        self._system = BusyFiles(self.tasks, self.faults, rng.choice((1, 2, 4)), rng, DIRECTORY)
        self.logs = Logs(self.world, rng, self._system, self.form, self.positions)
        self.faults.on -= set(WITHOUT)
        self._draw_deaths(0.7, (Fault.DRIVER_CRASH, Fault.STOP, Fault.CANCEL), 4)
        self._safety_ms = SAFETY_MS
        self._patience_ends_ms: int | None = None
        self._read: tuple[int, dict[str, FilePosition]] = (0, {})
        self.bounds += SMALL

    def _begin(self) -> None:
        self.logs.begin(self.settings.inputs[0], WRITING_MS)

    def _source(self, listed: Splits, index: int, trouble: Callable[[], bool]) -> FollowedLines:
        paths: dict[Form, str | list[str]] = {
            Form.DIRECTORY: DIRECTORY,
            Form.GLOB: f"{DIRECTORY}/*.log*",
            Form.NAMED: [f"{DIRECTORY}/{name}.log" for name in self.settings.inputs[0]],
        }
        return FollowedLines(paths[self.form], self._system, self._discovery_ms)

    def _update_files(self) -> None:
        self.logs.while_nobody_runs()

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
        super()._verify()
        for row in letters():
            if row["position"].rpartition(" line ")[0] not in self.logs.losses:
                raise Violation("N21", f"a bad record that is none: {row}")


def letters() -> Sequence[Mapping[str, str]]:
    """Return the bad records."""
    return [row for frame in frames_of(LETTERS, committed_files(f"sim://{LETTERS}")) for row in frame.to_dicts()]


def _positions(disk: Disk, manifest: Manifest) -> dict[str, FilePosition]:
    files = SnapshotFiles(_AtOnce(disk), NAME)
    found: dict[str, FilePosition] = {}
    for entry in manifest.entries:
        for stored in files.sections(entry, manifest.place).get(f"{POSITIONS_PREFIX}source0", ()):
            decoded = decode_positions(stored)
            found |= {path: FilePosition.decode(path, at) for path, at in decoded.items()}
    return found


class _AtOnce(SimStorage):
    """Reads a disk as no other process can: no time passes, and nothing fails."""

    def get(self, path: str) -> bytes:
        return self._disk.objects[path].data
