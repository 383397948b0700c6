"""Input in files of JSON lines that their owner fills and rotates between two starts (N1, N5, N18).

Drawn from a generator of its own, so that seeds without files stay what they are. What was read follows from the bytes
that positions say.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from posixpath import basename

import headgate as hg
from headgate.connectors.files import line_file, publish_log
from headgate.connectors.files.line_file import FilePosition
from headgate.sim.machine.faults import Faults
from headgate.sim.machine.files import SimFiles
from headgate.sim.machine.replacement import Bound
from headgate.sim.machine.tasks import Tasks
from headgate.sim.product.records import Row
from headgate.sim.product.source import SCHEMA
from headgate.sim.product.typed_state import KEPT
from headgate.sim.product.workloads import Branches, Job, Splits

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
