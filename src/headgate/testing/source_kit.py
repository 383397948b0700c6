"""Conformance kit for bounded sources: any restart, at any parallelism, delivers what followed.

Counterpart: ``connectors.base.Source``. Source: docs/spec/connectors.md N1, N3; EI33; faults F2 and F23.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headgate.connectors.base import Source, SourceContext
from headgate.connectors.hooks import CoordinatorHook, HookContext, HookedSource
from headgate.connectors.induced import AnyReader, CheckpointMarker, InducedReader, InducedSource, Polled
from headgate.model.ids import Generation
from headgate.model.life import NO_GENERATION

POLLS_MAX = 100_000
"""A bounded source that has not ended after so many polls never will."""

POLLS_FACTOR = 10
"""With restarts it may take so many times as many polls (and a hundred more), or it makes no progress."""

RESTARTS_MAX = 40
"""Restart points tried for each parallelism; evenly spread when there are more polls."""


def check_source(source: Source | InducedSource, parallelisms: Sequence[int] = (1, 2, 3)) -> list[dict[str, Any]]:
    """Read a bounded source with and without restarts; return its records.

    Afterwards: the records are the same multiset for every parallelism and every restart. If the source brings a hook
    along, which puts markers into it, each restart begins behind the marker of a checkpoint, and the hook stays reset.

    Raises:
        AssertionError: they are not, or a rule of ``SourceReader`` is broken.
    """
    schema = source.schema()
    expected, polls = _run(source, 1, lambda _: False, POLLS_MAX)
    assert source.schema().equals(schema), "schema() changed between two calls"
    hook = source.coordinator_hook() if isinstance(source, HookedSource) else None
    if hook is not None:
        for parallelism in parallelisms:
            check_markers(source, hook, parallelism, polls, expected)
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
    source: Source | InducedSource, parallelism: int, restarts_after: Callable[[int], bool], polls_max: int
) -> tuple[list[dict[str, Any]], int]:
    """Read with ``parallelism`` readers in turn; replace all of them where ``restarts_after`` says so."""
    rows: list[dict[str, Any]] = []
    readers = _open(source, parallelism, None)
    for poll in range(polls_max):
        if all(reader.is_finished() for reader in readers):
            return rows, poll
        reader = readers[poll % parallelism]
        owned = set(reader.splits())
        batch: Polled = None if reader.is_finished() else reader.poll()
        if isinstance(batch, CheckpointMarker):
            raise AssertionError(f"the reader met {batch}, and no checkpoint was triggered")
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


def check_markers(
    source: Source | InducedSource, hook: CoordinatorHook, parallelism: int, polls: int, expected: list[dict[str, Any]]
) -> None:
    """Take checkpoint after checkpoint, each behind other numbers of polls; behind every one a generation begins.

    Raises:
        AssertionError: records are lost or come again, or the reader does not stand still behind its markers.
    """
    rows: list[dict[str, Any]] = []
    cut: _Cut | None = None
    positions: dict[str, bytes] | None = None
    data: bytes | None = None
    for checkpoint in range(1, polls + RESTARTS_MAX):
        hook.open(HookContext("kit", "source", checkpoint))
        if positions is None:
            hook.reset()
        else:
            hook.restore(checkpoint - 1, data)
        cut = _Cut(_open(source, parallelism, positions, Generation(checkpoint)))
        cut.read(checkpoint % 5)
        data = hook.trigger(checkpoint)
        rows += cut.to_marker(checkpoint, polls * POLLS_FACTOR + 100)
        positions = cut.positions()
        cut.check_standing_still(checkpoint)
        if cut.is_finished:
            break
    assert cut is not None
    assert cut.is_finished, f"the source had not ended after {polls + RESTARTS_MAX} checkpoints"
    _same(rows, expected, f"parallelism {parallelism}, restart behind every marker")
    hook.reset()
    hook.close()


class _Cut:
    """Readers of all subtasks between one checkpoint and the next."""

    def __init__(self, readers: list[AnyReader]) -> None:
        self._readers = readers
        self._rows: list[dict[str, Any]] = []
        self._still: set[str] = set()

    @property
    def is_finished(self) -> bool:
        return all(reader.is_finished() for reader in self._readers)

    def positions(self) -> dict[str, bytes]:
        return {split: at for reader in self._readers for split, at in reader.positions().items()}

    def read(self, polls: int) -> None:
        """Poll each reader so often; no checkpoint was triggered yet."""
        for reader in self._readers:
            for _ in range(polls):
                self._take(reader, None)

    def to_marker(self, checkpoint: int, polls_max: int) -> list[dict[str, Any]]:
        """Read until every split stands behind the marker, or has ended; return all rows."""
        for reader in self._readers:
            polls = 0
            while not set(reader.splits()) <= self._still:
                polls += 1
                assert polls <= polls_max, (
                    f"splits {sorted(set(reader.splits()) - self._still)} did not meet the marker of {checkpoint}"
                )
                self._take(reader, checkpoint)
        return self._rows

    def check_standing_still(self, checkpoint: int) -> None:
        """Behind the marker nothing comes until it is asked for, and the marker itself does not come again."""
        before = self.positions()
        for reader in self._readers:
            found: Polled = None if reader.is_finished() else reader.poll()
            assert found is None, f"the reader went on behind the marker of {checkpoint}: {found}"
            if isinstance(reader, InducedReader):
                reader.read_on([split for split in reader.splits() if split in self._still])
        assert self.positions() == before, "read_on() moved the positions"
        for reader in self._readers:
            reader.close()

    def _take(self, reader: AnyReader, checkpoint: int | None) -> None:
        found: Polled = None if reader.is_finished() else reader.poll()
        if isinstance(found, CheckpointMarker):
            assert isinstance(reader, InducedReader), "a reader that meets markers needs read_on()"
            assert found.checkpoint_id == checkpoint, f"{found} was met, and {checkpoint} was to be"
            assert found.split not in self._still, f"split {found.split} was read on behind its marker"
            self._still.add(found.split)
        elif found is not None:
            assert found.split not in self._still, f"split {found.split} was read on behind its marker"
            self._rows += found.batch.to_pylist()


def _open(
    source: Source | InducedSource,
    parallelism: int,
    positions: dict[str, bytes] | None,
    generation: Generation = NO_GENERATION,
) -> list[AnyReader]:
    contexts = [
        SourceContext("kit", "source", index, parallelism, positions, generation) for index in range(parallelism)
    ]
    return [source.open(context) for context in contexts]


def _same(found: list[dict[str, Any]], expected: list[dict[str, Any]], when: str) -> None:
    found_counts, expected_counts = (Counter(repr(sorted(row.items())) for row in rows) for rows in (found, expected))
    lost, extra = expected_counts - found_counts, found_counts - expected_counts
    assert not lost, f"{when}: lost {list(lost.items())[:3]}"
    assert not extra, f"{when}: delivered again {list(extra.items())[:3]}"
