"""Tables with a log, as sinks see them: data files are written while records flow, and one commit shows a checkpoint.

The driver commits what all subtasks wrote for a checkpoint in one commit of the table, which carries the names of the
outputs. A later process that does not know how a commit ended finds them in the log (K7). With keys there are no files:
the changes are in the checkpoint, and the commit merges them. The table itself stores the fence of the newest
generation; a claim is a commit, so that commits computed before it conflict with it. Counterparts: ``data_files``
writes, ``table_changes`` keeps changes, ``delta_log`` and ``iceberg_log`` are tables. Source: docs/spec/lakes.md.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import msgspec
import pyarrow as pa

from headgate import fault_points
from headgate.codec.decodable import decodable
from headgate.connectors.base import Committer, Holding, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import Fence, FencedSink, decode_fence_life, in_order, owner_of, with_stored_life
from headgate.connectors.lakes.data_files import (
    FILE_BYTES,
    FileFormat,
    NamedOutput,
    TableOutput,
    TableWriter,
    decode_output,
    fits,
)
from headgate.connectors.lakes.table_changes import CHANGES_MARK, ChangeOutput, ChangeWriter, decode_changes, last_rows
from headgate.connectors.ledger_sink import PieceReader
from headgate.connectors.sql.records import check_change_keys, check_upsert_columns, upsert_columns
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import StorageError, UsageError, gone
from headgate.model.config import check_switches
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.model.pipeline_identity import Mine
from headgate.operators.changes import OP
from headgate.protocol.checkpoints.commit import CommitPermit


class CommitConflict(Exception):  # noqa: N818 - expected outcome, not a fault
    """Another commit came first, or it is not known whether this one took effect: look again."""


class LogTable(ABC):
    """A table as it was at one moment. A commit succeeds only if nothing that it looked at has changed since."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The table, for messages."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of the newest commit; a later one has a larger number."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of the table."""

    @property
    @abstractmethod
    def properties(self) -> dict[str, str]:
        """The properties of the table; some of them are the fences of sinks."""

    def fence(self, owner: str) -> Fence | None:
        """Return the fence that is stored for ``owner``."""
        text = self.properties.get(FENCE_PREFIX + owner)
        return None if text is None else decode_fence(owner, text)

    def fences(self) -> Iterable[Fence]:
        """Return the fences of all owners."""
        found = sorted(name for name in self.properties if name.startswith(FENCE_PREFIX))
        return [decode_fence(name.removeprefix(FENCE_PREFIX), self.properties[name]) for name in found]

    def lives(self, owner: str) -> Sequence[str]:
        """Return the ids of the lives that ``owner`` had here, "" for while it was forgotten.

        Output of a checkpoint that was taken over from another directory was committed by a former one.
        """
        text = self.properties.get(FENCE_PREFIX + owner)
        former = () if text is None else _decode(owner, text).former
        newest = "" if text is None else life_of(decode_fence(owner, text))
        return tuple(dict.fromkeys(("", *former, newest)))

    def fence_text(self, fence: Fence) -> str:
        """Return the text that the table is to store of ``fence``, with the lives that the owner had before."""
        former = [life for life in self.lives(fence.owner) if life and life != life_of(fence)]
        return msgspec.json.encode(_StoredFence(fence.generation, fence.life, former)).decode()

    @abstractmethod
    def new_columns(self, records: pa.Schema, *, evolve: bool) -> list[pa.Field]:
        """Return the columns that records have and the table does not.

        Raises:
            UsageError: the table does not take such records.
        """

    @abstractmethod
    def add_columns(self, columns: Sequence[pa.Field]) -> None:
        """Add columns.

        Raises:
            StorageError
        """

    @abstractmethod
    def claim(self, fence: Fence) -> None:
        """Store ``fence``.

        Raises:
            CommitConflict
        """

    @abstractmethod
    def committed(self, outputs: Sequence[NamedOutput], lives: Sequence[str]) -> Collection[str]:
        """Return the names of those that are committed. ``lives``: the ids of all that the sink had (``lives``)."""

    @abstractmethod
    def missing_files(self, paths: Sequence[str]) -> Sequence[str]:
        """Return those of ``paths`` that do not exist."""

    @abstractmethod
    def append(self, outputs: Sequence[TableOutput], life: str) -> None:
        """Commit all of ``outputs`` at once.

        Raises:
            CommitConflict
            UsageError: the table does not take them any more.
        """

    @abstractmethod
    def merge(self, outputs: Sequence[NamedOutput], life: str, changes: pa.Table, keys: Sequence[str]) -> None:
        """Replace and delete rows by key, and commit all of ``outputs`` at once.

        Args:
            outputs: what the commit shows.
            life: the id of the sink's life.
            changes: one row for each key, in the types of the table; the last column says which keys have no row any
                more.
            keys: the columns of the key.

        Raises:
            CommitConflict
            UsageError: the table does not take them any more.
        """

    @abstractmethod
    def refuse_merges(self) -> None:
        """Raise if rows of the table are not replaced by these sinks.

        Raises:
            UsageError
        """

    def refuse_torn_files(self) -> None:  # noqa: B027 - most have none
        """Raise if the table names files that are not whole: a merge may be durable only after it is visible.

        Raises:
            UsageError
        """

    def keys_without_empty_text(self, keys: Sequence[str]) -> Sequence[str]:
        """Return those of ``keys`` in which the table cannot have an empty text."""
        return ()

    def in_columns(self, changes: pa.Table) -> pa.Table:
        """Return changes in the types of the table, whose columns may be wider now than when they were prepared.

        Raises:
            UsageError: they were prepared for other columns.
        """
        columns = self.schema
        for at, one in enumerate(changes.schema):
            found = columns.field(one.name).type if one.name in columns.names else None
            if found is None or not fits(one.type, found):
                raise UsageError(
                    f"column '{one.name}' of {self.where} was changed while the pipeline ran: records were prepared "
                    f"as {one.type}; change it back"
                )
            if found != one.type:
                changes = changes.set_column(at, pa.field(one.name, found), changes.column(at).cast(found))
        return changes

    @abstractmethod
    def refresh(self) -> None:
        """Read the newest version."""


