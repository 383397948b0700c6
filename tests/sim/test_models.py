"""The parts of the simulated world keep what docs/spec/simulator.md says of them."""

from __future__ import annotations

import random

import pytest

from headgate.errors import FencedError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Claim, Committable, Manifest, StateHandle
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import Damage, replaced_by
from headgate.sim.disk import Disk
from headgate.sim.faults import Fault, Faults
from headgate.sim.history import Committed, HistoryEvent
from headgate.sim.storemodel import Status, StoreModel, Transaction, Undecidable, payload_of
from headgate.sim.workload import draw_workload
from headgate.sim.world import Crashed, Process, Violation, World

SUBTASK = SubtaskId(VertexId("s"), 0)


def disk(notes: list[HistoryEvent] | None = None) -> Disk:
    return Disk(World(0), Faults(random.Random(0)), (notes if notes is not None else []).append)


def claim(generation: int, owner: str = "me") -> Claim:
    return Claim(Generation(generation), owner, 0)


def manifest(checkpoint: int, *handles: StateHandle) -> Manifest:
    return Manifest(CheckpointId(checkpoint), Generation(1), 1, 8, ())


def permit(generation: int) -> CommitPermit:
    return CommitPermit(CheckpointId(1), Generation(generation))


def committable(transaction: Transaction) -> Committable:
    return Committable("out", CheckpointId(1), 0, Generation(1), payload_of(transaction.id))


def prepared(store: StoreModel) -> Transaction:
    transaction = store.begin("out", 0, Generation(1))
    transaction.records.append(("s", 0, 0, 0, 0))
    store.prepare(transaction, CheckpointId(1))
    return transaction


def test_a_dead_process_runs_nothing_and_a_paused_one_runs_it_later_in_order() -> None:
    world = World(1)
    process, seen = Process(world, "p"), []
    process.post(1, seen.append, "a")
    process.post(2, process.pause)
    process.post(3, seen.append, "b")
    process.post(4, seen.append, "c")
    world.run(lambda: False, 10, 100)
    assert seen == ["a"]
    process.resume()
    process.post(5, process.kill, "end of test")
    process.post(9, seen.append, "d")
    world.run(lambda: False, 100, 100)
    assert seen == ["a", "b", "c"]


def test_an_assertion_in_a_machine_is_a_violation_and_a_crash_is_not() -> None:
    world = World(1)
    first, second = Process(world, "first"), Process(world, "second")

    def crash() -> None:
        raise Crashed("test")

    def fail() -> None:
        raise AssertionError("broken")

    first.post(1, crash)
    second.post(2, fail)
    with pytest.raises(Violation, match="second: AssertionError: broken"):
        world.run(lambda: False, 10, 100)
    assert not first.is_alive


def test_healing_ends_every_fault() -> None:  # X3
    faults = Faults(random.Random(1), rates=dict.fromkeys(Fault, 1.0), budget=1_000)
    assert faults.strikes(Fault.WORKER_CRASH)
    assert faults.is_storage_gone(0)
    faults.heal()
    assert not any(faults.strikes(fault) or faults.has(fault) for fault in Fault)
    assert not faults.is_storage_gone(0)


def test_faults_that_end_a_generation_share_a_budget() -> None:
    faults = Faults(random.Random(1), rates=dict.fromkeys(Fault, 1.0), budget=2)
    struck = [faults.strikes(f) for f in (Fault.WORKER_CRASH, Fault.LINK_LOSS, Fault.DRIVER_CRASH, Fault.COMMIT_FAILS)]
    assert struck == [True, True, False, True]


def test_an_entry_of_the_log_is_written_once() -> None:
    model = disk()
    assert model.put_if_absent(1, claim(1))
    assert not model.put_if_absent(1, claim(2))
    assert model.log[1] == claim(1)


def test_an_append_at_a_pruned_number_is_noticed() -> None:  # X8
    notes: list[HistoryEvent] = []
    model = disk(notes)
    for sequence, entry in enumerate((claim(1), manifest(1), manifest(2)), start=1):
        model.put_if_absent(sequence, entry)
    model.drop(CheckpointId(1), log_start=3)
    assert sorted(model.log) == [3]
    assert model.put_if_absent(2, manifest(9))
    assert not model.is_tail(2)
    assert model.is_tail(3)
    assert len(notes) == 3, "the append that means nothing is not an event"


def test_damaged_files_are_told_from_sound_ones() -> None:
    model = disk()
    handle = model.write_snapshot(SUBTASK, CheckpointId(1), Generation(1), b"state", 0)
    assert model.read(handle) == b"state"
    model.files[handle.path] = b"stabe"
    assert isinstance(model.read(handle), Damage)
    del model.files[handle.path]
    assert isinstance(model.read(handle), Damage)


def test_commits_are_idempotent_and_fenced() -> None:
    notes: list[HistoryEvent] = []
    store = StoreModel(notes.append)
    transaction = prepared(store)
    for _ in range(2):
        store.commit("out", permit(1), [committable(transaction)])
    assert sum(isinstance(note, Committed) for note in notes) == 1
    store.recover("out", Generation(2), [])
    assert transaction.status is Status.COMMITTED
    with pytest.raises(FencedError):
        store.commit("out", permit(1), [committable(transaction)])
    with pytest.raises(FencedError):
        store.begin("out", 0, Generation(1))


def test_recovery_aborts_all_but_what_is_kept_and_an_aborted_commit_is_impossible() -> None:
    store = StoreModel(lambda _: None)
    kept, lost = prepared(store), prepared(store)
    assert store.recover("out", Generation(2), [committable(kept)]) == 1
    store.commit("out", permit(2), [committable(kept)])
    with pytest.raises(Undecidable):
        store.commit("out", permit(2), [committable(lost)])
    assert store.undecided() == ()


def test_a_replaced_driver_is_told_by_whom() -> None:  # X9
    model = disk()
    for sequence, entry in enumerate((claim(1), claim(2), claim(3, "other"), claim(4)), start=1):
        model.put_if_absent(sequence, entry)
    log = model.observe()
    assert replaced_by(log, Generation(2), "me") == 3
    assert replaced_by(log, Generation(3), "me") is None
    assert replaced_by(log, Generation(1), "other") == 4


def test_the_plain_model_counts_what_a_broadcast_repeats() -> None:
    seeds = [draw_workload(random.Random(seed), 2) for seed in range(40)]
    assert any(max(w.expected["out0"].values(), default=0) > 1 for w in seeds)
    assert all(w.expected["out0"].keys() for w in seeds if w.ordered["out0"])
