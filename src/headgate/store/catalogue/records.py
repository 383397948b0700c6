"""What the verbs of a catalogue take and give.

Counterpart: ``base``, which has the verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from headgate.codec.chunk import PartEntry
from headgate.dataclass import dataclass
from headgate.protocol.store.reader_group import Group
from headgate.protocol.store.transactions import Status
from headgate.store.streams import StreamInfo


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A durable chunk file, and the parts in it. ``schema_version``: in which schema its events were written."""

    path: str
    size_bytes: int
    entries: tuple[PartEntry, ...]
    schema_version: int = 0


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A visible part: events of one segment from position ``start``, written in one of their stream's schemas.

    Attributes:
        visible_ms: since when readers see it.
        event_ms: no event after it is as early as that; None: its writer says nothing about event time (S90).
    """

    start: int
    path: str
    entry: PartEntry
    schema_version: int = 0
    visible_ms: int = 0
    event_ms: int | None = None

    @property
    def end(self) -> int:
        """Position after its last event."""
        return self.start + self.entry.events_count


@dataclass(frozen=True, slots=True)
class PartsFound:
    """The next parts of a segment.

    Attributes:
        parts: some of them, in order.
        is_at_end: none follow, it takes no more: closed, or of a sealed stream.
        end: where the segment ends; if there are no parts, nothing lies in front of it, or something was lost.
        event_ms: if there are none, no event that will follow is as early as that; None: it is not known.
    """

    parts: tuple[StoredPart, ...]
    is_at_end: bool
    end: int = 0
    event_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AppendFound:
    """Outcome of an append with a lost answer.

    Attributes:
        ends: segment → position after its last event, of those where any of its parts is left; None: the catalogue
            does not have it.
        is_truncated: it took effect, and all of its events were truncated since.
        is_condemned: it never took effect and never will: its file was removed.
    """

    ends: dict[int, int] | None = None
    is_truncated: bool = False
    is_condemned: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """A checkpoint's marker in one segment: in front of the event at ``position``."""

    checkpoint: int
    position: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """A stream at one moment, for one who looks for markers: none that is unknown lies before ``ends``.

    Attributes:
        ends: of each segment that was asked for.
        markers: of each segment that has any, by checkpoint. One that came after a checkpoint has none of it.
        is_sealed: nothing follows.
        closed: the segments that take no more events, of those that were asked for.
    """

    ends: dict[int, int]
    markers: dict[int, tuple[Marker, ...]]
    is_sealed: bool
    closed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reading:
    """Who reads a stream together: the subtasks of a source, in one generation of one life of a pipeline."""

    reader: str
    life: str
    generation: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one writer's appends in a chunk, from ``first`` to ``last``."""

    writer_id: str
    epoch: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ParticipantInfo:
    """Who writes a transaction: ``sequence`` is the number of its last durable write."""

    name: str
    sequence: int
    events_count: int


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A recorded transaction.

    Attributes:
        events_count: what it holds, as far as that is durable.
        changed_ms: when its status last changed.
        size_bytes: of its events as they are stored; 0 of a decided one that one process wrote.
        begun_ms, lease_ms: of one that several processes write, when it was begun, and how long it may go without a
            sign of life.
        due_ms: when the lease of an open one is over.
        is_expired: it was aborted because its lease was over.
        participants: who writes it, by name.
    """

    stream: str
    name: str
    owner: str
    epoch: int
    status: Status
    events_count: int
    changed_ms: int
    size_bytes: int = 0
    begun_ms: int | None = None
    lease_ms: int | None = None
    due_ms: int | None = None
    is_expired: bool = False
    participants: tuple[ParticipantInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Shared:
    """A transaction that several processes write, as all of them know it: nothing of this changes.

    Attributes:
        stream: with the layout and the schema that it had when the transaction began.
        lease_ms: how long it may go without a sign of life while it is open.
    """

    stream: StreamInfo
    name: str
    owner: str
    epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class ExpiredTransaction:
    """A transaction that was aborted because its lease was over. ``orphans``: files that nothing refers to any more."""

    name: str
    owner: str
    orphans: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupStart:
    """Start of a reader group.

    Attributes:
        from_latest: after the events that are in its streams; else with their first events.
        cuts: stream → its number and a position in each segment; such a stream begins there.
    """

    from_latest: bool = False
    cuts: Mapping[str, tuple[int, Mapping[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFound:
    """A reader group as it is in the catalogue; ``version`` is another one after every change."""

    name: str
    version: int
    group: Group


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of ``Catalogue.sweep``.

    Attributes:
        garbage: files to delete, and to pass to ``swept`` afterwards.
        is_done: no part before the heads is left.
    """

    garbage: tuple[str, ...]
    is_done: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """What ``Catalogue.recover`` did.

    Attributes:
        aborted: names of the transactions that it aborted.
        orphans: files that nothing refers to any more.
        streams: where the owner may have left files.
    """

    aborted: tuple[str, ...]
    orphans: tuple[str, ...]
    streams: tuple[StreamInfo, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What a catalogue on a server says about its chunks: where they are, and its id."""

    chunks: str
    store_id: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a stream: how many events, and who wrote them, ``ours`` or ``others``.

    ``forgotten``: some of the others are owners of ours that the store was made to forget.
    """

    events_count: int = 0
    ours: bool = False
    others: bool = False
    forgotten: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether it cannot be emptied for one of those who wrote."""
        return self.ours and self.others
