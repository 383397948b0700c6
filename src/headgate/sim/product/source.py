"""Sources of simulated pipelines: rows that come slowly, and files that grow and are rotated between two starts.

Splits have names, as files have: a list of them may grow between two starts, and positions stay with their split.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from posixpath import basename

import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, SplitPosition, owner_of_split
from headgate.connectors.files import line_file, publish_log
from headgate.connectors.files.file_position import FilePosition
from headgate.dataclass import dataclass
from headgate.sim.machine.files import SimFiles
from headgate.sim.machine.tasks import Tasks
from headgate.sim.machine.world import Bound, Faults
from headgate.sim.product.steps import Row
from headgate.sim.product.workloads import KEPT, Branches, Job, Splits

SCHEMA = pa.schema([(name, pa.int64()) for name in ("k", "n", "v", "t", "left")])
POSITION = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast records come.

    Attributes:
        batch_rows: records at a time.
        pause_ms: from each batch to the next one.
        idle_ms: an empty split ends only when its reader is so old.
    """

    batch_rows: int
    pause_ms: int
    idle_ms: int = 0


def positions_of(names: Sequence[str], context: SourceContext) -> dict[str, int]:
    """Return where to go on in each of these splits that is this subtask's."""
    found = context.positions or {}
    mine = [name for i, name in enumerate(names) if owner_of_split(i, context.parallelism) == context.subtask_index]
    return {name: POSITION.unpack(found[name])[0] if name in found else 0 for name in mine}


class PacedReader:
    """Takes from its splits in turn; after each batch it has nothing for a while. How it reads is its subclasses'."""

    def __init__(self, positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        self._at, self._pace, self._now_ms = positions, pace, now_ms
        self._ended: set[str] = set()
        self._turns = 0
        self._rests_until_ms = 0

    def splits(self) -> Sequence[str]:
        return [name for name in self._at if name not in self._ended]

    def _take_turn(self, names: Sequence[str]) -> str:
        """Return which of these splits is next, and rest afterwards."""
        self._rests_until_ms = self._now_ms() + self._pace.pause_ms
        self._turns += 1
        return names[self._turns % len(names)]

    def is_finished(self) -> bool:
        return len(self._ended) == len(self._at)

    def positions(self) -> dict[str, bytes]:
        return {name: POSITION.pack(at) for name, at in self._at.items()}

    def progress(self) -> dict[str, SplitPosition]:
        return {name: SplitPosition(at) for name, at in self._at.items()}

    def wakeup_ms(self) -> int:
        return max(self._rests_until_ms - self._now_ms(), 0)

    def close(self) -> None:
        """See ``SourceReader``: nothing is open."""


class PacedSplits(Source):
    """Rows by split. What the driver lists is what is read, as with files."""

    def __init__(
        self,
        splits: Mapping[str, Sequence[Row]],
        pace: Pace,
        now_ms: Callable[[], int],
        trouble: Callable[[], bool] = lambda: False,
    ) -> None:
        """Configure; where there is ``trouble``, reading raises."""
        self._splits = {
            name: pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=SCHEMA)
            for name, rows in splits.items()
        }
        self._pace = pace
        self._now_ms = now_ms
        self._trouble = trouble

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        """See ``Source``: positions are kept by name."""
        return "splits by name"

    def open(self, context: SourceContext) -> SourceReader:
        return _SplitsReader(
            self._splits, positions_of(list(self._splits), context), self._pace, self._now_ms, self._trouble
        )


class _SplitsReader(PacedReader):
    """Reads rows; an empty split ends late."""

    def __init__(
        self,
        splits: Mapping[str, pa.RecordBatch],
        positions: dict[str, int],
        pace: Pace,
        now_ms: Callable[[], int],
        trouble: Callable[[], bool],
    ) -> None:
        super().__init__(positions, pace, now_ms)
        self._trouble = trouble
        self._splits = splits
        self._opened_ms = now_ms()
        self._ended = {name for name, at in positions.items() if splits[name].num_rows and at >= splits[name].num_rows}

    def poll(self) -> SourceBatch | None:
        open_splits = self.splits()
        if self.wakeup_ms() or not open_splits:
            return None
        if self._trouble():
            raise RuntimeError("trouble of the user's own")
        name = self._take_turn(open_splits)
        batch = self._splits[name]
        if not batch.num_rows and self._now_ms() < self._opened_ms + self._pace.idle_ms:
            return None
        start = self._at[name]
        self._at[name] = end = min(start + self._pace.batch_rows, batch.num_rows)
        if end == batch.num_rows:
            self._ended.add(name)
        return SourceBatch(name, batch.slice(start, end - start), None, name in self._ended)


