"""What commands say to people: numbers, sizes and times, how runs ended, and all of it on its way (SE22)."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import typer

from headgate.display.text import count_text, counted, duration_text, size_text, time_text
from headgate.model.progress import RunResult
from headgate.plain_text import printable

__all__ = ["count_text", "duration_text", "result_text", "say", "size_text", "time_text", "write_lines"]


def say(text: str, *, err: bool = False, fg: str | None = None, nl: bool = True) -> None:
    """Print ``text``; see ``typer.secho``."""
    typer.secho(printable(text), err=err, fg=fg, nl=nl)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines of data to standard output: as they are, unless somebody looks at them."""
    is_shown = sys.stdout.isatty()
    sys.stdout.writelines(f"{printable(line) if is_shown else line}\n" for line in lines)


def result_text(result: RunResult) -> str:
    """Return how a run ended, in one sentence."""
    ended = "drained" if result.is_drained else "finished"
    how = ended if result.is_finished else "stopped; the same command continues"
    records = f"{counted(result.records_in, 'record')} in, {count_text(result.records_out)} out"
    if result.had_finished:
        return f"nothing to do: it had {ended} before, after {records}"
    if result.is_cancelled:
        how = "cancelled; the same command continues"
    if result.has_removed_checkpoints:
        how = "cancelled, and its checkpoints are removed,"
    elif result.is_removal_in_doubt:
        how = (
            "cancelled; it is not known whether its checkpoints are removed: the same command begins anew, or continues"
        )
    where = "" if result.is_finished or result.last_checkpoint is None else f" from checkpoint {result.last_checkpoint}"
    return f"{how}{where} after {duration_text(result.duration_ms)}: {records}, {counted(result.restarts, 'restart')}"