def life_of(fence: Fence) -> str:
    """Return the id of the life in a fence; "" for none."""
    life = decode_fence_life(fence)
    return "" if life is None else life.id


class _StoredFence(msgspec.Struct, frozen=True):
    generation: int
    life: str
    former: list[str] = []
    """Ids of lives: with each owner that was forgotten it is one more."""


def decode_fence(owner: str, text: str) -> Fence:
    """Return a fence that a table has stored.

    Raises:
        UsageError: the text is none.
    """
    found = _decode(owner, text)
    return Fence(owner, found.generation, found.life)


def _decode(owner: str, text: str) -> _StoredFence:
    try:
        return msgspec.json.decode(text, type=decodable(_StoredFence))
    except msgspec.DecodeError as error:
        raise UsageError(f"the property {FENCE_PREFIX}{owner} of a table has another form: {error}") from error


FENCE_PREFIX = "headgate.owner."
"""Properties of a table that have fences begin so; the owner follows."""


BUFFER_BYTES = 32 << 20
"""Arrow bytes that a subtask holds before it writes them to files."""

TRIES_MAX = 20
"""So often in a row another writer may commit first; then the caller tries again."""


@dataclass(frozen=True, kw_only=True)
class TableSink(FencedSink):
    """Base class of sinks for tables with a log."""

    upsert: str | Sequence[str] = ()
    create: bool = False
    partition_by: str | Sequence[str] = ()
    evolve: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    file_bytes: int = FILE_BYTES
    buffer_bytes: int = BUFFER_BYTES
    records: pa.Schema | None = field(default=None, repr=False, compare=False)
    """Set by Headgate: the columns of a table that is created."""
    takes_changes: bool = field(default=False, repr=False)
    """Set by Headgate: whether the stream has changes that are merged."""
    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT

    @abstractmethod
    def load(self) -> LogTable | None:
        """Return the table as it is now; None: there is none.

        Raises:
            StorageError, UsageError
        """

    @abstractmethod
    def create_table(self) -> None:
        """Create the table with ``created_columns``, unless another process has done so. Called when there is none.

        Raises:
            UsageError: it is not to be created, or its columns are not known.
        """

    @abstractmethod
    def columns_of(self, records: pa.Schema) -> pa.Schema:
        """Return the columns of a table that takes ``records``.

        Raises:
            UsageError: there are none of their types.
        """

    @abstractmethod
    def check_partitions(self, columns: pa.Schema) -> None:
        """Refuse partitions that a table with these columns cannot have.

        Raises:
            UsageError
        """

    @abstractmethod
    def file_format(self) -> FileFormat:
        """Return what writes data files of the table."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The table, for messages."""

    def check_options(self) -> None:
        """Check the options that all these sinks have.

        Raises:
            UsageError: one has no such value.
        """
        name = type(self).__name__
        check_switches(f"{name}: ", create=self.create, evolve=self.evolve)
        columns = (self.partition_by,) if isinstance(self.partition_by, str) else tuple(self.partition_by)
        object.__setattr__(self, "partition_by", columns)
        object.__setattr__(self, "upsert", upsert_columns(name, self.upsert))
        for option, size_bytes in (("buffer_bytes", self.buffer_bytes), ("file_bytes", self.file_bytes)):
            if size_bytes < 1:
                raise UsageError(f"{name}({option}={size_bytes!r}) must be at least 1")
        if columns and not self.create:
            raise UsageError(f"{name}(partition_by=) is for a table that is created: give create=True, or leave it out")

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key; none: records are appended."""
        assert isinstance(self.upsert, tuple)
        return self.upsert

    def for_changes(self, keys: tuple[str, ...] | None, *, retractions: bool) -> Self:
        """See ``Sink``: without ``upsert`` the changes are appended as they are."""
        if keys is None or not self.keys:
            return self
        check_change_keys(type(self).__name__, self.keys, keys)
        return replace(self, takes_changes=True)

    def _rows(self, records: pa.Schema) -> pa.Schema:
        """Return the columns of the table that ``records`` fill."""
        return pa.schema([one for one in records if one.name != OP or not self.takes_changes])

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink``: also that the table is there and takes such records."""
        check_upsert_columns(type(self).__name__, self.keys, schema)
        schema = self._rows(schema)
        columns = self.columns_of(schema)
        if not columns.names:
            raise UsageError(f"{type(self).__name__} cannot write records without columns")
        self.check_partitions(columns)
        object.__setattr__(self, "records", schema)
        table = self.load()
        if table is not None:
            table.new_columns(schema, evolve=self.evolve)
            if self.keys:
                table.refuse_merges()
        elif not self.create:
            raise self._missing()

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: create the table when it is missing, and add columns."""
        schema = self._rows(schema)
        object.__setattr__(self, "records", schema)
        if self.load() is None:
            self.create_table()
        table = self.load()
        if table is None:
            raise StorageError("create", self.where, "it is not there afterwards", is_transient=True)
        missing = table.new_columns(schema, evolve=self.evolve)
        if missing:
            table.add_columns(missing)
        if self.keys:
            table.refuse_merges()

    def created_columns(self) -> pa.Schema:
        """Return the columns of a table that is to be created.

        Raises:
            UsageError: none is to be created, or its columns are not known.
        """
        if not self.create or self.records is None:
            raise self._missing()
        return self.columns_of(self.records)

    def _missing(self) -> UsageError:
        return UsageError(f"there is no {self.where}; give create=True to create it, or correct its name or location")

    def open(self, context: SinkContext) -> SinkWriter:
        if self.keys:
            table = self.found()
            return ChangeWriter(
                context,
                table.schema,
                table.version,
                self.keys,
                filled=table.keys_without_empty_text(self.keys),
                has_op=self.takes_changes,
                piece_bytes=self.buffer_bytes,
            )
        return TableWriter(self.file_format(), context, self.buffer_bytes, self.file_bytes, self.environment)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        return TableCommitter(self, Fence(owner_of(pipeline, node), int(generation)))

    def found(self) -> LogTable:
        """Return the table.

        Raises:
            UsageError: there is none.
            StorageError
        """
        table = self.load()
        if table is None:
            raise UsageError(f"{self.where} does not exist any more; restore it, or start the pipeline over")
        return table

    def claim(self, fence: Fence) -> None:
        for _ in range(TRIES_MAX):
            table = self.load()
            if table is None:
                self.create_table()
                continue
            known = table.fence(fence.owner)
            fence.refuse_if_replaced_by(known)
            # an earlier call the answer of which was lost
            if known == fence:
                return
            try:
                table.claim(fence)
            except CommitConflict:
                continue
            return
        raise StorageError("claim", self.where, "others change it all the time")

    def claimed(self, owner: str) -> Fence | None:
        """See ``FencedSink``. A table that is missing has no owner."""
        table = self.load()
        return None if table is None else table.fence(owner)

    def all_claimed(self) -> Iterable[Fence]:
        table = self.load()
        return () if table is None else table.fences()

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``Sink``. Rows cannot be told from those of others once files were compacted."""
        known = self.owner(pipeline, node)
        if known.is_unknown or known.is_forgotten:
            return Holding("", self.where)
        problem = f"{self.where} keeps the rows that were written to it: delete the table, or its rows, and then run "
        return Holding("all its rows", self.where, problem=problem + self.how_to_forget(pipeline, node))


