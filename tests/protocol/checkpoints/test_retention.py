"""Which files of snapshots may go: by reference, whatever happens in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tests.protocol.making import cp, gen

from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import SnapshotPart
from headgate.protocol.checkpoints.coordinator_events import DropCheckpoint
from headgate.protocol.checkpoints.retention import FileRetention, Retention, SharedFiles, StoredFile


def file(checkpoint: int, generation: int = 1, name: str = "v") -> StoredFile:
    return StoredFile(f"chk-{checkpoint}/{name}.g{generation}", cp(checkpoint), gen(generation))


def paths(*files: StoredFile) -> frozenset[str]:
    return frozenset(one.path for one in files)


def test_a_file_stays_while_a_retained_checkpoint_refers_to_it() -> None:  # SF4
    base, own = file(1), file(2)
    machine = FileRetention(gen(1), cp(1), {})
    machine.completed(cp(1), paths(base))
    machine.completed(cp(2), paths(own))
    assert machine.garbage([base, own]) == ()
    machine.completed(cp(3), paths(base, own))
    machine.dropped(cp(2))
    assert machine.garbage([base, own]) == ()
    machine.completed(cp(4), paths(own))
    machine.dropped(cp(3))
    assert machine.garbage([base, own]) == (base.path,)


def test_leftovers_of_dead_generations_go() -> None:  # SF8
    """Whatever their ids are: a driver that went back past damage has a newest checkpoint that is old."""
    skipped = file(7)
    machine = FileRetention(gen(2), cp(9), {cp(3): frozenset(), cp(7): paths(skipped)})
    machine.narrowed([cp(3)])
    leftover = file(8)
    assert machine.garbage([skipped, leftover]) == (skipped.path, leftover.path)


def test_what_an_upload_may_still_write_stays() -> None:  # SF5
    machine = FileRetention(gen(2), cp(4), {cp(3): frozenset()})
    machine.began(cp(4))
    late, under_way, later = file(3, 1), file(4, 2), file(9, 3)
    assert machine.garbage([late, under_way, later]) == (late.path,)
    machine.completed(cp(5), frozenset())
    assert machine.garbage([under_way, later]) == (under_way.path,)


def test_a_checkpoint_that_was_given_up_takes_no_shared_file_with_it() -> None:  # SF5
    shared, own = file(1), file(2)
    machine = FileRetention(gen(1), cp(1), {cp(1): paths(shared)})
    machine.began(cp(2))
    assert machine.unneeded([shared.path, own.path, own.path]) == (own.path,)


def test_the_base_of_an_upload_stays_until_it_is_over() -> None:  # SF6
    """Two checkpoints at once: the one that completes first has written anew what the other one shares."""
    shared = file(1)
    machine = FileRetention(gen(1), cp(1), {cp(1): paths(shared)})
    machine.began(cp(2))
    machine.began(cp(3))
    machine.completed(cp(2), frozenset())
    machine.dropped(cp(1))
    assert machine.garbage([shared]) == machine.unneeded([shared.path]) == ()
    machine.completed(cp(3), frozenset())
    assert machine.garbage([shared]) == (shared.path,)


def test_what_was_written_before_something_unreadable_stays() -> None:  # SF7
    machine = FileRetention(gen(2), cp(6), {cp(5): frozenset()})
    machine.set_aside(cp(6))
    assert machine.garbage([file(1), file(5), file(6)]) == (file(6).path,)
    machine.set_aside(cp(0))
    assert machine.garbage([file(1)]) == (file(1).path,)


class Story:
    """A pipeline's checkpoints, told by drawn steps; knows what is needed in its own way."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.there: dict[str, StoredFile] = {}
        self.log: list[tuple[CheckpointId, frozenset[str]]] = []
        """Manifests that may be restored, oldest first."""
        self.lost: list[frozenset[str]] = []
        """What manifests referred to that were set aside."""
        self.pending: dict[CheckpointId, frozenset[str]] = {}
        """Uploads under way, and the files of their base."""
        self.written: dict[CheckpointId, set[str]] = {}
        """What they have written."""
        self.prepared: set[str] = set()
        """Files of output whose checkpoint was given up: the next one needs them."""
        self.next = 1
        self.generation = 0
        self.start()

    # -- what happens -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new driver: what was under way is over; it restores the newest, or goes back past damage."""
        self.generation += 1
        self.pending, self.written, self.prepared = {}, {}, set()
        self.machine = FileRetention(Generation(self.generation), CheckpointId(self.next), dict(self.log))
        if len(self.log) > 1 and self.draw(st.booleans()):
            self.lost.append(self.log.pop()[1])
        self.machine.narrowed([checkpoint for checkpoint, _ in self.log])
        if self.lost:
            self.aside_below = CheckpointId(self.next)
        self.sweep()

    def begin(self) -> None:
        checkpoint, self.next = CheckpointId(self.next), self.next + 1
        self.pending[checkpoint] = self.log[-1][1] if self.log else frozenset()
        self.machine.began(checkpoint)

    def write(self, is_output: bool = False) -> None:
        """An upload of a checkpoint that is under way writes a file."""
        if self.pending:
            checkpoint = self.draw(st.sampled_from(sorted(self.pending)))
            made = file(checkpoint, self.generation, self.draw(st.sampled_from("abc")) + ("o" if is_output else ""))
            self.there[made.path] = made
            self.written.setdefault(checkpoint, set()).add(made.path)

    def complete(self) -> None:
        """It refers to some of its base, to what it wrote, and to the output that older ones had prepared."""
        if not self.pending:
            return
        checkpoint = self.draw(st.sampled_from(sorted(self.pending)))
        base = sorted(self.pending[checkpoint])
        shared = set(self.draw(st.lists(st.sampled_from(base), unique=True))) if base else set()
        own = self.written.get(checkpoint, set())
        output = {p for p in self.prepared if p in self.there and self.there[p].checkpoint <= checkpoint}
        output |= {p for c in self.pending if c <= checkpoint for p in self._outputs(c)}
        files = frozenset(shared | own | output)
        self.log.append((checkpoint, files))
        self.pending = {c: b for c, b in self.pending.items() if c > checkpoint}
        self.prepared -= output
        self.machine.completed(checkpoint, files)

    def abort(self) -> None:
        if self.pending:
            checkpoint = self.draw(st.sampled_from(sorted(self.pending)))
            own = {
                p for p, f in self.there.items() if f.checkpoint == checkpoint and not p.endswith(f"o.g{f.generation}")
            }
            base = self.pending.pop(checkpoint)
            self.prepared |= self._outputs(checkpoint)
            for path in self.machine.unneeded(sorted(own | base)):
                self.there.pop(path, None)

    def drop(self) -> None:
        if len(self.log) > 1:
            checkpoint, _ = self.log.pop(0)
            self.machine.dropped(checkpoint)
            self.sweep()

    def write_late(self) -> None:
        """A worker of a dead generation, or of a checkpoint that was given up, writes once more."""
        if self.next > 1:
            checkpoint = self.draw(st.integers(1, self.next - 1))
            generation = self.draw(st.integers(1, self.generation))
            made = file(checkpoint, generation, "late")
            self.there.setdefault(made.path, made)

    def sweep(self) -> None:
        self.machine.set_aside(self.aside_below if self.lost else CheckpointId(0))
        for path in self.machine.garbage(list(self.there.values())):
            del self.there[path]

    def discard(self) -> None:
        self.lost = []
        self.sweep()

    def _outputs(self, checkpoint: CheckpointId) -> set[str]:
        return {p for p, f in self.there.items() if f.checkpoint == checkpoint and p.endswith(f"o.g{self.generation}")}

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        retained: set[str] = set().union(*(files for _, files in self.log))
        under_way = (self.written.get(checkpoint, set()) for checkpoint in self.pending)
        needed = retained.union(*self.lost, *self.pending.values(), *under_way, self.prepared)
        assert needed <= self.there.keys(), f"needed and gone: {needed - self.there.keys()}"

    def check_no_leak(self) -> None:
        """Once everything has come to rest, nothing is there that nobody needs."""
        self.begin()
        self.pending = {c: b for c, b in self.pending.items() if c == self.next - 1}
        self.complete()
        self.discard()
        retained: set[str] = set().union(*(files for _, files in self.log))
        assert self.there.keys() == retained


