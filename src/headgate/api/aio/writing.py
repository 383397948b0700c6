"""Writers for tasks, and transactions that several processes write.

Counterparts: ``store.writer``, ``store.shared_transaction``, ``store.transaction_writer``. Source: AC5 and AC7 of
docs/spec/stream-clients.md. Never takes back an append that was taken: whoever is cancelled repeats it by its number.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pyarrow as pa

from headgate.api.aio.beside import Beside, BesideBlock, Opening, passed_on
from headgate.api.aio.calls import Calls, outcome
from headgate.store.appends import Appended
from headgate.store.shared_transaction import SharedTransaction
from headgate.store.transaction_writer import TransactionWriter
from headgate.store.writer import StreamWriter


class AsyncStreamWriter(BesideBlock[StreamWriter]):
    """A ``StreamWriter`` for asyncio tasks. Appends keep the order in which tasks made them, and share flushes.

    As a context manager, the writer closes at the end of the block. If an error or a cancellation ended the block,
    appends that are not durable by then are dropped, and tasks that wait for them get an error.
    """

    def __init__(self, calls: Calls, writer: StreamWriter) -> None:
        """Use ``AsyncStore.writer``."""
        super().__init__(calls, writer, in_turn=True)

    @property
    def next_sequence(self) -> int:
        """The number of the next append. With ``writer_id=``, after a restart: the first that the store lacks."""
        return self._blocking.next_sequence

    async def append(self, batch: pa.RecordBatch, sequence: int | None = None) -> Appended:
        """Append events; return when they are durable, which takes ``linger`` and a flush.

        Cancelled before ``next_sequence`` has moved, nothing is appended; cancelled later, they will be, as if it had
        not been. With a ``writer_id=`` an append that is repeated by its number is not there twice.

        Args:
            batch: events with the stream's schema.
            sequence: see ``StreamWriter.append``.

        Raises:
            HeadgateError: see ``StreamWriter.append``, and what ended the writer before they were durable.
        """
        return await outcome(await self._run(partial(self._blocking.append, batch, sequence)))

    async def submit(self, batch: pa.RecordBatch, sequence: int | None = None) -> asyncio.Task[Appended]:
        """Take events, and return what completes when they are durable; see ``append``."""
        taken = await self._run(partial(self._blocking.append, batch, sequence))
        return asyncio.create_task(outcome(taken))

    async def flush(self) -> None:
        """Make everything that was appended before durable, at once.

        Raises:
            HeadgateError: see ``StreamWriter.flush``.
        """
        async with self._turn:
            pass  # those that were appended before are taken now
        await self._calls.run(self._blocking.flush)

    close = passed_on(StreamWriter.close)


class AsyncTransactionWriter(BesideBlock[TransactionWriter]):
    """A ``TransactionWriter`` for asyncio tasks.

    As a context manager, it closes at the end of the block, unless an error or a cancellation ended the block.
    """

    def __init__(self, calls: Calls, writer: TransactionWriter) -> None:
        """Use ``AsyncSharedTransaction.writer``."""
        super().__init__(calls, writer, in_turn=True)

    @property
    def participant(self) -> str:
        """The name of this participant in the transaction."""
        return self._blocking.participant

    @property
    def next_sequence(self) -> int:
        """The number of the next write: the first that the transaction lacks."""
        return self._blocking.next_sequence

    write = passed_on(TransactionWriter.write)
    flush = passed_on(TransactionWriter.flush)
    ping = passed_on(TransactionWriter.ping)
    close = passed_on(TransactionWriter.close)


class AsyncSharedTransaction(Beside[SharedTransaction]):
    """A ``SharedTransaction`` for asyncio tasks. It has the same methods, to be awaited."""

    @property
    def id(self) -> str:
        """The id by which other processes find this transaction."""
        return self._blocking.id

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._blocking.stream

    @property
    def lease_ms(self) -> int:
        """The lease in ms: an open transaction is aborted if it is not renewed for this long."""
        return self._blocking.lease_ms

    def writer(self, participant: str = "") -> Opening[AsyncTransactionWriter]:
        """Open a writer; see ``SharedTransaction.writer``."""

        async def opened() -> AsyncTransactionWriter:
            return AsyncTransactionWriter(self._calls, await self._run(partial(self._blocking.writer, participant)))

        return Opening(opened)

    ping = passed_on(SharedTransaction.ping)
    prepare = passed_on(SharedTransaction.prepare)
    commit = passed_on(SharedTransaction.commit)
    abort = passed_on(SharedTransaction.abort)
    status = passed_on(SharedTransaction.status)
