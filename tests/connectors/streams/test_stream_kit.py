"""The stream sink and the stream source pass the conformance kits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy.engine import Connection
from tests.conftest import IS_DEEP, few
from tests.mutants.harness import patched

from headgate.connectors.streams import StreamSink, StreamSource
from headgate.errors import StorageError, UsageError
from headgate.store.catalogue import sqlite
from headgate.store.catalogue.sqlite import FileDatabase
from headgate.store.reader import SegmentReader
from headgate.store.store import Store
from headgate.testing import Target, check_sink, check_source
from headgate.testing.sinks.fake_pipeline import HasFailed

STREAM = "out"
EVERY = 1 if IS_DEEP else 8
"""One in so many transactions of a scenario fails, each in a scenario of its own."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, so nothing has to reach the disk."""
    monkeypatch.setattr(sqlite, "SYNCHRONOUS", "OFF")


class Shown:
    """A foreign reader that follows the store's streams; at the end another one begins anew, and sees the same.

    When a stream is deleted, because its pipeline starts over, the reader begins anew, too.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: list[SegmentReader] = []
        self._rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        self._readers = self._readers or self._begun()
        try:
            self._rows += _read_on(self._readers)
        except UsageError:  # it was deleted
            self._readers = self._begun()
            self._rows = _read_on(self._readers)
        return list(self._rows)

    def check_end(self) -> None:
        found = [sorted(map(repr, rows)) for rows in (self.read(), _read_on(self._begun()))]
        assert found[0] == found[1], "a reader that begins anew sees other events"

    def _begun(self) -> list[SegmentReader]:
        infos = self._store.list_streams()
        return [self._store.reader(info.name, segment) for info in infos for segment in range(info.segments_count)]


def _read_on(readers: list[SegmentReader]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for reader in readers:
        while (batch := reader.read()) is not None:
            rows += batch.to_pylist()
    return rows


@contextlib.contextmanager
def failing(number: int, is_after: bool) -> Iterator[HasFailed]:
    """Fail one transaction that changes the catalogue, before it or after its commit."""
    number *= EVERY
    write, seen = FileDatabase.write, itertools.count(1)
    last = 0

    @contextlib.contextmanager
    def fails(self: FileDatabase) -> Iterator[Connection]:
        nonlocal last
        last = next(seen)
        if (last, is_after) == (number, False):
            raise _lost(last)
        with write(self) as connection:
            yield connection
        if (last, is_after) == (number, True):
            raise _lost(last)

    with patched(FileDatabase, "write", fails):
        yield lambda: last >= number


def _lost(number: int) -> StorageError:
    return StorageError("write", "the catalogue", f"the connection was lost in call {number}", is_transient=True)


def fresh(directory: Path) -> Target:
    store = Store.open(directory / "store")
    shown = Shown(store)

    def waiting() -> list[str]:
        shown.check_end()
        return [x.name for x in store.list_transactions() if not x.status.is_terminal]

    def lose() -> None:
        for x in store.list_transactions():
            if not x.status.is_terminal:
                store.transactions.abort(x.stream, x.name, owner=x.owner, epoch=x.epoch)

    sink = StreamSink(STREAM, store=directory / "store", segments=2, routing_key="number")
    return Target(sink, shown.read, waiting, lose, failing=failing)


@pytest.mark.long
@pytest.mark.early
def test_the_stream_sink_passes_the_conformance_kit(tmp_path: Path) -> None:  # S13
    numbers = itertools.count()
    rows = (0, 6) if IS_DEEP else (6,)
    left_out = check_sink(lambda: fresh(tmp_path / str(next(numbers))), rescales=((2, 3),), overlaps=(2,), rows=rows)
    assert [one.partition(":")[0] for one in left_out] == [
        "the order of the output",
        "taken away",
        "owner",  # by name: a stream knows those who have written to it, and in this part of the kit nobody has
        "start over",
        "outages",
    ]


@pytest.mark.long
@pytest.mark.parametrize("stream_cuts", few([False, True], 1))
def test_a_stream_passes_the_conformance_kit_of_sources(tmp_path: Path, stream_cuts: bool) -> None:
    """Two segments and the two that one of them was split into: a subtask of two waits for the other one."""
    store = Store.open(tmp_path / "store")
    store.create_stream(STREAM, pa.schema([("number", pa.int64())]), segments=2, routing_key="number")
    expected = list(range(6))
    with store.writer(STREAM) as writer:
        writer.append(pa.record_batch({"number": expected[:3]}))
    store.split(STREAM, 0)
    with store.writer(STREAM) as writer:
        writer.append(pa.record_batch({"number": expected[3:]}))
    source = StreamSource(STREAM, store=str(tmp_path / "store"), follow=False, stream_cuts=stream_cuts)
    assert sorted(row["number"] for row in check_source(lambda: source, parallelisms=(2,))) == expected
