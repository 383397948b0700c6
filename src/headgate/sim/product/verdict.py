"""What must hold when a pipeline has finished: every sink has what it must have, once, and nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import polars as pl

from headgate.codec.snapshot import POSITIONS_PREFIX, decode_positions
from headgate.connectors.encode import decode
from headgate.connectors.files.file_committer import committed_files
from headgate.model.manifest import Manifest
from headgate.model.progress import RECORDS_OUT
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.sim.product.history import History
from headgate.sim.product.records import Row
from headgate.sim.product.settings import NAME, ROOT, Exactly, Settings
from headgate.sim.product.source import POSITION
from headgate.sim.product.workloads import Splits, Values
from headgate.sim.world import Violation
from headgate.storage.urls import open_storage


class Verdict:
    """Reads what is there at the end. Runs in a process of its own, when nothing fails any more."""

    def __init__(self, settings: Settings, history: History, listed_at: Mapping[int, list[Splits]]) -> None:
        self._settings = settings
        self._history = history
        self._listed_at = listed_at
        self.read: list[list[Row]] = []
        """The rows that the final checkpoint says were read, by source: known when they were checked."""

    def check(self) -> None:
        """Compare what was committed with what must have been.

        Raises:
            Violation
        """
        job = self._settings.job
        final = self._final()
        read = self.read = self._read_inputs(final)
        expected = job.expected(read)
        for sink, columns in job.columns.items():
            found, wanted = self._committed(sink, columns), expected[sink]
            if self._settings.grows:
                found, wanted = _folded(found), _folded(wanted)
            has_failed = self._history.generations_count > 1
            problem = self._settings.judge.problem(sink, found, wanted, has_failed=has_failed)
            if problem is not None:
                raise Violation("I1", f"{sink} {problem}")
        if self._settings.outside is not None:
            self._settings.outside.check([row for rows in read for row in rows], final.checkpoint)

    def _committed(self, sink: str, columns: tuple[str, ...]) -> Counter[Values]:
        files = committed_files(f"sim://{sink}")
        self._history.on_read(sink, files)
        storage = open_storage(f"sim://{sink}")
        found: Counter[Values] = Counter()
        order = Order(sink)
        for file in files:
            if not self._history.is_repeated(file):
                frame: pl.DataFrame = decode("jsonl", storage.get(file))
                rows = frame.select(columns).rows()
                found.update(rows)
                if sink in self._settings.job.rising:
                    order.follow(rows)
        return found

    def _final(self) -> Manifest:
        """Return the checkpoint that the pipeline ended with.

        Raises:
            Violation: it is not final.
        """
        final = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())[0]
        if not final.is_final:
            raise Violation("I1", f"the pipeline has finished, and checkpoint {final.checkpoint} is not final")
        return final

    def _read_inputs(self, final: Manifest) -> list[list[Row]]:
        """Return the rows that the final checkpoint says were read, by source.

        Raises:
            Violation: there are others, and no process asked for a drain.
        """
        log = CheckpointLog(open_storage(ROOT), NAME)
        read: list[list[Row]] = []
        for index, splits in enumerate(self._settings.inputs):
            positions = self._rows_read(splits, _positions(log, final, f"source{index}"))
            if not final.is_draining:
                self._check_complete(final.checkpoint, index, positions)
            read.append([row for name, at in positions.items() for row in splits[name][:at]])
            self._check_counted(final, index, len(read[-1]))
        return read

    def _check_counted(self, final: Manifest, source: int, rows_count: int) -> None:
        """Each record is counted once, whatever failed (OM1); one that at most once gave up is not."""
        counted = final.totals.get(f"source{source}", {}).get(RECORDS_OUT, 0)
        is_exact = isinstance(self._settings.judge, Exactly)
        if counted > rows_count or (is_exact and counted < rows_count):
            raise Violation("OM1", f"source{source} read {rows_count} rows and counted {counted}")

    def _rows_read(self, splits: Splits, positions: Mapping[str, bytes]) -> dict[str, int]:
        """Return how many rows of each split were read."""
        files = self._settings.files
        if files is None:
            return {name: POSITION.unpack(at)[0] for name, at in positions.items()}
        found: dict[str, int] = {}
        for path, at in positions.items():
            name = files.split_of(path)
            if name in found:
                raise Violation("I1", f"two files are {name}: {sorted(positions)}")
            found[name] = files.rows_read(path, at, splits[name])
        return found

    def _check_complete(self, checkpoint: int, source: int, positions: Mapping[str, int]) -> None:
        listed = self._listed_at.get(checkpoint)
        if listed is None and self._settings.files is not None and self._settings.grows:
            return  # its driver died before it could tell of it: nobody knows what was in the files
        splits = self._settings.inputs[source]
        for name, rows in (listed[source] if listed else {name: splits[name] for name in positions}).items():
            if positions.get(name) != len(rows):
                raise Violation("I1", f"split {name} of {len(rows)} rows was read to {positions.get(name)}")


class Order:
    """The records of one key come in the order in which they were made: its second column rises (I1)."""

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._last: dict[int, int] = {}

    def follow(self, rows: Sequence[Values]) -> None:
        """Look at the next records.

        Raises:
            Violation: one comes after a later one of its key.
        """
        for key, number, *_ in rows:
            if number <= self._last.get(key, 0):
                raise Violation("I1", f"{self._sink} has number {number} of key {key} behind {self._last[key]}")
            self._last[key] = number


def _positions(log: CheckpointLog, manifest: Manifest, source: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in manifest.entries:
        for stored in log.files.sections(entry, manifest.place).get(f"{POSITIONS_PREFIX}{source}", ()):
            found |= decode_positions(stored)
    return found


def _folded(records: Counter[Values]) -> Counter[Values]:
    """Add up windows, which a list of splits that grew may have had fire in several parts (``records.summed``)."""
    found: Counter[Values] = Counter()
    counts: Counter[tuple[int, int]] = Counter()
    sums: Counter[tuple[int, int]] = Counter()
    for record, times in records.items():
        if len(record) == 5 and record[-1] == -1:
            k, n, v, t, _ = record
            counts[k, t] += n * times
            sums[k, t] += v * times
        else:
            found[record] += times
    found.update((k, counts[k, t], sums[k, t] % 1009, t, -1) for k, t in counts)
    return found
