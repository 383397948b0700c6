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
    """The part of a store that manages the schemas of streams."""

    def update_stream(
        self, name: str, *, schema: pa.Schema | None = None, columns: pa.Schema | None = None
    ) -> StreamInfo:  # S76
        """Change the columns of a stream: add new ones at the end, or give columns wider number types.

        No event is rewritten; existing events have null in new columns. Readers and writers that use an earlier schema
        continue with it. Repeating the call changes nothing.

        Args:
            name: the name of the stream.
            schema: all columns from now on, the existing ones first.
            columns: instead of ``schema``, only the columns that are added or get a wider type. The others stay.

        Raises:
            UsageError: there is no such stream, it is sealed, or it cannot have these columns. The message names the
                first such column, with its old and its new type.
        """
        wanted = columns if schema is None else schema
        if wanted is None or (schema is not None and columns is not None):
            raise UsageError(f"say how stream '{name}' is to be updated: with schema= or columns=, one of both")
        return self._catalogue.update_schema(name, wanted, is_whole=schema is not None)

    def schemas(self, name: str) -> tuple[pa.Schema, ...]:  # S76
        """Return all schemas of a stream by version; the last one is the current schema.

        Raises:
            UsageError: there is no such stream.
        """
        return self._catalogue.schemas(self._catalogue.find_stream(name))
