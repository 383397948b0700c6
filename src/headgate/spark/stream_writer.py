"""Writes DataFrames and streaming queries to a stream of the store, exactly once.

Counterparts: ``spark.stream_format``, which makes it; ``store.transactions``. Source: SP9, SP10 of
docs/spec/spark-streams.md. Each task prepares a transaction; Spark's driver commits those of a write, or of a
micro-batch, in one step of the catalogue. Until then none of it is visible.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headgate.codec.arrow import unzoned_schema
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.operators.schemas import canonical_schema, carried
from headgate.protocol.store.micro_batches import Turn, turn_of
from headgate.protocol.store.transactions import Status
from headgate.spark.dataframes import schema_for_spark
from headgate.spark.stream_options import OWNERS, Options, StreamLocation
from headgate.store.store import Store
from headgate.store.streams import check_takes, difference_by_name, newest_matching

SEGMENTS = 4
"""Of a stream that is created, as for a ``StreamSink``."""

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Properties that Spark gives to the tasks of a micro-batch. The id stays the same when a query is started again."""

TRIES = 3
"""Of a commit with an unknown outcome."""

SWEEP_EVERY = 1_000
"""Micro-batches. Between two sweeps, files stay of tasks that died before they had prepared anything."""

Messages = Sequence["WriterCommitMessage | None"]


@dataclass(frozen=True)
class Prepared(WriterCommitMessage):  # type: ignore[misc]
    """What one task has prepared; ``name`` is empty if it had no rows."""

    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """The stream that is written to.

    Attributes:
        place: where it is.
        schema: its columns.
    """

    place: StreamLocation
    schema: pa.Schema

    @classmethod
    def of(cls, options: Options, schema: pa.Schema) -> StreamTarget:
        """Find the stream, or create it with these columns.

        Raises:
            UsageError: the columns do not fit, or it is sealed.
        """
        place = StreamLocation(options.root, options.stream)
        key, segments = options.text("routing_key"), options.number("segments") or SEGMENTS
        try:
            info = place.find()
        except UsageError:  # there is none yet; what else may be wrong, creating it finds as well
            info = place.store.create_stream(
                options.stream, schema, segments=segments, routing_key=key, if_not_exists=True
            )
        check_takes(info, key)
        return cls(place, _fitting(place.store.schemas(info.name), info.name, schema))

    def prepare(self, batches: Iterator[pa.RecordBatch], owner: str, epoch: int, name: str) -> Prepared:
        """Write the rows of one task, durable and invisible.

        Raises:
            HeadgateError: it cannot; nothing is left that anybody could commit.
        """
        transaction = None
        try:
            for batch in batches:
                if batch.num_rows:
                    # begun with the first row: a task without rows leaves nothing to be decided
                    transaction = transaction or self.place.store.transactions.begin(
                        self.place.stream, owner=owner, epoch=epoch, name=name
                    )
                    transaction.write(self._fitted(batch))
            if transaction is None:
                return Prepared(owner, "")
            transaction.prepare()
        except BaseException:
            if transaction is not None:
                # what cannot be aborted now, the next commit of the owner aborts
                with suppress(HeadgateError):
                    transaction.abort()
            raise
        return Prepared(owner, name)

    def commit(
        self,
        owner: str,
        names: Sequence[str],
        is_done: Callable[[Store], bool] = lambda _: False,
        *,
        sweeps: bool = True,
    ) -> None:
        """Fence other writers of ``owner``, abort what they have prepared, and commit ``names`` in one step.

        Args:
            owner: of the transactions.
            names: of the transactions.
            is_done: whether the same was committed already, asked after fencing.
            sweeps: whether files go, too, that tasks have left which died before they had prepared anything. It looks
                at all files of the owner.

        Raises:
            FencedError, CorruptionError: another driver does the same.
        """
        store, stream = self.place.store, self.place.stream
        # first: what other drivers, and tasks that are left, prepare from now on is refused
        epoch = store.pipelines.owner(owner).generation + 1
        store.transactions.fence(owner, epoch)
        # asked once others are fenced: none of them can commit it between the answer and the commit
        keep = () if is_done(store) else names
        for x in store.list_transactions(owner=owner):
            if x.status is Status.PREPARED and x.name not in keep:
                store.transactions.abort(x.stream, x.name, owner=owner, epoch=epoch)
        # the one step that makes all rows visible
        if keep:
            _commit(store, [(stream, name) for name in keep], owner, epoch)
            store.look_after(stream)
        if sweeps:
            with suppress(HeadgateError):  # what is committed must not seem to have failed: it would be written again
                store.transactions.recover(stream, owner=owner, epoch=epoch)

    def forget(self, owner: str, is_old: Callable[[str], bool] = lambda _: True) -> None:
        """Forget the outcomes of transactions that are not needed any more; ``is_old`` selects them by name."""
        store = self.place.store
        with suppress(HeadgateError):  # they are a few rows, and what is committed must not seem to have failed
            decided = [x.name for x in store.list_transactions(owner=owner) if x.status.is_terminal]
            store.transactions.forget_outcomes(
                [name for name in decided if is_old(name)], owner=owner, epoch=store.pipelines.owner(owner).generation
            )

    def abort(self, messages: Messages) -> None:
        """Abort what tasks have prepared. What cannot be aborted now, the next commit of the owner aborts."""
        for message in messages:
            if isinstance(message, Prepared) and message.name:
                with suppress(HeadgateError):
                    store = self.place.store
                    epoch = store.pipelines.owner(message.owner).generation
                    store.transactions.abort(self.place.stream, message.name, owner=message.owner, epoch=epoch)

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return ``batch`` with the stream's columns, by name, in its types."""
        return carried(batch, self.schema, f"stream '{self.place.stream}'")


