"""The product in the machine room: sound code passes, and a seed is repeated exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import IS_DEEP
from tests.mutants.harness import around, patched

from headgate.connectors.files import line_file
from headgate.connectors.files.file_position import FilePosition
from headgate.model.plan import Vertex
from headgate.runtime.checkpoints.restore import NotRestorable, RestoredSnapshots
from headgate.sim import __main__ as command
from headgate.sim.machine.world import Violation
from headgate.sim.product.checkpoint_publication import Outside, Publisher
from headgate.sim.product.fault_injection import FOCUS_RATE, SUBJECTS, draw_focus
from headgate.sim.product.run import Run, run_seed
from headgate.sim.product.settings import Graph, Net, Placed
from headgate.sim.product.source import FileInputs
from headgate.sim.product.steps import Window
from headgate.sim.product.workloads import KEPT, TYPED, WORKLOADS, Branches, Workload, draw_splits
from headgate.sim.scenario_table import SCENARIOS
from headgate.sim.streams.background_traffic import BackgroundTraffic
from headgate.sim.streams.streams import StreamRun
from headgate.store import writer

SMOKE = (63, 1068, 2170, 10356, 67, 347, 1009, 2029, 4225)
"""What was found: commits and owners that a power cut took, hints read wrongly, a replaced driver that ran on for ever,
a stopped one that swept what its heir had prepared. ``make check`` runs the first fifty seeds beside the tests."""


def test_the_product_passes_every_smoke_seed() -> None:
    results = [run_seed(seed) for seed in (SMOKE if IS_DEEP else SMOKE[:4])]
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


DEEP: dict[str, tuple[int, ...]] = {
    "": (3, 6),
    "streams": (7,),
    "savepoints": (3, 43),  # a fault meets the probe of a place; a drain ends with one
    "log-files": (6,),  # several series of rotated files are looked at
    "upgrades": (0, 1, 3, 23),  # one for each kind of change; files that were prepared again are removed
    "user-pipelines": (1, 8),
    "cancellation": (7,),  # where a pipeline was begun is reported
}
"""Of a scenario that is not here: seed 1."""
SEEDS = DEEP if IS_DEEP else {**DEEP, "savepoints": (43,), "upgrades": (3,), "user-pipelines": (8,)}
CHOSEN = SCENARIOS if IS_DEEP else SCENARIOS[::4]
"""One in four scenarios: what could draw by chance is shared by all of them."""

PROGRAM = """
import socket, sys
socket.gethostname = lambda: "machine" + sys.argv[1]
from headgate.sim.scenario_table import SCENARIOS
run_seeds = {scenario.name: scenario.run_seed for scenario in SCENARIOS}
for word in sys.argv[2:]:
    name, seed = word.split(":")
    result = run_seeds[name](int(seed))
    print(word, result.digest, result.events_count, result.virtual_ms)
