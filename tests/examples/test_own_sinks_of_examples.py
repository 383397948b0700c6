"""The sinks that users are shown pass the conformance kit."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from examples.own_sinks import DirectorySink, DocumentSink
from tests.conftest import IS_DEEP

from headgate.testing import Target, check_sink

RESCALES, OVERLAPS, ROWS = (
    (((1, 1), (2, 2), (1, 2), (5, 2), (2, 5)), (1, 3), (0, 1, 40)) if IS_DEEP else (((3, 2),), (1,), (1,))
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, so nothing has to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.long
@pytest.mark.usefixtures("some_interruptions")
def test_a_directory_that_others_read_passes(tmp_path: Path) -> None:
    numbers = itertools.count()

    def fresh() -> Target:
        sink = DirectorySink(str(tmp_path / str(next(numbers))))

        def read() -> list[dict[str, object]]:
            lines = (line for path in sink.ready.glob("*") for line in path.read_text().splitlines())
            return [json.loads(line) for line in lines]

        def lose() -> None:
            for path in sink.waiting.glob("*"):
                path.unlink()

        return Target(sink, read, lambda: [path.name for path in sink.waiting.glob("*")], lose)

    left_out = check_sink(fresh, rescales=RESCALES, overlaps=OVERLAPS, rows=ROWS)
    assert [one.partition(":")[0] for one in left_out] == [
        "the order of the output",
        "forgetting",
        "taken away",
        "outages",
    ]


@pytest.mark.long
@pytest.mark.usefixtures("some_interruptions")
def test_a_document_passes(tmp_path: Path) -> None:
    numbers = itertools.count()

    def fresh() -> Target:
        sink = DocumentSink(str(tmp_path / f"{next(numbers)}.json"))

        def read() -> list[dict[str, object]]:
            with sink.document() as document:
                return [{"number": row["number"], "text": row["text"]} for row in document["numbers"]]

        return Target(sink, read, is_ordered=True)

    check_sink(fresh, rescales=RESCALES, overlaps=OVERLAPS, rows=ROWS)
