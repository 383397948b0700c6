"""Numbers, sizes and times as people read them, and how runs ended."""

from __future__ import annotations

from headgate.display.text import count_text, duration_text, size_text, time_text
from headgate.model.progress import RunResult

__all__ = ["count_text", "duration_text", "result_text", "size_text", "time_text"]


def result_text(result: RunResult) -> str:
    """Return how a run ended, in one sentence."""
    ended = "drained" if result.is_drained else "finished"
    how = ended if result.is_finished else "stopped; the same command continues"
    if result.has_removed_checkpoints:
        how = "cancelled, and its checkpoints are removed,"
    elif result.is_removal_in_doubt:
        how = (
            "cancelled; it is not known whether its checkpoints are removed: the same command begins anew, or continues"
        )
    where = "" if result.is_finished or result.last_checkpoint is None else f" from checkpoint {result.last_checkpoint}"
    return (
        f"{how}{where} after {duration_text(result.duration_ms)}: {count_text(result.records_in)} records in, "
        f"{count_text(result.records_out)} out, {result.restarts} restarts"
    )
