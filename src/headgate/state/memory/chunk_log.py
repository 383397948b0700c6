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
        whole: the states of which it has all that there was: older chunks say nothing of them (MC11).
    """

    after: int
    until: int
    rows: int
    files: tuple[SnapshotPart, ...]
    whole: frozenset[str] = frozenset()


class ChunkLog:
    """The chunks that one backend wrote, as far as they may be shared. Used by the thread that writes snapshots."""

    def __init__(self) -> None:
        self.interval = Interval()
        self._known: tuple[Chunk, ...] = ()
        self._names_before = 0

    def end_interval(self) -> int:
        """Everything was frozen: what changes from now on belongs to the next snapshot. Return the number of this."""
        self.interval.number += 1
        return self.interval.number - 1

    def go_on_with(self, chunks: Sequence[tuple[int, tuple[SnapshotPart, ...], frozenset[str]]]) -> None:
        """What these chunks say was restored, and nothing else: the next snapshot may go on from them.

        Args:
            chunks: rows, files and whole states of each, in order.
        """
        ends = range(1 - len(chunks), 1)
        starts = [BEGINNING, *ends[:-1]]
        placed = zip(starts, ends, chunks, strict=True)
        self._known = tuple(Chunk(after, until, *found) for after, until, found in placed)
        numbers = [int(file.name.partition("-")[0]) for _, files, _ in chunks for file in files]
        self._names_before = max(numbers, default=0)
        self.interval.number = 1

    def forget(self) -> None:
        """The next snapshot has everything."""
        self._known = ()

    def name(self, number: int, place: int) -> str:
        """Return what to call a file of the snapshot ``number``: no other one of its snapshot is called so."""
        return f"{self._names_before + number}-{place}{CHUNK_SUFFIX}"

    def chain(self, shareable: Mapping[str, SnapshotPart]) -> list[Chunk]:
        """Return the longest chain of which every file may be shared. They all are of one snapshot (SF15)."""
        found = {c.after: c for c in self._known if all(shareable.get(f.name) == f for f in c.files)}
        chain: list[Chunk] = []
        at = BEGINNING
        while (chunk := found.get(at)) is not None:
            chain.append(chunk)
            at = chunk.until
        return chain

    def wrote(self, number: int, chain: Sequence[Chunk], new: Chunk | None) -> None:
        """The snapshot ``number`` was written, where ``chain`` could be shared.

        What is in neither is in a snapshot no more that may be the newest one, and will never be shared again.
        """
        self._known = (*chain, *(() if new is None else (new,)))
        firsts = [chunk.until for chunk in self._known if chunk.after == BEGINNING]
        self.interval.needed_since = min(firsts, default=number)


def kept(chain: Sequence[Chunk], live_rows: int, changed: Callable[[int], int | None]) -> Sequence[Chunk]:
    """Return the chunks that a snapshot refers to; none: it writes everything.

    Args:
        chain: what it may refer to.
        live_rows: how many rows there are.
        changed: returns how many rows are to be written after a snapshot; None: of no state it is known which.
    """
    if len(chain) >= CHUNKS_MAX:
        chain = chain[:1]  # what changed since the first one is written together
    new_rows = changed(chain[-1].until) if chain else None
    if new_rows is None:
        return ()
    return chain if sum(chunk.rows for chunk in chain) + new_rows < 2 * live_rows else ()
