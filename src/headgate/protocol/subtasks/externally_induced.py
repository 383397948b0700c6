"""Cut of a source that sets its own barrier: at the marker, in every split (docs/spec/induced.md, EI20–EI33).

One ``InducedCut`` per such source subtask, part of its ``Subtask``. It aligns splits as the ``Aligner`` does channels,
but splits come and go, and a marker counts only once the coordinator has said what the checkpoint is to be. It never
reads: a reader stops in a split after it has met the marker there. Counterparts: the reader, which reports markers, and
the ``Coordinator``, which announces and aborts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.config import CheckpointOptions
from headgate.model.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class ReadOn:
    """EFFECT: the reader reads these splits on, which stand still since their markers."""

    splits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """EFFECT: the barrier of ``checkpoint`` is here: every split has met its marker, or has ended."""

    checkpoint: CheckpointId
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class DeclineCut:
    """EFFECT: ``checkpoint`` cannot be cut any more: a split has met the marker of a later one."""

    checkpoint: CheckpointId


Effect: TypeAlias = ReadOn | Cut | DeclineCut


class InducedCut:
    """Aligns the markers of one source subtask."""

    def __init__(self, first: CheckpointId) -> None:
        """``first``: checkpoints below it are of generations that are over."""
        self._first = first
        self._open: tuple[str, ...] = ()
        self._is_read = True
        self._is_stopped = False
        self._held: dict[str, CheckpointId] = {}
        self._announced: dict[CheckpointId, CheckpointOptions] = {}
        self._newest = CheckpointId(0)

    @property
    def held(self) -> tuple[str, ...]:
        """Splits that are stopped at a marker."""
        return tuple(self._held)

    @property
    def awaited(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that have begun and are neither cut nor given up, ascending."""
        return tuple(self._announced)

    def announced(self, checkpoint: CheckpointId, options: CheckpointOptions) -> list[Effect]:
        """The coordinator has begun ``checkpoint``. It says so again when it triggers the other sources (C47)."""
        if checkpoint <= self._newest:
            return []
        self._newest = checkpoint
        self._announced[checkpoint] = options
        return self._settled()

    def met(self, split: str, checkpoint: CheckpointId) -> list[Effect]:
        """The reader has met a marker, and stands still in that split."""
        assert split not in self._held, "nothing of a split is read before it is read on (EI21)"
        self._held[split] = checkpoint
        return self._settled()

    def splits(self, splits: Sequence[str], *, is_read: bool) -> list[Effect]:
        """``splits`` have not ended; ``is_read``: the reader goes on in those that do not stand still (EI26)."""
        self._open, self._is_read = tuple(splits), is_read
        # a split that has ended counts as cut for every checkpoint, so its marker holds nothing up any more
        self._held = {split: checkpoint for split, checkpoint in self._held.items() if split in self._open}
        return self._settled()

    def aborted(self, checkpoint: CheckpointId) -> list[Effect]:
        """Release the splits that wait for ``checkpoint``: the coordinator gave it up (EI27)."""
        self._announced.pop(checkpoint, None)
        return self._settled()

    def stop(self) -> None:
        """Nothing more is read: the last barrier before a stop has gone out (GM3)."""
        self._is_stopped = True

    def _settled(self) -> list[Effect]:
        effects: list[Effect] = self._released()
        # each turn takes the oldest out or ends: barriers leave in the order of checkpoints
        while self._announced:
            oldest = min(self._announced)  # EI28
            if any(checkpoint > oldest for checkpoint in self._held.values()):  # EI24
                del self._announced[oldest]
                effects.append(DeclineCut(oldest))
            elif self._is_waiting:
                break
            else:
                effects.append(Cut(oldest, self._announced.pop(oldest)))
            effects += self._released()
        self._check()
        return effects

    @property
    def _is_waiting(self) -> bool:
        """Whether a split is still to be read to its marker."""
        is_read = self._is_read and not self._is_stopped
        return is_read and any(split not in self._held for split in self._open)

    def _released(self) -> list[Effect]:
        """Read on past markers without effect: of former generations, and of checkpoints that are over (EI23).

        One that is newer than everything announced waits: its announcement is on the way (EI22).
        """
        over = [split for split, checkpoint in self._held.items() if self._is_over(checkpoint)]
        for split in over:
            del self._held[split]
        return [ReadOn(tuple(over))] if over else []

    def _is_over(self, checkpoint: CheckpointId) -> bool:
        return checkpoint < self._first or (checkpoint <= self._newest and checkpoint not in self._announced)

    def _check(self) -> None:
        assert all(checkpoint <= self._newest for checkpoint in self._announced), "announcements rise (C2)"
        assert self._held.keys() <= set(self._open), "what has ended does not stand still (EI25)"
        assert not any(self._is_over(checkpoint) for checkpoint in self._held.values()), (
            "no split waits for a checkpoint that is over (EI23)"
        )