class TableCommitter(Committer):
    """Commits prepared output in the driver."""

    knows_outcomes = True

    def __init__(self, sink: TableSink, fence: Fence) -> None:
        """Use ``TableSink.open_committer``."""
        self._sink, self._fence = sink, fence
        self._table: LogTable | None = None
        self._read: PieceReader = _read_nothing
        self._known: dict[str, CheckpointId] = {}
        """Names that are known to be committed."""

    def read_pieces_with(self, read: Callable[[SnapshotPart], memoryview]) -> None:
        self._read = read

    def recover(self, keep: Sequence[Committable]) -> None:
        """See ``Committer``. Files that are not kept stay: vacuum removes what the log does not name.

        Torn files are looked for before the claim, which would hide what came last.
        """
        table = self._sink.load() if self._sink.keys else None
        if table is not None:
            table.refuse_torn_files()
        self._fence = with_stored_life(self._sink, self._fence)
        self._sink.claim(self._fence)
        self._table = None

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """See ``Committer``: one commit of the table shows all that is new.

        Output that a former program wrote otherwise, appended or with other keys or columns, has one of its own before.
        """
        ordered = in_order(permit, committables)
        outputs = [self._decode(committable) for committable in ordered]
        todo = [output for output in outputs if output.name not in self._known]
        for _, alike in itertools.groupby(todo, key=_form):
            self._commit(list(alike))
        self._known |= {output.name: one.checkpoint for output, one in zip(outputs, ordered, strict=True)}
        # oldest first; what is left out is looked up in the log
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _commit(self, outputs: Sequence[NamedOutput]) -> None:
        for _ in range(TRIES_MAX):
            table = self._newest()
            life = self._checked_life(table)
            # in each round: an earlier call, or the try before, may have committed although its answer was lost
            committed = table.committed(outputs, self._lives(table, outputs))
            todo = [output for output in outputs if output.name not in committed]
            if not todo:
                return
            missing = _missing(table, todo)
            if missing:
                raise gone(UsageError(f"output of {self._fence.owner} cannot be committed: {missing}"))
            fault_points.reach("in-publish")
            try:
                _write(table, todo, life)
            except CommitConflict:
                self._table = None
                continue
            except StorageError:
                # whether it was committed is not known: the next call reads the log, and finds it there or not
                self._table = None
                raise
            fault_points.reach("after-publish")
            return
        raise StorageError("commit to", self._sink.where, "others commit to it all the time", is_transient=True)

    def _newest(self) -> LogTable:
        if self._table is None:
            self._table = self._sink.found()
        else:
            table, self._table = self._table, None  # of a table that cannot be read nothing is kept
            table.refresh()
            self._table = table
        return self._table

    def _checked_life(self, table: LogTable) -> str:
        """Return the life of the sink that the table has stored, which is this one's.

        Raises:
            FencedError: a newer generation has claimed the table.
        """
        known = table.fence(self._fence.owner)
        if known is None:
            raise UsageError(
                f"{self._sink.where} does not know sink '{self._fence.owner}' any more: it was replaced or restored "
                "while the pipeline ran; restart the pipeline to claim it again"
            )
        self._fence.refuse_if_replaced_by(known)
        return life_of(known)

    def _lives(self, table: LogTable, outputs: Sequence[NamedOutput]) -> Sequence[str]:
        """Return the lives that may have committed ``outputs``: those of this generation, its own, unless forgotten."""
        known = table.fence(self._fence.owner)
        own = "" if known is None else life_of(known)
        if own and all(output.parts.generation == self._fence.generation for output in outputs):
            return (own,)
        return table.lives(self._fence.owner)

    def _decode(self, committable: Committable) -> NamedOutput:
        if committable.payload.startswith(CHANGES_MARK):
            return decode_changes(committable, self._read)
        return decode_output(committable)

    def denial(self, committable: Committable) -> str:
        output = self._decode(committable)
        table = self._sink.found()
        if output.name in table.committed([output], self._lives(table, [output])):
            return ""
        return _missing(table, [output])

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        """See ``Committer``: names in the log go with it."""
        self._known = {name: at for name, at in self._known.items() if at >= before}


