"""A stream of the store that is cut at one moment: its source sets its own barriers (rules SC20–SC25).

The hook records with every checkpoint where each segment ends, in one transaction of the catalogue; readers stand still
there. The natural form of Pravega's reader-group checkpoints for this store: the cut is in the snapshot of the source
and, for people, in the manifest. Source: docs/spec/stream-store.md; counterpart: ``connectors.streams``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from headgate.connectors.base import CheckpointMarker, Polled, SourceContext
from headgate.connectors.hooks import CoordinatorHook, HookContext
from headgate.errors import StorageError
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.store.catalogue.records import Frontier, Marker
from headgate.store.store import Store


def marks_of(pipeline: str, node: str) -> str:
    """Return the owner of the markers of one source of one pipeline."""
    return f"{pipeline}/{node}"


class StreamCutHook(CoordinatorHook, CheckpointListener):
    """Records the markers of one source, and forgets them."""

    is_listening = False
    """Nothing but tidying is left to do for a completed checkpoint."""

    def __init__(self, stream: str, root: str) -> None:
        self._stream, self._root = stream, root
        self._owner, self._generation = "", 0

    def open(self, context: HookContext) -> None:
        """See ``CoordinatorHook``."""
        self._owner, self._generation = marks_of(context.pipeline, context.hook), context.generation

    def trigger(self, checkpoint_id: int) -> bytes:
        """Cut the stream here; return the cut, for people: the positions that count are those of the source."""
        cut = self._store.pipelines.mark(
            self._stream, owner=self._owner, generation=self._generation, checkpoint=checkpoint_id
        )
        return json.dumps({"stream": self._stream, "cut": {str(segment): end for segment, end in cut.items()}}).encode()

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Forget what former generations left: their checkpoints are over (SC24)."""
        self._store.pipelines.unmark_others(owner=self._owner, generation=self._generation)

    def reset(self) -> None:
        """See ``restore``."""
        self._store.pipelines.unmark_others(owner=self._owner, generation=self._generation)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Forget this marker and older ones; what cannot be forgotten now goes with the next completion."""
        with suppress(StorageError):
            self._store.pipelines.unmark(owner=self._owner, generation=self._generation, first=0, last=checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Forget this marker; one that stays does no harm, and goes with the next completion."""
        with suppress(StorageError):
            self._store.pipelines.unmark(
                owner=self._owner, generation=self._generation, first=checkpoint_id, last=checkpoint_id
            )

    @property
    def _store(self) -> Store:
        return Store.shared(self._root)


class SegmentCuts:
    """What a reader knows of the markers in its stream, and where it stands still."""

    def __init__(self, store: Store, stream: str, context: SourceContext) -> None:
        self._store, self._stream = store, stream
        self._owner, self._generation = marks_of(context.pipeline, context.node), int(context.generation)
        self._changes = -1
        self._frontier = Frontier({}, {}, is_sealed=False)
        self._asked: set[int] = set()
        self._met: dict[int, int] = {}
        self._still: set[str] = set()

    def look(self, segment: int) -> Frontier:
        """Return the frontier of ``segment``, and of all others that were looked at.

        Events after it may have markers between them that are not known yet (S62, SC22).
        """
        changes = self._store.changes()
        if changes != self._changes or segment not in self._asked:
            self._asked.add(segment)
            self._frontier = self._store.pipelines.frontier(
                self._stream, owner=self._owner, generation=self._generation, segments=self._asked
            )
            self._changes = changes  # taken before looking
        return self._frontier

    def leave(self, segment: int) -> None:
        """Stop looking at ``segment``, which was read to its end."""
        self._asked.discard(segment)
        self._met.pop(segment, None)

    def stands_still(self, split: str) -> bool:
        """Whether nothing of ``split`` is read now."""
        return split in self._still

    def next(self, segment: int) -> Marker | None:
        """Return the marker of ``segment`` that comes next, as far as the last look tells."""
        markers = self._frontier.markers.get(segment, ())
        met = self._met.get(segment, 0)
        found = next((marker for marker in markers if marker.checkpoint > met), None)
        later = {marker.checkpoint for others in self._frontier.markers.values() for marker in others}
        missed = min((x for x in later if met < x and (found is None or x < found.checkpoint)), default=None)
        return found if missed is None else Marker(missed, 0)  # it came after that checkpoint was cut (SC44)

    def meet(self, split: str, segment: int, position: int) -> Polled:
        """Return the marker that the reader stands at, if there is one, and stand still (SC21)."""
        marker = self.next(segment)
        if marker is None or position < marker.position:
            return None
        self._met[segment] = marker.checkpoint
        self._still.add(split)
        return CheckpointMarker(split, marker.checkpoint)

    def limit(self, segment: int) -> int:
        """Return where reading of ``segment`` must end, as far as the last look tells."""
        marker, end = self.next(segment), self._frontier.ends[segment]
        return end if marker is None else min(end, marker.position)

    def read_on(self, splits: Sequence[str]) -> None:
        """See ``InducedReader``."""
        self._still -= set(splits)
