"""Numbers, sizes and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


def count_text(number: float) -> str:
    """Return ``1234567`` as ``1,234,567``."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Return ``1 failure``, ``1,234 failures`` or ``2 batches``."""
    several = "es" if noun.endswith("ch") else "s"
    return f"{count_text(number)} {noun}{'' if number == 1 else several}"


def size_text(size_bytes: int) -> str:
    """Return a size such as ``12.3 kB``."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def time_text(wall_ms: int | None) -> str:
    """Return milliseconds since 1970 as ``2026-01-31 12:00:00.000`` in UTC; ``-`` where there is no such date."""
    if wall_ms is None:
        return "-"
    try:
        moment = datetime.fromtimestamp(wall_ms / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return "end of input" if wall_ms > 0 else "-"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{wall_ms % 1000:03d}"


def duration_text(duration_ms: int) -> str:
    """Return ``850 ms``, ``12.3 s``, ``4 min 05 s`` or ``3 h 07 min``."""
    if duration_ms < 1_000:
        return f"{duration_ms} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.1f} s"
    seconds = duration_ms // 1000
    if seconds < 3_600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3_600} h {seconds % 3_600 // 60:02d} min"
