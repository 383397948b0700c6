"""Publishing on completion: random lives of a publisher against what completed checkpoints cover."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import headgate as hg
from headgate.operators.base import RestoredState
from headgate.operators.checkpoint_listeners import OperatorLists, RestoreContext, SnapshotContext


class Publisher(hg.PublishOnCheckpoint):
    item_type = int

    def __init__(self) -> None:
        self.published: list[int] = []

    def publish(self, items: list[int]) -> None:
        assert items, "nobody is bothered for nothing"
        self.published += items


class Life:
    """One generation of a publisher, restored from ``frozen`` of a completed checkpoint."""

    def __init__(self, frozen: bytes | None) -> None:
        self.function = Publisher()
        self.lists = OperatorLists("op")
        if frozen:
            self.lists.take([RestoredState(0, 1, memoryview(frozen))])
        self.function.restore(RestoreContext(self.lists, is_restored=frozen is not None))
        self.lists.close()

    def snapshot(self, checkpoint: int) -> bytes:
        self.function.snapshot(SnapshotContext(checkpoint))
        frozen = self.lists.freeze(is_union=False)
        return b"" if frozen is None else b"".join(memoryview(part).cast("B") for part in frozen.encode())


def lives_of_a_publisher(draw: Any) -> None:
    """Any order of records, snapshots, completions that are told or not, aborts, and failures."""
    life, checkpoint = Life(None), 0
    completed, restorable = -1, b""
    """How many records the newest completed checkpoint covers, and its state; records are numbered."""
    count = told = 0
    under_way: dict[int, tuple[int, bytes]] = {}
    published: set[int] = set()
    for step in draw(
        st.lists(st.sampled_from(["record", "snapshot", "complete", "silent", "abort", "fail"]), max_size=40)
    ):
        match step:
            case "record":
                life.function.ready(count)
                count += 1
            case "snapshot":
                checkpoint += 1
                under_way[checkpoint] = (count, life.snapshot(checkpoint))
            case "complete" | "silent" if under_way:
                ended = draw(st.sampled_from(sorted(under_way)))
                completed, restorable = under_way[ended]
                under_way = {c: found for c, found in under_way.items() if c > ended}
                if step == "complete":
                    life.function.notify_checkpoint_complete(ended)
                    told = completed
            case "abort" if under_way:
                ended = draw(st.sampled_from(sorted(under_way)))
                del under_way[ended]
                life.function.notify_checkpoint_aborted(ended)
            case "fail":
                published |= set(life.function.published)
                life, under_way = Life(restorable), {}
                count = told = max(completed, 0)
            case _:
                continue
        published |= set(life.function.published)
        assert published <= set(range(max(completed, 0))), "what a restart may take back is not public"
        assert published >= set(range(told)), "what is told is public"


@given(st.data())
def test_what_is_published_is_what_completed_checkpoints_cover(data: st.DataObject) -> None:  # C16
    lives_of_a_publisher(data.draw)


def test_a_late_completion_publishes_what_it_covers_and_nothing_newer() -> None:  # C16
    life = Life(None)
    for checkpoint in (1, 2, 3):
        life.function.ready(checkpoint * 10)
        life.snapshot(checkpoint)
    life.function.notify_checkpoint_complete(2)
    assert life.function.published == [10, 20]
    life.function.notify_checkpoint_complete(2)
    assert life.function.published == [10, 20]
    life.function.notify_checkpoint_complete(3)
    assert life.function.published == [10, 20, 30]


def test_an_aborted_checkpoint_leaves_its_items_to_the_next_one() -> None:  # C17
    life = Life(None)
    life.function.ready(1)
    life.snapshot(1)
    life.function.notify_checkpoint_aborted(1)
    restored = Life(life.snapshot(2))
    assert restored.function.published == [1]
    assert Life(restored.snapshot(3)).function.published == [], "what a restore has published is not kept"


def test_what_could_not_be_published_stays_pending() -> None:
    life = Life(None)
    life.function.ready(1)
    life.snapshot(1)

    def fail(items: list[Any]) -> None:
        raise OSError("gone")

    works, life.function.publish = life.function.publish, fail  # type: ignore[method-assign]
    try:
        life.function.notify_checkpoint_complete(1)
    except OSError:
        life.function.publish = works  # type: ignore[method-assign]
    assert Life(life.snapshot(2)).function.published == [1]
