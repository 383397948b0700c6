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
    """Publishes items once a completed checkpoint covers the records from which they were made.

    Derive from this class, call ``ready`` for each item while processing, and implement ``publish``. After a failure an
    item may be published again, so ``publish`` must tolerate repetition: for example, name files or number messages by
    the content of the item. Then each item is published exactly once in effect, and no item is published that a restart
    takes back.

    If you override ``restore`` or ``snapshot``, call the method of this class as well.

    Attributes:
        item_type: the Arrow, Polars or Python type of the items.
    """

    item_type: Any = str

    _ready: list[Any]
    _pending: dict[int, list[Any]]
    _kept: OperatorList

    def ready(self, item: Any) -> None:
        """Publish ``item`` when the next checkpoint or a later one completes.

        Whatever the item refers to must be durable by then. Finish a file that is still growing in ``snapshot``, before
        you call the ``snapshot`` of this class.
        """
        self._ready.append(item)

    def publish(self, items: list[Any]) -> None:
        """Make ``items`` public, oldest first. Some of them may have been published before."""
        raise NotImplementedError

    def restore(self, context: RestoreContext) -> None:
        """Publish all pending items of the restored checkpoint, because it is unknown which were published before."""
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
        """Make the ready items pending. The checkpoint contains all pending items."""
        if self._ready:
            self._pending[context.checkpoint_id] = self._ready
            self._ready = []
        self._kept.put(
            {"checkpoint": checkpoint, "item": item} for checkpoint, items in self._pending.items() for item in items
        )

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:  # C16
        """Publish the items that are pending up to ``checkpoint_id``, oldest first, and then forget them."""
        covered = [checkpoint for checkpoint in self._pending if checkpoint <= checkpoint_id]
        items = [item for checkpoint in covered for item in self._pending[checkpoint]]
        if items:
            self.publish(items)
        for checkpoint in covered:
            del self._pending[checkpoint]
