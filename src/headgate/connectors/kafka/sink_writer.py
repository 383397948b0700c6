"""Writes the records of one subtask to Kafka: in transactions that a checkpoint prepares, or at least once.

A subtask has a transactional id for each transaction that is not decided, and uses one again once its last transaction
is proven to be committed: then the next epoch of its producer is known, so that nothing has to be asked for, and a
writer that was fenced meanwhile is refused. Ids of other generations are never touched. Counterpart: ``committer``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa

from headgate.codec.kafka.record_batch import Compression
from headgate.codec.kafka.record_encoder import BATCH_BYTES_MAX
from headgate.connectors.base import EmptyTransaction, SealedTransaction, SinkWriter
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.kafka.client import ANSWER_MS, KafkaClient, ProducerIds, Topic
from headgate.connectors.kafka.outgoing_records import Router
from headgate.connectors.kafka.producer import REQUEST_BYTES_MAX, Producer
from headgate.connectors.kafka.transactions import (
    ENDED_AGAIN,
    EPOCH_LAST,
    Prepared,
    SinkIds,
    TopicOwner,
    hanging_partitions,
    prepared,
)
from headgate.environment import Environment
from headgate.errors import FencedError, HeadgateError, StorageError
from headgate.model.ids import CheckpointId

BATCH_SETTING = "max.message.bytes"

IDLE_MS_MAX = 3_600_000
"""An id that rested for longer is not used again: brokers forget it, a week later if they are not told otherwise
(``transactional.id.expiration.ms``), and would refuse its next transaction."""

CLOSE_PATIENCE_MS = 2_000
"""How long a writer that ends tries to abort its open transaction; the next generation does it otherwise."""


class Topics:
    """The topics that one subtask writes to, as it found them."""

    def __init__(self, client: KafkaClient) -> None:
        self.client = client
        self.known: dict[str, Topic] = {}
        self._batch_bytes: dict[str, int] = {}

    def partitions_count(self, name: str) -> int:
        """Return how many partitions a topic has.

        Raises:
            UsageError: there is no such topic.
        """
        if name not in self.known:
            self.known[name] = self.client.topic(name)
        return len(self.known[name].leaders)

    def batch_bytes_max(self, name: str) -> int:
        """Return how large a batch a topic takes."""
        if name not in self._batch_bytes:
            found = self.client.number_setting(BATCH_SETTING, BATCH_BYTES_MAX, name)
            self._batch_bytes[name] = min(found, REQUEST_BYTES_MAX)
        return self._batch_bytes[name]

    def close(self) -> None:
        """Release the connection."""
        self.client.close()


class WriterSettings:
    """What producers of one subtask have in common."""

    def __init__(
        self,
        make_client: Callable[[], KafkaClient],
        environment: Environment,
        topics: Topics,
        compression: Compression,
    ) -> None:
        self.make_client, self.environment, self.topics = make_client, environment, topics
        self._compression = compression

    def producer(self, client: KafkaClient, ids: ProducerIds, transactional_id: str | None) -> Producer:
        """Return a producer for all topics known by now."""
        return Producer(
            client,
            self.environment,
            self.topics.known,
            ids,
            transactional_id,
            compression=self._compression,
        )


class _UsedId:
    """A transactional id with its producer. Used by one thread at a time."""

    def __init__(self, settings: WriterSettings, name: str, timeout_ms: int | None) -> None:
        """``timeout_ms``: after which brokers abort a transaction; None: never."""
        self.name, self.use, self.records_count = name, 1, 0
        self.prepared: Prepared | None = None
        self.prepared_ms = 0
        # of its own: an upload thread prepares this transaction while the mailbox writes the next one
        self.client = settings.make_client()
        try:
            self.ids = self.client.take_over(name, timeout_ms or ANSWER_MS, has_no_timeout=timeout_ms is None)
        except BaseException:
            self.client.close()
            raise
        self.producer = settings.producer(self.client, self.ids, name)

    def begin_next(self) -> None:
        """Go on with the next transaction: the last one is committed, which has raised the epoch."""
        self.ids = ProducerIds(self.ids.producer_id, self.ids.producer_epoch + 1)
        self.use, self.records_count = self.use + 1, 0
        assert self.ids.producer_epoch <= EPOCH_LAST, "an id is used beyond the last epoch of its producer"
        self.producer.begin(self.ids)

    def close(self) -> None:
        self.producer.close()
        self.client.close()


class IdPool:
    """The transactional ids of one subtask of one generation."""

    def __init__(
        self,
        settings: WriterSettings,
        topic: str,
        ids: SinkIds,
        fence: Fence,
        subtask_index: int,
        timeout_ms: int | None,
        owner_of: Callable[[KafkaClient], TopicOwner],
    ) -> None:
        self._settings, self._topic, self._ids, self._fence = settings, topic, ids, fence
        self._subtask_index, self._timeout_ms, self._owner_of = subtask_index, timeout_ms, owner_of
        self._prepared: deque[_UsedId] = deque()
        """Those with a prepared transaction, oldest first. Upload threads add to it."""
        self._count = 0

    def begin(self) -> _UsedId:
        """Return an id for another transaction.

        Raises:
            FencedError: a newer generation has claimed the topic.
        """
        while self._prepared:
            oldest = self._prepared[0]
            has_rested = self._settings.environment.monotonic_ms() - oldest.prepared_ms >= IDLE_MS_MAX
            proof = "" if has_rested else self._proof(oldest)  # brokers forget proofs, too
            # transactions are committed in their order: what was prepared later is not committed either
            if proof is None:
                break
            self._prepared.popleft()
            if not has_rested and oldest.ids.producer_epoch < EPOCH_LAST and proof != ENDED_AGAIN:
                oldest.begin_next()
                return oldest
            oldest.close()
        return self._new()

    def put_back(self, used: _UsedId) -> None:
        """Take an id whose transaction was prepared."""
        used.prepared_ms = self._settings.environment.monotonic_ms()
        assert used.prepared is not None, "an id comes back before its transaction was prepared"
        # last, and without a lock: from here on the mailbox thread may take it
        self._prepared.append(used)

    def close(self) -> None:
        """Release all connections."""
        while self._prepared:
            self._prepared.popleft().close()

    @contextlib.contextmanager
    def telling_timeouts(self, used: _UsedId) -> Iterator[None]:
        """Tell a transaction that brokers aborted, because it was open for too long, from one of a fenced writer."""
        try:
            yield
        except FencedError as error:
            self._owner_of(used.client).refuse_if_replaced(self._fence)
            why = f"another program took over transaction '{used.name}'"
            if self._timeout_ms is not None:
                why = f"Kafka aborted transaction '{used.name}', which was open longer than {self._timeout_ms} ms"
            raise StorageError("write to", f"topic '{self._topic}'", why, is_transient=False) from error

    def _proof(self, used: _UsedId) -> str | None:
        """Return the text of the proof that the last transaction of an id is committed everywhere; None: it is not.

        The next transaction would decide over the records of one that is still open in a partition. What ended there
        late has the text of that, so the partitions are asked first.
        """
        assert used.prepared is not None, "an id waits for its commit before its transaction was prepared"
        if hanging_partitions(used.client, [used.prepared]):
            return None
        use, text = used.client.committed_offsets(used.name, self._topic, [0], is_stable=False).get(0, (0, ""))
        return text if use >= used.use else None

    def _new(self) -> _UsedId:
        self._count += 1
        name = self._ids.id_of(self._fence.generation, self._subtask_index, self._count)
        used = _UsedId(self._settings, name, self._timeout_ms)
        try:
            # a generation that claims later than this finds the id, and takes it over
            self._owner_of(used.client).refuse_if_replaced(self._fence)
        except BaseException:
            used.close()
            raise
        return used


class KafkaWriter(SinkWriter):
    """Writes transactions that checkpoints prepare."""

    def __init__(self, settings: WriterSettings, router: Router, pool: IdPool, topic: str, fence: Fence) -> None:
        """Use ``KafkaSink.open``."""
        self._settings, self._router, self._pool, self._topic, self._fence = settings, router, pool, topic, fence
        self._open: _UsedId | None = None
        self._sealed: list[_Sealed] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``."""
        if batch.num_rows == 0:
            return
        if self._open is None:
            self._open = self._pool.begin()
        self._open.records_count += batch.num_rows
        with self._pool.telling_timeouts(self._open):
            _write(self._open.producer, self._router, self._settings, batch)

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """See ``SinkWriter``. It waits for brokers, because another producer writes what follows in a partition."""
        if self._open is None:
            return EmptyTransaction()
        with self._pool.telling_timeouts(self._open):
            self._open.producer.flush()
        sealed = _Sealed(self._open, self._pool, self._topic, f"{self._fence.owner} {checkpoint}")
        self._open = None
        self._sealed = [one for one in self._sealed if not one.is_over]
        self._sealed.append(sealed)
        return sealed

    def close(self) -> None:
        """See ``SinkWriter``: abort what is open, so that no reader waits for it."""
        if self._open is not None:
            used, self._open = self._open, None
            used.close()
            with contextlib.suppress(HeadgateError), contextlib.closing(self._settings.make_client()) as client:
                client.patience_ms = CLOSE_PATIENCE_MS
                client.end_transaction(used.name, used.ids, commit=False)
        for sealed in self._sealed:
            sealed.close()
        self._pool.close()
        self._settings.topics.close()


