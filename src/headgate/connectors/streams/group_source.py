"""A stream of the store, read by a reader group: the group deals the segments out, and its markers set the barriers.

Counterparts: ``group_hook`` in the driver, ``group_reading`` in the subtasks; ``source`` reads by positions instead.
Source: docs/spec/group-source.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headgate.connectors.base import SourceContext
from headgate.connectors.hooks import CoordinatorHook
from headgate.connectors.offers import HoldContext
from headgate.connectors.streams.group_hook import GroupCheckpointHook
from headgate.connectors.streams.group_reading import GroupSourceReader
from headgate.connectors.streams.source import EARLIEST, LookingSource, StreamSource
from headgate.errors import UsageError
from headgate.store.cuts import StreamCut
from headgate.store.store import Store
from headgate.store.streams import is_usable_name


@dataclass(frozen=True, slots=True)
class GroupSource:
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
        """See ``HoldingSource``."""
        return True

    def schema(self) -> pa.Schema:
        """See ``StreamSource.schema``."""
        return self._plain().schema()

    def identity(self) -> str:  # GS15
        """See ``StreamSource.identity``. Positions alone do not say where a group goes on."""
        return f"{self._plain().identity()}, by a reader group"

    def how_to_end(self) -> str | None:
        """See ``EndlessSource``."""
        return None if self._plain().how_to_end() is None else f"seal stream '{self.stream}' first"

    def open(self, context: SourceContext) -> GroupSourceReader:
        """Return a reader of what the group gives to this subtask."""
        return GroupSourceReader(Store.shared(self.store), self.stream, self.group, context)

    def coordinator_hook(self) -> CoordinatorHook:
        """See ``HookedSource``."""
        return GroupCheckpointHook(self.stream, self.group, str(self.store), str(self.start))

    def without_hook(self) -> StreamSource:
        """See ``HookedSource``: whoever only looks leaves the group as it is."""
        return LookingSource(self.stream, self.store, self.start, holds=False)

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:  # GS16
        """See ``HoldingSource``: what older checkpoints need, which the group does not know any more."""
        self._plain().hold(context, needed)

    def _plain(self) -> StreamSource:
        return StreamSource(self.stream, self.store, self.start)
