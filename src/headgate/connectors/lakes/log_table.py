"""A table with a log, as sinks see it: what it stores of them, and how commits are made and found.

The table itself stores the fence of the newest generation; a claim is a commit, so that commits computed before it
conflict with it. Counterparts: ``table_sink``, which calls it; ``delta_log`` and ``iceberg_log``, which are one.
Source: docs/spec/lakes.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

import msgspec
import pyarrow as pa

from headgate.connectors.fenced_sink import Fence, decode_fence_life
from headgate.connectors.lakes.data_files import NamedOutput, TableOutput
from headgate.connectors.lakes.types import fits
from headgate.errors import UsageError


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
        return msgspec.json.decode(text, type=_StoredFence)
    except msgspec.DecodeError as error:
        raise UsageError(f"the property {FENCE_PREFIX}{owner} of a table has another form: {error}") from error


FENCE_PREFIX = "headgate.owner."
"""Properties of a table that have fences begin so; the owner follows."""
