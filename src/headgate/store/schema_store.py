"""What columns streams have: the part of a store about schemas and how they change.

Counterpart: ``store.Store``, which is all of this too; ``catalogue.schemas``; ``protocol.store.columns`` decides.
Source: S76 to S78 of docs/spec/stream-store.md.
"""

from __future__ import annotations

import pyarrow as pa

from headgate.errors import UsageError
from headgate.store.cut_store import CutStore
from headgate.store.streams import StreamInfo


class SchemaStore(CutStore):
    """The schemas of its streams."""

    def update_stream(
        self, name: str, *, schema: pa.Schema | None = None, columns: pa.Schema | None = None
    ) -> StreamInfo:
        """Give a stream other columns: new ones at the end, and numbers that become wider ones (S76).

        No event is written anew: those that are there have null in new columns. Whoever reads or writes in the
        schema of before goes on with it. Repeating changes nothing.

        Args:
            name: the stream.
            schema: all columns from now on, those that it has first.
            columns: instead, only those that are added, or get a wider type; the others stay.

        Raises:
            UsageError: there is no such stream, it is sealed, or it cannot have these columns; names the first of
                them, with its old and new type.
        """
        wanted = columns if schema is None else schema
        if wanted is None or (schema is not None and columns is not None):
            raise UsageError(f"say how stream '{name}' is to be updated: with schema= or columns=, one of both")
        return self._catalogue.update_schema(name, wanted, is_whole=schema is not None)

    def schemas(self, name: str) -> tuple[pa.Schema, ...]:
        """Return the schemas that a stream has had, by version; the last one is that of now (S76).

        Raises:
            UsageError: there is no such stream.
        """
        return self._catalogue.schemas(self._catalogue.find_stream(name))
