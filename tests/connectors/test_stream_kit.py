"""The stream sink passes the conformance kit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from headgate.connectors.streams import StreamSink
from headgate.store.store import Store
from headgate.testing import Target, check_sink

STREAM = "out"


def fresh(directory: Path) -> Target:
    store = Store.open(directory / "store")

    def read() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for info in store.list_streams():
            for segment in range(info.segments_count):
                reader = store.reader(info.name, segment)
                while (batch := reader.read()) is not None:
                    rows += batch.to_pylist()
        return rows

    def waiting() -> list[str]:
        return [x.name for x in store.list_transactions() if not x.status.is_terminal]

    def lose() -> None:
        for x in store.list_transactions():
            if not x.status.is_terminal:
                store.abort_transaction(x.stream, x.name, owner=x.owner, epoch=x.epoch)

    return Target(StreamSink(STREAM, store=directory / "store", routing_key="number"), read, waiting, lose)


def test_the_stream_sink_passes_the_conformance_kit(tmp_path: Path) -> None:  # SC3, S13
    numbers = itertools.count()
    check_sink(lambda: fresh(tmp_path / str(next(numbers))), rescales=((2, 3),), overlaps=(2,), rows=(0, 6))
