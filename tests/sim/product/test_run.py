"""The product in the machine room: sound code passes, and a seed is repeated exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import IS_DEEP
from tests.mutants.harness import around

from headgate.model.plan import Vertex
from headgate.runtime.checkpoints.restore import NotRestorable, RestoredSnapshots
from headgate.sim import __main__ as command
from headgate.sim.machine.world import Violation
from headgate.sim.product.run import Run, run_seed
from headgate.sim.product.settings import Graph, Net, Placed
from headgate.sim.product.steps import Window
from headgate.sim.product.workloads import KEPT, WORKLOADS, Branches, Workload, draw_splits

SMOKE = (63, 67, 347, 1009, 1068, 2029, 2170, 4225, 10356)
"""What was found: commits and owners that a power cut took, hints read wrongly, a replaced driver that ran on for ever,
a stopped one that swept what its heir had prepared. ``make check`` runs the first fifty seeds beside the tests."""


def test_the_product_passes_every_smoke_seed() -> None:
    results = [run_seed(seed) for seed in (SMOKE if IS_DEEP else SMOKE[::2])]
    assert [(result.seed, str(result.violation)) for result in results if result.violation] == []


def test_who_moved_a_pipeline_while_a_round_ended_moves_it_back() -> None:
    """Every checkpoint counts as taken while a round ended; the first seed that changes the parallelism shows it."""

    def only_as_it_was(original: Any, self: RestoredSnapshots, vertex: Vertex) -> Any:
        if self._is_moved and self._formers:
            raise NotRestorable("it can only be restored as it was")
        return original(self, vertex)

    for seed in (5, *range(200)):
        with around(RestoredSnapshots, "rounds", only_as_it_was):
            result = run_seed(seed, is_traced=True)
        assert result.violation is None, seed
        refusals = [line for line in result.story if "it can only be restored as it was" in line]
        assert not any("restarts in" in line for line in refusals), "it cannot help"
        if any("PipelineFailed" in line for line in refusals):
            return
    pytest.fail("no seed changes the parallelism")


@pytest.mark.parametrize("workload", [*WORKLOADS, *KEPT], ids=lambda workload: workload.name)
def test_every_workload_ends_right_without_faults(workload: Workload) -> None:
    run = Run(1)
    run.faults.heal()
    run.settings.job = Branches((workload,))
    run.settings.hidden.clear()
    run.settings.inputs = [draw_splits(run.world.random, 0, 2, 120)]
    assert run.run() is None


def test_the_end_of_one_input_does_not_close_the_windows_of_an_idle_one() -> None:  # W19
    run = Run(1, events_max=20_000)  # it needs a fiftieth
    run.faults.heal()
    early, behind = (
        Placed("early", Window(is_early=True), (0,)),
        Placed("behind", Window(), (0, 1)),
    )
    run.settings.job = Graph(Net(1, (early, behind), (2,)), {"out": (2,)}, is_picky=False)
    run.settings.hidden.clear()
    run.settings.inputs = [draw_splits(run.world.random, 0, 1, 40)]
    run.settings.parallelism = 1
    assert run.run() is None


def test_much_input_comes_in_larger_batches_and_as_slowly() -> None:
    seen = set()
    for seed in range(60):
        settings = Run(seed).settings
        before = settings.pace
        settings.pack()
        times = settings.pace.batch_rows // before.batch_rows
        assert settings.pace.pause_ms == times * before.pause_ms
        rows_count = sum(len(rows) for splits in settings.inputs for rows in splits.values())
        seen.add((rows_count, times))
    assert seen == {(1, 1), (40, 1), (120, 1), (240, 2), (400, 4)} | {(0, 1)} & seen


def test_output_that_is_not_as_expected_is_a_violation() -> None:
    run = Run(2)
    run.faults.heal()
    run.settings.hidden.clear()
    run.settings.inputs = [draw_splits(run.world.random, 0, 2, 120)]
    honest = WORKLOADS[0]
    run.settings.job = Branches((replace(honest, expected=lambda rows: honest.expected(rows[2:])),))
    violation = run.run()
    assert isinstance(violation, Violation)
    assert violation.invariant == "I1"


def test_the_command_says_how_to_repeat_a_failing_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--seeds", "2", "--from", "7"]) == 0
    assert "2 seeds of the product, 0 violations" in capsys.readouterr().out
    monkeypatch.setattr(Run, "_verify", lambda self: (_ for _ in ()).throw(Violation("I1", "planted")))
    assert command.main(["--seed", "7"]) == 1
    assert "python -m headgate.sim --seed 7 --trace" in capsys.readouterr().out
