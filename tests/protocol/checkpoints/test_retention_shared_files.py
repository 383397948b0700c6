"""Files that checkpoints share: whatever is aborted, dropped, swept or not heard of, none is missed, and none stays."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given

from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import SnapshotPart
from headgate.protocol.checkpoints.retention import FileRetention, SharedFiles, StoredFile

Steps = list[tuple[str, int]]

STEPS: Any = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "write", "write", "complete", "complete", "lose", "abort", "drop", "restart"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


class Story:
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


@given(STEPS)
@example([*THREE_UNDER_WAY, ("drop", 0), ("complete", 0)])
def test_what_may_be_shared_is_in_whatever_may_be_the_newest(steps: Steps) -> None:  # SF15, SF4, SF8
    story = Story()
    story.run(steps)
    story.end()


def test_something_is_shared() -> None:
    story = Story()
    story.run([("reserve", 0), ("write", 7), ("complete", 0)] * 5 + [("restart", 0)] + [("reserve", 0), ("write", 7)])
    assert story.shared_count > 8