def _write(producer: Producer, router: Router, settings: WriterSettings, batch: pa.RecordBatch) -> None:
    for one in router.outgoing(batch, settings.environment.wall_ms()):
        # the router may have met a topic just now
        producer.add(settings.topics.known)
        limit = settings.topics.batch_bytes_max(one.partition[0])
        producer.write(one.partition, one.values, one.timestamps_ms, one.keys, one.headers, limit)


class _Sealed(SealedTransaction):
    """A transaction that takes no more records."""

    def __init__(self, used: _UsedId, pool: IdPool, topic: str, proof: str) -> None:
        self._used: _UsedId | None = used
        self._pool, self._topic, self._proof = pool, topic, proof
        self._payload: bytes | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was prepared."""
        return self._used is None

    def prepare(self) -> bytes | None:
        """See ``SealedTransaction``: all records are acknowledged; the proof becomes part of the transaction."""
        used = self._used
        if used is None:
            return self._payload
        with self._pool.telling_timeouts(used):
            # repeated after a lost answer, it commits the same number once more
            used.client.commit_in_transaction(used.name, used.ids, used.name, self._topic, {0: (used.use, self._proof)})
        ids = used.ids
        used.prepared = prepared(
            self._topic,
            used.name,
            ids.producer_id,
            ids.producer_epoch,
            used.use,
            used.records_count,
            used.producer.first_offsets(),
        )
        self._payload = used.prepared.encode()
        self._used = None
        self._pool.put_back(used)
        return self._payload

    def close(self) -> None:
        """Release the connections of a transaction that was not prepared; the next generation aborts it."""
        if self._used is not None:
            self._used.close()


class PlainKafkaWriter(SinkWriter):
    """Writes at once, each record at least once: a barrier waits until brokers have everything."""

    def __init__(self, settings: WriterSettings, router: Router) -> None:
        """Use ``KafkaSink.open``."""
        self._settings, self._router = settings, router
        self._client = settings.make_client()
        try:
            self._producer = settings.producer(self._client, self._client.new_producer(), None)
        except BaseException:
            self._client.close()
            raise

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``."""
        if batch.num_rows:
            _write(self._producer, self._router, self._settings, batch)

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """See ``SinkWriter``. It waits, because the records that follow are written by the same producer."""
        self._producer.flush()
        return EmptyTransaction()

    def close(self) -> None:
        """See ``SinkWriter``."""
        self._producer.close()
        self._client.close()
        self._settings.topics.close()
