"""Publishing on completion: a ready set becomes pending with a snapshot, and public when a checkpoint covers it (HL15).

For what has no transaction to prepare: files to be shown, messages to be acknowledged, mails to be sent. Never
publishes anything that a restart could take back.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headgate.operators.checkpointed.functions import (
    CheckpointedFunction,
    CheckpointListener,
    RestoreContext,
    SnapshotContext,
)
from headgate.operators.checkpointed.lists import OperatorList
from headgate.operators.schemas import as_schema

LIST = "pending"
"""Name of the list of operator state that holds what is not known to be public."""


class PublishOnCheckpoint(CheckpointedFunction, CheckpointListener):
    """Publishes items once the records that they were made of are in a completed checkpoint.

    Derive from it, call ``ready`` for each item while processing, and write ``publish``. After a failure items are
    published again, so ``publish`` must not mind: name files, or number messages, by what is in the item. Then each is
    published exactly once in effect, and none that a restart takes back.

    Who overrides ``restore`` or ``snapshot`` calls this class's, too.

    Attributes:
        item_type: Arrow, Polars or Python type of the items.
    """

    item_type: Any = str

    _ready: list[Any]
    _pending: dict[int, list[Any]]
    _kept: OperatorList

    def ready(self, item: Any) -> None:
        """Publish ``item`` when the next checkpoint, or a later one, is completed. What it names must be durable then.

        Files that grow on are finished in ``snapshot``, before this class's is called.
        """
        self._ready.append(item)

    def publish(self, items: list[Any]) -> None:
        """Make ``items`` public, oldest first; perhaps not for the first time."""
        raise NotImplementedError

    def restore(self, context: RestoreContext) -> None:
        """Publish what the restored checkpoint held: it is completed, and nobody knows what was published."""
        pair = pa.struct(
            {"checkpoint": pa.int64(), "item": as_schema(context.operator, {"item": self.item_type})[0].type}
        )
        self._kept = context.list(LIST, pair)
        self._ready, self._pending = [], {}
        items = [entry["item"] for entry in self._kept.get()]
        if items:
            self.publish(items)
        self._kept.clear()

    def snapshot(self, context: SnapshotContext) -> None:
        """What is ready becomes pending; all that is pending is in the checkpoint."""
        if self._ready:
            self._pending[context.checkpoint_id] = self._ready
            self._ready = []
        self._kept.put(
            {"checkpoint": checkpoint, "item": item} for checkpoint, items in self._pending.items() for item in items
        )

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Publish what is pending up to ``checkpoint_id``, the oldest first, then forget it (C16)."""
        covered = [checkpoint for checkpoint in self._pending if checkpoint <= checkpoint_id]
        items = [item for checkpoint in covered for item in self._pending[checkpoint]]
        if items:
            self.publish(items)
        for checkpoint in covered:
            del self._pending[checkpoint]
