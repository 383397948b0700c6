"""The verdict: what must be there, what must not be left, and state that is read at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import IS_DEEP

from headgate.codec.json_files import encode_log_entry
from headgate.connectors.files.publish_log import StagedFile, encode_files
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim, Manifest
from headgate.runtime.wire.spill import SpillBudget
from headgate.sim.machine.surroundings import Network
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Violation, World
from headgate.sim.product import verdict
from headgate.sim.product.run import Run
from headgate.sim.product.verdict import Order
from headgate.sim.product.workloads import WORKLOADS, Values
from headgate.sim.scenarios.savepoints import SavepointRun


def test_each_key_has_an_order_of_its_own() -> None:
    order = Order("out")
    order.follow([(1, 1), (2, 1), (1, 2)])
    order.follow([(2, 2), (1, 3), (2, 5)])


@pytest.mark.parametrize("rows", [[(1, 2), (1, 1)], [(1, 1), (2, 2), (1, 1)]])
def test_a_record_behind_a_later_one_of_its_key_is_a_violation(rows: list[Values]) -> None:
    order = Order("out")
    order.follow(rows[:1])
    with pytest.raises(Violation, match="out has number 1 of key 1 behind"):
        order.follow(rows[1:])


def test_workloads_that_count_are_in_order() -> None:
    assert [workload.name for workload in WORKLOADS if workload.rises] == ["reduced", "numbered"]


def claim(generation: int) -> bytes:
    return encode_log_entry(Claim(Generation(generation), "somebody", 0))


def manifest(checkpoint: int, generation: int) -> bytes:
    return encode_log_entry(Manifest(CheckpointId(checkpoint), Generation(generation), 1, 8, ()))


CHECKPOINTS = {
    "p/life": b"",
    "p/log-hint": b"",
    "p/log/0000000002": claim(1),
    "p/log/0000000003": manifest(3, 1),
    "p/log/0000000004": manifest(4, 1),
    "p/log/0000000005": claim(2),
    "p/ids/0000000004": b"",
    "p/chk-0000000003/v-0.g1": b"",
    "p/chk-0000000004/v-0.g1": b"",
    "p/aside/0000000000-0000000003/why": b"damaged",
    "p/aside/0000000000-0000000003/log-0000000001": b"",
    "p/chk-0000000002/v-0.g1": b"",
}


def test_what_two_retained_checkpoints_need_is_no_leak() -> None:
    assert list(verdict.of_checkpoints(CHECKPOINTS, retained=2)) == []


def test_a_damaged_checkpoint_between_retained_ones_is_no_leak() -> None:  # R51: entries go from the oldest on
    between = {
        "p/log/0000000006": manifest(5, 2),
        "p/aside/0000000003-0000000005/why": b"damaged",
    }
    assert list(verdict.of_checkpoints({**CHECKPOINTS, **between}, retained=2)) == []
    without = {path: data for path, data in {**CHECKPOINTS, **between}.items() if "-0000000005/" not in path}
    assert list(verdict.of_checkpoints(without, retained=2)) == ["the log has 3 manifests, and 2 are retained"]


def test_a_claim_before_a_damaged_entry_may_have_completed_something() -> None:
    log = {"p/log/0000000006": b"damaged", "p/log/0000000007": claim(3)}
    assert list(verdict.of_checkpoints({**CHECKPOINTS, **log}, retained=2)) == []
    log["p/log/0000000006"] = claim(7)
    (problem,) = verdict.of_checkpoints({**CHECKPOINTS, **log}, retained=2)
    assert problem.startswith("the log has claims of generations")


def test_what_was_set_aside_may_need_anything_older() -> None:  # SF7
    older = {"p/chk-0000000001/v-0.g1": b""}
    assert list(verdict.of_checkpoints({**CHECKPOINTS, **older}, retained=2)) == []
    without = {path: data for path, data in CHECKPOINTS.items() if "/aside/" not in path}
    assert len(list(verdict.of_checkpoints({**without, **older}, retained=2))) == 2


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("p/chk-0000000005/v-0.g1", b""),
        ("p/ids/0000000003", b""),
        ("p/log/0000000001", manifest(1, 1)),
        ("p/log/0000000006", claim(3)),
        ("p/probe-0011223344556677", b""),
        ("p/log/0000000007.tmp", b""),
    ],
)
def test_what_no_retained_checkpoint_needs_is_a_leak(path: str, data: bytes) -> None:
    assert len(list(verdict.of_checkpoints({**CHECKPOINTS, path: data}, retained=2))) == 1


FILE = StagedFile("part-p.out-0000000001-00000-0000000001-00000.jsonl", 1, 1, "00")
SINK = {
    FILE.name: b"1",
    "_committed/p.out/0000000001-00.json": encode_files([FILE]),
    "_claims/p.out/0000000002": b"",
    "_owners/p.out/0000000001": b"",
}


def test_what_was_committed_is_no_leak() -> None:
    assert list(verdict.of_sink(SINK)) == []


@pytest.mark.parametrize(
    "path",
    [
        "_staging/p.out/part.tmp",
        "_publishing/p.out/0000000001-00.json",
        "_claims/p.out/probe-0011223344556677",
        "_owners/p.out/0000000002",
        "_elsewhere/x",
        FILE.name.replace("-00000.", "-00001."),
    ],
)
def test_what_is_undecided_or_listed_nowhere_is_a_leak(path: str) -> None:
    assert len(list(verdict.of_sink({**SINK, path: b""}))) == 1


def parked(process: SimProcess, tasks: Tasks, network: Network, budget: SpillBudget) -> None:
    tasks.spawn(process, tasks.park, "reader")


def listening(process: SimProcess, tasks: Tasks, network: Network, budget: SpillBudget) -> None:
    network.listen(process)


def holding(process: SimProcess, tasks: Tasks, network: Network, budget: SpillBudget) -> None:
    budget.take_memory(1)


def spilling(process: SimProcess, tasks: Tasks, network: Network, budget: SpillBudget) -> None:
    budget.take_disk(1)


@pytest.mark.parametrize("leak", [parked, listening, holding, spilling])
def test_what_a_process_still_has_is_a_leak(leak: Callable[..., None]) -> None:
    tasks = Tasks(World(1))
    network, budget = Network(tasks, 0), SpillBudget(9, 9)
    process, other = SimProcess(tasks, "d0.w0"), SimProcess(tasks, "d0.w1")
    around: Any = (tasks, network, budget)
    leak(other, tasks, network, SpillBudget(9, 9))
    assert list(verdict.of_process(process, *around)) == []
    leak(process, *around)
    assert len(list(verdict.of_process(process, *around))) == 1


STATE_READER_SMOKE = [(1, SavepointRun), (8, Run), (2, SavepointRun), *((seed, Run) for seed in (9, 5, 2, 3))]
"""Without ``IS_DEEP`` only until enough was read."""


@pytest.fixture(autouse=True)
def _everybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "RATE", 1.0)


def read_states(seed: int, kind: type[Run] = Run) -> tuple[Violation | None, verdict.StoredStates]:
    run = kind(seed)
    violation = run.run()
    return violation, run.stored


def test_somebody_reads_the_state_of_seeds() -> None:
    states = rows = compared = 0
    for seed, kind in STATE_READER_SMOKE:
        violation, reader = read_states(seed, kind)
        assert violation is None, seed
        states, rows = states + reader.states_count, rows + reader.rows_count
        compared += reader.compared_count
        if not IS_DEEP and states > 20 and rows > 200 and compared > 1:
            break
    assert states > 20
    assert rows > 200
    assert compared > 1
