"""The picture of the cost of checkpoints: it shows what was measured, and nothing that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench.plot import Scale, drawn, figures_of, main

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