def _commit(store: Store, names: Sequence[tuple[str, str]], owner: str, epoch: int) -> None:
    """Commit, and repeat a commit with an unknown outcome: Spark asks for a write only once."""
    for _ in range(TRIES - 1):
        with suppress(StorageError):
            return store.commit_transactions(names, owner=owner, epoch=epoch)
    return store.commit_transactions(names, owner=owner, epoch=epoch)


def _fitting(schemas: Sequence[pa.Schema], stream: str, schema: pa.Schema) -> pa.Schema:
    """Return the newest of a stream's schemas that rows of ``schema`` fit."""

    def difference(known: pa.Schema) -> str:
        forms = (unzoned_schema(canonical_schema(one)) for one in (known, schema))
        return difference_by_name(*(schema_for_spark(form) for form in forms))

    version = newest_matching(schemas, difference)
    if version is None:
        raise UsageError(
            f"rows do not fit stream '{stream}': column {difference(schemas[-1])}; select or cast the columns, or "
            "write to another stream"
        )
    return schemas[version]


def _names(messages: Messages) -> list[str]:
    return [message.name for message in messages if isinstance(message, Prepared) and message.name]


# -- once ------------------------------------------------------------------------------------------------------------


class StreamWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """Appends a DataFrame: all of its rows become visible at once, or none."""

    def __init__(self, written: StreamTarget) -> None:
        """Each write has an owner of its own: whatever tasks are left of a failed one can do nothing any more."""
        self._written = written
        self._owner = f"{OWNERS}write-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Prepare the rows of one task."""
        return self._written.prepare(iterator, self._owner, 0, f"part-{uuid.uuid4().hex}")

    def commit(self, messages: Messages) -> None:
        """Make all rows visible."""
        self._written.commit(self._owner, _names(messages))
        self._written.forget(self._owner)

    def abort(self, messages: Messages) -> None:
        """Leave nothing of the rows, also of tasks that have not said what they prepared."""
        self._written.commit(self._owner, [])
        self._written.forget(self._owner)


# -- in micro-batches --------------------------------------------------------------------------------------------------


class MicroBatchWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Appends the micro-batches of a query, each of them once, whatever Spark tries again (SP9, SP10)."""

    def __init__(self, written: StreamTarget) -> None:
        self._written = written

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Prepare the rows of one task of a micro-batch.

        Raises:
            UsageError: Spark does not say which query and which micro-batch it is.
        """
        query, batch = _local_property(QUERY_ID), _local_property(BATCH_ID)
        owner = f"{OWNERS}query-{query}"
        # the one of now: a commit in the meantime fences this task, which then is one that was given up
        epoch = self._written.place.store.pipelines.owner(owner).generation
        return self._written.prepare(iterator, owner, epoch, _name_of(int(batch)))

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - PySpark's name
        """Make the rows of a micro-batch visible, unless they are.

        Raises:
            UsageError: a later one is.
        """
        owner = next((message.owner for message in messages if isinstance(message, Prepared)), None)
        if owner is None:
            return
        is_done = functools.partial(_is_committed, owner=owner, batch=batchId)
        names = _names(messages)
        self._written.commit(owner, names, is_done, sweeps=batchId % SWEEP_EVERY == 0)
        if names:  # one without rows leaves nothing that tells a driver which comes late (SP10)
            self._written.forget(owner, lambda name: _batch_of(name) < batchId)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - PySpark's name
        """Leave nothing of a micro-batch."""
        self._written.abort(messages)


def _name_of(batch: int) -> str:
    """Return a new name of a transaction of a micro-batch."""
    return f"batch-{batch:012d}/{uuid.uuid4().hex}"


def _batch_of(name: str) -> int:
    return int(name.partition("/")[0].removeprefix("batch-"))


def _is_committed(store: Store, owner: str, batch: int) -> bool:
    """Return whether a micro-batch is visible already.

    Raises:
        UsageError: a later one is.
    """
    found = [x.name for x in store.list_transactions(owner=owner) if x.status is Status.COMMITTED]
    committed = {_batch_of(name) for name in found}
    turn = turn_of(batch, committed)
    if turn is Turn.LATE:
        raise UsageError(
            f"micro-batch {batch} of {owner} comes after {max(committed)}, which is in the stream: another driver "
            "runs this query, or its checkpoint directory was set back; then begin with a new one"
        )
    return turn is Turn.DONE


def _local_property(name: str) -> str:
    context = TaskContext.get()
    value = None if context is None else context.getLocalProperty(name)
    if not value:
        raise UsageError(
            f"format headgate: Spark does not tell its tasks {name}, by which a micro-batch is written once; "
            "update Spark, or use another sink"
        )
    return str(value)