STEPS: list[Callable[[Story], None]] = [
    Story.start,
    Story.begin,
    Story.begin,
    Story.write,
    Story.write,
    lambda story: story.write(is_output=True),
    Story.complete,
    Story.complete,
    Story.abort,
    Story.drop,
    Story.write_late,
    Story.sweep,
    Story.discard,
]


@pytest.mark.long
@settings(max_examples=200)
@given(st.data())
def test_no_story_deletes_a_needed_file_or_leaks_one_for_ever(data: st.DataObject) -> None:  # SF4, SF8
    tell(data)


def tell(data: st.DataObject) -> None:
    story = Story(data.draw)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=15, max_size=50)):
        step(story)
        story.check()
    story.check_no_leak()


@pytest.mark.parametrize(("count_max", "oldest"), [(0, 7), (1, 7), (2, 5), (3, 4), (9, 2)])
def test_the_newest_checkpoints_stay(count_max: int, oldest: int) -> None:  # C31, C35
    retention = Retention(count_max, [cp(2), cp(4), cp(5)])
    assert retention.all == (cp(2), cp(4), cp(5))
    assert retention.oldest_with(cp(7)) == oldest
    dropped = [number for number in (2, 4, 5) if number < oldest]
    assert retention.completed(cp(7)) == [DropCheckpoint(cp(number)) for number in dropped]
    assert retention.all == tuple(cp(number) for number in (2, 4, 5, 7) if number >= oldest)


Steps = list[tuple[str, int]]

SHARED_STEPS: Any = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "write", "write", "complete", "complete", "lose", "abort", "drop", "restart"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


