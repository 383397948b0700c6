"""What the store's tests share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from headgate.errors import StorageError
from headgate.store.store import Store

KEYED = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
STREAM = "app/events"


def keyed(*pairs: tuple[str | None, int | None]) -> pa.RecordBatch:
    return pa.record_batch([[k for k, _ in pairs], [v for _, v in pairs]], schema=KEYED)


def drain(store: Store, stream: str = STREAM, rows_max: int = 1_000) -> list[list[tuple[str, int]]]:
    """Everything visible, per segment."""
    found = []
    for segment in range(store.describe(stream).segments_count):
        reader = store.reader(stream, segment)
        rows: list[tuple[str, int]] = []
        while (batch := reader.read(rows_max)) is not None:
            rows += list(zip(*batch.to_pydict().values(), strict=True))
        found.append(rows)
    return found


def drained(store: Store, stream: str = STREAM) -> list[tuple[str, int]]:
    """Everything visible, sorted."""
    return sorted(row for segment in drain(store, stream) for row in segment)


def lose_an_answer(store: Store, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """The next write of the catalogue takes effect, and its caller is told that it failed."""
    real = store._catalogue.write
    left = [times]

    class Lost:
        def __enter__(self) -> Any:
            self.inner = real()
            return self.inner.__enter__()

        def __exit__(self, *args: object) -> Any:
            result = self.inner.__exit__(*args)  # type: ignore[arg-type]
            left[0] -= 1
            if left[0] >= 0 and args[0] is None:
                raise StorageError("write", "catalogue", "disk I/O error")
            return result

    monkeypatch.setattr(store._catalogue, "write", Lost)


def in_a_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a forked process; it must end without an error, in a bounded time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            watchdog = threading.Timer(120, lambda: os._exit(2))
            watchdog.daemon = True
            watchdog.start()
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
