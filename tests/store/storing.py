"""What the store's tests share, also those that are repeated with the catalogue elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.errors import StorageError
from headgate.storage.local import LocalStorage
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.sqlite import Database
from headgate.store.store import Store

KEYED = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
STREAM = "app/events"


def keyed(*pairs: tuple[str | None, int | None]) -> pa.RecordBatch:
    return pa.record_batch([[k for k, _ in pairs], [v for _, v in pairs]], schema=KEYED)


class Clock:
    """A clock that the test sets, and a date that goes with it unless it is set, too."""

    def __init__(self, now_ms: int = 1_000, date_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms
        self.date_ms = date_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.date_ms + self.now_ms


def drain(store: Store, stream: str = STREAM, rows_max: int = 1_000) -> list[list[tuple[str, int]]]:
    """Everything visible, per segment."""
    found = []
    for segment in range(len(store.describe(stream).ends)):
        reader = store.reader(stream, segment)
        rows: list[tuple[str, int]] = []
        while (batch := reader.read(rows_max)) is not None:
            rows += list(zip(*batch.to_pydict().values(), strict=True))
        found.append(rows)
    return found


def drained(store: Store, stream: str = STREAM) -> list[tuple[str, int]]:
    """Everything visible, sorted."""
    return sorted(row for segment in drain(store, stream) for row in segment)


SERVED: dict[str, Store] = {}
"""Stores that a server in this process serves, by the URL that the test knows."""


def database_of(store: Store) -> Database:
    """The tables behind the verbs, to damage them."""
    catalogue = SERVED.get(store.root, store)._core.catalogue
    assert isinstance(catalogue, SqlCatalogue)
    return catalogue._database


def chunks_of(store: Store) -> Path:
    """The directory of the chunk files, to look into it."""
    storage = SERVED.get(store.root, store)._core.storage
    assert isinstance(storage, LocalStorage)
    return Path(storage.url)


def lose_an_answer(store: Store, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """The next write of the catalogue takes effect, and its caller is told that it failed."""
    real = database_of(store).write
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

    monkeypatch.setattr(database_of(store), "write", Lost)


class Failing:
    """A catalogue some of whose calls fail before they have an effect: the one with number ``at``, and all ``down``."""

    def __init__(self, catalogue: Catalogue, at: int = 0) -> None:
        self._catalogue = catalogue
        self.at = at
        self.down: set[str] = set()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._catalogue, name)
        if not callable(real):
            return real

        def called(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.at or name in self.down:
                raise StorageError(name, "catalogue", "it is away")
            return real(*args, **named)

        return called


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


PARAMETERS = 2
"""With so many of its parameters a test is repeated by ``make test``; with the others by ``make test-repeated``."""


def leave_repetitions(items: Iterable[pytest.Item], modules: Collection[str], kept: Collection[str]) -> None:
    """Leave to ``make test-repeated`` what is repeated in ``modules``, and further parameters of the other tests.

    Tests with the names ``kept`` are not left out.

    Verbs are not left out: each one has its own SQL.
    """
    repeated: dict[object, list[pytest.Function]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.stem in modules:
            if item.originalname not in kept:
                item.add_marker("deep")
        elif params and "verb" not in params and item.function.__module__ != item.module.__name__:
            repeated.setdefault(item.function, []).append(item)
    for found in repeated.values():
        for item in sorted(found, key=lambda item: item.name)[PARAMETERS:]:
            item.add_marker("deep")
