"""From which chunks a snapshot of the state in memory goes on, and when it begins anew (MC3, MC4). Pure.

A *chunk* is what changed between two snapshots. The first one of a chain is everything that there was; each of the
others begins where the one before it ends. A snapshot is a chain whose last chunk ends with it. Counterparts:
``changes``, which tells what a chunk has, and ``protocol.checkpoints.sharing``, which says what may be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headgate.codec.snapshot import CHUNK_SUFFIX
from headgate.model.manifest import SnapshotPart
from headgate.state.memory.changes import Interval

CHUNKS_MAX = 32
"""A chain has about so many chunks: a restore reads each of them."""

BEGINNING = -(1 << 62)
"""What is before the first interval."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What changed after the snapshot ``after``, up to the snapshot ``until``.

    Attributes:
        rows: how many rows it has, and keys that have gone.
        files: which hold it, each some key groups.
    """

    after: int
    until: int
    rows: int
    files: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a state was frozen.

    Attributes:
        number: of the interval that ended.
        known_since: as it was then.
    """

    number: int
    known_since: int


class ChunkLog:
    """The chunks that one backend wrote, as far as they may be shared. Used by the thread that writes snapshots."""

    def __init__(self) -> None:
        self.interval = Interval()
        self._known: tuple[Chunk, ...] = ()
        self._names_before = 0

    def end_interval(self) -> Moment:
        """Everything was frozen: what changes from now on belongs to the next snapshot."""
        moment = Moment(self.interval.number, self.interval.known_since)
        self.interval.number += 1
        return moment

    def go_on_with(self, chunks: Sequence[tuple[SnapshotPart, ...]], rows: Sequence[int]) -> None:
        """What these chunks say was restored, and nothing else: the next snapshot may go on from them.

        Args:
            chunks: the files of each, in order.
            rows: of each.
        """
        ends = range(1 - len(chunks), 1)
        starts = [BEGINNING, *ends[:-1]]
        self._known = tuple(Chunk(*place) for place in zip(starts, ends, rows, chunks, strict=True))
        numbers = [int(file.name.partition("-")[0]) for files in chunks for file in files]
        self._names_before = max(numbers, default=0)
        self.interval.number = 1

    def name(self, moment: Moment, place: int) -> str:
        """Return what to call a file of the snapshot at ``moment``: no other one of its snapshot is called so."""
        return f"{self._names_before + moment.number}-{place}{CHUNK_SUFFIX}"

    def chain(self, shareable: Mapping[str, SnapshotPart]) -> list[Chunk]:
        """Return the longest chain of which every file may be shared. They all are of one snapshot (SF15)."""
        found = {c.after: c for c in self._known if all(shareable.get(f.name) == f for f in c.files)}
        chain: list[Chunk] = []
        at = BEGINNING
        while (chunk := found.get(at)) is not None:
            chain.append(chunk)
            at = chunk.until
        return chain

    def wrote(self, moment: Moment, chain: Sequence[Chunk], new: Chunk | None) -> None:
        """The snapshot at ``moment`` was written, where ``chain`` could be shared.

        What is in neither is in a snapshot no more that may be the newest one, and will never be shared again.
        """
        self._known = (*chain, *(() if new is None else (new,)))
        firsts = [chunk.until for chunk in self._known if chunk.after == BEGINNING]
        self.interval.needed_since = min(firsts, default=moment.number)


def kept(chain: Sequence[Chunk], moment: Moment, live_rows: int, changed: Callable[[int], int]) -> Sequence[Chunk]:
    """Return the chunks that a snapshot refers to; none: it writes everything.

    Args:
        chain: what it may refer to.
        moment: when it was frozen.
        live_rows: how many rows there are.
        changed: returns how many keys changed after a snapshot.
    """
    if len(chain) >= CHUNKS_MAX:
        chain = chain[:1]  # what changed since the first one is written together
    if not chain or chain[-1].until < moment.known_since:
        return ()
    rows = sum(chunk.rows for chunk in chain) + changed(chain[-1].until)
    return chain if rows < 2 * live_rows else ()
