"""Every checker rejects hand-made bad histories (X4): one that never fails would prove nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from headgate.model.graph import Edge, Graph, Node, Role
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.manifest import Committable, Manifest, StateHandle, SubtaskEntry
from headgate.model.plan import make_plan
from headgate.sim import history
from headgate.sim.checkers import Checkers
from headgate.sim.history import Record, TransactionId
from headgate.sim.kinds import Kind, Spec
from headgate.sim.listing import folded
from headgate.sim.storemodel import payload_of
from headgate.sim.workload import Workload
from headgate.sim.world import Violation

GRAPH = Graph(
    (
        Node(NodeName("s"), Role.SOURCE, (), Spec(Kind.SOURCE)),
        Node(NodeName("out"), Role.SINK, (Edge(NodeName("s")),), Spec(Kind.SINK)),
    )
)
SUBTASK = SubtaskId(VertexId("s"), 0)
FIRST: Record = ("s/0", 0, 1, 10, 0)
SECOND: Record = ("s/0", 1, 1, 11, 0)
HANDLE = StateHandle(3, 7, "chk-0000000001/s-0.g1")


def checkers() -> Checkers:
    workload = Workload(GRAPH, {"out": Counter((FIRST, SECOND))}, {"out": frozenset({"s/0"})})
    return Checkers(workload, make_plan(GRAPH, 1, 8))


def transaction(serial: int = 1, generation: int = 1) -> TransactionId:
    return TransactionId("out", 0, Generation(generation), serial)


def manifest(checkpoint: int, *serials: int, generation: int = 1, handle: StateHandle = HANDLE) -> Manifest:
    committables = tuple(
        Committable("out", CheckpointId(checkpoint), 0, Generation(generation), payload_of(transaction(s, generation)))
        for s in serials
    )
    entries = (SubtaskEntry(SUBTASK, handle, committables),)
    return Manifest(CheckpointId(checkpoint), Generation(generation), 1, 8, entries)


def claim(sequence: int, generation: int) -> history.ClaimAppended:
    return history.ClaimAppended(sequence, Generation(generation))


def owned(sequence: int, generation: int, owner: str) -> history.ClaimAppended:
    return history.ClaimAppended(sequence, Generation(generation), owner)


def completed(sequence: int, checkpoint: int, *serials: int, generation: int = 1) -> list[history.HistoryEvent]:
    wrote = history.SnapshotWrote(Generation(generation), SUBTASK, CheckpointId(checkpoint), HANDLE)
    return [wrote, history.ManifestAppended(sequence, manifest(checkpoint, *serials, generation=generation))]


def committed(serial: int, *records: Record, checkpoint: int = 1, by: int = 1) -> history.Committed:
    return history.Committed(transaction(serial), CheckpointId(checkpoint), Generation(by), records)


def chosen(generation: int, checkpoint: int | None, *available: int) -> history.Chosen:
    start = None if checkpoint is None else CheckpointId(checkpoint)
    return history.Chosen(Generation(generation), start, (), tuple(CheckpointId(c) for c in available))


def barrier(checkpoint: int, *, is_barrier: bool = True) -> history.BarrierPassed:
    return history.BarrierPassed(Generation(1), SUBTASK, CheckpointId(checkpoint), is_barrier)


def show(checker: Checkers, events: list[history.HistoryEvent]) -> None:
    for event in events:
        checker.observe(event)


def test_a_good_history_passes() -> None:
    checker = checkers()
    rows = tuple((transaction(), 2, record) for record in (FIRST, SECOND))
    good = [claim(1, 1), chosen(1, None), *completed(2, 1, 1), committed(1, FIRST, SECOND), history.Read("out", rows)]
    for event in good:
        checker.observe(event)
    checker.observe(history.Inventory((), (), ()))
    checker.at_end()


BAD: dict[str, tuple[str, list[history.HistoryEvent]]] = {
    "a record that nobody expects": ("I1", [*completed(2, 1, 1), committed(1, ("s/0", 9, 1, 0, 0))]),
    "a record twice": ("I1", [*completed(2, 1, 1, 2), committed(1, FIRST), committed(2, FIRST)]),
    "a transaction twice": ("I1", [*completed(2, 1, 1), committed(1, FIRST), committed(1, FIRST)]),
    "a key out of order": ("I1", [*completed(2, 1, 1), committed(1, SECOND, FIRST)]),
    "a commit before the manifest": ("I1", [committed(1, FIRST), *completed(2, 1, 1)]),
    "a promise aborted": ("I1", [*completed(2, 1, 1), history.Aborted(transaction(1))]),
    "a restart before what is committed": (
        "I1",
        [*completed(2, 1), *completed(3, 2, 1), committed(1, FIRST, checkpoint=2), chosen(2, 1, 1, 2)],
    ),
    "operators finished twice": ("I1", [history.Finished(Generation(1), SUBTASK)] * 2),
    "a read that shrinks": (
        "I2",
        [
            *completed(2, 1, 1),
            committed(1, FIRST),
            history.Read("out", ((transaction(), 1, FIRST),)),
            history.Read("out", ()),
        ],
    ),
    "a read of half a transaction": (
        "I3",
        [*completed(2, 1, 1), committed(1, FIRST, SECOND), history.Read("out", ((transaction(), 2, FIRST),))],
    ),
    "a read of something uncommitted": ("I3", [history.Read("out", ((transaction(), 1, FIRST),))]),
    "an older checkpoint restored": ("I4", [*completed(2, 1), *completed(3, 2), chosen(2, 1, 1, 2)]),
    "a fresh start after a checkpoint": ("I4", [*completed(2, 1), chosen(2, None, 1)]),
    "a completed checkpoint that is not whole": ("I4", [*completed(2, 1), chosen(2, 1)]),
    "a fresh start because of damage": (
        "I4",
        [*completed(2, 1), history.Damage(CheckpointId(1), "flipped"), chosen(2, None)],
    ),
    "a replaced driver that comes back": (
        "I5",
        [
            owned(1, 1, "first"),
            history.Deployed("first", Generation(1), (0, 0), 1),
            owned(2, 2, "second"),
            owned(3, 3, "first"),
        ],
    ),
    "an id of two generations": (
        "I7",
        [
            history.Triggered(Generation(1), CheckpointId(4)),
            history.Triggered(Generation(2), CheckpointId(4)),
        ],
    ),
    "a manifest without a subtask": (
        "I4",
        [history.ManifestAppended(2, Manifest(CheckpointId(1), Generation(1), 1, 8, ()))],
    ),
    "a manifest with a snapshot of another generation": (
        "I8",
        [
            history.SnapshotWrote(Generation(1), SUBTASK, CheckpointId(1), HANDLE),
            history.ManifestAppended(2, manifest(1, generation=2)),
        ],
    ),
    "a manifest with a snapshot never written": ("I8", [history.ManifestAppended(2, manifest(1))]),
    "files without a checkpoint": ("I6", [history.Inventory((), ("chk-1/x",), ())]),
    "a transaction undecided": ("I6", [history.Inventory(("t prepared",), (), ())]),
    "a process alive": ("I6", [history.Inventory((), (), ("driver0",))]),
    "a generation claimed twice": ("I7", [claim(1, 1), claim(2, 1)]),
    "an entry of the log written twice": ("I7", [claim(2, 1), claim(2, 2)]),
    "completed ids that go back": ("I7", [*completed(2, 5), *completed(3, 4)]),
    "a trigger that goes back": ("I7", [history.Triggered(Generation(1), CheckpointId(i)) for i in (2, 1)]),
    "a trigger below what is completed": (
        "I7",
        [claim(1, 1), *completed(2, 5), history.Triggered(Generation(1), CheckpointId(4))],
    ),
    "a second barrier": ("I7", [barrier(1), barrier(1)]),
    "a snapshot after giving up": ("I7", [barrier(1, is_barrier=False), barrier(1)]),
    "a second cancel marker": ("I7", [barrier(1, is_barrier=False), barrier(1, is_barrier=False)]),
    "a watermark that goes back": ("I7", [history.WatermarkSent(Generation(1), SUBTASK, w) for w in (5, 4)]),
    "an attempt deployed twice": ("I7", [history.Deployed("d", Generation(g), (1, 0), 1) for g in (1, 2)]),
    "a manifest after a newer claim": ("I8", [claim(1, 1), claim(2, 2), *completed(3, 1)]),
    "a prepare after the fence": (
        "I8",
        [history.SinkFenced("out", Generation(2)), history.Prepared(transaction(1, generation=1))],
    ),
    "a commit after the fence": (
        "I8",
        [*completed(2, 1, 1), history.SinkFenced("out", Generation(2)), committed(1, FIRST, by=1)],
    ),
    "a limit exceeded": ("I10", [history.Level("timers", 41, 40)]),
}


@pytest.mark.parametrize("story", BAD)
def test_a_bad_history_is_rejected(story: str) -> None:
    invariant, events = BAD[story]
    checker = checkers()
    with pytest.raises(Violation) as found:
        show(checker, events)
    assert found.value.invariant == invariant


def test_the_last_event_is_the_one_that_is_rejected() -> None:
    for invariant, events in BAD.values():
        if invariant == "I1" and isinstance(events[0], history.Committed):
            continue  # this one breaks with its first event
        checker = checkers()
        for event in events[:-1]:
            checker.observe(event)


def test_lost_records_are_found_at_the_end() -> None:
    checker = checkers()
    for event in (*completed(2, 1, 1), committed(1, FIRST)):
        checker.observe(event)
    with pytest.raises(Violation, match="lost 1 records"):
        checker.at_end()


def test_damage_allows_exactly_what_was_rewound_to_be_produced_again() -> None:
    checker = checkers()
    events = [claim(1, 1), *completed(2, 1, 1), committed(1, FIRST), *completed(3, 2, 2)]
    events += [committed(2, SECOND, checkpoint=2), history.Damage(CheckpointId(2), "flipped")]
    events += [claim(4, 2), chosen(2, 1, 1), *completed(5, 3, 3, generation=2)]
    for event in events:
        checker.observe(event)
    again = history.Committed(transaction(3, 2), CheckpointId(3), Generation(2), (SECOND,))
    checker.observe(again)
    checker.at_end()
    more = history.Committed(transaction(4, 2), CheckpointId(3), Generation(2), (FIRST,))
    with pytest.raises(Violation, match="I1"):
        checker.observe(more)


def test_the_choice_of_a_generation_that_was_replaced_meanwhile_is_not_judged() -> None:
    checker = checkers()
    for event in (claim(1, 1), claim(2, 2), *completed(3, 1, generation=2), chosen(1, None, 1)):
        checker.observe(event)


# -- draining -------------------------------------------------------------------------------------------------------

SPLIT = Graph(
    (
        Node(NodeName("s"), Role.SOURCE, (), Spec(Kind.SOURCE, (("s/0", (FIRST, SECOND)),))),
        Node(NodeName("out"), Role.SINK, (Edge(NodeName("s")),), Spec(Kind.SINK)),
    )
)


def drained(*records: Record, read: int) -> Checkers:
    """Return checkers that saw ``records`` committed after a drain whose final checkpoint says ``read`` records."""
    workload = Workload(SPLIT, {"out": Counter((FIRST, SECOND))}, {"out": frozenset({"s/0"})})
    checker = Checkers(workload, make_plan(SPLIT, 1, 8))
    show(checker, [claim(1, 1), chosen(1, None), history.DrainAsked(), *completed(2, 1, 1), committed(1, *records)])
    show(checker, [history.Ended((("s/0", read),))])
    return checker


def test_after_a_drain_exactly_what_was_read_is_expected() -> None:  # E8
    drained(FIRST, read=1).at_end()


def test_after_a_drain_more_than_was_read_is_too_much() -> None:
    with pytest.raises(Violation, match="I1: out shows 1 too many"):
        drained(FIRST, SECOND, read=1).at_end()


def test_after_a_drain_what_was_read_must_be_there() -> None:
    with pytest.raises(Violation, match="I1: out lost 1 records"):
        drained(FIRST, read=2).at_end()


def test_without_a_drain_a_source_that_ends_early_has_lost_records() -> None:
    workload = Workload(SPLIT, {"out": Counter((FIRST, SECOND))}, {"out": frozenset({"s/0"})})
    checker = Checkers(workload, make_plan(SPLIT, 1, 8))
    show(checker, [claim(1, 1), chosen(1, None), *completed(2, 1, 1), committed(1, FIRST)])
    show(checker, [history.Ended((("s/0", 1),))])
    with pytest.raises(Violation, match="I1: out lost 1 records"):
        checker.at_end()


def grown(*records: Record, listed: int) -> Checkers:
    """A history whose final checkpoint was taken by a driver that listed so many records of the split."""
    workload = Workload(SPLIT, {"out": Counter((FIRST, SECOND))}, {"out": frozenset({"s/0"})})
    checker = Checkers(workload, make_plan(SPLIT, 1, 8))
    show(checker, [history.ListGrows(), claim(1, 1), chosen(1, None), *completed(2, 1, 1), committed(1, *records)])
    show(checker, [history.Ended((("s/0", listed),), (("s/0", listed),))])
    return checker


def test_what_a_grown_list_has_must_have_been_read_and_no_more() -> None:  # N1, X30
    grown(FIRST, listed=1).at_end()
    grown(FIRST, SECOND, listed=2).at_end()
    with pytest.raises(Violation, match="I1: out lost 1 records"):
        grown(FIRST, listed=2).at_end()
    with pytest.raises(Violation, match="I1: out shows 1 too many"):
        grown(FIRST, SECOND, listed=1).at_end()


def test_sums_that_came_in_parts_are_added_up() -> None:  # T10
    whole = Counter({("=c", 5, 1, 70, 0): 1, ("wv", 40, 1, 3, 0): 1, ("s/0", 1, 1, 2, 3): 1})
    parts = Counter({("=c", 2, 1, 30, 0): 1, ("=c", 3, 1, 40, 0): 1, ("wv", 40, 1, 1, 0): 3, ("s/0", 1, 1, 2, 3): 1})
    assert folded(whole) == folded(parts) == whole
    assert folded(parts) != folded(Counter({**parts, ("=c", 3, 1, 40, 0): 2}))
