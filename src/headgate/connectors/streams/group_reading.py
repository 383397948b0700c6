"""One subtask of a source that reads by a reader group. An ``InducedReader``: the group's markers set its barriers.

Counterparts: ``group_hook``, which asks the group for checkpoints; ``store.claimed_groups.ClaimedReader``, which says
what to read. Source: GS3 and GS6 to GS12 of docs/spec/group-source.md. Never moves a position of the group but with a
snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pyarrow as pa

from headgate.connectors.base import SourceBatch, SourceContext
from headgate.connectors.breaking_reader import BreakingReader
from headgate.connectors.induced import CheckpointMarker, Polled
from headgate.connectors.streams.positions import decode_position, encode_position
from headgate.connectors.streams.source import POLLS_SOON, WAKEUP_LATE_MS, WAKEUP_SOON_MS, read_as
from headgate.errors import UsageError
from headgate.operators.checkpointed.functions import CheckpointedFunction, CheckpointListener, SnapshotContext
from headgate.operators.types import carried
from headgate.protocol.store.group_claims import Claimant
from headgate.protocol.store.group_shares import GroupSegment
from headgate.protocol.store.reading_order import Place
from headgate.store.reader import SegmentReader
from headgate.store.store import Store


class GroupSourceReader(BreakingReader, CheckpointedFunction, CheckpointListener):
    """Reads the segments that the group gives it, and stands still at each marker until it is told to read on."""

    def __init__(self, store: Store, stream: str, group: str, context: SourceContext) -> None:
        """Join. Use ``GroupSource.open``."""
        if not context.takes_checkpoints:
            raise UsageError(
                f"source '{context.node}' reads by a reader group, whose readers come forward with checkpoints; give "
                "Checkpointing(interval=...), or read with StreamSource"
            )
        self._store, self._node = store, context.node
        self._info = store.find(stream)
        self._version, self._schema = read_as(store.schemas(stream), context.schema)
        self._restored = context.positions
        self._claimant = Claimant(f"{context.pipeline}/{context.node}", context.life, int(context.generation))
        name = f"{self._claimant.source}/{context.subtask_index}"
        self._member = store.claimed_reader(group, name, self._claimant, context.parallelism)
        self._readers: dict[str, SegmentReader] = {}
        self._finished: set[str] = set()
        self._waits_for: dict[str, int] = {}
        """Of segments that came behind a marker: the checkpoint that must be complete before they are read (GS8)."""
        self._was_dealt = False
        self._still: set[str] = set()
        self._met_id = self._cut_id = self._completed_id = 0
        self._turn = self._empty_polls = 0

    def snapshot(self, context: SnapshotContext) -> None:
        """See ``CheckpointedFunction``: the positions have just been taken, and the group is told (GS11)."""
        self._cut_id = context.checkpoint_id
        if self._member.is_gathered:  # else nothing was read
            self._pass(context.checkpoint_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """See ``CheckpointListener``: what others read before it has gone through the pipeline."""
        self._completed_id = max(self._completed_id, checkpoint_id)

    def splits(self) -> Sequence[str]:
        """Return what is not read to its end, and what nobody knows the heirs of (GS7): both hold event time back."""
        if not self._was_dealt:
            return [f"{self._info.name}/not dealt out yet"]
        return [split for split in self._readers if split not in self._finished]

    def poll(self) -> Polled:  # type: ignore[override]
        """See ``InducedReader``."""
        return super().poll()

    def read_on(self, splits: Sequence[str]) -> None:
        """See ``InducedReader``. The marker is passed also when its checkpoint was given up, and no snapshot taken."""
        self._still -= set(splits)
        if not self._still and self._met_id and self._member.owed == self._met_id:
            self._pass(self._met_id)

    def wakeup_ms(self) -> int:
        """Return a short pause after recent events, else a longer one."""
        return WAKEUP_SOON_MS if self._empty_polls < POLLS_SOON else WAKEUP_LATE_MS

    def close(self) -> None:
        """The store is shared by the process and stays open; the group lets nobody else in until it begins anew."""
        for reader in self._readers.values():
            reader.close()

    def _poll(self) -> SourceBatch | None:
        found = self._next()
        self._empty_polls = self._empty_polls + 1 if found is None else 0
        return cast(SourceBatch | None, found)

    def _next(self) -> Polled:
        self._see()
        ended = next((x for x in self.splits() if x not in self._still and self._is_over(x)), None)
        if ended is not None:  # first, or checkpoint after checkpoint would keep it from its end
            self._finished.add(ended)
            return SourceBatch(ended, pa.RecordBatch.from_pylist([], schema=self._schema), is_split_finished=True)
        owed = self._member.owed
        return self._read() if owed is None else self._meet(owed)

    def _see(self) -> None:
        """Look at the group, and take up what it gives."""
        self._member.look()
        if not self._member.is_gathered:
            return
        for segment in self._member.segments:
            split = _split(segment)
            if split not in self._readers:
                position = self._member.group.position(segment)
                self._check_restored(split, position)
                number = segment.segment
                self._readers[split] = self._store.reader(
                    self._info.name, number, position, schema_version=self._version
                )
                if self._was_dealt:
                    self._waits_for[split] = self._cut_id
        self._was_dealt = True

    def _check_restored(self, split: str, position: int) -> None:
        """Refuse positions that somebody has edited: the group goes by its cut (GS15)."""
        data = None if self._was_dealt else (self._restored or {}).get(split)
        stored = position if data is None else decode_position(split, data).position
        if stored != position:
            raise UsageError(
                f"source '{self._node}' reads by a reader group, which has {split} at {position} in the checkpoint; "
                f"the positions of the source have it at {stored}: edit neither"
            )

    def _meet(self, checkpoint: int) -> Polled:
        """Return the marker once for every split, and stand still (GS10)."""
        split = next((split for split in self.splits() if split not in self._still), None)
        if split is None:
            return None
        self._still.add(split)
        self._met_id = checkpoint
        return CheckpointMarker(split, checkpoint)

    def _read(self) -> Polled:
        splits = [x for x in self.splits() if x in self._readers and x not in self._still]
        for step in range(len(splits)):
            split = splits[(self._turn + step) % len(splits)]
            if self._waits_for.get(split, 0) > self._completed_id:
                continue
            batch = self._readers[split].read()
            if batch is not None:
                self._turn += step + 1
                return SourceBatch(split, carried(batch, self._schema, f"stream '{self._info.name}'"))
        return None

    def _is_over(self, split: str) -> bool:
        """Whether a segment was read to its end, and what follows it is in somebody's hands, or nothing does (GS7)."""
        reader = self._readers.get(split)
        if reader is None or not reader.has_ended():
            return False
        known = self._member.group.progress[self._info.name].positions
        return reader.segment not in known or self._is_last(reader.segment)

    def _is_last(self, segment: int) -> bool:
        """Whether nothing follows a segment: it was sealed with its stream."""
        _, is_sealed = self._store.look(self._info)
        return is_sealed and any(x.segment_id == segment for x in self._store.layout(self._info.name).present)

    def _has_ended(self) -> bool:
        """Whether everything is read: none of its segments has an heir, and only by one could it get another."""
        if not self._was_dealt or self.splits():
            return False
        return self._store.look(self._info)[1]

    def _positions(self) -> dict[str, bytes]:
        return {split: encode_position(Place(reader.position)) for split, reader in self._readers.items()}

    def _pass(self, checkpoint: int) -> None:
        positions = {GroupSegment(self._info.name, x.segment): x.position for x in self._readers.values()}
        ended = (self._info.name,) if any(x.has_ended() for x in self._readers.values()) else ()
        self._member.passed(checkpoint, positions, ended, self._claimant)
        self._forget_finished()

    def _forget_finished(self) -> None:
        """Leave out what is finished, and behind the durable positions of the group: nobody asks for it any more."""
        known = self._member.group.progress[self._info.name].positions
        gone = [split for split in self._finished if self._readers[split].segment not in known]
        for split in gone:
            self._finished.discard(split)
            del self._readers[split]


def _split(segment: GroupSegment) -> str:
    return f"{segment.stream}/{segment.segment}"