FILES_RATE = 0.2
"""Of the seeds, so many read files."""

SMALL: tuple[Bound, ...] = (
    (line_file, "BLOCK_BYTES", 160),  # a few records, so that faults meet a file half read
    (publish_log, "MERGE_AFTER", 3),
    (publish_log, "MANIFEST_FILES_MAX", 5),
)
"""Bounds that seeds with files have instead of the usual ones, so that short runs reach them."""

_SUFFIX = ".jsonl"


class SimJsonLines(hg.JsonLines):
    """``JsonLines`` over simulated files."""

    def __init__(self, directory: str, system: SimFiles) -> None:
        """Read all files of a directory, which are there already."""
        self.system = system
        super().__init__(directory, SCHEMA)


class FileInputs:
    """The files of all sources of a run."""

    def __init__(self, seed: int, tasks: Tasks, faults: Faults) -> None:
        """Draw; ``is_drawn`` says whether this seed reads files."""
        self._rng = random.Random(f"files of seed {seed}")
        self.is_drawn = self._rng.random() < FILES_RATE
        self._system = SimFiles(tasks, faults, self._rng.choice((2, 6, 12)))
        self._written: dict[str, int] = {}
        """How many rows of each split are in its file."""
        self._names: dict[str, str] = {}
        """Where the file of each split is now."""
        self.bounds = SMALL if self.is_drawn else ()

    def with_more(self, job: Job) -> Job:
        """Return ``job`` with a branch that keeps values of all types, if it has branches."""
        if not isinstance(job, Branches):
            return job
        return replace(job, workloads=[*job.workloads, self._rng.choice(KEPT)])

    def source(self, index: int) -> hg.JsonLines:
        """Return the source for the files of source ``index``."""
        return SimJsonLines(f"/input/source{index}", self._system)

    def update(self, inputs: Sequence[Splits], *, grows: bool) -> None:
        """No process runs the pipeline: write, append and rotate. ``inputs``: what there may be now, by source."""
        for index, splits in enumerate(inputs):
            for name, rows in splits.items():
                self._update(index, name, rows, grows=grows)

    def present(self, inputs: Sequence[Splits]) -> list[Splits]:
        """Return what is in the files of each source."""
        return [
            {name: rows[: self._written[name]] for name, rows in splits.items() if name in self._written}
            for splits in inputs
        ]

    def _update(self, index: int, name: str, rows: list[Row], *, grows: bool) -> None:
        rng, before = self._rng, self._written.get(name, 0)
        if name not in self._names:
            self._names[name] = f"/input/source{index}/{name}{_SUFFIX}"
        elif rng.random() < 0.2:
            rotated = f"/input/source{index}/{name}{_SUFFIX}.{len(self._system.paths) + rng.randrange(9)}"
            self._system.rename(self._names[name], rotated)
            self._names[name] = rotated
        after = rng.randint(before, len(rows)) if grows and rng.random() < 0.5 else len(rows)
        self._system.append(self._names[name], _encoded(rows[before:after]))
        self._written[name] = after

    @property
    def paths(self) -> list[str]:
        """Where the files are now."""
        return sorted(self._names.values())

    def split_of(self, path: str) -> str:
        """Return the split with rows that are in the file at ``path``."""
        return basename(path).split(_SUFFIX)[0]

    def rows_read(self, path: str, position: bytes, rows: list[Row]) -> int:
        """Return how many of ``rows`` a position stands after."""
        return _encoded(rows)[: FilePosition.decode(path, position).offset].count(b"\n")


def _encoded(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
