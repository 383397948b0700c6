"""The verbs of a catalogue.

Each verb is declared once, here, with its types: ``reads`` or ``writes`` say what it does, and every kind of catalogue
carries all of them out by its one method ``carry_out``. Counterparts: ``records`` are what they take and give;
``sql.SqlCatalogue`` runs the function of the tables that ``tables.implements`` the verb, ``client.remote_store`` asks a
server. Source: docs/spec/stream-store.md. Each verb is one database transaction: it took effect as a whole,
durably, when it returns, and not at all when it raises, unless it raises StorageError, which may come after the effect.
No verb reads a clock, touches a chunk file, or waits for another verb.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.model.pipeline_identity import Mine, Owner, PipelineIdentity
from headgate.protocol.store.group_ownership import Claim
from headgate.protocol.store.layouts import Layout, ObservedLoad, Plan, ScalingPolicy
from headgate.protocol.store.reader_group import Event, GroupSegment
from headgate.protocol.store.transactions import Verdict
from headgate.protocol.store.truncation import Extent, Hold
from headgate.store.catalogue.records import (
    AppendFound,
    ChunkRecord,
    Contents,
    ExpiredTransaction,
    Frontier,
    GroupFound,
    GroupStart,
    Numbers,
    PartsFound,
    Reading,
    Recovered,
    Shared,
    StoredPart,
    Swept,
    TransactionInfo,
)
from headgate.store.streams import RetentionPolicy, StreamDefinition, StreamInfo, StreamReset


class Audit(Protocol):
    """A catalogue as it was at one moment, for the check of a store."""

    def streams(self) -> list[StreamInfo]:
        """Return all streams, without their counts."""

    def problems(self) -> list[tuple[str, str]]:
        """Return (where, what) for everything that contradicts itself within the catalogue."""

    def schemas(self, stream: StreamInfo) -> tuple[pa.Schema, ...]:
        """Return the schemas that a stream has had, by version; none if one is missing, which is a problem."""

    def parts(self, stream: StreamInfo) -> Iterator[StoredPart]:
        """Yield the visible parts of a stream that have recorded chunks."""

    def chunks(self) -> Iterator[ChunkRecord]:
        """Give all recorded chunks."""

    def garbage(self) -> set[str]:
        """Return files that are to be deleted."""

    def heirs(self, chunk: ChunkRecord, segment: int) -> set[int]:
        """Return the segments in which events may be that a chunk says are of ``segment``: it, and later ones (S75)."""

    def is_truncated(self, chunk: ChunkRecord, segment: int) -> bool:
        """Return whether such a segment begins after events that were in it."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of a catalogue, as its declaration says it.

    Attributes:
        name: its method of ``Catalogue``.
        is_reading: it changes nothing.
        is_repeatable: repeating it changes nothing more, so it is repeated where its answer was lost.
    """

    name: str
    is_reading: bool
    is_repeatable: bool


VERBS: dict[str, Verb] = {}
"""All verbs, by name."""


def reads(declaration: Callable[Concatenate[Catalogue, _P], _R]) -> Callable[Concatenate[Catalogue, _P], _R]:
    """Declare a verb that changes nothing."""
    return _declared(declaration, is_reading=True, is_repeatable=True)


def writes(declaration: Callable[Concatenate[Catalogue, _P], _R]) -> Callable[Concatenate[Catalogue, _P], _R]:
    """Declare a verb that writes: its caller must know whether it took effect."""
    return _declared(declaration, is_reading=False, is_repeatable=False)


def writes_repeatably(
    declaration: Callable[Concatenate[Catalogue, _P], _R],
) -> Callable[Concatenate[Catalogue, _P], _R]:
    """Declare a verb that changes something, and nothing more when it is repeated."""
    return _declared(declaration, is_reading=False, is_repeatable=True)


def _declared(
    declaration: Callable[Concatenate[Catalogue, _P], _R], *, is_reading: bool, is_repeatable: bool
) -> Callable[Concatenate[Catalogue, _P], _R]:
    verb = VERBS[declaration.__name__] = Verb(declaration.__name__, is_reading, is_repeatable)

    @functools.wraps(declaration)
    def call(self: Catalogue, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        return cast(_R, self.carry_out(verb, arguments, named))

    return call


class Catalogue(ABC):
    """One process's access to a catalogue; safe from several threads.

    Every verb may raise StorageError; transient: repeat it (all may be repeated, see each verb for what that means).
    CorruptionError means that the catalogue is damaged, UsageError that there is no such stream.
    """

    @property
    @abstractmethod
    def path(self) -> str:
        """Where the catalogue is, for messages."""

    @property
    @abstractmethod
    def is_untouched(self) -> bool:
        """Whether this process reads a copy of it, because it may not write it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""

    @abstractmethod
    def changes(self) -> int:
        """Return a number that changes when another connection changed anything (about 5 µs).

        Compare it with one taken *before* the verb that returned the result to keep.
        """

    @abstractmethod
    def carry_out(self, verb: Verb, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Carry out a verb: what each call of a verb does, here, on a server of the store, or in the simulator."""

    # -- streams -----------------------------------------------------------------------------------------------------

    @writes
    def create_stream(self, wanted: StreamDefinition, now_ms: int, *, if_not_exists: bool) -> StreamInfo:
        """Create a stream with its first layout; with ``if_not_exists`` return the one there is when it fits.

        Raises:
            UsageError: it exists, or exists with another schema or routing key.
        """

    @reads
    def find_stream(self, name: str) -> StreamInfo:
        """Return a stream without its counts."""

    @reads
    def describe_stream(self, name: str) -> StreamInfo:
        """Return a stream with its counts."""

    @reads
    def list_streams(self, scope: str) -> list[StreamInfo]:
        """Return the streams by name, with their counts; ``scope`` limits to names below ``scope/``, unless empty."""

    @writes
    def update_schema(self, name: str, wanted: pa.Schema, *, is_whole: bool) -> StreamInfo:
        """Give a stream other columns (S76); return the stream. Repeating is fine.

        Args:
            name: the stream.
            wanted: its columns from now on.
            is_whole: all of them; else those that are added or widened, the others stay.

        Raises:
            UsageError: there is no such stream, it is sealed, or it cannot have these columns.
        """

    @reads
    def schemas(self, stream: StreamInfo) -> tuple[pa.Schema, ...]:
        """Return the schemas that a stream has had, by version; the last one is that of now.

        Raises:
            UsageError: the stream was deleted.
        """

    @reads
    def layout(self, name: str) -> Layout:
        """Return the segments of a stream (CT6)."""

    @writes
    def set_scaling(self, name: str, policy: ScalingPolicy | None) -> StreamInfo:
        """Let ``policy`` be that of a stream (S79)."""

    @reads
    def observe(self, stream: StreamInfo, now_ms: int) -> ObservedLoad | None:
        """Return what ``stream.scaling`` decides upon now; None without a policy, or if the stream is sealed.

        It only reads, so no other verb waits for it.

        Raises:
            UsageError: the stream was deleted.
        """

    @writes
    def autoscale(self, stream: StreamInfo, plan: Plan, now_ms: int) -> bool:
        """Carry out what was decided upon ``observe`` for the same ``stream``; return whether that was done.

        Nothing is done if the stream has another policy or another layout by now, or is another one (S81).
        """

    @writes
    def scale_stream(self, name: str, plan: Plan, now_ms: int) -> Layout:
        """Close segments and have others take their keys from now on (S72); return the layout. Repeating is fine.

        Raises:
            OtherLayoutError: it was scaled since the plan was made.
            UsageError: there is no such stream, it is sealed, or the plan does not fit.
        """

    @reads
    def layout_and_extents(self, stream: StreamInfo) -> tuple[Layout, dict[int, Extent]]:
        """Return the segments of a stream, with head and end of each, of one moment.

        Raises:
            UsageError: the stream was deleted.
        """

    @reads
    def look(self, stream: StreamInfo) -> tuple[int, bool]:
        """Return the number of the present layout, and whether the stream is sealed. Cheap.

        Raises:
            UsageError: the stream was deleted.
        """

    @writes_repeatably
    def seal_stream(self, name: str) -> None:
        """End a stream. Repeating is fine.

        Raises:
            UsageError: a prepared transaction waits: its commit must not fail (S12), or one of several processes is
                open.
        """

    @writes
    def delete_stream(self, name: str, *, force: bool) -> StreamInfo:
        """Forget a stream with everything in it and return what it was; its chunks are orphans afterwards.

        Raises:
            UsageError: it is not sealed, or a holder needs what would go, without ``force``.
        """

    # -- appends -----------------------------------------------------------------------------------------------------

    @writes
    def register_writer(self, stream: StreamInfo, writer_id: str, epoch: int) -> int:
        """Fence older epochs of a writer (S9); return the last number that it appended.

        Raises:
            FencedError: a newer epoch exists.
        """

    @writes
    def append(
        self, stream: StreamInfo, chunk: ChunkRecord, numbers: Numbers | None, now_ms: int, is_timed: bool = False
    ) -> dict[int, int]:
        """Make the parts of a durable chunk visible at the ends of their segments, once.

        Not to be repeated before ``find_append`` said that it did not take effect.

        ``is_timed``: its writer notes event time, so how far the stream has come by now holds before its end (S93).

        Returns:
            segment → position of its first new event.

        Raises:
            FencedError: a newer epoch of the writer exists; nothing was recorded.
            OtherLayoutError: the stream has another layout than ``stream`` says; nothing was recorded.
            UsageError: the stream is sealed or was deleted, or the numbers do not follow; nothing was recorded.
        """

    @reads
    def find_append(self, path: str) -> AppendFound:
        """Return what became of ``append`` of the chunk at ``path``."""

    @writes_repeatably
    def note_time(
        self, stream: StreamInfo, owner: str, event_ms: int, now_ms: int, *, writer: tuple[str, int] | None
    ) -> None:
        """Record how far ``owner`` has come in event time with what is in the stream by now (S93).

        ``writer``: id and epoch of one with a stable id.

        Raises:
            FencedError: a newer epoch of the writer exists.
            UsageError: the stream is sealed or was deleted.
        """

    @writes_repeatably
    def forget_time(self, stream: StreamInfo, owner: str) -> None:
        """Let ``owner`` no longer hold the event time of the stream back."""

    # -- reading -----------------------------------------------------------------------------------------------------

    @reads
    def parts(self, stream: StreamInfo, segment: int, position: int, limit: int) -> PartsFound:
        """Return the parts of a segment that hold events from ``position`` on, at most ``limit`` of them.

        Raises:
            UsageError: the stream was deleted.
            TruncatedError: the segment begins after ``position``.
        """

    # -- heads and holds (S65 to S71): decided by ``protocol.store.truncation`` ---------------------------------------

    @reads
    def extents(self, stream: StreamInfo) -> dict[int, Extent]:
        """Return head and end of every segment, of one moment."""

    @reads
    def cut_at(self, stream: StreamInfo, date_ms: int) -> dict[int, int]:
        """Return, of every segment, the first event that became visible at ``date_ms`` or later, or its end."""

    @writes_repeatably
    def truncate(self, stream: StreamInfo, cut: Mapping[int, int], *, anyway: bool) -> dict[int, int]:
        """Move heads forward to ``cut``; return those that moved. Files stay until ``sweep``.

        Raises:
            UsageError: the cut names what is not there, or a holder needs what would go, without ``anyway``.
        """

    @reads
    def retention_cut(self, stream: StreamInfo, now_ms: int) -> dict[int, int]:
        """Return the heads that ``stream.retention`` would move now, up to what holders need; empty: nothing goes.

        It may take long, and only reads, so no other verb waits for it.
        """

    @writes
    def retain(self, stream: StreamInfo, cut: Mapping[int, int]) -> dict[int, int]:
        """Move heads forward to what ``retention_cut`` found for the same ``stream``; return those that moved.

        What is held by now stays. If the stream has another policy by now than ``stream.retention``, all stays.

        Raises:
            UsageError: the stream was deleted, also if there is another one of its name.
        """

    @writes
    def sweep(self, stream: StreamInfo, limit: int) -> Swept:
        """Forget at most ``limit`` parts before the heads; what holds no part any more becomes garbage."""

    @writes
    def swept(self, paths: Sequence[str]) -> None:
        """Remove the records of garbage after its files were deleted."""

    @writes
    def set_retention(self, name: str, policy: RetentionPolicy | None) -> StreamInfo:
        """Let ``policy`` be that of a stream."""

    @writes
    def hold(self, stream: StreamInfo, hold: Hold) -> None:
        """Let ``hold`` take the place of what its holder held in the stream before.

        Raises:
            TruncatedError: a segment begins after its position; then nothing has changed.
            FencedError: a later generation of its holder holds already.
            UsageError: it names what is not there.
        """

    @writes
    def release(self, stream: StreamInfo, holder: str) -> None:
        """Forget what ``holder`` holds in the stream."""

    @reads
    def holds(self, stream: StreamInfo) -> list[Hold]:
        """Return who holds what in the stream, by holder."""

    # -- markers of checkpoints ---------------------------------------------------------------------------

    @writes
    def mark(self, stream: str, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
        """Record where every segment ends now. Repeating records nothing more.

        Returns:
            Where those end that took events then. Segments with lower numbers had ended for good.

        Raises:
            UsageError: there is no such stream.
        """

    @reads
    def frontier(self, stream: str, owner: str, generation: int, segments: Sequence[int] | None = None) -> Frontier:
        """Return how far a reader of ``segments`` that looks for the markers of one generation of ``owner`` may read.

        ``segments``: None for all that the stream ever had.

        Raises:
            UsageError: there is no such stream.
        """

    @writes
    def unmark(self, owner: str, generation: int, first: int, last: int) -> None:
        """Forget the markers of checkpoints ``first`` to ``last`` of one generation of ``owner``."""

    @writes
    def unmark_others(self, owner: str, generation: int) -> None:
        """Forget the markers of all generations of ``owner`` but this one."""

    # -- what pipelines have passed ---------------------------------------------------------------------

    @writes
    def pass_segments(self, stream: StreamInfo, reader: Reading, segments: Collection[int]) -> None:
        """Record that everything in these closed segments has gone through a pipeline. Repeating is fine."""

    @reads
    def passed(self, stream: StreamInfo, reader: Reading) -> set[int]:
        """Return the segments that ``pass_segments`` recorded for one generation of a reader."""

    # -- reader groups (docs/spec/reader-groups.md): decided by ``protocol.store.reader_group`` ------------------------

    @writes
    def create_group(
        self, name: str, streams: Sequence[str], start: GroupStart, kept: int, claim: Claim | None = None
    ) -> GroupFound:
        """Make a reader group, or return the one that there is of the same streams. Repeating is fine.

        ``claim``: a new one belongs to a pipeline; of one that is there ``reset_group`` finds out.

        Raises:
            TruncatedError: what it would begin with is gone.
            UsageError: a stream is missing, name or start cannot be, or it has other streams.
        """

    @reads
    def find_group(self, name: str) -> GroupFound:
        """Return a reader group.

        Raises:
            UsageError: there is none.
        """

    @reads
    def groups(self) -> list[str]:
        """Return the names of all reader groups, also of those with unreadable state."""

    @writes
    def change_group(self, name: str, event: Event) -> GroupFound:
        """Decide about an event of a group, and record the answer. Repeating is fine (RG3).

        Raises:
            FencedError: it comes from a reader that is not in the group any more (RG12).
            UsageError: it is refused, or there is no such group.
        """

    @writes
    def reset_group(
        self, name: str, token: str, start: GroupStart, checkpoint: str | None, claim: Claim | None = None
    ) -> GroupFound:
        """Reset a group to a checkpoint that it keeps, or at ``start`` (RG15); with one token, once.

        ``claim``: of the pipeline that reads by it from now on.

        Raises:
            FencedError: a newer generation of that pipeline has it.
            TruncatedError: what it would begin with is gone; nothing has changed.
            UsageError: there is no such group or checkpoint, or a stream is missing.
        """

    @reads
    def group_cuts(self, name: str, checkpoint: str | None) -> dict[str, dict[int, int]]:
        """Return, by stream, the cut of a completed checkpoint, or of the durable positions (RG10).

        Raises:
            UsageError: there is no such group or checkpoint. A stream that was deleted has no cut.
        """

    @reads
    def group_unread(self, name: str) -> dict[GroupSegment, int]:
        """Return the unread bytes of a group, of every segment that has any. It reads all their parts."""

    @writes
    def delete_group(self, name: str) -> bool:
        """Forget a group and what it holds; return whether there was one."""

    @writes
    def mend_groups(self) -> list[str]:
        """Repair the holds of reader groups, which may lack or be left over; return what was repaired."""

    # -- transactions (S12 to S18): decided by ``protocol.store.transactions`` ----------------------------------------

    @reads
    def begin(self, stream: str, name: str, owner: str, epoch: int) -> StreamInfo:
        """Return the stream, if a transaction of this name may be begun; record nothing.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: the name is taken, or the stream is sealed.
        """

    @writes
    def prepare(
        self, stream: StreamInfo, name: str, owner: str, epoch: int, chunks: Sequence[ChunkRecord], now_ms: int
    ) -> None:
        """Record a transaction as prepared, with the durable files that hold its events (S12).

        Raises:
            FencedError, CorruptionError: it is refused; nothing was recorded.
            UsageError: the stream is sealed or was deleted.
        """

    @writes
    def commit(
        self, names: Sequence[tuple[str, str]], owner: str, epoch: int, now_ms: int, times: Mapping[str, int]
    ) -> None:
        """Commit (stream, transaction) pairs: readers see all of them or nothing (S14).

        ``times``: of some streams, how far ``owner`` has come in event time with them (S90).

        Raises:
            FencedError: a newer epoch of ``owner`` exists; nothing was committed.
            CorruptionError: one is unknown or was aborted (S13); nothing was committed.
        """

    @writes
    def abort(self, stream: str, name: str, owner: str, epoch: int, now_ms: int) -> tuple[str, ...]:
        """Abort a transaction, prepared or unknown; return the files that nothing refers to any more.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """

    @writes
    def recover(self, stream: str, owner: str, epoch: int, keep: Collection[str], now_ms: int) -> Recovered:
        """Fence older epochs and abort what ``owner`` prepared, or has open, beside ``keep``, in every stream.

        Raises:
            FencedError: a newer epoch exists.
        """

    @writes
    def fence(self, owner: str, epoch: int) -> None:
        """Refuse every verb of older epochs of ``owner`` from now on (S18).

        Raises:
            FencedError: a newer epoch exists.
        """

    @writes
    def forget_outcomes(self, names: Sequence[str], owner: str, epoch: int) -> None:
        """Forget how these transactions of ``owner`` were decided.

        Raises:
            FencedError: a newer epoch exists.
        """

    @reads
    def transactions(self, owner: str | None, prefix: str, stream: str | None) -> list[TransactionInfo]:
        """Return recorded transactions by name."""

    # -- transactions of several processes: decided by ``protocol.store.transactions`` --------------------------

    @writes
    def begin_shared(self, stream: str, name: str, owner: str, epoch: int, lease_ms: int, now_ms: int) -> Shared:
        """Record an open transaction of a name that is new (TX1). Repeating is fine.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: there is no such stream, or it is sealed.
        """

    @reads
    def find_shared(self, stream: str, name: str) -> Shared:
        """Return a transaction, open or not.

        Raises:
            UsageError: there is no such stream, or it knows no such transaction (TX11).
        """

    @writes
    def join_shared(self, wanted: Shared, participant: str, token: str, now_ms: int) -> int:
        """Give a participant a new life, which ends its former one (TX4); return the number of its last write.

        Raises:
            FencedError: the transaction is not open, or a newer epoch of its owner exists.
            UsageError: it is not known any more, or its stream was deleted.
        """

    @writes
    def write_shared(
        self,
        wanted: Shared,
        participant: str,
        token: str,
        numbers: tuple[int, int],
        chunk: ChunkRecord | None,
        now_ms: int,
    ) -> None:
        """Record a durable chunk of the writes with these first and last numbers, hidden (TX3). Repeating is fine.

        ``chunk`` None: they have no events.

        Raises:
            FencedError: the participant lives elsewhere, the transaction takes no more events, or its owner was
                replaced. Unless it was tried before, nothing was recorded.
            UsageError: as above, or the numbers do not follow.
        """

    @writes
    def ping_shared(self, wanted: Shared, now_ms: int) -> None:
        """Renew the lease.

        Raises:
            FencedError, UsageError: see ``join_shared``; one that is prepared or committed has no lease, and is fine.
        """

    @writes
    def decide_shared(self, wanted: Shared, verdict: Verdict, now_ms: int) -> tuple[str, ...]:
        """Prepare, commit or abort; return the files that nothing refers to any more. Repeating is fine.

        Raises:
            FencedError: it has ended otherwise, or a newer epoch of its owner exists.
            UsageError: it is not known any more, or its stream was deleted.
        """

    @writes
    def expire_shared(self, stream: StreamInfo, now_ms: int) -> list[ExpiredTransaction]:
        """Look at the leases of the open transactions of a stream (TX8); return those that were aborted."""

    # -- owners (docs/spec/lives.md) -----------------------------------------------------------------------------------

    @reads
    def owner(self, owner: str, stream: str = "", of: str = "") -> Owner:
        """Return the life of the pipeline that is recorded for ``owner``.

        ``others``: who else begins with ``of`` and has written to ``stream``; none if there is no such stream.
        """

    @writes
    def own(self, owner: str, life: PipelineIdentity) -> Owner:
        """Let ``life`` be ``owner``, unless another one is (LV3); return which one is then."""

    @writes
    def forget_owner(self, owner: str) -> Owner:
        """Let the next life be ``owner`` (LV4); return which one was."""

    @reads
    def contents(self, stream: str, of: str, mine: Mine) -> Contents:
        """Return what is in ``stream`` by whom: see ``Pipelines.contents``."""

    @writes
    def start_over(self, reset: StreamReset, mine: Mine, now_ms: int) -> str | None:
        """Fence, empty the streams and let another life be their owner: see ``Pipelines.start_over``.

        Raises:
            FencedError: a newer epoch exists.
        """

    # -- files and checks ----------------------------------------------------------------------------------------------

    @reads
    def chunk_paths(self, below: str = "") -> set[str]:
        """Return the recorded chunk files below a directory. It looks at all that are recorded."""

    @reads
    def known_chunks(self, paths: Collection[str]) -> set[str]:
        """Return those of these files that are recorded chunks."""

    @writes
    def condemn(self, paths: Collection[str]) -> set[str]:
        """Return those of these files that are no recorded chunks: they cannot be recorded any more.

        ``append``, ``prepare`` and ``write_shared`` raise RemovedFileError for them, for ever. Repeating is fine.
        """

    @abstractmethod
    def audit(self) -> AbstractContextManager[Audit]:
        """Give a view of one moment. The only verb with a transaction that lasts as long as its caller wants."""
