"""Draws what ``checkpoint_overhead`` measured: ``python -m bench.plot OUTPUT SVG``.

OUTPUT is a file with what the benchmark printed (or a series of all of them): its last line is read. Nothing else goes
into the picture. Pure but for the two files.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BENCH = "checkpoint_overhead"

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 84
MODE_COLOURS = {"exactly_once": "#1f5fa8", "at_least_once": "#c8641b"}
TARGET_COLOUR, GRID_COLOUR, TEXT_COLOUR = "#7a7a7a", "#e2e2e2", "#222222"
APART = 14.0
"""Pixels between the modes at one interval, so that their spreads do not hide each other."""

USAGE = "usage: python -m bench.plot OUTPUT SVG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, draw, write; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 2:
        print(USAGE, file=sys.stderr)
        return 2
    source, target = map(Path, given)
    try:
        figures = figures_of(source.read_text())
    except (OSError, ValueError) as error:
        print(f"cannot draw {source}: {error}", file=sys.stderr)
        return 1
    target.write_text(drawn(figures))
    return 0


def figures_of(output: str) -> Mapping[str, Any]:
    """Return the figures in the last line of what was printed.

    Raises:
        ValueError: that is no result of the benchmark.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    result = json.loads(lines[-1]) if lines else {}
    figures = result.get("figures", {}) if isinstance(result, dict) else {}
    if isinstance(result, dict) and result.get("bench") == "all":
        figures = figures.get(BENCH, {})
    if not figures.get("measurements"):
        raise ValueError(f"its last line is not a result of the benchmark {BENCH}")
    found: Mapping[str, Any] = figures
    return found


def drawn(figures: Mapping[str, Any]) -> str:
    """Return the picture: median overheads by interval, a line for each mode; quartiles as bars, targets as marks."""
    measurements: list[Mapping[str, Any]] = list(figures["measurements"])
    intervals = sorted({int(m["interval_ms"]) for m in measurements}, reverse=True)
    scale = Scale.over(measurements, len(intervals))
    parts = [*_frame(scale, intervals), *_targets(scale, intervals, measurements)]
    modes = list(dict.fromkeys(str(m["mode"]) for m in measurements))
    for number, mode in enumerate(modes):
        beside = (number - (len(modes) - 1) / 2) * APART
        parts += _line(scale, intervals, [m for m in measurements if m["mode"] == mode], mode, beside)
    parts += _legend(modes)
    parts += [
        _text(LEFT, HEIGHT - 22 + 14 * n, line, size=11) for n, line in enumerate(_caption(figures, measurements))
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>"]) + "\n"


class Scale:
    """From overheads and intervals to pixels."""

    def __init__(self, least: float, most: float, columns: int) -> None:
        """``least`` to ``most`` are shares and multiples of ``step``."""
        self.least, self.most, self._columns = least, most, columns

    @staticmethod
    def over(measurements: Sequence[Mapping[str, Any]], columns: int) -> Scale:
        """Return one that shows all quartiles and targets."""
        low = min([0.0, *(float(m["overhead"]["low"]) for m in measurements)])
        high = max(float(value) for m in measurements for value in (m["overhead"]["high"], m["at_most"]))
        step = _step(high - low)
        return Scale(math.floor(low / step) * step, (math.floor(high / step) + 1) * step, columns)

    @property
    def ticks(self) -> list[float]:
        """The shares at which there is a line."""
        step = _step(self.most - self.least)
        return [self.least + step * n for n in range(round((self.most - self.least) / step) + 1)]

    def x(self, column: int) -> float:
        """Return the middle of a column."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (column + 0.5) / self._columns

    def y(self, share: float) -> float:
        """Return where ``share`` is; more is further up."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.most - share) / (self.most - self.least)


def _step(span: float) -> float:
    """Return a round distance of lines, of which there are ten at most."""
    return next((step for step in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if span / step <= 10), 1.0)


def _frame(scale: Scale, intervals: Sequence[int]) -> list[str]:
    parts = [_text(LEFT, 24, "Throughput lost to checkpoints, by their interval", size=16)]
    for share in scale.ticks:
        y = scale.y(share)
        parts.append(_stroke(LEFT, y, WIDTH - RIGHT, y, TEXT_COLOUR if abs(share) < 1e-9 else GRID_COLOUR, 1))
        parts.append(_text(LEFT - 8, y + 4, f"{share * 100:.3g} %", size=12, anchor="end"))
    y = HEIGHT - BOTTOM + 22
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, y + 22, "checkpoint interval", size=12, anchor="middle"))
    return parts + [_text(scale.x(n), y, _duration(ms), size=12, anchor="middle") for n, ms in enumerate(intervals)]


def _targets(scale: Scale, intervals: Sequence[int], measurements: Sequence[Mapping[str, Any]]) -> list[str]:
    bounds = {int(m["interval_ms"]): float(m["at_most"]) for m in measurements}
    marks = [(scale.x(number), scale.y(bounds[ms])) for number, ms in enumerate(intervals)]
    return [_stroke(x - 34, y, x + 34, y, TARGET_COLOUR, 2, dashes="5 3") for x, y in marks]


def _line(
    scale: Scale, intervals: Sequence[int], measurements: Sequence[Mapping[str, Any]], mode: str, beside: float
) -> list[str]:
    colour = MODE_COLOURS.get(mode, TEXT_COLOUR)
    ordered = sorted(measurements, key=lambda m: -int(m["interval_ms"]))
    points = [(scale.x(intervals.index(int(m["interval_ms"]))) + beside, m["overhead"]) for m in ordered]
    path = " ".join(f"{x:.1f},{scale.y(overhead['median']):.1f}" for x, overhead in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, overhead in points:
        parts.append(_stroke(x, scale.y(overhead["low"]), x, scale.y(overhead["high"]), colour, 3))
        y = scale.y(overhead["median"])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
    return parts


def _legend(modes: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    for mode in modes:
        colour = MODE_COLOURS.get(mode, TEXT_COLOUR)
        parts.append(f'<rect x="{x:.1f}" y="34" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 45, mode.replace("_", " "), size=12))
        x += 140
    parts.append(_stroke(x, 40, x + 24, 40, TARGET_COLOUR, 2, dashes="5 3"))
    parts.append(_text(x + 30, 45, "target: at most", size=12))
    return parts


def _caption(figures: Mapping[str, Any], measurements: Sequence[Mapping[str, Any]]) -> list[str]:
    pairs = min(len(m["pairs"]) for m in measurements)
    machine = figures.get("machine", {})
    how = f"Medians of {pairs} pairs of windows without and with checkpoints, in turns; bars: quartiles"
    return [how, f"{machine['cores']} cores, {machine['cpu']}"] if machine else [how]


def _duration(ms: int) -> str:
    return f"{ms // 1_000} s" if ms % 1_000 == 0 else f"{ms} ms"


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {at} stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "start") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {at} fill="{TEXT_COLOUR}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
