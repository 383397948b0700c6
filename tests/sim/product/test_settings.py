"""Random graphs: the plain model knows neither time nor order, and what a list or a disk does to a run."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.conftest import few

from headgate.sim import __main__ as program
from headgate.sim import coverage_table
from headgate.sim.coverage_table import Covered, table
from headgate.sim.machine.world import Fault
from headgate.sim.product.run import Run
from headgate.sim.product.settings import Drawing, Graph, Loop, Net, Placed, PlainNet
from headgate.sim.product.source import Pace
from headgate.sim.product.steps import Map, Record, Records, Window
from headgate.sim.product.workloads import WORKLOADS, Branches, draw_splits

ROOT = Path(__file__).parents[3]


def some_records(rng: random.Random, count: int) -> list[Record]:
    return [Record(rng.randrange(5), n, rng.randrange(9), n, rng.randrange(4)) for n in range(count)]


@pytest.mark.parametrize("seed", few(range(40), 8))
def test_what_a_loop_makes_of_records_depends_on_no_order(seed: int) -> None:
    rng = random.Random(seed)
    net = Drawing(rng, lambda loop, number: None, grows=False).net(1)
    rows = some_records(rng, 30)
    found: list[list[Records]] = []
    for pieces in (1, 3, 30):
        shuffled = rng.sample(rows, len(rows))
        plain = PlainNet(net)
        whole: list[Records] = [Counter() for _ in range(1 + len(net.placed))]
        for piece in range(pieces):
            made = plain.feed([Counter(shuffled[piece::pieces])], ends=piece == pieces - 1)
            for place, records in enumerate(made):
                whole[place] += records
        found.append(whole)
    assert found[0] == found[1] == found[2]


def test_a_loop_drops_what_comes_back_too_often_and_lets_the_rest_out() -> None:
    body = Net(1, (Placed("same", Map("rekey", "row"), (0,)),), (1,))
    loop = Loop(body, modulus=50, has_rounds=True, rounds_max=2).plain()
    made = loop.feed(Counter([Record(0, 1, 1, 0, left=0), Record(0, 1, 1, 0, left=1), Record(0, 1, 1, 0, left=2)]))
    assert made == Counter([Record(1, 1, 1, 0, 0), Record(4, 1, 1, 0, 0)])


def test_a_list_that_grows_is_read_to_its_end() -> None:
    run = Run(1)
    run.faults.heal()
    settings = run.settings
    settings.inputs, settings.grows, settings.hidden = [draw_splits(run.world.random, 0, 3, 240)], True, {"s0-0"}
    settings.pace, settings.parallelism = Pace(4, 20), 2
    net = Net(1, (Placed("sums", Window(), (0,)),), (1,))
    settings.job = Graph(net, {"out": (0, 1)}, is_picky=False)
    run.world.at(299, settings.hidden.clear)
    run.world.at(300, lambda: run.started[0].process.kill())
    assert run.run() is None
    assert [len(started.listed[0]) for started in run.started][:2] == [2, 3]


class Once:
    """Faults of which one strikes once."""

    def __init__(self, fault: Fault) -> None:
        self._fault: Fault | None = fault

    def strikes(self, fault: Fault) -> bool:
        strikes, self._fault = fault is self._fault, None if fault is self._fault else self._fault
        return strikes


@pytest.mark.parametrize("fault", [Fault.DAMAGE, Fault.AWAY, Fault.DENIED], ids=lambda fault: fault.title)
def test_damage_is_repaired_by_doing_what_the_error_says(fault: Fault) -> None:
    run = Run(3, is_traced=True)
    run.faults.heal()
    settings, damage = run.settings, run.damage
    settings.hidden.clear()
    settings.inputs, settings.job = [draw_splits(run.world.random, 0, 2, 240)], Branches(WORKLOADS[:2])
    settings.pace, settings.on_damaged, settings.roll_interval = Pace(4, 20), None, 0
    damage._faults = Once(fault)  # type: ignore[assignment]
    run.world.at(500, lambda: run.started[0].process.kill())
    assert run.run() is None
    text = "\n".join(run.world.story)
    assert "PipelineFailed" in text
    assert not damage._backup
    assert damage._away is None


def test_the_table_leaves_thin_files_aside() -> None:
    thin = next(iter(coverage_table.THIN))
    text = table({"protocol/align.py": Covered(10, 9, 4, 2), thin: Covered(100, 0, 0, 0)}, 5_000)
    assert text.startswith("5,000 seeds ran 78.6% ")
    assert "| align.py | 9 | 10 | 2 | 4 | 79% |" in text
    assert thin.rsplit("/", 1)[1] not in text


def test_the_list_of_thin_files_is_short_and_on_the_page() -> None:
    source, page = coverage_table.SOURCE, (ROOT / "docs" / "spec" / "simulator.md").read_text(encoding="utf-8")
    measured = {str(path.relative_to(source)) for path in coverage_table.measured_files()}
    told = re.fullmatch(r"left out: ([\d,]+) lines of thin files, and ([\d,]+) lines .*", coverage_table.left_out())
    assert told is not None
    assert 1_000 < int(told[1].replace(",", "")) < 1_600
    said = re.search(r"some ([\d,]+) lines:", page)
    assert said is not None
    assert int(told[2].replace(",", "")) == pytest.approx(int(said[1].replace(",", "")), rel=0.1)
    assert measured.issuperset(coverage_table.THIN)
    assert not measured.intersection(coverage_table.ELSEWHERE)
    assert [name for name, why in coverage_table.THIN.items() if f"| `{name}` | {why} |" not in page] == []
    assert [name for name in coverage_table.ELSEWHERE if f"`{name}" not in page] == []
    assert all((source / name).exists() for name in coverage_table.ELSEWHERE)


def test_what_no_seed_imports_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_table, "ROOMS", ("runtime/driver", "runtime/wire", "store/catalogue"))
    found = coverage_table.measure(63, 1, 1, [])
    measured = coverage_table.measured_files()
    missing = {str(path.relative_to(coverage_table.SOURCE)) for path in measured} - found.keys()
    assert {name for name in missing if _has_statements(coverage_table.SOURCE / name)} == set()
    assert found["runtime/driver/driver.py"].statements_run > 0
    assert found["runtime/wire/connection.py"].statements > found["runtime/wire/connection.py"].statements_run


def _has_statements(path: Path) -> bool:
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text(encoding="utf-8")).body)


@pytest.mark.parametrize(("run", "code"), [(900, 0), (899, 1)])
def test_the_table_fails_below_its_least(run: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "measure", lambda *_: {"protocol/align.py": Covered(1_000, run, 0, 0)})
    assert program.main(["--coverage", "--seeds", "1"]) == code
