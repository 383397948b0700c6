"""The frame of every benchmark: options in, ``Result`` out, a table for people, one JSON object for programs.

A benchmark is a module ``bench/<name>.py`` with ``NAME = "<name>"`` and ``run(options) -> Result``; ``bench/run.py``
finds and runs it. A target names a figure and its bound. It is missed when the figure is beyond the bound, absent or
not a number; it is skipped only when the benchmark says why.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import CpuMeter, cpu_seconds_of_tree, machine, percentile, spread

__all__ = [
    "CpuMeter",
    "Options",
    "Result",
    "at_least",
    "at_most",
    "bench_names",
    "cpu_seconds_of_tree",
    "machine",
    "median",
    "percentile",
    "report",
    "skipped",
    "spread",
]

DIRECTORY = Path(__file__).parent

Target = dict[str, float | str]
"""``{"at_least": x}`` or ``{"at_most": x}``, with ``"skipped": reason`` where it cannot be judged on this machine."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a benchmark is to be run."""

    quick: bool = False
    """Short runs and few sizes: to see that it works; the figures are indicative."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Free ``name=value`` pairs from the command line, known to the single benchmark."""

    def number(self, name: str, default: float, *, quick: float | None = None) -> float:
        """Return setting ``name`` as a number; without it ``default``, or ``quick`` in a quick run.

        Raises:
            ValueError: the setting is not a number.
        """
        text = self.settings.get(name)
        if text is None:
            return quick if self.quick and quick is not None else default
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"setting {name} must be a number, found {text!r}") from None

    def numbers(self, name: str, default: Sequence[int]) -> list[int]:
        """Return setting ``name``, a comma-separated list of integers, or ``default``.

        Raises:
            ValueError: the setting is not such a list.
        """
        text = self.settings.get(name)
        if text is None:
            return list(default)
        try:
            return [int(part.replace("_", "")) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"setting {name} must be integers separated by commas, found {text!r}") from None


def at_least(bound: float) -> Target:
    """Return a target that is met by figures of ``bound`` or more."""
    return {"at_least": bound}


def at_most(bound: float) -> Target:
    """Return a target that is met by figures of ``bound`` or less."""
    return {"at_most": bound}


def skipped(target: Target, reason: str) -> Target:
    """Return ``target`` marked as not judged in this run; it neither fails the benchmark nor counts as met."""
    return target | {"skipped": reason}


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark measured and what it was asked to reach."""

    figures: Mapping[str, Any]
    """Measured values by name; nested objects are allowed, targets refer to top-level numbers."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    """Bounds by name of the figure."""

    @property
    def met(self) -> bool:
        """Whether no target is missed."""
        return all(self.verdict(name) != "missed" for name in self.targets)

    def verdict(self, name: str) -> str:
        """Return "met", "missed" or "skipped" for the target of figure ``name``."""
        target = self.targets[name]
        if "skipped" in target:
            return "skipped"
        figure = self.figures.get(name)
        if isinstance(figure, bool) or not isinstance(figure, int | float) or not math.isfinite(figure):
            return "missed"
        fits = figure >= float(target.get("at_least", -math.inf)) and figure <= float(target.get("at_most", math.inf))
        return "met" if fits else "missed"

    def as_json(self, bench: str) -> str:
        """Return the one line that programs read; figures that are not finite become null."""
        line = {
            "bench": bench,
            "figures": _finite(self.figures),
            "targets": _finite(self.targets),
            "met": self.met,
        }
        return json.dumps(line, allow_nan=False)


def median(values: Sequence[float]) -> float:
    """Return the middle of ``values`` (the mean of the two middle ones for an even number).

    Raises:
        ValueError: ``values`` is empty.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def bench_names(directory: Path = DIRECTORY) -> list[str]:
    """Return the benchmarks of ``directory`` in order: modules that assign their own file name to ``NAME``.

    Modules are parsed, not imported, so that one that cannot be imported is still listed, run and reported.
    """
    return sorted(path.stem for path in directory.glob("*.py") if _assigned_name(path) == path.stem)


def report(bench: str, result: Result, console: Console | None = None) -> int:
    """Print tables and, as the last line, the JSON object; return the exit status: 1 when a target is missed."""
    console = console or Console()
    console.print(_figures_table(bench, result))
    if result.targets:
        console.print(_targets_table(result))
    # Not through rich, which would wrap and colour the line.
    print(result.as_json(bench), file=console.file, flush=True)
    return 0 if result.met else 1


def _assigned_name(path: Path) -> str | None:
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="NAME")], value=ast.Constant(value=str(name))):
                return name
            case ast.AnnAssign(target=ast.Name(id="NAME"), value=ast.Constant(value=str(name))):
                return name
    return None


def _figures_table(bench: str, result: Result) -> Table:
    table = Table(title=bench, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right", overflow="fold")
    for name, value in _leaves(result.figures):
        table.add_row(name, _shown(value))
    return table


def _targets_table(result: Result) -> Table:
    table = Table(title="targets", title_justify="left")
    for column in ("figure", "bound", "found", "verdict"):
        table.add_column(column)
    colours: dict[str, Callable[[str], str]] = {
        "met": lambda text: f"[green]{text}[/green]",
        "missed": lambda text: f"[bold red]{text}[/bold red]",
        "skipped": lambda text: f"[yellow]{text}[/yellow]",
    }
    for name, target in result.targets.items():
        bound = ", ".join(f"{kind.replace('_', ' ')} {target[kind]}" for kind in target if kind != "skipped")
        verdict = result.verdict(name)
        text = f"skipped: {target['skipped']}" if verdict == "skipped" else verdict
        table.add_row(name, bound, _shown(result.figures.get(name)), colours[verdict](text))
    return table


def _leaves(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{name}.")
        elif not isinstance(value, list):  # lists are raw runs: in the JSON, not in the table
            found.append((prefix + name, value))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
