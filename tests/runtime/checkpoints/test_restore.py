"""Restore: the snapshots of all former subtasks, kept apart, and their new owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import polars as pl
import pytest
import xxhash
from tests.runtime.checkpoints.frozen_cases import joined, made
from tests.runtime.checkpoints.test_snapshot_writer import Writing

import headgate as hg
from headgate.codec.snapshot import LISTS_PREFIX
from headgate.errors import CorruptionError, UsageError
from headgate.model.config import Guarantee
from headgate.model.failure import FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import HookState, KeyGroups, Manifest, SnapshotPart, SubtaskEntry
from headgate.model.plan import PipelineDefinition, Plan
from headgate.operators.base import RestoredState
from headgate.operators.checkpoint_listeners import OperatorLists
from headgate.protocol.subtasks.loops import NO_ROUNDS, RoundProgress
from headgate.protocol.subtasks.subtask import SnapshotWritten
from headgate.runtime.checkpoints.restore import (
    NotRestorable,
    RestoredSnapshots,
    check_compatible,
    former_locations,
    parts_for_worker,
    read_restored,
)
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.runtime.worker.worker import failure_of
from headgate.state.rocksdb import database_snapshot
from headgate.state.snapshot import OwnedKeys
from headgate.storage.memory import MemoryStorage


def plan_of(parallelism: int) -> Plan:
    pipeline = hg.Pipeline("p", parallelism=parallelism)
    stream = pipeline.source(hg.Generator(rows=1), name="in")
    counts = stream.key_by("key").reduce(lambda total, row: row, name="sum")
    counts.sink(hg.Discard(), name="out")
    return pipeline.definition().plan


class Former:
    """A checkpoint: per subtask its state, its positions, and whether it had finished."""

    def __init__(self, parallelism: int, finished: Mapping[int, bool] | None = None) -> None:
        self.storage = MemoryStorage()
        plan = plan_of(parallelism)
        entries = tuple(self._entry(plan, s, bool((finished or {}).get(s.index))) for s in plan.subtasks())
        self.manifest = Manifest(CheckpointId(1), Generation(1), parallelism, 128, entries)

    def _entry(self, plan: Plan, subtask: SubtaskId, is_finished: bool) -> SubtaskEntry:
        target = SubtaskTarget(SnapshotDestination(self.storage, "p", Generation(1), 0), subtask, CheckpointId(1))
        sections: dict[str, bytes] = {}
        for node in plan.vertex(subtask.vertex).nodes:
            sections[f"finished/{node.name}"] = b"\x01" if is_finished else b"\x00"
            if node.name == "sum":
                target.put("state/sum", [f"sum of {subtask.index}".encode()])
            if node.name == "in":
                sections["positions/in"] = msgspec.msgpack.encode(self.positions(subtask.index))
        target.put_bundle(sections)
        return SubtaskEntry(subtask, target.finish())

    def positions(self, index: int) -> dict[str, bytes]:
        return {f"split-{index}": bytes([index])}

    def restored(self, worker: int, parallelism: int) -> RestoredSnapshots:
        plan = plan_of(parallelism)
        messages = parts_for_worker(self.manifest, plan, WorkerIndex(worker))
        return read_restored(self.storage, "p", WorkerIndex(worker), plan, messages)


def sums(former: Former, worker: int, parallelism: int) -> list[tuple[int, int, bytes]]:
    vertex = next(v for v in plan_of(parallelism).vertices if not v.is_source)
    states = former.restored(worker, parallelism).states("sum", vertex)
    return [(state.subtask_index, state.parallelism, bytes(state.payload)) for state in states]


def restored_of(
    storage: MemoryStorage, parts: tuple[SnapshotPart, ...], worker: int = 0, parallelism: int = 1
) -> list[RestoredState]:
    """Return what the reduce of ``worker`` restores of the only former subtask, which left ``parts``."""
    plan = plan_of(parallelism)
    vertex = next(v for v in plan.vertices if not v.is_source)
    manifest = Manifest(CheckpointId(1), Generation(1), 1, 128, (SubtaskEntry(SubtaskId(vertex.id, 0), parts),))
    messages = parts_for_worker(manifest, plan, WorkerIndex(worker))
    return read_restored(storage, "p", WorkerIndex(worker), plan, messages).states("sum", vertex)


@pytest.mark.parametrize(
    ("after", "seen"), [(1, ["0123"]), (2, ["01", "23"]), (3, ["01", "12", "23"]), (4, list("0123"))]
)
def test_a_worker_is_sent_only_the_key_groups_that_it_owns(after: int, seen: list[str]) -> None:
    storage = MemoryStorage()
    target = SubtaskTarget(
        SnapshotDestination(storage, "p", Generation(1), 0), SubtaskId(VertexId("sum"), 0), CheckpointId(1)
    )
    for quarter in range(4):
        target.put("state/sum", [b"%d" % quarter], key_groups=KeyGroups(quarter * 32, 32))
    parts = target.finish()
    found = ["".join(bytes(s.payload).decode() for s in restored_of(storage, parts, w, after)) for w in range(after)]
    assert found == seen


def test_a_first_start_restores_nothing() -> None:  # C37
    plan = plan_of(2)
    assert parts_for_worker(None, plan, WorkerIndex(0)) == []
    restored = read_restored(MemoryStorage(), "p", WorkerIndex(0), plan, [])
    assert restored.is_empty
    assert restored.positions("in") is None
    assert all(restored.states("sum", v) == [] and not restored.is_finished(v) for v in plan.vertices)


def test_at_the_same_parallelism_a_worker_gets_what_its_own_subtasks_wrote() -> None:  # R15
    former = Former(3)
    assert [sums(former, worker, 3) for worker in range(3)] == [[(i, 3, f"sum of {i}".encode())] for i in range(3)]
    sent = parts_for_worker(former.manifest, plan_of(3), WorkerIndex(1))
    assert {(r.subtask.vertex, r.subtask.index) for r in sent if r.subtask.vertex != "in"} == {("sum", 1)}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2), (2, 3)])
def test_at_another_parallelism_every_worker_gets_every_snapshot(before: int, after: int) -> None:  # R15
    former = Former(before)
    for worker in range(after):
        assert sums(former, worker, after) == [(i, before, f"sum of {i}".encode()) for i in range(before)]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_reader_gets_the_positions_of_all_former_readers(after: int) -> None:
    former = Former(2)
    for worker in range(after):
        assert former.restored(worker, after).positions("in") == {"split-0": b"\x00", "split-1": b"\x01"}


def test_a_subtask_without_positions_or_rounds_has_none_to_give() -> None:
    former = Former(3)
    kept = tuple(entry for entry in former.manifest.entries if entry.subtask != SubtaskId(VertexId("in"), 0))
    former.manifest = replace(former.manifest, entries=kept)
    restored = former.restored(0, 3)
    assert restored.positions("in") == {"split-1": b"\x01", "split-2": b"\x02"}
    assert all(restored.rounds(vertex) == NO_ROUNDS for vertex in plan_of(3).vertices)


def test_two_positions_of_one_split_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Former, "positions", lambda self, index: {"a": bytes([index])})
    with pytest.raises(UsageError, match="source 'in' has two positions of split 'a', the second one from subtask 1"):
        Former(2).restored(0, 2).positions("in")
    monkeypatch.setattr(Former, "positions", lambda self, index: {"a": b"same"})
    assert Former(2).restored(0, 2).positions("in") == {"a": b"same"}


@pytest.mark.parametrize(
    ("finished", "after", "expected"),
    [
        ({0: True, 1: True}, 3, [True, True, True]),
        ({0: True, 1: True}, 1, [True]),
        ({0: True}, 1, [False]),
        ({0: True}, 3, [False, False, False]),
        ({0: True}, 2, [True, False]),
    ],
)
def test_a_vertex_is_finished_only_if_all_former_subtasks_were(
    finished: dict[int, bool], after: int, expected: list[bool]
) -> None:  # at the same parallelism each subtask for itself
    former = Former(2, finished)
    for vertex in plan_of(after).vertices:
        assert [former.restored(worker, after).is_finished(vertex) for worker in range(after)] == expected


def test_a_snapshot_that_is_gone_names_its_file() -> None:
    former = Former(2)
    handle: SnapshotPart = former.manifest.entries[0].parts[0]
    former.storage.delete(f"p/{handle.path}")
    with pytest.raises(CorruptionError, match="no file") as caught:
        former.restored(0, 1)
    assert caught.value.path == handle.path


def loop_former(count: int, progress: Mapping[int, RoundProgress], worker: int, parallelism: int) -> RestoredSnapshots:
    """Return what ``worker`` restores of ``count`` former heads (here: subtasks of the reduce) in these rounds."""
    formers = {index: {"rounds/sum": memoryview(msgspec.msgpack.encode(one))} for index, one in progress.items()}
    return RestoredSnapshots(WorkerIndex(worker), plan_of(parallelism), formers, count)


SUM = next(vertex for vertex in plan_of(1).vertices if not vertex.is_source)


@pytest.mark.parametrize("after", [1, 3])
def test_after_a_rescale_rounds_go_on_from_the_lowest_round_of_any_head(after: int) -> None:  # L36
    """A head that is ahead has passed a probe that the others have not: its round is not over."""
    progress = {0: RoundProgress(4, 6, 7), 1: RoundProgress(4, 5, 9)}
    for worker in range(after):
        assert loop_former(2, progress, worker, after).rounds(SUM) == RoundProgress(closed=4, started=5, highest=9)
    assert [loop_former(2, progress, worker, 2).rounds(SUM) for worker in range(2)] == list(progress.values())


def test_heads_that_have_not_started_hold_the_rounds_of_all_back() -> None:  # L36
    progress = {0: RoundProgress(-1, 0, 3), 1: RoundProgress(-1, -1, -1)}
    assert loop_former(2, progress, 0, 1).rounds(SUM) == RoundProgress(closed=-1, started=-1, highest=3)


def test_operators_on_both_sides_of_the_end_of_a_round_are_not_merged() -> None:
    progress = {0: RoundProgress(4, 5, 7), 1: RoundProgress(5, 6, 9)}
    assert [loop_former(2, progress, worker, 2).rounds(SUM) for worker in range(2)] == list(progress.values())
    with pytest.raises(NotRestorable, match=r"can only be restored at parallelism 2; run with that") as raised:
        loop_former(2, progress, 0, 1).rounds(SUM)
    assert failure_of(raised.value).kind is FailureKind.DETERMINISTIC, "nobody starts it again"


def edited(parallelism: int) -> Plan:
    """``plan_of`` with an operator more in both chains."""
    pipeline = hg.Pipeline("p", parallelism=parallelism)
    stream = pipeline.source(hg.Generator(rows=1), name="in").filter(pl.col("key") > 0, name="new-filter")
    counts = stream.key_by("key").reduce(lambda total, row: row, name="sum")
    counts.filter(pl.col("key") > 1, name="newer-filter").sink(hg.Discard(), name="out")
    return pipeline.definition().plan


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_vertex_with_an_operator_that_the_snapshot_does_not_know_has_not_finished(after: int) -> None:
    """It has never seen the end of its input, so it must: an operator that holds records back sends them then."""
    former = Former(2, {0: True, 1: True})
    plan = edited(after)
    for worker in range(after):
        messages = parts_for_worker(former.manifest, plan, WorkerIndex(worker))
        restored = read_restored(former.storage, "p", WorkerIndex(worker), plan, messages)
        assert [vertex.is_source for vertex in plan.vertices] == [True, False]
        assert not any(restored.is_finished(vertex) for vertex in plan.vertices)
        assert all(former.restored(worker, after).is_finished(vertex) for vertex in plan_of(after).vertices)


def test_a_checkpoint_that_is_not_exact_is_restored_from_all_former_subtasks() -> None:
    former = Former(2)
    vertex = next(v for v in plan_of(2).vertices if any(n.name == "sum" for n in v.nodes))
    assert [state.subtask_index for state in former.restored(1, 2).states("sum", vertex)] == [1]
    former.manifest = replace(former.manifest, mode=Guarantee.AT_LEAST_ONCE)
    found = former.restored(1, 2).states("sum", vertex)
    assert [(state.subtask_index, state.is_exact) for state in found] == [(0, False), (1, False)]


def test_files_of_a_database_are_restored_as_rows_and_shared_by_the_next_snapshot(  # SF15
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_snapshot, "SIZE_BYTES_MIN", 0)
    live, writing, plan = made("rocksdb-reduce"), Writing(OwnedKeys(KeyGroups(0, 128), 128)), plan_of(1)
    contents = live.contents(joined(live.freeze().encode()))
    for checkpoint in (1, 2):
        writing.start(checkpoint, live.freeze())
        writing.wait()
        writing.writer.completed(CheckpointId(checkpoint))
    first, second = (event.entry for event in writing.finish() if isinstance(event, SnapshotWritten))
    assert {part.path for part in first.parts} & {part.path for part in second.parts}
    for entry in (first, second):
        manifest = Manifest(CheckpointId(2), Generation(1), 1, 128, (entry,))
        messages = parts_for_worker(manifest, plan, WorkerIndex(0))
        restored = read_restored(writing.storage, "p", WorkerIndex(0), plan, messages)
        (state,) = restored.states("node", plan.vertices[-1])
        assert live.contents(bytes(state.payload)) == contents
        assert state.files is not None


def with_lists(kind: str, parallelism: int) -> Former:
    """Return a checkpoint in which each subtask of the reduce left a part ``kind`` of operator state, too."""
    former = Former(parallelism)
    entries = []
    for entry in former.manifest.entries:
        part = SnapshotPart(1, 0, "", b"%d" % entry.subtask.index, section=f"{kind}/sum")
        part = replace(part, checksum=xxhash.xxh3_64_intdigest(part.inline))
        is_reduce = entry.subtask.vertex == "sum"
        entries.append(replace(entry, parts=(*entry.parts, part)) if is_reduce else entry)
    former.manifest = replace(former.manifest, entries=tuple(entries))
    return former


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3)])
def test_what_the_first_subtask_wrote_for_a_broadcast_side_is_sent_to_every_worker(before: int, after: int) -> None:
    former = with_lists("broadcast", before)
    vertex = next(v for v in plan_of(after).vertices if not v.is_source)
    for worker in range(after):
        restored = former.restored(worker, after)
        found = [(state.subtask_index, bytes(state.payload)) for state in restored.broadcast("sum")]
        seen = range(before) if before != after else sorted({0, worker})
        assert found == [(index, b"%d" % index) for index in seen]
        assert restored.lists("sum", vertex) == []
        assert not restored.is_empty


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["lists", "union"])
def test_the_parts_of_a_union_are_sent_to_every_worker(kind: str, before: int, after: int) -> None:
    former = with_lists(kind, before)
    vertex = next(v for v in plan_of(after).vertices if not v.is_source)
    for worker in range(after):
        restored = former.restored(worker, after)
        found = [(state.subtask_index, bytes(state.payload)) for state in restored.lists("sum", vertex)]
        everybody = [(index, b"%d" % index) for index in range(before)]
        assert found == (everybody if kind == "union" or before != after else [everybody[worker]])
        own = [(i, before, f"sum of {i}".encode()) for i in range(before) if before != after or i == worker]
        assert [(s.subtask_index, s.parallelism, bytes(s.payload)) for s in restored.states("sum", vertex)] == own


def test_finished_flags_of_others_are_not_taken_for_ones_own_when_unions_come_with_them() -> None:
    former = with_lists("union", 2)
    plan = plan_of(2)
    for vertex in plan.vertices:
        restored = former.restored(0, 2)
        assert not restored.is_finished(vertex)
        assert not restored.is_partly_finished(vertex)


def test_lists_are_parts_of_their_own_with_rows_that_are_counted() -> None:
    lists = OperatorLists("sum")
    lists.declare("kept", int).put([1, 2, 3])
    frozen = lists.freeze(is_union=False)
    assert frozen is not None
    storage = MemoryStorage()
    target = SubtaskTarget(
        SnapshotDestination(storage, "p", Generation(1), 1 << 20), SubtaskId(VertexId("sum"), 0), CheckpointId(1)
    )
    target.put_state("sum", frozen, LISTS_PREFIX)
    (part,) = target.finish()
    assert (part.section, part.rows) == ("lists/sum", {"sum": {"kept": 3}})
    read_part(storage, "p", part)
    with pytest.raises(CorruptionError, match="4 rows of state 'kept'"):
        read_part(storage, "p", replace(part, rows={"sum": {"kept": 4}}))


def definition_of(directory: Path, column: str = "k") -> PipelineDefinition:
    """A pipeline that counts lines of ``directory`` in one key."""
    directory.mkdir(exist_ok=True)
    pipeline = hg.Pipeline("p", parallelism=1)
    lines = pipeline.source(hg.TextFiles(str(directory), follow=True), name="in")
    keyed = lines.with_columns(**{column: pl.lit("k")}).key_by(column)
    keyed.reduce(lambda total, row: row, name="sum").sink(hg.FileSink(str(directory / "out")), name="out")
    pipeline.forget_hook("forgotten")
    return pipeline.definition()


def test_a_checkpoint_that_does_not_fit_is_refused_and_says_what_helps(tmp_path: Path) -> None:  # R12, EI9
    before = definition_of(tmp_path / "a")
    taken = Manifest(
        CheckpointId(5),
        Generation(1),
        1,
        before.plan.max_parallelism,
        (),
        lineages=before.lineages,
        state_texts=before.plan.state_texts(),
        hooks=(HookState("forgotten", b"1"),),
    )
    check_compatible(taken, before)
    with pytest.raises(UsageError, match="holds 4 bytes of hook 'shop'"):
        check_compatible(replace(taken, hooks=(HookState("shop", b"1234"),)), before)
    with pytest.raises(UsageError) as caught:
        check_compatible(taken, definition_of(tmp_path / "a", "other"))
    assert "'sum'" in str(caught.value)


def test_where_a_source_read_is_known_where_it_reads_elsewhere(tmp_path: Path) -> None:  # EV17
    before, after = definition_of(tmp_path / "a"), definition_of(tmp_path / "b")
    taken = Manifest(CheckpointId(5), Generation(1), 1, 128, (), lineages=before.lineages)
    place = str(tmp_path / "a")
    assert former_locations(taken, after) == {"in": [(place, place)]}
    assert former_locations(taken, before) == {}
