"""The driver's half of a source that reads by a reader group: it asks the group for a checkpoint with every checkpoint.

Counterparts: ``group_source``, whose readers meet the markers; ``store.claimed_groups``. Source: GS5 and GS13 to GS15
of docs/spec/group-source.md. What a pipeline goes back to is in its manifest, never only in the group.
"""

from __future__ import annotations

import json
from contextlib import suppress

from headgate.connectors.hooks import ASK_AGAIN, AskAgain, CoordinatorHook, HookContext
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.operators.checkpointed.functions import CheckpointListener
from headgate.protocol.store.group_claims import Claim
from headgate.store.catalogue.values import GroupStart
from headgate.store.claimed_groups import ClaimedGroup
from headgate.store.cuts import StreamCut
from headgate.store.reader_groups import group_start
from headgate.store.store import Store

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
        """See ``CoordinatorHook``."""
        self._claim = Claim(f"{context.pipeline}/{context.hook}", context.life, context.home, context.generation)
        self._asked.clear()

    def trigger(self, checkpoint_id: int) -> bytes | AskAgain:
        """Return the cut of the group's checkpoint, when all readers have met its marker."""
        group = self._group
        if checkpoint_id not in self._asked:
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
        """Forget the group's checkpoint, so that nobody is kept waiting by it (GS14)."""
        self._forget(checkpoint_id, checkpoint_id)

    def _forget(self, first: int, last: int) -> None:
        self._asked = {x for x in self._asked if not first <= x <= last}
        with suppress(StorageError, FencedError, UsageError):  # UsageError: somebody has deleted the group
            self._group.forget(first, last)

    @property
    def _source(self) -> str:
        return self._claim.source.rpartition("/")[2]

    @property
    def _group(self) -> ClaimedGroup:
        return Store.shared(self._root).claimed_group(self._name, self._stream, self._claim)


def start_of_group(start: str) -> GroupStart:
    """Return where a group begins whose source says ``start``: a word, or the text of a cut."""
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
