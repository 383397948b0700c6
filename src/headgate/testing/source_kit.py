"""Conformance kit for bounded sources: any restart, at any parallelism, delivers what followed.

Counterpart: ``connectors.base.Source``. Source: docs/spec/connectors.md N1, N3; faults F2 and F23.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headgate.connectors.base import Source, SourceContext, SourceReader

POLLS_MAX = 100_000
"""A bounded source that has not ended after so many polls never will."""

POLLS_FACTOR = 10
"""With restarts it may take so many times as many polls (and a hundred more), or it makes no progress."""

RESTARTS_MAX = 40
"""Restart points tried for each parallelism; evenly spread when there are more polls."""


def check_source(source: Source, parallelisms: Sequence[int] = (1, 2, 3)) -> list[dict[str, Any]]:
    """Read a bounded source with and without restarts; return its records.

    Afterwards: the records are the same multiset for every parallelism and every restart.

    Raises:
        AssertionError: they are not, or a rule of ``SourceReader`` is broken.
    """
    schema = source.schema()
    expected, polls = _run(source, 1, lambda _: False, POLLS_MAX)
    assert source.schema().equals(schema), "schema() changed between two calls"
    for parallelism in parallelisms:
        polls_max = 100 + polls * parallelism * POLLS_FACTOR
        step = max(1, polls // RESTARTS_MAX)
        for restart in range(0, polls + 1, step):
            found, _ = _run(source, parallelism, lambda poll, at=restart: poll == at, polls_max)  # type: ignore[misc]
            _same(found, expected, f"parallelism {parallelism}, restart after poll {restart}")
        found, _ = _run(source, parallelism, lambda _: True, polls_max)
        _same(found, expected, f"parallelism {parallelism}, restart after every poll")
    return expected


def _run(
    source: Source, parallelism: int, restarts_after: Callable[[int], bool], polls_max: int
) -> tuple[list[dict[str, Any]], int]:
    """Read with ``parallelism`` readers in turn; replace all of them where ``restarts_after`` says so."""
    rows: list[dict[str, Any]] = []
    readers = _open(source, parallelism, None)
    for poll in range(polls_max):
        if all(reader.is_finished() for reader in readers):
            return rows, poll
        reader = readers[poll % parallelism]
        owned = set(reader.splits())
        batch = None if reader.is_finished() else reader.poll()
        if batch is not None:
            assert batch.split in owned, f"batch of split {batch.split}, which is not among splits() {sorted(owned)}"
            assert batch.batch.schema.equals(source.schema()), f"batch has schema {batch.batch.schema}"
            assert not batch.is_split_finished or batch.split not in reader.splits(), "a finished split is in splits()"
            rows += batch.batch.to_pylist()
        if restarts_after(poll):
            positions: dict[str, bytes] = {}
            for each in readers:
                assert not positions.keys() & each.positions().keys(), "two subtasks own one split"
                positions |= each.positions()
                each.close()
            readers = _open(source, parallelism, positions)
    raise AssertionError(f"the source had not ended after {polls_max} polls")


def _open(source: Source, parallelism: int, positions: dict[str, bytes] | None) -> list[SourceReader]:
    contexts = [SourceContext("kit", "source", index, parallelism, positions) for index in range(parallelism)]
    return [source.open(context) for context in contexts]


def _same(found: list[dict[str, Any]], expected: list[dict[str, Any]], when: str) -> None:
    found_counts, expected_counts = (Counter(repr(sorted(row.items())) for row in rows) for rows in (found, expected))
    lost, extra = expected_counts - found_counts, found_counts - expected_counts
    assert not lost, f"{when}: lost {list(lost.items())[:3]}"
    assert not extra, f"{when}: delivered again {list(extra.items())[:3]}"
