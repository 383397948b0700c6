"""Conformance kit for sources that grow: splits that appear late are read exactly once (N24).

Counterpart: ``connectors.base.Source``; ``source_kit`` reads what is there from the beginning. A fake runtime polls all
readers in turn, restarts them at other parallelism, and goes back to earlier positions as after a crash.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.connectors.base import Source, SourceBatch, SourceContext

IDLE_MAX = 500
"""Rounds of polls without a record, after which what is missing never comes. Readers say how long each may wait."""

QUIET_ROUNDS = 3
"""Rounds of polls without a record at the end: nothing comes again."""

LATE = 3
"""Splits that are added one after the other."""


@dataclass(frozen=True, slots=True)
class Growing:
    """A fresh source with a growing number of splits.

    Attributes:
        source: the source. It may have any number of splits at the beginning, or none. If its input ends, the next
            start reads late splits.
        records: the records that exist at the beginning, as the source delivers them.
        add: adds another split of at least two records that no other split has. Returns the records as the source
            delivers them.
        wait: lets this many milliseconds pass for the readers, so that they discover splits. The default really waits.
    """

    source: Source
    records: Sequence[Mapping[str, Any]]
    add: Callable[[], Sequence[Mapping[str, Any]]]
    wait: Callable[[int], None] = lambda ms: time.sleep(ms / 1_000)


def check_late_splits(fresh: Callable[[], Growing], parallelisms: Sequence[int] = (1, 2, 3)) -> None:
    """Check that a source delivers each record once when splits are added at any moment.

    The check adds splits at every moment, at every pair of parallelisms.

    Args:
        fresh: makes a new source with splits of its own.
        parallelisms: numbers of subtasks to begin with, and to continue with.

    Raises:
        AssertionError: records are lost or delivered twice, or a split has two owners. The message says what happened.
    """
    for before, after in itertools.product(parallelisms, repeat=2):
        for check in CHECKS:
            doc = (check.__doc__ or "").partition("\n")[0].rstrip(".")
            check(GrowingPipeline(fresh(), before, f"{doc}, parallelism {before} to {after}"), after)


class GrowingPipeline:
    """Readers of all subtasks, what they have delivered, and a checkpoint to go back to."""

    def __init__(self, growing: Growing, parallelism: int, story: str) -> None:
        self._growing, self.story = growing, story
        self._expected = list(growing.records)
        self._positions: dict[str, bytes] | None = None
        self._kept: list[Mapping[str, Any]] = []
        """What came up to the last checkpoint."""
        self._start(parallelism)

    def __len__(self) -> int:
        """How many subtasks there are."""
        return len(self._readers)

    def add(self) -> None:
        """One more split is there."""
        found = list(self._growing.add())
        assert len(found) > 1, "a late split needs two records or more, so that its reader can stop between them"
        self._expected += found

    def poll(self, rounds: int = 1) -> None:
        """Poll each reader so often."""
        for _ in range(rounds):
            self._round()

    def read_all(self) -> None:
        """Read until everything has come; what has an end is started again if more has appeared meanwhile."""
        idle = 0
        is_new = False
        while len(self._rows()) < len(self._expected):
            if self._round():
                idle, is_new = 0, False
            elif all(reader.is_finished() for reader in self._readers):
                assert not is_new, f"{self.story}: lost: the source has ended, and {self._missing()}"
                self.restart(len(self._readers))
                is_new = True
            else:
                idle += 1
                assert idle <= IDLE_MAX, f"{self.story}: lost: {self._missing()}"
        self.poll(QUIET_ROUNDS)
        self._check()

    def checkpoint(self) -> None:
        """Remember where every reader is; readers that come later in the row are polled in between."""
        positions: dict[str, bytes] = {}
        kept = list(self._earlier)
        for index, reader in enumerate(self._readers):
            found = reader.positions()
            twice = positions.keys() & found.keys()
            assert not twice, f"{self.story}: two subtasks own split {min(twice)}"
            positions |= found
            kept += self._delivered[index]
            for other in range(index + 1, len(self._readers)):
                self._poll(other)
        self._positions, self._kept = positions, kept

    def crash(self, parallelism: int) -> None:
        """Go back to the last checkpoint; what came since does not count."""
        for reader in self._readers:
            reader.close()
        self._start(parallelism)

    def restart(self, parallelism: int) -> None:
        """Stop with a checkpoint, and go on from it."""
        self.checkpoint()
        self.crash(parallelism)

    def _start(self, parallelism: int) -> None:
        self._growing.source.schema()  # as the driver does: it finds what is there
        self._earlier = list(self._kept)
        self._delivered: list[list[Mapping[str, Any]]] = [[] for _ in range(parallelism)]
        contexts = [SourceContext("kit", "source", index, parallelism, self._positions) for index in range(parallelism)]
        self._readers: list[Any] = [self._growing.source.open(context) for context in contexts]

    def _round(self) -> bool:
        """Poll all; wait when nothing came, as the runtime does. Return whether anything came."""
        before = len(self._rows())
        for index in range(len(self._readers)):
            self._poll(index)
        if len(self._rows()) > before:
            return True
        self._growing.wait(max(1, *(reader.wakeup_ms() for reader in self._readers)))
        return False

    def _poll(self, index: int) -> None:
        reader = self._readers[index]
        owned = set(reader.splits())
        found = None if reader.is_finished() else reader.poll()
        if isinstance(found, SourceBatch):
            owned |= set(reader.splits())
            assert found.split in owned, f"{self.story}: a batch of '{found.split}', which is not among splits()"
            self._delivered[index] += found.batch.to_pylist()

    def _rows(self) -> list[Mapping[str, Any]]:
        return [*self._earlier, *(row for rows in self._delivered for row in rows)]

    def _missing(self) -> str:
        return f"{len(self._expected) - len(self._rows())} records did not come"

    def _check(self) -> None:
        found, expected = _counted(self._rows()), _counted(self._expected)
        lost, extra = expected - found, found - expected
        assert not lost, f"{self.story}: lost: {list(lost)[:3]}"
        assert not extra, f"{self.story}: delivered again: {list(extra)[:3]}"


def _counted(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


def check_while_others_are_read(pipeline: GrowingPipeline, after: int) -> None:
    """Splits appeared while others were read."""
    for _ in range(LATE):
        pipeline.poll()
        pipeline.add()
    pipeline.read_all()
    pipeline.restart(after)
    pipeline.read_all()


def check_after_others_ended(pipeline: GrowingPipeline, after: int) -> None:
    """Splits appeared after all others had been read to their ends."""
    for _ in range(LATE):
        pipeline.read_all()
        pipeline.add()
    pipeline.read_all()
    pipeline.restart(after)
    pipeline.add()
    pipeline.read_all()


def check_between_two_starts(pipeline: GrowingPipeline, after: int) -> None:
    """Splits appeared between two starts."""
    pipeline.poll()
    for _ in range(LATE):
        pipeline.checkpoint()
        pipeline.add()
        pipeline.crash(after)
        pipeline.poll()
    pipeline.read_all()
    pipeline.checkpoint()
    pipeline.add()
    pipeline.crash(after)
    pipeline.read_all()


def check_restarts_within_late_splits(pipeline: GrowingPipeline, after: int) -> None:
    """Restarted after every poll, with splits that appear meanwhile."""
    parallelisms = itertools.cycle((after, len(pipeline), 1, after))
    for number in range(4 * LATE):
        if number % 4 == 1:
            pipeline.add()
        pipeline.poll()
        pipeline.restart(next(parallelisms))
    pipeline.read_all()


def check_crashes_behind_discovery(pipeline: GrowingPipeline, after: int) -> None:
    """Went back to before a late split was found."""
    for _ in range(LATE):
        pipeline.checkpoint()
        pipeline.add()
        pipeline.poll(3)
        pipeline.crash(after)
        pipeline.poll()
    pipeline.read_all()


CHECKS = (
    check_while_others_are_read,
    check_after_others_ended,
    check_between_two_starts,
    check_restarts_within_late_splits,
    check_crashes_behind_discovery,
)
