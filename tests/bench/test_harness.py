"""The frame of the benchmarks: verdicts, the last line, finding benchmarks."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from bench.harness import Options, Result, at_least, at_most, bench_names, median, report, skipped
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