"""


def _begin(hash_seed: str) -> subprocess.Popen[str]:
    words = [f"{scenario.name}:{seed}" for scenario in CHOSEN for seed in SEEDS.get(scenario.name, (1,))]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, hash_seed, *words], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_seed_of_every_scenario_has_one_digest_wherever_it_runs() -> None:
    running = [_begin(hash_seed) for hash_seed in ("0", "4711")]
    first, second = (process.communicate(timeout=600)[0].splitlines() for process in running)
    assert all(process.returncode == 0 for process in running)
    assert first == second


FILE_SMOKE = (8, 23, 30, 37, 38, 41) if IS_DEEP else (8, 38)


def test_seeds_that_read_files_pass() -> None:
    """Some grow, and some are killed and renamed."""
    usual = line_file.BLOCK_BYTES
    runs = [Run(seed) for seed in FILE_SMOKE]
    assert all(run.files.is_drawn for run in runs)
    assert any(run.settings.grows for run in runs)
    assert [(seed, str(found)) for seed, run in zip(FILE_SMOKE, runs, strict=True) if (found := run.run())] == []
    assert usual == line_file.BLOCK_BYTES
    assert len(runs[0].started) > 2
    assert any(not path.endswith(".jsonl") for path in runs[0].files.paths)


def test_a_position_stands_behind_the_rows_of_its_bytes() -> None:
    run = Run(8)
    files = FileInputs(8, run.tasks, run.faults)
    rows = [{"k": 1, "n": n} for n in range(3)]
    files.update([{"s0-0": rows}], grows=False)
    assert files.present([{"s0-0": rows, "s0-1": rows}]) == [{"s0-0": rows}]
    for offset, count in ((0, 0), (17, 1), (33, 1), (34, 2), (51, 3)):
        assert files.rows_read("/input/source0/s0-0.jsonl", FilePosition(offset).encode(), rows) == count
    assert files.split_of("/input/source0/s0-0.jsonl.4") == "s0-0"


OF_DAMAGE, OF_DECLINES, OF_OVERLAPS = 73, 7, 1
QUICK_TYPED = {
    157: "odd-keys",
    137: "odd-batches",
    111: "float-key",
    117: "day-key",
    105: "measured",
    155: "buffered",
}
"""A seed for each of ``typed.TYPED``."""


def test_seeds_draw_their_subjects_apart_from_everything_else() -> None:
    drawn = [draw_focus(seed) for seed in range(2_000)]
    titles = Counter(focus.title for focus in drawn if focus is not None)
    assert set(titles) == {focus.title for focus in SUBJECTS}
    assert abs(titles.total() / 2_000 - FOCUS_RATE) < 0.05
    assert drawn[:20] == [draw_focus(seed) for seed in range(20)]


@pytest.mark.parametrize(
    ("seed", "title", "met"),
    [
        (OF_DAMAGE, "damage", "cannot be used: "),
        (OF_DECLINES, "checkpoints that end otherwise than well", "declined: "),
        (OF_OVERLAPS, "checkpoints that overlap and expire", "did not complete within its timeout"),
    ],
)
def test_a_seed_meets_its_subject(seed: int, title: str, met: str) -> None:
    run = Run(seed, is_traced=True)
    assert run.focus is not None
    assert run.focus.title == title
    assert run.run() is None
    assert any(met in line for line in run.world.story)


def test_every_kind_of_typed_workload_has_a_seed() -> None:
    assert sorted(QUICK_TYPED.values()) == sorted(workload.name for workload in TYPED)


@pytest.mark.parametrize("seed", QUICK_TYPED)
def test_keys_and_measures_of_many_types_come_through(seed: int) -> None:
    run = Run(seed)
    assert QUICK_TYPED[seed] in run.settings.job.columns
    assert run.run() is None


def test_a_neighbour_notices_what_the_store_should_have_refused() -> None:
    with patched(writer, "check_events", lambda stream, batch: None):
        assert any("should have refused" in str(StreamRun(seed).run()) for seed in (6, *range(40)))


def test_a_neighbour_notices_what_is_lost() -> None:
    def forgetful(self: BackgroundTraffic, rows_count: int, *, is_there: bool = True) -> object:
        if is_there:
            self._expected[-1] += 1  # told of it, and it is nowhere
        return real(self, rows_count, is_there=is_there)

    real = BackgroundTraffic._batch
    with patched(BackgroundTraffic, "_batch", forgetful):
        assert any("next-door/events lost [-1]" in str(StreamRun(seed).run()) for seed in (2, *range(10)))


PUBLISHING_SMOKE = (27, 77, 145, 146, 209, 214) if IS_DEEP else (77, 145)


def test_seeds_publish_what_they_read() -> None:
    runs = {seed: Run(seed) for seed in PUBLISHING_SMOKE}
    assert [(seed, str(found)) for seed, run in runs.items() if (found := run.run())] == []
    outside = runs[145].settings.outside
    assert outside is not None
    assert len(outside.published) > 100
    assert len(set(outside.published.values())) > 2, "several generations had a part in it"
    assert len(outside.kept) > 5


def test_seeds_that_do_not_publish_are_what_they_were() -> None:
    assert not Outside(0, *_parts(Run(0))).is_drawn
    assert Run(0).settings.outside is None
    assert Run(27, is_plain=True).settings.outside is None


def _parts(run: Run) -> tuple[Any, ...]:
    return run.tasks, run.faults, lambda: run.history


@pytest.fixture
def outside() -> Outside:
    return Outside(4, *_parts(Run(4)))


def test_copies_of_a_function_publish_to_one_world(outside: Outside) -> None:
    from headgate.operators.user_functions import copied

    function = Publisher(outside, "publish0")
    found = copied("publish0", function)
    assert found is not function
    assert found.outside is outside


@pytest.mark.parametrize(
    ("rows", "published", "kept", "said"),
    [
        ([1, 2], [1], [1, 2], r"1 rows are not public \[2\]"),
        ([1], [1, 2], [1], r"1 were not read \[2\]"),
        ([1, 2], [1, 2], [1], r"lack \[2\]"),
        ([1], [1], [1, 1], r"have \[1\] too often"),
    ],
)
def test_what_is_not_public_or_not_read_is_a_violation(
    outside: Outside, rows: list[int], published: list[int], kept: list[int], said: str
) -> None:
    outside.published = dict.fromkeys(published, "w")
    outside.kept = {7: {("publish0", 0): kept}}
    with pytest.raises(Violation, match=said):
        outside.check([{"n": n} for n in rows], 7)


def test_what_a_restart_took_back_must_not_be_public(outside: Outside) -> None:
    outside._published(1, "a worker")
    outside._published(1, "a worker")
    assert outside._history().finding is None
    outside._published(1, "its successor")
    assert "a restart took it back" in str(outside._history().finding)


@pytest.mark.parametrize(("checkpoint", "before", "said"), [(9, 0, "the log has none"), (1, 1, "behind 1")])
def test_a_completion_that_is_none_is_a_violation(outside: Outside, checkpoint: int, before: int, said: str) -> None:
    outside._history().written[1, 1] = object()  # type: ignore[assignment]
    outside.completed("publish0", checkpoint, before)
    assert said in str(outside._history().finding)


def test_an_abort_of_what_was_completed_is_a_violation(outside: Outside) -> None:
    outside.aborted("publish0", 1)
    assert outside._history().finding is None
    outside._history().completed[1] = 1
    outside.aborted("publish0", 1)
    assert "it was completed" in str(outside._history().finding)