class SharedStory:
    """One subtask, the coordinator, and the storage."""

    def __init__(self) -> None:
        self.generation = 1
        self.last = 0
        self.stored: dict[str, StoredFile] = {}
        self.completed: dict[int, frozenset[str]] = {}
        self.parts: dict[int, list[SnapshotPart]] = {}
        self.shared_count = 0
        self._begin()

    def _begin(self) -> None:
        newest = max(self.completed, default=0)
        restored = self.parts.get(newest, [])
        self.first = self.last + 1
        self.live = [part.name for part in restored]
        """The files that the database has."""
        self.shared = SharedFiles(restored)
        self.reserved: list[int] = []
        self.written: dict[int, frozenset[str]] = {}
        retained = {CheckpointId(number): files for number, files in self.completed.items()}
        self.retention = FileRetention(Generation(self.generation), CheckpointId(self.first), retained)
        self._sweep()

    def run(self, steps: Steps) -> None:
        for step, drawn in steps:
            getattr(self, step)(drawn)
            self.check()

    def reserve(self, drawn: int) -> None:
        if len(self.reserved) + len(self.written) < 3:
            self.last += 1
            self.retention.began(CheckpointId(self.last))
            self.reserved.append(self.last)

    def write(self, drawn: int) -> None:
        """The database has a new file, and perhaps has merged some."""
        if not self.reserved:
            return
        number = self.reserved.pop(0)
        new = f"chk-{number}.g{self.generation}"
        self.live = [*self.live[drawn if drawn < 4 else 0 :], new]
        shareable = {part.name: part for part in self.shared.shareable()}
        self.shared_count += len(shareable.keys() & {*self.live})
        parts = [shareable.get(name) or self._stored(name, number) for name in self.live]
        self.shared.wrote(CheckpointId(number), parts)
        self.parts[number] = parts
        self.written[number] = frozenset(part.path for part in parts)

    def _stored(self, name: str, number: int) -> SnapshotPart:
        path = f"{name} of {number}.g{self.generation}"
        self.stored[path] = StoredFile(path, CheckpointId(number), Generation(self.generation))
        return SnapshotPart(1, 1, path, name=name)

    def complete(self, drawn: int) -> None:
        self._complete(drawn, is_heard=True)

    def lose(self, drawn: int) -> None:
        self._complete(drawn, is_heard=False)

    def _complete(self, drawn: int, *, is_heard: bool) -> None:
        if not self.written:
            return
        number = sorted(self.written)[drawn % len(self.written)]
        self.completed[number] = self.written.pop(number)
        self.retention.completed(CheckpointId(number), self.completed[number])
        for older in [one for one in self.written if one < number]:  # subsumed
            self._delete(self.written.pop(older))
        self.reserved = [one for one in self.reserved if one > number]
        if is_heard:
            self.shared.completed(CheckpointId(number))

    def abort(self, drawn: int) -> None:
        if self.written:
            self._delete(self.written.pop(sorted(self.written)[drawn % len(self.written)]))

    def _delete(self, files: frozenset[str]) -> None:
        for path in self.retention.unneeded(files):
            self.stored.pop(path, None)

    def drop(self, drawn: int) -> None:
        """All but the newest one."""
        if len(self.completed) > 1:
            *older, newest = sorted(self.completed)
            self.retention.dropped(CheckpointId(older[-1]))
            self.completed = {newest: self.completed[newest]}
            self._sweep()

    def restart(self, drawn: int) -> None:
        self.generation += 1
        self._begin()

    def _sweep(self) -> None:
        for path in self.retention.garbage(self.stored.values()):
            del self.stored[path]

    def check(self) -> None:
        may_count = [*self.completed.values(), *self.written.values()]
        assert frozenset().union(*may_count) <= self.stored.keys(), "a file is gone that somebody needs"

    def end(self) -> None:
        """Nothing is under way: the newest checkpoint's files stay, and no others."""
        self.reserve(0)
        self.write(7)
        if self.written:
            self.complete(len(self.written) - 1)
        self.drop(0)
        self.restart(0)
        self.drop(0)
        newest = max(self.completed, default=0)
        kept = frozenset().union(*self.completed.values())
        assert self.stored.keys() == kept or newest == 0


THREE_UNDER_WAY = [("reserve", 0)] * 3 + [("write", 7), ("write", 7), ("complete", 0), ("write", 7), ("lose", 0)]


@given(SHARED_STEPS)
@example([*THREE_UNDER_WAY, ("drop", 0), ("complete", 0)])
def test_what_may_be_shared_is_in_whatever_may_be_the_newest(steps: Steps) -> None:  # SF15, SF4, SF8
    story = SharedStory()
    story.run(steps)
    story.end()


def test_something_is_shared() -> None:
    story = SharedStory()
    story.run([("reserve", 0), ("write", 7), ("complete", 0)] * 5 + [("restart", 0)] + [("reserve", 0), ("write", 7)])
    assert story.shared_count > 8
