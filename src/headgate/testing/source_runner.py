"""Runs a source as the runtime does: generations of readers, checkpoints, crashes, other parallelism.

All subtasks are polled in turn. What was polled after the last completed checkpoint is lost with its generation: the
next one reads it again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from headgate.connectors.base import AnyReader, CheckpointMarker, PartsReader, Polled, Source, SourceContext
from headgate.dataclass import dataclass
from headgate.model.ids import Generation
from headgate.operators.base import RestoredState
from headgate.operators.checkpoint_listeners import (
    CheckpointedFunction,
    CheckpointListener,
    OperatorLists,
    SnapshotContext,
    own_copy_of,
    restored,
)

NODE = "source"

CHECKPOINT_EVERY = 8
"""Polls between two checkpoints of undisturbed readers: a source may wait for a checkpoint."""

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
        """Whether restoring it equals restoring ``other``."""
        return replace(self, number=other.number) == other


class SourceGeneration:
    """All subtasks of one generation, restored from the checkpoint ``begin``."""

    def __init__(self, source: Source, generation: int, parallelism: int, begin: SourceCheckpoint) -> None:
        """Open all readers."""
        self.schema = source.schema()
        self._begin = begin
        contexts = [
            SourceContext("kit", NODE, index, parallelism, begin.positions, Generation(generation))
            for index in range(parallelism)
        ]
        self._subtasks = [_Subtask(source, context, begin) for context in contexts]
        self._is_cut = False

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
        """Whether a source or reader is a ``CheckpointListener``."""
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
        if not self._is_cut:
            begin_parts([subtask.reader for subtask in self._subtasks])
        self._subtasks[index].poll(self.schema)

    def checkpoint(self, number: int, *, is_polled: bool) -> SourceCheckpoint:
        """Take positions and lists, one subtask after the other; ``is_polled``: the others read on meanwhile."""
        positions: dict[str, bytes] = {}
        rows = list(self._begin.rows)
        lists: list[tuple[bytes, ...]] = []
        self._is_cut = True  # parts begin before a checkpoint or after it
        for index, subtask in enumerate(self._subtasks):
            found = subtask.reader.positions()
            assert not positions.keys() & found.keys(), "two subtasks own one split"
            positions |= found
            rows += subtask.rows
            lists.append(subtask.snapshot(number))
            for other in range(index + 1, self.parallelism) if is_polled else ():
                self.poll(other)
        self._is_cut = False
        return SourceCheckpoint(number, positions, tuple(rows), tuple(lists))

    def tell_completed(self, number: int) -> None:
        """Notify listeners that the checkpoint is complete."""
        for subtask in self._subtasks:
            for listener in subtask.listeners():
                listener.notify_checkpoint_complete(number)

    def tell_aborted(self, number: int) -> None:
        """Notify listeners that the checkpoint was aborted."""
        for subtask in self._subtasks:
            for listener in subtask.listeners():
                listener.notify_checkpoint_aborted(number)

    def close(self) -> None:
        """Close all readers."""
        for subtask in self._subtasks:
            subtask.reader.close()


def begin_parts(readers: Sequence[AnyReader]) -> None:
    """Let readers of several parts begin the next one when all have read the one before it, as the driver does."""
    parts = [reader for reader in readers if isinstance(reader, PartsReader)]
    if parts:
        ended = min(reader.ended_parts for reader in parts)
        for reader in parts:
            reader.begin_part(ended)


class _Subtask:
    """One reader, its copy of the source, and their operator state."""

    def __init__(self, source: Source, context: SourceContext, begin: SourceCheckpoint) -> None:
        mine = own_copy_of(NODE, source)  # each subtask has a copy of its own, as in a worker
        self.reader: AnyReader = mine.open(context)
        self.rows: list[Row] = []
        objects: list[object] = [mine, self.reader]  # a source that is its own reader is called once
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
    """Whether a checkpoint is taken and completed after poll number ``poll``."""
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


CRASHES_MAX = 4
"""Moments of a crash tried in each scenario at each pair of parallelisms, evenly spread, beside the beginning."""

FURTHER_POLLS = 2
"""Polls of each subtask after a checkpoint, before the next event."""


class SourceRun:
    """A source across generations."""

    def __init__(self, source: Source, parallelism: int, polls_max: int, story: str) -> None:
        """Begin.

        Args:
            source: what is checked.
            parallelism: of the first generation.
            polls_max: a source that has not ended after so many polls of one generation never will.
            story: begins what is said when something is wrong.
        """
        self._source, self._polls_max, self.story = source, polls_max, story
        self._completed = SourceCheckpoint()
        self._generations = itertools.count(1)
        self._numbers = itertools.count(1)
        self._lives: list[SourceGeneration] = []
        self.start(parallelism)

    def start(self, parallelism: int) -> None:
        """Crash, and begin another generation with the last completed checkpoint."""
        self._turns = 0
        self.life = SourceGeneration(self._source, next(self._generations), parallelism, self._completed)
        self._lives.append(self.life)

    def poll(self, polls: int) -> None:
        """Poll ``polls`` times, one subtask after another."""
        for _ in range(polls):
            self.life.poll(self._turns % self.life.parallelism)
            self._turns += 1

    def poll_on(self) -> None:
        """Poll every subtask a few times."""
        self.poll(FURTHER_POLLS * self.life.parallelism)

    def checkpoint(self) -> SourceCheckpoint:
        """Take a checkpoint, which may never complete."""
        return self.life.checkpoint(next(self._numbers), is_polled=True)

    def complete(self, done: SourceCheckpoint, *, is_lost: bool = False) -> None:
        """The checkpoint is durable; ``is_lost``: no listener is notified."""
        self._completed = done
        if not is_lost:
            self.life.tell_completed(done.number)

    def abort(self, given_up: SourceCheckpoint) -> None:
        """Abort a checkpoint."""
        self.life.tell_aborted(given_up.number)

    def finish(self, expected: Sequence[Row]) -> None:
        """Read to the end, and once more after the last checkpoint, and compare."""
        while not self.life.is_finished:
            assert self._turns <= self._polls_max, f"{self.story}: the source had not ended after {self._turns} polls"
            self.poll(1)
            if is_time_for_checkpoint(self._turns):
                self.complete(self.checkpoint())
        self.complete(self.checkpoint())
        check_same(self._completed.rows, expected, self.story)
        self._lives.pop().close()
        self.start(self.life.parallelism)
        self.poll_on()
        check_same(self.life.rows, expected, f"{self.story}, and from the last checkpoint once more")
        for life in self._lives:  # a crash closes nothing; in this process they would keep threads and files
            life.close()


def check_first_epoch(run: SourceRun, polls: int, after: int) -> None:
    """Crashed before its first checkpoint completed."""
    run.poll(polls)
    run.checkpoint()
    run.poll_on()
    run.start(after)


def check_going_back(run: SourceRun, polls: int, after: int) -> None:
    """Crashed after a completed checkpoint, and after one that was aborted."""
    run.poll(polls)
    done = run.checkpoint()
    run.poll_on()  # completions come late: what was polled meanwhile is in no checkpoint
    run.complete(done)
    run.poll_on()
    given_up = run.checkpoint()
    run.poll_on()
    run.abort(given_up)
    run.poll_on()
    run.start(after)


def check_lost_word(run: SourceRun, polls: int, after: int) -> None:
    """Crashed after a checkpoint, before the source was notified of its completion."""
    run.poll(polls)
    run.complete(run.checkpoint(), is_lost=True)
    run.poll_on()
    run.start(after)
    run.poll_on()
    run.complete(run.checkpoint())
    run.poll_on()
    run.start(after)


def check_rescaling(run: SourceRun, polls: int, after: int) -> None:
    """Stopped with checkpoints, and started at one parallelism after the other."""
    before = run.life.parallelism
    run.poll(polls)
    for parallelism in (after, 1, before):
        run.complete(run.checkpoint())
        run.start(parallelism)
        run.poll_on()


SCENARIOS: tuple[Callable[[SourceRun, int, int], None], ...] = (
    check_first_epoch,
    check_going_back,
    check_lost_word,
    check_rescaling,
)


def check_crashes(
    fresh: Callable[[], Source],
    parallelisms: Sequence[int],
    polls: int,
    polls_max: Callable[[int], int],
    expected: Sequence[Row],
) -> None:
    """Run every scenario at every pair of parallelisms.

    Args:
        fresh: makes the source; another one each time if reading changes something outside.
        parallelisms: numbers of subtasks to begin with, and to go on with.
        polls: how many read everything at parallelism 1.
        polls_max: for a parallelism, how many polls are too many.
        expected: all records.

    Raises:
        AssertionError: records were lost or came twice; the message tells the story.
    """
    moments = range(0, polls + 1, max(1, polls // CRASHES_MAX))
    for before, after in itertools.product(parallelisms, repeat=2):
        for scenario, moment in itertools.product(SCENARIOS, moments):
            story = f"{_title(scenario)}, after poll {moment}, parallelism {before} to {after}"
            run = SourceRun(fresh(), before, polls_max(max(before, after)), story)
            scenario(run, moment, after)
            run.finish(expected)


def _title(scenario: Callable[..., None]) -> str:
    return (scenario.__doc__ or "").partition("\n")[0].rstrip(".")
