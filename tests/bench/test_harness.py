"""The frame of the benchmarks: verdicts, the last line, finding benchmarks."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench.harness import Options, Result, at_least, at_most, bench_names, median, report, skipped
from bench.machine import CpuMeter, machine, percentile, spread
from bench.memory import judge
from bench.pairs import Overhead, Pair, quantile, with_first
from bench.plot import Scale, drawn, figures_of, main
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console


def printed(result: Result) -> tuple[int, str]:
    output = io.StringIO()
    status = report("sample", result, Console(file=output, width=80))
    return status, output.getvalue()


@pytest.mark.parametrize(
    ("figure", "target", "verdict"),
    [
        (3.0, at_least(3), "met"),
        (2.999, at_least(3), "missed"),
        (0.05, at_most(0.05), "met"),
        (0.051, at_most(0.05), "missed"),
        (-0.01, at_most(0.05), "met"),
        (math.nan, at_most(5), "missed"),
        (math.inf, at_least(5), "missed"),
        (None, at_least(0), "missed"),
        (True, at_least(0), "missed"),
        ("9", at_least(0), "missed"),
        (None, skipped(at_least(15), "not installed"), "skipped"),
    ],
)
def test_a_target_is_met_only_by_a_finite_number_within_its_bound(
    figure: object, target: dict[str, float | str], verdict: str
) -> None:
    result = Result({"ratio": figure}, {"ratio": target})
    assert result.verdict("ratio") == verdict
    assert result.met is (verdict != "missed")


def test_a_target_without_a_figure_is_missed() -> None:
    assert Result({}, {"ratio": at_least(0)}).verdict("ratio") == "missed"


def test_last_line_is_one_json_object_even_on_a_narrow_terminal() -> None:
    figures = {"ratio": 3.5, "runs": [{"events_per_s": 1}] * 50, "machine": {"cpu": "[x]"}, "odd": math.nan}
    status, text = printed(Result(figures, {"ratio": at_least(3), "other": skipped(at_least(1), "not installed")}))
    line = json.loads(text.splitlines()[-1])
    assert status == 0
    assert line == {
        "bench": "sample",
        "figures": figures | {"odd": None},
        "targets": {"ratio": {"at_least": 3}, "other": {"at_least": 1, "skipped": "not installed"}},
        "met": True,
    }
    assert "skipped: not installed" in " ".join(text.split())


def test_a_missed_target_is_exit_status_1() -> None:
    status, text = printed(Result({"ratio": 2.0}, {"ratio": at_least(3)}))
    assert status == 1
    assert json.loads(text.splitlines()[-1])["met"] is False
    assert "missed" in text


def test_benchmarks_are_found_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text('NAME = "good"\nraise SystemExit\n')
    (tmp_path / "typed.py").write_text('NAME: str = "typed"\n')
    (tmp_path / "other.py").write_text('NAME = "good"\n')
    (tmp_path / "helper.py").write_text("x = 1\n")
    assert bench_names(tmp_path) == ["good", "typed"]
    assert "windowed_count" in bench_names()


def test_settings_are_numbers_or_one_clear_sentence() -> None:
    options = Options(quick=True, settings={"seconds": "2.5", "keys": "10,1_000", "bad": "x"})
    assert options.number("seconds", 9) == 2.5
    assert options.number("pairs", 3, quick=2) == 2
    assert Options().number("pairs", 3, quick=2) == 3
    assert options.numbers("keys", [1]) == [10, 1000]
    assert options.numbers("sizes", [1]) == [1]
    with pytest.raises(ValueError, match="setting bad must be a number, found 'x'"):
        options.number("bad", 1)
    with pytest.raises(ValueError, match="setting bad must be integers separated by commas, found 'x'"):
        options.numbers("bad", [1])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_median_has_as_many_values_below_as_above(values: list[float]) -> None:
    middle = median(values)
    assert sum(value < middle for value in values) <= len(values) / 2
    assert sum(value > middle for value in values) <= len(values) / 2


def test_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median([])


SECONDS = [float(second) for second in range(100)]


def test_growth_after_the_warm_up_is_slope_and_share() -> None:
    used = [100e6 + max(second - 20, 0) * 1e6 for second in SECONDS]
    judged = judge(SECONDS, used)
    assert judged["slope_mb_per_min"] == pytest.approx(60)
    assert judged["growth"] == pytest.approx(0.594, abs=0.01)
    assert judged["max_mb"] == pytest.approx(179)


def test_memory_that_fills_during_the_warm_up_is_flat() -> None:
    judged = judge(SECONDS, [min(second, 19.0) * 1e6 for second in SECONDS])
    assert judged["slope_mb_per_min"] == pytest.approx(0, abs=1e-6)
    assert judged["growth"] == 0


def test_what_fills_for_a_while_is_told_from_what_goes_on() -> None:
    filled = judge(SECONDS, [100e6 + min(second, 50.0) * 1e6 for second in SECONDS])
    assert filled["slope_mb_per_min"] > 10
    assert filled["slope_of_second_half_mb_per_min"] == pytest.approx(0, abs=1e-6)
    leaking = judge(SECONDS, [100e6 + second * 1e6 for second in SECONDS])
    assert leaking["slope_of_second_half_mb_per_min"] == pytest.approx(60)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="found 8"):
        judge(SECONDS[:10], SECONDS[:10])


def test_the_overhead_is_the_share_of_the_rate_without() -> None:
    assert Pair(100.0, 95.0).overhead == pytest.approx(0.05)
    assert Pair(100.0, 110.0).overhead == pytest.approx(-0.1), "noise may make it faster"


def test_the_median_is_that_of_the_pairs_own_overheads() -> None:
    # The machine grows ten times slower: medians of the rates would say nothing, each pair says 10 %.
    found = Overhead.of([Pair(100.0 / slower, 90.0 / slower) for slower in (1, 2, 4, 8, 10)])
    assert found.median == pytest.approx(0.1)
    assert found.spread == pytest.approx(0.0)


def test_the_spread_is_the_distance_of_the_quartiles() -> None:
    found = Overhead.of([Pair(100.0, 100.0 - cost) for cost in (4, 0, 1, 3, 2)])
    assert (found.least, found.low, found.median, found.high, found.most) == pytest.approx((0, 0.01, 0.02, 0.03, 0.04))
    assert found.spread == pytest.approx(0.02)


def test_quantiles_lie_between_their_neighbours() -> None:
    assert quantile([1.0], 0.25) == 1.0
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([1.0, 2.0], 1.0) == 2.0


def test_no_pairs_have_no_overhead() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Overhead.of([])


def test_every_other_pair_begins_with_the_other_half() -> None:
    assert [with_first(number) for number in range(4)] == [False, True, False, True]


TICKS_S = 0.05
"""The kernel counts user and system time, of parent and child, in ticks of 10 ms each."""
BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\n"


def test_cpu_seconds_include_children_that_are_alive() -> None:
    meter = CpuMeter()
    with subprocess.Popen(
        [sys.executable, "-c", BURN + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"burnt\n"
        assert 0.3 - TICKS_S <= meter.cpu_seconds() < 5
        assert child.stdin is not None
        child.stdin.write(b"\n")


def test_cpu_seconds_include_children_that_ended() -> None:
    meter = CpuMeter()
    subprocess.run([sys.executable, "-c", BURN], check=True, capture_output=True)
    assert 0.3 - TICKS_S <= meter.cpu_seconds() < 5
    assert meter.seconds() > 0


@pytest.mark.parametrize(
    ("share", "expected"), [(0, 1), (0.01, 1), (0.07, 7), (0.5, 50), (0.99, 99), (0.991, 100), (1, 100)]
)
def test_percentile_is_the_smallest_value_not_exceeded_by_that_share(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


def test_percentiles_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match=r"between 0 and 1, found 99"):
        percentile([1.0], 99)


def test_spread_is_relative_to_the_middle() -> None:
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([0.0, 0.0]) == 0.0


def test_machine_names_what_a_reader_needs_to_compare() -> None:
    here = machine()
    assert {"cores", "cpu", "memory_gib", "python", "packages", "load_1min"} <= here.keys()
    assert here["cpu"]


SVG = "{http://www.w3.org/2000/svg}"


def measurement(mode: str, interval_ms: int, middle: float, bound: float = 0.05) -> dict[str, Any]:
    overhead = {"median": middle, "low": middle - 0.01, "high": middle + 0.01}
    return {"mode": mode, "interval_ms": interval_ms, "at_most": bound, "overhead": overhead, "pairs": [{}] * 7}


FIGURES: dict[str, Any] = {
    "machine": {"cores": 2, "cpu": "A & B"},
    "measurements": [
        measurement(mode, interval_ms, middle)
        for mode in ("exactly_once", "at_least_once")
        for interval_ms, middle in ((10_000, -0.005), (1_000, 0.02), (250, 0.11))
    ],
}


def test_every_measurement_is_a_point_and_lower_is_further_down() -> None:
    picture = ElementTree.fromstring(drawn(FIGURES))
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in picture.iter(f"{SVG}circle")]
    assert len(points) == 6
    first = points[:3]
    assert first == sorted(first, key=lambda point: point[0]), "long intervals are on the left"
    assert [y for _, y in first] == sorted((y for _, y in first), reverse=True), "they cost less"
    assert len(list(picture.iter(f"{SVG}polyline"))) == 2


def test_the_texts_name_intervals_modes_and_machine() -> None:
    texts = [element.text for element in ElementTree.fromstring(drawn(FIGURES)).iter(f"{SVG}text")]
    for text in ("10 s", "1 s", "250 ms", "exactly once", "at least once", "0 %"):
        assert text in texts
    assert texts[-1] == "2 cores, A & B"
    assert any(text is not None and "7 pairs" in text for text in texts)


def test_everything_is_within_the_scale() -> None:
    scale = Scale.over(FIGURES["measurements"], 3)
    assert scale.least <= -0.015
    assert scale.most >= 0.12
    assert any(abs(tick) < 1e-9 for tick in scale.ticks)
    assert scale.y(scale.most) < scale.y(0.0) < scale.y(scale.least)


def test_the_last_line_of_a_run_or_of_a_series_is_drawn(tmp_path: Path) -> None:
    line = json.dumps({"bench": "checkpoint_overhead", "figures": FIGURES})
    series = json.dumps({"bench": "all", "figures": {"checkpoint_overhead": FIGURES, "memory": {}}})
    assert figures_of(f"a table\n{line}\n") == figures_of(f"{series}\n\n") == FIGURES
    (tmp_path / "run.txt").write_text(line)
    assert main([str(tmp_path / "run.txt"), str(tmp_path / "run.svg")]) == 0
    assert (tmp_path / "run.svg").read_text() == drawn(FIGURES)


@pytest.mark.parametrize("text", ["", "no JSON", '{"bench": "memory", "figures": {"minutes": 1}}', "[1]"])
def test_anything_else_is_refused_and_nothing_is_written(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.txt").write_text(text)
    assert main([str(tmp_path / "run.txt"), str(tmp_path / "run.svg")]) == 1
    assert "cannot draw" in capsys.readouterr().err
    assert not (tmp_path / "run.svg").exists()


def test_a_wrong_call_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "python -m bench.plot OUTPUT SVG" in capsys.readouterr().err
