"""Sinks and a source as users write them, for the database and the feed of the machine room.

Counterparts: ``machine.database``, ``machine.feed``. What is here is what the guide tells users to write, and no more:
names, what is pending, recovery and another parallelism are the base classes'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader
from headgate.sim.machine.database import Database, Session, Unreachable
from headgate.sim.machine.external_log import Feed
from headgate.sim.product.records import Row
from headgate.sim.product.source import SCHEMA, Pace, PacedReader, positions_of


class PreparingSink(hg.TwoPhaseSink[Session]):
    """Prepares its transactions in the database."""

    transient_errors = (Unreachable,)

    def __init__(self, database: Database, *, at_once: bool) -> None:
        """``at_once``: what is committed together becomes visible in one step, else in order."""
        self._database = database
        self.transaction_timeout = None if database.keeps_ms is None else f"{database.keeps_ms}ms"
        self._at_once = at_once

    def begin(self, name: str, schema: pa.Schema) -> Session:
        """See ``TwoPhaseSink``."""
        return self._database.begin(name)

    def write(self, transaction: Session, batch: pa.RecordBatch) -> None:
        """See ``TwoPhaseSink``."""
        self._database.write(transaction, batch.to_pylist())

    def prepare(self, transaction: Session, name: str, fence: hg.Fence) -> None:
        """See ``TwoPhaseSink``."""
        self._database.prepare(transaction, fence)

    def claim(self, fence: hg.Fence) -> None:
        """See ``TwoPhaseSink``."""
        self._database.claim(fence)

    def claimed(self, owner: str) -> hg.Fence | None:
        """See ``TwoPhaseSink``."""
        return self._database.claimed(owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        """See ``TwoPhaseSink``."""
        return self._database.all_claimed()

    def prepared(self, owner: str) -> Iterable[str]:
        """See ``TwoPhaseSink``: ours, and that of others."""
        return self._database.names()

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        """See ``TwoPhaseSink``."""
        for together in [names] if self._at_once else [[name] for name in names]:
            self._database.commit(together, fence)

    def abort(self, name: str, fence: hg.Fence) -> None:
        """See ``TwoPhaseSink``."""
        self._database.abort(name, fence)

    def committed(self, owner: str) -> Iterable[str]:
        """See ``TwoPhaseSink``: ours, and that of others."""
        return self._database.committed()

    def forget(self, names: Sequence[str]) -> None:
        """See ``TwoPhaseSink``."""
        self._database.forget_committed(names)

    def close(self, transaction: Session) -> None:
        """See ``TwoPhaseSink``."""
        self._database.close(transaction)


class PublishingSink(hg.LedgerSink):
    """Publishes what a checkpoint has kept, with its name."""

    transient_errors = (Unreachable,)

    def __init__(self, database: Database, piece_bytes: int | None = None) -> None:
        """``piece_bytes``: of what goes in pieces; None: the usual."""
        self._database = database
        if piece_bytes is not None:
            self.piece_bytes = piece_bytes

    def claim(self, fence: hg.Fence) -> None:
        """See ``LedgerSink``."""
        self._database.claim(fence)

    def claimed(self, owner: str) -> hg.Fence | None:
        """See ``LedgerSink``."""
        return self._database.claimed(owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        """See ``LedgerSink``."""
        return self._database.all_claimed()

    def publish(self, outputs: Sequence[hg.LedgerOutput], fence: hg.Fence) -> None:
        """See ``LedgerSink``: each output in a transaction of its own, which its name allows."""
        self._database.claim(fence)
        done = self._database.published([output.name for output in outputs])
        for output in outputs:
            if output.name not in done:
                rows = [row for batch in output for row in batch.to_pylist()]
                self._database.publish(output.name, rows, fence)

    def forget(self, owner: str, before: int) -> None:
        """See ``LedgerSink``."""
        mine = f"{owner}-"
        self._database.forget(lambda name: name.startswith(mine) and hg.output_checkpoint(name) < before)


class FeedSource(Source):
    """Reads the feed. What the driver lists is what is read."""

    def __init__(
        self, feed: Feed[Row], names: Sequence[str], pace: Pace, now_ms: Callable[[], int], *, acknowledges: bool
    ) -> None:
        """``acknowledges``: tell the feed what will never be asked for again."""
        self._feed, self._names, self._pace, self._now_ms = feed, names, pace, now_ms
        self._acknowledges = acknowledges

    def schema(self) -> pa.Schema:
        """See ``Source``."""
        return SCHEMA

    def identity(self) -> str:
        """See ``Source``."""
        return "parts of the feed by name"

    def open(self, context: SourceContext) -> SourceReader:
        """See ``Source``."""
        positions = positions_of(self._names, context)
        kind = _AcknowledgingReader if self._acknowledges else _FeedReader
        return kind(self._feed, positions, self._pace, self._now_ms)


class _FeedReader(PacedReader):
    """Reads its parts of the feed."""

    def __init__(self, feed: Feed[Row], positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        super().__init__(positions, pace, now_ms)
        self._feed = feed

    def poll(self) -> SourceBatch | None:
        names = self.splits()
        if self.wakeup_ms() or not names:
            return None
        name = self._take_turn(names)
        rows, is_end = self._feed.read(name, self._at[name], self._pace.batch_rows)
        if not rows and not is_end:
            return None
        self._at[name] += len(rows)
        if is_end:
            self._ended.add(name)
        return SourceBatch(name, pa.RecordBatch.from_pylist([dict(row) for row in rows], SCHEMA), None, is_end)


class _AcknowledgingReader(_FeedReader, hg.CheckpointedFunction, hg.CheckpointListener):
    """Has the feed forget what completed checkpoints have after them."""

    def __init__(self, feed: Feed[Row], positions: dict[str, int], pace: Pace, now_ms: Callable[[], int]) -> None:
        super().__init__(feed, positions, pace, now_ms)
        self._behind: dict[int, dict[str, int]] = {}

    def __deepcopy__(self, memo: object) -> _AcknowledgingReader:
        return self

    def snapshot(self, context: hg.SnapshotContext) -> None:
        """See ``CheckpointedFunction``: positions have just been taken."""
        self._behind[context.checkpoint_id] = dict(self._at)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """See ``CheckpointListener``; what fails is done with the next one."""
        covered = [one for one in self._behind if one <= checkpoint_id]
        positions = [self._behind.pop(one) for one in covered]
        for name, at in (positions[-1] if positions else {}).items():
            try:
                self._feed.forget(name, at)
            except OSError:
                continue
