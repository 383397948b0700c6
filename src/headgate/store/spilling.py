"""Writes parts of large transactions beside their writers, on a few threads for the whole store.

Counterpart: ``open_transaction``, which has one part at a time written. Never drops a part: whose write failed, or
could not even begin, has it back. Source: S70 of docs/spec/stream-store.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pyarrow as pa

from headgate.threads import Pool, Threads, as_here

THREADS = 2

Write = Callable[[Sequence[pa.RecordBatch]], None]


class Part:
    """Batches that are being written."""

    def __init__(self, batches: Sequence[pa.RecordBatch], write: Write, threads: Threads) -> None:
        self.batches = batches
        self._write = write
        self._is_over = threads.event()
        self._is_written = False

    def run(self) -> None:
        """Write them."""
        try:
            with contextlib.suppress(Exception):  # who waits tries again, and is told
                self._write(self.batches)
                self._is_written = True
        finally:
            self._is_over.set()

    def is_written(self) -> bool:
        """Wait until the write is over; return whether it did what it should."""
        self._is_over.wait()
        return self._is_written

    def give_back(self) -> None:
        """It will not be written beside anybody."""
        self._is_over.set()


class Spilling:
    """The threads of one store, in each process that uses it: those of a parent do not survive a fork (CT4)."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._pools: dict[int, Pool] = {}

    def begin(self, batches: Sequence[pa.RecordBatch], write: Write) -> Part:
        """Have ``batches`` written."""
        part = Part(batches, write, self._threads)
        try:
            self._pool().submit(as_here(part.run))
        except RuntimeError:  # no more threads: whoever waits for it writes it
            part.give_back()
        return part

    def _pool(self) -> Pool:
        process = self._threads.process_id
        if process not in self._pools:
            self._pools = {process: self._threads.pool(THREADS, "headgate-spill")}
        return self._pools[process]
