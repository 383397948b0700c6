"""A source that reads a stream with a reader group: the group deals the segments out, its markers set the barriers.

The hook in the driver asks the group for a checkpoint with every checkpoint; the readers in the subtasks meet its
markers. The positions that a restore needs are in the manifest, never only in the group: its positions move only with
a snapshot. Source: docs/spec/group-source.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import pyarrow as pa

from headgate.connectors.base import (
    ASK_AGAIN,
    AskAgain,
    CheckpointMarker,
    CoordinatorHook,
    FailStopReader,
    HoldContext,
    HookContext,
    Polled,
    Source,
    SourceBatch,
    SourceContext,
    SplitPosition,
)
from headgate.connectors.streams.segments import decode_position, encode_position
from headgate.connectors.streams.stream_source import (
    EARLIEST,
    POLLS_SOON,
    WAKEUP_LATE_MS,
    WAKEUP_SOON_MS,
    LookingSource,
    StreamSource,
    read_as,
)
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.operators.checkpoint_listeners import CheckpointedFunction, CheckpointListener, SnapshotContext
from headgate.operators.schemas import carried
from headgate.protocol.store.group_ownership import Claim, Claimant
from headgate.protocol.store.reader_group import GroupSegment
from headgate.protocol.store.reading_order import Place
from headgate.store.catalogue.records import GroupStart
from headgate.store.pipelines import PipelineGroup
from headgate.store.reader import SegmentReader
from headgate.store.reader_groups import group_start
from headgate.store.store import Store
from headgate.store.streams import StreamCut, is_usable_name

_FORMAT = 1


class GroupCheckpointHook(CoordinatorHook, CheckpointListener):
    """Takes a checkpoint of the group, and puts its cut into the manifest."""

    is_listening = False
    """Nothing but tidying is left to do for a completed checkpoint."""
    timeout = "10m"
    """A reader under back pressure meets its marker when it reads on, and the checkpoint's timeout counts as well."""

    def __init__(self, stream: str, group: str, root: str, start: str) -> None:
        """``start``: where a first start begins, as ``GroupSource.start``."""
        self._stream, self._name, self._root, self._start = stream, group, root, start
        self._claim = Claim("", "", "", 0)
        self._asked: set[int] = set()

    def open(self, context: HookContext) -> None:
        self._claim = Claim(f"{context.pipeline}/{context.hook}", context.life, context.home, context.generation)
        self._asked.clear()

    def trigger(self, checkpoint_id: int) -> bytes | AskAgain:
        """Return the cut of the group's checkpoint, when all readers have met its marker."""
        group = self._group
        if checkpoint_id not in self._asked:
            # not all readers have joined: one that joins later would have no marker to meet
            if not group.ask(checkpoint_id):
                return ASK_AGAIN
            self._asked.add(checkpoint_id)
        if not group.is_complete(checkpoint_id):
            return ASK_AGAIN
        return json.dumps({"format": _FORMAT, "group": self._name, "cut": str(group.cut(checkpoint_id))}).encode()

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Have the group begin at the cut of the checkpoint, whether or not the group still knows it (GS13)."""
        if data is None:
            raise UsageError(
                f"source '{self._source}' reads by reader group '{self._name}', and the checkpoint that is restored "
                "holds no cut of one: the source read in another way then; read with StreamSource, or start over"
            )
        cut = _cut_in(data, self._source)
        if cut.stream != self._stream:
            raise UsageError(f"source '{self._source}' reads stream '{self._stream}', and {cut} is of another one")
        self._group.begin(group_start("earliest", [cut]))

    def reset(self) -> None:
        """Have the group begin where a first start does."""
        self._group.begin(start_of_group(self._start))

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Forget the group's checkpoints up to this one; what cannot be forgotten now goes with the next one."""
        self._forget(0, checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Forget the group's checkpoint, so that no reader waits for it (GS14)."""
        self._forget(checkpoint_id, checkpoint_id)

    def _forget(self, first: int, last: int) -> None:
        self._asked = {x for x in self._asked if not first <= x <= last}
        with suppress(StorageError, FencedError, UsageError):  # UsageError: the group was deleted
            self._group.forget(first, last)

    @property
    def _source(self) -> str:
        return self._claim.source.rpartition("/")[2]

    @property
    def _group(self) -> PipelineGroup:
        return Store.shared(self._root).pipelines.group(self._name, self._stream, self._claim)


def start_of_group(start: str) -> GroupStart:
    """Return where a group begins if its source has ``start``: a word, or the text of a cut."""
    if start in ("earliest", "latest"):
        return group_start(start, ())
    return group_start("earliest", [StreamCut.parse(start)])


def _cut_in(data: bytes, source: str) -> StreamCut:
    try:
        found = json.loads(data)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']}")
        return StreamCut.parse(found["cut"])
    except (ValueError, KeyError, TypeError, UsageError) as error:
        what = f"what the checkpoint holds of the reader group of source '{source}'"
        raise CorruptionError(what, 0, f"a stream cut in format {_FORMAT}", str(error)) from error


class GroupSourceReader(FailStopReader, CheckpointedFunction, CheckpointListener):
    """Reads the segments that the group gives it, and stands still at each marker until ``read_on``."""

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
        self._member = store.pipelines.join_group(group, name, self._claimant, context.parallelism)
        self._readers: dict[str, SegmentReader] = {}
        self._finished: set[str] = set()
        self._waits_for: dict[str, int] = {}
        """Of segments assigned after a marker: the checkpoint that must be complete before they are read."""
        self._was_dealt = False
        self._still: set[str] = set()
        self._met_id = self._cut_id = self._completed_id = 0
        self._turn = self._empty_polls = 0

    def snapshot(self, context: SnapshotContext) -> None:
        """See ``CheckpointedFunction``: the positions have just been taken, and are passed on to the group."""
        self._cut_id = context.checkpoint_id
        if self._member.is_gathered:  # else nothing was read
            self._pass(context.checkpoint_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """See ``CheckpointListener``: what others read before it has gone through the pipeline."""
        self._completed_id = max(self._completed_id, checkpoint_id)

    def splits(self) -> Sequence[str]:
        """Return segments not read to their end, and those with unknown successors (GS7): both hold event time back."""
        if not self._was_dealt:
            return [f"{self._info.name}/not dealt out yet"]
        return [split for split in self._readers if split not in self._finished]

    def poll(self) -> Polled:  # type: ignore[override]
        return super().poll()

    def read_on(self, splits: Sequence[str]) -> None:
        """See ``InducedReader``. The marker is passed also when its checkpoint was given up, and no snapshot taken."""
        self._still -= set(splits)
        if not self._still and self._met_id and self._member.owed == self._met_id:
            self._pass(self._met_id)

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: events; where a segment ended when it was last read."""
        return {split: SplitPosition(reader.position, reader.known_end) for split, reader in self._readers.items()}

    def wakeup_ms(self) -> int:
        """Return a short pause after recent events, else a longer one."""
        return WAKEUP_SOON_MS if self._empty_polls < POLLS_SOON else WAKEUP_LATE_MS

    def close(self) -> None:
        """The store is shared by the process and stays open; the group admits no other reader until it begins again."""
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
                    # what its former reader read is in that checkpoint, and must not be overtaken on its way
                    self._waits_for[split] = self._cut_id
        self._was_dealt = True

    def _check_restored(self, split: str, position: int) -> None:
        """Refuse positions that were edited: the group goes by its cut."""
        data = None if self._was_dealt else (self._restored or {}).get(split)
        stored = position if data is None else decode_position(split, data).position
        if stored != position:
            raise UsageError(
                f"source '{self._node}' reads by a reader group, which has {split} at {position} in the checkpoint; "
                f"the positions of the source have it at {stored}: edit neither"
            )

    def _meet(self, checkpoint: int) -> Polled:
        """Return the marker once for every split, and stand still."""
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
        """Whether a segment was read to its end, and its successors are assigned, or there are none (GS7)."""
        reader = self._readers.get(split)
        if reader is None or not reader.has_ended():
            return False
        known = self._member.group.progress[self._info.name].positions
        return reader.segment not in known or self._is_last(reader.segment)

    def _is_last(self, segment: int) -> bool:
        """Whether nothing follows a segment: it was sealed with its stream."""
        _, is_sealed = self._store.pipelines.look(self._info)
        return is_sealed and any(x.segment_id == segment for x in self._store.layout(self._info.name).present)

    def _has_ended(self) -> bool:
        """Whether everything is read: none of its segments has an heir, and only by one could it get another."""
        if not self._was_dealt or self.splits():
            return False
        return self._store.pipelines.look(self._info)[1]

    def _positions(self) -> dict[str, bytes]:
        return {split: encode_position(Place(reader.position)) for split, reader in self._readers.items()}

    def _pass(self, checkpoint: int) -> None:
        positions = {GroupSegment(self._info.name, x.segment): x.position for x in self._readers.values()}
        ended = (self._info.name,) if any(x.has_ended() for x in self._readers.values()) else ()
        self._member.passed(checkpoint, positions, ended, self._claimant)
        self._forget_finished()

    def _forget_finished(self) -> None:
        """Leave out finished segments before the durable positions of the group: they are not needed any more."""
        known = self._member.group.progress[self._info.name].positions
        gone = [split for split in self._finished if self._readers[split].segment not in known]
        for split in gone:
            self._finished.discard(split)
            del self._readers[split]


def _split(segment: GroupSegment) -> str:
    return f"{segment.stream}/{segment.segment}"


@dataclass(frozen=True, slots=True)
class GroupSource(Source):
    """Reads a stream of the store with a reader group that belongs to the pipeline.

    Each time the pipeline starts, the group assigns the segments to subtasks by how much of each segment is unread.
    Every checkpoint of the pipeline is also a checkpoint of the group: each reader is cut at its current position, and
    the manifest contains the cut.

    Attributes:
        stream: the name of the stream, such as ``app/logs``.
        group: the name of the group. Only this source may use it. It is created if it does not exist.
        store: directory of the store; default as for ``StreamSource``.
        start: where the first start begins: at the ``"earliest"`` event, after the ``"latest"`` one, or at a
            ``StreamCut`` or its text.
    """

    stream: str
    group: str
    store: str | None = None
    start: StreamCut | str = EARLIEST

    def __post_init__(self) -> None:
        if not (isinstance(self.group, str) and is_usable_name(self.group)):
            raise UsageError(
                f"reader group name {self.group!r} is not usable; use letters, digits, '_', '-', '.' and '/'"
            )
        plain = self._plain()
        object.__setattr__(self, "start", plain.start)
        object.__setattr__(self, "store", plain.store)

    @property
    def holds(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        return self._plain().schema()

    def identity(self) -> str:
        """See ``StreamSource.identity``. Positions alone do not say where a group goes on."""
        return f"{self._plain().identity()}, by a reader group"

    def how_to_end(self) -> str | None:
        return None if self._plain().how_to_end() is None else f"seal stream '{self.stream}' first"

    def open(self, context: SourceContext) -> GroupSourceReader:
        """Return a reader of what the group gives to this subtask."""
        return GroupSourceReader(Store.shared(self.store), self.stream, self.group, context)

    def coordinator_hook(self) -> CoordinatorHook:
        return GroupCheckpointHook(self.stream, self.group, str(self.store), str(self.start))

    def without_hook(self) -> StreamSource:
        """See ``Source``: a run that only looks leaves the group as it is."""
        return LookingSource(self.stream, self.store, self.start, holds=False)

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """See ``Source``: what older checkpoints need, which the group does not know any more."""
        self._plain().hold(context, needed)

    def _plain(self) -> StreamSource:
        return StreamSource(self.stream, self.store, self.start)
