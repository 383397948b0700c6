"""A source as the runtime plays it: readers of one generation, and the checkpoint that the next one begins with.

Counterparts: ``source_kit`` and ``source_crashes``, which say what happens. A generation ends by being left alone: what
was polled behind the last completed checkpoint never counted. Source: R16, HL2 to HL5, HL10 to HL13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from headgate.connectors.base import Source, SourceContext
from headgate.connectors.induced import AnyReader, CheckpointMarker, InducedSource, Polled
from headgate.model.ids import Generation
from headgate.operators.base import RestoredState
from headgate.operators.checkpointed.exploring import own_copy_of, restored
from headgate.operators.checkpointed.functions import CheckpointedFunction, CheckpointListener, SnapshotContext
from headgate.operators.checkpointed.lists import OperatorLists

NODE = "source"

CHECKPOINT_EVERY = 8
"""So many polls lie between two checkpoints of readers that nothing happens to: a source may wait for one (KT5)."""

AnySource: TypeAlias = Source | InducedSource
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """What a checkpoint holds: positions, operator state, and the records that came before.

    Attributes:
        positions: of all subtasks; None before the first checkpoint.
        lists: the lists and unions that each subtask kept, by subtask.
    """

    number: int = 0
    positions: dict[str, bytes] | None = None
    rows: tuple[Row, ...] = ()
    lists: tuple[tuple[bytes, ...], ...] = ()

    def holds_the_same_as(self, other: SourceCheckpoint) -> bool:
        """Whether a generation that begins with it does what one does that begins with ``other``."""
        return replace(self, number=other.number) == other


class SourceLife:
    """All subtasks of one generation, which begins with ``begin``."""

    def __init__(self, source: AnySource, generation: int, parallelism: int, begin: SourceCheckpoint) -> None:
        """Open all readers."""
        self.schema = source.schema()
        self._begin = begin
        contexts = [
            SourceContext("kit", NODE, index, parallelism, begin.positions, Generation(generation))
            for index in range(parallelism)
        ]
        self._subtasks = [_Subtask(source, context, begin) for context in contexts]

    @property
    def parallelism(self) -> int:
        """How many subtasks there are."""
        return len(self._subtasks)

    @property
    def is_finished(self) -> bool:
        """Whether all input has ended."""
        return all(subtask.reader.is_finished() for subtask in self._subtasks)

    @property
    def is_listening(self) -> bool:
        """Whether a source or reader hears of checkpoints."""
        return any(True for subtask in self._subtasks for _ in subtask.listeners())

    @property
    def rows(self) -> list[Row]:
        """All records up to now, those before this generation, too."""
        return [*self._begin.rows, *(row for subtask in self._subtasks for row in subtask.rows)]

    def poll(self, index: int) -> None:
        """Poll one subtask.

        Raises:
            AssertionError: a rule of ``SourceReader`` is broken.
        """
        self._subtasks[index].poll(self.schema)

    def checkpoint(self, number: int, *, is_polled: bool) -> SourceCheckpoint:
        """Take positions and lists, one subtask after the other; ``is_polled``: the others read on meanwhile."""
        positions: dict[str, bytes] = {}
        rows = list(self._begin.rows)
        lists: list[tuple[bytes, ...]] = []
        for index, subtask in enumerate(self._subtasks):
            found = subtask.reader.positions()
            assert not positions.keys() & found.keys(), "two subtasks own one split"
            positions |= found
            rows += subtask.rows
            lists.append(subtask.snapshot(number))
            for other in range(index + 1, self.parallelism) if is_polled else ():
                self.poll(other)
        return SourceCheckpoint(number, positions, tuple(rows), tuple(lists))

    def tell_completed(self, number: int) -> None:
        """Say that the checkpoint is durable."""
        for subtask in self._subtasks:
            for listener in subtask.listeners():
                listener.notify_checkpoint_complete(number)

    def tell_aborted(self, number: int) -> None:
        """Say that it was given up."""
        for subtask in self._subtasks:
            for listener in subtask.listeners():
                listener.notify_checkpoint_aborted(number)

    def close(self) -> None:
        """Close all readers."""
        for subtask in self._subtasks:
            subtask.reader.close()


class _Subtask:
    """One reader, its source, and what they keep."""

    def __init__(self, source: AnySource, context: SourceContext, begin: SourceCheckpoint) -> None:
        mine = own_copy_of(NODE, source)  # HL2
        self.reader: AnyReader = mine.open(context)
        self.rows: list[Row] = []
        objects: list[object] = [mine, self.reader]  # HL4
        self._objects = objects[1:] if objects[0] is objects[1] else objects
        self._lists = OperatorLists(NODE, context.subtask_index, context.parallelism)
        former = len(begin.lists)
        self._lists.take(
            [RestoredState(index, former, memoryview(data)) for index, kept in enumerate(begin.lists) for data in kept]
        )
        for function in self._functions():
            restored(function, self._lists, is_restored=begin.positions is not None)

    def listeners(self) -> Iterator[CheckpointListener]:
        return (found for found in self._objects if isinstance(found, CheckpointListener))

    def poll(self, schema: Any) -> None:
        owned = set(self.reader.splits())
        found: Polled = None if self.reader.is_finished() else self.reader.poll()
        if isinstance(found, CheckpointMarker):
            raise AssertionError(f"the reader met {found}, and no checkpoint was triggered")
        if found is not None:
            assert found.split in owned, f"batch of split {found.split}, which is not among splits() {sorted(owned)}"
            assert found.batch.schema.equals(schema), f"batch has schema {found.batch.schema}"
            is_owned = found.split in self.reader.splits()
            assert not (found.is_split_finished and is_owned), "a finished split is in splits()"
            self.rows += found.batch.to_pylist()

    def snapshot(self, number: int) -> tuple[bytes, ...]:
        for function in self._functions():
            function.snapshot(SnapshotContext(number))
        kinds = [self._lists.freeze(is_union=is_union) for is_union in (False, True)]
        return tuple(b"".join(bytes(memoryview(part)) for part in kind.encode()) for kind in kinds if kind is not None)

    def _functions(self) -> Iterator[CheckpointedFunction]:
        return (found for found in self._objects if isinstance(found, CheckpointedFunction))


def is_time_for_checkpoint(poll: int) -> bool:
    """Whether a checkpoint is taken and completed behind poll number ``poll``."""
    return poll % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1


def check_same(found: Sequence[Row], expected: Sequence[Row], when: str) -> None:
    """Compare records as multisets.

    Raises:
        AssertionError: some are lost, or came again.
    """
    found_counts, expected_counts = (Counter(repr(sorted(row.items())) for row in rows) for rows in (found, expected))
    lost, extra = expected_counts - found_counts, found_counts - expected_counts
    assert not lost, f"{when}: lost {list(lost.items())[:3]}"
    assert not extra, f"{when}: delivered again {list(extra.items())[:3]}"