KNOWN_MAX = 100_000
"""Names that a committer remembers, so that it need not read the log."""


def _form(output: NamedOutput) -> tuple[object, ...]:
    """Return what outputs of one commit have in common."""
    return (output.form.keys, output.form.columns, output.form.has_op) if isinstance(output, ChangeOutput) else ()


def _write(table: LogTable, outputs: Sequence[NamedOutput], life: str) -> None:
    """Commit outputs of one form."""
    changes = [output for output in outputs if isinstance(output, ChangeOutput)]
    if changes:
        table.merge(changes, life, last_rows(changes), changes[0].form.keys)
    else:
        table.append([output for output in outputs if isinstance(output, TableOutput)], life)


def _missing(table: LogTable, outputs: Sequence[NamedOutput]) -> str:
    """Return why outputs cannot be committed, as a clause; "" if they can. Changes are in the checkpoint.

    Raises:
        StorageError
    """
    paths = [file.path for output in outputs if isinstance(output, TableOutput) for file in output.files]
    missing = table.missing_files(paths)
    if not missing:
        return ""
    return (
        f"data file {missing[0]} is gone ({len(missing)} in all), which was written and not yet committed; a vacuum "
        "with a retention shorter than the pipeline was down removes such files"
    )


def _read_nothing(piece: SnapshotPart) -> memoryview:
    raise AssertionError(f"it is not known how {piece.path} is read")


def refuse_missing_columns(sink: str, option: str, columns: Sequence[str], schema: pa.Schema) -> None:
    """Refuse columns that records do not have.

    Raises:
        UsageError
    """
    for name in columns:
        if name not in schema.names:
            raise UsageError(f"{sink}({option}=) names column '{name}'; the records have {', '.join(schema.names)}")
